"""What benches have in common: flags that show a module's prose, tables, and figures that are written as JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common import machine


def flag_parser(prose: str | None, *, json_file: bool = True) -> argparse.ArgumentParser:
    """A parser whose help is a bench's docstring, with ``--json FILE`` for its figures unless told otherwise."""
    flags = argparse.ArgumentParser(
        allow_abbrev=False, description=prose, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if json_file:
        flags.add_argument("--json", type=Path, help="write all figures to this file")
    return flags


def figure_table(title: str | None, heads: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    """A table of a bench: the first column is names, the others are figures."""
    out = Table(title=title, pad_edge=False)
    for number, head in enumerate(heads):
        out.add_column(head, justify="right" if number else "left")
    for row in rows:
        out.add_row(*row)
    return out


def write_figures(file: Path | None, figures: object) -> None:
    """Write figures as JSON, whole or not at all: whoever is killed meanwhile leaves those before. None: nowhere."""
    if file is not None:
        begun = file.with_name(f"{file.name}.tmp")
        file.parent.mkdir(parents=True, exist_ok=True)
        begun.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        os.replace(begun, file)


def write_report(args: argparse.Namespace, **figures: Any) -> None:
    """Write a bench's flags, the machine and its figures to ``--json``'s file."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    write_figures(args.json, {"settings": settings, "machine": machine.describe(), **figures})
