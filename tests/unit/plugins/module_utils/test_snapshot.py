# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import http.server
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import snapshot
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure, Progress
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot import (
    JOURNAL,
    MANIFEST,
    complete,
    file_state,
    parse_sums,
    part_name,
    pinned,
    place_problems,
    plan,
    source_problems,
    space_problems,
    stale_parts,
)

H = "ab" * 32
G = "cd" * 32
INDEX = "model.safetensors.index.json"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


FILES = {"config.json": b'{"a": 1}', INDEX: b"{}", "model-00001-of-00002.safetensors": os.urandom(300_000), "empty.txt": b""}


def fill(folder: Path, files: dict[str, bytes]) -> str:
    """Files and their SHA256SUMS; returns the pin."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    text = "".join(f"{sha(data)}  {name}\n" for name, data in sorted(files.items()))
    (folder / "SHA256SUMS").write_text(text)
    return sha(text.encode())


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, str]:
    return tmp_path / "source", fill(tmp_path / "source", FILES)


class Bring:
    """Runs the worker's function as the job would."""

    def __init__(self, tmp_path: Path) -> None:
        self.dest = tmp_path / "dest" / "abc"
        self.pauses: list[float] = []
        self._folder = tmp_path

    def __call__(self, source: Any, pin: str, verify: str = "stamps", **spec: Any) -> dict[str, Any]:
        whole = {"repo": "org/name", "revision": pin, "source": str(source), "dest": str(self.dest), "pin": pin, "mutable": [INDEX]}
        return snapshot.bring({**whole, "verify": verify, **spec}, Progress(self._folder / "progress.json"), self.pauses.append)

    def failure(self, *args: Any, **spec: Any) -> dict[str, Any]:
        with pytest.raises(JobFailure) as caught:
            self(*args, **spec)
        return dict(caught.value.problems[0])

    def names(self) -> set[str]:
        return {p.name for p in self.dest.iterdir()}


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    return Bring(tmp_path)


# --- SHA256SUMS and pins ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{H}  a.txt\n", {"a.txt": H}),
        (f"{H} *a.txt\n", {"a.txt": H}),
        (f"{H.upper()}  a b.txt\r\n\n{G}  c", {"a b.txt": H, "c": G}),
        (f"{H}  ./a.txt\n", {"a.txt": H}),
        (f"{H}  a\n{H}  a\n", {"a": H}),
        (f"{G}  SHA256SUMS\n{H}  a\n", {"a": H}),  # made a second time with 'sha256sum *'
        (f"{H}  .gitattributes\n{G}  modèle.json\n", {".gitattributes": H, "modèle.json": G}),
        (f"{H}  *a\n", {"*a": H}),
    ],
)
def test_sums(text: str, expected: dict[str, str]) -> None:
    assert parse_sums(text) == (expected, [])


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (f"{H}  /etc/passwd", "unsafe_name"),
        (f"{H}  ../../etc/passwd", "unsafe_name"),
        (f"{H}  ./../x", "unsafe_name"),
        (f"{H}  sub/dir.safetensors", "unsafe_name"),
        (f"{H}  ..\\x", "unsafe_name"),
        (f"{H}  ..", "unsafe_name"),
        (f"{H}  .", "unsafe_name"),
        (f"{H}  a\x00b", "unsafe_name"),
        (f"{H}  a\x1bb", "unsafe_name"),
        (f"{H}  a\ud800b", "unsafe_name"),
        (f"{H}  {MANIFEST}", "unsafe_name"),
        (f"{H}  {JOURNAL}", "unsafe_name"),
        (f"{H}  .a.0123456789ab.part", "unsafe_name"),
        (f"{H}  {'x' * 300}", "unsafe_name"),
        (f"\\{H}  a\\nb", "bad_sums_line"),
        (f"SHA256 (a) = {H}", "bad_sums_line"),
        (f"{H[:40]}  a", "bad_sums_line"),
        (f"{H}\ta", "bad_sums_line"),
        (f"{H} a", "bad_sums_line"),
        (f"{H}  a\n{G}  a", "bad_sums_line"),
        ("<!DOCTYPE html>", "bad_sums_line"),
        ("", "bad_sums_line"),
    ],
)
def test_bad_sums(line: str, kind: str) -> None:
    _, found = parse_sums(line + "\n")
    assert [p["class"] for p in found] == [kind]


def test_every_bad_line_is_reported() -> None:
    assert len(parse_sums(f"{H}  ../a\nnonsense\n{H}  good\n{H}  /b\n")[1]) == 3


@pytest.mark.parametrize(
    ("revision", "sums", "pin", "kind"),
    [
        (H, "", H, None),
        (f"sha256:{H}", "", H, None),
        (f" {H.upper()} ", "", H, None),
        ("a" * 40, H, H, None),
        ("main", f"sha256:{H}", H, None),
        (H, H, H, None),
        (H, G, "", "bad_pin"),
        ("a" * 40, "123", "", "bad_pin"),
        ("a" * 40, "", "", "no_pin"),
        ("main", "", "", "no_pin"),
        ("", "", "", "no_pin"),
    ],
)
def test_pins(revision: str, sums: str, pin: str, kind: str | None) -> None:
    value, found = pinned(revision, sums, "/mnt/m")
    assert (value, [p["class"] for p in found]) == (pin, [kind] if kind else [])
    if kind == "no_pin":
        assert "cd /mnt/m && sha256sum * > SHA256SUMS && sha256sum SHA256SUMS" in found[0]["remedy"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("/mnt/models", None),
        ("http://192.0.2.1:8080/m", None),
        ("https://host/m/", None),
        ("hub", "hub_not_supported"),
        ("models", "bad_source"),
        ("ftp://host/m", "bad_source"),
        ("", "bad_source"),
        ("~/models", "bad_source"),
        ("http://user:secret@host/m", "bad_source"),
        ("http://host/m?token=secret", "bad_source"),
        ("http://host/m#x", "bad_source"),
        ("http:///m", "bad_source"),
    ],
)
def test_sources(source: str, kind: str | None) -> None:
    found = source_problems(source)
    assert [p["class"] for p in found] == ([kind] if kind else [])
    assert "secret" not in str(found)


def test_the_destination_and_the_source_must_not_overlap(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "link").symlink_to(inner)
    a, b, link = str(tmp_path / "a"), str(inner), str(tmp_path / "link")
    for source, dest in [(a, a), (a, b), (b, a), (b, link), (link, b + "/new"), (a, "/"), (a, "relative")]:
        assert [p["class"] for p in place_problems(source, dest)] == ["bad_dest"], (source, dest)
    assert place_problems(a, a + "b") == [] == place_problems("http://host/a", b)


# --- what is there ---------------------------------------------------------------------------------------------------------------


def test_file_states(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "folder").mkdir()
    info = (tmp_path / "a").stat()
    entry = {"size": 3, "mtime_ns": info.st_mtime_ns, "sha256": H}
    table = [
        ("a", entry, H, False, "ok"),
        ("a", None, H, False, "unverified"),
        ("a", entry, G, False, "unverified"),
        ("a", {**entry, "size": 4}, H, False, "changed"),
        ("a", {**entry, "mtime_ns": 1}, H, False, "changed"),
        ("a", {**entry, "size": 4}, H, True, "ok"),  # mutable: presence
        ("a", {**entry, "size": 4}, G, True, "unverified"),  # but not of another revision
        ("none", entry, H, False, "missing"),
        ("none", entry, H, True, "missing"),
        ("link", entry, H, False, "link"),  # never trusted, never written through
        ("link", entry, H, True, "link"),
        ("folder", entry, H, False, "link"),
    ]
    for name, noted, want, mutable, state in table:
        assert file_state(tmp_path, name, noted, want, mutable) == state, (name, state)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"files": []}', '{"files": {"a": 1}}', '{"files": {"../a": {"sha256": "x"}}}', '{"files": {}}']
)
def test_a_broken_manifest_is_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    assert complete(tmp_path, H, []) is None and snapshot.known(tmp_path).files == {}


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {},
        {"sha256": 5},
        {"sha256": "xyz"},
        {"size": "8"},
        {"size": True},
        {"size": -1},
        {"size": 1.5},
        {"mtime_ns": None},
        {"mtime_ns": "1"},
    ],
)
def test_a_manifest_with_a_bad_entry_is_not_complete(source: tuple[Path, str], bring: Bring, entry: Any) -> None:
    bring(*source)
    manifest = json.loads((bring.dest / MANIFEST).read_text())
    for name, bad in (("config.json", {**manifest["files"]["config.json"], **entry} if entry else entry), ("\ud800", entry)):
        noted = {**manifest, "files": {**manifest["files"], name: bad}}
        (bring.dest / MANIFEST).write_text(json.dumps(noted))
        assert complete(bring.dest, source[1], []) is None
        assert bring(*source)["files"].keys() == FILES.keys() and complete(bring.dest, source[1], []) is not None


@pytest.mark.parametrize("pin", [None, 5, [H], {"a": 1}])
def test_a_manifest_with_a_pin_of_another_kind(source: tuple[Path, str], bring: Bring, pin: Any) -> None:
    bring(*source)
    manifest = json.loads((bring.dest / MANIFEST).read_text())
    (bring.dest / MANIFEST).write_text(json.dumps({**manifest, "sums_sha256": pin}))
    assert complete(bring.dest, source[1], []) is None


@pytest.mark.parametrize(
    ("missing", "have", "stale", "words"),
    [
        (70e9, 100e9, [], []),
        (0, 2e9, [], []),
        (70e9, 70.5e9, [], ["70.00 GB are missing", "1.07 GB stay free", "71.07 GB", "70.50 GB", "0.57 GB"]),
        # the sum, and what lies there for nothing
        (70e9, 50e9, [("/d/.x.part", 40e9)], ["left over from another revision: /d/.x.part (40.00 GB)", "on /data"]),
    ],
)
def test_space(missing: float, have: float, stale: list[tuple[str, int]], words: list[str]) -> None:
    found = space_problems(Path("/data/d"), int(missing), int(have), "/data", stale)
    assert [p["class"] for p in found] == (["disk_full"] if words else [])
    assert all(word in found[0]["evidence"] + found[0]["remedy"] for word in words)


@pytest.mark.parametrize(
    ("number", "name", "kind"),
    [
        (errno.ENOSPC, "/d/.a.lock", "disk_full"),  # it shows first on a small file
        (errno.EDQUOT, "/d/a", "disk_full"),
        (errno.EROFS, "/d/a", "dest_not_writable"),
        (errno.EACCES, "/d/a", "dest_not_writable"),
        (errno.ENOTDIR, "/d/a", "dest_not_writable"),
        (errno.EIO, "/d/a", "dest_failed"),
    ],
)
def test_errors_of_writing(tmp_path: Path, number: int, name: str, kind: str) -> None:
    found = snapshot.dest_failure(OSError(number, os.strerror(number), name), tmp_path).problems
    assert [p["class"] for p in found] == [kind] and name in found[0]["evidence"]


# --- a folder as source ----------------------------------------------------------------------------------------------------------


def test_a_whole_copy(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    result = bring(folder, pin)
    assert bring.names() == {*FILES, MANIFEST} and all((bring.dest / n).read_bytes() == d for n, d in FILES.items())
    assert set(result["files"]) == set(FILES) and result["resumed_bytes"] == 0
    assert "config.json: missing" in result["before"] and "complete: yes" in result["after"]
    manifest = json.loads((bring.dest / MANIFEST).read_text())
    assert (manifest["sums_sha256"], manifest["revision"], manifest["source"]) == (pin, pin, str(folder))
    assert manifest["files"]["config.json"]["sha256"] == sha(FILES["config.json"]) and manifest["completed_at"].endswith("Z")
    assert complete(bring.dest, pin, [INDEX]) is not None and complete(bring.dest, H, [INDEX]) is None
    assert {p.name: p.stat().st_mtime_ns for p in folder.iterdir()} == before  # the source is never written
    assert oct((bring.dest / "config.json").stat().st_mode)[-3:] == "644"


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (lambda p: p.unlink(), "missing"),
        (lambda p: p.write_bytes(b"half"), "changed"),  # shorter than it should be
        (lambda p: p.write_bytes(p.read_bytes()[::-1]), "changed"),  # same size
        (lambda p: (p.unlink(), p.symlink_to("/etc/hostname")), "link"),
    ],
)
def test_only_the_damaged_file_comes_again(source: tuple[Path, str], bring: Bring, fault: Callable[[Path], Any], state: str) -> None:
    folder, pin = source
    bring(folder, pin)
    kept = (bring.dest / "config.json").stat().st_ino
    fault(bring.dest / "model-00001-of-00002.safetensors")
    assert complete(bring.dest, pin, [INDEX]) is None
    result = bring(folder, pin)
    assert result["before"].splitlines() == ["complete: no", f"model-00001-of-00002.safetensors: {state}"]
    assert (bring.dest / "config.json").stat().st_ino == kept
    assert complete(bring.dest, pin, [INDEX]) is not None


def test_a_touched_file_is_read_not_brought(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    os.utime(bring.dest / "config.json", (1, 1))
    assert complete(bring.dest, pin, []) is None
    assert bring(folder, pin)["before"].splitlines() == ["complete: no"]
    assert complete(bring.dest, pin, []) is not None


def test_a_complete_snapshot_needs_no_source(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    folder.rename(folder.with_name("gone"))
    assert complete(bring.dest, pin, [INDEX]) is not None
    assert bring(folder, pin, verify="full")["before"] == ""


def test_mutable_files_may_change_and_must_exist(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    (bring.dest / INDEX).write_text('{"mended": true}')
    assert complete(bring.dest, pin, [INDEX]) is not None and complete(bring.dest, pin, []) is None
    (bring.dest / "config.json").unlink()
    bring(folder, pin)  # another file is brought; the mended index stays
    assert (bring.dest / INDEX).read_text() == '{"mended": true}'
    bring(folder, pin, verify="full")
    assert (bring.dest / INDEX).read_text() == '{"mended": true}'
    (bring.dest / INDEX).unlink()
    assert complete(bring.dest, pin, [INDEX]) is None
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
    assert complete(bring.dest, pin, [INDEX]) is not None
    result = bring(folder, pin, verify="full")
    assert "model-00001-of-00002.safetensors: damaged" in result["before"] and victim.read_bytes() == FILES[victim.name]
    assert bring(folder, pin, verify="full")["before"] == ""


def test_a_part_is_continued(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    name = "model-00001-of-00002.safetensors"
    bring.dest.mkdir(parents=True)
    part = bring.dest / part_name(name, sha(FILES[name]))
    part.write_bytes(FILES[name][:200_000])
    assert bring(folder, pin)["resumed_bytes"] == 200_000
    assert (bring.dest / name).read_bytes() == FILES[name] and not part.exists()


@pytest.mark.parametrize("part", [b"x" * 400_000, b"wrong start" * 100, FILES["model-00001-of-00002.safetensors"] + b"tail"])
def test_a_wrong_part_is_started_again(source: tuple[Path, str], bring: Bring, part: bytes) -> None:
    folder, pin = source
    name = "model-00001-of-00002.safetensors"
    bring.dest.mkdir(parents=True)
    (bring.dest / part_name(name, sha(FILES[name]))).write_bytes(part)
    assert bring(folder, pin)["resumed_bytes"] == 0
    assert (bring.dest / name).read_bytes() == FILES[name]


def test_a_part_that_is_a_link_is_not_written_through(source: tuple[Path, str], bring: Bring, tmp_path: Path) -> None:
    folder, pin = source
    blob = tmp_path / "blob"
    blob.write_bytes(b"precious")
    bring.dest.mkdir(parents=True)
    for name in FILES:
        (bring.dest / name).symlink_to(blob)
        (bring.dest / part_name(name, sha(FILES[name]))).symlink_to(blob)
    bring(folder, pin)
    assert blob.read_bytes() == b"precious"
    assert not any((bring.dest / n).is_symlink() for n in FILES)


def test_a_part_that_is_a_fifo_is_not_waited_for(source: tuple[Path, str], bring: Bring) -> None:
    bring.dest.mkdir(parents=True)
    os.mkfifo(bring.dest / part_name(MODEL, sha(FILES[MODEL])))
    bring(*source)
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL]


def test_folders_in_the_way_are_all_named(source: tuple[Path, str], bring: Bring) -> None:
    names = ["config.json", MODEL, part_name(INDEX, sha(FILES[INDEX]))]
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
    snapshot._write_all(part, b"0123456789")
    assert part.data == b"0123456789"


def test_links_of_the_source_become_files(source: tuple[Path, str], bring: Bring) -> None:
    """A hub cache: snapshots/<commit>/file -> ../../blobs/<hash>."""
    folder, pin = source
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for name in FILES:
        (folder / name).rename(blobs / name)
        (folder / name).symlink_to(f"../blobs/{name}")
    bring(folder, pin)
    assert not any((bring.dest / n).is_symlink() for n in FILES) and complete(bring.dest, pin, [])


def test_finished_files_of_a_broken_run_are_not_brought_again(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    (folder / "model-00001-of-00002.safetensors").rename(folder / "aside")
    assert bring.failure(folder, pin)["class"] == "source_incomplete"
    assert MANIFEST not in bring.names() and complete(bring.dest, pin, [INDEX]) is None
    (folder / "aside").rename(folder / "model-00001-of-00002.safetensors")


def test_killed_between_files(source: tuple[Path, str], bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are there, the manifest is not; what was finished counts, and nothing passes for complete."""
    folder, pin = source
    real, seen = snapshot.Fetch.file, []

    def file(self: Any, name: str, want: str, before: int) -> Any:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(name)
        return real(self, name, want, before)

    monkeypatch.setattr(snapshot.Fetch, "file", file)
    with pytest.raises(KeyboardInterrupt):
        bring(folder, pin)
    assert complete(bring.dest, pin, [INDEX]) is None and JOURNAL in bring.names()
    monkeypatch.setattr(snapshot.Fetch, "file", real)
    result = bring(folder, pin)
    assert not any(f"{name}:" in result["before"] for name in seen)
    assert result["resumed_bytes"] == sum(len(FILES[n]) for n in seen)
    assert bring.names() == {*FILES, MANIFEST}


def test_files_without_a_note_are_read_before_they_are_trusted(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring.dest.mkdir(parents=True)
    (bring.dest / "config.json").write_bytes(FILES["config.json"])
    (bring.dest / "empty.txt").write_bytes(b"not empty")
    result = bring(folder, pin)
    assert "config.json:" not in result["before"] and "empty.txt: unverified" in result["before"]


def test_another_revision(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin)
    (bring.dest / INDEX).write_text("mended for the old revision")
    (bring.dest / "own.txt").write_text("of the user")
    kept = (bring.dest / "config.json").stat().st_ino
    newer = {"config.json": FILES["config.json"], INDEX: b'{"new": 1}', "model.safetensors": b"new weights"}
    new_pin = fill(folder.parent / "newer", newer)
    (bring.dest / ".x.0123456789ab.part").write_bytes(b"stale")
    assert [p.name for p in stale_parts(bring.dest, dict.fromkeys(newer, H))] == [".x.0123456789ab.part"]
    result = bring(folder.parent / "newer", new_pin)
    # Old shards must go: a loader takes every *.safetensors of the folder.
    assert bring.names() == {*newer, MANIFEST, "own.txt"}
    assert (bring.dest / INDEX).read_bytes() == newer[INDEX] and (bring.dest / "config.json").stat().st_ino == kept
    assert "model-00001-of-00002.safetensors: left over" in result["before"]
    assert complete(bring.dest, pin, [INDEX]) is None and complete(bring.dest, new_pin, [INDEX]) is not None


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
    assert MANIFEST not in bring.names() and complete(bring.dest, pin, []) is None and complete(bring.dest, new_pin, []) is None
    bring(folder, pin)  # and back again
    assert complete(bring.dest, pin, []) is not None and not (bring.dest / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda f: (f / "SHA256SUMS").write_text(f"{H}  config.json\n"), "wrong_revision"),
        (lambda f: (f / "SHA256SUMS").unlink(), "no_sums"),
        (lambda f: (f / "config.json").unlink(), "source_incomplete"),
        (lambda f: ((f / "config.json").unlink(), (f / "config.json").symlink_to("../blobs/gone")), "source_incomplete"),
        (lambda f: (f / "config.json").write_text("other"), "source_damaged"),
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
    monkeypatch.setattr(snapshot, "RESERVE_BYTES", 1 << 60)
    assert bring.failure(folder, pin)["class"] == "disk_full"
    assert bring.names() == {JOURNAL}


def test_a_disk_that_fills_up(source: tuple[Path, str], bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pin = source

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot.os, "fsync", full)
    assert bring.failure(folder, pin)["class"] == "disk_full"


# --- a web server as source ------------------------------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder; `faults` says how it misbehaves."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.asked = folder, {}, []  # type: ignore[var-annotated]
        self.url = f"http://127.0.0.1:{self.server_port}/m"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        faults, name = self.server.faults, self.path.rpartition("/")[2]
        span = self.headers.get("Range")
        self.server.asked.append((self.command, name, span))
        if self.command == "HEAD" and "no_head" in faults:
            return self.send_error(405)
        if codes := faults.get(("status", name)):
            code = codes.pop(0) if len(codes) > 1 else codes[0]
            if code != 200:
                return self.send_error(code)
        path = self.server.folder / name
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        start = int(re.fullmatch(r"bytes=(\d+)-", span)[1]) if span and "no_range" not in faults else 0  # type: ignore[index]
        if start and start >= len(data):
            self.send_response(416)
            if "bare_416" not in faults:
                self.send_header("Content-Range", f"bytes */{len(data)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        self.send_response(206 if start else 200)
        whole = len(data)
        if start:
            data = data[: start + faults.get("at_most", whole)]
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{faults.get('total', whole)}")
        if "no_length" not in faults:
            self.send_header("Content-Length", faults.get("length", str(len(data) - start)))
        self.end_headers()
        if body and "slow" in faults:
            for at in range(start, len(data), 100_000):
                self.wfile.write(data[at : at + 100_000])
                time.sleep(0.05)
        elif body:
            cut = faults.get("cut")
            self.wfile.write(data[start : start + cut] if cut and name.startswith("model-") else data[start:])
        return None


@pytest.fixture
def server(source: tuple[Path, str]) -> Iterator[Server]:
    with Server(source[0]) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


MODEL = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("faults", [{}, {"no_head": True}, {"no_length": True}, {"no_range": True}])
def test_download(source: tuple[Path, str], server: Server, bring: Bring, faults: dict[Any, Any]) -> None:
    server.faults = faults
    bring(server.url + "/", source[1])
    assert all((bring.dest / n).read_bytes() == d for n, d in FILES.items()) and complete(bring.dest, source[1], [])


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
    (bring.dest / part_name(MODEL, sha(FILES[MODEL]))).write_bytes(part)
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
    (bring.dest / part_name(MODEL, sha(FILES[MODEL]))).write_bytes(FILES[MODEL][:part])
    found = bring.failure(server.url, source[1])
    assert found["class"] == "source_unreachable"
    assert f"the server ignores Range and breaks off after {max(part, cut)} of 300000 bytes" in found["evidence"]
    assert bring.pauses == list(snapshot.RETRY_PAUSES_S)


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
    (bring.dest / part_name(MODEL, sha(FILES[MODEL]))).write_bytes(FILES[MODEL][:have])
    result = bring(server.url, source[1])
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL] and bring.pauses == []
    if total != "*":
        assert result["resumed_bytes"] == have


@pytest.mark.parametrize("length", ["\xb2", "-5", "", "3e5", "9" * 5000, "0x10"])
def test_a_length_that_is_no_number_is_not_told(server: Server, source: tuple[Path, str], bring: Bring, length: str) -> None:
    server.faults = {"length": length}
    bring(server.url, source[1])
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL]


def test_a_slow_answer_comes_piece_by_piece(source: tuple[Path, str], server: Server) -> None:
    server.faults = {"slow": True}
    pieces = list(snapshot.open_source(server.url).read(MODEL, 0).chunks)
    assert len(pieces) >= 3 and b"".join(pieces) == FILES[MODEL]


@pytest.mark.parametrize("error", [ConnectionResetError(), http.client.IncompleteRead(b"tail"), http.client.IncompleteRead(b"")])
def test_what_came_before_a_break_is_kept(error: Exception) -> None:
    class Answer(contextlib.nullcontext[None]):
        pieces: ClassVar[list[Any]] = [b"one", b"two", error]

        def read1(self, _most: int) -> Any:
            piece = self.pieces.pop(0)
            if isinstance(piece, Exception):
                raise piece
            return piece

    got = []
    with pytest.raises(snapshot.Interrupted):
        for chunk in snapshot.UrlSource._chunks(Answer()):
            got.append(chunk)  # the error comes after the chunks
    assert b"".join(got) == b"onetwo" + getattr(error, "partial", b"")


def test_a_cut_list_is_asked_for_again(source: tuple[Path, str], server: Server) -> None:
    server.faults = {"length": "5000"}
    with pytest.raises(snapshot.Interrupted, match="of 5000 bytes"):
        snapshot.open_source(server.url).sums()


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
    assert bring.pauses == list(snapshot.RETRY_PAUSES_S)


def test_no_server(source: tuple[Path, str], server: Server) -> None:
    server.shutdown()
    server.server_close()
    away = snapshot.open_source(server.url, patient=False)
    began = time.monotonic()
    with pytest.raises(JobFailure, match="source_unreachable"):
        snapshot.wanted_files(away, source[1], lambda _note: None, server.url)
    assert time.monotonic() - began < 2


def test_an_html_page_instead_of_the_list(source: tuple[Path, str], server: Server, bring: Bring) -> None:
    (server.folder / "SHA256SUMS").write_text("<!DOCTYPE html><title>Sign in</title>")
    assert bring.failure(server.url, source[1])["class"] == "wrong_revision"


def test_plan_is_empty_only_when_all_is_there(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    wanted = parse_sums((folder / "SHA256SUMS").read_text())[0]
    assert set(plan(bring.dest, wanted, [INDEX], pin)) == set(FILES)
    bring(folder, pin)
    assert plan(bring.dest, wanted, [INDEX], pin) == {}
