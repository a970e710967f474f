"""A request on its way through prefill: the states it goes through, its pages, and the events for its router.

docs/states.md draws the states. A request is computed with its last chunk, and gone once its hand-over is posted. It is
preempted when a request to which decode has already granted pages needs the memory: its finished pages go to the tree,
and it starts over from what is still there. It also starts over when a step finds that one of its pages was given away,
or when state that was loaded for it turns out damaged. Its first token, once drawn, stays drawn.

Its pages are allocated on admission, given to the tree as they are finished, and freed once. Three parts of the worker
use this: the scheduler, which admits and preempts; the step commit, which shares finished pages; and the worker, which
ends requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from twinpool.cache.allocation import CachedTokens
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.tiers.prefetch import PrefetchRequest
from twinpool.contracts.block_hash import PICTURE_KEYS, picture_keys
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import PrefillConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.worker_events import Embedding, Event, LegReport, PromptScores, Tokens
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.contracts.state_table import StateTable
from twinpool.engine.layers.picture_encoder import PictureEncoder, PlacedRows
from twinpool.engine.runner.batch import DrawnToken, PromptPooling, StepHandle, TurnedPlaces
from twinpool.worker.request_table import RequestPages, WorkerRequest


class PrefillPhase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    COMPUTED = "computed"
    GONE = "gone"


class PrefillEvent(StrEnum):
    ADMIT = "admit"
    COMPUTED = "computed"
    PREEMPT = "preempt"
    END = "end"


PHASES = StateTable[PrefillPhase, PrefillEvent](
    "prefill request",
    {
        PrefillPhase.WAITING: {PrefillEvent.ADMIT: PrefillPhase.RUNNING, PrefillEvent.END: PrefillPhase.GONE},
        PrefillPhase.RUNNING: {
            PrefillEvent.COMPUTED: PrefillPhase.COMPUTED,
            PrefillEvent.PREEMPT: PrefillPhase.WAITING,
            PrefillEvent.END: PrefillPhase.GONE,
        },
        PrefillPhase.COMPUTED: {PrefillEvent.PREEMPT: PrefillPhase.WAITING, PrefillEvent.END: PrefillPhase.GONE},
    },
)


@dataclass(eq=False)
class PrefillRequest(WorkerRequest):
    """One attempt at one request."""

    chain: list[bytes] = field(kw_only=True)
    """Block hashes of all pages of the prompt, the last partly filled one included."""
    begin_by: float = math.inf
    """When it is failed unless a chunk of it was launched, in seconds of the worker's clock."""
    prefetch: PrefetchRequest | None = None
    """The read of its pages from storage into host memory, if one was begun."""
    phase: PrefillPhase = PrefillPhase.WAITING
    shared: int = 0
    """Positions up to which its finished pages were given to the tree."""
    awaited: int = 0
    """Positions up to which other requests wait for its pages rather than compute them too; 0: none waits."""
    latest: StepHandle | None = None
    """The last launched step with a row of it."""
    starts: int = 0
    """How often it started over; rows that earlier starts launched don't count any more."""
    ends: dict[str, int] = field(default_factory=dict)
    """Digests at the prompt's end, by pool: of the last page where it is partly filled, and of the state."""
    cached: CachedTokens = field(default_factory=CachedTokens)
    computed: int = 0
    """Positions that this worker computed for it, all starts together."""
    stale: int = 0
    """Steps that found one of its pages given away."""
    first: DrawnToken | None = None
    """The token after the prompt, once drawn."""
    scores: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens 1.., as far as computed, where asked for."""
    pictures: Sequence[PlacedRows] = ()
    """The prompt's pictures, each with all its positions."""
    looked_at: bool = False
    """Whether any of its pictures was begun."""
    pooling: PromptPooling | None = None
    """How its embedding is made of the positions that are computed from now on, where asked for."""
    embedding: tuple[float, ...] = ()
    """The prompt's embedding, once computed, where asked for."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.submit.tokens

    @cached_property
    def inputs(self) -> Sequence[int]:
        """Its tokens as the model takes them."""
        return self.submit.inputs

    @cached_property
    def turned(self) -> TurnedPlaces | None:
        """How its pictures turn its positions."""
        return TurnedPlaces.of(self.tokens, self.submit.pictures)

    def whole_until(self, end: int, least: int) -> tuple[int, int]:
        """Where a step that is to end at `end` may end, as no picture whose positions see each other is parted: before
        such a picture and behind it. Before it is `least` at the least."""
        for picture, _, _, at in self.pictures:
            if picture.whole and at[0] < end <= at[-1]:
                return max(at[0], least), at[-1] + 1
        return end, end

    @property
    def at_once(self) -> int:
        """How many positions a step has to compute of it at the least: the rest of a picture that can't be parted."""
        return self.whole_until(self.planned + 1, self.planned)[1] - self.planned

    def pictured(self, start: int, end: int) -> list[PlacedRows]:
        """The parts of its pictures at positions `start .. end-1`, which are a row's."""
        found = []
        for picture, digest, _, at in self.pictures:
            first, stop = bisect_left(at, start), bisect_left(at, end)
            if first < stop:
                found.append(PlacedRows(picture, digest, first, [place - start for place in at[first:stop]]))
        return found

    @property
    def begun(self) -> bool:
        """Whether any chunk of it was ever launched, or a picture of it begun."""
        return self.latest is not None or self.starts > 0 or self.looked_at

    def late(self, now: float) -> bool:
        """Whether it is too late to begin it."""
        return now >= self.begin_by and not self.begun

    @property
    def left(self) -> int:
        """Positions left to compute: to the prompt's end, or as far as other requests wait for them, so that it is as
        urgent as those are."""
        return (self.awaited if self.awaited > self.launched else len(self.tokens)) - self.launched

    @property
    def peer(self) -> WorkerName | None:
        """The decode worker of the other leg; None where there is none."""
        return self.submit.peer.name if self.submit.peer is not None else None

    @property
    def alone(self) -> bool:
        """Whether prefill answers without a decode worker."""
        return self.submit.peer is None

    @property
    def wants_scores(self) -> bool:
        return self.submit.sampling.prompt_logprobs is not None and not self.submit.emitted

    @property
    def wants_all(self) -> bool:
        """Whether something of every position is asked for, so that all are computed."""
        return self.wants_scores or self.submit.sampling.pools_all

    @property
    def wants_draw(self) -> bool:
        return self.submit.sampling.max_tokens > 0 and self.first is None

    def last_boundary(self, page_tokens: int) -> int:
        """Return the last page boundary, in positions, that leaves something to compute."""
        return (len(self.tokens) - 1) // page_tokens * page_tokens

    def check(self) -> list[str]:
        """Recount; returns what its lengths, phase and allocation contradict."""
        found, lengths = [], (self.committed, self.launched, self.planned)
        if list(lengths) != sorted(lengths) or lengths[1] != lengths[2] or len(self.tokens) < lengths[2]:
            found.append(f"request {self.submit.request_id} has lengths {lengths} of {len(self.tokens)}")
        if (self.phase is PrefillPhase.WAITING) != (self.allocation is None):
            found.append(f"request {self.submit.request_id} is {self.phase} and its allocation says otherwise")
        return found

    def start_over(self) -> None:
        """Count nothing as computed any more. What was handed over and published stays so, as it comes out the same
        when it is computed again."""
        self.ends, self.scores = {}, []
        self.begin(0)
        self.starts += 1

    def begin(self, positions: int) -> None:
        """Set all lengths to `positions`: their state is there to start with."""
        self.committed = self.launched = self.planned = self.shared = positions
        self.awaited = 0
        self.pooling = PromptPooling.of(self.submit.sampling, len(self.tokens))

    def step(self, event: PrefillEvent) -> None:
        self.phase = PHASES.next(self.phase, event)


def _pixels(submit: Submit) -> int:
    """Bytes of the pixels of a request."""
    return sum(len(picture.pixels) for picture in submit.pictures)


def launchable(requests: Iterable[PrefillRequest]) -> list[PrefillRequest]:
    """The requests of which something is left to launch, the most urgent first."""
    running = PrefillPhase.RUNNING
    found = [r for r in requests if r.phase is running and r.allocation and r.launched < len(r.tokens)]
    return sorted(found, key=lambda r: -r.submit.priority)


@dataclass(frozen=True, slots=True)
class StepMember:
    """The owner of one row of a launched step: `count` positions of `request`, computed in its start number `start`."""

    request: PrefillRequest
    start: int
    count: int
    step: StepHandle
    begin: int
    """The first of them."""

    @property
    def current(self) -> bool:
        """Whether the request has not started over since the launch."""
        return self.start == self.request.starts


PIXEL_BYTES = 1024**3
"""Bytes of pixels that a worker holds for prompts that aren't computed yet, of all routers: as many as one has in
flight."""


class UnfitPictures(ValueError):
    """A request's pictures that can't be computed here, or not now; the text says why."""

    def __init__(self, why: str, kind: ErrorKind = ErrorKind.INVALID) -> None:
        super().__init__(why)
        self.kind = kind


class PrefillPages(RequestPages):
    """The pages of prefill's requests."""

    encoder: PictureEncoder | None = None
    """What computes pictures; None: none are taken."""

    def __init__(self, manager: KVCacheManager, *, reuse: bool) -> None:
        super().__init__(manager, reuse=reuse)
        self.counters = {"prompt_tokens_cached": 0.0}

    def reusable(self, request: PrefillRequest) -> int:
        """Return how many leading pages may come from the tree: the last token is computed, and every scored or pooled
        one."""
        return (len(request.tokens) - 1) // self.page_tokens if self.reuse and not request.wants_all else 0

    def placed(self, submit: Submit, requests: Iterable[PrefillRequest]) -> list[PlacedRows]:
        """Return a request's pictures with their positions. Raises `UnfitPictures` where they aren't those that its
        tokens were made of, or those of `requests`, which are here, leave no room for them."""
        if not submit.pictures:
            return []
        if self.encoder is None:
            raise UnfitPictures("this worker takes no images, as it is configured")
        if sum(_pixels(one.submit) for one in requests) + _pixels(submit) > PIXEL_BYTES:
            raise UnfitPictures("images of other requests fill this worker; try again later", ErrorKind.OVERLOADED)
        sees = self.encoder.tower.spec
        at = [place for place, token in enumerate(submit.tokens) if token >= PICTURE_KEYS]
        placed: list[PlacedRows] = []
        for picture in submit.pictures:
            height, width = picture.height, picture.width
            whole = not (height % sees.unit or width % sees.unit) and picture.count > 0
            right = picture.count == sees.count(height, width) and len(picture.pixels) == height * width * 3
            if not (whole and right):
                raise UnfitPictures("an image is not of the size that it is said to have")
            if (picture.across, picture.whole) != (sees.across(width), sees.whole):
                raise UnfitPictures("an image's positions are said to be others than this model has")
            digest, mine = sees.digest(height, width, picture.pixels), at[: picture.count]
            if [submit.tokens[place] for place in mine] != picture_keys(digest, picture.count):
                raise UnfitPictures("an image is not the one that the prompt was made of")
            del at[: picture.count]
            placed.append(PlacedRows(picture, digest, 0, mine))
        if at:
            raise UnfitPictures("the prompt has positions of images that are not there")
        return placed

    @property
    def slices(self) -> int:
        """How many slices of pictures have ended, each as much progress as a step is."""
        return 0 if self.encoder is None else self.encoder.slices

    def lacking(self, request: PrefillRequest) -> PlacedRows | None:
        """The first of a request's pictures that chunks to come need and that isn't computed."""
        if self.encoder is None:
            return None
        ahead = (one for one in request.pictures if one.at[-1] >= request.launched)
        return next((one for one in ahead if not self.encoder.has(one.digest)), None)

    def compute_pictures(self, requests: Iterable[PrefillRequest], config: PrefillConfig, clock: Clock) -> None:
        """Compute pictures that the next chunks of running requests have in them, for `prefill.picture_step_s`."""
        if self.encoder is None:
            return
        able, until = launchable(requests), clock.now() + config.picture_step_s
        while self._compute_picture(self.encoder, able, config.chunk_tokens) and clock.now() < until:
            continue

    def _compute_picture(self, encoder: PictureEncoder, able: Sequence[PrefillRequest], ahead: int) -> bool:
        """Compute a slice of a picture of the next `ahead` positions of one; returns whether there was one."""
        wanted, needed = dict[PrefillRequest, PlacedRows](), set[bytes]()
        for request in able:
            end = request.launched + ahead
            if (lacking := self.lacking(request)) is not None and lacking.at[0] < end:
                wanted[request] = lacking
                end = lacking.at[0]
            # What is behind a picture that it lacks is of no use yet, and holds up nobody.
            here = [one for one in request.pictures if request.committed <= one.at[-1] and one.at[0] < end]
            needed |= {one.digest for one in here if encoder.has(one.digest)}
        computed = encoder.compute([*wanted.values()], needed)
        for request, picture in wanted.items():
            request.looked_at = request.looked_at or encoder.began(picture.digest)
        return computed

    def prefetch(self, request: PrefillRequest) -> None:
        """Begin to read what storage has of the prompt into host memory."""
        reusable = self.reusable(request)
        if reusable:
            request.prefetch = self.manager.tiers.prefetcher.start(
                request.prefix.head(reusable), request.submit.request_id
            )

    def release_prefetch(self, request: PrefillRequest) -> None:
        """Let go of what the host keeps for it, and of reads under way. Idempotent."""
        if request.prefetch is not None:
            self.manager.tiers.prefetcher.release(request.prefetch)
            request.prefetch = None

    def next_due(self, requests: Iterable[PrefillRequest]) -> float | None:
        """Return when a read from storage ends at the latest that one of these waits for, or one must be begun, in
        seconds of the clock; None for none."""
        due = list[float | None]()
        for request in requests:
            if request.prefetch is not None:
                due.append(self.manager.tiers.prefetcher.deadline(request.prefetch))
            if not request.begun:
                due.append(request.begin_by)
        return min((at for at in due if at is not None), default=None)

    def take(self, request: PrefillRequest) -> bool:
        """Allocate pages, cached ones of the tiers and new ones for the rest; on False nothing was taken."""
        return self._take(request, len(request.tokens), len(request.tokens))

    def _take(self, request: PrefillRequest, positions: int, most: int) -> bool:
        """Allocate for `positions` positions, of a request that may reach `most`; on False nothing was taken."""
        allocation = self.manager.allocations.allocate(
            request.prefix,
            positions,
            f"request {request.submit.request_id}",
            reusable=self.reusable(request),
            prefetch=request.prefetch,
            most=most,
        )
        if allocation is None:
            return False
        request.allocation = allocation
        request.begin(allocation.depth * self.page_tokens)
        request.cached = allocation.cached
        self.counters["prompt_tokens_cached"] += allocation.cached.total
        return True

    def cache(self, request: PrefillRequest) -> None:
        """Give the request's finished pages to the tree at once, locked until it is freed; others may wait for them."""
        if self.reuse and request.allocation is not None and not request.allocation.invalid:
            self.manager.finished.cache_pages(request.allocation, request.prefix, request.submit.priority)
            request.shared = request.committed

    def free(self, request: PrefillRequest) -> None:
        """Give the request's finished pages to the tree and free the rest. Idempotent: nothing is held afterwards."""
        if request.allocation is None:
            return
        self.cache(request)
        # Shared pages are not the request's own to free, but a step under way may read them too.
        self.manager.allocations.free(
            request.allocation, [request.latest.completion] if request.latest is not None else []
        )
        request.allocation = None

    def preempt(self, request: PrefillRequest) -> None:
        """Send the request back to waiting; its finished pages go to the tree, for when it is admitted again."""
        self.free(request)
        request.start_over()
        request.step(PrefillEvent.PREEMPT)

    def restart(self, request: PrefillRequest) -> None:
        """Send the request back to waiting with nothing computed, as the state that it holds can't be trusted."""
        request.start_over()
        self.free(request)
        request.step(PrefillEvent.PREEMPT)


def first_token_events(request: PrefillRequest, worker: WorkerName) -> list[Event]:
    """Return the events in this order: prompt scores or the embedding if asked for, the first token if one was drawn,
    the report."""
    submit, key = request.submit, (request.submit.request_id, request.submit.attempt)
    events: list[Event] = []
    if request.wants_scores:
        events.append(PromptScores(*key, tuple(request.scores)))
    if submit.sampling.pooling:
        events.append(Embedding(*key, request.embedding))
    if request.first is not None:
        logprobs = (request.first.logprob,) if request.first.logprob is not None else ()
        events.append(Tokens(*key, len(submit.tokens), (request.first.token,), logprobs))
    return [*events, _report(request, worker)]


def unfinished_report(request: PrefillRequest, worker: WorkerName) -> LegReport | None:
    """Return the report of a prompt that is given up; None where it has been reported, or nothing was done for it."""
    done = request.computed or request.cached.total
    return _report(request, worker) if done and "prefill" not in request.marks else None


def _report(request: PrefillRequest, worker: WorkerName) -> LegReport:
    key = (request.submit.request_id, request.submit.attempt)
    cached, marks = request.cached, dict(request.marks)
    tiers = {"device": cached.device, "host": cached.host, "storage": cached.storage}
    notes = tuple(request.notes)
    return LegReport(
        *key, Role.PREFILL, worker, marks, cached.total, request.computed, cached_by_tier=tiers, notes=notes
    )
