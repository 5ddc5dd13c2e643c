# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import hashlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import share
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure
from ansible_collections.dgxspark.vllm.plugins.module_utils.sources import Interrupted, UrlSource, read_list
from ansible_collections.dgxspark.vllm.plugins.modules import hf_snapshot, snapshot_share
from finished_snapshot import MANIFEST, finished
from local_units import LocalUnits

BIG = random.Random(3).randbytes(3_000_000)
FILES = {"config.json": b"{}", "model-00001-of-00001.safetensors": BIG, "empty": b"", "sub/x 1.json": b"[1]"}
Share = Callable[..., dict[str, Any]]


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalUnits]:
    made = LocalUnits()
    monkeypatch.setattr(snapshot_share, "Systemd", lambda: made)
    yield made
    made.kill()


@pytest.fixture
def sha256(tmp_path: Path) -> str:
    return finished(tmp_path / "snapshot", FILES)


@pytest.fixture
def shared(tmp_path: Path, run_module: Share, units: LocalUnits, sha256: str) -> Share:
    def run(check: bool = False, **args: Any) -> dict[str, Any]:
        whole = {"path": str(tmp_path / "snapshot"), "address": "127.0.0.1", "state_dir": str(tmp_path / "state"), **args}
        return run_module(snapshot_share.main, whole, check=check)

    return run


def alive(result: dict[str, Any]) -> bool:
    return share.answers(result)


def test_starts_is_joined_and_ends(shared: Share, tmp_path: Path, units: LocalUnits, sha256: str) -> None:
    first = shared()
    assert (first["changed"], first["running"], first["manifest_sha256"]) == (False, True, sha256)
    assert (first["files"], first["bytes"]) == (4, sum(map(len, FILES.values())))
    assert first["url"] == f"http://127.0.0.1:{first['port']}"
    assert alive(first)
    again = shared()
    assert {k: again[k] for k in ("url", "token", "port")} == {k: first[k] for k in ("url", "token", "port")}
    assert len(units.started) == 1
    state = next((tmp_path / "state/jobs").glob("share-*/share.json"))
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700
    assert first["token"] not in (state.parent / "log").read_text() + (state.parent / "spec.json").read_text()
    ended = shared(state="absent")
    assert (ended["changed"], ended["running"]) == (False, False)
    assert not alive(first)
    assert not state.exists()
    assert shared(state="absent")["running"] is False
    other = shared()
    assert other["token"] != first["token"]


def test_check_mode_starts_and_ends_nothing(shared: Share, tmp_path: Path, units: LocalUnits, sha256: str) -> None:
    would = shared(check=True)
    assert (would["running"], would["manifest_sha256"], units.started) == (False, sha256, [])
    assert "url" not in would
    assert not (tmp_path / "state").exists()
    real = shared()
    assert shared(check=True)["url"] == real["url"]
    assert shared(check=True, state="absent")["running"] is True
    assert alive(real)


def test_it_runs_for_every_name_that_wants_it(shared: Share, units: LocalUnits) -> None:
    real = shared(client="spark2")
    shared(client="spark3")
    shared(client="spark2")
    assert shared(client="spark2", state="absent")["running"] is True
    assert alive(real)
    assert shared(client="spark2", state="absent")["running"] is True
    assert shared(client="spark3", state="absent")["running"] is False
    assert not alive(real)
    shared(client="spark2")  # names of the server before are forgotten
    assert shared(client="spark2", state="absent")["running"] is False
    assert len(units.started) == 2


def test_two_that_want_it_at_the_same_moment_get_one(tmp_path: Path, units: LocalUnits, sha256: str) -> None:
    p = {"path": str(tmp_path / "snapshot"), "address": "127.0.0.1", "port": 0, "idle_s": 60, "state": "present"}
    p |= {"state_dir": str(tmp_path / "state")}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: snapshot_share.run({**p, "client": f"spark{n}"}, False), range(4)))
    assert len({f["token"] for f in found}) == 1
    assert len(units.started) == 1


def wait(condition: Callable[[], bool], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_it_ends_by_itself_and_starts_again(shared: Share, units: LocalUnits) -> None:
    first = shared(idle_s=1)
    assert wait(lambda: not units.active(units.started[0]))
    assert shared(check=True)["running"] is False
    second = shared(idle_s=60)
    assert alive(second)
    assert second["token"] != first["token"]


def test_after_a_kill_a_new_one_starts(shared: Share, units: LocalUnits) -> None:
    first = shared()
    units.kill()  # its state file stays
    assert shared(check=True)["running"] is False
    second = shared()
    assert second["token"] != first["token"]
    assert alive(second)


def test_a_server_that_hangs_is_replaced(shared: Share, units: LocalUnits, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shared()
    real = share.answers
    monkeypatch.setattr(share, "answers", lambda state: False)
    second = shared()
    assert second["token"] != first["token"]
    assert real(second)
    assert len(units.started) == 2


def test_another_port_and_another_revision_replace_it(shared: Share, tmp_path: Path, units: LocalUnits) -> None:
    first = shared()
    assert shared(port=first["port"])["token"] == first["token"]
    finished(tmp_path / "snapshot", FILES, revision="b" * 40)
    second = shared()
    assert second["manifest_sha256"] != first["manifest_sha256"]
    assert read_list(UrlSource(second["url"], second["token"]), MANIFEST) == (tmp_path / "snapshot" / MANIFEST).read_bytes()


def test_everything_wrong_is_said_at_once(shared: Share, tmp_path: Path, units: LocalUnits) -> None:
    (tmp_path / "snapshot/config.json").write_text("[ ]")
    (tmp_path / "snapshot/empty").unlink()
    result = shared(address="192.0.2.1")
    assert result["failed"]
    assert [p["class"] for p in result["problems"]] == ["bad_address", "snapshot_incomplete", "snapshot_incomplete"]
    assert all(p["evidence"] in result["msg"] and p["remedy"] in result["msg"] for p in result["problems"])
    assert units.started == []


@pytest.mark.parametrize("check", [True, False])
def test_no_snapshot(shared: Share, tmp_path: Path, check: bool) -> None:
    result = shared(path=str(tmp_path / "none"), check=check)
    assert [p["class"] for p in result["problems"]] == ["snapshot_incomplete"]
    assert str(tmp_path / "none") in result["msg"]


@pytest.mark.parametrize("args", [{"port": -1}, {"port": 65536}, {"idle_s": 0}, {"idle_s": -5}])
def test_figures_out_of_bounds(shared: Share, args: dict[str, int]) -> None:
    assert shared(**args)["failed"]


def test_a_port_of_another_program(shared: Share, tmp_path: Path, units: LocalUnits) -> None:
    port = shared(client="a")["port"]
    finished(tmp_path / "other", {"x": b"1"})
    result = shared(path=str(tmp_path / "other"), port=port)
    assert [p["class"] for p in result["problems"]] == ["port_taken"]


def test_no_systemd(shared: Share, units: LocalUnits) -> None:
    units.missing_problems = [{"class": "no_systemd", "evidence": "e", "remedy": "r", "severity": "error"}]
    assert [p["class"] for p in shared()["problems"]] == ["no_systemd"]


# --- reading from it -----------------------------------------------------------------------------------------------------------------


def pull(source: UrlSource, dest: Path, most: int = 1 << 40) -> int:
    """Bring every file, continuing what is there, up to `most` bytes in all; returns the bytes that came."""
    came = 0
    for name in source.names():
        path = dest / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            part = source.read(name, stream.tell())
            if stream.tell() == part.total:
                continue
            assert part.start == stream.tell()
            for chunk in part.chunks:
                stream.write(chunk)
                came += len(chunk)
                if came >= most:
                    return came
    return came


def test_a_snapshot_is_taken_and_taken_up_again(shared: Share, tmp_path: Path, units: LocalUnits, sha256: str) -> None:
    dest, first = tmp_path / "dest", shared()
    came = pull(UrlSource(first["url"], first["token"], pauses=()), dest, most=1_000_000)
    units.kill()
    with pytest.raises(Interrupted):
        pull(UrlSource(first["url"], first["token"], pauses=()), dest)
    second = shared()
    with pytest.raises((Interrupted, JobFailure)):
        pull(UrlSource(second["url"], first["token"], pauses=()), dest)
    source = UrlSource(second["url"], second["token"], pauses=())
    assert source.names() == sorted(FILES)
    assert {name: source.size(name) for name in FILES} == {name: len(data) for name, data in FILES.items()}
    assert came + pull(source, dest) == sum(map(len, FILES.values()))
    assert {name: (dest / name).read_bytes() for name in FILES} == FILES
    manifest = read_list(source, MANIFEST)
    assert manifest == (tmp_path / "snapshot" / MANIFEST).read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == second["manifest_sha256"] == sha256
    assert sorted(json.loads(manifest)["files"]) == source.names()


def test_hf_snapshot_takes_it(shared: Share, run_module: Share, tmp_path: Path, units: LocalUnits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder on the other node gets the same manifest, although the first node's index is not what it was any more."""
    index, source = "model.safetensors.index.json", tmp_path / "snapshot"
    sha256 = finished(source, FILES | {index: b'{"weight_map": {}}'})
    (source / ".dgxspark-pristine").mkdir()
    (source / index).rename(source / ".dgxspark-pristine" / index)
    (source / index).write_text('{"weight_map": {"mtp.fc.weight": "x.safetensors"}}')
    monkeypatch.setattr(hf_snapshot, "Systemd", lambda: units)
    told = shared()
    whole = {"repo": "org/name", "revision": "a" * 40, "source": told["url"], "dest": str(tmp_path / "dest")}
    whole |= {"manifest_sha256": told["manifest_sha256"], "state_dir": str(tmp_path / "other")}

    def take(token: str) -> dict[str, Any]:
        args = {**whole, "source_token": token}
        for _ in range(20):
            result = run_module(hf_snapshot.main, args)
            if result.get("job", {}).get("state") != "running":
                return result
            args["watch"] = result["job"]["watch"]
        raise AssertionError("never ended")

    refused = take("another-token")
    assert refused["failed"]
    assert "401" in refused["msg"]
    assert told["token"] not in json.dumps(refused)
    taken = take(told["token"])
    assert taken["complete"], taken
    assert taken["manifest_sha256"] == sha256
    assert (tmp_path / "dest" / MANIFEST).read_bytes() == (source / MANIFEST).read_bytes()
    assert (tmp_path / "dest" / index).read_bytes() == b'{"weight_map": {}}'


def test_two_nodes_take_it_at_the_same_time(shared: Share, tmp_path: Path) -> None:
    one, two = shared(client="spark2"), shared(client="spark3")
    readers = [
        threading.Thread(target=pull, args=(UrlSource(one["url"], one["token"]), tmp_path / "a")),
        threading.Thread(target=pull, args=(UrlSource(two["url"], two["token"]), tmp_path / "b")),
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(20)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() == FILES[name]


def test_stopped_by_systemd_in_a_transfer(shared: Share, tmp_path: Path, units: LocalUnits) -> None:
    first = shared()
    part = UrlSource(first["url"], first["token"]).read("model-00001-of-00001.safetensors")
    next(part.chunks)
    units.signal(units.started[0], signal.SIGTERM)
    assert wait(lambda: not units.active(units.started[0]))
    folder = next((tmp_path / "state/jobs").glob("share-*"))
    assert json.loads((folder / "result.json").read_text())["problems"][0]["class"] == "job_stopped"
    assert not (folder / "share.json").exists()
