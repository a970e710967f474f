"""What a timeline says of a request that took several attempts, or whose legs reported several times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from twinpool.contracts.ids import RequestId, Role, WorkerName
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.response_stream import timeline_of
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.text.tokenizer import ModelTokenizer

RID = RequestId("r")
ASKED: Any = SimpleNamespace(
    stops=(), include_stop=False, skip_special_tokens=True, eos=frozenset(), answer_format=None, shape="openai"
)


def report(attempt: int, role: Role, marks: dict[str, float], **counts: Any) -> LegReport:
    return LegReport(RID, attempt, role, WorkerName(f"{role}-{attempt}"), marks, **counts)


def test_a_request_that_was_placed_twice_has_the_times_of_its_last_attempt_and_the_work_of_both() -> None:
    """The first attempt's decode worker died once it had received; the second one was retracted once."""
    routed = RoutedRequest(RID, tuple(range(100)), SamplingParams(max_tokens=5), now=50.0, deadline=99.0)
    routed.workers = {Role.PREFILL: "prefill-1", Role.DECODE: "decode-1"}
    routed.progress = [
        report(0, Role.PREFILL, {"queue": 0.5, "prefill": 4.0}, cached_tokens=10, computed_tokens=90,
               cached_by_tier={"device": 10}),
        report(0, Role.DECODE, {"grant": 1.0, "arrived": 8.0, "hidden": 3.0, "exposed": 4.0}, cached_tokens=7,
               transfer_bytes=1000),
        report(1, Role.PREFILL, {"prefill": 0.25}, cached_tokens=96, computed_tokens=4, cached_by_tier={"host": 96}),
        report(1, Role.DECODE, {"grant": 0.125, "arrived": 0.375}, cached_tokens=20, transfer_bytes=300),
        report(1, Role.DECODE, {"done": 2.0}, cached_tokens=5, transfer_bytes=30),
    ]  # fmt: skip
    choice = ChoiceOutput(0, routed, ASKED, ModelTokenizer(None, None, {}), "")
    told = timeline_of(choice)
    times = told["timeline"]
    assert times["prefill"] == {"prefill": 0.25}
    assert times["decode"] == {"grant": 0.125, "arrived": 0.375, "done": 2.0}
    assert (times["transfer"], times["hidden"], times["exposed"]) == (0.25, None, None)
    assert told["cached_by_tier"] == {"host": 96}
    assert told["held_by_decode"] == 25
    assert told["computed"] == {"prefill": 94, "decode": 0}
    assert told["transfer_bytes"] == 1330
    assert told["cached_tokens"] == choice.cached_tokens == 10, "what the attempt that failed has computed is no cache"
