"""One choice of one client request, as the router's state of it.

Two streams answer one request: prefill sends the first token of an attempt, decode all later ones and the end. They
race, and attempts follow each other when workers die, so three rules make one stream of them:

- Order is by absolute position. A token ahead of the next position waits in `early`; one behind it is a duplicate.
- Only events of the current attempt count; the caller drops the others.
- `Done` waits until nothing is missing before it: every earlier position, the prompt's scores when asked for, and
  (for a moment) prefill's report.

What was emitted is the state: `tokens` is the prompt and everything delivered, and any pair of workers continues from
it. The phases and their transitions are the table `TRANSITIONS`, drawn in docs/states.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from contracts.errors import ErrorKind, IllegalTransition
from contracts.ids import RequestId, Role, RoomId
from contracts.messages.worker_events import Done, LegReport, Tokens
from contracts.sampling_params import SamplingParams, TokenLogprob
from router.state.worker_table import WorkerKey


class AttemptCost(StrEnum):
    """What an attempt that failed costs its request."""

    REPLAY = "replay"
    """One replay of `router.replay_limit`."""
    REFUSAL = "refusal"
    """One refusal; there is a limit to those as well."""
    FREE = "free"
    """Nothing: the attempt has brought it on."""


@dataclass(frozen=True, slots=True)
class AttemptLeg:
    """Who emits a request's tokens from absolute position `base` on, until the next one begins."""

    attempt: int
    base: int
    workers: Mapping[Role, str]
    first: Role = Role.PREFILL
    """Who draws the token at `base`; all others are decode's."""

    def role_at(self, position: int) -> Role:
        return self.first if position == self.base else Role.DECODE


class RoutingPhase(StrEnum):
    WAITING = "waiting"
    """For workers of both roles, or for its back-off to end."""
    RUNNING = "running"
    ENDED = "ended"


TRANSITIONS: dict[tuple[RoutingPhase, str], RoutingPhase] = {
    (RoutingPhase.WAITING, "place"): RoutingPhase.RUNNING,
    (RoutingPhase.RUNNING, "replay"): RoutingPhase.WAITING,
    (RoutingPhase.WAITING, "end"): RoutingPhase.ENDED,
    (RoutingPhase.RUNNING, "end"): RoutingPhase.ENDED,
}


class RoutedRequest:
    """State of one choice; the router core alone changes it. Times are seconds of the router core's clock."""

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
        "early",
        "emitted",
        "first_placed",
        "hashes",
        "id",
        "last_attempt",
        "legs",
        "migrations",
        "nonfinite",
        "not_before",
        "numerics",
        "phase",
        "prefill",
        "prefill_loaded",
        "prefill_lost",
        "priority",
        "progress",
        "prompt",
        "refusals",
        "replays",
        "reported",
        "room",
        "salt",
        "sampling",
        "scores_in",
        "spoiled",
        "waiting_since",
        "workers",
    )

    def __init__(
        self,
        request_id: RequestId,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        now: float,
        deadline: float,
        hashes: tuple[bytes, ...] = (),
        salt: str = "",
        priority: int = 0,
    ) -> None:
        self.id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.hashes = hashes
        self.salt = salt
        self.priority = priority
        self.arrived = self.waiting_since = now
        self.deadline = deadline
        self.not_before = now
        self.first_placed: float | None = None
        self.phase = RoutingPhase.WAITING
        self.emitted: list[int] = []
        self.attempt = self.last_attempt = 0
        self.replays = 0
        self.refusals = 0
        self.nonfinite = 0
        """How often a worker's logits for it were no numbers."""
        self.migrations = 0
        """How often another decode worker went on with it."""
        self.avoid: dict[WorkerKey, float] = {}
        """Workers at fault, until when they are not chosen."""
        self.spoiled: set[tuple[WorkerKey, WorkerKey]] = set()
        """Pairs of workers between which a hand-over of it has failed."""
        self.numerics = ""
        """The numerics class of the workers that have the request. All that follows the first token that was told is
        computed in the same class, whatever fails. Empty where any will do."""
        self.scores_in = sampling.prompt_logprobs is None
        self.progress: list[LegReport] = []
        """Every report of every attempt, in order of arrival."""
        self.workers: dict[Role, str] = {}
        """Who serves, or served last, each leg."""
        self.legs: list[AttemptLeg] = []
        """Every attempt that was placed, and every migration to another decode worker, in order."""
        self._clear_attempt()

    def _clear_attempt(self) -> None:
        self.room: RoomId | None = None
        self.prefill: WorkerKey | None = None
        self.decode: WorkerKey | None = None
        self.prefill_loaded = 0
        self.prefill_lost = False
        self.decode_spoke = False
        self.reported = False
        self.base = len(self.prompt) + len(self.emitted)
        self.early: dict[int, tuple[int, TokenLogprob | None]] = {}
        self.done: tuple[Role, Done] | None = None
        self.done_at = 0.0

    def step(self, name: str) -> None:
        """Raises `IllegalTransition`, with nothing changed, for a transition that is not in the table."""
        target = TRANSITIONS.get((self.phase, name))
        if target is None:
            raise IllegalTransition(f"request {self.id}: no transition {name!r} from {self.phase}")
        if name == "replay":
            self._clear_attempt()
            self.attempt = self.next_attempt()
        self.phase = target

    def next_attempt(self) -> int:
        """The number of a new attempt, which no worker has seen with this request: events of an earlier one, also of a
        migration that failed, can't be taken for its own."""
        self.last_attempt += 1
        return self.last_attempt

    def computed_by(self, numerics: str) -> None:
        """A worker of this numerics class begins an attempt. Once a token was told, only one of the same class may."""
        assert self.numerics == numerics or not self.told, "an answer stays in its numerics class"
        self.numerics = numerics

    @property
    def told(self) -> bool:
        """Whether anything of its answer has been told."""
        return bool(self.emitted) or (self.scores_in and self.sampling.prompt_logprobs is not None)

    def learn(self, kind: ErrorKind) -> None:
        """An attempt has failed so: keep what the next ones are to do otherwise."""
        if kind is ErrorKind.NONFINITE:
            # State that is kept under the same tokens, on any tier, may be what was wrong. With a salt of its own the
            # request is computed from its tokens alone.
            self.nonfinite += 1
            self.salt, self.hashes = f"{self.salt}|recomputed {self.id} {self.nonfinite}", ()
        if kind is ErrorKind.ROOM and self.prefill and self.decode:
            self.spoiled.add((self.prefill, self.decode))

    def charge(self, cost: AttemptCost) -> None:
        """Book what a failed attempt costs."""
        self.replays += cost is AttemptCost.REPLAY
        self.refusals += cost is AttemptCost.REFUSAL

    @property
    def starts(self) -> int:
        """How often it was begun from its tokens."""
        return 1 + self.replays + self.refusals

    def hand_over(self, worker: WorkerKey, name: str, attempt: int, room: RoomId) -> None:
        """Another decode worker goes on with it from where it is; the books of both are the caller's."""
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
        """The end that the emitted tokens themselves prove, if they do: a stop token, or the last position."""
        if self.emitted and self.emitted[-1] in self.sampling.stop_token_ids:
            return Done(self.id, self.attempt, "stop", stop_token=self.emitted[-1])
        if self.emitted and len(self.emitted) >= self.sampling.max_tokens:
            return Done(self.id, self.attempt, "length")
        return None

    def accept(self, event: Tokens, role: Role) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """Take tokens of the current attempt in; returns those that are now in order, with their log-probs."""
        if role is Role.DECODE:
            self.decode_spoke = True
        at = event.position
        if at == self.next_position and not self.early and self.scores_in and at + len(event.tokens) <= self.max_len:
            self.emitted.extend(event.tokens)
            return event.tokens, event.logprobs
        logprobs: Sequence[TokenLogprob | None] = event.logprobs or (None,) * len(event.tokens)
        for offset, (token, logprob) in enumerate(zip(event.tokens, logprobs, strict=True)):
            position = at + offset
            if self.next_position <= position < self.max_len:
                self.early.setdefault(position, (token, logprob))
        return self.release_early()

    def release_early(self) -> tuple[Sequence[int], Sequence[TokenLogprob]]:
        """Tokens that waited and are in order now."""
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
        self.emitted.extend(tokens)
        return tokens, logprobs

    @property
    def outlives_prefill(self) -> bool:
        """Whether prefill's work is done: its token and scores are here, and decode runs on what it sent."""
        return self.scores_in and self.next_position > self.base and self.decode_spoke

    @property
    def complete(self) -> bool:
        """Nothing is missing before the `Done` that has arrived. Decode's end needs the first token, prefill's own."""
        if self.done is None or self.early or not self.scores_in:
            return False
        return self.done[0] is Role.PREFILL or self.next_position > self.base

    def contradiction(self) -> str | None:
        """Why the `Done` that has arrived can't be true of the tokens that were emitted; None when it can."""
        assert self.done is not None
        done, last = self.done[1], self.emitted[-1] if self.emitted else None
        if done.reason == "length" and len(self.emitted) == self.sampling.max_tokens:
            return None
        if done.reason == "stop" and last is not None and last in self.sampling.stop_token_ids:
            return None
        return f"ended with reason {done.reason!r} after {len(self.emitted)} of {self.sampling.max_tokens} tokens"
