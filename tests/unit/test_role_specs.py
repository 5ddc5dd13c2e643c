# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Every role says what it takes, and says it once: defaults, argument_specs and dependencies agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = sorted(path for path in (Path(__file__).parents[2] / "roles").iterdir() if path.is_dir())
SHARED = "dgxspark.vllm.vllm"
# Roles that resolve no instance: the shared one itself, and the one that makes the machines of a rehearsal.
WITHOUT_INSTANCE = {"vllm", "rehearsal"}


def read(role: Path, file: str) -> Any:
    path = role / file
    return (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}


def main_spec(role: Path) -> dict[str, Any]:
    """What the role takes. The shared role's entry point is not main, so that Ansible leaves the checking to the action instance."""
    specs = read(role, "meta/argument_specs.yml").get("argument_specs", {})
    found: dict[str, Any] = specs.get("settings" if role.name == "vllm" else "main", {})
    return found


def all_options(options: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Options and their suboptions with their dotted names."""
    for name, option in options.items():
        yield f"{path}{name}", option
        yield from all_options(option.get("options") or {}, f"{path}{name}.")


def has_template(value: object) -> bool:
    text = json.dumps(value)
    return "{{" in text or "{%" in text


@pytest.fixture(params=ROLES, ids=lambda path: path.name)
def role(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_a_role_describes_itself(role: Path) -> None:
    spec = main_spec(role)
    assert spec.get("short_description"), f"roles/{role.name}/meta/argument_specs.yml: short_description is missing"
    assert spec.get("description"), f"roles/{role.name}/meta/argument_specs.yml: description is missing"


def test_defaults_and_specs_have_the_same_names(role: Path) -> None:
    defaults = set(read(role, "defaults/main.yml"))
    options = main_spec(role).get("options") or {}
    optional = {name for name, option in options.items() if "default" in option or not option.get("required")}
    assert defaults - options.keys() == set(), f"roles/{role.name}: in defaults/main.yml, but not in argument_specs"
    assert optional - defaults == set(), f"roles/{role.name}: in argument_specs and not required, but not in defaults/main.yml"
    assert defaults - optional == set(), f"roles/{role.name}: required in argument_specs, but has a default"


def test_defaults_are_equal(role: Path) -> None:
    defaults = read(role, "defaults/main.yml")
    for name, option in (main_spec(role).get("options") or {}).items():
        default = defaults.get(name)
        # An expression may be described in words instead.
        if "default" in option or not has_template(default):
            where = f"roles/{role.name}: {name}"
            assert json.dumps(option.get("default")) == json.dumps(default), f"{where}: argument_specs and defaults/main.yml differ"


def test_options_are_named_typed_and_described(role: Path) -> None:
    for name, option in all_options(main_spec(role).get("options") or {}):
        where = f"roles/{role.name}: {name}"
        assert "." in name or name.startswith(f"{role.name}_"), f"{where}: the name does not begin with the role's"
        assert option.get("description"), f"{where}: has no description"
        assert option.get("type"), f"{where}: has no type"
        # Ansible evaluates the options, descriptions and all, as arguments of the task that checks them.
        assert not has_template(option["description"]), f"{where}: braces in the description are evaluated by Ansible"


def test_a_role_resolves_its_instance_first(role: Path) -> None:
    meta = read(role, "meta/main.yml")
    dependencies = [entry["role"] if isinstance(entry, dict) else entry for entry in meta.get("dependencies") or []]
    if role.name in WITHOUT_INSTANCE:
        assert SHARED not in dependencies
    else:
        assert SHARED in dependencies, f"roles/{role.name}/meta/main.yml: dependencies must name {SHARED}"


def test_a_role_has_tasks(role: Path) -> None:
    tasks = read(role, "tasks/main.yml")
    assert tasks, f"roles/{role.name}/tasks/main.yml is missing or empty"
    assert len(tasks) <= 10, f"roles/{role.name}/tasks/main.yml: more than ten tasks ask to be two files"
