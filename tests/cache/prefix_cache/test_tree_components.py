"""Where computing can start on a path, pool by pool, and what may be evicted from a node: over nodes made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.pool_sets import pool_sets
from twinpool.cache.prefix_cache.eviction_policy import POLICIES, EvictionOrder, EvictionQueue
from twinpool.cache.prefix_cache.tree_components import (
    FullComponent,
    ReuseLevel,
    StateComponent,
    TreeComponent,
    WindowComponent,
    components_of,
)
from twinpool.cache.prefix_cache.tree_node import Tier

NEITHER, TREE, DEVICE = ReuseLevel.NEITHER, ReuseLevel.TREE, ReuseLevel.DEVICE
POOL = "a pool"


def node(pages: int, where: str) -> Any:
    """A node of so many pages with the pool's state on the ``device``, on the ``host`` or in neither."""
    return SimpleNamespace(pages=pages, parts=[{POOL: 1} if where == tier else {} for tier in ("device", "host")])


@pytest.mark.parametrize(
    ("component", "path", "last", "levels"),
    [
        (StateComponent(POOL), [(2, "device"), (3, "device")], 3, [DEVICE, DEVICE]),
        (StateComponent(POOL), [(2, "device"), (3, "device")], 2, [DEVICE, NEITHER]),
        (StateComponent(POOL), [(2, "host"), (3, "")], 3, [TREE, NEITHER]),
        (WindowComponent(POOL, 3), [(2, "device"), (4, "device")], 1, [DEVICE, DEVICE]),
        (WindowComponent(POOL, 3), [(2, ""), (4, "device")], 2, [NEITHER, NEITHER]),
        (WindowComponent(POOL, 3), [(2, ""), (4, "device")], 3, [NEITHER, DEVICE]),
        (WindowComponent(POOL, 3), [(2, "host"), (2, "device")], 2, [TREE, TREE]),
        (WindowComponent(POOL, 3), [(2, "device"), (2, "host")], 2, [DEVICE, TREE]),
        (FullComponent(POOL), [(1, "device"), (1, ""), (1, "host")], 1, [DEVICE, NEITHER, NEITHER]),
        (FullComponent(POOL), [(1, "device"), (1, "host"), (1, "")], 1, [DEVICE, TREE, NEITHER]),
    ],
)
def test_computing_starts_where_a_pool_has_all_that_is_read_from_there_on(
    component: TreeComponent, path: list[tuple[int, str]], last: int, levels: list[ReuseLevel]
) -> None:
    """A state is that of its node's end alone, a window may begin in both tiers, and nothing is read behind a hole."""
    assert component.levels([node(*one) for one in path], last) == levels


def parts(**locks: int) -> dict[str, Any]:
    """The parts of one node on the device, each with so many locks."""
    made: dict[str, Any] = {}
    held = SimpleNamespace(parts=[made, {}], below=[0, 0], hits=0, used=0)
    for name, count in locks.items():
        made[name] = SimpleNamespace(
            component=name, tier=Tier.DEVICE, node=held, locks=[1] * count, live=True, entry=None
        )
    return made


def test_what_must_go_with_a_locked_part_stays_and_what_has_left_the_tree_is_not_evicted() -> None:
    order = EvictionOrder(components_of(pool_sets()["full+window"]), POLICIES["lru"])

    def go(held: dict[str, Any]) -> list[str]:
        return [name for name, part in held.items() if order.may_go(part)]

    assert go(parts(full=0, window=0)) == ["full", "window"]
    assert go(parts(full=0, window=1)) == []
    assert go(parts(full=1, window=0)) == ["window"], "it goes alone"
    gone = parts(full=0, window=0)
    gone["window"].live = False
    assert go(gone) == ["full"]


def test_of_nodes_that_were_used_as_often_the_one_of_longer_ago_goes_first() -> None:
    rank = POLICIES["lfu"]
    ranks: list[Any] = [rank(SimpleNamespace(hits=h, used=u)) for h, u in ((1, 5), (1, 6), (2, 1))]  # type: ignore[arg-type]
    assert ranks == sorted(ranks)


def test_who_was_used_after_it_was_queued_goes_after_those_that_were_not() -> None:
    queue, held = EvictionQueue(POLICIES["lru"]), [parts(full=0)["full"] for _ in range(3)]
    for number, part in enumerate(held):
        part.node.used = number
        queue.push(part)
    held[0].node.used = 9
    popped = [queue.pop(lambda _: True) for _ in range(4)]
    assert [part and part.node.used for part in popped] == [1, 2, 9, None]
