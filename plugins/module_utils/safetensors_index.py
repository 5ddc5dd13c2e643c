# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A checkpoint's folder: its index, its config and the headers of its shards, read; and its index, replaced."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import atomic_write, read_json, read_regular
from .problems import Problem, problem
from .safetensors_header import (
    BadFile,
    Header,
    json_type,
    lfs_pointer,
    nested_deeper,
    open_regular,
    parse_json,
    read_fully,
    read_header,
    shown,
    shown_value,
    some,
)
from .safetensors_links import dangling_links

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
PRISTINE = ".dgxspark-pristine"  # folder, beside the index, of its first original
SNAPSHOT = ".dgxspark-snapshot.json"  # hf_snapshot's manifest: {"files": {name: {"sha256": ...}}}

_MAX_JSON_BYTES = 100_000_000
_MAX_LEVELS = 32  # of nested objects and arrays; an index has 2, the deepest config.json some 10
_FETCH_INDEX = "Download the index again, or delete it and run this module with state=present: it is then made from the shards' headers."
# Files that lie beside a checkpoint without being part of it: the same weights in Mistral's own format, and adapters.
_FOREIGN = re.compile(r"(consolidated|adapter_).*\.safetensors")


@dataclass(frozen=True)
class Index:
    """An index that can be read. weight_map: tensor to file, sound entries only; odd: tensors of the other entries."""

    weight_map: dict[str, str]
    odd: frozenset[str]
    metadata: dict[str, Any]
    document: dict[str, Any]


@dataclass
class Checkpoint:
    """What lies in a folder. headers, damaged: by file name; problems: of the other files themselves; bytes_read: of all files.

    no_config: why `config` says nothing, as "there is no config.json"; "" when it does.
    """

    index_name: str = INDEX_NAME
    index_exists: bool = False
    index: Index | None = None
    headers: dict[str, Header] = field(default_factory=dict)
    damaged: dict[str, list[Problem]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    no_config: str = ""
    problems: list[Problem] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    bytes_read: int = 0

    def count(self, size: int) -> None:
        """Note bytes that were read."""
        self.bytes_read += size


# ---------------------------------------------------------------------------------------------------------------- reading


def is_shard_name(value: Any) -> bool:
    """Whether this is a bare file name that a loader would take: no path, not hidden, nothing unprintable."""
    return (
        isinstance(value, str)
        and value.endswith(SUFFIX)
        and not value.startswith(".")
        and not set(value) & {"/", "\\"}
        and value.isprintable()
    )


def read_checkpoint(folder: Path, index_name: str = INDEX_NAME) -> Checkpoint:
    """Index, config and all headers of a folder. BadFile when the folder itself cannot be read."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError as failure:
        evidence = f"{shown(folder)} cannot be read as a folder: {failure.strerror or failure}"
        raise BadFile(problem("folder_unreadable", evidence, "Give the folder of a downloaded checkpoint as path.")) from failure
    found = Checkpoint(index_name, index_name in entries, entries=[name for name in entries if not name.startswith(".")])
    if found.index_exists:
        try:
            found.index, faults = parse_index(_small_file(folder / index_name, "index", _FETCH_INDEX, found), index_name)
            found.problems += faults
        except BadFile as bad:
            found.problems += bad.problems
    if "config.json" in entries:
        found.config = _read_config(folder, found)
    else:
        found.no_config = "there is no config.json"
    shards = _shard_names(entries, found)
    for name in shards:
        try:
            found.headers[name] = read_header(folder / name, found.count)
        except BadFile as bad:
            found.damaged[name] = bad.problems
    found.problems += _companions(folder, [name for name in found.entries if name not in {index_name, "config.json", *shards}])
    return found


def _companions(folder: Path, names: Iterable[str]) -> list[Problem]:
    """Tokenizer, templates and the like: only whether they are there at all."""
    names = [name for name in names if not name.endswith(SUFFIX)]
    problems = dangling_links(folder, names)
    empty = [name for name in names if name.endswith(".json") and os.path.isfile(folder / name) and not os.path.getsize(folder / name)]
    if empty:
        remedy = "Their download was interrupted: delete them and run the checkpoint role again."
        problems.append(problem("file_empty", f"JSON files of 0 bytes: {some(empty)}", remedy))
    return problems


def _shard_names(entries: Iterable[str], found: Checkpoint) -> list[str]:
    """The files that make up the checkpoint: all *.safetensors, whatever they are called, unless they are known to be something else."""
    files = [name for name in entries if name.endswith(SUFFIX) and not name.startswith(".")]
    unusable = [name for name in files if not is_shard_name(name)]
    if unusable:
        remedy = "Rename or remove them: an index can only name plain, printable file names."
        found.problems.append(problem("bad_file_name", f"file names that no index can hold: {some(unusable)}", remedy))
    listed = set(found.index.weight_map.values()) if found.index else set()
    foreign = [name for name in files if _FOREIGN.fullmatch(name) and name not in listed]
    shards = [name for name in files if name not in foreign and name not in unusable]
    if not shards:
        return [name for name in foreign if name not in unusable]
    if foreign:
        evidence = f"not taken for part of the checkpoint, by their names: {some(foreign)}"
        remedy = "Nothing, if they hold another format or an adapter; else rename them."
        found.problems.append(problem("foreign_file", evidence, remedy, "warning"))
    return shards


def _small_file(path: Path, prefix: str, remedy: str, found: Checkpoint) -> bytes:
    """A JSON file's bytes."""
    with open_regular(path, prefix, remedy) as stream:
        try:
            raw = read_fully(stream, min(os.fstat(stream.fileno()).st_size, _MAX_JSON_BYTES) + 1)
            found.count(len(raw))
        except OSError as failure:
            evidence = f"{shown(path.name)} cannot be read: {failure.strerror or failure}"
            raise BadFile(problem(f"{prefix}_unreadable", evidence, remedy)) from failure
    if len(raw) > _MAX_JSON_BYTES:
        raise BadFile(problem(f"{prefix}_too_large", f"{shown(path.name)} has more than {_MAX_JSON_BYTES} bytes", remedy))
    return raw


def _read_config(folder: Path, found: Checkpoint) -> dict[str, Any]:
    """config.json as an object; {} with a warning when it is not one."""
    problems, found.no_config = found.problems, "config.json cannot be used"
    remedy = "Download config.json again: without it nobody knows whether the checkpoint should have MTP layers."
    try:
        config, _ = parse_json(_small_file(folder / "config.json", "config", remedy, found))
    except BadFile as bad:
        problems += [{**fault, "severity": "warning"} for fault in bad.problems]
        return {}
    except ValueError as fault:
        problems.append(problem("config_not_json", f"config.json is {fault}", remedy, "warning"))
        return {}
    if not isinstance(config, dict):
        problems.append(problem("config_not_object", f"config.json is not an object but {json_type(config)}", remedy, "warning"))
        return {}
    if nested_deeper(config, _MAX_LEVELS):
        problems.append(problem("config_nested", f"config.json is nested deeper than {_MAX_LEVELS} levels", remedy, "warning"))
        return {}
    found.no_config = ""
    return config


def parse_index(raw: bytes, name: str = INDEX_NAME) -> tuple[Index, list[Problem]]:
    """An index from its text, with the problems of single entries. BadFile when there is nothing to be made of it."""
    try:
        document, twice = parse_json(raw)
    except ValueError as fault:
        if pointer := lfs_pointer(raw[:1024], name, len(raw)):
            raise BadFile(pointer) from fault
        begins = "; the file is empty" if not raw else "; it looks like an HTML page" if raw.lstrip().startswith(b"<") else ""
        raise BadFile(problem("index_not_json", f"{name} is {fault}{begins}", _FETCH_INDEX)) from fault
    if not isinstance(document, dict):
        raise BadFile(problem("index_not_object", f"{name} is not a JSON object but {json_type(document)}", _FETCH_INDEX))
    if nested_deeper(document, _MAX_LEVELS):
        # It could not be written again: Python's writer gives up on some depth, and the indentation grows with its square.
        raise BadFile(problem("index_nested", f"{name} is nested deeper than {_MAX_LEVELS} levels; an index has 2", _FETCH_INDEX))
    weight_map, metadata = document.get("weight_map"), document.get("metadata")
    problems: list[Problem] = []
    if twice:
        remedy = f"Only one of the entries can be right, and readers silently take the last. {_FETCH_INDEX}"
        problems.append(problem("index_duplicate_keys", f"{name} has the same key twice: {some(twice)}", remedy))
    if metadata is not None and not isinstance(metadata, dict):
        problems.append(problem("index_bad_metadata", f"{name}: metadata is not an object but {shown_value(metadata)}", _FETCH_INDEX))
        metadata = None
    if not isinstance(weight_map, dict) or not weight_map:
        text = "has no weight_map" if "weight_map" not in document else f"weight_map must be a filled object, is {shown_value(weight_map)}"
        raise BadFile(*problems, problem("index_bad_weight_map", f"{name}: {text}", _FETCH_INDEX))
    usable = {file for file in {value for value in weight_map.values() if isinstance(value, str)} if is_shard_name(file)}
    sound = {tensor: file for tensor, file in weight_map.items() if isinstance(file, str) and file in usable}
    odd = [tensor for tensor in weight_map if tensor not in sound]
    if odd:
        entries = some([f"{shown(tensor)} -> {shown_value(weight_map[tensor])}" for tensor in odd], quote=False)
        remedy = f"Do not load this checkpoint: only a bare file name that ends in {SUFFIX} may stand there. {_FETCH_INDEX}"
        problems.append(problem("index_bad_file_name", f"{name}: entries that do not name a file of the folder: {entries}", remedy))
    return Index(sound, frozenset(odd), metadata or {}, document), problems


# ---------------------------------------------------------------------------------------------------------------- writing


def index_text(document: Mapping[str, Any]) -> str:
    """An index as the Hugging Face tools write it."""
    return json.dumps(document, indent=2) + "\n"


def replace_index(folder: Path, name: str, document: Mapping[str, Any]) -> None:
    """Replace the index by a rename, its mode kept; a link is replaced and its target left alone. OSError when that does not work.

    The index that a download brought is kept in PRISTINE first.
    """
    path = folder / name
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    if path.exists():
        _keep_pristine(folder, name, mode)
    atomic_write(path, index_text(document), mode, keep_owner=True)


def _keep_pristine(folder: Path, name: str, mode: int) -> None:
    """Keep the index as it is now, unless an earlier one is kept.

    That one gives way when the snapshot's manifest has another digest: then a newer snapshot has come since.
    """
    if (folder / PRISTINE).is_symlink():
        raise OSError(errno.ELOOP, f"the folder {PRISTINE} beside it is a link, which is not written through; remove it")
    current = read_regular(folder / name, _MAX_JSON_BYTES)
    if current is None:
        raise OSError(errno.EINVAL, f"there is no file of at most {_MAX_JSON_BYTES} bytes any more")
    kept = folder / PRISTINE / name
    manifest = read_json(folder / SNAPSHOT)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    entry = files.get(name) if isinstance(files, dict) else None
    digest = entry.get("sha256") if isinstance(entry, dict) else None
    earlier = read_regular(kept, _MAX_JSON_BYTES)
    if earlier is None or (hashlib.sha256(current).hexdigest() == digest and hashlib.sha256(earlier).hexdigest() != digest):
        atomic_write(kept, current, mode)
