# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""The local hub, asked by the real client library."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import hub as hubs
import pytest
from hub import Fault, Hub, commit_of, fill
from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get

REPO = "org/name-1.5B"
BIG = random.Random(1).randbytes(300_000)
FILES: dict[str, bytes] = {
    "config.json": b'{"a": 1}\n',
    "README.md": b"# words\n",
    "empty.txt": b"",
    "exactly.bin": b"x" * 1024,
    "above.bin": b"x" * 1025,
    "model-00001-of-00002.safetensors": b"small but LFS",
    "model-00002-of-00002.safetensors": BIG,
    "sub/deep er/file [1].json": b"{}",
    "sub-x": b"sorted before sub/ by git",
}
LARGEST = "model-00002-of-00002.safetensors"
LFS = {name for name, data in FILES.items() if len(data) > 1024 or name.endswith(".safetensors")}


@pytest.fixture
def commit(hub: Any) -> str:
    return fill(hub, REPO, FILES)


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between tries, small pieces (the client loses the one that it is at), and xet off."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _s: None)


def threads(hub: Any) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "process_request" in t.name]


def api(hub: Any, token: str | bool = False) -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def raw(hub: Any, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def content_path(name: str = LARGEST) -> str:
    return f"/cdn/{REPO}/{hashlib.sha256(FILES[name]).hexdigest()}/{name}"


# --- commits ---------------------------------------------------------------------------------------------------------------------


def test_a_commit_is_what_git_calls_the_tree(tmp_path: Path, hub: Any, commit: str) -> None:
    tree = tmp_path / "git"
    for name, data in FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hubs.hub_server.pointer(hashlib.sha256(data).hexdigest(), len(data)) if name in LFS else data)

    def git(*argv: str) -> str:
        options = ["-c", "core.autocrlf=false", "-c", "core.fileMode=false"]
        return subprocess.run(["git", *options, *argv], cwd=tree, check=True, capture_output=True, text=True).stdout

    git("init", "--quiet")
    git("add", "--all", "--force")
    assert git("write-tree").strip() == commit == hub.commit(REPO)
    oids = {}
    listed = {f.path: f.blob_id for f in api(hub).list_repo_tree(REPO, recursive=True) if hasattr(f, "blob_id")}
    for line in git("ls-tree", "-r", "-z", commit).split("\0")[:-1]:
        meta, name = line.split("\t")
        oids[name] = meta.split()[2]
    assert listed == oids


def test_other_content_is_another_commit_and_the_old_one_is_gone(hub: Any, commit: str) -> None:
    changed = fill(hub, REPO, {"config.json": b'{"a": 2}\n'})
    assert changed != commit
    assert api(hub).model_info(REPO, revision=changed).sha == changed
    with pytest.raises(RevisionNotFoundError):
        api(hub).model_info(REPO, revision=commit)


# --- what it tells ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [None, "main", "commit", "dev", "refs/pr/1"])
def test_model_info_by_branch_and_commit(hub: Any, commit: str, revision: str | None) -> None:
    commits = {b: fill(hub, REPO, {"config.json": b}, b.replace("/", "%2F")) for b in ("dev", "refs/pr/1")}
    info = api(hub).model_info(REPO, revision=commit if revision == "commit" else revision, files_metadata=True)
    if revision in commits:
        assert info.sha == commits[revision]
        return
    assert (info.sha, info.id, info.private) == (commit, REPO, False)
    assert info.siblings is not None
    told = {s.rfilename: (s.size, s.lfs and (s.lfs.sha256, s.lfs.size)) for s in info.siblings}
    assert told == {n: (len(d), (hashlib.sha256(d).hexdigest(), len(d)) if n in LFS else None) for n, d in FILES.items()}


def test_without_files_metadata_there_are_only_names(hub: Any, commit: str) -> None:
    siblings = api(hub).model_info(REPO).siblings
    assert siblings is not None
    assert {(s.rfilename, s.size, s.blob_id) for s in siblings} == {(n, None, None) for n in FILES}


def test_list_repo_tree_pages(tmp_path: Path) -> None:
    with Hub(tmp_path, page=2) as hub:
        commit = fill(hub, REPO, FILES)
        found = list(api(hub).list_repo_tree(REPO, recursive=True, revision=commit))
        assert [f.path for f in found] == sorted([*FILES, "sub", "sub/deep er"])
        sizes = {f.path: f.size for f in found if hasattr(f, "size")}
        assert sizes == {n: len(d) for n, d in FILES.items()}
        assert sum("/tree/" in r.path for r in hub.requests) == 6
        assert [f.path for f in api(hub).list_repo_tree(REPO)] == sorted([n for n in FILES if "/" not in n] + ["sub"])
        assert [f.path for f in api(hub).list_repo_tree(REPO, "sub/deep er")] == ["sub/deep er/file [1].json"]
        with pytest.raises(EntryNotFoundError):
            list(api(hub).list_repo_tree(REPO, "nowhere"))


def test_refs_and_paths_info(hub: Any, commit: str) -> None:
    other = fill(hub, REPO, {"a": b"1"}, "dev")
    assert {b.name: b.target_commit for b in api(hub).list_repo_refs(REPO).branches} == {"main": commit, "dev": other}
    found = api(hub).get_paths_info(REPO, ["config.json", "sub", "nowhere"])
    assert [f.path for f in found] == ["config.json", "sub"]


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("apart", [False, True], ids=["same server", "content server apart"])
def test_file_metadata(tmp_path: Path, name: str, apart: bool) -> None:
    with Hub(tmp_path, content_port=0 if apart else None) as hub:
        commit = fill(hub, REPO, {name: FILES[name]})
        meta = get_hf_file_metadata(hf_hub_url(REPO, name, revision="main", endpoint=hub.url), token=False)
        data = FILES[name]
        etag = hashlib.sha256(data).hexdigest() if name in LFS else hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        assert (meta.commit_hash, meta.size, meta.etag, meta.xet_file_data) == (commit, len(data), etag, None)
        assert meta.location.startswith(hub.url) == (not apart or name not in LFS)
        assert urllib.request.urlopen(meta.location, timeout=10).read() == data


# --- downloads ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True], ids=["same server", "content server apart"])
def test_snapshot_download(tmp_path: Path, apart: bool) -> None:
    (tmp_path / "hub").mkdir()
    with Hub(tmp_path / "hub", content_port=0 if apart else None) as hub:
        commit = fill(hub, REPO, FILES)
        got = Path(snapshot_download(REPO, endpoint=hub.url, cache_dir=tmp_path / "cache", token="hf_secret", revision="main"))
        assert got.name == commit
        assert {p.relative_to(got).as_posix(): p.read_bytes() for p in got.rglob("*") if p.is_file()} == FILES
        assert len(hub.transfers()) == len(FILES) - 1  # an empty file needs none
        sent_on = {r.authorised for r in hub.requests if r.path.startswith("/cdn/")}
        assert sent_on == {not apart}  # the client library keeps the token from other hosts
        before = len(hub.requests)
        snapshot_download(REPO, endpoint=hub.url, cache_dir=tmp_path / "cache", token=False, revision=commit)
        assert len(hub.transfers()) == len(FILES) - 1  # an empty file needs none
        assert all("config.json" not in r.path for r in hub.requests[before:])


def local(hub: Any, tmp_path: Path, name: str = LARGEST, **more: Any) -> Path:
    return Path(hf_hub_download(REPO, name, endpoint=hub.url, local_dir=tmp_path / "local", **{"token": False, **more}))


def test_http_get_resumes_what_a_file_has(tmp_path: Path, hub: Any, commit: str) -> None:
    meta = get_hf_file_metadata(hf_hub_url(REPO, LARGEST, endpoint=hub.url), token=False)
    with (tmp_path / "part").open("w+b") as part:
        part.write(BIG[:100_000])
        http_get(meta.location, part, resume_size=100_000, expected_size=meta.size)
    assert (tmp_path / "part").read_bytes() == BIG
    hub.settle()
    last = hub.transfers()[-1]
    assert (last.range, last.status, last.sent) == ("bytes=100000-", 206, 200_000)


@pytest.mark.parametrize("kind", ["break", "short"])
@pytest.mark.parametrize("after", [0, 500, 150_000, 299_999])
def test_a_transfer_that_ends_early(tmp_path: Path, hub: Any, commit: str, kind: str, after: int) -> None:
    hub.faults = [Fault(kind, "/cdn/", after=after)]
    if kind == "break":  # the client library itself does not try again after a reset
        with pytest.raises(httpx2.ReadError):
            local(hub, tmp_path)
    assert local(hub, tmp_path).read_bytes() == BIG
    hub.settle()
    tries = hub.transfers()
    kept = 0 if kind == "break" else after // 500 * 500  # a failed download leaves nothing (huggingface_hub 2.4)
    assert [t.sent for t in tries] == [after, len(BIG) - kept]
    assert tries[1].range == (f"bytes={kept}-" if kept else "")


def test_break_once_cuts_the_first_download_of_each_largest_object(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    with Hub(tmp_path / "hub", break_once=True) as hub:
        for repo in ("org/a", "org/b"):
            fill(hub, repo, FILES)
            folder = tmp_path / repo
            with pytest.raises(httpx2.ReadError):
                snapshot_download(repo, endpoint=hub.url, local_dir=folder, token=False, max_workers=4)
            snapshot_download(repo, endpoint=hub.url, local_dir=folder, token=False, max_workers=4)
            assert {n: (folder / n).read_bytes() for n in FILES} == FILES
            hub.settle()
            cut = [t for t in hub.transfers() if t.sent < t.length]
            assert [(t.path.split("/")[-1], t.sent) for t in cut if repo in t.path] == [(LARGEST, len(BIG) // 2)]
        assert len(hub.transfers(LARGEST)) == 4


RANGES = [
    ("bytes=0-", 206, 0, 300_000),
    ("bytes=0-0", 206, 0, 1),
    ("bytes=7-20", 206, 7, 21),
    ("bytes=299999-", 206, 299_999, 300_000),
    ("bytes=10-999999999", 206, 10, 300_000),
    ("bytes=-5", 206, 299_995, 300_000),
    ("bytes=-999999", 206, 0, 300_000),
    ("bytes=300000-", 416, 0, 0),
    ("bytes=400000-400001", 416, 0, 0),
    ("bytes=-0", 416, 0, 0),
    ("bytes=9-3", 200, 0, 300_000),
    ("bytes=-", 200, 0, 300_000),
    ("bytes=0-1,5-6", 200, 0, 300_000),
    ("lines=0-1", 200, 0, 300_000),
]


@pytest.mark.parametrize(("asked", "status", "start", "end"), RANGES)
def test_ranges(hub: Any, commit: str, asked: str, status: int, start: int, end: int) -> None:
    got, headers, data = raw(hub, content_path(), Range=asked)
    assert (got, data) == (status, BIG[start:end])
    told = {206: f"bytes {start}-{end - 1}/300000", 416: "bytes */300000"}.get(status)
    assert headers["Content-Range"] == told
    assert headers["Content-Length"] == str(end - start)


def test_head_has_the_length_and_no_body(hub: Any, commit: str) -> None:
    status, headers, data = raw(hub, content_path(), "HEAD", Range="bytes=5-9")
    assert (status, headers["Content-Length"], data) == (200, "300000", b"")


# --- refusals ------------------------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, str, str, str | bool, type[Exception]]] = [
    ("no such repository, no token", "org/none", "main", False, RepositoryNotFoundError),
    ("no such repository", "org/none", "main", "hf_x", RepositoryNotFoundError),
    ("no such organisation", "none/name", "main", False, RepositoryNotFoundError),
    ("no such branch", REPO, "none", False, RevisionNotFoundError),
    ("no such commit", REPO, "0" * 40, False, RevisionNotFoundError),
    ("part of a commit", REPO, "short", False, RevisionNotFoundError),
    ("a commit in capitals", REPO, "CAPITALS", False, RevisionNotFoundError),
]


@pytest.mark.parametrize(("case", "repo", "revision", "token", "error"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refusals(hub: Any, commit: str, case: str, repo: str, revision: str, token: str | bool, error: type[Exception]) -> None:
    revision = {"short": commit[:7], "CAPITALS": commit.upper()}.get(revision, revision)
    with pytest.raises(error):
        api(hub, token).model_info(repo, revision=revision)
    with pytest.raises(error):
        list(api(hub, token).list_repo_tree(repo, revision=revision))
    with pytest.raises(error):
        get_hf_file_metadata(hf_hub_url(repo, "config.json", revision=revision, endpoint=hub.url), token=token)


@pytest.mark.parametrize("name", ["none.json", "sub", "sub/", "../name-1.5B/config.json", "%2e%2e/x", "config.json/x"])
def test_no_such_file(tmp_path: Path, hub: Any, commit: str, name: str) -> None:
    with pytest.raises(EntryNotFoundError) as caught:
        get_hf_file_metadata(f"{hub.url}/{REPO}/resolve/main/{name.replace('..', '%2e%2e')}", token=False)
    assert caught.value.response is not None
    assert caught.value.response.headers["X-Repo-Commit"] == commit


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/api/models", "/api/models/org", f"/api/models/{REPO}/none", "/api/models/../hub", f"/cdn/{REPO}/{'0' * 64}/config.json"],
)
def test_addresses_that_are_not_the_hubs(hub: Any, commit: str, path: str) -> None:
    assert raw(hub, path)[0] == 404


@pytest.mark.parametrize(("token", "status"), [(False, 401), ("hf_other", 403), ("hf_right", 0)])
def test_gated(tmp_path: Path, hub: Any, commit: str, token: str | bool, status: int) -> None:
    hub.faults = [Fault("gated", token="hf_right")]
    assert api(hub, token).model_info(REPO).gated == "manual"
    if not status:
        api(hub, token).auth_check(REPO)
        assert local(hub, tmp_path, token=token).read_bytes() == BIG
        return
    with pytest.raises(GatedRepoError) as caught:
        local(hub, tmp_path, token=token)
    assert caught.value.response.status_code == status
    with pytest.raises(GatedRepoError):
        api(hub, token).auth_check(REPO)
    assert not hub.transfers()


@pytest.mark.parametrize(("token", "found"), [(False, False), ("hf_other", False), ("hf_right", True)])
def test_private(hub: Any, commit: str, token: str | bool, found: bool) -> None:
    hub.faults = [Fault("private", token="hf_right")]
    if found:
        assert api(hub, token).model_info(REPO).sha == commit
        return
    with pytest.raises(RepositoryNotFoundError):
        api(hub, token).model_info(REPO)


# --- faults ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_status_with_headers(hub: Any, commit: str, status: int) -> None:
    hub.faults = [Fault("status", "/api/models", status=status, headers={"Retry-After": "7"}, times=2)]
    for _ in range(2):
        with pytest.raises(HfHubHTTPError) as caught:
            api(hub).model_info(REPO)
        assert (caught.value.response.status_code, caught.value.response.headers["Retry-After"]) == (status, "7")
    assert api(hub).model_info(REPO).sha == commit


def test_a_refused_token(hub: Any, commit: str) -> None:
    message = "Invalid credentials in Authorization header"
    hub.faults = [Fault("status", "/api/models", status=401, headers={"X-Error-Message": message})]
    with pytest.raises(HfHubHTTPError, match=message) as caught:
        api(hub, "hf_wrong").model_info(REPO)
    assert not isinstance(caught.value, RepositoryNotFoundError)


@pytest.mark.parametrize(("method", "path", "hit"), [("GET", "/cdn/", False), ("HEAD", "/cdn/", True), ("HEAD", r"/a\.json", False)])
def test_a_fault_is_for_its_method_and_path(hub: Any, commit: str, method: str, path: str, hit: bool) -> None:
    hub.faults = [Fault("status", path, method, status=503)]
    assert raw(hub, content_path(), "HEAD")[0] == (503 if hit else 200)
    assert hub.faults[0].hits == hit


@pytest.mark.parametrize("silent", [True, False])
def test_stall_until_released(hub: Any, commit: str, silent: bool) -> None:
    hub.faults = [Fault("stall", "/cdn/", after=1000, silent=silent)]
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(raw(hub, content_path())[2]))
    reader.start()
    until = time.monotonic() + 5
    while not (hub.requests and (silent or hub.requests[0].sent == 1000)) and time.monotonic() < until:
        time.sleep(0.005)
    reader.join(0.2)
    assert not got
    assert hub.requests[0].status == (0 if silent else 200)
    hub.release()
    reader.join(10)
    assert got == [BIG]


def test_a_stalled_client_times_out_and_its_thread_ends(tmp_path: Path, hub: Any, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.faults = [Fault("stall", "/cdn/", after=4096)]
    assert local(hub, tmp_path).read_bytes() == BIG
    assert hub.transfers()[1].range == "bytes=4000-"
    until = time.monotonic() + 5
    hub.settle()
    while len(threads(hub)) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert hub.transfers()[0].sent == 4096
    assert len(threads(hub)) <= 1  # of the connection that the client keeps open


def test_throttle(hub: Any, commit: str) -> None:
    hub.faults = [Fault("throttle", "/cdn/", rate=50_000)]
    began = time.monotonic()
    assert raw(hub, content_path(), Range="bytes=0-24999")[2] == BIG[:25_000]
    assert time.monotonic() - began >= 0.45


@pytest.mark.parametrize("after", [None, 0, 299_999, 262_144])
def test_corrupt(tmp_path: Path, hub: Any, commit: str, after: int | None) -> None:
    hub.faults = [Fault("corrupt", "/cdn/", after=after)]
    got = local(hub, tmp_path).read_bytes()
    at = 150_000 if after is None else after
    assert [i for i, (a, b) in enumerate(zip(got, BIG, strict=True)) if a != b] == [at]


@pytest.mark.parametrize("name", ["config.json", LARGEST])
def test_wrong_metadata(tmp_path: Path, hub: Any, commit: str, name: str) -> None:
    hub.faults = [Fault("etag", name, value="f" * 64)]
    assert get_hf_file_metadata(hf_hub_url(REPO, name, endpoint=hub.url), token=False).etag == "f" * 64
    hub.faults = [Fault("size", name, value=5)]
    assert get_hf_file_metadata(hf_hub_url(REPO, name, endpoint=hub.url), token=False).size == 5
    assert api(hub).get_paths_info(REPO, [name])[0].size == 5
    with pytest.raises(OSError, match="Consistency check failed"):
        local(hub, tmp_path, name)


def test_xet_is_announced_and_never_answers(tmp_path: Path, hub: Any, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.faults = [Fault("xet", r"\.safetensors")]
    listed = {f.path: f.xet_hash for f in api(hub).list_repo_tree(REPO) if hasattr(f, "xet_hash")}
    assert {n for n, xet in listed.items() if xet} == {n for n in FILES if n.endswith(".safetensors")}
    assert local(hub, tmp_path).read_bytes() == BIG  # switched off in the client: ordinary transfer
    program = (
        "import sys; from huggingface_hub import hf_hub_download;"
        "hf_hub_download(sys.argv[1], sys.argv[2], endpoint=sys.argv[3], local_dir=sys.argv[4], token=False)"
    )
    argv = [sys.executable, "-c", program, REPO, LARGEST, hub.url, str(tmp_path / "xet")]
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_XET_CACHE": str(tmp_path / "xetcache"), "PATH": "/usr/bin"}
    client = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 30
        while not any(r.path.startswith("/cas") for r in hub.requests) and client.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert any("/xet-read-token/" in r.path and r.status == 200 for r in hub.requests)
        assert any(r.path.startswith("/cas") and not r.status for r in hub.requests)
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(0.5)
    finally:
        client.kill()
        _, said = client.communicate()
    assert len(hub.transfers()) == 1, said


def test_a_fault_of_no_known_kind() -> None:
    with pytest.raises(ValueError, match="explode"):
        Fault("explode")


# --- life ----------------------------------------------------------------------------------------------------------------------------


def test_stop_ends_threads_and_held_connections(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    server = Hub(tmp_path, content_port=0).start()
    commit = fill(server, REPO, FILES)
    server.faults = [Fault("stall", "/cdn/", after=10), Fault("throttle", "config.json", rate=0.1)]
    failed: list[BaseException] = []

    def ask(path: str) -> None:
        try:
            raw(server, path)
        except (http.client.HTTPException, OSError) as error:
            failed.append(error)

    paths = [content_path(), f"/api/resolve-cache/models/{REPO}/{commit}/config.json", "/cas/reconstruction"]
    clients = [threading.Thread(target=ask, args=(path,)) for path in paths]
    idle = http.client.HTTPConnection(server.url.removeprefix("http://"))  # kept alive
    idle.request("GET", f"/api/models/{REPO}")
    idle.getresponse().read()
    for client in clients:
        client.start()
    until = time.monotonic() + 5
    while len(server.requests) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    server.stop()
    for client in clients:
        client.join(5)
    idle.close()
    assert len(failed) == 3
    assert set(threading.enumerate()) <= before
    with pytest.raises(httpx2.ConnectError):
        api(server).model_info(REPO)


def post(url: str, value: Any) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/control/faults", json.dumps(value).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def test_control_by_another_program(tmp_path: Path, hub: Any, commit: str) -> None:
    assert post(hub.url, [])[0] == 404  # only when asked for
    with Hub(hub.root, control=True) as steered:
        assert post(steered.url, [{"kind": "status", "path": "/cdn/", "status": 503, "times": 2}]) == (200, 1)
        assert [raw(steered, content_path())[0] for _ in range(3)] == [503, 503, 200]
        code, said = post(steered.url, [{"kind": "explode"}])
        assert (code, "explode" in said) == (400, True)
        assert [post(steered.url, wrong)[0] for wrong in ([{"no": 1}], ["x"], 5)] == [400] * 3
        assert [f.kind for f in steered.faults] == ["status"]
        requests = json.loads(raw(steered, "/control/requests")[2])
        assert [r["status"] for r in requests if r["path"].startswith("/cdn/")] == [503, 503, 200]
        assert raw(steered, "/control/none")[0] == 404


def test_the_program(tmp_path: Path, script: Callable[[str], Any]) -> None:
    folder = tmp_path / REPO
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    commit = commit_of(folder)
    argv = [sys.executable, "-I", str(hubs.SERVER), "--root", str(tmp_path), "--port", "0", "--break-once"]
    program = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        url = program.stdout.readline().split()[-1]
        assert HfApi(endpoint=url, token=False).model_info(REPO).sha == commit
        with pytest.raises(httpx2.ReadError):
            hf_hub_download(REPO, LARGEST, endpoint=url, local_dir=tmp_path / "l", token=False)
        assert Path(hf_hub_download(REPO, LARGEST, endpoint=url, local_dir=tmp_path / "l", token=False)).read_bytes() == BIG
        program.send_signal(signal.SIGTERM)
        said, wrong = program.communicate(timeout=10)
    finally:
        program.kill()
    assert (program.returncode, wrong) == (0, "")
    lines = [line.split() for line in said.splitlines() if "GET /cdn/" in line]
    assert [line[-3:] for line in lines] == [["-", "200", "150000/300000"], ["-", "200", "300000/300000"]]
    with pytest.raises((httpx2.ConnectError, LocalEntryNotFoundError)):
        HfApi(endpoint=url, token=False).model_info(REPO)
