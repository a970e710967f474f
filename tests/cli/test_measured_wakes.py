"""What `plan --measure` says of a first request that wakes a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.cli.load.measure_costs import WAKE_S, measure_wakes
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.outside_data import read_json


class Operator:
    """A cluster of two workers that takes 3 s to wake from level 1, and 8 s from level 2."""

    def __init__(self, *, wakes: bool = True) -> None:
        self.now, self.wakes, self.level = 0.0, wakes, 0
        self.ready_at = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def rows(self) -> list[dict[str, Any]]:
        awake = not self.level and self.now >= self.ready_at
        return [{"state": "ready" if awake else "left"} for _ in range(2)]

    def call(self, method: str, path: str, body: bytes) -> None:
        assert method == "POST"
        if path == "/v1/sleep":
            self.level = int(read_json(body)["level"])
        elif self.wakes:
            self.ready_at, self.level = self.now + {1: 3.0, 2: 8.0}[self.level], 0


def test_it_says_how_long_each_level_takes() -> None:
    said: list[str] = []
    measure_wakes(Operator(), said.append)  # type: ignore[arg-type]
    assert [line.partition(" s after")[0].rpartition(" ")[2] for line in said] == ["3.0", "8.0"]
    assert "wake_timeout_s=17" in said[1], "twice what it took, looked for every 50 ms"


def test_one_that_does_not_wake_is_an_error() -> None:
    operator = Operator(wakes=False)
    with pytest.raises(TwinpoolError, match="0 workers serve after 600 s, not 2"):
        measure_wakes(operator, lambda line: None)  # type: ignore[arg-type]
    assert operator.now > WAKE_S
