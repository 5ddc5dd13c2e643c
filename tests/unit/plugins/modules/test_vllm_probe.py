# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The question: what a server may answer, and every way in which it may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dgxspark.vllm.plugins.modules import vllm_probe
from fake_node import FakeNode, ReplyOf, hang_up, http_server, in_turn, reply

MODELS = reply(200, {"data": [{"id": "qwen"}, {"id": "other"}]})
CHAT = "/v1/chat/completions"
DEAD_ENGINE = [
    "(Worker pid=9) ERROR 11-29 20:50:39 [x.py:1063]   precopy_mamba_align_fused_kernel[grid](",
    "(Worker pid=9) ERROR 11-29 20:50:39 [x.py:1063] TypeError: 'function' object is not subscriptable",
    "(EngineCore pid=8) ERROR 11-29 20:50:39 [core.py:1512] EngineCore encountered a fatal error.",
]


def answer(**message: Any) -> ReplyOf:
    return reply(200, {"choices": [{"message": {"role": "assistant", **message}}], "usage": {"completion_tokens": 48, "prompt_tokens": 20}})


def metrics(drafts: int, drafted: int, accepted: int, generated: int = 0, running: int = 0) -> ReplyOf:
    return reply(
        200,
        f"vllm:spec_decode_num_drafts_total 1{drafts:04}\nvllm:spec_decode_num_draft_tokens_total 1{drafted:04}\n"
        f"vllm:spec_decode_num_accepted_tokens_total 1{accepted:04}\nvllm:generation_tokens_total 1{generated:04}\n"
        f"vllm:num_requests_running {running}\n",
    )


PLAIN = reply(200, "vllm:generation_tokens_total 5\n")

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode()
    monkeypatch.setattr(AnsibleModule, "run_command", lambda self, args, **kwargs: fake.run_command(self, args, **kwargs))
    monkeypatch.setattr(vllm_probe, "DEATH_WAIT_S", 0.3)
    monkeypatch.setattr(vllm_probe, "DEATH_POLL_S", 0.02)
    monkeypatch.setattr(vllm_probe, "METRICS_PAUSE_S", 0.01)
    return fake


@pytest.fixture
def ask(node: FakeNode, run_module: Any) -> Ask:
    def call(routes: dict[str, ReplyOf], *, check: bool = False, **args: Any) -> dict[str, Any]:
        with http_server({"/v1/models": MODELS, "/metrics": PLAIN, **routes}) as (url, seen):
            result: dict[str, Any] = run_module(vllm_probe.main, {"url": url, "model": "qwen", "unit": "vllm", **args}, check=check)
        result["seen"] = seen
        return result

    return call


def classes(result: dict[str, Any]) -> list[str]:
    return [p["class"] for p in result["problems"]]


@pytest.mark.parametrize(
    ("message", "text", "field"),
    [
        ({"content": "Paris."}, "Paris.", "content"),
        ({"content": None, "reasoning": "Let me think"}, "Let me think", "reasoning"),
        ({"content": None, "reasoning_content": "Let me think"}, "Let me think", "reasoning_content"),
        ({"content": "", "reasoning": "hm"}, "hm", "reasoning"),
        ({"content": None, "tool_calls": [{"function": {"name": "f"}}]}, "[{'function': {'name': 'f'}}]", "tool_calls"),
    ],
)
def test_an_answer_wherever_it_stands(ask: Ask, message: dict[str, Any], text: str, field: str) -> None:
    result = ask({CHAT: answer(**message)}, api_key="k3y-value")
    assert (result["ok"], result["answer"], result["answer_field"]) == (True, text, field)
    assert result["changed"] is False
    assert result["usage"]["completion_tokens"] == 48
    assert result["spec_decode"]["state"] == "off"
    assert result["report"] == [
        f"endpoint {result['endpoint']}",
        "model qwen",
        f"answer: {text}",
        "speculative decoding: off",
    ]
    question = next(s for s in result["seen"] if s["path"] == CHAT)
    assert question["body"]["temperature"] == 0
    assert question["body"]["max_tokens"] == 48
    assert all(s["headers"]["Authorization"] == "Bearer k3y-value" for s in result["seen"])


def test_completion_mode(ask: Ask) -> None:
    result = ask(
        {"/v1/completions": reply(200, {"choices": [{"text": " Paris"}], "usage": {}})}, mode="completion", prompt="The capital is"
    )
    assert (result["answer"], result["answer_field"]) == (" Paris", "text")
    assert next(s for s in result["seen"] if s["path"] == "/v1/completions")["body"]["prompt"] == "The capital is"


def test_drafts_are_counted_between_the_two_scrapes(ask: Ask) -> None:
    routes = {CHAT: answer(content="x"), "/metrics": in_turn(metrics(5, 10, 3), metrics(30, 60, 37))}
    result = ask(routes, require_spec_decode=True, expect_acceptance=0.7)
    assert result["ok"]
    assert result["spec_decode"] == {"state": "active", "drafts": 25, "drafted": 50, "accepted": 34, "per_position": [], "acceptance": 0.68}
    assert result["report"][-1] == "speculative decoding: 25 drafts, 50 tokens drafted, 34 accepted (68 %)"


def test_counters_that_come_late_are_waited_for(ask: Ask) -> None:
    routes = {CHAT: answer(content="x"), "/metrics": in_turn(metrics(5, 10, 3), metrics(5, 10, 3), metrics(30, 60, 37))}
    assert ask(routes, require_spec_decode=True)["spec_decode"]["drafts"] == 25


@pytest.mark.parametrize(
    ("scrapes", "required", "expected", "name", "failed"),
    [
        (in_turn(PLAIN), True, 0, "spec_decode_off", True),
        (in_turn(PLAIN), False, 0, None, False),
        (in_turn(metrics(5, 10, 3)), True, 0, "spec_decode_off", True),
        (in_turn(metrics(5, 10, 3)), False, 0, None, False),
        (reply(404, ""), True, 0, "metrics_unreadable", True),
        (reply(404, ""), False, None, "metrics_unreadable", False),
        (reply(500, "oops"), True, None, "metrics_unreadable", True),
        (reply(200, "<html>hello</html>"), False, None, "metrics_unreadable", False),
        (hang_up, False, None, "metrics_unreadable", False),
        (reply(200, ""), True, None, "spec_decode_off", True),
        (in_turn(metrics(5, 10, 3), metrics(30, 60, 3)), True, 0, "dead_draft", False),
        (in_turn(metrics(5, 10, 3), metrics(30, 60, 3)), True, None, "dead_draft", False),
        (in_turn(metrics(5, 10, 3), metrics(30, 60, 8)), True, None, None, False),
        (in_turn(metrics(5, 10, 3), metrics(30, 60, 3)), True, 0.7, "dead_draft", True),
        (in_turn(metrics(5, 10, 3), metrics(30, 60, 8)), True, 0.7, "low_acceptance", False),
        (in_turn(metrics(5, 10, 3), metrics(30, 60, 8)), True, 0, None, False),
    ],
)
def test_speculative_decoding_judged(
    ask: Ask, scrapes: ReplyOf, required: bool, expected: float | None, name: str | None, failed: bool
) -> None:
    result = ask({CHAT: answer(content="x"), "/metrics": scrapes}, require_spec_decode=required, expect_acceptance=expected)
    assert classes(result) == ([name] if name else [])
    assert bool(result.get("failed")) is failed
    assert result["ok"] is not failed
    assert all(p["remedy"] for p in result["problems"])


@pytest.mark.parametrize(
    ("failure", "evidence"),
    [
        (reply(500, {"error": {"message": "EngineCore encountered an issue. See stack trace (above)"}}), "HTTP 500 EngineCore"),
        (reply(503, ""), "HTTP 503"),
        (hang_up, "RemoteDisconnected"),
    ],
)
def test_an_engine_that_dies_of_the_question(ask: Ask, node: FakeNode, failure: ReplyOf, evidence: str) -> None:
    looks = []

    def later(fake: FakeNode) -> None:
        looks.append(1)
        if len(looks) == 3:
            fake.log(*DEAD_ENGINE)
            fake.active, fake.sub = "inactive", "dead"

    node.on_show = later
    result = ask({CHAT: failure})
    assert result["failed"] is True
    assert classes(result) == ["prefix_caching_hybrid", "server_failed"]
    assert "enable-prefix-caching: false" in result["msg"]
    assert evidence in result["msg"]
    assert result["diagnosis"][0]["class"] == "prefix_caching_hybrid"


@pytest.mark.parametrize(
    ("line", "name", "remedy"),
    [
        (
            "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in config.cpp.cxx: (None, 'g++')",
            "no_cxx_compiler",
            "TORCHDYNAMO_DISABLE=1",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory.", "gpu_oom", "gpu-memory-utilization"),
    ],
)
def test_other_causes(ask: Ask, node: FakeNode, line: str, name: str, remedy: str) -> None:
    node.log(line)
    node.active = "failed"
    result = ask({CHAT: reply(500, "")})
    assert classes(result)[0] == name
    assert remedy in result["msg"]


def test_a_death_without_a_known_cause_still_shows_the_log(ask: Ask, node: FakeNode) -> None:
    node.log("all is well", "and then nothing")
    result = ask({CHAT: reply(500, "")})
    assert classes(result) == ["server_died", "server_failed"]
    assert "and then nothing" in result["msg"]


def test_the_log_of_the_run_that_was_asked_is_read(ask: Ask, node: FakeNode) -> None:
    node.log("OSError: [Errno 28] No space left on device")

    def restarted(fake: FakeNode) -> None:
        if len(fake.calls) > 1:
            fake.invocation = "b2"

    node.on_show = restarted
    node.logs["b2"] = ["torch.OutOfMemoryError: CUDA out of memory."]
    assert classes(ask({CHAT: reply(500, "")}))[0] == "disk_full"


@pytest.mark.parametrize(
    ("routes", "name", "text"),
    [
        ({"/v1/models": reply(401, {"error": "Unauthorized"})}, "api_key", "401"),
        ({"/v1/models": reply(200, {"data": [{"id": "/model"}]})}, "model_name", "lists /model, not qwen"),
        ({"/v1/models": reply(200, {"data": []})}, "model_name", "no model"),
        ({"/v1/models": reply(200, "[1]")}, "model_name", "no model"),
        ({"/v1/models": reply(200, {"data": [7, None]})}, "model_name", "no model"),
        ({CHAT: reply(400, {"error": {"message": "no chat template"}})}, "bad_request", "no chat template"),
        ({CHAT: reply(404, {"error": {"message": "The model does not exist."}})}, "bad_request", "does not exist"),
    ],
)
def test_refusals(ask: Ask, routes: dict[str, ReplyOf], name: str, text: str) -> None:
    result = ask(routes)
    assert classes(result) == [name]
    assert text in result["msg"]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"choices": [{"message": {"content": None}}], "usage": {"completion_tokens": 0}}, "empty_answer"),
        ({"choices": [{"message": {"content": " \n\t"}}], "usage": {"completion_tokens": "\u001b[2J"}}, "empty_answer"),
        ({"choices": [{"message": {}}], "usage": []}, "empty_answer"),
        ({"choices": []}, "bad_answer"),
        ({"choices": None}, "bad_answer"),
        ({"choices": {"0": {"message": {"content": "x"}}}}, "bad_answer"),
        ({"choices": [None]}, "bad_answer"),
        ({"choices": ["Paris"]}, "bad_answer"),
        ({"choices": [{}], "usage": {"completion_tokens": 48}}, "bad_answer"),
        ({"choices": [{"message": "Paris"}]}, "bad_answer"),
        ({}, "bad_answer"),
        ({"error": {"message": "engine dead", "code": 500}}, "bad_answer"),
    ],
)
def test_no_answer_at_all_is_an_error(ask: Ask, body: dict[str, Any], name: str) -> None:
    result = ask({CHAT: reply(200, body)})
    assert result["failed"] is True
    assert classes(result) == [name]
    assert "\x1b" not in result["msg"]


@pytest.mark.parametrize(
    ("body", "quoted"),
    [
        ({"error": {"message": "out of \x1b[2Jblocks"}}, r"answer: out of \x1b[2Jblocks"),
        ({"error": "no\nmore"}, "answer: no more"),
        ({"detail": "Not here"}, "answer: Not here"),
        ({"choices": [], "x": "y" * 300}, 'answer: {"choices": [], "x": "yyy'),
    ],
)
def test_a_bad_answer_is_quoted(ask: Ask, body: dict[str, Any], quoted: str) -> None:
    evidence = ask({CHAT: reply(200, body)})["problems"][0]["evidence"]
    assert quoted in evidence
    assert len(evidence) < 200


@pytest.mark.parametrize("text", [" ", "\n\n \t", "\u3000\u00a0", "\u200b\ufeff", "\x00\x07"])
def test_blanks_are_no_text(ask: Ask, text: str) -> None:
    result = ask({CHAT: answer(content=text)})
    assert (result["answer"], classes(result), result["problems"][0]["severity"]) == ("", ["empty_answer"], "warning")
    result = ask({CHAT: answer(content=text, reasoning="hm")})
    assert (result["ok"], result["answer"], result["answer_field"], classes(result)) == (True, "hm", "reasoning", [])


@pytest.mark.parametrize("failure", [reply(404, ""), reply(500, {"error": {"message": "oops"}}), hang_up, reply(200, "<html>")])
@pytest.mark.parametrize("first", [True, False])
def test_a_scrape_that_fails_is_no_scrape_of_zeros(ask: Ask, failure: ReplyOf, first: bool) -> None:
    tries = vllm_probe.METRICS_TRIES
    scrapes = in_turn(*[failure] * tries, metrics(30, 60, 37)) if first else in_turn(metrics(5, 10, 3), *[failure] * tries)
    result = ask({CHAT: answer(content="x"), "/metrics": scrapes})
    assert (result["ok"], classes(result)) == (True, ["metrics_unreadable"])
    assert (result["spec_decode"]["state"], result["spec_decode"]["drafted"]) == ("unknown", 0)
    assert result["report"][-1].startswith("speculative decoding: unknown, /metrics cannot be read (")


@pytest.mark.parametrize("status", [404, 500, 503])
def test_the_status_of_metrics_is_told(ask: Ask, status: int) -> None:
    result = ask({CHAT: answer(content="x"), "/metrics": reply(status, "")}, require_spec_decode=True)
    assert f"ERROR metrics_unreadable: GET /metrics: HTTP {status}" in result["msg"]


def test_a_scrape_may_fail_for_a_moment(ask: Ask) -> None:
    routes = {CHAT: answer(content="x"), "/metrics": in_turn(reply(503, ""), metrics(5, 10, 3), reply(503, ""), metrics(30, 60, 37))}
    result = ask(routes, require_spec_decode=True)
    assert (result["ok"], result["spec_decode"]["drafts"], classes(result)) == (True, 25, [])


@pytest.mark.parametrize(("expected", "shown"), [(None, ["dead_draft"]), (0, [])])
def test_random_weights_alarm_nobody(ask: Ask, monkeypatch: pytest.MonkeyPatch, expected: float | None, shown: list[str]) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda self, text, **kwargs: warnings.append(text))
    routes = {CHAT: answer(content="x"), "/metrics": in_turn(metrics(5, 10, 3), metrics(30, 60, 3))}
    result = ask(routes, require_spec_decode=True, expect_acceptance=expected)
    assert (result["ok"], classes(result)) == (True, ["dead_draft"])
    assert [text.split(":")[0] for text in warnings] == shown
    assert result["report"][-1] == "speculative decoding: 25 drafts, 50 tokens drafted, 0 accepted"


def test_a_silly_answer_is_a_warning(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda self, text, **kwargs: warnings.append(text))
    result = ask({CHAT: answer(content="!" * 48)})
    assert (result["ok"], classes(result)) == (True, ["degenerate_answer"])
    assert [text.split(":")[0] for text in warnings] == ["degenerate_answer"]


@pytest.mark.parametrize(
    ("text", "silly"),
    [
        ("!" * 15, True),
        ("! " * 8, True),
        ("ab" * 8, True),
        ("\n0\n0" * 6, True),
        ("\ufffd" * 20, True),
        ("\ufffd" * 9 + "abc def", True),
        ("\ufffd" * 7 + "abcdefgh", False),
        ("!" * 14, False),
        ("abc" * 8, False),
        ("Paris", False),
        ("東京は日本の首都です。人口は約千四百万人です。", False),
        ("!nesr&nesr&I oPrhVAasfhfiysiwlnhy rsglidt>", False),
    ],
)
def test_degenerate(text: str, silly: bool) -> None:
    assert vllm_probe.degenerate(text) is silly


def test_lone_surrogates_in_an_answer_are_replaced(ask: Ask) -> None:
    body = r'{"choices": [{"message": {"content": "Par\ud800is"}}], "usage": {"x\udfff": 1}}'
    result = ask({CHAT: reply(200, body)})
    assert (result["ok"], result["answer"], result["usage"]) == (True, "Par\ufffdis", {"x\ufffd": 1})


@pytest.mark.parametrize("path", ["/v1/models", CHAT])
@pytest.mark.parametrize("body", ["[" * 200_000, '{"choices":' * 3000 + "1" + "}" * 3000])
def test_nesting_beyond_all_reason_is_a_bad_reply(ask: Ask, path: str, body: str) -> None:
    result = ask({path: reply(200, body)})
    assert classes(result) == ["not_vllm" if path == CHAT else "model_name"]


def test_positions_beyond_all_reason_are_left_out(ask: Ask) -> None:
    odd = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{"9" * 5000}"}} 3\n'
    assert ask({CHAT: answer(content="x"), "/metrics": reply(200, odd + "vllm:x 1\n")})["ok"]


def test_a_server_cannot_write_to_the_terminal(ask: Ask) -> None:
    evil = "m\x1b[2J\u202e"
    models = reply(200, {"data": [{"id": evil}]})
    result = ask({"/v1/models": models})
    assert r"lists m\x1b[2J\u202e, not qwen" in result["msg"]
    result = ask({"/v1/models": models, CHAT: answer(content="Par\x1b]0;x\x07is")}, model="")
    assert (result["ok"], result["model"]) == (True, evil)
    assert result["report"][1:3] == [r"model m\x1b[2J\u202e", r"answer: Par\x1b]0;x\x07is"]
    assert next(s for s in result["seen"] if s["path"] == CHAT)["body"]["model"] == evil


@pytest.mark.parametrize("body", ["<html>", "[1]", ""])
def test_what_is_no_answer_of_a_vllm(ask: Ask, body: str) -> None:
    assert classes(ask({CHAT: reply(200, body)})) == ["not_vllm"]


@pytest.mark.parametrize(
    ("scrapes", "name"),
    [
        (in_turn(metrics(1, 1, 1, generated=1000, running=0), metrics(1, 1, 1, generated=1000, running=1)), "wedged"),
        (in_turn(metrics(1, 1, 1, generated=1000, running=2), metrics(1, 1, 1, generated=1400, running=2)), "slow_answer"),
        (in_turn(*[reply(500, "")] * vllm_probe.METRICS_TRIES, metrics(1, 1, 1, generated=1400, running=2)), "no_answer"),
        (in_turn(metrics(1, 1, 1, generated=1000, running=2), reply(500, "")), "no_answer"),
    ],
)
def test_no_answer_in_time_although_health_is_good(ask: Ask, scrapes: ReplyOf, name: str) -> None:
    result = ask({CHAT: reply(200, delay=1.0), "/metrics": scrapes, "/health": reply(200)}, timeout_s=0.2)
    assert classes(result) == [name]
    assert "/health: HTTP 200" in result["msg"]


@pytest.mark.parametrize(
    "routes",
    [{"/v1/models": hang_up}, {"/v1/models": reply(200, {"data": [{"id": "old"}]})}, {CHAT: reply(500, "")}, {CHAT: reply(200, {})}],
)
def test_check_mode_never_fails(ask: Ask, routes: dict[str, ReplyOf]) -> None:
    result = ask(routes, check=True)
    assert result["skipped"] is True
    assert result["msg"].startswith("would ask")


def test_check_mode_asks_a_server_that_is_there(ask: Ask) -> None:
    result = ask({CHAT: answer(content="Paris.")}, check=True)
    assert (result["ok"], result.get("skipped")) == (True, None)


def test_nobody_listens_and_there_is_no_unit(run_module: Any, node: FakeNode) -> None:
    result = run_module(vllm_probe.main, {"url": "http://127.0.0.1:1", "model": "qwen"})
    assert classes(result) == ["server_failed"]
    assert "refused" in result["msg"]
    assert node.calls == []


def test_the_key_is_nowhere_in_the_result(ask: Ask, node: FakeNode) -> None:
    node.log("non-default args: {'api_key': ['s3cr3t-key-1']}")
    result = ask({CHAT: reply(500, {"error": "key s3cr3t-key-1"})}, api_key="s3cr3t-key-1")
    result.pop("seen")
    assert "s3cr3t" not in str(result)
