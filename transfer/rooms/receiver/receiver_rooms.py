"""The receiver's rooms, each from its opening to the one step that releases its pages and its slot.

    open, promise     the room gets its places, and its grant leaves
    hear              the writer's notices, each checked before anything changes: pages and metadata that have arrived
                      are checked in order, until nothing lacks
    complete          everything has arrived and is verified: the pages go to the request
    give_up, fail, damaged, answered, died, torn ...: every other end

A room owns its pages and its slot. Every end but `complete` releases them: at once where the plane can revoke the
writer's access, after the writer's word or proven death where it can't (hazard A5). A notice carries the ticket of its
room's grant, so that only the writer that was granted the places can say that they are written, or give them back.
"""

from __future__ import annotations

import logging
from collections import Counter

from twinpool.contracts.damage import DamageSite, log_damage
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RoomId, request_in
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.peers import RoomEnd
from twinpool.transfer.rooms.receiver.receiver_peers import (
    NoticeHeard,
    PeerDied,
    PeerParted,
    PeerUnreachable,
    ReceiverPeer,
    ReceiverPeers,
)
from twinpool.transfer.rooms.receiver.receiver_room import ArrivalCheck, Damage, Hole, PageCheck, ReceiverRoom
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import (
    RECEIVER,
    ExpectedPrompt,
    HandoverFailed,
    PromptAnswered,
    PromptArrived,
    ReceiverEvent,
    ReceiverState,
    RoomTable,
)

log = logging.getLogger("twinpool.transfer")
_WAITING = 4096
"""Notices of writes of one room that may wait for their check at once."""
ReceiverOutcome = PromptArrived | HandoverFailed | PromptAnswered


class ReceiverRooms(RoomTable[ReceiverRoom, ReceiverOutcome, m.HandoverReceived]):
    """Rooms that have not ended, by id. The class has more than twenty methods, since each notice and each way in which
    a room can end is one of them, and all of these meet in `step`, which alone releases pages and slots."""

    def __init__(self, end: RoomEnd, peers: ReceiverPeers, arrivals: ArrivalCheck) -> None:
        super().__init__()
        self._plane, self._peers, self._arrivals, self._pools = end.plane, peers, arrivals, end.pools
        self._config, self._clock = end.config, end.clock
        self.late = 0
        """Messages that came for a room that had ended."""
        self.damage: Counter[str] = Counter()
        """Rooms in which something arrived that isn't what was promised, by pool, or by "metadata"."""

    def open(self, room: RoomId, peer: ReceiverPeer, expected: ExpectedPrompt) -> None:
        self._rooms[room] = ReceiverRoom(room, peer, expected, self._clock.now())

    def promise(self, room: ReceiverRoom) -> None:
        """Send the room's grant, at once or after the peer's welcome."""
        assert room.grant is not None
        if self._peers.send(room.peer, room.grant):
            self.promised(room)

    def promised(self, room: ReceiverRoom) -> None:
        """Record that a room's grant has left."""
        room.promised, room.access = True, room.peer.access

    # ------------------------------------------------------------ notices of the writer

    def hear_from(self, heard: NoticeHeard) -> None:
        """Apply a notice that came over a peer's control connection, and not through the data plane. Raises `WireError`
        for a room of another peer, and as `hear` does."""
        room = self.get(heard.notice.room)
        if room is not None and room.peer is not heard.peer:
            raise WireError(f"room {room.id} is not {heard.peer.ref.name}'s")
        self.hear(heard.notice)

    def hear(self, notice: m.Notice) -> None:
        """Apply a notice. Raises `WireError` for one without the room's ticket; nothing has changed then."""
        room = self.get(notice.room)
        if room is None:
            self.late += 1
            return
        if notice.ticket != room.ticket:
            if notice.ticket or not isinstance(notice, m.RoomFailed | m.NothingToDecode):
                raise WireError(f"{type(notice).__name__} of room {room.id} has another ticket")
            if room.promised:
                self.ended_early(room, notice)
                return
        room.heard = self._clock.now()
        if not isinstance(notice, m.PagesWritten | m.SlotWritten) and notice.torn:
            self.torn(room)
            if notice.room not in self:
                return
        if isinstance(notice, m.WriterQuiesced):
            if room.aborting:
                self.step(room, ReceiverEvent.QUIESCED)
        elif isinstance(notice, m.NothingToDecode):
            self.answered(room)
        elif isinstance(notice, m.RoomFailed):
            self.end_failed(room, ReceiverEvent.FAILED, notice.kind, notice.message)
        elif room.state is not ReceiverState.GRANTED:
            self.late += 1
        elif len(room.notices) >= _WAITING:
            self._fail_arrival(room, Hole(f"{_WAITING} notices of writes wait for their check already"))
        else:
            room.notices.append(notice)
            self._apply(room)

    def poll(self) -> None:
        """Apply the notices of writes whose check is done."""
        self._arrivals.sweep()
        for room in [room for room in self.values() if room.notices]:
            self._apply(room)

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
                self.step(room, ReceiverEvent.WROTE)
            else:
                self._fail_arrival(room, wrong)

    def _complete(self, room: ReceiverRoom, wrote: m.SlotWritten) -> None:
        """Check the metadata, which has arrived, and complete the room with it."""
        metadata = self._arrivals.metadata(room)
        if not isinstance(metadata, HandoverMetadata):
            self._fail_arrival(room, metadata)
            return
        received = {pool: len(run) * self._pools.spec.whole.unit_bytes(pool) for pool, run in room.runs.items()}
        hidden_s, written_s = max(0, wrote.hidden_us) / 1e6, max(0, wrote.exposed_us) / 1e6
        exposed_s = written_s + self._clock.now() - room.heard
        self.complete(room, PromptArrived(room.id, room.leases, metadata, received, room.digests, hidden_s, exposed_s))

    def _fail_arrival(self, room: ReceiverRoom, wrong: Damage | Hole) -> None:
        peer = room.peer.ref.name
        if isinstance(wrong, Hole):
            facts = {"request_id": request_in(room.id), "room": room.id, "peer": peer}
            log.warning("pages lack: %s", wrong.what, extra=facts)
            self.fail(room, wrong.what)
            return
        self.damage[wrong.pool if wrong.pool in self._pools.spec.by_name else "metadata"] += 1
        request_id = request_in(room.id)
        log_damage(
            log, DamageSite.HANDOVER, request_id=request_id, room=room.id, peer=peer, pool=wrong.pool, what=wrong.what
        )
        self.damaged(room, f"{wrong.pool}: {wrong.what}")

    # ------------------------------------------------------------ ends

    def complete(self, room: ReceiverRoom, arrived: PromptArrived) -> None:
        """End a room that is complete and verified: the outcome gets the leases, and the writer is told."""
        received = m.HandoverReceived(room.id)
        self._peers.send(room.peer, received)
        self.ended.told(room.peer, room.id)
        room.leases = {}
        self.step(room, ReceiverEvent.COMPLETE, received)
        self._outcomes.append(arrived)

    def answered(self, room: ReceiverRoom) -> None:
        """End a room whose request ended with prefill's first token: there is nothing to decode."""
        aborting = room.aborting
        self.step(room, ReceiverEvent.FINISHED)
        if not aborting:
            self._outcomes.append(PromptAnswered(room.id))

    def ended_early(self, room: ReceiverRoom, word: m.RoomFailed | m.NothingToDecode) -> None:
        """Give up a room whose request ended at the writer before the grant got there. The outcome can be given at
        once; the places come back when the writer answers the grant, or the abort behind it."""
        if room.aborting:
            return
        if isinstance(word, m.RoomFailed):
            self._outcomes.append(HandoverFailed(room.id, word.kind, word.message, room.peer.ref.name))
        else:
            self._outcomes.append(PromptAnswered(room.id))
        self.give_up(room, "it had ended before its grant came")

    def give_up(self, room: ReceiverRoom, reason: str) -> None:
        """Tell the writer to stop, and end the room as soon as nobody can write to it any more (hazard A5)."""
        self._ask(room, room.abort(reason))
        free = self._plane.revocable or not room.promised
        self.step(room, ReceiverEvent.REVOKED if free else ReceiverEvent.ABORT)

    def fail(self, room: ReceiverRoom, reason: str, told: str = "") -> None:
        """Give a room up, with an outcome. `told`: the reason for the writer, where it is another one."""
        self.give_up(room, told or reason)
        self._outcomes.append(HandoverFailed(room.id, ErrorKind.ROOM, reason, room.peer.ref.name))

    def damaged(self, room: ReceiverRoom, reason: str) -> None:
        """Give a room up in which something arrived that isn't what was promised, with an outcome."""
        room.damaged = True
        self._ask(room, room.abort(reason))
        event = ReceiverEvent.REVOKED if self._plane.revocable else ReceiverEvent.DAMAGED
        self.end_failed(room, event, ErrorKind.DAMAGED, reason)

    def end_failed(self, room: ReceiverRoom, event: ReceiverEvent, kind: ErrorKind, message: str) -> None:
        """Apply `event`, by which the hand-over has failed, with an outcome unless the room was given up before."""
        aborting = room.aborting
        self.step(room, event)
        if not aborting:
            self._outcomes.append(HandoverFailed(room.id, kind, message, room.peer.ref.name))

    def expire(self) -> None:
        """Fail granted rooms of which nothing was heard for long, and repeat aborts whose answer is late."""
        now = self._clock.now()
        for room in [r for r in self._rooms.values() if (due := self._due(r)) is not None and now >= due]:
            if room.aborting:  # The writer's answer may be lost, with a connection.
                self._ask(room, room.abort("given up"))
            else:
                self.fail(room, f"nothing came for {self._config.room_timeout_s:g} s", "silence")

    @property
    def next_deadline(self) -> float | None:
        """When `expire` is due, by the clock; None where no room waits for its writer."""
        return min((due for room in self._rooms.values() if (due := self._due(room)) is not None), default=None)

    def _due(self, room: ReceiverRoom) -> float | None:
        if room.aborting:
            return room.asked + self._config.link_timeout_s
        return room.heard + self._config.room_timeout_s if room.state is ReceiverState.GRANTED else None

    # ------------------------------------------------------------ peers that went

    def died(self, died: PeerDied) -> None:
        """End the rooms of a dead peer: nobody writes to them any more."""
        for room in self.of(died.peer):
            self.end_failed(room, ReceiverEvent.LOST, ErrorKind.ROOM, died.reason)
        self.ended.forget(died.peer)

    def parted(self, parted: PeerParted, but: ReceiverRoom | None = None) -> None:
        """Fail the rooms of a peer; promised places stay in quarantine unless the plane is revocable. `but`: a room
        that is left as it is."""
        for room in self.of(parted.peer):
            if room is but:
                continue
            if not room.promised:
                self.end_failed(room, ReceiverEvent.LOST, ErrorKind.ROOM, parted.reason)
            elif not room.aborting:
                self.fail(room, parted.reason)
        self._drop(parted.peer)

    def torn(self, room: ReceiverRoom) -> None:
        """Where access is by peer, end that of the room's peer, of whose writes some may still be on their way; it is
        met again with the next room. To be called before the writer's last word ends the room.

        A peer whose processes can't be watched is on another host, and has no other access: its rooms end. One of this
        host that lives may be storing by itself for its other rooms, whatever was ended here: their places stay in
        quarantine until its word about each, or its death. About `room` it has said that it has stopped.
        """
        peer = room.peer
        if not self._plane.by_peer or room.access != peer.access:
            return  # The access that it wrote by has ended before.
        reason = f"a write of {peer.ref.name} failed"
        if peer.watch is None:
            self._peers.forget(peer)
            self.died(PeerDied(peer, reason))
        else:
            self.parted(self._peers.sever(peer, reason), but=room)

    def unreachable(self, unreachable: PeerUnreachable) -> None:
        """Fail the rooms of a peer that can't be reached. Places that it may still write stay in quarantine, unless its
        access can be ended: a peer whose processes can't be watched is on another host, and has no other. A peer
        without rooms is forgotten after a while."""
        rooms, peer = self.of(unreachable.peer), unreachable.peer
        for room in [r for r in rooms if not r.aborting]:
            self.fail(room, unreachable.reason)
        if rooms and self._plane.by_peer and peer.watch is None:
            self._peers.forget(peer)
            self.died(PeerDied(peer, unreachable.reason))
        if not rooms and unreachable.long:
            self._forget(unreachable.peer)

    def resend(self, peer: ReceiverPeer) -> None:
        """Send grants, aborts and confirmations of a peer once more, after its connection was cut. The writer takes a
        message that it knows already as sent once."""
        for room in self.of(peer):
            if room.state is ReceiverState.GRANTED:
                self.promise(room)
            elif room.aborting:
                self._peers.send(peer, room.abort("given up"))
        for received in self.ended.resend_to(peer):
            self._peers.send(peer, received)

    # ------------------------------------------------------------ the table

    def step(self, room: ReceiverRoom, event: ReceiverEvent, word: m.HandoverReceived | None = None) -> None:
        """Apply `event` to a room: the one place where a room changes state, and where its end releases its pages and
        slot. `word`: the last word about the room, if there is one.

        A plane that can't revoke raises, and the room is as it was: it may be ended again.
        """
        state = RECEIVER.next(room.state, event)
        if RECEIVER.terminal(state):
            self._plane.revoke(room.id)
        room.state = state
        if not RECEIVER.terminal(state):
            return
        room.remote.close()
        self._peers.withdraw_grant(room.peer, room.id)
        for lease in room.leases.values():
            lease.release()
        if room.slot is not None:
            room.slot.release()
        room.leases, room.slot = {}, None
        del self._rooms[room.id]
        self.ended.remember(room.id, word)
        self._drop(room.peer)

    def _ask(self, room: ReceiverRoom, abort: m.AbortRoom) -> None:
        """Ask the room's writer to stop."""
        room.asked = self._clock.now()
        self._peers.send(room.peer, abort)

    def _drop(self, peer: ReceiverPeer) -> None:
        """Forget an estranged peer without rooms."""
        if peer.estranged and not self.of(peer):
            self._forget(peer)

    def _forget(self, peer: ReceiverPeer) -> None:
        self._peers.forget(peer)
        self.ended.forget(peer)
