# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The benchmark itself, on a checkpoint of a few megabytes: its figures are those of what was done."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import checkpoint as benchmark
import pytest


def test_a_small_run(tmp_path: Path) -> None:
    command = [sys.executable, benchmark.__file__, "--size", "8M", "--rounds", "1", "--dir", str(tmp_path), "--experts", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *table, last = done.stdout.splitlines()
    total = float(re.match(r"([\d.]+) MB in 15 shards", first)[1])  # type: ignore[index]
    rows = {
        line.split()[0]: [float(cell.replace(",", "")) for cell in re.findall(r"([\d.,]+)(?: MB|\s|$)", line[12:])] for line in table[1:]
    }
    assert set(rows) == {"cp+sync", "materialize", "overlay", "open+header", "safe_open", "index"}
    for name in ("cp+sync", "materialize"):
        read, written = rows[name][:2]
        assert total * 0.99 <= written < total * 1.2 and total * 0.99 <= read < total * 2.5
    assert rows["overlay"][1] < total / 4 and rows["open+header"][1] == rows["index"][1] == 0
    assert rows["open+header"][0] < total / 4
    assert re.search(r"materialize [\d.]+ x cp\+sync .*; overlay writes [\d.]+ % .*; index check of [\d,]+ tensors in 15 files reads", last)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("modes", "free", "says"),
    [
        (["materialize"], 9_000_000_000, "needs 10,7"),
        (["overlay"], 9_000_000_000, "needs 10,7"),
        (["index"], 6_000_000_000, "needs 6,7"),
        (["index"], 7_000_000_000, ""),
        (["materialize", "index"], 11_000_000_000, ""),
    ],
)
def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, modes: list[str], free: int, says: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": free}))
    found = benchmark.space_problem(tmp_path, 4_000_000_000, modes)
    assert (says in found and "--size" in found) if says else found == ""
    if says:
        with pytest.raises(SystemExit, match=says):
            benchmark.main(["--dir", str(tmp_path), "--modes", ",".join(modes)])
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [["--modes", "copy"], ["--rounds", "0"], ["--size", "much"]])
def test_wrong_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(argv)
    assert argv[0].strip("-").rstrip("s") in capsys.readouterr().err
