"""Bits are equal within a numerics class: under ``invariant`` no answer is computed by workers of two."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.fake_worker import expected
from tests.router.stage import Stage
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.kept_answers import KeptAnswer
from twinpool.router.core.answer_lookups import FoundAnswer
from twinpool.router.state.worker_table import WorkerEntry
from twinpool.router.verification.audits import AuditResult

PREFILL, DECODE = Role.PREFILL, Role.DECODE
OLD, NEW = "invariant:x86-64-v3", "invariant:x86-64-v4"


def stage(*classes: str, audit: float = 0.0, **config: Any) -> Stage:
    """Two prefill and two decode workers of these classes, in this order."""
    on = Stage(2, 2, audit={"fraction": audit}, **config)
    for worker, numerics in zip(on.cluster.workers.values(), classes, strict=True):
        worker.numerics = numerics
    on.view()
    return on


def pairs(on: Stage) -> set[tuple[str, str]]:
    """Who was asked to serve a request together."""
    return {(key[0], submit.peer.name) for key, submit in on.submits if submit.peer and key[0] < submit.peer.name}


def test_a_request_goes_to_a_pair_of_one_class() -> None:
    on = stage(OLD, NEW, NEW, OLD)
    rids = [on.submit() for _ in range(8)]
    assert pairs(on) == {("decode-0", "prefill-1"), ("decode-1", "prefill-0")}
    on.finish()
    for rid in rids:
        on.assert_answered(rid)


@pytest.mark.parametrize("pooling", ["", "mean"])
def test_choices_of_one_answer_are_of_one_class_before_anything_is_delivered_of_any(pooling: str) -> None:
    on = stage(OLD, NEW, NEW, OLD)
    choices = []
    for _ in range(4):
        choices.append(on.request(pooling=pooling))
        on.requests[choices[-1].id] = choices[-1]
    for one in choices:
        one.siblings = choices
        on.core.submit(one)
    assert not any(one.delivered for one in choices)
    assert len({one.numerics for one in choices}) == 1


def test_a_prefill_worker_whose_class_has_no_decode_worker_gets_nothing() -> None:
    on = stage(OLD, NEW, NEW, NEW)
    for _ in range(6):
        on.submit()
    assert {pair[1] for pair in pairs(on)} == {"prefill-1"}


def test_under_fast_any_pair_will_do() -> None:
    on = stage("fast:x86-64-v3", "fast:x86-64-v4", "fast:x86-64-v4", "fast:x86-64-v3")
    for _ in range(8):
        on.submit()
    assert ("decode-0", "prefill-0") in pairs(on), "a pair of unlike workers"


def test_where_no_pair_is_of_one_class_the_refusal_names_both_and_the_remedy() -> None:
    on = stage(OLD, OLD, NEW, NEW, worker_wait_s=1.0)
    rid = on.submit()
    assert not on.submits
    on.tick(1.5)
    assert on.ends[rid].error is ErrorKind.OVERLOADED
    for part in (OLD, NEW, "prefill-0", "decode-0", "engine.numerics_class"):
        assert part in on.ends[rid].message


@pytest.mark.parametrize("lost", ["before it goes on", "afterwards", "and back before it goes on"])
def test_an_answer_that_its_client_has_come_back_for_stays_in_the_class_of_its_worker(lost: str) -> None:
    on = stage(OLD, NEW, OLD, NEW)
    request = on.request(seed=7)
    answer = expected(request.prompt, request.sampling)
    kept = KeptAnswer(request.id, 3, 0, 7, 3, 6, 60.0, tuple(answer[:2]), running=True, started=True)
    found = FoundAnswer(on.key("decode-1"), kept, 3, f"{NEW} weights")
    request.restore(kept, 3)
    on.requests[request.id], on.out[request.id], on.logprobs[request.id] = request, answer[:2], []
    if lost == "before it goes on":
        on.unlink("decode-1")
    elif lost == "and back before it goes on":
        on.kill("decode-1")
        on.restart("decode-1")
    on.core.adopt(request, found)
    on.play()
    if lost != "and back before it goes on":
        on.kill("decode-1")
        on.tick(1.0)
        assert not on.submits, "the other class took it up"
        on.restart("decode-1")
        on.tick(1.0)
    assert {key[0] for key, _ in on.submits} == {"prefill-1", "decode-1"}
    on.finish()
    on.assert_answered(request.id)


@pytest.mark.parametrize("die", [["decode-0"], ["prefill-0", "decode-0"]], ids=" and ".join)
def test_failover_of_a_begun_answer_stays_in_its_class(die: list[str]) -> None:
    on = stage(OLD, NEW, OLD, NEW, worker_wait_s=5.0)
    rid = next(rid for rid in (on.submit() for _ in range(4)) if on.requests[rid].numerics == f"{OLD} weights")
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 2)
    assert on.out[rid]
    asked = len(on.submits)
    for name in die:
        on.kill(name)
    on.tick(1.0)
    assert not any(submit.request_id == rid for _, submit in on.submits[asked:]), "the other class took it up"
    for name in die:
        on.restart(name)
    on.tick(1.0)
    assert {key[0] for key, submit in on.submits[asked:] if submit.request_id == rid} == {"prefill-0", "decode-0"}
    on.finish()
    on.assert_answered(rid)


def test_a_begun_answer_whose_class_is_gone_ends_in_an_error_that_says_so() -> None:
    on = stage(OLD, NEW, OLD, NEW, worker_wait_s=1.0)
    rid = next(rid for rid in (on.submit() for _ in range(4)) if on.requests[rid].numerics == f"{OLD} weights")
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 2)
    on.kill("decode-0")
    for _ in range(30):
        on.tick(0.1)
    assert on.ends[rid].error is ErrorKind.OVERLOADED
    assert OLD in on.ends[rid].message


def test_a_request_that_nobody_has_heard_anything_of_may_begin_again_in_another_class() -> None:
    on = stage(OLD, NEW, OLD, NEW)
    rid = next(rid for rid in (on.submit() for _ in range(4)) if on.requests[rid].numerics == f"{OLD} weights")
    on.kill("prefill-0")
    on.tick(1.0)
    assert on.requests[rid].numerics == f"{NEW} weights"
    on.finish()
    on.assert_answered(rid)


def test_a_migration_goes_to_a_decode_worker_of_the_same_class() -> None:
    on = stage(OLD, OLD, OLD, NEW)
    rid = on.submit()
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 2)
    request = on.requests[rid]
    assert request.decode is not None
    assert request.decode[0] == "decode-0"
    assert not on.core.migrations.begin(request), "nobody else computes alike"
    on.cluster["decode-1"].numerics = OLD
    on.view()
    assert on.core.migrations.begin(request)


def test_an_audit_is_computed_by_the_answers_own_class() -> None:
    on = stage(OLD, NEW, OLD, NEW, audit=1.0)
    rids = [on.submit() for _ in range(6)]
    began = {rid: on.requests[rid].numerics for rid in rids}
    on.finish()
    assert set(began.values()) == {f"{OLD} weights", f"{NEW} weights"}
    on.view()
    on.tick(1.0)
    assert on.audits
    for key, audit in on.audits:
        entry = on.core.workers.get(key)
        assert isinstance(entry, WorkerEntry)
        assert entry.numerics == began[RequestId(audit.request_id.removeprefix("audit-"))]
    assert not on.core.audits.counts.results[AuditResult.DAMAGED]


def test_a_request_of_which_only_the_prompts_scores_were_told_stays_in_its_class() -> None:
    on = stage(OLD, NEW, OLD, NEW, worker_wait_s=5.0)
    asked = [on.submit(prompt_logprobs=0) for _ in range(4)]
    rid = next(rid for rid in asked if on.requests[rid].numerics == f"{OLD} weights")
    on.say(rid, PREFILL, 1)
    assert on.scores[rid]
    assert not on.out[rid]
    on.kill("prefill-0")
    on.tick(1.0)
    assert on.requests[rid].numerics == f"{OLD} weights"
    on.restart("prefill-0")
    on.tick(1.0)
    on.finish()
    on.assert_answered(rid)
