"""The hand-over of prefill's requests: opens rooms, writes sealed pages as steps finish them, reports outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from twinpool.cache.device.device_port import Completion
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.prefill.request import PrefillPhase, PrefillRequest
from twinpool.transfer.rooms.metadata_slots import HandoverMetadata
from twinpool.transfer.rooms.room_outcomes import RoomGranted
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.request_table import RequestTable
from twinpool.worker.sendable_pages import finished


@dataclass(frozen=True, slots=True)
class Granted:
    """Decode has granted pages to this request."""

    request: PrefillRequest


@dataclass(frozen=True, slots=True)
class Damaged:
    """What decode received of this request didn't match its tags. The request may have left this worker already."""

    request: PrefillRequest


@dataclass(frozen=True, slots=True)
class Lost:
    """The room of this request has ended before decode had everything."""

    request: PrefillRequest
    reason: str


class PrefillHandover:
    """The sending end of the rooms of prefill's requests; see the module's prose."""

    def __init__(self, sender: KVSender, requests: RequestTable[PrefillRequest]) -> None:
        self.sender = sender
        self._requests = requests
        self._unconfirmed: dict[RoomId, PrefillRequest] = {}
        """Requests that have left this worker, until decode confirms that everything arrived and matches its tags."""

    def open(self, submit: Submit) -> None:
        """Open the room of a request with a decode leg; without one, do nothing. Raises `WireError` where the room
        exists already, or decode has given it up."""
        if submit.peer is not None:
            self.sender.open(submit.room, submit.peer)

    def granted(self, request: PrefillRequest) -> bool:
        """Whether decode has granted pages to the request."""
        return self.sender.granted(request.submit.room)

    def poll(self) -> Iterator[Granted | Damaged | Lost]:
        """Yield what became of rooms, one by one; the caller must act on each before it takes the next."""
        by_room = {r.submit.room: r for r in self._requests}
        for outcome in self.sender.poll():
            request = by_room.get(outcome.room)
            if not isinstance(outcome, RoomGranted):
                gone = self._unconfirmed.pop(outcome.room, request)
                if outcome.damaged and gone is not None:
                    yield Damaged(gone)
            if request is None or not self._requests.holds(request):
                continue
            if isinstance(outcome, RoomGranted):
                yield Granted(request)
            elif not outcome.received:
                yield Lost(request, outcome.reason)

    def write(self, request: PrefillRequest, computed: Completion) -> bool:
        """Write the sealed pages that decode wants and doesn't have yet; behind the last page, the metadata.

        The writes go out once `computed` is done. Returns whether everything is posted, so that the request may leave;
        False while decode has granted nothing. Raises `WireError` where the metadata can't be sent.
        """
        room = request.submit.room
        if not self.sender.granted(room) or request.allocation is None:
            return False
        wanted = self.sender.wanted(room)
        sealed = finished(wanted, request.allocation, request.chain, request.ends)
        self.sender.write(room, sealed, (computed,), request.starts)
        if request.phase is not PrefillPhase.COMPUTED:
            return False
        assert request.first is not None
        drawn = request.first
        metadata = HandoverMetadata(room, 0, drawn.token, drawn.logprob, request.cached.total, request.computed)
        self.sender.seal(room, metadata)
        self._unconfirmed[room] = request
        return True

    def finish(self, request: PrefillRequest) -> None:
        """End the room of a request that prefill has answered alone: decode has nothing to do."""
        self.sender.finish(request.submit.room)

    def fail(self, request: PrefillRequest, kind: ErrorKind, message: str) -> None:
        """Give up the request's room and tell decode why. Does nothing when the room is over."""
        self.sender.fail(request.submit.room, kind, message)

    def counters(self) -> dict[str, float]:
        sender = self.sender
        return {**sender.outgoing, **sender.links, "sent_bytes": sender.sent_bytes, "late_messages": sender.late}

    def check(self) -> list[str]:
        """Recount, in the sender too; returns what doesn't agree."""
        found = self.sender.check()
        if self.sender.unconfirmed != self._unconfirmed.keys():
            found.append(f"{len(self._unconfirmed)} requests wait for decode's word, not the rooms that do")
        return found
