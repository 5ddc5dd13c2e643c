# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A docker command for tests of builds: it reads the context, and what it answers is written in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

DOCKER = r"""#!/usr/bin/env python3
import json, os, sys, tarfile, time
home = os.environ["FAKE_DOCKER"]
state = json.load(open(home + "/state.json"))
args = sys.argv[1:]
with open(home + "/calls", "a") as log:
    log.write(json.dumps(args) + "\n")
if args[0] == "build":
    if state.get("early"):
        print(state["early"]); sys.exit(1)
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        names = [m.name for m in tar]
    print("Step 1/2 : FROM scratch", flush=True)
    time.sleep(state.get("pause", 0))
    print("Step 2/2 : RUN x", flush=True)
    if state.get("late"):
        print(state["late"]); sys.exit(1)
    label = args[args.index("--label") + 1].partition("=")
    labels = {} if state.get("unlabelled") else {label[0]: label[2]}
    image = {"Id": "sha256:" + "7" * 64, "Created": "2026-01-01T00:00:00Z", "Config": {"Labels": labels}}
    state["images"] = state.get("images", []) + [dict(image, Tag=args[args.index("--tag") + 1], Names=names)]
    json.dump(state, open(home + "/state.json", "w"))
elif args[:2] == ["image", "inspect"]:
    found = [i for i in state.get("images", []) if args[2] in (i["Id"], i["Tag"])]
    if not found:
        print("[]"); sys.exit("Error: No such image: " + args[2])
    print(json.dumps(found[:1]))
elif args[:2] == ["image", "ls"]:
    wanted = args[args.index("--filter") + 1].removeprefix("label=").partition("=")
    for i in state.get("images", []):
        if (i["Config"]["Labels"] or {}).get(wanted[0]) == wanted[2]:
            print(i["Id"], i["Tag"].rpartition(":")[0] or "<none>")
elif args[0] == "info":
    print(state.get("root", home))
"""


class FakeDocker:
    """Puts the command first on PATH. Call it to change its state, and to read it with the calls that were made."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._home = home
        home.mkdir()
        (home / "docker").write_text(DOCKER)
        (home / "docker").chmod(0o755)
        (home / "state.json").write_text("{}")
        monkeypatch.setenv("FAKE_DOCKER", str(home))
        monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")

    def __call__(self, **change: Any) -> dict[str, Any]:
        state = {**json.loads((self._home / "state.json").read_text()), **change}
        (self._home / "state.json").write_text(json.dumps(state))
        calls = self._home / "calls"
        return {**state, "calls": [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []}
