# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Runs the project's playbooks on the rehearsal's nodes, through ansible-runner."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
from runs import ROOT, OnNode, Playbook, Run

REHEARSAL = ROOT / ".rehearsal"
OCTETS = {"spark1": 11, "spark2": 12}


@pytest.fixture
def playbook(tmp_path: Path) -> Playbook:
    """Run a playbook of the checkout: playbook(name, arguments='--check', cancel=callable, extra={...}, limit='spark1').

    inventories: more of them, after the rehearsal's.
    """
    count = 0

    def run(
        name: str,
        *,
        arguments: str = "",
        limit: str | None = "spark1",
        extra: dict[str, Any] | None = None,
        cancel: Callable[[], bool] | None = None,
        inventories: Sequence[Path] = (),
    ) -> Run:
        nonlocal count
        count += 1
        data = tmp_path / f"run{count}"
        data.mkdir()
        stages = data / "stages.json"
        began = time.monotonic()
        runner = ansible_runner.run(
            private_data_dir=str(data),
            project_dir=str(ROOT),
            inventory=[str(ROOT / "inventory/rehearsal"), *map(str, inventories)],
            playbook=name,
            limit=limit,
            cmdline=arguments or None,
            extravars=extra or {},
            envvars={"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "DGXSPARK_STAGES_JSON": str(stages), "ANSIBLE_NOCOLOR": "1"},
            cancel_callback=cancel,
            quiet=True,
        )
        results = [
            event["event_data"].get("res") or {}
            for event in runner.events
            if event.get("event") in {"runner_on_failed", "runner_on_unreachable", "runner_item_on_failed"}
        ]
        done = [
            (event["event_data"]["host"], event["event_data"]["task_action"], event["event_data"].get("res") or {})
            for event in runner.events
            if event.get("event") == "runner_on_ok"
        ]
        with runner.stdout as stream:
            output = stream.read()
        figures = json.loads(stages.read_text()) if stages.exists() else {}
        return Run(runner.status, runner.rc, time.monotonic() - began, output, figures, results, done)

    return run


@pytest.fixture(scope="session")
def on_node() -> OnNode:
    """Run a command on a node as root; returns its output. Fails the test when the command fails, unless check=False."""

    def run(*argv: str, check: bool = True, host: str = "spark1") -> str:
        address = f"{(REHEARSAL / 'prefix').read_text()}.0.{OCTETS[host]}"
        done = subprocess.run(
            [
                "ssh", "-i", str(REHEARSAL / "ssh/id_ed25519"), "-o", f"UserKnownHostsFile={REHEARSAL / 'ssh/known_hosts'}",
                "-o", f"HostKeyAlias={host}", "-o", "BatchMode=yes", f"spark@{address}", "sudo " + shlex.join(argv),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if check and done.returncode:
            pytest.fail(f"{shlex.join(argv)} on {host}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    return run
