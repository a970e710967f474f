"""What an operator sees of verification: damage that outlives workers, audits, flagged streams; in metrics and log."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router import fake_worker
from tests.router.fake_worker import FakeCluster
from tests.router.http_server import Server, serving
from tests.router.stage import Stage
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.router_commands import Audit, Cancel, Command, InvalidatePrefix
from twinpool.contracts.messages.worker_events import Audited, AuditEnd, Event
from twinpool.contracts.messages.worker_status import DamageTotals, WorkerStatus
from twinpool.contracts.sampling_params import SamplingParams, TokenDifference
from twinpool.contracts.wire.message_codec import FrameWriter, decode_commands, decode_events, encode_events
from twinpool.router.verification.audits import PREFIX


def status(name: str, incarnation: int, **counters: float) -> WorkerStatus:
    role = Role(name.partition("-")[0])
    return WorkerStatus(WorkerName(name), role, "ready", 1, "", Incarnation(incarnation), 0, 0, 1, 1, counters=counters)


def samples(damage: DamageTotals) -> dict[tuple[str, str, str], float]:
    return {(s.worker, s.role, s.where): s.count for s in damage.samples()}


def metric(server: Server, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name))


# ---------------------------------------------------------------- damage


def test_damage_that_a_worker_counted_stays_when_it_is_started_again_or_gone() -> None:
    damage = DamageTotals()
    damage.on_statuses([status("decode-0", 1, pages_damaged=3.0, stale_pages=1.0, pages_loaded=9.0)])
    damage.on_statuses([status("decode-0", 2, pages_damaged=0.0)])
    damage.on_statuses([status("decode-0", 2, pages_damaged=2.0), status("prefill-0", 1, damage_restore=4.0)])
    assert samples(damage) == {
        ("decode-0", "decode", "handover"): 5.0,
        ("decode-0", "decode", "step"): 1.0,
        ("prefill-0", "prefill", "restore"): 4.0,
    }


def test_late_words_of_an_older_incarnation_and_of_the_dead_take_nothing_back() -> None:
    damage = DamageTotals()
    damage.on_statuses([status("decode-0", 2, pages_damaged=2.0)])
    damage.on_statuses([status("decode-0", 1, pages_damaged=7.0), status("decode-0", 2)])
    assert samples(damage) == {("decode-0", "decode", "handover"): 2.0}
    damage.on_statuses([status("decode-0", 2, pages_damaged=2.0)])
    assert samples(damage) == {("decode-0", "decode", "handover"): 2.0}


def test_counters_of_one_place_add_up() -> None:
    damage = DamageTotals()
    damage.on_statuses([status("prefill-0", 1, stale_pages=1.0, damage_step=2.0)])
    assert samples(damage) == {("prefill-0", "prefill", "step"): 3.0}


def test_damage_that_a_worker_tells_with_its_answer_to_an_order_counts_though_no_table_tells_it() -> None:
    stage = Stage()
    entry = stage.core.workers.named("decode-0")
    assert entry is not None
    stage.core.on_status(replace(entry.status, state="draining", counters={"pages_damaged": 2.0}))
    stage.kill("decode-0")
    assert samples(stage.core.damage) == {("decode-0", "decode", "handover"): 2.0}


# ---------------------------------------------------------------- on the wire

AUDIT = Audit(
    RequestId("audit-1"), 3, (1, 2, 3, 2**31), 2, SamplingParams(5, seed=2**64 - 1, logit_bias=((1, -0.5),), top_k=-1)
)
COMMANDS: list[Command] = [AUDIT, InvalidatePrefix(RequestId("r"), (1, 2), "salt"), Cancel(RequestId("audit-1"), 3)]
EVENTS: list[Event] = [
    Audited(
        RequestId("audit-1"),
        3,
        AuditEnd.COMPUTED,
        9,
        2,
        (TokenDifference(4, 7, 0.25), TokenDifference(5, 0, 1e300)),
        False,
    ),
    Audited(RequestId("audit-1"), 0, AuditEnd.REFUSED, message="why"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_audits_come_over_the_wire_as_they_are(command: Command) -> None:
    assert [decode_commands(frame) for frame in FrameWriter().frames([command])] == [((command,), 0)]


@pytest.mark.parametrize("event", EVENTS)
def test_words_of_audits_come_over_the_wire_as_they_are(event: Event) -> None:
    assert decode_events(encode_events(Incarnation(1), [event]))[0].events == (event,)


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("audit", {"fraction": 1.5}, "audit.fraction is a share"),
        ("audit", {"fraction": -0.1}, "audit.fraction must be 0 or more"),
        ("audit", {"queue_answers": 0}, "audit.queue_answers must be above 0"),
        ("watch", {"window_tokens": 2000}, "at most 1024"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(key: str, value: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from_dict({key: value})


# ---------------------------------------------------------------- the service


def differing(audit: Audit) -> Audited:
    return Audited(audit.request_id, audit.attempt, AuditEnd.COMPUTED, 4, 1, (TokenDifference(4, 999, 1.5),))


def exact(audit: Audit) -> Audited:
    return Audited(audit.request_id, audit.attempt, AuditEnd.COMPUTED, 4)


@pytest.mark.slow
def test_a_damaged_answer_is_in_metrics_and_in_the_log_with_who_served_it(caplog: pytest.LogCaptureFixture) -> None:
    config = config_from_dict({"audit": {"fraction": 1.0}})
    with serving(FakeCluster(2, 1), config=config) as server, caplog.at_level(logging.INFO):
        for name in ("prefill-0", "prefill-1"):
            server.cluster[name].audited = differing
        server.complete(max_tokens=4)
        server.wait_until(lambda: bool(server.service.core.audits.counts.results))
        assert metric(server, 'twinpool_audit_answers_total{result="damaged"}') == 1
        assert metric(server, 'twinpool_audit_answers_total{result="exact"}') == 0
        assert metric(server, 'twinpool_state_damage_total{role="decode",where="audit",worker="decode-0"}') == 1
        assert metric(server, "twinpool_audit_damage_ratio") == 1
        assert metric(server, "twinpool_audit_tokens_total") == 4
        (line,) = [vars(r)["fields"] for r in caplog.records if r.getMessage() == "state damage"]
        assert line["where"] == "audit"
        assert line["differences"] == [(4, 999, 1.5)]
        assert line["workers"]["decode"] == "decode-0"
        assert (line["attempt"], line["role"], set(line["auditors"])) == (0, Role.DECODE, {"prefill-0", "prefill-1"})
        assert not line["request_id"].startswith(PREFIX)
        for name in ("prefill-0", "prefill-1"):
            server.cluster[name].audited = exact
        server.complete(max_tokens=4, n=2, temperature=0.8)
        server.wait_until(lambda: server.service.core.audits.counts.tokens == 12)
        assert metric(server, 'twinpool_audit_answers_total{result="exact"}') == 2
        server.at_rest()


@pytest.mark.slow
def test_a_stream_that_repeats_itself_is_flagged_and_audited_first(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_worker, "draw", lambda tokens, sampling: 400 if sampling.seed == 2 else 300 + len(tokens))
    config = config_from_dict({"audit": {"fraction": 1e-12}, "watch": {"repetition_tokens": 12}})
    with serving(FakeCluster(1, 1), config=config) as server, caplog.at_level(logging.INFO):
        server.complete(max_tokens=40)
        assert metric(server, 'twinpool_streams_flagged_total{reason="repetition"}') == 0
        server.complete(max_tokens=40, seed=2)
        assert metric(server, 'twinpool_streams_flagged_total{reason="repetition"}') == 1
        assert metric(server, "twinpool_streams_watched_total") == 2
        (line,) = [vars(r)["fields"] for r in caplog.records if r.getMessage() == "stream looks broken"]
        assert line["why"] == "repetition"
        assert line["workers"] == {"prefill": "prefill-0", "decode": "decode-0"}
        assert line["detail"]["period"] == 1
        server.wait_until(lambda: bool(server.cluster["prefill-0"].audits))
        (audit,) = server.cluster["prefill-0"].audits
        assert audit.tokens[-1] == 400
        assert not len(server.service.watch or ())
        server.at_rest()
