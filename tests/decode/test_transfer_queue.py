"""The transfer queue by itself: rooms that are opened, granted and end, without a worker and without prefill."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tests.support.decode_parts import SESSION, DecodeParts
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import DEVICE, DeviceOp, DeviceStream, spans
from twinpool.contracts.errors import ErrorKind, UnorderedAccess
from twinpool.contracts.ids import RoomId, WorkerName
from twinpool.decode.request import DecodeEvent, DecodePhase, DecodeRequest, PromptReceived, RequestFailed, RequestLeft
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptAnswered
from twinpool.worker.request_table import AdmissionRefusal


def test_a_request_expects_every_page_of_its_prompt() -> None:
    parts = DecodeParts()
    request = parts.ask("a", prompt=6)
    expected = parts.receiver.opened[RoomId("a")]
    assert (expected.positions, len(expected.keys)) == (6, 2)
    assert len(request.prefix) == 1, "the last page isn't whole"
    assert request.deadline == request.submit.deadline_s


def test_who_has_no_peer_or_a_room_that_was_used_is_refused_and_says_why() -> None:
    parts = DecodeParts()
    submit = parts.submit("a")
    alone = parts.transfers.open(SESSION, structs.replace(submit, peer=None))
    assert isinstance(alone, AdmissionRefusal)
    assert alone.kind is ErrorKind.INVALID
    assert isinstance(parts.transfers.open(SESSION, submit), DecodeRequest)
    again = parts.transfers.open(SESSION, submit)
    assert isinstance(again, AdmissionRefusal)
    assert (again.kind, again.message) == (ErrorKind.ROOM, "room a exists already")


def test_without_a_slot_nothing_is_taken() -> None:
    parts = DecodeParts()
    request, free = parts.ask("a"), parts.manager.supply.free_pages("full")
    parts.receiver.slots = False
    assert not parts.transfers.preallocate(request)
    assert request.allocation is None
    assert (parts.manager.supply.free_pages("full"), len(parts.manager.allocations)) == (free, 0)


def test_tokens_that_were_held_are_counted_once_and_with_the_grant() -> None:
    parts = DecodeParts()
    parts.leave(*parts.run("ab", prompt=24))
    assert parts.transfers.counters["prompt_tokens_held"] == 0
    request = parts.ask("ba", prompt=26)
    parts.receiver.slots = False
    assert not parts.transfers.preallocate(request)
    assert parts.transfers.counters["prompt_tokens_held"] == 0, "it has got nothing yet"
    parts.receiver.slots = True
    assert parts.transfers.preallocate(request)
    assert parts.transfers.counters["prompt_tokens_held"] == 24


def test_without_pages_nothing_is_taken() -> None:
    parts = DecodeParts(pages=4)
    request = parts.ask("a", prompt=40, most=4)
    assert not parts.transfers.preallocate(request)
    assert parts.receiver.granted == {}


def test_what_has_arrived_is_the_requests_with_the_first_token() -> None:
    parts = DecodeParts()
    request = parts.ask("a", prompt=6)
    list(parts.scheduler.admit())
    parts.clock.advance(2.0)
    parts.receiver.outcomes.append(replace(parts.arrived(request, token=9), hidden_s=0.75, exposed_s=0.25))
    assert list(parts.transfers.poll()) == [PromptReceived(request, 100)]
    assert request.phase is DecodePhase.RUNNING
    assert (request.tokens[-1], request.committed) == (9, 6)
    assert request.marks == {"grant": 0.0, "arrived": 2.0, "hidden": 0.75, "exposed": 0.25}
    assert parts.transfers.counters["received_bytes"] == 100
    assert parts.manager.check() == []


def test_each_end_of_a_room_is_told_with_its_request() -> None:
    parts = DecodeParts()
    lost, answered = parts.ask("lost"), parts.ask("answered")
    blame = WorkerName("prefill-0")
    parts.receiver.outcomes += [
        HandoverFailed(RoomId("lost"), ErrorKind.ROOM, "it died", blame),
        PromptAnswered(RoomId("answered")),
    ]
    assert list(parts.transfers.poll()) == [
        RequestFailed(lost, ErrorKind.ROOM, "it died", blame),
        RequestLeft(answered, "prefill ended it"),
    ]


def test_the_end_of_a_room_that_is_no_requests_is_told_as_it_is() -> None:
    parts = DecodeParts()
    parts.receiver.outcomes.append(PromptAnswered(RoomId("of a pull")))
    assert list(parts.transfers.poll()) == [PromptAnswered(RoomId("of a pull"))]


def test_what_arrives_for_a_request_that_has_ended_meanwhile_is_given_back() -> None:
    """Two rooms end in one poll, and the first of them takes the other's request with it."""
    parts = DecodeParts()
    first, second = parts.ask("a"), parts.ask("b")
    free = parts.manager.supply.free_pages("full")
    list(parts.scheduler.admit())
    parts.receiver.outcomes += [parts.arrived(first), parts.arrived(second)]
    told = []
    for outcome in parts.transfers.poll():
        told.append(outcome)
        parts.leave(second)
    assert told == [PromptReceived(first, 100)]
    parts.scheduler.start(first)
    parts.leave(first)
    assert parts.manager.supply.free_pages("full") == free
    assert parts.manager.check() == []


def test_pages_that_a_launched_operation_still_reads_are_granted_to_nobody() -> None:
    """The prefill worker writes to them from the grant on, and no stream of this device orders that."""
    device = AdversarialDevice(1, polled=0.0)
    parts = DecodeParts(pages=8, device=device)
    request, every = parts.ask("a"), list(range(8))
    reading = DeviceOp("a step", DeviceStream.COMPUTE, reads=spans(DEVICE, {"full": every}))
    device.submit(reading, lambda: None).wait()
    assert parts.transfers.preallocate(request), "it is over"
    parts.leave(request)
    under_way = device.submit(reading, lambda: None)
    with pytest.raises(UnorderedAccess, match="grant of b"):
        parts.transfers.preallocate(parts.ask("b"))
    under_way.wait()


@pytest.mark.parametrize("ending", ["fails", "leaves", "arrives"])
def test_who_waits_for_anothers_prompt_goes_on_when_that_one_is_gone(ending: str) -> None:
    """However long it would have waited: there is nothing to wait for any more."""
    parts = DecodeParts(decode={"prompt_wait_s": 1000.0})
    first = parts.ask("a", prompt=16)
    assert list(parts.scheduler.admit()) == []
    submit = structs.replace(parts.submit("b"), tokens=(*first.submit.tokens, 1, 2), prompt_len=18)
    second = parts.transfers.open(SESSION, submit)
    assert isinstance(second, DecodeRequest)
    parts.requests.add(second)
    parts.scheduler.add(second)
    assert list(parts.scheduler.admit()) == []
    assert list(parts.scheduler.waiting) == [second]
    assert second.behind is first
    if ending == "arrives":
        parts.receiver.outcomes.append(parts.arrived(first))
        assert len(list(parts.transfers.poll())) == 1
        parts.scheduler.start(first)
    else:
        parts.leave(first)
        first.step(DecodeEvent.END)
    assert list(parts.scheduler.admit()) == []
    assert second.phase is DecodePhase.ARRIVING
    assert [note.kind for note in second.notes] == ["waited"]


def test_who_waited_for_one_that_is_gone_waits_for_the_next_that_receives_the_same_but_no_longer_in_all() -> None:
    parts = DecodeParts(decode={"prompt_wait_s": 10.0})
    first = parts.ask("a", prompt=16)
    list(parts.scheduler.admit())
    others = []
    for name in ("b", "c"):
        submit = structs.replace(parts.submit(name), tokens=(*first.submit.tokens, 1, 2), prompt_len=18)
        other = parts.transfers.open(SESSION, submit)
        assert isinstance(other, DecodeRequest)
        parts.requests.add(other)
        parts.scheduler.add(other)
        others.append(other)
    list(parts.scheduler.admit())
    parts.leave(first)
    first.step(DecodeEvent.END)
    parts.clock.advance(9.0)
    list(parts.scheduler.admit())
    assert [other.phase for other in others] == [DecodePhase.ARRIVING, DecodePhase.WAITING]
    assert others[1].behind is others[0]
    parts.clock.advance(1.0)
    list(parts.scheduler.admit())
    assert others[1].phase is DecodePhase.ARRIVING, "ten seconds in all"
