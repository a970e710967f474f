"""A follower's steps on its device: what it does to its pools in order, and how far its steps have come.

A follower does to its bytes what its leader orders, one thing after the other: all of it on the stream that computes.
Its steps reach marks of their own where the leader has asked for them (`cache.device.tp_device`). A step is through
with a layer of a pool when it takes the buffers of that pool's next layer from the gate, and with all layers at its
end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TypeVar

from twinpool.cache.device.device_port import DONE, Completion, Device, DeviceOp, DeviceStream
from twinpool.cache.device.layer_marks import LayerMarks
from twinpool.cache.pool.load_gate import LoadGate
from twinpool.contracts.messages.rank_orders import MarkStep

T = TypeVar("T")
_KEPT = 64
"""Steps whose marks are kept. What comes after an older one's comes after all steps."""


class FollowerSteps:
    """The operations of one follower; used from the thread that carries out its orders."""

    def __init__(self, device: Device, gates: Mapping[str, LoadGate]) -> None:
        """`gates`: of the follower's pools on the device, by pool."""
        self.device = device
        self._gates = gates
        self._asked: MarkStep | None = None
        self._marks: OrderedDict[int, LayerMarks] = OrderedDict()
        self._latest = 0
        self.last: Completion = DONE
        """Of the last operation."""
        self.beside = False
        """Whether sends go on beside steps: the device waits for marks on other threads than this one."""

    def expect(self, order: MarkStep) -> None:
        """Make the marks that the next step is to reach."""
        groups = [{layers.pool: layers.layers for layers in group} for group in order.groups]
        self._asked, self._latest = order, order.step
        made = self.device.marks(groups)
        self.beside = made is not None
        self._marks[order.step] = LayerMarks(groups) if made is None else made
        while len(self._marks) > _KEPT:
            self._marks.popitem(last=False)

    def run(self, step: Callable[[], object]) -> None:
        """Submit a step; without marks it is complete on a CPU when this returns. Raises what it raises."""
        self.look()
        asked, self._asked = self._asked, None
        if asked is None:
            self.last = self.device.submit(_FORWARD, step)
            return
        marks = self._marks[asked.step]

        def marked() -> None:
            written = dict.fromkeys(marks.groups[-1], 0)

            def opened(pool: str, layer: int) -> None:
                if layer > written[pool]:
                    written[pool] = layer
                    marks.passed(written)

            for gate in self._gates.values():
                gate.opened = opened
            try:
                step()
                marks.passed(marks.groups[-1])
            except Exception as error:
                marks.end(error)
                raise
            finally:
                for gate in self._gates.values():
                    gate.opened = None

        self.last = self.device.submit(_FORWARD, marked, marks=marks)

    def apply(self, operation: Callable[[], T]) -> T:
        """Carry out another operation on the pools, after the steps before it; returns its result."""
        self.look()
        results: list[T] = []
        self.last = self.device.submit(_STATE, lambda: results.append(operation()))
        return results[0]

    def look(self) -> None:
        """Let the device go on with what it runs on this thread. Raises what a step has raised."""
        if self.last.done:
            self.last.wait()
            self.last = DONE

    def close(self) -> None:
        """Fail the marks that no step will reach, so that nothing waits for them, and end the device."""
        for marks in self._marks.values():
            marks.end(RuntimeError("the worker has ended"))
        self.device.close()

    def written(self, step: int, group: int) -> Completion | None:
        """The completion that what is written after mark `group` of step `step` comes after; None while the step is
        unknown: it was not ordered yet. Step 0: all that was ordered so far."""
        if step > self._latest:
            return None
        marks = self._marks.get(step)
        return self.last if marks is None else marks[group]


_FORWARD = DeviceOp("forward", DeviceStream.COMPUTE)
_STATE = DeviceOp("state", DeviceStream.COMPUTE)
