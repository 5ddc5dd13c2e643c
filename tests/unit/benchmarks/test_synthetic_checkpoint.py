# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The synthetic checkpoints: sound for the library, with the real names, counts and proportions."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import synthetic_checkpoint as synthetic
from safetensors import deserialize

INDEX = synthetic.INDEX_NAME


def contents(folder: Path) -> dict[str, tuple[str, str, tuple[int, ...], bytes]]:
    """Every tensor as the library reads it: file, dtype, shape, bytes."""
    return {
        name: (path.name, entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in deserialize(path.read_bytes())
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    synthetic.write_source(folder / "source", 2_000_000, hidden=256, shared_ffn=136)
    synthetic.write_donor(folder / "donor", folder / "source", experts=True)
    return folder / "source", folder / "donor"


def test_the_index_lists_all_tensors_but_those_of_the_mtp_file(pair: tuple[Path, Path]) -> None:
    for folder, extra in zip(pair, ({synthetic.MTP_NAME}, set()), strict=True):
        found = contents(folder)
        index = json.loads((folder / INDEX).read_text())
        listed = {name: entry for name, entry in found.items() if entry[0] not in extra}
        assert index["weight_map"] == {name: entry[0] for name, entry in listed.items()}
        assert index["metadata"]["total_size"] == sum(len(entry[3]) for entry in listed.values())
        assert all(name.startswith("mtp.") for name in found.keys() - listed.keys())
    assert (pair[0] / synthetic.MTP_NAME).exists()


def test_the_donor_has_the_shared_experts_in_fp8_with_scales_for_blocks(pair: tuple[Path, Path]) -> None:
    source, donor = map(contents, pair)
    shared = [name for name in source if ".mlp.shared_expert." in name and not name.startswith("mtp.")]
    assert len(shared) == 4 * 3 and {source[name][1] for name in shared} == {"BF16"}
    for name in shared:
        _, dtype, shape, data = donor[name]
        assert (dtype, shape) == ("F8_E4M3", source[name][2]) and len(data) == shape[0] * shape[1]
        assert donor[f"{name}_scale_inv"][1:3] == ("BF16", (2, 2))
    # What both have in one type is the same.
    same = [name for name in source if name in donor and donor[name][1] == source[name][1]]
    assert {"lm_head.weight", "model.visual.pos_embed.weight", "mtp.fc.weight"} <= set(same)
    assert all(donor[name][2:] == source[name][2:] for name in same)
    assert len({hashlib.sha256(entry[3]).digest() for entry in source.values() if len(entry[3]) > 32}) > len(source) // 2


def test_the_counts_of_the_real_model() -> None:
    model = synthetic.Model()
    source = [tensor.name for tensor in synthetic.source_tensors(model)]
    mtp = [tensor.name for tensor in synthetic.source_mtp_tensors(model)]
    donor = list(synthetic.donor_tensors(model))
    assert len(set(source)) == len(source) and len(mtp) == 785
    assert sum(name.startswith("model.visual.") for name in source) == 333
    placed, unplaced = Counter[str](), []
    for tensor in donor:
        weight = tensor.name.removesuffix("_scale_inv")
        if tensor.name in source or (weight != tensor.name and ".mlp.shared_expert." in weight and weight in source):
            placed[tensor.dtype if ".mlp.shared_expert." in tensor.name else "other"] += 1
        else:
            unplaced.append(tensor.name)
    assert (placed["F8_E4M3"], placed["BF16"]) == (144, 144)
    assert len(unplaced) == 408 == 36 * 8 + 12 * 8 + 24
    assert sum(name.startswith("mtp.") for name in unplaced) == 24


def test_the_bytes_of_the_real_model() -> None:
    """Published: 71 GB and 4.8 GB for MTP; shared experts 0.906 GB in BF16, 0.453 GB in FP8; the FP8 model 127 GB."""
    model = synthetic.Model()
    source, mtp, donor = (
        list(tensors)
        for tensors in (synthetic.source_tensors(model), synthetic.source_mtp_tensors(model), synthetic.donor_tensors(model, experts=True))
    )
    total = sum(tensor.nbytes for tensor in source)
    assert 66e9 < total < 73e9 and 4.8e9 < sum(tensor.nbytes for tensor in mtp) < 5.1e9
    assert synthetic.source_bytes(model) == total + sum(tensor.nbytes for tensor in mtp)
    assert sum(tensor.nbytes for tensor in source if ".mlp.shared_expert." in tensor.name) == 905_969_664
    assert 120e9 < sum(tensor.nbytes for tensor in donor) < 130e9


@pytest.mark.parametrize(("size", "experts"), [(4_000_000_000, 61), (4_000_000_000, 256), (300_000_000, 61), (76_000_000_000, 256)])
def test_sizes_and_proportions(size: int, experts: int) -> None:
    model = synthetic.model_of_size(size, 48, experts)
    tensors = [*synthetic.source_tensors(model), *synthetic.source_mtp_tensors(model)]
    total = sum(tensor.nbytes for tensor in tensors)
    assert abs(total / size - 1) < 0.01
    parts = Counter[str]()
    for tensor in tensors:
        part = "mtp" if tensor.name.startswith("mtp.") else "shared" if ".mlp.shared_expert." in tensor.name else "rest"
        parts["experts" if part == "rest" and ".experts." in tensor.name else part] += tensor.nbytes
    assert 0.009 < parts["shared"] / total < 0.016 and 0.05 < parts["mtp"] / total < 0.08 and parts["experts"] / total > 0.7
    if experts == 61:
        assert 27_900 < len(tensors) < 28_200
    shards = [sum(tensor.nbytes for tensor in part) for part in synthetic._split(list(synthetic.source_tensors(model)), 14)]
    assert max(shards) < 1.2 * min(shards)


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        synthetic.write_source(tmp_path / name, seed=seed)
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / name).iterdir()} for name in ("a", "b", "c")
    ]
    assert digests[0] == digests[1] and digests[0] != digests[2] and digests[0].keys() == digests[2].keys()
    assert sum(path.stat().st_size for path in (tmp_path / "a").iterdir()) < 2_000_000


def test_without_mtp(tmp_path: Path) -> None:
    synthetic.write_source(tmp_path, mtp_layers=0)
    assert not (tmp_path / synthetic.MTP_NAME).exists()
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("4G", 4 * 10**9), ("1.5G", 15 * 10**8), ("300M", 3 * 10**8), ("10k", 10_000), ("2KiB", 2048), ("1GiB", 2**30), ("77", 77)],
)
def test_sizes_in_words(text: str, size: int) -> None:
    assert synthetic.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "4 gigabytes", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        synthetic.parse_size(text)
