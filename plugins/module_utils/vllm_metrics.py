# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a vLLM server's /metrics says about speculative decoding and about life."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict

SpecState = Literal["off", "unknown", "dead_draft", "active"]

# Prometheus text format: name, labels in any order (values may hold any character, escaped), value, optional timestamp.
_SAMPLE = re.compile(r'^(?P<name>[A-Za-z_:][\w:]*)\s*(?:\{(?P<labels>(?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?\s+(?P<value>\S+)(?:\s+\S+)?$')
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
# More than anyone drafts at once; the label may hold any text.
_POSITION = re.compile(r"[0-9]{1,2}")
_MAX_POSITIONS = 64
# Beyond this a count is nonsense, and sums might become infinite.
_MAX_COUNT = 1e18


class SpecDecode(TypedDict):
    """Speculative decoding between two scrapes. acceptance: accepted / drafted tokens, None when nothing was drafted."""

    state: SpecState
    drafts: int
    drafted: int
    accepted: int
    per_position: list[float]
    acceptance: float | None


@dataclass(frozen=True)
class Counters:
    """Sums over all engines of one scrape. present: the server has speculative decoding's counters at all."""

    present: bool = False
    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    per_position: tuple[float, ...] = ()
    generation_tokens: float = 0.0
    running: float = 0.0


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of each sample line; comments and what is no sample are left out."""
    for line in text.splitlines():
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            yield match["name"], dict(_LABEL.findall(match["labels"] or "")), value


def counters(text: str) -> Counters:
    """The counters of a scrape. `*_created` are times, not counts."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    present = False
    for name, labels, value in samples(text):
        short = name.removeprefix("vllm:").removeprefix("vllm_").removesuffix("_total")
        if name == short or name.endswith("_created") or abs(value) > _MAX_COUNT:
            continue
        if short == "spec_decode_num_accepted_tokens_per_pos":
            position = labels.get("position", "")
            if _POSITION.fullmatch(position) and int(position) < _MAX_POSITIONS:
                positions[int(position)] = positions.get(int(position), 0.0) + value
            continue
        present = present or short.startswith("spec_decode_")
        sums[short] = sums.get(short, 0.0) + value
    width = max(positions, default=-1) + 1
    return Counters(
        present=present or bool(positions),
        drafts=sums.get("spec_decode_num_drafts", 0.0),
        drafted=sums.get("spec_decode_num_draft_tokens", 0.0),
        accepted=sums.get("spec_decode_num_accepted_tokens", 0.0),
        per_position=tuple(positions.get(i, 0.0) for i in range(width)),
        generation_tokens=sums.get("generation_tokens", 0.0),
        running=sums.get("num_requests_running", 0.0),
    )


def spec_decode(before: Counters | None, after: Counters | None) -> SpecDecode:
    """What happened between two scrapes, None being one that failed.

    off: the server has no such counters; unknown: nothing was drafted in between, so a request has to come first, or a scrape
    failed; dead_draft: drafts, and not one token accepted; active: the rest. After a restart the counters began at 0 again,
    and what they show now is all there was.
    """
    if before is None or after is None:
        return SpecDecode(state="unknown", drafts=0, drafted=0, accepted=0, per_position=[], acceptance=None)
    if not after.present:
        return SpecDecode(state="off", drafts=0, drafted=0, accepted=0, per_position=[], acceptance=None)
    if any(a < b for b, a in ((before.drafts, after.drafts), (before.drafted, after.drafted), (before.accepted, after.accepted))):
        before = Counters()
    drafts, drafted, accepted = after.drafts - before.drafts, after.drafted - before.drafted, after.accepted - before.accepted
    earlier = before.per_position + (0.0,) * len(after.per_position)
    per_position = [round(max(0.0, a - b) / drafts, 4) if drafts > 0 else 0.0 for a, b in zip(after.per_position, earlier, strict=False)]
    state: SpecState = "unknown" if drafted <= 0 else "dead_draft" if accepted <= 0 else "active"
    acceptance = round(accepted / drafted, 4) if drafted > 0 else None
    return SpecDecode(
        state=state,
        drafts=round(drafts),
        drafted=round(drafted),
        accepted=round(accepted),
        per_position=per_position,
        acceptance=acceptance,
    )


def wedged(before: Counters, after: Counters) -> bool:
    """Requests are running at both times, and not one token came out in between: /health may still answer 200."""
    return before.running > 0 and after.running > 0 and after.generation_tokens == before.generation_tokens
