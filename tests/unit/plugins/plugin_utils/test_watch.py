# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The controller's loop, with a clock that only the loop moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible_collections.dgxspark.vllm.plugins.action.vllm_ready import ActionModule as ReadyAction
from ansible_collections.dgxspark.vllm.plugins.plugin_utils.watch import Progress, WatchedAction, human_bytes, human_seconds

LOST = AnsibleConnectionFailure("no route to host")


class Watched(WatchedAction):
    """Answers from a list; an exception in it is raised."""

    LABEL = "snapshot"

    def __init__(self, answers: list[Any], *, check: bool = False, call_s: float = 0.0, args: dict[str, Any] | None = None) -> None:
        self._task = SimpleNamespace(args=args or {"repo": "a/b"}, check_mode=check, async_val=0)
        self._play_context = SimpleNamespace(remote_addr="192.0.2.1")
        self._connection = SimpleNamespace(_shell=SimpleNamespace(tmpdir="/tmp/x"), reset=lambda: self.resets.append(self.now))
        self.answers, self.call_s = answers, call_s
        self.now, self.lines, self.asked, self.resets = 1000.0, [], [], []

    def _execute_module(self, module_args: dict[str, Any] | None = None, **_kwargs: Any) -> dict[str, Any]:
        self.asked.append(dict(module_args or {}))
        assert module_args is not None
        module_args["_ansible_internal"] = True
        self.now += self.call_s
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def _show(self, line: str | None) -> None:
        if line:
            self.lines.append(line)

    def _now(self) -> float:  # type: ignore[override]
        return self.now

    def _sleep(self, seconds: float) -> None:  # type: ignore[override]
        self.now += seconds


@pytest.fixture(autouse=True)
def plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActionBase, "run", lambda self, tmp=None, task_vars=None: {})


def running(**job: Any) -> dict[str, Any]:
    return {"changed": False, "job": {"state": "running", **job}}


DONE = {"changed": False, "path": "/x", "job": {"state": "done"}}
HOST = {"inventory_hostname": "spark1"}


def test_a_final_result_is_one_run_and_no_line() -> None:
    for final in (DONE, {"changed": True}, {"changed": False, "job": None}):
        action = Watched([final])
        assert action.run(task_vars=HOST)["changed"] is final["changed"]
        assert (len(action.asked), action.lines) == (1, [])


def test_lines_at_each_stage_and_every_ten_seconds() -> None:
    answers = [running(stage="download", unit="B", done=n * 1e9, total=68e9) for n in range(20)]
    answers += [running(stage="verify", unit="B", done=0, total=68e9), DONE]
    action = Watched(answers, call_s=1.0)
    result = action.run(task_vars=HOST)
    assert result["path"] == "/x"
    assert action.lines[0] == "spark1 | snapshot: download | 0 B of 68 GB (0 %) | 1 s so far"
    assert any("GB of 68 GB" in line and "/s" in line and line.endswith("left") for line in action.lines)
    assert any(line.startswith("spark1 | snapshot: verify") for line in action.lines)
    assert action.lines[-1].startswith("spark1 | snapshot | done in ")
    downloads = [line for line in action.lines if "download" in line]
    assert 3 <= len(downloads) <= 8


def test_looks_are_never_far_apart() -> None:
    action = Watched([running(stage="x")] * 50 + [DONE])
    action.run(task_vars=HOST)
    assert (action.now - 1000.0) / 50 <= 5.0


def test_changed_and_diff_of_any_look_count() -> None:
    action = Watched([{**running(), "changed": True, "diff": [{"after": "x"}]}, running(), DONE])
    result = action.run(task_vars=HOST)
    assert result["changed"] is True
    assert result["diff"] == [{"after": "x"}]


@pytest.mark.parametrize(
    ("last", "msg"),
    [
        ({"failed": True, "msg": "disk full", "job": {"state": "running"}}, "disk full"),
        ({"changed": False, "job": {"state": "failed", "message": "disk full"}}, "disk full"),
        ({"changed": False, "job": {"state": "failed"}}, "snapshot failed"),
        ({"changed": False, "msg": "own words", "job": {"state": "failed", "message": "x"}}, "own words"),
    ],
)
def test_a_failed_job_is_a_failed_task(last: dict[str, Any], msg: str) -> None:
    action = Watched([running(), last])
    result = action.run(task_vars=HOST)
    assert (result["failed"], result["msg"]) == (True, msg)
    assert not any("done" in line for line in action.lines)


def test_check_mode_looks_once() -> None:
    action = Watched([running()], check=True)
    action.run(task_vars=HOST)
    assert len(action.asked) == 1


def test_a_lost_connection_in_mid_wait_is_outlived() -> None:
    action = Watched([running(stage="download")] + [LOST] * 20 + [running(stage="download"), LOST, DONE])
    result = action.run(task_vars=HOST)
    assert result["path"] == "/x"
    lost = [line for line in action.lines if "connection lost" in line]
    assert len(lost) == 11  # every ten seconds of the first loss, and once of the second
    assert lost[0] == "spark1 | snapshot | connection lost, the node goes on by itself; trying again for 2 min 0 s"
    assert len(action.resets) == 21
    assert action._connection._shell.tmpdir is None


def test_a_connection_lost_for_good_says_that_the_work_may_go_on() -> None:
    action = Watched([running(), LOST])
    with pytest.raises(AnsibleConnectionFailure, match=r"nothing is started twice"):
        action.run(task_vars=HOST)
    assert 120 <= action.now - 1000 <= 140


def test_no_connection_at_the_first_look_is_an_unreachable_host() -> None:
    action = Watched([LOST, DONE])
    with pytest.raises(AnsibleConnectionFailure, match="no route"):
        action.run(task_vars=HOST)


def test_a_reset_that_is_not_supported_does_not_matter() -> None:
    action = Watched([running(), LOST, DONE])

    def reset() -> None:
        raise NotImplementedError

    action._connection.reset = reset
    assert action.run(task_vars=HOST)["path"] == "/x"


class Ready(Watched, ReadyAction):
    """The real action of vllm_ready on the fake node."""

    LABEL = ReadyAction.LABEL
    next_args = ReadyAction.next_args


def test_vllm_ready_hands_its_state_on_and_does_not_show_it() -> None:
    answers = [
        {**running(stage="loading weights"), "state": {"n": 1}},
        {**running(), "state": {"n": 2}},
        {**DONE, "ready": True, "state": {}},
    ]
    action = Ready(answers, args={"unit": "x"}, call_s=4.0)
    result = ReadyAction.run(action, task_vars=HOST)
    assert [a.get("state") for a in action.asked] == [None, {"n": 1}, {"n": 2}]
    assert "state" not in result
    assert "_ansible_internal" not in str(action.asked[1:])
    assert action.lines[0] == "spark1 | model: loading weights | 4 s so far"


@pytest.mark.parametrize(
    ("job", "line"),
    [
        ({"stage": "get", "done": 34e9, "total": 68e9, "unit": "B", "rate": 1e8, "eta_s": 75}, "h | j: get | 34 GB of 68 GB (50 %)"
         " | 100 MB/s | 1 min 15 s left"),
        ({"stage": "download", "done": 34e9, "total": 68e9, "unit": "B", "rate": 1e8}, "h | j: download | 34 GB of 68 GB (50 %) | 100 MB/s"
         " | 5 min 40 s left"),
        ({"stage": "build", "done": 3, "total": 12, "unit": "steps"}, "h | j: build | 3 of 12 steps (25 %) | 10 s so far"),
        ({"stage": "load", "done": 6, "total": 14, "unit": "shards", "rate": 0.025}, "h | j: load | 6 of 14 shards (43 %) | 0.025 shards/s"
         " | 5 min 20 s left"),
        ({"stage": "build", "message": "RUN pip install"}, "h | j: build | RUN pip install | 10 s so far"),
        ({"done": 5e6, "unit": "B"}, "h | j | 5 MB | 10 s so far"),
        ({}, "h | j | 10 s so far"),
        ({"done": "x", "total": None, "rate": None, "eta_s": None}, "h | j | 10 s so far"),
        ({"done": 15, "total": 14, "unit": "steps"}, "h | j | 15 of 14 steps (100 %) | 10 s so far"),
    ],
)  # fmt: skip
def test_the_line(job: dict[str, Any], line: str) -> None:
    assert Progress("h", "j", 10.0, 90.0).line(job, 100.0) == line


def test_the_rate_is_measured_where_the_module_gives_none() -> None:
    progress = Progress("h", "j", 10.0, 0.0)
    lines = [progress.line({"stage": "s", "unit": "B", "done": second * 2e6, "total": 400e6}, float(second)) for second in range(61)]
    assert sum(line is not None for line in lines) == 7
    assert "| 2 MB/s |" in str(lines[-1])
    assert (
        progress.line({"stage": "s", "unit": "B", "done": 0, "total": 400e6}, 90.0) == "h | j: s | 0 B of 400 MB (0 %) | 1 min 30 s so far"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (12.3e9, "12.3 GB"), (123.4e9, "123 GB"), (1.5e12, "1.5 TB"), (2e15, "2000 TB")],
)
def test_human_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (59.4, "59 s"), (75, "1 min 15 s"), (601, "10 min"), (3599, "60 min"), (7260, "2 h 1 min")]
)
def test_human_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text
