"""The planted bugs of the simulator still apply, and cover the hazards."""

from __future__ import annotations

import subprocess
from collections import Counter

from tests.sim.bugs.run import ROOT, planted


def test_the_planted_bugs_apply_and_are_of_every_group_of_hazards() -> None:
    bugs = planted()
    for bug in bugs:
        ran = subprocess.run(
            ["git", "apply", "--check", str(bug.path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, f"{bug.path.name}: {ran.stderr}"
    groups = Counter(bug.rule[0] for bug in bugs)
    assert len(bugs) >= 10
    assert min(groups[group] for group in "ABCD") >= 2, groups
