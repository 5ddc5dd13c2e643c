# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Runs inside an image, with the image's own Python, and asks vLLM what it thinks of an argument list. Knows nothing of Ansible.

`python - <payload>` with this text on stdin; payload: {"argv": [...], "environment": {...}}. The last line that starts with MARK is the
report. No model is read and no GPU is needed. Written for vLLM 0.19 to 0.33, whose modules moved in between.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, get_args

MARK = "dgxspark.vllm.gate "
# What a plugin adds to vLLM for checkpoints that need it: one entry point for each, of which only the name counts.
FEATURE_GROUP = "dgxspark_vllm.features"
# vLLM's modules that choose the method of each layer of an AutoRound checkpoint (0.19 to 0.28, and since 0.29). The schemes that lie beside
# them know FP8 too, but for whole checkpoints only.
DISPATCHERS = ("inc.py", "auto_round.py", "inc/inc.py")
Finding = dict[str, Any]


class Rejected(Exception):
    """The parser said no."""


def option_groups(words: Sequence[str]) -> list[list[str]]:
    """Words cut before each option: [[positional...], [--option, value...], ...]."""
    groups: list[list[str]] = [[]]
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            groups.append([])
        groups[-1].append(word)
    return groups


def option_name(word: str) -> str:
    """The option in a word as vLLM spells it: without value, without a path into JSON, with dashes."""
    name = word.split("=", 1)[0]
    if name.startswith("--"):
        name = "--" + name[2:].split(".", 1)[0].rstrip("+").replace("_", "-")
    return name


def resolve(name: str, options: Sequence[str]) -> list[str]:
    """Options that argparse would take a name for: itself, or those that it abbreviates."""
    if name in options:
        return [name]
    if name.startswith("--"):
        return [o for o in options if o.startswith(name)]
    # -tp4, -O3
    return [o for o in options if not o.startswith("--") and name.startswith(o)] or (["-O"] if name.startswith("-O") else [])


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Up to three similar names. What all of a kind begin with (`--`, `VLLM_`) does not count as similar."""
    prefix = next((p for p in ("--", "VLLM_") if name.startswith(p)), "")
    bare = {n.removeprefix(prefix).lower(): n for n in sorted(names)}
    word = name.removeprefix(prefix).lower()
    close = difflib.get_close_matches(word, bare, n=3, cutoff=0.7)
    return [bare[n] for n in close or [n for n in bare if len(word) > 2 and word in n][:3]]


def check_options(argv: Sequence[str], options: Sequence[str]) -> tuple[list[list[str]], list[Finding]]:
    """Option groups that the parser knows, and findings for the rest. argv begins with the subcommand."""
    kept, findings = [], []
    for group in option_groups(argv):
        if not group:
            continue
        name = option_name(group[0])
        meant = resolve(name, options) if name.startswith("-") else [name]
        if len(meant) == 1:
            kept.append(group)
            if meant[0] != name and name.startswith("--"):
                findings.append({"kind": "abbreviated_option", "option": name, "meant": meant})
        elif meant:
            findings.append({"kind": "ambiguous_option", "option": name, "meant": meant[:6]})
        else:
            findings.append({"kind": "unknown_option", "option": name, "meant": nearest(name, [o for o in options if o.startswith("--")])})
    return kept, findings


def culprit(message: str, groups: Sequence[Sequence[str]]) -> int | None:
    """Which group a parser's message is about."""
    if match := re.match(r"argument ([^:]+):", message):
        names = match[1].split("/")
        return next((i for i, g in enumerate(groups) if option_name(g[0]) in names), None)
    if message.startswith("unrecognized arguments:"):
        stray = message.split(":", 1)[1].split()
        return next((i for i, g in enumerate(groups) if any(word in stray for value in g[1:] for word in value.split() or [value])), None)
    return None


def parse_all(parse: Callable[[list[str]], Any], groups: list[list[str]]) -> tuple[Any, list[Finding]]:
    """Parse again and again, each time without the option that was refused, so that every refused one is found."""
    findings: list[Finding] = []
    while True:
        try:
            return parse([word for group in groups for word in group]), findings
        except Rejected as refused:
            message = str(refused)
        except (Exception, SystemExit) as error:
            message = f"{type(error).__name__}: {error}"
        where = culprit(message, groups)
        group = groups.pop(where) if where is not None else []
        stray = message.startswith("unrecognized arguments:")
        findings.append(
            {"kind": "stray_value" if stray else "bad_value", "option": option_name(group[0]) if group else "", "text": message}
        )
        if where is None:
            return None, findings


def literals(kind: Any) -> list[str]:
    """The words of a Literal, nested ones included."""
    words: list[str] = []
    for arg in get_args(kind):
        words += [arg] if isinstance(arg, str) else literals(arg)
    return words


# --- what only the image can tell ------------------------------------------------------------------------------------------------


def parser() -> tuple[Any, Any, Any, bool]:
    """(the whole parser, that of `serve`, the module with its checks, whether the platform was made up)."""
    platforms = importlib.import_module("vllm.platforms")
    made_up = bool(platforms.current_platform.is_unspecified())
    if made_up:
        # A CUDA build without a GPU cannot even build its parser. An attribute wins over the module's lazy one.
        platforms.current_platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform()  # type: ignore[attr-defined]
    flexible = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    try:
        cli = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    except ModuleNotFoundError:
        cli = importlib.import_module("vllm.entrypoints.openai.cli_args")
    top = flexible(prog="vllm")
    serve = top.add_subparsers(dest="subparser").add_parser("serve")
    cli.make_arg_parser(serve)
    if "--grpc" not in serve._option_string_actions:
        serve.add_argument("--grpc", action="store_true")  # in 0.19 the command adds it by itself
    return top, serve, cli, made_up


def _refuse(message: str) -> NoReturn:
    raise Rejected(message)


def tool_parsers() -> list[str]:
    return list(importlib.import_module("vllm.tool_parsers").ToolParserManager.list_registered())


def reasoning_parsers() -> list[str]:
    return list(importlib.import_module("vllm.reasoning").ReasoningParserManager.list_registered())


def attention_backends() -> list[str]:
    return ["auto", *importlib.import_module("vllm.v1.attention.backends.registry").AttentionBackendEnum.__members__]


def quantizations() -> list[str]:
    return list(importlib.import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS)


def load_formats() -> list[str]:
    return list(importlib.import_module("vllm.model_executor.model_loader")._LOAD_FORMAT_TO_MODEL_LOADER)


def executors() -> list[str]:
    return literals(importlib.import_module("vllm.config.parallel").DistributedExecutorBackend)


# The parser takes any text for these; vLLM finds out later, some of them after the weights are loaded.
NAMES: list[tuple[str, Callable[[], list[str]]]] = [
    ("tool_call_parser", tool_parsers),
    ("reasoning_parser", reasoning_parsers),
    ("attention_backend", attention_backends),
    ("quantization", quantizations),
    ("load_format", load_formats),
    ("distributed_executor_backend", executors),
]


def check_names(ns: Any, skipped: list[str]) -> list[Finding]:
    """Values that must be registered names."""
    findings = []
    for dest, known in NAMES:
        value = getattr(ns, dest, None)
        if not isinstance(value, str) or not value:
            continue
        plugin = {"tool_call_parser": "tool_parser_plugin", "reasoning_parser": "reasoning_parser_plugin"}.get(dest, "")
        if getattr(ns, plugin, None) or (dest == "distributed_executor_backend" and "." in value):
            skipped.append(f"{dest}: a plugin may register it")
            continue
        try:
            names = known()
        except Exception as error:  # moved again in a newer vLLM: no finding is better than a false one
            skipped.append(f"{dest}: {type(error).__name__}: {error}")
            continue
        folded = {n.lower() for n in names} if dest == "attention_backend" else set(names)
        if (value.lower() if dest == "attention_backend" else value) not in folded:
            findings.append(
                {
                    "kind": "unknown_name",
                    "option": "--" + dest.replace("_", "-"),
                    "value": value,
                    "meant": nearest(value, names),
                    "names": sorted(names),
                }
            )
    return findings


def check_speculative(ns: Any, skipped: list[str]) -> list[Finding]:
    """Keys and method of --speculative-config, of which the parser checks only that it is JSON."""
    value = getattr(ns, "speculative_config", None)
    if value is None:
        return []
    option = "--speculative-config"
    if not isinstance(value, dict):
        return [{"kind": "bad_value", "option": option, "text": f"{json.dumps(value)} is no JSON object"}]
    try:
        config = importlib.import_module("vllm.config.speculative")
        fields, methods = set(config.SpeculativeConfig.__dataclass_fields__), literals(config.SpeculativeMethod)
    except Exception as error:
        skipped.append(f"speculative_config: {type(error).__name__}: {error}")
        return []
    findings: list[Finding] = [
        {"kind": "unknown_key", "option": option, "value": key, "meant": nearest(key, fields)} for key in value if key not in fields
    ]
    method, count = value.get("method"), value.get("num_speculative_tokens")
    if method is not None and method not in methods:
        findings.append(
            {"kind": "unknown_name", "option": option, "value": str(method), "meant": nearest(str(method), methods), "names": methods}
        )
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        findings.append(
            {"kind": "bad_value", "option": option, "text": f"num_speculative_tokens is {json.dumps(count)}, not a number above 0"}
        )
    return findings


def check_numbers(ns: Any) -> list[Finding]:
    """Ranges that only the configuration checks."""
    share = getattr(ns, "gpu_memory_utilization", None)
    if isinstance(share, float | int) and not 0 < share <= 1:
        return [{"kind": "bad_value", "option": "--gpu-memory-utilization", "text": f"{share} is not between 0 and 1"}]
    return []


def check_environment(environment: dict[str, str], skipped: list[str]) -> list[Finding]:
    """vLLM ignores a variable of its own that it does not know: the feature behind it stays off without a word."""
    try:
        known = set(importlib.import_module("vllm.envs").environment_variables)
    except Exception as error:
        skipped.append(f"environment: {type(error).__name__}: {error}")
        return []
    return [
        {"kind": "unknown_variable", "option": name, "meant": nearest(name, known)}
        for name in sorted(environment)
        if name.startswith("VLLM_") and name not in known
    ]


def plugins() -> list[str]:
    """Installed general plugins that vLLM does not bring itself: they may register names that are unknown here."""
    from importlib.metadata import entry_points

    return sorted(e.name for e in entry_points(group="vllm.general_plugins") if not e.value.startswith("vllm."))


def features() -> list[str]:
    """What this image can do for checkpoints that not every vLLM loads: by its plugins, or by a vLLM that was patched to."""
    from importlib.metadata import entry_points

    found = {entry.name for entry in entry_points(group=FEATURE_GROUP)}
    for root in getattr(importlib.import_module("vllm"), "__path__", []):
        for name in DISPATCHERS:
            path = os.path.join(root, "model_executor", "layers", "quantization", *name.split("/"))
            if os.path.isfile(path):
                with open(path, encoding="utf-8", errors="replace") as stream:
                    if re.search(r"\bFp8LinearMethod\b", stream.read()):
                        found.add("fp8_dispatch")
    return sorted(found)


def versions() -> dict[str, Any]:
    """What is installed. extension: 'ok', what its import says, or '' where it needs no check."""
    torch = importlib.import_module("torch")
    vllm = importlib.import_module("vllm")
    cuda = getattr(torch.version, "cuda", None)
    extension = ""
    if cuda:
        try:
            importlib.import_module("vllm._C")
            extension = "ok"
        except Exception as error:
            extension = f"{type(error).__name__}: {error}"
    return {
        "vllm": str(vllm.__version__),
        "torch": str(torch.__version__),
        "torch_cuda": cuda,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "extension": extension,
        "plugins": plugins(),
        "features": features(),
    }


def examine(argv: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The report: versions, findings, and what could not be checked."""
    report: dict[str, Any] = {"findings": [], "skipped": []}
    report.update(versions())
    top, serve, cli, report["platform_made_up"] = parser()
    options = sorted({o for p in (top, serve) for o in p._option_string_actions})
    report["options"] = len(options)
    # Instance attributes, as both parsers exit by themselves otherwise.
    top.error = serve.error = _refuse
    groups, found = check_options(argv, options)
    ns, refused = parse_all(top.parse_args, groups)
    found += refused
    if isinstance(ns, argparse.Namespace):
        try:
            cli.validate_parsed_serve_args(ns)
        except (Exception, SystemExit) as error:
            found.append({"kind": "bad_combination", "option": "", "text": str(error)})
        found += check_names(ns, report["skipped"]) + check_speculative(ns, report["skipped"]) + check_numbers(ns)
    found += check_environment(environment, report["skipped"])
    report["findings"] = found
    return report


def main() -> int:
    payload = json.loads(sys.argv[1])
    os.environ["VLLM_PLUGINS"] = "none"  # a plugin may insist on a GPU
    try:
        report = examine(payload["argv"], payload["environment"])
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    print("\n" + MARK + json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
