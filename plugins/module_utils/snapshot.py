# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A pinned set of files in a folder: from the hub, a cache of it, a folder, a web server or another node; resumed, verified, and complete
only when its manifest says so.

What pins it: the commit, of the hub or a cache of it, which promise each file's digest; the SHA-256 of SHA256SUMS, of a folder or mirror;
the SHA-256 of the manifest, of another node that has the snapshot.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import hf_cache, hub_venv
from .jobs import JobFailure, Progress, is_text, work_on
from .problems import Problem, problem
from .snapshot_fetch import Fetch, Fetched, Meter
from .snapshot_files import (
    HUB_TOOLS,
    HUB_TOOLS_PARTS,
    MOST_NAMED,
    Book,
    Digests,
    Known,
    Notes,
    Request,
    Wanted,
    foreign,
    in_the_way,
    is_note,
    known,
    linked,
    note,
    other_repo,
    part_name,
    plan,
    size_of,
    stale_parts,
)
from .snapshot_lock import locked
from .snapshot_space import Need, check_space, needs_of, place_failure
from .snapshot_way import Way, branch_note
from .sources import CHUNK, MANIFEST, SOCKET_TIMEOUT_S, Promise, source_kind

# Problems of a single file; others of the same list may have them, too, and all of them are told.
OF_ONE_FILE = {"source_incomplete", "source_damaged", "not_found", "file_not_found"}


# --- what has to be done ---------------------------------------------------------------------------------------------------------


def survey(dest: Path, request: Request, mutable: Sequence[str], way: Way) -> tuple[Known, Wanted, dict[str, str]]:
    """What is noted, what is wanted, and why each file that is not right is not; nothing is read but lists."""
    noted = known(dest)
    if found := other_repo(dest, noted, request.repo):
        raise JobFailure(*found)
    manifest = noted.of(request)
    if manifest:  # the source may be gone by now, and need not be asked
        wanted = Wanted(manifest.revision, manifest.sums_sha256, manifest.promises(), manifest.ignore_patterns)
    else:
        wanted = way.wanted(noted.resolved(request))
    same = noted.same(request) and noted.head["revision"] == wanted.revision
    return noted, wanted, plan(dest, wanted.files, mutable, noted, same)


def missing_bytes(
    dest: Path,
    files: Mapping[str, Promise],
    names: Sequence[str],
    size: Callable[[str], int | None],
    sizes: dict[str, int] | None = None,
) -> tuple[int, int | None]:
    """Bytes still to come, and the size of these files (None when it is not told of all). JobFailure with all that are missing.

    sizes: gets what is told of each.
    """
    still, total, unknown = 0, 0, False
    gone: list[Problem] = []
    for name in names:
        try:
            whole = files[name].size if files[name].size is not None else size(name)
        except JobFailure as failure:
            if not {found["class"] for found in failure.problems} <= OF_ONE_FILE:
                raise
            gone += failure.problems
            continue
        if whole is None:
            unknown = True
            continue
        if sizes is not None:
            sizes[name] = whole
        part = size_of(dest / part_name(name, files[name]))
        total += whole
        still += whole - part if part <= whole else whole
    if gone:
        raise JobFailure(*gone)
    return still, None if unknown else total


def space_needed(dest: Path, still: int, wanted: Wanted, known_size: int | None, spec: Mapping[str, Any]) -> list[Problem]:
    """Whether the rest of the snapshot fits, and what else the module was told of."""
    needs = [Need(dest, still, "what is missing of the snapshot"), *needs_of(spec.get("space") or [], known_size)]
    left = [(str(p), size_of(p)) for p in _stale(dest, wanted, known(dest).files)]
    cache = hf_cache.find(spec["source"], spec["repo"]) if source_kind(spec["source"]) == "folder" else None
    return check_space(needs, left + (hf_cache.unfinished(cache) if cache else []))


def _stale(dest: Path, wanted: Wanted, noted: Notes) -> list[Path]:
    return stale_parts(dest, wanted.files, [part_name(name, promise) for name, promise in wanted.files.items()], noted)


def difference(todo: Mapping[str, str], removed: Sequence[str], files: Mapping[str, Promise]) -> tuple[str, str]:
    """What changes, as texts before and after: one line for each file."""
    before = [f"{name}: {state}" for name, state in todo.items()] + [f"{name}: left over" for name in removed]
    after = [f"{name}: {files[name].digest[:12]}" for name in todo]
    return "\n".join(["complete: no", *before, ""]), "\n".join(["complete: yes", *after, ""])


# --- the work --------------------------------------------------------------------------------------------------------------------


def bring(spec: dict[str, Any], progress: Progress, sleep: Callable[[float], None] = time.sleep) -> dict[str, Any]:
    """The worker: the destination becomes the pinned snapshot. Returns what it did."""
    dest, guard = Path(spec["dest"]), threading.Lock()

    def say(text: str) -> None:
        print(text, flush=True)
        with guard:
            progress.alive(text)

    request = Request(spec["repo"], spec["revision"], spec["pin"], spec["manifest_sha256"], spec["ignore_patterns"])
    mine = False
    try:
        mine = not dest.exists()
        dest.mkdir(parents=True, exist_ok=True, mode=0o755)
        with locked(dest, float(spec["stall_timeout_s"]), say), Way(request, spec, say, sleep=sleep) as way:
            result = _bring(spec, request, way, Meter(progress, guard), sleep)
            result["notes"] = [*filter(None, [branch_note(request, result["revision"])]), *way.notes]
    except OSError as error:
        raise place_failure(error, dest, Path((spec.get("hub") or {}).get("state_dir") or dest)) from error
    except JobFailure:
        if mine:
            with suppress(OSError):
                dest.rmdir()  # only when nothing has come into it
        raise
    if spec.get("hub") and not spec["hub"]["client_python"]:
        with suppress(OSError):
            hub_venv.clean(Path(spec["hub"]["state_dir"]), spec["hub"]["client_requirements"])
    return result


def _bring(spec: dict[str, Any], request: Request, way: Way, meter: Meter, sleep: Callable[[float], None]) -> dict[str, Any]:
    dest, mutable = Path(spec["dest"]), list(spec["mutable"])
    meter.stage("prepare", message="asking what is to be brought")
    noted, wanted, todo = survey(dest, request, mutable, way)
    good, todo = _verified(dest, noted, wanted, todo, mutable, spec["verify"] == "full", meter)
    if blocked := [*foreign(dest, noted, todo), *in_the_way(dest, {name: wanted.files[name] for name in todo})]:
        raise JobFailure(*blocked)  # nothing has been changed, and nothing noted: the folder stays whose it was
    leavers = [name for name in noted.files if name not in wanted.files and not linked(dest, name)]
    whole = noted.of(request) is not None
    if whole and not todo and not leavers and noted.same(request) and good == noted.files:
        return _report(good, hashlib.sha256(noted.raw).hexdigest(), wanted, 0, ("", ""))
    book = Book(dest, request.repo, request.revision, spec["source"], wanted)
    book.unfinished(good)
    resumed = 0 if whole else sum(size_of(dest / name) for name in good)
    if todo:
        resumed += _fetch(spec, wanted, todo, good, book, way, meter, sleep)
    made = book.manifest(good)
    if gone := plan(dest, made.promises(), mutable, Known(good, {}, None, b""), True):
        shown = ", ".join(f"{name} ({state})" for name, state in list(gone.items())[:MOST_NAMED])
        remedy = "find out what removes or changes files there, then run again: it brings what is missing"
        raise JobFailure(problem("dest_vanished", f"{dest}: files that were right have gone or changed meanwhile: {shown}", remedy))
    stale = _stale(dest, wanted, noted.files)
    _tidy(dest, [*(dest / name for name in leavers), *stale])
    if wanted.manifest and made.raw() != wanted.manifest:
        evidence = f"{dest / MANIFEST} would not be byte for byte the one that {spec['source']} shares"
        raise JobFailure(problem("wrong_revision", evidence, "use the same release of the collection for both nodes"))
    book.finished(good)
    removed = [*leavers, *(p.relative_to(dest).as_posix() for p in stale)]
    return _report(good, made.sha256, wanted, resumed, difference(todo, removed, wanted.files))


def _report(good: Notes, manifest_sha256: str, wanted: Wanted, resumed: int, texts: tuple[str, str]) -> dict[str, Any]:
    told = {"files": good, "resumed_bytes": resumed, "before": texts[0], "after": texts[1]}
    return told | {"revision": wanted.revision, "sums_sha256": wanted.sums_sha256, "manifest_sha256": manifest_sha256}


def is_report(result: dict[str, Any]) -> bool:
    """Whether a job's result is one that bring() returns."""
    files, notes = result.get("files"), result.get("notes")
    sane = isinstance(files, dict) and all(map(is_note, files.values())) and type(result.get("resumed_bytes")) is int
    texts = all(is_text(result.get(name)) for name in ("before", "after", "revision", "sums_sha256", "manifest_sha256"))
    return sane and texts and isinstance(notes, list) and all(map(is_text, notes))


def _verified(
    dest: Path, noted: Known, wanted: Wanted, todo: dict[str, str], mutable: Sequence[str], full: bool, meter: Meter
) -> tuple[Notes, dict[str, str]]:
    """Notes of the files that are right, some only after a look at their bytes, and what is still to be brought."""
    good = {n: noted.files[n] for n in wanted.files if n in noted.files and n not in todo}
    doubtful = {n: s for n, s in todo.items() if s in {"unverified", "changed"}}
    if full:
        doubtful |= {n: "damaged" for n in good if n not in mutable}
    if doubtful:
        meter.stage("verify", sum(size_of(dest / n) for n in doubtful), "B")
    for name, state in doubtful.items():
        sha256 = _read_again(dest / name, name, wanted.files[name], meter)
        if sha256:
            good[name] = note(dest, name, sha256)
            todo.pop(name, None)
        else:
            good.pop(name, None)
            todo[name] = state
    return good, todo


def _read_again(path: Path, name: str, promise: Promise, meter: Meter) -> str:
    """The SHA-256 of a file that is as promised; '' when it is not."""
    with path.open("rb", buffering=0) as stream:
        digests = Digests(promise, os.fstat(stream.fileno()).st_size)
        while chunk := stream.read(CHUNK):
            digests.update(chunk)
            meter.at(name, digests.size)
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return "" if digests.wrong() else digests.sha256


def _fetch(
    spec: dict[str, Any],
    wanted: Wanted,
    todo: dict[str, str],
    good: Notes,
    book: Book,
    way: Way,
    meter: Meter,
    sleep: Callable[[float], None],
) -> int:
    """Bring the files of todo into `good`; returns how many of their bytes were there already."""
    dest, source = Path(spec["dest"]), way.source(wanted.revision)
    sizes: dict[str, int] = {}
    still, total = missing_bytes(dest, wanted.files, list(todo), way.size, sizes)
    whole = None if total is None else total + sum(int(entry["size"]) for entry in good.values())
    if found := space_needed(dest, still, wanted, whole, spec):
        raise JobFailure(*found)
    meter.stage("download" if way.kind in {"hub", "url"} else "copy", total, "B")
    fetch, resumed = Fetch(source, dest, meter, sleep, sizes), 0
    for name, why in todo.items():
        print(f"{name}: {why}", flush=True)

    def done(name: str, got: Fetched) -> None:
        nonlocal resumed
        good[name] = note(dest, name, got.sha256)
        book.grown(good)
        resumed += got.resumed

    # Small files first: what is wrong with a whole repository shows on them.
    order = sorted(todo, key=lambda name: (wanted.files[name].size or 0, name))
    workers = int(spec["workers"]) if way.kind in {"hub", "url"} else 1
    try:
        fetch.files([(name, wanted.files[name]) for name in order], workers, done)
    except BaseException:
        with suppress(OSError):  # a full disk, or a folder that is gone: that is told already
            book.unfinished(good)
        raise
    return resumed


def _tidy(dest: Path, paths: Sequence[Path]) -> None:
    """Remove files that are left over, folders that are empty then, and what the hub's own tools noted here."""
    for path in paths:
        path.unlink(missing_ok=True)
    tools = dest / HUB_TOOLS
    if not linked(dest, f"{HUB_TOOLS_PARTS}/x") and (dest / HUB_TOOLS_PARTS).is_dir():
        shutil.rmtree(dest / HUB_TOOLS_PARTS, ignore_errors=True)
        for name in (".gitignore", "CACHEDIR.TAG"):  # a cache or a token beside them is not of a download into this folder
            with suppress(OSError):
                (tools / name).unlink()
    for folder in sorted({p for path in [*paths, tools / "x"] for p in path.parents if dest in p.parents}, reverse=True):
        with suppress(OSError):
            folder.rmdir()


def main() -> int:
    """The worker's start: python3 worker.zip JOB_FOLDER."""
    socket.setdefaulttimeout(SOCKET_TIMEOUT_S)
    return work_on(Path(sys.argv[1]), bring)
