"""What a reader over TCP stores, and what it drops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import torch
import zmq

from cache.pool.pool_set import PoolSet
from contracts.config.cluster_config import FaultsConfig
from contracts.ids import RoomId
from tests.poolsets import entry, pool_sets
from tests.rooms import image
from transfer.planes.data_plane import SLOT_BYTES, PageNumbers, RoomTarget
from transfer.planes.zmq_plane import ZmqPlane

SPEC = pool_sets()["all"]
ROOM = RoomId("room-1")
TARGET = RoomTarget(ROOM, {"full": PageNumbers(2, (5, 7, 6)), "state": PageNumbers(4, (3,))}, 1, 77)
TICKET = TARGET.ticket
ALONE = (0, 1, 1)
"""The first write of a writer of one rank."""
FULL, STATE = SPEC.unit_bytes("full"), SPEC.unit_bytes("state")


@contextmanager
def reader() -> Iterator[tuple[ZmqPlane, PoolSet, zmq.Socket[bytes]]]:
    plane = ZmqPlane(FaultsConfig(), "127.0.0.1", None)
    pools = PoolSet(SPEC, SPEC.even(9))
    plane.register(pools, torch.zeros(2, SLOT_BYTES, dtype=torch.uint8))
    plane.permit(TARGET)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(plane.describe()["ranks"][0]["endpoint"])
    try:
        yield plane, pools, socket
    finally:
        socket.close(linger=0)
        plane.close()


def deliver(plane: ZmqPlane, socket: zmq.Socket[bytes], *frames: bytes) -> None:
    """Sends one message, and a notice after it to wait for."""
    socket.send_multipart(frames)
    socket.send_multipart([b"N", msgpack.packb(("", 0, 1)), b"over"])
    for _ in range(1000):
        plane.waitable[0].poll(20)
        if plane.poll() == [b"over"]:
            return
    raise AssertionError("the notice never came")


def test_a_write_of_several_pools_is_stored_in_the_places_that_were_granted() -> None:
    with reader() as (plane, pools, socket):
        before = image(pools)
        head = msgpack.packb((ROOM, TICKET, [("full", 3, 2), ("state", 4, 1)], *ALONE))
        deliver(plane, socket, b"P", head, b"\1" * FULL + b"\2" * FULL, b"\3" * STATE)
        after = image(pools)
        assert {place for place in after if after[place] != before[place]} == {("full", 7), ("full", 6), ("state", 3)}
        for (pool, index), byte in ((("full", 7), b"\1"), (("full", 6), b"\2"), (("state", 3), b"\3")):
            assert set(b"".join(entry(pools, pool, index))) == set(byte)
        assert plane.dropped == 0


MISFITS: dict[str, list[Any]] = {
    "another room": [("room-2", [("full", 3, 1)]), b"\1" * FULL],
    "pages before the grant's": [(ROOM, [("full", 1, 1)]), b"\1" * FULL],
    "pages after the grant's": [(ROOM, [("full", 4, 2)]), b"\1" * FULL * 2],
    "a pool that was not granted": [(ROOM, [("window", 4, 1)]), b"\1" * SPEC.unit_bytes("window")],
    "no such pool": [(ROOM, [("latent", 4, 1)]), b"\1"],
    "too few bytes": [(ROOM, [("full", 3, 1)]), b"\1" * (FULL - 1)],
    "too many bytes": [(ROOM, [("full", 3, 1)]), b"\1" * (FULL + 1)],
    "no pages": [(ROOM, [("full", 3, 0)]), b""],
    "fewer frames than pools": [(ROOM, [("full", 3, 1), ("state", 4, 1)]), b"\1" * FULL],
    "more frames than pools": [(ROOM, [("full", 3, 1)]), b"\1" * FULL, b"\1"],
    "names that are no names": [([1], [("full", 3, 1)]), b"\1" * FULL],
    "numbers that are no numbers": [(ROOM, [("full", "3", 1)]), b"\1" * FULL],
    "nothing": [(ROOM, 5)],
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_b6_a_write_that_does_not_fit_in_one_pool_is_stored_in_none(misfit: str) -> None:
    head, *frames = MISFITS[misfit]
    with reader() as (plane, pools, socket):
        before = image(pools)
        deliver(plane, socket, b"P", msgpack.packb((head[0], TICKET, *head[1:], *ALONE)), *frames)
        beside = (head[0], [("state", 4, 1), *head[1]] if isinstance(head[1], list) else 5)
        deliver(plane, socket, b"P", msgpack.packb((beside[0], TICKET, *beside[1:], *ALONE)), b"\3" * STATE, *frames)
        assert image(pools) == before
        assert plane.dropped == 2


@pytest.mark.parametrize(
    "ranks", [(), (1, 1, 1), (-1, 1, 1), (0, 0, 1), (0, 10**9, 1), ("0", 1, 1), (0, 1, "1"), (0, 1, 1, 1)]
)
def test_a_write_of_ranks_that_cannot_be_is_dropped(ranks: tuple[Any, ...]) -> None:
    with reader() as (plane, pools, socket):
        before = image(pools)
        deliver(plane, socket, b"P", msgpack.packb((ROOM, TICKET, [("full", 3, 1)], *ranks)), b"\1" * FULL)
        assert image(pools) == before
        assert plane.dropped == 1


def test_a5_what_comes_for_a_room_that_was_revoked_is_dropped_and_counted() -> None:
    with reader() as (plane, pools, socket):
        before = image(pools)
        plane.revoke(ROOM)
        deliver(plane, socket, b"P", msgpack.packb((ROOM, TICKET, [("full", 2, 1)], *ALONE)), b"\1" * FULL)
        deliver(plane, socket, b"S", msgpack.packb((ROOM, TICKET)), b"\1" * 10)
        assert image(pools) == before
        assert plane.dropped == 2
