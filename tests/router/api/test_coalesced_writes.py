"""Writes of one turn of the loop leave as one; a close loses none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from twinpool.router.api.http_protocol import CoalescingTransport, JoinedWrites


class Wire:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.mark.asyncio
async def test_writes_of_one_turn_leave_as_one_and_in_order() -> None:
    wire: Any = Wire()
    coalesced = CoalescingTransport(wire, asyncio.get_running_loop(), JoinedWrites())
    coalesced.write(b"a")
    coalesced.write(b"b")
    assert wire.writes == []
    await asyncio.sleep(0)
    assert wire.writes == [b"ab"]
    coalesced.write(b"c")
    await asyncio.sleep(0)
    assert wire.writes == [b"ab", b"c"]


@pytest.mark.asyncio
async def test_a_close_sends_what_was_written_before_it() -> None:
    wire: Any = Wire()
    coalesced = CoalescingTransport(wire, asyncio.get_running_loop(), JoinedWrites())
    coalesced.write(b"a")
    coalesced.close()
    assert wire.writes == [b"a"]
    assert coalesced.is_closing()
    await asyncio.sleep(0)
    assert wire.writes == [b"a"]


@pytest.mark.asyncio
async def test_one_callback_writes_for_all_sockets_and_one_that_fails_or_is_cut_keeps_nobody_from_theirs() -> None:
    loop, joined = asyncio.get_running_loop(), JoinedWrites()
    wires: list[Any] = [Wire() for _ in range(4)]

    def fail(data: bytes) -> None:
        raise RuntimeError("planted")

    wires[1].write = fail
    for number, wire in enumerate(wires):
        transport = CoalescingTransport(wire, loop, joined)
        transport.write(b"a%d" % number)
        transport.write(b"b")
    wires[2].closed = True
    await asyncio.sleep(0)
    assert [wire.writes for wire in wires] == [[b"a0b"], [], [], [b"a3b"]]
    CoalescingTransport(wires[0], loop, joined).write(b"c")
    await asyncio.sleep(0)
    assert wires[0].writes == [b"a0b", b"c"], "it goes on after it"
