"""Prints docs/metrics.md from the families of a router that has everything switched on; `docs/metrics.md` is its
output."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
from prometheus_client.core import Metric

from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.messages.cluster_view import ControlPlane
from twinpool.router.api.http_protocol import ClientConnections
from twinpool.router.batch.batch_runner import BatchRunner
from twinpool.router.endpoint_picker.endpoint_picker import PickTally
from twinpool.router.links.controller_port import ControllerPorts
from twinpool.router.metrics.worker_metrics import index_metrics
from twinpool.router.service.router_service import RouterService
from twinpool.router.tracing.otlp_exporter import TraceExporter

DEMO = Path(__file__).parents[1] / "cluster" / "demo"
EVERYTHING = {"watch": {"repetition_tokens": 64}, "autoscaling": {"enabled": True}}
UNITS = {
    "_seconds": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_pages": "pages",
    "_ratio": "0 to 1",
    "_perc": "0 to 1",
}

SECTIONS = {
    "The router": (
        "build_info",
        "stalled_seconds",
        "controller_",
        "weights_",
        "cluster_",
        "kv_index_",
        "http_",
        "body_",
        "bodies_",
        "reader_",
        "image_",
    ),
    "Requests": (
        "requests_in",
        "requests_wait",
        "requests_",
        "ignored_",
        "answers",
        "client_",
        "slow_",
        "tenant_",
        "wake",
    ),
    "Batches": ("batch",),
    "Records and traces": ("request_records", "record", "traces"),
    "Times and lengths": ("time_to", "time_per", "inter_token", "request_", "first_tokens", "gaps"),
    "Tokens": ("prompt_tokens", "generated_tokens", "draft_"),
    "Workers": ("workers", "worker_", "breaker_", "placements", "preemptions", "images", "autoscaler_"),
    "The KV cache": ("kv_", "cache_", "retract"),
    "From worker to worker": ("transfer_", "link_", "migrat", "offered_"),
    "What went wrong, and was mended": (
        "replays",
        "attempts_",
        "drain_",
        "handovers_",
        "fallbacks",
        "late_events",
        "local_",
        "state_damage",
        "audit",
        "streams_",
        "rare_",
    ),
    "The endpoint picker": ("picker_",),
    "Under vLLM's names": ("vllm:",),
}
"""Headings, each with how the names begin that are under it and under none before."""


class Note(NamedTuple):
    """What the page says of a family beside its text."""

    of: str
    """``router``: each router counts its own part. ``cluster``: every router tells the same. ``picker``: an endpoint
    picker tells it, and no router."""
    advice: str
    """What to do when it is high, or grows."""


R, C, P = "router", "cluster", "picker"
NOTES = {
    "twinpool_build_info": Note(R, "two builds for long: `twinpool upgrade` has not ended"),
    "twinpool_stalled_seconds": Note(
        R, "above 30 `/health` fails: `twinpool status`, then restart the worker whose `worker_stalled_seconds` grows"
    ),
    "twinpool_weights_info": Note(C, ""),
    "twinpool_weights_changes": Note(C, ""),
    "twinpool_weights_behind": Note(C, "above 0 for long: `twinpool weights status` says which; see their logs"),
    "twinpool_cluster_paused": Note(C, "1 for long: `twinpool resume`, or requests meet their deadlines"),
    "twinpool_cluster_asleep": Note(C, "above 0 while it should serve: `twinpool wake`"),
    "twinpool_controller_up": Note(
        R, "0: routers go on with what they know, and no worker is started again: see `controller.log`"
    ),
    "twinpool_controller_info": Note(C, ""),
    "twinpool_controller_terms": Note(
        C, "grows often: leaders lose their lease; look at the ledger's server and its network"
    ),
    "twinpool_controller_standbys": Note(
        C, "0 where there should be one: start it, the next loss of a leader stops all changes"
    ),
    "twinpool_kv_index_up": Note(R, "0: prompts go by what this router has sent; see `kv-index.log`"),
    "twinpool_kv_index_workers": Note(
        R, "fewer than workers for long: events of some don't arrive; see `kv-index.log`"
    ),
    "twinpool_kv_index_entries": Note(R, ""),
    "twinpool_kv_index_evicted": Note(R, "grows fast: raise `router.kv_index_bytes`"),
    "twinpool_kv_index_crowded": Note(
        R, "grows: prompts are held by too many different sets of workers; harmless but for hits"
    ),
    "twinpool_http_connections": Note(
        R, "busy near `router.max_connections`: more routers, or raise it and `ulimit -n`"
    ),
    "twinpool_http_connections_closed": Note(
        R, "`refused` grows: more clients than places; `late`: clients that don't send"
    ),
    "twinpool_body_buffer_bytes": Note(
        R, "near `router.body_buffer_bytes`: bodies get 503; raise it, or look who sends them slowly"
    ),
    "twinpool_reader_processes": Note(R, ""),
    "twinpool_bodies_waiting": Note(R, "above 0 for long: raise `router.reader_processes`, or more routers"),
    "twinpool_batch_lines": Note(R, "`failed` grows: the error file of the batch says why"),
    "twinpool_batch_lines_running": Note(R, "0 while a batch is in progress: no decode worker is idle"),
    "twinpool_batches": Note(R, "in progress for long: more workers, or a larger `decode.background_rows`"),
    "twinpool_batches_without_disk": Note(
        R, "above 0: make room below `batch.folder`, or raise `batch.tenant_bytes` or `batch.disk_bytes`"
    ),
    "twinpool_requests_in_flight": Note(
        R, "near `requests_limit`: clients get 429 next: more workers, or a smaller share for somebody"
    ),
    "twinpool_requests_waiting": Note(R, "above 0: no worker of a role can take them: `twinpool status`"),
    "twinpool_requests_limit": Note(R, ""),
    "twinpool_requests_submitted": Note(R, ""),
    "twinpool_requests_ended": Note(R, ""),
    "twinpool_requests_failed": Note(R, "any growth: `request failed` in the router's log says why"),
    "twinpool_requests_cancelled": Note(R, "grows with `client_disconnects`: clients lose patience; look at the times"),
    "twinpool_requests_detached": Note(R, ""),
    "twinpool_requests_adopted": Note(R, "grows: routers end, or clients come back to others"),
    "twinpool_ignored_fields": Note(
        R, "`unknown` grows: clients send what nobody here knows; the header `X-Twinpool-Ignored` names it to them"
    ),
    "twinpool_requests_refused": Note(
        R, "`queue_full`: more workers; `late`: the same, or a longer `router.ttft_slo_ms`"
    ),
    "twinpool_requests_refused_falsely": Note(
        R, "a large part of `late`: predictions are off, the load changes faster than they learn"
    ),
    "twinpool_wake_waiting": Note(R, "near `router.wake_queue`: further requests get 503 until the cluster serves"),
    "twinpool_wakes": Note(R, "often: a longer `cluster.sleep_after_s`"),
    "twinpool_wake_seconds": Note(R, "long: `cluster.sleep_level=1` keeps processes and weights"),
    "twinpool_requests_shed": Note(R, "grows: more prefill workers, or refuse more by `router.max_queue`"),
    "twinpool_answers": Note(
        R, "`error` grows: as `requests_failed`; `length` beyond the usual: a model that doesn't end"
    ),
    "twinpool_client_disconnects": Note(R, "grows: clients' timeouts are shorter than answers take"),
    "twinpool_slow_clients": Note(R, "grows: clients or a proxy that read too slowly; `router.client_buffer_events`"),
    "twinpool_tenant_in_flight": Note(R, "at the tenant's limit: its requests are refused"),
    "twinpool_tenant_requests": Note(R, ""),
    "twinpool_tenant_refused": Note(R, "grows: the tenant asks for more than its limits; raise them, or talk to it"),
    "twinpool_tenant_tokens": Note(R, ""),
    "twinpool_time_to_first_token_seconds": Note(
        R, "compare with queue and prefill: queue high needs prefill workers, prefill high shorter prompts or more hits"
    ),
    "twinpool_time_per_output_token_seconds": Note(
        R, "TPOT, what a reader feels: too many sequences a decode worker: more decode workers; or long steps"
    ),
    "twinpool_inter_token_latency_seconds": Note(
        R, "a high p99 beside a usual TPOT: streams pause. A low median may be drafts, which come several at once"
    ),
    "twinpool_request_duration_seconds": Note(R, "with long answers only: look at `request_generated_tokens`"),
    "twinpool_request_queue_seconds": Note(R, "prompts wait: more prefill workers"),
    "twinpool_request_prefill_seconds": Note(R, "long prompts or few hits: look at `cache_hit_tokens`"),
    "twinpool_request_decode_seconds": Note(R, "as the time between tokens"),
    "twinpool_request_prompt_tokens": Note(R, ""),
    "twinpool_request_generated_tokens": Note(R, ""),
    "twinpool_first_tokens_judged": Note(R, ""),
    "twinpool_first_tokens_late": Note(R, "grows: the prefill pool is at its `most`, or workers can't be placed"),
    "twinpool_gaps_judged": Note(R, ""),
    "twinpool_gaps_late": Note(R, "grows: the decode pool is at its `most`, or workers can't be placed"),
    "twinpool_request_records": Note(R, "`left_out` grows: `router.reported_records` is less than what ends meanwhile"),
    "twinpool_record_asks_unanswered": Note(R, "grows: this router doesn't reach the controller: as `controller_up`"),
    "twinpool_records_kept": Note(R, ""),
    "twinpool_traces": Note(R, "`failed` or `dropped` grows: the collector of traces doesn't answer, or is too slow"),
    "twinpool_traces_waiting": Note(R, "near its bound: as `traces`"),
    "twinpool_prompt_tokens": Note(R, ""),
    "twinpool_prompt_tokens_computed": Note(R, "on a decode worker above 0 only where it may compute prompts"),
    "twinpool_prompt_tokens_cached": Note(
        R, "low beside `prompt_tokens`: prompts have little in common, or are evicted: see `cache_moved_pages`"
    ),
    "twinpool_generated_tokens": Note(R, ""),
    "twinpool_draft_tokens": Note(
        C, "much above `draft_tokens_accepted`: drafts are often wrong, and still pay while `draft_gain` is above 1"
    ),
    "twinpool_draft_tokens_accepted": Note(C, "over `draft_rows`: the tokens that a step with drafts saved"),
    "twinpool_draft_rows": Note(C, ""),
    "twinpool_draft_place_tokens": Note(
        C, "those of a place seldom accepted: drafts so long cost more than they save: lower `decode.draft_tokens`"
    ),
    "twinpool_draft_place_tokens_accepted": Note(C, ""),
    "twinpool_draft_steps": Note(
        C, "nearly all `without`: `decode.speculation` and `engine.draft_model` bring nothing"
    ),
    "twinpool_draft_gain": Note(C, "1 for long: as `draft_steps`"),
    "twinpool_workers_serving": Note(R, "0: this router can answer nothing: `twinpool status`"),
    "twinpool_workers": Note(C, "`dead` or `starting` for long: `last_end` and `waits` of `twinpool status`"),
    "twinpool_worker_state": Note(C, "`draining` for long: `twinpool status` says what it still has"),
    "twinpool_worker_starts": Note(
        C, "grows again and again: the worker dies; `last_end` of `twinpool status`, and its log"
    ),
    "twinpool_worker_stalled_seconds": Note(C, "grows: the worker hangs; it is killed after `cluster.stall_s`"),
    "twinpool_worker_cpu_seconds": Note(
        C, "`rate()` of it is how many processors it keeps busy: at all that it may use, it is bound by them"
    ),
    "twinpool_worker_gpu_utilization": Note(
        C, "low while requests wait: the GPU waits for its host, or steps are small. None without NVML"
    ),
    "twinpool_worker_longest_step_seconds": Note(C, "above others of its role: its machine is slow or shared"),
    "twinpool_worker_requests": Note(
        C, "`waiting` on prefill: more prefill workers; on decode: short of pages or of hand-overs"
    ),
    "twinpool_worker_booked_requests": Note(R, ""),
    "twinpool_worker_pending_prompt_tokens": Note(
        C, "over the tokens a second of a worker, it is the wait of the next prompt"
    ),
    "twinpool_worker_outgoing_handovers": Note(
        C, "grows and doesn't fall: decode takes nothing: look at its pages and at the links"
    ),
    "twinpool_worker_steps": Note(C, "doesn't grow while it has requests: the worker is stuck"),
    "twinpool_worker_shared_steps": Note(
        C, "`none` is the larger part on one worker of a group: it has few requests and computes for the others"
    ),
    "twinpool_worker_shared_steps_idle_rows": Note(
        C, "fast on one worker: steps take as long as those of its group with more rows"
    ),
    "twinpool_images": Note(
        C, "`computed` grows fast: large images take long; lower `router.max_image_pixels`, or add workers"
    ),
    "twinpool_preemptions": Note(C, "grows: prompts beyond prefill's pages; more `cache.device_tokens`, or workers"),
    "twinpool_breaker_state": Note(
        R, "above 0: the worker, or the network to it, fails requests; its log, then restart or drain it"
    ),
    "twinpool_breaker_opened": Note(R, "grows: as above"),
    "twinpool_placements": Note(R, "uneven: sessions or prefixes that stick, or a worker that is left alone"),
    "twinpool_autoscaler_changes": Note(C, "`grown` and `shrunk` in turn: a longer `autoscaling.shrink_window_s`"),
    "twinpool_autoscaler_workers": Note(C, "above `workers` for long: no place for them"),
    "twinpool_autoscaler_need": Note(C, "above the pool's `most`: raise that, or expect late tokens"),
    "twinpool_autoscaler_held_seconds": Note(C, ""),
    "twinpool_kv_capacity_pages": Note(C, ""),
    "twinpool_kv_used_pages": Note(C, ""),
    "twinpool_kv_cached_pages": Note(C, ""),
    "twinpool_kv_usage_ratio": Note(
        C,
        "device near 1: requests are retracted next; more decode workers, or `cache.device_tokens`; "
        "host near 1 is as it should be",
    ),
    "twinpool_cache_hit_tokens": Note(C, "`device` falls, `host` grows: prefixes no longer fit on devices"),
    "twinpool_cache_moved_pages": Note(
        C,
        "`evicted` fast: the cache is too small for what is asked; `failed`: storage doesn't answer; "
        "`missed`: it is too slow",
    ),
    "twinpool_retractions": Note(
        C, "grows steadily: decode is short of pages: more workers, or a smaller `max_tokens`"
    ),
    "twinpool_retractions_ended": Note(C, "`recomputed` a large part: no room in host memory; raise the host budget"),
    "twinpool_retracted_bytes": Note(C, ""),
    "twinpool_requests_retracted": Note(C, "above 0 for long: those streams stand still: as `retractions`"),
    "twinpool_transfer_bytes": Note(R, ""),
    "twinpool_link_writes": Note(C, ""),
    "twinpool_link_bytes": Note(
        C, "over `link_busy_seconds` it is the bandwidth of a link: low on one link: its network"
    ),
    "twinpool_link_busy_seconds": Note(C, "a second a second: the link is full"),
    "twinpool_link_waited_seconds": Note(C, "over `link_writes` it is the latency of a write"),
    "twinpool_link_opened": Note(C, "beyond `transfer.connections`: connections break"),
    "twinpool_link_under_way": Note(C, "grows: the reader doesn't take them"),
    "twinpool_link_waiting": Note(C, "above 0 for long: raise `transfer.in_flight_bytes`, or the link is full"),
    "twinpool_link_in_flight_bytes": Note(C, ""),
    "twinpool_link_info": Note(C, ""),
    "twinpool_migrations": Note(
        R, "`stayed` or `restarted` a large part: targets have no room, or are of another class"
    ),
    "twinpool_migrated_bytes": Note(R, ""),
    "twinpool_offered_bytes": Note(R, ""),
    "twinpool_migration_pause_seconds": Note(R, "over `migrated` it is the mean pause of a stream"),
    "twinpool_migration_pause_longest_seconds": Note(R, "long contexts, or a slow network between decode workers"),
    "twinpool_replays": Note(R, "grows: workers die or fail: `worker_starts`, `breaker_opened`"),
    "twinpool_attempts_recomputed": Note(R, "grows: as `retractions`"),
    "twinpool_drain_refusals": Note(R, "grows only while something drains"),
    "twinpool_handovers_damaged": Note(R, "any growth: as `state_damage` with `handover`"),
    "twinpool_fallbacks": Note(R, "any growth: hand-overs lack state; a bug, please report it"),
    "twinpool_late_events": Note(R, "some after cancellations are usual"),
    "twinpool_local_prompts": Note(R, "`no_prefill` grows: the prefill pool is gone or can't take them"),
    "twinpool_state_damage": Note(
        C, "any growth: drain the worker and test its machine; `audit` (of each router) at once: an answer was wrong"
    ),
    "twinpool_audit_answers": Note(R, "`damaged` or `disputed`: at once; see [audits](operating/recover.md#audits)"),
    "twinpool_audit_tokens": Note(R, ""),
    "twinpool_audit_damaged_tokens": Note(R, "as `audit_answers`"),
    "twinpool_audit_damage_ratio": Note(R, "as `audit_answers`"),
    "twinpool_audits_waiting": Note(
        R, "at `audit.queue_answers`: no prefill worker is ever idle, and audits are left out"
    ),
    "twinpool_streams_flagged": Note(R, "grows: look at the flagged requests in the log; each is audited"),
    "twinpool_streams_watched": Note(R, ""),
    "twinpool_rare_token_ratio": Note(R, "jumps: another kind of text, or a model that garbles"),
    "vllm:num_requests_running": Note(C, "`worker_requests`, `running`"),
    "vllm:num_requests_waiting": Note(
        C, "`requests_waiting`, those that wait on prefill, and those that are off decode's device"
    ),
    "vllm:kv_cache_usage_perc": Note(C, "`kv_usage_ratio` of all who decode, on the device"),
    "vllm:prompt_tokens": Note(R, "`prompt_tokens`"),
    "vllm:generation_tokens": Note(R, "`generated_tokens`"),
    "vllm:num_preemptions": Note(C, "`preemptions` and `retractions` of all workers"),
    "vllm:prefix_cache_queries": Note(R, "tokens of prompts that prefill was given"),
    "vllm:prefix_cache_hits": Note(R, "those found on its device"),
    "vllm:external_prefix_cache_queries": Note(R, "those not found on its device"),
    "vllm:external_prefix_cache_hits": Note(R, "of these, those found in host memory and storage"),
    "vllm:request_success": Note(R, "`answers`, and `requests_cancelled` as `abort`"),
    "vllm:time_to_first_token_seconds": Note(R, "the same without `vllm:`"),
    "vllm:inter_token_latency_seconds": Note(R, "the same without `vllm:`"),
    "vllm:time_per_output_token_seconds": Note(R, "`inter_token_latency_seconds`, as vLLM called it before"),
    "vllm:request_time_per_output_token_seconds": Note(R, "`time_per_output_token_seconds`"),
    "vllm:e2e_request_latency_seconds": Note(R, "`request_duration_seconds`"),
    "vllm:request_queue_time_seconds": Note(R, "`request_queue_seconds`"),
    "vllm:request_prefill_time_seconds": Note(R, "`request_prefill_seconds`, the hand-over included"),
    "vllm:request_decode_time_seconds": Note(R, "`request_decode_seconds`"),
    "vllm:request_inference_time_seconds": Note(
        R, "`request_prefill_seconds` and `request_decode_seconds` of a request, added up"
    ),
    "twinpool_image_fetches": Note(
        R, "`late`: hosts are slow; `full`: too many at once, or of one host or tenant; `refused`: clients are told why"
    ),
    "twinpool_image_fetched_bytes": Note(R, ""),
    "twinpool_image_fetch_seconds": Note(R, "near `router.image_url_timeout_s`: hosts are slow, or places are short"),
    "twinpool_image_fetches_running": Note(R, "at 32 for long: as `late` and `full` above"),
    "twinpool_image_held_bytes": Note(R, "near 512 MiB: images come faster than readers take them"),
    "twinpool_picker_picks": Note(P, "`fallback`, `no_preview` or `no_endpoint` grow: as `picker_previews`; its log"),
    "twinpool_picker_pick_seconds": Note(P, "near `--preview-timeout`: routers are too busy to preview, or away"),
    "twinpool_picker_previews": Note(P, "`failed` grows: routers are away or slow; `unread`: they are another build's"),
    "twinpool_picker_endpoints": Note(P, "`present` at 0: nobody answers previews; the log says why"),
    "twinpool_picker_exchanges": Note(P, ""),
    "vllm:request_prompt_tokens": Note(R, "the same without `vllm:`"),
    "vllm:request_generation_tokens": Note(R, "`request_generated_tokens`"),
}


def families() -> dict[str, Metric]:
    """Return every family of a router but those of its process, by name; none has a sample of a worker."""
    config = config_from_dict(EVERYTHING)
    directory = cast(Any, SimpleNamespace())
    service = RouterService(
        read_model_spec(DEMO),
        config,
        directory,
        clock=ManualClock(100.0),
        ports=ControllerPorts(
            reporter=cast(Any, SimpleNamespace()),
            recorder=cast(Any, SimpleNamespace(on_record_ask=lambda asked: None)),
            control_plane=lambda: ControlPlane("10.0.0.1:7000", 1, ()),
            reachable=lambda: True,
        ),
    )
    header = {"entries": np.zeros(1), "evicted": np.zeros(1), "crowded": np.zeros(1)}
    told = SimpleNamespace(fresh=lambda now: True, memory=SimpleNamespace(header=header, slots={"live": np.zeros(1)}))
    service.metrics.sources.append(lambda: index_metrics(cast(Any, told), service.clock))
    exporter = TraceExporter(cast(Any, SimpleNamespace()), config.tracing, random.Random)
    service.metrics.sources.append(exporter.families)
    service.metrics.of_process.append(ClientConnections(config.router, 1024).metrics)
    BatchRunner(service, cast(Any, SimpleNamespace(config=config.batch)))
    picked = PickTally().families(exchanges=0, endpoints={"present": 0, "away": 0})
    found = (*service.metrics.collect(), *service.metrics.seen(), *picked)
    return {family.name: family for family in found if not family.name.startswith("process_")}


def main() -> str:
    found = families()
    if strange := found.keys() ^ NOTES.keys():
        raise SystemExit(f"docs/metrics.py: NOTES and the families differ in {', '.join(sorted(strange))}")
    out = [PREAMBLE]
    left = dict(found)
    for heading, beginnings in SECTIONS.items():
        mine = [name for start in beginnings for name in left if name.removeprefix("twinpool_").startswith(start)]
        last = "is ours" if heading == "Under vLLM's names" else "when it is high, or grows"
        out += ["", f"## {heading}", "", f"| metric | type | unit | labels | of | meaning | {last} |"]
        out.append("|---|---|---|---|---|---|---|")
        out += [row(left.pop(name)) for name in dict.fromkeys(mine)]
    if left:
        raise SystemExit(f"docs/metrics.py: no section has {', '.join(left)}")
    return "\n".join(out) + "\n"


def row(family: Metric) -> str:
    """Return a family's row."""
    note, labels = NOTES[family.name], cast(Any, family)._labelnames if hasattr(family, "_labelnames") else ()
    name = family.name + ("_total" if family.type == "counter" else "")
    unit = next((unit for end, unit in UNITS.items() if family.name.endswith(end)), "")
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {unit} | {shown} | {note.of} | {family.documentation} | {note.advice} |"


PREAMBLE = """\
# Metrics

<!-- Generated by docs/metrics.py: run `make pages`. -->

Every family that a router has at `/metrics`, and those of an [endpoint picker](endpoint-picker.md), from the source;
[operating](operating/watch.md#metrics) says how to scrape it. It answers in Prometheus' text format, and in
OpenMetrics to whoever asks for that. Beside them it has `process_*` of the Prometheus client: memory, CPU time, open
descriptors and start of the router's process.

*of*: `router`: each router counts its own part, so add the routers up. `cluster`: every router tells the same, as the
workers or the controller told it, so take the greatest: `max by (worker, role) (...)`. `picker`: each picker counts its
own part. A family that is switched off (tenants without keys, the autoscaler, the watch of streams, drafts) has no
samples or isn't there.

| label | values |
|---|---|
| `worker`, `to` | names of workers; `to` is empty, for all others together, where there are more than 1,024 links |
| `role` | `prefill`, `decode`, `colocated` |
| `state` of workers | `starting`, `ready`, `draining`, `left`, `dead` |
| `state` of requests, of connections | `running`, `waiting`; `busy`, `idle` |
| `tier` | `device`, `host`, `storage` |
| `model_name`, `model` | the first name of the model that is served |
| `tenant` | names in the file of keys |
| others | a few words each, in [operating](operating.md) where they need one |

There is one series for each worker and value, or for each link or tenant, and none for a request or a client."""


if __name__ == "__main__":
    print(main(), end="")
