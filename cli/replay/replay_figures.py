"""From outcomes to figures: of a whole run, and of its last seconds while it goes on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from twinpool.cli.replay.openai_client import Outcome
from twinpool.sim.scale.cluster_plan import LatencyTarget

LATE_S = 0.02
"""A client's p99 of lateness beyond which its figures aren't the endpoint's alone."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles of one figure, in seconds; all 0 where nothing was measured."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latencies:
        values = np.fromiter(seconds, dtype=np.float64)
        if not len(values):
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(len(values), float(values.mean()), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """What a run came to. Latencies are of answers that ended well."""

    sent: int
    answered: int
    unfinished: int
    """Cut off by the end of the replay itself."""
    errors: dict[str, int]
    """Requests without a whole answer, by kind: a stream without [DONE], an error event, a status, no connection."""
    notes: dict[str, str]
    """The first message of each kind."""
    wrong: dict[str, int]
    """Answers that ended well with counts of tokens that aren't what was asked for, or with none."""
    wall_s: float
    ttft: Latencies
    """To the first token, from when the request could have gone out; waiting for a place counts."""
    itl: Latencies
    """Gaps between events that carry tokens."""
    tpot: Latencies
    """Times per output token: an answer's mean after its first token, by which `--slo` judges."""
    answer: Latencies
    held: Latencies
    """Seconds for which requests waited for a place, those that didn't among them."""
    late: Latencies
    """Seconds by which the client itself was late."""
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    good: int
    goodput: float
    """Answers a second that kept the target."""
    cached_share: float
    client_cores: float
    """The client's own processor time, in cores."""

    @property
    def client_ceiling(self) -> float:
        """Requests of this kind a second that the client could send on its core: measured processor time, not a
        guess, but nothing else may take that core."""
        return self.sent / (self.client_cores * self.wall_s) if self.client_cores and self.wall_s else 0.0

    @property
    def lagged(self) -> bool:
        """Whether the client was so late that its figures aren't the endpoint's alone."""
        return self.late.p99 > LATE_S

    @property
    def clean(self) -> bool:
        """Whether every answer came whole and right."""
        return not self.errors and not self.wrong

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"client_ceiling": self.client_ceiling, "client_lagged": self.lagged}


def ttft_of(outcome: Outcome) -> float:
    """Seconds to the first token, with those for which it waited for a place."""
    return outcome.ttft_s + outcome.held_s


def is_good(outcome: Outcome, target: LatencyTarget) -> bool:
    """Whether an answer came whole and kept the target."""
    if not outcome.ok or not outcome.arrivals_s:
        return False
    tpot = outcome.tpot_s
    return ttft_of(outcome) <= target.ttft_s and (tpot is None or tpot <= target.tpot_s)


def wrongness(outcome: Outcome, *, counts_prompts: bool, exact: bool) -> str:
    """What is wrong with the counts of an answer that ended well; empty where nothing is. `counts_prompts`: whether
    its prompt's tokens are known; `exact`: whether it had to be as long as asked for."""
    if outcome.completion_tokens is None:
        return "no usage"
    wanted, told = outcome.wanted_tokens, outcome.completion_tokens
    if told > wanted or (exact and told != wanted):
        return "answer's tokens differ"
    if counts_prompts and outcome.prompt_tokens != outcome.input_tokens:
        return "prompt's tokens differ"
    return ""


def figures_of(
    outcomes: Sequence[Outcome],
    target: LatencyTarget,
    wall_s: float,
    cpu_s: float,
    *,
    counts_prompts: bool,
    exact: bool,
) -> ReplayFigures:
    """Figures of a run that took `wall_s` seconds and `cpu_s` of this process's time."""
    ended = [outcome for outcome in outcomes if outcome.end_s]
    whole = [outcome for outcome in ended if outcome.ok]
    notes: dict[str, str] = {}
    for outcome in ended:
        if outcome.error is not None:
            notes.setdefault(outcome.error, outcome.note)
    judged = (wrongness(outcome, counts_prompts=counts_prompts, exact=exact) for outcome in whole)
    good = sum(is_good(outcome, target) for outcome in ended)
    inputs = sum(outcome.prompt_tokens or outcome.input_tokens for outcome in whole)
    wall = max(wall_s, 1e-9)
    return ReplayFigures(
        sent=len(outcomes),
        answered=len(whole),
        unfinished=len(outcomes) - len(ended),
        errors=dict(Counter(outcome.error for outcome in ended if outcome.error is not None).most_common()),
        notes=notes,
        wrong=dict(Counter(kind for kind in judged if kind).most_common()),
        wall_s=wall_s,
        ttft=Latencies.of(ttft_of(outcome) for outcome in whole),
        itl=Latencies.of(gap for outcome in whole for gap in outcome.gaps_s),
        tpot=Latencies.of(tpot for outcome in whole if (tpot := outcome.tpot_s) is not None),
        answer=Latencies.of(outcome.e2e_s + outcome.held_s for outcome in whole),
        held=Latencies.of(outcome.held_s for outcome in outcomes),
        late=Latencies.of(max(0.0, outcome.lag_s) for outcome in outcomes),
        requests_per_s=len(whole) / wall,
        output_tokens_per_s=sum(outcome.output_tokens for outcome in whole) / wall,
        input_tokens_per_s=inputs / wall,
        good=good,
        goodput=good / wall,
        cached_share=sum(outcome.cached_tokens for outcome in whole) / inputs if inputs else 0.0,
        client_cores=cpu_s / wall,
    )


class RecentFigures:
    """Figures of answers that ended in the last seconds, bounded in number."""

    MAX = 4096

    def __init__(self, target: LatencyTarget, seconds: float = 10.0) -> None:
        self._target, self.seconds = target, seconds
        self._ended: deque[tuple[float, Outcome]] = deque(maxlen=self.MAX)
        self.errors: Counter[str] = Counter()
        """By kind, since the start."""
        self.ended = self.good = 0

    def add(self, outcome: Outcome) -> None:
        self.ended += 1
        self.good += is_good(outcome, self._target)
        if outcome.error is not None:
            self.errors[outcome.error] += 1
        self._ended.append((outcome.end_s, outcome))

    def look(self, now: float) -> tuple[Latencies, Latencies, float]:
        """First tokens, gaps between tokens, and answers a second, of the last `seconds` before `now`."""
        while self._ended and self._ended[0][0] < now - self.seconds:
            self._ended.popleft()
        whole = [outcome for _, outcome in self._ended if outcome.ok]
        gaps = Latencies.of(gap for outcome in whole for gap in outcome.gaps_s)
        return Latencies.of(ttft_of(outcome) for outcome in whole), gaps, len(whole) / self.seconds
