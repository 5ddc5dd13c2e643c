# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The virtual environment that the hub's client runs in: made once on the node, from a list of packages that are pinned by hash.

It lies in tools/hub-client-<digest> below the state folder. An environment cannot be moved, so it is made in its final place, and a
marker that is written last says that it is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .files import atomic_write
from .jobs import JobFailure, plain
from .problems import Problem, problem

PREFIX = "hub-client-"
MARKER = ".complete"
LOCK = ".hub-client.lock"
OFFLINE = (
    "a node without a package index needs pip_args (role variable checkpoint_pip_args), such as --no-index --find-links FOLDER with the"
    " wheels, or client_python (checkpoint_client_python), a Python that has huggingface_hub"
)
# What pip says, and what it means. The first that matches counts.
PIP: tuple[tuple[str, str, str], ...] = (
    ("disk_full", r"No space left on device|Disk quota exceeded", "free space on that file system, then run the same command again"),
    (
        "client_hash_mismatch",
        r"DO NOT MATCH THE HASHES|Hashes are required|hash(es)? mismatch",
        "a mirror that changes packages cannot be used: give pip_args that point to the unchanged ones",
    ),
    (
        "package_index_untrusted",
        r"not a trusted or secure host",
        "give the index by an https address, or, if its network is yours alone, let pip take it as it is: pip_args --trusted-host HOST"
        " (checkpoint_pip_args); the packages are checked by their hashes either way",
    ),
    (
        "package_index_refused",
        r"\b40[137] (Client )?Error|HTTP error 40[137]\b|\b407 Proxy|Proxy Authentication Required",
        "the package index, or the proxy before it, wants a name and password: give them in pip.conf or netrc on the node, or for the proxy"
        f" in http_proxy and https_proxy; {OFFLINE}",
    ),
    (
        "package_index_unreachable",
        r"Temporary failure in name resolution|Name or service not known|Failed to establish a new connection|Connection refused"
        r"|Network is unreachable|No route to host|Read ?timed? ?out|Connection (timed out|reset)|ProxyError|SSLError|CERTIFICATE_VERIFY",
        f"connect the node to a package index, or set its proxy; {OFFLINE}",
    ),
    ("client_package_missing", r"No matching distribution found|Could not find a version|is not a supported wheel", OFFLINE),
)


def folder(state_dir: Path, requirements: str) -> Path:
    """Of these packages and this release of Python: an environment of another one does not run."""
    text = f"{sys.version_info.major}.{sys.version_info.minor}\n{requirements}"
    return state_dir / "tools" / f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def ready(state_dir: Path, requirements: str) -> Path | None:
    """The environment's Python, if it was made to the end."""
    made = folder(state_dir, requirements)
    python = made / "bin" / "python"
    return python if (made / MARKER).is_file() and os.access(python, os.X_OK) else None


def foreseen(state_dir: Path, requirements: str, client_python: str) -> list[Problem]:
    """Why there will be no client, as far as that is known before a job starts."""
    if client_python:
        if os.access(client_python, os.X_OK) and not os.path.isdir(client_python):
            return []
        remedy = "give a Python of the node that has huggingface_hub, or leave client_python empty (checkpoint_client_python)"
        return [problem("client_unsuitable", f"client_python {client_python} is not a program of this node", remedy)]
    if not requirements.strip():
        remedy = "give client_requirements, the packages of the hub's client with their hashes, or client_python"
        return [problem("no_client", "neither client_requirements nor client_python is given", remedy)]
    if ready(state_dir, requirements) is None and not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        return [_no_venv(f"{sys.executable} has no module venv or ensurepip")]
    return []


def _no_venv(evidence: str) -> Problem:
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"install it on the node: apt-get install {release}-venv ; or give client_python (checkpoint_client_python)"
    return problem("venv_unavailable", evidence, remedy)


def make(state_dir: Path, requirements: str, pip_args: Sequence[str], say: Callable[[str], None]) -> Path:
    """The environment's Python; made first when it is not there. say: gets each line of pip's output."""
    made = folder(state_dir, requirements)
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if python := ready(state_dir, requirements):
            return python
        shutil.rmtree(made, ignore_errors=True)
        python = made / "bin" / "python"
        status, tail = _run([sys.executable, "-m", "venv", str(made)], say)
        if status:
            if any("ensurepip" in line for line in tail):
                raise JobFailure(_no_venv(" / ".join(tail)[:500]))
            raise JobFailure(_pip_problem(f"python -m venv {made}", status, tail))
        atomic_write(made / "requirements.txt", requirements)
        options = ["--require-hashes", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
        command = [str(python), "-m", "pip", "install", *options, "-r", str(made / "requirements.txt"), *pip_args]
        status, tail = _run(command, say)
        if status:
            raise JobFailure(_pip_problem("pip install", status, tail))
        atomic_write(made / MARKER, f"{sys.version}\n")
        return python


def _run(command: Sequence[str], say: Callable[[str], None]) -> tuple[int, list[str]]:
    """Exit status and the last lines of a program's output."""
    tail: deque[str] = deque(maxlen=200)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd="/") as process:
        assert process.stdout
        for raw in process.stdout:
            line = re.sub(r"(://)[^/\s@'\"<>]+@", r"\1***@", plain(raw.decode(errors="replace")).strip())
            if line:
                tail.append(line)
                say(line)
    return process.returncode, list(tail)


def _pip_problem(what: str, status: int, tail: Sequence[str]) -> Problem:
    """The problem behind a failed installation."""
    told = [line for line in tail if line.startswith("ERROR:")] or list(tail)[-3:]
    kind, remedy, cause = "client_not_installed", f"see the job's log; {OFFLINE}", ""
    for name, pattern, help_ in PIP:
        # The last of them: the cause of a retry is said at each one. It comes first, as pip's own ERROR only says what it led to.
        if telling := [line for line in tail if re.search(pattern, line, re.IGNORECASE)]:
            kind, remedy, cause = name, help_, telling[-1]
            tries = sum("Retrying" in line for line in telling)
            cause = f"{cause[:400]} ({tries} retries)" if tries else cause[:400]
            break
    lines = [cause] if cause else []
    lines += [line for line in told if line[:400] != cause]
    return problem(kind, f"{what}: exit {status}: {' / '.join(lines)[:900]}", remedy)


@contextmanager
def in_use(python: Path) -> Iterator[None]:
    """While it lasts, clean() of another job leaves this environment alone. A Python of elsewhere needs no mark."""
    marker: IO[bytes] | None = None
    with suppress(OSError):
        marker = (python.parent.parent / MARKER).open("rb")
        fcntl.flock(marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if marker:
            marker.close()


def clean(state_dir: Path, requirements: str) -> list[str]:
    """Remove environments of other packages that nobody uses; returns their names."""
    gone, mine = [], folder(state_dir, requirements).name
    with (state_dir / "tools" / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return []  # one is being made just now
        for other in sorted((state_dir / "tools").glob(f"{PREFIX}*")):
            if other.name != mine and other.is_dir() and not other.is_symlink() and _unused(other):
                shutil.rmtree(other, ignore_errors=True)
                gone.append(other.name)
    return gone


def _unused(other: Path) -> bool:
    try:
        with (other / MARKER).open("rb") as marker:
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True  # it was never made to the end
    except OSError:
        return False
    return True
