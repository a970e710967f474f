"""One router for a module's tests, at rest and whole again after each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serving(FakeCluster(2, 2)) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    yield running
    running.call(running.cluster.heal)

    def everybody_stays() -> None:
        for entry in running.service.core.workers:
            entry.cancel_drain()

    running.call(everybody_stays)
    running.at_rest()
    running.wait_until(running.serves)
