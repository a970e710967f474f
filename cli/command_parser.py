"""What commands are given and what they print: the parser, argparse's, with errors that say what was probably meant.

A flag is given by its whole name, since an abbreviation that works today becomes another flag's, or ambiguous, with the
next flag. What one subcommand doesn't know is told by that subcommand, with its own usage.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

FINE, REFUSED, USAGE, NO_CLUSTER = 0, 1, 2, 3
"""What commands exit with."""
CLOSE = 0.6
"""How much of two names must be equal for one to be suggested for the other, from 0 to 1."""


@dataclass(frozen=True)
class CommandFlag:
    """One flag or positional argument of a command; `options` go to `argparse`."""

    name: str
    help: str
    options: Mapping[str, Any]
    same_as: str = ""
    """Of a positional argument: the flag of the command that it stands for, and whose value it becomes."""
    needed: bool = False
    """Of one that stands for a flag: whether either must be given."""


def flag(name: str, help: str, *, same_as: str = "", needed: bool = False, **options: Any) -> CommandFlag:
    """Return a flag, or a positional argument for a `name` without dashes."""
    return CommandFlag(name, help, options, same_as, needed)


def switch(name: str, help: str) -> CommandFlag:
    """Return a flag without a value."""
    return flag(name, help, action="store_true")


def count(name: str, help: str) -> CommandFlag:
    """Return a flag whose value is a whole number."""
    return flag(name, help, type=int, metavar="N")


def file_flag(name: str, help: str, **options: Any) -> CommandFlag:
    """Return a flag whose value is a file's path."""
    return flag(name, help, type=Path, metavar="FILE", **options)


@dataclass(frozen=True)
class Command:
    """One command of `twinpool`."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    """Runs it and returns its exit code (`FINE` and so on). Raises `TwinpoolError`."""
    flags: Sequence[CommandFlag]


def command(name: str, help: str, run: Callable[[argparse.Namespace], int], *flags: CommandFlag) -> Command:
    """Return a command; see `Command` for its parts."""
    return Command(name, help, run, flags)


def command_table(*commands: Command) -> dict[str, Command]:
    """Return the commands by name, in the order in which help lists them."""
    return {one.name: one for one in commands}


@dataclass(frozen=True)
class _TwoForms:
    """A positional argument that stands for a flag."""

    place: str
    flag: CommandFlag
    required: bool

    @property
    def names(self) -> tuple[str, str]:
        return self.flag.options.get("metavar", self.place.upper()), self.flag.name


class CommandParser(argparse.ArgumentParser):
    """The parser of the command line, or of one subcommand; `flags`: those that it takes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"allow_abbrev": False})
        self._two_forms: list[_TwoForms] = []
        self._commands: dict[str, CommandParser] = {}

    def take(self, flags: Sequence[CommandFlag]) -> None:
        """Take these flags and positional arguments."""
        by_name = {flag.name: flag for flag in flags}
        for flag in flags:
            self.add_argument(flag.name, help=flag.help, **flag.options)
            if flag.same_as:
                self._two_forms.append(_TwoForms(flag.name, by_name[flag.same_as], flag.needed))

    def have(self, commands: dict[str, CommandParser]) -> None:
        """Have these subcommands, by which names that nobody has are corrected."""
        self._commands = commands

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but whatever is left over ends here, with this parser's usage."""
        args = sys.argv[1:] if args is None else args
        if args and self._commands:
            self._check_command(args)
        found, left = super().parse_known_args(args, namespace)
        if left:
            self._refuse(left)
        for forms in self._two_forms:
            self._unite(found, forms)
        return found, left

    def _check_command(self, args: Sequence[str]) -> None:
        first = args[0]
        if first in self._commands or first in ("-h", "--help"):
            return
        if first.startswith("-"):
            command = next((word for word in args if word in self._commands), "COMMAND")
            self.error(f"flags follow the command: {self.prog} {command} {first} ...")
        if close := _closest(first, self._commands):
            self.error(f"there is no command {first!r}: did you mean {self.prog} {close}? ({self.prog} -h lists all)")
        self.error(f"there is no command {first!r}: {self.prog} -h lists all")

    def _refuse(self, left: Sequence[str]) -> NoReturn:
        said: list[str] = []
        for word in left:
            name = word.partition("=")[0]
            if not name.startswith("-"):
                if not said:  # After an unknown flag it is probably that one's value.
                    said.append(f"{word!r} is too much")
            elif close := _closest(name, [one for one in self._option_string_actions if one.startswith("--")]):
                said.append(f"unknown flag {name}: did you mean {close}?")
            else:
                said.append(f"unknown flag {name}")
        self.error("; ".join(said))

    def _unite(self, found: argparse.Namespace, forms: _TwoForms) -> None:
        """Give the value of the positional form to the flag."""
        dest = forms.flag.name.lstrip("-").replace("-", "_")
        placed = getattr(found, forms.place)
        delattr(found, forms.place)
        place, flag = forms.names
        if placed is not None and getattr(found, dest) is not None:
            self.error(f"{place} and {flag} are the same: give one of them")
        if placed is not None:
            setattr(found, dest, placed)
        elif forms.required and getattr(found, dest) is None:
            self.error(f"{place} is missing; {flag} {place} is the same")


def _closest(given: str, names: Iterable[str]) -> str:
    """The name that was probably meant: one that begins so, else the most alike; empty where none is."""
    by_word = {name.lstrip("-"): name for name in names}
    word = given.lstrip("-")
    begun = [name for name in by_word if len(word) > 1 and name.startswith(word)]
    alike = difflib.get_close_matches(word, begun or by_word, n=1, cutoff=0 if begun else CLOSE)
    return by_word[alike[0]] if alike else ""


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
