# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A checkpoint's folder as it is read, and its index as it is replaced."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import synthetic_checkpoint as synthetic
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_compare import compare
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_header import BadFile, Header, Tensor
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_index import (
    INDEX_NAME,
    PRISTINE,
    SNAPSHOT,
    Checkpoint,
    index_text,
    is_shard_name,
    parse_index,
    read_checkpoint,
    replace_index,
)

S1, S2 = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2))


@pytest.mark.parametrize(
    ("raw", "class_", "text"),
    [
        (b"", "index_not_json", "empty"),
        (b"[]", "index_not_object", "an array"),
        (b'"x"', "index_not_object", "a string"),
        (b"null", "index_not_object", "null"),
        (b"{}", "index_bad_weight_map", "has no weight_map"),
        (b'{"metadata":{"total_size":1}}', "index_bad_weight_map", "has no weight_map"),
        (b'{"weight_map":[]}', "index_bad_weight_map", "[]"),
        (b'{"weight_map":{}}', "index_bad_weight_map", "{}"),
        (b'{"weight_map":null}', "index_bad_weight_map", "null"),
        (b'{"weight_map":"x"}', "index_bad_weight_map", '"x"'),
        (b'\xef\xbb\xbf{"weight_map":{"a":"x.safetensors"}}', "index_not_json", "BOM"),
        ('{"weight_map":{}}'.encode("utf-16"), "index_not_json", "not UTF-8"),
        (b'{"weight_map":{"a":"x.safetensors"},}', "index_not_json", "line 1 column"),
        (b'{"weight_map":{"a":"x.safetensors"}', "index_not_json", "line 1 column"),
        (b'{"weight_map":{"a":"x.safetensors"}} x', "index_not_json", "Extra data"),
        (b'{"weight_map":{"a\xff":"x.safetensors"}}', "index_not_json", "not UTF-8"),
        (b"{'weight_map':{}}", "index_not_json", "double quotes"),
        (b'{"metadata":{"x":NaN},"weight_map":{}}', "index_not_json", "NaN"),
        (b"[" * 100_000, "index_not_json", "not usable JSON"),
        (b"<html>429</html>", "index_not_json", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7654321\n", "git_lfs_pointer", "7654321"),
    ],
)  # fmt: skip
def test_an_index_of_which_nothing_can_be_made(raw: bytes, class_: str, text: str) -> None:
    with pytest.raises(BadFile) as refusal:
        parse_index(raw)
    assert [p["class"] for p in refusal.value.problems] == [class_]
    assert text in refusal.value.problems[0]["evidence"]
    assert "index" in refusal.value.problems[0]["evidence"]


@pytest.mark.parametrize(
    ("document", "class_", "text"),
    [
        ('{"weight_map":{"a":"%s","a":"%s"}}', "index_duplicate_keys", "twice: a"),
        ('{"weight_map":{"a":"%s"},"weight_map":{"a":"%s"}}', "index_duplicate_keys", "twice: weight_map"),
        ('{"metadata":{"k":"%s","k":"%s"},"weight_map":{"a":"model-00001-of-00003.safetensors"}}', "index_duplicate_keys", "twice: k"),
    ],
)
def test_keys_that_are_written_twice(document: str, class_: str, text: str) -> None:
    for other in (S1, S2):
        _, problems = parse_index((document % (S1, other)).encode())
        assert [p["class"] for p in problems] == [class_] and text in problems[0]["evidence"]


@pytest.mark.parametrize("metadata", [[], "x", 5, True])
def test_metadata_that_is_no_object(metadata: Any) -> None:
    index, problems = parse_index(json.dumps({"metadata": metadata, "weight_map": {"a": S1}}).encode())
    assert [p["class"] for p in problems] == ["index_bad_metadata"] and index.weight_map == {"a": S1}


@pytest.mark.parametrize(
    "value",
    [
        "../../etc/passwd", "../x.safetensors", "/etc/shadow", "/x.safetensors", "sub/dir.safetensors", "./x.safetensors",
        "..\\x.safetensors", "C:\\x.safetensors", "model.safetensors\0", "model\0.safetensors", "", ".safetensors", "..safetensors",
        ".hidden.safetensors", "model.bin", "model.safetensors.bak", "model.SAFETENSORS", "model.safetensors ",
        "line\nbreak.safetensors", 5, 1.5, True, None, [], ["x.safetensors"], {"f": "x.safetensors"},
    ],
)  # fmt: skip
def test_entries_that_are_no_bare_file_name_are_rejected_by_tensor(value: Any) -> None:
    assert not is_shard_name(value)
    found = Checkpoint(headers={S1: Header(S1, dict.fromkeys(("a", "evil.weight"), Tensor("U8", (0,), 0, 0)), {"format": "pt"}, 8, 8)})
    found.index_exists = True
    found.index, found.problems = parse_index(json.dumps({"weight_map": {"a": S1, "evil.weight": value}}).encode())
    report = compare(found)
    (fault,) = report.problems
    assert fault["class"] == "index_bad_file_name" and report.mended is None
    assert f"evil.weight -> {json.dumps(value)}" in fault["evidence"]
    # The tensor is not said to be unlisted on top of that.
    assert not report.unlisted_tensors and not report.missing_shards


@pytest.mark.parametrize("value", ["model.safetensors", "a.safetensors", S1, "modèle 1.safetensors", "x..safetensors", "-x.safetensors"])
def test_bare_file_names(value: str) -> None:
    assert is_shard_name(value)


def test_many_odd_entries_are_one_problem() -> None:
    _, problems = parse_index(json.dumps({"weight_map": {f"t{number}": "../x" for number in range(1000)}}).encode())
    assert len(problems) == 1 and "and 990 more" in problems[0]["evidence"]


# -------------------------------------------------------------------------------------------------------------------- the folder


def test_only_headers_and_json_are_read(tmp_path: Path) -> None:
    synthetic.write_source(tmp_path, 3_000_000)
    lengths = [path.read_bytes()[:8] for path in tmp_path.glob("*.safetensors")]
    headers = sum(8 + int.from_bytes(length, "little") for length in lengths)
    small = sum((tmp_path / name).stat().st_size for name in (INDEX_NAME, "config.json"))
    found = read_checkpoint(tmp_path)
    assert found.bytes_read == headers + small and len(found.headers) == len(lengths) == 4 and not found.problems


@pytest.mark.parametrize(
    ("content", "count"),
    [(b"", 0), (b"\1", 1), (bytes(100), 8), (b"<html>" + b" " * 5000, 1024), ((50).to_bytes(8, "little") + b"[" * 50 + b"x" * 9000, 58)],
)
def test_what_was_read_of_damaged_files_counts_too(tmp_path: Path, content: bytes, count: int) -> None:
    (tmp_path / S1).write_bytes(content)
    found = read_checkpoint(tmp_path)
    assert list(found.damaged) == [S1] and found.bytes_read == count


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_json_file_without_a_byte_is_an_interrupted_download(tmp_path: Path, name: str) -> None:
    synthetic.write_source(tmp_path)
    assert not read_checkpoint(tmp_path).problems
    (tmp_path / name).write_bytes(b"")
    (tmp_path / "merges.txt").write_bytes(b"")  # may be empty
    (fault,) = read_checkpoint(tmp_path).problems
    assert fault["class"] == "file_empty" and fault["severity"] == "error" and name in fault["evidence"]


@pytest.mark.parametrize(
    ("name", "class_"),
    [
        ("tokenizer.json", "file_broken_link"),
        ("chat_template.jinja", "file_broken_link"),
        ("config.json", "config_broken_link"),
        (INDEX_NAME, "index_broken_link"),
        (S1, "shard_broken_link"),
        ("README.md", ""),
        (".cache.json", ""),
    ],
)
def test_links_that_lead_nowhere(tmp_path: Path, name: str, class_: str) -> None:
    synthetic.write_source(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("../../blobs/0123abcd")
    found = read_checkpoint(tmp_path)
    faults = [*found.problems, *found.damaged.get(name, [])]
    assert [fault["class"] for fault in faults] == ([class_] if class_ else [])
    if class_:
        assert "../../blobs/0123abcd" in faults[0]["evidence"] and "Hugging Face cache" in faults[0]["evidence"]


# ------------------------------------------------------------------------------------------------------------ the index, replaced


def snapshot_says(folder: Path, content: bytes) -> None:
    """A finished snapshot whose index has this content."""
    files = {INDEX_NAME: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
    (folder / SNAPSHOT).write_text(json.dumps({"format": 1, "files": files}))


@pytest.mark.parametrize("with_manifest", [False, True])
def test_the_first_original_is_kept_through_all_later_runs(tmp_path: Path, with_manifest: bool) -> None:
    index, kept = tmp_path / INDEX_NAME, tmp_path / PRISTINE / INDEX_NAME
    index.write_bytes(b"original")
    index.chmod(0o640)
    if with_manifest:
        snapshot_says(tmp_path, b"original")
    for number in range(3):
        replace_index(tmp_path, INDEX_NAME, {"weight_map": {"a": number}})
        assert kept.read_bytes() == b"original" and json.loads(index.read_text()) == {"weight_map": {"a": number}}
        assert stat.S_IMODE(index.stat().st_mode) == stat.S_IMODE(kept.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path / PRISTINE)) == [INDEX_NAME]


def test_a_newer_snapshot_brings_a_newer_original(tmp_path: Path) -> None:
    index, kept = tmp_path / INDEX_NAME, tmp_path / PRISTINE / INDEX_NAME
    index.write_bytes(b"old")
    snapshot_says(tmp_path, b"old")
    replace_index(tmp_path, INDEX_NAME, {})
    index.write_bytes(b"new")
    snapshot_says(tmp_path, b"new")
    replace_index(tmp_path, INDEX_NAME, {})
    assert kept.read_bytes() == b"new"
    # What is neither the kept one nor the snapshot's is somebody's own work.
    index.write_bytes(b"edited")
    replace_index(tmp_path, INDEX_NAME, {})
    snapshot_says(tmp_path, b"another")
    replace_index(tmp_path, INDEX_NAME, {})
    assert kept.read_bytes() == b"new"


@pytest.mark.parametrize("manifest", ["", "[]", '{"files": []}', json.dumps({"files": {INDEX_NAME: 5}}), "{}"])
def test_a_manifest_that_says_nothing(tmp_path: Path, manifest: str) -> None:
    (tmp_path / INDEX_NAME).write_bytes(b"old")
    (tmp_path / SNAPSHOT).write_text(manifest)
    replace_index(tmp_path, INDEX_NAME, {})
    replace_index(tmp_path, INDEX_NAME, {"again": 1})
    assert (tmp_path / PRISTINE / INDEX_NAME).read_bytes() == b"old"


def test_without_an_index_there_is_no_original(tmp_path: Path) -> None:
    replace_index(tmp_path, INDEX_NAME, {"a": 1})
    assert os.listdir(tmp_path) == [INDEX_NAME]


@pytest.mark.parametrize("link", ["../../blobs/0a", "../../snapshots/two/{index}", "{absolute}"])
def test_nothing_is_written_through_a_link(tmp_path: Path, link: str) -> None:
    blobs, one, two = tmp_path / "blobs", tmp_path / "snapshots" / "one", tmp_path / "snapshots" / "two"
    for folder in (blobs, one, two):
        folder.mkdir(parents=True)
    (blobs / "0a").write_bytes(b"blob")
    (two / INDEX_NAME).symlink_to("../../blobs/0a")
    (one / INDEX_NAME).symlink_to(link.format(index=INDEX_NAME, absolute=blobs / "0a"))
    before = (blobs / "0a").stat()
    replace_index(one, INDEX_NAME, {"a": 1})
    after = (blobs / "0a").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns) and (blobs / "0a").read_bytes() == b"blob"
    assert not (one / INDEX_NAME).is_symlink() and (two / INDEX_NAME).is_symlink()
    assert (one / PRISTINE / INDEX_NAME).read_bytes() == b"blob" and not (one / PRISTINE / INDEX_NAME).is_symlink()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("levels", [1, 31, 32, 400, 900, 100_000])
def test_an_index_that_could_not_be_written_again_is_refused(opening: str, closing: str, levels: int) -> None:
    raw = f'{{"weight_map":{{"a":"{S1}"}},"x":{opening * levels}{"1" if opening != "[" else ""}{closing * levels}}}'.encode()
    if levels < 32:  # and the object around them
        index, problems = parse_index(raw)
        assert not problems and json.loads(index_text(index.document)) == json.loads(raw)
        return
    with pytest.raises(BadFile, match="nested") as refusal:
        parse_index(raw)
    assert [fault["class"] for fault in refusal.value.problems] == ["index_nested" if levels < 1000 else "index_not_json"]


@pytest.mark.parametrize("place", ["metadata", "weight_map"])
def test_an_index_is_refused_wherever_it_is_nested(place: str) -> None:
    document: dict[str, Any] = {"weight_map": {"a": S1}}
    document.setdefault(place, {})["x"] = json.loads("[" * 50 + "]" * 50)
    with pytest.raises(BadFile, match="deeper than 32"):
        parse_index(json.dumps(document).encode())


NO_CONFIG = "so that nothing says which MTP layers there should be"


@pytest.mark.parametrize(
    ("config", "class_", "says"),
    [
        (b"", "config_not_json", f"config.json cannot be used, {NO_CONFIG}"),
        (b"{", "config_not_json", f"config.json cannot be used, {NO_CONFIG}"),
        (b"[]", "config_not_object", f"config.json cannot be used, {NO_CONFIG}"),
        (b'{"a":' + b"[" * 40 + b"]" * 40 + b"}", "config_nested", f"config.json cannot be used, {NO_CONFIG}"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "config_nested", f"config.json cannot be used, {NO_CONFIG}"),
        (None, "", f"there is no config.json, {NO_CONFIG}"),
        (b'{"num_experts": 18446744073709551616}', "config_not_believable", f"a number in config.json is not believable, {NO_CONFIG}"),
        (b'{"text_config": {"mtp_num_hidden_layers": 1000000000000}}', "config_not_believable", f"not believable, {NO_CONFIG}"),
        (b"{}", "", ""),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_mtp_problems_say_that_the_config_says_nothing(tmp_path: Path, config: bytes | None, class_: str, says: str, whole: bool) -> None:
    """whole: no MTP tensors at all, else an incomplete layer."""
    (tmp_path / "x").mkdir()
    synthetic.write_source(tmp_path / "x")
    folder = tmp_path / "x"
    if whole:
        (folder / "model_extra_tensors.safetensors").unlink()
    else:
        raw = (folder / "model_extra_tensors.safetensors").read_bytes()
        (folder / "model_extra_tensors.safetensors").write_bytes(raw.replace(b'"mtp.fc.weight"', b'"mtp.fd.weight"'))
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_bytes(config)
    report = compare(read_checkpoint(folder), require_mtp=True)
    faults = {fault["class"]: fault for fault in report.problems}
    assert faults.keys() == {*([class_] if class_ else []), "mtp_missing" if whole else "mtp_incomplete"}
    assert not class_ or faults[class_]["severity"] == "warning"
    evidence = faults["mtp_missing" if whole else "mtp_incomplete"]["evidence"]
    assert says in evidence and (NO_CONFIG in evidence) == bool(says)


@pytest.mark.parametrize("kind", ["FIFO", "folder", "deep", "long number", "huge"])
@pytest.mark.parametrize("place", [SNAPSHOT, f"{PRISTINE}/{INDEX_NAME}"])
def test_odd_files_beside_an_index_that_is_replaced(tmp_path: Path, place: str, kind: str) -> None:
    (tmp_path / INDEX_NAME).write_bytes(b"old")
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "huge":
            path.touch()
            os.truncate(path, 1 << 40)
        case _:
            path.write_bytes(b"[" * 100_000 if kind == "deep" else b"9" * 5_000)
    if place != SNAPSHOT and kind == "folder":
        with pytest.raises(OSError, match="directory"):
            replace_index(tmp_path, INDEX_NAME, {})
        assert (tmp_path / INDEX_NAME).read_bytes() == b"old"
        return
    before = path.lstat()
    replace_index(tmp_path, INDEX_NAME, {})
    assert (tmp_path / INDEX_NAME).read_text() == "{}\n"
    if place == SNAPSHOT:
        assert path.lstat().st_ino == before.st_ino and (tmp_path / PRISTINE / INDEX_NAME).read_bytes() == b"old"
    elif kind in ("FIFO", "huge"):
        assert path.read_bytes() == b"old"


def test_the_original_is_not_kept_through_a_link(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / INDEX_NAME).write_bytes(b"old")
    (folder / PRISTINE).symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link"):
        replace_index(folder, INDEX_NAME, {})
    assert (folder / INDEX_NAME).read_bytes() == b"old" and os.listdir(elsewhere) == []
