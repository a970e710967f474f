"""The hand-over of prefill's requests: their rooms, what of their state is written when, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cache.device.device_port import Completion
from contracts.errors import ErrorKind
from contracts.ids import RoomId
from contracts.messages.router_commands import Submit
from prefill.request import PrefillPhase, PrefillRequest
from transfer.rooms.kv_sender import KVSender
from transfer.rooms.metadata_slots import HandoverMetadata
from transfer.rooms.room_outcomes import RoomGranted
from worker.request_table import RequestTable
from worker.sendable_pages import finished


@dataclass(frozen=True, slots=True)
class Granted:
    """Decode has granted pages to this request."""

    request: PrefillRequest


@dataclass(frozen=True, slots=True)
class Damaged:
    """What decode got of this request isn't what was sealed here."""

    request: PrefillRequest


@dataclass(frozen=True, slots=True)
class Lost:
    """The room of this request has ended without it."""

    request: PrefillRequest
    reason: str


class PrefillHandover:
    """The sender's rooms, by request; see the module's prose."""

    def __init__(self, sender: KVSender, requests: RequestTable[PrefillRequest]) -> None:
        self.sender = sender
        self._requests = requests
        self._unconfirmed: dict[RoomId, PrefillRequest] = {}
        """Requests that have left, until decode confirms that what was sent is right."""

    def open(self, submit: Submit) -> None:
        """Open the room of a request that decode waits for. Raises `WireError` where that can't be."""
        if submit.peer is not None:
            self.sender.open(submit.room, submit.peer)

    def granted(self, request: PrefillRequest) -> bool:
        """Whether decode has granted pages to it."""
        return self.sender.granted(request.submit.room)

    def poll(self) -> Iterator[Granted | Damaged | Lost]:
        """What rooms have come to, told one by one; what is told is acted on before the next."""
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
        """Hand over what is sealed and not yet sent, after the step behind it; with the last page, the metadata.

        Returns whether that is all of it: it may leave. Raises `WireError` where its metadata can't be sent.
        """
        room = request.submit.room
        if not self.sender.granted(room) or request.allocation is None:
            return False
        wanted = self.sender.wanted(room)
        self.sender.write(room, finished(wanted, request.allocation, request.chain, request.ends), (computed,))
        if request.phase is not PrefillPhase.COMPUTED:
            return False
        assert request.first is not None
        drawn = request.first
        metadata = HandoverMetadata(room, 0, drawn.token, drawn.logprob, request.cached.total, request.computed)
        self.sender.seal(room, metadata)
        self._unconfirmed[room] = request
        return True

    def finish(self, request: PrefillRequest) -> None:
        """Prefill has answered by itself: decode has nothing to do."""
        self.sender.finish(request.submit.room)

    def fail(self, request: PrefillRequest, kind: ErrorKind, message: str) -> None:
        self.sender.fail(request.submit.room, kind, message)

    def counters(self) -> dict[str, float]:
        sender = self.sender
        return {**sender.outgoing, "sent_bytes": sender.sent_bytes, "late_messages": sender.late}

    def check(self) -> list[str]:
        """What doesn't agree in its rooms and those of the sender."""
        found = self.sender.check()
        if self.sender.unconfirmed != self._unconfirmed.keys():
            found.append(f"{len(self._unconfirmed)} requests wait for decode's word, not the rooms that do")
        return found
