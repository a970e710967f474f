"""Prints deploy/grafana/dashboards/twinpool.json, Grafana's dashboard of a Twinpool; that file is its output.

What every router tells of workers and controllers is counted once (`max by`); what each counts of its own requests adds
up over the routers that are chosen.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

JOB = 'job=~"$job"'
OWN = f'{JOB}, instance=~"$router"'
RATE = "[$__rate_interval]"
WIDTH, HEIGHT = 8, 7


class Panel(NamedTuple):
    """A graph: its title, its queries with their legends, its unit, and what it is for."""

    title: str
    queries: dict[str, str]
    """Queries by legend, in which {{label}} stands for a label's value."""
    unit: str = "short"
    text: str = ""


def own(metric: str, labels: str = "") -> str:
    """A metric that each router counts of its own requests."""
    return f"{metric}{{{OWN}{', ' + labels if labels else ''}}}"


def told(metric: str, labels: str = "") -> str:
    """A metric that every router tells."""
    return f"{metric}{{{JOB}{', ' + labels if labels else ''}}}"


def per_second(metric: str, labels: str = "", by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({own(metric, labels)}{RATE}))"


def of_workers(metric: str, by: str = "", *, over: str = "", rate: bool = False) -> str:
    """The sum by `by` over all workers, each once. `over`: a label of its samples that is summed over, too."""
    value = f"rate({told(metric)}{RATE})" if rate else told(metric)
    every = ", ".join(filter(None, dict.fromkeys(["worker", "role", *by.split(", "), over])))
    return f"sum{f' by ({by})' if by else ''} (max by ({every}) ({value}))"


def of_links(what: str) -> str:
    """What a second adds to a counter of each link."""
    return f"max by (worker, to) (rate({told(f'twinpool_link_{what}_total')}{RATE}))"


def quantiles(metric: str) -> dict[str, str]:
    return {
        f"p{100 * q:g}": f"histogram_quantile({q}, sum by (le) (rate({own(metric + '_bucket')}{RATE})))"
        for q in (0.5, 0.95, 0.99)
    }


TTFT, ITL = "twinpool_time_to_first_token_seconds", "twinpool_inter_token_latency_seconds"
TPOT = "twinpool_time_per_output_token_seconds"
ROWS: dict[str, list[Panel]] = {
    "Is it well?": [
        Panel(
            "Workers that take requests",
            {"{{role}}": f"max by (role) ({told('twinpool_workers_serving')})"},
            text="0 of a role: nothing is answered.",
        ),
        Panel(
            "Requests in flight, of those that may be",
            {"{{instance}}": f"{own('twinpool_requests_in_flight')} / {own('twinpool_requests_limit')}"},
            "percentunit",
            "At 1 clients get 429.",
        ),
        Panel(
            "Missed: late, refused or failed",
            {
                "5 minutes": f"twinpool:requests_missed:ratio5m{{{JOB}}}",
                "1 hour": f"twinpool:requests_missed:ratio1h{{{JOB}}}",
            },
            "percentunit",
            "By the objective of deploy/prometheus/twinpool-rules.yml.",
        ),
        Panel(
            "Work that doesn't advance",
            {
                "{{instance}}": own("twinpool_stalled_seconds"),
                "{{worker}}": f"max by (worker) ({told('twinpool_worker_stalled_seconds')})",
            },
            "s",
        ),
        Panel(
            "Workers by state",
            {"{{role}} {{state}}": f"max by (role, state) ({told('twinpool_workers')})"},
        ),
        Panel(
            "Controllers",
            {
                "reached": f"max ({told('twinpool_controller_up')})",
                "standbys": f"max ({told('twinpool_controller_standbys')})",
                "terms": f"max ({told('twinpool_controller_terms_total')})",
            },
        ),
    ],
    "Requests": [
        Panel(
            "Requests per second",
            {
                "submitted": per_second("twinpool_requests_submitted_total"),
                "{{finish_reason}}": per_second("twinpool_answers_total", by="finish_reason"),
                "cancelled": per_second("twinpool_requests_cancelled_total"),
                "refused: {{reason}}": per_second("twinpool_requests_refused_total", by="reason"),
                "shed": per_second("twinpool_requests_shed_total"),
            },
            "reqps",
        ),
        Panel("Time to first token", quantiles(TTFT), "s"),
        Panel("Time per output token (of an answer)", quantiles(TPOT), "s"),
        Panel("Inter-token latency (between two deliveries)", quantiles(ITL), "s"),
        Panel("Before a worker begins the prompt", quantiles("twinpool_request_queue_seconds"), "s"),
        Panel("From the prompt's begin to the first token", quantiles("twinpool_request_prefill_seconds"), "s"),
        Panel("Whole request", quantiles("twinpool_request_duration_seconds"), "s"),
        Panel(
            "Tokens per second",
            {
                "prompts": per_second("twinpool_prompt_tokens_total"),
                "prompts, from caches": per_second("twinpool_prompt_tokens_cached_total"),
                "answers": per_second("twinpool_generated_tokens_total"),
            },
        ),
        Panel(
            "Tokens of a request, mean",
            {
                word: f"{per_second(f'{metric}_sum')} / {per_second(f'{metric}_count')}"
                for word, metric in (
                    ("prompt", "twinpool_request_prompt_tokens"),
                    ("answer", "twinpool_request_generated_tokens"),
                )
            },
        ),
        Panel(
            "Tenants: requests per second",
            {
                "{{tenant}}": per_second("twinpool_tenant_requests_total", by="tenant"),
                "{{tenant}} refused": per_second("twinpool_tenant_refused_total", by="tenant"),
            },
            "reqps",
        ),
    ],
    "Workers": [
        Panel(
            "Requests that run and wait",
            {"{{role}} {{state}}": of_workers("twinpool_worker_requests", "role, state")},
            text="Each is on a prefill and on a decode worker at once, until its prompt is computed.",
        ),
        Panel(
            "Prompt tokens still to compute",
            {"{{worker}}": f"max by (worker) ({told('twinpool_worker_pending_prompt_tokens')})"},
        ),
        Panel(
            "Placements per second",
            {"{{worker}}": per_second("twinpool_placements_total", by="worker")},
            "reqps",
        ),
        Panel(
            "Starts",
            {"{{worker}}": f"max by (worker) ({told('twinpool_worker_starts_total')})"},
            text="Steps up are restarts.",
        ),
        Panel(
            "Steps per second",
            {"{{worker}}": of_workers("twinpool_worker_steps_total", "worker", rate=True)},
        ),
        Panel(
            "Circuit breakers: 1 half-open, 2 open",
            {"{{worker}}": f"max by (worker) ({told('twinpool_breaker_state')})"},
        ),
        Panel(
            "Autoscaler",
            {
                "{{role}} wanted": f"max by (role) ({told('twinpool_autoscaler_workers')})",
                "{{role}} needed": f"max by (role) ({told('twinpool_autoscaler_need')})",
            },
        ),
        Panel(
            "Drafts: tokens per second",
            {
                "drafted": of_workers("twinpool_draft_tokens_total", rate=True),
                "drawn": of_workers("twinpool_draft_tokens_accepted_total", rate=True),
            },
        ),
    ],
    "The KV cache": [
        Panel(
            "Pages in use",
            {"{{worker}} {{tier}}": f"max by (worker, tier) ({told('twinpool_kv_usage_ratio')})"},
            "percentunit",
        ),
        Panel(
            "Prompt tokens found per second",
            {"{{role}} {{tier}}": of_workers("twinpool_cache_hit_tokens_total", "role, tier", rate=True)},
        ),
        Panel(
            "Pages moved per second",
            {"{{tier}} {{what}}": of_workers("twinpool_cache_moved_pages_total", "tier, what", rate=True)},
        ),
        Panel(
            "Requests off decode's device",
            {"{{worker}}": f"max by (worker) ({told('twinpool_requests_retracted')})"},
        ),
        Panel(
            "Retractions and preemptions per second",
            {
                "retracted": of_workers("twinpool_retractions_total", "role", rate=True),
                "{{outcome}}": of_workers("twinpool_retractions_ended_total", "outcome", rate=True),
                "preempted": of_workers("twinpool_preemptions_total", "role", rate=True),
            },
        ),
        Panel(
            "KV index",
            {
                "workers known": f"max ({told('twinpool_kv_index_workers')})",
                "believed by {{instance}}": own("twinpool_kv_index_up"),
            },
        ),
    ],
    "From worker to worker": [
        Panel(
            "Bytes per second",
            {"{{worker}}": of_workers("twinpool_link_bytes_total", "worker", over="to", rate=True)},
            "Bps",
        ),
        Panel(
            "Latency of a write, mean",
            {"{{worker}} to {{to}}": f"{of_links('waited_seconds')} / {of_links('writes')}"},
            "s",
        ),
        Panel(
            "Migrations per second",
            {"{{outcome}}": per_second("twinpool_migrations_total", by="outcome")},
        ),
    ],
    "What went wrong": [
        Panel(
            "Damage found per second",
            {"{{worker}} {{where}}": of_workers("twinpool_state_damage_total", "worker, where", rate=True)},
        ),
        Panel(
            "Audited answers per second",
            {"{{result}}": per_second("twinpool_audit_answers_total", by="result")},
            text="Any that is damaged or disputed: an answer went out wrong.",
        ),
        Panel(
            "Attempts begun anew per second",
            {
                "replays": per_second("twinpool_replays_total"),
                "refused by draining workers": per_second("twinpool_drain_refusals_total"),
                "without memory on decode": per_second("twinpool_attempts_recomputed_total"),
            },
        ),
    ],
    "Routers": [
        Panel("Memory", {"{{instance}}": own("process_resident_memory_bytes")}, "bytes"),
        Panel("Processor", {"{{instance}}": f"rate({own('process_cpu_seconds_total')}{RATE})"}, "percentunit"),
        Panel(
            "Connections, bodies that wait",
            {
                "{{instance}} {{state}}": own("twinpool_http_connections"),
                "{{instance}} bodies": own("twinpool_bodies_waiting"),
            },
        ),
    ],
}


def graph(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"datasource": SOURCE, "expr": query, "legendFormat": legend, "refId": chr(ord("A") + i)}
        for i, (legend, query) in enumerate(panel.queries.items())
    ]
    custom = {"fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": targets,
    }


SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        y += 1
        for i, panel in enumerate(row):
            panels.append(graph(panel, len(panels) + 1, i % 3 * WIDTH, y + i // 3 * HEIGHT))
        y += -(-len(row) // 3) * HEIGHT
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "uid": "twinpool",
        "title": "Twinpool",
        "tags": ["twinpool", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {
            "list": [
                source,
                variable("job", "Cluster", "label_values(twinpool_build_info, job)"),
                variable("router", "Router", f"label_values(twinpool_build_info{{{JOB}}}, instance)"),
            ]
        },
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
