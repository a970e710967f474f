"""Decode's end of the rooms: grants pages, checks what arrives, gives complete requests to the scheduler.

While a room lasts, this end owns its pages and slot; it hands the pages over when everything has arrived and is
verified, and releases them on every other way out: at once where the plane lets it revoke the writer's access, after
the writer's word or proven death where it doesn't (hazard A5).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import zmq

from cache.leases import Allocator, Lease
from cache.moves import describe_spec
from cache.pools import PoolSet
from cache.tags import Digester
from contracts.clock import Clock
from contracts.config import TransferConfig
from contracts.errors import ErrorKind, WireError
from contracts.ids import Incarnation, RoomId, WorkerName
from contracts.messages import PeerRef
from transfer import messages as m
from transfer import process
from transfer.metadata import SLOT_BYTES, Metadata, copy_out
from transfer.plane import Plane, Target
from transfer.rooms import RECEIVER, Receiver, ReceiverEvent
from transfer.security import Curve
from transfer.waiting import Waiter

log = logging.getLogger("twinpool.transfer")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a room is to receive: the chain key of each prompt page, and how many positions there are."""

    keys: tuple[bytes, ...]
    positions: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Everything is here and verified; the lease is the caller's now."""

    room: RoomId
    lease: Lease
    metadata: Metadata
    bytes: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The hand-over failed; the caller has nothing to release."""

    room: RoomId
    kind: ErrorKind
    message: str
    blame: WorkerName | None


@dataclass(frozen=True, slots=True)
class Over:
    """Prefill's first token ended the request; there is nothing to decode."""

    room: RoomId


Outcome = Arrived | Broken | Over


@dataclass(eq=False)
class _Peer:
    ref: PeerRef
    socket: zmq.Socket[bytes]
    deadline: float
    welcome: m.Welcome | None = None
    watch: process.ProcessWatch | None = None
    queued: list[m.Control] = field(default_factory=list)


@dataclass(eq=False)
class _Room:
    id: RoomId
    peer: _Peer
    expected: Expected
    heard: float
    state: Receiver = Receiver.OPEN
    lease: Lease | None = None
    slot: Lease | None = None
    arrived: int = 0


class ReceiverEnd:
    """See the module's prose. Single-threaded; `poll` never blocks."""

    def __init__(
        self,
        name: WorkerName,
        incarnation: Incarnation,
        fingerprint: str,
        plane: Plane,
        pools: PoolSet,
        slots: int,
        config: TransferConfig,
        *,
        verify: bool,
        clock: Clock,
        waiter: Waiter,
        curve: Curve | None,
    ) -> None:
        self._name, self._incarnation, self._fingerprint = name, incarnation, fingerprint
        self._plane, self._pools, self._config, self._clock = plane, pools, config, clock
        self._verify, self._waiter, self._curve = verify, waiter, curve
        self._slots = plane.allocate("slots", slots * SLOT_BYTES).view(slots, SLOT_BYTES)
        self.slots = Allocator("metadata slots", slots)
        self._digester = Digester(pools.layout)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._peers: dict[tuple[WorkerName, Incarnation], _Peer] = {}
        self._rooms: dict[RoomId, _Room] = {}
        self._ended: OrderedDict[RoomId, None] = OrderedDict()
        self._outcomes: list[Outcome] = []
        self.late = 0
        """Messages that came for a room that had ended."""
        self.damaged = 0
        plane.register(pools, self._slots)
        for socket in plane.waitable:
            waiter.add(socket)

    # ------------------------------------------------------------ what decode asks

    def open(self, room: RoomId, peer: PeerRef, expected: Expected) -> None:
        """Raises `WireError` for a room that exists or has existed: rooms are used once."""
        if room in self._rooms or room in self._ended:
            raise WireError(f"room {room} exists already")
        self._rooms[room] = _Room(room, self._connect(peer), expected, self._clock.now())

    def grant(self, room: RoomId, lease: Lease) -> bool:
        """Give `lease` (pages for prompt and answer) to the room; False, with nothing taken, without a free slot."""
        entry = self._rooms[room]
        if not self.slots.free:
            return False
        slot = self.slots.lease(1, f"room {room}")
        self._step(entry, ReceiverEvent.GRANT)
        entry.lease, entry.slot, entry.heard = lease, slot, self._clock.now()
        pages = len(entry.expected.keys)
        target = Target(room, lease.indices[:pages], slot.indices[0])
        self._plane.permit(target)
        self._send(entry.peer, m.Grant(room, target.pages, lease.epochs[:pages], target.slot, slot.epochs[0]))
        return True

    def abort(self, room: RoomId, reason: str) -> None:
        """Give the room up. No outcome follows; pages and slot return when nobody can write to them any more."""
        entry = self._rooms.get(room)
        if entry is None or entry.state is Receiver.ABORTING:
            return
        self._send(entry.peer, m.Abort(room, reason))
        self._step(entry, ReceiverEvent.REVOKED if self._plane.revocable else ReceiverEvent.ABORT)

    def poll(self) -> list[Outcome]:
        """Hear peers and notices, expire what is late; returns what rooms came to."""
        for peer in list(self._peers.values()):
            self._hear(peer)
        for data in self._plane.poll():
            try:
                self._notice(m.decode(data))
            except WireError as error:
                log.warning("notice refused: %s", error)
                self._plane.dropped += 1
        self._expire()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def rooms(self) -> int:
        return len(self._rooms)

    @property
    def granted(self) -> int:
        """Rooms that hold pages and a slot, those in quarantine included."""
        return sum(r.lease is not None for r in self._rooms.values())

    @property
    def next_deadline(self) -> float | None:
        """When `poll` is due although nothing arrives."""
        due = [p.deadline for p in self._peers.values() if p.welcome is None]
        due += [r.heard + self._config.room_timeout_s for r in self._rooms.values() if r.state is Receiver.GRANTED]
        return min(due, default=None)

    def check(self) -> list[str]:
        found = self.slots.check()
        for room in self._rooms.values():
            granted = room.state in (Receiver.GRANTED, Receiver.ABORTING)
            if granted != (room.lease is not None and room.lease.live):
                found.append(f"room {room.id} is {room.state} and its lease says otherwise")
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

    def _connect(self, ref: PeerRef) -> _Peer:
        key = (ref.name, ref.incarnation)
        if key in self._peers:
            return self._peers[key]
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.ROUTING_ID, f"{self._name}:{self._incarnation}".encode())
        if self._curve is not None and ref.control.startswith("tcp"):
            self._curve.call(socket)
        socket.connect(ref.control)
        peer = _Peer(ref, socket, self._clock.now() + self._config.connect_timeout_s)
        layout = {"model": self._fingerprint, **describe_spec(self._pools.layout.spec)}
        hello = m.Hello(
            self._name, self._incarnation, ref.incarnation, layout, self._plane.kind, self._plane.describe(),
            *process.mine(),
        )  # fmt: skip
        socket.send(m.encode(hello))
        self._waiter.add(socket)
        # A worker has one live incarnation: what the old one still owed is lost.
        for (name, incarnation), old in list(self._peers.items()):
            if name == ref.name and incarnation < ref.incarnation and (old.watch is None or old.watch.dead):
                self._lose(old, f"{name} is now incarnation {ref.incarnation}")
        self._peers[key] = peer
        return peer

    def _send(self, peer: _Peer, message: m.Control) -> None:
        if peer.welcome is None:
            peer.queued.append(message)
        else:
            peer.socket.send(m.encode(message))

    def _hear(self, peer: _Peer) -> None:
        while True:
            try:
                data = peer.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = m.decode(data)
            except WireError as error:
                log.warning("control message of %s refused: %s", peer.ref.name, error)
                continue
            if isinstance(message, m.Welcome):
                self._welcome(peer, message)
            elif isinstance(message, m.Refused):
                self._lose(peer, f"{peer.ref.name} refused the hand-over: {message.reason}")
                return
            elif isinstance(message, m.Quiesced | m.Failed):
                self._notice(message)
        if peer.watch is not None and peer.watch.dead:
            self._lose(peer, f"{peer.ref.name} (pid {peer.watch.pid}) died")

    def _welcome(self, peer: _Peer, welcome: m.Welcome) -> None:
        if welcome.incarnation != peer.ref.incarnation:
            self._lose(peer, f"{peer.ref.name} is incarnation {welcome.incarnation}, not {peer.ref.incarnation}")
            return
        peer.welcome = welcome
        try:
            peer.watch = process.ProcessWatch.open(welcome.pid, welcome.started, welcome.boot)
        except ProcessLookupError:
            self._lose(peer, f"{peer.ref.name} (pid {welcome.pid}) died")
            return
        if peer.watch is not None:
            self._waiter.add(peer.watch.fd)
        queued, peer.queued = peer.queued, []
        for message in queued:
            self._send(peer, message)

    def _lose(self, peer: _Peer, reason: str) -> None:
        """The peer can't write any more: it is dead, or never began."""
        self._forget(peer)
        for room in [r for r in self._rooms.values() if r.peer is peer]:
            self._break(room, ReceiverEvent.LOST, ErrorKind.ROOM, reason)

    def _forget(self, peer: _Peer) -> None:
        self._peers.pop((peer.ref.name, peer.ref.incarnation), None)
        self._waiter.remove(peer.socket)
        peer.socket.close(linger=0)
        if peer.watch is not None:
            self._waiter.remove(peer.watch.fd)
            peer.watch.close()

    # ------------------------------------------------------------ notices

    def _notice(self, message: m.Message) -> None:
        if isinstance(message, m.Hello | m.Grant | m.Abort | m.Received | m.Welcome | m.Refused):
            raise WireError(f"{type(message).__name__} is no notice")
        room = self._rooms.get(message.room)
        if room is None:
            self.late += 1
            return
        room.heard = self._clock.now()
        if isinstance(message, m.Quiesced):
            if room.state is Receiver.ABORTING:
                self._step(room, ReceiverEvent.QUIESCED)
        elif isinstance(message, m.Finished):
            aborting = room.state is Receiver.ABORTING
            self._step(room, ReceiverEvent.FINISHED)
            if not aborting:
                self._outcomes.append(Over(room.id))
        elif isinstance(message, m.Failed):
            self._break(room, ReceiverEvent.FAILED, message.kind, message.message)
        elif room.state is not Receiver.GRANTED:
            self.late += 1
        elif isinstance(message, m.Wrote):
            self._wrote(room, message)
        else:
            self._complete(room)

    def _wrote(self, room: _Room, wrote: m.Wrote) -> None:
        if wrote.first != room.arrived or len(wrote.keys) != len(wrote.digests):
            self._damage(room, f"pages {wrote.first}.. came when {room.arrived} were here")
            return
        end = wrote.first + len(wrote.keys)
        if wrote.keys != room.expected.keys[wrote.first : end]:
            self._damage(room, f"pages {wrote.first}..{end - 1} are of another prompt")
            return
        if self._verify and not self._verified(room, wrote.first, wrote.digests):
            return
        room.arrived = end
        self._step(room, ReceiverEvent.WROTE)

    def _verified(self, room: _Room, first: int, digests: Sequence[int]) -> bool:
        assert room.lease is not None
        size = self._pools.layout.spec.page_tokens
        pages = room.lease.indices[first : first + len(digests)]
        firsts = [(first + i) * size for i in range(len(digests))]
        ends = [min(at + size, room.expected.positions) for at in firsts]
        found = self._digester.digest(self._pools.region, "full", pages, firsts, ends)
        bad = [first + i for i, (a, b) in enumerate(zip(found, digests, strict=True)) if a != b]
        if bad:
            self._damage(room, f"pages {bad} don't match their tags")
        return not bad

    def _complete(self, room: _Room) -> None:
        assert room.lease is not None
        assert room.slot is not None
        if room.arrived != len(room.expected.keys):
            self._damage(room, f"{room.arrived} of {len(room.expected.keys)} pages arrived before the slot")
            return
        try:
            metadata = copy_out(self._slots, room.slot.indices[0], room.id, room.slot.epochs[0])
        except WireError as error:
            self._damage(room, str(error))
            return
        self._send(room.peer, m.Received(room.id))
        lease, room.lease = room.lease, None
        size = room.arrived * self._pools.layout.spec.page_bytes
        self._step(room, ReceiverEvent.COMPLETE)
        self._outcomes.append(Arrived(room.id, lease, metadata, size))

    def _damage(self, room: _Room, message: str) -> None:
        self.damaged += 1
        log.error("room %s from %s: %s", room.id, room.peer.ref.name, message)
        self._send(room.peer, m.Abort(room.id, message, damaged=True))
        event = ReceiverEvent.REVOKED if self._plane.revocable else ReceiverEvent.DAMAGED
        self._break(room, event, ErrorKind.DAMAGED, message)

    # ------------------------------------------------------------ ends

    def _break(self, room: _Room, event: ReceiverEvent, kind: ErrorKind, message: str) -> None:
        aborting = room.state is Receiver.ABORTING
        self._step(room, event)
        if not aborting:
            self._outcomes.append(Broken(room.id, kind, message, room.peer.ref.name))

    def _expire(self) -> None:
        now = self._clock.now()
        for peer in [p for p in self._peers.values() if p.welcome is None and now >= p.deadline]:
            self._lose(peer, f"{peer.ref.name} did not answer within {self._config.connect_timeout_s:g} s")
        for room in self._silent(now):
            self._send(room.peer, m.Abort(room.id, "silence"))
            event = ReceiverEvent.REVOKED if self._plane.revocable else ReceiverEvent.ABORT
            message = f"nothing came for {self._config.room_timeout_s:g} s"
            self._break(room, event, ErrorKind.ROOM, message)

    def _silent(self, now: float) -> Iterable[_Room]:
        late = now - self._config.room_timeout_s
        return [r for r in self._rooms.values() if r.state is Receiver.GRANTED and r.heard <= late]

    def _step(self, room: _Room, event: ReceiverEvent) -> None:
        """The one place where a room changes state, and where its ends release what it holds."""
        room.state = RECEIVER.next(room.state, event)
        if not RECEIVER.terminal(room.state):
            return
        self._plane.revoke(room.id)
        for lease in (room.lease, room.slot):
            if lease is not None:
                lease.release()
        room.lease = room.slot = None
        del self._rooms[room.id]
        self._ended[room.id] = None
        while len(self._ended) > 65536:
            self._ended.popitem(last=False)
