"""Prometheus metrics of verification: damage by place, audits, and streams that look broken."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.damage import DamageSite
from twinpool.router.verification.audit_cases import AuditResult
from twinpool.router.verification.audits import Audits
from twinpool.router.verification.damage_totals import DamageTotals
from twinpool.router.verification.stream_watch import FlagReason, StreamWatch


def verification_metrics(damage: DamageTotals, audits: Audits, watch: StreamWatch | None) -> Iterator[Metric]:
    """Yield all families; audit results and reasons of flags that never occurred are there as 0."""
    found = CounterMetricFamily(
        "twinpool_state_damage",
        "State that a check found not to be what it should be; dropped and computed again (an audit's was served)",
        labels=["worker", "role", "where"],
    )
    for sample in damage.samples():
        found.add_metric([sample.worker, sample.role, sample.where], sample.count)
    for (worker, role), count in sorted(audits.counts.damage.items()):
        found.add_metric([worker, role, DamageSite.AUDIT], count)
    yield found
    yield from _of_audits(audits)
    if watch is not None:
        yield from _of_streams(watch)


def _of_audits(audits: Audits) -> Iterator[Metric]:
    counts = audits.counts
    answers = CounterMetricFamily(
        "twinpool_audit_answers", "Answers chosen for an audit, by what became of them", labels=["result"]
    )
    for result in AuditResult:
        answers.add_metric([result], counts.results[result])
    yield answers
    yield CounterMetricFamily("twinpool_audit_tokens", "Tokens of answers drawn again by audits", value=counts.tokens)
    yield CounterMetricFamily(
        "twinpool_audit_damaged_tokens", "Tokens of damaged answers that came out otherwise", value=counts.differing
    )
    yield GaugeMetricFamily(
        "twinpool_audit_damage_ratio",
        "Damaged answers among those with a clear result, since the start",
        value=counts.damage_rate,
    )
    yield GaugeMetricFamily("twinpool_audits_waiting", "Answers that wait for an idle worker", value=audits.queued)


def _of_streams(watch: StreamWatch) -> Iterator[Metric]:
    flagged = CounterMetricFamily("twinpool_streams_flagged", "Streams that look broken, by why", labels=["reason"])
    for why in FlagReason:
        flagged.add_metric([why], watch.flagged[why])
    yield flagged
    yield CounterMetricFamily("twinpool_streams_watched", "Streams watched to their end", value=watch.ended)
    text = "Share of rare tokens in what the model says lately"
    yield GaugeMetricFamily("twinpool_rare_token_ratio", text, value=watch.rare_rate)
