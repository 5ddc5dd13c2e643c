# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The classifier as a module: from text, a file or a unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dgxspark.vllm.plugins.modules import log_diagnosis
from fake_node import FakeNode

FAULT = "OSError: [Errno 28] No space left on device"


def test_from_text(run_module: Any) -> None:
    result = run_module(log_diagnosis.main, {"text": f"Loading weights took 1 s\n{FAULT}\n"})
    assert [d["class"] for d in result["diagnoses"]] == ["disk_full"]
    assert set(result["diagnoses"][0]) == {"class", "evidence", "remedy", "retryable"}
    assert (result["changed"], result["stage"], result["lines"]) == (False, "loading weights", 2)


@pytest.mark.parametrize("check", [False, True])
def test_from_a_file(run_module: Any, tmp_path: Path, check: bool) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe odd\r\n" + FAULT.encode())
    assert run_module(log_diagnosis.main, {"path": str(path)}, check=check)["diagnoses"][0]["class"] == "disk_full"


def test_only_the_last_lines(run_module: Any) -> None:
    assert run_module(log_diagnosis.main, {"text": f"{FAULT}\nfine\nfine", "max_lines": 2})["diagnoses"] == []


@pytest.mark.parametrize("path", ["/nonexistent/log", "/"])
def test_a_file_that_cannot_be_read(run_module: Any, path: str) -> None:
    result = run_module(log_diagnosis.main, {"path": path})
    assert result["failed"] is True
    assert path in result["msg"]


def test_from_a_unit(run_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(active="failed")
    monkeypatch.setattr(AnsibleModule, "run_command", lambda self, args, **kwargs: node.run_command(self, args, **kwargs))
    result = run_module(log_diagnosis.main, {"unit": "vllm"})
    assert "holds nothing of vllm.service" in result["msg"]
    node.log(FAULT)
    assert run_module(log_diagnosis.main, {"unit": "vllm"})["diagnoses"][0]["class"] == "disk_full"


@pytest.mark.parametrize("args", [{}, {"text": "a", "unit": "b"}])
def test_one_source_and_no_other(run_module: Any, args: dict[str, str]) -> None:
    assert run_module(log_diagnosis.main, args)["failed"] is True
