"""The receiver's peers, and the events by which rooms learn of their messages and losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.net.control_channel import ControlChannel, PeerWatch
from twinpool.transfer.rooms import room_messages as m

WriterMessage = m.PageGrant | m.AbortRoom | m.HandoverReceived
PeerKey = tuple[WorkerName, Incarnation]


@dataclass(eq=False)
class ReceiverPeer:
    """A writer that this worker has said hello to."""

    ref: PeerRef
    channel: ControlChannel
    deadline: float
    """Until when the peer must answer the hello, by the clock."""
    welcome: m.Welcome | None = None
    watch: PeerWatch | None = None
    estranged: bool = False
    """The peer refused this worker, never answered, or was replaced: it is kept only for its rooms in quarantine."""
    queued: dict[RoomId, WriterMessage] = field(default_factory=dict)
    """Messages that are sent after its welcome: the latest of each room."""
    down_since: float | None = None
    """Since when there has been no connection to it, after there was one, by the clock."""
    access: int = 1
    """Number of the access to this worker's memory that it has: a new one after each that was ended."""

    @property
    def key(self) -> PeerKey:
        return self.ref.name, self.ref.incarnation

    @property
    def awaited(self) -> bool:
        """Whether the peer has still to welcome this worker."""
        return self.welcome is None and not self.estranged


@dataclass(frozen=True, slots=True)
class PeerDied:
    """The peer can't write any more, and is forgotten: its death is proven, or its access has been ended."""

    peer: ReceiverPeer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerParted:
    """There is no hand-over with this peer for now; but it may well live, and still write the places it was promised.

    It is kept until the last of its rooms has ended.
    """

    peer: ReceiverPeer
    reason: str


@dataclass(frozen=True, slots=True)
class PeerUnreachable:
    """There has been no connection to the peer for too long. It may still write the places that it was promised."""

    peer: ReceiverPeer
    reason: str
    long: bool
    """Whether it was so long that the peer may be forgotten, unless it has rooms."""


@dataclass(frozen=True, slots=True)
class PeerCut:
    """The connection to the peer was cut: the latest messages about rooms may be lost."""

    peer: ReceiverPeer


@dataclass(frozen=True, slots=True)
class GrantsLeft:
    """Grants that waited for a peer's welcome have been sent."""

    rooms: tuple[RoomId, ...]


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """The peer couldn't use one message of this worker. `room`: the one that it was about; empty where unknown."""

    peer: ReceiverPeer
    room: RoomId
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeHeard:
    """A notice about a room that came over the peer's control connection."""

    peer: ReceiverPeer
    notice: m.WriterQuiesced | m.RoomFailed


@dataclass(frozen=True, slots=True)
class MessageUnusable:
    """A message of the peer that can't be used and has changed nothing."""

    peer: ReceiverPeer
    error: WireError


PeerGone = PeerDied | PeerParted
ReceiverPeerEvent = PeerGone | PeerUnreachable | PeerCut | GrantsLeft | MessageRefused | NoticeHeard | MessageUnusable
