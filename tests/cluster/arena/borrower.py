"""A process that borrows a segment and does with it what it is told, a line at a time: `tests.cluster` starts it."""

from __future__ import annotations

import sys
import time

from twinpool.cluster.arena.arena_client import ArenaClient
from twinpool.contracts.clock import SystemClock


def main() -> None:
    token, name, incarnation, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    arenas = ArenaClient(token, name, incarnation, SystemClock(), time.sleep, owner_s=0.1)
    memory = arenas.take(0, nbytes, "a model")
    print("nothing" if memory is None else f"has {memory[0]}", flush=True)
    for line in sys.stdin:
        assert memory is not None
        memory[0] = int(line)
        print("written", flush=True)


if __name__ == "__main__":
    main()
