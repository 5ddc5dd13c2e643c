# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.callback.stages import CallbackModule, Host, Stage, module_runs, summary, table

REPO = Path(__file__).parents[4]
UUIDS = itertools.count()


@pytest.mark.parametrize(
    ("action", "result", "expected"),
    [
        ("dgxspark.vllm.spark_facts", {"changed": False}, 1),
        ("ansible.builtin.command", {"rc": 0}, 1),
        ("gather_facts", {"ansible_facts": {}}, 1),
        # The controller's own business.
        ("ansible.builtin.set_fact", {}, 0),
        ("set_fact", {}, 0),
        ("ansible.legacy.debug", {}, 0),
        ("ansible.builtin.assert", {}, 0),
        ("ansible.builtin.include_tasks", {}, 0),
        ("ansible.builtin.import_role", {}, 0),
        ("ansible.builtin.validate_argument_spec", {}, 0),
        ("ansible.builtin.fail", {}, 0),
        ("ansible.builtin.group_by", {}, 0),
        ("ansible.builtin.add_host", {}, 0),
        ("meta", {}, 0),
        ("dgxspark.vllm.instance", {}, 0),
        ("example.other.instance", {}, 1),
        # Several modules in one task.
        ("ansible.builtin.template", {"changed": True}, 2),
        ("copy", {}, 2),
        # Not run.
        ("ansible.builtin.command", {"skip_reason": "Conditional result was False", "false_condition": "x"}, 0),
        ("ansible.builtin.copy", {"false_condition": "x"}, 0),
        ("ansible.builtin.stat", {"skipped_reason": "No items in the list", "results": []}, 0),
        ("ansible.builtin.command", {"unreachable": True, "msg": "x"}, 0),
        # Believed.
        ("dgxspark.vllm.vllm_ready", {"module_runs": 17}, 17),
        ("dgxspark.vllm.spark_facts", {"module_runs": 0, "unreachable": True}, 0),
        ("dgxspark.vllm.vllm_ready", {"module_runs": "17"}, 1),
        ("dgxspark.vllm.vllm_ready", {"module_runs": True}, 1),
        ("dgxspark.vllm.vllm_ready", {"module_runs": -3}, 1),
        # In check mode a module without support for it says so itself: it was run.
        ("example.other.thing", {"msg": "remote module (example.other.thing) does not support check mode"}, 1),
        ("ansible.builtin.command", {"censored": "the output has been hidden"}, 1),
    ],
)
def test_module_runs(action: str, result: dict[str, Any], expected: int) -> None:
    assert module_runs(action, result) == expected


def test_table_and_summary() -> None:
    host = Host({"preflight": Stage(1.26, 1, 0), "checkpoint": Stage(10.0, 6, 2), "verify": Stage(0.5, 0, 0, "failed")})
    assert table("spark1", host) == [
        "spark1                 seconds  module runs  changed",
        "  preflight                1.3            1        0",
        "  checkpoint              10.0            6        2",
        "  verify                   0.5            0        0  failed",
        "spark1: 7 module runs, 11.8 s, failed",
    ]
    figures = summary({"spark1": host})["hosts"]["spark1"]
    assert (figures["module_runs"], figures["changed"], figures["state"]) == (7, 2, "failed")
    assert [stage["stage"] for stage in figures["stages"]] == ["preflight", "checkpoint", "verify"]
    json.dumps(figures)


def test_one_run_is_not_many() -> None:
    assert table("s", Host({"a": Stage(12.34, 1, 0)}))[-1] == "s: 1 module run, 12.3 s"


class Run:
    """A play as the callback hears of it."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.options: dict[str, Any] = {"json_path": ""}
        self.callback = CallbackModule()
        self.callback.get_option = self.options.get
        self.callback._display = SimpleNamespace(display=self.shown.append, banner=self.shown.append, warning=self.shown.append)
        self.play("A play")

    def play(self, name: str) -> None:
        self.callback.v2_playbook_on_play_start(SimpleNamespace(get_name=lambda: name))

    def task(self, action: str = "ansible.builtin.command", role: str = "", **more: Any) -> Any:
        named = SimpleNamespace(get_name=lambda: role) if role else None
        return SimpleNamespace(
            **{
                "action": action,
                "_role": named,
                "_uuid": str(next(UUIDS)),
                "delegate_to": None,
                "async_val": 0,
                "poll": 0,
                **more,
            }
        )

    def result(self, host: str, task: Any, data: dict[str, Any]) -> Any:
        return SimpleNamespace(
            host=SimpleNamespace(get_name=lambda: host), task=task, result=data, is_changed=lambda: bool(data.get("changed"))
        )

    def start(self, host: str, task: Any) -> None:
        self.callback.v2_runner_on_start(SimpleNamespace(get_name=lambda: host), task)

    def ok(self, host: str, task: Any, **data: Any) -> None:
        self.start(host, task)
        self.callback.v2_runner_on_ok(self.result(host, task, data))

    def end(self, failures: dict[str, int] | None = None, unreachable: dict[str, int] | None = None) -> dict[str, Any]:
        def recap(name: str) -> dict[str, int]:
            return {"failures": (failures or {}).get(name, 0), "unreachable": (unreachable or {}).get(name, 0)}

        self.callback.v2_playbook_on_stats(SimpleNamespace(summarize=recap))
        return summary(self.callback._hosts)["hosts"]


def stages(host: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(stage["stage"], stage["module_runs"], stage["changed"]) for stage in host["stages"]]


def test_stages_are_roles_in_order_and_plays_outside_of_roles() -> None:
    run = Run()
    run.ok("spark1", run.task("dgxspark.vllm.instance", "dgxspark.vllm.vllm"))
    run.ok("spark1", run.task("dgxspark.vllm.spark_facts", "dgxspark.vllm.preflight"))
    run.ok("spark1", run.task("ansible.builtin.template", "web"), changed=True)
    run.ok("spark1", run.task())
    run.play("Another play")
    run.ok("spark1", run.task(role="web"))
    run.ok("spark1", run.task())
    assert stages(run.end()["spark1"]) == [("vllm", 0, 0), ("preflight", 1, 0), ("web", 3, 1), ("A play", 1, 0), ("Another play", 1, 0)]
    assert run.shown[0] == "STAGES"
    assert "spark1: 6 module runs, 0.0 s" in run.shown


def test_loops_count_their_items() -> None:
    run = Run()
    task = run.task("ansible.builtin.stat")
    run.start("spark1", task)
    run.callback.v2_runner_item_on_ok(run.result("spark1", task, {"changed": True}))
    run.callback.v2_runner_item_on_failed(run.result("spark1", task, {}))
    run.callback.v2_runner_item_on_skipped(run.result("spark1", task, {"false_condition": "x"}))
    run.callback.v2_runner_on_ok(run.result("spark1", task, {"changed": True, "results": [1, 2, 3]}))
    # The same task again (a handler, a role used twice) without a loop.
    run.ok("spark1", task)
    assert stages(run.end()["spark1"]) == [("A play", 3, 1)]


def test_retries_and_polls_count() -> None:
    run = Run()
    task = run.task(role="x")
    run.start("spark1", task)
    run.callback.v2_runner_retry(run.result("spark1", task, {"attempts": 1}))
    run.callback.v2_runner_retry(run.result("spark1", task, {"attempts": 2}))
    run.callback.v2_runner_on_ok(run.result("spark1", task, {"attempts": 3}))
    polled = run.task(role="x", async_val=60, poll=5)
    run.start("spark1", polled)
    run.callback.v2_runner_on_async_poll(run.result("spark1", run.task("async_status"), {}))
    run.callback.v2_runner_on_ok(run.result("spark1", polled, {}))
    # Started, polled twice (the second found it finished), status file removed.
    assert stages(run.end()["spark1"]) == [("x", 3 + 4, 0)]


def test_delegated_tasks_count_where_they_run() -> None:
    run = Run()
    run.ok("spark1", run.task(delegate_to="localhost"), changed=True)
    run.ok("spark1", run.task(delegate_to="spark2"))
    run.ok("spark1", run.task(delegate_to="spark1"))
    hosts = run.end()
    assert stages(hosts["spark1"]) == [("A play", 1, 1)]
    assert stages(hosts["spark2"]) == [("A play", 1, 0)]


def test_states() -> None:
    run = Run()
    for host in ("good", "bad", "gone", "rescued", "ignored"):
        task = run.task()
        run.start(host, task)
        if host == "gone":
            run.callback.v2_runner_on_unreachable(run.result(host, task, {"unreachable": True}))
        elif host == "good":
            run.callback.v2_runner_on_skipped(run.result(host, task, {"skip_reason": "x"}))
        else:
            run.callback.v2_runner_on_failed(run.result(host, task, {"msg": "x"}), ignore_errors=host == "ignored")
    hosts = run.end(failures={"bad": 1}, unreachable={"gone": 1})
    assert {name: host["state"] for name, host in hosts.items()} == {
        "good": "ok",
        "bad": "failed",
        "gone": "unreachable",
        "rescued": "ok",
        "ignored": "ok",
    }
    assert (hosts["gone"]["module_runs"], hosts["good"]["module_runs"], hosts["bad"]["module_runs"]) == (0, 0, 1)


def test_a_run_without_hosts_says_nothing() -> None:
    run = Run()
    assert run.end() == {}
    assert run.shown == []


def test_json_file(tmp_path: Path) -> None:
    run = Run()
    run.options["json_path"] = str(tmp_path / "new" / "stages.json")
    run.ok("spark1", run.task())
    hosts = run.end()
    assert json.loads((tmp_path / "new" / "stages.json").read_text()) == {"hosts": hosts}


def test_a_json_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = Run()
    run.options["json_path"] = str(tmp_path / "file" / "stages.json")
    run.ok("spark1", run.task())
    run.end()
    assert any("DGXSPARK_STAGES_JSON" in line for line in run.shown)


PLAYBOOK = """
- name: A play
  hosts: here,gone
  gather_facts: false
  tasks:
    - name: A module
      ansible.builtin.command: "true"
      changed_when: true
    - name: A loop
      ansible.builtin.stat: {path: "{{ item }}"}
      loop: [/, /tmp]
    - name: Not run
      ansible.builtin.command: "true"
      when: false
    - name: The controller's
      ansible.builtin.debug: {msg: x}
    - name: First contact
      dgxspark.vllm.spark_facts: {fail_on: never}
"""


def test_a_real_run(tmp_path: Path) -> None:
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    gone = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_retries": 0}
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": {"here": here, "gone": gone}}}))
    out = tmp_path / "stages.json"
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(tmp_path / "none.cfg"),
        "ANSIBLE_COLLECTIONS_PATH": str(REPO / "collections"),
        "ANSIBLE_CALLBACKS_ENABLED": "dgxspark.vllm.stages",
        "ANSIBLE_NOCOLOR": "1",
        "DGXSPARK_STAGES_JSON": str(out),
    }
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.json", "play.yml"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "here: 4 module runs, " in done.stdout, done.stdout + done.stderr
    assert "DEPRECATION" not in done.stdout + done.stderr
    hosts = json.loads(out.read_text())["hosts"]
    assert stages(hosts["here"]) == [("A play", 4, 1)]
    assert (hosts["gone"]["state"], hosts["gone"]["module_runs"]) == ("unreachable", 0)
