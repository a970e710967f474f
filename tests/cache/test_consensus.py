"""The ranks of a seat in one process, under a seeded scheduler and a manual clock."""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cache.consensus import NO_LIMIT, NOT_YET, Ballot, Decision, Findings, LocalGroup
from contracts.clock import ManualClock, SystemClock
from contracts.errors import CapacityError, PeerDead, RanksDisagree

AHEAD = 3


@dataclass(frozen=True)
class Plan:
    settled: int
    opens: tuple[str, ...]
    closes: tuple[str, ...]


@dataclass
class Rank:
    """The loop of a rank, cut into turns that never wait."""

    ballot: Ballot
    find: Callable[[str], int]
    step: int = 0
    planned: bool = False
    decided: list[tuple[int, Decision]] = field(default_factory=list)
    dead: bool = False


class Seat:
    """Ranks that follow the plans of rank 0; each rank finds things out at its own pace."""

    def __init__(self, size: int, seed: int, keys: int = 12) -> None:
        self.rng, self.clock, self.size = random.Random(seed), ManualClock(), size
        self.group = LocalGroup(size)
        self.todo = [f"key-{i}" for i in range(keys)]
        self.truth = {key: [self.rng.choice([0, 5, 9, NO_LIMIT]) for _ in range(size)] for key in self.todo}
        self.plans: list[Plan] = []
        self.lead = 0
        self.ranks = [
            Rank(
                Ballot(member, self.clock, capacity=4, ahead=AHEAD, deadline_s=10.0),
                lambda key, r=member.rank: self.truth[key][r] if self.rng.random() < 0.4 else NOT_YET,  # type: ignore[misc]
            )
            for member in self.group.members
        ]

    def turn(self, number: int) -> None:
        rank = self.ranks[number]
        if number == 0 and rank.step == len(self.plans):
            self.plans.append(self.plan(rank.ballot))
        if rank.step == len(self.plans):
            rank.ballot.poll(waiting=True)
            return
        if not rank.planned and not self.apply(rank, self.plans[rank.step]):
            return
        for key in rank.ballot.keys:
            if (value := rank.find(key)) != NOT_YET:
                rank.ballot.propose(key, value)
        if rank.ballot.exchange().posted:
            rank.step, rank.planned = rank.step + 1, False
            self.lead = max(self.lead, rank.step - min(r.step for r in self.ranks if not r.dead))

    def plan(self, leader: Ballot) -> Plan:
        closes = tuple(d.key for _, d in self.ranks[0].decided if d.key in leader.keys)
        room = 4 - len(leader.keys) + len(closes)
        count = min(self.rng.randrange(3), room, len(self.todo))
        opens, self.todo = tuple(self.todo[:count]), self.todo[count:]
        return Plan(leader.completed, opens, closes)

    def apply(self, rank: Rank, plan: Plan) -> bool:
        decisions = rank.ballot.take(plan.settled)
        if decisions is None:
            return False
        rank.decided += [(rank.step, decision) for decision in decisions]
        for key in plan.closes:
            rank.ballot.close(key)
        for key in plan.opens:
            rank.ballot.open(key)
        rank.planned = True
        return True

    @property
    def done(self) -> bool:
        return all(len(rank.decided) == len(self.truth) for rank in self.ranks)

    def run(self, weights: list[float], turns: int = 20_000) -> None:
        for _ in range(turns):
            if self.done:
                return
            self.turn(self.rng.choices(range(self.size), weights)[0])
        raise AssertionError("not everything was decided")


@pytest.mark.parametrize("size", [2, 4])
def test_c3_every_rank_decides_the_same_at_the_same_step(size: int) -> None:
    for seed in range(25):
        seat = Seat(size, seed)
        seat.run([1.0] * size)
        for rank in seat.ranks[1:]:
            assert rank.decided == seat.ranks[0].decided, f"seed {seed}"
        assert {d.key: d.value for _, d in seat.ranks[0].decided} == {k: min(v) for k, v in seat.truth.items()}


@pytest.mark.parametrize("slow", [0, -1])
@pytest.mark.parametrize("size", [2, 4])
def test_a_slow_rank_holds_the_others_back_by_no_more_than_the_lead_allowed(size: int, slow: int) -> None:
    for seed in range(10):
        seat = Seat(size, seed)
        weights = [1.0] * size
        weights[slow] = 0.02
        seat.run(weights)
        assert seat.lead <= AHEAD
        assert all(rank.decided == seat.ranks[0].decided for rank in seat.ranks)


@pytest.mark.parametrize("dying", [0, -1])
@pytest.mark.parametrize("size", [2, 4])
def test_c3_a_dead_rank_ends_the_rounds_of_all_others_by_the_deadline(size: int, dying: int) -> None:
    for seed in range(10):
        seat = Seat(size, seed)
        for _ in range(seat.rng.randrange(5, 100)):
            seat.turn(seat.rng.randrange(size))
        seat.ranks[dying].dead = True
        living = [number for number in range(size) if not seat.ranks[number].dead]
        for _ in range(200):
            seat.turn(seat.rng.choice(living))
        seat.clock.advance(9.0)
        for number in living:
            seat.turn(number)
        seat.clock.advance(10.0)
        for number in living:
            with pytest.raises(PeerDead):
                seat.turn(number)
            with pytest.raises(PeerDead):
                seat.ranks[number].ballot.exchange()


def pair(**more: float) -> tuple[Ballot, Ballot, ManualClock]:
    clock, group = ManualClock(), LocalGroup(2)
    deadline_s = more.get("deadline_s", 10.0)
    one, two = (Ballot(member, clock, capacity=4, ahead=AHEAD, deadline_s=deadline_s) for member in group.members)
    for ballot in (one, two):
        ballot.open("key")
    return one, two, clock


def agree(one: Ballot, two: Ballot) -> tuple[Decision, ...]:
    one.exchange()
    two.exchange()
    decisions = one.take(two.completed)
    assert decisions is not None
    assert decisions == two.take(two.completed)
    return decisions


def test_c3_every_rank_enters_every_round_with_nothing_to_say() -> None:
    one, two, _ = pair()
    one.propose("key", 7)
    assert agree(one, two) == (), "a round completes though a rank has said nothing"
    two.propose("key", 9)
    assert agree(one, two) == (Decision("key", 7, 2),)
    assert agree(one, two) == (), "a key is decided once"


def test_c3_the_watchdog_counts_from_the_posting_of_the_round() -> None:
    one, two, clock = pair()
    clock.advance(100.0)
    one.exchange()
    clock.advance(9.0)
    one.poll()
    clock.advance(1.0)
    with pytest.raises(PeerDead, match=r"round 1 has been open for 10.0 s"):
        one.poll()
    with pytest.raises(PeerDead, match="has left"):
        two.exchange()


def test_c5_a_rank_that_waits_for_a_plan_is_ended_by_the_leaders_silence() -> None:
    one, two, clock = pair()
    agree(one, two)
    clock.advance(10.0)
    one.poll()
    with pytest.raises(PeerDead, match="no plan"):
        one.poll(waiting=True)


def test_c3_nobody_waits_while_all_ranks_pause() -> None:
    one, two, clock = pair()
    agree(one, two)
    clock.advance(1000.0)
    assert agree(one, two) == ()


def test_c2_nothing_found_nothing_to_do_and_not_yet_are_three_things() -> None:
    one, two, _ = pair()
    for ballot in (one, two):
        ballot.open("zero")
        ballot.open("none")
    one.propose("key", 0)
    one.propose("zero", 0)
    two.propose("zero", NO_LIMIT)
    for ballot in (one, two):
        ballot.propose("none", NO_LIMIT)
    zero, none = agree(one, two)
    assert (zero.key, zero.value, zero.nothing_to_do) == ("zero", 0, False)
    assert (none.key, none.nothing_to_do) == ("none", True)


def test_c1_a_rank_has_found_nothing_before_all_its_pools_have() -> None:
    found = Findings(["full", "window", "state"])
    found.say("full", 8)
    found.say("window", 4)
    assert found.value == NOT_YET
    one, two, _ = pair()
    one.propose("key", found.value)
    two.propose("key", 6)
    assert agree(one, two) == (), "done means that every pool of every rank is done"
    found.say("state", NO_LIMIT)
    one.propose("key", found.value)
    assert agree(one, two) == (Decision("key", 4, 2),)
    with pytest.raises(KeyError, match="sidecar"):
        found.say("sidecar", 1)


def test_c2_a_rank_without_pools_has_nothing_to_do() -> None:
    assert Findings([]).value == NO_LIMIT
    found = Findings(["full"])
    found.say("full", NO_LIMIT)
    assert found.value == NO_LIMIT


def test_a_result_that_a_rank_has_not_seen_yet_is_not_taken() -> None:
    one, two, _ = pair()
    one.exchange()
    assert one.take(1) is None
    two.exchange()
    assert one.take(1) == ()


def test_a_rank_runs_ahead_by_its_limit_and_then_posts_nothing() -> None:
    one, two, _ = pair()
    assert [one.exchange().posted for _ in range(AHEAD + 2)] == [True] * AHEAD + [False] * 2
    two.exchange()
    assert one.exchange().posted, "what is complete does not count, settled or not"
    assert not one.exchange().posted


def test_ranks_that_opened_other_keys_are_found_in_the_round() -> None:
    one, two, _ = pair()
    one.open("a")
    two.open("b")
    one.exchange()
    with pytest.raises(RanksDisagree, match=r"round 1.* other keys"):
        two.exchange()
    with pytest.raises(RanksDisagree):
        one.exchange()


def test_ranks_in_other_rounds_are_found_in_the_round() -> None:
    group = LocalGroup(2)
    group.post(0, [0, 0, 0, 0] + [NO_LIMIT] * 256)  # a round that this rank's ballot knows nothing of
    with pytest.raises(RanksDisagree, match="other rounds"):
        Ballot(group.members[1], ManualClock()).exchange()


def test_a_key_that_was_closed_and_opened_again_does_not_get_the_old_decision() -> None:
    one, two, _ = pair()
    for ballot in (one, two):
        ballot.propose("key", 3)
        ballot.exchange()
    for ballot in (one, two):
        ballot.close("key")
        ballot.open("key")
        assert ballot.take(1) == ()
    assert one.propose("key", 5)
    assert two.propose("key", 6)
    assert agree(one, two) == (Decision("key", 5, 2),)


def test_a_late_finding_is_ordinary_and_a_wrong_one_is_refused() -> None:
    one, _, _ = pair()
    one.close("key")
    assert not one.propose("key", 3)
    one.open("key")
    with pytest.raises(ValueError, match="0 or more"):
        one.propose("key", -1)
    with pytest.raises(ValueError, match="open already"):
        one.open("key")


def test_a_full_ballot_refuses_a_key_and_keeps_the_rest() -> None:
    one, _, _ = pair()
    for key in "abc":
        one.open(key)
    with pytest.raises(CapacityError, match="4 keys are open"):
        one.open("d")
    assert one.keys == ("key", "a", "b", "c")


def test_one_rank_decides_at_once() -> None:
    ballot = Ballot(LocalGroup(1).members[0], ManualClock())
    ballot.open("key")
    ballot.propose("key", 3)
    assert ballot.exchange().completed == 1
    assert ballot.take(1) == (Decision("key", 3, 1),)


def test_leaving_ends_the_group_for_all() -> None:
    one, two, _ = pair()
    one.leave()
    one.leave()
    for ballot in (one, two):
        with pytest.raises(PeerDead):
            ballot.exchange()


def test_ranks_may_be_threads() -> None:
    group = LocalGroup(4)
    decided: list[list[Decision]] = [[] for _ in range(4)]

    def work(rank: int) -> None:
        ballot = Ballot(group.members[rank], SystemClock(), deadline_s=60.0)
        for number in range(20):
            ballot.open(f"k{number}")
            ballot.propose(f"k{number}", number + rank)
            assert ballot.exchange().posted
            while (taken := ballot.take(number + 1)) is None:
                os.sched_yield()
            decided[rank] += taken

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert decided == [[Decision(f"k{n}", n, n + 1) for n in range(20)]] * 4
