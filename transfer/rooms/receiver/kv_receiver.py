"""The KV receiver, decode's end of the rooms: grants pages, checks what arrives, hands complete prompts to the worker.

A room is granted places for what decode lacks of each pool, and is complete when all of that has arrived. The parts of
the receiver are its rooms, which own pages and slots while they last, with the writers' notices about them
(`receiver_rooms.py`), the check of pages and metadata (`receiver_room.py`), and its peers (`receiver_peers.py`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence

from twinpool.cache.device.device_port import DEVICE, spans
from twinpool.cache.memory.kv_cache_spec import NOTHING, HeldPages, due, missing
from twinpool.cache.pool.page_allocator import Lease, PageAllocator
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.contracts.messages.worker_status import EndedWorker
from twinpool.transfer.planes.data_plane import SLOT_BYTES, PageNumbers, RoomTarget
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.peers import RoomEnd
from twinpool.transfer.rooms.receiver import receiver_peers as events
from twinpool.transfer.rooms.receiver.receiver_peers import ReceiverPeers
from twinpool.transfer.rooms.receiver.receiver_room import ArrivalCheck
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverOutcome, ReceiverRooms
from twinpool.transfer.rooms.room_states import ExpectedPrompt, ReceiverEvent, ReceiverState, RoomProgress

log = logging.getLogger("twinpool.transfer")
_LOOK_AGAIN_S = 0.002
"""Seconds until pages that are being checked are looked at again, on devices that don't wake their host."""


class KVReceiver:
    """The receiving end of all hand-overs of a worker. Single-threaded; `poll` never blocks."""

    def __init__(self, end: RoomEnd, slots: int, *, verify: bool) -> None:
        """`slots`: the number of metadata slots. `verify`: whether digests of pages are computed when they arrive."""
        self.end = end
        self._plane, self._pools, self._device, self._clock = end.plane, end.pools, end.device, end.clock
        memory = end.plane.allocate("slots", slots * SLOT_BYTES).view(slots, SLOT_BYTES)
        self.slots = PageAllocator("metadata slots", slots)
        self._peers = ReceiverPeers(end)
        self._arrivals = ArrivalCheck(end.pools, end.device, memory, verify)
        self._rooms = ReceiverRooms(end, self._peers, self._arrivals)
        self.damage = self._rooms.damage
        """Rooms in which something arrived that isn't what was promised, by pool, or by "metadata"."""
        self.refused = 0
        """Messages and notices, heard or said, that could not be used."""
        end.plane.register(end.pools, memory)

    # ------------------------------------------------------------ called by decode

    def open(self, room: RoomId, peer: PeerRef, expected: ExpectedPrompt) -> None:
        """Open a room that receives `expected` from `peer`, and say hello to that peer if need be.

        Raises `WireError` for a room that exists or has existed: rooms are used once. Raises `ValueError` where
        `expected` hasn't one key for each of its pages.
        """
        if room in self._rooms or room in self._rooms.ended:
            raise WireError(f"room {room} exists already")
        pages = self._pools.pages_for(expected.positions)
        if len(expected.keys) != pages:
            raise ValueError(f"{expected.positions} positions have {pages} pages, not {len(expected.keys)} keys")
        connected = self._peers.connect(peer)
        for gone in connected.gone:
            self._hear(gone)
        self._rooms.open(room, connected.peer, expected)

    def missing(self, expected: ExpectedPrompt, held: HeldPages = NOTHING) -> dict[str, range]:
        """Return the numbers that a room would have to receive, by pool: due after the prompt, and not in `held`."""
        return missing(due(self._pools.spec, expected.positions), held)

    def grant(self, room: RoomId, leases: Mapping[str, Lease], held: HeldPages = NOTHING) -> bool:
        """Give `leases`, by pool, to the room and grant it to the writer. Returns False, with nothing taken, where no
        metadata slot is free.

        The first indices of each lease are for the `missing` numbers, in order; those after them are for the answer.
        Pages in `held` stay in their places, and the caller must keep them there (by a node lock) as long as it needs
        them. Raises `ValueError` where a lease is too short.
        """
        entry = self._rooms[room]
        wanted = self.missing(entry.expected, held)
        for pool, numbers in wanted.items():
            if numbers and (pool not in leases or len(leases[pool]) < len(numbers)):
                raise ValueError(f"room {room} needs a lease of {len(numbers)} in pool {pool}")
        if not self.slots.free:
            return False
        slot = self.slots.lease(1, f"room {room}")
        self._rooms.step(entry, ReceiverEvent.GRANT)
        runs = {p: PageNumbers(n.start, leases[p].indices[: len(n)]) for p, n in wanted.items() if n}
        entry.leases, entry.slot, entry.heard = dict(leases), slot, self._clock.now()
        entry.runs, entry.shares = runs, RoomProgress(wanted)
        places = {pool: run.indices for pool, run in runs.items()}
        entry.remote = self._device.remote_write(f"writes of {entry.peer.ref.name} to {room}", spans(DEVICE, places))
        ticket = 1 + secrets.randbits(62)
        self._plane.permit(RoomTarget(room, runs, slot.indices[0], ticket))
        granted = [m.GrantedPages(p, run.first, run.indices, leases[p].epochs[: len(run)]) for p, run in runs.items()]
        entry.grant = m.PageGrant(room, tuple(granted), slot.indices[0], slot.epochs[0], ticket)
        self._rooms.promise(entry)
        return True

    def abort(self, room: RoomId, reason: str) -> None:
        """Give the room up. Idempotent; no outcome follows. Pages and slot return when nobody can write to them any
        more."""
        entry = self._rooms.get(room)
        if entry is not None and not entry.aborting:
            self._rooms.give_up(entry, reason)

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None:
        """Take in which incarnations of workers have ended, as the controller says; `poll` ends the rooms of those on
        other hosts."""
        self._peers.workers_ended(ended)

    def poll(self) -> list[ReceiverOutcome]:
        """Hear peers and notices, expire rooms and peers that are late; returns the outcomes since the last call."""
        for peer in list(self._peers.values()):
            for heard in self._peers.hear(peer):
                self._hear(heard)
        for data in self._plane.poll():
            try:
                self._rooms.hear(m.decode_notice(data))
            except WireError as error:
                self._refuse("notice", error)
                self._plane.dropped += 1
        self._rooms.poll()
        for late in self._peers.late():
            self._hear(late)
        self._rooms.expire()
        return self._rooms.take_outcomes()

    @property
    def rooms(self) -> int:
        return len(self._rooms)

    @property
    def checking(self) -> bool:
        """Whether pages that arrived are being checked: they stay pinned meanwhile, also those of rooms that ended."""
        return self._arrivals.sweep() > 0

    @property
    def late(self) -> int:
        """Messages that came for a room that had ended."""
        return self._rooms.late

    @property
    def damaged(self) -> int:
        return self.damage.total()

    @property
    def counters(self) -> dict[str, float]:
        return {"pages_damaged": self.damaged, "late_messages": self.late}

    def holds(self, pool: str) -> int:
        """Pages or slots of `pool` that rooms hold, those in quarantine included."""
        return sum(len(r.leases[pool]) for r in self._rooms.values() if pool in r.leases)

    @property
    def next_deadline(self) -> float | None:
        """When `poll` is due although nothing arrives, by the clock; None where no deadline runs."""
        looking = [self._clock.now() + _LOOK_AGAIN_S] if self.checking else []
        due = [at for at in (self._peers.next_deadline, self._rooms.next_deadline, *looking) if at is not None]
        return min(due, default=None)

    def check(self) -> list[str]:
        found = self.slots.check()
        for room in self._rooms.values():
            granted = room.state is ReceiverState.GRANTED or room.aborting
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
        self._arrivals.close()
        self._peers.close()
        self._plane.close()

    # ------------------------------------------------------------ events of peers

    def _hear(self, heard: events.ReceiverPeerEvent) -> None:
        match heard:
            case events.NoticeHeard(peer, _):
                try:
                    self._rooms.hear_from(heard)
                except WireError as error:
                    self._refuse(f"message of {peer.ref.name}", error)
            case events.MessageUnusable(peer, error):
                self._refuse(f"message of {peer.ref.name}", error)
            case events.MessageRefused():
                self._refused(heard)
            case events.GrantsLeft(rooms):
                for room in rooms:
                    self._rooms.promised(self._rooms[room])
            case events.PeerCut(peer):
                self._rooms.resend(peer)
            case events.PeerUnreachable():
                self._rooms.unreachable(heard)
            case events.PeerParted():
                self._rooms.parted(heard)
            case events.PeerDied():
                self._rooms.died(heard)

    def _refused(self, refused: events.MessageRefused) -> None:
        """Fail the room that a refused message was about: it can't go on."""
        name = refused.peer.ref.name
        self._refuse(f"message to {name}", WireError(refused.reason))
        room = self._rooms.get(refused.room)
        if room is not None and room.peer is refused.peer and not room.aborting:
            self._rooms.fail(room, f"{name} can't use a message: {refused.reason:.500}")

    def _refuse(self, what: str, error: WireError) -> None:
        """Count a refused message; few are logged, as a peer that sends one such message may send many."""
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # Of a flood, the first, second, fourth, eighth ...
            log.warning("%s refused, the %d. in all: %.500s", what, self.refused, error)
