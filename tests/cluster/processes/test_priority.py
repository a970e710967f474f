"""Priorities of threads: lowered without any right, raised where that is allowed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from twinpool.cluster.processes.priority import STARTING, may_raise, niceness_of_thread, run_low, set_niceness
from twinpool.cluster.worker_process.grpc_service import AsyncioThread

ROOT = Path(__file__).parents[3]


def of_kernel(thread: int) -> int:
    """A thread's niceness as the kernel has it (proc(5), field 19)."""
    return int(Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[16])


def test_what_starts_runs_low_with_all_threads_that_it_starts_and_who_waits_for_it_stays_as_it_was() -> None:
    before = niceness_of_thread()
    found: list[int] = []

    def start() -> str:
        found.append(of_kernel(threading.get_native_id()))
        inner = threading.Thread(target=lambda: found.append(of_kernel(threading.get_native_id())))
        inner.start()
        inner.join()
        return "done"

    assert run_low(start) == "done"
    assert found == [max(STARTING, before)] * 2
    assert of_kernel(threading.get_native_id()) == before
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(of_kernel(threading.get_native_id())))
    thread.start()
    thread.join()
    assert later == [before], "who serves begins from there"


def test_what_fails_fails_for_who_waits_for_it() -> None:
    def fails() -> None:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        run_low(fails)


def test_a_loop_runs_with_the_niceness_that_it_is_given() -> None:
    lower = niceness_of_thread() + 1
    loop = AsyncioThread("low", niceness=lower)

    async def ask() -> int:
        return of_kernel(threading.get_native_id())

    try:
        assert loop.run(ask(), 5.0) == lower
    finally:
        loop.stop()


def test_without_the_right_to_raise_that_is_said_and_who_serves_is_as_before() -> None:
    program = (
        "import os\n"
        "from twinpool.cluster.processes.priority import may_raise, niceness_of_thread as now, run_low, set_niceness\n"
        "if os.getuid() == 0: os.setgroups([]); os.setuid(65534)\n"
        "before = now()\n"
        "print(may_raise(), set_niceness(before - 5), run_low(now) - before, now() - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    low = max(STARTING, niceness_of_thread()) - niceness_of_thread()
    assert done.stdout.split() == ["False", "False", str(low), "0"]


def test_it_may_be_tried_without_changing_anything() -> None:
    before = niceness_of_thread()
    assert may_raise() in (True, False)
    assert niceness_of_thread() == before
    assert set_niceness(before) or os.getuid()
