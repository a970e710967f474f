"""The simulated cluster on the dashboard: what it shows is what its models do."""

from __future__ import annotations

import json

import pytest

from docs import simulated_dashboard
from docs.simulated_dashboard import SimulatedCluster, SimulatedDashboard
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.messages.router_report import percentile

PAST_S = 180.0


def test_its_past_is_a_load_that_models_have_served_and_its_frames_go_on_with_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulated_dashboard, "PAST_S", PAST_S)
    monkeypatch.setattr(simulated_dashboard, "DRAINS_AT_S", PAST_S - 1)
    cluster, clock = SimulatedCluster(3, 2, wall=1e9), ManualClock(500.0)
    dashboard = SimulatedDashboard(cluster, clock)
    frames = dashboard._feed.frames
    frame, figures = frames.frame(), cluster.model.figures
    assert [row["name"] for row in frame["workers"]][-2:] == ["decode-0", "decode-1"]
    assert frame["workers"][-1]["state"] == "draining"
    assert "an operator drains decode-1" in [event["text"] for event in frame["events"]]
    assert any(event["text"].startswith("prefill 2 -> 3") for event in frames.past()["events"])
    assert frame["totals"]["requests_submitted"] == figures.sent
    assert frame["totals"]["prompt_tokens_cached"] == figures.held_tokens
    assert frame["totals"]["generated_tokens"] >= figures.answer_tokens
    history = frames.past()["history"]
    assert sum(history["requests_s"]) * 5 == pytest.approx(figures.sent, rel=0.05)
    assert len(history["at"]) == pytest.approx(PAST_S / 5, abs=2)
    for row in frame["requests"]:
        shown = sum(span["end_s"] - span["start_s"] for span in row["spans"] if not span["hidden"])
        assert shown == pytest.approx(row["total_s"], rel=1e-3)
        assert row["first_token_s"] <= row["total_s"]
    assert len(frame["requests"]) > 5
    assert frame["links"]
    clock.advance(7.0)
    dashboard._go_on(PAST_S + 7.0)
    assert frames.frame()["at"] == pytest.approx(1e9 + PAST_S + 7.0, abs=0.5)
    assert json.loads(dashboard._feed.past())["history"]["at"][-1] > history["at"][-1]
    assert cluster.model.check() == []
    cluster.model.close()


def test_gaps_of_the_models_are_those_of_the_shape_that_routers_report() -> None:
    cluster = SimulatedCluster(2, 2, grows=False)
    cluster.run(60.0)
    reports = cluster.reports()
    gaps = [sum(counts) for counts in zip(*(report.gaps for report in reports), strict=True)]
    total = cluster.model.figures.gaps.total
    assert sum(gaps) == pytest.approx(total, abs=len(gaps) * len(reports))
    for share in (0.5, 0.99):
        told = percentile(gaps, share)
        assert told == pytest.approx(cluster.model.figures.gaps.quantile(share), rel=0.2)
    assert sum(report.in_flight for report in reports) > 0
    cluster.model.close()
