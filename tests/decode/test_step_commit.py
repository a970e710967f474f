"""The commit of decode's steps by itself: what a row draws counts, or says why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from msgspec import structs

from tests.support.decode_parts import SESSION, DecodeParts
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.messages.worker_events import Tokens
from twinpool.decode.request import DecodeEvent, DecodeRequest, RequestFailed, RequestFinished
from twinpool.engine.runner.batch import NONFINITE, BatchRow, DrawnToken, RowOutput
from twinpool.engine.structured_output.grammar_engine import GrammarError
from twinpool.worker.step_commit import StepOverlap


def step(parts: DecodeParts) -> list[RequestFinished | RequestFailed]:
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    parts.scheduler.launched(batch)
    return list(parts.steps.landed(go_on=False))


def output(parts: DecodeParts, request: DecodeRequest, row: RowOutput, patch: pytest.MonkeyPatch) -> list[object]:
    """What is told where the next step has this row."""
    batch = parts.scheduler.next_batch()
    assert batch == [request]
    parts.steps.launch(batch)
    patch.setattr(parts.steps._overlap, "landed", lambda *, go_on: iter([[(request, row)]]))
    return list(parts.steps.landed(go_on=False))


def test_each_step_tells_a_token_at_its_position_and_the_last_the_end() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", prompt=6, most=3)
    parts.clock.advance(0.5)
    first = step(parts)
    parts.clock.advance(0.25)
    second = step(parts)
    events = [(SESSION, Tokens(request.submit.request_id, 0, at, (request.tokens[at],), ())) for at in (7, 8)]
    assert parts.requests.take_events() == events
    assert (first, second) == ([], [RequestFinished(request, "length", None)])
    assert (request.committed, request.generated) == (8, 3)
    assert request.marks["first_step"] == 0.5, "its pace is reckoned from there on"
    assert (parts.steps.steps, parts.steps.counters["tokens_generated"]) == (2, 2)
    assert parts.steps.committed
    assert len(parts.steps) == 0


def test_a_stop_token_ends_the_answer_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", most=50)
    stop = DrawnToken(5, None)
    structs.force_setattr(request.submit.sampling, "stop_token_ids", (5,))
    told = output(parts, request, RowOutput(stop), monkeypatch)
    assert told == [RequestFinished(request, "stop", 5)]


@pytest.mark.parametrize("nonfinite", [False, True])
def test_a_row_of_a_page_that_was_given_away_fails_its_request_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, nonfinite: bool
) -> None:
    """What a stranger's bytes come to says nothing of the device."""
    parts = DecodeParts()
    (request,) = parts.run("a")
    tokens = list(request.tokens)
    (told,) = output(parts, request, RowOutput(stale=True, nonfinite=nonfinite), monkeypatch)
    assert told == RequestFailed(request, ErrorKind.WORKER, "a step found a page of it given away")
    assert request.tokens == tokens
    assert request.allocation is not None
    assert request.allocation.invalid
    assert (parts.steps.counters["stale_pages"], parts.fitness.rows) == (1, 0)


def test_logits_that_are_no_numbers_fail_their_request_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = DecodeParts()
    (request,) = parts.run("a")
    (told,) = output(parts, request, RowOutput(nonfinite=True), monkeypatch)
    assert told == RequestFailed(request, ErrorKind.NONFINITE, NONFINITE)
    assert parts.fitness.rows == 1
    assert parts.steps.counters["stale_pages"] == 0


def test_who_ended_while_a_step_was_under_way_has_no_use_for_it() -> None:
    parts = DecodeParts()
    first, second = parts.run("a", "b", most=2)
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    told = []
    for one in parts.steps.landed(go_on=False):
        told.append(one)
        if one == RequestFinished(first, "length", None):
            parts.scheduler.pause(second)  # As if it had ended: its phase isn't one of those that take steps.
    assert RequestFinished(second, "length", None) not in told
    assert second.committed == 6


def test_requests_whose_pages_turned_out_damaged_fail() -> None:
    parts = DecodeParts()
    first, second = parts.run("a", "b")
    assert first.allocation is not None
    told = list(parts.steps.recover([first.allocation]))
    assert told == [RequestFailed(first, ErrorKind.DAMAGED, "a page loaded for it was damaged")]
    assert second.allocation is not None


def test_a_fault_that_delays_steps_delays_each_and_without_it_none_pauses() -> None:
    slow = DecodeParts(faults={"step_delay_s": 0.25})
    slow.run("a")
    step(slow)
    assert slow.clock.now() == 0.25
    step(slow)
    assert slow.clock.now() == 0.5


@pytest.mark.parametrize("phase", ["runs", "is retracted", "has it among accepted drafts"])
def test_a_stop_token_ends_the_answer_wherever_its_request_stands_when_the_step_has_landed(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """Its step was under way when it was told to leave the device: the answer is over, and nothing is to come back."""
    parts = DecodeParts()
    (request,) = parts.run("a", most=50)
    structs.force_setattr(request.submit.sampling, "stop_token_ids", (5,))
    batch = parts.scheduler.next_batch()
    parts.steps.launch(batch)
    if phase == "is retracted":
        parts.scheduler.retract(request)
    stop, other = DrawnToken(5, None), DrawnToken(9, None)
    row = RowOutput(other, accepted=(stop, other)) if "drafts" in phase else RowOutput(stop)
    monkeypatch.setattr(parts.steps._overlap, "landed", lambda *, go_on: iter([[(request, row)]]))
    told = list(parts.steps.landed(go_on=False))
    assert told == [RequestFinished(request, "stop", 5)]
    assert request.tokens[-1] == 5


def test_an_answer_of_full_length_is_over_though_its_request_is_leaving_the_device() -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", prompt=6, most=2)
    parts.steps.launch(parts.scheduler.next_batch())
    parts.scheduler.retract(request)
    assert list(parts.steps.landed(go_on=False)) == [RequestFinished(request, "length", None)]


class EngineByHand:
    """Notes how steps are launched, and with which masks they are drawn."""

    def __init__(self) -> None:
        self.begun: list[Sequence[BatchRow]] = []
        self.masks: list[Mapping[int, object]] = []

    def begin(self, rows: Sequence[BatchRow]) -> object:
        self.begun.append(rows)
        return object()

    def launch(self, rows: Sequence[BatchRow]) -> object:
        raise AssertionError("a row of it has to be drawn by a mask that isn't made yet")

    def draw(self, step: object, masks: Mapping[int, object]) -> None:
        self.masks.append(masks)


class Grammar:
    """A grammar that names itself; its masks tell for whom and for which draft they are."""

    def __init__(self, name: str, error: str = "") -> None:
        self.name, self.error = name, error

    def behind(self, answer: Sequence[int]) -> Grammar:
        if self.error:
            raise GrammarError(self.error)
        return self


class Masks:
    """A grammar gate that makes a mask for each draw of who asks."""

    def masks(self, wanted: Sequence[tuple[Grammar, Sequence[int]]]) -> list[list[str]]:
        return [[f"{grammar.name} {number}" for number in range(1 + len(drafts))] for grammar, drafts in wanted]


@pytest.mark.parametrize("failing", [False, True])
def test_in_a_mixed_batch_each_draw_has_the_mask_of_its_own_row(failing: bool) -> None:
    """Rows with a grammar and without, with drafts and without, one that has ended and one whose grammar fails."""
    parts = DecodeParts(pages=64)
    requests = dict(zip("abcdef", parts.run(*"abcdef", most=20), strict=True))
    engine = EngineByHand()
    parts.steps._engine, parts.steps._grammars = cast(Any, engine), cast(Any, Masks())
    batch = parts.scheduler.next_batch()
    assert batch == list(requests.values())
    for name, drafts in (("a", (1, 2)), ("b", (3,)), ("d", (4, 5, 6))):
        requests[name].drafts = drafts
        requests[name].planned += len(drafts)
        assert parts.manager.running.extend(requests[name].held, 12) == 12
    for name in "bdef":
        requests[name].grammar = cast(Any, Grammar(name, "no such rule" if failing and name == "d" else ""))
    parts.steps.launch(batch)
    assert [len(rows) for rows in engine.begun] == [6]
    parts.scheduler.pause(requests["e"])
    parts.steps._overlap = cast(Any, StepOverlap())
    told = list(parts.steps._draw(cast(Any, parts.steps._begun)))
    # Draws: a has 0 to 2, b 3 and 4, c 5, d 6 to 9, e 10, f 11.
    want = {3: "b 0", 4: "b 1", 11: "f 0"}
    if not failing:
        want |= {6 + n: f"d {n}" for n in range(4)}
    assert engine.masks == [want]
    assert [(one.request, one.kind) for one in told] == ([(requests["d"], ErrorKind.GRAMMAR)] if failing else [])


@pytest.mark.parametrize("seed", range(3))
def test_steps_launched_ahead_go_on_from_their_own_rows_and_none_is_launched_behind_an_answers_end(seed: int) -> None:
    """Answers of unequal lengths, whose rows change places: each is what it is alone, and no step is for nothing."""

    def answers(device: Device, names: str) -> tuple[dict[str, list[int]], int]:
        parts, found, launches = DecodeParts(pages=64, device=device), dict[str, list[int]](), 0
        for name in names:
            parts.run(name, prompt=6, most=3 + 2 * "abcd".index(name), token=10 + "abcd".index(name))
        for _ in range(40):
            batch = parts.scheduler.next_batch()
            if batch:
                launches += len(batch)
                parts.steps.launch(batch)
                parts.scheduler.launched(batch)
            for told in parts.steps.landed(go_on=bool(batch)):
                if isinstance(told, RequestFinished):
                    found[told.request.submit.request_id] = told.request.answer
                    parts.leave(told.request)
                    told.request.step(DecodeEvent.END)
            assert parts.scheduler.check() == []
        assert parts.manager.check() == []
        return found, launches

    want = {name: answers(CpuDevice(), name)[0][name] for name in "abcd"}
    found, launches = answers(AdversarialDevice(seed, stray=0.0 if not seed else None), "abcd")
    assert found == want
    assert len({tuple(tokens[1:3]) for tokens in found.values()}) == 4, "each is another answer"
    assert {name: len(tokens) for name, tokens in found.items()} == {"a": 3, "b": 5, "c": 7, "d": 9}
    assert launches == sum(len(tokens) - 1 for tokens in found.values())


@pytest.mark.parametrize("most", [2, 3, 4, 5])
def test_drafts_that_reach_over_an_answers_end_are_no_part_of_it(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    parts = DecodeParts()
    (request,) = parts.run("a", most=most)
    drawn = [DrawnToken(token, None) for token in (11, 12, 13)]
    told = output(parts, request, RowOutput(drawn[2], accepted=tuple(drawn[:2])), monkeypatch)
    kept = min(3, most - 1)
    assert request.answer[1:] == [11, 12, 13][:kept]
    assert told == ([RequestFinished(request, "length", None)] if most <= 4 else [])
    assert parts.steps.counters["tokens_generated"] == kept
