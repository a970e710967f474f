"""What subcommands print, and the codes that they exit with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FINE, REFUSED, USAGE, NO_CLUSTER = 0, 1, 2, 3


def print_line(text: str) -> None:
    """Print a line at once, as somebody may read along."""
    print(text, flush=True)


def print_table(shown: RenderableType) -> None:
    """Print a table."""
    console().print(shown)


def console() -> Console:
    """Standard output: output into a pipe has to fit no screen, and no cell may be cut."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 160)


def plain_table(*titles: str) -> Any:
    """Return an empty rich table; the first two columns and ``node`` are aligned left, the others right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index < 2 or title == "node" else "right", no_wrap=True)
    return table
