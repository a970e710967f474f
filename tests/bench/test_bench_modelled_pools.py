"""The bench of pools that follow the load: what it replays, and a short run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.autoscaling import modelled_pools
from twinpool.sim.scale.trace_file import TRACE_BLOCK_TOKENS, TraceLine


def test_a_prompt_costs_what_no_earlier_one_of_its_round_has_and_rounds_begin_anew() -> None:
    lines = [
        TraceLine(0.0, 2 * TRACE_BLOCK_TOKENS, 10, (1, 2)),
        TraceLine(4.0, 2 * TRACE_BLOCK_TOKENS + 7, 20, (1, 3, 4)),
    ]
    asks = modelled_pools.replayed(lines, [(5.0, 2.0, 1.0), (3.0, 1.0, 4.0)])
    assert [(ask.at_s, ask.prompt, ask.answer) for ask in asks] == [
        (0.0, 1024, 10), (2.0, 519, 20), (2.0, 1024, 10), (4.0, 519, 20), (4.0, 1024, 10), (5.0, 256, 40)
    ]  # fmt: skip


@pytest.mark.slow
def test_a_short_run_shows_the_autoscaler_beside_fixed_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    assert modelled_pools.main(["--quick", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    follows, fixed = found["burst"]
    assert (follows["sizes"], fixed["sizes"]) == ("follow the load", "2 + 2")
    assert follows["changes"] > 0 == fixed["changes"]
    assert follows["first_met"] > fixed["first_met"]
    assert "a shift" in capsys.readouterr().out
