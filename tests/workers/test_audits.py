"""Audits on a real prefill worker: what comes out right, what doesn't, and that nothing waits for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.worker_pair import SESSION, Pair, pair
from tests.support.worker_parts import auditor_of, gate_of, manager_of
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Audit, Cancel
from twinpool.contracts.messages.worker_events import Audited, AuditEnd, Event
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.prefill.audit_runner import MAX_TOLD, MAX_WAITING, AuditRunner

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
AUDIT = RequestId("an audit")


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(count)]


def audit_of(prompt: list[int], answer: list[int], sampling: SamplingParams) -> Audit:
    return Audit(AUDIT, 0, (*prompt, *answer), len(prompt), sampling)


def audited(both: Pair, audit: Audit, rounds: int = 200) -> Audited:
    """What the idle prefill worker says to it."""
    both.prefill.handle(SESSION, audit)
    for _ in range(rounds):
        for _, event in both.prefill.step():
            if isinstance(event, Audited):
                return event
    raise AssertionError("no word of the audit")


SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(max_tokens=12, temperature=0.9, seed=5, choice=2),
    "cut": SamplingParams(max_tokens=12, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=6),
    "penalties": SamplingParams(
        max_tokens=12, temperature=0.8, seed=7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
    ),
    "bias": SamplingParams(max_tokens=12, temperature=0.8, seed=8, logit_bias=((5, 4.0), (9, -4.0)), logprobs=2),
    "mask": SamplingParams(
        max_tokens=12, temperature=0.9, seed=9, allowed_token_ids=tuple(range(3, 300, 7)), min_tokens=2
    ),
    "stop tokens": SamplingParams(
        max_tokens=12, temperature=1.0, seed=9, stop_token_ids=tuple(range(0, 300, 3)), min_tokens=6
    ),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_undisturbed_answer_comes_out_the_same_at_every_position(model: Path, name: str) -> None:
    sampling = SAMPLINGS[name]
    with pair(model, audit={"chunk_tokens": 16}) as both:
        prompt = words(1, 37)
        (answer,) = both.run(both.submit(prompt, sampling))
        both.settle()
        found = audited(both, audit_of(prompt, answer.list, sampling))
        assert (found.end, found.checked, found.differing) == (AuditEnd.COMPUTED, len(answer.list), 0)
        assert found.exact


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_token_that_was_not_drawn_there_is_found_by_its_position(model: Path, name: str) -> None:
    sampling = SAMPLINGS[name]
    with pair(model, audit={"chunk_tokens": 16}) as both:
        prompt = words(1, 37)
        (answer,) = both.run(both.submit(prompt, sampling))
        both.settle()
        right = answer.list[-1]
        wrong = [*answer.list[:-1], (right + 1) % 300]
        found = audited(both, audit_of(prompt, wrong, sampling))
        assert found.differing == 1
        (difference,) = found.differences
        assert (difference.position, difference.drawn) == (len(prompt) + len(wrong) - 1, right)
        assert difference.gap >= 0


def test_an_audit_takes_nothing_from_the_tree_and_leaves_nothing_there(model: Path) -> None:
    with pair(model, audit={"chunk_tokens": 16}) as both:
        prompt = words(2, 90)
        (answer,) = both.run(both.submit(prompt, GREEDY))
        both.settle()
        before = both.prefill.status().counters
        assert before["device_pages_kept"] > 0
        audited(both, audit_of(prompt, answer.list, GREEDY))
        after = both.prefill.status().counters
        assert after["audit_tokens_computed"] == len(prompt) + len(answer.list) - 1, "every position is computed"
        for name in ("device_pages_kept", "hit_tokens_device", "prompt_tokens_cached", "prompt_tokens_computed"):
            assert after[name] == before[name], name


def test_a_request_that_comes_ends_the_audit_at_once(model: Path) -> None:
    with pair(model, audit={"chunk_tokens": 16}) as both:
        prompt = words(3, 200)
        (answer,) = both.run(both.submit(prompt, GREEDY))
        both.settle()
        both.prefill.handle(SESSION, audit_of(prompt, answer.list, GREEDY))
        assert both.prefill.step() == []
        assert both.prefill.check().violations == ()
        assert both.prefill.status().pages_free < both.prefill.status().pages_total
        request = both.submit(words(4, 20), GREEDY, legs=(Role.PREFILL,))
        ((_, told),) = [e for e in both.prefill.step() if isinstance(e[1], Audited)]
        assert isinstance(told, Audited)
        assert (told.end, told.checked) == (AuditEnd.PREEMPTED, 0)
        assert both.prefill.status().counters["audits_preempted"] == 1
        both.cancel(request)


def test_an_audit_that_comes_while_there_is_work_is_sent_back(model: Path) -> None:
    with pair(model) as both:
        request = both.submit(words(5, 20), GREEDY, legs=(Role.PREFILL,))
        assert audited(both, audit_of([1, 2], [3], GREEDY)).end is AuditEnd.PREEMPTED
        both.cancel(request)


def test_a_drain_and_a_lost_router_and_a_cancel_end_audits(model: Path) -> None:
    with pair(model, audit={"chunk_tokens": 16}) as both:
        audit = audit_of(words(6, 100), [3], GREEDY)
        ends: tuple[Callable[[], None], ...] = (
            lambda: both.prefill.drop_session(SESSION),
            lambda: both.prefill.handle(SESSION, Cancel(AUDIT, 0)),
        )
        for end in ends:
            both.prefill.handle(SESSION, audit)
            both.prefill.step()
            end()
            assert both.prefill.step() == []
            assert both.prefill.check().leases == 0
        both.prefill.handle(SESSION, audit)
        both.prefill.step()
        assert not both.prefill.drained
        both.prefill.drain()
        ((_, told),) = both.prefill.step()
        assert isinstance(told, Audited)
        assert told.end is AuditEnd.PREEMPTED
        assert both.prefill.drained
        assert audited(both, audit).end is AuditEnd.PREEMPTED
        both.prefill.undrain()


def test_a_cancel_ends_the_audit_of_its_own_name_and_its_own_router_and_no_other(model: Path) -> None:
    with pair(model, audit={"chunk_tokens": 16}) as both:
        prompt = words(16, 100)
        (answer,) = both.run(both.submit(prompt, GREEDY))
        both.settle()
        both.prefill.handle(SESSION, audit_of(prompt, answer.list, GREEDY))
        both.prefill.step()
        both.prefill.handle(SESSION, Cancel(RequestId("another audit"), 0))
        both.prefill.handle(SessionId(2), Cancel(AUDIT, 0))
        (told,) = [event for _ in range(20) for _, event in both.prefill.step()]
        assert isinstance(told, Audited)
        assert told.end is AuditEnd.COMPUTED


def test_audits_that_still_wait_end_with_their_cancel_and_with_their_router_too(model: Path) -> None:
    with pair(model, audit={"chunk_tokens": 16}) as both:
        sessions = {"runs": SESSION, "cancelled": SESSION, "lost": SessionId(2), "stays": SESSION}
        for name, session in sessions.items():
            both.prefill.handle(session, Audit(RequestId(name), 0, (*words(17, 20), 3), 20, GREEDY))
        assert both.prefill.step() == []
        both.prefill.handle(SESSION, Cancel(RequestId("cancelled"), 0))
        both.prefill.drop_session(SessionId(2))
        ends = {e.request_id: e.end for _ in range(20) for _, e in both.prefill.step() if isinstance(e, Audited)}
        assert ends == {RequestId(name): AuditEnd.COMPUTED for name in ("runs", "stays")}


def test_as_many_audits_wait_as_routers_may_have_sent_and_one_more_is_sent_back(model: Path) -> None:
    with pair(model) as both:
        for number in range(MAX_WAITING + 1):
            audit = Audit(RequestId(str(number)), 0, (*words(17, 20), 3), 20, GREEDY)
            both.prefill.handle(SESSION, audit)
        ends = {e.request_id: e.end for _ in range(20) for _, e in both.prefill.step() if isinstance(e, Audited)}
        assert ends.pop(RequestId(str(MAX_WAITING))) is AuditEnd.PREEMPTED
        assert ends == {RequestId(str(n)): AuditEnd.COMPUTED for n in range(MAX_WAITING)}


def test_of_many_differences_all_are_counted_and_the_first_are_told_one_by_one(model: Path) -> None:
    many = SamplingParams(max_tokens=40, temperature=0.0)
    with pair(model, audit={"chunk_tokens": 16}) as both:
        prompt = words(18, 30)
        (answer,) = both.run(both.submit(prompt, many))
        both.settle()
        wrong = [(t + 1) % 300 for t in answer.list]
        found = audited(both, audit_of(prompt, wrong, many))
        assert found.differing >= len(wrong) // 2 > MAX_TOLD
        assert len(found.differences) == MAX_TOLD
        positions = [d.position for d in found.differences]
        assert positions == sorted(set(positions)), "over several steps, each once"


def test_an_audit_that_finds_a_page_of_it_given_away_is_no_verdict_and_is_counted(model: Path) -> None:
    with pair(model, audit={"chunk_tokens": 16}) as both:
        both.prefill.handle(SESSION, audit_of(words(19, 100), [3], GREEDY))
        for _ in range(100 // 16):
            both.prefill.step()
        running = auditor_of(both.prefill)._running
        assert running is not None
        pages = running.held.tables["full"].pages[:1]
        manager_of(both.prefill).pools.gates["full"].layer(0)["k"][pages[0]].fill_(torch.nan)
        manager_of(both.prefill).pools.allocators["full"].epochs.bump(pages)
        ((_, told),) = both.prefill.step()
        assert isinstance(told, Audited)
        assert (told.end, told.checked, told.differences) == (AuditEnd.REFUSED, 0, ())
        assert "given away" in told.message
        counters = both.prefill.status().counters
        assert (counters["damage_step"], counters["audits_computed"]) == (1, 0)
        assert counters["damage_logits"] == 0, "what a stranger's bytes come to says nothing of the device"


def test_what_can_not_be_audited_is_refused_with_the_reason(model: Path) -> None:
    with pair(model, tokens=256) as both:
        long = audited(both, audit_of(words(7, 300), [3], GREEDY))
        assert long.end is AuditEnd.REFUSED
        assert "at most 256 fit" in long.message
        assert audited(both, Audit(AUDIT, 0, (1, 2), 2, GREEDY)).end is AuditEnd.REFUSED
        both.decode.handle(SESSION, audit_of([1, 2], [3], GREEDY))
        ((_, told),) = both.decode.step()
        assert isinstance(told, Audited)
        assert told.end is AuditEnd.REFUSED


def test_a_full_tree_makes_room_for_an_audit_and_no_more_than_it_needs(model: Path) -> None:
    with pair(model, tokens=512) as both:
        answers = [(words(n, 100), both.run(both.submit(words(n, 100), GREEDY))[0].list) for n in range(8, 14)]
        both.settle()
        allocator = manager_of(both.prefill).pools.allocators["full"]
        before, free = both.prefill.status().counters["device_pages_kept"], allocator.free
        assert audited(both, audit_of(*answers[-1], GREEDY)).differing == 0
        needs = -(-(100 + 12 - 1) // 16)
        assert before - both.prefill.status().counters["device_pages_kept"] == max(0, needs - free)


def test_where_numbers_are_not_exact_only_what_is_beyond_the_margin_is_told(model: Path) -> None:
    with pair(model, engine={"numerics": "fast"}, audit={"margin": 0.25}) as both:
        prompt = words(15, 30)
        (answer,) = both.run(both.submit(prompt, GREEDY))
        both.settle()
        right = audited(both, audit_of(prompt, answer.list, GREEDY))
        assert not right.exact
        assert right.differences == ()
        wrong = audited(both, audit_of(prompt, [(t + 7) % 300 for t in answer.list], GREEDY))
        assert wrong.differing == len(answer.list)
        assert wrong.differences
        assert all(d.gap > 0.25 for d in wrong.differences)


@pytest.mark.parametrize(
    ("prefill", "decode", "eps", "exact"),
    [(1, 1, (1, 1), True), (2, 2, (1, 1), True), (2, 1, (1, 1), False), (1, 2, (1, 1), False), (2, 2, (2, 1), False)],
)
def test_workers_of_unequal_ranks_are_held_to_the_margin_only(
    model: Path, prefill: int, decode: int, eps: tuple[int, int], exact: bool
) -> None:
    with pair(model) as both:
        worker = both.prefill
        sides = {"prefill": {"tp": prefill, "ep": eps[0]}, "decode": {"tp": decode, "ep": eps[1]}}
        config = config_from_dict(sides | {"audit": {"margin": 1e9}, "cache": {"host_bytes": 0}})
        told: list[Event] = []
        most = manager_of(worker).supply.max_positions
        auditor = AuditRunner(
            config,
            worker.setup.engine,
            manager_of(worker),
            lambda _, event: told.append(event),
            lambda: None,
            most,
            gate_of(worker),
        )
        auditor.handle(SESSION, audit_of(words(16, 30), [1, 2, 3], GREEDY), busy=False)
        auditor.step()
        (event,) = told
        assert isinstance(event, Audited)
        assert (event.end, event.exact, event.differing) == (AuditEnd.COMPUTED, exact, 3)
        assert len(event.differences) == (3 if exact else 0), "no gap is beyond this margin"
