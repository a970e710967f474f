"""The simulator's time, processes, network and carrier do what the real ones do."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from twinpool.sim.fabric.sim_network import SimControlTransport, SimNetwork, SimSwitch
from twinpool.sim.fabric.virtual_time import SimProcess, VirtualLoop, VirtualTime
from twinpool.transfer.net.control_channel import ControlTransport
from twinpool.transfer.net.zmq_channel import Waiter, ZmqControlTransport


@dataclass
class Stage:
    """Two processes on two nodes."""

    agenda: VirtualTime
    network: SimNetwork
    one: SimProcess
    other: SimProcess

    def pass_time(self, seconds: float = 100.0) -> None:
        over: list[bool] = []
        self.agenda.after(seconds, lambda: over.append(True))
        while not over:
            self.agenda.next()


@pytest.fixture
def stage() -> Stage:
    agenda = VirtualTime()
    network = SimNetwork(agenda, random.Random(1), 0.01, 3.0)
    return Stage(agenda, network, SimProcess(agenda, "a-0#1", "node-0", 1), SimProcess(agenda, "b-0#1", "node-1", 2))


def test_things_happen_in_the_order_of_time_and_at_the_same_time_in_the_order_of_entry() -> None:
    agenda, seen = VirtualTime(), list[str]()
    agenda.after(2.0, lambda: seen.append("late"))
    agenda.after(1.0, lambda: seen.append("first"))
    agenda.after(1.0, lambda: seen.append("second"))
    agenda.after(1.5, lambda: seen.append("never")).cancel()
    while agenda.next():
        pass
    assert seen == ["first", "second", "late"]
    assert agenda.now() == 2.0


def test_a_loop_in_virtual_time_waits_for_what_is_due_and_takes_no_time() -> None:
    agenda, seen, failed = VirtualTime(), list[tuple[float, str]](), list[str]()
    loop = VirtualLoop(agenda, failed.append)

    async def wait(name: str, seconds: float) -> None:
        try:
            async with asyncio.timeout(2.0):
                await asyncio.sleep(seconds)
            seen.append((agenda.now(), name))
        except TimeoutError:
            seen.append((agenda.now(), f"{name} is late"))

    for name, seconds in (("long", 1000.0), ("short", 1.0)):
        agenda.after(0.5, lambda name=name, seconds=seconds: tasks.append(loop.create_task(wait(name, seconds))))  # type: ignore[misc]
    tasks: list[asyncio.Task[None]] = []
    agenda.after(3.0, lambda: loop.run(lambda: 1 / 0))
    began = time.monotonic()
    while len(seen) < 2 or not failed:
        assert agenda.next()
    assert seen == [(1.5, "short"), (2.5, "long is late")]
    assert "ZeroDivisionError" in failed[0]
    assert time.monotonic() - began < 60
    tasks.append(loop.create_task(wait("cancelled", 1.0)))
    loop.end()
    assert tasks[-1].cancelled()
    assert loop.is_closed()


def test_a_stopped_process_does_later_what_a_dead_one_never_does(stage: Stage) -> None:
    seen: list[str] = []
    stage.one.stop()
    stage.one.later(1.0, lambda: seen.append("done"))
    stage.other.later(1.0, lambda: seen.append("not done"))
    stage.other.die()
    stage.pass_time()
    assert seen == []
    stage.one.go_on()
    assert seen == ["done"]


def test_messages_of_a_pipe_arrive_in_order_each_once(stage: Stage) -> None:
    seen: list[int] = []
    pipe = stage.network.pipe(stage.one, stage.other)
    for number in range(50):
        pipe.send(lambda number=number: seen.append(number))  # type: ignore[misc]
    stage.pass_time()
    assert seen == list(range(50))


@pytest.mark.parametrize("pair", [("node-0", "*"), ("node-1", "node-0"), ("a-0", "b-0"), ("b-0", "*")])
def test_what_cannot_arrive_waits_until_it_can(stage: Stage, pair: tuple[str, str]) -> None:
    seen: list[int] = []
    pipe = stage.network.pipe(stage.one, stage.other)
    stage.network.part(*pair)
    pipe.send(lambda: seen.append(1))
    stage.pass_time(1.0)
    assert seen == []
    stage.network.join(*pair)
    stage.pass_time()
    assert seen == [1]


def test_a_reset_and_a_silence_lose_what_is_under_way_and_tell(stage: Stage) -> None:
    seen: list[str] = []
    pipe = stage.network.pipe(stage.one, stage.other, lambda: seen.append("cut"))
    pipe.send(lambda: seen.append("lost"))
    assert stage.network.reset("b-0", "a-0") == 1
    pipe.send(lambda: seen.append("arrived"))
    stage.pass_time(1.0)
    assert seen == ["cut", "arrived"]
    stage.network.part("a-0", "b-0")
    pipe.send(lambda: seen.append("lost"))
    stage.pass_time()
    assert seen == ["cut", "arrived", "cut"]


@pytest.fixture(params=["simulated", "zmq"])
def transports(
    request: pytest.FixtureRequest, stage: Stage
) -> Iterator[tuple[ControlTransport, ControlTransport, Callable[[], None]]]:
    """Two carriers of one kind, and how to let what was sent arrive."""
    if request.param == "simulated":
        exchange, same = SimSwitch(stage.network), SimProcess(stage.agenda, "b-0#1", "node-0", 2)
        mine, theirs = (SimControlTransport(exchange, process, lambda: None) for process in (stage.one, same))
        yield mine, theirs, stage.pass_time
        return
    waiter = Waiter()
    real = ZmqControlTransport("127.0.0.1", waiter, None), ZmqControlTransport("127.0.0.1", waiter, None)
    yield *real, lambda: waiter.wait(1.0)
    waiter.close()


def test_a_carrier_brings_messages_there_in_order_and_answers_back(
    transports: tuple[ControlTransport, ControlTransport, Callable[[], None]],
) -> None:
    mine, theirs, arrive = transports
    inbox = mine.listen()
    channel = theirs.connect(inbox.endpoint, b"decode-0:1")
    for number in range(5):
        channel.send(b"%d" % number)
    got: list[tuple[bytes, bytes]] = []
    end = time.monotonic() + 60
    while len(got) < 5:
        assert time.monotonic() < end
        arrive()
        got += inbox.receive()
    assert got == [(b"decode-0:1", b"%d" % n) for n in range(5)]
    inbox.send(b"decode-0:1", b"answer")
    inbox.send(b"nobody", b"lost")
    answer = None
    while answer is None:
        assert time.monotonic() < end
        arrive()
        answer = channel.receive()
    assert answer == b"answer"
    assert channel.receive() is None
    assert not channel.cut()
    assert channel.up
    channel.close()
    inbox.close()


def test_a_carrier_watches_processes_of_its_own_node_and_no_others(
    transports: tuple[ControlTransport, ControlTransport, Callable[[], None]],
) -> None:
    mine, theirs, _ = transports
    pid, started, _ = theirs.mine()
    watch = mine.watch([theirs.mine()])
    assert watch is not None
    assert watch.pid == pid
    assert not watch.dead
    watch.close()
    assert mine.watch([(pid, started, "elsewhere")]) is None


def test_a_simulated_watch_tells_of_the_death_and_of_nothing_else(stage: Stage) -> None:
    exchange, woken = SimSwitch(stage.network), list[str]()
    near = SimProcess(stage.agenda, "c-0#1", "node-0", 3)
    transport = SimControlTransport(exchange, stage.one, lambda: woken.append("woken"))
    mark = SimControlTransport(exchange, near, lambda: None).mine()
    watch = transport.watch([mark])
    assert watch is not None
    near.stop()
    assert not watch.dead
    near.die()
    assert watch.dead
    assert woken == ["woken"]
    with pytest.raises(ProcessLookupError):
        transport.watch([mark])
