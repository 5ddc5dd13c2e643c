# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations


class ModuleDocFragment:
    """What modules take whose work runs on the node as a transient unit."""

    DOCUMENTATION = r"""
options:
  state_dir:
    description: Folder of the collection's state on the node; the job lies in C(jobs) below it.
    type: path
    default: /var/lib/dgxspark-vllm
  watch:
    description: Names one task's wait; set by the action plugin.
    type: str
    default: ""
"""
