"""The dashboard's frames against a plain count of the same workers and routers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cluster.dashboard.made_workers import worker
from twinpool.cluster.controller.autoscaler import Autoscaler
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.dashboard.cluster_frames import COLUMNS, KEPT_S, SAMPLE_S, ClusterFrames, ClusterState, EventKind
from twinpool.cluster.dashboard.frame_rows import MAX_LINKS, MAX_ROUTERS, RouterTotals, WorkerSample
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.compact_json import compact_json
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.damage import COUNTERS as DAMAGE_COUNTERS
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.router_report import (
    BOUNDS_S,
    BUCKETS,
    COUNTERS,
    AutoscalerView,
    PoolSizing,
    RouterReport,
)
from twinpool.contracts.messages.worker_status import WorkerView

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


def test_a_frame_says_whose_it_is_and_for_how_long_there_was_one() -> None:
    frames = ClusterFrames("production", "boot-7", "0.1.0+abc", 40.0)
    frames.take(state([], 100.5), 100.5, WALL)
    frame = frames.frame()
    assert (frame["cluster"], frame["boot"], frame["n"], frame["at"]) == ("production", "boot-7", 1, WALL)
    assert frame["up_s"] == 60.5
    assert frames.frame()["n"] == 2


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
    assert now["requests_s"] == 4.0, "of two seconds"
    assert now["ttft"]["count"] == 3


def test_each_percentile_is_of_its_share(frames: ClusterFrames) -> None:
    frames.report(report("a"), 0.0, WALL)
    frames.take(state([], 0.0), 0.0, WALL)
    frames.report(report("a", first=[5] * 80 + [10] * 15 + [20] * 5), 1.0, WALL)
    frames.take(state([], 1.0), 1.0, WALL)
    ttft = frames.frame()["now"]["ttft"]
    assert ttft["count"] == 100
    for name, bucket in (("p50", 5), ("p90", 10), ("p99", 20)):
        assert BOUNDS_S[bucket - 1] < ttft[name] <= BOUNDS_S[bucket]


def test_the_time_of_an_output_token_is_told_apart_from_that_between_deliveries(frames: ClusterFrames) -> None:
    def told(pace: Sequence[int], gaps: Sequence[int]) -> RouterReport:
        shapes = [[counts.count(bucket) for bucket in range(BUCKETS)] for counts in (pace, gaps)]
        return replace(report("a"), output_tokens=tuple(shapes[0]), gaps=tuple(shapes[1]))

    frames.report(told([], []), 0.0, WALL)
    frames.take(state([], 0.0), 0.0, WALL)
    frames.report(told([16] * 10, [0] * 90 + [40] * 10), 1.0, WALL)
    frames.take(state([], 1.0), 1.0, WALL)
    now = frames.frame()["now"]
    assert now["tpot"]["count"] == 10
    assert BOUNDS_S[15] < now["tpot"]["p50"] <= BOUNDS_S[16]
    assert now["itl"]["count"] == 100
    assert now["itl"]["p50"] <= BOUNDS_S[0] < BOUNDS_S[39] < now["itl"]["p99"]
    frames.take(state([], 5.0), 5.0, WALL)
    assert frames.past()["history"]["tpot_p50"][-1] == now["tpot"]["p50"]


def test_a_build_that_tells_no_times_of_output_tokens_has_none_and_takes_none_from_others(
    frames: ClusterFrames,
) -> None:
    for now, count in ((0.0, 0), (1.0, 7)):
        frames.report(replace(report("new"), output_tokens=(count, *[0] * (BUCKETS - 1))), now, WALL)
        frames.report(report("old", requests_submitted=count), now, WALL)
        frames.take(state([], now), now, WALL)
    assert frames.frame()["now"]["tpot"]["count"] == 7
    assert frames.frame()["now"]["requests_s"] == 7.0


def test_the_use_of_processors_is_that_of_the_latest_seconds_where_it_is_known(frames: ClusterFrames) -> None:
    for now, cpu_s in ((0.0, 100.0), (2.0, 103.0)):
        frames.report(replace(report("a"), cpu_s=cpu_s), now, WALL)
        frames.report(report("old"), now, WALL)
        counters = {"cpu_seconds": 3 * cpu_s, "gpu_utilization": 0.754}
        frames.take(state([worker("decode-0", counters=counters), worker("prefill-0")], now), now, WALL)
    frame = frames.frame()
    assert [router["cpu"] for router in frame["routers"]] == [1.5, None]
    assert (frame["now"]["cpu_workers"], frame["now"]["cpu_routers"]) == (4.5, 1.5)
    rows = {row["name"]: row for row in frame["workers"]}
    assert (rows["decode-0"]["cpu"], rows["decode-0"]["gpu"]) == (4.5, 0.75)
    assert {"cpu", "gpu"} & set(rows["prefill-0"]) == set()


def test_hits_are_a_share_of_what_was_asked_for(frames: ClusterFrames) -> None:
    for now, part in ((0.0, 0), (10.0, 1)):
        one = {"prompt_tokens_computed": 500 * part, "hit_tokens_device": 200 * part, "hit_tokens_storage": 50 * part}
        other = {"prompt_tokens_computed": 100 * part, "hit_tokens_host": 150 * part}
        views = [worker("prefill-0", counters=one), worker("prefill-1", counters=other)]
        frames.take(state(views, now), now, WALL)
    numbers = frames.frame()["now"]
    assert numbers["prompt_tokens_s"] == 60.0
    assert numbers["hit_share"] == 0.4
    frames.take(state([worker("decode-0")], 40.0), 40.0, WALL)
    assert frames.frame()["now"]["hit_share"] is None, "nothing was asked for"


def test_a_workers_row_has_what_is_to_be_known_of_it(frames: ClusterFrames) -> None:
    view = worker(
        "decode-3", "draining", 4, running=7, waiting=2, outgoing=5, prompt_tokens=300, plane="shm", stalled_s=1.26,
        last_end="e" * 300, waits="w" * 300, counters={"retracted": 3, "ungranted": 0, "kept_answers": 9},
    )  # fmt: skip
    frames.take(state([replace(view, cordoned=True)], 1.0), 1.0, WALL)
    (row,) = frames.frame()["workers"]
    assert row["name"] == "decode-3"
    assert (row["role"], row["state"], row["incarnation"], row["plane"]) == ("decode", "draining", 4, "shm")
    assert (row["running"], row["waiting"], row["outgoing"], row["prompt_tokens"]) == (7, 2, 5, 300)
    assert (row["stalled_s"], row["last_end"], row["waits"]) == (1.3, "e" * 200, "w" * 200)
    assert (row["retracted"], row["kept_answers"], row["cordoned"]) == (3, 9, True)
    assert "ungranted" not in row, "what is nothing isn't told"
    assert "host" not in row, "it has no host tier"


def test_a_pools_row_adds_up_those_that_serve(frames: ClusterFrames) -> None:
    views = [
        worker("decode-0", running=3, waiting=1, pages_free=40),
        worker("decode-1", "draining", running=2, waiting=4, pages_free=90),
        worker("decode-2", "dead", running=100, pages_free=0),
        worker("prefill-0", running=1),
    ]
    sizing = PoolSizing(Role.DECODE, 2, 3, 1, 8, 2.346, "71 % of pages")
    frames.take(state(views, 1.0, autoscaler=AutoscalerView((sizing,), held_s=12.34)), 1.0, WALL)
    prefill, decode = frames.frame()["pools"]
    assert (prefill["role"], prefill["running"], "wanted" in prefill) == ("prefill", 1, False)
    assert decode["states"] == {"dead": 1, "draining": 1, "ready": 1}
    assert (decode["running"], decode["waiting"]) == (5, 5)
    assert (decode["pages_total"], decode["pages_requests"]) == (200, 70)
    assert (decode["wanted"], decode["least"], decode["most"], decode["need"]) == (3, 1, 8, 2.35)
    assert decode["why"] == "71 % of pages"
    assert frames.frame()["autoscaler"]["held_s"] == 12.3
    unknown = AutoscalerView((replace(sizing, need=-1.0),))
    frames.take(state(views, 2.0, autoscaler=unknown), 2.0, WALL)
    assert frames.frame()["pools"][1]["need"] is None


def test_operators_are_told_each_routers_rate_of_tokens(frames: ClusterFrames) -> None:
    for second in range(11):
        for name, rate in (("busy", 120), ("idle", 0)):
            frames.report(report(name, generated_tokens=7 + rate * second), float(second), WALL)
    assert {one.router: round(one.tokens_per_s) for one in frames.routers(10.0)} == {"busy": 120, "idle": 0}


def test_routers_beyond_those_that_are_told_apart_stay_in_the_sums(frames: ClusterFrames) -> None:
    for number in range(MAX_ROUTERS + 20):
        frames.report(report(f"router-{number}", requests_submitted=2), 1.0 + number / 1000, WALL)
    frames.take(state([], 2.0), 2.0, WALL)
    frame = frames.frame()
    assert frame["totals"]["requests_submitted"] == 2 * (MAX_ROUTERS + 20)
    assert len(frames.routers(2.0)) == MAX_ROUTERS
    assert "router-0" not in {one.router for one in frames.routers(2.0)}, "the one that was silent for longest"


def test_rates_are_the_same_however_often_routers_report_and_the_cluster_is_looked_at(frames: ClusterFrames) -> None:
    """Two routers with three requests and a hundred tokens a second each report every five seconds, at times of their
    own; nobody looks, and then somebody does, whereupon both report each second."""
    shown = []
    for tenth in range(600):
        now = tenth / 10
        pause = 50 if now < 42.0 else 10
        for router, first in (("a", 3), ("b", 31)):
            if tenth % pause == first % pause:
                count = int(3 * now), int(100 * now)
                frames.report(report(router, requests_submitted=count[0], generated_tokens=count[1]), now, WALL)
        if tenth % (50 if now < 42.0 else 10) == 0 or tenth == 421:
            frames.take(state([], now), now, WALL + now)
            if now > 12:
                numbers = frames.frame()["now"]
                shown.append((numbers["requests_s"], numbers["tokens_s"]))
    assert len(shown) > 20
    for requests_s, tokens_s in shown:
        assert requests_s == pytest.approx(6, abs=0.5)
        assert tokens_s == pytest.approx(200, abs=1)
    history = frames.past()["history"]["tokens_s"][3:]
    assert len(history) > 5
    assert history == pytest.approx([200] * len(history), abs=1)


def test_a_router_that_has_fallen_silent_has_no_rate(frames: ClusterFrames) -> None:
    for now, count in ((0.0, 0), (5.0, 50)):
        frames.report(report("a", requests_submitted=count), now, WALL)
    for now, rate in ((6.0, 10.0), (19.0, 10.0), (21.0, 0.0)):
        frames.take(state([], now), now, WALL)
        assert frames.frame()["now"]["requests_s"] == rate


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
    told = [text.partition(";")[0] for text in texts(frame) if "damaged" in text]
    assert told == [f"workers have found damaged state {times} times" for times in (2, 1)]


def test_damage_of_several_workers_at_one_site_is_added_up(frames: ClusterFrames) -> None:
    counter, site = next(iter(DAMAGE_COUNTERS.items()))
    found = {"prefill-0": 1, "decode-0": 4, "decode-1": 2}
    views = [worker(name, counters={counter: count}) for name, count in found.items()]
    frames.take(state(views, 1.0), 1.0, WALL)
    assert frames.frame()["damage"][site] == sum(found.values())


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


def test_whole_minutes_are_kept_for_hours_with_means_and_the_worst_p99(frames: ClusterFrames) -> None:
    frames.report(report("a"), 0.0, WALL)
    bucket = [5] * 90 + [40] * 10
    began = WALL - WALL % 60
    for step in range(30):
        now = step * SAMPLE_S
        if step == 3:
            frames.report(report("a", first=bucket), now, began + now)
        frames.take(state([worker("decode-0", running=step)], now), now, began + now)
    minutes = frames.past()["minutes"]
    assert set(minutes) == set(COLUMNS)
    assert minutes["at"] == [began + 30, began + 90]
    assert minutes["running"] == [sum(range(12)) / 12, sum(range(12, 24)) / 12]
    assert minutes["ttft_p99"][0] > BOUNDS_S[39]
    assert minutes["ttft_p99"][1] is None
    for step in range(30, 30 + 7 * 3600 // 5):
        frames.take(state([], step * SAMPLE_S), step * SAMPLE_S, began + step * SAMPLE_S)
    assert len(frames.past()["minutes"]["at"]) == 360


def test_the_mean_of_a_minute_is_of_the_moments_at_which_there_was_something_to_know(frames: ClusterFrames) -> None:
    """A pool that serves for half a minute, with half of its pages held, is not a quarter full."""
    began = WALL - WALL % 60
    for step in range(13):
        views = [worker("decode-0", pages_free=50)] if step >= 6 else []
        frames.take(state(views, step * SAMPLE_S), step * SAMPLE_S, began + step * SAMPLE_S)
    minutes = frames.past()["minutes"]
    assert minutes["pages_decode"] == [0.5]
    assert minutes["pages_prefill"] == [None]
    assert minutes["serving_decode"] == [0.5], "of how many serve there is always something to know"


def test_the_past_has_colocated_workers_among_those_that_decode(frames: ClusterFrames) -> None:
    frames.take(state([worker("colocated-0", pages_free=75), worker("colocated-1", "dead")], 0.0), 0.0, WALL)
    past = frames.past()["history"]
    assert (past["pages_decode"], past["serving_decode"]) == ([0.25], [1])
    assert (past["pages_prefill"], past["serving_prefill"]) == ([None], [0])


def test_the_targets_are_those_that_are_configured(frames: ClusterFrames) -> None:
    frames.take(state([], 0.0), 0.0, WALL)
    assert frames.frame()["targets"] == {}
    core = Controller(ManualClock(0.0), ClusterConfig(), MemoryLedger())
    scaler = Autoscaler(
        core, ManualClock(0.0), config_from_dict({"autoscaling": {"enabled": True, "ttft_target_s": 1.5}})
    )
    frames.report(report("b"), 1.0, WALL)
    frames.report(replace(report("a"), ttft_slo_s=0.8), 1.0, WALL)
    frames.report(replace(report("c"), ttft_slo_s=2.5), 1.0, WALL)
    frames.report(replace(report("d"), ttft_slo_s=0.8), 1.0, WALL)
    frames.take(state([], 1.0, targets=scaler.targets), 1.0, WALL)
    assert frames.frame()["targets"] == {
        "ttft": [
            {"s": 1.5, "share": 0.95, "by": "autoscaling.ttft_target_s"},
            {"s": 0.8, "share": None, "by": "router.ttft_slo_ms"},
            {"s": 2.5, "share": None, "by": "router.ttft_slo_ms"},
        ],
        "itl": [{"s": 0.2, "share": 0.95, "by": "autoscaling.itl_target_s"}],
    }


def test_a_frame_is_bounded_however_large_the_cluster_is(frames: ClusterFrames) -> None:
    counters = {f"link_bytes:decode-{i}": float(i + 1) for i in range(40)}
    views = [worker(f"prefill-{i}", counters=counters) for i in range(40)]
    for number in range(500):
        frames.log.add(WALL, EventKind.WORKER, "x" * 10_000)
        frames.report(report(f"router-{number}"), 1.0, WALL)
    frames.take(state(views, 1.0), 1.0, WALL)
    frame = frames.frame()
    assert len(frame["links"]) == MAX_LINKS
    assert frame["links_left_out"] == 1600 - MAX_LINKS
    assert len(frame["routers"]) <= 64
    assert len(compact_json(frame)) < 100_000
    assert len(compact_json(frames.past())) < 120_000
    for minute in range(400):
        frames.take(state(views, 60.0 * minute), 60.0 * minute, WALL + 60 * minute)
    assert len(compact_json(frames.past())) < 200_000


def test_a_router_that_reports_again_after_it_was_forgotten_counts_once() -> None:
    totals = RouterTotals(5.0, 60.0)
    totals.report(report("old", requests_submitted=10), 0.0)
    for number in range(MAX_ROUTERS):
        totals.report(report(f"router-{number}", requests_submitted=1), 1.0 + number)
    assert totals.totals()["requests_submitted"] == 10 + MAX_ROUTERS, "it is among the sums alone"
    totals.report(report("old", requests_submitted=12), 1000.0)
    assert totals.totals()["requests_submitted"] == 12 + MAX_ROUTERS
    totals.report(report("old", requests_submitted=15), 1001.0)
    assert totals.totals()["requests_submitted"] == 15 + MAX_ROUTERS
