# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Hybrid checkpoints in tests: small pairs of source and donor, and builds of them in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shards
import synthetic_checkpoint
from ansible_collections.dgxspark.vllm.plugins.module_utils import hybrid_build
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure, Progress
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import Book, Wanted, note
from ansible_collections.dgxspark.vllm.plugins.module_utils.sources import Promise

COMMIT = "f" * 40
LAYERS = 4
WEIGHTS = 3 * LAYERS


def pair(folder: Path, *, layers: int = LAYERS, seed: int = 0, donor: str = "donor", **how: Any) -> None:
    """A source in folder/source and its donor in folder/<donor>, of some 600 kB each."""
    if not (folder / "source").exists():
        synthetic_checkpoint.write_source(folder / "source", 700_000, layers=layers, experts=2, shards=3)
    synthetic_checkpoint.write_donor(folder / donor, folder / "source", seed=seed, **how)


def snapshot(folder: Path, revision: str = "a" * 40) -> None:
    """Make a folder a complete snapshot of what is in it."""
    names = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith(".dgxspark")]
    notes = {name: note(folder, name, shards.tree(folder)[name][2]) for name in names}
    promises = {name: Promise(entry["size"], entry["sha256"]) for name, entry in notes.items()}
    Book(folder, "org/int4", revision, "hub", Wanted(revision, "", promises, [])).finished(notes)


def spec(folder: Path, mode: str = "materialize", **other: Any) -> dict[str, Any]:
    """A build's spec, without a reserve of disk space."""
    return {
        "mode": mode,
        "source": str(folder / "source"),
        "output": str(folder / "output"),
        "donor_repo": "org/fp8",
        "donor_revision": COMMIT,
        "donor_source": str(folder / "donor"),
        "reserve_bytes": 0,
        "lock_wait_s": 0.0,
        **other,
    }


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote, so that no test here has to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


class Watched(Progress):
    """Progress that calls something at the beginning of each stage, and whenever something is done."""

    def __init__(self, path: Path, seen: Callable[[str, float], None]) -> None:
        self.stages: list[str] = []
        self._seen, self._stage = seen, "start"
        super().__init__(path)

    def stage(self, name: str, total: float | None = None, unit: str = "", message: str = "") -> None:
        self._stage = name
        self.stages.append(name)
        super().stage(name, total, unit, message)
        self._seen(name, 0)

    def at(self, done: float, total: float | None = None, message: str | None = None) -> None:
        super().at(done, total, message)
        self._seen(self._stage, done)


def build(folder: Path, mode: str = "materialize", seen: Callable[[str, float], None] = lambda _stage, _done: None, **other: Any) -> Any:
    """Build in this process. Returns the report."""
    return hybrid_build.build(spec(folder, mode, **other), Watched(folder.parent / f"{folder.name}.progress", seen), lambda _s: None)


def failure(folder: Path, mode: str = "materialize", **other: Any) -> JobFailure:
    """The failure of a build that must fail."""
    try:
        report = build(folder, mode, **other)
    except JobFailure as failed:
        return failed
    raise AssertionError(f"built: {report}")


def classes(failed: JobFailure) -> list[str]:
    return [found["class"] for found in failed.problems]


def expected(source: Path, donor: Path) -> dict[str, shards.Raw]:
    """What a hybrid must hold by its index: worked out with the safetensors library, by names that are written here."""
    want = {name: raw for tensors in shards.contents(source).values() for name, raw in tensors.items()}
    for tensors in shards.contents(donor).values():
        for name, raw in tensors.items():
            weight = name.removesuffix("_scale_inv")
            if ".mlp.shared_expert." in name and weight.endswith("_proj.weight") and not name.startswith("mtp."):
                want[name] = raw
    return want
