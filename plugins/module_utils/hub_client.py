# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The hub's client: a process in a virtual environment that has huggingface_hub, and that does what it is told line by line.

It is given this file's text on standard input and nothing else of the collection. Then each line is a JSON request:

{"do": "hello"}                                     -> {"ok": {"version", "xet"}}; xet: "" when files cannot be read that way
{"do": "list", "repo", "revision"}                  -> {"ok": {"commit", "files": {name: {"size", "sha256", "git"}}}}
{"do": "read", "repo", "commit", "name", "start", "end", "xet", "most"}
                                                    -> {"part": {"start", "total", "end", "via"}}, any number of {"bytes": N} with N bytes
                                                       behind the line, then {"ok": {}}
Any of them may end with {"error": {"class", "evidence", "retryable", "after_s"}} instead. sizes and offsets are bytes, `end` is exclusive
or null, `most` is the file's listed size or null: no byte at or after either is given. One request is answered at a time. The process
ends when its standard input does.

Files are read by ranges and not with hf_hub_download: since release 2 that one writes to a file of a new name on each call and deletes
it on an error, so that a killed transfer of 5 GB would begin at zero (huggingface_hub 2.4, file_download._download_to_tmp_and_move).
"""

from __future__ import annotations

import contextlib
import errno
import html
import importlib
import json
import os
import queue
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Generator, Iterator
from typing import Any, BinaryIO

CHUNK = 1 << 20  # bytes, the most behind one line
TIMEOUT_S = 30.0  # of a connection or an answer that does not come; a stalled body is taken up by a new request after that
MOST_SHOWN = 300
MOST_LISTED = 32 << 20  # bytes of a list of files, unpacked: some 100 000 files
MOST_SAID = 64 << 10  # bytes of an error's page that are looked at
NO_SPACE = {errno.ENOSPC, errno.EDQUOT}

Fault = dict[str, Any]


# --- errors ----------------------------------------------------------------------------------------------------------------------


class Unsuitable(Exception):
    """The library is not one that this client can work with."""


class OddAnswer(Exception):
    """An answer that is not a hub's."""


class XetFailed(Exception):
    """The Xet storage did not give the bytes; plain HTTP may."""


def classify(error: BaseException, token: str = "") -> Fault:
    """{class, evidence, retryable, after_s} of anything that the library raises. Without the token, also where a server repeats it.

    Classes are told by their names, so that they need not be imported, and are right for httpx and httpx2 alike.
    """
    chain = _chain(error)
    names = {c.__name__ for c in type(error).__mro__}
    for link in chain:
        # A full disk shows up on any file, also as a lock that cannot be made.
        if (isinstance(link, OSError) and link.errno in NO_SPACE) or "No space left on device" in str(link):
            where = f"{link.filename}: " if isinstance(link, OSError) and link.filename else ""
            return _fault("disk_full", f"{where}{_first_line(link)}", token)
    if "LocalEntryNotFoundError" in names and len(chain) > 1:
        return classify(chain[1], token)
    if isinstance(error, XetFailed):
        return _fault("xet_failed", _first_line(error), token, retryable=True)
    if isinstance(error, Unsuitable):
        return _fault("client_unsuitable", _first_line(error), token)
    if isinstance(error, OddAnswer):
        return _fault("hub_answer_odd", _first_line(error), token)
    if "OfflineModeIsEnabled" in names:
        return _fault("hub_unreachable", _first_line(error), token)
    if "Timeout" in names and type(error).__module__.startswith("filelock"):
        return _fault("lock_timeout", f"a lock was not given: {_first_line(error)}", token, retryable=True)
    response = getattr(error, "response", None)
    if response is not None and isinstance(getattr(response, "status_code", None), int):
        return _of_answer(error, names, response, token)
    if kind := _by_text(str(error), token):
        return _fault(kind, _first_line(error), token)
    if names & {"HFValidationError"}:
        return _fault("repo_not_found", _first_line(error), token)
    if names & {"TransportError", "ConnectionError", "TimeoutError", "RequestError"}:
        return _of_transport(error, names, token)
    if isinstance(error, ValueError):
        return _fault("hub_answer_odd", f"the answer is not one of a hub: {_first_line(error)}", token)
    return _fault("hub_client_failed", f"{type(error).__name__}: {_first_line(error)}", token)


def _of_answer(error: BaseException, names: set[str], response: Any, token: str) -> Fault:
    """An HTTP status, as the library sorts them or by number."""
    status = response.status_code
    said = getattr(error, "server_message", "") or ""
    evidence = f"HTTP {status} for {_address(response)}" + (f": {_line(str(said))}" if said else "")
    gated = "gated_not_granted" if token else "gated_no_token"
    for name, kind in (
        ("GatedRepoError", gated),
        ("RevisionNotFoundError", "revision_not_found"),
        ("EntryNotFoundError", "file_not_found"),
        ("DisabledRepoError", "not_authorised"),
        ("RepositoryNotFoundError", "repo_not_found"),
    ):
        if name in names:
            return _fault(kind, evidence, token)
    if status in {401, 403}:
        return _fault(_by_text(str(said), token) or "not_authorised", evidence, token)
    if status in {404, 410}:
        return _fault("file_not_found" if "/resolve/" in _address(response) else "repo_not_found", evidence, token)
    if status == 407:
        return _fault("proxy_auth", evidence, token)
    if status == 429:
        return _fault("rate_limited", evidence, token, retryable=True, after_s=_retry_after(response))
    if status in {408, 425} or status >= 500:
        return _fault("hub_error", evidence, token, retryable=True, after_s=_retry_after(response))
    return _fault("hub_refused", evidence, token)


def _of_transport(error: BaseException, names: set[str], token: str) -> Fault:
    """No answer, or one that broke off."""
    text = _first_line(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return _fault("hub_unreachable", f"the hub's certificate is not trusted here: {text}", token)
    if "ProxyError" in names and re.search(r"\b407\b|Proxy Authentication", text):
        return _fault("proxy_auth", f"the proxy refused: {text}", token)
    if "ProxyError" in names:
        return _fault("hub_unreachable", f"the proxy refused: {text}", token, retryable=True)
    if names & {"UnsupportedProtocol", "TooManyRedirects", "InvalidURL"}:
        return _fault("hub_answer_odd", text, token)
    told = {"ReadTimeout": f"nothing came for {TIMEOUT_S:g} s", "ConnectTimeout": f"no connection within {TIMEOUT_S:g} s"}
    return _fault("hub_unreachable", told.get(type(error).__name__, text), token, retryable=True)


def _by_text(text: str, token: str) -> str:
    """The class of an error by its words, for releases whose error classes have other names; '' when they tell nothing."""
    if re.search(r"gated repo|access to .{1,200} is restricted", text, re.IGNORECASE):
        return "gated_not_granted" if token else "gated_no_token"
    if re.search(r"repository not found|repo(sitory)? does not exist", text, re.IGNORECASE):
        return "repo_not_found"
    if re.search(r"revision not found|invalid rev id", text, re.IGNORECASE):
        return "revision_not_found"
    if re.search(r"40[13] client error|forbidden for url|invalid (username or password|credentials)", text, re.IGNORECASE):
        return "not_authorised"
    return ""


def _chain(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _fault(kind: str, evidence: str, token: str, *, retryable: bool = False, after_s: float = 0.0) -> Fault:
    return {"class": kind, "evidence": without(token, evidence)[:MOST_SHOWN], "retryable": retryable, "after_s": after_s}


def without(secret: str, text: str) -> str:
    """The text with the secret taken out, also as Python, JSON, a page or a URL quotes it, and names and passwords in addresses."""
    text = re.sub(r"(://)[^/\s@'\"<>]{1,500}@", r"\1***@", text)
    if not secret:
        return text
    forms = {secret, repr(secret)[1:-1], repr(secret.encode())[2:-1], html.escape(secret)}
    forms |= {json.dumps(secret, ensure_ascii=plain)[1:-1] for plain in (True, False)}
    forms |= {quote(secret, safe=safe) for quote in (urllib.parse.quote, urllib.parse.quote_plus) for safe in ("", "/")}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text


def _first_line(error: BaseException) -> str:
    return _line(str(error))


def _line(text: str) -> str:
    """The first line that says something, without the signature of a signed address. Not cut: half a token would not be found in it."""
    lines = [line.strip() for line in text[:MOST_SAID].splitlines() if line.strip()]
    return re.sub(r"(https?://[^\s?'\"]+)\?\S+", r"\1?...", lines[0] if lines else "")


def _address(response: Any) -> str:
    return str(getattr(response, "url", "")).partition("?")[0]


def _retry_after(response: Any) -> float:
    """Seconds that the server asks to wait; 0 when it does not say so in seconds."""
    headers = {str(k).lower(): str(v) for k, v in dict(getattr(response, "headers", None) or {}).items()}
    if re.fullmatch(r"\s*[0-9]{1,9}\s*", headers.get("retry-after", "")):
        return float(headers["retry-after"])
    window = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*([0-9]{1,9})", headers.get("ratelimit", ""))
    return float(window[1]) if window else 0.0


# --- the library -----------------------------------------------------------------------------------------------------------------


class Library:
    """What of huggingface_hub is used, bound to one token and to the endpoint that the process was started with."""

    def __init__(self, token: str) -> None:
        try:
            hub: Any = importlib.import_module("huggingface_hub")
            utils: Any = importlib.import_module("huggingface_hub.utils")
        except ImportError as error:
            raise Unsuitable(f"{sys.executable}: {error}") from error
        self.version = str(hub.__version__)
        if not callable(getattr(utils.get_session(), "stream", None)):
            raise Unsuitable(f"huggingface_hub {self.version} of {sys.executable} is too old: release 1.0 or later is needed")
        self._hub, self._utils = hub, utils
        self._token: str | bool = token or False
        self._headers: dict[str, str] = utils.build_hf_headers(token=self._token)
        self._xet_files: dict[tuple[str, str, str], Any] = {}
        self._xet_groups: dict[tuple[str, str], Any] = {}
        self.xet = _xet_release()

    def list(self, repo: str, revision: str) -> dict[str, Any]:
        """The commit of a revision and its files. sha256: '' for a file that is no LFS object; git: SHA-1 of the git blob."""
        # Not with the library's repo_info: it reads whatever comes into memory, and fails in its own way on what it does not expect.
        self._utils.validate_repo_id(repo)
        url = f"{self._hub.HfApi(token=self._token).endpoint}/api/models/{repo}/revision/{urllib.parse.quote(revision, safe='')}"
        headers = {**self._headers, "Accept-Encoding": "gzip"}
        asked = {"headers": headers, "params": {"blobs": True}, "timeout": TIMEOUT_S, "follow_redirects": True}
        data = bytearray()
        with self._utils.get_session().stream("GET", url, **asked) as answer:
            self._refused(answer)
            if _encoding(answer) not in {"", "gzip"}:
                raise OddAnswer(f"{url}: Content-Encoding {_encoding(answer)}, asked for gzip or none")
            for chunk in answer.iter_bytes():
                data += chunk
                if len(data) > MOST_LISTED:
                    raise OddAnswer(f"{url}: the list of files is over {MOST_LISTED >> 20} MiB")
        return listed(bytes(data), url)

    def _refused(self, answer: Any) -> None:
        """Raise the library's error for an answer that is one, of which only a beginning is read."""
        if answer.status_code < 400:
            return
        said = bytearray()
        if not _encoding(answer):
            for chunk in answer.iter_bytes(4096):
                said += chunk
                if len(said) >= MOST_SAID:
                    break
        left_out = {"content-encoding", "content-length", "transfer-encoding"}
        headers = [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in left_out]
        self._utils.hf_raise_for_status(type(answer)(answer.status_code, headers=headers, content=bytes(said), request=answer.request))

    def read(self, request: dict[str, Any]) -> Iterator[Any]:
        """First a dictionary {start, total, end, via}, then chunks of bytes."""
        where = (str(request["repo"]), str(request["commit"]), str(request["name"]))
        if request.get("xet") and self.xet and (found := self._xet_file(*where)):
            pieces = self._read_xet(where, found, int(request["start"]), request["end"])
        else:
            pieces = self._read_http(where, int(request["start"]), request["end"])
        stops = [stop for stop in (request["end"], request.get("most")) if stop is not None]
        with contextlib.closing(pieces):
            part = next(pieces)
            yield part
            yield from within(pieces, min(stops) - part["start"] if stops else None)

    def _read_http(self, where: tuple[str, str, str], start: int, end: int | None) -> Generator[Any, None, None]:
        """Through the hub's redirect to its content servers, which get no token: httpx drops it on the way to another origin."""
        repo, commit, name = where
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        url = self._hub.hf_hub_url(repo, name, revision=commit)
        with self._utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as answer:
            if answer.status_code == 416 and "Range" in headers:
                size = re.fullmatch(r"bytes \*/([0-9]{1,18})", answer.headers.get("Content-Range", "").strip())
                yield {"start": start, "total": int(size[1]) if size else max(0, start - 1), "end": None, "via": "http"}
                return
            self._refused(answer)
            if _encoding(answer):  # an offset within it would be none of the file, and a little of it may be very much
                raise OddAnswer(f"{_address(answer)}: Content-Encoding {_encoding(answer)} of a file, asked for none")
            yield _described(answer, start)
            yield from answer.iter_bytes()  # as they come: what waits for a whole chunk is lost when the connection breaks

    def _xet_file(self, repo: str, commit: str, name: str) -> Any:
        """(what Xet calls the file, its size); None for a file that is not in Xet storage. Asked once a file."""
        where = (repo, commit, name)
        if where not in self._xet_files:
            url = self._hub.hf_hub_url(repo, name, revision=commit)
            told = self._hub.get_hf_file_metadata(url=url, token=self._token, timeout=TIMEOUT_S)
            xet = getattr(told, "xet_file_data", None)
            self._xet_files[where] = (xet, told.size) if xet is not None and told.size is not None else None
        return self._xet_files[where]

    def _read_xet(self, where: tuple[str, str, str], found: Any, start: int, end: int | None) -> Generator[Any, None, None]:
        data, size = found
        stop = size if end is None else min(end, size)
        yield {"start": start, "total": size, "end": stop if stop < size else None, "via": "xet"}
        if start >= stop:
            return
        group = self._xet_groups.get(where[:2])
        try:
            if group is None:
                group = self._xet_groups[where[:2]] = self._xet_group(data)
            file = importlib.import_module("hf_xet").XetFileInfo(data.file_hash, size)
            for chunk in group.download_stream(file, start=start, end=stop):
                for at in range(0, len(chunk), CHUNK):
                    yield bytes(chunk[at : at + CHUNK])
        except Exception as error:
            self._xet_groups.pop(where[:2], None)
            if _chain_has_space(error):
                raise
            raise XetFailed(f"{where[2]}: {type(error).__name__}: {error}") from error

    def _xet_group(self, data: Any) -> Any:
        xet: Any = importlib.import_module("huggingface_hub.utils._xet")
        info = xet.refresh_xet_connection_info(file_data=data, headers=self._headers)
        return xet.get_xet_session().new_download_stream_group(
            endpoint=info.endpoint,
            token=info.access_token,
            token_expiry_unix_secs=info.expiration_unix_epoch,
            token_refresh_url=data.refresh_route,
            token_refresh_headers=self._headers,
            custom_headers=xet.xet_headers_without_auth(self._headers),
        )


def within(chunks: Iterator[bytes], left: int | None) -> Iterator[bytes]:
    """No more than `left` bytes, whatever comes; None: all. The end behind them is read, so that the connection is used again."""
    for chunk in chunks:
        if left is None:
            yield chunk
        elif left > 0:
            yield chunk[:left]
            left -= len(chunk)
        elif chunk:
            return


def _encoding(answer: Any) -> str:
    encoding = str(answer.headers.get("Content-Encoding", "")).strip().lower()
    return "" if encoding == "identity" else encoding[:40]


def listed(data: bytes, url: str) -> dict[str, Any]:
    """{commit, files} of a hub's answer about a revision. OddAnswer when it is something else."""
    try:
        told = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise OddAnswer(f"{url}: not JSON: {_line(str(error))}; it begins {data[:40]!r}") from error
    if not isinstance(told, dict) or not isinstance(told.get("siblings"), list):
        raise OddAnswer(f"{url}: no list of a repository's files; it begins {data[:40]!r}")
    commit = told.get("sha")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-fA-F]{40}", commit):
        raise OddAnswer(f"{url}: 'sha' is not a commit of 40 hexadecimal digits but {_line(repr(commit)[:60])}")
    files: dict[str, Any] = {}
    for entry in told["siblings"]:
        name, file = _listed_file(entry, url)
        if files.setdefault(name, file) != file:
            raise OddAnswer(f"{url}: {name[:200]!r} is listed twice, with different contents")
    return {"commit": commit.lower(), "files": files}


def _listed_file(entry: Any, url: str) -> tuple[str, dict[str, Any]]:
    """(name, {size, sha256, git}) of one file."""
    name = entry.get("rfilename") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name or re.search("[\ud800-\udfff]", name):
        raise OddAnswer(f"{url}: a file without a name: {repr(entry)[:100]}")
    lfs = entry.get("lfs") or None
    of = entry if lfs is None else lfs
    size, digest = (of.get("size"), of.get("blobId" if lfs is None else "sha256")) if isinstance(of, dict) else (of, None)
    digits = r"[0-9a-fA-F]{40}|[0-9a-fA-F]{64}" if lfs is None else r"[0-9a-fA-F]{64}"
    sized = isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 60
    if not (sized or (size is None and lfs is None)):
        raise OddAnswer(f"{url}: {name[:200]!r} has the size {repr(size)[:60]}")
    if not (isinstance(digest, str) and re.fullmatch(digits, digest)) and not (lfs is None and digest in {None, ""}):
        raise OddAnswer(f"{url}: {name[:200]!r} has the digest {repr(digest)[:80]}")
    return name, {"size": size, "sha256": "" if lfs is None else digest, "git": (digest or "") if lfs is None else ""}


def _chain_has_space(error: BaseException) -> bool:
    return bool(classify(error)["class"] == "disk_full")


def _xet_release() -> str:
    """The release of hf_xet; '' when it is absent, switched off, or cannot stream ranges."""
    try:
        runtime: Any = importlib.import_module("huggingface_hub.utils._runtime")
        if not runtime.is_xet_available():
            return ""
        xet: Any = importlib.import_module("huggingface_hub.utils._xet")
        library: Any = importlib.import_module("hf_xet")  # makes a folder for its logs
    except ImportError:
        return ""
    fit = hasattr(getattr(library, "XetSession", None), "new_download_stream_group") and hasattr(xet, "xet_headers_without_auth")
    return str(runtime.get_xet_version()) if fit else ""


def _described(answer: Any, start: int) -> dict[str, Any]:
    """What an answer says about the bytes behind it."""
    length = answer.headers.get("Content-Length", "")
    told = int(length) if re.fullmatch(r"[0-9]{1,18}", length) and not answer.headers.get("Content-Encoding") else None
    if answer.status_code != 206:
        return {"start": 0, "total": told, "end": None, "via": "http"}
    span = re.fullmatch(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)", answer.headers.get("Content-Range", "").strip())
    if not span or int(span[1]) != start:
        raise ConnectionError(f"answer 206 with Content-Range {answer.headers.get('Content-Range')!r} for offset {start}")
    stop = int(span[2]) + 1
    total = stop if span[3] == "*" else int(span[3])
    return {"start": start, "total": total, "end": stop if stop < total else None, "via": "http"}


# --- the process -----------------------------------------------------------------------------------------------------------------


def read_token() -> str:
    """The token in the file that the environment names; '' when there is none."""
    path = os.environ.get("HF_TOKEN_PATH", "")
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _requests(lines: BinaryIO) -> Iterator[dict[str, Any]]:
    """Requests as they come. The end of the input ends the process, whatever it is doing: nobody waits for it any more."""
    waiting: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def follow() -> None:
        while line := lines.readline():
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    while True:
        yield json.loads(waiting.get())


def serve(lines: BinaryIO, out: BinaryIO, make: Callable[[str], Any] = Library) -> None:
    """Answer requests until the input ends."""
    token, library = read_token(), None

    def tell(value: dict[str, Any], payload: bytes = b"") -> None:
        out.write(json.dumps(value).encode() + b"\n" + payload)
        out.flush()

    for request in _requests(lines):
        try:
            library = library or make(token)
            if request["do"] == "hello":
                tell({"ok": {"version": library.version, "xet": library.xet}})
            elif request["do"] == "list":
                tell({"ok": library.list(request["repo"], request["revision"])})
            else:
                with contextlib.closing(library.read(request)) as pieces:
                    tell({"part": next(pieces)})
                    for chunk in pieces:
                        if chunk:
                            tell({"bytes": len(chunk)}, chunk)
                tell({"ok": {}})
        except BrokenPipeError:
            os._exit(0)
        except Exception as error:
            tell({"error": classify(error, token)})


def main() -> None:
    """The answers go to the real standard output; what a library prints goes to standard error and cannot get between them."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, out)


if __name__ == "__main__":
    main()
