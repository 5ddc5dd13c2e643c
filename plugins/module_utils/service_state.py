# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A served instance as its node sees it: the systemd unit, the journal of one of its runs, and who answers on its port."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .listeners import Listener, Process, listeners, overlaps, processes
from .log_classifier import Diagnosis, as_problems
from .problems import Problem, problem
from .vllm_http import port_of

# Runs a command: (exit status, stdout, stderr); 127 when there is no such program.
Runner = Callable[[list[str]], tuple[int, str, str]]

_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "InvocationID",
    "NRestarts",
    "ExecMainStatus",
    "MainPID",
    "InactiveExitTimestampMonotonic",
)
# More than any start-up writes, and little enough to read in a second.
MAX_LINES = 20000
EVIDENCE_LINES = 20
# What a server died of is near the end of its log; an instance that has served for weeks has written of other mishaps before.
DEATH_LINES = 5000


def runner(module: Any) -> Runner:
    """A module's run_command as a Runner, in the C locale."""

    def run(args: list[str]) -> tuple[int, str, str]:
        try:
            status, out, err = module.run_command(args, environ_update={"LC_ALL": "C"}, handle_exceptions=False)
        except OSError as exc:
            return 127, "", f"{args[0]}: {exc}"
        return status, out, err

    return run


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit. since: when it last left the inactive state, in seconds since 1970, 0 if never in this boot."""

    name: str
    load: str = ""
    active: str = ""
    sub: str = ""
    result: str = ""
    invocation: str = ""
    restarts: int = 0
    exit_status: int = 0
    main_pid: int = 0
    since: float = 0.0
    error: str = ""

    @property
    def exists(self) -> bool:
        return self.load not in ("", "not-found")

    @property
    def alive(self) -> bool:
        """Starting or running; not stopping, and not waiting to be restarted."""
        return self.active in ("active", "activating", "reloading", "refreshing") and not self.sub.startswith("auto-restart")

    def describe(self) -> str:
        """Its end in words."""
        if self.error:
            return self.error
        if not self.exists:
            return f"there is no unit {self.name}"
        end = f"exit status {self.exit_status}" + (", which vLLM also uses when its engine has died" if not self.exit_status else "")
        return f"{self.name} is {self.active} ({self.sub}), result {self.result or 'unknown'}, {end}"


def unit_name(name: str) -> str:
    """`x` -> `x.service`."""
    return name if "." in name and name.rsplit(".", 1)[1] in ("service", "scope", "target") else f"{name}.service"


def read_unit(run: Runner, name: str) -> UnitState:
    """The unit's state; one that does not exist has load 'not-found'."""
    name = unit_name(name)
    status, out, err = run(["systemctl", "show", "-p", ",".join(_PROPERTIES), name])
    if status:
        return UnitState(name, error=f"systemctl show {name}: {(err or out).strip() or f'exit status {status}'}")
    values = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    started = _int(values.get("InactiveExitTimestampMonotonic")) / 1e6
    return UnitState(
        name=name,
        load=values.get("LoadState", ""),
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        result=values.get("Result", ""),
        invocation=values.get("InvocationID", ""),
        restarts=_int(values.get("NRestarts")),
        exit_status=_int(values.get("ExecMainStatus")),
        main_pid=_int(values.get("MainPID")),
        since=time.time() - time.monotonic() + started if started else 0.0,
    )


@dataclass(frozen=True)
class Entry:
    """One line of the journal. at: seconds since 1970."""

    at: float
    text: str
    invocation: str = ""


@dataclass(frozen=True)
class Journal:
    """Lines of the journal, the cursor after the last one, and why there are none."""

    entries: tuple[Entry, ...] = ()
    cursor: str = ""
    error: str = ""

    @property
    def text(self) -> str:
        return "\n".join(entry.text for entry in self.entries)

    @property
    def end(self) -> str:
        """The last part, for the cause of a death."""
        return "\n".join(entry.text for entry in self.entries[-DEATH_LINES:])


def read_journal(run: Runner, unit: str, invocation: str = "", *, after: str = "", until: float = 0.0, lines: int = MAX_LINES) -> Journal:
    """What a run of the unit wrote, and what systemd said of it.

    invocation: which run; without it the last one that the journal knows. after: a cursor; until: seconds since 1970.
    """
    args = ["journalctl", "--no-pager", "--all", "-o", "json", "--output-fields=MESSAGE,_SYSTEMD_INVOCATION_ID,INVOCATION_ID"]
    args += [f"--lines={lines}"]
    args += [f"--after-cursor={after}"] if after else []
    args += [f"--until=@{int(until)}"] if until else []
    # A field given twice is an alternative, and so is what stands on both sides of a plus.
    args += [f"_SYSTEMD_INVOCATION_ID={invocation}", "+", f"INVOCATION_ID={invocation}"] if invocation else [f"--unit={unit_name(unit)}"]
    status, out, err = run(args)
    if status and not out:
        return Journal(cursor=after, error=f"journalctl: {err.strip() or f'exit status {status}'}")
    entries, cursor = parse_journal(out)
    if not invocation:
        last = next((entry.invocation for entry in reversed(entries) if entry.invocation), "")
        entries = [entry for entry in entries if entry.invocation in ("", last)]
    return Journal(tuple(entries), cursor or after, "" if entries or after else err.strip())


def parse_journal(text: str) -> tuple[list[Entry], str]:
    """Entries of `journalctl -o json`, and the last one's cursor. Lines that are no entry are passed over."""
    entries: list[Entry] = []
    cursor = ""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if not isinstance(record, dict):
            continue
        cursor = str(record.get("__CURSOR") or cursor)
        invocation = str(record.get("_SYSTEMD_INVOCATION_ID") or "")
        invocation = str(record.get("INVOCATION_ID") or "") or invocation
        entries.append(Entry(_int(record.get("__REALTIME_TIMESTAMP")) / 1e6, message(record.get("MESSAGE")), invocation))
    return entries, cursor


def message(value: Any) -> str:
    """A journal field: text, a list of bytes where it holds control characters or no UTF-8, or a list of such values."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if all(isinstance(item, int) and 0 <= item < 256 for item in value):
            return bytes(value).decode(errors="replace")
        return "\n".join(message(item) for item in value)
    return ""


def _int(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0


def foreign_listener(run: Runner, unit: UnitState, container: str, url: str, root: Path = Path("/")) -> Listener | None:
    """Who answers at `url` if it is not this unit's server; None also when that cannot be seen."""
    host = urlsplit(url).hostname or ""
    table = processes(root)
    answering = [
        item for item in listeners(root, table, {}) if item["port"] == port_of(url) and item["pid"] and overlaps(host, item["address"])
    ]
    if not answering:
        return None
    known, ident, roots = _own_processes(run, unit, container)
    if not known:
        return None
    ours = [
        item
        for item in answering
        if item["unit"] == unit.name or (ident and item["container_id"] == ident) or _under(item["pid"], roots, table)
    ]
    return None if ours else answering[0]


def _own_processes(run: Runner, unit: UnitState, container: str) -> tuple[bool, str, set[int]]:
    """(whether it could be found out, the container's id, pids under which the unit's server runs)."""
    roots = {unit.main_pid} - {0}
    if not container:
        return bool(roots) or not unit.alive, "", roots
    status, out, err = run(["docker", "inspect", "--type", "container", "--format", "{{.Id}} {{.State.Pid}}", container])
    fields = out.split()
    if status == 0 and len(fields) == 2:
        return True, fields[0], roots | ({_int(fields[1])} - {0})
    return "no such" in err.lower(), "", roots


def _under(pid: int | None, roots: set[int], table: dict[int, Process]) -> bool:
    seen: set[int] = set()
    while pid and pid not in seen:
        if pid in roots:
            return True
        seen.add(pid)
        pid = table[pid]["ppid"] if pid in table else None
    return False


def port_taken(listener: Listener, unit: UnitState) -> Problem:
    """The problem of a port that another process answers on."""
    owner = f"pid {listener['pid']} ({listener['command']})" + (
        f" in container {listener['container_id'][:12]}" if listener["container_id"] else ""
    )
    return problem(
        "port_taken",
        f"{listener['address']}:{listener['port']} is answered by {owner}, which does not belong to {unit.name}",
        "stop that process or container, or give this instance another vllm_port: two servers cannot share one",
    )


def death_problems(diagnoses: Iterable[Diagnosis], unit: UnitState, last_lines: list[str]) -> list[Problem]:
    """Why a server died: what its log says, or at least how it ended and its last lines."""
    found = as_problems(diagnoses)
    if unit.result == "oom-kill" and all(p["class"] != "oom_killed" for p in found):
        found.insert(
            0,
            problem(
                "oom_killed",
                f"{unit.name}: systemd reports result oom-kill",
                "lower gpu-memory-utilization, drop the page cache before the start, end other users of the memory",
            ),
        )
    if not found:
        quoted = "\n    ".join(last_lines) if last_lines else "(its log is empty)"
        found = [
            problem(
                "server_died", f"{unit.describe()}; its last lines:\n    {quoted}", f"read the whole log: journalctl -u {unit.name} -n 300"
            )
        ]
    return found
