# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which variables belong to a role, and whether their values fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.plugin_utils.role_variables import (
    RoleSpec,
    check_value,
    owner,
    role_specs,
    set_by_user,
    unknown_variables,
)

SPEC = RoleSpec(
    options={
        "vllm_port": {"type": "int"},
        "vllm_host": {"type": "str", "default": "127.0.0.1"},
        "vllm_dirs": {"type": "list", "elements": "int", "default": []},
        "vllm_eager": {"type": "bool", "default": False},
        "vllm_mode": {"type": "str", "choices": ["fast", "safe"], "default": "safe"},
        "vllm_dir": {"type": "path", "default": "/var/lib/x"},
        "vllm_key": {"type": "int", "no_log": True, "default": 0},
        "vllm_share": {"type": "float", "default": 0.5},
        "vllm_map": {"type": "dict", "default": {}, "options": {"a": {"type": "int"}}},
    },
    defaults={"vllm_port": "{{ vllm_instance.port }}", "vllm_host": "127.0.0.1", "vllm_eager": False, "vllm_key": 0, "vllm_dirs": []},
    constants=frozenset({"vllm_units"}),
)
SPECS = {"vllm": SPEC, "vllm_service": RoleSpec({"vllm_service_memlock": {}}, {}, frozenset()), "verify": RoleSpec({}, {}, frozenset())}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("vllm_port", "vllm"),
        ("vllm_service_port", "vllm_service"),
        ("vllm_serviceport", "vllm"),
        ("vllm", None),
        ("vllmport", None),
        ("__vllm_x", None),
        ("ansible_host", None),
        ("verify_", "verify"),
    ],
)
def test_the_longest_role_name_owns_a_variable(name: str, role: str | None) -> None:
    assert owner(name, SPECS) == role


def test_only_names_that_no_role_has_are_unknown() -> None:
    names = [
        "vllm_port",
        "vllm_instance",
        "vllm_units",
        "vllm_prot",
        "vllm_service_port",
        "verify_x",
        "__vllm_prot",
        "other",
        "vllm_service_memlock",
    ]
    found = {p["evidence"].split(":")[0]: p["remedy"] for p in unknown_variables(names, SPECS)}
    assert found.keys() == {"vllm_prot", "vllm_service_port", "verify_x"}
    assert "did you mean vllm_port?" in found["vllm_prot"] and "did you mean vllm_port?" in found["vllm_service_port"]
    assert [p["evidence"] for p in unknown_variables(names, SPECS, ["verify"])] == ["verify_x: the role verify has no such variable"]


def test_a_default_is_not_the_users_value() -> None:
    variables = {
        "vllm_port": "{{ vllm_instance.port }}",
        "vllm_host": "127.0.0.1",
        "vllm_eager": 0,
        "vllm_mode": "safe",
        "vllm_dirs": [1],
        "x": 1,
    }
    assert set_by_user(variables, SPEC) == {"vllm_eager": 0, "vllm_mode": "safe", "vllm_dirs": [1]}


@pytest.mark.parametrize(
    ("name", "value", "result"),
    [
        ("vllm_port", 8000, 8000),
        ("vllm_port", "8000", 8000),
        ("vllm_share", None, None),
        ("vllm_host", "::1", "::1"),
        ("vllm_host", 5, "5"),
        ("vllm_dirs", "1,2", [1, 2]),
        ("vllm_eager", "yes", True),
        ("vllm_dir", "~/$HOME", "~/$HOME"),
        ("vllm_share", "0.5", 0.5),
        ("vllm_map", '{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_gets_the_type_of_its_option(name: str, value: Any, result: Any) -> None:
    assert check_value(name, value, SPEC) == (result, [])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("vllm_port", "abc", "unable to convert to int"),
        ("vllm_port", True, "True where a number belongs"),
        ("vllm_port", 1.5, "unable to convert to int"),
        ("vllm_port", [1], "unable to convert to int"),
        ("vllm_share", False, "False where a number belongs"),
        ("vllm_host", None, "is empty (null)"),
        ("vllm_port", None, "is empty (null)"),
        ("vllm_host", ["127.0.0.1"], "is a list where text belongs"),
        ("vllm_host", {"a": 1}, "is a mapping where text belongs"),
        ("vllm_dir", ["/x"], "is a list where text belongs"),
        ("vllm_dirs", ["a"], "unable to convert to int"),
        ("vllm_eager", "maybe", "unable to convert to bool"),
        ("vllm_mode", "fsat", "must be one of: fast, safe"),
        ("vllm_map", 5, "unable to convert to dict"),
        ("vllm_map", {"b": 1}, "b"),
        ("vllm_key", "hunter2", "not acceptable"),
        ("vllm_key", ["hunter2"], "not acceptable"),
    ],
)
def test_a_value_of_another_type_is_named_and_no_secret_shown(name: str, value: Any, said: str) -> None:
    (found,) = check_value(name, value, SPEC)[1]
    assert found["evidence"].startswith(f"{name}: ") and said in found["evidence"]
    assert "hunter2" not in str(found)


def test_roles_are_read_from_their_folders(tmp_path: Path) -> None:
    for role, file, text in [
        ("a", "meta/argument_specs.yml", "argument_specs: {main: {options: {a_x: {type: int, default: 1}}}}"),
        ("a", "defaults/main.yml", "a_x: 1"),
        ("a", "vars/main.yml", "a_units: [b]"),
        ("b", "meta/argument_specs.yml", "argument_specs: {main: {short_description: nothing to set}}"),
        ("c", "tasks/main.yml", "[]"),
    ]:
        path = tmp_path / role / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert role_specs(tmp_path) == {
        "a": RoleSpec({"a_x": {"type": "int", "default": 1}}, {"a_x": 1}, frozenset({"a_units"})),
        "b": RoleSpec({}, {}, frozenset()),
    }
