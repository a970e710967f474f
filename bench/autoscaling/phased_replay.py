"""A trace replayed in phases of different rates and lengths against a real cluster, by the client of `twinpool replay`.

Each round of the trace has content of its own, so that nothing of an earlier round is in a cache; within a round equal
parts of prompts are as the trace has them. The same asks are made of every cluster, and answers keep their tokens, so
that what two clusters answered can be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.autoscaling.pool_watch import PoolWatch
from bench.common.workload import greedy_completion
from twinpool.cli.replay.open_loop import OpenLoop
from twinpool.cli.replay.openai_client import Endpoint, EndpointError, Outcome, stream
from twinpool.cli.replay.trace_prompts import Ask, Content, asks_of
from twinpool.sim.scale.traffic import TraceLine

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
