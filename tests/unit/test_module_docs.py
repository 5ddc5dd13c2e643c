# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Every module documents the options that it takes, with their types, defaults and choices, fragments included."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

PLUGINS = Path(__file__).parents[2] / "plugins"
PACKAGE = "ansible_collections.dgxspark.vllm.plugins"
# The action is all of it; the module holds the documentation.
WITHOUT_CODE = {"instance"}
MODULES = sorted(path.stem for path in (PLUGINS / "modules").glob("*.py") if path.stem not in {"__init__", *WITHOUT_CODE})


class Captured(Exception):
    """The argument spec that a module was made with."""


def argument_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = importlib.import_module(f"{PACKAGE}.modules.{name}")

    def capture(**kwargs: Any) -> NoReturn:
        raise Captured(kwargs["argument_spec"])

    monkeypatch.setattr(module, "AnsibleModule", capture)
    with pytest.raises(Captured) as caught:
        module.main()
    found: dict[str, Any] = caught.value.args[0]
    return found


def documented(name: str) -> dict[str, Any]:
    """The options of a module's documentation, and of its fragments."""
    doc = yaml.safe_load(importlib.import_module(f"{PACKAGE}.modules.{name}").DOCUMENTATION)
    options: dict[str, Any] = dict(doc.get("options") or {})
    for fragment in doc.get("extends_documentation_fragment") or []:
        text = importlib.import_module(f"{PACKAGE}.doc_fragments.{fragment.rpartition('.')[2]}").ModuleDocFragment.DOCUMENTATION
        for option, value in yaml.safe_load(text)["options"].items():
            assert option not in options, f"{name}: {option} is in the module's documentation and in a fragment"
            options[option] = value
    return options


def plain(options: dict[str, Any], sub: str) -> dict[str, Any]:
    """What must agree. sub: where suboptions are."""
    return {
        name: {
            "type": option.get("type", "str"),
            "required": bool(option.get("required", False)),
            "default": option.get("default"),
            "choices": sorted(map(str, option.get("choices") or [])),
            "elements": option.get("elements"),
            "sub": plain(option.get(sub) or {}, sub),
        }
        for name, option in options.items()
    }


@pytest.mark.parametrize("name", MODULES)
def test_a_module_takes_what_it_documents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain(documented(name), "suboptions") == plain(argument_spec(name, monkeypatch), "options")
