# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What identifies a source, where an output may be, when it is complete, and how it is published."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybrids
import pytest
import shards
from ansible_collections.dgxspark.vllm.plugins.module_utils import hybrid_folder
from ansible_collections.dgxspark.vllm.plugins.module_utils.hybrid_folder import (
    JOURNAL,
    MANIFEST,
    Building,
    Places,
    complete,
    inputs_of,
    is_ours,
    kept_problems,
    locked,
    output_failure,
    place_problems,
    read_manifest,
    remove_ours,
    space_problems,
)
from ansible_collections.dgxspark.vllm.plugins.module_utils.hybrid_source import look_at, read_source
from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import JobFailure
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import MANIFEST as SNAPSHOT
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import STAMPS
from hybrids import no_waiting, snapshot  # noqa: F401 -- no_waiting is a fixture


@pytest.fixture
def source(tmp_path: Path) -> Path:
    hybrids.pair(tmp_path)
    return tmp_path / "source"


def shard_of(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def touch(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


# --- the source ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda f: None, True),
        (lambda f: grow(f / shards.INDEX), True),  # the output's index is made of headers
        (lambda f: (f / ".cache/huggingface").mkdir(parents=True) or (f / ".cache/huggingface/x").write_text("x"), True),
        (lambda f: (f / ".git").mkdir() or (f / ".git/x").write_text("x"), True),
        (lambda f: (f / ".x.0123456789ab.part").write_text("x"), True),
        (lambda f: touch(shard_of(f)), False),
        (lambda f: grow(f / "config.json"), False),
        (lambda f: (f / "README.md").unlink(), False),
        (lambda f: (f / "more.txt").write_text("x"), False),
        (lambda f: (f / "sub").mkdir() or (f / "sub/more.txt").write_text("x"), False),
    ],
)
def test_a_plain_folder_is_what_its_files_are(source: Path, change: Callable[[Path], Any], same: bool) -> None:
    before = look_at(source).identity
    change(source)
    assert (look_at(source).identity == before) == same


def test_another_header_under_the_same_size_and_time_is_another_source(source: Path) -> None:
    before, path = look_at(source).identity, shard_of(source)
    info, data = path.stat(), path.read_bytes()
    path.write_bytes(data.replace(b"mlp", b"mlq"))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert look_at(source).identity != before


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 20, b"<html>" * 10])
def test_a_shard_that_is_none_still_identifies_the_folder(source: Path, content: bytes) -> None:
    shard_of(source).write_bytes(content)
    assert look_at(source).identity["files"]


def test_a_snapshot_is_what_its_manifest_says(source: Path) -> None:
    snapshot(source)
    found = look_at(source)
    assert found.problems == [] and found.snapshot == {"repo": "org/int4", "revision": "a" * 40}
    assert not any(name.startswith(".dgxspark") for name in found.files)
    # Brought again, by whatever way: other times, the same content.
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith("."):
            touch(path)
    snapshot(source)
    assert look_at(source).identity == found.identity
    snapshot(source, "b" * 40)
    assert look_at(source).identity != found.identity


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda f: shard_of(f).unlink(), "is missing"),
        (lambda f: grow(shard_of(f)), "bytes, not"),
        (lambda f: touch(shard_of(f)), "was changed after it was verified"),
        (lambda f: grow(f / "config.json"), "config.json has"),
        (lambda f: (f / SNAPSHOT).unlink(), "unfinished snapshot"),
        (lambda f: (f / SNAPSHOT).write_text("{}"), "unfinished snapshot"),
        (lambda f: (f / shards.INDEX).unlink(), "is missing"),
    ],
)
def test_an_incomplete_snapshot_is_no_source(source: Path, fault: Callable[[Path], Any], says: str) -> None:
    snapshot(source)
    fault(source)
    found = look_at(source)
    assert [p["class"] for p in found.problems] == ["source_incomplete"] and says in found.problems[0]["evidence"]
    with pytest.raises(JobFailure) as failure:
        read_source(found)
    assert "source_incomplete" in [p["class"] for p in failure.value.problems]


def test_a_mended_index_and_files_of_ones_own_leave_a_snapshot_complete(source: Path) -> None:
    snapshot(source)
    before = look_at(source)
    grow(source / shards.INDEX)
    assert look_at(source).problems == [] and look_at(source).identity == before.identity
    (source / "kv_metadata.json").write_text("{}")
    assert look_at(source).problems == [] and look_at(source).identity != before.identity


def test_a_manifest_without_this_nodes_notes_does_not_vouch_for_bytes(source: Path) -> None:
    snapshot(source)
    (source / STAMPS).unlink()
    before = look_at(source)
    assert before.problems == []
    touch(shard_of(source))
    assert look_at(source).problems == [] and look_at(source).identity != before.identity


def test_linked_files_are_taken_and_what_is_no_file_is_told(source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (source / "file.txt").symlink_to(tmp_path / "elsewhere" / "a.txt")
    found = look_at(source)
    assert "file.txt" in found.files and found.problems == []
    (source / "gone.json").symlink_to(tmp_path / "blobs" / "0123")
    (source / "itself.json").symlink_to("itself.json")
    os.mkfifo(source / "pipe")
    (source / "bad\nname").write_text("x")
    assert sorted(p["class"] for p in look_at(source).problems) == [
        "bad_file_name", "source_incomplete", "source_incomplete", "source_not_a_file"
    ]  # fmt: skip


@pytest.mark.parametrize("to", ["../elsewhere", ".", "..", "sub"])
@pytest.mark.parametrize("at", ["linked", "sub/linked"])
def test_a_linked_folder_is_refused_and_not_gone_into(source: Path, tmp_path: Path, at: str, to: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("x")
    (source / "sub").mkdir()
    (source / at).symlink_to(("../" if "/" in at else "") + to)
    found = look_at(source)
    assert [p["class"] for p in found.problems] == ["source_linked_folder"] and str(source / at) in found.problems[0]["evidence"]
    assert not any(name.startswith(f"{at}/") for name in found.files)
    assert "source_linked_folder" in hybrids.classes(hybrids.failure(tmp_path))


@pytest.mark.parametrize(
    ("content", "class_"), [("{not json", "config_not_json"), ("[]", "config_not_object"), ("", "config_not_json"), (None, "config_")]
)
def test_a_config_that_cannot_be_read_is_told_as_that(source: Path, tmp_path: Path, content: str | None, class_: str) -> None:
    (source / "config.json").unlink()
    if content is None:
        (source / "config.json").mkdir()
    else:
        (source / "config.json").write_text(content)
    failed = hybrids.failure(tmp_path)
    assert failed.problems[0]["class"].startswith(class_) and failed.problems[0]["severity"] == "error"
    assert "expected_unknown" not in hybrids.classes(failed)


@pytest.mark.parametrize("name", [".dgxspark-snapshot.json", ".dgxspark-snapshot.stamps.json"])
@pytest.mark.parametrize("folder", ["source", "donor"])
def test_a_pipe_under_a_name_of_ours_does_not_hang(source: Path, tmp_path: Path, folder: str, name: str) -> None:
    os.mkfifo(tmp_path / folder / name)
    alarm(lambda: hybrids.build(tmp_path))


@pytest.mark.parametrize("name", [MANIFEST, JOURNAL, ".dgxspark-donor.plan.json", ".dgxspark-donor.json", ".dgxspark-donor.safetensors"])
@pytest.mark.parametrize("place", ["output", ".output.building"])
def test_a_pipe_in_a_folder_of_ours_does_not_hang(source: Path, tmp_path: Path, place: str, name: str) -> None:
    (tmp_path / place).mkdir()
    if name != JOURNAL:
        inputs = inputs_of("materialize", look_at(source).identity, "org/fp8", hybrids.COMMIT)
        (tmp_path / place / JOURNAL).write_text(json.dumps({"format": 1, "inputs": inputs}))
    os.mkfifo(tmp_path / place / name)
    alarm(lambda: hybrids.build(tmp_path))


def alarm(work: Callable[[], Any]) -> None:
    """Do it, with a failure of any kind, within 10 s."""

    def hangs(*_: object) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(10)
    try:
        work()
    except JobFailure:
        pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("there", ["nothing", "a file"])
def test_a_source_that_is_no_folder(tmp_path: Path, there: str) -> None:
    if there == "a file":
        (tmp_path / "source").write_text("x")
    with pytest.raises(JobFailure) as failure:
        look_at(tmp_path / "source")
    assert [p["class"] for p in failure.value.problems] == ["source_missing"]


def test_everything_that_is_wrong_with_a_source_is_told_at_once(source: Path) -> None:
    snapshot(source)
    shard_of(source).write_bytes(b"<html>")
    (source / "config.json").unlink()
    (source / "gone").symlink_to("nowhere")
    with pytest.raises(JobFailure) as failure:
        read_source(look_at(source))
    assert {"source_incomplete", "text_page", "config_missing"} <= {p["class"] for p in failure.value.problems}


# --- the places ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "class_"),
    [
        ("relative/x", "bad_output"),
        ("/", "bad_output"),
        ("{tmp}/source", "bad_output"),
        ("{tmp}/source/", "bad_output"),
        ("{tmp}/source/inside", "bad_output"),
        ("{tmp}", "bad_output"),
        ("{tmp}/x/../source", "bad_output"),
        ("{tmp}/through/inside", "bad_output"),
        ("{tmp}/donor", "bad_output"),
        ("{tmp}/donor/inside", "bad_output"),
        ("{tmp}/foreign", "output_not_ours"),
        ("{tmp}/file", "output_not_ours"),
        ("{tmp}/a\nb", "bad_output"),
        ("{tmp}/a\0b", "bad_output"),
        ("{tmp}/a\udcffb", "bad_output"),
    ],
)
def test_places_that_are_not_written(source: Path, tmp_path: Path, output: str, class_: str) -> None:
    (tmp_path / "through").symlink_to(source)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_text("precious")
    (tmp_path / "file").write_text("precious")
    before = shards.tree(tmp_path)
    problems = place_problems(str(source), output.format(tmp=tmp_path), str(tmp_path / "donor"))
    assert class_ in [p["class"] for p in problems]
    if output.startswith("{tmp}/") and output.isprintable():
        failed = hybrids.failure(tmp_path, output=output.format(tmp=tmp_path))
        assert class_ in hybrids.classes(failed)
    assert shards.tree(tmp_path) == before


@pytest.mark.parametrize("to", ["source", "elsewhere", "nowhere"])
@pytest.mark.parametrize("place", ["output", ".output.building", "output.previous"])
def test_a_link_is_never_followed(source: Path, tmp_path: Path, place: str, to: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / place).symlink_to(tmp_path / to)
    before = shards.tree(source)
    assert "output_is_link" in hybrids.classes(hybrids.failure(tmp_path))
    assert shards.tree(source) == before and not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("place", [".output.building", "output.previous", "output"])
@pytest.mark.parametrize("manifest", [None, "", "{}", '{"format": 1}', '{"format": "x", "inputs": 1}', "[]"])
def test_a_folder_of_somebody_else_is_never_deleted(source: Path, tmp_path: Path, place: str, manifest: str | None) -> None:
    (tmp_path / place).mkdir()
    (tmp_path / place / "model-00001-of-00001.safetensors").write_text("precious")
    (tmp_path / place / shards.INDEX).write_text("{}")
    if manifest is not None:
        (tmp_path / place / MANIFEST).write_text(manifest)
    before = shards.tree(tmp_path / place)
    failed = hybrids.failure(tmp_path)
    assert hybrids.classes(failed) == ["output_not_ours"] and str(tmp_path / place) in failed.problems[0]["evidence"]
    assert shards.tree(tmp_path / place) == before
    with pytest.raises(JobFailure):
        remove_ours(tmp_path / place)


def test_an_empty_folder_may_become_the_output(source: Path, tmp_path: Path) -> None:
    for place in ("output", ".output.building", "output.previous"):
        (tmp_path / place).mkdir()
    (tmp_path / ".output.building" / "..dgxspark-hybrid.journal.json.abc").write_text("half of a journal")
    assert hybrids.build(tmp_path)["manifest"]["replaced"] == hybrids.WEIGHTS
    assert not (tmp_path / ".output.building").exists()
    assert not any(name.name.startswith("..") for name in (tmp_path / "output").iterdir())


# --- the lock --------------------------------------------------------------------------------------------------------------------


def test_a_second_builder_says_who_holds_the_lock(source: Path, tmp_path: Path) -> None:
    script = f"import fcntl, os, sys; f = open({str(tmp_path / '.output.lock')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    script += "; f.write(str(os.getpid())); f.flush(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdin
        holder.stdout.readline()
        failed = hybrids.failure(tmp_path, lock_wait_s=0.05)
        assert hybrids.classes(failed) == ["output_locked"] and f"process {holder.pid} builds" in failed.problems[0]["evidence"]
        assert not (tmp_path / "output").exists()
        holder.stdin.close()
    assert hybrids.build(tmp_path)["manifest"]["replaced"] == hybrids.WEIGHTS


def test_a_second_builder_waits_and_finds_it_done(source: Path, tmp_path: Path) -> None:
    reports: dict[str, Any] = {}
    started, second_waits = threading.Event(), threading.Event()

    def first(stage: str, _done: float) -> None:
        if stage == "shards":
            started.set()
            assert second_waits.wait(10)

    def run_first() -> None:
        reports["first"] = hybrids.build(tmp_path, seen=first)

    thread = threading.Thread(target=run_first)
    thread.start()
    assert started.wait(10)
    threading.Timer(0.1, second_waits.set).start()
    reports["second"] = hybrids.build(tmp_path, lock_wait_s=20)
    thread.join()
    assert reports["first"]["after"] and reports["second"]["after"] == ""
    assert reports["first"]["manifest"] == reports["second"]["manifest"]


@pytest.mark.parametrize("content", ["", "1", "12345\n", "1" * 20])
def test_what_stands_in_the_lock_file_is_not_trusted(tmp_path: Path, content: str) -> None:
    places = Places(tmp_path / "output")
    places.lock.write_text(content)
    with places.lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(JobFailure) as failure, locked(places, lambda _: None, 0):
            pass
        assert failure.value.problems[0]["class"] == "output_locked"


@pytest.mark.parametrize(
    "make",
    [
        lambda lock: lock.write_text("my precious data\n" * 5),
        lambda lock: lock.write_bytes(b"\xff"),
        lambda lock: lock.write_text("1" * 100),
        lambda lock: lock.write_text("12345\nmore"),
        lambda lock: os.link(lock.parent / "source/config.json", lock),
        lambda lock: ((lock.parent / "empty").write_text(""), os.link(lock.parent / "empty", lock)),
        lambda lock: lock.symlink_to(lock.parent / "source/config.json"),
        lambda lock: lock.symlink_to(lock.parent / "nowhere"),
        lambda lock: os.mkfifo(lock),
        lambda lock: lock.mkdir(),
    ],
)
def test_a_lock_file_of_somebody_else_is_never_written(source: Path, tmp_path: Path, make: Callable[[Path], Any]) -> None:
    lock = Places(tmp_path / "output").lock
    make(lock)
    before, kind = shards.tree(source), lock.lstat()
    content = lock.read_bytes() if lock.is_file() else b""
    failed = hybrids.failure(tmp_path)
    assert hybrids.classes(failed) == ["lock_not_ours"] and str(lock) in failed.problems[0]["evidence"]
    assert shards.tree(source) == before and (lock.lstat().st_ino, lock.lstat().st_mode) == (kind.st_ino, kind.st_mode)
    assert (lock.read_bytes() if lock.is_file() else b"") == content and not (tmp_path / "nowhere").exists()


# --- complete or not -------------------------------------------------------------------------------------------------------------


def is_complete(tmp_path: Path, mode: str = "materialize", revision: str = hybrids.COMMIT) -> str:
    """'' when it is, else why not."""
    source = look_at(tmp_path / "source")
    return complete(tmp_path / "output", inputs_of(mode, source.identity, "org/fp8", revision), source)[1]


@pytest.fixture(params=["materialize", "overlay"])
def built(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    hybrids.build(tmp_path, request.param)
    assert is_complete(tmp_path, request.param) == ""
    return str(request.param)


def edit_manifest(folder: Path, **fields: Any) -> None:
    noted = json.loads((folder / MANIFEST).read_text())
    noted.update(fields)
    (folder / MANIFEST).write_text(json.dumps({name: value for name, value in noted.items() if value is not None}))


def noted(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return value


def forget(folder: Path, name: str) -> None:
    """Drop a file from the manifest and from the disk."""
    files, links = noted(folder)["files"], noted(folder)["links"]
    files.pop(name)
    edit_manifest(folder, files=files, links=[link for link in links if link != name])
    (folder / name).unlink()


def note_more(folder: Path, name: str) -> None:
    (folder / name).write_text("x")
    edit_manifest(folder, files={**noted(folder)["files"], name: hybrid_folder.note_of((folder / name).lstat())})


def link_instead(path: Path) -> None:
    aside = path.parent.parent / f"aside-{path.name}"
    if path.is_dir():
        aside = path.with_name(f"aside-{path.name}")
    path.rename(aside)
    path.symlink_to(aside)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda f: shutil.rmtree(f), "absent"),
        (lambda f: (f / MANIFEST).unlink(), "no sound manifest"),
        (lambda f: (f / MANIFEST).write_text("{"), "no sound manifest"),
        (lambda f: (f / MANIFEST).write_text("[" * 100_000), "no sound manifest"),
        (lambda f: link_instead(f / MANIFEST), "no sound manifest"),
        (lambda f: link_instead(f), "no sound manifest"),
        (lambda f: edit_manifest(f, donor=None), "no sound manifest"),
        (lambda f: edit_manifest(f, replaced="12"), "no sound manifest"),
        (lambda f: edit_manifest(f, files={}), "no sound manifest"),
        (lambda f: edit_manifest(f, files={"a": {"size": -1, "mtime_ns": 0}}), "no sound manifest"),
        (lambda f: edit_manifest(f, format=2), "made of other inputs, or in another mode"),
        (lambda f: edit_manifest(f, inputs="0" * 64), "made of other inputs, or in another mode"),
        (lambda f: (f / shards.INDEX).unlink(), f"{shards.INDEX} is missing"),
        (lambda f: grow(f / shards.INDEX), f"{shards.INDEX} was changed"),
        (lambda f: touch(f / shards.INDEX), f"{shards.INDEX} was changed"),
        (lambda f: link_instead(f / "config.json"), "config.json was changed"),
        (lambda f: edit_manifest(f, files={**noted(f)["files"], "../x": {"size": 1, "mtime_ns": 1}}), "no sound manifest"),
        (lambda f: edit_manifest(f, files={**noted(f)["files"], "/etc/passwd": {"size": 1, "mtime_ns": 1}}), "no sound manifest"),
        (lambda f: forget(f, "tokenizer.json"), "the manifest lacks tokenizer.json"),
        (lambda f: forget(f, shard_of(f).name), f"the manifest lacks {'model-00001-of-00003.safetensors'}"),
        (lambda f: forget(f, shards.INDEX), f"the manifest lacks {shards.INDEX}"),
        (lambda f: note_more(f, "more.txt"), "the manifest lists a stray file, more.txt"),
        (lambda f: (f / "zzz.safetensors").write_bytes(b"x"), "zzz.safetensors is not part of it, and a loader would read it"),
        (lambda f: edit_manifest(f, links=["config.json"]), "the manifest has other links than the mode makes"),
        (lambda f: edit_manifest(f, mode={"overlay": "materialize"}.get(noted(f)["mode"], "overlay")), "the manifest contradicts itself"),
    ],
)
def test_an_output_that_is_not_as_noted_is_made_again(tmp_path: Path, built: str, fault: Callable[[Path], Any], why: str) -> None:
    fault(tmp_path / "output")
    assert is_complete(tmp_path, built) == why
    if not (tmp_path / "output").is_symlink() and (is_ours(tmp_path / "output") or why == "absent"):
        report = hybrids.build(tmp_path, built)
        assert report["before"] == f"complete: no ({why})\n" and is_complete(tmp_path, built) == ""


def test_another_donor_or_mode_is_another_output(tmp_path: Path, built: str) -> None:
    why = "made of other inputs, or in another mode"
    assert is_complete(tmp_path, built, "0" * 40) == why
    assert is_complete(tmp_path, "overlay" if built == "materialize" else "materialize") == why
    touch(shard_of(tmp_path / "source"))
    assert is_complete(tmp_path, built) == why


def test_links_must_be_the_sources_own_files(source: Path, tmp_path: Path) -> None:
    snapshot(source)
    hybrids.build(tmp_path, "overlay")
    assert is_complete(tmp_path, "overlay") == ""
    # Brought again: equal content in a new file. What the output links to is held twice on the disk from now on.
    path = source / "model_extra_tensors.safetensors"
    info, data = path.stat(), path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert is_complete(tmp_path, "overlay") == "model_extra_tensors.safetensors is no longer the same file as in the source"
    hybrids.build(tmp_path, "overlay")
    assert is_complete(tmp_path, "overlay") == ""


def test_a_complete_output_needs_neither_donor_nor_time(tmp_path: Path, built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(tmp_path / "donor")
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(str(path)) or real(path, *a, **k))
    assert is_complete(tmp_path, built) == ""
    report = hybrids.build(tmp_path, built)
    assert (report["before"], report["after"], report["read"], report["written"]) == ("", "", 0, 0) and report["seconds"] < 0.2
    assert not any(path.endswith(".safetensors") for path in opened)


# --- building and publishing -----------------------------------------------------------------------------------------------------


def manifest(*files: str, **other: Any) -> str:
    return json.dumps({"format": 1, "inputs": "x", "files": {name: {} for name in files}, **other})


def test_what_was_published_before_is_kept_once(tmp_path: Path) -> None:
    places = Places(tmp_path / "output")
    for number in range(3):
        building = Building(places, f"inputs {number}")
        building.open()
        (building.folder / "a").write_text(str(number))
        (building.folder / ".dgxspark-donor.safetensors").write_text("donor")
        (building.folder / MANIFEST).write_text(manifest("a"))
        building.publish()
        assert sorted(p.name for p in places.output.iterdir()) == [MANIFEST, "a"]
    assert ((places.output / "a").read_text(), (places.previous / "a").read_text()) == ("2", "1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["output", "output.previous"]


def test_a_building_folder_is_taken_up_only_for_the_same_inputs(tmp_path: Path) -> None:
    places = Places(tmp_path / "output")
    first = Building(places, "one")
    first.open()
    (first.folder / "a").write_text("a")
    (first.folder / "b").write_text("b")
    first.files = {"a": hybrid_folder.note_of((first.folder / "a").lstat()), "b": {"size": 1, "mtime_ns": 5}}
    first.donor = "d"
    first.save()
    again = Building(places, "one")
    again.open()
    assert (again.has("a"), again.has("b"), again.has("c"), again.donor) == (True, False, False, "d")
    (first.folder / "sub").mkdir()
    (first.folder / "sub" / "x").write_text("x")
    (first.folder / "link").symlink_to(tmp_path)
    other = Building(places, "two")
    other.open()
    assert not other.has("a") and other.donor == "" and sorted(p.name for p in other.folder.iterdir()) == [JOURNAL]
    assert tmp_path.is_dir()


def test_a_deletion_that_is_interrupted_can_be_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "output.previous"
    folder.mkdir()
    for name in (MANIFEST, "a", "z"):
        (folder / name).write_text(manifest("a", "z", "gone"))
    real, calls = Path.unlink, []

    def interrupted(self: Path, missing_ok: bool = False) -> None:
        calls.append(self.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove_ours(folder)
    assert is_ours(folder) and MANIFEST not in calls
    remove_ours(folder)
    assert not folder.exists() and calls[-1] == MANIFEST


@pytest.mark.parametrize("stranger", ["notes.txt", "my_lora/adapter.safetensors", "sub/more", "zzz.safetensors"])
def test_what_a_manifest_does_not_list_is_never_deleted(source: Path, tmp_path: Path, stranger: str) -> None:
    (source / "sub").mkdir()
    (source / "sub" / "a").write_text("a")
    hybrids.build(tmp_path)
    path = tmp_path / "output" / stranger
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    (tmp_path / "output" / ".dgxspark-pristine").mkdir()  # of another module of this collection
    grow(source / "README.md")
    hybrids.build(tmp_path)
    previous = tmp_path / "output.previous"
    assert (previous / stranger).read_text() == "precious"
    grow(source / "README.md")
    before = shards.tree(tmp_path / "output")
    failed = hybrids.failure(tmp_path)
    assert hybrids.classes(failed) == ["previous_not_ours"] and stranger.partition("/")[0] in failed.problems[0]["evidence"]
    assert (previous / stranger).read_text() == "precious" and shards.tree(tmp_path / "output") == before
    assert not (tmp_path / ".output.building").exists()
    with pytest.raises(JobFailure):
        remove_ours(previous)
    (previous / stranger).rename(tmp_path / "saved")
    if stranger.startswith("my"):
        (previous / "my_lora").rmdir()
    hybrids.build(tmp_path)


def test_a_hybrid_that_is_called_like_a_previous_one_is_not_deleted(source: Path, tmp_path: Path) -> None:
    hybrids.build(tmp_path)
    hybrids.build(tmp_path, "overlay", output=str(tmp_path / "output.previous"))
    before = shards.tree(tmp_path / "output.previous")
    grow(source / "README.md")
    failed = hybrids.failure(tmp_path)
    assert hybrids.classes(failed) == ["previous_not_ours"] and "'output.previous'" in failed.problems[0]["evidence"]
    assert shards.tree(tmp_path / "output.previous") == before
    assert kept_problems(Places(tmp_path / "nothing")) == []


def test_an_output_of_nothing_but_temporaries_is_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "..dgxspark-hybrid.json.abc").write_text("half")
    assert hybrids.build(tmp_path)["after"] and hybrids.build(tmp_path)["after"] == ""
    assert not (tmp_path / "output.previous").exists() and not any(p.name.startswith("..") for p in (tmp_path / "output").iterdir())


def test_links_that_were_planted_are_not_written_through(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "sub").mkdir()
    (source / "sub" / "README.md").write_text("new")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "README.md").write_text("precious")
    with monkeypatch.context() as patch:
        patch.setattr(hybrid_folder.Building, "publish", lambda _self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            hybrids.build(tmp_path)
    building = tmp_path / ".output.building"
    shutil.rmtree(building / "sub")
    (building / "sub").symlink_to(victim)
    (building / "config.json").unlink()
    (building / "config.json").symlink_to(victim / "README.md")
    hybrids.build(tmp_path)
    assert (victim / "README.md").read_text() == "precious" and sorted(p.name for p in victim.iterdir()) == ["README.md"]
    assert not (tmp_path / "output" / "sub").is_symlink() and (tmp_path / "output" / "sub" / "README.md").read_text() == "new"
    (tmp_path / "output" / "sub").rename(tmp_path / "aside")
    (tmp_path / "output" / "sub").symlink_to(tmp_path / "aside")
    assert is_complete(tmp_path) == "sub is a link"


@pytest.mark.parametrize(
    ("number", "class_"),
    [
        (errno.ENAMETOOLONG, "bad_output"),
        (errno.EFBIG, "file_too_big"),
        (errno.ENOSPC, "disk_full"),
        (errno.EROFS, "dest_not_writable"),
        (errno.EIO, "dest_failed"),
    ],
)
def test_errors_of_writing_by_what_they_mean(tmp_path: Path, number: int, class_: str) -> None:
    found = output_failure(OSError(number, os.strerror(number), "x"), tmp_path).problems
    assert [p["class"] for p in found] == [class_] and found[0]["evidence"].startswith("x: ")


def test_a_name_that_is_too_long_is_told(source: Path, tmp_path: Path) -> None:
    assert hybrids.classes(hybrids.failure(tmp_path, output=str(tmp_path / ("x" * 250)))) == ["bad_output"]


def test_a_manifest_with_odd_fields_is_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / MANIFEST).write_text(manifest())
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize(("missing", "reserve", "fits"), [(0, 0, True), (10**18, 0, False), (0, 10**18, False)])
def test_space_is_told_as_a_sum(tmp_path: Path, missing: int, reserve: int, fits: bool) -> None:
    found = space_problems(Places(tmp_path / "a" / "b"), missing, reserve)
    assert (found == []) == fits
    if not fits:
        assert found[0]["class"] == "disk_full" and "that is 1000000000.00 GB; free are " in found[0]["evidence"]


def test_an_older_hybrid_is_named_when_the_disk_is_full(tmp_path: Path) -> None:
    places = Places(tmp_path / "output")
    places.previous.mkdir()
    (places.previous / MANIFEST).write_text(manifest())
    assert str(places.previous) in space_problems(places, 10**18)[0]["remedy"]
