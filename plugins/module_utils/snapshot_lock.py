# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One run at a time for a snapshot's folder, whatever started it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .jobs import JobFailure
from .problems import problem
from .snapshot_files import LOCK, size_of
from .sources import Say

LOCK_LOOK_S = 1.0


@contextmanager
def locked(dest: Path, patience_s: float, say: Say) -> Iterator[None]:
    """One run at a time for a destination. Waits while another one moves bytes; JobFailure when it has not for patience_s (0: waits on)."""
    stream = None
    moved, before, told = time.monotonic(), -1, False
    while stream is None:
        stream, holder = _try_lock(dest / LOCK)
        if stream is not None:
            break
        if not told:
            say(f"waiting: process {holder} is filling {dest}")
            told = True
        now = sum(size_of(path) for path in dest.rglob("*"))
        moved, before = (time.monotonic(), now) if now != before else (moved, before)
        if 0 < patience_s <= time.monotonic() - moved:
            evidence = f"process {holder} has held {dest / LOCK} for {patience_s:g} s without a new byte in {dest}"
            remedy = f"see what it is (ps -fp {holder}) and end it if it hangs; then run the same command again"
            raise JobFailure(problem("dest_locked", evidence, remedy))
        time.sleep(LOCK_LOOK_S)
    try:
        yield
    finally:
        (dest / LOCK).unlink(missing_ok=True)  # while it is held: the next one makes its own
        stream.close()


def _try_lock(path: Path) -> tuple[Any, str]:
    """(the lock's open file, '') or (None, who holds it)."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    stream = os.fdopen(descriptor, "r+")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(stream.fileno()) or stream.read(20).strip() or "of unknown id"
        stream.close()
        return None, holder
    if not _same_file(descriptor, path):  # its holder removed it when it ended
        stream.close()
        return _try_lock(path)
    with suppress(OSError):  # a full disk; the kernel knows who holds it, too
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
    return stream, ""


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    """The process that holds a file's lock, as the kernel says; '' when it does not."""
    info = os.fstat(descriptor)
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    with suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == place and words[4] != "0":
                return words[4]
    return ""
