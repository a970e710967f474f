"""Three scenes of a cluster with all tiers: its first run, a start on what it left, a start on what was damaged."""

from __future__ import annotations

from pathlib import Path

from tests.support.conversations import Turn, expect_all_known, expect_hits
from tests.support.served_cluster import Serving, serving, until
from tests.support.storage_damage import damage_folder, still_damaged
from tests.support.tier_clusters import Trace, counters, found_by_tier, run, settings, warm_systems
from tests.support.tier_conversations import PAGE, by_turn, expect_hand_overs
from twinpool.contracts.ids import Role


def expect_undisturbed(trace: Trace, turns: list[Turn]) -> None:
    assert by_turn(turns) == trace.answers
    expect_hand_overs(turns)


def expect_first_run(
    model: Path, trace: Trace, runtime: Path, storage: Path, plane: str, *, decode_tiers: bool
) -> None:
    """Hits are those of the trace, on all tiers. With `decode_tiers`, storage has decode's pages as well, sooner or
    later, so hits are between two bounds; else they are exact."""
    sections = settings(trace, storage, plane, decode_tiers=decode_tiers)
    with serving(model, runtime, sections=sections) as cluster:
        turns = run(cluster, trace)
        cluster.settle()
        expect_undisturbed(trace, turns)
        expect_hits(trace.talks, turns, PAGE, answers="perhaps" if decode_tiers else "never")
        found, prefill = found_by_tier(turns), counters(cluster, Role.PREFILL)
        print(f"{trace.pages} pages, {sum(len(t.prompt) for t in turns)} tokens asked for; found {dict(found)}")
        print(dict(prefill))
        told = {tier: prefill[f"hit_tokens_{tier}"] for tier in found}
        until(
            lambda: {tier: _hits(cluster, tier) for tier in found} == told,
            "a heartbeat to bring them to the metrics",
            10,
        )
        if not prefill["preemptions"]:
            assert told == found
        assert min(found[tier] for tier in ("device", "host", "storage")) > 0
        assert prefill["pages_damaged_in_storage"] == prefill["pages_damaged_on_host"] == 0
        assert cluster.metric("twinpool_transfer_bytes_total") == sum(t.received_bytes for t in turns)
        assert counters(cluster, Role.DECODE)["received_bytes"] == sum(t.received_bytes for t in turns)


def _hits(cluster: Serving, tier: str) -> float:
    return cluster.metric("twinpool_cache_hit_tokens_total", role="prefill", tier=tier)


def expect_restart(model: Path, trace: Trace, runtime: Path, storage: Path, plane: str) -> None:
    """Storage has every prompt of the run before."""
    with serving(model, runtime, sections=settings(trace, storage, plane, decode_tiers=True)) as cluster:
        turns = run(cluster, trace)
        cluster.settle()
        expect_undisturbed(trace, turns)
        expect_all_known(turns, PAGE)
        assert turns[0].tiers["storage"] > 0


def expect_damage_is_counted(model: Path, trace: Trace, runtime: Path, storage: Path, plane: str, seed: int) -> None:
    """Whoever meets a damaged object takes it away: so many as are gone were counted."""
    damaged = damage_folder(storage, seed)
    with serving(model, runtime, sections=settings(trace, storage, plane, decode_tiers=False)) as cluster:
        warm_systems(cluster, trace.talks)
        turns = run(cluster, trace)
        cluster.settle()
        expect_undisturbed(trace, turns)
        met = len(damaged) - len(still_damaged(damaged))
        print(f"{len(damaged)} objects damaged, {met} of them met")
        assert met > len(damaged) / 2
        assert counters(cluster, Role.PREFILL)["pages_damaged_in_storage"] == met
