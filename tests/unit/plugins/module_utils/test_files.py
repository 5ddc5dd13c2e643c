# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The owner of a file that is replaced; and JSON files that are none."""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.files import atomic_write, read_json, read_regular, write_json
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import read_object
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import MANIFEST, STAMPS, known

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def owner(path: Path) -> tuple[int, int, int]:
    info = path.lstat()
    return info.st_uid, info.st_gid, info.st_mode & 0o7777


@as_root
@pytest.mark.parametrize(("uid", "gid", "mode"), [(1234, 4321, 0o640), (0, 4321, 0o2640), (1234, 0, 0o600)])
def test_a_replaced_file_keeps_its_owner_and_gets_the_mode(tmp_path: Path, uid: int, gid: int, mode: int) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    os.chown(path, uid, gid)
    atomic_write(path, "new", mode, keep_owner=True)
    assert owner(path) == (uid, gid, mode) and path.read_text() == "new"


@as_root
def test_the_owner_of_a_link_or_its_target_is_not_taken_over(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    for path in (target, link):
        os.chown(path, 1234, 4321, follow_symlinks=False)
    atomic_write(link, "new", keep_owner=True)
    assert owner(link) == (os.geteuid(), os.getegid(), 0o644) and not link.is_symlink()
    assert owner(target)[:2] == (1234, 4321) and target.read_text() == "old"


@pytest.mark.parametrize("failure", [PermissionError, OSError])
def test_a_process_that_may_not_give_files_away_writes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[OSError]
) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    tried = []

    def refuse(*args: int) -> None:
        tried.append(args[1:])
        raise failure

    monkeypatch.setattr(os, "fchown", refuse)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    atomic_write(path, "new", 0o600, keep_owner=True)
    assert path.read_text() == "new" and owner(path) == (os.geteuid(), os.getegid(), 0o600)
    assert tried == ([(1234, 4321)] if os.geteuid() == 0 else [])


@as_root
def test_without_being_asked_the_file_is_ours(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    os.chown(path, 1234, 4321)
    atomic_write(path, "secret", 0o600)
    assert owner(path) == (os.geteuid(), os.getegid(), 0o600)


# ------------------------------------------------------------------------------------------------------------------- reading JSON


def put(path: Path, kind: str) -> None:
    """Something at a path that is no JSON file of ours."""
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(path))
        case "device":
            path.symlink_to("/dev/zero")
        case "circle":
            path.symlink_to(path.name)
        case "broken link":
            path.symlink_to("nowhere")
        case "huge":
            path.touch()
            os.truncate(path, 1 << 40)
        case _:
            path.write_bytes(
                {
                    "brackets": b"[" * 100_000,
                    "objects": b'{"a":' * 100_000,
                    "long number": b"9" * 5_000,
                    "cut": b'{"files": {',
                    "empty": b"",
                    "not UTF-8": b'"\xff"',
                    "UTF-16": '"x"'.encode("utf-16"),
                    "BOM": b"\xef\xbb\xbf{}",
                }[kind]
            )


NO_FILES = ["FIFO", "folder", "socket", "device", "circle", "broken link", "huge"]
NO_JSON = ["brackets", "objects", "long number", "cut", "empty", "not UTF-8", "UTF-16", "BOM"]


@pytest.fixture
def deadline() -> Iterator[None]:
    """A test that hangs in a read is ended."""
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("hangs"))
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)


@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize("kind", [*NO_FILES, *NO_JSON])
def test_what_is_no_json_file_counts_as_absent(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    put(Path("x"), kind)
    before = len(os.listdir("/proc/self/fd"))
    if kind == "long number":  # versions of Python without that limit take it
        assert read_json(Path("x")) in (None, 10**5_000 - 1)
    else:
        assert read_json(Path("x")) is None
    assert (read_regular(Path("x")) is None) == (kind in NO_FILES)
    assert read_object(Path("x"), {}) == {}
    # The same names in a snapshot's folder.
    for name in (MANIFEST, STAMPS):
        os.rename("x", name)
        noted = known(tmp_path)
        assert (noted.files, noted.head, noted.manifest) == ({}, {}, None)
        os.rename(name, "x")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("path", ["absent", "file/below", "a\0b", "x" * 300])
def test_paths_without_a_file(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("{}")
    if len(path) < 300:
        assert read_json(tmp_path / path) is None
    else:
        with pytest.raises(OSError, match="too long"):
            read_json(tmp_path / path)


def test_files_and_links_to_files_are_read_up_to_the_limit(tmp_path: Path) -> None:
    write_json(tmp_path / "x", {"a": 1})
    (tmp_path / "link").symlink_to("x")
    assert read_json(tmp_path / "x") == read_json(tmp_path / "link") == {"a": 1}
    size = (tmp_path / "x").stat().st_size
    assert read_regular(tmp_path / "x", size) == (tmp_path / "x").read_bytes() and read_regular(tmp_path / "x", size - 1) is None
    assert read_regular(Path("/proc/self/status"), 10) is None  # its size is said to be 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_file_that_cannot_be_read_does_not_pass_for_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        read_json(tmp_path / "x")
