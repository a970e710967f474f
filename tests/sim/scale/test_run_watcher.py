"""A run that is watched is the same run, and what it tells adds up to what its models did."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.sim.scale.test_cluster_model import SHAPE, planned
from twinpool.contracts.ids import Role
from twinpool.router.state.request_journal import JournalKind
from twinpool.sim.scale.cluster_model import ClusterModel
from twinpool.sim.scale.scale_figures import EndedRequest
from twinpool.sim.scale.traffic import drawn

POSITION_BYTES = 1000


class Watcher:
    """Implements `sim.scale.scale_figures.RunWatcher`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ends: list[EndedRequest] = []
        self.first_s: list[float] = []
        self.held = 0

    def came(self, router: int) -> None:
        self.counts[f"came {router}"] += 1

    def refused(self, router: int) -> None:
        self.counts["refused"] += 1

    def first_token(self, router: int, seconds: float, held: int) -> None:
        self.first_s.append(seconds)
        self.held += held

    def ended(self, ended: EndedRequest) -> None:
        self.counts[f"ended {ended.router}"] += 1
        self.ends.append(ended)


@pytest.fixture(scope="module")
def watched() -> tuple[ClusterModel, Watcher]:
    watcher = Watcher()
    model = ClusterModel(replace(planned(), routers=2, position_bytes=POSITION_BYTES), drawn(SHAPE))
    model.watcher = watcher
    model.run()
    model.close()
    return model, watcher


def test_a_run_that_is_watched_is_the_same_run(watched: tuple[ClusterModel, Watcher]) -> None:
    alone = ClusterModel(replace(planned(), routers=2), drawn(SHAPE))
    alone.run()
    alone.close()
    assert watched[0].report() == alone.report()


def test_each_request_is_told_of_once_by_its_router(watched: tuple[ClusterModel, Watcher]) -> None:
    model, watcher = watched
    assert sum(watcher.counts[f"came {router}"] for router in (0, 1)) == SHAPE.requests
    for router in (0, 1):
        assert watcher.counts[f"ended {router}"] == watcher.counts[f"came {router}"] > 0
    assert len({end.routed.id for end in watcher.ends}) == SHAPE.requests
    assert watcher.held == model.figures.held_tokens > 0
    assert sorted(watcher.first_s) == pytest.approx(sorted(model.figures.ttft_s), abs=1e-5)
    for end in watcher.ends:
        assert end.done.reason == "stop"
        assert end.routed.arrived < end.first_at <= end.ended_at
        assert len(end.routed.prompt) == end.request.prompt


def test_what_workers_report_is_what_their_models_did(watched: tuple[ClusterModel, Watcher]) -> None:
    """Their times are those of the virtual clock, in their order, from the leg's arrival to the request's end."""
    computed = sent = 0
    for end in watched[1].ends:
        journal = end.routed.journal
        (placed,) = [entry for entry in journal.entries if entry.kind is JournalKind.PLACED]
        prefill, *decode = end.routed.progress
        assert prefill.role is Role.PREFILL
        assert prefill.worker == placed.workers[Role.PREFILL]
        assert 0 <= prefill.marks["queue"] < prefill.marks["prefill"] <= end.first_at - placed.at
        assert sum(prefill.cached_by_tier.values()) == prefill.cached_tokens
        computed += prefill.computed_tokens
        if end.request.answer == 1:
            assert not decode, "prefill answers alone"
            continue
        marks: dict[str, float] = {}
        for report in decode:
            assert (report.role, report.worker) == (Role.DECODE, placed.workers[Role.DECODE])
            marks |= report.marks
            sent += report.transfer_bytes
        assert 0 <= marks["grant"] <= marks["arrived"] < marks["done"] <= end.ended_at - placed.at
        assert marks["exposed"] > 0
    model = watched[0]
    assert computed == sum(one.prefill.computed for one in model.pools.workers.values() if one.prefill is not None)
    assert sent == POSITION_BYTES * sum(request.prompt for request in drawn(SHAPE) if request.answer > 1)
    assert sent == sum(sum(one.sent.values()) for one in model.pools.workers.values())


def test_statuses_have_what_the_models_hold() -> None:
    plan = planned()
    pool = replace(plan.prefill, device_tokens=1 << 14, host_tokens=1 << 15)
    plan = replace(plan, prefill=pool, position_bytes=POSITION_BYTES)
    model, seen = ClusterModel(plan, drawn(SHAPE)), Counter[str]()
    last: dict[str, Counter[str]] = {}
    while not model.over:
        model.run(model.clock.now() + 3.0)
        for view in model.pools.core.views():
            status, counters = view.status, Counter(view.status.counters)
            assert 0 <= status.pages_free <= status.pages_total
            before = last.setdefault(view.record.name, Counter())
            grow = [name for name in counters if name.startswith(("link_bytes:", "hit_", "prompt_", "tokens_"))]
            assert all(counters[name] >= before[name] for name in grow), "counters only grow"
            last[view.record.name] = counters
            if view.record.role is Role.PREFILL:
                seen["held"] += status.pages_free < status.pages_total
                seen["host"] += counters["host_pages_used"] > 0
                assert counters["host_pages_used"] <= counters["host_pages_total"] == (1 << 15) // 16
                assert counters["device_pages_unused"] <= status.pages_total
    model.close()
    assert seen["held"] > 0 < seen["host"]
    totals = sum(last.values(), Counter[str]())
    told = sum(n for name, n in totals.items() if name.startswith("link_bytes:"))
    assert 0 < told <= POSITION_BYTES * model.figures.prompt_tokens
    assert 0 < totals["hit_tokens_host"] <= model.figures.loaded_tokens
    assert 0 < totals["hit_tokens_device"] <= model.figures.held_tokens - model.figures.loaded_tokens
    assert 0 < totals["tokens_generated"] <= model.figures.answer_tokens


def test_tokens_of_steps_that_are_under_way_are_counted_as_time_goes() -> None:
    """Between two events a worker's tokens grow step by step to what the model counts at the second."""
    model, grown, jumps = ClusterModel(planned(), drawn(SHAPE)), 0, 0
    counted: list[tuple[int, int]] = []
    while not model.over and len(counted) < 300:
        model.run(model.clock.now() + 0.25)
        model.clock.advance(0.0)
        for one in model.pools.workers.values():
            if one.decode is not None and one.decode.running:
                counted.append((one.decode.generated, one.decode.generated_by(model.clock.now())))
    model.close()
    for generated, by_now in counted:
        assert by_now >= generated
        grown += by_now > generated
        jumps += generated > 0
    assert grown > 50 < jumps
