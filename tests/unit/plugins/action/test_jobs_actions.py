# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.action import hf_snapshot, image_build
from ansible_collections.dgxspark.vllm.plugins.plugin_utils.watch import WatchedAction


@pytest.mark.parametrize("plugin", [hf_snapshot, image_build])
def test_every_look_of_a_wait_bears_its_name(plugin: Any) -> None:
    action = plugin.ActionModule.__new__(plugin.ActionModule)
    assert isinstance(action, WatchedAction) and action.LABEL
    given = {"dest": "/x"}
    following = action.next_args(given, {"job": {"state": "running", "watch": "w1"}})
    assert following == {"dest": "/x", "watch": "w1"} and given == {"dest": "/x"}
    # The module waits itself.
    assert action.POLL_MIN_S == action.POLL_MAX_S == 0
