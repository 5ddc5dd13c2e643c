# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Recipes: what can be served, one YAML file each. Read on the controller, where PyYAML is; nothing in a recipe is evaluated.

A recipe is a stack of layers: the file, the files that it extends, and the user's overrides on top. Each layer is checked by itself, so
that a message can name the file or variable at fault, then all are merged into one resolved recipe that has every key.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from .problems import Problem, errors, problem
from .vllm_argv import check_engine_args, check_environment, is_number, plain, shape, show, strict_json

RECIPE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SUFFIXES = (".yml", ".yaml")
OVERRIDES = "vllm_recipe_overrides"

Kind = Literal["text", "number", "integer", "flag", "texts"]


class Field(NamedTuple):
    """What one key of a recipe may hold. default: what a resolved recipe has if no layer sets it; required: some layer must."""

    kind: Kind
    default: Any = None
    required: bool = False
    pattern: str = ""
    means: str = ""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = float("inf")


# engine_args and environment have names of their own and checks of their own, in vllm_argv.
OPEN_SECTIONS = ("engine_args", "environment")
REPO = r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
# A branch or tag moves; it is resolved once on each node, with a warning. A shortened commit is no name that a hub knows.
REVISION = r"[0-9a-f]{40}|[0-9a-f]{64}|(?![0-9A-Fa-f]+$)(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._/-]*"
REVISION_MEANS = "a full commit hash or digest in lower-case hexadecimal, in quotes (or a branch, which is not reproducible)"
SCHEMA: dict[str, Field | dict[str, Field]] = {
    "description": Field("text", required=True),
    "sources": Field("texts", default=[]),
    "extends": Field("text", pattern=RECIPE_NAME.pattern, means="the name of another recipe"),
    "nodes": Field("integer", default=1, low=1),
    "runtime": Field("text", default="docker", choices=("docker", "venv")),
    "checkpoint": {
        "repo": Field("text", required=True, pattern=REPO, means="OWNER/NAME"),
        "revision": Field("text", required=True, pattern=REVISION, means=REVISION_MEANS),
        "ignore_patterns": Field("texts", default=[]),
        "mtp": Field("flag", default=False),
        # FP8 shared experts in an INT4 checkpoint: a file set of its own, links and one more shard, or made when the model loads.
        "hybrid": Field("text", default="off", choices=("off", "materialize", "overlay", "online")),
        "donor_repo": Field("text", pattern=REPO, means="OWNER/NAME"),
        "donor_revision": Field("text", pattern=REVISION, means=REVISION_MEANS),
    },
    "image": {
        "profile": Field("text", required=True, pattern=r"[a-z0-9][a-z0-9._-]*", means="lower-case letters, digits, dots and dashes")
    },
    "requires": {"memory_gib": Field("number", required=True), "disk_gib": Field("number", required=True)},
    # 1500 s: a first start of the 122B model with cold caches took 13 min 22 s.
    "health": {"ready_timeout_s": Field("number", default=1500, low=1), "stall_timeout_s": Field("number", default=600, low=1)},
    "expect": {
        "decode_tok_s": Field("number"),
        "prefill_tok_s": Field("number"),
        "kv_tokens": Field("integer"),
        "acceptance": Field("number", high=1),
        "source": Field("text"),
    },
}


class RecipeError(ValueError):
    """A recipe that cannot be served as it is; `problems` says everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(p["evidence"] for p in problems))
        self.problems = list(problems)


def did_you_mean(name: object, known: Iterable[str], brief: bool = False) -> str:
    """What to do about an unknown name: the likeliest known one, and all of them unless a brief answer will do."""
    names = sorted(known)
    if close := difflib.get_close_matches(str(name), names, n=1, cutoff=0.6):
        return f"did you mean {close[0]}?" + ("" if brief else f" Known: {', '.join(names)}")
    return f"use one of: {', '.join(names) or '(none)'}"


# --- one file ---------------------------------------------------------------------------------------------------------------------------


class _RecipeLoader(yaml.SafeLoader):
    """YAML as data only: no key twice (PyYAML keeps the last and says nothing), no anchors, and a date stays text."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "anchors and aliases are not for recipes; use extends", mark)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.composer.ComposerError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
            seen.add((key.tag, str(key.value)))
        return node


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_recipe(text: str, where: str) -> dict[str, Any]:
    """The mapping in a recipe's text; RecipeError with file and line if there is none."""
    try:
        data = yaml.load(text, Loader=_RecipeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise RecipeError([problem("recipe_syntax", f"{position}: {what}", "mend the YAML at that place")]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError([problem("recipe_syntax", f"{where}:{line}: {error.reason}", "remove the character at that place")]) from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise RecipeError([problem("recipe_syntax", f"{where}: {error}", "write plain YAML: text, numbers, lists and mappings")]) from None
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else f"a {type(data).__name__} where a mapping belongs"
        raise RecipeError([problem("recipe_syntax", f"{where}: {what}", "write the recipe's keys, such as description and checkpoint")])
    return data


def read_recipe(path: Path) -> dict[str, Any]:
    """The mapping in a recipe file; RecipeError with file and line if there is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecipeError([problem("recipe_unreadable", f"{path}: {error.strerror}", "make the file readable")]) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RecipeError([problem("recipe_syntax", f"{path}:{line}: the text is not UTF-8", "save the file as UTF-8")]) from None
    return parse_recipe(text, str(path))


# --- one layer --------------------------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A checked layer: its data in normal form without the flawed keys, the keys that were flawed, and what was wrong with them."""

    data: dict[str, Any]
    flawed: set[str]
    problems: list[Problem]


def check_layer(data: Mapping[Any, Any], where: str) -> Layer:
    """Check every key of a layer against the schema. A layer may be incomplete; null means: as if no layer below had set it."""
    layer = Layer({}, set(), [])
    for key, value in plain(data).items():
        expected = SCHEMA.get(key)
        if value is None and (expected or key in OPEN_SECTIONS):
            layer.data[key] = None
        elif key in OPEN_SECTIONS:
            check = check_engine_args if key == "engine_args" else check_environment
            layer.data[key], problems = check(value, f"{where}: {key}")
            layer.problems.extend(problems)
        elif expected is None:
            layer.problems.append(problem("recipe_unknown_key", f"{where}: {key}", did_you_mean(key, [*SCHEMA, *OPEN_SECTIONS])))
        elif isinstance(expected, Field):
            _put(layer, layer.data, key, value, expected, f"{where}: ")
        elif isinstance(value, dict):
            layer.data[key] = {}
            for inner, item in value.items():
                if inner in expected:
                    _put(layer, layer.data[key], inner, item, expected[inner], f"{where}: ", f"{key}.")
                else:
                    layer.problems.append(problem("recipe_unknown_key", f"{where}: {key}.{inner}", did_you_mean(inner, expected)))
        else:
            layer.flawed.update(f"{key}.{inner}" for inner in expected)
            remedy = f"put {', '.join(expected)} below it"
            layer.problems.append(problem("recipe_type", f"{where}: {key}: {shape(value)} is no mapping", remedy))
    return layer


def _put(layer: Layer, target: dict[str, Any], key: str, value: Any, field: Field, where: str, section: str = "") -> None:
    """Put a value into a layer, or note why it cannot be there."""
    if value is False and "off" in field.choices:  # what YAML makes of a plain off
        value = "off"
    flaw = None if value is None else _flaw(value, field)
    if flaw is None:
        target[key] = value
        return
    layer.flawed.add(f"{section}{key}")
    what, remedy = flaw
    layer.problems.append(problem("recipe_type", f"{where}{section}{key}: {show(value)} {what}", remedy))


def _flaw(value: Any, field: Field) -> tuple[str, str] | None:
    """What is wrong with a value, and the remedy."""
    if field.kind == "flag":
        return None if isinstance(value, bool) else ("where true or false belongs", "write true or false, without quotes")
    if field.kind == "texts":
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return None
        return "where a list of texts belongs", "write one text per line, each after a dash"
    if field.kind == "text":
        if not isinstance(value, str):
            return "where text belongs", f"write {field.means or 'text'}" + (", in quotes" if "quotes" not in field.means else "")
        if field.choices and value not in field.choices:
            return "is not known", did_you_mean(value, field.choices)
        if not value.strip():
            return "is empty", f"write {field.means or 'some text'}"
        if field.pattern and not re.fullmatch(field.pattern, value):
            return f"is not {field.means}", f"write {field.means}"
        return None
    kind = "a whole number" if field.kind == "integer" else "a number"
    remedy = f"write {kind} of at least {field.low:g}" + ("" if field.high == float("inf") else f" and at most {field.high:g}")
    if isinstance(value, str):
        return "is a string where a number belongs", f"{remedy}, without quotes"
    if not is_number(value) or (field.kind == "integer" and not isinstance(value, int)):
        return f"where {kind} belongs", remedy
    return None if field.low <= value <= field.high else ("is out of range", remedy)


def check_overrides(overrides: Any, where: str = OVERRIDES) -> Layer:
    """The user's layer: a mapping, or the JSON text of one as `-e name='{...}'` hands it over."""
    flaw = "is no mapping"
    if isinstance(overrides, str):
        try:
            overrides = strict_json(overrides) if overrides.strip() else {}
        except ValueError as error:
            flaw = f"is no mapping: {error}"
    if not isinstance(overrides, Mapping):
        remedy = "write the recipe's keys as a mapping, or as the JSON of one"
        return Layer({}, set(), [problem("recipe_overrides", f"{where}: {shape(overrides)} {flaw}", remedy)])
    layer = check_layer(overrides, where)
    if layer.data.pop("extends", None) is not None:
        remedy = "set vllm_recipe to that recipe, or write a recipe that extends it"
        layer.problems.append(problem("recipe_overrides", f"{where}: extends has no place here", remedy))
    return layer


def deep_merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one mapping over another: mappings merge, all else replaces. Null takes out what is below, and stays where nothing is."""
    result = dict(below)
    for key, value in above.items():
        if value is None and result.get(key) is not None:
            del result[key]
        elif isinstance(value, Mapping):
            lower = result.get(key)
            result[key] = deep_merge(lower if isinstance(lower, Mapping) else {}, value)
        else:
            result[key] = value
    return result


# --- the whole recipe -------------------------------------------------------------------------------------------------------------------


def find_recipes(dirs: Sequence[Path]) -> dict[str, list[Path]]:
    """All recipes by name; where several folders have one, the earlier folder comes first."""
    found: dict[str, list[Path]] = {}
    for folder in dirs:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.suffix in SUFFIXES and RECIPE_NAME.fullmatch(path.stem) and path.is_file():
                found.setdefault(path.stem, []).append(path)
    return found


def recipe_layers(name: str, dirs: Sequence[Path]) -> tuple[list[tuple[Path, dict[str, Any]]], list[Problem]]:
    """The recipe's file and those that it extends, the recipe first, and why a further one could not be read.

    A recipe may extend one of its own name in a later folder.
    """
    found = find_recipes(dirs)
    layers: list[tuple[Path, dict[str, Any]]] = []
    wanted: Any = name
    while isinstance(wanted, str):
        if wanted not in found:
            by = f" (extended by {layers[-1][0]})" if layers else ""
            return layers, [problem("recipe_unknown", f"no recipe {show(wanted)}{by}", _unknown_remedy(wanted, found, dirs))]
        seen = [path for path, _ in layers]
        path = next((candidate for candidate in found[wanted] if candidate not in seen), None)
        if path is None:
            circle = " -> ".join(map(str, [*seen, found[wanted][0]]))
            return layers, [problem("recipe_cycle", f"recipes extend each other in a circle: {circle}", "take out one of the extends")]
        try:
            data = read_recipe(path)
        except RecipeError as error:
            return layers, error.problems
        layers.append((path, data))
        wanted = data.get("extends")
    return layers, []


def _unknown_remedy(name: str, found: Mapping[str, Any], dirs: Sequence[Path]) -> str:
    if "/" in name or name.endswith(SUFFIXES):
        likely = did_you_mean(Path(name).stem, found)
        return f"give the name only, without folder and ending, and put the folder into vllm_recipe_dirs; {likely}"
    return f"{did_you_mean(name, found)} (looked in {', '.join(map(str, dirs))})"


def load_recipe(name: str, dirs: Sequence[Path], overrides: Any = None, overrides_name: str = OVERRIDES) -> dict[str, Any]:
    """The resolved recipe: all layers merged, every key there, JSON options as mappings. RecipeError has all problems at once.

    dirs: folders to look in, the user's before the shipped one.
    """
    files, problems = recipe_layers(name, dirs)
    complete = not problems
    layers = [check_layer(data, str(path)) for path, data in reversed(files)]
    layers.append(check_overrides({} if overrides is None else overrides, overrides_name))
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = deep_merge(merged, layer.data)
        problems += layer.problems
    recipe = _with_defaults(merged)
    if complete:
        flawed = set().union(*(layer.flawed for layer in layers))
        problems += [p for path, p in _missing(recipe, f"recipe {name}") if path not in flawed]
        problems += check_whole(recipe, f"recipe {name}")
    if errors(problems):
        raise RecipeError(problems)
    return recipe


def _with_defaults(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of the schema, in its order; the options that null left out are gone."""
    recipe: dict[str, Any] = {}
    for key, expected in SCHEMA.items():
        value = merged.get(key)
        if isinstance(expected, Field):
            recipe[key] = plain(expected.default) if value is None else value
        else:
            section = value or {}
            recipe[key] = {inner: field.default if section.get(inner) is None else section[inner] for inner, field in expected.items()}
    del recipe["extends"]
    # What a release says to expect is looked up by key; a figure that nobody gave is not there.
    recipe["expect"] = {key: value for key, value in recipe["expect"].items() if value is not None}
    for key in OPEN_SECTIONS:
        recipe[key] = {name: value for name, value in (merged.get(key) or {}).items() if value is not None}
    return recipe


def _missing(recipe: Mapping[str, Any], where: str) -> Iterable[tuple[str, Problem]]:
    for key, expected in SCHEMA.items():
        section = {"": expected} if isinstance(expected, Field) else expected
        for inner, field in section.items():
            path = f"{key}.{inner}" if inner else key
            value = recipe[key].get(inner) if inner else recipe.get(key)
            if field.required and value is None:
                remedy = f"write {field.means or 'it'} in the recipe, or extend one that has it"
                yield path, problem("recipe_missing_key", f"{where}: {path} is not set", remedy)


def check_whole(recipe: Mapping[str, Any], where: str) -> list[Problem]:
    """What can only be seen once the layers are merged: keys that contradict each other."""
    args = recipe["engine_args"]
    found: list[Problem] = []

    speculative = args.get("speculative-config")
    method = speculative.get("method") if isinstance(speculative, Mapping) else None
    if isinstance(method, str) and (method == "mtp" or method.endswith("_mtp")) and not recipe["checkpoint"]["mtp"]:
        evidence = f"{where}: engine_args.speculative-config drafts with {method}, but checkpoint.mtp is false"
        remedy = "set checkpoint.mtp: true, so that the draft's weights are checked, or take speculative-config out"
        found.append(problem("recipe_mtp", evidence, remedy))

    found += _check_hybrid(recipe["checkpoint"], where)

    sizes = [args.get(key, 1) for key in ("tensor-parallel-size", "pipeline-parallel-size")]
    ranks = math.prod(size for size in sizes if isinstance(size, int))
    if ranks > recipe["nodes"]:
        evidence = f"{where}: engine_args ask for {ranks} ranks, but nodes is {recipe['nodes']}"
        found.append(problem("recipe_ranks", evidence, "a Spark has one GPU: set nodes, or lower the sizes"))

    if args.get("enable-auto-tool-choice") is True and "tool-call-parser" not in args:
        evidence = f"{where}: engine_args.enable-auto-tool-choice needs tool-call-parser"
        found.append(problem("recipe_tools", evidence, "name the parser, or take the switch out"))

    if set(recipe["expect"]) - {"source"} and "source" not in recipe["expect"]:
        evidence = f"{where}: expect has figures but no source"
        found.append(problem("recipe_expect", evidence, "say in expect.source where they come from"))
    return found


def _check_hybrid(checkpoint: Mapping[str, Any], where: str) -> list[Problem]:
    """Whether a mode that needs a donor has one."""
    missing = [f"checkpoint.{key}" for key in ("donor_repo", "donor_revision") if checkpoint[key] is None]
    if checkpoint["hybrid"] not in ("materialize", "overlay") or not missing:
        return []
    evidence = f"{where}: checkpoint.hybrid is {checkpoint['hybrid']}, but {' and '.join(missing)} is not set"
    return [problem("recipe_hybrid", evidence, "name the FP8 checkpoint of the same model and its commit, or set hybrid: off")]
