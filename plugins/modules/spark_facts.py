#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
module: spark_facts
short_description: Describe a DGX Spark and everything that stands in the way of serving a model on it
version_added: 0.1.0
description:
  - Reads GPU, driver, kernel, memory, swap, disks, Docker engine, container toolkit, listening ports, systemd, limits and locks of a node.
  - Holds them against what is asked for, and reports every problem in one go, each with its evidence and its remedy.
  - Changes nothing.
  - As the first contact with a node, it turns a failed connection, a missing Python or a refused C(sudo) into one message with the remedy.
options:
  ports:
    description: TCP ports that must be free, or held by O(container) or O(unit).
    type: list
    elements: int
    default: []
  address:
    description:
      - The address that the ports will be bound to. A listener on another address of the node is then no problem.
      - Empty means all addresses.
    type: str
    default: ""
  container:
    description: Name of our own container. What it holds is not taken by somebody else.
    type: str
    default: ""
  unit:
    description: Name of our own systemd service. While it is up, its memory is not missed, and its ports are not taken.
    type: str
    default: ""
  paths:
    description: Places that need space. Those on one filesystem add up.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: A folder, which need not exist yet. Left out, it means Docker's data root.
        type: path
      need_gib:
        description: Space that will be taken there, in GiB.
        type: float
        required: true
      present:
        description: Folders whose contents count as part of the need that is there already.
        type: list
        elements: path
        default: []
      unless:
        description: Once this file exists, nothing more is needed here.
        type: path
  memory_gib:
    description: Memory that must be available, in GiB. 0 asks for none.
    type: float
    default: 0
  gpu_memory_utilization:
    description: Share of the total memory that vLLM will ask for. With O(require_gpu), that much must be available.
    type: float
    default: 0
  load_format:
    description: vLLM's load format. V(fastsafetensors) does not work while swap is on.
    type: str
    default: ""
  nodes:
    description: How many nodes serve the model together. Several of them need unlimited locked memory for RDMA.
    type: int
    default: 1
  memlock:
    description: Locked-memory limit that containers will be started with - V(unlimited), bytes, or empty for none.
    type: str
    default: ""
  require_gpu:
    description: Whether a GPU, its driver, its container toolkit and an aarch64 machine are needed.
    type: bool
    default: false
  require_docker:
    description: Whether a Docker engine is needed.
    type: bool
    default: true
  docker_min:
    description: Oldest engine that will do.
    type: str
    default: "20.10"
  driver_min:
    description: Oldest NVIDIA driver that will do. Empty accepts any.
    type: str
    default: ""
  compute_capability:
    description: The GPU's compute capability, for example V(12.1). Empty accepts any.
    type: str
    default: ""
  toolkit_avoid:
    description: Versions of the NVIDIA container toolkit to warn about.
    type: list
    elements: str
    default: []
  docker_timeout:
    description: Seconds that C(docker), C(nvidia-smi) and C(systemctl) get for each answer.
    type: float
    default: 10
  accept:
    description: Problem classes to pass over. They are returned in RV(accepted).
    type: list
    elements: str
    default: []
    choices:
      - apt_locked
      - arch_wrong
      - container_name_taken
      - disk_short
      - disk_unknown
      - docker_client
      - docker_config_invalid
      - docker_down
      - docker_group
      - docker_hung
      - docker_missing
      - docker_old
      - docker_unusual
      - driver_old
      - firewall_closed
      - gpu_clock_stuck
      - gpu_other
      - gpu_unusable
      - memlock_low
      - memory_short
      - memory_small
      - memory_unknown
      - page_cache
      - port_taken
      - swap_active
      - systemd_missing
      - toolkit_listed
      - toolkit_not_configured
      - tool_missing
  fail_on:
    description:
      - From which severity on a problem fails the task. Those below are shown as warnings.
      - With V(never) all problems are only returned.
    type: str
    choices: [error, warning, never]
    default: error
attributes:
  check_mode:
    description: Can run in check mode and return the same result.
    support: full
  diff_mode:
    description: Will return details on what has changed.
    support: none
requirements:
  - Python 3.10 or later on the node
notes:
  - Without root, other users' processes are not visible, so that the owner of a port may be unknown.
author:
  - The dgxspark.vllm authors
"""

EXAMPLES = r"""
- name: Describe this node
  dgxspark.vllm.spark_facts:
    fail_on: never
  register: node

- name: Look for everything that stands in the way
  dgxspark.vllm.spark_facts:
    ports: [8000]
    address: 127.0.0.1
    container: dgxspark-vllm
    unit: dgxspark-vllm.service
    paths:
      - path: /var/lib/dgxspark-vllm
        need_gib: 80
      - need_gib: 60
    memory_gib: 104
    require_gpu: true
"""

RETURN = r"""
spark:
  description: The node. What cannot be found out is null.
  returned: success
  type: dict
  contains:
    arch:
      description: Machine architecture.
      type: str
      sample: aarch64
    memory:
      description: Total, available, free, page cache, CMA and swap, in GiB.
      type: dict
    gpu:
      description: The driver, each GPU by C(nvidia-smi), and C(error) if there is none. On GB10 the GPU has no memory of its own (null).
      type: dict
    docker:
      description: The engine, its configuration file and its containers. C(fault) is the problem class if it does not answer.
      type: dict
    toolkit:
      description: Version of the NVIDIA container toolkit, presence of its hook, CDI descriptions.
      type: dict
    listeners:
      description: Listening TCP sockets with address, port, pid, command (secrets masked), container and unit.
      type: list
      elements: dict
    disks:
      description: Free space of each path and of Docker's data root, in GiB.
      type: list
      elements: dict
    swap:
      description: Active swap areas.
      type: list
      elements: dict
    memlock:
      description: Locked-memory limit that containers inherit, in bytes (null is unlimited), and whether the engine may raise it.
      type: dict
    unit:
      description: State of the service given as O(unit).
      type: dict
    desktop:
      description: Programs of a desktop session that run.
      type: list
      elements: str
    apt_lock:
      description: Who holds a lock of apt or dpkg.
      type: dict
problems:
  description: What is wrong, errors and warnings.
  returned: always
  type: list
  elements: dict
  contains:
    class:
      description: Kind of problem, as in O(accept).
      type: str
      sample: port_taken
    evidence:
      description: What shows it.
      type: str
      sample: "port 8000 is taken by pid 4242 (python3 -m http.server 8000) on 0.0.0.0"
    remedy:
      description: What to do.
      type: str
      sample: "end it (`sudo kill 4242`), or set vllm_port to a free port"
    severity:
      description: V(error) or V(warning).
      type: str
      sample: error
accepted:
  description: Problems that O(accept) passes over, in the same form.
  returned: always
  type: list
  elements: dict
"""

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import spark as node
from ..module_utils.preflight import CLASSES, DiskNeed, Needs, disk_is_short, judge, python_problem
from ..module_utils.problems import describe, errors

# Tests lay a machine out in a folder.
ROOT = Path("/")


def disk_need(entry: dict[str, Any], root: Path) -> DiskNeed:
    """What an entry of `paths` still asks for."""
    done = entry["unless"] and (root / entry["unless"].lstrip("/")).is_file()
    present = sum(node.tree_bytes(root / folder.lstrip("/")) for folder in entry["present"] or [])
    return DiskNeed(entry["path"] or "", 0.0 if done else entry["need_gib"], node.gib(present))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "ports": {"type": "list", "elements": "int", "default": []},
            "address": {"type": "str", "default": ""},
            "container": {"type": "str", "default": ""},
            "unit": {"type": "str", "default": ""},
            "paths": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "path": {"type": "path"},
                    "need_gib": {"type": "float", "required": True},
                    "present": {"type": "list", "elements": "path", "default": []},
                    "unless": {"type": "path"},
                },
            },
            "memory_gib": {"type": "float", "default": 0},
            "gpu_memory_utilization": {"type": "float", "default": 0},
            "load_format": {"type": "str", "default": ""},
            "nodes": {"type": "int", "default": 1},
            "memlock": {"type": "str", "default": ""},
            "require_gpu": {"type": "bool", "default": False},
            "require_docker": {"type": "bool", "default": True},
            "docker_min": {"type": "str", "default": "20.10"},
            "driver_min": {"type": "str", "default": ""},
            "compute_capability": {"type": "str", "default": ""},
            "toolkit_avoid": {"type": "list", "elements": "str", "default": []},
            "docker_timeout": {"type": "float", "default": 10},
            "accept": {"type": "list", "elements": "str", "default": [], "choices": sorted(CLASSES)},
            "fail_on": {"type": "str", "default": "error", "choices": ["error", "warning", "never"]},
        },
        supports_check_mode=True,
    )
    p = module.params
    if old := python_problem(tuple(sys.version_info[:3])):
        module.fail_json(msg=describe([old], "This module cannot run here."), problems=[old], accepted=[])
    needs = Needs(
        ports=p["ports"],
        address=p["address"],
        container=p["container"],
        unit=p["unit"],
        disks=[disk_need(entry, ROOT) for entry in p["paths"]],
        memory_gib=p["memory_gib"],
        gpu_memory_utilization=p["gpu_memory_utilization"],
        load_format=p["load_format"],
        nodes=p["nodes"],
        memlock=p["memlock"],
        require_gpu=p["require_gpu"],
        require_docker=p["require_docker"],
        docker_min=p["docker_min"],
        driver_min=p["driver_min"],
        compute_cap=p["compute_capability"],
        toolkit_avoid=p["toolkit_avoid"],
    )
    spark = node.collect(ROOT, node.run_command, [need.path for need in needs.disks if need.path], p["unit"], p["docker_timeout"])
    reclaimable = 0.0
    if disk_is_short(spark, needs) and spark["docker"]["version"]:
        reclaimable = node.parse_build_cache(node.run_command(["docker", "system", "df"], p["docker_timeout"]).out)
    found = judge(spark, needs, reclaimable)
    problems = [item for item in found if item["class"] not in p["accept"]]
    result = {"changed": False, "problems": problems, "accepted": [item for item in found if item["class"] in p["accept"]]}
    fatal = {"error": errors(problems), "warning": problems, "never": []}[p["fail_on"]]
    if fatal:
        count = f"{len(fatal)} problem{'s' if len(fatal) > 1 else ''}"
        module.fail_json(msg=describe(problems, f"{count} on {spark['hostname']}; nothing was changed."), **result)
    if p["fail_on"] != "never":
        for item in problems:
            module.warn(f"{spark['hostname']}: {item['class']}: {item['evidence']}. Remedy: {item['remedy']}")
    module.exit_json(spark=spark, **result)


if __name__ == "__main__":
    main()
