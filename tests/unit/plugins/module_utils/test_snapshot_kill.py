# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Downloads that are killed, and disks that fill up: the worker as a process of its own, as the job runs it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import snapshot, snapshot_space
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure, write_worker_zip
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import MANIFEST, STAMPS, size_of
from hub import ALWAYS, Fault, Hub
from hub import fill as fill_hub
from snapshots import INDEX, REPO, Bring

KILLS = 15
FILES = {"config.json": b'{"a": 1}', INDEX: b"{}"} | {f"model-{n:05}.safetensors": os.urandom(900_000 + n) for n in range(1, 5)}


class Worker:
    """The job's process, without systemd."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self.folder = folder / "job"
        self.folder.mkdir()
        (self.folder / "spec.json").write_text(json.dumps(spec))
        write_worker_zip(self.folder / "worker.zip", "snapshot")
        self._log = (self.folder / "log").open("ab")

    def start(self) -> subprocess.Popen[bytes]:
        (self.folder / "result.json").unlink(missing_ok=True)
        command = [sys.executable, "-I", "-B", "-u", str(self.folder / "worker.zip"), str(self.folder)]
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, start_new_session=True)

    def result(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return value


def children(pid: int) -> list[int]:
    """The clients that a worker has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def gone(pids: list[int]) -> bool:
    """Whether all these processes end within moments."""
    for _ in range(500):
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in pids):
            return True
        time.sleep(0.01)
    return False


def wait_for(process: subprocess.Popen[bytes], dest: Path, more: float) -> None:
    """Until so many more bytes are in the folder, or the worker has ended."""
    before = held(dest)
    while process.poll() is None and held(dest) - before < more:
        time.sleep(0.003)


def held(dest: Path) -> int:
    return sum(size_of(path) for path in dest.glob("**/*"))


def test_killed_at_any_moment_it_goes_on(hub: Hub, tmp_path: Path) -> None:
    """The worker, its clients or both, with SIGKILL. Nothing partial is ever accepted, and nothing verified is fetched twice."""
    commit = fill_hub(hub, REPO, FILES)
    whole = Bring(tmp_path, "whole")
    whole.hub(hub.url, commit)
    hub.requests.clear()
    hub.faults.append(Fault("throttle", path="/cdn/", rate=1_500_000, times=ALWAYS))
    bring = Bring(tmp_path)
    spec = bring.spec("hub", revision=commit, workers=2, hub=bring.hub_spec(hub.url, commit))
    worker, chance, done, complete = Worker(tmp_path, spec), random.Random(4711), 0, 0
    good: dict[str, int] = {}
    while done < KILLS:
        process = worker.start()
        if done % 5 == 4:  # while it starts and asks for the list
            time.sleep(chance.uniform(0.0, 0.5))
        else:
            wait_for(process, bring.dest, chance.uniform(0, 600_000))
        clients = children(process.pid)
        what = ["worker", "clients", "both"][done % 3]
        if what != "worker":
            for pid in clients:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if what == "clients":
            time.sleep(chance.uniform(0.0, 0.1))
            clients += children(process.pid)
        process.kill()
        process.wait(10)
        assert gone(clients), "a client outlived its worker"
        done += 1
        if (bring.dest / MANIFEST).exists():
            complete += 1
            assert bring.complete(revision=commit)
            for name in [*FILES, MANIFEST, STAMPS]:
                (bring.dest / name).unlink()
            good = {}
            continue
        assert not bring.complete(revision=commit)
        for name in bring.notes() if bring.dest.exists() else ():
            assert (bring.dest / name).read_bytes() == FILES[name]
            assert good.setdefault(name, (bring.dest / name).stat().st_ino) == (bring.dest / name).stat().st_ino, "fetched twice"
    hub.faults.clear()
    process = worker.start()
    assert process.wait(60) == 0, (worker.folder / "log").read_text()[-2000:]
    result = worker.result()["result"]
    assert bring.complete(revision=commit) and bring.manifest() == whole.manifest() and result["resumed_bytes"] > 0
    assert bring.names() == {*FILES, MANIFEST, STAMPS}
    for name, inode in good.items():
        assert (bring.dest / name).stat().st_ino == inode
    # What was on the disk was not fetched again: a kill costs at most what was on its way, in sockets and pipes.
    fetched = sum(r.sent for r in hub.transfers("model-"))
    assert fetched < (1 + complete) * 3_700_000 + KILLS * 2 * 500_000


def test_stopped_in_good_order(hub: Hub, tmp_path: Path) -> None:
    """SIGTERM: the result says so at once, although transfers hang, and no client is left."""
    commit = fill_hub(hub, REPO, FILES)
    hub.faults.append(Fault("stall", path="/cdn/", after=500_000, times=ALWAYS))
    bring = Bring(tmp_path)
    worker = Worker(tmp_path, bring.spec("hub", revision=commit, workers=3, hub=bring.hub_spec(hub.url, commit, stall_timeout_s=60)))
    process = worker.start()
    for _ in range(1000):
        if len(hub.transfers("model-")) == 3:
            break
        time.sleep(0.01)
    clients = children(process.pid)
    began = time.monotonic()
    process.terminate()
    process.wait(15)
    assert time.monotonic() - began < 10 and gone(clients) and len(clients) == 3
    assert [p["class"] for p in worker.result()["problems"]] == ["job_stopped"]


# --- disks -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "small", str(place)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_too_small_is_known_beforehand(hub: Hub, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fill_hub(hub, REPO, FILES)
    monkeypatch.setattr(snapshot_space, "RESERVE_BYTES", 100_000)
    bring = Bring(tmp_path, "small/dest")
    space = [{"path": str(small / "hybrid"), "bytes": 500_000, "snapshots": 0.0, "what": "the hybrid"}]
    found = bring.hub_failure(hub.url, commit, space=space)
    assert found["class"] == "disk_full" and str(small) in found["evidence"] and "for the hybrid" in found["evidence"]
    assert hub.transfers() == []


def test_a_disk_that_fills_up_meanwhile(hub: Hub, tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = fill_hub(hub, REPO, FILES)
    monkeypatch.setattr(snapshot, "check_space", lambda *_args: [])
    bring = Bring(tmp_path, "small/dest")
    with pytest.raises(JobFailure) as caught:
        bring.hub(hub.url, commit, workers=2)
    assert {p["class"] for p in caught.value.problems} == {"disk_full"} and MANIFEST not in bring.names()
    assert all(str(small) in p["evidence"] for p in caught.value.problems)
    kept = set(bring.notes())
    subprocess.run(["mount", "-o", "remount,size=30m", str(small)], check=True)
    hub.requests.clear()
    assert bring.hub(hub.url, commit, workers=2)["resumed_bytes"] > 0
    assert bring.complete(revision=commit) and not any(name in r.path for name in kept for r in hub.transfers())
