"""One seed, one schedule: all that several requests do at once, on the lazy device.

Loads, saves, prefetches, forward passes one ahead of what is committed, sends, and requests that are retracted to the
host and come back.

    .venv/bin/python -m tests.support.cache_random_schedule 1234   replays seed 1234 and prints all of it

Nothing fails and nothing is damaged here, so every byte that is read, sent or found must be right. The device is as
late and contrary as its rules allow, pools are so small that pages go from hand to hand, storage answers in any order,
and time is virtual. The seed chooses the pool set, the settings and every action.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.support.cache_harness import World
from tests.support.cache_requests import Visitor
from tests.support.pool_sets import NAMES, pool_sets
from twinpool.cache.device.device_port import DEVICE
from twinpool.cache.manager.swapped_requests import SwapInProgress
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.cache.swap.swap_storage import SwappedState, SwapPlace
from twinpool.contracts.errors import CapacityError

PAGE_TOKENS = 2
_ACTIONS = 120
_AT_ONCE = 5


class Schedule:
    """`run` plays it to its end, or raises what it found."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.name = NAMES[seed % len(NAMES)]
        self.settings: dict[str, Any] = {
            "pages": rng.choice([13, 17, 25]),
            "host_pages": rng.choice([20, 40]),
            "write_policy": rng.choice(["through", "through", "back"]),
            "prefetch_policy": rng.choice(["wait_complete", "best_effort", "timeout"]),
            "stride": rng.choice([1 << 40, PAGE_TOKENS]),
        }
        # Copies of a request's state go in several pieces.
        spec = pool_sets(PAGE_TOKENS)[self.name]
        self.world = World(spec, seed, adversarial=True, chunk_bytes=700, **self.settings)
        self.prompts = [[rng.randrange(2) for _ in range(PAGE_TOKENS * rng.randint(4, 7))] for _ in range(2)]
        self.log: list[str] = []
        self.away: list[tuple[Visitor, SwappedState]] = []
        """Retracted: their state is on the host or in storage, or on its way there."""
        self.coming: list[tuple[Visitor, SwapInProgress]] = []
        adversarial = self.world.adversarial
        assert adversarial is not None
        self.adversarial = adversarial
        if rng.random() < 0.1:
            for pool, gate in self.world.pools.gates.items():
                adversarial.watch(DEVICE, pool, [gate.layer(layer) for layer in range(len(gate))])

    def run(self) -> Counter[str]:
        for prompt in self.prompts:
            self.world.arrive(prompt)
            self.to_the_end()
        forgotten = (Tier.DEVICE, Tier.HOST) if self.rng.random() < 0.4 else (Tier.DEVICE,)
        for tier in forgotten:
            for pool in self.world.spec.by_name:
                self.world.evict(tier, pool, 100)
        for _ in range(_ACTIONS):
            action = self.rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
            self.log.append(f"{action.__name__} {[v.name for v in self.world.visitors]}")
            action(self)
        self.bring_home()
        found = self.world.check()
        assert not found, found
        self.world.settle()
        return self.world.seen

    def to_the_end(self) -> None:
        # A device that lags may be polled ten times and more before an operation is over.
        for _ in range(2000):
            if not self.world.visitors:
                return
            self.go_on(ahead=False)
            self.storage()
            self.world.clock.advance(0.001)
            self.world.poll()
        raise AssertionError("a request alone didn't come to its end")

    # ------------------------------------------------------------ actions

    def arrive(self) -> None:
        if len(self.world.visitors) < _AT_ONCE:
            prompt = self.rng.choice(self.prompts)
            cut = PAGE_TOKENS * self.rng.randint(2, len(prompt) // PAGE_TOKENS)
            new = [self.rng.randrange(2) for _ in range(PAGE_TOKENS * self.rng.randint(0, 3))]
            self.world.arrive(prompt[:cut] + new)

    def go_on(self, *, ahead: bool = True) -> None:
        """The next step of some request; with `ahead`, perhaps launched before the last one is committed."""
        world, rng = self.world, self.rng
        if not world.visitors:
            return
        visitor = rng.choice(world.visitors)
        end = visitor.launched == len(visitor.prefix)
        if visitor.allocation is None:
            world.admit(visitor)
        elif visitor.steps and (end or not ahead or len(visitor.steps) > 1 or rng.random() < 0.5):
            world.commit(visitor, share=rng.random() < 0.8, snapshot=rng.random() < 0.3)
        elif not end:
            world.compute(visitor, rng.randint(1, 2), snapshot=rng.random() < 0.4)
        elif not ahead or rng.random() < 0.5:
            world.leave(visitor)

    def send(self) -> None:
        if self.world.visitors:
            self.world.send(self.rng.choice(self.world.visitors))

    def stop(self) -> None:
        """Late, with a step or two launched, where there is one like that."""
        late = [v for v in self.world.visitors if v.steps] or self.world.visitors
        if late:
            visitor: Visitor = self.rng.choice(late)
            self.world.leave(visitor)

    def retract(self) -> None:
        """Take a request's state to the host and its pages back at once: the copy's pins keep them."""
        world, size = self.world, PAGE_TOKENS
        idle = [
            v
            for v in world.visitors
            if v.allocation and v.done and not v.steps and world.manager.allocations.ready(v.allocation)
        ]
        if not idle:
            return
        visitor = self.rng.choice(idle)
        assert visitor.allocation is not None
        try:
            swapped = world.manager.swapped.swap_out(
                visitor.allocation, visitor.prefix.head(visitor.done), visitor.done * size
            )
        except CapacityError:
            world.disturbed = True
            return
        world.disturbed = True
        world.manager.allocations.free(visitor.allocation)
        world.visitors.remove(visitor)
        self.away.append((visitor, swapped))
        world.seen["retracted"] += 1
        world.seen["retracted beside the tree's own pages"] += swapped.kept > 0

    def shelve(self) -> None:
        """Send what is swapped out on to storage, or bring it back to the host."""
        for visitor, swapped in self.away:
            self.world.manager.swapped.settle(swapped)
            tokens = list(visitor.prefix.tokens(0, visitor.done))
            if swapped.place is SwapPlace.HOST and self.rng.random() < 0.3 and swapped.leases:
                self.world.seen["swapped out on storage"] += self.world.manager.swapped.to_storage(swapped, tokens)
            elif swapped.place is SwapPlace.STORED:
                self._fetch(swapped, tokens)

    def _fetch(self, swapped: SwappedState, tokens: list[int]) -> None:
        self.world.disturbed = True
        with suppress(CapacityError):
            self.world.manager.swapped.from_storage(swapped, tokens)

    def resume(self) -> None:
        """Begin to bring a retracted request back, or take in one that has come."""
        world = self.world
        self._take_in()
        for _, swapped in self.away:
            world.manager.swapped.settle(swapped)
        assert all(swapped.place is not SwapPlace.LOST for _, swapped in self.away)
        ready = [entry for entry in self.away if entry[1].place is SwapPlace.HOST]
        if not ready:
            return
        visitor, swapped = self.rng.choice(ready)
        before = world.manager.supply.counters["pages_evicted"]
        returning = world.manager.swapped.swap_in(swapped, len(visitor.prefix) * PAGE_TOKENS)
        world.look(before)
        if returning is None:
            return
        world.seen["resumed beside the tree's own pages"] += returning.allocation.depth > 0
        self.away.remove((visitor, swapped))
        visitor.allocation = returning.allocation
        world.manager.launch()
        self.coming.append((visitor, returning))

    def _take_in(self) -> None:
        world = self.world
        world.poll()
        for entry in [
            e for e in self.coming if e[1].restored.done and world.manager.allocations.ready(e[1].allocation)
        ]:
            self.coming.remove(entry)
            visitor, returning = entry
            assert returning.restored.complete, returning.restored.damage
            world.manager.swapped.drop(returning.swapped)
            world.visitors.append(visitor)
            world.seen["resumed"] += 1

    def bring_home(self) -> None:
        """Everyone who is coming arrives; those who are still away are given up."""
        away, self.away = self.away, []
        for _, swapped in away:
            self.world.manager.swapped.drop(swapped)
        self.adversarial.settle()
        if self.world.queue is not None:
            self.world.queue.run_all(self.rng)
        self._take_in()
        assert not self.coming

    def storage(self) -> None:
        queue = self.world.queue
        assert queue is not None
        for _ in range(self.rng.randint(0, 4)):
            queue.run_next(self.rng)

    def poll(self) -> None:
        self.world.poll()

    def device(self) -> None:
        self.adversarial.run_some()

    def time(self) -> None:
        self.world.clock.advance(self.rng.random() * 0.01)

    def evict(self) -> None:
        pool = self.rng.choice(list(self.world.spec.by_name))
        self.world.evict(self.rng.choice([Tier.DEVICE, Tier.DEVICE, Tier.HOST]), pool, self.rng.choice([1, 2, 100]))


_WEIGHTS: dict[Callable[[Schedule], None], int] = {
    Schedule.arrive: 5,
    Schedule.go_on: 20,
    Schedule.send: 3,
    Schedule.stop: 1,
    Schedule.retract: 2,
    Schedule.resume: 3,
    Schedule.shelve: 2,
    Schedule.storage: 3,
    Schedule.poll: 2,
    Schedule.device: 2,
    Schedule.time: 1,
    Schedule.evict: 3,
}


def play(seed: int) -> Counter[str]:
    """Raises an AssertionError that says how to replay the seed, when anything at all goes wrong."""
    try:
        return Schedule(seed).run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}: {error}\nreplay it with: .venv/bin/python -m tests.support.cache_random_schedule {seed}"
        ) from error


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        schedule = Schedule(seed)
        print(f"seed {seed}: {schedule.name}, {schedule.settings}")
        try:
            print(dict(schedule.run()))
        finally:
            print("\n".join(schedule.log))
            print("operations, as they ran: " + ", ".join(schedule.adversarial.trace))


if __name__ == "__main__":
    main()
