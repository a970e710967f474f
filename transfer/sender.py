"""Prefill's end of the rooms: takes grants, writes pages as chunks finish, seals the hand-over with its metadata.

Grants and aborts may come before the router's own message about the request, and requests may end before decode has
said hello; so early grants are kept until their request comes, and ended rooms are remembered with the last word
about them, which is repeated to whoever asks again.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cache.device import DEVICE, Completion, Device, Op, Stream, spans
from cache.leases import Pin
from cache.moves import describe_spec
from cache.pools import PoolSet
from cache.tags import ContentTag
from contracts.clock import Clock
from contracts.config import TransferConfig
from contracts.errors import ErrorKind, LayoutMismatch, WireError
from contracts.ids import Incarnation, RoomId, WorkerName
from contracts.messages import PeerRef
from transfer import messages as m
from transfer.agreement import refuse_mismatch
from transfer.control import Carrier, Process, Watch
from transfer.metadata import Metadata, pack
from transfer.plane import Link, PageWrite, Plane, Run, SlotWrite, Target
from transfer.rooms import SENDER, Sender, SenderEvent
from transfer.shares import Shares

log = logging.getLogger("twinpool.transfer")
_REMEMBERED = 65536
_WORDS = 256


@dataclass(frozen=True, slots=True)
class Granted:
    """The room's pages can be written from now on."""

    room: RoomId


@dataclass(frozen=True, slots=True)
class Released:
    """The room is over; nothing of its request is needed for it any more."""

    room: RoomId
    received: bool
    """Whether decode has everything."""
    reason: str = ""
    damaged: bool = False
    """What arrived did not match its tags: the fault may be in the pages that were sent."""


Outcome = Granted | Released


@dataclass(frozen=True, slots=True)
class Finished:
    """Pages `first ..` of a sequence in one pool, finished: where they are, and their tags."""

    first: int
    indices: tuple[int, ...]
    tags: tuple[ContentTag, ...]


@dataclass(eq=False)
class _Peer:
    identity: bytes
    name: WorkerName
    incarnation: Incarnation
    link: Link
    watch: Watch | None
    words: deque[RoomId] = field(default_factory=lambda: deque(maxlen=_WORDS))
    """The latest rooms that ended with a word to it."""


@dataclass(eq=False)
class _Room:
    id: RoomId
    wants: PeerRef
    state: Sender = Sender.OPEN
    peer: _Peer | None = None
    grant: m.Grant | None = None
    target: Target | None = None
    shares: Shares = field(default_factory=lambda: Shares({}))
    """What is still to be written."""
    sent_at: float = 0.0
    writes: int = 0
    """Posted so far."""


@dataclass(eq=False)
class _Pending:
    """A posted write, and the notice that may follow once it is complete."""

    completion: Completion
    link: Link
    notice: m.Notice
    pins: tuple[Pin, ...]
    writes: int
    """Writes of its room that the notice comes after."""


class SenderEnd:
    """See the module's prose. Single-threaded; `poll` never blocks."""

    def __init__(
        self,
        name: WorkerName,
        incarnation: Incarnation,
        fingerprint: str,
        plane: Plane,
        pools: PoolSet,
        device: Device,
        config: TransferConfig,
        *,
        carrier: Carrier,
        clock: Clock,
        others: Sequence[Process] = (),
    ) -> None:
        """`others`: the processes of the worker's other ranks."""
        self._others = tuple(m.RankProcess(*other) for other in others)
        self._name, self._incarnation, self._fingerprint = name, incarnation, fingerprint
        self._plane, self._pools, self._device = plane, pools, device
        self._config, self._clock, self._carrier = config, clock, carrier
        self._inbox = carrier.listen()
        self.control = self._inbox.endpoint
        plane.register(pools, None)
        self._peers: dict[bytes, _Peer] = {}
        self._rooms: dict[RoomId, _Room] = {}
        self._early: OrderedDict[RoomId, tuple[_Peer, m.Grant]] = OrderedDict()
        self._ended: OrderedDict[RoomId, m.Notice] = OrderedDict()
        self._pending: list[_Pending] = []
        self._outcomes: list[Outcome] = []
        self.late = 0
        self.sent: Counter[str] = Counter()
        """Bytes posted, by pool."""

    # ------------------------------------------------------------ what prefill asks

    def open(self, room: RoomId, peer: PeerRef) -> None:
        """Raises `WireError` for a room that exists, or was given up by decode before its request came."""
        if room in self._rooms or room in self._ended:
            raise WireError(f"room {room} exists already, or was given up")
        entry = self._rooms[room] = _Room(room, peer)
        early = self._early.pop(room, None)
        if early is not None:
            self._grant(entry, *early)

    def granted(self, room: RoomId) -> bool:
        entry = self._rooms.get(room)
        return entry is not None and entry.state is Sender.GRANTED

    def wanted(self, room: RoomId) -> dict[str, range]:
        """What decode has granted and nobody has written yet, every pool by name; all empty before the grant."""
        entry = self._rooms[room]
        return {pool.name: entry.shares.left(pool.name) for pool in self._pools.spec.pools}

    def write(self, room: RoomId, finished: Mapping[str, Finished], after: Sequence[Completion]) -> None:
        """Write finished state of mine, all pools in one write, after the operations that made it.

        Skipped is what decode didn't ask for and what was written before; the rest of each pool comes in order.
        """
        entry = self._rooms[room]
        assert entry.peer is not None
        assert entry.target is not None
        chosen = {}
        for pool, pages in finished.items():
            left = entry.shares.left(pool)
            start, stop = max(pages.first, left.start), min(pages.first + len(pages.indices), left.stop)
            if start < stop:
                chosen[pool] = slice(start - pages.first, stop - pages.first)
                entry.shares.advance(pool, range(start, stop))
        if not chosen:
            return
        runs = {p: Run(finished[p].first + run.start, tuple(finished[p].indices[run])) for p, run in chosen.items()}
        self._step(entry, SenderEvent.WROTE)
        entry.writes += 1
        parts = [_sealed(pool, runs[pool].first, finished[pool].tags[run]) for pool, run in chosen.items()]
        self._post(
            entry.peer.link,
            PageWrite(entry.target, runs, entry.writes),
            m.Wrote(room, tuple(parts)),
            after,
            entry.writes,
        )
        for pool, indices in runs.items():
            self.sent[pool] += len(indices) * self._pools.spec.whole.unit_bytes(pool)

    def seal(self, room: RoomId, metadata: Metadata) -> None:
        """Everything is written but the metadata: write it, and end the writing.

        Raises `WireError` while something that decode wants is not written.
        """
        entry = self._rooms[room]
        assert entry.peer is not None
        assert entry.grant is not None
        assert entry.target is not None
        if not entry.shares.done:
            raise WireError(f"room {room} can't be sealed: {entry.shares} not written")
        data = pack(replace(metadata, slot_epoch=entry.grant.slot_epoch))
        self._post(entry.peer.link, SlotWrite(entry.target, data), m.WroteSlot(room), (), entry.writes)
        entry.sent_at = self._clock.now()
        self._step(entry, SenderEvent.SENT)

    def finish(self, room: RoomId) -> None:
        """The request ended with its first token."""
        self._end(room, SenderEvent.FINISHED, m.Finished(room))

    def fail(self, room: RoomId, kind: ErrorKind, message: str) -> None:
        """The request is given up here; decode is told. Nothing happens when the room is over."""
        self._end(room, SenderEvent.FAILED, m.Failed(room, kind, message))

    def poll(self) -> list[Outcome]:
        """Hear peers, send due notices, expire; returns what became of rooms."""
        for identity, data in self._inbox.receive():
            try:
                self._control(identity, m.decode(data))
            except (WireError, LayoutMismatch) as error:
                log.warning("control message refused: %s", error)
                self._reply(identity, m.Refused(str(error)))
        for peer in [p for p in self._peers.values() if p.watch is not None and p.watch.dead]:
            self._lose(peer, f"{peer.name} died")
        self._plane.hear()
        for peer in [p for p in self._peers.values() if p.link.cut()]:
            self._cut(peer)
        self._flush()
        self._expire()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def sent_bytes(self) -> int:
        return self.sent.total()

    @property
    def rooms(self) -> int:
        return len(self._rooms)

    @property
    def outgoing(self) -> dict[str, float]:
        """Rooms that have not ended, by who receives them: counters of a worker's status (hazard D2)."""
        return dict(Counter(f"outgoing_to:{room.wants.name}" for room in self._rooms.values()))

    @property
    def unconfirmed(self) -> set[RoomId]:
        """Rooms in which everything was sent and decode has not said yet that it has it."""
        return {r.id for r in self._rooms.values() if r.state is Sender.SENT}

    @property
    def next_deadline(self) -> float | None:
        due = [r.sent_at + self._config.room_timeout_s for r in self._rooms.values() if r.state is Sender.SENT]
        return min(due, default=None)

    def check(self) -> list[str]:
        found = [f"room {room}: early grant and open" for room in self._early if room in self._rooms]
        for room in self._rooms.values():
            if (room.state is Sender.OPEN) != (room.grant is None):
                found.append(f"room {room.id} is {room.state} and its grant says otherwise")
            if room.peer is not None and self._peers.get(room.peer.identity) is not room.peer:
                found.append(f"room {room.id} belongs to a peer that is gone")
        return found

    def close(self) -> None:
        for pending in self._pending:
            pending.completion.wait()
        self._pending.clear()
        for peer in self._peers.values():
            self._disconnect(peer)
        self._inbox.close()
        self._plane.close()

    # ------------------------------------------------------------ peers

    def _control(self, identity: bytes, message: m.Message) -> None:
        if isinstance(message, m.Hello):
            self._hello(identity, message)
            return
        peer = self._peers.get(identity)
        if peer is None:
            self._reply(identity, m.Refused("say hello first"))
        elif isinstance(message, m.Grant):
            self._granted(peer, message)
        elif isinstance(message, m.Abort):
            self._aborted(peer, message)
        elif isinstance(message, m.Received):
            room = self._rooms.get(message.room)
            if room is None or room.state is not Sender.SENT:
                self.late += 1
            else:
                self._step(room, SenderEvent.RECEIVED)
                self._outcomes.append(Released(room.id, True))
        else:
            raise WireError(f"{type(message).__name__} is not for prefill")

    def _hello(self, identity: bytes, hello: m.Hello) -> None:
        mine = {"model": self._fingerprint, **describe_spec(self._pools.spec.whole)}
        refuse_mismatch(self._name, mine, self._plane.kind, hello)
        if hello.expects != self._incarnation:
            raise LayoutMismatch(f"{self._name} is incarnation {self._incarnation}, not {hello.expects}")
        for old in [p for p in self._peers.values() if p.name == hello.worker and p.identity != identity]:
            if old.incarnation > hello.incarnation:
                raise LayoutMismatch(f"{hello.worker} is incarnation {old.incarnation} by now, not {hello.incarnation}")
            self._lose(old, f"{old.name} is now incarnation {hello.incarnation}")
        if identity in self._peers:
            self._lose(self._peers[identity], f"{hello.worker} connected again")
        link = self._plane.connect(hello.descriptor)
        try:
            watch = self._carrier.watch([(hello.pid, hello.started, hello.boot)])
        except ProcessLookupError:
            link.close()
            return
        self._peers[identity] = _Peer(identity, WorkerName(hello.worker), Incarnation(hello.incarnation), link, watch)
        self._reply(identity, m.Welcome(self._name, self._incarnation, *self._carrier.mine(), self._others))

    def _lose(self, peer: _Peer, reason: str) -> None:
        """The peer is dead, or another one has taken its place: its rooms are over."""
        del self._peers[peer.identity]
        self._settle(peer.link)
        self._disconnect(peer)
        self._early = OrderedDict((r, e) for r, e in self._early.items() if e[0] is not peer)
        for room in [r for r in self._rooms.values() if r.peer is peer]:
            self._remember(room.id, m.Failed(room.id, ErrorKind.ROOM, reason))
            self._step(room, SenderEvent.LOST)
            self._outcomes.append(Released(room.id, False, reason))

    def _cut(self, peer: _Peer) -> None:
        """The connection was cut: pages, or the word of them, may be lost. Rooms of which something was sent are given
        up, and last words said again; a room that has not begun goes on."""
        reason = f"the connection to {peer.name} was cut"
        log.warning(reason)
        for word in list(peer.words):
            if word in self._ended:
                peer.link.notify(word, m.encode(self._ended[word]))
        for room in [r for r in self._rooms.values() if r.peer is peer and (r.writes or r.state is Sender.SENT)]:
            self._end(room.id, SenderEvent.FAILED, m.Failed(room.id, ErrorKind.ROOM, reason))
            self._outcomes.append(Released(room.id, False, reason))

    def _disconnect(self, peer: _Peer) -> None:
        peer.link.close()
        if peer.watch is not None:
            peer.watch.close()

    def _reply(self, identity: bytes, message: m.Control) -> None:
        self._inbox.send(identity, m.encode(message))

    # ------------------------------------------------------------ rooms

    def _granted(self, peer: _Peer, grant: m.Grant) -> None:
        self._runs(grant)
        last_word = self._ended.get(grant.room)
        room = self._rooms.get(grant.room)
        if last_word is not None:
            peer.link.notify(last_word.room, m.encode(last_word))
        elif room is None:
            self._early[grant.room] = (peer, grant)
            while len(self._early) > _REMEMBERED:
                self._early.popitem(last=False)
        elif room.state is Sender.OPEN:
            self._grant(room, peer, grant)
        elif room.grant != grant:
            raise WireError(f"room {grant.room} was granted twice")

    def _grant(self, room: _Room, peer: _Peer, grant: m.Grant) -> None:
        if (peer.name, peer.incarnation) != (room.wants.name, room.wants.incarnation):
            reason = (
                f"room {room.id} is for {room.wants.name} incarnation {room.wants.incarnation}, "
                f"granted by {peer.name} incarnation {peer.incarnation}"
            )
            self._remember(room.id, m.Failed(room.id, ErrorKind.ROOM, reason))
            self._step(room, SenderEvent.LOST)
            peer.link.notify(room.id, m.encode(self._ended[room.id]))
            self._outcomes.append(Released(room.id, False, reason))
            return
        runs = self._runs(grant)
        room.peer, room.grant, room.target = peer, grant, Target(room.id, runs, grant.slot)
        room.shares = Shares({pool: run.numbers for pool, run in runs.items()})
        self._step(room, SenderEvent.GRANT)
        self._outcomes.append(Granted(room.id))

    def _runs(self, grant: m.Grant) -> dict[str, Run]:
        """Raises `WireError` for places that no pool here has."""
        pools = self._pools.spec.by_name
        if len({place.pool for place in grant.places}) != len(grant.places):
            raise WireError(f"room {grant.room} was granted places of one pool twice")
        for place in grant.places:
            if place.pool not in pools:
                raise WireError(f"room {grant.room} was granted places of {place.pool!r}, pools are {sorted(pools)}")
            fit = 0 < len(place.indices) == len(place.epochs) and min(place.indices) > 0 and place.first >= 0
            if not fit:
                raise WireError(f"room {grant.room} was granted places of {place.pool} that can't be: {place}")
        return {place.pool: Run(place.first, place.indices) for place in grant.places}

    def _aborted(self, peer: _Peer, abort: m.Abort) -> None:
        """Writes are complete when they return here, or are waited for; so the answer can follow at once."""
        self._settle(peer.link)
        self._early.pop(abort.room, None)
        room = self._rooms.get(abort.room)
        if room is not None:
            self._remember(room.id, m.Quiesced(room.id))
            self._step(room, SenderEvent.ABORT)
            reason = f"decode gave it up: {abort.reason}"
            self._outcomes.append(Released(room.id, False, reason, abort.damaged))
        else:
            self._remember(abort.room, m.Quiesced(abort.room))
        peer.words.append(abort.room)
        peer.link.notify(abort.room, m.encode(m.Quiesced(abort.room)))

    def _end(self, room_id: RoomId, event: SenderEvent, notice: m.Notice) -> None:
        room = self._rooms.get(room_id)
        if room is None:
            return
        self._remember(room.id, notice)
        self._step(room, event)
        peer = room.peer or self._peer_of(room.wants)
        if peer is not None:
            self._settle(peer.link)
            peer.words.append(notice.room)
            peer.link.notify(notice.room, m.encode(notice))

    def _peer_of(self, ref: PeerRef) -> _Peer | None:
        wanted = (ref.name, ref.incarnation)
        return next((p for p in self._peers.values() if (p.name, p.incarnation) == wanted), None)

    def _remember(self, room: RoomId, notice: m.Notice) -> None:
        self._ended[room] = notice
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _step(self, room: _Room, event: SenderEvent) -> None:
        """The one place where a room changes state."""
        room.state = SENDER.next(room.state, event)
        if SENDER.terminal(room.state):
            del self._rooms[room.id]
            if room.id not in self._ended:
                self._remember(room.id, m.Quiesced(room.id))

    # ------------------------------------------------------------ writes and time

    def _post(
        self, link: Link, write: PageWrite | SlotWrite, notice: m.Notice, after: Sequence[Completion], writes: int
    ) -> None:
        sources = write.sources if isinstance(write, PageWrite) else {}
        op = Op("send", Stream.SEND, reads=spans(DEVICE, sources))
        posted: list[Completion] = []
        launched = self._device.submit(op, lambda: posted.append(link.post(write)), after)
        reason = f"send of {write.target.room}"
        pins = tuple(self._pools.allocators[pool].pin(indices, reason) for pool, indices in sources.items())
        self._pending.append(_Pending(_Both(launched, posted), link, notice, pins, writes))
        self._flush()

    def _flush(self) -> None:
        """Send the notices whose writes are complete, in order."""
        while self._pending and self._pending[0].completion.done:
            pending = self._pending.pop(0)
            for pin in pending.pins:
                pin.release()
            pending.link.notify(pending.notice.room, m.encode(pending.notice), pending.writes)

    def _settle(self, link: Link) -> None:
        """Wait for every write on `link`, and send their notices."""
        for pending in self._pending:
            if pending.link is link:
                pending.completion.wait()
        self._flush()

    def _expire(self) -> None:
        late = self._clock.now() - self._config.room_timeout_s
        for room in [r for r in self._rooms.values() if r.state is Sender.SENT and r.sent_at <= late]:
            reason = f"decode did not confirm for {self._config.room_timeout_s:g} s"
            self._end(room.id, SenderEvent.FAILED, m.Failed(room.id, ErrorKind.ROOM, reason))
            self._outcomes.append(Released(room.id, False, reason))


def _sealed(pool: str, first: int, tags: Sequence[ContentTag]) -> m.Sealed:
    return m.Sealed(pool, first, tuple(t.key for t in tags), tuple(t.digest for t in tags))


class _Both:
    """Complete when the launch is, and the write that it posted."""

    def __init__(self, launched: Completion, posted: list[Completion]) -> None:
        self._launched = launched
        self._posted = posted

    @property
    def done(self) -> bool:
        return self._launched.done and all(p.done for p in self._posted)

    def wait(self) -> None:
        self._launched.wait()
        for posted in self._posted:
            posted.wait()

    def order(self) -> None:
        self.wait()
