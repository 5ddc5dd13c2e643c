#!/usr/bin/env python3
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Write a tiny random Qwen3.5-MoE checkpoint, the same bytes on every machine.

usage: tiny_checkpoint.py OUT

The architecture is that of Qwen3.5-122B-A10B in small: three linear-attention layers and one full-attention layer, 8 experts (2 active)
and a shared expert, a vision tower of one block, a multi-token-prediction (MTP) layer. As in the published INT4 checkpoint, the MTP tensors
lie in model_extra_tensors.safetensors, and the index here does not list them. 10 MB in BF16; what it says makes no sense.

SHA256SUMS lists every file; its own SHA-256, which is printed, pins them where the folder itself is the source. The rehearsal's hub offers
it as a repository, whose commit is what the recipe pins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

SEED = 20251129
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 4, 2, 64
LINEAR_KEY_HEADS, LINEAR_VALUE_HEADS, LINEAR_HEAD_DIM, CONV_KERNEL = 2, 4, 64, 4
EXPERTS, FFN, VOCAB = 8, 128, 512
VISION_HIDDEN, VISION_FFN, VISION_POSITIONS = 64, 128, 64
# The last ids of the vocabulary.
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
    "</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
SPECIAL_ID = {token: VOCAB - len(SPECIAL) + i for i, token in enumerate(SPECIAL)}

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- for part in message.content or [] %}
{{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""

Shape = tuple[int, ...]


def language_layer(prefix: str, *, full_attention: bool) -> dict[str, Shape]:
    """Names and shapes of one decoder layer's tensors."""
    shapes: dict[str, Shape] = {f"{prefix}.input_layernorm.weight": (HIDDEN,), f"{prefix}.post_attention_layernorm.weight": (HIDDEN,)}
    if full_attention:
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, HIDDEN),  # query and output gate
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
        }
    else:
        key, value = LINEAR_KEY_HEADS * LINEAR_HEAD_DIM, LINEAR_VALUE_HEADS * LINEAR_HEAD_DIM
        shapes |= {
            f"{prefix}.linear_attn.A_log": (LINEAR_VALUE_HEADS,),
            f"{prefix}.linear_attn.dt_bias": (LINEAR_VALUE_HEADS,),
            f"{prefix}.linear_attn.conv1d.weight": (2 * key + value, 1, CONV_KERNEL),
            f"{prefix}.linear_attn.in_proj_qkv.weight": (2 * key + value, HIDDEN),
            f"{prefix}.linear_attn.in_proj_z.weight": (value, HIDDEN),
            f"{prefix}.linear_attn.in_proj_a.weight": (LINEAR_VALUE_HEADS, HIDDEN),
            f"{prefix}.linear_attn.in_proj_b.weight": (LINEAR_VALUE_HEADS, HIDDEN),
            f"{prefix}.linear_attn.norm.weight": (LINEAR_HEAD_DIM,),
            f"{prefix}.linear_attn.out_proj.weight": (HIDDEN, value),
        }
    for expert in [f"experts.{i}" for i in range(EXPERTS)] + ["shared_expert"]:
        shapes |= {
            f"{prefix}.mlp.{expert}.gate_proj.weight": (FFN, HIDDEN),
            f"{prefix}.mlp.{expert}.up_proj.weight": (FFN, HIDDEN),
            f"{prefix}.mlp.{expert}.down_proj.weight": (HIDDEN, FFN),
        }
    return shapes | {f"{prefix}.mlp.gate.weight": (EXPERTS, HIDDEN), f"{prefix}.mlp.shared_expert_gate.weight": (1, HIDDEN)}


def vision_tower() -> dict[str, Shape]:
    """Names and shapes of the one-block vision tower."""
    v, merged = VISION_HIDDEN, 4 * VISION_HIDDEN
    shapes: dict[str, Shape] = {
        "patch_embed.proj.weight": (v, 3, 2, 16, 16),
        "patch_embed.proj.bias": (v,),
        "pos_embed.weight": (VISION_POSITIONS, v),
    }
    for name, out, into in (
        ("attn.qkv", 3 * v, v),
        ("attn.proj", v, v),
        ("mlp.linear_fc1", VISION_FFN, v),
        ("mlp.linear_fc2", v, VISION_FFN),
    ):
        shapes |= {f"blocks.0.{name}.weight": (out, into), f"blocks.0.{name}.bias": (out,)}
    for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
        shapes |= {f"{name}.weight": (v,), f"{name}.bias": (v,)}
    for name, out, into in (("merger.linear_fc1", merged, merged), ("merger.linear_fc2", HIDDEN, merged)):
        shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    return {f"model.visual.{name}": shape for name, shape in shapes.items()}


def mtp_tensors() -> dict[str, Shape]:
    """Names and shapes of the multi-token-prediction layer."""
    return language_layer("mtp.layers.0", full_attention=True) | {
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": (HIDDEN,),
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
        "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
    }


def values(name: str, shape: Shape) -> np.ndarray:
    """BF16 bits (uint16) of one tensor, drawn from a stream that depends on its name alone.

    Only exact float operations (uniform numbers, sums, products), so that no C library can make a difference.
    """
    if name.endswith(("linear_attn.norm.weight", "dt_bias", "visual.merger.norm.weight", "norm1.weight", "norm2.weight")):
        numbers = np.ones(shape, np.float32)
    elif "norm" in name or name.endswith(".bias"):
        numbers = np.zeros(shape, np.float32)  # Qwen3.5's RMSNorm multiplies by 1 + weight
    elif name.endswith("A_log"):
        numbers = np.linspace(0.5, 2.0, shape[0], dtype=np.float32)
    else:
        digest = hashlib.sha256(f"{SEED} {name}".encode()).digest()
        stream = np.random.RandomState(np.frombuffer(digest, np.uint32).astype(np.uint32))
        spread = 0.5 if "embed_tokens" in name else 0.08
        numbers = ((stream.random_sample(shape) - 0.5) * 2 * spread).astype(np.float32)
        if name == "lm_head.weight":
            # Neither special tokens nor bytes outside printable ASCII ever win, so that an answer is text.
            numbers[VOCAB - len(SPECIAL) :] = 0
            numbers[:32] = numbers[127:256] = 0
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def write_safetensors(path: Path, shapes: dict[str, Shape]) -> None:
    """One file in the safetensors format: length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, blobs = 0, []
    for name in sorted(shapes):
        blob = values(name, shapes[name]).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(blobs))


def byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in byte-level BPE (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, spare = {}, 0
    for byte in range(256):
        if byte in printable:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + spare)
            spare += 1
    return [table[byte] for byte in range(256)]


def tokenizer() -> dict[str, Any]:
    """A byte-level BPE whose merges are pairs of letters, as tokenizer.json."""
    alphabet = byte_alphabet()
    letters = "etaoinshrdlucmfwygpb"
    merges = [("Ġ", a) for a in letters] + [(a, b) for a in letters for b in letters]
    merges = merges[: VOCAB - len(SPECIAL) - len(alphabet)]
    tokens = alphabet + [a + b for a, b in merges]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token.startswith("<|"),
            }
            for token, i in SPECIAL_ID.items()
        ],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def config() -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": SPECIAL_ID["<|image_pad|>"],
        "video_token_id": SPECIAL_ID["<|video_pad|>"],
        "vision_start_token_id": SPECIAL_ID["<|vision_start|>"],
        "vision_end_token_id": SPECIAL_ID["<|vision_end|>"],
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": SPECIAL_ID["<|im_end|>"],
            "pad_token_id": SPECIAL_ID["<|endoftext|>"],
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"],
            "linear_conv_kernel_dim": CONV_KERNEL,
            "linear_key_head_dim": LINEAR_HEAD_DIM,
            "linear_num_key_heads": LINEAR_KEY_HEADS,
            "linear_num_value_heads": LINEAR_VALUE_HEADS,
            "linear_value_head_dim": LINEAR_HEAD_DIM,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": FFN,
            "mtp_num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": KV_HEADS,
            "output_router_logits": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "default"},
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": FFN,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": VOCAB,
        },
        "vision_config": {
            "model_type": "qwen3_5_moe_vision",
            "depth": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": VISION_HIDDEN,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": VISION_FFN,
            "num_heads": 2,
            "num_position_embeddings": VISION_POSITIONS,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def side_files() -> dict[str, Any]:
    """Everything but weights: file name -> JSON value or text."""
    image = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"longest_edge": 65536, "shortest_edge": 1024},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return {
        "config.json": config(),
        "generation_config.json": {
            "eos_token_id": [SPECIAL_ID["<|im_end|>"], SPECIAL_ID["<|endoftext|>"]],
            "pad_token_id": SPECIAL_ID["<|endoftext|>"],
        },
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
        },
        "chat_template.jinja": CHAT_TEMPLATE,
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": image | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }


def main() -> None:
    """Write beside OUT, then rename."""
    out = Path(sys.argv[1])
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    first = {"model.language_model.embed_tokens.weight": (VOCAB, HIDDEN)} | vision_tower()
    second: dict[str, Shape] = {"lm_head.weight": (VOCAB, HIDDEN), "model.language_model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes = language_layer(f"model.language_model.layers.{layer}", full_attention=layer == LAYERS - 1)
        (first if layer < LAYERS // 2 else second).update(shapes)
    shards = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for file, shapes in shards.items():
        write_safetensors(part / file, shapes)
    write_safetensors(part / "model_extra_tensors.safetensors", mtp_tensors())
    total = sum(2 * int(np.prod(shape)) for shapes in shards.values() for shape in shapes.values())
    weight_map = {name: file for file, shapes in shards.items() for name in shapes}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for file, content in {**side_files(), "model.safetensors.index.json": index}.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (part / file).write_text(text, encoding="utf-8")
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(part.iterdir())]
    sums = part / "SHA256SUMS"
    sums.write_text("".join(lines))
    if out.exists():
        shutil.rmtree(out)
    os.rename(part, out)
    print(hashlib.sha256((out / "SHA256SUMS").read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
