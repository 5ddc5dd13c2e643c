# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import snapshot_space
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_space import (
    Need,
    check_space,
    dest_failure,
    needs_of,
    place_failure,
    space_problems,
)

SNAPSHOT = Need(Path("/data/d"), int(70e9), "what is missing of the snapshot")
HYBRID = Need(Path("/data/h"), int(71e9), "the hybrid")


@pytest.mark.parametrize(
    ("needs", "have", "left", "words"),
    [
        ([SNAPSHOT], 100e9, [], []),
        ([], 2e9, [], []),
        (
            [SNAPSHOT],
            70.5e9,
            [],
            ["70.00 GB for what is missing of the snapshot (/data/d)", "1.07 GB that stay free", "71.07 GB", "70.50 GB", "0.57 GB"],
        ),
        ([SNAPSHOT, HYBRID], 142.1e9, [], []),
        ([SNAPSHOT, HYBRID], 142.0e9, [], ["71.00 GB for the hybrid (/data/h)", "142.07 GB", "142.00 GB"]),
        # the sum, and what lies there for nothing, the largest first
        (
            [SNAPSHOT],
            50e9,
            [("/d/.x.part", 1e9), ("/d/.cache/y.incomplete", 40e9)],
            ["/d/.cache/y.incomplete (40.00 GB), /d/.x.part (1.00 GB)"],
        ),
    ],
)
def test_space(needs: list[Need], have: float, left: list[tuple[str, Any]], words: list[str]) -> None:
    found = space_problems("/data", needs, int(have), left)
    assert [p["class"] for p in found] == (["disk_full"] if words else [])
    assert all(word in found[0]["evidence"] + found[0]["remedy"] for word in words)


@pytest.mark.parametrize(
    ("entry", "size", "count"),
    [
        ({"path": "/x", "bytes": 5}, 100, 5),
        ({"path": "/x", "snapshots": 1.5}, 100, 150),
        ({"path": "/x", "snapshots": 1.5, "bytes": 7}, 100, 157),
        ({"path": "/x", "snapshots": 2}, None, 0),  # not known: no guess
        ({"path": "/x", "snapshots": 0, "bytes": 0}, 100, 0),
        ({"path": "/x", "snapshots": None, "bytes": None}, 100, 0),
    ],
)
def test_other_needs(entry: dict[str, Any], size: int | None, count: int) -> None:
    assert sum(n.bytes for n in needs_of([entry], size)) == count


def test_each_file_system_has_its_own_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm is another one; folders that are not there yet count where they will be."""
    free = {os.stat(tmp_path).st_dev: 3 << 30, os.stat("/dev/shm").st_dev: 2 << 30}
    monkeypatch.setattr(snapshot_space.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, free[os.stat(path).st_dev]))
    mine, other = Need(tmp_path / "a" / "b", 1 << 30, "a"), Need(Path("/dev/shm/none/x"), 1 << 30, "c")
    assert check_space([mine, Need(tmp_path / "c", 1 << 30, "b"), other]) == []
    found = check_space([mine, Need(tmp_path / "c", 1 + (1 << 30), "b"), other, other], [(str(tmp_path), 7), ("/dev/shm", 9), ("/none", 1)])
    assert ["/dev/shm" in p["evidence"] for p in found] == [False, True]
    assert str(tmp_path) in found[0]["remedy"] and "/dev/shm (" in found[1]["remedy"] and str(tmp_path) not in found[1]["remedy"]


@pytest.mark.parametrize(
    ("number", "name", "kind"),
    [
        (errno.ENOSPC, "/d/.a.lock", "disk_full"),  # it shows first on a small file
        (errno.EDQUOT, "/d/a", "disk_full"),
        (errno.EROFS, "/d/a", "dest_not_writable"),
        (errno.EACCES, "/d/a", "dest_not_writable"),
        (errno.ENOTDIR, "/d/a", "dest_not_writable"),
        (errno.ENAMETOOLONG, "/d/a", "dest_name_too_long"),
        (errno.ENOENT, "/d/a", "dest_vanished"),
        (errno.ESTALE, "/d/a", "dest_vanished"),
        (errno.EIO, "/d/a", "dest_failed"),
    ],
)
def test_errors_of_writing(tmp_path: Path, number: int, name: str, kind: str) -> None:
    found = dest_failure(OSError(number, os.strerror(number), name), tmp_path).problems
    assert [p["class"] for p in found] == [kind] and name in found[0]["evidence"]


@pytest.mark.parametrize(
    ("name", "dest", "kind"),
    [
        ("/s/jobs/x", "/s/checkpoints/m", "state_dir_unusable"),
        ("/s", "/s/checkpoints/m", "state_dir_unusable"),
        ("/s", "/d", "state_dir_unusable"),
        ("/s/checkpoints/m/a", "/s/checkpoints/m", "dest_not_writable"),
        ("/s/checkpoints", "/s/checkpoints/m", "dest_not_writable"),
        ("/d/a", "/d", "dest_not_writable"),
        ("/d", "/d", "dest_not_writable"),
        ("/elsewhere", "/d", "dest_not_writable"),
        (None, "/d", "dest_not_writable"),
    ],
)
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOTDIR, errno.EACCES])
def test_the_state_folder_is_told_from_the_destination(name: str | None, dest: str, kind: str, number: int) -> None:
    found = place_failure(OSError(number, os.strerror(number), name), Path(dest), Path("/s")).problems[0]
    assert found["class"] == kind and (kind != "state_dir_unusable" or "state folder /s" in found["evidence"])
