"""The bench of the fast simulator runs each of its parts, and its figures are those of the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.serving import scale


@pytest.mark.slow
def test_every_part_answers_all_that_it_sends(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    few = ["--workers", "10", "--requests", "80", "--seconds", "60", "--rates", "0.2", "--routing-seconds", "30"]
    few += ["--policies", "session"]
    few += ["--burst-requests", "90", "--burst-seconds", "60", "--fixed", "1", "--json", str(told)]
    assert scale.main(few) == 0
    found = json.loads(told.read_text())
    assert [one["name"] for one in found["burst"]] == ["follow the load", "6 + 4"]
    assert len(found["routing"]) == 2
    for part in ("hour", "routing", "burst"):
        for one in found[part]:
            assert one["report"]["answered"] == one["report"]["sent"] > 0, one["name"]
    (hour,) = found["hour"]
    assert hour["report"]["role_sizes"] == {"prefill": [6, 6], "decode": [4, 4]}
