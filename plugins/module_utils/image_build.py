# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""An image that is what its inputs say: their digest, the build as a job, and what a build's log means.

An image is known by the label that holds the digest of its inputs, never by its name or id: ids differ between nodes and stores for
the same contents.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from .files import file_sha256, read_json, stamp, write_json
from .jobs import JobFailure, Progress, digest, plain, work_on
from .log_classifier import diagnose
from .problems import Problem, problem

LABEL = "dgxspark.vllm.inputs"
# An intermediate stage that carries this label with the profile's name is removed once the image is built.
LEFTOVER_LABEL = "dgxspark.vllm.leftover"
RESERVE_BYTES = 2 << 30
COMPRESSED = (".whl", ".gz", ".tgz", ".xz", ".zst", ".bz2", ".zip")
GIB_PER_COMPILER = 8  # nvcc on heavily templated kernels needs 3 to 8 GiB for each job


# --- inputs ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One file of the build context. content: text given in the playbook, instead of a file on the node."""

    dest: str
    sha256: str
    size: int
    src: str = ""
    content: str = ""
    executable: bool = False


class DigestCache:
    """SHA-256 by path, size and time, so that gigabytes of wheels are read once and not in every run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        noted = read_json(path)
        self._noted: dict[str, Any] = noted if isinstance(noted, dict) else {}
        self._dirty = False

    def sha256(self, path: Path) -> str:
        """Of the file's bytes as long as its size and time are as noted."""
        now = stamp(path)
        entry = self._noted.get(str(path))
        if isinstance(entry, list) and entry[:2] == now and len(entry) == 3:
            return str(entry[2])
        value = file_sha256(path)
        self._noted[str(path)] = [*now, value]
        self._dirty = True
        return value

    def save(self) -> None:
        """Write what was learned; forget files that are gone."""
        if self._dirty:
            write_json(self._path, {p: e for p, e in self._noted.items() if Path(p).exists()}, mode=0o600)
            self._dirty = False


def list_context(items: Iterable[dict[str, Any]], sha256: Callable[[Path], str]) -> tuple[list[Entry], list[Problem]]:
    """Every file of the context, sorted, and what is wrong with the items. Links to files are read as files."""
    entries: dict[str, Entry] = {}
    found: list[Problem] = []
    for item in items:
        dest, src, content = str(item.get("dest") or ""), str(item.get("src") or ""), item.get("content")
        if why := _bad_dest(dest):
            found.append(problem("bad_context", f"context item {dest!r} {why}", "give dest as a relative path like wheels or conf/a.txt"))
            continue
        if content is not None:
            data = str(content).encode()
            new = [Entry(dest, digest_bytes(data), len(data), content=str(content))]
        elif not src.startswith("/"):
            evidence = f"context item {dest}: src {src!r} is not an absolute path"
            remedy = "give the path on the node (role variables sm121_image_base, sm121_image_wheelhouse)"
            found.append(problem("context_missing", evidence, remedy))
            continue
        else:
            new, wrong = _from_disk(Path(src), dest, sha256)
            found += wrong
        for entry in new:
            if entry.dest in entries:
                found.append(problem("bad_context", f"{entry.dest} comes from two context items", "give each its own dest"))
            entries[entry.dest] = entry
    return [entries[name] for name in sorted(entries)], found


def _bad_dest(dest: str) -> str:
    parts = dest.split("/")
    if not dest or dest.startswith("/") or any(p in {"", ".", ".."} for p in parts):
        return "is not a relative path inside the context"
    return "is a name that docker build itself uses" if dest in {"Dockerfile", ".dockerignore"} else ""


def _from_disk(src: Path, dest: str, sha256: Callable[[Path], str]) -> tuple[list[Entry], list[Problem]]:
    entries: list[Entry] = []
    found: list[Problem] = []
    if src.is_dir():
        files = [(Path(folder) / name) for folder, _, names in os.walk(src) for name in names]
        links = [Path(folder) / name for folder, names, _ in os.walk(src) for name in names if (Path(folder) / name).is_symlink()]
        found += [problem("bad_context", f"{p} is a link to a folder", "put the files themselves there") for p in links]
        if not files:
            found.append(problem("context_missing", f"{src} (for {dest}) holds no file", "fill it, then run again"))
        pairs = [(file, f"{dest}/{file.relative_to(src).as_posix()}") for file in files]
    else:
        pairs = [(src, dest)]
    for file, name in pairs:
        try:
            if not file.is_file():
                what = "is a broken link" if file.is_symlink() else ("is not a regular file" if file.exists() else "does not exist")
                remedy = "put it on the node, or mend the path (role variables sm121_image_base, sm121_image_wheelhouse)"
                found.append(problem("context_missing", f"{file} (for {name}) {what}", remedy))
                continue
            info = file.stat()
            entries.append(Entry(name, sha256(file), info.st_size, src=str(file), executable=bool(info.st_mode & 0o100)))
        except OSError as error:
            found.append(problem("context_missing", f"{file}: {error.strerror or error}", "make it readable for root on the node"))
    return entries, found


def digest_bytes(data: bytes) -> str:
    """SHA-256 of bytes in memory."""

    return hashlib.sha256(data).hexdigest()


def detail_of(dockerfile: str, build_args: dict[str, str], entries: Sequence[Entry]) -> dict[str, Any]:
    """What an image's contents depend on, by digest."""
    files = {e.dest: e.sha256 + (" executable" if e.executable else "") for e in entries}
    return {"dockerfile": digest_bytes(dockerfile.encode()), "build_args": dict(build_args), "files": files}


def inputs_text(detail: dict[str, Any] | None, image: str) -> str:
    """The inputs as lines, so that a diff of two builds names what was added, removed or changed."""
    if not detail:
        return ""
    lines = [f"reference {detail['reference']}", *detail.get("repo_digests", [])] if "reference" in detail else []
    lines += [f"dockerfile {detail['dockerfile'][:12]}"] if "dockerfile" in detail else []
    lines += [f"build argument {k}={v}" for k, v in sorted((detail.get("build_args") or {}).items())]
    lines += [f"file {name} {value[:12]}{value[64:]}" for name, value in sorted((detail.get("files") or {}).items())]
    return "\n".join([*lines, f"image {image}", ""])


def manifest_text(manifest: Any) -> str:
    """The same of a manifest; '' when there is none."""
    return inputs_text(manifest.get("detail"), str(manifest.get("image_id"))) if isinstance(manifest, dict) else ""


def compared(before: str, after: str) -> tuple[str, str]:
    """Two texts of `inputs_text` for a diff. With nothing to compare, a folder's files are one line instead of one each."""
    if before:
        return before, after
    lines: list[str] = []
    folders: dict[str, list[str]] = {}
    for line in after.splitlines():
        folder, slash, _ = line.removeprefix("file ").partition("/")
        if line.startswith("file ") and slash:
            if folder not in folders:
                lines.append(folder + slash)
            folders.setdefault(folder, []).append(line)
        else:
            lines.append(line)
    for folder, files in folders.items():
        digest = digest_bytes("\n".join(files).encode())[:12]
        lines[lines.index(folder + "/")] = f"folder {folder}/ {digest} ({len(files)} files)"
    return before, "".join(f"{line}\n" for line in lines)


def max_jobs(cores: int, available_kib: int) -> int:
    """Compile jobs that fit into memory: one for each 8 GiB, at most one for each core."""
    return max(1, min(cores, available_kib // (GIB_PER_COMPILER << 20)))


def _available_kib() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def write_context(entries: Sequence[Entry], dockerfile: str, stream: IO[bytes], moved: Callable[[int], None]) -> None:
    """The context as a tar stream. A file that is no longer what its digest says ends it with JobFailure: the image would lie."""
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as tar:
        _add(tar, "Dockerfile", io.BytesIO(dockerfile.encode()), len(dockerfile.encode()), False)
        for entry in entries:
            if not entry.src:
                data = entry.content.encode()
                _add(tar, entry.dest, io.BytesIO(data), len(data), entry.executable)
                moved(len(data))
                continue
            with open(entry.src, "rb") as file:
                reader = _Hashing(file, moved)
                try:
                    _add(tar, entry.dest, reader, entry.size, entry.executable)
                except OSError as error:
                    if isinstance(error, BrokenPipeError):
                        raise
                    raise _changed(entry, str(error)) from error
                if reader.hexdigest() != entry.sha256 or file.read(1):
                    raise _changed(entry, "its bytes are not those that were listed")


def _add(tar: tarfile.TarFile, name: str, data: Any, size: int, executable: bool) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o755 if executable else 0o644
    tar.addfile(info, data)


def _changed(entry: Entry, why: str) -> JobFailure:
    return JobFailure(problem("context_changed", f"{entry.src} changed during the build: {why}", "leave the files alone and run again"))


class _Hashing:
    def __init__(self, file: IO[bytes], moved: Callable[[int], None]) -> None:

        self._file, self._moved, self._hash = file, moved, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        self._hash.update(chunk)
        self._moved(len(chunk))
        return chunk

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


# --- sizes -----------------------------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int | None:
    """Bytes in Docker's words: '66.7GB', '1.2kB', '0B (0%)', '512MiB'; None for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]i?)?[bB]\s*(?:\(\d+%\))?\s*", text)
    return None if not match else round(float(match[1]) * _UNITS[(match[2] or "").lower()])


def reclaimable_cache(system_df: str) -> int:
    """Bytes of build cache that a prune would free, from 'docker system df', as table or with --format '{{json .}}'."""
    for line in system_df.splitlines():
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row.get("Type") == "Build Cache":
                return parse_size(str(row.get("Reclaimable", ""))) or 0
        elif line.startswith("Build Cache"):
            sizes = re.findall(r"\d+(?:\.\d+)?(?:[kMGT]i?)?B", line)
            return (parse_size(sizes[-1]) or 0) if sizes else 0
    return 0


def disk_need(entries: Sequence[Entry]) -> int:
    """Bytes a build takes below Docker's data root at its peak.

    The context is stored once and copied into a layer once. What is compressed in it unpacks to over three times its size, of which there
    are three copies: the build stage's layer, the final one, and the container that this one is made in (measured: 7.5 GB for 0.8 GB of
    context with 0.62 GB of wheels).
    """
    context = sum(e.size for e in entries)
    packed = sum(e.size for e in entries if e.dest.endswith(COMPRESSED))
    return 2 * context + 10 * packed


def space_problems(root: str, need: int, have: int, reclaimable: int) -> list[Problem]:
    """Whether a build fits below Docker's data root, with the reserve."""
    if need + RESERVE_BYTES <= have:
        return []
    evidence = f"the build needs about {_gb(need)} below {root} and {_gb(RESERVE_BYTES)} stay free; free are {_gb(have)}"
    remedy = f"free {_gb(need + RESERVE_BYTES - have)} on that file system"
    if reclaimable:
        remedy += f"; 'docker builder prune' would give back {_gb(reclaimable)} of build cache (the next builds are slower)"
    return [problem("disk_full", evidence, remedy)]


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


# --- the log ---------------------------------------------------------------------------------------------------------------------

_CLASSIC = re.compile(r"Step (\d+)/(\d+) : (.*)")
_VERTEX = re.compile(r"#(\d+) \[ *(?:(?:[\w.]+/)+[\w.]+ )?(?:([^\s\]]+) +)?(\d+)/(\d+)\] (.*)")
_VERTEX_END = re.compile(r"#(\d+) (?:DONE|CACHED)\b")


class BuildLog:
    """Steps of a build from its log: the classic builder's 'Step 3/14', and BuildKit's plain vertices, which are counted per stage."""

    def __init__(self) -> None:
        self.done, self.total, self.message = 0, 0, ""
        self._stages: dict[str, int] = {}
        self._steps: set[str] = set()
        self._ended: set[str] = set()

    def feed(self, line: str) -> bool:
        """Read one line. Returns whether it says anything about the steps."""
        if match := _CLASSIC.match(line):
            self.done, self.total = int(match[1]) - 1, int(match[2])
            self.message = f"step {match[1]} of {match[2]}: {_short(match[3])}"
            return True
        if match := _VERTEX.match(line):
            self._steps.add(match[1])
            self._stages[match[2] or ""] = int(match[4])
            self._count()
            self.message = f"step {min(self.done + 1, self.total)} of {self.total}: {_short(match[5])}"
            return True
        if (match := _VERTEX_END.match(line)) and match[1] in self._steps:
            self._ended.add(match[1])
            self._count()
            return True
        return False

    def _count(self) -> None:
        self.done, self.total = len(self._ended), sum(self._stages.values())


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 70 else text[:67] + "..."


# Causes in a log that every log shares; the classifier's other classes are about serving, or only say that something failed.
_SHARED = ("disk_full", "docker_group", "docker_down", "build_oom", "oom_killed", "wrong_architecture", "dns", "package_lock", "ptxas_old")
# Causes that only a build knows.
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        "fixup_failed",
        r"^(?:#\d+ [\d.]+ )?fix-up .* is not applicable",
        "a package is not the version that the fix-up was made for: use the locked one",
    ),
    (
        "pip_hash_mismatch",
        r"THESE PACKAGES DO NOT MATCH THE HASHES|Hashes are required in --require-hashes mode",
        "a wheel is not the one that the lock names: collect the wheelhouse again with this very requirements.lock",
    ),
    (
        "pip_no_wheel",
        r"No matching distribution found|Could not find a version that satisfies",
        "the wheelhouse lacks this wheel for the image's Python and machine: collect it again for both",
    ),
    (
        "buildx_missing",
        r"BuildKit is enabled but the buildx component is missing",
        "install the buildx plugin (docker-buildx), or remove DOCKER_BUILDKIT=1 from the environment",
    ),
    (
        "dockerfile",
        r"(?:ADD|COPY) failed|failed to compute cache key.*\"[^\"]+\": not found|dockerfile parse error|unknown instruction",
        "mend the Dockerfile or the context",
    ),
    (
        "build_cache_lost",
        r"failed to (?:calculate checksum of ref|get state for index|compute cache key).*not found|unknown blob",
        "the build cache was cleaned up during the build: run again",
    ),
    (
        "compiler",
        r"ninja: build stopped|error: command '.*' failed|Failed building wheel for",
        "the compiler's first error in the log is the cause",
    ),
)


def classify(lines: Sequence[str], status: int, log: str) -> Problem:
    """What ended a build, from the end of its log."""
    ended = f"docker build exit {status}; log: {log}"
    general = diagnose("\n".join(lines))
    for found in general:
        if found["class"] in _SHARED:
            return problem(found["class"], f"{found['evidence']} ({ended})", found["remedy"])
    for name, pattern, remedy in _CAUSES:
        for number in reversed(range(len(lines))):
            if re.search(pattern, lines[number]):
                evidence = lines[number].strip()[:300]
                if name == "pip_hash_mismatch":  # which wheel is in the next line
                    evidence = " ".join([evidence[:60], *(line.strip() for line in lines[number + 1 : number + 2])])
                return problem(name, f"{evidence} ({ended})", remedy)
    if general:
        return problem(general[0]["class"], f"{general[0]['evidence']} ({ended})", general[0]["remedy"])
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    return problem("build_failed", f"{last[:300]} ({ended})", "see the log's last lines")


# --- docker ----------------------------------------------------------------------------------------------------------------------


def docker(*args: str) -> str:
    """Output of a docker command; JobFailure with its cause when it fails."""
    try:
        done = subprocess.run(["docker", *args], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        remedy = "install Docker's engine and command (docker.io or docker-ce)"
        raise JobFailure(problem("docker_missing", "there is no docker command on this node", remedy)) from error
    if done.returncode != 0:
        evidence = f"docker {' '.join(args[:2])} exit {done.returncode}: {done.stderr.strip()[-300:]}"
        known = next((d for d in diagnose(done.stderr) if d["class"] in _SHARED), None)
        remedy = known["remedy"] if known else "see 'journalctl -u docker' on the node"
        raise JobFailure(problem(known["class"] if known else "docker_failed", evidence, remedy))
    return done.stdout


def images_with(inputs: str) -> list[dict[str, str]]:
    """Images that carry the label with these inputs, newest first: {id, repository}."""
    rows = docker("image", "ls", "--no-trunc", "--filter", f"label={LABEL}={inputs}", "--format", "{{.ID}} {{.Repository}}").split("\n")
    return [dict(zip(("id", "repository"), row.split(), strict=False)) for row in rows if row.strip()]


def inspect(reference: str) -> dict[str, Any] | None:
    """An image by id, name or digest; None when there is none."""
    try:
        found = json.loads(docker("image", "inspect", reference))
    except JobFailure as failure:
        if re.search(r"no such image", failure.problems[0]["evidence"], re.IGNORECASE):
            return None
        raise
    return found[0] if found else None


def label_of(image: dict[str, Any]) -> str:
    """The inputs that an image says it was made of."""
    return str(((image.get("Config") or {}).get("Labels") or {}).get(LABEL, ""))


def inputs_of(image: dict[str, Any]) -> str:
    """Of an image that was made elsewhere: its label, which is the same on every node, else its id."""
    return label_of(image) or digest({"image": image["Id"]})


def find_image(spec: dict[str, Any], manifest: Any) -> dict[str, Any] | None:
    """The image of these inputs. Images that are built upon it inherit the label, hence the look at name or manifest."""
    repository = spec["tag"].rpartition(":")[0]
    noted = manifest.get("image_id") if isinstance(manifest, dict) else None
    for row in images_with(spec["inputs"]):
        if row["repository"] == repository or row["id"] == noted:
            return inspect(row["id"])
    return None


def check_space(entries: Sequence[Entry]) -> list[Problem]:
    """space_problems for this node's Docker."""
    root = docker("info", "--format", "{{.DockerRootDir}}").strip()
    at = Path(root)
    while not at.exists() and at != at.parent:
        at = at.parent
    need, have = disk_need(entries), shutil.disk_usage(at).free
    if need + RESERVE_BYTES <= have:
        return []
    return space_problems(root, need, have, reclaimable_cache(docker("system", "df", "--format", "{{json .}}")))


def make_manifest(profile: str, image: dict[str, Any], inputs: str, tag: str, detail: dict[str, Any], old: Any) -> dict[str, Any]:
    """What other roles read to know the image of a profile. The one before stays noted, for a way back."""
    previous = None
    if isinstance(old, dict):
        if old.get("image_id") == image["Id"]:
            previous = old.get("previous")
        else:
            previous = {name: old.get(name) for name in ("image_id", "inputs", "tag", "built_at")}
    return {
        "profile": profile,
        "image_id": image["Id"],
        "inputs": inputs,
        "tag": tag,
        "built_at": str(image.get("Created", "")),
        "detail": detail,
        "previous": previous,
    }


def manifest_is(old: Any, new: dict[str, Any]) -> bool:
    """Whether a manifest says already what it shall say."""
    return isinstance(old, dict) and all(old.get(name) == new[name] for name in ("profile", "image_id", "inputs", "tag"))


# --- the work --------------------------------------------------------------------------------------------------------------------


def spec_of(
    *,
    profile: str,
    dockerfile: str,
    build_args: dict[str, str],
    entries: Sequence[Entry],
    repository: str,
    manifest: str,
    jobs: int,
) -> dict[str, Any]:
    """What the worker is told."""
    detail = detail_of(dockerfile, build_args, entries)
    inputs = digest(detail)
    return {
        "profile": profile,
        "dockerfile": dockerfile,
        "entries": [asdict(e) for e in entries],
        "jobs": jobs,
        "detail": detail,
        "inputs": inputs,
        "tag": f"{repository}:{inputs[:12]}",
        "manifest": manifest,
    }


def build(spec: dict[str, Any], progress: Progress, log: str) -> dict[str, Any]:
    """The worker: docker build from a streamed context, then the label is verified, then the manifest is written."""
    entries = [Entry(**e) for e in spec["entries"]]
    manifest = Path(spec["manifest"])
    old = read_json(manifest)
    command = ["docker", "build", "--force-rm", "--label", f"{LABEL}={spec['inputs']}", "--tag", spec["tag"]]
    arguments = dict(spec["detail"]["build_args"])
    if re.search(r"^\s*ARG\s+MAX_JOBS\b", spec["dockerfile"], re.MULTILINE | re.IGNORECASE):
        arguments.setdefault("MAX_JOBS", str(spec["jobs"] or max_jobs(os.cpu_count() or 1, _available_kib())))
    for name, value in sorted(arguments.items()):
        command += ["--build-arg", f"{name}={value}"]
    progress.stage("context", sum(e.size for e in entries), "B")
    status, tail, failure = _run_build([*command, "-"], entries, spec["dockerfile"], progress)
    if failure:
        raise failure
    if status != 0:
        raise JobFailure(classify(tail, status, log))
    progress.stage("record", message="verifying the label")
    image = inspect(spec["tag"])
    if image is None or label_of(image) != spec["inputs"]:
        evidence = f"docker build ended well, but {spec['tag']} {'is absent' if image is None else 'lacks the label ' + LABEL}"
        remedy = "use the builder of the engine itself: docker buildx use default"
        raise JobFailure(problem("image_not_loaded", evidence, remedy))
    new = make_manifest(spec["profile"], image, spec["inputs"], spec["tag"], spec["detail"], old)
    write_json(manifest, new)
    # Build stages of the classic builder stay behind as gigabytes of nameless images; only those of this profile are ours.
    docker("image", "prune", "--force", "--filter", f"label={LEFTOVER_LABEL}={spec['profile']}")
    before, after = compared(manifest_text(old), manifest_text(new))
    return {"image_id": image["Id"], "before": before, "after": after}


def _run_build(
    command: list[str], entries: Sequence[Entry], dockerfile: str, progress: Progress
) -> tuple[int, list[str], JobFailure | None]:
    """Exit status, the log's last lines, and what went wrong with the context, if anything."""
    failures: list[JobFailure] = []
    environment = {**os.environ, "BUILDKIT_PROGRESS": "plain"}
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    except FileNotFoundError as error:
        remedy = "install Docker's engine and command (docker.io or docker-ce)"
        raise JobFailure(problem("docker_missing", "there is no docker command on this node", remedy)) from error
    assert process.stdin and process.stdout

    def send() -> None:
        stdin = process.stdin
        assert stdin
        try:
            write_context(entries, dockerfile, stdin, progress.add)
            stdin.close()
        except JobFailure as failure:
            failures.append(failure)
            process.kill()
        except OSError as error:  # the build ended before it had read everything; its own words say why
            if error.errno != errno.EPIPE:
                failures.append(JobFailure(problem("context_unreadable", str(error), "see the node's kernel log for disk errors")))
                process.kill()

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        tail = _read_log(process.stdout, progress)
        status = process.wait()
    finally:
        process.kill()
    sender.join(timeout=5)
    return status, tail, failures[0] if failures else None


def _read_log(stream: Iterable[bytes], progress: Progress) -> list[str]:
    log, tail, staged = BuildLog(), [""], False
    for raw in stream:
        line = plain(raw.decode(errors="replace"))
        print(line, flush=True)
        tail = [*tail[-199:], line]
        if log.feed(line):
            if not staged:
                progress.stage("build", log.total, "steps")
                staged = True
            progress.at(log.done, log.total, log.message)
        if staged:
            progress.alive()
    return tail


def main() -> int:
    """The worker's start: python3 worker.zip JOB_FOLDER."""
    folder = Path(sys.argv[1])
    return work_on(folder, lambda spec, progress: build(spec, progress, str(folder / "log")))
