"""What is exported about drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twinpool.router.metrics.worker_metrics import draft_metrics


def test_workers_that_draft_have_a_sample_for_what_was_made_and_what_was_accepted() -> None:
    decode = SimpleNamespace(
        counters={"tokens_drafted": 7.0, "drafts_accepted": 5.0, "tokens_generated": 9.0, "rows_drafted": 4.0}
        | {"drafted_at_1": 4.0, "drafted_at_12": 3.0, "accepted_at_1": 3.0, "accepted_at_12": 2.0}
        | {"draft_steps_paying": 8.0, "draft_steps_without": 6.0, "draft_gain": 1.5}
    )
    workers = [
        SimpleNamespace(record=SimpleNamespace(name="decode-0"), status=decode),
        SimpleNamespace(record=SimpleNamespace(name="prefill-0"), status=SimpleNamespace(counters={"steps": 3.0})),
    ]
    samples = [s for family in draft_metrics(cast(Any, workers)) for s in family.samples]
    assert {(s.name, *s.labels.values()): s.value for s in samples} == {
        ("twinpool_draft_tokens_total", "decode-0"): 7.0,
        ("twinpool_draft_tokens_accepted_total", "decode-0"): 5.0,
        ("twinpool_draft_rows_total", "decode-0"): 4.0,
        ("twinpool_draft_place_tokens_total", "decode-0", "1"): 4.0,
        ("twinpool_draft_place_tokens_total", "decode-0", "12"): 3.0,
        ("twinpool_draft_place_tokens_accepted_total", "decode-0", "1"): 3.0,
        ("twinpool_draft_place_tokens_accepted_total", "decode-0", "12"): 2.0,
        ("twinpool_draft_steps_total", "decode-0", "paying"): 8.0,
        ("twinpool_draft_steps_total", "decode-0", "without"): 6.0,
        ("twinpool_draft_gain", "decode-0"): 1.5,
    }
