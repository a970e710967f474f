"""The KV sender, prefill's end of the rooms: takes grants, writes pages as chunks finish, seals with the metadata.

Its parts are the rooms, with decode's messages about them (`sender_rooms.py`), the peers (`sender_peers.py`), and the
queue of writes to each peer (`write_queue.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from twinpool.cache.device.device_port import Completion, LayerMarks
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RoomId, request_in
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.contracts.messages.worker_status import EndedWorker
from twinpool.transfer.net.control_channel import ProcessIdentity
from twinpool.transfer.planes.data_plane import PageNumbers, PageWrite, SlotWrite
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.peers import RoomEnd
from twinpool.transfer.rooms.room_messages import HandoverMetadata, pack
from twinpool.transfer.rooms.room_states import LayeredPages, SendablePages, SenderEvent, SenderState
from twinpool.transfer.rooms.sender.sender_peers import (
    MessageHeard,
    PeerLost,
    SenderPeerEvent,
    SenderPeers,
    StrangerAborted,
    identity_of,
)
from twinpool.transfer.rooms.sender.sender_rooms import LayeredWrite, SenderOutcome, SenderRoom, SenderRooms
from twinpool.transfer.rooms.sender.write_queue import QueuedWrite, RoomTimes

log = logging.getLogger("twinpool.transfer")
_LOOK_AGAIN_S = 0.002
"""Seconds until a write that is under way is looked at again."""


class KVSender:
    """The sending end of all hand-overs of a worker. Single-threaded; `poll` never blocks, except until writes that are
    under way to a lost peer are complete."""

    def __init__(self, end: RoomEnd, others: Sequence[ProcessIdentity] = ()) -> None:
        """`others`: the processes of the worker's other ranks."""
        self.end = end
        self._plane, self._pools, self._config, self._clock = end.plane, end.pools, end.config, end.clock
        self._peers = SenderPeers(end, others)
        self.control = self._peers.control
        end.plane.register(end.pools, None)
        self._rooms = SenderRooms(end.name, self._peers)
        self.refused = 0
        """Messages that could not be used."""
        self.sent: Counter[str] = Counter()
        """Bytes posted, by pool."""

    # ------------------------------------------------------------ called by prefill

    def open(self, room: RoomId, peer: PeerRef) -> None:
        """Open a room that hands over to `peer`, and take its grant if that came early. Raises `WireError` for a room
        that exists or has existed, or was given up by decode before its request came."""
        known = self._peers.get(identity_of(peer))
        if room in self._rooms or room in self._rooms.ended or (known is not None and room in known.early.given_up):
            raise WireError(f"room {room} exists already, or was given up")
        entry = self._rooms.open(room, peer)
        early = known.early.take(room) if known is not None else None
        if known is not None and early is not None:
            self._rooms.grant(entry, known, early)

    def granted(self, room: RoomId) -> bool:
        """Return whether pages of `room` can be written: it has its grant, and isn't sealed or over."""
        entry = self._rooms.get(room)
        return entry is not None and entry.state is SenderState.GRANTED

    def wanted(self, room: RoomId) -> dict[str, range]:
        """Return the numbers that are granted and not written yet, by pool, for every pool; empty before the grant."""
        entry = self._rooms[room]
        return {pool.name: entry.shares.left(pool.name) for pool in self._pools.spec.pools}

    def layered(self, room: RoomId) -> bool:
        """Return whether pages of `room` can be written layer by layer: it is granted, and its link can do that."""
        entry = self._rooms.get(room)
        return self.granted(room) and entry is not None and entry.peer is not None and entry.peer.writes.layered

    def bytes_per_s(self, rooms: Iterable[RoomId]) -> float:
        """Return what the links of these rooms carried a second, together; 0 where one has carried nothing yet. The
        rooms are `layered`."""
        links = {id(peer.link): peer.link for room in rooms if (peer := self._rooms[room].peer) is not None}
        rates = [link.sent.bytes_per_s for link in links.values()]
        return sum(rates) if all(rates) else 0.0

    def unwritten(self, room: RoomId) -> dict[str, range]:
        """Return as `wanted` does, without the numbers that steps under way are writing layer by layer."""
        entry = self._rooms[room]
        return {pool.name: entry.after_layered(pool.name) for pool in self._pools.spec.pools}

    def write_layers(self, rooms: Mapping[RoomId, LayeredPages], step: Completion, marks: LayerMarks) -> None:
        """Write pages that `step`, which is under way, will have finished: each group of layers once the step has
        reached its mark. By room, the first pages of what is `unwritten`.

        `write` announces them once they are sealed, which is when the step has come to a good end. Where it doesn't,
        the same places are written again: their room is granted, and nobody has adopted them.
        """
        groups = _groups(marks)
        aheads = {}
        for room, pages in rooms.items():
            entry = self._rooms[room]
            most = {pool: min(_most(entry, pool, layers[pool]) for layers in groups) for pool in pages.runs}
            runs = {pool: run.head(most[pool]) for pool, run in pages.runs.items()}
            aheads[room] = LayeredWrite(step, pages.generation, runs)
            entry.layered.append(aheads[room])
        # Group by group: a stream sends in order, and no room is to wait for the last layers of another one.
        for mark, layers in zip(marks, groups, strict=True):
            for room, ahead in aheads.items():
                entry = self._rooms[room]
                some = {pool: run for pool, run in ahead.runs.items() if layers[pool]}
                if some:
                    ahead.posted += self._post(entry, some, (mark,), {pool: layers[pool] for pool in some})
                ahead.number = entry.writes
        for ahead in aheads.values():
            self._count(ahead.runs)

    def write(
        self,
        room: RoomId,
        finished: Mapping[str, SendablePages],
        after: Sequence[Completion],
        generation: int = 0,
    ) -> None:
        """Write finished pages of a granted room, all pools together, after the operations `after` that made them.

        Numbers that decode didn't ask for, or that were written before, are skipped; the rest of each pool goes in
        order, in as many writes as the reader's frames need. Of what one of `after` wrote layer by layer, the reader is
        only told; what later steps of this `generation` are writing is left to them.
        """
        entry = self._rooms[room]
        entry.computed_at = self._clock.now()
        self._announce_layers(entry, finished, after, generation)
        while not entry.failed:
            chosen = _next_of(entry, finished)
            if not chosen:
                return
            runs = {pool: PageNumbers(pages.first, pages.indices) for pool, pages in chosen.items()}
            posted = self._post(entry, runs, after)
            self._announce(entry, chosen, posted, entry.writes)
            self._count(runs)

    def _announce_layers(
        self, entry: SenderRoom, finished: Mapping[str, SendablePages], after: Sequence[Completion], generation: int
    ) -> None:
        """Announce what was written layer by layer of one of the steps `after`, if it is what is finished. What steps
        of another generation wrote so has come to nothing."""
        while entry.layered and entry.layered[0].generation != generation:
            entry.overtaken += entry.layered.popleft().posted
        if not entry.layered or not any(done is entry.layered[0].step for done in after):
            return
        ahead = entry.layered.popleft()
        chosen = _same(entry, ahead, finished)
        if chosen is None:
            entry.overtaken += ahead.posted
            return
        for pool, pages in chosen.items():
            entry.shares.advance(pool, range(pages.first, pages.first + len(pages.indices)))
        self._announce(entry, chosen, ahead.posted, ahead.number)

    def _post(
        self,
        entry: SenderRoom,
        runs: Mapping[str, PageNumbers],
        after: Sequence[Completion],
        layers: Mapping[str, range] | None = None,
    ) -> list[QueuedWrite]:
        """Post one write of a room; returns it, or nothing where the room has failed."""
        assert entry.peer is not None
        assert entry.target is not None
        self._rooms.step(entry, SenderEvent.WROTE)
        entry.writes += 1
        posted = entry.peer.writes.post(PageWrite(entry.target, runs, entry.writes, layers), after, entry.overtaken)
        if posted is None:
            return []
        entry.posted.append(posted)
        return [posted]

    def _announce(
        self, entry: SenderRoom, pages: Mapping[str, SendablePages], posted: Sequence[QueuedWrite], writes: int
    ) -> None:
        assert entry.peer is not None
        parts = tuple(_sealed(pool, some.first, some.tags) for pool, some in pages.items())
        entry.peer.writes.announce(m.PagesWritten(entry.id, entry.ticket, parts), posted, writes)

    def _count(self, runs: Mapping[str, PageNumbers]) -> None:
        for pool, run in runs.items():
            self.sent[pool] += len(run) * self._pools.spec.whole.unit_bytes(pool)

    def seal(self, room: RoomId, metadata: HandoverMetadata) -> None:
        """Write the metadata, as the last write of the room.

        Raises `WireError` while something that decode wants is not written, and where a write has failed.
        """
        entry = self._rooms[room]
        assert entry.peer is not None
        assert entry.grant is not None
        assert entry.target is not None
        if entry.failed or not entry.shares.done:
            raise WireError(f"room {room} can't be sealed: {entry.failed or f'{entry.shares} not written'}")
        data = pack(replace(metadata, slot_epoch=entry.grant.slot_epoch))
        posted = entry.peer.writes.post(SlotWrite(entry.target, data), ())
        if posted is not None:
            times = RoomTimes(entry.computed_at, entry.posted)
            entry.peer.writes.announce(m.SlotWritten(room, entry.ticket), (posted,), entry.writes, times)
        entry.sent_at = self._clock.now()
        self._rooms.step(entry, SenderEvent.SENT)

    def finish(self, room: RoomId) -> None:
        """End a room whose request ended with its first token, and tell decode. Nothing happens if the room is over."""
        entry = self._rooms.get(room)
        if entry is not None:
            self._rooms.end(entry, SenderEvent.FINISHED, m.NothingToDecode(room, entry.ticket))

    def fail(self, room: RoomId, kind: ErrorKind, message: str) -> None:
        """Give a request up, and tell decode. No outcome follows; nothing happens when the room is over."""
        entry = self._rooms.get(room)
        if entry is not None:
            self._rooms.end(entry, SenderEvent.FAILED, entry.failure(kind, message))

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None:
        """Take in which incarnations of workers have ended, as the controller says; `poll` loses those on other
        hosts."""
        self._peers.workers_ended(ended)

    def poll(self) -> list[SenderOutcome]:
        """Hear peers, send due notices, expire rooms; returns the outcomes since the last call."""
        for event in self._peers.hear():
            self._hear(event)
        for lost in self._peers.dead():
            self._rooms.lost(lost)
        self._plane.poll_followers()
        for peer in self._peers.disconnected():
            self._rooms.disconnected(peer)
        for peer in self._peers.values():
            peer.writes.flush()
        self._rooms.fail_unwritten()
        for lost in self._peers.unreachable():
            self._rooms.lost(lost)
        self._rooms.expire(self._clock.now(), self._config.room_timeout_s)
        return self._rooms.take_outcomes()

    @property
    def plane(self) -> str:
        """The name of the data plane, as in `transfer.plane`."""
        return self._plane.kind

    @property
    def late(self) -> int:
        """Messages that came for a room that had ended."""
        return self._rooms.late

    @property
    def sent_bytes(self) -> int:
        return self.sent.total()

    @property
    def rooms(self) -> int:
        return len(self._rooms)

    @property
    def quiet(self) -> bool:
        """Whether no room is left, and nothing of ended rooms is being written or waits to be sent."""
        return not self._rooms and not self._peers.writing

    @property
    def counters(self) -> dict[str, float]:
        """Counters of a status: by the worker that receives, numbers of rooms that have not ended (hazard D2), what
        its link has carried and what is under way on it, and by which plane."""
        out: dict[str, float] = dict(Counter(f"outgoing_to:{room.wants.name}" for room in self._rooms.values()))
        for peer in self._peers.values():
            sent = peer.link.sent
            values = {
                "writes": sent.writes, "bytes": sent.nbytes, "busy_s": sent.busy_s, "waited_s": sent.waited_s,
                "opened": sent.opened, "under_way": len(peer.writes), "in_flight_bytes": peer.writes.in_flight_bytes,
                "waiting": peer.writes.waiting, f"plane_{self._plane.kind}": 1,
            }  # fmt: skip
            out |= {f"link_{what}:{peer.name}": value for what, value in values.items()}
        return out

    @property
    def unconfirmed(self) -> set[RoomId]:
        """Rooms in which everything was sent and decode has not confirmed yet that it arrived."""
        return {r.id for r in self._rooms.values() if r.state is SenderState.SENT}

    @property
    def next_deadline(self) -> float | None:
        """When `poll` is due although nothing arrives, by the clock; None where no deadline runs."""
        due = [r.sent_at + self._config.room_timeout_s for r in self._rooms.values() if r.state is SenderState.SENT]
        if self._peers.writing or any(r.failed for r in self._rooms.values()):
            due.append(self._clock.now() + _LOOK_AGAIN_S)
        return min(due, default=None)

    def check(self) -> list[str]:
        found = []
        for room in self._rooms.values():
            wants = self._peers.get(identity_of(room.wants))
            if room.peer is None and wants is not None and room.id in wants.early.grants:
                found.append(f"room {room.id}: early grant and open")
            if (room.state is SenderState.OPEN) != (room.grant is None):
                found.append(f"room {room.id} is {room.state} and its grant says otherwise")
            if room.peer is not None and self._peers.get(room.peer.identity) is not room.peer:
                found.append(f"room {room.id} belongs to a peer that is gone")
        return found

    def close(self) -> None:
        self._peers.close()
        self._plane.close()

    # ------------------------------------------------------------ messages of peers

    def _hear(self, event: SenderPeerEvent) -> None:
        if isinstance(event, PeerLost):
            self._rooms.lost(event)
        elif isinstance(event, MessageHeard):
            try:
                self._rooms.hear(event.peer, event.message)
            except WireError as error:
                self._refuse(event.peer.identity, event.message.room, m.reason_of(error))
        elif isinstance(event, StrangerAborted):
            try:
                # What was written to it was given up with it, where a write may be on its way after that.
                word = self._rooms.stranger_aborted(event)
                self._peers.reply(event.identity, replace(word, torn=self._plane.by_peer))
            except WireError as error:
                self._refuse(event.identity, event.abort.room, m.reason_of(error))
        else:
            self._refuse(event.identity, event.room, event.reason)

    def _refuse(self, identity: bytes, room: str, reason: str) -> None:
        """Reject a message and count it; few are logged, as a peer that sends one such message may send many."""
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # Of a flood, the first, second, fourth, eighth ...
            facts = {"request_id": request_in(RoomId(room)), "room": room}
            log.warning("control message refused, the %d.: %s", self.refused, reason, extra=facts)
        self._peers.reject(identity, room, reason)


def _next_of(room: SenderRoom, finished: Mapping[str, SendablePages]) -> dict[str, SendablePages]:
    """Take from `finished` what the room has to write next of each pool, as much as goes into one write. It counts as
    written from here on."""
    chosen = {}
    for pool, pages in finished.items():
        left = room.before_layered(pool)
        start, stop = max(pages.first, left.start), min(pages.first + len(pages.indices), left.stop)
        stop = min(stop, start + _most(room, pool))
        if start < stop:
            run = slice(start - pages.first, stop - pages.first)
            chosen[pool] = SendablePages(start, tuple(pages.indices[run]), pages.tags[run])
            room.shares.advance(pool, range(start, stop))
    return chosen


def _groups(marks: LayerMarks) -> list[dict[str, range]]:
    """The layers of each pool that are written with each group."""
    begins = [dict.fromkeys(marks.groups[0], 0), *marks.groups[:-1]]
    return [
        {pool: range(begin[pool], stop) for pool, stop in end.items()}
        for begin, end in zip(begins, marks.groups, strict=True)
    ]


def _most(room: SenderRoom, pool: str, layers: range | None = None) -> int:
    """How many pages of `pool`, or of some of its layers, one write of the room may have."""
    assert room.peer is not None
    return room.peer.writes.max_pages(pool, layers)


def _same(
    room: SenderRoom, ahead: LayeredWrite, finished: Mapping[str, SendablePages]
) -> dict[str, SendablePages] | None:
    """Return the finished pages, with their tags, that were written layer by layer; None unless they are just those
    that the room has to write next, from the same places."""
    chosen = {}
    for pool, run in ahead.runs.items():
        pages = finished.get(pool)
        if pages is None or run.first != room.shares.left(pool).start:
            return None
        at = slice(run.first - pages.first, run.first - pages.first + len(run))
        if at.start < 0 or tuple(pages.indices[at]) != run.indices:
            return None
        chosen[pool] = SendablePages(run.first, run.indices, pages.tags[at])
    return chosen


def _sealed(pool: str, first: int, tags: Sequence[ContentTag]) -> m.PageTags:
    return m.PageTags(pool, first, tuple(t.key for t in tags), tuple(t.digest for t in tags))
