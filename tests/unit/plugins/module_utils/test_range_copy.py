# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Ranges from file to file by every way, and files that are on disk before they are noted."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import range_copy
from ansible_collections.dgxspark.vllm.plugins.module_utils.range_copy import Copier, Flusher, Pending, Truncated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Ends = tuple[int, int, bytes]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    data = os.urandom(300_000)
    (tmp_path / "from").write_bytes(data)
    source, target = os.open(tmp_path / "from", os.O_RDONLY), os.open(tmp_path / "to", os.O_RDWR | os.O_CREAT)
    yield source, target, data
    os.close(source)
    os.close(target)


def refuse(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def nothing(*_: object) -> int:
    return 0


def one_byte(source: int, target: int, _count: int, start: int, at: int) -> int:
    return os.pwrite(target, os.pread(source, 1, start), at)


@pytest.mark.parametrize("kernel", [None, *map(refuse, (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)), nothing, one_byte])
@pytest.mark.parametrize("sendfile", [None, refuse(errno.EINVAL), refuse(errno.ENOSYS)])
def test_every_way_copies_the_same_bytes(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., int] | None, sendfile: Callable[..., int] | None
) -> None:
    source, target, data = ends
    if kernel:
        monkeypatch.setattr(os, "copy_file_range", kernel)
    if sendfile:
        monkeypatch.setattr(os, "sendfile", sendfile)
    length = 500 if kernel is one_byte else 200_001
    moved: list[int] = []
    copier = Copier(moved.append)
    copier.copy(source, 7, target, 3, length)
    assert os.pread(target, 400_000, 0) == b"\0" * 3 + data[7 : 7 + length]
    assert copier.read == copier.written == sum(moved) == length


def test_without_the_call_in_the_library(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, data = ends
    monkeypatch.delattr(os, "copy_file_range")
    Copier(lambda _: None).copy(source, 0, target, 0, len(data))
    assert os.pread(target, 400_000, 0) == data


def test_a_way_that_is_refused_is_not_tried_again(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target, _ = ends
    calls = []
    monkeypatch.setattr(os, "copy_file_range", lambda *_: calls.append(1) or refuse(errno.EXDEV)())
    copier = Copier(lambda _: None)
    for at in range(5):
        copier.copy(source, at, target, at, 10)
    assert len(calls) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_real_errors_are_not_worked_around(ends: Ends, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    source, target, _ = ends
    monkeypatch.setattr(os, "copy_file_range", refuse(number))
    with pytest.raises(OSError) as failure:
        Copier(lambda _: None).copy(source, 0, target, 0, 10)
    assert failure.value.errno == number


@pytest.mark.parametrize("kernel", [None, refuse(errno.EXDEV)])
def test_a_source_that_ends_early_is_told(ends: Ends, monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., int] | None) -> None:
    source, target, data = ends
    if kernel:
        monkeypatch.setattr(os, "copy_file_range", kernel)
    with pytest.raises(Truncated, match=f"ends at {len(data)}, 9 bytes early"):
        Copier(lambda _: None).copy(source, 100, target, 0, len(data) - 100 + 9)


def test_a_short_write_from_memory_goes_on(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    _, target, data = ends
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, some, at: real(fd, some[:1000], at))
    copier = Copier(lambda _: None)
    copier.write(target, data[:5500], 11)
    assert os.pread(target, 9000, 11) == data[:5500] and copier.written == 5500


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 5000)), max_size=8),
    step=st.integers(1, 700),
    way=st.sampled_from(["kernel", "sendfile", "buffer"]),
)
def test_any_ranges_in_any_steps(ends: Ends, ranges: list[tuple[int, int]], step: int, way: str) -> None:
    source, target, data = ends
    os.ftruncate(target, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_copy, "STEP", step)
        patch.setattr(range_copy, "BUFFER", 300)
        copier = Copier(lambda _: None)
        copier._ways = {"kernel": copier._ways, "sendfile": copier._ways[1:], "buffer": []}[way]
        at = 0
        for start, length in ranges:
            copier.copy(source, start, target, at, length)
            at += length
    assert os.pread(target, 100_000, 0) == b"".join(data[start : start + length] for start, length in ranges)


# --- flushing --------------------------------------------------------------------------------------------------------------------


def test_a_file_is_noted_after_it_was_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(f"flushed {fd}"))
    monkeypatch.setattr(range_copy, "PENDING_BYTES", 25)
    flusher = Flusher()
    descriptors = []
    for number in range(5):
        path = tmp_path / str(number)
        descriptors.append(os.open(path, os.O_WRONLY | os.O_CREAT))
        os.write(descriptors[-1], b"x" * 10)
        flusher.add(Pending(path, descriptors[-1], 10, lambda info, n=number: events.append(f"noted {n} {info.st_size}")))
    # Three files of 10 bytes behind the newest are more than 25.
    first = [f"flushed {descriptors[0]}", "noted 0 10", f"flushed {descriptors[1]}", "noted 1 10"]
    assert events == first
    flusher.finish()
    assert [e for e in events if e.startswith("noted")] == [f"noted {n} 10" for n in range(5)]
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_what_is_abandoned_is_closed_and_not_noted(tmp_path: Path) -> None:
    noted: list[object] = []
    flusher = Flusher()
    descriptor = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    flusher.add(Pending(tmp_path / "a", descriptor, 1, noted.append))
    flusher.abandon()
    assert noted == [] and flusher.waiting == []
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "close"])
def test_a_file_that_cannot_be_flushed_is_deleted_and_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    noted: list[str] = []
    asked: list[int] = []
    flusher = Flusher()
    descriptors = [os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in "abc"]
    for name, descriptor in zip("abc", descriptors, strict=True):
        flusher.add(Pending(tmp_path / name, descriptor, 1, lambda _info, n=name: noted.append(n)))
    real = getattr(os, call)

    def once(descriptor: int) -> None:
        if call == "close":
            real(descriptor)
        asked.append(descriptor)
        if descriptor == descriptors[1] and asked.count(descriptor) == 1:
            raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, once)
        with pytest.raises(OSError, match="b") as failure:
            flusher.finish()
        assert failure.value.errno == number and failure.value.filename == str(tmp_path / "b")
        flusher.salvage()
    assert noted == ["a", "c"] and flusher.waiting == [] and asked.count(descriptors[1]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]


def test_everything_that_fails_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flusher = Flusher()
    for name in "ab":
        flusher.add(Pending(tmp_path / name, os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT), 1, lambda _info: None))
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    flusher.salvage()
    assert flusher.waiting == [] and not [*tmp_path.iterdir()]
