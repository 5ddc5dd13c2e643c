# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A finished snapshot, readable by other nodes for a while: a small file server with a token, which ends by itself.

It serves the manifest and what the manifest lists, nothing else. Who reads from it checks every file against the manifest, whose SHA-256
it was told by a safer way; this side only makes sure that a file is still what it was when it was verified.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import http.client
import ipaddress
import os
import re
import secrets
import socket
import socketserver
import stat
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

from .files import file_sha256, write_json
from .jobs import JobFailure, Progress, is_number, is_text, read_object, work_on
from .problems import Problem, problem
from .snapshot_files import PRISTINE, STAMPS, is_note, parse_manifest
from .sources import MANIFEST, MAX_LIST_BYTES

SMALL_BYTES = 64 << 20  # a file up to this size is read again when its time has changed; indexes of huge models have some 10 MB
PIECE = 16 << 20  # bytes between two looks at the clock, and between two words to the page cache
CLIENTS = 32  # connections at once; more are asked to come again
QUIET_S = 60  # the longest that a connection may neither send nor take a byte
LOOK_S = 0.2

FULL = " with checkpoint_verify: full"  # as only the content tells that it is another
NONE: Mapping[str, str] = {}
STATE = {"url": is_text, "token": is_text, "port": is_number, "manifest_sha256": is_text}


def run_again(how: str = "") -> str:
    """What makes a snapshot of this node whole. The node is named: who reads this started a play of several."""
    host = socket.gethostname()
    return f"on {host}, run the checkpoint role there first{how}: ansible-playbook ... -l {host} (its name in the inventory)"


# --- where it listens ----------------------------------------------------------------------------------------------------------------


def local_addresses(fib_trie: str, if_inet6: str) -> list[str]:
    """IP addresses of this node, from the text of /proc/net/fib_trie and /proc/net/if_inet6; loopback and link-local ones left out."""
    found = re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", fib_trie)
    for line in if_inet6.splitlines():
        digits = line.split()[:1]
        if digits and re.fullmatch(r"[0-9a-f]{32}", digits[0]):
            found.append(str(ipaddress.IPv6Address(int(digits[0], 16))))
    known = {ipaddress.ip_address(text) for text in found}
    return [str(a) for a in sorted(known, key=lambda a: (a.version, int(a))) if not (a.is_loopback or a.is_link_local)]


def node_addresses() -> list[str]:
    """local_addresses of this node."""

    def text(name: str) -> str:
        with suppress(OSError):
            return Path("/proc/net", name).read_text()
        return ""

    return local_addresses(text("fib_trie"), text("if_inet6"))


def resolved(address: str) -> str:
    """An address as it is, or that of a name. '' for a name that nothing resolves."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(address))
    with suppress(OSError):
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    return ""


def address_problems(address: str) -> list[Problem]:
    """What is wrong with the address to listen on: none, all addresses at once, another node's."""
    has = "this node has " + (", ".join(node_addresses()) or "none but loopback addresses")
    remedy = "give an address of this node in the network of the nodes that read from it (role variable checkpoint_peer_address)"
    ip = resolved(address)
    if not ip:
        return [problem("bad_address", f"address {address!r} is neither an IP address nor a name that this node resolves; {has}", remedy)]
    named = "" if ip == address else f" ({address})"
    parsed = ipaddress.ip_address(ip)
    if parsed.is_unspecified or parsed.is_multicast:
        return [problem("bad_address", f"{ip}{named} is not the address of one interface; {has}", remedy)]
    if parsed.is_loopback and named:  # Debian gives a host's own name 127.0.1.1
        return [problem("bad_address", f"{address} is {ip} on this node, which no other node reaches; {has}", remedy)]
    try:
        with socket.socket(socket.AF_INET6 if parsed.version == 6 else socket.AF_INET) as probe:
            probe.bind((ip, 0))
    except OSError as error:
        return [problem("bad_address", f"{ip}{named} is not an address of this node ({error.strerror}); {has}", remedy)]
    return []


# --- what it serves ------------------------------------------------------------------------------------------------------------------


class Offer:
    """The files of one finished snapshot, as its manifest was when this was made. JobFailure when it is not finished."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = self._read(folder / MANIFEST)
        self.sha256 = hashlib.sha256(self.manifest).hexdigest()
        manifest = parse_manifest(self.manifest)
        if manifest is None:
            raise JobFailure(problem("snapshot_damaged", f"{folder / MANIFEST} is not a manifest of this collection", run_again()))
        self.files = manifest.files
        self._lock = threading.Lock()
        self._same: dict[tuple[Any, ...], bool] = {}

    def _read(self, path: Path) -> bytes:
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_LIST_BYTES + 1)
        except OSError as error:
            raise JobFailure(problem("snapshot_incomplete", f"{path}: {error.strerror}; it is written last", run_again())) from error
        if len(data) > MAX_LIST_BYTES:
            raise JobFailure(problem("snapshot_damaged", f"{path} is over {MAX_LIST_BYTES >> 20} MiB", run_again()))
        return data

    @property
    def total(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.files.values())

    def problems(self) -> list[Problem]:
        """Every file that is not there any more as it was verified."""
        found = []
        for name in self.files:
            try:
                self.place(name).close()
            except OSError as error:
                found.append(problem("snapshot_incomplete", f"{self.folder / name}: {error.strerror or error}", run_again(FULL)))
        return found

    def place(self, name: str) -> IO[bytes]:
        """A listed file, open: the visible one, or the pristine copy of an index that was completed since. OSError when neither is it."""
        size, sha256 = self.files[name]
        try:
            return self._checked(self.folder / name, size, sha256, self._stamp(name))
        except OSError as error:
            with suppress(OSError):
                return self._checked(self.folder / PRISTINE / name, size, sha256, None)
            raise error

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """(size, mtime in ns) of the file when it was verified on this node."""
        noted = read_object(self.folder / STAMPS, {"files": lambda v: isinstance(v, dict)}).get("files", {}).get(name)
        if not is_note(noted) or noted["sha256"] != self.files[name][1]:
            return None
        return noted["size"], noted["mtime_ns"]

    def _checked(self, path: Path, size: int, sha256: str, stamp: tuple[int, int] | None) -> IO[bytes]:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            info = os.fstat(descriptor)
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if info.st_size != size:
                raise OSError(errno.EINVAL, f"has {info.st_size} bytes, the manifest says {size}")
            if stamp != (info.st_size, info.st_mtime_ns) and not self._equal(path, info, sha256):
                raise OSError(errno.EINVAL, "changed since it was verified")
            return os.fdopen(descriptor, "rb", 0)
        except BaseException:
            os.close(descriptor)
            raise

    def _equal(self, path: Path, info: os.stat_result, sha256: str) -> bool:
        """Whether a small file has the manifest's content, by reading it once for each of its times."""
        if info.st_size > SMALL_BYTES:
            return False
        key = (str(path), info.st_size, info.st_mtime_ns, info.st_ino)
        with self._lock:
            if key not in self._same:
                self._same[key] = file_sha256(path) == sha256
            return self._same[key]


# --- the server ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a file; partial: Range was asked for."""

    start: int
    end: int
    partial: bool


def span_of(asked: str, size: int) -> Span | None:
    """The one range of a Range header (first-last, first-, -last), the whole file for anything else, None beyond the file's end."""
    match = re.fullmatch(r"bytes=([0-9]{0,18})-([0-9]{0,18})", asked.strip())
    if not match or not (match[1] or match[2]) or (match[1] and match[2] and int(match[2]) < int(match[1])):
        return Span(0, size, False)
    start = int(match[1]) if match[1] else max(0, size - int(match[2]))
    end = min(int(match[2]) + 1, size) if match[1] and match[2] else size
    return Span(start, end, True) if start < size else None


class Server(ThreadingHTTPServer):
    """Serves one Offer to who has the token. OSError when it cannot listen there."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = CLIENTS

    def __init__(self, offer: Offer, address: str, port: int, token: str, say: Callable[[str], None] = print) -> None:
        self.offer, self.token, self.say = offer, token, say
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.sent = 0
        self._used = time.monotonic()
        self._busy = 0
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        super().__init__((address, port), _Handler)
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.server_port}"

    def server_bind(self) -> None:
        """Without the parent's look-up of this host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def idle_s(self) -> float:
        """Seconds since the last byte of an authorised request; 0 while one is being answered."""
        with self._guard:
            return 0.0 if self._busy else time.monotonic() - self._used

    def use(self, begins: int = 0, sent: int = 0) -> None:
        """An authorised request begins (1), sends, or ends (-1)."""
        with self._guard:
            self._busy += begins
            self.sent += sent
            self._used = time.monotonic()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, as long as there are not too many."""
        with self._guard:
            full = len(self._open) >= CLIENTS
            if not full:
                self._open.add(request)
        if not full:
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.settimeout(1)
            request.sendall(b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.discard(request)
        super().shutdown_request(request)

    def end(self) -> None:
        """Stop serving: every connection is closed and every thread ends."""
        self.shutdown()
        with self._guard:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was too slow is a line of the log; so is anything else, with its kind."""
        error = sys.exc_info()[1]
        self.say(f"{client_address[0]} {type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "dgxspark-vllm"
    sys_version = ""
    timeout = QUIET_S
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        """The token first: without it nobody learns which names there are."""
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), f"Bearer {self.server.token}".encode()):
            self.close_connection = True
            self._plain(401, "Unauthorized", {"WWW-Authenticate": "Bearer", "Connection": "close"})
            return
        self.server.use(begins=1)
        try:
            self._file(urllib.parse.unquote(urllib.parse.urlsplit(self.path).path.removeprefix("/")))
        finally:
            self.server.use(begins=-1)

    do_HEAD = do_GET

    def _file(self, name: str) -> None:
        offer = self.server.offer
        if name == MANIFEST:
            self._head(200, "OK", len(offer.manifest), offer.sha256)
            if self.command == "GET":
                self.connection.sendall(offer.manifest)
            return
        if name not in offer.files:
            self._plain(404, "Not a file of this snapshot")
            return
        try:
            stream = offer.place(name)
        except OSError as error:
            self.server.say(f"{offer.folder / name}: {error.strerror or error}")
            # In the status line as well as behind it: a reader's message has at least that.
            said = f"The file {error.strerror or error}; {run_again(FULL)}"
            self._plain(409, said, text=said)
            return
        with stream:
            self._span(name, stream, *offer.files[name])

    def _span(self, name: str, stream: IO[bytes], size: int, sha256: str) -> None:
        span = span_of(self.headers.get("Range", "") if self.command == "GET" else "", size)
        if span is None:
            self._plain(416, "Range Not Satisfiable", {"Content-Range": f"bytes */{size}"})
            return
        if span.partial:
            where = {"Content-Range": f"bytes {span.start}-{span.end - 1}/{size}"}
            self._head(206, "Partial Content", span.end - span.start, sha256, where)
        else:
            self._head(200, "OK", size, sha256)
        if self.command == "GET":
            self._send(stream, span.start, span.end)
            self.server.say(f"{self.client_address[0]} {name} bytes {span.start} to {span.end} of {size}")

    def _send(self, stream: IO[bytes], at: int, end: int) -> None:
        while at < end:
            sent = self.connection.sendfile(stream, at, min(PIECE, end - at))
            if not sent:  # cut while it was read: fewer bytes than promised, which the other side notices
                self.close_connection = True
                return
            # Sent once: the page cache of a 70 GB snapshot is memory that a model wants (unified memory).
            os.posix_fadvise(stream.fileno(), at, sent, os.POSIX_FADV_DONTNEED)
            at += sent
            self.server.use(sent=sent)

    def _head(self, status: int, reason: str, length: int, sha256: str, more: Mapping[str, str] = NONE) -> None:
        self.send_response(status, reason)
        for key, value in {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": f'"{sha256}"', **more}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _plain(self, status: int, reason: str, more: Mapping[str, str] = NONE, text: str = "") -> None:
        self.send_response(status, re.sub(r"[^ -~]", "?", reason))
        body = text.encode()
        for key, value in {**more, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """What was sent is said where it is sent."""


def _log(line: str) -> None:
    """In one piece: answers end in threads of their own."""
    print(f"{line}\n", end="", flush=True)


# --- the job -------------------------------------------------------------------------------------------------------------------------


def serve(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Listen, write the state file, and serve until nobody has read for spec's idle_s. Returns bytes: how many were sent.

    spec: path, address (IP), port (0: any), idle_s, state_file. The state file (mode 0600) holds url, port, token and manifest_sha256; it
    is there while this serves.
    """
    offer = Offer(Path(spec["path"]))
    if found := offer.problems():
        raise JobFailure(*found)
    token, state = secrets.token_urlsafe(32), Path(spec["state_file"])
    try:
        server = Server(offer, spec["address"], spec["port"], token, say=_log)
    except OSError as error:
        evidence = f"{spec['address']} port {spec['port']}: {error.strerror}"
        raise JobFailure(problem("port_taken", evidence, "give another port, or 0 for any that is free")) from error
    thread = threading.Thread(target=server.serve_forever, args=(LOOK_S,), daemon=True)
    thread.start()
    try:
        progress.stage("serving", unit="B", message=server.url)
        write_json(state, {"url": server.url, "port": server.server_port, "token": token, "manifest_sha256": offer.sha256}, mode=0o600)
        while (idle := server.idle_s()) < spec["idle_s"]:
            progress.at(server.sent)
            time.sleep(min(LOOK_S, spec["idle_s"] - idle + 0.001))
    finally:
        state.unlink(missing_ok=True)
        server.end()
        thread.join()
    return {"bytes": server.sent}


def answers(state: Mapping[str, Any], timeout_s: float = 5.0) -> bool:
    """Whether the server of a state file answers; one that was about to end stays for another idle_s then."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(state["url"]).netloc, timeout=timeout_s)
    try:
        connection.request("HEAD", f"/{MANIFEST}", headers={"Authorization": f"Bearer {state['token']}"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


def main() -> int:
    """The worker's start: python3 worker.zip JOB_FOLDER."""
    return work_on(Path(sys.argv[1]), serve)
