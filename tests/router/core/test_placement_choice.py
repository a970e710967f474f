"""What a record says of a choice: who was considered at which cost, and why each of the others was not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.stage import Stage
from twinpool.contracts.config.worker_config import DisaggregationConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.request_record import MAX_CANDIDATES, MAX_NAMED, PlacementChoice, RefusedWorkers
from twinpool.contracts.messages.router_commands import Picture
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL
from twinpool.contracts.sampling_params import JUDGED, AdapterRef
from twinpool.router.core.placement import LOAD_OF_LOADING
from twinpool.router.core.routing_policies import LocalPrefill
from twinpool.router.kv_indexer.prefix_indexes import PromptHits

PREFILL, DECODE = Role.PREFILL, Role.DECODE
OLD, NEW = "invariant:x86-64-v3", "invariant:x86-64-v4"


def of_classes(*classes: str) -> Stage:
    """Two prefill and two decode workers of these numerics classes."""
    on = Stage(2, 2, worker_wait_s=5.0)
    for worker, numerics in zip(on.cluster.workers.values(), classes, strict=True):
        worker.numerics = numerics
    on.view()
    return on


def latest(on: Stage, rid: RequestId, role: Role) -> PlacementChoice:
    """The request's last choice of a worker of `role`."""
    return next(one for _, one in reversed(on.requests[rid].journal.choices) if one.role is role)


def refused(on: Stage, rid: RequestId, role: Role) -> dict[str, tuple[str, ...]]:
    """The names of those that could not be chosen, by reason."""
    choice = latest(on, rid, role)
    assert all(one.count == len(one.workers) for one in choice.refused)
    return {one.reason: one.workers for one in choice.refused}


def begun_in(on: Stage, numerics: str) -> RequestId:
    """A request whose answer has begun in this class."""
    rid = next(rid for rid in (on.submit() for _ in range(4)) if on.requests[rid].numerics == f"{numerics} weights")
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 2)
    return rid


def test_candidates_are_the_best_few_in_order_with_what_the_policy_compares() -> None:
    on = Stage(1, 20, policy="least_loaded")
    for _ in range(20):
        on.submit()
    for name in [f"decode-{n}" for n in range(7)]:
        on.drain(name)
    for _ in range(3):
        on.submit()
    choice = latest(on, on.submit(), DECODE)
    assert len(choice.candidates) == MAX_CANDIDATES
    assert choice.others == 13 - MAX_CANDIDATES
    loads = [one.load for one in choice.candidates]
    assert loads == [1] * MAX_CANDIDATES, "those with two in flight are among the others"
    assert [one.cost for one in choice.candidates] == loads
    assert choice.chosen in {one.worker for one in choice.candidates}
    assert choice.refused == (
        RefusedWorkers("not ready, or not linked", 7, tuple(f"decode-{n}" for n in range(MAX_NAMED))),
    )


def test_a_candidate_shows_what_it_holds_of_the_prompt() -> None:
    on, prompt = Stage(2, 1), tuple(range(100, 400))
    first = on.submit(prompt)
    on.finish()
    (decode,) = latest(on, first, DECODE).candidates
    assert decode.held == 0
    holder = latest(on, first, PREFILL).chosen
    again = latest(on, on.submit((*prompt, 7, 8)), PREFILL)
    held = {one.worker: one.held for one in again.candidates}
    assert held[holder] >= 256
    assert sum(held.values()) == held[holder], "the other has seen none of it"


def test_a_worker_that_failed_the_request_is_avoided_and_no_other_is_left_out() -> None:
    on = Stage(2, 2)
    rid = on.submit()
    assert refused(on, rid, DECODE) == {}
    at_fault = on.leg(rid, DECODE)
    on.error(rid, DECODE, ErrorKind.WORKER)
    assert refused(on, rid, DECODE) == {"avoided after it failed this request": (at_fault,)}
    assert refused(on, rid, PREFILL) == {}


@pytest.mark.parametrize("role", [PREFILL, DECODE])
def test_no_worker_of_an_older_build_is_sent_a_picture(role: Role) -> None:
    on = Stage(2, 2, worker_wait_s=5.0)
    old = on.cluster.workers[f"{role}-0"]
    for worker in on.cluster.workers.values():
        worker.stream = "here:1"
    old.stream_protocol = 2
    on.view()
    rids = []
    for _ in range(6):
        request = on.request()
        request.pictures = (Picture(9, 8, 8, 1, bytes(192)),)
        rids.append(on.take(request))
    assert {on.requests[rid].workers[role] for rid in rids} == {f"{role}-1"}
    decoder = on.cluster.workers["decode-1"]
    assert all(not picture.pixels for submit in decoder.submits for picture in submit.pictures)
    assert f"{role}-0" in {on.requests[on.submit()].workers[role] for _ in range(6)}


@pytest.mark.parametrize("role", [PREFILL, DECODE])
@pytest.mark.parametrize("places", [{"across": 1}, {"whole": True}])
def test_a_picture_whose_positions_are_turned_goes_to_who_knows_of_that(role: Role, places: dict[str, Any]) -> None:
    on = Stage(2, 2, worker_wait_s=5.0)
    old = on.cluster.workers[f"{role}-0"]
    for worker in on.cluster.workers.values():
        worker.stream = "here:1"
    old.stream_protocol = 5
    on.view()
    rids = []
    for _ in range(6):
        request = on.request()
        request.pictures = (Picture(9, 8, 8, 1, bytes(192), **places),)
        rids.append(on.take(request))
    assert {on.requests[rid].workers[role] for rid in rids} == {f"{role}-1"}


ADAPTER = AdapterRef("a", "digest", "/a")


@pytest.mark.parametrize(
    ("asked", "places", "build"),
    [
        ({"max_tokens": 0, "pooling": "last", "adapter": ADAPTER}, {}, 4),
        ({"max_tokens": 0, "pooling": JUDGED, "adapter": ADAPTER}, {}, 6),
        ({"max_tokens": 0, "pooling": "mean", "adapter": ADAPTER}, {}, 8),
        ({"routed_experts": True, "adapter": ADAPTER}, {}, 9),
        ({"routed_experts": True}, {"across": 1}, 9),
        ({"adapter": ADAPTER}, {"across": 1}, 5),
        ({"adapter": ADAPTER}, {"whole": True}, 4),
    ],
)
def test_a_request_goes_to_builds_that_know_all_that_it_asks_for(
    asked: dict[str, Any], places: dict[str, Any], build: int
) -> None:
    """`build`: the last version of streams that knows one of the two things, and not the other."""
    on = Stage(2, 2, worker_wait_s=5.0)
    for name, worker in on.cluster.workers.items():
        worker.stream = "here:1"
        worker.stream_protocol = build if name.endswith("-0") else STREAM_PROTOCOL
    on.view()
    for _ in range(6):
        request = on.request(**asked)
        request.pictures = (Picture(9, 8, 8, 1, bytes(192), **places),) if places else ()
        rid = on.take(request)
        assert {"prefill-1"} <= set(on.requests[rid].workers.values()) <= {"prefill-1", "decode-1"}


def test_a_pair_whose_hand_over_failed_is_not_tried_again_while_there_is_another() -> None:
    """Though the decode worker, which wasn't at fault, has the least to do."""
    on = Stage(1, 2)
    rid = on.submit()
    on.submit()
    failed = on.leg(rid, DECODE)
    on.error(rid, DECODE, ErrorKind.ROOM, blame=WorkerName("prefill-0"))
    on.tick(5.0)
    assert on.leg(rid, DECODE) != failed
    assert refused(on, rid, DECODE) == {"a hand-over from prefill-0 to it has failed": (failed,)}


def test_a_pair_whose_hand_over_failed_is_tried_again_where_there_is_no_other() -> None:
    on = Stage(1, 1)
    rid = on.submit()
    on.error(rid, DECODE, ErrorKind.ROOM, blame=WorkerName("prefill-0"))
    on.tick(5.0)
    assert on.leg(rid, DECODE) == "decode-0"
    on.finish()
    on.assert_answered(rid)


def test_workers_of_another_class_than_the_answers_are_left_out_for_that() -> None:
    on = of_classes(OLD, NEW, OLD, NEW)
    rid = begun_in(on, OLD)
    on.kill("decode-0")
    on.restart("decode-0")
    on.tick(1.0)
    reason = "of another numerics class, or of other weights, than those with which the answer began"
    assert refused(on, rid, PREFILL) == {reason: ("prefill-1",)}
    assert refused(on, rid, DECODE) == {reason: ("decode-1",)}


def test_workers_of_another_hand_over_class_than_their_peers_are_left_out_for_that() -> None:
    on = of_classes(OLD, OLD, NEW, OLD)
    rid = on.submit()
    prefill = on.leg(rid, PREFILL)
    assert refused(on, rid, PREFILL) == {}
    reason = f"{prefill} can't hand over to it: another hand-over class"
    assert refused(on, rid, DECODE) == {reason: ("decode-0",)}


def test_prefill_workers_without_a_peer_of_their_class_are_left_out_for_that() -> None:
    on = of_classes(OLD, NEW, NEW, NEW)
    rid = on.submit()
    reason = "no decode worker that could take the request is of its hand-over class"
    assert refused(on, rid, PREFILL) == {reason: ("prefill-0",)}
    assert refused(on, rid, DECODE) == {}


@pytest.mark.parametrize(("busy", "reasons"), [(False, {}), (True, {"it has no room for more prompts": ("decode-1",)})])
def test_a_decode_worker_without_room_for_a_prompt_is_left_out_of_those_that_could_compute_it(
    busy: bool, reasons: dict[str, tuple[str, ...]]
) -> None:
    bounds = DisaggregationConfig("conditional", step_tokens=32, local_tokens=64)
    on = Stage(1, 2, local=LocalPrefill(bounds, 16))
    for number in range(12):
        tokens = 10 * (1 + number % 4)
        on.submit(tuple(number * 1000 + n for n in range(tokens)))
        on.clock.advance(0.05 + 0.01 * tokens)
        on.finish()
    full = on.core.workers.named("decode-1")
    assert full is not None
    if busy:  # With what another router has given it.
        full.see(full.record, replace(full.status, routers=2, prompt_tokens=60))
    on.submit(tuple(range(50_000, 50_100)))  # Prefill has a queue.
    rid = on.submit(tuple(range(60_000, 60_010)))
    assert on.requests[rid].local == "earlier"
    assert refused(on, rid, DECODE) == reasons


def test_pages_that_come_from_decodes_host_memory_take_room_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is promised all that its device doesn't have."""
    on = Stage(1, 1)
    key = on.key("decode-0")
    hits = PromptHits({key: 16}, {key: 48})
    monkeypatch.setattr(on.core.indexes, "hits", lambda hashes, now: hits)
    on.submit(tuple(range(64)), 6)
    entry = on.core.workers.named("decode-0")
    assert entry is not None
    assert entry.promised == 64 + 6 - 16


def test_a_request_goes_where_its_adapter_is_in_memory_while_that_worker_has_little_more_in_flight() -> None:
    on = Stage(1, 2, policy="least_loaded")
    for entry in on.core.workers:
        held = ("digest",) if entry.record.name == "decode-1" else ("another",)
        entry.status = replace(entry.status, adapters=held)
    asked = [on.submit(adapter=ADAPTER) for _ in range(LOAD_OF_LOADING[DECODE] + 2)]
    *near, last = [latest(on, rid, DECODE).chosen for rid in asked]
    assert near == ["decode-1"] * len(near)
    assert last == "decode-0", "reading it is quicker by now"
