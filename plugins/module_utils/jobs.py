# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Long work on the node: a transient systemd unit that outlives the connection, and what a module may say about it.

A job is a folder: spec.json (what to do), attempt.json (who watches), worker.zip (the code), progress.json (replaced atomically),
log, result.json.room (disk space held for the result), and result.json, which is written last. environment.json is there from the
start until the worker has read it. The unit runs the worker from the zip, because the module's own code is deleted as soon as the module
returns.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
import zipfile
import zipimport
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from .files import atomic_write, fsync_dir, read_json, write_json
from .problems import Problem, describe, problem

PACKAGE = __name__.rpartition(".")[0]
UNIT_PREFIX = "dgxspark-vllm-job-"
BLOCK_S = 4.0  # the longest that one module call waits
RATE_WINDOW_S = 30.0
TAIL_LINES = 25
ROOM = "result.json.room"  # disk space that a running job holds, so that a full disk cannot keep it from saying how it ended
ROOM_BYTES = 64 << 10
ENVIRONMENT = "environment.json"
RESULT_MARK = "dgxspark-vllm-job-result: "  # the log line that takes the result's place when it cannot be written
LITTLE_BYTES = 1 << 20

State = Literal["idle", "running", "done", "failed"]
Step = Literal["attach", "start", "replace", "restart", "done", "failed", "lost", "stalled", "replaced"]


class JobFailure(Exception):
    """Work that cannot go on, with everything that a person needs to know about it."""

    def __init__(self, *problems: Problem, log_tail: Sequence[str] = ()) -> None:
        super().__init__("; ".join(f"{p['class']}: {p['evidence']}" for p in problems))
        self.problems = list(problems)
        self.log_tail = list(log_tail)

    def message(self, headline: str) -> str:
        """All of it for a person."""
        text = describe(self.problems, headline)
        return text if not self.log_tail else "\n  ".join([f"{text}\nlast lines of the log:", *self.log_tail])


def digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON: equal values, equal digests."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def short(text: str) -> str:
    """Ten digits that name something in a file or unit name."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


# --- reading what a job left --------------------------------------------------------------------------------------------------------

Fits = Callable[[Any], bool]


def read_object(path: Path, fields: Mapping[str, Fits]) -> dict[str, Any]:
    """The object in a JSON file; {} when there is none, or when a field that it has is not of its kind. Fields may be missing."""
    try:
        value = read_json(path)
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets without end
        return {}
    return value if fitting(value, fields) else {}


def fitting(value: Any, fields: Mapping[str, Fits]) -> bool:
    """Whether a value is an object whose fields, as far as it has them, are of their kinds."""
    return isinstance(value, dict) and all(fits(value[name]) for name, fits in fields.items() if name in value)


def is_text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def is_number(value: Any) -> bool:
    """A finite number; JSON's true is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_text, value))


def _is_sample(value: Any) -> bool:
    return value is None or (isinstance(value, list) and len(value) == 2 and all(map(is_number, value)))


def _is_problems(value: Any) -> bool:
    names = ("class", "evidence", "remedy", "severity")
    return isinstance(value, list) and all(isinstance(p, dict) and all(is_text(p.get(name)) for name in names) for p in value)


ATTEMPT: dict[str, Fits] = {"spec": is_text, "watches": _is_texts, "replaced": _is_texts, "started": is_number}
PROGRESS: dict[str, Fits] = {
    **dict.fromkeys(("stage", "unit", "message"), is_text),
    **dict.fromkeys(("done", "moved"), is_number),
    "total": lambda value: value is None or is_number(value),
    "since": _is_sample,
}
RESULT: dict[str, Fits] = {"spec": is_text, "state": is_text, "problems": _is_problems, "result": lambda value: isinstance(value, dict)}


def decide(*, active: bool, same: bool, outcome: str | None, mine: bool, replaced: bool, stalled: bool) -> Step:
    """What a call does about a job.

    active: the unit runs; same: it was given the same spec; outcome: done, failed or None as its result says; mine: this watch has seen
    or started this attempt; replaced: this watch's attempt was stopped by a run with another spec; stalled: no progress for too long.
    """
    if replaced:
        return "replaced"
    if active:
        if not same:
            return "replace"
        if stalled:
            return "stalled" if mine else "restart"
        return "attach"
    if not (mine and same):
        return "start"
    if outcome == "done":
        return "done"
    return "failed" if outcome == "failed" else "lost"


# --- units -----------------------------------------------------------------------------------------------------------------------


class Units(Protocol):
    """What runs jobs: systemd, or something like it in a test."""

    def missing(self) -> list[Problem]:
        """Why no job can be started here."""

    def active(self, unit: str) -> bool:
        """Whether the unit runs, starts or stops at this moment."""

    def start(self, unit: str, description: str, argv: list[str], log: Path) -> None:
        """Start it; its output is appended to log. JobFailure when that fails."""

    def stop(self, unit: str) -> None:
        """Stop it with all its processes and wait until it is gone."""


# A unit has a bare environment; a download must go through the same proxy as the shell's would. A proxy's address may have a password:
# the worker gets them by a file for root alone, as everyone can read a command's arguments and a unit's properties.
PASSED_ON = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "DOCKER_HOST", "DOCKER_CONFIG")


class Systemd:
    """Transient units of the system's systemd."""

    def missing(self) -> list[Problem]:
        """No systemd (a plain container), or no right to use it."""
        found = []
        if not (Path("/run/systemd/system").is_dir() and shutil.which("systemd-run") and shutil.which("systemctl")):
            found.append(
                problem(
                    "no_systemd",
                    "this node was not booted with systemd (/run/systemd/system or systemd-run is missing)",
                    "long work runs as transient systemd units: use a node, virtual machine or container that boots systemd",
                )
            )
        if os.geteuid() != 0:
            found.append(problem("not_root", f"the module runs as user id {os.geteuid()}", "set become: true for this task or play"))
        return found

    def active(self, unit: str) -> bool:
        """ActiveState, as --collect removes units that ended."""
        shown = self._run("systemctl", "show", "--property=ActiveState", "--value", unit)
        return shown.stdout.strip() in {"active", "activating", "deactivating", "reloading"}

    def start(self, unit: str, description: str, argv: list[str], log: Path) -> None:
        """--collect: a failed unit must not block its name. Type=exec: a worker that cannot be executed is an error here and now."""
        command = ["systemd-run", "--quiet", "--collect", f"--unit={unit}", f"--description={description}", "--working-directory=/"]
        command += [f"--property={p}" for p in ("Type=exec", "KillMode=control-group", "TimeoutStopSec=20", "OOMPolicy=continue")]
        command += [f"--property=StandardOutput=append:{log}", f"--property=StandardError=append:{log}"]
        command += ["--setenv=HOME=/root", "--setenv=LC_ALL=C.UTF-8"]
        done = self._run(*command, "--", *(a.replace("$", "$$") for a in argv))
        if done.returncode != 0:
            raise JobFailure(
                problem(
                    "unit_not_started",
                    f"systemd-run --unit={unit} exit {done.returncode}: {(done.stderr or done.stdout).strip()}",
                    f"see 'systemctl status {unit}' and 'journalctl -u {unit}' on the node",
                )
            )

    def stop(self, unit: str) -> None:
        """A unit that is not there is stopped."""
        self._run("systemctl", "stop", unit)
        self._run("systemctl", "reset-failed", unit)

    @staticmethod
    def _run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


# --- the worker's side -----------------------------------------------------------------------------------------------------------


class Progress:
    """What the worker says about its way; readers get an old or a new file, never half of one.

    Times are of the system-wide monotonic clock, which a corrected wall clock does not move. No fsync: a lost progress file costs
    nothing, and a wait for a busy disk would.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, every_s: float = 0.5) -> None:
        self._path, self._clock, self._every = path, clock, every_s
        self._samples: deque[tuple[float, float]] = deque()
        self._written = -1e9
        self._now: dict[str, Any] = {"stage": "start", "done": 0, "total": None, "unit": "", "message": "", "moved": clock()}
        self._write(force=True)

    def stage(self, name: str, total: float | None = None, unit: str = "", message: str = "") -> None:
        """Begin a stage. total: how much of unit it has to do, None when not known."""
        now = self._clock()
        self._samples.clear()
        self._samples.append((now, 0))
        self._now = {"stage": name, "done": 0, "total": total, "unit": unit, "message": message, "moved": now}
        self._write(force=True)

    def at(self, done: float, total: float | None = None, message: str | None = None) -> None:
        """How much of the stage is done by now; only a change of it counts as progress."""
        now = self._clock()
        if done != self._now["done"]:
            self._now["moved"] = now
        self._now["done"] = done
        if total is not None:
            self._now["total"] = total
        if message is not None:
            self._now["message"] = message
        if not self._samples or now - self._samples[-1][0] >= self._every:
            self._samples.append((now, done))
        while len(self._samples) > 1 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        self._write(force=self._now["unit"] != "B" and self._now["moved"] == now)  # bytes come by the thousand, steps do not

    def mark(self) -> None:
        """The rate counts from here: what came before went at another pace."""
        self._samples.clear()

    def add(self, amount: float) -> None:
        """More of the stage is done."""
        self.at(self._now["done"] + amount)

    def alive(self, message: str | None = None) -> None:
        """Work that has no figure moved (a line of a build's log)."""
        self._now["moved"] = self._clock()
        if message is not None:
            self._now["message"] = message
        self._write()

    def _write(self, force: bool = False) -> None:
        now = self._clock()
        if not force and now - self._written < self._every:
            return
        self._written = now
        since = list(self._samples[0]) if self._samples else None
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            temporary.write_text(json.dumps({**self._now, "since": since, "updated": time.time()}))
            temporary.rename(self._path)
        except OSError as error:  # a full disk must not hide the work's own error
            _say(f"progress not written: {error}")


def _say(line: str) -> None:
    """A line of the log; the log's own disk may be the full one."""
    with suppress(OSError):
        print(line, flush=True)


def _hold_room(job_folder: Path) -> None:
    """Take the disk space of the result now. Random bytes: a file system that compresses must hold them, too."""
    try:
        descriptor = os.open(job_folder / ROOM, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(os.urandom(ROOM_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        _say(f"no room held for the result: {error}")


def _write_result(job_folder: Path, result: dict[str, Any]) -> bool:
    """result.json, in the room that was held for it, or else as any file; when neither works, a line of the log."""
    path, room = job_folder / "result.json", job_folder / ROOM
    raw = json.dumps(result, indent=1, sort_keys=True).encode() + b"\n"
    if len(raw) <= ROOM_BYTES:
        with suppress(OSError):
            with room.open("r+b") as stream:  # over bytes that the file has: no new space is needed
                stream.write(raw)
                stream.flush()
                stream.truncate(len(raw))
                os.fsync(stream.fileno())
            room.rename(path)
            fsync_dir(job_folder)
            return True
    try:
        room.unlink(missing_ok=True)
        write_json(path, result, mode=0o600)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        told = {name: result[name] for name in ("spec", "state", "problems")}
        told["problems"] = [
            *told["problems"],
            problem(
                "disk_full" if full else "result_not_written",
                f"{path}: {error.strerror or error}; the work itself ended as '{result['state']}'",
                _FREE if full else "make the job's folder writable, then run the same command again: it resumes",
            ),
        ]
        _say("\n" + RESULT_MARK + json.dumps(told))
        return False
    return True


_FREE = "free space on that file system, then run the same command again: it resumes"


class Stopped(BaseException):
    """SIGTERM: a person, a shutdown or a newer run stops the job."""


Work = Callable[[dict[str, Any], Progress], dict[str, Any]]


def _pass_on(job_folder: Path) -> None:
    """Leave PASSED_ON for the worker."""
    # JSON has a form for any string, also for bytes that are no text (surrogates).
    write_json(job_folder / ENVIRONMENT, {name: value for name in PASSED_ON if (value := os.environ.get(name))}, mode=0o600)


def _take_over(job_folder: Path) -> None:
    """What _pass_on() left becomes this process's environment; the file goes."""
    path = job_folder / ENVIRONMENT
    told = read_object(path, {})
    path.unlink(missing_ok=True)
    os.environ.update({name: told[name] for name in PASSED_ON if is_text(told.get(name))})


def work_on(job_folder: Path, work: Work) -> int:
    """The worker's frame: do the work, write the result last. Returns the exit status."""

    def on_term(_signal: int, _frame: FrameType | None) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, on_term)
    began = time.monotonic()
    spec = json.loads((job_folder / "spec.json").read_text())
    result: dict[str, Any] = {"spec": digest(spec), "state": "failed", "problems": []}
    _hold_room(job_folder)
    try:
        _take_over(job_folder)
        result["result"] = work(spec, Progress(job_folder / "progress.json"))
        result["state"] = "done"
    except JobFailure as failure:
        result["problems"] = failure.problems
    except Stopped:
        result["problems"] = [
            problem(
                "job_stopped", "the job got SIGTERM (a stop by hand, a shutdown or another run)", "run the same command again: it resumes"
            )
        ]
    except MemoryError:
        result["problems"] = [problem("out_of_memory", "the worker ran out of memory", "free memory on the node and run again: it resumes")]
    except Exception as error:
        _say(traceback.format_exc())
        remedy = "this is a fault of the collection: report it with the job's log"
        result["problems"] = [problem("internal_error", f"{type(error).__name__}: {error}", remedy)]
    for p in result["problems"]:
        _say(f"{p['class']}: {p['evidence']}")
    result["seconds"] = round(time.monotonic() - began, 3)
    written = _write_result(job_folder, result)
    return 0 if written and result["state"] == "done" else 1


def write_worker_zip(path: Path, entry: str) -> None:
    """An executable zip of this package's code that runs main() of one of its modules.

    Inside a module run the code is in Ansible's own zip, which dies with the module. Only the collection's code is taken: Ansible adds
    a sitecustomize.py that would put a folder of /tmp, gone by then and free for anyone to make, on root's import path.
    """
    loader = __spec__.loader if __spec__ else None
    code: dict[str, bytes] = {}
    if isinstance(loader, zipimport.zipimporter):
        with zipfile.ZipFile(loader.archive) as source:
            code = {
                name: source.read(name) for name in source.namelist() if name.startswith("ansible_collections/") and name.endswith(".py")
            }
    else:
        base = PACKAGE.replace(".", "/")
        code = {f"{base}/{file.name}": file.read_bytes() for file in Path(__file__).parent.glob("*.py")}
    parts = PACKAGE.split(".")
    for depth in range(1, len(parts) + 1):
        code.setdefault("/".join([*parts[:depth], "__init__.py"]), b"")
    code["__main__.py"] = f"import sys\nfrom {PACKAGE}.{entry} import main\nsys.exit(main())\n".encode()
    temporary = path.with_name(path.name + ".new")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as target:
        for name in sorted(code):
            target.writestr(zipfile.ZipInfo(name), code[name])
    temporary.rename(path)


# --- the module's side -----------------------------------------------------------------------------------------------------------


@dataclass
class Status:
    """What one call found."""

    state: State
    progress: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    log_tail: list[str] = field(default_factory=list)

    def wire(self, watch: str, now: float | None = None) -> dict[str, Any]:
        """The `job` value of a module's result. JobFailure when it failed."""
        if self.state == "failed":
            raise JobFailure(*self.problems, log_tail=self.log_tail)
        p = self.progress
        rate, eta = rate_and_eta(p, time.monotonic() if now is None else now)
        told = {name: p.get(name) for name in ("stage", "done", "total", "unit", "message")}
        return {"state": self.state, **told, "rate": rate, "eta_s": eta, "watch": watch}


def rate_and_eta(progress: dict[str, Any], now: float) -> tuple[float | None, float | None]:
    """Bytes per second over the last half minute, and seconds left; None while nothing can be said, as of steps, which differ in length."""
    since, done, total = progress.get("since"), progress.get("done"), progress.get("total")
    if progress.get("unit") != "B" or not since or done is None or now - since[0] < 1.0 or done <= since[1]:
        return None, None
    rate = (done - since[1]) / (now - since[0])
    return round(rate, 3), None if total is None else round(max(0.0, total - done) / rate, 1)


def where(progress: dict[str, Any]) -> str:
    """How far a job got, for an error's text."""
    amount = f"{progress.get('done', 0)} of {progress.get('total') or 'an unknown total'} {progress.get('unit', '')}".rstrip()
    return f"stage '{progress.get('stage', 'start')}', {amount}"


def stalled(progress: dict[str, Any], started: float, now: float, limit_s: float) -> bool:
    """Whether nothing has moved for longer than the limit (0: no limit)."""
    return limit_s > 0 and now - max(started, progress.get("moved", started)) > limit_s


def plain(line: str) -> str:
    """A line as a terminal would show it: without colours, and what was written last where a carriage return overwrote it."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).rstrip().rsplit("\r", 1)[-1]


def log_tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, without terminal escapes and carriage returns."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 65536))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in map(plain, text.split("\n")) if line.strip()][-lines:]


def logged_result(log: Path, spec: str) -> list[Problem]:
    """The problems of a job that could not write its result, as its log tells; [] when it tells none of this spec."""
    for line in log_tail(log):
        if line.startswith(RESULT_MARK):
            with suppress(ValueError, RecursionError):
                told = json.loads(line.removeprefix(RESULT_MARK))
                if fitting(told, RESULT) and told.get("spec") == spec:
                    return list(told.get("problems", []))
    return []


class Job:
    """One named job of this node: start it, join it, read it."""

    def __init__(self, state_dir: Path, name: str, entry: str, description: str, units: Units) -> None:
        self.folder = state_dir / "jobs" / name
        self.unit = f"{UNIT_PREFIX}{name}.service"
        self._entry, self._description, self._units = entry, description, units

    def damaged_result(self) -> JobFailure:
        """The failure of a job that is done, with a result that its worker did not write like this."""
        evidence = f"the result of {self.unit} in {self.folder / 'result.json'} is not what its worker writes"
        return JobFailure(problem("job_result_damaged", evidence, "delete that file, then run the same command again"))

    def following(self, spec: dict[str, Any], watch: str) -> bool:
        """Whether this watch has to do with a running or just ended attempt, so that there is nothing to decide first."""
        return self._step(digest(spec), watch, 0)[0] in {"attach", "done", "failed", "lost", "stalled", "replaced"}

    def running(self) -> bool:
        """Whether an attempt, of whatever spec, runs at this moment."""
        return self._units.active(self.unit)

    def follow(self, spec: dict[str, Any], watch: str, stall_timeout_s: float, block_s: float = BLOCK_S) -> Status:
        """Start the job or join it, wait a moment, and say how it stands. watch: a name for one task's whole watch."""
        until = time.monotonic() + block_s
        with self._lock():
            step, attempt = self._step(digest(spec), watch, stall_timeout_s)
            if step in {"start", "replace", "restart"}:
                gone = [*attempt.get("replaced", []), *attempt.get("watches", [])] if step == "replace" else []
                self._start(spec, watch, [w for w in gone if w != watch])
            elif step == "attach" and watch not in attempt.get("watches", []):
                self._note_attempt({**attempt, "watches": [*attempt.get("watches", []), watch]})
        while True:
            step, _ = self._step(digest(spec), watch, stall_timeout_s)
            if step != "attach" or time.monotonic() >= until:
                return self._status(step, stall_timeout_s)
            self._pause(min(until, time.monotonic() + 0.5))

    def _pause(self, until: float) -> None:
        """Until a result is there, looking at files only: asking systemd costs ten times more."""
        while time.monotonic() < until and not (self.folder / "result.json").exists():
            time.sleep(0.05)

    def _step(self, wanted: str, watch: str, stall_timeout_s: float) -> tuple[Step, dict[str, Any]]:
        active = self._units.active(self.unit)  # asked first: a result is complete before its unit ends
        attempt = read_object(self.folder / "attempt.json", ATTEMPT)
        result = self._result()
        ended = result.get("spec") == attempt.get("spec") and result.get("state") in {"done", "failed"}
        step = decide(
            active=active and not ended,
            same=attempt.get("spec") == wanted,
            outcome=result.get("state") if ended else None,
            mine=watch in attempt.get("watches", []),
            replaced=watch in attempt.get("replaced", []),
            stalled=stalled(self._progress(), attempt.get("started", 0.0), time.monotonic(), stall_timeout_s),
        )
        return step, attempt

    def _progress(self) -> dict[str, Any]:
        return read_object(self.folder / "progress.json", PROGRESS)

    def _result(self) -> dict[str, Any]:
        return read_object(self.folder / "result.json", RESULT)

    def _note_attempt(self, attempt: dict[str, Any]) -> None:
        write_json(self.folder / "attempt.json", attempt, mode=0o600)

    def _start(self, spec: dict[str, Any], watch: str, replaced: list[str]) -> None:
        if found := self._units.missing():
            raise JobFailure(*found)
        self._units.stop(self.unit)
        # Noted before the old result goes, so that a watch of the old attempt never takes it for lost.
        self._note_attempt({"spec": digest(spec), "watches": [watch], "replaced": replaced, "started": time.monotonic()})
        for name in ("result.json", "progress.json"):
            (self.folder / name).unlink(missing_ok=True)
        log = self.folder / "log"
        if log.exists():
            log.rename(self.folder / "log.previous")
        write_json(self.folder / "spec.json", spec, mode=0o600)
        _pass_on(self.folder)
        write_worker_zip(self.folder / "worker.zip", self._entry)
        atomic_write(log, b"", mode=0o600)
        argv = [sys.executable, "-I", "-B", "-u", str(self.folder / "worker.zip"), str(self.folder)]
        self._units.start(self.unit, self._description, argv, log)

    def _status(self, step: Step, stall_timeout_s: float) -> Status:
        progress = self._progress()
        tail = [line for line in log_tail(self.folder / "log") if not line.startswith(RESULT_MARK)]
        if step == "attach":
            return Status("running", progress)
        result = self._result()
        if step == "done":
            return Status("done", progress, result.get("result") or {})
        stage, log = where(progress), f"log: {self.folder / 'log'}"
        if step == "failed":
            problems = result.get("problems") or [problem("job_failed", f"{self.unit} failed at {stage}; {log}", "see the log")]
        elif step == "stalled":
            self._units.stop(self.unit)
            problems = [
                problem(
                    "job_stalled",
                    f"no progress for {stall_timeout_s:g} s at {stage}; {self.unit} was stopped; {log}",
                    "see the log's last lines; run the same command again to resume, with a longer stall timeout if the work is just slow",
                )
            ]
            wanted = digest(read_json(self.folder / "spec.json"))
            (self.folder / ROOM).unlink(missing_ok=True)
            write_json(self.folder / "result.json", {"spec": wanted, "state": "failed", "problems": problems}, mode=0o600)
        elif step == "replaced":
            evidence = f"another run started {self.unit} with other settings and stopped the one watched here"
            problems = [problem("job_replaced", evidence, "run one controller at a time for a node, then run this again")]
        elif said := logged_result(self.folder / "log", str(read_object(self.folder / "attempt.json", ATTEMPT).get("spec"))):
            problems = said
        elif (free := shutil.disk_usage(self.folder).free) < LITTLE_BYTES:
            evidence = f"{self.unit} ended without a result at {stage}; the file system of {self.folder} has {free} bytes free"
            problems = [problem("disk_full", evidence, _FREE)]
        else:  # lost, or another run changed it between two looks
            problems = [
                problem(
                    "job_lost",
                    f"{self.unit} ended without a result at {stage} (killed, or the node restarted); {log}",
                    "run the same command again: it resumes. If it repeats, look for an out-of-memory kill: journalctl -k | grep -i oom",
                )
            ]
        return Status("failed", progress, {}, problems, tail)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Two controllers at the same moment start one job, not two."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        with (self.folder / "lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def new_watch() -> str:
    """A name for a watch whose caller gave none: each call is then a watch of its own."""
    return uuid.uuid4().hex
