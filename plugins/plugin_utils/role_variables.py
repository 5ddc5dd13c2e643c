# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The variables that the collection's roles take, checked for all roles at once before any of them runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from ..module_utils.problems import Problem, problem
from ..module_utils.recipes import did_you_mean
from ..module_utils.vllm_argv import show

COLLECTION = Path(__file__).parents[2]
# Registered by the role vllm for the other roles; not for users to set.
RESULTS = frozenset({"vllm_instance"})


class RoleSpec(NamedTuple):
    """What a role takes: its options, its defaults as they are written, and the names of its constants."""

    options: dict[str, dict[str, Any]]
    defaults: dict[str, Any]
    constants: frozenset[str]


def read_yaml(path: Path) -> Any:
    """The data in one of the collection's own files; an empty mapping if there is no such file."""
    return (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}


def role_specs(roles: Path = COLLECTION / "roles") -> dict[str, RoleSpec]:
    """The roles in a folder that say what they take, by name."""
    specs = {}
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        folder = path.parents[1]
        entry_points = (read_yaml(path).get("argument_specs") or {}).values()
        options = {name: option for entry in entry_points for name, option in (entry.get("options") or {}).items()}
        specs[folder.name] = RoleSpec(options, read_yaml(folder / "defaults/main.yml"), frozenset(read_yaml(folder / "vars/main.yml")))
    return specs


def owner(variable: str, roles: Iterable[str]) -> str | None:
    """The role that a variable belongs to by its name: the longest role name that the variable begins with."""
    return max((role for role in roles if variable.startswith(f"{role}_")), key=len, default=None)


def unknown_variables(names: Iterable[str], specs: Mapping[str, RoleSpec], roles: Iterable[str] | None = None) -> list[Problem]:
    """A problem for each name that looks like a variable of one of these roles (None: all) and is none.

    specs: always of all roles, as vllm_service_x does not belong to the role vllm.
    """
    found = []
    checked = set(specs if roles is None else roles)
    every_option = {option for spec in specs.values() for option in spec.options}
    for name in sorted(names):
        role = owner(name, specs)
        if role not in checked or role is None or name in RESULTS or name in every_option or name in specs[role].constants:
            continue
        # The right name may be another role's: vllm_service_port means vllm_port.
        tail = name.removeprefix(f"{role}_")
        namesakes = sorted(f"{other}_{tail}" for other in specs if f"{other}_{tail}" in every_option)
        likely = f"did you mean {' or '.join(namesakes)}?" if namesakes else did_you_mean(name, specs[role].options, brief=True)
        remedy = f"{likely} A variable of your own needs another prefix."
        found.append(problem("unknown_variable", f"{name}: the role {role} has no such variable", remedy))
    return found


def set_by_user(variables: Mapping[str, Any], spec: RoleSpec) -> dict[str, Any]:
    """Those of a role's variables that are not the role's own default, unevaluated."""
    found = {}
    for name in spec.options:
        default = spec.defaults.get(name)
        # Comparing types first leaves encrypted values alone, which are of a type of their own.
        if name in variables and not (name in spec.defaults and isinstance(variables[name], type(default)) and variables[name] == default):
            found[name] = variables[name]
    return found


def check_value(name: str, value: Any, spec: RoleSpec) -> tuple[Any, list[Problem]]:
    """An option's value in the type that its role asks for, and what is wrong with it. A secret is never quoted.

    Stricter than Ansible, which turns a list into its text, true into 1, and takes an empty YAML value for a variable that is not set.
    A path stays as it is, as it is one on the node.
    """
    option = {key: item for key, item in spec.options[name].items() if key not in ("required", "default", "no_log")}
    secret = bool(spec.options[name].get("no_log"))
    wanted = option.get("type", "str")
    seen = "its value" if secret else show(value)
    remedy = f"set it to a value of type {wanted}"
    flaw = ""
    if value is None:
        if spec.defaults.get(name) is None:
            return None, []
        flaw, remedy = "is empty (null)", "give it a value, or remove the variable"
    elif wanted in ("str", "path") and isinstance(value, (Mapping, list)):
        flaw = f"{seen} is a {'mapping' if isinstance(value, Mapping) else 'list'} where text belongs"
    elif wanted in ("int", "float") and isinstance(value, bool):
        flaw = f"{seen} where a number belongs"
    if flaw:
        return value, [problem("variable_type", f"{name}: {flaw}", remedy)]
    if wanted == "path":
        option["type"] = "str"
    result = ArgumentSpecValidator({name: {key: item for key, item in option.items() if key != "options"}}).validate({name: value})
    if "options" in option and not result.error_messages:  # Ansible's validator looks into a value of the wrong type, and falls
        result = ArgumentSpecValidator({name: option}).validate({name: value})
    messages = ["the value is not acceptable"] if secret and result.error_messages else result.error_messages
    if option.get("choices"):
        remedy = f"set it to one of: {', '.join(map(str, option['choices']))}"
    return result.validated_parameters[name], [problem("variable_type", f"{name}: {message}", remedy) for message in messages]
