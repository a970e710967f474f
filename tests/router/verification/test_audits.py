"""The router's side of audits, without I/O: which answers, when, where, and what findings come to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.stage import Stage
from twinpool.contracts.config.worker_config import DisaggregationConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import Audit
from twinpool.contracts.messages.worker_events import Audited, AuditEnd, Done
from twinpool.contracts.sampling_params import TokenDifference
from twinpool.router.core.routing_policies import LocalPrefill
from twinpool.router.state.worker_table import WorkerKey
from twinpool.router.verification.audits import STATES, TRIES, AuditResult, chosen

PREFILL, DECODE = Role.PREFILL, Role.DECODE


def stage(prefill: int = 1, fraction: float = 1.0, **audit: Any) -> Stage:
    return Stage(prefill, 1, audit={"fraction": fraction, **audit})


def answered(on: Stage, **sampling: Any) -> RequestId:
    rid = on.submit(**sampling)
    on.finish()
    on.view()
    return rid


def idle(on: Stage, seconds: float = 1.0) -> None:
    """Workers say that they have nothing to do, and time passes."""
    on.view()
    on.tick(seconds)


def last(on: Stage) -> tuple[WorkerKey, Audit]:
    return on.audits[-1]


def say(on: Stage, end: AuditEnd = AuditEnd.COMPUTED, *found: TokenDifference, differing: int | None = None) -> None:
    worker, audit = last(on)
    count = len(found) if differing is None else differing
    tokens = len(audit.tokens) - audit.prompt_len if end is AuditEnd.COMPUTED else 0
    on.hear(worker, Audited(audit.request_id, audit.attempt, end, tokens, count, found))


def results(on: Stage) -> dict[AuditResult, int]:
    return dict(on.core.audits.counts.results)


def test_the_table_of_states_has_no_dead_end() -> None:
    assert STATES.dead_ends() == []


def test_a_finished_answer_goes_to_an_idle_prefill_worker_with_all_its_tokens() -> None:
    on = stage()
    rid = answered(on, temperature=0.7, seed=9, logprobs=3)
    idle(on)
    (worker, audit), *others = on.audits
    assert not others
    assert worker[0] == "prefill-0"
    assert audit.tokens == (*on.requests[rid].prompt, *on.answer(rid))
    assert audit.prompt_len == 3
    assert (audit.sampling.seed, audit.sampling.temperature, audit.sampling.logprobs) == (9, 0.7, None)
    say(on)
    counts = on.core.audits.counts
    assert (results(on), counts.tokens, counts.damage_rate) == ({AuditResult.EXACT: 1}, 6, 0.0)
    assert not on.findings


def test_nothing_is_audited_without_a_fraction() -> None:
    on = stage(fraction=0.0)
    answered(on)
    idle(on)
    assert not on.audits
    assert not on.core.audits.queued


def test_which_answers_are_chosen_depends_on_the_fraction_and_their_ids_alone() -> None:
    ids = [RequestId(f"{n:024x}-0") for n in range(20_000)]
    some = [i for i in ids if chosen(i, 0.05)]
    assert 850 < len(some) < 1150
    assert some == [i for i in ids if chosen(i, 0.05)]
    assert set(some) < {i for i in ids if chosen(i, 0.1)}
    assert all(chosen(i, 1.0) for i in ids)
    assert not any(chosen(i, 0.0) for i in ids)


def test_failed_and_cancelled_and_empty_answers_are_not_audited() -> None:
    on = stage()
    failed = on.submit()
    on.error(failed, DECODE, ErrorKind.INVALID)
    cancelled = on.submit()
    on.core.cancel(cancelled)
    on.play()
    idle(on)
    assert not on.core.audits.queued
    assert not on.audits


def test_an_answer_that_a_stop_string_ended_is_audited_as_far_as_it_went() -> None:
    on = stage()
    rid = on.submit()
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 1 + 2)
    on.core.cancel(rid, finished=True)
    on.play()
    idle(on)
    assert last(on)[1].tokens == (*on.requests[rid].prompt, *on.answer(rid)[:3])


def test_no_audit_is_sent_while_anything_of_a_client_is_in_front_of_prefill() -> None:
    on = stage()
    answered(on)
    other = on.submit()
    on.tick()
    assert not on.audits
    on.say(other, PREFILL, 2)  # Its prompt is computed: what decode does is nobody's business.
    idle(on)
    assert len(on.audits) == 1


def test_a_worker_has_one_audit_at_a_time_and_two_have_two() -> None:
    for workers in (1, 2):
        on = stage(workers)
        for _ in range(3):
            on.submit()
        on.finish()
        idle(on)
        idle(on)
        assert len(on.audits) == workers
        say(on)
        assert len(on.audits) == workers + 1


def test_an_audit_that_a_request_ended_waits_and_is_begun_again_under_the_next_number() -> None:
    on = stage()
    answered(on)
    idle(on)
    say(on, AuditEnd.PREEMPTED)
    assert on.core.audits.queued == 1
    assert len(on.audits) == 1, "not at once: a worker that sent one back is busy"
    idle(on)
    assert last(on)[1].attempt == 1
    say(on)
    assert results(on) == {AuditResult.EXACT: 1}


def test_an_audit_that_is_never_left_in_peace_is_left_out() -> None:
    on = stage()
    answered(on)
    for _ in range(TRIES):
        idle(on)
        say(on, AuditEnd.PREEMPTED)
    assert results(on) == {AuditResult.DROPPED: 1}
    assert on.core.audits.counts.tokens == 0, "nothing of it was checked"
    assert not on.core.audits.queued


def test_a_full_queue_leaves_its_oldest_out() -> None:
    on = stage(queue_answers=3)
    on.drain("prefill-0")
    on.drain("prefill-0", draining=False)
    rids = [on.submit() for _ in range(5)]
    on.finish()
    assert results(on) == {AuditResult.DROPPED: 2}
    idle(on)
    assert last(on)[1].request_id == f"audit-{rids[2]}"


def test_a_difference_counts_once_another_worker_has_come_to_the_same() -> None:
    on = stage(2)
    rid = answered(on)
    prefill = on.requests[rid].legs[0].workers[PREFILL]
    idle(on)
    found = TokenDifference(5, 77, 0.5)
    first = last(on)[0]
    assert first[0] != prefill, "somebody else than who served it, where there is somebody"
    say(on, AuditEnd.COMPUTED, found)
    assert results(on) == {}
    idle(on)
    assert last(on)[0] != first
    say(on, AuditEnd.COMPUTED, TokenDifference(5, 77, 0.4))
    assert results(on) == {AuditResult.DAMAGED: 1}
    (finding,) = on.findings
    assert (finding.request_id, finding.result, finding.differing) == (rid, AuditResult.DAMAGED, 1)
    assert on.core.audits.counts.differing == 1
    assert finding.role is DECODE
    assert finding.leg is not None
    assert finding.leg.workers == {PREFILL: prefill, DECODE: "decode-0"}
    assert len(set(finding.auditors)) == 2
    assert on.core.audits.counts.damage == {("decode-0", DECODE): 1}
    assert on.core.audits.counts.damage_rate == 1.0
    assert {worker[0] for worker, _ in on.forgets} == {prefill, "decode-0"}, "whoever served it forgets it"
    assert {forget.tokens for _, forget in on.forgets} == {(*on.requests[rid].prompt, *on.answer(rid))}


def test_who_served_a_damaged_answer_forgets_it_under_its_salt() -> None:
    on = stage(2)
    request = on.request()
    request.salt = "acme\n"
    on.take(request)
    on.finish()
    idle(on)
    for _ in range(2):
        say(on, AuditEnd.COMPUTED, TokenDifference(5, 77, 0.5))
        idle(on)
    assert {forget.salt for _, forget in on.forgets} == {"acme\n"}


def test_a_wrong_first_token_is_prefills() -> None:
    on = stage()
    answered(on)
    for _ in range(2):
        idle(on)
        say(on, AuditEnd.COMPUTED, TokenDifference(3, 77, 0.5))
    assert on.core.audits.counts.damage == {("prefill-0", PREFILL): 1}


def test_a_replayed_answer_is_blamed_on_the_attempt_that_drew_the_token() -> None:
    on = Stage(1, 2, audit={"fraction": 1.0})
    rid = on.submit()
    on.say(rid, PREFILL, 2)
    on.say(rid, DECODE, 1 + 2)
    first = on.leg(rid, DECODE)
    on.kill(first)
    on.finish()
    idle(on)
    legs = on.requests[rid].legs
    assert [leg.base for leg in legs] == [3, 6]
    for position, worker, role in ((5, first, DECODE), (6, "prefill-0", PREFILL)):
        audits = on.core.audits
        audits.counts.damage.clear()
        audits.consider(on.requests[rid])
        while audits.queued or audits.under_way:
            idle(on)
            say(on, AuditEnd.COMPUTED, TokenDifference(position, 77, 0.5))
        assert audits.counts.damage == {(worker, role): 1}


def test_a_migrated_answer_is_blamed_on_the_decode_worker_that_drew_the_token() -> None:
    for position, worker in ((4, "decode-0"), (5, "decode-9"), (6, "decode-9")):
        on = stage()
        rid = on.submit()
        on.say(rid, PREFILL, 2)
        on.say(rid, DECODE, 1 + 1)
        request = on.requests[rid]
        legs = list(request.legs)
        request.hand_over((WorkerName("decode-9"), Incarnation(1)), "decode-9", 0, RoomId("another"))
        legs, request.legs = list(request.legs), legs
        request.decode, request.workers[DECODE] = on.key("decode-0"), "decode-0"
        on.finish()
        request.legs = legs
        audits = on.core.audits
        while audits.queued or audits.under_way:
            idle(on)
            say(on, AuditEnd.COMPUTED, TokenDifference(position, 77, 0.5))
        audits.counts.damage.clear()
        audits.consider(request)
        while audits.queued or audits.under_way:
            idle(on)
            say(on, AuditEnd.COMPUTED, TokenDifference(position, 77, 0.5))
        assert audits.counts.damage == {(worker, DECODE): 1}


def test_auditors_that_contradict_each_other_prove_nothing() -> None:
    for second in ((TokenDifference(5, 78, 0.5),), ()):
        on = stage()
        answered(on)
        idle(on)
        say(on, AuditEnd.COMPUTED, TokenDifference(5, 77, 0.5))
        idle(on)
        say(on, AuditEnd.COMPUTED, *second)
        assert results(on) == {AuditResult.DISPUTED: 1}
        assert on.findings[0].result is AuditResult.DISPUTED
        assert on.core.audits.counts.damage_rate == 0.0


def test_what_differs_within_the_margin_is_unclear() -> None:
    on = stage()
    answered(on)
    idle(on)
    say(on, AuditEnd.COMPUTED, differing=2)
    assert results(on) == {AuditResult.UNCLEAR: 1}


def test_a_refused_audit_is_over_and_says_why() -> None:
    on = stage()
    answered(on)
    idle(on)
    worker, audit = last(on)
    on.hear(worker, Audited(audit.request_id, 0, AuditEnd.REFUSED, message="planted"))
    assert results(on) == {AuditResult.FAILED: 1}
    assert on.findings[0].message == "planted"


def test_a_worker_that_dies_takes_no_audit_with_it() -> None:
    on = stage()
    answered(on)
    idle(on)
    on.kill("prefill-0")
    assert on.core.audits.queued == 1
    on.restart("prefill-0")
    idle(on)
    assert last(on)[0][1] == 2
    say(on)
    assert results(on) == {AuditResult.EXACT: 1}


def test_an_audit_without_an_answer_is_taken_back_in_time() -> None:
    on = stage(timeout_s=5.0)
    answered(on)
    idle(on)
    on.tick(5.0)
    assert results(on) == {AuditResult.DROPPED: 1}
    assert [c.request_id for _, c in on.cancels] == [last(on)[1].request_id]
    late = on.core.counts.late_events
    say(on)
    assert results(on) == {AuditResult.DROPPED: 1}
    assert on.core.counts.late_events == late + 1


# ---------------------------------------------------------------- prompts that decode computes


def conditional(prefill: int, decode: int) -> Stage:
    return Stage(prefill, decode, audit={"fraction": 1.0}, local=LocalPrefill(DisaggregationConfig(), 16))


def test_where_decode_computes_prompts_it_audits_what_no_prefill_worker_can_by_another_than_answered() -> None:
    on = conditional(1, 2)
    on.kill("prefill-0")
    for answers in (1, 2):
        rid = answered(on)
        (leg,) = on.requests[rid].legs
        idle(on)
        assert len(on.audits) == answers
        worker, audit = last(on)
        assert audit.tokens == (*on.requests[rid].prompt, *on.answer(rid))
        assert worker[0].startswith("decode-")
        assert worker[0] not in leg.workers.values()
        say(on)
    assert results(on) == {AuditResult.EXACT: 2}


def test_a_decode_worker_that_is_alone_audits_what_it_has_answered() -> None:
    on = conditional(1, 1)
    on.kill("prefill-0")
    answered(on)
    idle(on)
    assert last(on)[0][0] == "decode-0"
    say(on, AuditEnd.COMPUTED, TokenDifference(5, 77, 0.5))
    idle(on)
    assert last(on)[1].attempt == 1, "where there is nobody else it computes it again"
    say(on, AuditEnd.COMPUTED, TokenDifference(5, 77, 0.5))
    assert results(on) == {AuditResult.DAMAGED: 1}
    assert {worker[0] for worker, _ in on.forgets} == {"decode-0"}


def test_while_a_prefill_worker_serves_that_could_compute_it_decode_audits_nothing() -> None:
    on = conditional(1, 2)
    rid = answered(on)
    idle(on)
    assert on.requests[rid].legs[0].workers[PREFILL] == "prefill-0"
    assert [worker[0] for worker, _ in on.audits] == ["prefill-0"]
    answered(on)
    idle(on)
    assert len(on.audits) == 1, "prefill-0 has one under way"
    say(on)
    assert [worker[0] for worker, _ in on.audits] == ["prefill-0"] * 2


def test_decode_workers_that_compute_no_prompts_audit_nothing() -> None:
    on = stage()
    answered(on)
    on.kill("prefill-0")
    idle(on)
    assert not on.audits
    assert on.core.audits.queued == 1


def test_a_flagged_stream_is_audited_whatever_its_id() -> None:
    on = stage(fraction=1e-12)
    rid = on.submit()
    on.core.audits.flag(rid)
    on.finish()
    assert on.core.audits.queued == 1
    on.core.audits.flag(rid)  # It has ended: nothing is left of this.
    assert on.core.check() == []
    answered(on)
    assert on.core.audits.queued == 1


def test_an_answer_longer_than_a_workers_pool_waits_for_another() -> None:
    on = Stage(2, 1, audit={"fraction": 1.0})
    on.cluster["prefill-0"].positions = 5
    on.view()
    answered(on)
    idle(on)
    assert last(on)[0][0] == "prefill-1"


@pytest.mark.parametrize("end", [AuditEnd.COMPUTED, AuditEnd.PREEMPTED, AuditEnd.REFUSED])
def test_words_of_an_older_attempt_are_dropped(end: AuditEnd) -> None:
    on = stage()
    answered(on)
    idle(on)
    say(on, AuditEnd.PREEMPTED)
    idle(on)
    worker, audit = last(on)
    on.hear(worker, Audited(audit.request_id, 0, end))
    assert on.core.audits.under_way == 1
    assert not [e for e in on.ends.values() if isinstance(e, Done) and e.error]
