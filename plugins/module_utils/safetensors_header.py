# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The header of a safetensors file, read without its tensors, and what exactly is wrong with one that is not sound.

A file is: 8 bytes little-endian header length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, then the tensors' bytes.
Accepts what the safetensors library (0.8) accepts, except that it is stricter about a tensor or metadata key that is written twice
(the library keeps the last one), about entries written as a list instead of an object, and about more tensors than any file has.
No message quotes what a file holds beyond names and entries of tensors: a link might lead to something secret.
"""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

from .problems import Problem, problem

# Bits of one element. Names as in safetensors 0.8.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
    "U64": 64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_TENSORS = 500_000  # in one file; the largest checkpoints have some 100,000 in all their files
METADATA = "__metadata__"

_MAX_U64 = 2**64 - 1
_MAX_PATH = 4096  # Linux' PATH_MAX
_DOWNLOAD = "Delete this file and download it again (the checkpoint role resumes and verifies)."
_REWRITE = "The file was written by a faulty tool: download it again or rebuild it from its source."
# What people rename or save as .safetensors. Text is told apart separately.
_MAGIC = (
    (b"GGUF", "a GGUF file"),
    (b"PK\x03\x04", "a zip archive (PyTorch's .bin and .pt files are such)"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x89HDF", "an HDF5 file"),
)


class BadFile(ValueError):
    """A file that cannot be used, with all that is wrong with it."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(p["evidence"] for p in problems))
        self.problems = list(problems)


class Tensor(NamedTuple):
    """One tensor's entry. start, end: bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes in the file."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """A sound header. data_start: the file offset in bytes from which the tensors' offsets count."""

    name: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def read_header(path: Path, count: Callable[[int], object] = lambda _bytes: None) -> Header:
    """The header of a file. BadFile with every problem found when it is not a sound safetensors file.

    count: is told how many bytes were read, whatever comes of them.
    """
    with open_regular(path, "shard", _DOWNLOAD) as stream:
        try:
            return read_stream(stream, path.name, os.fstat(stream.fileno()).st_size)
        except OSError as failure:
            raise BadFile(_unreadable("shard", path.name, failure, _DOWNLOAD)) from failure
        finally:
            count(stream.tell())


def read_stream(stream: BinaryIO, name: str, size: int) -> Header:
    """As read_header, of an open file of `size` bytes; `name` is what messages call it."""
    if size == 0:
        raise BadFile(problem("shard_empty", f"{name} is an empty file (0 bytes)", _DOWNLOAD))
    start = read_fully(stream, 8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > MAX_HEADER_BYTES:
        known = _foreign_content(start + read_fully(stream, 1016), name, size)
        if known:
            raise BadFile(known)
    if len(start) < 8:
        raise BadFile(problem("shard_too_small", f"{name} has {len(start)} bytes, less than the 8 of a header length", _DOWNLOAD))
    if length == 0:
        raise BadFile(
            problem("shard_header_length_zero", f"{name}: header length 0 in {size} bytes: space was reserved but never written", _DOWNLOAD)
        )
    if length > MAX_HEADER_BYTES:
        evidence = f"{name}: its first 8 bytes give a header of {length} bytes, more than the format's limit of {MAX_HEADER_BYTES}"
        raise BadFile(problem("shard_header_too_large", f"{evidence}: not a safetensors file", _DOWNLOAD))
    if 8 + length > size:
        raise BadFile(_header_past_end(name, length, size))
    raw = read_fully(stream, length)
    if len(raw) < length:
        raise BadFile(_header_past_end(name, length, 8 + len(raw)))
    tensors, metadata = parse_header(raw, name, size - 8 - length)
    return Header(name, tensors, metadata, 8 + length, size)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: it looks at every new object again and again, for cycles, which there are none of."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_no_collection()
def parse_header(raw: bytes, name: str, data_bytes: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata from a header's JSON text.

    data_bytes: bytes that follow the header in the file. BadFile when they are not exactly those that the tensors need.
    """
    try:
        document, twice = parse_json(raw)
    except NotUtf8 as fault:
        raise BadFile(problem("shard_header_not_utf8", f"{name}: its header is {fault}", _DOWNLOAD)) from fault
    except ValueError as fault:
        raise BadFile(problem("shard_header_not_json", f"{name}: its header is {fault}", _DOWNLOAD)) from fault
    if not isinstance(document, dict):
        raise BadFile(problem("shard_header_not_object", f"{name}: its header is not a JSON object but {json_type(document)}", _REWRITE))
    problems: list[Problem] = []
    if twice:
        problems.append(problem("shard_duplicate_keys", f"{name}: its header has the same key twice: {some(twice)}", _REWRITE))
    metadata = _metadata(document.pop(METADATA, None), name, problems)
    if len(document) > MAX_TENSORS:
        evidence = f"{name}: its header lists {len(document)} tensors, more than the {MAX_TENSORS} that are read from one file"
        raise BadFile(*problems, problem("shard_too_many_tensors", evidence, _REWRITE))
    tensors = _tensors(document, name, problems)
    # Without all tensors' offsets a hole means nothing.
    _check_coverage(tensors, len(tensors) == len(document) and not twice, name, 8 + len(raw), data_bytes, problems)
    if problems:
        raise BadFile(*problems)
    return tensors, metadata


def _metadata(value: Any, name: str, problems: list[Problem]) -> dict[str, str]:
    """The free metadata: text to text; nothing else is allowed."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(
            problem("shard_bad_metadata", f"{name}: {METADATA} must be an object of strings but is {shown_value(value)}", _REWRITE)
        )
        return {}
    wrong = [f"{shown(key)}={shown_value(entry)}" for key, entry in value.items() if not isinstance(entry, str)]
    if wrong:
        problems.append(problem("shard_bad_metadata", f"{name}: {METADATA} values must be strings: {some(wrong, quote=False)}", _REWRITE))
    return value


def _tensors(document: dict[str, Any], name: str, problems: list[Problem]) -> dict[str, Tensor]:
    """Tensors whose offsets can be used: all of them in a sound header."""
    tensors: dict[str, Tensor] = {}
    malformed: list[str] = []
    unknown: list[str] = []
    mismatched: list[str] = []
    for key, entry in document.items():
        if sound := _usual_tensor(entry):
            tensors[key] = sound
            continue
        fault = _entry_fault(entry)
        if fault:
            malformed.append(f"{shown(key)}: {fault}")
            continue
        shape, (start, end), dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
        tensors[key] = Tensor(dtype, tuple(shape), start, end)
        bits = DTYPE_BITS.get(dtype)
        if bits is None:
            unknown.append(f"{shown(key)} ({shown(dtype)})")
        elif (needs := math.prod(shape) * bits) != (end - start) * 8:
            size = f"{needs // 8} bytes" if needs % 8 == 0 else f"{needs} bits, no whole number of bytes"
            mismatched.append(f"{shown(key)} ({dtype} {shown_value(shape)} needs {size}, its offsets span {end - start})")
    for class_, faults, text in (
        ("shard_bad_tensor", malformed, "the header's entry is malformed"),
        ("shard_unknown_dtype", unknown, "the data type is not known"),
        ("shard_size_mismatch", mismatched, "shape times data type is not the size in the file"),
    ):
        if faults:
            remedy = _REWRITE if class_ != "shard_unknown_dtype" else f"{_REWRITE} Known types: {', '.join(DTYPE_BITS)}."
            problems.append(problem(class_, f"{name}: {text}: {some(faults, quote=False)}", remedy))
    return tensors


def _usual_tensor(entry: Any) -> Tensor | None:
    """The tensor of an entry that is sound at first sight: checkpoints have tens of thousands of them. None for any doubt."""
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        bits = DTYPE_BITS[dtype]
    except (KeyError, TypeError, ValueError):
        return None
    if type(shape) is not list or type(start) is not int or type(end) is not int or not 0 <= start <= end <= _MAX_U64:
        return None
    for size in shape:
        if type(size) is not int or size < 1:
            return None
        bits *= size
    return Tensor(dtype, tuple(shape), start, end) if bits == (end - start) * 8 < _MAX_U64 else None


def _entry_fault(entry: Any) -> str:
    """Why a tensor's entry cannot be read; '' when it can."""
    if not isinstance(entry, dict):
        return f"not an object but {shown_value(entry)}"
    missing = [field for field in ("dtype", "shape", "data_offsets") if field not in entry]
    if missing:
        return f"without {' and '.join(missing)}"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        return f"dtype must be a string but is {shown_value(dtype)}"
    if not isinstance(shape, list) or not all(map(_is_u64, shape)):
        return f"shape must be a list of integers from 0 to 2^64-1 but is {shown_value(shape)}"
    if _too_many_elements(shape):
        return f"shape {shown_value(shape)} has more elements than 2^64-1"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_u64, offsets)):
        return f"data_offsets must be two integers from 0 to 2^64-1 but are {shown_value(offsets)}"
    if offsets[1] < offsets[0]:
        return f"data_offsets {shown_value(offsets)} end before they start"
    return ""


def _is_u64(value: Any) -> bool:
    # type() and not isinstance(): True and False are integers to Python, but not to the format.
    return type(value) is int and 0 <= value <= _MAX_U64


def _too_many_elements(shape: list[int]) -> bool:
    """Whether the product passes 64 bits, also where a zero hides it: the library then calls it an overflow, or not, by order."""
    product = 1
    for size in shape:
        product *= size or 1
        if product > _MAX_U64:
            return True
    return False


def _check_coverage(tensors: dict[str, Tensor], whole: bool, name: str, data_start: int, data_bytes: int, problems: list[Problem]) -> None:
    """Tensors must cover the data without gap or overlap. whole: no tensor was left out, so that a gap means something."""
    gaps: list[str] = []
    overlaps: list[str] = []
    at, previous = 0, ""
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start > at:
            gaps.append(f"{counted(tensor.start - at, 'byte')} before {shown(key)}")
        elif tensor.start < at:
            before = tensors[previous]
            overlaps.append(f"{shown(previous)} [{before.start}, {before.end}] and {shown(key)} [{tensor.start}, {tensor.end}]")
        if tensor.end >= at:
            at, previous = tensor.end, key
    if gaps and whole:
        problems.append(problem("shard_gap", f"{name}: bytes that belong to no tensor: {some(gaps, quote=False)}", _REWRITE))
    if overlaps:
        problems.append(problem("shard_overlap", f"{name}: tensors overlap: {some(overlaps, quote=False)}", _REWRITE))
    sizes = f"its tensors need a file of {data_start + at} bytes, it has {data_start + data_bytes}"
    if at > data_bytes:
        problems.append(problem("shard_truncated", f"{name} is truncated: {sizes}, {counted(at - data_bytes, 'byte')} missing", _DOWNLOAD))
    elif at < data_bytes and whole:
        evidence = f"{name} has {counted(data_bytes - at, 'trailing byte')} after its last tensor: {sizes}"
        problems.append(problem("shard_trailing_bytes", evidence, _DOWNLOAD))


def _header_past_end(name: str, length: int, size: int) -> Problem:
    missing = counted(8 + length - size, "byte")
    evidence = f"{name} is truncated: its header of {length} bytes runs past the end of the file of {size} bytes, {missing} missing"
    return problem("shard_header_past_end", evidence, _DOWNLOAD)


def lfs_pointer(start: bytes, name: str, size: int) -> Problem | None:
    """The problem of a Git LFS pointer, told from a file's first bytes; None when it is none."""
    if not re.match(rb"version https://(git-lfs\.github|hawser\.github)\.com/spec/", start):
        return None
    real = re.search(rb"^size (\d{1,20})\s*$", start, re.MULTILINE)
    size_text = f"; the real file has {real[1].decode()} bytes" if real else ""
    remedy = "Fetch the real file: download it again with the checkpoint role, or run git lfs pull in the clone."
    return problem("git_lfs_pointer", f"{name} is a Git LFS pointer of {size} bytes, not the file itself{size_text}", remedy)


def _foreign_content(start: bytes, name: str, size: int) -> Problem | None:
    """What a file is that holds something else than tensors, told from its first bytes; None when that is not clear."""
    if pointer := lfs_pointer(start, name, size):
        return pointer
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return problem("foreign_format", f"{name} is {kind}, whatever its name says", "Take the safetensors version of this model.")
    text = start.decode("utf-8", "ignore").strip()
    # A multi-byte character may be cut at the end; anything else that was dropped means that this is no text.
    if len(text.encode()) + 4 < len(start.strip()) or not text or not all(char.isprintable() or char in "\r\n\t" for char in text):
        return None
    kind = "an HTML page" if text[0] == "<" else "JSON text" if text[0] in "{[" else "text"
    says = _error_message(text) if kind == "JSON text" else ""
    remedy = f"Probably a login, error or rate limit page that was saved as the file: check the access token and the address. {_DOWNLOAD}"
    return problem("text_page", f"{name} is {kind}, not weights{says}", remedy)


def _error_message(text: str) -> str:
    """What an error document says, its only part that is shown; '' for other JSON."""
    try:
        document, _ = parse_json(text.encode())
    except ValueError:
        return ""
    values = {key: document.get(key) for key in ("error", "message")} if isinstance(document, dict) else {}
    said = [f"{key} {json.dumps(value[:100])}" for key, value in values.items() if isinstance(value, str)]
    return f"; it says: {', '.join(said)}" if said else ""


def open_regular(path: Path, prefix: str, remedy: str) -> BinaryIO:
    """Open a regular file, also through a link, for reading; without a buffer, so that nothing is read but what is asked for.

    BadFile, with class <prefix>_..., when that does not work.
    """
    try:
        # O_NONBLOCK: a FIFO must not hang us; it means nothing for regular files.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as failure:
        if path.is_symlink() and failure.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            raise BadFile(broken_link(path, prefix)) from failure
        raise BadFile(_unreadable(prefix, path.name, failure, remedy)) from failure
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadFile(problem(f"{prefix}_not_a_file", f"{shown(path.name)} is a folder or a device, not a file", f"Remove it. {remedy}"))
    return os.fdopen(fd, "rb", buffering=0)


def read_fully(stream: BinaryIO, size: int) -> bytes:
    """`size` bytes, or fewer at the file's end: an unbuffered file may give them in pieces."""
    pieces = [stream.read(size)]
    while pieces[-1] and (size := size - len(pieces[-1])) > 0:
        pieces.append(stream.read(size))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def broken_link(path: Path, prefix: str) -> Problem:
    """The problem of a link that leads nowhere."""
    target = os.readlink(path)
    evidence = f"{shown(path.name)} is a broken link: it points to {shown(target)}, which does not exist"
    if "blobs/" in target:
        evidence += " (a link into a Hugging Face cache)"
        remedy = "Copy or mount the whole models--* folder, blobs included, not the snapshot alone; or download the file again."
    else:
        remedy = "Bring the link's target back, or remove the link and download the file again."
    return problem(f"{prefix}_broken_link", evidence, remedy)


def _unreadable(prefix: str, name: str, failure: OSError, remedy: str) -> Problem:
    if failure.errno in (errno.EACCES, errno.EPERM):
        remedy = "Give this user read access to the file and its folder."
    return problem(f"{prefix}_unreadable", f"{shown(name)} cannot be read: {failure.strerror or failure}", remedy)


class NotUtf8(ValueError):
    """Bytes that are no UTF-8 text."""


@_no_collection()
def parse_json(raw: bytes) -> tuple[Any, list[str]]:
    """A JSON value, and the object keys that are written twice in their object (the last one counts).

    ValueError, with a text that continues "it is ...", for whatever is not JSON; NotUtf8 for the encoding.
    """
    twice: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            twice.extend(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return value

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise NotUtf8(f"not UTF-8: byte {raw[fault.start]:#04x} at position {fault.start}") from None
    if text.startswith("\ufeff"):
        raise ValueError("not JSON: it begins with a byte order mark (BOM)")
    try:
        # A function per number or object costs time that headers of 100,000 tensors feel: only where there is something to find.
        integer = _no_minus_zero if "-0" in text else None
        loads = partial(json.loads, parse_constant=_no_constant, parse_float=_finite, parse_int=integer)
        value = loads(text)
        if not _has_every_key(value, text):
            value = loads(text, object_pairs_hook=object_of)
        lone = b"\\u" in raw and _has_lone_surrogate(value)
    except RecursionError:
        raise ValueError("not usable JSON: nested too deeply") from None
    except ValueError as fault:  # JSONDecodeError, or a number of thousands of digits
        raise ValueError(f"not JSON: {fault}") from None
    if lone:
        raise ValueError("not JSON: a string holds half of a surrogate pair")
    return value, list(dict.fromkeys(twice))


def _has_every_key(value: Any, text: str) -> bool:
    """Whether a value has as many keys as its text. False for any doubt: a key that is written twice is in the value once.

    Without blanks in between, '":' ends each key, and can be nowhere else but inside of a string, which makes it too many.
    """
    inner = value.values() if isinstance(value, dict) else ()
    keys = len(inner) + sum(len(entry) for entry in inner if isinstance(entry, dict))
    return text.count('":') == keys and not re.search(r'"\s+:', text)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON number")


def _no_minus_zero(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is no integer")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is out of range")
    return value


def _has_lone_surrogate(value: Any) -> bool:
    """Whether any string has a lone surrogate, which no UTF-8 file can hold."""
    if isinstance(value, str):
        return re.search("[\ud800-\udfff]", value) is not None
    if isinstance(value, dict):
        return any(map(_has_lone_surrogate, value.keys())) or any(map(_has_lone_surrogate, value.values()))
    return isinstance(value, list) and any(map(_has_lone_surrogate, value))


def counted(number: int, noun: str) -> str:
    """'1 file', '2 files'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(name: str | PurePath, limit: int = 200) -> str:
    """A name as it can stand in a message: on one line, of bearable length. A path is not cut short: a remedy may need all of it."""
    text, limit = (name, limit) if isinstance(name, str) else (str(name), _MAX_PATH)
    text = text if text and text.isprintable() else json.dumps(text)
    return text if len(text) <= limit else f"{text[:limit]}..."


def nested_deeper(value: Any, levels: int) -> bool:
    """Whether objects and arrays are nested in each other more than so many times."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        level = [
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, dict | list)
        ]
    return bool(level)


def json_type(value: Any) -> str:
    """What kind of JSON value this is, where the value itself is not to be shown."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "an array", dict: "an object"}
    return names.get(type(value), "a number")


def shown_value(value: Any) -> str:
    """A JSON value, cut short, for a message."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a deeply nested value"
    return text if len(text) <= 60 else f"{text[:60]}..."


def some(names: Iterable[str], limit: int = 10, quote: bool = True) -> str:
    """The first names, and how many more there are. quote: they are names from outside, to be shown safely."""
    all_of_them = list(names)
    show: Callable[[str], str] = shown if quote else str
    text = ", ".join(show(name) for name in all_of_them[:limit])
    return text if len(all_of_them) <= limit else f"{text} and {len(all_of_them) - limit} more"
