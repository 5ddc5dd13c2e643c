# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The script without a hub: what errors become, and how it answers. test_snapshot_hub.py runs it against one."""

from __future__ import annotations

import errno
import html
import io
import itertools
import json
import os
import subprocess
import sys
import threading
import types
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import httpx2
import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import hub_client
from ansible_collections.dgxspark.vllm.plugins.module_utils.hub_client import (
    OddAnswer,
    Unsuitable,
    XetFailed,
    classify,
    listed,
    within,
    without,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_hub import BOOT
from huggingface_hub import errors
from huggingface_hub.utils import hf_raise_for_status

TOKEN = "hf_geheim+/="
URL = "https://hub.example/org/name/resolve/main/config.json"


def answer(status: int, headers: dict[str, str] | None = None, url: str = URL, body: bytes = b"{}") -> BaseException:
    """What the library raises for an HTTP answer."""
    response = httpx2.Response(status, headers=headers or {}, content=body, request=httpx2.Request("GET", url))
    with pytest.raises(Exception) as caught:
        hf_raise_for_status(response)
    return caught.value


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    try:
        raise error from cause
    except type(error) as made:
        return made


def full(path: str) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


ANSWERS = [
    (answer(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"}), "", "gated_no_token", False),
    (answer(403, {"X-Error-Code": "GatedRepo"}), TOKEN, "gated_not_granted", False),
    (answer(401, {"X-Error-Code": "RepoNotFound"}), "", "repo_not_found", False),
    (answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"}), TOKEN, "not_authorised", False),
    (answer(401, url="http://127.0.0.1/api/models/org/name"), "", "not_authorised", False),
    (answer(403), TOKEN, "not_authorised", False),
    (answer(403, {"X-Error-Message": "Access to this resource is disabled."}), TOKEN, "not_authorised", False),
    (answer(404, {"X-Error-Code": "RepoNotFound"}), "", "repo_not_found", False),
    (answer(404, {"X-Error-Code": "RevisionNotFound"}), "", "revision_not_found", False),
    (answer(404, {"X-Error-Code": "EntryNotFound"}), "", "file_not_found", False),
    (answer(404), "", "file_not_found", False),
    (answer(404, url="https://hub.example/api/models/a/b"), "", "repo_not_found", False),
    (answer(410), "", "file_not_found", False),
    (answer(429), "", "rate_limited", True),
    (answer(408), "", "hub_error", True),
    (answer(500), "", "hub_error", True),
    (answer(502), "", "hub_error", True),
    (answer(503), "", "hub_error", True),
    (answer(504), "", "hub_error", True),
    (answer(400), "", "hub_refused", False),
    (answer(418), "", "hub_refused", False),
    (answer(451), TOKEN, "hub_refused", False),
    (answer(407), "", "proxy_auth", False),
    (answer(407, url="https://hub.example/api/models/a/b"), TOKEN, "proxy_auth", False),
]


@pytest.mark.parametrize(("error", "token", "kind", "retryable"), ANSWERS)
def test_answers(error: BaseException, token: str, kind: str, retryable: bool) -> None:
    found = classify(error, token)
    assert (found["class"], found["retryable"]) == (kind, retryable)
    assert f"HTTP {error.response.status_code} for http" in found["evidence"]  # type: ignore[attr-defined]


OTHERS = [
    (httpx2.ConnectError("[Errno 111] Connection refused"), "hub_unreachable", True),
    (httpx2.ConnectError("[Errno -3] Temporary failure in name resolution"), "hub_unreachable", True),
    (httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"), "hub_unreachable", False),
    (httpx2.ConnectTimeout(""), "hub_unreachable", True),
    (httpx2.ReadTimeout(""), "hub_unreachable", True),
    (httpx2.ReadError("Connection reset by peer"), "hub_unreachable", True),
    (httpx2.RemoteProtocolError("peer closed connection without sending complete message body"), "hub_unreachable", True),
    (httpx2.ProxyError("403 Forbidden"), "hub_unreachable", True),
    (httpx2.ProxyError("407 Proxy Authentication Required"), "proxy_auth", False),
    (httpx2.UnsupportedProtocol("Request URL is missing"), "hub_answer_odd", False),
    (httpx2.TooManyRedirects("Exceeded"), "hub_answer_odd", False),
    (OddAnswer("no list"), "hub_answer_odd", False),
    (ConnectionResetError(104, "Connection reset by peer"), "hub_unreachable", True),
    (errors.OfflineModeIsEnabled("offline mode is enabled"), "hub_unreachable", False),
    (filelock.Timeout("/d/x.lock"), "lock_timeout", True),
    (full("/state/cache/huggingface/.locks/abc.lock"), "disk_full", False),  # it is not the lock that is at fault
    (raised_from(RuntimeError("could not lock"), full("/d/a.lock")), "disk_full", False),
    (RuntimeError("Data processing error: No space left on device (os error 28)"), "disk_full", False),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "/d/a"), "disk_full", False),
    (raised_from(errors.LocalEntryNotFoundError("no"), httpx2.ConnectError("refused")), "hub_unreachable", True),
    (raised_from(errors.LocalEntryNotFoundError("no"), answer(503)), "hub_error", True),
    (raised_from(errors.LocalEntryNotFoundError("no"), full("/d")), "disk_full", False),
    (errors.HFValidationError("Repo id must be in the form"), "repo_not_found", False),
    (json.JSONDecodeError("Expecting value", "<html>", 0), "hub_answer_odd", False),
    (XetFailed("CAS service error"), "xet_failed", True),
    (Unsuitable("too old"), "client_unsuitable", False),
    (KeyError("x"), "hub_client_failed", False),
    # By their words, whatever class they have.
    (OSError("You are trying to access a gated repo.\nMake sure to have access to it."), "gated_no_token", False),
    (OSError(f"Cannot access gated repo for url {URL}. 401 Client Error."), "gated_no_token", False),
    (OSError("403 Client Error: Forbidden for url"), "not_authorised", False),
    (OSError("401 Client Error: Unauthorized"), "not_authorised", False),
    (OSError("404 Client Error. Repository Not Found for url"), "repo_not_found", False),
    (OSError("404 Client Error. Revision Not Found for url"), "revision_not_found", False),
]


@pytest.mark.parametrize(("error", "kind", "retryable"), OTHERS)
def test_other_errors(error: BaseException, kind: str, retryable: bool) -> None:
    found = classify(error)
    assert (found["class"], found["retryable"]) == (kind, retryable) and found["evidence"]


def test_with_a_token_gated_means_not_granted() -> None:
    assert classify(OSError("You are trying to access a gated repo."), TOKEN)["class"] == "gated_not_granted"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"retry-after": " 120 "}, 120),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"Retry-After": "-5"}, 0),
        ({"Retry-After": "²"}, 0),
        ({"ratelimit": '"api";r=0;t=55'}, 55),
        ({"ratelimit": '"api";r=3;t=55'}, 0),
        ({}, 0),
    ],
)
def test_how_long_the_hub_asks_to_wait(headers: dict[str, str], seconds: float) -> None:
    raw = [(k.encode(), v.encode("utf-8")) for k, v in headers.items()]
    response = httpx2.Response(429, headers=raw, request=httpx2.Request("GET", URL))
    with pytest.raises(errors.HfHubHTTPError) as caught:
        hf_raise_for_status(response)
    assert classify(caught.value)["after_s"] == seconds


def test_the_token_and_signatures_are_in_no_text() -> None:
    for error in (
        answer(401, {"X-Error-Message": f"your token {TOKEN} is bad"}),
        answer(403, body=json.dumps({"error": f"no: {TOKEN}"}).encode()),
        answer(500, url=f"https://cdn.example/x?Signature=secret&token={TOKEN}"),
        RuntimeError(f"sent {TOKEN} and https://cdn.example/x?X-Amz-Signature=secret to it"),
        RuntimeError("sent hf_geheim%2B%2F%3D"),
    ):
        text = str(classify(error, TOKEN))
        assert "geheim" not in text and "secret" not in text
    assert without("", "nothing to hide") == "nothing to hide"
    assert len(str(classify(RuntimeError("x" * 10_000)))) < 1500


@pytest.mark.parametrize("inside", ["+/=", "\n", "'\"", "\u00e9\u200b", "\\ ", "<&>", "/%"])
def test_the_token_is_found_in_every_quoting(inside: str) -> None:
    secret = f"geheim{inside}geheim"
    for text in (
        repr(secret),
        repr(f"Bearer {secret}".encode()),
        json.dumps({"token": secret}),
        json.dumps(secret, ensure_ascii=False),
        urllib.parse.quote(secret),
        urllib.parse.quote_plus(secret),
        html.escape(secret),
        f"x{secret}x",
    ):
        shown = without(secret, f"Illegal header value {text} in it")
        assert "***" in shown and "geh" not in shown


def test_a_token_at_the_cut_is_found() -> None:
    for before in range(hub_client.MOST_SHOWN - len(TOKEN) - 20, hub_client.MOST_SHOWN + 5):
        assert "geh" not in classify(RuntimeError("x" * before + TOKEN + "y" * 900), TOKEN)["evidence"]


def test_a_proxys_password_is_in_no_text() -> None:
    for text in ("http://user:s3cret@proxy:99999", "'https://s3cret@[bad:9'", "cannot reach socks5://a:s3cret@h/x"):
        assert "s3cret" not in classify(httpx2.ProxyError(text))["evidence"] and "s3cret" not in without("", text)


# --- lists -----------------------------------------------------------------------------------------------------------------------

SHA = "Ab" * 20
PLAIN, LFS = {"rfilename": "a", "size": 3, "blobId": "cd" * 20}, {"rfilename": "b", "lfs": {"size": 5, "sha256": "ef" * 32}}
LISTED = {"sha": SHA, "siblings": [PLAIN, LFS, PLAIN, {"rfilename": "c"}]}


def test_a_list_of_files() -> None:
    told = listed(json.dumps(LISTED).encode(), URL)
    assert told == {
        "commit": SHA.lower(),
        "files": {
            "a": {"size": 3, "sha256": "", "git": "cd" * 20},
            "b": {"size": 5, "sha256": "ef" * 32, "git": ""},
            "c": {"size": None, "sha256": "", "git": ""},
        },
    }


def plain(**more: Any) -> dict[str, Any]:
    return {**LISTED, "siblings": [{**PLAIN, **more}]}


def lfs(value: Any) -> dict[str, Any]:
    return {**LISTED, "siblings": [{"rfilename": "b", "size": 5, "lfs": value}]}


ODD: list[Any] = [
    [],
    None,
    "hello",
    {"status": "ok"},
    {"siblings": []},
    {**LISTED, "sha": 5},
    {**LISTED, "sha": None},
    {**LISTED, "sha": "../../x"},
    {**LISTED, "sha": "main"},
    {**LISTED, "siblings": None},
    {**LISTED, "siblings": {"a": 1}},
    {**LISTED, "siblings": ["a"]},
    {**LISTED, "siblings": [PLAIN, {**PLAIN, "size": 4}]},
    plain(size="3"),
    plain(size=-1),
    plain(size=1.5),
    plain(size=True),
    plain(size=1 << 70),
    plain(blobId=7),
    plain(blobId="xyz"),
    plain(rfilename=5),
    plain(rfilename=""),
    plain(rfilename=None),
    plain(rfilename="\ud800"),
    lfs("x"),
    lfs({"size": 5}),
    lfs({"size": 5, "sha256": "ab"}),
    lfs({"size": "5", "sha256": "ef" * 32}),
    lfs({"sha256": "ef" * 32}),
    b"",
    b"<html>log in</html>",
    json.dumps(LISTED).encode()[:-9],
    b"[" * 100_000,
    b'{"sha": ' + b"9" * 5000 + b"}",
    b"\xff\xfe",
]


@pytest.mark.parametrize("told", ODD, ids=range(len(ODD)))
def test_lists_that_are_not_a_hubs(told: Any) -> None:
    with pytest.raises(OddAnswer) as caught:
        listed(told if isinstance(told, bytes) else json.dumps(told).encode(), URL)
    found = classify(caught.value)
    assert found["class"] == "hub_answer_odd" and not found["retryable"] and "hub.example" in found["evidence"]
    assert len(found["evidence"]) <= hub_client.MOST_SHOWN


@pytest.mark.parametrize(
    ("chunks", "left", "whole"),
    [
        ([b"abc", b"def"], None, b"abcdef"),
        ([b"abc", b"def"], 6, b"abcdef"),
        ([b"abc", b"def"], 9, b"abcdef"),
        ([b"abc", b"def", b"ghi"], 4, b"abcd"),
        ([b"abc", b"def"], 3, b"abc"),
        ([b"abc"], 0, b""),
        ([b"abc"], -5, b""),
        ([], 5, b""),
    ],
)
def test_no_more_than_was_asked_for(chunks: list[bytes], left: int | None, whole: bytes) -> None:
    assert b"".join(within(iter(chunks), left)) == whole
    endless = itertools.repeat(b"abc")
    if left is not None:
        assert len(b"".join(within(endless, left))) == max(0, left)


# --- the process -----------------------------------------------------------------------------------------------------------------


class Fake:
    """A library that does as the test wants."""

    def __init__(self, _token: str = "") -> None:
        self.version, self.xet = "1.2.3", ""

    def list(self, repo: str, revision: str) -> dict[str, Any]:
        if repo == "gated":
            raise answer(403, {"X-Error-Code": "GatedRepo"})
        return {"commit": revision * 40, "files": {}}

    def read(self, request: dict[str, Any]) -> Iterator[Any]:
        yield {"start": request["start"], "total": 6, "end": None, "via": "http"}
        yield b"abc"
        yield b""
        if request["name"] == "broken":
            raise httpx2.ReadError("reset")
        yield b"def\n"


class Lines(io.RawIOBase):
    """Requests one by one; then it waits, as a pipe does that is still open."""

    def __init__(self, requests: list[Any]) -> None:
        self._lines = [json.dumps(r).encode() + b"\n" for r in requests]
        self.dry, self.more = threading.Event(), threading.Event()

    def readline(self, _size: int | None = -1, /) -> bytes:
        if self._lines:
            return self._lines.pop(0)
        self.dry.set()
        self.more.wait()
        return b"\n"


def served(requests: list[Any], make: Any = Fake) -> list[bytes]:
    out, lines = io.BytesIO(), Lines(requests)
    expected = len(requests)
    thread = threading.Thread(target=hub_client.serve, args=(lines, out, make), daemon=True)
    thread.start()
    for _ in range(500):
        if sum(out.getvalue().count(mark) for mark in (b'{"ok"', b'{"error"')) >= expected:
            break
        thread.join(0.01)
    return out.getvalue().split(b"\n")


def test_requests_and_answers() -> None:
    read = {"do": "read", "repo": "a", "commit": "c", "name": "n", "start": 0, "end": None, "xet": True}
    lines = served(
        [
            {"do": "hello"},
            {"do": "list", "repo": "a", "revision": "b"},
            {"do": "list", "repo": "gated", "revision": "b"},
            read,
            {**read, "name": "broken", "start": 3},
        ]
    )
    assert json.loads(lines[0]) == {"ok": {"version": "1.2.3", "xet": ""}}
    assert json.loads(lines[1])["ok"]["commit"] == "b" * 40
    assert json.loads(lines[2])["error"]["class"] == "gated_no_token"
    assert json.loads(lines[3])["part"]["start"] == 0
    assert lines[4:9] == [
        b'{"bytes": 3}',
        b'abc{"bytes": 4}',
        b"def",
        b'{"ok": {}}',
        b'{"part": {"start": 3, "total": 6, "end": null, "via": "http"}}',
    ]
    assert lines[9] == b'{"bytes": 3}' and lines[10].startswith(b'abc{"error"') and b"hub_unreachable" in lines[10]


class Groups:
    """Xet storage, and how often it was connected to."""

    def __init__(self, data: bytes, fault: BaseException | None = None) -> None:
        self.data, self.fault, self.made = data, fault, 0

    def __call__(self, _data: Any) -> Groups:
        self.made += 1
        return self

    def download_stream(self, _file: Any, start: int, end: int) -> Iterator[bytes]:
        yield self.data[start : start + 3]
        if self.fault:
            raise self.fault
        yield self.data[start + 3 : end]


def xet_library(monkeypatch: pytest.MonkeyPatch, groups: Groups) -> Any:
    library = hub_client.Library("")
    library.xet = "1"
    monkeypatch.setattr(library, "_xet_group", groups)
    told = types.SimpleNamespace(xet_file_data=types.SimpleNamespace(file_hash="ab" * 32), size=len(groups.data))
    monkeypatch.setattr(library._hub, "get_hf_file_metadata", lambda **_more: told, raising=False)
    return library


def test_ranges_of_xet_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(os.urandom(3 * hub_client.CHUNK + 17))
    library, whole = xet_library(monkeypatch, groups), groups.data
    request = {"repo": "a/b", "commit": "c" * 40, "name": "n", "xet": True}
    for start, end in ((0, None), (5, None), (0, 10), (2, len(whole) + 9), (len(whole), None)):
        part, *chunks = library.read({**request, "start": start, "end": end})
        assert b"".join(chunks) == whole[start:end] and part["total"] == len(whole) and part["via"] == "xet"
        assert part["end"] == (10 if end == 10 else None) and all(len(chunk) <= hub_client.CHUNK for chunk in chunks)
    assert groups.made == 1  # one connection for many ranges


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (RuntimeError("CAS service error: 500"), "xet_failed"),
        (OSError(errno.ENOSPC, "full"), "disk_full"),
        (ValueError("odd"), "xet_failed"),
    ],
)
def test_xet_storage_that_fails(monkeypatch: pytest.MonkeyPatch, fault: BaseException, kind: str) -> None:
    groups = Groups(b"abcdef", fault)
    library = xet_library(monkeypatch, groups)
    request = {"repo": "a/b", "commit": "c" * 40, "name": "n", "xet": True, "start": 0, "end": None}
    for _ in range(2):
        pieces = library.read(request)
        assert next(pieces)["via"] == "xet" and next(pieces) == b"abc"
        with pytest.raises((XetFailed, OSError)) as caught:
            next(pieces)
        assert classify(caught.value)["class"] == kind
    assert groups.made == 2  # connected anew after a fault


def test_a_library_that_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = served([{"do": "hello"}], lambda _token: (_ for _ in ()).throw(Unsuitable("too old")))
    assert json.loads(lines[0])["error"]["class"] == "client_unsuitable"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Unsuitable):
        hub_client.Library("")


def test_a_release_with_another_kind_of_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.0 it was requests', whose `stream` is a flag."""
    hub, utils = types.ModuleType("huggingface_hub"), types.ModuleType("huggingface_hub.utils")
    vars(hub).update(__version__="0.36.0", utils=utils)
    vars(utils).update(get_session=lambda: types.SimpleNamespace(stream=False))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    with pytest.raises(Unsuitable, match=r"0\.36\.0"):
        hub_client.Library("")


def test_the_process_ends_with_its_input_and_needs_nothing_of_the_collection(tmp_path: Path) -> None:
    text = Path(str(hub_client.__file__)).read_bytes()
    command = [sys.executable, "-I", "-B", "-c", BOOT]
    env = {"HF_HOME": str(tmp_path), "HF_TOKEN_PATH": str(tmp_path / "none"), "HF_HUB_DISABLE_XET": "1"}  # as in check mode
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/") as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"%d\n" % len(text) + text + b'{"do": "hello"}\n')
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["ok"]["version"] >= "1"
        process.stdin.close()
        assert process.wait(10) == 0
    assert list(tmp_path.iterdir()) == []


def test_the_token_comes_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    assert hub_client.read_token() == ""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert hub_client.read_token() == TOKEN
