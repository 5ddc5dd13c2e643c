# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The header reader, case by case and against the safetensors library itself."""

from __future__ import annotations

import copy
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    BadFile,
    Header,
    Tensor,
    parse_json,
    read_header,
    read_stream,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0a" * 32 + b"\nsize 4976698672\n"


def T(start: Any, end: Any, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [start, end]}


def file_of(header: Any, data: int = 0) -> bytes:
    """A file's bytes. header: JSON value, or the header's bytes; data: how many bytes follow."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + b"\x01" * data


def read(raw: bytes) -> Header:
    return read_stream(io.BytesIO(raw), "x.safetensors", len(raw))


def library_accepts(raw: bytes) -> bool:
    try:
        deserialize(raw)
    except SafetensorError:
        return False
    return True


ONE = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'

REFUSED = {
    # what: (bytes, class, what the evidence says)
    "empty": (b"", "shard_empty", "0 bytes"),
    "under eight bytes": (b"\x01\x02\x03", "shard_too_small", "3 bytes"),
    "a word of text": (b"404", "text_page", "is text"),
    "eight zeros": (bytes(8), "shard_header_length_zero", "header length 0"),
    "reserved, never written": (bytes(4096), "shard_header_length_zero", "4096 bytes"),
    "lfs pointer": (LFS, "git_lfs_pointer", "real file has 4976698672 bytes"),
    "lfs pointer, old address": (LFS.replace(b"git-lfs.github", b"hawser.github"), "git_lfs_pointer", "4976698672"),
    "lfs pointer, CRLF": (LFS.replace(b"\n", b"\r\n"), "git_lfs_pointer", "4976698672"),
    "lfs pointer without size": (LFS[:110], "git_lfs_pointer", "pointer of 110 bytes"),
    "html": (b"<!DOCTYPE html><html><body>401 Unauthorized</body></html>", "text_page", "an HTML page"),
    "html after blanks": (b"\n\n  <html lang='en'>", "text_page", "an HTML page"),
    "html with umlauts, cut in a character": (b"<html>" + "ü".encode() * 600, "text_page", "an HTML page"),
    "json": (b'{"error": "Repository not found"}', "text_page", 'JSON text, not weights; it says: error "Repository not found"'),
    "plain text": (b"Entry not found, sorry", "text_page", "is text"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(64), "foreign_format", "GGUF"),
    "zip": (b"PK\x03\x04\0\0\x08\x08" + bytes(64), "foreign_format", "zip"),
    "pickle": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P", "foreign_format", "pickle"),
    "noise": (b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8" * 8, "shard_header_too_large", "17940646550795321087"),
    "header just too large": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "shard_header_too_large", "100000001"),
    "header past the end": ((5000).to_bytes(8, "little") + b"{" * 52, "shard_header_past_end", "60 bytes, 4948 bytes missing"),
    "only a length": ((1).to_bytes(8, "little"), "shard_header_past_end", "1 byte missing"),
    "cut json": (file_of(b'{"a":'), "shard_header_not_json", "Expecting value"),
    "blank header": (file_of(b"    "), "shard_header_not_json", "Expecting value"),
    "zeros as padding": (file_of(b"{}\0\0"), "shard_header_not_json", "Extra data"),
    "bom": (file_of(b"\xef\xbb\xbf{}"), "shard_header_not_json", "BOM"),
    "nan": (file_of(b'{"__metadata__":{"a":NaN}}'), "shard_header_not_json", "NaN"),
    "infinite": (file_of(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', 4), "shard_header_not_json", "out of range"),
    "number of 5000 digits": (file_of(b'{"a":' + b"9" * 5000 + b"}"), "shard_header_not_json", "digits"),
    "nested too deeply": (file_of(b'{"a":' + b"[" * 100_000), "shard_header_not_json", "nested"),
    "half a surrogate": (file_of(b'{"\\ud800":{' + ONE.encode() + b"}}", 4), "shard_header_not_json", "surrogate"),
    "not utf-8": (file_of(b'{"\xff\xfe":1}'), "shard_header_not_utf8", "0xff at position 2"),
    "array": (file_of([]), "shard_header_not_object", "an array"),
    "string": (file_of("a"), "shard_header_not_object", "a string"),
    "null": (file_of(b"null"), "shard_header_not_object", "null"),
    "truncated": (file_of({"a": T(0, 8, shape=(2,))}, 4), "shard_truncated", "4 bytes missing"),
    "truncated by one": (file_of({"a": T(0, 4), "b": T(4, 8)}, 7), "shard_truncated", "1 byte missing"),
    "all data missing": (file_of({"a": T(0, 4)}), "shard_truncated", "4 bytes missing"),
    "trailing": (file_of({"a": T(0, 4)}, 12), "shard_trailing_bytes", "8 trailing bytes"),
    "trailing by one": (file_of({"a": T(0, 4)}, 5), "shard_trailing_bytes", "1 trailing byte after"),
    "data without tensors": (file_of({}, 4), "shard_trailing_bytes", "4 trailing bytes"),
    "gap at the front": (file_of({"a": T(4, 8)}, 8), "shard_gap", "4 bytes before a"),
    "gap in the middle": (file_of({"a": T(0, 4), "b": T(5, 9)}, 9), "shard_gap", "1 byte before b"),
    "same range": (file_of({"a": T(0, 4), "b": T(0, 4)}, 4), "shard_overlap", "a [0, 4] and b [0, 4]"),
    "overlap": (file_of({"a": T(0, 8, shape=(2,)), "b": T(4, 12, shape=(2,))}, 12), "shard_overlap", "a [0, 8] and b [4, 12]"),
    "inside another": (file_of({"a": T(0, 12, shape=(3,)), "b": T(4, 8)}, 12), "shard_overlap", "a [0, 12] and b [4, 8]"),
    "empty one inside another": (file_of({"a": T(0, 4), "b": T(2, 2, shape=(0,))}, 4), "shard_overlap", "a [0, 4] and b [2, 2]"),
    "shape too large": (file_of({"a": T(0, 4, shape=(2,))}, 4), "shard_size_mismatch", "a (F32 [2] needs 8 bytes, its offsets span 4)"),
    "shape too small": (file_of({"a": T(0, 8)}, 8), "shard_size_mismatch", "needs 4 bytes, its offsets span 8"),
    "wrong width": (file_of({"a": T(0, 4, "BF16")}, 4), "shard_size_mismatch", "needs 2 bytes"),
    "empty shape with bytes": (file_of({"a": T(0, 4, shape=(0,))}, 4), "shard_size_mismatch", "needs 0 bytes"),
    "half a byte": (file_of({"a": T(0, 1, "F4")}, 1), "shard_size_mismatch", "4 bits"),
    "six bits": (file_of({"a": T(0, 1, "F6_E2M3")}, 1), "shard_size_mismatch", "6 bits"),
    "unknown type": (file_of({"a": T(0, 4, "F5_X")}, 4), "shard_unknown_dtype", "a (F5_X)"),
    "type in lower case": (file_of({"a": T(0, 4, "f32")}, 4), "shard_unknown_dtype", "f32"),
    "unknown type, truncated": (file_of({"a": T(0, 4, "F5_X")}, 2), "shard_truncated", "2 bytes missing"),
    "unknown type, overlap": (file_of({"a": T(0, 4), "b": T(2, 6, "F5_X")}, 6), "shard_overlap", "b [2, 6]"),
    "number in metadata": (file_of({"__metadata__": {"n": 1}}), "shard_bad_metadata", "must be strings: n=1"),
    "null in metadata": (file_of({"__metadata__": {"n": None}}), "shard_bad_metadata", "n=null"),
    "object in metadata": (file_of({"__metadata__": {"n": {}}}), "shard_bad_metadata", "n={}"),
    "metadata a list": (file_of({"__metadata__": []}), "shard_bad_metadata", "but is []"),
    "metadata a string": (file_of({"__metadata__": "pt"}), "shard_bad_metadata", '"pt"'),
    "entry a number": (file_of({"a": 1}), "shard_bad_tensor", "a: not an object but 1"),
    "entry null": (file_of({"a": None}), "shard_bad_tensor", "null"),
    "no offsets": (file_of({"a": {"dtype": "F32", "shape": [1]}}, 4), "shard_bad_tensor", "a: without data_offsets"),
    "no anything": (file_of({"a": {}}), "shard_bad_tensor", "without dtype and shape and data_offsets"),
    "dtype null": (file_of({"a": T(0, 4, None)}, 4), "shard_bad_tensor", "dtype must be a string but is null"),
    "dtype a list": (file_of({"a": T(0, 4, ["F32"])}, 4), "shard_bad_tensor", "dtype"),
    "shape a number": (file_of({"a": T(0, 4, shape=1)}, 4), "shard_bad_tensor", "shape must be a list"),
    "shape of booleans": (file_of({"a": T(0, 4, shape=[True])}, 4), "shard_bad_tensor", "[true]"),
    "shape negative": (file_of({"a": T(0, 4, shape=[-1])}, 4), "shard_bad_tensor", "[-1]"),
    "shape negative twice": (file_of({"a": T(0, 4, shape=[-1, -1])}, 4), "shard_bad_tensor", "[-1, -1]"),
    "shape of floats": (file_of({"a": T(0, 4, shape=[1.0])}, 4), "shard_bad_tensor", "[1.0]"),
    "shape of strings": (file_of({"a": T(0, 4, shape=["1"])}, 4), "shard_bad_tensor", '["1"]'),
    "shape huge": (file_of({"a": T(0, 4, shape=[2**64])}, 4), "shard_bad_tensor", "2^64-1"),
    "shape overflows": (file_of({"a": T(0, 4, shape=[2**63, 2])}, 4), "shard_bad_tensor", "more elements"),
    "shape overflows to zero": (file_of({"a": T(0, 0, shape=[2**63, 2, 0])}), "shard_bad_tensor", "more elements"),
    "offset boolean": (file_of({"a": T(False, 4)}, 4), "shard_bad_tensor", "[false, 4]"),
    "offset float": (file_of({"a": T(0.0, 4)}, 4), "shard_bad_tensor", "[0.0, 4]"),
    "offset negative": (file_of({"a": T(-4, 0)}), "shard_bad_tensor", "[-4, 0]"),
    "offset minus zero": (file_of(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}', 4), "shard_header_not_json", "-0"),
    "offset huge": (file_of({"a": T(0, 2**64)}, 4), "shard_bad_tensor", "18446744073709551616"),
    "offset past everything": (file_of({"a": T(0, 2**63, "U8", (2**63,))}, 4), "shard_truncated", "missing"),
    "offsets three": (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, 4), "shard_bad_tensor", "two integers"),
    "offsets none": (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}, 4), "shard_bad_tensor", "two integers"),
    "offsets reversed": (file_of({"a": T(4, 0)}, 4), "shard_bad_tensor", "end before they start"),
    "field twice": (file_of(f'{{"a":{{"dtype":"F32",{ONE}}}}}'.encode(), 4), "shard_duplicate_keys", "dtype"),
    "metadata twice": (file_of(b'{"__metadata__":{},"__metadata__":{}}'), "shard_duplicate_keys", "__metadata__"),
}  # fmt: skip

# Here we are knowingly stricter than the library, which keeps the last of two, or takes a list for an object.
STRICTER = {
    "tensor twice": (file_of(f'{{"a":{{{ONE}}},"a":{{{ONE}}}}}'.encode(), 4), "shard_duplicate_keys", "twice: a"),
    "metadata key twice": (file_of(b'{"__metadata__":{"format":"pt","format":"tf"}}'), "shard_duplicate_keys", "format"),
    "entry a list": (file_of({"a": ["F32", [1], [0, 4]]}, 4), "shard_bad_tensor", "not an object"),
}

ACCEPTED = {
    "plain": file_of({"a": T(0, 4)}, 4),
    "metadata empty": file_of({"__metadata__": {}, "a": T(0, 4)}, 4),
    "metadata null": file_of({"__metadata__": None, "a": T(0, 4)}, 4),
    "metadata": file_of({"__metadata__": {"format": "pt"}, "a": T(0, 4)}, 4),
    "empty tensor": file_of({"e": T(0, 0, shape=(0,)), "a": T(0, 4)}, 4),
    "empty tensor at the end": file_of({"e": T(4, 4, "F8_E4M3", (3, 0)), "a": T(0, 4)}, 4),
    "empty tensor, other sizes huge": file_of({"e": T(0, 0, shape=(0, 2**64 - 1))}),
    "scalar": file_of({"a": T(0, 4, shape=())}, 4),
    "b before a": file_of({"b": T(0, 4), "a": T(4, 8)}, 8),
    "a after b in the file": file_of({"a": T(4, 8), "b": T(0, 4)}, 8),
    "padded": file_of(json.dumps({"a": T(0, 4)}).encode() + b" " * 23, 4),
    "blank first": file_of(b"  " + json.dumps({"a": T(0, 4)}).encode(), 4),
    "line breaks": file_of(json.dumps({"a": T(0, 4)}, indent=2).encode() + b"\r\n", 4),
    "no tensors": file_of({}),
    "only metadata": file_of({"__metadata__": {"format": "pt"}}),
    "unknown field": file_of({"a": {**T(0, 4), "crc": 1}}, 4),
    "nameless": file_of({"": T(0, 4)}, 4),
    "umlaut": file_of({"ä": T(0, 4)}, 4),
    "minus zero in a name": file_of({"a-0": T(0, 4)}, 4),
    "surrogate pair": file_of(b'{"\\ud83d\\ude00":{' + ONE.encode() + b"}}", 4),
    **{f"type {name}": file_of({"a": T(0, bits, name, (8,))}, bits) for name, bits in DTYPE_BITS.items()},
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_the_library_refuses_and_says_why(case: str) -> None:
    raw, class_, evidence = REFUSED[case]
    with pytest.raises(BadFile) as refusal:
        read(raw)
    found = {p["class"]: p for p in refusal.value.problems}
    assert class_ in found, found
    assert evidence in found[class_]["evidence"]
    assert "x.safetensors" in found[class_]["evidence"]
    assert found[class_]["severity"] == "error" and found[class_]["remedy"]
    assert not library_accepts(raw)


@pytest.mark.parametrize("case", STRICTER)
def test_is_stricter_than_the_library(case: str) -> None:
    raw, class_, evidence = STRICTER[case]
    with pytest.raises(BadFile, match=evidence) as refusal:
        read(raw)
    assert [p["class"] for p in refusal.value.problems] == [class_]
    assert library_accepts(raw)


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepts_what_the_library_accepts_with_the_same_content(case: str) -> None:
    raw = ACCEPTED[case]
    header = read(raw)
    theirs = {name: (entry["dtype"], tuple(entry["shape"]), len(entry["data"])) for name, entry in deserialize(raw)}
    assert {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in header.tensors.items()} == theirs
    assert header.data_start + sum(tensor.nbytes for tensor in header.tensors.values()) == header.file_bytes == len(raw)


@pytest.mark.parametrize(
    ("header", "data", "classes"),
    [
        ({"__metadata__": {"n": 1}, "a": T(0, 4, shape=(2,)), "b": T(4, 8, "F5_X"), "c": T(6, 10)}, 4,
         {"shard_bad_metadata", "shard_size_mismatch", "shard_unknown_dtype", "shard_overlap", "shard_truncated"}),
        ({"a": T(1, 5), "b": T(6, 10)}, 20, {"shard_gap", "shard_trailing_bytes"}),
        # The place of a malformed entry is not known, so that neither holes nor what is left over mean anything.
        ({"a": T(True, 5), "b": T(6, 10)}, 20, {"shard_bad_tensor"}),
        ({"a": T(True, 5), "b": T(6, 10)}, 4, {"shard_bad_tensor", "shard_truncated"}),
    ],
)  # fmt: skip
def test_reports_all_that_is_wrong_at_once(header: Any, data: int, classes: set[str]) -> None:
    with pytest.raises(BadFile) as refusal:
        read(file_of(header, data))
    assert {p["class"] for p in refusal.value.problems} == classes


def test_long_lists_and_odd_names_stay_readable() -> None:
    with pytest.raises(BadFile) as refusal:
        read(file_of({f"t{number}": 1 for number in range(5000)} | {"a\n\x1b[31m": 2}))
    (fault,) = refusal.value.problems
    assert "t9: not an object but 1 and 4991 more" in fault["evidence"] and len(fault["evidence"]) < 500
    with pytest.raises(BadFile) as refusal:
        read(file_of({"a\n\x1b[31m": 2, "x" * 5000: [[1]] * 5000}))
    assert len(str(refusal.value)) < 800 and str(refusal.value).isprintable()


@pytest.mark.parametrize(
    "content",
    [
        "root:$6$secret:19000:0:99999:7:::\n",
        '{"auths": {"registry.example": {"auth": "secret"}}}',
        '{"secret": 1, "error": {"message": "secret"}, "message": ["secret"]}',
        '{"error": "secret", ',
        '{"error": "cut after a kibibyte: secret' + "x" * 2000 + '"}',
        '["secret"]',
        '  {"token": "secret"}',
        "[secret]\nkey = secret\n",
        "<settings><password>secret</password></settings>",
        '<?xml version="1.0" secret="secret"?>',
    ],
)
def test_text_is_not_quoted_as_a_link_may_lead_to_a_secret(content: str) -> None:
    with pytest.raises(BadFile) as refusal:
        read(content.encode())
    assert [fault["class"] for fault in refusal.value.problems] == ["text_page"]
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("value", ["secret", ["secret"], ["secret\ud800"], "\udc00secret"])
def test_a_header_that_is_no_object_is_not_quoted(value: Any) -> None:
    with pytest.raises(BadFile) as refusal:
        read(file_of(value))
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"error": "Invalid token", "token": "hidden"}, 'error "Invalid token"'),
        ({"message": "Too many requests"}, 'message "Too many requests"'),
        ({"error": "Forbidden", "message": "Gated"}, 'error "Forbidden", message "Gated"'),
        ({"error": "a\x1b[31m\nb\u202e"}, 'error "a\\u001b[31m\\nb\\u202e"'),
        ({"error": "x" * 100 + "hidden"}, f'error "{"x" * 100}"'),
        ({"error": 5, "message": "five"}, 'message "five"'),
    ],
)
def test_of_an_error_document_only_its_message_is_shown(document: dict[str, Any], says: str) -> None:
    with pytest.raises(BadFile) as refusal:
        read(json.dumps(document).encode())
    assert str(refusal.value) == f"x.safetensors is JSON text, not weights; it says: {says}"


@pytest.mark.parametrize(
    ("text", "twice"),
    [
        # Keys are counted before they are looked for: blanks, and text that looks like a key, must not hide one.
        ('{"a":1,"a":2}', ["a"]),
        ('{"a" :1,"a":2}', ["a"]),
        ('{"a"\n:1,"a"\t:2,"b":"\\":"}', ["a"]),
        ('{"a" :1,"b":"\\":"}', []),
        ('{"a" :1,"a":2,"b":"\\":"}', ["a"]),
        ('{"a":1,"a":2,"b":"\\" :"}', ["a"]),
        ('{"a\\"":{"b":{"c":1,"c":2}}}', ["c"]),
        ('{"a":[{"c":1,"c":2}],"b":{"x":1}}', ["c"]),
        ('[{"c":1,"c":2}]', ["c"]),
        ('{"\\u0061":1,"a":2}', ["a"]),
        ('{"a":{"b":1},"c":{"b":1}}', []),
    ],
)
def test_keys_that_are_written_twice_are_found_in_any_writing(text: str, twice: list[str]) -> None:
    assert parse_json(text.encode()) == (json.loads(text), twice)


def test_more_tensors_than_any_file_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{read_header.__module__}.MAX_TENSORS", 3)
    header: dict[str, Any] = {f"t{number}": T(0, 0, shape=(0,)) for number in range(3)} | {"__metadata__": {}}
    assert len(read(file_of(header)).tensors) == 3
    with pytest.raises(BadFile) as refusal:
        read(file_of(header | {"one more": "not even looked at"}))
    (fault,) = refusal.value.problems
    assert fault["class"] == "shard_too_many_tensors" and "lists 4 tensors, more than the 3" in fault["evidence"]


@pytest.mark.parametrize("size", [7, 8, 40])
def test_a_file_that_shrinks_while_it_is_read(size: int) -> None:
    raw = file_of({"a": T(0, 4)}, 4)
    with pytest.raises(BadFile):
        read_stream(io.BytesIO(raw[:size]), "x.safetensors", len(raw))


def test_reads_only_the_header(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    raw = file_of({"__metadata__": {"format": "pt"}, "a": T(0, 2**40, "U8", (2**20, 2**20))})
    with path.open("wb") as stream:
        stream.write(raw)
        stream.truncate(len(raw) + 2**40)  # a sparse file of 1 TiB
    header = read_header(path)
    assert header == Header("x.safetensors", {"a": Tensor("U8", (2**20, 2**20), 0, 2**40)}, {"format": "pt"}, len(raw), len(raw) + 2**40)


def test_links(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (tmp_path / "blobs" / "1f").write_bytes(file_of({"a": T(0, 4)}, 4))
    for name, target in (("good", "../../blobs/1f"), ("cut", "../../blobs/2e"), ("other", "nowhere"), ("loop", "loop.safetensors")):
        (folder / f"{name}.safetensors").symlink_to(target)
    assert list(read_header(folder / "good.safetensors").tensors) == ["a"]
    for name, target, remedy in (
        ("cut", "../../blobs/2e", "models--*"),
        ("other", "nowhere", "target"),
        ("loop", "loop.safetensors", "target"),
    ):
        with pytest.raises(BadFile, match=f"{name}.safetensors is a broken link: it points to {target}") as refusal:
            read_header(folder / f"{name}.safetensors")
        (fault,) = refusal.value.problems
        assert fault["class"] == "shard_broken_link" and remedy in fault["remedy"]


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "fifo.safetensors")
    for name, class_ in (("folder", "shard_not_a_file"), ("fifo", "shard_not_a_file"), ("absent", "shard_unreadable")):
        with pytest.raises(BadFile) as refusal:
            read_header(tmp_path / f"{name}.safetensors")
        assert [p["class"] for p in refusal.value.problems] == [class_]


def test_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_args: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(BadFile, match="Permission denied") as refusal:
        read_header(tmp_path / "x.safetensors")
    assert "read access" in refusal.value.problems[0]["remedy"]


# ------------------------------------------------------------------------------------------------- against the library, at random

DTYPES = st.sampled_from([*DTYPE_BITS])
SIZES = st.integers(0, 5)


@st.composite
def sound_headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header and its data's size; tensors in the file's order or any other."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.sampled_from([[], ["a"], ["b", "a"], ["a.weight", "ä\n", ""], ["d", "c", "__metadata", "\U0001f600"]])):
        dtype = draw(DTYPES)
        shape = draw(st.lists(SIZES, max_size=3))
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        if bits % 8:
            shape = [*shape, 8]
            bits *= 8
        header[name] = T(at, at + bits // 8, dtype, shape)
        at += bits // 8
    if draw(st.booleans()):
        header = dict(reversed(header.items())) | {"__metadata__": {"format": "pt", "\u2028": ""}}
    return header, at


@settings(max_examples=60, deadline=None)
@given(sound_headers())
def test_sound_files_are_accepted(case: tuple[dict[str, Any], int]) -> None:
    raw = file_of(*case)
    assert library_accepts(raw)
    assert set(read(raw).tensors) == set(case[0]) - {"__metadata__"}


ODD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.sampled_from([2**32, 2**63, 2**64, 1.0, 1.5, -0.0]), st.text(max_size=2),
    st.lists(st.integers(-1, 9), max_size=3), st.just({}),
)  # fmt: skip


LISTS = st.sampled_from([["F32", [1], [0, 4]], ["U8", [0], [0, 0]], ["F4", [2], [0, 1]], [], ["F32"]])


@settings(max_examples=300, deadline=None)
@given(sound_headers(), st.data())
def test_damaged_headers_get_the_same_verdict(case: tuple[dict[str, Any], int], data: st.DataObject) -> None:
    header, size = copy.deepcopy(case[0]), case[1]
    tensors = [name for name in header if name != "__metadata__"]
    size = max(0, size + data.draw(st.sampled_from([0, 0, 0, -1, 1, 4])))
    for name in tensors:
        damage = data.draw(st.sampled_from(["", "", "dtype", "shape", "data_offsets", "start", "end", "drop", "entry", "list"]))
        if damage == "entry":
            header[name] = data.draw(ODD_VALUES)
        elif damage == "list":
            header[name] = data.draw(LISTS)
        elif damage == "drop":
            del header[name][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))]
        elif damage in ("start", "end"):
            header[name]["data_offsets"][damage == "end"] = data.draw(ODD_VALUES)
        elif damage:
            header[name][damage] = data.draw(DTYPES if damage == "dtype" and data.draw(st.booleans()) else ODD_VALUES)
    check_same_verdict(file_of(header, size))


PATCHES = st.tuples(st.integers(0, 400), st.binary(min_size=1, max_size=3), st.sampled_from(["cut", "over", "insert"]))


@settings(max_examples=300, deadline=None)
@given(sound_headers(), st.lists(PATCHES, min_size=1, max_size=3))
def test_damaged_bytes_get_the_same_verdict(case: tuple[dict[str, Any], int], patches: list[tuple[int, bytes, str]]) -> None:
    raw = file_of(*case)
    for at, patch, how in patches:
        at %= len(raw) + 1
        raw = raw[:at] if how == "cut" else raw[:at] + patch + raw[at + len(patch) * (how == "over") :]
    check_same_verdict(raw)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(DTYPES, st.lists(SIZES, max_size=3), st.integers(-1, 1)), min_size=1, max_size=4),
    st.lists(st.sampled_from("ab"), min_size=4, max_size=4),
)
def test_sizes_and_names_of_any_kind_get_the_same_verdict(tensors: list[tuple[str, list[int], int]], names: list[str]) -> None:
    """Types of less than a byte, sizes that are off by one, and names that come twice."""
    at, entries = 0, []
    for name, (dtype, shape, off) in zip(names, tensors, strict=False):
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        end = max(at, at + -(-bits // 8) + off)
        entries.append(f"{json.dumps(name)}:{json.dumps(T(at, end, dtype, shape))}")
        at = end
    check_same_verdict(file_of(f"{{{','.join(entries)}}}".encode(), at))


def check_same_verdict(raw: bytes) -> None:
    """Both accept, with the same tensors, or both refuse; or we refuse for one of the reasons in STRICTER, and it is really there."""
    try:
        header = read(raw)
    except BadFile as refusal:
        assert all(p["evidence"].isprintable() and p["remedy"] for p in refusal.problems)
        if library_accepts(raw):
            assert {p["class"] for p in refusal.problems} <= stricter_reasons(raw), refusal
    else:
        theirs = {name: (entry["dtype"], tuple(entry["shape"]), len(entry["data"])) for name, entry in deserialize(raw)}
        assert {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in header.tensors.items()} == theirs


def stricter_reasons(raw: bytes) -> set[str]:
    """The reasons that a header gives us to be stricter than the library, found without our reader."""
    twice = False

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        twice |= len({key for key, _ in items}) < len(items)
        return dict(items)

    document = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")], object_pairs_hook=pairs)
    lists = any(isinstance(entry, list) for key, entry in document.items() if key != "__metadata__")
    return {reason for reason, given in (("shard_duplicate_keys", twice), ("shard_bad_tensor", lists)) if given}
