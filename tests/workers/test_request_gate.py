"""The gate before a worker's queues: who waits for a grammar, who passes, and what becomes of those that never do."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
from msgspec.structs import replace

from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import CheckpointError, ErrorKind
from twinpool.contracts.ids import RequestId, RoomId
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages.kept_answers import AnswerName
from twinpool.contracts.messages.router_commands import Audit, Cancel, Submit
from twinpool.contracts.sampling_params import AdapterRef, SamplingParams
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar, GrammarError, StartedGrammar
from twinpool.worker.request_table import ADAPTER_WAIT_S, AdmissionRefusal, RequestGate

ONE, OTHER = SessionId(1), SessionId(2)
UNOWNED_S = 40.0
STARTED = StartedGrammar(cast(Any, object()), cast(Any, object()))


class Compilers:
    """A grammar engine whose compilers end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.futures: list[Future[StartedGrammar]] = []
        self.closed = False

    def start(self, grammar: str, emitted: Sequence[int]) -> Future[StartedGrammar]:
        self.asked.append((grammar, tuple(emitted)))
        self.futures.append(Future())
        return self.futures[-1]

    def masks(self, wanted: Any) -> list[Any]:
        return [("masks of", wanted)]

    def close(self) -> None:
        self.closed = True


class Adapters:
    """A store of adapters, of which there are those that the test says."""

    def __init__(self) -> None:
        self.there, self.broken, self.closed = set[str](), set[str](), False

    def wants(self, ref: AdapterRef) -> bool:
        if ref.name in self.broken:
            raise CheckpointError("it has changed")
        return ref.name in self.there

    def close(self) -> None:
        self.closed = True


class Scene:
    def __init__(self) -> None:
        self.compilers, self.adapters, self.clock, self.wakes = Compilers(), Adapters(), ManualClock(), 0
        self.gate = RequestGate(cast(Any, self.compilers), self.clock, self.wake, cast(Any, self.adapters), UNOWNED_S)

    def wake(self) -> None:
        self.wakes += 1

    def passed(self) -> list[tuple[SessionId, str, AnswerGrammar | AdmissionRefusal | None]]:
        return [(session, command.request_id, said) for session, command, said in self.gate.passed()]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def submit(name: str, *, grammar: str = "g", attempt: int = 1, deadline_s: float = 5.0, emitted: int = 0) -> Submit:
    tokens = (5, 6, 7, *range(20, 20 + emitted))
    return Submit(
        RequestId(name), attempt, RoomId("m"), tokens, 3, SamplingParams(8, grammar=grammar), None, "", deadline_s, 0
    )


def adapted(name: str, adapter: str, *, grammar: str = "", deadline_s: float = 100.0) -> Submit:
    ref = AdapterRef(adapter, f"digest of {adapter}", "/a")
    sampling = SamplingParams(8, grammar=grammar, adapter=ref)
    return replace(submit(name, deadline_s=deadline_s), sampling=sampling, salt=ref.salted(""))


def audit(name: str) -> Audit:
    return Audit(RequestId(name), 1, (5, 6, 7, 20, 21), 3, SamplingParams(8, grammar="g"))


def test_what_has_no_grammar_and_what_only_takes_back_never_waits(scene: Scene) -> None:
    assert scene.gate.holds(ONE, submit("a", grammar="")) is False
    assert scene.gate.holds(ONE, Cancel(RequestId("a"), 1)) is False
    assert (len(scene.gate), scene.compilers.asked) == (0, [])
    assert scene.passed() == []


def test_a_request_passes_when_its_grammar_is_compiled_and_the_worker_is_woken(scene: Scene) -> None:
    assert scene.gate.holds(ONE, submit("a", emitted=2)) is True
    assert scene.compilers.asked == [("g", (20, 21))], "it is compiled to go on behind the tokens so far"
    assert (scene.passed(), scene.wakes, len(scene.gate)) == ([], 0, 1)
    scene.compilers.futures[0].set_result(STARTED)
    assert scene.wakes == 1
    ((session, name, said),) = scene.passed()
    assert (session, name) == (ONE, "a")
    assert isinstance(said, AnswerGrammar)
    assert said.behind((20, 21)) is STARTED[0], "nothing of the tokens so far is consumed twice"
    assert (scene.passed(), len(scene.gate), scene.gate.next_deadline) == ([], 0, None)


def test_those_that_are_ready_pass_in_the_order_of_their_arrival_past_those_that_are_not(scene: Scene) -> None:
    for name in "abc":
        scene.gate.holds(ONE, submit(name))
    scene.compilers.futures[2].set_result(STARTED)
    scene.compilers.futures[0].set_result(STARTED)
    assert [name for _, name, _ in scene.passed()] == ["a", "c"]
    assert len(scene.gate) == 1


def test_a_grammar_that_cannot_be_used_is_the_clients_fault(scene: Scene) -> None:
    scene.gate.holds(ONE, submit("a"))
    scene.compilers.futures[0].set_exception(GrammarError("too much of it"))
    ((_, _, said),) = scene.passed()
    assert isinstance(said, AdmissionRefusal)
    assert (said.kind, "too much of it" in said.message) == (ErrorKind.GRAMMAR, True)


def test_one_whose_deadline_passes_is_refused_and_its_compiler_stopped(scene: Scene) -> None:
    scene.gate.holds(ONE, submit("a", deadline_s=5.0))
    scene.gate.holds(ONE, submit("b", deadline_s=9.0))
    assert scene.gate.next_deadline == scene.clock.now() + 5.0
    scene.clock.advance(4.9)
    assert scene.passed() == []
    scene.clock.advance(0.1)
    ((_, name, said),) = scene.passed()
    assert isinstance(said, AdmissionRefusal)
    assert (name, said.kind) == ("a", ErrorKind.DEADLINE)
    assert [future.cancelled() for future in scene.compilers.futures] == [True, False]


def test_an_audit_starts_its_grammar_anew_and_waits_for_a_minute(scene: Scene) -> None:
    scene.gate.holds(ONE, audit("a"))
    assert scene.compilers.asked == [("g", ())]
    assert scene.gate.next_deadline == scene.clock.now() + 60.0


def test_what_is_taken_back_waits_no_more_and_only_for_the_router_that_asked(scene: Scene) -> None:
    scene.gate.holds(ONE, submit("a"))
    scene.gate.holds(OTHER, submit("b"))
    scene.gate.holds(OTHER, Cancel(RequestId("a"), 1))
    scene.gate.holds(ONE, Cancel(RequestId("b"), 1))
    assert len(scene.gate) == 2
    scene.gate.holds(ONE, Cancel(RequestId("a"), 1))
    assert len(scene.gate) == 1
    assert [future.cancelled() for future in scene.compilers.futures] == [True, False]


def test_a_later_attempt_takes_the_place_of_the_one_before(scene: Scene) -> None:
    scene.gate.holds(ONE, submit("a", attempt=1))
    scene.gate.holds(OTHER, submit("a", attempt=2))
    assert len(scene.gate) == 1
    for future in scene.compilers.futures:
        if not future.cancelled():
            future.set_result(STARTED)
    assert [(session, name) for session, name, _ in scene.passed()] == [(OTHER, "a")]


def test_a_router_that_is_gone_takes_its_own_along(scene: Scene) -> None:
    scene.gate.holds(ONE, submit("a"))
    scene.gate.holds(OTHER, submit("b"))
    scene.gate.drop_session(ONE)
    assert [future.cancelled() for future in scene.compilers.futures] == [True, False]
    assert len(scene.gate) == 1


def test_at_the_end_nobody_waits_and_the_compilers_are_closed(scene: Scene) -> None:
    scene.gate.holds(ONE, submit("a"))
    scene.gate.close()
    assert scene.compilers.futures[0].cancelled()
    assert scene.compilers.closed
    assert scene.adapters.closed
    assert len(scene.gate) == 0


def test_masks_are_the_engines(scene: Scene) -> None:
    said: Any = scene.gate.masks(cast(Any, ["wanted"]))
    assert said == [("masks of", ["wanted"])]


def test_a_model_without_text_refuses_grammars_and_nothing_else() -> None:
    gate = RequestGate(None, ManualClock(), lambda: None)
    assert gate.holds(ONE, submit("a", grammar="")) is False
    said = gate.holds(ONE, submit("a"))
    assert isinstance(said, AdmissionRefusal)
    assert said.kind is ErrorKind.GRAMMAR
    gate.close()


@pytest.mark.parametrize("way", ["drop_session", "detach"])
@pytest.mark.parametrize("deadline_s", [UNOWNED_S - 1, 600.0])
def test_a_request_with_a_name_waits_on_for_nobody_and_is_computed_for_nobody_for_a_while(
    scene: Scene, way: str, deadline_s: float
) -> None:
    """Its pages may be held for a decode worker of which nobody says that it is gone."""
    for request, name in (("kept", AnswerName("k", "b", 0, 7)), ("plain", None)):
        tokens, sampling = (1, 2), SamplingParams(4, grammar="g")
        room = RoomId("room")
        command = Submit(RequestId(request), 0, room, tokens, 2, sampling, None, deadline_s=deadline_s, name=name)
        assert scene.gate.holds(ONE, command) is True
    if way == "drop_session":
        scene.gate.drop_session(ONE)
    else:
        scene.gate.detach(OTHER, RequestId("kept"))
        for request in ("kept", "plain"):
            scene.gate.detach(ONE, RequestId(request))
    assert len(scene.gate) == 1
    for future in scene.compilers.futures[:1]:
        future.set_result(STARTED)
    ((session, passed, _),) = scene.gate.passed()
    assert (session, passed.request_id) == (UNOWNED, "kept")
    assert isinstance(passed, Submit)
    assert passed.deadline_s == min(deadline_s, UNOWNED_S)


def test_a_request_waits_for_its_adapter_and_passes_where_another_can_not_have_its_own(scene: Scene) -> None:
    for name in "abc":
        assert scene.gate.holds(ONE, adapted(name, f"of {name}")) is True
    scene.adapters.there, scene.adapters.broken = {"of c"}, {"of a"}
    (_, first, refused), (_, second, said) = scene.passed()
    assert isinstance(refused, AdmissionRefusal)
    assert (first, refused.kind, "of a can't be used: it has changed" in refused.message) == (
        "a", ErrorKind.ADAPTER, True,
    )  # fmt: skip
    assert (second, said, len(scene.gate)) == ("c", None, 1)
    assert scene.gate.holds(ONE, adapted("d", "of c")) is False, "it is in memory"
    late = scene.gate.holds(ONE, adapted("e", "of a"))
    assert isinstance(late, AdmissionRefusal)
    assert late.kind is ErrorKind.ADAPTER


def test_a_request_waits_for_room_for_its_adapter_so_long_and_never_beyond_its_deadline(scene: Scene) -> None:
    for name, deadline_s in (("long", 100.0), ("short", 5.0)):
        assert scene.gate.holds(ONE, adapted(name, "of none", deadline_s=deadline_s)) is True
    in_time, no_room = (ErrorKind.DEADLINE, "could not be read in time"), (ErrorKind.ADAPTER, "no room for its adapter")
    for seconds, name, (kind, why) in ((5.0, "short", in_time), (ADAPTER_WAIT_S, "long", no_room)):
        assert scene.gate.next_deadline == seconds
        scene.clock.advance(seconds - 1 - scene.clock.now())
        assert scene.passed() == []
        scene.clock.advance(1)
        over = scene.passed()
        assert [ended for _, ended, _ in over] == [name]
        assert isinstance(said := over[0][2], AdmissionRefusal)
        assert (said.kind, why in said.message) == (kind, True)
    assert scene.gate.next_deadline is None


def test_a_request_with_both_waits_for_its_grammar_and_then_for_its_adapter(scene: Scene) -> None:
    assert scene.gate.holds(ONE, adapted("a", "of a", grammar="g", deadline_s=100.0)) is True
    scene.clock.advance(ADAPTER_WAIT_S - 1)
    assert scene.passed() == []
    scene.compilers.futures[0].set_result(STARTED)
    assert scene.passed() == [], "its grammar alone is not enough"
    scene.adapters.there = {"of a"}
    ((_, _, said),) = scene.passed()
    assert isinstance(said, AnswerGrammar)
