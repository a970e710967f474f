"""Rooms in every order that can happen, against what a plain model says must have arrived.

A seed decides: rooms open (the writer sometimes late), chunks of any pools are written or not, either side gives up,
requests end early, bytes rot, the clock jumps, each side polls when it likes, and the device runs sends when it likes.
Whatever happened, three things hold: who arrives has exactly the bytes that were sealed; what belongs to somebody is
never written by anybody else, not even by the writer of a room that was given up; and in the end everything is back.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.support.pool_sets import entry
from tests.support.room_ends import Ends, Prompt
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import DEVICE, DONE, spans
from twinpool.cache.memory.kv_cache_spec import due
from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.errors import CapacityError, ErrorKind, WireError
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef
from twinpool.transfer.rooms.room_states import ExpectedPrompt, HandoverFailed, PromptAnswered, PromptArrived

Bytes = dict[tuple[str, int], list[bytes]]


@dataclass(eq=False)
class Hand:
    """One room as both sides are told to see it."""

    prompt: Prompt
    held: Mapping[str, set[int]]
    lacks: Mapping[str, range]
    sealed: Bytes
    """What was sealed, by pool and number."""
    ready: dict[str, int]
    opened: bool = False
    written: bool = False
    finished: bool = False
    given_up: bool = False
    rotten: bool = False


@dataclass(eq=False)
class Running:
    """What arrived and is in use."""

    leases: Mapping[str, Lease]
    bytes: Bytes


@dataclass(eq=False)
class Chaos:
    both: Ends
    device: AdversarialDevice
    random: random.Random
    hands: list[Hand] = field(default_factory=list)
    """Rooms that one side at least still has, or has yet to hear of."""
    ever: dict[RoomId, Hand] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    """How often what happened."""

    def step(self) -> None:
        actions = {
            self.open: 4, self.late_open: 4, self.write: 12, self.seal: 6, self.give_up: 2, self.fail: 1,
            self.finish: 1, self.rot: 2, self.retire: 2, self.hear_writer: 8, self.hear_reader: 8, self.time_passes: 1,
            self.device_runs: 3,
        }  # fmt: skip
        (action,) = self.random.choices(list(actions), list(actions.values()))
        action()
        self.both.pass_time()
        assert self.both.sender.check() == self.both.receiver.check() == []

    # ------------------------------------------------------------ the reader

    def open(self) -> None:
        both = self.both
        positions = self.random.randint(1, 30)
        try:
            prompt = both.prompt(positions)
        except CapacityError:
            return
        wanted = due(both.spec, positions)
        held = {pool: {n for n in numbers if self.random.random() < 0.3} for pool, numbers in wanted.items()}
        held["full"] = set(wanted["full"][: self.random.randrange(len(wanted["full"]) + 1)])
        writer = PeerRef(WorkerName("prefill-0"), Incarnation(1), both.sender.control)
        expected = ExpectedPrompt(prompt.keys, positions)
        lacks, leases = both.receiver.missing(expected, held), {}
        try:
            for pool, numbers in lacks.items():
                leases[pool] = both.target.allocators[pool].lease(len(numbers) + self.random.randrange(2), "a room")
        except CapacityError:
            granted = False
        else:
            both.receiver.open(prompt.room, writer, expected)
            granted = both.receiver.grant(prompt.room, leases, held)
            if not granted:
                both.receiver.abort(prompt.room, "no slot")
        if not granted:
            for lease in [*leases.values(), *prompt.leases.values()]:
                lease.release()
            return
        self.device.touch("compute", writes=spans(DEVICE, {p: r.indices for p, r in prompt.runs.items()}))
        sealed = {
            (pool, number): entry(both.source, pool, index)
            for pool, run in prompt.runs.items()
            for number, index in zip(run.numbers, run.indices, strict=True)
        }
        ready = {pool: run.first for pool, run in prompt.runs.items()}
        hand = self.ever[prompt.room] = Hand(prompt, held, lacks, sealed, ready)
        self.hands.append(hand)
        self.seen["opened"] += 1

    def give_up(self) -> None:
        if self.hands:
            hand = self.random.choice(self.hands)
            self.both.receiver.abort(hand.prompt.room, "cancelled")
            hand.given_up = True
            self.seen["given up"] += 1

    def retire(self) -> None:
        """A running request ends: nobody has written to what was its own."""
        if self.running:
            running = self.running.pop(self.random.randrange(len(self.running)))
            assert self._image(running.leases) == running.bytes, "somebody wrote to what a request owns"
            for lease in running.leases.values():
                lease.release()

    def hear_reader(self) -> None:
        for outcome in self.both.receiver.poll():
            hand = self.ever[outcome.room]
            self.seen[type(outcome).__name__] += 1
            if isinstance(outcome, PromptArrived):
                assert hand.written, "arrived before it was sent"
                self._start(hand, outcome)
            elif isinstance(outcome, PromptAnswered):
                assert hand.finished
            else:
                assert isinstance(outcome, HandoverFailed)
                assert not hand.given_up
                assert hand.rotten or outcome.kind is not ErrorKind.DAMAGED, outcome.message

    def _start(self, hand: Hand, arrived: PromptArrived) -> None:
        for pool, numbers in hand.lacks.items():
            for number, index in zip(numbers, arrived.leases[pool].indices, strict=False):
                assert entry(self.both.target, pool, index) == hand.sealed[pool, number], (pool, number)
        if hand.given_up:
            arrived.release()
        else:
            self.running.append(Running(arrived.leases, self._image(arrived.leases)))

    def _image(self, leases: Mapping[str, Lease]) -> Bytes:
        return {(p, i): entry(self.both.target, p, i) for p, lease in leases.items() for i in lease.indices}

    # ------------------------------------------------------------ the writer

    def late_open(self) -> None:
        for hand in self.hands:
            if not hand.opened:
                hand.opened = True
                try:
                    self.both.sender.open(hand.prompt.room, PeerRef(WorkerName("decode-0"), Incarnation(1), ""))
                except WireError:
                    assert hand.prompt.room not in self.both.sender_rooms
                return

    def _granted(self) -> Hand | None:
        hands = [h for h in self.hands if not h.written and self.both.sender.granted(h.prompt.room)]
        return self.random.choice(hands) if hands else None

    def write(self) -> None:
        hand = self._granted()
        if hand is not None:
            parts = {}
            for pool, run in hand.prompt.runs.items():
                start = hand.ready[pool]
                hand.ready[pool] = min(run.numbers.stop, start + self.random.randrange(4))
                parts[pool] = hand.prompt.part(pool, range(start, hand.ready[pool]))
            self.both.sender.write(hand.prompt.room, parts, (DONE,))

    def seal(self) -> None:
        """The rest is written, and the metadata; the writer lets go of its pages at once."""
        hand = self._granted()
        if hand is not None:
            rest = {p: hand.prompt.part(p, range(hand.ready[p], r.numbers.stop)) for p, r in hand.prompt.runs.items()}
            self.both.sender.write(hand.prompt.room, rest, (DONE,))
            try:
                self.both.seal(hand.prompt)
            except WireError as error:  # A write has failed meanwhile.
                self.both.sender.fail(hand.prompt.room, ErrorKind.WORKER, str(error))
                self.seen["not sealed"] += 1
            else:
                hand.written = True
            self._let_go(hand)

    def fail(self) -> None:
        hand = self._granted()
        if hand is not None:
            self.both.sender.fail(hand.prompt.room, ErrorKind.WORKER, "a fault")
            self._let_go(hand)

    def finish(self) -> None:
        hand = self._granted()
        if hand is not None:
            self.both.sender.finish(hand.prompt.room)
            hand.finished = True
            self._let_go(hand)

    def rot(self) -> None:
        """A byte of sealed state goes bad at the writer, before or after it was sent."""
        hand = self._granted()
        if hand is not None:
            pool, run = self.random.choice(list(hand.prompt.runs.items()))
            if run.indices:
                buffer = self.random.choice(self.both.source.layout.buffers[pool])
                index = self.random.choice(run.indices)
                self.both.source.region[buffer.offset(0, index)] ^= 0x10
                hand.rotten = True
                self.seen["rotten"] += 1

    def hear_writer(self) -> None:
        self.both.sender.poll()
        for hand in self.hands:
            if hand.opened and hand.prompt.room not in self.both.sender_rooms:
                self._let_go(hand)
        rooms = {*self.both.sender_rooms, *self.both.receiver_rooms}
        self.hands = [h for h in self.hands if not h.opened or h.prompt.room in rooms]

    def _let_go(self, hand: Hand) -> None:
        for lease in hand.prompt.leases.values():
            lease.release()

    # ------------------------------------------------------------ the world

    def time_passes(self) -> None:
        self.both.clock.advance(self.random.choice([0.1, 5.0, 65.0]))

    def device_runs(self) -> None:
        self.device.run_some()

    def end(self) -> None:
        """Everybody stops; then nothing may be left."""
        while any(not hand.opened for hand in self.hands):
            self.late_open()
        for hand in self.hands:
            self.both.receiver.abort(hand.prompt.room, "the end")
            hand.given_up = True
        self.device.settle()
        both = self.both

        end = time.monotonic() + 60
        while both.receiver.rooms or both.sender.rooms:
            assert time.monotonic() < end, f"still there: {both.receiver_rooms} and {both.sender_rooms}"
            self.hear_writer()
            self.hear_reader()
            if not both.receiver.rooms:
                # Those that decode gave up before they ever met: a prefill's deadline ends them.
                for hand in self.hands:
                    both.sender.fail(hand.prompt.room, ErrorKind.DEADLINE, "nobody came for it")
            both.waiter.wait(0.005)
        for hand in self.ever.values():
            self._let_go(hand)
        while self.running:
            self.retire()
        both.quiet()
        # What a write still reads comes back when it is complete, whatever became of its room.
        allocators = both.source.allocators.values()
        both.until(lambda: all(a.free == a.total for a in allocators), "every page at the writer")


def play(both: Ends, device: AdversarialDevice, seed: int, steps: int) -> Counter[str]:
    """Returns how often what happened."""
    chaos = Chaos(both, device, random.Random(seed))
    for _ in range(steps):
        chaos.step()
    chaos.end()
    chaos.seen["damaged"] = both.receiver.damage.total()
    return chaos.seen
