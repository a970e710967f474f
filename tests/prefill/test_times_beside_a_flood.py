"""First tokens of a quiet tenant beside another's flood, in virtual time: the production scheduler over steps that take
what steps of the demo model take, so that no other load of a machine is in the figures."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import dataclass, field

import pytest

from tests.support.prefill_parts import PrefillParts
from twinpool.contracts.config.worker_config import PrefillConfig
from twinpool.prefill.request import PrefillRequest

FIXED_S, TOKEN_S, POSITION_S = 1e-3, 4e-5, 4e-8
"""What a step costs, a token of it, and each position before a token: as of the demo's engine on one core."""
PAGE_TOKENS, CHUNK = 16, PrefillConfig().chunk_tokens
IN_FLIGHT, FLOOD_TOKENS, QUIET_TOKENS = 32, (1200, 1800), (64, 400)
RATE = 4.0
AS_BEFORE = {"shared_step_s": 1e6, "tenant_credit_tokens": 0}
"""Settings under which steps are as long as they can be, and shares are all that counts."""


def cost(tokens: int, positions: int) -> float:
    return FIXED_S + TOKEN_S * tokens + POSITION_S * positions


@dataclass
class Worker:
    """A prefill worker's rounds, one step after the other. What comes during a step is seen when it is done."""

    settings: dict[str, float] = field(default_factory=dict)
    parts: PrefillParts = field(init=False)
    others_s: list[float] = field(default_factory=list)
    """Of the steps that had nothing of the quiet tenant's, once it was known."""
    computed: Counter[str] = field(default_factory=Counter)
    _names: int = 0

    def __post_init__(self) -> None:
        self.parts = PrefillParts(
            pages=8192, page_tokens=PAGE_TOKENS, chunk_tokens=CHUNK, max_running=32, **self.settings
        )

    def ask(self, tenant: str, tokens: int) -> PrefillRequest:
        self._names += 1
        request = self.parts.ask(f"r{self._names}", tokens, tenant=tenant)
        self.parts.granted.add(request)
        return request

    def round(self) -> list[PrefillRequest]:
        """Compute one step; returns the requests whose last chunk it had."""
        parts = self.parts
        parts.scheduler.admit()
        starts = {request: request.launched for request in parts.requests}
        if not parts.step():
            return []
        spans = {r: (start, r.launched - start) for r, start in starts.items() if r.launched > start}
        tokens = sum(count for _, count in spans.values())
        positions = sum(count * (2 * start + count) // 2 for start, count in spans.values())
        seconds = cost(tokens, positions)
        if self.computed["quiet"] and not any(r.submit.tenant == "quiet" for r in spans):
            self.others_s.append(seconds)
        for request, (_, count) in spans.items():
            self.computed[request.submit.tenant] += count
            request.committed = request.launched
        parts.clock.advance(seconds)
        parts.cost.saw(tokens, positions, seconds)
        done = [request for request in spans if request.launched == len(request.tokens)]
        for request in done:
            parts.leave(request)
        return done


@dataclass
class Prompt:
    """One prompt of the quiet tenant."""

    at: float
    tokens: int
    first_s: float = 0.0
    """Seconds to its first token."""
    others: bool = False
    """Whether it met another of its tenant's."""


def ask_all(worker: Worker, count: int, *, flooded: bool, seed: int = 2) -> list[Prompt]:
    rng, flood = random.Random(seed), random.Random(seed + 1)
    clock, due = worker.parts.clock, 1.0
    prompts = [Prompt(due := due + rng.expovariate(RATE), rng.randint(*QUIET_TOKENS)) for _ in range(count)]
    to_come, waiting = list(prompts), dict[PrefillRequest, Prompt]()
    for _ in range(IN_FLIGHT if flooded else 0):
        worker.ask("flood", flood.randint(*FLOOD_TOKENS))
    while to_come or waiting:
        while to_come and to_come[0].at <= clock.now():
            prompt = to_come.pop(0)
            waiting[worker.ask("quiet", prompt.tokens)] = prompt
            for each in waiting.values():
                each.others |= len(waiting) > 1
        for request in worker.round():
            if request.submit.tenant == "quiet":
                prompt = waiting.pop(request)
                prompt.first_s = clock.now() - prompt.at
            else:
                worker.ask("flood", flood.randint(*FLOOD_TOKENS))
        if to_come and not len(worker.parts.requests):
            clock.advance(max(0.0, to_come[0].at - clock.now()))
    return prompts


def p99(prompts: list[Prompt]) -> float:
    return statistics.quantiles([prompt.first_s for prompt in prompts], n=100)[98]


@pytest.fixture(scope="module")
def beside() -> tuple[Worker, list[Prompt]]:
    worker = Worker()
    return worker, ask_all(worker, 200, flooded=True)


def test_a_flood_makes_the_p99_of_another_tenants_first_tokens_at_most_half_as_long_again(
    beside: tuple[Worker, list[Prompt]],
) -> None:
    alone = ask_all(Worker(), 200, flooded=False)
    assert p99(beside[1]) <= 1.5 * p99(alone)


def test_with_long_steps_and_shares_alone_it_would_be_more_than_three_times_as_long() -> None:
    """The oracle of the test before."""
    alone, flooded = (ask_all(Worker(AS_BEFORE), 30, flooded=flooded) for flooded in (False, True))
    assert p99(flooded) > 3 * p99(alone)


def test_a_prompt_finds_one_short_step_ahead_of_it_and_none_of_the_flood_in_its_own(
    beside: tuple[Worker, list[Prompt]],
) -> None:
    """The bound that the scheduler keeps, whatever is asked: of the prompts that met no other of their tenant's."""
    worker, prompts = beside
    short_s = FIXED_S + PrefillConfig().shared_step_s
    first = next(prompt for prompt in prompts if prompt.first_s)
    checked = [prompt for prompt in prompts if not prompt.others and prompt is not first]
    assert len(checked) > 100
    for prompt in checked:
        own_s = max(cost(prompt.tokens, prompt.tokens**2 // 2), short_s)
        assert prompt.first_s <= 1.3 * short_s + own_s + 1e-9, prompt
    assert max(worker.others_s) <= 1.3 * short_s
    assert statistics.median(worker.others_s) == pytest.approx(short_s, rel=0.15)


def test_the_flood_gives_up_no_more_than_what_the_short_steps_cost(beside: tuple[Worker, list[Prompt]]) -> None:
    """A tenth at these costs of a step."""
    before = Worker(AS_BEFORE)
    ask_all(before, 30, flooded=True)
    rates = [worker.computed["flood"] / worker.parts.clock.now() for worker in (beside[0], before)]
    assert rates[0] > 0.9 * rates[1]


def test_steps_of_one_tenant_alone_are_whole_and_so_are_those_of_two_that_stay() -> None:
    for tenants in (("flood",), ("flood", "other")):
        worker = Worker()
        for number in range(400):
            for tenant in tenants if number % 4 == 0 else ():
                worker.ask(tenant, 1500)
            worker.round()
            if number == 20:
                worker.parts.clock.advance(PrefillConfig().tenant_return_s)
                worker.parts.scheduler.counters["steps_kept_short"] = 0
        assert worker.parts.scheduler.counters["steps_kept_short"] == 0
        assert worker.computed.keys() == set(tenants)


def test_a_tenant_is_expected_for_a_while() -> None:
    worker = Worker()
    for _ in range(40):
        worker.ask("flood", 1500)
    kept_short = worker.parts.scheduler.counters

    def shortened(rounds: int) -> float:
        before = kept_short["steps_kept_short"]
        for _ in range(rounds):
            worker.round()
        return kept_short["steps_kept_short"] - before

    assert shortened(8) == 0
    worker.ask("quiet", 100)
    assert shortened(10) == 10
    worker.parts.clock.advance(PrefillConfig().tenant_return_s)
    assert shortened(10) == 0
    worker.ask("quiet", 100)
    assert shortened(10) == 10
