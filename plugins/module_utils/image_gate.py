# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What an image's own vLLM says about an argument list: how it is asked, and what its report means. Pure: no container is started here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .gate_probe import MARK
from .problems import Problem, problem

# Part of the key under which a report is kept: raise it whenever the probe or what is asked changes.
GATE_VERSION = "2"
CACHED_KEYS = (
    "vllm",
    "torch",
    "torch_cuda",
    "python",
    "machine",
    "extension",
    "plugins",
    "features",
    "options",
    "platform_made_up",
    "skipped",
    "findings",
)

# Finds the Python that the image's `vllm` runs with: the program's first line names it. $1 is what the image would start.
FIND_PYTHON = """
py=python3
for exe in "$1" vllm; do
  exe=$(command -v "$exe") || continue
  IFS= read -r line < "$exe" || continue
  case "$line" in '#!'*python*) py=${line#??}; break ;; esac
done
shift
exec $py - "$@"
"""

# What a checkpoint may need of an image, and how a person would rather do without. The names are those of hybrid_checkpoint.
NEEDS = {
    "fp8_dispatch": ("a vLLM that loads FP8 layers of an INT4 checkpoint", "checkpoint.hybrid: off, or online with vLLM 0.30 or newer"),
    "index_loader": (
        "a loader that takes each tensor from the file that the index names",
        "checkpoint.hybrid: materialize, which any loader reads, or off",
    ),
}

_ENGINE_ARGS = "engine_args (recipe, or vllm_recipe_overrides)"


def gate_key(image_id: str, argv: Sequence[str], environment: Mapping[str, str], python: str) -> str:
    """Name of the kept report: the same question to the same image needs no second answer."""
    question = [GATE_VERSION, image_id, list(argv), dict(environment), python]
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


def probe_command(
    docker: str, image_id: str, container: str, argv: Sequence[str], environment: Mapping[str, str], entrypoint: str, python: str
) -> list[str]:
    """`docker run` that reads the probe on stdin. environment: without secrets, as it is in this command."""
    payload = json.dumps({"argv": list(argv), "environment": dict(environment)})
    variables = [word for key, value in sorted(environment.items()) for word in ("--env", f"{key}={value}")]
    run = [docker, "run", "--rm", "-i", "--init", "--pull", "never", "--network", "none", "--name", container, *variables]
    if python:
        return [*run, "--entrypoint", python, image_id, "-", payload]
    return [*run, "--entrypoint", "/bin/sh", image_id, "-c", FIND_PYTHON, "sh", entrypoint or "vllm", payload]


def report_of(output: str) -> dict[str, Any] | None:
    """The report in a probe's output, which vLLM's own log lines may surround; None when there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith(MARK):
            value = json.loads(line.removeprefix(MARK))
            return value if isinstance(value, dict) else None
    return None


def gate_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that is kept and returned."""
    return {key: report.get(key) for key in CACHED_KEYS}


def problems_of(gate: Mapping[str, Any], cuda: bool) -> list[Problem]:
    """Everything that is wrong, in the words of a person. cuda: whether the image must be able to use a GPU."""
    found = [_of_finding(finding, bool(gate.get("plugins"))) for finding in gate.get("findings") or []]
    if cuda and not gate.get("torch_cuda"):
        found.append(
            problem(
                "cpu_torch",
                f"the image has torch {gate.get('torch')}, which has no CUDA",
                "build the image again: ansible-playbook dgxspark.vllm.image -l <this host>",
            )
        )
    if "undefined symbol" in str(gate.get("extension") or ""):
        found.append(
            problem(
                "torch_abi",
                f"vLLM's compiled part does not load with torch {gate.get('torch')}: {gate['extension']}",
                "build vLLM and install torch from the same release and CUDA version: ansible-playbook dgxspark.vllm.image -l <this host>",
            )
        )
    return found


def needs_of(manifest: Any, where: str) -> tuple[list[str], list[Problem]]:
    """What a checkpoint's manifest says that an image must have. where: the manifest's path, for messages."""
    needs = manifest.get("needs") if isinstance(manifest, dict) else None
    if isinstance(needs, list) and all(isinstance(need, str) for need in needs):
        return needs, []
    remedy = "make the checkpoint again: ansible-playbook dgxspark.vllm.checkpoint -l <this host>"
    return [], [problem("checkpoint_needs_unknown", f"{where} does not say what the checkpoint needs of an image", remedy)]


def needs_problems(needs: Sequence[str], gate: Mapping[str, Any], checkpoint: str, image: str) -> list[Problem]:
    """What a checkpoint needs and an image lacks. A need that nobody knows is lacking, too."""
    has = gate.get("features") or []
    found = []
    for need in needs:
        if need in has:
            continue
        means, instead = NEEDS.get(need, ("unknown to this release of the collection", ""))
        evidence = f"{checkpoint} needs {need} ({means}), which {image}, vLLM {gate.get('vllm')}, does not have"
        remedy = "use an image profile with the kernels package (image.profile of the recipe)"
        remedy += f", or in the recipe {instead}" if instead else ", of the release that made the checkpoint, or make the checkpoint again"
        found.append(problem("checkpoint_needs", evidence, remedy))
    return found


def _did_you_mean(names: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(names)}?" if names else ""


def _of_finding(finding: Mapping[str, Any], plugins: bool) -> Problem:
    kind, option, meant = str(finding.get("kind")), str(finding.get("option", "")), list(finding.get("meant") or [])
    key = option.lstrip("-")
    if kind == "unknown_option":
        remedy = f"rename or remove {key} in {_ENGINE_ARGS}, or use an image whose vLLM has it"
        return problem(kind, f"this image's vLLM has no option {option}{_did_you_mean(meant)}", remedy)
    if kind == "ambiguous_option":
        return problem(kind, f"{option} may stand for {', '.join(meant)}", f"write {key} in full in {_ENGINE_ARGS}")
    if kind == "abbreviated_option":
        evidence = f"{option} is taken for {meant[0]}; with a newer vLLM it may mean nothing or something else"
        return problem(kind, evidence, f"write {meant[0].lstrip('-')} in {_ENGINE_ARGS}", severity="warning")
    if kind == "unknown_name":
        names = ", ".join(meant or finding.get("names") or [])
        value = finding.get("value")
        if plugins:
            evidence = f"{option}: {value!r} is not registered by vLLM itself{_did_you_mean(meant)}"
            return problem(kind, evidence, "nothing, if one of the image's plugins registers it", severity="warning")
        return problem(
            kind, f"{option}: vLLM does not know {value!r}{_did_you_mean(meant)}", f"set {key} in {_ENGINE_ARGS} to one of: {names}"
        )
    if kind == "unknown_key":
        return problem(kind, f"{option} has no key {finding.get('value')!r}{_did_you_mean(meant)}", f"mend {key} in {_ENGINE_ARGS}")
    if kind == "unknown_variable":
        evidence = f"this image's vLLM does not read {option}{_did_you_mean(meant)}"
        remedy = (
            "rename or remove it in the recipe's environment or in vllm_service_environment, or use an image whose vLLM has the feature"
        )
        return problem(kind, evidence, remedy)
    if kind == "stray_value":
        remedy = f"switches are written `{key or 'option'}: true` or `false` in {_ENGINE_ARGS}"
        return problem(kind, f"{option}: {_first_line(finding)}", remedy)
    if kind == "bad_combination":
        return problem(kind, _first_line(finding), f"mend {_ENGINE_ARGS}")
    return problem(
        "bad_value", f"{option}: {_first_line(finding)}" if option else _first_line(finding), f"mend {key or 'it'} in {_ENGINE_ARGS}"
    )


def _first_line(finding: Mapping[str, Any]) -> str:
    """A message on one line: pydantic's go over several, with a web address in the last."""
    lines = [line.strip() for line in str(finding.get("text", "")).splitlines() if line.strip() and "errors.pydantic.dev" not in line]
    text = re.sub(r"^argument [^:]+: | at 0x[0-9a-f]+", "", "; ".join(lines))
    return text if len(text) <= 600 else text[:597] + "..."


def probe_failure(code: int, output: str, timeout_s: int, timed_out: bool) -> Problem:
    """Why there is no report."""
    lines = [line for line in output.splitlines() if line.strip()]
    tail = " | ".join(line.strip() for line in lines[-3:])
    if timed_out:
        return problem(
            "gate_timeout", f"no answer from the image's vLLM in {timeout_s} s; its last words: {tail}", "raise vllm_service_gate_timeout_s"
        )
    if "No such image" in output or "Unable to find image" in output:
        return problem("image_missing", tail, "ansible-playbook dgxspark.vllm.image -l <this host>")
    if "ModuleNotFoundError: No module named" in output or code == 127:
        remedy = "set vllm_service_python to the interpreter inside the image that has vLLM (its path there)"
        return problem("no_vllm_in_image", tail or f"exit {code}", remedy)
    if code == 137:
        return problem("out_of_memory", f"the check was killed (exit 137): {tail}", "free a GiB of memory on the node")
    return problem("gate_failed", f"exit {code}: {tail}", "run the image's `vllm serve --help` on the node to see what is wrong with it")


def baked_environment(config_env: Sequence[str], environment: Mapping[str, str]) -> list[Problem]:
    """Network settings of the image's author that would silently choose an interface of another machine."""
    found = []
    for entry in config_env:
        key = entry.partition("=")[0]
        if re.match(r"(NCCL|GLOO|UCX)_", key) and not key.endswith("_VERSION") and key not in environment:
            remedy = f"set {key} in vllm_service_environment (empty, if nothing else), or build the image without it"
            found.append(problem("baked_environment", f"the image sets {entry}", remedy))
    return found
