# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Documentation of the action plugin of the same name, which does all the work on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: instance
short_description: Resolve what a host serves, and check the variables of all roles
version_added: 0.1.0
author:
  - The dgxspark.vllm authors (@dgxspark)
description:
  - Loads the recipe that O(ignore:vllm_recipe) names, with what it extends and the user's overrides, and checks every key of it.
  - Checks that each variable that begins with the name of one of the collection's roles is a variable of that role and has the right type.
  - Reports everything that it finds in one message. Nothing on the host is read or changed, and no connection to it is made.
  - The role P(dgxspark.vllm.vllm#role) runs it and registers the result as C(vllm_instance).
options:
  roles:
    description:
      - The roles whose variables are checked.
      - If empty, these are all roles of the collection.
    type: list
    elements: str
    default: []
attributes:
  action:
    description: Runs on the controller.
    support: full
  check_mode:
    description: Does the same in check mode, as it changes nothing.
    support: full
  diff_mode:
    description: There is never a difference to show.
    support: none
  platform:
    description: The target's operating system does not matter.
    platforms: all
    support: full
"""

EXAMPLES = r"""
- name: Resolve what this host serves, and check the variables of all roles
  dgxspark.vllm.instance:
  register: vllm_instance

- name: Show the argument list of the server
  ansible.builtin.debug:
    msg: "{{ vllm_instance.argv | join(' ') }}"
"""

RETURN = r"""
name:
  description: The name of the instance on its node.
  returned: success
  type: str
  sample: dgxspark-vllm
recipe_name:
  description: The name of the recipe.
  returned: success
  type: str
  sample: qwen35-122b-v2
recipe:
  description:
    - The resolved recipe, with the defaults of all keys that nobody set. Options with a JSON value are mappings.
    - V(expect) has only the figures that were given.
  returned: success
  type: dict
argv:
  description: The arguments for the C(vllm) command. The API key is not among them.
  returned: success
  type: list
  elements: str
  sample: ["serve", "/model", "--served-model-name", "qwen", "--host", "127.0.0.1", "--port", "8000"]
environment:
  description: The environment of the server. The API key is not in it.
  returned: success
  type: dict
host:
  description: The address that the server listens on.
  returned: success
  type: str
port:
  description: The port that the server listens on.
  returned: success
  type: int
checkpoint_dir:
  description: The folder on the node that is served.
  returned: success
  type: str
snapshot_dir:
  description: The folder on the node that holds the repository's files; another one than C(checkpoint_dir) when a hybrid is made of them.
  returned: success
  type: str
snapshot_folder:
  description: The same where nobody gave it a place of its own, below C(vllm_state_dir).
  returned: success
  type: str
peer:
  description:
    - The host that this one takes its checkpoint from, which is the first host of its cluster; empty for that host itself.
    - The cluster is the smallest group of the inventory that has the host, and nothing that is not in C(vllm_instances).
  returned: success
  type: str
image_manifest:
  description: The file on the node that says which image serves.
  returned: success
  type: str
problems:
  description: Everything that is wrong, each with C(class), C(evidence), C(remedy) and C(severity).
  returned: failure
  type: list
  elements: dict
"""
