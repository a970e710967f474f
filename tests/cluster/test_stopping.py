"""The end that was asked for has a deadline: shorter before the cluster is ready, and five seconds at most."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from cluster.serve import shutdown_signal as stopping
from cluster.serve.shutdown_signal import ShutdownSignal


class Timers:
    """In `threading.Timer`'s place: what was set, and to do what."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []
        self.started = 0

    def __call__(self, seconds: float, then: Callable[[], None]) -> Timers:
        self.set.append((seconds, then))
        return self

    def start(self) -> None:
        self.started += 1


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    timers = Timers()
    monkeypatch.setattr(threading, "Timer", timers)
    return timers


def test_an_end_that_is_asked_for_has_a_deadline_of_less_than_five_seconds(
    timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[int] = []
    monkeypatch.setattr(stopping, "_die", lambda: died.append(1))
    starting, serving = ShutdownSignal(), ShutdownSignal()
    serving.ready()
    for run in (starting, serving):
        run._ask()
        assert run.asked
    (before, die), (after, _) = timers.set
    assert timers.started == 2
    assert 0 < before < after < 5
    die()
    assert died == [1]


def test_who_asks_twice_does_not_wait(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[int] = []
    monkeypatch.setattr(stopping, "_die", lambda: died.append(1))
    run = ShutdownSignal()
    run._ask()
    assert died == []
    run._ask()
    assert died == [1]
