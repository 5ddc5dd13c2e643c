# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Finished snapshot folders for tests, written by hand as hf_snapshot leaves them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

MANIFEST = ".dgxspark-snapshot.json"
STAMPS = ".dgxspark-snapshot.stamps.json"


def finished(folder: Path, files: Mapping[str, bytes], revision: str = "a" * 40) -> str:
    """Write the files, their stamps and the manifest; returns the manifest's SHA-256."""
    listed, stamps = {}, {}
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        listed[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        stamps[name] = {**listed[name], "mtime_ns": path.stat().st_mtime_ns}
    manifest = {"format": 1, "repo": "org/name", "revision": revision, "sums_sha256": "", "ignore_patterns": [], "files": listed}
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    (folder / STAMPS).write_text(json.dumps({"files": stamps, "source": "hub"}))
    (folder / MANIFEST).write_text(text)
    return hashlib.sha256(text.encode()).hexdigest()
