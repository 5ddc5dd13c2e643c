# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Index against headers: every fault has its class, and the mended index follows from the headers alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import synthetic_checkpoint as synthetic
from ansible_collections.dgxspark.vllm.plugins.module_utils.problems import errors
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_compare import (
    Report,
    compare,
    difference,
    missing_numbers,
    natural_key,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_header import BadFile, Header, Tensor, parse_json
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_index import Checkpoint, index_text, parse_index
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_mtp import promised_mtp_layers
from hypothesis import given, settings
from hypothesis import strategies as st

S1, S2, S3 = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def shard(name: str, tensors: dict[str, int] | list[str], **metadata: str) -> Header:
    """A header in memory. tensors: names to bytes, or just names of one byte each."""
    sizes = tensors if isinstance(tensors, dict) else dict.fromkeys(tensors, 1)
    at, entries = 0, {}
    for tensor, size in sizes.items():
        entries[tensor] = Tensor("U8", (size,), at, at + size)
        at += size
    return Header(name, entries, metadata or {"format": "pt"}, 100, 100 + at)


def checkpoint(
    shards: dict[str, dict[str, int] | list[str]], index: dict[str, Any] | None, config: dict[str, Any] | None = None, **metadata: Any
) -> Checkpoint:
    found = Checkpoint(headers={name: shard(name, tensors) for name, tensors in shards.items()}, config=config or {})
    if index is not None:
        document = {**({"metadata": metadata} if metadata else {}), "weight_map": index}
        found.index_exists = True
        found.index, found.problems = parse_index(json.dumps(document).encode())
    return found


def classes(report: Report) -> list[str]:
    return [p["class"] for p in report.problems]


def mendable(report: Report) -> list[str]:
    return [p["class"] for p in report.mendable]


def evidence(report: Report, class_: str) -> str:
    (fault,) = (p for p in [*report.problems, *report.mendable] if p["class"] == class_)
    return fault["evidence"]


# ------------------------------------------------------------------------------------------------------------ index to disk


def test_a_listed_shard_is_missing() -> None:
    report = compare(checkpoint({S1: ["a"]}, {"a": S1, "b": S2, "c": S2}))
    assert report.missing_shards == [S2]
    assert classes(report) == ["missing_shard"] and report.mended is None
    assert evidence(report, "missing_shard") == f"model.safetensors.index.json lists 1 file not in the folder: {S2} (2 tensors, such as b)"
    assert "incomplete" in report.problems[0]["remedy"]


def test_shards_are_what_the_index_names_whatever_their_names() -> None:
    names = [f"layers-{number}.safetensors" for number in range(66)]
    shards = {name: [name] for name in names if name != "layers-22.safetensors"}
    report = compare(checkpoint(dict(shards), {name: name for name in names}))
    assert report.missing_shards == ["layers-22.safetensors"]


def test_an_index_of_another_split_is_told_from_an_incomplete_download() -> None:
    report = compare(checkpoint({"x.safetensors": ["a"], "y.safetensors": ["b"]}, {"a": S1, "b": S2}))
    assert report.missing_shards == [S1, S2] and report.mended is None
    assert "all their tensors are in other files" in evidence(report, "missing_shard")
    assert "delete it" in report.problems[0]["remedy"]


@pytest.mark.parametrize("tensor", ["x.weight", "x.weight_scale_inv", "model.layers.0.mlp.experts.7.down_proj.scales"])
@pytest.mark.parametrize(
    ("file", "class_", "says"),
    [
        (None, "unlisted_tensor", "1 tensor of listed files not in model.safetensors.index.json: {} in " + S1),
        (S3, "missing_shard", f"model.safetensors.index.json lists 1 file not in the folder: {S3} (1 tensor, such as {{}})"),
        (S2, "lost_tensor", "1 tensor in model.safetensors.index.json whose file is present, but the file's header lacks it, and so do all"
                            f" other files that can be read: {{}} (not in {S2})"),
    ],
)  # fmt: skip
def test_one_missing_tensor_is_diagnosed_three_ways(tensor: str, file: str | None, class_: str, says: str) -> None:
    shards = {S1: ["a", *([tensor] if file is None else [])], S2: ["b"]}
    report = compare(checkpoint(dict(shards), {"a": S1, "b": S2, **({tensor: file} if file else {})}))
    assert [p["class"] for p in [*report.problems, *report.mendable]] == [class_]
    assert evidence(report, class_) == says.format(tensor)
    assert (report.mended is None) is (file is not None)


def test_all_three_at_once() -> None:
    shards = {S1: ["a", "new"], S2: ["b"]}
    report = compare(checkpoint(dict(shards), {"a": S1, "b": S2, "absent.scale": S3, "lost.scale": S2}))
    assert classes(report) == ["missing_shard", "lost_tensor"] and mendable(report) == ["unlisted_tensor"]
    assert report.lost == ["lost.scale"] and report.mended is None


def test_an_entry_that_names_the_wrong_file_is_corrected_when_one_other_has_the_tensor() -> None:
    report = compare(checkpoint({S1: ["a"], S2: ["b", "mtp.x"]}, {"a": S1, "b": S1, "mtp.x": S1}))
    assert report.corrected == {"b": (S1, S2), "mtp.x": (S1, S2)}
    assert classes(report) == [] and mendable(report) == ["wrong_owner"]
    assert report.mended and report.mended["weight_map"] == {"a": S1, "b": S2, "mtp.x": S2}


def test_an_entry_that_names_the_wrong_file_is_not_corrected_when_two_others_have_the_tensor() -> None:
    report = compare(checkpoint({S1: ["a"], S2: ["b"], S3: ["b"]}, {"a": S1, "b": S1}))
    assert classes(report) == ["duplicate_tensor"] and not report.corrected and report.mended is None


# ------------------------------------------------------------------------------------------------------------ disk to index


def test_duplicates_are_reported_with_the_indexed_owner_and_never_picked() -> None:
    found = checkpoint({S1: {"w1": 1, "w2": 2}, S2: {"w2": 30, "w3": 400}}, {"w1": S1, "w2": S2, "w3": S2}, total_size=431)
    report = compare(found)
    assert report.duplicates == {"w2": [S1, S2]}
    assert (
        evidence(report, "duplicate_tensor")
        == f"1 tensor in more than one file: w2 in {S1} and {S2}, of different type or shape (the index names {S2})"
    )
    assert classes(report) == ["duplicate_tensor"] and report.mended is None
    assert report.total_size == 431 and mendable(report) == []


def test_duplicates_in_files_that_are_not_listed() -> None:
    report = compare(checkpoint({S1: ["a"], "copy.safetensors": ["a"], "x.safetensors": ["a", "b"]}, {"a": S1}))
    assert report.duplicates == {"a": [S1, "copy.safetensors", "x.safetensors"]}
    assert report.unlisted_files == {"copy.safetensors": 0, "x.safetensors": 1}
    assert report.mended is None
    report = compare(checkpoint({S1: ["a"], S2: ["a"]}, None))
    assert "the index names none of them" in evidence(report, "duplicate_tensor") and report.mended is None


@pytest.mark.parametrize(
    ("files", "last"),
    [
        (["model-00039-of-00040.safetensors", "model-00040-of-00040.safetensors"], 1),
        (["model-9.safetensors", "model-10.safetensors"], 1),  # digits as numbers
        (["layers-2.safetensors", "layers-10.safetensors", "layers-1.safetensors"], 1),
        (["a_overlay.safetensors", S1], 1),
        (["Z_overlay.safetensors", S1], 1),  # by code point: capital letters come first
        ([S1, "model_extra_tensors.safetensors"], 1),
        ([S1, "z_overlay.safetensors"], 1),
        (["z_2.safetensors", "z_10.safetensors"], 1),
        (["model_extra_tensors.safetensors", "z_2.safetensors"], 1),
        (["1.safetensors", "a.safetensors"], 1),
    ],
)
def test_the_last_file_is_the_one_that_a_loader_reads_last(files: list[str], last: int) -> None:
    assert sorted(files, key=natural_key)[-1] == files[last]
    shards = {file: {"w": 2, f"only.{file}": 1} for file in files}
    for order in (files, files[::-1]):
        for first in files:
            index = {"w": first, **{f"only.{file}": file for file in files}}
            found = checkpoint({file: shards[file] for file in order}, index)
            assert classes(compare(found)) == ["duplicate_tensor"] and compare(found).mended is None
            report = compare(found, last_wins=True)
            assert report.owner["w"] == files[last] and report.duplicates == {"w": order}
            assert [(p["class"], p["severity"]) for p in report.problems] == [("duplicate_tensor", "warning")]
            assert f"(kept: {files[last]})" in evidence(report, "duplicate_tensor") and "fastsafetensors" in report.problems[0]["remedy"]
            if first == files[last]:
                assert report.mended is None and not report.mendable
                continue
            assert mendable(report) == ["not_last_owner"] and report.corrected == {"w": (first, files[last])}
            assert f"w is read from {files[last]} after {first}" in evidence(report, "not_last_owner")
            assert report.mended and report.mended["weight_map"] == {**index, "w": files[last]}
            assert report.mended["metadata"] == {"total_size": 2 + len(files)}


@pytest.mark.parametrize("names", [("x1.safetensors", "x01.safetensors"), ("a-7-b.safetensors", "a-007-b.safetensors")])
def test_two_files_of_which_none_is_the_last(names: tuple[str, str]) -> None:
    report = compare(checkpoint({name: ["w"] for name in names}, {"w": names[0]}), last_wins=True)
    assert [(p["class"], p["severity"]) for p in report.problems] == [("duplicate_tensor", "error")] and report.mended is None


def test_the_last_of_several_that_are_not_listed() -> None:
    shards = {S1: {"a": 1}, S2: {"a": 20, "b": 1}, "copy.safetensors": {"b": 300}}
    report = compare(checkpoint(dict(shards), {"a": S1}), last_wins=True)
    assert report.mended and report.mended["weight_map"] == {"a": S2, "b": S2} and report.total_size == 21
    assert report.unlisted_files == {S2: 1, "copy.safetensors": 0} and not report.unlisted_tensors
    assert mendable(report) == ["unlisted_file", "not_last_owner"]
    before, after = difference(checkpoint(dict(shards), {"a": S1}), report)
    assert "wrong: 1\n  a: " + S1 in before and "corrected: 1\n  a: " + S2 in after and "added: 1\n  b: " + S2 in after
    report = compare(checkpoint(dict(shards), None), last_wins=True)
    assert report.missing_shards == [S3] and report.mended is None  # no other fault is let through


def test_the_two_kinds_of_unlisted_are_kept_apart() -> None:
    report = compare(checkpoint({S1: ["a", "inside"], "extra.safetensors": ["x", "y"]}, {"a": S1}))
    assert report.unlisted_tensors == ["inside"]
    assert report.unlisted_files == {"extra.safetensors": 2}
    assert mendable(report) == ["unlisted_tensor", "unlisted_file"] and not report.problems


@pytest.mark.parametrize(
    "name",
    [
        "mtp.safetensors",
        "model-mtp-of-00005.safetensors",
        "model_extra_tensors.safetensors",
        "model.mtp.safetensors",
        S3,
        "zzz.safetensors",
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_tensors_of_a_file_of_any_name_are_listed_with_their_true_owner(name: str, listed: bool) -> None:
    shards = {S1: {"a": 4, "mtp.in_shard": 1}, S2: {"b": 8}, name: {f"mtp.{number}": 2 for number in range(31)}}
    index = {"a": S1, "b": S2, **(dict.fromkeys(shards[name], name) if listed else {})}
    report = compare(checkpoint(dict(shards), index, total_size=12, total_parameters=77), require_mtp=True)
    assert report.mended is not None and not report.problems
    assert report.mended["weight_map"] == {tensor: file for file, tensors in shards.items() for tensor in tensors}
    assert report.mended["metadata"] == {"total_size": 4 + 1 + 8 + 62, "total_parameters": 77}
    assert len(report.mtp_tensors) == 32
    assert report.unlisted_files == ({} if listed else {name: 31})
    assert report.unlisted_tensors == ["mtp.in_shard"]


def test_a_sound_checkpoint_has_no_finding_even_with_uneven_shards() -> None:
    report = compare(checkpoint({S1: {"a": 5_000_000_000}, S2: {"b": 5_000_000_000}, S3: {"c": 2}}, {"a": S1, "b": S2, "c": S3}))
    assert (report.problems, report.mendable, report.mended) == ([], [], None)
    assert report.total_size == 10_000_000_002


# ----------------------------------------------------------------------------------------------------------------- its source


@pytest.mark.parametrize(
    ("source", "output", "lost"),
    [
        (["a", "b", "lm_head.weight", "mtp.x"], ["a"], ["b", "lm_head.weight", "mtp.x"]),
        (["a", "b"], ["b", "a", "new"], []),
        # A quantiser renames what it packs.
        (["x.weight"], ["x.qweight", "x.scales"], []),
        (["x.weight"], ["x.weight_packed", "x.weight_scale"], []),
        (["x.qweight", "x.scales"], ["x.qweight"], ["x.scales"]),
        (["x.weight", "x.bias"], ["x.qweight"], ["x.bias"]),
        (["weight"], ["qweight"], ["weight"]),
    ],
)
def test_an_index_that_is_sound_in_itself_may_have_lost_tensors(source: list[str], output: list[str], lost: list[str]) -> None:
    there = checkpoint({S1: source}, dict.fromkeys(source, S1))
    here = checkpoint({S1: output}, dict.fromkeys(output, S1))
    assert not compare(here).problems
    report = compare(here, source=there)
    assert classes(report) == (["lost_from_source"] if lost else [])
    if lost:
        says = f"{len(lost)} tensor{'s' if len(lost) > 1 else ''} of the source that no file here has: {', '.join(lost)}"
        assert evidence(report, "lost_from_source") == says


def test_what_the_source_only_lists_and_what_is_missing_here_anyway() -> None:
    there = checkpoint({S1: ["a"]}, {"a": S1, "b": S2, "c": S2})
    here = checkpoint({S1: ["a"]}, {"a": S1, "b": S2})
    report = compare(here, source=there)
    assert classes(report) == ["missing_shard", "lost_from_source"] and evidence(report, "lost_from_source").endswith("has: c")


# ------------------------------------------------------------------------------------------------------------- total_size


@pytest.mark.parametrize("value", [12 + 200, 0, 13, 12.0, "12", None, True, [12]])
def test_a_wrong_total_size_is_a_warning_and_is_mended(value: Any) -> None:
    report = compare(checkpoint({S1: {"a": 4}, S2: {"b": 8}}, {"a": S1, "b": S2}, total_size=value, note="kept"))
    assert not report.problems
    assert [(p["class"], p["severity"]) for p in report.mendable] == [("wrong_total_size", "warning")]
    assert report.mended and report.mended["metadata"] == {"total_size": 12, "note": "kept"}


@pytest.mark.parametrize("metadata", [{}, {"note": "no total_size"}, {"total_size": 12}])
def test_a_missing_total_size_alone_is_no_reason_to_write(metadata: dict[str, Any]) -> None:
    report = compare(checkpoint({S1: {"a": 4}, S2: {"b": 8}}, {"a": S1, "b": S2}, **metadata))
    assert (report.problems, report.mendable, report.mended) == ([], [], None)


def test_other_keys_of_the_index_survive() -> None:
    found = checkpoint({S1: ["a", "b"]}, {"a": S1})
    found.index, _ = parse_index(json.dumps({"weight_map": {"a": S1}, "metadata": None, "written_by": {"x": [1]}}).encode())
    report = compare(found)
    assert report.mended == {"written_by": {"x": [1]}, "metadata": {"total_size": 2}, "weight_map": {"a": S1, "b": S1}}


# ------------------------------------------------------------------------------------------------------------- no index at all


def test_a_single_shard_needs_no_index() -> None:
    report = compare(checkpoint({"model.safetensors": ["a", "mtp.x"]}, None), require_mtp=True)
    assert (report.problems, report.mendable, report.mended) == ([], [], None)
    assert report.owner == dict.fromkeys(["a", "mtp.x"], "model.safetensors")


@pytest.mark.parametrize("names", [("model.safetensors", "mtp.safetensors"), (S1, S2, S3), ("layers-0.safetensors", "x.safetensors")])
def test_several_shards_get_an_index(names: tuple[str, ...]) -> None:
    report = compare(checkpoint({name: {f"t.{name}": 3} for name in names}, None))
    assert mendable(report) == ["missing_index"] and not report.problems
    assert report.mended == {"metadata": {"total_size": 3 * len(names)}, "weight_map": {f"t.{name}": name for name in sorted(names)}}


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ([S1], [S2, S3]),
        ([S1, S3], [S2]),
        ([S1, S2, S3], []),
        (["m-00000-of-00002.safetensors", "m-00001-of-00002.safetensors"], []),
        (["m-00000-of-00002.safetensors"], ["m-00001-of-00002.safetensors"]),
        (["m-1-of-2.safetensors"], ["m-2-of-2.safetensors"]),
        (["model-00001-of-00001.safetensors"], []),
        (["model-mtp-of-00005.safetensors", "model.safetensors"], []),
    ],
)
def test_without_an_index_the_numbers_in_the_names_tell_what_is_missing(names: list[str], missing: list[str]) -> None:
    assert missing_numbers(names) == missing
    report = compare(checkpoint({name: [name] for name in names}, None))
    assert report.missing_shards == missing
    assert classes(report) == (["missing_shard"] if missing else [])


def test_an_empty_folder() -> None:
    report = compare(checkpoint({}, None))
    assert classes(report) == ["no_shards"]


def test_files_without_any_tensor_get_no_index() -> None:
    report = compare(checkpoint({S1: [], S2: [], S3: []}, None))
    assert classes(report) == ["no_tensors"] and not report.mendable and report.mended is None


def test_an_unreadable_index_is_not_replaced_by_a_new_one() -> None:
    found = checkpoint({S1: ["a"], S2: ["b"], S3: ["c"]}, None)
    found.index_exists = True
    with pytest.raises(BadFile) as refusal:
        parse_index(b"{")
    found.problems = refusal.value.problems
    report = compare(found)
    assert classes(report) == ["index_not_json"] and report.mended is None


# ---------------------------------------------------------------------------------------------------------------- damaged shards


def test_damaged_shards_do_not_raise_false_alarms() -> None:
    found = checkpoint({S1: ["a"]}, {"a": S1, "mtp.x": S2}, {"mtp_num_hidden_layers": 1})
    with pytest.raises(BadFile) as refusal:
        parse_index(b"[]")
    found.damaged[S2] = refusal.value.problems
    report = compare(found, require_mtp=True)
    assert classes(report) == ["index_not_object"] and not report.missing_shards and report.mended is None


# ------------------------------------------------------------------------------------------------------------------------- MTP


@pytest.mark.parametrize(
    "config",
    [
        {"mtp_num_hidden_layers": 1},
        {"text_config": {"mtp_num_hidden_layers": 2}},
        {"num_nextn_predict_layers": 1},
        {"text_config": {"num_nextn_predict_layers": 1}},
        {"mtp_num_hidden_layers": 0},
        {},
    ],
)
@pytest.mark.parametrize("require", [False, True])
def test_mtp_that_the_config_promises_and_no_shard_has(config: dict[str, Any], require: bool) -> None:
    where, count = promised_mtp_layers(config)
    report = compare(checkpoint({S1: ["a", "b"]}, {"a": S1, "b": S1}, config, total_size=2, total_parameters=2), require_mtp=require)
    found = [(p["class"], p["severity"]) for p in report.problems]
    assert found == ([("mtp_missing", "error")] if require else [("mtp_missing", "warning")] if where else [])
    assert (report.mtp_layers.expected, report.mtp_layers.found) == (count, 0)
    if found:
        assert "2 tensors in 1 file" in evidence(report, "mtp_missing") and where in evidence(report, "mtp_missing")


MODEL = synthetic.Model(experts=2, mtp_layers=2)
LAYERS = [tensor.name for tensor in synthetic.source_mtp_tensors(MODEL)]


@pytest.mark.parametrize("require", [False, True])
@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ([], ""),
        (["mtp.fc.weight"], "2 layers found: beside the layers without fc"),
        (["mtp.layers.0.self_attn.q_norm.weight", "mtp.layers.1.mlp.experts.1.up_proj.weight"],
         "layer 0 without self_attn.q_norm; layer 1 without mlp.experts.1.up_proj"),
        ([name for name in LAYERS if ".layers.1." in name], "1 layer found: layer 1 without everything"),
    ],
)  # fmt: skip
def test_mtp_layers_that_are_not_whole(gone: list[str], says: str, require: bool) -> None:
    names = [name for name in LAYERS if name not in gone]
    report = compare(checkpoint({S1: ["a"], S2: names}, {"a": S1}, MODEL.config({})), require_mtp=require)
    assert [(p["class"], p["severity"]) for p in report.problems] == (
        [("mtp_incomplete", "error" if require else "warning")] if gone else []
    )
    assert (report.mended is None) is bool(gone and require)
    if gone:
        assert says in evidence(report, "mtp_incomplete")
        assert "promises 2 MTP layers (text_config.mtp_num_hidden_layers)" in evidence(report, "mtp_incomplete")


def test_mtp_tensors_that_are_missing_for_another_reason_are_not_missed_twice() -> None:
    config = MODEL.config({})
    listed = {"a": S1, **dict.fromkeys(LAYERS, S2)}
    assert classes(compare(checkpoint({S1: ["a"]}, listed, config), require_mtp=True)) == ["missing_shard"]
    # One of them in a lost place.
    report = compare(checkpoint({S1: ["a"], S2: LAYERS[1:]}, listed, config), require_mtp=True)
    assert classes(report) == ["lost_tensor"] and report.lost == LAYERS[:1]


# -------------------------------------------------------------------------------------------------------------------- warnings


def test_metadata_without_format_and_files_without_tensors_are_warnings() -> None:
    found = checkpoint({S1: ["a"], S2: []}, {"a": S1})
    found.headers[S1] = shard(S1, ["a"], format="mlx")
    report = compare(found)
    assert [(p["class"], p["severity"]) for p in report.problems] == [("format_missing", "warning"), ("no_tensors", "warning")]
    assert S1 in evidence(report, "format_missing") and S2 in evidence(report, "no_tensors")


# ---------------------------------------------------------------------------------------------------------------- the difference


def test_the_difference_is_short_however_much_is_added() -> None:
    found = checkpoint({S1: ["a"], "mtp.safetensors": [f"mtp.{number:03}" for number in range(785)]}, {"a": S1}, total_size=1)
    before, after = difference(found, compare(found))
    assert before == "tensors: 1\nfiles: 1\ntotal_size: 1\n"
    assert after.startswith("tensors: 786\nfiles: 2\ntotal_size: 786\nadded: 785\n  mtp.000: mtp.safetensors\n")
    assert after.endswith("  mtp.009: mtp.safetensors\n  and 775 more\n") and len(after.splitlines()) == 15


def test_the_difference_of_corrections() -> None:
    found = checkpoint({S1: ["a"], S2: ["b"]}, {"a": S1, "b": S1}, total_size=2)
    before, after = difference(found, compare(found))
    assert before == f"tensors: 2\nfiles: 1\ntotal_size: 2\nwrong: 1\n  b: {S1}\n"
    assert after == f"tensors: 2\nfiles: 2\ntotal_size: 2\ncorrected: 1\n  b: {S2}\n"


def test_the_difference_of_a_new_index_and_of_none() -> None:
    found = checkpoint({S1: ["a"], S2: ["b"], S3: ["c"]}, None)
    assert difference(found, compare(found))[0] == ""
    found = checkpoint({S1: ["a"]}, {"a": S1})
    assert difference(found, compare(found)) == ("", "")


# ----------------------------------------------------------------------------------------------------------------------- at random

FILES = ["a.safetensors", "b.safetensors", "mtp.safetensors"]
NAMES = ["t1", "t2", "mtp.t3", "t4"]


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FILES), st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)), min_size=1),
    st.none() | st.dictionaries(st.sampled_from(NAMES), st.sampled_from(FILES), min_size=1),
    st.sampled_from([{}, {"total_size": 7}, {"note": 1}]),
)
def test_a_mended_index_is_right_and_needs_no_further_mending(
    shards: dict[str, dict[str, int]], index: dict[str, str] | None, metadata: dict[str, Any]
) -> None:
    found = checkpoint(dict(shards), index, **metadata)
    report = compare(found)
    owners = {tensor: [file for file in shards if tensor in shards[file]] for tensor in NAMES}
    lossless = all(
        file in shards and (tensor in shards[file] or len(owners[tensor]) == 1) for tensor, file in (index or {}).items()
    ) and all(len(files) < 2 for files in owners.values())
    assert bool(errors(report.problems)) is not lossless
    if not lossless:
        assert report.mended is None
        return
    expected = {tensor: files[0] for tensor, files in owners.items() if files}
    before, after = difference(found, report)
    assert (before != after) is (report.mended is not None)
    assert (report.mended is not None) is bool(report.mendable)
    if report.mended is None:
        assert index is None or index == expected
        return
    assert report.mended["weight_map"] == expected
    assert report.mended["metadata"] == {**metadata, "total_size": sum(size for sizes in shards.values() for size in sizes.values())} or (
        index is None
    )
    text = index_text(report.mended)
    assert parse_json(text.encode()) == (report.mended, [])
    found.index_exists = True
    found.index, found.problems = parse_index(text.encode())
    again = compare(found)
    assert again.mended is None and not again.mendable and not errors(again.problems)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FILES), st.dictionaries(st.sampled_from(NAMES), st.integers(0, 9)), min_size=1),
    st.none() | st.dictionaries(st.sampled_from(NAMES), st.sampled_from(FILES), min_size=1),
)
def test_with_last_wins_every_tensor_is_where_a_loader_reads_it_last(
    shards: dict[str, dict[str, int]], index: dict[str, str] | None
) -> None:
    found = checkpoint(dict(shards), index)
    report = compare(found, last_wins=True)
    lost = any(file not in shards or not any(tensor in tensors for tensors in shards.values()) for tensor, file in (index or {}).items())
    assert bool(errors(report.problems)) is lost and (report.mended is None) >= lost
    read: dict[str, tuple[str, int]] = {}
    for file in sorted(shards, key=natural_key):
        read |= {tensor: (file, size) for tensor, size in shards[file].items()}
    right = {tensor: file for tensor, (file, _) in read.items()}
    assert report.owner == right and report.total_size == sum(size for _, size in read.values())
    if report.mended:
        assert report.mended["weight_map"] == right
        found.index_exists = True
        found.index, found.problems = parse_index(index_text(report.mended).encode())
        again = compare(found, last_wins=True)
        assert again.mended is None and not again.mendable and not errors(again.problems)
    elif index is not None and not lost:
        assert index == right
