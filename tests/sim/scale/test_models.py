"""Jumps of modelled workers say what single steps say: against the plainest model of each, step by step."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest

from twinpool.router.kv_indexer.holder_sets import DEVICE
from twinpool.sim.fabric.virtual_time import StepCosts, StepRun, pairs_of
from twinpool.sim.scale.cluster_plan import DecodePool, PrefillPool
from twinpool.sim.scale.decode_model import DecodeModel, DecodeRow
from twinpool.sim.scale.prefill_model import PrefillModel, PrefixCache, PromptJob
from twinpool.sim.scale.scale_figures import GapHistogram
from twinpool.sim.scale.traffic import TrafficBurst, TrafficShape, drawn

COSTS = StepCosts(prefill_pair_s=1e-7, decode_row_s=0.003, decode_context_s=2e-6)


@pytest.mark.parametrize("more", [0.0, 1e-6, 0.02])
def test_a_run_of_steps_is_the_sum_of_its_steps(more: float) -> None:
    run, at = StepRun(0.01, more), 0.0
    for step in range(200):
        assert run.seconds(step) == pytest.approx(at)
        assert run.steps(at) == step
        assert run.steps(at + (0.01 + more * step) * 0.9) == step
        at += 0.01 + more * step


def by_steps(rows: list[DecodeRow], come: dict[int, float]) -> dict[int, float]:
    """When each row has drawn its last token: one step after the other, all rows that are here in each."""
    now, ended, left = 0.0, dict[int, float](), {row.number: row.answer - 1 for row in rows}
    position = {row.number: row.prompt + 1 for row in rows}
    while len(ended) < len(rows):
        here = [n for n, at in come.items() if at <= now and n not in ended]
        if not here:
            now = min(at for n, at in come.items() if n not in ended)
            continue
        now += COSTS.decode_s(len(here), sum(position[n] for n in here))
        for number in here:
            left[number] -= 1
            position[number] += 1
            if not left[number]:
                ended[number] = now
    return ended


def test_decode_jumps_as_it_would_step() -> None:
    rng, at, come, gaps = random.Random(3), 0.0, dict[int, float](), GapHistogram()
    model, rows = DecodeModel(COSTS, DecodePool(1, 10**9), 16, gaps), list[DecodeRow]()
    for number in range(120):
        at += rng.expovariate(1.5)
        rows.append(DecodeRow(number, rng.randint(10, 4000), rng.randint(2, 300), 2048, at))
        rows[-1].first_at = come[number] = at
    got: dict[int, float] = {}
    waiting = list(rows)
    while waiting or model.due < inf:
        if waiting and come[waiting[0].number] < model.due:
            row = waiting.pop(0)
            model.ask(row, row.arrived)
            model.ready(row, row.arrived)
        else:
            now = model.due
            got |= {row.number: now for row in model.turn(now)}
    assert got == pytest.approx(by_steps(rows, come), rel=1e-6)
    assert gaps.total == model.generated == sum(row.answer - 1 for row in rows)
    assert model.idle
    assert model.free_tokens == 10**9


def test_prefill_jumps_as_it_would_step() -> None:
    model = PrefillModel(COSTS, PrefillPool(1, chunk_tokens=512), 128)
    model.submit(PromptJob(0, 10_000, list(range(78))), 0.0)
    want, position, ends = 0.0, 0, [0.0]
    while position < 10_000:
        count = min(512, 10_000 - position)
        want += COSTS.prefill_s(count, pairs_of(position, count))
        position += count
        ends.append(want)
    turns = 0
    while not (done := model.turn(model.due)):
        turns += 1
    assert [job.number for job in done] == [0]
    assert turns <= 2, "the whole chunks are one jump"
    last = model._since + model._run.first_s
    assert last == pytest.approx(want)
    # Another prompt joins at the end of the step under way, not of the jump.
    model.submit(PromptJob(1, 10_000, list(range(100, 178))), 100.0)
    model.submit(PromptJob(2, 300, list(range(200, 202))), 100.0 + (ends[3] + ends[4]) / 2)
    assert model.due == pytest.approx(100.0 + ends[4])
    assert all(a < b for a, b in pairwise(ends))


def test_a_prompt_waits_for_what_another_computes() -> None:
    model = PrefillModel(COSTS, PrefillPool(1, chunk_tokens=512), 128)
    model.submit(PromptJob(0, 2000, list(range(15))), 0.0)
    model.submit(PromptJob(1, 2000, [*range(14), 99]), 0.0)
    done: list[PromptJob] = []
    while model.due < inf:
        done += model.turn(model.due)
    assert [job.number for job in done] == [0, 1]
    assert done[1].held == 14 * 128
    assert model.computed == 2000 + 2000 - 14 * 128
    assert model.todo == 0


def test_tenants_have_fair_shares() -> None:
    model = PrefillModel(COSTS, PrefillPool(1, chunk_tokens=512, max_running=2), 128)
    for number in range(8):
        model.submit(PromptJob(number, 1500, [number * 100 + n for n in range(11)], "many"), 0.0)
    model.submit(PromptJob(100, 1500, list(range(1000, 1011)), "one"), 0.0)
    order: list[int] = []
    while model.due < inf:
        order += [job.number for job in model.turn(model.due)]
    assert order.index(100) <= 3, "a tenant that asks little doesn't wait for one that asks much"


def test_a_cache_tells_all_that_changes() -> None:
    rng, cache = random.Random(1), PrefixCache(8, 5)
    there: dict[int, set[int]] = {}
    for _ in range(300):
        begin = rng.randrange(6)
        keys = [begin * 10 + n for n in range(rng.randint(1, 6))]
        for came, tier, changed in cache.use(keys):
            for key in changed:
                (there.setdefault(key, set()).add if came else there[key].remove)(tier)
        for first in range(6):
            chain = [first * 10 + n for n in range(6)]
            held, loaded = cache.match(chain, 6)
            known = next((n for n, key in enumerate(chain) if not there.get(key)), 6)
            assert held == known
            assert loaded == sum(DEVICE not in there[key] for key in chain[:held])


def test_gaps_are_right_to_a_per_cent() -> None:
    rng, gaps = random.Random(2), GapHistogram()
    seconds = sorted(rng.lognormvariate(-4, 1) for _ in range(2000))
    for one in seconds:
        gaps.add(one)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert gaps.quantile(share) == pytest.approx(seconds[int(share * 2000)], rel=0.011)
    assert gaps.share_within(seconds[500]) == pytest.approx(0.25, abs=0.01)
    assert GapHistogram().quantile(0.5) == 0.0


def test_traffic_is_as_much_as_was_asked_for_and_bursts() -> None:
    shape = TrafficShape(4000, 1000.0, 7, think_s=20.0, bursts=(TrafficBurst(400.0, 200.0, 4.0),), tenants=3)
    requests = list(drawn(shape))
    assert len(requests) == 4000
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    assert requests[-1].at_s == pytest.approx(1000.0, rel=0.1)
    inside = sum(400.0 <= request.at_s < 600.0 for request in requests)
    assert inside / 4000 == pytest.approx(0.5, abs=0.03)
    assert {request.tenant for request in requests} == {"tenant-0", "tenant-1", "tenant-2"}
    assert all(len(request.keys) == request.prompt // 512 for request in requests)
    last: dict[str, list[int]] = {}
    for request in requests:
        before = last.get(request.session, [])
        assert request.keys[: len(before)] == before, "a turn goes on from what was said"
        last[request.session] = request.keys
    assert len(last) < 3000
