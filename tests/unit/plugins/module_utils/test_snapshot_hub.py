# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The real client library against a hub on this machine."""

from __future__ import annotations

import gzip
import http.server
import itertools
import json
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import snapshot_hub
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import MANIFEST, STAMPS, part_name
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_hub import environment, open_hub, read_secret, stalled, store_secret
from ansible_collections.dgxspark.vllm.plugins.module_utils.sources import RETRY_PAUSES_S, Interrupted, Promise
from hub import ALWAYS, Fault, Hub, commit_of
from hub import fill as fill_hub
from snapshots import INDEX, MODEL, REPO, Bring, cache, fill, sha

TOKEN = "hf_geheimnis"
OTHER = "model-00002-of-00002.safetensors"
FILES = {
    "config.json": b'{"a": 1}',
    INDEX: json.dumps({"weight_map": {"x": MODEL, "y": OTHER}}).encode(),
    MODEL: os.urandom(3_000_000),
    OTHER: os.urandom(2_000_000),
    "sub/folder/vocab.txt": b"in a subfolder",
    "a name with # and %25 in it.txt": b"odd",
}
PART = part_name(MODEL, Promise(len(FILES[MODEL]), sha(FILES[MODEL])))


@pytest.fixture
def commit(hub: Hub) -> str:
    return fill_hub(hub, REPO, FILES)


@pytest.fixture
def bring(tmp_path: Path) -> Bring:
    return Bring(tmp_path)


@pytest.fixture
def opened(hub: Hub, commit: str, bring: Bring) -> Iterator[Any]:
    with open_hub(bring.hub_spec(hub.url, commit)) as source:
        yield source


def spans(hub: Hub, name: str = MODEL) -> list[str]:
    """Ranges of a file that the hub's content server was asked for."""
    return [request.range for request in hub.transfers(name)]


# --- pure parts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "window", "expected"),
    [
        ([(t, 65e6) for t in range(0, 1501, 60)], 300, True),
        ([(t, 65e6) for t in range(0, 300, 60)], 300, False),
        ([(t, 65e6) for t in range(0, 301, 60)], 300, True),
        ([(0, 0), (60, 1e6), (120, 2e6)], 100, False),  # slow, and healthy
        ([(t, t * 10) for t in range(0, 5000, 60)], 61, False),
        ([(0, 5), (1000, 6)], 300, False),  # the only two looks, and it moved between them
        ([(0, 5), (1000, 6), (1200, 6)], 300, False),
        ([(0, 5), (1000, 6), (1300, 6)], 300, True),
        ([(0, 9), (400, 3), (500, 3)], 300, False),  # a file that began again has moved, too
        ([(0, 5), (1000, 5)], 0, False),  # no limit
        ([(0, 5)], 300, False),
        ([], 300, False),
    ],
)
def test_stalls(samples: list[tuple[float, float]], window: float, expected: bool) -> None:
    assert stalled(samples, window) is expected


def test_the_environment_is_made_and_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "HF_HOME",
        "HF_ENDPOINT",
        "HF_HUB_DISABLE_XET",
        "HUGGING_FACE_HUB_TOKEN",
        "XDG_CACHE_HOME",
        "DOCKER_HOST",
    ):
        monkeypatch.setenv(name, "of the shell")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("HOME", "/home/somebody")
    env = environment(tmp_path, "http://hub:1/", "/secret/path", True)
    assert "of the shell" not in env.values() and "/home/somebody" not in str(env) and env["https_proxy"] == "http://proxy:3128"
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE"):
        assert env[name].startswith(str(tmp_path / "cache" / "huggingface"))
    assert (env["HF_ENDPOINT"], env["HF_TOKEN_PATH"], env["HF_XET_CHUNK_CACHE_SIZE_BYTES"]) == ("http://hub:1", "/secret/path", "0")
    assert "HF_HUB_DISABLE_XET" not in env and environment(tmp_path, "", "", False)["HF_HUB_DISABLE_XET"] == "1"
    assert "HF_ENDPOINT" not in environment(tmp_path, "", "", True)
    assert list(tmp_path.iterdir()) == []


def test_secrets_are_files_for_root_alone(tmp_path: Path) -> None:
    path = store_secret(tmp_path, "a.token", TOKEN)
    assert oct(os.stat(path).st_mode)[-3:] == "600" and oct(os.stat(tmp_path / "secrets").st_mode)[-3:] == "700"
    assert read_secret(path) == TOKEN and snapshot_hub.secret_path(tmp_path, "a.token", "x") == path
    assert store_secret(tmp_path, "a.token", "") == "" and not os.path.exists(path) and read_secret("") == ""
    with pytest.raises(JobFailure, match="token_unreadable"):
        read_secret(path)


@pytest.mark.parametrize("secret", [f" {TOKEN}\n", f"{TOKEN}\r\n", f"\t{TOKEN}", TOKEN])
def test_space_around_a_token_is_none_of_it(tmp_path: Path, secret: str) -> None:
    path = store_secret(tmp_path, "t", secret)
    assert read_secret(path) == TOKEN and Path(path).read_text() == TOKEN + "\n"
    assert snapshot_hub.checked_secret(secret, "it") == TOKEN


@pytest.mark.parametrize(
    "secret",
    [
        "geheim nis",
        "geheim\nnis",
        "geheim\tnis",
        "geh\u00e9im",
        "geheim\u200b",
        "Bearer geheim",
        "geheim\x00",
        "geheim\x7f",
        "\ud800geheim",
    ],
)
def test_a_token_that_can_be_none_is_refused_and_not_shown(
    hub: Hub, commit: str, bring: Bring, tmp_path: Path, secret: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own"
    path.write_bytes(secret.encode("utf-8", "surrogatepass"))
    tries: list[Any] = [
        lambda: store_secret(tmp_path / "s", "t", secret),
        lambda: snapshot_hub.secret_path(tmp_path / "s", "t", secret),
        lambda: read_secret(str(path)),
        lambda: bring.hub(hub.url, commit, token_path=str(path)),
        lambda: open_hub(bring.hub_spec(hub.url, commit), token=secret),
    ]
    for attempt in tries:
        with pytest.raises(JobFailure) as caught:
            attempt()
        assert [p["class"] for p in caught.value.problems] == ["bad_token"] and "geh" not in str(caught.value.problems)
    assert "geh" not in "".join(capfd.readouterr()) and not (tmp_path / "s").exists() and hub.requests == []


# --- reading ---------------------------------------------------------------------------------------------------------------------


def test_ranges_through_one_process(opened: Any, hub: Hub, commit: str) -> None:
    assert (opened.commit, opened.names(), opened.size(MODEL)) == (commit, sorted(FILES), 3_000_000)
    assert opened.files[MODEL].sha256 == sha(FILES[MODEL]) and opened.files["config.json"].git
    pids = set()
    for name, start, end in [(MODEL, 0, 8), (MODEL, 1_000_000, 2_500_001), (OTHER, 1_999_999, None), ("config.json", 3, 5), (MODEL, 5, 5)]:
        part = opened.read(name, start, end)
        assert b"".join(part.chunks) == FILES[name][start:end] and part.start == start and part.total == len(FILES[name])
        assert part.end in {None, end}
        pids |= {client._process.pid for client in opened._hub._clients}
    assert len(pids) == 1
    for name, data in FILES.items():
        assert b"".join(opened.read(name).chunks) == data, name
    assert b"".join(opened.read(MODEL, 3_000_000).chunks) == b"" and opened.read(MODEL, 4_000_000).total == 3_000_000
    with pytest.raises(JobFailure, match="file_not_found"):
        opened.read("none")


def test_several_files_at_a_time_and_an_abandoned_one(opened: Any) -> None:
    one, two = opened.read(MODEL).chunks, opened.read(OTHER).chunks
    got = [next(one), next(two)]
    assert len(opened._hub._clients) == 2
    got[0] += b"".join(one)
    assert got[0] == FILES[MODEL]
    two.close()  # in the middle: its process is of no use any more
    assert len(opened._hub._clients) == 1
    assert b"".join(opened.read(OTHER).chunks) == FILES[OTHER] and len(opened._hub._clients) == 1
    del one, two


def test_many_threads_share_few_clients(hub: Hub, bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that one thread is done with belongs to nobody, or to the next one, at every moment between the two."""
    files = {f"f{number}.txt": b"x%d" % number for number in range(120)}
    commit = fill_hub(hub, REPO, files)
    give = snapshot_hub.Hub.give

    def slowly(self: snapshot_hub.Hub, client: snapshot_hub.HubClient) -> None:
        time.sleep(0.01)
        give(self, client)

    monkeypatch.setattr(snapshot_hub.Hub, "give", slowly)
    with open_hub(bring.hub_spec(hub.url, commit, xet="off")) as source, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda name: b"".join(source.read(name).chunks), files)) == list(files.values())
        clients = list(source._hub._clients)
        assert len(clients) <= 8 and all(client.alive and not client.busy for client in clients)


def test_many_small_files(hub: Hub, bring: Bring) -> None:
    commit = fill_hub(hub, REPO, {"config.json": b"{}", **{f"d{n % 50}/f{n}.txt": b"x%d" % n for n in range(150)}})
    bring.hub(hub.url, commit, workers=8, xet="off")
    assert bring.complete(revision=commit) and bring.pauses == []


def test_a_client_that_is_ended_while_it_is_read(hub: Hub, commit: str, bring: Bring) -> None:
    """From the number of its pipe, which is another file's at once, nothing is read."""
    hub.faults.append(Fault("throttle", path=f"/cdn/.*{MODEL}", rate=200_000, times=ALWAYS))
    for _ in range(5):
        source = open_hub(bring.hub_spec(hub.url, commit, xet="off"))
        got: list[bytes] = []
        ended = threading.Event()

        def read(source: Any = source, got: list[bytes] = got, ended: threading.Event = ended) -> None:
            with pytest.raises((Interrupted, JobFailure)):
                got.extend(source.read(MODEL).chunks)
            ended.set()

        thread = threading.Thread(target=read)
        thread.start()
        while not got:
            time.sleep(0.005)
        source.close()
        others = [os.open("/dev/zero", os.O_RDONLY) for _ in range(4)]
        assert ended.wait(5)
        thread.join()
        for other in others:
            os.close(other)
        assert FILES[MODEL].startswith(b"".join(got))


# --- answers that are too large --------------------------------------------------------------------------------------------------


class Mirror(http.server.BaseHTTPRequestHandler):
    """Answers each path as told: (part of the path, status, headers, chunks of the body)."""

    protocol_version = "HTTP/1.1"
    plan: Any = None

    def do_GET(self) -> None:
        _, status, headers, chunks = next(step for step in self.plan if step[0] in self.path)
        self.send_response(status)
        for key, value in {**headers, "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        self.close_connection = True
        try:
            for chunk in chunks():
                self.wfile.write(chunk)
        except OSError:
            pass

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def mirror() -> Iterator[Any]:
    made: list[http.server.ThreadingHTTPServer] = []

    def make(*plan: Any) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Planned", (Mirror,), {"plan": plan}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        made.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


def bomb(mib: int) -> list[bytes]:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return [b"".join(packer.compress(bytes(1 << 20)) for _ in range(mib)) + packer.flush()]


def listing(name: str, data: bytes, **more: Any) -> bytes:
    file = {"rfilename": name, "lfs": {"size": len(data), "sha256": sha(data)}}
    return json.dumps({"sha": "a" * 40, "siblings": [file], **more}).encode()


def peak_kb(client: snapshot_hub.HubClient) -> int:
    """The most memory that it ever had."""
    return int(Path(f"/proc/{client._process.pid}/status").read_text().split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize("kind", ["packed", "endless", "other packing", "error page"])
def test_a_list_without_end_is_refused(bring: Bring, mirror: Any, kind: str) -> None:
    packed = bomb(400)

    def endless() -> Iterator[bytes]:
        return itertools.repeat(b" " * 65536)

    status, headers, body = {
        "packed": (200, {"Content-Encoding": "gzip"}, lambda: packed),
        "endless": (200, {}, endless),
        "other packing": (200, {"Content-Encoding": "br"}, endless),
        "error page": (400, {}, endless),
    }[kind]
    url = mirror(("", status, headers, body))
    hub = snapshot_hub.Hub(Path(sys.executable), bring.hub_spec(url, "main", xet="off"), print)
    try:
        client = hub.take()
        before = peak_kb(client)
        answer = client.ask({"do": "list", "repo": REPO, "revision": "main"}, 30)
        assert answer["error"]["class"] == ("hub_refused" if kind == "error page" else "hub_answer_odd"), answer
        assert url in answer["error"]["evidence"] and peak_kb(client) - before < 250_000
    finally:
        hub.close()


def test_a_packed_list_is_read(bring: Bring, mirror: Any) -> None:
    url = mirror(("/api/", 200, {"Content-Encoding": "gzip"}, lambda: [gzip.compress(listing("a", b"abc"))]))
    with open_hub(bring.hub_spec(url, "main", xet="off")) as source:
        assert source.commit == "a" * 40 and source.size("a") == 3


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "x-unknown"])
def test_a_packed_file_is_refused(bring: Bring, mirror: Any, encoding: str) -> None:
    packed = bomb(50)
    url = mirror(("/api/", 200, {}, lambda: [listing("a", b"abc")]), ("/resolve/", 200, {"Content-Encoding": encoding}, lambda: packed))
    with open_hub(bring.hub_spec(url, "main", xet="off")) as source, pytest.raises(JobFailure, match=r"hub_answer_odd.*Content-Encoding"):
        source.read("a")


@pytest.mark.parametrize(("start", "end", "expected"), [(0, None, 100_000), (0, 10, 10), (5, 70_000, 70_000)])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_without_end_is_cut_at_what_was_asked(
    bring: Bring, mirror: Any, start: int, end: int | None, expected: int, ranges: bool
) -> None:
    data = bytes(100_000)
    headers = {"Content-Range": f"bytes {start}-99999/100000"} if ranges else {}
    body = ("/resolve/", 206 if ranges else 200, headers, lambda: itertools.repeat(bytes(65536)))
    url = mirror(("/api/", 200, {}, lambda: [listing("a", data)]), body)
    with open_hub(bring.hub_spec(url, "main", xet="off")) as source:
        part = source.read("a", start, end)
        assert part.start + sum(map(len, part.chunks)) == expected and part.start == (start if ranges else 0)


@pytest.mark.parametrize("body", [b'{"status": "ok"}', b"[]", b"<html>", b'{"sha": "main", "siblings": []}'])
def test_what_is_no_hub_is_said_at_once(bring: Bring, mirror: Any, body: bytes) -> None:
    found = bring.hub_failure(mirror(("", 200, {}, lambda: [body])), "main")
    assert found["class"] == "hub_answer_odd" and "checkpoint_endpoint" in found["remedy"] and bring.pauses == []


def test_no_token_goes_to_the_content_servers(tmp_path: Path, bring: Bring) -> None:
    """On the public hub they are other hosts, with signed addresses."""
    (tmp_path / "hub").mkdir()
    with Hub(tmp_path / "hub", content_port=0) as hub:
        commit = fill_hub(hub, REPO, FILES)
        bring.hub(hub.url, commit, token_path=store_secret(tmp_path, "t", TOKEN))
        asked = [(r.authorised, "/cdn/" in r.path) for r in hub.requests]
        assert (True, False) in asked and (False, True) in asked and (True, True) not in asked and (False, False) not in asked


def test_processes_end_with_the_source(hub: Hub, commit: str, bring: Bring) -> None:
    with open_hub(bring.hub_spec(hub.url, commit)) as source:
        clients = list(source._hub._clients)
        assert clients and all(client.alive for client in clients)
    assert not any(client.alive for client in clients)
    with pytest.raises(Interrupted):
        source.read(MODEL)


# --- a whole snapshot ------------------------------------------------------------------------------------------------------------


def test_a_snapshot_from_the_hub(hub: Hub, commit: str, bring: Bring, tmp_path: Path) -> None:
    result = bring.hub(hub.url, commit, workers=3)
    assert bring.names() == {*FILES, MANIFEST, STAMPS} and all((bring.dest / n).read_bytes() == d for n, d in FILES.items())
    assert (result["revision"], result["sums_sha256"], result["notes"], result["resumed_bytes"]) == (commit, "", [], 0)
    assert bring.complete(revision=commit) and sha(bring.manifest()) == result["manifest_sha256"]
    assert spans(hub) == [""] and spans(hub, OTHER) == [""]
    # A second run asks nobody, and other ways to the same commit give the same bytes.
    hub.requests.clear()
    assert bring.hub(hub.url, commit)["before"] == "" and hub.requests == []
    other = Bring(tmp_path, "from a cache")
    other(cache(tmp_path / "cache", commit, FILES).parent, revision=commit)
    assert other.manifest() == bring.manifest()
    third = Bring(tmp_path, "again")
    third.hub(hub.url, commit, xet="off")
    assert third.manifest() == bring.manifest()
    # Nothing of a model's size is kept anywhere else.
    state = sum(p.lstat().st_size for p in (tmp_path / "state").rglob("*") if p.is_file())
    assert state < 100_000


def test_only_what_is_wrong_comes_again(hub: Hub, commit: str, bring: Bring) -> None:
    bring.hub(hub.url, commit)
    hub.requests.clear()
    (bring.dest / "sub/folder/vocab.txt").unlink()
    os.truncate(bring.dest / OTHER, 1_000_000)  # an interrupted file that looks complete
    result = bring.hub(hub.url, commit)
    assert result["before"].splitlines()[1:] == [f"{OTHER}: short", "sub/folder/vocab.txt: missing"]
    assert len(hub.transfers()) == 2 and bring.complete(revision=commit)


def test_patterns(hub: Hub, commit: str, bring: Bring) -> None:
    bring.hub(hub.url, commit, ignore_patterns=["*.safetensors", "sub/"])
    assert bring.names() == {"config.json", INDEX, "a name with # and %25 in it.txt", MANIFEST, STAMPS}


def test_a_branch_is_resolved_once(hub: Hub, commit: str, bring: Bring) -> None:
    first = bring.hub(hub.url, "main")
    assert first["revision"] == commit and "main" in first["notes"][0] and commit in first["notes"][0]
    newer = fill_hub(hub, REPO, {**FILES, "config.json": b'{"a": 2}'})
    assert bring.complete(revision="main") and bring.hub(hub.url, "main")["revision"] == commit
    assert bring.hub(hub.url, newer)["revision"] == newer and (bring.dest / "config.json").read_bytes() == b'{"a": 2}'
    other = fill_hub(hub, REPO, {"config.json": b'{"a": 3}'}, branch="dev")
    assert bring.hub(hub.url, "dev")["revision"] == other and bring.complete(revision="dev")
    assert not bring.complete(revision="main")


def test_a_branch_that_was_resolved_in_a_broken_run_stays(hub: Hub, commit: str, bring: Bring) -> None:
    hub.faults.append(Fault("status", path=f"/cdn/.*{MODEL}", status=404, times=ALWAYS))
    bring.hub_failure(hub.url, "main")
    fill_hub(hub, REPO, {"new.txt": b"new"})
    newer = commit_of(hub.root / REPO)
    hub.faults.clear()
    # The old commit is gone from this small hub, so that it must be asked for by name.
    found = bring.hub_failure(hub.url, "main")
    assert found["class"] == "revision_not_found" and commit in found["evidence"] and newer not in found["evidence"]


def test_a_part_goes_on_where_it_ended(hub: Hub, commit: str, bring: Bring) -> None:
    bring.dest.mkdir(parents=True)
    (bring.dest / PART).write_bytes(FILES[MODEL][:2_000_000])
    assert bring.hub(hub.url, commit)["resumed_bytes"] == 2_000_000
    assert spans(hub) == ["bytes=2000000-"] and (bring.dest / MODEL).read_bytes() == FILES[MODEL]


def test_a_damaged_part_is_started_again(hub: Hub, commit: str, bring: Bring) -> None:
    bring.dest.mkdir(parents=True)
    (bring.dest / PART).write_bytes(b"x" * 2_000_000)
    assert bring.hub(hub.url, commit)["resumed_bytes"] == 0
    assert spans(hub) == ["bytes=2000000-", ""] and bring.complete(revision=commit)


# --- what goes wrong -------------------------------------------------------------------------------------------------------------


REFUSALS = [
    # what the hub does, what is asked for, with a token or without
    (Fault("private", path="resolve", token="right"), "list", "repo_not_found", "repo_not_found"),
    (Fault("status", path="/api/models", status=401, times=ALWAYS), "list", "not_authorised", "not_authorised"),
    (Fault("status", path="/api/models", status=403, times=ALWAYS), "list", "not_authorised", "not_authorised"),
    (Fault("status", path="/api/models", status=400, times=ALWAYS), "list", "hub_refused", "hub_refused"),
    (Fault("status", path="/api/models", status=451, times=ALWAYS), "list", "hub_refused", "hub_refused"),
    (Fault("status", path="/api/models", status=407, times=ALWAYS), "list", "proxy_auth", "proxy_auth"),
    (Fault("status", path="/resolve/", status=451, times=ALWAYS), "read", "hub_refused", "hub_refused"),
    (None, "b" * 40, "revision_not_found", "revision_not_found"),
    (None, "no-such-branch", "revision_not_found", "revision_not_found"),
    (None, "org/none", "repo_not_found", "repo_not_found"),
    (Fault("gated", path="resolve", token="right"), "read", "gated_no_token", "gated_not_granted"),
    (
        Fault("status", path=f"/resolve/.*{MODEL}", status=404, headers={"X-Error-Code": "EntryNotFound"}, times=ALWAYS),
        "read",
        "file_not_found",
        "file_not_found",
    ),
]


@pytest.mark.parametrize("token", ["", TOKEN])
def test_what_trying_again_does_not_change(hub: Hub, commit: str, bring: Bring, tmp_path: Path, token: str) -> None:
    with open_hub(bring.hub_spec(hub.url, commit, token_path=store_secret(tmp_path, "t", token))) as source:
        for fault, asked, without, with_token in REFUSALS:
            hub.faults[:] = [fault] if fault else []
            with pytest.raises(JobFailure) as caught:
                if asked == "read":
                    source.read(MODEL)
                else:
                    repo, revision = (asked, "main") if "/" in asked else (REPO, commit if asked == "list" else asked)
                    source._hub.list(repo, revision)
            found = caught.value.problems[0]
            assert found["class"] == (with_token if token else without), (fault, asked)
            assert found["remedy"] and TOKEN not in str(found)


@pytest.mark.parametrize("fault", [Fault("gated", path="resolve", token="right"), None])
def test_a_run_that_is_refused_ends_at_once(hub: Hub, commit: str, bring: Bring, fault: Any) -> None:
    hub.faults += [fault] if fault else []
    found = bring.hub_failure(hub.url, commit if fault else "b" * 40, workers=3)
    assert found["class"] == ("gated_no_token" if fault else "revision_not_found") and bring.pauses == []
    assert MANIFEST not in (bring.names() if bring.dest.exists() else set())


def test_a_granted_token(hub: Hub, commit: str, bring: Bring, tmp_path: Path) -> None:
    hub.faults += [Fault("gated", path="resolve", token=TOKEN), Fault("private", path="resolve", token=TOKEN)]
    bring.hub(hub.url, commit, token_path=store_secret(tmp_path, "t", TOKEN))
    assert bring.complete(revision=commit)


def test_the_token_is_in_no_text(hub: Hub, commit: str, bring: Bring, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not even when the server repeats it, nor in any file but its own."""
    hub.faults.append(
        Fault(
            "status",
            path="/api/models",
            status=500,
            times=ALWAYS,
            headers={"X-Error-Message": f"token {TOKEN} failed", "X-HF-Warning": f"a; {TOKEN}"},
        )
    )
    path = store_secret(tmp_path, "t", TOKEN)
    found = bring.hub_failure(hub.url, commit, token_path=path)
    out = "".join(capfd.readouterr())
    assert found["class"] == "hub_error" and "token *** failed" in found["evidence"] and "***" in out
    assert TOKEN not in str(found) + out
    holders = [p for p in tmp_path.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]
    assert [str(p) for p in holders] == [path]


def test_what_passes(hub: Hub, commit: str, bring: Bring) -> None:
    """Growing pauses, or as long as the hub asks; and from the start again once bytes have come."""
    hub.faults += [
        Fault("status", path="/api/models", status=503, times=2),
        Fault("status", path="/api/models", status=429, headers={"Retry-After": "17"}),
        Fault("status", path=f"/resolve/.*{OTHER}", status=429, headers={"RateLimit": '"api";r=0;t=55'}),
        Fault("status", path=f"/cdn/.*{MODEL}", status=500, times=3),
        Fault("short", path=f"/cdn/.*{OTHER}", after=1_000_000),
    ]
    bring.hub(hub.url, commit, xet="off")
    assert bring.complete(revision=commit)
    assert bring.pauses == [1, 2, 17] + [55, 1] + [1, 2, 4]


def test_what_does_not_pass(hub: Hub, commit: str, bring: Bring) -> None:
    hub.faults.append(Fault("status", path=f"/cdn/.*{MODEL}", status=503, times=ALWAYS))
    found = bring.hub_failure(hub.url, commit)
    assert found["class"] == "hub_error" and "7 tries" in found["evidence"] and bring.pauses == list(RETRY_PAUSES_S)
    hub.faults[:] = [Fault("status", path="/api/models", status=429, headers={"Retry-After": "3600"}, times=ALWAYS)]
    bring.pauses.clear()
    found = Bring.hub_failure(other := Bring(bring.folder, "other"), hub.url, commit)
    assert found["class"] == "rate_limited" and "3600" in found["evidence"] and other.pauses == []


def test_a_connection_that_breaks_off_is_taken_up(hub: Hub, commit: str, bring: Bring) -> None:
    hub.faults.append(Fault("break", path=f"/cdn/.*{MODEL}", after=1_000_000, times=2))
    bring.hub(hub.url, commit)
    assert spans(hub) == ["", "bytes=1000000-", "bytes=2000000-"] and bring.pauses == [1, 1]


def test_no_hub(hub: Hub, commit: str, bring: Bring) -> None:
    hub.stop()
    found = bring.hub_failure(hub.url, commit)
    assert found["class"] == "hub_unreachable" and bring.pauses == list(RETRY_PAUSES_S) and not bring.dest.exists()
    hub.start = hub.stop = lambda: hub  # the fixture's own end


@pytest.mark.parametrize(
    ("fault", "transfers"),
    [
        (Fault("corrupt", path=f"/cdn/.*{MODEL}", after=1_500_000), 2),  # once: the second time it is right
        (Fault("corrupt", path=f"/cdn/.*{MODEL}", after=1_500_000, times=ALWAYS), -2),
        (Fault("etag", path=MODEL, value="ab" * 32), -2),
        (Fault("size", path=MODEL, value=2_999_999), 0),
        (Fault("size", path=MODEL, value=4_976_698_672), 0),
    ],
)
def test_wrong_bytes_are_fetched_once_more_and_never_accepted(hub: Hub, commit: str, bring: Bring, fault: Any, transfers: int) -> None:
    hub.faults.append(fault)
    if transfers > 0:
        bring.hub(hub.url, commit)
        assert bring.complete(revision=commit) and len(spans(hub)) == transfers
        return
    found = bring.hub_failure(hub.url, commit)
    assert found["class"] in {"digest_mismatch", "disk_full"} and MODEL not in bring.names()
    assert found["class"] == "disk_full" or MODEL in found["evidence"]
    assert transfers == 0 or len(spans(hub)) == -transfers
    hub.faults.clear()
    bring.hub(hub.url, commit)
    assert bring.complete(revision=commit) and len(spans(hub, OTHER)) <= 1 + (transfers == 0)


def test_a_stall_is_taken_up_with_a_new_client(hub: Hub, commit: str, bring: Bring) -> None:
    hub.faults.append(Fault("stall", path=f"/cdn/.*{MODEL}", after=1_000_000))
    began = time.monotonic()
    result = bring.hub(hub.url, commit, stall_timeout_s=1)
    assert bring.complete(revision=commit) and spans(hub) == ["", "bytes=1000000-"] and time.monotonic() - began < 15
    assert "no new byte for 1 s" in result["notes"][0] and "without Xet" in result["notes"][0]


@pytest.mark.parametrize("silent", [False, True])
def test_a_second_stall_is_the_end(hub: Hub, commit: str, bring: Bring, silent: bool) -> None:
    hub.faults.append(Fault("stall", path=f"/cdn/.*{MODEL}", after=1_000_000, silent=silent, times=ALWAYS))
    found = bring.hub_failure(hub.url, commit, stall_timeout_s=0.7)
    assert found["class"] == "transfer_stalled" and MODEL in found["evidence"] and "also with a new client" in found["evidence"]
    assert silent or (bring.dest / PART).stat().st_size >= 1_000_000  # kept for the next run


def test_a_slow_transfer_is_not_a_stalled_one(hub: Hub, commit: str, bring: Bring) -> None:
    hub.faults.append(Fault("throttle", path=f"/cdn/.*{MODEL}", rate=1_200_000))
    result = bring.hub(hub.url, commit, stall_timeout_s=1)
    assert bring.complete(revision=commit) and result["notes"] == [] and spans(hub) == [""]


def test_xet_that_never_answers_is_given_up(hub: Hub, commit: str, bring: Bring) -> None:
    """Its storage accepts connections and says nothing. The rest comes over HTTP, and the result says so."""
    hub.faults.append(Fault("xet", path="safetensors"))
    result = bring.hub(hub.url, commit, stall_timeout_s=1.5, workers=2)
    assert bring.complete(revision=commit) and len(result["notes"]) == 1 and "without Xet" in result["notes"][0]
    assert any(r.path.startswith("/cas") for r in hub.requests) and spans(hub) == [""]


def test_without_xet_its_storage_is_not_asked(hub: Hub, commit: str, bring: Bring) -> None:
    hub.faults.append(Fault("xet", path="safetensors"))
    result = bring.hub(hub.url, commit, xet="off")
    assert bring.complete(revision=commit) and result["notes"] == []
    assert not any("/cas" in r.path or "xet-read-token" in r.path or r.method == "HEAD" for r in hub.requests)


def test_xet_that_refuses_is_given_up_at_once(hub: Hub, commit: str, bring: Bring) -> None:
    hub.faults += [Fault("xet", path="safetensors"), Fault("status", path="xet-read-token", status=403, times=ALWAYS)]
    result = bring.hub(hub.url, commit)
    assert bring.complete(revision=commit) and "without Xet" in result["notes"][0]


def test_a_client_that_is_killed_is_started_again(hub: Hub, commit: str, bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults.append(Fault("stall", path=f"/cdn/.*{MODEL}", after=1_000_000))
    started: list[Any] = []
    real = snapshot_hub.HubClient.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        started.append(self)

    monkeypatch.setattr(snapshot_hub.HubClient, "__init__", init)

    def kill() -> None:
        for _ in range(1000):
            if (bring.dest / PART).exists() and (bring.dest / PART).stat().st_size >= 1_000_000:
                return os.kill(started[-1]._process.pid, signal.SIGKILL)
            time.sleep(0.01)
        return None

    killer = threading.Thread(target=kill)
    killer.start()
    bring.hub(hub.url, commit)
    killer.join()
    assert bring.complete(revision=commit) and spans(hub) == ["", "bytes=1000000-"] and len(started) == 2


def test_a_python_without_the_library(hub: Hub, commit: str, bring: Bring, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no python here >&2\nexit 3\n")
    python.chmod(0o755)
    found = bring.hub_failure(hub.url, commit, client_python=str(python))
    assert found["class"] == "hub_client_died" and "exit 3" in found["evidence"] and "no python here" in found["evidence"]
    python.write_text("#!/no/such/interpreter\n")
    assert bring.hub_failure(hub.url, commit, client_python=str(python))["class"] == "client_unsuitable"
    found = bring.hub_failure(hub.url, commit, client_python=str(tmp_path / "none"))
    assert found["class"] == "client_unsuitable"
    assert bring.hub_failure(hub.url, commit, client_python="", client_requirements=" ")["class"] == "no_client"


def test_a_hostile_list_of_files(hub: Hub, commit: str, bring: Bring, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = ["../../etc/cron.d/x", "/etc/passwd", ".dgxspark-snapshot.json", "config.json/b", "a\x00b"]
    monkeypatch.setattr(snapshot_hub.Hub, "list", lambda *_args: (commit, {n: Promise(1, "ab" * 32) for n in [*bad, "config.json"]}))
    with pytest.raises(JobFailure) as caught:
        bring.hub(hub.url, commit)
    assert [p["class"] for p in caught.value.problems] == ["unsafe_name"] * len(bad) and not bring.dest.exists()
    monkeypatch.setattr(snapshot_hub.Hub, "list", lambda *_args: (commit, {"a.txt": Promise(1)}))
    assert bring.hub_failure(hub.url, commit)["class"] == "no_digest"
    monkeypatch.setattr(snapshot_hub.Hub, "list", lambda *_args: ("b" * 40, {"a.txt": Promise(1, "ab" * 32)}))
    found = bring.hub_failure(hub.url, commit)
    assert found["class"] == "wrong_revision" and commit in found["evidence"] and "b" * 40 in found["evidence"]


def test_the_folder_source_of_the_same_files_differs_only_in_its_pin(hub: Hub, commit: str, bring: Bring, tmp_path: Path) -> None:
    bring.hub(hub.url, commit)
    mirror = Bring(tmp_path, "mirror")
    pin = fill(tmp_path / "folder", FILES)
    mirror(tmp_path / "folder", pin, revision=commit)
    one, two = json.loads(bring.manifest()), json.loads(mirror.manifest())
    assert two.pop("sums_sha256") == pin and one.pop("sums_sha256") == "" and one == two
