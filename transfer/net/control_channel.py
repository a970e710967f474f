"""What rooms ask of whatever carries their control messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

ProcessIdentity = tuple[int, int, str]
"""A process as `process.mine` names it: pid, start ticks, namespace."""


class ControlInbox(Protocol):
    """Where readers connect to a writer."""

    endpoint: str
    """By which they find it."""

    def receive(self) -> list[tuple[bytes, bytes]]:
        """What has come: identity of the connection, and message. Never waits, and takes so much at a time that nobody
        who sends without end keeps its caller."""

    def send(self, identity: bytes, data: bytes) -> None:
        """To the newest connection of that identity; to nobody where there is none."""

    def close(self) -> None: ...


class ControlChannel(Protocol):
    """A reader's connection to one writer."""

    def send(self, data: bytes) -> None: ...

    def receive(self) -> bytes | None:
        """The next message that has come, or None. Never waits."""

    def cut(self) -> bool:
        """Whether it was cut since the last call. It connects again by itself, and what is sent meanwhile waits."""

    @property
    def up(self) -> bool:
        """Whether there is a connection now."""

    def close(self) -> None: ...


class PeerWatch(Protocol):
    """Watches all processes of a worker."""

    pid: int
    """Of the first of them."""

    @property
    def dead(self) -> bool:
        """Whether all of them have ended for certain."""

    def close(self) -> None: ...


class ControlTransport(Protocol):
    """One worker's way to its peers."""

    def mine(self) -> ProcessIdentity:
        """This process, as peers are told of it."""

    def listen(self) -> ControlInbox: ...

    def connect(self, endpoint: str, identity: bytes) -> ControlChannel:
        """Never fails: where nobody answers, nothing comes."""

    def watch(self, processes: Sequence[ProcessIdentity]) -> PeerWatch | None:
        """None for processes that can't be watched from here. Raises `ProcessLookupError` when all are dead already,
        and `WireError` for what can't be processes."""
