# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The model hub as a source of files: processes of the hub's client (hub_client), their environment, and what they are told and tell.

with open_hub(spec) as source:  # lists the revision; spec: what hub_spec() makes of a module's parameters
    source.commit, source.names(), source.size(name), source.read(name, start, end)
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from . import hub_client, hub_venv
from .files import atomic_write
from .jobs import PASSED_ON, JobFailure
from .problems import problem
from .sources import RETRY_PAUSES_S, Interrupted, Part, Promise, Say, with_retries

# The client's text comes through its standard input, so that no file of it lies about.
BOOT = "import sys; s = sys.stdin.buffer; t = s.read(int(s.readline())); exec(compile(t, 'hub_client.py', 'exec'))"
HELLO_S = 120.0  # for a first import from a cold disk
LIST_S = 120.0
CHECK_S = 0.5
XET_BUFFER = "512mb"  # hf_xet takes up to 6 GB of buffers a process, of memory that a model may be using (unified memory)
TOKEN = "set token (role variable checkpoint_token) to an access token of an account that may read it"
REMEDIES = {
    "gated_no_token": f"ask for access on the repository's page, then {TOKEN}",
    "gated_not_granted": "ask for access on the repository's page with the token's account, and wait until it is granted; a fine-grained"
    " token also needs the right to read gated repositories",
    "not_authorised": f"the token is wrong, has ended, or lacks the right to read: {TOKEN}",
    "repo_not_found": f"check the name of the repository and the endpoint; if it is private, {TOKEN}",
    "revision_not_found": "check the revision: a commit of 40 hexadecimal digits, a branch or a tag of this very repository",
    "file_not_found": "the hub lists a file that it does not serve: try again later, or pin another commit",
    "rate_limited": f"wait, then run the same command again: it resumes; with a token the limits are higher: {TOKEN}",
    "hub_unreachable": "check the node's network, name service, proxy and clock, and the endpoint (checkpoint_endpoint); then run the same"
    " command again: it resumes. Without a way to the hub give a folder or mirror as the source (checkpoint_source)",
    "hub_error": "the hub, or a proxy before it, has a fault: wait, then run the same command again: it resumes",
    "hub_refused": "waiting does not change this answer: check the repository's name, the revision and the endpoint (checkpoint_endpoint);"
    " 451 means that the hub may not give the files out at this place. Else give a folder or mirror as the source (checkpoint_source)",
    "hub_answer_odd": "check the endpoint (checkpoint_endpoint) and the proxy: what answers there does not speak the hub's protocol",
    "proxy_auth": "give the proxy a name and password it accepts, in http_proxy and https_proxy of the node's environment"
    " (http://NAME:PASSWORD@HOST:PORT, odd characters percent-encoded), or name the hub's hosts in no_proxy",
    "lock_timeout": "another process holds the lock: wait until it has ended, then run the same command again",
    "disk_full": "free space on that file system, then run the same command again: it resumes",
    "xet_failed": "run it with xet: off (checkpoint_xet)",
    "client_unsuitable": "leave client_python (checkpoint_client_python) empty, or give one that has huggingface_hub 1.0 or later",
    "hub_client_died": "see the job's log and journalctl -k for an out-of-memory kill; then run the same command again: it resumes",
    "transfer_stalled": "check the network between the node and the hub (a proxy or firewall that swallows long transfers); then run the"
    " same command again: it resumes",
}
OTHERWISE = "see the job's log; run the same command again: it resumes"


def stalled(samples: Sequence[tuple[float, float]], window_s: float) -> bool:
    """Whether a transfer has stopped. samples: (seconds, bytes so far), in order; window_s: the longest allowed time without change.

    A transfer that is merely slow has not stopped; 0 or less allows any time.
    """
    if not samples or window_s <= 0:
        return False
    last_t, last = samples[-1]
    moved = last_t
    for t, done in reversed(samples):
        if done != last:
            break
        moved = t
    return last_t - moved >= window_s


# --- what a module passes on -----------------------------------------------------------------------------------------------------


def checked_secret(secret: str, where: str) -> str:
    """A token as it goes into a header: without space around it. JobFailure bad_token, which does not show it, when it cannot be one.

    A client that finds such a character itself says so with the whole header, in whatever quoting.
    """
    bare = secret.strip()
    if re.fullmatch(r"[!-~]*", bare):
        return bare
    what = "a blank or line break" if any(char.isspace() for char in bare) else "a character beyond printable ASCII"
    remedy = "give the token alone, as it was issued: no quotes, no 'Bearer', one line (role variable checkpoint_token)"
    raise JobFailure(problem("bad_token", f"{where} has {what} inside; it is not shown here", remedy))


def store_secret(state_dir: Path, name: str, secret: str) -> str:
    """Path of the file that keeps a secret, readable by root alone; '' and no file when there is none. JobFailure bad_token."""
    path = state_dir / "secrets" / name
    secret = checked_secret(secret, f"the token for {path}")
    if not secret:
        path.unlink(missing_ok=True)
        return ""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.parent.chmod(0o700)
    atomic_write(path, secret + "\n", mode=0o600)
    return str(path)


def read_secret(path: str) -> str:
    """What store_secret() stored; '' for no path."""
    if not path:
        return ""
    try:
        return checked_secret(Path(path).read_text(encoding="utf-8", errors="replace"), path)
    except OSError as error:
        remedy = "run the same command again: it writes the token anew"
        raise JobFailure(problem("token_unreadable", f"{path}: {error.strerror or error}", remedy)) from error


def secret_path(state_dir: Path, name: str, secret: str) -> str:
    """What store_secret() returns, without writing. JobFailure bad_token."""
    path = state_dir / "secrets" / name
    return str(path) if checked_secret(secret, f"the token for {path}") else ""


def hub_spec(p: dict[str, Any], repo: str, revision: str, token_path: str) -> dict[str, Any]:
    """What open_hub() needs, from a module's parameters: JSON, without secrets."""
    same = ("endpoint", "client_requirements", "client_python", "pip_args", "stall_timeout_s", "state_dir")
    xet = p.get("xet", "auto") not in {"off", False}
    return {name: p[name] for name in same} | {"repo": repo, "revision": revision, "token_path": token_path, "xet": xet}


def environment(state_dir: Path, endpoint: str, token_path: str, xet: bool) -> dict[str, str]:
    """All of the client's environment, given when it starts: a switch that is set later has no effect (HF_HUB_DISABLE_XET).

    Nothing of it is anyone's home folder, and no HF_ variable of this process is passed on.
    """
    cache = state_dir / "cache" / "huggingface"
    told = {name: value for name in PASSED_ON if not name.startswith("DOCKER") and (value := os.environ.get(name))}
    told |= {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(cache),
        "LC_ALL": "C.UTF-8",
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_XET_CACHE": str(cache / "xet"),
        "HF_TOKEN_PATH": token_path or str(cache / "no-token"),
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_XET_TELEMETRY_ENABLED": "0",
        "HF_XET_CHUNK_CACHE_SIZE_BYTES": "0",  # else the model is on the disk twice
        "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE": XET_BUFFER,
        "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_PERFILE_SIZE": XET_BUFFER,
        "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT": XET_BUFFER,
    }
    if endpoint:
        told["HF_ENDPOINT"] = endpoint.rstrip("/")
    if not xet:
        told["HF_HUB_DISABLE_XET"] = "1"
    return told


# --- one process of the client ---------------------------------------------------------------------------------------------------


def _client_text() -> bytes:
    """hub_client.py, also out of a worker's zip."""
    loader: Any = hub_client.__spec__.loader if hub_client.__spec__ else None
    return str(loader.get_source(hub_client.__name__)).encode()


class Stalled(Exception):
    """No byte for too long."""


class Ended(Exception):
    """The process is gone."""


class HubClient:
    """A running client. One request at a time; `read` leaves its chunks to be taken before the next one.

    busy: somebody has it; only Hub changes that, under its lock. answering: the answer that it gives has not ended; only who has it
    changes that.
    """

    def __init__(self, python: Path, env: dict[str, str], token: str, say: Say, pass_fds: Sequence[int] = ()) -> None:
        self._token, self._say = token, say
        self.xet = "HF_HUB_DISABLE_XET" not in env
        self.busy = True
        self.answering = False
        self._io = threading.Lock()  # kill() may come from another thread: its number of a closed pipe may be another file's by then
        self._closed = False
        self._tail: deque[str] = deque(maxlen=3)
        self._process = subprocess.Popen(
            [str(python), "-I", "-B", "-u", "-c", BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            cwd="/",
            start_new_session=True,  # a group of its own, which can be killed as a whole
            pass_fds=pass_fds,
        )
        assert self._process.stdout
        self._fd = self._process.stdout.fileno()
        with suppress(OSError, AttributeError):  # an unprivileged user may have used up what is allowed
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, 1 << 20)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._buffer = bytearray()
        threading.Thread(target=self._follow, daemon=True).start()

    def hello(self) -> dict[str, Any]:
        """Give it its text; what it is, or {error}. Once, before anything else."""
        text = _client_text()
        self._write(f"{len(text)}\n".encode() + text)
        return self.ask({"do": "hello"}, HELLO_S)

    @property
    def alive(self) -> bool:
        """Whether it can be given a request."""
        return self._process.poll() is None

    def kill(self) -> None:
        """The whole process group, at once."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._io:  # who waits for bytes sees the end of the pipe, and lets go
            self._closed = True
            for stream in (self._process.stdin, self._process.stdout):
                if stream:
                    with suppress(OSError):
                        stream.close()

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer's `ok`; or the answer itself, with `error`."""
        self.answering = True
        self._write(json.dumps(request).encode() + b"\n")
        answer = self._line(limit_s)
        self.answering = False
        return answer if "error" in answer else dict(answer["ok"])

    def begin(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Start a read: {part} or {error}."""
        self.answering = True
        self._write(json.dumps(request).encode() + b"\n")
        answer = self._line(limit_s)
        if "error" in answer:
            self.answering = False
        return answer

    def chunks(self, limit_s: float) -> Iterator[bytes | dict[str, Any]]:
        """The bytes of a read that has begun; last its {error}, if it ended with one."""
        while True:
            answer = self._line(limit_s)
            if "bytes" not in answer:
                self.answering = False
                if "error" in answer:
                    yield answer
                return
            left = int(answer["bytes"])
            while left:
                if not self._buffer:
                    self._fill(limit_s)
                piece = bytes(self._buffer[:left])
                del self._buffer[: len(piece)]
                left -= len(piece)
                yield piece

    def _write(self, data: bytes) -> None:
        assert self._process.stdin
        try:
            view = memoryview(data)
            while view:
                with self._io:
                    view = view[self._process.stdin.write(view) or 0 :]
        except (BrokenPipeError, ValueError) as error:
            raise self._ended() from error

    def _line(self, limit_s: float) -> dict[str, Any]:
        while (at := self._buffer.find(b"\n")) < 0:
            self._fill(limit_s)
        line = bytes(self._buffer[:at])
        del self._buffer[: at + 1]
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer

    def _fill(self, limit_s: float) -> None:
        """At least one more byte."""
        samples = [(time.monotonic(), 0.0)]
        while (data := self._received(CHECK_S if limit_s <= 0 else min(CHECK_S, limit_s / 4))) is None:
            samples[1:] = [(time.monotonic(), 0.0)]
            if stalled(samples, limit_s):
                raise Stalled
        if not data:
            raise self._ended()
        self._buffer += data

    def _received(self, wait_s: float) -> bytes | None:
        """Bytes that have come, b"" at their end, None when none came for so long."""
        with self._io:
            if self._closed:
                return b""
            return os.read(self._fd, 1 << 20) if self._poll.poll(wait_s * 1000) else None

    def _ended(self) -> Ended:
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(2)
        time.sleep(0.05)  # for the last lines of its standard error
        said = f": {' / '.join(self._tail)}" if self._tail else ""
        return Ended(f"the hub's client ended (exit {status}){said}")

    def _follow(self) -> None:
        """What it and its libraries say goes to the log, without the token."""
        assert self._process.stderr
        for raw in self._process.stderr:
            if line := hub_client.without(self._token, raw.decode(errors="replace").rstrip()):
                self._tail.append(line[:200])
                self._say(line)
        self._process.stderr.close()


# --- the hub ---------------------------------------------------------------------------------------------------------------------


class Hub:
    """As many clients as are needed at the same time, and what has been learned of the way to the hub."""

    def __init__(self, python: Path, spec: dict[str, Any], say: Say, token: str = "") -> None:
        self._python, self._spec, self._say = python, spec, say
        token = checked_secret(token, "the token")
        self._token = token or read_secret(spec["token_path"])
        self._xet = bool(spec["xet"])
        self.limit_s = float(spec["stall_timeout_s"])
        self.notes: list[str] = []
        self._stalls = 0
        self._lock = threading.RLock()  # of chunks that are given up the garbage collector may give the client back, anywhere
        self._clients: dict[HubClient, int] = {}  # and how many stalls there had been when it was started
        self._open = True
        self._memory = -1
        if token:  # nothing is written to the disk: in check mode
            self._memory = os.memfd_create("hub-token", os.MFD_CLOEXEC)
            os.write(self._memory, token.encode())

    def take(self) -> HubClient:
        """A client that is free now; started when there is none."""
        with self._lock:
            for client in [c for c in list(self._clients) if not c.busy]:
                if client.alive and client.xet == self._xet:
                    client.busy = True
                    return client
                self._drop(client)
            if not self._open:
                raise Interrupted("the hub was closed")
            stalls, client = self._stalls, self._started()
        try:
            hello = client.hello()
        except (Stalled, Ended) as error:
            client.kill()
            text = str(error) or f"the hub's client said nothing for {HELLO_S:g} s"
            raise Interrupted(text, kind="hub_client_died", remedy=REMEDIES["hub_client_died"]) from error
        if "error" in hello:
            client.kill()
            raise self.failed("the hub's client", hello["error"])
        with self._lock:
            if not self._open:
                client.kill()
                raise Interrupted("the hub was closed")
            self._clients[client] = stalls
        return client

    def _started(self) -> HubClient:
        """A new process; the lock is held, as it may get the token's file in memory, which close() closes."""
        path = f"/proc/self/fd/{self._memory}" if self._memory >= 0 else self._spec["token_path"]
        env = environment(Path(self._spec["state_dir"]), self._spec["endpoint"], path, self._xet)
        try:
            return HubClient(self._python, env, self._token, self._hear, (self._memory,) if self._memory >= 0 else ())
        except OSError as error:
            evidence = f"{self._python} cannot be started: {error.strerror or error}"
            raise JobFailure(problem("client_unsuitable", evidence, REMEDIES["client_unsuitable"])) from error

    def give(self, client: HubClient) -> None:
        """Back, for the next one; one that is in the middle of an answer is of no use any more."""
        with self._lock:
            if client.answering or not client.alive:
                self._drop(client)
            client.busy = False  # the last thing: from here on another thread may have it

    def _drop(self, client: HubClient) -> None:
        self._clients.pop(client, None)
        client.kill()

    def close(self) -> None:
        """End all clients."""
        with self._lock:
            self._open = False
            for client in list(self._clients):
                self._drop(client)
            if self._memory >= 0:
                os.close(self._memory)
                self._memory = -1

    def list(self, repo: str, revision: str) -> tuple[str, dict[str, Promise]]:
        """The commit of a revision, and its files."""
        client = self.take()
        try:
            answer = client.ask({"do": "list", "repo": repo, "revision": revision}, LIST_S)
        except (Stalled, Ended) as error:
            text = str(error) or f"{repo}@{revision}: no answer for {LIST_S:g} s"
            raise Interrupted(text, kind="hub_unreachable", remedy=REMEDIES["hub_unreachable"]) from error
        finally:
            self.give(client)
        if "error" in answer:
            raise self.failed(f"{repo}@{revision}", answer["error"])
        files = {name: Promise(f["size"], f["sha256"].lower(), f["git"].lower()) for name, f in answer["files"].items()}
        return str(answer["commit"]), files

    def failed(self, what: str, fault: dict[str, Any]) -> Interrupted | JobFailure:
        """What to raise for a client's error."""
        kind, text = str(fault["class"]), hub_client.without(self._token, f"{what}: {fault['evidence']}")
        remedy = REMEDIES.get(kind, OTHERWISE)
        if kind == "xet_failed":
            self._without_xet(text)
        if fault["retryable"]:
            return Interrupted(text, float(fault["after_s"]), kind, remedy)
        return JobFailure(problem(kind, text, remedy))

    def stopped(self, client: HubClient, what: str) -> Interrupted | JobFailure:
        """What to raise when no byte came for too long. The first time the transfer goes on with a new process and without Xet."""
        with self._lock:
            again = self._clients.get(client, 0) > 0
            self._stalls += 1
        text = f"{what}: no new byte for {self.limit_s:g} s"
        if again:
            evidence = f"{text}, also with a new client and without Xet"
            return JobFailure(problem("transfer_stalled", evidence, REMEDIES["transfer_stalled"]))
        self._without_xet(f"{text}; its client was stopped")
        return Interrupted(text, kind="transfer_stalled", remedy=REMEDIES["transfer_stalled"])

    def _without_xet(self, why: str) -> None:
        with self._lock:
            first, self._xet = self._xet, False
        if first:
            note = f"{why}. The rest was brought without Xet"
            self.notes.append(note)
            self._say(note)

    def _hear(self, line: str) -> None:
        print(f"hub client: {line}", flush=True)


class HubSource:
    """One commit of one repository. The clients end with close(), or with the `with` block."""

    pauses: tuple[int, ...] = RETRY_PAUSES_S

    def __init__(
        self,
        client: Hub,
        repo: str,
        commit: str,
        files: dict[str, Promise] | None = None,
        pauses: tuple[int, ...] = RETRY_PAUSES_S,
    ) -> None:
        self._hub, self._repo, self.commit, self.pauses = client, repo, commit, pauses
        self._files = files
        self._at_close = ExitStack()
        self._at_close.callback(client.close)

    @property
    def files(self) -> dict[str, Promise]:
        """What the hub lists."""
        if self._files is None:
            self._files = self._hub.list(self._repo, self.commit)[1]
        return self._files

    @property
    def notes(self) -> list[str]:
        """What went otherwise than meant, for a person."""
        return self._hub.notes

    def names(self) -> list[str]:
        """All files of the commit."""
        return sorted(self.files)

    def size(self, name: str) -> int | None:
        """As listed."""
        if name not in self.files:
            raise JobFailure(problem("file_not_found", f"{self._what(name)} is not a file of this commit", REMEDIES["revision_not_found"]))
        return self.files[name].size

    def read(self, name: str, start: int = 0, end: int | None = None) -> Part:
        """From the hub's content servers or from Xet storage."""
        size = self.size(name)
        if end is not None and end <= start:
            return Part(start, size, iter(()), end)
        client = self._hub.take()
        # Only an LFS object can be in Xet storage: for any other file nothing need be asked first.
        xet = client.xet and bool(self.files[name].sha256)
        request = {
            "do": "read",
            "repo": self._repo,
            "commit": self.commit,
            "name": name,
            "start": start,
            "end": end,
            "xet": xet,
            "most": size,
        }
        try:
            answer = client.begin(request, self._hub.limit_s)
        except (Stalled, Ended) as error:
            failure = self._lost(client, name, error)
            self._hub.give(client)
            raise failure from error
        if "error" in answer:
            self._hub.give(client)
            raise self._hub.failed(self._what(name), answer["error"])
        part = answer["part"]
        chunks = _Chunks(self, client, name)
        return Part(int(part["start"]), size if part["total"] is None else int(part["total"]), chunks, part["end"])

    def close(self) -> None:
        """End the clients."""
        self._at_close.close()

    def __enter__(self) -> HubSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _what(self, name: str) -> str:
        return f"{self._repo}@{self.commit[:12]} {name}"

    def _lost(self, client: HubClient, name: str, error: Exception) -> Interrupted | JobFailure:
        if isinstance(error, Stalled):
            return self._hub.stopped(client, self._what(name))
        return Interrupted(f"{self._what(name)}: {error}", kind="hub_client_died", remedy=REMEDIES["hub_client_died"])

    def _next(self, client: HubClient, name: str, chunks: Iterator[bytes | dict[str, Any]]) -> bytes:
        """One chunk; StopIteration at the end."""
        try:
            chunk = next(chunks)
        except (Stalled, Ended) as error:
            raise self._lost(client, name, error) from error
        if isinstance(chunk, dict):
            raise self._hub.failed(self._what(name), chunk["error"])
        return chunk


class _Chunks:
    """The bytes of one answer. The client is given back at the end, or when nobody wants the rest."""

    def __init__(self, source: HubSource, client: HubClient, name: str) -> None:
        self._source, self._client, self._name = source, client, name
        self._chunks = client.chunks(source._hub.limit_s)
        self._done = False

    def __iter__(self) -> _Chunks:
        return self

    def __next__(self) -> bytes:
        if self._done:
            raise StopIteration
        try:
            return self._source._next(self._client, self._name, self._chunks)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if not self._done:
            self._done = True
            self._source._hub.give(self._client)

    def __del__(self) -> None:
        self.close()


def open_hub(
    spec: dict[str, Any],
    say: Say = lambda line: print(line, flush=True),
    *,
    patient: bool = True,
    make: bool = True,
    token: str = "",
    commit: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> HubSource:
    """The files of a revision, listed. spec: of hub_spec().

    patient: try again what may pass; make: make the client's environment when it is not there; token: instead of the file's, kept in
    memory only; commit: what the revision was resolved to before.
    """
    state_dir = Path(spec["state_dir"])
    if found := hub_venv.foreseen(state_dir, spec["client_requirements"], spec["client_python"]):
        raise JobFailure(*found)
    python = Path(spec["client_python"]) if spec["client_python"] else hub_venv.ready(state_dir, spec["client_requirements"])
    if python is None and not make:
        remedy = "run it without check mode: it makes the client"
        raise JobFailure(problem("client_missing", "the hub's client is not on this node yet", remedy))
    if python is None:
        say("making the hub's client")
        python = hub_venv.make(state_dir, spec["client_requirements"], spec["pip_args"], say)
    if make:
        (state_dir / "cache" / "huggingface").mkdir(parents=True, exist_ok=True, mode=0o700)
    hub = Hub(python, spec, say, token)
    use = ExitStack()
    try:
        use.enter_context(hub_venv.in_use(python))
        pauses = RETRY_PAUSES_S if patient else ()
        revision = commit or spec["revision"]
        resolved, files = with_retries(lambda: hub.list(spec["repo"], revision), pauses, say, sleep)
    except BaseException:
        hub.close()
        use.close()
        raise
    source = HubSource(hub, spec["repo"], resolved, files, pauses)
    source._at_close.callback(use.close)
    return source
