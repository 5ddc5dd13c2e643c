# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which tensors a hybrid takes, how many there must be, and how its files are laid out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import synthetic_checkpoint
from ansible_collections.dgxspark.vllm.plugins.module_utils.hybrid import (
    COPY_BLOCK,
    Choice,
    DonorTensor,
    Piece,
    Run,
    choose,
    donor_order,
    donor_problems,
    expected,
    header_bytes,
    index_document,
    is_routed,
    is_shared,
    overlay_name,
    runs,
    shard_pieces,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.problems import Problem
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_compare import natural_key
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_header import Header, Tensor, parse_header
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_index import Index

LAYER = "model.language_model.layers.0"
SHARED = f"{LAYER}.mlp.shared_expert"
GATE = f"{SHARED}.gate_proj.weight"


def config(kinds: list[str] | None = None, **other: Any) -> dict[str, Any]:
    kinds = ["full_attention"] if kinds is None else kinds
    text = {"num_hidden_layers": len(kinds), "layer_types": kinds, "shared_expert_intermediate_size": 8, "mtp_num_hidden_layers": 0}
    return {"text_config": {**text, **other}}


def real(part: str) -> list[synthetic_checkpoint.Tensor]:
    """Names, types and shapes of the real 122B checkpoint, with 2 of its 256 experts."""
    model = synthetic_checkpoint.Model(experts=2)
    if part == "donor":
        return list(synthetic_checkpoint.donor_tensors(model, experts=True))
    return [*synthetic_checkpoint.source_tensors(model), *synthetic_checkpoint.source_mtp_tensors(model)]


def of_source(tensors: list[Any]) -> dict[str, Tensor]:
    return {t.name: Tensor(t.dtype, t.shape, 0, t.nbytes) for t in tensors}


def of_donor(tensors: list[Any]) -> dict[str, DonorTensor]:
    return {t.name: DonorTensor("d.safetensors", t.dtype, t.shape, 0, t.nbytes) for t in tensors if not is_routed(t.name)}


def small() -> tuple[dict[str, Tensor], dict[str, DonorTensor]]:
    """One layer of full attention: 3 weights to take, 8 donor tensors without a place."""
    source = {f"{SHARED}.{n}_proj.weight": Tensor("BF16", (130, 256), 0, 66560) for n in ("gate", "up", "down")}
    source |= {f"{LAYER}.self_attn.{n}_proj.qweight": Tensor("I32", (1, 8), 0, 32) for n in "qkvo"}
    source[f"{LAYER}.input_layernorm.weight"] = Tensor("BF16", (8,), 0, 16)
    donor: dict[str, DonorTensor] = {}
    for name in (*(f"{SHARED}.{n}_proj.weight" for n in ("gate", "up", "down")), *(f"{LAYER}.self_attn.{n}_proj.weight" for n in "qkvo")):
        donor[name] = DonorTensor("d", "F8_E4M3", (130, 256), 0, 33280)
        donor[f"{name}_scale_inv"] = DonorTensor("d", "BF16", (2, 2), 0, 8)
    donor[f"{LAYER}.input_layernorm.weight"] = DonorTensor("d", "BF16", (8,), 0, 16)
    return source, donor


def by_class(problems: list[Problem]) -> dict[str, str]:
    return {p["class"]: p["evidence"] for p in problems}


# --- how many there must be ------------------------------------------------------------------------------------------------------


def test_the_real_checkpoint_needs_144_weights_144_scales_and_has_no_place_for_408() -> None:
    # Published: 36 linear-attention and 12 full-attention layers; 36x8 + 12x8 + 24 of the MTP layer.
    source, donor = of_source(real("source")), of_donor(real("donor"))
    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(48)]
    choice, problems = choose(source, donor, config(kinds, mtp_num_hidden_layers=1))
    assert problems == []
    assert (len(choice.weights), len(choice.scales), len(choice.unplaced)) == (144, 144, 408)
    assert sum(t.nbytes for t in choice.weights.values()) == 144 * 1024 * 3072
    assert not any(name.startswith("mtp.") or ".experts." in name for name in [*choice.weights, *choice.scales])
    assert sum(name.startswith("mtp.") for name in choice.unplaced) == 24


@pytest.mark.parametrize(
    ("settings", "weights", "unplaced"),
    [
        ({"kinds": ["linear_attention", "full_attention"]}, 6, 16),
        ({"kinds": ["linear_attention"], "mtp_num_hidden_layers": 2}, 3, 8 + 4 + 2 * 20),
        ({"kinds": ["full_attention"] * 4, "mlp_only_layers": [0, 2]}, 6, 32 + 2 * 6),
        ({"kinds": ["full_attention"] * 4, "mlp_only_layers": [0, 10**30, True, "x", [1]]}, 9, 32 + 6),
        ({"kinds": ["full_attention"] * 4, "decoder_sparse_step": 2}, 6, 32 + 2 * 6),
        ({"kinds": ["full_attention"] * 8, "layer_types": None, "full_attention_interval": 4}, 24, 64),
    ],
)
def test_the_layers_in_the_config_say_how_many(settings: dict[str, Any], weights: int, unplaced: int) -> None:
    want = expected(config(**settings), [GATE])
    assert (len(want.weights), len(want.unplaced), want.unknown) == (weights, unplaced, "")


def test_a_text_only_checkpoint_has_its_config_and_names_without_the_language_model() -> None:
    text = config(["linear_attention"])["text_config"]
    assert expected(text, ["model.layers.0.mlp.shared_expert.up_proj.weight"]).weights >= {
        "model.layers.0.mlp.shared_expert.up_proj.weight"
    }


@pytest.mark.parametrize(
    ("settings", "names", "why"),
    [
        ({"num_hidden_layers": None}, [GATE], "num_hidden_layers is null"),
        ({"num_hidden_layers": True}, [GATE], "num_hidden_layers is true"),
        ({"num_hidden_layers": 10**9}, [GATE], "num_hidden_layers is 1000000000"),
        ({"num_experts": 10**9}, [GATE], "num_experts is 1000000000, more than 100000"),
        ({"shared_expert_intermediate_size": 0}, [GATE], "no shared experts"),
        ({"shared_expert_intermediate_size": "8"}, [GATE], "no shared experts"),
        ({"layer_types": ["full_attention"] * 3}, [GATE], "for 1 layers"),
        ({"layer_types": "full"}, [GATE], "for 1 layers"),
        ({"layer_types": ["mamba"]}, [GATE], '"mamba", which is not known'),
        ({"layer_types": [["x"]]}, [GATE], "which is not known"),
        ({"layer_types": None, "full_attention_interval": 0}, [GATE], "full_attention_interval is 0"),
        ({}, ["lm_head.weight"], "no tensor of a layer's shared expert"),
        ({}, [GATE, "model.layers.0.mlp.shared_expert.up_proj.weight"], "several prefixes"),
    ],
)
def test_a_config_that_does_not_tell_is_not_guessed(settings: dict[str, Any], names: list[str], why: str) -> None:
    want = expected(config(**settings), names)
    assert why in want.unknown and not want.weights


# --- what is taken ---------------------------------------------------------------------------------------------------------------


def changed(donor: dict[str, DonorTensor], name: str, **fields: Any) -> None:
    donor[name] = donor[name]._replace(**fields)


SCALE = f"{GATE}_scale_inv"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda s, d: d.pop(SCALE), "the donor has no weight_scale_inv beside it"),
        (lambda s, d: changed(d, SCALE, shape=(2, 3)), "needs scales [2, 2], the donor has [2, 3]"),
        (lambda s, d: changed(d, SCALE, shape=(1, 2)), "needs scales [2, 2], the donor has [1, 2]"),
        (lambda s, d: changed(d, SCALE, shape=(4,)), "needs scales [2, 2], the donor has [4]"),
        (lambda s, d: changed(d, SCALE, dtype="I32"), "its scales are I32"),
        (lambda s, d: changed(d, GATE, dtype="BF16"), "BF16 in the donor"),
        (lambda s, d: changed(d, GATE, dtype="F8_E5M2"), "F8_E5M2 in the donor"),
        (lambda s, d: changed(d, GATE, shape=(256, 130)), "the source has [130, 256], the donor [256, 130]"),
        (lambda s, d: d.pop(GATE), "not in the donor"),
        (lambda s, d: s.pop(GATE), "the source has no tensor of that name"),
        (lambda s, d: s.update({GATE: Tensor("F8_E4M3", (130, 256), 0, 33280)}), "the source has it in F8_E4M3"),
        (lambda s, d: s.update({GATE: Tensor("F32", (130, 256), 0, 133120)}), "the source has it in F32"),
        (lambda s, d: s.update({SCALE: Tensor("BF16", (2, 2), 0, 8)}), "the source has scales of it already"),
    ],
)
def test_a_weight_that_does_not_fit_is_named_with_the_reason(fault: Any, why: str) -> None:
    source, donor = small()
    fault(source, donor)
    choice, problems = choose(source, donor, config())
    found = by_class(problems)
    assert "hybrid_weights_differ" in found and GATE not in choice.weights
    assert "2 found, 3 expected" in found["hybrid_weights_differ"] and GATE in found["hybrid_weights_differ"]
    assert why in found["hybrid_weights_differ"]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F8_E8M0"])
def test_scales_may_have_any_floating_point_type(dtype: str) -> None:
    source, donor = small()
    changed(donor, SCALE, dtype=dtype)
    choice, problems = choose(source, donor, config())
    assert problems == [] and len(choice.weights) == len(choice.scales) == 3


def test_names_are_cut_at_their_end_only() -> None:
    name = f"{SHARED}.weight.gate_proj.weight"
    source, donor = small()
    source[name] = Tensor("BF16", (4, 4), 0, 32)
    donor[name] = DonorTensor("d", "F8_E4M3", (4, 4), 0, 16)
    donor[f"{name}_scale_inv"] = DonorTensor("d", "F32", (1, 1), 0, 4)
    choice, problems = choose(source, donor, config(), {"weights": 4, "unplaced": 8})
    assert problems == [] and choice.scales.keys() == {f"{n}_scale_inv" for n in choice.weights} and name in choice.weights


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.mlp.shared_expert.gate_proj.weight",
        f"{LAYER}.mlp.experts.0.gate_proj.weight",
        f"{LAYER}.self_attn.q_proj.weight",
        "model.visual.blocks.0.mlp.shared_experts_like.weight",
        f"{LAYER}.mlp.shared_expert_gate.weight",
    ],
)
def test_only_shared_experts_of_the_layers_are_taken(name: str) -> None:
    source, donor = small()
    source[name] = Tensor("BF16", (8, 8), 0, 128)
    donor[name] = DonorTensor("d", "F8_E4M3", (8, 8), 0, 64)
    donor[f"{name}_scale_inv"] = DonorTensor("d", "F32", (1, 1), 0, 4)
    choice, _ = choose(source, donor, config())
    assert name not in choice.weights and len(choice.weights) == 3


@pytest.mark.parametrize(
    ("name", "routed", "shared"),
    [
        (f"{LAYER}.mlp.experts.12.up_proj.weight", True, False),
        (f"{LAYER}.mlp.experts.gate_up_proj", True, False),
        (f"{LAYER}.mlp.shared_experts.up_proj.weight", False, True),
        (GATE, False, True),
        (f"{LAYER}.mlp.shared_expert_gate.weight", False, False),
        (f"{LAYER}.mlp.my_experts_count", False, False),
    ],
)
def test_experts_by_name(name: str, routed: bool, shared: bool) -> None:
    assert (is_routed(name), is_shared(name)) == (routed, shared)


def test_what_both_have_alike_is_neither_placed_nor_counted() -> None:
    source, donor = small()
    # This source leaves the queries in 16 bits, and so does this donor: the layer's expected tensor needs no place.
    source[f"{LAYER}.self_attn.q_proj.weight"] = Tensor("BF16", (130, 256), 0, 66560)
    changed(donor, f"{LAYER}.self_attn.q_proj.weight", dtype="BF16")
    choice, problems = choose(source, donor, config())
    assert f"{LAYER}.self_attn.q_proj.weight" not in choice.unplaced and problems == []
    # Where the donor has it in FP8, it stays without a place.
    changed(donor, f"{LAYER}.self_attn.q_proj.weight", dtype="F8_E4M3")
    choice, problems = choose(source, donor, config())
    assert f"{LAYER}.self_attn.q_proj.weight" in choice.unplaced and problems == []


def test_another_type_of_a_tensor_that_stays_is_a_warning() -> None:
    source, donor = small()
    changed(donor, f"{LAYER}.input_layernorm.weight", dtype="F32")
    choice, problems = choose(source, donor, config())
    assert problems == [] and [w["class"] for w in choice.warnings] == ["donor_type_differs"]
    assert "input_layernorm.weight (F32, here BF16)" in choice.warnings[0]["evidence"]


def test_a_donor_without_an_mtp_layer_is_taken_with_a_warning() -> None:
    source, donor = of_source(real("source")), of_donor(real("donor"))
    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(48)]
    donor = {name: t for name, t in donor.items() if not name.startswith("mtp.")}
    choice, problems = choose(source, donor, config(kinds, mtp_num_hidden_layers=1))
    assert problems == [] and len(choice.unplaced) == 384 and [w["class"] for w in choice.warnings] == ["donor_without_mtp"]
    # A part of one is no donor without one; and a number that is given holds.
    donor["mtp.fc.weight"] = DonorTensor("d", "BF16", (1,), 0, 2)
    assert by_class(choose(source, donor, config(kinds, mtp_num_hidden_layers=1))[1]).keys() == {"hybrid_unplaced_differ"}
    del donor["mtp.fc.weight"]
    assert choose(source, donor, config(kinds, mtp_num_hidden_layers=1), {"unplaced": 384})[1] == []
    assert choose(source, donor, config(kinds, mtp_num_hidden_layers=1), {"unplaced": 408})[1]


def test_a_dense_layer_of_the_donor_has_no_place() -> None:
    source, donor = small()
    second = LAYER.replace("layers.0", "layers.1")
    for name in (*(f"self_attn.{n}_proj" for n in "qkvo"), *(f"mlp.{n}_proj" for n in ("gate", "up", "down"))):
        donor[f"{second}.{name}.weight"] = DonorTensor("d", "F8_E4M3", (130, 256), 0, 33280)
        donor[f"{second}.{name}.weight_scale_inv"] = DonorTensor("d", "BF16", (2, 2), 0, 8)
    choice, problems = choose(source, donor, config(["full_attention"] * 2, mlp_only_layers=[1]))
    assert problems == [] and len(choice.weights) == 3 and len(choice.unplaced) == 8 + 8 + 6


@pytest.mark.parametrize("theirs", ["model.", "language_model.model.", ""])
def test_a_donor_whose_names_differ_by_their_prefix_is_told_so(theirs: str) -> None:
    source, donor = small()
    donor = {name.replace("model.language_model.", theirs): t for name, t in donor.items()}
    evidence = by_class(choose(source, donor, config())[1])["hybrid_weights_differ"]
    assert f"below '{theirs}layers.', the source below 'model.language_model.layers.': only the prefix differs" in evidence
    other = {name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2"): t for name, t in donor.items()}
    assert "prefix" not in by_class(choose(source, other, config())[1])["hybrid_weights_differ"]


def test_a_stranger_in_the_donor_is_named() -> None:
    source, donor = small()
    donor["model.audio.weight"] = DonorTensor("d", "BF16", (8,), 0, 16)
    _, problems = choose(source, donor, config())
    evidence = by_class(problems)["hybrid_unplaced_differ"]
    assert "9 found, 8 expected" in evidence and "not expected (1): model.audio.weight" in evidence
    # An unusual donor that is known can be taken with its numbers.
    assert choose(source, donor, config(), {"unplaced": 9})[1] == []
    assert by_class(choose(source, donor, config(), {"unplaced": 7})[1]).keys() == {"hybrid_unplaced_differ"}


def test_numbers_can_stand_in_for_a_config_that_does_not_tell() -> None:
    source, donor = small()
    unknown = config(["mamba"])
    assert by_class(choose(source, donor, unknown)[1]).keys() == {"expected_unknown"}
    assert by_class(choose(source, donor, unknown, {"weights": 3})[1]).keys() == {"expected_unknown"}
    assert choose(source, donor, unknown, {"weights": 3, "unplaced": 8})[1] == []
    donor.pop(SCALE)
    found = by_class(choose(source, donor, unknown, {"weights": 3, "unplaced": 8})[1])
    assert found.keys() == {"hybrid_weights_differ", "hybrid_scales_differ", "hybrid_weight_unfit", "hybrid_unplaced_differ"}
    assert "2 found, 3 expected (as given)" in found["hybrid_weights_differ"] and "weight_scale_inv" in found["hybrid_weight_unfit"]


def test_all_differences_are_told_at_once_and_long_lists_cut() -> None:
    source, donor = of_source(real("source")), of_donor(real("donor"))
    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(48)]
    donor = {name: t for name, t in donor.items() if "layers.7." not in name and name != "mtp.fc.weight"}
    found = by_class(choose(source, donor, config(kinds, mtp_num_hidden_layers=1))[1])
    assert found.keys() == {"hybrid_weights_differ", "hybrid_scales_differ", "hybrid_unplaced_differ"}
    assert "141 found, 144 expected; missing (3): model.language_model.layers.7." in found["hybrid_weights_differ"]
    assert "399 found, 408 expected; missing (9)" in found["hybrid_unplaced_differ"] and "mtp.fc" in found["hybrid_unplaced_differ"]


@pytest.mark.parametrize(
    ("quantisation", "classes"),
    [
        ({"weight_block_size": [128, 128], "activation_scheme": "dynamic"}, []),
        ({}, []),
        ({"quant_method": None}, ["donor_quant_method_unknown"]),
        ({"quant_method": "compressed-tensors"}, ["donor_quant_method"]),
        ({"quant_method": "FP8"}, ["donor_quant_method"]),
        ({"quant_method": ["fp8"]}, ["donor_quant_method"]),
        ({"weight_block_size": [64, 128]}, ["donor_block"]),
        ({"weight_block_size": None}, ["donor_block"]),
        ({"weight_block_size": "128"}, ["donor_block"]),
        ({"activation_scheme": "static"}, ["donor_activation_scheme"]),
        ({"weight_block_size": [1, 1], "activation_scheme": "static"}, ["donor_block", "donor_activation_scheme"]),
    ],
)
def test_a_donor_whose_scales_no_hybrid_can_describe_is_refused(quantisation: Any, classes: list[str]) -> None:
    assert [p["class"] for p in donor_problems({"quantization_config": {"quant_method": "fp8", **quantisation}})] == classes
    for absent in ({"quantization_config": []}, {}, {"quantization_config": {"bits": 8}}):
        assert [(p["class"], p["severity"]) for p in donor_problems(absent)] == [("donor_quant_method_unknown", "warning")]


# --- layout ----------------------------------------------------------------------------------------------------------------------


def test_the_donor_shard_is_aligned_and_else_as_the_donor_lies() -> None:
    choice = Choice(
        weights={"b.weight": DonorTensor("d-10", "F8_E4M3", (3, 1), 100, 103), "a.weight": DonorTensor("d-9", "F8_E4M3", (1, 1), 50, 51)},
        scales={
            "b.weight_scale_inv": DonorTensor("d-10", "F32", (1, 1), 8, 12),
            "a.weight_scale_inv": DonorTensor("d-9", "BF16", (1,), 7, 9),
        },
    )
    assert [name for name, _ in donor_order(choice)] == ["b.weight_scale_inv", "a.weight_scale_inv", "a.weight", "b.weight"]


def test_a_shard_gets_the_donors_tensors_and_keeps_everything_aligned() -> None:
    entries = {
        "x": Tensor("U8", (3,), 0, 3),
        "w.weight": Tensor("BF16", (2, 2), 3, 11),
        "y": Tensor("I64", (1,), 11, 19),
        "z": Tensor("F16", (2,), 19, 23),
    }
    taken = {"w.weight": Tensor("F8_E4M3", (2, 2), 4, 8), "w.weight_scale_inv": Tensor("F32", (1, 1), 0, 4)}
    pieces = shard_pieces(Header("s", entries, {}, 100, 123), Header("d", taken, {}, 50, 58))
    assert [(p.name, p.donor, p.at) for p in pieces] == [
        ("y", False, 111),
        ("w.weight_scale_inv", True, 50),
        ("z", False, 119),
        ("x", False, 100),
        ("w.weight", True, 54),
    ]
    raw = header_bytes(pieces, {"format": "pt", "n": "1"})
    assert len(raw) % 8 == 0 and int.from_bytes(raw[:8], "little") == len(raw) - 8
    tensors, metadata = parse_header(raw[8:], "out", sum(p.nbytes for p in pieces))
    assert metadata == {"format": "pt", "n": "1"} and tensors["w.weight"] == Tensor("F8_E4M3", (2, 2), 19, 23)


@pytest.mark.parametrize("at", [8, 1000, 65_536, 123_456, 10**9 + 8])
@pytest.mark.parametrize("before", [0, 24, 40_000])
def test_what_stays_lies_where_the_kernel_copies_whole_pages(at: int, before: int) -> None:
    pieces = [Piece("donor", "I64", (before // 8,), before, True, 0), Piece("kept", "U8", (9,), 9, False, at)]
    raw = header_bytes(pieces, {})
    assert (len(raw) + before - at) % COPY_BLOCK == 0
    assert len(raw) % 8 == 0 and json.loads(raw[8:])["kept"]["data_offsets"] == [before, before + 9]


@pytest.mark.parametrize("at", [3, 1001, 65_537])
def test_a_source_at_an_odd_offset_is_aligned_all_the_same(at: int) -> None:
    raw = header_bytes([Piece("kept", "U8", (9,), 9, False, at)], {})
    assert len(raw) % 8 == 0 and len(raw) < 200


@pytest.mark.parametrize(("metadata", "want"), [({}, "pt"), ({"format": "pt"}, "pt"), ({"format": "tf", "a": "b"}, "tf")])
def test_metadata_stays_and_its_format_is_added(metadata: dict[str, str], want: str) -> None:
    raw = header_bytes([], metadata)
    assert json.loads(raw[8:])["__metadata__"] == {**metadata, "format": want}


def test_neighbours_are_copied_in_one_run() -> None:
    def piece(at: int, nbytes: int, donor: bool = False) -> Piece:
        return Piece("n", "U8", (nbytes,), nbytes, donor, at)

    pieces = [piece(0, 4), piece(4, 4), piece(99, 0), piece(8, 2), piece(10, 2, donor=True), piece(12, 2, donor=True), piece(20, 1)]
    assert runs(pieces) == [Run(False, 0, 10), Run(True, 10, 4), Run(False, 20, 1)]


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00002.safetensors", "model_extra_tensors.safetensors"],
        ["zz-fp8-overlay.safetensors"],
        ["zzzz.safetensors", "zz.safetensors"],
        ["z_10.safetensors", "z_9.safetensors"],
        ["Z.safetensors"],
        ["~.safetensors", "{x.safetensors"],
        ["~~~.safetensors"],
        [],
    ],
)
def test_the_overlays_name_is_read_last(names: list[str]) -> None:
    name = overlay_name(names)
    assert name.endswith("-fp8-overlay.safetensors") and max([*names, name], key=natural_key) == name and name not in names


def test_no_name_is_better_than_one_that_is_not_read_last() -> None:
    assert overlay_name(["état.safetensors"]) == ""
    # One z more would be longer than a file system takes.
    assert overlay_name(["z" * 240 + ".safetensors"]) == "~-fp8-overlay.safetensors"
    assert overlay_name(["~" + "z" * 240 + ".safetensors", "~~~~~.safetensors"]) == ""


def test_the_index_keeps_what_else_the_source_says() -> None:
    document = {"metadata": {"total_size": 1, "total_parameters": 7}, "weight_map": {"a": "x"}, "note": [1]}
    index = Index({"a": "x"}, frozenset(), document["metadata"], document)  # type: ignore[arg-type]
    assert index_document(index, {"b": "y", "a": "x"}, 12) == {
        "note": [1], "metadata": {"total_size": 12, "total_parameters": 7}, "weight_map": {"a": "x", "b": "y"}
    }  # fmt: skip
    assert index_document(None, {"a": "x"}, 3) == {"metadata": {"total_size": 3}, "weight_map": {"a": "x"}}
