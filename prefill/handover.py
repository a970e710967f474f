"""The hand-over of prefill's requests: opens rooms, writes sealed pages as steps finish them, reports outcomes.

Pages that a step is about to finish leave layer by layer, while the step computes later layers (`LayeredSends`).

A chunk's pages could leave only once the whole chunk was computed; the last chunk's transfer would then be added to
the time to the second token. So the pages that a step will have finished are posted as soon as it is launched, in
groups of layers, each behind a mark that the step reaches when it is through with these layers. What is left when the
step is over is the transfer of the last group.

Such a write comes before its step is committed, and so goes only into places that decode has granted and that nobody
has adopted. It is announced, with the tags of its pages, when the step was committed and the pages were sealed
(`PrefillHandover.write`). A step that comes to nothing is announced to nobody, and its places are written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from twinpool.cache.allocation import NULL_PAGE
from twinpool.cache.device.device_port import Completion, Device, LayerMarks, layer_groups
from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.engine.runner.batch import StepHandle
from twinpool.prefill.request import PrefillPhase, PrefillRequest
from twinpool.prefill.scheduler import ScheduledChunk
from twinpool.transfer.planes.data_plane import PageNumbers
from twinpool.transfer.rooms.metadata_slots import HandoverMetadata
from twinpool.transfer.rooms.room_states import LayeredPages, RoomGranted
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.request_table import RequestTable, sendable_pages


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
        sealed = sendable_pages(wanted, request.allocation, request.chain, request.ends)
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

    @property
    def counters(self) -> dict[str, float]:
        return {"sent_bytes": self.sender.sent_bytes, "late_messages": self.sender.late}

    def check(self) -> list[str]:
        """Recount; returns what doesn't agree."""
        found = []
        if self.sender.unconfirmed != self._unconfirmed.keys():
            found.append(f"{len(self._unconfirmed)} requests wait for decode's word, not the rooms that do")
        return found


@dataclass(frozen=True, slots=True)
class PlannedSends:
    """What a step's layered sends will write, by room, and the marks that the step is to reach."""

    pages: Mapping[RoomId, LayeredPages]
    marks: LayerMarks


def group_count(config: TransferConfig, nbytes: int, layers: int, bytes_per_s: float) -> int:
    """How many groups of layers a step of `layers` layers and `nbytes` sends: one takes the links about
    `transfer.layer_group_s`, at the rate measured so far (0: none was).

    A group has `transfer.layer_group_bytes` at least, and a whole layer; where there are bytes for two, there are two.
    """
    least = config.layer_group_bytes
    size = max(least, min(int(bytes_per_s * config.layer_group_s), nbytes // 2))
    return min(layers, nbytes // size)


class LayeredSends:
    """The layered sends of one prefill worker; see the module's prose."""

    def __init__(self, sender: KVSender, spec: PoolSetSpec, device: Device, config: TransferConfig) -> None:
        self._sender, self._spec, self._device, self._config = sender, spec, device, config
        self._layers = {pool.name: pool.layers for pool in spec.pools}
        self._even = all(pool.even for pool in spec.pools)
        self.counters = {"layered_pages": 0.0}

    def plan(self, batch: Sequence[ScheduledChunk]) -> PlannedSends | None:
        """Plan the sends of the step that will compute `batch`; None where all of it may as well leave at its end."""
        # A mark is of layers of a pool: it would say too much of a buffer whose layers come later than another's.
        pages = self._pages(batch) if self._config.layers and self._even else {}
        spec = self._spec.whole
        nbytes = sum(len(run) * spec.unit_bytes(pool) for some in pages.values() for pool, run in some.runs.items())
        groups = group_count(self._config, nbytes, max(self._layers.values()), self._sender.bytes_per_s(pages))
        marks = self._device.marks(layer_groups(self._layers, groups)) if groups > 1 else None
        return PlannedSends(pages, marks) if marks is not None else None

    def post(self, planned: PlannedSends, step: StepHandle) -> None:
        """Post what `step`, just launched with the plan's marks, will have finished."""
        full = self._spec.full.name
        self.counters["layered_pages"] += sum(
            len(some.runs[full]) for some in planned.pages.values() if full in some.runs
        )
        self._sender.write_layers(planned.pages, step.completion, planned.marks)

    def _pages(self, batch: Sequence[ScheduledChunk]) -> dict[RoomId, LayeredPages]:
        """By room, the pages that decode wants and that the step will have finished."""
        found = {}
        for request in (chunk.request for chunk in batch):
            room = request.submit.room
            if request.submit.peer is not None and self._sender.layered(room):
                runs = self._finished(request, self._sender.unwritten(room))
                if runs:
                    found[room] = LayeredPages(runs, request.starts)
        return found

    def _finished(self, request: PrefillRequest, wanted: Mapping[str, range]) -> dict[str, PageNumbers]:
        """The first numbers of `wanted`, by pool, that are finished once the request's planned positions are
        computed."""
        whole = request.planned == len(request.tokens)
        runs = {}
        for pool, left in wanted.items():
            state = self._spec.by_name[pool].kind is PoolKind.STATE
            pages = 0 if state else request.planned // self._spec.page_tokens
            numbers = left if whole else range(left.start, min(left.stop, pages))
            if not numbers:
                continue
            held = request.held
            places = held.slots[pool].indices if state else held.tables[pool].pages[numbers.start : numbers.stop]
            indices = tuple(places[: len(numbers)])
            if len(indices) == len(numbers) and NULL_PAGE not in indices:
                runs[pool] = PageNumbers(numbers.start, indices)
        return runs
