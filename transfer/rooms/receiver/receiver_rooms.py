"""The receiver's rooms: their states, their outcomes for the worker, and the one step that releases pages and slots.

A room owns its pages and its slot. When everything has arrived and is verified, the pages go to the request. Every
other end releases them: at once where the plane can revoke the writer's access, after the writer's word or proven death
where it can't (hazard A5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from twinpool.cache.device.device_port import RemoteWrite, UncheckedRemoteWrite
from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RoomId
from twinpool.transfer.planes.data_plane import DataPlane, PageNumbers
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.ended_rooms import EndedRooms
from twinpool.transfer.rooms.pool_shares import RoomProgress
from twinpool.transfer.rooms.receiver.page_check import PageCheck
from twinpool.transfer.rooms.receiver.receiver_peer_events import PeerDied, PeerParted, PeerUnreachable, ReceiverPeer
from twinpool.transfer.rooms.receiver.receiver_peers import ReceiverPeers
from twinpool.transfer.rooms.room_outcomes import ExpectedPrompt, HandoverFailed, PromptAnswered, PromptArrived
from twinpool.transfer.rooms.room_states import RECEIVER, ReceiverEvent, ReceiverState

ReceiverOutcome = PromptArrived | HandoverFailed | PromptAnswered


@dataclass(eq=False)
class ReceiverRoom:
    id: RoomId
    peer: ReceiverPeer
    expected: ExpectedPrompt
    heard: float
    """When a notice of the room was heard last, or the room was opened or granted, by the clock."""
    state: ReceiverState = ReceiverState.OPEN
    leases: Mapping[str, Lease] = field(default_factory=dict)
    slot: Lease | None = None
    runs: Mapping[str, PageNumbers] = field(default_factory=dict)
    """The granted places, of pools of which something is missing."""
    grant: m.PageGrant | None = None
    promised: bool = False
    """Whether the grant has left: its places then come back by the writer's word or death alone, unless the plane is
    revocable."""
    access: int = 0
    """Number of the writer's access by which it writes, once the grant has left."""
    remote: RemoteWrite = field(default_factory=UncheckedRemoteWrite)
    """The declaration to the device that the writer may write the granted places."""
    asked: float = 0.0
    """When the writer was last asked to stop, by the clock."""
    shares: RoomProgress = field(default_factory=lambda: RoomProgress({}))
    """The numbers that have still to arrive."""
    digests: dict[str, dict[int, int]] = field(default_factory=dict)
    """Digests of the pages that arrived, by pool and page number."""
    notices: deque[m.PagesWritten | m.SlotWritten] = field(default_factory=deque)
    """Notices of writes that are not applied yet: what the first of them tells of is being checked."""
    checking: PageCheck | None = None
    """The check of what the first of `notices` tells of, once it was begun."""

    @property
    def ticket(self) -> int:
        return self.grant.ticket if self.grant is not None else 0

    @property
    def aborting(self) -> bool:
        return self.state is ReceiverState.ABORTING

    def abort(self, reason: str, damaged: bool = False) -> m.AbortRoom:
        """Return the message that asks the writer to stop."""
        return m.AbortRoom(self.id, m.reason_of(reason), damaged, self.ticket)


class ReceiverRooms(Mapping[RoomId, ReceiverRoom]):
    """Rooms that have not ended, by id. The class has more than twenty methods, since each way in which a room can end
    is one of them, and all of these meet in `step`, which alone releases pages and slots."""

    def __init__(self, plane: DataPlane, peers: ReceiverPeers, config: TransferConfig, clock: Clock) -> None:
        self._plane, self._peers, self._config, self._clock = plane, peers, config, clock
        self._rooms: dict[RoomId, ReceiverRoom] = {}
        self._outcomes: list[ReceiverOutcome] = []
        self.ended = EndedRooms[m.HandoverReceived]()

    def __getitem__(self, room: RoomId) -> ReceiverRoom:
        return self._rooms[room]

    def __iter__(self) -> Iterator[RoomId]:
        return iter(self._rooms)

    def __len__(self) -> int:
        return len(self._rooms)

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
        self._ask(room, room.abort(reason, damaged=True))
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
        now, limit = self._clock.now(), self._config.room_timeout_s
        granted = [r for r in self._rooms.values() if r.state is ReceiverState.GRANTED]
        for room in [r for r in granted if r.heard <= now - limit]:
            self.fail(room, f"nothing came for {limit:g} s", "silence")
        for room in [r for r in self._rooms.values() if r.aborting]:
            if now - room.asked >= self._config.link_timeout_s:  # The writer's answer may be lost, with a connection.
                self._ask(room, room.abort("given up"))

    # ------------------------------------------------------------ peers that went

    def died(self, died: PeerDied) -> None:
        """End the rooms of a dead peer: nobody writes to them any more."""
        for room in self._of(died.peer):
            self.end_failed(room, ReceiverEvent.LOST, ErrorKind.ROOM, died.reason)
        self.ended.forget(died.peer)

    def parted(self, parted: PeerParted, but: ReceiverRoom | None = None) -> None:
        """Fail the rooms of a peer; promised places stay in quarantine unless the plane is revocable. `but`: a room
        that is left as it is."""
        for room in self._of(parted.peer):
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
        rooms, peer = self._of(unreachable.peer), unreachable.peer
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
        for room in self._of(peer):
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

    def take_outcomes(self) -> list[ReceiverOutcome]:
        """Return the outcomes of rooms since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _ask(self, room: ReceiverRoom, abort: m.AbortRoom) -> None:
        """Ask the room's writer to stop."""
        room.asked = self._clock.now()
        self._peers.send(room.peer, abort)

    def _of(self, peer: ReceiverPeer) -> list[ReceiverRoom]:
        return [r for r in self._rooms.values() if r.peer is peer]

    def _drop(self, peer: ReceiverPeer) -> None:
        """Forget an estranged peer without rooms."""
        if peer.estranged and not self._of(peer):
            self._forget(peer)

    def _forget(self, peer: ReceiverPeer) -> None:
        self._peers.forget(peer)
        self.ended.forget(peer)
