"""What seeds of the simulator reach, and few of them that reach as much as many: `python tests/sim/reach.py`.

    python tests/sim/reach.py                  what the chosen seeds miss of what 0..399 reach; exit code 1 if anything
    python tests/sim/reach.py --choose         choose anew, and write `reach.json`

Reached is: each line of a function of the packages below, each move of a state table, each thing that a run counts. The
seeds are chosen greedily, by how much that is new each brings for what it costs. `reach.json` says which they are, and
what of moves and counts 0..399 reach several times; the tests run those seeds and compare (`test_simulator.py`). The
lines are compared here alone, as following them makes a run several times as slow.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from twinpool.contracts.state_table import StateTable  # noqa: E402
from twinpool.sim.run.run_scenario import ScenarioResult  # noqa: E402
from twinpool.sim.run.sim_command import run_seed  # noqa: E402

PACKAGES = ("contracts", "cache", "transfer", "worker", "prefill", "decode", "router", "cluster")
KNOWN = Path(__file__).with_name("reach.json")
MANY = range(400)
SEVERAL = 4
"""What fewer of the many seeds reach isn't asked of the chosen ones in tests: a change elsewhere may move it."""


@contextmanager
def moves_of_tables(seen: set[str]) -> Iterator[None]:
    """Fills with the moves of all state tables, as ``table: state event``."""
    right = StateTable.next

    def telling(self: StateTable[Any, Any], state: Any, event: Any) -> Any:
        seen.add(f"{self.name}: {state} {event}")
        return right(self, state, event)

    StateTable.next = telling  # type: ignore[method-assign]
    try:
        yield
    finally:
        StateTable.next = right  # type: ignore[method-assign]


class Lines:
    """Lines of functions of `PACKAGES` that are executed while `watching`."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._left: dict[CodeType, set[int]] = {}
        self._names: dict[CodeType, str | None] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            left = self._left[code] = self._lines(code)
        return self._line if left else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        left = self._left[frame.f_code]
        if event == "line" and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            self.seen.add(f"{self._names[frame.f_code]}:{frame.f_lineno}")
        return self._line if left else None

    def _lines(self, code: CodeType) -> set[int]:
        try:
            name = Path(code.co_filename).resolve().relative_to(ROOT).as_posix()
        except ValueError:
            return set()
        if name.split("/")[0] not in PACKAGES:
            return set()
        self._names[code] = name
        return {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}


def counted(result: ScenarioResult) -> set[str]:
    return {f"counted: {name}" for name, count in result.counts.items() if count}


def reached(seed: int, lines: bool = True) -> tuple[int, set[str], int, tuple[str, ...]]:
    """A seed, what it reaches, what it costs, and what it violates."""
    seen, traced = set[str](), Lines()
    with moves_of_tables(seen):
        if lines:
            with traced.watching():
                result = run_seed(seed)
        else:
            result = run_seed(seed)
    return seed, seen | counted(result) | traced.seen, result.events, result.violations


def reached_by(seeds: Iterable[int], jobs: int, lines: bool = True) -> dict[int, tuple[set[str], int]]:
    out, context = {}, multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for seed, seen, cost, violations in pool.map(reached, seeds, [lines] * len(list(seeds)), chunksize=4):
            out[seed] = seen, cost
            if violations:
                print(f"seed {seed}: {violations[0]}", flush=True)
    return out


def choose(found: dict[int, tuple[set[str], int]]) -> list[int]:
    """Few seeds that reach all of it, the most useful first."""
    missing, chosen = set[str]().union(*(seen for seen, _ in found.values())), list[int]()
    while missing:
        best = max(sorted(found), key=lambda seed: len(found[seed][0] & missing) / found[seed][1])
        chosen.append(best)
        missing -= found[best][0]
    # Whose share others have by now is left out.
    for seed in sorted(chosen, key=lambda seed: -found[seed][1]):
        others = set[str]().union(*(found[other][0] for other in chosen if other != seed))
        if found[seed][0] <= others:
            chosen.remove(seed)
    return chosen


def known() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(KNOWN.read_text())
    return read


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    found = reached_by(MANY, asked.jobs)
    everything = set[str]().union(*(seen for seen, _ in found.values()))
    print(f"0..{MANY[-1]} reach {len(everything)} lines, moves and counts")
    if asked.choose:
        seeds = choose(found)
        times = Counter(one for seen, _ in found.values() for one in seen)
        wanted = sorted(one for one, n in times.items() if n >= SEVERAL and ".py:" not in one)
        KNOWN.write_text(json.dumps({"seeds": seeds, "reached": wanted}, indent=1) + "\n")
        share = sum(found[s][1] for s in seeds) / sum(cost for _, cost in found.values())
        print(f"{len(seeds)} seeds reach the same, at {share:.0%} of the cost")
        return 0
    missed = everything - set[str]().union(*(found[seed][0] for seed in known()["seeds"] if seed in found))
    for one in sorted(missed):
        print(f"missed: {one}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
