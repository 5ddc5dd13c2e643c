# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A web server for tests that serves a folder, and misbehaves as told."""

from __future__ import annotations

import http.server
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder; `faults` says how it misbehaves."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.asked = folder, {}, []  # type: ignore[var-annotated]
        self.url = f"http://127.0.0.1:{self.server_port}/m"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        faults, name = self.server.faults, unquote(self.path).removeprefix("/m/")
        span = self.headers.get("Range")
        self.server.asked.append((self.command, name, span))
        if self.command == "HEAD" and "no_head" in faults:
            return self.send_error(405)
        if codes := faults.get(("status", name)):
            code = codes.pop(0) if len(codes) > 1 else codes[0]
            if code != 200:
                return self.send_error(code)
        path = self.server.folder / name
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", span) if span and "no_range" not in faults else None
        start = int(asked[1]) if asked else 0
        whole = len(data)
        if asked and start >= whole:
            self.send_response(416)
            if "bare_416" not in faults:
                self.send_header("Content-Range", f"bytes */{whole}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        self.send_response(206 if asked else 200)
        if asked:
            end = int(asked[2]) + 1 if asked[2] else whole
            data = data[: min(end, start + faults.get("at_most", whole))]
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{faults.get('total', whole)}")
        if "no_length" not in faults:
            self.send_header("Content-Length", faults.get("length", str(len(data) - start)))
        self.end_headers()
        if body and "slow" in faults:
            for at in range(start, len(data), 100_000):
                self.wfile.write(data[at : at + 100_000])
                time.sleep(0.05)
        elif body:
            cut = faults.get("cut")
            self.wfile.write(data[start : start + cut] if cut and name.startswith("model-") else data[start:])
        return None
