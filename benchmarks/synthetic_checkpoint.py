#!/usr/bin/env python3
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Checkpoints of any size with the names and proportions of Qwen3.5-122B-A10B, for tests and benchmarks.

`write_source` writes what AutoRound makes of the model: INT4 experts and attention, shared experts and MTP layer in BF16. `write_donor`
writes its FP8 twin. Tensors hold noise. The same arguments give the same bytes, on every machine.

    python benchmarks/synthetic_checkpoint.py OUT --size 4G [--donor DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

INDEX_NAME = "model.safetensors.index.json"
MTP_NAME = "model_extra_tensors.safetensors"  # AutoRound's name for what its own saving would drop; the index does not list it
GROUP = 128  # rows of a matrix that share an INT4 scale
BLOCK = 128  # rows and columns that share an FP8 scale
UNIT = 8  # INT4 values in one I32: every packed matrix has multiples of this in both directions
BITS = {"I32": 32, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8}

# A prime number of bytes, so that a piece that is copied from a wrong page or MiB is not equal by chance.
_PERIOD = 1_048_573


class Tensor(NamedTuple):
    """What a header says of a tensor, but for its place."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Model:
    """The model's dimensions; the defaults are those of Qwen3.5-122B-A10B."""

    layers: int = 48
    experts: int = 256
    hidden: int = 3072
    expert_ffn: int = 1024
    shared_ffn: int = 1024
    heads: int = 32
    kv_heads: int = 2
    head_dim: int = 256
    linear_key_heads: int = 16
    linear_value_heads: int = 64
    linear_head_dim: int = 128
    vocab: int = 248_320
    mtp_layers: int = 1
    vision_depth: int = 27
    vision_hidden: int = 1152
    vision_ffn: int = 4304

    def is_full_attention(self, layer: int) -> bool:
        """Every fourth layer has full attention, the others linear attention."""
        return layer % 4 == 3

    def config(self, quantization_config: dict[str, Any]) -> dict[str, Any]:
        """config.json."""
        text = {
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "head_dim": self.head_dim,
            "hidden_size": self.hidden,
            "layer_types": ["full_attention" if self.is_full_attention(n) else "linear_attention" for n in range(self.layers)],
            "linear_key_head_dim": self.linear_head_dim,
            "linear_num_key_heads": self.linear_key_heads,
            "linear_num_value_heads": self.linear_value_heads,
            "linear_value_head_dim": self.linear_head_dim,
            "moe_intermediate_size": self.expert_ffn,
            "mtp_num_hidden_layers": self.mtp_layers,
            "num_attention_heads": self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": min(8, self.experts),
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "shared_expert_intermediate_size": self.shared_ffn,
            "vocab_size": self.vocab,
        }
        vision = {"depth": self.vision_depth, "hidden_size": self.vision_hidden, "intermediate_size": self.vision_ffn}
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "quantization_config": quantization_config,
            "text_config": text,
            "tie_word_embeddings": False,
            "vision_config": {**vision, "out_hidden_size": self.hidden},
        }

    @staticmethod
    def of_config(config: dict[str, Any]) -> Model:
        """The dimensions in a config.json that `config` made."""
        text, vision = config["text_config"], config["vision_config"]
        return Model(
            layers=text["num_hidden_layers"],
            experts=text["num_experts"],
            hidden=text["hidden_size"],
            expert_ffn=text["moe_intermediate_size"],
            shared_ffn=text["shared_expert_intermediate_size"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            linear_key_heads=text["linear_num_key_heads"],
            linear_value_heads=text["linear_num_value_heads"],
            linear_head_dim=text["linear_value_head_dim"],
            vocab=text["vocab_size"],
            mtp_layers=text["mtp_num_hidden_layers"],
            vision_depth=vision["depth"],
            vision_hidden=vision["hidden_size"],
            vision_ffn=vision["intermediate_size"],
        )


# ------------------------------------------------------------------------------------------------------ how a matrix is stored


def plain(name: str, rows: int, columns: int) -> list[Tensor]:
    """A matrix [out, in] in BF16."""
    return [Tensor(f"{name}.weight", "BF16", (rows, columns))]


def packed(name: str, rows: int, columns: int) -> list[Tensor]:
    """A matrix [out, in] in AutoRound's INT4, GPTQ packing: qweight [in/8, out], qzeros [groups, out/8], scales [groups, out]."""
    groups = -(-columns // GROUP)
    return [
        Tensor(f"{name}.qweight", "I32", (columns // UNIT, rows)),
        Tensor(f"{name}.qzeros", "I32", (groups, rows // UNIT)),
        Tensor(f"{name}.scales", "F16", (groups, rows)),
    ]


def fp8(name: str, rows: int, columns: int) -> list[Tensor]:
    """A matrix [out, in] in FP8 with one BF16 scale for each 128x128 block."""
    scales = (-(-rows // BLOCK), -(-columns // BLOCK))
    return [Tensor(f"{name}.weight", "F8_E4M3", (rows, columns)), Tensor(f"{name}.weight_scale_inv", "BF16", scales)]


# ------------------------------------------------------------------------------------------------------------- the model's parts


def _mlp(prefix: str, width: int, hidden: int, store: Any) -> Iterator[Tensor]:
    yield from store(f"{prefix}.gate_proj", width, hidden)
    yield from store(f"{prefix}.up_proj", width, hidden)
    yield from store(f"{prefix}.down_proj", hidden, width)


def _moe(m: Model, prefix: str, shared: Any, experts: Any) -> Iterator[Tensor]:
    """Router, shared expert and its gate, and, unless `experts` is None, the routed experts."""
    yield from plain(f"{prefix}.gate", m.experts, m.hidden)
    yield from plain(f"{prefix}.shared_expert_gate", 1, m.hidden)
    yield from _mlp(f"{prefix}.shared_expert", m.shared_ffn, m.hidden, shared)
    if experts:
        for number in range(m.experts):
            yield from _mlp(f"{prefix}.experts.{number}", m.expert_ffn, m.hidden, experts)


def _norms(m: Model, prefix: str) -> Iterator[Tensor]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{prefix}.{name}.weight", "BF16", (m.hidden,))


def _full_attention(m: Model, prefix: str, store: Any) -> Iterator[Tensor]:
    queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
    yield from store(f"{prefix}.q_proj", 2 * queries, m.hidden)  # with the output gate
    yield from store(f"{prefix}.k_proj", keys, m.hidden)
    yield from store(f"{prefix}.v_proj", keys, m.hidden)
    yield from store(f"{prefix}.o_proj", m.hidden, queries)
    for name in ("q_norm", "k_norm"):
        yield Tensor(f"{prefix}.{name}.weight", "BF16", (m.head_dim,))


def _linear_attention(m: Model, prefix: str, store: Any, store_small: Any) -> Iterator[Tensor]:
    keys, values = m.linear_key_heads * m.linear_head_dim, m.linear_value_heads * m.linear_head_dim
    yield from store(f"{prefix}.in_proj_qkv", 2 * keys + values, m.hidden)
    yield from store(f"{prefix}.in_proj_z", values, m.hidden)
    yield from store_small(f"{prefix}.in_proj_a", m.linear_value_heads, m.hidden)
    yield from store_small(f"{prefix}.in_proj_b", m.linear_value_heads, m.hidden)
    yield from store(f"{prefix}.out_proj", m.hidden, values)
    yield Tensor(f"{prefix}.conv1d.weight", "BF16", (2 * keys + values, 1, 4))
    yield Tensor(f"{prefix}.A_log", "F32", (m.linear_value_heads,))
    yield Tensor(f"{prefix}.dt_bias", "BF16", (m.linear_value_heads,))
    yield Tensor(f"{prefix}.norm.weight", "BF16", (m.linear_head_dim,))


def _layers(m: Model, attention: Any, attention_small: Any, shared: Any, experts: Any) -> Iterator[Tensor]:
    for number in range(m.layers):
        prefix = f"model.language_model.layers.{number}"
        yield from _norms(m, prefix)
        if m.is_full_attention(number):
            yield from _full_attention(m, f"{prefix}.self_attn", attention)
        else:
            yield from _linear_attention(m, f"{prefix}.linear_attn", attention, attention_small)
        yield from _moe(m, f"{prefix}.mlp", shared, experts)


def _ends(m: Model) -> Iterator[Tensor]:
    """Embedding, last norm and head."""
    yield from plain("model.language_model.embed_tokens", m.vocab, m.hidden)
    yield Tensor("model.language_model.norm.weight", "BF16", (m.hidden,))
    yield from plain("lm_head", m.vocab, m.hidden)


def _vision(m: Model) -> Iterator[Tensor]:
    """The vision tower: 333 tensors at a depth of 27."""

    def affine(name: str, *shape: int) -> Iterator[Tensor]:
        yield Tensor(f"model.visual.{name}.weight", "BF16", shape)
        yield Tensor(f"model.visual.{name}.bias", "BF16", shape[:1])

    width, merged = m.vision_hidden, 4 * m.vision_hidden
    yield from affine("patch_embed.proj", width, 3, 2, 16, 16)
    yield Tensor("model.visual.pos_embed.weight", "BF16", (48 * 48, width))
    for number in range(m.vision_depth):
        block = f"blocks.{number}"
        yield from affine(f"{block}.norm1", width)
        yield from affine(f"{block}.norm2", width)
        yield from affine(f"{block}.attn.qkv", 3 * width, width)
        yield from affine(f"{block}.attn.proj", width, width)
        yield from affine(f"{block}.mlp.linear_fc1", m.vision_ffn, width)
        yield from affine(f"{block}.mlp.linear_fc2", width, m.vision_ffn)
    yield from affine("merger.norm", width)
    yield from affine("merger.linear_fc1", merged, merged)
    yield from affine("merger.linear_fc2", m.hidden, merged)


def _mtp(m: Model, store: Any, experts: Any) -> Iterator[Tensor]:
    """The multi-token prediction layers: 17 weights, and three for each expert; 785 in the real model."""
    if not m.mtp_layers:
        return
    yield from plain("mtp.fc", m.hidden, 2 * m.hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield Tensor(f"mtp.{name}.weight", "BF16", (m.hidden,))
    for number in range(m.mtp_layers):
        prefix = f"mtp.layers.{number}"
        yield from _norms(m, prefix)
        yield from _full_attention(m, f"{prefix}.self_attn", store)
        yield from _moe(m, f"{prefix}.mlp", store, experts)


def source_tensors(m: Model) -> Iterator[Tensor]:
    """What AutoRound's index lists."""
    return chain(_ends(m), _layers(m, packed, packed, plain, packed), _vision(m))


def source_mtp_tensors(m: Model) -> Iterator[Tensor]:
    """What lies in MTP_NAME, all in BF16."""
    return _mtp(m, plain, plain)


def donor_tensors(m: Model, experts: bool = False) -> Iterator[Tensor]:
    """The FP8 twin, MTP included; with its routed experts, or without, which are most of its bytes."""
    routed = fp8 if experts else None
    return chain(_ends(m), _layers(m, fp8, plain, fp8, routed), _mtp(m, fp8, routed), _vision(m))


# ---------------------------------------------------------------------------------------------------------------- sizes


def source_bytes(m: Model) -> int:
    """Bytes of all tensors of the source."""
    total = 0
    for tensor in chain(source_tensors(replace(m, experts=1)), source_mtp_tensors(replace(m, experts=1))):
        # One expert stands for all, and the router has a row for each.
        each = ".mlp.experts." in tensor.name or tensor.name.endswith(".mlp.gate.weight")
        total += tensor.nbytes * (m.experts if each else 1)
    return total


def _wide(value: float, least: int) -> int:
    """A width near this. As in the real model a power of two divides it, where it is not too small, and with it each matrix's bytes."""
    return 256 * round(value / 256) if value >= 192 else max(least, UNIT * round(value / UNIT))


def model_of_size(size_bytes: int, layers: int, experts: int, **fixed: int) -> Model:
    """The model whose source has about `size_bytes`, with the real one's proportions where there is room for them.

    Fewer experts than 256 are wider by as much, so that they have the same share of the bytes. fixed: dimensions of Model to keep.
    """
    real = Model()
    guess = math.sqrt(size_bytes / source_bytes(replace(real, layers=layers)))
    hidden, shared_ffn = _wide(real.hidden * guess, 64), _wide(real.shared_ffn * guess, 32)

    def scaled(factor: float) -> Model:
        def to(value: float, least: int) -> int:
            return max(least, UNIT * round(value * factor / UNIT))

        return replace(
            Model(
                layers=layers,
                experts=experts,
                hidden=hidden,
                expert_ffn=to(real.expert_ffn * real.experts / experts, 16),
                shared_ffn=shared_ffn,
                head_dim=to(real.head_dim, UNIT),
                linear_head_dim=to(real.linear_head_dim, UNIT),
                vocab=to(real.vocab, 64),
                vision_depth=max(1, real.vision_depth * layers // real.layers),
                vision_hidden=to(real.vision_hidden, UNIT),
                vision_ffn=to(real.vision_ffn, UNIT),
            ),
            **fixed,
        )

    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if source_bytes(scaled(middle)) <= size_bytes else (low, middle)
    model = scaled(low)
    if "vocab" not in fixed:
        # What rounding left over goes into the embedding and the head, both 2 bytes a number.
        rest = (size_bytes - source_bytes(replace(model, vocab=0))) // (4 * model.hidden)
        model = replace(model, vocab=max(64, UNIT * (rest // UNIT)))
    return model


# -------------------------------------------------------------------------------------------------------------------- writing


class Noise:
    """Bytes for any tensor, from its name and a seed alone."""

    def __init__(self, seed: int) -> None:
        self._twice = memoryview(random.Random(seed).randbytes(_PERIOD) * 2)

    def of(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes, in pieces."""
        at, left = zlib.crc32(tensor.name.encode()) % _PERIOD, tensor.nbytes
        while left > 0:
            piece = self._twice[at : at + min(left, _PERIOD)]
            left -= len(piece)
            yield piece


def write_shard(path: Path, tensors: Iterable[Tensor], noise: Noise) -> int:
    """Write a file as the safetensors library does: wide types first, then by name, header padded. Returns its tensors' bytes."""
    ordered = sorted(tensors, key=lambda tensor: (-BITS[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb", buffering=1 << 18) as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in ordered:
            stream.writelines(noise.of(tensor))
    return at


def _split(tensors: Sequence[Tensor], shards: int) -> list[list[Tensor]]:
    """Tensors in their order, in files of about equal size."""
    total, at = sum(tensor.nbytes for tensor in tensors), 0
    parts: list[list[Tensor]] = [[] for _ in range(shards)]
    for tensor in tensors:
        parts[min(shards - 1, (at + tensor.nbytes // 2) * shards // total)].append(tensor)
        at += tensor.nbytes
    return parts


def _write_shards(folder: Path, pattern: str, tensors: Sequence[Tensor], shards: int, noise: Noise) -> None:
    """Shards, and their index. pattern: a file's name from {number} and {total}."""
    weight_map: dict[str, str] = {}
    for number, part in enumerate(_split(tensors, shards), 1):
        name = pattern.format(number=number, total=shards)
        write_shard(folder / name, part, noise)
        weight_map.update((tensor.name, name) for tensor in part)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def _write_small_files(folder: Path, config: dict[str, Any], title: str) -> None:
    files = {
        "config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95}\n',
        "tokenizer_config.json": '{"tokenizer_class": "TokenizersBackend"}\n',
        "tokenizer.json": '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}\n',
        "chat_template.jinja": "{{ messages }}\n",
        "README.md": f"# {title}\n\nNoise, for tests and benchmarks.\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)


def write_source(
    folder: Path, size_bytes: int = 1 << 20, *, layers: int = 4, experts: int = 4, shards: int = 3, seed: int = 0, **fixed: int
) -> Model:
    """Write an AutoRound checkpoint of about `size_bytes` bytes (MTP file included) into a folder, which is made.

    fixed: dimensions of Model that shall not follow from the size, such as hidden=256, shared_ffn=136, or mtp_layers=0.
    The smallest has some 600 kB with the default layers and experts.
    """
    model = model_of_size(size_bytes, layers, experts, **fixed)
    noise = Noise(seed)
    folder.mkdir(parents=True, exist_ok=True)
    _write_shards(folder, "model-{number:05d}-of-{total:05d}.safetensors", list(source_tensors(model)), shards, noise)
    if extra := list(source_mtp_tensors(model)):
        write_shard(folder / MTP_NAME, extra, noise)
    prefix = "model.language_model.layers"
    unquantised = [f"{prefix}.{n}.mlp.shared_expert.{part}_proj" for n in range(layers) for part in ("gate", "up", "down")]
    quantisation = {
        "autoround_version": "0.10.0",
        "bits": 4,
        "block_name_to_quantize": prefix,
        "data_type": "int",
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in unquantised},
        "group_size": GROUP,
        "packing_format": "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": True,
    }
    _write_small_files(folder, model.config(quantisation), "Synthetic INT4 checkpoint")
    return model


def write_donor(folder: Path, like: Path, *, shards: int = 2, seed: int = 0, experts: bool = False) -> Model:
    """Write the FP8 twin of the source in folder `like`.

    experts: with the routed experts in FP8 too, as the real one has them (1.7 times the source's bytes).
    Tensors that both have in the same type have the same bytes, if the seed is the same.
    """
    model = Model.of_config(json.loads((like / "config.json").read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(donor_tensors(model, experts))
    _write_shards(folder, "model.safetensors-{number:05d}-of-{total:05d}.safetensors", tensors, shards, Noise(seed))
    halves = ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate", "mlp.shared_expert_gate")
    unquantised = [f"model.language_model.layers.{n}.{name}" for n in range(model.layers) for name in halves]
    quantisation = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens", "model.visual", "mtp.fc", *unquantised],
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    _write_small_files(folder, model.config(quantisation), "Synthetic FP8 checkpoint")
    return model


# ---------------------------------------------------------------------------------------------------------------- command line


def parse_size(text: str) -> int:
    """Bytes from '4G', '300M', '1.5G' (powers of 1000) or '4GiB' (powers of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4G or 300M")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kMGT".index(match[2].replace("K", "k") or " "))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the INT4 checkpoint")
    parser.add_argument("--size", type=parse_size, default=parse_size("100M"), help="bytes of its tensors, such as 4G (default: 100M)")
    parser.add_argument("--donor", type=Path, help="folder for the FP8 twin; by default none is written")
    parser.add_argument("--donor-experts", action="store_true", help="give the twin its routed experts too")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=61, help="61 of them make some 28,000 tensors, the real 256 about 112,000")
    parser.add_argument("--shards", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = write_source(args.out, args.size, layers=args.layers, experts=args.experts, shards=args.shards, seed=args.seed)
    if args.donor:
        write_donor(args.donor, args.out, seed=args.seed, experts=args.donor_experts)
    print(json.dumps(asdict(model), indent=1))


if __name__ == "__main__":
    main()
