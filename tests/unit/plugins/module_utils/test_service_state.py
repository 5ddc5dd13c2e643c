# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Units, journals, and who owns a port."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.problems import errors
from ansible_collections.dgxspark.vllm.plugins.module_utils.service_state import (
    UnitState,
    death_problems,
    foreign_listener,
    message,
    parse_journal,
    port_taken,
    read_journal,
    read_unit,
    runner,
    unit_name,
)

ID = "ab" * 32


@pytest.mark.parametrize(
    ("name", "full"), [("x", "x.service"), ("x.service", "x.service"), ("vllm-0.19", "vllm-0.19.service"), ("a@b", "a@b.service")]
)
def test_unit_name(name: str, full: str) -> None:
    assert unit_name(name) == full


@pytest.mark.parametrize(
    ("active", "sub", "alive"),
    [
        ("active", "running", True),
        ("activating", "start-pre", True),
        ("activating", "auto-restart", False),
        ("activating", "auto-restart-queued", False),
        ("deactivating", "stop-sigterm", False),
        ("failed", "failed", False),
        ("inactive", "dead", False),
    ],
)
def test_alive(active: str, sub: str, alive: bool) -> None:
    assert UnitState("x.service", active=active, sub=sub).alive is alive


def show(**values: str) -> Any:
    return lambda args: (0, "".join(f"{key}={value}\n" for key, value in values.items()), "")


def test_a_unit_is_read_with_one_command() -> None:
    unit = read_unit(
        show(LoadState="loaded", ActiveState="failed", SubState="failed", InvocationID="f00", NRestarts="2", ExecMainStatus="1"), "x"
    )
    assert (unit.name, unit.exists, unit.invocation, unit.restarts, unit.exit_status) == ("x.service", True, "f00", 2, 1)
    assert not unit.alive


@pytest.mark.parametrize("text", ["", "NRestarts=[not set]\nMainPID=x\n", "garbage"])
def test_odd_answers_of_systemctl_are_no_traceback(text: str) -> None:
    unit = read_unit(lambda args: (0, text, ""), "x")
    assert not unit.exists
    assert unit.restarts == 0


def test_no_systemd_is_an_error_with_its_text() -> None:
    assert "systemctl: not here" in read_unit(lambda args: (127, "", "systemctl: not here"), "x").describe()

    class Module:
        def run_command(self, *args: Any, **kwargs: Any) -> Any:
            raise FileNotFoundError("no such program")

    assert runner(Module())(["systemctl"])[0] == 127


def test_exit_status_0_is_explained() -> None:
    assert "engine has died" in UnitState("x", load="loaded", active="inactive", sub="dead", exit_status=0).describe()
    assert "engine has died" not in UnitState("x", load="loaded", active="failed", sub="failed", exit_status=1).describe()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (list(b"\rLoading:  42%"), "\rLoading:  42%"),
        ([226, 150, 132, 255], "\u2584\ufffd"),
        (["a", "b"], "a\nb"),
        ([[65], "b"], "A\nb"),
        (None, ""),
        (5, ""),
    ],
)
def test_journal_messages(value: Any, text: str) -> None:
    assert message(value) == text


def test_journal_lines_that_are_no_entries_are_passed_over() -> None:
    text = '-- No entries --\n{"MESSAGE": "a", "__CURSOR": "s=1", "__REALTIME_TIMESTAMP": "1500000"}\n[]\n{"broken'
    entries, cursor = parse_journal(text)
    assert [(e.text, e.at) for e in entries] == [("a", 1.5)]
    assert cursor == "s=1"


def test_without_an_invocation_only_the_last_run_counts() -> None:
    lines = [
        {"MESSAGE": "old", "_SYSTEMD_INVOCATION_ID": "1"},
        {"MESSAGE": "new", "_SYSTEMD_INVOCATION_ID": "2"},
        {"MESSAGE": "systemd on new", "_SYSTEMD_INVOCATION_ID": "pid1", "INVOCATION_ID": "2"},
    ]
    seen: list[list[str]] = []

    def run(args: list[str]) -> tuple[int, str, str]:
        seen.append(args)
        return 0, "\n".join(map(json.dumps, lines)), ""

    assert read_journal(run, "x").text == "new\nsystemd on new"
    assert "--unit=x.service" in seen[0]


def test_a_journal_that_may_not_be_read_says_so() -> None:
    hint = "Hint: You are currently not seeing messages from other users and the system."
    assert read_journal(lambda args: (0, "", hint), "x", "1").error == hint
    assert "exit status 1" in read_journal(lambda args: (1, "", ""), "x", "1").error


def node(root: Path, *, port: int, address: str = "0100007F") -> Path:
    """A /proc with: 1 init; 50 docker CLI; 60 shim > 61 tini > 62 server in container ID; 70 another server."""
    parents = {1: 0, 50: 1, 60: 1, 61: 60, 62: 61, 70: 1}
    for pid, parent in parents.items():
        folder = root / "proc" / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "status").write_text(f"Name:\tp{pid}\nPPid:\t{parent}\nVmRSS:\t100 kB\n")
        (folder / "cmdline").write_bytes(b"p%d\0--port\0" % pid)
        (folder / "cgroup").write_text("0::/\n")
    (root / "proc/62/cgroup").write_text(f"0::/system.slice/docker-{ID}.scope\n")
    (root / "proc/70/cgroup").write_text("0::/system.slice/other.service\n")
    (root / "proc/net").mkdir()
    line = f"   0: {address}:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1 0 100 0 0 10 0\n"
    (root / "proc/net/tcp").write_text("  sl  local_address rem_address   st ...\n" + line)
    return root


def holds(root: Path, pid: int) -> None:
    (root / f"proc/{pid}/fd/3").symlink_to("socket:[777]")


UNIT = UnitState("vllm.service", load="loaded", active="active", sub="running", main_pid=50)


@pytest.mark.parametrize(
    ("holder", "docker", "container", "unit", "foreign"),
    [
        (62, (0, f"{ID} 61\n", ""), "vllm", UNIT, None),  # ours, by container
        (62, (0, f"{'cd' * 32} 61\n", ""), "vllm", UNIT, None),  # ours, by its parent alone
        (70, (0, f"{ID} 61\n", ""), "vllm", UNIT, 70),
        (70, (1, "", "Error response from daemon: No such container: vllm"), "vllm", UNIT, 70),
        (70, (1, "", "Cannot connect to the Docker daemon"), "vllm", UNIT, None),  # cannot be told
        (62, (0, f"{ID} 0\n", ""), "vllm", UNIT, None),
        (70, (0, "", ""), "", UnitState("vllm.service", active="active", main_pid=70), None),  # without container
        (62, (0, "", ""), "", UnitState("vllm.service", active="active", main_pid=70), 62),
        (70, (0, "", ""), "", UnitState("other.service", active="active", main_pid=0), None),
        (70, (0, "", ""), "", UnitState("vllm.service", load="loaded", active="inactive"), 70),
    ],
)
def test_who_answers(
    tmp_path: Path, holder: int, docker: tuple[int, str, str], container: str, unit: UnitState, foreign: int | None
) -> None:
    root = node(tmp_path, port=8000)
    holds(root, holder)
    found = foreign_listener(lambda args: docker, unit, container, "http://127.0.0.1:8000", root)
    assert (found["pid"] if found else None) == foreign
    if found:
        text = port_taken(found, unit)["evidence"]
        assert f"pid {holder}" in text
        assert "127.0.0.1:8000" in text


@pytest.mark.parametrize(("port", "url"), [(8001, "http://127.0.0.1:8000"), (8000, "http://192.0.2.7:8000")])
def test_other_ports_and_addresses_do_not_matter(tmp_path: Path, port: int, url: str) -> None:
    root = node(tmp_path, port=port)
    holds(root, 70)
    assert foreign_listener(lambda args: (0, f"{ID} 61", ""), UNIT, "vllm", url, root) is None


def test_an_owner_that_cannot_be_seen_is_nobody(tmp_path: Path) -> None:
    root = node(tmp_path, port=8000)
    assert foreign_listener(lambda args: (0, f"{ID} 61", ""), UNIT, "vllm", "http://127.0.0.1:8000", root) is None
    assert foreign_listener(lambda args: (0, "", ""), UNIT, "", "http://127.0.0.1:8000", tmp_path / "empty") is None


def test_a_death_always_has_a_cause() -> None:
    unit = UnitState("x.service", load="loaded", active="failed", sub="failed", result="exit-code", exit_status=1)
    lines = [f"line {n}" for n in range(20)]
    problems = death_problems([], unit, lines)
    assert len(errors(problems)) == 1
    assert all(line in problems[0]["evidence"] for line in lines)
    assert "its log is empty" in death_problems([], unit, [])[0]["evidence"]
    oom = UnitState("x.service", load="loaded", active="failed", result="oom-kill")
    assert [p["class"] for p in death_problems([], oom, lines)] == ["oom_killed"]
