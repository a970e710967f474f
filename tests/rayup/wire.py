"""What crosses the cable to a host: every packet, read from a packet socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

ALL = 3
"""ETH_P_ALL: packets of every protocol, both ways."""
BUFFER_BYTES = 64 << 20
LOOK_S = 0.2


@dataclass
class Wire:
    """The packets of one link, and which of the `marks` were in one of them."""

    marks: dict[str, bytes]
    total: int = 0
    """Bytes."""
    seen: set[str] = field(default_factory=set)

    def take(self, packet: bytes) -> None:
        self.total += len(packet)
        self.seen.update(name for name, mark in self.marks.items() if mark in packet)


@contextmanager
def watched(link: str, marks: dict[str, bytes]) -> Iterator[Wire]:
    """Every packet of `link` while this is open. A mark must fit into one packet."""
    wire, ended = Wire(marks), threading.Event()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL)) as capture:
        capture.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        capture.bind((link, ALL))
        capture.settimeout(LOOK_S)

        def read() -> None:
            while True:
                try:
                    wire.take(capture.recv(1 << 16))
                except TimeoutError:
                    if ended.is_set():
                        return

        thread = threading.Thread(target=read, name=f"watch {link}")
        thread.start()
        try:
            yield wire
        finally:
            ended.set()
            thread.join()
