# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What one run of a playbook did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Run:
    """What one ansible-playbook run did. results: of tasks that failed; done: host, module and result of those that did not."""

    status: str
    rc: int
    seconds: float
    output: str
    stages: dict[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)
    done: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def host(self, name: str = "spark1") -> dict[str, Any]:
        """The stages callback's figures for one host."""
        found: dict[str, Any] = self.stages["hosts"][name]
        return found

    def message(self) -> str:
        """The messages of all tasks that failed or could not reach the node."""
        return "\n".join(str(result.get("msg", "")) for result in self.results)

    def result(self, module: str, host: str = "spark1") -> dict[str, Any]:
        """The last result of a module of this collection that a host's task did not fail with."""
        return [result for name, action, result in self.done if name == host and action.endswith(f".{module}")][-1]

    def recap(self, key: str, host: str = "spark1") -> int:
        """A column of the recap, such as changed or failed."""
        line = next(line for line in reversed(self.output.splitlines()) if line.startswith(f"{host} ") and f"{key}=" in line)
        return int(line.split(f"{key}=")[1].split()[0])


Playbook = Callable[..., Run]
OnNode = Callable[..., str]
