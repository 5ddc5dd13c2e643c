# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Links as a container sees them, on real folders: what it can follow, and which folder it would need."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_links import READ_SUFFIXES, dangling_links, invisible_links

NAME = "model.safetensors"
REPO = "cache/models--org--name"
SNAPSHOT = f"{REPO}/snapshots/0123"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A Hugging Face cache with one snapshot, and a folder elsewhere."""
    for folder in (SNAPSHOT, f"{REPO}/blobs", "elsewhere/deep"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / REPO / "blobs" / "0a").write_text("blob")
    (tmp_path / "elsewhere" / "deep" / "file").write_text("far")
    return tmp_path


def look(tree: Path, root: str, links: dict[str, str], folder: str = SNAPSHOT, mount: str = "/model") -> list[Any]:
    """Problems of links (name: target; {tree} stands for the tree's own path) in a folder, seen from a root."""
    for name, target in links.items():
        (tree / folder / name).symlink_to(target.format(tree=tree))
    found = invisible_links(tree / folder, sorted(os.listdir(tree / folder)), tree / root, mount)
    assert all(fault["class"] == "link_leaves_root" and fault["severity"] == "error" for fault in found)
    return [(fault["evidence"], fault["remedy"]) for fault in found]


@pytest.mark.parametrize(
    ("root", "target", "mount"),
    [
        (REPO, "../../blobs/0a", "/model"),
        ("cache", "../../blobs/0a", "/model"),
        (SNAPSHOT, "own.json", "/model"),
        (SNAPSHOT, "./sub/../own.json", "/model"),
        # Absolute, where the container has the same path, or where the link is made for the container's.
        (REPO, "{tree}/" + REPO + "/blobs/0a", "{tree}/" + REPO),
        ("", "{tree}/elsewhere/deep/file", "{tree}"),
    ],
)
def test_links_that_a_container_can_follow(tree: Path, root: str, target: str, mount: str) -> None:
    (tree / SNAPSHOT / "own.json").write_text("{}")
    (tree / SNAPSHOT / "sub").mkdir()
    assert look(tree, root, {NAME: target}, mount=mount.format(tree=tree)) == []


def test_a_link_that_is_made_for_the_container_is_followed_there(tree: Path) -> None:
    """Here it leads nowhere, which is said elsewhere."""
    assert look(tree, REPO, {NAME: "/model/blobs/0a"}) == []


@pytest.mark.parametrize(
    ("root", "target", "needed", "absolute"),
    [
        # The snapshot alone, as it lies in a cache: relative links into blobs.
        (SNAPSHOT, "../../blobs/0a", REPO, False),
        (f"{REPO}/snapshots", "../../blobs/0a", REPO, False),
        # Out of the cache.
        (REPO, "../../../../elsewhere/deep/file", "", False),
        (SNAPSHOT, "../../../../elsewhere/deep/file", "", False),
        # Absolute: below the root or not, the container has the root in another place.
        (REPO, "{tree}/" + REPO + "/blobs/0a", REPO, True),
        (SNAPSHOT, "{tree}/" + REPO + "/blobs/0a", REPO, True),
        (REPO, "{tree}/elsewhere/deep/file", "", True),
        # Out and in again: above its mount the container has folders of its own.
        (REPO, "../../../models--org--name/blobs/0a", "cache", False),
        # In chains: the first stays inside, a later one does not.
        (REPO, "../chain-relative", "", False),
        (REPO, "../chain-absolute", "", True),
        (REPO, "{tree}/" + REPO + "/snapshots/chain-relative", "", True),
        # Through a folder that is a link.
        (REPO, "../folder/file", "", False),
    ],
)  # fmt: skip
def test_links_that_lead_out(tree: Path, root: str, target: str, needed: str, absolute: bool) -> None:
    snapshots = tree / REPO / "snapshots"
    (snapshots / "chain-relative").symlink_to("../../../elsewhere/deep/file")
    (snapshots / "chain-absolute").symlink_to(tree / "elsewhere" / "deep" / "file")
    (snapshots / "folder").symlink_to("../../../elsewhere/deep")
    ((evidence, remedy),) = look(tree, root, {NAME: target})
    folder = str(tree / needed).rstrip("/")
    assert f"sees {tree / root} as /model" in evidence and f"(1): {NAME} -> {target.format(tree=tree)}" in evidence
    if absolute:
        assert f"mount {folder} under the very same path" in remedy
    else:
        assert f"Mount {folder} instead and serve {(tree / SNAPSHOT).relative_to(tree / needed)} below it" in remedy
    # It is true: with that mount, at that path where it has to be, nothing is left to say.
    found = invisible_links(tree / SNAPSHOT, [NAME], tree / needed, folder if absolute else "/other")
    assert found == []


def test_all_files_that_a_server_reads_in_one_problem(tree: Path) -> None:
    names = [f"file{number}{suffix}" for number, suffix in enumerate(READ_SUFFIXES)]
    links = dict.fromkeys([*names, "README.md", "picture.png"], "../../blobs/0a")
    ((evidence, _),) = look(tree, SNAPSHOT, {**links, "config.json": "../../blobs/0a", "model.safetensors.index.json": "../../blobs/0a"})
    assert f"({len(names) + 2}): " in evidence and "README" not in evidence and "picture" not in evidence
    assert "config.json" in evidence


def test_links_to_different_places_are_told_apart(tree: Path) -> None:
    links = {"a.json": "../../blobs/0a", "b.json": "{tree}/elsewhere/deep/file", "c.json": "../../../../elsewhere/deep/file"}
    found = look(tree, SNAPSHOT, links)
    assert [evidence.split("): ")[1].split(" ->")[0] for evidence, _ in found] == ["a.json", "b.json", "c.json"]


@pytest.mark.parametrize("target", ["nowhere", "../../blobs/absent", "/absent", "model.safetensors", "{tree}/absent", "../../../../x/../y"])
def test_a_broken_link_is_not_said_to_lead_out(tree: Path, target: str) -> None:
    assert look(tree, SNAPSHOT, {NAME: target}) == []
    assert [fault["class"] for fault in dangling_links(tree / SNAPSHOT, [NAME])] == ["file_broken_link"]


def test_what_only_the_whole_machine_holds_is_to_be_copied(tree: Path) -> None:
    ((_, remedy),) = look(tree, SNAPSHOT, {NAME: "/etc/passwd"})
    assert remedy.startswith(f"Copy the files with their content (cp -rL {tree / SNAPSHOT} NEW_FOLDER)")


def test_a_folder_that_is_itself_behind_a_link(tree: Path) -> None:
    (tree / "current").symlink_to(SNAPSHOT)
    (tree / SNAPSHOT / NAME).symlink_to("../../blobs/0a")
    # Docker mounts what the link leads to.
    (fault,) = invisible_links(tree / "current", [NAME], tree / "current", "/model")
    assert f"Mount {tree / REPO} instead and serve snapshots/0123 below it" in fault["remedy"]
    assert invisible_links(tree / "current", [NAME], tree / REPO, "/model") == []
    # A link to the checkpoint inside of what is mounted.
    (tree / REPO / "main").symlink_to("snapshots/0123")
    assert invisible_links(tree / REPO / "main", [NAME], tree / REPO, "/model") == []
    (tree / REPO / "away").symlink_to(tree / "elsewhere" / "deep")
    (fault,) = invisible_links(tree / REPO / "away", [], tree / REPO, "/model")
    assert fault["class"] == "link_leaves_root" and f"away -> {tree / 'elsewhere' / 'deep'}" in fault["evidence"]


@pytest.mark.parametrize("root", ["elsewhere", f"{REPO}/blobs", f"{REPO}/snapshots/0124"])
def test_a_root_that_does_not_hold_the_checkpoint(tree: Path, root: str) -> None:
    (fault,) = invisible_links(tree / SNAPSHOT, [], tree / root, "/model")
    assert fault["class"] == "not_in_visible_root" and str(tree / root) in fault["evidence"]


def test_relative_paths(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "cache")
    (tree / SNAPSHOT / NAME).symlink_to("../../blobs/0a")
    here = Path("models--org--name")
    assert invisible_links(here / "snapshots" / "0123", [NAME], here, "/model") == []
    assert invisible_links(here / "snapshots" / "0123", [NAME], Path("."), "/model") == []
    assert len(invisible_links(here / "snapshots" / "0123", [NAME], here / "snapshots", "/model")) == 1


@pytest.mark.parametrize("name", ["a\nb.json", "a\rERROR x: y.json", "a\x1b[2J.json", "a\u202e.json", os.fsdecode(b"a\xff.json")])
@pytest.mark.parametrize("target", ["nowhere", "no\nwhere", "../../blobs/\n0a"])
def test_names_of_links_do_not_break_a_message(tree: Path, name: str, target: str) -> None:
    (tree / SNAPSHOT / name).symlink_to(target)
    (fault,) = dangling_links(tree / SNAPSHOT, [name])
    assert fault["evidence"].isprintable() and fault["evidence"].startswith(json.dumps(name))


@pytest.mark.parametrize("folder", ["out\nside", "out\x1bside", "x" * 250])
def test_folders_of_links_do_not_break_a_message_and_are_told_whole(tree: Path, folder: str) -> None:
    (tree / folder / "model").mkdir(parents=True)
    (tree / folder / "file").touch()
    (tree / folder / "model" / "a\nb.json").symlink_to("../file")
    (fault,) = invisible_links(tree / folder / "model", ["a\nb.json"], tree / folder / "model", "/model")
    shown = str(tree / folder) if folder.isprintable() else json.dumps(str(tree / folder))
    assert (fault["evidence"] + fault["remedy"]).isprintable() and shown in fault["remedy"]
    (fault,) = invisible_links(tree / folder, [], tree / SNAPSHOT, "/model")
    assert (fault["evidence"] + fault["remedy"]).isprintable() and shown in fault["remedy"]
