#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Tell from a log what went wrong."""

from __future__ import annotations

DOCUMENTATION = r"""
module: log_diagnosis
short_description: Tell from a log what went wrong
description:
  - Sorts the lines of a log of vLLM, of an image build or of the node's tools into known faults, each with its remedy.
  - The root cause comes before what follows from it. Harmless lines and reports of success give nothing.
options:
  text:
    description: The log itself.
    type: str
  path:
    description: A file on the node that holds it.
    type: path
  unit:
    description: A systemd unit; the journal of its last run is read.
    type: str
  max_lines:
    description: How many lines to read, from the end.
    type: int
    default: 20000
attributes:
  check_mode:
    description: Only reads.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
author:
  - dgxspark.vllm authors
"""

EXAMPLES = r"""
- name: Ask why the last start failed
  dgxspark.vllm.log_diagnosis:
    unit: dgxspark-vllm
  register: log
"""

RETURN = r"""
diagnoses:
  description: What went wrong, the root cause first; empty if the log shows nothing that has.
  type: list
  elements: dict
  returned: success
  contains:
    class:
      description: Kind of the fault.
      type: str
    evidence:
      description: The line that shows it.
      type: str
    remedy:
      description: What to do.
      type: str
    retryable:
      description: Whether doing the same again may be enough.
      type: bool
stage:
  description: How far the start of a vLLM server had come in this log.
  type: str
  returned: success
lines:
  description: How many lines were read.
  type: int
  returned: success
log_tail:
  description: The last lines.
  type: list
  elements: str
  returned: success
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.log_classifier import diagnose
from ..module_utils.problems import describe, problem
from ..module_utils.service_state import EVIDENCE_LINES, read_journal, read_unit, runner
from ..module_utils.vllm_log import split, stage_of, tail

MAX_BYTES = 64 << 20


def read_file(module: AnsibleModule, path: Path) -> str:
    """The end of a file, at most MAX_BYTES of it."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - MAX_BYTES))
            return stream.read(MAX_BYTES).decode(errors="replace")
    except OSError as exc:
        found = [problem("log_unreadable", f"{path}: {exc.strerror}", "give the path of a readable log file on the node")]
        module.fail_json(msg=describe(found, "Cannot read the log"), problems=found)
        raise


def read_unit_log(module: AnsibleModule, name: str, lines: int) -> str:
    """The journal of a unit's last run."""
    run = runner(module)
    unit = read_unit(run, name)
    journal = read_journal(run, name, unit.invocation, lines=lines)
    if not journal.entries:
        evidence = unit.error or journal.error or f"the journal holds nothing of {unit.name}"
        found = [problem("log_unreadable", evidence, "check the unit's name, and read the journal as root")]
        module.fail_json(msg=describe(found, "Cannot read the log"), problems=found)
    return journal.text


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "text": {"type": "str"},
            "path": {"type": "path"},
            "unit": {"type": "str"},
            "max_lines": {"type": "int", "default": 20000},
        },
        mutually_exclusive=[("text", "path", "unit")],
        required_one_of=[("text", "path", "unit")],
        supports_check_mode=True,
    )
    params = module.params
    if params["text"] is not None:
        text = params["text"]
    elif params["path"] is not None:
        text = read_file(module, Path(params["path"]))
    else:
        text = read_unit_log(module, params["unit"], params["max_lines"])
    lines = split(text)[-max(1, params["max_lines"]) :]
    text = "\n".join(lines)
    module.exit_json(
        changed=False, diagnoses=diagnose(text), stage=stage_of(text).name, lines=len(lines), log_tail=tail(text, EVIDENCE_LINES)
    )


if __name__ == "__main__":
    main()
