"""The lazy device: late, seeded, and strict about order. Pages hold one number each, so that a race shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import DEVICE, HOST, Completion, DeviceOp, DeviceStream, LayerMarks, PageSpanUse
from twinpool.cache.pool.pool_set import LoadGate
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import UnorderedAccess

LAYERS = 3
SEEDS = range(40)


class Rig:
    """A device pool and a host pool of eight pages, three layers, and the operations of a worker on them."""

    def __init__(self, seed: int = 0, stray: float | None = None) -> None:
        self.device = AdversarialDevice(seed, stray=stray)
        self.pages = [{"k": torch.zeros(8, 1)} for _ in range(LAYERS)]
        self.host = [{"k": torch.zeros(8, 1)} for _ in range(LAYERS)]
        self.gate = LoadGate(self.pages)

    def load(self, page: int, layers: Sequence[int] = range(LAYERS), after: Sequence[Completion] = ()) -> None:
        """Host to device, one operation a layer, expected at the gate."""
        for layer in layers:
            op = DeviceOp(f"load {layer}", DeviceStream.LOAD, (PageSpanUse(HOST, "full", [page], [layer]),),
                    (PageSpanUse(DEVICE, "full", [page], [layer]),))  # fmt: skip
            done = self.device.submit(op, self._copy(self.host, self.pages, page, layer), after)
            self.gate.expect(layer, done)

    def save(self, page: int, after: Sequence[Completion] = ()) -> Completion:
        op = DeviceOp(
            "save", DeviceStream.SAVE, (PageSpanUse(DEVICE, "full", [page]),), (PageSpanUse(HOST, "full", [page]),)
        )

        def run() -> None:
            for layer in range(LAYERS):
                self._copy(self.pages, self.host, page, layer)()

        return self.device.submit(op, run, after)

    def forward(
        self, reads: Sequence[int] = (), writes: Sequence[int] = (), value: float = 0.0, gated: bool = True
    ) -> tuple[Completion, list[float]]:
        """Reads pages through the gate, layer by layer, and writes `value` to others."""
        seen: list[float] = []
        passage = self.gate.enter("full")

        def run() -> None:
            for layer in range(LAYERS):
                buffers = passage.layer(layer) if gated else self.pages[layer]
                seen.extend(float(buffers["k"][page]) for page in reads)
                for page in writes:
                    buffers["k"][page] = value

        op = DeviceOp(
            "forward",
            DeviceStream.COMPUTE,
            (PageSpanUse(DEVICE, "full", reads),),
            (PageSpanUse(DEVICE, "full", writes),),
        )
        return self.device.submit(op, run, gates=passage.gates), seen

    def send(self, page: int, after: Sequence[Completion]) -> tuple[Completion, list[float]]:
        seen: list[float] = []
        op = DeviceOp("send", DeviceStream.SEND, (PageSpanUse(DEVICE, "full", [page]),))
        return self.device.submit(op, lambda: seen.append(float(self.pages[0]["k"][page])), after), seen

    @staticmethod
    def _copy(
        source: list[dict[str, torch.Tensor]], target: list[dict[str, torch.Tensor]], page: int, layer: int
    ) -> Callable[[], None]:
        def run() -> None:
            target[layer]["k"][page] = source[layer]["k"][page]

        return run


def test_nothing_has_run_before_somebody_needs_it() -> None:
    rig = Rig(stray=0.0)
    done, _ = rig.forward(writes=[1], value=5.0)
    assert rig.pages[0]["k"][1] == 0.0
    assert rig.device.queued == 1
    done.wait()
    assert rig.pages[0]["k"][1] == 5.0
    assert rig.device.queued == 0


def test_over_seeds_an_operation_runs_before_and_after_the_hosts_next_line() -> None:
    early = set()
    for seed in SEEDS:
        rig = Rig(seed)
        rig.forward(writes=[1], value=5.0)
        early.add(bool(rig.pages[0]["k"][1]))
        rig.device.settle()
    assert early == {False, True}


def test_a_seed_replays_and_seeds_differ() -> None:
    def trace(seed: int) -> list[str]:
        rig = Rig(seed)
        for page in range(1, 5):
            rig.load(page)
            done, _ = rig.forward(reads=[page])
            rig.save(page, [done])
        rig.device.settle()
        return rig.device.trace

    assert all(trace(seed) == trace(seed) for seed in SEEDS)
    assert len({tuple(trace(seed)) for seed in SEEDS}) > 5


def test_a_streams_operations_run_in_order_and_after_is_kept_between_streams() -> None:
    for seed in SEEDS:
        rig = Rig(seed)
        written, _ = rig.forward(writes=[1], value=1.0)
        _, sent = rig.send(1, [written])
        again, seen = rig.forward(reads=[1])
        again.wait()
        rig.device.settle()
        assert sent == [1.0]
        assert seen == [1.0] * LAYERS


def test_a_load_runs_in_the_middle_of_the_pass_that_waits_for_it() -> None:
    middle = 0
    for seed in SEEDS:
        rig = Rig(seed)
        rig.host[2]["k"][1] = 7.0
        rig.load(1)
        done, seen = rig.forward(reads=[1])
        done.wait()
        assert seen == [0.0, 0.0, 7.0]
        rig.device.settle()
        middle += rig.device.trace.index("load 2") > rig.device.trace.index("forward")
    assert 0 < middle < len(SEEDS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_load_into_what_a_pass_may_still_read_is_refused(seed: int) -> None:
    rig = Rig(seed)
    done, _ = rig.forward(reads=[1])
    with pytest.raises(UnorderedAccess, match=r"load 0 \(load #1\) writes device full page 1, layer 0.*forward"):
        rig.load(1)
    rig.load(1, after=[done])
    rig.load(2)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_pass_over_what_is_being_loaded_is_refused_unless_the_gate_knows(seed: int) -> None:
    rig = Rig(seed)
    rig.load(1)
    known, rig.gate = rig.gate, LoadGate(rig.pages)
    with pytest.raises(UnorderedAccess, match=r"forward .* reads device full page 1, layer 0"):
        rig.forward(reads=[1])
    rig.gate = known
    rig.forward(reads=[1])
    rig.device.settle()


def test_a_gate_that_knows_one_layer_too_few_is_found() -> None:
    rig = Rig()
    rig.load(1)
    rig.gate._pending[2].clear()
    with pytest.raises(UnorderedAccess, match="page 1, layer 2, and nothing orders it after load 2"):
        rig.forward(reads=[1])


def test_a_pass_that_does_not_go_through_the_gate_fails_also_when_the_load_ran_in_time() -> None:
    in_time = 0
    for seed in SEEDS:
        rig = Rig(seed)
        rig.load(1, layers=[2])
        done, _ = rig.forward(reads=[1], gated=False)
        if not rig.gate.pending(2):
            continue  # the host saw it complete before the launch
        with pytest.raises(UnorderedAccess, match="touched layer 2 of full without waiting for load 2"):
            done.wait()
        in_time += rig.device.trace[0] == "load 2"
    assert in_time > 0


def test_a_send_of_what_a_pass_may_still_write_is_refused() -> None:
    rig = Rig()
    done, _ = rig.forward(writes=[1])
    with pytest.raises(UnorderedAccess, match=r"send .* nothing orders it after forward"):
        rig.send(1, [])
    rig.send(1, [done])


def test_writing_again_what_is_still_copied_is_refused() -> None:
    rig = Rig()
    done, _ = rig.forward(writes=[1], value=1.0)
    saved = rig.save(1, [done])
    with pytest.raises(UnorderedAccess, match=r"forward .* writes device full page 1, all layers.* after save"):
        rig.forward(writes=[1])
    saved.wait()
    rig.forward(writes=[1])


def test_what_the_host_waited_for_is_ordered_before_everything_after() -> None:
    rig = Rig()
    done, _ = rig.forward(writes=[1])
    done.wait()
    rig.send(1, [])
    polled, _ = rig.forward(writes=[2])
    while not polled.done:
        pass
    rig.send(2, [])


def test_order_is_transitive_over_streams() -> None:
    rig = Rig()
    written, _ = rig.forward(writes=[1])
    saved = rig.save(1, [written])
    rig.load(1, after=[saved])


def test_readers_beside_each_other_are_no_conflict_and_each_is_remembered() -> None:
    rig = Rig()
    first, _ = rig.forward(reads=[1])
    second, _ = rig.send(1, [])
    with pytest.raises(UnorderedAccess, match="forward"):
        rig.load(1, after=[second])
    with pytest.raises(UnorderedAccess, match="send"):
        rig.load(1, after=[first])
    rig.load(1, after=[first, second])


def test_other_pages_pools_places_and_layers_are_no_conflict() -> None:
    device = AdversarialDevice(0)
    at = PageSpanUse(DEVICE, "full", [1], [0])
    device.submit(DeviceOp("first", DeviceStream.COMPUTE, writes=(at,)), lambda: None)
    others = (PageSpanUse(DEVICE, "full", [2]), PageSpanUse(DEVICE, "window", [1]), PageSpanUse(HOST, "full", [1]))
    for other in (*others, PageSpanUse(DEVICE, "full", [1], [1, 2])):
        device.submit(DeviceOp("second", DeviceStream.LOAD, writes=(other,)), lambda: None)
    for other in (at, PageSpanUse(DEVICE, "full", [1]), PageSpanUse(DEVICE, "full", [3, 1], [1, 0])):
        with pytest.raises(UnorderedAccess):
            device.submit(DeviceOp("third", DeviceStream.SAVE, reads=(other,)), lambda: None)


def test_the_host_may_touch_only_what_it_knows_to_be_over() -> None:
    rig = Rig()
    done, _ = rig.forward(writes=[1])
    with pytest.raises(UnorderedAccess, match=r"read of the digest \(host"):
        rig.device.touch("read of the digest", reads=[PageSpanUse(DEVICE, "full", [1])])
    done.wait()
    rig.device.touch("read of the digest", reads=[PageSpanUse(DEVICE, "full", [1])])
    done, _ = rig.forward(reads=[1])
    with pytest.raises(UnorderedAccess, match="free"):
        rig.device.touch("free", writes=[PageSpanUse(DEVICE, "full", [1])])


def test_a_refused_operation_is_neither_queued_nor_remembered() -> None:
    rig = Rig(stray=0.0)
    rig.forward(reads=[1])
    queued = rig.device.queued
    for _ in range(2):
        with pytest.raises(UnorderedAccess, match="after forward"):
            rig.load(1)
    assert rig.device.queued == queued
    rig.device.touch("read", reads=[PageSpanUse(DEVICE, "full", [1])])


def test_an_undeclared_write_is_found_and_blamed_on_the_right_operation() -> None:
    for seed in SEEDS:
        rig = Rig(seed)
        rig.device.watch(DEVICE, "full", rig.pages)
        rig.host[0]["k"][1] = 3.0
        rig.load(1)
        fine, _ = rig.forward(reads=[1], writes=[2], value=4.0)
        op = DeviceOp("stray kernel", DeviceStream.COMPUTE, writes=(PageSpanUse(DEVICE, "full", [3], [0]),))
        done = rig.device.submit(op, lambda: rig.pages[1]["k"][3].fill_(1.0))  # noqa: B023
        with pytest.raises(UnorderedAccess, match="stray kernel changed k in device full page 3, layer 1"):
            done.wait()
        fine.wait()
        rig.device.settle()


def test_an_error_reaches_everyone_who_depends_on_it_and_is_never_lost() -> None:
    def fail() -> None:
        raise RuntimeError("the copy broke")

    for seed in SEEDS:
        device = AdversarialDevice(seed)
        broken = device.submit(DeviceOp("copy", DeviceStream.LOAD), fail)
        reader = device.submit(DeviceOp("reader", DeviceStream.COMPUTE), lambda: None, [broken])
        bystander = device.submit(DeviceOp("bystander", DeviceStream.SAVE), lambda: None)
        with pytest.raises(RuntimeError, match="broke"):
            reader.wait()
        with pytest.raises(RuntimeError, match="broke"):
            broken.wait()
        bystander.wait()
        device.settle()
        device.submit(DeviceOp("copy", DeviceStream.LOAD), fail)
        with pytest.raises(RuntimeError, match="broke"):
            device.settle()


def test_operations_that_wait_for_each_other_are_named() -> None:
    device, late = AdversarialDevice(0, stray=0.0), list[Completion]()
    first = device.submit(DeviceOp("first", DeviceStream.COMPUTE), lambda: late[0].order())  # noqa: PLW0108
    late.append(device.submit(DeviceOp("second", DeviceStream.LOAD), lambda: None, [first]))
    with pytest.raises(UnorderedAccess, match=r"would never run: first \(compute #1\), second \(load #1\)"):
        first.wait()


def test_the_virtual_clock_moves_with_the_work_and_as_the_seed_says() -> None:
    def elapsed(seed: int) -> float:
        clock = ManualClock()
        device = AdversarialDevice(seed, clock=clock)
        device.submit(DeviceOp("work", DeviceStream.COMPUTE), lambda: None)
        device.settle()
        return clock.now()

    assert elapsed(3) == elapsed(3) > 0.0
    assert elapsed(3) != elapsed(4)


def layered_step(rig: Rig, page: int) -> tuple[LayerMarks, Callable[[int, int], list[tuple[float, float]]]]:
    """Submits a step that writes 5.0 to a page, layer by layer; and a way to send a layer of it behind a mark, which
    notes what it finds in that layer and in the last one."""
    marks = rig.device.marks([{"full": 1}, {"full": 3}])

    def run() -> None:
        for layer in range(LAYERS):
            rig.pages[layer]["k"][page] = 5.0
            marks.passed({"full": layer + 1})

    op = DeviceOp("forward", DeviceStream.COMPUTE, (), (PageSpanUse(DEVICE, "full", [page]),))
    rig.device.submit(op, run, marks=marks)

    def send(group: int, layer: int) -> list[tuple[float, float]]:
        seen: list[tuple[float, float]] = []
        send_op = DeviceOp("send", DeviceStream.SEND, (PageSpanUse(DEVICE, "full", [page], [layer]),))
        look = lambda: seen.append((float(rig.pages[layer]["k"][page]), float(rig.pages[-1]["k"][page])))  # noqa: E731
        rig.device.submit(send_op, look, (marks[group],))
        return seen

    return marks, send


def test_a_send_behind_a_mark_finds_its_layers_written_and_may_run_in_the_middle_of_the_step() -> None:
    found = set[tuple[float, float]]()
    for seed in SEEDS:
        rig = Rig(seed, stray=0.8)
        _, send = layered_step(rig, 2)
        first, last = send(0, 0), send(1, 2)
        rig.device.settle()
        assert last == [(5.0, 5.0)]
        found.update(first)
    assert found == {(5.0, 0.0), (5.0, 5.0)}, "in the middle of the step under some seeds, behind it under others"


def test_a_send_of_layers_beyond_its_mark_is_refused() -> None:
    rig = Rig()
    _, send = layered_step(rig, 2)
    with pytest.raises(UnorderedAccess, match=r"send .* reads device full page 2, layer 1"):
        send(0, 1)


def test_a7_who_comes_after_a_send_behind_a_mark_does_not_come_after_the_step() -> None:
    rig, seen = Rig(stray=0.0), list[float]()
    marks = rig.device.marks([{"full": 1}, {"full": 3}])
    op = DeviceOp("forward", DeviceStream.COMPUTE, (), (PageSpanUse(DEVICE, "full", [2]),))
    rig.device.submit(op, lambda: None, marks=marks)
    send_op = DeviceOp("send", DeviceStream.SEND, (PageSpanUse(DEVICE, "full", [2], [0]),))
    sent = rig.device.submit(send_op, lambda: seen.append(1.0), (marks[0],))
    with pytest.raises(UnorderedAccess):
        rig.save(2, (sent,))


def test_a_send_behind_the_mark_of_a_step_that_failed_does_not_run() -> None:
    rig, seen = Rig(stray=0.0), list[float]()
    marks = rig.device.marks([{"full": 1}, {"full": 3}])

    def run() -> None:
        marks.passed({"full": 1})
        raise RuntimeError("it broke")

    op = DeviceOp("forward", DeviceStream.COMPUTE, (), (PageSpanUse(DEVICE, "full", [2]),))
    rig.device.submit(op, run, marks=marks)
    sends = [
        rig.device.submit(DeviceOp("send", DeviceStream.SEND), lambda: seen.append(1.0), (marks[group],))
        for group in range(2)
    ]
    sends[0].wait()
    with pytest.raises(RuntimeError, match="it broke"):
        sends[1].wait()
    assert seen == [1.0]
