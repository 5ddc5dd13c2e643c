# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What every unit test of a module needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible.module_utils import _internal
from ansible.module_utils.common import warnings
from ansible.module_utils.testing import patch_module_args
from hub import hub  # noqa: F401 -- a fixture

ModuleRunner = Callable[..., dict[str, Any]]


@pytest.fixture
def run_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> ModuleRunner:
    """Run a module's main() in this process with arguments as Ansible passes them; returns its JSON result."""

    def run(main: Callable[[], None], args: dict[str, Any], *, check: bool = False, diff: bool = True) -> dict[str, Any]:
        capsys.readouterr()
        # On a node there is no controller code and nothing was said before; here other tests may have imported and said it.
        monkeypatch.setattr(_internal, "is_controller", False)
        monkeypatch.setattr(warnings, "_global_warnings", {})
        with patch_module_args({**args, "_ansible_check_mode": check, "_ansible_diff": diff}), pytest.raises(SystemExit):
            main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return run
