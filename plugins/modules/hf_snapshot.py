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
  - Brings the files of one revision to a folder; from the model hub, from a cache of the hub's own tools, from another folder of the
    node, from a web server, or from another node that has the snapshot. The transfer runs on the node as a transient systemd unit, so
    that it goes on when the connection is lost; running the task again joins it or takes it up where it ended.
  - Every file is compared with a digest that the pin vouches for, while it is written. A file that does not fit is fetched once more,
    and is an error then. A transfer that was killed, in whatever way, goes on in the middle of the file that it was at.
  - The snapshot is complete when C(.dgxspark-snapshot.json) in O(dest) says so, which is written last, and every file has the size and
    time noted in C(.dgxspark-snapshot.stamps.json). That manifest holds nothing of the node, so that it is the same byte for byte on
    every node with the same files. A file that is missing or differs is brought again, and only that one. Where the manifest and those
    notes differ nothing counts as complete, and the source's list decides.
  - A finished snapshot is known by its folder alone, before anything of the source is looked at; O(source) may be gone by then.
  - A folder that is no snapshot yet may hold files of the revision; those with the right digest are taken over, and when one has other
    content, nothing is written at all (C(dest_foreign)). A snapshot of another repository is left alone as well (C(dest_other_repo));
    another revision of the same repository is replaced, file by file. Of what C(hf download --local-dir) noted in C(.cache/huggingface)
    only that is removed, never a cache or a token. Linked folders in O(dest) are neither written nor deleted through.
  - Never more bytes of a file are taken than the list, the answer or a HEAD request promised.
  - From the hub the client library huggingface_hub does the talking, over HTTP or Xet, in a virtual environment below O(state_dir) that
    is made once from O(client_requirements). Its caches and its home lie below O(state_dir) as well, never in anyone's home folder, and
    nothing of the size of a model is kept there.
  - Everything that the checkpoint needs must fit before the first byte is brought; that is what is missing of the snapshot, O(space), and
    1.07 GB that stay free on each file system.
author:
  - dgxspark.vllm authors (@dgxspark)
extends_documentation_fragment:
  - dgxspark.vllm.job
  - dgxspark.vllm.hub_client
options:
  repo:
    description: Name of the model repository, as OWNER/NAME. What the hub's client accepts is accepted, also an old name without an owner.
    type: str
    required: true
  revision:
    description:
      - What is wanted. From the hub or a cache of it a commit of 40 hexadecimal digits; from a folder or web server the SHA-256 of its
        C(SHA256SUMS), with or without C(sha256:) before it, or a commit together with O(sums_sha256).
      - A branch or tag is resolved once on this node, noted in O(dest), and used from then on until another name is asked for. The
        result has a warning then.
      - From another node's share a branch or tag means the commit that is in the share's manifest, whatever it was asked for as there, and
        that commit is recorded. Two nodes that each have a complete snapshot, of different commits under the same name, cannot know
        of each other; give the commit where that matters.
    type: str
    required: true
  sums_sha256:
    description: SHA-256 of the C(SHA256SUMS) of a folder or web server, when O(revision) is a commit.
    type: str
    default: ""
  manifest_sha256:
    description:
      - SHA-256 of the manifest of another node, as M(dgxspark.vllm.snapshot_share) returns it. The manifest then takes the place of
        C(SHA256SUMS), and this node's will be equal to it.
    type: str
    default: ""
  source:
    description:
      - V(hub), an absolute folder on the node, or an http or https address below which the files lie.
      - A folder may be a cache of the hub's own tools, that is C(models--OWNER--NAME) or the folder it lies in. The names of its blobs
        are digests, so that nothing else is needed. Any other folder, and a web server, hold a file C(SHA256SUMS) in the format of
        C(sha256sum).
      - A source is never written to. Links in it are read as the files that they point to.
    type: str
    default: hub
  source_token:
    description: Bearer token for O(source), when it is another node's share. It is sent to that host and port only.
    type: str
    default: ""
  dest:
    description:
      - Folder of the snapshot on the node. It must not overlap the source, and must not be a folder of the system, such as V(/srv), V(/tmp)
        or V(/var/lib), nor a home folder itself; a folder below them is fine.
    type: path
    required: true
  workers:
    description: How many files are brought at the same time, from the hub or a web server. From a folder it is one.
    type: int
    default: 4
  ignore_patterns:
    description:
      - Files of the revision that are left out, as shell patterns for their whole path, as in huggingface_hub. C(*) also matches a
        slash, and a pattern that ends in a slash stands for all below that folder.
    type: list
    elements: str
    default: []
  mutable:
    description:
      - Files that others may change after completion. Such a file may differ as long as what was brought is kept beside it, in
        C(.dgxspark-pristine), as M(dgxspark.vllm.safetensors_index) does. Without that, or when it is empty, it is brought again.
    type: list
    elements: str
    default: [model.safetensors.index.json]
  verify:
    description:
      - V(stamps) compares sizes and times with what was noted. V(full) reads every file again, as a job on the node,
        also a snapshot that came from another node. In check mode no file is read; the result's C(msg) says so.
    type: str
    choices: [stamps, full]
    default: stamps
  stall_timeout_s:
    description:
      - Seconds without a new byte after which a transfer is stopped. From the hub it is then taken up again once, with a new client and
        without Xet; if that stalls as well, and from any other source at once, it is an error. V(0) for no limit.
    type: int
    default: 300
  space:
    description: What else must fit before the first byte is brought. Entries on the same file system are added up.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Where it will be written. The folder need not exist.
        type: path
        required: true
      bytes:
        description: Bytes.
        type: int
        default: 0
      snapshots:
        description: Multiples of this snapshot's size, added to O(space[].bytes).
        type: float
        default: 0
      what:
        description: What it is for, for the message.
        type: str
        default: ""
attributes:
  check_mode:
    description:
      - Says what would be brought; makes and starts nothing. From the hub it asks for the list of files when the client's environment is
        there. Without a client, or with a source that is not there or not usable yet, it says only that there is something to bring, and
        why it cannot say more, because an earlier task may be about to mend that.
    support: full
  diff_mode:
    description: Lists the files that are brought or removed.
    support: full
notes:
  - Classes of RV(problems) when it is the hub - C(gated_no_token), C(gated_not_granted), C(not_authorised), C(repo_not_found),
    C(revision_not_found), C(file_not_found), which trying again does not change; C(rate_limited), C(hub_unreachable), C(hub_error),
    C(lock_timeout), C(xet_failed), which were tried again after growing pauses, or as long as the hub asked for; C(transfer_stalled).
  - Of any source - C(disk_full), C(digest_mismatch), C(wrong_revision), C(no_digest), C(git_lfs_pointer), C(source_incomplete),
    C(source_vanished), C(source_unreachable), C(source_encoded), C(bad_dest), C(dest_not_writable), C(dest_name_too_long),
    C(dest_vanished), C(dest_foreign), C(dest_other_repo), C(dest_locked), C(dest_failed), C(state_dir_unusable), C(not_root), and more;
    each has its evidence and remedy.
"""

EXAMPLES = r"""
- name: Have the checkpoint from the hub
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: 4a1c0b5de0f1a2b3c4d5e6f708192a3b4c5d6e7f
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b
    ignore_patterns: ["*.gguf", "original/"]
    client_requirements: "{{ lookup('ansible.builtin.file', 'hub-client.txt') }}"
    token: "{{ vault_hub_token }}"
    space:
      - path: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b-hybrid
        snapshots: 1.0
        what: the hybrid checkpoint

- name: Have it from a mirror of the hub, with a Python that has huggingface_hub already
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: 4a1c0b5de0f1a2b3c4d5e6f708192a3b4c5d6e7f
    endpoint: http://mirror.example:8080
    client_python: /opt/hub/bin/python
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b

- name: Have it from what 'hf download' left in a cache on a mounted disk
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: 4a1c0b5de0f1a2b3c4d5e6f708192a3b4c5d6e7f
    source: /mnt/disk/huggingface/hub
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b

- name: Have it from a mounted folder with SHA256SUMS
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: sha256:0f343b0931126a20f133d67c2b018a3b5f6d9c2f1e1d7e8a9b0c1d2e3f405162
    source: /mnt/models/qwen35-122b
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b

- name: Have it from a web server of the local network, and read every byte again
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: 4a1c0b5de0f1a2b3c4d5e6f708192a3b4c5d6e7f
    sums_sha256: 0f343b0931126a20f133d67c2b018a3b5f6d9c2f1e1d7e8a9b0c1d2e3f405162
    source: http://192.0.2.10:8080/qwen35-122b
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b
    verify: full

- name: Let the other node read the first node's snapshot
  dgxspark.vllm.snapshot_share:
    path: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b
    address: 192.168.100.1
  delegate_to: spark1
  register: share
  no_log: true

- name: Have it from the first node
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: 4a1c0b5de0f1a2b3c4d5e6f708192a3b4c5d6e7f
    source: "{{ share.url }}"
    source_token: "{{ share.token }}"
    manifest_sha256: "{{ share.manifest_sha256 }}"
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b
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
commit:
  description: The commit that the files are of, 40 hexadecimal digits; empty when it is not known, as of a folder that is pinned by a
    list alone.
  type: str
  returned: success
sums_sha256:
  description: The pin of a folder or web server; empty otherwise.
  type: str
  returned: success
manifest_sha256:
  description: SHA-256 of C(.dgxspark-snapshot.json); empty while it is not complete.
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
  description: In check mode, what would be brought, C(files) and C(bytes); null when the source does not tell.
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

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import hub_venv, snapshot
from ..module_utils import snapshot_files as files
from ..module_utils import snapshot_hub as hub
from ..module_utils import snapshot_way as way
from ..module_utils.changes import Changes
from ..module_utils.jobs import Job, JobFailure, Systemd, new_watch, short
from ..module_utils.problems import Problem, problem
from ..module_utils.snapshot_space import existing, gb, place_failure
from ..module_utils.sources import HEX40, LONGEST_PAUSE_S, SUMS, source_kind

# What an earlier task, not run in check mode either, may be about to mend.
PASSING = {"hub_unreachable", "hub_error", "rate_limited", "hub_client_died"}
PASSING |= {"client_missing", "client_unsuitable", "venv_unavailable", "client_package_missing", "client_not_installed"}
PASSING |= {"package_index_unreachable", "source_vanished", "source_unreachable", "transfer_stalled"}
# Of any source but the hub, which an earlier task, or the first node, may be about to fill.
PASSING_PLACES = {"no_pin", "no_sums", "source_incomplete", "source_unreadable", "source_changed", "not_found", "revision_not_found"}
# What is wrong with a pin only when its source is what it seems to be now: a cache that is gone looks like a plain folder without a list.
OF_THE_SOURCE = {"no_pin", "not_in_cache", "source_vanished"}
UNREAD = "; in check mode verify=full reads no file: sizes and times are as noted"


def run(p: dict[str, Any], check: bool) -> dict[str, Any]:
    """One look: complete already, or the job that makes it so."""
    dest = Path(p["dest"])
    request, wrong = way.make_request(p)
    wrong = [*way.source_problems(p["source"]), *way.place_problems(p["source"], p["dest"]), *wrong, *_parameter_problems(p)]
    if not {found["class"] for found in wrong} <= OF_THE_SOURCE:
        raise JobFailure(*wrong)
    name = f"snapshot-{short(p['dest'])}"
    spec = _spec(p, request, name)
    base = {"path": p["dest"], "revision": request.revision, "sums_sha256": request.sums_sha256}
    job = Job(Path(p["state_dir"]), name, "snapshot", f"dgxspark.vllm snapshot of {p['repo']}", Systemd())
    watch = p["watch"] or new_watch()

    if check or not job.following(spec, watch):
        manifest = files.complete(dest, request, p["mutable"])
        if manifest is not None and (check or p["verify"] == "stamps"):
            answer = {**base, **_whole(manifest, request), "changed": False, "complete": True, "resumed_bytes": 0}
            return answer | ({"msg": f"complete{UNREAD}"} if p["verify"] == "full" else {})
        if check:
            return {**base, **_would(p, request, spec, wrong)}
        if found := [*_rights(p), *(wrong if manifest is None else []), *(_client_problems(p) if manifest is None else [])]:
            raise JobFailure(*found)
        if manifest is None and way.kind_of(p["source"], p["repo"]) in {"folder", "cache"}:
            _look(p, request, spec)  # what is wrong with a folder is known at once, without a job
        for secret in ("token", "source_token"):
            hub.store_secret(Path(p["state_dir"]), f"{name}.{secret}", p[secret])

    status = job.follow(spec, watch, _patience(p))
    if status.state != "running":
        hub.store_secret(Path(p["state_dir"]), f"{name}.source_token", "")  # a share's token is of no use after this
    answer = {**base, "changed": False, "complete": status.state == "done", "job": status.wire(watch)}
    if status.state != "done":
        return {**answer, "bytes": 0, "files": 0, "resumed_bytes": 0, "commit": "", "manifest_sha256": ""}
    result = status.result
    if not snapshot.is_report(result):
        raise job.damaged_result()
    changes = Changes()
    changes.add(p["dest"], result["before"], result["after"])
    figures = {"files": len(result["files"]), "bytes": sum(int(entry["size"]) for entry in result["files"].values())}
    told = {"resumed_bytes": result["resumed_bytes"], "manifest_sha256": result["manifest_sha256"], "warnings": result["notes"]}
    return {**answer, **changes.result(), **figures, **told, "commit": _commit(result["revision"]), "sums_sha256": result["sums_sha256"]}


def _rights(p: dict[str, Any]) -> list[Problem]:
    """Whether this user may write where it has to."""
    user = os.geteuid()
    places = [Path(p[name]) for name in ("state_dir", "dest")]
    shut = [str(place) for place in places if user and not os.access(existing(place), os.W_OK | os.X_OK)]
    return [_not_root(user, f"cannot write {' nor '.join(shut)}")] if shut else []


def _not_root(user: int, what: str) -> Problem:
    return problem("not_root", f"the module runs as user id {user} and {what}", "set become: true for this task or play")


def _failure(error: OSError, p: dict[str, Any]) -> JobFailure:
    """An error of the node's file system, by what it means."""
    if isinstance(error, PermissionError) and os.geteuid():
        return JobFailure(_not_root(os.geteuid(), f"cannot use {error.filename}: {error.strerror or error}"))
    return place_failure(error, Path(p["dest"]), Path(p["state_dir"]))


def _parameter_problems(p: dict[str, Any]) -> list[Problem]:
    """Parameters that cannot be right."""
    found = way.repo_problems(p["repo"])
    if p["endpoint"]:
        found += way.address_problems("endpoint", p["endpoint"])
    if p["workers"] < 1:
        found.append(problem("bad_workers", f"workers is {p['workers']}", "give 1 or more"))
    return found


def _client_problems(p: dict[str, Any]) -> list[Problem]:
    return hub_venv.foreseen(Path(p["state_dir"]), p["client_requirements"], p["client_python"]) if p["source"] == "hub" else []


def _spec(p: dict[str, Any], request: files.Request, name: str) -> dict[str, Any]:
    """The job's: no secrets, only where they lie."""
    state_dir = Path(p["state_dir"])
    spec = {name: p[name] for name in ("repo", "source", "dest", "mutable", "verify", "space", "workers", "stall_timeout_s")}
    spec |= {"revision": request.revision, "pin": request.sums_sha256, "manifest_sha256": request.manifest_sha256}
    spec |= {"ignore_patterns": request.ignore_patterns, "hub": None}
    spec["source_token_path"] = hub.secret_path(state_dir, f"{name}.source_token", p["source_token"])
    if p["source"] == "hub":
        spec["hub"] = hub.hub_spec(p, p["repo"], request.revision, hub.secret_path(state_dir, f"{name}.token", p["token"]))
    return spec


def _patience(p: dict[str, Any]) -> float:
    """Seconds without progress after which the job is stopped from outside. From the hub, the job itself looks, and tries again first."""
    return 2 * p["stall_timeout_s"] + 2 * LONGEST_PAUSE_S if p["source"] == "hub" and p["stall_timeout_s"] else p["stall_timeout_s"]


def _commit(revision: str) -> str:
    return revision if HEX40.fullmatch(revision) else ""


def _whole(manifest: files.Manifest, request: files.Request) -> dict[str, Any]:
    """What there is to say of a complete snapshot."""
    note = way.branch_note(request, manifest.revision)
    return {
        "files": len(manifest.files),
        "bytes": sum(size for size, _ in manifest.files.values()),
        "commit": _commit(manifest.revision),
        "sums_sha256": manifest.sums_sha256,
        "manifest_sha256": manifest.sha256,
        "warnings": [note] if note else [],
    }


def _look(p: dict[str, Any], request: files.Request, spec: dict[str, Any]) -> tuple[files.Wanted, dict[str, str], int | None, int]:
    """Files wanted, why each one missing is, their size, bytes to come; JobFailure when they cannot be brought."""
    dest = Path(p["dest"])
    asked = {**spec, "source_token": hub.checked_secret(p["source_token"], "source_token")}
    if spec["hub"]:
        asked["hub"] = {**spec["hub"], "xet": False}  # only lists are asked for, and that library makes folders
    with way.Way(request, asked, lambda _line: None, patient=False, make=False, hub_token=p["token"]) as at:
        noted, wanted, todo = snapshot.survey(dest, request, p["mutable"], at)
        sure = [name for name, state in todo.items() if state not in {"unverified", "changed"}]
        still, size = snapshot.missing_bytes(dest, wanted.files, sure, at.size)
    blocked = files.in_the_way(dest, {name: wanted.files[name] for name in todo})
    blocked += files.foreign(dest, noted, todo, ("short", "long"))  # by their sizes; the others are read before they are judged
    there = sum(files.size_of(dest / name) for name in wanted.files if name not in sure)
    whole = wanted.size if size is None else size + there
    if found := [*blocked, *snapshot.space_needed(dest, still, wanted, whole, spec)]:
        raise JobFailure(*found)
    return wanted, todo, size, still


def _would(p: dict[str, Any], request: files.Request, spec: dict[str, Any], wrong: list[Problem]) -> dict[str, Any]:
    """Check mode's answer when something is missing. wrong: what is already known of the source."""
    passing = PASSING if p["source"] == "hub" else PASSING | PASSING_PLACES
    if source_kind(p["source"]) != "folder" or (Path(p["source"]) / SUMS).exists():
        passing = passing - {"no_pin"}  # it is no cache, whatever happens before
    changes = Changes()
    answer = {"complete": False, "files": 0, "bytes": 0, "resumed_bytes": 0, "commit": "", "manifest_sha256": ""}
    try:
        if wrong:
            raise JobFailure(*wrong)
        wanted, todo, size, still = _look(p, request, spec)
    except JobFailure as failure:
        if not all(found["class"] in passing for found in failure.problems):
            raise
        changes.add(p["dest"], "complete: no\n", "complete: yes\n")
        msg = failure.message("would bring the snapshot, but what of it cannot be told now")
        return {**changes.result(), **answer, "missing": {"files": None, "bytes": None}, "msg": msg}
    removed = [name for name in files.known(Path(p["dest"])).files if name not in wanted.files]
    changes.add(p["dest"], *snapshot.difference(todo, removed, wanted.files))
    told = "an unknown amount" if size is None else gb(still)
    note = way.branch_note(request, wanted.revision)
    return {
        **changes.result(),
        **answer,
        "files": len(wanted.files),
        "bytes": size or 0,
        "commit": _commit(wanted.revision),
        "missing": {"files": len(todo), "bytes": None if size is None else still},
        "msg": f"would bring {len(todo)} of {len(wanted.files)} files ({told}) from {p['source']}"
        + (UNREAD if p["verify"] == "full" else ""),
        "warnings": [note] if note else [],
    }


ARGUMENTS = {
    "repo": {"type": "str", "required": True},
    "revision": {"type": "str", "required": True},
    "sums_sha256": {"type": "str", "default": ""},
    "manifest_sha256": {"type": "str", "default": ""},
    "source": {"type": "str", "default": "hub"},
    "source_token": {"type": "str", "default": "", "no_log": True},
    "dest": {"type": "path", "required": True},
    "endpoint": {"type": "str", "default": ""},
    "token": {"type": "str", "default": "", "no_log": True},
    "client_requirements": {"type": "str", "default": ""},
    "client_python": {"type": "str", "default": ""},
    "pip_args": {"type": "list", "elements": "str", "default": []},
    "workers": {"type": "int", "default": 4},
    "xet": {"type": "str", "choices": ["auto", "off"], "default": "auto"},
    "ignore_patterns": {"type": "list", "elements": "str", "default": []},
    "mutable": {"type": "list", "elements": "str", "default": ["model.safetensors.index.json"]},
    "verify": {"type": "str", "choices": ["stamps", "full"], "default": "stamps"},
    "stall_timeout_s": {"type": "int", "default": 300},
    "space": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "path": {"type": "path", "required": True},
            "bytes": {"type": "int", "default": 0},
            "snapshots": {"type": "float", "default": 0.0},
            "what": {"type": "str", "default": ""},
        },
    },
    "state_dir": {"type": "path", "default": "/var/lib/dgxspark-vllm"},
    "watch": {"type": "str", "default": ""},
}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    p = module.params
    try:
        result = run(p, module.check_mode)
    except JobFailure as failure:
        headline = f"The snapshot of {p['repo']} in {p['dest']} is not complete."
        module.fail_json(msg=failure.message(headline), problems=failure.problems)
    except OSError as error:
        failure = _failure(error, p)
        module.fail_json(msg=failure.message(f"The snapshot in {p['dest']} cannot be looked at."), problems=failure.problems)
    for text in result.pop("warnings", []):
        module.warn(text)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
