# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import image_build as core
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import Status
from ansible_collections.dgxspark.vllm.plugins.modules import image_build
from fake_docker import FakeDocker
from local_units import LocalUnits

Look = Callable[..., dict[str, Any]]
IMAGE = {"Id": "sha256:" + "5" * 64, "Tag": "vllm:mine", "Created": "t", "RepoDigests": ["r@sha256:1"], "Config": {"Labels": None}}


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalUnits]:
    made = LocalUnits()
    monkeypatch.setattr(image_build, "Systemd", lambda: made)
    yield made
    made.kill()


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    return FakeDocker(tmp_path / "docker", monkeypatch)


@pytest.fixture
def look(tmp_path: Path, run_module: Look, units: LocalUnits, docker: FakeDocker) -> Look:
    """The task as its action plugin runs it: again and again until the job has ended."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a.whl").write_bytes(b"wheel")

    def run(check: bool = False, **args: Any) -> dict[str, Any]:
        whole = {"profile": "cpu", "manifest": str(tmp_path / "state" / "images" / "cpu.json"), "state_dir": str(tmp_path / "state")}
        if not args.get("reference"):
            whole |= {
                "dockerfile": "FROM scratch\n",
                "context": [{"dest": "w", "src": str(tmp_path / "wheels")}, {"dest": "f.py", "content": "1"}],
            }
        whole |= args
        for _ in range(20):
            result = run_module(image_build.main, whole, check=check)
            if result.get("job", {}).get("state") != "running":
                return result
            whole["watch"] = result["job"]["watch"]
        raise AssertionError("never ended")

    return run


def manifest(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "state" / "images" / "cpu.json").read_text())
    return found


def test_check_run_check_run_change(look: Look, tmp_path: Path, units: LocalUnits, docker: FakeDocker) -> None:
    would = look(check=True)
    assert would["changed"] and would["built"] and would["image_id"] == "" and "folder w/ " in would["diff"][0]["after"]
    assert not (tmp_path / "state").exists() and units.started == []

    done = look()
    assert done["changed"] and done["built"] and done["image_id"] == manifest(tmp_path)["image_id"] and done["inputs"] == would["inputs"]
    assert done["tag"] == f"dgxspark-vllm-cpu:{done['inputs'][:12]}" == manifest(tmp_path)["tag"]
    for check in (True, False):
        again = look(check=check)
        assert not again["changed"] and not again["built"] and again["image_id"] == done["image_id"] and "job" not in again
    assert len(units.started) == 1

    (tmp_path / "wheels" / "b.whl").write_bytes(b"new")
    would = look(check=True)
    gained = set(would["diff"][0]["after"].splitlines()) - set(would["diff"][0]["before"].splitlines())
    assert {line.split()[1] for line in gained if line.startswith("file")} == {"w/b.whl"}
    changed = look()
    assert changed["changed"] and changed["inputs"] != done["inputs"] and len(units.started) == 2
    assert manifest(tmp_path)["inputs"] == changed["inputs"]


def test_a_name_proves_nothing(look: Look, docker: FakeDocker) -> None:
    inputs = look(check=True)["inputs"]
    docker(images=[{**IMAGE, "Tag": f"dgxspark-vllm-cpu:{inputs[:12]}"}])
    assert look(check=True)["built"]


def test_a_removed_image_is_built_again_in_spite_of_its_manifest(look: Look, docker: FakeDocker, units: LocalUnits) -> None:
    look()
    docker(images=[])
    assert look(check=True)["built"] and look()["built"] and len(units.started) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"image_id": "sha256:other"}'])
def test_a_lost_manifest_is_written_again_without_a_build(look: Look, tmp_path: Path, units: LocalUnits, damage: str) -> None:
    done = look()
    path = tmp_path / "state" / "images" / "cpu.json"
    path.write_text(damage) if damage else path.unlink()
    assert look(check=True)["changed"] and path.exists() is bool(damage)
    again = look()
    assert again["changed"] and not again["built"] and manifest(tmp_path)["image_id"] == done["image_id"] and len(units.started) == 1
    assert not look()["changed"]


def test_a_failed_build(look: Look, tmp_path: Path, docker: FakeDocker) -> None:
    before = look()
    docker(late="ERROR: No matching distribution found for torch==2.13.0+cpu")
    (tmp_path / "wheels" / "a.whl").write_bytes(b"other wheel")
    failed = look()
    assert failed["failed"] and [p["class"] for p in failed["problems"]] == ["pip_no_wheel"]
    assert "last lines of the log" in failed["msg"] and "Step 2/2" in failed["msg"]
    assert manifest(tmp_path)["image_id"] == before["image_id"]
    docker(late="")
    assert look()["built"]


def test_everything_wrong_is_said_at_once(look: Look, units: LocalUnits) -> None:
    items = [{"dest": "base.tar", "src": ""}, {"dest": "../x", "content": ""}]
    result = look(context=items, dockerfile=" ", repository="Bad Name")
    assert {p["class"] for p in result["problems"]} == {"context_missing", "bad_context", "bad_name", "no_image_source"}
    assert all(p["remedy"] in result["msg"] for p in result["problems"]) and units.started == []


def test_a_full_disk_is_known_before_the_build(look: Look, units: LocalUnits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RESERVE_BYTES", 1 << 60)
    for check in (True, False):
        assert look(check=check)["problems"][0]["class"] == "disk_full"
    assert units.started == []


# --- an image from elsewhere -----------------------------------------------------------------------------------------------------


def test_existing(look: Look, tmp_path: Path, docker: FakeDocker, units: LocalUnits) -> None:
    docker(images=[IMAGE])
    assert look(check=True, reference="vllm:mine")["changed"] and not (tmp_path / "state").exists()
    done = look(reference="vllm:mine")
    assert done["changed"] and not done["built"] and done["image_id"] == IMAGE["Id"] == manifest(tmp_path)["image_id"]
    assert manifest(tmp_path)["profile"] == "cpu" and len(manifest(tmp_path)["inputs"]) == 64
    assert not look(reference="vllm:mine")["changed"] and units.started == []
    # the same name is another image now
    docker(images=[{**IMAGE, "Id": "sha256:" + "6" * 64}])
    moved = look(reference="vllm:mine")
    assert moved["changed"] and manifest(tmp_path)["previous"]["image_id"] == IMAGE["Id"]


@pytest.mark.parametrize("check", [True, False])
def test_an_image_that_is_not_there(look: Look, check: bool) -> None:
    found = look(reference="vllm:mine", check=check)["problems"]
    assert [p["class"] for p in found] == ["image_missing"] and "docker load" in found[0]["remedy"]


@pytest.mark.parametrize("args", [{"reference": "--privileged"}, {"reference": "a", "dockerfile": "FROM a"}])
def test_a_reference_that_is_none(look: Look, args: dict[str, str]) -> None:
    assert look(**args)["problems"][0]["class"] == "bad_reference"


def test_no_docker_on_the_node(look: Look, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "wheels"))
    assert look(reference="a")["problems"][0]["class"] == "docker_missing"
    assert look()["problems"][0]["class"] == "docker_missing"


@pytest.mark.parametrize("result", [{}, {"before": "", "after": ""}, {"before": "", "after": "", "image_id": 5}])
def test_a_result_of_another_shape(look: Look, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]) -> None:
    monkeypatch.setattr(image_build.Job, "follow", lambda *_args: Status("done", {}, result))
    assert look()["problems"][0]["class"] == "job_result_damaged"
