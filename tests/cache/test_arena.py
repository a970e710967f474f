"""Host memory that outlives its worker: whatever moment it died at, what is adopted is what was sealed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cache.adoption import MOST_TAKEN, SETTLED_S
from cache.arena import SALT_BYTES, Arena, Sealed, arena_bytes
from cache.nodes import Node, Tier
from cache.registry import Order, PoolSetLayout
from cache.tags import chain_keys
from tests.cache_schedule import Schedule, _ACTIONS, _WEIGHTS
from tests.cache_visitors import content
from tests.cache_world import World
from tests.poolsets import NAMES, pool_sets

PAGE_TOKENS = 2
COUNT = 40
TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
BOND = b"sixteen byte tie"


def layout_of(name: str, count: int = COUNT) -> PoolSetLayout:
    spec = pool_sets(PAGE_TOKENS)[name]
    return PoolSetLayout(spec, spec.even(count), Order.PAGE_FIRST)


def segment_for(name: str, count: int = COUNT) -> memoryview:
    return memoryview(bytearray(arena_bytes(layout_of(name, count))))


def world_on(segment: memoryview, name: str, seed: int = 1, **settings: object) -> World:
    options = {"pages": COUNT, "host_pages": COUNT, "storage": False, **settings}
    return World(pool_sets(PAGE_TOKENS)[name], seed, segment=segment, **options)  # type: ignore[arg-type]


def visit(world: World, tokens: list[int], salt: str = "") -> int:
    """A request comes, computes what it doesn't find, shares it and leaves; returns how many pages it found."""
    visitor = world.arrive(tokens, salt)
    for _ in range(100):
        if visitor.claim is None:
            world.admit(visitor)
        elif visitor.steps:
            world.commit(visitor, share=True, snapshot=True)
        elif visitor.done == len(visitor.prefix):
            found = visitor.claim.depth
            world._share(visitor, visitor.claim)
            world.leave(visitor)
            world.poll()
            return found
        else:
            world.compute(visitor, 2, snapshot=True)
        if world.lazy is not None:
            world.lazy.settle()
        world.poll()
        if visitor not in world.visitors:
            visitor = world.arrive(tokens, salt)
    raise AssertionError("a visit without an end")


def host_nodes(world: World) -> list[Node]:
    return [node for node in world.seat.tree.nodes() if node.parts[Tier.HOST]]


def expect_right_bytes(world: World) -> int:
    """Every page and slot that the tree has on the host holds what its chain key says; returns how many."""
    host, tree = world.host, world.seat.tree
    assert host is not None
    seen = 0
    for node in tree.nodes():
        for part in node.parts[Tier.HOST].values():
            keys = node.keys[-1:] if tree.component(part.component).point else node.keys
            for key, index in zip(keys, part.lease.indices, strict=True):
                page = host.layout.page(host.region, part.component, index)
                assert page.equal(content(key, part.component, len(page))), (part.component, index)
                seen += 1
    return seen


def look_at_all(world: World) -> None:
    for _ in range(1000):
        world.clock.advance(0.01)
        world.poll()
    assert not any(world.seat.keeper._unproven.values())  # type: ignore[union-attr]


# ------------------------------------------------------------ adoption


@pytest.mark.parametrize("name", NAMES)
def test_a_successor_finds_on_the_host_what_the_dead_had_there(name: str) -> None:
    segment = segment_for(name)
    first = world_on(segment, name)
    visit(first, TOKENS)
    visit(first, [*TOKENS[:4], 9, 9, 9, 9], "a tenant")
    visit(first, [*TOKENS[:4], 9, 9, 9, 9])
    pages = expect_right_bytes(first)
    assert pages
    second = world_on(segment, name, 2)
    assert expect_right_bytes(second) == pages
    assert second.check() == []
    for tokens, salt in ((TOKENS, ""), ([*TOKENS[:4], 9, 9, 9, 9], "a tenant")):
        visitor = second.arrive(tokens, salt)
        visitor.reusable = len(visitor.prefix)
        second.admit(visitor)
        assert visitor.claim is not None
        assert visitor.claim.cached.host == len(tokens), "all of it comes from the host"
        second.leave(visitor)
    look_at_all(second)
    second.settle()


@pytest.mark.slow
def test_a5_whatever_moment_a_worker_dies_at_what_is_adopted_is_what_was_sealed() -> None:
    met: Counter[str] = Counter()
    for seed in range(40):
        schedule = DyingSchedule(seed)
        schedule.live()
        successor = schedule.successor()
        met["adopted"] += successor.seen["adopted"]
        met["pages"] += expect_right_bytes(successor)
        met["in the middle of a copy"] += bool(schedule.world.seat.saver.busy)  # type: ignore[union-attr]
        assert successor.check() == [], seed
        for prompt in schedule.prompts:
            visit(successor, prompt)
        assert expect_right_bytes(successor)
        assert successor.seat.stats()["arena_pages_damaged"] == successor.seat.stats()["pages_damaged_on_host"] == 0
        successor.settle()
    assert met["adopted"] > 200, met
    assert met["in the middle of a copy"], met


class DyingSchedule(Schedule):
    """A schedule on an arena that stops in the middle, with everything under way that is."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        count = self.settings["host_pages"]
        assert isinstance(count, int)
        self.segment = segment_for(self.name, count)
        self.world = World(
            self.world.spec, seed, lazy=True, segment=self.segment, **{**self.settings, "storage": True},  # type: ignore[arg-type]
        )  # fmt: skip
        assert self.world.lazy is not None
        self.lazy = self.world.lazy

    def live(self) -> None:
        for prompt in self.prompts:
            self.world.arrive(prompt)
            self.to_the_end()
        for _ in range(self.rng.randint(0, _ACTIONS)):
            self.rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0](self)
        keeper = self.world.seat.keeper
        assert keeper is not None
        assert keeper.check() == []

    def successor(self) -> World:
        settings = {**self.settings, "storage": False, "pages": 40}
        return World(self.world.spec, 1, lazy=True, segment=self.segment, **settings)  # type: ignore[arg-type]
