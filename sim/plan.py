"""What a seed stands for: a cluster, what is asked of it, and what goes wrong.

A plan is a value, apart from running it. So a failing one can be made smaller (`sim.shrink`) and run again, and what is
drawn in a run (delays, say) is drawn from another stream than what is drawn here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cache.registry import BufferSpec, Index, Kind, PoolSetSpec, PoolSpec
from contracts.sampling import SamplingParams
from sim.engine import VOCABULARY, recite

CONTEXT = 96
STEP_TOKENS = 8
"""Token budget of a prefill step: prompts take several."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One client's request."""

    number: int
    at: float
    prompt: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    priority: int = 0
    leaves_at: float | None = None
    """When the client hangs up, if it still waits."""
    enough: int | None = None
    """The client has what it wanted after so many tokens, as with a stop string."""
    deadline_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong, or that an operator does."""

    kind: str
    at: float
    target: str = ""
    other: str = ""
    lasts: float = 0.0

    def __str__(self) -> str:
        between = f" and {self.other}" if self.other else ""
        return f"{self.kind} {self.target}{between}" + (f" for {self.lasts:.2f} s" if self.lasts else "")


@dataclass(frozen=True, slots=True)
class Shape:
    """The cluster."""

    prefill: int
    decode: int
    pools: str
    """``full``, ``window``, ``state`` or ``all``."""
    page_tokens: int
    plane: str
    lazy: bool
    """Devices run operations late, in any order that is allowed."""
    delay_s: float
    step_s: float
    nodes: int
    kill_s: float = 2.0
    """A node may take so long to carry out a kill: what it is for may live on beside its successor."""
    pressed: bool = False
    """More is asked of decode at once than its pools can hold."""
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's prose."""

    seed: int
    shape: Shape
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]


def pool_set(name: str, page_tokens: int) -> PoolSetSpec:
    """A few bytes for each position and kind of state; heads of some, which ranks share."""
    u8 = torch.uint8
    full = PoolSpec("full", (BufferSpec("kv", 2, (4, 2), u8, heads=4),))
    window = PoolSpec("window", (BufferSpec("kv", 1, (2, 4), u8, heads=2),), Kind.WINDOW, 7)
    state = PoolSpec("state", (BufferSpec("s", 1, (16,), u8, Index.SLOT),), Kind.STATE)
    chosen = {"full": (full,), "window": (full, window), "state": (full, state), "all": (full, window, state)}
    return PoolSetSpec(page_tokens, chosen[name])


def draw(seed: int) -> Plan:
    """The plan of a seed. Memory is short in every third."""
    rng = random.Random(f"plan {seed}")
    shape = _shape(rng, seed % 3 == 0)
    asks = _asks(rng, shape)
    return Plan(seed, shape, asks, _faults(rng, shape, asks))


def _shape(rng: random.Random, pressed: bool) -> Shape:
    page = rng.choice((2, 4, 4, 4, 8))
    plane = rng.choice(("shm", "shm", "zmq"))
    return Shape(
        prefill=rng.choice((1, 2, 2, 3)),
        decode=rng.choice((1, 1, 2) if pressed else (1, 2, 2, 3)),
        pools=rng.choice(("full", "full", "window", "state", "all")),
        page_tokens=page,
        plane=plane,
        lazy=rng.random() < 0.3,
        delay_s=rng.choice((0.0002, 0.002, 0.02)),
        step_s=rng.choice((0.002, 0.02, 0.08)),
        nodes=1 if plane == "shm" else rng.randint(1, 3),
        kill_s=rng.choice((0.5, 2.0, 2.0, 8.0)),
        pressed=pressed,
        config=_config(rng, page, pressed),
    )


def _config(rng: random.Random, page: int, pressed: bool) -> dict[str, Any]:
    cache: dict[str, Any] = {
        "page_tokens": page,
        "prefix_reuse": rng.random() < 0.85,
        "arena": rng.choice(("auto", "auto", "none")),
        "eviction": rng.choice(("lru", "lfu", "fifo", "priority", "slru")),
    }
    if rng.random() < 0.6:
        cache["host_bytes"] = rng.choice((1, 2, 6)) * CONTEXT * 32
        cache["write_policy"] = rng.choice(("through", "selective", "back"))
        cache["load_back"] = rng.choice(("auto", "always", "always", "never"))
        if rng.random() < 0.6:
            cache["storage"] = {"backend": "memory", "max_bytes": rng.choice((4096, 65536, 1 << 20))}
            cache["prefetch"] = {
                "policy": rng.choice(("best_effort", "wait_complete", "timeout")),
                "batch_pages": rng.choice((1, 4)),
            }
    tight = rng.random() < 0.6
    tp = rng.choice(((1, 1),) * 8 + ((2, 1), (1, 2), (2, 2), (4, 2)))
    decode = _sizes(rng, page, tight)
    if pressed:
        # Room for one request that is as long as can be, or for many that turn out longer than those before them.
        decode = {"device_tokens": CONTEXT + page * rng.randrange(3), "device_requests": 8}
    return {
        "cache": cache,
        "prefill": {
            "chunk_tokens": STEP_TOKENS,
            "max_running": rng.choice((1, 2, 8)),
            "cache": _sizes(rng, page, tight),
            "tp": tp[0],
        },
        "decode": {
            "max_batch_tokens": rng.choice((3, 16) if pressed else (1, 3, 16)),
            "metadata_slots": 8 if pressed else rng.choice((1, 2, 8)),
            "cache": decode,
            "tp": tp[1],
            "growth_quantile": 0.1 if pressed else rng.choice((0.1, 0.75, 1.0)),
            "retract": rng.choice(("auto", "auto", "recompute", "copy" if "host_bytes" in cache else "auto")),
            "retract_limit": rng.choice((1, 3, 50)),
        },
        "audit": {"fraction": rng.choice((0.0, 0.0, 1.0))},
        "faults": {"retract_every": 0 if pressed else rng.choice((0, 0, 0, 3, 7))},
    }


def _sizes(rng: random.Random, page: int, tight: bool) -> dict[str, int]:
    """A pool holds the longest request; how much more than that decides whether requests wait for each other."""
    tokens = CONTEXT + page * rng.randrange(0, CONTEXT // page // (2 if tight else 1) * (1 if tight else 4))
    return {"device_tokens": tokens, "device_requests": rng.randint(1, 2) if tight else rng.randint(2, 8)}


def _asks(rng: random.Random, shape: Shape) -> tuple[Ask, ...]:
    """Conversations: some go on from what was said, some share what they begin with, some are asked several times."""
    spec = pool_set(shape.pools, shape.page_tokens)
    system = [rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 20))]
    said: list[list[int]] = []
    asks: list[Ask] = []
    at, impatient = 0.5, rng.choice((0.1, 0.1, 0.1, 0.5))
    length = rng.choice((4, 12, 40))
    salts = rng.choice((("",), ("",), ("", "a"), ("", "a", "b")))
    count = rng.choice((3, 6, 12, 24))
    count = min(count, 6) if shape.pressed else count
    for _ in range(count):
        at += rng.choice((0.0, 0.01, 0.1, 0.5, 1.0)) * rng.expovariate(1.0)
        words = list(rng.choice(said)) if said and rng.random() < 0.5 else list(system if rng.random() < 0.6 else [])
        words += [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, length))]
        prompt = tuple(words[: CONTEXT - 26])
        sampling = _sampling(rng, len(prompt), rng.choice((1, 2, 5, 12, 24)))
        ask = Ask(
            len(asks), at, prompt, sampling, rng.choice(salts), rng.choice((0, 0, 0, 0, 5, -3)),
            leaves_at=at + rng.expovariate(2.0) if rng.random() < impatient else None,
            enough=rng.randint(1, 4) if rng.random() < 0.08 else None,
            deadline_s=rng.expovariate(1.0) + 0.01 if rng.random() < 0.05 else 600.0,
        )  # fmt: skip
        asks.append(ask)
        if rng.random() < 0.1:
            for choice in range(1, rng.randint(2, 4)):
                again = replace(sampling, choice=choice)
                asks.append(replace(ask, number=len(asks), sampling=again, leaves_at=None, enough=None))
        said.append([*words, *recite(spec, prompt, sampling).tokens])
    if shape.pressed:
        asks += _rush(rng, shape, len(asks), at)
    return tuple(asks)


def _sampling(rng: random.Random, prompt: int, most: int) -> SamplingParams:
    """How a request is to be drawn; half of them plainly."""
    stops = tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 4))))
    sampling = SamplingParams(most, seed=rng.randrange(1 << 32), stop_token_ids=stops)
    if rng.random() < 0.5:
        return sampling
    scored = prompt > 1 and rng.random() < 0.2
    if scored and rng.random() < 0.2:
        sampling, most = replace(sampling, max_tokens=0), 0
    return replace(
        sampling,
        temperature=rng.choice((0.0, 0.7, 1.0)),
        top_p=rng.choice((0.9, 1.0, 1.0)),
        top_k=rng.choice((0, 0, 40)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.4)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.0, -0.2)),
        logit_bias=rng.choice(((), (), ((3, -1.5), (41, 2.25)))),
        min_tokens=rng.randint(0, most) if rng.random() < 0.5 else 0,
        logprobs=rng.choice((None, None, 0, 3)),
        prompt_logprobs=rng.choice((0, 2)) if scored else None,
    )


def _rush(rng: random.Random, shape: Shape, first: int, at: float) -> list[Ask]:
    """Short answers, from which decode learns what to expect, then more and longer ones than it expects, at once."""
    asks = []
    short = shape.decode * rng.randint(8, 9)
    for number in range(short + shape.decode * rng.randint(4, 7)):
        long = number >= short
        at += 0.0 if long else 0.05 * rng.random()
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12)))
        sampling = replace(_sampling(rng, len(prompt), rng.randint(16, 24) if long else 2), stop_token_ids=())
        asks.append(Ask(first + number, at + (1.0 if long else 0.0), prompt, sampling, "", rng.choice((0, 0, 5))))
    return asks


def _faults(rng: random.Random, shape: Shape, asks: Sequence[Ask]) -> tuple[Fault, ...]:
    """None in some plans; in others some of a few kinds, so that each meets the others."""
    count = rng.choice((0, 2, 5, 10, 16))
    names = [f"prefill-{n}" for n in range(shape.prefill)] + [f"decode-{n}" for n in range(shape.decode)]
    kinds = rng.sample(list(KINDS), rng.randint(1, 5))
    ends = [*names, "router-0"]
    for role, many in (("prefill", shape.prefill), ("decode", shape.decode)):
        ends += [f"{role}-{n}.rank{rank}" for n in range(many) for rank in range(1, shape.config[role]["tp"])]
    faults = []
    for _ in range(count):
        kind = rng.choice(kinds)
        # Where something is under way.
        at = rng.choice(asks).at + rng.expovariate(2.0)
        lasts = rng.choice((0.05, 0.5, 2.0, 6.0)) * rng.uniform(0.5, 1.5)
        target, other = rng.sample(ends, 2) if kind in PAIRS else (rng.choice(names), "")
        if kind == "halt":
            # Decode writes only to what it hands on. Some stand still until they are killed, or beyond that.
            target = rng.choice(names[: shape.prefill])
            lasts = rng.choice((rng.uniform(0.3, 3.5), rng.uniform(4.0, 14.0)))
        if kind in WHOLE:
            target = ""
        if kind == "partition":
            target, other = f"node-{rng.randrange(shape.nodes)}", "*"
        faults.append(Fault(kind, at, target, other, lasts if kind in LASTING else 0.0))
    if shape.decode > 1 and rng.random() < 0.4:
        # While something runs there, and somebody else could take it.
        at = rng.choice(asks).at + shape.step_s * rng.randrange(20)
        faults.append(Fault("drain", at, f"decode-{rng.randrange(shape.decode)}", "", rng.choice((0.1, 0.5, 2.0))))
    if "rank" not in kinds and len(ends) > len(names) + 1 and rng.random() < 0.3:
        faults.append(Fault("rank", rng.choice(asks).at + rng.expovariate(2.0), rng.choice(names)))
    return tuple(sorted(faults, key=lambda f: f.at))


PAIRS = ("reset", "stall")
"""Faults between two processes."""
WHOLE = ("router", "errors", "rot", "forget", "slow", "corrupt", "metadata", "notice")
"""Faults of the whole cluster."""
LASTING = ("stop", "halt", "stall", "partition", "errors", "slow", "drain")
KINDS = {
    "crash": "a worker's process dies",
    "stop": "a worker's process stands still for a while",
    "hang": "a worker's loop hangs for ever, while its lease is renewed",
    "halt": "a worker's process stands still in the middle of its next write, for a while",
    "router": "the router's process dies and is started again",
    "drain": "an operator drains a worker, and takes it back after a while if it is still there",
    "role": "an operator has a worker change its role",
    "stall": "two processes don't reach each other for a while",
    "partition": "a node reaches no other for a while",
    "reset": "the connections between two processes are reset",
    "slow": "the network is twenty times as slow for a while",
    "rank": "the process of another rank of a worker dies",
    "corrupt": "a byte of the next write of pages flips on its way",
    "metadata": "a byte of the next metadata flips on its way",
    "notice": "a byte of the next notice of a data plane flips on its way",
    "flip": "a byte of every page in a worker's host memory flips",
    "errors": "storage fails one operation in three for a while",
    "rot": "a byte of an object on storage flips",
    "forget": "storage loses all objects",
}
