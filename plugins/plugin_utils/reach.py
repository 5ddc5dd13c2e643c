# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Why a node cannot be worked on at all: what ssh, sudo and Python say on first contact, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from shlex import quote

from ..module_utils.problems import Problem, problem


@dataclass(frozen=True)
class Target:
    """Where a connection goes. name: as in the inventory; rehearsal: whether it is a node that `make rehearsal` makes."""

    name: str
    host: str
    port: int = 22
    user: str = ""
    key: str = ""
    rehearsal: bool = False

    @property
    def login(self) -> str:
        """user@host, as far as known."""
        return f"{self.user}@{self.host}" if self.user else self.host

    @property
    def ssh(self) -> str:
        """The command that tries the same by hand."""
        words = ["ssh", *(["-p", str(self.port)] if self.port != 22 else []), *(["-i", quote(self.key)] if self.key else []), self.login]
        return " ".join(words)

    @property
    def copy_key(self) -> str:
        """The command that installs a key."""
        return f"ssh-copy-id {'' if self.port == 22 else f'-p {self.port} '}{self.login}"

    @property
    def known_as(self) -> str:
        """The host's name in a known_hosts file."""
        return self.host if self.port == 22 else f"[{self.host}]:{self.port}"


# Class, what gives it away, remedy. The first that matches counts: the more telling stand before the more general.
# {host}, {port}, {user}, {ssh}, {copy_key}, {name}, {forget} are the target's.
FIRST_CONTACT: tuple[tuple[str, str, str], ...] = (
    (
        "ssh_host_key_changed",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "if the node was installed anew: `{forget}`, then try again; if not, find out who answers at {host} before you go on",
    ),
    (
        "ssh_host_key_unknown",
        r"Host key verification failed|host key is known for",
        "`{ssh}` once, and compare the fingerprint with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the node",
    ),
    ("ssh_name", r"Could not resolve hostname", "set ansible_host of {name} in the inventory to an address, or mend the name service"),
    (
        "ssh_key_file",
        r"UNPROTECTED PRIVATE KEY|Load key .*(invalid format|error in libcrypto|Permission denied)|bad permissions",
        "`chmod 600` the private key named, and see that it is a private key that `{ssh}` can use",
    ),
    (
        "ssh_password_tool",
        r"install the sshpass program|SSH password instead of a key is not possible",
        "use a key: `{copy_key}`, and leave ansible_password out",
    ),
    (
        "ssh_auth",
        r"Permission denied \(|Too many authentication failures|Invalid/incorrect (username/)?password|no such identity",
        "try `{ssh}`; `{copy_key}` installs your key; if the user is wrong, set ansible_user",
    ),
    (
        "ssh_control_path",
        r"too long for Unix domain socket|ControlPath .* too long|Cannot write to ControlPath",
        "set control_path_dir in ansible.cfg, section ssh_connection, to a short writable folder",
    ),
    (
        "ssh_stale_session",
        r"mux_client|Control socket connect|ControlPersist broken pipe",
        "a shared SSH session outlived the node's restart: `rm -f ~/.ansible/cp/*`, then try again",
    ),
    (
        "ssh_refused",
        r"Connection refused",
        "the machine answers, but no sshd at port {port}: wait if it is just starting, else `sudo systemctl start ssh` "
        "at its own console; if sshd has another port, set ansible_port",
    ),
    (
        "ssh_closed",
        r"kex_exchange_identification|banner exchange|Connection (closed|reset) by",
        "the machine answers, but ends the session: `sudo journalctl -u ssh -n 20` at its own console says why (full disk, too many "
        "sessions, a firewall, no memory left); then try `{ssh}`",
    ),
    (
        "ssh_no_answer",
        r"timed? ?out|No route to host|Network is unreachable|Host is down",
        "is it on, and the cable in? `ping {host}`; if it has another address now, correct ansible_host of {name}; then try `{ssh}`",
    ),
)
ON_THE_NODE: tuple[tuple[str, str, str], ...] = (
    ("sudo_wrong_password", r"Incorrect sudo password|incorrect password attempt", "give {user}'s password on {name} to --ask-become-pass"),
    ("sudo_denied", r"not in the sudoers file|not allowed to (execute|run)", "at the node, as root: `usermod -aG sudo {user}`"),
    ("sudo_missing", r"sudo: (command )?not found", "at the node, as root: `apt-get install sudo && usermod -aG sudo {user}`"),
    (
        "sudo_password",
        r"Missing sudo password|a password is required|waiting for privilege escalation prompt|become password",
        "run ansible-playbook with --ask-become-pass, or allow {user} on the node: "
        "`echo '{user} ALL=(ALL) NOPASSWD:ALL' | sudo tee /etc/sudoers.d/{user}`",
    ),
    (
        "python_missing",
        r"interpreter .* was not found|python[\d.]*: (command )?not found|python[\d.]*: No such file",
        "at the node: `sudo apt-get install python3`, or set ansible_python_interpreter of {name} to the one it has",
    ),
    (
        "python_old",
        r"requires a minimum of Python|unsupported Python|SyntaxError: (future feature|invalid syntax)",
        "set ansible_python_interpreter of {name} to a Python 3.10 or later",
    ),
    (
        "node_disk_full",
        r"No space left on device",
        "the node's disk is full: `{ssh} df -h`, and make room in /tmp, /var and the user's home",
    ),
    (
        "node_read_only",
        r"Read-only file system",
        "the node's disk is read-only, often after an error: `{ssh} sudo dmesg | tail`, then reboot",
    ),
)
WRAPPERS = re.compile(
    r"Data could not be sent to remote host .*? (?:over|via) ssh: |Failed to connect to the host via \w+: |"
    r"(?:Task failed|Action failed|Module failed): "
)
MOST_SHOWN = 300


def first_contact(text: str, target: Target) -> Problem:
    """The problem behind a failed connection."""
    found = _classify(text, target, FIRST_CONTACT)
    remedy = found[1] if found else f"try `{target.ssh}`: it must work without a question"
    if target.rehearsal:
        remedy = f"the rehearsal's nodes are started by `make rehearsal`; otherwise: {remedy}"
    who = f" as {target.user}" if target.user else ""
    return problem(found[0] if found else "ssh_failed", f"{target.host} port {target.port}{who}: {cause(text)}", remedy)


def on_the_node(text: str, target: Target) -> Problem | None:
    """The problem behind a session that came about, but in which nothing could be run; None when the text tells of none."""
    found = _classify(text, target, ON_THE_NODE)
    return problem(found[0], f"{target.login}: {cause(text)}", found[1]) if found else None


def _classify(text: str, target: Target, table: tuple[tuple[str, str, str], ...]) -> tuple[str, str] | None:
    for kind, pattern, remedy in table:
        if re.search(pattern, text):
            known_hosts = re.search(r"Offending \S+ key in (.+?):\d+", text)
            forget = f"ssh-keygen{f' -f {quote(known_hosts[1])}' if known_hosts else ''} -R {quote(target.known_as)}"
            filled = remedy.format(
                copy_key=target.copy_key,
                host=target.host,
                port=target.port,
                user=target.user or "USER",
                ssh=target.ssh,
                name=target.name,
                forget=forget,
            )
            return kind, filled
    return None


def cause(text: str) -> str:
    """What a program said, on one line: without Ansible's wrapping, ssh's banners and greetings, and repeated lines."""
    plain = WRAPPERS.sub("", text)
    lines = [line.strip(" \t\r@") for line in plain.splitlines()]
    kept = dict.fromkeys(line for line in lines if line and not line.startswith(("Warning: Permanently added", "debug1:", "OpenSSH_")))
    if any("HAS CHANGED" in line for line in kept):
        kept = dict.fromkeys(line for line in kept if re.search(r"HAS CHANGED|Offending|verification failed", line))
    told = " / ".join(kept) or "no reason given"
    return told if len(told) <= MOST_SHOWN else told[: MOST_SHOWN - 3] + "..."
