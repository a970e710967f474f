"""A signal that comes at the worst moment: while the main thread holds the lock that acting on it needs."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.support.served_cluster import ROOT

ACTS = """
import os, signal, threading
from twinpool.contracts.signal_listener import SignalListener

seen, lock = [], threading.Lock()
both = threading.Semaphore(0)

def act(number):
    with lock:
        seen.append(number)
    both.release()

listener = SignalListener((signal.SIGTERM, signal.SIGINT), act)
listener.listen({handler})
listener.listen({handler})
signal.signal(signal.SIGUSR1, lambda number, frame: None)
with lock:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(os.getpid(), number)
assert both.acquire(timeout=60) and both.acquire(timeout=60)
assert seen == [signal.SIGTERM, signal.SIGINT], seen
"""
HANDLERS = {
    "cli/commands.py": "ends the process, or raises; takes no lock",
    "cli/load/demo_command.py": "does nothing",
    "cluster/processes/keeper.py": "counts",
    "cluster/processes/reaper.py": "ignored",
    "cluster/serve/detached_cluster.py": "appends to a list, and puts handlers back",
    "cluster/serve/serve_one_process.py": "raises another signal",
    "contracts/signal_listener.py": "its own",
    "router/main.py": "the kernel's",
    "router/tokenizer_pool/tokenizer_process.py": "ignored, and the kernel's",
}
"""The files that install handlers of signals, and why theirs can't wait for a lock."""


@pytest.mark.parametrize("handler", ["", "lambda number, frame: None"])
def test_signals_are_acted_on_in_order_whatever_the_main_thread_holds(handler: str) -> None:
    command = [sys.executable, "-c", ACTS.format(handler=handler)]
    child = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (child.returncode, child.stderr) == (0, "")


def test_handlers_of_signals_are_installed_where_they_cannot_wait_for_a_lock() -> None:
    found = set()
    for folder in ("cache", "cli", "cluster", "colocate", "contracts", "decode", "engine", "prefill", "router",
                   "transfer", "worker"):  # fmt: skip
        for path in (ROOT / folder).rglob("*.py"):
            if any(
                isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal"
                for node in ast.walk(ast.parse(path.read_text()))
            ):
                found.add(str(path.relative_to(ROOT)))
    assert found == set(HANDLERS), "does the new handler take a lock? contracts.signal_listener acts without"
