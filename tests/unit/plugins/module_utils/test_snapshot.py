# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import snapshot_fetch, snapshot_space
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import (
    MANIFEST,
    PRISTINE,
    STAMPS,
    part_name,
    stale_parts,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.sources import RETRY_PAUSES_S, Promise
from snapshots import FILES, INDEX, MODEL, REPO, Bring, fill, sha
from web import Server

H = "ab" * 32
PART = part_name(MODEL, Promise(None, sha(FILES[MODEL])))
OWN = {MANIFEST, STAMPS}


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, str]:
    return tmp_path / "source", fill(tmp_path / "source", FILES)


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    return Bring(tmp_path)


# --- a folder as source ----------------------------------------------------------------------------------------------------------


def test_a_whole_copy(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    result = bring(folder, pin)
    assert bring.names() == {*FILES, *OWN} and all((bring.dest / n).read_bytes() == d for n, d in FILES.items())
    assert set(result["files"]) == set(FILES) and result["resumed_bytes"] == 0
    assert "config.json: missing" in result["before"] and "complete: yes" in result["after"]
    manifest = json.loads(bring.manifest())
    assert (manifest["sums_sha256"], manifest["revision"], manifest["repo"]) == (pin, pin, REPO)
    assert manifest["files"]["config.json"] == {"sha256": sha(FILES["config.json"]), "size": len(FILES["config.json"])}
    assert json.loads((bring.dest / STAMPS).read_text())["completed_at"].endswith("Z")
    assert sha(bring.manifest()) == result["manifest_sha256"]
    assert bring.complete(pin) and not bring.complete(H)
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before  # the source is never written
    assert oct((bring.dest / "config.json").stat().st_mode)[-3:] == "644"


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (lambda p: p.unlink(), "missing"),
        (lambda p: p.write_bytes(b"half"), "short"),  # an interrupted file that was taken for complete
        (lambda p: p.write_bytes(p.read_bytes() + b"x"), "long"),
        (lambda p: p.write_bytes(p.read_bytes()[::-1]), "changed"),  # same size
        (lambda p: (p.unlink(), p.symlink_to("/etc/hostname")), "link"),
    ],
)
def test_only_the_damaged_file_comes_again(source: tuple[Path, str], bring: Bring, fault: Callable[[Path], Any], state: str) -> None:
    folder, pin = source
    bring(folder, pin)
    kept = (bring.dest / "config.json").stat().st_ino
    fault(bring.dest / "model-00001-of-00002.safetensors")
    assert not bring.complete(pin)
    result = bring(folder, pin)
    assert result["before"].splitlines() == ["complete: no", f"model-00001-of-00002.safetensors: {state}"]
    assert (bring.dest / "config.json").stat().st_ino == kept
    assert bring.complete(pin)


def test_a_touched_file_is_read_not_brought(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    os.utime(bring.dest / "config.json", (1, 1))
    assert not bring.complete(pin, ())
    assert bring(folder, pin)["before"].splitlines() == ["complete: no"]
    assert bring.complete(pin, ())


def test_a_complete_snapshot_needs_no_source(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    folder.rename(folder.with_name("gone"))
    assert bring.complete(pin)
    assert bring(folder, pin, verify="full")["before"] == ""


def keep(bring: Bring) -> None:
    """As safetensors_index does before it changes an index."""
    (bring.dest / PRISTINE).mkdir(exist_ok=True)
    shutil.copy(bring.dest / INDEX, bring.dest / PRISTINE / INDEX)


@pytest.mark.parametrize("kept", [None, b"", b"{ }", b"[]"])
@pytest.mark.parametrize("text", ['{"edited": 1}', "[]", ""])
def test_an_edited_index_without_what_was_brought_comes_again(
    source: tuple[Path, str], bring: Bring, text: str, kept: bytes | None
) -> None:
    """Without it the snapshot cannot be given to another node; [] has the size of what was brought."""
    bring(*source)
    if kept is not None:
        (bring.dest / PRISTINE).mkdir()
        (bring.dest / PRISTINE / INDEX).write_bytes(kept)
    (bring.dest / INDEX).write_text(text)
    assert not bring.complete(source[1])
    bring(*source)
    assert (bring.dest / INDEX).read_bytes() == FILES[INDEX] and bring.complete(source[1])


def test_an_empty_index_comes_again_although_what_was_brought_is_kept(source: tuple[Path, str], bring: Bring) -> None:
    bring(*source)
    keep(bring)
    (bring.dest / INDEX).write_text("")
    assert not bring.complete(source[1])
    bring(*source)
    assert (bring.dest / INDEX).read_bytes() == FILES[INDEX]


def test_a_touched_index_is_the_same(source: tuple[Path, str], bring: Bring) -> None:
    bring(*source)
    os.utime(bring.dest / INDEX, (1, 1))
    assert bring.complete(source[1])


def test_mutable_files_may_change_and_must_exist(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    keep(bring)
    (bring.dest / INDEX).write_text('{"mended": true}')
    assert bring.complete(pin) and not bring.complete(pin, ())
    (bring.dest / "config.json").unlink()
    bring(folder, pin)  # another file is brought; the mended index stays
    assert (bring.dest / INDEX).read_text() == '{"mended": true}'
    bring(folder, pin, verify="full")
    assert (bring.dest / INDEX).read_text() == '{"mended": true}'
    (bring.dest / INDEX).unlink()
    assert not bring.complete(pin)
    bring(folder, pin)
    assert (bring.dest / INDEX).read_bytes() == FILES[INDEX]


def test_full_verification_finds_what_stamps_cannot(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    victim = bring.dest / "model-00001-of-00002.safetensors"
    info = victim.stat()
    data = bytearray(victim.read_bytes())
    data[1000] ^= 1
    victim.write_bytes(data)
    os.utime(victim, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert bring.complete(pin)
    result = bring(folder, pin, verify="full")
    assert "model-00001-of-00002.safetensors: damaged" in result["before"] and victim.read_bytes() == FILES[victim.name]
    assert bring(folder, pin, verify="full")["before"] == ""


def test_a_part_is_continued(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    name = "model-00001-of-00002.safetensors"
    bring.dest.mkdir(parents=True)
    part = bring.dest / part_name(name, Promise(None, sha(FILES[name])))
    part.write_bytes(FILES[name][:200_000])
    assert bring(folder, pin)["resumed_bytes"] == 200_000
    assert (bring.dest / name).read_bytes() == FILES[name] and not part.exists()


@pytest.mark.parametrize("part", [b"x" * 400_000, b"wrong start" * 100, FILES["model-00001-of-00002.safetensors"] + b"tail"])
def test_a_wrong_part_is_started_again(source: tuple[Path, str], bring: Bring, part: bytes) -> None:
    folder, pin = source
    name = "model-00001-of-00002.safetensors"
    bring.dest.mkdir(parents=True)
    (bring.dest / part_name(name, Promise(None, sha(FILES[name])))).write_bytes(part)
    assert bring(folder, pin)["resumed_bytes"] == 0
    assert (bring.dest / name).read_bytes() == FILES[name]


def test_a_part_that_is_a_link_is_not_written_through(source: tuple[Path, str], bring: Bring, tmp_path: Path) -> None:
    folder, pin = source
    blob = tmp_path / "blob"
    blob.write_bytes(b"precious")
    for name in FILES:
        (bring.dest / name).parent.mkdir(parents=True, exist_ok=True)
        (bring.dest / name).symlink_to(blob)
        (bring.dest / part_name(name, Promise(None, sha(FILES[name])))).symlink_to(blob)
    bring(folder, pin)
    assert blob.read_bytes() == b"precious"
    assert not any((bring.dest / n).is_symlink() for n in FILES)


def test_a_part_that_is_a_fifo_is_not_waited_for(source: tuple[Path, str], bring: Bring) -> None:
    bring.dest.mkdir(parents=True)
    os.mkfifo(bring.dest / PART)
    bring(*source)
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL]


def test_folders_in_the_way_are_all_named(source: tuple[Path, str], bring: Bring) -> None:
    names = ["config.json", MODEL, part_name(INDEX, Promise(None, sha(FILES[INDEX])))]
    for name in names:
        (bring.dest / name / "inner").mkdir(parents=True)
    with pytest.raises(JobFailure) as caught:
        bring(*source)
    assert {p["class"] for p in caught.value.problems} == {"dest_not_writable"}
    assert {p["evidence"].split(" is a folder")[0] for p in caught.value.problems} == {str(bring.dest / n) for n in names}


def test_a_write_that_takes_only_a_part_is_completed(tmp_path: Path) -> None:
    class Short:
        data = b""

        def write(self, piece: bytes) -> int:
            self.data += bytes(piece[:3])
            return min(3, len(piece))

    part: Any = Short()
    snapshot_fetch._write_all(part, b"0123456789")
    assert part.data == b"0123456789"


def test_links_of_the_source_become_files(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, name in enumerate(FILES):
        (folder / name).rename(blobs / str(number))
        (folder / name).symlink_to(blobs / str(number))
    bring(folder, pin)
    assert not any((bring.dest / n).is_symlink() for n in FILES) and bring.complete(pin, ())


def test_finished_files_of_a_broken_run_are_not_brought_again(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    (folder / "model-00001-of-00002.safetensors").rename(folder / "aside")
    assert bring.failure(folder, pin)["class"] == "source_incomplete"
    assert MANIFEST not in bring.names() and not bring.complete(pin)
    (folder / "aside").rename(folder / "model-00001-of-00002.safetensors")


def test_killed_between_files(source: tuple[Path, str], bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are there, the manifest is not; what was finished counts, and nothing passes for complete."""
    folder, pin = source
    real, seen = snapshot_fetch.Fetch.file, []

    def file(self: Any, name: str, promise: Any) -> Any:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(name)
        return real(self, name, promise)

    monkeypatch.setattr(snapshot_fetch.Fetch, "file", file)
    with pytest.raises(KeyboardInterrupt):
        bring(folder, pin)
    assert not bring.complete(pin) and STAMPS in bring.names()
    monkeypatch.setattr(snapshot_fetch.Fetch, "file", real)
    result = bring(folder, pin)
    assert not any(f"{name}:" in result["before"] for name in seen)
    assert result["resumed_bytes"] == sum(len(FILES[n]) for n in seen)
    assert bring.names() == {*FILES, *OWN}


def test_files_without_a_note_are_read_before_they_are_trusted(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring.dest.mkdir(parents=True)
    (bring.dest / "config.json").write_bytes(FILES["config.json"])
    kept = (bring.dest / "config.json").stat().st_ino
    result = bring(folder, pin)
    assert "config.json:" not in result["before"] and (bring.dest / "config.json").stat().st_ino == kept


@pytest.mark.parametrize("names", [["config.json"], [INDEX, "sub/folder/vocab.txt"], ["empty.txt"]])
def test_files_of_somebody_else_are_not_overwritten(source: tuple[Path, str], bring: Bring, names: list[str]) -> None:
    for name in names:
        (bring.dest / name).parent.mkdir(parents=True, exist_ok=True)
        (bring.dest / name).write_bytes(b"precious")
    for _ in range(2):  # nothing that the first run leaves makes the folder ours
        found = bring.failure(*source)
        assert found["class"] == "dest_foreign" and all(name in found["evidence"] for name in names)
        assert all((bring.dest / name).read_bytes() == b"precious" for name in names) and bring.names() == set(names)


@pytest.mark.parametrize("finished", [True, False])
def test_the_snapshot_of_another_repository_stays(source: tuple[Path, str], bring: Bring, tmp_path: Path, finished: bool) -> None:
    bring(*source)
    if not finished:
        (bring.dest / MANIFEST).unlink()
    before = bring.names()
    found = bring.failure(tmp_path / "other", fill(tmp_path / "other", {"config.json": b"{}"}), repo="other/repo")
    assert found["class"] == "dest_other_repo" and REPO in found["evidence"] and str(bring.dest) in found["remedy"]
    assert bring.names() == before and bring.complete(source[1]) == finished


def test_another_revision(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    (bring.dest / INDEX).write_text("mended for the old revision")
    (bring.dest / "own.txt").write_text("of the user")
    kept = (bring.dest / "config.json").stat().st_ino
    newer = {"config.json": FILES["config.json"], INDEX: b'{"new": 1}', "model.safetensors": b"new weights"}
    new_pin = fill(folder.parent / "newer", newer)
    (bring.dest / ".x.0123456789ab.part").write_bytes(b"stale")
    assert [p.name for p in stale_parts(bring.dest, newer, [])] == [".x.0123456789ab.part"]
    result = bring(folder.parent / "newer", new_pin)
    # Old shards must go: a loader takes every *.safetensors of the folder.
    assert bring.names() == {*newer, *OWN, "own.txt"}
    assert (bring.dest / INDEX).read_bytes() == newer[INDEX] and (bring.dest / "config.json").stat().st_ino == kept
    assert "model-00001-of-00002.safetensors: left over" in result["before"]
    assert not bring.complete(pin) and bring.complete(new_pin)


def test_an_index_that_was_mended_for_another_revision_is_not_kept(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    (bring.dest / INDEX).write_text("mended for the old shards")
    bring(folder.parent / "newer", fill(folder.parent / "newer", {INDEX: FILES[INDEX], "model.safetensors": b"new"}))
    assert (bring.dest / INDEX).read_bytes() == FILES[INDEX]


def test_a_broken_change_of_revision_is_complete_for_no_one(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    new_pin = fill(folder.parent / "newer", {"config.json": b"new", "model.safetensors": b"new"})
    (folder.parent / "newer" / "model.safetensors").unlink()
    assert bring.failure(folder.parent / "newer", new_pin)["class"] == "source_incomplete"
    assert MANIFEST not in bring.names() and not bring.complete(pin, ()) and not bring.complete(new_pin, ())
    bring(folder, pin)  # and back again
    assert bring.complete(pin, ()) and not (bring.dest / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda f: (f / "SHA256SUMS").write_text(f"{H}  config.json\n"), "wrong_revision"),
        (lambda f: (f / "SHA256SUMS").unlink(), "no_sums"),
        (lambda f: (f / "config.json").unlink(), "source_incomplete"),
        (lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("../blobs/gone")), "source_incomplete"),
        (lambda f: (f / "config.json").write_text("other"), "digest_mismatch"),
        (lambda f: (f / "config.json").write_bytes(b""), "digest_mismatch"),
        (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), "source_damaged"),
        (lambda f: ((f / "SHA256SUMS").unlink(), (f / "SHA256SUMS").mkdir()), "source_damaged"),
        (lambda f: ((f / "SHA256SUMS").unlink(), os.mkfifo(f / "SHA256SUMS")), "source_damaged"),
        (lambda f: (os.mkfifo(f / "p"), (f / "SHA256SUMS").unlink(), (f / "SHA256SUMS").symlink_to("p")), "source_damaged"),
        (lambda f: ((f / "SHA256SUMS").unlink(), (f / "SHA256SUMS").symlink_to("/dev/zero")), "source_damaged"),
        (lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")), "source_damaged"),
        (lambda f: f.rename(f.with_name("unmounted")), "source_vanished"),
    ],
)
def test_faults_of_the_source(source: tuple[Path, str], bring: Bring, fault: Callable[[Path], Any], kind: str) -> None:
    folder, pin = source
    fault(folder)
    found = bring.failure(folder, pin)
    assert found["class"] == kind and found["remedy"]
    if kind == "wrong_revision":
        assert pin in found["evidence"] and sha((folder / "SHA256SUMS").read_bytes()) in found["evidence"]
    if bring.dest.exists():
        assert MANIFEST not in bring.names()


def test_a_listed_binary_sums_file_is_a_normal_error(tmp_path: Path, bring: Bring) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "SHA256SUMS").write_bytes(b"\xff\xfe")
    assert bring.failure(tmp_path / "source", sha(b"\xff\xfe"))["class"] == "bad_sums_line"


def test_a_full_disk_is_known_before_the_first_byte(source: tuple[Path, str], bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pin = source
    monkeypatch.setattr(snapshot_space, "RESERVE_BYTES", 1 << 60)
    assert bring.failure(folder, pin)["class"] == "disk_full"
    assert bring.names() == {STAMPS}


def test_a_disk_that_fills_up(source: tuple[Path, str], bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pin = source

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot_fetch.os, "fsync", full)
    assert bring.failure(folder, pin)["class"] == "disk_full"


@pytest.mark.parametrize("victims", [["empty.txt"], ["empty.txt", "config.json"]])
@pytest.mark.parametrize("all_of_it", [True, False])
def test_files_that_are_removed_meanwhile(
    source: tuple[Path, str], bring: Bring, monkeypatch: pytest.MonkeyPatch, victims: list[str], all_of_it: bool
) -> None:
    real = snapshot_fetch.Fetch.file

    def file(self: Any, name: str, promise: Promise) -> Any:
        if name == MODEL:  # the last one: it is the largest
            for victim in victims:
                (bring.dest / victim).unlink()
            if all_of_it:
                shutil.rmtree(bring.dest)
        return real(self, name, promise)

    monkeypatch.setattr(snapshot_fetch.Fetch, "file", file)
    found = bring.failure(*source)
    assert found["class"] == "dest_vanished" and any(name in found["evidence"] for name in victims) and not bring.complete(source[1])
    monkeypatch.setattr(snapshot_fetch.Fetch, "file", real)
    bring(*source)
    assert bring.complete(source[1])


@pytest.mark.parametrize(("dest", "kind"), [("x" * 300, "dest_name_too_long"), ("file/x", "dest_not_writable"), ("dangling/x", "dest_")])
def test_destinations_that_cannot_be(source: tuple[Path, str], tmp_path: Path, dest: str, kind: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("none")
    assert Bring(tmp_path, dest).failure(*source)["class"].startswith(kind)


# --- a web server as source ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(source: tuple[Path, str]) -> Iterator[Server]:
    with Server(source[0]) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


class Endless(ThreadingHTTPServer):
    """Serves a folder; `only` is answered with zeros that never end, without a length, and with these headers."""

    daemon_threads = True

    def __init__(self, folder: Path, headers: dict[str, str] | None = None, only: str = MODEL) -> None:
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def log_message(self, *_args: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path.strip("/") != only:
                    super().do_GET()
                    return
                self.send_response(200)
                for pair in (headers or {}).items():
                    self.send_header(*pair)
                self.end_headers()
                with suppress(OSError):
                    while server.sent < 100_000_000:
                        server.sent += self.wfile.write(bytes(1 << 16))

        super().__init__(("127.0.0.1", 0), Handler)
        self.sent, self.url = 0, f"http://127.0.0.1:{self.server_port}"


@pytest.mark.parametrize("faults", [{}, {"no_head": True}, {"no_length": True}, {"no_range": True}])
def test_download(source: tuple[Path, str], server: Server, bring: Bring, faults: dict[Any, Any]) -> None:
    server.faults = faults
    bring(server.url + "/", source[1])
    assert all((bring.dest / n).read_bytes() == d for n, d in FILES.items()) and bring.complete(source[1], ())


@pytest.mark.parametrize(
    ("part", "faults", "resumed"),
    [
        (FILES[MODEL][:200_000], {}, 200_000),
        (FILES[MODEL][:200_000], {"no_range": True}, 0),  # the server sends it all
        (FILES[MODEL], {}, 300_000),  # nothing left: 416, and the hash decides
        (FILES[MODEL] + b"x", {}, 0),
        (FILES[MODEL] + b"x", {"no_range": True}, 0),
        (FILES[MODEL] + b"x", {"bare_416": True}, 0),
        (b"y" * 200_000, {}, 0),
    ],
)
def test_download_with_a_part(
    source: tuple[Path, str], server: Server, bring: Bring, part: bytes, faults: dict[Any, Any], resumed: int
) -> None:
    server.faults = faults
    bring.dest.mkdir(parents=True)
    (bring.dest / PART).write_bytes(part)
    assert bring(server.url, source[1])["resumed_bytes"] == resumed
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL]


def test_a_connection_that_breaks_off_is_taken_up(source: tuple[Path, str], server: Server, bring: Bring) -> None:
    server.faults = {"cut": 90_000}
    bring(server.url, source[1])
    spans = [span for command, name, span in server.asked if command == "GET" and name == MODEL]
    assert spans == [None, "bytes=90000-", "bytes=180000-", "bytes=270000-"]
    assert bring.pauses == [1, 1, 1]  # each try brought something


@pytest.mark.parametrize(("part", "cut"), [(0, 90_000), (50_000, 90_000), (200_000, 90_000), (0, 299_999)])
def test_no_range_and_always_cut_ends(source: tuple[Path, str], server: Server, bring: Bring, part: int, cut: int) -> None:
    server.faults = {"cut": cut, "no_range": True}
    bring.dest.mkdir(parents=True)
    (bring.dest / PART).write_bytes(FILES[MODEL][:part])
    found = bring.failure(server.url, source[1])
    assert found["class"] == "source_unreachable"
    assert f"the server ignores Range and breaks off after {max(part, cut)} of 300000 bytes" in found["evidence"]
    assert bring.pauses == list(RETRY_PAUSES_S)


def test_no_range_and_cut_once_is_brought(source: tuple[Path, str], server: Server, bring: Bring) -> None:
    server.faults = {"cut": 90_000, "no_range": True}

    class Mending(list[float]):
        def append(self, seconds: float) -> None:
            super().append(seconds)
            server.faults = {"no_range": True}

    bring.pauses = Mending()
    bring(server.url, source[1])
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL] and bring.pauses == [1]


@pytest.mark.parametrize("total", [300_000, "*"])
@pytest.mark.parametrize("at_most", [1, 70_000, 99_999, 100_000])
def test_an_answer_with_less_than_asked_is_continued(
    source: tuple[Path, str], server: Server, bring: Bring, at_most: int, total: Any
) -> None:
    have = 299_990 if at_most == 1 else 200_000
    server.faults = {"at_most": at_most, "total": total}
    bring.dest.mkdir(parents=True)
    (bring.dest / PART).write_bytes(FILES[MODEL][:have])
    result = bring(server.url, source[1])
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL] and bring.pauses == []
    if total != "*":
        assert result["resumed_bytes"] == have


@pytest.mark.parametrize("length", ["\xb2", "-5", "", "3e5", "9" * 5000, "0x10"])
def test_a_length_that_is_no_number_is_not_told(server: Server, source: tuple[Path, str], bring: Bring, length: str) -> None:
    server.faults = {"length": length}
    bring(server.url, source[1])
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL]


def test_a_server_that_recovers(source: tuple[Path, str], server: Server, bring: Bring) -> None:
    server.faults = {("status", MODEL): [200, 503, 429, 500, 200]}  # the first is HEAD
    bring(server.url, source[1])
    assert bring.pauses == [1, 2, 4]


@pytest.mark.parametrize(
    ("code", "kind"), [(401, "not_authorised"), (403, "not_authorised"), (404, "not_found"), (400, "source_unreadable")]
)
def test_an_answer_that_trying_again_does_not_change(source: tuple[Path, str], server: Server, bring: Bring, code: int, kind: str) -> None:
    server.faults = {("status", "config.json"): [code]}
    assert bring.failure(server.url, source[1])["class"] == kind
    assert bring.pauses == []


def test_a_server_that_stays_away(source: tuple[Path, str], server: Server, bring: Bring) -> None:
    server.faults = {("status", MODEL): [200, 503]}
    found = bring.failure(server.url, source[1])
    assert found["class"] == "source_unreachable" and "503" in found["evidence"]
    assert bring.pauses == list(RETRY_PAUSES_S)


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("start", [0, 1000])
def test_a_server_that_never_ends_does_not_fill_the_disk(source: tuple[Path, str], bring: Bring, head: bool, start: int) -> None:
    """How much is promised is known by HEAD, or by a peer's manifest; the answer itself does not tell."""
    first = Bring(bring.folder, "first")
    first(*source, revision="a" * 40)
    if start:
        bring.dest.mkdir(parents=True)
        (bring.dest / PART).write_bytes(FILES[MODEL][:start])
    with Endless(source[0] if head else first.dest) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        how = {"pin": source[1]} if head else {"manifest_sha256": sha(first.manifest())}
        found = bring.failure(running.url, **how, revision="a" * 40)
        running.shutdown()
    assert found["class"] == "digest_mismatch" and "more than the 300000 bytes" in found["evidence"] and MODEL in found["evidence"]
    assert running.sent < 60_000_000 and not any(name.endswith(".part") for name in bring.names())


@pytest.mark.parametrize("encoding", ["gzip", "br", " GZIP", "deflate, gzip"])
@pytest.mark.parametrize("name", ["SHA256SUMS", MODEL])
def test_a_server_that_compresses_is_named(source: tuple[Path, str], bring: Bring, encoding: str, name: str) -> None:
    with Endless(source[0], {"Content-Encoding": encoding}, only=name) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        found = bring.failure(running.url, source[1])
        running.shutdown()
    assert found["class"] == "source_encoded" and encoding.strip().lower() in found["evidence"] and name in found["evidence"]
    assert bring.pauses == []


def test_an_html_page_instead_of_the_list(source: tuple[Path, str], server: Server, bring: Bring) -> None:
    (server.folder / "SHA256SUMS").write_text("<!DOCTYPE html><title>Sign in</title>")
    assert bring.failure(server.url, source[1])["class"] == "wrong_revision"


# --- what is wrong with a whole list ---------------------------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + H.encode() + b"\nsize 4976698672\n"


@pytest.mark.parametrize(
    ("files", "kind", "word"),
    [
        ({"config.json": b"", "model.safetensors": b"x"}, "source_damaged", "config.json is empty"),
        ({"config.json": b"{}", "model.safetensors": POINTER}, "git_lfs_pointer", "model.safetensors is a Git LFS pointer"),
        ({"a.gguf": b"x"}, "nothing_to_bring", "no file is left"),
    ],
)
def test_lists_that_are_right_and_no_checkpoint(tmp_path: Path, bring: Bring, files: dict[str, bytes], kind: str, word: str) -> None:
    pin = fill(tmp_path / "source", files)
    found = bring.failure(tmp_path / "source", pin, ignore_patterns=["*.gguf"])
    assert found["class"] == kind and word in found["evidence"] and MANIFEST not in bring.names()


def test_a_file_in_a_file(tmp_path: Path, bring: Bring) -> None:
    (tmp_path / "source").mkdir()
    text = f"{H}  a\n{H}  a/b\n"
    (tmp_path / "source" / "SHA256SUMS").write_text(text)
    assert bring.failure(tmp_path / "source", sha(text.encode()))["class"] == "unsafe_name"


def test_patterns_leave_files_out_and_belong_to_the_manifest(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin, ignore_patterns=["sub/"])
    assert bring.names() == {*FILES, *OWN} - {"sub/folder/vocab.txt"}
    assert json.loads(bring.manifest())["ignore_patterns"] == ["sub/"]
    assert not bring.complete(pin) and bring.complete(pin, ignore_patterns=["sub/"])
    kept = (bring.dest / MODEL).stat().st_ino
    bring(folder, pin)  # the rest comes, and nothing twice
    assert bring.names() == {*FILES, *OWN} and (bring.dest / MODEL).stat().st_ino == kept
    bring(folder, pin, ignore_patterns=["sub/"])
    assert not (bring.dest / "sub").exists()  # with the folder that became empty


@pytest.mark.parametrize("kind", ["link", "file", "dangling"])
def test_a_subfolder_that_leads_elsewhere_is_not_followed(source: tuple[Path, str], bring: Bring, tmp_path: Path, kind: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    bring.dest.mkdir(parents=True)
    if kind == "file":
        (bring.dest / "sub").write_text("precious")
    else:
        (bring.dest / "sub").symlink_to(tmp_path / ("elsewhere" if kind == "link" else "none"))
    found = bring.failure(*source)
    assert found["class"] == "dest_not_writable" and str(bring.dest / "sub") in found["evidence"]
    assert list((tmp_path / "elsewhere").iterdir()) == [] and (bring.dest / "sub").lstat()


def test_lost_notes_are_made_again_from_the_manifest(source: tuple[Path, str], bring: Bring) -> None:
    """The source is not needed, and the manifest stays as it is."""
    folder, pin = source
    bring(folder, pin)
    manifest, kept = bring.manifest(), (bring.dest / MODEL).stat().st_ino
    (bring.dest / STAMPS).unlink()
    folder.rename(folder.with_name("gone"))
    assert not bring.complete(pin)
    bring("/nowhere", pin)
    assert bring.complete(pin) and bring.manifest() == manifest and (bring.dest / MODEL).stat().st_ino == kept


def test_equal_content_is_an_equal_manifest(source: tuple[Path, str], bring: Bring, tmp_path: Path, server: Server) -> None:
    folder, pin = source
    bring(folder, pin)
    other = Bring(tmp_path, "other/place")
    other(server.url, pin, verify="full", workers=3)
    assert other.manifest() == bring.manifest()


def test_what_the_hubs_own_tools_left_goes(source: tuple[Path, str], bring: Bring) -> None:
    left = bring.dest / ".cache" / "huggingface" / "download"
    left.mkdir(parents=True)
    (left.parent / ".gitignore").write_text("*")
    (left.parent / "CACHEDIR.TAG").write_text("Signature")
    for name in ("config.json.metadata", "config.json.lock", "abc.0123.4567.incomplete"):
        (left / name).write_text("x" * 100)
    (bring.dest / ".cache" / "mine").write_text("of the user")
    result = bring(*source)
    assert bring.names() == {*FILES, *OWN, ".cache/mine"} and not left.parent.exists()
    assert ".cache/huggingface/download/abc.0123.4567.incomplete: left over" in result["before"]


@pytest.mark.parametrize("name", ["hub/models--a--b/blobs/abc", "token", "stored_tokens", "xet/x", "datasets/y.incomplete"])
@pytest.mark.parametrize("download", [True, False])
def test_what_else_the_hubs_own_tools_keep_stays(source: tuple[Path, str], bring: Bring, name: str, download: bool) -> None:
    kept = bring.dest / ".cache" / "huggingface" / name
    kept.parent.mkdir(parents=True)
    kept.write_text("70 GB")
    if download:
        (bring.dest / ".cache" / "huggingface" / "download").mkdir()
    bring(*source)
    assert kept.read_text() == "70 GB" and not (bring.dest / ".cache" / "huggingface" / "download").exists()


@pytest.mark.parametrize("link", [".cache", ".cache/huggingface", ".cache/huggingface/download"])
def test_links_to_the_hubs_own_tools_are_not_followed(source: tuple[Path, str], bring: Bring, tmp_path: Path, link: str) -> None:
    rest = ".cache/huggingface/download/x.incomplete".removeprefix(f"{link}/")
    kept = tmp_path / "home" / rest
    kept.parent.mkdir(parents=True)
    kept.write_text("x")
    (bring.dest / link).parent.mkdir(parents=True, exist_ok=True)
    (bring.dest / link).symlink_to(tmp_path / "home")
    bring(*source)
    assert kept.exists()


@pytest.mark.parametrize("mark", [None, MANIFEST, STAMPS, ".dgxspark-snapshot.lock"])
@pytest.mark.parametrize("place", ["other-model", "sub/folder/deeper", "sub"])
def test_parts_of_other_snapshots_are_left_alone(source: tuple[Path, str], bring: Bring, place: str, mark: str | None) -> None:
    part = bring.dest / place / ".model-00001-of-00002.safetensors.0123456789ab.part"
    part.parent.mkdir(parents=True)
    part.write_text("half of another one")
    if mark:
        (part.parent / mark).write_text("")
    bring(*source)
    assert part.exists()  # nothing of the snapshot lies in "sub" itself


@pytest.mark.parametrize("mark", [None, MANIFEST, STAMPS, ".dgxspark-snapshot.lock"])
def test_parts_in_a_folder_of_the_snapshot_go_unless_it_is_another_ones(source: tuple[Path, str], bring: Bring, mark: str | None) -> None:
    part = bring.dest / "sub" / "folder" / ".x.0123456789ab.part"
    part.parent.mkdir(parents=True)
    part.write_text("half")
    if mark:
        (part.parent / mark).write_text("")
    bring(*source)
    assert part.exists() == (mark is not None)


@pytest.mark.parametrize("link", ["sub", "sub/folder"])
def test_a_folder_that_became_a_link_is_neither_complete_nor_deleted_through(
    source: tuple[Path, str], bring: Bring, tmp_path: Path, link: str
) -> None:
    bring(*source)
    outside = tmp_path / "outside"
    (bring.dest / link).rename(outside)
    (bring.dest / link).symlink_to(outside)
    manifest = bring.manifest()
    assert not bring.complete(source[1])
    assert bring.failure(*source)["class"] == "dest_not_writable" and bring.manifest() == manifest
    pin = fill(tmp_path / "newer", {name: data for name, data in FILES.items() if not name.startswith("sub")})
    (outside / ".x.0123456789ab.part").write_text("half")
    bring(tmp_path / "newer", pin)
    assert list(outside.rglob("vocab.txt")) and (outside / ".x.0123456789ab.part").exists() and bring.complete(pin)


def test_an_index_that_comes_again_is_not_kept_as_it_was(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    keep(bring)
    (bring.dest / INDEX).write_text("mended")
    bring(folder, pin)
    assert (bring.dest / PRISTINE / INDEX).exists()
    newer = folder.parent / "newer"
    bring(newer, fill(newer, {INDEX: b"{ }", "model.safetensors": b"new"}))
    assert not (bring.dest / PRISTINE / INDEX).exists() and (bring.dest / INDEX).read_bytes() == b"{ }"


# --- several at a time -----------------------------------------------------------------------------------------------------------


def test_several_files_at_a_time(tmp_path: Path, bring: Bring) -> None:
    files = {f"model-{n:05}.safetensors": os.urandom(200_000) for n in range(6)}
    pin = fill(tmp_path / "source", files)
    with Server(tmp_path / "source") as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        running.faults = {"slow": True, "cut": None}
        bring(running.url, pin, workers=6)
        begins = [name for command, name, _ in running.asked if command == "GET" and name.startswith("model-")]
        running.shutdown()
    assert bring.complete(pin) and sorted(begins) == sorted(files)
    progress = json.loads((tmp_path / "progress-abc.json").read_text())
    assert (progress["stage"], progress["total"], progress["unit"]) == ("download", 1_200_000, "B")


def test_all_that_failed_is_said_and_what_was_good_is_kept(tmp_path: Path, bring: Bring) -> None:
    files = {f"{n}.txt": bytes([n]) * (n + 1) for n in range(8)}
    pin = fill(tmp_path / "source", files)
    for name in ("2.txt", "5.txt"):
        (tmp_path / "source" / name).unlink()
    with pytest.raises(JobFailure) as gone:
        bring(tmp_path / "source", pin)
    assert [p["class"] for p in gone.value.problems] == ["source_incomplete"] * 2
    (tmp_path / "source" / "2.txt").write_bytes(b"???")
    (tmp_path / "source" / "5.txt").write_bytes(files["5.txt"])
    found = bring.failure(tmp_path / "source", pin)
    assert found["class"] == "digest_mismatch" and "2.txt" in found["evidence"]
    assert bring.names() == {"0.txt", "1.txt", STAMPS} and not bring.complete(pin)
    fill(tmp_path / "source", files)
    assert bring(tmp_path / "source", pin)["resumed_bytes"] == 1 + 2 and bring.complete(pin)


def test_a_second_file_that_fails_is_named_as_well() -> None:
    one, two = (JobFailure({"class": c, "evidence": c, "remedy": "", "severity": "error"}) for c in "ab")
    told = snapshot_fetch._one([snapshot_fetch.Abandoned(), one, two, one])
    assert isinstance(told, JobFailure) and [p["class"] for p in told.problems] == ["a", "b"]
    full = OSError(errno.ENOSPC, "full")
    assert snapshot_fetch._one([one, full]) is full


# --- from another node -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def peer(source: tuple[Path, str], bring: Bring, tmp_path: Path) -> Iterator[tuple[str, str, Bring]]:
    """(address, SHA-256 of the manifest, the other node's snapshot): what a share offers."""
    first = Bring(tmp_path, "first")
    first(*source, revision="a" * 40)
    with Server(first.dest) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running.url, sha(first.manifest()), first
        running.shutdown()


def test_a_peers_snapshot(peer: tuple[str, str, Bring], source: tuple[Path, str], bring: Bring) -> None:
    url, manifest_sha256, first = peer
    result = bring(url, revision="a" * 40, manifest_sha256=manifest_sha256, workers=2)
    assert bring.manifest() == first.manifest() and result["manifest_sha256"] == manifest_sha256
    assert all((bring.dest / n).read_bytes() == d for n, d in FILES.items())
    # Asked for by the peer's manifest, or as the first node asks for it: it is the same snapshot.
    assert bring.complete(revision="a" * 40, manifest_sha256=manifest_sha256) and bring.complete(source[1], revision="a" * 40)
    assert not bring.complete(revision="a" * 40, manifest_sha256=H) and not bring.complete(
        revision="b" * 40, manifest_sha256=manifest_sha256
    )
    assert bring(url, revision="a" * 40, manifest_sha256=manifest_sha256)["before"] == ""


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ({"manifest_sha256": H}, "wrong_revision"),
        ({"revision": "b" * 40}, "wrong_revision"),
        ({"repo": "org/other"}, "wrong_revision"),
        ({"ignore_patterns": ["*.txt"]}, "wrong_revision"),
    ],
)
def test_a_peer_with_something_else(peer: tuple[str, str, Bring], bring: Bring, spec: dict[str, Any], kind: str) -> None:
    url, manifest_sha256, _ = peer
    found = bring.failure(url, **{"revision": "a" * 40, "manifest_sha256": manifest_sha256, **spec})
    assert found["class"] == kind and MANIFEST not in (bring.names() if bring.dest.exists() else set())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m | {"format": 2},
        lambda m: m | {"format": True},
        lambda m: m | {"files": {}},
        lambda m: m | {"files": []},
        lambda m: m | {"files": {"../x": {"size": 1, "sha256": H}}},
        lambda m: m | {"files": {"a": {"size": -1, "sha256": H}}},
        lambda m: m | {"files": {"a": {"size": 1, "sha256": "x"}}},
        lambda m: m | {"files": {"a": {"size": 1, "sha256": H}, "a/b": {"size": 1, "sha256": H}}},
        lambda m: m | {"more": 1},
        lambda m: m | {"sums_sha256": "x"},
        lambda m: {**m, "repo": None},
        lambda m: [],
    ],
)
def test_a_peer_with_a_hostile_manifest(peer: tuple[str, str, Bring], bring: Bring, change: Callable[[Any], Any]) -> None:
    url, _, first = peer
    raw = json.dumps(change(json.loads(first.manifest())), indent=1, sort_keys=True).encode() + b"\n"
    (first.dest / MANIFEST).write_bytes(raw)
    assert bring.failure(url, revision="a" * 40, manifest_sha256=sha(raw))["class"] == "bad_manifest"


def test_a_peers_branch_is_the_commit_that_the_peer_has(peer: tuple[str, str, Bring], bring: Bring) -> None:
    url, manifest_sha256, first = peer
    result = bring(url, revision="main", manifest_sha256=manifest_sha256)
    assert bring.manifest() == first.manifest() and result["revision"] == "a" * 40 and "main" in result["notes"][0]
    assert bring.complete(revision="main", manifest_sha256=manifest_sha256)


# --- space -----------------------------------------------------------------------------------------------------------------------


def test_all_that_is_needed_must_fit_before_the_first_byte(
    source: tuple[Path, str], bring: Bring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pin = source
    left = bring.dest / ".cache" / "huggingface" / "download" / "x.incomplete"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(5_000_000))
    size = sum(map(len, FILES.values()))
    monkeypatch.setattr(snapshot_space.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1, 1, (1 << 30) + 3 * size))
    space = [{"path": str(tmp_path / "hybrid"), "snapshots": 2.0, "bytes": 0, "what": "the hybrid"}]
    bring(folder, pin, space=space)
    shutil.rmtree(bring.dest)
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(5_000_000))
    space[0]["bytes"] = 1
    found = bring.failure(folder, pin, space=space)
    assert (
        found["class"] == "disk_full" and "for the hybrid" in found["evidence"] and "what is missing of the snapshot" in found["evidence"]
    )
    assert f"{left} (0.01 GB)" in found["remedy"] and not any(name in bring.names() for name in FILES)


def test_only_what_is_missing_is_needed(source: tuple[Path, str], bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pin = source
    bring.dest.mkdir(parents=True)
    (bring.dest / PART).write_bytes(FILES[MODEL][:299_000])
    monkeypatch.setattr(snapshot_space.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1, 1, (1 << 30) + 2_000))
    assert bring(folder, pin)["resumed_bytes"] == 299_000
