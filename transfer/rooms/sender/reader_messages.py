"""Reader messages: decode's messages about rooms to the sender, each checked before anything changes.

Grants and aborts may come before the router's own message about the request: then they are kept for it. A grant for a
room that has ended is answered with the last word about that room.
"""

from __future__ import annotations

from dataclasses import replace

from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import WorkerName
from twinpool.transfer.rooms import room_messages as m
from twinpool.transfer.rooms.room_states import SenderState
from twinpool.transfer.rooms.sender.sender_peer_events import ReaderMessage, SenderPeer, StrangerAborted, identity_of
from twinpool.transfer.rooms.sender.sender_rooms import SenderRoom, SenderRooms, target_of


class ReaderMessages:
    """Grants, aborts and confirmations, applied to rooms."""

    def __init__(self, name: WorkerName, rooms: SenderRooms) -> None:
        self._name, self._rooms = name, rooms
        self.late = 0
        """Messages that came for a room that had ended."""

    def hear(self, peer: SenderPeer, message: ReaderMessage) -> None:
        """Apply a message. Raises `WireError` for one that can't be used; rooms of other peers are unchanged then."""
        if isinstance(message, m.PageGrant):
            self._granted(peer, message)
        elif isinstance(message, m.AbortRoom):
            self._aborted(peer, message)
        else:
            self._received(peer, message)

    def _granted(self, peer: SenderPeer, grant: m.PageGrant) -> None:
        room = self._rooms.get(grant.room)
        last_word = self._rooms.ended.last_word(grant.room)
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
            self._rooms.grant(room, peer, grant)
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
                self._rooms.fail(room, failed, peer)
            else:
                peer.writes.say(failed)
            raise

    def _aborted(self, peer: SenderPeer, abort: m.AbortRoom) -> None:
        """Give a room up as decode asks. The answer follows everything that was posted to the peer before."""
        room = self._rooms.get(abort.room)
        owner = room is None or (
            room.peer is peer if room.peer is not None else identity_of(room.wants) == peer.identity
        )
        if not owner:
            raise WireError(f"room {abort.room} is not {peer.name}'s")
        peer.early.take(abort.room)
        quiesced = m.WriterQuiesced(abort.room, abort.ticket)
        if room is not None:
            self._rooms.abort(room, quiesced, abort.reason, abort.damaged)
        elif abort.room not in self._rooms.ended:
            peer.early.give_up(abort.room)
        self._rooms.ended.told(peer, abort.room)
        peer.writes.say(quiesced)

    def stranger_aborted(self, aborted: StrangerAborted) -> m.WriterQuiesced:
        """Return the answer to an abort of a worker that is no peer, or none any more. Nothing is being written to that
        worker: its writes were settled before it was forgotten. Raises `WireError` for a room of another worker."""
        abort = aborted.abort
        room, quiesced = self._rooms.get(abort.room), m.WriterQuiesced(abort.room, abort.ticket)
        if room is not None:
            if room.peer is not None or identity_of(room.wants) != aborted.identity:
                raise WireError(f"room {abort.room} is not that of {aborted.identity!r:.80}")
            self._rooms.abort(room, quiesced, abort.reason)
        return quiesced

    def _received(self, peer: SenderPeer, received: m.HandoverReceived) -> None:
        room = self._rooms.get(received.room)
        if room is not None and room.peer is not peer:
            raise WireError(f"room {received.room} is not {peer.name}'s")
        if room is None or room.state is not SenderState.SENT:
            self.late += 1
        else:
            self._rooms.received(room)
