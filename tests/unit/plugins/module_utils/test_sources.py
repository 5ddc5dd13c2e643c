# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure
from ansible_collections.dgxspark.vllm.plugins.module_utils.sources import (
    MANIFEST,
    SUMS,
    FolderSource,
    Interrupted,
    Part,
    Source,
    UrlSource,
    clashing,
    open_source,
    parse_content_range,
    parse_sums,
    read_bytes,
    read_list,
    unsafe_name,
    with_retries,
)
from snapshots import FILES, MODEL, fill
from web import Server

H = "ab" * 32
G = "cd" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path / "source", FILES)
    return tmp_path / "source"


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def failed(call: Callable[[], Any]) -> dict[str, Any]:
    with pytest.raises(JobFailure) as caught:
        call()
    return dict(caught.value.problems[0])


# --- names and lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{H}  a.txt\n", {"a.txt": H}),
        (f"{H} *a.txt\n", {"a.txt": H}),
        (f"{H.upper()}  a b.txt\r\n\n{G}  c", {"a b.txt": H, "c": G}),
        (f"{H}  ./a.txt\n", {"a.txt": H}),
        (f"{H}  a\n{H}  a\n", {"a": H}),
        (f"{G}  SHA256SUMS\n{H}  a\n", {"a": H}),  # made a second time with 'sha256sum *'
        (f"{H}  .gitattributes\n{G}  modèle.json\n", {".gitattributes": H, "modèle.json": G}),
        (f"{H}  *a\n", {"*a": H}),
        (f"{H}  sub/dir.safetensors\n{G}  ./sub/a\n", {"sub/dir.safetensors": H, "sub/a": G}),
    ],
)
def test_sums(text: str, expected: dict[str, str]) -> None:
    assert parse_sums(text) == (expected, [])


UNSAFE = [
    "/etc/passwd",
    "../../etc/passwd",
    "./../x",
    "sub/../../x",
    "sub//x",
    "sub/./x",
    "sub/",
    "..\\x",
    "sub\\x",
    "..",
    ".",
    "",
    "a\x00b",
    "a\x1bb",
    "a\ud800b",
    "sub/a\x7f",
    MANIFEST,
    ".dgxspark-snapshot.stamps.json",
    ".dgxspark-snapshot.lock",
    "..dgxspark-snapshot.json.abcd1234",
    ".dgxspark-hybrid.json",
    ".dgxspark-pristine/model.safetensors.index.json",
    "sub/.dgxspark-snapshot.json",
    ".a.0123456789ab.part",
    "sub/.a.0123456789ab.part",
    ".cache/huggingface/download/x.metadata",
    "x" * 300,
    "/".join(["x" * 190] * 6),
]


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_names(name: str) -> None:
    assert unsafe_name(name)


@pytest.mark.parametrize(
    "name", ["a", ".gitattributes", "sub/a", "a..b", "...", ".cache/x", "a.part", "sub.dir/model.safetensors", "é" * 100]
)
def test_safe_names(name: str) -> None:
    assert unsafe_name(name) == ""


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        *((f"{H}  {name}", "unsafe_name") for name in UNSAFE if name and "\n" not in name and name != "./../x"),
        (f"\\{H}  a\\nb", "bad_sums_line"),
        (f"SHA256 (a) = {H}", "bad_sums_line"),
        (f"{H[:40]}  a", "bad_sums_line"),
        (f"{H}\ta", "bad_sums_line"),
        (f"{H} a", "bad_sums_line"),
        (f"{H}  a\n{G}  a", "bad_sums_line"),
        ("<!DOCTYPE html>", "bad_sums_line"),
        ("", "bad_sums_line"),
    ],
)
def test_bad_sums(line: str, kind: str) -> None:
    _, found = parse_sums(line + "\n")
    assert [p["class"] for p in found] == [kind]


def test_every_bad_line_is_reported() -> None:
    assert len(parse_sums(f"{H}  ../a\nnonsense\n{H}  good\n{H}  /b\n")[1]) == 3


def test_a_file_cannot_be_a_folder() -> None:
    assert clashing(["a", "a/b/c", "a/b", "c/d", "cd", "c.d/e"]) == [("a", "a/b"), ("a", "a/b/c"), ("a/b", "a/b/c")]


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("bytes 5-9/20", (5, 10, 20)),
        (" bytes 0-0/1 ", (0, 1, 1)),
        ("bytes 5-9/*", (5, 10, None)),
        ("bytes 9-5/20", None),
        ("bytes 5-/20", None),
        ("bytes */20", None),
        ("5-9/20", None),
        ("", None),
        ("bytes 5-²/20", None),
        ("bytes 5-9999999999999999999/2", None),
    ],
)
def test_content_ranges(text: str, span: Any) -> None:
    assert parse_content_range(text) == span


# --- any source ------------------------------------------------------------------------------------------------------------------

SPANS = [(0, None), (0, 300_000), (0, 1), (1, None), (299_999, 300_000), (100_000, 250_000), (5, 5), (7, 3), (200_000, 400_000)]


@pytest.mark.parametrize("kind", ["folder", "url", "url without Range", "url without HEAD"])
def test_every_source_gives_the_bytes_that_are_asked_for(folder: Path, server: Server, kind: str) -> None:
    if "without" in kind:
        server.faults = {"no_range": True} if "Range" in kind else {"no_head": True}
    source: Source = FolderSource(folder) if kind == "folder" else UrlSource(server.url)
    assert source.names() == sorted([*FILES, *([SUMS] if kind == "folder" else [])])
    assert source.size(MODEL) == (None if kind == "url without HEAD" else 300_000)
    for start, end in SPANS:
        part = source.read(MODEL, start, end)
        got = b"".join(part.chunks)
        whole = FILES[MODEL]
        if kind == "url without Range" and (end is None or end > start):
            assert (part.start, got) == (0, whole), (start, end)
            continue
        assert (part.start, got) == (start, whole[start:end]), (start, end)
        assert part.total in {None, 300_000} and part.end in {None, end if end is None else min(end, 300_000)}
    assert b"".join(source.read("sub/folder/vocab.txt").chunks) == FILES["sub/folder/vocab.txt"]
    assert b"".join(source.read("empty.txt").chunks) == b""


@pytest.mark.parametrize("no_range", [False, True])
def test_bytes_in_memory(folder: Path, server: Server, no_range: bool) -> None:
    server.faults = {"no_range": True} if no_range else {}
    for source in (FolderSource(folder), UrlSource(server.url)):
        for start, end in ((0, 8), (100_001, 250_002), (299_999, 300_000), (4, 4)):
            assert read_bytes(source, MODEL, start, end) == FILES[MODEL][start:end]


def test_bytes_in_memory_that_never_come() -> None:
    class Dry:
        pauses: tuple[int, ...] = ()

        def names(self) -> list[str]:
            return []

        def size(self, _name: str) -> int | None:
            return None

        def read(self, _name: str, start: int = 0, _end: int | None = None) -> Part:
            return Part(start + 1 if start == 7 else start, None, iter([b"ab"] if start < 2 else []))

    assert read_bytes(Dry(), "a", 0, 2) == b"ab"
    for start in (0, 5, 7):  # too little, nothing, and from elsewhere
        with pytest.raises(Interrupted):
            read_bytes(Dry(), "a", start, 9)


def test_a_list_is_not_read_without_end(folder: Path) -> None:
    assert read_list(FolderSource(folder), MODEL, 300_000) == FILES[MODEL]
    assert failed(lambda: read_list(FolderSource(folder), MODEL, 299_999))["class"] == "list_too_big"


@pytest.mark.parametrize(
    ("faults", "slept", "kind"),
    [
        ([], [], None),
        ([Interrupted("a")], [1], None),
        ([Interrupted("a", 7)], [7], None),  # the server knows better
        ([Interrupted("a", 0.5), Interrupted("b")], [1, 2], None),
        ([Interrupted("a")] * 3, [1, 2], "source_unreachable"),
        ([Interrupted("a", 301)], [], "source_unreachable"),
        ([Interrupted("a", kind="rate_limited", remedy="wait")] * 3, [1, 2], "rate_limited"),
    ],
)
def test_retries(faults: list[Interrupted], slept: list[float], kind: str | None) -> None:
    left, pauses, notes = list(faults), [], []  # type: ignore[var-annotated]

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    if kind is None:
        assert with_retries(call, (1, 2), notes.append, pauses.append) == "done"
    else:
        found = failed(lambda: with_retries(call, (1, 2), notes.append, pauses.append))
        assert found["class"] == kind and found["remedy"]
    assert pauses == slept and len(notes) == len(slept)


# --- a folder --------------------------------------------------------------------------------------------------------------------


def test_names_of_a_folder(folder: Path) -> None:
    for name in (MANIFEST, ".cache/huggingface/x", ".dgxspark-pristine/y", "sub/.z.0123456789ab.part"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("own")
    (folder / "link").symlink_to("config.json")
    (folder / "linked").symlink_to("sub")  # a folder behind a link: not gone into, and not left out without a word
    assert FolderSource(folder).names() == sorted([*FILES, SUMS, "link", "linked"])
    assert failed(lambda: FolderSource(folder / "none").names())["class"] == "source_vanished"
    assert failed(lambda: FolderSource(folder / "config.json").names())["class"] == "source_vanished"


@pytest.mark.parametrize(
    ("fault", "kind", "word"),
    [
        (lambda p: p.unlink(), "source_incomplete", "is missing"),
        (lambda p: (p.unlink(), p.symlink_to("../blobs/gone")), "source_incomplete", "link to ../blobs/gone"),
        (lambda p: (p.unlink(), p.mkdir()), "source_damaged", "a folder"),
        (lambda p: (p.unlink(), os.mkfifo(p)), "source_damaged", "FIFO"),
        (lambda p: (p.unlink(), p.symlink_to("/dev/zero")), "source_damaged", "device"),
        (lambda p: p.parent.rename(p.parent.with_name("gone")), "source_vanished", "not a folder"),
    ],
)
def test_faults_of_a_folder(folder: Path, fault: Callable[[Path], Any], kind: str, word: str) -> None:
    source = FolderSource(folder)
    fault(folder / MODEL)
    for call in (lambda: source.size(MODEL), lambda: source.read(MODEL)):
        found = failed(call)
        assert found["class"] == kind and word in found["evidence"] and found["remedy"]


def test_a_file_that_is_cut_while_it_is_read(folder: Path) -> None:
    (folder / "big").write_bytes(bytes(9 << 20))
    chunks = FolderSource(folder).read("big").chunks
    next(chunks)
    os.truncate(folder / "big", 5 << 20)
    assert failed(lambda: list(chunks))["class"] == "source_changed"


# --- a web server ----------------------------------------------------------------------------------------------------------------


def test_names_of_a_server(folder: Path, server: Server) -> None:
    (folder / MANIFEST).write_text(json.dumps({"files": {"b": {}, "a": {}}}))
    assert UrlSource(server.url).names() == ["a", "b"]
    (folder / MANIFEST).write_text("[]")
    assert failed(UrlSource(server.url).names)["class"] == "bad_manifest"
    (folder / MANIFEST).unlink()
    (folder / SUMS).write_bytes(b"\xff")
    assert failed(UrlSource(server.url).names)["class"] == "bad_sums_line"
    (folder / SUMS).unlink()
    assert failed(UrlSource(server.url).names)["class"] == "not_found"


def test_a_slow_answer_comes_piece_by_piece(server: Server) -> None:
    server.faults = {"slow": True}
    pieces = list(open_source(server.url).read(MODEL, 0).chunks)
    assert len(pieces) >= 3 and b"".join(pieces) == FILES[MODEL]


@pytest.mark.parametrize("error", [ConnectionResetError(), http.client.IncompleteRead(b"tail"), http.client.IncompleteRead(b"")])
def test_what_came_before_a_break_is_kept(error: Exception) -> None:
    class Answer(contextlib.nullcontext[None]):
        pieces: ClassVar[list[Any]] = [b"one", b"two", error]

        def read1(self, _most: int) -> Any:
            piece = self.pieces.pop(0)
            if isinstance(piece, Exception):
                raise piece
            return piece

    got = []
    with pytest.raises(Interrupted):
        for chunk in UrlSource._chunks(Answer()):
            got.append(chunk)  # the error comes after the chunks
    assert b"".join(got) == b"onetwo" + getattr(error, "partial", b"")


def test_a_cut_list_is_asked_for_again(server: Server) -> None:
    server.faults = {"length": "5000"}
    with pytest.raises(Interrupted, match="of 5000 bytes"):
        read_list(open_source(server.url), SUMS)


def test_no_server(server: Server) -> None:
    server.shutdown()
    server.server_close()
    away = open_source(server.url, patient=False)
    assert away.pauses == () and open_source(server.url).pauses
    began = time.monotonic()
    with pytest.raises(Interrupted):
        away.size(MODEL)
    assert time.monotonic() - began < 2


class Redirecting(http.server.BaseHTTPRequestHandler):
    """Answers /to/<place> with a redirect to it, anything else with the request's Authorization header."""

    def do_GET(self) -> None:
        place = unquote(self.path).removeprefix("/m/to/")
        if self.path == "/m/limited":
            self.send_response(429)
            self.send_header("Retry-After", "42")
            self.end_headers()
        elif self.path.startswith("/m/echo"):
            self.send_error(int(self.path[-3:]), f"you sent {self.headers.get('Authorization')}")
        elif place != self.path:
            self.send_response(302)
            self.send_header("Location", place.replace("HOST", f"127.0.0.1:{self.server.server_address[1]}"))
            self.end_headers()
        else:
            data = str(self.headers.get("Authorization")).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def other() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/m"
        running.shutdown()


def test_the_token_goes_to_one_origin_only(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within it also after a redirect, to another host or port never, and through no proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    source = UrlSource(other, "geheim", ())

    def got(name: str) -> str:
        return b"".join(source.read(name).chunks).decode()

    assert got("a") == "Bearer geheim" and got("to//m/a") == "Bearer geheim" and got("to//m/to//m/a") == "Bearer geheim"
    assert got("to/http://HOST/x") == "Bearer geheim"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as third:
        threading.Thread(target=third.serve_forever, args=(0.01,), daemon=True).start()
        assert got(f"to/http://127.0.0.1:{third.server_port}/x") == "None"
        assert got(f"to/http://localhost:{third.server_port}/x") == "None"
        # Also not when the other one sends it back.
        back = other.removeprefix("http://").removesuffix("/m")
        assert got(f"to/http://127.0.0.1:{third.server_port}/m/to/http://{back}/x") == "None"
        third.shutdown()


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:text/plain,x"])
def test_a_redirect_leads_to_http_only(other: str, place: str) -> None:
    with pytest.raises((JobFailure, Interrupted)):
        list(UrlSource(other, "", ()).read(f"to/{place}").chunks)


@pytest.mark.parametrize(
    ("code", "kind"), [(401, "not_authorised"), (403, "not_authorised"), (404, "not_found"), (400, "source_unreadable")]
)
def test_a_refusal_never_shows_the_token(other: str, code: int, kind: str) -> None:
    found = failed(lambda: UrlSource(other, "geheim", ()).read(f"echo{code}"))
    assert found["class"] == kind and "geheim" not in str(found) and "***" in found["evidence"]
    assert ("token" in found["remedy"]) and "token" not in failed(lambda: UrlSource(other, "", ()).read(f"echo{code}"))["remedy"]


def test_a_busy_server_says_how_long_to_wait(other: str) -> None:
    with pytest.raises(Interrupted) as caught:
        UrlSource(other, "", ()).read("limited")
    assert caught.value.after_s == 42
    with pytest.raises(Interrupted, match="HTTP 503") as echoed:
        UrlSource(other, "geheim", ()).read("echo503")
    assert "geheim" not in str(echoed.value)
