# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The instance of a host: its pure parts, and the role vllm in real runs of ansible-playbook."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.dgxspark.vllm.plugins.action.instance import (
    build_instance,
    check_exposure,
    check_leak,
    check_service,
    check_settings,
    is_loopback,
    peer_of,
    recipe_folders,
    without_key,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.problems import problem
from ansible_collections.dgxspark.vllm.plugins.module_utils.recipes import load_recipe

CHECKOUT = Path(__file__).parents[4]
KEY = "key-of-the-test-0123456789"
SETTINGS: dict[str, Any] = {
    "name": "dgxspark-vllm",
    "host": "127.0.0.1",
    "port": None,
    "api_key": "",
    "state_dir": "/var/lib/dgxspark-vllm",
    "checkpoint_dir": None,
    "image_manifest": None,
}


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("spark1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("host", "key", "classes"),
    [
        ("127.0.0.1", "", []),
        ("127.0.0.1", KEY, []),
        ("0.0.0.0", KEY, []),
        ("::", KEY, []),
        ("spark1.lan", KEY, []),
        ("0.0.0.0", "", ["open_server"]),
        ("spark1", "", ["open_server"]),
        ("0.0.0.0", " ", ["bad_api_key"]),
        ("0.0.0.0", "key\nA=b", ["bad_api_key"]),
        ("0.0.0.0", "schlüssel", ["bad_api_key"]),
        ("", "", ["bad_host", "open_server"]),
        ("--api-key", KEY, ["bad_host"]),
        ("0.0.0.0 --x", KEY, ["bad_host"]),
        ("127.0.0.1:8000", KEY, ["bad_host"]),
    ],
)
def test_an_open_address_needs_a_usable_key(host: str, key: str, classes: list[str]) -> None:
    found = check_exposure(host, key)
    assert [p["class"] for p in found] == classes
    assert not key.strip() or key not in str(found)


@pytest.mark.parametrize(
    ("key", "value", "class_"),
    [
        ("name", "a b", "bad_name"),
        ("name", "", "bad_name"),
        ("name", "../x", "bad_name"),
        ("name", "-x", "bad_name"),
        ("name", "x.service", "bad_name"),
        ("state_dir", "relative", "bad_path"),
        ("state_dir", "~/x", "bad_path"),
        ("state_dir", "/", "bad_path"),
        ("state_dir", "/a:/b", "bad_path"),
        ("state_dir", "/a b", "bad_path"),
        ("state_dir", "/a/../..", "bad_path"),
        ("state_dir", "/a/%n", "bad_path"),
        ("checkpoint_dir", "/a/$HOME", "bad_path"),
        ("image_manifest", "x.json", "bad_path"),
        ("port", 0, "bad_port"),
        ("port", 65536, "bad_port"),
        ("host", "a b", "bad_host"),
    ],
)
def test_a_bad_setting_is_named(key: str, value: Any, class_: str) -> None:
    found = check_settings(SETTINGS | {key: value, "api_key": KEY})
    assert [p["class"] for p in found] == [class_] and f"vllm_{key}" in found[0]["evidence"]


def test_good_settings_have_no_problem() -> None:
    assert check_settings(SETTINGS) == []


def test_an_instance_follows_from_recipe_and_settings() -> None:
    recipe = load_recipe("qwen35-122b-v2", [CHECKOUT / "recipes"])
    instance = build_instance("qwen35-122b-v2", recipe, SETTINGS)
    assert instance["argv"][:2] == ["serve", "/model"] and instance["argv"][-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    assert instance["argv"].count("--port") == 1
    snapshot = "/var/lib/dgxspark-vllm/checkpoints/Intel--Qwen3.5-122B-A10B-int4-AutoRound/de5e04f21848"
    assert (instance["snapshot_dir"], instance["checkpoint_dir"]) == (snapshot, f"{snapshot}-materialize-a099dee70ccf")
    assert instance["image_manifest"] == "/var/lib/dgxspark-vllm/images/existing.json"
    moved = build_instance("x", recipe, SETTINGS | {"port": 9, "checkpoint_dir": "/m", "image_manifest": "/i.json", "host": "::1"})
    assert moved["argv"][-4:] == ["--host", "::1", "--port", "9"]
    assert (moved["port"], moved["checkpoint_dir"], moved["image_manifest"]) == (9, "/m", "/i.json")
    assert moved["snapshot_dir"] == snapshot
    del recipe["engine_args"]["port"]
    assert build_instance("x", recipe, SETTINGS)["port"] == 8000


@pytest.mark.parametrize("mode", ["off", "online"])
def test_what_is_not_made_anew_is_served_from_the_snapshot(mode: str) -> None:
    overrides = {"checkpoint": {"hybrid": mode}}
    recipe = load_recipe("qwen35-122b-v2", [CHECKOUT / "recipes"], overrides)
    instance = build_instance("x", recipe, SETTINGS)
    assert instance["snapshot_dir"] == instance["checkpoint_dir"]
    assert ("--quantization-config" in instance["argv"]) is (mode == "online")
    moved = build_instance("x", recipe, SETTINGS | {"checkpoint_dir": "/m"})
    assert moved["snapshot_dir"] == moved["checkpoint_dir"] == "/m"


def test_online_quantisation_leaves_the_users_own_targets() -> None:
    own = {"quantization-config": {"targets": {"re:.*lm_head$": "fp8_per_block"}}}
    overrides = {"checkpoint": {"hybrid": "online"}, "engine_args": own}
    argv = build_instance("x", load_recipe("qwen35-122b-v2", [CHECKOUT / "recipes"], overrides), SETTINGS)["argv"]
    targets = json.loads(argv[argv.index("--quantization-config") + 1])["targets"]
    assert set(targets) == {"re:.*lm_head$", r"re:.*shared_expert\.(gate|up|down)_proj$"}


GROUPS = {
    "all": ["a", "b", "c", "d", "e", "x"],
    "vllm_instances": ["a", "b", "c", "d", "e"],
    "single": ["a"],
    "pair": ["b", "c"],
    "racks": ["b", "c", "d"],
    "mixed": ["a", "d", "x"],
    "two_recipes": ["d", "e"],
}
RECIPES = {"a": "r", "b": "r", "c": "r", "d": "r", "e": "other"}


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("a", ""),  # alone in its group
        ("b", ""),  # the head
        ("c", "b"),
        ("d", ""),  # the first of its smallest group
        ("e", ""),  # its head serves something else
        ("x", ""),  # no instance at all
    ],
)
def test_the_others_of_a_cluster_take_the_checkpoint_from_its_head(host: str, peer: str) -> None:
    assert peer_of(host, GROUPS, RECIPES) == peer


def test_a_key_in_another_option_is_found() -> None:
    recipe = load_recipe("qwen35-122b-v2", [CHECKOUT / "recipes"], {"engine_args": {"middleware": KEY}})
    (found,) = check_leak(build_instance("x", recipe, SETTINGS), KEY)
    assert found["class"] == "api_key_leak" and KEY not in str(found)
    assert check_leak(build_instance("x", recipe, SETTINGS), "another-key") == []


ENV, ARGS = "vllm_service_environment", "vllm_service_docker_args"


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        ({}, []),
        ({ENV: {"A": "1", "B": None}, ARGS: ["--cap-add", "IPC_LOCK"]}, []),
        ({ARGS: ["--shm-size", "64g"]}, []),
        ({ENV: {"VLLM_API_KEY": "other-secret"}}, ["environment_secret"]),
        ({ENV: {"HF_TOKEN": "other-secret"}}, ["environment_secret"]),
        ({ENV: {"VLLM_API_KEY": KEY}}, ["api_key_leak", "environment_secret"]),
        ({ENV: {"A": f"x{KEY}y"}}, ["api_key_leak"]),
        ({ENV: {f"A={KEY}": "x"}}, ["api_key_leak", "environment_name"]),
        ({ENV: {"A": [KEY]}}, ["api_key_leak", "environment_type"]),
        ({ARGS: ["-e", "VLLM_API_KEY=other-secret"]}, ["owned_option"]),
        ({ARGS: ["--env VLLM_API_KEY=other-secret"]}, ["joined_words"]),
        ({ARGS: ["--label", f"key={KEY}"]}, ["api_key_leak"]),
        ({ARGS: [f"--env=VLLM_API_KEY={KEY}"]}, ["api_key_leak", "owned_option"]),
        ({ENV: {"A": KEY}, ARGS: [KEY]}, ["api_key_leak", "api_key_leak"]),
    ],
)
def test_the_services_own_options_hold_no_secret(values: dict[str, Any], classes: list[str]) -> None:
    found = check_service(values, KEY)
    assert [p["class"] for p in found] == classes
    assert KEY not in str(found) and "other-secret" not in str(found)


@pytest.mark.parametrize("key", ['quote"quote', "back\\slash", "it's-a-key", "12345678"])
def test_a_key_is_found_in_every_spelling(key: str) -> None:
    for value in ({"A": key}, [f"--x={json.dumps({'a': key})}"], {key: 1}, {"A": {"B": (key,)}}):
        assert [p["class"] for p in check_leak(value, key)] == ["api_key_leak"]
    assert [p["class"] for p in check_leak({"A": 12345678}, "12345678")] == ["api_key_leak"]
    for text in (key, json.dumps(key), repr(key)):
        assert key not in str(without_key([problem("x", f"a {text} b", text)], key)[0].values())


def test_relative_recipe_folders_start_at_the_inventory(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    folders, problems = recipe_folders(["mine", str(tmp_path), "nope"], tmp_path, Path("/shipped"))
    assert folders == [tmp_path / "mine", tmp_path, tmp_path / "nope", Path("/shipped")]
    assert [p["evidence"] for p in problems] == [f"vllm_recipe_dirs: {tmp_path}/nope is no folder"]


# --- real runs --------------------------------------------------------------------------------------------------------------------------


class Unsafe(str):
    """Text that an inventory marks with !unsafe."""


yaml.SafeDumper.add_representer(Unsafe, lambda dumper, value: dumper.represent_scalar("!unsafe", str(value)))

PLAY = """
- name: Resolve
  hosts: all
  gather_facts: false
  roles:
    - dgxspark.vllm.vllm
  tasks:
    - name: Show what other roles see
      ansible.builtin.debug:
        msg:
          instance: "{{ vllm_instance }}"
          port: "{{ vllm_port }}"
          checkpoint_dir: "{{ vllm_checkpoint_dir }}"
          image_manifest: "{{ vllm_image_manifest }}"
"""


class Run:
    """One run of ansible-playbook over several hosts, each with its own variables."""

    def __init__(self, folder: Path, hosts: dict[str, dict[str, Any]], *options: str) -> None:
        (folder / "inventory.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
        (folder / "play.yml").write_text(PLAY)
        command = [Path(sys.executable).parent / "ansible-playbook", "-i", folder / "inventory.yml", folder / "play.yml", *options]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(CHECKOUT / "ansible.cfg"),
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
            "ANSIBLE_NOCOLOR": "1",
        }
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
        self.output = done.stdout + done.stderr
        start = re.search(r"^\{$", done.stdout, re.MULTILINE)
        assert start, self.output
        data, _ = json.JSONDecoder().raw_decode(done.stdout, start.start())
        self.stats: dict[str, dict[str, int]] = data["stats"]
        self.last = {name: result for task in data["plays"][0]["tasks"] for name, result in task["hosts"].items()}

    def seen(self, host: str) -> dict[str, Any]:
        """What the last task showed on a host."""
        assert self.stats[host]["failures"] == 0, self.last[host].get("msg")
        shown: dict[str, Any] = self.last[host]["msg"]
        return shown

    def argv(self, host: str) -> list[str]:
        found: list[str] = self.seen(host)["instance"]["argv"]
        return found

    def failure(self, host: str) -> str:
        """The message that a host failed with."""
        assert self.stats[host]["failures"] == 1
        message: str = self.last[host]["msg"]
        assert "Traceback" not in message
        return message


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All cases as hosts of one run in check mode, at the highest verbosity."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine").mkdir()
    (folder / "mine" / "pair.yml").write_text("extends: rehearsal-tiny\nnodes: 2\n")
    (folder / "mine" / "qwen35-122b-v2.yml").write_text(
        "extends: qwen35-122b-v2\nengine_args: {chat-template: '{% if a %}{{ b }}{% endif %}'}\n"
    )
    v2 = {"vllm_recipe": "qwen35-122b-v2"}
    spec = {"method": "mtp", "num_speculative_tokens": 3}
    hosts: dict[str, dict[str, Any]] = {
        "plain": v2,
        "mapping": v2 | {"vllm_recipe_overrides": {"engine_args": {"speculative-config": spec}}},
        "json_value": v2 | {"vllm_recipe_overrides": {"engine_args": {"speculative-config": json.dumps(spec)}}},
        "json_all": v2 | {"vllm_recipe_overrides": json.dumps({"engine_args": {"speculative-config": spec}})},
        "markers": v2 | {"vllm_recipe_overrides": {"engine_args": {"chat-template": Unsafe("{% if a %}{{ b }}{% endif %}")}}},
        "own": v2 | {"vllm_recipe_dirs": ["mine"]},
        "open_with_key": v2 | {"vllm_host": "0.0.0.0", "vllm_api_key": KEY, "vllm_port": "8001"},
        "expression": v2
        | {
            "where": "/data/{{ inventory_hostname }}",
            "vllm_checkpoint_dir": "{{ where }}",
            "vllm_port": "{{ 8000 + 2 }}",
            "other_prefix": 1,
        },
        "no_recipe": {"inventory_only": 1},
        "pair": {"vllm_recipe": "pair", "vllm_recipe_dirs": ["mine"]},
        "wrong": {
            "vllm_recipe": "qwen35-122b-v3",
            "vllm_prot": 8000,
            "vllm_host": "0.0.0.0",
            "vllm_state_dir": "relative",
            "vllm_recipe_dirs": ["nope"],
            "vllm_recipe_overrides": {"nodez": 1, "engine_args": {"api-key": KEY, "max_model_len": 1}, "environment": {"HF_TOKEN": KEY}},
        },
        "expressions": {
            "vllm_recipe": "rehearsal-tiny",
            "vllm_host": "0.0.0.0",
            "vllm_port": "{{ nowhere }}",
            "vllm_api_key": "{{ nowhere }}",
            "vllm_name": ["a"],
            "vllm_state_dir": None,
            "vllm_checkpoint_dir": "/data/{{ vllm_instance.name }}",
        },
        "service_leak": v2
        | {
            "vllm_api_key": KEY,
            ENV: {"A": "{{ vllm_api_key }}", "HF_TOKEN": KEY},
            ARGS: ["--shm-size", KEY, "--ipc", "private"],
        },
        "leak": v2 | {"vllm_api_key": KEY, "vllm_recipe_overrides": {"engine_args": {"middleware": KEY}}},
    }
    return Run(folder, hosts, "--check", "--diff", "-vvv")


def test_the_other_roles_see_the_instance(run: Run) -> None:
    seen = run.seen("plain")
    assert seen["instance"].keys() - {"changed", "failed"} == {
        *("name", "recipe_name", "recipe", "argv", "environment", "host", "port", "checkpoint_dir", "image_manifest"),
        *("snapshot_dir", "snapshot_folder", "peer"),
    }
    assert seen["instance"]["recipe"]["checkpoint"]["revision"] == "de5e04f218487cb2fb762c6e9aabec784fb40d00"
    assert seen["port"] == seen["instance"]["port"] == 8000
    assert seen["checkpoint_dir"] == seen["instance"]["checkpoint_dir"] and seen["image_manifest"] == seen["instance"]["image_manifest"]
    assert run.stats["plain"]["changed"] == 0


def test_every_form_of_an_override_gives_the_same_words(run: Run) -> None:
    assert '{"method":"mtp","num_speculative_tokens":3}' in run.argv("mapping")
    assert run.argv("mapping") == run.argv("json_value") == run.argv("json_all")


@pytest.mark.parametrize("host", ["markers", "own"])
def test_markers_in_text_reach_the_server(run: Run, host: str) -> None:
    assert "{% if a %}{{ b }}{% endif %}" in run.argv(host)


def test_the_users_own_expressions_are_evaluated(run: Run) -> None:
    seen = run.seen("expression")
    assert seen["instance"]["checkpoint_dir"] == seen["checkpoint_dir"] == "/data/expression"
    assert seen["instance"]["port"] == 8002


def test_a_key_opens_the_server_and_is_never_shown(run: Run) -> None:
    assert run.argv("open_with_key")[-4:] == ["--host", "0.0.0.0", "--port", "8001"]
    assert "api_key_leak" in run.failure("leak")
    assert [p["class"] for p in run.last["service_leak"]["problems"]] == [
        "api_key_leak",
        "environment_secret",
        "api_key_leak",
        "bad_shm_size",
    ]
    # The inventory's own text does not count: only what the run says.
    assert KEY not in run.output


def test_a_host_without_recipe_learns_which_there_are(run: Run) -> None:
    assert "no_recipe" in run.failure("no_recipe") and "qwen35-122b-v2, rehearsal-tiny" in run.failure("no_recipe")


def test_a_recipe_for_two_nodes_is_refused(run: Run) -> None:
    assert "recipe pair needs 2 nodes; this release serves single-node recipes" in run.failure("pair")


def test_everything_wrong_comes_in_one_message(run: Run) -> None:
    message = run.failure("wrong")
    for said in [
        "vllm_prot: the role vllm has no such variable",
        "did you mean vllm_port?",
        "did you mean qwen35-122b-v2?",
        "vllm_state_dir",
        "vllm_recipe_dirs",
        "open_server",
        "nodez",
        "did you mean nodes?",
        "engine_args.api-key",
        "engine_args.max_model_len",
        "environment.HF_TOKEN",
    ]:
        assert said in message
    assert len(run.last["wrong"]["problems"]) == 9


def test_what_cannot_be_evaluated_is_named_with_the_rest(run: Run) -> None:
    message = run.failure("expressions")
    for said in [
        "vllm_port: 'nowhere' is undefined",
        "vllm_api_key: its expression cannot be evaluated",
        "vllm_name: ['a'] is a list where text belongs",
        "vllm_state_dir: is empty (null)",
        "vllm_checkpoint_dir: refers to vllm_instance, which follows from it",
    ]:
        assert said in message
    assert len(run.last["expressions"]["problems"]) == 5, "an unreadable key is not also a missing one"


def test_extra_variables_on_the_command_line(tmp_path: Path) -> None:
    overrides = {"engine_args": {"speculative-config": {"method": "mtp", "num_speculative_tokens": 3}, "max-model-len": 4096}}
    extra = json.dumps({"vllm_recipe": "rehearsal-tiny", "vllm_recipe_overrides": overrides})
    argv = Run(tmp_path, {"localhost": {}}, "-e", extra).argv("localhost")
    text = json.dumps(overrides, separators=(",", ":"))
    again = Run(tmp_path, {"localhost": {}}, "-e", "vllm_recipe=rehearsal-tiny", "-e", f"vllm_recipe_overrides='{text}'").argv("localhost")
    assert argv == again
    assert '{"method":"mtp","num_speculative_tokens":3}' in argv and "4096" in argv
