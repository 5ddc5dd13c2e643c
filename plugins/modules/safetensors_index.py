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
  - Hidden files, and files of another format that may lie beside a checkpoint (C(consolidated*.safetensors), C(adapter_*.safetensors)), are
    not taken for part of it unless the index lists them.
  - Quantised tensors are checked for their scales, by name and shape.
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
      - V(checked) changes nothing, and fails on what V(present) would mend too. A wrong C(total_size) alone is only a warning.
    type: str
    choices: [checked, present]
    default: present
  require_mtp:
    description:
      - Whether it is an error that no shard holds MTP tensors. Otherwise there is a warning if C(config.json) promises an MTP layer.
    type: bool
    default: false
  index_name:
    description: File name of the index.
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

import stat
from itertools import islice
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.changes import Changes
from ..module_utils.files import atomic_write
from ..module_utils.problems import Problem, describe, errors, problem
from ..module_utils.safetensors_header import BadFile
from ..module_utils.safetensors_index import INDEX_NAME, Report, compare, difference, index_text, read_checkpoint

LIMIT = 20


def result_of(report: Report) -> dict[str, Any]:
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
        "counts": counts,
        "tensors": len(report.owner),
        "total_size": report.total_size,
    }


def finish(module: AnsibleModule, problems: list[Problem], result: dict[str, Any], changes: Changes) -> None:
    """Fail on errors, else succeed; warnings are shown either way."""
    for fault in problems:
        if fault["severity"] == "warning":
            module.warn(f"{fault['class']}: {fault['evidence']} Remedy: {fault['remedy']}")
    if errors(problems):
        headline = f"The checkpoint in {result['path']} cannot be used as it is; nothing was changed."
        module.fail_json(msg=describe(problems, headline), problems=problems, **result)
    module.exit_json(problems=problems, **result, **changes.result())


def write_index(path: Path, report: Report) -> list[Problem]:
    """Replace the index, keeping its mode. The problem when that does not work."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
        atomic_write(path, index_text(report.mended or {}), mode, keep_owner=True)
    except OSError as failure:
        remedy = "Make room on the disk, or let this user write to the folder (become: true)."
        return [problem("cannot_write", f"{path} cannot be written: {failure.strerror or failure}", remedy)]
    return []


def run(module: AnsibleModule) -> None:
    """Read, compare, and write what is certain."""
    folder, index_name = Path(module.params["path"]), module.params["index_name"]
    changes = Changes()
    result = {"path": str(folder), **result_of(Report())}
    if "/" in index_name or index_name in ("", ".", ".."):
        fault = problem("bad_index_name", f"index_name is {index_name!r}", f"Give a bare file name, usually {INDEX_NAME}.")
        return finish(module, [fault], result, changes)
    try:
        found = read_checkpoint(folder, index_name)
    except BadFile as bad:
        return finish(module, bad.problems, result, changes)
    report = compare(found, module.params["require_mtp"])
    result |= result_of(report)
    problems = report.problems
    if module.params["state"] == "checked":
        problems = problems + report.mendable
    elif report.mended is not None:
        changes.add(str(folder / index_name), *difference(found, report))
        if not module.check_mode:
            problems = problems + write_index(folder / index_name, report)
    return finish(module, problems, result, changes)


def main() -> None:
    """Entry point."""
    run(
        AnsibleModule(
            argument_spec={
                "path": {"type": "path", "required": True},
                "state": {"type": "str", "choices": ["checked", "present"], "default": "present"},
                "require_mtp": {"type": "bool", "default": False},
                "index_name": {"type": "str", "default": INDEX_NAME},
            },
            supports_check_mode=True,
        )
    )


if __name__ == "__main__":
    main()
