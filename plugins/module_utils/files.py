# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Files that are either old or new, never half written, and digests that are not computed twice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any


def fsync_dir(path: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write(path: Path, data: str | bytes, mode: int = 0o644, *, keep_owner: bool = False) -> None:
    """Write beside the target, fsync, rename. A link at `path` is replaced, never written through.

    keep_owner: a file that is replaced keeps its owner and group, where this process may give files away; else it is this process's.
    """
    raw = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as stream:
            if keep_owner:
                _keep_owner(stream.fileno(), path)
            os.fchmod(stream.fileno(), mode)  # after the owner: a change of owner takes set-uid bits away
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def _keep_owner(fd: int, path: Path) -> None:
    """Give an open file the owner and group of the regular file at `path`, if there is one."""
    # EPERM: not root; EINVAL: an owner that this user namespace does not know.
    with contextlib.suppress(OSError):
        old, new = os.lstat(path), os.fstat(fd)
        if stat.S_ISREG(old.st_mode) and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            os.fchown(fd, old.st_uid, old.st_gid)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Atomic JSON file, sorted keys, so that equal values are equal bytes."""
    atomic_write(path, json.dumps(value, indent=1, sort_keys=True) + "\n", mode)


def read_json(path: Path) -> Any:
    """The value in a JSON file; None when the file is absent or does not parse (an unfinished write of another tool)."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None


def file_sha256(path: Path) -> str:
    """Lower-case hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256(stream)


def _sha256(stream: Any) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def stamp(path: Path) -> list[int]:
    """[size in bytes, mtime in ns]: what must be unchanged for a remembered digest to hold."""
    info = path.stat()
    return [info.st_size, info.st_mtime_ns]
