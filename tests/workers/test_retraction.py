"""Running requests that leave decode's device and come back: nothing of it shows, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.support.pool_sets import free_list
from tests.support.worker_pair import SESSION, Pair, pair, turns
from tests.support.worker_parts import (
    lengths_of,
    manager_of,
    receiver_of,
    retract_on,
    scheduler_of,
    slots_of,
    steps_of,
    table_of,
)
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import CapacityError, ErrorKind
from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request import PHASES, DecodePhase, DecodeRequest
from twinpool.decode.worker import DecodeWorker

PAGE = 16
HOST_BYTES = 1 << 23
COPY: dict[str, Any] = {"retract": "copy", "cache": {"host_bytes": HOST_BYTES}}


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(length)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


@contextmanager
def working(
    model: Path, tokens: int = 4096, storage: dict[str, Any] | None = None, **sections: Any
) -> Iterator[tuple[Pair, DecodeWorker]]:
    """A pair whose decode worker copies what it retracts."""
    sections.setdefault("decode", COPY)
    sizes = {Role.PREFILL: 4096, Role.DECODE: tokens}
    cache = {"page_tokens": PAGE} | ({"storage": storage} if storage else {})
    with pair(model, tokens=sizes, cache=cache, **sections) as both:
        yield both, both.decode


@contextmanager
def late(model: Path, **sections: Any) -> Iterator[tuple[Pair, DecodeWorker]]:
    """The same on devices that run nothing before somebody waits for it, or has looked a few times."""
    devices = {role: AdversarialDevice(1, stray=0.0, polled=0.05 if role is Role.DECODE else 0.1) for role in PAIR}
    # The seeds are chosen for copies that are late, not for checks of what arrived.
    decode_section = sections.pop("decode", COPY)
    sections["decode"] = {**decode_section, "cache": {**decode_section.get("cache", {}), "verify": False}}
    with working(model, devices=devices, **sections) as (both, decode):
        yield both, decode
    for device in devices.values():
        device.settle()


def run_until(both: Pair, decode: DecodeWorker, *, generated: int = 3, count: int = 1) -> list[DecodeRequest]:
    """Step until so many requests run that have drawn so many tokens."""
    for _ in turns(2000):
        both.step()
        good = [r for r in scheduler_of(decode).running if r.generated >= generated]
        if len(good) >= count:
            return good
    raise AssertionError("they never ran")


def until(both: Pair, what: Callable[[], bool]) -> None:
    for _ in turns(2000):
        if what():
            return
        both.step()
    raise AssertionError("it never came to that")


def undisturbed(model: Path, asked: list[tuple[list[int], int]]) -> list[list[int]]:
    with pair(model, cache={"page_tokens": PAGE}) as both:
        return [both.run(both.submit(prompt, greedy(count)))[0].list for prompt, count in asked]


def hold_back(decode: DecodeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes back for now."""
    monkeypatch.setattr(scheduler_of(decode).pressure, "has_room_for", lambda request: False)


# ------------------------------------------------------------ the life cycle


def test_every_phase_reaches_the_end() -> None:
    assert PHASES.dead_ends() == []
    for phase in DecodePhase:
        assert phase is DecodePhase.GONE or PHASES.rows[phase]


def test_a_request_that_was_retracted_gives_the_same_answer(model: Path) -> None:
    asked = [(prompt_of(1, 40), 30), (prompt_of(2, 7), 30)]
    expected = undisturbed(model, asked)
    with working(model) as (both, decode):
        requests = [both.submit(prompt, greedy(count)) for prompt, count in asked]
        for request in run_until(both, decode, count=2):
            scheduler_of(decode).retract(request)
        assert [answer.list for answer in both.run(*requests)] == expected
        counters = decode.status().counters
        assert counters["retractions"] == counters["resumptions"] == 2
        assert counters["retracted_bytes"] == counters["resumed_bytes"] > 0
        assert counters["recomputed"] == counters["retracted"] == 0


def test_what_a_copy_would_cost_is_judged_by_the_bytes_that_it_would_have(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[int, int]] = []

    def cheaper(nbytes: int, positions: int, rates: object) -> bool:
        judged.append((nbytes, positions))
        return True

    monkeypatch.setattr("twinpool.decode.retraction.retraction.cheaper_to_copy", cheaper)
    alone = {"retract": "auto", "cache": {"host_bytes": HOST_BYTES, "prefix_reuse": False}}
    with working(model, decode=alone) as (both, decode):
        request = both.submit(prompt_of(1, 40), greedy(30))
        (running,) = run_until(both, decode, count=1)
        scheduler_of(decode).retract(running)
        positions = running.committed
        until(both, lambda: decode.status().counters["retractions"] == 1)
        both.run(request)
        counters = decode.status().counters
        assert judged == [(int(counters["retracted_bytes"]), positions)]


def test_who_came_back_is_in_nobodys_way_before_it_took_a_step_and_its_copy_was_timed(model: Path) -> None:
    with working(model) as (both, decode):
        asked = [both.submit(prompt_of(seed, 20), greedy(30)) for seed in (1, 2)]
        first, second = run_until(both, decode, count=2)
        until(both, lambda: first.stepped and second.stepped)
        assert scheduler_of(decode).pressure.choose_victims([first], [first, second])
        for request in (first, second):
            scheduler_of(decode).retract(request)
        while first.under_way or second.under_way:
            both.step()
        for _ in range(2000):
            decode._admit()  # A round without its step.
            if first.phase is second.phase is DecodePhase.RUNNING:
                break
        assert scheduler_of(decode).pressure.choose_victims([first], [first, second]) == []
        assert scheduler_of(decode).retraction.rates.out_bytes_per_s > 0
        assert scheduler_of(decode).retraction.rates.back_bytes_per_s > 0
        both.run(*asked)


def test_sampled_answers_with_penalties_go_on_with_their_seed_and_history(model: Path) -> None:
    params = SamplingParams(
        max_tokens=20, temperature=0.9, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2
    )
    prompt = prompt_of(3, 20)
    with working(model) as (both, decode):
        (first,) = both.run(both.submit(prompt, params))
        again = both.submit(prompt, params)
        for generated in (4, 11):
            (request,) = run_until(both, decode, generated=generated)
            scheduler_of(decode).retract(request)
        (second,) = both.run(again)
        assert (second.list, second.logprobs) == (first.list, first.logprobs)


def test_retract_every_takes_all_off_the_device_and_lets_each_step_between(model: Path) -> None:
    asked = [(prompt_of(seed, 10 + 9 * seed), 20) for seed in range(4)]
    expected = undisturbed(model, asked)
    with working(model, faults={"retract_every": 1}) as (both, decode):
        requests = [both.submit(prompt, greedy(count)) for prompt, count in asked]
        assert [answer.list for answer in both.run(*requests)] == expected
        counters = decode.status().counters
        # The first token is prefill's, and who draws the last one has nothing to come back for.
        assert counters["retractions"] == counters["resumptions"] == 4 * (20 - 2)


def test_a_recomputed_request_ends_its_attempt_and_goes_on_from_its_tokens(model: Path) -> None:
    (prompt, count) = asked = (prompt_of(5, 33), 20)
    (expected,) = undisturbed(model, [asked])
    with working(model, decode={"retract": "recompute"}) as (both, decode):
        first = both.submit(prompt, greedy(count))
        (request,) = run_until(both, decode, generated=6)
        scheduler_of(decode).retract(request)
        (answer,) = both.run(first)
        assert answer.done is not None
        assert answer.done.error is ErrorKind.RETRACTED
        assert answer.done.error.retryable
        assert decode.status().counters["recomputed"] == 1
        assert decode.status().counters["retracted_bytes"] == 0
        emitted = answer.list
        (rest,) = both.run(both.submit(prompt, greedy(count), emitted=emitted))
        assert emitted + rest.list == expected
        held = rest.progress[Role.DECODE].cached_tokens
        assert held >= (len(prompt) + len(emitted) - 1) // PAGE * PAGE, "what it left in the tree is used again"


@pytest.mark.parametrize("quicker", ["copying", "computing"])
def test_what_is_quicker_by_the_rates_measured_is_done(model: Path, quicker: str) -> None:
    with working(model, decode={"cache": {"host_bytes": HOST_BYTES}}) as (both, decode):
        asked = both.submit(prompt_of(1, 40), greedy(20))
        (request,) = run_until(both, decode)
        rates = scheduler_of(decode).retraction.rates
        assert rates.positions_per_s > 0, "measured with its own hand-over"
        rates.out_bytes_per_s = rates.back_bytes_per_s = 1e12 if quicker == "copying" else 1.0
        scheduler_of(decode).retract(request)
        (answer,) = both.run(asked)
        assert answer.done is not None
        assert answer.done.error is (None if quicker == "copying" else ErrorKind.RETRACTED)
        counters = decode.status().counters
        assert (counters["resumptions"], counters["recomputed"]) == ((1, 0) if quicker == "copying" else (0, 1))


def test_without_room_on_the_host_it_is_computed_again(model: Path) -> None:
    with working(model, decode={"cache": {"host_bytes": 1 << 14}}) as (both, decode):
        request = both.submit(prompt_of(6, 200), greedy(20))
        scheduler_of(decode).retract(run_until(both, decode)[0])
        (answer,) = both.run(request)
        assert answer.done is not None
        assert answer.done.error is ErrorKind.RETRACTED
        assert decode.status().counters["recomputed"] == 1


def test_what_only_the_tree_holds_on_the_host_makes_room(model: Path) -> None:
    with working(model) as (both, decode):
        host = manager_of(decode).host
        assert host is not None
        seeds = iter(range(100, 200))
        while host.allocators["full"].free >= 3:
            both.run(both.submit(prompt_of(next(seeds), 200), greedy(2)))
        request = both.submit(prompt_of(7, 200), greedy(20))
        scheduler_of(decode).retract(run_until(both, decode)[0])
        (answer,) = both.run(request)
        assert answer.done is not None
        assert answer.done.error is None
        assert decode.status().counters["resumptions"] == 1


# ------------------------------------------------------------ pressure


def test_requests_grow_page_by_page(model: Path) -> None:
    with working(model) as (both, decode):
        both.submit(prompt_of(8, 20), greedy(100))
        (request,) = run_until(both, decode, generated=2)
        allocation = request.allocation
        assert allocation is not None
        sizes = set()
        while request.phase is DecodePhase.RUNNING:
            sizes.add((len(allocation.tables["full"]), -(-(request.committed + 1) // PAGE)))
            both.step(Role.DECODE)
        assert max(have - need for have, need in sizes) <= 1
        assert max(have for have, _ in sizes) == -(-119 // PAGE)


def learned(decode: DecodeWorker, length: int) -> None:
    """Answers are known to be of this length."""
    for _ in range(32):
        lengths_of(decode).ended(length)


def test_c10_who_was_retracted_comes_back_oldest_first_and_before_anybody_new(model: Path) -> None:
    """Phases are compared before and after each round; what decode itself says of who comes first isn't asked."""
    off = (DecodePhase.RETRACTING, DecodePhase.RETRACTED)
    with working(model, tokens=30 * PAGE) as (both, decode):
        learned(decode, 1)
        olds = [both.submit(prompt_of(seed, 60), greedy(110)) for seed in range(4)]
        until(both, lambda: sum(r.phase is DecodePhase.RETRACTED for r in table_of(decode)) >= 2)
        news = [both.submit(prompt_of(9 + n, 5), greedy(4)) for n in range(2)]
        until(both, lambda: sum(r.submit.request_id in news for r in table_of(decode)) == 2)
        back, waited = 0, 0
        granted: list[str] = []
        for _ in range(5000):
            if all(both.answers[r].done is not None for r in [*olds, *news]):
                break
            before = {r: r.phase for r in table_of(decode)}
            both.step()
            still_off = [r for r, phase in before.items() if phase in off and r.phase in off]
            came = [
                r
                for r, phase in before.items()
                if phase is DecodePhase.RETRACTED and r.phase not in (*off, DecodePhase.GONE)
            ]
            waiting = [r for r, phase in before.items() if phase is DecodePhase.WAITING]
            admitted = [r for r in waiting if r.phase not in (DecodePhase.WAITING, DecodePhase.GONE)]
            for request in came:
                older = [r for r in still_off if r.arrived < request.arrived]
                assert not older, "an older one still waits off the device"
                back += 1
            if admitted:
                assert not still_off, "somebody new was admitted before those who were here"
                granted += [str(r.submit.request_id) for r in admitted]
            waited += bool(still_off and waiting)
            assert decode.check().violations == ()
        assert back >= 2
        assert waited > 3, "nobody new ever waited while others were off the device"
        assert granted == [str(rid) for rid in news], "first come, first served"
        assert all(answer.done is not None and answer.done.error is None for answer in both.answers.values())


def test_c10_the_oldest_is_asked_first_and_who_cannot_come_holds_those_behind_it(model: Path) -> None:
    with working(model) as (both, decode):
        names = [both.submit(prompt_of(seed, 20), greedy(20)) for seed in range(3)]
        for request in sorted(run_until(both, decode, count=3), key=lambda r: -r.generated):
            scheduler_of(decode).retract(request)
        retract_on(decode)
        asked: list[str] = []

        def may(request: DecodeRequest) -> bool:
            asked.append(str(request.submit.request_id))
            return len(asked) < 3

        scheduler_of(decode).retraction.resume(may)
        assert asked == names
        assert [r.phase for r in table_of(decode)] == [
            DecodePhase.RESUMING,
            DecodePhase.RESUMING,
            DecodePhase.RETRACTED,
        ]
        assert all(len(answer.list) == 20 for answer in both.run(*names))


def test_c10_at_least_one_always_advances_in_a_pool_for_one(model: Path) -> None:
    asked = [(prompt_of(seed, 30), 60) for seed in range(6)]
    expected = undisturbed(model, asked)
    # Prompt and answer of one request are 6 pages.
    with working(model, tokens=7 * PAGE) as (both, decode):
        learned(decode, 1)
        requests = [both.submit(prompt, greedy(count)) for prompt, count in asked]
        quiet = 0
        while any(both.answers[r].done is None for r in requests):
            before = steps_of(decode).counters["tokens_generated"]
            both.step()
            here = [r for r in table_of(decode) if r.phase not in (DecodePhase.WAITING, DecodePhase.ARRIVING)]
            quiet = 0 if steps_of(decode).counters["tokens_generated"] > before or not here else quiet + 1
            assert quiet < 50, "nobody advances"
        assert [both.answers[r].list for r in requests] == expected
        assert decode.status().counters["retractions"] > 0


def test_c10_what_can_never_fit_is_refused_at_once(model: Path) -> None:
    with working(model, tokens=7 * PAGE) as (both, _):
        (answer,) = both.run(both.submit(prompt_of(1, 60), greedy(100)))
        assert answer.done is not None
        assert answer.done.error is ErrorKind.TOO_LONG
        assert "can hold" in answer.done.message


def test_after_the_limit_a_request_comes_back_with_all_its_pages_and_leaves_no_more(model: Path) -> None:
    with working(model, decode=COPY | {"retract_limit": 2}) as (both, decode):
        both.submit(prompt_of(1, 30), greedy(90))
        for generated in (3, 8):
            (request,) = run_until(both, decode, generated=generated)
            scheduler_of(decode).retract(request)
        (request,) = run_until(both, decode, generated=12)
        assert request.allocation is not None
        assert len(request.allocation.tables["full"]) == -(-119 // PAGE)
        assert scheduler_of(decode).pressure.choose_victims([request], [request]) == []
        assert not scheduler_of(decode).pressure._may_go(request)


def test_admission_learns_how_long_answers_are(model: Path) -> None:
    def granted_together(*, lengths: int) -> int:
        with working(model, tokens=16 * PAGE) as (both, decode):
            if lengths:
                learned(decode, lengths)
            requests = [both.submit(prompt_of(seed, 16), greedy(100)) for seed in range(8)]
            most = 0
            while any(both.answers[r].done is None for r in requests):
                both.step()
                most = max(most, sum(r.allocation is not None for r in table_of(decode)))
            return most

    assert granted_together(lengths=0) == 2, "before anything is known, whole answers"
    assert granted_together(lengths=10) > 4


def test_an_answer_that_is_taken_back_says_how_long_answers_get(model: Path) -> None:
    """A stop string ends it at the router, which cancels the rest."""
    with working(model) as (both, decode):
        for seed in range(8):
            asked = both.submit(prompt_of(seed, 10), greedy(50))
            run_until(both, decode, generated=5)
            both.cancel(asked)
            both.step()
        assert lengths_of(decode).expected(0, 50) < 10


# ------------------------------------------------------------ A: reads before ready, writes after free


def test_a2_what_prefill_handed_over_is_the_requests_own_whatever_becomes_of_its_slot(model: Path) -> None:
    with working(model) as (both, decode):
        asked = both.submit(prompt_of(1, 20), structs.replace(greedy(20), logprobs=3))
        (request,) = run_until(both, decode)
        assert request.metadata is not None
        had = replace(request.metadata)
        scheduler_of(decode).retract(request)
        until(both, lambda: request.swapped is not None or request.stepped)
        slots_of(receiver_of(decode)).fill_(255)
        both.run(asked)
        assert request.metadata == had
        assert request.metadata.logprob is not None
        assert request.metadata.token == both.answers[asked].list[0]


def test_a4_only_what_is_committed_is_swapped_out_also_with_a_step_under_way(model: Path) -> None:
    with late(model) as (both, decode):
        asked = both.submit(prompt_of(1, 20), greedy(20))
        until(both, lambda: any(r.under_way for r in scheduler_of(decode).running))
        (request,) = scheduler_of(decode).running
        tokens = len(request.tokens)
        scheduler_of(decode).retract(request)
        decode._admit()
        assert request.under_way == 1
        assert request.swapped is None, "a step of it is still to land"
        until(both, lambda: request.swapped is not None)
        assert request.swapped is not None
        assert request.swapped.positions == request.committed == len(request.tokens) - 1 == tokens
        assert decode.check().violations == ()
        assert len(both.run(asked)[0].list) == 20


def test_a6_pages_of_a_request_that_leaves_are_nobodys_before_the_copy_is_complete(model: Path) -> None:
    with late(model) as (both, decode):
        both.submit(prompt_of(1, 40), greedy(20))
        (request,) = run_until(both, decode)
        assert request.allocation is not None
        # Its prompt's whole pages are the tree's and on the host by now: the copy is of the others.
        pages = {index for run in request.allocation.runs["full"] for index in run.lease.indices}
        assert pages
        scheduler_of(decode).retract(request)
        until(both, lambda: request.swapped is not None)
        assert request.swapped is not None
        pool = manager_of(decode).pools.allocators["full"]
        assert not request.swapped.saved._copy.ended
        manager_of(decode).supply.evict("full", pool.total)
        assert not pages & set(free_list(pool)), "the copy reads them"
        with pytest.raises(CapacityError):
            pool.lease(pool.free + 1, "a thief")
        both.run()
        assert pool.quarantined == 0


def test_what_was_damaged_on_the_device_is_found_as_it_leaves(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = COPY | {"cache": {**COPY["cache"], "prefix_reuse": False}}  # Else the tree has its prompt on the host.
    with working(model, decode=alone) as (both, decode):
        asked = both.submit(prompt_of(1, 40), greedy(20))
        (request,) = run_until(both, decode)
        assert request.allocation is not None
        pools, page = manager_of(decode).pools, request.allocation.tables["full"].pages[1]
        pools.layout.buffers["full"][0].stack(pools.region, pools.layout.counts["full"])[0, page, 3] ^= 8
        scheduler_of(decode).retract(request)
        (answer,) = both.run(asked)
        assert answer.done is not None
        assert answer.done.error is ErrorKind.DAMAGED
        assert decode.status().counters["states_damaged_swapped"] == 1
        (line,) = [record for record in caplog.records if record.message == "state damage"]
        assert (line.where, line.pages) == ("restore", {"full": [1]})  # type: ignore[attr-defined]
        both.settle()
        (again,) = both.run(both.submit(prompt_of(1, 40), greedy(20)))
        assert again.list[: len(answer.list)] == answer.list


# ------------------------------------------------------------ B: every way out

AT: dict[str, Callable[[DecodeRequest], bool]] = {
    "landing": lambda r: r.phase is DecodePhase.RETRACTING and r.swapped is None,
    "copying": lambda r: r.phase is DecodePhase.RETRACTING and r.swapped is not None,
    "retracted": lambda r: r.phase is DecodePhase.RETRACTED,
    "resuming": lambda r: r.phase is DecodePhase.RESUMING,
}


def forget_session(both: Pair) -> None:
    for worker in (both.prefill, both.decode):
        worker.drop_session(SESSION)


WAYS: dict[str, Callable[[Pair, DecodeWorker, ManualClock, DecodeRequest], None]] = {
    "cancel": lambda both, decode, clock, r: both.cancel(r.submit.request_id),
    "deadline": lambda both, decode, clock, r: clock.advance(10_000),
    "session": lambda both, decode, clock, r: forget_session(both),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", AT)
def test_b1_b2_whoever_ends_while_it_is_off_the_device_leaves_nothing_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch, at: str, way: str
) -> None:
    clock = ManualClock(100.0)
    with late(model, clock=clock) as (both, decode):
        both.submit(prompt_of(1, 40), greedy(30))
        until(both, lambda: any(r.under_way and r.generated > 3 for r in scheduler_of(decode).running))
        (request,) = scheduler_of(decode).running
        if at == "retracted":
            hold_back(decode, monkeypatch)
        scheduler_of(decode).retract(request)
        if at != "landing":
            until(both, lambda: AT[at](request))
        assert AT[at](request)
        assert decode.check().violations == ()
        WAYS[way](both, decode, clock, request)
        both.step()
        assert request.phase is DecodePhase.GONE
        assert request.swapped is None
        assert request.allocation is None
        assert decode.check().violations == ()
        monkeypatch.undo()
        both.settle()
        host = manager_of(decode).host
        assert host is not None
        manager_of(decode).tree.eviction.clear()
        assert all(allocator.free == allocator.total for allocator in host.allocators.values())
        assert not manager_of(decode).busy


def test_b9_a_request_comes_back_with_all_pools_or_takes_nothing(model: Path) -> None:
    with working(model, tokens=16 * PAGE) as (both, decode):
        asked = both.submit(prompt_of(1, 40), greedy(30))
        (request,) = run_until(both, decode)
        thief = manager_of(decode).pools.allocators["full"]
        scheduler_of(decode).retract(request)
        retract_on(decode)
        assert request.phase is DecodePhase.RETRACTED
        manager_of(decode).supply.evict("full", thief.total)
        taken = thief.lease(thief.free - 1, "a thief")
        free = thief.free
        assert scheduler_of(decode).retraction.resume(lambda r: True) == []
        assert (request.phase, thief.free, request.allocation) == (DecodePhase.RETRACTED, free, None)
        taken.release()
        assert len(both.run(asked)[0].list) == 30


def test_a_drained_worker_is_one_without_retracted_requests(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing in its tree that it would offer to others before it leaves.
    decode_section = COPY | {"cache": {"host_bytes": HOST_BYTES, "prefix_reuse": False}}
    with working(model, decode=decode_section) as (both, decode):
        asked = both.submit(prompt_of(1, 20), greedy(20))
        (request,) = run_until(both, decode)
        with monkeypatch.context() as patch:
            hold_back(decode, patch)
            scheduler_of(decode).retract(request)
            decode.drain()
            for _ in range(20):
                both.step()
            assert not decode.drained
            assert decode.status().counters["retracted"] == 1
        both.run(asked)
        both.settle()
        assert decode.drained
