# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Builds that are killed at any point, and disks that fill up: the next run completes, and nothing partial is ever accepted."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hybrids
import pytest
import shards
from ansible_collections.dgxspark.vllm.plugins.module_utils import donor, hybrid_build, range_copy
from ansible_collections.dgxspark.vllm.plugins.module_utils.hybrid_folder import MANIFEST, complete, inputs_of
from ansible_collections.dgxspark.vllm.plugins.module_utils.hybrid_source import look_at
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import Stopped
from hybrids import no_waiting  # noqa: F401 -- a fixture

# Everything that changes the disk but writing to the donor shard, which ends in one of them.
CALLS = ("copy_file_range", "fsync", "link", "mkdir", "pwrite", "rename", "rmdir", "unlink")
MODES = pytest.mark.parametrize("mode", ["materialize", "overlay"])
OLD = "0" * 40


@pytest.fixture(autouse=True)
def fine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small steps, as a large checkpoint has them."""
    monkeypatch.setattr(hybrid_build, "JOURNAL_BYTES", 100_000)
    monkeypatch.setattr(range_copy, "PENDING_BYTES", 0)
    monkeypatch.setattr(range_copy, "STEP", 40_000)
    monkeypatch.setattr(donor, "SYNC_BYTES", 20_000)


def at_call(number: int, act: Callable[[], Any]) -> list[str]:
    """Do something before the number-th change of the disk by this process. Returns the calls so far, which grows."""
    seen: list[str] = []

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **named: Any) -> Any:
            seen.append(name)
            if len(seen) == number:
                act()
            return real(*args, **named)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)
    return seen


def in_child(work: Callable[[], Any]) -> int:
    """Run in a child of its own; returns its pid. It ends with 0 when the work ended, with 3 when it was stopped by SIGTERM."""
    child = os.fork()
    if child:
        return child
    status = 2
    try:

        def on_term(_signal: int, _frame: Any) -> None:
            raise Stopped

        signal.signal(signal.SIGTERM, on_term)
        work()
        status = 0
    except Stopped:
        status = 3
    finally:
        os._exit(status)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_build(folder: Path, mode: str, number: int, sign: int) -> int:
    """A build that gets a signal before its number-th change of the disk. Returns how its process ended."""

    def work() -> None:
        at_call(number, lambda: os.kill(os.getpid(), sign))
        hybrids.build(folder, mode)

    return ended(in_child(work))


def acceptable(folder: Path, mode: str, revision: str) -> bool:
    """Whether the output passes for complete."""
    source = look_at(folder / "source")
    return complete(folder / "output", inputs_of(mode, source.identity, "org/fp8", revision), source)[0] is not None


def digests(folder: Path) -> dict[str, str]:
    """Every file's bytes, and the manifest without times."""
    found = {name: digest for name, (_, _, digest) in shards.tree(folder).items() if name != MANIFEST}
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest.pop("name")
    manifest["files"] = {name: entry["size"] for name, entry in manifest["files"].items()}
    return {**found, MANIFEST: json.dumps(manifest, sort_keys=True)}


class Case:
    """A source, two donors, an output of the older one, and what a build without a kill makes of the newer one."""

    def __init__(self, folder: Path, mode: str, with_old: bool) -> None:
        self.folder, self.mode, self.with_old = folder, mode, with_old
        hybrids.pair(folder)
        hybrids.pair(folder, seed=7, donor="old donor")
        self.source = shards.tree(folder / "source")
        hybrids.build(folder, mode, output=str(folder / "reference"))
        self.want = digests(folder / "reference")
        self.old: dict[str, str] = {}
        self.reset()
        self.calls = self._counted()

    def _counted(self) -> int:
        """How many changes of the disk a build makes."""
        read, write = os.pipe()

        def work() -> None:
            seen = at_call(-1, lambda: None)
            hybrids.build(self.folder, self.mode)
            os.write(write, str(len(seen)).encode())

        assert ended(in_child(work)) == 0
        os.close(write)
        with os.fdopen(read) as stream:
            count = int(stream.read())
        self.reset()
        return count

    def reset(self) -> None:
        for name in ("output", "output.previous", ".output.building"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if self.with_old:
            hybrids.build(self.folder, self.mode, donor_source=str(self.folder / "old donor"), donor_revision=OLD)
            self.old = digests(self.folder / "output")

    def check_between(self) -> None:
        """After a kill: whatever is there under the output's name is whole."""
        assert shards.tree(self.folder / "source") == self.source
        output = self.folder / "output"
        if acceptable(self.folder, self.mode, hybrids.COMMIT):
            assert digests(output) == self.want
        elif output.exists():
            assert self.with_old and acceptable(self.folder, self.mode, OLD) and digests(output) == self.old

    def check_end(self) -> None:
        assert acceptable(self.folder, self.mode, hybrids.COMMIT)
        assert digests(self.folder / "output") == self.want and shards.tree(self.folder / "source") == self.source
        assert not (self.folder / ".output.building").exists()
        assert (self.folder / "output.previous").exists() == self.with_old
        if self.with_old:
            assert digests(self.folder / "output.previous") == self.old


@MODES
@pytest.mark.parametrize("with_old", [False, True], ids=["first", "again"])
def test_a_build_that_is_killed_anywhere_is_taken_up(tmp_path: Path, mode: str, with_old: bool) -> None:
    case = Case(tmp_path, mode, with_old)
    assert case.calls > 40
    chance = random.Random(f"{mode} {with_old}")
    # The last changes publish the output: all of them, and others from everywhere.
    points = sorted({*chance.sample(range(1, case.calls - 8), 7), *range(case.calls - 5, case.calls + 1)})
    for number, point in enumerate(points):
        sign = signal.SIGTERM if number % 4 == 3 else signal.SIGKILL
        assert killed_build(tmp_path, mode, point, sign) == (3 if sign == signal.SIGTERM else -sign), point
        case.check_between()
        hybrids.build(tmp_path, mode)
        case.check_end()
        case.reset()


@MODES
def test_a_build_that_is_killed_again_and_again_ends(tmp_path: Path, mode: str) -> None:
    case = Case(tmp_path, mode, True)
    chance = random.Random(mode)
    kills = 0
    while killed_build(tmp_path, mode, chance.randint(5, case.calls), signal.SIGKILL):
        kills += 1
        case.check_between()
    assert kills >= 2
    case.check_end()


@MODES
def test_kills_by_the_clock(tmp_path: Path, mode: str) -> None:
    case = Case(tmp_path, mode, False)
    lasts = 60.0
    for _ in range(3):
        began = time.monotonic()
        assert ended(in_child(lambda: hybrids.build(tmp_path, mode))) == 0
        lasts = min(lasts, time.monotonic() - began)
        case.reset()
    chance = random.Random(mode)
    killed = 0
    for number in range(10):
        child = in_child(lambda: hybrids.build(tmp_path, mode))
        time.sleep(chance.uniform(0.1, 0.95) * lasts)
        sign = signal.SIGTERM if number % 3 == 2 else signal.SIGKILL
        os.kill(child, sign)
        how = ended(child)
        assert how in (-sign, 0, 3)
        killed += how != 0
        case.check_between()
        hybrids.build(tmp_path, mode)
        case.check_end()
        case.reset()
    assert killed >= 3


# --- a small disk ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@MODES
def test_a_disk_that_fills_up_in_the_middle(tmp_path: Path, small_disk: Path, mode: str) -> None:
    hybrids.pair(tmp_path)
    hybrids.build(tmp_path, mode, output=str(tmp_path / "reference"))
    where = {"output": str(small_disk / "output")}
    if mode == "overlay":  # links stay on one file system
        shutil.copytree(tmp_path / "source", small_disk / "source")
        where["source"] = str(small_disk / "source")
    source = shards.tree(Path(where.get("source", tmp_path / "source")))

    def fill(now: str, done: float) -> None:
        if now == ("shards" if mode == "materialize" else "donor tensors") and not (small_disk / "ballast").exists():
            free = shutil.disk_usage(small_disk).free
            (small_disk / "ballast").write_bytes(bytes(max(0, free - (250_000 if mode == "materialize" else 10_000))))

    for _ in range(2):
        failed = hybrids.failure(tmp_path, mode, seen=fill, **where)
        assert hybrids.classes(failed) == ["disk_full"] and not (small_disk / "output").exists()
        assert str(small_disk) in failed.problems[0]["evidence"]
    (small_disk / "ballast").unlink()
    report = hybrids.build(tmp_path, mode, **where)
    assert mode == "overlay" or report["resumed"] > report["manifest"]["donor"]["bytes"]
    assert shards.by_index(small_disk / "output") == shards.by_index(tmp_path / "reference")
    assert shards.tree(Path(where.get("source", tmp_path / "source"))) == source
    assert not any(p.name.startswith(".output.b") for p in small_disk.iterdir())


def test_a_disk_that_is_too_small_is_told_beforehand_and_can_grow(tmp_path: Path, small_disk: Path) -> None:
    hybrids.pair(tmp_path)
    (tmp_path / "source" / "big.bin").write_bytes(bytes(3_000_000))
    failed = hybrids.failure(tmp_path, output=str(small_disk / "output"))
    assert hybrids.classes(failed) == ["disk_full"] and "are still to be written" in failed.problems[0]["evidence"]
    assert shutil.disk_usage(small_disk).used < 50_000
    subprocess.run(["mount", "-o", "remount,size=12m", str(small_disk)], check=True)
    hybrids.build(tmp_path, output=str(small_disk / "output"))
    assert shards.by_index(small_disk / "output") == hybrids.expected(tmp_path / "source", tmp_path / "donor")


def test_another_file_system_is_copied_to_and_not_linked_from(tmp_path: Path, small_disk: Path) -> None:
    hybrids.pair(tmp_path)
    failed = hybrids.failure(tmp_path, "overlay", output=str(small_disk / "output"))
    assert hybrids.classes(failed) == ["overlay_other_file_system"]
    hybrids.build(tmp_path, "materialize", output=str(small_disk / "output"))
    assert shards.by_index(small_disk / "output") == hybrids.expected(tmp_path / "source", tmp_path / "donor")
