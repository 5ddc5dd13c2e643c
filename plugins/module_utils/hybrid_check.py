# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whether a built hybrid is what it should be: by its headers before it is published, and byte by byte when that is asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import file_sha256
from .hybrid import Piece, header_bytes
from .hybrid_source import SourceFile, SourceFolder, open_source_file, source_unreadable
from .jobs import JobFailure, Progress
from .problems import Problem, errors, problem
from .safetensors_compare import Report, compare
from .safetensors_header import BadFile, Header, read_header, shown, some
from .safetensors_index import INDEX_NAME, SUFFIX, Checkpoint, read_checkpoint

READ = 1 << 20
_FAULT = "the folder was not published; run again, and report it as a fault of the collection if it repeats"


def output_problems(folder: Path, source: Checkpoint, report: Report, donor: Header, overlay: str) -> tuple[list[Problem], int]:
    """What is wrong with a finished folder, from its headers alone, and how many bytes were read.

    source, report: what the output was made of; donor: the donor shard; overlay: the file that has its tensors, beside the source's.
    """
    found = read_checkpoint(folder, INDEX_NAME)
    after = compare(found, last_wins=bool(overlay))
    wrong = errors(after.problems)
    read = sum(header.data_start for header in found.headers.values())
    added = donor.tensors.keys() - report.owner.keys()
    lost, stray = report.owner.keys() - after.owner.keys(), after.owner.keys() - report.owner.keys() - added
    for what, names in (("lost", lost), ("stray", stray)):
        if names:
            evidence = f"{len(names)} tensors {what} in the output: {some(sorted(names))}"
            wrong.append(problem(f"hybrid_{what}_tensor", evidence, _FAULT))
    other = []
    for name, file in after.owner.items():
        have = found.headers[file].tensors[name]
        if name in stray:
            continue
        want = donor.tensors[name] if name in donor.tensors else source.headers[report.owner[name]].tensors[name]
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            other.append(f"{shown(name)} is {have.dtype} {list(have.shape)}, not {want.dtype} {list(want.shape)}")
        elif overlay and (file == overlay) != (name in donor.tensors):
            other.append(f"{shown(name)} is taken from {file}")
    if other:
        wrong.append(problem("hybrid_wrong_tensor", f"tensors that are not as planned: {some(other, quote=False)}", _FAULT))
    if after.mended is not None and not wrong:
        wrong.append(problem("hybrid_wrong_index", "the index that was written is not what the headers call for", _FAULT))
    return wrong, read


# --- byte by byte ----------------------------------------------------------------------------------------------------------------


def damage(folder: Path, manifest: Mapping[str, Any], source: SourceFolder, progress: Progress) -> tuple[str, int]:
    """The first fault of a complete output, '' for none; and the bytes that were read.

    What came from the source is compared with it; the donor's tensors are hashed in the order in which they were fetched. Where output
    and source differ, the snapshot's SHA-256 tells which of them is right. JobFailure when that is the output, or nobody knows: a build
    from such a source would replace what may be good.
    """
    links, index, overlay = set(manifest["links"]), manifest["index"], manifest["overlay"]
    progress.stage("verify", manifest["bytes"], "B")
    reader = _Reader(progress)
    faults = []
    if file_sha256(folder / index["name"]) != index["sha256"]:
        faults.append(f"{index['name']} is not the index that was written")
    taken: dict[str, tuple[Path, Header]] = {}
    differing: dict[str, str] = {}
    for name in manifest["files"]:
        if name == index["name"] or name in links:
            continue
        header = _header(folder / name) if "/" not in name else None
        rewritten = header and [tensor for tensor in manifest["donor"]["tensors"] if tensor in header.tensors]
        if header and rewritten:
            taken.update(dict.fromkeys(rewritten, (folder / name, header)))
        if name == overlay:
            continue
        if why := _difference(folder / name, source.files[name], header if rewritten else None, taken, reader):
            differing[name] = why
    if _donor_sha256(manifest["donor"]["tensors"], taken, reader) != manifest["donor"]["sha256"]:
        faults.append("the FP8 tensors are not what was fetched from the donor")
    if wrong := _source_problems(source, differing, manifest["links"], reader):
        raise JobFailure(*wrong)
    faults = [*(f"{name}: {why}" for name, why in differing.items()), *faults]
    return faults[0] if faults else "", reader.read


def _source_problems(source: SourceFolder, differing: Mapping[str, str], links: Sequence[str], reader: _Reader) -> list[Problem]:
    """Files of the source that a snapshot's SHA-256 finds damaged, and those that differ from the output and have none."""
    damaged, doubtful = [], []
    for name in (*differing, *links):
        sha256, path = source.sums.get(name), source.files[name].path
        if sha256 is None and name in differing:
            doubtful.append(f"{name} ({differing[name]})")
            continue
        hasher = hashlib.sha256()
        with open_source_file(path) as stream:
            reader.into(hasher, stream.fileno(), 0, source.files[name].size, path)  # a link without a sum: only whether it can be read
        if sha256 and hasher.hexdigest() != sha256:
            damaged.append(f"{name} has SHA-256 {hasher.hexdigest()}, its snapshot says {sha256}")
    found = []
    if damaged:
        evidence = f"{source.folder}: bytes changed after they were verified, sizes and times did not: {some(damaged, quote=False)}"
        remedy = "run hf_snapshot with verify=full (the checkpoint role), which brings these files again; the output was left as it is"
        found.append(problem("source_damaged", evidence, remedy))
    if doubtful:
        evidence = f"output and source {source.folder} differ, and no SHA-256 tells which of them is right: {some(doubtful, quote=False)}"
        remedy = "compare the source with its origin; if it is right, delete the output and run again; nothing was changed"
        found.append(problem("source_differs", evidence, remedy))
    return found


class _Reader:
    """Reads without leaving anything in the page cache. read: bytes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.read = 0

    def equal(self, one: int, one_at: int, other: int, other_at: int, length: int, source: Path) -> bool:
        """Whether two ranges of open files are equal. source: the other's path."""
        while length:
            a, b = self._some(one, one_at, length), self._some(other, other_at, length, source)
            if not a or a != b:
                return False
            one_at, other_at, length = one_at + len(a), other_at + len(b), length - len(a)
            self._progress.add(len(a))
        return True

    def into(self, hasher: Any, descriptor: int, at: int, length: int, source: Path | None = None) -> None:
        """Hash a range, as much of it as there is. source: the path of a file of the source."""
        while length and (chunk := self._some(descriptor, at, length, source)):
            hasher.update(chunk)
            at, length = at + len(chunk), length - len(chunk)
            self._progress.add(len(chunk))

    def _some(self, descriptor: int, at: int, length: int, source: Path | None = None) -> bytes:
        try:
            data = os.pread(descriptor, min(READ, length), at)
        except OSError as error:
            if source:
                raise source_unreadable(source, error) from error
            raise
        os.posix_fadvise(descriptor, at, len(data), os.POSIX_FADV_DONTNEED)
        self.read += len(data)
        return data


def _header(path: Path) -> Header | None:
    """The header of a shard; None for any other file."""
    if not path.name.endswith(SUFFIX):
        return None
    try:
        return read_header(path)
    except BadFile:
        return None  # not one of the checkpoint's: compared as a whole


def _difference(path: Path, original: SourceFile, header: Header | None, taken: Mapping[str, Any], reader: _Reader) -> str:
    """How a file differs from the source's. header: of a shard that was rewritten, of which the donor's tensors are left out."""
    with path.open("rb", buffering=0) as have, open_source_file(original.path) as want:
        one, other = have.fileno(), want.fileno()
        if header is None:
            size = os.fstat(one).st_size
            same = size == os.fstat(other).st_size and reader.equal(one, 0, other, 0, size, original.path)
            return "" if same else "differs from the source's"
        before = read_header(original.path)
        for name, tensor in before.tensors.items():
            new = header.tensors.get(name)
            if new is None:
                return f"{shown(name)} is missing"
            start, at = header.data_start + new.start, before.data_start + tensor.start
            if name not in taken and not (new[:2] == tensor[:2] and reader.equal(one, start, other, at, tensor.nbytes, original.path)):
                return f"{shown(name)} differs from the source's"
    return ""


def _donor_sha256(names: Sequence[str], taken: Mapping[str, tuple[Path, Header]], reader: _Reader) -> str:
    """The SHA-256 that the donor shard had, from its tensors where they are now."""
    if missing := [name for name in names if name not in taken]:
        return f"without {missing[0]}"
    entries = [(name, *taken[name]) for name in names]
    pieces = [Piece(name, *header.tensors[name][:2], header.tensors[name].nbytes, True, 0) for name, _, header in entries]
    hasher = hashlib.sha256(header_bytes(pieces, {}))
    for name, path, header in entries:
        with path.open("rb", buffering=0) as stream:
            reader.into(hasher, stream.fileno(), header.data_start + header.tensors[name].start, header.tensors[name].nbytes)
    return hasher.hexdigest()
