# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Builds a hybrid checkpoint: the donor's tensors first, then the shards, the index and the manifest, then one rename.

Every step can be interrupted at any point. What is on disk is in a journal, and the next run goes on behind it.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import hybrid_check
from .donor import Donor, DonorShard, ShardState
from .files import atomic_write, file_sha256, fsync_dir, write_json
from .hybrid import (
    NEEDS,
    SCALE,
    DonorTensor,
    Piece,
    donor_order,
    header_bytes,
    index_document,
    overlay_name,
    runs,
    shard_pieces,
)
from .hybrid_folder import (
    FORMAT,
    LOCK_WAIT_S,
    MANIFEST,
    Building,
    Places,
    complete,
    kept_problems,
    locked,
    note_of,
    output_failure,
    space_problems,
)
from .hybrid_plan import (
    COUNTS,
    PLAN,
    counts_of,
    identify,
    kept_plan,
    link_problems,
    no_links,
    open_donor,
    output_bytes,
    plan,
    spec_problems,
)
from .hybrid_source import SourceFile, SourceFolder, look_at, open_source_file, read_source, state_of
from .jobs import JobFailure, Progress, fitting, is_number, is_text, work_on
from .problems import problem
from .range_copy import Copier, Flusher, Pending, Truncated
from .safetensors_compare import Report
from .safetensors_header import BadFile, Header, read_header
from .safetensors_index import INDEX_NAME, Checkpoint, index_text
from .snapshot_space import RESERVE_BYTES
from .sources import OWN_PREFIX, SOCKET_TIMEOUT_S

JOURNAL_BYTES = 256 << 20  # written between two updates of the journal
_RESUME = "run the same command again"

# Other file systems and mounts; file systems without hard links; files that have as many as there can be.
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}

Sleep = Callable[[float], None]


def build(spec: dict[str, Any], progress: Progress, sleep: Sleep = time.sleep) -> dict[str, Any]:
    """Make the output complete. Returns what it did: manifest, before, after, read, written, seconds, resumed, notes.

    spec: mode (materialize, overlay), source, output, donor_repo, donor_revision, donor_source, and what a donor on the hub needs;
    optional: expect, verify (stamps, full), reserve_bytes, lock_wait_s.
    """
    try:
        return _build(spec, progress, sleep)
    except BadFile as bad:
        raise JobFailure(*bad.problems) from bad
    except OSError as error:
        raise output_failure(error, Path(spec["output"])) from error


def _build(spec: dict[str, Any], progress: Progress, sleep: Sleep) -> dict[str, Any]:
    began = time.monotonic()
    if wrong := spec_problems(spec):
        raise JobFailure(*wrong)
    places = Places(Path(spec["output"]))

    def say(note: str) -> None:
        print(note, flush=True)
        progress.alive(note)

    with locked(places, say, spec.get("lock_wait_s", LOCK_WAIT_S)):
        source = look_at(Path(spec["source"]))
        inputs = identify(spec, source)
        manifest, why = complete(places.output, inputs, source, spec.get("expect"))
        read = 0
        if manifest and spec.get("verify") == "full":
            why, read = hybrid_check.damage(places.output, manifest, source, progress)
        if manifest and not why:
            none = {"before": "", "after": "", "written": 0, "resumed": 0, "notes": []}
            return {**none, "manifest": manifest, "read": read, "seconds": _since(began)}
        work = _Work(spec, places, source, inputs, progress, say, sleep)
        manifest = work.run()
        after = f"complete: yes\nmode: {spec['mode']}\nFP8 weights: {manifest['replaced']}\n"
        return {
            "manifest": manifest,
            "before": f"complete: no ({why})\n",
            "after": after,
            "read": read + work.bytes_read,
            "written": work.bytes_written,
            "seconds": _since(began),
            "resumed": work.resumed,
            "notes": work.notes,
        }


def _since(began: float) -> float:
    return round(time.monotonic() - began, 3)


def is_report(result: dict[str, Any]) -> bool:
    """Whether a job's result is one that work() returns."""
    counts = dict.fromkeys(COUNTS, lambda v: type(v) is int)
    fields = {
        **dict.fromkeys(("read", "written", "seconds", "resumed"), is_number),
        **dict.fromkeys(("before", "after"), is_text),
        "notes": lambda v: isinstance(v, list) and all(map(is_text, v)),
        "manifest": lambda v: fitting(v, counts) and counts.keys() <= v.keys(),
    }
    return fields.keys() <= result.keys() and fitting(result, fields)


# --- the work --------------------------------------------------------------------------------------------------------------------


class _Work:
    """One build. bytes_read, bytes_written: what it read and wrote itself; resumed: bytes that earlier runs had written.

    notes: what a person should know of it.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        places: Places,
        source: SourceFolder,
        inputs: str,
        progress: Progress,
        say: Callable[[str], None],
        sleep: Sleep,
    ) -> None:
        self._spec, self._places, self._source, self._inputs = spec, places, source, inputs
        self._progress, self._say, self._sleep = progress, say, sleep
        self._building = Building(places, inputs)
        self._copier = Copier(progress.add)
        self._flusher = Flusher()
        self._unsaved = 0
        self.bytes_read = self.bytes_written = self.resumed = 0
        self.notes: list[str] = []

    def run(self) -> dict[str, Any]:
        """From whatever is there to the published folder. Returns its manifest."""
        wrong = kept_problems(self._places)
        if self._spec["mode"] == "overlay":
            wrong += link_problems(self._places, self._source)
        if wrong:
            raise JobFailure(*wrong)
        manifest, _ = complete(self._places.building, self._inputs, self._source, self._spec.get("expect"))
        if manifest is None:
            checkpoint, report = read_source(self._source)
            self._building.open()
            manifest = self._make(checkpoint, report)
        self._building.publish()
        return manifest

    def _make(self, checkpoint: Checkpoint, report: Report) -> dict[str, Any]:
        overlay = self._links() if self._spec["mode"] == "overlay" else ""  # first: it tells whether there can be links at all
        order, facts, state, shard = self._donor_part(checkpoint, report)
        donor = read_header(shard.path)
        if self._building.donor != state.sha256:  # files that were made with other bytes of the donor
            self._building.donor = state.sha256
            self._building.forget()
        try:
            if overlay:
                (self._building.folder / overlay).unlink(missing_ok=True)
                # A second name: until the end the donor shard is what an interrupted run goes on with.
                os.link(shard.path, self._building.folder / overlay)
            self._files(checkpoint, donor, shard.path)
            # Headers are looked at while the disk still writes.
            names = {*self._source.kept, *([overlay] if overlay else []), INDEX_NAME}
            index = self._index(checkpoint, report, donor, overlay)
            self._remove_strays(names)
            self._check(checkpoint, report, donor, overlay)
            self._flusher.finish()
            self._building.save()
        except Exception:  # a full disk, for one: what was written whole need not be written again
            self._flusher.salvage()
            with suppress(OSError):
                self._building.save()
            raise
        finally:
            self._flusher.abandon()
        self._unchanged()
        self.bytes_read += self._copier.read
        self.bytes_written += self._copier.written
        return self._finish(sorted(names), order, facts, state, overlay, index)

    # --- the donor's tensors

    def _donor_part(
        self, checkpoint: Checkpoint, report: Report
    ) -> tuple[list[tuple[str, DonorTensor]], dict[str, Any], ShardState, DonorShard]:
        """The donor shard: an earlier run's, or fetched now."""
        folder = self._building.folder
        if kept := kept_plan(folder, self._spec.get("expect")):
            order, facts = kept
            shard = DonorShard(folder, order, facts["files"], self._say)
            if state := shard.kept():
                self.bytes_read += shard.read
                self.resumed += shard.size
                return order, facts, state, shard
        with open_donor(self._spec, self._say) as (source, commit):
            fetched = self._fetch(checkpoint, report, Donor(source, self._say, self._sleep), commit)
            self.notes += getattr(source, "notes", [])
        return fetched

    def _fetch(
        self, checkpoint: Checkpoint, report: Report, donor: Donor, commit: str
    ) -> tuple[list[tuple[str, DonorTensor]], dict[str, Any], ShardState, DonorShard]:
        """Headers, choice, and what is missing of the shard."""
        folder = self._building.folder
        found = donor.survey(self._progress)
        choice = plan(checkpoint, report, found, self._spec.get("expect"))
        self.notes += [f"{warning['evidence']}; {warning['remedy']}" for warning in choice.warnings]
        order = donor_order(choice)
        facts: dict[str, Any] = {
            "files": {name: found.files[name] for name in sorted({tensor.file for _, tensor in order})},
            "commit": commit,
            "expect": choice.expect,
            **counts_of(choice),
        }
        shard = DonorShard(folder, order, facts["files"], self._say)
        self._check_space(shard)
        write_json(folder / PLAN, {"order": [[name, *tensor] for name, tensor in order], **facts})
        state = shard.fill(donor, self._progress)
        self.bytes_read += donor.read + shard.read
        self.bytes_written += shard.written
        return order, facts, state, shard

    def _check_space(self, shard: DonorShard) -> None:
        have = sum(entry["size"] for name, entry in self._building.files.items() if self._building.has(name))
        have += shard.path.lstat().st_size if shard.path.is_file() else 0
        missing = max(0, output_bytes(self._spec["mode"], self._source, shard.size) - have)
        if found := space_problems(self._places, missing, self._spec.get("reserve_bytes", RESERVE_BYTES)):
            raise JobFailure(*found)

    # --- files

    def _files(self, checkpoint: Checkpoint, donor: Header, shard: Path) -> None:
        """Every file of the source that is copied or rewritten."""
        links = {*self._source.linked(self._spec["mode"])}
        names = [name for name in self._source.kept if name not in links]
        self._progress.stage("files" if links else "shards", sum(self._source.files[name].size for name in names), "B")
        done = 0
        with shard.open("rb", buffering=0) as stream:
            for name in names:
                file = self._source.files[name]
                self._progress.at(done)
                if self._building.has(name):
                    self.resumed += self._building.files[name]["size"]
                else:
                    header = checkpoint.headers.get(name)
                    pieces = shard_pieces(header, donor) if header and not donor.tensors.keys().isdisjoint(header.tensors) else None
                    self._write(name, file, pieces, header.metadata if header else {}, stream.fileno())
                done += file.size
        self._progress.at(done)

    def _write(self, name: str, file: SourceFile, pieces: list[Piece] | None, metadata: dict[str, str], donor: int) -> None:
        """One file of the output. pieces: None for a plain copy."""
        target = self._building.folder / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        self._building.files.pop(name, None)
        out = -1
        try:
            with open_source_file(file.path) as stream:
                info = os.fstat(stream.fileno())
                if state_of(info) != file.state:
                    raise self._source_changed(name)
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                target.unlink(missing_ok=True)
                out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, info.st_mode & 0o644 | 0o400)
                size = self._fill(stream.fileno(), out, file, pieces, metadata, donor)
                if state_of(os.fstat(stream.fileno())) != file.state:
                    raise self._source_changed(name)
        except BaseException as error:
            if out >= 0:
                os.close(out)
            if isinstance(error, Truncated):
                raise self._source_changed(name) from error
            if isinstance(error, OSError):
                error.filename = error.filename or f"{file.path} to {target}"
                target.unlink(missing_ok=True)  # half a file is of no use, and the journal needs a little room
            raise
        self._flusher.add(Pending(target, out, size, lambda info: self._on_disk(name, info)))

    def _fill(self, source: int, out: int, file: SourceFile, pieces: list[Piece] | None, metadata: dict[str, str], donor: int) -> int:
        """Write an open file; returns its size in bytes."""
        if pieces is None:
            self._copier.copy(source, 0, out, 0, file.size)
            return file.size
        head = header_bytes(pieces, metadata)
        self._copier.write(out, head, 0)
        at = len(head)
        for run in runs(pieces):
            self._copier.copy(donor if run.donor else source, run.at, out, at, run.length)
            at += run.length
        return at

    def _on_disk(self, name: str, info: os.stat_result) -> None:
        """A file has been flushed."""
        self._building.files[name] = note_of(info)
        self._unsaved += info.st_size
        if self._unsaved >= JOURNAL_BYTES:
            self._unsaved = 0
            self._building.save()

    # --- overlay

    def _links(self) -> str:
        """Hard links to the source's shards. Returns a name for the donor's that loaders read last."""
        name = overlay_name([n for n in self._source.kept if "/" not in n])
        if not name:
            evidence = f"no file name sorts behind {max(self._source.kept)!r} for every loader"
            raise JobFailure(problem("overlay_name", evidence, "rename that file of the source, or use mode materialize"))
        names = self._source.linked("overlay")
        self._progress.stage("links", len(names), "files")
        for each in names:
            self._link(each)
            self._progress.add(1)
        return name

    def _link(self, name: str) -> None:
        file, target = self._source.files[name], self._building.folder / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        real = os.path.realpath(file.path)  # a link to a link would be one, into a folder that the container does not see
        if os.path.lexists(target):
            if state_of(target.lstat()) == file.state:
                return
            target.unlink()
        try:
            os.link(real, target)
        except FileNotFoundError as error:
            raise self._source_changed(name) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise JobFailure(no_links(self._source.folder, self._places.output, real, error.strerror or str(error))) from error
        if state_of(target.lstat()) != file.state:
            raise self._source_changed(name)

    # --- index, check, manifest

    def _index(self, checkpoint: Checkpoint, report: Report, donor: Header, overlay: str) -> str:
        """Write the index, never through a link. Returns its SHA-256. The check compares it with the headers that were written."""
        total = report.total_size
        owner = dict(report.owner)
        for name, tensor in donor.tensors.items():
            if name in report.owner:
                total -= checkpoint.headers[report.owner[name]].tensors[name].nbytes
            owner[name] = overlay or report.owner[name.removesuffix(SCALE)]
            total += tensor.nbytes
        path = self._building.folder / INDEX_NAME
        text = index_text(index_document(checkpoint.index, owner, total))
        atomic_write(path, text)
        self.bytes_written += len(text.encode())
        return file_sha256(path)

    def _check(self, checkpoint: Checkpoint, report: Report, donor: Header, overlay: str) -> None:
        self._progress.stage("check", len(checkpoint.headers), "files")
        wrong, read = hybrid_check.output_problems(self._building.folder, checkpoint, report, donor, overlay)
        self.bytes_read += read
        self._progress.at(len(checkpoint.headers))
        if wrong:
            self._unchanged()  # a changed source explains everything
            self._flusher.abandon()
            self._building.forget()  # what was built is not to be trusted: the next run makes all of it again
            raise JobFailure(*wrong)

    def _unchanged(self) -> None:
        """The source must still be what the output was made of."""
        now = look_at(self._source.folder)
        before, after = self._source.files, now.files
        changed = [name for name in before if name not in after or before[name].state != after[name].state]
        changed += [name for name in after if name not in before]
        if changed:
            raise self._source_changed(*changed)

    def _source_changed(self, *names: str) -> JobFailure:
        evidence = f"{self._source.folder}: {', '.join(names[:5])} changed while the hybrid was built"
        return JobFailure(problem("source_changed", evidence, f"leave the source alone, then {_RESUME}: what fits is kept"))

    def _remove_strays(self, wanted: set[str]) -> None:
        """Files of the building folder that are not part of the output: what an interrupted write left."""
        for top, _, files in os.walk(self._building.folder):
            for file in files:
                name = (Path(top) / file).relative_to(self._building.folder).as_posix()
                if name not in wanted and not name.startswith(OWN_PREFIX):
                    (self._building.folder / name).unlink()

    def _finish(
        self, names: list[str], order: list[tuple[str, DonorTensor]], facts: dict[str, Any], state: ShardState, overlay: str, index: str
    ) -> dict[str, Any]:
        """The manifest, last of all files."""
        folder, taken = self._building.folder, facts["files"]
        files = {name: note_of((folder / name).lstat()) for name in names}
        donor = {"repo": self._spec["donor_repo"], "revision": self._spec["donor_revision"], "commit": facts["commit"]}
        manifest = {
            "format": FORMAT,
            "name": self._places.output.name,
            "mode": self._spec["mode"],
            "inputs": self._inputs,
            "expect": facts["expect"],
            "needs": NEEDS[self._spec["mode"]],
            "source": {"folder": str(self._source.folder), **(self._source.snapshot or {})},
            "donor": {
                **donor,
                "files": {name: {"size": file["size"], "digest": file["digest"]} for name, file in taken.items()},
                "bytes": state.size,
                "sha256": state.sha256,
                "tensors": [name for name, _ in order],
            },
            **{name: facts[name] for name in COUNTS},
            "overlay": overlay,
            "index": {"name": INDEX_NAME, "sha256": index},
            "links": self._source.linked(self._spec["mode"]),
            "bytes": sum(entry["size"] for entry in files.values()),
            "files": files,
        }
        for top, _, _ in os.walk(folder):
            fsync_dir(Path(top))
        write_json(folder / MANIFEST, manifest)
        return manifest


def work(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """As build(), with the manifest's numbers alone: a result must fit into the room that is held for it on a full disk."""
    report = build(spec, progress)
    return {**report, "manifest": {name: report["manifest"][name] for name in COUNTS}}


def main() -> int:
    """The worker's start: python3 worker.zip JOB_FOLDER."""
    socket.setdefaulttimeout(SOCKET_TIMEOUT_S)
    return work_on(Path(sys.argv[1]), work)
