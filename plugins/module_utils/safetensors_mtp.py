# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Multi-token prediction (MTP) layers: what config.json promises, which tensors are theirs, and what a layer lacks.

A draft whose layer is incomplete loads without a word and is never accepted: nothing but a name tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .safetensors_header import shown_value

# Where the language model's layers are; a vision tower's layers have other names in front.
_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d{1,9})\.(.+)")
# More than that nobody builds; the largest models have some 100 layers, and some 1,000 experts in each.
MAX_LAYERS, MAX_EXPERTS = 10_000, 100_000
_BOUNDS = {
    "mtp_num_hidden_layers": MAX_LAYERS,
    "num_nextn_predict_layers": MAX_LAYERS,
    "num_hidden_layers": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
}
_IN_FULL = 10  # layers of which all that is missing is listed
_MAX_DEPTH = 4  # names in the longest part that is asked for: mlp.experts.0.gate_proj
# What vLLM's Qwen3-Next and Qwen3.5 drafts read beside their layers, and of each layer.
_COMMON = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = tuple(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
_FUSED_ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm")
_MATRICES = ("gate_proj", "up_proj", "down_proj")
# DeepSeek and GLM count their MTP layers on after the last one; their attention has several forms.
_NEXTN = ("eh_proj", "enorm", "hnorm", *_NORMS, "self_attn", "mlp")


@dataclass(frozen=True)
class MtpLayers:
    """expected: layers that config.json promises; found: of which there is any tensor; missing: parts by layer ('' for all layers).

    Of layers after the tenth that lacks any, only the first missing part is in the list.
    """

    expected: int = 0
    found: int = 0
    missing: dict[str, list[str]] = field(default_factory=dict)


def unbelievable_numbers(config: Mapping[str, Any]) -> list[str]:
    """Numbers of config.json that nothing is concluded from, each as 'num_experts is 1000000000, more than 100000'."""
    parts = [("", config), ("text_config.", config.get("text_config"))]
    return [
        f"{prefix}{key} is {shown_value(part[key])}, more than {bound}"
        for prefix, part in parts
        if isinstance(part, Mapping)
        for key, bound in _BOUNDS.items()
        if type(part.get(key)) is int and part[key] > bound
    ]


def promised_mtp_layers(config: Mapping[str, Any]) -> tuple[str, int]:
    """Where config.json promises multi-token prediction layers, and how many; ('', 0) when it does not."""
    parts = [("", config), ("text_config.", config.get("text_config"))]
    for prefix, part in parts:
        for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
            count = part.get(key) if isinstance(part, Mapping) else None
            if type(count) is int and 0 < count <= MAX_LAYERS:
                return prefix + key, count
    return "", 0


def _numbered_on(config: Mapping[str, Any]) -> range:
    """The numbers of layers after the last one, where config.json promises such; else none."""
    key, promised = promised_mtp_layers(config)
    part = config["text_config"] if key.startswith("text_config.") else config
    last = part.get("num_hidden_layers")
    if not key.endswith("num_nextn_predict_layers") or not isinstance(last, int) or isinstance(last, bool) or last > MAX_LAYERS:
        return range(0)
    return range(last, last + promised)


def mtp_names(tensors: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Tensors of the multi-token prediction layers: by name, or as the layers after the last one (DeepSeek, GLM)."""
    after = _numbered_on(config)

    def is_mtp(tensor: str) -> bool:
        name = tensor.lower()
        if ".mtp" in name or name.startswith("mtp") or "nextn" in name:
            return True
        layer = _LAYER.match(tensor) if after else None
        return layer is not None and int(layer[1]) in after

    return [tensor for tensor in tensors if is_mtp(tensor)]


def mtp_layers(names: Collection[str], config: Mapping[str, Any]) -> MtpLayers:
    """What is there of the MTP layers, by the names of their tensors (of mtp_names).

    Complete means: all that such a layer needs at least. Of layers that are named in another way nothing is said to be missing.
    """
    key, promised = promised_mtp_layers(config)
    parts: dict[int, set[str]] = {}
    if after := _numbered_on(config):
        for name in names:
            if (match := _LAYER.match(name)) and int(match[1]) in after:
                parts.setdefault(int(match[1]), set()).update(_prefixes(match[2]))
        if parts:
            return _judge(promised, parts, after, lambda have: (part for part in _NEXTN if part not in have))
    common: set[str] = set()
    for name in names:
        if not (path := _below_mtp(name)):
            continue
        first, _, rest = path.partition(".")
        number, _, inside = rest.partition(".")
        if first == "layers" and number.isdecimal() and len(number) < len(str(MAX_LAYERS)):
            parts.setdefault(int(number), set()).update(_prefixes(inside))
        else:
            common.update(_prefixes(path))
    # The key is Qwen's own; where another promises, the names have to show that they are meant in Qwen's way.
    if not (key.endswith("mtp_num_hidden_layers") or parts or common & set(_COMMON)):
        return MtpLayers(promised, 0)
    wanted = range(promised) if promised else range(max(parts, default=0) + 1)
    layers = _judge(promised, parts, wanted, lambda have: _missing_of_layer(have, config))
    if lacking := [part for part in _COMMON if part not in common]:
        layers.missing[""] = lacking
    return layers


def _below_mtp(name: str) -> str:
    """'model.mtp.layers.0.x' -> 'layers.0.x': what follows the last module called mtp; '' when there is none."""
    _, found, rest = name.rpartition(".mtp.")
    return rest if found else name[4:] if name.startswith("mtp.") else ""


def _judge(promised: int, parts: Mapping[int, set[str]], wanted: range, missing_of: Callable[[set[str]], Iterator[str]]) -> MtpLayers:
    missing: dict[str, list[str]] = {}
    for number in wanted:
        rest = missing_of(parts[number]) if number in parts else iter(["everything"])
        lacking = list(rest if len(missing) < _IN_FULL else islice(rest, 1))
        if lacking:
            missing[str(number)] = lacking
    return MtpLayers(promised, len(parts), missing)


def _prefixes(path: str) -> Iterator[str]:
    """'a.b.weight' -> 'a', 'a.b', 'a.b.weight': the modules that a tensor shows to be there, and itself, to the depth asked for."""
    at = path.find(".")
    for _ in range(_MAX_DEPTH):
        if at < 0:
            yield path
            return
        yield path[:at]
        at = path.find(".", at + 1)


def _missing_of_layer(have: Collection[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Parts that a layer of Qwen's kind lacks."""
    attention = _FUSED_ATTENTION if "self_attn.qkv_proj" in have else _ATTENTION
    yield from (part for part in (*_NORMS, *attention) if part not in have)
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    experts = sizes.get("num_experts")
    if type(experts) is int and experts > MAX_EXPERTS:
        return
    if not (type(experts) is int and experts > 0) and "mlp.experts" not in have:
        yield from (f"mlp.{part}" for part in _MATRICES if f"mlp.{part}" not in have)
        return
    if "mlp.gate" not in have:
        yield "mlp.gate"
    if sizes.get("shared_expert_intermediate_size"):
        shared = ("mlp.shared_expert_gate", *(f"mlp.shared_expert.{part}" for part in _MATRICES))
        yield from (part for part in shared if part not in have)
    if any(f"mlp.experts.{part}" in have for part in ("gate_up_proj", *_MATRICES)):  # all experts in one tensor
        wanted = ["mlp.experts.down_proj"]
    else:
        wanted = [f"mlp.experts.{number}.{part}" for number in range(experts if type(experts) is int else 1) for part in _MATRICES]
    yield from (part for part in wanted if part not in have)
