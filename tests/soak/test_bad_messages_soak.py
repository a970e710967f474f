"""Ten minutes of damaged messages on every way into workers, on both planes of several processes."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.support.message_fuzz import flood

SECONDS = 300.0
"""On each plane."""
MESSAGES = 150


@pytest.mark.soak
@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_ten_minutes_of_damaged_messages_end_nothing(plane: str) -> None:
    """No worker ends, no page of anybody changes, and the hand-over in the middle of it arrives as it was sealed."""
    end, number = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        number += 1

        @seed(number)
        @given(data=st.data())
        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def some(data: st.DataObject) -> None:
            flood(plane, data, MESSAGES)

        some()
    assert number
