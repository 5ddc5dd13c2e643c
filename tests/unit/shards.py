# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""safetensors files for tests, with tensors in any order, and what the safetensors library reads from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import deserialize

Raw = tuple[str, list[int], bytes]  # dtype, shape, bytes
INDEX = "model.safetensors.index.json"


def write(path: Path, tensors: Mapping[str, Raw], order: Iterable[str] = (), metadata: Any = None, spaces: int = 0) -> None:
    """Write a file whose data lies in `order`, with any number of spaces behind the header."""
    names = [*order] or [*tensors]
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name in names:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = (
        json.dumps({name: header[name] for name in sorted(header, key=lambda n: hashlib.md5(n.encode()).digest())}).encode() + b" " * spaces
    )
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(tensors[name][2] for name in names))


def library(path: Path) -> dict[str, Raw]:
    """Every tensor of a file, as the safetensors library finds it."""
    return {name: (value["dtype"], list(value["shape"]), bytes(value["data"])) for name, value in deserialize(path.read_bytes())}


def header(path: Path) -> dict[str, Any]:
    """A file's header as JSON."""
    with path.open("rb") as stream:
        value: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return value


def contents(folder: Path) -> dict[str, dict[str, Raw]]:
    """Of every shard in a folder its tensors."""
    return {path.name: library(path) for path in sorted(folder.glob("*.safetensors"))}


def by_index(folder: Path) -> dict[str, Raw]:
    """Every tensor from the file that the index names."""
    files = contents(folder)
    return {name: files[file][name] for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}


def tree(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Every file below a folder: inode, time of change, digest of its bytes (links followed)."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            info = path.stat()
            found[path.relative_to(folder).as_posix()] = (info.st_ino, info.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
    return found
