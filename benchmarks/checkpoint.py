#!/usr/bin/env python3
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""What making a hybrid checkpoint and checking an index cost, beside cp and sync of the same files in the same run.

Makes an INT4 checkpoint with the names and proportions of Qwen3.5-122B-A10B, and its FP8 twin, at a size of choice. Prints for each mode
what it read and wrote, how long it took, and how much memory it had at most. Each is run in a process of its own, after a copy that is not
counted and with the inputs dropped from the page cache; the order changes from round to round, and what is compared comes from the same
round.

    python benchmarks/checkpoint.py --size 4G [--rounds 3] [--modes materialize,overlay,index] [--dir DIR] [--keep]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import synthetic_checkpoint as synthetic

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "collections"))

MODES = ("materialize", "overlay", "index")
DONOR_SHARE = 0.15  # of the source's bytes: the FP8 twin without its routed experts
RESERVE_BYTES = 2 << 30  # what stays free; building a hybrid leaves 1 GiB by itself

Figures = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------ in a process of its own


def own_io() -> dict[str, int]:
    """Bytes of this process and of its children that have ended: rchar, wchar (asked for), read_bytes, write_bytes (of the disk)."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def peak_rss(of_children: bool) -> int:
    """The most memory that this process had, or one of its children, in bytes."""
    if of_children:
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def measured(work: Callable[[], Any], by_children: bool = False) -> Figures:
    """Do it, and what it took."""
    before, used, began = own_io(), sum(os.times()[:4]), time.perf_counter()
    result = work()
    seconds, cpu, after = time.perf_counter() - began, sum(os.times()[:4]) - used, own_io()
    return {
        "seconds": seconds,
        "cpu": cpu,
        "peak": peak_rss(by_children),
        "result": result,
        **{name: after[name] - before[name] for name in after},
    }


def copy(source: Path, output: Path) -> None:
    """What everything is compared with."""
    subprocess.run(["cp", "-r", str(source), str(output)], check=True)
    subprocess.run(["sync", *map(str, output.iterdir()), str(output)], check=True)


def builder(mode: str, source: Path, donor: Path, output: Path) -> Callable[[], dict[str, Any]]:
    """What makes a hybrid, and returns what it says of itself. The imports are done here: they are not what is measured."""
    from ansible_collections.dgxspark.vllm.plugins.module_utils import hybrid_build
    from ansible_collections.dgxspark.vllm.plugins.module_utils.jobs import Progress

    spec = {
        "mode": mode,
        "source": str(source),
        "output": str(output),
        "donor_repo": "synthetic/fp8",
        "donor_revision": "0" * 40,
        "donor_source": str(donor),
    }
    progress = Progress(output.parent / "progress.json")
    return lambda: hybrid_build.build(spec, progress)


def open_headers(source: Path) -> int:
    """Open each shard and read its header, without looking at it. Returns the bytes."""
    total = 0
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb", buffering=0) as stream:
            length = int.from_bytes(stream.read(8), "little")
            total += 8 + len(stream.read(length))
    return total


def has_library() -> bool:
    """Whether this Python has the safetensors library, to be measured beside ours."""
    return find_spec("safetensors") is not None


def open_by_library(source: Path) -> int:
    """Open each shard as a loader does. Returns the number of tensors."""
    from safetensors import safe_open

    total = 0
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "np") as shard:
            total += len(shard.keys())
    return total


def check_index(source: Path) -> dict[str, Any]:
    """What the module safetensors_index does with state=checked."""
    from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_compare import compare
    from ansible_collections.dgxspark.vllm.plugins.module_utils.safetensors_index import read_checkpoint

    found = read_checkpoint(source)
    report = compare(found, require_mtp=True)
    return {"bytes": found.bytes_read, "files": len(found.headers), "tensors": len(report.owner), "problems": report.problems}


def child(task: str, source: Path, donor: Path, output: Path) -> Figures:
    """One measurement."""
    match task:
        case "cp":
            return measured(lambda: copy(source, output), by_children=True)
        case "open":
            return measured(lambda: open_headers(source))
        case "library":
            open_by_library(Path("/nowhere"))  # the import is not what is measured
            return measured(lambda: open_by_library(source))
        case "index":
            check_index(output)  # which is empty: the import is not what is measured here either
            return measured(lambda: check_index(source))
        case _:
            return measured(builder(task, source, donor, output))


# --------------------------------------------------------------------------------------------------------------------- the parent


def drop_from_cache(folders: Iterable[Path]) -> None:
    """Let each measurement start with its inputs on disk. Their pages are clean: they were synced when they were written."""
    for folder in folders:
        for path in folder.iterdir():
            with path.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_child(task: str, places: dict[str, Path]) -> Figures:
    """A measurement in a fresh process; its output is removed."""
    output, report = places["work"] / "output", places["work"] / "figures.json"
    if task in ("cp", "materialize", "overlay"):
        # A virtual machine gives free memory back, and gets it again slowly: without this, cp after cp is twice as fast as cp after others.
        copy(places["source"], output)
        clear(places["work"])
    if task == "index":
        output.mkdir()
    drop_from_cache([places["source"], places["donor"]])
    command = [sys.executable, __file__, "--child", task, str(places["source"]), str(places["donor"]), str(output), str(report)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{task} failed:\n{done.stdout}")
    figures: Figures = json.loads(report.read_text())
    clear(places["work"])
    return figures


def clear(folder: Path) -> None:
    """Remove what is in a folder, and let the disk come to rest."""
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    os.sync()


def measure(modes: list[str], rounds: int, places: dict[str, Path]) -> dict[str, list[Figures]]:
    """Figures of each task, one for each round."""
    tasks = [mode for mode in modes if mode != "index"]
    index = ["open", *(["library"] if has_library() else []), "index"] if "index" in modes else []
    tasks = (["cp"] if tasks else []) + tasks + index
    found: dict[str, list[Figures]] = {task: [] for task in tasks}
    for number in range(rounds):
        for task in tasks if number % 2 == 0 else reversed(tasks):
            found[task].append(run_child(task, places))
            print(f"round {number + 1}: {task} {found[task][-1]['seconds']:.3f} s", file=sys.stderr, flush=True)
    return found


def median(figures: list[Figures], name: str) -> float:
    """The middle one of all rounds."""
    return float(statistics.median(each[name] for each in figures))


def ratios(found: dict[str, list[Figures]], task: str, other: str) -> list[float]:
    """How many times as long as another task of the same round, in order of size."""
    return sorted(a["seconds"] / b["seconds"] for a, b in zip(found[task], found[other], strict=True))


def ratio(found: dict[str, list[Figures]], task: str, other: str) -> float:
    """The middle one of these."""
    return float(statistics.median(ratios(found, task, other)))


def megabytes(count: float) -> str:
    """Bytes for a person."""
    return f"{count / 1e6:,.1f} MB"


def show(found: dict[str, list[Figures]], source_bytes: int) -> None:
    """The table."""
    columns = "".join(f"{column:>14}" for column in ("read", "written", "disk read", "disk written"))
    print(f"{'':<12}{columns}{'seconds':>10}{'CPU s':>8}{'MB/s':>9}{'peak memory':>14}{'x cp+sync':>11}")
    for task, figures in found.items():
        row = "".join(f"{megabytes(median(figures, name)):>14}" for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
        seconds = median(figures, "seconds")
        moved = source_bytes if task in ("cp", "materialize") else median(figures, "rchar") + median(figures, "wchar")
        beside = f"{ratio(found, task, 'cp'):.3f}" if "cp" in found and task not in ("open", "library", "index") else ""
        title = {"cp": "cp+sync", "open": "open+header", "library": "safe_open"}.get(task, task)
        times = f"{seconds:>10.3f}{median(figures, 'cpu'):>8.2f}"
        print(f"{title:<12}{row}{times}{moved / 1e6 / seconds:>9,.0f}{megabytes(median(figures, 'peak')):>14}{beside:>11}")


def summary(found: dict[str, list[Figures]], source_bytes: int) -> str:
    """The last line: what the project promises."""
    parts = []
    if "materialize" in found:
        peak = max(each["peak"] for each in found["materialize"])
        several = ratios(found, "materialize", "cp")
        text = f"materialize {ratio(found, 'materialize', 'cp'):.3f} x cp+sync ({several[0]:.3f} to {several[-1]:.3f} in"
        parts.append(f"{text} {len(several)} rounds), at most {megabytes(peak)} of memory")
    if "overlay" in found:
        written = max(max(each["wchar"], each["write_bytes"]) for each in found["overlay"])
        parts.append(f"overlay writes {100 * written / source_bytes:.2f} % of the bytes, {ratio(found, 'overlay', 'cp'):.3f} x cp+sync")
    if "index" in found:
        result = found["index"][0]["result"]
        text = f"index check of {result['tensors']:,} tensors in {result['files']} files reads {megabytes(result['bytes'])}"
        text += f" ({100 * result['bytes'] / source_bytes:.2f} %) in {median(found['index'], 'seconds'):.3f} s,"
        text += f" reading the headers alone takes {median(found['open'], 'seconds'):.3f} s"
        if "library" in found:
            text += f" and the library's opening {median(found['library'], 'seconds'):.3f} s ({ratio(found, 'index', 'library'):.2f} x)"
        parts.append(text)
    return "; ".join(parts)


def space_problem(folder: Path, size: int, modes: list[str]) -> str:
    """Why the disk is too small; '' when it is not."""
    outputs = size if "materialize" in modes or "overlay" in modes else 0  # cp is always beside them
    needed = int(size * (1 + DONOR_SHARE)) + outputs + RESERVE_BYTES
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return ""
    text = f"{folder} has {megabytes(free)} free, the benchmark needs {megabytes(needed)}: {megabytes(size)} for the checkpoint,"
    text += f" {megabytes(size * DONOR_SHARE)} for its FP8 twin, {megabytes(outputs)} for a copy, {megabytes(RESERVE_BYTES)} stay free."
    return f"{text} Give a smaller --size or another --dir."


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=synthetic.parse_size, default=synthetic.parse_size("4G"), help="of the checkpoint (default: 4G)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="where to work, on the disk to measure (default: /var/tmp)")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint and its twin")
    parser.add_argument("--modes", default=",".join(MODES), help=f"which to measure (default: {','.join(MODES)})")
    parser.add_argument("--rounds", type=int, default=3, help="how often (default: 3); the middle figures are shown")
    parser.add_argument("--shards", type=int, default=14)
    parser.add_argument("--experts", type=int, default=61, help="of each layer: 61 make 28,000 tensors (default)")
    args = parser.parse_args(argv)
    args.modes = args.modes.split(",")
    if unknown := [mode for mode in args.modes if mode not in MODES]:
        parser.error(f"unknown mode {unknown[0]!r}: choose from {', '.join(MODES)}")
    if args.rounds < 1:
        parser.error("at least one round")
    return args


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    args = arguments(argv)
    args.dir.mkdir(parents=True, exist_ok=True)
    if too_small := space_problem(args.dir, args.size, args.modes):
        sys.exit(too_small)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=args.dir))
    places = {name: folder / name for name in ("source", "donor", "work")}
    try:
        places["work"].mkdir()
        synthetic.write_source(places["source"], args.size, layers=48, experts=args.experts, shards=args.shards)
        synthetic.write_donor(places["donor"], places["source"])
        os.sync()
        total = sum(path.stat().st_size for path in places["source"].iterdir())
        print(f"{megabytes(total)} in {len(list(places['source'].glob('*.safetensors')))} shards in {folder}")
        found = measure(args.modes, args.rounds, places)
        show(found, total)
        print(summary(found, total))
    finally:
        shutil.rmtree(places["work"] if args.keep else folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        task_name, *paths, report_path = sys.argv[2:]
        Path(report_path).write_text(json.dumps(child(task_name, *map(Path, paths))))
    else:
        main()
