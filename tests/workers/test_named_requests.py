"""Requests with a name at real workers: their router is gone, they go on, and another router has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.stepped_cluster import Company, company, generated
from tests.support.worker_pair import SESSION, turns
from tests.support.worker_parts import act_on, table_of
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, RoomId
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages.kept_answers import AnswerName, Attach, Attached, Detach, KeptAnswer
from twinpool.contracts.messages.router_commands import Cancel, Submit
from twinpool.contracts.messages.worker_events import Done, Event, Tokens
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request import RequestFailed

OTHER = SessionId(SESSION + 1)
PROMPT = list(range(1, 40))
NAME = AnswerName("key", "body", 0, 7)
GREEDY = SamplingParams(24, temperature=0.0)
ROLES = pytest.mark.parametrize("colocated", [0, 1], ids=["pools", "colocated"])


@pytest.fixture(scope="module")
def calm(model: Path) -> dict[str, Any]:
    """The undisturbed answer, with log-probabilities."""
    with company(model) as c:
        rid = c.submit(PROMPT, replace(GREEDY, logprobs=2))
        return {"tokens": c.run(rid)[0]}


@pytest.fixture
def scene(model: Path) -> Iterator[Company]:
    with company(model, clock=ManualClock(100.0)) as c:
        yield c


def drop(c: Company) -> None:
    """The router is gone."""
    for worker in c.workers.values():
        worker.drop_session(SESSION)


def turn(c: Company, rounds: int = 1) -> list[tuple[SessionId, Event]]:
    """What the workers say in some rounds, with the session that it is for."""
    return [told for _ in range(rounds) for worker in c.workers.values() for told in worker.step()]


def attach(
    c: Company, key: str = "key", body: str = "body", *, seen: int | None = None, session: SessionId = OTHER
) -> tuple[list[Attached], list[tuple[SessionId, Event]]]:
    """Ask every worker as another router; returns what each answers, and all else that is said."""
    for worker in c.workers.values():
        worker.handle(session, Attach(RequestId("ask"), 0, key, body, seen))
    said = turn(c)
    answers = [event for to, event in said if isinstance(event, Attached) and to == session]
    return answers, [(s, e) for s, e in said if not isinstance(e, Attached)]


def finds(answers: list[Attached]) -> list[KeptAnswer]:
    return [answer for told in answers for answer in told.answers]


def rest_of(c: Company, said: list[tuple[SessionId, Event]], start: int) -> list[int]:
    """Step until the end that the other router is told; returns the tokens from position `start` on."""
    for _ in range(2000):
        if any(isinstance(event, Done) for _, event in said):
            break
        said += turn(c)
    told: dict[int, int] = {}
    for session, event in said:
        if isinstance(event, Tokens):
            assert session == OTHER
            told.update(enumerate(event.tokens, event.position))
    assert sorted(told) == list(range(start, start + len(told)))
    return [told[position] for position in sorted(told)]


def forget(c: Company) -> None:
    """The test's own router has no request any more."""
    for rid, told in c.told.items():
        if told.done is None:
            c.core.cancel(rid)
    c.core.take_actions()


def give_up(c: Company, session: SessionId) -> None:
    """A router cancels what it has."""
    forget(c)
    for worker in c.workers.values():
        for rid, told in c.told.items():
            worker.handle(session, Cancel(rid, told.request.attempt))


@ROLES
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_d5_it_goes_on_for_nobody_and_another_router_has_the_rest(
    model: Path, calm: dict[str, Any], tokens: int, colocated: int
) -> None:
    """Wherever it was: before its prompt was computed, with the first token, or in its middle."""
    with company(model, clock=ManualClock(100.0), colocated=colocated) as c:
        rid = c.submit(PROMPT, replace(GREEDY, logprobs=2), name=NAME)
        c.until(generated(c, rid, tokens), "its middle")
        forget_later = c.told[rid]
        drop(c)
        assert all(session == UNOWNED for session, _ in turn(c, 2))
        answers, said = attach(c)
        (found,) = finds(answers)
        assert found.running
        assert (found.index, found.created, found.max_tokens, found.prompt_len) == (0, 7, 24, len(PROMPT))
        assert list(found.tokens) == calm["tokens"][: len(found.tokens)]
        # A first token that prefill has told may be ahead of the state that decode waits for.
        assert len(found.tokens) >= (tokens if found.started else 0)
        assert found.started or tokens <= 1
        assert [one.token for one in found.logprobs] == list(found.tokens)
        rest = rest_of(c, said, len(PROMPT) + len(found.tokens))
        assert list(found.tokens) + rest == calm["tokens"]
        assert forget_later.done is None
        forget(c)


@pytest.mark.parametrize("ending", ["done", "cancelled"])
def test_d5_a_prompt_that_is_being_computed_goes_with_its_request(
    model: Path, calm: dict[str, Any], ending: str
) -> None:
    """Its first token is for whoever has the request then, who can cancel it, too."""
    with company(model, clock=ManualClock(100.0), colocated=1, prefill={"chunk_tokens": 8}) as c:
        c.submit(PROMPT, GREEDY, name=NAME)
        turn(c)
        drop(c)
        answers, said = attach(c)
        (found,) = finds(answers)
        assert (found.running, found.started, found.tokens) == (True, False, ()), "it is in the middle of its prompt"
        if ending == "done":
            assert rest_of(c, said, len(PROMPT)) == calm["tokens"]
            assert {session for session, _ in said} == {OTHER}
        else:
            give_up(c, OTHER)
            assert [worker.check().violations for worker in c.workers.values()] == [()]
        forget(c)


def test_one_without_a_name_is_cancelled(scene: Company) -> None:
    rid = scene.submit(PROMPT, GREEDY)
    scene.until(generated(scene, rid, 3), "its middle")
    drop(scene)
    assert not any(worker.status().running + worker.status().waiting for worker in scene.workers.values())
    forget(scene)


def test_b2_it_ends_within_its_bound_and_releases_all(scene: Company) -> None:
    clock = scene.clock
    assert isinstance(clock, ManualClock)
    rid = scene.submit(PROMPT, replace(GREEDY, max_tokens=2000), name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    drop(scene)
    turn(scene, 3)
    assert [w.check().kept_answers for n, w in scene.workers.items() if n.startswith("decode")] in ([0, 1], [1, 0])
    clock.advance(scene.config.decode.kept_answer_s + 0.1)
    turn(scene, 3)
    assert finds(attach(scene)[0]) == []
    assert not any(w.check().kept_answers for w in scene.workers.values())
    forget(scene)


def test_b2_it_goes_on_for_nobody_no_longer_than_its_own_deadline(scene: Company) -> None:
    clock, left = scene.clock, scene.config.decode.kept_answer_s / 2
    assert isinstance(clock, ManualClock)
    rid = scene.submit(PROMPT, replace(GREEDY, max_tokens=2000), name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    clock.advance(scene.config.router.request_timeout_s - left)
    drop(scene)
    turn(scene, 3)
    assert any(w.status().running for w in scene.workers.values())
    clock.advance(left + 0.1)
    turn(scene, 3)
    assert finds(attach(scene)[0]) == []
    assert not any(w.status().running or w.check().kept_answers for w in scene.workers.values())
    forget(scene)


def test_with_a_client_that_comes_back_it_has_its_own_deadline_again(scene: Company) -> None:
    """How long it may run for nobody doesn't matter any more."""
    clock, kept = scene.clock, scene.config.decode.kept_answer_s
    assert isinstance(clock, ManualClock)
    rid = scene.submit(PROMPT, replace(GREEDY, max_tokens=2000), name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    drop(scene)
    clock.advance(1.0)
    (found,) = finds(attach(scene)[0])
    assert found.left_s == scene.config.router.request_timeout_s - 1.0
    clock.advance(kept + 0.1)
    assert not [event for _, event in turn(scene, 3) if isinstance(event, Done)]
    clock.advance(scene.config.router.request_timeout_s - kept - 1.0)
    ends = [(session, event.error) for session, event in turn(scene, 3) if isinstance(event, Done)]
    assert ends == [(OTHER, ErrorKind.DEADLINE)]
    forget(scene)


def test_an_answer_that_has_ended_is_kept_for_a_while(scene: Company, calm: dict[str, Any]) -> None:
    clock = scene.clock
    assert isinstance(clock, ManualClock)
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.run(rid)
    for _ in range(2):
        (found,) = finds(attach(scene)[0])
        assert (list(found.tokens), found.running, found.reason) == (calm["tokens"], False, "length")
    clock.advance(scene.config.decode.kept_answer_s + 0.1)
    turn(scene)
    assert finds(attach(scene)[0]) == []


def test_an_answer_that_a_stop_string_ended_keeps_its_tokens(scene: Company, calm: dict[str, Any]) -> None:
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.until(generated(scene, rid, 6), "its middle")
    scene.core.cancel(rid, finished=True)
    scene.act()
    (found,) = finds(attach(scene)[0])
    assert (found.running, found.reason) == (False, "")
    assert list(found.tokens) == calm["tokens"][: len(found.tokens)]
    assert len(found.tokens) >= 6


@pytest.mark.parametrize(
    ("kind", "kept"), [(ErrorKind.WORKER, 1), (ErrorKind.NONFINITE, 0), (ErrorKind.INVALID, 0)], ids=str
)
def test_what_failed_for_nobody_is_kept_only_where_another_try_may_come_to_more(
    scene: Company, kind: ErrorKind, kept: int
) -> None:
    """Logits that are no numbers follow from the tokens: a router tries such a request no more than some times."""
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.until(generated(scene, rid, 6), "its middle")
    decode = scene.decode(scene.worker_of(rid))
    drop(scene)
    (request,) = table_of(decode)
    act_on(decode, [RequestFailed(request, kind, "it failed")])
    assert decode.status().counters["kept_answers"] == kept
    found = finds(attach(scene)[0])
    assert [(one.running, one.reason, len(one.tokens) >= 6) for one in found] == [(False, "", True)] * kept
    forget(scene)


def test_a_client_that_is_gone_leaves_its_request_running(scene: Company, calm: dict[str, Any]) -> None:
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.until(generated(scene, rid, 6), "its middle")
    scene.core.detach(rid)
    scene.act()
    assert scene.core.requests.in_flight == 0
    turn(scene, 100)
    (found,) = finds(attach(scene)[0])
    assert (list(found.tokens), found.reason) == (calm["tokens"], "length"), "it was finished for nobody"


def test_another_body_gets_nothing_and_takes_nothing_away(scene: Company) -> None:
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    answers, said = attach(scene, body="another")
    assert sorted(told.other_body for told in answers) == [False, True]
    assert finds(answers) == []
    assert {session for session, _ in said} == {SESSION}
    for _, event in said:
        scene.core.on_event(scene.key(scene.worker_of(rid)), event)
    scene.act()
    assert len(scene.run(rid)[0]) == 24, "its own router goes on"


def test_what_another_router_has_is_contested_until_it_is_asked_for_again(scene: Company) -> None:
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    answers, said = attach(scene, seen=0)
    contested = max(told.contested for told in answers)
    assert finds(answers) == []
    assert contested
    assert {session for session, _ in said} == {SESSION}
    assert not [event for _, event in said if isinstance(event, Done)], "its router hears nothing of it"
    answers, said = attach(scene, seen=contested)
    (found,) = finds(answers)
    assert (found.request_id, found.running) == (rid, True)
    told = [event for session, event in said if session == SESSION and isinstance(event, Done)]
    assert [event.error for event in told] == [ErrorKind.SUPERSEDED]
    give_up(scene, OTHER)


def test_d5_a_router_takes_nothing_with_what_it_asked_before_the_client_came_to_the_next(
    scene: Company, calm: dict[str, Any]
) -> None:
    """It has died since; its question was on its way still."""
    scene.submit(PROMPT, GREEDY, name=NAME)
    turn(scene, 20)
    drop(scene)
    answers, said = attach(scene, seen=0)
    (found,) = finds(answers)
    dead = SessionId(OTHER + 1)
    answers, more = attach(scene, seen=0, session=dead)
    assert finds(answers) == []
    assert max(told.contested for told in answers) > 0
    for worker in scene.workers.values():
        worker.drop_session(dead)
    rest = rest_of(scene, said + more, len(PROMPT) + len(found.tokens))
    assert list(found.tokens) + rest == calm["tokens"]
    forget(scene)


def test_a_claim_that_is_newer_than_what_the_router_knows_of_is_contested_again(scene: Company) -> None:
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    first = max(told.contested for told in attach(scene, seen=0)[0])
    assert len(finds(attach(scene, seen=first, session=SessionId(OTHER + 1))[0])) == 1
    answers, _ = attach(scene, seen=first)
    second = max(told.contested for told in answers)
    assert finds(answers) == []
    assert second > first
    assert len(finds(attach(scene, seen=second)[0])) == 1
    give_up(scene, OTHER)


def test_of_several_choices_at_one_worker_the_newest_claim_is_the_one_to_know_of(model: Path) -> None:
    with company(model, clock=ManualClock(100.0), decodes=1) as c:
        for index in range(2):
            rid = c.submit(PROMPT, replace(GREEDY, choice=index), name=replace(NAME, index=index))
            c.until(generated(c, rid, 3), "its middle")
        contested = max(told.contested for told in attach(c, seen=0)[0])
        assert contested == 2, "each is a claim of its own"
        assert finds(attach(c, seen=1)[0]) == [], "another router has claimed one of them since"
        assert [found.index for found in finds(attach(c, seen=contested)[0])] == [0, 1]
        give_up(c, OTHER)


def test_a_router_that_has_it_already_is_given_it_again(scene: Company) -> None:
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    assert len(finds(attach(scene, seen=0, session=SESSION)[0])) == 1
    give_up(scene, SESSION)


def test_the_router_that_had_it_is_told(scene: Company) -> None:
    rid = scene.submit(PROMPT, GREEDY, name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    answers, said = attach(scene)
    (found,) = finds(answers)
    told = [e for session, e in said if session == SESSION and isinstance(e, Done)]
    assert [(e.request_id, e.error) for e in told] == [(rid, ErrorKind.SUPERSEDED)]
    decode = scene.worker_of(rid)
    scene.core.on_event(scene.key(decode), told[0])
    scene.act()
    ended = scene.told[rid].done
    assert ended is not None
    assert ended.error is ErrorKind.SUPERSEDED
    assert not [c for _, c in scene.sent if isinstance(c, Cancel)], "it takes nothing away from the other"
    rest = (
        rest_of(scene, said[len(said) :], 0)
        if not found.running
        else rest_of(scene, [(s, e) for s, e in said if s == OTHER], len(PROMPT) + len(found.tokens))
    )
    assert len(found.tokens) + len(rest) == 24


def test_a_request_begun_anew_ends_what_runs_for_nobody(scene: Company) -> None:
    rid = scene.submit(PROMPT, replace(GREEDY, max_tokens=400), name=NAME)
    scene.until(generated(scene, rid, 3), "its middle")
    scene.core.detach(rid)
    scene.act()
    busy = {n: w.status().running for n, w in scene.workers.items() if n.startswith("decode")}
    assert sum(busy.values()) == 1
    turn(scene, 2)
    others = [scene.submit(PROMPT, GREEDY, name=NAME) for _ in "12"]  # One on each of the two.
    scene.run(*others)
    running = [r for n in busy for r in table_of(scene.decode(n))]
    assert running == []


def test_a_request_begun_anew_ends_neither_another_choice_nor_what_a_router_has(
    model: Path, calm: dict[str, Any]
) -> None:
    with company(model, clock=ManualClock(100.0), decodes=1) as c:
        choice = c.submit(PROMPT, replace(GREEDY, max_tokens=400), name=replace(NAME, index=1))
        c.until(generated(c, choice, 3), "its middle")
        c.core.detach(choice)
        owned = c.submit(PROMPT, GREEDY, name=NAME)
        c.until(generated(c, owned, 3), "its middle")
        assert c.run(owned, c.submit(PROMPT, GREEDY, name=NAME)) == [calm["tokens"], calm["tokens"]]
        table = table_of(c.decode("decode-0"))
        assert [(one.submit.request_id, one.session) for one in table] == [(choice, UNOWNED)]
        found = finds(attach(c)[0])
        assert [(one.index, one.running) for one in found] == [(0, False), (1, True)]
        give_up(c, OTHER)


@ROLES
def test_d5_a_later_attempt_takes_the_place_of_one_that_goes_on_for_nobody(
    model: Path, calm: dict[str, Any], colocated: int
) -> None:
    """Its router lost the connections, so it could not take that one back, and chose the same workers again."""
    with company(model, clock=ManualClock(100.0), decodes=1, colocated=colocated) as c:
        c.submit(PROMPT, GREEDY, name=NAME)
        c.until(generated(c, RequestId("r0"), 5), "its middle")
        drop(c)
        forget(c)
        for worker, command in c.sent:
            if isinstance(command, Submit):
                c.workers[worker].handle(OTHER, replace(command, attempt=1, room=RoomId("the next")))
        assert rest_of(c, [], len(PROMPT)) == calm["tokens"]


def test_b2_too_many_that_run_for_nobody_are_cancelled(model: Path) -> None:
    with company(model, decode={"kept_answers": 3}, clock=ManualClock(100.0), decodes=1) as c:
        rids = [c.submit(PROMPT, replace(GREEDY, max_tokens=400), name=replace(NAME, key=f"k{n}")) for n in range(5)]
        c.until(lambda: all(len(c.told[rid].tokens) > 2 for rid in rids), "all to run")
        drop(c)
        assert c.decode("decode-0").check().kept_answers == 3
        assert c.decode("decode-0").status().running == 3
        turn(c, 3)
        for n in range(5):
            c.workers["decode-0"].handle(OTHER, Attach(RequestId(f"a{n}"), 0, f"k{n}", "body"))  # type: ignore[index]
        told = [e for _, e in turn(c) if isinstance(e, Attached)]
        assert len(finds(told)) == 3
        for found in finds(told):
            c.workers["decode-0"].handle(OTHER, Cancel(found.request_id, found.attempt))  # type: ignore[index]
        forget(c)


def test_the_last_one_that_may_run_for_nobody_is_kept_when_it_ends(model: Path, calm: dict[str, Any]) -> None:
    """It doesn't take room from itself."""
    with company(model, decode={"kept_answers": 1}, clock=ManualClock(100.0), decodes=1) as c:
        rid = c.submit(PROMPT, GREEDY, name=NAME)
        c.until(generated(c, rid, 3), "its middle")
        drop(c)
        for _ in range(100):
            turn(c)
        assert c.decode("decode-0").status().running == 0
        kept = [(list(one.tokens), one.running, one.reason) for one in finds(attach(c)[0])]
        assert kept == [(calm["tokens"], False, "length")]
        forget(c)


def test_b2_what_lost_its_router_while_its_grammar_was_compiled_has_the_bounds_of_all_that_run_for_nobody(
    model: Path,
) -> None:
    with company(model, decode={"kept_answers": 1}, clock=ManualClock(100.0), decodes=1) as c:
        c.submit(PROMPT, GREEDY, name=NAME)
        (asked,) = [sent for name, sent in c.sent if name == "decode-0" and isinstance(sent, Submit)]
        give_up(c, SESSION)
        worker = c.decode("decode-0")
        for number in range(2):
            name = replace(NAME, key=f"key {number}")
            late = replace(asked, request_id=RequestId(f"late {number}"), room=RoomId(f"room {number}"), name=name)
            worker._take(UNOWNED, late, None)  # As the gate does with what has passed.
            assert worker.check().violations == ()
        left = [(one.submit.request_id, one.deadline) for one in worker._request_table]
        assert left == [("late 0", 100.0 + c.config.decode.kept_answer_s)], "for one of them there is room"
        assert left[0][1] < 100.0 + asked.deadline_s
        worker.handle(UNOWNED, Cancel(left[0][0], 0))
        turn(c)


@pytest.mark.parametrize("stage", ["offered", "given"])
def test_a_migration_that_lost_its_router_ends_with_one_worker_that_has_it(
    model: Path, calm: dict[str, Any], stage: str
) -> None:
    with company(model, clock=ManualClock(100.0)) as c:
        rid = c.submit(PROMPT, replace(GREEDY, logprobs=2, max_tokens=24), name=NAME)
        c.until(generated(c, rid, 5), "its middle")
        source = c.worker_of(rid)
        assert c.core.migrations.begin(c.told[rid].request)
        c.act()
        c.until(lambda: (m := c.core.migrations.of(c.told[rid].request)) is None or str(m.state) == stage, stage)
        drop(c)
        if stage == "given":
            turn(c, 20)
        there, said = dict[str, list[KeptAnswer]](), list[tuple[SessionId, Event]]()
        for name, worker in c.workers.items():
            worker.handle(OTHER, Attach(RequestId("ask"), 0, "key", "body"))
            said += worker.step()
            there[name] = finds([e for _, e in said if isinstance(e, Attached)]) if name.startswith("decode") else []
            said = [(s, e) for s, e in said if not isinstance(e, Attached)]
        best = max(
            (a for answers in there.values() for a in answers), key=lambda a: (bool(a.reason), a.started, len(a.tokens))
        )
        assert best.started or best.reason
        for name, worker in c.workers.items():
            for found in there[name]:
                if found is not best and found.running:
                    worker.handle(OTHER, Cancel(found.request_id, found.attempt))
        assert [one.token for one in best.logprobs] == list(best.tokens)
        mine = [(s, e) for s, e in said if not (isinstance(e, Done) and e.error) and e.attempt == best.attempt]
        rest = [] if best.reason else rest_of(c, mine, len(PROMPT) + len(best.tokens))
        assert list(best.tokens) + rest == calm["tokens"]
        assert source
        forget(c)


def test_what_is_detached_without_a_name_is_cancelled(scene: Company) -> None:
    rid = scene.submit(PROMPT, GREEDY)
    scene.until(generated(scene, rid, 3), "its middle")
    for worker in scene.workers.values():
        worker.handle(SESSION, Detach(rid, 0))
    assert not any(worker.status().running for worker in scene.workers.values())
    forget(scene)


@ROLES
def test_an_end_at_the_first_token_is_told_once_to_the_router_that_came_later(
    model: Path, calm: dict[str, Any], colocated: int
) -> None:
    """Where prefill tells it, it tells the one before: the other would wait for ever."""
    with company(model, clock=ManualClock(100.0), colocated=colocated, prefill={"chunk_tokens": 8}) as c:
        rid = c.submit(PROMPT, replace(GREEDY, stop_token_ids=(calm["tokens"][0],)), name=NAME)
        answers, said = attach(c)
        (found,) = finds(answers)
        assert not found.started
        for _ in turns(200):
            said += turn(c)
            if any(session == OTHER and isinstance(event, Done) for session, event in said):
                break
        said += turn(c, 3)
        ends = [event for session, event in said if session == OTHER and isinstance(event, Done)]
        expected = ("stop", None) if colocated else ("error", ErrorKind.ROOM)
        assert [(end.request_id, end.reason, end.error) for end in ends] == [(rid, *expected)]
        forget(c)
