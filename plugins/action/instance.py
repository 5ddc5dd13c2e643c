# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a host serves, resolved on the controller from inventory and recipe."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

from ..module_utils.hybrid import ONLINE_ENGINE_ARGS
from ..module_utils.problems import Problem, describe, errors, problem
from ..module_utils.recipes import OVERRIDES, RecipeError, deep_merge, did_you_mean, find_recipes, load_recipe
from ..module_utils.unit import docker_args_problems
from ..module_utils.vllm_argv import check_environment, engine_argv, plain, show
from ..plugin_utils.role_variables import COLLECTION, RoleSpec, check_value, role_specs, set_by_user, unknown_variables

DEFAULT_PORT = 8000
# Where the service mounts the checkpoint.
MODEL = "/model"
# A name that systemd, docker and a shell all take without quotes.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
# A colon would end the path in a docker volume.
FOLDER = re.compile(r"(/[A-Za-z0-9_.+@=-]+)+")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
# What fits into an HTTP header and a line of an environment file.
API_KEY = re.compile(r"[\x21-\x7e]+")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. A name other than localhost may mean anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_address(host: str) -> bool:
    """Whether a server can be told to listen on it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(HOST.fullmatch(host))
    return True


def recipe_folders(dirs: list[str], start: Path, shipped: Path) -> tuple[list[Path], list[Problem]]:
    """The folders to look for recipes in, and those that are not there."""
    own = [start / Path(folder).expanduser() for folder in dirs]
    remedy = "make the folder, or correct the path; a relative path starts at the inventory's folder"
    found = [problem("recipe_dirs", f"vllm_recipe_dirs: {folder} is no folder", remedy) for folder in own if not folder.is_dir()]
    return [*own, shipped], found


def check_settings(settings: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the values of the role vllm, beyond their types. settings: without the prefix; None where not set."""
    found = []
    if not NAME.fullmatch(settings["name"]) or settings["name"].endswith(".service"):
        remedy = "use letters, digits, dots, dashes and underscores, without .service at the end"
        found.append(problem("bad_name", f"vllm_name: {show(settings['name'])} cannot name a unit and a container", remedy))
    for key in ("state_dir", "checkpoint_dir", "image_manifest"):
        path = settings[key]
        if path is not None and (not FOLDER.fullmatch(path) or ".." in path.split("/")):
            remedy = "give an absolute path of letters, digits and ._+@=- without a slash at the end"
            found.append(problem("bad_path", f"vllm_{key}: {show(path)} cannot be mounted into a container", remedy))
    port = settings["port"]
    if port is not None and not 1 <= port <= 65535:
        found.append(problem("bad_port", f"vllm_port: {port} is no port", "give a number from 1 to 65535"))
    return found + check_exposure(settings["host"], settings["api_key"])


def check_exposure(host: str, api_key: str | None) -> list[Problem]:
    """Who can reach the server, and what with. The key itself is never in a message; None: there is one that cannot be read."""
    found = []
    if not is_address(host):
        found.append(problem("bad_host", f"vllm_host: {show(host)} is no address", "give an address of the host, or 127.0.0.1"))
    if api_key and not API_KEY.fullmatch(api_key):
        evidence = "vllm_api_key holds a blank, a line end or a character that no HTTP header can carry"
        found.append(problem("bad_api_key", evidence, "use printable ASCII characters without blanks"))
    if api_key == "" and not is_loopback(host):
        evidence = f"vllm_host is {show(host)} and vllm_api_key is not set: whoever reaches the port may use the server"
        found.append(problem("open_server", evidence, "set vllm_api_key (in a vault), or leave vllm_host at 127.0.0.1"))
    return found


def check_support(recipe_name: str, recipe: Mapping[str, Any]) -> list[Problem]:
    """What a recipe asks for and this release cannot do."""
    found = []
    if recipe["nodes"] != 1:
        evidence = f"recipe {recipe_name} needs {recipe['nodes']} nodes; this release serves single-node recipes"
        found.append(problem("unsupported_nodes", evidence, "set vllm_recipe to a recipe with nodes: 1"))
    if recipe["runtime"] != "docker":
        evidence = f"recipe {recipe_name} has the runtime {recipe['runtime']}; this release serves from containers"
        found.append(problem("unsupported_runtime", evidence, "set runtime: docker"))
    return found


def short_revision(revision: str) -> str:
    """A revision as part of a folder's name."""
    return revision.replace("/", "-")[:12]


def peer_of(host: str, groups: Mapping[str, Sequence[str]], recipes: Mapping[str, Any]) -> str:
    """The host that a host takes its checkpoint from: the first of its cluster, if both serve the same recipe; '' for none.

    groups: hosts by group, in the inventory's order; a host's cluster is its smallest group that holds nothing but vllm_instances.
    recipes: the name of each host's recipe.
    """
    instances = set(groups.get("vllm_instances", ()))
    clusters = [hosts for hosts in groups.values() if host in hosts and instances.issuperset(hosts)]
    head = min(clusters, key=len, default=[host])[0]
    return head if head != host and recipes.get(head) == recipes.get(host) else ""


def build_instance(recipe_name: str, recipe: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved instance. settings: as for check_settings."""
    arguments = {name: value for name, value in recipe["engine_args"].items() if name != "port"}
    port = settings["port"] or recipe["engine_args"].get("port", DEFAULT_PORT)
    checkpoint = recipe["checkpoint"]
    if checkpoint["hybrid"] == "online":
        arguments = deep_merge(ONLINE_ENGINE_ARGS, arguments)
    folder = f"checkpoints/{checkpoint['repo'].replace('/', '--')}/{short_revision(checkpoint['revision'])}"
    snapshot = f"{settings['state_dir']}/{folder}"
    made = checkpoint["hybrid"] in ("materialize", "overlay")
    served = f"{snapshot}-{checkpoint['hybrid']}-{short_revision(checkpoint['donor_revision'])}" if made else snapshot
    return {
        "name": settings["name"],
        "recipe_name": recipe_name,
        "recipe": recipe,
        "argv": ["serve", MODEL, *engine_argv(arguments), "--host", settings["host"], "--port", str(port)],
        "environment": recipe["environment"],
        "host": settings["host"],
        "port": port,
        "checkpoint_dir": settings["checkpoint_dir"] or served,
        "snapshot_folder": folder,
        "snapshot_dir": snapshot if made else settings["checkpoint_dir"] or snapshot,
        "image_manifest": settings["image_manifest"] or f"{settings['state_dir']}/images/{recipe['image']['profile']}.json",
    }


def check_leak(value: object, api_key: str | None, where: str = "the recipe or of its overrides") -> list[Problem]:
    """Whether the key got into what everybody may see, as part of another option, named by `where`."""
    if not api_key or len(api_key) < 8 or not any(form in text for text in texts_in(value) for form in key_forms(api_key)):
        return []
    evidence = f"the value of vllm_api_key is also part of {where}, which others may read"
    return [problem("api_key_leak", evidence, "take it out there: the server gets the key without it")]


def key_forms(api_key: str) -> set[str]:
    """A key as it is, and as it stands in JSON and in a quoted text of Python."""
    return {api_key, json.dumps(api_key)[1:-1], repr(api_key)[1:-1]}


def texts_in(value: object) -> Iterator[str]:
    """Every text in a value, keys included, and numbers as text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from (*texts_in(key), *texts_in(item))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts_in(item)
    else:
        yield str(value)


def check_service(values: Mapping[str, Any], api_key: str | None) -> list[Problem]:
    """What is wrong with the service's own environment and docker options. No value of either is in a message."""
    found: list[Problem] = []
    checks = {
        "vllm_service_environment": lambda value: check_environment(value, "vllm_service_environment")[1],
        # The service's module warns of the rest.
        "vllm_service_docker_args": lambda value: errors(docker_args_problems(value)),
    }
    for name, check in checks.items():
        if name in values:
            found += check_leak(values[name], api_key, name) + check(values[name])
    return found


def without_key(found: list[Problem], api_key: str | None) -> list[Problem]:
    """Problems in which nothing that was quoted shows the key."""
    if not api_key or len(api_key) < 8:
        return found
    result = []
    for flaw in found:
        evidence, remedy = flaw["evidence"], flaw["remedy"]
        for form in sorted(key_forms(api_key), key=len, reverse=True):
            evidence, remedy = evidence.replace(form, "(vllm_api_key)"), remedy.replace(form, "(vllm_api_key)")
        result.append(problem(flaw["class"], evidence, remedy, flaw["severity"]))
    return result


class ActionModule(ActionBase):
    """Resolve the instance of a host."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _supports_diff = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec({"roles": {"type": "list", "elements": "str", "default": []}})
        self._variables = task_vars or {}
        self._problems: list[Problem] = []
        self._flawed: set[str] = set()

        specs = role_specs()
        roles = [role for role in arguments["roles"] or specs if self._is_role(role, specs)]
        self._problems += unknown_variables(self._variables, specs, roles)
        settings = self._settings(specs["vllm"])
        instance = self._instance(settings)
        for role in roles:
            if role != "vllm":
                values = self._values(specs[role], instance)
                if role == "vllm_service":
                    self._problems += check_service(values, settings["api_key"])
        self._problems = without_key(self._problems, settings["api_key"])

        if self._problems:
            host = self._variables.get("inventory_hostname", "this host")
            headline = f"{len(self._problems)} problem(s) in the settings of {host}; nothing was changed:"
            return {**result, "failed": True, "msg": describe(self._problems, headline), "problems": self._problems}
        return {**result, "changed": False, **(instance or {}), "peer": self._peer()}

    def _peer(self) -> str:
        """From the inventory alone, which also holds the hosts that a limit leaves out."""
        host, hostvars = self._variables.get("inventory_hostname", ""), self._variables.get("hostvars") or {}
        groups = self._variables.get("groups") or {}
        names = groups.get("vllm_instances", ())
        recipes = {name: hostvars[name].get("vllm_recipe") for name in names if name in hostvars}
        return peer_of(host, groups, recipes)

    def _is_role(self, role: str, specs: Mapping[str, RoleSpec]) -> bool:
        if role not in specs:
            self._problems.append(problem("unknown_role", f"roles: no role {show(role)}", did_you_mean(role, specs)))
        return role in specs

    def _settings(self, spec: RoleSpec) -> dict[str, Any]:
        """The shared settings without their prefix; the role's default in the place of a bad one, None for one that follows from others."""
        defaults = {name: None if isinstance(value, str) and "{{" in value else value for name, value in spec.defaults.items()}
        values = defaults | self._values(spec, None)
        if "vllm_api_key" in self._flawed:
            values["vllm_api_key"] = None
        settings = {name.removeprefix("vllm_"): value for name, value in values.items()}
        self._problems += check_settings(settings)
        return settings

    def _values(self, spec: RoleSpec, instance: dict[str, Any] | None) -> dict[str, Any]:
        """A role's variables that the user set, evaluated; the bad ones are noted and left out."""
        values = {}
        # An earlier play of the same run may have left its instance.
        variables = {name: value for name, value in self._variables.items() if name != "vllm_instance"}
        templar = self._templar.copy_with_new_env(available_variables=variables | ({"vllm_instance": instance} if instance else {}))
        for name, raw in set_by_user(self._variables, spec).items():
            try:
                value = plain(templar.template(raw))
            except AnsibleError as error:
                flaws = self._expression_problems(name, str(error), spec, instance)
            else:
                # The overrides may be JSON text, which has a stricter reader than Ansible's own.
                flaws = []
                if name != OVERRIDES:
                    value, flaws = check_value(name, value, spec)
                if value is not None and not flaws:
                    values[name] = value
            self._problems += flaws
            self._flawed |= {name} if flaws else set()
        return values

    def _expression_problems(self, name: str, error: str, spec: RoleSpec, instance: dict[str, Any] | None) -> list[Problem]:
        """Why an expression cannot be evaluated; nothing if all it lacks is the instance, which has problems of its own."""
        if "vllm_instance" in error and instance is None:
            if OVERRIDES not in spec.options:
                return []
            return [
                problem("variable_expression", f"{name}: refers to vllm_instance, which follows from it", "write it without vllm_instance")
            ]
        what = "its expression cannot be evaluated" if spec.options[name].get("no_log") else error
        remedy = "correct the expression or the variables that it names, and give the vault's password if it is encrypted"
        return [problem("variable_expression", f"{name}: {what}", remedy)]

    def _instance(self, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The resolved instance; None if the recipe cannot be had."""
        start = Path(self._variables.get("inventory_dir") or ".").absolute()
        folders, flaws = recipe_folders(settings["recipe_dirs"], start, COLLECTION / "recipes")
        self._problems += flaws
        name = settings.get("recipe")
        if not name:
            if "vllm_recipe" in self._flawed:
                return None
            evidence = "vllm_recipe is not set for this host"
            remedy = f"set it for the host's group; {did_you_mean('', find_recipes(folders))}"
            self._problems.append(problem("no_recipe", evidence, remedy))
            return None
        try:
            recipe = load_recipe(name, folders, settings["recipe_overrides"])
        except RecipeError as error:
            self._problems += error.problems
            return None
        instance = build_instance(name, recipe, settings)
        self._problems += check_support(name, recipe)
        self._problems += check_leak(instance, settings["api_key"])
        return instance
