#!/usr/bin/env python3
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Collect the wheels of a lock file for the Python of the rehearsal's nodes, whatever Python runs this.

usage: wheelhouse.py REQUIREMENTS OUT [PIP-ARGUMENT ...]

OUT is a folder of wheels with the lock file as requirements.lock, and appears in one piece. Hashes are checked by pip.
Wheels are for CPython 3.11 on x86-64 with the C library 2.36 of Debian 12 or older.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def main() -> None:
    """Download beside OUT, then rename; a folder from an interrupted run is used again, since pip checks each file's hash."""
    requirements, out, more = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    part = out.with_name(out.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    argv += [
        "--python-version",
        "3.11",
        "--implementation",
        "cp",
        "--abi",
        "cp311",
        "--dest",
        str(part),
        "--requirement",
        str(requirements),
    ]
    argv += ["--progress-bar", "off"]
    for platform in PLATFORMS:
        argv += ["--platform", platform]
    done = subprocess.run([*argv, *more], check=False)
    if done.returncode:
        sys.exit(
            "pip could not collect the wheels. If torch's +cpu build was not found: it is not on the default index;\n"
            "remedy: give an index that has it, through pip's own configuration (PIP_FIND_LINKS) or rehearsal_pip_args."
        )
    shutil.copyfile(requirements, part / "requirements.lock")
    if out.exists():
        shutil.rmtree(out)
    os.rename(part, out)


if __name__ == "__main__":
    main()
