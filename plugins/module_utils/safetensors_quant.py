# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What quantised tensors need from each other and from config.json: what a loader leaves out in silence or refuses in riddles."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
import time
from collections.abc import Collection, Mapping
from typing import Any

from .problems import Problem, problem
from .safetensors_header import Tensor, counted, shown, some

FP8_BLOCK = (128, 128)  # rows, columns: DeepSeek's and Qwen's FP8 checkpoints

_FLOAT_SCALES = {"F32", "BF16", "F16", "F8_E8M0"}
# Lists of modules that stay unquantised: compressed-tensors and ModelOpt; ModelOpt; Transformers; fp8.
_IGNORE_KEYS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
# Modules that a runtime fuses, and what it calls the whole.
_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz", "in_proj_a": "in_proj_ba", "in_proj_b": "in_proj_ba",
}  # fmt: skip
# Matrices that no quantiser touches, so that nobody has to list them.
_NEVER_QUANTISED = re.compile(r"norm|embed|router|conv|(^|\.)(gate|shared_expert_gate)$")
# Bounds for expressions from config.json, which anybody may have written: characters, steps of one match, seconds for all.
_MAX_PATTERN = 500
_MAX_STEPS = 10**8
_MATCH_SECONDS = 10.0
_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d*,?\d*\})[?+]?")
_REGEX_TOKEN = re.compile(rf"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:#|[aiLmsu]*x)?|{_QUANTIFIER.pattern}|.", re.DOTALL)
_SOURCE = "The checkpoint was written by a faulty build or export: build it again, or download it again."


def quantisation_problems(
    tensors: Mapping[str, Tensor], unread: Collection[str], config: Mapping[str, Any], mtp: Collection[str]
) -> list[Problem]:
    """Problems of the quantised tensors.

    unread: names that exist, but in shards that cannot be read now; mtp: which of the tensors are of the MTP layers.
    """
    quantisation = config.get("quantization_config")
    quantisation = quantisation if isinstance(quantisation, Mapping) else {}
    return [
        *_fp8_problems(tensors, unread, _block(quantisation)),
        *_lonely_problems(tensors, unread),
        *_head_problems(tensors, quantisation),
        *_mtp_problems(tensors, quantisation, mtp),
    ]


def _block(quantisation: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns per scale. A hybrid of INT4 and FP8 does not say; then it is the usual block."""
    block = quantisation.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block[0], block[1]
    return FP8_BLOCK


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = FP8_BLOCK) -> tuple[int, ...]:
    """Shape of the block scales of a matrix, or of a stack of matrices: ceil(rows/block) x ceil(columns/block)."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _fp8_problems(tensors: Mapping[str, Tensor], unread: Collection[str], block: tuple[int, int]) -> list[Problem]:
    """Every FP8 weight has its scales: weight_scale_inv, one per block. ModelOpt and compressed-tensors write
    weight_scale, DeepSeek V4 scale; their shapes vary."""
    missing: list[str] = []
    wrong: list[str] = []
    for name, tensor in tensors.items():
        if tensor.dtype != "F8_E4M3" or not (name.endswith(".weight") or name == "weight"):
            continue
        scale = tensors.get(f"{name}_scale_inv")
        if scale is None:
            others = (f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('weight')}scale")
            if not any(other in tensors or other in unread for other in others):
                missing.append(name)
            continue
        if scale.dtype not in _FLOAT_SCALES:
            wrong.append(f"{shown(name)}_scale_inv is {scale.dtype}, no floating point type")
        elif len(tensor.shape) >= 2 and scale.shape != scale_shape(tensor.shape, block):
            need = list(scale_shape(tensor.shape, block))
            wrong.append(f"{shown(name)} {list(tensor.shape)} needs scales {need}, has {list(scale.shape)}")
    problems = []
    if missing:
        evidence = f"{counted(len(missing), 'FP8 weight')} without weight_scale_inv (or weight_scale) beside it: {some(missing)}"
        problems.append(problem("fp8_scale_missing", evidence, f"A model without them loads and talks nonsense. {_SOURCE}"))
    if wrong:
        evidence = (
            f"{counted(len(wrong), 'FP8 weight')} with scales that do not fit blocks of {block[0]}x{block[1]}: {some(wrong, quote=False)}"
        )
        problems.append(problem("fp8_scale_wrong", evidence, _SOURCE))
    return problems


def _lonely_problems(tensors: Mapping[str, Tensor], unread: Collection[str]) -> list[Problem]:
    """Packed weights without scales, in a checkpoint whose other packed weights have them: loaders put ones there."""
    problems = []
    for weight, scale in (("qweight", "scales"), ("weight_packed", "weight_scale")):
        packed = [name for name in tensors if name.endswith(f".{weight}")]
        lonely = [name for name in packed if (other := f"{name.removesuffix(weight)}{scale}") not in tensors and other not in unread]
        if lonely and len(lonely) < len(packed):
            evidence = f"{len(lonely)} of {counted(len(packed), f'{weight} tensor')} without {scale} beside it: {some(lonely)}"
            problems.append(problem("scale_missing", evidence, f"A model without them loads and talks nonsense. {_SOURCE}"))
    return problems


def _head_problems(tensors: Mapping[str, Tensor], quantisation: Mapping[str, Any]) -> list[Problem]:
    """A quantised lm_head of which config.json knows nothing."""
    packed = [name for name in tensors if name.endswith(("lm_head.qweight", "lm_head.weight_packed"))]
    said = {key: value for key, value in quantisation.items() if key not in _IGNORE_KEYS and not (key == "lm_head" and value is not True)}
    if not packed or not quantisation or _mentions(said, "lm_head"):
        return []
    evidence = f"{packed[0]} is quantised, but quantization_config in config.json does not list lm_head as quantised"
    remedy = "vLLM stops with: no module or parameter named 'lm_head.qweight'. Take an export with a plain lm_head, or correct config.json."
    return [problem("lm_head_quantised", evidence, remedy, "warning")]


def _mentions(value: Any, text: str) -> bool:
    """Whether any key or string inside of a JSON value contains a text. Not by recursion, which deep values break."""
    todo = [value]
    while todo:
        inner = todo.pop()
        if isinstance(inner, str) and text in inner:
            return True
        if isinstance(inner, Mapping):
            todo += [*inner.keys(), *inner.values()]
        elif isinstance(inner, list):
            todo += inner
    return False


def _mtp_problems(tensors: Mapping[str, Tensor], quantisation: Mapping[str, Any], mtp: Collection[str]) -> list[Problem]:
    """MTP layers are drafted with as they are stored: what config.json says of them must fit."""
    problems = []
    packed = [name for name in mtp if name.endswith(("mtp.fc.qweight", "mtp.fc.weight_packed"))]
    if packed:
        evidence = f"{', '.join(packed)}: the projection in front of the MTP layer is quantised; loaders expect it plain"
        problems.append(problem("mtp_fc_quantised", evidence, "Take an export that leaves mtp.fc in BF16.", "warning"))
    lists = [quantisation[key] for key in _IGNORE_KEYS if isinstance(quantisation.get(key), list)]
    if lists and _quantises_all_linears(quantisation):
        ignored = IgnoreList([entry for entries in lists for entry in entries if isinstance(entry, str)])
        plain = [name.removesuffix(".weight") for name in mtp if _is_plain_linear(name, tensors[name])]
        uncovered = [module for module in plain if not ignored.covers(module)]
        if uncovered and ignored.unchecked:
            evidence = f"not checked: {len(ignored.unchecked)} of the entries of quantization_config's ignore list, against "
            evidence += f"{counted(len(uncovered), 'MTP module')}, as an expression could take for ever, or all entries took more than "
            evidence += f"{_MATCH_SECONDS:g} s: {some(ignored.unchecked)}"
            remedy = "Write few expressions, without repetitions inside of repeated groups, in at most 500 characters, as re:.*mtp.*"
            problems.append(problem("mtp_ignore_not_checked", evidence, remedy, "warning"))
        elif uncovered:
            evidence = (
                f"{counted(len(uncovered), 'MTP module')} stored in 16 bits that no entry of quantization_config's ignore list covers: "
            )
            evidence += some(uncovered)
            remedy = "A draft that is loaded as quantised is never accepted. Add the modules to the ignore list, for instance as re:.*mtp.*"
            problems.append(problem("mtp_not_ignored", evidence, remedy, "warning"))
    return problems


def _quantises_all_linears(quantisation: Mapping[str, Any]) -> bool:
    """Whether modules are quantised unless they are listed as not. compressed-tensors may name its targets instead."""
    groups = quantisation.get("config_groups")
    if not isinstance(groups, Mapping):
        return True
    targets = [group.get("targets") for group in groups.values() if isinstance(group, Mapping)]
    return any(target is None or (isinstance(target, list) and "Linear" in target) for target in targets)


def _is_plain_linear(name: str, tensor: Tensor) -> bool:
    module = name.removesuffix(".weight")
    return module != name and tensor.dtype in ("BF16", "F16") and len(tensor.shape) == 2 and not _NEVER_QUANTISED.search(module)


class IgnoreList:
    """Which modules stay unquantised: entries are names or parts of one, globs, or re: and an expression.

    unchecked: entries that might match but were not tried, as they could take for ever; all of them, once the time for all has passed.
    """

    def __init__(self, entries: Collection[str]) -> None:
        self.unchecked: dict[str, None] = {}
        self._entries = list(dict.fromkeys(entries))
        self._patterns: list[tuple[str, re.Pattern[str], int, int]] = []
        self._deadline, self._ended = time.monotonic() + _MATCH_SECONDS, False
        self._plain = {entry for entry in self._entries if not entry.startswith("re:") and not set(entry) & set("*?[")}
        self._sizes = {len(entry) for entry in self._plain}
        self._counts = sorted({entry.count(".") + 1 for entry in self._plain})
        for entry in self._entries:
            if self._late():
                break
            if entry not in self._plain:
                self._add_pattern(entry)

    def _late(self) -> bool:
        """Whether the time for all entries and modules has passed."""
        if not self._ended and time.monotonic() > self._deadline:
            self._ended = True
            self.unchecked.update(dict.fromkeys(self._entries))
        return self._ended

    def _add_pattern(self, entry: str) -> None:
        is_regex = entry.startswith("re:")
        # Globs never backtrack far.
        choices = None if len(entry) > _MAX_PATTERN else regex_choices(entry[3:]) if is_regex else (1, 0)
        if choices is None:
            self.unchecked[entry] = None
            return
        # What does not compile covers nothing.
        with contextlib.suppress(re.error, OverflowError, RecursionError):
            self._patterns.append((entry, re.compile(entry[3:] if is_regex else fnmatch.translate(entry)), *choices))

    def covers(self, module: str) -> bool:
        """Whether an entry covers a module, by its own or its fused name. False, once it is late."""
        parent, _, last = module.rpartition(".")
        names = [module, f"{parent}.{_FUSED[last]}"] if last in _FUSED else [module]
        return any(self._names(name) for name in names) or any(self._matches(name) for name in names)

    def _names(self, name: str) -> bool:
        """Whether a plain entry is the name, or whole parts of it that follow each other. Asks for the parts, as entries may be many."""
        dots = [-1, *(dot.start() for dot in re.finditer(r"\.", name)), len(name)]
        for count in self._counts:
            if count >= len(dots) or self._late():
                return False
            for first in range(len(dots) - count):
                start, end = dots[first] + 1, dots[first + count]
                if end - start not in self._sizes:
                    continue
                if name[start:end] in self._plain:
                    return True
                if self._late():
                    return False
        return False

    def _matches(self, name: str) -> bool:
        for entry, pattern, fixed, repeats in self._patterns:
            if self._late():
                return False
            if fixed * math.comb(len(name) + repeats, repeats) > _MAX_STEPS:
                self.unchecked[entry] = None
            elif pattern.match(name):
                return True
        return False


def regex_choices(expression: str) -> tuple[int, int] | None:
    """How far an expression can backtrack: ways through its alternatives, and how many repetitions it has.

    None when there is no telling: a repeated group that has choices of its own, as (a+)+ or (a|aa)*, takes exponential time.
    """
    fixed, repeats = 1, 0
    groups: list[tuple[int, int]] = [(0, 0)]  # of each open group: alternatives so far beyond the first, choices inside
    closed = 0  # choices inside of the group that ended right before this token
    for token in _REGEX_TOKEN.findall(expression):
        inside, closed = closed, 0
        if token.startswith("(?") and token != "(?":
            return None  # verbose mode and comments could hide what a quantifier belongs to
        if token.startswith("("):
            groups.append((0, 0))
        elif token == ")" and len(groups) > 1:
            bars, choices = groups.pop()
            fixed *= bars + 1
            closed = bars + choices
            groups[-1] = (groups[-1][0], groups[-1][1] + closed)
        elif token == "|":
            groups[-1] = (groups[-1][0] + 1, groups[-1][1])
        elif _QUANTIFIER.fullmatch(token):
            if token[0] == "?":
                fixed *= 2
            elif inside:
                return None
            else:
                repeats += 1
            groups[-1] = (groups[-1][0], groups[-1][1] + 1)
    return fixed * (groups[0][0] + 1), repeats
