"""The file that a section of `bench.gpu` writes its figures to, as it goes, and goes on from after it was cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NOT_COMPLETE = 78
"""Exit code of a section in which all went well that was begun, but time ran out for the rest."""
NO_TIME = "no time was left"
"""What is said in the place of a figure for which time ran out."""


def write_figures(file: Path | None, figures: object) -> None:
    """Write all figures so far; whoever is killed meanwhile leaves those before."""
    if file is None:
        return
    begun = file.with_name(f"{file.name}.tmp")
    begun.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    os.replace(begun, file)


def known_figures(file: Path | None, resume: bool) -> dict[str, Any]:
    """The figures that an earlier run of the section wrote; empty where none is to be gone on from."""
    if file is None or not resume or not file.exists():
        return {}
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known
