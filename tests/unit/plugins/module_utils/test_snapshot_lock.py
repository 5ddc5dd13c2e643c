# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import snapshot_lock
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import LOCK
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_lock import locked
from snapshots import FILES, Bring, fill

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_lock, "LOCK_LOOK_S", 0.02)


@contextmanager
def holder(dest: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock until it is ended."""
    command = [sys.executable, "-c", HOLD, str(dest / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_leaves_nothing_behind(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path, 1, print):
            assert (tmp_path / LOCK).read_text().strip().isdigit()
        assert list(tmp_path.iterdir()) == []


def test_who_holds_it_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with holder(tmp_path) as process, pytest.raises(JobFailure) as caught, locked(tmp_path, 0.2, said.append):
        raise AssertionError("got the lock")
    found = caught.value.problems[0]
    assert found["class"] == "dest_locked" and f"process {process.pid} " in found["evidence"] and str(process.pid) in found["remedy"]
    assert said == [f"waiting: process {process.pid} is filling {tmp_path}"]


def test_it_is_waited_for_while_bytes_move(tmp_path: Path) -> None:
    began = time.monotonic()
    with holder(tmp_path) as process:

        def grow() -> None:
            for number in range(1, 9):
                time.sleep(0.1)
                (tmp_path / "part").write_bytes(bytes(number))
            process.kill()

        thread = threading.Thread(target=grow)
        thread.start()
        with locked(tmp_path, 0.6, print):
            waited = time.monotonic() - began
        thread.join()
    assert 0.7 < waited < 10 and not (tmp_path / LOCK).exists()


def test_many_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    inside, most, guard = [0], [0], threading.Lock()

    def run() -> None:
        with locked(tmp_path, 30, lambda _text: None):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0.005)
            with guard:
                inside[0] -= 1

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and not (tmp_path / LOCK).exists()


def test_two_runs_at_once_bring_it_once(tmp_path: Path) -> None:
    """Started by hand, or under another job's name: the second waits, and finds it done."""
    pin = fill(tmp_path / "source", FILES)
    results: list[str] = []

    def run() -> None:
        results.append(Bring(tmp_path)(tmp_path / "source", pin)["before"])

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Bring(tmp_path).complete(pin) and sorted(results)[0] == "" and "config.json: missing" in sorted(results)[1]
