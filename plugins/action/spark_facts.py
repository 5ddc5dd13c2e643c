# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""First contact with a node: runs the module, and says in plain words why if it cannot. Documented with the module."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase

from ..module_utils.problems import Problem, describe
from ..plugin_utils.reach import Target, first_contact, on_the_node


class ActionModule(ActionBase):
    """Runs dgxspark.vllm.spark_facts once, unchanged."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        try:
            result.update(self._execute_module(module_name="dgxspark.vllm.spark_facts", task_vars=task_vars))
        except AnsibleConnectionFailure as error:
            target = self._target(task_vars)
            # sudo's prompt that never comes is raised as a failed connection too.
            return _refusal(on_the_node(str(error), target) or first_contact(str(error), target), target)
        except AnsibleError as error:
            target = self._target(task_vars)
            found = on_the_node(str(error), target)
            if found is None:
                raise
            return _refusal(found, target)
        if result.get("failed") and "problems" not in result:
            target = self._target(task_vars)
            said = "\n".join(str(result.get(key) or "") for key in ("module_stderr", "module_stdout", "msg"))
            if found := on_the_node(said, target):
                return _refusal(found, target)
        return result

    def _target(self, task_vars: dict[str, Any]) -> Target:
        """The connection's own settings: they are what was tried, whatever the inventory's variables are called."""
        name = str(task_vars.get("inventory_hostname") or "this host")
        places = [str(task_vars.get(key) or "") for key in ("inventory_dir", "inventory_file")]
        words = [*(part for place in places for part in PurePath(place).parts), *(task_vars.get("group_names") or [])]
        return Target(
            name=name,
            host=str(self._option("host") or name),
            port=int(self._option("port") or 22),
            user=str(self._option("remote_user") or ""),
            key=str(self._option("private_key_file") or ""),
            rehearsal=any("rehearsal" in word for word in words),
        )

    def _option(self, name: str) -> Any:
        try:
            return self._connection.get_option(name)
        except (AnsibleError, KeyError):  # not every kind of connection has a port
            return None


def _refusal(found: Problem, target: Target) -> dict[str, Any]:
    unreachable = found["class"].startswith("ssh_")
    headline = f"{target.name} cannot be reached." if unreachable else f"Nothing can be run on {target.name}."
    result: dict[str, Any] = {"changed": False, "msg": describe([found], headline), "problems": [found], "module_runs": 0}
    return {**result, "unreachable": True} if unreachable else {**result, "failed": True}
