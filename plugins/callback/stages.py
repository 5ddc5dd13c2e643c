# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
name: stages
type: aggregate
short_description: Say at the end what each host went through, how long it took and how many modules ran there
version_added: 0.1.0
description:
  - Prints one table per host, with a row for each stage - a role, or the play for tasks outside of roles - in the order in which they ran.
  - A module run is one execution of a module on the host.
    Tasks that only the controller works on, such as C(assert) and C(include_tasks), count as none;
    a task that runs several modules, such as C(template), counts as several;
    an action that says in its result how many it ran (C(module_runs)) is believed.
  - Tasks that are delegated to another host count for that host, and not at all if that is the controller.
requirements:
  - enabled with C(callbacks_enabled = dgxspark.vllm.stages)
options:
  json_path:
    description: File to write the same figures to, as JSON. Empty writes none.
    type: str
    default: ""
    env:
      - name: DGXSPARK_STAGES_JSON
    ini:
      - section: callback_stages
        key: json_path
author:
  - The dgxspark.vllm authors
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

from ..module_utils.files import write_json

# By short name: ansible.builtin.debug and debug are the same here.
CONTROLLER_ONLY = frozenset(
    {
        "add_host",
        "assert",
        "debug",
        "fail",
        "group_by",
        "import_playbook",
        "import_role",
        "import_tasks",
        "include_role",
        "include_tasks",
        "include_vars",
        "instance",
        "meta",
        "pause",
        "set_fact",
        "set_stats",
        "validate_argument_spec",
    }
)
# Actions that look first (stat) and then do, or send the content and then set its attributes.
SEVERAL = {"assemble": 2, "copy": 2, "fetch": 2, "template": 2, "unarchive": 3}
ASYNC_END = 2  # a polled asynchronous task ends with a poll that finds it finished, and the removal of its status file
OWN_NAMES = ("ansible.builtin.", "ansible.legacy.", "dgxspark.vllm.")
CONTROLLER = ("localhost", "127.0.0.1", "::1")
WORST_LAST = ("ok", "failed", "unreachable")


@dataclass
class Stage:
    """What one host did in one stage."""

    seconds: float = 0.0
    module_runs: int = 0
    changed: int = 0
    state: str = "ok"


@dataclass
class Host:
    """One host's stages, in the order in which they began."""

    stages: dict[str, Stage] = field(default_factory=dict)

    def stage(self, name: str) -> Stage:
        return self.stages.setdefault(name, Stage())

    def forgive(self, recap: Mapping[str, int]) -> None:
        """Take back failures that were rescued or ignored. recap: the host's line of Ansible's own recap."""
        for stage in self.stages.values():
            if (stage.state == "failed" and not recap.get("failures")) or (stage.state == "unreachable" and not recap.get("unreachable")):
                stage.state = "ok"

    def total(self) -> Stage:
        stages = list(self.stages.values())
        worst = max((stage.state for stage in stages), key=WORST_LAST.index, default="ok")
        return Stage(sum(s.seconds for s in stages), sum(s.module_runs for s in stages), sum(s.changed for s in stages), worst)


def short_action(action: str) -> str:
    """An action's name without the collections whose actions are known here. Another collection's `debug` is not ours."""
    for prefix in OWN_NAMES:
        if action.startswith(prefix):
            return action[len(prefix) :]
    return action


# Why a task was not run at all: a condition, an empty loop.
NOT_RUN = ("skip_reason", "false_condition", "skipped_reason")


def module_runs(action: str, result: Mapping[str, Any]) -> int:
    """How many modules one execution of a task ran on its host. result: of that execution, not of a loop."""
    told = result.get("module_runs")
    if isinstance(told, int) and not isinstance(told, bool) and told >= 0:
        return told
    name = short_action(action)
    if name in CONTROLLER_ONLY or result.get("unreachable"):
        return 0
    if any(key in result for key in NOT_RUN):
        return 0
    return SEVERAL.get(name, 1)


def table(name: str, host: Host) -> list[str]:
    """One host's stages as aligned lines, the sum as a sentence."""
    width = max(len(name), *(len(stage) + 2 for stage in host.stages), 20)
    lines = [f"{name:<{width}}  {'seconds':>8}  {'module runs':>11}  {'changed':>7}"]
    for stage, figures in host.stages.items():
        end = "" if figures.state == "ok" else f"  {figures.state}"
        lines.append(f"{'  ' + stage:<{width}}  {figures.seconds:>8.1f}  {figures.module_runs:>11}  {figures.changed:>7}{end}")
    total = host.total()
    end = "" if total.state == "ok" else f", {total.state}"
    lines.append(f"{name}: {total.module_runs} module run{'' if total.module_runs == 1 else 's'}, {total.seconds:.1f} s{end}")
    return lines


def summary(hosts: Mapping[str, Host]) -> dict[str, Any]:
    """The same figures for machines."""

    def figures(stage: Stage) -> dict[str, Any]:
        return {"seconds": round(stage.seconds, 3), "module_runs": stage.module_runs, "changed": stage.changed, "state": stage.state}

    return {
        "hosts": {
            name: {**figures(host.total()), "stages": [{"stage": stage, **figures(own)} for stage, own in host.stages.items()]}
            for name, host in hosts.items()
        }
    }


class CallbackModule(CallbackBase):
    """Listens to a run, speaks at its end."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "dgxspark.vllm.stages"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hosts: dict[str, Host] = {}
        self._began: dict[tuple[str, str], float] = {}
        self._looped: set[tuple[str, str]] = set()
        self._current: dict[str, str] = {}
        self._play = ""

    def v2_playbook_on_play_start(self, play: Any) -> None:
        self._play = play.get_name().strip()

    def v2_runner_on_start(self, host: Any, task: Any) -> None:
        self._began[host.get_name(), task._uuid] = time.monotonic()
        self._current[host.get_name()] = self._stage_of(task)
        self._hosts.setdefault(host.get_name(), Host()).stage(self._stage_of(task))

    def v2_runner_on_ok(self, result: Any) -> None:
        self._end(result)

    def v2_runner_on_skipped(self, result: Any) -> None:
        self._end(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._end(result, "ok" if ignore_errors else "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._end(result, "unreachable")

    def v2_runner_retry(self, result: Any) -> None:
        self._count(result)

    def v2_runner_on_async_poll(self, result: Any) -> None:
        # A poll is a task of its own that belongs to no role.
        name = result.host.get_name()
        self._hosts.setdefault(name, Host()).stage(self._current.get(name, self._play)).module_runs += 1

    def v2_runner_item_on_ok(self, result: Any) -> None:
        self._item(result)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        self._item(result)

    def v2_runner_item_on_skipped(self, result: Any) -> None:
        self._item(result)

    def v2_playbook_on_stats(self, stats: Any) -> None:
        hosts = {name: host for name, host in self._hosts.items() if host.stages}
        for name, host in hosts.items():
            host.forgive(stats.summarize(name))
        if not hosts:
            return
        self._display.banner("STAGES")
        for name, host in hosts.items():
            for line in table(name, host):
                self._display.display(line)
            self._display.display("")
        path = self.get_option("json_path")
        if path:
            try:
                write_json(Path(path).expanduser().absolute(), summary(hosts))
            except OSError as error:
                self._display.warning(
                    f"The stages were not written to {path}: {error.strerror}. Set DGXSPARK_STAGES_JSON to a writable file."
                )

    def _stage_of(self, task: Any) -> str:
        role = getattr(task, "_role", None)
        return role.get_name().rsplit(".", 1)[-1] if role else self._play or "play"

    def _item(self, result: Any) -> None:
        self._looped.add((result.host.get_name(), result.task._uuid))
        self._count(result)

    def _count(self, result: Any) -> None:
        """Add an execution's module runs to the host on which it was."""
        task = result.task
        runs = module_runs(str(task.action), result.result)
        if runs and task.async_val and task.poll:
            runs += ASYNC_END
        name = result.host.get_name()
        if task.delegate_to and str(task.delegate_to) != name:
            name = str(task.delegate_to)
            if name in CONTROLLER or not runs:
                return
        if runs:
            self._hosts.setdefault(name, Host()).stage(self._stage_of(task)).module_runs += runs

    def _end(self, result: Any, state: str = "ok") -> None:
        """A host is through with a task."""
        key = (result.host.get_name(), result.task._uuid)
        if key not in self._looped:  # else each item was counted by itself
            self._count(result)
        self._looped.discard(key)
        stage = self._hosts.setdefault(key[0], Host()).stage(self._stage_of(result.task))
        stage.seconds += time.monotonic() - self._began.pop(key, time.monotonic())
        if result.is_changed():
            stage.changed += 1
        if WORST_LAST.index(state) > WORST_LAST.index(stage.state):
            stage.state = state
