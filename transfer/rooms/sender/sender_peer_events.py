"""The sender's peers, and the events by which rooms learn of their messages and losses."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.net.control_channel import PeerWatch
from twinpool.transfer.planes.data_plane import WriteLink
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.sender.early_grants import EarlyGrants
from twinpool.transfer.rooms.sender.promised_places import PromisedPlaces
from twinpool.transfer.rooms.sender.write_queue import WriteQueue

ReaderMessage = m.PageGrant | m.AbortRoom | m.HandoverReceived


@dataclass(eq=False)
class SenderPeer:
    """A reader that was welcomed, and all that is kept for it until it is lost."""

    identity: bytes
    name: WorkerName
    incarnation: Incarnation
    link: WriteLink
    watch: PeerWatch | None
    hello: m.Hello
    writes: WriteQueue
    promised: PromisedPlaces
    early: EarlyGrants = field(default_factory=EarlyGrants)
    down_since: float | None = None
    """Since when the peer can't be reached, by the clock; None while it can."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer is dead, out of reach, or was replaced by a newer one. Nothing is written to it any more."""

    peer: SenderPeer
    reason: str


@dataclass(frozen=True, slots=True)
class MessageHeard:
    """A message of a peer about a room."""

    peer: SenderPeer
    message: ReaderMessage


@dataclass(frozen=True, slots=True)
class StrangerAborted:
    """A worker that is no peer, or none any more, gives a room up."""

    identity: bytes
    abort: m.AbortRoom


@dataclass(frozen=True, slots=True)
class MessageInvalid:
    """A message that can't be used and has changed nothing; its sender is still to be told."""

    identity: bytes
    room: str
    """The room that the message was about; empty where that isn't known."""
    reason: str


SenderPeerEvent = PeerLost | MessageHeard | StrangerAborted | MessageInvalid


def identity_of(ref: PeerRef) -> bytes:
    """Return the identity of a worker's control connection: its name and incarnation."""
    return f"{ref.name}:{ref.incarnation}".encode(errors="replace")
