"""Attempts that decode had no memory for go on from their tokens, and cost the request nothing."""

from __future__ import annotations

from tests.router.stage import Stage
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import Role
from twinpool.router.core.failover import REFUSAL_LIMIT


def test_an_attempt_that_was_retracted_spends_no_replay_and_avoids_nobody() -> None:
    stage = Stage(prefill=1, decode=1, replay_limit=0)
    rid = stage.submit(max_tokens=40)
    request = stage.core.requests.get(rid)
    assert request is not None
    for _ in range(10):
        stage.say(rid, Role.PREFILL, 2)
        stage.say(rid, Role.DECODE, 2)
        stage.error(rid, Role.DECODE, ErrorKind.RETRACTED)
    stage.finish()
    stage.assert_answered(rid)
    assert (stage.core.counts.recomputed, stage.core.counts.replays, stage.core.counts.refusals) == (10, 0, 0)
    assert request.attempts == 11


def test_attempts_that_bring_no_token_are_bounded() -> None:
    stage = Stage(prefill=1, decode=1)
    rid = stage.submit(max_tokens=40)
    request = stage.core.requests.get(rid)
    assert request is not None
    for _ in range(REFUSAL_LIMIT + 1):
        stage.error(rid, Role.DECODE, ErrorKind.RETRACTED)
    assert stage.ends[rid].error is not None
    assert stage.core.counts.recomputed == 0
    assert request.attempts == REFUSAL_LIMIT + 1
