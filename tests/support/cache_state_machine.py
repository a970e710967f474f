"""A hypothesis state machine that drives a KV cache manager's tree, tiers and pools against the model of `World`.

Hypothesis chooses the settings of each run and every step. `drive` runs the machine in rounds, each with its own fixed
seed, until enough steps have changed state, and returns what happened: a run proves something only about what really
occurred in it, so its caller asks. Hypothesis leaves whole rules out of a run; therefore every rule moves a request on
as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.cache_harness import World
from tests.support.cache_requests import Visitor
from tests.support.pool_sets import pool_sets
from twinpool.cache.prefix_cache.tree_node import Tier, TokenPrefix
from twinpool.cache.tiers.prefetch import Prefetcher

PAGE_TOKENS = 2
_MAX_PAGES = 10
_STEPS = 50
_EXAMPLES = 12
_NUMBER = st.integers(0, 1 << 16)
_WORLDS = st.fixed_dictionaries({
    "adversarial": st.sampled_from([True, True, False]),
    "write_policy": st.sampled_from(["through", "selective", "back"]),
    "eviction": st.sampled_from(["lru", "lfu", "fifo", "priority", "slru"]),
    "prefetch_policy": st.sampled_from(["wait_complete", "best_effort", "timeout"]),
    "fault_rate": st.sampled_from([0.0, 0.05]),
    "device_fault_rate": st.sampled_from([0.0, 0.05]),
    "pages": st.sampled_from([30, 14, 60, 24]),
    "host_pages": st.sampled_from([40, 14, 80, 40, 10, 0]),
})  # fmt: skip
_UNDISTURBED = st.fixed_dictionaries({
    "adversarial": st.booleans(),
    "write_policy": st.sampled_from(["through", "back"]),
    "pages": st.just(400),
    "host_pages": st.just(400),
})  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Requests come, compute, share, send, stop and come back; everything else happens around them."""

    name: ClassVar[str]
    disturbing: ClassVar[bool] = True
    happened: ClassVar[Counter[str]]

    @initialize(number=_NUMBER, data=st.data())
    def begin(self, number: int, data: st.DataObject) -> None:
        chosen: dict[str, Any] = data.draw(_WORLDS if self.disturbing else _UNDISTURBED, label="settings")
        self.world = World(pool_sets(PAGE_TOKENS)[self.name], number, **chosen)
        self.known: list[list[int]] = []
        self.steps = self.changes = 0
        for first in (0, 1):
            self.come([first, 0, 1, 1, 0, 0, 1, 0], "")
            self.until_it_leaves(number)

    def come(self, tokens: list[int], salt: str) -> Visitor:
        self.known.append(tokens)
        return self.world.arrive(tokens, salt)

    def any(self, number: int) -> Visitor:
        return self.world.visitors[number % len(self.world.visitors)]

    # ------------------------------------------------------------ requests

    def carry_on(self, number: int) -> None:
        """Some request takes its next step, whatever that is."""
        if not self.world.visitors:
            self.come(self.continued(number), "")
        self.step(self.any(number), 1 + number % 3, number % 5 > 0, number % 7 > 2, number % 2 > 0)

    def continued(self, number: int) -> list[int]:
        tokens = [*self.known[number % len(self.known)], *(number >> bit & 1 for bit in range(6))]
        return tokens[: _MAX_PAGES * PAGE_TOKENS]

    def step(self, visitor: Visitor, pages: int, share: bool, snapshot: bool, ahead: bool) -> None:
        world, end = self.world, visitor.launched == len(visitor.prefix)
        if visitor.allocation is None:
            world.admit(visitor)
        elif visitor.steps and (end or not ahead):
            world.commit(visitor, share=share, snapshot=snapshot)
        elif not end:
            world.compute(visitor, pages, snapshot=snapshot)
        else:
            world.leave(visitor)

    @precondition(lambda self: len(self.world.visitors) < 6)
    @rule(base=_NUMBER, cut=_NUMBER, new=st.lists(st.integers(0, 1), max_size=8), salt=st.sampled_from(["", "", "s"]))
    def arrive(self, base: int, cut: int, new: list[int], salt: str) -> None:
        tokens = self.known[base % len(self.known)]
        if cut % 3 == 0:
            tokens = tokens[: PAGE_TOKENS * (cut % (1 + len(tokens) // PAGE_TOKENS))]
        tokens = (tokens + new)[: _MAX_PAGES * PAGE_TOKENS]
        self.come(tokens or [1, 1], salt)

    @precondition(lambda self: self.world.visitors)
    @rule(who=_NUMBER, pages=st.integers(1, 4), share=st.booleans(), snapshot=st.booleans(), ahead=st.booleans())
    def go_on(self, who: int, pages: int, share: bool, snapshot: bool, ahead: bool) -> None:
        self.step(self.any(who), pages, share, snapshot, ahead)

    @precondition(lambda self: self.world.visitors)
    @rule(who=_NUMBER)
    def until_it_leaves(self, who: int) -> None:
        """One request goes as far as it can, and shares all of it."""
        if not self.world.visitors:
            return
        world, visitor = self.world, self.any(who)
        for _ in range(60):
            if visitor not in world.visitors:
                return
            self.step(visitor, 2, True, True, False)
            self.answers(3)
            self.everything_adds_up()
            if self.disturbing:
                world.clock.advance(0.002)

    @precondition(lambda self: self.world.visitors)
    @rule(who=_NUMBER, what=st.sampled_from(["send", "send", "cancel", "stop waiting"]))
    def interrupt(self, who: int, what: str) -> None:
        world, visitor = self.world, self.any(who)
        if what == "send":
            world.send(visitor)
        elif what == "cancel":
            world.leave(visitor)
        elif self.disturbing:
            self.stop_waiting_for_storage(who)
        self.carry_on(who)

    def stop_waiting_for_storage(self, who: int) -> None:
        waiting = [v.prefetch for v in self.world.visitors if v.prefetch and not v.prefetch.over]
        prefetcher = self.world.manager.tiers.prefetcher
        if waiting and isinstance(prefetcher, Prefetcher):
            prefetcher.stop(waiting[who % len(waiting)])
            self.world.changes += 1

    # ------------------------------------------------------------ around them

    def answers(self, tickets: int) -> None:
        """Storage answers, and the loop takes in what has completed."""
        queue = self.world.queue
        for _ in range(tickets):
            self.world.changes += queue is not None and queue.run_next(self.world.rng)
        self.world.poll()

    @rule(tickets=st.integers(0, 12), ms=st.integers(0, 20), number=_NUMBER)
    def time_passes(self, tickets: int, ms: int, number: int) -> None:
        self.world.clock.advance(ms / 1000)
        self.answers(tickets)
        self.carry_on(number)

    @precondition(lambda self: not self.disturbing)
    @rule(base=_NUMBER, host=st.booleans())
    def comes_back_and_finds_all_of_it(self, base: int, host: bool) -> None:
        """Lower tiers have everything, so nothing that was ever shared may be missing."""
        for _ in range(len(self.world.visitors) if host else 0):
            self.until_it_leaves(0)
        self.answers(100)
        self.world.forget(host=host)
        if len(self.world.visitors) < 6:
            self.come(self.continued(base), "")
            self.answers(100)
        self.carry_on(base)

    @precondition(lambda self: self.disturbing)
    @rule(base=_NUMBER, host=st.sampled_from([False, False, True]), salt=st.sampled_from(["", "", "s"]))
    def comes_back_after_the_device_forgot(self, base: int, host: bool, salt: str) -> None:
        """The way of a conversation's next turn: only the lower tiers have its past."""
        world = self.world
        for pool in world.spec.by_name:
            world.evict(Tier.DEVICE, pool, 100)
            if host:
                world.evict(Tier.HOST, pool, 100)
        if len(world.visitors) < 6:
            self.come(self.continued(base), salt)
            self.until_it_leaves(len(world.visitors) - 1)

    @precondition(lambda self: self.disturbing)
    @rule(
        what=st.sampled_from(
            ["evict", "evict", "evict", "evict on host", "damage host", "damage storage", "invalidate"]
        ),
        number=_NUMBER,
        count=st.sampled_from([1, 4, 105]),
    )
    def misfortune(self, what: str, number: int, count: int) -> None:
        world, pools = self.world, list(self.world.spec.by_name)
        if what.startswith("damage"):
            tier = Tier.HOST if what == "damage host" else Tier.STORAGE
            for _ in range(count % 10):
                world.damage(tier)
            self.comes_back_after_the_device_forgot(number, tier is Tier.STORAGE, "")
        elif what == "invalidate":
            world.invalidate(TokenPrefix.of(self.known[number % len(self.known)], PAGE_TOKENS), count)
        else:
            world.evict(Tier.HOST if what == "evict on host" else Tier.DEVICE, pools[number % len(pools)], count)
        self.carry_on(number)

    # ------------------------------------------------------------ always

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "world"):
            return
        found = self.world.check()
        assert not found, found
        self.steps += self.world.changes > self.changes
        self.changes = self.world.changes

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.settle()
        self.happened.update(world.seen)
        self.happened["steps that changed state"] += self.steps
        self.happened["undisturbed runs"] += not world.disturbed
        self.happened.update({name: int(count) for name, count in world.manager.stats().items()})


def drive(name: str, changes: int, events: Sequence[str] = (), *, disturbing: bool = True) -> Counter[str]:
    """Run the machine over pool set `name` until `changes` steps, each followed by `check`, have changed state.

    Goes on for several times as long if it must to meet all `events`. Returns what happened.
    """
    happened: Counter[str] = Counter()
    attributes: dict[str, Any] = {"name": name, "disturbing": disturbing, "happened": happened}
    chosen = settings(
        max_examples=_EXAMPLES if disturbing else _EXAMPLES // 2,
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    while (done := happened["steps that changed state"]) < changes or (
        done < 15 * changes and not all(happened[event] for event in events)
    ):
        happened["rounds"] += 1
        machine = type(f"Machine_{name}", (Machine,), attributes)
        run_state_machine_as_test(seed(happened["rounds"])(machine), settings=chosen)
    return happened


def must_have_met(name: str, *, long: bool = False) -> list[str]:
    """Events that a run over pool set `name` must have met to prove anything; a `long` one meets the rare ones too."""
    events = [*_EVENTS, *(_RARE_EVENTS if long else ())]
    if "window" in pool_sets()[name].by_name:
        events += _WINDOW_EVENTS
    if "state" in pool_sets()[name].by_name:
        events += _STATE_EVENTS
    return events


_EVENTS = (
    "found on host",
    "found in storage",
    "found shorter than ever shared",
    "prefetched whole",
    "prefetched in vain",
    "forward behind a gate",
    "forward one step ahead",
    "sent",
    "split of a locked node",
    "evicted full on device",
    "evicted full on host",
    "spilled before it went",
    "left with a step launched",
    "left with a load under way",
    "invalidated",
    "invalidated while locked",
    "allocation invalid",
    "host flipped",
    "storage fault in exists",
    "storage fault in read",
    "storage fault in write",
    "pages_damaged_in_storage",
    "saves_failed",
)
_RARE_EVENTS = (
    "loads_failed",
    "prefetch stopped",
    "exact find",
    "prefetched in part",
    "split under a load",
    "split under a store",
    "pages_damaged_on_host",
    "saves_left_out",
    "storage flipped",
    "storage cut",
    "storage swapped",
    "storage lost",
    "storage sealed again",
)
_WINDOW_EVENTS = ("tombstone healed", "evicted window on device alone", "evicted window on host")
_STATE_EVENTS = (
    "snapshot used",
    "evicted state on device alone",
    "evicted state on host",
    "device fault in copy slot",
)
