# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whether everything that a checkpoint needs will fit, asked before the first byte: one sum for each file system, with its parts."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jobs import JobFailure
from .problems import Problem, problem

RESERVE_BYTES = 1 << 30  # what stays free on each file system


@dataclass(frozen=True)
class Need:
    """Bytes that will be written below a path. what: for whom, in words."""

    path: Path
    bytes: int
    what: str


def gb(count: float) -> str:
    """12345678901 -> '12.35 GB'."""
    return f"{count / 1e9:.2f} GB"


def existing(path: Path) -> Path:
    """The path itself or its nearest folder that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def mount_point(path: Path) -> Path:
    """The file system that a folder is on, by its mount point."""
    path = path.resolve()
    while not path.is_mount() and path != path.parent:
        path = path.parent
    return path


def needs_of(entries: Sequence[Mapping[str, Any]], snapshot_bytes: int | None) -> list[Need]:
    """From the module's `space`: fixed bytes and multiples of the snapshot's size, which counts only as far as it is known."""
    found = []
    for entry in entries:
        count = int(entry.get("bytes") or 0) + int(float(entry.get("snapshots") or 0) * (snapshot_bytes or 0))
        if count > 0:
            found.append(Need(Path(entry["path"]), count, str(entry.get("what") or entry["path"])))
    return found


def space_problems(file_system: str, needs: Sequence[Need], have: int, left_over: Sequence[tuple[str, int]] = ()) -> list[Problem]:
    """Whether the needs of one file system fit, with the reserve. left_over: files that lie there for nothing, and their bytes."""
    need = sum(n.bytes for n in needs) + RESERVE_BYTES
    if need <= have:
        return []
    parts = " + ".join([f"{gb(n.bytes)} for {n.what} ({n.path})" for n in needs] + [f"{gb(RESERVE_BYTES)} that stay free"])
    remedy = f"free {gb(need - have)} there, or put the checkpoint on another file system (checkpoint_dir)"
    if left_over:
        shown = ", ".join(f"{path} ({gb(size)})" for path, size in sorted(left_over, key=lambda entry: -entry[1])[:20])
        remedy += f"; these are left over from transfers that ended: {shown}"
    return [problem("disk_full", f"{file_system}: {parts} = {gb(need)}; free are {gb(have)}", remedy)]


def check_space(needs: Sequence[Need], left_over: Sequence[tuple[str, int]] = ()) -> list[Problem]:
    """space_problems of every file system concerned, with this node's figures."""
    groups: dict[int, list[Need]] = {}
    for need in needs:
        groups.setdefault(existing(need.path).stat().st_dev, []).append(need)
    found = []
    for device, mine in groups.items():
        at = existing(mine[0].path)
        there = [(path, size) for path, size in left_over if _device(path) == device]
        found += space_problems(str(mount_point(at)), mine, shutil.disk_usage(at).free, there)
    return found


def _device(path: str) -> int:
    try:
        return os.lstat(path).st_dev
    except OSError:
        return -1


def place_failure(error: OSError, dest: Path, state_dir: Path) -> JobFailure:
    """What an error of writing means, by the place that it is of: the destination, or the collection's own folder."""
    at = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else dest
    in_state = at.is_relative_to(state_dir) and not at.is_relative_to(dest) and (at == state_dir or not dest.is_relative_to(at))
    if error.errno in {errno.ENOSPC, errno.EDQUOT} or not in_state:
        return dest_failure(error, dest)
    evidence = f"{at}: {error.strerror or error}; it belongs to the state folder {state_dir}"
    remedy = "make the state folder (vllm_state_dir) a folder that root can write, on a disk of the node, or choose another one"
    return JobFailure(problem("state_dir_unusable", evidence, remedy))


def dest_failure(error: OSError, dest: Path) -> JobFailure:
    """What an error of writing the destination means. A full disk may show on any file, also a small one."""
    where = f"{error.filename or dest}: {error.strerror or error}"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        at = existing(Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else dest)
        evidence = f"{where} (file system {mount_point(at)}, free {gb(shutil.disk_usage(at).free)})"
        return JobFailure(problem("disk_full", evidence, "free space there, then run the same command again: it resumes"))
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP}:
        return JobFailure(problem("dest_not_writable", where, "make the destination a writable folder, or choose another (checkpoint_dir)"))
    if error.errno == errno.ENAMETOOLONG:
        remedy = "choose a destination with a shorter path (checkpoint_dir): a file system takes 255 bytes a name and 4095 a path"
        return JobFailure(problem("dest_name_too_long", where, remedy))
    if error.errno in {errno.ENOENT, errno.ESTALE, errno.ENOTCONN}:
        evidence = f"{where}: the destination, or something in it, went away while it was filled, or leads to nothing"
        remedy = "mount or make the folder, let nothing else remove files there, then run again: it brings what is missing"
        return JobFailure(problem("dest_vanished", evidence, remedy))
    remedy = "see the node's kernel log (journalctl -k) for disk errors; then run again: it resumes"
    return JobFailure(problem("dest_failed", where, remedy))
