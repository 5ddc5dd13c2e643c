# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations


class ModuleDocFragment:
    """What modules take that read the model hub through its own client."""

    DOCUMENTATION = r"""
options:
  endpoint:
    description: Address of the hub, or of a mirror that speaks its protocol. Empty for the client's own.
    type: str
    default: ""
  token:
    description:
      - Access token for a gated or private repository. It is kept in a file below C(secrets) in O(state_dir) that only root can read,
        and given to the client by that file's path. No message shows it.
    type: str
    default: ""
  client_requirements:
    description:
      - Text of a requirements file with the packages of the hub's client, each with its hashes. Needed for the hub unless
        O(client_python) is given. Environments of earlier such texts are removed after a success.
    type: str
    default: ""
  client_python:
    description: A Python of the node that has huggingface_hub 1.0 or later, instead of an environment of the collection's own.
    type: str
    default: ""
  pip_args:
    description:
      - More arguments for pip when it makes the client's environment, such as C(--no-index) and C(--find-links) with a folder.
      - Not the place for a password, such as one in an index's address. These arguments are shown in the task's invocation, in the job's
        files and in the node's list of processes. Give it in C(pip.conf) or C(netrc) of root on the node.
    type: list
    elements: str
    default: []
  xet:
    description:
      - Whether files may come from Xet storage, V(auto), or over plain HTTP only, V(off).
      - When no byte comes for O(stall_timeout_s), or Xet fails, the rest is brought without it either way.
    type: str
    choices: [auto, "off"]
    default: auto
"""
