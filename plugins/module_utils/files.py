# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Files that are either old or new, never half written, and digests that are not computed twice."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20  # of a JSON file of this collection's; the largest have some hundred bytes for each file of a snapshot

# There is no file of that name, or something else than a file: a socket, a device without a driver, a circle of links.
_NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV}


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


def read_regular(path: Path, limit: int = MAX_JSON_BYTES) -> bytes | None:
    """A regular file's bytes, also through a link. None when there is none of at most `limit` bytes: absent, folder, FIFO, device, larger.

    OSError when the file is there and cannot be read (no access, a failing disk): that must not pass for an absent one.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: a FIFO must not hang us
    except OSError as failure:
        if failure.errno in _NO_FILE:
            return None
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_size > limit:
        os.close(fd)
        return None
    with os.fdopen(fd, "rb") as stream:
        raw = stream.read(limit + 1)
    return raw if len(raw) <= limit else None


def read_json(path: Path) -> Any:
    """The value in a JSON file; None when there is no such regular file, or when it does not parse (an unfinished write of another tool).

    OSError as read_regular; nothing else is raised, whatever the file holds.
    """
    # ValueError: no JSON, no UTF-8, a number of thousands of digits, a NUL in the path; RecursionError: brackets without end.
    try:
        raw = read_regular(path)
        return None if raw is None else json.loads(raw.decode())
    except (ValueError, RecursionError):
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
