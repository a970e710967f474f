"""`EvictionQueue.check` names each thing that is wrong with a queue of what may be evicted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from twinpool.cache.prefix_cache.eviction_policy import _EMPTY, POLICIES, EvictionQueue


def part(used: float) -> Any:
    return SimpleNamespace(node=SimpleNamespace(used=used), entry=None)


def queue(*used: float) -> EvictionQueue:
    made = EvictionQueue(POLICIES["lru"])
    for one in used:
        made.push(part(one))
    assert made.check() == []
    return made


def test_empty_places_beyond_its_bound() -> None:
    """A queue that kept them grew with what clients send: 40,001 entries for 16 live pages."""
    long = queue(1.0, 2.0)
    empty: Any = [0.0, 0, None]
    long._line.extendleft([empty] * (_EMPTY + 1))
    assert long.check() == []
    long._line.appendleft(empty)
    assert long.check() == [f"{_EMPTY + 4} places for 2 parts"]


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (lambda q: setattr(q, "_live", 3), "it counts 3 parts and has others"),
        (lambda q: q._line[0].__setitem__(2, part(1.0)), "a part in it has its place elsewhere"),
        (lambda q: q._line.reverse(), "its line is out of order"),
    ],
)
def test_what_is_planted_is_named(plant: Any, says: str) -> None:
    planted = queue(1.0, 2.0)
    plant(planted)
    assert says in planted.check()
