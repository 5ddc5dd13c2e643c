# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A pinned set of files in a folder: from a folder or a web server, resumed, verified, and complete only when its manifest says so.

The pin is the SHA-256 of the source's SHA256SUMS file, which in turn pins every file.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import shutil
import socket
import stat
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from .files import fsync_dir, write_json
from .jobs import JobFailure, Progress, is_text, read_object, work_on
from .problems import Problem, problem

SUMS = "SHA256SUMS"
WRITE_SUMS = f"write it with: sha256sum * > {SUMS}"
MANIFEST = ".dgxspark-snapshot.json"
JOURNAL = ".dgxspark-snapshot.journal.json"
CHUNK = 4 << 20
RECEIVE = 1 << 20  # the most that one read of a connection asks for; it returns what is there
RESERVE_BYTES = 1 << 30  # what stays free on the file system after the snapshot
RETRY_PAUSES_S = (1, 2, 4, 8, 16, 30)
SOCKET_TIMEOUT_S = 60
MAX_SUMS_BYTES = 16 << 20
HEX64 = re.compile(r"[0-9a-f]{64}")
Say = Callable[[str], None]


# --- what is wanted --------------------------------------------------------------------------------------------------------------


def parse_sums(text: str) -> tuple[dict[str, str], list[Problem]]:
    """{file name: SHA-256} from sha256sum's output, text ('  ') and binary (' *') mode. Only bare names, or './name'."""
    sums: dict[str, str] = {}
    found: list[Problem] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.rstrip("\r")
        if not line.strip():
            continue
        match = re.fullmatch(r"([0-9A-Fa-f]{64}) [ *](.+)", line)
        if not match:
            remedy = f"{WRITE_SUMS}  (lines '<64 hex digits>  <name>')"
            found.append(problem("bad_sums_line", f"{SUMS} line {number}: {line[:120]!r}", remedy))
            continue
        name = match[2].removeprefix("./")
        if name == SUMS:  # a second 'sha256sum *' lists the half-written list itself
            continue
        if why := unsafe_name(name):
            remedy = "list only files that lie in the folder itself, by their bare names"
            found.append(problem("unsafe_name", f"{SUMS} line {number}: {name[:120]!r} {why}", remedy))
        elif sums.setdefault(name, match[1].lower()) != match[1].lower():
            found.append(problem("bad_sums_line", f"{SUMS} line {number}: {name} is listed twice with different sums", WRITE_SUMS))
    if not sums and not found:
        found.append(problem("bad_sums_line", f"{SUMS} lists no file", WRITE_SUMS))
    return sums, found


def unsafe_name(name: str) -> str:
    """Why a name must not become a path in the destination; '' when it may."""
    if name.startswith("/"):
        return "is an absolute path"
    if "/" in name or "\\" in name or name in {".", ".."}:
        return "leads out of the folder or into a subfolder"
    if any(ord(c) < 32 or ord(c) == 127 for c in name):
        return "has control characters"
    if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        return "is not valid Unicode text"
    if name in {MANIFEST, JOURNAL} or (name.startswith(".") and name.endswith(".part")):
        return "is a name that this module uses itself"
    return "" if len(name.encode()) <= 200 else "is too long"


def source_kind(source: str) -> str:
    """hub, url, folder, or '' for anything else."""
    if source == "hub":
        return "hub"
    if re.match(r"https?://", source):
        return "url"
    return "folder" if source.startswith("/") else ""


def source_problems(source: str) -> list[Problem]:
    """What is wrong with the source as text."""
    kind = source_kind(source)
    if kind == "hub":
        evidence = "downloads from the hub are not in this release"
        remedy = (
            "download it to a folder (hf download REPO --revision COMMIT --local-dir FOLDER) and give that folder as the source"
            " (role variable checkpoint_source)"
        )
        return [problem("hub_not_supported", evidence, remedy)]
    if not kind:
        remedy = "give an absolute folder on the node, or an http:// or https:// address"
        return [problem("bad_source", f"source {source!r} is neither a folder nor an address", remedy)]
    if kind == "url":
        parts = urllib.parse.urlsplit(source)
        if parts.username or parts.password or parts.query or parts.fragment or not parts.hostname:
            shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
            remedy = "give the address of a folder that is served without credentials, as http://host/path"
            return [problem("bad_source", f"{shown}: user, password, query or fragment in the address, or no host", remedy)]
    return []


def pinned(revision: str, sums_sha256: str, source: str) -> tuple[str, list[Problem]]:
    """The SHA-256 that the source's SHA256SUMS must have: from sums_sha256, or from a revision that is one."""
    wanted = sums_sha256.strip().lower().removeprefix("sha256:")
    named = revision.strip().lower().removeprefix("sha256:")
    if wanted and not HEX64.fullmatch(wanted):
        return "", [
            problem("bad_pin", f"sums_sha256 {sums_sha256!r} is not 64 hexadecimal digits", f"give the output of: sha256sum {SUMS}")
        ]
    if HEX64.fullmatch(named):
        if wanted and wanted != named:
            evidence = f"revision pins {named}, sums_sha256 pins {wanted}"
            return "", [problem("bad_pin", evidence, "leave sums_sha256 empty, or make both the same")]
        return named, []
    if wanted:
        return wanted, []
    folder = source if source_kind(source) == "folder" else "FOLDER"
    return "", [
        problem(
            "no_pin",
            f"revision {revision!r} does not pin the contents of {source}",
            f"make a pin where the files are: cd {folder} && sha256sum * > {SUMS} && sha256sum {SUMS}"
            " ; give the digits it prints as sums_sha256 (role variable checkpoint_sums_sha256)",
        )
    ]


def place_problems(source: str, dest: str) -> list[Problem]:
    """A destination that must not be written: relative, or overlapping the source."""
    if not dest.startswith("/") or os.path.realpath(dest) == "/":
        return [problem("bad_dest", f"dest {dest!r} is not an absolute folder below /", "give an absolute path of a folder of its own")]
    if source_kind(source) == "folder":
        a, b = os.path.realpath(source), os.path.realpath(dest)
        if a == b or a.startswith(b.rstrip("/") + "/") or b.startswith(a.rstrip("/") + "/"):
            evidence = f"dest {b} and source {a} are the same folder, or one is inside the other"
            return [problem("bad_dest", evidence, "the source is never written to: give dest a folder of its own")]
    return []


# --- sources ---------------------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """A transfer that may be taken up again."""


@dataclass
class Part:
    """A file's bytes from `start` on (the offset asked for, or 0); total: the file's size, None when not told.

    end: where this answer ends when it promised less than the rest of the file; None when it goes to the file's end.
    """

    start: int
    total: int | None
    chunks: Iterator[bytes]
    end: int | None = None


class Source(Protocol):
    """Where files come from. pauses: seconds before each new try of a transfer that broke off."""

    pauses: tuple[int, ...]

    def sums(self) -> bytes:
        """The SHA256SUMS file."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when the source does not tell."""

    def read(self, name: str, offset: int) -> Part:
        """The file from an offset on."""


class FolderSource:
    """A folder of this node (a disk, a network mount). Links are read as what they point to. Never written."""

    pauses: tuple[int, ...] = ()

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def sums(self) -> bytes:
        """SHA256SUMS, small."""
        with self._guard(SUMS), _open_regular(self._folder / SUMS) as stream:
            data = stream.read(MAX_SUMS_BYTES + 1)
        if len(data) > MAX_SUMS_BYTES:
            raise JobFailure(problem("bad_sums_line", f"{self._folder / SUMS} is over 16 MiB", WRITE_SUMS))
        return data

    def size(self, name: str) -> int | None:
        """By stat."""
        with self._guard(name):
            info = (self._folder / name).stat()
        if not stat.S_ISREG(info.st_mode):
            raise _not_regular(self._folder / name, info.st_mode)
        return info.st_size

    def read(self, name: str, offset: int) -> Part:
        """Lazily, in chunks."""
        size = self.size(name)
        return Part(offset, size, self._chunks(name, offset, size or 0))

    def _chunks(self, name: str, offset: int, size: int) -> Iterator[bytes]:
        with self._guard(name):
            stream = _open_regular(self._folder / name, buffering=0)
        with stream:
            with self._guard(name):
                stream.seek(offset)
            while offset < size:
                with self._guard(name):
                    chunk = stream.read(min(CHUNK, size - offset))
                if not chunk:
                    evidence = f"{self._folder / name} ended at {offset} of {size} bytes: it was cut while it was read"
                    raise JobFailure(problem("source_changed", evidence, "leave the source alone, then run again: it resumes"))
                offset += len(chunk)
                yield chunk
            # Read once: the page cache of a 70 GB copy is memory that a model wants (unified memory).
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _guard(self, name: str) -> _FolderGuard:
        return _FolderGuard(self._folder, name)


class _FolderGuard:
    """Turns errors of reading the source into what they mean, so that they are not taken for errors of writing."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._path = folder, folder / name

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if not self._folder.is_dir():
            remedy = "mount or make the folder on the node (a removable disk or network share may be gone), then run again: it resumes"
            raise JobFailure(problem("source_vanished", f"{self._folder} is not a folder on this node ({error})", remedy)) from error
        if isinstance(error, FileNotFoundError) and self._path.name == SUMS:
            remedy = f"make it, and the pin with it: cd {self._folder} && sha256sum * > {SUMS} && sha256sum {SUMS}"
            raise JobFailure(problem("no_sums", f"{self._path} does not exist", remedy)) from error
        if isinstance(error, FileNotFoundError):
            what = "a link to a file that is not there" if self._path.is_symlink() else "listed in SHA256SUMS but missing"
            remedy = "complete the source folder; of a hub cache give the whole cache, or a folder made with --local-dir"
            raise JobFailure(problem("source_incomplete", f"{self._path} is {what}", remedy)) from error
        raise JobFailure(
            problem(
                "source_unreadable", f"{self._path}: {error.strerror or error}", "mend the source's disk, mount or rights, then run again"
            )
        ) from error


def _open_regular(path: Path, buffering: int = -1) -> IO[bytes]:
    """For reading, through links. O_NONBLOCK: opening a FIFO must not wait for its other end; it means nothing for regular files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _not_regular(path, mode)
    return os.fdopen(descriptor, "rb", buffering)


def _not_regular(path: Path, mode: int) -> JobFailure:
    kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO (named pipe)" if stat.S_ISFIFO(mode) else "a device or socket"
    remedy = f"replace it by the file itself; {WRITE_SUMS}" if path.name == SUMS else f"write {SUMS} for regular files only"
    return JobFailure(problem("source_damaged", f"{path} is not a regular file but {kind}", remedy))


class UrlSource:
    """A folder served over HTTP(S): GET, and Range where the server knows it."""

    def __init__(self, base: str, pauses: tuple[int, ...] = RETRY_PAUSES_S, timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._base, self.pauses, self._timeout = base.rstrip("/"), pauses, timeout_s

    def sums(self) -> bytes:
        """SHA256SUMS, small."""
        data, length = b"", None
        with self._open(SUMS, "GET") as answer:
            length = _number(answer.headers.get("Content-Length"))
            for chunk in self._chunks(answer):
                data += chunk
                if len(data) > MAX_SUMS_BYTES:
                    raise JobFailure(problem("bad_sums_line", f"{self._address(SUMS)} is over 16 MiB", WRITE_SUMS))
        if length is not None and len(data) < length:
            raise Interrupted(f"{self._address(SUMS)}: the source ended after {len(data)} of {length} bytes")
        return data

    def size(self, name: str) -> int | None:
        """Content-Length of a HEAD request, where the server gives one."""
        try:
            with self._open(name, "HEAD") as answer:
                return _number(answer.headers.get("Content-Length"))
        except _Refused as refused:
            if refused.code in {405, 501}:
                return None
            raise refused.failure() from refused

    def read(self, name: str, offset: int) -> Part:
        """From the offset on, or the whole file when the server ignores Range (Part.start is then 0)."""
        try:
            answer = self._open(name, "GET", {"Range": f"bytes={offset}-"} if offset else {})
        except _Refused as refused:
            if refused.code == 416 and offset:
                # Nothing at or after the offset: it is the end, or beyond. The total tells which.
                total = _number(refused.content_range.rpartition("/")[2])
                return Part(offset, offset - 1 if total is None else total, iter(()))
            raise refused.failure() from refused
        if answer.status == 206:
            match = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", answer.headers.get("Content-Range", "").strip())
            if not match or int(match[1]) != offset or int(match[2]) < offset:
                answer.close()
                raise Interrupted(
                    f"{self._address(name)}: answer 206 with Content-Range {answer.headers.get('Content-Range')!r} for offset {offset}"
                )
            end = int(match[2]) + 1
            total = end if match[3] == "*" else int(match[3])
            return Part(offset, total, self._chunks(answer), end if end < total else None)  # a server may give less than asked
        return Part(0, _number(answer.headers.get("Content-Length")), self._chunks(answer))

    @staticmethod
    def _chunks(answer: Any) -> Iterator[bytes]:
        with answer:
            while True:
                try:
                    chunk = answer.read1(RECEIVE)  # what has come, at once: nothing is lost when the connection breaks
                except http.client.IncompleteRead as error:
                    if error.partial:
                        yield error.partial
                    raise Interrupted("the connection broke off") from error
                except (OSError, http.client.HTTPException) as error:
                    raise Interrupted(str(error) or type(error).__name__) from error
                if not chunk:
                    return
                yield chunk

    def _address(self, name: str) -> str:
        return f"{self._base}/{urllib.parse.quote(name)}"

    def _open(self, name: str, method: str, headers: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(self._address(name), method=method, headers={"Accept-Encoding": "identity", **(headers or {})})
        try:
            return urllib.request.urlopen(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in {408, 425, 429, 500, 502, 503, 504}:
                    raise Interrupted(f"{self._address(name)}: HTTP {error.code} {error.reason}") from error
                raise _Refused(self._address(name), error.code, str(error.reason), error.headers.get("Content-Range", "")) from error
        except (OSError, http.client.HTTPException) as error:
            raise Interrupted(f"{self._address(name)}: {getattr(error, 'reason', None) or error}") from error


class _Refused(Exception):
    """An HTTP status that trying again does not change."""

    def __init__(self, address: str, code: int, reason: str, content_range: str) -> None:
        super().__init__(f"{address}: HTTP {code} {reason}")
        self.code, self.content_range = code, content_range

    def failure(self) -> JobFailure:
        kind = {401: "not_authorised", 403: "not_authorised", 404: "not_found", 410: "not_found"}.get(self.code, "source_unreadable")
        return JobFailure(problem(kind, str(self), f"check the address; the files and {SUMS} must be readable there without credentials"))


def _number(text: str | None) -> int | None:
    """A header's count of bytes; None for anything that is not one (also digits of other scripts)."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text.strip()) else None


def open_source(source: str, patient: bool = True) -> Source:
    """The source for a checked folder or address. patient: try a broken transfer again."""
    return UrlSource(source, RETRY_PAUSES_S if patient else ()) if source_kind(source) == "url" else FolderSource(source)


T = TypeVar("T")


def with_retries(call: Callable[[], T], pauses: Sequence[int], say: Say, sleep: Callable[[float], None] = time.sleep) -> T:
    """The call's value; a transfer that breaks off is tried again after growing pauses."""
    for number, pause in enumerate((*pauses, None), 1):
        try:
            return call()
        except _Refused as refused:
            raise refused.failure() from refused
        except Interrupted as error:
            if pause is None:
                raise _unreachable(error, number) from error
            say(f"try {number + 1} in {pause} s: {error}")
            sleep(pause)
    raise AssertionError("the last try returns or raises")


def _unreachable(error: Interrupted, tries: int) -> JobFailure:
    remedy = "check the network and the server, then run the same command again: it resumes"
    return JobFailure(problem("source_unreachable", f"{error} ({tries} tries without a new byte)", remedy))


def wanted_files(source: Source, pin: str, say: Say, shown: str) -> dict[str, str]:
    """{name: SHA-256} of the source, once its SHA256SUMS is what was pinned."""
    data = with_retries(source.sums, source.pauses, say)
    have = hashlib.sha256(data).hexdigest()
    if have != pin:
        remedy = f"if the source is right, pin what it has now: {have}; else give the source that the pin was made from"
        raise JobFailure(problem("wrong_revision", f"{SUMS} of {shown} has SHA-256 {have}, pinned is {pin}", remedy))
    try:
        sums, found = parse_sums(data.decode())
    except UnicodeDecodeError as error:
        raise JobFailure(problem("bad_sums_line", f"{SUMS} of {shown} is not UTF-8 text ({error})", WRITE_SUMS)) from error
    if found:
        raise JobFailure(*found)
    return sums


# --- what is there ---------------------------------------------------------------------------------------------------------------


@dataclass
class Known:
    """What this module has noted about a destination."""

    files: dict[str, dict[str, Any]]  # name -> {size, sha256, mtime_ns}
    pin: str
    complete: bool  # a manifest, not just the journal of an unfinished run


def known(dest: Path) -> Known:
    """The manifest, or the journal of an unfinished run; files without either are unverified."""
    for name, complete in ((MANIFEST, True), (JOURNAL, False)):
        noted = read_object(dest / name, {"files": lambda v: isinstance(v, dict), "sums_sha256": is_text})
        if "files" in noted:
            files = {k: v for k, v in noted["files"].items() if _is_note(v) and not unsafe_name(k)}
            return Known(files, noted.get("sums_sha256", ""), complete and len(files) == len(noted["files"]))
    return Known({}, "", False)


def _is_note(value: Any) -> bool:
    if not (isinstance(value, dict) and is_text(value.get("sha256")) and HEX64.fullmatch(value["sha256"])):
        return False
    return all(type(value.get(name)) is int and value[name] >= 0 for name in ("size", "mtime_ns"))


def file_state(dest: Path, name: str, entry: dict[str, Any] | None, want: str, mutable: bool) -> str:
    """ok, missing, link, changed (against its note), unverified (no note). mutable: presence is enough."""
    try:
        info = (dest / name).lstat()
    except FileNotFoundError:
        return "missing"
    if not stat.S_ISREG(info.st_mode):
        return "link"
    if not entry or entry.get("sha256") != want:
        return "unverified"
    if mutable or (entry.get("size"), entry.get("mtime_ns")) == (info.st_size, info.st_mtime_ns):
        return "ok"
    return "changed"


def plan(dest: Path, wanted: dict[str, str], mutable: Sequence[str], pin: str) -> dict[str, str]:
    """{name: state} of every wanted file that is not ok."""
    noted = known(dest)
    states = {n: file_state(dest, n, noted.files.get(n), sha, n in mutable and noted.pin == pin) for n, sha in wanted.items()}
    return {n: s for n, s in states.items() if s != "ok"}


def complete(dest: Path, pin: str, mutable: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """The manifest's files when it is of this pin and every one of them is as noted; else None. Does not need the source."""
    noted = known(dest)
    if not (noted.complete and noted.pin == pin and noted.files):
        return None
    wanted = {n: str(e.get("sha256")) for n, e in noted.files.items()}
    return None if plan(dest, wanted, mutable, pin) else noted.files


def part_name(name: str, sha256: str) -> str:
    """The unfinished file's name: of this very content, so that another revision's part is never continued."""
    return f".{name}.{sha256[:12]}.part"


def stale_parts(dest: Path, wanted: dict[str, str]) -> list[Path]:
    """Parts that no wanted file will continue."""
    keep = {part_name(n, s) for n, s in wanted.items()}
    if not dest.is_dir():
        return []
    return sorted(p for p in dest.iterdir() if re.fullmatch(r"\..+\.[0-9a-f]{12}\.part", p.name) and p.name not in keep)


def in_the_way(dest: Path, wanted: dict[str, str]) -> list[Problem]:
    """Folders where files belong: a rename does not replace them, and what they hold is not ours to delete."""
    names = [n for name, sha256 in wanted.items() for n in (name, part_name(name, sha256))]
    return [
        problem(
            "dest_not_writable",
            f"{dest / name} is a folder, and a file of that name belongs there",
            "move that folder away, then run again; or choose another destination (checkpoint_dir)",
        )
        for name in names
        if (dest / name).is_dir() and not (dest / name).is_symlink()
    ]


def _part_size(path: Path) -> int:
    try:
        info = path.lstat()
    except OSError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


def gb(count: float) -> str:
    """12345678901 -> '12.35 GB'."""
    return f"{count / 1e9:.2f} GB"


def existing(path: Path) -> Path:
    """The path itself or its nearest folder that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def space_problems(dest: Path, missing: int, have: int, file_system: str, stale: Sequence[tuple[str, int]] = ()) -> list[Problem]:
    """Whether what is still missing fits, with the reserve."""
    need = missing + RESERVE_BYTES
    if need <= have:
        return []
    evidence = (
        f"{dest} on {file_system}: {gb(missing)} are missing and {gb(RESERVE_BYTES)} stay free, that is {gb(need)}; free are {gb(have)}"
    )
    remedy = f"free {gb(need - have)} there, or put the checkpoint on another file system (checkpoint_dir)"
    if stale:
        remedy += "; left over from another revision: " + ", ".join(f"{name} ({gb(size)})" for name, size in stale)
    return [problem("disk_full", evidence, remedy)]


def check_space(dest: Path, missing: int, wanted: dict[str, str]) -> list[Problem]:
    """space_problems with this node's figures."""
    at = existing(dest)
    left = [(str(p), _part_size(p)) for p in stale_parts(dest, wanted)]
    return space_problems(dest, missing, shutil.disk_usage(at).free, str(mount_point(at)), left)


def mount_point(path: Path) -> Path:
    """The file system that a folder is on, by its mount point."""
    path = path.resolve()
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path


def missing_bytes(source: Source, dest: Path, wanted: dict[str, str], names: Sequence[str], say: Say) -> tuple[int, int | None]:
    """Bytes still to come, and the size of these files (None when the source does not tell all sizes)."""
    still, total = 0, 0
    unknown = False
    for name in names:
        size = with_retries(partial(source.size, name), source.pauses, say)
        if size is None:
            unknown = True
            continue
        part = _part_size(dest / part_name(name, wanted[name]))
        total += size
        still += size - part if part <= size else size
    return still, None if unknown else total


# --- the work --------------------------------------------------------------------------------------------------------------------


@dataclass
class Fetched:
    """One file that was brought."""

    size: int
    resumed: int


class Fetch:
    """Brings files of one source to one folder."""

    def __init__(self, source: Source, dest: Path, progress: Progress, sleep: Callable[[float], None] = time.sleep) -> None:
        self._source, self._dest, self._progress, self._sleep = source, dest, progress, sleep

    def file(self, name: str, want: str, before: int) -> Fetched:
        """name.part, continued, hashed, compared, fsynced, renamed. before: bytes of the stage done by earlier files."""
        path = self._dest / part_name(name, want)
        with _open_part(path) as part:
            resumed, have = self._fill(part, name, before)
            if have != want and resumed:
                # The part may have been damaged by a power cut; the source has not been shown to be wrong yet.
                part.truncate(0)
                resumed, have = self._fill(part, name, before)
            if have != want:
                path.unlink()
                evidence = f"{name}: the source's bytes have SHA-256 {have}, {SUMS} says {want}"
                remedy = "copy this file to the source again; the pin and the list stay as they are"
                raise JobFailure(problem("source_damaged", evidence, remedy))
            size = part.tell()
            os.fchmod(part.fileno(), 0o644)
            os.fsync(part.fileno())
            os.posix_fadvise(part.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path.rename(self._dest / name)  # replaces a link itself, never what it points to
        fsync_dir(self._dest)
        return Fetched(size, resumed)

    def _fill(self, part: IO[bytes], name: str, before: int) -> tuple[int, str]:
        """Complete the part. Returns how many bytes it had already, and the SHA-256 of the whole."""
        hasher = hashlib.sha256()
        part.seek(0)
        while chunk := part.read(CHUNK):
            hasher.update(chunk)
            self._progress.at(before + part.tell())
        have = resumed = part.tell()
        self._progress.mark()  # reading a part is faster than bringing it
        tries, best, ignores, total = 0, have, False, None  # best: bytes brought by the best try; only more than that is progress
        while True:
            start = have
            try:
                piece = self._source.read(name, have)
                too_long, total = piece.total is not None and have > piece.total, piece.total
                ignores = ignores or (piece.start != have and not too_long)
                if too_long or piece.start != have:  # longer than the file, or the server ignores Range
                    part.seek(0)
                    part.truncate(0)
                    hasher = hashlib.sha256()
                    have = resumed = start = 0
                    best = 0 if too_long else best
                if too_long and piece.start:
                    continue
                for chunk in piece.chunks:
                    _write_all(part, chunk)
                    hasher.update(chunk)
                    have += len(chunk)
                    self._progress.at(before + have, message="")
                if piece.end is not None and start < have == piece.end:  # all that was promised, and there is more
                    tries, best = 0, max(best, have)
                    continue
                if piece.total is not None and have < piece.total:
                    raise Interrupted(f"{name}: the source ended after {have} of {piece.total} bytes")
                return resumed, hasher.hexdigest()
            except _Refused as refused:
                raise refused.failure() from refused
            except Interrupted as error:
                tries, best = 1 if have > best else tries + 1, max(best, have)
                if tries > len(self._source.pauses):
                    if ignores:
                        raise _without_range(name, best, total, tries) from error
                    raise _unreachable(error, tries) from error
                pause = self._source.pauses[tries - 1]
                note = f"{name}: trying again in {pause} s: {error}"
                print(note, flush=True)
                self._progress.at(before + have, message=note)
                self._sleep(pause)


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


def bring(spec: dict[str, Any], progress: Progress, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """The worker: the destination becomes the pinned snapshot. Returns what it did."""
    try:
        return _bring(spec, progress, sleep)
    except OSError as error:
        raise dest_failure(error, Path(spec["dest"])) from error


def dest_failure(error: OSError, dest: Path) -> JobFailure:
    """What an error of writing the destination means. A full disk may show on any file, also a small one."""
    where = f"{error.filename or dest}: {error.strerror or error}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        at = existing(dest)
        evidence = f"{where} (file system {mount_point(at)}, free {gb(shutil.disk_usage(at).free)})"
        return JobFailure(problem("disk_full", evidence, "free space there, then run the same command again: it resumes"))
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP}:
        return JobFailure(problem("dest_not_writable", where, "make the destination a writable folder, or choose another (checkpoint_dir)"))
    return JobFailure(
        problem("dest_failed", where, "see the node's kernel log (journalctl -k) for disk errors; then run again: it resumes")
    )


@dataclass
class Survey:
    """How a destination stands against the wanted files."""

    wanted: dict[str, str]
    good: dict[str, dict[str, Any]]  # notes of files that are right
    todo: dict[str, str]  # name -> why it must be brought
    leavers: list[str]  # files of another revision that this module brought
    resumed: int  # bytes that an unfinished run had brought in whole files
    settled: bool  # nothing to bring, remove or write down


def _survey(spec: dict[str, Any], source: Source, progress: Progress, say: Say) -> Survey:
    dest, pin, mutable = Path(spec["dest"]), str(spec["pin"]), list(spec["mutable"])
    before = known(dest)
    if before.complete and before.pin == pin:  # the source may be gone by now, and need not be asked
        wanted = {n: str(e.get("sha256")) for n, e in before.files.items()}
    else:
        progress.stage("list", message=f"reading {SUMS}")
        wanted = wanted_files(source, pin, say, spec["source"])
    todo = plan(dest, wanted, mutable, pin)
    good = {n: e for n, e in before.files.items() if n in wanted and n not in todo}
    resumed = 0 if before.complete else sum(_part_size(dest / n) for n in good)
    doubtful = {n: s for n, s in todo.items() if s in {"unverified", "changed"}}
    if spec["verify"] == "full":
        doubtful |= {n: "damaged" for n in good if n not in mutable}
    sound = _sound(dest, {n: wanted[n] for n in doubtful}, progress)
    todo = {n: s for n, s in {**todo, **doubtful}.items() if n not in sound}
    good = {n: e for n, e in {**good, **sound}.items() if n not in todo}
    leavers = [n for n in before.files if n not in wanted]
    settled = not todo and not leavers and before.complete and before.pin == pin and good == before.files
    return Survey(wanted, good, todo, leavers, resumed, settled)


def _sound(dest: Path, doubtful: dict[str, str], progress: Progress) -> dict[str, dict[str, Any]]:
    """Notes of those doubtful files whose bytes are right."""
    progress.stage("verify", sum(_part_size(dest / n) for n in doubtful), "B")
    sound = {}
    for name, want in doubtful.items():
        info = (dest / name).lstat()
        hasher = hashlib.sha256()
        with (dest / name).open("rb", buffering=0) as stream:
            while chunk := stream.read(CHUNK):
                hasher.update(chunk)
                progress.add(len(chunk))
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if hasher.hexdigest() == want:
            sound[name] = _note(info, want)
    return sound


def _note(info: os.stat_result, sha256: str) -> dict[str, Any]:
    return {"size": info.st_size, "sha256": sha256, "mtime_ns": info.st_mtime_ns}


class _Book:
    """The journal while something is missing, the manifest once nothing is."""

    def __init__(self, spec: dict[str, Any], dest: Path) -> None:
        self._dest = dest
        self._head = {name: spec[name] for name in ("repo", "revision", "source", "mutable")} | {"sums_sha256": spec["pin"]}

    def unfinished(self, files: dict[str, Any]) -> None:
        """From the first call on the folder is not complete for anyone."""
        write_json(self._dest / JOURNAL, {**self._head, "files": files})
        (self._dest / MANIFEST).unlink(missing_ok=True)

    def finished(self, files: dict[str, Any]) -> None:
        """The last thing that is written."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self._dest / MANIFEST, {**self._head, "files": files, "completed_at": now})
        (self._dest / JOURNAL).unlink(missing_ok=True)
        fsync_dir(self._dest)


def _bring(spec: dict[str, Any], progress: Progress, sleep: Callable[[float], None]) -> dict[str, Any]:
    dest, source = Path(spec["dest"]), open_source(spec["source"])

    def say(note: str) -> None:
        print(note, flush=True)
        progress.alive(note)

    now = _survey(spec, source, progress, say)
    if now.settled:
        return {"files": now.good, "resumed_bytes": 0, "before": "", "after": ""}
    dest.mkdir(parents=True, exist_ok=True, mode=0o755)
    if blocked := in_the_way(dest, now.wanted):
        raise JobFailure(*blocked)
    book = _Book(spec, dest)
    book.unfinished(now.good)
    still, total = missing_bytes(source, dest, now.wanted, list(now.todo), say)
    if found := check_space(dest, still, now.wanted):
        raise JobFailure(*found)
    progress.stage("copy" if source_kind(spec["source"]) == "folder" else "download", total, "B")
    fetch, done, resumed = Fetch(source, dest, progress, sleep), 0, now.resumed
    for name, why in now.todo.items():
        print(f"{name}: {why}", flush=True)
        got = fetch.file(name, now.wanted[name], done)
        now.good[name] = _note((dest / name).lstat(), now.wanted[name])
        book.unfinished(now.good)
        done += got.size
        resumed += got.resumed
    for path in [*(dest / name for name in now.leavers), *(stale := stale_parts(dest, now.wanted))]:
        path.unlink(missing_ok=True)
    book.finished(now.good)
    before, after = difference(now.todo, [*now.leavers, *(p.name for p in stale)], now.wanted)
    return {"files": now.good, "resumed_bytes": resumed, "before": before, "after": after}


def is_report(result: dict[str, Any]) -> bool:
    """Whether a job's result is one that bring() returns."""
    files = result.get("files")
    sane = isinstance(files, dict) and all(map(_is_note, files.values())) and type(result.get("resumed_bytes")) is int
    return sane and is_text(result.get("before")) and is_text(result.get("after"))


def difference(todo: dict[str, str], removed: Sequence[str], wanted: dict[str, str]) -> tuple[str, str]:
    """What changes, as texts before and after: one line for each file."""
    before = [f"{name}: {state}" for name, state in todo.items()] + [f"{name}: left over" for name in removed]
    after = [f"{name}: {wanted[name][:12]}" for name in todo]
    return "\n".join(["complete: no", *before, ""]), "\n".join(["complete: yes", *after, ""])


def main() -> int:
    """The worker's start: python3 worker.zip JOB_FOLDER."""
    socket.setdefaulttimeout(SOCKET_TIMEOUT_S)
    return work_on(Path(sys.argv[1]), bring)
