"""The receiver's peers and what becomes of them, as values: all that rooms know of writers."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.errors import WireError
from contracts.ids import Incarnation, RoomId, WorkerName
from contracts.messages.router_commands import PeerRef
from transfer.net.control_channel import ControlChannel, PeerWatch
from transfer.rooms import room_messages as m

WriterMessage = m.PageGrant | m.AbortRoom | m.HandoverReceived
PeerKey = tuple[WorkerName, Incarnation]


@dataclass(eq=False)
class ReceiverPeer:
    """A writer that was said hello to."""

    ref: PeerRef
    channel: ControlChannel
    deadline: float
    welcome: m.Welcome | None = None
    watch: PeerWatch | None = None
    estranged: bool = False
    """It doesn't know this worker any more, or never answered: only rooms in quarantine keep it in the books."""
    queued: dict[RoomId, WriterMessage] = field(default_factory=dict)
    """What it hears after its welcome: the latest of each room."""
    down_since: float | None = None
    """Since when there has been no connection to it, after there was one."""

    @property
    def key(self) -> PeerKey:
        return self.ref.name, self.ref.incarnation

    @property
    def awaited(self) -> bool:
        """Whether it has still to welcome this worker."""
        return self.welcome is None and not self.estranged


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The peer's death is proven: it can't write any more, and is forgotten."""

    peer: ReceiverPeer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerParted:
    """There is no hand-over with this peer, now; but it may well live, and what it was promised it may still write.

    It stays in the books until the last of its rooms has ended.
    """

    peer: ReceiverPeer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """There has been no connection for too long. What it was promised it may still write."""

    peer: ReceiverPeer
    reason: str
    long: bool
    """So long that it may be forgotten, unless it has rooms."""


@dataclass(frozen=True, slots=True)
class PeerCut:
    """The connection was cut: what was said last about rooms may be lost."""

    peer: ReceiverPeer


@dataclass(frozen=True, slots=True)
class GrantsLeft:
    """Grants that had waited for the welcome have left."""

    rooms: tuple[RoomId, ...]


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """The peer couldn't use one message. It says of which room, if it knows."""

    peer: ReceiverPeer
    room: RoomId
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeHeard:
    """The peer says something about a room."""

    peer: ReceiverPeer
    notice: m.WriterQuiesced | m.RoomFailed


@dataclass(frozen=True, slots=True)
class MessageUnusable:
    """A message of the peer that changes nothing."""

    peer: ReceiverPeer
    error: WireError


PeerGone = PeerDied | PeerParted
ReceiverNews = PeerGone | PeerUnreachable | PeerCut | GrantsLeft | MessageRefused | NoticeHeard | MessageUnusable
