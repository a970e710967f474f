"""The workers of a table in arrays: rows are never older than entries, and choices are those of plain loops."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.structs import replace

from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cache_config import PrefetchConfig
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.router.core.routing_policies import CacheAware, LeastLoaded, PoolRates, RoundRobin, RoutingAsk
from twinpool.router.kv_indexer.prefix_indexes import HitRows, PromptHits
from twinpool.router.state.able_workers import AbleWorkers, WorkerColumns
from twinpool.router.state.circuit_breaker import CircuitState
from twinpool.router.state.worker_table import WorkerEntry, WorkerTable

CONFIG = RouterConfig(breaker_failures=2, breaker_open_s=5.0)
ROLES = (Role.PREFILL, Role.DECODE)


def view(rng: random.Random, number: int, role: Role, state: str = "ready") -> WorkerView:
    key = WorkerName(f"{role}-{number}"), Incarnation(1)
    fits = WorkerLimits(rng.choice((1000, 5000)), 10**6)
    counters = {"compute_tokens_per_s": rng.choice((1000.0, 4000.0)), "load_tokens_per_s": rng.choice((0.0, 9000.0))}
    free = rng.randrange(200)
    status = WorkerStatus(
        key[0], role, state, 1, "", key[1], rng.randrange(5), rng.randrange(3), 200, free, 0, 0,
        rng.choice((counters, {})), routers=rng.choice((1, 2)), prompt_tokens=rng.randrange(9000),
    )  # fmt: skip
    return WorkerView(WorkerRecord(key[0], role, key[1], 1, "", "", "", fits), status)


def views(rng: random.Random) -> list[WorkerView]:
    return [
        view(rng, number, role, rng.choice(("ready", "ready", "ready", "draining")))
        for number in range(8) for role in ROLES
    ]  # fmt: skip


def shake(rng: random.Random, table: WorkerTable, now: float, busy: dict[RequestId, WorkerEntry]) -> None:
    """Have something happen to one worker."""
    entry = rng.choice(list(table))
    request = RequestId(f"r{rng.randrange(10**9)}")
    match rng.randrange(8):
        case 0:
            entry.linked = rng.random() < 0.8
        case 1:
            tokens = rng.randrange(1, 4000)
            entry.book(request, rng.randrange(3), rng.randrange(900), prompt=tokens)
            entry.prompts.add(request, tokens, 0, now)
            busy[request] = entry
        case 2 if busy:
            request = rng.choice(list(busy))
            was = busy.pop(request)
            was.unbook(request, 0)
            was.prompts.remove(request, now)
        case 3:
            table.failed(entry.key, request, now, entry.key)
        case 4:
            table.succeeded([entry.key], request, now)
        case 5:
            table.refused(entry.key, now)
        case 6:
            entry.turn = rng.randrange(6)
        case _:
            table.update(views(rng))


def plainly_able(table: WorkerTable, role: Role, need: int, now: float) -> list[WorkerEntry]:
    fitting = [
        e for e in table
        if e.record.role is role and e.serves(now) and e.record.fits.max_positions >= need
    ]  # fmt: skip
    return [e for e in fitting if e.breaker.admits(now)] or [e for e in fitting if e.breaker.admits(now, needed=True)]


def plain_prefill(able: list[WorkerEntry], ask: RoutingAsk, rates: PoolRates, prefetch: PrefetchConfig) -> WorkerEntry:
    def cost(e: WorkerEntry) -> tuple[float, int, int]:
        here = ask.hits.held.get(e.key, 0)
        tokens: float = e.load + e.others + ask.positions - here
        if (known := rates.known.get(e.key)) is not None:
            first, since = e.prompts.first_worked
            tokens -= min(first, (ask.now - since) * known.tokens_per_s) if e.load else 0.0
            if ask.hits.storage > here:
                more = ask.hits.storage - here
                tokens -= max(0.0, more - (prefetch.base_s + prefetch.per_token_s * more) * known.tokens_per_s)
            tokens *= known.slowness
            tokens += (here - ask.hits.device.get(e.key, 0)) * known.load_share
        return tokens, ask.positions - here, e.turn

    return min(able, key=cost)


def plain_decode(able: list[WorkerEntry], ask: RoutingAsk) -> WorkerEntry:
    def cost(e: WorkerEntry) -> tuple[int, float, int]:
        here = ask.hits.device.get(e.key, 0)
        short = max(0, ask.max_len - here - e.headroom) if e.headroom is not None else 0
        return short, e.load + e.others - min(1.0, here / ask.positions), e.turn

    return min(able, key=cost)


def hits_of(rng: random.Random, table: WorkerTable) -> PromptHits:
    device = {e.key: rng.randrange(1, 3000) for e in table if rng.random() < 0.4}
    held = {key: depth + rng.choice((0, 500)) for key, depth in device.items()}
    hits = PromptHits(device, held, rng.choice((0, 2500)), 3000)
    if rng.random() < 0.5:
        rows = [np.array([which.get(key, 0) for key in table.keys], np.int64) for which in (device, held)]
        hits.rows = HitRows(table.keys, *rows)
    return hits


@pytest.mark.parametrize("seed", range(12))
def test_choices_by_rows_are_those_of_plain_loops_whatever_happened(seed: int) -> None:
    rng, clock, table = random.Random(seed), ManualClock(100.0), WorkerTable(CONFIG, page_tokens=16)
    rates, prefetch, busy = PoolRates(), PrefetchConfig(), dict[RequestId, WorkerEntry]()
    table.update(views(rng))
    policy, met = CacheAware(rates, prefetch), set[CircuitState]()
    for entry in table:
        entry.linked = True
    for _ in range(150):
        shake(rng, table, clock.now(), busy)
        clock.advance(rng.random() / 4)
        rates.follow(table)
        now, need = clock.now(), rng.choice((900, 4000))
        met |= {entry.breaker.state for entry in table}
        for role in ROLES:
            able, plain = table.able(role, need, {}, now), plainly_able(table, role, need, now)
            assert list(able) == plain
            if not plain:
                continue
            ask = RoutingAsk(3200, 4000, hits_of(rng, table), "", now)
            assert policy.prefill(able, ask) is plain_prefill(plain, ask, rates, prefetch)
            assert policy.decode(able, ask) is plain_decode(plain, ask)
            assert LeastLoaded().prefill(able, ask) is min(plain, key=lambda e: (e.whole_load, e.turn))
            assert RoundRobin().decode(able, ask) is min(plain, key=lambda e: e.turn)
            assert policy.prefill(plain, ask) is policy.prefill(able, ask), "a list of entries will do"
    assert CircuitState.OPEN in met


def test_rows_are_those_of_entries_made_anew() -> None:
    rng, table, busy = random.Random(1), WorkerTable(CONFIG, page_tokens=16), dict[RequestId, WorkerEntry]()
    table.update(views(rng))
    for _ in range(300):
        shake(rng, table, 100.0, busy)
        told, fresh = table.able(Role.DECODE, 0, {}, 200.0).columns, AbleWorkers.of(list(table)).columns
        for name in fresh._columns:
            assert told[name].tolist() == fresh[name].tolist(), name


def test_an_incarnation_that_follows_has_a_row_of_its_own() -> None:
    rng, table = random.Random(2), WorkerTable(CONFIG)
    first = view(rng, 0, Role.PREFILL)
    table.update([first])
    before, keys = table.named("prefill-0"), table.keys
    assert before is not None
    before.linked = True
    next_one = WorkerRecord(WorkerName("prefill-0"), Role.PREFILL, Incarnation(2), 1, "", "", "", first.record.fits)
    table.update([WorkerView(next_one, first.status)])
    before.load = 10**6
    assert table.keys is not keys
    assert not table.able(Role.PREFILL, 0, {}, 0.0), "it isn't linked"
    after = table.named("prefill-0")
    assert after is not None
    after.linked = True
    (only,) = table.able(Role.PREFILL, 0, {}, 0.0)
    assert only is after
    assert WorkerColumns(table)["load"].tolist() == [0]


def test_a_part_of_the_workers_is_a_sequence_of_them() -> None:
    rng, table = random.Random(3), WorkerTable(CONFIG)
    table.update([view(rng, number, Role.PREFILL) for number in range(5)])
    for entry in table:
        entry.linked = True
    able = table.able(Role.PREFILL, 0, {}, 0.0)
    assert [e.record.name for e in able[1:3]] == ["prefill-1", "prefill-2"]
    assert able[-1].record.name == "prefill-4"
    some = able.where(lambda e: e.record.name != "prefill-0")
    assert len(some) == 4
    assert not able.where(lambda e: False)
    assert not able.of_class({"another"})
    assert able.of_class(able.classes()) == able or len(able.of_class(able.classes())) == 5


def two_prefill_workers() -> tuple[WorkerTable, WorkerEntry, WorkerEntry]:
    """Both can take 1000 positions, and no more."""
    table, rng = WorkerTable(CONFIG), random.Random(4)
    table.update([
        replace(one, record=replace(one.record, fits=replace(one.record.fits, max_positions=1000)))
        for one in (view(rng, number, Role.PREFILL) for number in range(2))
    ])  # fmt: skip
    first, second = table
    first.linked = second.linked = True
    return table, first, second


def test_a_request_goes_where_it_fits_to_its_last_position() -> None:
    table, first, second = two_prefill_workers()
    assert list(table.able(Role.PREFILL, 1000, {}, 0.0)) == [first, second]
    assert not list(table.able(Role.PREFILL, 1001, {}, 0.0))


def test_while_some_worker_is_due_for_a_trial_no_other_is_tried_sooner_than_after_its_own_time() -> None:
    """One whose trial has failed is left alone for twice as long, unless nobody else can take a request."""
    table, first, second = two_prefill_workers()
    opened_s, trial = CONFIG.breaker_open_s, RequestId("a trial")
    for _ in range(CONFIG.breaker_failures):
        second.breaker.failed(RequestId("r"), 0.0)
    second.breaker.sent(trial)
    second.breaker.failed(trial, 1.0)
    for _ in range(CONFIG.breaker_failures):
        first.breaker.failed(RequestId("r"), 1.0)
    first.touch()
    second.touch()
    now = 1.0 + opened_s
    assert {first.breaker.state, second.breaker.state} == {CircuitState.OPEN}
    assert list(table.able(Role.PREFILL, 0, {}, now)) == [first]
    first.linked = False
    assert list(table.able(Role.PREFILL, 0, {}, now)) == [second], "nobody else could take it"
