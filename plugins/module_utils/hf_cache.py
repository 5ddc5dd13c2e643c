# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A cache of the hub's own tools as a source: models--ORG--NAME with snapshots/<commit>/<file>, which are links into blobs.

A blob is called by its digest: 64 hexadecimal digits are the SHA-256 of an LFS object, 40 are the SHA-1 of a git blob. So such a cache
needs no SHA256SUMS. It is never written. A blob may itself be a link, into a store that several repositories share.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from .jobs import JobFailure
from .problems import Problem, problem
from .sources import HEX40, HEX64, MAX_LIST_BYTES, SUMS, Promise

WHOLE = "complete it with the tool that made it (hf download REPO --revision COMMIT), or choose another source (checkpoint_source)"
MOST_NAMED = 8


def find(source: str, repo: str) -> Path | None:
    """The repository's folder of the cache that `source` is: itself, the cache's root, the folder above that, or a snapshot in it.

    None for a folder that is no cache, or one with SHA256SUMS, which says by itself what is in it.
    """
    folder = Path(source)
    if (folder / SUMS).exists():
        return None
    if _is_repository(folder):
        return folder
    if folder.parent.name == "snapshots" and _is_repository(folder.parent.parent):
        return folder.parent.parent
    name = f"models--{repo.replace('/', '--')}"
    return next((f for f in (folder / name, folder / "hub" / name) if _is_repository(f)), None)


def _is_repository(folder: Path) -> bool:
    return folder.name.startswith("models--") and (folder / "snapshots").is_dir()


def repositories(source: str) -> list[str]:
    """The models that a cache's root (or the folder above it) has; [] for a folder that is no cache."""
    found = {path.name for at in ("", "hub") for path in Path(source, at).glob("models--*") if _is_repository(path)}
    return [name.removeprefix("models--").replace("--", "/") for name in sorted(found)][:MOST_NAMED]


def resolve(cache: Path, source: str, repo: str, asked: str) -> str:
    """The commit of the snapshot that is meant; JobFailure when that is not clear. asked: a commit, or the name of a branch or tag."""
    if cache.name != f"models--{repo.replace('/', '--')}":
        evidence = f"{cache} is the cache of {cache.name.removeprefix('models--').replace('--', '/')}, wanted is {repo}"
        raise JobFailure(problem("wrong_revision", evidence, "give the cache of the wanted repository, or the cache's root"))
    there = sorted(f.name for f in (cache / "snapshots").iterdir() if f.is_dir() and HEX40.fullmatch(f.name))
    listed = ", ".join(there) or "none"
    if HEX40.fullmatch(asked):
        if asked in there:
            return asked
        evidence = f"{cache / 'snapshots'} has no {asked}; it has: {listed}"
        raise JobFailure(problem("revision_not_found", evidence, f"bring that commit to the cache, or pin one that it has; {WHOLE}"))
    if Path(source).parent == cache / "snapshots" and Path(source).name in there:
        return Path(source).name
    if named := _ref(cache, asked):
        if named in there:
            return named
        evidence = f"{cache / 'refs' / asked} names {named}, which is not there; {cache / 'snapshots'} has: {listed}"
        raise JobFailure(problem("revision_not_found", evidence, f"pin a commit that the cache has, or {WHOLE}"))
    if len(there) == 1:  # refs may be absent: a download of a pinned commit writes none
        return there[0]
    evidence = f"{cache / 'snapshots'} has {len(there)} snapshots and nothing says which is {asked!r}: {listed}"
    raise JobFailure(problem("revision_not_found", evidence, "pin the commit (checkpoint_revision)" if there else WHOLE))


def _ref(cache: Path, asked: str) -> str:
    if not re.fullmatch(r"[\w./-]{1,200}", asked) or ".." in asked:
        return ""
    with suppress(OSError, UnicodeDecodeError):
        text = (cache / "refs" / asked).read_text().strip()
        return text if HEX40.fullmatch(text) else ""
    return ""


def unfinished(cache: Path) -> list[tuple[str, int]]:
    """Downloads into the cache that were broken off: (path, bytes)."""
    found = []
    for path in sorted((cache / "blobs").glob("*.incomplete")):
        with suppress(OSError):
            found.append((str(path), path.lstat().st_size))
    return found


def promises(cache: Path, commit: str, names: list[str], kept: Callable[[str], bool]) -> dict[str, Promise]:
    """What each file of a snapshot must be, by its blob's name. kept: not left out by a pattern. JobFailure with all that is wrong."""
    snapshot = cache / "snapshots" / commit
    files: dict[str, Promise] = {}
    wrong: list[Problem] = []
    for name in filter(kept, names):
        found = _promise(snapshot / name)
        if isinstance(found, Promise):
            files[name] = found
        else:
            wrong.append(found)
    if lacking := _lacking(snapshot, files, kept):
        broken = unfinished(cache)
        some = ", ".join(f"{Path(p).name} ({size} bytes)" for p, size in broken[:MOST_NAMED])
        more = f"; unfinished downloads in {cache / 'blobs'}: {some}" if broken else ""
        shown = ", ".join(lacking[:MOST_NAMED]) + (f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else "")
        wrong.append(problem("source_incomplete", f"{snapshot} lacks {shown}{more}", WHOLE))
    if wrong:
        raise JobFailure(*wrong)
    return files


def _promise(path: Path) -> Promise | Problem:
    if not path.is_symlink():
        evidence = f"{path} is not a link into blobs, so that nothing tells its digest"
        remedy = f"write {SUMS} in the snapshot's folder and give that folder as the source: sha256sum * > {SUMS}"
        return problem("no_digest", evidence, remedy)
    target = Path(os.readlink(path))
    blob = target.name
    if blob.endswith(".incomplete"):
        return problem("source_incomplete", f"{path} links to {target}, a download that was broken off", WHOLE)
    if target.parent.name != "blobs" or not (HEX64.fullmatch(blob) or HEX40.fullmatch(blob)):
        evidence = f"{path} links to {target}, which is not a blob called by its digest"
        return problem("no_digest", evidence, f"write {SUMS} in the snapshot's folder and give that folder as the source")
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return problem("source_incomplete", f"{path} links to {target}, which is not there", WHOLE)
    except OSError as error:
        return problem("source_unreadable", f"{path}: {error.strerror or error}", "mend the source's disk, mount or rights")
    return Promise(size, blob, "") if len(blob) == 64 else Promise(size, "", blob)


def _lacking(snapshot: Path, files: dict[str, Promise], kept: Callable[[str], bool]) -> list[str]:
    """Files without which it is no checkpoint: a cache may hold a part of a repository, and nothing in it says so."""
    lacking = ["config.json"] if "config.json" not in files and kept("config.json") else []
    indexes = [name for name in files if name.endswith(".safetensors.index.json")]
    for index in indexes:
        at = index.rpartition("/")[0]
        shards = _shards(snapshot / index)
        lacking += [name for shard in shards if (name := f"{at}/{shard}" if at else shard) not in files and kept(name)]
    listed = {(index.rpartition("/")[0], shard) for index in indexes for shard in _shards(snapshot / index)}
    loose = [name for name in files if (name.rpartition("/")[0], name.rpartition("/")[2]) not in listed]  # of others the index tells
    lacking += [name for name in _gaps(loose) if name not in lacking and name not in files and kept(name)]
    if not indexes and not any(name.endswith(".safetensors") for name in files) and unfinished(snapshot.parent.parent):
        lacking.append("its weights")
    return lacking


def _gaps(names: Iterable[str]) -> list[str]:
    """Names that numbered sets lack: of model-00001-of-00003.safetensors and -00003- it is -00002-."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if match := re.fullmatch(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.\w+)", name):
            sets.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    return [
        f"{stem}-{n:05}-of-{total}{end}"
        for (stem, total, end), have in sorted(sets.items())
        for n in range(1, int(total) + 1)
        if n not in have
    ]


def _shards(index: Path) -> list[str]:
    """Files that an index names; [] when it cannot be read, which a later look at the index reports in full."""
    with suppress(OSError, ValueError, RecursionError):
        if index.stat().st_size <= MAX_LIST_BYTES * 4:
            found = json.loads(index.read_text())
            named = found.get("weight_map") if isinstance(found, dict) else None
            return sorted({str(v) for v in named.values()}) if isinstance(named, dict) else []
    return []
