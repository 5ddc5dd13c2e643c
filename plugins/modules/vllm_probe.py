#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Ask a vLLM server a question, and see that it really answers and really speculates."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_probe
short_description: Prove that a vLLM server answers
description:
  - Looks for the model in C(/v1/models), asks it one question, and reads C(/metrics) before and after.
  - C(/health) is no proof of life, since it answers 200 until the first request kills the engine. Hence the question, with a time limit.
  - When the server fails, the cause is read from its unit's journal.
options:
  url:
    description: Where the server listens, as V(http://host:port). V(0.0.0.0) and V(localhost) mean V(127.0.0.1).
    type: str
    required: true
  model:
    description: The served name; empty takes the first that the server lists.
    type: str
    default: ''
  api_key:
    description: Bearer key of the server.
    type: str
    default: ''
  mode:
    description: Ask through the chat endpoint, or for the continuation of a text (a model without chat template).
    type: str
    choices: [chat, completion]
    default: chat
  prompt:
    description: The question.
    type: str
    default: What is the capital of France? Answer in one sentence.
  max_tokens:
    description: Length of the answer, at most.
    type: int
    default: 48
  timeout_s:
    description: How long the answer may take, in seconds. The first one may compile kernels.
    type: float
    default: 180
  require_spec_decode:
    description: Fail if the server drafted nothing while it answered.
    type: bool
    default: false
  expect_acceptance:
    description:
      - Share of drafted tokens that should be accepted, between 0 and 1.
      - A draft of which nothing is accepted is an error if more than 0 is expected, and a warning if nothing is known. V(0) is for random
        weights, where it is normal.
    type: float
  unit:
    description: The systemd unit whose journal tells why the server failed; empty if there is none.
    type: str
    default: ''
attributes:
  check_mode:
    description: Asks if the server answers, and is skipped if not.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
author:
  - dgxspark.vllm authors
"""

EXAMPLES = r"""
- name: Ask the model something
  dgxspark.vllm.vllm_probe:
    url: http://127.0.0.1:8000
    model: qwen
    unit: dgxspark-vllm
    require_spec_decode: true
    expect_acceptance: 0.7
  register: probe
"""

RETURN = r"""
ok:
  description: Whether the server answered and nothing is wrong.
  type: bool
  returned: always
endpoint:
  description: Base address for OpenAI clients.
  type: str
  returned: always
  sample: http://127.0.0.1:8000/v1
model:
  description: The name that was asked.
  type: str
  returned: always
answer:
  description: The answer's text.
  type: str
  returned: always
answer_field:
  description:
    - Where the text was. V(reasoning) or V(reasoning_content) while a thinking model still thinks; otherwise V(content), V(text) or
      V(tool_calls).
  type: str
  returned: always
usage:
  description: Tokens as the server counted them.
  type: dict
  returned: always
seconds:
  description: How long the answer took.
  type: float
  returned: always
spec_decode:
  description:
    - Speculative decoding while answering. Its state is V(off) (the server has no such counters), V(unknown) (nothing was drafted, or
      C(/metrics) cannot be read), V(dead_draft) (nothing was accepted) or V(active).
  type: dict
  returned: always
  sample: {state: active, drafts: 25, drafted: 50, accepted: 34, per_position: [0.8, 0.56], acceptance: 0.68}
problems:
  description: What is wrong, warnings included.
  type: list
  elements: dict
  returned: always
diagnosis:
  description: What the log says went wrong, if the server failed.
  type: list
  elements: dict
  returned: always
report:
  description: The result in lines for a person.
  type: list
  elements: str
  returned: always
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.log_classifier import Diagnosis, diagnose
from ..module_utils.problems import Problem, describe, errors, problem
from ..module_utils.service_state import DEATH_LINES, EVIDENCE_LINES, UnitState, death_problems, read_journal, read_unit, runner
from ..module_utils.vllm_http import Reply, local_url, printable, request
from ..module_utils.vllm_log import mask, tail
from ..module_utils.vllm_metrics import Counters, SpecDecode, counters, samples, spec_decode, wedged

SHORT_TIMEOUT_S = 10.0
# An engine's death reaches the journal, and the process ends, within some two seconds of the failed request.
DEATH_WAIT_S = 8.0
DEATH_POLL_S = 0.5
# The counters are brought up to date after the answer has gone out; and a scrape may fail once.
METRICS_TRIES = 4
METRICS_PAUSE_S = 0.5
# A short answer tells little about a rate; less than half of what is expected tells enough.
LOW_ACCEPTANCE = 0.5
LOW_ACCEPTANCE_DRAFTED = 20
DEGENERATE_LENGTH = 15
DEGENERATE_ALPHABET = 2


def message_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a completion that holds its text; None if this is no completion."""
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return None
    message = choice.get("message")
    if isinstance(message, dict):
        return message
    return choice if "text" in choice else None


def visible(text: Any) -> bool:
    """Whether there is anything to read: neither blanks nor control characters nor characters of no width are."""
    return isinstance(text, str) and any(c.isprintable() and not c.isspace() for c in text)


def answer_of(message: dict[str, Any]) -> tuple[str, str]:
    """(text, field) of a message; a thinking model that has not come to its answer has its text in the reasoning field."""
    for field in ("content", "reasoning", "reasoning_content", "text"):
        if visible(message.get(field)):
            return message[field], field
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        return str(calls), "tool_calls"
    return "", ""


def degenerate(text: str) -> bool:
    """One character or two over and over, or bytes that are no text: what broken kernels or weights answer."""
    dense = "".join(text.split())
    if len(text.strip()) < DEGENERATE_LENGTH:
        return False
    return len(set(dense)) <= DEGENERATE_ALPHABET or 2 * dense.count("\ufffd") > len(dense)


def judge_answer(text: str, usage: dict[str, Any]) -> list[Problem]:
    """What is wrong with the answer itself."""
    counted = usage.get("completion_tokens")
    tokens = counted if isinstance(counted, int) else 0
    if not text:
        severity: Any = "warning" if tokens else "error"
        return [
            problem("empty_answer", f"no text in the answer ({tokens} tokens)", "raise max_tokens, or look at the chat template", severity)
        ]
    if degenerate(text):
        remedy = "kernels or weights are broken: check the checkpoint, the image profile and the attention backend"
        return [problem("degenerate_answer", f"the answer is no language: {text.strip()[:40]!a}", remedy, "warning")]
    return []


def judge_spec_decode(spec: SpecDecode, required: bool, expected: float | None) -> list[Problem]:
    """What is wrong with speculative decoding. expected: share of accepted tokens, None if unknown."""
    state = spec["state"]
    if required and state in ("off", "unknown"):
        seen = "/metrics has no vllm:spec_decode_ counters" if state == "off" else "the answer was made without a single draft"
        remedy = (
            "the server runs without speculative decoding: check that engine_args has speculative-config with method mtp, that the"
            " checkpoint's index lists the MTP tensors (checkpoint.mtp: true), and that disable-log-stats is not set"
        )
        return [problem("spec_decode_off", seen, remedy)]
    if state == "dead_draft":
        evidence = f"{spec['drafted']} tokens drafted, none accepted"
        remedy = (
            "check that the quantisation config leaves mtp.* unquantised and that the checkpoint is complete; normal for random weights"
        )
        return [problem("dead_draft", evidence, remedy, "error" if expected else "warning")]
    rate = spec["acceptance"]
    if rate is not None and spec["drafted"] >= LOW_ACCEPTANCE_DRAFTED and rate < LOW_ACCEPTANCE * (expected or 0):
        evidence = f"{100 * rate:.0f} % of {spec['drafted']} drafted tokens accepted, {100 * (expected or 0):.0f} % expected"
        return [problem("low_acceptance", evidence, "one short answer is a small sample: measure with the benchmark", "warning")]
    return []


def judge_metrics(failure: str, required: bool) -> list[Problem]:
    """Nothing is known of the drafts, which is no proof that there were none. failure: how the request for /metrics ended."""
    remedy = "the server answers, but its drafts cannot be counted: see what answers at /metrics (a proxy, another program), and its log"
    return [problem("metrics_unreadable", f"GET /metrics: {failure}", remedy, "error" if required else "warning")]


def report(endpoint: str, model: str, text: str, spec: SpecDecode, metrics_failure: str = "") -> list[str]:
    """The result for a person."""
    if metrics_failure:
        decoding = f"unknown, /metrics cannot be read ({metrics_failure})"
    elif spec["state"] == "off":
        decoding = "off"
    else:
        share = f" ({100 * spec['acceptance']:.0f} %)" if spec["acceptance"] else ""
        decoding = f"{spec['drafts']} drafts, {spec['drafted']} tokens drafted, {spec['accepted']} accepted{share}"
    answer = printable(" ".join(text.split()))
    return [f"endpoint {endpoint}", f"model {printable(model)}", f"answer: {answer}", f"speculative decoding: {decoding}"]


class Probe:
    """One question to one server."""

    def __init__(self, module: AnsibleModule) -> None:
        params = module.params
        self.module, self.params = module, params
        self.run = runner(module)
        try:
            self.url = local_url(params["url"])
        except ValueError as exc:
            module.fail_json(msg=f"url {params['url']!r} is no URL: {exc}", problems=[])
        self.result: dict[str, Any] = {
            "changed": False,
            "ok": False,
            "endpoint": f"{self.url}/v1",
            "model": params["model"],
            "answer": "",
            "answer_field": "",
            "usage": {},
            "seconds": 0.0,
            "spec_decode": spec_decode(None, None),
            "problems": [],
            "diagnosis": [],
            "report": [],
        }
        # How the last scrape that failed for good ended.
        self.metrics_failure = ""
        self.unit = read_unit(self.run, params["unit"]) if params["unit"] else UnitState("")

    def get(self, path: str) -> Reply:
        return request(f"{self.url}{path}", api_key=self.params["api_key"], timeout_s=SHORT_TIMEOUT_S)

    def ask(self) -> None:
        self.find_model()
        before = self.scrape()
        body = self.complete(before)
        text, field = answer_of(message_of(body) or {})
        usage = body.get("usage") if isinstance(body.get("usage"), dict) else {}
        spec = self.measured(before)
        required = self.params["require_spec_decode"]
        if self.metrics_failure:
            drafting = judge_metrics(self.metrics_failure, required)
        else:
            drafting = judge_spec_decode(spec, required, self.params["expect_acceptance"])
        found = judge_answer(text, usage) + drafting
        self.result.update(
            answer=text,
            answer_field=field,
            usage=usage,
            spec_decode=spec,
            problems=found,
            report=report(self.result["endpoint"], self.result["model"], text, spec, self.metrics_failure),
            ok=not errors(found),
        )
        if not self.result["ok"]:
            self.fail(found, f"{self.url} answers, but not as it should")
        expected_so = self.params["expect_acceptance"] == 0
        for item in found:
            if expected_so and item["class"] == "dead_draft":
                continue
            self.module.warn(f"{item['class']}: {item['evidence']}; {item['remedy']}")

    def find_model(self) -> None:
        reply = self.get("/v1/models")
        if not reply.ok:
            self.refuse(reply, "GET /v1/models")
        body = reply.json()
        data = body.get("data") if isinstance(body, dict) else None
        items = [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
        names = [item["id"] for item in items if isinstance(item.get("id"), str)]
        wanted = self.params["model"] or next(iter(names), "")
        self.result["model"] = wanted
        if not wanted or wanted not in names:
            listed = printable(", ".join(names))[:400] or "no model"
            evidence = f"{self.url}/v1/models lists {listed}, not {printable(wanted) or 'any'}"
            self.fail(
                [problem("model_name", evidence, "ask by that name, or set served-model-name in engine_args")], "The model is not served"
            )

    def complete(self, before: Counters | None) -> dict[str, Any]:
        chat = self.params["mode"] == "chat"
        question: dict[str, Any] = (
            {"messages": [{"role": "user", "content": self.params["prompt"]}]} if chat else {"prompt": self.params["prompt"]}
        )
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {"model": self.result["model"], "max_tokens": self.params["max_tokens"], "temperature": 0, **question}
        began = time.monotonic()
        reply = request(f"{self.url}{path}", api_key=self.params["api_key"], body=body, timeout_s=self.params["timeout_s"])
        self.result["seconds"] = round(time.monotonic() - began, 2)
        if reply.timed_out:
            self.fail_wedged(reply, before)
        value = reply.json()
        if not reply.ok or not isinstance(value, dict):
            self.refuse(reply, f"POST {path}")
        if message_of(value) is None:
            remedy = "the server took the question and gave no completion: read its log, and check that a vLLM and no other program listens"
            evidence = f"POST {path}: HTTP {reply.status} without a choice that holds an answer: {reply.quote()}"
            self.fail([problem("bad_answer", evidence, remedy)], "The answer is none")
        return value

    def scrape(self) -> Counters | None:
        """What /metrics counts; None if it cannot be read, even after a little while."""
        for attempt in range(METRICS_TRIES):
            if attempt:
                time.sleep(METRICS_PAUSE_S)
            reply = self.get("/metrics")
            # A page of another kind counts nothing, which must not look like a server that drafts nothing.
            if reply.ok and (not reply.text.strip() or any(samples(reply.text))):
                return counters(reply.text)
            if reply.timed_out:
                break
        self.metrics_failure = reply.describe()
        return None

    def measured(self, before: Counters | None) -> SpecDecode:
        """The drafts of the answer: nothing is known of them unless there are counters of both before and after."""
        if before is None:
            return spec_decode(None, None)
        spec = spec_decode(before, self.scrape())
        for _ in range(METRICS_TRIES - 1):
            if spec["state"] != "unknown" or self.metrics_failure:
                break
            time.sleep(METRICS_PAUSE_S)
            spec = spec_decode(before, self.scrape())
        return spec

    def refuse(self, reply: Reply, what: str) -> None:
        """The server did not do as asked: its fault, ours, or its end."""
        evidence = f"{what}: {reply.describe()}"
        if reply.status in (401, 403):
            self.fail([problem("api_key", evidence, "give the server's key: vllm_api_key")], "The server wants another key")
        if reply.ok:
            self.fail(
                [problem("not_vllm", f"{what}: the answer is no JSON", "another program answers there: ss -ltnp names it")], "No vLLM"
            )
        if reply.status and reply.status < 500:
            self.fail(
                [problem("bad_request", evidence, "the server does not take this request: check model name and chat template")], "Refused"
            )
        if self.module.check_mode:
            self.fail([], "nothing answers there" if not reply.status else evidence)
        self.fail_dead(evidence)

    def fail_dead(self, evidence: str) -> None:
        """HTTP 5xx or no connection: the engine has probably died; its log tells why as soon as it is written."""
        if not self.params["unit"]:
            self.fail([problem("server_failed", evidence, "read the server's log")], "The server failed")
        deadline = time.monotonic() + DEATH_WAIT_S
        while True:
            journal = read_journal(self.run, self.unit.name, self.unit.invocation, lines=DEATH_LINES)
            diagnosis = diagnose(journal.text)
            latest = read_unit(self.run, self.params["unit"])
            gone = not latest.alive or latest.invocation != self.unit.invocation
            if (diagnosis and gone) or time.monotonic() > deadline:
                break
            time.sleep(DEATH_POLL_S)
        first = problem("server_failed", evidence, "the cause is in the server's log, see the other problems")
        causes = death_problems(diagnosis, latest, tail(journal.text, EVIDENCE_LINES))
        self.fail([*causes, first], f"{self.unit.name} was asked for an answer and failed", diagnosis)

    def fail_wedged(self, reply: Reply, before: Counters | None) -> None:
        after = self.scrape()
        health = self.get("/health").describe()
        restart = f"start it again: systemctl restart {self.params['unit'] or 'UNIT'}"
        if before is None or after is None:
            evidence = f"{reply.describe()}; /health: {health}; /metrics: {self.metrics_failure}"
            remedy = f"see in the server's log if it is at work, then raise the time limit; else {restart}"
            self.fail([problem("no_answer", evidence, remedy)], "No answer in time")
            return
        moved = f"{after.generation_tokens - before.generation_tokens:.0f} tokens generated meanwhile, {after.running:.0f} requests running"
        evidence = f"{reply.describe()}; /health: {health}; {moved}"
        if after.generation_tokens > before.generation_tokens and not wedged(before, after):
            found = problem("slow_answer", evidence, "the server is at work: wait for its other requests, or raise the time limit")
        else:
            found = problem("wedged", evidence, f"the engine is stuck although /health answers; {restart}")
        self.fail([found], "No answer in time")

    def fail(self, problems: list[Problem], headline: str, diagnosis: list[Diagnosis] | None = None) -> None:
        if self.module.check_mode:
            # What runs now is not what would run then.
            self.module.exit_json(**{**self.result, "skipped": True, "msg": f"would ask {self.url} ({headline})"})
        self.result.update(problems=problems, diagnosis=diagnosis or [], ok=False)
        self.module.fail_json(msg=mask(describe(problems, headline)), **self.result)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "model": {"type": "str", "default": ""},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "mode": {"type": "str", "choices": ["chat", "completion"], "default": "chat"},
            "prompt": {"type": "str", "default": "What is the capital of France? Answer in one sentence."},
            "max_tokens": {"type": "int", "default": 48, "no_log": False},
            "timeout_s": {"type": "float", "default": 180},
            "require_spec_decode": {"type": "bool", "default": False},
            "expect_acceptance": {"type": "float"},
            "unit": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    probe = Probe(module)
    probe.ask()
    module.exit_json(**probe.result)


if __name__ == "__main__":
    main()
