# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The source of a hybrid: its files, what identifies it, and what keeps a hybrid from being made of it. Never written to."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from .jobs import JobFailure
from .problems import Problem, errors, problem
from .safetensors_compare import Report, compare
from .safetensors_header import BadFile, Tensor, shown, some
from .safetensors_index import INDEX_NAME, SUFFIX, Checkpoint, read_checkpoint
from .snapshot_files import Notes, known
from .sources import MANIFEST as SNAPSHOT
from .sources import OWN_PREFIX

_NOT_OURS = {".cache", ".git", ".huggingface"}  # what download tools keep beside the files, often as large again
_HASHED_HEADER_BYTES = 100_000_000


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
    sums: dict[str, str] = field(default_factory=dict)  # SHA-256 by name, of a snapshot
    problems: list[Problem] = field(default_factory=list)

    @property
    def kept(self) -> list[str]:
        """The files that an output has too, sorted: all but the index, which is made anew."""
        return [name for name in sorted(self.files) if name != self.index_name]

    def linked(self, mode: str) -> list[str]:
        """Those of them that an output of this mode has as hard links, sorted. What a person may edit is copied."""
        return [name for name in self.kept if name.endswith(SUFFIX)] if mode == "overlay" else []


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
        _walk(folder, "", files, problems)
        indexes = [name for name in files if "/" not in name and name.endswith(f"{SUFFIX}.index.json") and not is_foreign(name)]
        index_name = indexes[0] if len(indexes) == 1 else INDEX_NAME
        found = SourceFolder(folder, files, index_name, None, problems=problems)
        _identify(found)
    except OSError as error:
        evidence = f"{error.filename or folder}: {error.strerror or error}"
        raise JobFailure(problem("source_unreadable", evidence, "mend the source's disk, mount or rights, then run again")) from error
    return found


def is_foreign(name: str) -> bool:
    """Whether a file lies beside a checkpoint without being part of it: Mistral's own format, or an adapter."""
    return name.startswith(("consolidated.", "consolidated-", "adapter_"))


def _walk(folder: Path, below: str, files: dict[str, SourceFile], problems: list[Problem]) -> None:
    """All files below, linked files as what they point to, without what tools keep for themselves."""
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
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            problems.append(problem("source_incomplete", f"{path} is a link to itself", "complete the source"))
            continue
        if stat.S_ISDIR(info.st_mode) and path.is_symlink():
            # Followed, it could bring in anything: other folders of the disk, this one once more, private files.
            evidence = f"{path} is a link to the folder {os.readlink(path)!r}"
            problems.append(
                problem("source_linked_folder", evidence, "remove the link, or put the folder itself there: it is not followed")
            )
        elif stat.S_ISDIR(info.st_mode):
            _walk(path, f"{name}/", files, problems)
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
    found.sums = {name: sha256 for name, (_, sha256) in noted.manifest.files.items()}
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
    # The index check can do without config.json; here it says what must be found.
    config = [problem(fault["class"], fault["evidence"], fault["remedy"]) for fault in checkpoint.problems if _of_config(fault)]
    wrong = [*found.problems, *errors([fault for fault in report.problems if not _of_config(fault)]), *config]
    if "config.json" not in found.files:
        wrong.append(problem("config_missing", f"{found.folder} has no config.json", "complete the source"))
    if wrong:
        raise JobFailure(*wrong)
    _slim(checkpoint, report)
    return checkpoint, report


def _of_config(fault: Problem) -> bool:
    return fault["class"].startswith("config_")


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


def open_source_file(path: Path) -> IO[bytes]:
    """For reading. An error here is not one of the disk that is written."""
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise source_unreadable(path, error) from error


def source_unreadable(path: Path, error: OSError) -> JobFailure:
    """The failure of a file of the source that cannot be read."""
    remedy = "mend the source's disk, mount or rights, then run again: it resumes"
    return JobFailure(problem("source_unreadable", f"{path}: {error.strerror or error}", remedy))
