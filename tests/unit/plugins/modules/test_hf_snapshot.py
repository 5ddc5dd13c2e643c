# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import Status
from ansible_collections.dgxspark.vllm.plugins.modules import hf_snapshot
from hub import Fault, Hub, commit_of, fill
from local_units import LocalUnits
from snapshots import cache
from web import Server

FILES = {"config.json": b"{}", "model.safetensors.index.json": b"{}", "model.safetensors": os.urandom(50_000)}


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalUnits]:
    made = LocalUnits()
    monkeypatch.setattr(hf_snapshot, "Systemd", lambda: made)
    yield made
    made.kill()


@pytest.fixture
def pin(tmp_path: Path) -> str:
    (tmp_path / "source").mkdir()
    for name, data in FILES.items():
        (tmp_path / "source" / name).write_bytes(data)
    text = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in FILES.items())
    (tmp_path / "source" / "SHA256SUMS").write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()


Look = Callable[..., dict[str, Any]]


@pytest.fixture
def look(tmp_path: Path, run_module: Look, units: LocalUnits, pin: str) -> Look:
    """The task as its action plugin runs it: again and again until the job has ended."""

    def run(check: bool = False, **args: Any) -> dict[str, Any]:
        whole = {"repo": "org/name", "revision": pin, "source": str(tmp_path / "source"), "dest": str(tmp_path / "dest")}
        whole |= {"state_dir": str(tmp_path / "state"), **args}
        for _ in range(20):
            result = run_module(hf_snapshot.main, whole, check=check)
            if result.get("job", {}).get("state") != "running":
                return result
            whole["watch"] = result["job"]["watch"]
        raise AssertionError("never ended")

    return run


def test_check_run_check_run_change(look: Look, tmp_path: Path, units: LocalUnits, pin: str) -> None:
    dest = tmp_path / "dest"
    would = look(check=True)
    assert would["changed"] and not would["complete"] and would["missing"] == {"files": 3, "bytes": 50_004}
    assert "3 of 3 files" in would["msg"] and not dest.exists() and not (tmp_path / "state").exists() and units.started == []

    done = look()
    assert done["changed"] and done["complete"] and (done["files"], done["bytes"], done["resumed_bytes"]) == (3, 50_004, 0)
    assert (done["path"], done["revision"], done["job"]["state"]) == (str(dest), pin, "done")
    assert done["diff"] == would["diff"] and "config.json: missing" in done["diff"][0]["before"]

    for check in (True, False):
        again = look(check=check)
        assert not again["changed"] and again["complete"] and (again["files"], again["bytes"]) == (3, 50_004)
        assert "job" not in again
    assert len(units.started) == 1

    (dest / "config.json").write_text("damaged")
    would = look(check=True)
    assert would["changed"] and would["missing"]["files"] == 1 and (dest / "config.json").read_text() == "damaged"
    assert look()["changed"] and (dest / "config.json").read_bytes() == FILES["config.json"]


def test_everything_wrong_is_said_at_once(look: Look, units: LocalUnits) -> None:
    result = look(source="relative", dest="/", revision="main")
    assert result["failed"] and {p["class"] for p in result["problems"]} == {"bad_source", "bad_dest", "no_pin"}
    assert all(p["remedy"] in result["msg"] and p["evidence"] in result["msg"] for p in result["problems"])


@pytest.mark.parametrize("check", [True, False])
def test_a_wrong_revision_is_known_without_a_job(look: Look, check: bool, pin: str, units: LocalUnits) -> None:
    result = look(revision="sha256:" + "0" * 64, check=check)
    assert result["failed"] and "0" * 64 in result["msg"] and pin in result["msg"] and units.started == []


def test_a_commit_needs_the_sums_as_pin(look: Look, tmp_path: Path, pin: str) -> None:
    assert f"cd {tmp_path / 'source'} && sha256sum * > SHA256SUMS && sha256sum SHA256SUMS" in look(revision="a" * 40)["msg"]
    done = look(revision="a" * 40, sums_sha256=pin)
    assert done["complete"] and done["revision"] == "a" * 40
    assert json.loads((tmp_path / "dest" / ".dgxspark-snapshot.json").read_text())["revision"] == "a" * 40


def test_check_mode_before_the_source_is_there(look: Look, tmp_path: Path) -> None:
    result = look(check=True, source=str(tmp_path / "not mounted yet"))
    assert result["changed"] and result["missing"] == {"files": None, "bytes": None} and "cannot be told now" in result["msg"]
    assert look(source=str(tmp_path / "not mounted yet"))["problems"][0]["class"] == "source_vanished"
    result = look(check=True, source="http://127.0.0.1:9/m")
    assert result["changed"] and "cannot be told now" in result["msg"]


PLACES = ["folder", "cache", "url", "hub"]


@pytest.fixture
def place(tmp_path: Path, pin: str, hub: Hub) -> Iterator[Callable[[str], tuple[dict[str, Any], Callable[[], Any]]]]:
    """(arguments, what takes the source away) of a source of a kind."""
    running = Server(tmp_path / "source")
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()

    def made(kind: str) -> tuple[dict[str, Any], Callable[[], Any]]:
        if kind == "folder":
            return {}, lambda: shutil.rmtree(tmp_path / "source")
        if kind == "cache":
            cache(tmp_path / "hub-cache", "a" * 40, FILES)
            return {"source": str(tmp_path / "hub-cache"), "revision": "a" * 40}, lambda: shutil.rmtree(tmp_path / "hub-cache")
        if kind == "url":
            return {"source": running.url}, running.shutdown
        commit = fill(hub, "org/name", FILES)
        return {"source": "hub", "endpoint": hub.url, "client_python": sys.executable, "revision": commit}, hub.stop

    yield made
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize("kind", PLACES)
def test_a_finished_snapshot_does_not_need_its_source(look: Look, place: Any, kind: str, units: LocalUnits) -> None:
    """The disk is unmounted, the cache cleaned, the server or the client gone."""
    args, take_away = place(kind)
    assert look(**args)["complete"]
    take_away()
    if kind == "hub":
        args["client_python"] = "/none"
    for check in (True, False):
        again = look(check=check, **args)
        assert again["complete"] and not again["changed"] and "job" not in again
    full = look(verify="full", **args)
    assert full["complete"] and not full["changed"] and len(units.started) == 2
    would = look(check=True, verify="full", **args)
    assert would["complete"] and "in check mode verify=full reads no file" in would["msg"]


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ({"source": "gone"}, "source_vanished"),
        ({"source": "gone", "revision": "a" * 40}, "source_vanished"),  # a cache, or a folder: who knows
        ({"source": "gone", "revision": "a" * 40, "sums_sha256": "0" * 64}, "source_vanished"),
        ({"source": "empty"}, "no_sums"),
        ({"source": "empty", "revision": "a" * 40}, "no_pin"),  # a cache's root without that repository
        ({"source": "cache", "revision": "b" * 40}, "revision_not_found"),
        ({"source": "broken cache", "revision": "a" * 40}, "source_incomplete"),
    ],
)
def test_a_source_that_is_not_usable_yet(look: Look, tmp_path: Path, args: dict[str, Any], kind: str, units: LocalUnits) -> None:
    """A follower in check mode does not have what the first node has."""
    (tmp_path / "empty").mkdir()
    cache(tmp_path / "cache", "a" * 40, FILES)
    broken = cache(tmp_path / "broken cache", "a" * 40, FILES)
    shutil.rmtree(broken / "blobs")
    args = {**args, "source": str(tmp_path / args["source"])}
    would = look(check=True, **args)
    assert would["changed"] and not would["complete"] and would["missing"] == {"files": None, "bytes": None} and kind in would["msg"]
    result = look(**args)
    assert result["failed"] and {p["class"] for p in result["problems"]} == {kind} and units.started == []


@pytest.mark.parametrize("source", ["http://127.0.0.1:9/m", "source"])
def test_a_source_that_can_be_no_cache_needs_its_pin_in_check_mode_too(look: Look, tmp_path: Path, source: str) -> None:
    result = look(check=True, source=source if ":" in source else str(tmp_path / source), revision="a" * 40)
    assert result["failed"] and result["problems"][0]["class"] == "no_pin"


def test_another_nodes_snapshot_is_read_again_too(look: Look, tmp_path: Path, pin: str) -> None:
    """verify=full of a follower: what is damaged comes from the other node."""
    first = look(dest=str(tmp_path / "first"))
    with Server(tmp_path / "first") as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        args = {"source": running.url, "manifest_sha256": first["manifest_sha256"], "revision": "main"}
        assert look(**args)["complete"]
        file = tmp_path / "dest" / "model.safetensors"
        info = file.stat()
        file.write_bytes(bytes(50_000))
        os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
        assert not look(**args)["changed"]
        done = look(verify="full", **args)
        running.shutdown()
    assert done["changed"] and done["complete"] and file.read_bytes() == FILES[file.name]


def test_files_of_somebody_else_are_named_in_check_mode_by_their_size(look: Look, place: Any, tmp_path: Path) -> None:
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "config.json").write_text("precious")
    found = look(check=True, **place("hub")[0])["problems"][0]
    assert found["class"] == "dest_foreign" and "config.json" in found["evidence"]


@pytest.mark.parametrize("check", [True, False])
def test_another_repositorys_folder(look: Look, check: bool) -> None:
    look()
    assert look(check=check, repo="other/repo")["problems"][0]["class"] == "dest_other_repo"


@pytest.mark.parametrize("shut", ["state", "dest"])
def test_without_become_the_user_is_named_first(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shut: str) -> None:
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest" / "config.json").mkdir()  # a problem of the destination, told when somebody may write there
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(hf_snapshot.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hf_snapshot.os, "access", lambda path, _mode: Path(path) != tmp_path / shut)
    found = look()["problems"]
    assert [p["class"] for p in found] == ["not_root"] and str(tmp_path / shut) in found[0]["evidence"] and "become" in found[0]["remedy"]


def test_what_may_not_be_read_without_become(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any) -> None:
        raise PermissionError(13, "Permission denied", "/var/lib/x")

    monkeypatch.setattr(hf_snapshot.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(hf_snapshot.files, "complete", refuse)
    for check in (True, False):
        assert [p["class"] for p in look(check=check)["problems"]] == ["not_root"]


@pytest.mark.parametrize("kind", ["file", "dangling", "file above"])
def test_a_state_folder_that_is_none_is_named_as_such(look: Look, tmp_path: Path, kind: str) -> None:
    state = tmp_path / "state"
    if kind == "dangling":
        state.symlink_to(tmp_path / "none")
    else:
        state.write_text("")
    state = state / "below" if kind == "file above" else state
    found = look(state_dir=str(state))["problems"][0]
    assert found["class"] == "state_dir_unusable" and str(tmp_path / "state") in found["evidence"]


def test_full_verification_is_a_job_and_changes_only_what_is_wrong(look: Look, tmp_path: Path, units: LocalUnits) -> None:
    look()
    good = look(verify="full")
    assert not good["changed"] and good["complete"] and good["files"] == 3 and len(units.started) == 2
    file = tmp_path / "dest" / "model.safetensors"
    info = file.stat()
    file.write_bytes(bytes(50_000))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert not look()["changed"]
    mended = look(verify="full")
    assert mended["changed"] and "model.safetensors: damaged" in mended["diff"][0]["before"] and file.read_bytes() == FILES[file.name]


def test_a_file_that_never_ends_is_not_waited_for(look: Look, tmp_path: Path) -> None:
    (tmp_path / "source" / "config.json").unlink()
    os.mkfifo(tmp_path / "source" / "config.json")
    assert look()["problems"][0]["class"] == "source_damaged"


def test_a_second_run_joins_the_first(
    tmp_path: Path, run_module: Look, units: LocalUnits, pin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first controller is gone after one look (Ctrl-C); the second joins and ends with the same result."""
    args = {
        "repo": "o/n",
        "revision": pin,
        "source": str(tmp_path / "source"),
        "dest": str(tmp_path / "dest"),
        "state_dir": str(tmp_path / "state"),
    }
    monkeypatch.setattr(hf_snapshot.Job.follow, "__defaults__", (0.0,))
    first = run_module(hf_snapshot.main, args)
    assert first["job"]["state"] == "running" and not first["changed"] and not first["complete"]
    second = run_module(hf_snapshot.main, args)
    while second.get("job", {}).get("state") == "running":
        time.sleep(0.05)
        second = run_module(hf_snapshot.main, {**args, "watch": second["job"]["watch"]})
    assert second["complete"] and len(units.started) == 1


@pytest.mark.parametrize("check", [True, False])
def test_a_folder_in_the_way_is_named(look: Look, tmp_path: Path, check: bool, units: LocalUnits) -> None:
    (tmp_path / "dest" / "config.json").mkdir(parents=True)
    found = look(check=check)["problems"][0]
    assert found["class"] == "dest_not_writable" and f"{tmp_path / 'dest' / 'config.json'} is a folder" in found["evidence"]
    assert units.started == []


@pytest.mark.parametrize("result", [{}, {"files": [], "before": "", "after": "", "resumed_bytes": 0}, {"files": {"a": {}}}])
def test_a_result_of_another_shape(look: Look, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]) -> None:
    monkeypatch.setattr(hf_snapshot.Job, "follow", lambda *_args: Status("done", {}, result))
    assert look()["problems"][0]["class"] == "job_result_damaged"


def test_a_destination_that_is_a_file(look: Look, tmp_path: Path) -> None:
    (tmp_path / "dest").write_text("x")
    assert look()["problems"][0]["class"] == "dest_not_writable"


# --- the hub ---------------------------------------------------------------------------------------------------------------------

TOKEN = "hf_geheimnis"


@pytest.fixture
def ask(look: Look, hub: Hub, tmp_path: Path) -> Look:
    """As look, from the hub."""

    def run(check: bool = False, **args: Any) -> dict[str, Any]:
        whole = {"source": "hub", "endpoint": hub.url, "client_python": sys.executable, "revision": commit_of(hub.root / "org/name")}
        return look(check=check, **{**whole, **args})

    fill(hub, "org/name", FILES)
    return run


def test_the_hub_check_run_check_run(ask: Look, hub: Hub, tmp_path: Path, units: LocalUnits) -> None:
    commit = commit_of(hub.root / "org/name")
    before = {p for p in tmp_path.rglob("*") if hub.root not in p.parents}
    would = ask(check=True, token=TOKEN)
    assert would["changed"] and not would["complete"] and would["missing"] == {"files": 3, "bytes": 50_004} and would["commit"] == commit
    assert {p for p in tmp_path.rglob("*") if hub.root not in p.parents} == before and units.started == []
    assert hub.requests[-1].authorised and hub.transfers() == []

    done = ask(token=TOKEN)
    assert done["changed"] and done["complete"] and (done["files"], done["bytes"], done["commit"]) == (3, 50_004, commit)
    assert done["diff"] == would["diff"] and "warnings" not in done
    manifest = tmp_path / "dest" / ".dgxspark-snapshot.json"
    assert done["manifest_sha256"] == hashlib.sha256(manifest.read_bytes()).hexdigest()

    hub.requests.clear()
    for check in (True, False):
        again = ask(check=check)
        assert not again["changed"] and again["complete"] and again["commit"] == commit and "job" not in again
        assert again["manifest_sha256"] == done["manifest_sha256"]
    assert len(units.started) == 1 and hub.requests == []


def test_the_token_is_in_its_file_alone(ask: Look, hub: Hub, tmp_path: Path) -> None:
    hub.faults.append(Fault("gated", path="resolve", token=TOKEN))
    refused = ask()
    assert refused["failed"] and refused["problems"][0]["class"] == "gated_no_token"
    result = ask(token="hf_wrong")
    assert result["problems"][0]["class"] == "gated_not_granted" and "hf_wrong" not in str(result)
    done = ask(token=TOKEN)
    assert done["complete"] and TOKEN not in str(done)
    holders = [p for p in tmp_path.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]
    assert [p.parent.name for p in holders] == ["secrets"] and oct(holders[0].stat().st_mode)[-3:] == "600"
    (tmp_path / "dest" / "config.json").unlink()
    ask()  # without a token its file goes
    assert list((tmp_path / "state" / "secrets").iterdir()) == []


def test_a_branch_is_warned_about(ask: Look, hub: Hub, tmp_path: Path) -> None:
    commit = commit_of(hub.root / "org/name")
    for check in (True, False, True, False):
        result = ask(check=check, revision="main")
        assert result["revision"] == "main" and result["commit"] == commit and "'main'" in str(result["warnings"][0])
    fill(hub, "org/name", {"config.json": b'{"a": 2}'})
    assert not ask(revision="main")["changed"]


@pytest.mark.parametrize(
    ("args", "kinds"),
    [
        ({"client_python": ""}, {"no_client"}),
        (
            {"repo": "a b", "endpoint": "hub.example", "workers": 0, "revision": "0" * 64},
            {"bad_repo", "bad_source", "bad_workers", "bad_pin"},
        ),
        ({"sums_sha256": "0" * 64}, {"bad_pin"}),
        ({"manifest_sha256": "0" * 64}, {"bad_pin"}),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_what_is_wrong_is_known_without_a_job(ask: Look, units: LocalUnits, args: dict[str, Any], kinds: set[str], check: bool) -> None:
    result = ask(check=check, **args)
    assert result["failed"] and {p["class"] for p in result["problems"]} == kinds and units.started == []


def test_check_mode_without_a_client_or_a_hub(ask: Look, hub: Hub, tmp_path: Path) -> None:
    """A first run makes the client; until then nobody can be asked."""
    result = ask(check=True, client_python="", client_requirements="demo==1 --hash=sha256:00")
    assert result["changed"] and not result["complete"] and result["missing"] == {"files": None, "bytes": None}
    assert not (tmp_path / "state").exists() and hub.requests == []
    result = ask(check=True, endpoint="http://127.0.0.1:9")
    assert result["changed"] and "hub_unreachable" in result["msg"]
    result = ask(check=True, client_python="/none")  # an earlier task may make it, or only the first node has it
    assert result["changed"] and "client_unsuitable" in result["msg"]
    assert ask(client_python="/none")["problems"][0]["class"] == "client_unsuitable"
    assert ask(check=True, revision="0" * 40)["problems"][0]["class"] == "revision_not_found"


@pytest.mark.parametrize("kind", ["venv_unavailable", "client_package_missing", "package_index_unreachable", "client_not_installed"])
def test_check_mode_where_a_client_cannot_be_made(ask: Look, monkeypatch: pytest.MonkeyPatch, kind: str, units: LocalUnits) -> None:
    found = [{"class": kind, "evidence": "", "remedy": "", "severity": "error"}]
    monkeypatch.setattr(hf_snapshot.hub_venv, "foreseen", lambda *_args: found)
    would = ask(check=True)
    assert would["changed"] and kind in would["msg"]
    assert ask()["problems"][0]["class"] == kind and units.started == []


def test_space_is_looked_at_in_check_mode(ask: Look, look: Look, tmp_path: Path, units: LocalUnits) -> None:
    space = [{"path": str(tmp_path / "hybrid"), "bytes": 1 << 60, "what": "the hybrid"}]
    found = ask(check=True, space=space)["problems"][0]
    assert found["class"] == "disk_full" and "for the hybrid" in found["evidence"]
    assert units.started == []
    twice = [{"path": str(tmp_path / "hybrid"), "snapshots": 1e14, "what": "the hybrid"}]
    assert ask(space=twice)["problems"][0]["class"] == "disk_full" and len(units.started) == 1
    assert look(space=twice)["problems"][0]["class"] == "disk_full" and len(units.started) == 1  # a folder's sizes are known at once


def test_a_stall_limit_of_the_job_gives_the_inner_one_its_chance() -> None:
    for source, limit, patience in (("hub", 300, 1200), ("hub", 0, 0), ("/folder", 300, 300), ("http://h", 7, 7)):
        assert hf_snapshot._patience({"source": source, "stall_timeout_s": limit}) == patience


def test_settings_that_do_not_matter_to_the_files_do_not_bring_them_again(ask: Look, units: LocalUnits) -> None:
    ask()
    for args in (
        {"workers": 9},
        {"xet": "off"},
        {"token": TOKEN},
        {"stall_timeout_s": 5},
        {"client_python": "/none"},
        {"endpoint": "http://h"},
    ):
        assert not ask(**args)["changed"], args
    assert ask(ignore_patterns=["config.json"])["changed"] and len(units.started) == 2


def test_another_nodes_snapshot(ask: Look, look: Look, hub: Hub, tmp_path: Path) -> None:
    first = ask(dest=str(tmp_path / "first"))
    with Server(tmp_path / "first") as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        args = {"source": running.url, "source_token": "geheim", "manifest_sha256": first["manifest_sha256"], "revision": first["commit"]}
        would = look(check=True, **args)
        assert would["changed"] and would["missing"]["files"] == 3 and would["commit"] == first["commit"]
        done = look(**args)
        running.shutdown()
    assert done["complete"] and done["manifest_sha256"] == first["manifest_sha256"] and done["commit"] == first["commit"]
    names = [tmp_path / place / ".dgxspark-snapshot.json" for place in ("first", "dest")]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert not ask(check=True)["changed"] and not look(**args)["changed"]  # either way of asking
