"""Requests off the device and back, by themselves: host memory that is full, storage that refuses, and their order."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from tests.support.decode_parts import DecodeParts
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.cache.storage.io_queue import StorageOp
from twinpool.cache.storage.storage_backend import ObjectName
from twinpool.cache.swap.swap_storage import SwapPlace
from twinpool.contracts.errors import ErrorKind
from twinpool.decode.request import DecodeEvent, DecodePhase, DecodeRequest, RequestFailed


def crowd(host_pages: int, *names: str, **sections: Any) -> tuple[DecodeParts, list[DecodeRequest]]:
    """Requests that run, of three pages each, with room for `host_pages` on the host, and storage."""
    parts = DecodeParts(64, host_pages=host_pages, storage=True, decode={"retract": "copy"}, **sections)
    requests = []
    for name in names:
        requests += parts.run(name, prompt=9, most=20)
        parts.clock.advance(1.0)
    return parts, requests


def turn(parts: DecodeParts, *, storage: bool = True) -> list[RequestFailed]:
    """A round of the worker without a step: what is under way ends, who may come back does."""
    if storage and parts.queue is not None:
        parts.queue.run_all()
    parts.manager.poll()
    failed = list(parts.scheduler.admit())
    parts.manager.launch()
    failed += parts.scheduler.returned()
    assert parts.scheduler.check() == []
    return failed


def away(parts: DecodeParts, request: DecodeRequest, rounds: int = 3) -> list[RequestFailed]:
    """Retract a request, and keep whoever is away from coming back; returns failures, whose requests are gone then."""
    parts.scheduler.retract(request)
    failed: list[RequestFailed] = []
    for _ in range(rounds):
        assert parts.queue is not None
        parts.queue.run_all()
        parts.manager.poll()
        for lost in parts.scheduler.retraction.advance():
            failed.append(lost)
            gone(parts, lost.request)
    return failed


def gone(parts: DecodeParts, request: DecodeRequest) -> None:
    parts.leave(request)
    request.step(DecodeEvent.END)


def placed(requests: list[DecodeRequest]) -> list[SwapPlace | None]:
    return [request.swapped.place if request.swapped is not None else None for request in requests]


def test_where_the_host_is_full_state_of_who_comes_back_last_goes_on_to_storage() -> None:
    parts, requests = crowd(6, "a", "b", "c", "d")
    for request in requests[:3]:
        assert away(parts, request, 6) == []
    assert placed(requests[:3]) == [SwapPlace.HOST, SwapPlace.STORED, SwapPlace.HOST]
    assert away(parts, requests[3], 6) == []
    assert placed(requests) == [SwapPlace.HOST, SwapPlace.STORED, SwapPlace.STORED, SwapPlace.HOST]


def test_who_is_on_storage_is_not_overtaken_by_younger_ones_on_the_host() -> None:
    parts, (first, second, third) = crowd(6, "a", "b", "c")
    away(parts, third, 6)
    away(parts, second, 6)
    away(parts, first, 6)
    assert placed([first, second, third]) == [SwapPlace.HOST, SwapPlace.HOST, SwapPlace.STORED]
    back: list[DecodeRequest] = []
    for _ in range(20):
        assert turn(parts) == []
        back += [request for request in parts.scheduler.running if request not in back]
    assert back == [first, second, third]
    parts, (first, second, third) = crowd(6, "a", "b", "c")
    for request in (first, second, third):
        away(parts, request, 6)
    assert placed([first, second, third]) == [SwapPlace.HOST, SwapPlace.STORED, SwapPlace.HOST]
    assert parts.queue is not None
    for _ in range(4):  # Storage answers nothing yet: the third could come, and waits.
        assert turn(parts, storage=False) == []
    assert list(parts.scheduler.running) == [first]
    for _ in range(8):
        assert turn(parts) == []
    assert list(parts.scheduler.running) == [first, second, third]


def test_who_has_come_back_is_not_retracted_again_before_a_step_of_it_has_counted() -> None:
    parts, (request,) = crowd(6, "a", faults={"retract_every": 1})
    away(parts, request)
    for _ in range(3):
        assert turn(parts) == []
    assert list(parts.scheduler.running) == [request]
    assert request.latest is None
    assert not request.stepped
    assert parts.scheduler.pressure.choose_victims([request], parts.scheduler.running) == []
    parts.scheduler.launched([])
    assert list(parts.scheduler.running) == [request], "a fault that wants retractions leaves it alone as well"
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    list(parts.steps.landed(go_on=False))
    parts.scheduler.launched(batch)
    assert request.phase is DecodePhase.RETRACTING


@pytest.mark.parametrize("op", [StorageOp.WRITE, StorageOp.READ])
def test_what_storage_refuses_is_not_offered_again_and_what_it_lost_is_computed_again(op: StorageOp) -> None:
    parts, requests = crowd(6, "a", "b", "c")
    asked: list[ObjectName] = []

    def fault(kind: StorageOp, name: ObjectName) -> str | None:
        if kind is op:
            asked.append(name)
            return "the disk failed"
        return None

    assert parts.queue is not None
    parts.queue.fault = fault
    failed: list[RequestFailed] = []
    for request in requests:
        failed += away(parts, request, 8)
    if op is StorageOp.WRITE:
        assert [(lost.request, lost.kind) for lost in failed] == [(requests[2], ErrorKind.RETRACTED)]
        assert placed(requests[:2]) == [SwapPlace.HOST, SwapPlace.HOST]
        assert len({(name.pool, name.chain) for name in asked}) == len(asked), "each page is offered once"
        for _ in range(8):
            assert turn(parts) == []
        assert list(parts.scheduler.running) == requests[:2]
    else:
        assert failed == []
        for _ in range(12):
            for lost in turn(parts):
                failed.append(lost)
                gone(parts, lost.request)
        assert [lost.request for lost in failed] == [requests[1]]
    for request in list(parts.requests):
        parts.leave(request)
    for _ in range(3):
        parts.queue.run_all()
        parts.manager.poll()
    host = parts.manager.host
    assert host is not None
    assert parts.manager.check() == []
    parts.manager.tree.eviction.evict(Tier.HOST, "full", 1 << 30)
    assert host.allocators["full"].free == host.allocators["full"].total


def test_a_swap_out_that_finds_no_room_keeps_nothing_of_the_tree() -> None:
    parts, (first, second) = crowd(3, "a", "b")
    away(parts, first)
    locks = len(parts.manager.tree.locks)
    assert parts.queue is not None
    parts.queue.fault = lambda op, name: "the disk failed"
    (failed,) = away(parts, second, 6)
    assert failed.request is second
    assert len(parts.manager.tree.locks) == locks - 1, "its own is given back, and the copy's as well"


def test_retractions_on_purpose_are_not_counted_and_who_was_retracted_often_comes_back_with_all_pages() -> None:
    parts, (request, _) = crowd(9, "a", "b")
    limit = parts.config.decode.retract_limit
    for number in range(limit + 1):
        assert request.retractions == 0
        parts.scheduler.retract(request, on_purpose=True)
        for _ in range(4):
            assert turn(parts) == []
        assert request in parts.scheduler.running, number
        assert len(request.held.tables["full"]) == 3, "the pages of its state and of its next step"
    for number in range(limit):
        assert request.retractions == number
        assert not parts.scheduler.retraction.assured(request)
        parts.scheduler.retract(request)
        for _ in range(4):
            assert turn(parts) == []
    assert parts.scheduler.retraction.assured(request)
    assert len(request.held.tables["full"]) * 4 >= request.positions, "nothing takes it off the device again"
    assert parts.scheduler.check() == []


def test_who_is_retracted_with_a_step_under_way_leaves_when_that_has_landed() -> None:
    """What the step writes is part of its state, and its token counts."""
    device = AdversarialDevice(1, stray=0.0, polled=0.0)
    parts = DecodeParts(64, device, host_pages=9, decode={"retract": "copy"})
    (request,) = parts.run("a", prompt=9, most=20)
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    parts.scheduler.launched(batch)
    parts.scheduler.retract(request)
    for _ in range(3):
        assert parts.scheduler.retraction.advance() == []
        assert (request.swapped, request.allocation is None) == (None, False)
    assert list(parts.steps.landed(go_on=False)) == []
    assert len(parts.requests.take_events()) == 1
    assert parts.scheduler.retraction.advance() == []
    assert request.swapped is not None
    assert request.swapped.positions == request.committed == 10
    device.settle()
    for _ in range(4):
        assert turn(parts) == []
        device.settle()
    assert list(parts.scheduler.running) == [request]


def test_who_is_retracted_while_its_prompt_comes_from_the_host_leaves_when_that_has_come() -> None:
    device = AdversarialDevice(1, stray=0.0, polled=0.0)
    parts = DecodeParts(64, device, host_pages=12, decode={"retract": "copy"})
    (before,) = parts.run("ab", prompt=9, most=20)
    parts.pages.cache(before)
    parts.leave(before)
    for _ in range(3):
        device.settle()
        parts.manager.poll()
    assert parts.manager.tree.eviction.evict(Tier.DEVICE, "full", 1 << 30)
    (request,) = parts.run("ba", prompt=9, most=20)
    parts.manager.launch()
    assert request.held.cached.host
    parts.scheduler.retract(request)
    for _ in range(3):
        assert parts.scheduler.retraction.advance() == []
        assert request.swapped is None
    device.settle()
    parts.manager.poll()
    assert parts.scheduler.retraction.advance() == []
    assert request.swapped is not None


def test_pages_of_one_that_ends_on_its_way_back_are_nobodys_before_its_state_has_been_written() -> None:
    device = AdversarialDevice(1, stray=0.0, polled=0.0)
    parts = DecodeParts(64, device, host_pages=9, decode={"retract": "copy"})
    (request,) = parts.run("a", prompt=9, most=20)
    parts.scheduler.retract(request)
    for _ in range(2):
        device.settle()
        parts.manager.poll()
        assert list(parts.scheduler.admit()) == []
    assert request.phase is DecodePhase.RESUMING
    pages = parts.manager.pools.allocators["full"]
    held = len(request.held.tables["full"])
    gone(parts, request)
    assert pages.quarantined == held
    device.settle()
    parts.manager.poll()
    assert (pages.quarantined, pages.leases) == (0, 0)


def test_the_time_of_a_copy_is_measured_from_its_own_begin_and_goes_with_its_request() -> None:
    parts, (first, second) = crowd(9, "a", "b")
    away(parts, first)
    parts.scheduler.retraction.resume(lambda request: True)
    gone(parts, first)
    assert parts.scheduler.check() == []
    away(parts, second)
    for _ in range(4):
        assert turn(parts) == []
    assert list(parts.scheduler.running) == [second]


def test_copies_out_and_back_are_measured_each_by_its_own_time() -> None:
    device = AdversarialDevice(1, stray=0.0, polled=0.0)
    parts = DecodeParts(64, device, host_pages=9, decode={"retract": "copy"})
    (request,) = parts.run("a", prompt=9, most=20)
    parts.scheduler.retract(request)
    assert parts.scheduler.retraction.advance() == []
    parts.clock.advance(2.0)
    for _ in range(3):
        device.settle()
        parts.manager.poll()
        assert list(parts.scheduler.admit()) == []
    assert request.phase is DecodePhase.RESUMING
    parts.clock.advance(4.0)
    parts.manager.launch()
    for _ in range(3):
        device.settle()
        parts.manager.poll()
        assert parts.scheduler.returned() == []
    assert list(parts.scheduler.running) == [request]
    rates, nbytes = parts.scheduler.retraction.rates, 3 * parts.manager.spec.unit_bytes("full")
    assert (rates.out_bytes_per_s, rates.back_bytes_per_s) == (nbytes / 2.0, nbytes / 4.0)
    assert rates.positions_per_s == 0.0, "its prompt took no time"


def test_a_request_on_the_host_keeps_nothing_of_the_pages_that_it_left() -> None:
    """Rows of the device's block tables go by the life of an allocation's tables: the retracted must not have any."""
    parts, (request,) = crowd(32, "a")
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    list(parts.steps.landed(go_on=False))
    assert request.settled
    table = weakref.ref(request.held.tables["full"])
    del batch
    away(parts, request)
    assert request.allocation is None
    assert not request.settled
    gc.collect()
    assert table() is None


@pytest.mark.parametrize("copied", [True, False])
def test_whether_to_copy_goes_by_the_bytes_of_every_pool(copied: bool) -> None:
    parts = DecodeParts(64, kind="full+state", host_pages=9)
    (request,) = parts.run("a", prompt=9, most=20)
    nbytes = 3 * parts.manager.spec.unit_bytes("full") + parts.manager.spec.unit_bytes("state")
    rates = parts.scheduler.retraction.rates
    rates.out_bytes_per_s = rates.back_bytes_per_s = 2.0 * nbytes  # So that a copy takes half a second each way.
    rates.positions_per_s = request.committed / (1.01 if copied else 0.99)
    parts.scheduler.retract(request)
    told = parts.scheduler.retraction.advance()
    assert [one.kind for one in told] == ([] if copied else [ErrorKind.RETRACTED])
    assert (request.swapped is not None) == copied
