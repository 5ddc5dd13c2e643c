#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: hf_snapshot
short_description: Have a pinned snapshot of a model repository on this node
version_added: 0.1.0
description:
  - Brings the files of one revision to a folder, from another folder of the node or from a web server. The transfer runs on the node as a
    transient systemd unit, so that it goes on when the connection is lost; running the task again joins it or takes it up where it ended.
  - The source holds a file C(SHA256SUMS) in the format of C(sha256sum). Its own SHA-256 is the pin. Every file is compared with it.
  - The snapshot is complete when C(.dgxspark-snapshot.json) in O(dest) says so, which is written last, and every file has the size and time
    noted there. A file that is missing or differs is brought again, and only that one.
author:
  - dgxspark.vllm authors (@dgxspark)
options:
  repo:
    description: Name of the model repository, for the manifest and messages.
    type: str
    required: true
  revision:
    description:
      - What is wanted. The SHA-256 of the source's C(SHA256SUMS), with or without C(sha256:) before it, or the commit of the repository,
        and then O(sums_sha256) is the pin.
    type: str
    required: true
  sums_sha256:
    description: SHA-256 of the source's C(SHA256SUMS), when O(revision) is a commit.
    type: str
    default: ""
  source:
    description:
      - An absolute folder on the node, or an http or https address below which the files lie.
      - V(hub) stands for the model hub, which this release does not download from.
    type: str
    default: hub
  dest:
    description: Folder of the snapshot on the node. It must not overlap the source.
    type: path
    required: true
  mutable:
    description: Files that others may change after completion; of these only the presence is looked at.
    type: list
    elements: str
    default: [model.safetensors.index.json]
  verify:
    description: V(stamps) compares sizes and times with the manifest. V(full) reads every file again, as a job on the node.
    type: str
    choices: [stamps, full]
    default: stamps
  stall_timeout_s:
    description: Seconds without a new byte after which the transfer is stopped as an error; V(0) for no limit.
    type: int
    default: 300
  state_dir:
    description: Folder of the collection's state on the node; the job lies in C(jobs) below it.
    type: path
    default: /var/lib/dgxspark-vllm
  watch:
    description: Names one task's wait; set by the action plugin.
    type: str
    default: ""
attributes:
  check_mode:
    description: Says what would be brought; starts nothing.
    support: full
  diff_mode:
    description: Lists the files that are brought or removed.
    support: full
"""

EXAMPLES = r"""
- name: Have the checkpoint from a mounted folder
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: sha256:0f343b0931126a20f133d67c2b018a3b5f6d9c2f1e1d7e8a9b0c1d2e3f405162
    source: /mnt/models/qwen35-122b
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b

- name: Have the checkpoint from a web server of the local network, and read every byte again
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: 4a1c0b5de0f1a2b3c4d5e6f708192a3b4c5d6e7f
    sums_sha256: 0f343b0931126a20f133d67c2b018a3b5f6d9c2f1e1d7e8a9b0c1d2e3f405162
    source: http://192.0.2.10:8080/qwen35-122b
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b
    verify: full
"""

RETURN = r"""
path:
  description: The snapshot's folder.
  type: str
  returned: success
revision:
  description: The revision as asked for, without C(sha256:).
  type: str
  returned: success
sums_sha256:
  description: The pin.
  type: str
  returned: success
complete:
  description: Whether the folder is complete at this moment; false in check mode when something would be brought, and while the job runs.
  type: bool
  returned: success
bytes:
  description: Size of the snapshot.
  type: int
  returned: success
files:
  description: Number of files of the snapshot.
  type: int
  returned: success
resumed_bytes:
  description: Bytes that earlier, unfinished runs had brought already.
  type: int
  returned: success
missing:
  description: In check mode, what would be brought, C(files) and C(bytes); bytes is null when the source does not tell.
  type: dict
  returned: check mode, when something is missing
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

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import snapshot
from ..module_utils.changes import Changes
from ..module_utils.jobs import Job, JobFailure, Systemd, new_watch, short


def run(p: dict[str, Any], check: bool) -> dict[str, Any]:
    """One look: complete already, or the job that makes it so."""
    dest = Path(p["dest"])
    pin, unpinned = snapshot.pinned(p["revision"], p["sums_sha256"], p["source"])
    wrong = snapshot.source_problems(p["source"])
    wrong += snapshot.place_problems(p["source"], p["dest"])
    if wrong or unpinned:
        raise JobFailure(*wrong, *([] if p["source"] == "hub" else unpinned))
    spec = {name: p[name] for name in ("repo", "revision", "source", "dest", "mutable", "verify")} | {"pin": pin}
    base = {"path": p["dest"], "revision": p["revision"].strip().removeprefix("sha256:"), "sums_sha256": pin}
    job = Job(Path(p["state_dir"]), f"snapshot-{short(p['dest'])}", "snapshot", f"dgxspark.vllm snapshot of {p['repo']}", Systemd())
    watch = p["watch"] or new_watch()

    if check or not job.following(spec, watch):
        files = snapshot.complete(dest, pin, p["mutable"])
        if files is not None and (check or p["verify"] == "stamps"):
            return {**base, **_figures(files), "changed": False, "complete": True, "resumed_bytes": 0}
        if check:
            return {**base, **_would(p, dest, pin)}
        if files is None and snapshot.source_kind(p["source"]) == "folder":
            _survey(p, dest, pin)  # what is wrong with a folder is known at once, without a job

    status = job.follow(spec, watch, p["stall_timeout_s"])
    answer = {**base, "changed": False, "complete": status.state == "done", "job": status.wire(watch)}
    if status.state != "done":
        return {**answer, "bytes": 0, "files": 0, "resumed_bytes": 0}
    if not snapshot.is_report(status.result):
        raise job.damaged_result()
    changes = Changes()
    changes.add(p["dest"], status.result["before"], status.result["after"])
    return {**answer, **changes.result(), **_figures(status.result["files"]), "resumed_bytes": status.result["resumed_bytes"]}


def _figures(files: dict[str, Any]) -> dict[str, int]:
    return {"files": len(files), "bytes": sum(int(entry["size"]) for entry in files.values())}


def _survey(p: dict[str, Any], dest: Path, pin: str) -> tuple[dict[str, str], dict[str, str], int | None, int]:
    """Files wanted, files to bring, their size, bytes of the whole; JobFailure when they cannot be brought."""
    source = snapshot.open_source(p["source"], patient=False)
    wanted = snapshot.wanted_files(source, pin, lambda _note: None, p["source"])
    todo = snapshot.plan(dest, wanted, p["mutable"], pin)
    doubtful = {name for name, state in todo.items() if state in {"unverified", "changed"}}
    still, size = snapshot.missing_bytes(source, dest, wanted, [n for n in todo if n not in doubtful], lambda _note: None)
    if found := [*snapshot.in_the_way(dest, wanted), *snapshot.check_space(dest, still, wanted)]:
        raise JobFailure(*found)
    return wanted, todo, size, still


def _would(p: dict[str, Any], dest: Path, pin: str) -> dict[str, Any]:
    """Check mode's answer when something is missing."""
    changes = Changes()
    try:
        wanted, todo, size, still = _survey(p, dest, pin)
    except JobFailure as failure:
        if not all(found["class"] in {"source_vanished", "source_unreachable"} for found in failure.problems):
            raise
        # An earlier task, not run in check mode either, may be what makes the source readable.
        changes.add(p["dest"], "complete: no\n", "complete: yes\n")
        what = {"files": None, "bytes": None}
        msg = failure.message("would bring the snapshot, but the source cannot be read now")
        return {**changes.result(), "complete": False, "files": 0, "bytes": 0, "resumed_bytes": 0, "missing": what, "msg": msg}
    removed = [name for name in snapshot.known(dest).files if name not in wanted]
    changes.add(p["dest"], *snapshot.difference(todo, removed, wanted))
    told = "an unknown amount" if size is None else snapshot.gb(still)
    return {
        **changes.result(),
        "complete": False,
        "files": len(wanted),
        "bytes": size or 0,
        "resumed_bytes": 0,
        "missing": {"files": len(todo), "bytes": None if size is None else still},
        "msg": f"would bring {len(todo)} of {len(wanted)} files ({told}) from {p['source']}",
    }


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "repo": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "sums_sha256": {"type": "str", "default": ""},
            "source": {"type": "str", "default": "hub"},
            "dest": {"type": "path", "required": True},
            "mutable": {"type": "list", "elements": "str", "default": ["model.safetensors.index.json"]},
            "verify": {"type": "str", "choices": ["stamps", "full"], "default": "stamps"},
            "stall_timeout_s": {"type": "int", "default": 300},
            "state_dir": {"type": "path", "default": "/var/lib/dgxspark-vllm"},
            "watch": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        result = run(p, module.check_mode)
    except JobFailure as failure:
        headline = f"The snapshot of {p['repo']} in {p['dest']} is not complete."
        module.fail_json(msg=failure.message(headline), problems=failure.problems)
    except OSError as error:
        failure = snapshot.dest_failure(error, Path(p["dest"]))
        module.fail_json(msg=failure.message(f"The snapshot in {p['dest']} cannot be looked at."), problems=failure.problems)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
