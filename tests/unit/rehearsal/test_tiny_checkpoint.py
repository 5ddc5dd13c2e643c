# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub import commit_of
from safetensors import safe_open

RECIPE = Path(__file__).resolve().parents[3] / "recipes/rehearsal-tiny.yml"


@pytest.fixture
def checkpoint(script: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = tmp_path / "checkpoint"
    monkeypatch.setattr(sys, "argv", ["tiny_checkpoint.py", str(out)])
    script("tiny_checkpoint.py").main()
    return out


def test_is_the_one_that_the_recipe_pins(checkpoint: Path) -> None:
    assert commit_of(checkpoint) == yaml.safe_load(RECIPE.read_text())["checkpoint"]["revision"]


def test_the_folder_is_a_source_of_its_own(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = dict(reversed(line.split("  ")) for line in (checkpoint / "SHA256SUMS").read_text().splitlines())
    assert listed == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in checkpoint.iterdir() if p.name != "SHA256SUMS"}


def test_safetensors_reads_it_and_the_index_does_not_list_the_mtp_layer(checkpoint: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    total = 0
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118 -- not a dict
                found[name] = path.name
                part = file.get_slice(name)
                size = 2
                for extent in part.get_shape():
                    size *= extent
                total += size if not name.startswith("mtp.") else 0
    unlisted = {name: file for name, file in found.items() if name not in index["weight_map"]}
    assert unlisted
    assert all(name.startswith("mtp.") for name in unlisted)
    assert set(unlisted.values()) == {"model_extra_tensors.safetensors"}
    assert index["metadata"]["total_size"] == total
    assert {name: file for name, file in found.items() if name not in unlisted} == index["weight_map"]


def test_tokenizer_covers_every_id(checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    ids = sorted([*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])])
    assert ids == list(range(json.loads((checkpoint / "config.json").read_text())["text_config"]["vocab_size"]))


def test_an_interrupted_run_leaves_the_old_one(script: Callable[[str], Any], checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (checkpoint / "SHA256SUMS").read_bytes()
    module = script("tiny_checkpoint.py")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_safetensors", interrupted)
    monkeypatch.setattr(sys, "argv", ["tiny_checkpoint.py", str(checkpoint)])
    with pytest.raises(KeyboardInterrupt):
        module.main()
    assert (checkpoint / "SHA256SUMS").read_bytes() == before
