"""The load of a window, field by field, from samples whose sums are done by hand."""

from __future__ import annotations

import pytest

from twinpool.cluster.autoscaling.load_window import LoadWindow, MeasuredLoad, Outcomes, WorkerLoad
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.router_report import LatencyCounts

WINDOW_S = 20.0


def prefill(number: int, told: int, computed: float, waiting: int, rate: float) -> WorkerLoad:
    name = WorkerName(f"prefill-{number}")
    return WorkerLoad(
        name, Incarnation(1), Role.PREFILL, told, 0, 100, 100, waiting, computed=computed, compute_rate=rate
    )


def decode(number: int, told: int, generated: float, retractions: float, ungranted: int = 0) -> WorkerLoad:
    """The first has 30 of 100 pages free, and 3 requests run; the second 50 of 200, and 4. One is put off on each."""
    total, free, running = ((100, 30, 3), (200, 50, 4))[number]
    name = WorkerName(f"decode-{number}")
    return WorkerLoad(
        name, Incarnation(1), Role.DECODE, told, running, total, free, 0, generated=generated, retractions=retractions,
        retracted=1, ungranted=ungranted, granted=1 + number,
    )  # fmt: skip


def take(window: LoadWindow, second: int) -> MeasuredLoad:
    """Prompts have 100 tokens each throughout: of what was computed and what the queue grew by, that many came."""
    computed, waiting, came = {
        0: ((0, 0), (0, 0), 0),
        10: ((1000, 0), (100, 200), 13),
        25: ((2500, 0), (300, 200), 30),
        40: ((4000, 600), (300, 600), 55),
    }[second]
    retractions, ungranted = {0: (0, 0), 10: (2, 0), 25: (4, 0), 40: (5, 12)}[second]
    totals = {
        0: LatencyCounts(came),
        10: LatencyCounts(came, 12, 1, 100, 3),
        25: LatencyCounts(came, 20, 1, 300, 3),
        40: LatencyCounts(came, 50, 5, 700, 33),
    }[second]
    rows = [prefill(n, second, computed[n], waiting[n], (400.0, 200.0)[n]) for n in (0, 1)]
    rows += [decode(0, second, 10.0 * second, retractions, ungranted), decode(1, second, 5.0 * second, 7.0)]
    return window.take(float(second), rows, totals)


def test_every_number_of_a_window() -> None:
    """The last sample's window begins at 10 s: the one before it is the first that is older than the window."""
    window = LoadWindow(WINDOW_S)
    for second in (0, 10, 25):
        assert not take(window, second).lacked
    load = take(window, 40)
    assert (load.prefill, load.decode) == (2, 2)
    assert load.computed == pytest.approx(100 + 20)
    assert load.backlog == 900
    assert load.offered == pytest.approx(120 + (900 - 300) / 30)
    assert load.rate == 300.0, "the median"
    assert load.requests == pytest.approx((55 - 13) / 30)
    assert (load.pages, load.used_pages, load.running, load.granted) == (300, 70 + 150, 7, 1 + 2)
    assert load.generated == pytest.approx(15.0)
    assert load.ungranted == 12
    assert load.lacking == pytest.approx(12 - 9), "nine prompts are still to be computed"
    assert load.lacked
    assert load.put_off == (5 - 2) + 2
    assert load.first == Outcomes(50 - 12, 5 - 1)
    assert load.gaps == Outcomes(700 - 100, 33 - 3)
    assert load.busy == pytest.approx(120 / (2 * 300))
    assert load.queue_s == pytest.approx(900 / (2 * 300))


def test_a_lack_is_remembered_for_the_window() -> None:
    window = LoadWindow(WINDOW_S)
    lacks = []
    for second, ungranted in ((0, 0), (5, 1), (10, 0), (25, 0), (30, 0)):
        load = window.take(float(second), [decode(0, second, 0.0, 0.0, ungranted)], LatencyCounts())
        assert load.lacking == ungranted, "nothing is to be computed"
        lacks.append(load.lacked)
    assert lacks == [False, True, True, True, False]


def test_one_sample_has_no_rates() -> None:
    load = take(LoadWindow(WINDOW_S), 40)
    assert (load.computed, load.offered, load.requests, load.generated) == (0.0, 0.0, 0.0, 0.0)
    assert load.first == load.gaps == Outcomes()
    assert load.put_off == 2, "what is put off now"
