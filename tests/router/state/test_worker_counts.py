"""How many workers serve, as refused requests are told."""

from __future__ import annotations

from tests.router.fake_worker import FakeCluster
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import Role
from twinpool.router.state.worker_table import COUNTED_S, WorkerTable


def test_workers_that_serve_are_counted_anew_ten_times_a_second() -> None:
    cluster, table = FakeCluster(1, 2), WorkerTable(RouterConfig())
    table.update(cluster.views())
    assert table.serving_counts(0.0) == {Role.PREFILL: 0, Role.DECODE: 0}, "none is linked"
    for entry in table:
        entry.linked = True
    assert table.serving_counts(COUNTED_S / 2) == {Role.PREFILL: 0, Role.DECODE: 0}
    assert table.serving_counts(COUNTED_S) == {Role.PREFILL: 1, Role.DECODE: 2}
