# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The systemd unit that owns a vLLM container: its text, its limits, and what may go into it. Pure: no file is read here."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .log_classifier import as_problems, diagnose
from .problems import Problem, problem
from .vllm_argv import ArgumentError, check_environment, docker_env_file, plain, shown_name, systemd_exec

CONFIG_LABEL = "dgxspark.vllm.config"
HEADER = "# Written by dgxspark.vllm. Own settings belong into {name}.service.d/*.conf"
MARK = "# Written by dgxspark.vllm."
MODEL_MOUNT = "/model"
CACHE_MOUNT = "/root/.cache"
NOT_BUILT = "not-built-yet"

# Everything that compiles at run time writes below one mount, so that a restart finds it again and no user's HOME matters.
CACHE_ENVIRONMENT = {
    "HOME": "/root",
    "XDG_CACHE_HOME": CACHE_MOUNT,
    "CUDA_CACHE_PATH": f"{CACHE_MOUNT}/nv",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_MOUNT}/torchinductor",
    "TRITON_CACHE_DIR": f"{CACHE_MOUNT}/triton",
    "VLLM_CACHE_ROOT": f"{CACHE_MOUNT}/vllm",
}

STOP_GRACE_S = 10
STOP_TIMEOUT_S = 45
RESTART_S = 10
BURST = 3

# docker options that the unit sets itself; a second one would win or contradict without a word.
_OWNED = {
    "--name": "set vllm_name",
    "--rm": "leave it out: the unit always removes its container",
    "--init": "leave it out: the unit always sets it",
    "--detach": "leave it out: the unit runs the container in the foreground, so that its log is in the journal",
    "-d": "leave it out: the unit runs the container in the foreground, so that its log is in the journal",
    "--restart": "leave it out: systemd restarts the service, and bounded",
    "--network": "leave it out: the container uses the host's network",
    "--net": "leave it out: the container uses the host's network",
    "--publish": "set vllm_host and vllm_port: the container uses the host's network",
    "-p": "set vllm_host and vllm_port: the container uses the host's network",
    "--env": "set vllm_service_environment",
    "-e": "set vllm_service_environment",
    "--env-file": "set vllm_service_environment",
    "--gpus": "set vllm_service_gpus",
    "--pull": "leave it out: the image is pinned by its ID",
    "--entrypoint": "choose an image whose entrypoint is vllm: other entrypoints do set-up work that would be lost",
    "--log-driver": "leave it out: the log is in the journal",
    "--privileged": "pass what is needed by name: --device, --cap-add",
}

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{1,99}")
_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True)
class RestartLimits:
    """How systemd restarts a service that ends, in seconds."""

    restart_s: int
    burst: int
    interval_s: int


@dataclass(frozen=True)
class UnitSettings:
    """All that the unit's text depends on. image_id: `sha256:...`; memlock: 'unlimited', bytes, or '' for no ulimit."""

    name: str
    image_id: str
    argv: tuple[str, ...]
    checkpoint: str
    cache: str
    env_file: str
    docker_args: tuple[str, ...] = ()
    memlock: str = "unlimited"
    gpus: bool = True
    docker: str = "/usr/bin/docker"
    revision: str = ""
    index_digest: str = ""
    env_digest: str = ""
    limits: RestartLimits = RestartLimits(10, 3, 6720)


def restart_limits(worst_crash_s: int, restart_s: int = RESTART_S, burst: int = BURST) -> RestartLimits:
    """Limits that stop a crash loop: every crashed vLLM may leave unified memory behind, and it exits 0 when it fails.

    worst_crash_s: the longest that a start may take before it dies. The interval is a fifth longer than needed, in whole minutes.
    """
    needed = (restart_s + worst_crash_s + STOP_TIMEOUT_S) * burst
    return RestartLimits(restart_s, burst, (needed * 12 // 600 + 1) * 60)


def cache_name(image_id: str, machine: str) -> str:
    """Folder for kernels compiled by one image on one architecture: another image's kernels may load and compute garbage."""
    return f"{short_id(image_id)}-{machine}"


def short_id(image_id: str) -> str:
    """The first twelve hexadecimal digits of an image ID, as docker shows them."""
    return image_id.removeprefix("sha256:")[:12] or NOT_BUILT


def effective_environment(environment: Mapping[str, Any], secrets: Mapping[str, Any]) -> dict[str, str]:
    """Every variable once: caches, then the recipe's and the user's (null takes one out), then secrets; empty secrets are left out."""
    given, _problems = check_environment(environment, "environment")
    merged: dict[str, str | None] = {**CACHE_ENVIRONMENT, **given}
    merged.update({str(key): str(value) for key, value in plain(secrets).items() if value not in (None, "")})
    return {key: value for key, value in sorted(merged.items()) if value is not None}


def hidden_environment(environment: Mapping[str, Any]) -> dict[str, str]:
    """An environment that holds what it should not, as a result may show it: names without what follows a `=`, and no value."""
    return {shown_name(name): "(not shown)" for name in environment}


def environment_digest(environment: Mapping[str, str], salt: bytes) -> str:
    """Digest of the whole environment. Salted per node, since the unit's text is public and a short key could be guessed from it."""
    return hmac.new(salt, docker_env_file(environment).encode(), hashlib.sha256).hexdigest()


def config_digest(settings: UnitSettings) -> str:
    """Digest of everything that a running container was made from: the unit's text holds all of it, digests of files included."""
    return hashlib.sha256(render(settings, "").encode()).hexdigest()


def unit_text(settings: UnitSettings) -> str:
    """The unit file, with its own digest as the container's label."""
    return render(settings, config_digest(settings))


def docker_command(settings: UnitSettings, digest: str) -> list[list[str]]:
    """`docker run` and its arguments, one list per line of the unit file."""
    lines: list[list[str]] = [
        [settings.docker, "run"],
        ["--rm", "--init", "--pull", "never"],
        ["--name", settings.name],
        ["--label", f"{CONFIG_LABEL}={digest}"],
        ["--label", f"dgxspark.vllm.revision={settings.revision}"],
        ["--network", "host"],
    ]
    if not _has_option(settings.docker_args, "--ipc"):
        lines.append(["--ipc", "host"])
    # The journal has the whole log; `docker logs` keeps a bounded copy.
    lines.append(["--log-driver", "local", "--log-opt", "max-size=20m", "--log-opt", "max-file=3"])
    if settings.memlock:
        limit = "-1" if settings.memlock == "unlimited" else settings.memlock
        lines.append(["--ulimit", f"memlock={limit}:{limit}"])
    if settings.gpus:
        lines.append(["--gpus", "all"])
    lines += [
        ["--env-file", settings.env_file],
        # --mount, as -v would make an absent folder, and an empty model of it.
        ["--mount", f"type=bind,source={settings.checkpoint},target={MODEL_MOUNT},readonly"],
        ["--mount", f"type=bind,source={settings.cache},target={CACHE_MOUNT}"],
    ]
    lines += [list(words) for words in option_groups(settings.docker_args)]
    lines.append([settings.image_id])
    lines += [list(words) for words in option_groups(settings.argv)]
    return lines


def option_groups(words: Sequence[str]) -> list[list[str]]:
    """Words cut before each option, so that an option and its values share a line."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or re.match(r"--?[A-Za-z]", word):
            groups.append([])
        groups[-1].append(word)
    return groups


def render(settings: UnitSettings, digest: str) -> str:
    """The unit's text for a given label value."""
    docker = settings.docker
    first, *rest = docker_command(settings, digest)
    # Each line is quoted as a command of its own, whose program is then cut off.
    run = " \\\n    ".join([systemd_exec(first), *(systemd_exec([docker, *words]).removeprefix(f"{docker} ") for words in rest)])
    limits = settings.limits
    return "\n".join(
        [
            HEADER.format(name=settings.name),
            f"# checkpoint index sha256 {settings.index_digest or 'none'}",
            f"# environment digest {settings.env_digest or 'none'}",
            "[Unit]",
            f"Description=vLLM instance {settings.name}",
            "Wants=network-online.target",
            "After=network-online.target docker.service",
            "Requires=docker.service",
            f"RequiresMountsFor={_path_word(settings.checkpoint)} {_path_word(settings.cache)}",
            f"StartLimitBurst={limits.burst}",
            f"StartLimitIntervalSec={limits.interval_s}",
            "",
            "[Service]",
            "Type=exec",
            "Environment=HOME=/root",
            f"ExecStartPre=-{docker} rm -f {settings.name}",
            f"ExecStart={run}",
            f"ExecStop=-{docker} stop -t {STOP_GRACE_S} {settings.name}",
            f"ExecStopPost=-{docker} rm -f {settings.name}",
            "TimeoutStartSec=infinity",
            f"TimeoutStopSec={STOP_TIMEOUT_S}",
            "# vLLM exits 0 when its engine dies, and 143 or 137 when it is stopped.",
            "Restart=always",
            f"RestartSec={limits.restart_s}",
            "SuccessExitStatus=143 137",
            "SyslogIdentifier=%N",
            "LogRateLimitIntervalSec=0",
            "",
            "[Install]",
            "# docker.service too: stopping and starting it, as an upgrade does, brings the service back.",
            "WantedBy=multi-user.target docker.service",
            "",
        ]
    )


def _path_word(path: str) -> str:
    # Here systemd expands % but not $.
    text = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'


def settings_problems(
    name: str,
    paths: Mapping[str, str],
    environment: Mapping[str, Any],
    secrets: Mapping[str, Any],
    docker_args: Sequence[str],
    memlock: str,
) -> list[Problem]:
    """What must not go into the unit. paths: what each is for -> absolute path."""
    found: list[Problem] = []
    if not _NAME.fullmatch(name):
        found.append(
            problem("bad_name", f"vllm_name is {name!r}", "use letters, digits, '_', '.' and '-' only: it names a container and a unit")
        )
    for what, path in paths.items():
        if not path.startswith("/") or re.search(r'[,"\x00-\x1f\x7f]', path):
            found.append(
                problem("bad_path", f"the {what} is {path!r}", "give an absolute path without commas, quotes and control characters")
            )
    found += check_environment(environment, "vllm_service_environment")[1]
    try:
        docker_env_file(plain(dict(secrets)), "secrets")
    except ArgumentError as error:
        found += error.problems
    if memlock and memlock != "unlimited" and not re.fullmatch(r"[1-9][0-9]*", memlock):
        found.append(
            problem(
                "bad_memlock",
                f"vllm_service_memlock is {memlock!r}",
                "set it to unlimited, to a number of bytes, or to '' where the engine may not raise it",
            )
        )
    return found + docker_args_problems(docker_args)


def docker_args_problems(docker_args: Sequence[str]) -> list[Problem]:
    """Options in vllm_service_docker_args that contradict the unit, and shared memory that cannot work or costs the model's memory."""
    found = []
    for word in docker_args:
        option = word.partition("=")[0]
        if word.startswith("-") and not word.startswith("--"):
            option = word[:2]  # -eKEY=VALUE
        if option in _OWNED:
            found.append(problem("owned_option", f"vllm_service_docker_args holds {option}", _OWNED[option]))
        elif option.startswith("-") and re.search(r"\s", option):
            found.append(
                # What follows the option may be a secret.
                problem(
                    "joined_words",
                    f"vllm_service_docker_args holds {option.split()[0]} and more in one item of {len(word)} characters",
                    f"make it {len(word.split())} items of the list",
                )
            )
    for option, value in _option_values(docker_args):
        if option == "--ulimit" and value.startswith("memlock"):
            found.append(problem("owned_option", f"vllm_service_docker_args holds --ulimit {value}", "set vllm_service_memlock"))
    return found + shared_memory_problems(docker_args)


def shared_memory_problems(docker_args: Sequence[str]) -> list[Problem]:
    """vLLM's processes share tensors through /dev/shm: 64 MB, docker's default, kills it; a large one is taken from unified memory."""
    given = dict(_option_values(docker_args))
    ipc, size = given.get("--ipc", "host"), given.get("--shm-size", "")
    amount = size_bytes(size) if size else None
    if size and amount is None:
        return [problem("bad_shm_size", f"--shm-size {size}", "give a size such as 4g")]
    if ipc == "host":
        if size:
            return [
                problem("shm_size_ignored", f"--shm-size {size} has no effect with --ipc host", "leave --shm-size out", severity="warning")
            ]
        return []
    if amount is None or amount < 1 << 30:
        return [
            problem(
                "shm_too_small",
                f"/dev/shm would be {size or '64m'} with --ipc {ipc}",
                "leave --ipc out (the host's is used), or add --shm-size 4g to vllm_service_docker_args",
            )
        ]
    if amount > 16 << 30:
        return [
            problem(
                "shm_too_large",
                f"--shm-size {size} is taken from the memory that the model and its KV cache share",
                "4g is enough for two ranks",
                severity="warning",
            )
        ]
    return []


def size_bytes(text: str) -> int | None:
    """Bytes of a docker size such as `64m`, `4g` or `64gb`; None for nonsense."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    return int(float(match[1]) * _SIZES[match[2]]) if match else None


def _option_values(words: Sequence[str]) -> list[tuple[str, str]]:
    """(option, value) of `--option=value` and `--option value` alike."""
    joined = [(option, value) for option, equals, value in (word.partition("=") for word in words) if equals and option.startswith("--")]
    return joined + [(a, b) for a, b in pairwise(words) if a.startswith("--") and "=" not in a and not b.startswith("-")]


def _has_option(words: Sequence[str], option: str) -> bool:
    return any(word == option or word.startswith(option + "=") for word in words)


# What docker says of a unit that does not fit its node; the log classifier knows the rest: (pattern, class, remedy).
_START_FAILURES: list[tuple[str, str, str]] = [
    (r"bind source path does not exist|invalid mount config", "mount_missing", "ansible-playbook dgxspark.vllm.checkpoint -l <this host>"),
    (
        r"executable file not found|exec: .*: no such file or directory",
        "bad_entrypoint",
        "the image does not start vLLM: choose or build one whose entrypoint is vllm",
    ),
    (r"unknown flag: |unknown shorthand flag: |invalid argument .* for ", "bad_docker_option", "mend vllm_service_docker_args"),
]


def start_failure(log: Sequence[str], state: str, name: str) -> list[Problem]:
    """Why the service `name` did not start, from its log. state: systemd's words, used when the log says nothing."""
    for pattern, class_, remedy in _START_FAILURES:
        for line in log:
            if re.search(pattern, line):
                return [problem(class_, line.strip(), remedy)]
    found = as_problems(diagnose("\n".join(log)))
    return found or [
        problem("start_failed", " | ".join(line.strip() for line in log[-3:]) or state, f"journalctl -u {name} has the whole log")
    ]


def image_of_manifest(value: Any) -> str:
    """The image ID in an image manifest's JSON value; '' when it holds none."""
    image = value.get("image_id") if isinstance(value, dict) else None
    return image if isinstance(image, str) and re.fullmatch(r"sha256:[0-9a-f]{64}", image) else ""


def environment_summary(environment: Mapping[str, str], digest: str) -> str:
    """The environment as it may be shown: names and one digest, never a value."""
    return json.dumps({"keys": sorted(environment), "digest": digest[:16]}, indent=1) + "\n"


def with_digest(settings: UnitSettings, environment: Mapping[str, str], salt: bytes) -> UnitSettings:
    """Settings that know their environment."""
    return replace(settings, env_digest=environment_digest(environment, salt))
