"""`make test-rayup`: launch Ray clusters for real, use them, take them down, find nothing left.

First that of deploy/ray/loopback.yaml, on this one machine (`tests.rayup.loopback`), then that of
deploy/ray/autoscaled.yaml, on hosts that share nothing but a network (`tests.rayup.apart`). `--loopback` and `--apart`
choose one of them.

The script runs itself again inside namespaces of its own (processes, mounts, network), as if it were a machine of its
own: port 22 is free there, `ray stop` finds no other Ray, and at the end every process that still lives is one that was
left behind. It needs root, Linux, `unshare` and `ip`; sshd and rsync are taken from the machine, or, where it has none,
unpacked from Debian packages into build/rayup (nothing is installed).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from tests.rayup.machine import ROOT, daemon, stop, unpack

OWN = ("--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc")
OF_HOSTS = ("--ipc", "--uts")
TOOLS = {"unshare": "util-linux", "mount": "util-linux", "ip": "iproute2", "ssh": "openssh-client",
         "ssh-keygen": "openssh-client"}  # fmt: skip


def main() -> None:
    asked = argparse.ArgumentParser(
        allow_abbrev=False, prog="test-rayup", description="Launch Ray clusters for real, and use them."
    )
    asked.add_argument("--loopback", action="store_true", help="only the cluster of one machine")
    asked.add_argument("--apart", action="store_true", help="only the cluster of hosts that share nothing")
    asked.add_argument("--inside", choices=["loopback", "apart"], help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.inside == "loopback":
        from tests.rayup import loopback

        loopback.rehearse()
    elif given.inside == "apart":
        from tests.rayup import apart

        apart.rehearse()
    else:
        both = given.loopback == given.apart
        _check(apart=both or given.apart)
        if daemon("sshd") is None or daemon("rsync") is None:
            unpack()
        for which in ("loopback", "apart"):
            if both or getattr(given, which):
                _run(which)


def _check(apart: bool) -> None:
    """End with what this machine lacks."""
    other = "; --loopback needs less" if apart else ""
    if sys.platform != "linux" or os.geteuid() != 0:
        stop("needs root on Linux: it makes namespaces and starts sshd (in a container, root will do)")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            stop(f"needs {tool}: install {package}")
    _try("namespaces of processes, mounts and network", "", ["unshare", *OWN, "true"])
    if apart:
        _try("namespaces of IPC and host names", other, ["unshare", *OWN, *OF_HOSTS, "true"])
        link = (
            "ip link add br0 type bridge && ip link add veth-a type veth peer name veth-b && mount -t tmpfs t /dev/shm"
        )
        _try("a bridge, veth pairs and mounts", other, ["unshare", *OWN, "sh", "-c", link])


def _try(what: str, other: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        stop(f"this machine doesn't let it make {what} ({done.stderr.strip()[-200:]}){other}")


def _run(which: str) -> None:
    # A shell as the first process, because it reaps orphans.
    inner = f'"{sys.executable}" -m tests.rayup.rayup --inside {which}; exit $?'
    done = subprocess.run(["unshare", *OWN, "sh", "-c", inner], cwd=ROOT, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
