# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Where files come from: a folder of this node or a folder that a web server offers, read whole or by byte ranges.

What reads from a source gets `Interrupted` for a transfer that may be tried again, and JobFailure for what trying again does not change.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from .jobs import JobFailure
from .problems import Problem, problem

SUMS = "SHA256SUMS"
WRITE_SUMS = f"write it with: sha256sum * > {SUMS}"
MANIFEST = ".dgxspark-snapshot.json"
OWN_PREFIX = ".dgxspark-"  # of every file and folder that this collection keeps beside a checkpoint's own
CHUNK = 4 << 20
RECEIVE = 1 << 20  # the most that one read of a connection asks for; it returns what is there
RETRY_PAUSES_S = (1, 2, 4, 8, 16, 30)
SOCKET_TIMEOUT_S = 60
MAX_LIST_BYTES = 16 << 20  # of SHA256SUMS and of a manifest
MAX_NAME_BYTES = 200  # of one part: 255 is what file systems allow, and parts of files have longer names
MAX_PATH_BYTES = 1000
LONGEST_PAUSE_S = 300.0  # a server may ask for more patience; then the run ends and says so
HEX64 = re.compile(r"[0-9a-f]{64}")
HEX40 = re.compile(r"[0-9a-f]{40}")
Say = Callable[[str], None]


# --- names and lists -------------------------------------------------------------------------------------------------------------


def unsafe_name(name: str) -> str:
    """Why a name must not become a path in a destination; '' when it may. A relative POSIX path is a name, too."""
    if name.startswith("/"):
        return "is an absolute path"
    if any(ord(c) < 32 or ord(c) == 127 for c in name):
        return "has control characters"
    if any(0xD800 <= ord(c) <= 0xDFFF for c in name):
        return "is not valid Unicode text"
    parts = name.split("/")
    if "\\" in name or any(part in {"", ".", ".."} for part in parts):
        return "leads out of the folder, or has an empty part or a backslash"
    if is_own(name):
        return "is a name that this collection or the hub's client uses itself"
    if len(name.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return "is too long"
    return ""


def is_own(name: str) -> bool:
    """Whether this collection or the hub's client keeps something under that name beside a checkpoint's files."""
    parts = name.split("/")
    # An atomic write that was killed leaves '.' + the name + a suffix.
    mine = any(part.startswith((OWN_PREFIX, f".{OWN_PREFIX}")) or (part.startswith(".") and part.endswith(".part")) for part in parts)
    return mine or parts[:2] == [".cache", "huggingface"]


def clashing(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names that cannot both be files: one is a folder of the other."""
    known = set(names)
    found = []
    for name in sorted(known):
        parts = name.split("/")
        found += [(above, name) for n in range(1, len(parts)) if (above := "/".join(parts[:n])) in known]
    return found


def parse_sums(text: str) -> tuple[dict[str, str], list[Problem]]:
    """{file name: SHA-256} from sha256sum's output, text ('  ') and binary (' *') mode."""
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
            remedy = "list only files that lie below the folder, by their relative paths"
            found.append(problem("unsafe_name", f"{SUMS} line {number}: {name[:120]!r} {why}", remedy))
        elif sums.setdefault(name, match[1].lower()) != match[1].lower():
            found.append(problem("bad_sums_line", f"{SUMS} line {number}: {name} is listed twice with different sums", WRITE_SUMS))
    if not sums and not found:
        found.append(problem("bad_sums_line", f"{SUMS} lists no file", WRITE_SUMS))
    return sums, found


def source_kind(source: str) -> str:
    """hub, url, folder, or '' for anything else."""
    if source == "hub":
        return "hub"
    if re.match(r"https?://", source):
        return "url"
    return "folder" if source.startswith("/") else ""


# --- the interface ---------------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """A transfer that may be taken up again.

    after_s: seconds that the server asked to wait, 0 for none; kind, remedy: of the problem that it is when no try helps.
    """

    def __init__(self, text: str, after_s: float = 0.0, kind: str = "source_unreachable", remedy: str = "") -> None:
        super().__init__(text)
        self.after_s, self.kind = after_s, kind
        self.remedy = remedy or "check the network and the server, then run the same command again: it resumes"


@dataclass
class Part:
    """A file's bytes from `start` on (the offset asked for, or 0); total: the file's size, None when not told.

    end: where this answer ends when it promises less than the rest of the file; None when it goes to the file's end.
    """

    start: int
    total: int | None
    chunks: Iterator[bytes]
    end: int | None = None


@dataclass(frozen=True)
class Promise:
    """What a file must be. size: bytes, None when not told; sha256 of the bytes; git: SHA-1 of the git blob; '' where not told."""

    size: int | None = None
    sha256: str = ""
    git: str = ""

    @property
    def digest(self) -> str:
        """The digest that it goes by."""
        return self.sha256 or self.git


class Source(Protocol):
    """Where files come from. pauses: seconds before each new try of a transfer that broke off."""

    pauses: tuple[int, ...]

    def names(self) -> list[str]:
        """The files that it offers, as relative POSIX paths, sorted."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when the source does not tell."""

    def read(self, name: str, start: int = 0, end: int | None = None) -> Part:
        """Bytes [start, end) of a file; end=None: to its end."""


T = TypeVar("T")


def with_retries(call: Callable[[], T], pauses: Sequence[int], say: Say, sleep: Callable[[float], None] = time.sleep) -> T:
    """The call's value; a transfer that breaks off is tried again after growing pauses, or as long as the server asks."""
    for number, pause in enumerate((*pauses, None), 1):
        try:
            return call()
        except Interrupted as error:
            if pause is None or error.after_s > LONGEST_PAUSE_S:
                raise unreachable(error, number) from error
            wait = max(pause, error.after_s)
            say(f"try {number + 1} in {wait:g} s: {error}")
            sleep(wait)
    raise AssertionError("the last try returns or raises")


def unreachable(error: Interrupted, tries: int) -> JobFailure:
    """The failure after the last try."""
    asked = f"; the server asks to wait {error.after_s:g} s" if error.after_s > LONGEST_PAUSE_S else ""
    count = "1 try" if tries == 1 else f"{tries} tries"
    return JobFailure(problem(error.kind, f"{error} ({count} without a new byte{asked})", error.remedy))


def read_bytes(source: Source, name: str, start: int, end: int) -> bytes:
    """Exactly the bytes [start, end) of a file, in memory. Interrupted when fewer come or from elsewhere."""
    data = bytearray()
    while len(data) < end - start:
        part = source.read(name, start + len(data), end)
        if part.start > start + len(data):
            raise Interrupted(f"{name}: the answer begins at {part.start}, not at {start + len(data)}")
        skip, before = start + len(data) - part.start, len(data)
        for chunk in part.chunks:
            data += chunk[skip:]
            skip = max(0, skip - len(chunk))
            if len(data) >= end - start:
                break
        if len(data) == before:
            raise Interrupted(f"{name}: no byte from {start + len(data)} on, of the {end} asked for")
    return bytes(data[: end - start])


def read_list(source: Source, name: str, most: int = MAX_LIST_BYTES) -> bytes:
    """A small file as a whole; JobFailure too_big beyond `most` bytes."""
    part, data = source.read(name), bytearray()
    for chunk in part.chunks:
        data += chunk
        if len(data) > most:
            raise JobFailure(problem("list_too_big", f"{name} of the source is over {most >> 20} MiB", "check the source's address"))
    if part.total is not None and len(data) < part.total:
        raise Interrupted(f"{name}: the source ended after {len(data)} of {part.total} bytes")
    return bytes(data)


# --- a folder --------------------------------------------------------------------------------------------------------------------


class FolderSource:
    """A folder of this node (a disk, a network mount). Links are read as what they point to. Never written."""

    pauses: tuple[int, ...] = ()

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def names(self) -> list[str]:
        """Regular files and links below the folder, without what this collection and the hub's client keep there."""
        found: list[str] = []
        with self._guard("."):
            if not self.folder.is_dir():
                raise NotADirectoryError(20, "not a folder", str(self.folder))
            for top, folders, files in os.walk(self.folder, onerror=_raise):
                at = Path(top).relative_to(self.folder)
                found += [(at / f).as_posix() for f in folders if (Path(top) / f).is_symlink()]  # not gone into, and not left out
                folders[:] = [f for f in folders if not is_own((at / f).as_posix())]
                found += [(at / f).as_posix() for f in files]
        return sorted(name for name in found if not is_own(name))

    def size(self, name: str) -> int | None:
        """By stat."""
        with self._guard(name):
            info = (self.folder / name).stat()
        if not stat.S_ISREG(info.st_mode):
            raise _not_regular(self.folder / name, info.st_mode)
        return info.st_size

    def read(self, name: str, start: int = 0, end: int | None = None) -> Part:
        """Lazily, in chunks."""
        size = self.size(name) or 0
        stop = size if end is None else min(end, size)
        return Part(start, size, self._chunks(name, start, stop), stop if stop < size else None)

    def _chunks(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        with self._guard(name):
            stream = _open_regular(self.folder / name, buffering=0)
        with stream:
            with self._guard(name):
                stream.seek(start)
            at = start
            while at < stop:
                with self._guard(name):
                    chunk = stream.read(min(CHUNK, stop - at))
                if not chunk:
                    evidence = f"{self.folder / name} ended at {at} of {stop} bytes: it was cut while it was read"
                    raise JobFailure(problem("source_changed", evidence, "leave the source alone, then run again: it resumes"))
                at += len(chunk)
                yield chunk
            # Read once: the page cache of a 70 GB copy is memory that a model wants (unified memory).
            os.posix_fadvise(stream.fileno(), start, max(0, stop - start), os.POSIX_FADV_DONTNEED)

    def _guard(self, name: str) -> _FolderGuard:
        return _FolderGuard(self.folder, name)


def _raise(error: OSError) -> None:
    raise error


class _FolderGuard:
    """Turns errors of reading the source into what they mean, so that they are not taken for errors of writing."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._path = folder, folder / name

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, OSError):
            return
        if not self.folder.is_dir():
            remedy = "mount or make the folder on the node (a removable disk or network share may be gone), then run again: it resumes"
            raise JobFailure(problem("source_vanished", f"{self.folder} is not a folder on this node ({error})", remedy)) from error
        absent = isinstance(error, FileNotFoundError)
        if absent and self._path.name == SUMS:
            remedy = f"make it, and the pin with it: cd {self.folder} && sha256sum * > {SUMS} && sha256sum {SUMS}"
            raise JobFailure(problem("no_sums", f"{self._path} does not exist", remedy)) from error
        if absent and self._path.is_symlink():
            evidence = f"{self._path} is a link to {os.readlink(self._path)}, which is not there"
            remedy = "complete the source folder; of a hub cache give the whole cache (models--ORG--NAME with its blobs)"
            raise JobFailure(problem("source_incomplete", evidence, remedy)) from error
        if absent:
            remedy = "complete the source folder; of a hub cache give the whole cache, or a folder made with --local-dir"
            raise JobFailure(problem("source_incomplete", f"{self._path} is missing", remedy)) from error
        remedy = "mend the source's disk, mount or rights, then run again"
        raise JobFailure(problem("source_unreadable", f"{self._path}: {error.strerror or error}", remedy)) from error


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
    remedy = f"replace it by the file itself; {WRITE_SUMS}" if path.name == SUMS else "replace it by the file itself"
    return JobFailure(problem("source_damaged", f"{path} is not a regular file but {kind}", remedy))


# --- a web server ----------------------------------------------------------------------------------------------------------------


def _origin(url: str) -> tuple[str, str, int]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port or (443 if parts.scheme == "https" else 80)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects over HTTP(S) only, and takes the token along within one origin, never to another one."""

    def redirect_request(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not re.match(r"https?://", newurl):
            raise urllib.error.HTTPError(req.full_url, code, f"redirect to {newurl[:80]!r}, not an http address", headers, fp)
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if new is not None and token and _origin(req.full_url) == _origin(newurl):
            new.add_unredirected_header("Authorization", token)
        return new


class UrlSource:
    """A folder served over HTTP(S): GET, and Range where the server knows it. token: sent as a bearer token to the base's origin only."""

    def __init__(self, base: str, token: str = "", pauses: tuple[int, ...] = RETRY_PAUSES_S, timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._base, self._token, self.pauses, self._timeout = base.rstrip("/"), token, pauses, timeout_s
        # A token is for a peer of the private network: no proxy has to see it.
        handlers = [_Redirects(), *([urllib.request.ProxyHandler({})] if token else [])]
        self._opener = urllib.request.build_opener(*handlers)

    def names(self) -> list[str]:
        """What the manifest of a finished snapshot lists, or else SHA256SUMS."""
        try:
            files = json.loads(read_list(self, MANIFEST))["files"]
            names = [name for name in files if isinstance(name, str)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise JobFailure(problem("bad_manifest", f"{self._address(MANIFEST)} lists no files", "check the address")) from error
        except JobFailure as failure:
            if failure.problems[0]["class"] != "not_found":
                raise
            try:
                sums, found = parse_sums(read_list(self, SUMS).decode())
            except UnicodeDecodeError as error:
                raise JobFailure(problem("bad_sums_line", f"{self._address(SUMS)} is not UTF-8 text", WRITE_SUMS)) from error
            if found:
                raise JobFailure(*found) from failure
            names = list(sums)
        return sorted(names)

    def size(self, name: str) -> int | None:
        """Content-Length of a HEAD request, where the server gives one."""
        try:
            with self._open(name, "HEAD") as answer:
                if (answer.headers.get("Content-Encoding") or "identity").strip().lower() != "identity":
                    return None  # of other bytes than the file's
                return _number(answer.headers.get("Content-Length"))
        except _Refused as refused:
            if refused.code in {405, 501}:
                return None
            raise refused.failure() from refused

    def read(self, name: str, start: int = 0, end: int | None = None) -> Part:
        """From the offset on, or the whole file when the server ignores Range (Part.start is then 0)."""
        if end is not None and end <= start:
            return Part(start, None, iter(()), end)
        wanted = {} if not start and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        try:
            answer = self._open(name, "GET", wanted)
        except _Refused as refused:
            if refused.code == 416 and wanted:
                # Nothing at or after the offset: it is the end, or beyond. The total tells which.
                total = _number(refused.content_range.rpartition("/")[2])
                return Part(start, max(0, start - 1) if total is None else total, iter(()))
            raise refused.failure() from refused
        if (encoding := (answer.headers.get("Content-Encoding") or "identity").strip().lower()) != "identity":
            answer.close()
            evidence = f"{self._address(name)}: the answer has Content-Encoding {encoding[:40]!r}, asked for were the file's own bytes"
            remedy = "switch compression off for that folder at the server, or at the proxy before it (nginx: gzip off), then run again"
            raise JobFailure(problem("source_encoded", evidence, remedy))
        if answer.status == 206:
            span = parse_content_range(answer.headers.get("Content-Range", ""))
            if span is None or span[0] != start:
                answer.close()
                said = answer.headers.get("Content-Range")
                raise Interrupted(f"{self._address(name)}: answer 206 with Content-Range {said!r} for offset {start}")
            stop, total = span[1], span[1] if span[2] is None else span[2]
            return Part(start, total, self._chunks(answer), stop if stop < total else None)  # a server may give less than asked
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
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            return self._opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in {408, 425, 429, 500, 502, 503, 504}:
                    text = f"{self._address(name)}: HTTP {error.code} {self._plain(error.reason)}"
                    raise Interrupted(text, float(_number(error.headers.get("Retry-After")) or 0)) from error
                said = self._plain(error.reason)
                raise _Refused(self._address(name), error.code, said, error.headers.get("Content-Range", ""), bool(self._token)) from error
        except (OSError, http.client.HTTPException) as error:
            raise Interrupted(f"{self._address(name)}: {self._plain(getattr(error, 'reason', None) or error)}") from error

    def _plain(self, said: object) -> str:
        """What the server said, without the token should it repeat it."""
        return str(said).replace(self._token, "***") if self._token else str(said)


class _Refused(Exception):
    """An HTTP status that trying again does not change."""

    def __init__(self, address: str, code: int, reason: str, content_range: str, with_token: bool) -> None:
        super().__init__(f"{address}: HTTP {code} {reason}")
        self.code, self.content_range, self._with_token = code, content_range, with_token

    def failure(self) -> JobFailure:
        kinds = {401: "not_authorised", 403: "not_authorised", 404: "not_found", 409: "source_changed", 410: "not_found"}
        kind = kinds.get(self.code, "source_unreadable")
        remedy = f"check the address; the files and {SUMS} must be readable there without credentials"
        if self._with_token:
            remedy = "check the address and the share's token; a share of an earlier run has ended with its token"
        if self.code == 409:
            remedy = "mend it on the node that shares it: the checkpoint role there with checkpoint_verify: full; then run this again"
        return JobFailure(problem(kind, str(self), remedy))


def parse_content_range(text: str) -> tuple[int, int, int | None] | None:
    """(start, end, size) of a Content-Range, end exclusive, size None for '*'; None for anything else."""
    match = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", text.strip())
    if not match or int(match[2]) < int(match[1]):
        return None
    return int(match[1]), int(match[2]) + 1, None if match[3] == "*" else int(match[3])


def _number(text: str | None) -> int | None:
    """A header's count of bytes or seconds; None for anything that is not one (also digits of other scripts)."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text.strip()) else None


def open_source(source: str, token: str = "", patient: bool = True) -> Source:
    """The source for a checked folder or address. patient: try a broken transfer again."""
    if source_kind(source) == "url":
        return UrlSource(source, token, RETRY_PAUSES_S if patient else ())
    return FolderSource(source)
