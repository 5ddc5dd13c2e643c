# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_describes_a_cabled_and_an_empty_cage(script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("node/rehearsal-init")
    monkeypatch.setattr(module, "SYSFS", tmp_path)
    link = {"mac": "02:42:c0:a8:b1:0b", "address": "192.168.177.11/24", "mtu": 9000}
    module.describe_hca({"name": "enp1s0f1np1", "hca": "rocep1s0f1", "phys_port_name": "p1", "pci": "0000:01:00.1"}, link)
    module.describe_hca({"name": "enp1s0f0np0", "hca": "rocep1s0f0", "phys_port_name": "p0", "pci": "0000:01:00.0"}, None)
    port = tmp_path / "class/infiniband/rocep1s0f1/ports/1"
    assert (port / "state").read_text() == "4: ACTIVE\n"
    assert (port / "gids/0").read_text() == "fe80:0000:0000:0000:0042:c0ff:fea8:b10b\n"
    assert (port / "gids/3").read_text() == "0000:0000:0000:0000:0000:ffff:c0a8:b10b\n"
    assert (port / "gid_attrs/types/3").read_text() == "RoCE v2\n"
    assert (port / "gid_attrs/ndevs/3").read_text() == "enp1s0f1np1\n"
    assert (port / "gids/4").read_text() == "0000:0000:0000:0000:0000:0000:0000:0000\n"
    assert not (port / "gid_attrs/types/4").exists()
    device = tmp_path / "class/infiniband/rocep1s0f1/device/net/enp1s0f1np1"
    assert (device / "mtu").read_text() == "9000\n"
    assert (device / "phys_port_name").read_text() == "p1\n"
    assert (device / "device/current_link_width").read_text() == "4\n"
    empty = tmp_path / "class/infiniband/rocep1s0f0/ports/1"
    assert (empty / "state").read_text() == "1: DOWN\n"
    assert {path.read_text() for path in (empty / "gids").iterdir()} == {"0000:0000:0000:0000:0000:0000:0000:0000\n"}
