"""The followers of a worker: processes of their own that carry out their leader's orders, one by one and late.

Each has `cache.pool.tp_ranks.FollowerPools`, `transfer.planes.tp_plane.FollowerLinks` and
`cache.storage.page_store.FollowerPageStore`, as in `cluster.worker_process.follower_process`; orders travel as
bytes. Only the channel is a model: an order reaches each rank some time after it was sent, and is answered some time
later; a leader that waits for an answer gets it at once, and all earlier orders are carried out first. The death of a
rank ends the worker.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinpool.cache.arena.arena import Arena
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.pool.tp_ranks import FollowerPools, FollowerSteps
from twinpool.cache.storage.page_store import FollowerPageStore
from twinpool.cluster.assembly.build_parts import rebind
from twinpool.contracts.errors import PeerDead
from twinpool.contracts.messages.rank_order_codec import decode, encode
from twinpool.contracts.messages.rank_orders import (
    BindArenas,
    CheckPages,
    CloseLink,
    CopyPages,
    DescribeMemory,
    DigestPages,
    FetchPages,
    FindPages,
    FollowerNotice,
    MarkStep,
    OpenLink,
    Order,
    PermitRoom,
    PostWrite,
    PutPages,
    RevokeRoom,
    SeverLink,
    SeverPeer,
    ZeroPages,
)
from twinpool.sim.fabric.virtual_time import SimProcess, VirtualTime
from twinpool.transfer.planes.tp_plane import FollowerLinks

LATE_S = 0.002
"""Seconds after which an order is carried out at the latest; at once if its leader waits for it."""


@dataclass(eq=False)
class SimAnswers:
    """Implements `contracts.messages.rank_order_codec.OrderAnswers`."""

    line: SimFollowers
    wanted: int
    answers: dict[int, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        if len(self.answers) < self.wanted:
            self.line.look()
        return len(self.answers) == self.wanted

    def wait(self) -> list[Any]:
        self.line.catch_up()
        if not self.done:
            self.line.settle()
        assert self.done, "what only storage can answer isn't waited for"
        return [self.answers[rank] for rank in sorted(self.answers)]


@dataclass(eq=False)
class SimRank:
    """One follower."""

    number: int
    process: SimProcess
    pools: PoolSet
    state: FollowerPools
    steps: FollowerSteps
    links: FollowerLinks
    storage: FollowerPageStore | None
    arena: Arena | None
    orders: deque[tuple[bytes, SimAnswers | None]] = field(default_factory=deque)
    open: dict[int, SimAnswers] = field(default_factory=dict)
    """The answers that storage and links still owe, by sequence number."""
    follower_notices: list[FollowerNotice] = field(default_factory=list)
    asked: int = 0

    def carry_out(self) -> None:
        """Carry out all orders that have been sent so far."""
        while self.orders:
            data, asked = self.orders.popleft()
            self._obey(decode(data), asked)

    def _obey(self, order: Order, asked: SimAnswers | None) -> None:
        answer: Any = None
        match order:
            case FindPages() | FetchPages() | PutPages():
                assert self.storage is not None, "a leader without storage asks nothing of it"
                assert asked is not None
                self.asked += 1
                self.open[self.asked] = asked
                self.storage.carry_out(self.asked, order)
                return
            case PostWrite():
                assert asked is not None
                self.asked += 1
                self.open[self.asked] = asked
                self.links.post(self.asked, order)
                return
            case MarkStep():
                self.steps.expect(order)
            case ZeroPages() | CopyPages() | DigestPages() | CheckPages():
                answer = self.state.carry_out(order)
            case DescribeMemory() | SeverPeer() | OpenLink() | CloseLink() | SeverLink() | PermitRoom() | RevokeRoom():
                answer = self.links.carry_out(order)
            case BindArenas():
                answer = rebind(self.arena, order)
            case _:
                raise AssertionError(f"{type(order).__name__} isn't for a simulated rank")
        if asked is not None:
            asked.answers[self.number] = answer

    def look(self) -> bool:
        """Poll links and storage; returns whether there is something new for the leader."""
        before = len(self.follower_notices), len(self.open)
        for sequence, answer in self.storage.answers() if self.storage is not None else ():
            self.open.pop(sequence).answers[self.number] = answer
        self._answered(self.links.answers())
        self.follower_notices += self.links.poll()
        return before != (len(self.follower_notices), len(self.open))

    def settle(self) -> None:
        """Wait for the writes that are under way."""
        self._answered(self.links.settle())

    def _answered(self, answers: Sequence[tuple[int, bool]]) -> None:
        for sequence, done in answers:
            self.open.pop(sequence).answers[self.number] = done


class SimFollowers:
    """Implements `contracts.messages.rank_order_codec.OrderChannel` for one leader."""

    def __init__(self, agenda: VirtualTime, leader: SimProcess, rng: random.Random, wake: Callable[[], None]) -> None:
        self.ranks: list[SimRank] = []
        self._agenda, self._rng, self._wake = agenda, rng, wake
        self.late_orders = 0
        """How many orders were carried out without the leader waiting for them."""
        leader.on_death(self._orphaned)

    @property
    def size(self) -> int:
        return len(self.ranks) + 1

    def send(self, order: Order) -> None:
        self._send(order, None)

    def ask(self, order: Order) -> SimAnswers:
        asked = SimAnswers(self, len(self.ranks))
        self._send(order, asked)
        return asked

    def heard(self) -> list[tuple[int, FollowerNotice]]:
        out: list[tuple[int, FollowerNotice]] = []
        for rank in self.ranks:
            rank.look()
            out += [(rank.number, one) for one in rank.follower_notices]
            rank.follower_notices.clear()
        return out

    def catch_up(self) -> None:
        """Make all ranks carry out their orders now. Raises `PeerDead` where a rank is dead."""
        for rank in self.ranks:
            if not rank.process.alive:
                raise PeerDead(f"rank {rank.number} of this worker (pid {rank.process.pid}) died")
            rank.carry_out()

    def look(self) -> None:
        """Take in the answers of ranks that are over with something."""
        for rank in self.ranks:
            if rank.process.alive:
                rank.look()

    def settle(self) -> None:
        """Make all ranks wait for the writes that are under way."""
        for rank in self.ranks:
            rank.settle()

    def stepped(self) -> None:
        """A step with marks is computed: all of its layers lie in the pools of all ranks."""
        for rank in self.ranks:
            rank.steps.run(lambda: None)
            self.turn(rank.number)

    def _send(self, order: Order, asked: SimAnswers | None) -> None:
        data = encode(order)
        for rank in self.ranks:
            if not rank.process.alive:
                raise PeerDead(f"rank {rank.number} of this worker can't be reached")
            rank.orders.append((data, asked))
            self.turn(rank.number)

    def turn(self, number: int) -> None:
        """Have a rank take a turn soon, since it has orders or arrivals."""
        rank = self.ranks[number - 1]
        rank.process.later(LATE_S * self._rng.random(), lambda: self._turned(rank))

    def _turned(self, rank: SimRank) -> None:
        self.late_orders += len(rank.orders)
        answered = any(asked is not None for _, asked in rank.orders)
        # Orders come first: arriving writes are stored only for rooms that orders permit.
        rank.carry_out()
        if rank.look() or answered:
            self._wake()

    def _orphaned(self) -> None:
        """End the followers a little after their leader died, as each sees it."""
        for rank in self.ranks:
            self._agenda.after(0.01 * self._rng.random(), rank.process.die)
