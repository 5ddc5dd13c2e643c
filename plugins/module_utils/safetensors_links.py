# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Links among a checkpoint's files: what a container sees of them that has one folder mounted, under a name of its own.

A Hugging Face cache keeps the files in blobs/ and links to them from snapshots/<commit>/: a mount of the snapshot alone has no file at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple

from .problems import Problem, problem
from .safetensors_header import broken_link, shown, some

# What a server reads of a checkpoint. READMEs and pictures may lead where they want.
READ_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")

_MAX_LINKS = 40  # the kernel's own limit of links in one path


class _Leaves(NamedTuple):
    """A link that leads out of what the container sees. places: folders on its way; absolute: a link there begins at the top."""

    name: str
    text: str
    places: tuple[str, ...]
    absolute: bool


def dangling_links(folder: Path, names: Iterable[str]) -> list[Problem]:
    """Links that lead nowhere, among files that a server reads."""
    return [
        broken_link(folder / name, "file")
        for name in names
        if name.endswith(READ_SUFFIXES) and os.path.islink(folder / name) and not os.path.exists(folder / name)
    ]


def invisible_links(folder: Path, names: Iterable[str], root: Path, mount: str) -> list[Problem]:
    """Problems of links that a container does not follow to their end.

    folder: the checkpoint's; names: its files; root: what the container sees of this machine; mount: where it sees that, an absolute path.
    """
    real_root = os.path.realpath(root)
    inside = os.path.relpath(os.path.abspath(folder), os.path.abspath(root))
    if inside == ".." or inside.startswith("../"):
        inside = os.path.relpath(os.path.realpath(folder), real_root)
    if inside == ".." or inside.startswith("../"):
        evidence = f"{shown(folder)} does not lie in {shown(root)}, of which the container is said to see all"
        return [problem("not_in_visible_root", evidence, f"Mount {shown(folder)}, or a folder above it, and give that as visible_root.")]
    if leaves := _walk(real_root, inside, mount):
        return _problems([leaves], root, folder, mount)
    files = [name for name in names if name.endswith(READ_SUFFIXES) and os.path.islink(folder / name)]
    found = [leaves for name in files if (leaves := _walk(real_root, os.path.normpath(f"{inside}/{name}"), mount))]
    return _problems(found, root, folder, mount)


def _walk(root: str, inside: str, mount: str) -> _Leaves | None:
    """Follow a path below the root as the container would. None when it ends inside, or is broken here too."""
    here, todo = root, list(PurePosixPath(inside).parts)
    places, first, links, left, absolute = [root], "", 0, False, False
    while todo:
        part = todo.pop(0)
        if part == "..":
            left = left or here == root  # above the mount the container has folders of its own
            here = os.path.dirname(here)
            places.append(here)
            continue
        if not os.path.islink(f"{here}/{part}"):
            here = os.path.join(here, part)
            continue
        target = PurePosixPath(os.readlink(f"{here}/{part}"))
        places.append(here)
        first, links = first or str(target), links + 1
        if links > _MAX_LINKS:
            return None
        parts = target.parts
        if target.is_relative_to(mount) and not left:
            here, parts = root, target.relative_to(mount).parts
        elif target.is_absolute():
            left = absolute = True
            here, parts = "/", parts[1:]
        todo = [*parts, *todo]
    if not left or not os.path.exists(here):
        return None
    return _Leaves(PurePosixPath(inside).name, first, (*places, os.path.dirname(here)), absolute)


def _problems(found: Iterable[_Leaves], root: Path, folder: Path, mount: str) -> list[Problem]:
    """One problem for all links that the same mount would mend."""
    groups: dict[tuple[str, bool], list[_Leaves]] = {}
    for leaves in found:
        groups.setdefault((os.path.commonpath(leaves.places), leaves.absolute), []).append(leaves)
    problems = []
    for (needed, absolute), group in groups.items():
        links = some([f"{shown(leaves.name)} -> {shown(leaves.text)}" for leaves in group], quote=False)
        evidence = f"the container sees {shown(root)} as {shown(PurePath(mount))}, where these links lead nowhere ({len(group)}): {links}"
        copy = "or let the checkpoint role copy the snapshot's files, which takes content and not links"
        if needed == "/":
            remedy = f"Copy the files with their content (cp -rL {shown(folder)} NEW_FOLDER), {copy}."
        elif absolute:
            remedy = f"The links are absolute: mount {shown(PurePath(needed))} under the very same path, {copy}."
        else:
            place = PurePath(os.path.relpath(os.path.realpath(folder), needed))
            remedy = f"Mount {shown(PurePath(needed))} instead and serve {shown(place)} below it, {copy}."
        problems.append(problem("link_leaves_root", evidence, remedy))
    return problems
