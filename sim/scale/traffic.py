"""The requests of a simulated cluster: a trace's own, or any number of them in a trace's shape, by seed.

Traces are as the Mooncake project publishes them, one JSON object a line, without any text: ``{"timestamp": ms,
"input_length": n, "output_length": n, "hash_ids": [one for each 512 tokens of the prompt]}``; equal ids are equal
content.

Arrivals that are drawn are a Poisson process whose rate bursts multiply. A request begins a conversation or is the next
turn of one whose client has thought for long enough; its prompt is then all that was said there. Prompts of new
conversations and answers are as long as those of the trace's lines; every conversation begins with one of few system
prompts. Requests are made one after the other, so memory is that of the conversations that are open.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from twinpool.contracts.errors import ConfigError
from twinpool.contracts.outside_data import read_json

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace. `at_s` is in the trace's own time."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """The first `limit` requests. Raises `ValueError` naming the file and line that is not a request."""
    lines = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(islice(file, limit), 1):
            try:
                line = _trace_line(read_json(text))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not a trace request: {error!r}") from None
            lines.append(line)
    if not lines:
        raise ValueError(f"{path} holds no requests")
    return lines


def _trace_line(raw: dict[str, Any]) -> TraceLine:
    line = TraceLine(raw["timestamp"] / 1000, raw["input_length"], raw["output_length"], tuple(raw["hash_ids"]))
    needed = -(-line.input_length // TRACE_BLOCK_TOKENS)
    if line.input_length < 1 or line.output_length < 1 or len(line.hash_ids) < needed:
        raise ValueError(f"{line.input_length} tokens in, {line.output_length} out, {len(line.hash_ids)} hash ids")
    return line


def scaled_lengths(line: TraceLine, scale: float, max_context: int | None) -> tuple[int, int]:
    """Tokens of a line's prompt and answer, multiplied by `scale`. To fit `max_context`, answers are cut to half of it
    and prompts to the rest."""
    output = max(1, round(line.output_length * scale))
    length = max(1, round(line.input_length * scale))
    if max_context is not None:
        output = min(output, max(1, max_context // 2))
        length = min(length, max_context - output)
    return length, output


CHAT_PROMPTS = (
    *(898, 974, 1202, 1865, 2180, 3013, 5029, 6056, 7285, 8469),
    *(9419, 10981, 12847, 14053, 16488, 17863, 21125, 26058, 36559, 82373),
)
"""Tokens of prompts where no trace is given: quantiles of `bench/traces/conversation_200.jsonl`."""
CHAT_ANSWERS = (6, 24, 48, 111, 181, 230, 265, 324, 351, 362, 387, 420, 444, 460, 490, 522, 550, 584, 615, 795)
"""And of answers."""
MAX_OPEN = 1 << 16
"""Conversations that rest at a time; beyond it the one that would go on first is forgotten."""
_MASK = 0xFFFF_FFFF_FFFF_FFFF


@dataclass(slots=True)
class SimRequest:
    """One request."""

    at_s: float
    prompt: int
    """Tokens."""
    answer: int
    """Tokens that its answer will have, which nobody knows."""
    most: int
    """Tokens that its answer may have, which everybody knows."""
    keys: list[int]
    """Keys of its full blocks: each names all before it."""
    session: str
    tenant: str = ""

    @property
    def raw(self) -> bytes:
        """The keys as the router has them."""
        return np.array(self.keys, np.uint64).tobytes()


@dataclass(frozen=True, slots=True)
class TrafficBurst:
    """A time in which requests come `factor` times as often."""

    at_s: float
    seconds: float
    factor: float


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Traffic that is drawn."""

    requests: int
    seconds: float
    """In which so many requests come, on average."""
    seed: int = 0
    prompts: tuple[int, ...] = CHAT_PROMPTS
    """Tokens of prompts that begin a conversation, any of them as likely."""
    answers: tuple[int, ...] = CHAT_ANSWERS
    answer_limit: int = 2048
    """Tokens that an answer may have; one that is longer may have as many as it has."""
    turns: float = 3.0
    """Requests of a conversation, on average."""
    think_s: float = 60.0
    """From an answer's request to its conversation's next, on average."""
    more_tokens: int = 600
    """What a client adds to a conversation in a turn, on average."""
    max_tokens: int = 131_072
    """A conversation that is longer has no further turn."""
    systems: int = 16
    """Different beginnings of conversations."""
    system_tokens: int = 512
    tenants: int = 0
    """Tenants among whom conversations are divided; 0: none."""
    bursts: tuple[TrafficBurst, ...] = ()
    block_tokens: int = TRACE_BLOCK_TOKENS

    def __post_init__(self) -> None:
        """Raises `ConfigError` for what can't be drawn."""
        for name, least in (("requests", 1), ("systems", 1), ("tenants", 0), ("system_tokens", 0), ("turns", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"traffic needs {name} of {least} or more, got {getattr(self, name)}")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"traffic needs a time above 0 seconds, got {self.seconds}")
        if min(self.prompts, default=0) < 1 or min(self.answers, default=0) < 1:
            raise ConfigError("traffic needs lengths of prompts and answers, each of 1 token or more")
        if any(burst.factor <= 0 or burst.seconds <= 0 for burst in self.bursts):
            raise ConfigError("a burst's factor and its seconds must be above 0")


def shape_of(lines: Sequence[TraceLine], requests: int, seconds: float, seed: int, **more: object) -> TrafficShape:
    """Traffic with the lengths of a trace's lines. `more`: further fields of `TrafficShape`."""
    return TrafficShape(
        requests,
        seconds,
        seed,
        prompts=tuple(line.input_length for line in lines),
        answers=tuple(line.output_length for line in lines),
        **more,  # type: ignore[arg-type]
    )


def chained(last: int, content: int) -> int:
    """The key of a block by the key before it, 0 for none, and the number of its content."""
    return hash((last, content)) & _MASK


class _Conversation:
    __slots__ = ("keys", "name", "said", "tenant")

    def __init__(self, name: str, tenant: str, keys: list[int], said: int) -> None:
        self.name, self.tenant, self.keys, self.said = name, tenant, keys, said


def drawn(shape: TrafficShape) -> Iterator[SimRequest]:
    """Yield the requests of a shape in the order of their times. Deterministic by its seed."""
    rng = random.Random(f"traffic {shape.seed}")
    size, fresh, number = shape.block_tokens, 1, 0
    systems: list[list[int]] = []
    for system in range(shape.systems):
        keys: list[int] = []
        for block in range(shape.system_tokens // size):
            keys.append(chained(keys[-1] if keys else 0, -(1 + system * 4096 + block)))
        systems.append(keys)
    resting: list[tuple[float, int, _Conversation]] = []
    """Conversations that have a next turn, by when it may come."""
    goes_on = 1 - 1 / shape.turns
    for at, count in zip(_times(shape, rng), range(shape.requests), strict=False):
        if resting and resting[0][0] <= at and rng.random() < goes_on:
            conversation = heapq.heappop(resting)[2]
            prompt = conversation.said + 1 + int(rng.expovariate(1 / shape.more_tokens))
        else:
            number += 1
            tenant = f"tenant-{rng.randrange(shape.tenants)}" if shape.tenants else ""
            begin = rng.choice(systems)
            prompt = max(len(begin) * size + 1, rng.choice(shape.prompts))
            conversation = _Conversation(f"chat-{number}", tenant, list(begin), 0)
        answer = rng.choice(shape.answers)
        keys = conversation.keys
        while len(keys) < prompt // size:
            keys.append(chained(keys[-1] if keys else 0, fresh))
            fresh += 1
        most = max(answer, shape.answer_limit)
        yield SimRequest(at, prompt, answer, most, keys[: prompt // size], conversation.name, conversation.tenant)
        conversation.said = prompt + answer
        if conversation.said + shape.more_tokens <= shape.max_tokens:
            rest = at + rng.expovariate(1 / shape.think_s)
            if rng.random() < goes_on:
                heapq.heappush(resting, (rest, count, conversation))
                if len(resting) > MAX_OPEN:
                    heapq.heappop(resting)


def _times(shape: TrafficShape, rng: random.Random) -> Iterator[float]:
    """Times of requests: a Poisson process, thinned where there is no burst."""
    most = max([1.0, *(burst.factor for burst in shape.bursts)])
    weighed = shape.seconds + sum((burst.factor - 1) * burst.seconds for burst in shape.bursts)
    rate, at = shape.requests / weighed * most, 0.0
    while True:
        at += rng.expovariate(rate)
        factor = max((b.factor for b in shape.bursts if b.at_s <= at < b.at_s + b.seconds), default=1.0)
        if rng.random() * most < factor:
            yield at


def replayed(
    lines: Sequence[TraceLine],
    *,
    speed: float = 1.0,
    answer_limit: int = 2048,
    scale: float = 1.0,
    max_context: int | None = None,
) -> Iterator[SimRequest]:
    """Yield a trace's own requests. `speed` divides the gaps between them; `answer_limit` as in `TrafficShape`. `scale`
    and `max_context` as in `scaled_lengths`: blocks shrink with the prompts (`scaled_block`)."""
    size = scaled_block(scale)
    for number, line in enumerate(lines):
        prompt, answer = scaled_lengths(line, scale, max_context)
        keys: list[int] = []
        for content in line.hash_ids[: prompt // size]:
            keys.append(chained(keys[-1] if keys else 0, content))
        at = (line.at_s - lines[0].at_s) / speed
        # A trace names no sessions: what has a long beginning in common counts as one.
        session = f"session-{line.hash_ids[1]}" if len(line.hash_ids) > 1 else f"session-of-{number}"
        # One that may have no second token gets no decode worker, and the models have none without.
        yield SimRequest(at, prompt, answer, max(2, answer, answer_limit), keys, session)


def scaled_block(scale: float) -> int:
    """Tokens of a trace's block, where its lengths are multiplied by `scale`."""
    return max(1, round(TRACE_BLOCK_TOKENS * scale))
