# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The owner of a file that is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.files import atomic_write

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
