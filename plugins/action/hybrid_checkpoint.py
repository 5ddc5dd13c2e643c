# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Watches the node's job of the module of the same name, which holds the documentation."""

from __future__ import annotations

from typing import Any

from ansible_collections.dgxspark.vllm.plugins.plugin_utils.watch import WatchedAction


class ActionModule(WatchedAction):
    """The module blocks for some seconds itself."""

    LABEL = "hybrid checkpoint"
    POLL_MIN_S = 0.0
    POLL_MAX_S = 0.0

    def next_args(self, args: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """The node must know which looks belong to one wait: a job that failed during it is a failure, before it a reason to start."""
        return {**args, "watch": result["job"]["watch"]}
