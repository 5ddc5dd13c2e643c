# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""site.yml on a node from nothing to an answer, interrupted on the way, twice, and with what users get wrong.

The tests build on each other in the order of this file, as a user's day does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from runs import ROOT, OnNode, Playbook, Run

CONTAINER_ID = ("docker", "inspect", "--format", "{{.Id}}", "dgxspark-vllm")


def show(title: str, run: Run) -> None:
    """The figures that a reader of the test's output looks for."""
    figures = run.host()
    print(
        f"\n{title}: changed={run.recap('changed')} failed={run.recap('failed')}, {figures['module_runs']} module runs, {run.seconds:.1f} s"
    )
    for stage in figures["stages"]:
        print(f"  {stage['stage']:<14} {stage['seconds']:7.1f} s {stage['module_runs']:4} module runs")


def test_clean_node_in_check_mode(playbook: Playbook, on_node: OnNode) -> None:
    """Nothing is there yet, and nothing is changed."""
    assert playbook("tests/e2e/reset.yml", limit=None).rc == 0
    run = playbook("site.yml", arguments="--check --diff")
    assert run.rc == 0, run.output
    assert run.recap("failed") == 0
    assert run.recap("changed") > 0, "a clean node needs changes, and check mode must say so"
    assert on_node("ls", "/var/lib/dgxspark-vllm", check=False) == ""
    assert on_node("docker", "ps", "-aq") == ""
    assert on_node("docker", "images", "-q") == ""
    assert on_node("systemctl", "list-unit-files", "--no-legend", "dgxspark-vllm*", check=False) == ""


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"vllm_recipe": "rehearsal-tinny"}, ["rehearsal-tinny", "rehearsal-tiny"]),
        ({"sm121_image_profil": "cpu"}, ["sm121_image_profil", "sm121_image_profile"]),
        ({"verify_max_tokens": "many"}, ["verify_max_tokens", "many"]),
        ({"vllm_port": "http"}, ["vllm_port", "http"]),
        ({"vllm_recipe_overrides": {"engine_args": {"max-num-seqs": "lots"}}}, ["max-num-seqs", "lots"]),
        ({"vllm_host": "0.0.0.0"}, ["vllm_api_key"]),
        ({"vllm_recipe": "nope", "vllm_hots": "x", "verify_max_tokens": "many"}, ["nope", "vllm_hots", "verify_max_tokens"]),
    ],
)
def test_wrong_inventory_is_one_message_before_anything_runs(playbook: Playbook, extra: dict[str, object], expected: list[str]) -> None:
    """A typing error costs seconds and says how to mend it."""
    run = playbook("site.yml", extra=extra)
    assert run.rc != 0
    assert len(run.results) == 1
    for word in expected:
        assert word in run.message()
    assert run.host()["module_runs"] == 0


def test_node_that_does_not_answer(playbook: Playbook) -> None:
    """Cause and remedy instead of an SSH trace."""
    run = playbook("site.yml", extra={"ansible_port": 2222})
    assert run.rc != 0
    assert run.recap("unreachable") == 1
    assert "2222" in run.message()
    assert "remedy" in run.message().lower()


def test_interrupted_first_run_is_finished_by_the_second(playbook: Playbook, on_node: OnNode) -> None:
    """The controller goes away during the image build; the next run attaches to it."""
    jobs = ("systemctl", "list-units", "--no-legend", "--plain", "--state=active,activating", "*image*")
    began = time.monotonic()

    def build_runs() -> bool:
        # Building alone takes over a minute: an active unit means that we are in the middle of it.
        if time.monotonic() - began < 5:
            return False
        return "image" in on_node(*jobs, check=False)

    first = playbook("site.yml", cancel=build_runs)
    assert first.status == "canceled", first.output
    unit = on_node(*jobs).split()[0]
    invocation = on_node("systemctl", "show", "--value", "-p", "InvocationID", unit)
    second = playbook("site.yml")
    show("first run, after an interruption", second)
    assert second.rc == 0, second.output
    assert second.recap("failed") == 0
    starts = on_node("journalctl", "-u", unit, "-o", "json", "--output-fields=INVOCATION_ID,_SYSTEMD_INVOCATION_ID", "--no-pager")
    seen = {entry.get("INVOCATION_ID") or entry.get("_SYSTEMD_INVOCATION_ID") for entry in map(json.loads, starts.splitlines())} - {None}
    assert seen == {invocation}, "the build was started a second time"
    assert "answer:" in second.output
    assert "speculative decoding:" in second.output
    drafts = int(second.output.split("speculative decoding:")[1].split()[0])
    assert drafts > 0


def test_second_run_changes_nothing(playbook: Playbook, on_node: OnNode) -> None:
    """Converged: nothing changes, and few modules run."""
    before = on_node(*CONTAINER_ID)
    run = playbook("site.yml")
    show("second run", run)
    assert run.rc == 0, run.output
    assert run.recap("changed") == 0
    assert run.host()["module_runs"] <= 15
    assert on_node(*CONTAINER_ID) == before


def test_converged_node_in_check_mode(playbook: Playbook) -> None:
    """Nothing to change, nothing said to change."""
    run = playbook("site.yml", arguments="--check --diff")
    assert run.rc == 0, run.output
    assert run.recap("changed") == 0


def test_option_that_vllm_does_not_know(playbook: Playbook, on_node: OnNode) -> None:
    """vLLM's own parser refuses it before the running service is touched."""
    before = on_node(*CONTAINER_ID)
    run = playbook("site.yml", extra={"vllm_recipe_overrides": {"engine_args": {"max-model-length": 1024}}})
    assert run.rc != 0
    assert "max-model-length" in run.message()
    assert on_node(*CONTAINER_ID) == before


def test_port_taken_by_a_stranger(playbook: Playbook, on_node: OnNode) -> None:
    """Preflight names who holds the port; after the repair a run completes."""
    on_node("systemctl", "stop", "dgxspark-vllm.service")
    on_node("systemd-run", "--unit=stranger", "--collect", "python3", "-m", "http.server", "--bind", "127.0.0.1", "8000")
    time.sleep(1)
    run = playbook("site.yml")
    assert run.rc != 0
    assert "8000" in run.message()
    assert "python3" in run.message()
    assert run.recap("changed") == 0
    on_node("systemctl", "stop", "stranger.service")
    run = playbook("site.yml")
    assert run.rc == 0, run.output
    assert run.recap("changed") == 1


def test_healthy_server_that_dies_at_the_first_request(playbook: Playbook) -> None:
    """Prefix caching on: /health is good, the first request kills the engine, and verify says why."""
    run = playbook("site.yml", extra={"vllm_recipe_overrides": {"engine_args": {"enable-prefix-caching": True}}})
    assert run.rc != 0
    assert "prefix" in run.message()
    assert "enable-prefix-caching" in run.message()
    repaired = playbook("site.yml")
    assert repaired.rc == 0, repaired.output
    assert playbook("site.yml").recap("changed") == 0


def test_installed_collection_serves_as_the_checkout_does(tmp_path: Path) -> None:
    """The tarball holds what is used and nothing private; installed elsewhere, its playbook finds its roles."""
    programs = Path(sys.executable).parent

    def run(*argv: str) -> str:
        env = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg")}
        return subprocess.run(
            [str(programs / argv[0]), *argv[1:]], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        ).stdout

    (tmp_path / "ansible.cfg").write_text(f"[defaults]\ncollections_path = {tmp_path / 'installed'}\n")
    run("ansible-galaxy", "collection", "build", str(ROOT), "--output-path", str(tmp_path))
    tarball = next(tmp_path.glob("dgxspark-vllm-*.tar.gz"))
    with tarfile.open(tarball) as archive:
        names = {member.name.split("/")[0] for member in archive}
        links = [member.name for member in archive if member.issym()]
    assert names <= {
        *("FILES.json", "MANIFEST.json", "CHANGELOG.md", "LICENSE", "README.md", "site.yml"),
        *("changelogs", "docs", "meta", "playbooks", "plugins", "recipes", "roles"),
    }
    assert {"plugins", "roles", "recipes", "playbooks"} <= names
    assert links == []
    run("ansible-galaxy", "collection", "install", str(tarball), "--offline", "-p", str(tmp_path / "installed"))
    output = run("ansible-playbook", "dgxspark.vllm.site", "-i", str(ROOT / "inventory/rehearsal"), "-l", "spark1")
    assert "changed=0" in output
    assert "failed=0" in output
    assert "speculative decoding:" in output
