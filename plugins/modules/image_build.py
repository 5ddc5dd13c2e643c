#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: image_build
short_description: Have the container image of a profile on this node
version_added: 0.1.0
description:
  - Builds an image from files on the node, or records one that is there already, and writes a manifest that other roles read.
  - The image carries the digest of everything it is made of as label C(dgxspark.vllm.inputs). It is built when no image has that label.
    A name alone proves nothing.
  - The build runs on the node as a transient systemd unit, so that it goes on when the connection is lost; running the task again joins it.
    When it fails, the image and the manifest from before stay as they are.
  - Works with Docker 20.10 and newer, with its classic builder and with BuildKit.
author:
  - dgxspark.vllm authors (@dgxspark)
extends_documentation_fragment:
  - dgxspark.vllm.job
options:
  profile:
    description: Name of the image profile.
    type: str
    required: true
  manifest:
    description: File on the node to write the image's id and inputs to, last of all.
    type: path
    required: true
  reference:
    description: Name, id or digest of an image that is on the node; nothing is built then.
    type: str
    default: ""
  dockerfile:
    description: Text of the Dockerfile.
    type: str
    default: ""
  context:
    description: Files of the build context.
    type: list
    elements: dict
    default: []
    suboptions:
      dest:
        description: Path in the context.
        type: str
        required: true
      src:
        description: Absolute path on the node of a file, or of a folder whose files are taken with their paths below it.
        type: str
        default: ""
      content:
        description: Text of the file, instead of O(context[].src).
        type: str
  build_args:
    description: Arguments for C(ARG) instructions. They are part of the image's inputs and visible in its history, so no place for secrets.
    type: dict
    default: {}
  repository:
    description:
      - Name of the image, by default C(dgxspark-vllm-) and the profile. The first 12 digits of the digest of its inputs become its tag.
    type: str
    default: ""
  jobs:
    description:
      - Compile jobs, given as build argument C(MAX_JOBS) to a Dockerfile that has C(ARG MAX_JOBS). It does not count as input.
      - V(0) stands for one for each 8 GiB of free memory, at most one for each core.
    type: int
    default: 0
  stall_timeout_s:
    description: Seconds without a byte sent or a line of log after which the build is stopped as an error; V(0) for no limit.
    type: int
    default: 1800
attributes:
  check_mode:
    description: Says whether an image would be built and what changed; starts nothing.
    support: full
  diff_mode:
    description: Shows which inputs changed since the build before.
    support: full
"""

EXAMPLES = r"""
- name: Build the image from wheels on the node
  dgxspark.vllm.image_build:
    profile: cpu
    dockerfile: "{{ lookup('ansible.builtin.file', 'cpu/Dockerfile') }}"
    context:
      - {dest: base.tar, src: /srv/base.tar}
      - {dest: wheelhouse, src: /srv/wheelhouse}
      - {dest: fixups.py, content: "{{ lookup('ansible.builtin.file', 'cpu/fixups.py') }}"}
    manifest: /var/lib/dgxspark-vllm/images/cpu.json

- name: Use an image that was loaded by other means
  dgxspark.vllm.image_build:
    profile: existing
    reference: registry.example/vllm@sha256:0f343b0931126a20f133d67c2b018a3b5f6d9c2f1e1d7e8a9b0c1d2e3f405162
    manifest: /var/lib/dgxspark-vllm/images/existing.json
"""

RETURN = r"""
image_id:
  description: Id of the image on this node; empty while there is none.
  type: str
  returned: success
inputs:
  description: Digest of what the image is made of.
  type: str
  returned: success
tag:
  description: Name of the image.
  type: str
  returned: success
built:
  description: Whether an image was built (in check mode, would be), as opposed to found.
  type: bool
  returned: success
job:
  description: The job on the node - state, stage, done, total, unit, rate, eta_s, message, watch.
  type: dict
  returned: when there was something to build
problems:
  description: What is wrong - class, evidence, remedy and severity of each.
  type: list
  elements: dict
  returned: failure
"""

import errno
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import image_build as core
from ..module_utils.changes import Changes
from ..module_utils.files import read_json, write_json
from ..module_utils.jobs import Job, JobFailure, Systemd, new_watch
from ..module_utils.problems import problem


def run(p: dict[str, Any], check: bool) -> dict[str, Any]:
    """One look: there already, or the job that builds it."""
    if p["reference"]:
        return _existing(p, check)
    spec, entries = _spec(p, check)
    base = {"inputs": spec["inputs"], "tag": spec["tag"]}
    job = Job(Path(p["state_dir"]), f"image-{p['profile']}", "image_build", f"dgxspark.vllm image {p['profile']}", Systemd())
    watch = p["watch"] or new_watch()

    if check or not job.following(spec, watch):
        old = read_json(Path(p["manifest"]))
        if image := core.find_image(spec, old):
            return {**_record(p, image, spec["inputs"], spec["tag"], spec["detail"], check), "built": False}
        if found := core.check_space(entries):
            raise JobFailure(*found)
        if check:
            changes = Changes()
            changes.add(_header(p), *core.compared(core.manifest_text(old), core.inputs_text(spec["detail"], "to be built")))
            return {**base, **changes.result(), "image_id": "", "built": True, "msg": f"would build {spec['tag']}"}

    status = job.follow(spec, watch, p["stall_timeout_s"])
    answer = {**base, "changed": False, "job": status.wire(watch), "image_id": "", "built": False}
    if status.state != "done":
        return answer
    if not all(isinstance(status.result.get(key), str) for key in ("before", "after", "image_id")):
        raise job.damaged_result()
    changes = Changes()
    changes.add(_header(p), status.result["before"], status.result["after"])
    return {**answer, **changes.result(), "image_id": status.result["image_id"], "built": True}


def _header(p: dict[str, Any]) -> str:
    return f"image of profile {p['profile']}"


def _spec(p: dict[str, Any], check: bool) -> tuple[dict[str, Any], list[core.Entry]]:
    """What is to be built, by the digests of all that goes into it."""
    wrong = []
    if not p["dockerfile"].strip():
        remedy = "give dockerfile and context to build an image, or reference to use one (role variable sm121_image_reference)"
        wrong.append(problem("no_image_source", f"profile {p['profile']}: neither a Dockerfile nor a reference is given", remedy))
    repository = p["repository"] or f"dgxspark-vllm-{p['profile']}"
    if not re.fullmatch(r"[a-z0-9]+(?:[._/-]+[a-z0-9]+)*", repository):
        remedy = "use lower-case letters, digits and . _ - / ; the tag is added by this module"
        wrong.append(problem("bad_name", f"repository {repository!r} is not an image name", remedy))
    cache = core.DigestCache(Path(p["state_dir"]) / "images" / ".digests.json")
    entries, found = core.list_context(p["context"], cache.sha256)
    if not check:
        cache.save()
    if wrong or found:
        raise JobFailure(*wrong, *found)
    spec = core.spec_of(
        profile=p["profile"],
        dockerfile=p["dockerfile"],
        build_args={name: str(value) for name, value in p["build_args"].items()},
        entries=entries,
        repository=repository,
        manifest=p["manifest"],
        jobs=p["jobs"],
    )
    return spec, entries


def _existing(p: dict[str, Any], check: bool) -> dict[str, Any]:
    """An image that others brought."""
    reference = p["reference"]
    if p["dockerfile"] or p["context"] or reference.startswith("-"):
        remedy = "give either a reference (a name, id or digest) or a Dockerfile with its context"
        raise JobFailure(
            problem("bad_reference", f"reference {reference!r} beside a Dockerfile or context, or not an image's name", remedy)
        )
    image = core.inspect(reference)
    if image is None:
        remedy = (
            f"bring it to the node: docker pull {reference}, or docker load --input FILE; or set sm121_image_reference to one that is there"
        )
        raise JobFailure(problem("image_missing", f"there is no image {reference} on this node", remedy))
    detail = {"reference": reference, "repo_digests": sorted(image.get("RepoDigests") or [])}
    return {**_record(p, image, core.inputs_of(image), reference, detail, check), "built": False}


def _record(p: dict[str, Any], image: dict[str, Any], inputs: str, tag: str, detail: dict[str, Any], check: bool) -> dict[str, Any]:
    """Write the manifest where it says anything else."""
    path = Path(p["manifest"])
    old = read_json(path)
    new = core.make_manifest(p["profile"], image, inputs, tag, detail, old)
    changes = Changes()
    if not core.manifest_is(old, new):
        changes.add(_header(p), *core.compared(core.manifest_text(old), core.manifest_text(new)))
        if not check:
            write_json(path, new)
    return {**changes.result(), "image_id": image["Id"], "inputs": inputs, "tag": tag}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "str", "required": True},
            "manifest": {"type": "path", "required": True},
            "reference": {"type": "str", "default": ""},
            "dockerfile": {"type": "str", "default": ""},
            "context": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"dest": {"type": "str", "required": True}, "src": {"type": "str", "default": ""}, "content": {"type": "str"}},
            },
            "build_args": {"type": "dict", "default": {}},
            "repository": {"type": "str", "default": ""},
            "jobs": {"type": "int", "default": 0},
            "stall_timeout_s": {"type": "int", "default": 1800},
            "state_dir": {"type": "path", "default": "/var/lib/dgxspark-vllm"},
            "watch": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    p = module.params
    try:
        result = run(p, module.check_mode)
    except JobFailure as failure:
        module.fail_json(msg=failure.message(f"There is no image for profile {p['profile']}."), problems=failure.problems)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        remedy = "free space on its file system" if full else "make the collection's state folder on the node writable"
        where = f"{error.filename or p['state_dir']}: {error.strerror or error}"
        failure = JobFailure(problem("disk_full" if full else "state_not_writable", where, remedy))
        module.fail_json(msg=failure.message(f"The image of profile {p['profile']} cannot be recorded."), problems=failure.problems)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
