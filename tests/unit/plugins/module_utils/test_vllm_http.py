# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Requests that go wrong in every way a server can go wrong."""

from __future__ import annotations

import socket

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.vllm_http import Reply, local_url, port_of, printable, request
from fake_node import hang_up, http_server, reply


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000/v1/", "http://127.0.0.1:8000"),
        ("http://[::]:8000", "http://[::1]:8000"),
        ("http://[fd00::2]:8000/v1", "http://[fd00::2]:8000"),
        ("192.0.2.7:8000", "http://192.0.2.7:8000"),
        ("https://spark1.example/llm/v1", "https://spark1.example/llm"),
    ],
)
def test_local_url(url: str, expected: str) -> None:
    assert local_url(url) == expected


@pytest.mark.parametrize("url", ["http://127.0.0.1:eight", "http://127.0.0.1:99999", "http://[::1"])
def test_nonsense_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError):
        local_url(url)


@pytest.mark.parametrize(("url", "port"), [("http://a:8000", 8000), ("http://a", 80), ("https://a", 443)])
def test_port_of(url: str, port: int) -> None:
    assert port_of(url) == port


def test_key_and_body_go_out_and_no_proxy_comes_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with http_server({"/v1/x": reply(200, {"a": 1})}) as (url, seen):
        got = request(f"{url}/v1/x", api_key="k3y", body={"q": 1})
    assert got.ok
    assert got.json() == {"a": 1}
    assert seen[0]["headers"]["Authorization"] == "Bearer k3y"
    assert seen[0]["body"] == {"q": 1}


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (
            reply(500, {"error": {"message": "EngineCore encountered an issue.", "code": 500}}),
            500,
            "HTTP 500 EngineCore encountered an issue.",
        ),
        (reply(503, ""), 503, "HTTP 503"),
        (reply(401, {"error": "Unauthorized"}), 401, "HTTP 401 Unauthorized"),
        (reply(404, {"detail": "Not Found"}), 404, "HTTP 404 Not Found"),
        (reply(502, "<html>\n bad gateway</html>"), 502, "HTTP 502 <html> bad gateway</html>"),
        (hang_up, 0, "RemoteDisconnected"),
    ],
)
def test_a_failing_server(answer: object, status: int, text: str) -> None:
    with http_server({"/x": answer}) as (url, _):  # type: ignore[dict-item]
        got = request(f"{url}/x")
    assert got.status == status
    assert text in got.describe()
    assert not got.ok
    assert not got.timed_out


def test_no_answer_in_time() -> None:
    with http_server({"/x": reply(200, delay=1.0)}) as (url, _):
        got = request(f"{url}/x", timeout_s=0.2)
    assert (got.status, got.timed_out) == (0, True)
    assert "/x" in got.describe()


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        got = request(f"http://127.0.0.1:{port}/health")
    assert got.status == 0
    assert "refused" in got.error
    assert not got.timed_out


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:1/a b\nc", "ftp://x"])
def test_a_bad_url_is_no_traceback(url: str) -> None:
    assert request(url, timeout_s=0.2).status == 0


def test_text_that_is_no_json() -> None:
    assert Reply(200, "{").json() is None
    assert Reply(500, '["x"]').describe() == 'HTTP 500 ["x"]'


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, "[" * 200_000 + "]" * 200_000, '{"a":' * 5000 + "1" + "}" * 5000, "[" * 120 + "]" * 120, f"[{'9' * 5000}]"],
)
def test_json_that_overruns_the_parser_is_a_bad_reply(text: str) -> None:
    assert Reply(200, text).json() is None
    assert Reply(200, text).describe().startswith("HTTP 200 ")


def test_lone_surrogates_are_replaced_and_pairs_are_not() -> None:
    value = Reply(200, r'{"a\udfff": ["x\ud800y", "\ud83d\ude00", 1, null]}').json()
    assert value == {"a\ufffd": ["x\ufffdy", "\U0001f600", 1, None]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, Größe, 東京 \U0001f600", "plain text, Größe, 東京 \U0001f600"),
        ("\x1b[2Jgone\x07", r"\x1b[2Jgone\x07"),
        ("a\r\nb\x00\x7f\x9b", r"a\r\nb\x00\x7f\x9b"),
        ("\u202eevil\u2028", r"\u202eevil\u2028"),
        ("\ud800", r"\ud800"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("got", "shown"),
    [
        (Reply(500, "a\x1b[31m\n b"), r"HTTP 500 a\x1b[31m b"),
        (Reply(500, r'{"error": {"message": "x\u001b]0;t\u0007"}}'), r"HTTP 500 x\x1b]0;t\x07"),
        (Reply(0, error="http://x: BadStatusLine \x1b[H"), r"http://x: BadStatusLine \x1b[H"),
    ],
)
def test_a_server_cannot_write_to_the_terminal(got: Reply, shown: str) -> None:
    assert got.describe() == shown


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ('{"error": {"message": "out of\\nblocks", "code": 500}}', "out of blocks"),
        ('{"error": "no"}', "no"),
        ('{"choices": []}', '{"choices": []}'),
        ('{"choices": [], "more": "' + "y" * 300 + '"}', '{"choices": [], "more": "' + "y" * 75),
    ],
)
def test_quote(text: str, quoted: str) -> None:
    assert Reply(200, text).quote() == quoted
