# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import argparse
import enum
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import gate_probe
from ansible_collections.dgxspark.vllm.plugins.module_utils.gate_probe import (
    check_options,
    culprit,
    examine,
    literals,
    nearest,
    option_groups,
    option_name,
)

OPTIONS = [
    "--enforce-eager",
    "--no-enforce-eager",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--port",
    "--speculative-config",
    "-sc",
    "-tp",
]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("--port", "--port"),
        ("--port=8000", "--port"),
        ("--max_model_len", "--max-model-len"),
        ("--max_model_len=a_b", "--max-model-len"),
        ("--speculative-config.num_tokens", "--speculative-config"),
        ("--list-arg+=a", "--list-arg"),
        ("-tp", "-tp"),
    ],
)
def test_option_names(word: str, name: str) -> None:
    assert option_name(word) == name


def test_groups() -> None:
    words = ["serve", "/model", "--a", "-1", "--b", "x y", "{}", "-tp", "2"]
    assert option_groups(words) == [["serve", "/model"], ["--a", "-1"], ["--b", "x y", "{}"], ["-tp", "2"]]


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (["--enforce-eager"], []),
        (["--enforce_eager"], []),
        (["--speculative-config.method", "mtp"], []),
        (["-tp", "2"], []),
        (["-tp2"], []),
        (["-O3"], []),
        (["--max-num-batched", "1"], ["abbreviated_option"]),
        (["--max-num", "1"], ["ambiguous_option"]),
        (["--enforce-egaer"], ["unknown_option"]),
        (["--nope", "1", "--port", "1", "--other"], ["unknown_option", "unknown_option"]),
        (["-x"], ["unknown_option"]),
    ],
)
def test_options(words: list[str], kinds: list[str]) -> None:
    kept, findings = check_options(["serve", "/model", *words], OPTIONS)
    assert [f["kind"] for f in findings] == kinds
    assert kept[0] == ["serve", "/model"]


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("--enforce-egaer", OPTIONS, "--enforce-eager"),
        ("qwen3_xlm", ["qwen3_xml", "hermes"], "qwen3_xml"),
        ("flash_infer", ["FLASHINFER", "TRITON_ATTN"], "FLASHINFER"),
        ("VLLM_CPU_KVCACHE_SPCE", ["VLLM_CPU_KVCACHE_SPACE", "VLLM_PORT"], "VLLM_CPU_KVCACHE_SPACE"),
        ("seqs", ["--max-num-seqs"], "--max-num-seqs"),
    ],
)
def test_did_you_mean(name: str, names: list[str], expected: str) -> None:
    assert nearest(name, names)[0] == expected


@pytest.mark.parametrize(("name", "names"), [("--zzz", OPTIONS), ("VLLM_PLE_MMAP", ["VLLM_PORT", "VLLM_USE_V1"]), ("x", [])])
def test_nothing_is_like_it(name: str, names: list[str]) -> None:
    assert nearest(name, names) == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("argument --dtype: invalid choice: 'x'", 1),
        ("argument --speculative-config/-sc: Value {a} cannot be converted", 2),
        ("argument -sc/--speculative-config: x", 2),
        ("unrecognized arguments: true", 3),
        ("unrecognized arguments: {a: 1}", 4),
        ("argument --other: x", None),
        ("something else", None),
    ],
)
def test_which_option_a_message_is_about(message: str, expected: int | None) -> None:
    groups = [["serve", "/model"], ["--dtype", "x"], ["--speculative-config", "{a}"], ["--enforce-eager", "true"], ["--limit", "{a: 1}"]]
    assert culprit(message, groups) == expected


def test_nested_literals() -> None:
    inner = Literal["b", "c"]
    assert literals(Literal["a", inner]) == ["a", "b", "c"]


# --- a vLLM of a few lines ---------------------------------------------------------------------------------------------------------


class Backend(enum.Enum):
    FLASHINFER = 1
    TRITON_ATTN = 2


@dataclass
class SpeculativeConfig:
    method: str = ""
    num_speculative_tokens: int = 0


class Platform:
    def __init__(self, unspecified: bool) -> None:
        self._unspecified = unspecified

    def is_unspecified(self) -> bool:
        return self._unspecified


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """vLLM's modules, as far as the probe asks them; the newest layout."""
    made: dict[str, ModuleType] = {}

    def module(name: str, **contents: Any) -> None:
        made[name] = ModuleType(name)
        made[name].__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made[name])

    def make_arg_parser(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model_tag", nargs="?")
        parser.add_argument("--enforce-eager", action=argparse.BooleanOptionalAction)
        parser.add_argument("--dtype", choices=["auto", "half"])
        parser.add_argument("--max-model-len", type=int)
        for name in ("tool-call-parser", "reasoning-parser", "attention-backend", "quantization", "load-format", "tool-parser-plugin"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--distributed-executor-backend")
        parser.add_argument("--gpu-memory-utilization", type=float)
        parser.add_argument("--speculative-config", "-sc", type=json.loads)
        parser.add_argument("--enable-auto-tool-choice", action="store_true")

    def validate(ns: argparse.Namespace) -> None:
        if ns.enable_auto_tool_choice and not ns.tool_call_parser:
            raise TypeError("--enable-auto-tool-choice requires --tool-call-parser")

    class Tools:
        list_registered = staticmethod(lambda: ["qwen3_xml", "hermes"])

    module("torch", __version__="2.13.0+cpu", version=SimpleNamespace(cuda=None))
    module("vllm", __version__="0.32.0")
    module("vllm.platforms", current_platform=Platform(False))
    module("vllm.platforms.cpu", CpuPlatform=lambda: Platform(False))
    module("vllm.utils.argparse_utils", FlexibleArgumentParser=argparse.ArgumentParser)
    module("vllm.entrypoints.launchers.cli_args", make_arg_parser=make_arg_parser, validate_parsed_serve_args=validate)
    module("vllm.tool_parsers", ToolParserManager=Tools)
    module("vllm.reasoning", ReasoningParserManager=Tools)
    module("vllm.v1.attention.backends.registry", AttentionBackendEnum=Backend)
    module("vllm.model_executor.layers.quantization", QUANTIZATION_METHODS=["fp8", "awq"])
    module("vllm.model_executor.model_loader", _LOAD_FORMAT_TO_MODEL_LOADER={"auto": 1, "fastsafetensors": 2})
    module("vllm.config.parallel", DistributedExecutorBackend=Literal["mp", "ray"])
    module("vllm.config.speculative", SpeculativeConfig=SpeculativeConfig, SpeculativeMethod=Literal["mtp", "ngram"])
    module("vllm.envs", environment_variables={"VLLM_CACHE_ROOT": 1})
    return made


GOOD = [
    *("serve", "/model", "--enforce-eager", "--dtype", "half", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
    *("--attention-backend", "flashinfer", "--load-format", "fastsafetensors", "--distributed-executor-backend", "mp"),
    *("--gpu-memory-utilization", "0.9", "--speculative-config", '{"method":"mtp","num_speculative_tokens":2}'),
]


def test_a_good_argument_list(vllm: dict[str, ModuleType]) -> None:
    report = examine(GOOD, {"VLLM_CACHE_ROOT": "/x", "HF_HUB_OFFLINE": "1"})
    assert report["findings"] == [] and report["skipped"] == []
    assert (report["vllm"], report["torch"], report["torch_cuda"], report["platform_made_up"]) == ("0.32.0", "2.13.0+cpu", None, False)


@pytest.mark.parametrize(
    ("words", "kind", "option"),
    [
        (["--enforce-egaer"], "unknown_option", "--enforce-egaer"),
        (["--dtype", "nope"], "bad_value", "--dtype"),
        (["--max-model-len", "x"], "bad_value", "--max-model-len"),
        (["--speculative-config", "{method: mtp}"], "bad_value", "--speculative-config"),
        (["--speculative-config", "[1]"], "bad_value", "--speculative-config"),
        (["--speculative-config", '"{}"'], "bad_value", "--speculative-config"),
        (["--speculative-config", '{"method":"mpt"}'], "unknown_name", "--speculative-config"),
        (["--speculative-config", '{"metod":"mtp"}'], "unknown_key", "--speculative-config"),
        (["--speculative-config", '{"num_speculative_tokens":"2"}'], "bad_value", "--speculative-config"),
        (["--speculative-config", '{"num_speculative_tokens":0}'], "bad_value", "--speculative-config"),
        (["--enforce-eager", "true"], "stray_value", "--enforce-eager"),
        (["--enable-auto-tool-choice"], "bad_combination", ""),
        (["--tool-call-parser", "qwen3_xlm"], "unknown_name", "--tool-call-parser"),
        (["--reasoning-parser", "nope"], "unknown_name", "--reasoning-parser"),
        (["--attention-backend", "NOPE"], "unknown_name", "--attention-backend"),
        (["--quantization", "nope"], "unknown_name", "--quantization"),
        (["--load-format", "nope"], "unknown_name", "--load-format"),
        (["--distributed-executor-backend", "nope"], "unknown_name", "--distributed-executor-backend"),
        (["--gpu-memory-utilization", "1.5"], "bad_value", "--gpu-memory-utilization"),
        (["--gpu-memory-utilization", "0"], "bad_value", "--gpu-memory-utilization"),
    ],
)
def test_one_fault(vllm: dict[str, ModuleType], words: list[str], kind: str, option: str) -> None:
    findings = examine(["serve", "/model", *words], {})["findings"]
    assert [(f["kind"], f["option"]) for f in findings] == [(kind, option)]


def test_all_faults_at_once(vllm: dict[str, ModuleType]) -> None:
    words = ["--nope", "1", "--dtype", "x", "--max-model-len", "y", "--load-format", "z", "--enforce-eager", "true"]
    found = examine(["serve", "/model", *words], {"VLLM_PLE_MMAP": "1"})["findings"]
    assert [f["kind"] for f in found] == ["unknown_option", "bad_value", "bad_value", "stray_value", "unknown_name", "unknown_variable"]


def test_values_that_a_plugin_may_register(vllm: dict[str, ModuleType]) -> None:
    words = ["--tool-call-parser", "own", "--tool-parser-plugin", "/x.py", "--distributed-executor-backend", "my.package.Executor"]
    report = examine(["serve", "/model", *words], {})
    assert report["findings"] == [] and len(report["skipped"]) == 2


def test_an_older_layout(vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.openai.cli_args", vllm["vllm.entrypoints.launchers.cli_args"])
    real = gate_probe.importlib.import_module

    def old(name: str) -> ModuleType:
        if name == "vllm.entrypoints.launchers.cli_args":
            raise ModuleNotFoundError(name)
        return real(name)

    monkeypatch.setattr(gate_probe.importlib, "import_module", old)
    assert examine([*GOOD, "--grpc"], {})["findings"] == []


def test_a_cuda_build_without_a_gpu(vllm: dict[str, ModuleType]) -> None:
    vllm["vllm.platforms"].current_platform = Platform(True)  # type: ignore[attr-defined]
    assert examine(GOOD, {})["platform_made_up"] is True


def test_a_registry_that_has_moved_gives_no_false_finding(vllm: dict[str, ModuleType]) -> None:
    del vllm["vllm.tool_parsers"].ToolParserManager
    del vllm["vllm.config.speculative"].SpeculativeMethod
    report = examine(GOOD, {})
    assert report["findings"] == []
    assert {text.split(":")[0] for text in report["skipped"]} == {"tool_call_parser", "speculative_config"}


def test_the_probe_needs_nothing_of_this_collection(tmp_path: Path) -> None:
    """It is piped into another Python, and reports that there is no vLLM."""
    source = Path(gate_probe.__file__).read_text()
    payload = json.dumps({"argv": ["serve"], "environment": {}})
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-", payload], input=source, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    report = json.loads(done.stdout.splitlines()[-1].removeprefix(gate_probe.MARK))
    assert "ModuleNotFoundError" in report["error"]


# --- what a checkpoint may need -----------------------------------------------------------------------------------------------------

QUANTIZATION = "model_executor/layers/quantization"


@pytest.mark.parametrize(
    ("files", "entries", "expected"),
    [
        ({}, [], []),
        ({}, ["index_loader", "fp8_dispatch"], ["fp8_dispatch", "index_loader"]),
        ({}, ["int8_lm_head"], ["int8_lm_head"]),
        # A vLLM that was patched: one file until 0.28, a package since.
        ({"inc.py": "from x.fp8 import Fp8Config, Fp8LinearMethod"}, [], ["fp8_dispatch"]),
        ({"inc/inc.py": "return fp8.Fp8LinearMethod(config)"}, ["index_loader"], ["fp8_dispatch", "index_loader"]),
        ({"auto_round.py": "Fp8LinearMethod"}, ["fp8_dispatch"], ["fp8_dispatch"]),
        # vLLM as it is: no word of it in what chooses a layer's method; FP8 as a scheme for whole checkpoints only (0.29 and newer).
        ({"inc.py": "return UnquantizedLinearMethod()"}, [], []),
        ({"inc/inc.py": "resolve_scheme(layer)", "inc/schemes/inc_fp8_linear.py": "import Fp8LinearMethod"}, [], []),
        ({"fp8.py": "class Fp8LinearMethod: pass", "inc.py": "class INCFp8LinearMethodish: pass"}, [], []),
        ({"inc.py": "\xff\xfe"}, [], []),
    ],
)
def test_features(
    vllm: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files: dict[str, str],
    entries: list[str],
    expected: list[str],
) -> None:
    for name, text in files.items():
        path = tmp_path / "vllm" / QUANTIZATION / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    vllm["vllm"].__path__ = [str(tmp_path / "vllm")]
    info = tmp_path / "site" / "kernels-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 1\n")
    lines = [f"{name} = kernels.{name}:register" for name in entries]
    (info / "entry_points.txt").write_text("\n".join(["[dgxspark_vllm.features]", *lines, "[other]", "not_a_feature = x:y"]))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert examine(GOOD, {})["features"] == expected
