"""What benches have in common: flags, tables, the machine that was measured, and figures that are written as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from twinpool.contracts.cpu_levels import flags

INSTRUCTIONS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
"""Flags of a processor that products are written for."""


def describe() -> dict[str, object]:
    """Processor, usable cores, versions, torch's threads and the load of the last minute: not idle means noisy."""
    import torch  # Stand-ins for workers, which import this file as well, need none.

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "instructions": [name for name in INSTRUCTIONS if name in flags()],
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def headline() -> str:
    """The same in one line."""
    about = describe()
    return (
        f"{about['processor']}, {about['cores']} cores, load {about['load_1min']:.1f}; "
        f"torch {about['torch']}, {about['threads']} threads"
    )


def flag_parser(prose: str | None, *, json_file: bool = True, cluster: bool = False) -> argparse.ArgumentParser:
    """A parser whose help is a bench's docstring, with ``--json FILE`` for its figures unless told otherwise.

    `cluster`: with ``--model`` and ``--set`` for the cluster that the bench starts.
    """
    flags = argparse.ArgumentParser(
        allow_abbrev=False, description=prose, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if json_file:
        flags.add_argument("--json", type=Path, help="write all figures to this file")
    if cluster:
        flags.add_argument("--model", default="demo", help="checkpoint folder (default: the demo)")
        flags.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for the cluster")
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
    write_figures(args.json, {"settings": settings, "machine": describe(), **figures})


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of `values` that `share` of them aren't above; not a number where there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
