"""What the router is told of a finished prompt."""

from __future__ import annotations

from tests.support.prefill_parts import PrefillParts
from twinpool.cache.allocation import CachedTokens
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.worker_events import LegReport
from twinpool.prefill.request import first_token_events


def test_a_report_counts_what_was_computed_in_all_starts_and_what_each_tier_had() -> None:
    request = PrefillParts().ask("a", 40)
    request.cached, request.computed = CachedTokens(device=8, host=4, storage=12), 30
    request.marks["queue"] = 0.5
    assert first_token_events(request, WorkerName("prefill-0")) == [
        LegReport(
            request.submit.request_id, 0, Role.PREFILL, WorkerName("prefill-0"), {"queue": 0.5}, 24, 30,
            cached_by_tier={"device": 8, "host": 4, "storage": 12},
        )
    ]  # fmt: skip
