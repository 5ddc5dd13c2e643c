# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
from __future__ import annotations

import pytest
from ansible_collections.dgxspark.vllm.plugins.plugin_utils.reach import Target, cause, first_contact, on_the_node

SPARK = Target("spark1", "192.0.2.21", user="spark")
ODD = Target("spark1", "192.0.2.21", port=2222, user="spark", key="/home/me/my key")
WRAP = 'Data could not be sent to remote host "192.0.2.21". Make sure this host can be reached over ssh: '

CHANGED = f"""{WRAP}@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
The fingerprint for the ED25519 key sent by the remote host is
SHA256:abc.
Please contact your system administrator.
Add correct host key in /home/me/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/me/.ssh/known_hosts:7
Host key for 192.0.2.21 has changed and you have requested strict checking.
Host key verification failed."""


@pytest.mark.parametrize(
    ("said", "kind", "remedy"),
    [
        (
            f"{WRAP}ssh: connect to host 192.0.2.21 port 22: Connection timed out",
            "ssh_no_answer",
            "is it on, and the cable in? `ping 192.0.2.21`",
        ),
        (f"{WRAP}ssh: connect to host 192.0.2.21 port 22: No route to host", "ssh_no_answer", "ansible_host of spark1"),
        ("Failed to connect to the host via ssh: ssh: connect to host x port 22: Network is unreachable", "ssh_no_answer", "ping"),
        (f"{WRAP}ssh: connect to host 192.0.2.21 port 22: Connection refused", "ssh_refused", "systemctl start ssh"),
        (f"{WRAP}ssh: Could not resolve hostname spark1: Name or service not known", "ssh_name", "ansible_host of spark1"),
        (f"{WRAP}ssh: Could not resolve hostname spark1: Temporary failure in name resolution", "ssh_name", "ansible_host"),
        (CHANGED, "ssh_host_key_changed", "`ssh-keygen -f /home/me/.ssh/known_hosts -R 192.0.2.21`"),
        (
            f"{WRAP}No ED25519 host key is known for 192.0.2.21 and you have requested strict checking.\nHost key verification failed.",
            "ssh_host_key_unknown",
            "ssh spark@192.0.2.21",
        ),
        (f"{WRAP}spark@192.0.2.21: Permission denied (publickey,password).", "ssh_auth", "`ssh-copy-id spark@192.0.2.21`"),
        (f"{WRAP}Received disconnect from 192.0.2.21 port 22:2: Too many authentication failures", "ssh_auth", "ssh-copy-id"),
        ("Invalid/incorrect password: Permission denied, please try again.", "ssh_auth", "ansible_user"),
        (
            f'{WRAP}@ WARNING: UNPROTECTED PRIVATE KEY FILE! @\nLoad key "/k": bad permissions\nspark@x: Permission denied (publickey).',
            "ssh_key_file",
            "chmod 600",
        ),
        (f'{WRAP}Load key "/k": error in libcrypto\nspark@192.0.2.21: Permission denied (publickey).', "ssh_key_file", "private key"),
        ("to use the password_mechanism=sshpass, you must install the sshpass program", "ssh_password_tool", "ssh-copy-id"),
        (f"{WRAP}kex_exchange_identification: Connection closed by remote host", "ssh_closed", "journalctl -u ssh"),
        (f"{WRAP}kex_exchange_identification: read: Connection reset by peer", "ssh_closed", "journalctl -u ssh"),
        (f"{WRAP}Connection timed out during banner exchange", "ssh_closed", "journalctl -u ssh"),
        (f"{WRAP}mux_client_request_session: read from master failed: Broken pipe", "ssh_stale_session", "rm -f ~/.ansible/cp/*"),
        (f'{WRAP}unix_listener: path "/very/long" too long for Unix domain socket', "ssh_control_path", "control_path_dir"),
        ("something new", "ssh_failed", "try `ssh spark@192.0.2.21`"),
        ("", "ssh_failed", "try `ssh spark@192.0.2.21`"),
    ],
)
def test_first_contact(said: str, kind: str, remedy: str) -> None:
    found = first_contact(said, SPARK)
    assert found["class"] == kind
    assert remedy in found["remedy"]
    assert found["evidence"].startswith("192.0.2.21 port 22 as spark: ")
    assert "Data could not be sent" not in found["evidence"]


def test_commands_hold_port_and_key() -> None:
    assert ODD.ssh == "ssh -p 2222 -i '/home/me/my key' spark@192.0.2.21"
    assert "`ssh-copy-id -p 2222 spark@192.0.2.21`" in first_contact("Permission denied (publickey)", ODD)["remedy"]
    assert "-R '[192.0.2.21]:2222'`" in first_contact("REMOTE HOST IDENTIFICATION HAS CHANGED", ODD)["remedy"]
    assert "no sshd at port 2222" in first_contact("Connection refused", ODD)["remedy"]


def test_a_rehearsal_node_is_started_by_the_rehearsal() -> None:
    node = Target("spark1", "198.51.100.11", user="spark", rehearsal=True)
    assert first_contact("No route to host", node)["remedy"].startswith("the rehearsal's nodes are started by `make rehearsal`")
    assert "make rehearsal" not in first_contact("No route to host", SPARK)["remedy"]


def test_braces_in_names_are_text() -> None:
    node = Target("spark{1}", "{host}", user="{}")
    assert "{host}" in first_contact("Connection timed out", node)["remedy"]


@pytest.mark.parametrize(
    ("said", "kind", "remedy"),
    [
        ("Missing sudo password", "sudo_password", "--ask-become-pass"),
        ("sudo: a password is required", "sudo_password", "'spark ALL=(ALL) NOPASSWD:ALL'"),
        ("Timeout (12s) waiting for privilege escalation prompt: ", "sudo_password", "--ask-become-pass"),
        ("Incorrect sudo password", "sudo_wrong_password", "spark's password on spark1"),
        ("spark is not in the sudoers file.  This incident will be reported.", "sudo_denied", "usermod -aG sudo spark"),
        ("Sorry, user spark is not allowed to execute '/bin/sh -c x' as root on spark1.", "sudo_denied", "usermod"),
        ("/bin/sh: 1: sudo: not found\n", "sudo_missing", "apt-get install sudo"),
        ("bash: sudo: command not found\n", "sudo_missing", "apt-get install sudo"),
        (
            "/bin/sh: 1: /usr/bin/python3: not found\n\nThe module interpreter '/usr/bin/python3' was not found.",
            "python_missing",
            "apt-get install python3",
        ),
        ("/bin/sh: /usr/bin/python3: No such file or directory", "python_missing", "ansible_python_interpreter of spark1"),
        ("ansible-core requires a minimum of Python version 3.8. Current version: 3.6.9", "python_old", "3.10"),
        ("SyntaxError: future feature annotations is not defined", "python_old", "3.10"),
        ("mkdir: cannot create directory '/tmp/x': No space left on device", "node_disk_full", "df -h"),
        ("OSError: [Errno 30] Read-only file system: '/tmp/x'", "node_read_only", "dmesg"),
    ],
)
def test_on_the_node(said: str, kind: str, remedy: str) -> None:
    found = on_the_node(said, SPARK)
    assert found is not None
    assert found["class"] == kind
    assert remedy in found["remedy"]


@pytest.mark.parametrize(
    "said", ["", "Traceback: ValueError: x", "Connection timed out", "ssh: connect to host x port 22: Connection refused"]
)
def test_other_texts_are_not_explained_away(said: str) -> None:
    assert on_the_node(said, SPARK) is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", "no reason given"),
        (f"{WRAP}a\n\na\nb", "a / b"),
        ("Task failed: Warning: Permanently added 'x' (ED25519) to the list of known hosts.\nConnection refused", "Connection refused"),
        (
            CHANGED,
            "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! / Offending ED25519 key in /home/me/.ssh/known_hosts:7"
            " / Host key verification failed.",
        ),
        ("y" * 1000, "y" * 297 + "..."),
    ],
)
def test_cause_is_one_line(said: str, expected: str) -> None:
    assert cause(said) == expected
