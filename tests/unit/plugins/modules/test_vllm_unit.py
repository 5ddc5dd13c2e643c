# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.modules import vllm_unit

IMAGE = "sha256:" + "ab" * 32
OTHER_IMAGE = "sha256:" + "cd" * 32
SECRET = "sk-very-secret-1234"

Runner = Callable[..., dict[str, Any]]


class Node:
    """A machine with systemd and docker, as far as the module can tell. What must never happen is asserted here."""

    def __init__(self, root: Path) -> None:
        self.unit = root / "etc" / "qwen.service"
        self.images = {IMAGE, OTHER_IMAGE}
        self.loaded = ""
        self.enabled = False
        self.active = "inactive"
        self.sub = "dead"
        self.fragment = ""
        self.container: dict[str, Any] = {}
        self.count = 0
        self.log: list[str] = []
        self.dies_with = ""
        self.docker_down = False
        self.security = "[]"
        self.told: list[str] = []
        self.masked = False
        self.systemd_down = False
        self.drop_ins = ""

    def run(self, *argv: str) -> tuple[int, str, str]:
        program, *words = argv
        name = Path(program).name
        return {"systemctl": self.systemctl, "docker": self.docker, "journalctl": self.journalctl}[name](words)

    def journalctl(self, words: list[str]) -> tuple[int, str, str]:
        return 0, "".join(f"{line}\n" for line in self.log), ""

    def docker(self, words: list[str]) -> tuple[int, str, str]:
        if self.docker_down:
            return 1, "", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
        match words:
            case ["container", "inspect", _]:
                return (0, json.dumps([self.container]), "") if self.container else (1, "[]", "Error: No such container: qwen")
            case ["image", "inspect", image]:
                return (0, json.dumps([{"Id": image}]), "") if image in self.images else (1, "[]", f"Error: No such image: {image}")
            case ["rm", "-f", _]:
                self.container = {}
                return 0, "", ""
            case ["info", *_]:
                return 0, self.security, ""
        raise AssertionError(words)

    def systemctl(self, words: list[str]) -> tuple[int, str, str]:
        verb = words[0]
        if verb != "show":
            self.told.append(verb)
        if verb == "show" and self.systemd_down:
            return 1, "", "System has not been booted with systemd as init system"
        if verb == "show":
            state = {
                "DropInPaths": self.drop_ins,
                "LoadState": "masked" if self.masked else "loaded" if self.unit.exists() else "not-found",
                "ActiveState": self.active,
                "SubState": self.sub,
                "Result": "success",
                "UnitFileState": "enabled" if self.enabled else "disabled" if self.unit.exists() else "",
                "FragmentPath": self.fragment or (str(self.unit) if self.unit.exists() else ""),
                "NeedDaemonReload": "yes" if self.unit.exists() and self.unit.read_text() != self.loaded else "no",
                "NRestarts": "0",
            }
            return 0, "".join(f"{k}={v}\n" for k, v in state.items()), ""
        if verb == "daemon-reload":
            assert not self.container, "a reload takes the GPU from a running container"
            self.loaded = self.unit.read_text() if self.unit.exists() else ""
        elif verb in ("reenable", "disable"):
            assert "--no-reload" in words
            self.enabled = verb == "reenable"
        elif verb == "stop":
            self.active, self.sub, self.container = "inactive", "dead", {}
        elif verb == "start":
            assert self.loaded == self.unit.read_text(), "systemd must have read the unit that it starts"
            assert self.active != "failed", "the start limit would refuse this"
            self.start()
        elif verb == "reset-failed":
            self.active, self.sub = ("inactive", "dead") if self.active == "failed" else (self.active, self.sub)
        else:
            raise AssertionError(words)
        return 0, "", ""

    def start(self) -> None:
        if self.dies_with:
            self.active, self.sub, self.log = "activating", "auto-restart", [self.dies_with]
            return
        if self.drop_ins and re.search(r"^\s*ExecStart *=", Path(self.drop_ins).read_text(), re.MULTILINE):
            self.active, self.sub = "active", "running"
            return
        self.count += 1
        label = re.search(r"dgxspark\.vllm\.config=(\w+)", self.loaded)
        image = re.search(r"^\s+(sha256:\w+)", self.loaded, re.M)
        assert label and image
        self.active, self.sub = "active", "running"
        self.container = {
            "Id": f"{self.count:064d}",
            "Image": image[1],
            "State": {"Running": True, "Status": "running", "StartedAt": "2026-01-31T12:00:00Z"},
            "Config": {"Labels": {"dgxspark.vllm.config": label[1]}, "Image": image[1]},
        }


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(tmp_path)
    monkeypatch.setattr(vllm_unit.Commands, "run", lambda _self, *argv: made.run(*argv))
    monkeypatch.setattr(vllm_unit, "POLL_S", 0.001)
    monkeypatch.setattr(vllm_unit, "SETTLE_S", 0.01)
    (tmp_path / "image.json").write_text(json.dumps({"image_id": IMAGE}))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".dgxspark-snapshot.json").write_text('{"revision": "0123"}')
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    return made


@pytest.fixture
def apply(node: Node, tmp_path: Path, run_module: Runner) -> Runner:
    def run(check: bool = False, **change: Any) -> dict[str, Any]:
        args = {
            "name": "qwen",
            "image_manifest": str(tmp_path / "image.json"),
            "checkpoint": str(tmp_path / "model"),
            "cache_dir": str(tmp_path / "cache"),
            "state_dir": str(tmp_path / "state"),
            "unit_dir": str(tmp_path / "etc"),
            "argv": ["serve", "/model"],
            "environment": {"A": "visible", "N": 5},
            "secrets": {"VLLM_API_KEY": SECRET},
            "memlock": "",
            "gpus": False,
            "watch_s": 0,
        }
        node.told = []
        result = run_module(vllm_unit.main, {**args, **change}, check=check)
        assert SECRET not in json.dumps({k: v for k, v in result.items() if k != "invocation"})
        return result

    return run


def tree(root: Path) -> dict[str, tuple[str, int, int]]:
    """Every file below a folder with its text, mode and change time."""
    return {str(p): (p.read_text(), p.stat().st_mode, p.stat().st_mtime_ns) for p in sorted(root.rglob("*")) if p.is_file()}


def test_first_second_third(apply: Runner, node: Node, tmp_path: Path) -> None:
    before = tree(tmp_path)
    dry = apply(check=True)
    assert dry["changed"] and dry["actions"] == ["enable", "reload", "start"]
    assert tree(tmp_path) == before and node.told == []

    first = apply()
    assert first["changed"] and first["actions"] == ["enable", "reload", "start"]
    assert node.active == "active" and node.enabled
    assert first["container"]["image"] == IMAGE and first["image_id"] == IMAGE
    env = Path(first["environment_file"])
    assert env.stat().st_mode & 0o777 == 0o600 and env.parent.stat().st_mode & 0o777 == 0o700
    assert f"VLLM_API_KEY={SECRET}\n" in env.read_text() and "TRITON_CACHE_DIR=" in env.read_text()
    assert SECRET not in node.unit.read_text()
    assert (tmp_path / "cache").is_dir()

    after = tree(tmp_path)
    for check in (True, False):
        again = apply(check=check)
        assert not again["changed"] and again["diff"] == [] and again["actions"] == []
        assert again["container"]["id"] == first["container"]["id"]
    assert tree(tmp_path) == after and node.told == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"environment": {"A": "other"}}, "environment"),
        ({"secrets": {"VLLM_API_KEY": SECRET + "5"}}, "environment"),
        ({"argv": ["serve", "/model", "--port", "1"]}, "qwen.service"),
        ({"memlock": "unlimited"}, "qwen.service"),
        ({"gpus": True}, "qwen.service"),
        ({"docker_args": ["--cap-add", "IPC_LOCK"]}, "qwen.service"),
        ({"ready_timeout_s": 60}, "qwen.service"),
    ],
)
def test_a_change_restarts_once(apply: Runner, node: Node, change: dict[str, Any], shown: str) -> None:
    first = apply()
    dry = apply(check=True, **change)
    assert dry["actions"] == ["stop", "enable", "reload", "start"] and node.count == 1
    second = apply(**change)
    assert second["actions"] == dry["actions"] and second["diff"] == dry["diff"]
    assert second["config"] != first["config"]
    assert any(entry["after_header"].startswith(shown) for entry in second["diff"])
    assert node.count == 2
    assert not apply(**change)["changed"] and node.count == 2


def test_a_new_image_gets_a_new_cache(apply: Runner, node: Node, tmp_path: Path) -> None:
    apply()
    (tmp_path / "image.json").write_text(json.dumps({"image_id": OTHER_IMAGE}))
    assert apply()["changed"]
    assert node.container["Image"] == OTHER_IMAGE
    assert {p.name[:12] for p in (tmp_path / "cache").iterdir()} == {"ab" * 6, "cd" * 6}


@pytest.mark.parametrize(
    ("file", "text"), [(".dgxspark-snapshot.json", '{"revision": "4567"}'), ("model.safetensors.index.json", '{"a": 1}')]
)
def test_a_new_checkpoint_in_the_same_folder_restarts(apply: Runner, node: Node, tmp_path: Path, file: str, text: str) -> None:
    apply()
    (tmp_path / "model" / file).write_text(text)
    assert apply()["changed"] and node.count == 2


def test_a_finished_hybrid_is_a_checkpoint(apply: Runner, node: Node, tmp_path: Path) -> None:
    (tmp_path / "model" / ".dgxspark-snapshot.json").unlink()
    (tmp_path / "model" / ".dgxspark-hybrid.json").write_text('{"mode": "overlay"}')
    assert apply()["changed"]
    assert not apply()["changed"]
    (tmp_path / "model" / ".dgxspark-hybrid.json").write_text('{"mode": "materialize"}')
    assert apply()["changed"] and node.count == 2


def test_a_checkpoint_without_index_is_fine(apply: Runner, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors.index.json").unlink()
    assert apply()["changed"]
    assert not apply()["changed"]


@pytest.mark.parametrize(("active", "sub"), [("inactive", "dead"), ("failed", "failed"), ("activating", "auto-restart")])
def test_a_service_that_is_down_is_started_without_touching_files(apply: Runner, node: Node, tmp_path: Path, active: str, sub: str) -> None:
    apply()
    node.active, node.sub, node.container = active, sub, {}
    files = tree(tmp_path)
    result = apply()
    assert result["changed"] and result["actions"][-1] == "start" and "reload" not in result["actions"]
    assert [entry["before_header"] for entry in result["diff"]] == ["service"]
    assert f"{active}/{sub}" in result["diff"][0]["before"]
    assert tree(tmp_path) == files and node.count == 2


def test_an_interrupted_run_is_finished(apply: Runner, node: Node, tmp_path: Path) -> None:
    """Files written, systemd not told: the container that runs is still the old one."""
    apply()
    old = node.container
    apply(argv=["serve", "/model", "--x"])
    node.container, node.loaded = old, "older text"
    result = apply(argv=["serve", "/model", "--x"])
    assert result["actions"] == ["stop", "reload", "start"]
    assert node.container["Config"]["Labels"]["dgxspark.vllm.config"] == result["config"]


def test_enabling_does_not_disturb_a_running_service(apply: Runner, node: Node) -> None:
    first = apply(enabled=False)
    assert not node.enabled
    result = apply(enabled=True)
    assert result["changed"] and result["actions"] == ["enable"] and node.enabled
    assert result["container"] == first["container"]
    assert apply(enabled=False)["actions"] == ["disable"] and not node.enabled


def test_the_mode_of_the_environment_file_is_mended(apply: Runner, node: Node, tmp_path: Path) -> None:
    path = Path(apply()["environment_file"])
    path.chmod(0o644)
    result = apply()
    assert result["changed"] and result["actions"] == [] and path.stat().st_mode & 0o777 == 0o600
    assert node.count == 1


@pytest.mark.parametrize("spoil", ["mode", "strict", "owner", "group", "link"])
@pytest.mark.parametrize(
    "file", ["etc/qwen.service", *(f"state/units/{n}" for n in ("qwen.env", "qwen.service.previous", "qwen.env.previous", "salt"))]
)
def test_access_to_every_written_file_is_mended(apply: Runner, node: Node, tmp_path: Path, file: str, spoil: str) -> None:
    apply()
    apply(environment={"A": "new"})
    path = tmp_path / file
    before, count = path.lstat(), node.count
    if spoil == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif spoil in ("owner", "group"):
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(path, *((12345, -1) if spoil == "owner" else (-1, 12345)))
    else:
        path.chmod(0o666 if spoil == "mode" else 0o400)

    def access() -> tuple[int, ...]:
        info = path.lstat()
        return info.st_uid, info.st_gid, info.st_mode

    spoiled = access()
    dry = apply(check=True, environment={"A": "new"})
    assert dry["changed"] and access() == spoiled
    result = apply(environment={"A": "new"})
    assert result["changed"] and result["actions"] == [] and result["diff"] == dry["diff"] and node.count == count
    assert access() == (before.st_uid, before.st_gid, before.st_mode)
    assert spoil == "link" or path.stat().st_mtime_ns == before.st_mtime_ns, "systemd would take it for another text"
    assert not apply(environment={"A": "new"})["changed"]


def test_a_link_to_nothing_is_taken_away(apply: Runner, tmp_path: Path) -> None:
    apply()
    path = tmp_path / "state" / "units" / "qwen.env.previous"
    path.symlink_to(tmp_path / "nowhere")
    assert apply()["changed"] and not path.is_symlink()
    assert not apply()["changed"]


def test_a_container_that_is_just_being_made_is_waited_for(apply: Runner, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    apply()
    monkeypatch.setattr(vllm_unit, "SETTLE_S", 5)
    real, looks = node.docker, []

    def slow(words: list[str]) -> tuple[int, str, str]:
        if words[0] == "container":
            looks.append(words)
            if len(looks) == 1:
                return 1, "[]", "Error: No such container: qwen"
            if len(looks) == 2:
                return 0, json.dumps([{**node.container, "State": {"Running": False, "Status": "created"}}]), ""
        return real(words)

    monkeypatch.setattr(node, "docker", slow)
    assert not apply()["changed"] and len(looks) == 3


def test_a_state_folder_that_cannot_be_written(apply: Runner, node: Node, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    result = apply()
    assert result["failed"] and [p["class"] for p in result["problems"]] == ["file_access"]
    assert node.told == [] and not node.unit.exists()


def test_stopped(apply: Runner, node: Node) -> None:
    apply()
    result = apply(state="stopped")
    assert result["changed"] and result["actions"] == ["stop"] and result["container"] == {}
    assert node.active == "inactive" and node.unit.exists()
    assert not apply(state="stopped")["changed"]
    node.active, node.sub = "failed", "failed"
    assert apply(state="stopped")["changed"] and node.active == "inactive"
    assert apply()["actions"] == ["start"]


def test_absent(apply: Runner, node: Node, tmp_path: Path) -> None:
    apply()
    apply(argv=["serve", "/model", "--x"])
    dry = apply(check=True, state="absent")
    assert dry["changed"] and node.unit.exists()
    result = apply(state="absent")
    assert result["actions"] == dry["actions"] == ["stop", "disable", "reload"]
    assert not node.unit.exists() and not node.container and not node.enabled
    assert {p.name for p in (tmp_path / "state" / "units").iterdir()} == {"salt"}
    assert (tmp_path / "cache").is_dir() and (tmp_path / "model").is_dir()
    assert not apply(state="absent")["changed"]


def test_absent_needs_neither_image_nor_checkpoint(node: Node, tmp_path: Path, run_module: Runner) -> None:
    dirs = {"state_dir": str(tmp_path / "state"), "unit_dir": str(tmp_path / "etc")}
    assert not run_module(vllm_unit.main, {"name": "qwen", "state": "absent", **dirs})["changed"]


def test_what_ran_before_is_kept(apply: Runner, node: Node) -> None:
    assert apply()["previous"] == ""
    first = node.unit.read_text()
    result = apply(environment={"A": "new"})
    assert Path(result["previous"]).read_text() == first
    env = Path(result["environment_file"])
    previous = env.with_name(env.name + ".previous")
    assert "A=visible" in previous.read_text() and previous.stat().st_mode & 0o777 == 0o600
    # A configuration that failed does not displace one that ran.
    node.active, node.sub, node.container = "failed", "failed", {}
    result = apply(environment={"A": "newer"})
    assert Path(result["previous"]).read_text() == first


def test_a_dry_run_on_a_clean_node(node: Node, tmp_path: Path, run_module: Runner) -> None:
    args = {
        "name": "qwen",
        "image_manifest": str(tmp_path / "none.json"),
        "checkpoint": str(tmp_path / "none"),
        "cache_dir": str(tmp_path / "cache"),
        "state_dir": str(tmp_path / "state"),
        "unit_dir": str(tmp_path / "etc"),
    }
    result = run_module(vllm_unit.main, args, check=True)
    assert result["changed"] and result["image_id"] == "" and result["config"] == ""
    assert "# image: not built yet" in result["diff"][0]["after"]
    assert not (tmp_path / "state").exists() and not (tmp_path / "cache").exists()


def test_everything_that_is_missing_is_named_at_once(apply: Runner, node: Node, tmp_path: Path) -> None:
    (tmp_path / "image.json").unlink()
    (tmp_path / "model" / ".dgxspark-snapshot.json").unlink()
    result = apply(docker_args=["--privileged"], environment={"A B": 1})
    assert result["failed"]
    assert {p["class"] for p in result["problems"]} == {"image_missing", "checkpoint_incomplete", "owned_option", "environment_name"}
    assert "ansible-playbook dgxspark.vllm.image" in result["msg"] and "ansible-playbook dgxspark.vllm.checkpoint" in result["msg"]
    assert node.told == [] and not node.unit.exists()


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"image_id": "vllm:latest"}', json.dumps({"image_id": "sha256:" + "ef" * 32})])
def test_a_manifest_without_a_usable_image(apply: Runner, node: Node, tmp_path: Path, manifest: str) -> None:
    apply()
    (tmp_path / "image.json").write_text(manifest)
    result = apply()
    assert result["failed"] and [p["class"] for p in result["problems"]] == ["image_missing"]
    assert node.active == "active" and node.told == []


def test_docker_down(apply: Runner, node: Node) -> None:
    node.docker_down = True
    result = apply()
    assert result["failed"] and [p["class"] for p in result["problems"]] == ["docker_unreachable"]


@pytest.mark.parametrize(("down", "class_"), [("docker_down", "docker_unreachable"), ("systemd_down", "no_systemd")])
@pytest.mark.parametrize("check", [True, False])
def test_a_dry_run_needs_systemd_and_docker_too(apply: Runner, node: Node, tmp_path: Path, down: str, class_: str, check: bool) -> None:
    setattr(node, down, True)
    result = apply(check=check)
    assert result["failed"] and [p["class"] for p in result["problems"]] == [class_]
    (tmp_path / "image.json").unlink()
    found = [p["class"] for p in apply(check=check)["problems"]]
    assert found == [class_] if check else [class_, "image_missing"]


@pytest.mark.parametrize("how", ["link", "systemd", "distribution"])
@pytest.mark.parametrize("state", ["started", "stopped", "absent"])
def test_a_masked_unit_stays_masked(apply: Runner, node: Node, how: str, state: str) -> None:
    node.unit.parent.mkdir()
    if how == "link":
        node.unit.symlink_to("/dev/null")
    else:
        node.masked, node.fragment = True, "/dev/null" if how == "distribution" else ""
    for check in (True, False):
        result = apply(state=state, check=check)
        assert result["failed"] and [p["class"] for p in result["problems"]] == ["unit_masked"]
        assert "systemctl unmask qwen.service" in result["msg"]
    assert node.told == [] and node.unit.is_symlink() is (how == "link")


@pytest.mark.parametrize("text", ["[Service]\nExecStart=\nExecStart=/usr/bin/docker run x\n", "[Service]\n  ExecStart = \n"])
def test_a_drop_in_with_another_command_is_named(
    apply: Runner, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(vllm_unit, "OVERRIDDEN_S", 0.01)
    path = tmp_path / "own.conf"
    path.write_text(text)
    node.drop_ins = str(path)
    result = apply()
    assert result["failed"] and [p["class"] for p in result["problems"]] == ["unit_overridden"]
    assert str(path) in result["msg"] and "journalctl -u qwen" in result["msg"]


def test_a_drop_in_that_adds_settings_is_fine(apply: Runner, node: Node, tmp_path: Path) -> None:
    path = tmp_path / "own.conf"
    path.write_text("[Service]\nExecStartPre=/bin/true\n#ExecStart=x\nNice=5\n")
    node.drop_ins = str(path)
    assert apply()["container"] and not apply()["changed"]


def test_a_failing_drop_in_is_named_beside_the_log(apply: Runner, node: Node, tmp_path: Path) -> None:
    path = tmp_path / "own.conf"
    path.write_text("[Service]\nExecStart=\nExecStart=/bin/false\n")
    node.drop_ins, node.dies_with = str(path), "something nobody has seen"
    result = apply()
    assert [p["class"] for p in result["problems"]] == ["unit_overridden", "start_failed"]
    assert node.dies_with in result["msg"] and "<vllm_name>" not in result["msg"]


@pytest.mark.parametrize(
    "change",
    [
        {"environment": {"VLLM_API_KEY": "hush"}},
        {"environment": {"HF_TOKEN=hush": "x"}},
        {"docker_args": ["-e", "A=hush"]},
        {"docker_args": ["--env A=hush"]},
    ],
)
def test_a_refused_secret_is_in_no_part_of_the_result(apply: Runner, change: dict[str, Any]) -> None:
    result = apply(**change)
    assert result["failed"] and "hush" not in json.dumps(result)


def test_a_unit_of_somebody_else_is_left_alone(apply: Runner, node: Node) -> None:
    node.unit.parent.mkdir()
    node.unit.write_text("[Service]\nExecStart=/bin/true\n")
    for state in ("started", "stopped", "absent"):
        result = apply(state=state)
        assert result["failed"] and "foreign_unit" in {p["class"] for p in result["problems"]}
    assert node.told == [] and "/bin/true" in node.unit.read_text()


def test_a_unit_of_the_distribution_is_not_shadowed(apply: Runner, node: Node) -> None:
    node.fragment = "/lib/systemd/system/qwen.service"
    result = apply()
    assert result["failed"] and result["problems"][0]["class"] == "foreign_unit"


def test_a_container_of_somebody_else_is_not_removed(apply: Runner, node: Node) -> None:
    node.container = {"Id": "f" * 64, "Image": IMAGE, "State": {"Running": True}, "Config": {"Labels": None, "Image": "redis"}}
    result = apply()
    assert result["failed"] and [p["class"] for p in result["problems"]] == ["name_conflict"]
    assert "redis" in result["msg"] and node.container["Id"] == "f" * 64


def test_a_failed_start_shows_the_log(apply: Runner, node: Node) -> None:
    node.dies_with = "docker: Error response from daemon: error setting rlimit type 8: operation not permitted: unknown."
    result = apply(memlock="unlimited")
    assert result["failed"] and result["changed"]
    assert result["problems"][0]["class"] == "memlock_not_permitted"
    assert node.dies_with in result["msg"] and result["log"] == [node.dies_with]
    node.dies_with = ""
    assert apply(memlock="")["container"]


@pytest.mark.parametrize(("security", "fails"), [('["name=seccomp,profile=builtin"]', False), ('["name=rootless"]', True)])
def test_expandable_segments_on_a_rootless_engine(apply: Runner, node: Node, security: str, fails: bool) -> None:
    node.security = security
    result = apply(environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert bool(result.get("failed")) is fails


def test_warnings_do_not_stop(apply: Runner) -> None:
    result = apply(docker_args=["--shm-size", "64g"])
    assert result["changed"] and [p["class"] for p in result["problems"]] == ["shm_size_ignored"]
    assert "shm_size_ignored" in json.dumps(result["warnings"])
