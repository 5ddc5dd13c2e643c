# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Recipes: the shipped ones, how layers merge, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.recipes import RecipeError, deep_merge, find_recipes, load_recipe
from ansible_collections.dgxspark.vllm.plugins.module_utils.vllm_argv import engine_argv

SHIPPED = Path(__file__).parents[4] / "recipes"
GOOD = """
description: a test
checkpoint: {repo: a/b, revision: "0123456789abcdef0123456789abcdef01234567"}
image: {profile: existing}
requires: {memory_gib: 1, disk_gib: 2.5}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a good recipe."""
    (tmp_path / "good.yml").write_text(GOOD)
    return tmp_path


def faults(name: str, folder: Path, overrides: Any = None) -> list[str]:
    """Class, evidence and remedy of each problem; empty if the recipe loads."""
    try:
        load_recipe(name, [folder], overrides)
    except RecipeError as error:
        return [f"{p['class']}: {p['evidence']} -> {p['remedy']}" for p in error.problems]
    return []


def options(argv: list[str]) -> set[tuple[str | float, ...]]:
    """An argument list without the order of its options: each option with its values, and 0.90 is 0.9."""
    found: list[list[str | float]] = []
    for word in argv:
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(float(word) if word.replace(".", "", 1).isdigit() else word)
    return {tuple(option) for option in found}


# --- the shipped recipes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(find_recipes([SHIPPED])))
def test_every_shipped_recipe_loads(name: str) -> None:
    recipe = load_recipe(name, [SHIPPED])
    assert engine_argv(recipe["engine_args"])
    assert recipe["sources"], "say where a recipe comes from"


@pytest.mark.parametrize("name", sorted(find_recipes([SHIPPED])))
def test_every_shipped_recipe_is_pinned_to_commits(name: str) -> None:
    checkpoint = load_recipe(name, [SHIPPED])["checkpoint"]
    for key in ("revision", "donor_revision"):
        assert checkpoint[key] is None or re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", checkpoint[key]), f"{name}: {key} can move"


@pytest.mark.parametrize("mode", ["off", "online", "'off'", "false", "null"])
def test_a_hybrid_is_switched_off_as_people_write_it(own: Path, mode: str) -> None:
    (own / "own.yml").write_text(f"extends: qwen35-122b-v2\ncheckpoint: {{hybrid: {mode}}}\n")
    hybrid = load_recipe("own", [own, SHIPPED])["checkpoint"]["hybrid"]
    assert hybrid == ("online" if mode == "online" else "off")


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/7", "release-2026"])
def test_an_own_recipe_may_follow_a_branch(own: Path, revision: str) -> None:
    (own / "own.yml").write_text(f"extends: good\ncheckpoint: {{revision: {revision}}}\n")
    assert load_recipe("own", [own])["checkpoint"]["revision"] == revision


def test_there_are_shipped_recipes() -> None:
    assert {"rehearsal-tiny", "qwen35-122b-v2"} <= set(find_recipes([SHIPPED]))


def test_v2_is_the_published_command_and_one_switch_that_has_another_default_now() -> None:
    published = [
        *("--served-model-name", "qwen", "--port", "8000", "--max-model-len", "262144", "--gpu-memory-utilization", "0.90"),
        *("--reasoning-parser", "qwen3", "--attention-backend", "FLASHINFER"),
        *("--speculative-config", '{"method":"mtp","num_speculative_tokens":2}'),
    ]
    recipe = load_recipe("qwen35-122b-v2", [SHIPPED], {"engine_args": {"gpu-memory-utilization": 0.90}})
    assert options(engine_argv(recipe["engine_args"])) == options([*published, "--no-enable-prefix-caching"])
    assert load_recipe("qwen35-122b-v2", [SHIPPED])["engine_args"]["gpu-memory-utilization"] == 0.85
    # The one thing beside the command: without it a first start runs out of memory while it compiles.
    assert recipe["environment"] == {"MAX_JOBS": "2", "FLASHINFER_NVCC_THREADS": "1"}


def test_the_rehearsal_is_what_a_cpu_can_serve() -> None:
    argv = engine_argv(load_recipe("rehearsal-tiny", [SHIPPED])["engine_args"])
    assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(argv)
    assert argv[argv.index("--speculative-config") + 1] == '{"method":"mtp","num_speculative_tokens":2}'


# --- layers -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "above", "merged"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"y": 3}}, {"a": {"x": 1, "y": 3}}),
        ({"a": {"x": 1}}, {"a": None}, {}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": None}}, {"a": {"y": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": 1}, {"a": {"x": 1}}, {"a": {"x": 1}}),
        ({"a": {"x": 1}}, {"a": 2}, {"a": 2}),
        ({}, {"a": {"x": None}}, {"a": {"x": None}}),
    ],
)
def test_layers_merge(below: dict[str, Any], above: dict[str, Any], merged: dict[str, Any]) -> None:
    before = json.dumps(below)
    assert deep_merge(below, above) == merged
    assert json.dumps(below) == before


def test_a_resolved_recipe_has_every_key(own: Path) -> None:
    recipe = load_recipe("good", [own])
    assert recipe["nodes"] == 1 and recipe["runtime"] == "docker" and recipe["checkpoint"]["mtp"] is False
    assert recipe["health"] == {"ready_timeout_s": 1500, "stall_timeout_s": 600}
    assert recipe["engine_args"] == recipe["environment"] == recipe["expect"] == {} and recipe["sources"] == []
    assert "extends" not in recipe


def test_a_recipe_extends_another_and_takes_options_out(own: Path) -> None:
    (own / "parent.yml").write_text(GOOD + "engine_args: {port: 8000, dtype: auto, seed: 1}\nenvironment: {A: '1', B: '2'}\n")
    (own / "middle.yml").write_text("extends: parent\nengine_args: {dtype: null}\n")
    (own / "child.yml").write_text("extends: middle\nengine_args: {seed: 2}\nenvironment: {A: null, C: 3}\n")
    recipe = load_recipe("child", [own])
    assert recipe["engine_args"] == {"port": 8000, "seed": 2}
    assert recipe["environment"] == {"B": "2", "C": "3"}
    assert load_recipe("child", [own], {"engine_args": None})["engine_args"] == {}


def test_an_own_folder_comes_first_and_its_recipe_may_extend_its_namesake(own: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    later = tmp_path_factory.mktemp("later")
    (later / "good.yml").write_text(GOOD + "engine_args: {seed: 1}\n")
    assert load_recipe("good", [own, later])["engine_args"] == {}
    (own / "good.yml").write_text("extends: good\nengine_args: {port: 1}\n")
    assert load_recipe("good", [own, later])["engine_args"] == {"seed": 1, "port": 1}
    assert any("recipe_cycle" in fault for fault in faults("good", own))


@pytest.mark.parametrize(
    "value",
    [
        {"method": "mtp", "num_speculative_tokens": 3},
        '{"method":"mtp","num_speculative_tokens":3}',
        {"num_speculative_tokens": 3},
        '{"num_speculative_tokens": 3}',
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_overrides_give_the_same_words_in_every_form(value: object, as_text: bool) -> None:
    overrides: Any = {"engine_args": {"speculative-config": value}}
    recipe = load_recipe("qwen35-122b-v2", [SHIPPED], json.dumps(overrides) if as_text else overrides)
    argv = engine_argv(recipe["engine_args"])
    assert argv[argv.index("--speculative-config") + 1] == '{"method":"mtp","num_speculative_tokens":3}'


def test_nothing_in_a_recipe_is_evaluated(own: Path) -> None:
    (own / "text.yml").write_text(
        "extends: good\nengine_args: {chat-template: '{% if x %}{{ y }}{% endif %}'}\nenvironment: {A: '{{ z }}'}\n"
    )
    recipe = load_recipe("text", [own])
    assert engine_argv(recipe["engine_args"]) == ["--chat-template", "{% if x %}{{ y }}{% endif %}"]
    assert recipe["environment"] == {"A": "{{ z }}"}


# --- what is refused --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen35-122b-v3", "did you mean qwen35-122b-v2? Known: qwen35-122b-v2, rehearsal-tiny"),
        ("rehersal", "did you mean rehearsal-tiny?"),
        ("nothing-like-it", "use one of: qwen35-122b-v2, rehearsal-tiny"),
        ("recipes/qwen35-122b-v2.yml", "give the name only, without folder and ending"),
        ("qwen35-122b-v2.yml", "give the name only, without folder and ending"),
        ("../recipes/qwen35-122b-v2", "give the name only, without folder and ending"),
        ("", "use one of: "),
    ],
)
def test_an_unknown_recipe_is_answered_with_the_known_ones(name: str, said: str) -> None:
    (fault,) = faults(name, SHIPPED)
    assert fault.startswith("recipe_unknown: ") and said in fault


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("description: x\nengine_args:\n  a: [1\n", "own.yml:4:1: "),
        ("description: x\n\tnodes: 1\n", "own.yml:2:1: "),
        ("a: b: c\n", "own.yml:1:5: "),
        ("nodes: 1\nnodes: 2\n", "own.yml:2:1: the key 'nodes' is there twice"),
        ("engine_args:\n  port: 1\n  port: 2\n", "own.yml:3:3: the key 'port' is there twice"),
        ("a: &x 1\nb: *x\n", "own.yml:2:4: anchors and aliases are not for recipes"),
        ("a: !!python/object:os.system x\n", "own.yml:1:4: "),
        ("a: 1\n---\nb: 2\n", "own.yml:2:1: "),
        ("a: 1\nb: \x07\n", "own.yml:2: special characters"),
        ("", "own.yml: the file is empty"),
        ("# nothing\n", "own.yml: the file is empty"),
        ("- a\n", "own.yml: a list where a mapping belongs"),
        ("just text\n", "own.yml: a str where a mapping belongs"),
        ("a: " + "[" * 500, "own.yml: maximum recursion depth"),
    ],
)
def test_a_file_that_is_no_mapping_is_named_with_its_line(own: Path, text: str, said: str) -> None:
    (own / "own.yml").write_text(text)
    (fault,) = faults("own", own)
    assert fault.startswith(f"recipe_syntax: {own}/") and said in fault


def test_a_file_that_is_no_text_or_cannot_be_read_is_named(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "own.yml").write_bytes(b"a: 1\nb: \xff\n")
    assert "own.yml:2: the text is not UTF-8" in faults("own", own)[0]

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "Permission denied" in faults("own", own)[0]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("nodez: 1", "recipe_unknown_key: FILE: nodez -> did you mean nodes?"),
        ("1: 1", "recipe_unknown_key: FILE: 1 -> use one of"),
        ("checkpoint: {revison: a}", "recipe_unknown_key: FILE: checkpoint.revison -> did you mean revision?"),
        ("image: {profil: a}", "recipe_unknown_key: FILE: image.profil -> did you mean profile?"),
        ("requires: {memory: 1}", "recipe_unknown_key: FILE: requires.memory -> "),
        ("health: {ready_timeout: 1}", "recipe_unknown_key: FILE: health.ready_timeout -> did you mean ready_timeout_s?"),
        ("expect: {decode: 1}", "recipe_unknown_key: FILE: expect.decode -> did you mean decode_tok_s?"),
        ("engine-args: {}", "recipe_unknown_key: FILE: engine-args -> did you mean engine_args?"),
        ("nodes: '2'", 'FILE: nodes: "2" is a string where a number belongs'),
        ("nodes: 0", "FILE: nodes: 0 is out of range"),
        ("nodes: 1.5", "FILE: nodes: 1.5 where a whole number belongs"),
        ("nodes: true", "FILE: nodes: True where a whole number belongs"),
        ("requires: {memory_gib: 8 GiB}", "FILE: requires.memory_gib: \"8 GiB\" is a string where a number belongs"),
        ("requires: {memory_gib: .nan}", "FILE: requires.memory_gib: nan where a number belongs"),
        ("requires: {disk_gib: -1}", "FILE: requires.disk_gib: -1 is out of range"),
        ("health: {stall_timeout_s: 0}", "FILE: health.stall_timeout_s: 0 is out of range"),
        ("expect: {acceptance: 80, source: x}", "FILE: expect.acceptance: 80 is out of range"),
        ("runtime: podman", "FILE: runtime: \"podman\" is not known -> use one of: docker, venv"),
        ("runtime: dokcer", "did you mean docker?"),
        ("checkpoint: a/b", "FILE: checkpoint: a text of 3 characters is no mapping"),
        ("checkpoint: {mtp: 'yes'}", 'FILE: checkpoint.mtp: "yes" where true or false belongs'),
        ("checkpoint: {repo: b}", 'FILE: checkpoint.repo: "b" is not OWNER/NAME'),
        ("checkpoint: {repo: a/../b}", "is not OWNER/NAME"),
        ("checkpoint: {repo: ../b}", "is not OWNER/NAME"),
        ("checkpoint: {revision: main..x}", 'FILE: checkpoint.revision: "main..x" is not a full commit hash'),
        ("checkpoint: {revision: DE5E04F218487CB2FB762C6E9AABEC784FB40D00}", "is not a full commit hash"),
        ("checkpoint: {hybrid: both}", 'FILE: checkpoint.hybrid: "both" is not known'),
        ("checkpoint: {hybrid: true}", "FILE: checkpoint.hybrid: True where text belongs"),
        ("checkpoint: {donor_repo: b}", 'FILE: checkpoint.donor_repo: "b" is not OWNER/NAME'),
        ("checkpoint: {hybrid: overlay}", "recipe_hybrid: recipe own: checkpoint.hybrid is overlay, but checkpoint.donor_repo and"),
        ("checkpoint: {hybrid: materialize, donor_repo: a/b}", "checkpoint.hybrid is materialize, but checkpoint.donor_revision is not"),
        ("checkpoint: {revision: de5e04f}", "is not a full commit hash"),
        (f"checkpoint: {{revision: {'0' * 64}}}", "FILE: checkpoint.revision: 0 where text belongs -> write a full commit hash or digest"),
        ("image: {profile: ../x}", "FILE: image.profile: "),
        ("description: ''", 'FILE: description: "" is empty'),
        ("sources: x", "FILE: sources: \"x\" where a list of texts belongs"),
        ("sources: [1]", "where a list of texts belongs"),
        ("extends: [a]", "FILE: extends: ['a'] where text belongs"),
        ("engine_args: {max_model_len: 1}", "FILE: engine_args.max_model_len: vLLM's options have dashes"),
        ("engine_args: {port: '8000'}", 'FILE: engine_args.port: "8000" is a string where a number belongs'),
        ("engine_args: [a]", "FILE: engine_args: a list of 1 item is no mapping"),
        ("engine_args: {max-model-len: 2026-04-08}", "is a string where a number belongs"),
        ("environment: {A: yes}", "FILE: environment.A: true or false has more than one spelling"),
        ("environment: {A: 0.10}", "FILE: environment.A: a number with a point has more than one spelling"),
        ("environment: [A=1]", "FILE: environment: list is no mapping"),
        ("engine_args: {speculative-config: {method: mtp}}", "recipe_mtp: recipe own: "),
        ("engine_args: {tensor-parallel-size: 2}", "recipe_ranks: recipe own: engine_args ask for 2 ranks, but nodes is 1"),
        ("engine_args: {enable-auto-tool-choice: true}", "recipe_tools: recipe own: "),
        ("expect: {decode_tok_s: 51}", "recipe_expect: recipe own: expect has figures but no source"),
    ],
)  # fmt: skip
def test_what_a_recipe_cannot_hold_is_named_with_file_key_and_remedy(own: Path, lines: str, said: str) -> None:
    parent = "" if "extends" in lines else "extends: good\n"
    (own / "own.yml").write_text(f"{parent}{lines}\n")
    found = [fault.replace(str(own / "own.yml"), "FILE") for fault in faults("own", own)]
    assert any(said in fault for fault in found), found
    assert len(found) == 1 or not parent


def test_all_problems_of_all_layers_come_at_once(own: Path) -> None:
    (own / "parent.yml").write_text("description: x\nnodes: '1'\ncheckpoint: {revision: de5e04f}\n")
    (own / "child.yml").write_text("extends: parent\nengine_args: {a_b: 1}\n")
    found = faults("child", own, {"nodez": 1, "environment": {"A": 1.5}})
    assert [fault.split(":")[0] for fault in found] == [
        *("recipe_type", "recipe_type", "engine_arg_name", "recipe_unknown_key", "environment_type"),
        *["recipe_missing_key"] * 4,
    ]
    assert not any("revision is not set" in fault for fault in found), "a flawed key is not also a missing one"
    assert "parent.yml: nodes" in found[0] and "child.yml: engine_args" in found[2] and "vllm_recipe_overrides: nodez" in found[3]


def test_a_parent_that_is_missing_hides_no_other_problem(own: Path) -> None:
    (own / "child.yml").write_text("extends: goood\nnodes: x\n")
    unknown, wrong_type = faults("child", own)
    assert "child.yml)" in unknown and "did you mean good?" in unknown and "nodes" in wrong_type


def test_a_circle_is_shown(own: Path) -> None:
    (own / "a.yml").write_text("extends: b\n")
    (own / "b.yml").write_text("extends: a\n")
    (fault,) = faults("a", own)
    assert fault.startswith(f"recipe_cycle: recipes extend each other in a circle: {own}/a.yml -> {own}/b.yml -> {own}/a.yml")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([1], "a list of 1 item is no mapping"),
        (5, "a value of type int is no mapping"),
        ("engine_args=1", "a text of 13 characters is no mapping: not JSON (Expecting value at character 1)"),
        (
            '{"environment": {"A": "hf_abcdefgh"}',
            "a text of 36 characters is no mapping: not JSON (Expecting ',' delimiter at character 37)",
        ),
        ("environment={'A': 'hf_abcdefgh'}", "JSON wants double quotes"),
        (["hf_abcdefgh"], "a list of 1 item is no mapping"),
        ({"engine_args": "--api-key hf_abcdefgh"}, "engine_args: a text of 21 characters is no mapping"),
        ({"checkpoint": "hf_abcdefgh"}, "checkpoint: a text of 11 characters is no mapping"),
        ({"environment": {"A=hf_abcdefgh": None}}, 'environment: "A" (cut; 13 characters in all) is no variable name'),
        ('{"nodes": 1, "nodes": 1}', "there twice"),
        ('"{}"', "is no mapping"),
        ({"extends": "good"}, "extends has no place here"),
        ({"nodes": "1"}, 'vllm_recipe_overrides: nodes: "1" is a string where a number belongs'),
        ({"engine_args": '{"port": 1}'}, "vllm_recipe_overrides: engine_args: "),
        ({"engine_args": {"max-model-len": "4096"}}, 'vllm_recipe_overrides: engine_args.max-model-len: "4096" is a string'),
        ({"environment": {"HF_TOKEN": "hf_abcdefgh"}}, "environment.HF_TOKEN: a secret has no place in a recipe"),
        ({"engine_args": {"api-key": "hf_abcdefgh"}}, "set vllm_api_key in the inventory"),
    ],
)
def test_overrides_that_are_none_are_named_by_their_variable(own: Path, overrides: object, said: str) -> None:
    (fault,) = faults("good", own, overrides)
    assert "vllm_recipe_overrides" in fault and said in fault and "hf_abcdefgh" not in fault


def test_empty_overrides_change_nothing(own: Path) -> None:
    assert load_recipe("good", [own], "") == load_recipe("good", [own], {}) == load_recipe("good", [own], None)
