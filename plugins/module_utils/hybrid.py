# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""An INT4 checkpoint with FP8 shared experts: which of a donor's tensors it takes, and how its files are laid out. Reads no files.

What is taken follows from the data types and shapes in the headers; how much of it there must be follows from config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .problems import Problem, problem
from .safetensors_compare import natural_key
from .safetensors_header import DTYPE_BITS, METADATA, Header, Tensor, counted, shown, shown_value, some
from .safetensors_index import Index
from .safetensors_mtp import mtp_names
from .safetensors_quant import FP8_BLOCK, scale_shape

# What makes vLLM 0.30 and later quantise the shared experts of a quantised checkpoint while it loads them.
ONLINE_ENGINE_ARGS = {"quantization-config": {"targets": {"re:.*shared_expert\\.(gate|up|down)_proj$": "fp8_per_block"}}}
NEEDS = {"materialize": ["fp8_dispatch"], "overlay": ["fp8_dispatch", "index_loader"], "online": []}
OVERLAY_NAME = "-fp8-overlay.safetensors"  # with z's in front: loaders read files in natural order and keep what they read last
FLOAT16 = {"BF16", "F16"}
SCALE = "_scale_inv"  # X.weight has its scales in X.weight_scale_inv

_WEIGHT = ".weight"
_MOST_EXPERTS = 100_000
_MOST_NAME_BYTES = 255  # of Linux's file systems
_SCALE_TYPES = {"F32", "BF16", "F16", "F8_E8M0"}
_SHARED = {"shared_expert", "shared_experts"}
_LAYERS = re.compile(r"((?:model\.|language_model\.)*layers\.)\d+\.")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# What the FP8 twin of this family quantises, by kind of layer, and what it leaves in 16 bits that an INT4 export packs.
_ATTENTION = {
    "linear_attention": ("linear_attn", ("in_proj_qkv", "in_proj_z", "out_proj"), ("in_proj_a", "in_proj_b")),
    "full_attention": ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), ()),
}
_MTP_ONCE = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
_MTP_LAYER = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate", "mlp.shared_expert_gate",
)  # fmt: skip
_MTP_LAYER_FP8 = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj",
)  # fmt: skip


# --- the donor -------------------------------------------------------------------------------------------------------------------


class DonorTensor(NamedTuple):
    """A tensor in one of the donor's files. start, end: bytes, counted from the file's beginning."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes."""
        return self.end - self.start


def is_routed(name: str) -> bool:
    """Whether a tensor is one of the routed experts, which stay as the source has them."""
    return "experts" in name.split(".")


def is_shared(name: str) -> bool:
    """Whether a tensor belongs to a layer's shared expert."""
    return not _SHARED.isdisjoint(name.split("."))


def donor_problems(config: Mapping[str, Any]) -> list[Problem]:
    """What the donor's config.json says that no hybrid can keep, and warnings: the result is served with the source's config.json."""
    quantisation = config.get("quantization_config")
    quantisation = quantisation if isinstance(quantisation, Mapping) else {}
    found = []
    method = quantisation.get("quant_method")
    if method is None:
        evidence = "the donor's config.json names no quant_method: that its FP8 weights are what they look like is taken from their headers"
        found.append(problem("donor_quant_method_unknown", evidence, "check that the donor is a block-wise FP8 checkpoint", "warning"))
    elif method != "fp8":
        evidence = f"the donor's config.json has quant_method {shown_value(method)}; a hybrid takes weights of fp8 alone"
        found.append(problem("donor_quant_method", evidence, "take a donor that was quantised with Transformers' fp8"))
    block = quantisation.get("weight_block_size", list(FP8_BLOCK))
    if block != list(FP8_BLOCK):
        evidence = f"the donor's config.json has weight_block_size {shown_value(block)}; loaders of a hybrid take {list(FP8_BLOCK)}"
        found.append(problem("donor_block", evidence, "take an FP8 donor with one scale for each block of 128x128 weights"))
    scheme = quantisation.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        evidence = (
            f"the donor's config.json has activation_scheme {shown_value(scheme)}: its weights need input scales, which a hybrid lacks"
        )
        found.append(problem("donor_activation_scheme", evidence, "take an FP8 donor with dynamic activation scales"))
    return found


# --- what must be found ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """Names that follow from config.json. weights: to be replaced; unplaced: donor tensors for which the source has no place."""

    weights: frozenset[str] = frozenset()
    unplaced: frozenset[str] = frozenset()
    unknown: str = ""  # why config.json does not tell; '' when it does


def expected(config: Mapping[str, Any], names: Iterable[str]) -> Expected:
    """What config.json promises of a Qwen3-Next or Qwen3.5 mixture of experts. names: the source's tensors, for the layers' prefix."""
    nested = config.get("text_config")
    part: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    count, width = part.get("num_hidden_layers"), part.get("shared_expert_intermediate_size")
    if type(count) is not int or not 0 < count < 10_000:
        return Expected(unknown=f"num_hidden_layers is {shown_value(count)}")
    if type(width) is not int or width <= 0:
        return Expected(unknown=f"shared_expert_intermediate_size is {shown_value(width)}: no shared experts")
    experts = part.get("num_experts")
    if type(experts) is int and experts > _MOST_EXPERTS:
        return Expected(unknown=f"num_experts is {shown_value(experts)}, more than {_MOST_EXPERTS}")
    kinds = _layer_kinds(part, count)
    if isinstance(kinds, str):
        return Expected(unknown=kinds)
    prefixes = sorted({match[1] for name in names if is_shared(name) and (match := _LAYERS.match(name))})
    if len(prefixes) != 1:
        found = f"several prefixes of layers: {some(prefixes)}" if prefixes else "no tensor of a layer's shared expert"
        return Expected(unknown=f"the source has {found}")
    weights, unplaced = set(), set(_mtp_names(part))
    has_experts = _expert_layers(part)
    for number, kind in enumerate(kinds):
        layer = f"{prefixes[0]}{number}"
        if has_experts(number):
            weights |= {f"{layer}.mlp.shared_expert.{name}{_WEIGHT}" for name in _PROJECTIONS}
        else:  # a dense layer is packed in the source, like attention
            unplaced |= {f"{layer}.mlp.{name}{_WEIGHT}{end}" for name in _PROJECTIONS for end in ("", SCALE)}
        module, quantised, plain = _ATTENTION[kind]
        for name in (*quantised, *plain):
            unplaced.add(f"{layer}.{module}.{name}{_WEIGHT}")
        unplaced |= {f"{layer}.{module}.{name}{_WEIGHT}{SCALE}" for name in quantised}
    return Expected(frozenset(weights), frozenset(unplaced))


def _layer_kinds(part: Mapping[str, Any], count: int) -> list[str] | str:
    """Each layer's kind of attention, or why it cannot be told."""
    kinds = part.get("layer_types")
    if kinds is None:
        every = part.get("full_attention_interval", 1)
        if type(every) is not int or every < 1:
            return f"full_attention_interval is {shown_value(every)}"
        return ["linear_attention" if (number + 1) % every else "full_attention" for number in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        return f"layer_types is {shown_value(kinds)}, for {count} layers"
    odd = [kind for kind in kinds if not isinstance(kind, str) or kind not in _ATTENTION]
    return f"layer_types has {shown_value(odd[0])}, which is not known" if odd else kinds


def _expert_layers(part: Mapping[str, Any]) -> Callable[[int], bool]:
    """Which layers are a mixture of experts, as Transformers decides it for this family."""
    listed, step = part.get("mlp_only_layers"), part.get("decoder_sparse_step", 1)
    dense = {number for number in listed if type(number) is int} if isinstance(listed, list) else set()
    every = step if type(step) is int and step > 0 else 1
    return lambda number: number not in dense and (number + 1) % every == 0


def _mtp_names(part: Mapping[str, Any]) -> Iterable[str]:
    """The donor's MTP tensors without routed experts: the source keeps its own, in 16 bits."""
    count = part.get("mtp_num_hidden_layers")
    if type(count) is not int or not 0 < count < 1000:
        return
    for name in _MTP_ONCE:
        yield f"mtp.{name}{_WEIGHT}"
    for number in range(count):
        for name in (*_MTP_LAYER, *_MTP_LAYER_FP8):
            yield f"mtp.layers.{number}.{name}{_WEIGHT}"
        for name in _MTP_LAYER_FP8:
            yield f"mtp.layers.{number}.{name}{_WEIGHT}{SCALE}"


# --- choosing --------------------------------------------------------------------------------------------------------------------


@dataclass
class Choice:
    """What is taken of the donor. weights, scales: by tensor name; unplaced: donor tensors that have no place; refused: name to reason."""

    weights: dict[str, DonorTensor] = field(default_factory=dict)
    scales: dict[str, DonorTensor] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    warnings: list[Problem] = field(default_factory=list)
    expect: dict[str, int] = field(default_factory=dict)  # numbers without which it would not be what config.json promises


def choose(
    source: Mapping[str, Tensor], donor: Mapping[str, DonorTensor], config: Mapping[str, Any], expect: Mapping[str, int] | None = None
) -> tuple[Choice, list[Problem]]:
    """The donor's FP8 weights of shared experts, with their scales, and what is wrong with the number of them.

    donor: without its routed experts; expect: numbers that replace what config.json says (weights, scales, unplaced).
    """
    mtp = set(mtp_names(donor, config))
    choice = Choice()
    for name, tensor in donor.items():
        if tensor.dtype != "F8_E4M3" or not name.endswith(_WEIGHT) or name in mtp or is_routed(name) or not is_shared(name):
            continue
        if why := _unfit(name, tensor, source, donor):
            choice.refused[name] = why
            continue
        choice.weights[name] = tensor
        choice.scales[name + SCALE] = donor[name + SCALE]
    other_type = []
    for name, tensor in donor.items():
        if name in choice.weights or name in choice.scales or is_routed(name):
            continue
        have = source.get(name)
        if name in mtp or have is None or have.shape != tensor.shape or tensor.dtype == "F8_E4M3":
            choice.unplaced.append(name)
        elif have.dtype != tensor.dtype:
            other_type.append(f"{shown(name)} ({tensor.dtype}, here {have.dtype})")
    if other_type:
        evidence = f"{counted(len(other_type), 'tensor')} of another type in the donor: {some(other_type, quote=False)}"
        remedy = "nothing, if both were exported from the same model: the source's own are kept"
        choice.warnings.append(problem("donor_type_differs", evidence, remedy, "warning"))
    want = expected(config, source)
    promised = {name for name in want.unplaced if name.startswith("mtp.")}
    if promised and not mtp and "unplaced" not in (expect or {}):
        want = replace(want, unplaced=want.unplaced - promised)
        evidence = "the donor has no MTP layer, though the source's config.json promises one"
        remedy = "nothing: the source's own MTP layer stays in any case"
        choice.warnings.append(problem("donor_without_mtp", evidence, remedy, "warning"))
    return choice, _differences(choice, source, donor, want, expect or {})


def _unfit(name: str, tensor: DonorTensor, source: Mapping[str, Tensor], donor: Mapping[str, DonorTensor]) -> str:
    """Why an FP8 weight cannot take the place of the source's; '' when it can."""
    have, scale = source.get(name), donor.get(name + SCALE)
    if have is None:
        return "the source has no tensor of that name"
    if have.dtype not in FLOAT16:
        return f"the source has it in {have.dtype}, not in 16 bits"
    if have.shape != tensor.shape:
        return f"the source has {list(have.shape)}, the donor {list(tensor.shape)}"
    if len(tensor.shape) != 2:
        return f"its shape is {list(tensor.shape)}, no matrix"
    if scale is None:
        return f"the donor has no {name.rpartition('.')[2]}{SCALE} beside it"
    if scale.dtype not in _SCALE_TYPES:
        return f"its scales are {scale.dtype}, no floating point type"
    if scale.shape != (need := scale_shape(tensor.shape)):
        return f"{list(tensor.shape)} needs scales {list(need)}, the donor has {list(scale.shape)}"
    return "the source has scales of it already" if name + SCALE in source else ""


def _differences(
    choice: Choice, source: Mapping[str, Tensor], donor: Mapping[str, DonorTensor], want: Expected, expect: Mapping[str, int]
) -> list[Problem]:
    """Found against expected, each of the three with the names that differ."""
    if want.unknown and {"weights", "unplaced"} - expect.keys():
        evidence = f"config.json does not tell what the hybrid must have: {want.unknown}"
        remedy = "correct the source, or give the numbers as expect (weights, scales, unplaced) for a model of another kind"
        return [problem("expected_unknown", evidence, remedy), *_refusals(choice)]
    # A donor may quantise what this source leaves in 16 bits too, and the other way round: what both have alike needs no place.
    placed = {n for n in want.unplaced if n in source and n in donor and n not in choice.unplaced}
    names = {
        "weights": (set(choice.weights), set(want.weights)),
        "scales": (set(choice.scales), {name + SCALE for name in want.weights}),
        "unplaced": (set(choice.unplaced), set(want.unplaced) - placed),
    }
    what = {"weights": "FP8 weights to take", "scales": "scales to add", "unplaced": "donor tensors that have no place"}
    problems = []
    for kind, (found, wanted) in names.items():
        number = expect.get(kind, expect.get("weights") if kind == "scales" else None)
        if (len(found) == number) if number is not None else (found == wanted):
            continue
        evidence = f"{what[kind]}: {len(found)} found, {len(wanted) if number is None else number} expected"
        evidence += "" if number is None else " (as given)"
        missing = [_with_reason(name, choice, source, donor) for name in sorted(wanted - found)]
        over = [shown(name) for name in sorted(found - wanted)]
        evidence += f"; missing ({len(missing)}): {some(missing, quote=False)}" if missing else ""
        evidence += f"; {'found' if want.unknown else 'not expected'} ({len(over)}): {some(over, quote=False)}" if over else ""
        remedy = "check that source and donor are of the same model and both complete"
        remedy += "; for a donor that is known to differ give the numbers as expect"
        if kind == "weights" and (prefixes := _other_prefixes(source, donor)):
            evidence += "; the donor has them below {!r}, the source below {!r}: only the prefix differs".format(*prefixes)
            remedy = "take a donor that was exported with the source's names, or rename its tensors"
        problems.append(problem(f"hybrid_{kind}_differ", evidence, remedy))
    return [*problems, *(_refusals(choice) if problems and expect else [])]


def _other_prefixes(source: Mapping[str, Tensor], donor: Mapping[str, DonorTensor]) -> tuple[str, str] | None:
    """(donor's, source's) prefix of layers, when the shared experts have the same names but for that."""
    rests = []
    for names in (donor, source):
        found = [(match[1], name[len(match[1]) :]) for name in names if is_shared(name) and (match := _LAYERS.match(name))]
        prefixes = {prefix for prefix, _ in found}
        if len(prefixes) != 1:
            return None
        rests.append((prefixes.pop(), {rest for _, rest in found if not rest.endswith(SCALE)}))
    (theirs, donors), (ours, sources) = rests
    return (theirs, ours) if theirs != ours and donors & sources else None


def _refusals(choice: Choice) -> list[Problem]:
    """With numbers from outside nothing else says that a weight was left out."""
    if not choice.refused:
        return []
    text = [f"{shown(name)} ({why})" for name, why in choice.refused.items()]
    evidence = f"FP8 weights of shared experts that do not fit ({len(text)}): {some(text, quote=False)}"
    return [problem("hybrid_weight_unfit", evidence, "take the donor and the source of the same model")]


def _with_reason(name: str, choice: Choice, source: Mapping[str, Tensor], donor: Mapping[str, DonorTensor]) -> str:
    weight = name.removesuffix(SCALE) if name.endswith(_WEIGHT + SCALE) else name
    if weight in choice.refused:
        why = choice.refused[weight]
    elif name not in donor:
        why = "not in the donor"
    elif donor[name].dtype != "F8_E4M3" and is_shared(name) and not name.endswith(SCALE):
        why = f"{donor[name].dtype} in the donor"
    else:
        why = ""
    return f"{shown(name)} ({why})" if why else shown(name)


# --- layout ----------------------------------------------------------------------------------------------------------------------


COPY_BLOCK = 64 << 10  # bytes; a multiple of every page size in use


class Piece(NamedTuple):
    """A tensor of a new file, and where its bytes are now. at: offset in the source's shard, or in the donor shard if `donor`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    donor: bool
    at: int


class Run(NamedTuple):
    """Bytes that are copied in one go."""

    donor: bool
    at: int
    length: int


def donor_order(choice: Choice) -> list[tuple[str, DonorTensor]]:
    """The donor shard's tensors in their order: wide types first, so that everything is aligned; then as they lie in the donor."""
    taken = [*choice.weights.items(), *choice.scales.items()]
    return sorted(taken, key=lambda item: (-DTYPE_BITS[item[1].dtype], natural_key(item[1].file), item[1].start, item[1].end))


def donor_pieces(order: Sequence[tuple[str, DonorTensor]]) -> list[Piece]:
    """As pieces, with their offsets in their donor files."""
    return [Piece(name, tensor.dtype, tensor.shape, tensor.nbytes, True, tensor.start) for name, tensor in order]


def shard_pieces(header: Header, donor: Header) -> list[Piece]:
    """The tensors of a source shard with the donor's in their place, each scale in the shard of its weight.

    Wide types first, so that each tensor is aligned to its own size, and else in the order of the source, what is new last: so the others
    stay together in long runs, at offsets that differ from the old ones by as little as can be.
    """
    placed: list[tuple[tuple[int, bool, int, int], Piece]] = []
    for name, tensor in header.tensors.items():
        taken = donor.tensors.get(name)
        pairs = [(name, taken), (name + SCALE, donor.tensors.get(name + SCALE))] if taken else [(name, None)]
        for key, new in pairs:
            entry, start = (new, donor.data_start) if new else (tensor, header.data_start)
            piece = Piece(key, entry.dtype, entry.shape, entry.nbytes, new is not None, start + entry.start)
            placed.append(((-DTYPE_BITS[entry.dtype], new is not None, tensor.start, tensor.end), piece))
    return [piece for _, piece in sorted(placed, key=lambda item: item[0])]


def runs(pieces: Iterable[Piece]) -> list[Run]:
    """Neighbours joined."""
    joined: list[Run] = []
    for piece in pieces:
        if not piece.nbytes:
            continue
        last = joined[-1] if joined else None
        if last and last.donor == piece.donor and last.at + last.length == piece.at:
            joined[-1] = last._replace(length=last.length + piece.nbytes)
        else:
            joined.append(Run(piece.donor, piece.at, piece.nbytes))
    return joined


def header_bytes(pieces: Iterable[Piece], metadata: Mapping[str, str]) -> bytes:
    """A file's beginning: length and JSON, padded so that the data starts at a multiple of 8 bytes.

    Of those, the one that puts the first of the source's bytes as far from a block's start as they were there: the kernel then copies whole
    pages, which takes a fifth less of the processor.
    """
    document: dict[str, Any] = {METADATA: {**metadata, "format": metadata.get("format", "pt")}}
    at, shift = 0, 0  # shift: how much further to the front than in the source the bytes would be, without a header
    for piece in pieces:
        document[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [at, at + piece.nbytes]}
        if not (shift or piece.donor) and piece.nbytes:
            shift = piece.at - at
        at += piece.nbytes
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * ((shift - 8 - len(raw)) % COPY_BLOCK if shift and shift % 8 == 0 else -len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def overlay_name(names: Collection[str]) -> str:
    """A file name that sorts behind all others for a loader; '' when their names leave no room."""
    last = max(map(natural_key, names), default=natural_key(""))
    longest = max((len(name) - len(name.lstrip("z")) for name in names), default=0)
    for first in ("zz", "z" * (longest + 1), "~", "~~~~"):
        name = first + OVERLAY_NAME
        if len(name) <= _MOST_NAME_BYTES and natural_key(name) > last:
            return name
    return ""


def index_document(index: Index | None, owner: Mapping[str, str], total_size: int) -> dict[str, Any]:
    """The new index: the source's own fields, and every tensor's file."""
    rest = {key: value for key, value in index.document.items() if key not in ("metadata", "weight_map")} if index else {}
    return {**rest, "metadata": {**(index.metadata if index else {}), "total_size": total_size}, "weight_map": dict(sorted(owner.items()))}
