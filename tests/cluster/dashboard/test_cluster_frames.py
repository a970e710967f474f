"""The dashboard's frames against a plain count of the same workers and routers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from cluster.dashboard.cluster_frames import ClusterFrames, ClusterState
from cluster.dashboard.event_log import EventKind
from cluster.dashboard.history import COLUMNS, KEPT_S, SAMPLE_S
from cluster.dashboard.worker_rates import WorkerSample
from cluster.dashboard.worker_rows import MOST_LINKS
from contracts.compact_json import compact_json
from contracts.damage import COUNTERS as DAMAGE_COUNTERS
from contracts.messages.latency_shape import BUCKETS
from contracts.messages.router_report import COUNTERS, RouterReport
from contracts.messages.worker_status import WorkerView
from tests.cluster.dashboard.made_workers import worker

WALL = 1_700_000_000.0


def state(views: Sequence[WorkerView], said: float, **more: Any) -> ClusterState:
    return ClusterState([WorkerSample(view, said) for view in views], **more)


def report(router: str, *, first: Sequence[int] = (), **counters: int) -> RouterReport:
    shape = [0] * BUCKETS
    for bucket in first:
        shape[bucket] += 1
    return RouterReport(router, "node", 7, "b", "demo", 2, 1, counters, tuple(shape), tuple([0] * BUCKETS))


@pytest.fixture
def frames() -> ClusterFrames:
    return ClusterFrames("c", "boot", "b", 0.0)


def texts(frame: dict[str, Any]) -> list[str]:
    return [event["text"] for event in frame["events"]]


def test_pages_of_a_worker_sum_up_whoever_holds_them(frames: ClusterFrames) -> None:
    counters = {"device_pages_unused": 10.0, "host_pages_total": 50, "host_pages_used": 20, "host_pages_swapped": 5}
    view = worker("decode-0", pages_free=60, counters=counters)
    frames.take(state([view], 1.0), 1.0, WALL)
    row = frames.frame()["workers"][0]
    assert row["pages"] == {"total": 100, "requests": 40, "cached": 50, "unused": 10}
    assert row["host"] == {"total": 50, "swapped": 5, "cached": 15}


def test_counters_that_are_older_than_the_free_pages_make_no_page_negative(frames: ClusterFrames) -> None:
    frames.take(state([worker("decode-0", pages_free=3, counters={"device_pages_unused": 90.0})], 1.0), 1.0, WALL)
    assert frames.frame()["workers"][0]["pages"] == {"total": 100, "requests": 97, "cached": 0, "unused": 3}


def test_rates_are_growth_by_the_time_between_what_was_said(frames: ClusterFrames) -> None:
    def at(now: float, said: float, tokens: float, sent: float) -> None:
        counters = {"tokens_generated": tokens, "link_bytes:decode-1": sent}
        frames.take(state([worker("decode-0", counters=counters), worker("decode-1")], said), now, WALL + now)

    at(10.0, 9.0, 100, 1000)
    assert frames.frame()["links"] == [["decode-0", "decode-1", 0, 1000]]
    at(11.0, 9.0, 100, 1000)  # Nothing new was said.
    at(12.0, 11.5, 150, 6000)
    frame = frames.frame()
    assert frame["workers"][0]["tokens_s"] == 20.0
    assert frame["links"] == [["decode-0", "decode-1", 2000, 6000]]
    assert frame["now"]["bytes_s"] == 2000


def test_a_worker_that_starts_again_has_no_rate_below_zero_and_none_of_its_last_life(frames: ClusterFrames) -> None:
    for now, incarnation, tokens in ((1.0, 1, 500), (2.0, 1, 600), (3.0, 2, 10), (4.0, 2, 40)):
        view = worker("decode-0", incarnation=incarnation, counters={"tokens_generated": tokens})
        frames.take(state([view], now), now, WALL)
    assert frames.frame()["workers"][0]["tokens_s"] == 30.0


def test_a_worker_that_has_fallen_silent_has_no_rate(frames: ClusterFrames) -> None:
    for now, tokens in ((1.0, 0), (2.0, 100)):
        frames.take(state([worker("decode-0", counters={"tokens_generated": tokens})], now), now, WALL)
    frames.take(state([worker("decode-0", counters={"tokens_generated": 100})], 2.0), 30.0, WALL)
    assert frames.frame()["workers"][0]["tokens_s"] == 0.0


def test_totals_are_those_of_all_routers_also_of_those_that_have_ended(frames: ClusterFrames) -> None:
    frames.report(report("a", requests_submitted=5, generated_tokens=50), 1.0, WALL)
    frames.report(report("b", requests_submitted=7), 1.0, WALL)
    frames.report(report("b", requests_submitted=9), 2.0, WALL)
    frames.report(report("c", requests_submitted=1), 40.0, WALL)
    frames.take(state([], 40.0), 40.0, WALL)
    frame = frames.frame()
    assert {name: n for name, n in frame["totals"].items() if n} == {"requests_submitted": 15, "generated_tokens": 50}
    assert set(frame["totals"]) == set(COUNTERS)
    assert len(frame["routers"]) == 1
    assert sum("silent" in text for text in texts(frame)) == 2


def test_a_router_that_was_there_before_the_controller_has_not_just_counted_it_all(frames: ClusterFrames) -> None:
    frames.take(state([], 0.0), 0.0, WALL)
    frames.report(report("a", requests_submitted=10_000, first=[4] * 50), 1.0, WALL)
    frames.take(state([], 1.0), 1.0, WALL)
    assert frames.frame()["now"]["requests_s"] == 0.0
    assert frames.frame()["now"]["ttft"]["count"] == 0
    frames.report(report("a", requests_submitted=10_008, first=[4] * 50 + [9] * 3), 3.0, WALL)
    frames.take(state([], 3.0), 3.0, WALL)
    now = frames.frame()["now"]
    assert now["requests_s"] == pytest.approx(8 / 3, abs=0.01)
    assert now["ttft"]["count"] == 3


def test_percentiles_are_of_the_latest_seconds_alone(frames: ClusterFrames) -> None:
    slow, quick = [30] * 100, [5] * 100
    frames.report(report("a"), 0.0, WALL)
    frames.take(state([], 0.0), 0.0, WALL)
    frames.report(report("a", first=slow), 1.0, WALL)
    for now in range(1, 40):
        if now == 30:
            frames.report(report("a", first=slow + quick), 30.0, WALL)
        frames.take(state([], now), float(now), WALL)
    ttft = frames.frame()["now"]["ttft"]
    assert ttft["count"] == 100
    assert ttft["p99"] < 0.001


def test_what_happens_to_workers_is_told_once_and_in_order(frames: ClusterFrames) -> None:
    steps = [
        [worker("decode-0")],
        [worker("decode-0"), worker("decode-1", "starting")],
        [worker("decode-0", "draining"), worker("decode-1")],
        [worker("decode-0", "draining"), worker("decode-1")],
        [worker("decode-0", "left"), worker("decode-1")],
        [worker("decode-0", "ready", 2), worker("decode-1")],
    ]
    for now, views in enumerate(steps):
        frames.take(state(views, now), float(now), WALL + now)
    assert texts(frames.frame()) == [
        "decode-1 starts",
        "decode-0 drains: it takes nothing new, and what runs goes to others",
        "decode-1 serves",
        "decode-0 serves, incarnation 2",
    ]
    assert [event["n"] for event in frames.frame()["events"]] == [1, 2, 3, 4]


def test_damage_is_counted_by_site_over_restarts_and_told(frames: ClusterFrames) -> None:
    counter, site = next(iter(DAMAGE_COUNTERS.items()))
    frames.take(state([worker("decode-0", counters={counter: 0})], 1.0), 1.0, WALL)
    assert set(frames.frame()["damage"].values()) == {0}
    frames.take(state([worker("decode-0", counters={counter: 2})], 2.0), 2.0, WALL)
    frames.take(state([worker("decode-0", incarnation=2, counters={counter: 1})], 3.0), 3.0, WALL)
    frame = frames.frame()
    assert frame["damage"][site] == 3
    assert sum(frame["damage"].values()) == 3
    assert sum("damaged" in text for text in texts(frame)) == 2


def test_the_past_has_a_row_every_few_seconds_and_no_more_than_a_quarter_of_an_hour(frames: ClusterFrames) -> None:
    rng, now = random.Random(1), 0.0
    while now < 2 * KEPT_S:
        frames.take(state([worker("prefill-0", pages_free=75)], now), now, WALL + now)
        now += rng.choice((1.0, 1.1, SAMPLE_S))
    past = frames.past()["history"]
    assert set(past) == set(COLUMNS)
    assert {len(column) for column in past.values()} == {int(KEPT_S / SAMPLE_S)}
    gaps = [b - a for a, b in zip(past["at"], past["at"][1:], strict=False)]
    assert min(gaps) >= SAMPLE_S - 0.5
    assert set(past["pages_prefill"]) == {0.25}
    assert set(past["pages_decode"]) == {None}


def test_a_frame_is_bounded_however_large_the_cluster_is(frames: ClusterFrames) -> None:
    counters = {f"link_bytes:decode-{i}": float(i + 1) for i in range(40)}
    views = [worker(f"prefill-{i}", counters=counters) for i in range(40)]
    for number in range(500):
        frames.log.add(WALL, EventKind.WORKER, "x" * 10_000)
        frames.report(report(f"router-{number}"), 1.0, WALL)
    frames.take(state(views, 1.0), 1.0, WALL)
    frame = frames.frame()
    assert len(frame["links"]) == MOST_LINKS
    assert frame["links_left_out"] == 1600 - MOST_LINKS
    assert len(frame["routers"]) <= 64
    assert len(compact_json(frame)) < 100_000
    assert len(compact_json(frames.past())) < 120_000
