"""Tenants at the prefill scheduler: whatever one floods it with, another's prompts are computed in its fair share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.prefill_parts import PAGE, PrefillParts
from twinpool.contracts.messages.router_commands import Picture
from twinpool.contracts.messages.worker_events import LegNote
from twinpool.engine.layers.picture_encoder import PlacedRows
from twinpool.prefill.request import PrefillPhase, PrefillRequest

CHUNK = 32


class Flood:
    """Tenants that ask for more as their plans say, and what each step computes for them."""

    def __init__(
        self, weights: dict[str, int], pages: int, max_running: int, chunk: int = CHUNK, credit: int = 0
    ) -> None:
        self.parts = PrefillParts(
            pages=pages, chunk_tokens=chunk, max_running=max_running, short_share=0.25, tenant_credit_tokens=credit
        )
        self.weights, self.chunk = weights, chunk
        self.total = Counter[str]()
        self.done: list[str] = []
        self._names = 0

    def ask(self, tenant: str, tokens: int, *, granted: bool = True) -> PrefillRequest:
        self._names += 1
        request = self.parts.ask(f"{tenant}-{self._names}", tokens, tenant=tenant, weight=self.weights.get(tenant, 1))
        if granted:
            self.parts.granted.add(request)
        return request

    def backlog(self) -> Counter[str]:
        return Counter({t: sum(len(r.tokens) - r.launched for r in self.parts.requests if r.submit.tenant == t)
                        for t in {r.submit.tenant for r in self.parts.requests}})  # fmt: skip

    def step(self) -> Counter[str]:
        """Admit, compute a step, and let go what is done; returns the tokens that were computed, by tenant."""
        self.parts.scheduler.admit()
        rows = self.parts.step()
        given_ = Counter[str]()
        for request in self.parts.requests:
            name = str(request.submit.request_id)
            given_[request.submit.tenant] += len(rows.get(name, ()))
            request.committed = request.launched
            if request.launched == len(request.tokens):
                self.done.append(name)
                self.parts.leave(request)
        self.total += given_
        assert self.parts.manager.check() == []
        return given_


@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 90)), max_size=5), min_size=1, max_size=25),
    st.fixed_dictionaries({tenant: st.integers(1, 4) for tenant in "abc"}),
    st.sampled_from((2, 5, 32)),
    st.sampled_from((0, 64)),
)
def test_two_that_wait_all_along_get_the_same_by_weight_up_to_a_constant_and_no_step_is_wasted(
    asked: list[list[tuple[str, int]]], weights: dict[str, int], max_running: int, credit: int
) -> None:
    """The constant is of pages where all prompts fit, and of one prompt and one step where only some can be under
    way, and what is saved up besides: it does not grow with time."""
    flood = Flood(weights, pages=1024, max_running=max_running, credit=credit)
    longest = 90
    most = 4 * PAGE if max_running == 32 else longest + CHUNK
    began: dict[tuple[str, str], float] = {}
    for new in asked + [[]] * 400:
        for tenant, tokens in new:
            if len(flood.parts.requests) < 30:
                flood.ask(tenant, tokens)
        before = flood.backlog()
        if not before:
            began.clear()
            continue
        pairs = [(a, b) for a in before for b in before if a != b]
        lead = {t: flood.total[t] / weights[t] for t in before}
        began = {pair: began.get(pair, lead[pair[0]] - lead[pair[1]]) for pair in pairs}
        given_ = flood.step()
        could = min(CHUNK, sum(before.values()))
        assert sum(given_.values()) > could - PAGE or max_running < 32
        assert sum(given_.values()) > 0
        sated = {t for t in before if given_[t] == before[t]}
        for (a, b), ahead in began.items():
            if not sated & {a, b} and {a, b} <= flood.backlog().keys():
                gained = flood.total[a] / weights[a] - flood.total[b] / weights[b] - ahead
                assert gained <= (2 * most + credit) * (1 / weights[a] + 1 / weights[b])
    assert not flood.backlog(), "nothing starves"


@pytest.mark.parametrize("max_running", [2, 32])
@pytest.mark.parametrize("pages", [64, 1024])
def test_a_short_prompt_is_computed_in_the_next_step_whatever_another_tenant_floods(
    pages: int, max_running: int
) -> None:
    flood = Flood({}, pages=pages, max_running=max_running)
    for _ in range(20):
        flood.ask("flood", 90)
    for _ in range(30):
        flood.ask("flood", 90)
        flood.step()
        short = flood.ask("quiet", CHUNK // 2)
        assert flood.step()["quiet"] == CHUNK // 2
        assert str(short.submit.request_id) in flood.done


def test_without_tenants_it_would_have_waited_for_all_of_them() -> None:
    """The oracle of the test before: the same flood, of the same tenant."""
    flood = Flood({}, pages=64, max_running=2)
    for _ in range(20):
        flood.ask("flood", 90)
    flood.ask("flood", CHUNK // 2)
    flood.step()
    assert flood.step()["flood"] > 0
    assert len(flood.done) == 0


def test_a_long_prompt_that_runs_alone_yields_at_the_next_chunk_and_is_not_stopped() -> None:
    flood = Flood({}, pages=256, max_running=8)
    flood.ask("flood", 400)
    for _ in range(3):
        assert flood.step()["flood"] == CHUNK
    flood.ask("quiet", 400)
    for _ in range(4):
        assert flood.step() == {"flood": CHUNK // 2, "quiet": CHUNK // 2}


def test_what_the_cache_had_of_a_prompt_costs_its_tenant_nothing() -> None:
    flood = Flood({}, pages=1024, max_running=8)
    found = flood.ask("a", 900)
    flood.parts.scheduler.admit()
    found.begin(896)
    flood.ask("b", 400)
    flood.ask("a", 400)
    for _ in range(6):
        flood.step()
    assert "a-1" in flood.done
    assert abs(flood.total["a"] - flood.total["b"]) <= 2 * PAGE


def test_a_tenant_of_twice_the_weight_gets_twice_as_much() -> None:
    flood = Flood({"a": 2, "b": 1}, pages=1024, max_running=32)
    for _ in range(4):
        flood.ask("a", 900)
        flood.ask("b", 900)
    for _ in range(30):
        flood.step()
    assert flood.total["a"] + flood.total["b"] == 30 * CHUNK
    assert abs(flood.total["a"] - 2 * flood.total["b"]) <= 4 * PAGE


def test_a_higher_priority_comes_before_any_fairness_and_counts() -> None:
    """The operator gave it: a tenant's requests have no higher one than its limits say."""
    parts = PrefillParts(pages=256, chunk_tokens=CHUNK)
    parts.ask("a", 200, tenant="a")
    parts.ask("b", 2 * CHUNK, priority=1, tenant="b")
    parts.ask("c", 200, tenant="b")
    parts.scheduler.admit()
    assert [set(parts.step()) for _ in range(2)] == [{"b"}, {"b"}]
    assert [set(parts.step()) for _ in range(2)] == [{"a"}, {"a"}], "what it had is on its account"
    assert set(parts.step()) == {"a", "c"}


def only(parts: PrefillParts) -> list[str]:
    return [str(r.submit.request_id) for r in parts.requests if r.phase is PrefillPhase.RUNNING]


def test_who_has_none_under_way_takes_the_place_of_the_youngest_of_who_has_several() -> None:
    parts = PrefillParts(pages=256, max_running=3)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")):
        parts.granted.add(parts.ask(name, 40, tenant=tenant))
        parts.scheduler.admit()
    assert only(parts) == ["a1", "a2", "b1"], "one place, not two: nothing would ever come to rest"
    assert parts.scheduler.counters["preemptions"] == 1
    parts.scheduler.admit()
    assert only(parts) == ["a1", "a2", "b1"]


def test_what_yields_is_on_its_tenants_account_no_more_when_the_next_are_chosen() -> None:
    parts = PrefillParts(pages=38, tenant_credit_tokens=0)
    for name in ("a1", "a2", "a3"):
        parts.granted.add(parts.ask(name, 40, tenant="a"))
    parts.scheduler.admit()
    for name, tokens in (("a4", 8), ("b1", 100), ("b2", 8)):
        parts.granted.add(parts.ask(name, tokens, tenant=name[0]))
    parts.scheduler.admit()
    assert only(parts) == ["a1", "a4", "b1"], "a has 40 under way and b 100, and there is room for one more"


def test_who_yields_its_place_to_another_tenant_has_a_note_of_it_for_its_router() -> None:
    parts = PrefillParts(pages=256, max_running=2)
    first, second = parts.ask("a1", 40, tenant="a"), parts.ask("a2", 40, tenant="a")
    parts.scheduler.admit()
    parts.clock.advance(2.0)
    parts.granted.add(parts.ask("b1", 40, tenant="b"))
    parts.scheduler.admit()
    assert only(parts) == ["a1", "b1"]
    assert (first.notes, second.notes) == ([], [LegNote("preempted", 2.0)])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda parts: parts.ask("b", 40, tenant="b"), "decode holds nothing for it"),
        (lambda parts: parts.granted.add(parts.ask("b", 40, priority=-1, tenant="b")), "its priority is lower"),
        (lambda parts: parts.granted.add(parts.ask("b", 40, tenant="a")), "it is the same tenant's"),
    ],
)
def test_nobody_else_makes_way(make: Callable[[PrefillParts], None], why: str) -> None:
    parts = PrefillParts(pages=256, max_running=2)
    for name in ("a1", "a2"):
        parts.granted.add(parts.ask(name, 40, tenant="a"))
    parts.scheduler.admit()
    make(parts)
    parts.scheduler.admit()
    assert only(parts) == ["a1", "a2"], why


def test_a_tenants_last_prompt_keeps_its_place() -> None:
    parts = PrefillParts(pages=256, max_running=1)
    parts.granted.add(parts.ask("a1", 40, tenant="a"))
    parts.scheduler.admit()
    parts.granted.add(parts.ask("b1", 40, tenant="b"))
    parts.scheduler.admit()
    assert only(parts) == ["a1"]


def sees(request: PrefillRequest, at: range) -> PrefillRequest:
    """The request, with a picture at these positions, which see each other."""
    picture = Picture(token=1, height=8, width=8, count=len(at), pixels=b"", whole=True)
    request.pictures = [PlacedRows(picture, b"digest", 0, at)]
    return request


def steps_of(flood: Flood, seers: list[PrefillRequest], at: range) -> list[int]:
    """How many tokens each step has until all is computed. No picture is parted."""
    sizes = []
    while flood.parts.requests:
        sizes.append(sum(flood.step().values()))
        assert len(sizes) < 100, "nothing starves"
        assert not any(at[0] < request.launched <= at[-1] for request in seers)
    return sizes


@pytest.mark.parametrize("tenants", ["aaaaaa", "abcdef"])
def test_pictures_of_many_that_are_computed_whole_make_no_step_longer(tenants: str) -> None:
    flood, at = Flood({}, pages=1024, max_running=32), range(3, 19)
    seers = [sees(flood.ask(tenant, 40), at) for tenant in tenants]
    assert max(steps_of(flood, seers, at)) <= CHUNK


def test_a_step_that_has_nothing_but_a_picture_is_as_long_as_it() -> None:
    """A colocated worker's steps may have less room than a picture has positions, for good."""
    flood, at = Flood({}, pages=1024, max_running=32, chunk=16), range(3, 27)
    sizes = steps_of(flood, [sees(flood.ask(tenant, 40), at) for tenant in "ab"], at)
    assert max(sizes) == len(at)


def test_short_prompts_that_never_end_leave_the_oldest_room_for_its_picture() -> None:
    flood, at = Flood({}, pages=1024, max_running=32), range(0, 28)
    oldest = sees(flood.ask("a", 40), at)
    for _ in range(4):
        flood.ask("a", 8)
        flood.ask("a", 8)
        flood.step()
    assert oldest.launched > at[-1]
