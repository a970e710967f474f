"""Decode's end of the rooms: grants pages, checks what arrives, gives complete requests to the scheduler.

A room is granted what decode lacks of each pool, and is complete when all of that has arrived. While it lasts, this
end owns its pages and slots; it hands them over when everything is here and verified, and releases them on every
other way out: at once where the plane lets it revoke the writer's access, after the writer's word or proven death
where it doesn't (hazard A5).
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cache.memory.page_moves import describe_spec
from cache.memory.required_pages import NOTHING, HeldPages, due, extents, missing
from cache.pool.page_allocator import Lease, PageAllocator
from cache.pool.pool_set import PoolSet
from contracts.clock import Clock
from contracts.config.worker_config import TransferConfig
from contracts.damage import DamageSite, log_damage
from contracts.errors import ErrorKind, WireError
from contracts.ids import Incarnation, RoomId, WorkerName
from contracts.messages.fingerprint import Fingerprint, mismatch
from contracts.messages.router_commands import PeerRef
from transfer.net.control_channel import ControlChannel, ControlTransport, PeerWatch
from transfer.planes.data_plane import SLOT_BYTES, DataPlane, PageNumbers, RoomTarget
from transfer.rooms import room_messages as m
from transfer.rooms.metadata_slots import copy_out
from transfer.rooms.pool_shares import RoomProgress
from transfer.rooms.room_outcomes import ExpectedPrompt, HandoverFailed, PromptAnswered, PromptArrived
from transfer.rooms.room_states import RECEIVER, ReceiverEvent, ReceiverState

log = logging.getLogger("twinpool.transfer")
_CONFIRMED = 256
_AT_ONCE = 256
"""Messages of one peer that are heard in one round."""


ReceiverOutcome = PromptArrived | HandoverFailed | PromptAnswered


@dataclass(eq=False)
class _ReceiverPeer:
    ref: PeerRef
    channel: ControlChannel
    deadline: float
    welcome: m.Welcome | None = None
    watch: PeerWatch | None = None
    estranged: bool = False
    """It doesn't know this worker any more, or never answered: only rooms in quarantine keep it in the books."""
    queued: dict[RoomId, m.ControlMessage] = field(default_factory=dict)
    """What it hears after its welcome: the latest of each room."""
    down_since: float | None = None
    """Since when there has been no connection to it, after there was one."""
    confirmed: deque[m.HandoverReceived] = field(default_factory=lambda: deque(maxlen=_CONFIRMED))
    """The latest that it was told to be complete."""


@dataclass(eq=False)
class _ReceiverRoom:
    id: RoomId
    peer: _ReceiverPeer
    expected: ExpectedPrompt
    heard: float
    state: ReceiverState = ReceiverState.OPEN
    leases: Mapping[str, Lease] = field(default_factory=dict)
    slot: Lease | None = None
    runs: Mapping[str, PageNumbers] = field(default_factory=dict)
    """What was granted, by pool: those of which something is missing."""
    grant: m.PageGrant | None = None
    promised: bool = False
    """The grant has left: from here on its places come back by the writer's word, or its death, alone."""
    asked: float = 0.0
    """When its writer was last asked to stop."""
    shares: RoomProgress = field(default_factory=lambda: RoomProgress({}))
    """What has still to come."""
    digests: dict[str, dict[int, int]] = field(default_factory=dict)


class KVReceiver:
    """See the module's prose. Single-threaded; `poll` never blocks."""

    def __init__(
        self,
        name: WorkerName,
        incarnation: Incarnation,
        fingerprint: Fingerprint,
        plane: DataPlane,
        pools: PoolSet,
        slots: int,
        config: TransferConfig,
        *,
        verify: bool,
        transport: ControlTransport,
        clock: Clock,
    ) -> None:
        self._name, self._incarnation, self.fingerprint = name, incarnation, fingerprint
        self._plane, self._pools, self._config, self._clock = plane, pools, config, clock
        self._verify, self._transport = verify, transport
        self._slots = plane.allocate("slots", slots * SLOT_BYTES).view(slots, SLOT_BYTES)
        self.slots = PageAllocator("metadata slots", slots)
        self._peers: dict[tuple[WorkerName, Incarnation], _ReceiverPeer] = {}
        self._rooms: dict[RoomId, _ReceiverRoom] = {}
        self._ended: OrderedDict[RoomId, None] = OrderedDict()
        self._outcomes: list[ReceiverOutcome] = []
        self.late = 0
        """Messages that came for a room that had ended."""
        self.damage: Counter[str] = Counter()
        """Rooms in which something arrived that isn't what was promised, by pool, or by "metadata"."""
        self.refused = 0
        """Messages and notices, heard or said, that could not be used."""
        plane.register(pools, self._slots)

    # ------------------------------------------------------------ what decode asks

    def open(self, room: RoomId, peer: PeerRef, expected: ExpectedPrompt) -> None:
        """Raises `WireError` for a room that exists or has existed: rooms are used once."""
        if room in self._rooms or room in self._ended:
            raise WireError(f"room {room} exists already")
        pages = self._pools.pages_for(expected.positions)
        if len(expected.keys) != pages:
            raise ValueError(f"{expected.positions} positions have {pages} pages, not {len(expected.keys)} keys")
        self._rooms[room] = _ReceiverRoom(room, self._connect(peer), expected, self._clock.now())

    def missing(self, expected: ExpectedPrompt, held: HeldPages = NOTHING) -> dict[str, range]:
        """What a room would have to receive of each pool: what is due after the prompt and not in `held`."""
        return missing(due(self._pools.spec, expected.positions), held)

    def grant(self, room: RoomId, leases: Mapping[str, Lease], held: HeldPages = NOTHING) -> bool:
        """Give `leases` by pool to the room; False, with nothing taken, without a free slot.

        The first indices of each are for what is `missing`, in order; those after them are the answer's. What is in
        `held` stays in its place, and the caller keeps it there (a tree's lock does) for as long as it needs it.
        Raises `ValueError` where a lease is too short.
        """
        entry = self._rooms[room]
        wanted = self.missing(entry.expected, held)
        for pool, numbers in wanted.items():
            if numbers and (pool not in leases or len(leases[pool]) < len(numbers)):
                raise ValueError(f"room {room} needs a lease of {len(numbers)} in pool {pool}")
        if not self.slots.free:
            return False
        slot = self.slots.lease(1, f"room {room}")
        self._step(entry, ReceiverEvent.GRANT)
        runs = {p: PageNumbers(n.start, leases[p].indices[: len(n)]) for p, n in wanted.items() if n}
        entry.leases, entry.slot, entry.heard = dict(leases), slot, self._clock.now()
        entry.runs, entry.shares = runs, RoomProgress(wanted)
        ticket = 1 + secrets.randbits(62)
        self._plane.permit(RoomTarget(room, runs, slot.indices[0], ticket))
        places = [m.GrantedPages(p, run.first, run.indices, leases[p].epochs[: len(run)]) for p, run in runs.items()]
        entry.grant = m.PageGrant(room, tuple(places), slot.indices[0], slot.epochs[0], ticket)
        self._send(entry.peer, entry.grant)
        return True

    def abort(self, room: RoomId, reason: str) -> None:
        """Give the room up. No outcome follows; pages and slot return when nobody can write to them any more."""
        entry = self._rooms.get(room)
        if entry is None or entry.state is ReceiverState.ABORTING:
            return
        self._give_up(entry, reason)

    def poll(self) -> list[ReceiverOutcome]:
        """Hear peers and notices, expire what is late; returns what rooms came to."""
        for peer in list(self._peers.values()):
            self._poll_peer(peer)
        for data in self._plane.poll():
            try:
                self._notice(m.decode_notice(data))
            except WireError as error:
                self._refuse("notice", error)
                self._plane.dropped += 1
        self._expire()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def rooms(self) -> int:
        return len(self._rooms)

    @property
    def damaged(self) -> int:
        return self.damage.total()

    def holds(self, pool: str) -> int:
        """Pages or slots of `pool` that rooms hold, those in quarantine included."""
        return sum(len(r.leases[pool]) for r in self._rooms.values() if pool in r.leases)

    @property
    def next_deadline(self) -> float | None:
        """When `poll` is due although nothing arrives."""
        due = [p.deadline for p in self._peers.values() if p.welcome is None and not p.estranged]
        due += [r.heard + self._config.room_timeout_s for r in self._rooms.values() if r.state is ReceiverState.GRANTED]
        return min(due, default=None)

    def check(self) -> list[str]:
        found = self.slots.check()
        for room in self._rooms.values():
            granted = room.state in (ReceiverState.GRANTED, ReceiverState.ABORTING)
            ended = [pool for pool, lease in room.leases.items() if not lease.live]
            if ended or (room.leases and not granted) or (granted and not room.runs.keys() <= room.leases.keys()):
                found.append(f"room {room.id} is {room.state} and its leases say otherwise: {ended or [*room.leases]}")
            if granted != (room.slot is not None and room.slot.live):
                found.append(f"room {room.id} is {room.state} and its slot says otherwise")
        held = sum(r.slot is not None for r in self._rooms.values())
        if held != self.slots.leases:
            found.append(f"metadata slots: {self.slots.leases} leased, rooms hold {held}")
        return found

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._forget(peer)
        self._plane.close()

    # ------------------------------------------------------------ peers

    def _connect(self, ref: PeerRef) -> _ReceiverPeer:
        key = (ref.name, ref.incarnation)
        peer = self._peers.get(key)
        if peer is not None and not peer.estranged:
            return peer
        deadline = self._clock.now() + self._config.connect_timeout_s
        if peer is not None:
            # It kept rooms that are in quarantine, and keeps them. Perhaps the two can meet now.
            peer.estranged, peer.welcome, peer.deadline = False, None, deadline
        else:
            channel = self._transport.connect(ref.control, f"{self._name}:{self._incarnation}".encode())
            peer = self._peers[key] = _ReceiverPeer(ref, channel, deadline)
        peer.channel.send(m.encode(self._hello(ref)))
        # A worker has one live incarnation: what the old one still owed is lost. What it may still write to is not free
        # for that: one that still lives, somewhere, keeps it until it says that it writes no more, or its death is
        # proven.
        for (name, incarnation), old in list(self._peers.items()):
            if name == ref.name and incarnation < ref.incarnation and (old.watch is None or old.watch.dead):
                proven = old.watch is not None
                (self._lose if proven else self._part)(old, f"{name} is now incarnation {ref.incarnation}")
        return peer

    def _hello(self, ref: PeerRef) -> m.Hello:
        return m.Hello(
            self._name, self._incarnation, ref.incarnation, self.fingerprint, describe_spec(self._pools.spec.whole),
            self._plane.kind, self._plane.describe(), *self._transport.mine(),
        )  # fmt: skip

    def _send(self, peer: _ReceiverPeer, message: m.PageGrant | m.AbortRoom | m.HandoverReceived) -> None:
        if peer.welcome is None and not peer.estranged:
            peer.queued[message.room] = message
            return
        if isinstance(message, m.PageGrant) and message.room in self._rooms:
            self._rooms[message.room].promised = True
        peer.channel.send(m.encode(message))

    def _poll_peer(self, peer: _ReceiverPeer) -> None:
        for _ in range(_AT_ONCE):
            data = peer.channel.receive()
            if data is None:
                break
            try:
                self._control(peer, m.decode(data))
            except WireError as error:
                self._refuse(f"message of {peer.ref.name}", error)
            if self._peers.get((peer.ref.name, peer.ref.incarnation)) is not peer:
                return  # It is not who was asked for.
        if peer.watch is not None and peer.watch.dead:
            self._lose(peer, f"{peer.ref.name} (pid {peer.watch.pid}) died")
            return
        if peer.channel.cut():
            self._resend(peer)
        self._check_link(peer)

    def _control(self, peer: _ReceiverPeer, message: m.RoomMessage) -> None:
        """Raises `WireError` for what is not for decode, or not the peer's; then nothing has changed."""
        if isinstance(message, m.Welcome):
            self._welcome(peer, message)
        elif isinstance(message, m.PeerRefused):
            self._part(peer, f"{peer.ref.name} refused the hand-over: {message.reason:.500}")
        elif isinstance(message, m.MessageRejected):
            self._rejected(peer, message)
        elif isinstance(message, m.WriterQuiesced | m.RoomFailed):
            room = self._rooms.get(message.room)
            if room is not None and room.peer is not peer:
                raise WireError(f"room {room.id} is not {peer.ref.name}'s")
            self._notice(message)
        else:
            raise WireError(f"{type(message).__name__} is not for decode")

    def _refuse(self, what: str, error: WireError) -> None:
        """Counted, and told of now and then: whoever says one such thing may say many."""
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # Of a flood, the first, second, fourth, eighth ...
            log.warning("%s refused, the %d. in all: %.500s", what, self.refused, error)

    def _rejected(self, peer: _ReceiverPeer, rejected: m.MessageRejected) -> None:
        """The peer couldn't use one message. It says of which room, if it knows: that one can't go on."""
        if peer.welcome is None:
            self._part(peer, f"{peer.ref.name} refused the hand-over: {rejected.reason:.500}")
            return
        self._refuse(f"message to {peer.ref.name}", WireError(rejected.reason))
        room = self._rooms.get(RoomId(rejected.room))
        if room is not None and room.peer is peer and room.state is not ReceiverState.ABORTING:
            reason = f"{peer.ref.name} can't use a message: {rejected.reason:.500}"
            self._give_up(room, reason)
            self._outcomes.append(HandoverFailed(room.id, ErrorKind.ROOM, reason, peer.ref.name))

    def _resend(self, peer: _ReceiverPeer) -> None:
        """The connection was cut: what was said last may be lost. When it is back the writer hears all of it once more,
        and takes what it knows already as said once."""
        log.warning("the connection to %s was cut", peer.ref.name)
        if peer.welcome is None and not peer.estranged:
            peer.channel.send(m.encode(self._hello(peer.ref)))
            return
        for room in [r for r in self._rooms.values() if r.peer is peer]:
            if room.state is ReceiverState.GRANTED and room.grant is not None:
                self._send(peer, room.grant)
            elif room.state is ReceiverState.ABORTING:
                self._send(peer, self._abort(room, "given up"))
        for message in peer.confirmed:
            self._send(peer, message)

    def _check_link(self, peer: _ReceiverPeer) -> None:
        """End the rooms of a peer whom nobody reaches any more. What it may still write to stays in quarantine; without
        any of that it is forgotten after a while."""
        if peer.welcome is None or peer.channel.up:
            peer.down_since = None
            return
        now, limit = self._clock.now(), self._config.link_timeout_s
        peer.down_since = now if peer.down_since is None else peer.down_since
        if now - peer.down_since < limit:
            return
        rooms = [r for r in self._rooms.values() if r.peer is peer]
        for room in [r for r in rooms if r.state is not ReceiverState.ABORTING]:
            message = f"the connection to {peer.ref.name} was cut, and not back after {limit:g} s"
            self._give_up(room, message)
            self._outcomes.append(HandoverFailed(room.id, ErrorKind.ROOM, message, peer.ref.name))
        if not rooms and now - peer.down_since >= self._config.peer_forget_s:
            self._forget(peer)

    def _welcome(self, peer: _ReceiverPeer, welcome: m.Welcome) -> None:
        if peer.welcome is not None or peer.estranged:
            return  # Said again, as the hello was, or too late.
        if welcome.incarnation != peer.ref.incarnation:
            self._part(peer, f"{peer.ref.name} is incarnation {welcome.incarnation}, not {peer.ref.incarnation}")
            return
        reason = mismatch(self.fingerprint, welcome.fingerprint, self._name, peer.ref.name)
        if reason is not None:
            self._part(peer, reason)
            return
        try:
            others = [(other.pid, other.started, other.boot) for other in welcome.others]
            watch = self._transport.watch([(welcome.pid, welcome.started, welcome.boot), *others])
        except ProcessLookupError:
            self._part(peer, f"{peer.ref.name} (pid {welcome.pid}) died")
            return
        except WireError as error:
            self._part(peer, f"{peer.ref.name}: {error}")
            return
        if watch is None and not self._plane.revocable:
            # Nobody could ever prove that it writes no more, and what it was promised might never come back.
            self._part(peer, f"plane {self._plane.kind}: the processes of {peer.ref.name} can't be watched from here")
            return
        if peer.watch is not None:
            peer.watch.close()
        peer.welcome, peer.watch = welcome, watch
        queued, peer.queued = peer.queued, {}
        for message in queued.values():
            assert isinstance(message, m.PageGrant | m.AbortRoom | m.HandoverReceived)
            self._send(peer, message)

    def _lose(self, peer: _ReceiverPeer, reason: str) -> None:
        """The peer's death is proven: it can't write any more."""
        self._forget(peer)
        for room in [r for r in self._rooms.values() if r.peer is peer]:
            self._break(room, ReceiverEvent.LOST, ErrorKind.ROOM, reason)

    def _part(self, peer: _ReceiverPeer, reason: str) -> None:
        """There is no hand-over with this peer, now; but it may well live, and what it was promised it may still write.

        So its rooms are broken, and those with a promise stay in quarantine, and the peer in the books until the last
        of them has ended.
        """
        peer.estranged, peer.queued = True, {}
        for room in [r for r in self._rooms.values() if r.peer is peer]:
            if room.state is ReceiverState.ABORTING and room.promised:
                continue
            if room.promised:
                self._give_up(room, reason)
                self._outcomes.append(HandoverFailed(room.id, ErrorKind.ROOM, reason, peer.ref.name))
            else:
                self._break(room, ReceiverEvent.LOST, ErrorKind.ROOM, reason)
        self._drop(peer)

    def _drop(self, peer: _ReceiverPeer) -> None:
        """Forget an estranged peer without rooms."""
        if peer.estranged and not any(r.peer is peer for r in self._rooms.values()):
            self._forget(peer)

    def _forget(self, peer: _ReceiverPeer) -> None:
        key = (peer.ref.name, peer.ref.incarnation)
        if self._peers.get(key) is not peer:
            return
        del self._peers[key]
        peer.channel.close()
        if peer.watch is not None:
            peer.watch.close()

    # ------------------------------------------------------------ notices

    def _notice(self, message: m.Notice) -> None:
        """Raises `WireError` for one without the room's ticket; then nothing has changed."""
        room = self._rooms.get(message.room)
        if room is None:
            self.late += 1
            return
        ticket = room.grant.ticket if room.grant is not None else 0
        if message.ticket != ticket:
            if message.ticket or not isinstance(message, m.RoomFailed | m.NothingToDecode):
                raise WireError(f"{type(message).__name__} of room {room.id} has another ticket")
            if room.promised:
                self._before_its_grant(room, message)
                return
        room.heard = self._clock.now()
        if isinstance(message, m.WriterQuiesced):
            if room.state is ReceiverState.ABORTING:
                self._step(room, ReceiverEvent.QUIESCED)
        elif isinstance(message, m.NothingToDecode):
            aborting = room.state is ReceiverState.ABORTING
            self._step(room, ReceiverEvent.FINISHED)
            if not aborting:
                self._outcomes.append(PromptAnswered(room.id))
        elif isinstance(message, m.RoomFailed):
            self._break(room, ReceiverEvent.FAILED, message.kind, message.message)
        elif room.state is not ReceiverState.GRANTED:
            self.late += 1
        elif isinstance(message, m.PagesWritten):
            self._wrote(room, message)
        else:
            self._complete(room)

    def _before_its_grant(self, room: _ReceiverRoom, word: m.RoomFailed | m.NothingToDecode) -> None:
        """The request ended at the writer before it knew of the grant, which is on its way. That much can be passed on;
        the places come back when the grant or the abort behind it is answered."""
        if room.state is ReceiverState.ABORTING:
            return
        if isinstance(word, m.RoomFailed):
            self._outcomes.append(HandoverFailed(room.id, word.kind, word.message, room.peer.ref.name))
        else:
            self._outcomes.append(PromptAnswered(room.id))
        self._give_up(room, "it had ended before its grant came")

    def _wrote(self, room: _ReceiverRoom, wrote: m.PagesWritten) -> None:
        """One write of several pools: all of it is right, or the room is broken."""
        for part in wrote.parts:
            numbers = range(part.first, part.first + len(part.keys))
            if not room.shares.takes(part.pool, numbers) or len(part.keys) != len(part.digests):
                self._hole(room, f"{part.pool}: pages {part.first}.. came when these were due: {room.shares}")
                return
            if part.keys != room.expected.keys[numbers.start : numbers.stop]:
                self._damage(room, part.pool, f"pages {numbers.start}..{numbers.stop - 1} are of another prompt")
                return
            bad = self._mismatches(room, part) if self._verify else []
            if bad:
                self._damage(room, part.pool, f"pages {bad} don't match their tags")
                return
            room.shares.advance(part.pool, numbers)
            room.digests.setdefault(part.pool, {}).update(zip(numbers, part.digests, strict=True))
        self._step(room, ReceiverEvent.WROTE)

    def _mismatches(self, room: _ReceiverRoom, part: m.PageTags) -> list[int]:
        """Numbers of what arrived and isn't what was sealed."""
        numbers = range(part.first, part.first + len(part.digests))
        firsts, ends = extents(self._pools.spec, part.pool, numbers, room.expected.positions)
        found = self._pools.digest(part.pool, room.runs[part.pool].at(numbers), firsts, ends)
        return [n for n, a, b in zip(numbers, found, part.digests, strict=True) if a != b]

    def _complete(self, room: _ReceiverRoom) -> None:
        """The metadata is here. With it the room is done, if every pool is."""
        assert room.slot is not None
        if not room.shares.done:
            self._hole(room, f"metadata: it came before this had arrived: {room.shares}")
            return
        try:
            metadata = copy_out(self._slots, room.slot.indices[0], room.id, room.slot.epochs[0])
        except WireError as error:
            self._damage(room, "metadata", str(error))
            return
        room.peer.confirmed.append(m.HandoverReceived(room.id))
        self._send(room.peer, room.peer.confirmed[-1])
        leases, room.leases = room.leases, {}
        received = {pool: len(run) * self._pools.spec.whole.unit_bytes(pool) for pool, run in room.runs.items()}
        self._step(room, ReceiverEvent.COMPLETE)
        self._outcomes.append(PromptArrived(room.id, leases, metadata, received, room.digests))

    def _hole(self, room: _ReceiverRoom, message: str) -> None:
        """Something is missing before what came, as when a connection was cut. No byte of it was damaged."""
        log.warning("room %s from %s: %s", room.id, room.peer.ref.name, message)
        self._give_up(room, message)
        self._outcomes.append(HandoverFailed(room.id, ErrorKind.ROOM, message, room.peer.ref.name))

    def _damage(self, room: _ReceiverRoom, pool: str, what: str) -> None:
        self.damage[pool if pool in self._pools.spec.by_name else "metadata"] += 1
        message = f"{pool}: {what}"
        log_damage(log, DamageSite.HANDOVER, room=room.id, peer=room.peer.ref.name, pool=pool, what=what)
        room.asked = self._clock.now()
        self._send(room.peer, self._abort(room, message, damaged=True))
        event = ReceiverEvent.REVOKED if self._plane.revocable else ReceiverEvent.DAMAGED
        self._break(room, event, ErrorKind.DAMAGED, message)

    # ------------------------------------------------------------ ends

    def _give_up(self, room: _ReceiverRoom, reason: str) -> None:
        """Tell the writer to stop, and end the room as soon as nobody can write to it any more (hazard A5)."""
        room.asked = self._clock.now()
        self._send(room.peer, self._abort(room, reason))
        free = self._plane.revocable or not room.promised
        self._step(room, ReceiverEvent.REVOKED if free else ReceiverEvent.ABORT)

    def _abort(self, room: _ReceiverRoom, reason: str, damaged: bool = False) -> m.AbortRoom:
        return m.AbortRoom(room.id, reason[:500], damaged, room.grant.ticket if room.grant is not None else 0)

    def _break(self, room: _ReceiverRoom, event: ReceiverEvent, kind: ErrorKind, message: str) -> None:
        aborting = room.state is ReceiverState.ABORTING
        self._step(room, event)
        if not aborting:
            self._outcomes.append(HandoverFailed(room.id, kind, message, room.peer.ref.name))

    def _expire(self) -> None:
        now = self._clock.now()
        for peer in [p for p in self._peers.values() if p.welcome is None and not p.estranged and now >= p.deadline]:
            self._part(peer, f"{peer.ref.name} did not answer within {self._config.connect_timeout_s:g} s")
        for room in self._silent(now):
            self._give_up(room, "silence")
            message = f"nothing came for {self._config.room_timeout_s:g} s"
            self._outcomes.append(HandoverFailed(room.id, ErrorKind.ROOM, message, room.peer.ref.name))
        for room in [r for r in self._rooms.values() if r.state is ReceiverState.ABORTING]:
            if now - room.asked >= self._config.link_timeout_s:  # The writer's answer may be lost, with a connection.
                room.asked = now
                self._send(room.peer, self._abort(room, "given up"))

    def _silent(self, now: float) -> Iterable[_ReceiverRoom]:
        late = now - self._config.room_timeout_s
        return [r for r in self._rooms.values() if r.state is ReceiverState.GRANTED and r.heard <= late]

    def _step(self, room: _ReceiverRoom, event: ReceiverEvent) -> None:
        """The one place where a room changes state, and where its ends release what it holds."""
        room.state = RECEIVER.next(room.state, event)
        if not RECEIVER.terminal(room.state):
            return
        self._plane.revoke(room.id)
        if isinstance(room.peer.queued.get(room.id), m.PageGrant):
            del room.peer.queued[room.id]
        for lease in room.leases.values():
            lease.release()
        if room.slot is not None:
            room.slot.release()
        room.leases, room.slot = {}, None
        del self._rooms[room.id]
        self._ended[room.id] = None
        while len(self._ended) > 65536:
            self._ended.popitem(last=False)
        self._drop(room.peer)
