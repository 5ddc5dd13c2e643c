# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dgxspark.vllm.plugins.module_utils.preflight import (
    CLASSES,
    DiskNeed,
    Needs,
    disk_is_short,
    judge,
    python_problem,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.problems import Problem
from ansible_collections.dgxspark.vllm.plugins.module_utils.spark import (
    Answer,
    memory_of,
    parse_daemon_json,
    parse_docker_info,
    parse_meminfo,
    parse_nvidia_smi,
)

REPO = Path(__file__).parents[4]
FIXTURES = REPO / "tests" / "fixtures" / "spark"
OURS, STRANGER = "c0" * 32, "e1" * 32
OUR_CONTAINER = {
    "id": OURS,
    "name": "dgxspark-vllm",
    "image": "sha256:1",
    "running": True,
    "labels": ["dgxspark.vllm.config"],
    "published": [],
}
WEB = {"id": STRANGER, "name": "web", "image": "nginx", "running": True, "labels": [], "published": [8000]}

NEEDS = Needs(
    ports=[8000],
    address="127.0.0.1",
    container="dgxspark-vllm",
    unit="dgxspark-vllm.service",
    disks=[DiskNeed("/var/lib/dgxspark-vllm", 80), DiskNeed("", 60)],
    memory_gib=104,
    gpu_memory_utilization=0.85,
    memlock="unlimited",
    require_gpu=True,
    driver_min="580",
    compute_cap="12.1",
    toolkit_avoid=["1.19.1"],
)


def text(name: str) -> str:
    return (FIXTURES / name).read_text()


def a_spark() -> dict[str, Any]:
    """A Spark as it should be."""
    return {
        "hostname": "spark1",
        "arch": "aarch64",
        "python": "3.12.3",
        "memory": memory_of(parse_meminfo(text("meminfo-gb10.txt"))),
        "swap": [{"device": "/swap.img", "type": "file", "size_gib": 16.0, "used_gib": 0.0}],
        "gpu": {"driver": "580.95.05", "gpus": parse_nvidia_smi(text("nvidia-smi-gb10.csv")), "error": None},
        "docker": {
            **parse_docker_info(Answer(0, text("docker-info-28.json"), "")),
            "containers": [],
            "daemon_json": parse_daemon_json('{"runtimes":{"nvidia":{}}}'),
        },
        "toolkit": {"version": "1.17.8", "hook": True, "cdi_specs": []},
        "disks": [
            {"path": "/var/lib/dgxspark-vllm", "free_gib": 900.0, "filesystem": 1},
            {"path": "/var/lib/docker", "free_gib": 900.0, "filesystem": 1},
        ],
        "listeners": [],
        "systemd": True,
        "unit": {"name": "dgxspark-vllm.service", "load": "not-found", "active": "inactive", "sub": "dead"},
        "missing_tools": [],
        "memlock": {"soft": 8388608, "hard": 8388608, "of": "dockerd", "raisable": True},
        "desktop": [],
        "largest_processes": [],
        "processes_gib": 2.0,
        "apt_lock": None,
        "firewall": {"active": False, "allowed": []},
    }


def listener(**more: Any) -> dict[str, Any]:
    return {
        "address": "0.0.0.0",
        "port": 8000,
        "pid": 4242,
        "command": "python3 -m http.server 8000",
        "container_id": None,
        "container": None,
        "unit": None,
        **more,
    }


def changed(**paths: Any) -> dict[str, Any]:
    """A Spark with some values replaced; a__b is key b of a."""
    spark = copy.deepcopy(a_spark())
    for path, value in paths.items():
        *folders, key = path.split("__")
        place = spark
        for folder in folders:
            place = place[folder]
        place[key] = value
    return spark


def classes(problems: list[Problem]) -> dict[str, str]:
    return {p["class"]: p["severity"] for p in problems}


def one(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_good_spark_has_no_problems() -> None:
    assert judge(a_spark(), NEEDS) == []


def fault(kind: str) -> dict[str, Any]:
    return {"docker__version": None, "docker__fault": kind, "docker__error": "it says no", "docker__root": None}


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("arch_wrong", "error", {"arch": "x86_64"}),
    ("systemd_missing", "error", {"systemd": False}),
    ("tool_missing", "error", {"missing_tools": ["systemd-run"]}),
    ("memory_unknown", "error", {"memory": None}),
    ("memory_small", "error", {"memory__total_gib": 60.0}),
    ("memory_short", "error", {"memory": memory_of(parse_meminfo(text("meminfo-desktop.txt")))}),
    ("page_cache", "warning", {"memory__free_gib": 80.0}),
    ("disk_unknown", "error", {"disks": [{"path": "/var/lib/dgxspark-vllm", "free_gib": None, "filesystem": None, "error": "no"}]}),
    ("docker_missing", "error", fault("docker_missing")),
    ("docker_down", "error", fault("docker_down")),
    ("docker_group", "error", fault("docker_group")),
    ("docker_hung", "error", fault("docker_hung")),
    ("docker_client", "error", fault("docker_client")),
    ("docker_old", "error", {"docker__version": "19.03.15"}),
    ("docker_unusual", "warning", {"docker__rootless": True}),
    ("docker_unusual", "warning", {"docker__snap": True}),
    ("docker_config_invalid", "warning", {"docker__daemon_json": parse_daemon_json("{")}),
    ("container_name_taken", "error", {"docker__containers": [{**WEB, "name": "dgxspark-vllm", "published": []}]}),
    ("container_name_taken", "error", {"docker__containers": [{**WEB, "name": "dgxspark-vllm", "published": [], "running": False}]}),
    ("gpu_unusable", "error", {"gpu": {"driver": None, "gpus": [], "error": "nvidia-smi is not installed"}}),
    ("driver_old", "error", {"gpu__driver": "570.133.20"}),
    ("gpu_other", "error", {"gpu__gpus": parse_nvidia_smi(text("nvidia-smi-discrete.csv"))[:1]}),
    ("toolkit_listed", "warning", {"toolkit__version": "1.19.1"}),
    ("port_taken", "error", {"listeners": [listener()]}),
    ("port_taken", "error", {"docker__containers": [WEB]}),
    ("apt_locked", "warning", {"apt_lock": {"path": "/var/lib/dpkg/lock-frontend", "pid": 1234, "command": "unattended-upgrade"}}),
    ("memlock_low", "warning", {"memlock__raisable": False}),
]


@pytest.mark.parametrize(("kind", "severity", "change"), CASES, ids=[f"{kind}-{n}" for n, (kind, _, _) in enumerate(CASES)])
def test_each_problem_alone(kind: str, severity: str, change: dict[str, Any]) -> None:
    found = one(judge(changed(**change), NEEDS))
    assert (found["class"], found["severity"]) == (kind, severity)
    assert found["evidence"]
    assert found["remedy"]


def test_the_class_list_is_the_same_everywhere() -> None:
    specs = yaml.safe_load((REPO / "roles/preflight/meta/argument_specs.yml").read_text())
    assert sorted(specs["argument_specs"]["main"]["options"]["preflight_skip"]["choices"]) == sorted(CLASSES)
    source = (REPO / "plugins/modules/spark_facts.py").read_text()
    documentation = yaml.safe_load(source.split('DOCUMENTATION = r"""')[1].split('"""')[0])
    assert sorted(documentation["options"]["accept"]["choices"]) == sorted(CLASSES)
    raised = {kind for kind, _, _ in CASES} | {"disk_short", "firewall_closed", "gpu_clock_stuck", "swap_active", "toolkit_not_configured"}
    assert raised == set(CLASSES), "each class has a case in this file"


@pytest.mark.parametrize(("version", "old"), [((3, 10, 0), False), ((3, 12, 3), False), ((3, 9, 18), True), ((3, 8, 10), True)])
def test_old_pythons(version: tuple[int, ...], old: bool) -> None:
    found = python_problem(version)
    assert (found is not None) is old
    assert found is None or "ansible_python_interpreter" in found["remedy"]


def test_all_problems_come_at_once() -> None:
    spark = changed(
        arch="x86_64",
        memory=memory_of(parse_meminfo(text("meminfo-desktop.txt"))),
        listeners=[listener()],
        gpu={"driver": None, "gpus": [], "error": "none"},
        docker__version="19.03.1",
        disks=[{"path": "/var/lib/dgxspark-vllm", "free_gib": 1.0, "filesystem": 1}],
    )
    found = classes(judge(spark, NEEDS))
    assert set(found) == {"arch_wrong", "memory_short", "port_taken", "gpu_unusable", "docker_old", "disk_short"}


def test_a_cpu_profile_asks_for_no_gpu() -> None:
    needs = Needs(ports=[8000], address="127.0.0.1", memory_gib=6, gpu_memory_utilization=0.99, driver_min="580", compute_cap="12.1")
    spark = changed(
        arch="x86_64",
        gpu={"driver": None, "gpus": [], "error": "nvidia-smi is not installed"},
        toolkit={"version": None, "hook": False, "cdi_specs": []},
        docker__runtimes=["runc"],
        docker__cdi_devices=[],
        memory__free_gib=1.0,
    )
    assert judge(spark, needs) == []


# --- memory ---


def test_utilization_is_held_against_available_memory() -> None:
    spark = changed(memory=memory_of(parse_meminfo(text("meminfo-desktop.txt"))))
    needs = Needs(gpu_memory_utilization=0.87, require_gpu=True)
    evidence = one(judge(spark, needs))["evidence"]
    assert "101.50 GiB of 121.69 GiB" in evidence
    assert "asks for 105.87 GiB; at most 0.83 fits" in evidence
    assert "memory_short" not in classes(judge(spark, Needs(gpu_memory_utilization=0.83, require_gpu=True)))


def test_short_memory_names_who_has_it() -> None:
    spark = changed(
        memory=memory_of(parse_meminfo(text("meminfo-desktop.txt"))),
        desktop=["Xorg", "gnome-shell"],
        largest_processes=[{"pid": 77, "ppid": 1, "name": "python3", "command": "python3", "rss_gib": 9.5}],
        docker__containers=[{**WEB, "published": []}],
        processes_gib=3.0,
    )
    found = one(judge(spark, NEEDS))
    for part in ("gnome-shell", "python3 (pid 77) 9.5 GiB", "running containers: web", "page cache"):
        assert part in found["evidence"]
    for part in ("multi-user.target", "drop_caches", "docker stop"):
        assert part in found["remedy"]
    assert "reboot" in found["remedy"], "11 GiB are in no process"
    quiet = one(judge(changed(memory__available_gib=50.0, memory__cache_gib=0.5, memory__free_gib=120.0), NEEDS))
    assert "drop_caches" not in quiet["remedy"]
    assert "reboot" not in quiet["remedy"]


@pytest.mark.parametrize("state", ["active", "activating", "reloading", "deactivating"])
def test_our_running_service_may_have_the_memory(state: str) -> None:
    spark = changed(unit__active=state, memory__available_gib=9.0, memory__free_gib=1.0)
    assert judge(spark, NEEDS) == []


def test_our_running_container_may_have_the_memory_and_the_port() -> None:
    spark = changed(
        docker__containers=[OUR_CONTAINER],
        memory__available_gib=9.0,
        listeners=[listener(container_id=OURS, container="dgxspark-vllm")],
    )
    assert judge(spark, NEEDS) == []


@pytest.mark.parametrize(
    "change",
    [{"unit__active": "failed"}, {"unit": {}}, {"docker__containers": [{**OUR_CONTAINER, "running": False}]}],
)
def test_a_service_that_is_down_has_no_memory(change: dict[str, Any]) -> None:
    assert classes(judge(changed(memory__available_gib=9.0, **change), NEEDS)) == {"memory_short": "error"}


def test_a_running_service_does_not_excuse_a_machine_that_is_too_small() -> None:
    assert classes(judge(changed(unit__active="active", memory__total_gib=60.0), NEEDS)) == {"memory_small": "error"}


# --- ports ---


@pytest.mark.parametrize(
    ("change", "evidence", "remedy"),
    [
        ({}, "pid 4242 (python3 -m http.server 8000), on 0.0.0.0", "sudo kill 4242"),
        ({"unit": "ssh.service"}, "pid 4242 (python3 -m http.server 8000), on 0.0.0.0", "sudo kill 4242"),
        ({"unit": "jupyter.service"}, "unit jupyter.service", "sudo systemctl stop jupyter.service"),
        ({"container_id": STRANGER, "container": "web"}, "container web", "sudo docker stop web"),
        ({"container_id": STRANGER}, f"container {STRANGER[:12]}", "sudo kill 4242"),
        ({"pid": None, "command": None}, "cannot be seen", "sudo ss -ltnp"),
    ],
)
def test_who_has_the_port(change: dict[str, Any], evidence: str, remedy: str) -> None:
    found = one(judge(changed(listeners=[listener(**change)]), NEEDS))
    assert evidence in found["evidence"]
    assert remedy in found["remedy"]
    assert "vllm_port" in found["remedy"]


def test_nobody_is_told_to_stop_sshd() -> None:
    spark = changed(listeners=[listener(port=22, command="sshd: /usr/sbin/sshd -D", unit="ssh.service")])
    assert one(judge(spark, Needs(ports=[22])))["remedy"] == "set vllm_port to a free port"


def test_a_published_port_is_its_containers() -> None:
    proxy = listener(command="/usr/bin/docker-proxy -proto tcp -host-port 8000", unit="docker.service")
    found = one(judge(changed(listeners=[proxy, {**proxy, "address": "::"}], docker__containers=[WEB]), NEEDS))
    assert "container web, on 0.0.0.0 and ::" in found["evidence"]
    assert "docker stop web" in found["remedy"]


@pytest.mark.parametrize(
    "change",
    [
        {"listeners": [listener(address="192.168.1.21")]},
        {"listeners": [listener(port=8001)]},
        {"listeners": [listener(unit="dgxspark-vllm.service")]},
        {"docker__containers": [{**WEB, "running": False}]},
    ],
)
def test_ports_that_are_not_in_the_way(change: dict[str, Any]) -> None:
    assert judge(changed(**change), NEEDS) == []


def test_a_container_of_our_name_that_is_not_ours_is_a_stranger() -> None:
    imposter = {**OUR_CONTAINER, "labels": []}
    spark = changed(docker__containers=[imposter], listeners=[listener(container_id=OURS, container="dgxspark-vllm")])
    assert set(classes(judge(spark, NEEDS))) == {"container_name_taken", "port_taken"}


@pytest.mark.parametrize(
    ("address", "allowed", "warned"),
    [("0.0.0.0", [], True), ("0.0.0.0", ["22"], True), ("0.0.0.0", ["8000"], False), ("0.0.0.0", ["any"], False), ("127.0.0.1", [], False)],
)
def test_a_firewall_matters_to_a_port_that_is_served_to_others(address: str, allowed: list[str], warned: bool) -> None:
    needs = Needs(ports=[8000], address=address)
    found = classes(judge(changed(firewall={"active": True, "allowed": allowed}), needs))
    assert found == ({"firewall_closed": "warning"} if warned else {})


# --- disks ---


def disks(free: float, free_docker: float, same: bool) -> list[dict[str, Any]]:
    return [
        {"path": "/var/lib/dgxspark-vllm", "free_gib": free, "filesystem": 1},
        {"path": "/var/lib/docker", "free_gib": free_docker, "filesystem": 1 if same else 2},
    ]


@pytest.mark.parametrize(
    ("facts", "wants", "short"),
    [
        (disks(150, 150, True), NEEDS.disks, []),
        (
            disks(139, 139, True),
            NEEDS.disks,
            ["needs 80 GiB and /var/lib/docker needs 60 GiB (140.0 GiB together, on one filesystem); 139.0"],
        ),
        (disks(85, 65, False), NEEDS.disks, []),
        (disks(70, 50, False), NEEDS.disks, ["/var/lib/dgxspark-vllm needs 80 GiB; 70.0", "/var/lib/docker needs 60 GiB; 50.0"]),
        # What is there already need not be written again, and more of it than needed does not help another place.
        (disks(30, 30, False), [DiskNeed("/var/lib/dgxspark-vllm", 80, 60.0)], []),
        (disks(10, 30, False), [DiskNeed("/var/lib/dgxspark-vllm", 80, 60.0)], ["(60.0 GiB of it are there); 10.0 GiB are free"]),
        (disks(50, 50, True), [DiskNeed("/var/lib/dgxspark-vllm", 80, 200.0), DiskNeed("", 60)], ["60.0 GiB together"]),
        (disks(0, 0, True), [DiskNeed("/var/lib/dgxspark-vllm", 0), DiskNeed("", 0)], []),
    ],
)
def test_disks(facts: list[dict[str, Any]], wants: list[DiskNeed], short: list[str]) -> None:
    spark, needs = changed(disks=facts), Needs(disks=wants)
    found = judge(spark, needs)
    assert [p["class"] for p in found] == ["disk_short"] * len(short)
    for problem, part in zip(found, short, strict=True):
        assert part in problem["evidence"]
    assert disk_is_short(spark, needs) is bool(short)


@pytest.mark.parametrize(("reclaimable", "offered"), [(74.82e9, True), (1e6, False), (0.0, False)])
def test_the_build_cache_is_offered_where_it_helps(reclaimable: float, offered: bool) -> None:
    found = one(judge(changed(disks=disks(1, 1, True)), Needs(disks=NEEDS.disks), reclaimable))
    assert ("docker builder prune" in found["remedy"]) is offered


def test_dockers_data_root_is_unknown_while_the_engine_is_down() -> None:
    assert classes(judge(changed(**fault("docker_down")), NEEDS)) == {"docker_down": "error"}


# --- GPU and toolkit ---


@pytest.mark.parametrize(
    ("runtimes", "cdi", "daemon_json", "toolkit", "severity", "remedy"),
    [
        (["nvidia", "runc"], [], None, (None, False), None, ""),
        (["runc"], ["nvidia.com/gpu=all"], "{}", (None, False), None, ""),
        (["runc"], [], None, (None, False), "error", "apt-get install nvidia-container-toolkit"),
        (["runc"], [], "{}", ("1.17.8", False), "error", "nvidia-ctk runtime configure"),
        (["runc"], [], "{}", ("1.17.8", True), "warning", "nvidia-ctk runtime configure"),
        (
            ["runc"],
            [],
            '{"runtimes":{"nvidia":{"path":"nvidia-container-runtime"}}}',
            ("1.17.8", False),
            "error",
            "systemctl restart docker",
        ),
        (["runc"], ["vendor.example/nic=0"], None, (None, False), "error", "nvidia-container-toolkit"),
    ],
)
def test_how_containers_get_the_gpu(
    runtimes: list[str], cdi: list[str], daemon_json: str | None, toolkit: tuple[str | None, bool], severity: str | None, remedy: str
) -> None:
    spark = changed(
        docker__runtimes=runtimes,
        docker__cdi_devices=cdi,
        docker__daemon_json=parse_daemon_json(daemon_json),
        toolkit={"version": toolkit[0], "hook": toolkit[1], "cdi_specs": []},
    )
    found = judge(spark, NEEDS)
    assert classes(found) == ({"toolkit_not_configured": severity} if severity else {})
    assert all(remedy in p["remedy"] for p in found)


def test_an_invalid_daemon_json_stops_an_engine_that_is_down() -> None:
    found = classes(judge(changed(docker__daemon_json=parse_daemon_json("{"), **fault("docker_down")), NEEDS))
    assert found == {"docker_config_invalid": "error", "docker_down": "error"}


def test_a_driver_upgrade_wants_a_reboot() -> None:
    gpu = {"driver": "580.95.05", "gpus": [], "error": "Failed to initialize NVML: Driver/library version mismatch"}
    assert "reboot" in one(judge(changed(gpu=gpu), NEEDS))["remedy"]


@pytest.mark.parametrize(
    ("clock", "power", "busy", "stuck"),
    [(650, 13.2, 96, True), (208, 4.6, 0, False), (2400, 15.0, 96, False), (650, 60.0, 96, False), (None, 13.2, 96, False)],
)
def test_a_stuck_power_controller(clock: int | None, power: float, busy: int, stuck: bool) -> None:
    card = {"index": 0, "name": "NVIDIA GB10", "compute_cap": "12.1", "sm_clock_mhz": clock, "power_w": power, "utilization_pct": busy}
    found = judge(changed(gpu__gpus=[card]), NEEDS)
    assert classes(found) == ({"gpu_clock_stuck": "warning"} if stuck else {})


# --- limits and swap ---


@pytest.mark.parametrize(
    ("memlock", "wanted", "nodes", "gpu", "severity"),
    [
        ({"hard": 8388608, "raisable": True, "of": "dockerd"}, "unlimited", 2, True, None),
        ({"hard": None, "raisable": False, "of": "dockerd"}, "unlimited", 2, True, None),
        ({"hard": 8388608, "raisable": False, "of": "dockerd"}, "unlimited", 2, True, "error"),
        ({"hard": 8388608, "raisable": False, "of": "dockerd"}, "unlimited", 1, True, "warning"),
        ({"hard": 65536, "raisable": False, "of": "dockerd"}, "unlimited", 2, False, "warning"),
        ({"hard": 8388608, "raisable": False, "of": "dockerd"}, "", 1, True, None),
        ({"hard": 8388608, "raisable": False, "of": "dockerd"}, "4194304", 1, True, None),
        ({"hard": 8388608, "raisable": False, "of": "dockerd"}, "16777216", 1, True, "warning"),
        (None, "unlimited", 2, True, None),
    ],
)
def test_locked_memory(memlock: dict[str, Any] | None, wanted: str, nodes: int, gpu: bool, severity: str | None) -> None:
    needs = Needs(memlock=wanted, nodes=nodes, require_gpu=gpu)
    assert classes(judge(changed(memlock=memlock), needs)) == ({"memlock_low": severity} if severity else {})


@pytest.mark.parametrize(
    ("load_format", "swap", "warned"),
    [("fastsafetensors", True, True), ("fastsafetensors", False, False), ("auto", True, False), ("", True, False)],
)
def test_swap_matters_to_fastsafetensors_only(load_format: str, swap: bool, warned: bool) -> None:
    spark = changed() if swap else changed(swap=[])
    assert classes(judge(spark, Needs(load_format=load_format))) == ({"swap_active": "warning"} if warned else {})
