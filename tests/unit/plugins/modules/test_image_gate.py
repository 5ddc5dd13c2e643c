# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.gate_probe import MARK
from ansible_collections.dgxspark.vllm.plugins.modules import image_gate

IMAGE = "sha256:" + "ab" * 32
REPORT = {
    "vllm": "0.32.0",
    "torch": "2.12.0+cu130",
    "torch_cuda": "13.0",
    "python": "3.12.3",
    "machine": "aarch64",
    "extension": "ok",
    "plugins": [],
    "features": ["fp8_dispatch"],
    "options": 430,
    "platform_made_up": True,
    "skipped": [],
    "findings": [],
}

Runner = Callable[..., dict[str, Any]]


class Docker:
    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.report: dict[str, Any] | None = dict(REPORT)
        self.config: dict[str, Any] = {"Entrypoint": ["vllm"], "Env": ["PATH=/usr/bin"]}
        self.code, self.output, self.cut = 0, "", False
        self.image = True

    def __call__(self, argv: list[str], stdin: str = "", timeout_s: float = 60) -> tuple[int, str, bool]:
        self.calls.append(argv[1:])
        match argv[1:]:
            case ["image", "inspect", _]:
                if not self.image:
                    return 1, f"[]\nError: No such image: {IMAGE}\n", False
                return 0, json.dumps([{"Config": self.config}]), False
            case ["run", *_]:
                assert "def examine(" in stdin
                text = self.output if self.report is None else f"INFO hello\n{MARK}{json.dumps(self.report)}\n"
                return self.code, text, self.cut
            case ["rm", "-f", _]:
                return 0, "", False
        raise AssertionError(argv)

    @property
    def runs(self) -> int:
        return sum(call[0] == "run" for call in self.calls)


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch) -> Docker:
    made = Docker()
    monkeypatch.setattr(image_gate, "docker", made)
    return made


@pytest.fixture
def ask(docker: Docker, tmp_path: Path, run_module: Runner) -> Runner:
    (tmp_path / "image.json").write_text(json.dumps({"image_id": IMAGE}))

    def run(check: bool = False, **change: Any) -> dict[str, Any]:
        args = {"image_manifest": str(tmp_path / "image.json"), "argv": ["serve", "/model"], "state_dir": str(tmp_path / "state")}
        return run_module(image_gate.main, {**args, **change}, check=check)

    return run


def test_the_second_time_costs_nothing(ask: Runner, docker: Docker) -> None:
    first = ask()
    assert not first["changed"] and first["problems"] == [] and first["gate"]["vllm"] == "0.32.0" and not first["gate"]["cached"]
    calls = len(docker.calls)
    second = ask()
    assert second["gate"] == {**first["gate"], "cached": True} and len(docker.calls) == calls


@pytest.mark.parametrize("change", [{"argv": ["serve", "/model", "--x"]}, {"environment": {"A": "1"}}, {"python": "/opt/python"}])
def test_another_question_is_asked(ask: Runner, docker: Docker, change: dict[str, Any]) -> None:
    ask()
    assert not ask(**change)["gate"]["cached"] and docker.runs == 2


@pytest.mark.parametrize(
    ("environment", "class_"),
    [
        ({"VLLM_API_KEY": "hush"}, "environment_secret"),
        ({"HF_TOKEN": "hush"}, "environment_secret"),
        ({"HF_TOKEN=hush": ""}, "environment_name"),
        ({"A": "hush\nB=1"}, "environment_value"),
        ({"A": ["hush"]}, "environment_type"),
    ],
)
def test_an_environment_with_a_secret_is_refused_unseen(ask: Runner, docker: Docker, environment: dict[str, Any], class_: str) -> None:
    result = ask(environment=environment)
    assert result["failed"] and [p["class"] for p in result["problems"]] == [class_]
    assert "hush" not in json.dumps(result) and docker.calls == []


def test_a_refusal_is_kept_too(ask: Runner, docker: Docker) -> None:
    docker.report = {**REPORT, "findings": [{"kind": "unknown_option", "option": "--egaer", "meant": ["--eager"]}]}
    first, second = ask(), ask()
    assert first["failed"] and second["failed"] and first["msg"] == second["msg"] and docker.runs == 1
    assert "vLLM 0.32.0" in first["msg"] and "did you mean --eager" in first["msg"] and "left alone" in first["msg"]


def test_all_kinds_of_problems_at_once(ask: Runner, docker: Docker) -> None:
    docker.report = {**REPORT, "torch_cuda": None, "findings": [{"kind": "unknown_option", "option": "--x", "meant": []}]}
    docker.config["Env"] = ["GLOO_SOCKET_IFNAME=enP7s7"]
    for _ in range(2):
        assert {p["class"] for p in ask()["problems"]} == {"unknown_option", "cpu_torch", "baked_environment"}
    assert [p["class"] for p in ask(cuda=False, environment={"GLOO_SOCKET_IFNAME": "eth0"})["problems"]] == ["unknown_option"]


@pytest.mark.parametrize(
    ("code", "output", "cut", "class_"),
    [
        (124, "INFO", True, "gate_timeout"),
        (1, "Traceback", False, "gate_failed"),
        (137, "", False, "out_of_memory"),
    ],
)
def test_no_answer_is_not_kept(ask: Runner, docker: Docker, code: int, output: str, cut: bool, class_: str) -> None:
    docker.report, docker.code, docker.output, docker.cut = None, code, output, cut
    assert [p["class"] for p in ask()["problems"]] == [class_]
    assert ["rm" in call for call in docker.calls].count(True) == int(cut)
    docker.report = dict(REPORT)
    assert not ask().get("failed") and docker.runs == 2


def test_vllm_that_does_not_import(ask: Runner, docker: Docker) -> None:
    docker.report = {"error": "ModuleNotFoundError: No module named 'vllm'"}
    assert ask()["problems"][0]["class"] == "no_vllm_in_image"


def test_a_dry_run_asks_but_keeps_nothing(ask: Runner, docker: Docker, tmp_path: Path) -> None:
    assert ask(check=True)["gate"]["vllm"] == "0.32.0"
    assert not (tmp_path / "state").exists() and docker.runs == 1


@pytest.mark.parametrize("manifest", [None, "{", json.dumps({"image_id": IMAGE})])
def test_without_an_image(ask: Runner, docker: Docker, tmp_path: Path, manifest: str | None) -> None:
    docker.image = False
    path = tmp_path / "image.json"
    path.unlink() if manifest is None else path.write_text(manifest)
    dry = ask(check=True)
    assert dry["skipped"] and not dry.get("failed") and dry["gate"] == {}
    real = ask()
    assert real["failed"] and [p["class"] for p in real["problems"]] == ["image_missing"]
    assert "ansible-playbook dgxspark.vllm.image" in real["msg"]


def test_warnings_are_shown(ask: Runner, docker: Docker) -> None:
    docker.report = {**REPORT, "findings": [{"kind": "abbreviated_option", "option": "--max-num-b", "meant": ["--max-num-batched-tokens"]}]}
    result = ask()
    assert not result.get("failed") and "max-num-batched-tokens" in json.dumps(result["warnings"])


def hybrid(tmp_path: Path, text: str) -> str:
    folder = tmp_path / "checkpoint"
    folder.mkdir(exist_ok=True)
    (folder / ".dgxspark-hybrid.json").write_text(text)
    return str(folder)


def test_a_checkpoint_that_the_image_can_load(ask: Runner, docker: Docker, tmp_path: Path) -> None:
    result = ask(checkpoint=hybrid(tmp_path, '{"needs": ["fp8_dispatch"]}'))
    assert not result.get("failed") and result["needs"] == ["fp8_dispatch"] and result["gate"]["features"] == ["fp8_dispatch"]
    # The same image is not asked anew for another checkpoint.
    lacking = ask(checkpoint=hybrid(tmp_path, '{"needs": ["fp8_dispatch", "index_loader"]}'))
    assert lacking["failed"] and docker.runs == 1 and lacking["needs"] == ["fp8_dispatch", "index_loader"] and lacking["gate"]["cached"]
    assert [p["class"] for p in lacking["problems"]] == ["checkpoint_needs"]
    for text in (f"{tmp_path}/checkpoint needs index_loader", "image.json (sha256:abab", "vLLM 0.32.0", "checkpoint.hybrid: materialize"):
        assert text in lacking["msg"]


@pytest.mark.parametrize("checkpoint", [None, "absent", "plain"])
def test_a_checkpoint_that_needs_nothing(ask: Runner, docker: Docker, tmp_path: Path, checkpoint: str | None) -> None:
    docker.report = {**REPORT, "features": []}
    (tmp_path / "plain").mkdir()
    result = ask(**({"checkpoint": str(tmp_path / checkpoint)} if checkpoint else {}))
    assert not result.get("failed") and result["needs"] == []


@pytest.mark.parametrize(
    ("text", "class_"),
    [
        ("", "checkpoint_needs_unknown"),
        ("{", "checkpoint_needs_unknown"),
        ("[]", "checkpoint_needs_unknown"),
        ("{}", "checkpoint_needs_unknown"),
        ('{"needs": "fp8_dispatch"}', "checkpoint_needs_unknown"),
        ('{"needs": ["something_new"]}', "checkpoint_needs"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_what_is_not_known_to_be_there_is_not_there(ask: Runner, tmp_path: Path, text: str, class_: str, check: bool) -> None:
    result = ask(check=check, checkpoint=hybrid(tmp_path, text))
    assert result["failed"] and [p["class"] for p in result["problems"]] == [class_]


def test_a_manifest_that_leads_nowhere(ask: Runner, tmp_path: Path) -> None:
    folder = Path(hybrid(tmp_path, ""))
    (folder / ".dgxspark-hybrid.json").unlink()
    (folder / ".dgxspark-hybrid.json").symlink_to("gone")
    assert [p["class"] for p in ask(checkpoint=str(folder))["problems"]] == ["checkpoint_needs_unknown"]
    (folder / ".dgxspark-hybrid.json").unlink()
    (folder / ".dgxspark-hybrid.json").mkdir()
    assert [p["class"] for p in ask(checkpoint=str(folder))["problems"]] == ["checkpoint_needs_unknown"]


def test_all_faults_of_image_and_checkpoint_at_once(ask: Runner, docker: Docker, tmp_path: Path) -> None:
    docker.report = {**REPORT, "features": [], "torch_cuda": None, "findings": [{"kind": "unknown_option", "option": "--x", "meant": []}]}
    result = ask(checkpoint=hybrid(tmp_path, '{"needs": ["fp8_dispatch", "index_loader"]}'))
    assert sorted(p["class"] for p in result["problems"]) == ["checkpoint_needs", "checkpoint_needs", "cpu_torch", "unknown_option"]


def test_docker_itself(tmp_path: Path) -> None:
    script = tmp_path / "docker"
    script.write_text('#!/bin/sh\ncase $1 in slow) exec sleep 5 ;; esac\ncat; echo "got $*" >&2; exit 3\n')
    script.chmod(0o755)
    assert image_gate.docker([str(script), "a", "b"], "in\n", 10) == (3, "in\ngot a b\n", False)
    assert image_gate.docker([str(script), "slow"], "", 0.1)[::2] == (124, True)
    assert image_gate.docker([str(tmp_path / "none")])[0] == 127
