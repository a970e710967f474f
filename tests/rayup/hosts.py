"""Hosts that share nothing but the network: each a set of namespaces, on one bridge.

A host has its own processes, file systems that it writes to, IPC objects, host name, network stack and sshd. This
machine is the operator's, at `OPERATOR` on the same bridge; it sees the processes of all hosts, and what crosses the
wire to each of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.rayup.host import DEVICE, OWN, HostFacts
from tests.rayup.machine import (
    BUILD,
    ROOT,
    SHADOW,
    daemon,
    passwd,
    path_of_hosts,
    reachable,
    ssh,
    sshd_config,
    wait_for,
)

NETWORK, PREFIX = "10.0.0", 24
OPERATOR = f"{NETWORK}.1"
BRIDGE = "br0"
NAMESPACES = ("pid", "mnt", "net", "ipc", "uts")
START_S = 40.0


@dataclass(frozen=True)
class Host:
    """A host, as the operator's machine sees it."""

    name: str
    address: str
    process: subprocess.Popen[str]
    """`unshare`, whose only child is the host's first process."""
    first: int
    """The pid, here, of the host's first process."""
    home: Path
    """The operator's home, with the key for ssh."""

    @property
    def link(self) -> str:
        """This end of its cable."""
        return f"to-{self.name}"

    def run(self, command: str, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a shell's command there, through ssh; whoever fails says so by its exit code."""
        given = "".join(f"export {name}={value}; " for name, value in environment.items())
        return subprocess.run(
            [*ssh(self.home, self.address), given + command], capture_output=True, text=True, timeout=timeout_s,
            check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def output(self, command: str, timeout_s: float = 60) -> str:
        done = self.run(command, timeout_s)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr}"
        return done.stdout

    def namespaces(self) -> dict[str, str]:
        return {kind: os.readlink(f"/proc/{self.first}/ns/{kind}") for kind in NAMESPACES}

    def bytes_crossed(self) -> int:
        """Bytes that have gone to it and come from it."""
        shown = subprocess.run(["ip", "-j", "-s", "link", "show", self.link], capture_output=True, check=True).stdout
        (link,) = json.loads(shown)
        return sum(int(link["stats64"][way]["bytes"]) for way in ("rx", "tx"))

    def send_files(self, folder: Path) -> None:
        """Copy a folder of the operator's to the same place there."""
        self.output(f"mkdir -p {folder}")
        by = " ".join(ssh(self.home, self.address)[:-1])
        done = subprocess.run(
            ["rsync", "-a", "-e", by, f"{folder}/", f"root@{self.address}:{folder}/"], capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@contextmanager
def hosts(home: Path, addresses: dict[str, str]) -> Iterator[dict[str, Host]]:
    """Hosts by their names, with an address each; they end with all of their processes."""
    for command in (
        ("link", "add", BRIDGE, "type", "bridge"), ("address", "add", f"{OPERATOR}/{PREFIX}", "dev", BRIDGE),
        ("link", "set", BRIDGE, "up"),
    ):  # fmt: skip
        subprocess.run(["ip", *command], check=True)
    # Files of the source are compiled once, here: there it is read-only.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "-x", "build|[.]venv", "."], cwd=ROOT, check=False)
    names = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items())
    with ExitStack() as stack:
        made = {name: stack.enter_context(_host(name, at, names, home)) for name, at in addresses.items()}
        for one in made.values():
            wait_for(lambda one=one: reachable(home, one.address), START_S, f"the sshd of {one.name}")  # type: ignore[misc]
        yield made


@contextmanager
def _host(name: str, address: str, names: str, home: Path) -> Iterator[Host]:
    key = home.parent / f"key-{name}"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    there = {"PATH": path_of_hosts(), "PYTHONPATH": str(ROOT)}
    files = {
        "/run/host/key": key.read_text(), "/run/host/passwd": passwd(Path("/root")), "/run/host/shadow": SHADOW,
        # A login shell takes the path anew from /etc/profile.
        "/root/.bashrc": f"PATH={BUILD / 'bin'}:$PATH\n",
        "/root/.ssh/authorized_keys": (home / ".ssh" / "id_ed25519.pub").read_text(),
        "/run/host/sshd_config": sshd_config(
            (address,), Path("/run/host/key"), Path("/root/.ssh/authorized_keys"), there
        ),
    }  # fmt: skip
    kept = (str(ROOT), sys.prefix, sys.base_prefix)
    facts = HostFacts(name, f"{address}/{PREFIX}", names, files, kept)
    # A shell as the first process, because it reaps orphans.
    inner = f'"{sys.executable}" -m tests.rayup.host && "{daemon("sshd")}" -D -e -f /run/host/sshd_config; exit $?'
    log = (home.parent / f"{name}.log").open("w")
    flags = [f"--{kind}" for kind in ("pid", "mount", "net", "ipc", "uts", "fork", "kill-child", "mount-proc")]
    process = subprocess.Popen(
        ["unshare", *flags, "sh", "-c", inner], cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
        env={**os.environ, "HOME": "/root"},
    )  # fmt: skip
    try:
        _connect(name, process)
        assert process.stdin is not None
        _tell(process.stdin, facts)
        first = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        yield Host(name, address, process, first, home)
    finally:
        process.kill()  # --kill-child: with all that runs there
        process.wait()
        log.close()


def _tell(to: IO[str], facts: HostFacts) -> None:
    to.write(facts.dump())
    to.close()


def _connect(name: str, process: subprocess.Popen[str]) -> None:
    """Lay the cable to a host's network namespace, once it is there."""
    ours = os.readlink("/proc/self/ns/net")

    def apart() -> bool:
        assert process.poll() is None, f"{name} did not start"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return os.readlink(f"/proc/{process.pid}/ns/net") != ours and bool(children)

    wait_for(apart, START_S, f"the namespaces of {name}")
    subprocess.run(
        ["ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", DEVICE, "netns", str(process.pid)],
        check=True,
    )
    subprocess.run(["ip", "link", "set", f"to-{name}", "master", BRIDGE, "up"], check=True)


def prove_apart(there: dict[str, Host]) -> None:
    """Show that nothing is shared but the network: by namespaces, by file systems, by what one host sees of another."""
    for kind in NAMESPACES:
        seen = {one.namespaces()[kind] for one in there.values()} | {os.readlink(f"/proc/self/ns/{kind}")}
        assert len(seen) == len(there) + 1, f"{kind} is shared"
    names = {one.output("hostname").strip() for one in there.values()}
    assert names == set(there), names
    looked = [path for path in OWN if Path(path).is_dir()]
    devices = {one.name: one.output(f"stat -c %d:%i {' '.join(looked)}").split() for one in there.values()}
    for number, path in enumerate(looked):
        seen = {found[number].partition(":")[0] for found in devices.values()}
        seen.add(str(os.stat(path).st_dev))
        assert len(seen) == len(there) + 1, f"{path} is shared: {devices}"
    first, *others = there.values()
    first.output("touch /dev/shm/mine /tmp/mine /run/mine")
    for one in others:
        assert one.output("ls /dev/shm /tmp /run").split().count("mine") == 0
    for one in there.values():
        writable = [
            line.split()[1] for line in one.output("cat /proc/self/mounts").splitlines()
            if "rw" in line.split()[3].split(",") and line.split()[2] not in ("proc", "devpts")
        ]  # fmt: skip
        assert set(writable) <= {*OWN, *(f"/etc/{name}" for name in ("passwd", "shadow", "hosts", "hostname"))}, (
            writable
        )
        one.output(f'"{sys.executable}" -c "import ray"')
        assert one.run(f"touch {ROOT}/mine").returncode != 0, "the source can be written to"
    first.output("rm /dev/shm/mine /tmp/mine /run/mine")
