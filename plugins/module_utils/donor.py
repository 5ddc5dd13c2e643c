# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The FP8 checkpoint that a hybrid takes tensors from: its headers first, then exactly the byte ranges that are needed.

What is fetched becomes one safetensors file, the donor shard. A journal beside it vouches for its beginning: bytes that were on disk,
and their SHA-256. A later run reads that much again, and fetches only what is missing.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from .files import write_json
from .hybrid import DonorTensor, Piece, donor_pieces, header_bytes, is_routed
from .hybrid_source import is_foreign
from .jobs import JobFailure, Progress, digest, is_text, read_object
from .problems import problem
from .safetensors_header import MAX_HEADER_BYTES, BadFile, parse_header, parse_json, read_stream
from .safetensors_index import INDEX_NAME, is_shard_name, parse_index
from .sources import LONGEST_PAUSE_S, FolderSource, Interrupted, Say, Source, UrlSource, unreachable, with_retries

SHARD = ".dgxspark-donor.safetensors"
JOURNAL = ".dgxspark-donor.json"
SYNC_BYTES = 32 << 20  # of the donor shard: after so many they are on disk and in the journal
READ = 1 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 100 << 20
_NO_LIST = {"not_found", "no_sums", "not_authorised"}  # a server that offers the files, but no list of them


@dataclass
class DonorFiles:
    """The donor's headers. files: {name: {size, digest, state}}, state: what else tells that a file is still the same one;
    tensors: all but the routed experts'.
    """

    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, DonorTensor] = field(default_factory=dict)


class Donor:
    """A source that is read in small pieces, each tried again when it breaks off. read: bytes that came."""

    def __init__(self, source: Source, say: Say, sleep: Callable[[float], None] = time.sleep) -> None:
        self._source, self._say, self._sleep = source, say, sleep
        self.read = 0

    def survey(self, progress: Progress | None = None) -> DonorFiles:
        """Config and all headers. JobFailure when the donor cannot be read as a checkpoint."""
        found = DonorFiles()
        names = self._names()
        found.config = self._config(names)
        shards = [name for name in names if is_shard_name(name)]
        shards = [name for name in shards if not is_foreign(name)] or shards
        if not shards:
            remedy = "give the folder, address or repository of an FP8 checkpoint in safetensors format"
            raise JobFailure(problem("donor_no_shards", "the donor has no *.safetensors file", remedy))
        if progress:
            progress.stage("donor headers", len(shards), "files")
        twice: list[str] = []
        for name in shards:
            state = self._state(name)
            size, tensors = self._header(name)
            found.files[name] = {"size": size, "digest": self._digest(name), "state": state}
            twice += [tensor for tensor in tensors if tensor in found.tensors]
            found.tensors.update(tensors)
            if progress:
                progress.add(1)
        if twice:
            evidence = f"the donor has tensors in more than one file, such as {twice[0]} ({len(twice)} in all)"
            raise JobFailure(problem("donor_duplicate_tensor", evidence, "take a donor whose files do not contradict each other"))
        return found

    def ranges(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """Exactly the bytes [start, end) of a file, in chunks; taken up again where they broke off."""
        at, tries = start, 0
        while at < end:
            before = at
            try:
                part = self._source.read(name, at, end)
                with closing(_closable(part.chunks)) as chunks:
                    if part.start != at:
                        raise _no_ranges(name)
                    # An answer that ends where it should is taken to its end: its connection, or client, then serves the next one.
                    whole = end in (part.end, part.total)
                    for chunk in chunks:
                        piece = chunk[: end - at]
                        at += len(piece)
                        self.read += len(chunk)
                        if piece:
                            yield piece
                        if at >= end and not whole:
                            return
                if at < end and (at == before or part.end is None):
                    raise Interrupted(f"{name}: the donor's source ended at byte {at} of {end}")
                tries = 0
            except Interrupted as error:
                tries = 1 if at > before else tries + 1
                if tries > len(self._source.pauses) or error.after_s > LONGEST_PAUSE_S:
                    raise unreachable(error, tries) from error
                wait = max(self._source.pauses[tries - 1], error.after_s)
                self._say(f"{name}: trying again in {wait:g} s: {error}")
                self._sleep(wait)

    def check_unchanged(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """JobFailure donor_changed unless each file is what it was when its header was read."""
        for name, before in files.items():
            if (self._size(name), self._digest(name)) != (before["size"], before["digest"]) or self._state(name) != before.get("state"):
                raise changed(name, "it is another file than the one whose header was read")

    def _state(self, name: str) -> Any:
        """What the source says of a file's identity besides size and digest; None when it says nothing."""
        tell = getattr(self._source, "state", None)
        return self._retried(lambda: tell(name)) if tell else None

    def _digest(self, name: str) -> str:
        """What the source says of the file's content: the hub lists its SHA-256, other sources say nothing."""
        listed = getattr(self._source, "files", {}).get(name)
        return str(getattr(listed, "sha256", "") or getattr(listed, "git", ""))

    def _retried(self, call: Callable[[], Any]) -> Any:
        return with_retries(call, self._source.pauses, self._say, self._sleep)

    def _names(self) -> list[str]:
        """The donor's files; a plain web server has no list of them, but the checkpoint's index has."""
        try:
            return list(self._retried(self._source.names))
        except JobFailure as failure:
            if not {found["class"] for found in failure.problems} <= _NO_LIST:
                raise
        index, _ = _checked(partial(parse_index, self._small(INDEX_NAME, MAX_INDEX_BYTES)))
        return ["config.json", *sorted(set(index.weight_map.values()))]

    def _config(self, names: Sequence[str]) -> dict[str, Any]:
        if "config.json" not in names:
            raise JobFailure(problem("donor_no_config", "the donor has no config.json", "take a complete FP8 checkpoint as donor"))
        try:
            config, _ = parse_json(self._small("config.json", MAX_CONFIG_BYTES))
        except ValueError as fault:
            raise JobFailure(problem("donor_config_damaged", f"the donor's config.json is {fault}", "correct the donor")) from fault
        if not isinstance(config, dict):
            raise JobFailure(problem("donor_config_damaged", "the donor's config.json is not a JSON object", "correct the donor"))
        return config

    def _small(self, name: str, most: int) -> bytes:
        """A small file as a whole."""
        size = self._size(name)
        if size > most:
            evidence = f"{name} of the donor has {size} bytes, more than {most}"
            raise JobFailure(problem("donor_file_too_large", evidence, "check the donor's source"))
        return self._bytes(name, 0, size)

    def _size(self, name: str) -> int:
        size = self._retried(lambda: self._source.size(name))
        if size is None:
            evidence = f"the donor's source does not tell the size of {name}"
            raise JobFailure(
                problem("donor_size_unknown", evidence, "serve the donor with a web server that sends Content-Length (nginx does)")
            )
        return int(size)

    def _bytes(self, name: str, start: int, end: int) -> bytes:
        return b"".join(self.ranges(name, start, end))

    def _header(self, name: str) -> tuple[int, dict[str, DonorTensor]]:
        """A file's size and its tensors, without routed experts."""
        shown = f"{name} of the donor"
        size = self._size(name)
        raw = self._bytes(name, 0, min(8, size))
        length = int.from_bytes(raw, "little")
        if len(raw) < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            # No safetensors file: its beginning tells what it is instead.
            start = self._bytes(name, 0, min(1024, size))
            _checked(lambda: read_stream(io.BytesIO(start), shown, size))
            raise JobFailure(problem("donor_header_damaged", f"{shown} has no header", "check the donor's source"))
        header = self._bytes(name, 8, 8 + length)
        tensors, _ = _checked(lambda: parse_header(header, shown, size - 8 - length))
        base = 8 + length
        return size, {
            key: DonorTensor(name, tensor.dtype, tensor.shape, base + tensor.start, base + tensor.end)
            for key, tensor in tensors.items()
            if not is_routed(key)
        }


def changed(name: str, why: str) -> JobFailure:
    """The failure of a donor that is another one in the middle of a transfer."""
    remedy = "leave the donor alone, then run the same command again: the donor's tensors are fetched anew"
    return JobFailure(problem("donor_changed", f"{name} of the donor changed while it was read: {why}", remedy))


class FolderDonor(FolderSource):
    """A folder that tells when one of its files is replaced or written to."""

    def state(self, name: str) -> Any:
        """Size in bytes, mtime in ns, inode."""
        with self._guard(name):
            info = (self.folder / name).stat()
        return [info.st_size, info.st_mtime_ns, info.st_ino]


class UrlDonor(UrlSource):
    """A web server whose answers must all be of one version of each file, as far as it tells (ETag, Last-Modified)."""

    def __init__(self, base: str, **how: Any) -> None:
        super().__init__(base, **how)
        self.notes: list[str] = []
        self._run = os.urandom(8).hex()
        self._seen: dict[str, list[str]] = {}

    def state(self, name: str) -> Any:
        """Its validators. Of a server that sends none, a value of this run: nothing then tells a later run that the file is the same."""
        self.size(name)
        if any(self._seen.get(name, [])):
            return self._seen[name]
        if not self.notes:
            self.notes.append("the donor's server sends neither ETag nor Last-Modified: a donor that changes meanwhile is not noticed")
        return [self._run]

    def _open(self, name: str, method: str, headers: dict[str, str] | None = None) -> Any:
        answer = super()._open(name, method, headers)
        # Weak or strong: bytes are the same either way, as nothing is compressed on the way.
        told = [(answer.headers.get("ETag") or "").removeprefix("W/"), answer.headers.get("Last-Modified") or ""]
        before = self._seen.setdefault(name, told)
        if told[0] != before[0] or (not told[0] and told[1] != before[1]):
            answer.close()
            raise changed(name, f"the server's answers have ETag or Last-Modified {before}, then {told}")
        return answer


def _closable(chunks: Iterator[bytes]) -> Any:
    """Something that can be closed: a connection must not wait for the garbage collector."""
    return chunks if hasattr(chunks, "close") else (chunk for chunk in chunks)


def _no_ranges(name: str) -> JobFailure:
    evidence = f"{name}: the donor's server ignores Range, so that {name} would come as a whole, and all other files too"
    remedy = "serve the donor with a web server that knows Range requests (nginx does), or copy it to the node and give that folder"
    return JobFailure(problem("donor_without_ranges", evidence, remedy))


def _checked(call: Callable[[], Any]) -> Any:
    """The call's value; what is wrong with a file of the donor as a failure."""
    try:
        return call()
    except BadFile as bad:
        raise JobFailure(*bad.problems) from bad


# --- the donor shard -------------------------------------------------------------------------------------------------------------


def layout_of(order: Sequence[tuple[str, DonorTensor]], files: Mapping[str, Mapping[str, Any]]) -> str:
    """Digest of what the shard will hold, and of where that comes from: an unfinished one is continued only if it is equal."""
    return digest([[name, list(tensor)] for name, tensor in order] + [[name, dict(files[name])] for name in sorted(files)])


def wanted_ranges(pieces: Sequence[Piece], files: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(file, start, end) in the shard's order, neighbours joined. files: of each piece."""
    last: tuple[str, int, int] | None = None
    for piece, file in zip(pieces, files, strict=True):
        if not piece.nbytes:
            continue
        if last and last[0] == file and last[2] == piece.at:
            last = (file, last[1], last[2] + piece.nbytes)
            continue
        if last:
            yield last
        last = (file, piece.at, piece.at + piece.nbytes)
    if last:
        yield last


@dataclass(frozen=True)
class ShardState:
    """A donor shard on disk. size, sha256: of the whole file."""

    size: int
    sha256: str


class DonorShard:
    """The file that the donor's tensors go to. written: bytes of it that this run wrote; read: bytes that it read again."""

    def __init__(self, folder: Path, order: Sequence[tuple[str, DonorTensor]], files: Mapping[str, Mapping[str, Any]], say: Say) -> None:
        self.path, self._journal = folder / SHARD, folder / JOURNAL
        self._order, self._files, self._say = order, files, say
        self._layout = layout_of(order, files)
        self._pieces = donor_pieces(order)
        self._head = header_bytes(self._pieces, {})
        self.size = len(self._head) + sum(piece.nbytes for piece in self._pieces)
        self.read = self.written = 0

    def kept(self) -> ShardState | None:
        """The finished shard of an earlier run, if its bytes are what they were. The donor is not needed."""
        if self._vouched() != self.size:
            return None
        state = self._open_again()
        if state is None:
            return None
        stream, hasher, have = state
        stream.close()
        return ShardState(self.size, hasher.hexdigest()) if have == self.size else None

    def fill(self, donor: Donor, progress: Progress) -> ShardState:
        """Fetch what is missing."""
        progress.stage("donor tensors", self.size, "B")
        stream, hasher, have = self._open_again() or (_fresh(self.path), hashlib.sha256(), 0)
        with stream:
            progress.at(have)
            progress.mark()  # reading again is faster than fetching
            synced = have
            for chunk in self._rest(donor, have):
                _write_all(stream, chunk)
                hasher.update(chunk)
                have += len(chunk)
                self.written += len(chunk)
                progress.at(have, message="")
                if have - synced >= SYNC_BYTES and have < self.size:
                    synced = have
                    self._vouch(stream, have, hasher.hexdigest())
            # Not before the donor was looked at again: scales and weights must be of one and the same.
            try:
                donor.check_unchanged(self._files)
            except JobFailure as failure:
                if failure.problems[0]["class"] != "source_unreachable":
                    self.drop()
                raise
            self._vouch(stream, have, hasher.hexdigest())
        return ShardState(have, hasher.hexdigest())

    def drop(self) -> None:
        """Begin anew the next time."""
        self._journal.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def whole(self) -> bool:
        """Whether the journal vouches for all of it. Its bytes are not read."""
        return self._vouched() == self.size and not self.path.is_symlink() and self.path.is_file()

    def _rest(self, donor: Donor, have: int) -> Iterator[bytes]:
        """The shard's bytes from an offset on."""
        if have < len(self._head):
            yield self._head[have:]
        skip = max(0, have - len(self._head))
        for file, start, end in wanted_ranges(self._pieces, [tensor.file for _, tensor in self._order]):
            if skip >= end - start:
                skip -= end - start
                continue
            yield from donor.ranges(file, start + skip, end)
            skip = 0

    def _vouched(self) -> int:
        """Bytes that the journal vouches for, 0 for a journal of another shard."""
        return self._noted()[0]

    def _noted(self) -> tuple[int, str]:
        noted = read_object(self._journal, {"layout": is_text, "sha256": is_text, "bytes": lambda v: type(v) is int and v >= 0})
        return (noted.get("bytes", 0), noted.get("sha256", "")) if noted.get("layout") == self._layout else (0, "")

    def _open_again(self) -> tuple[BinaryIO, Any, int] | None:
        """The shard, cut to what the journal vouches for; None when there is nothing to continue."""
        vouched, sha256 = self._noted()
        if not 0 < vouched <= self.size or self.path.is_symlink() or not self.path.is_file():
            return None
        stream = self.path.open("r+b", buffering=0)
        hasher, have = hashlib.sha256(), 0
        while have < vouched and (chunk := stream.read(min(READ, vouched - have))):
            hasher.update(chunk)
            have += len(chunk)
        self.read += have
        if have != vouched or hasher.hexdigest() != sha256:
            self._say(f"{self.path.name}: {have} bytes are not what was noted of {vouched}: fetched again")
            stream.close()
            return None
        stream.truncate(vouched)
        return stream, hasher, have

    def _vouch(self, stream: BinaryIO, have: int, sha256: str) -> None:
        os.fsync(stream.fileno())
        write_json(self._journal, {"layout": self._layout, "bytes": have, "sha256": sha256})


def _fresh(path: Path) -> BinaryIO:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    return os.fdopen(descriptor, "r+b", buffering=0)


def _write_all(stream: BinaryIO, data: bytes) -> None:
    """An unbuffered write may take only a part, as on a disk that is nearly full."""
    left = memoryview(data)
    while left:
        left = left[stream.write(left) :]
