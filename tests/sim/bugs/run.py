"""How many seeds the simulator needs to find each planted bug: `python tests/sim/bugs/run.py [NAME ...]`.

Planted are the patches in this folder and those of `tests/mutants` that break something a cluster can meet. Each is
applied to a copy of the tree, and seeds run there from 0 on until one violates something. Prints a table; exit code 1
when a bug isn't found within `MAX` seeds.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tests.mutants.catalogue import FOLDER as MUTANTS  # noqa: E402
from tests.mutants.catalogue import Mutant, load  # noqa: E402
from tests.mutants.run import command, copy_tree  # noqa: E402

FOLDER = Path(__file__).resolve().parent
MAX = 700
PORTION = 100
"""Seeds of one process."""
ALSO = (
    "a4-copied-before-its-step-has-landed",
    "a5-promised-pages-come-back-at-once",
    "a9-load-not-verified",
    "a11-page-free-under-a-launched-step",
    "b2-host-memory-of-the-retracted-left-behind",
    "b10-death-unnoticed",
)
"""Of `tests/mutants`."""


def planted() -> list[Mutant]:
    """In the order of the hazards."""
    paths = [*FOLDER.glob("*.patch"), *(MUTANTS / f"{name}.patch" for name in ALSO)]
    return sorted(map(load, paths), key=lambda m: (m.rule[0], int(m.rule[1:]), m.path.name))


def main(chosen: list[str]) -> int:
    bugs = [b for b in planted() if not chosen or b.path.stem.startswith(tuple(chosen))]
    missed = 0
    for bug in bugs:
        seeds, violation = seeds_to_find(bug.path)
        missed += seeds is None
        print(f"| {bug.rule} | {bug.breaks} | {seeds or f'not in {MAX}'} | {violation} |", flush=True)
    return int(missed > 0)


def seeds_to_find(patch: Path, most: int = MAX) -> tuple[int | None, str]:
    """How many seeds it took, and what was violated."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        applied = command(["git", "apply", str(patch)], tree)
        if applied.returncode:
            raise SystemExit(f"{patch.name} doesn't apply: {applied.stderr}")
        for first in range(0, most, PORTION):
            seeds = f"{first}..{min(first + PORTION, most) - 1}"
            ran = command([sys.executable, "-m", "twinpool.cli.commands", "sim", "--seeds", seeds, "--first"], tree)
            found = re.search(r"^seed (\d+): (?:[0-9.]+ )?(.*)$", ran.stdout, re.MULTILINE)
            if found:
                return int(found[1]) + 1, found[2]
            if "no violation" not in ran.stdout:
                raise SystemExit(f"{patch.name}: {ran.stdout}{ran.stderr}")
    return None, "nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
