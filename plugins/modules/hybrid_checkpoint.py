#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: hybrid_checkpoint
short_description: Have an INT4 checkpoint with FP8 shared experts on this node
version_added: 0.1.0
description:
  - An AutoRound INT4 checkpoint of a Qwen3.5 mixture of experts keeps the shared experts of all layers in BF16. This module puts FP8
    weights of another checkpoint of the same model, the donor, in their place, each with its scales (one for each block of 128x128
    weights). For Qwen3.5-122B-A10B these are 144 weights and 144 scales, 0.45 GB instead of 0.91 GB.
  - Which tensors are taken follows from the headers of both checkpoints. A weight of a shared expert that the donor has as F8_E4M3 with
    scales that fit, and the source in 16 bits with the same shape. Routed experts and MTP layers stay as the source has them. How many
    there must be follows from the layers in the source's C(config.json). A difference in either direction is an error that names the
    tensors.
  - Of the donor only the headers and the needed byte ranges are read, for Qwen3.5-122B-A10B 0.45 GB and some 15 MB of headers, of 127 GB.
    All of them must be of one version of each file - by its digest on the hub, by size, time and inode in a folder, by C(ETag) or
    C(Last-Modified) on a web server. When a file changes meanwhile the run fails, and the next one fetches the donor's tensors anew. The
    donor must be of C(quant_method) C(fp8); one whose C(config.json) names none, or that has no MTP layer, is taken with a warning.
  - The source is never written to. The output is built in C(.NAME.building) beside it, and renamed when all of it is on the disk. A run
    that was killed, stopped by a full disk or by a power cut is taken up by the next one. With another source, donor or mode the output is
    built anew, and the old one is kept as C(NAME.previous), whose own predecessor is deleted. It is not when it has files that its
    manifest does not list, or is a hybrid that was made under that name; the run then fails before it writes anything.
  - The output is complete when C(.dgxspark-hybrid.json) in it says so, which is written last, and the source, the donor's revision, the
    numbers in O(expect) and every file are as noted there, with no other C(*.safetensors) beside them. That takes some milliseconds, and
    neither the donor nor a network.
  - The work runs on the node as a transient systemd unit, so that it goes on when the connection is lost; running the task again joins it.
author:
  - dgxspark.vllm authors (@dgxspark)
extends_documentation_fragment:
  - dgxspark.vllm.job
  - dgxspark.vllm.hub_client
options:
  mode:
    description:
      - V(materialize) makes a complete checkpoint of its own, of about the size of the source (71 GB and 4.8 GB of MTP layer for
        Qwen3.5-122B-A10B). Unchanged bytes are copied inside the kernel, and never decoded. It takes about as long as C(cp), and less than
        256 MB of memory.
      - V(overlay) makes hard links to the C(*.safetensors) files of the source, copies of its other files (config, tokenizer), one more
        shard with the FP8 weights and scales, and an index that points there. It writes less than 1 % of the source's bytes, and takes
        seconds. O(output) must be on the file system of O(source).
      - V(online) makes nothing. It checks that the source is one whose shared experts vLLM can quantise while it loads them, and returns
        the engine arguments for that.
      - What serves the result must know it. The hybrid of V(materialize) and V(overlay) needs FP8 dispatch for layers of an INT4 model
        (C(fp8_dispatch) in RV(needs)), which stock vLLM lacks. V(overlay) also needs a loader that takes each tensor from the file that the
        index names (C(index_loader)). A stock loader reads the overlay's shard last and so keeps the right tensors, but not with
        C(enable_multithread_load). V(online) needs vLLM 0.30 or newer. The module M(dgxspark.vllm.image_gate) checks an image for these.
    type: str
    choices: [materialize, overlay, online]
    required: true
  source:
    description:
      - Folder of the INT4 checkpoint on the node. A snapshot of M(dgxspark.vllm.hf_snapshot) must be complete. Any other folder is taken
        as it is, also one of links into a hub cache. Links to files are taken as the files; a link to a folder is an error.
      - Copies get the permissions of the source's files, without write and execute bits for others.
    type: path
    required: true
  donor_repo:
    description: Repository of the FP8 checkpoint, or a name for it when it does not come from the hub. Needed unless O(mode=online).
    type: str
  donor_revision:
    description:
      - Commit of the donor. A branch is resolved when the output is built, and the commit noted in the manifest, with a warning. It does
        not become incomplete when the branch moves. Needed unless O(mode=online).
    type: str
  donor_source:
    description:
      - Where the donor is read from. V(hub), an absolute folder on the node, or an http or https address below which the files lie.
      - A web server must know Range requests. Where it lists no files (a C(SHA256SUMS) or a snapshot's manifest), they are those of its
        index. From one that sends neither C(ETag) nor C(Last-Modified) an interrupted transfer begins anew, with a warning.
    type: str
    default: hub
  output:
    description:
      - Folder of the hybrid on the node, neither the source nor a link. A folder that this module did not make is never replaced. Needed
        unless O(mode=online).
    type: path
  expect:
    description:
      - Numbers to find instead of those that follow from C(config.json), for a donor or a model that is known to differ. An output that
        was built with other numbers is not complete.
    type: dict
    suboptions:
      weights:
        description: FP8 weights to take, and, unless O(expect.scales) says otherwise, scales.
        type: int
      scales:
        description: Scales to add.
        type: int
      unplaced:
        description: Tensors of the donor, routed experts left out, that have no place in the source.
        type: int
  verify:
    description:
      - V(stamps) compares sizes and times with the manifest. V(full) also compares every byte that came from the source with the source,
        and the FP8 tensors with the SHA-256 of what was fetched, as a job on the node.
      - Where output and source differ, the SHA-256 in the snapshot's manifest tells which of them is right, and so it does for the files
        that V(overlay) links to. A damaged output is built anew. A damaged source (C(source_damaged)), or a difference in a folder without
        such sums (C(source_differs)), is an error, and nothing is changed. Check mode reads nothing, and says so.
    type: str
    choices: [stamps, full]
    default: stamps
  stall_timeout_s:
    description: Seconds without progress after which the work is stopped as an error; V(0) for no limit.
    type: int
    default: 300
notes:
  - "Errors by class. The source: C(source_missing), C(source_incomplete), C(source_changed), C(source_damaged), C(source_differs),
    C(source_unreadable), C(source_linked_folder), C(config_missing), C(config_not_json) and those of
    M(dgxspark.vllm.safetensors_index) but for what that one mends. The donor: C(donor_block), C(donor_activation_scheme),
    C(donor_quant_method), C(donor_changed), C(donor_without_ranges), C(source_unreachable) and those of M(dgxspark.vllm.hf_snapshot). What
    is taken: C(hybrid_weights_differ), C(hybrid_scales_differ), C(hybrid_unplaced_differ), C(expected_unknown). The place:
    C(bad_output), C(output_is_link), C(output_not_ours), C(previous_not_ours), C(output_locked), C(lock_not_ours),
    C(overlay_other_file_system), C(disk_full), C(file_too_big). The model: C(online_no_shared_experts), C(online_not_plain),
    C(online_not_quantised)."
  - Of a donor from the hub or a web server nothing is asked in check mode. Numbers are then those that C(config.json) leads to expect.
attributes:
  check_mode:
    description: Says what would be built; starts nothing.
    support: full
  diff_mode:
    description: Says whether the output is complete, and why not.
    support: full
seealso:
  - module: dgxspark.vllm.hf_snapshot
  - module: dgxspark.vllm.safetensors_index
  - module: dgxspark.vllm.image_gate
"""

EXAMPLES = r"""
- name: Make a complete hybrid of its own, with a donor from the hub (76 GB are written, 0.45 GB are fetched)
  dgxspark.vllm.hybrid_checkpoint:
    mode: materialize
    source: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-int4
    donor_repo: Qwen/Qwen3.5-122B-A10B-FP8
    donor_revision: a099dee70ccfcd8d5dda56aaa0b60cb8ecadabc9
    client_requirements: "{{ lookup('ansible.builtin.file', 'hub-client.txt') }}"
    output: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-hybrid
  register: hybrid

- name: Put FP8 weights over the same snapshot without copying it, with a donor in a folder
  dgxspark.vllm.hybrid_checkpoint:
    mode: overlay
    source: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-int4
    donor_repo: Qwen/Qwen3.5-122B-A10B-FP8
    donor_revision: a099dee70ccfcd8d5dda56aaa0b60cb8ecadabc9
    donor_source: /mnt/models/qwen35-122b-fp8
    output: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-overlay

- name: Let vLLM quantise the shared experts while it loads them
  dgxspark.vllm.hybrid_checkpoint:
    mode: online
    source: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-int4
  register: hybrid

- name: Show the engine arguments for that
  ansible.builtin.debug:
    var: hybrid.engine_args

- name: Read every byte of a hybrid again
  dgxspark.vllm.hybrid_checkpoint:
    mode: materialize
    source: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-int4
    donor_repo: Qwen/Qwen3.5-122B-A10B-FP8
    donor_revision: a099dee70ccfcd8d5dda56aaa0b60cb8ecadabc9
    output: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-hybrid
    verify: full
"""

RETURN = r"""
mode:
  description: As asked for.
  type: str
  returned: success
complete:
  description: Whether the output is complete at this moment; false in check mode when it would be built, and while the job runs. For
    O(mode=online) true, but in check mode when the source is still to come.
  type: bool
  returned: success
replaced:
  description: FP8 weights that stand in the place of the source's; 0 for O(mode=online).
  type: int
  returned: success
  sample: 144
scales_added:
  description: Scales that were added to them.
  type: int
  returned: success
  sample: 144
unplaced:
  description: Tensors of the donor, routed experts left out, that have no place in the source; null in check mode when the donor was not
    read.
  type: int
  returned: success
  sample: 408
bytes_read:
  description: Bytes that this run read of source, donor and output, without those that only a check of times needed.
  type: int
  returned: success
bytes_written:
  description: Bytes that this run wrote.
  type: int
  returned: success
seconds:
  description: How long the build took on the node; 0 when there was nothing to do.
  type: float
  returned: success
manifest:
  description: Path of the output's manifest; empty for O(mode=online).
  type: str
  returned: success
  sample: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-hybrid/.dgxspark-hybrid.json
needs:
  description: Features that the image or environment which serves the output must have.
  type: list
  elements: str
  returned: success
  sample: [fp8_dispatch, index_loader]
engine_args:
  description: Engine arguments that the mode needs; empty unless O(mode=online).
  type: dict
  returned: success
  sample: {"quantization-config": {"targets": {"re:.*shared_expert\\.(gate|up|down)_proj$": "fp8_per_block"}}}
job:
  description: The job on the node - state, stage, done, total, unit, rate, eta_s, message, watch.
  type: dict
  returned: when there was something to do
problems:
  description: What is wrong - class, evidence, remedy and severity of each.
  type: list
  elements: dict
  returned: failure
"""

import re
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import hybrid_build, hybrid_plan
from ..module_utils.changes import Changes
from ..module_utils.hybrid import NEEDS, ONLINE_ENGINE_ARGS
from ..module_utils.hybrid_folder import MANIFEST, complete, output_failure
from ..module_utils.hybrid_source import look_at
from ..module_utils.jobs import Job, JobFailure, Systemd, new_watch, short
from ..module_utils.snapshot_hub import hub_spec, secret_path, store_secret

NOTHING = {"replaced": 0, "scales_added": 0, "unplaced": 0, "bytes_read": 0, "bytes_written": 0, "seconds": 0.0}
# What an earlier task that check mode did not run may bring.
PASSING = {"source_missing", "source_incomplete"}


def run(p: dict[str, Any], check: bool) -> dict[str, Any]:
    """One look: complete already, or the job that makes it so."""
    answer = {"changed": False, "mode": p["mode"], "needs": NEEDS[p["mode"]], "engine_args": {}, "manifest": "", **NOTHING}
    if p["mode"] == "online":
        answer["engine_args"] = ONLINE_ENGINE_ARGS
        try:
            if wrong := hybrid_plan.online_problems(Path(p["source"])):
                raise JobFailure(*wrong)
        except JobFailure as failure:
            if not check or not _passing(failure):
                raise
            return {**answer, "complete": False, "msg": failure.message("would look at the checkpoint")}
        return {**answer, "complete": True}
    output = Path(p["output"])
    answer["manifest"] = str(output / MANIFEST)
    spec = spec_of(p)
    if wrong := hybrid_plan.spec_problems(spec):
        raise JobFailure(*wrong)
    job = Job(Path(p["state_dir"]), f"hybrid-{short(p['output'])}", "hybrid_build", f"dgxspark.vllm hybrid in {output}", Systemd())
    watch = p["watch"] or new_watch()

    if check or not job.following(spec, watch):
        try:
            why, manifest = _look(spec, output)
            if manifest and (check or p["verify"] == "stamps"):
                return {**answer, "complete": True, **_counts(manifest), **(_unread(manifest) if p["verify"] == "full" else {})}
            if manifest is None:
                figures = hybrid_plan.survey(spec)  # what is wrong here is known at once, without a job
        except JobFailure as failure:
            if not check or not _passing(failure):
                raise
            return {**answer, **_would(output, "the source cannot be read now"), "msg": failure.message("would build the hybrid")}
        if check:
            msg = f"would build {output} from {p['source']} with {figures['replaced']} FP8 weights of {p['donor_repo']}"
            return {**answer, **_would(output, why), **figures, "msg": msg}

    if "hub" in spec:
        store_secret(Path(p["state_dir"]), _secret(p), p["token"])
    status = job.follow(spec, watch, p["stall_timeout_s"])
    answer |= {"complete": status.state == "done", "job": status.wire(watch)}
    if status.state != "done":
        return answer
    result = status.result
    if not hybrid_build.is_report(result):
        raise job.damaged_result()
    changes = Changes()
    changes.add(str(output), result["before"], result["after"])
    done = {"bytes_read": result["read"], "bytes_written": result["written"], "seconds": result["seconds"]}
    return {**answer, **changes.result(), **_counts(result["manifest"]), **done, "notes": result["notes"]}


def spec_of(p: dict[str, Any]) -> dict[str, Any]:
    """The job's spec: without the token, which the worker reads from a file."""
    spec = {name: p[name] for name in ("mode", "source", "output", "donor_repo", "donor_revision", "donor_source", "verify")}
    spec["expect"] = {name: number for name, number in (p["expect"] or {}).items() if number is not None}
    if p["donor_source"] == "hub":
        token_path = secret_path(Path(p["state_dir"]), _secret(p), p["token"])
        spec["hub"] = hub_spec(p, p["donor_repo"], p["donor_revision"], token_path)
    return spec


def _secret(p: dict[str, Any]) -> str:
    return f"hybrid-{short(p['output'])}"


def _look(spec: dict[str, Any], output: Path) -> tuple[str, dict[str, Any] | None]:
    source = look_at(Path(spec["source"]))
    if source.problems:
        raise JobFailure(*source.problems)
    manifest, why = complete(output, hybrid_plan.identify(spec, source), source, spec["expect"])
    return why, manifest


def _passing(failure: JobFailure) -> bool:
    return all(found["class"] in PASSING for found in failure.problems)


def _unread(manifest: dict[str, Any]) -> dict[str, str]:
    size = manifest["bytes"]
    return {"msg": f"complete by sizes and times; verify=full would read its {size} bytes and compare them, which check mode does not"}


def _counts(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in hybrid_build.COUNTS}


def _would(output: Path, why: str) -> dict[str, Any]:
    changes = Changes()
    changes.add(str(output), f"complete: no ({why})\n", "complete: yes\n")
    return {**changes.result(), "complete": False}


def main() -> None:
    """Entry point."""
    made = {"required_if": [("mode", mode, ["donor_repo", "donor_revision", "output"]) for mode in ("materialize", "overlay")]}
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": ["materialize", "overlay", "online"], "required": True},
            "source": {"type": "path", "required": True},
            "donor_repo": {"type": "str"},
            "donor_revision": {"type": "str"},
            "donor_source": {"type": "str", "default": "hub"},
            "output": {"type": "path"},
            "expect": {
                "type": "dict",
                "options": {"weights": {"type": "int"}, "scales": {"type": "int"}, "unplaced": {"type": "int"}},
            },
            "verify": {"type": "str", "choices": ["stamps", "full"], "default": "stamps"},
            "endpoint": {"type": "str", "default": ""},
            "token": {"type": "str", "default": "", "no_log": True},
            "client_requirements": {"type": "str", "default": ""},
            "client_python": {"type": "str", "default": ""},
            "pip_args": {"type": "list", "elements": "str", "default": []},
            "xet": {"type": "str", "choices": ["auto", "off"], "default": "auto"},
            "stall_timeout_s": {"type": "int", "default": 300},
            "state_dir": {"type": "path", "default": "/var/lib/dgxspark-vllm"},
            "watch": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
        **made,
    )
    p = module.params
    where = p["output"] or p["source"]
    try:
        result = run(p, module.check_mode)
    except JobFailure as failure:
        module.fail_json(msg=failure.message(f"There is no complete hybrid checkpoint in {where}."), problems=failure.problems)
    except OSError as error:
        failure = output_failure(error, Path(where))
        module.fail_json(msg=failure.message(f"The hybrid checkpoint in {where} cannot be looked at."), problems=failure.problems)
    if p["mode"] != "online" and not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", p["donor_revision"]):
        module.warn(f"donor_revision {p['donor_revision']!r} is no commit: another node, or a later build, may get another donor")
    for note in result.pop("notes", []):
        module.warn(note)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
