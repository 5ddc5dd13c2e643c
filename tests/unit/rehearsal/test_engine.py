# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def engine(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """engine.py on a machine where no engine answers and nothing may be started."""
    module = script("engine.py")

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"started {args}")

    monkeypatch.setattr(module, "server_version", lambda host: ("", "Cannot connect to the Docker daemon"))
    monkeypatch.setattr(module, "overlapping", lambda subnets: [])
    monkeypatch.setattr(module, "own_subnets", lambda host, label: [])
    monkeypatch.setattr(module, "start_own", refused)
    monkeypatch.setattr(module.subprocess, "run", refused)
    return module


def start(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """The message with which `start` refuses."""
    monkeypatch.setattr(sys, "argv", ["engine.py", "start", str(folder), *more])
    with pytest.raises(SystemExit) as refusal:
        module.main()
    return str(refusal.value.code)


def test_no_engine_and_no_root_gets_the_commands(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    message = start(engine, Path("/tmp/r"), monkeypatch)
    assert "sudo apt-get install -y" in message
    assert "docker.io" in message
    assert "usermod -aG docker" in message


def test_everything_that_is_missing_is_said_at_once(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(engine, "overlapping", lambda subnets: ["10.77.0.1 on eth7"] if "10.77.0.0/24" in subnets else [])
    message = start(engine, Path("/tmp/" + "long" * 20), monkeypatch, "--disk-gib", "1000000", "--subnet=10.77.0.0/24")
    for word in ("docker.io", "GiB free", "characters", "10.77.0.1 on eth7", "REHEARSAL_PREFIX"):
        assert word in message
    assert message.count("remedy:") == 4


def test_root_is_refused_for_space_before_anything_is_installed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    message = start(engine, Path("/tmp/r"), monkeypatch, "--disk-gib", "1000000")
    assert "GiB free" in message


def test_an_engine_that_answers_is_used_as_it_is(engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(engine, "server_version", lambda host: ("28.2.2", ""))
    monkeypatch.setattr(engine, "missing_packages", lambda with_engine: [])
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setattr(sys, "argv", ["engine.py", "start", "/tmp/r"])
    engine.main()
    answer = json.loads(capsys.readouterr().out)
    assert answer["host"] == "tcp://127.0.0.1:1"
    assert answer["own"] is False
    assert answer["done"] == []


def test_stop_signals_nothing_but_its_own_engine(script: Callable[[str], Any], tmp_path: Path) -> None:
    module = script("engine.py")
    (tmp_path / "engine").mkdir()
    data = str(tmp_path / "engine/data")
    for argv in (["sleep", "60"], ["sh", "-c", "sleep 60; true", "x", data], ["sh", "-c", "sleep 60; true", "--data-root", data]):
        with subprocess.Popen(argv) as stranger:
            (tmp_path / "engine/docker.pid").write_text(str(stranger.pid))
            assert module.stop_own(tmp_path) is False
            assert stranger.poll() is None
            stranger.kill()
    (tmp_path / "engine/docker.pid").write_text("not a number")
    assert module.stop_own(tmp_path) is False
    assert module.stop_own(tmp_path / "nowhere") is False


def test_networks_that_do_not_fit(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("engine.py")
    taken = {"10.77.0.0/24", "10.78.0.0/16"}
    monkeypatch.setattr(module, "overlapping", lambda subnets: ["x on eth0"] if taken & set(subnets) else [])
    assert module.network_problem(["10.80.0.0/24"], []) == ""
    assert module.network_problem(["10.77.0.0/24"], ["10.77.0.0/24", "10.77.177.0/24"]) == ""
    assert "REHEARSAL_PREFIX=10.79" in module.network_problem(["10.77.0.0/24"], [])
    moved = module.network_problem(["10.77.0.0/24"], ["10.79.0.0/24"])
    assert "REHEARSAL_PREFIX=10.79" in moved
    assert "make rehearsal-clean" in moved
    for nonsense in ("foo.0.0/24", "300.1.0.0/24", "10.79.5.0.0/24"):
        assert "remedy" in module.network_problem([nonsense], [])
