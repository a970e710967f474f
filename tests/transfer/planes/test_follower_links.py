"""The links of a follower by themselves, by stand-ins of its plane and its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import DONE, Completion, DeviceOp
from twinpool.cache.pool.tp_ranks import FollowerSteps
from twinpool.contracts.messages.rank_orders import CloseLink, LayerSpan, OpenLink, PagePlaces, PostWrite, SeverLink
from twinpool.transfer.planes.tp_plane import FollowerLinks


class LanedDevice(CpuDevice):
    """Notes which lanes have begun, and takes away those that end."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes: set[str] = set()

    def submit(self, op: DeviceOp, run: Callable[[], object], *rest: Any, **options: Any) -> Completion:
        self.lanes.add(op.lane)
        return super().submit(op, run, *rest, **options)

    def end_lane(self, lane: str) -> None:
        self.lanes.discard(lane)


class Plane:
    """Links that take every write."""

    def connect(self, descriptor: dict[str, Any]) -> Plane:
        return self

    def post(self, write: object) -> Completion:
        return DONE

    def sever(self) -> None: ...

    def close(self) -> None: ...


def test_every_thread_that_a_link_had_ends_with_it_and_those_of_others_stay() -> None:
    device, plane = LanedDevice(), Plane()
    links = FollowerLinks(plane, FollowerSteps(device, {}))  # type: ignore[arg-type]
    places = (PagePlaces("full", 0, (1,)),)
    for link in (3, 4):
        assert links.carry_out(OpenLink(link, {})) == ""
    links.post(1, PostWrite(4, "room-4", 7, 1, places, places))
    others = set(device.lanes)
    links.post(2, PostWrite(3, "room-3", 7, 1, places, places))
    links.post(3, PostWrite(3, "room-3", 7, 2, places, places, (LayerSpan("full", 0, 1),)))
    assert sorted(links.answers()) == [(1, True), (2, True), (3, True)]
    assert len(device.lanes - others) == 2, "layers that are written ahead have a lane of their own"
    links.carry_out(CloseLink(3))
    assert device.lanes == others


@pytest.mark.parametrize("end", [CloseLink(3), SeverLink(3)])
def test_a_write_that_waits_for_its_step_has_failed_once_its_link_has_ended(end: CloseLink | SeverLink) -> None:
    """The leader waits for its answer, and the step may never come."""
    links = FollowerLinks(Plane(), FollowerSteps(LanedDevice(), {}))  # type: ignore[arg-type]
    places = (PagePlaces("full", 0, (1,)),)
    for link in (3, 4):
        links.carry_out(OpenLink(link, {}))
    for sequence, link in ((1, 3), (2, 4)):
        links.post(sequence, PostWrite(link, f"room-{link}", 7, 1, places, places, step=5))
    links.carry_out(end)
    assert links.settle() == [(1, False)], "the other one still waits for its step"
