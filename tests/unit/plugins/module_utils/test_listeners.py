# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.listeners import (
    command_line,
    container_id,
    kernel_address,
    listeners,
    overlaps,
    parse_net_tcp,
    processes,
    unit_of,
)

FIXTURES = Path(__file__).parents[3] / "fixtures" / "spark"
NODE, INNER, OTHER = "7f" * 32, "c0" * 32, "e1" * 32


def test_only_listening_sockets() -> None:
    sockets = parse_net_tcp((FIXTURES / "net-tcp.txt").read_text())
    assert [(s["address"], s["port"], s["inode"]) for s in sockets] == [("127.0.0.1", 8000, 52048), ("0.0.0.0", 22, 51984)]


def test_ipv6_sockets_and_mapped_addresses() -> None:
    sockets = parse_net_tcp((FIXTURES / "net-tcp6.txt").read_text())
    assert [(s["address"], s["port"]) for s in sockets] == [("::", 22), ("127.0.0.1", 9000), ("::1", 3306)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "header only\n",
        "0: zz:1F40 0:0 0A a b c d e f",
        "0: 0100007F:QQ 00000000:0000 0A a b c d e 52048",
        "0: 01:1F40 00000000:0000 0A a b c d e 5",
    ],
)
def test_other_texts_list_no_sockets(text: str) -> None:
    assert parse_net_tcp(text) == []


@pytest.mark.parametrize(
    ("digits", "expected"),
    [
        ("0100007F", "127.0.0.1"),
        ("1501A8C0", "192.168.1.21"),
        ("B80D01200000000067452301EFCDAB89", "2001:db8::123:4567:89ab:cdef"),
    ],
)
def test_kernel_address(digits: str, expected: str) -> None:
    assert kernel_address(digits) == expected


@pytest.mark.parametrize(
    ("wanted", "listener", "expected"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "::", True),
        ("127.0.0.1", "192.168.1.21", False),
        ("127.0.0.1", "::1", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "::1", False),
        ("0.0.0.0", "::", True),
        ("", "192.168.1.21", True),
        ("::", "192.168.1.21", True),
        ("::1", "::", True),
        ("::1", "0.0.0.0", False),
        ("192.168.1.21", "192.168.1.21", True),
        ("192.168.1.21", "127.0.0.1", False),
        ("localhost", "127.0.0.1", True),
        ("localhost", "::1", True),
        ("localhost", "192.168.1.21", False),
        ("spark1.example", "192.168.1.21", True),
        ("127.0.0.1", "not an address", True),
    ],
)
def test_overlap_of_addresses(wanted: str, listener: str, expected: bool) -> None:
    assert overlaps(wanted, listener) is expected


V1_NODE = f"9:name=systemd:/docker/{NODE}/init.scope\n7:blkio:/docker/{NODE}\n"


@pytest.mark.parametrize(
    ("cgroup", "init", "expected"),
    [
        # cgroup v1, both drivers.
        (f"12:pids:/docker/{INNER}\n1:name=systemd:/docker/{INNER}\n", "1:name=systemd:/init.scope\n", INNER),
        (f"1:name=systemd:/system.slice/docker-{INNER}.scope\n", "", INNER),
        # cgroup v2, the host's and a private namespace.
        (f"0::/system.slice/docker-{INNER}.scope\n", "0::/init.scope\n", INNER),
        (f"0::/../docker-{INNER}.scope\n", "0::/\n", INNER),
        (f"0::/machine.slice/libpod-{INNER}.scope/container\n", "", INNER),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{INNER}.scope\n", "", INNER),
        # A node that is itself a container: its own processes are in no container, nested ones are, beside or below it.
        (f"9:name=systemd:/docker/{NODE}/system.slice/ssh.service\n", V1_NODE, None),
        (f"9:name=systemd:/docker/{INNER}\n", V1_NODE, INNER),
        (f"0::/docker/{NODE}/docker/{INNER}\n", V1_NODE, INNER),
        (f"0::/docker/{NODE}/docker/{INNER}/docker/{OTHER}\n", V1_NODE, OTHER),
        # No container.
        ("0::/system.slice/dgxspark-vllm.service\n", "0::/init.scope\n", None),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "", None),
        (f"0::/x/{INNER}ab\n", "", None),
        ("", "", None),
        ("garbage", "", None),
    ],
)
def test_container_behind_a_process(cgroup: str, init: str, expected: str | None) -> None:
    assert container_id(cgroup, init) == expected


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/system.slice/dgxspark-vllm.service\n", "dgxspark-vllm.service"),
        (f"9:name=systemd:/docker/{NODE}/system.slice/nginx.service\n7:blkio:/docker/{NODE}\n", "nginx.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service\n", "jupyter.service"),
        (f"0::/system.slice/docker-{INNER}.scope\n", None),
        ("", None),
    ],
)
def test_unit_behind_a_process(cgroup: str, expected: str | None) -> None:
    assert unit_of(cgroup) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python3", "-m", "http.server", "8000"], "python3 -m http.server 8000"),
        (["vllm", "serve", "--api-key", "sk-123", "--port", "8000"], "vllm serve --api-key ******** --port 8000"),
        (["vllm", "serve", "--api-key=sk-123"], "vllm serve --api-key=********"),
        (["env", "HF_TOKEN=hf_abc", "PGPASSWORD=x", "run"], "env HF_TOKEN=******** PGPASSWORD=******** run"),
        (["curl", "-H", "Authorization: Bearer sk-abcdefghij"], "curl -H Authorization: Bearer ********"),
        (["x", "--token", "--verbose"], "x --token --verbose"),
        # What only sounds like a secret.
        (["vllm", "--tokenizer", "auto", "--max-num-batched-tokens", "8192"], "vllm --tokenizer auto --max-num-batched-tokens 8192"),
        (["a\nb\t c", ""], "a b c"),
    ],
)
def test_command_line_masks_secrets(words: list[str], expected: str) -> None:
    assert command_line("\0".join(words).encode() + b"\0") == expected


def test_command_line_of_odd_bytes_and_length() -> None:
    assert command_line(b"") == ""
    assert command_line(b"\xff\xfe\0x") != ""
    assert len(command_line(b"y" * 5000)) == 200


def add(root: Path, pid: int, ppid: int, inodes: list[int], cgroup: str, name: str = "python3") -> None:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "status").write_text(f"Name:\t{name}\nPPid:\t{ppid}\nVmRSS:\t2097152 kB\n")
    (folder / "cmdline").write_bytes(f"{name}\0-m\0http.server\0".encode())
    (folder / "cgroup").write_text(cgroup)
    for number, inode in enumerate(inodes):
        (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")


def test_listeners_with_process_container_and_unit(tmp_path: Path) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    (tmp_path / "proc/net/tcp").write_text((FIXTURES / "net-tcp.txt").read_text())
    (tmp_path / "proc/net/tcp6").write_text((FIXTURES / "net-tcp6.txt").read_text())
    add(tmp_path, 1, 0, [], "0::/init.scope\n", "systemd")
    add(tmp_path, 50, 1, [51984, 51995], "0::/system.slice/ssh.service\n", "sshd")
    # A server that forked workers, which share its socket; one of them has a lower number.
    add(tmp_path, 900, 1, [52048], f"0::/system.slice/docker-{INNER}.scope\n")
    add(tmp_path, 100, 900, [52048], f"0::/system.slice/docker-{INNER}.scope\n")
    (tmp_path / "proc/7").mkdir()  # ended while we looked
    found = {(item["address"], item["port"]): item for item in listeners(tmp_path, processes(tmp_path), {INNER: "dgxspark-vllm"})}
    ours = found["127.0.0.1", 8000]
    assert (ours["pid"], ours["container_id"], ours["container"], ours["unit"]) == (900, INNER, "dgxspark-vllm", None)
    assert ours["command"] == "python3 -m http.server"
    assert found["::", 22]["unit"] == "ssh.service"
    assert found["::1", 3306]["pid"] is None, "its owner cannot be seen"


def test_no_proc_no_listeners(tmp_path: Path) -> None:
    assert listeners(tmp_path, {}, {}) == []
