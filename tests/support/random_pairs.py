"""Pairs of workers drawn at random: pools, tiers and policies of every kind, all of them short, under bursts of load.

Every draw follows from a seed. Engines hash the state that they read, so an answer is right only if all of it was.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.support.hash_colocated import HashColocated, hash_colocated
from tests.support.hash_workers import CONTEXT, recite
from tests.support.pool_sets import NAMES, pool_sets
from tests.support.worker_parts import table_of
from tests.workers.test_any_state import PAGE, HashPair, hash_pair
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import PAIR, RequestId, Role
from twinpool.contracts.sampling_params import SamplingParams

ROUNDS = 100_000
"""Rounds that a burst may take; one that waits for itself takes them all."""


@dataclass(frozen=True)
class Draw:
    """What a seed draws."""

    name: str
    """The pool set, see `tests.support.pool_sets`."""
    counts: dict[Role, int]
    sections: dict[str, Any]
    bursts: int
    most: int
    """Requests in a burst."""

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer that both workers have room for."""
        return min(CONTEXT, PAGE * (min(self.counts.values()) - 1))


def draw(rng: random.Random) -> Draw:
    name = rng.choice(NAMES)
    spec = pool_sets(PAGE)[name]
    unit = sum(spec.unit_bytes(pool) for pool in spec.by_name)
    counts = {role: rng.choice((8, 12, 20, 40)) for role in PAIR}
    cache: dict[str, Any] = {
        "eviction": rng.choice(("lru", "lfu", "fifo", "priority", "slru")),
        "host_bytes": unit * rng.choice((3, 4, 5, 8, 12, 30, 60)),
        "write_policy": rng.choice(("through", "selective", "back", "back")),
        "load_back": rng.choice(("auto", "always", "always", "never")),
        "load_bytes": rng.choice((1, unit * 3, 1 << 30)),
        "copy_chunk_bytes": rng.choice((1, unit * 2, 1 << 24)),
        "prefix_reuse": rng.random() < 0.9,
        "prefetch": {
            "policy": rng.choice(("best_effort", "wait_complete", "timeout")),
            "batch_pages": rng.choice((1, 2, 32)),
        },
    }
    if rng.random() < 0.7:
        size = unit * rng.choice((5, 20, 10_000))
        cache["storage"] = {"backend": "memory", "path": uuid.uuid4().hex, "max_bytes": size, "retry_s": 0.001}
    decode = {"retract": rng.choice(("auto", "copy", "recompute")), "retract_limit": rng.choice((1, 3))}
    sections: dict[str, Any] = {"cache": cache, "decode": decode, "prefill": {"chunk_tokens": rng.choice((4, 8, 32))}}
    if rng.random() < 0.3:
        sections["faults"] = {"retract_every": rng.choice((1, 3, 10))}
    return Draw(name, counts, sections, bursts=rng.choice((5, 15, 30)), most=rng.choice((2, 4, 8)))


@dataclass
class Asked:
    """A request, over all its attempts."""

    prompt: list[int]
    sampling: SamplingParams
    told: list[int] = field(default_factory=list)


def serve(both: HashPair | HashColocated, drawn: Draw, rng: random.Random) -> None:
    """All bursts of a draw, one after another; every answer is checked. An attempt that ends for want of memory goes on
    from its tokens in the next one, as a router has it do."""
    texts = [[rng.randrange(300) for _ in range(drawn.longest)] for _ in range(3)]
    for _ in range(drawn.bursts):
        asked: dict[RequestId, Asked] = {}
        whose = random.Random(repr(rng.getstate()))  # All else of a seed stays as it is.
        tenants = whose.choice((("",), ("", "a"), ("a", "bb", "cccc")))
        for _ in range(rng.randint(1, drawn.most)):
            one = _ask(drawn, texts, rng)
            tenant = whose.choice(tenants)
            salt = rng.choice(("", "", "mine"))
            asked[both.submit(one.prompt, one.sampling, salt=salt, tenant=tenant, weight=len(tenant) + 1)] = one
            for _ in range(rng.choice((0, 0, 1, 5))):
                both.step()
        # Early and few: a cancel would end a wait that has no end.
        cancels = {rng.randrange(40) for _ in range(rng.choice((0, 0, 1, 3)))}
        rounds = 0
        while asked:
            rounds += 1
            assert rounds < ROUNDS, f"{len(asked)} requests came to a stand: {_where(both)}"
            if rounds in cancels:
                request = rng.choice(list(asked))
                both.cancel(request)
                del asked[request]
            both.step()
            for request in [r for r in asked if both.answers[r].done is not None]:
                _ended(both, asked, request)
        if rng.random() < 0.3:
            texts[rng.randrange(3)] = [rng.randrange(300) for _ in range(drawn.longest)]


def _ask(drawn: Draw, texts: list[list[int]], rng: random.Random) -> Asked:
    """The beginning of a text, at times with an end of its own."""
    length = rng.randint(1, drawn.longest - 1)
    own = rng.choice((0, 1, rng.randint(0, length)))
    prompt = [*rng.choice(texts)[: length - own], *(rng.randrange(300) for _ in range(own))] or [7]
    most = min(rng.choice((1, 9, 60)), drawn.longest - len(prompt))
    return Asked(prompt, SamplingParams(max_tokens=rng.randint(1, max(1, most)), temperature=0.0))


def _ended(both: HashPair | HashColocated, asked: dict[RequestId, Asked], request: RequestId) -> None:
    one, answer = asked.pop(request), both.answers[request]
    assert answer.done is not None
    assert answer.done.error in (None, ErrorKind.RETRACTED), answer.done
    one.told += answer.list if answer.tokens else []
    expected = recite(_workers(both)[-1].setup.manager.spec, one.prompt, one.sampling.max_tokens)
    assert one.told == expected[: len(one.told)], (one.told, expected)
    if answer.done.error is ErrorKind.RETRACTED:
        asked[both.submit(one.prompt, one.sampling, emitted=one.told)] = one
    else:
        assert len(one.told) == one.sampling.max_tokens


def _where(both: HashPair | HashColocated) -> list[tuple[str, str]]:
    """What is under way: each request's phase, by role."""
    return [
        (f"{worker.role} {request.submit.request_id}", str(request.phase))
        for worker in _workers(both)
        for request in table_of(worker)
    ]


def _workers(both: HashPair | HashColocated) -> list[Any]:
    return [both.worker] if isinstance(both, HashColocated) else [both.prefill, both.decode]


def run_colocated_seed(seed: int) -> dict[str, float]:
    """The same of one colocated worker, which has decode's pools of the draw; returns its counters."""
    rng = random.Random(seed)
    drawn = draw(rng)
    count = drawn.counts[Role.DECODE]
    drawn = replace(drawn, counts={Role.COLOCATED: count})
    colocate = {"prompt_tokens": rng.choice((1, 4, 16))}
    chunk = max(colocate["prompt_tokens"], drawn.sections["prefill"]["chunk_tokens"])
    sections = {**drawn.sections, "colocate": colocate, "prefill": {"chunk_tokens": chunk}}
    sections["decode"] = {**sections["decode"], "first_answer_tokens": rng.choice((1, 8, 512))}
    with hash_colocated(drawn.name, count, **sections) as both:
        serve(both, drawn, rng)
        return dict(both.worker.status().counters)


def run_seed(seed: int, device: Callable[[], Device] = CpuDevice) -> None:
    """Draw a pair and all that it is asked, and run it; then nothing may be left in either worker."""
    rng = random.Random(seed)
    drawn = draw(rng)
    with hash_pair(drawn.name, drawn.counts, device=device, **drawn.sections) as both:
        serve(both, drawn, rng)
