# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A checkpoint's index against the headers of its shards, in both directions, and the one index that is right.

Loaders trust the index: what it does not list is dropped in silence, and a shard that it lists is often not missed when it is gone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .problems import Problem, errors, problem
from .safetensors_header import (
    BadFile,
    Header,
    counted,
    json_type,
    lfs_pointer,
    open_regular,
    parse_json,
    read_header,
    shown,
    shown_value,
    some,
)
from .safetensors_quant import quantisation_problems

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"

_MAX_JSON_BYTES = 100_000_000
_FETCH_INDEX = "Download the index again, or delete it and run this module with state=present: it is then made from the shards' headers."
_PRESENT = "Run this module with state=present: it writes the index that the shards' headers call for."
# Files that lie beside a checkpoint without being part of it: the same weights in Mistral's own format, and adapters.
_FOREIGN = re.compile(r"(consolidated|adapter_).*\.safetensors")
_NUMBERED = re.compile(r"(?P<prefix>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,5})\.safetensors")
# Where the language model's layers are; a vision tower's layers have other names in front.
_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d{1,9})\.")


@dataclass(frozen=True)
class Index:
    """An index that can be read. weight_map: tensor to file, sound entries only; odd: tensors of the other entries."""

    weight_map: dict[str, str]
    odd: frozenset[str]
    metadata: dict[str, Any]
    document: dict[str, Any]


@dataclass
class Checkpoint:
    """What lies in a folder. headers, damaged: by file name; problems: of the index and of config.json themselves."""

    index_name: str = INDEX_NAME
    index_exists: bool = False
    index: Index | None = None
    headers: dict[str, Header] = field(default_factory=dict)
    damaged: dict[str, list[Problem]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


@dataclass
class Report:
    """What a comparison found. Problems of `mendable` have exactly one right answer, which is `mended`."""

    owner: dict[str, str] = field(default_factory=dict)
    total_size: int = 0
    missing_shards: list[str] = field(default_factory=list)
    unlisted_tensors: list[str] = field(default_factory=list)
    unlisted_files: dict[str, int] = field(default_factory=dict)
    duplicates: dict[str, list[str]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    corrected: dict[str, tuple[str, str]] = field(default_factory=dict)
    mtp_tensors: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    mendable: list[Problem] = field(default_factory=list)
    mended: dict[str, Any] | None = None


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
        evidence = f"{folder} cannot be read as a folder: {failure.strerror or failure}"
        raise BadFile(problem("folder_unreadable", evidence, "Give the folder of a downloaded checkpoint as path.")) from failure
    found = Checkpoint(index_name, index_name in entries)
    if found.index_exists:
        try:
            found.index, faults = parse_index(_small_file(folder / index_name, "index", _FETCH_INDEX), index_name)
            found.problems += faults
        except BadFile as bad:
            found.problems += bad.problems
    if "config.json" in entries:
        found.config = _read_config(folder, found.problems)
    for name in _shard_names(entries, found):
        try:
            found.headers[name] = read_header(folder / name)
        except BadFile as bad:
            found.damaged[name] = bad.problems
    return found


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


def _small_file(path: Path, prefix: str, remedy: str) -> bytes:
    """A JSON file's bytes."""
    with open_regular(path, prefix, remedy) as stream:
        try:
            raw = stream.read(_MAX_JSON_BYTES + 1)
        except OSError as failure:
            evidence = f"{path.name} cannot be read: {failure.strerror or failure}"
            raise BadFile(problem(f"{prefix}_unreadable", evidence, remedy)) from failure
    if len(raw) > _MAX_JSON_BYTES:
        raise BadFile(problem(f"{prefix}_too_large", f"{path.name} has more than {_MAX_JSON_BYTES} bytes", remedy))
    return raw


def _read_config(folder: Path, problems: list[Problem]) -> dict[str, Any]:
    """config.json as an object; {} with a warning when it is not one."""
    remedy = "Download config.json again: without it nobody knows whether the checkpoint should have MTP layers."
    try:
        config, _ = parse_json(_small_file(folder / "config.json", "config", remedy))
    except BadFile as bad:
        problems += [{**fault, "severity": "warning"} for fault in bad.problems]
        return {}
    except ValueError as fault:
        problems.append(problem("config_not_json", f"config.json is {fault}", remedy, "warning"))
        return {}
    if not isinstance(config, dict):
        problems.append(problem("config_not_object", f"config.json is not an object but {json_type(config)}", remedy, "warning"))
        return {}
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


# -------------------------------------------------------------------------------------------------------------- comparing


def compare(found: Checkpoint, require_mtp: bool = False) -> Report:
    """All that is wrong with a checkpoint, and its mended index when that is certain. Reads no files."""
    report = Report(problems=list(found.problems))
    for name in sorted(found.damaged):
        report.problems += found.damaged[name]
    _find_owners(found, report)
    if found.index:
        _compare_index(found, found.index, report)
    elif not found.index_exists:
        _without_index(found, report)
    if not found.headers and not found.damaged and not report.missing_shards:
        remedy = "Download the checkpoint, in safetensors format, or correct the path."
        report.problems.append(problem("no_shards", f"there is no *{SUFFIX} file in the folder", remedy))
    _check_metadata(found, report)
    report.mtp_tensors = mtp_names(report.owner, found.config)
    if found.index or not found.damaged:
        _check_mtp(found, report, require_mtp)
        tensors = {tensor: found.headers[file].tensors[tensor] for tensor, file in report.owner.items()}
        # Tensors of shards that cannot be read are not to be missed a second time.
        unread = found.index.weight_map.keys() - tensors.keys() if found.index else set()
        report.problems += quantisation_problems(tensors, unread, found.config, set(report.mtp_tensors))
    if not errors(report.problems):
        report.mended = _mended(found, report)
    return report


def _find_owners(found: Checkpoint, report: Report) -> None:
    """Which file has which tensor; where several have it, the index' choice is kept for counting only."""
    weight_map: Mapping[str, str] = found.index.weight_map if found.index else {}
    for file, header in found.headers.items():
        for tensor, entry in header.tensors.items():
            if tensor not in report.owner:
                report.owner[tensor] = file
                report.total_size += entry.nbytes
                continue
            report.duplicates.setdefault(tensor, [report.owner[tensor]]).append(file)
    for tensor, files in report.duplicates.items():
        if weight_map.get(tensor) in files:
            report.total_size -= found.headers[report.owner[tensor]].tensors[tensor].nbytes
            report.owner[tensor] = weight_map[tensor]
            report.total_size += found.headers[report.owner[tensor]].tensors[tensor].nbytes
    if report.duplicates:
        entries = [
            f"{shown(tensor)} in {' and '.join(map(shown, files))} (the index names {shown(weight_map.get(tensor, 'none of them'))})"
            for tensor, files in report.duplicates.items()
        ]
        evidence = f"{counted(len(entries), 'tensor')} in more than one file: {some(entries, quote=False)}"
        remedy = "Loaders let the last file win. Find out which one is right (is the other left over from an older split or build?)"
        remedy += " and move the other away."
        report.problems.append(problem("duplicate_tensor", evidence, remedy))


def _compare_index(found: Checkpoint, index: Index, report: Report) -> None:
    """Index to disk, then disk to index."""
    absent: dict[str, list[str]] = {}
    for tensor, file in index.weight_map.items():
        header = found.headers.get(file)
        if header is None:
            if file not in found.damaged:
                absent.setdefault(file, []).append(tensor)
        elif tensor in header.tensors or tensor in report.duplicates:
            continue
        elif tensor in report.owner:
            report.corrected[tensor] = (file, report.owner[tensor])
        else:
            report.lost.append(tensor)
    report.missing_shards = sorted(absent)
    if absent:
        report.problems.append(_absent_shards(found.index_name, absent, report.owner))
    if report.lost:
        entries = [f"{shown(tensor)} (not in {shown(index.weight_map[tensor])})" for tensor in report.lost]
        evidence = f"{counted(len(entries), 'tensor')} listed in {found.index_name} whose file is present, but the header there lacks it"
        evidence += f", and so do all other files that can be read: {some(entries, quote=False)}"
        remedy = "The weights are lost or the shard is of another revision: download the named files again, all of one revision."
        report.problems.append(problem("lost_tensor", evidence, remedy))
    listed = set(index.weight_map.values())
    for file, header in found.headers.items():
        new = [name for name in header.tensors if name not in index.weight_map and name not in index.odd and name not in report.duplicates]
        if file not in listed:
            report.unlisted_files[file] = len(new)
        else:
            report.unlisted_tensors += new
    _note_mendable(found, index, report)


def _absent_shards(index_name: str, absent: Mapping[str, list[str]], owner: Mapping[str, str]) -> Problem:
    entries = [f"{shown(file)} ({counted(len(absent[file]), 'tensor')}, such as {shown(absent[file][0])})" for file in sorted(absent)]
    evidence = f"{index_name} lists {counted(len(absent), 'file')} not in the folder: {some(entries, quote=False)}"
    remedy = "The download is incomplete: run the checkpoint role again, it resumes."
    elsewhere = all(tensor in owner for tensors in absent.values() for tensor in tensors)
    if elsewhere:
        evidence += "; all their tensors are in other files"
        remedy = "The index does not belong to these shards (renamed or split anew?): delete it and run this module with state=present."
    return problem("missing_shard", evidence, remedy)


def _note_mendable(found: Checkpoint, index: Index, report: Report) -> None:
    name = found.index_name
    if report.unlisted_tensors:
        text = some([f"{shown(tensor)} in {shown(report.owner[tensor])}" for tensor in report.unlisted_tensors], quote=False)
        evidence = f"{counted(len(report.unlisted_tensors), 'tensor')} of listed files not in {name}: {text}"
        report.mendable.append(problem("unlisted_tensor", evidence, f"Loaders ignore them. {_PRESENT}"))
    files = [f"{shown(file)} ({counted(count, 'tensor')})" for file, count in report.unlisted_files.items() if count]
    if files:
        evidence = f"{counted(len(files), 'file')} not in {name}: {some(files, quote=False)}"
        report.mendable.append(problem("unlisted_file", evidence, f"Loaders ignore them. {_PRESENT}"))
    if report.corrected:
        text = some([f"{shown(tensor)} is in {new}, not in {old}" for tensor, (old, new) in report.corrected.items()], quote=False)
        evidence = f"entries of {name} that name the wrong file ({len(report.corrected)}): {text}"
        report.mendable.append(problem("wrong_owner", evidence, _PRESENT))
    if _wrong_total(index, report.total_size):
        value = shown_value(index.metadata["total_size"])
        evidence = f"{name}: total_size is {value}, the tensors have {report.total_size} bytes"
        report.mendable.append(problem("wrong_total_size", evidence, f"Harmless to loaders. {_PRESENT}", "warning"))


def _wrong_total(index: Index, total_size: int) -> bool:
    """Whether total_size is given and wrong. That it is missing alone is no reason to rewrite an index."""
    value = index.metadata.get("total_size", total_size)
    return type(value) is not int or value != total_size


def _without_index(found: Checkpoint, report: Report) -> None:
    """No index: nothing names the shards but their numbers. A checkpoint in one file needs no index."""
    files = sorted([*found.headers, *found.damaged])
    report.missing_shards = missing_numbers(files)
    if report.missing_shards:
        evidence = f"there is no {found.index_name}, and by the others' numbers these files are missing: {some(report.missing_shards)}"
        remedy = "The download is incomplete: run the checkpoint role again, it resumes."
        report.problems.append(problem("missing_shard", evidence, remedy))
    if len(files) > 1 and report.owner:
        evidence = f"there are {len(files)} shards and no {found.index_name}"
        report.mendable.append(problem("missing_index", evidence, _PRESENT))


def missing_numbers(files: Iterable[str]) -> list[str]:
    """Files that NAME-00002-of-00003 names promise, counted from 1 or from 0, and that are not among `files`."""
    sets: dict[tuple[str, str, int], set[int]] = {}
    for file in files:
        if match := _NUMBERED.fullmatch(file):
            key = (match["prefix"], match["total"], len(match["number"]))
            sets.setdefault(key, set()).add(int(match["number"]))
    missing = []
    for (prefix, total, width), numbers in sets.items():
        first = 0 if 0 in numbers else 1
        expected = range(first, first + int(total))
        missing += [f"{prefix}-{number:0{width}d}-of-{total}{SUFFIX}" for number in expected if number not in numbers]
    return sorted(missing)


def _check_metadata(found: Checkpoint, report: Report) -> None:
    unnamed = [file for file, header in found.headers.items() if header.metadata.get("format") != "pt"]
    if unnamed:
        evidence = f"{counted(len(unnamed), 'file')} without format=pt in the metadata: {some(unnamed)}"
        remedy = "vLLM loads them, Transformers may refuse them: whoever rewrites a shard must keep its metadata."
        report.problems.append(problem("format_missing", evidence, remedy, "warning"))
    empty = [file for file, header in found.headers.items() if not header.tensors]
    if empty:
        remedy = "Remove them, or find out what became of their tensors."
        report.problems.append(problem("no_tensors", f"files without any tensor: {some(empty)}", remedy, "warning"))


def promised_mtp_layers(config: Mapping[str, Any]) -> tuple[str, int]:
    """Where config.json promises multi-token prediction layers, and how many; ('', 0) when it does not."""
    parts = [("", config), ("text_config.", config.get("text_config"))]
    for prefix, part in parts:
        for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
            count = part.get(key) if isinstance(part, Mapping) else None
            if type(count) is int and count > 0:
                return prefix + key, count
    return "", 0


def mtp_names(tensors: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Tensors of the multi-token prediction layers: by name, or as the layers after the last one (DeepSeek, GLM)."""
    key, promised = promised_mtp_layers(config)
    part = config["text_config"] if key.startswith("text_config.") else config
    last = part.get("num_hidden_layers")
    after = range(last, last + promised) if type(last) is int and key.endswith("num_nextn_predict_layers") else range(0)

    def is_mtp(tensor: str) -> bool:
        name = tensor.lower()
        if ".mtp" in name or name.startswith("mtp") or "nextn" in name:
            return True
        layer = _LAYER.match(tensor) if after else None
        return layer is not None and int(layer[1]) in after

    return [tensor for tensor in tensors if is_mtp(tensor)]


def _check_mtp(found: Checkpoint, report: Report, require_mtp: bool) -> None:
    key, count = promised_mtp_layers(found.config)
    if report.mtp_tensors or not (key or require_mtp):
        return
    if found.index and mtp_names(found.index.weight_map, found.config):
        return  # listed, but in files that are missing or damaged, or lost: said already
    wanted = f"config.json promises {counted(count, 'MTP layer')} ({key})" if key else "MTP tensors are required"
    searched = f"{counted(len(report.owner), 'tensor')} in {counted(len(found.headers), 'file')}"
    evidence = f"{wanted}, but none of the {searched} is one of MTP (mtp.*, nextn)"
    remedy = "The checkpoint was saved without its MTP layer: take one that has it, or serve without speculative decoding."
    report.problems.append(problem("mtp_missing", evidence, remedy, "error" if require_mtp else "warning"))


# ---------------------------------------------------------------------------------------------------------------- mending


def _mended(found: Checkpoint, report: Report) -> dict[str, Any] | None:
    """The index to write; None when none is needed. Without errors each tensor has one owner, so there is one right map."""
    if found.index is None:
        if len(found.headers) < 2 or not report.owner:
            return None
        rest: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
    else:
        if found.index.weight_map == report.owner and not _wrong_total(found.index, report.total_size):
            return None
        rest = {key: value for key, value in found.index.document.items() if key not in ("metadata", "weight_map")}
        metadata = found.index.metadata
    return {**rest, "metadata": {**metadata, "total_size": report.total_size}, "weight_map": dict(sorted(report.owner.items()))}


def index_text(document: Mapping[str, Any]) -> str:
    """An index as the Hugging Face tools write it."""
    return json.dumps(document, indent=2) + "\n"


def difference(found: Checkpoint, report: Report) -> tuple[str, str]:
    """Index before and after as short texts: counts and the first names, for a person."""
    if report.mended is None:
        return "", ""
    before: dict[str, str] = found.index.weight_map if found.index else {}
    total = shown_value(found.index.metadata.get("total_size")) if found.index else "null"
    old = [f"tensors: {len(before)}", f"files: {len(set(before.values()))}", f"total_size: {total}"] if found.index else []
    new = [f"tensors: {len(report.owner)}", f"files: {len(set(report.owner.values()))}", f"total_size: {report.total_size}"]
    added = [f"{shown(tensor)}: {file}" for tensor, file in report.owner.items() if tensor not in before]
    if report.corrected:
        old += _first("wrong", [f"{shown(tensor)}: {was}" for tensor, (was, _) in report.corrected.items()])
        new += _first("corrected", [f"{shown(tensor)}: {file}" for tensor, (_, file) in report.corrected.items()])
    if added:
        new += _first("added", added)
    return "".join(f"{line}\n" for line in old), "".join(f"{line}\n" for line in new)


def _first(title: str, lines: list[str], limit: int = 10) -> list[str]:
    rest = [f"  and {len(lines) - limit} more"] if len(lines) > limit else []
    return [f"{title}: {len(lines)}", *(f"  {line}" for line in lines[:limit]), *rest]
