# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Stages of a start, from a real log and from the lines of one on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.vllm_log import (
    STAGES,
    Stage,
    Tracker,
    is_progress,
    mask,
    parse,
    split,
    stage_of,
    tail,
)

CPU_LOG = (Path(__file__).parents[3] / "fixtures/vllm/startup-0.32.log").read_bytes().decode()

# What a start on a GPU writes beyond that: two shards runs, compilation, two passes of graph capture.
GPU_LOG = """\
INFO 01-02 10:00:00 [api_server.py:1] vLLM API server version 0.19.1
(APIServer pid=1) INFO 01-02 10:00:01 [inc.py:10] Hybrid INT4+FP8: detected 144 FP8 dense layers (block_size=[128, 128])
(EngineCore_DP0 pid=90) INFO 01-02 10:00:09 [core.py:1] Initializing a V1 LLM engine (v0.19.1) with config: model='/model'
(EngineCore_DP0 pid=90) INFO 01-02 10:00:10 [parallel_state.py:1] rank 0 in world size 1 is assigned as DP rank 0, PP rank 0
(EngineCore_DP0 pid=90) INFO 01-02 10:00:11 [gpu_model_runner.py:1] Starting to load model /model...
\rLoading safetensors checkpoint shards:   0% Completed | 0/14 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  42% Completed | 6/14 [04:00<05:00, 40.1s/it]
\rLoading safetensors checkpoint shards: 100% Completed | 14/14 [09:45<00:00, 41.8s/it]
(EngineCore_DP0 pid=90) INFO 01-02 10:10:00 [default_loader.py:1] Loading weights took 585.3 seconds
(EngineCore_DP0 pid=90) INFO 01-02 10:10:01 [gpu_model_runner.py:1] Loading drafter model...
\rLoading safetensors checkpoint shards:   0% Completed | 0/15 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  93% Completed | 14/15 [00:08<00:00, 1.6it/s]
(EngineCore_DP0 pid=90) INFO 01-02 10:10:12 [default_loader.py:1] Loading weights took 9.1 seconds
(EngineCore_DP0 pid=90) INFO 01-02 10:10:13 [gpu_model_runner.py:1] Model loading took 71.3 GiB memory and 600.1 seconds
(EngineCore_DP0 pid=90) INFO 01-02 10:10:20 [backends.py:1] Dynamo bytecode transform time: 12.3 s
(EngineCore_DP0 pid=90) INFO 01-02 10:13:00 [monitor.py:1] torch.compile took 171.0 s in total
(EngineCore_DP0 pid=90) DGX_SPARK_V2: LM Head -> INT8 Batched Triton ([248320, 3072], saved 1455MB)
(EngineCore_DP0 pid=90) INFO 01-02 10:13:05 [gpu_worker.py:1] Available KV cache memory: 24.1 GiB
(EngineCore_DP0 pid=90) INFO 01-02 10:13:06 [kv_cache_utils.py:1] GPU KV cache size: 355,000 tokens
\rCapturing CUDA graphs (mixed prefill-decode, PIECEWISE):  45%|####5     | 5/11 [00:01<00:01,  4.10it/s]
\rCapturing CUDA graphs (decode, FULL): 100%|##########| 7/7 [00:02<00:00,  3.10it/s]
(EngineCore_DP0 pid=90) INFO 01-02 10:13:20 [gpu_model_runner.py:1] Graph capturing finished in 12 secs, took 1.2 GiB
(EngineCore_DP0 pid=90) INFO 01-02 10:13:22 [core.py:1] init engine (profile, create kv cache, warmup model) took 190.22 seconds
(APIServer pid=1) INFO 01-02 10:13:24 [api_server.py:1] Starting vLLM API server 0 on http://127.0.0.1:8000
INFO:     Started server process [1]
INFO:     Waiting for application startup.
INFO:     Application startup complete.
"""


def order(stage: Stage) -> tuple[int, int]:
    return stage.index, stage.percent


@pytest.mark.parametrize("log", [CPU_LOG, GPU_LOG], ids=["cpu", "gpu"])
@pytest.mark.parametrize("cut", ["line", "odd"])
def test_a_longer_log_is_never_an_earlier_stage(log: str, cut: str) -> None:
    lines = log.splitlines(keepends=True)
    ends = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)] if cut == "line" else list(range(0, len(log), 97))
    stages = [stage_of(log[:end]) for end in ends]
    assert [order(s) for s in stages] == sorted(order(s) for s in stages)
    assert stages[0].name == "starting container"
    assert stage_of(log).name == "ready"


@pytest.mark.parametrize("log", [CPU_LOG, GPU_LOG], ids=["cpu", "gpu"])
def test_piece_by_piece_with_the_state_as_json_is_the_same_as_in_one_go(log: str) -> None:
    state = None
    for number, line in enumerate(log.splitlines(keepends=True)):
        tracker = Tracker(json.loads(json.dumps(state)))
        tracker.feed(line, at=float(number))
        state = tracker.state()
        assert tracker.stage == stage_of("".join(log.splitlines(keepends=True)[: number + 1]))
    assert tracker.stage.name == "ready"
    assert all(entry["seconds"] >= 0 for entry in tracker.stages(1000.0))


def test_every_stage_of_a_gpu_start_is_seen_in_order() -> None:
    tracker = Tracker()
    for number, line in enumerate(GPU_LOG.splitlines()):
        tracker.feed(line, at=float(number))
    assert [STAGES[index] for index, _ in tracker.marks] == list(STAGES)
    assert [entry["stage"] for entry in tracker.stages(100.0)] == list(STAGES[:-1])


@pytest.mark.parametrize(
    ("line", "name", "percent", "done", "total"),
    [
        ("Loading safetensors checkpoint shards:  42% Completed", "loading weights", 42, 0, 0),
        ("\rLoading safetensors checkpoint shards:  42% Completed | 6/14 [00:00<?, ?it/s]", "loading weights", 42, 6, 14),
        ("(Worker pid=7) \rLoading safetensors checkpoint shards:  7% Completed | 1/14 [x]", "loading weights", 7, 1, 14),
        ("Loading safetensors using Fastsafetensor loader:  50% Completed | 1/2 [x]", "loading weights", 50, 1, 2),
        ("Multi-thread loading shards:  33% Completed | 1/3 [x]", "loading weights", 33, 1, 3),
        ("Loading weights took 585.3 seconds", "loading weights", -1, 0, 0),
        ("Loading weights took 1 s\nLoading safetensors checkpoint shards:  10% Completed | 1/10 [x]", "loading draft", 10, 1, 10),
        ("Loading drafter model...", "loading draft", -1, 0, 0),
        ("torch.compile took 171.0 s", "compiling", -1, 0, 0),
        ("Capturing CUDA graphs (decode, FULL):  57%|#####7    | 4/7 [x]", "capturing graphs", 57, 4, 7),
        ("Graph capturing finished", "capturing graphs", -1, 0, 0),
        ("init engine (profile, create kv cache, warmup model) took 3.69 s", "engine up", -1, 0, 0),
        ("Application startup complete.", "ready", -1, 0, 0),
        ("Available routes are:", "starting container", -1, 0, 0),
        ("", "starting container", -1, 0, 0),
    ],
)
def test_one_line(line: str, name: str, percent: int, done: int, total: int) -> None:
    stage = stage_of(line)
    assert (stage.name, stage.percent, stage.done, stage.total) == (name, percent, done, total)


def test_the_draft_counts_its_own_shards() -> None:
    upto = CPU_LOG[: CPU_LOG.index("Loading drafter model")]
    assert stage_of(upto) == Stage(STAGES.index("loading weights"), 100, 2, 2)
    draft = CPU_LOG[: CPU_LOG.index("Detected MTP model")]
    assert stage_of(draft) == Stage(STAGES.index("loading draft"), 100, 2, 2)


@pytest.mark.parametrize(
    ("line", "progress"),
    [
        ("(EngineCore pid=1) INFO 11-29 20:31:06 [x.py:1] Model loading took 7 GiB", True),
        ('INFO:     127.0.0.1:37462 - "GET /health HTTP/1.1" 200 OK', False),
        ('INFO:     127.0.0.1:37462 - "GET /metrics HTTP/1.1" 200 OK', False),
        ("(W pid=1) INFO 11-29 20:31:06 [shm_broadcast.py:1] No available shared memory broadcast block found in 60 seconds.", False),
        ("   ", False),
    ],
)
def test_what_counts_as_progress(line: str, progress: bool) -> None:
    assert is_progress(line) is progress
    assert Tracker().feed(line) is progress


@pytest.mark.parametrize(
    ("line", "level", "text", "process"),
    [
        ("(EngineCore pid=9523) INFO 11-29 20:30:57 [core.py:133] hello", "INFO", "hello", "EngineCore"),
        ("(Worker_TP0 pid=9) ERROR 11-29 20:30:57 [core.py:133] ValueError: x", "ERROR", "ValueError: x", "Worker_TP0"),
        ("(VllmWorker rank=0 pid=9) WARNING 11-29 20:30:57 [core.py:133] w", "WARNING", "w", "VllmWorker"),
        ("ERROR 11-29 20:30:57 [core.py:133] plain", "ERROR", "plain", ""),
        ("ERROR 2026-11-29 20:30:57 [core.py:133] plain", "ERROR", "plain", ""),
        ("(APIServer pid=3) Traceback (most recent call last):", "", "Traceback (most recent call last):", "APIServer"),
        ("INFO:     Started server process [9338]", "INFO", "Started server process [9338]", ""),
        ("spark1:10:20 [0] NCCL INFO Using network Socket", "INFO", "spark1:10:20 [0] NCCL INFO Using network Socket", ""),
        ("ERROR handling request", "", "ERROR handling request", ""),
        ("(see above)", "", "(see above)", ""),
    ],
)
def test_prefixes(line: str, level: str, text: str, process: str) -> None:
    assert parse(line) == (level, text, process)


def test_split_ends_lines_at_carriage_returns_and_drops_colours_and_blanks() -> None:
    assert split("a\r\n\r\nb\rc\n\x1b[31mred\x1b[0m\n \n") == ["a", "b", "c", "red"]
    assert tail("1\n2\n\n3\n", 2) == ["2", "3"]


@pytest.mark.parametrize(
    "text",
    [
        "non-default args: {'api_key': ['s3cr3t-value'], 'port': 8000}",
        "vllm serve /model --api-key s3cr3t-value --port 8000",
        "docker run -e X --api-key=s3cr3t-value serve",
        "Authorization: Bearer s3cr3t-value",
        "token hf_s3cr3tvalue is not valid",
    ],
)
def test_no_secret_is_quoted(text: str) -> None:
    assert "s3cr3t" not in mask(text)
    assert "s3cr3t" not in "".join(tail(text))
