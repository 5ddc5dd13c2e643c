#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Check a checkpoint's shards against its index, and mend the index."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: safetensors_index
short_description: Check a checkpoint's shards against its index, and mend the index
version_added: 0.1.0
description:
  - Reads the header of every C(*.safetensors) file in a folder, whatever the file is called, and compares them with the index in both
    directions. No tensor is read, so a checkpoint of 70 GB takes about a second.
  - Loaders trust the index. A tensor that is not listed, such as those of a multi-token prediction (MTP) layer in a file of their own, is
    dropped in silence. With O(state=present) such tensors are listed.
  - Everything is reported at once. Whatever does not have exactly one right answer is an error, and then nothing is changed.
  - Every link among the files is followed. With O(visible_root) it is also followed as a container would, which sees only what is mounted.
  - Hidden files, and files of another format that may lie beside a checkpoint (C(consolidated*.safetensors), C(adapter_*.safetensors)), are
    not taken for part of it unless the index lists them.
  - Quantised tensors are checked for their scales, by name and shape. MTP layers are checked for what such a layer needs at least.
attributes:
  check_mode:
    description: Can run in check mode and says what it would change, without changing anything.
    support: full
  diff_mode:
    description: Returns what has changed, as counts and the first names. A complete diff could be tens of thousands of lines.
    support: full
options:
  path:
    description: Folder of the checkpoint.
    type: path
    required: true
  state:
    description:
      - V(present) mends the index where there is exactly one right answer. It lists tensors that are not listed, corrects entries whose
        file does not have the tensor when exactly one other file has it, recomputes C(total_size) (bytes of all tensors), and makes an
        index for several shards without one. Other keys of the index are kept. A single shard needs no index.
      - The index is replaced by a rename and never half written. Where it is a link into a Hugging Face cache, the link is replaced and the
        cache's blob stays.
      - The index that was there first is kept in the folder C(.dgxspark-pristine). A later run leaves it alone, unless the snapshot's
        manifest (C(.dgxspark-snapshot.json)) says that a newer one has come.
      - V(checked) changes nothing, and fails on what V(present) would mend too. A wrong C(total_size) alone is only a warning.
    type: str
    choices: [checked, present]
    default: present
  require_mtp:
    description:
      - Whether it is an error that MTP tensors are missing. Otherwise it is a warning, if C(config.json) promises an MTP layer.
      - Of each promised layer all parts must be there, such as the projection C(fc), norms, attention, and every expert. Parts are known
        for the naming of Qwen (C(mtp.layers.0)) and of DeepSeek and GLM (the layers after the last one).
    type: bool
    default: false
  duplicates:
    description:
      - What to do about a tensor that is in more than one file. V(refuse) makes it an error.
      - V(last_wins) lists the file that a loader reads last, and warns. Files are read in the order of their names, with digits as
        numbers, as vLLM does. Such a checkpoint cannot be loaded with C(fastsafetensors), nor with several threads at once.
    type: str
    choices: [refuse, last_wins]
    default: refuse
  source:
    description:
      - Folder of the checkpoint that this one was made from. It is an error that a tensor of it is nowhere in this one, neither under its
        own name nor packed.
      - Only its headers are read. By default nothing is compared.
    type: path
  visible_root:
    description:
      - Folder that is mounted into the container that loads the checkpoint. Where a file that a server reads (weights, index,
        configuration, tokenizer, templates) is a link, it must end inside of that folder, else it is an error that names the folder to
        mount.
      - By default links are only followed on this machine.
    type: path
  visible_at:
    description:
      - Path under which the container sees O(visible_root). Absolute links lead nowhere in there unless they begin with it.
    type: path
    default: /model
  index_name:
    description: File name of the index. It cannot begin with a dot.
    type: str
    default: model.safetensors.index.json
author:
  - The dgxspark.vllm authors
"""

EXAMPLES = r"""
- name: List every tensor that is on disk in the index
  dgxspark.vllm.safetensors_index:
    path: /var/lib/dgxspark-vllm/checkpoints/Intel--Qwen3.5-122B-A10B-int4-AutoRound/4fd9ff65a6a4
    require_mtp: true

- name: Accept a published checkpoint that has tensors twice
  dgxspark.vllm.safetensors_index:
    path: /srv/models/Qwen3.5-397B-A17B-int4
    duplicates: last_wins
  register: checkpoint

- name: Check that a container which has the snapshot mounted sees all of it
  dgxspark.vllm.safetensors_index:
    path: /srv/cache/models--Qwen--Qwen3.5-35B-A3B-FP8/snapshots/{{ revision }}
    state: checked
    visible_root: /srv/cache/models--Qwen--Qwen3.5-35B-A3B-FP8/snapshots/{{ revision }}

- name: Check that nothing was lost when a checkpoint was quantised
  dgxspark.vllm.safetensors_index:
    path: /srv/models/mine-int4
    state: checked
    source: /srv/models/mine-bf16

- name: Only look
  dgxspark.vllm.safetensors_index:
    path: /srv/models/Qwen3.5-35B-A3B-FP8
    state: checked
  register: checkpoint
  failed_when: checkpoint.missing_shards | length > 0
"""

RETURN = r"""
path:
  description: The folder.
  returned: always
  type: str
  sample: /srv/models/Qwen3.5-122B-A10B-int4
missing_shards:
  description: Files that the index lists, or that the numbers in the others' names promise, and that are not there. At most 20.
  returned: always
  type: list
  elements: str
  sample: [model-00002-of-00014.safetensors]
unlisted_tensors:
  description: Tensors in listed files that the index did not list before this run. At most 20.
  returned: always
  type: list
  elements: str
  sample: [model.norm.weight]
unlisted_files:
  description: Files of which the index did not list any tensor before this run. At most 20.
  returned: always
  type: list
  elements: str
  sample: [model_extra_tensors.safetensors]
duplicates:
  description: Tensors that are in more than one file, each with those files. At most 20.
  returned: always
  type: dict
  sample: {model.norm.weight: [model-00001-of-00002.safetensors, model-00002-of-00002.safetensors]}
fast_loader_safe:
  description: Whether a loader that wants each name in one file only, such as C(fastsafetensors), can load the checkpoint.
  returned: always
  type: bool
  sample: true
mtp_layers:
  description: How many MTP layers C(config.json) promises, and of how many there is any tensor whose name tells the layer.
  returned: always
  type: dict
  sample: {expected: 1, found: 1}
mtp_tensors:
  description: Tensors of multi-token prediction layers, in any file. At most 20.
  returned: always
  type: list
  elements: str
  sample: [mtp.fc.weight, mtp.norm.weight]
counts:
  description:
    - How many there are of each of the lists above.
    - C(unlisted_file_tensors) is how many tensors the unlisted files add.
    - C(corrected) is how many entries named a file without their tensor.
  returned: always
  type: dict
  sample:
    missing_shards: 0
    unlisted_tensors: 0
    unlisted_files: 1
    unlisted_file_tensors: 785
    duplicates: 0
    corrected: 0
    mtp_tensors: 785
tensors:
  description: How many different tensors there are in all files.
  returned: always
  type: int
  sample: 3133
total_size:
  description: Bytes of all tensors, without the files' headers.
  returned: always
  type: int
  sample: 75161927680
files:
  description: How many C(*.safetensors) files were read as part of the checkpoint.
  returned: always
  type: int
  sample: 15
bytes_read:
  description: Bytes that were read, which are headers, the index and C(config.json), without those of O(source).
  returned: always
  type: int
  sample: 6834518
problems:
  description: What is wrong, apart from what this run has mended. Errors make the module fail; warnings do not.
  returned: always
  type: list
  elements: dict
  sample:
    - class: missing_shard
      evidence: "model.safetensors.index.json lists 1 file not in the folder: model-00002-of-00014.safetensors (168 tensors, such as ...)"
      remedy: "The download is incomplete: run the checkpoint role again, it resumes."
      severity: error
"""

import os
from itertools import islice
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.changes import Changes
from ..module_utils.problems import Problem, describe, errors, problem
from ..module_utils.safetensors_compare import Report, compare, difference
from ..module_utils.safetensors_header import BadFile, shown
from ..module_utils.safetensors_index import INDEX_NAME, Checkpoint, read_checkpoint, replace_index
from ..module_utils.safetensors_links import invisible_links

LIMIT = 20


def result_of(found: Checkpoint, report: Report) -> dict[str, Any]:
    """The report as return values, long lists cut short."""
    lists = {
        "missing_shards": report.missing_shards,
        "unlisted_tensors": report.unlisted_tensors,
        "unlisted_files": list(report.unlisted_files),
        "mtp_tensors": report.mtp_tensors,
    }
    counts = {name: len(entries) for name, entries in lists.items()}
    counts |= {
        "duplicates": len(report.duplicates),
        "corrected": len(report.corrected),
        "unlisted_file_tensors": sum(report.unlisted_files.values()),
    }
    return {
        **{name: entries[:LIMIT] for name, entries in lists.items()},
        "duplicates": dict(islice(report.duplicates.items(), LIMIT)),
        "fast_loader_safe": not report.duplicates,
        "mtp_layers": {"expected": report.mtp_layers.expected, "found": report.mtp_layers.found},
        "counts": counts,
        "tensors": len(report.owner),
        "total_size": report.total_size,
        "files": len(found.headers) + len(found.damaged),
        "bytes_read": found.bytes_read,
    }


def finish(module: AnsibleModule, problems: list[Problem], result: dict[str, Any], changes: Changes) -> None:
    """Fail on errors, else succeed; warnings are shown either way."""
    for fault in problems:
        if fault["severity"] == "warning":
            module.warn(f"{fault['class']}: {fault['evidence']} Remedy: {fault['remedy']}")
    if errors(problems):
        headline = f"The checkpoint in {shown(Path(result['path']))} cannot be used as it is; nothing was changed."
        module.fail_json(msg=describe(problems, headline), problems=problems, **result)
    module.exit_json(problems=problems, **result, **changes.result())


def read(params: dict[str, Any]) -> tuple[Checkpoint, Checkpoint | None]:
    """The checkpoint, and its source where there is one. BadFile when a folder cannot be read."""
    folder = Path(params["path"])
    found = read_checkpoint(folder, params["index_name"])
    if params["visible_root"]:
        found.problems += invisible_links(folder, found.entries, Path(params["visible_root"]), params["visible_at"])
    source = read_checkpoint(Path(params["source"]), params["index_name"]) if params["source"] else None
    if source:
        for fault in [fault for faults in source.damaged.values() for fault in faults]:
            found.problems.append({**fault, "evidence": f"source {shown(Path(params['source']))}: {fault['evidence']}"})
    return found, source


def write_index(folder: Path, name: str, report: Report) -> list[Problem]:
    """Replace the index. The problem when that does not work."""
    try:
        replace_index(folder, name, report.mended or {})
    except OSError as failure:
        remedy = "Make room on the disk, or let this user write to the folder (become: true)."
        return [problem("cannot_write", f"{shown(folder / name)} cannot be written: {failure.strerror or failure}", remedy)]
    return []


def argument_problems(params: dict[str, Any]) -> list[Problem]:
    """What is wrong with the arguments themselves."""
    found, name, at = [], params["index_name"], params["visible_at"]
    if "/" in name or not name or name.startswith(".") or not name.isprintable():  # hidden names are the collection's own
        found.append(
            problem(
                "bad_index_name", f"index_name is {name!r}", f"Give a bare, printable file name that is not hidden, usually {INDEX_NAME}."
            )
        )
    if not at.startswith("/") or not is_path(at):
        found.append(problem("bad_visible_at", f"visible_at is {at!r}", "Give the absolute path of the mount in the container, as /model."))
    for option in ("path", "source", "visible_root"):
        if params[option] and not is_path(params[option]):
            found.append(problem("bad_path", f"{option} is {params[option]!r}", "Give a path without NUL characters, in UTF-8."))
    return found


def is_path(text: str) -> bool:
    """Whether the system takes a text for a path: no NUL, nothing that has no bytes."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def run(module: AnsibleModule) -> None:
    """Read, compare, and write what is certain."""
    folder, index_name = Path(module.params["path"]), module.params["index_name"]
    changes = Changes()
    result = {"path": str(folder), **result_of(Checkpoint(), Report())}
    if faults := argument_problems(module.params):
        return finish(module, faults, result, changes)
    try:
        found, source = read(module.params)
    except BadFile as bad:
        return finish(module, bad.problems, result, changes)
    report = compare(found, module.params["require_mtp"], module.params["duplicates"] == "last_wins", source)
    result |= result_of(found, report)
    problems = report.problems
    if module.params["state"] == "checked":
        problems = problems + report.mendable
    elif report.mended is not None:
        changes.add(str(folder / index_name), *difference(found, report))
        if not module.check_mode:
            problems = problems + write_index(folder, index_name, report)
    return finish(module, problems, result, changes)


def main() -> None:
    """Entry point."""
    run(
        AnsibleModule(
            argument_spec={
                "path": {"type": "path", "required": True},
                "state": {"type": "str", "choices": ["checked", "present"], "default": "present"},
                "require_mtp": {"type": "bool", "default": False},
                "duplicates": {"type": "str", "choices": ["refuse", "last_wins"], "default": "refuse"},
                "source": {"type": "path"},
                "visible_root": {"type": "path"},
                "visible_at": {"type": "path", "default": "/model"},
                "index_name": {"type": "str", "default": INDEX_NAME},
            },
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
