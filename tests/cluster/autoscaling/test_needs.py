"""What a pool needs, from what was measured: each rule alone, and whose lack it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.cluster.autoscaling.load_window import LatencyTotals, LoadWindow, MeasuredLoad, Outcomes, WorkerLoad
from twinpool.cluster.autoscaling.pool_need import decode_need, prefill_need
from twinpool.contracts.config.autoscaling_config import AutoscalingConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.router_report import LatencyCounts

CONFIG = AutoscalingConfig(enabled=True)
CALM = MeasuredLoad(
    prefill=2, decode=2, offered=1000.0, computed=1000.0, rate=1000.0, requests=0.0, backlog=0, pages=2000,
    used_pages=800, running=2, granted=0, generated=50.0, lacking=0.0, ungranted=0, lacked=False, put_off=0,
    first=Outcomes(), gaps=Outcomes(),
)  # fmt: skip


def prefill(**changes: object) -> float:
    return prefill_need(CONFIG, replace(CALM, **changes)).workers  # type: ignore[arg-type]


def decode(**changes: object) -> float:
    return decode_need(CONFIG, replace(CALM, **changes), 16).workers  # type: ignore[arg-type]


def test_prefill_is_to_be_busy_for_its_share_of_time() -> None:
    assert prefill() == pytest.approx(1 / 0.7)


def test_prompts_that_wait_ask_for_more_than_their_mean() -> None:
    assert prefill(requests=2.0) > prefill()


def test_a_queue_is_to_be_gone_by_the_next_growth() -> None:
    assert prefill(backlog=30_000) == pytest.approx(1.0 + 30_000 / (1000 * CONFIG.grow_cooldown_s))
    assert prefill(backlog=900) == prefill(), "a queue within its target asks for nothing"


def test_late_first_tokens_are_prefills_lack_only_where_it_works_and_decode_had_pages() -> None:
    late = Outcomes(100, 30)
    assert prefill(first=late) == 3.0
    assert prefill(first=late, lacked=True) == prefill()
    assert prefill(first=late, computed=100.0) == prefill()
    assert prefill(first=Outcomes(100, 8)) == prefill(), "5 of 100 may be late, and 8 are chance"


def test_a_need_says_what_it_comes_from_with_its_numbers() -> None:
    late = prefill_need(CONFIG, replace(CALM, first=Outcomes(100, 30)))
    assert (late.why, late.urgent) == ("30% of first tokens are late", True)
    slow = decode_need(CONFIG, replace(CALM, gaps=Outcomes(1000, 200), running=8), 16)
    assert (slow.why, slow.urgent) == ("20% of tokens are late, with 4.0 requests a worker", True)
    put_off = decode_need(CONFIG, replace(CALM, put_off=2), 16)
    assert (put_off.why, put_off.urgent) == ("2 requests were put off for want of pages", True)
    calm = decode_need(CONFIG, CALM, 16)
    assert (calm.why, calm.urgent) == ("requests ask for 40% of its pages", False)
    assert not prefill_need(CONFIG, CALM).urgent


@pytest.mark.parametrize("changes", [{"decode": 0}, {"pages": 0}])
def test_what_is_not_known_of_decode_is_no_need_either(changes: dict[str, object]) -> None:
    assert not decode_need(CONFIG, replace(CALM, **changes), 16).known  # type: ignore[arg-type]


def test_prefill_stands_still_where_it_computes_less_than_half_of_its_share_and_not_at_that() -> None:
    stuck = {"backlog": 30_000, "ungranted": 5}
    half = CONFIG.prefill_use / 2 * CALM.prefill * CALM.rate
    assert decode(computed=half - 1, **stuck) == 3.0
    assert decode(computed=half, **stuck) == decode(backlog=30_000)
    assert decode(computed=half - 1, backlog=30_000) == decode(backlog=30_000), "nobody waits for pages"
    assert decode(computed=half - 1, ungranted=5) == decode(), "no prompt waits"


def test_prefill_that_stands_still_for_want_of_pages_needs_no_more_workers() -> None:
    stuck = {"backlog": 30_000, "ungranted": 5, "computed": 10.0}
    assert prefill(**stuck) == prefill()
    assert decode(**stuck) == 3.0


def test_requests_hold_a_share_of_decodes_pages() -> None:
    assert decode() == pytest.approx(0.8 / 0.8)
    assert decode(used_pages=1900) == pytest.approx(1.9 / 0.8)


def test_pages_for_prompts_that_prefill_has_yet_to_compute_are_not_decodes_lack() -> None:
    assert decode(used_pages=1900, backlog=16 * 1100) == pytest.approx(0.8 / 0.8)


def test_requests_that_wait_for_pages_count_as_those_that_run() -> None:
    assert decode(used_pages=1600, running=10, lacking=10.0) == pytest.approx(3.2 / 0.8)
    assert decode(running=10, lacking=1.0) == 3.0
    few = {"used_pages": 1600, "running": 1, "lacking": 10.0}
    assert decode(granted=9, **few) == pytest.approx(3.2 / 0.8), "those that have pages and don't run hold some, too"


def test_requests_that_were_put_off_ask_for_one_more() -> None:
    assert decode(put_off=1) == 3.0


def test_late_tokens_ask_for_one_more_where_workers_run_several_requests() -> None:
    late = Outcomes(1000, 200)
    assert decode(gaps=late, running=8) == 3.0
    assert decode(gaps=late, running=2) == decode(), "one request alone is no quicker elsewhere"


@pytest.mark.parametrize("changes", [{"prefill": 0}, {"rate": 0.0}])
def test_what_is_not_known_is_no_need(changes: dict[str, object]) -> None:
    assert not prefill_need(CONFIG, replace(CALM, **changes)).known  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"prefill": 0}, {"rate": 0.0}])
def test_no_worker_is_busy_and_no_queue_has_a_length_while_no_rate_is_known(changes: dict[str, object]) -> None:
    load = replace(CALM, backlog=100, **changes)  # type: ignore[arg-type]
    assert (load.busy, load.queue_s) == (0.0, 0.0)


# ---------------------------------------------------------------- what is measured


def worker(role: Role, told: int, number: int = 0, **changes: object) -> WorkerLoad:
    row = WorkerLoad(WorkerName(f"{role}-{number}"), Incarnation(1), role, told, 0, 100, 100, 0)
    return replace(row, **changes)  # type: ignore[arg-type]


def test_a_rate_is_between_the_times_when_a_worker_told() -> None:
    """A counter that is told every 5 s and looked at every second has the same rate at each look."""
    window, rates = LoadWindow(20.0), []
    for second in range(40):
        told = second // 5
        row = worker(Role.PREFILL, told, computed=500.0 * told)
        rates.append(window.take(float(second), [row], LatencyCounts()).computed)
    assert set(rates[10:]) == {100.0}


def test_what_a_queue_grows_by_is_offered_too() -> None:
    window = LoadWindow(20.0)
    for second in range(0, 25, 5):
        row = worker(Role.PREFILL, second, computed=100.0 * second, prompt_tokens=50 * second)
        load = window.take(float(second), [row], LatencyCounts())
    assert (load.computed, load.offered) == (100.0, 150.0)


def test_a_worker_that_is_started_again_counts_from_nothing() -> None:
    window = LoadWindow(20.0)
    window.take(0.0, [worker(Role.PREFILL, 1, computed=1e9)], LatencyCounts())
    again = replace(worker(Role.PREFILL, 2, computed=10.0), incarnation=Incarnation(2))
    assert window.take(5.0, [again], LatencyCounts()).computed == 0.0


def test_prompts_in_the_queue_are_told_from_requests_that_lack_pages() -> None:
    window = LoadWindow(20.0)
    for second in range(0, 25, 5):
        rows = [
            worker(Role.PREFILL, second, computed=200.0 * second, prompt_tokens=2000),
            worker(Role.DECODE, second, ungranted=25),
        ]
        load = window.take(float(second), rows, LatencyCounts(requests=2 * second))
    assert load.lacking == pytest.approx(5.0), "the queue is 20 prompts of 100 tokens"


def test_routers_add_up_from_where_they_were_first_heard() -> None:
    totals = LatencyTotals()
    totals.report("one", LatencyCounts(1000, 1000, 500, 0, 0))
    totals.report("two", LatencyCounts(5, 5, 1, 0, 0))
    totals.report("one", LatencyCounts(1010, 1009, 502, 0, 0))
    totals.report("two", LatencyCounts(6, 6, 1, 3, 1))
    assert totals.total == LatencyCounts(11, 10, 2, 3, 1)
