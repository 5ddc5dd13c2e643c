# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What a Spark is and what state it is in, read from /proc, /etc and the answers of docker and nvidia-smi.

Parsers take text. What they cannot read they leave out or report as None; none of them decides whether that is a problem.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .listeners import Process, listeners, processes

GIB = 1 << 30
CAP_SYS_RESOURCE = 24  # linux/capability.h: may raise a resource limit

PATHS = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin", "snap/bin")
TOOLS = ("systemctl", "systemd-run", "journalctl")
DESKTOP = ("gnome-shell", "Xorg", "Xwayland", "plasmashell", "kwin_wayland", "kwin_x11", "gdm3", "gdm-x-session", "lightdm", "sddm")
APT_LOCKS = ("var/lib/dpkg/lock-frontend", "var/lib/dpkg/lock", "var/lib/apt/lists/lock", "var/cache/apt/archives/lock")
GPU_FIELDS = {
    "index": "index",
    "name": "name",
    "uuid": "uuid",
    "driver_version": "driver",
    "compute_cap": "compute_cap",
    "memory.total": "memory_total_mib",
    "memory.used": "memory_used_mib",
    "utilization.gpu": "utilization_pct",
    "power.draw": "power_w",
    "clocks.sm": "sm_clock_mhz",
    "temperature.gpu": "temperature_c",
}


class Answer(NamedTuple):
    """What a command said. rc is None when it did not run to its end, and `error` then says why."""

    rc: int | None
    out: str
    err: str
    error: str = ""


if TYPE_CHECKING:  # so that a Python too old for this module can still import it, and say that it is too old
    Runner = Callable[[Sequence[str], float], Answer]


def run_command(argv: Sequence[str], timeout_s: float) -> Answer:
    """Run without a shell, in the C locale, and never longer than timeout_s."""
    env = {**os.environ, "LC_ALL": "C", "LANGUAGE": "C"}
    env["PATH"] = ":".join(f"/{path}" for path in PATHS)
    try:
        done = subprocess.run(argv, capture_output=True, timeout=timeout_s, env=env, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return Answer(None, "", "", "missing")
    except subprocess.TimeoutExpired:
        return Answer(None, "", "", "timeout")
    except OSError as error:
        return Answer(None, "", "", str(error))
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def gib(size: float) -> float:
    """Bytes as GiB, two decimals."""
    return round(size / GIB, 2)


def read_text(path: Path) -> str:
    """A file's text; '' when it is absent or closed to us."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# --- text -> data ---


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes (counts without a unit as they are). Lines of another form are passed over."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"\s*(\S+):\s+(\d+)(\s+kB)?\s*", line)
        if match:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found


def memory_of(meminfo: Mapping[str, int]) -> dict[str, float] | None:
    """Sizes in GiB; None without MemTotal. `cache_gib` is what `drop_caches` can give back."""
    if "MemTotal" not in meminfo:
        return None
    free = meminfo.get("MemFree", 0)
    # Shmem is counted in Cached, but no cache can be dropped from it.
    cache = max(0, sum(meminfo.get(key, 0) for key in ("Buffers", "Cached", "SReclaimable")) - meminfo.get("Shmem", 0))
    return {
        "total_gib": gib(meminfo["MemTotal"]),
        "available_gib": gib(meminfo.get("MemAvailable", free + cache)),
        "free_gib": gib(free),
        "cache_gib": gib(cache),
        "shmem_gib": gib(meminfo.get("Shmem", 0)),
        "cma_total_gib": gib(meminfo.get("CmaTotal", 0)),
        "cma_free_gib": gib(meminfo.get("CmaFree", 0)),
        "swap_total_gib": gib(meminfo.get("SwapTotal", 0)),
        "swap_free_gib": gib(meminfo.get("SwapFree", 0)),
    }


def util_max(available_gib: float, total_gib: float) -> float:
    """The largest gpu_memory_utilization, in hundredths, whose share of the total is available."""
    return int(available_gib / total_gib * 100) / 100 if total_gib > 0 else 0.0


def parse_swaps(text: str) -> list[dict[str, Any]]:
    """/proc/swaps: active swap areas (files, partitions, zram)."""
    areas = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 4 and fields[2].isdigit() and fields[3].isdigit():
            device = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[0])
            areas.append(
                {"device": device, "type": fields[1], "size_gib": gib(int(fields[2]) * 1024), "used_gib": gib(int(fields[3]) * 1024)}
            )
    return areas


def parse_assignments(text: str) -> dict[str, str]:
    """KEY=value lines with shell quoting: os-release, dgx-release, ufw.conf, and the output of `systemctl show`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if not equals or key.startswith("#") or not re.fullmatch(r"\w+", key):
            continue
        try:
            found[key] = "".join(shlex.split(value)) if value[:1] in "\"'" else value
        except ValueError:
            found[key] = value
    return found


def parse_driver(text: str) -> str | None:
    """The driver's version in /proc/driver/nvidia/version."""
    match = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)*)\b", text)
    return match[1] if match else None


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """`nvidia-smi --query-gpu=... --format=csv` with its header. N/A, as GB10 says of its memory, is None. ValueError on other text."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or "name" not in rows[0]:
        raise ValueError((text.strip() or "no output").splitlines()[0])
    # Asked for clocks.sm, the header says clocks.current.sm.
    names = [GPU_FIELDS.get(header.split(" [")[0].replace(".current.", "."), header) for header in rows[0]]
    return [{name: _cell(name, cell) for name, cell in zip(names, row, strict=False)} for row in rows[1:]]


def _cell(name: str, cell: str) -> Any:
    if cell.startswith("[") or cell.upper() in ("N/A", "", "UNKNOWN"):
        return None
    if name == "index" or name.endswith(("_mib", "_pct", "_w", "_mhz", "_c")):
        match = re.match(r"-?\d+(?:\.\d+)?", cell)
        number = float(match[0]) if match else None
        return int(number) if number is not None and number.is_integer() else number
    return cell


def version_tuple(text: str | None) -> tuple[int, ...]:
    """The leading numbers of a version: '20.10.24+dfsg1' -> (20, 10, 24). () when there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", (text or "").strip())
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def parse_docker_info(answer: Answer) -> dict[str, Any]:
    """`docker info --format '{{json .}}'`: the engine, or why it did not answer (`error`, `fault`)."""
    info: dict[str, Any] = {}
    for line in answer.out.splitlines():
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            info = parsed
    version = info.get("ServerVersion") or None
    said = "; ".join([*(info.get("ServerErrors") or []), answer.err.strip()]).strip("; ")
    silence = {"missing": "the docker command is not installed", "timeout": "`docker info` got no answer in the time given"}
    fallback = silence.get(answer.error, answer.error) or f"`docker info` ended with {answer.rc} and no answer"
    error = None if version else said or fallback
    security = [str(option) for option in info.get("SecurityOptions") or []]
    return {
        "installed": answer.error != "missing",
        "version": version,
        "error": error,
        "fault": docker_fault(answer, error) if error else None,
        "root": info.get("DockerRootDir") or None,
        "runtimes": sorted(info.get("Runtimes") or {}),
        "default_runtime": info.get("DefaultRuntime") or None,
        "storage_driver": info.get("Driver") or None,
        "cgroup_driver": info.get("CgroupDriver") or None,
        "cgroup_version": info.get("CgroupVersion") or None,
        "rootless": any("rootless" in option for option in security),
        "snap": str(info.get("DockerRootDir") or "").startswith("/var/snap/"),
        "cdi_devices": sorted(str(device.get("ID")) for device in info.get("DiscoveredDevices") or [] if isinstance(device, dict)),
    }


def docker_fault(answer: Answer, error: str) -> str:
    """What kind of failure an unanswered `docker info` is: a problem class."""
    if answer.error == "missing":
        return "docker_missing"
    if answer.error == "timeout":
        return "docker_hung"
    text = error.lower()
    if "permission denied" in text:
        return "docker_group"
    if "api version" in text or re.search(r"client version \S+ is too (old|new)", text):
        return "docker_client"
    return "docker_down"


def parse_json_lines(text: str) -> list[dict[str, Any]]:
    """Docker's `--format '{{json .}}'` lists: one object a line; other lines are passed over."""
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def parse_containers(text: str) -> list[dict[str, Any]]:
    """`docker ps -a --no-trunc --format '{{json .}}'`."""
    return [
        {
            "id": str(row.get("ID", "")),
            "name": str(row.get("Names", "")).split(",")[0],
            "image": str(row.get("Image", "")),
            "running": str(row.get("State", "")) in ("running", "paused", "restarting"),
            "labels": [part.split("=")[0] for part in str(row.get("Labels", "")).split(",") if part],
            "published": sorted({int(port) for port in re.findall(r":(\d+)->\d+/tcp", str(row.get("Ports", "")))}),
        }
        for row in parse_json_lines(text)
        if row.get("ID")
    ]


def parse_size(text: str) -> float | None:
    """A size as docker prints it ('66.7GB', '0B (0%)', '1.5kB (3%)') in bytes; None when it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)B(?:\s+\(\d+(?:\.\d+)?%\))?\s*", text)
    if not match:
        return None
    base = 1024 if match[3] else 1000
    return float(match[1]) * float(base ** " KMGTP".index(match[2].upper() or " "))


def parse_build_cache(text: str) -> float:
    """Reclaimable bytes of build cache in `docker system df`, as JSON lines or as a table."""
    for row in parse_json_lines(text):
        if row.get("Type") == "Build Cache":
            return parse_size(str(row.get("Reclaimable", ""))) or 0.0
    match = re.search(r"^Build Cache\s+\d+\s+\d+\s+\S+\s+(\S+)", text, re.MULTILINE)
    return (parse_size(match[1]) or 0.0) if match else 0.0


def parse_daemon_json(text: str | None) -> dict[str, Any]:
    """/etc/docker/daemon.json: absent (None), invalid, or what of it matters here."""
    state: dict[str, Any] = {"present": text is not None, "error": None, "runtimes": [], "default_runtime": None}
    if text is None or not text.strip():
        return state
    try:
        config = json.loads(text)
    except ValueError as error:
        return {**state, "error": str(error)}
    runtimes = config.get("runtimes", {}) if isinstance(config, dict) else None
    if not isinstance(runtimes, dict):
        return {**state, "error": "not a mapping" if runtimes is None else "'runtimes' is not a mapping"}
    return {**state, "runtimes": sorted(runtimes), "default_runtime": config.get("default-runtime")}


def parse_toolkit_version(text: str) -> str | None:
    """The version in the output of `nvidia-ctk --version`."""
    match = re.search(r"version:?\s+v?(\d+\.\d+\.\d+[\w.~-]*)", text)
    return match[1] if match else None


def parse_limit(text: str, name: str = "Max locked memory") -> dict[str, int | None] | None:
    """A row of /proc/<pid>/limits as {soft, hard} in bytes, None in it meaning unlimited; None when there is no such row."""
    match = re.search(rf"^{re.escape(name)}\s+(unlimited|\d+)\s+(unlimited|\d+)\b", text, re.MULTILINE)
    if not match:
        return None
    soft, hard = (None if value == "unlimited" else int(value) for value in match.groups())
    return {"soft": soft, "hard": hard}


def has_capability(status: str, number: int) -> bool:
    """Whether CapEff in a /proc/<pid>/status text holds a capability."""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)\s*$", status, re.MULTILINE)
    return bool(match and int(match[1], 16) >> number & 1)


def parse_locks(text: str) -> dict[int, int]:
    """/proc/locks: inode -> pid that holds a POSIX write lock on it (the kind that apt and dpkg take)."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        match = re.match(r"\d+:\s+POSIX\s+\S+\s+WRITE\s+(\d+)\s+[0-9a-f]+:[0-9a-f]+:(\d+)\s", line)
        if match:
            found[int(match[2])] = int(match[1])
    return found


def parse_ufw(conf: str, rules: str) -> dict[str, Any]:
    """ufw.conf and user.rules: whether the firewall is on, and which TCP ports anyone may reach ('any' covers all)."""
    ports: list[str] = []
    for action, protocol, port in re.findall(r"^### tuple ### (\w+) (\w+) (\S+) ", rules, re.MULTILINE):
        if action in ("allow", "limit") and protocol in ("tcp", "any"):
            ports += port.split(",")
    return {"active": parse_assignments(conf).get("ENABLED", "no").lower() == "yes", "allowed": ports}


def ufw_allows(port: int, allowed: Sequence[str]) -> bool:
    """Whether a port is among ufw's ('any', '8000', '8000:8010')."""
    for item in allowed:
        low, _, high = item.partition(":")
        if item == "any" or (low.isdigit() and int(low) <= port <= int(high if high.isdigit() else low)):
            return True
    return False


# --- node -> data ---


def find_tool(root: Path, name: str) -> str | None:
    """Where an executable is, below root, in the usual folders."""
    for folder in PATHS:
        path = root / folder / name
        if os.access(path, os.X_OK) and not path.is_dir():
            return f"/{folder}/{name}"
    return None


def tree_bytes(folder: Path) -> int:
    """Bytes that a folder's files take on the disk; a file with several names counts once, links are not followed."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for path, _folders, names in os.walk(folder):
        for name in names:
            try:
                info = os.lstat(os.path.join(path, name))
            except OSError:
                continue
            if (info.st_dev, info.st_ino) not in seen:
                seen.add((info.st_dev, info.st_ino))
                total += info.st_blocks * 512
    return total


def disk_of(root: Path, path: str) -> dict[str, Any]:
    """Free space where a path is or would be, in GiB for an ordinary user, and the filesystem it is on."""
    spot = root / path.lstrip("/")
    while not spot.exists() and spot != spot.parent:
        spot = spot.parent
    try:
        stats = os.statvfs(spot)
        return {"path": path, "free_gib": gib(stats.f_bavail * stats.f_frsize), "filesystem": os.stat(spot).st_dev}
    except OSError as error:
        return {"path": path, "free_gib": None, "filesystem": None, "error": error.strerror}


def gpu_facts(root: Path, run: Runner, timeout_s: float) -> dict[str, Any]:
    """The driver, and each GPU as nvidia-smi sees it; `error` says why there is none."""
    driver = parse_driver(read_text(root / "proc/driver/nvidia/version"))
    answer = run(["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv"], timeout_s)
    if answer.error:
        reason = {"missing": "nvidia-smi is not installed", "timeout": f"nvidia-smi did not answer within {timeout_s:g} s"}
        return {"driver": driver, "gpus": [], "error": reason.get(answer.error, answer.error)}
    try:
        gpus = parse_nvidia_smi(answer.out) if answer.rc == 0 else []
    except ValueError as error:
        return {"driver": driver, "gpus": [], "error": f"nvidia-smi: {error}"}
    said = (answer.out.strip() or answer.err.strip() or f"nvidia-smi ended with {answer.rc}").splitlines()[0]
    return {"driver": driver or (gpus[0].get("driver") if gpus else None), "gpus": gpus, "error": None if gpus else said}


def docker_facts(root: Path, run: Runner, timeout_s: float) -> dict[str, Any]:
    """The engine, its configuration file and its containers."""
    docker = parse_docker_info(run(["docker", "info", "--format", "{{json .}}"], timeout_s))
    containers: list[dict[str, Any]] = []
    if docker["version"]:
        containers = parse_containers(run(["docker", "ps", "--all", "--no-trunc", "--format", "{{json .}}"], timeout_s).out)
    config = root / "etc/docker/daemon.json"
    return {**docker, "containers": containers, "daemon_json": parse_daemon_json(read_text(config) if config.exists() else None)}


def toolkit_facts(root: Path, run: Runner, timeout_s: float) -> dict[str, Any]:
    """The NVIDIA container toolkit: its version, the hook that `--gpus` needs, and CDI descriptions of the GPU."""
    installed = find_tool(root, "nvidia-ctk") is not None
    specs = [path for folder in ("etc/cdi", "run/cdi", "var/run/cdi") for path in sorted((root / folder).glob("*nvidia*"))]
    return {
        "version": parse_toolkit_version(run(["nvidia-ctk", "--version"], timeout_s).out) if installed else None,
        "hook": find_tool(root, "nvidia-container-runtime-hook") is not None,
        "cdi_specs": sorted({f"/{path.relative_to(root)}" for path in specs}),
    }


def memlock_facts(root: Path, table: Mapping[int, Process]) -> dict[str, Any] | None:
    """The locked-memory limit that containers inherit from the engine, and whether the engine may raise it for them."""
    pid = min((pid for pid, process in table.items() if process["name"] == "dockerd"), default=1)
    limit = parse_limit(read_text(root / "proc" / str(pid) / "limits"))
    if limit is None:
        return None
    status = read_text(root / "proc" / str(pid) / "status")
    return {**limit, "of": table[pid]["name"] if pid in table else "init", "raisable": has_capability(status, CAP_SYS_RESOURCE)}


def apt_facts(root: Path, table: Mapping[int, Process]) -> dict[str, Any] | None:
    """Who holds a lock of apt or dpkg, seen from both sides: the kernel's list of locks and the holder's open files."""
    locks = parse_locks(read_text(root / "proc/locks"))
    for name in APT_LOCKS:
        path = root / name
        try:
            pid = locks.get(path.stat().st_ino)
            held = pid is not None and any(link.readlink() == path for link in (root / "proc" / str(pid) / "fd").iterdir())
        except OSError:
            continue
        if pid is not None and held:
            return {"path": f"/{name}", "pid": pid, "command": table[pid]["command"] if pid in table else None}
    return None


def unit_facts(run: Runner, unit: str, timeout_s: float) -> dict[str, str]:
    """Load and activity state of a systemd unit; {} when systemd does not answer."""
    answer = run(["systemctl", "show", "--property=LoadState,ActiveState,SubState", "--", unit], timeout_s)
    shown = parse_assignments(answer.out) if answer.rc == 0 else {}
    return (
        {"name": unit, "load": shown["LoadState"], "active": shown["ActiveState"], "sub": shown.get("SubState", "")}
        if "ActiveState" in shown
        else {}
    )


def collect(root: Path, run: Runner, paths: Sequence[str], unit: str = "", timeout_s: float = 10.0) -> dict[str, Any]:
    """Everything about the node below root. paths: where free space is asked for, besides Docker's data root."""
    table = processes(root)
    docker = docker_facts(root, run, timeout_s)
    release = parse_assignments(read_text(root / "etc/os-release"))
    dgx = parse_assignments(read_text(root / "etc/dgx-release"))
    return {
        "hostname": read_text(root / "proc/sys/kernel/hostname").strip() or platform.node(),
        "os": {"id": release.get("ID"), "version": release.get("VERSION_ID"), "name": release.get("PRETTY_NAME")},
        "dgx": {"name": dgx.get("DGX_NAME"), "version": dgx.get("DGX_SWBUILD_VERSION") or dgx.get("DGX_OTA_VERSION")} if dgx else None,
        "kernel": read_text(root / "proc/sys/kernel/osrelease").strip() or platform.release(),
        "arch": read_text(root / "proc/sys/kernel/arch").strip() or platform.machine(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "memory": memory_of(parse_meminfo(read_text(root / "proc/meminfo"))),
        "swap": parse_swaps(read_text(root / "proc/swaps")),
        "gpu": gpu_facts(root, run, timeout_s),
        "docker": docker,
        "toolkit": toolkit_facts(root, run, timeout_s),
        "disks": [disk_of(root, path) for path in dict.fromkeys([*paths, *([docker["root"]] if docker["root"] else [])])],
        "listeners": listeners(root, table, {container["id"]: container["name"] for container in docker["containers"]}),
        "systemd": (root / "run/systemd/system").is_dir(),
        "unit": unit_facts(run, unit, timeout_s) if unit else {},
        "missing_tools": [name for name in TOOLS if find_tool(root, name) is None],
        "memlock": memlock_facts(root, table),
        "desktop": sorted({process["name"] for process in table.values() if process["name"] in DESKTOP}),
        "largest_processes": sorted((p for p in table.values() if p["rss_gib"] >= 1), key=lambda p: -p["rss_gib"])[:3],
        "processes_gib": round(sum(process["rss_gib"] for process in table.values()), 2),
        "cpu_governor": read_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip() or None,
        "apt_lock": apt_facts(root, table),
        "firewall": parse_ufw(read_text(root / "etc/ufw/ufw.conf"), read_text(root / "etc/ufw/user.rules")),
    }
