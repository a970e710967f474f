"""Requests while the cluster's weights change: who goes on, who begins anew, who waits, and whom nobody can answer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.router.stage import Stage
from twinpool.contracts.errors import ErrorKind, RequestError
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.kept_answers import KeptAnswer
from twinpool.contracts.sampling_params import WeightsVersion
from twinpool.router.service.idempotency_keys import check_drawn_alike

NEW = WeightsVersion(1, "v1", "/w", "d")
WAIT_S = 5.0


def stage_of(prefill: int = 1, decode: int = 1) -> Stage:
    stage = Stage(prefill, decode, worker_wait_s=WAIT_S)
    for worker in stage.cluster.workers.values():
        worker.numerics = "invariant:x"
        stage.restart(worker.name)
    return stage


def change(stage: Stage, *names: str, behind: int = 0) -> None:
    """Have these workers go on with the new weights, of a cluster that has changed to them."""
    stage.core.workers.served = ServedWeights(NEW, tried=1, behind=behind)
    for name in names:
        stage.cluster[name].changed = NEW
        stage.unlink(name, left=True)
        stage.restart(name)


def begin(stage: Stage) -> RequestId:
    """A request of which some tokens have been told."""
    rid = stage.submit(max_tokens=8)
    while not stage.out[rid]:
        for name, _ in list(stage.legs):
            if stage.can_say(name, rid):
                stage.say_next(name, rid)
    return rid


def test_an_answer_that_has_begun_is_told_at_once_that_nobody_has_its_weights_any_more() -> None:
    stage = stage_of()
    rid = begin(stage)
    change(stage, "decode-0", "prefill-0")
    stage.tick()
    assert stage.ends[rid].error is ErrorKind.OVERLOADED
    assert "the weights were changed while it was answered" in stage.ends[rid].message


def test_workers_that_are_gone_have_no_weights() -> None:
    stage = stage_of(2, 2)
    rid = begin(stage)
    used = {name for name, _ in stage.legs} | {key[0] for key, _ in stage.submits}
    change(stage, *(name for name in stage.cluster.workers if name not in used))
    assert rid not in stage.ends
    for name in used:
        stage.kill(name)
    stage.tick()
    assert rid in stage.ends
    assert "the weights were changed while it was answered" in stage.ends[rid].message


def test_an_answer_of_the_new_weights_waits_for_workers_that_come_back_with_them() -> None:
    stage = stage_of()
    change(stage, "decode-0", "prefill-0")
    rid = begin(stage)
    for name in ("decode-0", "prefill-0"):
        stage.kill(name)
    stage.tick()
    assert rid not in stage.ends
    for name in ("decode-0", "prefill-0"):
        stage.restart(name)
    stage.finish()
    stage.assert_answered(rid)


def test_an_answer_that_has_begun_goes_on_with_its_own_weights_wherever_these_are() -> None:
    stage = stage_of(2, 2)
    rid = begin(stage)
    used = {name for name, _ in stage.legs} | {key[0] for key, _ in stage.submits}
    change(stage, *used, behind=2)
    stage.finish()
    stage.assert_answered(rid)
    assert {key[0] for key, _ in stage.submits[-2:]} == {name for name in stage.cluster.workers if name not in used}
    assert stage.requests[rid].weights_number == 0


def test_a_request_of_which_nothing_was_told_begins_anew_with_the_new_weights() -> None:
    stage = stage_of()
    rid = stage.submit(max_tokens=8)
    change(stage, "decode-0", "prefill-0")
    stage.finish()
    stage.assert_answered(rid)
    assert (stage.requests[rid].weights, stage.requests[rid].weights_number) == ("v1", 1)


def test_no_request_is_computed_by_workers_of_two_versions() -> None:
    stage = stage_of(2, 2)
    change(stage, "prefill-0", "decode-1", behind=2)
    rids = [stage.submit(max_tokens=2) for _ in range(8)]
    stage.finish()
    for rid in rids:
        stage.assert_answered(rid)
        pair = {key[0] for key, submit in stage.submits if submit.request_id == rid}
        assert pair in ({"prefill-0", "decode-1"}, {"prefill-1", "decode-0"})


@pytest.mark.parametrize("kept", [True, False], ids=["kept without its tokens", "kept nowhere"])
def test_an_answer_of_which_its_client_has_a_part_of_another_router_goes_on_with_those_weights_alone(
    kept: bool,
) -> None:
    stage = stage_of(prefill=2, decode=2)
    entry, request = stage.core.workers.named("decode-0"), stage.request(max_tokens=3)
    assert entry is not None
    if kept:
        found = KeptAnswer(request.id, 0, 0, 0, 3, 3, left_s=60.0)
        request.restore(found, 0, told=True)
        request.go_on_in(*entry.weights)
    else:
        request.draw_again(0)
    change(stage, "prefill-0", "decode-0", behind=2)
    rid = stage.take(request)
    assert {key[0] for key, _ in stage.submits} == {"prefill-1", "decode-1"}
    change(stage, "prefill-1", "decode-1")
    stage.tick()
    assert rid in stage.ends
    assert not stage.out[rid]
    assert "the weights were changed while it was answered" in stage.ends[rid].message


@pytest.mark.parametrize("behind", [0, 1])
def test_who_waits_for_workers_that_change_waits_for_as_long_as_that_takes(behind: int) -> None:
    stage = stage_of()
    stage.core.workers.served = ServedWeights(NEW, tried=1, behind=behind)
    for name in ("prefill-0", "decode-0"):
        stage.kill(name)
    rid = stage.submit(max_tokens=2)
    stage.tick(WAIT_S + 1)
    if not behind:
        assert f"within {WAIT_S:g} s" in stage.ends[rid].message
        return
    assert rid not in stage.ends
    stage.core.workers.served = replace(stage.core.workers.served, behind=0)
    stage.tick()
    assert f"within {WAIT_S:g} s" in stage.ends[rid].message


def test_who_waits_while_the_cluster_falls_asleep_is_told_once_the_last_worker_has_left() -> None:
    stage = stage_of()
    stage.kill("decode-0")
    rid = stage.submit(max_tokens=2)
    stage.core.workers.served = ServedWeights(asleep=1)
    stage.tick()
    assert rid not in stage.ends, "one may still end what it has"
    stage.kill("prefill-0")
    stage.tick()
    assert "the cluster sleeps" in stage.ends[rid].message


@pytest.mark.parametrize(
    ("served", "created", "alike"),
    [
        (ServedWeights(), 500, True),
        (ServedWeights(since=1000.0), 500, True),
        (ServedWeights(NEW, since=1000.0), 999, False),
        (ServedWeights(NEW, since=1000.0), 1030, False),
        (ServedWeights(NEW, since=1000.0), 1031, True),
        (ServedWeights(NEW, since=1000.0, behind=1), 1031, False),
    ],
)
def test_an_answer_is_drawn_again_where_its_weights_are_surely_the_clusters(
    served: ServedWeights, created: int, alike: bool
) -> None:
    if alike:
        check_drawn_alike(created, served)
        return
    with pytest.raises(RequestError, match="the weights were changed since this answer began"):
        check_drawn_alike(created, served)
