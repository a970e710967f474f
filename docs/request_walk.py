"""Counts the walk of one request in docs/architecture.md: files that its tables name, and returns to one already left.

A row is a file, opened at a name in it. A file that an earlier row named, with others between, is returned to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "architecture.md"


class Stop(NamedTuple):
    path: str
    name: str
    """The function or class to read there."""


def stops(page: str) -> list[Stop]:
    rows = re.findall(r"^\| `([\w./]+\.py)` \| `(\w+)` \| .+ \|$", page, re.MULTILINE)
    return [Stop(*row) for row in rows]


def counted(page: str) -> tuple[int, list[Stop]]:
    """How many files the walk opens, and where it returns to one."""
    walk = stops(page)
    returns = [stop for number, stop in enumerate(walk) if stop.path in {before.path for before in walk[:number]}]
    return len({stop.path for stop in walk}), returns


if __name__ == "__main__":
    files, returns = counted(PAGE.read_text())
    print(f"{files} files, {len(returns)} returns: {', '.join(f'{path} ({name})' for path, name in returns)}")
