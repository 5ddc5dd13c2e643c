# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The rehearsal's scripts as modules."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

FILES = Path(__file__).resolve().parents[3] / "roles/rehearsal/files"


@pytest.fixture
def script() -> Callable[[str], Any]:
    """script('engine.py') loads roles/rehearsal/files/engine.py."""

    def load(name: str) -> Any:
        loader = SourceFileLoader(Path(name).stem.replace("-", "_"), str(FILES / name))
        spec = spec_from_loader(loader.name, loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
        return module

    return load
