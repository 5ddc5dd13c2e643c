# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import hashlib
import http.client
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import share
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure, Progress, Stopped
from ansible_collections.dgxspark.vllm.plugins.module_utils.share import Offer, Server, Span, address_problems, local_addresses, span_of
from ansible_collections.dgxspark.vllm.plugins.module_utils.sources import UrlSource
from finished_snapshot import MANIFEST, STAMPS, finished

INDEX = "model.safetensors.index.json"
BIG = random.Random(2).randbytes(400_000)
FILES = {"config.json": b"{}", INDEX: b'{"weight_map": {}}', "model 1.safetensors": BIG, "empty": b"", "sub/deep/x.json": b"[1]"}
TOKEN = "the-token"

# --- addresses -------------------------------------------------------------------------------------------------------------------

FIB = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        +-- 127.0.0.0/31 1 0 0
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
        |-- 127.255.255.255
           /32 link BROADCAST
     +-- 192.168.177.0/24 2 0 2
           |-- 192.168.177.0
              /24 link UNICAST
           |-- 192.168.177.11
              /32 host LOCAL
        |-- 192.168.177.255
           /32 link BROADCAST
           |-- 10.77.0.11
              /32 host LOCAL
"""
INET6 = """00000000000000000000000000000001 01 80 10 80       lo
fe80000000000000004efffe123456ab 02 40 20 80 enP7s7
20010db8000000000000000000000011 02 40 00 80 enP7s7
nonsense
"""


def test_addresses_of_the_node() -> None:
    assert local_addresses(FIB * 2, INET6) == ["10.77.0.11", "192.168.177.11", "2001:db8::11"]
    assert local_addresses("", "") == []
    assert share.node_addresses() == sorted(set(share.node_addresses()), key=share.node_addresses().index)


ADDRESSES = [
    ("127.0.0.1", ""),
    ("192.0.2.7", "not an address of this node"),
    ("2001:db8::7", "not an address of this node"),
    ("0.0.0.0", "not the address of one interface"),
    ("::", "not the address of one interface"),
    ("224.0.0.1", "not the address of one interface"),
    ("localhost", "which no other node reaches"),
    ("no such host.invalid", "neither an IP address nor a name"),
    ("", "neither an IP address nor a name"),
    ("300.1.1.1", "neither an IP address nor a name"),
]


@pytest.mark.parametrize(("address", "said"), ADDRESSES)
def test_addresses(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "node_addresses", lambda: ["192.168.177.11", "10.77.0.11"])
    found = address_problems(address)
    assert [p["class"] for p in found] == (["bad_address"] if said else [])
    assert all(said in p["evidence"] and "192.168.177.11, 10.77.0.11" in p["evidence"] for p in found)


# --- what is offered -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    finished(tmp_path / "snapshot", FILES)
    return tmp_path / "snapshot"


def test_a_finished_snapshot(folder: Path) -> None:
    offer = Offer(folder)
    assert offer.problems() == []
    assert (len(offer.files), offer.total) == (5, sum(map(len, FILES.values())))
    assert offer.sha256 == hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def rewrite(folder: Path, name: str, data: bytes) -> None:
    (folder / name).unlink()
    (folder / name).write_bytes(data)
    os.utime(folder / name, ns=(1, 1))


def touch(folder: Path, name: str) -> None:
    os.utime(folder / name, ns=(1, 1))


def link(folder: Path, name: str) -> None:
    (folder / name).rename(folder / "elsewhere")
    (folder / name).symlink_to("elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a file is gone": (lambda f: (f / "config.json").unlink(), ["config.json: No such file"]),
    "two are gone": (lambda f: [(f / n).unlink() for n in ("empty", "sub/deep/x.json")], ["empty: No", "sub/deep/x.json: No"]),
    "shorter": (lambda f: os.truncate(f / "model 1.safetensors", 5), ["has 5 bytes, the manifest says 400000"]),
    "other content of the same size": (lambda f: rewrite(f, "config.json", b"[]"), ["config.json: changed since"]),
    "a link": (lambda f: link(f, "config.json"), ["config.json: Too many levels of symbolic links"]),
    "a folder": (lambda f: [(f / "empty").unlink(), (f / "empty").mkdir()], ["empty: not a regular file"]),
    "a FIFO": (lambda f: [(f / "empty").unlink(), os.mkfifo(f / "empty")], ["empty: not a regular file"]),
    "only a new time": (lambda f: touch(f, "model 1.safetensors"), []),
    "no stamps at all": (lambda f: (f / STAMPS).unlink(), []),
    "stamps of nonsense": (lambda f: (f / STAMPS).write_text('{"files": {"config.json": [1]}}'), []),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_files_that_are_not_as_verified(folder: Path, case: str) -> None:
    damage, said = DAMAGES[case]
    damage(folder)
    found = Offer(folder).problems()
    assert [p["class"] for p in found] == ["snapshot_incomplete"] * len(said)
    assert all(text in p["evidence"] for text, p in zip(said, found, strict=True))


def test_a_large_file_with_a_new_time_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "SMALL_BYTES", 1000)
    touch(folder, "model 1.safetensors")
    assert "changed since" in Offer(folder).problems()[0]["evidence"]


def test_an_index_that_was_completed_is_offered_as_it_was_downloaded(folder: Path) -> None:
    (folder / ".dgxspark-pristine").mkdir()
    (folder / ".dgxspark-pristine" / INDEX).write_bytes(FILES[INDEX])
    rewrite(folder, INDEX, b'{"weight_map": {"mtp.fc.weight": "x"}}')
    offer = Offer(folder)
    assert offer.problems() == []
    with offer.place(INDEX) as stream:
        assert stream.read() == FILES[INDEX]
    (folder / ".dgxspark-pristine" / INDEX).write_bytes(b'{"weight_map": []}')
    assert "has 38 bytes" in Offer(folder).problems()[0]["evidence"]


MANIFESTS: dict[str, Any] = {
    "not JSON": "{",
    "deep": "[" * 100_000,
    "a list": "[]",
    "no files": {},
    "leads out": {"../passwd": {"size": 1, "sha256": "a" * 64}},
    "absolute": {"/etc/passwd": {"size": 1, "sha256": "a" * 64}},
    "its own": {MANIFEST: {"size": 1, "sha256": "a" * 64}},
    "no digest": {"config.json": {"size": 2}},
    "size is true": {"config.json": {"size": True, "sha256": "a" * 64}},
    "negative": {"config.json": {"size": -2, "sha256": "a" * 64}},
    "bad digest": {"config.json": {"size": 2, "sha256": "A" * 64}},
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests_that_are_refused(folder: Path, case: str) -> None:
    path, value = folder / MANIFEST, MANIFESTS[case]
    whole = json.loads(path.read_text()) | {"files": value}
    path.write_text(value if isinstance(value, str) else json.dumps(whole, indent=1, sort_keys=True) + "\n")
    with pytest.raises(JobFailure) as caught:
        Offer(folder)
    assert [p["class"] for p in caught.value.problems] == ["snapshot_damaged"]
    assert str(path) in caught.value.problems[0]["evidence"]


def test_without_a_manifest_a_snapshot_is_not_finished(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(JobFailure) as caught:
        Offer(folder)
    assert [p["class"] for p in caught.value.problems] == ["snapshot_incomplete"]
    assert str(folder / MANIFEST) in caught.value.problems[0]["evidence"]


# --- ranges --------------------------------------------------------------------------------------------------------------------------

RANGES: list[tuple[str, int, Span | None]] = [
    ("", 10, Span(0, 10, False)),
    ("bytes=0-", 10, Span(0, 10, True)),
    ("bytes=3-4", 10, Span(3, 5, True)),
    ("bytes=3-99", 10, Span(3, 10, True)),
    ("bytes=-3", 10, Span(7, 10, True)),
    ("bytes=-99", 10, Span(0, 10, True)),
    ("bytes=10-", 10, None),
    ("bytes=-0", 10, None),
    ("bytes=0-", 0, None),
    ("bytes=-", 10, Span(0, 10, False)),
    ("bytes=5-3", 10, Span(0, 10, False)),
    ("bytes=0-1,3-4", 10, Span(0, 10, False)),
    ("bytes=\u0664-", 10, Span(0, 10, False)),
    ("bytes=" + "9" * 30 + "-", 10, Span(0, 10, False)),
]


@pytest.mark.parametrize(("asked", "size", "span"), RANGES)
def test_ranges(asked: str, size: int, span: Span | None) -> None:
    assert span_of(asked, size) == span


# --- the server ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    made = Server(Offer(folder), "127.0.0.1", 0, TOKEN, say=lambda _line: None)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.end()
    thread.join(5)


def ask(server: Server, path: str, method: str = "GET", token: str | None = TOKEN, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, headers=headers | ({"Authorization": f"Bearer {token}"} if token is not None else {}))
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("name", sorted(FILES))
def test_serves_what_the_manifest_lists(server: Server, name: str) -> None:
    path = "/" + name.replace(" ", "%20")
    status, headers, data = ask(server, path)
    assert (status, data, headers["Content-Length"]) == (200, FILES[name], str(len(FILES[name])))
    assert headers["ETag"] == f'"{hashlib.sha256(FILES[name]).hexdigest()}"'
    status, headers, data = ask(server, path, "HEAD", Range="bytes=1-")
    assert (status, data, headers["Content-Length"]) == (200, b"", str(len(FILES[name])))


def test_serves_its_manifest(server: Server, folder: Path) -> None:
    assert ask(server, f"/{MANIFEST}")[2] == (folder / MANIFEST).read_bytes()


@pytest.mark.parametrize(
    ("asked", "status", "start", "end"), [("bytes=5-", 206, 5, 400_000), ("bytes=7-9", 206, 7, 10), ("bytes=400000-", 416, 0, 0)]
)
def test_serves_ranges(server: Server, asked: str, status: int, start: int, end: int) -> None:
    got, headers, data = ask(server, "/model%201.safetensors", Range=asked)
    assert (got, data) == (status, BIG[start:end])
    assert headers["Content-Range"] == (f"bytes {start}-{end - 1}/400000" if data else "bytes */400000")


@pytest.mark.parametrize("token", [None, "", "the-toke", "the-token-", "THE-TOKEN", "tökèn"])
@pytest.mark.parametrize("path", [f"/{MANIFEST}", "/config.json", "/none", "/"])
def test_without_the_token_nothing_is_told(server: Server, token: str | None, path: str) -> None:
    status, headers, data = ask(server, path, token=token)
    assert (status, data, headers["WWW-Authenticate"]) == (401, b"", "Bearer")
    assert "ETag" not in headers


def test_credentials_of_another_kind_are_none(server: Server) -> None:
    assert ask(server, "/config.json", token=None, Authorization=TOKEN)[0] == 401
    assert ask(server, "/config.json", token=None, Authorization=f"Basic {TOKEN}")[0] == 401


OTHER_NAMES = [
    "/", "/none", "/SHA256SUMS", f"/{STAMPS}", "/.dgxspark-pristine/config.json", "/sub", "/sub/", "/sub/../config.json",
    "/../snapshot/config.json", "/%2e%2e/snapshot/config.json", "/config.json/", "/config.json%00", "/etc/passwd",
]  # fmt: skip


@pytest.mark.parametrize("path", OTHER_NAMES)
def test_serves_nothing_else(server: Server, folder: Path, path: str) -> None:
    (folder / "SHA256SUMS").write_text("x")
    status, _, data = ask(server, path)
    assert (status, data) == (404, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reads(server: Server, method: str) -> None:
    assert ask(server, "/config.json", method)[0] == 501


def test_a_file_that_changes_while_it_is_shared(server: Server, folder: Path) -> None:
    rewrite(folder, "config.json", b"[]")
    assert ask(server, "/config.json")[0] == 409
    assert ask(server, f"/{MANIFEST}")[0] == 200


def cut(folder: Path) -> None:
    os.truncate(folder / "config.json", 1)


def replaced(folder: Path) -> None:
    rewrite(folder, "config.json", b"[]")


def gone(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize("change", [cut, replaced, gone])
def test_who_reads_learns_where_to_mend_it(
    server: Server, folder: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(share.socket, "gethostname", lambda: "spark-head")
    change(folder)
    status, _, body = ask(server, "/config.json")
    assert status == 409 and b"on spark-head" in body and b"checkpoint_verify: full" in body and b"-l spark-head" in body
    assert ask(server, "/config.json", "HEAD")[2] == b""
    with pytest.raises(JobFailure) as caught:
        UrlSource(server.url, TOKEN, ()).read("config.json")
    evidence = caught.value.problems[0]["evidence"]
    assert "409" in evidence and "spark-head" in evidence and "checkpoint_verify: full" in evidence
    found = Offer(folder).problems()
    assert len(found) == 1 and "on spark-head" in found[0]["remedy"] and "checkpoint_verify: full" in found[0]["remedy"]


@pytest.mark.parametrize("manifest", [None, b"{}", b"\xff"])
def test_an_unfinished_snapshot_names_its_node(folder: Path, manifest: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share.socket, "gethostname", lambda: "spark-head")
    (folder / MANIFEST).unlink() if manifest is None else (folder / MANIFEST).write_bytes(manifest)
    with pytest.raises(JobFailure) as caught:
        Offer(folder)
    remedy = caught.value.problems[0]["remedy"]
    assert "on spark-head" in remedy and "ansible-playbook" in remedy and "-l spark-head" in remedy


def test_the_manifest_stays_that_of_the_beginning(server: Server, folder: Path) -> None:
    before = (folder / MANIFEST).read_bytes()
    finished(folder, {"config.json": b"other"})
    assert ask(server, f"/{MANIFEST}")[2] == before


def test_many_readers_at_once_get_everything(server: Server) -> None:
    got: list[bytes] = []
    readers = [threading.Thread(target=lambda: got.append(ask(server, "/model%201.safetensors")[2])) for _ in range(12)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(10)
    assert got == [BIG] * 12


def test_more_connections_than_it_has_threads_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share, "CLIENTS", 2)
    held = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(2)]
    try:
        until = time.monotonic() + 5
        while ask(server, "/config.json")[0] != 503 and time.monotonic() < until:
            time.sleep(0.01)
        status, headers, _ = ask(server, "/config.json")
        assert (status, headers["Retry-After"]) == (503, "2")
    finally:
        for connection in held:
            connection.close()
    until = time.monotonic() + 5
    while (status := ask(server, "/config.json")[0]) == 503 and time.monotonic() < until:
        time.sleep(0.01)
    assert status == 200


def test_a_silent_connection_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share._Handler, "timeout", 0.1)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as silent:
        silent.sendall(b"GET /config.json HTTP/1.1\r\n")
        assert silent.recv(100) == b""


def test_only_authorised_requests_keep_it_alive(server: Server) -> None:
    time.sleep(0.1)
    ask(server, "/config.json", token="no")
    assert server.idle_s() >= 0.1
    ask(server, "/config.json")
    until = time.monotonic() + 5
    while server.idle_s() == 0 and time.monotonic() < until:
        time.sleep(0.001)
    assert server.idle_s() < 0.1


# --- the job -------------------------------------------------------------------------------------------------------------------------


def spec_of(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "path": str(tmp_path / "snapshot"),
        "address": "127.0.0.1",
        "port": 0,
        "idle_s": 0.3,
        "state_file": str(tmp_path / "share.json"),
        **more,
    }


def test_serves_until_idle(tmp_path: Path, folder: Path) -> None:
    before = set(threading.enumerate())
    result: list[dict[str, Any]] = []
    job = threading.Thread(target=lambda: result.append(share.serve(spec_of(tmp_path), Progress(tmp_path / "progress.json"))))
    job.start()
    file = tmp_path / "share.json"
    until = time.monotonic() + 5
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.005)
    state = json.loads(file.read_text())
    assert file.stat().st_mode & 0o777 == 0o600
    assert (state["manifest_sha256"], state["url"]) == (Offer(folder).sha256, f"http://127.0.0.1:{state['port']}")
    assert len(state["token"]) >= 40
    began = time.monotonic()
    while time.monotonic() - began < 0.6:  # longer than idle_s, with requests
        assert share.answers(state)
        time.sleep(0.05)
    assert job.is_alive()
    job.join(5)
    assert not job.is_alive()
    assert result == [{"bytes": 0}]
    assert not file.exists()
    assert not share.answers(state)
    assert set(threading.enumerate()) <= before


def test_the_end_by_signal_leaves_no_token(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_seconds: float) -> None:
        raise Stopped

    before = set(threading.enumerate())
    monkeypatch.setattr(share.time, "sleep", stopped)
    with pytest.raises(Stopped):
        share.serve(spec_of(tmp_path), Progress(tmp_path / "progress.json"))
    assert not (tmp_path / "share.json").exists()
    assert set(threading.enumerate()) <= before


def test_a_port_that_is_taken(tmp_path: Path, folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(JobFailure) as caught:
            share.serve(spec_of(tmp_path, port=port), Progress(tmp_path / "progress.json"))
    assert caught.value.problems[0]["class"] == "port_taken"
    assert f"127.0.0.1 port {port}" in caught.value.problems[0]["evidence"]


def test_serves_over_ipv6(folder: Path) -> None:
    try:
        made = Server(Offer(folder), "::1", 0, TOKEN)
    except OSError:
        pytest.skip("this machine has no IPv6")
    made.server_close()
    assert made.url == f"http://[::1]:{made.server_port}"
