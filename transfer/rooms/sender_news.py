"""The sender's peers and what becomes of them, as values: all that rooms know of readers."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.ids import Incarnation, WorkerName
from contracts.messages.router_commands import PeerRef
from transfer.net.control_channel import PeerWatch
from transfer.planes.data_plane import WriteLink
from transfer.rooms import room_messages as m
from transfer.rooms.early_grants import EarlyGrants
from transfer.rooms.promised_places import PromisedPlaces
from transfer.rooms.write_queue import WriteQueue

ReaderMessage = m.PageGrant | m.AbortRoom | m.HandoverReceived


@dataclass(eq=False)
class SenderPeer:
    """A reader that was welcomed, with what is kept for it until it is lost."""

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
    """Since when it could not be reached."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer is dead, out of reach, or another one has taken its place. Nothing is written to it any more."""

    peer: SenderPeer
    reason: str


@dataclass(frozen=True, slots=True)
class MessageHeard:
    """A peer says something about a room."""

    peer: SenderPeer
    message: ReaderMessage


@dataclass(frozen=True, slots=True)
class StrangerAborted:
    """Somebody who is no peer, or none any more, gives a room up."""

    identity: bytes
    abort: m.AbortRoom


@dataclass(frozen=True, slots=True)
class MessageUnusable:
    """A message that changes nothing; its sender is still to be told."""

    identity: bytes
    room: str
    """The room that it was about; empty where that isn't known."""
    reason: str


SenderNews = PeerLost | MessageHeard | StrangerAborted | MessageUnusable


def identity_of(ref: PeerRef) -> bytes:
    """By which a worker's connection is known."""
    return f"{ref.name}:{ref.incarnation}".encode(errors="replace")
