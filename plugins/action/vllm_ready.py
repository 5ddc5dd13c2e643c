# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Waits for a vLLM instance on the controller's side; documented in the module of the same name."""

from __future__ import annotations

from typing import Any

from ..plugin_utils.watch import WatchedAction


class ActionModule(WatchedAction):
    """The module itself looks for some seconds, so there is no pause between two calls."""

    LABEL = "model"
    POLL_MIN_S = 0.0
    POLL_MAX_S = 0.0

    def next_args(self, args: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        return {**args, "state": result.get("state") or {}}

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        result.pop("state", None)
        return result
