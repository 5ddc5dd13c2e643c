#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

DOCUMENTATION = r"""
module: image_gate
short_description: Asks an image's own vLLM whether it takes a recipe's arguments and environment
description:
  - Runs vLLM's argument parser inside the image, without network, GPU or model, on the very arguments that the service will get.
  - Also looks up what vLLM itself checks only after it has loaded the weights (names of parsers, backends, load formats,
    keys of the speculative configuration) and which environment variables it does not read.
  - With O(checkpoint), also whether the image can load that checkpoint, where it is one that not every vLLM can load.
  - Reports everything it finds at once. A report is kept under the state folder, so that the same question is answered at once.
  - Changes nothing.
version_added: 0.1.0
author:
  - The dgxspark.vllm authors (@dgxspark)
attributes:
  check_mode:
    support: full
    description: Asks as well, as long as the image exists; skipped while it does not. The report is not kept.
  diff_mode:
    support: none
    description: Nothing is changed.
options:
  image_manifest:
    description: JSON file with the C(image_id) to ask.
    type: path
    required: true
  argv:
    description: Words after the image in C(docker run), beginning with C(serve).
    type: list
    elements: str
    required: true
  environment:
    description: Environment of the service, without secrets.
    type: dict
    default: {}
  checkpoint:
    description:
      - Folder of the checkpoint that will be served. A hybrid names in its C(.dgxspark-hybrid.json) what the image must have, and it is an
        error that the image lacks one of them. Any other checkpoint needs nothing special.
      - C(fp8_dispatch) is a vLLM that loads FP8 layers of an INT4 checkpoint, C(index_loader) a loader that takes each tensor from the file
        that the index names. An image has what its packages offer as entry points of the group C(dgxspark_vllm.features). A vLLM that was
        patched for it has C(fp8_dispatch) too.
    type: path
  python:
    description: Path, inside the image, of the Python that has vLLM. By default the one that the image's C(vllm) command runs with.
    type: str
    default: ''
  cuda:
    description: Whether the image must be able to use a GPU.
    type: bool
    default: true
  timeout_s:
    description: How long the image may take to answer. Its first start after a build reads some GB from disk.
    type: int
    default: 300
  state_dir:
    description: Folder of this collection's files. Reports are kept in its C(gates) folder.
    type: path
    default: /var/lib/dgxspark-vllm
"""

EXAMPLES = r"""
- name: Check a recipe's options before anything is restarted
  dgxspark.vllm.image_gate:
    image_manifest: /var/lib/dgxspark-vllm/images/sm121.json
    argv: [serve, /model, --max-model-len, "262144", --reasoning-parser, qwen3]
    environment: {HF_HUB_OFFLINE: "1"}
    checkpoint: /var/lib/dgxspark-vllm/checkpoints/Intel--Qwen3.5-122B-A10B-int4-AutoRound/4fd9ff65a6a4-overlay-3c7aa9a1f0d2
"""

RETURN = r"""
gate:
  description: What the image holds and says; empty when it was skipped.
  returned: always
  type: dict
  contains:
    vllm: {description: Version of vLLM., type: str, returned: always}
    torch: {description: Version of torch., type: str, returned: always}
    torch_cuda: {description: CUDA version that torch was built for; null for none., type: str, returned: always}
    python: {description: Version of Python., type: str, returned: always}
    machine: {description: Architecture of the image., type: str, returned: always}
    extension: {description: Whether vLLM's compiled part loads (without a GPU it may not)., type: str, returned: always}
    plugins: {description: Installed general plugins of vLLM., type: list, elements: str, returned: always}
    features: {description: What it has for checkpoints that need it., type: list, elements: str, returned: always}
    options: {description: How many options this vLLM has., type: int, returned: always}
    platform_made_up: {description: Whether the parser was built without a GPU., type: bool, returned: always}
    skipped: {description: What could not be checked, and why., type: list, elements: str, returned: always}
    findings: {description: What the problems were made from., type: list, elements: dict, returned: always}
    image_id: {description: The image., type: str, returned: always}
    cached: {description: Whether the report is an earlier one., type: bool, returned: always}
needs:
  description: What the checkpoint needs of an image.
  returned: always
  type: list
  elements: str
  sample: [fp8_dispatch, index_loader]
problems:
  description: What is wrong, with evidence and remedy.
  returned: always
  type: list
  elements: dict
"""

import inspect
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import gate_probe
from ..module_utils.files import read_json, write_json
from ..module_utils.image_gate import (
    baked_environment,
    gate_key,
    gate_of,
    needs_of,
    needs_problems,
    probe_command,
    probe_failure,
    problems_of,
    report_of,
)
from ..module_utils.problems import Problem, describe, errors, problem
from ..module_utils.unit import effective_environment, hidden_environment, image_of_manifest
from ..module_utils.vllm_argv import check_environment

HYBRID = ".dgxspark-hybrid.json"


def docker(argv: list[str], stdin: str = "", timeout_s: float = 60) -> tuple[int, str, bool]:
    """(return code, output, whether it was cut off)."""
    try:
        done = subprocess.run(
            argv, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        return 127, f"{argv[0]}: not found", False
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
        return 124, output.decode(errors="replace") if isinstance(output, bytes) else output, True
    return done.returncode, done.stdout, False


def ask(program: str, image_id: str, params: dict[str, Any], environment: dict[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """Ask the image: (gate, []) or ({}, why there is no answer)."""
    code, output, _cut = docker([program, "image", "inspect", image_id])
    if code != 0:
        if "no such image" in output.lower():
            evidence = f"{params['image_manifest']} names {image_id[:19]}, which docker does not have"
            return {}, [problem("image_missing", evidence, "ansible-playbook dgxspark.vllm.image -l <this host>")]
        return {}, [problem("docker_unreachable", output.strip(), "systemctl status docker")]
    config = json.loads(output)[0].get("Config") or {}
    entrypoint = (config.get("Entrypoint") or [""])[0]
    name = f"dgxspark-vllm-gate-{os.getpid()}"
    command = probe_command(program, image_id, name, params["argv"], environment, entrypoint, params["python"])
    code, output, cut = docker(command, inspect.getsource(gate_probe), params["timeout_s"])
    if cut:
        docker([program, "rm", "-f", name])
    report = report_of(output)
    if report is None or "error" in report:
        return {}, [probe_failure(code, output if report is None else report["error"], params["timeout_s"], cut)]
    return {**gate_of(report), "baked": [dict(p) for p in baked_environment(config.get("Env") or [], environment)]}, []


def checkpoint_needs(checkpoint: str | None) -> tuple[list[str], list[Problem]]:
    """What the checkpoint needs of an image. One that is not there yet, or is no hybrid, needs nothing."""
    manifest = Path(checkpoint or "/") / HYBRID
    if not checkpoint or not os.path.lexists(manifest):
        return [], []
    try:
        return needs_of(read_json(manifest), str(manifest))
    except OSError as error:
        return [], [problem("file_access", str(error), "let this user read the checkpoint (become: true)")]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "image_manifest": {"type": "path", "required": True},
            "argv": {"type": "list", "elements": "str", "required": True},
            "environment": {"type": "dict", "default": {}},
            "checkpoint": {"type": "path"},
            "python": {"type": "str", "default": ""},
            "cuda": {"type": "bool", "default": True},
            "timeout_s": {"type": "int", "default": 300},
            "state_dir": {"type": "path", "default": "/var/lib/dgxspark-vllm"},
        },
        supports_check_mode=True,
    )
    p = module.params
    if flaws := check_environment(p["environment"], "environment")[1]:
        # Ansible shows a module's arguments at higher verbosity.
        p["environment"] = hidden_environment(p["environment"])
        fail(module, flaws, {})
    image_id = image_of_manifest(read_json(Path(p["image_manifest"])))
    if not image_id:
        skip_or_fail(
            module, problem("image_missing", f"{p['image_manifest']} names no image", "ansible-playbook dgxspark.vllm.image -l <this host>")
        )
    environment = effective_environment(p["environment"], {})
    kept = Path(p["state_dir"]) / "gates" / f"{gate_key(image_id, p['argv'], environment, p['python'])}.json"
    gate = read_json(kept)
    cached = isinstance(gate, dict)
    if not isinstance(gate, dict):
        gate, failed = ask(shutil.which("docker") or "/usr/bin/docker", image_id, p, environment)
        if failed:
            if failed[0]["class"] in ("image_missing", "docker_unreachable"):
                skip_or_fail(module, failed[0])
            fail(module, failed, {})
        if not module.check_mode:
            try:
                write_json(kept, gate)
            except OSError as error:
                remedy = "set become: true" if isinstance(error, PermissionError) else "mend what the message says about this path"
                fail(module, [problem("file_access", str(error), remedy)], {})
    baked: list[Problem] = gate.pop("baked", [])
    gate = {**gate, "image_id": image_id, "cached": cached}
    needs, unknown = checkpoint_needs(p["checkpoint"])
    image = f"the image of {p['image_manifest']} ({image_id[:19]})"
    found = problems_of(gate, p["cuda"]) + baked + unknown + needs_problems(needs, gate, p["checkpoint"], image)
    if errors(found):
        fail(module, found, gate, needs)
    for warning in found:
        module.warn(f"{warning['class']}: {warning['evidence']}; {warning['remedy']}")
    module.exit_json(changed=False, gate=gate, needs=needs, problems=found)


def skip_or_fail(module: AnsibleModule, why: Problem) -> NoReturn:
    """A dry run may come before the image; a real one may not."""
    if module.check_mode:
        reason = f"image: not built yet ({why['evidence']})"
        module.exit_json(changed=False, skipped=True, skip_reason=reason, gate={}, needs=[], problems=[])
    fail(module, [why], {})


def fail(module: AnsibleModule, problems: list[Problem], gate: dict[str, Any], needs: Sequence[str] = ()) -> NoReturn:
    """End with every problem as one text."""
    version = f" (vLLM {gate['vllm']})" if gate.get("vllm") else ""
    headline = f"The image{version} does not take this recipe; the running service was left alone"
    module.fail_json(msg=describe(problems, headline), problems=problems, gate=gate, needs=list(needs))
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()
