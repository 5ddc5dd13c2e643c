#!/usr/bin/env python3
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A model hub on this machine: the endpoints that the client library huggingface_hub reads, and faults on request.

usage: hub_server.py --root DIR [--address A] [--port P] [--break-once] [--control]

DIR/<org>/<name> is a repository (branch main), DIR/<org>/<name>@<branch> another branch of it. A commit is the git tree hash of a
branch's files (40 hexadecimal digits; large files count as their LFS pointers), so that other content is another commit.
As on the public hub, small files are git blobs behind a relative redirect, and others are LFS objects (here: above 1 KiB, and every
.safetensors) behind a redirect to a content server; here that one is the same server, unless a second port is asked for.

--break-once: the first download of each repository's largest LFS object breaks off in the middle.
--control: POST /control/faults takes a JSON list of Fault's fields, which replaces the faults; GET /control/requests tells the log.
Each request is a line on standard output: client, method, path, Range, status, bytes sent of bytes promised.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import select
import signal
import socket
import socketserver
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fcntl import ioctl
from http.server import BaseHTTPRequestHandler
from http.server import ThreadingHTTPServer as _ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit

LFS_ABOVE = 1024
PAGE = 1000  # entries of one answer of the tree endpoint, as on the public hub
ALWAYS = 1 << 30
STANDING = {"gated", "private", "xet", "etag", "size"}
CHUNK = 256 << 10
LOOK_S = 0.02  # how often a held answer looks whether it may go on


# --- faults and the request log ------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """Something that goes wrong with requests whose method and path match.

    kind, for one answer (`times` 1):
      status    answer `status` with `headers` instead
      stall     send `after` bytes of the body, then nothing until release() or stop(); silent: not even the answer's head
      break     reset the connection after `after` bytes of the body
      short     close it in good order after `after` bytes, fewer than Content-Length promised
      throttle  send `rate` bytes a second
      corrupt   flip a bit of the body's byte `after`
    kind, for all (`times` ALWAYS), by the path /<org>/<name>/resolve/<commit>/<file>, wherever the file is described:
      gated     files need `token`: 401 without any, 403 with another
      private   the repository looks missing without `token`
      xet       the file is announced as in xet storage, whose address accepts connections and never answers
      etag      its digest is told as `value` (quotes are added)
      size      its size is told as `value`
    path: regular expression, looked for in the unquoted path with query; method: one that matches as a whole.
    after: None is the middle of the body.
    """

    kind: str
    path: str = ""
    method: str = ".*"
    times: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    after: int | None = None
    silent: bool = False
    rate: float = 0
    token: str = ""
    value: Any = None
    hits: int = 0

    def __post_init__(self) -> None:
        if self.kind not in STANDING | {"status", "stall", "break", "short", "throttle", "corrupt"}:
            raise ValueError(f"no fault of kind {self.kind!r}")
        self.times = self.times or (ALWAYS if self.kind in STANDING else 1)

    def fits(self, method: str, path: str) -> bool:
        """Whether it concerns this request, if it has not happened often enough."""
        return self.hits < self.times and bool(re.fullmatch(self.method, method) and re.search(self.path, path))

    def place(self, length: int) -> int:
        """`after` within a body of this length."""
        return length // 2 if self.after is None else min(self.after, length)


@dataclass
class Request:
    """One line of the log. status 0: no answer was sent; sent: bytes of the body; length: those promised."""

    client: str
    method: str
    path: str
    range: str
    authorised: bool  # an Authorization header came with it
    status: int = 0
    sent: int = 0
    length: int = 0
    ended: bool = False

    def __str__(self) -> str:
        return f"{self.client} {self.method} {self.path} {self.range or '-'} {self.status} {self.sent}/{self.length}"


# --- repositories --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blob:
    """A file: its size in bytes, the id of its git object, and its SHA-256 when it is an LFS object."""

    path: Path
    size: int
    oid: str
    sha256: str = ""


@dataclass(frozen=True)
class Tree:
    """A commit's files and folders by their paths, which have slashes."""

    commit: str
    files: dict[str, Blob]
    folders: dict[str, str]  # path -> id of its tree object


def git_object(kind: str, data: bytes) -> str:
    """The SHA-1 that git calls an object by."""
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data).hexdigest()


def pointer(sha256: str, size: int) -> bytes:
    """What git keeps in place of an LFS object."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def blob_of(path: Path) -> Blob:
    """Read the file once; a large one in pieces."""
    size = path.stat().st_size
    if size <= LFS_ABOVE and path.suffix != ".safetensors":
        return Blob(path, size, git_object("blob", path.read_bytes()))
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(4 << 20):
            digest.update(chunk)
    sha256 = digest.hexdigest()
    return Blob(path, size, git_object("blob", pointer(sha256, size)), sha256)


def tree_of(folder: Path, blobs: dict[tuple[Any, ...], Blob] | None = None) -> Tree:
    """All regular files below the folder, links followed, but for .git. blobs: remembers what was read already, by size and time."""
    blobs = {} if blobs is None else blobs
    files: dict[str, Blob] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and ".git" not in name.split("/"):
            info = path.stat()
            key = (str(path), info.st_size, info.st_mtime_ns, info.st_ino)
            if key not in blobs:
                blobs[key] = blob_of(path)
            files[name] = blobs[key]
    folders: dict[str, str] = {}
    return Tree(_write_tree("", files, folders), files, folders)


def _write_tree(prefix: str, files: dict[str, Blob], folders: dict[str, str]) -> str:
    """The id of the tree object of all files below `prefix`; git sorts a folder as if its name ended in a slash."""
    entries: dict[str, tuple[str, str]] = {}
    for path, blob in files.items():
        if path.startswith(prefix):
            name, slash, _ = path.removeprefix(prefix).partition("/")
            if not slash:
                entries[name] = ("100644", blob.oid)
            elif name + "/" not in entries:
                entries[name + "/"] = ("40000", _write_tree(f"{prefix}{name}/", files, folders))
                folders[prefix + name] = entries[name + "/"][1]
    raw = (f"{mode} {name.rstrip('/')}\0".encode() + bytes.fromhex(oid) for name, (mode, oid) in sorted(entries.items()))
    return git_object("tree", b"".join(raw))


def commit_of(folder: Path | str) -> str:
    """The commit by which the hub knows the folder's present content."""
    return tree_of(Path(folder)).commit


class Repository:
    """The branches of <org>/<name>, read anew when a file's size or time changed."""

    def __init__(self, root: Path, repo: str, blobs: dict[tuple[Any, ...], Blob]) -> None:
        org, name = repo.split("/")
        self.repo = repo
        found = {"main": root / org / name} if (root / org / name).is_dir() else {}
        if (root / org).is_dir():
            branches = (f for f in (root / org).iterdir() if f.name.startswith(name + "@") and f.is_dir())
            found |= {unquote(folder.name.removeprefix(name + "@")): folder for folder in branches}
        self.branches = {branch: tree_of(folder, blobs) for branch, folder in found.items()}

    def at(self, revision: str) -> Tree | None:
        """By branch or full commit; part of a commit is not a revision."""
        trees = (tree for tree in self.branches.values() if tree.commit == revision)
        return self.branches.get(revision) or next(trees, None)


# --- answers -------------------------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """status 0: none at all, the connection is held. The body is `body`, or bytes [start, end) of `file`."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: Path | None = None
    start: int = 0
    end: int = 0
    cut_once: str = ""  # the repository whose largest object this is

    @property
    def length(self) -> int:
        """Bytes of the body."""
        return self.end - self.start if self.file else len(self.body)

    def chunks(self) -> Iterator[bytes]:
        """The body in pieces."""
        if not self.file:
            yield from (self.body[i : i + CHUNK] for i in range(0, len(self.body), CHUNK))
            return
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            left = self.length
            while left and (chunk := stream.read(min(CHUNK, left))):
                left -= len(chunk)
                yield chunk


def in_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """A JSON document."""
    return Answer(status, {"Content-Type": "application/json; charset=utf-8", **(headers or {})}, json.dumps(value).encode())


def refusal(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Answer:
    """As the hub refuses: the client library goes by the two X-Error headers."""
    told = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
    return in_json({"error": message}, status, told)


def ranged(file: Path, size: int, asked: str, headers: dict[str, str]) -> Answer:
    """The whole file, the one range that was asked for (first-last, first-, -last), or 416. Anything else in Range is ignored."""
    headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked.strip())
    if not match or match[0] == "bytes=-" or (match[1] and match[2] and int(match[2]) < int(match[1])):
        return Answer(200, headers, file=file, end=size)
    first = int(match[1]) if match[1] else max(0, size - int(match[2]))
    last = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
    if first >= size:
        return Answer(416, headers | {"Content-Range": f"bytes */{size}"})
    return Answer(206, headers | {"Content-Range": f"bytes {first}-{last}/{size}"}, file=file, start=first, end=last + 1)


class Hub:
    """The server. Set .faults and read .requests at any time; start() and stop(), or `with`.

    root: folder of the repositories; port 0: any free one; content_port: a second port for LFS objects, as the public hub has its own
    hosts for them (the client library sends no token there), None: the same server; log: gets each request when it ends.
    """

    def __init__(
        self,
        root: Path | str,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        content_port: int | None = None,
        break_once: bool = False,
        control: bool = False,
        page: int = PAGE,
        log: Callable[[Request], None] | None = None,
    ) -> None:
        self.root, self.page, self.break_once, self.control = Path(root), page, break_once, control
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.stopping = threading.Event()
        self.generation = 0
        self._cut: set[str] = set()
        self._lock = threading.Lock()
        self._blobs: dict[tuple[Any, ...], Blob] = {}
        self._log = log
        self._servers = [_Server(self, (address, port))]
        if content_port is not None:
            self._servers.append(_Server(self, (address, content_port)))
        self._threads: list[threading.Thread] = []
        host = "127.0.0.1" if address in {"", "0.0.0.0"} else address
        self.url = f"http://{host}:{self._servers[0].server_port}"

    def start(self) -> Hub:
        """Serve in threads of this process."""
        self._threads = [threading.Thread(target=s.serve_forever, args=(LOOK_S,), name="hub") for s in self._servers]
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Close every connection and end every thread."""
        self.stopping.set()
        for server in self._servers:
            if self._threads:
                server.shutdown()
            server.close_connections()
            server.server_close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Hub:
        return self.start()

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.stop()

    def release(self) -> None:
        """Let every answer that stalls now go on."""
        self.generation += 1

    def commit(self, repo: str, branch: str = "main") -> str:
        """The commit of a branch as it is now."""
        return self.repository(repo).branches[branch].commit

    def settle(self, timeout_s: float = 10.0) -> None:
        """Wait until every request has ended: a client has its answer's last byte before this server has counted it."""
        until = time.monotonic() + timeout_s
        while not all(request.ended for request in list(self.requests)):
            if time.monotonic() > until:
                raise TimeoutError("a request has not ended")
            time.sleep(0.002)

    def transfers(self, name: str = "") -> list[Request]:
        """Requests of the log that fetched a file's content; name: part of its path."""
        with self._lock:
            return [r for r in self.requests if r.method == "GET" and r.status in {200, 206} and CONTENT.match(r.path) and name in r.path]

    # --- for the handler

    def note(self, request: Request) -> None:
        """Into the log, as the request comes."""
        with self._lock:
            self.requests.append(request)

    def ended(self, request: Request) -> None:
        """The request has been answered or given up."""
        request.ended = True
        if self._log:
            self._log(request)

    def fault(self, kind: str, method: str, path: str, fits: Callable[[Fault], bool] = lambda _fault: True) -> Fault | None:
        """The first fault of a kind for this request, counted."""
        with self._lock:
            for fault in self.faults:
                if fault.kind == kind and fault.fits(method, path) and fits(fault):
                    fault.hits += 1
                    return fault
        return None

    def cut_now(self, answer: Answer) -> bool:
        """Whether this is the download that --break-once breaks off."""
        with self._lock:
            if not self.break_once or not answer.cut_once or answer.length < 2 or answer.cut_once in self._cut:
                return False
            self._cut.add(answer.cut_once)
            return True

    def repository(self, repo: str) -> Repository:
        """<org>/<name>; without branches when there is none."""
        with self._lock:
            return Repository(self.root, repo, self._blobs)

    def answer(self, method: str, target: str, headers: Any, data: bytes) -> Answer:
        """What the hub says to a request."""
        parts = urlsplit(target)
        path = [unquote(part) for part in parts.path.split("/")[1:]]
        token = headers.get("Authorization", "").removeprefix("Bearer ").strip()
        asked = headers.get("Range", "") if method == "GET" else ""
        host = headers.get("Host", "")
        match path:
            case ["api", "models", org, name, *rest] if _names(org, name):
                form = _form(data, headers.get("Content-Type", ""))
                return self._api(f"{org}/{name}", rest, token, host, dict(parse_qsl(parts.query)), form)
            case ["control", what] if self.control:
                return self._steer(method, what, data)
            case ["api", "resolve-cache", "models", org, name, revision, *file] if file and _names(org, name):
                return self._resolve(f"{org}/{name}", revision, "/".join(file), token, host, asked, direct=True)
            case ["cdn", org, name, sha256, *file] if file and _names(org, name):
                return self._content(f"{org}/{name}", sha256, "/".join(file), host, asked)
            case ["cas", *_]:
                return Answer(0)
            case [org, name, "resolve" | "raw", revision, *file] if file and _names(org, name):
                return self._resolve(f"{org}/{name}", revision, "/".join(file), token, host, asked, direct=False)
            case [""]:
                return Answer(200, {"Content-Type": "text/plain"}, b"a model hub for tests\n")
        return refusal(404, "", "Not Found")

    def _steer(self, method: str, what: str, data: bytes) -> Answer:
        """Another program looks at this hub, or makes faults."""
        if (method, what) == ("GET", "requests"):
            with self._lock:
                return in_json([asdict(request) for request in self.requests])
        if (method, what) == ("POST", "faults"):
            try:
                self.faults = [Fault(**fields) for fields in json.loads(data)]
            except (TypeError, ValueError) as error:
                return refusal(400, "", str(error))
            self.release()
            return in_json(len(self.faults))
        return refusal(404, "", "Not Found")

    def _api(
        self, repo: str, rest: list[str], token: str, host: str, query: dict[str, str], form: dict[str, list[str]]
    ) -> Answer:  # fmt: skip
        found = self._open(repo, token)
        if isinstance(found, Answer):
            return found
        match rest:
            case ["refs"]:
                heads = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": t.commit} for b, t in found.branches.items()]
                return in_json({"branches": heads, "converts": [], "tags": [], "pullRequests": []})
            case ["auth-check"]:
                return self._gate(repo, f"/{repo}/resolve/", token) or in_json({})
            case [] | ["revision", _]:
                revision = rest[1] if rest else "main"
            case [("tree" | "paths-info" | "xet-read-token"), revision, *_]:
                pass
            case _:
                return refusal(404, "", "Not Found")
        tree = found.at(revision)
        if tree is None:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        match rest[0] if rest else "revision":
            case "tree":
                return self._tree(repo, tree, "/".join(rest[2:]), query, f"http://{host}")
            case "paths-info":
                return in_json([self._entry(repo, tree, p) for p in form.get("paths", []) if p in tree.files or p in tree.folders])
            case "xet-read-token":
                told = {"casUrl": f"http://{host}/cas", "accessToken": "xet", "exp": int(time.time()) + 3600}
                names = dict(zip(("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration"), map(str, told.values()), strict=True))
                return in_json(told, headers=names)
        return in_json(self._info(repo, tree, blobs=query.get("blobs", "").lower() in {"true", "1"}))

    def _open(self, repo: str, token: str) -> Repository | Answer:
        """The repository, or the answer for one that is missing, which looks the same as one that is not for this client."""
        found = self.repository(repo)
        private = self.fault("private", "GET", f"/{repo}/resolve/")
        if found.branches and not (private and private.token != token):
            return found
        if not token:
            # The public hub gives no code here; the client library infers it from the address, but of https ones only.
            return refusal(401, "RepoNotFound", "Invalid username or password.")
        return refusal(404, "RepoNotFound", "Repository not found")

    def _gate(self, repo: str, path: str, token: str) -> Answer | None:
        """The refusal of a gated repository's file, if this one is for others."""
        gate = self.fault("gated", "GET", path)
        if not gate or gate.token == token:
            return None
        restricted = f"Access to model {repo} is restricted"
        if not token:
            return refusal(401, "GatedRepo", f"{restricted}. You must have access to it and be authenticated to access it. Please log in.")
        return refusal(403, "GatedRepo", f"{restricted} and you are not in the authorized list. Ask for access on its page.")

    def _info(self, repo: str, tree: Tree, blobs: bool) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for path in tree.files:
            siblings.append({"rfilename": path})
            if blobs:
                entry = self._entry(repo, tree, path)
                siblings[-1] |= {"blobId": entry["oid"], "size": entry["size"]}
                if lfs := entry.get("lfs"):
                    siblings[-1]["lfs"] = {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": lfs["pointerSize"]}
        return {
            "_id": tree.commit[:24],
            "id": repo,
            "modelId": repo,
            "author": repo.split("/")[0],
            "sha": tree.commit,
            "private": False,
            "gated": "manual" if any(f.kind == "gated" for f in self.faults) else False,
            "disabled": False,
            "lastModified": "2025-01-01T00:00:00.000Z",
            "createdAt": "2025-01-01T00:00:00.000Z",
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
        }

    def _entry(self, repo: str, tree: Tree, path: str) -> dict[str, Any]:
        """A file or folder as the tree endpoint lists it."""
        if path in tree.folders:
            return {"type": "directory", "oid": tree.folders[path], "size": 0, "path": path}
        blob, told = tree.files[path], self._told(repo, tree, path)
        entry: dict[str, Any] = {"type": "file", "oid": blob.oid, "size": told.size, "path": path}
        if blob.sha256:
            entry["lfs"] = {"oid": told.etag, "size": told.size, "pointerSize": len(pointer(blob.sha256, blob.size))}
        if told.xet:
            entry["xetHash"] = told.xet
        return entry

    def _tree(self, repo: str, tree: Tree, folder: str, query: dict[str, str], base: str) -> Answer:
        if folder and folder not in tree.folders:
            return refusal(404, "EntryNotFound", f"{folder} does not exist on {tree.commit}")
        below = [p for p in sorted([*tree.files, *tree.folders]) if not folder or p.startswith(folder + "/")]
        if query.get("recursive", "").lower() not in {"true", "1"}:
            depth = folder.count("/") + 1 if folder else 0
            below = [p for p in below if p.count("/") == depth]
        begin = int(query.get("cursor") or 0)
        headers: dict[str, str] = {}
        if begin + self.page < len(below):
            where = f"{base}/api/models/{repo}/tree/{tree.commit}" + ("/" + quote(folder) if folder else "")
            headers["Link"] = f'<{where}?{urlencode({**query, "cursor": begin + self.page})}>; rel="next"'
        return in_json([self._entry(repo, tree, p) for p in below[begin : begin + self.page]], headers=headers)

    def _told(self, repo: str, tree: Tree, path: str) -> _Told:
        """What the hub tells about a file: the truth, but for faults."""
        blob, where = tree.files[path], f"/{repo}/resolve/{tree.commit}/{path}"
        size, etag = self.fault("size", "GET", where), self.fault("etag", "GET", where)
        xet = blob.sha256 and self.fault("xet", "GET", where)
        return _Told(
            int(size.value) if size else blob.size,
            str(etag.value) if etag else blob.sha256 or blob.oid,
            hashlib.sha256(f"xet {blob.sha256}".encode()).hexdigest() if xet else "",
        )

    def _meta(self, repo: str, tree: Tree, path: str, host: str) -> dict[str, str]:
        """Headers that describe a file."""
        told = self._told(repo, tree, path)
        headers = {"X-Repo-Commit": tree.commit, "X-Linked-Size": str(told.size), "X-Linked-Etag": f'"{told.etag}"'}
        if told.xet:
            refresh = f"http://{host}/api/models/{repo}/xet-read-token/{tree.commit}"
            headers |= {"X-Xet-Hash": told.xet, "X-Xet-Refresh-Route": refresh, "Link": f'<{refresh}>; rel="xet-auth"'}
        return headers

    def _resolve(self, repo: str, revision: str, path: str, token: str, host: str, asked: str, *, direct: bool) -> Answer:
        """direct: the second address of a git blob, which has the bytes; the first one redirects to it."""
        found = self._open(repo, token)
        if isinstance(found, Answer):
            return found
        tree = found.at(revision)
        if tree is None:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if gate := self._gate(repo, f"/{repo}/resolve/{tree.commit}/{path}", token):
            return gate
        if path not in tree.files:
            return refusal(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": tree.commit})
        blob, meta = tree.files[path], self._meta(repo, tree, path, host)
        if direct:
            return ranged(blob.path, blob.size, asked, meta | {"ETag": meta["X-Linked-Etag"]})
        if not blob.sha256:
            place = f"/api/resolve-cache/models/{repo}/{tree.commit}/{quote(path)}"
            return Answer(307, meta | {"ETag": meta["X-Linked-Etag"], "Location": place})
        place = f"/cdn/{repo}/{blob.sha256}/{quote(path)}"
        if len(self._servers) > 1:
            place = f"http://{host.rpartition(':')[0]}:{self._servers[1].server_port}{place}"
        return Answer(302, meta | {"Location": place})

    def _content(self, repo: str, sha256: str, path: str, host: str, asked: str) -> Answer:
        """An LFS object. A client that follows a redirect on the same server reads the file's description here, so it is told again."""
        for tree in self.repository(repo).branches.values():
            blob = tree.files.get(path)
            if blob and blob.sha256 == sha256:
                answer = ranged(blob.path, blob.size, asked, self._meta(repo, tree, path, host) | {"ETag": f'"{sha256}"'})
                large = max(b.size for b in tree.files.values() if b.sha256)
                answer.cut_once = repo if blob.size == large else ""
                return answer
        return refusal(404, "", "Not Found")


ENDS = {"stall", "break", "short"}
CONTENT = re.compile(r"/cdn/|/api/resolve-cache/")


@dataclass(frozen=True)
class _Told:
    size: int
    etag: str
    xet: str


def _names(*names: str) -> bool:
    return all(re.fullmatch(r"\w[\w.-]*", name) for name in names)


# --- the connection ------------------------------------------------------------------------------------------------------------------


class _Server(_ThreadingHTTPServer):
    """Threads that end with the server: every connection is known and closed."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, hub: Hub, address: tuple[str, int]) -> None:
        self.hub = hub
        self._connections: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without the parent's look-up of this host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Wake every thread that waits for its client."""
        with self._guard:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; anything else is a fault of this server."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Closed(Exception):
    """The answer ends here, and the connection with it."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "hub"
    sys_version = ""
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        """Any request that the hub knows."""
        hub = self.server.hub
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(
            self.client_address[0],
            self.command,
            unquote(self.path),
            self.headers.get("Range", ""),
            "Authorization" in self.headers,
        )
        hub.note(request)
        try:
            self._answer(hub, request, data)
        except (_Closed, ConnectionError):
            self.close_connection = True
        finally:
            hub.ended(request)

    do_HEAD = do_POST = do_GET

    def _answer(self, hub: Hub, request: Request, data: bytes) -> None:
        method, path = request.method, request.path
        if hub.fault("stall", method, path, lambda f: f.silent):
            self._hold(hub)
        if fault := hub.fault("status", method, path):
            answer = refusal(fault.status, "", fault.headers.get("X-Error-Message", "made on purpose"), fault.headers)
        else:
            answer = hub.answer(method, self.path, self.headers, data)
        if not answer.status:
            self._hold(hub)
            raise _Closed
        request.status = answer.status
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(answer.length))
        self.end_headers()
        if method != "HEAD" and answer.length:
            request.length = answer.length
            self._body(hub, request, answer)

    def _body(self, hub: Hub, request: Request, answer: Answer) -> None:
        """The body, and what goes wrong with it."""

        def fault(kind: str) -> Fault | None:
            return hub.fault(kind, request.method, request.path, lambda f: not f.silent)

        length = answer.length
        found = {kind: f for kind in ("stall", "break", "short", "throttle", "corrupt") if (f := fault(kind))}
        places = {kind: f.place(length) for kind, f in found.items()}
        if hub.cut_now(answer):
            places["break"] = length // 2
        rate = found["throttle"].rate if "throttle" in found else 0
        for chunk in answer.chunks():
            data = bytearray(chunk)
            flip = places.get("corrupt", -1) - request.sent
            if 0 <= flip < len(data):
                data[flip] ^= 1
            while data:
                stops = [at - request.sent for kind, at in places.items() if kind in ENDS and at >= request.sent]
                size = min([len(data), *stops, *([max(1, int(rate * LOOK_S))] if rate else [])])
                self.connection.sendall(data[:size])
                request.sent += size
                del data[:size]
                self._events(hub, request.sent, places)
                if rate and hub.stopping.wait(size / rate):
                    raise _Closed

    def _events(self, hub: Hub, sent: int, places: dict[str, int]) -> None:
        """What happens at this very byte."""
        if places.get("stall") == sent:
            del places["stall"]
            self._hold(hub)
        if places.get("short") == sent:
            raise _Closed
        if places.get("break") == sent:
            self._reset()

    def _hold(self, hub: Hub) -> None:
        """Wait for release(); _Closed when the hub stops or the client is gone."""
        generation = hub.generation
        while hub.generation == generation:
            if hub.stopping.wait(LOOK_S):
                raise _Closed
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                raise _Closed

    def _reset(self) -> None:
        """End with RST instead of FIN, but after all that was sent has arrived: a reset discards what is still on its way."""
        until = time.monotonic() + 2
        while time.monotonic() < until and struct.unpack("i", ioctl(self.connection, termios.TIOCOUTQ, b"\0" * 4))[0]:
            time.sleep(0.002)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        raise _Closed

    def log_message(self, format: str, *args: Any) -> None:
        """The log is the hub's."""


def _form(data: bytes, kind: str) -> dict[str, list[str]]:
    """A POST's lists, from a form or from JSON."""
    if "json" in kind:
        value = json.loads(data or b"{}")
        return {k: [str(i) for i in (v if isinstance(v, list) else [v])] for k, v in value.items()} if isinstance(value, dict) else {}
    return parse_qs(data.decode("latin-1"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--break-once", action="store_true")
    parser.add_argument("--control", action="store_true")
    args = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())

    def log(request: Request) -> None:
        print(f"{request}\n", end="", flush=True)  # in one piece: requests end in threads of their own

    with Hub(args.root, args.address, args.port, break_once=args.break_once, control=args.control, log=log) as hub:
        print(f"serving {args.root} at {hub.url}", flush=True)
        ended.wait()


if __name__ == "__main__":
    main()
