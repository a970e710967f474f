"""What workers of both roles share, by itself: parts of a step, pages that can be sent, requests that have left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from msgspec import structs

from tests.support.decode_parts import SESSION, DecodeParts
from tests.support.prefill_parts import PrefillParts
from twinpool.cache.allocation import Allocation, BlockTable
from twinpool.cache.device.device_port import DONE
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RequestId, RoomId
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Cancel, Submit
from twinpool.contracts.messages.worker_events import Done
from twinpool.decode.request import DecodeRequest
from twinpool.engine.runner.batch import DrawnToken, RowOutput
from twinpool.prefill.request import PrefillEvent
from twinpool.prefill.step_commit import Damaged, Granted, Lost, PrefillHandover
from twinpool.transfer.rooms.room_states import RoomGranted, RoomReleased, SendablePages
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.request_table import sendable_pages
from twinpool.worker.step_commit import split


@dataclass
class Step:
    """A launched step that counts how often its outputs are fetched."""

    rows: int
    fetched: int = 0
    done: bool = False
    completion: Any = DONE

    def outputs(self) -> list[RowOutput]:
        self.fetched += 1
        return [RowOutput(DrawnToken(row, None)) for row in range(self.rows)]


@pytest.mark.parametrize("counts", [[2, 3], [2, 3, 0, 1, 4], [0, 1], [5]])
def test_each_part_of_a_step_has_its_own_rows_in_order_and_the_step_is_read_once(counts: list[int]) -> None:
    step = Step(sum(counts))
    parts = split(step, counts)
    rows = [[out.drawn.token for out in part.outputs() if out.drawn is not None] for part in reversed(parts)][::-1]
    assert [len(part) for part in rows] == counts
    assert [row for part in rows for row in part] == list(range(step.rows))
    assert step.fetched == 1
    assert [part.done for part in parts] == [False] * len(parts)
    step.done = True
    assert all(part.done for part in parts)


def allocation(sealed: int, pages: int) -> Allocation:
    """Pages 20, 21 ... of which the first `sealed` have digests 100, 101 ..., and slot 7."""
    made = cast(Any, Allocation.__new__(Allocation))
    table = BlockTable()
    table.put(0, tuple(range(20, 20 + pages)), (0,) * pages)
    made.tables, made.digests = {"full": table}, {"full": [100 + n for n in range(sealed)], "state": []}
    made.slots = {"state": _Slot()}
    return cast(Allocation, made)


@dataclass
class _Slot:
    indices: tuple[int, ...] = (7,)


CHAIN = [bytes([n]) * 16 for n in range(5)]


@pytest.mark.parametrize("sealed", range(5))
def test_what_can_be_sent_ends_at_the_first_page_that_is_not_sealed_and_its_end_is_the_last_pages_alone(
    sealed: int,
) -> None:
    """A digest of the partly filled last page is no other page's, however many are still to be sealed."""
    made = allocation(sealed, 5)
    ends = {"full": 999, "state": 555}
    found = sendable_pages({"full": range(1, 5), "state": range(4, 5)}, made, CHAIN, ends)
    tags = [ContentTag(CHAIN[n], 100 + n) for n in range(1, sealed)]
    if sealed == 4:
        tags.append(ContentTag(CHAIN[4], 999))
    want = {"state": SendablePages(4, (7,), (ContentTag(CHAIN[4], 555),))}
    if tags:
        want["full"] = SendablePages(1, tuple(range(21, 21 + len(tags))), tuple(tags))
    assert found == want
    limited = sendable_pages({"full": range(1, 5)}, made, CHAIN, ends, {"full": 2})
    assert [len(pages.tags) for pages in limited.values()] == ([min(2, len(tags))] if tags else [])
    assert sendable_pages({"full": range(1, 5), "state": range(4, 5)}, made, CHAIN, {}).get("state") is None


@dataclass
class Sender:
    """Stands in for `KVSender`: a reader that wants nothing more, and says what a test has it say."""

    outcomes: list[RoomGranted | RoomReleased] = field(default_factory=list)
    unconfirmed: set[RoomId] = field(default_factory=set)
    refuses_metadata: bool = False
    written: list[tuple[object, ...]] = field(default_factory=list)

    def check(self) -> list[str]:
        return []

    def poll(self) -> Iterator[RoomGranted | RoomReleased]:
        outcomes, self.outcomes = self.outcomes, []
        return iter(outcomes)

    def granted(self, room: RoomId) -> bool:
        return True

    def wanted(self, room: RoomId) -> dict[str, range]:
        return {}

    def write(self, *about: object) -> None:
        self.written.append(about)

    def seal(self, *about: object) -> None:
        if self.refuses_metadata:
            raise WireError("its metadata is too long")


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_request_whose_pages_arrived_damaged_is_named_also_when_it_has_left(left: bool, damaged: bool) -> None:
    """What it computed is in the tree: others would be sent the same pages again."""
    parts, sender = PrefillParts(), Sender()
    handover = PrefillHandover(cast(KVSender, sender), parts.requests)
    first, other = parts.ask("a", 9), parts.ask("b", 9)
    parts.step()
    if left:
        handover._unconfirmed[first.submit.room] = first
        parts.leave(first)
    room = first.submit.room
    sender.outcomes = [RoomGranted(other.submit.room), RoomReleased(room, False, "decode gave it up", damaged)]
    told = list(handover.poll())
    assert told[0] == Granted(other)
    want: list[object] = [Damaged(first)] if damaged else []
    assert told[1:] == want + ([] if left else [Lost(first, "decode gave it up")])
    assert handover._unconfirmed == {}
    sender.outcomes = [RoomReleased(room, False, "late", damaged=True)]
    assert [type(one) for one in handover.poll()] == ([] if left else [Damaged, Lost])
    assert isinstance(first.submit, Submit)


def test_who_could_not_be_sent_whole_waits_for_no_word_of_decode() -> None:
    parts, sender = PrefillParts(), Sender(refuses_metadata=True)
    handover = PrefillHandover(cast(KVSender, sender), parts.requests)
    request = parts.ask("a", 9)
    parts.scheduler.admit()
    parts.step()
    request.step(PrefillEvent.COMPUTED)
    request.first = DrawnToken(7, None)
    with pytest.raises(WireError, match="too long"):
        handover.write(request, DONE)
    assert handover.check() == []
    sender.refuses_metadata = False
    request.starts = 2
    assert handover.write(request, DONE)
    assert [about[3:] for about in sender.written] == [(0,), (2,)], (
        "what earlier starts sent by layers is not announced"
    )
    assert handover.check() == ["1 requests wait for decode's word, not the rooms that do"]
    sender.unconfirmed.add(request.submit.room)
    assert handover.check() == []


def held(attempt: int) -> tuple[DecodeParts, DecodeRequest]:
    """This attempt at a request, which waits."""
    parts = DecodeParts()
    request = parts.transfers.open(SESSION, structs.replace(parts.submit("a"), attempt=attempt))
    assert isinstance(request, DecodeRequest)
    parts.requests.add(request)
    return parts, request


@pytest.mark.parametrize(("here", "named", "ends"), [(0, 0, True), (0, 1, True), (1, 1, True), (1, 0, False)])
def test_a_cancel_ends_the_attempt_that_it_names_and_those_before_it(here: int, named: int, ends: bool) -> None:
    parts, request = held(here)
    left = list[DecodeRequest]()
    for session in (SessionId(SESSION + 1), SESSION):
        assert left == [], "another router's cancel is of no request of this one"
        assert parts.requests.accept(session, Cancel(RequestId("a"), named), lambda r, _: left.append(r)) is None
    assert left == [request] * ends
    assert parts.requests.take_events() == []


@pytest.mark.parametrize("attempt", [0, 1, 2])
def test_only_a_later_attempt_takes_the_place_of_one_that_is_here(attempt: int) -> None:
    parts, request = held(1)
    later = structs.replace(request.submit, attempt=attempt)
    accepted = parts.requests.accept(SESSION, later, lambda r, _: parts.requests.remove(r))
    assert (accepted, parts.requests.holds(request)) == ((later, False) if attempt == 2 else (None, True))
    told = [(event.attempt, event.error) for _, event in parts.requests.take_events() if isinstance(event, Done)]
    assert told == ([] if attempt == 2 else [(attempt, ErrorKind.INVALID)])


def test_a_replay_is_as_long_as_its_tokens_whatever_its_client_asked_for() -> None:
    parts, request = held(1)
    longer = structs.replace(request.submit, attempt=2, tokens=tuple(range(parts.requests.fits.max_positions + 1)))
    assert parts.requests.accept(SESSION, longer, lambda r, _: parts.requests.remove(r)) is None
    ((_, told),) = parts.requests.take_events()
    assert isinstance(told, Done)
    assert told.error is ErrorKind.TOO_LONG
