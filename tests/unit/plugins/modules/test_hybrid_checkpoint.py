# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import json
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hybrids
import pytest
import shards
import yaml
from ansible_collections.dgxspark.vllm.plugins.action import hybrid_checkpoint as action
from ansible_collections.dgxspark.vllm.plugins.module_utils import hybrid_folder
from ansible_collections.dgxspark.vllm.plugins.module_utils.hybrid import ONLINE_ENGINE_ARGS
from ansible_collections.dgxspark.vllm.plugins.modules import hybrid_checkpoint
from ansible_collections.dgxspark.vllm.plugins.plugin_utils.watch import WatchedAction
from hub import Fault, fill
from local_units import LocalUnits

Look = Callable[..., dict[str, Any]]


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalUnits]:
    made = LocalUnits()
    monkeypatch.setattr(hybrid_checkpoint, "Systemd", lambda: made)
    yield made
    made.kill()


@pytest.fixture
def look(tmp_path: Path, run_module: Look, units: LocalUnits) -> Look:
    """The task as its action plugin runs it: again and again until the job has ended."""
    hybrids.pair(tmp_path)

    def run(mode: str = "materialize", check: bool = False, **args: Any) -> dict[str, Any]:
        whole = {name: str(tmp_path / name) for name in ("source", "output")} | {"donor_source": str(tmp_path / "donor")}
        whole |= {"mode": mode, "donor_repo": "org/fp8", "donor_revision": hybrids.COMMIT, "state_dir": str(tmp_path / "state"), **args}
        for _ in range(20):
            result = run_module(hybrid_checkpoint.main, {k: v for k, v in whole.items() if v is not None}, check=check)
            if result.get("job", {}).get("state") != "running":
                return result
            assert not result["complete"] and not result["changed"]
            whole["watch"] = result["job"]["watch"]
        raise AssertionError("never ended")

    return run


FIGURES = {"replaced": 12, "scales_added": 12, "unplaced": 56}


@pytest.mark.parametrize("mode", ["materialize", "overlay"])
def test_check_run_check_run_change(look: Look, tmp_path: Path, units: LocalUnits, mode: str) -> None:
    output = tmp_path / "output"
    would = look(mode, check=True)
    assert would["changed"] and not would["complete"] and would.items() >= FIGURES.items()
    assert "would build" in would["msg"] and not output.exists() and not (tmp_path / "state").exists() and units.started == []

    done = look(mode)
    assert done["changed"] and done["complete"] and done["job"]["state"] == "done" and done.items() >= FIGURES.items()
    assert done["bytes_read"] > 0 and done["bytes_written"] > 0 and done["seconds"] > 0 and done["engine_args"] == {}
    assert done["needs"] == (["fp8_dispatch"] if mode == "materialize" else ["fp8_dispatch", "index_loader"])
    assert Path(done["manifest"]) == output / ".dgxspark-hybrid.json" and Path(done["manifest"]).is_file()
    assert "complete: no (absent)" in done["diff"][0]["before"] and "FP8 weights: 12" in done["diff"][0]["after"]
    assert shards.by_index(output) == hybrids.expected(tmp_path / "source", tmp_path / "donor")

    for check in (True, False):
        again = look(mode, check=check)
        assert not again["changed"] and again["complete"] and again.items() >= FIGURES.items() and "job" not in again
        assert (again["bytes_read"], again["bytes_written"], again["seconds"]) == (0, 0, 0)
    assert len(units.started) == 1

    full = look(mode, verify="full")
    assert not full["changed"] and full["complete"] and full["bytes_read"] > 0 and full["bytes_written"] == 0

    (output / shards.INDEX).write_text("{}")
    would = look(mode, check=True)
    assert would["changed"] and f"complete: no ({shards.INDEX} was changed)" in would["diff"][0]["before"]
    assert look(mode)["changed"] and not look(mode)["changed"]


def test_online_writes_nothing_and_says_what_the_engine_needs(look: Look, tmp_path: Path, units: LocalUnits) -> None:
    before = shards.tree(tmp_path)
    for check in (True, False):
        result = look("online", check=check, donor_repo=None, donor_revision=None, output=None, donor_source=None)
        assert (result["changed"], result["complete"], result["needs"], result["manifest"]) == (False, True, [], "")
        assert result["engine_args"] == ONLINE_ENGINE_ARGS and "job" not in result
    assert shards.tree(tmp_path) == before and units.started == [] and not (tmp_path / "state").exists()
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    failed = look("online")
    assert failed["failed"] and [p["class"] for p in failed["problems"]] == ["online_not_quantised"]


@pytest.mark.parametrize("missing", ["donor_repo", "donor_revision", "output"])
def test_a_made_hybrid_needs_its_donor_and_place(look: Look, missing: str) -> None:
    failed = look(**{missing: None})
    assert failed["failed"] and missing in failed["msg"]


def test_what_is_wrong_with_a_folder_is_told_without_a_job(look: Look, tmp_path: Path, units: LocalUnits) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"output": str(tmp_path / "source")}, "bad_output"),
        ({"donor_source": "nowhere"}, "bad_donor_source"),
        ({"source": str(tmp_path / "nothing")}, "source_missing"),
        ({"expect": {"weights": 144, "unplaced": 408}}, "hybrid_weights_differ"),
        ({"expect": {"unplaced": 1}}, "hybrid_unplaced_differ"),
    ]
    for args, class_ in cases:
        failed = look(**args)
        assert failed["failed"] and class_ in [p["class"] for p in failed["problems"]] and "remedy: " in failed["msg"]
    (tmp_path / "source" / "model_extra_tensors.safetensors").write_bytes(b"<html>")
    for check in (True, False):
        assert "text_page" in [p["class"] for p in look(check=check)["problems"]]
    assert units.started == [] and not (tmp_path / "output").exists()


@pytest.mark.parametrize("donor_source", ["hub", None])
def test_a_disk_that_is_too_small_is_told_without_a_job(
    look: Look, units: LocalUnits, monkeypatch: pytest.MonkeyPatch, donor_source: str | None
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 30))
    args = {"donor_source": donor_source} if donor_source else {}
    for check in (True, False):
        failed = look(check=check, **args)
        assert failed["failed"] and [p["class"] for p in failed["problems"]] == ["disk_full"]
    assert units.started == []


def test_in_check_mode_the_source_may_still_be_to_come(look: Look, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "source")
    would = look(check=True)
    assert would["changed"] and not would["complete"] and "source_missing" in would["msg"]
    assert look()["failed"]


def test_in_check_mode_the_source_of_mode_online_may_still_be_to_come(look: Look, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "source")
    would = look("online", check=True, donor_repo=None, donor_revision=None, output=None)
    assert not would.get("failed") and not would["changed"] and not would["complete"] and "source_missing" in would["msg"]
    assert would["engine_args"] == ONLINE_ENGINE_ARGS
    assert look("online", donor_repo=None, donor_revision=None, output=None)["failed"]


def test_check_mode_does_not_pretend_to_have_read_everything(look: Look, tmp_path: Path, units: LocalUnits) -> None:
    look()
    started = len(units.started)
    would = look(check=True, verify="full")
    assert would["complete"] and not would["changed"] and "which check mode does not" in would["msg"] and len(units.started) == started
    assert "msg" not in look(check=True)


def test_an_overlay_on_another_file_system_is_told_without_a_job(look: Look, tmp_path: Path, units: LocalUnits) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    output = str(shm / tmp_path.name / "output")
    for check in (True, False):
        failed = look("overlay", check=check, output=output)
        assert failed["failed"] and [p["class"] for p in failed["problems"]] == ["overlay_other_file_system"]
    assert units.started == [] and not Path(output).parent.exists()


def test_numbers_that_are_given_count_for_an_output_that_is_there(look: Look, tmp_path: Path) -> None:
    look()
    assert not look(expect={"weights": 12})["changed"]
    failed = look(expect={"weights": 9})
    assert failed["failed"] and "hybrid_weights_differ" in [p["class"] for p in failed["problems"]]


def test_an_interrupted_build_goes_on_though_the_donors_folder_is_gone(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(hybrid_folder.Building, "publish", killed)
        hybrids.build(tmp_path)
    want = hybrids.expected(tmp_path / "source", tmp_path / "donor")
    (tmp_path / "donor").rename(tmp_path / "gone")
    assert look(check=True).items() >= {**FIGURES, "changed": True}.items()
    assert look()["complete"] and shards.by_index(tmp_path / "output") == want


def test_a_job_that_was_killed_is_told_and_taken_up(look: Look, tmp_path: Path, units: LocalUnits, run_module: Look) -> None:
    (tmp_path / "source" / "big.bin").write_bytes(bytes(100_000_000))
    args = {name: str(tmp_path / name) for name in ("source", "output")} | {"donor_source": str(tmp_path / "donor")}
    args |= {"mode": "materialize", "donor_repo": "org/fp8", "donor_revision": hybrids.COMMIT, "state_dir": str(tmp_path / "state")}
    kill_at = time.monotonic() + 30
    real = units.start

    def start_and_kill(unit: str, *rest: Any) -> None:
        real(unit, *rest)
        while not list(tmp_path.glob(".output.building/.dgxspark-hybrid.journal.json")) and time.monotonic() < kill_at:
            time.sleep(0.002)
        units.signal(unit, signal.SIGKILL)
        units.processes[unit].wait(10)

    units.start = start_and_kill  # type: ignore[method-assign]
    lost = run_module(hybrid_checkpoint.main, args)
    assert lost["failed"] and [p["class"] for p in lost["problems"]] == ["job_lost"] and not (tmp_path / "output").exists()
    units.start = real  # type: ignore[method-assign]
    done = look()
    assert done["changed"] and done["complete"]


def test_a_donor_on_the_hub(look: Look, tmp_path: Path, hub: Any) -> None:
    commit = fill(hub, "org/fp8", {path.name: path.read_bytes() for path in (tmp_path / "donor").iterdir()})
    hub.faults.append(Fault("gated", "/org/fp8/", token="hf_secret"))
    args = {"donor_source": "hub", "donor_revision": commit, "endpoint": hub.url, "client_python": sys.executable}
    asked = len(hub.requests)
    would = look(check=True, **args)
    # Nobody is asked in check mode: these numbers are the config's.
    assert would["changed"] and (would["replaced"], would["scales_added"], would["unplaced"]) == (12, 12, None)
    assert len(hub.requests) == asked

    failed = look(**args)
    assert failed["failed"] and "gated" in failed["problems"][0]["class"]

    done = look(**args, token="hf_secret")
    assert done["changed"] and done["complete"] and done.items() >= FIGURES.items()
    assert shards.by_index(tmp_path / "output") == hybrids.expected(tmp_path / "source", tmp_path / "donor")
    manifest = json.loads(Path(done["manifest"]).read_text())
    assert (manifest["donor"]["commit"], manifest["donor"]["revision"]) == (commit, commit)
    assert all(len(file["digest"]) == 64 for file in manifest["donor"]["files"].values())
    # The token lies in one file, which only root reads.
    holders = [p for p in (tmp_path / "state").rglob("*") if p.is_file() and b"hf_secret" in p.read_bytes()]
    assert len(holders) == 1 and stat.S_IMODE(holders[0].stat().st_mode) == 0o600 and "hf_secret" not in json.dumps(done)

    hub.stop()
    again = look(**args, token="hf_secret")
    assert not again["changed"] and again["complete"] and again.items() >= FIGURES.items()


def test_a_branch_is_resolved_and_warned_about(look: Look, tmp_path: Path, hub: Any) -> None:
    commit = fill(hub, "org/fp8", {path.name: path.read_bytes() for path in (tmp_path / "donor").iterdir()})
    args = {"donor_source": "hub", "donor_revision": "main", "endpoint": hub.url, "client_python": sys.executable}
    done = look("overlay", **args)
    assert done["complete"] and "donor_revision 'main' is no commit" in str(done["warnings"])
    manifest = json.loads(Path(done["manifest"]).read_text())
    assert (manifest["donor"]["commit"], manifest["donor"]["revision"]) == (commit, "main")


def test_a_result_of_another_shape_is_not_believed(look: Look, tmp_path: Path, units: LocalUnits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid_checkpoint.hybrid_build, "is_report", lambda _result: False)
    assert [p["class"] for p in look()["problems"]] == ["job_result_damaged"]


def test_the_action_watches_the_modules_job() -> None:
    plugin = action.ActionModule.__new__(action.ActionModule)
    assert isinstance(plugin, WatchedAction) and plugin.LABEL and plugin.POLL_MIN_S == plugin.POLL_MAX_S == 0
    given = {"mode": "overlay"}
    assert plugin.next_args(given, {"job": {"state": "running", "watch": "w"}}) == {"mode": "overlay", "watch": "w"}
    assert given == {"mode": "overlay"}


def test_the_documentation_has_an_example_for_every_mode_and_names_every_result(look: Look, tmp_path: Path) -> None:
    documented, returned = yaml.safe_load(hybrid_checkpoint.DOCUMENTATION)["options"], yaml.safe_load(hybrid_checkpoint.RETURN)
    done = look()
    taken = done["invocation"]["module_args"].keys()
    assert done.keys() - {"changed", "diff", "invocation", "warnings"} <= returned.keys()
    examples = yaml.safe_load(hybrid_checkpoint.EXAMPLES)
    tasks = [task["dgxspark.vllm.hybrid_checkpoint"] for task in examples if "dgxspark.vllm.hybrid_checkpoint" in task]
    assert {task["mode"] for task in tasks} == set(documented["mode"]["choices"])
    assert all(task.keys() <= taken for task in tasks)
