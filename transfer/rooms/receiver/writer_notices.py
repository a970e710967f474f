"""Writer notices: a writer's notices about rooms to the receiver, each checked before anything changes.

A notice carries the ticket of its room's grant, so that only the writer that was granted the places can say that they
are written, or give them back (hazard A5).
"""

from __future__ import annotations

import logging
from collections import Counter

from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.clock import Clock
from twinpool.contracts.damage import DamageSite, log_damage
from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import request_in
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.metadata_slots import HandoverMetadata
from twinpool.transfer.rooms.receiver.arrival_check import ArrivalCheck, Damage, Hole
from twinpool.transfer.rooms.receiver.page_check import PageCheck
from twinpool.transfer.rooms.receiver.receiver_peer_events import NoticeHeard
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverRoom, ReceiverRooms
from twinpool.transfer.rooms.room_outcomes import PromptArrived
from twinpool.transfer.rooms.room_states import ReceiverEvent, ReceiverState

log = logging.getLogger("twinpool.transfer")
_WAITING = 4096
"""Notices of writes of one room that may wait for their check at once."""


class WriterNotices:
    """Notices of writes, ends and answers, applied to rooms."""

    def __init__(self, rooms: ReceiverRooms, arrivals: ArrivalCheck, pools: PoolSet, clock: Clock) -> None:
        self._rooms, self._arrivals, self._pools, self._clock = rooms, arrivals, pools, clock
        self.late = 0
        """Messages that came for a room that had ended."""
        self.damage: Counter[str] = Counter()
        """Rooms in which something arrived that isn't what was promised, by pool, or by "metadata"."""

    def hear_from(self, heard: NoticeHeard) -> None:
        """Apply a notice that came over a peer's control connection, and not through the data plane. Raises `WireError`
        for a room of another peer, and as `hear` does."""
        room = self._rooms.get(heard.notice.room)
        if room is not None and room.peer is not heard.peer:
            raise WireError(f"room {room.id} is not {heard.peer.ref.name}'s")
        self.hear(heard.notice)

    def hear(self, notice: m.Notice) -> None:
        """Apply a notice. Raises `WireError` for one without the room's ticket; nothing has changed then."""
        room = self._rooms.get(notice.room)
        if room is None:
            self.late += 1
            return
        if notice.ticket != room.ticket:
            if notice.ticket or not isinstance(notice, m.RoomFailed | m.NothingToDecode):
                raise WireError(f"{type(notice).__name__} of room {room.id} has another ticket")
            if room.promised:
                self._rooms.ended_early(room, notice)
                return
        room.heard = self._clock.now()
        if not isinstance(notice, m.PagesWritten | m.SlotWritten) and notice.torn:
            self._rooms.torn(room)
            if notice.room not in self._rooms:
                return
        if isinstance(notice, m.WriterQuiesced):
            if room.aborting:
                self._rooms.step(room, ReceiverEvent.QUIESCED)
        elif isinstance(notice, m.NothingToDecode):
            self._rooms.answered(room)
        elif isinstance(notice, m.RoomFailed):
            self._rooms.end_failed(room, ReceiverEvent.FAILED, notice.kind, notice.message)
        elif room.state is not ReceiverState.GRANTED:
            self.late += 1
        elif len(room.notices) >= _WAITING:
            self._break(room, Hole(f"{_WAITING} notices of writes wait for their check already"))
        else:
            room.notices.append(notice)
            self._apply(room)

    def poll(self) -> None:
        """Apply the notices of writes whose check is done."""
        self._arrivals.sweep()
        for room in [room for room in self._rooms.values() if room.notices]:
            self._apply(room)

    @property
    def checking(self) -> bool:
        """Whether pages that arrived are being checked."""
        return self._arrivals.sweep() > 0

    def close(self) -> None:
        self._arrivals.close()

    def _apply(self, room: ReceiverRoom) -> None:
        """Apply a room's notices of writes in order, up to the first whose pages are still being checked: all that it
        tells of is right, or the room ends."""
        while room.state is ReceiverState.GRANTED and room.notices:
            notice = room.notices[0]
            if isinstance(notice, m.SlotWritten):
                room.notices.popleft()
                self._complete(room, notice)
                return
            begun = room.checking or self._arrivals.begin(room, notice)
            wrong: Damage | Hole | None
            if isinstance(begun, PageCheck):
                room.checking = begun
                if not begun.done:
                    return
                wrong = self._arrivals.end(room, begun)
            else:
                wrong = begun
            room.checking = None
            room.notices.popleft()
            if wrong is None:
                self._rooms.step(room, ReceiverEvent.WROTE)
            else:
                self._break(room, wrong)

    def _complete(self, room: ReceiverRoom, wrote: m.SlotWritten) -> None:
        """Check the metadata, which has arrived, and complete the room with it."""
        metadata = self._arrivals.metadata(room)
        if not isinstance(metadata, HandoverMetadata):
            self._break(room, metadata)
            return
        received = {pool: len(run) * self._pools.spec.whole.unit_bytes(pool) for pool, run in room.runs.items()}
        hidden_s, written_s = max(0, wrote.hidden_us) / 1e6, max(0, wrote.exposed_us) / 1e6
        exposed_s = written_s + self._clock.now() - room.heard
        self._rooms.complete(
            room, PromptArrived(room.id, room.leases, metadata, received, room.digests, hidden_s, exposed_s)
        )

    def _break(self, room: ReceiverRoom, wrong: Damage | Hole) -> None:
        peer = room.peer.ref.name
        if isinstance(wrong, Hole):
            facts = {"request_id": request_in(room.id), "room": room.id, "peer": peer}
            log.warning("pages lack: %s", wrong.what, extra=facts)
            self._rooms.fail(room, wrong.what)
            return
        self.damage[wrong.pool if wrong.pool in self._pools.spec.by_name else "metadata"] += 1
        request_id = request_in(room.id)
        log_damage(
            log, DamageSite.HANDOVER, request_id=request_id, room=room.id, peer=peer, pool=wrong.pool, what=wrong.what
        )
        self._rooms.damaged(room, f"{wrong.pool}: {wrong.what}")
