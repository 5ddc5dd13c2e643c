# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import jobs
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import Job, JobFailure, Progress, decide, digest, rate_and_eta, stalled
from ansible_collections.dgxspark.vllm.plugins.module_utils.problems import problem
from local_units import LocalUnits

# A worker that does what its spec says; it takes the place of a module_utils file in the zip.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from PACKAGE.jobs import JobFailure, work_on
from PACKAGE.problems import problem

def work(spec, progress):
    progress.stage("work", spec.get("steps", 1), "steps")
    for step in range(spec.get("steps", 1)):
        print("line", step, flush=True)
        progress.at(step + 1)
        time.sleep(spec.get("pause", 0))
    if spec.get("environment"):
        return {"environment": {name: os.environ.get(name) for name in spec["environment"]}}
    if spec.get("raise") == "failure":
        raise JobFailure(problem("disk_full", "0 bytes free", "free some"))
    if spec.get("raise") == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if spec.get("raise") == "bug":
        raise KeyError("oops")
    return {"made": spec["name"]}

def main():
    return work_on(Path(sys.argv[1]), work)
"""


@pytest.fixture
def units() -> Iterator[LocalUnits]:
    made = LocalUnits()
    yield made
    made.kill()


@pytest.fixture
def job(tmp_path: Path, units: LocalUnits, monkeypatch: pytest.MonkeyPatch) -> Job:
    real = jobs.write_worker_zip

    def with_test_worker(path: Path, entry: str) -> None:
        real(path, entry)
        with zipfile.ZipFile(path, "a") as target:
            target.writestr(f"{jobs.PACKAGE.replace('.', '/')}/probe.py", WORKER.replace("PACKAGE", jobs.PACKAGE))

    monkeypatch.setattr(jobs, "write_worker_zip", with_test_worker)
    return Job(tmp_path, "probe-1", "probe", "a test", units)


def begun(job: Job, spec: dict[str, Any], watch: str) -> jobs.Status:
    """The job once its worker is at work."""
    for _ in range(200):
        status = job.follow(spec, watch, 0, block_s=0.1)
        if status.state != "running" or status.progress.get("stage") == "work":
            return status
    raise AssertionError("never began")


def wait(job: Job, spec: dict[str, Any], watch: str, stall: float = 0) -> jobs.Status:
    for _ in range(200):
        status = job.follow(spec, watch, stall, block_s=0.2)
        if status.state != "running":
            return status
    raise AssertionError("never ended")


@pytest.mark.parametrize(
    ("active", "same", "outcome", "mine", "replaced", "stalled_", "step"),
    [
        # running
        (True, True, None, False, False, False, "attach"),
        (True, True, None, True, False, False, "attach"),
        (True, False, None, False, False, False, "replace"),
        (True, True, None, True, False, True, "stalled"),
        (True, True, None, False, False, True, "restart"),  # a stall from before this watch: start it anew
        (True, False, None, False, True, False, "replaced"),  # no fight of two controllers
        # ended during this watch
        (False, True, "done", True, False, False, "done"),
        (False, True, "failed", True, False, False, "failed"),
        (False, True, None, True, False, True, "lost"),
        # ended before it: what it left is for the caller to judge
        (False, True, "done", False, False, False, "start"),
        (False, True, "failed", False, False, False, "start"),
        (False, True, None, False, False, False, "start"),
        (False, False, "done", False, False, False, "start"),
        (False, False, "done", True, False, False, "start"),
        (False, False, None, False, True, False, "replaced"),
    ],
)
def test_decide(active: bool, same: bool, outcome: str | None, mine: bool, replaced: bool, stalled_: bool, step: str) -> None:
    assert decide(active=active, same=same, outcome=outcome, mine=mine, replaced=replaced, stalled=stalled_) == step


@pytest.mark.parametrize(
    ("samples", "window", "expected"),
    [
        # a transfer that freezes for ever, and one that is only slow
        ([(0, 65e6), (60, 65e6), (600, 65e6), (1500, 65e6)], 600, True),
        ([(0, 0), (60, 1e6), (120, 2e6)], 100, False),
        ([(0, 0), (60, 1e6), (120, 2e6), (130, 2e6)], 100, False),
        ([(0, 0), (60, 1e6), (161, 1e6)], 100, True),
        ([(0, 0), (1000, 0)], 0, False),  # 0: no limit
        ([(0, 5), (90, 0), (180, 5)], 100, False),  # a restarted file moves too
    ],
)
def test_stall_by_samples(tmp_path: Path, samples: list[tuple[float, float]], window: float, expected: bool) -> None:
    now = [0.0]
    progress = Progress(tmp_path / "progress.json", clock=lambda: now[0], every_s=0)
    progress.stage("copy", 1e9, "B")
    for moment, amount in samples:
        now[0] = moment
        progress.at(amount)
    assert stalled(json.loads((tmp_path / "progress.json").read_text()), 0.0, now[0], window) is expected


def test_a_worker_that_never_said_anything_stalls_too() -> None:
    assert stalled({}, started=100.0, now=401.0, limit_s=300)
    assert not stalled({}, started=100.0, now=399.0, limit_s=300)


@pytest.mark.parametrize(
    ("progress", "now", "expected"),
    [
        ({}, 10, (None, None)),
        ({"since": [0, 0], "done": 0, "total": 10}, 10, (None, None)),
        ({"since": [0, 0], "done": 50, "total": 100}, 10, (5.0, 10.0)),
        ({"since": [0, 0], "done": 50, "total": None}, 10, (5.0, None)),
        ({"since": [0, 40], "done": 50, "total": 100}, 10, (1.0, 50.0)),
        ({"since": [9.5, 0], "done": 50, "total": 100}, 10, (None, None)),
        ({"since": [0, 0], "done": 120, "total": 100}, 10, (12.0, 0.0)),
    ],
)
def test_rate_and_eta(progress: dict[str, Any], now: float, expected: tuple[float | None, float | None]) -> None:
    assert rate_and_eta({"unit": "B", **progress}, now) == expected
    assert rate_and_eta({"unit": "steps", **progress}, now) == (None, None)


def test_progress_is_never_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    progress = Progress(path, every_s=0)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            progress.at(number, message="x" * (number % 4000))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            json.loads(path.read_text())
    finally:
        stop.set()
        writer.join()


def test_a_short_job_is_one_call(job: Job, units: LocalUnits) -> None:
    spec = {"name": "a"}
    assert not job.following(spec, "w1")
    status = job.follow(spec, "w1", 0)
    assert (status.state, status.result) == ("done", {"made": "a"})
    assert units.started == ["dgxspark-vllm-job-probe-1.service"]
    # the same watch hears it again, another watch has to judge for itself
    assert job.following(spec, "w1") and not job.following(spec, "w2")


def test_joined_never_started_twice(job: Job, units: LocalUnits) -> None:
    spec = {"name": "a", "steps": 8, "pause": 0.1}
    assert begun(job, spec, "w1").state == "running"
    assert job.following(spec, "w2")
    first = job.follow(spec, "w2", 0, block_s=0.2)
    assert (first.state, first.progress["stage"], first.progress["unit"]) == ("running", "work", "steps")
    assert wait(job, spec, "w2").state == "done"
    assert wait(job, spec, "w1").state == "done"
    assert len(units.started) == 1


def test_two_controllers_at_one_moment(job: Job, units: LocalUnits) -> None:
    spec = {"name": "a", "steps": 3, "pause": 0.1}
    stop = units.stop
    units.stop = lambda unit: (time.sleep(0.2), stop(unit))  # type: ignore[assignment]  # all of them are about to start it
    with ThreadPoolExecutor(4) as pool:
        looks = [pool.submit(job.follow, spec, f"w{n}", 0, 0.3) for n in range(4)]
    assert all(look.result().state in {"running", "done"} for look in looks)
    assert len(units.started) == 1


def test_another_spec_replaces_and_the_old_watch_is_told(job: Job, units: LocalUnits) -> None:
    old, new = {"name": "a", "steps": 100, "pause": 0.1}, {"name": "b"}
    begun(job, old, "w1")
    assert wait(job, new, "w2").result == {"made": "b"}
    told = job.follow(old, "w1", 0)
    assert (told.state, told.problems[0]["class"]) == ("failed", "job_replaced")
    assert len(units.started) == 2


def test_a_failure_is_reported_in_its_watch_and_tried_again_in_the_next(job: Job, units: LocalUnits) -> None:
    spec = {"name": "a", "raise": "failure"}
    status = wait(job, spec, "w1")
    assert (status.state, status.problems[0]["class"]) == ("failed", "disk_full")
    assert "disk_full: 0 bytes free" in status.log_tail
    assert job.follow(spec, "w1", 0).state == "failed" and len(units.started) == 1
    assert wait(job, spec, "w2").state == "failed" and len(units.started) == 2
    with pytest.raises(JobFailure) as failure:
        status.wire("w1")
    assert "last lines of the log" in failure.value.message("it failed")


@pytest.mark.parametrize("how", ["kill", "power cut"])
def test_a_vanished_worker_is_lost_once_then_started_again(job: Job, units: LocalUnits, how: str) -> None:
    spec = {"name": "a", "steps": 20, "pause": 0.05, **({"raise": "kill", "steps": 1} if how == "kill" else {})}
    status = begun(job, spec, "w1") if how == "power cut" else wait(job, spec, "w1")
    if how == "power cut":
        units.kill()
        status = job.follow(spec, "w1", 0)
    assert (status.state, status.problems[0]["class"]) == ("failed", "job_lost")
    assert "stage 'work'" in status.problems[0]["evidence"] and "line 0" in status.log_tail
    assert job.follow(spec, "w1", 0).state == "failed" and len(units.started) == 1
    if how == "power cut":
        assert wait(job, spec, "w2").state == "done" and len(units.started) == 2


def test_a_stop_by_hand_says_so(job: Job, units: LocalUnits) -> None:
    spec = {"name": "a", "steps": 100, "pause": 0.1}
    begun(job, spec, "w1")
    units.stop(job.unit)
    assert job.follow(spec, "w1", 0).problems[0]["class"] == "job_stopped"


def test_a_stall_stops_the_job(job: Job, units: LocalUnits) -> None:
    spec = {"name": "a", "steps": 2, "pause": 60}
    begun(job, spec, "w1")
    status = wait(job, spec, "w1", 0.5)
    assert status.problems[0]["class"] == "job_stalled" and "1 of 2 steps" in status.problems[0]["evidence"]
    assert not units.active(job.unit)
    assert job.follow(spec, "w1", 0.5).problems[0]["class"] == "job_stalled"


def test_a_stall_of_an_unwatched_job_is_started_again(job: Job, units: LocalUnits) -> None:
    spec = {"name": "a", "steps": 2, "pause": 60}
    begun(job, spec, "w1")
    time.sleep(0.5)
    job.follow(spec, "w2", 0.5, block_s=0)
    assert len(units.started) == 2


def test_a_fault_of_the_worker_is_a_normal_error(job: Job) -> None:
    status = wait(job, {"name": "a", "raise": "bug"}, "w1")
    assert status.problems[0]["class"] == "internal_error" and "KeyError" in status.problems[0]["evidence"]


def test_no_systemd_is_an_error_and_nothing_starts(job: Job, units: LocalUnits) -> None:
    units.missing_problems = [problem("no_systemd", "none", "use one")]
    with pytest.raises(JobFailure, match="no_systemd"):
        job.follow({"name": "a"}, "w1", 0)
    assert units.started == []


PROXY = "http://user:s3cret@proxy:3128"
ODD_VALUES = [PROXY, "a b", "a\"b'c", "a\\b\\", "$HOME ${HOME} %h %%", "#x;y", "a\nb=c", "`id`", " lead and trail ", "\u00e9", "\udcff"]


@pytest.mark.parametrize("value", ODD_VALUES)
def test_the_proxy_comes_to_the_worker_as_it_is(job: Job, units: LocalUnits, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("https_proxy", value)
    monkeypatch.delenv("http_proxy", raising=False)
    modes: list[str] = []
    start = units.start

    def bare(unit: str, description: str, argv: list[str], log: Path) -> None:
        """As systemd does: with nothing of this process's environment."""
        modes.append(oct((job.folder / jobs.ENVIRONMENT).stat().st_mode)[-3:])
        assert value not in str(argv) + description
        with monkeypatch.context() as patch:
            for name in jobs.PASSED_ON:
                patch.delenv(name, raising=False)
            start(unit, description, argv, log)

    monkeypatch.setattr(units, "start", bare)
    status = wait(job, {"name": "a", "environment": ["https_proxy", "http_proxy"]}, "w1")
    assert status.result == {"environment": {"https_proxy": value, "http_proxy": None}}
    assert modes == ["600"] and not (job.folder / jobs.ENVIRONMENT).exists()


@pytest.mark.parametrize("name", jobs.PASSED_ON)
def test_no_command_has_a_proxys_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Neither its arguments, which everyone on the node can read, nor so the unit's properties."""
    commands: list[tuple[str, ...]] = []

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        commands.append(argv)
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setenv(name, PROXY)
    monkeypatch.setattr(jobs.Systemd, "_run", staticmethod(run))
    jobs.Systemd().start("a.service", "a", ["/bin/true"], tmp_path / "log")
    assert commands and "s3cret" not in str(commands) and name not in str(commands) and "--setenv=HOME=/root" in commands[0]


@pytest.mark.parametrize("text", ["", "[]", '{"https_proxy": 5, "PATH": "/evil"}', "{"])
def test_a_damaged_environment_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.delenv("https_proxy", raising=False)
    before = dict(os.environ)
    (tmp_path / jobs.ENVIRONMENT).write_text(text)
    jobs._take_over(tmp_path)
    assert dict(os.environ) == before


def test_systemd_missing_names_every_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.shutil, "which", lambda _name: None)
    monkeypatch.setattr(jobs.os, "geteuid", lambda: 1000)
    assert [p["class"] for p in jobs.Systemd().missing()] == ["no_systemd", "not_root"]


def test_half_written_state_is_not_trusted(job: Job, units: LocalUnits) -> None:
    job.folder.mkdir(parents=True)
    for name in ("attempt.json", "result.json", "progress.json"):
        (job.folder / name).write_text('{"spec": "')
    assert wait(job, {"name": "a"}, "w1").state == "done"


ODD = ["[]", "5", '"x"', "null", "true", "9" * 5000, "[" * 100_000]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[(name, text) for name in ("attempt.json", "result.json", "progress.json") for text in ODD],
        ("attempt.json", '{"spec": 5, "watches": "w1", "replaced": 7, "started": "x"}'),
        ("attempt.json", '{"spec": "SPEC", "watches": [["w1"]]}'),
        ("attempt.json", '{"spec": "SPEC", "started": null}'),
        ("attempt.json", '{"spec": "SPEC"}'),
        ("result.json", '{"spec": "SPEC", "state": ["done"]}'),
        ("result.json", '{"spec": "SPEC", "state": {"done": 1}}'),
        ("result.json", '{"spec": "SPEC", "state": "failed", "problems": ["x"]}'),
        ("result.json", '{"spec": "SPEC", "state": "failed", "problems": [{"class": "x"}]}'),
        ("result.json", '{"spec": "SPEC", "state": "done", "result": [1]}'),
        ("progress.json", '{"since": 5}'),
        ("progress.json", '{"since": ["a", "b"], "done": 5, "unit": "B"}'),
        ("progress.json", '{"done": "many", "total": [], "moved": null}'),
        ("progress.json", '{"moved": NaN, "done": Infinity}'),
    ],
)
def test_json_of_another_shape_is_no_state(tmp_path: Path, units: LocalUnits, name: str, text: str) -> None:
    """Neither before the first start nor in the middle of a watch."""
    spec = {"name": "a"}
    job = Job(tmp_path, "probe-1", "probe", "a test", units)
    job.folder.mkdir(parents=True)
    (job.folder / "attempt.json").write_text(json.dumps({"spec": digest(spec), "watches": ["w1"], "started": 0}))
    (job.folder / name).write_text(text.replace("SPEC", digest(spec)))
    assert isinstance(job.following(spec, "w1"), bool)
    for step in ("attach", "failed", "replaced", "lost"):
        status = job._status(step, 60)
        assert rate_and_eta(status.progress, 10) == (None, None) and all(p["remedy"] for p in status.problems)
    assert not stalled(job._progress(), 0, 1, 60)


def run_worker(folder: Path, work: Any) -> int:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return jobs.work_on(folder, work)
    finally:
        signal.signal(signal.SIGTERM, handler)


def full_disk(*_args: Any, **_named: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def at_work(tmp_path: Path, units: LocalUnits) -> Job:
    """A job's folder as its worker finds it."""
    job = Job(tmp_path, "probe-1", "probe", "a test", units)
    job.folder.mkdir(parents=True)
    (job.folder / "spec.json").write_text('{"name": "a"}')
    (job.folder / "attempt.json").write_text(json.dumps({"spec": digest({"name": "a"}), "watches": ["w1"], "started": 0}))
    return job


@pytest.mark.parametrize("fails", [True, False])
def test_a_full_disk_leaves_room_for_the_result(at_work: Job, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    def work(_spec: Any, _progress: Any) -> dict[str, Any]:
        assert (at_work.folder / jobs.ROOM).stat().st_blocks * 512 >= jobs.ROOM_BYTES
        monkeypatch.setattr(jobs, "write_json", full_disk)  # from here on no file can be made
        if fails:
            raise JobFailure(problem("source_damaged", "x", "y"))
        return {"made": "a"}

    assert run_worker(at_work.folder, work) == int(fails)
    status = at_work.follow({"name": "a"}, "w1", 0)
    assert (status.result, [p["class"] for p in status.problems]) == (({}, ["source_damaged"]) if fails else ({"made": "a"}, []))
    assert (at_work.folder / "result.json").stat().st_mode & 0o777 == 0o600 and not (at_work.folder / jobs.ROOM).exists()


def test_a_result_larger_than_its_room(at_work: Job) -> None:
    assert run_worker(at_work.folder, lambda _spec, _progress: {"made": "x" * 100_000}) == 0
    assert at_work.follow({"name": "a"}, "w1", 0).result == {"made": "x" * 100_000}
    assert not (at_work.folder / jobs.ROOM).exists()


@pytest.mark.parametrize(
    ("number", "fails", "classes"),
    [
        (errno.ENOSPC, True, ["source_damaged", "disk_full"]),
        (errno.EDQUOT, False, ["disk_full"]),
        (errno.EROFS, False, ["result_not_written"]),
    ],
)
def test_a_result_that_cannot_be_written_is_in_the_log(
    at_work: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, fails: bool, classes: list[str]
) -> None:
    def work(_spec: Any, _progress: Any) -> dict[str, Any]:
        if fails:
            raise JobFailure(problem("source_damaged", "x", "y"))
        return {"made": "a"}

    def broken(*_args: Any, **_named: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(jobs, "_hold_room", lambda _folder: None)
    monkeypatch.setattr(jobs, "write_json", broken)
    assert run_worker(at_work.folder, work) == 1
    (at_work.folder / "log").write_text("half a line" + capsys.readouterr().out)
    status = at_work.follow({"name": "a"}, "w1", 0)
    assert [p["class"] for p in status.problems] == classes and "half a line" in status.log_tail[0]
    assert not any(jobs.RESULT_MARK in line for line in status.log_tail)
    assert jobs.logged_result(at_work.folder / "log", "another spec") == []


@pytest.mark.parametrize("text", ["", "5", "{", "[]", '{"spec": "S", "problems": "x"}', "[" * 60_000])
def test_a_damaged_mark_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(jobs.RESULT_MARK + text + "\n")
    assert jobs.logged_result(tmp_path / "log", "S") == []


def test_a_log_on_a_full_disk_does_not_hide_the_result(at_work: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.print", full_disk)
    assert run_worker(at_work.folder, lambda _spec, _progress: {}["bug"]) == 1
    assert at_work.follow({"name": "a"}, "w1", 0).problems[0]["class"] == "internal_error"


def test_lost_on_a_full_disk_is_told_as_that(at_work: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "LITTLE_BYTES", 1 << 62)
    assert at_work.follow({"name": "a"}, "w1", 0).problems[0]["class"] == "disk_full"


def test_old_result_of_another_spec_is_not_taken_for_this_one(job: Job, units: LocalUnits) -> None:
    wait(job, {"name": "a"}, "w1")
    assert wait(job, {"name": "b"}, "w1").result == {"made": "b"}


def test_cut_between_noting_an_attempt_and_starting_it(job: Job, units: LocalUnits) -> None:
    """The result of the attempt before is still there; it says nothing about this one."""
    wait(job, {"name": "a"}, "w1")
    attempt = json.loads((job.folder / "attempt.json").read_text())
    (job.folder / "attempt.json").write_text(json.dumps({**attempt, "spec": digest({"name": "b"})}))
    assert job.follow({"name": "b"}, "w1", 0).problems[0]["class"] == "job_lost"
    assert wait(job, {"name": "b"}, "w2").result == {"made": "b"}


def test_the_zip_runs_alone_and_holds_only_the_collections_code(tmp_path: Path) -> None:
    jobs.write_worker_zip(tmp_path / "worker.zip", "snapshot")
    names = zipfile.ZipFile(tmp_path / "worker.zip").namelist()
    assert {n.split("/")[0] for n in names} == {"__main__.py", "ansible_collections"}
    ran = subprocess.run([sys.executable, "-I", tmp_path / "worker.zip", tmp_path], capture_output=True, text=True, check=False, cwd="/")
    assert "spec.json" in ran.stderr and "ImportError" not in ran.stderr


def test_the_zip_is_made_from_ansibles_own(tmp_path: Path) -> None:
    """Run as a module does: from a zip with a sitecustomize.py, which must not come along."""
    jobs.write_worker_zip(tmp_path / "first.zip", "snapshot")
    with zipfile.ZipFile(tmp_path / "first.zip", "a") as target:
        target.writestr("sitecustomize.py", "import sys; sys.path.insert(0, '/tmp/gone.zip')")
        target.writestr("ansible/module_utils/basic.py", "")
    code = f"from {jobs.PACKAGE}.jobs import write_worker_zip; from pathlib import Path; write_worker_zip(Path('second.zip'), 'snapshot')"
    subprocess.run([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(tmp_path / "first.zip")}, cwd=tmp_path, check=True)
    names = zipfile.ZipFile(tmp_path / "second.zip").namelist()
    assert "sitecustomize.py" not in names and "ansible/module_utils/basic.py" not in names
    assert f"{jobs.PACKAGE.replace('.', '/')}/snapshot.py" in names and "ansible_collections/__init__.py" in names


def test_log_tail_is_readable(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\x1b[31mred\x1b[0m\r\n10%\r20%\rend\n\n\xff last")
    assert jobs.log_tail(tmp_path / "log") == ["red", "end", "� last"]
    assert jobs.log_tail(tmp_path / "none") == []


def test_digest_ignores_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})
