"""The receiver's peers: the writers that it said hello to, and whether they can still be reached.

This part knows nothing of rooms. Messages about rooms, and changes of a peer, come out of it as events, which the KV
receiver (`kv_receiver.py`) applies to rooms. A peer counts as dead only when its death is proven: silence ends nothing
that it may still write (hazard A5).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from twinpool.cache.memory.page_moves import describe_spec
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.fingerprint import mismatch
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.net.control_channel import ControlChannel, PeerWatch
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.peers import PeerTable, RoomEnd

log = logging.getLogger("twinpool.transfer")
_AT_ONCE = 256
"""Messages of one peer that one `hear` takes in at most."""

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


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer that was said hello to, and the older incarnations whose place it takes."""

    peer: ReceiverPeer
    gone: tuple[PeerGone, ...]


class ReceiverPeers(PeerTable[PeerKey, ReceiverPeer]):
    """Peers by name and incarnation."""

    def __init__(self, end: RoomEnd) -> None:
        super().__init__()
        self._end, self._config, self._clock = end, end.config, end.clock

    # ------------------------------------------------------------ peers that come

    def connect(self, ref: PeerRef) -> Connected:
        """Say hello to a peer, unless it was done before and the peer isn't estranged."""
        peer = self._peers.get((ref.name, ref.incarnation))
        if peer is not None and not peer.estranged:
            return Connected(peer, ())
        deadline = self._clock.now() + self._config.connect_timeout_s
        if peer is not None:
            # The peer is known for its rooms in quarantine, and keeps them. Perhaps it welcomes this worker now.
            peer.estranged, peer.welcome, peer.deadline = False, None, deadline
        else:
            channel = self._end.transport.connect(ref.control, f"{self._end.name}:{self._end.incarnation}".encode())
            peer = self._peers[ref.name, ref.incarnation] = ReceiverPeer(ref, channel, deadline)
        peer.channel.send(m.encode(self.hello(ref)))
        # A worker has one live incarnation: what an older one still owed is lost. The places that it may still write
        # aren't free for that: an old incarnation that lives, somewhere, keeps them until it says that it writes no
        # more, or its death is proven.
        gone, reason = list[PeerGone](), f"{ref.name} is now incarnation {ref.incarnation}"
        for (name, incarnation), old in list(self._peers.items()):
            if name != ref.name or incarnation >= ref.incarnation:
                continue
            if old.watch is not None and (old.watch.dead or self._ended.closed(name, incarnation)):
                gone.append(self._forget_dead(old, reason))
            elif old.watch is None:
                gone.append(self._part(old, reason))
        return Connected(peer, tuple(gone))

    def hello(self, ref: PeerRef) -> m.Hello:
        return m.Hello(
            self._end.name,
            self._end.incarnation,
            ref.incarnation,
            self._end.fingerprint,
            describe_spec(self._end.pools.spec.whole),
            self._end.plane.kind,
            self._end.plane.describe(_writer(ref)),
            *self._end.transport.mine(),
        )

    def late(self) -> list[PeerParted]:
        """Part with the peers that did not answer the hello in time."""
        late = [p for p in self._peers.values() if p.awaited and self._clock.now() >= p.deadline]
        reason = f"did not answer within {self._config.connect_timeout_s:g} s"
        return [self._part(peer, f"{peer.ref.name} {reason}") for peer in late]

    @property
    def next_deadline(self) -> float | None:
        """When the next peer is late with its answer, by the clock."""
        return min((p.deadline for p in self._peers.values() if p.awaited), default=None)

    # ------------------------------------------------------------ messages

    def send(self, peer: ReceiverPeer, message: WriterMessage) -> bool:
        """Send a message, and return whether it has left: until a peer's welcome the latest one of each room waits."""
        if peer.awaited:
            peer.queued[message.room] = message
            return False
        peer.channel.send(m.encode(message))
        return True

    def withdraw_grant(self, peer: ReceiverPeer, room: RoomId) -> None:
        """Drop the grant of `room` if it still waits for the peer's welcome."""
        if isinstance(peer.queued.get(room), m.PageGrant):
            del peer.queued[room]

    def hear(self, peer: ReceiverPeer) -> Iterator[ReceiverPeerEvent]:
        """Yield the messages of a peer, and then the changes of its state, as events: each is looked at after the
        caller has applied those before."""
        for _ in range(_AT_ONCE):
            data = peer.channel.receive()
            if data is None:
                break
            try:
                event = self._said(peer, m.decode(data))
            except WireError as error:
                event = MessageUnusable(peer, error)
            if event is not None:
                yield event
            if self._peers.get(peer.key) is not peer:
                return  # The peer was forgotten meanwhile.
        if peer.watch is not None and peer.watch.dead:
            yield self._forget_dead(peer, f"{peer.ref.name} (pid {peer.watch.pid}) died")
            return
        if self._ended.ends(*peer.key, peer.watch is not None):
            # One on another host may live and write; but its access is ended with it, room by room or as a whole.
            yield self._forget_dead(peer, self._ended.reason(*peer.key))
            return
        if peer.channel.cut():
            log.warning("the connection to %s was cut", peer.ref.name)
            if peer.awaited:
                peer.channel.send(m.encode(self.hello(peer.ref)))
            else:
                yield PeerCut(peer)
        yield from self._unreachable(peer)

    def _said(self, peer: ReceiverPeer, message: m.RoomMessage) -> ReceiverPeerEvent | None:
        """Return the event of a message, if any. Raises `WireError` for one not for decode; then nothing changed."""
        if isinstance(message, m.Welcome):
            return self._welcomed(peer, message)
        if isinstance(message, m.PeerRefused):
            return self._part(peer, f"{peer.ref.name} refused the hand-over: {message.reason:.500}")
        if isinstance(message, m.MessageRejected):
            if peer.welcome is None:
                return self._part(peer, f"{peer.ref.name} refused the hand-over: {message.reason:.500}")
            return MessageRefused(peer, RoomId(message.room), message.reason)
        if isinstance(message, m.WriterQuiesced | m.RoomFailed):
            return NoticeHeard(peer, message)
        raise WireError(f"{type(message).__name__} is not for decode")

    def _welcomed(self, peer: ReceiverPeer, welcome: m.Welcome) -> ReceiverPeerEvent | None:
        if not peer.awaited:
            return None  # Said again, as the hello was, or too late.
        name = peer.ref.name
        if welcome.incarnation != peer.ref.incarnation:
            return self._part(peer, f"{name} is incarnation {welcome.incarnation}, not {peer.ref.incarnation}")
        reason = mismatch(self._end.fingerprint, welcome.fingerprint, self._end.name, name)
        if reason is not None:
            return self._part(peer, reason)
        try:
            others = [(other.pid, other.started, other.boot) for other in welcome.others]
            watch = self._end.transport.watch([(welcome.pid, welcome.started, welcome.boot), *others])
        except ProcessLookupError:
            return self._part(peer, f"{name} (pid {welcome.pid}) died")
        except WireError as error:
            return self._part(peer, f"{name}: {error}")
        if watch is None and not (self._end.plane.revocable or self._end.plane.by_peer):
            # Its death could never be proven, and places that it was promised might never come back.
            return self._part(peer, f"plane {self._end.plane.kind}: the processes of {name} can't be watched from here")
        if peer.watch is not None:
            peer.watch.close()
        peer.welcome, peer.watch = welcome, watch
        queued, peer.queued = peer.queued, {}
        for message in queued.values():
            self.send(peer, message)
        return GrantsLeft(tuple(room for room, message in queued.items() if isinstance(message, m.PageGrant)))

    # ------------------------------------------------------------ peers that go

    def _unreachable(self, peer: ReceiverPeer) -> Iterator[PeerUnreachable]:
        """Yield an event where a peer could not be reached for `transfer.link_timeout_s`."""
        if peer.welcome is None or peer.channel.up:
            peer.down_since = None
            return
        now, limit = self._clock.now(), self._config.link_timeout_s
        peer.down_since = now if peer.down_since is None else peer.down_since
        down = now - peer.down_since
        if down >= limit:
            reason = f"the connection to {peer.ref.name} was cut, and not back after {limit:g} s"
            yield PeerUnreachable(peer, reason, down >= self._config.peer_forget_s)

    def sever(self, peer: ReceiverPeer, reason: str) -> PeerParted:
        """End a peer's access, where access is by peer, and part with it: it is said hello to with a new one. A peer of
        this host that lives may go on storing by itself."""
        self._end.plane.sever(_writer(peer.ref))
        peer.access += 1
        return self._part(peer, reason)

    def _part(self, peer: ReceiverPeer, reason: str) -> PeerParted:
        peer.estranged, peer.queued = True, {}
        return PeerParted(peer, reason)

    def _forget_dead(self, peer: ReceiverPeer, reason: str) -> PeerDied:
        self.forget(peer)
        return PeerDied(peer, reason)

    def forget(self, peer: ReceiverPeer) -> None:
        """Forget a peer. Where access is by peer, its access has ended when this returns."""
        if self._peers.get(peer.key) is not peer:
            return
        if self._end.plane.by_peer:
            self._end.plane.sever(_writer(peer.ref))
        self._close(peer)

    def _close(self, peer: ReceiverPeer) -> None:
        del self._peers[peer.key]
        peer.channel.close()
        if peer.watch is not None:
            peer.watch.close()

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._close(peer)


def _writer(ref: PeerRef) -> str:
    """Return the name by which a data plane knows a writer."""
    return f"{ref.name}:{ref.incarnation}"
