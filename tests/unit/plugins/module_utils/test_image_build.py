# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils import image_build as core
from ansible_collections.dgxspark.vllm.plugins.module_utils.files import file_sha256
from ansible_collections.dgxspark.vllm.plugins.module_utils.image_build import (
    BuildLog,
    DigestCache,
    Entry,
    classify,
    disk_need,
    inputs_text,
    list_context,
    make_manifest,
    manifest_is,
    max_jobs,
    parse_size,
    reclaimable_cache,
    space_problems,
    write_context,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure, Progress
from fake_docker import FakeDocker

# --- the context -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.whl").write_bytes(b"a" * 1000)
    (folder / "sub" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "link.whl").symlink_to("a.whl")
    return folder


def test_context_lists_files_and_follows_links_to_files(wheels: Path) -> None:
    entries, found = list_context(
        [{"dest": "w", "src": str(wheels)}, {"dest": "x.py", "content": "print(1)"}, {"dest": "b.tar", "src": str(wheels / "a.whl")}],
        file_sha256,
    )
    assert found == []
    assert [(e.dest, e.size, e.executable) for e in entries] == [
        ("b.tar", 1000, False),
        ("w/a.whl", 1000, False),
        ("w/link.whl", 1000, False),
        ("w/sub/run.sh", 10, True),
        ("x.py", 8, False),
    ]
    assert entries[4].sha256 == hashlib.sha256(b"print(1)").hexdigest()


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        ({"dest": "", "src": "/etc/hostname"}, "bad_context"),
        ({"dest": "/abs", "src": "/etc/hostname"}, "bad_context"),
        ({"dest": "../up", "content": ""}, "bad_context"),
        ({"dest": "a/../../up", "content": ""}, "bad_context"),
        ({"dest": "a//b", "content": ""}, "bad_context"),
        ({"dest": "Dockerfile", "content": ""}, "bad_context"),
        ({"dest": ".dockerignore", "content": ""}, "bad_context"),
        ({"dest": "a", "src": ""}, "context_missing"),
        ({"dest": "a", "src": "relative"}, "context_missing"),
        ({"dest": "a", "src": "/nonexistent/base.tar"}, "context_missing"),
        ({"dest": "a", "src": "/dev/null"}, "context_missing"),
        ({"dest": "a", "src": "EMPTY"}, "context_missing"),
        ({"dest": "a", "src": "BROKEN"}, "context_missing"),
        ({"dest": "a", "src": "FOLDERLINK"}, "bad_context"),
    ],
)
def test_bad_context(tmp_path: Path, item: dict[str, str], kind: str) -> None:
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BROKEN").symlink_to("../blobs/gone")
    (tmp_path / "FOLDERLINK").mkdir()
    (tmp_path / "FOLDERLINK" / "inner").symlink_to(tmp_path / "EMPTY")
    (tmp_path / "FOLDERLINK" / "file").write_text("x")
    if item.get("src", "").isupper():
        item = {**item, "src": str(tmp_path / item["src"])}
    _, found = list_context([item], file_sha256)
    assert [p["class"] for p in found] == [kind] and found[0]["remedy"]


def test_all_faults_of_a_context_at_once() -> None:
    items = [
        {"dest": "a", "src": "/nonexistent/a"},
        {"dest": "/b", "content": ""},
        {"dest": "c", "content": ""},
        {"dest": "c", "content": "2"},
    ]
    assert [p["class"] for p in list_context(items, file_sha256)[1]] == ["context_missing", "bad_context", "bad_context"]


def test_digests_are_remembered_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(core, "file_sha256", lambda path: read.append(path.name) or file_sha256(path))
    file, store = tmp_path / "a.whl", tmp_path / "state" / "digests.json"
    file.write_bytes(b"one")
    cache = DigestCache(store)
    first = cache.sha256(file)
    cache.save()
    assert DigestCache(store).sha256(file) == first and read == ["a.whl"]
    file.write_bytes(b"two")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    again = DigestCache(store)
    assert again.sha256(file) == hashlib.sha256(b"two").hexdigest() and len(read) == 2
    file.unlink()
    again.save()
    assert json.loads(store.read_text()) == {}
    store.write_text('{"a": [1]}')
    file.write_bytes(b"three")
    assert DigestCache(store).sha256(file) == hashlib.sha256(b"three").hexdigest()


def spec(entries: list[Entry], dockerfile: str = "FROM scratch\n", jobs: int = 0, **args: str) -> dict[str, Any]:
    return core.spec_of(
        profile="cpu", dockerfile=dockerfile, build_args=args, entries=entries, repository="r", manifest="/m.json", jobs=jobs
    )


def test_inputs_depend_on_contents_alone() -> None:
    a, b = Entry("a", "1" * 64, 5, src="/x/a"), Entry("b", "2" * 64, 5, src="/x/b")
    base = spec([a, b])
    assert spec([b, a])["inputs"] == base["inputs"] == spec([Entry("a", "1" * 64, 5, src="/elsewhere/a"), b], jobs=3)["inputs"]
    others = [
        spec([a]),
        spec([a, Entry("b", "3" * 64, 5)]),
        spec([a, Entry("c", "2" * 64, 5)]),
        spec([a, Entry("b", "2" * 64, 5, executable=True)]),
        spec([a, b], dockerfile="FROM scratch\n\n"),
        spec([a, b], X="1"),
    ]
    assert len({s["inputs"] for s in [base, *others]}) == 7
    assert base["tag"] == f"r:{base['inputs'][:12]}"


def test_the_diff_names_what_changed() -> None:
    old = spec([Entry("a.whl", "1" * 64, 5), Entry("b.whl", "2" * 64, 5)], X="1")["detail"]
    new = spec([Entry("a.whl", "3" * 64, 5), Entry("c.whl", "2" * 64, 5)], X="2")["detail"]
    before, after = inputs_text(old, "sha256:1").splitlines(), inputs_text(new, "to be built").splitlines()
    assert set(before) - set(after) == {"file a.whl 111111111111", "file b.whl 222222222222", "build argument X=1", "image sha256:1"}
    assert set(after) - set(before) == {"file a.whl 333333333333", "file c.whl 222222222222", "build argument X=2", "image to be built"}
    assert inputs_text(None, "x") == "" == core.manifest_text(None) == core.manifest_text([])


def test_the_tar_holds_every_file_and_nothing_of_this_machine(wheels: Path) -> None:
    entries, _ = list_context([{"dest": "w", "src": str(wheels)}, {"dest": "x.py", "content": "é"}], file_sha256)
    stream, moved = io.BytesIO(), []
    write_context(entries, "FROM scratch\n", stream, moved.append)
    with tarfile.open(fileobj=io.BytesIO(stream.getvalue())) as tar:
        members = tar.getmembers()
        assert {m.name for m in members} == {"Dockerfile", "w/a.whl", "w/link.whl", "w/sub/run.sh", "x.py"}
        assert all((m.uid, m.gid, m.mtime, m.uname) == (0, 0, 0, "") and m.isreg() for m in members)
        assert stat.S_IMODE(tar.getmember("w/sub/run.sh").mode) == 0o755 and stat.S_IMODE(tar.getmember("w/a.whl").mode) == 0o644
        assert tar.extractfile("x.py").read() == "é".encode()  # type: ignore[union-attr]
    assert sum(moved) == sum(e.size for e in entries)


@pytest.mark.parametrize("data", [b"b" * 1000, b"a" * 999, b"a" * 1001, b""])
def test_a_file_that_changes_meanwhile_ends_the_build(wheels: Path, data: bytes) -> None:
    entries, _ = list_context([{"dest": "a.whl", "src": str(wheels / "a.whl")}], file_sha256)
    (wheels / "a.whl").write_bytes(data)
    with pytest.raises(JobFailure, match="context_changed"):
        write_context(entries, "FROM scratch\n", io.BytesIO(), lambda _n: None)


# --- numbers ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0B", 0),
        ("0B (0%)", 0),
        ("512B", 512),
        ("1.2kB", 1200),
        ("66.7GB", 66_700_000_000),
        ("74.82GB", 74_820_000_000),
        ("666.8MB (12%)", 666_800_000),
        ("1.5TB", 1_500_000_000_000),
        ("2GiB", 2 << 30),
        (" 3 MB ", 3_000_000),
        ("", None),
        ("N/A", None),
        ("GB", None),
        ("1.2.3GB", None),
        ("12", None),
    ],
)
def test_sizes(text: str, value: int | None) -> None:
    assert parse_size(text) == value


TABLE = """TYPE            TOTAL     ACTIVE    SIZE      RECLAIMABLE
Images          1         1         797.7MB   0B (0%)
Build Cache     142       0         74.82GB   74.82GB
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"Type":"Images","Reclaimable":"1GB (3%)"}\n{"Type":"Build Cache","Size":"66.7GB","Reclaimable":"66.7GB"}\n', 66_700_000_000),
        ('{"Type":"Build Cache","Size":"80GB","Reclaimable":"0B"}', 0),
        (TABLE, 74_820_000_000),
        ("Build Cache     0         0         0B        0B", 0),
        ("", 0),
        ("{broken", 0),
        ('{"Type":"Build Cache"}', 0),
    ],
)
def test_reclaimable_build_cache(text: str, value: int) -> None:
    assert reclaimable_cache(text) == value


def test_disk_need_counts_what_is_unpacked() -> None:
    entries = [Entry("base.tar", H, 200_000_000), Entry("w/a.whl", H, 600_000_000)]
    assert 7_000_000_000 < disk_need(entries) < 9_000_000_000  # measured: 7.5 GB
    assert disk_need([]) == 0


H = "0" * 64


def test_space_offers_a_prune_and_does_none() -> None:
    assert space_problems("/var/lib/docker", 5_000_000_000, 10_000_000_000, 0) == []
    (found,) = space_problems("/var/lib/docker", 50_000_000_000, 10_000_000_000, 66_700_000_000)
    assert found["class"] == "disk_full" and "docker builder prune" in found["remedy"] and "66.70 GB" in found["remedy"]
    assert "50.00 GB" in found["evidence"] and "10.00 GB" in found["evidence"] and "/var/lib/docker" in found["evidence"]
    assert "prune" not in space_problems("/d", 50_000_000_000, 10_000_000_000, 0)[0]["remedy"]


@pytest.mark.parametrize(
    ("cores", "kib", "jobs"),
    [(20, 121 << 20, 15), (20, 400 << 20, 20), (20, 7 << 20, 1), (1, 121 << 20, 1), (20, 0, 1), (20, 16 << 20, 2)],
)
def test_compile_jobs_fit_into_memory(cores: int, kib: int, jobs: int) -> None:
    assert max_jobs(cores, kib) == jobs


# --- the log ---------------------------------------------------------------------------------------------------------------------

CLASSIC = """Sending build context to Docker daemon    804MB
Step 1/4 : FROM scratch AS base
 --->
Step 2/4 : ADD base.tar /
 ---> 4a1b8002bdd3
Step 3/4 : RUN python3 -m venv /opt/vllm  && pip install
 ---> Running in 0123
Step 4/4 : ENTRYPOINT ["vllm"]
Successfully built 4a1b8002bdd3
"""
BUILDKIT = """#0 building with "default" instance using docker driver
#1 [internal] load remote build context
#1 DONE 3.1s
#2 [base 1/1] ADD base.tar /
#2 DONE 2.0s
#3 [build 1/2] COPY wheelhouse /wheelhouse
#3 CACHED
#4 [build 2/2] RUN python3 -m venv /opt/vllm
#4 1.234 Processing /wheelhouse/a.whl
#4 DONE 60.0s
#5 [stage-2 1/1] COPY --from=build /opt/vllm /opt/vllm
#5 DONE 9.0s
#6 exporting to image
#6 DONE 1.0s
"""


def steps(text: str) -> list[tuple[int, int]]:
    log, seen = BuildLog(), []
    for line in text.splitlines():
        if log.feed(line) and (log.done, log.total) not in seen:
            seen.append((log.done, log.total))
    return seen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CLASSIC, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        (BUILDKIT, [(0, 1), (1, 1), (1, 3), (2, 3), (3, 3), (3, 4), (4, 4)]),
        ("#5 [linux/arm64 build 2/7] RUN make\n#5 CACHED\n", [(0, 7), (1, 7)]),
        ("#5 [ 2/3] RUN make\n#5 DONE 0.1s\n", [(0, 3), (1, 3)]),
        ("#5 [2/3] RUN make\n#5 ERROR: process did not complete\n", [(0, 3)]),
        ("#5 12.3 Step 9/10 : not a step\n[3/9] Building CXX object\n#9 DONE 0.1s\nDEPRECATED: The legacy builder\n", []),
        ("", []),
    ],
)
def test_steps(text: str, expected: list[tuple[int, int]]) -> None:
    assert steps(text) == expected


def test_the_step_is_told_in_one_short_line() -> None:
    log = BuildLog()
    log.feed("Step 3/4 : RUN a   b " + "x" * 200)
    assert log.message.startswith("step 3 of 4: RUN a b x") and len(log.message) < 100


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("write /opt/vllm/x.so: no space left on device", "disk_full"),
        ("Error processing tar file(exit status 1): write /a/b: no space left on device", "disk_full"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk_full"),
        ("Got permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock", "docker_group"),
        ("permission denied while trying to connect to the docker API at unix:///var/run/docker.sock", "docker_group"),
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?", "docker_down"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated", "pip_hash_mismatch"),
        ("ERROR: Hashes are required in --require-hashes mode, but they are missing", "pip_hash_mismatch"),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "pip_no_wheel"),
        ("#9 3.2 ERROR: Could not find a version that satisfies the requirement zstandard==1", "pip_no_wheel"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "build_oom"),
        ("The command '/bin/sh -c pip install' returned a non-zero code: 137", "build_oom"),
        ('ERROR: process "/bin/sh -c make" did not complete successfully: exit code: 137', "build_oom"),
        ("ERROR: BuildKit is enabled but the buildx component is missing or broken.", "buildx_missing"),
        ("COPY failed: file not found in build context or excluded by .dockerignore: stat wheels: file does not exist", "dockerfile"),
        ('ERROR: failed to compute cache key: failed to calculate checksum of ref a::b: "/wheels": not found', "dockerfile"),
        (
            "ERROR: failed to calculate checksum of ref 4f8s::x9: failed to get state for index 0 on abc: not found",
            "build_cache_lost",
        ),
        ("fix-up torchvision_without_its_operators is not applicable: /opt/x: the expected text is there 0 times", "fixup_failed"),
        ("#12 0.2 fix-up distribution_named_vllm is not applicable: a distribution vllm 0.32.0 is installed", "fixup_failed"),
        ("ninja: build stopped: subcommand failed.", "compiler"),
        ("exec /bin/sh: exec format error", "wrong_architecture"),
        ("something nobody has seen before", "build_failed"),
        ("", "build_failed"),
    ],
)
def test_classes(line: str, kind: str) -> None:
    found = classify(
        ["Step 1/2 : RUN x", line, "The command '/bin/sh -c x' returned a non-zero code: 1"] if kind != "build_failed" else [line], 1, "/l"
    )
    assert found["class"] == kind and "/l" in found["evidence"] and found["remedy"]
    assert line.removeprefix("ERROR: ")[:40] in found["evidence"]


def test_a_wrong_wheel_is_named() -> None:
    lines = [
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If",
        "    a==1 from file:///w/a.whl:",
        "   Expected sha256 1",
    ]
    assert "a==1 from file:///w/a.whl" in classify(lines, 1, "/l")["evidence"]


def test_the_root_comes_before_what_follows() -> None:
    lines = [
        "ninja: build stopped: subcommand failed.",
        "c++: fatal error: Killed signal terminated program cc1plus",
        "ERROR: Failed building wheel for x",
    ]
    assert classify(lines, 1, "/l")["class"] == "build_oom"


# --- the manifest ----------------------------------------------------------------------------------------------------------------


def test_the_manifest_keeps_the_image_before() -> None:
    one = make_manifest("cpu", {"Id": "sha256:1", "Created": "t1"}, "i1", "r:1", {}, None)
    assert one["previous"] is None and manifest_is(one, one)
    two = make_manifest("cpu", {"Id": "sha256:2", "Created": "t2"}, "i2", "r:2", {}, one)
    assert two["previous"] == {"image_id": "sha256:1", "inputs": "i1", "tag": "r:1", "built_at": "t1"}
    assert make_manifest("cpu", {"Id": "sha256:2", "Created": "t2"}, "i2", "r:2", {}, two)["previous"] == two["previous"]
    for broken in (None, [], "x", {}, {**two, "image_id": "sha256:3"}, {**two, "inputs": "i3"}):
        assert not manifest_is(broken, two)


# --- the worker, with a made-up docker -------------------------------------------------------------------------------------------


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    return FakeDocker(tmp_path / "docker", monkeypatch)


def build(tmp_path: Path, wheels: Path, **change: Any) -> dict[str, Any]:
    entries, _ = list_context([{"dest": "w", "src": str(wheels)}], file_sha256)
    whole = {**spec(entries), "manifest": str(tmp_path / "images" / "cpu.json"), **change}
    return core.build(whole, Progress(tmp_path / "progress.json"), "/the/log")


def test_build(tmp_path: Path, wheels: Path, docker: FakeDocker) -> None:
    result = build(tmp_path, wheels)
    manifest = json.loads((tmp_path / "images" / "cpu.json").read_text())
    assert result["image_id"] == manifest["image_id"] == "sha256:" + "7" * 64 and manifest["profile"] == "cpu"
    assert result["before"] == "" and re.search(r"^folder w/ [0-9a-f]{12} \(\d+ files\)$", result["after"], re.M)
    state = docker()
    assert state["images"][0]["Names"] == ["Dockerfile", "w/a.whl", "w/link.whl", "w/sub/run.sh"]
    assert "--force-rm" in state["calls"][0] and not any("MAX_JOBS" in a for a in state["calls"][0])
    assert ["image", "prune", "--force", "--filter", "label=dgxspark.vllm.leftover=cpu"] in state["calls"]
    assert json.loads((tmp_path / "progress.json").read_text())["stage"] == "record"


def test_max_jobs_reaches_a_dockerfile_that_asks_for_it(tmp_path: Path, wheels: Path, docker: FakeDocker) -> None:
    build(tmp_path, wheels, dockerfile="FROM scratch\nARG MAX_JOBS\n", jobs=3)
    assert "MAX_JOBS=3" in docker()["calls"][0]


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ({"early": "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"}, "docker_down"),
        ({"late": "ERROR: No matching distribution found for torch"}, "pip_no_wheel"),
        ({"unlabelled": True}, "image_not_loaded"),
    ],
)
def test_a_failed_build_leaves_what_was_there(tmp_path: Path, wheels: Path, docker: FakeDocker, state: dict[str, Any], kind: str) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "cpu.json").write_text('{"image_id": "old"}')
    docker(**state)
    with pytest.raises(JobFailure) as caught:
        build(tmp_path, wheels)
    assert [p["class"] for p in caught.value.problems] == [kind]
    assert (tmp_path / "images" / "cpu.json").read_text() == '{"image_id": "old"}'
    assert not any(call[:2] == ["image", "prune"] for call in docker()["calls"])


def test_a_context_that_changes_stops_the_build(tmp_path: Path, wheels: Path, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, _ = list_context([{"dest": "w", "src": str(wheels)}], file_sha256)
    (wheels / "a.whl").write_bytes(b"b" * 1000)
    whole = {**spec(entries), "manifest": str(tmp_path / "cpu.json")}
    with pytest.raises(JobFailure, match="context_changed"):
        core.build(whole, Progress(tmp_path / "progress.json"), "/l")
    assert "images" not in docker()


def test_no_docker(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobFailure, match="docker_missing"):
        build(tmp_path, wheels)
    with pytest.raises(JobFailure, match="docker_missing"):
        core.docker("info")


def test_only_an_image_of_this_name_or_manifest_counts(docker: FakeDocker) -> None:
    """An image that others built upon ours inherits the label."""
    wanted = spec([])
    derived = {"Id": "sha256:d", "Tag": "theirs:1", "Config": {"Labels": {core.LABEL: wanted["inputs"]}}}
    docker(images=[derived])
    assert core.find_image(wanted, None) is None and core.find_image(wanted, {"image_id": "sha256:other"}) is None
    assert core.find_image(wanted, {"image_id": "sha256:d"}) == derived
    docker(images=[derived, {**derived, "Id": "sha256:o", "Tag": "r:1"}])
    assert core.find_image(wanted, None)["Id"] == "sha256:o"  # type: ignore[index]


def test_inputs_of_an_image_from_elsewhere() -> None:
    labelled = {"Id": "sha256:a", "Config": {"Labels": {core.LABEL: "i"}}}
    assert core.inputs_of(labelled) == "i" == core.inputs_of({**labelled, "Id": "sha256:b"})  # ids differ between nodes
    plain = {"Id": "sha256:a", "Config": {"Labels": None}}
    assert core.inputs_of(plain) != core.inputs_of({**plain, "Id": "sha256:b"}) and len(core.inputs_of({"Id": "x"})) == 64
