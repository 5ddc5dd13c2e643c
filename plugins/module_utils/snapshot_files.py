# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What is in a snapshot's folder, and what says that it is whole.

.dgxspark-snapshot.json         the manifest, written last: which files of which revision, by size and SHA-256. Nothing of this node, of the
                                time or of the way they came is in it: equal content gives equal bytes on every node.
.dgxspark-snapshot.stamps.json  this node's notes: size, SHA-256 and time of each file that is right. Also the journal of a run that has
                                not ended: written as files become good, before the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .files import file_sha256, fsync_dir, read_regular, write_json
from .jobs import is_text, read_object
from .problems import Problem, problem
from .sources import HEX40, HEX64, MANIFEST, OWN_PREFIX, Promise, clashing, unsafe_name

STAMPS = f"{OWN_PREFIX}snapshot.stamps.json"
LOCK = f"{OWN_PREFIX}snapshot.lock"
PRISTINE = f"{OWN_PREFIX}pristine"
FORMAT = 1
MOST_NAMED = 20  # of files that a message lists
NOTES_EVERY_S = 1.0  # how often a run writes its notes
HUB_TOOLS = ".cache/huggingface"  # what a download into a folder keeps there, and in a home folder much more than that
HUB_TOOLS_PARTS = f"{HUB_TOOLS}/download"
EMPTY = {hashlib.sha256(b"").hexdigest(), hashlib.sha1(b"blob 0\0").hexdigest()}
Notes = dict[str, dict[str, Any]]  # name -> {size, sha256, mtime_ns}


# --- digests ---------------------------------------------------------------------------------------------------------------------


class Digests:
    """Of a file that is read once: SHA-256 for the manifest, and what else its promise needs."""

    def __init__(self, promise: Promise, size: int | None = None) -> None:
        self._promise, self.size = promise, 0
        self._sha256 = hashlib.sha256()
        told = promise.size if size is None else size
        self._git = hashlib.sha1(b"blob %d\0" % told) if promise.git and told is not None else None

    def update(self, data: bytes) -> None:
        """More of the file."""
        self.size += len(data)
        self._sha256.update(data)
        if self._git:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        """Of all bytes so far."""
        return self._sha256.hexdigest()

    @property
    def git(self) -> str:
        """SHA-1 of the git blob, '' when nobody asked for it."""
        return self._git.hexdigest() if self._git else ""

    def wrong(self) -> str:
        """How the bytes differ from the promise; '' when they are what was promised."""
        p = self._promise
        if p.size is not None and self.size != p.size:
            return f"{self.size} bytes came, {p.size} are promised"
        if p.sha256 and self.sha256 != p.sha256:
            return f"the bytes that came have SHA-256 {self.sha256}, promised is {p.sha256}"
        if p.git and self.git != p.git:
            return f"the bytes that came are git blob {self.git}, promised is {p.git}"
        return ""


# --- what is wanted --------------------------------------------------------------------------------------------------------------


def patterns(ignore: Iterable[str]) -> list[str]:
    """ignore_patterns as the manifest has them: equal sets are equal lists."""
    return sorted({p.strip() for p in ignore if p.strip()})


def ignored(name: str, ignore: Sequence[str]) -> bool:
    """As huggingface_hub does it: shell patterns for the whole path, and a folder's pattern stands for all below it."""
    return any(fnmatchcase(name, f"{p}*" if p.endswith("/") else p) for p in ignore)


@dataclass
class Wanted:
    """The files of a revision. revision: the resolved commit, or what was asked for."""

    revision: str
    sums_sha256: str
    files: dict[str, Promise]
    ignore_patterns: list[str] = field(default_factory=list)
    manifest: bytes = b""  # a peer's, which this node's must equal

    @property
    def size(self) -> int | None:
        """Bytes of all files; None when a size is not told."""
        sizes = [p.size for p in self.files.values()]
        return None if None in sizes else sum(s for s in sizes if s is not None)


def listing_problems(files: dict[str, Promise], where: str) -> list[Problem]:
    """What must not be brought, whoever lists it."""
    found, other = [], "leave that file out (ignore_patterns), or pin another revision"
    for name in files:
        if why := unsafe_name(name):
            found.append(problem("unsafe_name", f"{where}: {name[:120]!r} {why}", other))
    for above, below in clashing([*files]):
        found.append(problem("unsafe_name", f"{where}: {above!r} is a file, and {below!r} lies in it", other))
    config = files.get("config.json")
    if config and (config.size == 0 or config.digest in EMPTY):
        remedy = "pin a revision, or give a source, whose config.json has content"
        found.append(problem("source_damaged", f"{where}: config.json is empty (0 bytes)", remedy))
    for name, promise in files.items():
        if not (HEX64.fullmatch(promise.sha256) or HEX40.fullmatch(promise.git)):
            evidence = f"{where}: no digest is told of {name!r}"
            found.append(
                problem("no_digest", evidence, "use a source that tells them: the hub, a cache of it, or a folder with SHA256SUMS")
            )
    if not files:
        found.append(problem("nothing_to_bring", f"{where}: no file is left", "check ignore_patterns and the revision"))
    return found


# --- the manifest ----------------------------------------------------------------------------------------------------------------


@dataclass
class Manifest:
    """The content of MANIFEST. files: name -> (size, SHA-256)."""

    repo: str
    revision: str
    sums_sha256: str
    ignore_patterns: list[str]
    files: dict[str, tuple[int, str]]

    def value(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "format": FORMAT,
            "repo": self.repo,
            "revision": self.revision,
            "sums_sha256": self.sums_sha256,
            "ignore_patterns": self.ignore_patterns,
            "files": {name: {"size": size, "sha256": sha256} for name, (size, sha256) in self.files.items()},
        }

    def raw(self) -> bytes:
        """Its bytes: the same on every node."""
        return json.dumps(self.value(), indent=1, sort_keys=True).encode() + b"\n"

    @property
    def sha256(self) -> str:
        """Of its bytes."""
        return hashlib.sha256(self.raw()).hexdigest()

    def promises(self) -> dict[str, Promise]:
        """What each file must be."""
        return {name: Promise(size, sha256) for name, (size, sha256) in self.files.items()}


def parse_manifest(raw: bytes) -> Manifest | None:
    """None when it is not what this module writes."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or type(value.get("format")) is not int or value["format"] != FORMAT:
        return None
    texts, files, ignore = [value.get(n) for n in ("repo", "revision", "sums_sha256")], value.get("files"), value.get("ignore_patterns")
    if not (all(map(is_text, texts)) and isinstance(files, dict) and files and isinstance(ignore, list) and all(map(is_text, ignore))):
        return None
    if value["sums_sha256"] and not HEX64.fullmatch(value["sums_sha256"]):
        return None
    if not all(_is_entry(entry) for entry in files.values()) or any(map(unsafe_name, files)) or clashing([*files]):
        return None
    entries = {name: (entry["size"], entry["sha256"]) for name, entry in files.items()}
    made = Manifest(value["repo"], value["revision"], value["sums_sha256"], ignore, entries)
    return made if made.raw() == raw else None


def _is_entry(value: Any) -> bool:
    sane = isinstance(value, dict) and is_text(value.get("sha256")) and HEX64.fullmatch(value["sha256"])
    return bool(sane and type(value.get("size")) is int and 0 <= value["size"] < 1 << 60)


def is_note(value: Any) -> bool:
    """Whether it is an entry of Notes."""
    return _is_entry(value) and type(value.get("mtime_ns")) is int and value["mtime_ns"] >= 0


@dataclass
class Request:
    """Which snapshot is asked for. revision: without sha256:; manifest_sha256: of a peer's manifest, which then is the pin."""

    repo: str
    revision: str
    sums_sha256: str = ""
    manifest_sha256: str = ""
    ignore_patterns: list[str] = field(default_factory=list)


@dataclass
class Known:
    """What has been noted about a destination."""

    files: Notes
    head: dict[str, Any]  # of the stamps: repo, revision, sums_sha256, ignore_patterns, asked
    manifest: Manifest | None
    raw: bytes  # of the manifest

    def of(self, request: Request) -> Manifest | None:
        """The manifest, if it is the one that is asked for."""
        m, r = self.manifest, request
        if m is None or not self.agree or (m.repo, m.ignore_patterns) != (r.repo, r.ignore_patterns):
            return None
        if r.manifest_sha256:
            return m if hashlib.sha256(self.raw).hexdigest() == r.manifest_sha256 and self.resolved(r) == m.revision else None
        return m if m.sums_sha256 == r.sums_sha256 and self.resolved(r) == m.revision else None

    @property
    def agree(self) -> bool:
        """Whether the manifest and the notes, if both are there, list the same files: else one of them has been damaged or edited."""
        if self.manifest is None or not self.head:
            return True
        return {n: (e["size"], e["sha256"]) for n, e in self.files.items()} == self.manifest.files

    @property
    def repo(self) -> str:
        """The repository whose files lie here; '' when nothing says so."""
        return self.manifest.repo if self.manifest else str(self.head.get("repo", ""))

    @property
    def ours(self) -> bool:
        """Whether an earlier run of this collection filled the folder, to the end or not."""
        return self.manifest is not None or bool(self.head)

    def resolved(self, request: Request) -> str:
        """The revision, for a branch what it was resolved to on this node; '' when it was not."""
        if fixed(request):
            return request.revision
        same = self.head.get("repo") == request.repo and self.head.get("asked") == request.revision
        return str(self.head.get("revision", "")) if same else ""

    def same(self, request: Request) -> bool:
        """Whether the notes are of the files that are asked for, complete or not."""
        h = self.head
        if not h or (h["repo"], h["ignore_patterns"], self.resolved(request)) != (request.repo, request.ignore_patterns, h["revision"]):
            return False
        return bool(request.manifest_sha256) or h["sums_sha256"] == request.sums_sha256


def fixed(request: Request) -> bool:
    """Whether the revision names its content by itself: a commit, a list's digest, or any name that comes with a list's digest."""
    return bool(request.sums_sha256 or HEX40.fullmatch(request.revision) or HEX64.fullmatch(request.revision))


def known(dest: Path) -> Known:
    """The manifest and the notes; files without a note are unverified."""
    kinds: dict[str, Any] = dict.fromkeys(("repo", "revision", "sums_sha256", "asked"), is_text)
    kinds |= {"files": lambda v: isinstance(v, dict), "ignore_patterns": lambda v: isinstance(v, list) and all(map(is_text, v))}
    noted = read_object(dest / STAMPS, kinds)
    head = {name: noted[name] for name in kinds if name != "files"} if kinds.keys() <= noted.keys() else {}
    files = {k: v for k, v in noted["files"].items() if is_note(v) and not unsafe_name(k)} if head else {}
    raw = read_regular(dest / MANIFEST) or b""
    found = Known(files, head, parse_manifest(raw), raw)
    if found.manifest and not found.agree:  # nobody knows which is right: what they differ in is read again
        told = found.manifest.files
        found.files = {n: e if told.get(n) == (e["size"], e["sha256"]) else {**e, "mtime_ns": 0} for n, e in files.items()}
    return found


def file_state(dest: Path, name: str, entry: dict[str, Any] | None, want: Promise, mutable: bool, same: bool) -> str:
    """ok, missing, link (also a folder), changed (against its note), short or long (against the promise), unverified (no note).

    mutable: may differ when what was brought is kept beside it; same: the note is of this very revision, so that it says which git blob
    it is.
    """
    if linked(dest, name):
        return "link"
    try:
        info = (dest / name).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    if not stat.S_ISREG(info.st_mode):
        return "link"
    noted = entry is not None and (entry.get("sha256") == want.sha256 if want.sha256 else same) and want.size in {None, entry["size"]}
    if noted and entry and (entry.get("size"), entry.get("mtime_ns")) == (info.st_size, info.st_mtime_ns):
        return "ok"
    if noted and entry and mutable and info.st_size and _kept(dest, name, entry):
        return "ok"
    if want.size is not None and info.st_size != want.size:
        return "short" if info.st_size < want.size else "long"
    return "changed" if noted else "unverified"


def linked(dest: Path, name: str) -> bool:
    """Whether a folder on the way to a file is a link: what lies behind it is somebody else's."""
    parts = name.split("/")[:-1]
    return any((dest / "/".join(parts[: n + 1])).is_symlink() for n in range(len(parts)))


def _kept(dest: Path, name: str, entry: Mapping[str, Any]) -> bool:
    """Whether a changed file still is, or still has beside it, what was brought. Only for small files: they are read."""
    if linked(dest, f"{PRISTINE}/{name}"):
        return False
    for path in (dest / PRISTINE / name, dest / name):
        with suppress(OSError):
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and info.st_size == entry["size"] and file_sha256(path) == entry["sha256"]:
                return True
    return False


def plan(dest: Path, files: dict[str, Promise], mutable: Sequence[str], noted: Known, same: bool) -> dict[str, str]:
    """{name: state} of every wanted file that is not ok. A mutable file may differ only within one revision."""
    states = {n: file_state(dest, n, noted.files.get(n), p, same and n in mutable, same) for n, p in files.items()}
    return {n: s for n, s in states.items() if s != "ok"}


def complete(dest: Path, request: Request, mutable: Sequence[str]) -> Manifest | None:
    """The manifest, when it is the one asked for and every file is as noted. Does not need the source."""
    noted = known(dest)
    manifest = noted.of(request)
    if manifest is None or not noted.same(request):
        return None
    return None if plan(dest, manifest.promises(), mutable, noted, True) else manifest


def note(dest: Path, name: str, sha256: str) -> dict[str, Any]:
    """A verified file's note."""
    info = (dest / name).lstat()
    return {"size": info.st_size, "sha256": sha256, "mtime_ns": info.st_mtime_ns}


class Book:
    """Writes the stamps and the manifest."""

    def __init__(self, dest: Path, repo: str, asked: str, source: str, wanted: Wanted, clock: Callable[[], float] = time.monotonic) -> None:
        self._dest, self._source, self._wanted = dest, source, wanted
        self._clock, self._written = clock, -1e9
        self._head: dict[str, Any] = {
            "format": FORMAT,
            "repo": repo,
            "revision": wanted.revision,
            "sums_sha256": wanted.sums_sha256,
            "ignore_patterns": wanted.ignore_patterns,
            "asked": asked,
            "source": source,
        }

    def unfinished(self, files: Notes) -> None:
        """From the first call on the folder is not complete for anyone."""
        write_json(self._dest / STAMPS, {**self._head, "files": files, "completed_at": None})
        (self._dest / MANIFEST).unlink(missing_ok=True)
        self._written = self._clock()

    def grown(self, files: Notes) -> None:
        """One more file is good. Written at most once in NOTES_EVERY_S: all notes are, and a file without a note is only read again."""
        if self._clock() - self._written >= NOTES_EVERY_S:
            self.unfinished(files)

    def manifest(self, files: Notes) -> Manifest:
        """Of these files."""
        entries = {name: (int(e["size"]), str(e["sha256"])) for name, e in files.items()}
        head = self._head
        return Manifest(head["repo"], head["revision"], head["sums_sha256"], head["ignore_patterns"], entries)

    def finished(self, files: Notes) -> None:
        """The manifest is the last thing that is written."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        write_json(self._dest / STAMPS, {**self._head, "files": files, "completed_at": now})
        write_json(self._dest / MANIFEST, self.manifest(files).value())
        fsync_dir(self._dest)


# --- names in the folder ---------------------------------------------------------------------------------------------------------


def part_name(name: str, promise: Promise) -> str:
    """The unfinished file's name: of this very content, so that another revision's part is never continued."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}.{promise.digest[:12]}.part"


def size_of(path: Path) -> int:
    """Bytes of a regular file, 0 for anything else."""
    try:
        info = path.lstat()
    except OSError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


def stale_parts(dest: Path, files: Iterable[str], parts: Iterable[str], noted: Iterable[str] = ()) -> list[Path]:
    """What killed runs left and nothing will continue, of the hub's own tools as well.

    files: wanted names; parts: names of what will be continued; noted: names of earlier files. Only their folders are looked into,
    and none that is a snapshot of its own.
    """
    keep, found = set(parts), []
    folders = {"", *(name.rpartition("/")[0] for name in (*files, *noted))}
    for at in sorted(folders):
        if linked(dest, f"{at}/x") or _is_anothers(dest, at):
            continue
        for name in _names(dest / at):
            path = f"{at}/{name}" if at else name
            part = re.fullmatch(r"\..+\.[0-9a-f]{12}\.part", name) and path not in keep
            half = not at and re.fullmatch(rf"\.({re.escape(MANIFEST)}|{re.escape(STAMPS)})\.\w{{8}}", name)  # of atomic_write
            if part or half:
                found.append(dest / path)
    if not linked(dest, f"{HUB_TOOLS_PARTS}/x"):
        for top, _, names in os.walk(dest / HUB_TOOLS_PARTS):
            found += [Path(top) / name for name in names if name.endswith(".incomplete")]
    return sorted(found)


def _is_anothers(dest: Path, at: str) -> bool:
    """Whether a folder below dest, or one above it there, is the destination of another snapshot."""
    parts = at.split("/") if at else []
    above = [dest.joinpath(*parts[: n + 1]) for n in range(len(parts))]
    return any(os.path.lexists(folder / name) for folder in above for name in (MANIFEST, STAMPS, LOCK))


def _names(folder: Path) -> list[str]:
    """What lies in a folder and is no folder."""
    try:
        with os.scandir(folder) as entries:
            return [e.name for e in entries if not e.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def foreign(dest: Path, noted: Known, todo: Mapping[str, str], sure: Sequence[str] = ("short", "long", "unverified")) -> list[Problem]:
    """Files that somebody else put where the snapshot's belong, with other content. sure: states that say so."""
    names = [] if noted.ours else [name for name, state in todo.items() if state in sure]
    remedy = "move those files away or remove them, or choose another destination (checkpoint_dir), then run again"
    some = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
    evidence = f"{dest} is no snapshot of this collection, and has files with other content than the revision's: {some}"
    return [problem("dest_foreign", evidence, remedy)] if names else []


def other_repo(dest: Path, noted: Known, repo: str) -> list[Problem]:
    """A folder with another repository's snapshot is not made into this one's: its files would have to go."""
    if noted.repo in {"", repo}:
        return []
    remedy = f"choose another destination (checkpoint_dir); or, if nobody needs it any more, remove {dest}; then run again"
    return [problem("dest_other_repo", f"{dest} is the snapshot of {noted.repo}, wanted is {repo}", remedy)]


def in_the_way(dest: Path, files: dict[str, Promise]) -> list[Problem]:
    """Folders where files belong, and files or links where folders do: what they hold is not ours to delete or to write through."""
    found: dict[str, Problem] = {}
    for name, promise in files.items():
        for path in (name, part_name(name, promise)):
            if (dest / path).is_dir() and not (dest / path).is_symlink():
                remedy = "move that folder away, then run again; or choose another destination (checkpoint_dir)"
                found[path] = problem("dest_not_writable", f"{dest / path} is a folder, and a file of that name belongs there", remedy)
        parts = name.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            above = "/".join(parts[:depth])
            if (dest / above).is_symlink() or ((dest / above).exists() and not (dest / above).is_dir()):
                kind = "a link" if (dest / above).is_symlink() else "a file"
                evidence = f"{dest / above} is {kind}, and a folder of that name belongs there"
                found[above] = problem("dest_not_writable", evidence, "move it away, then run again; or choose another destination")
                break
    return list(found.values())
