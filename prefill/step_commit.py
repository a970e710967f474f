"""The step commit of prefill and the hand-over of its requests: launches a batch, counts what it computed once that is
known to be complete, and writes sealed pages to decode's rooms.

Nothing of a step counts before all state that was loaded for it is verified, and before its rows are known to have read
their own pages and to have finite logits.

A chunk's pages could leave only once the whole chunk was computed; the last chunk's transfer would then be added to
the time to the second token. So the pages that a step will have finished are posted as soon as it is launched, in
groups of layers, each behind a mark that the step reaches when it is through with these layers (`LayeredSends`). What
is left when the step is over is the transfer of the last group.

Such a write comes before its step is committed, and so goes only into places that decode has granted and that nobody
has adopted. It is announced, with the tags of its pages, when the step was committed and the pages were sealed
(`PrefillHandover.write`). A step that comes to nothing is announced to nobody, and its places are written again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from twinpool.cache.allocation import NULL_PAGE, Allocation
from twinpool.cache.device.device_port import Completion, Device, LayerMarks, layer_groups
from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.damage import DamageSite
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.engine.runner.batch import NONFINITE, RowOutput, StepHandle
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.prefill.request import PrefillPages, PrefillPhase, PrefillRequest, StepMember
from twinpool.prefill.scheduler import ScheduledChunk, StepCost
from twinpool.transfer.planes.data_plane import PageNumbers
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.transfer.rooms.room_states import LayeredPages, RoomGranted
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.request_table import RequestTable, sendable_pages
from twinpool.worker.step_commit import NonfiniteRows, StepCommit

# ------------------------------------------------------------ the hand-over


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


# ------------------------------------------------------------ the step commit


log = logging.getLogger("twinpool.prefill")
_STALE_LIMIT = 2
"""How often a request starts over because one of its pages was given away; the next time it is failed."""


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A chunk of this request is committed and sealed; `computed` is the completion of the step that computed it."""

    request: PrefillRequest
    computed: Completion


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """This request can't go on: the worker fails it with `kind` and `message`."""

    request: PrefillRequest
    kind: ErrorKind
    message: str


class PrefillStepCommit(StepCommit[PrefillRequest, StepMember]):
    """The steps of one prefill worker; see the module's prose."""

    log = log

    def __init__(
        self,
        requests: RequestTable[PrefillRequest],
        pages: PrefillPages,
        engine: ModelRunner,
        fitness: NonfiniteRows,
        config: Config,
        pause: Callable[[float], None],
        cost: StepCost,
    ) -> None:
        super().__init__(requests, pages, engine, fitness, config, pause)
        self._pages, self._cost = pages, cost

    def launch(self, batch: list[ScheduledChunk], layered: LayeredSends) -> None:
        """Launch the step that computes `batch`, and the sends of what it will have finished."""
        sends = layered.plan(batch)
        step = self._engine.launch([chunk.row for chunk in batch], sends.marks if sends is not None else None)
        if sends is not None:
            layered.post(sends, step)
        self.launched(step, batch)
        self._delay()

    def launched(self, step: StepHandle, batch: list[ScheduledChunk]) -> None:
        """Count the chunks of `batch` as launched; they are the rows of `step`, in order."""
        members = [StepMember(c.request, c.request.starts, len(c.row.tokens), step, c.row.start) for c in batch]
        self._overlap.launched(step, members)
        for chunk in batch:
            chunk.request.latest = step
        self._count_launched([chunk.request for chunk in batch])

    def landed(self, began: float, *, go_on: bool) -> Iterator[ChunkDone | ChunkFailed]:
        """Commit the steps that are complete; yields what came of each row.

        The caller must act on each outcome before it takes the next. `began`: when this round began, in seconds of the
        clock. `go_on`: another step was launched in this round, so the last one may be waited for later.
        """
        self.committed = False
        for results in self._overlap.landed(go_on=go_on):
            self.committed = True
            self.steps += 1
            self._measure([member for member, _ in results], self._clock.now() - began)
            self._prove([member for member, _ in results])
            # A request that ended or started over while this step was under way has no use for its result.
            yield from self._take(
                [(m, out) for m, out in results if m.request.phase is PrefillPhase.RUNNING and m.current]
            )

    def _measure(self, members: list[StepMember], seconds: float) -> None:
        """Take in how long a step took."""
        tokens = sum(member.count for member in members)
        self._manager.planner.computed(tokens, seconds)
        self._cost.saw(tokens, sum(m.count * (2 * m.begin + m.count) // 2 for m in members), seconds)

    def recover(self, invalid: list[Allocation]) -> None:
        """Restart the requests whose allocations are in `invalid`: state that was loaded for them is damaged, and isn't
        in the tree any more."""
        for request in [r for r in self._requests if r.allocation in invalid]:
            facts = {"request_id": request.submit.request_id, "attempt": request.submit.attempt}
            log.warning("it starts over, as a page loaded for it was damaged", extra=facts)
            self._pages.restart(request)

    def _prove(self, members: list[StepMember]) -> None:
        """Wait until all state that was loaded for these rows is verified, and restart requests for which it is
        damaged; before that, nothing of the step is committed."""
        for member in members:
            allocation = member.request.allocation
            if member.current and allocation is not None and not self._manager.allocations.ready(allocation):
                for completion in self._manager.allocations.completions(allocation):
                    completion.wait()
                self.recover(self._manager.poll())

    def _take(self, results: list[tuple[StepMember, RowOutput]]) -> Iterator[ChunkDone | ChunkFailed]:
        """Commit one step's results."""
        good = []
        for member, output in results:
            if output.stale:
                yield from self._stale(member.request)
            elif output.nonfinite:
                yield self._nonfinite(member.request)
            else:
                self._commit(member.request, member.count, output)
                good.append(member)
        self._seal([member.request for member in good])
        for member in good:
            yield ChunkDone(member.request, member.step.completion)

    def _commit(self, request: PrefillRequest, count: int, output: RowOutput) -> None:
        request.committed += count
        request.computed += count
        self.counters["prompt_tokens_computed"] += count
        request.scores += output.scores
        if output.embedding:
            request.embedding = output.embedding
        if output.drawn is not None:
            request.first = output.drawn

    def _stale(self, request: PrefillRequest) -> Iterator[ChunkFailed]:
        """Restart a request whose row found one of its pages given away, and fail it after `_STALE_LIMIT` restarts."""
        self._distrust(request, DamageSite.STEP)
        request.stale += 1
        if request.stale > _STALE_LIMIT:
            request.start_over()
            yield ChunkFailed(request, ErrorKind.WORKER, f"pages of it were given away {request.stale} times")
            return
        self._pages.restart(request)

    def _nonfinite(self, request: PrefillRequest) -> ChunkFailed:
        """Fail a request with non-finite logits: its state isn't trusted either, so none is kept or handed over."""
        self._distrust(request, DamageSite.LOGITS)
        return ChunkFailed(request, ErrorKind.NONFINITE, NONFINITE)

    def _seal(self, requests: list[PrefillRequest]) -> None:
        """Digest every page that the step finished, the partly filled last page of a prompt that is handed over too,
        and give the tree those that other requests can use already."""
        allocations = [(r.allocation, r.committed) for r in requests if r.allocation is not None]
        self._manager.finished.seal(allocations)
        for request, (allocation, committed) in zip(requests, allocations, strict=True):
            if committed == len(request.tokens):
                if not request.alone:  # Nothing of it is sent.
                    request.ends = self._manager.finished.end_digests(allocation, committed)
            else:
                self._manager.running.free_window_pages(allocation, committed)
                share = committed - request.shared >= self._config.prefill.share_tokens
                if share or 0 < request.awaited <= committed:
                    self._pages.cache(request)
                    request.awaited = 0
