# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The one way from a mapping of engine arguments to what vLLM, systemd and docker read.

A caller never builds `--option value` text: it hands a mapping to `engine_argv` and gets a list of words, which `systemd_exec` writes as an
ExecStart= value. The environment goes through `docker_env_file`. Text is data throughout: no template marker, quote, `$` or `%` in it is
evaluated on the way.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .problems import Problem, problem

OPTION_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NUMBER_TEXT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# NUL ends an argument for exec, lone surrogates have no bytes, and no option of vLLM means to hold the others.
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")

# vLLM names its JSON-valued options by these endings. One that ends so takes a plain word, and some JSON ones have no such ending.
JSON_ENDINGS = ("-config", "-kwargs", "-overrides", "-prompt")
NOT_JSON = frozenset({"generation-config"})
ALSO_JSON = frozenset({"rope-scaling", "rope-parameters"})
# An optimisation level is as good as a mapping there.
JSON_OR_INTEGER = frozenset({"compilation-config"})

_MODEL = (
    "the recipe's checkpoint is served as /model: set checkpoint.repo and checkpoint.revision, or vllm_checkpoint_dir for another folder"
)
RESERVED = {
    "model": _MODEL,
    "model-tag": _MODEL,
    "host": "set vllm_host in the inventory",
    "api-key": "set vllm_api_key in the inventory: every user of the machine can read an argument list",
    "config": "write the options themselves into engine_args: a file of options would hide them from the checks",
    "nnodes": "set nodes in the recipe",
    "node-rank": "leave it out: the rank follows from the host's place in its group",
    "master-addr": "leave it out: the head's address follows from the inventory",
    "headless": "leave it out: it follows from the host's place in its group",
    "uds": "leave it out: an instance listens on vllm_host and vllm_port",
}

BOOLEANS = frozenset(
    {
        "async-scheduling",
        "enable-auto-tool-choice",
        "enable-chunked-prefill",
        "enable-expert-parallel",
        "enable-prefix-caching",
        "enforce-eager",
        "language-model-only",
        "skip-tokenizer-init",
        "trust-remote-code",
    }
)
BOOLEAN_BEGINNINGS = ("enable-", "disable-")
BOOLEAN_WORDS = frozenset({"true", "false", "yes", "no", "on", "off"})


class Range(NamedTuple):
    """What a number may be. above: low itself is excluded; words: text that the option takes as well."""

    low: float
    high: float = math.inf
    integer: bool = True
    above: bool = False
    words: frozenset[str] = frozenset()

    def admits(self, value: float) -> bool:
        """Whether a number is within the range."""
        whole = isinstance(value, int) or not self.integer
        return whole and self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        kind = "a whole number" if self.integer else "a number"
        low = f"above {self.low:g}" if self.above else f"of at least {self.low:g}"
        high = "" if math.isinf(self.high) else f" and at most {self.high:g}"
        words = "".join(f", or {word!r}" for word in sorted(self.words))
        return f"{kind} {low}{high}{words}"


# vLLM's own parser accepts several of these out of range and fails minutes later, after the weights are loaded.
NUMBERS = {
    "block-size": Range(1),
    "cpu-offload-gb": Range(0, integer=False),
    "data-parallel-size": Range(1),
    "gpu-memory-utilization": Range(0, 1, integer=False, above=True),
    "long-prefill-token-threshold": Range(0),
    "master-port": Range(1, 65535),
    "max-logprobs": Range(-1),
    "max-model-len": Range(1, words=frozenset({"auto"})),
    "max-num-batched-tokens": Range(1),
    "max-num-seqs": Range(1),
    "pipeline-parallel-size": Range(1),
    "port": Range(1, 65535),
    "seed": Range(0),
    "swap-space": Range(0, integer=False),
    "tensor-parallel-size": Range(1),
}

# Written by this project or a leak where a recipe is shown; their values are never quoted in a message.
SECRET_VARIABLES = {
    "VLLM_API_KEY": "set vllm_api_key in the inventory: it reaches the server through a file that only root reads",
    "HF_TOKEN": "leave it out: the server reads a finished folder and needs no access to a hub",
    "HUGGING_FACE_HUB_TOKEN": "leave it out: the server reads a finished folder and needs no access to a hub",
}
# docker reads an environment file by lines of at most 64 KiB (Go's bufio.Scanner).
ENV_LINE_LIMIT = 65535


class ArgumentError(ValueError):
    """A mapping that cannot be rendered; `problems` says why."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(p["evidence"] for p in problems))
        self.problems = list(problems)


def show(value: object, limit: int = 80) -> str:
    """A value for a message, shortened."""
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def shape(value: object) -> str:
    """What a value is, without its content, which may hold a secret."""
    if isinstance(value, str):
        return f"a text of {len(value)} character{'' if len(value) == 1 else 's'}"
    if isinstance(value, (Mapping, list, tuple)):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        return f"a {kind} of {len(value)} item{'' if len(value) == 1 else 's'}"
    return "null" if value is None else f"a value of type {type(value).__name__}"


def shown_name(name: object) -> str:
    """A name for a message, cut where a value may have become a part of it."""
    if not isinstance(name, str):
        return show(name) if isinstance(name, int) else shape(name)
    head = re.split(r"[=:\s]", name, maxsplit=1)[0]
    return show(head) + ("" if head == name else f" (cut; {len(name)} characters in all)")


def is_number(value: object) -> bool:
    """A finite int or float; True and False are no numbers."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def is_json_option(name: str) -> bool:
    """Whether the option's value is JSON."""
    return name in ALSO_JSON or (name.endswith(JSON_ENDINGS) and name not in NOT_JSON)


def compact_json(value: object) -> str:
    """JSON without blanks, in the order in which the mapping was written, in ASCII (an argument list has no character set)."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def strict_json(text: str) -> Any:
    """The value of a JSON text; ValueError says what is wrong with it: a key twice, NaN, or no JSON at all."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"the key {shown_name(key)} is there twice")
            result[key] = value
        return result

    def no_constant(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1}){_json_hint(text)}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _json_hint(text: str) -> str:
    """The usual reasons why a JSON text that once looked right no longer parses."""
    stripped = text.strip()
    if stripped[:1] in "'\"" and stripped[1:2] == "{":
        return ": the quotes around it have become part of the text"
    if '\\"' in text:
        return ": its quotes are escaped once too often"
    if stripped.startswith("{{"):
        return ": its braces are doubled"
    if "'" in text:
        return ": JSON wants double quotes"
    return ""


def _json_flaw(value: object, path: str = "") -> str:
    """What in a value cannot be JSON; empty if nothing."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                return f"the key {show(key)}{path and f' in {path}'} is not text; quote it"
            if flaw := _json_flaw(item, f"{path}.{key}" if path else key):
                return flaw
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            if flaw := _json_flaw(item, f"{path}[{index}]"):
                return flaw
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{path or 'the value'} is {value}, which JSON does not have"
    elif value is not None and not isinstance(value, (str, int, float)):
        return f"{path or 'the value'} is a {type(value).__name__}, which JSON does not have"
    return ""


def plain(value: Any) -> Any:
    """The same value out of Python's own types only, without the marks that a template engine leaves on its strings and mappings."""
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return value


class _Checker:
    """One option after another into its normal form, with every flaw noted on the way."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []

    def note(self, class_: str, name: object, what: str, remedy: str) -> None:
        self.problems.append(problem(class_, f"{self.where}.{name}: {what}", remedy))

    def name(self, name: object) -> bool:
        """Whether this may be the name of an option in a recipe."""
        if not isinstance(name, str):
            self.note("engine_arg_name", name, f"the option name {show(name)} is not text", "quote the name")
        elif name.startswith("-"):
            self.note("engine_arg_name", name, "an option is named without leading dashes", f"write {name.lstrip('-').replace('_', '-')}")
        elif "_" in name:
            self.note("engine_arg_name", name, "vLLM's options have dashes, not underscores", f"write {name.replace('_', '-')}")
        elif "." in name:
            first, _, rest = name.partition(".")
            self.note("engine_arg_name", name, "part of a JSON option", f"write it as a mapping: {first}: {{{rest}: ...}}")
        elif not OPTION_NAME.fullmatch(name):
            self.note(
                "engine_arg_name",
                name,
                f"{show(name)} is no option name",
                "write it as `vllm serve --help` does, without the dashes",
            )
        elif name in RESERVED:
            self.note("engine_arg_reserved", name, "this option is set by the project", RESERVED[name])
        elif name.startswith("no-"):
            self.note("engine_arg_name", name, "a switch is turned off by its value", f"write {name[3:]}: false")
        else:
            return True
        return False

    def value(self, name: str, value: Any) -> Any:
        """The normal form of a value: JSON text becomes a mapping."""
        if value is None:
            return None
        if is_json_option(name):
            return self._json(name, value)
        if name in NUMBERS:
            self._number(name, value, NUMBERS[name])
        elif isinstance(value, bool):
            pass
        elif name in BOOLEANS or name.startswith(BOOLEAN_BEGINNINGS):
            self.note("engine_arg_type", name, f"{show(value)} where true or false belongs", "write true or false, without quotes")
        elif isinstance(value, str):
            return self._text(name, value)
        elif isinstance(value, Mapping):
            self._json_value(name, value)
        elif isinstance(value, list):
            self._list(name, value)
        else:
            self._scalar(name, value)
        return value

    def _number(self, name: str, value: Any, allowed: Range) -> None:
        remedy = f"write {allowed}"
        if isinstance(value, str):
            if value not in allowed.words:
                self.note("engine_arg_type", name, f"{show(value)} is a string where a number belongs", f"{remedy}, without quotes")
        elif not is_number(value):
            self.note("engine_arg_type", name, f"{show(value)} where a number belongs", remedy)
        elif not allowed.admits(value) and not (name == "max-model-len" and value == -1):  # -1 is vLLM's other word for auto
            self.note("engine_arg_value", name, f"{show(value)} is out of range", remedy)

    def _text(self, name: str, value: str) -> Any:
        if value.lstrip().startswith("{"):
            try:
                parsed = strict_json(value)
            except ValueError:
                pass  # a chat template or the like, which may begin so
            else:
                self._json_value(name, parsed)
                return parsed
        self._scalar(name, value)
        return value

    def _scalar(self, name: str, value: Any) -> None:
        if isinstance(value, str):
            if not value.strip():
                self.note("engine_arg_value", name, "the value is empty", "give a value, or null to leave the option out")
            elif UNPRINTABLE.search(value):
                self.note("engine_arg_value", name, f"{ascii(value)[:80]} holds a control character or half a character", "remove it")
            elif value.startswith("-") and not NUMBER_TEXT.fullmatch(value):
                self.note("engine_arg_value", name, f"{show(value)} would be read as another option", "write that option under its own key")
        elif not is_number(value):
            self.note("engine_arg_type", name, f"{show(value)} is no text and no finite number", "quote it if it is text")

    def _list(self, name: str, values: list[Any]) -> None:
        if not values:
            self.note("engine_arg_value", name, "the list is empty", "give values, or null to leave the option out")
        for value in values:
            if isinstance(value, Mapping):
                self._json_value(name, value)
            else:
                self._scalar(name, value)

    def _json(self, name: str, value: Any) -> Any:
        remedy = "write it as a mapping"
        if isinstance(value, str):
            try:
                value = strict_json(value)
            except ValueError as error:
                self.note("engine_arg_json", name, f"{shape(value)}: {error}", remedy)
                return value
            if isinstance(value, str):
                self.note("engine_arg_json", name, f"{shape(value)} is JSON within JSON (encoded twice)", remedy)
                return value
        if name in JSON_OR_INTEGER and isinstance(value, int) and not isinstance(value, bool):
            return value
        if not isinstance(value, Mapping):
            self.note("engine_arg_json", name, f"{shape(value)} is no mapping", remedy)
            return value
        self._json_value(name, value)
        if name == "speculative-config":
            self._speculative(name, value)
        return value

    def _json_value(self, name: str, value: object) -> None:
        if flaw := _json_flaw(value):
            self.note("engine_arg_json", name, flaw, "write plain text, numbers, true, false, null, lists and mappings only")

    def _speculative(self, name: str, value: Mapping[str, Any]) -> None:
        for key, item in value.items():
            if isinstance(item, str) and NUMBER_TEXT.fullmatch(item.strip()):
                self.note("engine_arg_json", name, f"{key}: {show(item)} is a string where a number belongs", "write it without quotes")
            elif key == "num_speculative_tokens" and (not isinstance(item, int) or isinstance(item, bool) or item < 1):
                self.note("engine_arg_json", name, f"{key}: {show(item)} is no count of draft tokens", "write a whole number of at least 1")


def check_engine_args(args: object, where: str) -> tuple[dict[str, Any], list[Problem]]:
    """Options in their normal form (JSON text parsed; null kept, it means: leave out), and all that is wrong with them.

    where: what a message calls the mapping, such as "recipes/x.yml: engine_args". A flawed option is still in the result.
    """
    if not isinstance(args, Mapping):
        return {}, [problem("engine_arg_type", f"{where}: {shape(args)} is no mapping", "write one `option: value` per line")]
    checker = _Checker(where)
    result = {}
    for name, value in plain(args).items():
        if checker.name(name):
            result[name] = checker.value(name, value)
    return result, checker.problems


def engine_argv(args: Mapping[str, Any], where: str = "engine_args") -> list[str]:
    """Engine arguments as words, each option once, in the order of the mapping. ArgumentError names everything that is wrong.

    text or number -> `--k v`; true -> `--k`; false -> `--no-k`; null -> left out; list -> `--k a b`; mapping -> `--k` and compact JSON.
    """
    options, problems = check_engine_args(args, where)
    if problems:
        raise ArgumentError(problems)
    argv: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            argv += [f"--{name}", *(_word(item) for item in value)]
        else:
            argv += [f"--{name}", _word(value)]
    return argv


def _word(value: object) -> str:
    return compact_json(value) if isinstance(value, Mapping) else str(value)


def check_environment(environment: object, where: str) -> tuple[dict[str, str | None], list[Problem]]:
    """Environment variables as text (null kept, it means: leave out), and all that is wrong. No value is ever quoted in a message."""
    if not isinstance(environment, Mapping):
        return {}, [problem("environment_type", f"{where}: {type(environment).__name__} is no mapping", "write one `NAME: value` per line")]
    result: dict[str, str | None] = {}
    problems: list[Problem] = []
    quote = "quote the value as the program is to see it"
    for name, value in plain(environment).items():
        label = f"{where}.{name}"
        if flaw := _name_problems(name, where):
            problems += flaw
            continue
        if isinstance(name, str) and name in SECRET_VARIABLES:
            problems.append(problem("environment_secret", f"{label}: a secret has no place in a recipe", SECRET_VARIABLES[name]))
        elif value is None:
            result[name] = None
        elif isinstance(value, (bool, float)):
            kind = "true or false" if isinstance(value, bool) else "a number with a point"
            problems.append(problem("environment_type", f"{label}: {kind} has more than one spelling", quote))
        elif not isinstance(value, (str, int)):
            problems.append(problem("environment_type", f"{label}: a {type(value).__name__} is no text", quote))
        else:
            result[name] = str(value)
            problems += _line_problems(name, str(value), where)
    return result, problems


def _name_problems(name: object, where: str) -> list[Problem]:
    """Why a name cannot be one of a variable. What follows its first `=` may be a secret."""
    if isinstance(name, str) and VARIABLE_NAME.fullmatch(name):
        return []
    remedy = "use letters, digits and underscores; the value comes after the colon"
    return [problem("environment_name", f"{where}: {shown_name(name)} is no variable name", remedy)]


def _line_problems(name: object, value: str, where: str) -> list[Problem]:
    """Why docker could not read `name=value` as one line of an environment file."""
    if flaw := _name_problems(name, where):
        return flaw
    if "\n" in value or UNPRINTABLE.search(value):
        what = "the value has more than one line, or a control character"
        return [problem("environment_value", f"{where}.{name}: {what}", "an environment file holds one line of plain text for each")]
    if len(f"{name}={value}".encode()) > ENV_LINE_LIMIT:
        return [problem("environment_value", f"{where}.{name}: the value is longer than {ENV_LINE_LIMIT} bytes", "shorten it")]
    return []


def docker_env_file(environment: Mapping[str, str], where: str = "environment") -> str:
    """The text of a file for `docker run --env-file`: unquoted `NAME=value` lines, sorted.

    ArgumentError for what such a file cannot hold.
    """
    problems = [p for name, value in environment.items() for p in _line_problems(name, value, where)]
    if problems:
        raise ArgumentError(problems)
    return "".join(f"{name}={environment[name]}\n" for name in sorted(environment))


# Words made of these need no quotes in a unit file.
_SYSTEMD_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_SYSTEMD_PROGRAM = re.compile(r"/[A-Za-z0-9_.+/-]*[A-Za-z0-9_.+-]")
_SYSTEMD_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "%": "%%", "$": "$$"}


def systemd_exec(argv: Iterable[str]) -> str:
    """An argument list as the value of ExecStart= and its siblings, so that systemd passes on exactly these words.

    The program must be an absolute path without special characters: systemd reads @ - : + ! before it as flags and expands nothing in it.
    Source: systemd.service(5), "Command lines"; systemd.syntax(7), "Quoting".
    """
    words = list(argv)
    if not words or not _SYSTEMD_PROGRAM.fullmatch(words[0]):
        raise ArgumentError([problem("exec_program", f"{show(words[:1])} is no absolute path", "give the program's full path")])
    if any("\0" in word for word in words):
        raise ArgumentError([problem("exec_word", "an argument holds a NUL character", "remove it")])
    return " ".join(_systemd_word(word) for word in words)


def _systemd_word(word: str) -> str:
    if _SYSTEMD_PLAIN.fullmatch(word):
        return word
    quoted = "".join(_SYSTEMD_ESCAPES.get(c) or (f"\\x{ord(c):02x}" if ord(c) < 32 or ord(c) == 127 else c) for c in word)
    return f'"{quoted}"'
