# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The local model hub for tests: `hub` is a running one with an empty root, `fill(hub, repo, files)` makes a repository in it.

Its `faults` take Fault objects, its `requests` tell what was asked; see roles/rehearsal/files/hub_server.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

SERVER = Path(__file__).resolve().parents[2] / "roles/rehearsal/files/hub_server.py"


def _load() -> Any:
    spec = spec_from_file_location("hub_server", SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["hub_server"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


hub_server = sys.modules.get("hub_server") or _load()
Hub, Fault, Request, commit_of, ALWAYS = (
    hub_server.Hub,
    hub_server.Fault,
    hub_server.Request,
    hub_server.commit_of,
    hub_server.ALWAYS,
)


def fill(hub: Any, repo: str, files: Mapping[str, bytes | str], branch: str = "main") -> str:
    """Write files of a repository's branch; returns the commit that it now is at."""
    folder: Path = hub.root / (repo if branch == "main" else f"{repo}@{branch}")
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(commit_of(folder))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Any]:
    """A hub with the root tmp_path/hub on a free port of the loopback address."""
    (tmp_path / "hub").mkdir()
    with Hub(tmp_path / "hub") as running:
        yield running
