"""The router's counts of tokens, latencies and ends of its own requests: plain arithmetic on the event loop."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.router_commands import BACKGROUND
from twinpool.contracts.messages.router_report import BOUNDS_S, LatencyShape
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.router.anthropic.messages_request import IGNORED as ANTHROPICS
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.request_fields import IGNORED

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
"""Bounds for numbers of tokens: each is four times the one before, so that few of them reach every context."""


class HistogramTally:
    """A histogram; a bucket includes its upper bound."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; `observe` and, for what comes with each token, `RequestTally.tokens` count."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def family(self, name: str, text: str, labels: dict[str, str] | None = None) -> HistogramMetricFamily:
        """Return the histogram as a family of one sample with `labels`."""
        total = 0
        buckets = []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        labels = labels or {}
        family = HistogramMetricFamily(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self.sum)
        return family


MAX_UNANSWERED = 4096
"""Choices without a first token whose reports are waited for."""
FINISH_REASONS = ("stop", "length", "error")
TIERS = ("device", "host", "storage")


class TargetTally:
    """Counts of first tokens and later deliveries, and of those that missed the autoscaler's targets."""

    __slots__ = ("_first_s", "first_late", "first_tokens", "gap_s", "gaps", "gaps_late")

    def __init__(self, first_s: float = math.inf, gap_s: float = math.inf) -> None:
        self._first_s, self.gap_s = first_s, gap_s
        self.first_tokens = self.first_late = self.gaps = self.gaps_late = 0

    def first_token(self, seconds: float) -> None:
        self.first_tokens += 1
        self.first_late += seconds > self._first_s


class RequestTally:
    """The counts of one router. A choice whose prompt was computed twice, after a replay, counts in the tokens of
    prompts that were looked up twice, and in all else once."""

    def __init__(self) -> None:
        self.computed: Counter[tuple[str, str]] = Counter()
        """Prompt tokens whose state a worker computed, by its name and role."""
        self.cached: Counter[str] = Counter(dict.fromkeys(TIERS, 0))
        """Prompt tokens that a prefill worker's cache had, by tier."""
        self.looked_up = 0
        """Prompt tokens that were looked for in prefill workers' caches."""
        self.transfer_bytes = 0
        self.prompt_tokens = 0
        self._unanswered: OrderedDict[RequestId, None] = OrderedDict()
        """Choices that ended before their first token, whose workers are still to report: the latest."""
        self.generated_tokens = 0
        self.answers: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        """Choices that ended, by why."""
        self.ignored: Counter[str] = Counter()
        """Fields of bodies that had no effect, by name."""
        self.target = TargetTally()
        self.first_token_shape, self.gap_shape, self.output_token_shape = (LatencyShape() for _ in range(3))
        """The times of `ttft`, `itl` and `tpot` in finer buckets, for percentiles of the latest seconds."""
        self.ttft, self.itl, self.duration = map(HistogramTally, (TTFT_BUCKETS_S, ITL_BUCKETS_S, E2E_BUCKETS_S))
        self.tpot = HistogramTally(ITL_BUCKETS_S)
        self.queue, self.prefill = HistogramTally(TTFT_BUCKETS_S), HistogramTally(TTFT_BUCKETS_S)
        self.inference, self.decode = HistogramTally(E2E_BUCKETS_S), HistogramTally(E2E_BUCKETS_S)
        self.prompt_length, self.answer_length = HistogramTally(TOKEN_BUCKETS), HistogramTally(TOKEN_BUCKETS)

    def ignore(self, fields: Sequence[str]) -> None:
        """Count the fields of a body that had no effect; those that nobody knows are one."""
        for field in fields:
            self.ignored[field if field in IGNORED or field in ANTHROPICS else "unknown"] += 1

    def report(self, event: LegReport) -> None:
        """Count what a leg reports, whether or not its request still runs."""
        self.computed[event.worker, event.role] += event.computed_tokens
        if event.role is Role.PREFILL and event.request_id in self._unanswered:
            del self._unanswered[event.request_id]
            self.prompt_tokens += event.computed_tokens + event.cached_tokens
        if event.role is Role.PREFILL:
            self.looked_up += event.computed_tokens + event.cached_tokens
            by_tier = event.cached_by_tier or {"device": event.cached_tokens}
            for tier in TIERS:
                self.cached[tier] += by_tier.get(tier, 0)
        else:
            self.transfer_bytes += event.transfer_bytes

    def tokens(self, choice: ChoiceOutput, count: int, now: float) -> None:
        """Count tokens delivered to a choice at `now`, and set its `first_at`, `first_count` and `last_at`.

        The inter-token histogram gets one value a delivery, however many tokens that has. What is background waits by
        design: its times are in none.
        """
        self.generated_tokens += count
        if choice.request.priority <= BACKGROUND:
            if not choice.first_at:
                choice.first_at, choice.first_count = now, count
                self.prompt_tokens += len(choice.request.prompt)
            choice.last_at = now
            return
        if choice.first_at:
            gap_s, itl, target = now - choice.last_at, self.itl, self.target
            itl.counts[bisect_left(ITL_BUCKETS_S, gap_s)] += 1
            itl.sum += gap_s
            target.gaps += 1
            target.gaps_late += gap_s > target.gap_s
            self.gap_shape.counts[bisect_left(BOUNDS_S, gap_s)] += 1
        else:
            choice.first_at, choice.first_count = now, count
            first_s = now - choice.request.arrived + choice.tokenise_s
            self.prompt_tokens += len(choice.request.prompt)
            self.ttft.observe(first_s)
            self.target.first_token(first_s)
            self.first_token_shape.observe(first_s)
        choice.last_at = now

    def unanswered(self, choice: ChoiceOutput) -> None:
        """Expect the report of a choice that is over without a first token, as its client left or it failed: what a
        worker did for its prompt counts, too."""
        self._unanswered[choice.request.id] = None
        if len(self._unanswered) > MAX_UNANSWERED:
            self._unanswered.popitem(last=False)

    def ended(self, choice: ChoiceOutput) -> None:
        """Count a choice's end and, unless that is an error, its times and lengths; its `ended_at` must be set."""
        request = choice.request
        if choice.error is not None:
            self.answers["error"] += 1
            return
        self.answers[choice.finish or "stop"] += 1
        if request.priority <= BACKGROUND:
            return
        self.duration.observe(choice.ended_at - request.arrived + choice.tokenise_s)
        self.prompt_length.observe(len(request.prompt))
        self.answer_length.observe(len(choice.tokens))
        # Drafts that count are delivered one right after the other, so that the time between two deliveries says little
        # of how quickly an answer grows. A resumed answer begins with all that was said before.
        if (later := len(choice.tokens) - choice.first_count) > 0:
            pace_s = (choice.last_at - choice.first_at) / later
            self.tpot.observe(pace_s)
            self.output_token_shape.observe(pace_s)
        begun = _begun(choice)
        if begun is not None and choice.first_at:
            self.queue.observe(begun - request.arrived)
            self.prefill.observe(max(0.0, choice.first_at - begun))
            self.inference.observe(max(0.0, choice.last_at - begun))
            self.decode.observe(choice.last_at - choice.first_at)


def _begun(choice: ChoiceOutput) -> float | None:
    """Return when a worker first took the choice's prompt out of its queue; None where none has said so."""
    request = choice.request
    for report in request.progress:
        if report.role is Role.PREFILL and "queue" in report.marks and request.first_placed is not None:
            return request.first_placed + report.marks["queue"]
    return None
