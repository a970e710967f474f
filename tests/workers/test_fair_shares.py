"""The virtual token counters of tenants: what each gets beside the others, by what was given to it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.worker.fair_shares import MAX_AHEAD, FairShares

TENANTS = "abcd"


def served(shares: FairShares, active: dict[str, int], tokens: int, quantum: int = 1) -> dict[str, int]:
    """Give `tokens` tokens to tenants that could all use them."""
    shares.follow(active)
    given_ = shares.divide(tokens, dict.fromkeys(active, tokens), quantum)
    for tenant, count in given_.items():
        shares.charge(tenant, active[tenant], count)
    return given_


@given(
    st.lists(
        st.tuples(
            st.integers(1, 100),
            st.dictionaries(st.sampled_from(TENANTS), st.integers(1, 60), min_size=1),
        ),
        max_size=40,
    ),
    st.fixed_dictionaries({tenant: st.integers(1, 5) for tenant in TENANTS}),
    st.integers(1, 8),
)
def test_who_always_wants_gets_as_much_by_its_weight_as_any_other_and_nothing_is_left_that_anybody_wants(
    steps: list[tuple[int, dict[str, int]]], weights: dict[str, int], quantum: int
) -> None:
    """While both of two tenants want more than they get, neither gets ahead of the other by more than one hand-out,
    beyond what it was behind when that began: nothing adds up, whatever the steps."""
    shares, total = FairShares(), Counter[str]()
    began: dict[tuple[str, str], tuple[float, float]] = {}
    """By pair, while both want more: how far the first was behind then, and how far ahead in what it had been given."""
    for budget, wanted in steps:
        shares.follow({tenant: weights[tenant] for tenant in wanted})
        for a, b in [(a, b) for a in TENANTS for b in TENANTS if a != b]:
            if {a, b} <= wanted.keys():
                behind = max(0.0, shares.counter(b) - shares.counter(a))
                began.setdefault((a, b), (behind, total[a] / weights[a] - total[b] / weights[b]))
            else:
                began.pop((a, b), None)
        parts = shares.divide(budget, wanted, quantum)
        assert all(0 <= parts[tenant] <= wanted[tenant] for tenant in wanted)
        assert sum(parts.values()) == min(budget, sum(wanted.values()))
        for tenant, count in parts.items():
            shares.charge(tenant, weights[tenant], count)
            total[tenant] += count
        sated = {tenant for tenant, count in parts.items() if count == wanted[tenant]}
        began = {pair: at for pair, at in began.items() if not sated & set(pair)}
        for (a, b), (behind, ahead) in began.items():
            gained = total[a] / weights[a] - total[b] / weights[b] - ahead
            assert gained <= behind + quantum / weights[a] + 1e-9


def test_tokens_go_by_weight() -> None:
    shares, total = FairShares(), Counter[str]()
    for _ in range(30):
        total.update(served(shares, {"a": 3, "b": 1}, 8, quantum=4))
    assert total == {"a": 180, "b": 60}


def test_who_was_idle_has_saved_nothing_up() -> None:
    shares = FairShares()
    served(shares, {"busy": 1, "idle": 1}, 10)
    served(shares, {"busy": 1}, 1000)
    assert served(shares, {"idle": 1, "busy": 1}, 10) == {"idle": 5, "busy": 5}


def test_with_a_credit_it_has_saved_up_that_whatever_its_weight_and_once() -> None:
    shares = FairShares(credit=30)
    served(shares, {"busy": 1}, 1000)
    both = {"light": 1, "heavy": 3, "busy": 1}
    shares.follow(both)
    assert [shares.credit(tenant) for tenant in both] == [30, 30, 0]
    assert served(shares, both, 60) == {"light": 30, "heavy": 30, "busy": 0}
    assert [shares.credit(tenant) for tenant in both] == [0, 0, 0]
    assert served(shares, both, 50) == {"light": 10, "heavy": 30, "busy": 10}
    served(shares, {"busy": 1}, 1)
    assert served(shares, both, 50) != {"light": 25, "heavy": 25, "busy": 0}, "who goes and comes back at once has none"
    served(shares, {"busy": 1}, 1000)
    assert served(shares, both, 60) == {"light": 30, "heavy": 30, "busy": 0}


def test_who_comes_and_goes_gets_no_more_than_its_share_and_the_credit_in_all() -> None:
    shares, total = FairShares(credit=30), Counter[str]()
    for turn in range(300):
        total.update(served(shares, {"busy": 1} if turn % 3 == 2 else {"busy": 1, "coming": 1}, 10))
    assert total["coming"] <= total["busy"] + 30


def test_where_all_begin_at_once_none_has_saved_anything_up() -> None:
    shares = FairShares(credit=30)
    assert served(shares, {"a": 1, "b": 3}, 40) == {"a": 10, "b": 30}


def test_who_had_more_than_its_share_pays_for_it_when_it_comes_back_while_others_wait() -> None:
    shares = FairShares()
    served(shares, {"waits": 1}, 10)
    shares.follow({"waits": 1, "greedy": 1})
    shares.charge("greedy", 1, 20)
    shares.follow({"waits": 1})
    assert served(shares, {"waits": 1, "greedy": 1}, 30) == {"waits": 25, "greedy": 5}


def test_when_nobody_has_anything_to_do_all_are_even_and_nothing_is_kept() -> None:
    shares = FairShares()
    served(shares, {"a": 1, "b": 1}, 10)
    shares.charge("a", 1, 500)
    shares.follow({})
    assert len(shares) == 0
    assert served(shares, {"a": 1, "b": 1}, 10) == {"a": 5, "b": 5}


def test_where_all_leave_as_others_come_nobody_is_owed_anything() -> None:
    shares = FairShares()
    served(shares, {"a": 1}, 500)
    assert served(shares, {"b": 1, "c": 1}, 10) == {"b": 5, "c": 5}
    assert served(shares, {"a": 1, "b": 1}, 10) == {"a": 5, "b": 5}


def test_nor_does_anybody_pay_then_for_what_it_had_more_than_another() -> None:
    shares = FairShares()
    shares.follow({"a": 1, "b": 1})
    shares.charge("a", 1, 100)
    shares.charge("b", 1, 40)
    shares.follow({"c": 1})
    assert served(shares, {"a": 1, "b": 1, "c": 1}, 90) == {"a": 30, "b": 30, "c": 30}


def test_whoever_is_idle_and_no_longer_ahead_is_forgotten_and_of_the_others_those_least_ahead() -> None:
    shares = FairShares()
    shares.follow({"waits": 1})
    for number in range(2 * MAX_AHEAD):
        shares.charge(f"t{number}", 1, 1 + number)
    shares.follow({"waits": 1})
    assert len(shares) == MAX_AHEAD + 1
    shares.follow({"waits": 1, f"t{2 * MAX_AHEAD - 1}": 1, "t0": 1})
    assert shares.counter(f"t{2 * MAX_AHEAD - 1}") == 2 * MAX_AHEAD
    assert shares.counter("t0") == 0.0
    shares.charge("waits", 1, 10 * MAX_AHEAD)
    shares.follow({"waits": 1})
    shares.follow({"waits": 1})
    assert len(shares) == 1


def test_what_is_decided_on_counts_before_it_is_computed() -> None:
    shares, ahead = FairShares(), Counter[str]()
    shares.follow({"a": 1, "b": 2})
    order = []
    for name in shares.in_turn({"a": ["a1", "a2", "a3"], "b": ["b1", "b2", "b3"]}, ahead):
        order.append(name)
        ahead[name[0]] += 10
    assert order == ["a1", "b1", "b2", "a2", "b3", "a3"]


@pytest.mark.parametrize("weight", [0, 1])
def test_a_weight_that_is_none_counts_as_one(weight: int) -> None:
    shares = FairShares()
    shares.follow({"a": weight, "b": 1})
    shares.charge("a", weight, 10)
    assert shares.counter("a") == shares.counter("b", 10)
