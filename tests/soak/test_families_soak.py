"""Every family in whole clusters, as it is served: with no flag, and over TCP from a folder in its published layout.

Half an hour on two cores. A slice: ``make soak ARGS="tests/soak/test_families_soak.py -k gemma3"``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cluster_answers import make_prompts
from tests.support.family_scenes import Family, bytes_due, expect_mechanisms, expect_tiers, make_family
from tests.support.model_families import EVERY
from tests.support.served_cluster import Serving, serving
from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.contracts.ids import PAIR

COUNT, LONGEST, TOKENS, AT_ONCE = 32, 1500, 24, 8
READY_WITHIN_S = 600
pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=EVERY)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(request.param, tmp_path_factory.mktemp("families"))


def expect_oracle(family: Family, cluster: Serving, seed: int) -> None:
    """32 prompts of 1 to 1,500 tokens, 8 at a time, with shared prefixes: the oracle's tokens, all handed over."""
    prompts = make_prompts(seed, COUNT, LONGEST)
    answers = cluster.complete_all(prompts, at_once=AT_ONCE, max_tokens=TOKENS)
    cluster.settle()
    spec = family.pool_set()
    expect_mechanisms(family, spec, LONGEST)
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = answer.twinpool
        assert (len(answer.tokens), answer.finish) == (TOKENS, "length")
        assert (seen["attempts"], seen["computed"]["decode"]) == (1, 0)
        assert seen["computed"]["prefill"] == len(prompt) - answer.cached
        assert seen["transfer_bytes"] <= bytes_due(spec, len(prompt))
        if not seen["held_by_decode"] and len(spec.pools) == 1:
            assert seen["transfer_bytes"] == bytes_due(spec, len(prompt))
        family.expect(prompt, answer.tokens)
    assert sum(a.cached for a in answers) > 0, "prefixes are shared"
    assert cluster.metric("twinpool_fallbacks_total") == cluster.metric("twinpool_handovers_damaged_total") == 0


def expect_table(family: Family, cluster: Serving) -> None:
    """One row a pool of each role: how many pages or slots, their bytes, what for."""
    told = cluster.twinpool("status", "--verbose").stdout.splitlines()
    for role in PAIR:
        rows = [line.split() for line in told if line.split()[:1] == [role]]
        for pool in family.pool_set().pools:
            (row,) = [row for row in rows if row[1] == pool.name]
            assert row[3] == ("slots" if pool.kind is PoolKind.STATE else "pages")
            assert "MiB" in row


def test_a_folder_is_served_with_no_flag(family: Family, tmp_path: Path) -> None:
    with serving(family.folder, tmp_path, ready_within=READY_WITHIN_S) as cluster:
        expect_table(family, cluster)
        expect_oracle(family, cluster, 1)


def test_a_published_folder_is_served_over_tcp(family: Family, tmp_path: Path) -> None:
    published = make_family(family.name, tmp_path / "model", published=True)
    sections = {"transfer": {"plane": "zmq"}, "prefill": {"chunk_tokens": 100}}
    with serving(published.folder, tmp_path, sections=sections, ready_within=READY_WITHIN_S) as cluster:
        expect_oracle(family, cluster, 2)


def test_long_conversations_survive_small_pools(family: Family) -> None:
    expect_tiers(family, talks=10, turns=4)
