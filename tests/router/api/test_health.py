"""Health and failed attempts: what is told while nothing moves, and what becomes of a request whose prefill failed."""

from __future__ import annotations

import pytest

from tests.router.stage import Stage
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.messages.worker_status import WorkerStatus, WorkerView

STALL_S = 30.0


def steps(stage: Stage, **made: int) -> None:
    """A table of the controller, in which workers have made so many steps."""
    views = []
    for view in stage.cluster.views():
        s = view.status
        told = WorkerStatus(
            s.name, s.role, s.state, s.pid, s.node, s.incarnation, s.running, s.waiting, s.pages_total, s.pages_free,
            steps=made.get(s.name.replace("-", "_"), 0),
        )  # fmt: skip
        views.append(WorkerView(view.record, told))
    stage.core.on_view(views)
    stage.play()


def stuck(stage: Stage) -> bool:
    """What `/health` fails for."""
    return stage.core.progress.stalled_s > STALL_S


def test_c4_health_fails_while_a_request_waits_though_other_workers_make_steps() -> None:
    """They compute for other routers; the workers that have the request stand still."""
    stage = Stage()
    rid = stage.submit()
    mine = {stage.leg(rid, role).replace("-", "_") for role in PAIR}
    others = {name.replace("-", "_") for name in stage.cluster.workers} - mine
    assert len(mine) == len(others) == 2
    for count in range(40):
        stage.clock.advance(1.0)
        steps(stage, **dict.fromkeys(others, count))
    assert stuck(stage)
    steps(stage, **dict.fromkeys(others | mine, 50))
    assert not stuck(stage), "a long prompt takes many steps before its first event"


def test_c4_health_fails_while_attempts_fail_and_none_comes_further() -> None:
    stage = Stage(replay_limit=1000)
    rid = stage.submit()
    for _ in range(40):
        stage.clock.advance(1.0)
        if any(request == rid for _, request in stage.legs):
            stage.error(rid, Role.PREFILL, ErrorKind.WORKER)
        stage.tick(0.0)
    assert rid not in stage.ends
    assert stuck(stage)
    stage.finish()
    stage.assert_answered(rid)
    assert stage.core.progress.stalled_s == 0.0


def test_c4_a_worker_that_is_started_anew_is_no_progress() -> None:
    stage = Stage(1, 1)
    stage.submit()
    steps(stage, prefill_0=10, decode_0=10)
    stage.clock.advance(40.0)
    steps(stage)
    assert stuck(stage)


@pytest.mark.parametrize("kind", [kind for kind in ErrorKind if kind is not ErrorKind.SUPERSEDED])
def test_a10_a_failed_prefill_is_never_swallowed_decode_hears_of_it_before_any_timeout(kind: ErrorKind) -> None:
    """No time passes here: whoever waited for a timeout would wait for ever. Nobody but decode says that a request is
    another router's."""
    stage = Stage()
    rid = stage.submit()
    decode = stage.leg(rid, Role.DECODE)
    first = stage.legs[decode, rid].submit
    stage.error(rid, Role.PREFILL, kind)
    ended = rid in stage.ends
    assert ended or stage.requests[rid].attempt > first.attempt, "an error, or another attempt"
    if ended:
        assert stage.ends[rid].error == kind
    told = [(w[0], cancel.request_id, cancel.attempt) for w, cancel in stage.cancels]
    assert (decode, rid, first.attempt) in told, "decode doesn't wait for a hand-over that won't come"
    if not ended:
        stage.finish()
        stage.assert_answered(rid)
