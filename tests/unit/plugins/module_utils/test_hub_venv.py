# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import hub_venv
from ansible_collections.dgxspark.vllm.plugins.module_utils.hub_venv import MARKER, clean, folder, foreseen, in_use, make, ready
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure

LOCK = "demo==1 --hash=sha256:" + "ab" * 32 + "\n"


def wheel(place: Path) -> str:
    """A package as small as can be; returns the lock that pins it."""
    place.mkdir(parents=True)
    files = {
        "demo.py": b"VALUE = 42\n",
        "demo-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: demo\nVersion: 1\n",
        "demo-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    with zipfile.ZipFile(place / "demo-1-py3-none-any.whl", "w") as target:
        for name, data in files.items():
            target.writestr(name, data)
        target.writestr("demo-1.dist-info/RECORD", "\n".join([*rows, "demo-1.dist-info/RECORD,,", ""]))
    return f"demo==1 --hash=sha256:{hashlib.sha256((place / 'demo-1-py3-none-any.whl').read_bytes()).hexdigest()}\n"


def made(state: Path, requirements: str) -> Path:
    """As if it had been made."""
    place = folder(state, requirements)
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").write_text("#!/bin/sh\n")
    (place / "bin" / "python").chmod(0o755)
    (place / MARKER).write_text("")
    return place


def test_an_environment_from_pinned_wheels(tmp_path: Path) -> None:
    """Made once, after an attempt that was broken off; then it is there."""
    lock = wheel(tmp_path / "wheels")
    said: list[str] = []
    args = ["--no-index", "--find-links", str(tmp_path / "wheels")]
    place = folder(tmp_path, lock)
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").write_text("broken off")
    assert ready(tmp_path, lock) is None and foreseen(tmp_path, lock, "") == []
    python = make(tmp_path, lock, args, said.append)
    assert subprocess.check_output([python, "-I", "-c", "import demo; print(demo.VALUE)"]) == b"42\n"
    assert ready(tmp_path, lock) == python and any("demo" in line for line in said)
    said.clear()
    assert make(tmp_path, lock, ["--no-such-option"], said.append) == python and said == []


@pytest.mark.parametrize(
    ("at", "output", "kind", "word"),
    [
        (
            "venv",
            "Error: Command '[...python', '-m', 'ensurepip', '--upgrade']' returned non-zero exit status 1.",
            "venv_unavailable",
            "-venv",
        ),
        (
            "venv",
            "The virtual environment was not created successfully because ensurepip is not\navailable.",
            "venv_unavailable",
            "apt-get",
        ),
        ("venv", "OSError: [Errno 28] No space left on device", "disk_full", "free space"),
        ("pip", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "client_hash_mismatch", "mirror"),
        ("pip", "ERROR: In --require-hashes mode, all requirements must have hashes. Hashes are required", "client_hash_mismatch", ""),
        (
            "pip",
            "WARNING: Retrying after connection broken by 'NewConnectionError: [Errno -3] Temporary failure in name resolution'\n"
            "ERROR: Could not find a version that satisfies the requirement demo==1 (from versions: none)",
            "package_index_unreachable",
            "checkpoint_pip_args",
        ),
        ("pip", "ERROR: No matching distribution found for demo==1", "client_package_missing", "checkpoint_client_python"),
        ("pip", "ERROR: demo-1-cp39.whl is not a supported wheel on this platform.", "client_package_missing", ""),
        ("pip", "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk_full", ""),
        ("pip", "Traceback\nsomething else", "client_not_installed", "log"),
    ],
)
def test_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, output: str, kind: str, word: str) -> None:
    def run(command: list[str], _say: Any) -> tuple[int, list[str]]:
        step = "pip" if "pip" in command else "venv"
        if step == "venv":
            folder(tmp_path, LOCK).mkdir(parents=True)
        return (1, output.splitlines()) if step == at else (0, [])

    monkeypatch.setattr(hub_venv, "_run", run)
    with pytest.raises(JobFailure) as caught:
        make(tmp_path, LOCK, [], print)
    found = caught.value.problems[0]
    assert found["class"] == kind and word in found["remedy"] and output.splitlines()[-1][:30] in found["evidence"]
    assert ready(tmp_path, LOCK) is None


RETRY = "WARNING: Retrying (Retry(total={}, connect=None)) after connection broken by 'NewConnectionError(\"{}\")': /simple/demo/"
NONE = "ERROR: No matching distribution found for demo==1"
UNTRUSTED = "WARNING: The repository located at mirror is not a trusted or secure host and is being ignored."


@pytest.mark.parametrize(
    ("output", "kind", "evidence", "remedy"),
    [
        ([RETRY.format(n, "[Errno 111] Connection refused") for n in (4, 3, 2, 1, 0)], "unreachable", "refused|(5 retries)", "proxy"),
        ([RETRY.format(4, "[Errno -2] Name or service not known")], "unreachable", "Name or service|(1 retries)", "proxy"),
        ([UNTRUSTED], "untrusted", "mirror is not a trusted", "--trusted-host"),
        ([UNTRUSTED, *["Collecting demo==1"] * 60], "untrusted", "mirror is not a trusted", "--trusted-host"),
        (["WARNING: 401 Error, Credentials not correct for https://mirror/simple/demo/"], "refused", "Credentials", "netrc"),
        (["ERROR: HTTP error 403 while getting https://mirror/demo.whl"], "refused", "403", "netrc"),
        ([RETRY.format(4, "Tunnel connection failed: 407 Proxy Authentication Required")], "refused", "407", "http_proxy"),
        (["SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))"], "unreachable", "CERTIFICATE", "proxy"),
    ],
)
def test_the_line_that_tells_is_kept(output: list[str], kind: str, evidence: str, remedy: str) -> None:
    found = hub_venv._pip_problem("pip install", 1, [*output, NONE])
    assert found["class"] == f"package_index_{kind}" and remedy in found["remedy"] and NONE in found["evidence"]
    assert all(part in found["evidence"] for part in evidence.split("|"))
    assert found["evidence"].index(evidence.split("|")[0]) < found["evidence"].index(NONE)


def test_a_password_in_an_address_is_in_no_line() -> None:
    said: list[str] = []
    status, tail = hub_venv._run(["echo", "Looking in indexes: https://user:s3cret@mirror/simple, https://s3cret@b/"], said.append)
    assert status == 0 and "s3cret" not in str(said) + str(tail) and "https://***@mirror/simple" in tail[0]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], _say: Any) -> tuple[int, list[str]]:
        commands.append(command)
        folder(tmp_path, LOCK).mkdir(parents=True, exist_ok=True)
        return 0, []

    monkeypatch.setattr(hub_venv, "_run", run)
    make(tmp_path, LOCK, ["--no-index"], print)
    assert "--require-hashes" in commands[1] and "--no-input" in commands[1] and commands[1][-1] == "--no-index"
    assert (folder(tmp_path, LOCK) / "requirements.txt").read_text() == LOCK


def test_what_is_known_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = made(tmp_path, LOCK) / "bin" / "python"
    assert [p["class"] for p in foreseen(tmp_path, "", "")] == ["no_client"]
    assert foreseen(tmp_path, "", str(python)) == []
    (tmp_path / "text").write_text("")
    for bad in (str(tmp_path), str(tmp_path / "none"), str(tmp_path / "text")):
        assert [p["class"] for p in foreseen(tmp_path, LOCK, bad)] == ["client_unsuitable"]
    monkeypatch.setattr(hub_venv.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else 1)
    assert foreseen(tmp_path, LOCK, "") == []  # it is there already
    found = foreseen(tmp_path, LOCK + "#", "")
    assert [p["class"] for p in found] == ["venv_unavailable"] and "apt-get install python3." in found[0]["remedy"]


def test_old_ones_go_when_nobody_uses_them(tmp_path: Path) -> None:
    mine, used, old, broken = (made(tmp_path, LOCK + str(n)) for n in range(4))
    (broken / MARKER).unlink()
    (tmp_path / "tools" / "other-tool").mkdir()
    with in_use(used / "bin" / "python"):
        assert set(clean(tmp_path, LOCK + "0")) == {old.name, broken.name}
    assert {p.name for p in (tmp_path / "tools").iterdir() if p.is_dir()} == {mine.name, used.name, "other-tool"}
    assert clean(tmp_path, LOCK + "0") == [used.name]
    with in_use(Path("/usr/bin/python3")):  # no environment of ours: nothing to mark
        pass


def test_other_packages_are_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {folder(tmp_path, LOCK).name, folder(tmp_path, LOCK + " ").name}
    monkeypatch.setattr(hub_venv.sys, "version_info", type("V", (), {"major": 3, "minor": 99}))
    assert len(names | {folder(tmp_path, LOCK).name}) == 3 and json.dumps(sorted(names))
