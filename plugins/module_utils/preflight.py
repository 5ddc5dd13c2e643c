# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Whether a node as `spark.collect` describes it can take what is asked of it: every obstacle at once, with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .listeners import Listener, overlaps
from .problems import Problem, problem
from .spark import GIB, ufw_allows, util_max, version_tuple

LABEL = "dgxspark.vllm.config"  # on every container that this collection starts
PYTHON_MIN = (3, 10)
CACHE_WORTH_NAMING_GIB = 2.0
LOST_WORTH_NAMING_GIB = 8.0
STUCK_CLOCK_MHZ, STUCK_POWER_W, BUSY_PCT = 800, 20, 50

# Problem class -> what it stands for. The names are what `accept` takes.
CLASSES: dict[str, str] = {
    "apt_locked": "another package manager holds a lock",
    "arch_wrong": "the node is not aarch64, and the image is for a Spark",
    "container_name_taken": "a container that is not ours has the service's name",
    "disk_short": "too little free space on a filesystem",
    "disk_unknown": "free space cannot be read",
    "docker_client": "the docker command and the engine do not speak the same API",
    "docker_config_invalid": "/etc/docker/daemon.json does not parse",
    "docker_down": "the engine does not answer",
    "docker_group": "no permission to talk to the engine",
    "docker_hung": "the engine accepts requests and answers none",
    "docker_missing": "the docker command is not installed",
    "docker_old": "the engine is older than what the service needs",
    "docker_unusual": "the engine is rootless or a snap",
    "driver_old": "the NVIDIA driver is too old for the image's CUDA",
    "firewall_closed": "ufw lets nobody reach a port that shall be served",
    "gpu_clock_stuck": "the GPU is busy at a fraction of its clock and power",
    "gpu_other": "the GPU is not of the architecture that the image is built for",
    "gpu_unusable": "nvidia-smi is absent, fails or sees no GPU",
    "memlock_low": "locked memory is limited, and the engine may not raise it",
    "memory_short": "too little memory is available",
    "memory_small": "the machine has too little memory altogether",
    "memory_unknown": "/proc/meminfo cannot be read",
    "page_cache": "enough memory is available, but much of it holds page cache",
    "port_taken": "somebody else listens on a port",
    "swap_active": "swap is on, and fastsafetensors does not work with it",
    "systemd_missing": "systemd does not run this node",
    "toolkit_listed": "this version of the container toolkit is known for trouble",
    "toolkit_not_configured": "containers cannot get the GPU",
    "tool_missing": "a command is not installed",
}


@dataclass(frozen=True)
class DiskNeed:
    """Space wanted at a path (or at Docker's data root, path ''), in GiB; `present_gib` of it is there already."""

    path: str
    need_gib: float
    present_gib: float = 0.0


@dataclass(frozen=True)
class Needs:
    """What the node is asked for. Zero, empty and None switch a check off."""

    ports: Sequence[int] = ()
    address: str = ""
    container: str = ""
    unit: str = ""
    disks: Sequence[DiskNeed] = ()
    memory_gib: float = 0.0
    gpu_memory_utilization: float = 0.0
    load_format: str = ""
    nodes: int = 1
    memlock: str = ""  # what containers will ask for: 'unlimited', bytes, or '' for nothing
    require_gpu: bool = False
    require_docker: bool = True
    docker_min: str = "20.10"
    driver_min: str = ""
    compute_cap: str = ""
    toolkit_avoid: Sequence[str] = field(default_factory=tuple)


def judge(spark: Mapping[str, Any], needs: Needs, reclaimable_bytes: float = 0.0) -> list[Problem]:
    """All problems of a node, in the order a person would look for them. reclaimable_bytes: Docker's build cache."""
    checks = (
        _platform(spark, needs),
        _docker(spark, needs),
        _gpu(spark, needs),
        _memory(spark, needs),
        _disks(spark, needs, reclaimable_bytes),
        _ports(spark, needs),
        _rest(spark, needs),
    )
    return [found for check in checks for found in check]


def python_problem(version: tuple[int, ...]) -> Problem | None:
    """Whether modules can run under this Python at all."""
    if version >= PYTHON_MIN:
        return None
    shown = ".".join(str(part) for part in version[:3])
    remedy = "set ansible_python_interpreter of this host to a Python 3.10 or later"
    return problem("python_old", f"modules run under Python {shown} here; they need 3.10 or later", remedy)


def ours_is_up(spark: Mapping[str, Any], needs: Needs) -> bool:
    """Whether our own service has the node's memory now: its unit is up or on its way, or its container runs."""
    if spark["unit"].get("active") in ("active", "activating", "reloading", "deactivating"):
        return True
    return any(container["running"] and _is_ours(container, needs) for container in spark["docker"]["containers"])


def _is_ours(container: Mapping[str, Any], needs: Needs) -> bool:
    return bool(needs.container) and container["name"] == needs.container and LABEL in container["labels"]


def _platform(spark: Mapping[str, Any], needs: Needs) -> Iterator[Problem]:
    if needs.require_gpu and spark["arch"] not in ("aarch64", "arm64"):
        yield problem(
            "arch_wrong",
            f"this node is {spark['arch']}; a DGX Spark is aarch64, and its image runs nowhere else",
            "check the address in the inventory; without a Spark, try a recipe whose image profile is cpu (`make rehearsal`)",
        )
    if not spark["systemd"]:
        yield problem(
            "systemd_missing",
            "/run/systemd/system is absent: PID 1 is not systemd",
            "long jobs and the service are systemd units: use a machine, or a container, that boots systemd",
        )
    elif spark["missing_tools"]:
        yield problem("tool_missing", f"not found: {', '.join(spark['missing_tools'])}", "sudo apt-get install systemd")


def _docker(spark: Mapping[str, Any], needs: Needs) -> Iterator[Problem]:
    docker = spark["docker"]
    if not needs.require_docker:
        return
    config_error = docker["daemon_json"]["error"]
    if config_error:
        yield problem(
            "docker_config_invalid",
            f"/etc/docker/daemon.json: {config_error}"
            + ("; the running engine has not read it yet, its next start fails" if docker["version"] else ""),
            "mend the file (`python3 -m json.tool /etc/docker/daemon.json` shows the place), then `sudo systemctl restart docker`",
            "warning" if docker["version"] else "error",
        )
    if docker["fault"]:
        yield problem(docker["fault"], docker["error"], DOCKER_REMEDIES[docker["fault"]])
        return
    if version_tuple(docker["version"]) < version_tuple(needs.docker_min):
        yield problem(
            "docker_old",
            f"the engine is {docker['version']}, at least {needs.docker_min} is needed",
            "upgrade the engine (DGX OS: `sudo apt-get update && sudo apt-get install --only-upgrade docker-ce`)",
        )
    if docker["rootless"] or docker["snap"]:
        yield problem(
            "docker_unusual",
            f"the engine is {'rootless' if docker['rootless'] else 'a snap'} (data root {docker['root']})",
            "host networking, locked memory and the NVIDIA runtime may not work there: use Docker's or the distribution's package",
            "warning",
        )
    for container in docker["containers"]:
        if needs.container and container["name"] == needs.container and LABEL not in container["labels"]:
            yield problem(
                "container_name_taken",
                f"container {container['name']} ({container['id'][:12]}, image {container['image']}, "
                f"{'running' if container['running'] else 'stopped'}) was not made by this collection: it has no label {LABEL}",
                f"`sudo docker rename {container['name']} NEW-NAME`, remove it if nobody needs it, or set vllm_name to another name",
            )


DOCKER_REMEDIES = {
    "docker_missing": "install the engine: DGX OS brings it; on Debian or Ubuntu `sudo apt-get install docker.io`",
    "docker_down": "`sudo systemctl start docker`; if that fails, `sudo journalctl -u docker -n 50` says why",
    "docker_group": "run with become: true, or `sudo usermod -aG docker USER` and end the open SSH session "
    "(`ssh -O exit USER@HOST`): it does not see the new group",
    "docker_hung": "`sudo journalctl -u docker -n 50`, then `sudo systemctl restart docker` (this stops running containers)",
    "docker_client": "bring client and engine to the same release (`docker version` shows both)",
}


def _gpu(spark: Mapping[str, Any], needs: Needs) -> Iterator[Problem]:
    if not needs.require_gpu:
        return
    gpu = spark["gpu"]
    if gpu["error"]:
        if "mismatch" in gpu["error"].lower():
            remedy = "the driver was upgraded and the old module is still loaded: reboot"
        elif gpu["driver"]:
            remedy = "`sudo dmesg | grep -i nvrm` says why; reboot if the driver was upgraded"
        else:
            remedy = "install the NVIDIA driver (DGX OS brings it) and reboot, until `nvidia-smi` lists the GPU"
        yield problem("gpu_unusable", gpu["error"] + (f" (kernel module {gpu['driver']})" if gpu["driver"] else ""), remedy)
    if gpu["driver"] and needs.driver_min and version_tuple(gpu["driver"]) < version_tuple(needs.driver_min):
        yield problem(
            "driver_old",
            f"the driver is {gpu['driver']}, the image's CUDA needs {needs.driver_min} or later",
            "bring DGX OS up to date (DGX Dashboard, or `sudo apt-get update && sudo apt-get dist-upgrade`) and reboot",
        )
    for card in gpu["gpus"]:
        if needs.compute_cap and card.get("compute_cap") not in (None, needs.compute_cap):
            yield problem(
                "gpu_other",
                f"GPU {card.get('index')} is {card.get('name')}, compute capability {card['compute_cap']}; "
                f"the image is built for {needs.compute_cap}",
                "use a GB10 (DGX Spark and its siblings), or an image profile for this GPU",
            )
        clock, power, busy = (card.get(key) for key in ("sm_clock_mhz", "power_w", "utilization_pct"))
        if None not in (clock, power, busy) and clock < STUCK_CLOCK_MHZ and power < STUCK_POWER_W and busy > BUSY_PCT:
            yield problem(
                "gpu_clock_stuck",
                f"GPU {card.get('index')} is {busy} % busy at {clock} MHz and {power} W",
                "the power controller is stuck: shut down, unplug the mains for two minutes, start again",
                "warning",
            )
    if needs.require_docker and not spark["docker"]["fault"]:
        yield from _toolkit(spark, needs)


def _toolkit(spark: Mapping[str, Any], needs: Needs) -> Iterator[Problem]:
    docker, toolkit = spark["docker"], spark["toolkit"]
    cdi = any("nvidia.com/gpu" in device for device in docker["cdi_devices"])
    configure = "`sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker`"
    if "nvidia" not in docker["runtimes"] and not cdi:
        if "nvidia" in docker["daemon_json"]["runtimes"]:
            evidence, remedy = "daemon.json has the nvidia runtime, the running engine does not know it", "`sudo systemctl restart docker`"
        elif toolkit["version"] or toolkit["hook"]:
            evidence, remedy = (
                f"container toolkit {toolkit['version'] or '(version unknown)'} is installed, the engine has no nvidia runtime",
                configure,
            )
        else:
            evidence, remedy = (
                "the NVIDIA container toolkit is not installed",
                f"`sudo apt-get install nvidia-container-toolkit`, then {configure}",
            )
        # With the hook in place `--gpus` works without a registered runtime, provided the engine saw the hook when it started.
        yield problem("toolkit_not_configured", evidence, remedy, "warning" if toolkit["hook"] else "error")
    if toolkit["version"] and toolkit["version"] in needs.toolkit_avoid:
        yield problem(
            "toolkit_listed",
            f"container toolkit {toolkit['version']} has been reported to freeze hosts",
            "`sudo apt-get install nvidia-container-toolkit=OTHER-VERSION && sudo apt-mark hold nvidia-container-toolkit`",
            "warning",
        )


def _memory(spark: Mapping[str, Any], needs: Needs) -> Iterator[Problem]:
    memory = spark["memory"]
    share = needs.gpu_memory_utilization if needs.require_gpu else 0.0
    if not needs.memory_gib and not share:
        return
    if memory is None:
        yield problem("memory_unknown", "/proc/meminfo has no MemTotal", "is /proc mounted, and the user allowed to read it?")
        return
    total, available = memory["total_gib"], memory["available_gib"]
    if needs.memory_gib > total:
        yield problem(
            "memory_small",
            f"this machine has {total:.2f} GiB in all, {needs.memory_gib:g} GiB are needed",
            "serve a smaller recipe here",
        )
        return
    if ours_is_up(spark, needs):  # then most of the memory is in use by us, as it should be
        return
    wanted = max(needs.memory_gib, share * total)
    if wanted > available:
        asks = f"{needs.memory_gib:g} GiB are needed"
        if share * total > needs.memory_gib:
            asks = f"gpu_memory_utilization {share:g} asks for {share * total:.2f} GiB; at most {util_max(available, total):.2f} fits now"
        used, remedies = _memory_users(spark, memory)
        yield problem("memory_short", f"{available:.2f} GiB of {total:.2f} GiB are available, {asks}{used}", "; ".join(remedies))
    elif needs.require_gpu and wanted > memory["free_gib"] and memory["cache_gib"] >= CACHE_WORTH_NAMING_GIB:
        yield problem(
            "page_cache",
            f"{available:.2f} GiB are available, but only {memory['free_gib']:.2f} GiB are free: "
            f"{memory['cache_gib']:.2f} GiB hold page cache, which CUDA counts as used on unified memory",
            f"if the start fails for want of memory: {DROP_CACHES}",
            "warning",
        )


DROP_CACHES = "`sync; echo 3 | sudo tee /proc/sys/vm/drop_caches` gives the page cache back"


def _memory_users(spark: Mapping[str, Any], memory: Mapping[str, float]) -> tuple[str, list[str]]:
    """Who has the memory, as more evidence, and what would free it."""
    evidence, remedies = "", []
    running = [container["name"] for container in spark["docker"]["containers"] if container["running"]]
    if running:
        evidence += f"; running containers: {', '.join(running)}"
        remedies.append("stop containers that are not needed (`sudo docker stop NAME`)")
    if spark["largest_processes"]:
        shown = (f"{item['name']} (pid {item['pid']}) {item['rss_gib']:.1f} GiB" for item in spark["largest_processes"])
        evidence += f"; largest processes: {', '.join(shown)}"
        remedies.append("end the processes named")
    if spark["desktop"]:
        evidence += f"; a desktop session runs ({', '.join(spark['desktop'])})"
        remedies.append(
            "do without the desktop: `sudo systemctl set-default multi-user.target && sudo systemctl isolate multi-user.target`"
        )
    if memory["cache_gib"] >= CACHE_WORTH_NAMING_GIB:
        evidence += f"; page cache {memory['cache_gib']:.1f} GiB"
        remedies.append(DROP_CACHES)
    lost = memory["total_gib"] - memory["free_gib"] - memory["cache_gib"] - memory["shmem_gib"] - spark["processes_gib"]
    if spark["gpu"]["driver"] and lost > LOST_WORTH_NAMING_GIB:
        evidence += f"; {lost:.1f} GiB belong to no process's resident memory"
        remedies.append("stop running CUDA programs; if there are none, one that crashed left memory behind: reboot")
    return evidence, [*remedies, "if that is not enough, serve a smaller recipe"]


def disk_groups(spark: Mapping[str, Any], needs: Needs) -> list[tuple[Mapping[str, Any], list[DiskNeed]]]:
    """The filesystems concerned, each with all that is wanted of it: needs on one filesystem add up."""
    facts = {disk["path"]: disk for disk in spark["disks"]}
    groups: dict[Any, tuple[Mapping[str, Any], list[DiskNeed]]] = {}
    for need in needs.disks:
        path = need.path or spark["docker"]["root"]
        if path in facts and need.need_gib > 0:
            disk = facts[path]
            key = path if disk["filesystem"] is None else disk["filesystem"]
            groups.setdefault(key, (disk, []))[1].append(DiskNeed(path, need.need_gib, need.present_gib))
    return list(groups.values())


def missing_gib(wants: Sequence[DiskNeed]) -> float:
    """What must still be written."""
    return sum(max(0.0, want.need_gib - want.present_gib) for want in wants)


def disk_is_short(spark: Mapping[str, Any], needs: Needs) -> bool:
    """Whether any filesystem lacks space (then it pays to ask what could be freed)."""
    return any(disk["free_gib"] is not None and missing_gib(wants) > disk["free_gib"] for disk, wants in disk_groups(spark, needs))


def _disks(spark: Mapping[str, Any], needs: Needs, reclaimable_bytes: float) -> Iterator[Problem]:
    for disk, wants in disk_groups(spark, needs):
        if disk["free_gib"] is None:
            yield problem("disk_unknown", f"{disk['path']}: {disk.get('error', 'no answer')}", "make the path readable, or set another one")
            continue
        missing = missing_gib(wants)
        if missing <= disk["free_gib"]:
            continue
        parts = [f"{want.path} needs {want.need_gib:g} GiB{_already(want)}" for want in wants]
        together = f" ({missing:.1f} GiB together, on one filesystem)" if len(wants) > 1 else ""
        remedy = "free space, or point vllm_state_dir or Docker's data-root at a larger filesystem"
        if reclaimable_bytes >= GIB:
            remedy += f"; Docker's build cache alone would give back {reclaimable_bytes / GIB:.1f} GiB: `sudo docker builder prune`"
        yield problem(
            "disk_short",
            f"{' and '.join(parts)}{together}; {disk['free_gib']:.1f} GiB are free there",
            remedy,
        )


def _already(want: DiskNeed) -> str:
    return f" ({want.present_gib:.1f} GiB of it are there)" if want.present_gib else ""


def _ports(spark: Mapping[str, Any], needs: Needs) -> Iterator[Problem]:
    for port in dict.fromkeys(needs.ports):
        strangers = [item for item in spark["listeners"] if item["port"] == port and overlaps(needs.address, item["address"])]
        strangers = [item for item in strangers if not _listener_is_ours(item, spark, needs)]
        # Without docker-proxy a published port has no listener: the engine's own list is the only witness.
        hidden = [c for c in spark["docker"]["containers"] if port in c["published"] and c["running"] and not _is_ours(c, needs)]
        if strangers:
            yield problem("port_taken", f"port {port} is taken by {_owners(strangers, hidden)}", _free_port(strangers[0], hidden))
        elif hidden:
            names = ", ".join(c["name"] for c in hidden)
            yield problem(
                "port_taken",
                f"port {port} is published by container {names}",
                f"`sudo docker stop {hidden[0]['name']}`, or set vllm_port to a free port",
            )
        firewall = spark["firewall"]
        if firewall["active"] and needs.address not in ("127.0.0.1", "::1", "localhost") and not ufw_allows(port, firewall["allowed"]):
            yield problem(
                "firewall_closed",
                f"ufw is active and has no rule for port {port}/tcp",
                f"`sudo ufw allow proto tcp from YOUR-NETWORK to any port {port}`, or serve on loopback",
                "warning",
            )


def _listener_is_ours(item: Listener, spark: Mapping[str, Any], needs: Needs) -> bool:
    if item["unit"] and needs.unit and item["unit"].removesuffix(".service") == needs.unit.removesuffix(".service"):
        return True
    return any(item["container_id"] == container["id"] for container in spark["docker"]["containers"] if _is_ours(container, needs))


def _owners(items: Sequence[Listener], publishing: Sequence[Mapping[str, Any]]) -> str:
    """Who listens, each once with all its addresses."""
    addresses: dict[str, list[str]] = {}
    for item in items:
        addresses.setdefault(_owner(item, publishing), []).append(item["address"])
    return "; ".join(f"{who}, on {' and '.join(where)}" for who, where in addresses.items())


def _owner(item: Listener, publishing: Sequence[Mapping[str, Any]]) -> str:
    if item["pid"] is None:
        return "a process that cannot be seen from here"
    text = f"pid {item['pid']} ({item['command']})"
    container = item["container"] or (item["container_id"] or "")[:12]
    if "docker-proxy" in (item["command"] or "") and publishing:
        container = str(publishing[0]["name"])
    if container:
        return f"{text}, container {container}"
    return text + (f", unit {item['unit']}" if item["unit"] and not item["unit"].startswith(SHARED_UNITS) else "")


# Started by hand over SSH, from cron or by the engine: stopping the unit would stop more than the one program.
SHARED_UNITS = ("ssh", "user@", "docker", "containerd", "cron")


def _free_port(item: Listener, publishing: Sequence[Mapping[str, Any]]) -> str:
    other = "set vllm_port to a free port"
    container = item["container"] or (publishing[0]["name"] if publishing else None)
    if container:
        return f"`sudo docker stop {container}`, or {other}"
    if item["pid"] is None:
        return f"`sudo ss -ltnp` shows who it is: end it, or {other}"
    if (item["command"] or "").startswith("sshd"):
        return other
    if item["unit"] and not item["unit"].startswith(SHARED_UNITS):
        return f"`sudo systemctl stop {item['unit']}`, or {other}"
    return f"end it (`sudo kill {item['pid']}`), or {other}"


def _rest(spark: Mapping[str, Any], needs: Needs) -> Iterator[Problem]:
    if needs.load_format == "fastsafetensors" and spark["swap"]:
        areas = ", ".join(f"{area['device']} ({area['size_gib']:g} GiB)" for area in spark["swap"])
        yield problem(
            "swap_active",
            f"swap is on: {areas}; load format fastsafetensors fails with swap",
            "`sudo swapoff -a` (and take the line out of /etc/fstab), or use load_format auto",
            "warning",
        )
    memlock = spark["memlock"]
    if needs.require_docker and memlock and _exceeds(needs.memlock, memlock["hard"]) and not memlock["raisable"]:
        fatal = needs.require_gpu and needs.nodes > 1  # RDMA pins its buffers
        yield problem(
            "memlock_low",
            f"{memlock['of']} may lock {memlock['hard'] // 1024} KiB and lacks CAP_SYS_RESOURCE: "
            f"`--ulimit memlock={'-1' if needs.memlock == 'unlimited' else needs.memlock}` fails for its containers",
            "set LimitMEMLOCK=infinity for docker.service (`sudo systemctl edit docker`) and restart it"
            + ("" if fatal else "; or set vllm_service_memlock to '', as one node without RDMA needs none"),
            "error" if fatal else "warning",
        )
    lock = spark["apt_lock"]
    if lock:
        yield problem(
            "apt_locked",
            f"{lock['path']} is held by pid {lock['pid']} ({lock['command']})",
            "wait for it (unattended upgrades take some minutes) before installing packages; do not remove the lock file",
            "warning",
        )


def _exceeds(wanted: str, hard: int | None) -> bool:
    """Whether a memlock limit, 'unlimited' or bytes, is above a hard limit (None: unlimited)."""
    if not wanted or hard is None:
        return False
    return not wanted.isdigit() or int(wanted) > hard
