"""A request on its way through decode, the states it goes through, its pages, and the outcomes that parts of the worker
report.

docs/states.md draws the states. A request waits until pages and a slot are granted, arrives until everything is
verified, and runs until its last token. Where pages are short it is retracted (retracting: its steps land; retracted:
its state is in host memory or on storage; resuming) and runs again when everything is back and matches its tags. A
request that migrates is leaving until the other worker has received it, and runs on here when the migration comes to
nothing. A retracted request isn't migrated before it is back. On a colocated worker a request arrives while its prompt
is computed there, and waits again when the prompt is preempted.

A request is admitted with pages for its prompt and its next step, and gets more as it goes on; where there are none, a
request is retracted (`decode.retraction.retraction`). While a step is under way the next one may be launched already,
with the token still on the device; not where either has drafts, which follow from tokens that the host knows
(`decode.drafting`). Pages are sealed and shared with other requests as they are finished, and freed once. The parts
that need pages for a request take them from the KV cache manager themselves: the transfer queue for its prompt, memory
pressure for its next step, retraction for its way back.

Reasoning spans are the tokens that a model thinks in, which the next turn of a conversation leaves out. State of
positions behind a left-out span is of no use to the next turn, whose tokens differ from there on. So with
`cache.strip_reasoning` decode gives the tree only the state up to the first span of the answer, and frees the rest.

Outcomes: the worker alone takes requests out of the table and tells routers what became of them; tokens alone go to
their routers as their step is committed. Parts yield outcomes one by one, and the worker acts on each before it takes
the next, so a part goes on with the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from twinpool.cache.device.device_port import Completion
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.swapped_requests import SwapInProgress
from twinpool.cache.memory.kv_cache_spec import due, extents
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.cache.swap.swap_storage import SwappedState
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.errors import ConfigError, ErrorKind
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.kept_answers import KeptAnswer
from twinpool.contracts.messages.worker_events import Event, LegNote, LegReport, Tokens
from twinpool.contracts.sampling_params import TokenLogprob
from twinpool.contracts.state_table import StateTable
from twinpool.engine.runner.batch import TokenFromStep, TurnedPlaces
from twinpool.engine.runner.device_rows import TokenHistory
from twinpool.engine.runner.sampling.logits_processors import TokenMask, needs_history
from twinpool.transfer.rooms.room_messages import HandoverMetadata
from twinpool.worker.request_table import RequestPages, WorkerRequest, sendable_pages


class DecodePhase(StrEnum):
    WAITING = "waiting"
    ARRIVING = "arriving"
    RUNNING = "running"
    LEAVING = "leaving"
    """Its state is held for another decode worker (`decode.migration.outgoing_migrations`)."""
    RETRACTING = "retracting"
    """It leaves the device: steps under way land, then its state is copied."""
    RETRACTED = "retracted"
    """Its state is in host memory, or on storage."""
    RESUMING = "resuming"
    """Its state is on its way back."""
    GONE = "gone"


class DecodeEvent(StrEnum):
    GRANT = "grant"
    PREEMPT = "preempt"
    ARRIVED = "arrived"
    DEPART = "depart"
    RETRACT = "retract"
    SWAPPED_OUT = "swapped"
    RESUME = "resume"
    BACK = "back"
    END = "end"


PHASES = StateTable[DecodePhase, DecodeEvent](
    "decode request",
    {
        DecodePhase.WAITING: {DecodeEvent.GRANT: DecodePhase.ARRIVING, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.ARRIVING: {
            DecodeEvent.ARRIVED: DecodePhase.RUNNING,
            DecodeEvent.PREEMPT: DecodePhase.WAITING,
            DecodeEvent.END: DecodePhase.GONE,
        },
        DecodePhase.RUNNING: {
            DecodeEvent.DEPART: DecodePhase.LEAVING,
            DecodeEvent.RETRACT: DecodePhase.RETRACTING,
            DecodeEvent.END: DecodePhase.GONE,
        },
        DecodePhase.LEAVING: {DecodeEvent.BACK: DecodePhase.RUNNING, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.RETRACTING: {DecodeEvent.SWAPPED_OUT: DecodePhase.RETRACTED, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.RETRACTED: {DecodeEvent.RESUME: DecodePhase.RESUMING, DecodeEvent.END: DecodePhase.GONE},
        DecodePhase.RESUMING: {DecodeEvent.BACK: DecodePhase.RUNNING, DecodeEvent.END: DecodePhase.GONE},
    },
)

OFF_DEVICE = (DecodePhase.RETRACTING, DecodePhase.RETRACTED, DecodePhase.RESUMING)
"""Phases in which a request is in a queue of `decode.retraction.retraction`."""
STEPPING = (DecodePhase.RUNNING, DecodePhase.RETRACTING)
"""Phases in which steps of a request may be under way."""


@dataclass(eq=False)
class DecodeRequest(WorkerRequest):
    """One attempt at one request. While it is arriving, the pages that it lacks are its room's; then its own."""

    phase: DecodePhase = DecodePhase.WAITING
    """Where it stands. From its grant on it has an allocation, but none between the starts of swap-out and swap-in."""
    swapped: SwappedState | None = None
    """Its swapped out state, from the start of the swap-out until it runs again."""
    returning: SwapInProgress | None = None
    """The swap-in under way, while it is resuming."""
    retractions: int = 0
    """How often it was retracted for lack of pages."""
    stepped: bool = True
    """False from its swap-out until it is back and a step of it is committed: so long it isn't retracted again."""
    metadata: HandoverMetadata | None = None
    """What was handed over besides pages, the draft state with it: a copy that the request owns, whatever becomes of
    the metadata slot and wherever its pages are (hazard A2)."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far; the state of all but the last is in the pages."""
    history: TokenHistory | None = None
    """The same tokens for its draws, where it has penalties that count them."""
    mask: TokenMask | None = None
    """The tokens that may be drawn; None: all."""
    drafts: tuple[int, ...] = ()
    """The drafts of its next step, or of the one under way (`decode.drafting`)."""
    draft_limit: int = 2
    """How many drafts its next step may have; it follows how many of the last ones were right."""
    draft_rates: list[float] = field(default_factory=list)
    """By place, how often a draft of it is drawn that follows drawn ones; the latest ones count."""
    drafted: int = 0
    """Drafts that its steps had on this worker."""
    accepted: int = 0
    """Those of them that were drawn."""
    undrafted: int = 0
    """Its steps that had no draft since none paid."""
    latest: TokenFromStep | None = None
    """The row of a launched step that draws its latest token."""
    settled: bool = False
    """Whether all state that was loaded for its allocation is known to have arrived (`DecodePages.settled`)."""
    reach: int = 0
    """Positions for which its allocation, once settled, is known to have pages in every pool (`DecodePages.grow`)."""
    stopping: bool = False
    """It is to be migrated: no step of it is launched any more."""
    claim: int = 0
    """The number of the claim by which its router has it; a later claim has a higher one, whoever makes it."""
    computed: int = 0
    """Prompt positions that this worker's engine had to compute: none, as long as all state is handed over."""
    behind: DecodeRequest | None = None
    """The request that is receiving the prompt that both have in common, while this one waits for it."""
    behind_since: float | None = None
    """When it first began to wait for another request's prompt, in seconds of the clock."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of its answer's tokens, where it has a name and its client asked for them."""
    tells_first: bool = False
    """Whether its first token is to be told by this worker: its router has it from another one, to which prefill tells
    it."""

    @cached_property
    def turned(self) -> TurnedPlaces | None:
        """How its pictures turn its positions."""
        return TurnedPlaces.of(self.submit.tokens, self.submit.pictures)

    @property
    def generated(self) -> int:
        """Tokens of its answer so far, those of earlier attempts included."""
        return max(len(self.tokens), len(self.submit.tokens)) - self.submit.prompt_len

    @property
    def answer(self) -> list[int]:
        """The tokens of its answer so far, once its prompt has arrived."""
        return self.tokens[self.submit.prompt_len :]

    @property
    def in_place(self) -> bool:
        """Whether the state of all its committed positions is on the device, in its allocation."""
        return self.allocation is not None and self.phase in (
            DecodePhase.RUNNING,
            DecodePhase.RETRACTING,
            DecodePhase.LEAVING,
        )

    @property
    def waits_for_prefill(self) -> bool:
        """Whether its prompt is still to come from another worker."""
        return self.submit.peer is not None and self.phase in (DecodePhase.WAITING, DecodePhase.ARRIVING)

    @property
    def stepping(self) -> bool:
        """Whether steps of it may be under way."""
        return self.phase in STEPPING

    @property
    def under_way(self) -> int:
        """Tokens that steps under way draw, at most: drafts may be rejected."""
        return self.launched - self.committed

    def start(self, metadata: HandoverMetadata) -> None:
        """Begin with the state of all submitted tokens, and with the first token after them, as handed over."""
        self.metadata = metadata
        self.tokens = [*self.submit.tokens, metadata.token]
        sampling = self.submit.sampling
        if self.submit.name is not None:
            self.logprobs = list(self.submit.name.logprobs)
            # Another decode worker hands over a token whose log-probability the router has told with the name.
            if metadata.logprob is not None:
                self.logprobs.append(metadata.logprob)
        inputs = self.tokens
        if self.submit.pictures:  # Penalties count placeholders.
            inputs = [*self.submit.inputs, metadata.token]
        self.history = TokenHistory(inputs) if needs_history(sampling) else None
        self.mask = TokenMask.allowed(sampling.allowed_token_ids)
        self.committed = self.launched = self.planned = len(self.submit.tokens)

    def commit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Count a complete step: the state of all tokens up to the last of these is there, `tokens` came new."""
        self.tokens += tokens
        if self.history is not None and self.history.tokens is not self.tokens:
            self.history.tokens += tokens
        if self.submit.name is not None:
            self.logprobs += logprobs
        self.committed += len(tokens)
        self.stepped = True

    def whole(self, page_tokens: int, end: int) -> TokenPrefix:
        """Return the prefix of the whole pages of its first `end` tokens."""
        known = self.prefix.head(end // page_tokens)
        return known.longer(self.tokens[len(known) * page_tokens : end])

    @property
    def positions(self) -> int:
        """The most positions whose state it ever needs: the last token's is never read."""
        return max(len(self.submit.tokens), self.submit.max_len - 1)

    def positions_for(self, end: int) -> int:
        """Return `end`, but no more than `positions`."""
        return min(self.positions, end)

    def report(self, worker: WorkerName, *, held: int = 0, computed: int = 0, received: int = 0) -> LegReport:
        """Return the leg's report for its router: marks, prompt tokens that were `held` here or `computed` here, bytes
        `received`, and the notes since the last report."""
        submit, marks, notes = self.submit, dict(self.marks), tuple(self.notes)
        if (self.drafted or self.undrafted) and "done" in marks:
            told = f"{self.accepted} of {self.drafted} drafts were drawn"
            if self.drafted:
                told += f" (of late, by place: {', '.join(f'{rate:.0%}' for rate in self.draft_rates)})"
            if self.undrafted:
                told += f"; {self.undrafted} steps had none, as none was known to pay"
            notes = (*notes, LegNote("drafted", marks["done"], text=told))
        self.notes.clear()
        return LegReport(
            submit.request_id, submit.attempt, Role.DECODE, worker, marks, held, computed, received, notes=notes
        )

    def told(self, now: float) -> KeptAnswer | None:
        """Return what there is of its answer at `now`, in seconds of the clock, for a router that asks. None where it
        has no name, or lacks log-probabilities that its client asked for."""
        submit, sampling = self.submit, self.submit.sampling
        if submit.name is None:
            return None
        name, started = submit.name, bool(self.tokens)
        tokens = tuple(self.answer) if started else submit.emitted
        logprobs = tuple(self.logprobs) if started else name.logprobs
        # One that migrates here is told of with the token that is still to be handed over; it has that token's, too.
        logprobs = logprobs[: len(tokens)]
        if sampling.logprobs is not None and len(logprobs) != len(tokens):
            return None
        cached = name.cached_tokens
        if cached is None and self.metadata is not None and not submit.migrating:
            cached = self.metadata.cached_tokens
        return KeptAnswer(
            submit.request_id,
            submit.attempt,
            name.index,
            name.created,
            submit.prompt_len,
            sampling.max_tokens,
            max(self.arrived + submit.deadline_s - now, 0.0),
            tokens,
            logprobs if sampling.logprobs is not None else (),
            cached,
            running=True,
            started=started,
            adapter="" if sampling.adapter is None else sampling.adapter.digest,
        )

    def first_token(self, worker: WorkerName) -> list[Event]:
        """Return what prefill says of a prompt that has arrived: what its cache had, and the first token."""
        assert self.metadata is not None, "its prompt has arrived"
        submit, metadata = self.submit, self.metadata
        key, cached = (submit.request_id, submit.attempt), metadata.cached_tokens
        logprobs = (metadata.logprob,) if metadata.logprob is not None else ()
        return [
            LegReport(*key, Role.PREFILL, worker, cached_tokens=cached),
            Tokens(*key, len(submit.tokens), (metadata.token,), logprobs),
        ]

    def check(self, steps: int) -> list[str]:
        """Recount, with `steps` steps under way; returns what its phase, lengths, drafts and allocation contradict."""
        found, name = [], f"request {self.submit.request_id}"
        off = self.phase in (DecodePhase.WAITING, DecodePhase.RETRACTED)
        if off != (self.allocation is None) and not self.swapped:
            found.append(f"{name} is {self.phase} and its allocation says otherwise")
        known = len(self.tokens) - 1 if self.phase not in (DecodePhase.WAITING, DecodePhase.ARRIVING) else 0
        if self.drafts:  # A step with drafts is the only one under way.
            right = steps > 0 and self.launched == known + 1 + len(self.drafts)
        else:
            right = known <= self.launched <= known + steps
        if not right or self.committed != known or self.planned != self.launched:
            lengths = (self.committed, self.launched, self.planned)
            found.append(f"{name} has {known} positions and says {lengths}, with {len(self.drafts)} drafts")
        return found

    def step(self, event: DecodeEvent) -> None:
        self.phase = PHASES.next(self.phase, event)


@dataclass(frozen=True, slots=True)
class RouterEvent:
    """An event for the router behind this session."""

    session: SessionId
    event: Event


@dataclass(frozen=True, slots=True)
class PromptReceived:
    """The request has all state of its prompt, and its first token; `bytes` of it came through the room."""

    request: DecodeRequest
    bytes: int


@dataclass(frozen=True, slots=True)
class PromptPreempted:
    """The prompt of this request, which this worker computes, has no pages any more: the request waits for them."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The answer of this request is complete; `reason` is ``stop`` or ``length``."""

    request: DecodeRequest
    reason: str
    stop_token: int | None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """This attempt can't go on; its router is told why. `blame` is the worker at fault where it isn't this one."""

    request: DecodeRequest
    kind: ErrorKind
    message: str
    blame: WorkerName | None = None


@dataclass(frozen=True, slots=True)
class RequestLeft:
    """This request has left this worker, and its router knows already: no event is sent."""

    request: DecodeRequest
    reason: str


# ------------------------------------------------------------ its pages


@dataclass(frozen=True, slots=True)
class ReasoningSpans:
    """The ids of the tokens that open and close a span."""

    opens: int
    closes: int

    @classmethod
    def of(cls, config: CacheConfig) -> ReasoningSpans | None:
        """Return None unless spans are stripped. Raises `ConfigError` where the tokens aren't given."""
        if not config.strip_reasoning:
            return None
        try:
            opens, closes = (int(part) for part in config.reasoning_tokens.split(","))
        except ValueError:
            raise ConfigError(
                "cache.strip_reasoning needs cache.reasoning_tokens, the ids of the tokens that open and close a span, "
                f'as "151667,151668"; got {config.reasoning_tokens!r}'
            ) from None
        return cls(opens, closes)

    def keeps(self, tokens: Sequence[int], prompt: int) -> int:
        """Return how many of `tokens` come before the first span of the answer, which begins after `prompt` tokens.

        A prompt that ends within a span leaves nothing of the answer.
        """
        for token in reversed(tokens[:prompt]):
            if token == self.opens:
                return prompt
            if token == self.closes:
                break
        answer = list(tokens[prompt:])
        return prompt + answer.index(self.opens) if self.opens in answer else len(tokens)


class DecodePages(RequestPages):
    """The pages of decode's requests."""

    def __init__(self, manager: KVCacheManager, config: CacheConfig) -> None:
        super().__init__(manager, reuse=config.prefix_reuse)
        self._reasoning = ReasoningSpans.of(config)

    def reusable(self, request: DecodeRequest) -> TokenPrefix:
        """Return the leading pages of its prompt that may come from the tree."""
        return request.prefix if self.reuse else request.prefix.head(0)

    def settled(self, request: DecodeRequest) -> bool:
        """Whether all state that was loaded for the request has arrived and is verified; only then it joins a batch.

        It stays so (`DecodeRequest.settled`) until the request has another allocation, or shares pages with the tree
        anew: the tree may have the same ones on their way. State that turns out damaged ends the request.
        """
        if request.allocation is None or not self.manager.allocations.ready(request.allocation):
            return False
        request.settled, request.reach = True, request.planned
        return True

    def grow(self, request: DecodeRequest) -> bool:
        """Get pages for one more position, in every pool; False where one has none, or none yet. A page has room for
        the positions behind that one, so most steps need none."""
        end = request.planned + 1
        if self.manager.running.extend(request.held, end) < end:
            return False
        request.reach = -(-end // self.page_tokens) * self.page_tokens
        return True

    def cache_prompt(self, request: DecodeRequest) -> None:
        """Give the tree the prompt's pages of the full pool, for requests with the same prompt, from now on."""
        if self.reuse and request.allocation is not None and not request.allocation.invalid:
            request.settled = False
            self.manager.finished.cache_pages(
                request.allocation, request.prefix, request.submit.priority, full_only=True
            )

    def cache(self, request: DecodeRequest) -> None:
        """Give the tree the committed state, for the next turn of the conversation; where reasoning spans are stripped,
        only the state before the answer's first one."""
        allocation = request.allocation
        if not self.reuse or allocation is None or allocation.invalid:
            return
        request.settled, tokens = False, request.tokens[: request.committed]
        if self._reasoning is not None:
            tokens = tokens[: self._reasoning.keeps(tokens, request.submit.prompt_len)]
        self.manager.finished.seal([(allocation, request.committed)])
        known = request.prefix.head(len(tokens) // self.page_tokens)
        prefix = known.longer(tokens[len(known) * self.page_tokens :])
        self.manager.finished.cache_pages(allocation, prefix, request.submit.priority)

    def seal(self, request: DecodeRequest) -> tuple[list[bytes], dict[str, int]]:
        """Digest all committed state; returns the block hashes of its pages, and by pool the digests of what is at its
        end: of the last page where that is partly filled, and of the recurrent state."""
        allocation, committed = request.held, request.committed
        self.manager.finished.seal([(allocation, committed)])
        ends = self.manager.finished.end_digests(allocation, committed)
        return block_hashes(request.tokens[:committed], self.page_tokens, request.submit.salt), ends

    def intact(self, request: DecodeRequest, chain: Sequence[bytes], ends: Mapping[str, int]) -> bool:
        """Whether all state that the request would go on from still matches its tags, which `seal` returned."""
        allocation, spec, committed = request.held, self.manager.spec, request.committed
        wanted = due(spec, committed)
        for pool, pages in sendable_pages(wanted, allocation, chain, ends).items():
            firsts, stops = extents(spec, pool, wanted[pool], committed)
            now = self.manager.pools.digest(pool, pages.indices, firsts, stops)
            if now != [tag.digest for tag in pages.tags]:
                return False
        return True

    def free(self, request: DecodeRequest) -> None:
        """Give committed state to the tree and free the rest. Idempotent: nothing is held afterwards."""
        if request.allocation is None:
            return
        if request.in_place:
            self.cache(request)
        under_way: list[Completion] = [request.latest.step.completion] if request.latest is not None else []
        if request.returning is not None:
            under_way.append(request.returning.restored)
        self.manager.allocations.free(request.allocation, under_way)
        request.allocation, request.settled = None, False
