#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Wait until a vLLM instance is ready, or say at once why it will not be."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_ready
short_description: Wait until a vLLM instance is ready
description:
  - Follows the start of a vLLM server through its unit's journal and its C(/health), and shows the stage it is in while it waits.
  - Fails the moment the unit ends or is started anew, whatever its exit status, with the cause that its log names.
  - Fails when a stage shows no progress for a set time, when the whole takes too long, and when another process answers on the port.
  - The action plugin calls the module again and again until the instance is ready; one call looks for O(wait_s) at most.
options:
  unit:
    description: Name of the systemd unit, with or without C(.service).
    type: str
    required: true
  url:
    description: Where the server listens, as V(http://host:port). V(0.0.0.0) and V(localhost) mean V(127.0.0.1).
    type: str
    required: true
  container:
    description: Name of the container in which the unit runs the server; empty if there is none.
    type: str
    default: ''
  api_key:
    description: Bearer key of the server.
    type: str
    default: ''
  wait_s:
    description: How long one call may look, in seconds.
    type: float
    default: 4
  ready_timeout_s:
    description: How long the whole wait may take, in seconds. The first start of a 120 B model with compilation takes some 14 minutes.
    type: int
    default: 1500
  stall_timeout_s:
    description: How long a stage may show no progress (no new log line, no further shard), in seconds.
    type: int
    default: 900
  state:
    description: What the last call found; set by the action plugin only.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Looks once, waits for nothing and never fails.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
author:
  - dgxspark.vllm authors
"""

EXAMPLES = r"""
- name: Wait for the model
  dgxspark.vllm.vllm_ready:
    unit: dgxspark-vllm
    container: dgxspark-vllm
    url: http://127.0.0.1:8000
    ready_timeout_s: 1500
    stall_timeout_s: 900
  register: ready
"""

RETURN = r"""
ready:
  description: Whether the instance answers.
  type: bool
  returned: always
stage:
  description: The stage that the start has come to.
  type: str
  returned: always
  sample: loading weights
seconds:
  description: Seconds from the start of the unit to readiness, or to now.
  type: float
  returned: always
stages:
  description: The stages gone through and how long each took. Empty if the journal no longer holds the start.
  type: list
  elements: dict
  returned: always
  sample: [{stage: loading weights, seconds: 585.3}, {stage: compiling, seconds: 171.0}]
diagnosis:
  description: What the log says went wrong, the root cause first.
  type: list
  elements: dict
  returned: always
problems:
  description: The same as problems, with those that no log shows.
  type: list
  elements: dict
  returned: always
log_tail:
  description: The last lines of the log, if it shows no known fault.
  type: list
  elements: str
  returned: on failure
job:
  description: How the wait goes on, for the action plugin.
  type: dict
  returned: always
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.log_classifier import Diagnosis, as_problems, diagnose, silent
from ..module_utils.problems import Problem, describe, problem
from ..module_utils.service_state import (
    EVIDENCE_LINES,
    Journal,
    UnitState,
    death_problems,
    foreign_listener,
    port_taken,
    read_journal,
    read_unit,
    runner,
)
from ..module_utils.vllm_http import Reply, local_url, request
from ..module_utils.vllm_log import READY, Stage, Tracker, is_progress, tail

POLL_S = 1.0
HEALTH_TIMEOUT_S = 3.0
# vLLM answers 503 for some 70 ms before it ends, and for ever with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH=1.
DEAD_HEALTH = 3
# A dead server's last lines and its exit status arrive a little later than the news.
SETTLE_S = 1.0


class Wait:
    """One call's share of the wait."""

    def __init__(self, module: AnsibleModule) -> None:
        params = module.params
        self.module = module
        self.run = runner(module)
        self.unit_name: str = params["unit"]
        self.container: str = params["container"]
        try:
            self.url = local_url(params["url"])
        except ValueError as exc:
            module.fail_json(msg=f"url {params['url']!r} is no URL: {exc}", problems=[])
        self.state: dict[str, Any] = dict(params["state"])
        self.tracker = Tracker(self.state.get("tracker"))
        now = time.monotonic()
        self.state.setdefault("started", now)
        self.state.setdefault("progress", now)

    def look_until(self, deadline: float) -> None:
        """Look until something is final, which does not return, or the time is up."""
        while True:
            self.look()
            if time.monotonic() + POLL_S > deadline:
                return
            time.sleep(POLL_S)

    def look(self) -> None:
        health = self.health()
        unit = read_unit(self.run, self.unit_name)
        if unit.error:
            self.fail([problem("no_systemd", unit.error, "the instance is a systemd unit: run this on the node itself")], "Cannot look")
        if not unit.exists or (not unit.alive and not unit.since):
            self.fail(self.absent(unit), "Nothing to wait for")
        self.state.setdefault("invocation", unit.invocation)
        self.state.setdefault("restarts", unit.restarts)
        if not unit.alive or unit.invocation != self.state["invocation"] or unit.restarts > self.state["restarts"]:
            self.fail_dead(unit, health)
        if health.ok:
            self.answering(unit)
        self.follow(unit)
        self.check_limits(unit, health)

    def health(self) -> Reply:
        return request(f"{self.url}/health", api_key=self.module.params["api_key"], timeout_s=HEALTH_TIMEOUT_S)

    def follow(self, unit: UnitState) -> None:
        """Take in what the log has got since the last look."""
        journal = read_journal(self.run, unit.name, unit.invocation, after=self.state.get("cursor", ""))
        self.state["cursor"] = journal.cursor
        self.tracker.begin(unit.since or time.time())
        for entry in journal.entries:
            self.tracker.feed(entry.text, entry.at)
        if any(is_progress(entry.text) for entry in journal.entries):
            self.state["progress"] = time.monotonic()

    def whole_log(self, unit: UnitState, invocation: str, until: float = 0.0) -> Journal:
        """All that a run has written, and the stages that it tells, in the place of what single looks told."""
        journal = read_journal(self.run, unit.name, invocation, until=until)
        self.tracker = Tracker()
        if journal.entries:
            first = journal.entries[0].at
            # The unit's own start is that of its present run.
            self.tracker.begin(min(first, unit.since or first) if invocation == unit.invocation else first)
        for entry in journal.entries:
            self.tracker.feed(entry.text, entry.at)
        return journal

    def answering(self, unit: UnitState) -> None:
        """/health answers 200: ready, if it is this unit that answers."""
        foreign = foreign_listener(self.run, unit, self.container, self.url)
        if foreign is not None:
            self.fail([port_taken(foreign, unit)], f"{self.url} answers, but it is not {unit.name}")
        # Of an instance that has served for weeks only the start matters, and the journal may no longer hold it.
        until = unit.since + self.module.params["ready_timeout_s"] + 60 if unit.since else 0.0
        journal = self.whole_log(unit, unit.invocation, until)
        wrong = silent(diagnose(journal.text))
        if wrong and not self.module.check_mode:
            self.fail(
                as_problems(wrong), f"{unit.name} answers, but it does not serve what it should", wrong, tail(journal.text, EVIDENCE_LINES)
            )
        ends = [at for index, at in self.tracker.marks if index == READY] or [time.time()]
        self.tracker.stage = Stage(READY)
        self.done(ready=True, diagnosis=wrong, now=ends[0])

    def check_limits(self, unit: UnitState, health: Reply) -> None:
        self.state["dead_health"] = self.state.get("dead_health", 0) + 1 if health.status == 503 else 0
        now = time.monotonic()
        waited, still = now - self.state["started"], now - self.state["progress"]
        stage = self.where()
        if self.state["dead_health"] >= DEAD_HEALTH:
            evidence = f"{self.url}/health: HTTP 503 {DEAD_HEALTH} times, while {unit.name} is {unit.active}"
            self.fail_waiting(
                unit, problem("engine_died", evidence, f"start it again: systemctl restart {unit.name}"), "The engine has died"
            )
        if still > self.module.params["stall_timeout_s"]:
            evidence = f"no new log line and no progress for {still:.0f} s in stage {stage}; /health: {health.describe()}"
            remedy = (
                "look at what the node does (top, nvidia-smi, iostat); if the stage really takes that long, raise health.stall_timeout_s"
            )
            self.fail_waiting(unit, problem("stalled", evidence, remedy), "The start does not move on")
        if waited > self.module.params["ready_timeout_s"]:
            evidence = f"not ready after {waited:.0f} s, in stage {stage}; /health: {health.describe()}"
            remedy = (
                "the start still moves on and only takes longer: raise health.ready_timeout_s and run again, which looks at the same start"
            )
            self.fail_waiting(unit, problem("ready_timeout", evidence, remedy), "The start takes too long")

    def absent(self, unit: UnitState) -> list[Problem]:
        if not unit.exists:
            return [problem("no_unit", unit.describe(), "install the service first: run playbooks/serve.yml")]
        return [problem("not_started", f"{unit.name} is {unit.active}", f"start it: systemctl start {unit.name}")]

    def fail_dead(self, unit: UnitState, health: Reply) -> None:
        """The unit ended, is about to be started anew, or was: tell why from the log of the run that died."""
        time.sleep(SETTLE_S)
        invocation = self.state["invocation"]
        latest = read_unit(self.run, self.unit_name)
        again = latest.invocation != invocation or latest.restarts > self.state["restarts"]
        journal = self.whole_log(unit, invocation)
        diagnosis = diagnose(journal.end)
        last_lines = tail(journal.text, EVIDENCE_LINES)
        problems = death_problems(diagnosis, unit if again else latest, last_lines)
        if health.ok or self.health().ok:
            foreign = foreign_listener(self.run, latest, self.container, self.url)
            if foreign is not None:
                problems.append(port_taken(foreign, latest))
        what = "ended and was started again" if again else "ended"
        self.fail(
            problems,
            f"{unit.name} {what} in stage {self.where()}: {unit.describe() if again else latest.describe()}",
            diagnosis,
            last_lines,
        )

    def fail_waiting(self, unit: UnitState, first: Problem, headline: str) -> None:
        """The unit lives and is of no use."""
        journal = read_journal(self.run, unit.name, unit.invocation)
        diagnosis = diagnose(journal.end)
        self.fail([first, *as_problems(diagnosis)], headline, diagnosis, tail(journal.text, EVIDENCE_LINES))

    def where(self) -> str:
        stage = self.tracker.stage
        return f"{stage.name!r} ({stage.done} of {stage.total} {stage.what})" if stage.total else repr(stage.name)

    def fail(
        self, problems: list[Problem], headline: str, diagnosis: list[Diagnosis] | None = None, last_lines: list[str] | None = None
    ) -> None:
        if self.module.check_mode:
            self.skip(headline)
        self.module.fail_json(
            msg=describe(problems, headline),
            problems=problems,
            diagnosis=diagnosis or [],
            log_tail=[] if diagnosis else last_lines or [],
            **self.progress(ready=False, now=time.time()),
        )

    def skip(self, why: str) -> None:
        self.module.exit_json(
            changed=False,
            skipped=True,
            msg=f"would wait for {self.unit_name} ({why})",
            problems=[],
            diagnosis=[],
            **self.progress(ready=False, now=time.time()),
        )

    def done(self, *, ready: bool, diagnosis: list[Diagnosis], now: float) -> None:
        self.module.exit_json(
            changed=False,
            problems=as_problems(diagnosis),
            diagnosis=diagnosis,
            state={} if ready else {**self.state, "tracker": self.tracker.state()},
            **self.progress(ready=ready, now=now),
        )

    def progress(self, *, ready: bool, now: float) -> dict[str, Any]:
        stage = self.tracker.stage
        marks = self.tracker.marks
        return {
            "ready": ready,
            "stage": stage.name,
            "stages": self.tracker.stages(now),
            "seconds": round(max(0.0, now - marks[0][1]), 1) if marks else 0.0,
            "job": {
                "state": "done" if ready else "running",
                "stage": stage.name,
                "done": stage.done,
                "total": stage.total,
                "unit": stage.what if stage.total else "",
            },
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "container": {"type": "str", "default": ""},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "wait_s": {"type": "float", "default": 4},
            "ready_timeout_s": {"type": "int", "default": 1500},
            "stall_timeout_s": {"type": "int", "default": 900},
            "state": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    wait = Wait(module)
    if module.check_mode:
        wait.look()
        wait.skip(f"stage {wait.where()}")
    wait.look_until(time.monotonic() + module.params["wait_s"])
    wait.done(ready=False, diagnosis=[], now=time.time())


if __name__ == "__main__":
    main()
