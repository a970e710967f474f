"""One flag of the command line, for one or more commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CommandFlag:
    """One flag or positional argument of one or more commands; `options` go to `argparse`."""

    names: tuple[str, ...]
    commands: tuple[str, ...]
    help: str
    options: dict[str, Any] = field(default_factory=dict)
    same_as: str = ""
    """Of a positional argument: the flag of these commands that it stands for, and whose value it becomes."""
    needed: bool = False
    """Of one that stands for a flag: whether either must be given."""


def trace_flags(command: str, help: str, *, needed: bool) -> tuple[CommandFlag, CommandFlag]:
    """The trace that a command reads, as `--trace FILE` or `FILE`. `needed`: whether it must be given."""
    as_file = {"type": Path, "metavar": "FILE"}
    place = CommandFlag(
        ("file",), (command,), "the same as --trace FILE", as_file | {"nargs": "?"}, same_as="--trace", needed=needed
    )
    return place, CommandFlag(("--trace",), (command,), help, as_file)
