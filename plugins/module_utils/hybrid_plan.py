# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What can be said of a hybrid before it is built: whether arguments, places, source and donor allow it, and what it will take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import hf_cache
from .donor import Donor, DonorFiles
from .hybrid import COPY_BLOCK, FLOAT16, Choice, choose, donor_problems, expected, is_shared
from .hybrid_folder import Places, SourceFolder, bytes_below, look_at, place_problems, read_source, space_problems
from .jobs import JobFailure
from .problems import Problem, problem
from .safetensors_compare import Report
from .safetensors_header import some
from .safetensors_index import Checkpoint
from .snapshot_files import known
from .snapshot_hub import open_hub
from .sources import HEX40, FolderSource, Source, UrlSource, source_kind


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
        yield UrlSource(spec["donor_source"]), ""
    else:
        yield folder_donor(spec["donor_source"], spec["donor_repo"], spec["donor_revision"])


def folder_donor(folder: str, repo: str, revision: str) -> tuple[Source, str]:
    """A donor in a folder, and its commit. The folder may be a cache of the hub's own tools. JobFailure when it says that it is another."""
    if cache := hf_cache.find(folder, repo):
        commit = hf_cache.resolve(cache, folder, repo, revision)
        return FolderSource(cache / "snapshots" / commit), commit
    manifest = known(Path(folder)).manifest
    if manifest and ((manifest.repo, manifest.revision) != (repo, revision) and HEX40.fullmatch(revision)):
        evidence = f"{folder} is a snapshot of {manifest.repo} at {manifest.revision}, wanted as donor is {repo} at {revision}"
        raise JobFailure(problem("wrong_revision", evidence, "give the donor's snapshot, or correct donor_repo and donor_revision"))
    return FolderSource(folder), manifest.revision if manifest else ""


def plan(checkpoint: Checkpoint, report: Report, donor: DonorFiles, expect: dict[str, int] | None) -> Choice:
    """What is taken of the donor. JobFailure when that is not what config.json promises."""
    tensors = {name: checkpoint.headers[file].tensors[name] for name, file in report.owner.items()}
    choice, wrong = choose(tensors, donor.tensors, checkpoint.config, expect)
    wrong = [*donor_problems(donor.config), *wrong]
    if wrong:
        raise JobFailure(*wrong, *choice.warnings)
    return choice


def output_bytes(mode: str, source: SourceFolder, shard_bytes: int) -> int:
    """Upper bound of what a build writes, with a block for each file."""
    if mode == "overlay":
        index = source.files.get(source.index_name)
        return shard_bytes + 2 * (index.size if index else 0) + (1 << 20)
    # The donor's tensors lie there twice for a while: in their own shard, and in those of the output.
    return sum(file.size + COPY_BLOCK + 4096 for file in source.files.values()) + 2 * shard_bytes + (1 << 20)


def survey(spec: dict[str, Any]) -> tuple[int, Choice | None]:
    """What a build would find: how many FP8 weights it expects, and of a donor in a folder what is taken.

    JobFailure with all that would keep it from being built, as far as that is known without a network.
    """
    source = look_at(Path(spec["source"]))
    checkpoint, report = read_source(source)
    tensors = {name: checkpoint.headers[file].tensors[name] for name, file in report.owner.items() if is_shared(name)}
    weights = expected(checkpoint.config, tensors).weights
    size, choice = sum(tensors[name].nbytes for name in weights if name in tensors) // 2, None
    if source_kind(spec["donor_source"]) == "folder":
        folder, _ = folder_donor(spec["donor_source"], spec["donor_repo"], spec["donor_revision"])
        choice = plan(checkpoint, report, Donor(folder, lambda _note: None).survey(), spec.get("expect"))
        size = sum(tensor.nbytes for tensor in (*choice.weights.values(), *choice.scales.values()))
    places = Places(Path(spec["output"]))
    missing = output_bytes(spec["mode"], source, size) - bytes_below(places.building)
    if found := space_problems(places, max(0, missing)):
        raise JobFailure(*found)
    return len(weights), choice


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
