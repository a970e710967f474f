"""The asynchronous CPU: what runs beside what, in which order, and what becomes of errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress

import pytest
import torch

from twinpool.cache.device.cpu_device import BESIDE, AsyncCpuDevice, CpuDevice
from twinpool.cache.device.device_choice import make_device
from twinpool.cache.device.device_port import DONE, DeviceOp, DeviceStream, LayerMarks, failure, layer_groups

WAIT_S = 60.0
STEP = DeviceOp("forward", DeviceStream.COMPUTE)
SEND = DeviceOp("send", DeviceStream.SEND)


@pytest.fixture
def woken() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def device(woken: threading.Semaphore) -> Iterator[AsyncCpuDevice]:
    made = AsyncCpuDevice(woken.release)
    yield made
    made.close()


def held(gate: threading.Event) -> None:
    assert gate.wait(WAIT_S)


def each(*runs: Callable[[], object]) -> Callable[[], object]:
    """One operation that does these things, one after the other."""
    return lambda: [run() for run in runs]


@pytest.mark.parametrize("stream", BESIDE)
def test_copies_and_sends_run_beside_their_host_and_in_order(
    device: AsyncCpuDevice, woken: threading.Semaphore, stream: DeviceStream
) -> None:
    gate, ran = threading.Event(), list[str]()
    first = device.submit(DeviceOp("one", stream), each(lambda: held(gate), lambda: ran.append("one")))
    second = device.submit(DeviceOp("two", stream), lambda: ran.append(threading.current_thread().name))
    assert (first.done, second.done, ran) == (False, False, [])
    gate.set()
    second.wait()
    assert first.done
    assert ran == ["one", f"device-{stream}_0"]
    assert all(woken.acquire(timeout=WAIT_S) for _ in range(2)), "its host sleeps until something is over"


def test_streams_do_not_wait_for_each_other(device: AsyncCpuDevice) -> None:
    gate = threading.Event()
    stuck = device.submit(SEND, lambda: held(gate))
    device.submit(DeviceOp("load", DeviceStream.LOAD), lambda: None).wait()
    assert not stuck.done
    gate.set()
    stuck.wait()


def test_an_operation_comes_after_what_it_names_on_another_stream(device: AsyncCpuDevice) -> None:
    gate, ran = threading.Event(), list[str]()
    load = device.submit(DeviceOp("load", DeviceStream.LOAD), each(lambda: held(gate), lambda: ran.append("load")))
    send = device.submit(SEND, lambda: ran.append("send"), (load,))
    gate.set()
    send.wait()
    assert ran == ["load", "send"]


def test_who_computes_waits_for_the_loads_that_it_comes_after(device: AsyncCpuDevice) -> None:
    ran: list[str] = []
    load = device.submit(DeviceOp("load", DeviceStream.LOAD), lambda: ran.append("load"))
    assert device.submit(STEP, each(load.order, lambda: ran.append("step")), (load,)) is DONE
    assert ran == ["load", "step"]


def test_an_error_is_raised_to_everybody_who_waits_and_what_comes_after_does_not_run(device: AsyncCpuDevice) -> None:
    def fail() -> None:
        raise RuntimeError("a bus error")

    ran: list[str] = []
    load = device.submit(DeviceOp("load", DeviceStream.LOAD), fail)
    send = device.submit(SEND, lambda: ran.append("send"), (load,))
    for _ in range(2):
        for failed in (load, send):
            with pytest.raises(RuntimeError, match="a bus error"):
                failed.wait()
            assert failed.done
    device.submit(SEND, lambda: ran.append("next")).wait()
    assert ran == ["next"]


def marks(groups: int = 2) -> LayerMarks:
    return LayerMarks(layer_groups({"full": 4, "window": 2}, groups))


def test_a_step_with_marks_runs_when_its_host_looks_and_sends_beside_it_come_after_their_layers(
    device: AsyncCpuDevice,
) -> None:
    its, seen, sent = marks(), list[str](), threading.Event()
    thread = threading.get_ident()

    def step() -> None:
        seen.append("begun" if threading.get_ident() == thread else "on another thread")
        its.passed({"full": 1, "window": 1})
        its.passed({"full": 2, "window": 1})
        held(sent)  # The send of the first layers is over before the step is.
        seen.append("over")

    launched = device.submit(STEP, step, marks=its)
    early = device.submit(SEND, each(lambda: seen.append("first layers"), sent.set), (its[0],))
    late = device.submit(SEND, lambda: seen.append("all layers"), (its[1],))
    assert seen == []
    assert launched.done
    late.wait()
    assert early.done
    assert seen == ["begun", "first layers", "over", "all layers"]


def test_who_waits_for_a_send_runs_the_step_that_it_comes_after(device: AsyncCpuDevice) -> None:
    its, seen = marks(), list[str]()
    device.submit(STEP, lambda: seen.append("step"), marks=its)
    device.submit(SEND, lambda: seen.append("send"), (its[1],)).wait()
    assert seen == ["step", "send"]


def test_steps_run_in_order_also_where_nobody_has_looked_at_the_first(device: AsyncCpuDevice) -> None:
    seen: list[str] = []
    device.submit(STEP, lambda: seen.append("one"), marks=marks())
    device.submit(STEP, lambda: seen.append("two"), marks=marks())
    assert seen == ["one"]
    device.submit(STEP, lambda: seen.append("three")).wait()
    assert seen == ["one", "two", "three"]


def test_a_draw_behind_a_step_leaves_it_to_what_comes_after_its_marks(device: AsyncCpuDevice) -> None:
    """Sends are posted when both are submitted: they run beside the step's later layers."""
    ran, sent = list[str](), threading.Event()
    marks = LayerMarks(layer_groups({"full": 2}, 2))

    def forward() -> None:
        marks.passed({"full": 1})
        assert sent.wait(WAIT_S), "the first layer's send waits for the end of the step"
        ran.append("forward")

    step = device.submit(STEP, forward, marks=marks)
    draw = device.submit(DeviceOp("draw", DeviceStream.COMPUTE), lambda: ran.append("draw"))
    assert ran == []
    send = device.submit(SEND, sent.set, (marks[0],))
    assert draw.done
    assert (ran, step.done) == (["forward", "draw"], True)
    send.wait()
    assert device.submit(STEP, lambda: ran.append("next")) is DONE


def test_closing_gives_up_a_draw_with_the_step_before_it() -> None:
    device = AsyncCpuDevice()
    marks = LayerMarks(layer_groups({"full": 1}, 1))
    step = device.submit(STEP, lambda: None, marks=marks)
    draw = device.submit(DeviceOp("draw", DeviceStream.COMPUTE), lambda: None)
    device.close()
    for one in (step, draw, marks[0]):
        assert one.done
        assert "was closed" in str(failure(one))


def test_another_thread_waits_for_a_step_until_its_host_has_run_it(device: AsyncCpuDevice) -> None:
    seen: list[str] = []
    launched = device.submit(STEP, lambda: seen.append("step"), marks=marks())
    send = device.submit(SEND, each(launched.wait, lambda: seen.append("send")))
    launched.wait()
    send.wait()
    assert seen == ["step", "send"]


def test_a_step_that_fails_fails_the_marks_that_it_has_not_reached(device: AsyncCpuDevice) -> None:
    its, sent = marks(), list[str]()

    def step() -> None:
        its.passed({"full": 2, "window": 1})
        raise RuntimeError("out of memory")

    launched = device.submit(STEP, step, marks=its)
    first = device.submit(SEND, lambda: sent.append("first layers"), (its[0],))
    second = device.submit(SEND, lambda: sent.append("all layers"), (its[1],))
    for failed in (launched, second):
        with pytest.raises(RuntimeError, match="out of memory"):
            failed.wait()
    first.wait()
    assert sent == ["first layers"]


def test_a_step_that_is_interrupted_reaches_no_mark_and_interrupts_its_host(device: AsyncCpuDevice) -> None:
    its, sent = marks(), list[str]()

    def step() -> None:
        raise KeyboardInterrupt

    launched = device.submit(STEP, step, marks=its)
    beside = device.submit(SEND, lambda: sent.append("unwritten layers"), (its[0],))
    with pytest.raises(KeyboardInterrupt):
        _ = launched.done
    for failed in (launched, beside):
        with pytest.raises(KeyboardInterrupt):
            failed.wait()
    assert not sent


def test_closing_ends_what_waits_for_a_step_that_nobody_has_looked_at() -> None:
    ran, failed = list[str](), list[BaseException | None]()

    def life() -> None:
        device = AsyncCpuDevice()
        marks = device.marks([{"full": 1}])
        step = device.submit(STEP, lambda: ran.append("step"), marks=marks)
        device.submit(SEND, lambda: ran.append("send"), tuple(marks))
        device.close()
        failed.append(failure(step))

    living = threading.Thread(target=life, daemon=True)
    living.start()
    living.join(WAIT_S)
    assert not living.is_alive()
    assert (ran, [str(error) for error in failed]) == ([], ["the device was closed before it ran"])


def test_groups_have_about_as_many_layers_of_each_pool() -> None:
    assert layer_groups({"full": 5, "state": 2}, 3) == [
        {"full": 2, "state": 1},
        {"full": 4, "state": 2},
        {"full": 5, "state": 2},
    ]


def test_its_threads_leave_the_number_of_torchs_threads_alone(device: AsyncCpuDevice) -> None:
    def seen() -> tuple[int, int]:
        """The number here, and in a thread that begins now."""
        new = list[int]()
        thread = threading.Thread(target=lambda: new.append(torch.get_num_threads()))
        thread.start()
        thread.join(WAIT_S)
        return torch.get_num_threads(), new[0]

    torch.set_num_threads(torch.get_num_threads())  # Whatever tests before this one have left to new threads.
    before, inside = seen(), list[int]()
    device.submit(SEND, lambda: inside.append(torch.get_num_threads())).wait()
    assert inside == [1]
    assert seen() == before


def test_a_cpu_has_streams_where_they_are_asked_for_and_else_does_one_thing_after_the_other() -> None:
    made = [make_device("cpu", streams=streams) for streams in (BESIDE, ())]
    assert [type(device) for device in made] == [AsyncCpuDevice, CpuDevice]
    assert made[1].marks([{"full": 1}]) is None
    for device in made:
        device.close()


def test_threads_that_begin_at_the_same_time_change_the_number_one_after_the_other(
    device: AsyncCpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one would take the other's 1 for the number that later threads are to have."""
    both, met, read = threading.Barrier(2), list[bool](), torch.get_num_threads

    def together() -> int:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)
            met.append(True)
        return read()

    monkeypatch.setattr(torch, "get_num_threads", together)
    lanes = [DeviceOp("send", DeviceStream.SEND, lane=lane) for lane in ("one", "other")]
    for completion in [device.submit(op, int) for op in lanes]:
        completion.wait()
    assert not met


class Pending:
    """An operation of another thread, which ends when somebody waits for it."""

    def __init__(self, ran: list[str], error: RuntimeError | None = None) -> None:
        self.done, self._ran, self._error = False, ran, error

    def wait(self) -> None:
        if not self.done:
            self.done = True
            self._ran.append("before")
        if self._error is not None:
            raise self._error

    order = wait


@pytest.mark.parametrize("kind", ["one after the other", "computing", "deferred", "behind a deferred one"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_computes_waits_for_what_it_comes_after_and_fails_with_it(
    device: AsyncCpuDevice, kind: str, fails: bool
) -> None:
    ran = list[str]()
    before = Pending(ran, RuntimeError("the load failed") if fails else None)
    marks = device.marks([{"full": 1}]) if kind == "deferred" else None
    if kind == "behind a deferred one":
        device.submit(STEP, lambda: ran.append("first"), marks=device.marks([{"full": 1}]))
    used = CpuDevice() if kind == "one after the other" else device
    with pytest.raises(RuntimeError, match="the load failed") if fails else nullcontext():
        used.submit(STEP, lambda: ran.append("step"), [before, DONE], marks=marks).wait()
    first = ["first"] if kind == "behind a deferred one" else []
    assert [*first, "before", *([] if fails else ["step"])] in (ran, [*ran[1:2], *ran[:1], *ran[2:]]), ran


def test_another_thread_waits_until_the_one_that_steps_has_run_what_it_deferred(device: AsyncCpuDevice) -> None:
    gate, ran = threading.Event(), list[str]()
    step = device.submit(STEP, each(lambda: held(gate), lambda: ran.append("step")), marks=device.marks([{"full": 1}]))
    waited = threading.Thread(target=each(step.wait, lambda: ran.append("waited")))
    waited.start()
    waited.join(0.05)
    assert (ran, waited.is_alive()) == ([], True), "it isn't its to run"
    gate.set()
    step.wait()
    waited.join(WAIT_S)
    assert ran == ["step", "waited"]


def test_who_ends_a_lane_does_not_wait_for_what_is_under_way_on_it() -> None:
    """It is the thread that steps the worker, and the reader at the other end may be silent for long."""
    device, go = AsyncCpuDevice(), threading.Event()
    sent = device.submit(DeviceOp("send", DeviceStream.SEND, lane="to a silent reader"), go.wait)
    ending = threading.Thread(target=device.end_lane, args=("to a silent reader",), daemon=True)
    ending.start()
    ending.join(10)
    waited = ending.is_alive()
    go.set()
    sent.wait()
    device.close()
    assert not waited
