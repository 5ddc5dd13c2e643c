# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A node for module tests: systemd and its journal are answered from data, and a real HTTP server plays the real one's faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ReplyOf = Callable[[BaseHTTPRequestHandler], None]


def journal_line(text: str, at: float, cursor: str, invocation: str) -> str:
    """One line of `journalctl -o json`; odd bytes as journald writes them."""
    value: Any = text if text.isprintable() else list(text.encode())
    return json.dumps(
        {
            "__CURSOR": cursor,
            "__REALTIME_TIMESTAMP": str(int(at * 1e6)),
            "MESSAGE": value,
            "_SYSTEMD_INVOCATION_ID": invocation,
        }
    )


@dataclass
class FakeNode:
    """Answers systemctl, journalctl and docker. `on_show` runs at each look at the unit, so that a test can let time pass."""

    active: str = "active"
    sub: str = "running"
    load: str = "loaded"
    result: str = "success"
    exit_status: int = 0
    invocation: str = "a1"
    restarts: int = 0
    age: float = 10.0
    main_pid: int = 4242
    logs: dict[str, list[str]] = field(default_factory=dict)
    container: str = ""
    on_show: Callable[[FakeNode], None] | None = None
    calls: list[list[str]] = field(default_factory=list)

    def log(self, *lines: str) -> None:
        self.logs.setdefault(self.invocation, []).extend(lines)

    def run_command(self, _module: Any, args: list[str], **_options: Any) -> tuple[int, str, str]:
        self.calls.append(args)
        if args[0] == "systemctl":
            return self._show()
        if args[0] == "journalctl":
            return 0, self._journal(args), ""
        if args[0] == "docker":
            return (0, self.container, "") if self.container else (1, "", "Error: No such container: x")
        raise AssertionError(args)

    def _show(self) -> tuple[int, str, str]:
        if self.on_show:
            self.on_show(self)
        values = {
            "LoadState": self.load,
            "ActiveState": self.active,
            "SubState": self.sub,
            "Result": self.result,
            "InvocationID": self.invocation,
            "NRestarts": self.restarts,
            "ExecMainStatus": self.exit_status,
            "MainPID": self.main_pid,
            "InactiveExitTimestampMonotonic": int((time.monotonic() - self.age) * 1e6) if self.age else 0,
        }
        return 0, "\n".join(f"{key}={value}" for key, value in values.items()) + "\n", ""

    def _journal(self, args: list[str]) -> str:
        wanted = next((a.split("=", 1)[1] for a in args if a.startswith("_SYSTEMD_INVOCATION_ID=")), "")
        after = next((int(a.split("=c", 1)[1]) for a in args if a.startswith("--after-cursor=")), -1)
        begin = time.time() - self.age
        lines = [(name, text) for name, texts in self.logs.items() if wanted in ("", name) for text in texts]
        return "\n".join(journal_line(text, begin + n / 10, f"c{n}", name) for n, (name, text) in enumerate(lines) if n > after)


def reply(status: int, body: Any = "", *, delay: float = 0.0) -> ReplyOf:
    """Answers with a status and a body."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(delay)
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    """Closes the connection without an answer, as a process that dies."""
    handler.close_connection = True


def in_turn(*answers: ReplyOf) -> ReplyOf:
    """One answer after the other; the last one stays."""
    left = list(answers)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        (left.pop(0) if len(left) > 1 else left[0])(handler)

    return answer


@contextmanager
def http_server(routes: dict[str, ReplyOf]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on 127.0.0.1; yields its URL and the requests it got."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length)
            seen.append({"path": self.path, "headers": dict(self.headers), "body": json.loads(raw) if raw else None})
            with suppress(ConnectionError):
                routes.get(self.path, reply(404, {"detail": "Not Found"}))(self)

        do_GET = do_POST = _serve

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
