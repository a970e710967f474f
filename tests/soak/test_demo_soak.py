"""`twinpool demo --chaos` as a newcomer runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.served_cluster import ROOT


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_answer_is_exact_while_workers_are_killed_and_drained(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "twinpool.cli.commands", "demo", "--chaos", "--minutes", "1.5", "--port", "0"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = {name.strip(): int(value) for name, value in re.findall(r"^ +(\D+?)  (\d+)$", done.stdout, re.MULTILINE)}
    assert figures["exact"] == figures["answers"] > 100
    assert figures["wrong"] == figures["failed"] == 0
    assert figures["strikes"] >= 3
    assert figures["of them after a worker was lost or drained"] > 0
    assert "/dashboard" in done.stdout
