"""When requests go out, and whose fault it is when they go out late: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from twinpool.cli.load.open_loop import Ask, OpenLoop
from twinpool.cli.load.openai_client import Outcome
from twinpool.cli.load.replay_figures import RecentFigures, figures_of
from twinpool.sim.scale.cluster_plan import AnswerTarget


class VirtualTime:
    """A clock that jumps to the next thing that somebody sleeps for, once everybody waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self._waiting: list[tuple[float, int, asyncio.Event]] = []
        self._count = 0

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self._count += 1
        self._waiting.append((self.now + seconds, self._count, event))
        await event.wait()

    async def drive(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if self._waiting:
                self._waiting.sort(key=lambda one: one[:2])
                at, _, event = self._waiting.pop(0)
                self.now = max(self.now, at)
                event.set()
        await task


def played(
    at_s: Sequence[float], concurrency: int, takes_s: Callable[[int], float], encode_s: float = 0.0
) -> list[Outcome]:
    """The outcomes of requests that are due at `at_s`, whose answers take `takes_s`, and whose bytes take `encode_s`
    to make, in which the client does nothing else."""
    time = VirtualTime()

    async def send(request: bytes, outcome: Outcome) -> Outcome:
        outcome.sent_s = time.now
        await time.sleep(takes_s(int(request)))
        outcome.arrivals_s = [time.now]
        outcome.end_s, outcome.completion_tokens, outcome.prompt_tokens = time.now, 1, 1
        return outcome

    def encode(ask: Ask, number: int) -> bytes:
        time.now += encode_s
        return b"%d" % number

    loop = OpenLoop(send, encode, concurrency, lambda: time.now, time.sleep)
    ended: list[Outcome] = []
    asyncio.run(time.drive(loop.run([Ask(at, (1,), 1) for at in at_s], ended.append)))
    assert len(ended) == loop.sent == len(at_s)
    assert loop.running == 0
    return loop.outcomes


def test_requests_go_out_when_they_are_due_however_slow_answers_are() -> None:
    outcomes = played([0.0, 1.0, 1.5], 100, lambda _: 50.0)
    assert [one.sent_s - 100.0 for one in outcomes] == [0.0, 1.0, 1.5]
    assert [(one.held_s, one.lag_s) for one in outcomes] == [(0.0, 0.0)] * 3


def test_who_waits_for_a_place_is_held_and_so_are_those_behind_it() -> None:
    outcomes = played([0.0, 1.0, 2.0, 30.0], 1, lambda _: 10.0)
    assert [one.sent_s - 100.0 for one in outcomes] == [0.0, 10.0, 20.0, 30.0]
    assert [one.held_s for one in outcomes] == [0.0, 9.0, 18.0, 0.0]
    assert [one.lag_s for one in outcomes] == [0.0] * 4, "none of it is the client's"
    figures = figures_of(outcomes, AnswerTarget(10.5, 1.0), 40.0, 1.0, counts_prompts=True, exact=True)
    assert figures.ttft.p50 == pytest.approx((10.0 + 19.0) / 2), "held time is what a client waits, too"
    assert figures.answer.mean == pytest.approx((10.0 + 19.0 + 28.0 + 10.0) / 4), "and so for the whole answer"
    assert (figures.good, figures.lagged) == (2, False)


def test_a_place_that_is_free_again_is_taken_by_a_late_request_that_was_due_while_none_was() -> None:
    outcomes = played([0.0, 1.0, 1.0, 1.0], 2, lambda number: 5.0 if number < 2 else 1.0)
    assert [one.held_s for one in outcomes] == [0.0, 0.0, 4.0, 5.0]


def test_a_client_that_does_not_keep_up_is_late_by_its_own_fault() -> None:
    outcomes = played([0.0, 0.1, 0.2], 100, lambda _: 1.0, encode_s=0.5)
    assert [round(one.lag_s, 6) for one in outcomes] == [0.5, 0.9, 1.3]
    assert [one.held_s for one in outcomes] == [0.0] * 3
    figures = figures_of(outcomes, AnswerTarget(), 3.0, 1.5, counts_prompts=True, exact=True)
    assert figures.lagged
    assert figures.client_ceiling == pytest.approx(2.0), "3 requests took 1.5 s of a core"
    assert figures.ttft.p99 == pytest.approx(1.0), "its lateness isn't the endpoint's"


def test_recent_figures_forget_and_count_all() -> None:
    recent = RecentFigures(AnswerTarget(1.0, 1.0), seconds=10.0)
    for second in range(30):
        slow = second < 15
        recent.add(Outcome(second, second, 1, 1, second + 0.5, [second + (5.0 if slow else 0.5)], 1, 0, 1))
    recent.add(Outcome(30, 30, 1, 1, 30.0, error="cut"))
    ttft, gaps, rate = recent.look(30.0)
    assert (ttft.count, ttft.p99, gaps.count, rate) == (10, 0.5, 0, 1.0)
    assert (recent.ended, recent.good, recent.errors) == (31, 15, {"cut": 1})


def ended(sent_s: float, *arrivals_s: float, error: str | None = None, note: str = "", held_s: float = 0.0) -> Outcome:
    """An outcome that was due a second before it was sent, for that it had to wait so long; it ends with its last
    token."""
    return Outcome(
        sent_s - 1.0 - held_s, sent_s, 10, 3, arrivals_s[-1] if arrivals_s else sent_s + 0.5, list(arrivals_s), 12, 6,
        len(arrivals_s), error=error, note=note, held_s=held_s,
    )  # fmt: skip


def test_figures_are_of_what_ended_well_and_the_rest_is_counted_by_its_kind() -> None:
    good, late = ended(10.0, 12.0, 13.0, 14.0), ended(20.0, 23.0, 24.0, 26.0, held_s=2.0)
    under_way = Outcome(29.0, 30.0, 10, 3, arrivals_s=[31.0])
    failed = [ended(40.0, error="status 500", note=note) for note in ("first", "second")]
    target = AnswerTarget(2.0, 1.0)
    found = figures_of([good, late, under_way, *failed], target, 10.0, 5.0, counts_prompts=True, exact=True)
    assert (found.sent, found.answered, found.unfinished) == (5, 2, 1)
    assert (found.errors, found.notes) == ({"status 500": 2}, {"status 500": "first"})
    assert found.wrong == {"prompt's tokens differ": 2}
    assert (found.good, found.goodput) == (1, 0.1), "a target that is just kept is kept; one that waited is late"
    assert (found.ttft.count, found.ttft.mean) == (2, 3.5)
    assert (found.itl.count, found.itl.mean) == (4, 1.25)
    assert (found.tpot.count, found.tpot.mean) == (2, 1.25)
    assert (found.answer.count, found.answer.mean) == (2, 6.0)
    assert (found.held.count, found.held.mean) == (5, 0.4)
    assert (found.late.count, found.late.mean) == (5, 1.0)
    assert (found.requests_per_s, found.output_tokens_per_s, found.input_tokens_per_s) == (0.2, 0.6, 2.4)
    assert (found.cached_share, found.client_cores) == (0.5, 0.5)


def test_a_run_without_an_answer_has_no_latencies_and_no_rates() -> None:
    found = figures_of([], AnswerTarget(2.0, 1.0), 0.0, 0.0, counts_prompts=False, exact=False)
    assert (found.sent, found.answered, found.unfinished, found.errors, found.wrong) == (0, 0, 0, {}, {})
    assert (found.ttft.count, found.ttft.p99, found.requests_per_s, found.cached_share) == (0, 0.0, 0.0, 0.0)
