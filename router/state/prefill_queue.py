"""The prefill queue of one worker, as its router knows it: prompts that it has yet to compute, and how fast it was.

Computing `n` tokens that the worker's cache doesn't have takes about `a + b n` seconds of it. Both are fitted, by least
squares that forget, to the seconds in which the worker had work before each prompt was done; a step that computes many
prompts shows in `a`. Nothing is told of a cost that wasn't seen: where all prompts were of one size, `b` is 0.

Times are seconds of the router core's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from contracts.ids import RequestId

REMEMBERED = 0.98
"""Weight of a prompt after the next one: about the last fifty count."""
LEAST_SPREAD = 0.05
"""Variance of sizes, over the square of their mean, above which `b` is fitted."""
LEAST_PROMPTS = 3.0
"""Weight of the prompts that were seen below which nothing is predicted."""
ON_TIME = 0.9
"""Share of first tokens that come no later than predicted: predictions become more cautious while fewer do."""
CAUTION = (0.5, 3.0)
"""The least and the most that a prediction is multiplied with."""
CAUTION_STEP = 0.1
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
        """Return the seconds of a prompt and of a token of it; None before `LEAST_PROMPTS` were seen."""
        if self._n < LEAST_PROMPTS:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= LEAST_SPREAD * mean_x * mean_x:
            return mean_y, 0.0
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread)
        if slope * mean_x > mean_y:
            return 0.0, mean_y / mean_x  # A prompt can't take less than no time.
        return mean_y - slope * mean_x, slope


@dataclass(slots=True)
class RefusedPrompt:
    """A prompt that was refused: would its first token have come in time?"""

    behind: int
    """Tokens that the worker had been given, all in all, when the prompts before it are done."""
    own_s: float
    due: float


class PrefillQueue:
    """The prompts that one worker has yet to compute.

    `short_share`: the part of each step that goes to prompts shorter than the oldest (`prefill.short_share`).
    """

    def __init__(self, short_share: float = 0.0) -> None:
        self._short_share = short_share
        self._waiting: dict[RequestId, tuple[int, int]] = {}
        """Tokens to compute and priority of each, in order of arrival."""
        self._cost = PromptCost()
        self._worked_s = 0.0
        """Seconds of work since a prompt was done last."""
        self._at = 0.0
        self._left = 0
        """Tokens of all prompts that are no longer waiting."""
        self._caution = 1.0
        self._refused: deque[RefusedPrompt] = deque(maxlen=JUDGED_AT_ONCE)
        self._false_refusals = 0

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._waiting)

    def add(self, request: RequestId, tokens: int, priority: int, now: float) -> None:
        """Add a prompt that was sent to the worker."""
        self._work(now)
        self._waiting[request] = (tokens, priority)

    def computed(self, request: RequestId, now: float) -> None:
        """Take out a prompt that has been computed. Idempotent."""
        if request not in self._waiting:
            return
        self._work(now)
        tokens, _ = self._waiting.pop(request)
        self._cost.saw(tokens, self._worked_s)
        self._worked_s = 0.0
        self._left += tokens
        self._judge(now)

    def remove(self, request: RequestId, now: float) -> None:
        """Take out a prompt that won't be computed here. Idempotent."""
        if request not in self._waiting:
            return
        self._work(now)
        self._left += self._waiting.pop(request)[0]
        if not self._waiting:
            self._worked_s = 0.0
        self._judge(now)

    def _work(self, now: float) -> None:
        if self._waiting:
            self._worked_s += now - self._at
        self._at = now

    # ------------------------------------------------------------ prediction

    def predict(self, tokens: int, priority: int, now: float) -> float | None:
        """Return the seconds until a prompt's first token, were it sent now; None where too little was seen.

        The prompts that come first are those of no lower priority. A shorter one than the rest has a share of each step
        to itself and other short ones, if that is quicker.
        """
        fit = self._cost.fit()
        if fit is None:
            return None
        return self._caution * self._seconds(fit, tokens, priority, now)

    def _seconds(self, fit: tuple[float, float], tokens: int, priority: int, now: float) -> float:
        own = fit[0] + fit[1] * tokens
        before = [(n, fit[0] + fit[1] * n) for n, other in self._waiting.values() if other >= priority]
        if not before:
            return own
        self._work(now)
        under_way = min(self._worked_s, before[0][1])
        in_turn = sum(cost for _, cost in before) - under_way + own
        if tokens >= before[0][0] or not self._short_share:
            return in_turn
        among_short = sum(cost for n, cost in before if n <= tokens) + own
        return min(in_turn, among_short / self._short_share)

    def came(self, predicted_s: float, seconds: float) -> None:
        """Learn from a first token that was predicted: a step towards the caution with which `ON_TIME` of them aren't
        late (stochastic approximation of a quantile, Robbins and Monro 1951)."""
        step = CAUTION_STEP * (ON_TIME if seconds > predicted_s else ON_TIME - 1)
        self._caution = min(max(self._caution * (1 + step), CAUTION[0]), CAUTION[1])

    # ------------------------------------------------------------ refusals

    def refused(self, tokens: int, priority: int, now: float, due: float) -> None:
        """Note that a prompt is refused, whose first token was due at `due`."""
        fit = self._cost.fit()
        assert fit is not None, "only a prediction refuses"
        before = sum(n for n, other in self._waiting.values() if other >= priority)
        self._refused.append(RefusedPrompt(self._left + before, fit[0] + fit[1] * tokens, due))
        self._judge(now)

    def take_false_refusals(self, now: float) -> int:
        """Return how many more refused prompts are known to have been refused for nothing."""
        self._judge(now)
        found, self._false_refusals = self._false_refusals, 0
        return found

    def _judge(self, now: float) -> None:
        """Count the refused prompts for which the worker would have had time, by what it has done since: the prompts
        before them are done, and their own could be in time. The others are forgotten once they were due."""
        open_: list[RefusedPrompt] = []
        for prompt in self._refused:
            if now + prompt.own_s > prompt.due:
                continue
            if self._left >= prompt.behind or not self._waiting:
                self._false_refusals += 1
            else:
                open_.append(prompt)
        self._refused = deque(open_, maxlen=JUDGED_AT_ONCE)
