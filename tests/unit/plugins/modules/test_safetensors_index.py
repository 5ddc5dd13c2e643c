# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The module on real files: what it returns, what it writes, and what it never touches."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic_checkpoint as synthetic
from ansible_collections.dgxspark.vllm.plugins.modules import safetensors_index
from safetensors import safe_open
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
MTP = "model_extra_tensors.safetensors"
PRISTINE = ".dgxspark-pristine"
# A whole layer with 4 experts, and two scales: 31 tensors.
LAYER = [tensor.name for tensor in synthetic.source_mtp_tensors(synthetic.Model(experts=4))]
LAYER += [f"mtp.layers.0.self_attn.{part}_proj.weight_scale_inv" for part in "qk"]


def save(folder: Path, name: str, *tensors: str) -> None:
    """A shard written by the library: each tensor has 8 bytes."""
    save_file({tensor: np.zeros(2, np.float32) for tensor in tensors}, folder / name, {"format": "pt"})


def write_index(folder: Path, weight_map: dict[str, Any], **metadata: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, listed, and a file with MTP tensors that the index does not name."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    save(path, S1, "a", "mtp.in_shard")
    save(path, S2, "b")
    save(path, MTP, *LAYER)
    write_index(path, {"a": S1, "b": S2}, total_size=16, total_parameters=5)
    (path / "config.json").write_text('{"text_config": {"mtp_num_hidden_layers": 1, "num_experts": 4}}')
    return path


@pytest.fixture
def run(run_module: Any, folder: Path) -> Any:
    def call(check: bool = False, **args: Any) -> dict[str, Any]:
        result: dict[str, Any] = run_module(safetensors_index.main, {"path": str(folder), **args}, check=check)
        assert {"path", "missing_shards", "unlisted_tensors", "unlisted_files", "duplicates", "mtp_tensors", "counts", "tensors",
                "total_size", "problems", "files", "bytes_read", "mtp_layers", "fast_loader_safe"} <= result.keys()  # fmt: skip
        return result

    return call


def state_of(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file below a folder: content, inode, time of its last change."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if not path.is_dir()}
    return {name: (path.read_bytes(), path.lstat().st_ino, path.lstat().st_mtime_ns) for name, path in files.items()}


def faults(result: dict[str, Any]) -> list[str]:
    return [fault["class"] for fault in result["problems"]]


def test_check_run_check_again_run_again(run: Any, folder: Path) -> None:
    before = state_of(folder)
    predicted = run(check=True)
    assert predicted["changed"] and state_of(folder) == before
    done = run(require_mtp=True)
    assert done["changed"] and done["diff"] == predicted["diff"] and not done["problems"]
    assert (done["files"], done["fast_loader_safe"], done["mtp_layers"]) == (3, True, {"expected": 1, "found": 1})
    headers = [path.read_bytes()[:8] for path in folder.glob("*.safetensors")]
    small = len(before[INDEX][0]) + (folder / "config.json").stat().st_size
    assert done["bytes_read"] == predicted["bytes_read"] == small + sum(8 + int.from_bytes(length, "little") for length in headers)
    (diff,) = done["diff"]
    assert diff["before_header"] == str(folder / INDEX) and "tensors: 2\n" in diff["before"] and "tensors: 34\n" in diff["after"]
    assert len(diff["after"].splitlines()) == 15
    assert done["unlisted_files"] == [MTP] and done["unlisted_tensors"] == ["mtp.in_shard"]
    assert (done["tensors"], done["total_size"], len(done["mtp_tensors"])) == (34, 34 * 8, 20)
    assert done["counts"] == {
        "missing_shards": 0, "unlisted_tensors": 1, "unlisted_files": 1, "unlisted_file_tensors": 31, "duplicates": 0, "corrected": 0,
        "mtp_tensors": 32,
    }  # fmt: skip
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"] == {"total_size": 272, "total_parameters": 5}
    # What the library finds in each file is what the index says of it.
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as shard:
            assert set(shard.keys()) == {tensor for tensor, name in index["weight_map"].items() if name == path.name}
    after = state_of(folder)
    assert after.keys() - before.keys() == {f"{PRISTINE}/{INDEX}"} and after[f"{PRISTINE}/{INDEX}"][0] == before[INDEX][0]
    for again in (run(check=True), run(), run(state="checked", require_mtp=True)):
        assert not again["changed"] and not again["diff"] and not again["problems"] and not again["unlisted_files"]
    assert state_of(folder) == after


def test_checked_changes_nothing_and_fails_on_what_present_would_mend(run: Any, folder: Path) -> None:
    before = state_of(folder)
    result = run(state="checked")
    assert result["failed"] and faults(result) == ["unlisted_tensor", "unlisted_file", "wrong_total_size"]
    assert state_of(folder) == before
    for text in (MTP, "31 tensors", "mtp.in_shard", "state=present", "total_size is 16, the tensors have 272 bytes"):
        assert text in result["msg"]


def test_a_wrong_total_size_alone_is_a_warning(run: Any, folder: Path) -> None:
    run()
    index = json.loads((folder / INDEX).read_text())
    write_index(folder, index["weight_map"], total_size=sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    result = run(state="checked")
    assert not result.get("failed") and faults(result) == ["wrong_total_size"]
    assert run()["changed"] and json.loads((folder / INDEX).read_text())["metadata"]["total_size"] == 272


def damage(folder: Path, what: str) -> None:
    """One fault in an otherwise good folder."""
    shard = folder / S2
    index = {"a": S1, "b": S2}
    match what:
        case "missing shard":
            shard.unlink()
        case "truncated":
            os.truncate(shard, shard.stat().st_size - 3)
        case "trailing":
            shard.write_bytes(shard.read_bytes() + b"12345678")
        case "empty":
            shard.write_bytes(b"")
        case "never written":
            shard.write_bytes(bytes(1000))
        case "lfs":
            shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 4976698672\n")
        case "html":
            shard.write_text("<!DOCTYPE html>")
        case "duplicate":
            save(folder, "copy.safetensors", "b")
        case "broken link":
            shard.unlink()
            shard.symlink_to("../../blobs/0123")
        case "lost tensor":
            write_index(folder, {**index, "lm_head.weight": S2})
        case "traversal":
            write_index(folder, {**index, "b": "../../etc/passwd"})
        case "number":
            write_index(folder, {**index, "b": 5})
        case "key twice":
            (folder / INDEX).write_text(f'{{"weight_map": {{"a": "{S1}", "b": "{S2}", "b": "{S1}"}}}}')
        case "bom":
            (folder / INDEX).write_bytes(b"\xef\xbb\xbf" + (folder / INDEX).read_bytes())
        case "cut index":
            os.truncate(folder / INDEX, 40)
        case "index a list":
            (folder / INDEX).write_text("[]")
        case "index a folder":
            (folder / INDEX).unlink()
            (folder / INDEX).mkdir()
        case "index a broken link":
            (folder / INDEX).unlink()
            (folder / INDEX).symlink_to("../../blobs/abcd")
        case "index a fifo":
            (folder / INDEX).unlink()
            os.mkfifo(folder / INDEX)
        case "shard a folder":
            (folder / "x.safetensors").mkdir()
        case "odd file name":
            save(folder, "new\nline.safetensors", "c")
        case "file name not utf-8":
            (folder / os.fsdecode(b"\xff.safetensors")).write_bytes((folder / S1).read_bytes())
        case "fp8 without scales":
            raw = json.dumps({"x.weight": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}}).encode()
            (folder / "x.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"1234")


@pytest.mark.parametrize(
    ("what", "class_", "text"),
    [
        ("missing shard", "missing_shard", S2),
        ("truncated", "shard_truncated", "3 bytes missing"),
        ("trailing", "shard_trailing_bytes", "8 trailing bytes"),
        ("empty", "shard_empty", S2),
        ("never written", "shard_header_length_zero", S2),
        ("lfs", "git_lfs_pointer", "4976698672"),
        ("html", "text_page", "HTML"),
        ("duplicate", "duplicate_tensor", f"b in copy.safetensors and {S2} (the index names {S2})"),
        ("broken link", "shard_broken_link", "../../blobs/0123"),
        ("lost tensor", "lost_tensor", "lm_head.weight"),
        ("traversal", "index_bad_file_name", 'b -> "../../etc/passwd"'),
        ("number", "index_bad_file_name", "b -> 5"),
        ("key twice", "index_duplicate_keys", "twice: b"),
        ("bom", "index_not_json", "BOM"),
        ("cut index", "index_not_json", INDEX),
        ("index a list", "index_not_object", INDEX),
        ("index a folder", "index_not_a_file", INDEX),
        ("index a broken link", "index_broken_link", "../../blobs/abcd"),
        ("index a fifo", "index_not_a_file", INDEX),
        ("shard a folder", "shard_not_a_file", "x.safetensors"),
        ("odd file name", "bad_file_name", "new\\nline"),
        ("file name not utf-8", "bad_file_name", "\\udcff"),
        ("fp8 without scales", "fp8_scale_missing", "x.weight"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("state", ["present", "checked"])
def test_whatever_has_no_single_right_answer_fails_and_changes_nothing(
    run: Any, folder: Path, state: str, what: str, class_: str, text: str
) -> None:
    damage(folder, what)
    before = sorted((path.name, path.lstat().st_ino, path.lstat().st_mtime_ns) for path in folder.iterdir())
    result = run(state=state)
    assert result["failed"] and class_ in faults(result) and not result.get("changed")
    assert text in result["msg"] and "remedy:" in result["msg"] and "Traceback" not in result["msg"]
    assert sorted((path.name, path.lstat().st_ino, path.lstat().st_mtime_ns) for path in folder.iterdir()) == before
    assert run(state=state, check=True)["failed"]
    if what == "missing shard":
        assert result["missing_shards"] == [S2]
    else:
        assert result["missing_shards"] == []


def test_all_problems_at_once(run: Any, folder: Path) -> None:
    for what in ("lost tensor", "truncated", "odd file name", "fp8 without scales"):
        damage(folder, what)
    damage(folder, "duplicate")
    (folder / S1).unlink()
    result = run()
    # With its shard cut, the header of lm_head.weight cannot be read: the damage is said once.
    assert set(faults(result)) == {
        "shard_truncated", "bad_file_name", "fp8_scale_missing", "missing_shard", "format_missing",
    }  # fmt: skip
    assert result["msg"].index("ERROR") < result["msg"].index("WARNING format_missing")


@pytest.mark.parametrize("require", [False, True])
def test_an_mtp_layer_that_is_not_whole(run: Any, folder: Path, require: bool) -> None:
    save(folder, MTP, *(name for name in LAYER if "up_proj" not in name or "experts.2" not in name))
    result = run(require_mtp=require)
    assert faults(result) == ["mtp_incomplete"] and result.get("failed", False) is require
    assert "promises 1 MTP layer (text_config.mtp_num_hidden_layers)" in result["problems"][0]["evidence"]
    assert "layer 0 without mlp.experts.2.up_proj" in result["problems"][0]["evidence"]


@pytest.mark.parametrize("require", [False, True])
def test_promised_mtp_without_tensors(run: Any, folder: Path, require: bool) -> None:
    (folder / MTP).unlink()
    save(folder, S1, "a")
    result = run(require_mtp=require)
    assert faults(result) == ["mtp_missing"] and result.get("failed", False) is require
    assert "text_config.mtp_num_hidden_layers" in result["problems"][0]["evidence"]
    if not require:
        assert not result["changed"] and "mtp_missing" in str(result["warnings"])


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "", None])
def test_a_config_that_cannot_be_read_is_at_most_a_warning(run: Any, folder: Path, text: str | None) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text.encode("latin-1"))
    result = run(require_mtp=True)
    assert not result.get("failed") and result["changed"]
    assert [name.split("_")[0] for name in faults(result)] == ([] if text is None else ["config"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [('"secret"', "a string"), ('["secret"]', "an array"), ("4711", "a number"), ("true", "a boolean"), ("null", "null")],
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_what_is_no_object_is_not_quoted_as_a_link_may_lead_to_a_secret(
    run: Any, folder: Path, tmp_path: Path, name: str, text: str, kind: str
) -> None:
    (folder / name).unlink()
    secret = tmp_path / "elsewhere"
    secret.write_text(text)
    (folder / name).symlink_to(secret)
    result = run()
    (fault,) = [fault for fault in result["problems"] if fault["class"].endswith("_not_object")]
    assert fault["evidence"].endswith(f"but {kind}")
    assert "secret" not in str(result) and "4711" not in str(result)


def test_one_file_needs_no_index_and_several_get_one(run: Any, folder: Path) -> None:
    for name in (S1, S2, MTP, INDEX):
        (folder / name).unlink()
    (folder / "config.json").unlink()
    save(folder, "model.safetensors", "a", "mtp.x")
    for state in ("present", "checked"):
        result = run(state=state, require_mtp=True)
        assert not result["changed"] and not result["problems"] and result["tensors"] == 2
    save(folder, "mtp.safetensors", "mtp.y")
    assert faults(run(state="checked")) == ["missing_index"]
    result = run()
    assert result["changed"] and result["diff"][0]["before"] == "" and stat.S_IMODE((folder / INDEX).stat().st_mode) == 0o644
    assert json.loads((folder / INDEX).read_text()) == {
        "metadata": {"total_size": 24},
        "weight_map": {"a": "model.safetensors", "mtp.x": "model.safetensors", "mtp.y": "mtp.safetensors"},
    }
    assert not run()["changed"]


def test_one_file_of_several_is_an_incomplete_download(run: Any, folder: Path) -> None:
    for name in (S2, MTP, INDEX):
        (folder / name).unlink()
    result = run()
    assert result["failed"] and result["missing_shards"] == [S2]


@pytest.mark.parametrize("create", [True, False])
def test_a_path_that_is_no_folder(run: Any, folder: Path, create: bool) -> None:
    path = folder / "nothing"
    if create:
        path.write_text("")
    result = run(path=str(path))
    assert result["failed"] and faults(result) == ["folder_unreadable"] and str(path) in result["msg"]


def test_an_empty_folder(run: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert faults(run(path=str(tmp_path / "empty"))) == ["no_shards"]


@pytest.mark.parametrize("name", ["../x.json", "/etc/passwd", "", ".", ".."])
def test_the_index_stays_in_the_folder(run: Any, name: str) -> None:
    assert faults(run(index_name=name)) == ["bad_index_name"]


def test_another_name_of_the_index(run: Any, folder: Path) -> None:
    (folder / INDEX).rename(folder / "other.json")
    assert run(index_name="other.json")["changed"]
    assert not (folder / INDEX).exists() and len(json.loads((folder / "other.json").read_text())["weight_map"]) == 34


def test_files_that_are_not_part_of_the_checkpoint(run: Any, folder: Path) -> None:
    save(folder, "consolidated.safetensors", "layers.0.x")
    save(folder, "adapter_model.safetensors", "lora.a")
    save(folder, ".unfinished.safetensors", "c")
    (folder / "x.safetensors.incomplete").write_bytes(b"")
    (folder / "sub").mkdir()
    save(folder / "sub", "y.safetensors", "d")
    result = run()
    assert faults(result) == ["foreign_file"] and result["tensors"] == 34
    # Unless the index says so.
    index = json.loads((folder / INDEX).read_text())
    write_index(folder, {**index["weight_map"], "layers.0.x": "consolidated.safetensors"})
    assert run()["tensors"] == 35


# ------------------------------------------------------------------------------------------------------- duplicates, source, links


def test_tensors_in_several_files(run: Any, folder: Path) -> None:
    run()
    save(folder, "zz.safetensors", "b", "c")
    before = state_of(folder)
    for state in ("present", "checked"):
        refused = run(state=state)
        assert refused["failed"] and faults(refused)[0] == "duplicate_tensor" and not refused["fast_loader_safe"]
        assert refused["duplicates"] == {"b": [S2, "zz.safetensors"]} and "duplicates=last_wins" in refused["msg"]
    looked = run(state="checked", duplicates="last_wins")
    assert looked["failed"] and "not_last_owner" in faults(looked) and state_of(folder) == before
    predicted, done = run(check=True, duplicates="last_wins"), run(duplicates="last_wins")
    assert predicted["changed"] and done["changed"] and done["diff"] == predicted["diff"]
    assert "corrected: 1\n  b: zz.safetensors\nadded: 1\n  c: zz.safetensors\n" in done["diff"][0]["after"]
    assert faults(done) == ["duplicate_tensor"] and "fastsafetensors" in str(done["warnings"])
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    assert weight_map["b"] == weight_map["c"] == "zz.safetensors" and weight_map["a"] == S1
    again = run(duplicates="last_wins")
    assert not again["changed"] and not again["fast_loader_safe"] and faults(again) == ["duplicate_tensor"]
    assert run()["failed"]  # not without being asked


def test_what_was_lost_of_the_source(run: Any, folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save(source, "model.safetensors", "a", "b", "lm_head.weight")
    before = state_of(folder)
    result = run(source=str(source))
    assert result["failed"] and faults(result) == ["lost_from_source"] and "lm_head.weight" in result["msg"]
    assert state_of(folder) == before and run(source=str(source), state="checked")["failed"]
    save(source, "model.safetensors", "a", "b")
    assert run(source=str(source))["changed"]
    os.truncate(source / "model.safetensors", 40)
    result = run(source=str(source))
    assert result["failed"] and f"source {source}: model.safetensors is truncated" in result["msg"]
    assert faults(run(source=str(tmp_path / "absent"))) == ["folder_unreadable"]


def test_what_a_container_sees(run: Any, folder: Path, tmp_path: Path) -> None:
    """A snapshot in a cache: whole on this machine, empty when it is mounted alone."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(repository / "blobs" / path.name[:12])
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name[:12]}")
    before = state_of(repository)
    for state in ("present", "checked"):
        result = run(path=str(snapshot), visible_root=str(snapshot), state=state)
        assert result["failed"] and "link_leaves_root" in faults(result)
        assert f"Mount {repository} instead and serve snapshots/0123 below it" in result["msg"]
        for name in (S1, S2, INDEX, "config.json"):
            assert f"{name} -> ../../blobs/{name[:12]}" in result["msg"]
    assert state_of(repository) == before
    assert run(path=str(snapshot), visible_root=str(repository))["changed"]
    assert run(path=str(snapshot), visible_root=str(folder))["problems"][0]["class"] == "not_in_visible_root"
    # Absolute links want the very same path.
    (snapshot / S1).unlink()
    (snapshot / S1).symlink_to(repository / "blobs" / S1[:12])
    result = run(path=str(snapshot), visible_root=str(repository))
    assert result["failed"] and f"mount {repository} under the very same path" in result["msg"]
    assert not run(path=str(snapshot), visible_root=str(repository), visible_at=str(repository)).get("failed")
    assert faults(run(visible_at="model")) == ["bad_visible_at"]


# ------------------------------------------------------------------------------------------------------------------ the write


def test_the_blob_of_a_cache_stays_as_it_is(run: Any, folder: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in (S1, S2, MTP, INDEX):
        (folder / name).rename(blobs / name[:12])
        (folder / name).symlink_to(f"../blobs/{name[:12]}")
    (blobs / INDEX[:12]).chmod(0o640)
    before = state_of(blobs)
    assert run()["changed"]
    assert state_of(blobs) == before
    assert (folder / PRISTINE / INDEX).read_bytes() == before[INDEX[:12]][0] and not (folder / PRISTINE / INDEX).is_symlink()
    index = folder / INDEX
    assert not index.is_symlink() and stat.S_IMODE(index.stat().st_mode) == 0o640 and (folder / S1).is_symlink()
    assert not run()["changed"]


def test_a_hard_linked_index_is_not_written_through(run: Any, folder: Path, tmp_path: Path) -> None:
    os.link(folder / INDEX, tmp_path / "source.json")
    before = (tmp_path / "source.json").read_bytes()
    assert run()["changed"] and (tmp_path / "source.json").read_bytes() == before


def test_a_folder_that_cannot_be_written(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    before = state_of(folder)
    monkeypatch.setattr("os.fsync", full)
    for _ in range(2):
        result = run()
        assert result["failed"] and faults(result) == ["cannot_write"] and "No space left" in result["msg"]
        assert state_of(folder) == before


KILLED = """
import os, signal, sys
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dgxspark.vllm.plugins.modules import safetensors_index
real, left = getattr(os, sys.argv[2]), [int(sys.argv[3])]
def killing(*args):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return real(*args)
setattr(os, sys.argv[2], killing)
with patch_module_args({"path": sys.argv[1]}):
    safetensors_index.main()
"""


@pytest.mark.parametrize(
    ("moment", "earlier", "replaced"),
    [
        ("rename", 0, False),  # before the original is kept
        ("fsync", 1, False),  # it is kept, its folder not yet on disk
        ("rename", 1, False),  # before the index is replaced
        ("fsync", 3, True),  # it is, the folder not yet on disk
    ],
)
def test_killed_at_any_moment_leaves_the_old_index_or_the_new(run: Any, folder: Path, moment: str, earlier: int, replaced: bool) -> None:
    before = state_of(folder)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(folder), moment, str(earlier)]
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    after = state_of(folder)
    assert {name for name in before if after[name] != before[name]} == ({INDEX} if replaced else set())
    # What is left over is hidden, in nobody's way, and the next run does the work.
    assert all(name.startswith(".") for name in after.keys() - before.keys())
    assert after.get(f"{PRISTINE}/{INDEX}", before[INDEX])[0] == before[INDEX][0]
    assert run()["changed"] is not replaced and not run(require_mtp=True)["changed"]
    assert (folder / PRISTINE / INDEX).read_bytes() == before[INDEX][0]
    assert len(json.loads((folder / INDEX).read_text())["weight_map"]) == 34


def test_fifty_thousand_tensors_are_quick(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    files = [f"model-{number:05}-of-00010.safetensors" for number in range(1, 11)]
    for number, name in enumerate(files):
        header = {
            f"model.layers.{number}.mlp.experts.{i}.down_proj.qweight": {
                "dtype": "I32", "shape": [128, 1024], "data_offsets": [i << 19, (i + 1) << 19],
            }
            for i in range(5000)
        }  # fmt: skip
        raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        with (folder / name).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            stream.truncate(8 + len(raw) + (5000 << 19))  # sparse: 2.6 GB each
    started = time.monotonic()
    result = run(path=str(folder))
    # About 1 s; the limit is there for a quadratic loop, not for a busy machine.
    assert time.monotonic() - started < 15
    assert result["changed"] and result["tensors"] == 50_000 and result["total_size"] == 50_000 << 19
    assert len(json.dumps(result)) < 10_000


@pytest.mark.parametrize(
    ("arguments", "class_"),
    [
        ({"path": "/a\0b"}, "bad_path"),
        ({"source": "/a\0b"}, "bad_path"),
        ({"visible_root": "/a\0b"}, "bad_path"),
        ({"visible_at": "/a\0b"}, "bad_visible_at"),
        ({"index_name": "a\0b"}, "bad_index_name"),
        ({"index_name": "a\nb"}, "bad_index_name"),
        ({"index_name": ".dgxspark-snapshot.json"}, "bad_index_name"),
        ({"index_name": "a\0b", "path": "\0", "source": "\0"}, "bad_index_name"),
    ],
)
def test_paths_that_the_system_does_not_take(run: Any, folder: Path, arguments: dict[str, str], class_: str) -> None:
    before = state_of(folder)
    result = run(**arguments)
    assert result["failed"] and faults(result) == [class_, *["bad_path"] * (len(arguments) - 1)] and state_of(folder) == before
    assert result["msg"].replace("\n", "").isprintable() and not any(line.startswith("b") for line in result["msg"].split("\n"))


@pytest.mark.parametrize("levels", [50, 400, 800])
def test_an_index_that_is_nested_deeply_is_refused_and_left_alone(run: Any, folder: Path, levels: int) -> None:
    (folder / INDEX).write_text((folder / INDEX).read_text()[:-1] + f', "x": {"[" * levels}{"]" * levels}}}')
    before = state_of(folder)
    result = run()
    assert result["failed"] and faults(result) == ["index_nested"] and state_of(folder) == before


@pytest.mark.parametrize("names", [1_000, 3_000])
def test_numbers_in_file_names_do_not_exhaust_memory(run: Any, tmp_path: Path, names: int) -> None:
    (tmp_path / "many").mkdir()
    for number in range(names):
        (tmp_path / "many" / f"a{number}-00001-of-99999.safetensors").touch()
    result = run(path=str(tmp_path / "many"))
    assert result["failed"] and result["counts"]["missing_shards"] == 100_000 and len(result["missing_shards"]) == 20


@pytest.mark.parametrize(("path", "good"), [("/a", True), ("/ä", True), (os.fsdecode(b"/\xff"), True), ("/a\0", False), ("/\ud800", False)])
def test_texts_that_are_paths(path: str, good: bool) -> None:
    assert safetensors_index.is_path(path) is good
