#!/usr/bin/python
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_unit
short_description: Keeps a vLLM container running as a systemd service
description:
  - Writes the environment file (mode 0600) and the systemd unit of one vLLM instance, and starts, restarts or stops it.
  - The unit runs the container in the foreground, so that the whole log is in the journal, and removes it when it stops.
  - The container carries a digest of all that it was made from (image ID, arguments, environment, checkpoint, unit).
    It is restarted exactly when that digest differs from the wanted one, or when the service is not active.
  - The image is named by its ID, taken from the manifest that the image role writes last; never by a tag.
  - systemd is reloaded only while the container is stopped, as a reload takes the GPU away from a running one.
version_added: 0.1.0
author:
  - The dgxspark.vllm authors (@dgxspark)
attributes:
  check_mode:
    support: full
    description: Predicts the change without writing or restarting anything. What does not exist yet (image, checkpoint) is shown as such;
      a machine without systemd or docker is an error here too.
  diff_mode:
    support: full
    description: Shows the unit's text, and of the environment only the names and a digest.
options:
  name:
    description: Name of the unit (without C(.service)) and of the container.
    type: str
    required: true
  state:
    description: C(started) and C(stopped) write the files as well; C(absent) stops the service and removes its files.
    type: str
    choices: [started, stopped, absent]
    default: started
  enabled:
    description: Whether the service starts with the machine.
    type: bool
    default: true
  image_manifest:
    description: JSON file with the C(image_id) to run. Required unless O(state=absent).
    type: path
  checkpoint:
    description: Folder with the checkpoint, mounted read-only as C(/model). Required unless O(state=absent).
    type: path
  argv:
    description: Words after the image in C(docker run).
    type: list
    elements: str
    default: []
  environment:
    description: Environment of the container. The folders for kernel caches are always set.
    type: dict
    default: {}
  secrets:
    description: More environment, never shown. Empty ones are left out.
    type: dict
    default: {}
  docker_args:
    description: More words for C(docker run), before the image.
    type: list
    elements: str
    default: []
  memlock:
    description: Locked-memory limit of the container, C(unlimited) or bytes; empty for none, where the engine may not raise it.
    type: str
    default: unlimited
  gpus:
    description: Whether the container gets all GPUs.
    type: bool
    default: true
  cache_dir:
    description:
      - Folder under which each image gets a folder for its kernel caches, mounted as C(/root/.cache).
      - Required unless O(state=absent).
    type: path
  ready_timeout_s:
    description: The longest that a start may take. Bounds how often a service that dies while loading is started again.
    type: int
    default: 1800
  watch_s:
    description: How long a start is watched for immediate failures.
    type: float
    default: 3
  state_dir:
    description: Folder of this collection's files. The environment file and the previous unit are in its C(units) folder.
    type: path
    default: /var/lib/dgxspark-vllm
  unit_dir:
    description: Folder of systemd units.
    type: path
    default: /etc/systemd/system
"""

EXAMPLES = r"""
- name: Serve a checkpoint
  dgxspark.vllm.vllm_unit:
    name: dgxspark-vllm
    image_manifest: /var/lib/dgxspark-vllm/images/sm121.json
    checkpoint: /var/lib/dgxspark-vllm/checkpoints/org--model/0123456789ab
    cache_dir: /var/lib/dgxspark-vllm/cache
    argv: [serve, /model, --max-model-len, "262144", --speculative-config, '{"method":"mtp","num_speculative_tokens":2}']
    environment: {HF_HUB_OFFLINE: 1}
    secrets: {VLLM_API_KEY: "{{ vllm_api_key }}"}

- name: Take the service away
  dgxspark.vllm.vllm_unit:
    name: dgxspark-vllm
    state: absent
"""

RETURN = r"""
config:
  description: Digest of all that the container is made from, as in its label C(dgxspark.vllm.config).
  returned: unless absent
  type: str
container:
  description: ID, image ID and start of the running container; empty when none runs.
  returned: always
  type: dict
  sample: {id: 0123456789ab, image: "sha256:0123", started_at: "2026-01-31T12:00:00Z"}
image_id:
  description: The image that the unit runs; empty in check mode before it is built.
  returned: unless absent
  type: str
unit:
  description: Path of the unit file.
  returned: always
  type: str
environment_file:
  description: Path of the environment file.
  returned: always
  type: str
previous:
  description: Path of the unit that ran before, kept for a rollback (its environment is beside it); empty when there is none.
  returned: always
  type: str
actions:
  description: What was done to the service, or would be.
  returned: always
  type: list
  elements: str
  sample: [stop, reload, enable, start]
problems:
  description: Warnings, and on failure every reason with its evidence and remedy.
  returned: always
  type: list
  elements: dict
"""

import json
import os
import platform
import re
import secrets as random
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.changes import Changes
from ..module_utils.files import atomic_write, file_sha256, read_json
from ..module_utils.problems import Problem, describe, errors, problem
from ..module_utils.unit import (
    CONFIG_LABEL,
    MARK,
    NOT_BUILT,
    UnitSettings,
    cache_name,
    config_digest,
    effective_environment,
    environment_digest,
    environment_summary,
    hidden_environment,
    image_of_manifest,
    restart_limits,
    settings_problems,
    start_failure,
    unit_text,
    with_digest,
)
from ..module_utils.vllm_argv import docker_env_file

SNAPSHOT = ".dgxspark-snapshot.json"
HYBRID = ".dgxspark-hybrid.json"
INDEX = "model.safetensors.index.json"
SHOWN = "LoadState,ActiveState,SubState,Result,UnitFileState,FragmentPath,NeedDaemonReload,NRestarts,DropInPaths"
POLL_S = 0.25
SETTLE_S = 20.0
# How long the container may take to appear when a drop-in has changed what the unit starts.
OVERRIDDEN_S = 20.0
# What a dry run may come before.
NOT_YET = ("image_missing", "checkpoint_incomplete")


class Commands:
    """The two programs that are asked and told. Results are parsed here, decisions are made elsewhere."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.docker = shutil.which("docker") or "/usr/bin/docker"

    def run(self, *argv: str) -> tuple[int, str, str]:
        """Return code, output and error text; 127 when the program does not exist."""
        code, out, err = self.module.run_command(list(argv), handle_exceptions=False) if shutil.which(argv[0]) else (127, "", "not found")
        return code, out, err

    def service(self, name: str) -> dict[str, str]:
        """systemd's view of a unit; empty without systemd."""
        code, out, _err = self.run("systemctl", "show", f"{name}.service", f"--property={SHOWN}")
        return dict(line.split("=", 1) for line in out.splitlines() if "=" in line) if code == 0 else {}

    def systemctl(self, *words: str) -> None:
        """Tell systemd; its own words are the error."""
        code, out, err = self.run("systemctl", *words)
        if code:
            text = (err or out).strip()
            fail(
                self.module,
                [problem("systemd", f"systemctl {' '.join(words)}: {text}", "systemctl status; journalctl -xe")],
                "systemd refuses",
            )

    def inspect(self, kind: str, name: str) -> tuple[dict[str, Any], str]:
        """(what docker knows of a container or image, '') or ({}, why not)."""
        code, out, err = self.run(self.docker, kind, "inspect", name)
        if code == 0:
            found = json.loads(out)
            return (found[0], "") if found else ({}, "")
        return {}, "" if "no such" in err.lower() else (err.strip() or f"{self.docker}: return code {code}")

    def log(self, name: str, since: float) -> list[str]:
        """The journal's lines of a unit since a time."""
        self.run("journalctl", "--sync")
        _code, out, _err = self.run(
            "journalctl", "-u", f"{name}.service", f"--since=@{since:.3f}", "-o", "cat", "-n", "60", "--no-pager", "-q"
        )
        # `docker rm -f` before and after says so when there was nothing to remove.
        return [line for line in out.splitlines() if "No such container" not in line]


def fail(module: AnsibleModule, problems: list[Problem], headline: str, **more: Any) -> NoReturn:
    """End with every problem as one text."""
    module.fail_json(msg=describe(problems, headline), problems=problems, **more)
    raise AssertionError("unreachable")


@dataclass
class Paths:
    """Files of one instance."""

    unit: Path
    env: Path
    previous_unit: Path
    previous_env: Path
    salt: Path

    @classmethod
    def of(cls, name: str, unit_dir: str, state_dir: str) -> Paths:
        units = Path(state_dir) / "units"
        return cls(
            Path(unit_dir) / f"{name}.service",
            units / f"{name}.env",
            units / f"{name}.service.previous",
            units / f"{name}.env.previous",
            units / "salt",
        )


@dataclass
class Now:
    """What is there."""

    unit: str
    env: str
    service: dict[str, str]
    container: dict[str, Any]
    docker_error: str

    @property
    def active(self) -> bool:
        return self.service.get("ActiveState") in ("active", "reloading")

    @property
    def loop(self) -> bool:
        """The service died: systemd gave up, or waits to try again."""
        return self.service.get("ActiveState") in ("failed", "activating")

    @property
    def running(self) -> bool:
        return bool(self.container.get("State", {}).get("Running"))

    @property
    def config(self) -> str:
        return str((self.container.get("Config", {}).get("Labels") or {}).get(CONFIG_LABEL, ""))

    @property
    def enabled(self) -> bool:
        return self.service.get("UnitFileState") == "enabled"

    def words(self) -> str:
        """The service in one line, as the diff shows it."""
        if not self.unit:
            return "service: absent\n"
        state = "/".join(self.service.get(key, "") for key in ("ActiveState", "SubState"))
        config = f", configuration {self.config[:12]}" if self.running and self.active else ""
        return f"service: {state}{config}\n"


def overriding(service: dict[str, str]) -> list[str]:
    """Those of a unit's drop-ins that change what it starts."""
    found = []
    for path in service.get("DropInPaths", "").split():
        try:
            text = Path(path).read_text(errors="replace")
        except OSError:
            continue
        if re.search(r"^[ \t]*ExecStart[ \t]*=", text, re.MULTILINE):
            found.append(path)
    return found


def overridden(service: dict[str, str], name: str) -> list[Problem]:
    """What to say when no container of ours appears and drop-ins are why."""
    paths = overriding(service)
    if not paths:
        return []
    evidence = f"no container of {name}.service with this configuration appeared; its ExecStart is replaced by {', '.join(paths)}"
    remedy = f"take ExecStart out of it (vllm_service_docker_args adds options); journalctl -u {name} has the log"
    return [problem("unit_overridden", evidence, remedy)]


def look(commands: Commands, name: str, paths: Paths) -> Now:
    """Gather what is there, waiting out the second in which systemd starts or stops it."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        service = commands.service(name)
        container, error = commands.inspect("container", name)
        between = service.get("SubState") in ("start-pre", "start", "stop", "stop-sigterm", "stop-post")
        coming = not error and container.get("State", {}).get("Status", "created") == "created"
        between = between or (service.get("ActiveState") == "active" and coming and not overriding(service))
        if not between or time.monotonic() > deadline:
            return Now(_read(paths.unit), _read(paths.env), service, container, error)
        time.sleep(POLL_S)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def is_masked(now: Now, paths: Paths) -> bool:
    """Whether somebody has forbidden the unit, whether systemd has read that yet or not."""
    return now.service.get("LoadState") == "masked" or (paths.unit.is_symlink() and paths.unit.resolve() == Path("/dev/null"))


def conflicts(now: Now, name: str, paths: Paths) -> list[Problem]:
    """Units and containers of that name which are not ours: never overwritten, never removed."""
    found = []
    if is_masked(now, paths):
        evidence = f"{name}.service is masked: systemd is told never to start it"
        remedy = f"`systemctl unmask {name}.service` (with --runtime if it was masked so) if it may run, or set another vllm_name"
        found.append(problem("unit_masked", evidence, remedy))
    fragment = now.service.get("FragmentPath", "")
    foreign = str(paths.unit) if now.unit and not now.unit.startswith(MARK) else ""
    if fragment and fragment != str(paths.unit) and "transient" not in fragment:
        foreign = fragment
    if foreign and not found:
        found.append(problem("foreign_unit", f"{foreign} was not written by this collection", "set another vllm_name, or remove that unit"))
    if now.container and not now.config:
        found.append(
            problem(
                "name_conflict",
                f"container {now.container.get('Id', '')[:12]} ({now.container.get('Config', {}).get('Image')}) is called {name} too",
                f"`docker rm -f {name}` if it may go, or set another vllm_name",
            )
        )
    return found


def salt_of(path: Path, write: bool) -> bytes:
    """This node's salt for digests of environments; made on first use. A dry run shows a digest with a salt that nobody keeps."""
    text = _read(path)
    if not text:
        text = random.token_hex(32)
        if write:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic_write(path, text, 0o600)
    return text.encode()


def index_of(checkpoint: Path) -> str:
    """Digest of the checkpoint's index; '' for a checkpoint of a single file."""
    try:
        return file_sha256(checkpoint / INDEX)
    except OSError:
        return ""


def finished_checkpoint(folder: Path) -> str | None:
    """What stands for the files of a finished checkpoint: a snapshot's revision, or a digest of a hybrid's manifest; None for neither."""
    if isinstance(read_json(folder / HYBRID), dict):
        return f"hybrid-{file_sha256(folder / HYBRID)[:12]}"
    snapshot = read_json(folder / SNAPSHOT)
    return str(snapshot.get("revision", "")) if isinstance(snapshot, dict) else None


def missing_inputs(module: AnsibleModule, commands: Commands, now: Now, image_id: str, revision: str | None) -> list[Problem]:
    """Whether the image and the checkpoint are there, with the command that mends each."""
    p = module.params
    found = []
    if not now.service:
        found.append(problem("no_systemd", "systemctl does not answer", "run this on a machine that was booted with systemd"))
    if now.docker_error:
        found.append(problem("docker_unreachable", now.docker_error, "systemctl status docker"))
    if not image_id:
        what = "holds no image_id" if Path(p["image_manifest"]).exists() else "does not exist"
        found.append(problem("image_missing", f"{p['image_manifest']} {what}", "ansible-playbook dgxspark.vllm.image -l <this host>"))
    elif not now.docker_error and not commands.inspect("image", image_id)[0]:
        found.append(
            problem(
                "image_missing",
                f"{p['image_manifest']} names {image_id[:19]}, which docker does not have",
                "ansible-playbook dgxspark.vllm.image -l <this host>",
            )
        )
    if revision is None:
        found.append(
            problem(
                "checkpoint_incomplete",
                f"{p['checkpoint']} has neither {SNAPSHOT} nor {HYBRID}: it was not finished",
                "ansible-playbook dgxspark.vllm.checkpoint -l <this host>",
            )
        )
    return found


def allocator_problems(commands: Commands, environment: dict[str, str]) -> list[Problem]:
    """expandable_segments needs CAP_SYS_PTRACE, which a rootless engine cannot give."""
    setting = next(
        (k for k in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") if "expandable_segments:true" in environment.get(k, "").lower()), ""
    )
    if not setting:
        return []
    _code, out, _err = commands.run(commands.docker, "info", "--format", "{{json .SecurityOptions}}")
    if "rootless" not in out:
        return []
    return [
        problem("expandable_segments_rootless", f"{setting} asks for expandable_segments on a rootless engine", f"take it out of {setting}")
    ]


def watch_start(
    commands: Commands, name: str, config: str, watch_s: float, since: float
) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """Watch a service until its container has run for a while: (container, problems, log)."""
    deadline = time.monotonic() + max(120.0, watch_s)
    running_since = active_since = None
    while True:
        service = commands.service(name)
        state = f"{service.get('ActiveState')}/{service.get('SubState')}, result {service.get('Result')}"
        container, _error = commands.inspect("container", name)
        fine = Now("", "", service, container, "")
        if fine.active and fine.running and fine.config == config:
            running_since = running_since or time.monotonic()
            if time.monotonic() - running_since >= watch_s:
                return container, [], []
        elif service.get("SubState") in ("auto-restart", "auto-restart-queued", "failed", "dead") or time.monotonic() > deadline:
            log = commands.log(name, since)
            return container, overridden(service, name) + start_failure(log, state, name), log
        elif fine.active:
            active_since = active_since or time.monotonic()
            if time.monotonic() - active_since >= OVERRIDDEN_S and (found := overridden(service, name)):
                return container, found, commands.log(name, since)
        time.sleep(POLL_S)


def wanted_access(mode: int) -> str:
    """Owner, group and mode of a file of ours, in a word each."""
    return f"{os.geteuid()} {os.getegid()} {mode:04o}"


class Unit:
    """One run of the module."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p = module.params
        self.name: str = self.p["name"]
        self.check = bool(module.check_mode)
        self.commands = Commands(module)
        self.paths = Paths.of(self.name, self.p["unit_dir"], self.p["state_dir"])
        self.changes = Changes()
        self.actions: list[str] = []
        self.warnings: list[Problem] = []

    def do(self, action: str, *words: str) -> None:
        """Note an action on the service, and take it unless only checking."""
        self.actions.append(action)
        if not self.check:
            self.commands.systemctl(*words)

    def forget_failures(self) -> None:
        """Set the count of starts to zero, and a failed unit to inactive. An unknown unit has none."""
        if not self.check:
            self.commands.run("systemctl", "reset-failed", f"{self.name}.service")

    def finish(self, container: dict[str, Any], **more: Any) -> NoReturn:
        for warning in self.warnings:
            self.module.warn(f"{warning['class']}: {warning['evidence']}; {warning['remedy']}")
        running = container if container.get("State", {}).get("Running") else {}
        self.module.exit_json(
            container={"id": running["Id"][:12], "image": running["Image"], "started_at": running["State"].get("StartedAt", "")}
            if running
            else {},
            unit=str(self.paths.unit),
            environment_file=str(self.paths.env),
            previous=str(self.paths.previous_unit) if self.paths.previous_unit.exists() else "",
            actions=self.actions,
            problems=self.warnings,
            **more,
            **self.changes.result(),
        )
        raise AssertionError("unreachable")

    def remove(self, now: Now) -> NoReturn:
        """Stop, disable and remove; caches and checkpoints stay."""
        found = [p for p in conflicts(now, self.name, self.paths) if p["class"] in ("foreign_unit", "unit_masked")]
        if found:
            fail(self.module, found, f"{self.name}.service stays")
        ours = bool(now.config)
        files = [path for path in (self.paths.unit, self.paths.env, self.paths.previous_unit, self.paths.previous_env) if path.exists()]
        self.changes.add(f"{self.name}.service", now.unit, "")
        self.changes.add("files", "".join(f"{path}\n" for path in files), "")
        if now.unit or now.active or ours:
            self.changes.add("service", now.words(), "service: absent\n")
        if now.unit:
            self.do("stop", "stop", f"{self.name}.service")
            self.do("disable", "disable", "--no-reload", f"{self.name}.service")
        if ours and not self.check:
            self.commands.run(self.commands.docker, "rm", "-f", self.name)
        if not self.check:
            for path in files:
                path.unlink()
        if now.unit:
            self.do("reload", "daemon-reload")
            self.forget_failures()
        self.finish({})

    def settings(self, image_id: str, revision: str) -> tuple[UnitSettings, dict[str, str]]:
        """What the unit is rendered from."""
        p = self.p
        environment = effective_environment(p["environment"], p["secrets"])
        settings = UnitSettings(
            name=self.name,
            image_id=image_id or NOT_BUILT,
            argv=tuple(p["argv"]),
            checkpoint=p["checkpoint"],
            cache=str(Path(p["cache_dir"]) / cache_name(image_id, platform.machine())),
            env_file=str(self.paths.env),
            docker_args=tuple(p["docker_args"]),
            memlock=p["memlock"] or "",
            gpus=p["gpus"],
            docker=self.commands.docker,
            revision=revision,
            index_digest=index_of(Path(p["checkpoint"])),
            limits=restart_limits(p["ready_timeout_s"]),
        )
        return with_digest(settings, environment, salt_of(self.paths.salt, not self.check)), environment

    def present(self, now: Now) -> NoReturn:
        """Write what differs, then start, restart or stop."""
        p = self.p
        revision = finished_checkpoint(Path(p["checkpoint"]))
        image_id = image_of_manifest(read_json(Path(p["image_manifest"])))
        found = settings_problems(
            self.name,
            {"checkpoint": p["checkpoint"], "cache folder": p["cache_dir"], "state folder": p["state_dir"]},
            p["environment"],
            {key: "" if value is None else str(value) for key, value in p["secrets"].items()},
            p["docker_args"],
            p["memlock"] or "",
        )
        found += conflicts(now, self.name, self.paths)
        missing = missing_inputs(self.module, self.commands, now, image_id, revision)
        found += [flaw for flaw in missing if not (self.check and flaw["class"] in NOT_YET)]
        if any(flaw["class"].startswith("environment_") for flaw in found):
            # Ansible shows a module's arguments at higher verbosity.
            p["environment"] = hidden_environment(p["environment"])
        if any(flaw["class"] in ("owned_option", "joined_words") for flaw in found):
            p["docker_args"] = ["(not shown)"]
        if errors(found):
            fail(self.module, found, f"{self.name}.service cannot be set up; nothing was changed")
        settings, environment = self.settings(image_id, revision or "")
        found += allocator_problems(self.commands, environment)
        if errors(found):
            fail(self.module, found, f"{self.name}.service cannot be set up; nothing was changed")
        self.warnings = found
        self.converge(now, settings, environment, image_id, missing)

    def converge(self, now: Now, settings: UnitSettings, environment: dict[str, str], image_id: str, missing: list[Problem]) -> NoReturn:
        """The difference between what is and what shall be, and its removal."""
        text, config = unit_text(settings), config_digest(settings)
        env_text = docker_env_file(environment)
        wanted_text = text if image_id else f"# image: not built yet\n{text}"
        unit_differs = self.changes.add(f"{self.name}.service", now.unit, wanted_text)
        before_env = self._env_before(now)
        env_differs = self.changes.add("environment (names and digest)", before_env, environment_summary(environment, settings.env_digest))
        for path, mode in self._modes().items():
            if before := self._loose(path, mode):
                self.changes.add(f"{path}: owner, group, mode", f"{before}\n", f"{wanted_access(mode)}\n")
        started = self.p["state"] == "started"
        current = now.active and now.running and now.config == config
        goal = f"service: active/running, configuration {config[:12]}\n" if started else "service: inactive/dead\n"
        stop = (now.active or now.loop) and not (current and started)
        start = started and not current
        if start or (not started and now.service.get("ActiveState") not in ("inactive", None, "")) or not now.unit:
            self.changes.add("service", now.words(), goal)
        enable_differs = self.changes.add("enabled", f"{now.enabled}\n".lower(), f"{self.p['enabled']}\n".lower())

        if stop:
            self.do("stop", "stop", f"{self.name}.service")
            # Counts of earlier failures must not stop a start that changes something.
            self.forget_failures()
        self._keep_previous(now, unit_differs or env_differs)
        if not self.check:
            if unit_differs or env_differs:
                atomic_write(self.paths.env, env_text, 0o600)
            if unit_differs:
                atomic_write(self.paths.unit, text)
            self._tighten()
            Path(settings.cache).mkdir(parents=True, exist_ok=True)
        if enable_differs or (unit_differs and self.p["enabled"]):
            # --no-reload, as a reload would take the GPU from a running container; the next one reads the links.
            verb = "reenable" if self.p["enabled"] else "disable"
            self.do("enable" if self.p["enabled"] else "disable", verb, "--no-reload", f"{self.name}.service")
        if unit_differs or (start and now.service.get("NeedDaemonReload") == "yes"):
            self.do("reload", "daemon-reload")
        if not start:
            self.finish(now.container if current and started else {}, config=config, image_id=image_id)
        self._start(config, image_id, bool(missing))

    def _start(self, config: str, image_id: str, incomplete: bool) -> NoReturn:
        unit = f"{self.name}.service"
        if self.check:
            self.actions.append("start")
            self.finish({}, config="" if incomplete else config, image_id=image_id)
        since = time.time()
        self.forget_failures()
        self.actions.append("start")
        code, out, err = self.commands.run("systemctl", "start", unit)
        container, bad, log = watch_start(self.commands, self.name, config, self.p["watch_s"], since)
        if bad:
            if code and not log:
                bad[0]["evidence"] = (err or out).strip() or bad[0]["evidence"]
            fail(
                self.module,
                [*bad, *self.warnings],
                "\n".join([f"{unit} did not start. The end of its log:", *(f"  {line}" for line in log[-15:])]),
                log=log,
                **self.changes.result(),
            )
        self.finish(container, config=config, image_id=image_id)

    def _env_before(self, now: Now) -> str:
        """The environment file as it may be shown."""
        if not now.env:
            return ""
        keys = dict(line.split("=", 1) for line in now.env.splitlines() if "=" in line)
        return environment_summary(keys, environment_digest(keys, salt_of(self.paths.salt, False)))

    def _modes(self) -> dict[Path, int]:
        """Every file that this module writes, and the mode that it has."""
        paths = self.paths
        return {paths.unit: 0o644, paths.env: 0o600, paths.previous_unit: 0o644, paths.previous_env: 0o600, paths.salt: 0o600}

    def _loose(self, path: Path, mode: int) -> str:
        """Owner, group and mode of a file when they are not the wanted ones; a link, whose target is another's, is never wanted."""
        try:
            info = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        link = " (a link)" if stat.S_ISLNK(info.st_mode) else ""
        access = f"{info.st_uid} {info.st_gid} {stat.S_IMODE(info.st_mode):04o}{link}"
        return "" if access == wanted_access(mode) else access

    def _tighten(self) -> None:
        """Give each file its owner, group and mode, without a new time of change, which systemd would take for a new text."""
        for path, mode in self._modes().items():
            if not self._loose(path, mode):
                continue
            if not path.exists():
                path.unlink()  # a link to nothing
            elif path.is_symlink():
                atomic_write(path, path.read_bytes(), mode)
            if self._loose(path, mode):
                os.chown(path, os.geteuid(), os.getegid())
                path.chmod(mode)

    def _keep_previous(self, now: Now, differs: bool) -> None:
        """Keep what ran before. A unit that was failing is not worth a rollback, so it does not displace one that is."""
        if self.check or not differs or not now.unit or now.loop:
            return
        atomic_write(self.paths.previous_env, now.env, 0o600)
        atomic_write(self.paths.previous_unit, now.unit)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["started", "stopped", "absent"], "default": "started"},
            "enabled": {"type": "bool", "default": True},
            "image_manifest": {"type": "path"},
            "checkpoint": {"type": "path"},
            "argv": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "docker_args": {"type": "list", "elements": "str", "default": []},
            "memlock": {"type": "str", "default": "unlimited"},
            "gpus": {"type": "bool", "default": True},
            "cache_dir": {"type": "path"},
            "ready_timeout_s": {"type": "int", "default": 1800},
            "watch_s": {"type": "float", "default": 3},
            "state_dir": {"type": "path", "default": "/var/lib/dgxspark-vllm"},
            "unit_dir": {"type": "path", "default": "/etc/systemd/system"},
        },
        required_if=[
            (key, value, ("image_manifest", "checkpoint", "cache_dir")) for key, value in (("state", "started"), ("state", "stopped"))
        ],
        supports_check_mode=True,
    )
    run = Unit(module)
    try:
        now = look(run.commands, run.name, run.paths)
        if module.params["state"] == "absent":
            run.remove(now)
        run.present(now)
    except OSError as error:
        remedy = "set become: true" if isinstance(error, PermissionError) else "mend what the message says about this path"
        fail(module, [problem("file_access", str(error), remedy)], f"{run.name}.service cannot be set up", **run.changes.result())


if __name__ == "__main__":
    main()
