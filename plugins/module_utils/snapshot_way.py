# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Which snapshot is asked for, what pins it, and the way to its files: the hub, a cache of it, a folder, a web server, another node."""

from __future__ import annotations

import hashlib
import os
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from . import hf_cache
from .jobs import JobFailure
from .problems import Problem, problem
from .snapshot_files import Request, Wanted, fixed, ignored, listing_problems, parse_manifest, patterns
from .snapshot_hub import HubSource, open_hub, read_secret
from .sources import (
    HEX40,
    HEX64,
    MANIFEST,
    SUMS,
    FolderSource,
    Promise,
    Say,
    Source,
    open_source,
    parse_sums,
    read_list,
    source_kind,
    with_retries,
)

# Folders that hold other things than one snapshot: its files would lie among them, and be taken for left over.
SYSTEM = {
    *("/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/lost+found", "/media", "/mnt", "/opt", "/proc", "/root"),
    *("/run", "/sbin", "/snap", "/srv", "/sys", "/tmp", "/usr", "/var", "/boot/efi", "/dev/shm", "/run/lock", "/run/user", "/root/.cache"),
    *("/usr/bin", "/usr/include", "/usr/lib", "/usr/libexec", "/usr/local", "/usr/local/bin", "/usr/local/lib", "/usr/local/share"),
    *("/usr/sbin", "/usr/share", "/usr/src", "/var/backups", "/var/cache", "/var/lib", "/var/local", "/var/log", "/var/mail", "/var/opt"),
    *("/var/spool", "/var/tmp", "/var/lib/docker", "/var/lib/dpkg", "/var/lib/systemd"),
}

# --- what is asked for -----------------------------------------------------------------------------------------------------------


def kind_of(source: str, repo: str) -> str:
    """hub, cache (of the hub's own tools), folder, url, or '' for anything else."""
    kind = source_kind(source)
    return "cache" if kind == "folder" and hf_cache.find(source, repo) else kind


def address_problems(what: str, address: str) -> list[Problem]:
    """An http address that names a host and nothing that does not belong into logs."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in {"http", "https"} or parts.username or parts.password or parts.query or parts.fragment or not parts.hostname:
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        remedy = "give an http:// or https:// address without credentials, as http://host/path; a token has a parameter of its own"
        return [problem("bad_source", f"{what} {shown}: no http address, no host, or user, password, query or fragment in it", remedy)]
    return []


def source_problems(source: str) -> list[Problem]:
    """What is wrong with the source as text."""
    kind = source_kind(source)
    if not kind:
        remedy = "give hub, an absolute folder on the node, or an http:// or https:// address"
        return [problem("bad_source", f"source {source!r} is neither the hub nor a folder nor an address", remedy)]
    return address_problems("source", source) if kind == "url" else []


def repo_problems(repo: str) -> list[Problem]:
    """A name that the hub's client would refuse: as validate_repo_id of huggingface_hub, which also takes old names without an owner."""
    part = r"\b[\w\-.]{1,96}\b"
    if re.fullmatch(f"({part}/)?{part}", repo) and "--" not in repo and ".." not in repo and not repo.endswith(".git"):
        return []
    remedy = "give it as OWNER/NAME: letters, digits, '-', '_', '.', at most 96 each, neither '--' nor '..', not ending in '.git'"
    return [problem("bad_repo", f"repo {repo!r} is not a repository's name", remedy)]


def make_request(p: Mapping[str, Any]) -> tuple[Request, list[Problem]]:
    """What a module's parameters ask for, and what is wrong with its pins."""
    kind, asked = kind_of(p["source"], p["repo"]), str(p["revision"]).strip().removeprefix("sha256:")
    if HEX64.fullmatch(asked.lower()) or HEX40.fullmatch(asked.lower()):
        asked = asked.lower()
    request = Request(p["repo"], asked, ignore_patterns=patterns(p.get("ignore_patterns") or []))
    request.manifest_sha256 = str(p.get("manifest_sha256") or "").strip().lower().removeprefix("sha256:")
    if request.manifest_sha256:
        return request, _manifest_pin(request, kind)
    if kind in {"hub", "cache"}:
        return request, _commit_pin(request, str(p.get("sums_sha256") or ""), kind)
    request.sums_sha256, found = pinned(asked, str(p.get("sums_sha256") or ""), p["source"])
    if kind == "folder" and not os.path.isdir(p["source"]) and [f["class"] for f in found] == ["no_pin"]:
        # It may be a cache of the hub's own tools, which needs no other pin: that it is not there is what is wrong.
        remedy = "mount or make the folder on the node (a removable disk or network share may be gone), then run again"
        found = [problem("source_vanished", f"{p['source']} is not a folder on this node", remedy)]
    return request, found


def _manifest_pin(request: Request, kind: str) -> list[Problem]:
    if not HEX64.fullmatch(request.manifest_sha256):
        remedy = "give the SHA-256 of the other node's manifest, as its share tells it"
        return [problem("bad_pin", f"manifest_sha256 {request.manifest_sha256!r} is not 64 hexadecimal digits", remedy)]
    if kind not in {"url", "folder"}:
        evidence = f"manifest_sha256 pins what another node shares, and the source is a {kind}"
        return [problem("bad_pin", evidence, "leave manifest_sha256 empty, or give the share's address as the source")]
    return []


def _commit_pin(request: Request, sums_sha256: str, kind: str) -> list[Problem]:
    if sums_sha256.strip() or HEX64.fullmatch(request.revision):
        evidence = f"a SHA-256 of {SUMS} pins a folder or mirror, and the source is the {kind}"
        return [problem("bad_pin", evidence, "give the commit as the revision, and leave sums_sha256 (checkpoint_sums_sha256) empty")]
    if not re.fullmatch(r"[\w][\w./-]{0,199}", request.revision) or ".." in request.revision:
        return [problem("bad_pin", f"revision {request.revision!r} is not the name of one", "give a commit of 40 hexadecimal digits")]
    return []


def pinned(revision: str, sums_sha256: str, source: str) -> tuple[str, list[Problem]]:
    """The SHA-256 that the source's SHA256SUMS must have: from sums_sha256, or from a revision that is one."""
    wanted = sums_sha256.strip().lower().removeprefix("sha256:")
    named = revision.strip().lower().removeprefix("sha256:")
    if wanted and not HEX64.fullmatch(wanted):
        evidence = f"sums_sha256 {sums_sha256!r} is not 64 hexadecimal digits"
        return "", [problem("bad_pin", evidence, f"give the output of: sha256sum {SUMS}")]
    if HEX64.fullmatch(named):
        if wanted and wanted != named:
            evidence = f"revision pins {named}, sums_sha256 pins {wanted}"
            return "", [problem("bad_pin", evidence, "leave sums_sha256 empty, or make both the same")]
        return named, []
    if wanted:
        return wanted, []
    folder = source if source_kind(source) == "folder" else "FOLDER"
    if folder == source and (cached := hf_cache.repositories(source)):
        evidence = f"{source} is a cache of the hub's tools, without this repository; it has: {', '.join(cached)}"
        return "", [problem("not_in_cache", evidence, "correct the repository's name, or bring it there with: hf download REPO")]
    return "", [
        problem(
            "no_pin",
            f"revision {revision!r} does not pin the contents of {source}",
            f"make a pin where the files are: cd {folder} && sha256sum * > {SUMS} && sha256sum {SUMS}"
            " ; give the digits it prints as sums_sha256 (role variable checkpoint_sums_sha256)",
        )
    ]


def place_problems(source: str, dest: str) -> list[Problem]:
    """A destination that must not be written: relative, or overlapping the source."""
    real = "/" + os.path.realpath(dest).lstrip("/")
    if dest.startswith("/") and (real in SYSTEM or real.startswith(("/proc/", "/sys/")) or os.path.dirname(real) == "/home"):
        evidence = f"dest {dest!r} is {real}, a folder of the system or somebody's home"
        return [problem("bad_dest", evidence, "give the snapshot a folder of its own, which may lie below that one")]
    if not dest.startswith("/"):
        return [problem("bad_dest", f"dest {dest!r} is not an absolute folder", "give an absolute path of a folder of its own")]
    if source_kind(source) == "folder":
        a, b = os.path.realpath(source), os.path.realpath(dest)
        if a == b or a.startswith(b.rstrip("/") + "/") or b.startswith(a.rstrip("/") + "/"):
            evidence = f"dest {b} and source {a} are the same folder, or one is inside the other"
            return [problem("bad_dest", evidence, "the source is never written to: give dest a folder of its own")]
    return []


def branch_note(request: Request, revision: str) -> str:
    """The warning about a name that may mean something else tomorrow; '' for a pin."""
    if fixed(request) or not revision:
        return ""
    return (
        f"revision {request.revision!r} is a branch or tag; it was {revision} when this node first asked, and stays so here."
        " Another node may get something else: give the commit as the revision"
    )


# --- the way to the files --------------------------------------------------------------------------------------------------------


class Way:
    """How the files of a request can be reached. Nothing is opened before it is needed. Close it, or use it as a context.

    spec: repo, source, and for the hub `hub` (of hub_spec()); source_token_path, or source_token.
    patient: try again what may pass; make: make the hub's client when it is absent; hub_token: instead of the file's.
    """

    def __init__(
        self,
        request: Request,
        spec: Mapping[str, Any],
        say: Say,
        *,
        patient: bool = True,
        make: bool = True,
        hub_token: str = "",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._request, self._spec, self._say, self._sleep = request, spec, say, sleep
        self._patient, self._make, self._token = patient, make, hub_token
        self.kind = kind_of(spec["source"], spec["repo"])
        self._open: Source | None = None
        self._close = ExitStack()

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    @property
    def notes(self) -> list[str]:
        """What went otherwise than meant."""
        return list(self._open.notes) if isinstance(self._open, HubSource) else []

    def source(self, revision: str = "") -> Source:
        """Opened. revision: what the request's was resolved to on this node before."""
        if self._open is None:
            self._open = self._opened(revision)
        return self._open

    def size(self, name: str) -> int | None:
        """Bytes of a file as the source tells them, tried again where that may help."""
        source = self.source()
        return with_retries(partial(source.size, name), source.pauses, self._say, self._sleep)

    def _opened(self, revision: str) -> Source:
        spec, request = self._spec, self._request
        if self.kind == "hub":
            commit = revision if HEX40.fullmatch(revision) else ""
            hub = open_hub(
                dict(spec["hub"]),
                self._say,
                patient=self._patient,
                make=self._make,
                token=self._token,
                commit=commit,
                sleep=self._sleep,
            )
            return self._close.enter_context(hub)
        if self.kind == "cache":
            cache = hf_cache.find(spec["source"], spec["repo"])
            assert cache
            commit = hf_cache.resolve(cache, spec["source"], spec["repo"], revision or request.revision)
            return FolderSource(cache / "snapshots" / commit)
        token = spec.get("source_token") or read_secret(str(spec.get("source_token_path") or ""))
        return open_source(spec["source"], token, self._patient)

    def wanted(self, revision: str = "") -> Wanted:
        """The files that are asked for. JobFailure with all that is wrong with the list."""
        spec, request = self._spec, self._request
        source = self.source(revision)
        where = spec["source"]
        found: list[Problem] = []
        if self.kind == "hub":
            assert isinstance(source, HubSource)
            where = f"{request.repo}@{source.commit}"
            if HEX40.fullmatch(request.revision) and source.commit != request.revision:
                evidence = f"asked for {request.revision} of {request.repo}, the hub answers with {source.commit}"
                found = [problem("wrong_revision", evidence, "check the endpoint (checkpoint_endpoint): it is not a faithful mirror")]
            wanted = Wanted(source.commit, "", source.files)
        elif self.kind == "cache":
            wanted = self._of_cache(source)
        elif request.manifest_sha256:
            wanted, found = self._of_manifest(source)
        else:
            wanted = self._of_sums(source)
        wanted.ignore_patterns = request.ignore_patterns
        if not wanted.manifest:  # a manifest lists what was left after that
            wanted.files = {n: p for n, p in wanted.files.items() if not ignored(n, request.ignore_patterns)}
        if found := [*found, *listing_problems(wanted.files, where)]:
            raise JobFailure(*found)
        return wanted

    def _of_cache(self, source: Source) -> Wanted:
        snapshot = Path(source.folder) if isinstance(source, FolderSource) else Path()
        ignore = self._request.ignore_patterns
        files = hf_cache.promises(snapshot.parent.parent, snapshot.name, source.names(), lambda name: not ignored(name, ignore))
        return Wanted(snapshot.name, "", files)

    def _list(self, source: Source, name: str) -> bytes:
        return with_retries(partial(read_list, source, name), source.pauses, self._say, self._sleep)

    def _of_sums(self, source: Source) -> Wanted:
        request, shown = self._request, self._spec["source"]
        data = self._list(source, SUMS)
        have = hashlib.sha256(data).hexdigest()
        if have != request.sums_sha256:
            remedy = f"if the source is right, pin what it has now: {have}; else give the source that the pin was made from"
            evidence = f"{SUMS} of {shown} has SHA-256 {have}, pinned is {request.sums_sha256}"
            raise JobFailure(problem("wrong_revision", evidence, remedy))
        try:
            sums, found = parse_sums(data.decode())
        except UnicodeDecodeError as error:
            remedy = f"write it with: sha256sum * > {SUMS}"
            raise JobFailure(problem("bad_sums_line", f"{SUMS} of {shown} is not UTF-8 text ({error})", remedy)) from error
        if found:
            raise JobFailure(*found)
        return Wanted(request.revision, request.sums_sha256, {name: Promise(None, sha256) for name, sha256 in sums.items()})

    def _of_manifest(self, source: Source) -> tuple[Wanted, list[Problem]]:
        """Another node's manifest takes the place of SHA256SUMS."""
        request, shown = self._request, self._spec["source"]
        raw = self._list(source, MANIFEST)
        have = hashlib.sha256(raw).hexdigest()
        again = "share the snapshot of the other node again, and use what that says"
        if have != request.manifest_sha256:
            evidence = f"{MANIFEST} of {shown} has SHA-256 {have}, pinned is {request.manifest_sha256}"
            raise JobFailure(problem("wrong_revision", evidence, again))
        manifest = parse_manifest(raw)
        if manifest is None:
            evidence = f"{MANIFEST} of {shown} is not what this release of the collection writes"
            raise JobFailure(problem("bad_manifest", evidence, "use the same release of the collection for both nodes"))
        pairs = [("repo", manifest.repo, request.repo), ("ignore_patterns", manifest.ignore_patterns, request.ignore_patterns)]
        if HEX40.fullmatch(request.revision) or HEX64.fullmatch(request.revision):
            pairs.append(("revision", manifest.revision, request.revision))
        found = [
            problem("wrong_revision", f"{name} of the snapshot that {shown} shares is {theirs!r}, wanted is {mine!r}", again)
            for name, theirs, mine in pairs
            if theirs != mine
        ]
        return Wanted(manifest.revision, manifest.sums_sha256, manifest.promises(), manifest=raw), found
