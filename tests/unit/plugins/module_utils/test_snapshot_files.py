# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import (
    MANIFEST,
    PRISTINE,
    STAMPS,
    Book,
    Digests,
    Manifest,
    Request,
    Wanted,
    complete,
    file_state,
    ignored,
    in_the_way,
    known,
    listing_problems,
    parse_manifest,
    part_name,
    patterns,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.sources import Promise
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import FILES, REPO, Bring, fill, git, sha

H = "ab" * 32
G = "cd" * 32
A = "a" * 40


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, str]:
    return tmp_path / "source", fill(tmp_path / "source", FILES)


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    return Bring(tmp_path)


# --- digests and patterns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promise", "word"),
    [
        (Promise(5, sha(b"hello")), ""),
        (Promise(None, sha(b"hello")), ""),
        (Promise(5, "", git(b"hello")), ""),
        (Promise(5, sha(b"hello"), git(b"hello")), ""),
        (Promise(5, H), "SHA-256"),
        (Promise(5, "", A), "git blob"),
        (Promise(4976698672, sha(b"hello")), "5 bytes came, 4976698672 are promised"),
        (Promise(4, "", git(b"hell")), "5 bytes came, 4"),
    ],
)
def test_promises(promise: Promise, word: str) -> None:
    digests = Digests(promise)
    for piece in (b"he", b"", b"llo"):
        digests.update(piece)
    assert (digests.wrong() == "") == (word == "") and word in digests.wrong() and digests.sha256 == sha(b"hello")


def test_git_digests_are_gits() -> None:
    digests = Digests(Promise(6, "", A))
    digests.update(b"hello\n")
    assert digests.git == "ce013625030ba8dba906f756967f9e9ca394464a"  # echo hello | git hash-object --stdin


NAMES = ["a", "a.gguf", "sub/a.gguf", "sub/b/c.txt", "original/x", "model-00001.safetensors", ".gitattributes", "A.GGUF", "x[1].txt"]
PATTERNS = ["*.gguf", "sub/", "sub/*", "original/", "*", "a", "model-?0001*", "*.GGUF", "x[[]1].txt", "none", "sub"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_the_hubs(pattern: str) -> None:
    kept = list(filter_repo_objects(NAMES, ignore_patterns=[pattern]))
    assert [name for name in NAMES if not ignored(name, [pattern])] == kept


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab/.*?[]", min_size=1, max_size=6), max_size=3), st.lists(st.text("ab/.[]", min_size=1, max_size=6), max_size=6))
def test_any_patterns_are_the_hubs(ignore: list[str], names: list[str]) -> None:
    kept = list(filter_repo_objects(names, ignore_patterns=ignore or None))
    assert [name for name in names if not ignored(name, ignore)] == kept


def test_equal_patterns_are_equal_lists() -> None:
    assert patterns(["b", "a ", "", "b"]) == patterns(["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("files", "classes"),
    [
        ({"a": Promise(1, H)}, []),
        ({"a": Promise(1, "", A)}, []),
        ({}, ["nothing_to_bring"]),
        ({"../a": Promise(1, H), "/b": Promise(1, H)}, ["unsafe_name", "unsafe_name"]),
        ({"a": Promise(1, H), "a/b": Promise(1, H)}, ["unsafe_name"]),
        ({"a": Promise(1)}, ["no_digest"]),
        ({"a": Promise(1, "x", "y")}, ["no_digest"]),
        ({"config.json": Promise(0, H)}, ["source_damaged"]),
        ({"config.json": Promise(None, sha(b""))}, ["source_damaged"]),
        ({"config.json": Promise(None, "", git(b""))}, ["source_damaged"]),
        ({"empty.txt": Promise(0, sha(b""))}, []),
    ],
)
def test_lists(files: dict[str, Promise], classes: list[str]) -> None:
    assert [p["class"] for p in listing_problems(files, "there")] == classes


# --- what is there ---------------------------------------------------------------------------------------------------------------


def test_file_states(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"abc")
    (tmp_path / "other").symlink_to("folder")
    (tmp_path / PRISTINE).mkdir()
    for name in ("kept", "void"):
        (tmp_path / name).write_bytes(b"abc" if name == "kept" else b"")
        (tmp_path / PRISTINE / name).write_bytes(b"abcd")
    info = (tmp_path / "a").stat()
    entry = {"size": 3, "mtime_ns": info.st_mtime_ns, "sha256": H}
    h, g, b = Promise(None, H), Promise(None, G), Promise(3, "", A)
    table = [
        ("a", entry, h, False, True, "ok"),
        ("a", entry, h, False, False, "ok"),  # of another revision, and the same file
        ("a", None, h, False, True, "unverified"),
        ("a", entry, g, False, True, "unverified"),
        ("a", {**entry, "size": 4}, h, False, True, "changed"),
        ("a", {**entry, "mtime_ns": 1}, h, False, True, "changed"),
        ("a", {**entry, "mtime_ns": 1}, Promise(3, H), False, True, "changed"),
        ("a", None, Promise(4, H), False, True, "short"),
        ("a", None, Promise(2, H), False, True, "long"),
        ("a", {**entry, "size": 4}, Promise(4, H), False, True, "short"),
        ("a", {**entry, "size": 4}, h, True, True, "changed"),  # mutable, but what was brought is not kept
        ("a", {**entry, "sha256": sha(b"abc"), "mtime_ns": 1}, Promise(None, sha(b"abc")), True, True, "ok"),  # it is what was brought
        ("a", {**entry, "size": 4}, Promise(4, H), True, True, "short"),
        ("kept", {**entry, "size": 4, "sha256": sha(b"abcd")}, Promise(4, sha(b"abcd")), True, True, "ok"),
        ("kept", {**entry, "size": 4, "sha256": sha(b"abcd")}, Promise(4, sha(b"abcd")), False, True, "short"),
        ("kept", {**entry, "size": 4}, Promise(4, H), True, True, "short"),  # another one is kept
        ("void", {**entry, "size": 4, "sha256": sha(b"abcd")}, Promise(4, sha(b"abcd")), True, True, "short"),  # empty is not mended
        ("other/file", entry, h, True, True, "link"),
        ("a", {**entry, "size": 4}, g, True, True, "unverified"),  # but not of another content
        ("a", entry, b, False, True, "ok"),  # a git blob: the note says so only of this revision
        ("a", entry, b, False, False, "unverified"),
        ("none", entry, h, False, True, "missing"),
        ("none", entry, h, True, True, "missing"),
        ("a/below", entry, h, False, True, "missing"),
        ("link", entry, h, False, True, "link"),  # never trusted, never written through
        ("link", entry, h, True, True, "link"),
        ("folder", entry, h, False, True, "link"),
    ]
    for name, noted, want, mutable, same, state in table:
        assert file_state(tmp_path, name, noted, want, mutable, same) == state, (name, noted, want, mutable, same)


def test_names_of_parts() -> None:
    assert part_name("a", Promise(None, H)) == f".a.{H[:12]}.part" and part_name("s/t/a", Promise(1, "", A)) == f"s/t/.a.{A[:12]}.part"


def test_all_that_is_in_the_way_is_named(tmp_path: Path) -> None:
    there = ["config.json", f".m.{H[:12]}.part"]
    for folder in [*there, "fine"]:
        (tmp_path / folder).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/tmp")
    names = ["config.json", "m", "file/x", "file/y/z", "link/x", "fine/x", "new/x"]
    found = in_the_way(tmp_path, {name: Promise(None, H) for name in names})
    assert sorted(p["evidence"].split(" is ")[0] for p in found) == sorted(str(tmp_path / n) for n in [*there, "file", "link"])


# --- the manifest and the notes --------------------------------------------------------------------------------------------------


def test_a_manifest_is_the_same_bytes_everywhere() -> None:
    one = Manifest(REPO, A, "", ["x"], {"b": (2, H), "a": (1, G)})
    two = Manifest(REPO, A, "", ["x"], {"a": (1, G), "b": (2, H)})
    assert one.raw() == two.raw() and parse_manifest(one.raw()) == one and one.sha256 == sha(one.raw())
    assert json.loads(one.raw()) == {
        "format": 1,
        "repo": REPO,
        "revision": A,
        "sums_sha256": "",
        "ignore_patterns": ["x"],
        "files": {"a": {"size": 1, "sha256": G}, "b": {"size": 2, "sha256": H}},
    }
    assert one.raw().startswith(b'{\n "files"') and one.raw().endswith(b"}\n")


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"9" * 5000, b"[" * 100_000, b'{"files": {}}', b'{"files": {"a": 1}}'])
def test_what_is_no_manifest(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(raw)
    assert parse_manifest(raw) is None and known(tmp_path).manifest is None
    assert complete(tmp_path, Request(REPO, A), []) is None


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"sha256": 5},
        {"sha256": "xyz"},
        {"size": "8"},
        {"size": True},
        {"size": -1},
        {"size": 1.5},
        {"size": 10**400},
        {"more": 1},
    ],
)
def test_a_manifest_with_a_bad_entry_is_not_complete(source: tuple[Path, str], bring: Bring, entry: Any) -> None:
    bring(*source)
    manifest = json.loads(bring.manifest())
    for name, bad in (("config.json", {**manifest["files"]["config.json"], **entry} if entry else entry), ("\ud800", entry)):
        noted = {**manifest, "files": {**manifest["files"], name: bad}}
        (bring.dest / MANIFEST).write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n")
        assert not bring.complete(source[1])
        assert bring(*source)["files"].keys() == FILES.keys() and bring.complete(source[1])


@pytest.mark.parametrize("entry", [None, {"mtime_ns": None}, {"mtime_ns": "1"}, {"mtime_ns": -1}, {"size": True}, {"sha256": "x"}])
def test_a_note_that_is_none_is_looked_up(source: tuple[Path, str], bring: Bring, entry: Any) -> None:
    bring(*source)
    stamps = json.loads((bring.dest / STAMPS).read_text())
    kept = (bring.dest / "config.json").stat().st_ino
    stamps["files"]["config.json"] = {**stamps["files"]["config.json"], **entry} if entry else entry
    (bring.dest / STAMPS).write_text(json.dumps(stamps))
    assert not bring.complete(source[1])
    bring(*source)
    assert bring.complete(source[1]) and (bring.dest / "config.json").stat().st_ino == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sums_sha256", None),
        ("sums_sha256", 5),
        ("sums_sha256", [H]),
        ("sums_sha256", H),
        ("repo", 1),
        ("repo", "org/other"),
        ("revision", {}),
        ("revision", H),
        ("asked", None),
        ("ignore_patterns", "x"),
        ("ignore_patterns", ["x"]),
    ],
)
def test_notes_of_something_else(source: tuple[Path, str], bring: Bring, name: str, value: Any) -> None:
    bring(*source)
    stamps = json.loads((bring.dest / STAMPS).read_text())
    (bring.dest / STAMPS).write_text(json.dumps({**stamps, name: value}))
    assert not bring.complete(source[1])
    bring(*source)
    assert bring.complete(source[1])


def test_which_manifest_is_which(source: tuple[Path, str], bring: Bring) -> None:
    folder, pin = source
    bring(folder, pin, revision=A, ignore_patterns=["x"])
    good = {"repo": REPO, "revision": A, "sums_sha256": pin, "ignore_patterns": ["x"]}
    assert complete(bring.dest, Request(**good), []) is not None
    wrong: list[dict[str, Any]] = [
        {"repo": "o/n"},
        {"revision": "b" * 40},
        {"sums_sha256": ""},
        {"sums_sha256": H},
        {"ignore_patterns": []},
    ]
    wrong += [{"manifest_sha256": H}, {"revision": "main", "sums_sha256": ""}]
    for change in wrong:
        assert complete(bring.dest, Request(**{**good, **change}), []) is None, change
    assert complete(bring.dest, Request(REPO, A, "", sha(bring.manifest()), ["x"]), []) is not None
    os.utime(bring.dest / "config.json", (1, 1))
    assert complete(bring.dest, Request(**good), []) is None and complete(bring.dest, Request(**good), ["config.json"]) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["files"]["config.json"].update(sha256=H),
        lambda m: m["files"]["config.json"].update(size=5),
        lambda m: m["files"].pop("config.json"),
        lambda m: m["files"].update(more={"size": 0, "sha256": sha(b"")}),
    ],
)
@pytest.mark.parametrize("which", [MANIFEST, STAMPS])
@pytest.mark.parametrize("gone", [True, False])
def test_a_manifest_and_notes_that_differ(source: tuple[Path, str], bring: Bring, change: Any, which: str, gone: bool) -> None:
    """Nobody knows which is right: it is not complete, and what the source lists decides."""
    bring(*source)
    manifest, value = bring.manifest(), json.loads((bring.dest / which).read_text())
    change(value)
    if "more" in value["files"] and which == STAMPS:
        value["files"]["more"]["mtime_ns"] = 1
    (bring.dest / which).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    if gone:
        (bring.dest / "config.json").unlink()
    assert not bring.complete(source[1])
    bring(*source)
    assert bring.complete(source[1]) and bring.manifest() == manifest
    assert (bring.dest / "config.json").read_bytes() == FILES["config.json"]


def test_notes_are_not_written_for_each_file(tmp_path: Path) -> None:
    """With thousands of files that is quadratic."""
    now = [100.0]
    book = Book(tmp_path, REPO, A, "hub", Wanted(A, "", {}), lambda: now[0])
    book.unfinished({})
    for number, second in enumerate((100.0, 100.5, 100.9, 101.0, 101.5, 101.9)):
        now[0] = second
        book.grown({f"{n}": {"size": n, "sha256": H, "mtime_ns": 1} for n in range(number + 1)})
    assert len(known(tmp_path).files) == 4
