"""Tree, tiers and pools of every pool set against a plain model, step by step, and what the steps must have met."""

from __future__ import annotations

import pytest

from tests.support.cache_state_machine import drive, must_have_met
from tests.support.pool_sets import NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_state_is_never_wrong_lost_or_leaked_whatever_happens_around_it(name: str) -> None:
    events = must_have_met(name)
    happened = drive(name, 400, events)
    assert happened["steps that changed state"] >= 400
    missing = [event for event in events if not happened[event]]
    assert not missing, f"{missing} never happened: the run proves nothing about them"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_while_nothing_is_lost_every_request_finds_exactly_what_was_shared(name: str) -> None:
    events = ("exact find", "found on host", "found in storage", "prefetched whole")
    happened = drive(name, 250, events, disturbing=False)
    assert happened["undisturbed runs"] >= 4
    assert all(happened[event] for event in events), {event: happened[event] for event in events}
