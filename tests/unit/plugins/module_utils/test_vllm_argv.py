# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""From a mapping to the words that vLLM, systemd and docker read."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.vllm_argv import (
    ArgumentError,
    check_engine_args,
    check_environment,
    docker_env_file,
    engine_argv,
    systemd_exec,
)
from hypothesis import given, settings
from hypothesis import strategies as st

MTP = '{"method":"mtp","num_speculative_tokens":2}'


def problems_of(args: object) -> list[str]:
    """Class and evidence of everything that is wrong with engine arguments."""
    return [f"{p['class']}: {p['evidence']}" for p in check_engine_args(args, "recipe x: engine_args")[1]]


@pytest.mark.parametrize(
    ("args", "argv"),
    [
        ({}, []),
        ({"served-model-name": "qwen"}, ["--served-model-name", "qwen"]),
        ({"served-model-name": ["qwen", "qwen3.5"]}, ["--served-model-name", "qwen", "qwen3.5"]),
        ({"max-model-len": 262144}, ["--max-model-len", "262144"]),
        ({"max-model-len": -1}, ["--max-model-len", "-1"]),
        ({"max-model-len": "auto"}, ["--max-model-len", "auto"]),
        ({"gpu-memory-utilization": 0.85}, ["--gpu-memory-utilization", "0.85"]),
        ({"gpu-memory-utilization": 1}, ["--gpu-memory-utilization", "1"]),
        ({"enforce-eager": True}, ["--enforce-eager"]),
        ({"enable-prefix-caching": False}, ["--no-enable-prefix-caching"]),
        ({"enable-prefix-caching": None, "seed": 0}, ["--seed", "0"]),
        ({"speculative-config": {"method": "mtp", "num_speculative_tokens": 2}}, ["--speculative-config", MTP]),
        (
            {"speculative-config": {"num_speculative_tokens": 2, "method": "mtp"}},
            ["--speculative-config", '{"num_speculative_tokens":2,"method":"mtp"}'],
        ),
        ({"compilation-config": 3}, ["--compilation-config", "3"]),
        ({"limit-mm-per-prompt": {"image": 0, "video": 0}}, ["--limit-mm-per-prompt", '{"image":0,"video":0}']),
        ({"hf-overrides": {"a": None, "b": "é"}}, ["--hf-overrides", '{"a":null,"b":"\\u00e9"}']),
        ({"generation-config": "vllm"}, ["--generation-config", "vllm"]),
        ({"rope-scaling": '{"type": "yarn"}'}, ["--rope-scaling", '{"type":"yarn"}']),
        ({"lora-modules": [{"name": "a", "path": "/a"}]}, ["--lora-modules", '{"name":"a","path":"/a"}']),
        ({"cudagraph-capture-sizes": [1, 2, 4]}, ["--cudagraph-capture-sizes", "1", "2", "4"]),
        # Text is never evaluated, by whoever reads it later.
        (
            {"chat-template": "{% for m in messages %}{{ m }}{% endfor %}"},
            ["--chat-template", "{% for m in messages %}{{ m }}{% endfor %}"],
        ),
        ({"served-model-name": "a $HOME %n `b`"}, ["--served-model-name", "a $HOME %n `b`"]),
        ({"default-chat-template-kwargs": {"x": "{{ 1 + 1 }}"}}, ["--default-chat-template-kwargs", '{"x":"{{ 1 + 1 }}"}']),
    ],
)
def test_each_kind_of_value_becomes_its_words(args: dict[str, Any], argv: list[str]) -> None:
    assert engine_argv(args) == argv


@pytest.mark.parametrize(
    "text",
    [MTP, '{"method": "mtp", "num_speculative_tokens": 2}', ' {\n "method":"mtp",\n "num_speculative_tokens":2}\n'],
)
def test_a_json_text_and_a_mapping_give_the_same_words(text: str) -> None:
    assert engine_argv({"speculative-config": text}) == engine_argv({"speculative-config": {"method": "mtp", "num_speculative_tokens": 2}})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("{method: mtp, num_speculative_tokens: 2}", "not JSON"),
        ("{method:mtp}", "not JSON"),
        ("""'{"method":"mtp"}'""", "quotes around it have become part"),
        (r"{\"method\":\"mtp\"}", "escaped once too often"),
        ('{{"a":1}}', "braces are doubled"),
        ("{'method': 'mtp'}", "JSON wants double quotes"),
        ('{"num_speculative_tokens": {num_speculative_tokens}}', "not JSON"),
        (r'"{\"method\": \"mtp\"}"', "encoded twice"),
        ('"mtp"', "encoded twice"),
        ('{"method":"mtp","num_speculative_tokens":"2"}', "a string where a number belongs"),
        ({"method": "mtp", "num_speculative_tokens": "2"}, "a string where a number belongs"),
        ({"method": "ngram", "prompt_lookup_max": " 4"}, "a string where a number belongs"),
        ({"num_speculative_tokens": 0}, "no count of draft tokens"),
        ({"num_speculative_tokens": True}, "no count of draft tokens"),
        ({"num_speculative_tokens": 1.5}, "no count of draft tokens"),
        ('{"method":"mtp","method":"ngram"}', "there twice"),
        ('{"a":NaN}', "NaN is not JSON"),
        ('{"a":-Infinity}', "-Infinity is not JSON"),
        ('{"a":1e999}', "inf, which JSON does not have"),
        ({"a": math.nan}, "nan, which JSON does not have"),
        ({"a": {"b": [1, math.inf]}}, "a.b[1] is inf"),
        ({"a": {1: 2}}, "the key 1 in a is not text"),
        ({"a": {2}}, "a is a set"),
        ("[1]", "no mapping"),
        ([1], "no mapping"),
        ("", "not JSON"),
        (3, "no mapping"),
        (True, "no mapping"),
        (False, "no mapping"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_json_option_that_is_no_json_mapping_is_refused(value: object, why: str) -> None:
    (found,) = problems_of({"speculative-config": value})
    assert found.startswith("engine_arg_json: recipe x: engine_args.speculative-config: ") and why in found


@pytest.mark.parametrize("name", ["compilation-config", "hf-overrides", "limit-mm-per-prompt", "mm-processor-kwargs", "kv-transfer-config"])
def test_every_json_option_is_checked(name: str) -> None:
    assert len(problems_of({name: "{a: 1}"})) == 1
    assert engine_argv({name: '{"a": 1}'}) == engine_argv({name: {"a": 1}}) == [f"--{name}", '{"a":1}']


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("max_model_len", 1, "not underscores"),
        ("--max-model-len", 1, "without leading dashes"),
        ("-tp", 1, "without leading dashes"),
        ("Max-Model-Len", 1, "is no option name"),
        ("max-model-len=5", 1, "is no option name"),
        ("a b", 1, "is no option name"),
        (7, 1, "is not text"),
        (True, 1, "is not text"),
        ("speculative-config.method", "mtp", "part of a JSON option"),
        ("no-enable-prefix-caching", True, "turned off by its value"),
        ("model", "/x", "set by the project"),
        ("host", "0.0.0.0", "set by the project"),
        ("api-key", "sk-very-secret", "set by the project"),
        ("config", "/x.yml", "set by the project"),
        ("node-rank", 0, "set by the project"),
        ("master-addr", "192.0.2.1", "set by the project"),
        ("headless", True, "set by the project"),
    ],
)
def test_a_name_that_is_no_option_to_set_is_refused(name: object, value: object, why: str) -> None:
    (found,) = check_engine_args({name: value}, "x")[1]
    assert why in found["evidence"]
    assert "very-secret" not in found["evidence"] + found["remedy"]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("port", "8000", '"8000" is a string where a number belongs'),
        ("max-model-len", "256k", "is a string where a number belongs"),
        ("max-num-seqs", "13", "is a string where a number belongs"),
        ("gpu-memory-utilization", "0.85", "is a string where a number belongs"),
        ("tensor-parallel-size", "2", "is a string where a number belongs"),
        ("port", 0, "out of range"),
        ("port", 65536, "out of range"),
        ("port", 80.5, "out of range"),
        ("port", True, "where a number belongs"),
        ("max-model-len", 0, "out of range"),
        ("max-num-seqs", 10**400, None),
        ("gpu-memory-utilization", 0, "out of range"),
        ("gpu-memory-utilization", 1.5, "out of range"),
        ("gpu-memory-utilization", 85, "out of range"),
        ("gpu-memory-utilization", math.nan, "where a number belongs"),
        ("gpu-memory-utilization", [0.85], "where a number belongs"),
        ("enforce-eager", "true", "where true or false belongs"),
        ("enable-prefix-caching", "false", "where true or false belongs"),
        ("enable-anything", 1, "where true or false belongs"),
        ("dtype", "", "is empty"),
        ("dtype", " ", "is empty"),
        ("dtype", "--trust-remote-code", "read as another option"),
        ("dtype", "a\0b", "control character"),
        ("dtype", "a\ud800", "control character"),
        ("dtype", {1}, "no text and no finite number"),
        ("some-factor", math.inf, "no finite number"),
        ("some-factor", "-1", None),
        ("allowed-origins", [], "the list is empty"),
        ("allowed-origins", ["a", True], "no text and no finite number"),
        ("allowed-origins", ["a", None], "no text and no finite number"),
        ("allowed-origins", ["a", ["b"]], "no text and no finite number"),
        ("allowed-origins", ["a", "--x"], "read as another option"),
    ],
)
def test_a_value_that_the_option_cannot_take_is_refused(name: str, value: object, why: str | None) -> None:
    found = problems_of({name: value})
    if why is None:
        assert found == []
    else:
        assert len(found) == 1 and f"recipe x: engine_args.{name}: " in found[0] and why in found[0]


def test_everything_that_is_wrong_comes_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        engine_argv({"max_model_len": 1, "port": "x", "speculative-config": "{a}", "dtype": "auto"})
    assert [p["class"] for p in caught.value.problems] == ["engine_arg_name", "engine_arg_type", "engine_arg_json"]


@pytest.mark.parametrize("args", [None, [], "--port 8000", 5])
def test_engine_arguments_that_are_no_mapping_are_refused(args: object) -> None:
    assert "is no mapping" in problems_of(args)[0]


# --- environment ------------------------------------------------------------------------------------------------------------------------


def test_an_environment_becomes_unquoted_lines() -> None:
    checked, problems = check_environment({"B": "x y=$HOME '\"# ", "A": 1, "GONE": None, "EMPTY": ""}, "x")
    assert problems == []
    assert checked == {"B": "x y=$HOME '\"# ", "A": "1", "GONE": None, "EMPTY": ""}
    text = docker_env_file({name: value for name, value in checked.items() if value is not None})
    assert text == "A=1\nB=x y=$HOME '\"# \nEMPTY=\n"


@pytest.mark.parametrize(
    ("name", "value", "class_"),
    [
        ("A B", "x", "environment_name"),
        ("1A", "x", "environment_name"),
        ("VLLM_API_KEY=one-line", "x", "environment_name"),
        ("VLLM_API_KEY=one-line", None, "environment_name"),
        ("HF_TOKEN=one-line=", True, "environment_name"),
        ("HF_TOKEN one-line", ["x"], "environment_name"),
        ("HF_TOKEN: one-line", "x", "environment_name"),
        ("A=B", "x", "environment_name"),
        ("#A", "x", "environment_name"),
        ("", "x", "environment_name"),
        (1, "x", "environment_name"),
        ("A", "one-line\nVLLM_API_KEY=two", "environment_value"),
        ("A", "one-line\r", "environment_value"),
        ("A", "one-line\0", "environment_value"),
        ("A", "one-line" * 8200, "environment_value"),
        ("A", True, "environment_type"),
        ("A", 0.1, "environment_type"),
        ("A", ["one-line"], "environment_type"),
        ("VLLM_API_KEY", "one-line", "environment_secret"),
        ("HF_TOKEN", "one-line", "environment_secret"),
        ("HUGGING_FACE_HUB_TOKEN", "one-line", "environment_secret"),
    ],
)
def test_a_variable_that_no_line_can_hold_is_refused_and_not_shown(name: object, value: object, class_: str) -> None:
    (found,) = check_environment({name: value}, "x")[1]
    assert found["class"] == class_
    assert "one-line" not in str(found)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("A=b=c", 'x: "A" (cut; 5 characters in all) is no'),
        ("=b", 'x: "" (cut; 2 characters in all) is no'),
        ("1A", 'x: "1A" is no'),
        (1, "x: 1 is no"),
    ],
)
def test_a_bad_name_is_shown_up_to_where_a_value_may_start(name: object, shown: str) -> None:
    (found,) = check_environment({name: "y"}, "x")[1]
    assert found["evidence"].startswith(shown)


@pytest.mark.parametrize(
    "args",
    [
        "--api-key hush",
        ["--api-key", "hush"],
        {"speculative-config": '{"key": "hush"'},
        {"speculative-config": '{"hush": 1, "a=hush": 1, "a=hush": 2}'},
        {"speculative-config": '"hush"'},
        {"speculative-config": '["hush"]'},
    ],
)
def test_malformed_arguments_are_measured_not_quoted(args: object) -> None:
    (found,) = problems_of(args)
    assert "hush" not in found


def test_a_file_holds_the_key_but_no_second_line() -> None:
    assert docker_env_file({"VLLM_API_KEY": "k"}) == "VLLM_API_KEY=k\n"
    with pytest.raises(ArgumentError):
        docker_env_file({"VLLM_API_KEY": "k\nA=b"})


# --- systemd ----------------------------------------------------------------------------------------------------------------------------


def systemd_words(line: str) -> list[str]:
    """What systemd makes of an ExecStart= value, written after systemd.syntax(7) and systemd.service(5): split, unescape, %%, $$."""
    words, word, quote, i = [], None, "", 0
    while i < len(line):
        c = line[i]
        if not quote and c in " \t":
            if word is not None:
                words.append(word)
                word = None
        elif quote == c:
            quote = ""
        elif not quote and c in "'\"":
            quote, word = c, word or ""
        elif c == "\\":
            i += 1
            if line[i] == "x":
                word, i = (word or "") + chr(int(line[i + 1 : i + 3], 16)), i + 2
            else:
                word = (word or "") + {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"', "'": "'"}[line[i]]
        else:
            assert c not in "\n\0", "a unit file's value ends here"
            assert c != ";" or quote, "systemd would begin another command"
            word = (word or "") + c
        i += 1
    assert not quote
    words += [word] if word is not None else []
    for text in words:
        assert not re.search(r"(?<!%)(%%)*%(?!%)", text), "systemd would expand a specifier"
        assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", text), "systemd would expand a variable"
    return [text.replace("%%", "%").replace("$$", "$") for text in words]


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("--port", "--port"),
        (MTP, r'"{\"method\":\"mtp\",\"num_speculative_tokens\":2}"'),
        ("100%", '"100%%"'),
        ("$HOME", '"$$HOME"'),
        ("a\\b", r'"a\\b"'),
        ("a\nb", r'"a\nb"'),
        ("", '""'),
        (";", '";"'),
        ("it's", '"it\'s"'),
        ("\x01", r'"\x01"'),
        ("{{ x }}", '"{{ x }}"'),
    ],
)
def test_systemd_gets_a_quoted_word(word: str, written: str) -> None:
    assert systemd_exec(["/usr/bin/docker", word]) == f"/usr/bin/docker {written}"
    assert systemd_words(systemd_exec(["/usr/bin/docker", word])) == ["/usr/bin/docker", word]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("%$\\\"'; \n{}x")), max_size=5))
def test_systemd_passes_on_exactly_these_words(words: list[str]) -> None:
    assert systemd_words(systemd_exec(["/bin/x", *words])) == ["/bin/x", *words]


@pytest.mark.parametrize(
    "argv", [[], ["docker"], ["-/bin/x"], ["@/bin/x"], ["/bin/a b"], ["/bin/%n"], ["/bin/$X"], ["/"], ["/bin/x", "a\0"]]
)
def test_systemd_does_not_get_what_it_would_read_differently(argv: list[str]) -> None:
    with pytest.raises(ArgumentError):
        systemd_exec(argv)
