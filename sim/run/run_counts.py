"""What a run met, counted: by the counters of workers, routers and stand-ins, and by the kinds of requests."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.router.verification.audits import AuditResult as Audited
from twinpool.sim.fabric.hash_answers import penalised, recite
from twinpool.sim.nodes.sim_router import SimRouter
from twinpool.sim.run.faults import FaultTarget
from twinpool.sim.scenario.scenario import ScenarioRequest

_TOLD = (
    "stale_pages",
    "pages_damaged",
    "late_messages",
    "preemptions",
    "pages_evicted",
    "pages_invalidated",
    "retractions",
    "resumptions",
    "recomputed",
    "arena_pages_adopted",
    "hit_tokens_device",
    "hit_tokens_host",
    "hit_tokens_storage",
    "prompt_tokens_held",
    "tokens_drafted",
    "drafts_accepted",
)
"""Counters of workers that are reported as events of a run."""


def count(run: FaultTarget) -> None:
    """Count into `run.counts` what its parts have counted."""
    counts = run.counts
    for host in run.control.all_hosts:
        for name in _TOLD:
            counts[name] += int(host.snapshot.counters.get(name, 0))
        if host.built.followers is not None:
            counts["late_orders"] += host.built.followers.late_orders
    damaged = run.world.damage.done
    counts["damaged_metadata"], counts["damaged_notices"] = damaged["metadata"], damaged["notice"]
    counts["damaged_writes"] = damaged["corrupt"]
    counts.update({f"stores_{kind}": met for kind, met in run.world.store_faults.done.items()})
    if run.store is not None:
        counts["cancelled_running"] = run.store.cancelled_running
    for router in run.routers:
        _count_router(counts, router)
    if not run.plan.shape.config["faults"]["retract_every"]:
        counts["pressed_out"] = counts["retractions"]
        counts["pressed_seeds"] = int(counts["retractions"] > 0)


def _count_router(counts: Counter[str], router: SimRouter) -> None:
    core = router.core
    counts["audited"] += core.audits.counts.results[Audited.EXACT]
    counts["migrated"] += core.migrations.counts.migrated
    counts["stayed"] += core.migrations.counts.stayed
    counts["replays"] += core.counts.replays
    counts.update({f"local_{why}": met for why, met in core.counts.local_prompts.items()})


def kinds_of(ask: ScenarioRequest, spec: PoolSetSpec) -> list[str]:
    """Return the kinds that a request that was answered is of."""
    sampling = ask.sampling
    free = replace(sampling, min_tokens=0)
    kinds = {
        "salted": bool(ask.salt),
        "prioritised": ask.priority != 0,
        "penalised": penalised(sampling),
        "biased": bool(sampling.logit_bias),
        "masked": bool(sampling.allowed_token_ids),
        "structured": bool(sampling.grammar),
        "held_open": sampling.min_tokens > 0 and sampling.min_tokens > len(recite(spec, ask.prompt, free).tokens),
        "logprobs": sampling.logprobs is not None,
        "scored": sampling.prompt_logprobs is not None,
        "chosen_again": sampling.choice > 0,
    }
    return [kind for kind, so in kinds.items() if so]
