# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Files on their way from a source to a snapshot's folder: continued, hashed while they are written, compared, and only then renamed."""

from __future__ import annotations

import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .files import fsync_dir
from .jobs import JobFailure, Progress
from .problems import Problem, problem
from .safetensors_header import lfs_pointer
from .snapshot_files import PRISTINE, Digests, part_name
from .sources import CHUNK, LONGEST_PAUSE_S, Interrupted, Promise, Source, unreachable

POINTER_BYTES = 1024  # a Git LFS pointer is smaller than that
END_S = 5.0  # how long other transfers may take to notice that one has failed


class Abandoned(Exception):
    """Another file has failed: this one is not gone on with. Its part stays."""


class Meter:
    """A job's progress that several threads may tell of: bytes of the stage, over several files at a time."""

    def __init__(self, progress: Progress, guard: threading.Lock | None = None) -> None:
        self._progress, self._lock = progress, guard or threading.Lock()
        self._have: dict[str, int] = {}
        self._sum = 0

    def stage(self, name: str, total: float | None = None, unit: str = "", message: str = "") -> None:
        """Begin a stage."""
        with self._lock:
            self._have, self._sum = {}, 0
            self._progress.stage(name, total, unit, message)

    def at(self, name: str, have: int, message: str | None = None) -> None:
        """How much of a file is there."""
        with self._lock:
            self._sum += have - self._have.get(name, 0)
            self._have[name] = have
            self._progress.at(self._sum, message=message)

    def mark(self) -> None:
        """The rate counts from here."""
        with self._lock:
            self._progress.mark()


@dataclass
class Fetched:
    """One file that was brought. size, resumed: bytes."""

    size: int
    sha256: str
    resumed: int


class Fetch:
    """Brings files of one source to one folder. May be used by several threads for different files."""

    def __init__(
        self,
        source: Source,
        dest: Path,
        meter: Meter,
        sleep: Callable[[float], None] = time.sleep,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        self._source, self._dest, self._meter, self._sleep = source, dest, meter, sleep
        self._sizes = sizes or {}  # bytes of files as the source told them before
        self.stop = threading.Event()

    def file(self, name: str, promise: Promise) -> Fetched:
        """name.part, continued, hashed, compared, fsynced, renamed."""
        path, place = self._dest / part_name(name, promise), self._dest / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_part(path) as part:
            resumed, digests, wrong = self._fill(part, name, promise)
            if wrong and (resumed or self._source.pauses):
                # The part may have been damaged by a power cut, or the bytes on their way: once more from the beginning.
                print(f"{name}: {wrong}; once more from the beginning", flush=True)
                part.truncate(0)
                resumed, digests, wrong = self._fill(part, name, promise)
            if wrong:
                path.unlink()
                remedy = "the source is not what is pinned, or changes bytes on the way (a proxy, bad memory): mend it, or choose another"
                raise JobFailure(problem("digest_mismatch", f"{name}: {wrong}", remedy))
            size = part.tell()
            if pointer := _pointer(part, name, size):
                path.unlink()
                raise JobFailure(pointer)
            os.fchmod(part.fileno(), 0o644)
            os.fsync(part.fileno())
            os.posix_fadvise(part.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        (self._dest / PRISTINE / name).unlink(missing_ok=True)  # of the file that is replaced now
        path.rename(place)  # replaces a link itself, never what it points to
        fsync_dir(place.parent)
        return Fetched(size, digests.sha256, resumed)

    def _fill(self, part: IO[bytes], name: str, promise: Promise) -> tuple[int, Digests, str]:
        """Complete the part. Returns how many bytes it had already, the digests of the whole, and what is wrong with them."""
        digests = Digests(promise)
        part.seek(0)
        while chunk := part.read(CHUNK):
            digests.update(chunk)
            self._meter.at(name, digests.size)
        resumed = digests.size
        self._meter.mark()  # reading a part is faster than bringing it
        tries, best, ignores, total = 0, digests.size, False, promise.size  # best: of the best try; only more than that is progress
        while True:
            start = digests.size
            try:
                piece = self._source.read(name, start)
                too_long, total = piece.total is not None and start > piece.total, promise.size if piece.total is None else piece.total
                ignores = ignores or (piece.start != start and not too_long)
                if too_long or piece.start != start:  # longer than the file, or the server ignores Range
                    part.seek(0)
                    part.truncate(0)
                    digests = Digests(promise)
                    resumed = start = 0
                    best = 0 if too_long else best
                if too_long and piece.start:
                    continue
                if None not in (piece.total, promise.size) and piece.total != promise.size:
                    return resumed, digests, f"the source has {piece.total} bytes, {promise.size} are promised"
                most = self._sizes.get(name) if total is None else total  # a server that never ends must not fill the disk
                for chunk in piece.chunks:
                    if self.stop.is_set():
                        raise Abandoned
                    if most is not None and digests.size + len(chunk) > most:
                        _end(piece.chunks)
                        return resumed, digests, f"more than the {most} bytes that are promised come from the source"
                    _write_all(part, chunk)
                    digests.update(chunk)
                    self._meter.at(name, digests.size, message="")
                if piece.end is not None and start < digests.size == piece.end:  # all that was promised, and there is more
                    tries, best = 0, max(best, digests.size)
                    continue
                if total is not None and digests.size < total:
                    raise Interrupted(f"{name}: the source ended after {digests.size} of {total} bytes")
                return resumed, digests, digests.wrong()
            except Interrupted as error:
                tries, best = 1 if digests.size > best else tries + 1, max(best, digests.size)
                if tries > len(self._source.pauses) or error.after_s > LONGEST_PAUSE_S:
                    if ignores:
                        raise _without_range(name, best, total, tries) from error
                    raise unreachable(error, tries) from error
                self._wait(name, digests.size, max(self._source.pauses[tries - 1], error.after_s), error)

    def _wait(self, name: str, have: int, seconds: float, error: Interrupted) -> None:
        note = f"{name}: trying again in {seconds:g} s: {error}"
        print(note, flush=True)
        self._meter.at(name, have, message=note)
        if self.stop.is_set():
            raise Abandoned
        self._sleep(seconds)
        if self.stop.is_set():
            raise Abandoned

    def files(self, todo: Sequence[tuple[str, Promise]], workers: int, done: Callable[[str, Fetched], None]) -> None:
        """All of them, several at a time; done is called in this thread. JobFailure with the problems of all that failed."""
        waiting: queue.SimpleQueue[tuple[str, Promise]] = queue.SimpleQueue()
        ended: queue.SimpleQueue[tuple[str, Fetched | BaseException | None]] = queue.SimpleQueue()
        for entry in todo:
            waiting.put(entry)

        def work() -> None:
            while not self.stop.is_set():
                try:
                    name, promise = waiting.get_nowait()
                except queue.Empty:
                    break
                try:
                    ended.put((name, self.file(name, promise)))
                except BaseException as error:
                    self.stop.set()
                    ended.put((name, error))
            ended.put(("", None))

        running = max(1, min(workers, len(todo)))
        for number in range(running):
            # Daemons: a transfer that hangs in the network must not keep the worker from writing its result.
            threading.Thread(target=work, name=f"transfer {number}", daemon=True).start()
        failed: list[BaseException] = []
        try:
            while running and not failed:
                name, got = ended.get()
                if got is None:
                    running -= 1
                elif isinstance(got, Fetched):
                    done(name, got)
                else:
                    failed.append(got)
            until = time.monotonic() + END_S
            with suppress(queue.Empty):
                while running and failed:
                    name, got = ended.get(timeout=max(0.0, until - time.monotonic()))
                    if got is None:
                        running -= 1
                    elif isinstance(got, Fetched):
                        done(name, got)
                    else:
                        failed.append(got)
        finally:
            self.stop.set()
        if failed:
            raise _one(failed)


def _one(failed: Sequence[BaseException]) -> BaseException:
    """What to raise for several: the problems of all, or an error that is no problem of the transfer."""
    told = [error for error in failed if not isinstance(error, Abandoned)] or list(failed)
    problems: dict[tuple[str, str], Problem] = {}
    for error in told:
        if not isinstance(error, JobFailure):
            return error
        problems |= {(found["class"], found["evidence"]): found for found in error.problems}
    return JobFailure(*problems.values())


def _pointer(part: IO[bytes], name: str, size: int) -> Problem | None:
    """A Git LFS pointer has the right digest when the list was made from pointers."""
    if size >= POINTER_BYTES:
        return None
    part.seek(0)
    start = part.read(POINTER_BYTES)
    part.seek(0, os.SEEK_END)
    return lfs_pointer(start, name, size)


def _end(chunks: object) -> None:
    """Close the connection of an answer that is not taken to its end."""
    if callable(close := getattr(chunks, "close", None)):
        close()


def _write_all(part: IO[bytes], data: bytes) -> None:
    """An unbuffered write may take only a part, as on a disk that is nearly full."""
    left = memoryview(data)
    while left:
        left = left[part.write(left) :]


def _without_range(name: str, best: int, total: int | None, tries: int) -> JobFailure:
    of = "an unknown number of" if total is None else str(total)
    evidence = f"{name}: the server ignores Range and breaks off after {best} of {of} bytes ({tries} tries without a new byte)"
    remedy = "serve the folder with a web server that knows Range requests (nginx does), or copy it to the node and give that folder"
    return JobFailure(problem("source_unreachable", evidence, remedy))


def _open_part(path: Path) -> IO[bytes]:
    """For reading and writing, made if absent; a link or FIFO of that name is not followed but replaced."""
    if os.path.lexists(path) and not stat.S_ISREG(mode := path.lstat().st_mode) and not stat.S_ISDIR(mode):
        path.unlink()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "r+b", buffering=0)
