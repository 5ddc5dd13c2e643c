# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import hf_cache
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import MANIFEST
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_way import pinned
from snapshots import MODEL, REPO, Bring, cache, git, sha

A, B, C = "a" * 40, "b" * 40, "c" * 40
INDEX = b'{"weight_map": {"x": "model-00001-of-00002.safetensors"}}'
FILES = {"config.json": b'{"a": 1}', "model.safetensors.index.json": INDEX, MODEL: os.urandom(50_000), "sub/x.txt": b"x"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    cache(tmp_path / "hub", A, FILES)
    return tmp_path / "hub"


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    return Bring(tmp_path)


@pytest.mark.parametrize("place", ["", "models--org--name", f"models--org--name/snapshots/{A}", ".."])
def test_places_of_a_cache(root: Path, place: str) -> None:
    found = hf_cache.find(str(root / place), REPO)
    assert found and found.resolve() == root / "models--org--name"


def test_what_is_no_cache(root: Path, tmp_path: Path) -> None:
    assert hf_cache.find(str(root), "org/other") is None
    (root / "models--org--name" / "SHA256SUMS").write_text("")  # it says itself what is in it
    assert hf_cache.find(str(root / "models--org--name"), REPO) is None
    assert hf_cache.find(str(tmp_path / "none"), REPO) is None


@pytest.mark.parametrize("place", ["", ".."])
def test_a_cache_without_the_repository_says_what_it_has(root: Path, place: str) -> None:
    (root / "models--a--b" / "snapshots").mkdir(parents=True)
    (root / "datasets--c--d" / "snapshots").mkdir(parents=True)
    _, found = pinned(A, "", str(root / place))
    assert [p["class"] for p in found] == ["not_in_cache"]
    assert "a/b, org/name" in found[0]["evidence"] and "c/d" not in found[0]["evidence"]


def test_another_folder_is_to_be_pinned(tmp_path: Path) -> None:
    _, found = pinned(A, "", str(tmp_path))
    assert [p["class"] for p in found] == ["no_pin"]


# Commits that are there, refs, what is asked for; the commit, or None and a word of the error.
RESOLVED: list[tuple[list[str], dict[str, str], str, str | None, str]] = [
    ([A], {}, A, A, ""),  # refs/main is absent: a pinned download writes none
    ([A], {"main": A}, A, A, ""),
    ([A], {}, "main", A, ""),  # the only one
    ([A, B], {}, B, B, ""),
    ([A, B], {"main": B}, "main", B, ""),
    ([A, B], {"refs/pr/1": B}, "refs/pr/1", B, ""),
    ([A, B], {}, "main", None, f"{A}, {B}"),
    ([A, B], {"v1": A}, "main", None, f"{A}, {B}"),
    ([A], {}, C, None, A),  # names what is there
    ([A], {"main": C}, "main", None, C),  # a download that was broken off
    ([A, B], {"main": "not a commit"}, "main", None, f"{A}, {B}"),
    ([A, B], {"main": "\xff"}, "main", None, f"{A}, {B}"),
    ([A, B], {}, "../../x", None, f"{A}, {B}"),
    ([], {}, "main", None, "none"),
    ([], {}, A, None, "none"),
]


@pytest.mark.parametrize(("there", "refs", "asked", "commit", "word"), RESOLVED)
def test_which_snapshot(tmp_path: Path, there: list[str], refs: dict[str, str], asked: str, commit: str | None, word: str) -> None:
    folder = tmp_path / "models--org--name"
    for name in [*there, "notes"]:
        (folder / "snapshots" / name).mkdir(parents=True)
    for name, text in refs.items():
        (folder / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / name).write_bytes(text.encode("latin-1"))
    if commit:
        assert hf_cache.resolve(folder, str(folder), REPO, asked) == commit
        return
    with pytest.raises(JobFailure) as caught:
        hf_cache.resolve(folder, str(folder), REPO, asked)
    found = caught.value.problems[0]
    assert found["class"] == "revision_not_found" and word in found["evidence"] and found["remedy"]


def test_the_folder_of_one_snapshot_is_a_choice(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name"
    for commit in (A, B):
        cache(tmp_path, commit, FILES)
    assert hf_cache.resolve(folder, str(folder / "snapshots" / B), REPO, "main") == B
    with pytest.raises(JobFailure, match="the cache of org/name, wanted is org/other"):
        hf_cache.resolve(folder, str(folder), "org/other", A)


def test_a_cache_becomes_a_snapshot_of_files(root: Path, bring: Bring) -> None:
    before = {p: p.lstat().st_mtime_ns for p in root.rglob("*")}
    result = bring(root, revision=A)
    assert result["revision"] == A and bring.complete(revision=A)
    assert all((bring.dest / n).read_bytes() == d and not (bring.dest / n).is_symlink() for n, d in FILES.items())
    assert {p: p.lstat().st_mtime_ns for p in root.rglob("*")} == before  # never written
    assert bring.notes()["config.json"]["sha256"] == sha(FILES["config.json"])  # of a blob that is called by its git digest
    root.rename(root.with_name("gone"))
    assert bring("/gone", revision=A)["before"] == ""


def test_a_branch_stays_what_it_was(root: Path, bring: Bring) -> None:
    (root / "models--org--name" / "refs").mkdir()
    (root / "models--org--name" / "refs" / "main").write_text(A)
    assert "main" in bring(root, revision="main")["notes"][0]
    cache(root, B, {**FILES, "config.json": b"{}"})
    (root / "models--org--name" / "refs" / "main").write_text(B)
    assert bring.complete(revision="main") and bring(root, revision="main")["revision"] == A
    (bring.dest / "sub" / "x.txt").unlink()
    assert bring(root, revision="main")["revision"] == A and (bring.dest / "config.json").read_bytes() == FILES["config.json"]
    assert bring(root, revision=B)["revision"] == B and (bring.dest / "config.json").read_bytes() == b"{}"


def test_blobs_in_a_store_that_repositories_share(root: Path, bring: Bring) -> None:
    blobs = root / "models--org--name" / "blobs"
    (root / "blobs").mkdir()
    (blobs / sha(FILES[MODEL])).rename(root / "blobs" / "00ff")
    (blobs / sha(FILES[MODEL])).symlink_to("../../blobs/00ff")
    bring(root, revision=A)
    assert (bring.dest / MODEL).read_bytes() == FILES[MODEL] and not (bring.dest / MODEL).is_symlink()


def snapshot(root: Path) -> Path:
    return root / "models--org--name" / "snapshots" / A


def blob(root: Path, name: str) -> Path:
    return snapshot(root) / os.readlink(snapshot(root) / name)


def relink(root: Path, name: str, target: str) -> None:
    (snapshot(root) / name).unlink()
    (snapshot(root) / name).symlink_to(target)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (lambda r: blob(r, MODEL).unlink(), "source_incomplete", [MODEL, "../../blobs/", "not there"]),
        (lambda r: (snapshot(r) / MODEL).unlink(), "source_incomplete", [f"lacks {MODEL}"]),
        (lambda r: (snapshot(r) / "config.json").unlink(), "source_incomplete", ["lacks config.json"]),
        (
            lambda r: (blob(r, MODEL).rename(blob(r, MODEL).with_name("77.incomplete")), (snapshot(r) / MODEL).unlink()),
            "source_incomplete",
            ["lacks", "77.incomplete (50000 bytes)"],
        ),
        (lambda r: relink(r, MODEL, "../../blobs/77.incomplete"), "source_incomplete", ["broken off"]),
        (lambda r: relink(r, MODEL, "/etc/hostname"), "no_digest", ["/etc/hostname"]),
        (lambda r: relink(r, MODEL, "../../blobs/short"), "no_digest", ["short"]),
        (lambda r: ((snapshot(r) / MODEL).unlink(), (snapshot(r) / MODEL).write_bytes(b"x")), "no_digest", ["not a link"]),
        (lambda r: blob(r, MODEL).write_bytes(FILES[MODEL][::-1]), "digest_mismatch", [MODEL, sha(FILES[MODEL])]),
        (lambda r: blob(r, "config.json").write_bytes(b"other"), "digest_mismatch", [git(FILES["config.json"])]),
        (lambda r: blob(r, "config.json").write_bytes(b""), "source_damaged", ["config.json is empty"]),
        (lambda r: (snapshot(r) / "dir").symlink_to("/etc"), "no_digest", ["dir"]),
    ],
)
def test_faults_of_a_cache(root: Path, bring: Bring, fault: Callable[[Path], Any], kind: str, words: list[str]) -> None:
    fault(root)
    found = bring.failure(root, revision=A)
    assert found["class"] == kind and all(word in found["evidence"] for word in words) and found["remedy"]
    assert MANIFEST not in (bring.names() if bring.dest.exists() else set())


def test_all_faults_are_told_at_once(root: Path, bring: Bring) -> None:
    blob(root, MODEL).unlink()
    relink(root, "sub/x.txt", "/etc/hostname")
    with pytest.raises(JobFailure) as caught:
        bring(root, revision=A)
    assert {p["class"] for p in caught.value.problems} == {"source_incomplete", "no_digest"}


def test_shards_that_are_left_out_on_purpose_are_not_missed(root: Path, bring: Bring) -> None:
    (snapshot(root) / MODEL).unlink()
    bring(root, revision=A, ignore_patterns=["*.safetensors"])
    assert bring.complete(revision=A, ignore_patterns=["*.safetensors"])


def test_weights_without_an_index(tmp_path: Path, bring: Bring) -> None:
    folder = cache(tmp_path / "hub", A, {"config.json": b"{}"})
    bring(tmp_path / "hub", revision=A)  # a repository may have no weights
    (folder / "blobs" / "77.incomplete").write_bytes(b"x" * 9)
    found = Bring(tmp_path, "other").failure(tmp_path / "hub", revision=A)
    assert found["class"] == "source_incomplete" and "its weights" in found["evidence"] and "77.incomplete (9 bytes)" in found["evidence"]


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        (["model-00001-of-00002.safetensors"], ["model-00002-of-00002.safetensors"]),
        (["model-00002-of-00003.safetensors"], ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"]),
        (["sub/m-00001-of-00002.bin", "m-00001-of-00001.bin"], ["sub/m-00002-of-00002.bin"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], []),
        (["model-1-of-2.safetensors", "x-00001-of-00002"], []),
    ],
)
def test_a_numbered_set_with_gaps_and_no_index(tmp_path: Path, names: list[str], lacking: list[str]) -> None:
    cache(tmp_path, A, {"config.json": b"{}", **{name: name.encode() for name in names}})
    bring = Bring(tmp_path)
    if lacking:
        found = bring.failure(tmp_path, revision=A)
        assert found["class"] == "source_incomplete" and all(name in found["evidence"] for name in lacking)
        assert not any(f"lacks {name}" in found["evidence"] or f", {name}" in found["evidence"] for name in names)
    else:
        assert set(bring(tmp_path, revision=A)["files"]) == {"config.json", *names}
    bring(tmp_path, revision=A, ignore_patterns=lacking)


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json"])
def test_unfinished_downloads_and_no_weights(tmp_path: Path, name: str) -> None:
    folder = cache(tmp_path, A, {"config.json": b"{}", name: b"x"})
    (folder / "blobs" / ("b" * 64 + ".incomplete")).write_bytes(b"half")
    found = Bring(tmp_path).failure(tmp_path, revision=A)
    assert found["class"] == "source_incomplete" and "its weights" in found["evidence"] and ".incomplete" in found["evidence"]
