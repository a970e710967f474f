"""The device of a leader: followers are told of marks right before the step that is to reach them."""

from __future__ import annotations

from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DeviceOp, DeviceStream
from twinpool.cache.pool.tp_ranks import TPDevice
from twinpool.contracts.messages.rank_orders import CheckPages, LayerCount, MarkStep, Order

STEP = DeviceOp("forward", DeviceStream.COMPUTE)
GROUPS = [{"full": 1}, {"full": 2}]


class Told:
    """An order channel that notes what it is told."""

    size = 2

    def __init__(self) -> None:
        self.orders: list[Order] = []

    def send(self, order: Order) -> None:
        self.orders.append(order)


def test_marks_are_told_when_their_step_runs_and_not_when_it_is_submitted() -> None:
    told, lazy = Told(), AdversarialDevice(1, stray=0.0, polled=0.0)
    device = TPDevice(lazy, told)  # type: ignore[arg-type]
    for _ in range(2):
        marks = device.marks(GROUPS)
        assert marks is not None
        device.submit(STEP, lambda: told.send(CheckPages("device")), marks=marks)
    device.submit(STEP, lambda: told.send(CheckPages("host")))
    assert told.orders == []
    lazy.settle()
    groups = tuple((LayerCount("full", count),) for count in (1, 2))
    step = CheckPages("device")
    assert told.orders == [MarkStep(1, groups), step, MarkStep(2, groups), step, CheckPages("host")]


def test_a_device_without_marks_has_none_for_followers() -> None:
    told = Told()
    device = TPDevice(CpuDevice(), told)  # type: ignore[arg-type]
    assert device.marks(GROUPS) is None
    device.submit(STEP, lambda: None)
    assert told.orders == []
