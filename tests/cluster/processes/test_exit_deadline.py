"""A call that never returns ends its process, and says what it waited for; one that returns does nothing."""

from __future__ import annotations

import subprocess
import sys

STUCK = """
import logging, socket
from twinpool.cluster.processes.priority import exit_deadline
logging.basicConfig()
one, other = socket.socketpair()
with exit_deadline(0.1, "nobody answers"):
    one.recv(1)
"""
DONE = """
from twinpool.cluster.processes.priority import exit_deadline
with exit_deadline(600.0, "nobody answers"):
    pass
raise SystemExit(7)
"""


def test_a_call_that_never_returns_ends_its_process() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "nobody answers within 0.1 s" in ended.stderr


def test_one_that_returns_in_time_leaves_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", DONE], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 7
