"""The inside of a host: what is done in its namespaces before its sshd starts.

``python -m tests.rayup.host`` reads one JSON object from its standard input (`HostFacts`). Every folder that a host
writes to becomes a file system of its own in memory; everything else becomes read-only, so that the hosts, which have
one disk, can't tell each other anything by it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

OWN = ("/dev/shm", "/tmp", "/var/tmp", "/run", "/root", "/opt", "/mnt")
"""Folders that each host has for itself."""
DEVICE = "eth0"
LINK_S = 10.0


@dataclass(frozen=True)
class HostFacts:
    """What a host is told."""

    name: str
    address: str
    """With the length of its network's prefix."""
    hosts: str
    """Its /etc/hosts."""
    files: dict[str, str]
    """Contents of files that it has from the beginning, by path; for their owner alone."""
    kept: tuple[str, ...]
    """Folders below those of `OWN` that it still sees: the environment, the source."""

    def dump(self) -> str:
        return json.dumps(asdict(self))


def run(*command: str, pass_fds: tuple[int, ...] = ()) -> None:
    subprocess.run(command, check=True, pass_fds=pass_fds)


def set_up(facts: HostFacts) -> None:
    socket.sethostname(facts.name)
    _own_folders(facts.kept)
    for path, text in facts.files.items():
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
    etc = Path("/run/etc")
    etc.mkdir()
    (etc / "hosts").write_text(facts.hosts)
    (etc / "hostname").write_text(facts.name + "\n")
    for name in ("passwd", "shadow"):
        (etc / name).write_text(Path("/run/host", name).read_text())
    for one in etc.iterdir():
        if Path("/etc", one.name).exists():
            run("mount", "--bind", str(one), f"/etc/{one.name}")
    Path("/run/sshd").mkdir(mode=0o755)
    _read_only()
    deadline = time.monotonic() + LINK_S
    while subprocess.run(["ip", "link", "show", DEVICE], capture_output=True, check=False).returncode != 0:
        if time.monotonic() > deadline:
            sys.exit(f"{facts.name} has no network after {LINK_S:g} s")
        time.sleep(0.05)
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", facts.address, "dev", DEVICE)
    run("ip", "link", "set", DEVICE, "up")


def _own_folders(kept: tuple[str, ...]) -> None:
    handles = [(path, os.open(path, os.O_PATH)) for path in kept if path.startswith(tuple(f"{own}/" for own in OWN))]
    for folder in OWN:
        if Path(folder).is_dir():
            run("mount", "-t", "tmpfs", "-o", "mode=1777" if "tmp" in folder or "shm" in folder else "mode=755",
                "tmpfs", folder)  # fmt: skip
    for path, handle in handles:
        Path(path).mkdir(parents=True, exist_ok=True)
        # As it is: the name that it resolves to is that of the new, empty folder.
        run("mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{handle}", path, pass_fds=(handle,))
        os.close(handle)
    run("mount", "-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620", "devpts", "/dev/pts")


def _read_only() -> None:
    """Make every file system read-only that isn't this host's own; devices stay usable."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, options, *_ = line.split()
        own = target in OWN or target in ("/dev/pts", "/proc") or target.startswith(("/proc/", "/etc/"))
        if not own and "rw" in options.split(",") and kind not in ("proc", "devpts"):
            run("mount", "-o", "remount,bind,ro", target)


if __name__ == "__main__":
    given = json.loads(sys.stdin.read())
    set_up(HostFacts(**given | {"kept": tuple(given["kept"])}))
