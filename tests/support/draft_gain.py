"""What drafts gain: the same answers of a prefill and a decode worker, with drafts and without, in turns.

What is measured is decode's own time, by the clock that its policy has as well. So the side without drafts has no layer
for them in its pages, computes none, and is the worker that somebody has who never heard of drafts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.worker_pair import Pair, pair
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class DraftLoad:
    """So many streams at once, each of so many tokens."""

    streams: int
    temperature: float
    tokens: int

    def params(self, number: int) -> SamplingParams:
        return SamplingParams(max_tokens=self.tokens, temperature=self.temperature, seed=number)


@dataclass
class DraftGain:
    """What one load came to, by round: tokens a second of decode, without drafts and with them."""

    streams: int
    temperature: float
    without: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    tokens_per_step: float = 1.0
    """Of a stream, with drafts."""
    accepted: float = 0.0
    """The part of the drafts that was drawn."""
    equal: bool = True
    """Whether all tokens were those without."""

    @property
    def median(self) -> float:
        """Of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.without, self.drafted, strict=True))

    @property
    def best(self) -> float:
        """The ratio of each side's best round: what noise took least from."""
        return max(self.drafted) / max(self.without)


class Answered(NamedTuple):
    """What one round of one side came to."""

    tokens: list[list[int]]
    tokens_per_s: float
    drafts: float
    accepted: float


class ClockOf:
    """Implements `contracts.clock.Clock`."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now


class DraftedPair:
    """Both workers, and what decode's steps took."""

    def __init__(self, workers: Pair, now: Callable[[], float]) -> None:
        self._workers, self._now = workers, now

    def run(self, prompts: Sequence[Sequence[int]], load: DraftLoad) -> Answered:
        """All answers; `load.streams` of them run at a time, and the rate is of while so many did."""
        both, waiting = self._workers, list(enumerate(prompts))
        asked: list[RequestId] = []
        running: list[RequestId] = []
        spent, drawn, before = 0.0, 0, self.counters
        while waiting or running:
            running = [request for request in running if both.answers[request].done is None]
            while waiting and len(running) < load.streams:
                number, prompt = waiting.pop(0)
                running.append(both.submit(prompt, load.params(number)))
                asked.append(running[-1])
            both.step(Role.PREFILL)
            began = self._now()
            both.step(Role.DECODE)
            if waiting or len(running) == load.streams:
                spent += self._now() - began
                drawn = sum(max(0, len(both.answers[request].tokens) - 1) for request in asked)
        made, accepted = (self.counters[name] - before[name] for name in ("tokens_drafted", "drafts_accepted"))
        return Answered([both.answers.pop(request).list for request in asked], drawn / spent, made, accepted)

    @property
    def counters(self) -> dict[str, float]:
        return dict(self._workers.decode.status().counters)


def measure(
    folder: Path,
    draft_model: str,
    loads: Sequence[DraftLoad],
    prompts: Callable[[int], Sequence[Sequence[int]]],
    rounds: int,
    clock: str = "cpu",
) -> Iterator[DraftGain]:
    """Yield what each load came to. `prompts`: so many new ones each time. Round 0 counts for nothing: it warms up, and
    shows the policy what steps cost."""
    now, rows = CLOCKS[clock], max(load.streams for load in loads)
    sides: list[dict[str, Any]] = [{"decode": {"speculation": "off"}}]
    sides += [{"engine": {"draft_model": draft_model}}]
    room = 2 * rows * (max(load.tokens for load in loads) + 96)
    with ExitStack() as stack:
        without, drafted = (
            DraftedPair(stack.enter_context(pair(folder, tokens=room, clock=ClockOf(now), **side)), now)
            for side in sides
        )
        for load in loads:
            found = DraftGain(load.streams, load.temperature)
            made = accepted = total = 0.0
            for number in range(rounds + 1):
                asked, answers = prompts(2 * load.streams), dict[DraftedPair, Answered]()
                for side in (without, drafted) if number % 2 else (drafted, without):
                    answers[side] = side.run(asked, load)
                found.equal &= answers[without].tokens == answers[drafted].tokens
                if number:
                    found.without.append(answers[without].tokens_per_s)
                    found.drafted.append(answers[drafted].tokens_per_s)
                    made, accepted = made + answers[drafted].drafts, accepted + answers[drafted].accepted
                    total += sum(len(tokens) - 1 for tokens in answers[drafted].tokens)
            found.tokens_per_step = total / (total - accepted)
            found.accepted = accepted / made if made else 0.0
            yield found
