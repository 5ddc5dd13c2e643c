#!/usr/bin/env python3
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Make several things at the same time, each once.

usage: materials.py LOGDIR < JSON list of {"name", "argv", "creates", "inputs"}

`creates` is a file or folder that the command makes in one piece (it writes beside it and renames). `inputs` is a digest that is kept in
`creates`.inputs after success: present and equal means done. Prints {"made": [...]}; on failure stops the others and says the log's end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Start what is not done, wait for all, fail with the first failure."""
    logs = Path(sys.argv[1])
    logs.mkdir(parents=True, exist_ok=True)
    jobs = []
    for item in json.load(sys.stdin):
        target, mark = Path(item["creates"]), Path(item["creates"] + ".inputs")
        if target.exists() and mark.exists() and mark.read_text() == item["inputs"]:
            continue
        mark.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        log = logs / f"{item['name']}.log"
        with log.open("w") as stream:
            process = subprocess.Popen(item["argv"], stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        jobs.append((item, mark, log, process, time.monotonic()))
    made, waiting = [], list(jobs)
    while waiting:
        for job in list(waiting):
            item, mark, log, process, began = job
            code = process.poll()
            if code is None:
                continue
            waiting.remove(job)
            if code:
                for *_, other, _ in waiting:
                    other.terminate()
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                sys.exit(f"{item['name']} failed with exit status {code}. Its log {log} ends:\n{tail}")
            mark.write_text(item["inputs"])
            made.append(f"{item['name']} ({time.monotonic() - began:.0f} s)")
        time.sleep(0.2)
    print(json.dumps({"made": made}))


if __name__ == "__main__":
    main()
