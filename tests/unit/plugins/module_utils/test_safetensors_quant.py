# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Quantised tensors against their scales and against config.json."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_header import Tensor
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_quant import (
    IgnoreList,
    quantisation_problems,
    regex_choices,
    scale_shape,
)
from hypothesis import given
from hypothesis import strategies as st


def tensors(**entries: tuple[str, list[int]]) -> dict[str, Tensor]:
    """name=(dtype, shape); '__' stands for a dot."""
    return {name.replace("__", "."): Tensor(dtype, tuple(shape), 0, 0) for name, (dtype, shape) in entries.items()}


def found(entries: dict[str, Tensor], quantisation: Any = None, unread: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    config = {} if quantisation is None else {"quantization_config": quantisation}
    mtp = [name for name in entries if name.startswith("mtp.")]
    return [(p["class"], p["severity"]) for p in quantisation_problems(entries, unread, config, mtp)]


FP8 = ("F8_E4M3", [256, 384])
MISSING = [("fp8_scale_missing", "error")]
WRONG = [("fp8_scale_wrong", "error")]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (tensors(x__weight=FP8), MISSING),
        (tensors(x__weight=FP8, x__weight_scale_inv=("F32", [2, 3])), []),
        (tensors(x__weight=FP8, x__weight_scale_inv=("BF16", [2, 3])), []),
        (tensors(x__weight=FP8, x__weight_scale_inv=("F8_E8M0", [2, 3])), []),
        (tensors(x__weight=FP8, x__weight_scale_inv=("BF16", [2, 2])), WRONG),
        (tensors(x__weight=FP8, x__weight_scale_inv=("BF16", [3, 2])), WRONG),
        (tensors(x__weight=FP8, x__weight_scale_inv=("BF16", [])), WRONG),
        (tensors(x__weight=FP8, x__weight_scale_inv=("BF16", [6])), WRONG),
        (tensors(x__weight=FP8, x__weight_scale_inv=("I32", [2, 3])), WRONG),
        (tensors(x__weight=("F8_E4M3", [257, 385]), x__weight_scale_inv=("BF16", [3, 4])), []),
        (tensors(x__weight=("F8_E4M3", [1, 1]), x__weight_scale_inv=("BF16", [1, 1])), []),
        (tensors(x__weight=("F8_E4M3", [8, 256, 384]), x__weight_scale_inv=("BF16", [8, 2, 3])), []),
        (tensors(x__weight=("F8_E4M3", [8, 256, 384]), x__weight_scale_inv=("BF16", [2, 3])), WRONG),
        # Scales of ModelOpt, compressed-tensors and DeepSeek V4: per tensor, row or block.
        (tensors(x__weight=FP8, x__weight_scale=("F32", [])), []),
        (tensors(x__weight=FP8, x__weight_scale=("F32", [256, 1])), []),
        (tensors(x__weight=FP8, x__scale=("F8_E8M0", [2, 3])), []),
        # The scale of another weight; only the end of a name is replaced.
        (tensors(x__weight=FP8, y__weight_scale_inv=("F32", [2, 3])), MISSING),
        (tensors(a__weight__b__weight=FP8, a__weight__b__weight_scale_inv=("F32", [2, 3])), []),
        (tensors(a__weight__b__weight=FP8, a__weight_scale_inv__b__weight_scale_inv=("F32", [2, 3])), MISSING),
        # Not weights, or not FP8.
        (tensors(x__weight_scale=("F8_E4M3", [256, 24]), x__weight=("U8", [256, 192])), []),
        (tensors(x__weight=("BF16", [256, 384])), []),
        (tensors(x__k_cache=FP8), []),
    ],
)
def test_fp8_weights_and_their_scales(entries: dict[str, Tensor], expected: list[tuple[str, str]]) -> None:
    assert found(entries) == expected


def test_block_size_of_the_config() -> None:
    entries = tensors(x__weight=FP8, x__weight_scale_inv=("F32", [4, 12]))
    assert found(entries, {"weight_block_size": [64, 32]}) == []
    assert found(entries, {"weight_block_size": [128, 128]}) == WRONG
    for nonsense in (None, [], [0, 0], [True, True], "128", [128]):
        assert found(entries, {"weight_block_size": nonsense}) == WRONG
    assert scale_shape((3072, 1024)) == (24, 8) and scale_shape((1024, 3072)) == (8, 24)


def test_scales_in_unread_shards_are_not_missed() -> None:
    assert found(tensors(x__weight=FP8), unread=("x.weight_scale_inv",)) == []
    assert found(tensors(a__qweight=("I32", [1]), b__qweight=("I32", [1]), b__scales=("F16", [1])), unread=("a.scales",)) == []


@pytest.mark.parametrize(("weight", "scale"), [("qweight", "scales"), ("weight_packed", "weight_scale")])
def test_packed_weights_of_which_some_have_no_scales(weight: str, scale: str) -> None:
    both = {f"{module}.{part}": Tensor("I32", (1,), 0, 4) for module in "abc" for part in (weight, scale)}
    assert found(both) == []
    del both[f"b.{scale}"]
    assert found(both) == [("scale_missing", "error")]
    # Formats that keep their scales elsewhere.
    assert found({name: tensor for name, tensor in both.items() if name.endswith(weight)}) == []


HEAD = tensors(lm_head__qweight=("I32", [1]), lm_head__qzeros=("I32", [1]), lm_head__scales=("F16", [1]))


@pytest.mark.parametrize(
    ("entries", "quantisation", "warned"),
    [
        (HEAD, {"quant_method": "gptq", "bits": 4}, True),
        (HEAD, {"quant_method": "gptq", "lm_head": False}, True),
        (HEAD, {"quant_method": "gptq", "lm_head": True}, False),
        (HEAD, {"quant_method": "auto-round", "extra_config": {"lm_head": {"bits": 4}}}, False),
        (tensors(lm_head__weight_packed=("U8", [1]), lm_head__weight_scale=("F32", [1])), {"ignore": ["lm_head"]}, True),
        (tensors(lm_head__weight=("BF16", [1, 1])), {"quant_method": "gptq"}, False),
        (HEAD, None, False),
        (HEAD, [], False),
    ],
)
def test_a_quantised_head_of_which_the_config_knows_nothing(entries: dict[str, Tensor], quantisation: Any, warned: bool) -> None:
    assert found(entries, quantisation) == ([("lm_head_quantised", "warning")] if warned else [])


def test_the_projection_in_front_of_the_mtp_layer() -> None:
    assert found(tensors(mtp__fc__qweight=("I32", [1]), mtp__fc__scales=("F16", [1]))) == [("mtp_fc_quantised", "warning")]
    assert found(tensors(mtp__fc__weight=("BF16", [1, 1]))) == []


QKV = {f"mtp.layers.0.self_attn.{part}_proj.weight": Tensor("BF16", (8, 8), 0, 128) for part in "qkv"}
NAMES = [name.removesuffix(".weight") for name in QKV]


@pytest.mark.parametrize(
    ("ignore", "covered"),
    [
        (NAMES, True),
        (["mtp.layers.0.self_attn.qkv_proj"], True),
        (["re:.*mtp.*"], True),
        (["re:^mtp\\..*"], True),
        (["mtp*"], True),
        (["mtp"], True),
        (["mtp.layers.0"], True),
        (NAMES[:2], False),
        (["lm_head", "re:.*gate$"], False),
        (["mtp.layers.00"], False),
        (["re:(unbalanced"], False),
        ([5, None], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"])
def test_mtp_in_16_bits_must_be_ignored(ignore: list[Any], covered: bool, key: str) -> None:
    assert found(QKV, {key: ignore}) == ([] if covered else [("mtp_not_ignored", "warning")])


def test_mtp_that_needs_no_entry_in_the_ignore_list() -> None:
    norms = tensors(
        mtp__norm__weight=("BF16", [8]), mtp__layers__0__mlp__gate__weight=("BF16", [8, 8]), mtp__embed__weight=("BF16", [8, 8])
    )
    assert found(norms, {"ignore": []}) == []
    # AutoRound lists what is quantised, not what is not; so may compressed-tensors.
    assert found(QKV, {"quant_method": "auto-round", "block_name_to_quantize": "model.layers"}) == []
    assert found(QKV, {"ignore": [], "config_groups": {"group_0": {"targets": ["re:.*experts.*"]}}}) == []
    assert found(QKV, {"ignore": [], "config_groups": {"group_0": {"targets": ["Linear"]}}}) == [("mtp_not_ignored", "warning")]
    assert found({name: tensor._replace(dtype="F8_E4M3") for name, tensor in QKV.items()}, {"ignore": []}) == MISSING


def test_names_are_matched_by_whole_parts() -> None:
    covers = IgnoreList(["layers.1", "*.o_proj", "gate_up_proj"]).covers
    assert covers("mtp.layers.1.x") and covers("a.o_proj") and covers("a.up_proj") and covers("a.gate_proj")
    assert not covers("mtp.layers.11.x") and not covers("a.o_proj.b") and not covers("up_proj_2")


ENDLESS = [
    "mtp.(a+)+$", "(.*)*x", "(?:[a-z._0-9]+)*!", "(a|aa)+$", "((mtp|.)*)+x", "(?P<n>.+){2,}x", "(.*){30}x", "((.)?.?)*x",
    "(.+)+?x", "(?x)(.+) +x", "(.+)(?#comment)+x", "(?i:(\\w+\\.?)+)x", ".*" * 40 + "x", ".?" * 60 + "." * 40 + "!",
    "(.|.)" * 40 + "!", "x" * 501, "mtp" + "|mtp" * 200,
]  # fmt: skip


@pytest.mark.parametrize("expression", ENDLESS)
def test_an_expression_that_could_take_for_ever_is_not_tried(expression: str) -> None:
    entries = QKV | {f"mtp.layers.0.{'a' * 60}.weight": Tensor("BF16", (8, 8), 0, 128)}
    problems = quantisation_problems(entries, (), {"quantization_config": {"ignore": [f"re:{expression}"]}}, list(entries))
    (fault,) = problems
    assert (fault["class"], fault["severity"]) == ("mtp_ignore_not_checked", "warning") and fault["evidence"].startswith("not checked: 1")
    # It does not matter where another entry covers the modules.
    assert found(QKV, {"ignore": [f"re:{expression}", "mtp"]}) == []


@pytest.mark.parametrize(
    "expression",
    [
        ".*mtp.*", "(model\\.)?mtp.*", "mtp\\.layers\\.(\\d+)\\.self_attn.*", "mtp\\.layers\\.[0-9]+\\..*(q|k|v|o)_proj$",
        "(?i)MTP", "mtp[.]layers[(]?.*",
        "(?:model|language_model|mtp)(?:\\.\\w{1,20})?.*", "mtp.(a){0}.*", "mtp\\.(?P<rest>.*)", ".*\\.\\d+\\..*\\..*",
    ],
)  # fmt: skip
def test_usual_expressions_are_tried(expression: str) -> None:
    ignored = IgnoreList([f"re:{expression}"])
    assert ignored.covers(NAMES[0]) and not ignored.unchecked


@pytest.mark.parametrize("expression", ["a{99999999999}", "(" * 240 + "y" + ")" * 240, "*", "a**", "[", "\\", "(?", ")"])
def test_expressions_that_do_not_compile_or_match_cover_nothing(expression: str) -> None:
    assert not IgnoreList([f"re:{expression}"]).covers("x")


def test_all_expressions_together_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{regex_choices.__module__}._MATCH_SECONDS", -1.0)
    assert found(QKV, {"ignore": ["re:.*mtp.*"]}) == [("mtp_ignore_not_checked", "warning")]


def test_choices_of_an_expression() -> None:
    assert regex_choices("a(b|c)?[*+?{2}]\\*.*d{1,2}?") == (4, 2)
    assert regex_choices("a|(b|c)|[|]") == (6, 0)


@pytest.mark.parametrize(
    "entries",
    [
        [f"re:.*x{number}" for number in range(10_000)],
        [f"re:.*x{number}.*y|z*{number}" for number in range(3_000)],
        [f"*a*a*a*a*b{number}" for number in range(3_000)],
        [f"{'x.' * number}y" for number in range(1_000)] + [f"re:.*x{number}" for number in range(10_000)],
    ],
)
def test_many_expressions_against_many_modules_end_in_time(entries: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{regex_choices.__module__}._MATCH_SECONDS", 0.3)
    modules = {f"mtp.layers.0.mlp.experts.{number}.{'a' * 200}_proj.weight": Tensor("BF16", (1, 1), 0, 2) for number in range(20_000)}
    began = time.monotonic()
    (fault,) = quantisation_problems(modules, (), {"quantization_config": {"ignore": entries}}, list(modules))
    assert time.monotonic() - began < 4
    assert fault["class"] == "mtp_ignore_not_checked" and f"{len(entries)} of the entries" in fault["evidence"]
    assert "20000 MTP modules" in fault["evidence"] and "more than 0.3 s" in fault["evidence"]


@pytest.mark.parametrize("entry", ["x{}", "mtp.layers.0.mlp.experts.{}", "{}", "mtp.x{}.y.z"])
def test_a_hundred_thousand_plain_entries_are_all_tried(entry: str) -> None:
    ignored = IgnoreList([entry.format(number) for number in range(100_000)])
    began = time.monotonic()
    covered = [ignored.covers(f"mtp.layers.1.mlp.experts.{number}.up_proj") for number in range(5_000)]
    assert time.monotonic() - began < 4 and not ignored.unchecked
    assert all(covered) == any(covered) == (entry == "{}")


@pytest.mark.parametrize("name", ["a." * 200_000, "." * 200_000, "ab" * 500_000])
def test_a_name_of_many_parts_ends_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{regex_choices.__module__}._MATCH_SECONDS", 0.3)
    ignored = IgnoreList(["b." * number + "c" for number in range(1_000)])
    began = time.monotonic()
    assert not ignored.covers(name) and not ignored.covers("x")
    assert time.monotonic() - began < 4


PARTS = st.text(alphabet="ab.", max_size=7)


@given(PARTS, st.lists(PARTS, max_size=4))
def test_plain_entries_cover_what_a_search_finds(name: str, entries: list[str]) -> None:
    assert IgnoreList(entries).covers(name) == any(f".{entry}." in f".{name}." for entry in entries)


@pytest.mark.parametrize("levels", [10, 900, 100_000])
@pytest.mark.parametrize("inner", [["lm_head.x"], {"lm_head": 4}, [5], "x"])
def test_a_head_is_found_at_any_depth_of_the_config(levels: int, inner: Any) -> None:
    value = inner
    for number in range(levels):
        value = [value] if number % 2 else {"a": value}
    warned = "lm_head" not in str(inner)
    assert found(HEAD, {"extra_config": value}) == ([("lm_head_quantised", "warning")] if warned else [])
