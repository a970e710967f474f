"""The sender's peers: the readers that said hello, and whether they can still be reached.

What is kept for a reader is a `SenderPeer`: its link and writes, the places that its rooms may still write
(`PromisedPlaces`), and grants for requests that haven't come yet (`EarlyGrants`): decode may hear of a request first,
grant its room, and even give it up, before the router's message reaches prefill.

This part knows nothing of rooms. Messages about rooms, and losses of peers, come out of it as events, which the KV
sender (`transfer/rooms/sender/kv_sender.py`) applies to rooms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from twinpool.cache.memory.page_moves import describe_spec
from twinpool.contracts.errors import LayoutMismatch, WireError
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.net.control_channel import PeerWatch, ProcessIdentity
from twinpool.transfer.planes.data_plane import RoomTarget, WriteLink
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.peers import PeerTable, RoomEnd, refuse_mismatch
from twinpool.transfer.rooms.sender.write_queue import WriteQueue

_NAME_BYTES = 256
_SWEEP_S = 1.0
_EARLY = 4096
"""Grants and aborts of one peer that are kept for requests which have not come yet."""
_EARLY_PLACES = 2**20
"""Places that the early grants of one peer may name, together."""
_MAX_POSITIONS = 2**40

ReaderMessage = m.PageGrant | m.AbortRoom | m.HandoverReceived


class EarlyGrants:
    """Grants of one reader, oldest first, and the rooms that it gave up before their requests came."""

    def __init__(self) -> None:
        self.grants: OrderedDict[RoomId, m.PageGrant] = OrderedDict()
        self.places = 0
        """Number of places that the grants name, together."""
        self.given_up: OrderedDict[RoomId, None] = OrderedDict()

    def take(self, room: RoomId) -> m.PageGrant | None:
        """Remove and return the grant of `room`; None where there is none."""
        grant = self.grants.pop(room, None)
        if grant is not None:
            self.places -= _places(grant)
        return grant

    def keep(self, grant: m.PageGrant) -> list[m.PageGrant]:
        """Keep `grant`, in place of an older one of its room. Returns the oldest, dropped where there are too many."""
        self.take(grant.room)
        self.grants[grant.room] = grant
        self.places += _places(grant)
        dropped = []
        while len(self.grants) > _EARLY or self.places > _EARLY_PLACES:
            oldest = self.grants[next(iter(self.grants))]
            self.take(oldest.room)
            dropped.append(oldest)
        return dropped

    def give_up(self, room: RoomId) -> None:
        """Record that decode gave `room` up: it is not to be opened any more."""
        self.given_up[room] = None
        while len(self.given_up) > _EARLY:
            self.given_up.popitem(last=False)


def _places(grant: m.PageGrant) -> int:
    return sum(len(place.indices) for place in grant.places)


class PromisedPlaces:
    """The promised places of one reader, by pool. On a revocable plane nothing is promised: it takes places back."""

    def __init__(self, pools: Collection[str], revocable: bool) -> None:
        """`pools`: the names of the pools. `revocable`: whether the reader can take its places back."""
        self._pools, self._revocable = pools, revocable
        self.places: dict[str, set[int]] = {}

    def check(self, grant: m.PageGrant) -> None:
        """Check a grant. Raises `WireError` for impossible or already promised places, or without slot or ticket."""
        if len({place.pool for place in grant.places}) != len(grant.places):
            raise WireError(f"room {grant.room} was granted places of one pool twice")
        for place in grant.places:
            if place.pool not in self._pools:
                raise WireError(
                    f"room {grant.room} was granted places of {place.pool!r:.80}, not {sorted(self._pools)}"
                )
            indices = set(place.indices)
            fit = 0 < len(indices) == len(place.indices) == len(place.epochs) and min(indices) > 0
            if not fit or not 0 <= place.first < _MAX_POSITIONS:
                raise WireError(f"room {grant.room} was granted places of {place.pool} that can't be: {place!r:.200}")
            if not indices.isdisjoint(self.places.get(place.pool, ())):
                raise WireError(f"room {grant.room} was granted places of {place.pool} that another room has")
        if grant.ticket <= 0 or grant.slot < 0:
            raise WireError(f"room {grant.room} was granted without a slot, or without a ticket")

    def promise(self, target: RoomTarget) -> None:
        """Record that a room may write to `target` from now on."""
        if not self._revocable:
            for pool, run in target.runs.items():
                self.places.setdefault(pool, set()).update(run.indices)

    def take_back(self, target: RoomTarget) -> None:
        """Forget the places of `target`: nothing more is posted to it. Posted writes are complete before the reader
        hears that it may use the places again."""
        for pool, run in target.runs.items():
            self.places.get(pool, set()).difference_update(run.indices)


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

    @property
    def known(self) -> tuple[WorkerName, Incarnation]:
        return self.name, self.incarnation


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


class SenderPeers(PeerTable[bytes, SenderPeer]):
    """Peers by identity, and the inbox that they send to."""

    def __init__(self, end: RoomEnd, others: Sequence[ProcessIdentity]) -> None:
        """`others`: the processes of the worker's other ranks."""
        super().__init__()
        self._end, self._config, self._clock = end, end.config, end.clock
        self._others = tuple(m.RankProcess(*other) for other in others)
        self._inbox = end.transport.listen()
        self.control = self._inbox.endpoint
        """Endpoint of the inbox, for peers."""
        self._swept = end.clock.now()

    @property
    def writing(self) -> bool:
        """Whether a write to any peer is under way, or a last word waits."""
        return any(len(peer.writes) for peer in self._peers.values())

    # ------------------------------------------------------------ messages

    def hear(self) -> Iterator[SenderPeerEvent]:
        """Yield the events of arrived messages: each message is looked at after the caller has applied those before."""
        for identity, data in self._inbox.receive():
            try:
                yield from self._said(identity, m.decode(data))
            except (WireError, LayoutMismatch) as error:
                yield MessageInvalid(identity, m.room_of(data), m.reason_of(error))

    def reply(self, identity: bytes, message: m.ControlMessage | m.WriterQuiesced) -> None:
        self._inbox.send(identity, m.encode(message))

    def reject(self, identity: bytes, room: str, reason: str) -> None:
        """Reject one message, and nothing else: rooms that its sender has granted go on, or end by its own messages.

        A sender that is no peer is told so. It has no rooms here, or none any more.
        """
        known = identity in self._peers
        self.reply(identity, m.MessageRejected(reason, room) if known else m.PeerRefused(reason))

    def _said(self, identity: bytes, message: m.RoomMessage) -> Sequence[SenderPeerEvent]:
        """Return the events of a message. Raises `WireError` or `LayoutMismatch` for one that can't be used; nothing
        has changed then."""
        if isinstance(message, m.Hello):
            return self._hello(identity, message)
        peer = self._peers.get(identity)
        if peer is None:
            if isinstance(message, m.AbortRoom):
                return [StrangerAborted(identity, message)]
            self.reply(identity, m.PeerRefused("say hello first"))
            return []
        if not isinstance(message, m.PageGrant | m.AbortRoom | m.HandoverReceived):
            raise WireError(f"{type(message).__name__} is not for prefill")
        return [MessageHeard(peer, message)]

    # ------------------------------------------------------------ peers that come

    def _hello(self, identity: bytes, hello: m.Hello) -> list[PeerLost]:
        """Welcome a reader that fits and can be reached. Returns the peers whose place it has taken."""
        layout = describe_spec(self._end.pools.spec.whole)
        refuse_mismatch(self._end.name, self._end.fingerprint, layout, self._end.plane.kind, hello)
        if hello.expects != self._end.incarnation:
            raise LayoutMismatch(f"{self._end.name} is incarnation {self._end.incarnation}, not {hello.expects}")
        ref = PeerRef(WorkerName(hello.worker), Incarnation(hello.incarnation), "")
        if identity != identity_of(ref) or not 0 < len(identity) <= _NAME_BYTES:
            raise WireError(f"{hello.worker:.80} incarnation {hello.incarnation} speaks as {identity!r:.80}")
        known = self._peers.get(identity)
        if known is not None and known.hello == hello:
            self._welcome(identity)  # Sent again, as the welcome may have been lost: its rooms go on.
            return []
        others = [p for p in self._peers.values() if p.name == hello.worker and p is not known]
        for old in others:
            if old.incarnation > hello.incarnation:
                raise LayoutMismatch(f"{hello.worker} is incarnation {old.incarnation} by now, not {hello.incarnation}")
        if known is None and len(self._peers) - len(others) >= self._config.max_peers:
            raise LayoutMismatch(f"{self._end.name} has {len(self._peers)} peers already (transfer.max_peers)")
        peer = self._meet(identity, ref, hello)
        # Only now, as a reader that can't be reached must not take a peer's place.
        lost = [self.lose(old, f"{old.name} is now incarnation {hello.incarnation}") for old in others]
        if known is not None:
            lost.append(self.lose(known, f"{hello.worker} connected again"))
        self._peers[identity] = peer
        self._welcome(identity)
        return lost

    def _meet(self, identity: bytes, ref: PeerRef, hello: m.Hello) -> SenderPeer:
        """Connect to a reader. Raises `LayoutMismatch` where its memory can't be reached, or its process is dead."""
        link = self._end.plane.connect(hello.descriptor)
        try:
            watch = self._end.transport.watch([(hello.pid, hello.started, hello.boot)])
        except (ProcessLookupError, WireError) as error:
            link.close()
            raise LayoutMismatch(f"{hello.worker}: {error}") from None
        max_bytes = self._config.in_flight_bytes
        writes = WriteQueue(ref.name, link, self._end.pools, self._end.device, self._clock, max_bytes)
        promised = PromisedPlaces(self._end.pools.spec.by_name, self._end.plane.revocable)
        return SenderPeer(identity, ref.name, ref.incarnation, link, watch, hello, writes, promised)

    def _welcome(self, identity: bytes) -> None:
        process = self._end.transport.mine()
        end = self._end
        self.reply(identity, m.Welcome(end.name, end.incarnation, end.fingerprint, *process, self._others))

    # ------------------------------------------------------------ peers that go

    def lose(self, peer: SenderPeer, reason: str) -> PeerLost:
        """End what is being written to `peer`, wait until that is over, and forget it."""
        _disconnect(peer)
        del self._peers[peer.identity]
        return PeerLost(peer, reason)

    def dead(self) -> list[PeerLost]:
        """Lose the peers whose death is proven by now, and those on other hosts, or closed, that have ended for the
        controller."""
        dead = [p for p in self._peers.values() if p.watch is not None and p.watch.dead]
        ended = [p for p in self._peers.values() if p not in dead and self._ended.ends(*p.known, p.watch is not None)]
        lost = [self.lose(peer, f"{peer.name} died") for peer in dead]
        return lost + [self.lose(peer, self._ended.reason(*peer.known)) for peer in ended]

    def disconnected(self) -> list[SenderPeer]:
        """Return the peers whose connection was cut since the last call: pages, or notices of them, may be lost."""
        return [p for p in self._peers.values() if p.link.cut()]

    def unreachable(self) -> list[PeerLost]:
        """Lose the peers that could not be reached for `transfer.peer_forget_s`: the death of a peer on another host
        can't be proven, and nothing is written to it through a connection that isn't there."""
        now, lost = self._clock.now(), list[PeerLost]()
        if now - self._swept < _SWEEP_S:
            return lost
        self._swept = now
        for peer in list(self._peers.values()):
            if peer.link.up:
                peer.down_since = None
                continue
            peer.down_since = now if peer.down_since is None else peer.down_since
            if now - peer.down_since >= self._config.peer_forget_s:
                reason = f"{peer.name} could not be reached for {self._config.peer_forget_s:g} s"
                lost.append(self.lose(peer, reason))
        return lost

    def close(self) -> None:
        for peer in self._peers.values():
            _disconnect(peer)
        self._inbox.close()


def _disconnect(peer: SenderPeer) -> None:
    """End what is being written to a peer, and wait until that is over."""
    peer.writes.end()
    peer.link.sever()
    peer.writes.settle()
    peer.link.close()
    peer.writes.close()
    if peer.watch is not None:
        peer.watch.close()
