"""Requests that go to one decode worker alone: when they do, why, how many, and what is booked for them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.stage import Stage
from twinpool.contracts.config.worker_config import DisaggregationConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role
from twinpool.router.core.routing_policies import LocalPrefill
from twinpool.router.state.ttft_prediction import MEASURED_S
from twinpool.router.state.worker_table import WorkerEntry

PROMPT_S, TOKEN_S = 0.05, 0.01
PAGE = 16


def prompt(number: int, tokens: int) -> tuple[int, ...]:
    """A prompt like no other."""
    return tuple(number * 1000 + n for n in range(tokens))


def conditional(prefill: int = 1, decode: int = 1, local_tokens: int = 64, **config: Any) -> Stage:
    bounds = DisaggregationConfig("conditional", step_tokens=32, local_tokens=local_tokens)
    return Stage(prefill, decode, local=LocalPrefill(bounds, PAGE), **config)


def taught(decode: int = 1, local_tokens: int = 64, **config: Any) -> Stage:
    """A stage whose prefill worker took 50 ms a prompt and 10 ms a token, all handed over."""
    stage = conditional(1, decode, local_tokens, **config)
    for number in range(12):
        tokens = 10 * (1 + number % 4)
        rid = stage.submit(prompt(number, tokens))
        assert reason(stage, rid) == ""
        stage.clock.advance(PROMPT_S + TOKEN_S * tokens)
        stage.finish()
    return stage


def reason(stage: Stage, rid: RequestId) -> str:
    """Why decode computes the prompt; checked against what was sent to whom."""
    r = stage.requests[rid]
    sent = [(key[0], submit.peer) for key, submit in stage.submits if submit.room == r.room]
    if r.local:
        assert len(sent) == 1
        assert sent[0][0].startswith("decode")
        assert sent[0][1] is None
    else:
        assert sorted(name.rstrip("0123456789") for name, _ in sent) == ["decode-", "prefill-"]
    return r.local


def decode_0(stage: Stage) -> WorkerEntry:
    entry = stage.core.workers.named("decode-0")
    assert entry is not None
    return entry


def test_a_prompt_that_would_wait_at_prefill_is_computed_by_decode_and_booked_in_tokens_and_sequences() -> None:
    stage = taught()
    long = stage.submit(prompt(100, 100))
    assert reason(stage, long) == "", "it exceeds the bound"
    short = stage.submit(prompt(101, 10))
    assert reason(stage, short) == "earlier"
    assert (decode_0(stage).load, decode_0(stage).local_tokens) == (2, 10)
    stage.say(short, Role.DECODE, 2)
    assert (decode_0(stage).load, decode_0(stage).local_tokens) == (2, 0), "its prompt is computed, and it runs on"
    stage.finish()
    assert (decode_0(stage).load, decode_0(stage).local_tokens) == (0, 0)
    for rid in (long, short):
        stage.assert_answered(rid)
    assert stage.core.counts.local_prompts == {"earlier": 1}


def test_where_nothing_waits_and_transfers_cost_nothing_prompts_are_handed_over() -> None:
    assert taught().core.counts.local_prompts == {}


def test_a_transfer_that_was_measured_counts_for_the_hand_over() -> None:
    stage = taught()
    for tokens in (10, 20, 30, 40):
        decode_0(stage).transfers.saw(tokens, 0.02)
    rid = stage.submit(prompt(100, 10))
    assert reason(stage, rid) == "earlier"
    assert reason(stage, stage.submit(prompt(101, 50))) == "", "its two steps cost a prompt's fixed part each"


def test_decode_is_given_no_more_prompt_tokens_than_the_bound_while_prefill_could_take_them() -> None:
    stage = taught(local_tokens=35)
    stage.submit(prompt(99, 100))
    told = [reason(stage, stage.submit(prompt(100 + n, 10))) for n in range(5)]
    assert told == ["earlier"] * 3 + [""] * 2
    assert decode_0(stage).local_tokens == 30
    stage.finish()


def test_what_other_routers_have_given_a_decode_worker_counts_for_the_bound() -> None:
    stage = taught(local_tokens=35)
    entry = decode_0(stage)
    entry.see(entry.record, replace(entry.status, routers=2, prompt_tokens=30))
    stage.submit(prompt(99, 100))
    assert reason(stage, stage.submit(prompt(100, 10))) == ""
    entry.see(entry.record, replace(entry.status, prompt_tokens=20))
    assert reason(stage, stage.submit(prompt(101, 10))) == "earlier"


@pytest.mark.parametrize(("theirs", "told"), [(0, "earlier"), (30, "")])
def test_prompts_of_other_routers_that_decode_computes_come_before_one_that_it_would_be_given(
    theirs: int, told: str
) -> None:
    stage = taught()
    entry = decode_0(stage)
    entry.see(entry.record, replace(entry.status, routers=2, prompt_tokens=theirs))
    stage.submit(prompt(99, 100))
    stage.clock.advance(PROMPT_S + TOKEN_S * 100 - 0.25)  # By a hand-over after 0.4 s.
    assert reason(stage, stage.submit(prompt(100, 10))) == told, "after 0.15 s, or with 40 tokens in two steps 0.5"


@pytest.mark.parametrize("busy", ["decode-0", "decode-1"])
def test_of_decode_workers_that_gets_a_prompt_where_fewer_tokens_wait_whoever_sent_them(busy: str) -> None:
    stage = taught(decode=2)
    entry = stage.core.workers.named(busy)
    assert entry is not None
    entry.see(entry.record, replace(entry.status, routers=2, prompt_tokens=40))
    stage.submit(prompt(99, 100))
    rid = stage.submit(prompt(100, 10))
    assert reason(stage, rid) == "earlier"
    assert stage.leg(rid, Role.DECODE) != busy


@pytest.mark.parametrize("how", ["dead", "draining", "left alone", "never there"])
def test_without_a_prefill_worker_decode_serves_all_of_it_beyond_the_bound(how: str) -> None:
    stage = conditional(0 if how == "never there" else 1, 2)
    match how:
        case "dead":
            stage.kill("prefill-0")
        case "draining":
            stage.drain("prefill-0")
        case "left alone":
            entry = stage.core.workers.named("prefill-0")
            assert entry is not None
            for n in range(8):
                entry.breaker.sent(RequestId(f"x{n}"))
                entry.breaker.failed(RequestId(f"x{n}"), stage.clock.now())
    rids = [stage.submit(prompt(n, 90), logprobs=1, prompt_logprobs=1) for n in range(4)]
    rids.append(stage.submit(prompt(9, 9), max_tokens=1))
    told = [reason(stage, rid) for rid in rids]
    probed = how == "left alone" and ""
    assert set(told) <= {"no_prefill", probed}
    assert told.count("no_prefill") >= 4, told
    stage.finish()
    for rid in rids:
        stage.assert_answered(rid)
    assert stage.core.counts.failed == 0


def test_a_prefill_pool_that_dies_under_load_costs_replays_and_no_request() -> None:
    stage = taught(decode=2)
    rids = [stage.submit(prompt(100 + n, 90)) for n in range(6)]
    stage.say(rids[0], Role.PREFILL, 2)
    stage.kill("prefill-0")
    assert {stage.requests[rid].local for rid in rids[1:]} == {"no_prefill"}
    stage.finish()
    for rid in rids:
        stage.assert_answered(rid)
    stage.restart("prefill-0")
    for number in range(4):
        again = stage.submit(prompt(200 + number, 90))
        assert reason(stage, again) == "", "it is back, and prompts of that size are beyond the bound"
    stage.finish()


def test_decode_that_dies_while_it_computes_a_prompt_costs_a_replay() -> None:
    stage = taught(decode=2)
    stage.submit(prompt(100, 100))
    short = stage.submit(prompt(101, 10))
    assert reason(stage, short) == "earlier"
    stage.kill(stage.leg(short, Role.DECODE))
    stage.finish()
    stage.assert_answered(short)
    assert stage.requests[short].replays == 1


def test_a_pair_whose_hand_over_failed_is_not_tried_again_where_decode_can_do_without() -> None:
    stage = taught()
    rid = stage.submit(prompt(100, 90))
    stage.error(rid, Role.DECODE, ErrorKind.ROOM)
    stage.tick(2.0)
    assert reason(stage, rid) == "handover_failed"
    stage.finish()
    stage.assert_answered(rid)


def test_a_later_turn_that_decode_holds_needs_only_its_new_tokens_of_the_bound() -> None:
    stage = taught(local_tokens=20)
    turn = prompt(100, 128)
    stage.submit(turn)
    stage.clock.advance(2.0)
    stage.finish()
    stage.submit(prompt(200, 100))
    assert reason(stage, stage.submit((*turn, *prompt(300, 10)))) == "earlier"
    assert decode_0(stage).local_tokens == 10
    assert reason(stage, stage.submit(prompt(400, 138))) == ""
    stage.finish()


def test_decode_that_was_measured_to_be_slow_gets_no_more_until_that_is_long_ago() -> None:
    stage = taught()
    for number in range(4):
        long = stage.submit(prompt(100 + number, 100))
        short = stage.submit(prompt(200 + number, 10))
        assert reason(stage, short) == "earlier"
        stage.clock.advance(PROMPT_S + TOKEN_S * 100)
        stage.say(long, Role.PREFILL, 2)
        stage.clock.advance(10.0)
        stage.finish()
    stage.submit(prompt(300, 100))
    assert reason(stage, stage.submit(prompt(301, 10))) == "", "ten seconds is more than the queue"
    stage.clock.advance(MEASURED_S + 1)
    assert reason(stage, stage.submit(prompt(302, 10))) == "earlier"


def test_an_answer_that_has_begun_goes_on_locally_in_its_numerics_class_alone() -> None:
    stage = conditional(1, 2)
    old, new = "invariant:x86-64-v3", "invariant:x86-64-v4"
    for name, numerics in (("prefill-0", old), ("decode-0", old), ("decode-1", new)):
        stage.cluster[name].numerics = numerics
    stage.view()
    rid = stage.submit(prompt(1, 20))
    stage.say(rid, Role.PREFILL)
    stage.kill("prefill-0")
    stage.kill("decode-0")
    stage.tick(2.0)
    assert not stage.legs, "the other decode worker computes other bits"
    fresh = stage.submit(prompt(2, 20))
    assert (reason(stage, fresh), stage.leg(fresh, Role.DECODE)) == ("no_prefill", "decode-1")
    stage.restart("decode-0")
    assert (reason(stage, rid), stage.leg(rid, Role.DECODE)) == ("no_prefill", "decode-0")
    stage.finish()
    for one in (rid, fresh):
        stage.assert_answered(one)


def test_first_tokens_are_predicted_of_decode_where_it_would_be_given_the_prompt() -> None:
    stage = taught()
    for tokens in (10, 20, 30, 40):
        decode_0(stage).transfers.saw(tokens, 1.0)
    for number in range(6):
        tokens = 10 * (1 + number % 3)
        rid = stage.submit(prompt(100 + number, tokens))
        assert reason(stage, rid) == "earlier"
        stage.clock.advance(PROMPT_S + TOKEN_S * tokens)
        stage.finish()
    stage.submit(prompt(200, 100))
    assert stage.core.predict_slo_miss([stage.request(prompt(201, 10), within_s=0.5)]) is None, "decode is free"
    late = stage.core.predict_slo_miss([stage.request(prompt(205, 10), 0, within_s=0.5, pooling="last")])
    assert late is not None, "decode computes no embedding"
    assert late.worker.record.role is Role.PREFILL
    assert stage.core.predict_slo_miss([stage.request(prompt(202, 70), within_s=0.5)]) is not None, "beyond the bound"
    stage.kill("prefill-0")
    stage.clock.advance(PROMPT_S + TOKEN_S * 100)
    stage.finish()
    late = stage.core.predict_slo_miss([stage.request(prompt(203, 200), within_s=0.5)])
    assert late is not None
    assert late.worker.record.role is Role.DECODE
    assert stage.core.predict_slo_miss([stage.request(prompt(204, 20), within_s=0.5)]) is None


def test_without_decode_a_request_waits_and_is_told_so() -> None:
    stage = conditional(1, 1, worker_wait_s=1.0)
    stage.kill("decode-0")
    assert stage.core.workers.needed == (Role.DECODE,)
    rid = stage.submit()
    stage.tick(1.5)
    assert stage.ends[rid].error is ErrorKind.OVERLOADED
    assert stage.ends[rid].message.startswith("no decode worker could serve the request")


def test_a_request_whose_client_leaves_frees_what_is_booked_of_it() -> None:
    stage = conditional(0, 1)
    rid = stage.submit(prompt(1, 50))
    assert decode_0(stage).local_tokens == 50
    stage.core.cancel(rid)
    stage.play()
    assert (decode_0(stage).load, decode_0(stage).local_tokens, len(stage.cancels)) == (0, 0, 1)


def test_a_cluster_that_always_hands_over_lets_requests_wait_for_prefill() -> None:
    stage = Stage(1, 1, worker_wait_s=1.0)
    stage.kill("prefill-0")
    rid = stage.submit()
    assert not stage.submits
    stage.tick(1.5)
    assert stage.ends[rid].message.startswith("no prefill worker could serve the request")


def test_an_embedding_is_never_decodes_business() -> None:
    """Where prompts would go to a decode worker, and where there is nobody else."""
    stage = taught()
    stage.submit(prompt(100, 100))
    assert reason(stage, stage.submit(prompt(101, 10))) == "earlier"
    vector = stage.submit(prompt(102, 10), max_tokens=0, pooling="last")
    assert [key[0] for key, submit in stage.submits if submit.request_id == vector] == ["prefill-0"]
    stage.finish()
    assert stage.embeddings[vector]
    stage.kill("prefill-0")
    waits = stage.submit(prompt(103, 10), max_tokens=0, pooling="last")
    assert reason(stage, stage.submit(prompt(104, 10))) == "no_prefill"
    assert not [submit for _, submit in stage.submits if submit.request_id == waits]
