"""Pool sets of several ranks: one page, one digest, whatever the number of ranks."""

from __future__ import annotations

import pytest
import torch

from tests.support.pool_sets import NAMES
from tests.support.stand_in_ranks import RankedSeat, content, fill, headed_sets, tp_manager
from twinpool.cache.device.device_port import DEVICE, HOST
from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetSpec, PoolSpec
from twinpool.cache.memory.page_moves import PageMove, PoolMove
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.pool.tp_ranks import FollowerPools, TPPoolSet
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.rank_orders import CopyPages, PageSpan

SIZES = (1, 2, 4)


def _manager(name: str, size: int, seed: int = 3) -> RankedSeat:
    manager = tp_manager(headed_sets()[name], size, 6)
    fill(manager, seed)
    return manager


def _digests(manager: RankedSeat, indices: list[int]) -> dict[str, list[int]]:
    firsts = [8 + 4 * i for i in range(len(indices))]
    ends = [first + 3 for first in firsts]
    return {pool.name: manager.leader.digest(pool.name, indices, firsts, ends) for pool in manager.whole.pools}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_one_digest_whatever_the_number_of_ranks(name: str) -> None:
    one, two, four = (_digests(_manager(name, size), [2, 5, 1]) for size in SIZES)
    assert one == two == four


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES[1:])
def test_one_bit_of_any_copy_on_any_rank_changes_the_digest(name: str, size: int) -> None:
    manager = _manager(name, size)
    right = _digests(manager, [2])
    for pools in manager.pools:
        for pool, buffer in pools.layout.each():
            at = buffer.offset(buffer.spec.layers - 1, 2)
            pools.region[at] ^= 0x10
            wrong = _digests(manager, [2])
            assert [p for p in right if right[p] != wrong[p]] == [pool.name], buffer.spec.name
            pools.region[at] ^= 0x10
    assert _digests(manager, [2]) == right


def test_the_same_damage_to_all_copies_of_a_buffer_is_no_agreement() -> None:
    manager = _manager("sparse", 4)
    right = _digests(manager, [3])
    for pools in manager.pools:
        pools.region[pools.layout.buffers["full"][0].offset(1, 3)] ^= 1
    assert _digests(manager, [3]) != right


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_clears_are_those_of_all_ranks(name: str) -> None:
    manager = _manager(name, 4)
    for pool in manager.whole.pools:
        before = content(manager, pool.name, 2)
        manager.leader.copy(PageMove((PoolMove(pool.name, (2,), (4,)),)), manager.leader)
        assert content(manager, pool.name, 4) == content(manager, pool.name, 2) == before
        manager.leader.zero({pool.name: [2]})
        assert not any(map(any, content(manager, pool.name, 2)))
        assert content(manager, pool.name, 4) == before


def test_a_copy_counts_for_the_leader_before_and_for_a_follower_after_it_was_made() -> None:
    """So ranks that were killed at any moment agree only where nothing was left to be done."""
    manager = _manager("full", 2)
    counts = {"leader": 0, DEVICE: 0}

    def count(name: str) -> None:
        counts[name] += 1

    (follower,) = manager.followers.states
    assert isinstance(manager.leader, TPPoolSet)
    manager.leader.on_copy, follower._copied = (lambda: count("leader")), count
    manager.followers.slow = CopyPages
    manager.leader.copy(PageMove((PoolMove("full", (2,), (4,)),)), manager.leader)
    assert counts == {"leader": 1, DEVICE: 0}
    manager.followers.catch_up()
    assert counts == {"leader": 1, DEVICE: 1}


def test_a_copy_of_one_layer_leaves_the_others_on_every_rank() -> None:
    manager = _manager("full", 2)
    before, source = content(manager, "full", 4), content(manager, "full", 2)
    manager.leader.copy(PageMove((PoolMove("full", (2,), (4,)),)), manager.leader, range(1, 2))
    after = content(manager, "full", 4)
    moved = {i for i in range(len(after)) if after[i] != before[i]}
    assert moved == {i for buffer in range(2) for i in range(buffer * 12 + 4, buffer * 12 + 8)}
    assert all(after[i] == source[i] for i in moved)


def test_a_dirty_null_page_of_a_follower_is_found() -> None:
    manager = _manager("full", 2)
    assert manager.leader.check() == []
    manager.pools[1].region[0] = 1
    (line,) = manager.leader.check()
    assert line.startswith("rank 1: ")
    assert "null page" in line


def test_heads_that_ranks_cannot_share_are_refused_with_the_sizes_that_work() -> None:
    spec = PoolSetSpec(4, (PoolSpec("full", (BufferSpec("k", 1, (6, 2), torch.float32, heads=6),)),))
    with pytest.raises(ConfigError, match=r"4 ranks can't share the 6 heads of k: tp can be 1, 2$"):
        spec.shard(0, 4)
    assert [spec.shard(rank, 2).full.buffers[0].first_head for rank in range(2)] == [0, 3]


def test_heads_fewer_than_ranks_go_to_neighbours() -> None:
    spec = PoolSetSpec(4, (PoolSpec("full", (BufferSpec("k", 1, (2, 2), torch.float32, heads=2),)),))
    assert [spec.shard(rank, 4).full.buffers[0].first_head for rank in range(4)] == [0, 0, 1, 1]
    assert spec.shard(3, 4).whole == spec


def test_a_follower_goes_on_only_when_a_copy_from_or_to_host_memory_is_over_on_its_device() -> None:
    spec, events = headed_sets()["full"], list[str]()
    places = {place: PoolSet(spec, spec.even(4)) for place in (DEVICE, HOST)}
    followers = FollowerPools(
        places, 2, lambda place: events.append(f"copied to {place}"), lambda: events.append("over")
    )
    pieces = (PageSpan("full", (1,), (2,)),)
    for source, target in ((DEVICE, HOST), (HOST, DEVICE), (DEVICE, DEVICE)):
        followers.carry_out(CopyPages(source, target, pieces, None))
    assert events == ["over", "copied to host", "over", "copied to device", "copied to device"]
