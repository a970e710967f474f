"""Whether two workers can hand over to each other: same model, same state, same plane."""

from __future__ import annotations

from contracts.errors import LayoutMismatch
from contracts.ids import WorkerName
from transfer import messages as m


def refuse_mismatch(name: WorkerName, mine: dict[str, object], plane: str, hello: m.Hello) -> None:
    """Raises `LayoutMismatch` naming the first difference, with both values."""
    if plane != hello.plane:
        raise LayoutMismatch(f"transfer.plane: {name} has {plane}, {hello.worker} has {hello.plane}")
    for path, ours, theirs in _differences(mine, hello.layout, ""):
        raise LayoutMismatch(f"{path}: {name} has {ours}, {hello.worker} has {theirs}")


def _differences(ours: object, theirs: object, path: str) -> list[tuple[str, object, object]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        out = []
        for key in sorted({*ours, *theirs}):
            name = f"{path}.{key}" if path else str(key)
            out += _differences(ours.get(key), theirs.get(key), name)
        return out
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return [] if list(ours) == list(theirs) else [(path, list(ours), list(theirs))]
    return [] if ours == theirs else [(path, ours, theirs)]
