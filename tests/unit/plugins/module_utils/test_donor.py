# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The donor is read by headers and ranges, from any kind of source, and what came is not fetched again."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hybrids
import pytest
import shards
from ansible_collections.dgxspark.vllm.plugins.module_utils import donor as donor_module
from ansible_collections.dgxspark.vllm.plugins.module_utils.donor import (
    JOURNAL,
    SHARD,
    Donor,
    DonorShard,
    FolderDonor,
    ShardState,
    UrlDonor,
    layout_of,
    wanted_ranges,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.hybrid import DonorTensor, Piece
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure, Progress
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_hub import open_hub
from ansible_collections.dgxspark.vllm.plugins.module_utils.sources import FolderSource, Interrupted, Part, UrlSource
from hub import Fault, fill
from hybrids import no_waiting  # noqa: F401 -- a fixture

DATA = os.urandom(4000)
FILES = {"config.json": b'{"a": 1}', "d-1.safetensors": DATA, "d-2.safetensors": DATA[::-1]}


class Scripted:
    """A source in memory. faults: what each read does instead, in turn: break after n bytes, refuse, or None for nothing."""

    def __init__(self, files: dict[str, bytes], faults: list[Any] = (), pauses: tuple[int, ...] = (1, 2)) -> None:  # type: ignore[assignment]
        self.contents, self.faults, self.pauses = files, list(faults), pauses
        self.reads: list[tuple[str, int, int | None]] = []
        self.closed = 0
        self.drained = 0

    def names(self) -> list[str]:
        return sorted(self.contents)

    def size(self, name: str) -> int | None:
        return len(self.contents[name])

    def read(self, name: str, start: int = 0, end: int | None = None) -> Part:
        self.reads.append((name, start, end))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        data = self.contents[name]
        if fault == "ignore range":
            start, end = 0, None
        stop = len(data) if end is None else min(end, len(data))
        if fault == "less":
            stop = max(start + 1, stop - 5)
        return Part(start, len(data), self._chunks(data[start:stop], fault), stop if stop < len(data) else None)

    def _chunks(self, data: bytes, fault: Any) -> Iterator[bytes]:
        try:
            for at in range(0, len(data), 7):
                if type(fault) is int and at + 7 > fault:
                    yield data[at:fault]
                    raise Interrupted("broke off")
                yield data[at : at + 7]
            self.drained += 1
        finally:
            self.closed += 1


def reader(source: Any, pauses: list[float] | None = None) -> Donor:
    return Donor(source, lambda _note: None, (pauses if pauses is not None else []).append)


def classes(failure: pytest.ExceptionInfo[JobFailure]) -> list[str]:
    return [p["class"] for p in failure.value.problems]


# --- ranges ----------------------------------------------------------------------------------------------------------------------


def test_a_range_is_read_to_its_end_so_that_the_connection_can_be_used_again() -> None:
    source = Scripted(FILES)
    assert b"".join(reader(source).ranges("d-1.safetensors", 100, 200)) == DATA[100:200]
    assert source.reads == [("d-1.safetensors", 100, 200)] and (source.drained, source.closed) == (1, 1)


@pytest.mark.parametrize(
    ("faults", "pauses"),
    [
        ([30], [1]),
        ([Interrupted("x"), 0, 50], [1, 2, 1]),
        ([10, 10, 10, 10, 10, 10], [1, 1, 1, 1, 1, 1]),  # each brought something
        (["less", "less"], []),
        ([Interrupted("busy", after_s=20)], [20]),
    ],
)
def test_a_broken_range_is_taken_up_where_it_broke(faults: list[Any], pauses: list[float]) -> None:
    source, slept = Scripted(FILES, faults), []
    donor = reader(source, slept)
    assert b"".join(donor.ranges("d-1.safetensors", 100, 300)) == DATA[100:300]
    assert slept == pauses and donor.read == 200 and source.closed == len([r for r in faults if not isinstance(r, Exception)]) + 1
    assert all(end == 300 for _, _, end in source.reads)


@pytest.mark.parametrize(
    ("faults", "class_"),
    [
        ([Interrupted("x")] * 3, "source_unreachable"),
        ([Interrupted("x", after_s=1e6)], "source_unreachable"),
        ([0, 0, 0], "source_unreachable"),
        (["ignore range"], "donor_without_ranges"),
    ],
)
def test_a_source_that_does_not_serve_ranges_is_given_up(faults: list[Any], class_: str) -> None:
    source = Scripted(FILES, faults)
    with pytest.raises(JobFailure) as failure:
        b"".join(reader(source).ranges("d-1.safetensors", 100, 300))
    assert classes(failure) == [class_] and source.drained == 0


def test_a_file_that_is_shorter_than_told_ends_in_a_failure() -> None:
    with pytest.raises(JobFailure) as failure:
        b"".join(reader(Scripted(FILES)).ranges("d-1.safetensors", 3990, 4010))
    assert classes(failure) == ["source_unreachable"] and "ended at byte 4000 of 4010" in failure.value.problems[0]["evidence"]


def test_neighbours_are_one_range_and_nothing_between_is_fetched() -> None:
    def piece(at: int, nbytes: int) -> Piece:
        return Piece("n", "U8", (nbytes,), nbytes, True, at)

    pieces = [piece(10, 5), piece(15, 5), piece(0, 0), piece(21, 1), piece(22, 1), piece(23, 2)]
    assert [*wanted_ranges(pieces, ["a", "a", "a", "a", "b", "b"])] == [("a", 10, 20), ("a", 21, 22), ("b", 22, 25)]
    assert [*wanted_ranges([], [])] == []


# --- headers ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    hybrids.pair(tmp_path, experts=True)
    return {path.name: path.read_bytes() for path in (tmp_path / "donor").iterdir()}


def shard_name(files: dict[str, bytes]) -> str:
    return next(name for name in sorted(files) if name.endswith(".safetensors"))


def test_headers_alone_are_read_and_routed_experts_left_out(tmp_path: Path, files: dict[str, bytes]) -> None:
    source = Scripted(files)
    donor = reader(source)
    found = donor.survey(Progress(tmp_path / "progress"))
    headers = {name: 8 + int.from_bytes(data[:8], "little") for name, data in files.items() if name.endswith(".safetensors")}
    assert donor.read == sum(headers.values()) + len(files["config.json"])
    assert found.files == {name: {"size": len(files[name]), "digest": "", "state": None} for name in headers}
    assert found.config["quantization_config"]["quant_method"] == "fp8"
    everything = {name: raw for tensors in shards.contents(tmp_path / "donor").values() for name, raw in tensors.items()}
    assert found.tensors.keys() == {name for name in everything if ".experts." not in name} and len(found.tensors) < len(everything)
    for name, tensor in found.tensors.items():
        assert (tensor.dtype, list(tensor.shape), files[tensor.file][tensor.start : tensor.end]) == everything[name]


def cut_header(data: bytes) -> bytes:
    return data[:40]


def cut_data(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize(
    ("fault", "class_"),
    [
        (lambda _: b"", "shard_empty"),
        (lambda _: b"1234", "text_page"),
        (lambda _: b"\1\0\0", "shard_too_small"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4976698672\n", "git_lfs_pointer"),
        (lambda _: b"<!DOCTYPE html><html>401</html>", "text_page"),
        (lambda _: b"\0" * 100, "shard_header_length_zero"),
        (cut_header, "shard_header_past_end"),
        (cut_data, "shard_truncated"),
        (lambda data: data + b"x", "shard_trailing_bytes"),
        (lambda data: data[:8] + b"[" + data[9:], "shard_header_not_json"),
    ],
)
def test_a_damaged_donor_is_told_by_file(files: dict[str, bytes], fault: Callable[[bytes], bytes], class_: str) -> None:
    name = shard_name(files)
    files[name] = fault(files[name])
    with pytest.raises(JobFailure) as failure:
        reader(Scripted(files)).survey()
    assert classes(failure) == [class_] and f"{name} of the donor" in failure.value.problems[0]["evidence"]


@pytest.mark.parametrize(
    ("fault", "class_"),
    [
        (lambda files: files.pop("config.json"), "donor_no_config"),
        (lambda files: files.update({"config.json": b"{"}), "donor_config_damaged"),
        (lambda files: files.update({"config.json": b"[]"}), "donor_config_damaged"),
        (lambda files: files.update({"config.json": b" " * (17 << 20)}), "donor_file_too_large"),
        (lambda files: [files.pop(name) for name in list(files) if name.endswith(".safetensors")], "donor_no_shards"),
        (lambda files: files.update({"copy.safetensors": files[shard_name(files)]}), "donor_duplicate_tensor"),
    ],
)
def test_a_folder_that_is_no_donor(files: dict[str, bytes], fault: Callable[[dict[str, bytes]], Any], class_: str) -> None:
    fault(files)
    with pytest.raises(JobFailure) as failure:
        reader(Scripted(files)).survey()
    assert classes(failure) == [class_]


def test_a_source_that_does_not_tell_sizes_is_refused(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "size", lambda self, name: None)
    with pytest.raises(JobFailure) as failure:
        reader(Scripted(files)).survey()
    assert classes(failure) == ["donor_size_unknown"]


# --- the donor shard -------------------------------------------------------------------------------------------------------------

ORDER = [
    ("w_scale_inv", DonorTensor("d-1.safetensors", "F32", (2, 1), 96, 104)),
    ("w", DonorTensor("d-1.safetensors", "F8_E4M3", (40, 50), 200, 2200)),
    ("v", DonorTensor("d-1.safetensors", "F8_E4M3", (30,), 2200, 2230)),
    ("empty", DonorTensor("d-1.safetensors", "F8_E4M3", (0,), 17, 17)),
    ("u", DonorTensor("d-2.safetensors", "F8_E4M3", (10,), 5, 15)),
]
WANT = {
    "w_scale_inv": ("F32", [2, 1], DATA[96:104]),
    "w": ("F8_E4M3", [40, 50], DATA[200:2200]),
    "v": ("F8_E4M3", [30], DATA[2200:2230]),
    "empty": ("F8_E4M3", [0], b""),
    "u": ("F8_E4M3", [10], DATA[::-1][5:15]),
}
KNOWN: dict[str, Any] = {name: {"size": len(data), "digest": ""} for name, data in FILES.items()}
NEEDED = {name: file for name, file in KNOWN.items() if name != "config.json"}


def shard(folder: Path, files: dict[str, Any] | None = None) -> DonorShard:
    return DonorShard(folder, ORDER, files or NEEDED, lambda _note: None)


def fetch(folder: Path, source: Scripted | None = None) -> tuple[ShardState, Scripted]:
    source = source or Scripted(FILES)
    return shard(folder).fill(reader(source), Progress(folder / "progress")), source


def test_the_shard_is_a_sound_file_of_exactly_these_tensors(tmp_path: Path) -> None:
    state, source = fetch(tmp_path)
    raw = (tmp_path / SHARD).read_bytes()
    assert shards.library(tmp_path / SHARD) == WANT
    assert state == ShardState(len(raw), hashlib.sha256(raw).hexdigest())
    assert source.reads == [("d-1.safetensors", 96, 104), ("d-1.safetensors", 200, 2230), ("d-2.safetensors", 5, 15)]
    assert shard(tmp_path).kept() == state


@pytest.mark.parametrize("broken_at", [0, 5, 8, 60, 700, 2037])
def test_an_interrupted_shard_goes_on_behind_what_was_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_at: int) -> None:
    want, _ = fetch(tmp_path)
    whole = (tmp_path / SHARD).read_bytes()
    (tmp_path / SHARD).unlink()
    (tmp_path / JOURNAL).unlink()
    monkeypatch.setattr(donor_module, "SYNC_BYTES", 200)
    broken = [broken_at] if broken_at < 8 else [None, broken_at - 8]
    with pytest.raises(JobFailure):
        fetch(tmp_path, Scripted(FILES, [*broken, Interrupted("gone")], pauses=()))
    vouched = json.loads((tmp_path / JOURNAL).read_text())["bytes"] if (tmp_path / JOURNAL).exists() else 0
    head = len(whole) - sum(t.nbytes for _, t in ORDER)
    assert vouched >= head + broken_at - 210 and shard(tmp_path).kept() is None
    # Bytes behind what the journal vouches for may be anything after a power cut.
    with (tmp_path / SHARD).open("ab") as stream:
        stream.write(b"rubbish" * 1000)
    state, source = fetch(tmp_path)
    assert state == want and (tmp_path / SHARD).read_bytes() == whole
    assert sum(end - start for _, start, end in source.reads if end) == len(whole) - max(vouched, head)


def damage_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "fault",
    [
        lambda f: damage_byte(f / SHARD, 500),
        lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-1]),
        lambda f: (f / SHARD).unlink(),
        lambda f: ((f / SHARD).unlink(), (f / SHARD).symlink_to("/dev/null")),
        lambda f: (f / JOURNAL).unlink(),
        lambda f: (f / JOURNAL).write_text("{"),
        lambda f: (f / JOURNAL).write_text('{"layout": 1, "bytes": "x", "sha256": null}'),
        lambda f: (f / JOURNAL).write_text(json.dumps({**json.loads((f / JOURNAL).read_text()), "bytes": 10**9})),
        lambda f: (f / JOURNAL).write_text(json.dumps({**json.loads((f / JOURNAL).read_text()), "layout": "other"})),
    ],
)
def test_a_shard_that_nothing_vouches_for_is_fetched_again(tmp_path: Path, fault: Callable[[Path], Any]) -> None:
    want, _ = fetch(tmp_path)
    fault(tmp_path)
    assert shard(tmp_path).kept() is None
    state, source = fetch(tmp_path)
    assert state == want and shards.library(tmp_path / SHARD) == WANT and len(source.reads) == 3
    assert not (tmp_path / SHARD).is_symlink()


def test_the_layout_depends_on_everything_that_decides_the_bytes() -> None:
    layouts = [layout_of(ORDER, KNOWN), layout_of(ORDER[::-1], KNOWN), layout_of(ORDER[1:], KNOWN)]
    layouts.append(layout_of(ORDER, {**KNOWN, "d-1.safetensors": {"size": 4001, "digest": ""}}))
    layouts.append(layout_of(ORDER, {**KNOWN, "d-1.safetensors": {"size": 4000, "digest": "a"}}))
    assert len(set(layouts)) == len(layouts)


# --- the three kinds of sources --------------------------------------------------------------------------------------------------


def headers_of(folder: Path) -> int:
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))


class Ranges(SimpleHTTPRequestHandler):
    """A plain web server that knows Range, and has no list of its files."""

    sent = 0
    honours = True
    tags: str | None = None  # what goes before each file's own in ETag; None: no ETag
    modified = False
    number = 0  # requests so far
    at = -1  # before that request something happens
    swap: Callable[[], Any] = staticmethod(lambda: None)

    def send_response(self, code: int, message: str | None = None) -> None:
        super().send_response(code, message)
        path = Path(self.translate_path(self.path))
        if self.tags is not None and path.is_file():
            self.send_header("ETag", f'{self.tags}"{path.stat().st_ino}-{path.stat().st_mtime_ns}"')

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified" or self.modified:
            super().send_header(keyword, value)

    def send_head(self) -> Any:
        self.count()
        return super().send_head()

    def count(self) -> None:
        kind = type(self)
        kind.number += 1
        if kind.number == kind.at:
            kind.swap()

    def do_GET(self) -> None:
        self.count()
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        data, asked = path.read_bytes(), self.headers.get("Range")
        if asked and self.honours:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last or len(data) - 1) + 1
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            data = data[start:end]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", self.date_time_string(int(path.stat().st_mtime)))
        self.end_headers()
        self.wfile.write(data)
        type(self).sent += len(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, type[Ranges]]]:
    class Handler(Ranges):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path / "donor"))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", Handler
    server.shutdown()
    server.server_close()


def take(donor: Donor, folder: Path) -> tuple[dict[str, shards.Raw], int]:
    """Survey, and fetch all shared experts; returns what came, and the bytes of the tensors that were needed."""
    found = donor.survey()
    order = [(name, t) for name, t in sorted(found.tensors.items()) if ".mlp.shared_expert." in name]
    got = DonorShard(folder, order, found.files, lambda _note: None)
    got.fill(donor, Progress(folder / "progress"))
    return shards.library(folder / SHARD), sum(t.nbytes for _, t in order)


def test_a_plain_web_server_is_read_by_ranges(tmp_path: Path, served: tuple[str, type[Ranges]]) -> None:
    hybrids.pair(tmp_path, experts=True)
    url, handler = served
    got, needed = take(reader(UrlSource(url, pauses=())), tmp_path)
    assert got == take(reader(FolderSource(tmp_path / "donor")), tmp_path)[0]
    index, config = ((tmp_path / "donor" / name).stat().st_size for name in (shards.INDEX, "config.json"))
    assert handler.sent <= needed + headers_of(tmp_path / "donor") + index + config


@pytest.mark.parametrize("how", ["ETag", "weak ETag", "Last-Modified"])
def test_a_web_server_whose_files_change_is_told_at_every_point(tmp_path: Path, served: tuple[str, type[Ranges]], how: str) -> None:
    hybrids.pair(tmp_path)
    hybrids.pair(tmp_path, seed=9, donor="other")
    for path in (tmp_path / "other").iterdir():
        os.utime(path, (10**9, 10**9))
    url, handler = served
    handler.tags, handler.modified = {"ETag": "", "weak ETag": "W/", "Last-Modified": None}[how], how == "Last-Modified"
    take(reader(UrlDonor(url, pauses=())), tmp_path)
    requests = handler.number

    def swap() -> None:
        (tmp_path / "donor").rename(tmp_path / "before")
        (tmp_path / "other").rename(tmp_path / "donor")

    handler.swap = staticmethod(swap)
    ends = set()
    for at in range(3, requests + 1):
        (tmp_path / JOURNAL).unlink(missing_ok=True)
        handler.number, handler.at = 0, at
        try:
            take(reader(UrlDonor(url, pauses=())), tmp_path)
            ends.add("")
        except JobFailure as failed:
            assert [p["class"] for p in failed.problems] == ["donor_changed"], at
            assert not (tmp_path / JOURNAL).exists()  # nothing vouches for what came
            ends.add("changed")
        else:  # all that was taken is of one donor
            taken = shards.library(tmp_path / SHARD)
            assert any(
                all(everything.get(name) == raw for name, raw in taken.items())
                for everything in (
                    {n: r for t in shards.contents(tmp_path / f).values() for n, r in t.items()} for f in ("before", "donor")
                )
            ), at
        (tmp_path / "donor").rename(tmp_path / "other")
        (tmp_path / "before").rename(tmp_path / "donor")
    assert "changed" in ends


def test_a_server_that_tells_nothing_of_its_files_is_never_continued_from(tmp_path: Path, served: tuple[str, type[Ranges]]) -> None:
    hybrids.pair(tmp_path)
    url, _ = served
    sources = [UrlDonor(url, pauses=()) for _ in range(2)]
    states = [Donor(source, lambda _note: None).survey().files for source in sources]
    assert states[0] != states[1] and all(len(source.notes) == 1 and "neither ETag nor" in source.notes[0] for source in sources)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path, ns=(1, 1)),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: (path.rename(path.with_name("aside")), path.write_bytes(path.with_name("aside").read_bytes())),
        lambda path: path.unlink(),
    ],
)
def test_a_folder_whose_files_change_is_told(tmp_path: Path, change: Callable[[Path], Any]) -> None:
    hybrids.pair(tmp_path)
    donor = reader(FolderDonor(tmp_path / "donor"))
    files = donor.survey().files
    donor.check_unchanged(files)
    change(next(iter(sorted((tmp_path / "donor").glob("*.safetensors")))))
    with pytest.raises(JobFailure) as failure:
        donor.check_unchanged(files)
    assert classes(failure)[0] in {"donor_changed", "source_incomplete"}


def test_a_web_server_without_ranges_is_not_made_to_send_everything(tmp_path: Path, served: tuple[str, type[Ranges]]) -> None:
    hybrids.pair(tmp_path)
    url, handler = served
    handler.honours = False
    with pytest.raises(JobFailure) as failure:
        take(reader(UrlSource(url, pauses=())), tmp_path)
    assert classes(failure) == ["donor_without_ranges"] and "nginx" in failure.value.problems[0]["remedy"]


@pytest.mark.parametrize("faults", [[], [Fault("break", "cdn", after=300, times=3)], [Fault("status", "cdn", status=503, times=2)]])
def test_the_hub_is_asked_for_headers_and_the_needed_ranges_only(tmp_path: Path, hub: Any, faults: list[Fault]) -> None:
    hybrids.pair(tmp_path, experts=True)
    commit = fill(hub, "org/fp8", {path.name: path.read_bytes() for path in (tmp_path / "donor").iterdir()})
    hub.faults.extend(faults)
    asked = {"repo": "org/fp8", "revision": commit, "endpoint": hub.url, "token_path": "", "client_requirements": ""}
    asked |= {"client_python": sys.executable, "pip_args": [], "stall_timeout_s": 30, "state_dir": str(tmp_path / "state"), "xet": False}
    with open_hub(asked, lambda _note: None) as source:
        got, needed = take(Donor(source, lambda _note: None, lambda _s: None), tmp_path)
        assert source.commit == commit
        digests = {name: file["digest"] for name, file in Donor(source, lambda _n: None).survey().files.items()}
    assert got == take(reader(FolderSource(tmp_path / "donor")), tmp_path)[0]
    assert digests == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "donor").glob("*.safetensors")}
    content = [r for r in hub.requests if r.method == "GET" and r.status == 206]
    config = (tmp_path / "donor" / "config.json").stat().st_size
    once = needed + 2 * (headers_of(tmp_path / "donor") + config)  # surveyed twice here
    assert sum(r.sent for r in content) <= once + 4096
    assert all(r.range for r in hub.transfers() if ".safetensors" in r.path)
