"""The device of a leader of several ranks: whoever sends layers of a step ahead has the marks of every rank.

A mark of the leader's step says nothing of the followers' steps. So the leader tells them, right before a step with
marks, to make marks of the same groups for theirs (`cache.pool.follower_steps`); what a follower writes of a layer
comes after its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from twinpool.cache.device.device_port import (
    NO_GATES,
    Completion,
    Device,
    DeviceOp,
    GatedLoads,
    PageSpanUse,
    RemoteWrite,
)
from twinpool.cache.device.layer_marks import LayerCounts, LayerMarks
from twinpool.contracts.messages.rank_order_codec import OrderChannel
from twinpool.contracts.messages.rank_orders import LayerCount, MarkStep


class TPDevice:
    """Implements `cache.device.device_port.Device`: the leader's own `device`, and the marks of its `followers`."""

    def __init__(self, device: Device, followers: OrderChannel) -> None:
        self._device, self._followers = device, followers
        self._steps = count(1)

    @property
    def torch_device(self) -> torch.device:
        return self._device.torch_device

    @property
    def checks(self) -> bool:
        return self._device.checks

    def marks(self, groups: Sequence[LayerCounts]) -> LayerMarks | None:
        marks = self._device.marks(groups)
        if marks is not None:
            marks.step = next(self._steps)
        return marks

    def submit(
        self,
        op: DeviceOp,
        run: Callable[[], object],
        after: Sequence[Completion] = (),
        *,
        gates: GatedLoads = NO_GATES,
        keep: Sequence[Any] = (),
        marks: LayerMarks | None = None,
    ) -> Completion:
        if marks is None:
            return self._device.submit(op, run, after, gates=gates, keep=keep)
        groups = tuple(tuple(LayerCount(*count) for count in group.items()) for group in marks.groups)
        order = MarkStep(marks.step, groups)

        def marked() -> object:
            self._followers.send(order)
            return run()

        return self._device.submit(op, marked, after, gates=gates, keep=keep, marks=marks)

    def touch(self, name: str, *, reads: Sequence[PageSpanUse] = (), writes: Sequence[PageSpanUse] = ()) -> None:
        self._device.touch(name, reads=reads, writes=writes)

    def remote_write(self, name: str, writes: Sequence[PageSpanUse]) -> RemoteWrite:
        return self._device.remote_write(name, writes)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return self._device.allocate_host(nbytes)

    def register_host(self, memory: torch.Tensor) -> None:
        self._device.register_host(memory)

    def end_lane(self, lane: str) -> None:
        self._device.end_lane(lane)

    def close(self) -> None:
        self._device.close()
