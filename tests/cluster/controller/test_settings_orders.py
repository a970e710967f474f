"""A change of settings from a router through the controller to the supervisor and back, over real connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.controller_streams import SettingsOrders
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.controller.supervisor import ControllerClient
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.errors import ConfigError, RequestError
from twinpool.contracts.ids import Role
from twinpool.contracts.messages.pool_changes import ChangedSetting, SettingsAnswer, SettingsChange
from twinpool.router.links.controller_directory import ControllerDirectory

CHANGE = SettingsChange('{"decode": {"retract_limit": 4}}', dry_run=True)
CHANGED = (
    ChangedSetting("decode.retract_limit", "3", "4", (Role.DECODE, Role.COLOCATED)),
    ChangedSetting("x", '""', "null", by="routers"),
)
ANSWER = SettingsAnswer(0, "", CHANGED, {Role.PREFILL: "0a", Role.DECODE: "1b"}, 2, "it is stuck")
WAIT_S = 60.0


class Site:
    """A controller and a supervisor, each of which can go away."""

    def __init__(self) -> None:
        self.server = ControllerServer(Controller(ManualClock(), ClusterConfig(), MemoryLedger(), supervised=False))
        self.clients: list[ControllerClient] = []
        self.pause = threading.Event()

    def supervisor(self) -> ControllerClient:
        client = ControllerClient(self.server.endpoint, 5.0)
        self.clients.append(client)
        client.supervise(list)
        return client

    def order(self, client: ControllerClient) -> SettingsChange:
        for _ in range(int(WAIT_S / 0.02)):
            self.server.tick()
            for order in client.orders():
                if isinstance(order, SettingsChange):
                    return order
            self.pause.wait(0.02)
        raise AssertionError("no order came")

    def change(self, answers: Callable[[SettingsChange], None], client: ControllerClient) -> SettingsAnswer:
        """Ask as a router does, while `answers` is the supervisor's part."""

        async def both() -> SettingsAnswer:
            task = asyncio.create_task(self.ask())
            order = await asyncio.to_thread(self.order, client)
            await asyncio.to_thread(answers, order)
            return await task

        return asyncio.run(both())

    async def ask(self) -> SettingsAnswer:
        return await ControllerDirectory(self.server.endpoint).change_settings(CHANGE)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


def test_every_field_goes_to_the_supervisor_and_comes_back(site: Site) -> None:
    client, orders = site.supervisor(), list[SettingsChange]()

    def answer(order: SettingsChange) -> None:
        orders.append(order)
        client.report(settings=[replace(ANSWER, number=order.number)])

    assert replace(site.change(answer, client), number=0) == ANSWER
    assert [replace(order, number=0) for order in orders] == [CHANGE]
    assert orders[0].number > 0


def test_the_supervisors_refusal_comes_back_in_its_words(site: Site) -> None:
    client = site.supervisor()
    with pytest.raises(RequestError, match="too little memory for it"):
        site.change(
            lambda order: client.report(settings=[SettingsAnswer(order.number, "too little memory for it")]), client
        )


def test_a_supervisor_that_dies_before_its_answer_is_told_and_the_next_one_is_asked(site: Site) -> None:
    first = site.supervisor()
    with pytest.raises(RequestError, match="went away"):
        site.change(lambda order: first.close(), first)
    site.clients.remove(first)
    second = site.supervisor()
    answer = site.change(lambda order: second.report(settings=[replace(ANSWER, number=order.number)]), second)
    assert answer.changed == CHANGED


def test_a_change_whose_supervisor_another_one_has_replaced_is_told_at_once(site: Site) -> None:
    """The stream of the one before may end long after that, and its answer is nobody's."""
    first, second = site.supervisor(), list[ControllerClient]()

    def replace_it(order: SettingsChange) -> None:
        line = site.server._service._supervisor
        second.append(site.supervisor())
        while site.server._service._supervisor is line:
            site.pause.wait(0.01)

    with pytest.raises(RequestError, match="went away"):
        site.change(replace_it, first)


def test_a_change_that_waits_for_the_next_supervisor_leaves_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        orders, waits = SettingsOrders(answer_s=WAIT_S), list[int]()
        orders.come(lambda change: pytest.fail("it went away"))
        orders.lost()
        wait = orders._there.wait

        async def counting() -> bool:
            waits.append(1)
            assert len(waits) < 10, "it asks for a supervisor over and over, and nobody else has a turn"
            return await wait()

        monkeypatch.setattr(orders._there, "wait", counting)
        change = asyncio.create_task(orders.change(CHANGE))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(waits) == 1
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change

    asyncio.run(run())


def test_a_change_waits_for_a_supervisor_that_is_starting_again_and_not_for_ever() -> None:
    async def run() -> None:
        orders, sent = SettingsOrders(answer_s=0.05), list[SettingsChange]()
        with pytest.raises(ConfigError, match="no supervisor is there"):
            await orders.change(CHANGE)
        orders = SettingsOrders(answer_s=WAIT_S)
        orders.come(lambda change: pytest.fail("it went away"))
        orders.lost()
        waits = asyncio.create_task(orders.change(CHANGE))
        await asyncio.sleep(0)
        orders.come(sent.append)
        while not sent:
            await asyncio.sleep(0)
        orders.take([SettingsAnswer(sent[0].number)])
        assert (await waits).refusal == ""

    asyncio.run(run())


def test_one_change_at_a_time_and_no_longer_than_its_deadline() -> None:
    async def run() -> None:
        orders, sent = SettingsOrders(answer_s=0.05), list[SettingsChange]()
        orders.come(sent.append)
        first = asyncio.create_task(orders.change(CHANGE))
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="another change"):
            await orders.change(CHANGE)
        with pytest.raises(ConfigError, match="has not answered"):
            await first
        orders.take([SettingsAnswer(sent[0].number)])  # Too late: nobody waits for it.
        second = asyncio.create_task(orders.change(CHANGE))
        await asyncio.sleep(0)
        orders.take([SettingsAnswer(sent[0].number, "of the first"), SettingsAnswer(sent[1].number)])
        assert (await second).refusal == ""

    asyncio.run(run())


def test_settings_have_a_bound() -> None:
    with pytest.raises(ConfigError, match="at most"):
        asyncio.run(SettingsOrders().change(SettingsChange("x" * 300_000)))


def test_a_change_that_was_not_sent_yet_goes_to_the_supervisor_after_the_one_that_went() -> None:
    """The one that came goes before the change has had its turn."""

    async def run() -> SettingsAnswer:
        orders, sent = SettingsOrders(WAIT_S), list[SettingsChange]()
        change = asyncio.create_task(orders.change(CHANGE))
        await asyncio.sleep(0)
        orders.come(lambda order: pytest.fail("it is gone"))
        orders.lost()
        await asyncio.sleep(0)
        orders.come(sent.append)
        while not sent:
            await asyncio.sleep(0)
        orders.take([replace(ANSWER, number=sent[0].number)])
        return await change

    assert asyncio.run(run()).changed == CHANGED
