"""The configuration as a colocated worker goes by it: one section for both roles' ranks and cache."""

from __future__ import annotations

from twinpool.contracts.config.cache_config import CacheOverride
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Role


def test_both_halves_of_a_colocated_worker_have_its_ranks_and_its_cache() -> None:
    config = config_from_dict(
        {
            "cache": {"device_tokens": 512},
            "colocate": {"tp": 2, "ep": 2, "cache": {"device_tokens": 4096}},
            "prefill": {"tp": 4, "chunk_tokens": 96, "cache": {"device_tokens": 1024}},
        }
    )
    assert [config.cache_for(role).device_tokens for role in Role] == [1024, 512, 4096]
    assert [config.tp_for(role) for role in Role] == [4, 1, 2]
    assert [config.ep_for(role) for role in Role] == [1, 1, 2]
    mine = config.with_local_prompts(Role.COLOCATED)
    assert [mine.cache_for(role).device_tokens for role in Role] == [4096] * 3
    assert [mine.tp_for(role) for role in Role] == [2] * 3
    assert [mine.ep_for(role) for role in Role] == [2] * 3, "experts lie as the colocated worker's ranks have them"
    assert mine.prefill.chunk_tokens == 96


def test_an_override_of_one_role_leaves_the_others_as_they_are() -> None:
    config = config_from_dict({"cache": {"host_bytes": 7}})
    for role in Role:
        changed = config.with_cache(role, CacheOverride(host_bytes=99))
        assert {other: changed.cache_for(other).host_bytes for other in Role} == dict.fromkeys(Role, 7) | {role: 99}
