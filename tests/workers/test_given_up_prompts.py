"""What was done for a prompt that is given up is reported once: it was work, and it counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.hash_colocated import hash_colocated
from tests.support.worker_pair import SESSION
from tests.support.worker_parts import lengths_of, table_of
from tests.workers.test_any_state import hash_pair
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.router_commands import Cancel
from twinpool.contracts.messages.worker_events import Event, LegReport, Tokens
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.retraction.memory_pressure import KNOWN
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.request import PrefillRequest
from twinpool.prefill.worker import PrefillWorker

CHUNK, PROMPT = 8, list(range(1, 50))
PARAMS = SamplingParams(max_tokens=4, temperature=0.0)
DEADLINE_S = 60.0


class GivenUp:
    """The worker that computes a prompt, what it has said of it, and its end half-way."""

    def __init__(self, worker: PrefillWorker | DecodeWorker, prompt: Callable[[], PrefillRequest | None]) -> None:
        self.worker, self._prompt = worker, prompt
        self.said: list[Event] = []

    def step(self) -> None:
        self.said += [event for _, event in self.worker.step()]

    def until_computed(self, least: int) -> int:
        """Step until so many positions of it are computed; returns how many are."""
        for _ in range(200):
            prompt = self._prompt()
            if prompt is not None and prompt.computed >= least:
                return prompt.computed
            self.step()
        raise AssertionError("it was never computed")

    def reports(self) -> list[LegReport]:
        return [event for event in self.said if isinstance(event, LegReport) and event.role is Role.PREFILL]


def end(given_up: GivenUp, request: RequestId, clock: ManualClock, how: str) -> None:
    if how == "cancelled":
        given_up.worker.handle(SESSION, Cancel(request, 0))
    else:
        clock.advance(DEADLINE_S + 1)
    for _ in range(3):
        given_up.step()


@pytest.mark.parametrize("how", ["cancelled", "too late"])
@pytest.mark.parametrize("least", [CHUNK, 3 * CHUNK])
def test_prefill_reports_what_it_computed(how: str, least: int) -> None:
    clock, pages = ManualClock(), dict.fromkeys((Role.PREFILL, Role.DECODE), 200)
    with hash_pair("full", pages, clock=clock, prefill={"chunk_tokens": CHUNK}) as both:
        request = both.submit(PROMPT, PARAMS, deadline_s=DEADLINE_S)
        assert isinstance(both.prefill, PrefillWorker)
        table = table_of(both.prefill)
        given_up = GivenUp(both.prefill, lambda: next(iter(table), None))
        computed = given_up.until_computed(least)
        end(given_up, request, clock, how)
        both.cancel(request)
        (report,) = given_up.reports()
        assert (report.request_id, report.computed_tokens, report.cached_tokens) == (request, computed, 0)
        assert least <= computed < len(PROMPT)


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_a_colocated_worker_does_so_too(how: str) -> None:
    clock, prefill, colocate = ManualClock(), {"chunk_tokens": CHUNK}, {"prompt_tokens": CHUNK}
    with hash_colocated("full", 200, clock=clock, prefill=prefill, colocate=colocate) as both:
        request = both.submit(PROMPT, PARAMS, deadline_s=DEADLINE_S)
        given_up = GivenUp(both.worker, lambda: next(iter(both.worker._prompts.admitted), None))  # type: ignore[attr-defined]
        computed = given_up.until_computed(CHUNK)
        end(given_up, request, clock, how)
        (report,) = given_up.reports()
        assert (report.request_id, report.computed_tokens) == (request, computed)


def test_what_has_been_reported_or_was_never_begun_is_not_reported_again() -> None:
    pages = dict.fromkeys((Role.PREFILL, Role.DECODE), 200)
    with hash_pair("full", pages) as both:
        assert isinstance(both.prefill, PrefillWorker)
        queued = both.submit(PROMPT, PARAMS)
        both.prefill.handle(SESSION, Cancel(queued, 0))
        first = both.submit(PROMPT, PARAMS, legs=(Role.PREFILL,))  # Nobody grants it pages: it stays when computed.
        given_up = GivenUp(both.prefill, lambda: None)
        while not any(isinstance(event, Tokens) for event in given_up.said):
            given_up.step()
        both.prefill.handle(SESSION, Cancel(first, 0))
        given_up.step()
        both.cancel(queued)
        assert [report.request_id for report in given_up.reports()] == [first]


def test_a_request_that_ends_before_it_runs_says_nothing_of_how_long_answers_are() -> None:
    pages = dict.fromkeys((Role.PREFILL, Role.DECODE), 200)
    with hash_pair("full", pages) as both:
        assert isinstance(both.decode, DecodeWorker)
        for _ in range(KNOWN):
            both.decode.handle(SESSION, Cancel(both.submit(PROMPT, PARAMS), 0))
        assert lengths_of(both.decode).to_come(400) == 400, "nothing is known yet"


def test_the_part_that_a_cache_had_is_reported_as_such() -> None:
    clock, pages = ManualClock(), dict.fromkeys((Role.PREFILL, Role.DECODE), 200)
    with hash_pair("full", pages, clock=clock, prefill={"chunk_tokens": CHUNK}) as both:
        both.run(both.submit(PROMPT[:16], PARAMS))
        request = both.submit(PROMPT, PARAMS, deadline_s=DEADLINE_S)
        assert isinstance(both.prefill, PrefillWorker)
        table = table_of(both.prefill)
        given_up = GivenUp(both.prefill, lambda: next(iter(table), None))
        computed = given_up.until_computed(CHUNK)
        end(given_up, request, clock, "cancelled")
        both.cancel(request)
        (report,) = given_up.reports()
        assert (report.computed_tokens, report.cached_tokens) == (computed, 16)
        assert sum(report.cached_by_tier.values()) == 16
