"""The end that was asked for has a deadline: shorter before the cluster is ready, then the configured one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from cluster.serve import shutdown_signal as stopping
from cluster.serve.shutdown_signal import START_DEADLINE_S, ShutdownSignal
from contracts.config import ClusterConfig


class Timers:
    """In `threading.Timer`'s place: what was set, and to do what."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []
        self.started = 0

    def __call__(self, seconds: float, then: Callable[..., None], arguments: tuple[float, ...]) -> Timers:
        self.set.append((seconds, lambda: then(*arguments)))
        return self

    def start(self) -> None:
        self.started += 1


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(threading, "Timer", timers)
    return timers


def test_an_end_that_is_asked_for_has_a_deadline_and_says_when_it_was_missed(
    timers: Timers, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    died: list[int] = []
    monkeypatch.setattr(stopping, "_die", lambda: died.append(1))
    starting, serving, brief = ShutdownSignal(7.0), ShutdownSignal(7.0), ShutdownSignal(0.5)
    serving.ready()
    for run in (starting, serving, brief):
        run._ask()
        assert run.asked
    (before, _), (after, die), (short, _) = timers.set
    assert timers.started == 3
    assert (before, after, short) == (START_DEADLINE_S, 7.0, 0.5)
    die()
    assert died == [1]
    assert "within 7 s" in capfd.readouterr().err


def test_an_operator_waits_less_than_five_seconds_unless_he_says_so() -> None:
    assert ClusterConfig().stop_timeout_s < 5


def test_who_asks_twice_does_not_wait(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[int] = []
    monkeypatch.setattr(stopping, "_die", lambda: died.append(1))
    run = ShutdownSignal(4.0)
    run._ask()
    assert died == []
    run._ask()
    assert died == [1]
