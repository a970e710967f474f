"""A trace replayed in phases of different rates and lengths against a real cluster, and what its pools did meanwhile.

The client is that of `twinpool replay`. Each round of the trace has content of its own, so that nothing of an earlier
round is in a cache; within a round equal parts of prompts are as the trace has them. The same asks are made of every
cluster, and answers keep their tokens, so that what two clusters answered can be compared. `PoolWatch` looks at the
status that the cluster's router shows of the controller's table.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.common.load_client import greedy_completion
from twinpool.cli.load.open_loop import Ask, Content, OpenLoop, asks_of
from twinpool.cli.load.openai_client import Endpoint, EndpointError, Outcome, stream
from twinpool.contracts.ids import PAIR, Role
from twinpool.sim.scale.traffic import TraceLine

SAME_S = 2.5
"""Two looks tell of one decision at times that differ by less: its age is told in the router's next report."""
UNREACHABLE = "unreachable"
"""Of a worker that the router couldn't ask in time: it is where it was."""
HERE = ("starting", "ready", "draining", UNREACHABLE)


class PoolWatch:
    """The pools of one run, look by look. Times are seconds since the run began."""

    def __init__(self, until_s: float = float("inf")) -> None:
        """`until_s`: when workers' seconds are no longer counted."""
        self._until_s = until_s
        self._last: tuple[float, int] | None = None
        self.worker_s = 0.0
        """Seconds of all workers, from their starts to their ends, drains included."""
        self.sizes: list[tuple[float, int, int]] = []
        """When, and the ready workers of both pools, whenever these changed."""
        self.wanted: list[tuple[float, int, int]] = []
        """When, and the sizes that the autoscaler is after, whenever these changed."""
        self.decisions: list[tuple[float, str]] = []
        self.counters: dict[str, int] = {}
        """How often the autoscaler has decided what."""
        self.ends: set[str] = set()
        """Why workers died; nobody should."""
        self.drain_s: dict[str, float] = {}
        """How long workers drained, by name; one that drained twice has the sum."""
        self._draining: dict[str, float] = {}

    def take(self, at_s: float, status: Mapping[str, Any]) -> None:
        """Take in a look: the answer of ``GET /cluster/status``."""
        rows = status["workers"]
        here = sum(row["state"] in HERE and not row["waits"] for row in rows)
        if self._last is not None:
            before, count = self._last
            self.worker_s += count * max(0.0, min(at_s, self._until_s) - min(before, self._until_s))
        self._last = at_s, here
        ready = Counter(row["role"] for row in rows if row["state"] == "ready")
        if not any(row["state"] == UNREACHABLE for row in rows):
            _changed(self.sizes, (at_s, ready[Role.PREFILL], ready[Role.DECODE]))
        self.ends |= {f"{row['name']}: {row['last_end']}" for row in rows if row["last_end"]}
        drains = {str(row["name"]) for row in rows if row["state"] == "draining"}
        unknown = {str(row["name"]) for row in rows if row["state"] == UNREACHABLE}
        for name in drains - set(self._draining):
            self._draining[name] = at_s
        for name in set(self._draining) - drains - unknown:
            self.drain_s[name] = self.drain_s.get(name, 0.0) + at_s - self._draining.pop(name)
        if (scaler := status.get("autoscaler")) is not None:
            self._scaler(at_s, scaler)

    def _scaler(self, at_s: float, scaler: Mapping[str, Any]) -> None:
        sizes = {pool["role"]: pool["wanted"] for pool in scaler["pools"]}
        if sizes:
            _changed(self.wanted, (at_s, sizes[Role.PREFILL], sizes[Role.DECODE]))
        self.counters = dict(scaler["counters"])
        for one in reversed(scaler["decisions"]):
            at, text = at_s - one["ago_s"], one["text"]
            if not any(text == known and abs(at - when) < SAME_S for when, known in self.decisions):
                self.decisions.append((at, text))

    def steps(self, which: int) -> list[tuple[float, int]]:
        """When, and by how many workers, the wanted size of a pool (0: prefill) changed."""
        return _steps(self.wanted, which)

    def turns(self) -> list[float]:
        """Seconds between two changes of the ready workers of a pool of which one undid the other's direction."""
        changes = [itertools.pairwise(_steps(self.sizes, which)) for which in range(len(PAIR))]
        return [at - before for pool in changes for (before, a), (at, b) in pool if (a > 0) != (b > 0)]


def _steps(kept: Sequence[tuple[float, int, int]], which: int) -> list[tuple[float, int]]:
    sizes = [(at, pools[which]) for at, *pools in kept]
    return [(at, size - before) for (_, before), (at, size) in itertools.pairwise(sizes) if size != before]


def _changed(kept: list[tuple[float, int, int]], now: tuple[float, int, int]) -> None:
    if not kept or kept[-1][1:] != now[1:]:
        kept.append(now)


LOOK_S = 0.5
CONCURRENCY = 1024
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a run."""

    seconds: float
    rate: float
    """Times the trace's rate."""
    mix: float = 1.0
    """What answers' tokens are multiplied with, and prompts' divided by."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the trace's lengths are multiplied with, and the most tokens of a prompt with its answer."""

    prompts: float = 0.02
    answers: float = 0.1
    most: int = 512


def asks_in_phases(lines: Sequence[TraceLine], phases: Sequence[Phase], lengths: Lengths, seed: int = 1) -> list[Ask]:
    """The requests of all phases, in the order in which they are due."""
    asks, begin, seeds = list[Ask](), 0.0, itertools.count(seed)
    for phase in phases:
        asks += [replace(ask, at_s=begin + ask.at_s) for ask in _asks_of_phase(lines, phase, lengths, seeds)]
        begin += phase.seconds
    return asks


def _asks_of_phase(lines: Sequence[TraceLine], phase: Phase, lengths: Lengths, seeds: Iterator[int]) -> Iterator[Ask]:
    scale = lengths.prompts / phase.mix
    answers = lengths.answers * phase.mix / scale  # `asks_of` multiplies both lengths with `scale`.
    scaled = [replace(line, output_length=max(1, round(line.output_length * answers))) for line in lines]
    # The next round begins where the next request would be due.
    round_s = (lines[-1].at_s - lines[0].at_s) * len(lines) / (len(lines) - 1) / phase.rate
    for number in itertools.count():
        if number * round_s >= phase.seconds:
            return
        for ask in asks_of(Content(next(seeds), 300, 2000), scaled, scale, phase.rate, lengths.most):
            if (at := number * round_s + ask.at_s) < phase.seconds:
                yield replace(ask, at_s=at)


def spread(lines: Sequence[TraceLine]) -> list[TraceLine]:
    """The lines with those that are due at one time spread evenly until the next one is: a trace whose times are
    rounded to seconds would else be of bursts that its users haven't made."""
    groups = [list(group) for _, group in itertools.groupby(lines, key=lambda line: line.at_s)]
    out = list[TraceLine]()
    for number, group in enumerate(groups):
        later = groups[number + 1 : number + 2]
        at = group[0].at_s
        seconds = later[0][0].at_s - at if later else at - groups[number - 1][0].at_s
        out += [replace(line, at_s=at + seconds * place / len(group)) for place, line in enumerate(group)]
    return out


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a run. `outcomes` are in the order of the asks."""

    outcomes: list[Outcome]
    watch: PoolWatch
    load: float
    """The machine's mean load meanwhile: processes that ran or would have."""


async def replay_phases(url: str, asks: Sequence[Ask], until_s: float) -> Replayed:
    """Make all asks of the cluster at `url` and follow their answers to the ends. Raises `EndpointError`.

    `until_s`: when the phases are over, by which workers' seconds are counted.
    """
    endpoint = Endpoint.parse(url)
    model = await endpoint.first_model()
    watch = PoolWatch(until_s)

    def encode(ask: Ask, number: int) -> bytes:
        more = {"stream_options": {"include_usage": True}, "return_token_ids": True}
        body = greedy_completion(model, ask.tokens, ask.output_tokens, **more)
        return endpoint.encode("/v1/completions", body)

    async def send(request: bytes, outcome: Outcome) -> Outcome:
        return await stream(endpoint, request, outcome, TIMEOUT_S)

    loop = OpenLoop(send, encode, CONCURRENCY)
    loads = list[float]()
    watching = asyncio.create_task(_look(endpoint, watch, loads, max(until_s, asks[-1].at_s)))
    try:
        await loop.run(asks, lambda outcome: None)
        await watching
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    return Replayed(loop.outcomes, watch, statistics.mean(loads))


async def _look(endpoint: Endpoint, watch: PoolWatch, loads: list[float], until_s: float) -> None:
    """Look at the cluster's status until the phases are over. A look that fails is left out: the next one has it."""
    clock = asyncio.get_running_loop()
    began = clock.time()
    while (at := clock.time() - began) < until_s:
        with contextlib.suppress(EndpointError):
            watch.take(at, await endpoint.ask("GET", "/cluster/status"))
        loads.append(os.getloadavg()[0])
        await asyncio.sleep(LOOK_S)
