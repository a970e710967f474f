"""Prefill's end of the rooms: takes grants, writes pages as chunks finish, seals the hand-over with its metadata.

Grants and aborts may come before the router's own message about the request, and requests may end before decode has
said hello; so early grants are kept until their request comes, and ended rooms are remembered with the last word
about them, which is repeated to whoever asks again.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from cache.device.device_port import DEVICE, DONE, Completion, Device, DeviceOp, DeviceStream, attempt, failure, spans
from cache.memory.page_digest import ContentTag
from cache.memory.page_moves import describe_spec
from cache.pool.page_allocator import Pin
from cache.pool.pool_set import PoolSet
from contracts.clock import Clock
from contracts.config.worker_config import TransferConfig
from contracts.errors import ErrorKind, LayoutMismatch, WireError
from contracts.ids import Incarnation, RoomId, WorkerName
from contracts.messages.fingerprint import Fingerprint
from contracts.messages.router_commands import PeerRef
from transfer.net.control_channel import ControlTransport, PeerWatch, ProcessIdentity
from transfer.planes.data_plane import DataPlane, PageNumbers, PageWrite, RoomTarget, SlotWrite, WriteLink
from transfer.rooms import room_messages as m
from transfer.rooms.compatibility import refuse_mismatch
from transfer.rooms.metadata_slots import HandoverMetadata, pack
from transfer.rooms.pool_shares import RoomProgress
from transfer.rooms.room_outcomes import RoomGranted, RoomReleased, SendablePages
from transfer.rooms.room_states import SENDER, SenderEvent, SenderState

log = logging.getLogger("twinpool.transfer")
_REMEMBERED = 65536
_WORDS = 256
_EARLY = 4096
"""Grants and aborts of one peer that are kept for requests which have not come yet."""
_EARLY_PLACES = 2**20
"""Places that the early grants of one peer name."""
_QUEUED = 4096
"""Writes to one peer that may be under way."""
_NOTICE_PAGES = 8192
"""Pages that one notice tells of."""
_NAME_BYTES = 256
_REASON = 500
"""Characters of a reason that are passed on: what a peer sent may be quoted in it."""
_MOST_POSITIONS = 2**40
_SWEEP_S = 1.0
_LOOK_AGAIN_S = 0.002
"""How soon a write that is under way is looked at again."""


SenderOutcome = RoomGranted | RoomReleased


@dataclass(eq=False)
class _SenderPeer:
    identity: bytes
    name: WorkerName
    incarnation: Incarnation
    link: WriteLink
    watch: PeerWatch | None
    hello: m.Hello
    queue: deque[_PendingWrite] = field(default_factory=deque)
    """Writes that are under way, and what is to be said after them, in order. Every peer has its own, so that nobody
    waits for somebody else's."""
    early: OrderedDict[RoomId, m.PageGrant] = field(default_factory=OrderedDict)
    """Its grants for requests that have not come yet."""
    early_places: int = 0
    given_up: OrderedDict[RoomId, None] = field(default_factory=OrderedDict)
    """Rooms that it gave up before their requests came."""
    promised: dict[str, set[int]] = field(default_factory=dict)
    """Places that it has granted and that may still be written, by pool, where it can't take them back."""
    down_since: float | None = None
    """Since when it could not be reached."""
    words: deque[RoomId] = field(default_factory=lambda: deque(maxlen=_WORDS))
    """The latest rooms that ended with a word to it."""


@dataclass(eq=False)
class _SenderRoom:
    id: RoomId
    wants: PeerRef
    state: SenderState = SenderState.OPEN
    peer: _SenderPeer | None = None
    grant: m.PageGrant | None = None
    target: RoomTarget | None = None
    shares: RoomProgress = field(default_factory=lambda: RoomProgress({}))
    """What is still to be written."""
    sent_at: float = 0.0
    writes: int = 0
    """Posted so far."""
    failed: str = ""
    """Why one of its writes came to nothing; it ends at the next `poll`, and nothing is announced any more."""

    @property
    def ticket(self) -> int:
        return self.grant.ticket if self.grant is not None else 0


@dataclass(eq=False)
class _PendingWrite:
    """A posted write, and the notice that may follow once it is complete; or a last word that follows what was posted
    before it."""

    completion: Completion
    notice: m.Notice
    pins: tuple[Pin, ...] = ()
    writes: int = 0
    """Writes of its room that the notice comes after."""
    room: _SenderRoom | None = None
    """Whose write it is; None for a last word."""


class KVSender:
    """See the module's prose. Single-threaded; `poll` never blocks."""

    def __init__(
        self,
        name: WorkerName,
        incarnation: Incarnation,
        fingerprint: Fingerprint,
        plane: DataPlane,
        pools: PoolSet,
        device: Device,
        config: TransferConfig,
        *,
        transport: ControlTransport,
        clock: Clock,
        others: Sequence[ProcessIdentity] = (),
    ) -> None:
        """`others`: the processes of the worker's other ranks."""
        self._others = tuple(m.RankProcess(*other) for other in others)
        self._name, self._incarnation, self.fingerprint = name, incarnation, fingerprint
        self._plane, self._pools, self._device = plane, pools, device
        self._config, self._clock, self._transport = config, clock, transport
        self._inbox = transport.listen()
        self.control = self._inbox.endpoint
        plane.register(pools, None)
        self._peers: dict[bytes, _SenderPeer] = {}
        self._rooms: dict[RoomId, _SenderRoom] = {}
        self._ended: OrderedDict[RoomId, m.Notice] = OrderedDict()
        self._outcomes: list[SenderOutcome] = []
        self._swept = clock.now()
        self.late = 0
        self.refused = 0
        """Messages that could not be used."""
        self.sent: Counter[str] = Counter()
        """Bytes posted, by pool."""

    # ------------------------------------------------------------ what prefill asks

    def open(self, room: RoomId, peer: PeerRef) -> None:
        """Raises `WireError` for a room that exists, or was given up by decode before its request came."""
        known = self._peers.get(_identity(peer))
        if room in self._rooms or room in self._ended or (known is not None and room in known.given_up):
            raise WireError(f"room {room} exists already, or was given up")
        entry = self._rooms[room] = _SenderRoom(room, peer)
        early = self._take_early(known, room) if known is not None else None
        if known is not None and early is not None:
            self._grant(entry, known, early)

    def granted(self, room: RoomId) -> bool:
        entry = self._rooms.get(room)
        return entry is not None and entry.state is SenderState.GRANTED

    def wanted(self, room: RoomId) -> dict[str, range]:
        """What decode has granted and nobody has written yet, every pool by name; all empty before the grant."""
        entry = self._rooms[room]
        return {pool.name: entry.shares.left(pool.name) for pool in self._pools.spec.pools}

    def write(self, room: RoomId, finished: Mapping[str, SendablePages], after: Sequence[Completion]) -> None:
        """Write finished state of mine, all pools in one write, after the operations that made it.

        Skipped is what decode didn't ask for and what was written before; the rest of each pool comes in order.
        """
        entry = self._rooms[room]
        assert entry.peer is not None
        assert entry.target is not None
        while not entry.failed:
            chosen = {}
            for pool, pages in finished.items():
                left = entry.shares.left(pool)
                start, stop = max(pages.first, left.start), min(pages.first + len(pages.indices), left.stop)
                stop = min(stop, start + self._most_pages(entry.peer.link, pool))
                if start < stop:
                    chosen[pool] = slice(start - pages.first, stop - pages.first)
                    entry.shares.advance(pool, range(start, stop))
            if not chosen:
                return
            runs = {
                p: PageNumbers(finished[p].first + run.start, tuple(finished[p].indices[run]))
                for p, run in chosen.items()
            }
            self._step(entry, SenderEvent.WROTE)
            entry.writes += 1
            parts = [_sealed(pool, runs[pool].first, finished[pool].tags[run]) for pool, run in chosen.items()]
            notice = m.PagesWritten(room, entry.ticket, tuple(parts))
            self._post(entry, entry.peer, PageWrite(entry.target, runs, entry.writes), notice, after)
            for pool, indices in runs.items():
                self.sent[pool] += len(indices) * self._pools.spec.whole.unit_bytes(pool)

    def _most_pages(self, link: WriteLink, pool: str) -> int:
        """Pages of `pool` in one write: no more than the reader takes in as one frame, and a notice can tell of."""
        if link.frame_bytes is None:
            return _NOTICE_PAGES
        return max(1, min(_NOTICE_PAGES, link.frame_bytes // self._pools.spec.whole.unit_bytes(pool)))

    def seal(self, room: RoomId, metadata: HandoverMetadata) -> None:
        """Everything is written but the metadata: write it, and end the writing.

        Raises `WireError` while something that decode wants is not written, and where a write has failed.
        """
        entry = self._rooms[room]
        assert entry.peer is not None
        assert entry.grant is not None
        assert entry.target is not None
        if entry.failed or not entry.shares.done:
            raise WireError(f"room {room} can't be sealed: {entry.failed or f'{entry.shares} not written'}")
        data = pack(replace(metadata, slot_epoch=entry.grant.slot_epoch))
        self._post(entry, entry.peer, SlotWrite(entry.target, data), m.SlotWritten(room, entry.ticket), ())
        entry.sent_at = self._clock.now()
        self._step(entry, SenderEvent.SENT)

    def finish(self, room: RoomId) -> None:
        """The request ended with its first token."""
        entry = self._rooms.get(room)
        if entry is not None:
            self._end(entry, SenderEvent.FINISHED, m.NothingToDecode(room, entry.ticket))

    def fail(self, room: RoomId, kind: ErrorKind, message: str) -> None:
        """The request is given up here; decode is told. Nothing happens when the room is over."""
        entry = self._rooms.get(room)
        if entry is not None:
            self._end(entry, SenderEvent.FAILED, m.RoomFailed(room, entry.ticket, kind, message))

    def poll(self) -> list[SenderOutcome]:
        """Hear peers, send due notices, expire; returns what became of rooms."""
        for identity, data in self._inbox.receive():
            try:
                self._control(identity, m.decode(data))
            except (WireError, LayoutMismatch) as error:
                self._refuse(identity, data, str(error)[:_REASON])
        for peer in [p for p in self._peers.values() if p.watch is not None and p.watch.dead]:
            self._lose(peer, f"{peer.name} died")
        self._plane.poll_followers()
        for peer in [p for p in self._peers.values() if p.link.cut()]:
            self._cut(peer)
        for peer in self._peers.values():
            self._flush(peer)
        self._end_failed()
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
    def quiet(self) -> bool:
        """Whether no room is open, and of those that have ended nothing is being written or waits to be said."""
        return not self._rooms and not any(peer.queue for peer in self._peers.values())

    @property
    def outgoing(self) -> dict[str, float]:
        """Rooms that have not ended, by who receives them: counters of a worker's status (hazard D2)."""
        return dict(Counter(f"outgoing_to:{room.wants.name}" for room in self._rooms.values()))

    @property
    def unconfirmed(self) -> set[RoomId]:
        """Rooms in which everything was sent and decode has not said yet that it has it."""
        return {r.id for r in self._rooms.values() if r.state is SenderState.SENT}

    @property
    def next_deadline(self) -> float | None:
        due = [r.sent_at + self._config.room_timeout_s for r in self._rooms.values() if r.state is SenderState.SENT]
        if any(peer.queue for peer in self._peers.values()) or any(r.failed for r in self._rooms.values()):
            due.append(self._clock.now() + _LOOK_AGAIN_S)
        return min(due, default=None)

    def check(self) -> list[str]:
        early = [room for peer in self._peers.values() for room in peer.early]
        found = [f"room {room}: early grant and open" for room in early if self._theirs(room)]
        for room in self._rooms.values():
            if (room.state is SenderState.OPEN) != (room.grant is None):
                found.append(f"room {room.id} is {room.state} and its grant says otherwise")
            if room.peer is not None and self._peers.get(room.peer.identity) is not room.peer:
                found.append(f"room {room.id} belongs to a peer that is gone")
        return found

    def close(self) -> None:
        for peer in self._peers.values():
            self._settle(peer)
            self._disconnect(peer)
        self._inbox.close()
        self._plane.close()

    # ------------------------------------------------------------ peers

    def _control(self, identity: bytes, message: m.RoomMessage) -> None:
        """Raises `WireError` or `LayoutMismatch` for what can't be used; then nothing has changed."""
        if isinstance(message, m.Hello):
            self._hello(identity, message)
            return
        peer = self._peers.get(identity)
        if peer is None:
            if isinstance(message, m.AbortRoom):
                self._aborted_by_nobody(identity, message)
            else:
                self._reply(identity, m.PeerRefused("say hello first"))
        elif isinstance(message, m.PageGrant):
            self._granted(peer, message)
        elif isinstance(message, m.AbortRoom):
            self._aborted(peer, message)
        elif isinstance(message, m.HandoverReceived):
            room = self._rooms.get(message.room)
            if room is not None and room.peer is not peer:
                raise WireError(f"room {message.room} is not {peer.name}'s")
            if room is None or room.state is not SenderState.SENT:
                self.late += 1
            else:
                self._step(room, SenderEvent.RECEIVED)
                self._outcomes.append(RoomReleased(room.id, True))
        else:
            raise WireError(f"{type(message).__name__} is not for prefill")

    def _refuse(self, identity: bytes, data: bytes, reason: str) -> None:
        """Say no to one message, and to nothing else: what its sender has granted goes on, or ends by its own words.

        Who is no peer is told so. It has no rooms here, or none any more.
        """
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # Of a flood, the first, second, fourth, eighth ...
            log.warning("control message refused, the %d.: %s", self.refused, reason)
        self._reply(
            identity, m.MessageRejected(reason, m.room_of(data)) if identity in self._peers else m.PeerRefused(reason)
        )

    def _hello(self, identity: bytes, hello: m.Hello) -> None:
        layout = describe_spec(self._pools.spec.whole)
        refuse_mismatch(self._name, self.fingerprint, layout, self._plane.kind, hello)
        if hello.expects != self._incarnation:
            raise LayoutMismatch(f"{self._name} is incarnation {self._incarnation}, not {hello.expects}")
        ref = PeerRef(WorkerName(hello.worker), Incarnation(hello.incarnation), "")
        if identity != _identity(ref) or not 0 < len(identity) <= _NAME_BYTES:
            raise WireError(f"{hello.worker:.80} incarnation {hello.incarnation} speaks as {identity!r:.80}")
        known = self._peers.get(identity)
        if known is not None and known.hello == hello:
            self._welcome(identity)  # Said again, as its answer may have been lost: its rooms go on.
            return
        others = [p for p in self._peers.values() if p.name == hello.worker and p is not known]
        for old in others:
            if old.incarnation > hello.incarnation:
                raise LayoutMismatch(f"{hello.worker} is incarnation {old.incarnation} by now, not {hello.incarnation}")
        if known is None and len(self._peers) - len(others) >= self._config.most_peers:
            raise LayoutMismatch(f"{self._name} has {len(self._peers)} peers already (transfer.most_peers)")
        link = self._plane.connect(hello.descriptor)
        try:
            watch = self._transport.watch([(hello.pid, hello.started, hello.boot)])
        except (ProcessLookupError, WireError) as error:
            link.close()
            raise LayoutMismatch(f"{hello.worker}: {error}") from None
        # Only now, as somebody who can't be met must not take anybody's place.
        for old in others:
            self._lose(old, f"{old.name} is now incarnation {hello.incarnation}")
        if known is not None:
            self._lose(known, f"{hello.worker} connected again")
        self._peers[identity] = _SenderPeer(identity, ref.name, ref.incarnation, link, watch, hello)
        self._welcome(identity)

    def _welcome(self, identity: bytes) -> None:
        process = self._transport.mine()
        self._reply(identity, m.Welcome(self._name, self._incarnation, self.fingerprint, *process, self._others))

    def _lose(self, peer: _SenderPeer, reason: str) -> None:
        """The peer is dead, out of reach, or another one has taken its place: its rooms are over."""
        self._settle(peer)
        del self._peers[peer.identity]
        self._disconnect(peer)
        for room in [r for r in self._rooms.values() if r.peer is peer]:
            self._remember(room.id, m.RoomFailed(room.id, room.ticket, ErrorKind.ROOM, reason))
            self._step(room, SenderEvent.LOST)
            self._outcomes.append(RoomReleased(room.id, False, reason))

    def _cut(self, peer: _SenderPeer) -> None:
        """The connection was cut: pages, or the word of them, may be lost. Rooms of which something was sent are given
        up, and last words said again; a room that has not begun goes on."""
        reason = f"the connection to {peer.name} was cut"
        log.warning(reason)
        for word in list(peer.words):
            if word in self._ended:
                self._say(peer, self._ended[word])
        for room in [r for r in self._rooms.values() if r.peer is peer and (r.writes or r.state is SenderState.SENT)]:
            self._end(room, SenderEvent.FAILED, m.RoomFailed(room.id, room.ticket, ErrorKind.ROOM, reason))
            self._outcomes.append(RoomReleased(room.id, False, reason))

    def _sweep(self, now: float) -> None:
        """Forget peers whom nobody can reach any more: of one on another host no death can be proven, and nobody writes
        to it through a connection that isn't there."""
        self._swept = now
        for peer in list(self._peers.values()):
            if peer.link.up:
                peer.down_since = None
                continue
            peer.down_since = now if peer.down_since is None else peer.down_since
            if now - peer.down_since >= self._config.peer_forget_s:
                self._lose(peer, f"{peer.name} could not be reached for {self._config.peer_forget_s:g} s")

    def _disconnect(self, peer: _SenderPeer) -> None:
        peer.link.close()
        if peer.watch is not None:
            peer.watch.close()

    def _reply(self, identity: bytes, message: m.ControlMessage | m.WriterQuiesced) -> None:
        self._inbox.send(identity, m.encode(message))

    # ------------------------------------------------------------ rooms

    def _granted(self, peer: _SenderPeer, grant: m.PageGrant) -> None:
        room = self._rooms.get(grant.room)
        last_word = self._ended.get(grant.room)
        if room is not None and room.state is not SenderState.OPEN:
            if room.peer is not peer or room.grant != grant:
                raise WireError(f"room {grant.room} was granted twice")
            return
        if room is not None and _identity(room.wants) != peer.identity:
            wants = f"{room.wants.name} incarnation {room.wants.incarnation}"
            reason = f"room {room.id} is for {wants}, granted by {peer.name} incarnation {peer.incarnation}"
            self._say(peer, m.RoomFailed(grant.room, grant.ticket, ErrorKind.ROOM, reason))
            return
        if last_word is not None:
            self._say(peer, replace(last_word, ticket=grant.ticket))
            return
        try:
            self._runs(peer, grant)
        except WireError as error:
            # It was not taken, so nothing of it will be written: that much can be said at once.
            failed = m.RoomFailed(grant.room, grant.ticket, ErrorKind.ROOM, str(error)[:_REASON])
            if room is not None:
                self._end(room, SenderEvent.FAILED, failed, peer)
                self._outcomes.append(RoomReleased(room.id, False, failed.message))
            else:
                self._say(peer, failed)
            raise
        if room is not None:
            self._grant(room, peer, grant)
            return
        self._take_early(peer, grant.room)
        peer.early[grant.room] = grant
        peer.early_places += _places(grant)
        while len(peer.early) > _EARLY or peer.early_places > _EARLY_PLACES:
            oldest = next(iter(peer.early))
            ticket = peer.early[oldest].ticket
            self._take_early(peer, oldest)
            self._say(peer, m.RoomFailed(oldest, ticket, ErrorKind.ROOM, f"{self._name} keeps no more early grants"))

    def _take_early(self, peer: _SenderPeer, room: RoomId) -> m.PageGrant | None:
        grant = peer.early.pop(room, None)
        if grant is not None:
            peer.early_places -= _places(grant)
        return grant

    def _grant(self, room: _SenderRoom, peer: _SenderPeer, grant: m.PageGrant) -> None:
        """`grant` was looked at before."""
        runs = {place.pool: PageNumbers(place.first, place.indices) for place in grant.places}
        room.peer, room.grant, room.target = peer, grant, RoomTarget(room.id, runs, grant.slot, grant.ticket)
        room.shares = RoomProgress({pool: run.numbers for pool, run in runs.items()})
        if not self._plane.revocable:
            for pool, run in runs.items():
                peer.promised.setdefault(pool, set()).update(run.indices)
        self._step(room, SenderEvent.GRANT)
        self._outcomes.append(RoomGranted(room.id))

    def _runs(self, peer: _SenderPeer, grant: m.PageGrant) -> None:
        """Raises `WireError` for places that can't be, or that are promised to another room."""
        pools = self._pools.spec.by_name
        if len({place.pool for place in grant.places}) != len(grant.places):
            raise WireError(f"room {grant.room} was granted places of one pool twice")
        for place in grant.places:
            if place.pool not in pools:
                raise WireError(f"room {grant.room} was granted places of {place.pool!r:.80}, not {sorted(pools)}")
            indices = set(place.indices)
            fit = 0 < len(indices) == len(place.indices) == len(place.epochs) and min(indices) > 0
            if not fit or not 0 <= place.first < _MOST_POSITIONS:
                raise WireError(f"room {grant.room} was granted places of {place.pool} that can't be: {place!r:.200}")
            if not indices.isdisjoint(peer.promised.get(place.pool, ())):
                raise WireError(f"room {grant.room} was granted places of {place.pool} that another room has")
        if grant.ticket <= 0 or grant.slot < 0:
            raise WireError(f"room {grant.room} was granted without a slot, or without a ticket")
        runs = {place.pool: PageNumbers(place.first, place.indices) for place in grant.places}
        peer.link.admit(RoomTarget(grant.room, runs, grant.slot, grant.ticket))

    def _aborted(self, peer: _SenderPeer, abort: m.AbortRoom) -> None:
        """The answer comes after all that was posted before."""
        room = self._rooms.get(abort.room)
        owner = room is None or (room.peer is peer if room.peer is not None else _identity(room.wants) == peer.identity)
        if not owner:
            raise WireError(f"room {abort.room} is not {peer.name}'s")
        self._take_early(peer, abort.room)
        quiesced = m.WriterQuiesced(abort.room, abort.ticket)
        if room is not None:
            self._remember(room.id, quiesced)
            self._step(room, SenderEvent.ABORT)
            reason = f"decode gave it up: {abort.reason:.200}"
            self._outcomes.append(RoomReleased(room.id, False, reason, abort.damaged))
        elif abort.room not in self._ended:
            peer.given_up[abort.room] = None
            while len(peer.given_up) > _EARLY:
                peer.given_up.popitem(last=False)
        peer.words.append(abort.room)
        self._say(peer, quiesced)

    def _aborted_by_nobody(self, identity: bytes, abort: m.AbortRoom) -> None:
        """Who is no peer, or none any more, has no writer here: everything of it was settled before it was forgotten.

        Raises `WireError` for somebody else's room.
        """
        room = self._rooms.get(abort.room)
        if room is not None:
            if room.peer is not None or _identity(room.wants) != identity:
                raise WireError(f"room {abort.room} is not that of {identity!r:.80}")
            self._remember(room.id, m.WriterQuiesced(room.id, abort.ticket))
            self._step(room, SenderEvent.ABORT)
            self._outcomes.append(RoomReleased(room.id, False, f"decode gave it up: {abort.reason:.200}"))
        self._reply(identity, m.WriterQuiesced(abort.room, abort.ticket))

    def _end(self, room: _SenderRoom, event: SenderEvent, notice: m.Notice, peer: _SenderPeer | None = None) -> None:
        """`peer`: who is told, where the room has none as yet."""
        self._remember(room.id, notice)
        self._step(room, event)
        peer = room.peer or peer or self._peers.get(_identity(room.wants))
        if peer is not None:
            peer.words.append(notice.room)
            self._say(peer, notice)

    def _end_failed(self) -> None:
        for room in [r for r in self._rooms.values() if r.failed]:
            log.warning("room %s: %s", room.id, room.failed)
            self._end(room, SenderEvent.FAILED, m.RoomFailed(room.id, room.ticket, ErrorKind.WORKER, room.failed))
            self._outcomes.append(RoomReleased(room.id, False, room.failed))

    def _theirs(self, room_id: RoomId) -> bool:
        """Whether the room is open, and waits for an early grant that was kept."""
        room = self._rooms.get(room_id)
        if room is None or room.peer is not None:
            return False
        peer = self._peers.get(_identity(room.wants))
        return peer is not None and room_id in peer.early

    def _remember(self, room: RoomId, notice: m.Notice) -> None:
        self._ended[room] = notice
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _step(self, room: _SenderRoom, event: SenderEvent) -> None:
        """The one place where a room changes state."""
        room.state = SENDER.next(room.state, event)
        peer, target = room.peer, room.target
        if room.state is not SenderState.GRANTED and target is not None and peer is not None and peer.promised:
            # Nothing is posted any more. What was is complete before the reader hears that it may use them again.
            for pool, run in target.runs.items():
                peer.promised[pool].difference_update(run.indices)
        if SENDER.terminal(room.state):
            del self._rooms[room.id]
            if room.id not in self._ended:
                self._remember(room.id, m.WriterQuiesced(room.id, room.ticket))

    # ------------------------------------------------------------ writes and time

    def _post(
        self,
        room: _SenderRoom,
        peer: _SenderPeer,
        write: PageWrite | SlotWrite,
        notice: m.Notice,
        after: Sequence[Completion],
    ) -> None:
        if len(peer.queue) >= _QUEUED:
            room.failed = f"{len(peer.queue)} writes to {peer.name} are under way already"
            return
        sources = write.sources if isinstance(write, PageWrite) else {}
        op = DeviceOp("send", DeviceStream.SEND, reads=spans(DEVICE, sources))
        posted: list[Completion] = []
        launched = attempt(self._device, op, lambda: posted.append(peer.link.post(write)), after)
        reason = f"send of {room.id}"
        pins = tuple(self._pools.allocators[pool].pin(indices, reason) for pool, indices in sources.items())
        peer.queue.append(_PendingWrite(_PostedWrite(launched, posted), notice, pins, room.writes, room))
        self._flush(peer)

    def _say(self, peer: _SenderPeer, word: m.Notice) -> None:
        """A last word: it follows everything that was posted to `peer` before it."""
        peer.queue.append(_PendingWrite(DONE, word))
        self._flush(peer)

    def _flush(self, peer: _SenderPeer) -> None:
        """Send the notices whose writes are complete, in order. A write that failed is never announced."""
        while peer.queue:
            pending = peer.queue[0]
            error = _ended_with(pending.completion)
            if error is _UNDER_WAY:
                return
            peer.queue.popleft()
            for pin in pending.pins:
                pin.release()
            room = pending.room
            if room is not None:
                if error is not None:
                    room.failed = room.failed or f"a write to {peer.name} failed: {error}"[:_REASON]
                if room.failed or self._rooms.get(room.id) is not room:
                    continue
            peer.link.notify(pending.notice.room, m.encode_notice(pending.notice), pending.writes)

    def _settle(self, peer: _SenderPeer) -> None:
        """Wait until nothing of `peer` is under way; what could be said of it is said."""
        for pending in peer.queue:
            with contextlib.suppress(RuntimeError):
                pending.completion.wait()
        self._flush(peer)

    def _expire(self) -> None:
        now = self._clock.now()
        if now - self._swept >= _SWEEP_S:
            self._sweep(now)
        late = now - self._config.room_timeout_s
        for room in [r for r in self._rooms.values() if r.state is SenderState.SENT and r.sent_at <= late]:
            reason = f"decode did not confirm for {self._config.room_timeout_s:g} s"
            self._end(room, SenderEvent.FAILED, m.RoomFailed(room.id, room.ticket, ErrorKind.ROOM, reason))
            self._outcomes.append(RoomReleased(room.id, False, reason))


def _identity(ref: PeerRef) -> bytes:
    """By which a worker's connection is known."""
    return f"{ref.name}:{ref.incarnation}".encode(errors="replace")


def _places(grant: m.PageGrant) -> int:
    return sum(len(place.indices) for place in grant.places)


_UNDER_WAY = RuntimeError("under way")


def _ended_with(completion: Completion) -> RuntimeError | None:
    """The error that ended an operation, None: it succeeded; `_UNDER_WAY` while it has not ended."""
    try:
        if not completion.done:
            return _UNDER_WAY
    except RuntimeError as error:  # Some devices tell of a failure where they are asked how far they are.
        return error
    return failure(completion)


def _sealed(pool: str, first: int, tags: Sequence[ContentTag]) -> m.PageTags:
    return m.PageTags(pool, first, tuple(t.key for t in tags), tuple(t.digest for t in tags))


class _PostedWrite:
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
