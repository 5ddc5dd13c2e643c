# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import spark as node
from ansible_collections.dgxspark.vllm.plugins.modules import spark_facts

FIXTURES = Path(__file__).parents[3] / "fixtures" / "spark"
ModuleRunner = Callable[..., dict[str, Any]]


class Machine:
    """A Spark laid out in a folder, and what its commands answer."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked: list[list[str]] = []
        self.answers: dict[str, node.Answer] = {
            "docker info": node.Answer(0, self.text("docker-info-28.json"), ""),
            "docker ps": node.Answer(0, "", ""),
            "docker system": node.Answer(0, self.text("docker-df.txt"), ""),
            "nvidia-smi": node.Answer(0, self.text("nvidia-smi-gb10.csv"), ""),
            "nvidia-ctk": node.Answer(0, "NVIDIA Container Toolkit CLI version 1.17.8\n", ""),
            "systemctl show": node.Answer(0, "LoadState=not-found\nActiveState=inactive\nSubState=dead\n", ""),
        }
        for name, source in (
            ("meminfo", "meminfo-gb10.txt"),
            ("net/tcp", "net-tcp.txt"),
            ("driver/nvidia/version", "nvidia-driver-version.txt"),
        ):
            self.put(f"proc/{name}", self.text(source))
        self.put("proc/sys/kernel/hostname", "spark1\n")
        self.put("proc/sys/kernel/arch", "aarch64\n")
        self.put("etc/os-release", 'ID=ubuntu\nVERSION_ID="24.04"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n')
        self.put("etc/dgx-release", 'DGX_NAME="DGX Spark"\nDGX_SWBUILD_VERSION="7.2.3"\n')
        (root / "run/systemd/system").mkdir(parents=True)
        for name in (*node.TOOLS, "nvidia-ctk"):
            self.put(f"usr/bin/{name}", "").chmod(0o755)
        (root / "var/lib/docker").mkdir(parents=True)

    @staticmethod
    def text(name: str) -> str:
        return (FIXTURES / name).read_text()

    def put(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def run(self, argv: Sequence[str], timeout_s: float) -> node.Answer:
        self.asked.append(list(argv))
        for words, answer in self.answers.items():
            if " ".join(argv).startswith(words):
                return answer
        return node.Answer(None, "", "", "missing")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(spark_facts, "ROOT", tmp_path)
    monkeypatch.setattr(node, "run_command", made.run)
    return made


GPU = {"require_gpu": True, "driver_min": "580", "compute_capability": "12.1", "memory_gib": 104, "gpu_memory_utilization": 0.85}


@pytest.mark.parametrize("check", [False, True])
def test_a_good_spark(machine: Machine, run_module: ModuleRunner, check: bool) -> None:
    result = run_module(spark_facts.main, {**GPU, "ports": [8001], "unit": "dgxspark-vllm.service"}, check=check)
    assert not result.get("failed"), result["msg"]
    assert (result["changed"], result["problems"], result["accepted"]) == (False, [], [])
    spark = result["spark"]
    assert (spark["hostname"], spark["arch"], spark["os"]["name"]) == ("spark1", "aarch64", "Ubuntu 24.04.3 LTS")
    assert spark["dgx"] == {"name": "DGX Spark", "version": "7.2.3"}
    assert (spark["gpu"]["driver"], spark["toolkit"]["version"]) == ("580.95.05", "1.17.8")
    assert spark["unit"] == {"name": "dgxspark-vllm.service", "load": "not-found", "active": "inactive", "sub": "dead"}
    assert not any(argv[:2] == ["docker", "system"] for argv in machine.asked), "asked only when the disk is short"


def test_all_problems_fail_at_once(machine: Machine, run_module: ModuleRunner) -> None:
    machine.put("proc/sys/kernel/arch", "x86_64\n")
    machine.put("proc/meminfo", machine.text("meminfo-desktop.txt"))
    machine.answers["docker info"] = node.Answer(0, machine.text("docker-info-down.json"), "")
    result = run_module(spark_facts.main, {**GPU, "ports": [8000], "address": "127.0.0.1"})
    assert result["failed"]
    assert not result["changed"]
    assert [p["class"] for p in result["problems"]] == ["arch_wrong", "docker_down", "memory_short", "port_taken"]
    assert result["msg"].startswith("4 problems on spark1; nothing was changed.")
    assert result["msg"].count("remedy: ") == 4
    assert "spark" not in result, "the message would drown in it"


def test_warnings_do_not_fail(machine: Machine, run_module: ModuleRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(spark_facts.AnsibleModule, "warn", lambda module, text: shown.append(text))
    machine.put("proc/swaps", "Filename Type Size Used Priority\n/swap.img file 16777212 0 -2\n")
    args = {"load_format": "fastsafetensors"}
    result = run_module(spark_facts.main, args)
    assert not result.get("failed")
    assert [p["class"] for p in result["problems"]] == ["swap_active"]
    (warning,) = shown
    assert warning.startswith("spark1: swap_active: ")
    assert "Remedy: " in warning
    assert run_module(spark_facts.main, {**args, "fail_on": "warning"})["failed"]
    quiet = run_module(spark_facts.main, {**args, "fail_on": "never"})
    assert [p["class"] for p in quiet["problems"]] == ["swap_active"]
    assert shown == [warning]


def test_errors_are_only_returned_on_request(machine: Machine, run_module: ModuleRunner) -> None:
    result = run_module(spark_facts.main, {"ports": [22], "fail_on": "never"})
    assert not result.get("failed")
    assert [p["class"] for p in result["problems"]] == ["port_taken"]
    assert result["spark"]["hostname"] == "spark1"


def test_accepted_problems_are_passed_over(machine: Machine, run_module: ModuleRunner) -> None:
    result = run_module(spark_facts.main, {"ports": [22], "accept": ["port_taken"]})
    assert not result.get("failed")
    assert (result["problems"], [p["class"] for p in result["accepted"]]) == ([], ["port_taken"])


@pytest.mark.parametrize("kind", ["port", "Port_taken", "", "everything"])
def test_unknown_classes_are_refused(machine: Machine, run_module: ModuleRunner, kind: str) -> None:
    result = run_module(spark_facts.main, {"accept": [kind]})
    assert result["failed"]
    assert "port_taken" in result["msg"], "the known ones are named"


def test_a_short_disk_offers_the_build_cache(machine: Machine, run_module: ModuleRunner) -> None:
    result = run_module(spark_facts.main, {"paths": [{"path": "/var/lib/dgxspark-vllm", "need_gib": 1e6}, {"need_gib": 10}]})
    assert result["failed"]
    assert "/var/lib/dgxspark-vllm needs 1e+06 GiB and /var/lib/docker needs 10 GiB" in result["msg"]
    assert "docker builder prune" in result["msg"]


def test_what_is_done_needs_no_space(machine: Machine, run_module: ModuleRunner) -> None:
    entry = {"path": "/srv/model", "need_gib": 1e6, "unless": "/srv/model/.done.json"}
    assert run_module(spark_facts.main, {"paths": [entry]})["failed"]
    machine.put("srv/model/.done.json", "{}")
    assert not run_module(spark_facts.main, {"paths": [entry]}).get("failed")


def test_what_is_there_counts(machine: Machine, run_module: ModuleRunner) -> None:
    machine.put("srv/model/part.safetensors", "x" * (64 << 20))
    result = run_module(spark_facts.main, {"paths": [{"path": "/srv/model", "need_gib": 1e6, "present": ["/srv/model", "/srv/absent"]}]})
    assert "(0.1 GiB of it are there)" in result["msg"]


def test_no_docker_asked_for_no_docker_missed(machine: Machine, run_module: ModuleRunner) -> None:
    machine.answers["docker info"] = node.Answer(None, "", "", "missing")
    assert not run_module(spark_facts.main, {"require_docker": False}).get("failed")
    assert run_module(spark_facts.main, {})["problems"][0]["class"] == "docker_missing"


@pytest.mark.parametrize(
    "args",
    [{"ports": ["many"]}, {"paths": [{"path": "/x"}]}, {"paths": "/x"}, {"memory_gib": "much"}, {"fail_on": "sometimes"}, {"nonsense": 1}],
)
def test_bad_arguments_are_refused_in_words(machine: Machine, run_module: ModuleRunner, args: dict[str, Any]) -> None:
    result = run_module(spark_facts.main, args)
    assert result["failed"]
    assert "Traceback" not in result["msg"]


def test_this_machine_for_real(run_module: ModuleRunner) -> None:
    result = run_module(spark_facts.main, {"fail_on": "never", "ports": [8000], "paths": [{"path": "/", "need_gib": 0.001}]})
    assert not result.get("failed")
    assert result["spark"]["arch"] == platform.machine()
