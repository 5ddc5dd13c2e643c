#!/usr/bin/env python3
# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""A Docker engine for the rehearsal: the one that answers, or one of its own in the rehearsal's folder.

usage: engine.py start|find|stop DIR [--disk-gib N] [--subnet CIDR ...]

Prints one JSON object: host (value for DOCKER_HOST, empty for the default), own, cap_sys_resource, cgroup_version, done (what was changed).
Exit 1 with all reasons on stderr when something is missing; nothing has been changed then.
An engine that is already there is only asked for its version. An own one has its data, socket and process id below DIR/engine,
no default bridge and no firewall rules, so that it cannot disturb others.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# program -> Debian and Ubuntu package
CONTROLLER_TOOLS = {
    "docker": "docker.io",
    "mmdebstrap": "mmdebstrap",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "ip": "iproute2",
}
ENGINE_TOOLS = {"dockerd": "docker.io", "start-stop-daemon": "dpkg"}
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Unix socket addresses hold 107 characters; containerd's sockets below DIR/engine/run are longer than our own.
LONGEST_DIR = 60


def which(tool: str) -> str | None:
    """A program's path, looked for in the system folders too, which an ordinary user's PATH may lack."""
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")


def server_version(host: str) -> tuple[str, str]:
    """(server version, '') of the engine at `host`, or ('', why it does not answer)."""
    docker = which("docker")
    if not docker:
        return "", "the program docker is not installed"
    env = {**os.environ, "DOCKER_HOST": host} if host else dict(os.environ)
    try:
        done = subprocess.run(
            [docker, "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, timeout=20, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        return "", "the engine did not answer within 20 s"
    return (done.stdout.strip(), "") if done.returncode == 0 else ("", done.stderr.strip())


def missing_packages(with_engine: bool) -> list[str]:
    """Packages that this machine still needs, in the words of apt."""
    tools = {**CONTROLLER_TOOLS, **(ENGINE_TOOLS if with_engine else {})}
    wanted = {package for tool, package in tools.items() if not which(tool)}
    if not KEYRING.exists():
        wanted.add("debian-archive-keyring")
    return sorted(wanted)


def overlapping(subnets: list[str]) -> list[str]:
    """Addresses of this machine that lie in one of the subnets, as 'address on interface'."""
    found = []
    nets = [ipaddress.ip_network(s) for s in subnets]
    ip = which("ip")
    links = json.loads(subprocess.run([ip, "-json", "addr"], capture_output=True, text=True, check=True).stdout) if ip else []
    for link in links:
        for address in link.get("addr_info", []):
            if address["family"] == "inet" and any(ipaddress.ip_address(address["local"]) in n for n in nets):
                found.append(f"{address['local']} on {link['ifname']}")
    return found


def own_subnets(host: str, label: str) -> list[str]:
    """Subnets of the networks that carry this rehearsal's label."""
    env = {**os.environ, "DOCKER_HOST": host} if host else dict(os.environ)

    def docker(*args: str) -> str:
        return subprocess.run(["docker", *args], capture_output=True, text=True, check=False, env=env).stdout.strip()

    names = docker("network", "ls", "--filter", f"label=dgxspark.vllm.rehearsal={label}", "--quiet").split()
    form = "{{range .IPAM.Config}}{{.Subnet}} {{end}}"
    return docker("network", "inspect", "--format", form, *names).split() if names else []


def network_problem(wanted: list[str], own: list[str]) -> str:
    """What is wrong with the subnets that are wanted, given those that this rehearsal has already; empty when nothing is."""
    try:
        for subnet in wanted:
            ipaddress.IPv4Network(subnet)
    except ValueError as error:
        return f"{error}.\n  remedy: give the first two numbers of a private network: make rehearsal REHEARSAL_PREFIX=10.79"
    if own and not set(wanted) <= set(own):
        prefix = ".".join(own[0].split(".")[:2])
        return (
            f"The nodes of this checkout are on {', '.join(sorted(own))}; {', '.join(wanted)} are wanted.\n"
            f"  remedy: keep them with REHEARSAL_PREFIX={prefix}, or remove them first: make rehearsal-clean"
        )
    taken = [] if own else overlapping(wanted)
    if not taken:
        return ""
    free = next((f"10.{n}" for n in range(78, 120) if not overlapping([f"10.{n}.0.0/16"])), "172.31")
    return (
        f"The rehearsal's networks {', '.join(wanted)} overlap with {', '.join(taken)}.\n"
        f"  remedy: `make rehearsal-clean` in the checkout that has them, or choose others: make rehearsal REHEARSAL_PREFIX={free}"
    )


def find(base: Path) -> tuple[str | None, bool, str]:
    """(DOCKER_HOST value, own, reason). None: no engine answers, and why the default one does not."""
    own = f"unix://{base / 'engine/docker.sock'}"
    if (base / "engine/docker.sock").exists() and server_version(own)[0]:
        return own, True, ""
    version, reason = server_version("")
    if version:
        return os.environ.get("DOCKER_HOST", ""), False, ""
    return None, False, reason


def start_own(base: Path) -> str:
    """Start dockerd below DIR/engine and wait until it answers. Returns its DOCKER_HOST value."""
    engine = base / "engine"
    engine.mkdir(parents=True, exist_ok=True)
    pidfile, log = engine / "docker.pid", engine / "dockerd.log"
    host = f"unix://{engine / 'docker.sock'}"
    # A process id left by a crash or a reboot may belong to anybody by now.
    pidfile.unlink(missing_ok=True)
    subprocess.run(
        [
            which("start-stop-daemon"), "--start", "--background", "--pidfile", str(pidfile), "--output", str(log),
            "--startas", which("dockerd"), "--",
            "--data-root", str(engine / "data"), "--exec-root", str(engine / "run"), "--pidfile", str(pidfile), "--host", host,
            "--bridge", "none", "--iptables=false", "--ip6tables=false",
        ],
        check=True, stdout=sys.stderr,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server_version(host)[0]:
            return host
        time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    sys.exit(f"dockerd does not answer at {host} after 60 s. Its log {log} ends:\n{tail}")


def stop_own(base: Path) -> bool:
    """Stop the rehearsal's own dockerd; nothing else is ever signalled. Returns whether one ran."""
    pidfile = base / "engine/docker.pid"
    try:
        pid = int(pidfile.read_text())
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        # A process id can belong to anybody after a crash: it must be a dockerd, and with our data.
        data = argv.index("--data-root") + 1
        ours = Path(os.readlink(f"/proc/{pid}/exe")).name == "dockerd" and argv[data] == str(base / "engine/data")
    except (OSError, ValueError):
        return False
    if not ours:
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            sys.exit(f"dockerd (process {pid}) did not stop within 60 s after SIGTERM; stop it and run this again")
        time.sleep(0.2)
    return True


def has_sys_resource() -> bool:
    """Whether this machine may grant CAP_SYS_RESOURCE (bit 24 of the bounding set); containers in the cloud often may not."""
    status = Path("/proc/self/status").read_text()
    bounding = next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd"))
    return bool(int(bounding, 16) >> 24 & 1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("start", "find", "stop"))
    parser.add_argument("dir", type=Path)
    parser.add_argument("--disk-gib", type=int, default=0)
    parser.add_argument("--subnet", action="append", default=[])
    args = parser.parse_args()
    base: Path = args.dir
    done: list[str] = []
    if args.action == "stop":
        print(json.dumps({"done": ["stopped dockerd"] if stop_own(base) else []}))
        return
    host, own, reason = find(base)
    if args.action == "start":
        problems = []
        root = os.geteuid() == 0
        packages = missing_packages(with_engine=host is None)
        if host is None and not root:
            packages = sorted({*packages, "docker.io"})
            problems.append(
                f"No Docker engine answers ({reason}).\n  remedy: sudo apt-get install -y {' '.join(packages)} && "
                "sudo systemctl start docker && sudo usermod -aG docker $USER, then log in again and repeat `make rehearsal`"
            )
        elif packages and not root:
            problems.append(f"Programs are missing.\n  remedy: sudo apt-get install -y {' '.join(packages)}")
        if host is None and len(str(base)) > LONGEST_DIR:
            problems.append(
                f"{base} is {len(str(base))} characters long; an engine's sockets below it would pass the limit of Unix addresses.\n"
                f"  remedy: move the checkout to a path of at most {LONGEST_DIR - len('/.rehearsal')} characters"
            )
        nearest = next(p for p in (base, *base.parents) if p.exists())
        free = shutil.disk_usage(nearest).free / 2**30
        own_nets = own_subnets(host, str(base)) if host is not None else []
        if not own_nets and free < args.disk_gib:
            problems.append(
                f"{nearest} has {free:.1f} GiB free, the rehearsal needs {args.disk_gib} GiB.\n"
                "  remedy: free some space or move the checkout to a larger disk"
            )
        if problem := network_problem(args.subnet, own_nets):
            problems.append(problem)
        if problems:
            sys.exit("\n".join(problems))
        if packages:
            apt = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "-q"]
            env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run([*apt, "update"], check=True, stdout=sys.stderr, env=env)
            subprocess.run([*apt, "install", "-y", "--no-install-recommends", *packages], check=True, stdout=sys.stderr, env=env)
            done.append("installed " + " ".join(packages))
            host, own, reason = find(base)  # where systemd runs, the package has started the engine
        if host is None:
            host, own = start_own(base), True
            done.append("started dockerd")
    if host is None:
        print(json.dumps({"host": None, "own": False, "done": []}))
        return
    cgroups = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
    print(json.dumps({"host": host, "own": own, "cap_sys_resource": has_sys_resource(), "cgroup_version": cgroups, "done": done}))


if __name__ == "__main__":
    main()
