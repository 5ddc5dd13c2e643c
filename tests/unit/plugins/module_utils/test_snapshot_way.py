# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_files import Request
from ansible_collections.dgxspark.vllm.plugins.module_utils.snapshot_way import (
    address_problems,
    branch_note,
    kind_of,
    make_request,
    pinned,
    place_problems,
    repo_problems,
    source_problems,
)
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshots import REPO, cache

H = "ab" * 32
G = "cd" * 32
C = "a" * 40


@pytest.mark.parametrize(
    ("revision", "sums", "pin", "kind"),
    [
        (H, "", H, None),
        (f"sha256:{H}", "", H, None),
        (f" {H.upper()} ", "", H, None),
        ("a" * 40, H, H, None),
        ("main", f"sha256:{H}", H, None),
        (H, H, H, None),
        (H, G, "", "bad_pin"),
        ("a" * 40, "123", "", "bad_pin"),
        ("a" * 40, "", "", "no_pin"),
        ("main", "", "", "no_pin"),
        ("", "", "", "no_pin"),
    ],
)
def test_pins(revision: str, sums: str, pin: str, kind: str | None) -> None:
    value, found = pinned(revision, sums, "/mnt/m")
    assert (value, [p["class"] for p in found]) == (pin, [kind] if kind else [])
    if kind == "no_pin":
        assert "cd /mnt/m && sha256sum * > SHA256SUMS && sha256sum SHA256SUMS" in found[0]["remedy"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("/mnt/models", None),
        ("http://192.0.2.1:8080/m", None),
        ("https://host/m/", None),
        ("hub", None),
        ("models", "bad_source"),
        ("ftp://host/m", "bad_source"),
        ("", "bad_source"),
        ("~/models", "bad_source"),
        ("http://user:secret@host/m", "bad_source"),
        ("http://host/m?token=secret", "bad_source"),
        ("http://host/m#x", "bad_source"),
        ("http:///m", "bad_source"),
    ],
)
def test_sources(source: str, kind: str | None) -> None:
    found = source_problems(source)
    assert [p["class"] for p in found] == ([kind] if kind else [])
    assert "secret" not in str(found)


def test_the_destination_and_the_source_must_not_overlap(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "link").symlink_to(inner)
    a, b, link = str(tmp_path / "a"), str(inner), str(tmp_path / "link")
    for source, dest in [(a, a), (a, b), (b, a), (b, link), (link, b + "/new"), (a, "/"), (a, "relative")]:
        assert [p["class"] for p in place_problems(source, dest)] == ["bad_dest"], (source, dest)
    assert place_problems(a, a + "b") == [] == place_problems("http://host/a", b)


@pytest.mark.parametrize("repo", ["Qwen/Qwen3.5-122B-A10B", "a/b", "o_rg/n.a-m_e", "gpt2", "_org/name_", "org/" + "a" * 96])
def test_names_of_repositories(repo: str) -> None:
    assert repo_problems(repo) == []


@settings(max_examples=300, deadline=None)
@given(st.text("aZ0-_./", min_size=1, max_size=9) | st.text("a", min_size=94, max_size=98) | st.sampled_from(["a/b.git", "a.git", "a\n"]))
def test_names_of_repositories_are_those_of_the_hubs_client(repo: str) -> None:
    try:
        validate_repo_id(repo)
        valid = True
    except HFValidationError:
        valid = False
    assert (repo_problems(repo) == []) == valid


@pytest.mark.parametrize(
    "dest",
    ["/", "//", "/.", "/srv/..", "/root", "/home", "/home/", "/home/someone", "/usr", "/etc/", "/var", "/var/lib", "/opt", "/srv", "/boot"]
    + ["/proc", "/proc/self", "/sys", "/sys/x", "/dev", "/tmp", "/tmp/../tmp", "/mnt", "/media", "/run", "/bin", "/usr/lib", "x", "", "~"],
)
def test_folders_of_the_system_are_no_destination(dest: str) -> None:
    assert [p["class"] for p in place_problems("hub", dest)] == ["bad_dest"]


@pytest.mark.parametrize(
    "dest", ["/home/a/models", "/srv/models", "/opt/x", "/var/lib/x", "/mnt/disk", "/tmp/x", "/dev/shm/x", "/data", "/root/m"]
)
def test_folders_below_them_are(dest: str) -> None:
    assert place_problems("hub", dest) == []


@pytest.mark.parametrize("repo", ["", "a/b/c", "../x", "a/..", "a/.b", "a--b/c", "a/b c", "a/b?x", "/a", "a/", "http://h/a/b", "a/b\n"])
def test_what_is_no_name_of_a_repository(repo: str) -> None:
    assert [p["class"] for p in repo_problems(repo)] == ["bad_repo"]


@pytest.mark.parametrize("address", ["hub.example", "ftp://h", "http://u:geheim@h", "http://h?token=geheim", "file:///x", ""])
def test_addresses_of_a_hub(address: str) -> None:
    found = address_problems("endpoint", address)
    assert [p["class"] for p in found] == ["bad_source"] and "geheim" not in str(found)
    assert address_problems("endpoint", "https://hub.example:8443/x") == []


def test_kinds_of_sources(tmp_path: Path) -> None:
    cache(tmp_path, C, {"config.json": b"{}"})
    (tmp_path / "plain").mkdir()
    table = {
        "hub": "hub",
        "http://h/x": "url",
        str(tmp_path): "cache",
        str(tmp_path / "models--org--name"): "cache",
        str(tmp_path / "plain"): "folder",
    }
    assert {source: kind_of(source, REPO) for source in table} == table
    assert kind_of(str(tmp_path), "org/other") == "folder" and kind_of("x", REPO) == ""


@pytest.mark.parametrize(
    ("source", "more", "expected"),
    [
        ("hub", {"revision": C}, (C, "", "", None)),
        ("hub", {"revision": f" {C.upper()} "}, (C, "", "", None)),
        ("hub", {"revision": "main"}, ("main", "", "", None)),
        ("hub", {"revision": "refs/pr/5"}, ("refs/pr/5", "", "", None)),
        ("hub", {"revision": H}, (H, "", "", "bad_pin")),  # of a list of files, which the hub has not
        ("hub", {"revision": C, "sums_sha256": H}, (C, "", "", "bad_pin")),
        ("hub", {"revision": C, "manifest_sha256": H}, (C, "", H, "bad_pin")),
        ("hub", {"revision": ""}, ("", "", "", "bad_pin")),
        ("hub", {"revision": "a b"}, ("a b", "", "", "bad_pin")),
        ("hub", {"revision": "../x"}, ("../x", "", "", "bad_pin")),
        ("http://h/m", {"revision": f"sha256:{H}"}, (H, H, "", None)),
        ("http://h/m", {"revision": C, "sums_sha256": H}, (C, H, "", None)),
        ("http://h/m", {"revision": C}, (C, "", "", "no_pin")),
        ("http://h/m", {"revision": C, "manifest_sha256": f"sha256:{G.upper()}"}, (C, "", G, None)),
        ("http://h/m", {"revision": "main", "manifest_sha256": G}, ("main", "", G, None)),
        ("http://h/m", {"revision": C, "manifest_sha256": "12"}, (C, "", "12", "bad_pin")),
        ("/nowhere", {"revision": C}, (C, "", "", "source_vanished")),  # it may be a cache, which needs no other pin
        ("/usr", {"revision": C}, (C, "", "", "no_pin")),
        ("/nowhere", {"revision": C, "sums_sha256": H}, (C, H, "", None)),
    ],
)
def test_requests(source: str, more: dict[str, Any], expected: tuple[str, str, str, str | None]) -> None:
    request, found = make_request({"repo": REPO, "source": source, "ignore_patterns": ["b", " a ", "b", ""], **more})
    told = (request.revision, request.sums_sha256, request.manifest_sha256, found[0]["class"] if found else None)
    assert told == expected and request.ignore_patterns == ["a", "b"]


def test_only_a_name_is_warned_about() -> None:
    assert C in branch_note(Request(REPO, "main"), C) and "main" in branch_note(Request(REPO, "main"), C)
    for request in (Request(REPO, C), Request(REPO, H), Request(REPO, "main", H)):
        assert branch_note(request, C) == ""
