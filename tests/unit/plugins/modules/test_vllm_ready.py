# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The wait: forward through the stages, and an end at once when there is nothing left to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dgxspark.vllm.plugins.modules import vllm_ready
from fake_node import FakeNode, http_server, in_turn, reply

LOG = (Path(__file__).parents[3] / "fixtures/vllm/startup-0.32.log").read_bytes().decode().split("\n")
LOADING, DRAFT, UP = (
    next(i for i, line in enumerate(LOG) if mark in line) + 1 for mark in ("Starting to load", "drafter model", "startup complete")
)
DEAD_ENGINE = [
    "(Worker pid=9) ERROR 11-29 20:50:39 [x.py:1063] TypeError: 'function' object is not subscriptable",
    '(Worker pid=9) ERROR 11-29 20:50:39 [x.py:1063]   File "/v/vllm/v1/worker/mamba_utils.py", line 1226, in run_fused_precopy',
    "(EngineCore pid=8) ERROR 11-29 20:50:39 [core.py:1512] EngineCore encountered a fatal error.",
]
NOTHING = "http://127.0.0.1:1"

Wait = Callable[..., dict[str, Any]]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    fake = FakeNode()
    monkeypatch.setattr(AnsibleModule, "run_command", lambda self, args, **kwargs: fake.run_command(self, args, **kwargs))
    monkeypatch.setattr(vllm_ready, "foreign_listener", lambda *args: None)
    monkeypatch.setattr(vllm_ready, "SETTLE_S", 0.0)
    monkeypatch.setattr(vllm_ready, "POLL_S", 0.01)
    return fake


@pytest.fixture
def wait(node: FakeNode, run_module: Any) -> Iterator[Wait]:
    def call(url: str = NOTHING, *, check: bool = False, **args: Any) -> dict[str, Any]:
        given = {"unit": "vllm", "container": "vllm", "url": url, "wait_s": 0, **args}
        result: dict[str, Any] = run_module(vllm_ready.main, given, check=check)
        return result

    yield call


def classes(result: dict[str, Any]) -> list[str]:
    return [p["class"] for p in result["problems"]]


def test_ready_at_the_first_look_is_one_short_run(node: FakeNode, wait: Wait) -> None:
    node.log(*LOG[:UP])
    with http_server({"/health": reply(200)}) as (url, seen):
        result = wait(url, wait_s=30)
    assert result["ready"] is True
    assert result["changed"] is False
    assert result["stage"] == "ready"
    assert result["job"]["state"] == "done"
    assert len(seen) == 1
    assert [s["stage"] for s in result["stages"]][:2] == ["starting container", "configuring"]
    assert len([c for c in node.calls if c[0] == "systemctl"]) == 1


def test_ready_although_the_journal_no_longer_holds_the_start(node: FakeNode, wait: Wait) -> None:
    with http_server({"/health": reply(200)}) as (url, _):
        result = wait(url)
    assert (result["ready"], result["stages"], result["seconds"]) == (True, [], 0.0)


def test_the_wait_goes_on_from_call_to_call_and_only_forward(node: FakeNode, wait: Wait) -> None:
    state: dict[str, Any] = {}
    order = []
    for number, line in enumerate(LOG[:UP]):
        node.log(line)
        if number % 7 and number + 1 != UP:
            continue
        result = wait(state=state)
        assert not result.get("failed")
        assert result["job"]["state"] == "running"
        state = result["state"]
        order.append(result["stage"])
    assert list(dict.fromkeys(order)) == sorted(set(order), key=order.index)
    assert order[0] == "starting container"
    assert order[-1] == "ready"
    with http_server({"/health": reply(200)}) as (url, _):
        assert wait(url, state=state)["ready"] is True


def test_shards_of_target_and_draft_are_told(node: FakeNode, wait: Wait) -> None:
    node.log(*LOG[:LOADING], "\rLoading safetensors checkpoint shards:  42% Completed | 6/14 [x]\r")
    result = wait()
    assert result["job"] == {"state": "running", "stage": "loading weights", "done": 6, "total": 14, "unit": "shards"}
    node.log("Loading weights took 9 s", "Loading drafter model...", "\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [x]")
    result = wait(state=result["state"])
    assert (result["stage"], result["job"]["done"], result["job"]["total"]) == ("loading draft", 1, 2)


def test_one_call_looks_until_ready_within_its_time(node: FakeNode, wait: Wait) -> None:
    with http_server({"/health": in_turn(reply(404), reply(404), reply(200))}) as (url, seen):
        assert wait(url, wait_s=5)["ready"] is True
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"active": "failed", "sub": "failed", "result": "exit-code", "exit_status": 1}, "exit status 1"),
        ({"active": "inactive", "sub": "dead", "exit_status": 0}, "exit status 0"),
        ({"active": "deactivating", "sub": "stop-sigterm"}, "deactivating"),
        ({"active": "activating", "sub": "auto-restart", "restarts": 0}, "auto-restart"),
        ({"invocation": "b2", "restarts": 1}, "started again"),
        ({"restarts": 3}, "started again"),
        ({"invocation": "b2"}, "started again"),
    ],
)
def test_an_end_in_mid_wait_is_told_at_once_with_its_cause(node: FakeNode, wait: Wait, change: dict[str, Any], told: str) -> None:
    node.log(*LOG[:DRAFT])
    state = wait()["state"]
    node.log(*DEAD_ENGINE)
    for name, value in change.items():
        setattr(node, name, value)
    node.log("a line of the new run")
    result = wait(state=state, wait_s=30)
    assert result["failed"] is True
    assert classes(result) == ["prefix_caching_hybrid"]
    assert result["diagnosis"][0]["class"] == "prefix_caching_hybrid"
    assert "enable-prefix-caching: false" in result["msg"]
    assert told in result["msg"]
    assert "in stage 'loading draft':" in result["msg"]
    assert result["log_tail"] == []


def test_already_dead_at_the_first_look(node: FakeNode, wait: Wait) -> None:
    node.log(*LOG[:DRAFT], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    node.active, node.sub, node.result, node.exit_status = "failed", "failed", "exit-code", 1
    result = wait()
    assert result["failed"]
    assert classes(result) == ["gpu_oom"]


def test_an_unknown_death_shows_the_last_lines(node: FakeNode, wait: Wait) -> None:
    node.log(*(f"line {n}" for n in range(100)))
    node.active, node.sub = "failed", "failed"
    result = wait()
    assert classes(result) == ["server_died"]
    assert "line 80" in result["msg"]
    assert "line 79" not in result["msg"]
    assert result["log_tail"] == [f"line {n}" for n in range(80, 100)]


def test_reading_the_log_again_does_not_take_the_targets_shards_for_the_drafts(node: FakeNode, wait: Wait) -> None:
    node.log(*LOG[: DRAFT - 1])
    state = wait()["state"]
    node.active = "failed"
    result = wait(state=state)
    assert result["stage"] == "loading weights"
    assert "2 of 2 shards" in result["msg"]


def test_the_log_of_the_run_that_died_is_read_not_that_of_the_next(node: FakeNode, wait: Wait) -> None:
    node.log("one line")
    state = wait()["state"]
    node.log("OSError: [Errno 28] No space left on device")
    node.invocation, node.restarts = "b2", 1
    node.log("torch.OutOfMemoryError: CUDA out of memory.")
    assert classes(wait(state=state)) == ["disk_full"]


@pytest.mark.parametrize(
    ("values", "name"),
    [({"load": "not-found", "active": "inactive", "age": 0}, "no_unit"), ({"active": "inactive", "sub": "dead", "age": 0}, "not_started")],
)
def test_nothing_to_wait_for(node: FakeNode, wait: Wait, values: dict[str, Any], name: str) -> None:
    for key, value in values.items():
        setattr(node, key, value)
    assert classes(wait()) == [name]
    checked = wait(check=True)
    assert not checked.get("failed")
    assert checked["skipped"] is True
    assert checked["msg"].startswith("would wait")


@pytest.mark.parametrize("active", ["active", "failed"])
def test_check_mode_never_fails_and_never_waits(node: FakeNode, wait: Wait, active: str) -> None:
    node.log(*DEAD_ENGINE)
    node.active = active
    result = wait(check=True, wait_s=600)
    assert result["skipped"] is True
    assert result["changed"] is False


def test_check_mode_tells_what_is_ready(node: FakeNode, wait: Wait) -> None:
    node.log("Parameter a.b not found in params_dict, skip loading")
    with http_server({"/health": reply(200)}) as (url, _):
        result = wait(url, check=True)
    assert (result.get("failed"), result["ready"]) == (None, True)
    assert classes(result) == ["weight_skipped"]


def test_no_progress_is_an_error_with_stage_and_last_lines(node: FakeNode, wait: Wait) -> None:
    node.log(*LOG[:LOADING])
    state = wait()["state"]
    state["progress"] -= 100
    node.log('INFO:     127.0.0.1:1 - "GET /health HTTP/1.1" 404', "No available shared memory broadcast block found in 60 seconds.")
    result = wait(state=state, stall_timeout_s=99)
    assert classes(result) == ["stalled"]
    assert "'loading weights'" in result["msg"]
    node.log("something new")
    assert not wait(state=state, stall_timeout_s=99).get("failed")


def test_the_whole_may_not_take_too_long(node: FakeNode, wait: Wait) -> None:
    state = wait()["state"]
    state["started"] -= 100
    assert classes(wait(state=state, ready_timeout_s=99)) == ["ready_timeout"]


def test_a_dead_engine_behind_a_living_server(node: FakeNode, wait: Wait) -> None:
    node.log(*LOG[:UP], *DEAD_ENGINE)
    with http_server({"/health": reply(503)}) as (url, _):
        result = wait(url, wait_s=30)
    assert classes(result) == ["engine_died", "prefix_caching_hybrid"]


def test_a_short_503_is_not_yet_the_end(node: FakeNode, wait: Wait) -> None:
    with http_server({"/health": in_turn(reply(503), reply(200))}) as (url, _):
        assert wait(url, wait_s=5)["ready"] is True


LISTENER = {
    "address": "127.0.0.1",
    "port": 8000,
    "pid": 70,
    "command": "python3 -m http.server",
    "container_id": None,
    "container": None,
    "unit": None,
}


def test_another_server_on_the_port_is_not_readiness(node: FakeNode, wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_ready, "foreign_listener", lambda *args: LISTENER)
    node.log(*LOG[:DRAFT])
    with http_server({"/health": reply(200)}) as (url, _):
        result = wait(url)
        assert classes(result) == ["port_taken"]
        assert "pid 70 (python3 -m http.server)" in result["msg"]
        node.active, node.sub = "failed", "failed"
        node.log("OSError: [Errno 98] Address already in use")
        assert classes(wait(url)) == ["port_in_use", "port_taken"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("WARNING 11-29 20:31:06 [x.py:1] Parameter a.b not found in params_dict, skip loading", "weight_skipped"),
        ("(EngineCore pid=4) ERROR 11-29 20:31:06 [__init__.py:72] Failed to load plugin int8_head", "plugin_not_loaded"),
    ],
)
def test_a_server_that_comes_up_wrong_is_an_error(node: FakeNode, wait: Wait, line: str, name: str) -> None:
    node.log(*LOG[:DRAFT], line, *LOG[DRAFT:UP])
    with http_server({"/health": reply(200)}) as (url, _):
        assert classes(wait(url)) == [name]


def test_the_key_is_nowhere_in_the_result(node: FakeNode, wait: Wait) -> None:
    node.log("non-default args: {'api_key': ['s3cr3t-key-1']}", "vllm: error: unrecognized arguments: --x s3cr3t-key-1")
    node.active = "failed"
    assert "s3cr3t" not in str(wait(api_key="s3cr3t-key-1"))


def test_a_bad_url_is_a_plain_error(wait: Wait) -> None:
    assert "no URL" in wait("http://127.0.0.1:eight")["msg"]
