"""The alerts, run by promtool over series: each fires on what it is for, and on nothing that is as it should be."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.support.prometheus_server import DEPLOY, RULES, binary

FOLDER = DEPLOY / "prometheus"
WORKER = 'worker="decode-1",role="decode"'


@dataclass(frozen=True)
class Case:
    """Series that make an alert fire after `minutes`; `quiet` are the same metrics as they should be."""

    minutes: int
    fires: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    """Those of the firing alert, but for `job`, the alert's own, and `instance` where that is 127.0.0.1:9400."""


def of_router(name: str, labels: str = "") -> str:
    more = f",{labels}" if labels else ""
    return f'{name}{{job="twinpool",instance="127.0.0.1:9400"{more}}}'


DECODE_1 = {"worker": "decode-1", "role": "decode"}
ROUTER = {"instance": "127.0.0.1:9400"}
TTFT = "twinpool_time_to_first_token_seconds"


def times(late: int) -> dict[str, str]:
    """A hundred requests each 15 s, of which `late` are late."""
    return {
        of_router(f"{TTFT}_count"): "0+100x2000",
        of_router(f"{TTFT}_bucket", 'le="2.5"'): f"0+{100 - late}x2000",
        of_router("twinpool_requests_submitted_total"): "0+100x2000",
        of_router("twinpool_requests_failed_total"): "0x2000",
        of_router("twinpool_requests_refused_total", 'reason="queue_full"'): "0x2000",
    }


STATE = "twinpool_worker_state"
CASES = {
    "TwinpoolRouterDown": Case(2, {of_router("up"): "0x40"}, {of_router("up"): "1x40"}, ROUTER),
    "TwinpoolPoolDown": Case(
        2,
        {of_router("twinpool_workers_serving", 'role="decode"'): "0x40"},
        {of_router("twinpool_workers_serving", 'role="decode"'): "1x3 0 1x40"},  # one scrape in between is no outage
        {"role": "decode"},
    ),
    "TwinpoolStalled": Case(
        4, {of_router("twinpool_stalled_seconds"): "0+5x40"}, {of_router("twinpool_stalled_seconds"): "29x40"}, ROUTER
    ),
    "TwinpoolWorkerStalled": Case(
        2,
        {of_router("twinpool_worker_stalled_seconds", WORKER): "20x40"},
        {of_router("twinpool_worker_stalled_seconds", WORKER): "0x40"},
        DECODE_1,
    ),
    "TwinpoolWorkerLost": Case(
        4,
        {of_router(STATE, f'{WORKER},state="dead"'): "1x40"},
        {of_router(STATE, f'{WORKER},state="starting"'): "1x4 stale"},  # a start of a minute
        DECODE_1,
    ),
    "TwinpoolWorkerRestartsLooping": Case(
        10,
        {of_router("twinpool_worker_starts_total", WORKER): "1x8 2x8 3x8 4x20"},
        {of_router("twinpool_worker_starts_total", WORKER): "1x8 2x30"},
        DECODE_1,
    ),
    "TwinpoolCircuitBreakerOpen": Case(
        3,
        {of_router("twinpool_breaker_state", WORKER): "2x40"},
        {of_router("twinpool_breaker_state", WORKER): "0 2 1 0x40"},
        DECODE_1,
    ),
    "TwinpoolNoController": Case(
        2, {of_router("twinpool_controller_up"): "0x40"}, {of_router("twinpool_controller_up"): "1 0 1x40"}
    ),
    "TwinpoolRouterWithoutController": Case(
        4,
        {
            of_router("twinpool_controller_up"): "0x40",
            'twinpool_controller_up{job="twinpool",instance="127.0.0.1:9401"}': "1x40",
        },
        {of_router("twinpool_controller_up"): "1x40"},
        ROUTER,
    ),
    "TwinpoolNoStandbyController": Case(
        15,
        {of_router("twinpool_controller_standbys"): "0x80"},
        {of_router("twinpool_controller_standbys"): "1x80"},
    ),
    "TwinpoolQueueNearlyFull": Case(
        3,
        {of_router("twinpool_requests_in_flight"): "95x40", of_router("twinpool_requests_limit"): "100x40"},
        {of_router("twinpool_requests_in_flight"): "80x40", of_router("twinpool_requests_limit"): "100x40"},
        ROUTER,
    ),
    "TwinpoolQueueFull": Case(
        4,
        {of_router("twinpool_requests_refused_total", 'reason="queue_full"'): "0x4 3x40"},
        {of_router("twinpool_requests_refused_total", 'reason="late"'): "0x4 3x40"},
        ROUTER,
    ),
    "TwinpoolKvPressure": Case(
        10,
        {of_router("twinpool_kv_usage_ratio", f'{WORKER},tier="device"'): "0.97x60"},
        {
            of_router("twinpool_kv_usage_ratio", f'{WORKER},tier="host"'): "1x60",
            of_router("twinpool_kv_usage_ratio", 'worker="prefill-0",role="prefill",tier="device"'): "1x60",
        },
        DECODE_1,
    ),
    "TwinpoolSloFastBurn": Case(70, times(late=20), times(late=1)),
    "TwinpoolSloSlowBurn": Case(370, times(late=10), times(late=1)),
    "TwinpoolStateDamage": Case(
        5,
        {of_router("twinpool_state_damage_total", f'{WORKER},where="load"'): "0x8 1x40"},
        {of_router("twinpool_state_damage_total", f'{WORKER},where="load"'): "7x48"},
        {**DECODE_1, "where": "load"},
    ),
    "TwinpoolAuditDiffers": Case(
        5,
        {of_router("twinpool_audit_answers_total", 'result="damaged"'): "0x8 1x40"},
        {of_router("twinpool_audit_answers_total", 'result="exact"'): "0+1x40"},
        {"result": "damaged"},
    ),
    "TwinpoolDrainDoesNotEnd": Case(
        40,
        {of_router(STATE, f'{WORKER},state="draining"'): "1x200"},
        {of_router(STATE, f'{WORKER},state="draining"'): "1x80 stale"},
        DECODE_1,
    ),
    "TwinpoolKvIndexDown": Case(
        8, {of_router("twinpool_kv_index_up"): "0x60"}, {of_router("twinpool_kv_index_up"): "1x60"}, ROUTER
    ),
    "TwinpoolMixedBuilds": Case(
        70,
        {
            of_router("twinpool_build_info", 'build="a"'): "1x400",
            'twinpool_build_info{job="twinpool",instance="127.0.0.1:9401",build="b"}': "1x400",
        },
        {of_router("twinpool_build_info", 'build="a"'): "1x400"},
    ),
    "TwinpoolRoutersBehindOneTarget": Case(
        8,
        {of_router("process_start_time_seconds"): "100 200 100 200 100 200 100 200 100x40"},
        {of_router("process_start_time_seconds"): "100x4 200x40"},
        ROUTER,
    ),
}


def rules() -> dict[str, dict[str, object]]:
    groups = yaml.safe_load((FOLDER / RULES[1]).read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_every_alert_says_what_it_is_and_what_to_do_and_has_a_case() -> None:
    assert rules().keys() == CASES.keys()
    for name, rule in rules().items():
        annotations, labels = rule["annotations"], rule["labels"]
        assert isinstance(annotations, dict)
        assert isinstance(labels, dict)
        assert annotations.keys() == {"summary", "description"}, name
        assert len(annotations["description"]) > 40, name
        assert labels["severity"] in {"critical", "warning", "info"}, name


def run(*arguments: str, cwd: Path) -> None:
    command = [binary("promtool"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_is_one_that_prometheus_takes() -> None:
    run("check", "config", "prometheus.yml", cwd=FOLDER)
    assert yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"] == list(RULES)


def test_each_alert_fires_on_its_series_and_not_on_what_is_as_it_should_be(tmp_path: Path) -> None:
    tests = []
    for name, case in CASES.items():
        annotated = {"alertname": name, "eval_time": f"{case.minutes}m"}
        labels = {"severity": str(rules()[name]["labels"]["severity"]), "job": "twinpool", **case.labels}  # type: ignore[index]
        for series, fires in ((case.fires, True), (case.quiet, False)):
            expected = [{"exp_labels": labels}] if fires else []
            tests.append(
                {
                    "interval": "15s",
                    "input_series": [{"series": s, "values": v} for s, v in series.items()],
                    "alert_rule_test": [{**annotated, "exp_alerts": expected}],
                }
            )
    # What annotations say isn't compared: only that they can be made from what fires.
    bare = yaml.safe_load((FOLDER / RULES[1]).read_text())
    for group in bare["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(bare))
    (tmp_path / "rules.yml").write_text((FOLDER / RULES[0]).read_text())
    book = {"rule_files": ["rules.yml", "alerts.yml"], "evaluation_interval": "30s", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(book))
    run("test", "rules", "test.yml", cwd=tmp_path)


@pytest.mark.slow
def test_the_share_of_missed_requests_is_of_all_that_asked_and_counts_those_that_were_refused(tmp_path: Path) -> None:
    """Of 125 that ask, each minute, 25 are refused; of the others 5 fail and 20 are late."""
    series = times(late=20) | {
        of_router("twinpool_requests_failed_total"): "0+5x2000",
        of_router("twinpool_requests_refused_total", 'reason="queue_full"'): "0+10x2000",
        of_router("twinpool_requests_refused_total", 'reason="late"'): "0+15x2000",
        of_router("twinpool_requests_submitted_total", 'other="router"'): "0x2000",
    }
    labels = '{job="twinpool"}'
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": s, "values": v} for s, v in given.items()],
            "promql_expr_test": [
                {
                    "expr": f"round(twinpool:requests_missed:ratio{span}, 0.001)",
                    "eval_time": "364m",
                    "exp_samples": [{"labels": labels, "value": 0.4}] if asked else [],
                }
                for span in ("5m", "1h", "6h")
            ],
        }
        for given, asked in ((series, True), (dict.fromkeys(series, "0x2000"), False))
    ]
    (tmp_path / "rules.yml").write_text((FOLDER / RULES[0]).read_text())
    book = {"rule_files": ["rules.yml"], "evaluation_interval": "4m", "tests": tests}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(book))
    run("test", "rules", "test.yml", cwd=tmp_path)


@pytest.mark.parametrize("name", RULES)
def test_rules_name_only_metrics_that_a_router_has(name: str) -> None:
    page = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    for group in yaml.safe_load((FOLDER / name).read_text())["groups"]:
        for rule in group["rules"]:
            for word in rule["expr"].replace("(", " ").replace("{", " ").replace(")", " ").replace("[", " ").split():
                if word.startswith("twinpool_"):
                    known = word.removesuffix("_count").removesuffix("_bucket")
                    assert f"`{known}`" in page, f"{rule.get('alert')}: {word}"
