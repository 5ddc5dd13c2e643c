# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A checkpoint's index against the headers of its shards, in both directions, and the one index that is right.

Loaders trust the index: what it does not list is dropped in silence, and a shard that it lists is often not missed when it is gone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .problems import Problem, Severity, errors, problem
from .safetensors_header import counted, shown, shown_value, some
from .safetensors_index import SUFFIX, Checkpoint, Index
from .safetensors_mtp import MtpLayers, mtp_layers, mtp_names, promised_mtp_layers, unbelievable_numbers
from .safetensors_quant import quantisation_problems

_PRESENT = "Run this module with state=present: it writes the index that the shards' headers call for."
_MAX_MISSING = 100_000  # each of many files can promise as many others
_LAYERS_SHOWN = 10
_NUMBERED = re.compile(r"(?P<prefix>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,5})\.safetensors")


@dataclass
class Report:
    """What a comparison found. Problems of `mendable` have exactly one right answer, which is `mended`.

    owner: the file of each tensor; corrected: entries' files, before and after; lost: listed tensors that no file has.
    """

    owner: dict[str, str] = field(default_factory=dict)
    total_size: int = 0
    missing_shards: list[str] = field(default_factory=list)
    unlisted_tensors: list[str] = field(default_factory=list)
    unlisted_files: dict[str, int] = field(default_factory=dict)
    duplicates: dict[str, list[str]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    corrected: dict[str, tuple[str, str]] = field(default_factory=dict)
    mtp_tensors: list[str] = field(default_factory=list)
    mtp_layers: MtpLayers = field(default_factory=MtpLayers)
    problems: list[Problem] = field(default_factory=list)
    mendable: list[Problem] = field(default_factory=list)
    mended: dict[str, Any] | None = None


def natural_key(file: str) -> list[int | str]:
    """Sorts files as vLLM reads them, 0.19 to 0.32: digits as numbers, all else by code point, so that Z comes before a."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file)]


def compare(found: Checkpoint, require_mtp: bool = False, last_wins: bool = False, source: Checkpoint | None = None) -> Report:
    """All that is wrong with a checkpoint, and its mended index when that is certain. Reads no files.

    last_wins: a tensor in several files belongs to the one that a loader reads last; else it is an error.
    source: the checkpoint that this one was made from, of which no tensor may be lost.
    """
    report = Report(problems=list(found.problems))
    for name in sorted(found.damaged):
        report.problems += found.damaged[name]
    _find_owners(found, report, last_wins)
    if found.index:
        _compare_index(found, found.index, report, last_wins)
    elif not found.index_exists:
        _without_index(found, report)
    if not found.headers and not found.damaged and not report.missing_shards:
        remedy = "Download the checkpoint, in safetensors format, or correct the path."
        report.problems.append(problem("no_shards", f"there is no *{SUFFIX} file in the folder", remedy))
    _check_metadata(found, report)
    if numbers := unbelievable_numbers(found.config):
        evidence = f"numbers in config.json that no model has: {some(numbers, quote=False)}"
        remedy = "Download config.json again: what it promises of layers and experts is not checked."
        report.problems.append(problem("config_not_believable", evidence, remedy, "warning"))
    report.mtp_tensors = mtp_names(report.owner, found.config)
    # Tensors of shards that cannot be read are not to be missed a second time.
    unread = found.index.weight_map.keys() - report.owner.keys() if found.index else set()
    if found.index or not found.damaged:
        _check_mtp(found, report, unread, require_mtp)
        tensors = {tensor: found.headers[file].tensors[tensor] for tensor, file in report.owner.items()}
        report.problems += quantisation_problems(tensors, unread, found.config, set(report.mtp_tensors))
        if source:
            _compare_source(source, report, unread)
    if not errors(report.problems):
        report.mended = _mended(found, report)
    return report


def _find_owners(found: Checkpoint, report: Report, last_wins: bool) -> None:
    """Which file has which tensor; where several have it, the last one read, or, for counting only, the index' choice."""
    weight_map: Mapping[str, str] = found.index.weight_map if found.index else {}
    for file, header in found.headers.items():
        for tensor, entry in header.tensors.items():
            if tensor not in report.owner:
                report.owner[tensor] = file
                report.total_size += entry.nbytes
                continue
            report.duplicates.setdefault(tensor, [report.owner[tensor]]).append(file)
    for tensor, files in report.duplicates.items():
        chosen = max(files, key=natural_key) if last_wins else weight_map.get(tensor)
        if chosen in files:
            report.total_size -= found.headers[report.owner[tensor]].tensors[tensor].nbytes
            report.owner[tensor] = chosen
            report.total_size += found.headers[chosen].tensors[tensor].nbytes
    if report.duplicates:
        # x1 and x01 are the same to a loader: which is read last is up to the file system.
        unordered = any(len({tuple(natural_key(file)) for file in files}) < len(files) for files in report.duplicates.values())
        report.problems.append(_duplicates(found, report, weight_map, last_wins and not unordered))


def _duplicates(found: Checkpoint, report: Report, weight_map: Mapping[str, str], last_wins: bool) -> Problem:
    entries = []
    for tensor, files in report.duplicates.items():
        kinds = {found.headers[file].tensors[tensor][:2] for file in files}
        unlike = ", of different type or shape" if len(kinds) > 1 else ""
        chosen = f"kept: {shown(report.owner[tensor])}" if last_wins else f"the index names {shown(weight_map.get(tensor, 'none of them'))}"
        entries.append(f"{shown(tensor)} in {' and '.join(map(shown, files))}{unlike} ({chosen})")
    evidence = f"{counted(len(entries), 'tensor')} in more than one file: {some(entries, quote=False)}"
    if last_wins:
        remedy = "Loaders that read one file after the other keep the last, as asked for. load-format fastsafetensors refuses such a"
        remedy += " checkpoint, and enable_multithread_load keeps any: use neither."
        return problem("duplicate_tensor", evidence, remedy, "warning")
    remedy = "Loaders let the last file win. Find out which one is right (is the other left over from an older split or build?)"
    remedy += " and move the other away; or, if the last one is right and the order of the names is plain, say duplicates=last_wins."
    return problem("duplicate_tensor", evidence, remedy)


def _compare_index(found: Checkpoint, index: Index, report: Report, last_wins: bool) -> None:
    """Index to disk, then disk to index."""
    absent: dict[str, list[str]] = {}
    for tensor, file in index.weight_map.items():
        header = found.headers.get(file)
        if header is None:
            if file not in found.damaged:
                absent.setdefault(file, []).append(tensor)
        elif tensor in report.duplicates:
            if last_wins and file != report.owner[tensor]:
                report.corrected[tensor] = (file, report.owner[tensor])
        elif tensor in header.tensors:
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
        evidence = f"{counted(len(entries), 'tensor')} in {found.index_name} whose file is present, but the file's header lacks it"
        evidence += f", and so do all other files that can be read: {some(entries, quote=False)}"
        remedy = "The weights are lost or the shard is of another revision: download the named files again, all of one revision."
        report.problems.append(problem("lost_tensor", evidence, remedy))
    listed = set(index.weight_map.values())
    for file, header in found.headers.items():
        new = [name for name in header.tensors if name not in index.weight_map and name not in index.odd]
        new = [name for name in new if name not in report.duplicates or (last_wins and report.owner[name] == file)]
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
    wrong = [
        f"{shown(tensor)} is in {new}, not in {old}" for tensor, (old, new) in report.corrected.items() if tensor not in report.duplicates
    ]
    if wrong:
        evidence = f"entries of {name} that name the wrong file ({len(wrong)}): {some(wrong, quote=False)}"
        report.mendable.append(problem("wrong_owner", evidence, _PRESENT))
    early = [
        f"{shown(tensor)} is read from {new} after {old}" for tensor, (old, new) in report.corrected.items() if tensor in report.duplicates
    ]
    if early:
        evidence = f"entries of {name} that name another file than the last one read ({len(early)}): {some(early, quote=False)}"
        report.mendable.append(problem("not_last_owner", evidence, _PRESENT))
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
    """Files that NAME-00002-of-00003 names promise, counted from 1 or from 0, and that are not among `files`: at most _MAX_MISSING."""
    sets: dict[tuple[str, str, int], set[int]] = {}
    for file in files:
        if match := _NUMBERED.fullmatch(file):
            key = (match["prefix"], match["total"], len(match["number"]))
            sets.setdefault(key, set()).add(int(match["number"]))
    missing = (
        f"{prefix}-{number:0{width}d}-of-{total}{SUFFIX}"
        for (prefix, total, width), numbers in sets.items()
        for number in range(1 - (0 in numbers), int(total) + 1 - (0 in numbers))
        if number not in numbers
    )
    return sorted(islice(missing, _MAX_MISSING))


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


def _check_mtp(found: Checkpoint, report: Report, unread: Iterable[str], require_mtp: bool) -> None:
    """What config.json promises against what there is."""
    key, count = promised_mtp_layers(found.config)
    # With those that are listed, but in files that are missing, or lost: said already.
    names = [*report.mtp_tensors, *mtp_names(unread, found.config)]
    report.mtp_layers = mtp_layers(names, found.config)
    if found.damaged:
        return  # the missing ones may be in there
    severity: Severity = "error" if require_mtp else "warning"
    unknown = found.no_config or ("a number in config.json is not believable" if unbelievable_numbers(found.config) else "")
    unknown = f"{unknown}, so that nothing says which MTP layers there should be" if unknown and not key else ""
    if not names:
        if not (key or require_mtp):
            return
        wanted = f"config.json promises {counted(count, 'MTP layer')} ({key})" if key else "MTP tensors are required"
        searched = f"{counted(len(report.owner), 'tensor')} in {counted(len(found.headers), 'file')}"
        evidence = f"{wanted}, but none of the {searched} is one of MTP (mtp.*, nextn)"
        evidence += f"; {unknown}" if unknown else ""
        remedy = "The checkpoint was saved without its MTP layer: take one that has it, or serve without speculative decoding."
        report.problems.append(problem("mtp_missing", evidence, remedy, severity))
    elif report.mtp_layers.missing and not report.missing_shards:
        wanted = f"config.json promises {counted(count, 'MTP layer')} ({key})" if key else unknown or "config.json promises no MTP layer"
        parts = _missing_parts(report.mtp_layers.missing)
        evidence = f"{wanted}, {counted(len(names), 'tensor')} of {counted(report.mtp_layers.found, 'layer')} found: {parts}"
        remedy = (
            "A draft that lacks tensors loads in silence and is never accepted. Download the files again, take a checkpoint that has them,"
        )
        remedy += " or serve without speculative decoding."
        report.problems.append(problem("mtp_incomplete", evidence, remedy, severity))


def _missing_parts(layers: Mapping[str, list[str]]) -> str:
    """What each layer lacks, of the first layers."""
    texts = [
        f"{f'layer {layer}' if layer else 'beside the layers'} without {some(missing)}"
        for layer, missing in islice(layers.items(), _LAYERS_SHOWN)
    ]
    more = [f"and {len(layers) - _LAYERS_SHOWN} more"] if len(layers) > _LAYERS_SHOWN else []
    return "; ".join([*texts, *more])


def _compare_source(source: Checkpoint, report: Report, unread: Collection[str]) -> None:
    """An index can be sound in itself and have lost tensors when the checkpoint was made."""
    names = dict.fromkeys(tensor for header in source.headers.values() for tensor in header.tensors)
    names.update(dict.fromkeys(source.index.weight_map if source.index else ()))
    stored = (".weight", ".qweight", ".weight_packed")  # a quantiser stores the same matrix under another name
    have = {*report.owner, *unread}
    lost = []
    for name in names:
        module = name.removesuffix(".weight")
        if name not in have and not (module != name and any(f"{module}{suffix}" in have for suffix in stored)):
            lost.append(name)
    if lost:
        evidence = f"{counted(len(lost), 'tensor')} of the source that no file here has: {some(lost)}"
        remedy = "They were dropped when this checkpoint was made: make it again, from all files of the source."
        report.problems.append(problem("lost_from_source", evidence, remedy))


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
