"""The state machine of every pool set for 20,000 steps that changed state, and for 20,000 more with nothing lost."""

from __future__ import annotations

import pytest

from tests.support.cache_state_machine import drive, must_have_met
from tests.support.pool_sets import NAMES

CHANGES = 20_000


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("disturbing", [True, False], ids=["disturbed", "undisturbed"])
@pytest.mark.parametrize("name", NAMES)
def test_state_survives_twenty_thousand_steps(name: str, disturbing: bool) -> None:
    events = must_have_met(name, long=True) if disturbing else ()
    happened = drive(name, CHANGES, events, disturbing=disturbing)
    print(f"\n{name}: {happened['steps that changed state']} steps that changed state")
    for event, count in sorted(happened.items()):
        print(f"  {event}: {count}")
    assert happened["steps that changed state"] >= CHANGES
    missing = [event for event in events if not happened[event]]
    assert not missing, f"{missing} never happened: the run proves nothing about them"
