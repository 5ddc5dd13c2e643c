# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A few HTTP requests to a vLLM server on this machine, with the standard library, never through a proxy."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

# 127.0.0.1 rather than localhost: the name may mean ::1, where a server bound to IPv4 does not listen.
_LOCAL = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "": "127.0.0.1", "::": "::1"}
_MAX_BODY = 16 << 20
# No document of an OpenAI server comes near; what is deeper is no answer, and would overrun the stack of whoever walks it.
_MAX_DEPTH = 100
# What moves a terminal's cursor, breaks a line or turns the direction of writing.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` for a terminal: control characters are escaped as in a Python literal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


@dataclass(frozen=True)
class Reply:
    """What came back. status 0: nothing did, and `error` says why; `timed_out`: the server took the request and did not answer in time."""

    status: int
    text: str = ""
    error: str = ""
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200

    def json(self) -> Any:
        """The body's value, lone surrogates in it replaced by U+FFFD; None when it is no JSON, or absurdly deep."""
        try:
            return _encodable(json.loads(self.text))
        except (ValueError, RecursionError):
            return None

    def message(self) -> str:
        """What an error document says; empty if this is none."""
        value = self.json()
        inner = value.get("error", value.get("detail", value)) if isinstance(value, dict) else None
        message = inner.get("message") if isinstance(inner, dict) else inner
        return _one_line(str(message or ""))

    def quote(self) -> str:
        """The error document's message, or how the body begins."""
        return self.message()[:400] or _one_line(self.text)[:100]

    def describe(self) -> str:
        """The outcome in one line; of an error document its message."""
        if not self.status:
            return printable(self.error)
        return f"HTTP {self.status} {self.message() or _one_line(self.text)}".rstrip()[:400]


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _encodable(value: Any, depth: int = 0) -> Any:
    """`value` without lone surrogates, which a JSON escape can hold and UTF-8 cannot. ValueError if it is too deep."""
    if depth > _MAX_DEPTH:
        raise ValueError("too deep")
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_encodable(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item, depth + 1) for key, item in value.items()}
    return value


def local_url(url: str) -> str:
    """`url` without its path's trailing slash and an optional /v1, and with an address that this machine can connect to."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    host = _LOCAL.get(parts.hostname or "", parts.hostname or "")
    # Raises ValueError for nonsense, as urlsplit does.
    port = f":{parts.port}" if parts.port else ""
    path = parts.path.rstrip("/")
    return urlunsplit((parts.scheme, f"[{host}]{port}" if ":" in host else f"{host}{port}", path.removesuffix("/v1"), "", ""))


def port_of(url: str) -> int:
    """The TCP port that a URL means."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def request(url: str, *, api_key: str = "", body: Any = None, timeout_s: float = 5.0) -> Reply:
    """GET, or POST of a JSON body. Never raises for what a network or a server can do."""
    headers = {"Accept": "application/json, text/plain, */*"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None
    if body is not None:
        data = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data=data, headers=headers), timeout=timeout_s) as answer:
            return Reply(answer.status, answer.read(_MAX_BODY).decode(errors="replace"))
    except urllib.error.HTTPError as exc:
        return Reply(exc.code, _error_body(exc))
    except urllib.error.URLError as exc:
        return Reply(0, error=f"{url}: {exc.reason}", timed_out=isinstance(exc.reason, TimeoutError))
    except TimeoutError:
        return Reply(0, error=f"{url}: no answer within {timeout_s:g} s", timed_out=True)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        return Reply(0, error=f"{url}: {type(exc).__name__} {exc}".rstrip())


def _error_body(exc: urllib.error.HTTPError) -> str:
    try:
        return exc.read(_MAX_BODY).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
