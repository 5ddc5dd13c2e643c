# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.listeners import processes
from ansible_collections.dgxspark.vllm.plugins.module_utils.spark import (
    GIB,
    Answer,
    apt_facts,
    collect,
    disk_of,
    gpu_facts,
    has_capability,
    memlock_facts,
    memory_of,
    parse_assignments,
    parse_build_cache,
    parse_containers,
    parse_daemon_json,
    parse_docker_info,
    parse_driver,
    parse_limit,
    parse_locks,
    parse_meminfo,
    parse_nvidia_smi,
    parse_size,
    parse_swaps,
    parse_toolkit_version,
    parse_ufw,
    run_command,
    tree_bytes,
    ufw_allows,
    util_max,
    version_tuple,
)

FIXTURES = Path(__file__).parents[3] / "fixtures" / "spark"


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text()


def test_memory_of_a_gb10() -> None:
    memory = memory_of(parse_meminfo(fixture("meminfo-gb10.txt")))
    assert memory == {
        "total_gib": 121.69,
        "available_gib": 117.0,
        "free_gib": 110.64,
        "cache_gib": 6.78,
        "shmem_gib": 0.03,
        "cma_total_gib": 0.12,
        "cma_free_gib": 0.12,
        "swap_total_gib": 16.0,
        "swap_free_gib": 16.0,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("no meminfo at all\n", None),
        ("MemFree: 12 kB\n", None),
        ("MemTotal:       oops kB\n", None),
        # A kernel without MemAvailable.
        ("MemTotal: 4194304 kB\nMemFree: 1048576 kB\nCached: 1048576 kB\n", 2.0),
        ("MemTotal: 4194304 kB\nMemFree: 0 kB\nMemAvailable: 0 kB\n", 0.0),
        # More shared memory than cache never makes a negative cache.
        ("MemTotal: 4194304 kB\nMemFree: 1048576 kB\nCached: 1024 kB\nShmem: 2048 kB\n", 1.0),
    ],
)
def test_memory_of_other_texts(text: str, expected: float | None) -> None:
    memory = memory_of(parse_meminfo(text))
    assert (memory and memory["available_gib"]) == expected
    assert memory is None or memory["cache_gib"] >= 0


@pytest.mark.parametrize(
    ("available", "total", "expected"),
    [(101.5, 121.69, 0.83), (117.0, 121.69, 0.96), (103.44, 121.69, 0.85), (103.43, 121.69, 0.84), (0.0, 121.69, 0.0), (5.0, 0.0, 0.0)],
)
def test_util_max_never_promises_more_than_there_is(available: float, total: float, expected: float) -> None:
    assert util_max(available, total) == expected
    assert util_max(available, total) * total <= available


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n", []),
        (
            "Filename Type Size Used Priority\n/swap.img file 16777212 262144 -2\n/dev/zram0 partition 4194304 0 100\n",
            [
                {"device": "/swap.img", "type": "file", "size_gib": 16.0, "used_gib": 0.25},
                {"device": "/dev/zram0", "type": "partition", "size_gib": 4.0, "used_gib": 0.0},
            ],
        ),
        (
            "Filename Type Size Used Priority\n/my\\040swap\\040(deleted) file 1048576 0 -2\nbroken line\n",
            [{"device": "/my swap (deleted)", "type": "file", "size_gib": 1.0, "used_gib": 0.0}],
        ),
    ],
)
def test_swaps(text: str, expected: list[dict[str, Any]]) -> None:
    assert parse_swaps(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('ID=ubuntu\nVERSION_ID="24.04"\n# note\n\n', {"ID": "ubuntu", "VERSION_ID": "24.04"}),
        ("NAME='A \"B\"'\n", {"NAME": 'A "B"'}),
        ('NAME="unclosed\n', {"NAME": '"unclosed'}),
        ("LoadState=loaded\nActiveState=active\n", {"LoadState": "loaded", "ActiveState": "active"}),
        ("not an assignment\n=x\na b=c\n", {}),
        ("EMPTY=\n", {"EMPTY": ""}),
    ],
)
def test_assignments(text: str, expected: dict[str, str]) -> None:
    assert parse_assignments(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fixture("nvidia-driver-version.txt"), "580.95.05"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("", None),
        ("something else 580.95", None),
    ],
)
def test_driver(text: str, expected: str | None) -> None:
    assert parse_driver(text) == expected


def test_gb10_reports_no_memory_of_its_own() -> None:
    (gpu,) = parse_nvidia_smi(fixture("nvidia-smi-gb10.csv"))
    assert gpu == {
        "index": 0,
        "name": "NVIDIA GB10",
        "uuid": "GPU-6f1c2f6e-0b1e-7c41-9a35-2d9d7f0e4b11",
        "driver": "580.95.05",
        "compute_cap": "12.1",
        "memory_total_mib": None,
        "memory_used_mib": None,
        "utilization_pct": 0,
        "power_w": 4.61,
        "sm_clock_mhz": 208,
        "temperature_c": 38,
    }


def test_other_gpus_and_unsupported_fields() -> None:
    gpus = parse_nvidia_smi(fixture("nvidia-smi-discrete.csv"))
    assert [gpu["memory_total_mib"] for gpu in gpus] == [81559, 81559]
    assert [gpu["power_w"] for gpu in gpus] == [70.21, None]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Answer(None, "", "", "missing"), "nvidia-smi is not installed"),
        (Answer(None, "", "", "timeout"), "nvidia-smi did not answer within 5 s"),
        (
            Answer(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure\n", ""),
            "NVIDIA-SMI has failed because",
        ),
        (Answer(18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n", ""), "version mismatch"),
        (Answer(0, "No devices were found\n", ""), "nvidia-smi: No devices were found"),
        (Answer(2, 'Field "compute_cap" is not a valid field to query.\n', ""), "not a valid field"),
        (Answer(0, "", ""), "nvidia-smi: no output"),
        (Answer(1, "", ""), "nvidia-smi ended with 1"),
        (Answer(0, "index, name\n", ""), "index, name"),
        (Answer(None, "", "", "Exec format error"), "Exec format error"),
    ],
)
def test_gpu_that_does_not_answer(tmp_path: Path, answer: Answer, error: str) -> None:
    facts = gpu_facts(tmp_path, lambda argv, timeout: answer, 5)
    assert facts["gpus"] == []
    assert error in facts["error"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20.10.24+dfsg1", (20, 10, 24)),
        ("28.3.3", (28, 3, 3)),
        ("29.0.0-rc.1", (29, 0, 0)),
        ("v1.17.8", (1, 17, 8)),
        ("dev", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_version_tuple(text: str | None, expected: tuple[int, ...]) -> None:
    assert version_tuple(text) == expected


def test_docker_info_of_a_spark() -> None:
    info = parse_docker_info(Answer(0, fixture("docker-info-28.json"), ""))
    assert (info["version"], info["root"], info["error"], info["fault"]) == ("28.3.3", "/var/lib/docker", None, None)
    assert "nvidia" in info["runtimes"]
    assert info["cdi_devices"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=all"]
    assert not info["rootless"]


def test_docker_info_of_an_old_engine_has_no_cdi() -> None:
    info = parse_docker_info(Answer(0, fixture("docker-info-20.10.json"), ""))
    assert (info["version"], info["cdi_devices"], info["runtimes"]) == ("20.10.24+dfsg1", [], ["io.containerd.runc.v2", "runc"])


PERMISSION = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"


@pytest.mark.parametrize(
    ("answer", "fault", "error"),
    [
        (Answer(None, "", "", "missing"), "docker_missing", "not installed"),
        (Answer(None, "", "", "timeout"), "docker_hung", "no answer"),
        (Answer(0, fixture("docker-info-down.json"), ""), "docker_down", "Cannot connect"),
        (Answer(1, "", "ERROR: Cannot connect to the Docker daemon at unix:///var/run/docker.sock."), "docker_down", "Cannot connect"),
        (Answer(1, f'{{"ServerErrors":["{PERMISSION}"]}}\n', ""), "docker_group", "permission denied"),
        (Answer(1, "", f"Got {PERMISSION}"), "docker_group", "permission denied"),
        (
            Answer(1, "", "Error response from daemon: client version 1.41 is too old. Minimum supported API version is 1.44"),
            "docker_client",
            "too old",
        ),
        (
            Answer(1, "", "Error response from daemon: client version 1.52 is too new. Maximum supported API version is 1.41"),
            "docker_client",
            "new",
        ),
        (Answer(125, "", ""), "docker_down", "ended with 125"),
        (Answer(0, "null\n", ""), "docker_down", "ended with 0"),
        (Answer(0, "[1, 2]\nnot json", ""), "docker_down", "ended with 0"),
        (Answer(None, "", "", "Exec format error"), "docker_down", "Exec format error"),
    ],
)
def test_docker_that_does_not_answer(answer: Answer, fault: str, error: str) -> None:
    info = parse_docker_info(answer)
    assert info["fault"] == fault
    assert error in info["error"]
    assert info["version"] is None


@pytest.mark.parametrize(
    ("info", "rootless", "snap"),
    [
        ('{"ServerVersion":"28.0.0","SecurityOptions":["name=seccomp","name=rootless"]}', True, False),
        ('{"ServerVersion":"28.0.0","DockerRootDir":"/var/snap/docker/common/var-lib-docker"}', False, True),
        ('{"ServerVersion":"28.0.0","SecurityOptions":null,"Runtimes":null}', False, False),
    ],
)
def test_unusual_engines(info: str, rootless: bool, snap: bool) -> None:
    parsed = parse_docker_info(Answer(0, info, ""))
    assert (parsed["rootless"], parsed["snap"], parsed["fault"]) == (rootless, snap, None)


def test_containers() -> None:
    rows = (
        '{"ID":"'
        + "a" * 64
        + '","Image":"vllm:1","Labels":"a=b,dgxspark.vllm.config=12ab","Names":"dgxspark-vllm","Ports":"","State":"running"}\n'
        "WARNING: something\n"
        '{"ID":"'
        + "b"
        * 64
        + '","Image":"nginx","Labels":"","Names":"web","Ports":"0.0.0.0:8000->80/tcp, [::]:8000->80/tcp, 53/udp","State":"exited"}\n'
        '{"Names":"no id"}\n'
    )
    ours, web = parse_containers(rows)
    assert (ours["name"], ours["running"], ours["labels"]) == ("dgxspark-vllm", True, ["a", "dgxspark.vllm.config"])
    assert (web["running"], web["published"], web["labels"]) == (False, [8000], [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("66.7GB", 66.7e9),
        ("0B", 0.0),
        ("0B (0%)", 0.0),
        ("1.5kB (3%)", 1500.0),
        ("310.4MB", 310.4e6),
        ("2TB", 2e12),
        ("1GiB", float(GIB)),
        ("", None),
        ("many", None),
        ("12", None),
    ],
)
def test_size(text: str, expected: float | None) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [(fixture("docker-df.txt"), 74.82e9), (fixture("docker-df.jsonl"), 66.7e9), ("", 0.0), ("Build Cache\n", 0.0)]
)
def test_build_cache(text: str, expected: float) -> None:
    assert parse_build_cache(text) == expected


@pytest.mark.parametrize(
    ("text", "present", "runtimes", "error"),
    [
        (None, False, [], False),
        ("", True, [], False),
        ("{}", True, [], False),
        ('{"runtimes":{"nvidia":{"path":"nvidia-container-runtime"}},"default-runtime":"nvidia"}', True, ["nvidia"], False),
        ('{"log-driver":"journald"}', True, [], False),
        ('{"runtimes": {"nvidia": {"path": "x"},}}', True, [], True),
        ("{", True, [], True),
        ("[]", True, [], True),
        ('"text"', True, [], True),
        ('{"runtimes": []}', True, [], True),
    ],
)
def test_daemon_json(text: str | None, present: bool, runtimes: list[str], error: bool) -> None:
    state = parse_daemon_json(text)
    assert (state["present"], state["runtimes"], bool(state["error"])) == (present, runtimes, error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVIDIA Container Toolkit CLI version 1.17.8\ncommit: f202b80\n", "1.17.8"),
        ("NVIDIA Container Toolkit CLI version 1.19.0-rc.4\n", "1.19.0-rc.4"),
        ("nvidia-ctk version: 1.13.5\n", "1.13.5"),
        ("", None),
    ],
)
def test_toolkit_version(text: str, expected: str | None) -> None:
    assert parse_toolkit_version(text) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("Max locked memory         8388608              8388608              bytes     ", {"soft": 8388608, "hard": 8388608}),
        ("Max locked memory         unlimited            unlimited            bytes     ", {"soft": None, "hard": None}),
        ("Max locked memory         65536                unlimited            bytes", {"soft": 65536, "hard": None}),
        ("Max file locks            unlimited            unlimited            locks     ", None),
        ("", None),
    ],
)
def test_limit(row: str, expected: dict[str, int | None] | None) -> None:
    assert parse_limit(f"Limit                     Soft Limit           Hard Limit           Units\n{row}\n") == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("Name:\tx\nCapEff:\t000001ffffffffff\n", True),
        ("CapEff:\t0000003ffeffffff\n", False),
        ("CapEff:\t0000000000000000\n", False),
        ("", False),
    ],
)
def test_capability_to_raise_limits(status: str, expected: bool) -> None:
    assert has_capability(status, 24) is expected


def test_locks_of_the_posix_kind_only() -> None:
    text = (
        "1: POSIX  ADVISORY  WRITE 1234 fd:00:3146 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 75 fe:00:2270271 0 EOF\n"
        "3: POSIX  ADVISORY  READ 80 fd:00:3147 0 EOF\n"
        "3: -> POSIX  ADVISORY  WRITE 81 fd:00:3147 0 EOF\n"
        "4: OFDLCK ADVISORY  READ -1 00:56:5 0 EOF\n"
    )
    assert parse_locks(text) == {3146: 1234}


UFW_RULES = """*filter
### tuple ### allow tcp 22 0.0.0.0/0 any 0.0.0.0/0 in
### tuple ### limit any 443,8443 0.0.0.0/0 any 0.0.0.0/0 in
### tuple ### allow tcp 9000:9010 ::/0 any ::/0 in
### tuple ### deny tcp 8000 0.0.0.0/0 any 0.0.0.0/0 in
### tuple ### allow udp 8000 0.0.0.0/0 any 0.0.0.0/0 in
"""


@pytest.mark.parametrize(("port", "expected"), [(22, True), (443, True), (8443, True), (9005, True), (9011, False), (8000, False)])
def test_firewall_rules(port: int, expected: bool) -> None:
    firewall = parse_ufw("# on boot\nENABLED=yes\n", UFW_RULES)
    assert firewall["active"]
    assert ufw_allows(port, firewall["allowed"]) is expected


def test_firewall_off_or_absent() -> None:
    assert not parse_ufw("ENABLED=no\n", UFW_RULES)["active"]
    assert not parse_ufw("", "")["active"]
    assert ufw_allows(8000, ["any"])


def test_tree_bytes_counts_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 8192)
    (tmp_path / "deep").mkdir()
    os.link(tmp_path / "a", tmp_path / "deep" / "b")
    (tmp_path / "link").symlink_to("/etc")
    once = tree_bytes(tmp_path)
    assert 8192 <= once < 16384
    assert tree_bytes(tmp_path / "absent") == 0


def test_disk_of_a_path_that_does_not_exist_yet(tmp_path: Path) -> None:
    disk = disk_of(tmp_path, "/var/lib/dgxspark-vllm/checkpoints/x")
    assert disk["filesystem"] == tmp_path.stat().st_dev
    assert disk["free_gib"] > 0


def proc(
    root: Path, pid: int, name: str, *, ppid: int = 1, rss_kb: int = 1024, cmdline: bytes = b"", extra: str = "", limits: str = ""
) -> Path:
    """A process below root/proc."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "status").write_text(f"Name:\t{name}\nPPid:\t{ppid}\nVmRSS:\t{rss_kb} kB\n{extra}")
    (folder / "cmdline").write_bytes(cmdline)
    (folder / "limits").write_text(limits)
    return folder


LIMITED = "Max locked memory         8388608              8388608              bytes     \n"


@pytest.mark.parametrize(("capabilities", "raisable"), [("000001ffffffffff", True), ("0000003ffeffffff", False)])
def test_memlock_is_the_engines(tmp_path: Path, capabilities: str, raisable: bool) -> None:
    proc(tmp_path, 1, "systemd", limits="Max locked memory         65536 65536 bytes\n")
    proc(tmp_path, 300, "dockerd", extra=f"CapEff:\t{capabilities}\n", limits=LIMITED)
    facts = memlock_facts(tmp_path, processes(tmp_path))
    assert facts == {"soft": 8388608, "hard": 8388608, "of": "dockerd", "raisable": raisable}


def test_memlock_without_engine_or_limits(tmp_path: Path) -> None:
    assert memlock_facts(tmp_path, {}) is None
    proc(tmp_path, 1, "systemd", limits=LIMITED)
    facts = memlock_facts(tmp_path, processes(tmp_path))
    assert facts is not None
    assert facts["of"] == "systemd"


def test_apt_lock_needs_lock_and_holder(tmp_path: Path) -> None:
    lock = tmp_path / "var/lib/dpkg/lock-frontend"
    lock.parent.mkdir(parents=True)
    lock.touch()
    holder = proc(tmp_path, 1234, "unattended-upgr", cmdline=b"/usr/bin/python3\0/usr/bin/unattended-upgrade\0")
    (tmp_path / "proc/locks").write_text(f"1: POSIX  ADVISORY  WRITE 1234 fd:00:{lock.stat().st_ino} 0 EOF\n")
    assert apt_facts(tmp_path, processes(tmp_path)) is None, "the same inode of another filesystem"
    (holder / "fd/5").symlink_to(lock)
    assert apt_facts(tmp_path, processes(tmp_path)) == {
        "path": "/var/lib/dpkg/lock-frontend",
        "pid": 1234,
        "command": "/usr/bin/python3 /usr/bin/unattended-upgrade",
    }
    (tmp_path / "proc/locks").write_text("")
    assert apt_facts(tmp_path, processes(tmp_path)) is None


def test_run_command_tells_how_it_went_wrong(tmp_path: Path) -> None:
    assert run_command(["no-such-command-here"], 5).error == "missing"
    assert run_command(["sleep", "5"], 0.1).error == "timeout"
    assert run_command([str(tmp_path)], 5).error
    assert run_command(["sh", "-c", "echo $LC_ALL; exit 3"], 5) == Answer(3, "C\n", "")


def test_an_empty_machine_is_described_without_an_error(tmp_path: Path) -> None:
    facts = collect(tmp_path, lambda argv, timeout: Answer(None, "", "", "missing"), ["/x"], "dgxspark-vllm")
    assert facts["memory"] is None
    assert facts["docker"]["fault"] == "docker_missing"
    assert facts["gpu"]["error"] == "nvidia-smi is not installed"
    assert (facts["systemd"], facts["unit"], facts["listeners"], facts["swap"]) == (False, {}, [], [])
    assert facts["missing_tools"] == ["systemctl", "systemd-run", "journalctl"]


def test_this_machine_is_described_without_an_error() -> None:
    facts = collect(Path("/"), run_command, ["/"], timeout_s=5)
    assert facts["memory"]["total_gib"] > 0
    assert facts["arch"] == os.uname().machine
