"""The end that was asked for: one request for all signals of a second, one exit code, and a deadline for each phase."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from twinpool.cluster.serve import shutdown_signal as stopping
from twinpool.cluster.serve.shutdown_signal import ASKED, END_S, FAILED, ONE_REQUEST_S, START_DEADLINE_S, ShutdownSignal
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config import ClusterConfig


class Timers:
    """In `threading.Timer`'s place: what was set, and to do what."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []
        self.started = 0

    def __call__(self, seconds: float, then: Callable[..., None], arguments: tuple[str, int]) -> Timers:
        self.set.append((seconds, lambda: then(*arguments)))
        return self

    def start(self) -> None:
        self.started += 1


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    """None of this file's deadlines is a real one, which would end the process of the tests later."""
    timers = Timers()
    monkeypatch.setattr(threading, "Timer", timers)
    return timers


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the process would have ended by now."""
    codes: list[int] = []
    monkeypatch.setattr(stopping, "_end", codes.append)
    return codes


def test_an_end_that_is_asked_for_has_a_deadline_and_says_when_it_was_missed(
    timers: Timers, ended: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    starting, serving = ShutdownSignal(7.0), ShutdownSignal(7.0)
    serving.ready()
    for run in (starting, serving):
        run.ask()
        assert run.asked
        run.promise(ASKED)  # it has been promised
    (before, _), (after, end) = timers.set
    assert timers.started == 2
    assert (before, after) == (START_DEADLINE_S, 7.0 + END_S)
    assert ended == []
    end()
    assert ended == [ASKED]
    assert "within 13 s" in capfd.readouterr().err


@pytest.mark.parametrize("serves", [False, True])
def test_an_end_that_nobody_asked_for_has_a_deadline_and_another_code(
    timers: Timers, ended: list[int], serves: bool
) -> None:
    run = ShutdownSignal(7.0)
    run.serving = serves
    run.promise(FAILED)
    ((seconds, end),) = timers.set
    assert seconds == (END_S if serves else START_DEADLINE_S)
    end()
    assert ended == [FAILED] != [ASKED]


def test_answers_have_their_time_from_the_first_request_on() -> None:
    clock = ManualClock()
    run = ShutdownSignal(7.0, clock=clock)
    run.ready()
    clock.advance(100.0)
    run.ask()
    assert run.answers_s == 7.0
    clock.advance(0.5)
    run.ask()
    assert run.answers_s == 6.5
    clock.advance(30.0)
    assert run.answers_s == 0.0


def test_answers_may_take_longer_than_most_and_an_end_fits_into_kubernetes_own_patience() -> None:
    assert 10 < ClusterConfig().stop_timeout_s <= 30 - END_S + 1


def test_signals_of_one_second_are_one_request_and_a_later_one_ends_it_at_once(
    timers: Timers, ended: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()
    run = ShutdownSignal(4.0, clock=clock)
    for _ in range(3):
        run.ask()
    clock.advance(ONE_REQUEST_S - 0.01)
    run.ask()
    assert (ended, timers.started) == ([], 1)
    clock.advance(0.01)
    run.ask()
    assert ended == [ASKED]
    assert "asked again" in capfd.readouterr().err
