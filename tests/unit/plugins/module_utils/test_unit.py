# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import configparser
import json
import re
import shlex
from dataclasses import replace

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.unit import (
    CACHE_ENVIRONMENT,
    CACHE_MOUNT,
    UnitSettings,
    cache_name,
    config_digest,
    docker_args_problems,
    docker_command,
    effective_environment,
    environment_digest,
    environment_summary,
    image_of_manifest,
    restart_limits,
    settings_problems,
    size_bytes,
    start_failure,
    unit_text,
)

IMAGE = "sha256:" + "ab" * 32
SPECULATIVE = '{"method":"mtp","num_speculative_tokens":2}'
SETTINGS = UnitSettings(
    name="qwen",
    image_id=IMAGE,
    argv=("serve", "/model", "--port", "8000", "--enforce-eager", "--speculative-config", SPECULATIVE),
    checkpoint="/srv/models/a b/100%",
    cache="/srv/cache/x",
    env_file="/srv/units/qwen.env",
    revision="0123",
    index_digest="i" * 8,
    env_digest="e" * 8,
    limits=restart_limits(1800),
)


def sections(text: str) -> dict[str, dict[str, list[str]]]:
    """Unit text -> section -> key -> values, continued lines joined; a second reading of systemd.syntax(7)."""
    result: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, value = line.split("=", 1)
            result.setdefault(section, {}).setdefault(key, []).append(value)
    return result


def exec_words(value: str) -> list[str]:
    """The words that systemd would pass on: shell-like quotes, then %% and $$."""
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(value)]


def limit_trips(restart_s: float, burst: int, interval_s: float, worst_crash_s: float) -> bool:
    """Whether systemd's start limit ever stops a service that takes `worst_crash_s` to die each time.

    `burst` starts must fall into the interval: a model that dies after 13 minutes of loading, three tries in five minutes, loops for ever.
    """
    if burst < 1 or interval_s <= 0:
        return False
    return (restart_s + worst_crash_s) * burst < interval_s


@pytest.mark.parametrize(
    ("restart_s", "burst", "interval_s", "worst_s", "trips"),
    [
        (5, 5, 20, 0, False),
        (10, 3, 20, 0, False),
        (30, 3, 300, 0, True),
        (30, 3, 300, 800, False),
        (30, 3, 3600, 800, True),
        (30, 0, 3600, 0, False),
        (30, 3, 0, 0, False),
    ],
)
def test_a_start_limit_must_be_longer_than_its_crashes(restart_s: int, burst: int, interval_s: int, worst_s: int, trips: bool) -> None:
    assert limit_trips(restart_s, burst, interval_s, worst_s) is trips


@pytest.mark.parametrize("worst_s", [0, 1, 30, 600, 802, 1500, 3600, 7200])
def test_the_limits_of_a_unit_stop_every_loop(worst_s: int) -> None:
    limits = restart_limits(worst_s)
    # Stopping, too, takes its time before the next start.
    assert limit_trips(limits.restart_s, limits.burst, limits.interval_s, worst_s + 45)
    assert limits.burst == 3


def test_the_unit_restarts_after_exit_0_within_limits_in_the_right_section() -> None:
    parsed = sections(unit_text(SETTINGS))
    unit, service = parsed["Unit"], parsed["Service"]
    assert service["Restart"] == ["always"]
    assert limit_trips(int(service["RestartSec"][0]), int(unit["StartLimitBurst"][0]), int(unit["StartLimitIntervalSec"][0]), 1800)
    assert not {key for key in service if key.startswith("StartLimit")}
    assert service["TimeoutStartSec"] == ["infinity"]
    assert service["Type"] == ["exec"]


def test_the_unit_leaves_no_container_behind() -> None:
    service = sections(unit_text(SETTINGS))["Service"]
    words = exec_words(service["ExecStart"][0])
    assert words[:2] == ["/usr/bin/docker", "run"]
    assert {"--rm", "--init"} <= set(words)
    assert not {"-d", "--detach", "--privileged", "--restart"} & set(words)
    assert service["ExecStartPre"] == ["-/usr/bin/docker rm -f qwen"]
    assert service["ExecStop"] == ["-/usr/bin/docker stop -t 10 qwen"]
    assert service["ExecStopPost"] == ["-/usr/bin/docker rm -f qwen"]
    assert service["SuccessExitStatus"] == ["143 137"]
    assert int(service["TimeoutStopSec"][0]) > 10


def test_the_unit_follows_docker() -> None:
    parsed = sections(unit_text(SETTINGS))
    assert parsed["Unit"]["Requires"] == ["docker.service"]
    assert "docker.service" in parsed["Unit"]["After"][0]
    assert parsed["Install"]["WantedBy"] == ["multi-user.target docker.service"]


def test_the_unit_has_no_hardening_that_breaks_a_gpu_server() -> None:
    service = sections(unit_text(SETTINGS))["Service"]
    for key in ("RestrictAddressFamilies", "MemoryDenyWriteExecute", "PrivateDevices", "ProtectHome", "PrivateNetwork", "DevicePolicy"):
        assert key not in service


def test_argv_arrives_as_it_was_given() -> None:
    odd = (
        "serve",
        "/model",
        "--a",
        "100% $HOME ${X} $$ %n ; \"dq\" 'sq' \\ back ü",
        "--re",
        "re:.*\\\\.(gate|up)$",
        "--empty",
        "",
        "-1",
        ";",
    )
    words = exec_words(sections(unit_text(replace(SETTINGS, argv=odd)))["Service"]["ExecStart"][0])
    assert words[words.index(IMAGE) + 1 :] == list(odd)


def test_json_is_one_word() -> None:
    words = exec_words(sections(unit_text(SETTINGS))["Service"]["ExecStart"][0])
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"method": "mtp", "num_speculative_tokens": 2}


def test_the_model_is_mounted_read_only_and_must_exist() -> None:
    words = exec_words(sections(unit_text(SETTINGS))["Service"]["ExecStart"][0])
    assert "type=bind,source=/srv/models/a b/100%,target=/model,readonly" in words
    assert not {"-v", "--volume"} & set(words)
    assert sections(unit_text(SETTINGS))["Unit"]["RequiresMountsFor"] == ['"/srv/models/a b/100%%" "/srv/cache/x"']


def test_the_image_is_its_id() -> None:
    words = exec_words(sections(unit_text(SETTINGS))["Service"]["ExecStart"][0])
    assert IMAGE in words
    assert words[words.index("--pull") + 1] == "never"


def test_the_environment_is_in_a_file() -> None:
    words = exec_words(sections(unit_text(SETTINGS))["Service"]["ExecStart"][0])
    assert words[words.index("--env-file") + 1] == "/srv/units/qwen.env"
    assert not {"-e", "--env"} & set(words)


@pytest.mark.parametrize(("memlock", "expected"), [("unlimited", "memlock=-1:-1"), ("8388608", "memlock=8388608:8388608"), ("", None)])
def test_memlock(memlock: str, expected: str | None) -> None:
    words = [word for line in docker_command(replace(SETTINGS, memlock=memlock), "d") for word in line]
    assert ("--ulimit" in words) is (expected is not None)
    assert expected is None or expected in words


@pytest.mark.parametrize("gpus", [True, False])
def test_gpus(gpus: bool) -> None:
    words = [word for line in docker_command(replace(SETTINGS, gpus=gpus), "d") for word in line]
    assert ("--gpus" in words) is gpus


def test_ipc_is_the_hosts_unless_asked_otherwise() -> None:
    own = ("--ipc=private", "--shm-size", "4g")
    assert ["--ipc", "host"] in docker_command(SETTINGS, "d")
    assert ["--ipc", "host"] not in docker_command(replace(SETTINGS, docker_args=own), "d")
    assert ["--shm-size", "4g"] in docker_command(replace(SETTINGS, docker_args=own), "d")


@pytest.mark.parametrize(
    "change",
    [
        {"image_id": "sha256:" + "cd" * 32},
        {"argv": ("serve", "/model")},
        {"argv": ("serve", "/model", "--port", "8001", "--enforce-eager", "--speculative-config", SPECULATIVE)},
        {"checkpoint": "/srv/models/b"},
        {"revision": "0124"},
        {"index_digest": "j" * 8},
        {"env_digest": "f" * 8},
        {"docker_args": ("--cap-add", "IPC_LOCK")},
        {"memlock": ""},
        {"gpus": False},
        {"limits": restart_limits(60)},
    ],
)
def test_whatever_changes_changes_the_digest(change: dict[str, object]) -> None:
    changed = replace(SETTINGS, **change)  # type: ignore[arg-type]
    assert config_digest(changed) != config_digest(SETTINGS)
    assert f"dgxspark.vllm.config={config_digest(changed)}" in unit_text(changed)


def test_equal_settings_are_equal_text() -> None:
    assert unit_text(SETTINGS) == unit_text(replace(SETTINGS))


def test_the_unit_is_no_ini_surprise() -> None:
    """A key twice or outside a section would be refused here."""
    reader = configparser.ConfigParser(strict=True, interpolation=None, delimiters=("=",))
    reader.optionxform = str  # type: ignore[assignment,method-assign]
    reader.read_string(unit_text(SETTINGS).replace("\\\n", " "))
    assert reader.sections() == ["Unit", "Service", "Install"]


def test_every_compiler_cache_is_on_the_mount() -> None:
    environment = effective_environment({}, {})
    for key in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "CUDA_CACHE_PATH"):
        assert environment[key].startswith(CACHE_MOUNT)
    assert environment["HOME"] == "/root"


def test_cache_folders_differ_by_image_and_machine() -> None:
    names = {cache_name(image, machine) for image in ("sha256:" + "a" * 64, "sha256:" + "b" * 64) for machine in ("aarch64", "x86_64")}
    assert len(names) == 4
    assert all(re.fullmatch(r"[ab]{12}-(aarch64|x86_64)", name) for name in names)


@pytest.mark.parametrize(
    ("environment", "secrets", "key", "value"),
    [
        ({"A": "1"}, {}, "A", "1"),
        ({"A": 5}, {}, "A", "5"),
        ({"A": None}, {}, "A", None),
        ({"HOME": None}, {}, "HOME", None),
        ({"TRITON_CACHE_DIR": "/root/.cache/own"}, {}, "TRITON_CACHE_DIR", "/root/.cache/own"),
        ({}, {"VLLM_API_KEY": "k"}, "VLLM_API_KEY", "k"),
        ({"A": "recipe"}, {"A": "secret"}, "A", "secret"),
        ({}, {"VLLM_API_KEY": ""}, "VLLM_API_KEY", None),
        ({}, {"VLLM_API_KEY": None}, "VLLM_API_KEY", None),
    ],
)
def test_each_variable_is_there_once(environment: dict[str, object], secrets: dict[str, object], key: str, value: str | None) -> None:
    merged = effective_environment(environment, secrets)
    assert merged.get(key) == value
    assert list(merged) == sorted(set(merged))


def test_what_is_shown_of_an_environment_has_no_value() -> None:
    environment = {"VLLM_API_KEY": "sk-secret", "A": "visible"}
    text = environment_summary(environment, environment_digest(environment, b"salt"))
    assert json.loads(text)["keys"] == ["A", "VLLM_API_KEY"]
    assert "sk-secret" not in text
    assert "visible" not in text


def test_a_digest_of_secrets_cannot_be_recomputed_without_the_salt() -> None:
    environment = {"VLLM_API_KEY": "1234"}
    assert environment_digest(environment, b"a") != environment_digest(environment, b"b")
    assert environment_digest(environment, b"a") == environment_digest(dict(environment), b"a")


@pytest.mark.parametrize(
    ("docker_args", "classes"),
    [
        ([], []),
        (["--device", "/dev/infiniband/uverbs0", "--cap-add=IPC_LOCK"], []),
        (["-v", "/srv/x:/x:ro"], []),
        (["--privileged"], ["owned_option"]),
        (["-e", "A=1", "-e", "A=2"], ["owned_option", "owned_option"]),
        (["--env=NCCL_IB_HCA=a"], ["owned_option"]),
        (["-eA=1"], ["owned_option"]),
        (["--name", "x"], ["owned_option"]),
        (["--restart=unless-stopped"], ["owned_option"]),
        (["-p", "8000:8000"], ["owned_option"]),
        (["--gpus", "all"], ["owned_option"]),
        (["--entrypoint=bash"], ["owned_option"]),
        (["--ulimit", "memlock=-1"], ["owned_option"]),
        (["--ulimit=memlock=-1"], ["owned_option"]),
        (["--ulimit", "stack=67108864"], []),
        (["--device /dev/x"], ["joined_words"]),
        (["--shm-size", "64gb"], ["shm_size_ignored"]),
        (["--ipc", "host", "--shm-size=4g"], ["shm_size_ignored"]),
        (["--ipc", "private"], ["shm_too_small"]),
        (["--ipc=private", "--shm-size", "64m"], ["shm_too_small"]),
        (["--ipc=private", "--shm-size=4g"], []),
        (["--ipc=private", "--shm-size=64gb"], ["shm_too_large"]),
        (["--ipc=private", "--shm-size=lots"], ["bad_shm_size"]),
    ],
)
def test_docker_args(docker_args: list[str], classes: list[str]) -> None:
    assert [p["class"] for p in docker_args_problems(docker_args)] == classes


@pytest.mark.parametrize(
    "docker_args",
    [["--env VLLM_API_KEY=hush"], ["--label key hush"], ["--env=VLLM_API_KEY=hush"], ["-eA=hush"], ["-e A=hush"], ["-e", "A=hush"]],
)
def test_what_an_option_holds_is_not_shown(docker_args: list[str]) -> None:
    (found,) = docker_args_problems(docker_args)
    assert "hush" not in str(found) and "vllm_service_docker_args holds -" in found["evidence"]


@pytest.mark.parametrize(
    ("text", "size"), [("64m", 64 << 20), ("4g", 4 << 30), ("64gb", 64 << 30), ("1.5GiB", 3 << 29), ("1024", 1024), ("x", None), ("", None)]
)
def test_sizes(text: str, size: int | None) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("change", "class_"),
    [
        ({"name": "a b"}, "bad_name"),
        ({"name": "../x"}, "bad_name"),
        ({"name": "x"}, "bad_name"),
        ({"paths": {"checkpoint": "models"}}, "bad_path"),
        ({"paths": {"checkpoint": "/a,readonly=false"}}, "bad_path"),
        ({"paths": {"checkpoint": '/a"b'}}, "bad_path"),
        ({"paths": {"checkpoint": "/a\nb"}}, "bad_path"),
        ({"environment": {"A B": "1"}}, "environment_name"),
        ({"environment": {"A": "1\n2"}}, "environment_value"),
        ({"environment": {"A": True}}, "environment_type"),
        ({"environment": {"A": {"b": 1}}}, "environment_type"),
        ({"environment": {"HF_TOKEN": "hf_x"}}, "environment_secret"),
        ({"secrets": {"VLLM_API_KEY": "a\nb"}}, "environment_value"),
        ({"memlock": "8 MB"}, "bad_memlock"),
        ({"memlock": "-1"}, "bad_memlock"),
        ({"docker_args": ["--rm"]}, "owned_option"),
    ],
)
def test_bad_settings(change: dict[str, object], class_: str) -> None:
    good: dict[str, object] = {
        "name": "qwen",
        "paths": {"checkpoint": "/a b/c"},
        "environment": {"A": "$x %y 'z'"},
        "secrets": {},
        "docker_args": [],
        "memlock": "unlimited",
    }
    assert settings_problems(**good) == []  # type: ignore[arg-type]
    found = settings_problems(**{**good, **change})  # type: ignore[arg-type]
    assert [p["class"] for p in found] == [class_]
    assert "hf_x" not in str(found)


@pytest.mark.parametrize("value", [None, [], {}, {"image_id": 5}, {"image_id": "vllm:latest"}, {"image_id": "sha256:12"}])
def test_only_an_image_id_is_one(value: object) -> None:
    assert image_of_manifest(value) == ""
    assert image_of_manifest({"image_id": IMAGE}) == IMAGE


@pytest.mark.parametrize(
    ("line", "class_"),
    [
        (
            "docker: Error response from daemon: OCI runtime create failed: error setting rlimit type 8: operation not permitted: unknown.",
            "memlock_not_permitted",
        ),
        ('docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].', "toolkit_not_configured"),
        (
            'docker: Error response from daemon: Conflict. The container name "/x" is already in use by container "1".',
            "container_name_taken",
        ),
        ("docker: Error response from daemon: No such image: sha256:12", "image_missing"),
        ("docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?", "docker_down"),
        (
            'docker: Error response from daemon: invalid mount config for type "bind": bind source path does not exist: /srv/m.',
            "mount_missing",
        ),
        ('docker: Error response from daemon: failed: exec: "vllm": executable file not found in $PATH: unknown.', "bad_entrypoint"),
        ("unknown flag: --devices", "bad_docker_option"),
        ("vllm: error: unrecognized arguments: --not-a-flag", "bad_argument"),
        ("OSError: [Errno 98] Address already in use", "port_in_use"),
        ("something nobody has seen", "start_failed"),
    ],
)
def test_a_failed_start_has_a_cause(line: str, class_: str) -> None:
    log = ["Starting qwen.service - vLLM instance qwen...", line, "qwen.service: Main process exited, code=exited, status=125/n/a"]
    found = start_failure(log, "failed/failed", "qwen")
    assert found[0]["class"] == class_
    assert found[0]["remedy"]


def test_a_silent_failure_names_the_state() -> None:
    (found,) = start_failure([], "failed/failed, result resources", "qwen-2")
    assert found["evidence"] == "failed/failed, result resources" and "journalctl -u qwen-2 " in found["remedy"]


def test_caches_are_below_one_mount() -> None:
    assert {value for key, value in CACHE_ENVIRONMENT.items() if not value.startswith(CACHE_MOUNT)} == {"/root"}
