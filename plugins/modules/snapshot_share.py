#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

DOCUMENTATION = r"""
---
module: snapshot_share
short_description: Let other nodes read a finished snapshot of this node for a while
version_added: 0.1.0
description:
  - Serves the files of a complete snapshot, as M(dgxspark.vllm.hf_snapshot) made it, over HTTP on one address of this node. Meant for the
    network between the nodes, so that a model is downloaded once for all of them.
  - The server is a transient systemd unit. It ends by itself when nobody has read from it for O(idle_s), so that nothing is left when the
    controller is lost.
  - Who reads needs the token that the task returns; a new one is made whenever the server starts. Neither the token nor the files are
    encrypted on their way. The digest that is returned, and every file's digest in the manifest, show that they arrive as they are here.
  - Only the files that the manifest lists are served, and the manifest itself. An index that was completed after the download is served as
    it was downloaded.
author:
  - dgxspark.vllm authors (@dgxspark)
options:
  path:
    description: Folder of the snapshot on the node.
    type: path
    required: true
  address:
    description:
      - Address of this node on which to listen, an IP address or a name that this node resolves to one of its own. Not the loopback address
        of a name, and not V(0.0.0.0).
    type: str
    required: true
  port:
    description: TCP port on which to listen, V(0) for any that is free. Choose one where a firewall has to let it through.
    type: int
    default: 0
  idle_s:
    description:
      - Seconds without a request after which the server ends. A file that is being sent counts as a request.
      - Of a server that runs already, the time it was started with stays.
    type: int
    default: 600
  client:
    description:
      - A name for who reads, such as the node's. The server ends with O(state=absent) only when that has been said for every name for which
        it was started or joined.
    type: str
    default: ""
  state:
    description:
      - With V(present), the snapshot is served. A server of the same snapshot that runs already is joined.
      - With V(absent), it is not served to O(client) any longer.
    type: str
    choices: [present, absent]
    default: present
  state_dir:
    description: Folder of the collection's state on the node; the job and the token, which only root can read, lie in C(jobs) below it.
    type: path
    default: /var/lib/dgxspark-vllm
attributes:
  check_mode:
    description: Looks whether the snapshot could be served; starts and ends nothing, and returns no O(ignore:url) when no server runs.
    support: full
  diff_mode:
    description: Nothing lasting is changed, so there is no difference to show.
    support: none
seealso:
  - module: dgxspark.vllm.hf_snapshot
"""

EXAMPLES = r"""
- name: Let spark2 read the snapshot of spark1 over the cable between them
  dgxspark.vllm.snapshot_share:
    path: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b
    address: 192.168.177.11
    client: spark2
  delegate_to: spark1
  register: share
  no_log: true # the result has the token

- name: Have the snapshot of spark1
  dgxspark.vllm.hf_snapshot:
    repo: Qwen/Qwen3.5-122B-A10B
    revision: 4a1c0b5de0f1a2b3c4d5e6f708192a3b4c5d6e7f
    source: "{{ share.url }}"
    source_token: "{{ share.token }}"
    manifest_sha256: "{{ share.manifest_sha256 }}"
    dest: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b

- name: End the sharing
  dgxspark.vllm.snapshot_share:
    path: /var/lib/dgxspark-vllm/checkpoints/qwen35-122b
    address: 192.168.177.11
    client: spark2
    state: absent
  delegate_to: spark1
"""

RETURN = r"""
running:
  description: Whether the snapshot is served at this moment; after V(absent) it is when others still read.
  type: bool
  returned: success
url:
  description: Where the snapshot is served; a file's address is this, a slash and the file's name.
  type: str
  returned: when it is served, and O(state=present)
  sample: http://192.168.177.11:40123
port:
  description: The TCP port of the address.
  type: int
  returned: when it is served, and O(state=present)
token:
  description: What a request gives as C(Authorization) C(Bearer). A secret; set C(no_log) for the task that registers it.
  type: str
  returned: when it is served, and O(state=present)
manifest_sha256:
  description: SHA-256 of the snapshot's manifest C(.dgxspark-snapshot.json), in 64 hexadecimal digits.
  type: str
  returned: success, and O(state=present)
files:
  description: Number of files of the snapshot.
  type: int
  returned: success, and O(state=present)
bytes:
  description: Size of the snapshot in bytes.
  type: int
  returned: success, and O(state=present)
problems:
  description:
    - What is wrong - class, evidence, remedy and severity of each.
    - C(bad_address) - not an address of this node; the evidence names those that it has. C(snapshot_incomplete) - no manifest, or a file
      that is not as it was verified. C(snapshot_damaged) - a manifest that makes no sense. C(port_taken) - another program listens there.
      C(no_systemd) and C(not_root) - no transient unit can be started. C(share_not_ready) - it did not start in time.
  type: list
  elements: dict
  returned: failure
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils import share
from ..module_utils.files import read_json, write_json
from ..module_utils.jobs import Job, JobFailure, Systemd, new_watch, read_object, short
from ..module_utils.problems import problem

READY_S = 20.0


class Sharing:
    """The one server of a snapshot on an address, and the names for which it runs."""

    def __init__(self, p: dict[str, Any]) -> None:
        self._p, self._units = p, Systemd()
        name = f"share-{short(p['path'] + ' ' + p['address'])}"
        self._job = Job(Path(p["state_dir"]), name, "share", f"dgxspark.vllm share of {p['path']}", self._units)
        self._state, self._clients = self._job.folder / "share.json", self._job.folder / "clients.json"

    def running(self) -> dict[str, Any]:
        """What the running server's state file says; {} when none runs."""
        state = read_object(self._state, share.STATE)
        return state if state.keys() >= share.STATE.keys() and self._job.running() else {}

    def present(self, offer: share.Offer) -> dict[str, Any]:
        """Join the server or start it. Returns its state."""
        with self._lock():
            state = self.running()
            fits = state and state["manifest_sha256"] == offer.sha256 and self._p["port"] in {0, state["port"]}
            if not (fits and share.answers(state)):
                state = self._start(offer)
                self._clients.unlink(missing_ok=True)
            write_json(self._clients, sorted({*self._names(), self._p["client"]}), mode=0o600)
        return state

    def absent(self) -> bool:
        """End the server unless it runs for others. Returns whether it still runs."""
        if not self._job.folder.is_dir():
            return False
        with self._lock():
            others = [name for name in self._names() if name != self._p["client"]]
            if others and self.running():
                write_json(self._clients, others, mode=0o600)
                return True
            if self._job.running():
                self._units.stop(self._job.unit)
            for path in (self._state, self._clients):
                path.unlink(missing_ok=True)
        return False

    def _names(self) -> list[str]:
        names = read_json(self._clients)
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    def _start(self, offer: share.Offer) -> dict[str, Any]:
        if self._job.running():  # it hangs, or serves something else
            self._units.stop(self._job.unit)
        self._state.unlink(missing_ok=True)
        spec = {"path": self._p["path"], "address": share.resolved(self._p["address"]), "port": self._p["port"]}
        spec |= {"idle_s": self._p["idle_s"], "state_file": str(self._state), "manifest_sha256": offer.sha256}
        watch, until = new_watch(), time.monotonic() + READY_S
        while time.monotonic() < until:
            status = self._job.follow(spec, watch, 0, block_s=0)
            status.wire(watch)  # raises what it failed of
            if status.state == "done":  # it had nothing to do since before this call
                watch = new_watch()
            look = time.monotonic() + 0.5
            while time.monotonic() < look:
                state = read_object(self._state, share.STATE)
                if state.keys() >= share.STATE.keys():
                    return state
                time.sleep(0.02)
        log = self._job.folder / "log"
        raise JobFailure(problem("share_not_ready", f"{self._job.unit} does not listen after {READY_S:g} s", f"see {log} on the node"))

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Two nodes that want the snapshot at the same moment get one server."""
        self._job.folder.mkdir(parents=True, exist_ok=True)
        self._job.folder.chmod(0o700)
        with (self._job.folder / "share.lock").open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def run(p: dict[str, Any], check: bool) -> dict[str, Any]:
    """What the task asks for; a server that ends by itself is no change of the node."""
    sharing = Sharing(p)
    if p["state"] == "absent":
        return {"changed": False, "running": bool(sharing.running()) if check else sharing.absent()}
    found = share.address_problems(p["address"])
    try:
        offer = share.Offer(Path(p["path"]))
        found += offer.problems()
    except JobFailure as failure:
        found += failure.problems
    if found:
        raise JobFailure(*found)
    state = sharing.running() if check else sharing.present(offer)
    told = {"manifest_sha256": offer.sha256, "files": len(offer.files), "bytes": offer.total}
    return {"changed": False, "running": bool(state), **state, **told}


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "address": {"type": "str", "required": True},
            "port": {"type": "int", "default": 0},
            "idle_s": {"type": "int", "default": 600},
            "client": {"type": "str", "default": ""},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "state_dir": {"type": "path", "default": "/var/lib/dgxspark-vllm"},
        },
        supports_check_mode=True,
    )
    p = module.params
    if not (0 <= p["port"] <= 65535 and p["idle_s"] > 0):
        module.fail_json(msg=f"port {p['port']} is not within 0 to 65535, or idle_s {p['idle_s']} is not above 0")
    try:
        result = run(p, module.check_mode)
    except JobFailure as failure:
        headline = f"The snapshot in {p['path']} cannot be shared on {p['address']}."
        module.fail_json(msg=failure.message(headline), problems=failure.problems)
    except OSError as error:
        module.fail_json(msg=f"The state of the share below {p['state_dir']} cannot be written: {error}", problems=[])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
