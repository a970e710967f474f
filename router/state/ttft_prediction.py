"""The prefill queue of one worker, as its router knows it: prompts that it has yet to compute, and how fast it was.

Computing `n` tokens that the worker's cache doesn't have takes about `a + b n` seconds of it. Both are fitted, by least
squares that forget, to the seconds in which the worker had work before each prompt was done; a step that computes many
prompts shows in `a`. Nothing is told of a cost that wasn't seen: where all prompts were of one size, `b` is 0.

Prompts of one tenant come in order; what other tenants have waiting comes as their shares say. The router knows what it
sent itself: prompts of other routers show as slower steps, and in the caution that it learns.

Times are seconds of the router core's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from twinpool.contracts.ids import RequestId


class TenantWeight(NamedTuple):
    """Whose a request is. Requests of one tenant are served in order; tenants in proportion to their weights."""

    tenant: str = ""
    """Empty: nobody's, where nobody needs a key."""
    weight: int = 1


NO_TENANT = TenantWeight()


REMEMBERED = 0.98
"""Weight of a prompt after the next one: about the last fifty count."""
MIN_SPREAD = 0.05
"""Variance of sizes, over the square of their mean, above which `b` is fitted."""
MIN_PROMPTS = 3.0
"""Weight of the prompts that were seen below which nothing is predicted."""
ON_TIME = 0.9
"""Share of first tokens that come no later than predicted: predictions become more cautious while fewer do."""
CAUTION = (0.5, 3.0)
"""The least and the most that a prediction is multiplied with."""
CAUTION_STEP = 0.1
MEASURED_S = 30.0
"""Seconds for which what was measured of a worker's prompts tells what its next one would take."""
MAX_TIMES = 2.0
"""What was measured of prompts that are all of one size tells of those up to so many times as long."""
JUDGED_AT_ONCE = 256
"""Refusals whose truth is looked into at a time; the oldest are left out of the count beyond it."""


class PromptCost:
    """The fit of seconds to prompts' sizes in tokens."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """Take in that a prompt was done after so many seconds of work."""
        keep = REMEMBERED
        self._n = self._n * keep + 1
        self._x = self._x * keep + tokens
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + tokens * tokens
        self._xy = self._xy * keep + tokens * seconds

    def fit(self) -> tuple[float, float] | None:
        """Return the seconds of a prompt and of a token of it; None before `MIN_PROMPTS` were seen."""
        if self._n < MIN_PROMPTS:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._spread
        if spread <= MIN_SPREAD * mean_x * mean_x:
            return mean_y, 0.0
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread)
        if slope * mean_x > mean_y:
            return 0.0, mean_y / mean_x  # A prompt can't take less than no time.
        return mean_y - slope * mean_x, slope

    def seconds(self, tokens: int) -> float | None:
        """Return the seconds of a prompt of `tokens`; None before `MIN_PROMPTS` were seen."""
        fit = self.fit()
        return fit[0] + fit[1] * tokens if fit is not None else None

    def covers(self, tokens: int) -> bool:
        """Whether prompts were seen that tell of one of `tokens`."""
        if self._n < MIN_PROMPTS:
            return False
        mean = self._x / self._n
        return tokens <= MAX_TIMES * mean or self._spread > MIN_SPREAD * mean * mean

    @property
    def _spread(self) -> float:
        """The variance of sizes."""
        mean = self._x / self._n
        return self._xx / self._n - mean * mean


@dataclass(slots=True)
class WaitingPrompt:
    """A prompt that waits, the `number`-th that came."""

    number: int
    tokens: int
    priority: int
    whose: TenantWeight


@dataclass(slots=True)
class RefusedPrompt:
    """A prompt that was refused: would its first token have come in time?"""

    number: int
    """Prompts that came before it have lower numbers."""
    priority: int
    before: int
    """How many prompts that would have come first aren't done."""
    tenant: str
    up_to: dict[str, int]
    """The number of the last prompt of another tenant, of its priority, that would have come first."""
    own_s: float
    """Seconds from the end of those to its own first token."""
    due: float

    def after(self, prompt: WaitingPrompt) -> bool:
        """Whether `prompt` would have come first."""
        if prompt.number >= self.number or prompt.priority < self.priority:
            return False
        tenant = prompt.whose.tenant
        first = prompt.priority > self.priority or tenant == self.tenant
        return first or prompt.number <= self.up_to.get(tenant, -1)


@dataclass(frozen=True, slots=True)
class QueueAhead:
    """What is ahead of one prompt on a worker, in seconds."""

    in_order: list[tuple[WaitingPrompt, float]]
    """Prompts that come first, whatever the shares: of a higher priority, or of the tenant's own."""
    others: list[tuple[WaitingPrompt, float]]
    """Prompts of other tenants, of its priority."""
    weight: int

    def beside(self, seconds: float) -> float:
        """Seconds for what its tenant needs `seconds` for, with what others get meanwhile (generalized processor
        sharing, Parekh and Gallager 1993)."""
        waiting: dict[TenantWeight, float] = {}
        for prompt, cost in self.others:
            waiting[prompt.whose] = waiting.get(prompt.whose, 0.0) + cost
        return seconds + sum(min(cost, seconds * whose.weight / self.weight) for whose, cost in waiting.items())

    def done_before(self, seconds: float) -> dict[str, tuple[int, int, float]]:
        """Of the others' prompts those that are done when its tenant has had `seconds`: by tenant the number of the
        last, how many, and their seconds."""
        done: dict[str, tuple[int, int, float]] = {}
        over: set[str] = set()
        for prompt, cost in self.others:
            tenant, weight = prompt.whose
            _, count, before = done.get(tenant, (-1, 0, 0.0))
            if tenant in over or before + cost > seconds * weight / self.weight:
                over.add(tenant)
            else:
                done[tenant] = prompt.number, count + 1, before + cost
        return done


@dataclass(frozen=True, slots=True)
class TtftPrediction:
    """Seconds to a first token. `share`: the prompt has a share of each step with other short ones, rather than its
    turn."""

    seconds: float
    share: bool


class PrefillQueue:
    """The prompts that one worker has yet to compute.

    `short_share`: the part of each step that goes to prompts shorter than the oldest (`prefill.short_share`).
    """

    def __init__(self, short_share: float = 0.0) -> None:
        self._short_share = short_share
        self._waiting: dict[RequestId, WaitingPrompt] = {}
        """In order of arrival."""
        self._came = 0
        self._cost = PromptCost()
        self._worked_s = 0.0
        """Seconds of work since a prompt was done last."""
        self._at = 0.0
        self._measured_at = float("-inf")
        """When a prompt was done last."""
        self._caution = {share: 1.0 for share in (False, True)}
        """What predictions are multiplied with, by `TtftPrediction.share`."""
        self._refused: deque[RefusedPrompt] = deque(maxlen=JUDGED_AT_ONCE)
        self._owed_s = 0.0
        """Seconds of work of falsely refused prompts that the worker would not have come to yet."""
        self._false_refusals = 0

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._waiting)

    def add(self, request: RequestId, tokens: int, priority: int, now: float, whose: TenantWeight = NO_TENANT) -> None:
        """Add a prompt that was sent to the worker."""
        self._work(now)
        self._waiting[request] = WaitingPrompt(self._came, tokens, priority, whose)
        self._came += 1

    def computed(self, request: RequestId, now: float) -> None:
        """Take out a prompt that has been computed. Idempotent."""
        if (prompt := self._waiting.get(request)) is not None:
            self._work(now)
            self._cost.saw(prompt.tokens, self._worked_s)
            self._worked_s, self._measured_at = 0.0, now
            self.remove(request, now)

    def remove(self, request: RequestId, now: float) -> None:
        """Take out a prompt that won't be computed here. Idempotent."""
        if request not in self._waiting:
            return
        self._work(now)
        gone = self._waiting.pop(request)
        if not self._waiting:
            self._worked_s = 0.0
        for refused in self._refused:
            refused.before -= refused.after(gone)
        self._judge(now)

    @property
    def first_worked(self) -> tuple[int, float]:
        """The tokens of the prompt that is computed now, 0 where none is, and since when it is, as far as is known: the
        rate times that long are about its tokens that are done."""
        if not self._waiting:
            return 0, 0.0
        return next(iter(self._waiting.values())).tokens, self._at - self._worked_s

    def _work(self, now: float) -> None:
        if self._waiting:
            self._worked_s += now - self._at
        else:
            self._owed_s = max(0.0, self._owed_s - (now - self._at))
        self._at = now

    # ------------------------------------------------------------ prediction

    @property
    def cost(self) -> tuple[float, float] | None:
        """The measured seconds of a prompt and of a token of it; None where too little was seen."""
        return self._cost.fit()

    def measured(self, tokens: int, now: float) -> bool:
        """Whether prompts were measured lately that tell of one of `tokens`."""
        return now - self._measured_at <= MEASURED_S and self._cost.covers(tokens)

    def expect(self, tokens: int, priority: int, now: float, whose: TenantWeight = NO_TENANT) -> float | None:
        """Return the seconds to a prompt's first token as `predict` does, but without its caution: what is as often
        less as more, to be compared with other workers'."""
        predicted = self._predict(tokens, priority, now, whose, {False: 1.0, True: 1.0})
        return predicted.seconds if predicted is not None else None

    def predict(self, tokens: int, priority: int, now: float, whose: TenantWeight = NO_TENANT) -> TtftPrediction | None:
        """Return when a prompt's first token would come, were it sent now; None where too little was seen.

        The prompts that come first are those of a higher priority and, of the same one, the tenant's own; other tenants
        have their shares meanwhile. A shorter one than the first of them has a share of each step with other short
        ones, if that is quicker.
        """
        return self._predict(tokens, priority, now, whose, self._caution)

    def _predict(
        self, tokens: int, priority: int, now: float, whose: TenantWeight, caution: Mapping[bool, float]
    ) -> TtftPrediction | None:
        fit = self._cost.fit()
        if fit is None:
            return None
        own = fit[0] + fit[1] * tokens
        ahead = self._ahead(fit, priority, whose, now)
        if not ahead.in_order:
            return TtftPrediction(caution[False] * ahead.beside(own), False)
        urgent = sum(cost for one, cost in ahead.in_order if one.priority > priority)
        mine = sum(cost for one, cost in ahead.in_order if one.priority == priority)
        in_turn = caution[False] * (urgent + ahead.beside(mine + own))
        if self._short_share and tokens < ahead.in_order[0][0].tokens:
            short = sum(fit[0] + fit[1] * one.tokens for one, _ in ahead.in_order if one.tokens <= tokens)
            shared = caution[True] * ahead.beside((short + own) / self._short_share)
            if shared < in_turn:
                return TtftPrediction(shared, True)
        return TtftPrediction(in_turn, False)

    def _ahead(self, fit: tuple[float, float], priority: int, whose: TenantWeight, now: float) -> QueueAhead:
        """What is ahead of a prompt of `whose`, were it sent now, less what is done of the first of all."""
        self._work(now)
        ahead, done = QueueAhead([], [], whose.weight), self._worked_s
        for one in self._waiting.values():
            if one.priority >= priority:
                cost, done = max(0.0, fit[0] + fit[1] * one.tokens - done), 0.0
                in_order = one.priority > priority or one.whose.tenant == whose.tenant
                (ahead.in_order if in_order else ahead.others).append((one, cost))
        return ahead

    def came(self, predicted: TtftPrediction, seconds: float) -> None:
        """Learn from a first token that was predicted: a step towards the caution with which `ON_TIME` of them aren't
        late (stochastic approximation of a quantile, Robbins and Monro 1951)."""
        step = CAUTION_STEP * (ON_TIME if seconds > predicted.seconds else ON_TIME - 1)
        caution = self._caution[predicted.share] * (1 + step)
        self._caution[predicted.share] = min(max(caution, CAUTION[0]), CAUTION[1])

    # ------------------------------------------------------------ refusals

    def refused(self, tokens: int, priority: int, now: float, due: float, whose: TenantWeight = NO_TENANT) -> None:
        """Note that a prompt is refused, whose first token was due at `due`."""
        fit = self._cost.fit()
        assert fit is not None, "only a prediction refuses"
        own, ahead = fit[0] + fit[1] * tokens, self._ahead(fit, priority, whose, now)
        mine = sum(cost for one, cost in ahead.in_order if one.priority == priority)
        done = ahead.done_before(mine + own)
        before = len(ahead.in_order) + sum(count for _, count, _ in done.values())
        last_s = ahead.beside(mine + own) - mine - sum(seconds for *_, seconds in done.values())
        up_to = {tenant: number for tenant, (number, *_) in done.items()}
        self._refused.append(RefusedPrompt(self._came, priority, before, whose.tenant, up_to, last_s, due))
        self._judge(now)

    @property
    def judges(self) -> bool:
        """Whether `take_false_refusals` may have any."""
        return bool(self._refused or self._false_refusals)

    def take_false_refusals(self, now: float) -> int:
        """Return how many more refused prompts are known to have been refused for nothing."""
        if not self.judges:
            return 0
        self._work(now)
        self._judge(now)
        found, self._false_refusals = self._false_refusals, 0
        return found

    def _judge(self, now: float) -> None:
        """Count the refused prompts for which the worker would have had the time, by what it has done since: all before
        them are done, and their own would be in time, also after those that were refused falsely before. The others are
        forgotten once they were due."""
        open_: list[RefusedPrompt] = []
        for prompt in self._refused:
            if now + self._owed_s + prompt.own_s > prompt.due:
                continue
            if prompt.before:
                open_.append(prompt)
            else:
                self._false_refusals += 1
                self._owed_s += prompt.own_s
        self._refused = deque(open_, maxlen=JUDGED_AT_ONCE)
