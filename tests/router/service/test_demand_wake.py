"""A cluster that sleeps for want of requests: who wakes it, who waits for that and how long, and who doesn't."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, eventually, router_config, serving
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.pool_changes import SleepCluster
from twinpool.router.openai.api_errors import ClientGone
from twinpool.router.service import demand_wake
from twinpool.router.service.demand_wake import DemandWake

COMPLETIONS = "/v1/completions"
ASK = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}


class SleepyCluster(FakeCluster):
    """A cluster that sleeps, and wakes when it is asked to, once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_wake = True

    def sleep(self, *, by_demand: bool = True) -> None:
        self.serving = ServedWeights(asleep=1, by_demand=by_demand)
        for worker in self.workers.values():
            worker.die("asleep")
        self.changed()

    def wake(self) -> None:
        """The controller has woken it, and its workers come one after the other."""
        self.serving = replace(self.serving, asleep=0, by_demand=False)
        self.changed()
        for worker in self.workers.values():
            worker.restart()
            self.changed()

    async def change_pools(self, change: Any) -> Any:
        changed = await super().change_pools(change)
        if isinstance(change, SleepCluster) and change.demand and self.may_wake and self.serving.by_demand:
            self.wake()
        return changed

    @property
    def asked(self) -> list[SleepCluster]:
        return [one for one in self.changes if isinstance(one, SleepCluster)]


@contextmanager
def sleeping(*, by_demand: bool = True, **router: Any) -> Iterator[tuple[Server, SleepyCluster]]:
    """A router whose cluster has served and sleeps now."""
    cluster = SleepyCluster()
    with serving(cluster, config=router_config(**router)) as server:
        server.call(lambda: cluster.sleep(by_demand=by_demand))
        yield server, cluster
        server.at_rest()
        assert server.service.answering == 0


@contextmanager
def requests(server: Server, count: int) -> Iterator[list[Future[httpx.Response]]]:
    with ThreadPoolExecutor(count) as pool:
        yield [pool.submit(server.post, COMPLETIONS, ASK) for _ in range(count)]


def waiting(server: Server, count: int) -> None:
    server.wait_until(lambda: server.service.demand.waiting == count)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_wakes_it_and_is_answered_as_if_it_had_been_awake(stream: bool) -> None:
    with serving(FakeCluster()) as awake:
        wanted = awake.complete(**ASK)["choices"]
    with sleeping() as (server, cluster):
        assert server.client.get("/v1/models").json()["data"][0]["state"] == "asleep"
        assert server.client.get("/health").status_code == 200
        if stream:
            assert server.stream(COMPLETIONS, ASK)[-1] == "[DONE]"
        else:
            assert server.complete(**ASK)["choices"] == wanted
        assert cluster.asked == [SleepCluster(0, demand=True)]
        assert server.client.get("/v1/models").json()["data"][0]["state"] == "ready"
        server.complete(**ASK)
        assert len(cluster.asked) == 1
        assert "twinpool_wakes_total 1.0" in server.client.get("/metrics").text


def test_requests_that_come_meanwhile_wait_for_the_same_wake_and_others_than_may_are_told_when_to_come() -> None:
    with sleeping(wake_queue=2) as (server, cluster):
        cluster.may_wake = False
        with requests(server, 2) as found:
            waiting(server, 2)
            refused = server.post(COMPLETIONS, ASK)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
            assert int(refused.headers["retry-after"]) > 0
            server.call(cluster.wake)
            assert [one.result(60).status_code for one in found] == [200, 200]
        assert server.complete(**ASK)


def test_who_waited_long_enough_is_told_so_and_frees_its_place() -> None:
    with sleeping(wake_timeout_s=0.05, wake_queue=1) as (server, cluster):
        cluster.may_wake = False
        for _ in range(2):
            refused = server.post(COMPLETIONS, ASK)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
            assert "0.05 s" in refused.json()["error"]["message"]
        server.call(cluster.wake)
        assert server.complete(**ASK)


def test_a_client_that_leaves_frees_its_place() -> None:
    with sleeping(wake_queue=1) as (server, cluster):
        cluster.may_wake = False
        with pytest.raises(httpx.ReadTimeout):
            server.client.post(COMPLETIONS, json=ASK, timeout=httpx.Timeout(60, read=0.05))
        waiting(server, 0)
        with requests(server, 1) as found:
            waiting(server, 1)
            server.call(cluster.wake)
            assert found[0].result(60).status_code == 200


def test_while_it_wakes_requests_wait_until_each_role_serves() -> None:
    with sleeping() as (server, cluster):
        cluster.may_wake = False
        with requests(server, 1) as found:
            waiting(server, 1)

            def begin() -> None:
                cluster.serving = ServedWeights()
                cluster.workers["prefill-0"].restart()
                cluster.changed()

            server.call(begin)
            server.wait_until(lambda: len(server.service.core.serving(cluster["prefill-0"].role)) == 1)
            assert server.client.get("/v1/models").json()["data"][0]["state"] == "waking"
            assert not found[0].done()
            server.call(lambda: cluster.restart("decode-0"))
            assert found[0].result(60).status_code == 200


def test_an_operators_sleep_is_not_ended_by_a_request() -> None:
    with sleeping(by_demand=False) as (server, cluster):
        assert server.refused(COMPLETIONS, ASK, 503)["code"] == "asleep"
        assert server.client.get("/health").status_code == 503
        assert not cluster.asked
        server.call(cluster.wake)


def test_an_operators_sleep_ends_the_wait_of_who_woke_it() -> None:
    with sleeping() as (server, cluster):
        cluster.may_wake = False
        with requests(server, 1) as found:
            waiting(server, 1)
            server.call(lambda: cluster.sleep(by_demand=False))
            assert found[0].result(60).json()["error"]["code"] == "asleep"
        server.call(cluster.wake)


def test_one_that_was_let_in_before_it_fell_asleep_wakes_it_too() -> None:
    cluster = SleepyCluster()
    with serving(cluster) as server:

        def leave() -> None:
            for worker in cluster.workers.values():
                worker.state = "draining"
            cluster.changed()

        server.call(leave)
        with requests(server, 1) as found:
            server.wait_until(lambda: server.service.core.requests.waiting == 1)
            server.call(cluster.sleep)
            assert found[0].result(60).status_code == 200
        assert cluster.asked
        server.at_rest()


def test_a_controller_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_wake, "RETRY_S", 0.01)
    with sleeping() as (server, cluster):
        cluster.away = True
        with requests(server, 1) as found:
            waiting(server, 1)
            cluster.away = False
            assert found[0].result(60).status_code == 200


@pytest.mark.asyncio
async def test_who_waited_goes_on_in_the_order_in_which_it_came() -> None:
    """An answer with a key is its client's who comes last: the one that has waited longer is the one before."""
    workers = SimpleNamespace(served=ServedWeights(asleep=1, by_demand=True), needed=["prefill", "decode"])
    core: Any = SimpleNamespace(workers=workers, requests=SimpleNamespace(waiting=0), serving=lambda role: [role])

    async def change_pools(change: SleepCluster) -> None:
        """It wakes later."""

    demand = DemandWake(core, SimpleNamespace(change_pools=change_pools), router_config().router, ManualClock())
    demand.observe()
    came: list[int] = []

    async def ask(number: int) -> None:
        await demand.awake()
        came.append(number)

    asking = [asyncio.ensure_future(ask(number)) for number in range(40)]
    await eventually(lambda: demand.waiting == 40)
    workers.served = ServedWeights()
    demand.observe()
    await asyncio.gather(*asking)
    assert came == list(range(40))
    demand.close("it is over")


@pytest.mark.asyncio
async def test_how_long_a_wake_took_is_from_its_own_request_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_wake, "RETRY_S", 0.0)
    asked, clock = list[SleepCluster](), ManualClock()
    workers = SimpleNamespace(served=ServedWeights(asleep=1, by_demand=True), needed=["prefill", "decode"])
    core: Any = SimpleNamespace(workers=workers, requests=SimpleNamespace(waiting=0), serving=lambda role: [role])

    async def away(change: SleepCluster) -> None:
        asked.append(change)
        raise OSError("nobody answers")

    directory: Any = SimpleNamespace(change_pools=away)
    demand = DemandWake(core, directory, router_config().router, clock)
    demand.observe()
    leave: list[Callable[[], object]] = []
    first = asyncio.ensure_future(demand.awake(leave.append))
    await eventually(lambda: bool(asked))
    leave[0]()
    with pytest.raises(ClientGone):
        await first
    await eventually(lambda: len(asyncio.all_tasks()) == 1)  # Nobody waits, so nobody is asked any more.
    clock.advance(3600.0)
    before, waits = len(asked), asyncio.ensure_future(demand.awake())
    await eventually(lambda: len(asked) > before)
    clock.advance(2.0)
    workers.served = ServedWeights()
    demand.observe()
    await waits
    assert (demand.wakes, demand.latest_s) == (1, 2.0)


def test_the_end_of_the_router_ends_the_wait() -> None:
    cluster = SleepyCluster()
    answers: list[int] = []
    with serving(cluster) as server:
        server.call(cluster.sleep)
        cluster.may_wake = False
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(server.url + COMPLETIONS, json=ASK).status_code)
        )
        asking.start()
        waiting(server, 1)
    asking.join(60)
    assert answers == [503]
