"""Orders to several followers: each answers in its own time, and an order is carried out when all have."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.wire.instances import full
from twinpool.cluster.ranks import FollowerChannel, LeaderChannel, LeaderSteps, RankSteps
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import PeerDead, WireError
from twinpool.contracts.messages.rank_orders import AwaitReady, DescribeMemory, LinkLost

DEADLINE_S = 30.0


class Passing(ManualClock):
    """A clock by which each look takes so many seconds."""

    each_s = 0.0

    def now(self) -> float:
        self.advance(self.each_s)
        return super().now()


class Ranks:
    """A leader and two followers, in one process."""

    def __init__(self) -> None:
        self.clock, secret = Passing(100.0), secrets.token_hex(32)
        self.leader = LeaderChannel(secret, 3, self.clock, DEADLINE_S)
        self.first, self.second = FollowerChannel(secret, 1), FollowerChannel(secret, 2)
        self.leader.meet(10.0)

    def take(self, follower: FollowerChannel) -> int:
        """The number of the next order that this follower has."""
        item = follower.next(10.0)
        assert item is not None
        return item[0]

    def until_done(self, asked: Any) -> bool:
        """Whether an order is done once all that was answered has come."""
        for _ in range(20):
            if asked.done:
                return True
            self.leader.socket.poll(2)
        return False


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for one in (ranks.first, ranks.second, ranks.leader):
        one.close()


def test_an_order_is_done_when_all_have_answered_and_answers_stand_in_the_order_of_ranks(ranks: Ranks) -> None:
    asked = ranks.leader.ask(DescribeMemory())
    ranks.second.answer(ranks.take(ranks.second), "second")
    assert not ranks.until_done(asked), "one of them is missing"
    ranks.first.answer(ranks.take(ranks.first), "first")
    assert ranks.until_done(asked)
    assert asked.wait() == ["first", "second"]


def test_answers_are_of_the_order_that_they_name_however_they_overtake_each_other(ranks: Ranks) -> None:
    orders = [ranks.leader.ask(AwaitReady()) for _ in range(2)]
    for number, follower in ((1, ranks.first), (2, ranks.second)):
        early, late = ranks.take(follower), ranks.take(follower)
        follower.answer(late, f"late {number}")
        follower.answer(late, f"late {number}")  # Said twice, it is one answer.
        if follower is ranks.second:
            follower.answer(early, f"early {number}")
    assert ranks.until_done(orders[1])
    assert orders[1].wait() == ["late 1", "late 2"]
    assert not ranks.until_done(orders[0]), "the first rank has said nothing of it"
    ranks.first.answer(orders[0].sequence, "early 1")
    assert orders[0].wait() == ["early 1", "early 2"]


def test_who_has_not_answered_in_time_is_named_and_a_late_answer_is_nobodys(ranks: Ranks) -> None:
    asked = ranks.leader.ask(AwaitReady())
    number = ranks.take(ranks.second)
    ranks.first.answer(ranks.take(ranks.first), True)
    while not asked._answers:
        ranks.leader.poll()
    ranks.clock.each_s = DEADLINE_S
    with pytest.raises(PeerDead, match=r"^rank 2 of this worker did not answer within 30 s"):
        asked.wait()
    ranks.clock.each_s = 0.0
    ranks.second.answer(number, True)
    again = ranks.leader.ask(AwaitReady())
    for follower in (ranks.second, ranks.first):
        follower.answer(ranks.take(follower), follower is ranks.first)
    assert again.wait() == [True, False]


def test_what_followers_say_of_themselves_is_told_with_their_rank_between_answers(ranks: Ranks) -> None:
    asked = ranks.leader.ask(AwaitReady())
    lost = full(LinkLost)
    ranks.second.send(lost)
    ranks.second.answer(ranks.take(ranks.second), 2)
    ranks.first.answer(ranks.take(ranks.first), 1)
    assert asked.wait() == [1, 2]
    assert ranks.leader.heard() == [(2, lost)]
    assert ranks.leader.heard() == []


def test_a_step_that_any_rank_begins_is_told_to_all_by_way_of_the_first(ranks: Ranks) -> None:
    leader, first, second = LeaderSteps(ranks.leader), RankSteps(ranks.first), RankSteps(ranks.second)
    assert (leader.begun(), first.begun(), second.begun()) == (0, 0, 0)
    second.begin(1)
    assert ranks.leader.socket.poll(10_000)
    assert leader.begun() == 1
    assert ranks.first.socket.poll(10_000)
    assert first.begun() == 1
    leader.begin(2)
    for follower, steps in ((ranks.first, first), (ranks.second, second)):
        while steps.begun() < 2:
            assert follower.socket.poll(10_000)
    assert leader.begun() == 2
    first.begin(1)  # It says late what all of them know.
    assert ranks.leader.socket.poll(10_000)
    assert leader.begun() == 2


def test_a_data_parallel_rank_carries_out_no_order_of_a_followers(ranks: Ranks) -> None:
    ranks.leader.send(AwaitReady())
    assert ranks.first.socket.poll(10_000)
    with pytest.raises(WireError, match="told of steps alone, not AwaitReady"):
        RankSteps(ranks.first).begun()
