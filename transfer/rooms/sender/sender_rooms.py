"""The sender's rooms: decode's messages about them, their states, the last word about each, outcomes for the worker.

Each message is checked before anything changes. Grants and aborts may come before the router's own message about the
request: then they are kept for it. A grant for a room that has ended is answered with the last word about that room.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from twinpool.cache.device.device_port import Completion
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RoomId, WorkerName, request_in
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.planes.data_plane import PageNumbers, RoomTarget
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.room_states import (
    SENDER,
    RoomGranted,
    RoomProgress,
    RoomReleased,
    RoomTable,
    SenderEvent,
    SenderState,
)
from twinpool.transfer.rooms.sender.sender_peers import (
    PeerLost,
    ReaderMessage,
    SenderPeer,
    StrangerAborted,
    identity_of,
)
from twinpool.transfer.rooms.sender.write_queue import QueuedWrite

log = logging.getLogger("twinpool.transfer")
SenderOutcome = RoomGranted | RoomReleased


@dataclass(eq=False)
class LayeredWrite:
    """The writes of pages, layer by layer, that a step under way is computing; nothing of it was announced."""

    step: Completion
    generation: int
    """How often the request had started over when the step was launched."""
    runs: Mapping[str, PageNumbers]
    posted: list[QueuedWrite] = field(default_factory=list)
    number: int = 0
    """The number of the last of these writes within the room."""


@dataclass(eq=False)
class SenderRoom:
    id: RoomId
    wants: PeerRef
    """The reader that the router has named; only that reader's grant is taken."""
    state: SenderState = SenderState.OPEN
    peer: SenderPeer | None = None
    grant: m.PageGrant | None = None
    target: RoomTarget | None = None
    shares: RoomProgress = field(default_factory=lambda: RoomProgress({}))
    """The numbers that are still to be written."""
    sent_at: float = 0.0
    """When the metadata was posted, by the clock."""
    writes: int = 0
    """Number of writes of pages so far."""
    posted: list[QueuedWrite] = field(default_factory=list)
    """These writes, as far as they could be posted."""
    computed_at: float = 0.0
    """When pages of it were finished last, by the clock."""
    layered: deque[LayeredWrite] = field(default_factory=deque)
    """What steps under way are computing, oldest first."""
    overtaken: list[QueuedWrite] = field(default_factory=list)
    """Layered writes of steps that came to nothing: what is written to the same places comes after them."""

    @property
    def ticket(self) -> int:
        return self.grant.ticket if self.grant is not None else 0

    def before_layered(self, pool: str) -> range:
        """The numbers of `pool` that are still to be written, up to the first that a step under way is writing."""
        left = self.shares.left(pool)
        return range(left.start, min((run.start for run in self._written_by_steps(pool)), default=left.stop))

    def after_layered(self, pool: str) -> range:
        """The numbers of `pool` that are still to be written, from the last on that a step under way is writing."""
        left = self.shares.left(pool)
        return range(max((run.stop for run in self._written_by_steps(pool)), default=left.start), left.stop)

    def _written_by_steps(self, pool: str) -> list[range]:
        return [run.numbers for ahead in self.layered if (run := ahead.runs.get(pool)) is not None]

    @property
    def failed(self) -> str:
        """Why a write of the room failed; empty where none did. The room then ends at the next `poll`, and no later
        write of it is announced."""
        return self.peer.writes.failed(self.id) if self.peer is not None else ""

    def failure(self, kind: ErrorKind, reason: str) -> m.RoomFailed:
        """Return the last word of a room that is given up here."""
        return m.RoomFailed(self.id, self.ticket, kind, reason)


class SenderRooms(RoomTable[SenderRoom, SenderOutcome, m.Notice]):
    """Rooms that have not ended, by id."""

    def __init__(self, name: WorkerName, peers: Mapping[bytes, SenderPeer]) -> None:
        """`name`: of this worker."""
        super().__init__()
        self._name, self._peers = name, peers
        self.late = 0
        """Messages that came for a room that had ended."""

    def open(self, room: RoomId, wants: PeerRef) -> SenderRoom:
        """Open a room without a grant."""
        entry = self._rooms[room] = SenderRoom(room, wants)
        return entry

    def grant(self, room: SenderRoom, peer: SenderPeer, grant: m.PageGrant) -> None:
        """Enter a grant into an open room. The caller has checked it."""
        room.peer, room.grant, room.target = peer, grant, target_of(grant)
        room.shares = RoomProgress({pool: run.numbers for pool, run in room.target.runs.items()})
        peer.promised.promise(room.target)
        self.step(room, SenderEvent.GRANT)
        self._outcomes.append(RoomGranted(room.id))

    # ------------------------------------------------------------ messages of decode

    def hear(self, peer: SenderPeer, message: ReaderMessage) -> None:
        """Apply a message. Raises `WireError` for one that can't be used; rooms of other peers are unchanged then."""
        if isinstance(message, m.PageGrant):
            self._hear_grant(peer, message)
        elif isinstance(message, m.AbortRoom):
            self._hear_abort(peer, message)
        else:
            self._hear_received(peer, message)

    def _hear_grant(self, peer: SenderPeer, grant: m.PageGrant) -> None:
        room = self.get(grant.room)
        last_word = self.ended.last_word(grant.room)
        if room is not None and room.state is not SenderState.OPEN:
            if room.peer is not peer or room.grant != grant:
                raise WireError(f"room {grant.room} was granted twice")
            return
        if room is not None and identity_of(room.wants) != peer.identity:
            wants = f"{room.wants.name} incarnation {room.wants.incarnation}"
            reason = f"room {room.id} is for {wants}, granted by {peer.name} incarnation {peer.incarnation}"
            peer.writes.say(m.RoomFailed(grant.room, grant.ticket, ErrorKind.ROOM, reason))
            return
        if last_word is not None:
            peer.writes.say(replace(last_word, ticket=grant.ticket))
            return
        self._check(room, peer, grant)
        if room is not None:
            self.grant(room, peer, grant)
            return
        for dropped in peer.early.keep(grant):
            reason = f"{self._name} keeps no more early grants"
            peer.writes.say(m.RoomFailed(dropped.room, dropped.ticket, ErrorKind.ROOM, reason))

    def _check(self, room: SenderRoom | None, peer: SenderPeer, grant: m.PageGrant) -> None:
        """Check a grant. Raises `WireError` for places that can't be written, or are promised to another room. The
        room, if it is open already, has failed then."""
        try:
            peer.promised.check(grant)
            peer.link.admit(target_of(grant))
        except WireError as error:
            # The grant was not taken, so nothing will be written for it: decode can be told so at once.
            failed = m.RoomFailed(grant.room, grant.ticket, ErrorKind.ROOM, m.reason_of(error))
            if room is not None:
                self.fail(room, failed, peer)
            else:
                peer.writes.say(failed)
            raise

    def _hear_abort(self, peer: SenderPeer, abort: m.AbortRoom) -> None:
        """Give a room up as decode asks. The answer follows everything that was posted to the peer before."""
        room = self.get(abort.room)
        owner = room is None or (
            room.peer is peer if room.peer is not None else identity_of(room.wants) == peer.identity
        )
        if not owner:
            raise WireError(f"room {abort.room} is not {peer.name}'s")
        peer.early.take(abort.room)
        quiesced = m.WriterQuiesced(abort.room, abort.ticket)
        if room is not None:
            self.abort(room, quiesced, abort.reason, abort.damaged)
        elif abort.room not in self.ended:
            peer.early.give_up(abort.room)
        self.ended.told(peer, abort.room)
        peer.writes.say(quiesced)

    def stranger_aborted(self, aborted: StrangerAborted) -> m.WriterQuiesced:
        """Return the answer to an abort of a worker that is no peer, or none any more. Nothing is being written to that
        worker: its writes were settled before it was forgotten. Raises `WireError` for a room of another worker."""
        abort = aborted.abort
        room, quiesced = self.get(abort.room), m.WriterQuiesced(abort.room, abort.ticket)
        if room is not None:
            if room.peer is not None or identity_of(room.wants) != aborted.identity:
                raise WireError(f"room {abort.room} is not that of {aborted.identity!r:.80}")
            self.abort(room, quiesced, abort.reason)
        return quiesced

    def _hear_received(self, peer: SenderPeer, received: m.HandoverReceived) -> None:
        room = self.get(received.room)
        if room is not None and room.peer is not peer:
            raise WireError(f"room {received.room} is not {peer.name}'s")
        if room is None or room.state is not SenderState.SENT:
            self.late += 1
        else:
            self.received(room)

    # ------------------------------------------------------------ ends

    def received(self, room: SenderRoom) -> None:
        """End a room of which decode has received everything."""
        self.step(room, SenderEvent.RECEIVED)
        self._outcomes.append(RoomReleased(room.id, True))

    def abort(self, room: SenderRoom, word: m.WriterQuiesced, reason: str, damaged: bool = False) -> None:
        """End a room that decode gives up. The caller has still to answer decode with `word`."""
        self.ended.remember(room.id, word)
        self.step(room, SenderEvent.ABORT)
        self._outcomes.append(RoomReleased(room.id, False, f"decode gave it up: {reason:.200}", damaged))

    def end(self, room: SenderRoom, event: SenderEvent, word: m.Notice, peer: SenderPeer | None = None) -> None:
        """End a room from here and tell decode, without an outcome. `peer`: the reader to tell if the room has none."""
        self.ended.remember(room.id, word)
        self.step(room, event)
        peer = room.peer or peer or self._peers.get(identity_of(room.wants))
        if peer is not None:
            self.ended.told(peer, room.id)
            peer.writes.say(word)

    def fail(self, room: SenderRoom, word: m.RoomFailed, peer: SenderPeer | None = None) -> None:
        """End a room whose hand-over went wrong, with an outcome. `peer`: as for `end`."""
        self.end(room, SenderEvent.FAILED, word, peer)
        self._outcomes.append(RoomReleased(room.id, False, word.message))

    def fail_unwritten(self) -> None:
        """Fail the rooms of which a write failed."""
        for room in [r for r in self._rooms.values() if r.failed]:
            log.warning("room failed: %s", room.failed, extra={"request_id": request_in(room.id), "room": room.id})
            self.fail(room, room.failure(ErrorKind.WORKER, room.failed))

    def expire(self, now: float, timeout_s: float) -> None:
        """Fail the rooms that were sent `timeout_s` seconds ago, or longer, and are not confirmed."""
        for room in [r for r in self._rooms.values() if r.state is SenderState.SENT and r.sent_at <= now - timeout_s]:
            self.fail(room, room.failure(ErrorKind.ROOM, f"decode did not confirm for {timeout_s:g} s"))

    def lost(self, lost: PeerLost) -> None:
        """End the rooms of a lost peer, with outcomes; there is nobody to tell."""
        self.ended.forget(lost.peer)
        for room in self.of(lost.peer):
            self.ended.remember(room.id, room.failure(ErrorKind.ROOM, lost.reason))
            self.step(room, SenderEvent.LOST)
            self._outcomes.append(RoomReleased(room.id, False, lost.reason))

    def disconnected(self, peer: SenderPeer) -> None:
        """Send a peer last words again after its connection was cut, and fail its rooms of which something was sent; a
        room that has not begun goes on."""
        reason = f"the connection to {peer.name} was cut"
        log.warning(reason)
        for word in self.ended.resend_to(peer):
            peer.writes.say(word)
        for room in [r for r in self.of(peer) if r.writes or r.state is SenderState.SENT]:
            self.fail(room, room.failure(ErrorKind.ROOM, reason))

    def step(self, room: SenderRoom, event: SenderEvent) -> None:
        """Apply `event` to a room: the one place where a room changes state. An ended room is removed."""
        room.state = SENDER.next(room.state, event)
        peer, target = room.peer, room.target
        if room.state is not SenderState.GRANTED and target is not None and peer is not None:
            peer.promised.take_back(target)
        if SENDER.terminal(room.state):
            del self._rooms[room.id]
            if peer is not None:
                peer.writes.withdraw(room.id)
            if room.id not in self.ended:
                self.ended.remember(room.id, m.WriterQuiesced(room.id, room.ticket))


def target_of(grant: m.PageGrant) -> RoomTarget:
    """Return the places that a room with this grant may write."""
    runs = {place.pool: PageNumbers(place.first, place.indices) for place in grant.places}
    return RoomTarget(grant.room, runs, grant.slot, grant.ticket)
