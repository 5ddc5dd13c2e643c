# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.gate_probe import MARK
from ansible_collections.dgxspark.vllm.plugins.module_utils.image_gate import (
    FIND_PYTHON,
    baked_environment,
    gate_key,
    needs_of,
    needs_problems,
    probe_command,
    probe_failure,
    problems_of,
    report_of,
)

IMAGE = "sha256:" + "ab" * 32
CLEAN: dict[str, Any] = {"torch": "2.12.0+cu130", "torch_cuda": "13.0", "extension": "ok", "plugins": [], "findings": []}


def test_the_key_follows_the_question() -> None:
    questions = [
        (IMAGE, ["serve"], {}, ""),
        ("sha256:" + "cd" * 32, ["serve"], {}, ""),
        (IMAGE, ["serve", "--x"], {}, ""),
        (IMAGE, ["serve"], {"A": "1"}, ""),
        (IMAGE, ["serve"], {}, "/opt/python"),
    ]
    assert len({gate_key(*q) for q in questions}) == len(questions)
    assert gate_key(IMAGE, ["a"], {"x": "1", "y": "2"}, "") == gate_key(IMAGE, ["a"], {"y": "2", "x": "1"}, "")


@pytest.mark.parametrize("python", ["", "/opt/vllm/bin/python"])
def test_the_command(python: str) -> None:
    argv = ["serve", "/model", "--speculative-config", '{"a":"$x"}']
    words = probe_command("docker", IMAGE, "gate", argv, {"B": "2", "A": "1"}, "vllm", python)
    assert {"--rm", "-i", "--network"} <= set(words) and words[words.index("--network") + 1] == "none"
    assert words[words.index("--pull") + 1] == "never"
    assert "--gpus" not in words
    assert json.loads(words[-1]) == {"argv": argv, "environment": {"B": "2", "A": "1"}}
    assert words[words.index("--entrypoint") + 1] == (python or "/bin/sh")


@pytest.mark.parametrize(
    ("entry", "scripts", "expected"),
    [
        ("vllm", {"vllm": "#!{py}"}, True),
        ("entry", {"entry": "#!{py}"}, True),
        # An entrypoint of another kind: the vllm command tells.
        ("entry", {"entry": "#!/bin/bash", "vllm": "#!{py}"}, True),
        ("entry", {"vllm": "#!/usr/bin/env {py}"}, True),
        # Neither: the image's python3.
        ("entry", {"entry": "#!/bin/bash"}, False),
    ],
)
def test_the_python_of_an_image(tmp_path: Path, entry: str, scripts: dict[str, str], expected: bool) -> None:
    own = tmp_path / "own-python"
    own.write_text('#!/bin/sh\necho "own $*"\n')
    other = tmp_path / "python3"
    other.write_text('#!/bin/sh\necho "other $*"\n')
    for name, first in scripts.items():
        (tmp_path / name).write_text(first.replace("{py}", str(own)) + "\nrest\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    command = ["/bin/sh", "-c", FIND_PYTHON, "sh", entry, "pay load"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert done.stdout == f"{'own' if expected else 'other'} - pay load\n"


def test_a_report_among_log_lines() -> None:
    assert report_of(f'INFO x\n{MARK}{{"a": 1}}\nINFO later\n') == {"a": 1}
    assert report_of("INFO x\n") is None
    assert report_of(f"{MARK}[]") is None


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        ({"kind": "unknown_option", "option": "--egaer", "meant": ["--eager"]}, ["no option --egaer", "did you mean --eager"]),
        ({"kind": "unknown_option", "option": "--x", "meant": []}, ["no option --x", "rename or remove x"]),
        ({"kind": "ambiguous_option", "option": "--m", "meant": ["--ma", "--mb"]}, ["--ma, --mb"]),
        ({"kind": "bad_value", "option": "--dtype", "text": "argument --dtype: invalid choice: 'x'"}, ["--dtype: invalid choice: 'x'"]),
        ({"kind": "bad_value", "option": "", "text": "FileNotFoundError: /x.yaml"}, ["FileNotFoundError: /x.yaml"]),
        (
            {
                "kind": "bad_value",
                "option": "--q",
                "text": "argument --q: 1 error\ntargets\n  no [type=x]\n    see https://errors.pydantic.dev/2",
            },
            ["--q: 1 error; targets; no [type=x]"],
        ),
        ({"kind": "bad_value", "option": "--s", "text": "converted to <function loads at 0x7f486097d580>."}, ["<function loads>"]),
        ({"kind": "stray_value", "option": "--e", "text": "unrecognized arguments: true"}, ["true", "switches are written"]),
        ({"kind": "unknown_name", "option": "--t", "value": "xlm", "meant": ["xml"], "names": ["a", "xml"]}, ["'xlm'", "one of: xml"]),
        ({"kind": "unknown_name", "option": "--t", "value": "q", "meant": [], "names": ["a", "xml"]}, ["one of: a, xml"]),
        ({"kind": "unknown_key", "option": "--s", "value": "metod", "meant": ["method"]}, ["no key 'metod'; did you mean method"]),
        ({"kind": "unknown_variable", "option": "VLLM_X", "meant": []}, ["does not read VLLM_X"]),
        ({"kind": "bad_combination", "option": "", "text": "a requires b"}, ["a requires b"]),
    ],
)
def test_findings_in_words(finding: dict[str, Any], words: list[str]) -> None:
    (found,) = problems_of({**CLEAN, "findings": [finding]}, cuda=True)
    text = f"{found['evidence']} {found['remedy']}"
    assert found["severity"] == "error" and found["class"] == finding["kind"]
    assert all(word in text for word in words), text
    assert "pydantic.dev" not in text and "0x7f" not in text


def test_an_abbreviation_is_a_warning() -> None:
    finding = {"kind": "abbreviated_option", "option": "--max-num-b", "meant": ["--max-num-batched-tokens"]}
    (found,) = problems_of({**CLEAN, "findings": [finding]}, cuda=True)
    assert found["severity"] == "warning"


def test_a_name_that_a_plugin_may_know_is_a_warning() -> None:
    finding = {"kind": "unknown_name", "option": "--load-format", "value": "own", "meant": [], "names": ["auto"]}
    (found,) = problems_of({**CLEAN, "plugins": ["mine"], "findings": [finding]}, cuda=True)
    assert found["severity"] == "warning"


@pytest.mark.parametrize(
    ("torch", "torch_cuda", "cuda", "classes"),
    [
        ("2.10.0+cpu", None, True, ["cpu_torch"]),
        ("2.10.0", None, True, ["cpu_torch"]),
        ("2.10.0", "13.0", True, []),
        ("2.11.0.dev20260101+cu130", "13.0", True, []),
        ("2.13.0+cpu", None, False, []),
    ],
)
def test_a_gpu_needs_a_cuda_torch(torch: str, torch_cuda: str | None, cuda: bool, classes: list[str]) -> None:
    assert [p["class"] for p in problems_of({**CLEAN, "torch": torch, "torch_cuda": torch_cuda}, cuda)] == classes


@pytest.mark.parametrize(
    ("extension", "classes"),
    [
        ("ok", []),
        ("", []),
        # Without a GPU there is no driver library; that proves nothing.
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", []),
        ("ImportError: /x/_C.abi3.so: undefined symbol: _ZN3c1013MessageLoggerC1EPKciib", ["torch_abi"]),
        ("ImportError: /x/_C.abi3.so: undefined symbol: _ZN2at4cuda24getCurrentCUDABlasHandleEv", ["torch_abi"]),
    ],
)
def test_the_compiled_part(extension: str, classes: list[str]) -> None:
    assert [p["class"] for p in problems_of({**CLEAN, "extension": extension}, True)] == classes


@pytest.mark.parametrize(
    ("code", "output", "timed_out", "class_"),
    [
        (124, "INFO loading", True, "gate_timeout"),
        (125, "docker: Error response from daemon: No such image: sha256:ab.", False, "image_missing"),
        (0, "ModuleNotFoundError: No module named 'vllm'", False, "no_vllm_in_image"),
        (127, "sh: python3: not found", False, "no_vllm_in_image"),
        (137, "", False, "out_of_memory"),
        (1, "Traceback\nRuntimeError: x", False, "gate_failed"),
    ],
)
def test_no_answer(code: int, output: str, timed_out: bool, class_: str) -> None:
    found = probe_failure(code, output, 300, timed_out)
    assert found["class"] == class_ and found["remedy"]


@pytest.mark.parametrize(
    ("baked", "environment", "count"),
    [
        (["GLOO_SOCKET_IFNAME=enP7s7"], {}, 1),
        (["NCCL_IB_HCA=x", "UCX_NET_DEVICES=y"], {}, 2),
        (["NCCL_IB_HCA=x"], {"NCCL_IB_HCA": "z"}, 0),
        (["NCCL_VERSION=2.28.3", "UCX_VERSION=1.19"], {}, 0),
        (["PATH=/usr/bin", "NVIDIA_VISIBLE_DEVICES=all"], {}, 0),
        ([], {}, 0),
    ],
)
def test_network_settings_in_the_image(baked: list[str], environment: dict[str, str], count: int) -> None:
    assert len(baked_environment(baked, environment)) == count


@pytest.mark.parametrize("manifest", [None, [], "x", {}, {"needs": None}, {"needs": "fp8_dispatch"}, {"needs": [1]}, {"needs": {}}])
def test_a_manifest_that_does_not_say_what_it_needs_is_refused(manifest: Any) -> None:
    needs, found = needs_of(manifest, "/ckpt/.dgxspark-hybrid.json")
    assert needs == [] and [(p["class"], p["severity"]) for p in found] == [("checkpoint_needs_unknown", "error")]
    assert "/ckpt/.dgxspark-hybrid.json" in found[0]["evidence"]


@pytest.mark.parametrize("needs", [[], ["fp8_dispatch"], ["fp8_dispatch", "index_loader"], ["something_new"]])
def test_what_a_manifest_needs(needs: list[str]) -> None:
    assert needs_of({"needs": needs, "mode": "x"}, "m") == (needs, [])


@pytest.mark.parametrize(
    ("needs", "features", "lacking"),
    [
        ([], [], []),
        ([], ["fp8_dispatch"], []),
        (["fp8_dispatch"], ["fp8_dispatch"], []),
        (["fp8_dispatch"], [], ["fp8_dispatch"]),
        (["fp8_dispatch", "index_loader"], ["fp8_dispatch"], ["index_loader"]),
        (["fp8_dispatch", "index_loader"], [], ["fp8_dispatch", "index_loader"]),
        (["fp8_dispatch"], ["FP8_DISPATCH", "fp8"], ["fp8_dispatch"]),
        # Names that this release does not know: only an image that offers them will do.
        (["something_new"], ["fp8_dispatch", "index_loader"], ["something_new"]),
        (["something_new"], ["something_new"], []),
        (["", "fp8_dispatch"], ["fp8_dispatch"], [""]),
    ],
)
def test_what_an_image_lacks(needs: list[str], features: list[str], lacking: list[str]) -> None:
    gate = {**CLEAN, "vllm": "0.32.0", "features": features}
    found = needs_problems(needs, gate, "/ckpt", "the image of m.json (sha256:ab)")
    assert [(p["class"], p["severity"]) for p in found] == [("checkpoint_needs", "error")] * len(lacking)
    for need, fault in zip(lacking, found, strict=True):
        assert fault["evidence"].startswith(f"/ckpt needs {need} (") and "the image of m.json (sha256:ab), vLLM 0.32.0" in fault["evidence"]
        assert "image profile with the kernels package" in fault["remedy"]
        assert ("checkpoint.hybrid: materialize" in fault["remedy"]) is (need == "index_loader")
        assert ("of the release that made the checkpoint" in fault["remedy"]) is (need not in ("fp8_dispatch", "index_loader"))


@pytest.mark.parametrize("features", [None, [], {}])
def test_a_report_without_features_has_none(features: Any) -> None:
    assert len(needs_problems(["fp8_dispatch"], {**CLEAN, "features": features}, "c", "i")) == 1
    assert len(needs_problems(["fp8_dispatch"], CLEAN, "c", "i")) == 1
