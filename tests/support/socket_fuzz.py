"""Strangers at every socket of a running cluster: seeded random bytes, and beginnings of real protocols, mutated."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import psutil

from tests.support.raw_frames import framed, opening
from tests.support.served_cluster import Serving, family

PATIENCE_S = 0.5
"""How long a stranger waits for an answer."""
RAYS_OWN = ("raylet", "gcs_server", "dashboard", "runtime_env", "reaper")
"""Processes of Ray, which are Ray's to defend."""

CLIENT_HELLO = bytes.fromhex(
    "16030100a5010000a10303000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20e0e1e2e3e4e5e6e7e8e9eaebec"
    "edeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff0006130113021303010000520000000e000c0000096c6f63616c686f7374000a00040002001d"
    "000d00120010040308040401050308050501080606010033002600240020358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0"
    "d2cd166254002b0003020304"
)
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\0" + bytes(31)
ZMTP_NULL = (
    b"\xff"
    + bytes(8)
    + b"\x7f\x03\x00NULL"
    + bytes(16)
    + b"\0"
    + bytes(31)
    + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
)
HTTP_2 = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"
    + b"\0\0\x08\x01\x04\0\0\0\x01\x82\x86\x84\x41\x8a\x08\x9d\x5c"
)
HTTP_1 = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer tp-x\r\ncontent-type: application/json"
    b"\r\ncontent-length: 54\r\n\r\n" + b'{"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4}'
)
STREAM = framed(opening(1)) + framed(
    msgspec.msgpack.encode(
        [
            [
                [
                    "submit", "r", 0, "m", [5, 6, 7], 3, [4, 1.0, 1.0], ["prefill-0", 1, "tcp://127.0.0.1:9"], "", 5.0,
                ],
                ["cancel", "r", 0],
            ]
        ]
    )
)  # fmt: skip
BEGINNINGS = (CLIENT_HELLO, ZMTP_GREETING, ZMTP_NULL, HTTP_2, HTTP_1, STREAM)


@dataclass(frozen=True)
class Target:
    """One listening socket of one process."""

    process: str
    host: str
    port: int


def targets(cluster: Serving) -> list[Target]:
    """The sockets on which processes of ours listen: `serve`, the router, workers, which may be of a joined Ray."""
    found = []
    workers = [psutil.Process(row["pid"]) for row in cluster.status().values()]
    for process in {*family(cluster.process), *workers}:
        try:
            name = " ".join(process.cmdline()) or process.name()
            if any(word in name for word in RAYS_OWN):
                continue
            for one in process.net_connections(kind="tcp"):
                if one.status == psutil.CONN_LISTEN:
                    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(one.laddr.ip, one.laddr.ip)
                    found.append(Target(f"{process.pid} {name[:60]}", host, one.laddr.port))
        except psutil.Error:
            continue
    return sorted(set(found), key=lambda target: target.port)


def abstract_sockets() -> Iterator[bytes]:
    """The abstract unix sockets of this machine that are Twinpool's: the ranks' and the arena agents'."""
    with open("/proc/net/unix", "rb") as table:
        for line in table.read().splitlines():
            name = line.split()[-1]
            if name.startswith(b"@twinpool"):
                yield b"\0" + name[1:]


def mutated(rng: random.Random) -> bytes:
    """Random bytes, or the beginning of a protocol with some of it changed, cut, repeated or run on."""
    if rng.random() < 0.25:
        return rng.randbytes(rng.choice([0, 1, 7, 64, 1000, 70_000]))
    said = bytearray(rng.choice(BEGINNINGS))
    for _ in range(rng.choice([0, 1, 1, 3, 20])):
        at = rng.randrange(len(said)) if said else 0
        match rng.randrange(4):
            case 0 if said:
                said[at] = rng.randrange(256)
            case 1:
                del said[at : at + rng.randrange(1, 40)]
            case 2:
                said[at:at] = rng.randbytes(rng.randrange(1, 40))
            case _:
                said += said[at:] * rng.randrange(1, 4)
    return bytes(said[:200_000])


def visit(target: Target, rng: random.Random, trust: ssl.SSLContext | None = None) -> bytes:
    """Be a stranger once; returns what was answered. `trust`: speak TLS first, where the target does."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection((target.host, target.port), PATIENCE_S) as plain:
        connection = plain
        if trust is not None:
            connection = trust.wrap_socket(plain, server_hostname="localhost")
        for _ in range(rng.randrange(1, 4)):
            connection.sendall(mutated(rng))
        if rng.random() < 0.5:
            connection.settimeout(rng.choice([0.01, PATIENCE_S]))
            heard = connection.recv(65536)
        if rng.random() < 0.3:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # A reset, no orderly end.
    return heard


def visit_abstract(name: bytes, rng: random.Random) -> None:
    """Be a stranger once at an abstract unix socket, of either kind."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as peer:
            peer.settimeout(PATIENCE_S)
            peer.connect(name)
            peer.send(mutated(rng)[:8000])
            peer.settimeout(0.01)
            peer.recv(4096)
