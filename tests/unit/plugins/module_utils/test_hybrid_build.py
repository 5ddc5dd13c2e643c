# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whole builds, compared tensor by tensor with what the safetensors library reads of source and donor."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybrids
import pytest
import shards
import synthetic_checkpoint
from ansible_collections.dgxspark.vllm.plugins.module_utils import (
    donor,
    hybrid_build,
    hybrid_check,
    hybrid_folder,
    hybrid_plan,
    range_copy,
    sources,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.hybrid_folder import MANIFEST
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure, Progress
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_compare import compare
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_header import Header, read_header
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_index import read_checkpoint
from hybrids import no_waiting  # noqa: F401 -- a fixture
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

MTP = "model_extra_tensors.safetensors"
MODES = pytest.mark.parametrize("mode", ["materialize", "overlay"])


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    hybrids.pair(tmp_path)
    return tmp_path


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def a_shared_shard(source: Path) -> Path:
    """A shard with a weight that is replaced."""
    return next(p for p in shards_of(source) if any(".layers.1.mlp.shared_expert.up_proj" in name for name in shards.header(p)))


def index_of(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / shards.INDEX).read_text())
    return value


# --- what comes out --------------------------------------------------------------------------------------------------------------


@MODES
def test_every_tensor_is_the_sources_or_the_donors(pair: Path, mode: str) -> None:
    before = shards.tree(pair / "source")
    report = hybrids.build(pair, mode)
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")
    assert shards.tree(pair / "source") == before
    manifest = report["manifest"]
    assert (manifest["replaced"], manifest["scales_added"], manifest["unplaced"]) == (12, 12, 4 * 8 + 24)
    assert manifest == json.loads((pair / "output" / MANIFEST).read_text())
    assert hybrid_build.is_report(report)


@MODES
def test_the_index_is_what_the_headers_call_for(pair: Path, mode: str) -> None:
    # As AutoRound leaves it: the index does not list the MTP file, and gives a wrong sum.
    index = index_of(pair / "source")
    index["metadata"] = {"total_size": 1, "total_parameters": 5}
    (pair / "source" / shards.INDEX).write_text(json.dumps(index))
    hybrids.build(pair, mode)
    made = index_of(pair / "output")
    want = hybrids.expected(pair / "source", pair / "donor")
    assert made["metadata"] == {"total_size": sum(len(data) for _, _, data in want.values()), "total_parameters": 5}
    assert list(made["weight_map"]) == sorted(want) and any(name.startswith("mtp.") for name in made["weight_map"])
    report = compare(read_checkpoint(pair / "output"), require_mtp=True, last_wins=mode == "overlay")
    assert not [p for p in report.problems if p["severity"] == "error"] and not report.mendable and report.mended is None


def test_materialize_copies_all_other_files_and_bytes(pair: Path) -> None:
    (pair / "source" / "sub" / "deep").mkdir(parents=True)
    (pair / "source" / "sub" / "deep" / "tokens.bin").write_bytes(os.urandom(1000))
    (pair / "source" / "empty").write_bytes(b"")
    (pair / "source" / ".gitattributes").write_text("x")
    for left in (".cache/huggingface/x", ".git/y", ".dgxspark-pristine/z"):
        (pair / "source" / left).parent.mkdir(parents=True)
        (pair / "source" / left).write_text("not taken along")
    hybrids.build(pair)
    source, output = shards.tree(pair / "source"), shards.tree(pair / "output")
    assert output.keys() - source.keys() == {MANIFEST}
    assert source.keys() - output.keys() == {".cache/huggingface/x", ".git/y", ".dgxspark-pristine/z"}
    rewritten = {p.name for p in shards_of(pair / "source")} | {shards.INDEX, MANIFEST}
    for name in output.keys() - rewritten:
        assert output[name][2] == source[name][2] and output[name][0] != source[name][0], name
    assert all(stat.S_IMODE((pair / "output" / name).stat().st_mode) == 0o644 for name in output)


def test_a_shard_without_shared_experts_is_copied_as_it_is(pair: Path) -> None:
    # Two spaces behind the header, odd order: nothing of it may be touched.
    shards.write(pair / "source" / "vision.safetensors", {"v": ("U8", [3], b"abc"), "u": ("F32", [1], b"wxyz")}, ["v", "u"], spaces=2)
    hybrids.build(pair)
    assert (pair / "output" / "vision.safetensors").read_bytes() == (pair / "source" / "vision.safetensors").read_bytes()
    assert index_of(pair / "output")["weight_map"]["v"] == "vision.safetensors"


def test_everything_is_aligned_and_keeps_its_metadata(pair: Path) -> None:
    path = a_shared_shard(pair / "source")
    tensors = {**shards.library(path), "odd": ("U8", [3], b"odd"), "wide": ("I64", [1], b"12345678"), "none": ("F32", [0, 4], b"")}
    shards.write(path, tensors, metadata={"made": "by hand"}, spaces=5)
    hybrids.build(pair)
    made = pair / "output" / path.name
    found = read_header(made)
    assert found.data_start % 8 == 0 and found.metadata == {"made": "by hand", "format": "pt"}
    sizes = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1}
    assert all((found.data_start + t.start) % sizes[t.dtype] == 0 for t in found.tensors.values())
    assert {"odd", "wide", "none"} <= found.tensors.keys()
    for other in shards_of(pair / "output"):
        assert read_header(other).metadata["format"] == "pt"


def test_each_scale_lies_beside_its_weight(pair: Path) -> None:
    hybrids.build(pair)
    weight_map = index_of(pair / "output")["weight_map"]
    source = {name: file for file, tensors in shards.contents(pair / "source").items() for name in tensors}
    scales = [name for name in weight_map if name.endswith("_scale_inv")]
    assert len(scales) == 12
    for name in scales:
        assert weight_map[name] == weight_map[name.removesuffix("_scale_inv")] == source[name.removesuffix("_scale_inv")]


def test_overlay_links_everything_and_writes_next_to_nothing(tmp_path: Path) -> None:
    hybrids.pair(tmp_path, layers=4)
    shards.write(tmp_path / "source" / "big.safetensors", {"big": ("U8", [30_000_000], bytes(30_000_000))})
    (tmp_path / "source" / "sub").mkdir()
    (tmp_path / "source" / "sub" / "x").write_text("x")
    shards.write(tmp_path / "source" / "sub" / "y.safetensors", {"y": ("U8", [1], b"y")})
    before = shards.tree(tmp_path / "source")
    report = hybrids.build(tmp_path, "overlay")
    output = shards.tree(tmp_path / "output")
    assert report["written"] <= 0.01 * sum((tmp_path / "source" / name).stat().st_size for name in before)
    for name, (inode, _, _) in before.items():
        assert (output[name][0] == inode) == name.endswith(".safetensors"), name
        assert name == shards.INDEX or output[name][2] == before[name][2]
    assert output.keys() - before.keys() == {MANIFEST, "zz-fp8-overlay.safetensors"}
    assert shards.tree(tmp_path / "source") == before
    taken = shards.library(tmp_path / "output" / "zz-fp8-overlay.safetensors")
    assert len(taken) == 24 and all(index_of(tmp_path / "output")["weight_map"][name] == "zz-fp8-overlay.safetensors" for name in taken)
    assert report["manifest"]["needs"] == ["fp8_dispatch", "index_loader"]


def test_the_overlay_is_named_behind_all_others(pair: Path) -> None:
    (pair / "source" / MTP).rename(pair / "source" / "zzz_mtp.safetensors")
    assert hybrids.build(pair, "overlay")["manifest"]["overlay"] == "zzzz-fp8-overlay.safetensors"


def test_an_overlay_that_would_not_be_read_last_is_refused(pair: Path) -> None:
    (pair / "source" / MTP).rename(pair / "source" / "état.safetensors")
    assert hybrids.classes(hybrids.failure(pair, "overlay")) == ["overlay_name"]
    assert hybrids.build(pair, "materialize")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_an_overlay_on_another_file_system_is_refused(pair: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def other_file_system(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", other_file_system)
    failed = hybrids.failure(pair, "overlay")
    assert hybrids.classes(failed) == ["overlay_other_file_system"] and "use mode materialize" in failed.problems[0]["remedy"]
    assert not (pair / "output").exists()
    assert not any(".dgxspark-donor" in p.name for p in (pair / ".output.building").iterdir())  # before anything is fetched


def test_another_file_system_is_told_without_a_try(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == pair.stat().st_dev:
        pytest.skip("no second file system here")
    where = shm / f"dgxspark-{os.getpid()}"
    where.mkdir()
    try:
        given = hybrids.spec(pair, "overlay", output=str(where / "output"), donor_source="http://127.0.0.1:1/")
        with pytest.raises(JobFailure) as failure:
            hybrid_plan.survey(given)
        assert [p["class"] for p in failure.value.problems] == ["overlay_other_file_system"]
        assert not [*where.iterdir()]
        failed = hybrids.failure(pair, "overlay", **{k: given[k] for k in ("output", "donor_source")})
        assert hybrids.classes(failed) == ["overlay_other_file_system"] and [p.name for p in where.iterdir()] == [".output.lock"]
    finally:
        shutil.rmtree(where)


def test_a_checkpoint_in_one_file_gets_an_index(tmp_path: Path) -> None:
    synthetic_checkpoint.write_source(tmp_path / "source", 700_000, layers=4, experts=2, shards=1, mtp_layers=0)
    synthetic_checkpoint.write_donor(tmp_path / "donor", tmp_path / "source")
    next(iter(shards_of(tmp_path / "source"))).rename(tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / shards.INDEX).unlink()
    hybrids.build(tmp_path)
    assert shards.by_index(tmp_path / "output") == hybrids.expected(tmp_path / "source", tmp_path / "donor")
    hybrids.build(tmp_path, "overlay", output=str(tmp_path / "over"))
    assert shards.by_index(tmp_path / "over") == hybrids.expected(tmp_path / "source", tmp_path / "donor")


# --- field cases: the MTP file, names, counts ------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("name", ["mtp.safetensors", "model-mtp-of-00005.safetensors", MTP, "model.mtp.safetensors"])
@pytest.mark.parametrize("listed", [False, True])
def test_the_mtp_file_comes_along_whatever_its_name_and_index(pair: Path, mode: str, name: str, listed: bool) -> None:
    (pair / "source" / MTP).rename(pair / "source" / name)
    if listed:
        index = index_of(pair / "source")
        index["weight_map"].update(dict.fromkeys(shards.library(pair / "source" / name), name))
        (pair / "source" / shards.INDEX).write_text(json.dumps(index))
    hybrids.build(pair, mode)
    weight_map = index_of(pair / "output")["weight_map"]
    mtp = {tensor: file for tensor, file in weight_map.items() if tensor.startswith("mtp.")}
    assert mtp == dict.fromkeys(shards.library(pair / "source" / name), name) and len(mtp) == 17 + 2 * 3


def test_an_mtp_tensor_in_an_ordinary_shard_is_found_there(pair: Path) -> None:
    extra = shards.library(pair / "source" / MTP)
    path = a_shared_shard(pair / "source")
    shards.write(path, {**shards.library(path), "mtp.fc.weight": extra.pop("mtp.fc.weight")})
    shards.write(pair / "source" / MTP, extra)
    hybrids.build(pair)
    assert index_of(pair / "output")["weight_map"]["mtp.fc.weight"] == path.name
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")


def drop(folder: Path, part: str) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = shards.library(path)
        shards.write(path, {name: raw for name, raw in tensors.items() if part not in name}, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("part", "class_", "says"),
    [
        (".layers.2.mlp.shared_expert.up_proj.weight", "hybrid_weights_differ", "11 found, 12 expected; missing (1): model.language_model"),
        (".layers.2.mlp.shared_expert.up_proj.weight_scale_inv", "hybrid_weights_differ", "the donor has no weight_scale_inv beside it"),
        (".layers.3.", "hybrid_weights_differ", "9 found, 12 expected"),
        (".self_attn.q_proj.weight", "hybrid_unplaced_differ", "52 found, 56 expected; missing (4)"),
        ("mtp.fc.", "hybrid_unplaced_differ", "55 found, 56 expected; missing (1)"),
    ],
)
def test_a_donor_that_lacks_something_fails_with_the_names(pair: Path, part: str, class_: str, says: str) -> None:
    drop(pair / "donor", part)
    failed = hybrids.failure(pair)
    evidence = {p["class"]: p["evidence"] for p in failed.problems}
    assert says in evidence[class_]
    assert not (pair / "output").exists() and not list(pair.glob(".output.building/*.safetensors"))


def test_an_unusual_donor_is_taken_with_its_numbers(pair: Path) -> None:
    drop(pair / "donor", "mtp.fc.")
    assert hybrids.build(pair, expect={"unplaced": 55})["manifest"]["unplaced"] == 55


def test_a_donor_without_mtp_is_taken_and_told(pair: Path) -> None:
    drop(pair / "donor", "mtp.")
    report = hybrids.build(pair)
    assert report["manifest"]["unplaced"] == 32 and len(report["notes"]) == 1 and "no MTP layer" in report["notes"][0]


@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "adapter_model.safetensors"])
@MODES
def test_foreign_files_beside_source_or_donor_are_no_part_of_them(pair: Path, mode: str, name: str) -> None:
    shards.write(pair / "donor" / name, {"model.language_model.layers.0.mlp.shared_expert.up_proj.weight": ("U8", [1], b"x")})
    (pair / "source" / shards.INDEX).unlink()
    (pair / "source" / "consolidated.safetensors.index.json").write_text('{"weight_map": {"a": "consolidated.safetensors"}}')
    (pair / "donor" / name).rename(pair / "aside")
    want = hybrids.expected(pair / "source", pair / "donor")
    (pair / "aside").rename(pair / "donor" / name)
    hybrids.build(pair, mode)
    assert shards.by_index(pair / "output") == want


@MODES
def test_the_index_has_the_name_that_loaders_look_for(pair: Path, mode: str) -> None:
    (pair / "source" / shards.INDEX).rename(pair / "source" / "other.safetensors.index.json")
    hybrids.build(pair, mode)
    assert [p.name for p in (pair / "output").glob("*.index.json")] == [shards.INDEX]
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")
    assert hybrids.build(pair, mode)["after"] == ""


@pytest.mark.parametrize(("mode", "want"), [(0o600, 0o600), (0o640, 0o640), (0o777, 0o644), (0o444, 0o444), (0o644, 0o644)])
def test_no_file_becomes_readable_for_more(pair: Path, mode: int, want: int) -> None:
    for name in ("README.md", MTP, a_shared_shard(pair / "source").name):
        (pair / "source" / name).chmod(mode)
    hybrids.build(pair)
    for name in ("README.md", MTP, a_shared_shard(pair / "source").name):
        assert stat.S_IMODE((pair / "output" / name).stat().st_mode) == want


# --- numbers that are given ------------------------------------------------------------------------------------------------------


def lacking(pair: Path) -> None:
    drop(pair / "donor", ".layers.2.mlp.shared_expert.")


@MODES
def test_numbers_are_a_part_of_what_complete_means(pair: Path, mode: str) -> None:
    lacking(pair)
    hybrids.build(pair, mode, expect={"weights": 9})
    before = shards.tree(pair / "output")
    assert hybrids.build(pair, mode, expect={"weights": 9})["after"] == ""
    assert hybrids.build(pair, mode, expect={"weights": 9, "scales": 9, "unplaced": 56})["after"] == ""
    for other in (None, {}, {"weights": 12}, {"unplaced": 56}, {"weights": 9, "scales": 12}, {"weights": 9, "unplaced": 1}):
        assert {"hybrid_weights_differ", "hybrid_scales_differ", "hybrid_unplaced_differ"} & {
            *hybrids.classes(hybrids.failure(pair, mode, expect=other))
        }
        assert shards.tree(pair / "output") == before


def test_numbers_that_config_json_gives_too_change_nothing(pair: Path) -> None:
    assert hybrids.build(pair, expect={"weights": 12})["manifest"]["expect"] == {}
    for same in (None, {"weights": 12, "scales": 12}, {"unplaced": 56}):
        assert hybrids.build(pair, expect=same)["after"] == ""


def test_an_interrupted_build_is_not_taken_up_with_other_numbers(pair: Path) -> None:
    lacking(pair)
    stop_at(pair, "check", expect={"weights": 9})
    assert "hybrid_weights_differ" in hybrids.classes(hybrids.failure(pair))
    stop_at(pair, "publish", expect={"weights": 9})
    assert "hybrid_weights_differ" in hybrids.classes(hybrids.failure(pair))
    assert not (pair / "output").exists() and hybrids.build(pair, expect={"weights": 9})["after"]


class Killed(BaseException):
    """As good as SIGKILL."""


def stop_at(pair: Path, stage: str, mode: str = "materialize", **other: Any) -> None:
    """A build that ends at the beginning of a stage, or before it is published."""

    def kill(now: str, _done: float) -> None:
        if now == stage:
            raise Killed

    def never(_self: Any) -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        if stage == "publish":
            patch.setattr(hybrid_folder.Building, "publish", never)
        hybrids.build(pair, mode, seen=kill, **other)


@MODES
@pytest.mark.parametrize("stage", ["check", "publish"])
def test_an_interrupted_build_goes_on_without_its_donor(pair: Path, mode: str, stage: str) -> None:
    stop_at(pair, stage, mode)
    want = hybrids.expected(pair / "source", pair / "donor")
    (pair / "donor").rename(pair / "gone")
    before = shards.tree(pair)
    assert hybrid_plan.survey(hybrids.spec(pair, mode)) == {"replaced": 12, "scales_added": 12, "unplaced": 56}
    assert shards.tree(pair) == before
    hybrids.build(pair, mode)
    assert shards.by_index(pair / "output") == want


@pytest.mark.parametrize(
    "fault",
    [
        lambda b: (b / ".dgxspark-donor.plan.json").unlink(),
        lambda b: (b / ".dgxspark-donor.json").write_text("{}"),
        lambda b: (b / ".dgxspark-donor.safetensors").unlink(),
        lambda b: (b / ".dgxspark-hybrid.journal.json").write_text("{}"),
    ],
)
def test_a_build_that_still_needs_its_donor_says_so(pair: Path, fault: Callable[[Path], Any]) -> None:
    stop_at(pair, "check")
    (pair / "donor").rename(pair / "gone")
    fault(pair / ".output.building")
    with pytest.raises(JobFailure) as failure:
        hybrid_plan.survey(hybrids.spec(pair))
    assert [p["class"] for p in failure.value.problems] == ["source_vanished"]


# --- a donor that changes --------------------------------------------------------------------------------------------------------


def swap_donor(pair: Path, seed: int = 99) -> None:
    shutil.rmtree(pair / "donor")
    hybrids.pair(pair, seed=seed)


def touch_donor(pair: Path) -> None:
    for path in (pair / "donor").glob("*.safetensors"):
        os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("swap", [swap_donor, touch_donor])
def test_a_donor_that_changes_in_one_run_is_told_and_its_bytes_dropped(
    pair: Path, monkeypatch: pytest.MonkeyPatch, swap: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr(donor, "SYNC_BYTES", 1)
    done: list[float] = []

    def seen(now: str, at: float) -> None:
        if now == "donor tensors" and at and not done:
            done.append(at)
            swap(pair)

    failed = hybrids.failure(pair, seen=seen)
    assert done and hybrids.classes(failed) == ["donor_changed"] and not (pair / "output").exists()
    assert hybrids.build(pair)["resumed"] == 0
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")


@pytest.mark.parametrize("swap", [swap_donor, touch_donor, lambda _pair: None])
def test_a_half_fetched_donor_goes_on_only_with_the_same_files(pair: Path, monkeypatch: pytest.MonkeyPatch, swap: Any) -> None:
    monkeypatch.setattr(donor, "SYNC_BYTES", 1)
    monkeypatch.setattr(sources, "CHUNK", 1000)

    def kill(now: str, at: float) -> None:
        if now == "donor tensors" and at > 15_000:
            raise Killed

    with pytest.raises(Killed):
        hybrids.build(pair, seen=kill)
    noted = json.loads((pair / ".output.building" / ".dgxspark-donor.json").read_text())["bytes"]
    assert noted > 10_000
    swap(pair)
    first: list[float] = []
    hybrids.build(pair, seen=lambda now, at: first.append(at) if now == "donor tensors" and at else None)
    assert (first[0] >= noted) == (swap not in (swap_donor, touch_donor))
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")


def test_both_pins_and_what_was_fetched_are_in_the_manifest(pair: Path) -> None:
    manifest = hybrids.build(pair)["manifest"]
    donor = manifest["donor"]
    assert (donor["repo"], donor["revision"]) == ("org/fp8", hybrids.COMMIT)
    assert donor["files"] == {p.name: {"size": p.stat().st_size, "digest": ""} for p in (pair / "donor").glob("*.safetensors")}
    over = hybrids.build(pair, "overlay", output=str(pair / "over"))["manifest"]
    shard = (pair / "over" / over["overlay"]).read_bytes()
    assert donor["sha256"] == over["donor"]["sha256"] == hashlib.sha256(shard).hexdigest() and donor["bytes"] == len(shard)


def test_nothing_is_left_behind(pair: Path) -> None:
    hybrids.build(pair)
    assert sorted(p.name for p in pair.iterdir()) == [".output.lock", "donor", "output", "source"]
    assert [p.name for p in (pair / "output").iterdir() if p.name.startswith(".")] == [MANIFEST]


def test_an_older_split_leaves_no_shard_in_the_new_output(pair: Path) -> None:
    hybrids.build(pair)
    shutil.rmtree(pair / "source")
    synthetic_checkpoint.write_source(pair / "source", 700_000, layers=4, experts=2, shards=2)
    hybrids.build(pair)
    assert [p.name for p in shards_of(pair / "output")] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert len(shards_of(pair / "output.previous")) == 3


# --- sources that are links ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(pair: Path) -> Path:
    """The source as the hub's own tools keep it: a snapshot of links to blobs."""
    snapshot, blobs = pair / "models--org--int4/snapshots" / ("a" * 40), pair / "models--org--int4/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in (pair / "source").iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(blobs / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    (pair / "source").rmdir()
    return snapshot


@MODES
def test_a_cache_of_links_is_taken_as_content_and_never_written_through(pair: Path, cache: Path, mode: str) -> None:
    before = shards.tree(pair / "models--org--int4")
    hybrids.build(pair, mode, source=str(cache))
    assert not any(path.is_symlink() for path in (pair / "output").iterdir())
    assert shards.by_index(pair / "output") == hybrids.expected(cache, pair / "donor")
    assert shards.tree(pair / "models--org--int4") == before
    if mode == "overlay":
        shard = (pair / "output" / MTP).stat()
        assert shard.st_ino == (cache / MTP).stat().st_ino and shard.st_nlink == 2
        assert (pair / "output" / "config.json").stat().st_nlink == 1
    assert (pair / "output" / shards.INDEX).stat().st_nlink == 1


def test_a_cache_without_its_blobs_is_told(pair: Path, cache: Path) -> None:
    shutil.rmtree(pair / "models--org--int4/blobs")
    failed = hybrids.failure(pair, source=str(cache))
    assert "source_incomplete" in hybrids.classes(failed) and "blobs" in failed.problems[0]["remedy"]


@pytest.mark.parametrize("given", ["{tmp}", "{tmp}/models--org--fp8", "{tmp}/models--org--fp8/snapshots/" + hybrids.COMMIT])
def test_the_donor_may_be_a_cache(pair: Path, given: str) -> None:
    snapshot = pair / "cache" / "models--org--fp8/snapshots" / hybrids.COMMIT
    snapshot.parent.mkdir(parents=True)
    (pair / "donor").rename(snapshot)
    manifest = hybrids.build(pair, donor_source=given.format(tmp=pair / "cache"))["manifest"]
    assert manifest["donor"]["commit"] == hybrids.COMMIT
    failed = hybrids.failure(pair, donor_source=given.format(tmp=pair / "cache"), donor_revision="0" * 40)
    assert hybrids.classes(failed) == ["revision_not_found"]


def test_a_donor_that_is_a_snapshot_of_something_else_is_refused(pair: Path) -> None:
    noted = {"format": 1, "repo": "org/fp8", "revision": "0" * 40, "sums_sha256": "", "ignore_patterns": []}
    noted["files"] = {"config.json": {"size": 1, "sha256": "0" * 64}}
    (pair / "donor" / ".dgxspark-snapshot.json").write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")
    assert hybrids.classes(hybrids.failure(pair)) == ["wrong_revision"]
    assert hybrids.build(pair, donor_revision="0" * 40)["manifest"]["donor"]["commit"] == "0" * 40


# --- a source that cannot be used ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "class_"),
    [
        (lambda s: shards_of(s)[1].unlink(), "missing_shard"),
        (lambda s: a_shared_shard(s).write_bytes(a_shared_shard(s).read_bytes()[:-1]), "shard_truncated"),
        (lambda s: a_shared_shard(s).write_bytes(a_shared_shard(s).read_bytes() + b"x"), "shard_trailing_bytes"),
        (lambda s: shutil.copy(shards_of(s)[0], s / "copy.safetensors"), "duplicate_tensor"),
        (lambda s: (s / "config.json").unlink(), "config_missing"),
        (lambda s: drop(s, ".layers.1.mlp.experts.0.up_proj.scales"), "lost_tensor"),
        (lambda s: (s / shards.INDEX).write_text("{"), "index_not_json"),
        (lambda s: (s / "x.safetensors").symlink_to("nowhere"), "source_incomplete"),
    ],
)
def test_a_damaged_source_stops_before_anything_is_written(pair: Path, fault: Callable[[Path], Any], class_: str) -> None:
    fault(pair / "source")
    assert class_ in hybrids.classes(hybrids.failure(pair))
    assert sorted(p.name for p in pair.iterdir()) == [".output.lock", "donor", "source"]


@pytest.mark.parametrize("donor_source", ["donor", "ftp://x/y", "", "hubs"])
def test_a_donor_that_is_nowhere_is_refused(pair: Path, donor_source: str) -> None:
    assert hybrids.classes(hybrids.failure(pair, donor_source=donor_source)) == ["bad_donor_source"]


def test_a_full_disk_is_told_before_anything_is_fetched(pair: Path) -> None:
    failed = hybrids.failure(pair, reserve_bytes=10**18)
    assert hybrids.classes(failed) == ["disk_full"] and "stay free" in failed.problems[0]["evidence"]
    assert not list(pair.glob(".output.building/*.safetensors"))


# --- a source that changes -------------------------------------------------------------------------------------------------------


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


def in_place(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")


def replace(path: Path) -> None:
    shutil.copy2(path, path.parent.parent / "copy")
    (path.parent.parent / "copy").rename(path)


@MODES
@pytest.mark.parametrize("stage", ["donor tensors", "shards", "check"])
@pytest.mark.parametrize(
    "change",
    [
        lambda s: append(s / MTP),
        lambda s: in_place(a_shared_shard(s)),
        lambda s: os.truncate(shards_of(s)[-1], 5000),
        lambda s: replace(s / MTP),
        lambda s: (s / "new.json").write_text("{}"),
        lambda s: (s / "README.md").unlink(),
        lambda s: append(s / "config.json"),
    ],
)
def test_a_source_that_changes_while_it_is_read_is_not_published(pair: Path, mode: str, stage: str, change: Callable[[Path], Any]) -> None:
    stage = "links" if (stage, mode) == ("shards", "overlay") else stage
    done: list[str] = []

    def seen(now: str, _done: float) -> None:
        if now == stage and not done:
            done.append(now)
            change(pair / "source")

    failed = hybrids.failure(pair, mode, seen=seen)
    # A source that is gone or cut is found by whoever reads it first; nothing of it is published in any case.
    assert done and set(hybrids.classes(failed)) <= {"source_changed", "source_unreadable", "shard_truncated", "shard_trailing_bytes"}
    assert not (pair / "output").exists()


@MODES
def test_a_source_that_changed_between_two_runs_is_built_anew(pair: Path, mode: str) -> None:
    class Killed(BaseException):
        pass

    def kill(now: str, _done: float) -> None:
        if now == "check":
            raise Killed

    with pytest.raises(Killed):
        hybrids.build(pair, mode, seen=kill)
    assert not (pair / "output").exists()
    path = a_shared_shard(pair / "source")
    tensors = shards.library(path)
    changed = next(name for name in tensors if name.endswith(".qweight"))
    tensors[changed] = (*tensors[changed][:2], os.urandom(len(tensors[changed][2])))
    shards.write(path, tensors, metadata={"format": "pt"})
    report = hybrids.build(pair, mode)
    assert report["resumed"] == 0
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")


def test_a_donor_whose_bytes_changed_between_two_runs_is_not_mixed(pair: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(now: str, _done: float) -> None:
        if now == "check":
            raise Killed

    with pytest.raises(Killed):
        hybrids.build(pair, seen=kill)
    building = pair / ".output.building"
    (building / ".dgxspark-donor.safetensors").unlink()  # so that it is fetched again, and now has other bytes of the same layout
    shutil.rmtree(pair / "donor")
    hybrids.pair(pair, seed=5)
    hybrids.build(pair)
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")


# --- what does not reach the disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_file_that_was_lost_on_its_way_to_the_disk_is_written_again(
    pair: Path, monkeypatch: pytest.MonkeyPatch, number: int, which: int
) -> None:
    """The kernel tells of lost pages once: a second fsync succeeds without them."""
    lost = shards_of(pair / "source")[which].name
    told: list[str] = []

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(lost) and not told:
            told.append(path)
            os.pwrite(descriptor, b"\0" * 4096, os.fstat(descriptor).st_size - 5000)
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        failed = hybrids.failure(pair)
    assert told and hybrids.classes(failed) == ["dest_failed" if number == errno.EIO else "disk_full"]
    assert lost in failed.problems[0]["evidence"] and not (pair / "output").exists()
    noted = json.loads((pair / ".output.building" / hybrid_folder.JOURNAL).read_text())["files"]
    assert lost not in noted and not (pair / ".output.building" / lost).exists()
    assert {p.name for p in shards_of(pair / "source")} - {lost} <= noted.keys()  # what reached the disk need not be written again
    hybrids.build(pair)
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")


# --- what survives a power cut ---------------------------------------------------------------------------------------------------


@MODES
def test_everything_is_on_disk_before_the_output_appears(pair: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real = os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(os, "rename", lambda a, b: events.append(f"{Path(a).name} > {Path(b).name}") or real(a, b))
    monkeypatch.setattr(range_copy, "PENDING_BYTES", 0)
    (pair / "source" / "sub").mkdir()
    (pair / "source" / "sub" / "x").write_text("x")
    manifest = hybrids.build(pair, mode)["manifest"]
    building = str(pair / ".output.building")
    published = events.index(".output.building > output")
    before = events[:published]
    assert events[published + 1] == str(pair) and {building, f"{building}/sub"} <= set(before)
    if mode == "materialize":
        assert {f"{building}/{name}" for name in manifest["files"]} - {f"{building}/{shards.INDEX}"} <= set(before)
    assert f"{building}/.dgxspark-donor.safetensors" in before
    # The manifest, like the index, is a file that was flushed under another name and then renamed; it is the last one.
    renamed = [event.rpartition(" > ")[2] for event in before if " > " in event]
    assert renamed[-1] == MANIFEST and shards.INDEX in renamed
    assert not any(event.startswith(f"{building}/.model") for event in before[before.index(next(e for e in before if MANIFEST in e)) :])


# --- resuming --------------------------------------------------------------------------------------------------------------------


def test_what_is_on_disk_is_not_made_twice(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_build, "JOURNAL_BYTES", 1)
    monkeypatch.setattr(range_copy, "PENDING_BYTES", 0)
    last = shards_of(pair / "source")[-1].name

    def fail(source: int, start: int, target: int, at: int, length: int) -> int:
        if os.readlink(f"/proc/self/fd/{source}").endswith(last):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(source, start, target, at, length)

    real = range_copy._in_kernel
    monkeypatch.setattr(range_copy, "_in_kernel", fail)
    failed = hybrids.failure(pair)
    assert hybrids.classes(failed) == ["disk_full"] and not (pair / "output").exists()
    monkeypatch.setattr(range_copy, "_in_kernel", real)
    shutil.rmtree(pair / "donor")  # not needed any more: all that was taken of it is there
    made = {path.name: path.stat().st_ino for path in (pair / ".output.building").iterdir()}
    report = hybrids.build(pair)
    now = {path.name: path.stat().st_ino for path in (pair / "output").iterdir()}
    kept = {name for name in now if made.get(name) == now[name]}
    assert {p.name for p in shards_of(pair / "source")[:-1]} <= kept and last not in kept
    assert report["resumed"] > sum((pair / "output" / name).stat().st_size for name in kept)
    assert report["written"] <= sum((pair / "output" / name).stat().st_size for name in now.keys() - kept)


def test_a_finished_folder_that_was_not_renamed_is_published(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hybrid_build.Building, "publish", stop)
        hybrids.build(pair)
    shutil.rmtree(pair / "donor")
    report = hybrids.build(pair)
    assert report["written"] == 0 and report["before"] == "complete: no (absent)\n"
    assert [p.name for p in (pair / "output").iterdir() if p.name.startswith(".")] == [MANIFEST]


def test_strays_of_an_interrupted_write_are_removed(pair: Path) -> None:
    def litter(now: str, _done: float) -> None:
        if now == "shards":
            for name in (".model.safetensors.index.json.abcdef", "old.safetensors"):
                (pair / ".output.building" / name).write_text("half")

    hybrids.build(pair, seen=litter)
    assert not list((pair / "output").glob(".model*")) and not (pair / "output" / "old.safetensors").exists()


# --- the check before publishing -------------------------------------------------------------------------------------------------


def check(pair: Path, mode: str, fault: Callable[[Path], Any]) -> list[str]:
    """Classes that the check finds in an output that was tampered with."""
    manifest = hybrids.build(pair, mode)["manifest"]
    source = read_checkpoint(pair / "source")
    over = hybrids.build(pair, "overlay", output=str(pair / "over"))["manifest"]
    donor = read_header(pair / "over" / over["overlay"])
    assert hybrid_check.output_problems(pair / "output", source, compare(source), donor, manifest["overlay"])[0] == []
    fault(pair / "output")
    problems, _ = hybrid_check.output_problems(pair / "output", source, compare(source), donor, manifest["overlay"])
    return [p["class"] for p in problems]


def rewrite(path: Path, change: Callable[[dict[str, shards.Raw]], Any]) -> None:
    tensors = shards.library(path)
    change(tensors)
    path.unlink()
    shards.write(path, tensors, metadata={"format": "pt"})


def self_consistent(output: Path, file: str, change: Callable[[dict[str, shards.Raw]], Any]) -> None:
    """Change a shard, and the index with it: internally everything is right."""
    rewrite(output / file, change)
    owner = {name: path for path, tensors in shards.contents(output).items() for name in tensors}
    total = sum(len(data) for tensors in shards.contents(output).values() for _, _, data in tensors.values())
    (output / shards.INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": owner}))


def a_scale(tensors: dict[str, shards.Raw]) -> str:
    return next(name for name in tensors if name.endswith("_scale_inv"))


@pytest.mark.parametrize(
    ("fault", "class_"),
    [
        # A tensor that is lost in a folder that is right in itself, a scale among them, and one that nobody knows.
        (lambda o: self_consistent(o, MTP, lambda t: t.pop("mtp.fc.weight")), "hybrid_lost_tensor"),
        (lambda o: (o / MTP).unlink() or self_consistent(o, shards_of(o)[0].name, lambda t: None), "hybrid_lost_tensor"),
        (lambda o: self_consistent(o, a_shared_shard(o).name, lambda t: t.pop(a_scale(t))), "fp8_scale_missing"),
        (lambda o: self_consistent(o, MTP, lambda t: t.update({"new": ("U8", [1], b"x")})), "hybrid_stray_tensor"),
        (lambda o: self_consistent(o, MTP, lambda t: t.update({"mtp.norm.weight": ("U8", [1], b"x")})), "hybrid_wrong_tensor"),
        (lambda o: shutil.copy(o.parent / "source" / a_shared_shard(o).name, o), "lost_tensor"),
        (lambda o: (o / shards.INDEX).write_text((o.parent / "source" / shards.INDEX).read_text()), "hybrid_wrong_index"),
        (lambda o: os.truncate(o / MTP, 5000), "shard_truncated"),
    ],
)
def test_a_wrong_output_is_not_published(pair: Path, fault: Callable[[Path], Any], class_: str) -> None:
    assert class_ in check(pair, "materialize", fault)


def test_a_failed_check_makes_the_next_run_build_all_of_it(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [{"class": "x", "evidence": "y", "remedy": "z", "severity": "error"}]
    with monkeypatch.context() as patch:
        patch.setattr(hybrid_check, "output_problems", lambda *_: (wrong, 0))
        assert hybrids.classes(hybrids.failure(pair)) == ["x"]
    assert not (pair / "output").exists()
    report = hybrids.build(pair)
    assert report["resumed"] == report["manifest"]["donor"]["bytes"]


# --- byte by byte ----------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    info, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def flip_tensor(path: Path, part: str) -> None:
    found: Header = read_header(path)
    name = next(name for name in found.tensors if part in name)
    flip(path, found.data_start + found.tensors[name].start)


@pytest.mark.parametrize(
    ("mode", "fault", "says"),
    [
        ("materialize", lambda o: flip_tensor(a_shared_shard(o), ".qweight"), "qweight differs from the source's"),
        ("materialize", lambda o: flip_tensor(a_shared_shard(o), "shared_expert.up_proj.weight"), "FP8 tensors are not what was fetched"),
        ("materialize", lambda o: flip_tensor(a_shared_shard(o), "weight_scale_inv"), "FP8 tensors are not what was fetched"),
        ("materialize", lambda o: flip(o / MTP, -1), f"{MTP}: differs from the source's"),
        ("materialize", lambda o: flip(o / "README.md", 0), "README.md: differs from the source's"),
        ("materialize", lambda o: flip(o / shards.INDEX, -3), "not the index that was written"),
        ("overlay", lambda o: flip(o / "zz-fp8-overlay.safetensors", -1), "FP8 tensors are not what was fetched"),
        ("overlay", lambda o: flip(o / shards.INDEX, -3), "not the index that was written"),
    ],
)
def test_a_full_look_finds_a_flipped_bit_that_times_do_not_show(pair: Path, mode: str, fault: Callable[[Path], Any], says: str) -> None:
    hybrids.snapshot(pair / "source")
    hybrids.build(pair, mode)
    whole = hybrids.build(pair, mode, verify="full")
    assert whole["after"] == "" and whole["read"] > 0 and whole["written"] == 0
    fault(pair / "output")
    assert hybrids.build(pair, mode)["after"] == ""
    report = hybrids.build(pair, mode, verify="full")
    assert says in report["before"] and report["after"]
    assert shards.by_index(pair / "output") == hybrids.expected(pair / "source", pair / "donor")
    assert hybrids.build(pair, mode, verify="full")["after"] == ""


@MODES
@pytest.mark.parametrize("file", [MTP, "config.json", "a shard"])
@pytest.mark.parametrize("output_too", [False, True])
def test_a_rotten_source_is_blamed_and_nothing_built_from_it(pair: Path, mode: str, file: str, output_too: bool) -> None:
    name = a_shared_shard(pair / "source").name if file == "a shard" else file
    hybrids.snapshot(pair / "source")
    hybrids.build(pair, mode)
    good = hybrids.expected(pair / "source", pair / "donor")
    if file == "a shard":
        flip_tensor(pair / "source" / name, ".qweight")
    else:
        flip(pair / "source" / name, -2)
    if output_too:  # of which something else is damaged: building it anew would bring the rotten bytes in
        flip(pair / "output" / "README.md", 0)
    before = shards.tree(pair / "output")
    failed = hybrids.failure(pair, mode, verify="full")
    assert hybrids.classes(failed) == ["source_damaged"] and f"{name} has SHA-256" in failed.problems[0]["evidence"]
    assert shards.tree(pair / "output") == before and not (pair / "output.previous").exists()
    assert not (pair / ".output.building").exists()
    assert mode == "overlay" or shards.by_index(pair / "output") == good


@pytest.mark.parametrize("noted", [False, True])
def test_a_full_look_reads_the_links_of_an_overlay_too(pair: Path, monkeypatch: pytest.MonkeyPatch, noted: bool) -> None:
    if noted:
        hybrids.snapshot(pair / "source")
    hybrids.build(pair, "overlay")
    total = sum(path.stat().st_size for path in (pair / "source").glob("*.safetensors"))
    assert hybrids.build(pair, "overlay", verify="full")["read"] > total
    real, inode = os.pread, (pair / "source" / MTP).stat().st_ino

    def broken(descriptor: int, count: int, at: int) -> bytes:
        if os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, count, at)

    monkeypatch.setattr(os, "pread", broken)
    failed = hybrids.failure(pair, "overlay", verify="full")
    assert hybrids.classes(failed) == ["source_unreadable"] and MTP in failed.problems[0]["evidence"]


@pytest.mark.parametrize("damaged", ["source", "output"])
@pytest.mark.parametrize("file", [MTP, "README.md"])
def test_where_nothing_tells_which_is_right_nothing_is_replaced(pair: Path, damaged: str, file: str) -> None:
    hybrids.build(pair)
    flip(pair / damaged / file, -1)
    before = [shards.tree(pair / name) for name in ("source", "output")]
    failed = hybrids.failure(pair, verify="full")
    assert hybrids.classes(failed) == ["source_differs"] and file in failed.problems[0]["evidence"]
    assert [shards.tree(pair / name) for name in ("source", "output")] == before
    assert sorted(p.name for p in pair.iterdir()) == [".output.lock", "donor", "output", "source"]


# --- online ----------------------------------------------------------------------------------------------------------------------


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def packed(folder: Path) -> None:
    path = a_shared_shard(folder)
    name = next(n for n in shards.header(path) if "layers.1.mlp.shared_expert.up_proj" in n)
    rewrite(path, lambda t: t.update({name: ("I8", [8], b"12345678")}))


@pytest.mark.parametrize(
    ("fault", "classes"),
    [
        (lambda s: None, []),
        (lambda s: edit_config(s, lambda c: c.pop("quantization_config")), ["online_not_quantised"]),
        (lambda s: edit_config(s, lambda c: c.update(quantization_config={"bits": 4})), ["online_not_quantised"]),
        (lambda s: edit_config(s, lambda c: c["text_config"].update(shared_expert_intermediate_size=0)), ["online_no_shared_experts"]),
        (packed, ["online_not_plain"]),
        (
            lambda s: (packed(s), edit_config(s, lambda c: c.pop("quantization_config"))),
            ["online_not_plain", "online_not_quantised"],
        ),
    ],
)
def test_what_vllm_can_quantise_while_it_loads(pair: Path, fault: Callable[[Path], Any], classes: list[str]) -> None:
    fault(pair / "source")
    before = shards.tree(pair)
    assert [p["class"] for p in hybrid_plan.online_problems(pair / "source")] == classes
    assert shards.tree(pair) == before


def test_online_needs_a_sound_checkpoint(pair: Path) -> None:
    shards_of(pair / "source")[0].unlink()
    with pytest.raises(JobFailure):
        hybrid_plan.online_problems(pair / "source")


# --- generated checkpoints -------------------------------------------------------------------------------------------------------

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "F16": 16, "BF16": 16, "I32": 32, "F32": 32,
    "I64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip
SHAPES = st.one_of(st.just([]), st.just([0]), st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(1, 9), min_size=2, max_size=2))
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).map(lambda s: f"x.{s}")


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    """Of a few layers; tensors of any type, shape and order, spread over some shards."""
    noise = random.Random(draw(st.integers(0, 2**32)))
    layers, files = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    source: dict[str, shards.Raw] = {}
    donor: dict[str, shards.Raw] = {}
    for layer in range(layers):
        for part in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.shared_expert.{part}_proj.weight"
            rows, columns = draw(st.sampled_from([1, 3, 127, 128, 129])), draw(st.sampled_from([1, 5, 128, 130]))
            source[name] = (draw(st.sampled_from(["BF16", "F16"])), [rows, columns], noise.randbytes(2 * rows * columns))
            donor[name] = ("F8_E4M3", [rows, columns], noise.randbytes(rows * columns))
            scales = [-(-rows // 128), -(-columns // 128)]
            kind = draw(st.sampled_from(["F32", "BF16", "F8_E8M0"]))
            donor[f"{name}_scale_inv"] = (kind, scales, noise.randbytes(scales[0] * scales[1] * BITS[kind] // 8))
        for part in "qkvo":
            donor[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = ("F8_E4M3", [1, 1], b"x")
            donor[f"model.layers.{layer}.self_attn.{part}_proj.weight_scale_inv"] = ("F32", [1, 1], b"abcd")
    for name in draw(st.lists(NAMES, max_size=8, unique=True)):
        kind, shape = draw(st.sampled_from([*BITS])), draw(SHAPES)
        shape = [*shape, 2] if kind == "F4" else shape
        count = BITS[kind]
        for size in shape:
            count *= size
        if kind != "F8_E4M3" or not name.endswith("weight"):
            source[name] = (kind, shape, noise.randbytes(count // 8))

    def split(tensors: dict[str, shards.Raw], pattern: str) -> dict[str, Any]:
        parts: dict[str, list[str]] = {}
        for name in tensors:
            parts.setdefault(pattern.format(draw(st.integers(1, files))), []).append(name)
        return {
            file: ({n: tensors[n] for n in names}, draw(st.permutations(names)), draw(METADATA), draw(st.integers(0, 9)))
            for file, names in parts.items()
        }

    source_files, donor_files = split(source, "s-{}.safetensors"), split(donor, "d_{}.safetensors")
    return {"layers": layers, "source": source, "donor": donor, "source files": source_files, "donor files": donor_files}


METADATA = st.sampled_from([None, {}, {"format": "pt"}, {"format": "pt", "note": "ä"}, {"a": "b"}])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(checkpoint=checkpoints(), mode=st.sampled_from(["materialize", "overlay"]), indexed=st.booleans())
def test_any_checkpoint_comes_out_as_the_library_reads_it(tmp_path: Path, checkpoint: dict[str, Any], mode: str, indexed: bool) -> None:
    folder = tmp_path / "generated"
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("source", "donor"):
        (folder / part).mkdir(parents=True)
        for file, (tensors, order, metadata, spaces) in checkpoint[f"{part} files"].items():
            shards.write(folder / part / file, tensors, order, metadata, spaces)
        text = {"num_hidden_layers": checkpoint["layers"], "shared_expert_intermediate_size": 1}
        (folder / part / "config.json").write_text(json.dumps(text))
    if indexed:
        owner = {name: file for file, (tensors, *_) in checkpoint["source files"].items() for name in tensors}
        (folder / "source" / shards.INDEX).write_text(json.dumps({"weight_map": owner}))
    before = shards.tree(folder / "source")
    report = hybrids.build(folder, mode)
    taken = {name: raw for name, raw in checkpoint["donor"].items() if ".shared_expert." in name}
    assert shards.by_index(folder / "output") == {**checkpoint["source"], **taken}
    assert shards.tree(folder / "source") == before
    assert (report["manifest"]["replaced"], report["manifest"]["unplaced"]) == (3 * checkpoint["layers"], 8 * checkpoint["layers"])
    for file, (tensors, _, metadata, _) in checkpoint["source files"].items():
        made = read_header(folder / "output" / file)
        if mode == "materialize" and tensors.keys() & taken.keys():
            assert made.data_start % 8 == 0 and made.metadata == {"format": "pt", **(metadata or {})}
            for tensor in made.tensors.values():
                assert (made.data_start + tensor.start) * 8 % BITS[tensor.dtype] == 0
        else:
            assert (folder / "output" / file).read_bytes() == (folder / "source" / file).read_bytes()


def test_memory_does_not_grow_with_the_size_of_the_tensors(pair: Path) -> None:
    # 300 MB of zeros, without blocks on the disk: far more than the build may hold.
    path = pair / "source" / "huge.safetensors"
    shards.write(path, {"huge": ("U8", [0], b"")})
    raw = json.dumps({"huge": {"dtype": "U8", "shape": [300_000_000], "data_offsets": [0, 300_000_000]}}).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + 300_000_000)
    child = os.fork()
    if not child:
        try:
            import resource

            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            hybrids.build(pair)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            os._exit(0 if grown < 64_000 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_report_of_another_shape_is_not_taken_for_one(pair: Path) -> None:
    good = hybrid_build.work(hybrids.spec(pair), Progress(pair / "progress"))
    assert hybrid_build.is_report(good) and len(json.dumps(good)) < 1000
    for name in good:
        assert not hybrid_build.is_report({k: v for k, v in good.items() if k != name})
        assert not hybrid_build.is_report({**good, name: None})
    assert not hybrid_build.is_report({**good, "manifest": {**good["manifest"], "replaced": "12"}})


def test_what_a_person_should_know_is_in_the_report(pair: Path) -> None:
    for path in (pair / "donor").glob("*.safetensors"):
        rewrite(path, lambda t: t.update({n: ("F32", r[1], r[2] * 2) for n, r in t.items() if n.endswith("dt_bias")}))
    report = hybrids.build(pair)
    assert len(report["notes"]) == 1 and "3 tensors of another type in the donor" in report["notes"][0]
    assert hybrids.build(pair)["notes"] == []


def test_progress_goes_through_its_stages(pair: Path) -> None:
    watched = hybrids.Watched(pair / "progress", lambda _stage, _done: None)
    hybrid_build.build(hybrids.spec(pair), watched)
    assert watched.stages == ["donor headers", "donor tensors", "shards", "check"]
    again: Progress = hybrids.Watched(pair / "progress", lambda _stage, _done: None)
    hybrid_build.build(hybrids.spec(pair, "overlay"), again)
    assert again.stages == ["links", "donor headers", "donor tensors", "files", "check"]  # type: ignore[attr-defined]
