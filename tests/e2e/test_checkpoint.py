# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""playbooks/checkpoint.yml against the rehearsal's hub: broken off, killed, resumed, and from one node to the other.

The tests build on each other in the order of this file.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from runs import ROOT, OnNode, Playbook

CHECKPOINT = "playbooks/checkpoint.yml"
PAIR = [ROOT / "tests/e2e/pair"]
STATE = "/var/lib/dgxspark-vllm"
TOTAL_BYTES = 12_917_384  # of the tiny checkpoint


class RehearsalHub:
    """The hub's own account of what it was asked, and what it shall do wrong."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def _call(self, what: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        with urllib.request.urlopen(f"http://{self.prefix}.0.2:8080/control/{what}", body, timeout=10) as answer:
            return json.load(answer)

    def faults(self, *faults: dict[str, Any]) -> None:
        """From now on these, and no others."""
        self._call("faults", list(faults))

    def transfers(self, host: int = 11) -> list[dict[str, Any]]:
        """Requests for the content of files, by the last octet of the node that sent them."""
        content = ("/cdn/", "/api/resolve-cache/")
        return [
            r
            for r in self._call("requests")
            if r["method"] == "GET" and r["path"].startswith(content) and r["client"] == f"{self.prefix}.0.{host}"
        ]


@pytest.fixture
def hub() -> Iterator[RehearsalHub]:
    found = RehearsalHub((ROOT / ".rehearsal/prefix").read_text())
    yield found
    found.faults()


def manifest(on_node: OnNode, host: str = "spark1") -> str:
    """The manifests of a node's snapshots: their digests and paths."""
    return on_node("sh", "-c", f"find {STATE}/checkpoints -name .dgxspark-snapshot.json -exec sha256sum {{}} +", host=host, check=False)


def test_a_download_that_the_hub_breaks_off_goes_on(playbook: Playbook, on_node: OnNode, hub: RehearsalHub) -> None:
    """A fresh hub cuts the largest file's first download in the middle; the run itself takes it up."""
    on_node("rm", "-rf", STATE, host="spark2")
    assert playbook("tests/e2e/reset.yml", limit=None).rc == 0
    run = playbook(CHECKPOINT)
    assert run.rc == 0, run.output
    assert run.result("hf_snapshot")["complete"]
    cut = [t for t in hub.transfers() if t["status"] and t["sent"] < t["length"]]
    assert [t["path"].rpartition("/")[2] for t in cut] == ["model-00001-of-00002.safetensors"]
    assert len(manifest(on_node).splitlines()) == 1
    again = playbook(CHECKPOINT)
    assert again.rc == 0, again.output
    assert again.recap("changed") == 0


def test_a_killed_download_is_named_and_resumed(playbook: Playbook, on_node: OnNode, hub: RehearsalHub) -> None:
    """kill -9 in the middle: the message names it, and the second run brings only what is missing."""
    on_node("rm", "-rf", f"{STATE}/checkpoints")
    hub.faults({"kind": "throttle", "path": "/cdn/", "rate": 250_000, "times": 10_000})
    killed: list[str] = []
    over = threading.Event()

    def kill() -> None:
        """The unit of the download, once some megabytes are there."""
        look = f'cd {STATE}/jobs && grep -l \'"unit": "B"\' snapshot-*/progress.json | xargs -r cat'
        while not over.wait(0.2) and not killed:
            said = on_node("sh", "-c", look, check=False)
            active = on_node("systemctl", "list-units", "--no-legend", "--plain", "--state=active", "dgxspark-vllm-job-snapshot-*")
            if active and '"done"' in said and json.loads(said)["done"] > 2_000_000:
                on_node("systemctl", "kill", "--kill-who=all", "--signal=KILL", active.split()[0])
                killed.append(active.split()[0])

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        run = playbook(CHECKPOINT)
    finally:
        over.set()
        killer.join()
    assert killed, run.output
    assert run.rc != 0
    assert "job_lost" in run.message()
    assert killed[0] in run.message()
    assert "resumes" in run.message()
    assert manifest(on_node) == ""

    hub.faults()
    before = len(hub.transfers())
    run = playbook(CHECKPOINT)
    assert run.rc == 0, run.output
    resumed = run.result("hf_snapshot")["resumed_bytes"]
    came = sum(t["sent"] for t in hub.transfers()[before:])
    print(f"\nresumed {resumed} bytes, {came} of {TOTAL_BYTES} bytes came after the kill")
    assert resumed > 0
    assert came < TOTAL_BYTES - 1_000_000
    again = playbook(CHECKPOINT)
    assert again.rc == 0, again.output
    assert again.recap("changed") == 0


def test_the_second_node_takes_it_from_the_first(playbook: Playbook, on_node: OnNode, hub: RehearsalHub) -> None:
    """Over the rail, although the first node's index has been completed by now; both manifests are the same bytes."""
    before = len(hub.transfers())
    began = time.monotonic()
    run = playbook(CHECKPOINT, limit="tiny", inventories=PAIR)
    assert run.rc == 0, run.output
    print(f"\nfrom node to node: {time.monotonic() - began:.1f} s")
    assert run.recap("changed", "spark2") > 0
    assert run.recap("changed", "spark1") == 0
    assert hub.transfers(12) == []
    assert len(hub.transfers()) == before
    one, two = manifest(on_node), manifest(on_node, "spark2")
    assert len(one.splitlines()) == 1
    assert one == two
    said = on_node("sh", "-c", f"cat {STATE}/jobs/share-*/log")
    assert f"{hub.prefix}.177.12 model-00001-of-00002.safetensors" in said
    assert on_node("systemctl", "list-units", "--no-legend", "--plain", "dgxspark-vllm-job-share-*", check=False) == ""
    index = f"find {STATE}/checkpoints -name model.safetensors.index.json -exec sha256sum {{}} +"
    assert on_node("sh", "-c", index) == on_node("sh", "-c", index, host="spark2")


@pytest.mark.parametrize("arguments", ["", "--check --diff"])
def test_a_second_run_of_both_nodes_changes_nothing(playbook: Playbook, hub: RehearsalHub, arguments: str) -> None:
    """Neither node asks the hub for a file, and no server is started for the other."""
    before = [len(hub.transfers(11)), len(hub.transfers(12))]
    run = playbook(CHECKPOINT, limit="tiny", inventories=PAIR, arguments=arguments)
    assert run.rc == 0, run.output
    assert [run.recap("changed", host) for host in ("spark1", "spark2")] == [0, 0]
    assert [len(hub.transfers(11)), len(hub.transfers(12))] == before


def test_the_second_node_is_as_it_was(on_node: OnNode) -> None:
    """What follows finds spark2 empty."""
    on_node("rm", "-rf", STATE, host="spark2")
    assert on_node("ls", STATE, host="spark2", check=False) == ""
