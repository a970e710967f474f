"""What a worker's process has imported is left alone by the garbage collector."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc
from twinpool.cluster.worker_process.worker_process import PlannedWorkers
try:
    PlannedWorkers().build(None)
except AttributeError:
    print(gc.get_freeze_count(), len(gc.get_objects()))
"""


@pytest.mark.slow
def test_a_full_collection_between_two_steps_does_not_look_through_all_modules() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    frozen, looked_at = map(int, done.stdout.split())
    assert frozen > 50_000, "torch alone has more objects than that"
    assert looked_at < 0.1 * frozen
