# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Byte ranges from file to file inside the kernel, and files that are on disk before anything says so.

Nothing here holds more than a few hundred kilobytes, and what was copied leaves the page cache again: on unified memory a 70 GB copy
would otherwise stand where a model wants to be.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

STEP = 32 << 20  # bytes of one call: between two of them a signal is heard and progress told
ALIGN = 2 << 20  # a call ends at such an offset of the source: whole pages, also of those that the page cache joins
BUFFER = 256 << 10  # of the way that works everywhere
PENDING_BYTES = 512 << 20  # written, not yet known to be on disk
PENDING_FILES = 64

# What tells that the kernel cannot copy between these two files: other file systems, or one that lacks the call.
_CANNOT = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY}


class Truncated(Exception):
    """A source that has fewer bytes than it had."""


class Copier:
    """Copies ranges by the fastest way that two files allow, and counts.

    moved: called with each number of bytes that were copied. read, written: bytes, all ways together.
    """

    def __init__(self, moved: Callable[[int], None]) -> None:
        self.read = 0
        self.written = 0
        self._moved = moved
        self._ways = [way for way in (_in_kernel, _by_sendfile) if way is not _in_kernel or hasattr(os, "copy_file_range")]

    def write(self, target: int, data: bytes | memoryview, at: int) -> None:
        """Bytes from memory."""
        left = memoryview(data)
        while left:
            done = os.pwrite(target, left, at)
            left, at = left[done:], at + done
            self.written += done

    def copy(self, source: int, start: int, target: int, at: int, length: int) -> None:
        """`length` bytes from offset `start` of one open file to offset `at` of another. Truncated when the source ends before."""
        left = length
        while left:
            done = self._some(source, start, target, at, min(STEP - start % min(ALIGN, STEP), left))
            if not done:
                raise Truncated(f"it ends at {start}, {left} bytes early")
            # Starts writing these pages now, and lets go of those that are written already; of the source's, too.
            os.posix_fadvise(target, max(0, at - STEP), done + STEP, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(source, start, done, os.POSIX_FADV_DONTNEED)
            start, at, left = start + done, at + done, left - done
            self.read += done
            self.written += done
            self._moved(done)

    def _some(self, source: int, start: int, target: int, at: int, length: int) -> int:
        """One call's worth; a way that these files do not allow is not tried again."""
        for way in list(self._ways):
            try:
                if done := way(source, start, target, at, length):
                    return done
                break  # 0: the end, or a file system whose copy_file_range moves nothing
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                self._ways.remove(way)
        return _by_buffer(source, start, target, at, length)


def _in_kernel(source: int, start: int, target: int, at: int, length: int) -> int:
    return os.copy_file_range(source, target, length, start, at)


def _by_sendfile(source: int, start: int, target: int, at: int, length: int) -> int:
    os.lseek(target, at, os.SEEK_SET)
    return os.sendfile(target, source, start, length)


def _by_buffer(source: int, start: int, target: int, at: int, length: int) -> int:
    data = memoryview(os.pread(source, min(BUFFER, length), start))
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:], at + done)
    return done


@dataclass
class Pending:
    """A file whose last byte was written. note: called with its final state once it is on disk."""

    path: Path
    descriptor: int
    size: int
    note: Callable[[os.stat_result], None]


@dataclass
class Flusher:
    """Files on their way to the disk. Each is waited for when later ones keep the disk busy, so that none waits for nothing."""

    waiting: list[Pending] = field(default_factory=list)

    def add(self, pending: Pending) -> None:
        """One more, written to the end. It is closed here."""
        self.waiting.append(pending)
        while sum(each.size for each in self.waiting[:-1]) > PENDING_BYTES or len(self.waiting) > PENDING_FILES:
            self._settle()

    def finish(self) -> None:
        """All of them."""
        while self.waiting:
            self._settle()

    def salvage(self) -> None:
        """All of them, after something went wrong: what reaches the disk is noted, what does not is deleted like the first."""
        while self.waiting:
            with suppress(OSError):
                self._settle()

    def abandon(self) -> None:
        """Close without waiting: what is not noted is written again."""
        while self.waiting:
            os.close(self.waiting.pop().descriptor)

    def _settle(self) -> None:
        """The first. A file that cannot be flushed is deleted, and never asked again: the kernel tells of lost pages once, and a
        second fsync of the same file succeeds without them."""
        first = self.waiting.pop(0)
        try:
            try:
                os.fsync(first.descriptor)
                os.posix_fadvise(first.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                info = os.fstat(first.descriptor)
            finally:
                os.close(first.descriptor)  # a network mount may tell of a full disk only here
        except OSError as error:
            error.filename = error.filename or str(first.path)
            first.path.unlink(missing_ok=True)
            raise
        first.note(info)
