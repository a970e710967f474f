"""Questions about kept answers: whom they go to, when they end, what becomes of finds that nobody takes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.fake_worker import FakeCluster
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.kept_answers import Attach, Attached, Detach, KeptAnswer
from twinpool.contracts.messages.router_commands import Cancel
from twinpool.contracts.messages.worker_events import Tokens
from twinpool.router.core.answer_lookups import AnswerLookups, LookupEnded
from twinpool.router.state.worker_table import WorkerKey, WorkerTable


class World:
    def __init__(self, decode: int = 2, *, known: bool = True) -> None:
        self.clock, self.cluster = ManualClock(100.0), FakeCluster(1, decode)
        self.table = WorkerTable(RouterConfig())
        self.asks = AnswerLookups(self.clock, self.table, lambda: "1", 2.0)
        if known:
            self.view()
            for entry in self.table:
                entry.linked = True

    def view(self) -> None:
        self.table.update(self.cluster.views())
        self.asks.on_view()

    def key(self, name: str) -> WorkerKey:
        return self.cluster[name].name, self.cluster[name].incarnation

    def commands(self) -> list[tuple[str, Any]]:
        return [(worker[0], command) for worker, command in self.asks.take_commands()]

    def answer(self, name: str, ask: RequestId, *answers: KeptAnswer, other_body: bool = False) -> bool:
        return self.asks.on_event(self.key(name), Attached(ask, 0, other_body, answers))

    def contest(self, name: str, ask: RequestId, claim: int) -> bool:
        return self.asks.on_event(self.key(name), Attached(ask, 0, contested=claim))


@pytest.fixture
def world() -> World:
    return World()


def kept(request: str, tokens: int, attempt: int = 0, index: int = 0, **more: Any) -> KeptAnswer:
    fields: dict[str, Any] = {"running": True, "started": True, **more}
    return KeptAnswer(RequestId(request), attempt, index, 7, 3, 50, 60.0, tuple(range(tokens)), **fields)


def test_every_decode_worker_is_asked_and_no_other(world: World) -> None:
    ask = world.asks.begin("k", "b", 1)
    assert world.commands() == [(name, Attach(ask, 0, "k", "b", seen=0)) for name in ("decode-0", "decode-1")]
    assert world.answer("decode-0", ask)
    assert world.asks.take_ended() == []
    assert world.answer("decode-1", ask)
    assert world.asks.take_ended() == [LookupEnded(ask, {})]


def test_a_contested_answer_is_asked_for_again_and_has_no_end_before(world: World) -> None:
    ask = world.asks.begin("k", "b", 1)
    world.commands()
    world.answer("decode-0", ask)
    assert world.contest("decode-1", ask, 7)
    assert world.commands() == [("decode-1", Attach(ask, 0, "k", "b", seen=7))]
    assert world.asks.take_ended() == []
    assert world.contest("decode-1", ask, 8), "somebody else has claimed it meanwhile"
    assert world.commands() == [("decode-1", Attach(ask, 0, "k", "b", seen=8))]
    assert world.answer("decode-1", ask, kept("r", 4))
    assert world.asks.take_ended()[0].found[0].answer.request_id == "r"


def test_a_contested_answer_is_not_asked_for_again_while_no_client_waits(world: World) -> None:
    ask = world.asks.begin("k", "b", 1)
    world.commands()
    world.answer("decode-0", ask)
    world.asks.wants(ask, False)
    assert world.contest("decode-1", ask, 7)
    assert (world.commands(), world.asks.take_ended()) == ([], [])
    world.asks.wants(ask, True)
    assert world.commands() == [("decode-1", Attach(ask, 0, "k", "b", seen=7))]
    world.asks.wants(ask, False)
    assert world.contest("decode-1", ask, 9)
    world.clock.advance(2.0)
    world.asks.tick()
    assert world.asks.take_ended() == [LookupEnded(ask, {})], "its time is bounded"
    world.asks.wants(ask, True)
    assert world.commands() == []


def test_a_contest_at_a_worker_that_is_lost_is_over(world: World) -> None:
    ask = world.asks.begin("k", "b", 1)
    world.asks.wants(ask, False)
    world.contest("decode-1", ask, 7)
    world.commands()
    world.asks.lost(world.key("decode-1"))
    world.asks.wants(ask, True)
    assert [command.seen for _, command in world.commands()] == [0]


def test_it_ends_at_once_where_all_choices_were_found_and_late_finds_are_left_alone(world: World) -> None:
    ask = world.asks.begin("k", "b", 1)
    world.commands()
    assert world.answer("decode-1", ask, kept("r", 4))
    (ended,) = world.asks.take_ended()
    assert (ended.found[0].worker, ended.found[0].answer.tokens) == (world.key("decode-1"), (0, 1, 2, 3))
    assert not world.answer("decode-0", ask, kept("r", 2, attempt=3))
    assert world.commands() == [("decode-0", Detach(RequestId("r"), 3))]


def test_at_its_deadline_a_silent_worker_counts_as_having_nothing(world: World) -> None:
    ask = world.asks.begin("k", "b", 2)
    world.answer("decode-0", ask, kept("r", 4))
    world.clock.advance(1.9)
    world.asks.tick()
    assert world.asks.take_ended() == []
    world.clock.advance(0.1)
    world.asks.tick()
    (ended,) = world.asks.take_ended()
    assert set(ended.found) == {0}
    assert len(world.asks) == 0


def test_a_router_that_has_just_started_waits_for_the_table_and_its_links() -> None:
    world = World(known=False)
    ask = world.asks.begin("k", "b", 1)
    assert (world.commands(), world.asks.take_ended()) == ([], [])
    world.view()
    assert (world.commands(), world.asks.take_ended()) == ([], [])
    for entry in world.table:
        entry.linked = True
        world.asks.on_linked()
    assert [name for name, _ in world.commands()] == ["decode-0", "decode-1"]
    world.answer("decode-0", ask)
    world.answer("decode-1", ask)
    assert world.asks.take_ended() == [LookupEnded(ask, {})]


def test_the_best_of_several_finds_is_taken_and_the_others_are_cancelled(world: World) -> None:
    """A migration leaves two: the source, which was called back, and a target that waits for the state."""
    ask = world.asks.begin("k", "b", 2)
    world.commands()
    world.answer("decode-0", ask, kept("r", 4, attempt=1, started=False))
    world.answer("decode-1", ask, kept("r", 4, attempt=0))
    (ended,) = world.asks.take_ended()
    found = ended.found[0]
    assert (found.worker, found.answer.attempt, found.last_attempt) == (world.key("decode-1"), 0, 1)
    assert world.commands() == [("decode-0", Cancel(RequestId("r"), 1))]
    assert world.asks.held == 1


def test_an_answer_that_has_ended_is_better_than_one_that_runs(world: World) -> None:
    ask = world.asks.begin("k", "b", 2)
    ended = kept("whole", 4, running=False, started=False, reason="stop")
    world.answer("decode-0", ask, kept("r", 9), ended)
    world.answer("decode-1", ask)
    (told,) = world.asks.take_ended()
    assert told.found[0].answer.request_id == "whole"


def test_another_body_ends_it_and_nothing_stays_held(world: World) -> None:
    ask = world.asks.begin("k", "b", 2)
    world.answer("decode-0", ask, kept("r", 4))
    world.commands()
    world.answer("decode-1", ask, other_body=True)
    assert world.asks.take_ended() == [LookupEnded(ask, {}, other_body=True)]
    assert world.commands() == [("decode-0", Detach(RequestId("r"), 0))]
    assert world.asks.held == 0


def test_d5_what_a_worker_says_before_its_answer_goes_on_here_is_held(world: World) -> None:
    ask = world.asks.begin("k", "b", 2)
    world.answer("decode-0", ask, kept("r", 4))
    token = Tokens(RequestId("r"), 0, 7, (9,))
    assert world.asks.hold(world.key("decode-0"), token)
    assert not world.asks.hold(world.key("decode-1"), token)
    assert world.asks.release(world.key("decode-0"), RequestId("r")) == [token]
    assert not world.asks.hold(world.key("decode-0"), token)


def test_a_worker_that_is_lost_meanwhile_has_nothing_any_more(world: World) -> None:
    ask = world.asks.begin("k", "b", 2)
    world.answer("decode-0", ask, kept("r", 4))
    entry = world.table.get(world.key("decode-0"))
    assert entry is not None
    entry.linked = False
    world.asks.lost(entry.key)
    assert world.asks.held == 0
    world.commands()
    entry.linked = True
    world.asks.on_linked()
    assert [name for name, _ in world.commands()] == ["decode-0"], "it is asked again"


def test_what_a_worker_had_found_before_it_was_lost_is_no_part_of_the_answer(world: World) -> None:
    """It runs for nobody there now: only what it says when it is asked again is of use."""
    ask = world.asks.begin("k", "b", 2)
    world.answer("decode-0", ask, kept("r", 4))
    entry = world.table.get(world.key("decode-0"))
    assert entry is not None
    entry.linked = False
    world.asks.lost(entry.key)
    world.answer("decode-1", ask, kept("s", 2, index=1))
    assert world.asks.take_ended() == [], "decode-0 may come back with it"
    entry.linked = True
    world.asks.on_linked()
    assert world.answer("decode-0", ask)
    (ended,) = world.asks.take_ended()
    assert {index: found.answer.request_id for index, found in ended.found.items()} == {1: "s"}
    assert world.asks.held == 1


def test_a_worker_that_answers_twice_has_answered_once_and_its_second_find_is_left_to_it(world: World) -> None:
    ask = world.asks.begin("k", "b", 3)
    assert world.answer("decode-0", ask, kept("r", 4))
    world.commands()
    assert not world.answer("decode-0", ask, kept("s", 9, index=1), kept("t", 9, index=2, running=False))
    assert world.commands() == [("decode-0", Detach(RequestId("s"), 0))], "of what runs: the other is over"
    assert world.answer("decode-1", ask)
    (ended,) = world.asks.take_ended()
    assert list(ended.found) == [0]
    assert not world.answer("decode-1", ask, kept("u", 1)), "and one that comes after the end is too late"
    assert world.commands() == [("decode-1", Detach(RequestId("u"), 0))]


@pytest.mark.parametrize("cut", [{"running": False}, {"started": False}, {"running": False, "started": False}])
def test_an_answer_that_was_cut_or_has_not_started_waits_for_what_others_have(
    world: World, cut: dict[str, bool]
) -> None:
    """Another worker may go on with it, or have the whole of it."""
    ask = world.asks.begin("k", "b", 1)
    world.answer("decode-0", ask, kept("r", 4, **cut))
    assert world.asks.take_ended() == []
    world.answer("decode-1", ask, kept("s", 2, attempt=1))
    (whole,) = world.asks.take_ended()
    assert (whole.found[0].answer.request_id, whole.found[0].last_attempt) == ("s", 1)
