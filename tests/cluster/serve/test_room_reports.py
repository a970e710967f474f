"""What the supervisor tells of nodes: by the plan that `serve` refuses by, and only what is news."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinpool.cluster.controller.node_room import NodeRoom, Occupant
from twinpool.cluster.serve import preflight
from twinpool.cluster.serve.memory_fit import LOOK_S, NEWS_BYTES, RoomReports, cluster_room, node_room
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, prepare
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.ids import PAIR, Role, WorkerName

GIB = 1 << 30
SIZES = ("cache.device_tokens=4096", "cache.host_bytes=67108864")


def plan(*assignments: str, free: int = 8 * GIB, decode: int = 1) -> ServePlan:
    return prepare(ServeOptions(port=0, decode=decode, assignments=(*SIZES, *assignments)), free, ())


@pytest.mark.parametrize("share", ["on", "off"])
def test_as_many_fit_beside_those_that_run_as_serve_would_start(share: str) -> None:
    """Oracle: `serve` with ever more workers, until it refuses."""
    asked = (f"engine.share_weights={share}", "cluster.workers_per_core=0")
    free = 3 * GIB
    most = 1
    while True:
        try:
            plan(*asked, free=free, decode=most + 1)
        except TwinpoolError:
            break
        most += 1
    there = [Occupant(WorkerName("prefill-0"), Role.PREFILL), Occupant(WorkerName("decode-0"), Role.DECODE)]
    more = [Occupant(WorkerName(f"decode-{number}"), Role.DECODE) for number in range(1, 100)]
    refusal = cluster_room(plan(*asked, free=free)).refusal(there, more)
    # A plan for fewer has the index of host tiers on top of what is counted for each.
    assert any(f", {count} would" in refusal for count in (most - 1, most)), (most, refusal)


@pytest.mark.parametrize("share", ["on", "off"])
def test_weights_are_off_the_memory_for_workers_once_or_of_each(share: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what the same node has for workers of a model without weights."""

    def room(weights: int) -> NodeRoom:
        monkeypatch.setattr(preflight, "weight_bytes", lambda spec, config: weights)
        return cluster_room(plan(f"engine.share_weights={share}", free=8 * GIB)).nodes[0]

    heavy, light = room(GIB), room(0)
    shared = GIB * (share == "on")
    assert light.memory - heavy.memory == shared
    for role in PAIR:
        assert heavy.roles[role].nbytes - light.roles[role].nbytes == GIB - shared


def test_what_was_planned_for_fits_whatever_else_is_free() -> None:
    prepared = plan(free=2 * GIB, decode=3)
    workers = [Occupant(name, role) for name, role in prepared.workers]
    assert cluster_room(prepared, free=0).refusal((), workers) == ""
    assert "none would" in cluster_room(prepared, free=0).refusal(workers, [workers[-1]._replace(name=WorkerName("x"))])


@pytest.mark.parametrize(("cores", "asked", "starts"), [(1, 0, 2), (2, 0, 2), (8, 0, 4), (8, 1, 1)])
def test_starts_at_once_go_by_the_cores_where_nothing_is_set(cores: int, asked: int, starts: int) -> None:
    prepared = plan(f"cluster.starts_at_once={asked}")
    here = replace(prepared.here, facts=replace(prepared.here.facts, cores=cores))
    node = node_room(here, prepared.config)
    assert (node.starts, node.processes) == (starts, 8 * cores)


def test_only_news_is_told() -> None:
    clock, free, prepared = ManualClock(), [GIB], plan()
    reports = RoomReports(lambda: prepared, lambda: free[0], clock)
    first = reports.changed()
    assert first is not None
    assert first.nodes[0].free == GIB
    free[0] -= NEWS_BYTES
    assert reports.changed() is None, "it looks now and then"
    clock.advance(LOOK_S)
    news = reports.changed()
    assert news is not None
    assert news.nodes[0].free == free[0]
    free[0] -= 1
    clock.advance(LOOK_S)
    assert reports.changed() is None, "next to nothing has changed"
    prepared = replace(prepared, config=replace(prepared.config))
    assert reports.changed() is not None, "the plan is another"
