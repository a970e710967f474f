"""The times of answers' tokens: how quickly an answer grows, and what lies between two deliveries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import pytest

from tests.router.http_server import DEMO
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.router_report import percentile
from twinpool.contracts.messages.worker_events import Done, LegReport
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.router.metrics import request_tally
from twinpool.router.metrics.request_tally import RequestTally
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.text.tokenizer import read_model_tokenizer


@dataclass(frozen=True)
class Asked:
    """What a choice reads of the request that it belongs to."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    eos: frozenset[int] = frozenset()
    answer_format: None = None
    shape: str = "openai"


def choice_of(name: str) -> ChoiceOutput:
    routed = RoutedRequest(RequestId(name), (1, 2), SamplingParams(max_tokens=500), now=0.0, deadline=60.0)
    return ChoiceOutput(0, routed, cast(GenerateRequest, Asked()), read_model_tokenizer(DEMO, 1000), "")


def answered(tally: RequestTally, deliveries: Sequence[tuple[float, int]], *, fails: bool = False) -> None:
    """Count an answer whose tokens come in these deliveries: when, and how many."""
    choice = choice_of("r")
    for at, count in deliveries:
        tally.tokens(choice, count, at)
        choice.take([7] * count, [TokenLogprob(7, 0.0, ())] * count)
    choice.ended_at = deliveries[-1][0] if deliveries else 1.0
    if fails:
        choice.error = Done(RequestId("r"), 1, "error", error=ErrorKind.WORKER)
    tally.ended(choice)


def test_what_was_done_for_prompts_without_a_first_token_counts_once() -> None:
    tally = RequestTally()
    left, answered_one = choice_of("left"), choice_of("answered")
    tally.unanswered(left)
    tally.tokens(answered_one, 1, 1.0)
    for name, tokens in (("left", (10, 20)), ("left", (1, 1)), ("answered", (1, 1)), ("other", (1, 1))):
        computed, cached = tokens
        report = LegReport(
            RequestId(name), 0, Role.PREFILL, WorkerName("p"), computed_tokens=computed, cached_tokens=cached
        )
        tally.report(report)
    assert tally.prompt_tokens == 30 + len(answered_one.request.prompt)
    assert tally.computed["p", Role.PREFILL] == 13


def test_choices_whose_workers_never_report_take_no_more_room_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tally, "MAX_UNANSWERED", 3)
    tally = RequestTally()
    for number in range(10):
        tally.unanswered(choice_of(str(number)))
    assert list(tally._unanswered) == ["7", "8", "9"]


def counted(tally: RequestTally) -> int:
    return sum(tally.output_token_shape.counts)


def test_drafts_that_come_together_make_gaps_short_and_not_the_time_of_a_token() -> None:
    """Four tokens every 40 ms, told 0.1 ms apart: a reader gets one each 10 ms."""
    tally = RequestTally()
    steps = [(0.5 + 0.040 * step + 0.0001 * draft, 1) for step in range(25) for draft in range(4)]
    answered(tally, steps)
    gap_s, pace_s = percentile(tally.gap_shape.counts, 0.5), percentile(tally.output_token_shape.counts, 0.5)
    assert gap_s is not None
    assert pace_s is not None
    assert gap_s < 0.001
    assert tally.tpot.sum == pytest.approx((steps[-1][0] - steps[0][0]) / 99)
    assert pace_s == pytest.approx(0.01, rel=0.2)


def test_tokens_that_one_delivery_has_are_counted_one_by_one() -> None:
    tally = RequestTally()
    answered(tally, [(1.0, 1), (1.4, 4), (1.8, 4)])
    assert tally.tpot.sum == pytest.approx(0.8 / 8)


def test_an_answer_that_was_taken_up_again_is_judged_by_what_came_since() -> None:
    tally = RequestTally()
    answered(tally, [(3.0, 200), (3.1, 1), (3.2, 1)])
    assert tally.tpot.sum == pytest.approx(0.1)


def test_an_answer_of_one_token_and_one_that_failed_have_no_time_of_a_token() -> None:
    tally = RequestTally()
    answered(tally, [(1.0, 1)])
    answered(tally, [])
    answered(tally, [(1.0, 1), (2.0, 5)], fails=True)
    assert counted(tally) == 0
    answered(tally, [(1.0, 1), (2.0, 5)])
    assert counted(tally) == 1
