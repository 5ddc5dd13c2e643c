# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Who listens on a TCP port of this node: /proc/net/tcp{,6}, the process behind a socket, the container or unit behind a process."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h
COMMAND_LENGTH = 200
MASK = "********"

# 64 hexadecimal digits are a container's id in the cgroup paths of Docker, containerd, CRI-O and Podman alike.
CONTAINER_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
# Names whose value is nobody's business (--api-key, HF_TOKEN), and values that say so themselves; --tokenizer and --max-tokens are neither.
SECRET_NAME = re.compile(r"(key|token|password|passwd|secret|credentials?)$", re.IGNORECASE)
SECRET_VALUE = re.compile(r"\b(hf_|sk-)[A-Za-z0-9_-]{6,}")


class Socket(TypedDict):
    """A listening socket as the kernel lists it."""

    address: str
    port: int
    inode: int


class Process(TypedDict):
    """A process: `name` is the kernel's short name, `command` the argument list as one line, secrets masked."""

    pid: int
    ppid: int
    name: str
    command: str
    rss_gib: float


class Listener(TypedDict):
    """A listening socket and who holds it; None where the owner cannot be seen."""

    address: str
    port: int
    pid: int | None
    command: str | None
    container_id: str | None
    container: str | None
    unit: str | None


def parse_net_tcp(text: str) -> list[Socket]:
    """Listening sockets of /proc/net/tcp or tcp6; IPv4-mapped addresses come out as IPv4. Lines of another form are passed over."""
    found: list[Socket] = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 10 or fields[3] != LISTEN or ":" not in fields[1]:
            continue
        address, port = fields[1].rsplit(":", 1)
        try:
            found.append({"address": kernel_address(address), "port": int(port, 16), "inode": int(fields[9])})
        except ValueError:
            continue
    return found


def kernel_address(digits: str) -> str:
    """An address as the kernel prints it: 32-bit words in host order, little-endian on aarch64 and x86-64."""
    raw = bytes.fromhex(digits)
    if len(raw) not in (4, 16):
        raise ValueError(f"not an address: {digits!r}")
    packed = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    address = ipaddress.ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def overlaps(wanted: str, listener: str) -> bool:
    """Whether a server that binds `wanted` collides with a listener on `listener` (same port). A host name counts as any address."""
    if wanted == "localhost":
        return any(overlaps(loopback, listener) for loopback in ("127.0.0.1", "::1"))
    try:
        ours, theirs = ipaddress.ip_address(wanted or "0.0.0.0"), ipaddress.ip_address(listener)
    except ValueError:
        return True
    if ours == theirs:
        return True
    # '::' takes IPv4 too unless IPV6_V6ONLY is set, which /proc does not tell; '0.0.0.0' never takes IPv6.
    pairs = ((ours, theirs), (theirs, ours))
    return any(broad.is_unspecified and (broad.version == 6 or narrow.version == 4) for broad, narrow in pairs)


def container_id(cgroup: str, init_cgroup: str = "") -> str | None:
    """The innermost container that a /proc/<pid>/cgroup text names, cgroup v1 or v2.

    init_cgroup: the same text of PID 1. Where the node itself is a container its own id is in every path, and is not the answer.
    """
    outer = set(CONTAINER_ID.findall(init_cgroup))
    inner = [found for found in CONTAINER_ID.findall(_cgroup_paths(cgroup)) if found not in outer]
    return inner[-1] if inner else None


def _cgroup_paths(cgroup: str) -> str:
    """The paths alone: a v1 line is 'id:controllers:path', v2's only line is '0::path'."""
    return "\n".join(line.split(":", 2)[2] for line in cgroup.splitlines() if line.count(":") >= 2)


def unit_of(cgroup: str) -> str | None:
    """The innermost systemd service that a /proc/<pid>/cgroup text names."""
    units = [part for part in re.split(r"[/\n]", _cgroup_paths(cgroup)) if part.endswith(".service")]
    return units[-1] if units else None


def command_line(raw: bytes) -> str:
    """/proc/<pid>/cmdline as one line, what looks like a secret masked, cut to a length a person reads."""
    words: list[str] = []
    mask_next = False
    for word in raw.decode(errors="replace").rstrip("\0").split("\0"):
        name, equals, _value = word.partition("=")
        secret = bool(SECRET_NAME.search(name))
        if mask_next and not word.startswith("-"):
            words.append(MASK)
        elif equals and secret:
            words.append(f"{name}={MASK}")
        else:
            words.append(SECRET_VALUE.sub(MASK, word))
        mask_next = word.startswith("-") and secret and not equals
    line = " ".join(" ".join(words).split())
    return line if len(line) <= COMMAND_LENGTH else line[: COMMAND_LENGTH - 3] + "..."


def processes(root: Path) -> dict[int, Process]:
    """All processes under root/proc, by pid. One that ends meanwhile is left out."""
    found: dict[int, Process] = {}
    for folder in _pid_folders(root):
        try:
            status = dict(line.split(":", 1) for line in (folder / "status").read_text(errors="replace").splitlines() if ":" in line)
            raw = (folder / "cmdline").read_bytes()
            pid = int(folder.name)
            name = status["Name"].strip()
            found[pid] = {
                "pid": pid,
                "ppid": int(status.get("PPid", "0")),
                "name": name,
                "command": command_line(raw) or f"[{name}]",
                "rss_gib": round(int(status.get("VmRSS", "0 kB").split()[0]) / (1 << 20), 2),
            }
        except (OSError, KeyError, ValueError, IndexError):
            continue
    return found


def socket_owners(root: Path, inodes: Iterable[int]) -> dict[int, list[int]]:
    """Socket inode -> pids that hold it open. Needs root to see other users' processes."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[int, list[int]] = {}
    for folder in _pid_folders(root) if wanted else ():
        try:
            links = [link.readlink() for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        for inode in {wanted[str(link)] for link in links if str(link) in wanted}:
            owners.setdefault(inode, []).append(int(folder.name))
    return owners


def listeners(root: Path, table: Mapping[int, Process], names: Mapping[str, str]) -> list[Listener]:
    """Every listening TCP socket with its owner. names: container id -> name, of the engine on this node."""
    sockets = [socket for name in ("tcp", "tcp6") for socket in parse_net_tcp(_text(root / "proc/net" / name))]
    owners = socket_owners(root, [socket["inode"] for socket in sockets])
    init_cgroup = _text(root / "proc/1/cgroup")
    found: list[Listener] = []
    for socket in sockets:
        pid = _first_holder(owners.get(socket["inode"], []), table)
        cgroup = _text(root / "proc" / str(pid) / "cgroup") if pid else ""
        ident = container_id(cgroup, init_cgroup)
        found.append(
            {
                "address": socket["address"],
                "port": socket["port"],
                "pid": pid,
                "command": table[pid]["command"] if pid is not None and pid in table else None,
                "container_id": ident,
                "container": names.get(ident) if ident else None,
                "unit": unit_of(cgroup),
            }
        )
    return sorted(found, key=lambda item: (item["port"], item["address"]))


def _first_holder(pids: list[int], table: Mapping[int, Process]) -> int | None:
    """Of the processes that share a socket, the one the others were forked from."""
    children = [pid for pid in pids if pid in table and table[pid]["ppid"] in pids]
    parents = [pid for pid in pids if pid not in children]
    return min(parents or pids, default=None)


def _pid_folders(root: Path) -> list[Path]:
    return [folder for folder in sorted((root / "proc").glob("[0-9]*")) if folder.name.isdigit()]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
