# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""How far a vLLM server's start has come, read from its log. Stages only ever go forward.

Sources of the marker texts: logs of vLLM 0.19 to 0.32 on GB10 and on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

# In the order in which they happen. Eager mode has no graphs, a CPU no compilation, a model without MTP no draft.
STAGES = (
    "starting container",
    "configuring",
    "starting engine",
    "starting workers",
    "loading weights",
    "loading draft",
    "compiling",
    "allocating KV cache",
    "capturing graphs",
    "engine up",
    "starting server",
    "ready",
)
WEIGHTS, DRAFT, GRAPHS, READY = (STAGES.index(name) for name in ("loading weights", "loading draft", "capturing graphs", "ready"))

_MARKERS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (stage, re.compile(pattern, re.I))
    for stage, pattern in (
        ("configuring", r"\bversion \d+\.\d+\.\d+|non-default args:|Resolved architecture:|Using max model len|Hybrid INT4\+FP8: detected"),
        ("starting engine", r"Initializing a V\d+ LLM engine|Initializing an LLM engine"),
        ("starting workers", r"distributed_init_method=|is assigned as DP rank"),
        ("loading weights", r"Starting to load model|Loading weights took"),
        ("loading draft", r"Loading draft(er)? model"),
        (
            "compiling",
            r"torch\.compile (took|takes)|Dynamo bytecode transform|Compiling a graph|Start compiling function|compiled graph\(s\)"
            r"|Using cache directory: .* for vLLM's torch\.compile|LM Head -> INT8",
        ),
        ("allocating KV cache", r"\bKV cache size: [\d,]+ tokens|Available KV cache memory|GiB for KV cache"),
        ("capturing graphs", r"Graph capturing finished"),
        ("engine up", r"\binit engine\b.*\btook"),
        ("starting server", r"Starting vLLM (API )?server|Started server process|Waiting for application startup"),
        ("ready", r"Application startup complete"),
    )
)
_PERCENT = re.compile(r"(?P<percent>\d{1,3})% Completed(?: \| (?P<done>\d+)/(?P<total>\d+))?")
_CAPTURE = re.compile(r"Capturing (?:CUDA )?graphs?[^|]*?:\s*(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<done>\d+)/(?P<total>\d+)", re.I)

# Some lines quote a whole configuration; the markers stand at the beginning.
_LINE_LENGTH = 1000
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# "(EngineCore pid=9523) INFO 11-29 20:30:57 [core.py:133] text"; each part may be absent. The pid's parenthesis comes alone on
# tracebacks; uvicorn writes "INFO:     text".
_PREFIX = re.compile(
    r"^(?:\((?P<process>[A-Za-z][\w:.\- ]*?) (?:rank=\d+ )?pid=\d+\)\s?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::\s+| (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\])?\s?))?"
)
_SECRET = re.compile(r"""(--api-key[= ]|['"]api_key['"]: \[?|Bearer )[^\s\]},]+|\b(?:hf_|sk-)[A-Za-z0-9_-]{6,}""", re.I)
# Lines that come by themselves while nothing moves, and those of a server at work: no sign of progress in starting.
_IDLE = re.compile(
    r"No available shared memory broadcast block found|Waiting for \d+ local, \d+ remote core engine"
    r'|"(GET|POST|HEAD) /\S* HTTP/|Avg prompt throughput|SpecDecoding metrics',
    re.I,
)


class Line(NamedTuple):
    """One log line without prefix. level: '' where the line has none (tracebacks, tqdm, other programs)."""

    level: str
    text: str
    process: str


def split(text: str) -> list[str]:
    """The lines of a log: a carriage return ends one too (tqdm rewrites its line), colours and blank lines go."""
    return [line for raw in re.split(r"[\r\n]+", _ANSI.sub("", text)) if (line := raw.rstrip("\0 \t"))]


def parse(line: str) -> Line:
    """Take a line's prefix off."""
    match = _PREFIX.match(line)
    if match is None:
        return Line("", line, "")
    rest = line[match.end() :]
    level = match["level"] or ("INFO" if " NCCL INFO " in line else "")
    return Line(level, rest if rest.strip() else line, match["process"] or "")


def tail(text: str, count: int = 20) -> list[str]:
    """The last lines that say something, secrets masked."""
    return [mask(line) for line in split(text)[-count:]]


def mask(text: str) -> str:
    """A log quotes command lines and arguments; keys and tokens in them are nobody's business."""
    return _SECRET.sub(lambda match: f"{match[1] or ''}********", text)


def is_progress(line: str) -> bool:
    """Whether a line shows that a start moves on."""
    return bool(line.strip()) and not _IDLE.search(line)


@dataclass(frozen=True)
class Stage:
    """Where a start is. percent, done, total: of that stage's shards or graphs, -1 while unknown."""

    index: int = 0
    percent: int = -1
    done: int = 0
    total: int = 0

    @property
    def name(self) -> str:
        return STAGES[self.index]

    @property
    def what(self) -> str:
        """What `done` and `total` count."""
        return "graphs" if self.index == GRAPHS else "shards"


class Tracker:
    """Follows a log piece by piece. `at` of a piece: seconds on any one clock, for the time spent in each stage."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self.stage = Stage(*(int(n) for n in state.get("stage", (0, -1, 0, 0))))
        self.weights_loaded = bool(state.get("weights_loaded", False))
        self.marks: list[tuple[int, float]] = [(int(i), float(at)) for i, at in state.get("marks", ())]

    def state(self) -> dict[str, Any]:
        """What a later Tracker needs to go on, as plain data."""
        return {"stage": list(astuple(self.stage)), "weights_loaded": self.weights_loaded, "marks": [list(mark) for mark in self.marks]}

    def begin(self, at: float) -> None:
        """The start of the first stage."""
        if not self.marks:
            self.marks.append((0, at))

    def feed(self, text: str, at: float = 0.0) -> bool:
        """Take in more of the log. Returns whether it shows progress."""
        self.begin(at)
        moved = False
        for raw in split(text):
            if not is_progress(raw):
                continue
            moved = True
            if self.stage.index < READY:
                for stage in self._seen(parse(raw[:_LINE_LENGTH]).text):
                    self._advance(stage, at)
        return moved

    def _seen(self, line: str) -> Iterator[Stage]:
        if (match := _CAPTURE.search(line)) is not None:
            yield _stage(GRAPHS, match)
        elif (match := _PERCENT.search(line)) is not None and line.lstrip().startswith(("Loading", "Multi-thread loading")):
            # The draft's shards are counted from 0 again once the target's weights are in.
            yield _stage(DRAFT if self.weights_loaded or self.stage.index == DRAFT else WEIGHTS, match)
        else:
            if "Loading weights took" in line:
                self.weights_loaded = True
            for name, pattern in _MARKERS:
                if pattern.search(line):
                    yield Stage(STAGES.index(name))

    def _advance(self, stage: Stage, at: float) -> None:
        if stage.index > self.stage.index:
            self.stage = stage
            self.marks.append((stage.index, at))
        elif stage.index == self.stage.index and stage.percent > self.stage.percent:
            self.stage = stage

    def stages(self, now: float) -> list[dict[str, Any]]:
        """[{stage, seconds}] of what has been gone through; the last one lasts until now, `ready` takes no time."""
        ends = ([at for _, at in self.marks] + [now])[1:]
        return [
            {"stage": STAGES[index], "seconds": round(max(0.0, end - at), 1)}
            for (index, at), end in zip(self.marks, ends, strict=True)
            if index != READY
        ]


def _stage(index: int, match: re.Match[str]) -> Stage:
    return Stage(index, min(100, int(match["percent"])), int(match["done"] or 0), int(match["total"] or 0))


def stage_of(text: str) -> Stage:
    """The stage that a log, from its beginning, has come to."""
    tracker = Tracker()
    tracker.feed(text)
    return tracker.stage
