"""The protocols of the transport that carries the control messages of rooms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

ProcessIdentity = tuple[int, int, str]
"""A process as `process_watch.mine` names it: pid, start time in clock ticks since boot, kernel and pid namespace."""


class ControlInbox(Protocol):
    """A writer's end of its control connections: readers connect to it."""

    endpoint: str
    """The address that readers connect to."""

    def receive(self) -> list[tuple[bytes, bytes]]:
        """Return arrived messages as (identity of the connection, message), those of one connection in order. Never
        waits, and takes in a bounded number, so that a peer that sends without end can't keep the caller."""

    def send(self, identity: bytes, data: bytes) -> None:
        """Send to the newest connection with that identity; drop `data` without one, or if too much waits for it."""

    def close(self) -> None: ...


class ControlChannel(Protocol):
    """A reader's connection to one writer."""

    def send(self, data: bytes) -> None: ...

    def receive(self) -> bytes | None:
        """Return the next message that has arrived, or None. Never waits."""

    def cut(self) -> bool:
        """Return whether the connection was cut since the last call. The channel connects again by itself, and what is
        sent meanwhile waits."""

    @property
    def up(self) -> bool:
        """Whether there is a connection now."""

    def close(self) -> None: ...


class PeerWatch(Protocol):
    """Watches all processes of a worker."""

    pid: int
    """The pid of the first process."""

    @property
    def dead(self) -> bool:
        """Whether all processes have ended for certain."""

    def close(self) -> None: ...


class ControlTransport(Protocol):
    """One worker's access to its peers: control connections, and watches on their processes."""

    def mine(self) -> ProcessIdentity:
        """Return the identity of this process, as peers are told it."""

    def listen(self) -> ControlInbox: ...

    def connect(self, endpoint: str, identity: bytes) -> ControlChannel:
        """Connect to the inbox at `endpoint` as `identity`. Never fails: where nobody answers, no message arrives."""

    def watch(self, processes: Sequence[ProcessIdentity]) -> PeerWatch | None:
        """Watch all processes of a peer; None where one of them can't be watched from here. Raises `ProcessLookupError`
        when all are dead already, and `WireError` for an identity that no process can have."""
