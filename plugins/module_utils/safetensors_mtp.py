# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Multi-token prediction (MTP) layers: what config.json promises, which tensors are theirs, and what a layer lacks.

A draft whose layer is incomplete loads without a word and is never accepted: nothing but a name tells.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Where the language model's layers are; a vision tower's layers have other names in front.
_LAYER = re.compile(r"(?:model\.|language_model\.)*layers\.(\d{1,9})\.(.+)")
_MTP = re.compile(r"(?:.+\.)?mtp\.(.+)")
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
    """expected: layers that config.json promises; found: of which there is any tensor; missing: parts by layer ('' for all layers)."""

    expected: int = 0
    found: int = 0
    missing: dict[str, list[str]] = field(default_factory=dict)


def promised_mtp_layers(config: Mapping[str, Any]) -> tuple[str, int]:
    """Where config.json promises multi-token prediction layers, and how many; ('', 0) when it does not."""
    parts = [("", config), ("text_config.", config.get("text_config"))]
    for prefix, part in parts:
        for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
            count = part.get(key) if isinstance(part, Mapping) else None
            if type(count) is int and count > 0:
                return prefix + key, count
    return "", 0


def _numbered_on(config: Mapping[str, Any]) -> range:
    """The numbers of layers after the last one, where config.json promises such; else none."""
    key, promised = promised_mtp_layers(config)
    part = config["text_config"] if key.startswith("text_config.") else config
    last = part.get("num_hidden_layers")
    return range(last, last + promised) if type(last) is int and key.endswith("num_nextn_predict_layers") else range(0)


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
        if not (match := _MTP.fullmatch(name)):
            continue
        first, _, rest = match[1].partition(".")
        number, _, inside = rest.partition(".")
        if first == "layers" and number.isdecimal():
            parts.setdefault(int(number), set()).update(_prefixes(inside))
        else:
            common.update(_prefixes(match[1]))
    # The key is Qwen's own; where another promises, the names have to show that they are meant in Qwen's way.
    if not (key.endswith("mtp_num_hidden_layers") or parts or common & set(_COMMON)):
        return MtpLayers(promised, 0)
    wanted = range(promised) if promised else range(max(parts, default=0) + 1)
    layers = _judge(promised, parts, wanted, lambda have: _missing_of_layer(have, config))
    if lacking := [part for part in _COMMON if part not in common]:
        layers.missing[""] = lacking
    return layers


def _judge(promised: int, parts: Mapping[int, set[str]], wanted: range, missing_of: Any) -> MtpLayers:
    missing = {}
    for number in wanted:
        lacking = list(missing_of(parts[number])) if number in parts else ["everything"]
        if lacking:
            missing[str(number)] = lacking
    return MtpLayers(promised, len(parts), missing)


def _prefixes(path: str) -> Iterator[str]:
    """'a.b.weight' -> 'a', 'a.b': the modules that a tensor shows to be there, and the tensor itself."""
    at = path.find(".")
    while at >= 0:
        yield path[:at]
        at = path.find(".", at + 1)
    yield path


def _missing_of_layer(have: Collection[str], config: Mapping[str, Any]) -> Iterator[str]:
    """Parts that a layer of Qwen's kind lacks."""
    attention = _FUSED_ATTENTION if "self_attn.qkv_proj" in have else _ATTENTION
    yield from (part for part in (*_NORMS, *attention) if part not in have)
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    experts = sizes.get("num_experts")
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
