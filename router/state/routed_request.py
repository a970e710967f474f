"""The router's state of one choice of one client request.

Two streams answer one request: prefill sends the first token of an attempt, decode all later ones and the end. They
race, and attempts follow each other when workers die, so three rules make one stream of them:

- Order is by absolute position. A token ahead of the next position waits in `early`; one behind it is a duplicate and
  dropped.
- Only events of the current attempt count; the caller drops the others.
- `Done` is held until all that precedes it has arrived: every earlier position, the prompt's scores when asked for, and
  (for a moment) prefill's report.

The tokens are all that a new attempt needs: `tokens` is the prompt and everything emitted, and any pair of workers can
continue from it. The phases and their transitions are the table `TRANSITIONS`, drawn in docs/states.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from twinpool.contracts.errors import ErrorKind, IllegalTransition
from twinpool.contracts.ids import RequestId, Role, RoomId, WorkerName
from twinpool.contracts.messages.kept_answers import AnswerName, KeptAnswer
from twinpool.contracts.messages.router_commands import Picture
from twinpool.contracts.messages.worker_events import Done, Event, LegReport, Tokens
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.router.state.prefix_hashes import BLOCK_TOKENS, NO_HASHES, PrefixHashes
from twinpool.router.state.request_journal import JournalKind, RequestJournal
from twinpool.router.state.ttft_prediction import NO_TENANT, TenantWeight, TtftPrediction
from twinpool.router.state.worker_table import WorkerKey


class AttemptCost(StrEnum):
    """The cost of a failed attempt to its request."""

    REPLAY = "replay"
    """One replay of `router.replay_limit`."""
    REFUSAL = "refusal"
    """One refusal of `REFUSAL_LIMIT` (`router.core.failover`)."""
    FREE = "free"
    """Nothing: the attempt has brought a token."""


@dataclass(frozen=True, slots=True)
class AttemptLeg:
    """The workers that draw a request's tokens from absolute position `base` on, until the next leg begins."""

    attempt: int
    base: int
    workers: Mapping[Role, str]
    first: Role = Role.PREFILL
    """The role that draws the token at `base`; decode draws all later ones."""

    def role_at(self, position: int) -> Role:
        return self.first if position == self.base else Role.DECODE


class RoutingPhase(StrEnum):
    WAITING = "waiting"
    """The request waits for workers, or for its back-off to end."""
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS: dict[tuple[RoutingPhase, str], RoutingPhase] = {
    (RoutingPhase.WAITING, "place"): RoutingPhase.RUNNING,
    (RoutingPhase.RUNNING, "replay"): RoutingPhase.WAITING,
    (RoutingPhase.WAITING, "end"): RoutingPhase.ENDED,
    (RoutingPhase.RUNNING, "end"): RoutingPhase.ENDED,
}


class RoutedRequest:
    """The state of one choice; the router core alone changes it. Times are seconds of the router core's clock."""

    __slots__ = (
        "arrived",
        "attempt",
        "avoid",
        "base",
        "deadline",
        "decode",
        "decode_spoke",
        "done",
        "done_at",
        "drawn_again_with",
        "early",
        "embedded",
        "emitted",
        "expected",
        "first_placed",
        "first_token_by",
        "hashes",
        "id",
        "journal",
        "last_attempt",
        "legs",
        "local",
        "logprobs",
        "migrations",
        "name",
        "nonfinite",
        "not_before",
        "numerics",
        "phase",
        "pictures",
        "prefill",
        "prefill_loaded",
        "prefill_lost",
        "priority",
        "progress",
        "prompt",
        "prompt_arrived",
        "refusals",
        "replays",
        "reported",
        "room",
        "salt",
        "sampling",
        "scores_in",
        "session",
        "share",
        "siblings",
        "spoiled",
        "told",
        "waiting_since",
        "weights",
        "weights_number",
        "workers",
    )

    told: bool
    """Whether its client had a part of it, of what a worker has kept of it, before this router had it."""
    drawn_again_with: int | None
    """The number of the weights with which it is computed, whatever becomes of the cluster's: its client has a part of
    it that no worker has, so the same is drawn again. None: no such part."""

    def __init__(
        self,
        request_id: RequestId,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        now: float,
        deadline: float,
        hashes: PrefixHashes = NO_HASHES,
        salt: str = "",
        priority: int = 0,
        first_token_by: float | None = None,
        share: TenantWeight = NO_TENANT,
        session: str = "",
        name: AnswerName | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> None:
        """`first_token_by`: the time after which its prompt isn't begun any more; None: it may always be. `share`:
        whose it is. `session`: what its client names the conversation; empty: by how its prompt begins. `name`: under
        which decode keeps it when this router is gone."""
        self.id = request_id
        self.prompt, self.pictures = prompt, pictures
        self.sampling = sampling
        self.hashes = hashes
        self.session = session
        self.salt = salt
        self.priority = priority
        self.share = share
        self.name = name
        self.logprobs: list[TokenLogprob] = []
        """Those of the emitted tokens, where it has a name and its client asked for them."""
        self.arrived = self.waiting_since = now
        self.deadline = deadline
        self.first_token_by = first_token_by
        self.expected: TtftPrediction | None = None
        """When its first token was predicted to come, where that was close to `first_token_by`."""
        self.not_before = now
        self.first_placed: float | None = None
        self.phase = RoutingPhase.WAITING
        self.emitted: list[int] = []
        self.attempt = self.last_attempt = 0
        self.replays = 0
        self.refusals = 0
        self.nonfinite = 0  # How often a worker's logits for the request weren't finite.
        self.migrations = 0
        """How often the request has migrated to another decode worker."""
        self.avoid: dict[WorkerKey, float] = {}
        """Workers at fault, each with the time until which it isn't chosen."""
        self.spoiled: set[tuple[WorkerKey, WorkerKey]] = set()
        """Pairs of a prefill and a decode worker between which a hand-over of the request has failed."""
        self.numerics = ""
        """The numerics class and weights (`binding_class`) of the latest attempt's workers. All that follows the first
        token or score that was delivered, to any choice of the same answer, is computed in the same class, whatever
        fails. Empty where any will do."""
        self.weights, self.weights_number = "", 0
        """The version and the number of the weights of the latest attempt's workers."""
        self.told, self.drawn_again_with = False, None
        self.siblings: Sequence[RoutedRequest] = ()
        """All choices of its answer, where there are several."""
        self.scores_in = sampling.prompt_logprobs is None
        self.embedded = not sampling.pooling
        """Whether its embedding was delivered, or none is asked for."""
        self.progress: list[LegReport] = []
        """Every report of every attempt, in order of arrival."""
        self.journal = RequestJournal()
        self.workers: dict[Role, str] = {}
        """For each role the name of the worker that serves the request, or served it last."""
        self.legs: list[AttemptLeg] = []
        """Every attempt that was placed, and every migration to another decode worker, in order."""
        self._clear_attempt()

    def _clear_attempt(self) -> None:
        self.room: RoomId | None = None
        self.local = ""
        """Why a decode worker computes the prompt of this attempt itself (`LocalReason`); empty where it doesn't."""
        self.prefill: WorkerKey | None = None
        self.decode: WorkerKey | None = None
        self.prefill_loaded = 0
        self.prefill_lost = False
        self.decode_spoke = self.prompt_arrived = False
        self.reported = False
        self.base = len(self.prompt) + len(self.emitted)
        self.early: dict[int, tuple[int, TokenLogprob | None]] = {}
        self.done: tuple[Role, Done] | None = None
        self.done_at = 0.0

    @property
    def session_key(self) -> str:
        """What requests of one conversation have in common: the client's name for it, or how the prompt begins."""
        if self.session:
            return self.session
        blocks = self.hashes.blocks
        return str(int(blocks[0])) if len(blocks) else str(self.prompt[:BLOCK_TOKENS])

    def step(self, name: str) -> None:
        """Take the transition `name`; "replay" begins the next attempt.

        Raises `IllegalTransition`, with nothing changed, for a transition that isn't in `TRANSITIONS`.
        """
        target = TRANSITIONS.get((self.phase, name))
        if target is None:
            raise IllegalTransition(f"request {self.id}: no transition {name!r} from {self.phase}")
        if name == "replay":
            self._clear_attempt()
            self.attempt = self.next_attempt()
        self.phase = target

    def next_attempt(self) -> int:
        """Take a number for a new attempt, which no worker has seen with this request: events of an earlier attempt,
        also of a migration that failed, can't be taken for those of the new one."""
        self.last_attempt += 1
        return self.last_attempt

    def restore(self, kept: KeptAnswer, last_attempt: int, *, told: bool = False) -> None:
        """Set a new request to what a worker has kept of it. `last_attempt`: the highest that any worker has seen.
        `told`: as the attribute."""
        self.told = told
        self.emitted, self.logprobs = list(kept.tokens), list(kept.logprobs)
        self.attempt, self.last_attempt = kept.attempt, max(kept.attempt, last_attempt)
        self.base = self.next_position
        if kept.cached_tokens is not None:
            cached = kept.cached_tokens
            self.progress.append(LegReport(self.id, kept.attempt, Role.PREFILL, WorkerName(""), cached_tokens=cached))

    def draw_again(self, weights_number: int) -> None:
        """Note that its client has a part of it that no worker has, computed with the weights of this number."""
        self.drawn_again_with = weights_number

    def go_on_with(self, worker: WorkerKey, name: str, *, started: bool, now: float) -> None:
        """Enter the decode worker that has the restored request; whatever is still to come, decode sends. `started`:
        whether its prompt has arrived there."""
        self.step("place")
        self.first_placed, self.decode, self.workers = now, worker, {Role.DECODE: name}
        self.prefill_lost, self.decode_spoke, self.prompt_arrived = True, started, started
        # All of its tokens came of this attempt, as far as is known: the end needs no other.
        self.base = len(self.prompt)
        self.legs.append(AttemptLeg(self.attempt, self.base, dict(self.workers), Role.DECODE))
        self.journal.note(now, JournalKind.ADOPTED, self.attempt, name, workers=self.workers)

    @property
    def full_name(self) -> AnswerName | None:
        """Its name, with what a worker needs besides the tokens to keep all of the answer."""
        if self.name is None:
            return None
        cached = next((p.cached_tokens for p in self.progress if p.role is Role.PREFILL), None)
        return replace(self.name, cached_tokens=cached, logprobs=tuple(self.logprobs))

    def late(self, now: float) -> bool:
        """Whether it is too late to begin it. What was begun is finished, also after a failure."""
        return self.first_token_by is not None and now >= self.first_token_by and not self.attempt

    def computed_by(self, numerics: str, weights: str = "", weights_number: int = 0) -> None:
        """Set the class of a new attempt's workers, and the version and number of their weights; it can't change once
        something of the answer was delivered."""
        assert self.bound in (None, numerics), "an answer stays in its numerics class, and with its weights"
        self.go_on_in(numerics, weights, weights_number)

    def go_on_in(self, numerics: str, weights: str, weights_number: int) -> None:
        """As `computed_by`, for a request that was restored from what a worker of that class has kept."""
        self.numerics, self.weights, self.weights_number = numerics, weights, weights_number

    @property
    def bound(self) -> str | None:
        """The class in which all of its answer is computed, once something of it was delivered or another choice of it
        runs or has ended; None: any will do."""
        if self.delivered:
            return self.numerics
        others = (one for one in self.siblings if one is not self)
        return next((one.numerics for one in others if one.delivered or one.phase is not RoutingPhase.WAITING), None)

    @property
    def free(self) -> bool:
        """Whether workers of any numerics class and weights may compute it."""
        return self.bound is None and self.drawn_again_with is None

    def goes_on_with(self, numerics: str, weights_number: int) -> bool:
        """Whether workers of this class and with weights of this number may compute it."""
        return self.bound in (None, numerics) and self.drawn_again_with in (None, weights_number)

    @property
    def pixels(self) -> int:
        """Bytes of its images, as the worker that computes its prompt is sent them."""
        return sum([len(picture.pixels) for picture in self.pictures])

    @property
    def delivered(self) -> bool:
        """Whether any token or score of the answer was delivered, by this router or, as its client says, another."""
        return bool(self.emitted) or self.told or (self.scores_in and self.sampling.prompt_logprobs is not None)

    def learn(self, kind: ErrorKind) -> None:
        """Remember of a failure of this kind what the next attempts must do differently."""
        if kind is ErrorKind.NONFINITE:
            # State that is cached for the same tokens, on any tier, may be what was wrong. With a salt of its own the
            # request is computed from its tokens alone.
            self.nonfinite += 1
            self.salt, self.hashes = f"{self.salt}|recomputed {self.id} {self.nonfinite}", NO_HASHES
        if kind is ErrorKind.ROOM and self.prefill and self.decode:
            self.spoiled.add((self.prefill, self.decode))

    def charge(self, cost: AttemptCost) -> None:
        """Count the cost of a failed attempt."""
        self.replays += cost is AttemptCost.REPLAY
        self.refusals += cost is AttemptCost.REFUSAL

    @property
    def attempts(self) -> int:
        """How many attempts were placed on a pair of workers; a migration goes on with the attempt that it is of."""
        return len(self.legs) - self.migrations

    @property
    def on_one_worker(self) -> bool:
        """Whether one worker has both legs: a colocated one, or a decode worker that computes the prompt."""
        return self.prefill is not None and self.prefill == self.decode

    def role_of(self, worker: WorkerKey, event: Event) -> Role:
        """The role in which one of the request's workers says `event`. A worker of both legs has both: what it says of
        the prompt, and whatever it says last, it says as prefill, after which nothing of another worker is to come."""
        if worker != self.prefill:
            return Role.DECODE
        if not self.on_one_worker:
            return Role.PREFILL
        match event:
            case Tokens():
                return Role.PREFILL if event.position == self.base else Role.DECODE
            case LegReport():
                return event.role
            case _:
                return Role.PREFILL

    def hand_over(self, worker: WorkerKey, name: str, attempt: int, room: RoomId) -> None:
        """Enter another decode worker, which goes on at the next position; the caller keeps both workers' books."""
        if self.on_one_worker:
            self.prefill = None  # What it computed as prefill goes to the next worker with the rest.
        self.decode, self.attempt, self.room = worker, attempt, room
        self.workers[Role.DECODE] = name
        self.migrations += 1
        self.legs.append(AttemptLeg(attempt, self.next_position, dict(self.workers), Role.DECODE))

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.emitted) if self.emitted else self.prompt

    @property
    def next_position(self) -> int:
        return len(self.prompt) + len(self.emitted)

    @property
    def max_len(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def ending(self) -> Done | None:
        """The end that the emitted tokens themselves prove (a stop token, or the last position), or that an embedding
        is; None: they don't."""
        if self.sampling.pooling and self.embedded:
            return Done(self.id, self.attempt, "length")
        if self.emitted and self.emitted[-1] in self.sampling.stop_token_ids:
            return Done(self.id, self.attempt, "stop", stop_token=self.emitted[-1])
        if self.emitted and len(self.emitted) >= self.sampling.max_tokens:
            return Done(self.id, self.attempt, "length")
        return None

    def append_next(self, worker: WorkerKey, event: Tokens) -> bool:
        """Emit the tokens of an event that are the next ones of the current attempt, from the decode worker that has
        begun to send them, while nothing is held that they could complete. Returns False, with nothing changed, for any
        other event, which `accept` takes."""
        emitted, tokens = self.emitted, event.tokens
        if (
            worker != self.decode
            or event.attempt != self.attempt
            or not self.decode_spoke
            or self.done is not None
            or event.position <= self.base
            or event.position != len(self.prompt) + len(emitted)
            or self.early
            or not self.scores_in
            or len(emitted) + len(tokens) > self.sampling.max_tokens
            or not tokens
        ):
            return False
        emitted.extend(tokens)
        if self.name is not None:
            self.logprobs.extend(event.logprobs)
        return True

    def accept(self, event: Tokens, role: Role) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """Take in tokens of the current attempt; returns the tokens that are in order now, with their log-probs.

        The returned tokens count as emitted.
        """
        if role is Role.DECODE:
            self.decode_spoke = self.prompt_arrived = True
        logprobs: Sequence[TokenLogprob | None] = event.logprobs or (None,) * len(event.tokens)
        for offset, (token, logprob) in enumerate(zip(event.tokens, logprobs, strict=True)):
            position = event.position + offset
            if self.next_position <= position < self.max_len:
                self.early.setdefault(position, (token, logprob))
        return self.release_early()

    def release_early(self) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """Emit and return the waiting tokens that are in order now; none before the prompt's scores."""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        if not self.scores_in:
            return tokens, logprobs
        position = self.next_position
        while position in self.early:
            token, logprob = self.early.pop(position)
            tokens.append(token)
            if logprob is not None:
                logprobs.append(logprob)
            position += 1
        self._emit(tokens, logprobs)
        return tokens, logprobs

    def _emit(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        self.emitted.extend(tokens)
        if self.name is not None:
            self.logprobs.extend(logprobs)

    @property
    def begun(self) -> bool:
        """Whether what prefill tells of this attempt has arrived: the first token, and the scores if asked for."""
        return self.scores_in and self.next_position > self.base

    def outlives_prefill(self, *, left: bool) -> bool:
        """Whether the request can do without its prefill worker: what that tells has arrived, and decode has the state
        that it sent. `left`: whether the worker has left in order, which it does only when decode has that state."""
        return self.begun and (left or self.prompt_arrived) and not self.on_one_worker

    @property
    def complete(self) -> bool:
        """Whether `Done` and all before it have arrived; decode's `Done` also needs the first token, from prefill."""
        if self.done is None or self.early or not self.scores_in:
            return False
        return self.done[0] is Role.PREFILL or self.next_position > self.base

    def contradiction(self) -> str | None:
        """Why the `Done` that has arrived contradicts the emitted tokens; None where it doesn't."""
        assert self.done is not None
        done, last = self.done[1], self.emitted[-1] if self.emitted else None
        if not self.embedded:
            return "ended without the embedding that it was asked for"
        if done.reason == "length" and len(self.emitted) == self.sampling.max_tokens:
            return None
        if done.reason == "stop" and last is not None and last in self.sampling.stop_token_ids:
            return None
        return f"ended with reason {done.reason!r} after {len(self.emitted)} of {self.sampling.max_tokens} tokens"
