# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""MTP layers: promised, named, and whole."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import synthetic_checkpoint as synthetic
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_mtp import (
    MtpLayers,
    mtp_layers,
    mtp_names,
    promised_mtp_layers,
    unbelievable_numbers,
)


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"mtp_num_hidden_layers": 1}, ("mtp_num_hidden_layers", 1)),
        ({"text_config": {"mtp_num_hidden_layers": 2}}, ("text_config.mtp_num_hidden_layers", 2)),
        ({"num_nextn_predict_layers": 1}, ("num_nextn_predict_layers", 1)),
        ({"text_config": {"num_nextn_predict_layers": 1}}, ("text_config.num_nextn_predict_layers", 1)),
        ({"mtp_num_hidden_layers": 0}, ("", 0)),
        ({"mtp_num_hidden_layers": None}, ("", 0)),
        ({"mtp_num_hidden_layers": "1"}, ("", 0)),
        ({"mtp_num_hidden_layers": True}, ("", 0)),
        ({"text_config": []}, ("", 0)),
        ({}, ("", 0)),
    ],
)
def test_where_the_config_promises_layers(config: dict[str, Any], where: tuple[str, int]) -> None:
    assert promised_mtp_layers(config) == where
    assert mtp_layers([], config).expected == where[1]


@pytest.mark.parametrize(
    "name", ["mtp.fc.weight", "model.mtp.layers.0.x", "model.mtp_layers.0.x", "MTP.x", "model.nextn.x", "a.shared_nextn.b"]
)
def test_names_of_mtp_tensors(name: str) -> None:
    assert mtp_names([name, "model.layers.0.x", "lm_head.weight", "smtp.weight"], {}) == [name]


def test_mtp_layers_that_are_counted_on_after_the_last_layer() -> None:
    names = ["model.layers.59.x", "model.layers.60.eh_proj.weight", "model.layers.61.x", "model.layers.600.x", "visual.layers.60.x"]
    config = {"num_hidden_layers": 60, "num_nextn_predict_layers": 1}
    assert mtp_names(names, config) == ["model.layers.60.eh_proj.weight"]
    assert mtp_names(["model.language_model.layers.60.x"], {"text_config": config}) == ["model.language_model.layers.60.x"]
    assert mtp_names(names, {"num_hidden_layers": 60}) == []
    assert mtp_names(names, {"num_hidden_layers": 60, "mtp_num_hidden_layers": 1}) == []


# ------------------------------------------------------------------------------------------------------- what a layer needs at least

MODEL = synthetic.Model(experts=4, mtp_layers=2)
CONFIG = MODEL.config({})
NAMES = [tensor.name for tensor in synthetic.source_mtp_tensors(MODEL)]


def test_complete_layers() -> None:
    assert mtp_layers(NAMES, CONFIG) == MtpLayers(2, 2)
    assert mtp_layers([f"model.{name}" for name in NAMES], CONFIG) == MtpLayers(2, 2)
    fp8 = [tensor.name for tensor in synthetic.donor_tensors(MODEL, experts=True) if tensor.name.startswith("mtp.")]
    assert len(fp8) > len(NAMES) and mtp_layers(fp8, CONFIG) == MtpLayers(2, 2)


@pytest.mark.parametrize("name", [name for name in NAMES if ".layers.1." not in name])
def test_any_part_that_is_missing_is_named(name: str) -> None:
    layer, part = ("0", name.removeprefix("mtp.layers.0.")) if ".layers." in name else ("", name.removeprefix("mtp."))
    rest = [other for other in NAMES if other != name]
    assert mtp_layers(rest, CONFIG) == MtpLayers(2, 2, {layer: [part.removesuffix(".weight")]})
    # Packed, it is there.
    packed = [f"{name.removesuffix('.weight')}.{kind}" for kind in ("qweight", "qzeros", "scales")]
    assert mtp_layers([*rest, *packed], CONFIG) == MtpLayers(2, 2)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ([name for name in NAMES if ".layers.1." not in name], MtpLayers(2, 1, {"1": ["everything"]})),
        ([name for name in NAMES if ".layers.0." not in name], MtpLayers(2, 1, {"0": ["everything"]})),
        (
            [name for name in NAMES if ".layers." not in name],
            MtpLayers(2, 0, {"0": ["everything"], "1": ["everything"]}),
        ),
        (["mtp.0", "mtp.in_shard"], MtpLayers(2, 0, {"0": ["everything"], "1": ["everything"], "": ["fc", "norm", "pre_fc_norm_embedding",
                                                                                               "pre_fc_norm_hidden"]})),
        ([name for name in NAMES if ".experts." not in name],
         MtpLayers(2, 2, {layer: [f"mlp.experts.{n}.{part}_proj" for n in range(4) for part in ("gate", "up", "down")] for layer in "01"})),
    ],
)  # fmt: skip
def test_layers_and_experts_that_are_missing(kept: list[str], expected: MtpLayers) -> None:
    assert mtp_layers(kept, CONFIG) == expected


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        # A dense MLP; fused matrices; experts in one tensor.
        ({}, ["mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"], []),
        ({}, ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ["mlp.down_proj"]),
        ({}, [], ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
        ({"num_experts": 256}, ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"], []),
        ({"num_experts": 256}, ["mlp.gate.weight", "mlp.experts.gate_up_proj"], ["mlp.experts.down_proj"]),
        ({"num_experts": 1}, [f"mlp.experts.0.{part}_proj.weight" for part in ("gate", "up", "down")], ["mlp.gate"]),
        # Numbers that are none count as unknown.
        ({"num_experts": "many"}, ["mlp.gate.weight", *(f"mlp.experts.0.{part}_proj.weight" for part in ("gate", "up", "down"))], []),
    ],
)  # fmt: skip
def test_other_kinds_of_mlp(config: dict[str, Any], names: list[str], expected: list[str]) -> None:
    attention = [name for name in NAMES if ".mlp." not in name and ".layers.1." not in name]
    found = mtp_layers([*attention, *(f"mtp.layers.0.{name}" for name in names)], {"mtp_num_hidden_layers": 1, **config})
    assert found == MtpLayers(1, 1, {"0": expected} if expected else {})


def test_fused_attention() -> None:
    fused = [name.replace(".q_proj.", ".qkv_proj.") for name in NAMES if ".k_proj." not in name and ".v_proj." not in name]
    assert mtp_layers(fused, CONFIG) == MtpLayers(2, 2)


NEXTN = ["eh_proj.weight", "enorm.weight", "hnorm.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
         "self_attn.kv_a_proj_with_mqa.weight", "mlp.gate.weight", "shared_head.norm.weight"]  # fmt: skip


@pytest.mark.parametrize("prefix", ["model.layers.61.", "model.language_model.layers.61."])
def test_layers_after_the_last_one(prefix: str) -> None:
    config = {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}
    names = [prefix + name for name in NEXTN]
    assert mtp_layers(names, config) == MtpLayers(1, 1)
    for name in NEXTN[:-1]:
        part = "self_attn" if name.startswith("self_attn") else "mlp" if name.startswith("mlp") else name.removesuffix(".weight")
        assert mtp_layers([other for other in names if other != prefix + name], config) == MtpLayers(1, 1, {"61": [part]})
    assert mtp_layers(names, {**config, "num_nextn_predict_layers": 2}) == MtpLayers(2, 1, {"62": ["everything"]})


def test_of_names_that_are_not_known_nothing_is_said_to_be_missing() -> None:
    config = {"num_nextn_predict_layers": 1}
    assert mtp_layers(["model.mtp_block.0.proj.weight", "a.nextn.b"], config) == MtpLayers(1, 0)
    assert mtp_layers(["mtp.x", "model.mtp_layers.0.fc"], {}) == MtpLayers(0, 0)


def test_without_a_promise_the_layers_that_are_there_must_be_whole() -> None:
    assert mtp_layers(NAMES, {"num_experts": 4}) == MtpLayers(0, 2)
    assert mtp_layers(["mtp.fc.weight"], {}).missing["0"] == ["everything"]
    assert mtp_layers([name for name in NAMES if "layers.0" not in name], {}).missing == {"0": ["everything"]}


@pytest.mark.parametrize(
    "name", ["mtp.layers.x.a", "mtp.layers", "mtp.layers.", "mtp.", "mtp..", "mtp.layers.0", "mtp.layers.²", "mtp.layers.0."]
)
def test_odd_names_do_no_harm(name: str) -> None:
    assert mtp_layers([*NAMES, name], CONFIG) == MtpLayers(2, 2)


# ------------------------------------------------------------------------------------------------- numbers and names without measure


def few_megabytes(look: Callable[[], MtpLayers], limit: int = 60 << 20) -> MtpLayers:
    """The result of a look that must not take more memory than this."""
    tracemalloc.start()
    try:
        found = look()
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()
    return found


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("key", "number", "bound"),
    [
        *((key, number, 10_000) for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_hidden_layers")
          for number in (10_001, 10**12, 2**64, 10**4000)),
        *(("num_experts", number, 100_000) for number in (100_001, 10**7, 2**64)),
    ],
)  # fmt: skip
def test_numbers_that_no_model_has_promise_nothing(key: str, number: int, bound: int, inside: bool) -> None:
    config: dict[str, Any] = {"num_hidden_layers": 1, "num_nextn_predict_layers": 1, key: number}
    config = {"text_config": config} if inside else config
    (text,) = unbelievable_numbers(config)
    assert f"{key} is {str(number)[:60]}" in text and f"more than {bound}" in text and len(text) < 150
    names = [*NAMES, "model.layers.1.eh_proj.weight", "model.layers.999999999.x"]
    assert few_megabytes(lambda: mtp_layers(mtp_names(names, config), config)).expected == (0 if "nextn" in key else 1)


def test_the_largest_numbers_that_are_believed() -> None:
    config = {"num_hidden_layers": 10_000, "mtp_num_hidden_layers": 10_000, "num_experts": 100_000}
    assert unbelievable_numbers(config) == [] and promised_mtp_layers(config) == ("mtp_num_hidden_layers", 10_000)
    # Each layer lacks 300,000 parts: they are listed of the first layers only.
    found = few_megabytes(lambda: mtp_layers([f"mtp.layers.{n}.mlp.gate.weight" for n in (*range(2), *range(50, 1000))], config), 400 << 20)
    assert found.found == 952 and len(found.missing) == 10_001
    assert len(found.missing["0"]) > 300_000 and len(found.missing["999"]) == 1 and found.missing["9999"] == ["everything"]


@pytest.mark.parametrize("number", ["10000", "999999999999", "9" * 5_000, "0" * 5_000 + "1", "٣" * 9])
@pytest.mark.parametrize("name", ["mtp.layers.{}.mlp.x", "model.layers.{}.mlp.x", "model.mtp.layers.{}.x"])
def test_numbers_in_names_are_bounded_too(name: str, number: str) -> None:
    for config in ({}, {"num_experts": 4}, {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, CONFIG):
        names = mtp_names([*NAMES, name.format(number)], config)
        assert few_megabytes(partial(mtp_layers, names, config)).found == 2


@pytest.mark.parametrize("name", ["mtp." * 25_000 + "\n", "mtp." + "a." * 100_000 + "b", "mtp.layers.0." + "." * 100_000, ".mtp." * 50_000])
def test_long_names_take_neither_time_nor_memory(name: str) -> None:
    began = time.monotonic()
    assert few_megabytes(lambda: mtp_layers([*NAMES, name], CONFIG)) == MtpLayers(2, 2)
    assert time.monotonic() - began < 2
