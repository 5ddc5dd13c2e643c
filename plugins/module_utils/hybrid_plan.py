# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What can be said of a hybrid before it is built: whether arguments, places, source and donor allow it, and what it will take."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import hf_cache
from .donor import Donor, DonorFiles, DonorShard, FolderDonor, UrlDonor
from .hybrid import COPY_BLOCK, FLOAT16, Choice, DonorTensor, choose, donor_problems, expected, is_shared
from .hybrid_folder import (
    Building,
    Places,
    bytes_below,
    complete,
    inputs_of,
    is_expect,
    kept_problems,
    place_problems,
    space_problems,
    unexpected,
)
from .hybrid_source import SourceFolder, look_at, read_source
from .jobs import JobFailure, is_number, is_text, read_object
from .problems import Problem, errors, problem
from .safetensors_compare import Report
from .safetensors_header import some
from .safetensors_index import Checkpoint
from .snapshot_files import known
from .snapshot_hub import open_hub
from .snapshot_space import existing
from .sources import HEX40, Source, source_kind

COUNTS = ("replaced", "scales_added", "unplaced")  # of a manifest
PLAN = ".dgxspark-donor.plan.json"


def spec_problems(spec: dict[str, Any]) -> list[Problem]:
    """What is wrong with the arguments and the places that they name."""
    wrong = place_problems(spec["source"], spec["output"], spec["donor_source"])
    if not source_kind(spec["donor_source"]):
        evidence = f"donor_source {spec['donor_source']!r} is neither hub, an absolute folder, nor an http or https address"
        wrong.append(problem("bad_donor_source", evidence, "correct it"))
    return wrong


@contextmanager
def open_donor(spec: dict[str, Any], say: Callable[[str], None]) -> Iterator[tuple[Source, str]]:
    """The donor as a source, and its commit where that is known."""
    kind = source_kind(spec["donor_source"])
    if kind == "hub":
        with open_hub(spec["hub"], say) as source:
            yield source, source.commit
    elif kind == "url":
        yield UrlDonor(spec["donor_source"]), ""
    else:
        yield folder_donor(spec["donor_source"], spec["donor_repo"], spec["donor_revision"])


def folder_donor(folder: str, repo: str, revision: str) -> tuple[Source, str]:
    """A donor in a folder, and its commit. The folder may be a cache of the hub's own tools. JobFailure when it says that it is another."""
    if cache := hf_cache.find(folder, repo):
        commit = hf_cache.resolve(cache, folder, repo, revision)
        return FolderDonor(cache / "snapshots" / commit), commit
    manifest = known(Path(folder)).manifest
    if manifest and ((manifest.repo, manifest.revision) != (repo, revision) and HEX40.fullmatch(revision)):
        evidence = f"{folder} is a snapshot of {manifest.repo} at {manifest.revision}, wanted as donor is {repo} at {revision}"
        raise JobFailure(problem("wrong_revision", evidence, "give the donor's snapshot, or correct donor_repo and donor_revision"))
    return FolderDonor(folder), manifest.revision if manifest else ""


def plan(checkpoint: Checkpoint, report: Report, donor: DonorFiles, expect: dict[str, int] | None) -> Choice:
    """What is taken of the donor. JobFailure when that is not what config.json promises."""
    tensors = {name: checkpoint.headers[file].tensors[name] for name, file in report.owner.items()}
    choice, wrong = choose(tensors, donor.tensors, checkpoint.config, expect)
    of_config = donor_problems(donor.config)
    choice.warnings += [found for found in of_config if found["severity"] == "warning"]
    if wrong := [*errors(of_config), *wrong]:
        raise JobFailure(*wrong, *choice.warnings)
    # Numbers that config.json gives as well are not needed another time.
    choice.expect = dict(expect or {}) if expect and choose(tensors, donor.tensors, checkpoint.config)[1] else {}
    return choice


def identify(spec: dict[str, Any], source: SourceFolder) -> str:
    """Digest of everything that decides what the output holds."""
    return inputs_of(spec["mode"], source.identity, spec["donor_repo"], spec["donor_revision"])


def kept_plan(folder: Path, expect: dict[str, int] | None) -> tuple[list[tuple[str, DonorTensor]], dict[str, Any]] | None:
    """What an earlier run of the same inputs decided to take, and its facts: files, commit, expect and the counts."""
    counts = dict.fromkeys(COUNTS, is_number)
    fields = {
        "order": lambda v: isinstance(v, list),
        "files": lambda v: isinstance(v, dict),
        "commit": is_text,
        "expect": is_expect,
        **counts,
    }
    noted = read_object(folder / PLAN, fields)
    if not fields.keys() <= noted.keys() or unexpected(noted, expect):
        return None
    try:
        order = [(name, DonorTensor(file, dtype, tuple(shape), start, end)) for name, file, dtype, shape, start, end in noted.pop("order")]
    except (TypeError, ValueError):
        return None
    return order, noted


def link_problems(places: Places, source: SourceFolder) -> list[Problem]:
    """Whether the output is on another file system than what an overlay links to, as far as that shows without writing."""
    at = existing(places.output.parent)
    device = at.stat().st_dev
    for name in source.linked("overlay"):
        if source.files[name].state[0] != device:
            real = os.path.realpath(source.files[name].path)
            return [no_links(source.folder, places.output, real, f"{at} and that file are on different file systems")]
    return []


def no_links(source: Path, output: Path, real: str, why: str) -> Problem:
    """The problem of a source whose files cannot be linked to."""
    evidence = f"no hard link from {output.parent} to {real} ({why}): overlay links to the files of source {source}"
    return problem("overlay_other_file_system", evidence, "put output on the file system of the source, or use mode materialize")


def output_bytes(mode: str, source: SourceFolder, shard_bytes: int) -> int:
    """Upper bound of what a build writes, with a block for each file."""
    if mode == "overlay":
        index = source.files.get(source.index_name)
        copied = [source.files[name].size + 4096 for name in {*source.kept} - {*source.linked(mode)}]
        return shard_bytes + sum(copied) + 2 * (index.size if index else 0) + (1 << 20)
    # The donor's tensors lie there twice for a while: in their own shard, and in those of the output.
    return sum(file.size + COPY_BLOCK + 4096 for file in source.files.values()) + 2 * shard_bytes + (1 << 20)


def survey(spec: dict[str, Any]) -> dict[str, Any]:
    """What a build would find: replaced, scales_added, unplaced (None while nobody has read the donor).

    JobFailure with all that would keep it from being built, as far as that is known without a network.
    """
    source, places = look_at(Path(spec["source"])), Places(Path(spec["output"]))
    wrong = kept_problems(places)
    if spec["mode"] == "overlay":
        wrong += link_problems(places, source)
    if wrong:
        raise JobFailure(*wrong)
    if unfinished := _taken_up(spec, places, source):
        return unfinished
    checkpoint, report = read_source(source)
    tensors = {name: checkpoint.headers[file].tensors[name] for name, file in report.owner.items() if is_shared(name)}
    weights = expected(checkpoint.config, tensors).weights
    size = sum(tensors[name].nbytes for name in weights if name in tensors) // 2
    figures = {"replaced": len(weights), "scales_added": len(weights), "unplaced": None}
    if source_kind(spec["donor_source"]) == "folder":
        folder, _ = folder_donor(spec["donor_source"], spec["donor_repo"], spec["donor_revision"])
        choice = plan(checkpoint, report, Donor(folder, lambda _note: None).survey(), spec.get("expect"))
        size = sum(tensor.nbytes for tensor in (*choice.weights.values(), *choice.scales.values()))
        figures = counts_of(choice)
    missing = output_bytes(spec["mode"], source, size) - bytes_below(places.building)
    if found := space_problems(places, max(0, missing)):
        raise JobFailure(*found)
    return figures


def counts_of(choice: Choice) -> dict[str, Any]:
    """COUNTS of what is taken."""
    return {"replaced": len(choice.weights), "scales_added": len(choice.scales), "unplaced": len(choice.unplaced)}


def _taken_up(spec: dict[str, Any], places: Places, source: SourceFolder) -> dict[str, Any] | None:
    """The counts of an interrupted build that needs the donor no more."""
    inputs, expect = identify(spec, source), spec.get("expect")
    manifest, _ = complete(places.building, inputs, source, expect)
    if manifest:
        return {name: manifest[name] for name in COUNTS}
    kept = kept_plan(places.building, expect) if Building(places, inputs).taken_up() else None
    if kept is None or not DonorShard(places.building, kept[0], kept[1]["files"], lambda _note: None).whole():
        return None
    read_source(source)
    return {name: kept[1][name] for name in COUNTS}


def online_problems(folder: Path) -> list[Problem]:
    """Why vLLM could not quantise this checkpoint's shared experts while it loads it. JobFailure for what is wrong with the checkpoint."""
    checkpoint, report = read_source(look_at(folder))
    tensors = {name: checkpoint.headers[file].tensors[name] for name, file in report.owner.items() if is_shared(name)}
    want = expected(checkpoint.config, tensors)
    wrong = []
    if want.unknown:
        evidence = f"{folder}: config.json and tensors show no shared experts that could be quantised: {want.unknown}"
        wrong.append(problem("online_no_shared_experts", evidence, "set the recipe's hybrid to off for this model"))
    elif odd := [name for name in sorted(want.weights) if name not in tensors or tensors[name].dtype not in FLOAT16]:
        evidence = f"{folder}: shared experts that are not stored as weights of 16 bits ({len(odd)}): {some(odd)}"
        wrong.append(problem("online_not_plain", evidence, "they are quantised already: set the recipe's hybrid to off"))
    quantisation = checkpoint.config.get("quantization_config")
    if not (isinstance(quantisation, dict) and quantisation.get("quant_method")):
        evidence = f"{folder}: config.json has no quantization_config with a quant_method, so that this is no quantised checkpoint"
        wrong.append(problem("online_not_quantised", evidence, "take the INT4 checkpoint as source"))
    return wrong
