# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The folders of a hybrid: the output and when it is complete, and the place where it is built.

An output folder appears by one rename, after its manifest was written. Whatever looks at it needs neither the donor nor a network.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import fsync_dir, write_json
from .hybrid_source import SourceFolder
from .jobs import JobFailure, digest, is_text, read_object
from .problems import Problem, problem
from .safetensors_header import shown, some
from .safetensors_index import INDEX_NAME, SUFFIX
from .snapshot_space import RESERVE_BYTES, dest_failure, existing, gb, mount_point
from .sources import HEX64, OWN_PREFIX, is_own

MANIFEST = ".dgxspark-hybrid.json"
JOURNAL = ".dgxspark-hybrid.journal.json"  # of the folder while it is built
FORMAT = 1  # of what is built: another number makes every older output incomplete
LOCK_WAIT_S = 60.0
_TEMPORARY = f".{OWN_PREFIX}"  # what an interrupted atomic write of a file of ours leaves


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
    for what, path in (("source", source), ("output", output)):
        if any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in path):
            return [problem(f"bad_{what}", f"{what} {path!r} has control characters, or is no text", "give a path that can be printed")]
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
    try:
        descriptor = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
            raise
        raise _lock_not_ours(places.lock, "no regular file") from error
    with os.fdopen(descriptor, "r+b", buffering=0) as stream:
        _check_lock(descriptor, places.lock)
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
        _check_lock(descriptor, places.lock)
        stream.truncate(0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        try:
            yield
        finally:
            stream.truncate(0)


def _check_lock(descriptor: int, path: Path) -> None:
    """JobFailure unless the file may be written: ours is empty or has a process's number, and no second name."""
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        raise _lock_not_ours(path, "no regular file")
    if info.st_nlink > 1:
        raise _lock_not_ours(path, "a file with other names (hard links)")
    if not re.fullmatch(rb"([0-9]{1,20}\n?)?", os.pread(descriptor, 64, 0)):
        raise _lock_not_ours(path, "a file with content of somebody else")


def _lock_not_ours(path: Path, what: str) -> JobFailure:
    evidence = f"{path} is {what}, and the lock of the build has that name"
    return JobFailure(problem("lock_not_ours", evidence, "move it away, or choose another output: it is not written to"))


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


def _is_below(name: str) -> bool:
    """Whether a name stays inside the folder that it is joined to."""
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))


def is_expect(value: Any) -> bool:
    """Whether these are numbers given instead of those that follow from config.json."""
    return isinstance(value, dict) and all(name in {"weights", "scales", "unplaced"} and _is_count(n) for name, n in value.items())


_DONOR = {"sha256": lambda v: is_text(v) and HEX64.fullmatch(v) is not None, "tensors": _is_names, "bytes": _is_count}
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "format": _is_count,
    "mode": is_text,
    "inputs": is_text,
    "needs": _is_names,
    "name": is_text,
    "overlay": is_text,
    "expect": is_expect,
    "files": lambda v: isinstance(v, dict) and bool(v) and all(map(is_note, v.values())) and all(map(_is_below, v)),
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


def unexpected(noted: Mapping[str, Any], expect: Mapping[str, int] | None) -> str:
    """How the numbers of a build differ from what is expected now; '' when they are that.

    noted: its counts, and `expect`, the numbers that it was allowed against its config.json.
    """
    now, then = given(expect), given(noted["expect"])
    for kind, key in (("weights", "replaced"), ("scales", "scales_added"), ("unplaced", "unplaced")):
        if kind in now and now[kind] != noted[key]:
            return f"has {noted[key]} {kind}, expected are {now[kind]}"
        if kind in then and kind not in now:
            return f"was built with {then[kind]} {kind} as expect, which is no longer given"
    return ""


def given(expect: Mapping[str, int] | None) -> dict[str, int]:
    """Every number that is given: without one for scales there are as many as weights."""
    found = dict(expect or {})
    return {**found, "scales": found.get("scales", found["weights"])} if "weights" in found else found


def complete(folder: Path, inputs: str, source: SourceFolder, expect: Mapping[str, int] | None = None) -> tuple[dict[str, Any] | None, str]:
    """(manifest, '') of an output that is complete and made of these inputs, else (None, why not)."""
    if not os.path.lexists(folder):
        return None, "absent"
    noted = read_manifest(folder)
    if noted is None:
        return None, "no sound manifest"
    if noted["format"] != FORMAT or noted["inputs"] != inputs:
        return None, "made of other inputs, or in another mode"
    why = unexpected(noted, expect) or _unlisted(noted, source) or _unlike_notes(folder, noted, source)
    return (None, why) if why else (noted, "")


def _unlisted(noted: Mapping[str, Any], source: SourceFolder) -> str:
    """How a manifest's list differs from the files that an output of this source has."""
    overlay, files = noted["overlay"], noted["files"].keys()
    if bool(overlay) != (noted["mode"] == "overlay") or noted["index"]["name"] != INDEX_NAME:
        return "the manifest contradicts itself"
    want = {*source.kept, INDEX_NAME, *([overlay] if overlay else [])}
    if odd := sorted(want ^ files):
        return f"the manifest {'lacks' if odd[0] in want else 'lists a stray file,'} {shown(odd[0])}"
    return "" if sorted(noted["links"]) == source.linked(noted["mode"]) else "the manifest has other links than the mode makes"


def _unlike_notes(folder: Path, noted: Mapping[str, Any], source: SourceFolder) -> str:
    """The first file that is not as noted, or that a loader would read besides."""
    links, folders = {*noted["links"]}, {name.rpartition("/")[0] for name in noted["files"] if "/" in name}
    for below in sorted({"/".join(parts[:n]) for parts in (name.split("/") for name in folders) for n in range(1, len(parts) + 1)}):
        if (folder / below).is_symlink():
            return f"{below} is a link"
    for name, entry in noted["files"].items():
        try:
            info = (folder / name).lstat()
        except OSError:
            return f"{name} is missing"
        if not stat.S_ISREG(info.st_mode) or note_of(info) != entry:
            return f"{name} was changed"
        if name in links and (name not in source.files or source.files[name].state[:2] != (info.st_dev, info.st_ino)):
            return f"{name} is no longer the same file as in the source"
    shards = [name for name in sorted(os.listdir(folder)) if name.endswith(SUFFIX) and not name.startswith(".")]
    extra = [name for name in shards if name not in noted["files"]]
    return f"{shown(extra[0])} is not part of it, and a loader would read it" if extra else ""


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
        for top, folders, files in os.walk(self.folder):  # nothing is ever written through a link
            for path in (Path(top) / name for name in (*folders, *files)):
                if path.is_symlink():
                    path.unlink()
        self.save()

    def taken_up(self) -> bool:
        """Whether there is a journal of the same inputs, so that open() goes on from there. Writes nothing."""
        noted = read_object(self.folder / JOURNAL, {"format": _is_count, "inputs": is_text})
        return not self.folder.is_symlink() and (noted.get("format"), noted.get("inputs")) == (FORMAT, self._inputs)

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
        output, previous = self._places.output, self._places.previous
        if os.path.lexists(output) and _is_empty(output):
            for entry in os.listdir(output):  # what interrupted writes left would keep it from being replaced
                (output / entry).unlink()
        elif os.path.lexists(output):
            if found := kept_problems(self._places):
                raise JobFailure(*found)
            if os.path.lexists(previous):
                remove_ours(previous)
            output.rename(previous)
        self.folder.rename(self._places.output)
        fsync_dir(self._places.output.parent)


def kept_problems(places: Places) -> list[Problem]:
    """Why the previous output cannot be deleted, which a new one needs when there is one now."""
    previous = places.previous
    if not os.path.lexists(previous) or _is_empty(previous) or not os.path.lexists(places.output) or _is_empty(places.output):
        return []
    remedy = f"move it away, then run again: {places.output} is kept as {previous.name} when it is replaced"
    noted = read_object(previous / MANIFEST, {"name": is_text, "files": lambda v: isinstance(v, dict)})
    if noted.get("name", places.output.name) != places.output.name:
        evidence = f"{previous} is the hybrid {noted['name']!r}, and not an older {places.output.name!r}: it is not deleted"
        return [problem("previous_not_ours", evidence, remedy)]
    if strangers := _strangers(previous):
        evidence = f"{previous} has files that its manifest does not list, so that it is not deleted: {some(strangers)}"
        return [problem("previous_not_ours", evidence, remedy)]
    return []


def _strangers(folder: Path) -> list[str]:
    """What lies in a finished folder and was neither listed nor left there by this collection. All of an unfinished one is ours."""
    if (folder / JOURNAL).exists() or not (folder / MANIFEST).exists():
        return []
    found: list[str] = []
    listed = read_object(folder / MANIFEST, {"files": lambda v: isinstance(v, dict)}).get("files", {}).keys()
    parents = {"/".join(name.split("/")[:n]) for name in listed for n in range(1, name.count("/") + 1)}
    for top, folders, files in os.walk(folder):
        at = Path(top).relative_to(folder)
        folders[:] = [name for name in folders if not is_own((at / name).as_posix())]
        found += [name for name in ((at / f).as_posix() for f in folders) if name not in parents]
        found += [name for name in ((at / f).as_posix() for f in files) if name not in listed and not is_own(name)]
    return sorted(found)


def remove_ours(folder: Path) -> None:
    """Delete a folder of this module. Its manifest or journal goes last, so that an interrupted deletion can be taken up again."""
    if not is_ours(folder) and not _is_empty(folder):
        evidence = f"{folder} was not made by this module (no sound {MANIFEST} in it)"
        raise JobFailure(problem("output_not_ours", evidence, "move it away or choose another output: it is not deleted"))
    if strangers := _strangers(folder):
        evidence = f"{folder} has files that its manifest does not list, so that it is not deleted: {some(strangers)}"
        raise JobFailure(problem("output_not_ours", evidence, "move them away, then run again"))
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


def output_failure(error: OSError, output: Path) -> JobFailure:
    """What an error of writing the output means."""
    where = f"{error.filename or output}: {error.strerror or error}"
    if error.errno == errno.ENAMETOOLONG:
        return JobFailure(problem("bad_output", where, "choose an output whose name and path are shorter"))
    if error.errno == errno.EFBIG:
        remedy = "lift the limit of the process (ulimit -f), or put output on a file system that takes larger files (FAT takes 4 GB)"
        return JobFailure(problem("file_too_big", where, remedy))
    return dest_failure(error, output)
