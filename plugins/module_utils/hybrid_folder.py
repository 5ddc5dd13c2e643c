# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The folders of a hybrid: the source and what identifies it, the output and when it is complete, and the place where it is built.

An output folder appears by one rename, after its manifest was written. Whatever looks at it needs neither the donor nor a network.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .files import fsync_dir, write_json
from .jobs import JobFailure, digest, is_text, read_object
from .problems import Problem, errors, problem
from .safetensors_compare import Report, compare
from .safetensors_header import BadFile, Tensor, shown, some
from .safetensors_index import INDEX_NAME, SUFFIX, Checkpoint, read_checkpoint
from .snapshot_files import Notes, known
from .snapshot_space import RESERVE_BYTES, existing, gb, mount_point
from .sources import HEX64, OWN_PREFIX
from .sources import MANIFEST as SNAPSHOT

MANIFEST = ".dgxspark-hybrid.json"
JOURNAL = ".dgxspark-hybrid.journal.json"  # of the folder while it is built
FORMAT = 1  # of what is built: another number makes every older output incomplete
LOCK_WAIT_S = 60.0
_NOT_OURS = {".cache", ".git", ".huggingface"}  # what download tools keep beside the files, often as large again
_HASHED_HEADER_BYTES = 100_000_000
_TEMPORARY = f".{OWN_PREFIX}"  # what an interrupted atomic write of a file of ours leaves


# --- the source ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceFile:
    """A file of the source, through links. state: device, inode, size in bytes, mtime in ns."""

    path: Path
    state: tuple[int, int, int, int]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.state[2]


@dataclass
class SourceFolder:
    """The source as it is now. identity: equal for equal content, as far as can be told without reading all of it."""

    folder: Path
    files: dict[str, SourceFile]
    index_name: str
    identity: Any
    snapshot: dict[str, Any] | None = None  # repo and revision, if it is a complete snapshot
    problems: list[Problem] = field(default_factory=list)


def state_of(info: os.stat_result) -> tuple[int, int, int, int]:
    """What must stay the same while a file is used."""
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def look_at(folder: Path) -> SourceFolder:
    """Names, sizes and identity of a source; reads headers' bytes at most, and parses none. JobFailure when it is no folder."""
    if not folder.is_dir():
        remedy = "download the INT4 checkpoint first (module hf_snapshot), or correct source"
        raise JobFailure(problem("source_missing", f"source {folder} is not a folder on this node", remedy))
    files: dict[str, SourceFile] = {}
    problems: list[Problem] = []
    try:
        _walk(folder, "", files, problems, set())
        indexes = [name for name in files if "/" not in name and name.endswith(f"{SUFFIX}.index.json")]
        index_name = indexes[0] if len(indexes) == 1 else INDEX_NAME
        found = SourceFolder(folder, files, index_name, None, problems=problems)
        _identify(found)
    except OSError as error:
        evidence = f"{error.filename or folder}: {error.strerror or error}"
        raise JobFailure(problem("source_unreadable", evidence, "mend the source's disk, mount or rights, then run again")) from error
    return found


def _walk(folder: Path, below: str, files: dict[str, SourceFile], problems: list[Problem], seen: set[tuple[int, int]]) -> None:
    """All files below, links followed, without what tools keep for themselves."""
    here = folder.stat()
    if (here.st_dev, here.st_ino) in seen:
        evidence = f"{folder} is a link to a folder that it lies in"
        problems.append(problem("source_link_loop", evidence, "remove the link"))
        return
    inside = seen | {(here.st_dev, here.st_ino)}
    for entry in sorted(os.listdir(folder)):
        if (not below and entry in _NOT_OURS) or entry.startswith(OWN_PREFIX) or (entry.startswith(".") and entry.endswith(".part")):
            continue
        path, name = folder / entry, f"{below}{entry}"
        try:
            info = path.stat()
        except FileNotFoundError:
            evidence = f"{path} is a broken link: it points to {os.readlink(path)!r}" if path.is_symlink() else f"{path} has just gone"
            remedy = "complete the source: of a hub cache keep the whole models--* folder, blobs included"
            problems.append(problem("source_incomplete", evidence, remedy))
            continue
        if stat.S_ISDIR(info.st_mode):
            _walk(path, f"{name}/", files, problems, inside)
        elif not stat.S_ISREG(info.st_mode):
            problems.append(problem("source_not_a_file", f"{path} is a device, socket or pipe", "remove it from the source"))
        elif not name.isprintable():
            problems.append(problem("bad_file_name", f"{folder}: the name {entry!r} is no printable text", "rename or remove that file"))
        else:
            files[name] = SourceFile(path, state_of(info))


def _identify(found: SourceFolder) -> None:
    """Of a snapshot its manifest, else sizes, times and headers. The index is left out: the output's is made of headers."""
    rest = {name: file for name, file in sorted(found.files.items()) if name != found.index_name}
    noted = known(found.folder)
    if noted.manifest is None:
        if noted.head or noted.raw:
            evidence = f"{found.folder} is an unfinished snapshot: there are notes of one, and no sound {SNAPSHOT}"
            found.problems.append(problem("source_incomplete", evidence, "run hf_snapshot (the checkpoint role) to its end first"))
        found.identity = {"files": [_identity_of(name, file) for name, file in rest.items()]}
        return
    if odd := _unlike(found, noted.manifest.files, noted.files if noted.head else None):
        evidence = f"{found.folder} is not the snapshot that {SNAPSHOT} describes: {some(odd, quote=False)}"
        remedy = "run hf_snapshot (the checkpoint role) again: it brings what is missing or changed"
        found.problems.append(problem("source_incomplete", evidence, remedy))
    found.snapshot = {"repo": noted.manifest.repo, "revision": noted.manifest.revision}
    if noted.head:
        others = [_identity_of(name, file) for name, file in rest.items() if name not in noted.manifest.files]
        found.identity = {"snapshot": hashlib.sha256(noted.raw).hexdigest(), "others": others}
    else:  # nothing on this node vouches for the bytes of a manifest that was copied here
        found.identity = {"files": [_identity_of(name, file) for name, file in rest.items()]}


def _unlike(found: SourceFolder, files: Mapping[str, tuple[int, str]], notes: Notes | None) -> list[str]:
    """Files that are not as the snapshot's manifest and this node's notes say. The index may have been mended since."""
    odd = []
    for name, (size, sha256) in sorted(files.items()):
        have = found.files.get(name)
        note = None if notes is None else notes.get(name, {})
        if have is None:
            odd.append(f"{shown(name)} is missing")
        elif name == found.index_name:
            continue
        elif size != have.size:
            odd.append(f"{shown(name)} has {have.size} bytes, not {size}")
        elif note is not None and (note.get("sha256"), note.get("mtime_ns")) != (sha256, have.state[3]):
            odd.append(f"{shown(name)} was changed after it was verified")
    return odd


def _identity_of(name: str, file: SourceFile) -> list[Any]:
    noted: list[Any] = [name, file.size, file.state[3]]
    if "/" not in name and name.endswith(SUFFIX):
        with file.path.open("rb", buffering=0) as stream:
            start = stream.read(8)
            hasher, left = hashlib.sha256(start), int.from_bytes(start, "little")
            left = left if left <= _HASHED_HEADER_BYTES else 0  # no header
            while left and (chunk := stream.read(min(1 << 20, left))):
                hasher.update(chunk)
                left -= len(chunk)
            noted.append(hasher.hexdigest())
    return noted


def read_source(found: SourceFolder) -> tuple[Checkpoint, Report]:
    """The source's headers, compared with its index. JobFailure with everything that keeps a hybrid from being made of it."""
    try:
        checkpoint = read_checkpoint(found.folder, found.index_name)
    except BadFile as bad:
        raise JobFailure(*bad.problems) from bad
    report = compare(checkpoint)
    wrong = [*found.problems, *errors(report.problems)]
    if "config.json" not in found.files:
        wrong.append(problem("config_missing", f"{found.folder} has no config.json", "complete the source"))
    if wrong:
        raise JobFailure(*wrong)
    _slim(checkpoint, report)
    return checkpoint, report


def _slim(checkpoint: Checkpoint, report: Report) -> None:
    """Let go of what a build does not need: of 110,000 tensors, each shape and type once, and no second list of names."""
    known: dict[Any, Any] = {}
    for name, header in checkpoint.headers.items():
        tensors = {
            key: Tensor(known.setdefault(t.dtype, t.dtype), known.setdefault(t.shape, t.shape), t.start, t.end)
            for key, t in header.tensors.items()
        }
        checkpoint.headers[name] = replace(header, tensors=tensors)
    if checkpoint.index:
        rest = {key: value for key, value in checkpoint.index.document.items() if key != "weight_map"}
        checkpoint.index = replace(checkpoint.index, weight_map={}, document=rest)
    report.mended = None


# --- the places ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """The output and what lies beside it, on the same file system, so that a rename publishes it."""

    output: Path

    @property
    def building(self) -> Path:
        """Where it is built."""
        return self.output.with_name(f".{self.output.name}.building")

    @property
    def previous(self) -> Path:
        """The output that it replaced."""
        return self.output.with_name(f"{self.output.name}.previous")

    @property
    def lock(self) -> Path:
        """Held by whoever builds."""
        return self.output.with_name(f".{self.output.name}.lock")


def place_problems(source: str, output: str, donor_source: str = "hub") -> list[Problem]:
    """Places that must not be written: relative, links, overlapping source or donor, or somebody else's."""
    found: list[Problem] = []
    if not output.startswith("/") or os.path.realpath(output) == "/" or Path(output).name in ("", ".", ".."):
        return [
            problem("bad_output", f"output {output!r} is not an absolute folder below /", "give an absolute path of a folder of its own")
        ]
    places = Places(Path(output))
    if not source.startswith("/"):
        found.append(problem("bad_source", f"source {source!r} is not an absolute path", "give the folder of the INT4 checkpoint"))
    for what, folder in (("source", source), *([("donor_source", donor_source)] if donor_source.startswith("/") else [])):
        real = os.path.realpath(folder)
        for place in (places.output, places.building, places.previous):
            if _overlap(real, os.path.realpath(place)):
                evidence = f"{what} {real} and {place} are the same folder, or one is inside the other"
                found.append(problem("bad_output", evidence, f"{what} is never written to: give output a folder of its own"))
    for place in (places.output, places.building, places.previous):
        if place.is_symlink():
            evidence = f"{place} is a link to {os.readlink(place)}"
            found.append(problem("output_is_link", evidence, "give the real folder as output, or remove the link: it is not followed"))
        elif os.path.lexists(place) and not is_ours(place) and not _is_empty(place):
            evidence = f"{place} exists and was not made by this module (no sound {MANIFEST} in it)"
            found.append(problem("output_not_ours", evidence, "move it away or choose another output: it is not deleted"))
    return found


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(b.rstrip("/") + "/") or b.startswith(a.rstrip("/") + "/")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and all(entry.startswith(_TEMPORARY) for entry in os.listdir(folder))


def is_ours(folder: Path) -> bool:
    """Whether a folder is one that this module built, or builds."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    fields = {"format": lambda v: type(v) is int, "inputs": is_text}
    return any(
        fields.keys() <= read_object(folder / name, fields).keys() for name in (MANIFEST, JOURNAL) if not (folder / name).is_symlink()
    )


@contextmanager
def locked(places: Places, say: Callable[[str], None], wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """One builder of an output at a time. Another one waits, then says who holds the lock."""
    places.output.parent.mkdir(parents=True, exist_ok=True)
    # Never removed: whoever waits for it holds this very file open.
    descriptor = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "r+b", buffering=0) as stream:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                said = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                holder = f"process {said}" if re.fullmatch(r"[0-9]+", said) else "another process"
                if time.monotonic() >= until:
                    evidence = f"{holder} builds {places.output} and holds {places.lock}, for longer than {wait_s:g} s"
                    remedy = "wait until it has ended, or stop it, then run the same command again"
                    raise JobFailure(problem("output_locked", evidence, remedy)) from error
                say(f"waiting for {holder}, which builds the same folder")
                time.sleep(min(0.2, max(0.01, until - time.monotonic())))
        stream.truncate(0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            stream.truncate(0)


# --- complete or not -------------------------------------------------------------------------------------------------------------


def inputs_of(mode: str, identity: Any, donor_repo: str, donor_revision: str) -> str:
    """Digest of everything that decides what the output holds."""
    return digest({"format": FORMAT, "mode": mode, "source": identity, "donor": [donor_repo, donor_revision]})


def is_note(value: Any) -> bool:
    """Whether this is a file's entry in a manifest or journal."""
    return isinstance(value, dict) and all(type(value.get(name)) is int and value[name] >= 0 for name in ("size", "mtime_ns"))


def note_of(info: os.stat_result) -> dict[str, int]:
    """A file's entry."""
    return {"size": info.st_size, "mtime_ns": info.st_mtime_ns}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


_DONOR = {"sha256": lambda v: is_text(v) and HEX64.fullmatch(v) is not None, "tensors": _is_names, "bytes": _is_count}
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "format": _is_count,
    "mode": is_text,
    "inputs": is_text,
    "needs": _is_names,
    "files": lambda v: isinstance(v, dict) and bool(v) and all(map(is_note, v.values())),
    "links": _is_names,
    "index": lambda v: isinstance(v, dict) and is_text(v.get("name")) and is_text(v.get("sha256")),
    "donor": lambda v: isinstance(v, dict) and all(fits(v.get(name)) for name, fits in _DONOR.items()),
    **dict.fromkeys(("replaced", "scales_added", "unplaced", "bytes"), _is_count),
}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """A folder's manifest with all its fields; None when it has none, or one that is not sound."""
    path = folder / MANIFEST
    if folder.is_symlink() or path.is_symlink() or not path.is_file():
        return None
    noted = read_object(path, _FIELDS)
    return noted if noted.keys() >= _FIELDS.keys() else None


def complete(folder: Path, inputs: str, source: SourceFolder) -> tuple[dict[str, Any] | None, str]:
    """(manifest, '') of an output that is complete and made of these inputs, else (None, why not)."""
    if not os.path.lexists(folder):
        return None, "absent"
    noted = read_manifest(folder)
    if noted is None:
        return None, "no sound manifest"
    if noted["format"] != FORMAT or noted["inputs"] != inputs:
        return None, "made of other inputs, or in another mode"
    links = set(noted["links"])
    for name, entry in noted["files"].items():
        try:
            info = (folder / name).lstat()
        except OSError:
            return None, f"{name} is missing"
        if not stat.S_ISREG(info.st_mode) or note_of(info) != entry:
            return None, f"{name} was changed"
        if name in links and (name not in source.files or source.files[name].state[:2] != (info.st_dev, info.st_ino)):
            return None, f"{name} is no longer the same file as in the source"
    return noted, ""


# --- building and publishing -----------------------------------------------------------------------------------------------------


class Building:
    """The unfinished folder with its journal. files: what is on disk and need not be made again."""

    def __init__(self, places: Places, inputs: str) -> None:
        self.folder, self._inputs, self._places = places.building, inputs, places
        self.files: dict[str, dict[str, int]] = {}
        self.donor = ""  # SHA-256 of the donor shard that the files are made with

    def open(self) -> None:
        """Take up what an earlier run left, if it was made of the same inputs; else begin anew."""
        if os.path.lexists(self.folder) and not _is_empty(self.folder):
            noted = read_object(
                self.folder / JOURNAL, {"format": _is_count, "inputs": is_text, "donor": is_text, "files": lambda v: isinstance(v, dict)}
            )
            if (noted.get("format"), noted.get("inputs")) == (FORMAT, self._inputs):
                self.files = {name: entry for name, entry in noted.get("files", {}).items() if is_note(entry)}
                self.donor = noted.get("donor", "")
            else:
                remove_ours(self.folder)
        self.folder.mkdir(mode=0o755, exist_ok=True)
        self.save()

    def save(self) -> None:
        """Write the journal. Only what has been flushed to the disk may be in it."""
        fsync_dir(self.folder)
        write_json(self.folder / JOURNAL, {"format": FORMAT, "inputs": self._inputs, "donor": self.donor, "files": self.files})

    def forget(self) -> None:
        """Nothing is vouched for any more."""
        self.files = {}
        (self.folder / MANIFEST).unlink(missing_ok=True)
        self.save()

    def has(self, name: str) -> bool:
        """Whether a file is there as the journal says."""
        try:
            info = (self.folder / name).lstat()
        except OSError:
            return False
        return name in self.files and stat.S_ISREG(info.st_mode) and note_of(info) == self.files[name]

    def publish(self) -> None:
        """Make the finished folder the output; what was there becomes the previous one. Can be repeated at any point."""
        for entry in os.listdir(self.folder):
            if entry.startswith((OWN_PREFIX, _TEMPORARY)) and entry != MANIFEST:
                (self.folder / entry).unlink()
        fsync_dir(self.folder)
        if os.path.lexists(self._places.output) and not _is_empty(self._places.output):
            if os.path.lexists(self._places.previous):
                remove_ours(self._places.previous)
            self._places.output.rename(self._places.previous)
        self.folder.rename(self._places.output)
        fsync_dir(self._places.output.parent)


def remove_ours(folder: Path) -> None:
    """Delete a folder of this module. Its manifest or journal goes last, so that an interrupted deletion can be taken up again."""
    if not is_ours(folder) and not _is_empty(folder):
        evidence = f"{folder} was not made by this module (no sound {MANIFEST} in it)"
        raise JobFailure(problem("output_not_ours", evidence, "move it away or choose another output: it is not deleted"))
    entries = sorted(folder.iterdir(), key=lambda path: path.name in (MANIFEST, JOURNAL))
    for path in entries:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()


def space_problems(places: Places, missing: int, reserve: int = RESERVE_BYTES) -> list[Problem]:
    """Whether what is still to be written fits. missing: bytes."""
    at = existing(places.output)
    free = shutil.disk_usage(at).free
    if missing + reserve <= free:
        return []
    evidence = f"{places.output} (file system {mount_point(at)}): {gb(missing)} are still to be written and {gb(reserve)} stay free,"
    evidence += f" that is {gb(missing + reserve)}; free are {gb(free)}"
    remedy = f"free {gb(missing + reserve - free)} there, or put output on another file system"
    if is_ours(places.previous):
        remedy += f"; {places.previous} is an older hybrid that may go"
    return [problem("disk_full", evidence, remedy)]


def bytes_below(folder: Path) -> int:
    """Bytes of all files of a folder, which may be absent or change meanwhile."""
    total = 0
    for top, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(top, name)).st_size
    return total
