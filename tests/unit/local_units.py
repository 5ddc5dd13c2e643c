# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Jobs without systemd: each unit is a process group of this test."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from ansible_collections.dgxspark.vllm.plugins.module_utils.problems import Problem


class LocalUnits:
    """Shared by all calls of a test, as systemd is shared by all runs on a node."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.started: list[str] = []
        self.missing_problems: list[Problem] = []

    def missing(self) -> list[Problem]:
        return self.missing_problems

    def active(self, unit: str) -> bool:
        process = self.processes.get(unit)
        return process is not None and process.poll() is None

    def start(self, unit: str, description: str, argv: list[str], log: Path) -> None:
        assert not self.active(unit), "started twice"
        self.started.append(unit)
        with log.open("ab") as stream:
            self.processes[unit] = subprocess.Popen(argv, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True)

    def stop(self, unit: str) -> None:
        if self.active(unit):
            self.signal(unit, signal.SIGTERM)
            self.processes[unit].wait(10)

    def signal(self, unit: str, number: int) -> None:
        os.killpg(self.processes[unit].pid, number)

    def kill(self) -> None:
        """kill -9 of everything: what a power cut or the out-of-memory killer does."""
        for unit, process in self.processes.items():
            if process.poll() is None:
                self.signal(unit, signal.SIGKILL)
                process.wait(10)
