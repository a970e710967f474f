"""The router core, without I/O: order, failover, placement, and ends, one claim a test."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.router.fake_worker import expected
from tests.router.stage import Stage
from twinpool.contracts.errors import ErrorKind, IllegalTransition
from twinpool.contracts.ids import PAIR, Role, WorkerName
from twinpool.contracts.messages.kept_answers import AnswerName, Attached, KeptAnswer
from twinpool.contracts.messages.worker_events import Done, LegReport, Tokens
from twinpool.router.core.answer_lookups import LookupEnded
from twinpool.router.core.failover import REFUSAL_LIMIT
from twinpool.router.state.prefix_hashes import BLOCK_TOKENS, prefix_hashes

PREFILL, DECODE = Role.PREFILL, Role.DECODE


# ---------------------------------------------------------------- one stream of two


def test_both_legs_make_one_stream() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.finish()
    stage.assert_answered(rid)
    assert [s.attempt for _, s in stage.submits] == [0, 0]
    assert not stage.cancels


def test_decode_ahead_of_prefill_waits_for_the_first_token() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, DECODE, 1 + 3)
    assert stage.out[rid] == []
    stage.say(rid, PREFILL, 1)
    assert stage.out[rid] == stage.answer(rid)[:4]
    stage.finish()
    stage.assert_answered(rid)


def test_the_end_waits_for_every_earlier_position() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, DECODE, 1 + 5 + 2)
    assert rid not in stage.ends
    stage.say(rid, PREFILL, 2)
    stage.assert_answered(rid)


def test_the_end_waits_a_moment_for_prefills_report() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, PREFILL, 1)
    stage.say(rid, DECODE, 1 + 7)
    assert stage.out[rid] == stage.answer(rid)
    assert rid not in stage.ends
    stage.tick(0.3)
    stage.assert_answered(rid)


def test_duplicates_are_dropped() -> None:
    stage = Stage()
    rid = stage.submit()
    while rid not in stage.ends:
        name, _ = next(k for k in stage.legs if stage.can_say(*k))
        stage.say_next(name, rid)
        for worker, event in list(stage.said):
            stage.core.on_event(worker, event)
        stage.play()
    stage.assert_answered(rid)


def test_scores_come_before_any_token_whichever_comes_first() -> None:
    stage = Stage()
    rid = stage.submit(prompt_logprobs=1, logprobs=1)
    stage.say(rid, DECODE, 1 + 2)
    scores, first, *_ = stage.legs[stage.leg(rid, PREFILL), rid].events
    prefill = stage.key(stage.leg(rid, PREFILL))
    stage.hear(prefill, first)
    assert stage.out[rid] == []
    stage.hear(prefill, scores)
    assert stage.out[rid] == stage.answer(rid)[:3]
    assert [t.token for t in stage.scores[rid]] == [6, 7]
    assert [t.token for t in stage.logprobs[rid]] == stage.answer(rid)[:3]


def test_tokens_beyond_the_answers_length_are_not_delivered() -> None:
    stage = Stage()
    rid = stage.submit(max_tokens=3)
    prefill = stage.key(stage.leg(rid, PREFILL))
    stage.hear(prefill, Tokens(rid, 0, 3, (900, 901, 902, 903, 904)))
    assert stage.out[rid] == [900, 901, 902]


def test_an_end_that_contradicts_the_tokens_is_a_failure_of_that_worker() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, PREFILL, 2)
    stage.say(rid, DECODE, 1 + 2)
    decode = stage.leg(rid, DECODE)
    del stage.legs[decode, rid]
    stage.hear(stage.key(decode), Done(rid, 0, "length"))
    assert rid not in stage.ends
    stage.finish()
    stage.assert_answered(rid)
    assert stage.submits[-1][1].attempt == 1


# ---------------------------------------------------------------- failover


def test_prefill_that_dies_before_its_token_is_replaced_and_decode_told() -> None:
    stage = Stage()
    rid = stage.submit()
    prefill, decode = stage.leg(rid, PREFILL), stage.leg(rid, DECODE)
    stage.kill(prefill)
    assert [(w[0], c.attempt) for w, c in stage.cancels] == [(decode, 0)]
    (_, old), *_ = stage.submits
    new = next(s for w, s in reversed(stage.submits) if w[0].startswith("prefill"))
    assert stage.leg(rid, PREFILL) != prefill
    assert new.attempt == 1
    assert new.room != old.room
    assert new.tokens == (5, 6, 7)
    stage.finish()
    stage.assert_answered(rid)


def test_prefill_that_dies_after_its_token_and_before_decode_spoke_is_replayed_with_the_token() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, PREFILL, 1)
    stage.kill(stage.leg(rid, PREFILL))
    new = stage.submits[-1][1]
    assert new.tokens == (5, 6, 7, stage.answer(rid)[0])
    assert (new.prompt_len, new.attempt) == (3, 1)
    stage.finish()
    stage.assert_answered(rid)


def test_prefill_that_dies_when_decode_has_told_that_the_prompt_is_there_changes_nothing() -> None:
    stage = Stage()
    rid = stage.submit()
    prefill = stage.leg(rid, PREFILL)
    stage.say(rid, PREFILL, 2)
    stage.say(rid, DECODE, 1)
    stage.kill(prefill)
    stage.finish()
    stage.assert_answered(rid)
    assert len(stage.submits) == 2
    assert stage.core.counts.replays == 0


@pytest.mark.parametrize("seen_as", ["left", "its last word"])
def test_d1_prefill_that_leaves_in_order_has_handed_over_what_it_began_though_decode_has_not_spoken(
    seen_as: str,
) -> None:
    """Such a prompt may wait for memory at decode; a replay would cost a prompt, or find no worker of its class."""
    stage = Stage()
    rid = stage.submit()
    prefill = stage.leg(rid, PREFILL)
    stage.say(rid, PREFILL, 2)
    if seen_as == "its last word":  # It had so little to do that no table showed that it drains.
        stage.unlink(prefill, left=True)
    else:
        stage.cluster[prefill].state = "left"
        stage.view()
    assert len(stage.submits) == 2
    assert stage.core.counts.replays == 0
    stage.finish()
    stage.assert_answered(rid)
    assert stage.core.counts.replays == 0


def test_prefill_that_leaves_in_order_before_its_token_is_replaced() -> None:
    stage = Stage()
    rid = stage.submit()
    prefill = stage.leg(rid, PREFILL)
    stage.drain(prefill)
    stage.unlink(prefill, left=True)
    assert stage.core.counts.replays == 1
    assert stage.leg(rid, PREFILL) != prefill
    stage.finish()
    stage.assert_answered(rid)


def test_prefill_whose_stream_breaks_while_it_drains_is_replaced() -> None:
    """It has cancelled the request, as its router is gone: decode may wait for nothing."""
    stage = Stage()
    rid = stage.submit()
    prefill = stage.leg(rid, PREFILL)
    stage.say(rid, PREFILL, 2)
    stage.drain(prefill)
    stage.unlink(prefill)
    assert stage.core.counts.replays == 1
    stage.finish()
    stage.assert_answered(rid)


def test_decode_that_did_not_get_the_prompt_of_prefill_that_left_has_the_request_replayed() -> None:
    stage = Stage()
    rid = stage.submit()
    prefill = stage.leg(rid, PREFILL)
    stage.say(rid, PREFILL, 1)
    stage.drain(prefill)
    stage.unlink(prefill, left=True)
    stage.error(rid, DECODE, ErrorKind.ROOM)
    assert stage.submits[-1][1].attempt == 1
    stage.finish()
    stage.assert_answered(rid)


def test_prefill_that_dies_after_decode_spoke_changes_nothing() -> None:
    stage = Stage()
    rid = stage.submit()
    prefill = stage.leg(rid, PREFILL)
    stage.say(rid, PREFILL, 2)
    stage.say(rid, DECODE, 1 + 1)
    stage.kill(prefill)
    stage.finish()
    stage.assert_answered(rid)
    assert len(stage.submits) == 2
    assert stage.core.counts.replays == 0


def test_prefill_that_dies_before_its_first_token_arrived_is_replayed_though_decode_spoke() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, DECODE, 1 + 3)
    stage.kill(stage.leg(rid, PREFILL))
    stage.finish()
    stage.assert_answered(rid)
    assert stage.core.counts.replays == 1


@pytest.mark.parametrize("said", range(6))
def test_decode_that_dies_at_any_token_is_replaced_without_a_gap_or_a_repetition(said: int) -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, PREFILL, 2)
    stage.say(rid, DECODE, 1 + said)
    decode = stage.leg(rid, DECODE)
    stage.kill(decode)
    if said == 5:
        stage.assert_answered(rid)
        assert stage.ends[rid].reason == "length"
        return
    new = stage.submits[-1][1]
    assert new.tokens == (5, 6, 7, *stage.answer(rid)[: said + 1])
    assert new.attempt == 1
    stage.finish()
    stage.assert_answered(rid)


def test_a_lost_decode_with_one_token_missing_needs_prefill_alone() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, PREFILL, 2)
    stage.say(rid, DECODE, 1 + 4)
    stage.kill(stage.leg(rid, DECODE))
    worker, submit = stage.submits[-1]
    assert worker[0].startswith("prefill")
    assert submit.peer is None
    stage.finish()
    stage.assert_answered(rid)


def test_a_stop_token_that_is_out_ends_the_answer_though_decode_died_before_saying_so() -> None:
    stage = Stage()
    plain = stage.submit()
    rid = stage.submit(stop_token_ids=(stage.answer(plain)[2],))
    stage.say(rid, PREFILL, 2)
    stage.say(rid, DECODE, 1 + 2)
    stage.kill(stage.leg(rid, DECODE))
    assert stage.ends[rid].reason == "stop"
    assert stage.ends[rid].stop_token == stage.answer(rid)[-1]
    stage.assert_answered(rid)


def test_when_both_die_the_request_waits_for_their_successors() -> None:
    stage = Stage(1, 1)
    rid = stage.submit()
    stage.say(rid, PREFILL, 1)
    stage.kill("decode-0")
    stage.kill("prefill-0")
    assert not stage.legs
    stage.tick(5)
    stage.restart("prefill-0")
    assert not stage.legs
    stage.restart("decode-0")
    assert {w for w, s in stage.submits if s.attempt == 1} == {stage.key("prefill-0"), stage.key("decode-0")}
    assert stage.key("prefill-0")[1] == 2
    stage.finish()
    stage.assert_answered(rid)


def test_a_new_incarnation_in_the_table_ends_the_old_ones_requests() -> None:
    stage = Stage(1, 1)
    rid = stage.submit()
    stage._forget("decode-0")
    stage.cluster["decode-0"].restart()
    stage.view()
    assert [(w[0], c.attempt) for w, c in stage.cancels] == [("prefill-0", 0)]
    stage.link("decode-0")
    stage.finish()
    stage.assert_answered(rid)


def test_a_broken_link_alone_replays_on_the_same_worker() -> None:
    stage = Stage(1, 1)
    rid = stage.submit()
    stage.say(rid, PREFILL, 2)
    stage.unlink("decode-0")
    stage.link("decode-0")
    stage.finish()
    stage.assert_answered(rid)
    assert [s.attempt for w, s in stage.submits if w[0] == "decode-0"] == [0, 1]


@pytest.mark.parametrize("kind", [ErrorKind.ROOM, ErrorKind.DAMAGED, ErrorKind.WORKER])
@pytest.mark.parametrize("role", PAIR)
def test_a_retryable_error_is_tried_elsewhere_and_the_other_leg_cancelled(kind: ErrorKind, role: Role) -> None:
    stage = Stage()
    rid = stage.submit()
    at_fault, other = stage.leg(rid, role), stage.leg(rid, DECODE if role is PREFILL else PREFILL)
    stage.error(rid, role, kind)
    assert [w[0] for w, _ in stage.cancels] == [other]
    assert stage.leg(rid, role) != at_fault
    assert stage.core.counts.damaged == (kind is ErrorKind.DAMAGED)
    stage.finish()
    stage.assert_answered(rid)


def test_the_blamed_worker_is_avoided_not_the_one_that_reports() -> None:
    stage = Stage()
    rid = stage.submit()
    prefill = stage.leg(rid, PREFILL)
    stage.error(rid, DECODE, ErrorKind.ROOM, blame=WorkerName(prefill))
    assert stage.leg(rid, PREFILL) != prefill
    assert list(stage.requests[rid].avoid) == [stage.key(prefill)]


def test_the_only_worker_is_tried_again_after_a_pause() -> None:
    stage = Stage(1, 1)
    rid = stage.submit()
    stage.error(rid, DECODE, ErrorKind.WORKER)
    assert not stage.legs
    stage.tick(0.6)
    stage.finish()
    stage.assert_answered(rid)


FATAL = [ErrorKind.INVALID, ErrorKind.TOO_LONG, ErrorKind.GRAMMAR, ErrorKind.OVERLOADED, ErrorKind.DEADLINE]


@pytest.mark.parametrize("kind", FATAL)
def test_other_errors_end_the_request_at_once(kind: ErrorKind) -> None:
    stage = Stage()
    rid = stage.submit()
    stage.error(rid, PREFILL, kind)
    assert stage.ends[rid].error is kind
    assert stage.ends[rid].message == "planted"
    assert not stage.legs
    assert stage.core.requests.in_flight == 0


def test_an_error_that_says_nothing_still_names_the_worker_and_what_it_was() -> None:
    stage = Stage()
    rid = stage.submit()
    decode = stage.leg(rid, DECODE)
    del stage.legs[decode, rid]
    stage.hear(stage.key(decode), Done(rid, 0, "error", error=ErrorKind.INVALID))
    assert stage.ends[rid].message == f"{decode} failed the request: {ErrorKind.INVALID}"


def test_a_refusal_of_what_was_taken_before_is_not_the_clients_fault() -> None:
    stage = Stage(1, 1, replay_limit=3)
    rid = stage.submit()
    stage.unlink("decode-0")
    stage.link("decode-0")
    stage.tick(0.6)
    stage.error(rid, DECODE, ErrorKind.INVALID)  # it still holds the attempt whose stream broke
    assert rid not in stage.ends
    stage.tick(1)
    stage.finish()
    stage.assert_answered(rid)


def test_a_refusal_that_stays_keeps_its_kind() -> None:
    stage = Stage(replay_limit=1)
    rid = stage.submit()
    stage.error(rid, DECODE, ErrorKind.WORKER)
    stage.tick(1)
    stage.error(rid, DECODE, ErrorKind.INVALID)
    assert stage.ends[rid].error is ErrorKind.INVALID


def test_events_of_an_earlier_attempt_are_dropped_and_counted() -> None:
    stage = Stage(2, 1)
    rid = stage.submit()
    decode = stage.leg(rid, DECODE)
    stage.error(rid, PREFILL, ErrorKind.WORKER)
    assert stage.leg(rid, DECODE) == decode
    before = stage.core.counts.late_events
    stage.hear(stage.key(decode), Tokens(rid, 0, 3, (999,)))
    stage.hear(stage.key(decode), Done(rid, 0, "length"))
    assert stage.out[rid] == []
    assert stage.core.counts.late_events == before + 2
    stage.finish()
    stage.assert_answered(rid)


def test_events_of_a_worker_that_has_no_leg_are_dropped() -> None:
    stage = Stage()
    rid = stage.submit()
    stranger = next(n for n in ("decode-0", "decode-1") if n != stage.leg(rid, DECODE))
    stage.hear(stage.key(stranger), Tokens(rid, 0, 3, (999,)))
    assert stage.out[rid] == []


def test_scores_that_are_out_are_not_asked_for_again() -> None:
    stage = Stage()
    rid = stage.submit(prompt_logprobs=0)
    stage.say(rid, PREFILL, 2)
    stage.kill(stage.leg(rid, DECODE))
    assert stage.submits[-1][1].sampling.prompt_logprobs is None
    stage.finish()
    stage.assert_answered(rid)


def test_a_draining_refusal_costs_no_attempt_and_goes_elsewhere() -> None:
    stage = Stage(1, 2, replay_limit=0)
    rid = stage.submit()
    refuser = stage.leg(rid, DECODE)
    stage.error(rid, DECODE, ErrorKind.DRAINING)
    assert stage.leg(rid, DECODE) != refuser
    assert stage.core.counts.replays == 0
    stage.finish()
    stage.assert_answered(rid)


def test_draining_refusals_are_bounded() -> None:
    stage = Stage(1, 1)
    rid = stage.submit()
    for _ in range(REFUSAL_LIMIT):
        stage.error(rid, DECODE, ErrorKind.DRAINING)
        stage.tick(0.6)
    assert rid not in stage.ends
    stage.error(rid, DECODE, ErrorKind.DRAINING)
    assert stage.ends[rid].error is ErrorKind.WORKER


def test_replays_are_bounded_and_the_error_says_why() -> None:
    stage = Stage(replay_limit=3)
    rid = stage.submit()
    for _ in range(3):
        stage.error(rid, DECODE, ErrorKind.DAMAGED)
        stage.tick(5)
    stage.error(rid, DECODE, ErrorKind.DAMAGED)
    done = stage.ends[rid]
    assert done.error is ErrorKind.WORKER
    assert "4 times" in done.message
    assert "damaged" in done.message
    assert stage.core.requests.in_flight == 0
    assert not stage.legs


# ---------------------------------------------------------------- waits end


@pytest.mark.parametrize("role", PAIR)
def test_a_request_waits_for_a_role_and_then_fails_by_its_name(role: Role) -> None:
    stage = Stage(1, 1, worker_wait_s=10.0)
    stage.kill(f"{role}-0")
    rid = stage.submit()
    stage.tick(9.9)
    assert rid not in stage.ends
    stage.tick(0.1)
    assert stage.ends[rid].error is ErrorKind.OVERLOADED
    assert f"no {role} worker" in stage.ends[rid].message


def test_a_request_that_no_pair_of_those_that_serve_can_take_fails_by_saying_so() -> None:
    stage = Stage(1, 1, worker_wait_s=10.0)
    rid = stage.submit(max_tokens=stage.cluster["decode-0"].positions + 1)
    stage.tick(10.0)
    assert stage.ends[rid].message == "no free pair of workers could serve the request within 10 s"


def test_a_request_that_takes_too_long_is_cancelled_on_both_legs() -> None:
    stage = Stage(request_timeout_s=30.0)
    rid = stage.submit()
    legs = {name for name, _ in stage.legs}
    assert stage.submits[0][1].deadline_s == 30.0
    stage.tick(30.0)
    assert stage.ends[rid].error is ErrorKind.DEADLINE
    assert {w[0] for w, _ in stage.cancels} == legs


@pytest.mark.parametrize("told", [0, 1])
def test_a_prompt_whose_answer_another_router_has_taken_over_is_left_to_itself(told: int) -> None:
    """Prefill's leg is of use to decode until decode has the prompt, and is nobody's to cancel should it give up."""
    stage = Stage()
    rid = stage.submit()
    prefill = stage.leg(rid, PREFILL)
    stage.say(rid, PREFILL, told)
    stage.error(rid, DECODE, ErrorKind.SUPERSEDED)
    assert [(worker[0], detach.request_id, detach.attempt) for worker, detach in stage.detached] == [(prefill, rid, 0)]
    assert stage.cancels == [], "it takes nothing away from the other"
    assert stage.ends[rid].error is ErrorKind.SUPERSEDED


def test_a_cancel_reaches_both_legs_and_leaves_nothing() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, PREFILL, 1)
    stage.core.cancel(rid)
    stage.core.cancel(rid)
    stage.play()
    assert not stage.legs
    assert len(stage.cancels) == 2
    assert stage.core.requests.in_flight == 0
    assert all(e.load == 0 and not e.requests for e in stage.core.workers)


def test_work_that_does_not_advance_is_seen() -> None:
    stage = Stage()
    stage.tick(100)
    assert stage.core.progress.stalled_s == 0
    rid = stage.submit()
    stage.tick(7)
    assert stage.core.progress.stalled_s == pytest.approx(7)
    stage.say(rid, PREFILL)
    assert stage.core.progress.stalled_s == 0


def test_a_workers_steps_count_as_advance() -> None:
    stage = Stage()
    stage.submit()
    stage.tick(7)
    views = stage.cluster.views()
    stage.core.on_view((replace(views[0], status=replace(views[0].status, steps=5)), *views[1:]))
    assert stage.core.progress.stalled_s == 0


# ---------------------------------------------------------------- placement


def test_the_least_loaded_pair_is_chosen() -> None:
    stage = Stage()
    first, second = stage.submit((1,) * 100), stage.submit((2,) * 10)
    third = stage.submit((3,) * 10)
    assert stage.leg(first, PREFILL) != stage.leg(second, PREFILL)
    assert stage.leg(third, PREFILL) == stage.leg(second, PREFILL)
    assert stage.leg(first, DECODE) != stage.leg(second, DECODE)


def test_prefill_is_free_again_once_it_has_reported() -> None:
    stage = Stage(1, 1)
    rid = stage.submit()
    entry = stage.core.workers.named("prefill-0")
    assert entry is not None
    assert entry.load == 3
    stage.say(rid, PREFILL, 2)
    assert entry.load == 0


def test_a_known_prefix_draws_a_prompt_to_its_worker_unless_that_is_busy() -> None:
    stage = Stage()
    prompt = tuple(range(200))
    first = stage.submit(prompt)
    home = stage.leg(first, PREFILL)
    stage.finish()
    assert stage.leg(stage.submit((*prompt[:128], 7, 8)), PREFILL) == home
    stage.submit((9,) * 300)
    busy = Stage()
    home = busy.leg(busy.submit(prompt), PREFILL)
    assert busy.leg(busy.submit(prompt), PREFILL) != home


def test_prefix_hashes_follow_content_and_salt() -> None:
    tokens = list(range(3 * BLOCK_TOKENS + 5))
    keys = prefix_hashes(tokens).blocks.tolist()
    assert len(set(keys)) == 3
    assert prefix_hashes(tokens[:130]).blocks.tolist() == keys[:2]
    assert prefix_hashes([9, *tokens[1:]]).blocks[1] != keys[1]
    assert prefix_hashes(tokens, "salt").blocks[0] != keys[0]


@pytest.mark.parametrize("how", ["draining", "dead", "unlinked", "small"])
def test_c7_a_worker_that_cannot_serve_is_not_chosen(how: str) -> None:
    stage = Stage()
    if how == "draining":
        stage.drain("decode-0")
    elif how == "dead":
        stage.kill("decode-0")
    elif how == "unlinked":
        stage.unlink("decode-0")
    else:
        stage.cluster["decode-0"].positions = 8
        stage.view()
    for _ in range(4):
        stage.submit()
    assert {w[0] for w, _ in stage.submits if w[0].startswith("decode")} == {"decode-1"}


def test_an_older_table_does_not_bring_back_an_older_incarnation() -> None:
    stage = Stage(1, 1)
    old = stage.cluster.views()
    stage.restart("decode-0")
    stage.core.on_view(old)
    assert [e.record.incarnation for e in stage.core.workers] == [1, 2]


def test_a_worker_that_vanishes_from_the_table_loses_its_requests() -> None:
    stage = Stage()
    rid = stage.submit()
    gone = stage.leg(rid, DECODE)
    stage._forget(gone)
    stage.cluster.hidden.add(gone)
    stage.view()
    assert stage.leg(rid, DECODE) != gone
    stage.finish()
    stage.assert_answered(rid)


def test_what_fits_is_what_the_largest_worker_holds_and_unknown_until_one_has_told() -> None:
    stage = Stage(2, 2)
    workers = stage.core.workers
    stage.cluster["prefill-0"].positions, stage.cluster["prefill-1"].positions = 64, 128
    stage.cluster["decode-0"].positions = stage.cluster["decode-1"].positions = 0  # They are starting.
    stage.view()
    assert (workers.max_positions(PREFILL), workers.max_positions(DECODE)) == (128, None)
    stage.kill("prefill-1")
    assert workers.max_positions(PREFILL) == 64
    stage.kill("prefill-0")
    assert workers.max_positions(PREFILL) is None


# ---------------------------------------------------------------- books


def test_an_illegal_move_raises_and_changes_nothing() -> None:
    stage = Stage()
    request = stage.requests[stage.submit()]
    with pytest.raises(IllegalTransition):
        request.step("place")
    assert (request.phase, request.attempt) == ("running", 0)


def test_check_names_a_planted_violation() -> None:
    stage = Stage()
    rid = stage.submit()
    entry = stage.core.workers.get(stage.key(stage.leg(rid, DECODE)))
    assert entry is not None
    entry.load += 1
    assert "load is booked as 2" in stage.core.check()[0]
    entry.load -= 1
    entry.requests.clear()
    assert "booked requests differ" in stage.core.check()[0]
    entry.requests.add(rid)
    stage.core.requests.queued[rid] = stage.requests[rid]
    assert "in the queue" in stage.core.check()[0]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_answer_is_whole(seed: int) -> None:
    rng = random.Random(seed)
    stage = Stage(2, 2, replay_limit=1000)
    plain = [stage.submit((i, i + 1), max_tokens=9, logprobs=0) for i in range(3)]
    stops = [stage.answer(plain[0])[4]]
    rids = [*plain, stage.submit((0, 1), max_tokens=9, logprobs=1, prompt_logprobs=0, stop_token_ids=tuple(stops))]
    for _ in range(150):
        act = rng.random()
        names = list(stage.cluster.workers)
        if act < 0.70 and stage.legs:
            name, rid = rng.choice(list(stage.legs))
            if stage.can_say(name, rid) or (stage.legs[name, rid].events and rng.random() < 0.3):
                stage.say_next(name, rid)
        elif act < 0.78 and stage.said:
            stage.hear(*rng.choice(stage.said))
        elif act < 0.83:
            name = rng.choice(names)
            if stage.cluster[name].alive:
                stage.kill(name)
        elif act < 0.90:
            name = rng.choice(names)
            if not stage.cluster[name].alive:
                stage.restart(name)
        elif act < 0.94 and stage.legs:
            name, rid = rng.choice(list(stage.legs))
            kinds = [ErrorKind.ROOM, ErrorKind.DAMAGED, ErrorKind.WORKER, ErrorKind.DRAINING]
            stage.error(rid, Role.PREFILL if name.startswith("prefill") else Role.DECODE, rng.choice(kinds))
        elif act < 0.96:
            name = rng.choice(names)
            stage.drain(name, rng.random() < 0.5)
        else:
            stage.tick(rng.random())
    for name in list(stage.cluster.workers):
        stage.drain(name, False)
        if not stage.cluster[name].alive:
            stage.restart(name)
    stage.finish()
    for rid in rids:
        stage.assert_answered(rid)
        assert [t.token for t in stage.logprobs[rid]] == stage.out[rid]
    assert all(e.load == 0 and not e.requests for e in stage.core.workers)
    assert stage.scores[rids[-1]]


def test_reports_of_every_attempt_are_kept_for_the_timeline() -> None:
    stage = Stage()
    rid = stage.submit()
    stage.say(rid, PREFILL, 2)
    stage.kill(stage.leg(rid, DECODE))
    stage.finish()
    reports = stage.requests[rid].progress
    assert all(isinstance(p, LegReport) for p in reports)
    assert [p.role for p in reports] == [PREFILL, PREFILL, DECODE, DECODE]


def test_d4_a_prompt_that_decode_had_to_compute_is_counted_as_a_fallback() -> None:
    stage = Stage()
    rid = stage.submit()
    name = WorkerName(stage.leg(rid, Role.DECODE))
    stage.hear(stage.key(name), LegReport(rid, 0, Role.DECODE, name, {}, 0, 0, 64))
    assert stage.core.counts.fallbacks == 0
    stage.hear(stage.key(name), LegReport(rid, 0, Role.DECODE, name, {}, 0, 3, 64))
    assert stage.core.counts.fallbacks == 1


# ---------------------------------------------------------------- answers that a worker has kept


@pytest.mark.parametrize("lost", [False, True])
def test_an_answer_that_is_gone_on_with_has_all_that_its_worker_said_since_it_was_found(lost: bool) -> None:
    """The worker goes on at once, and the answer here once the client has been told what there was."""
    stage = Stage(1, 2)
    request = stage.request(seed=7)
    answer = expected(request.prompt, request.sampling)
    worker = stage.key("decode-1")
    kept = KeptAnswer(request.id, 3, 0, 7, 3, 6, 60.0, tuple(answer[:2]), running=True, started=True)
    ask = stage.core.lookups.begin("k", "b", 1)
    stage.core.on_view(stage.cluster.views())
    stage.core.on_event(worker, Attached(ask, 0, answers=(kept,)))
    stage.core.on_event(stage.key("decode-0"), Attached(ask, 0))
    stage.core.on_event(worker, Tokens(request.id, 3, 5, tuple(answer[2:4])))
    stage.core.on_event(worker, Tokens(request.id, 3, 7, tuple(answer[4:5])))
    assert stage.core.lookups.held == 1
    (found,) = [one.found[0] for one in stage.core.take_actions() if isinstance(one, LookupEnded)]
    if lost:
        stage.core.on_unlinked(worker, "cut")
    request.restore(found.answer, found.last_attempt)
    stage.requests[request.id], stage.out[request.id], stage.logprobs[request.id] = request, answer[:2], []
    stage.core.adopt(request, found)
    stage.play()
    assert stage.core.lookups.held == 0
    if lost:
        assert request.attempt == 4, "a number that no worker has seen of it"
        stage.finish()
    else:
        assert (request.decode, stage.out[request.id]) == (worker, answer[:5])
        stage.core.on_event(worker, Tokens(request.id, 3, 8, tuple(answer[5:])))
        stage.core.on_event(worker, Done(request.id, 3, "length"))
        stage.play()
    stage.assert_answered(request.id)
    assert stage.core.check() == []
    assert [entry.load for entry in stage.core.workers] == [0, 0, 0]


def test_a_second_attempt_is_sent_what_is_left_of_the_first_ones_time_and_bounds() -> None:
    """What was begun is finished: its next worker is not to drop it as too late to begin."""
    stage = Stage(1, 2, request_timeout_s=30.0, replay_limit=9)
    rid = stage.submit(within_s=5.0)
    first = [submit for _, submit in stage.submits]
    assert [(submit.deadline_s, submit.first_token_s) for submit in first] == [(30.0, 5.0)] * 2
    stage.tick(4.0)
    stage.error(rid, DECODE, ErrorKind.WORKER)
    second = [submit for _, submit in stage.submits[2:]]
    assert [(submit.deadline_s, submit.first_token_s, submit.attempt) for submit in second] == [(26.0, 0.0, 1)] * 2
    assert {submit.room for submit in first}.isdisjoint({submit.room for submit in second})
    stage.say(rid, PREFILL, 2)
    stage.say(rid, DECODE, 1 + 1)
    stage.tick(20.0)
    stage.error(rid, DECODE, ErrorKind.WORKER)
    stage.tick(1.0)
    third = [submit for _, submit in stage.submits[4:]]
    assert [(submit.deadline_s, submit.prompt_len, submit.tokens) for submit in third] == [
        (third[0].deadline_s, 3, (5, 6, 7, *stage.answer(rid)[:2]))
    ] * 2
    assert 5.0 <= third[0].deadline_s <= 6.0
    stage.tick(6.0)
    assert stage.ends[rid].error is ErrorKind.DEADLINE
    assert {cancel.attempt for worker, cancel in stage.cancels if worker[0].startswith(DECODE)} >= {2}
    assert stage.core.check() == []


def test_each_deadline_is_kept_behind_an_earlier_one() -> None:
    stage = Stage(1, 1, request_timeout_s=60.0)
    first = stage.submit(max_tokens=50)
    stage.clock.advance(5.0)
    second = stage.submit(max_tokens=50)
    stage.tick(55.0)
    assert set(stage.ends) == {first}
    stage.tick(5.0)
    assert {rid: done.error for rid, done in stage.ends.items()} == dict.fromkeys((first, second), ErrorKind.DEADLINE)


@pytest.mark.parametrize(("named", "finished"), [(True, True), (True, False), (False, True)])
def test_workers_keep_an_answer_with_a_name_that_a_stop_string_has_ended(named: bool, finished: bool) -> None:
    stage = Stage(1, 1)
    request = stage.request(max_tokens=9)
    request.name = AnswerName("key", "body", 0, 7) if named else None
    rid = stage.take(request)
    stage.say(rid, Role.PREFILL, 2)
    stage.core.cancel(rid, finished=finished)
    stage.play()
    assert {cancel.keep for _, cancel in stage.cancels} == {named and finished}
