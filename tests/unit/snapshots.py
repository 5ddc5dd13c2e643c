# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What tests of snapshots share: files with their list, a hub cache, and the worker's function called as the job would."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import snapshot
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure, Progress
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import MANIFEST, Request, complete, known
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_hub import hub_spec

REPO = "org/name"
INDEX = "model.safetensors.index.json"
MODEL = "model-00001-of-00002.safetensors"
FILES = {"config.json": b'{"a": 1}', INDEX: b"{}", MODEL: os.urandom(300_000), "empty.txt": b"", "sub/folder/vocab.txt": b"in a subfolder"}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def fill(folder: Path, files: Mapping[str, bytes]) -> str:
    """Files and their SHA256SUMS; returns the pin."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, files)
    text = "".join(f"{sha(data)}  {name}\n" for name, data in sorted(files.items()))
    (folder / "SHA256SUMS").write_text(text)
    return sha(text.encode())


def cache(root: Path, commit: str, files: Mapping[str, bytes], repo: str = REPO) -> Path:
    """A cache of the hub's own tools, with one more snapshot; returns the repository's folder in it."""
    folder = root / f"models--{repo.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        blob = sha(data) if name.endswith(".safetensors") else git(data)
        (folder / "blobs" / blob).write_bytes(data)
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("../" * (name.count("/") + 2) + f"blobs/{blob}")
    return folder


class Bring:
    """Runs the worker's function as the job would."""

    def __init__(self, folder: Path, dest: str = "dest/abc") -> None:
        self.dest = folder / dest
        self.pauses: list[float] = []
        self.folder = folder

    def spec(self, source: Any, pin: str = "", revision: str = "", **more: Any) -> dict[str, Any]:
        return {
            "repo": REPO,
            "revision": revision or pin,
            "pin": pin,
            "manifest_sha256": "",
            "source": str(source),
            "source_token_path": "",
            "dest": str(self.dest),
            "mutable": [INDEX],
            "verify": "stamps",
            "ignore_patterns": [],
            "space": [],
            "workers": 1,
            "stall_timeout_s": 30,
            "hub": None,
            **more,
        }

    def __call__(self, source: Any, pin: str = "", **more: Any) -> dict[str, Any]:
        progress = Progress(self.folder / f"progress-{self.dest.name}.json")
        return snapshot.bring(self.spec(source, pin, **more), progress, self.pauses.append)

    def hub(self, endpoint: str, revision: str, **more: Any) -> dict[str, Any]:
        return self("hub", "", revision=revision, **{"hub": self.hub_spec(endpoint, revision, **more), **_known(more)})

    def hub_spec(self, endpoint: str, revision: str, **more: Any) -> dict[str, Any]:
        p = {
            "endpoint": endpoint,
            "client_requirements": "",
            "client_python": sys.executable,
            "pip_args": [],
            "xet": "auto",
            "stall_timeout_s": 30,
            "state_dir": str(self.folder / "state"),
        }
        token_path = more.pop("token_path", "")
        return hub_spec(p | {name: value for name, value in more.items() if name in p}, REPO, revision, token_path)

    def failure(self, *args: Any, **more: Any) -> dict[str, Any]:
        with pytest.raises(JobFailure) as caught:
            self(*args, **more)
        return dict(caught.value.problems[0])

    def hub_failure(self, endpoint: str, revision: str, **more: Any) -> dict[str, Any]:
        with pytest.raises(JobFailure) as caught:
            self.hub(endpoint, revision, **more)
        return dict(caught.value.problems[0])

    def names(self) -> set[str]:
        return {p.relative_to(self.dest).as_posix() for p in self.dest.rglob("*") if not p.is_dir()}

    def manifest(self) -> bytes:
        return (self.dest / MANIFEST).read_bytes()

    def notes(self) -> dict[str, Any]:
        return known(self.dest).files

    def complete(self, pin: str = "", mutable: tuple[str, ...] = (INDEX,), revision: str = "", **more: Any) -> bool:
        request = Request(REPO, revision or pin, pin, **more)
        return complete(self.dest, request, mutable) is not None


def _known(more: Mapping[str, Any]) -> dict[str, Any]:
    """What of a call's settings the job's spec has, too."""
    names = ("mutable", "verify", "ignore_patterns", "space", "workers", "stall_timeout_s")
    return {name: more[name] for name in names if name in more}
