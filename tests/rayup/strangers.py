"""Strangers on the cluster's network: who hasn't its secret, or no certificate of it, is not let in anywhere."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psutil
import zmq

from tests.soak.test_security_on_nodes import served
from twinpool.transfer.net.zmq_sockets import CurveKeys, dial

PATIENCE_S = 1.5
LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def workers(of: int) -> list[int]:
    """Pids, here, of the Twinpool workers' processes of a host, whose first process is `of`."""
    own = os.readlink(f"/proc/{of}/ns/pid")
    found = []
    for process in psutil.process_iter():
        try:
            if "WorkerActor" in " ".join(process.cmdline()) and os.readlink(f"/proc/{process.pid}/ns/pid") == own:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def doors(pid: int) -> list[int]:
    """The ports on which a process of any network namespace listens for TCP off the loopback."""
    sockets = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(one))
        except OSError:
            continue
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].rpartition(":")
            if words[3] == LISTEN and f"socket:[{words[9]}]" in sockets and not address.endswith("0100007F"):
                ports.append(int(port, 16))
    return sorted(set(ports))


def let_in(address: str, ports: list[int], keys: CurveKeys | None) -> set[int]:
    """The ports where a ZeroMQ peer with these keys gets through the handshake."""
    with zmq.Context() as context:
        calls = {port: dial(context, f"tcp://{address}:{port}", keys, PATIENCE_S * 4) for port in ports}
        deadline = time.monotonic() + PATIENCE_S
        found: set[int] = set()
        while time.monotonic() < deadline:
            found |= {port for port, (_, watch) in calls.items() if watch.up}
            time.sleep(0.05)
        for call, watch in calls.values():
            watch.close()
            call.close(linger=0)
    return found


async def _telling(address: str, ports: list[int]) -> list[int]:
    """The ports where a caller without a certificate is served."""
    return [port for port in ports if await served(f"{address}:{port}")]


def prove_closed(address: str, first: int, secret: str) -> tuple[int, int]:
    """Show that the workers of a host let in who has the secret and nobody else; returns how many ports there were,
    and how many of them are ZeroMQ's."""
    ports = [port for pid in workers(first) for port in doors(pid)]
    assert ports, "no worker listens there"
    right = let_in(address, ports, CurveKeys.from_secret(bytes.fromhex(secret)))
    assert right, f"who has the secret isn't let in: {ports}"
    assert not let_in(address, ports, CurveKeys.from_secret(bytes(32))), "another secret opens a socket"
    assert not let_in(address, ports, None), "no secret at all opens a socket"
    told = asyncio.run(_telling(address, ports))
    assert not told, f"who has no certificate is served at {told}"
    return len(ports), len(right)
