# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from ansible.errors import AnsibleAuthenticationFailure, AnsibleConnectionFailure, AnsibleError
from ansible_collections.dgxspark.vllm.plugins.action.spark_facts import ActionModule

OPTIONS = {"host": "192.0.2.21", "port": 22, "remote_user": "spark", "private_key_file": None}


def act(outcome: Any, options: dict[str, Any] | None = None, **variables: Any) -> dict[str, Any]:
    """What the action returns when running its module ends in `outcome`."""
    connection = MagicMock()
    settings = OPTIONS if options is None else options

    def get_option(name: str) -> Any:
        return settings[name]

    connection.get_option.side_effect = get_option
    task = MagicMock(async_val=0, check_mode=False, args={})
    action = ActionModule(task, connection, MagicMock(), MagicMock(), MagicMock(), MagicMock())
    action._execute_module = MagicMock(side_effect=[outcome])
    return action.run(task_vars={"inventory_hostname": "spark1", **variables})


def test_a_result_goes_through_unchanged() -> None:
    result = act({"changed": False, "spark": {"arch": "aarch64"}, "problems": []})
    assert result == {"changed": False, "spark": {"arch": "aarch64"}, "problems": []}


def test_the_modules_own_failure_goes_through_unchanged() -> None:
    failed = {"failed": True, "msg": "1 problem on spark1", "problems": [{"class": "docker_group", "evidence": "sudo: not found"}]}
    assert act(dict(failed)) == failed


@pytest.mark.parametrize("kind", [AnsibleConnectionFailure, AnsibleAuthenticationFailure])
def test_a_failed_connection_is_one_clear_message(kind: type[AnsibleConnectionFailure]) -> None:
    result = act(kind("Failed to connect to the host via ssh: ssh: connect to host 192.0.2.21 port 22: Connection timed out"))
    assert result["unreachable"]
    assert "failed" not in result
    assert (result["changed"], result["module_runs"]) == (False, 0)
    assert [p["class"] for p in result["problems"]] == ["ssh_no_answer"]
    for part in ("spark1 cannot be reached", "192.0.2.21 port 22 as spark", "Connection timed out", "ssh spark@192.0.2.21"):
        assert part in result["msg"]


@pytest.mark.parametrize(
    "variables",
    [
        {"inventory_dir": "/home/me/dgxspark/inventory/rehearsal"},
        {"inventory_file": "/home/me/rehearsal.yml"},
        {"group_names": ["rehearsal", "vllm_instances"]},
    ],
)
def test_a_rehearsal_is_known_by_its_inventory(variables: dict[str, Any]) -> None:
    assert "make rehearsal" in act(AnsibleConnectionFailure("Connection refused"), **variables)["msg"]
    assert "make rehearsal" not in act(AnsibleConnectionFailure("Connection refused"), inventory_dir="/home/me/inventory/single")["msg"]


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (AnsibleError("Missing sudo password"), "sudo_password"),
        (AnsibleError("Incorrect sudo password"), "sudo_wrong_password"),
        (AnsibleConnectionFailure("Timeout (12s) waiting for privilege escalation prompt: "), "sudo_password"),
        (
            {
                "failed": True,
                "rc": 127,
                "msg": "The module interpreter '/usr/bin/python3' was not found.",
                "module_stderr": "/bin/sh: 1: /usr/bin/python3: not found\n",
                "module_stdout": "",
            },
            "python_missing",
        ),
        ({"failed": True, "rc": 1, "msg": "MODULE FAILURE", "module_stderr": "sudo: a password is required\n"}, "sudo_password"),
        ({"failed": True, "rc": 1, "msg": "MODULE FAILURE", "module_stdout": "sudo: not found\r\n"}, "sudo_missing"),
    ],
)
def test_a_node_on_which_nothing_runs(outcome: Any, kind: str) -> None:
    result = act(outcome)
    assert result["failed"]
    assert not result.get("unreachable")
    assert [p["class"] for p in result["problems"]] == [kind]
    assert result["msg"].startswith("Nothing can be run on spark1.")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(AnsibleError, match="something else"):
        act(AnsibleError("something else"))
    crashed = {"failed": True, "msg": "MODULE FAILURE", "module_stderr": "Traceback: KeyError"}
    assert act(dict(crashed)) == crashed


def test_a_connection_without_address_or_port() -> None:
    result = act(AnsibleConnectionFailure("no such container"), options={})
    assert "spark1 port 22: no such container" in result["msg"]
