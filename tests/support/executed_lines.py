"""Cost as a number that a busy machine doesn't change: the lines of this project that a call executes."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_HERE = str(Path(__file__).parents[2])


def steps(run: Callable[[], object]) -> int:
    """Lines of the project's own code that `run` executes, each turn of a loop counted."""
    count = 0

    def line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(_HERE) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def allocated(run: Callable[[], object]) -> int:
    """Bytes that Python allocates at once while `run` runs: what it copies is in there."""
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        first, _ = tracemalloc.get_traced_memory()
        run()
        return tracemalloc.get_traced_memory()[1] - first
    finally:
        tracemalloc.stop()
