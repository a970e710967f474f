"""Simulated arenas: a node agent's host memory, which outlives workers and is lent to one living process at a time."""

from __future__ import annotations

from twinpool.sim.fabric.sim_process import SimProcess


class SimArenas:
    """The arenas of all nodes, by worker name and size in bytes."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, int], tuple[SimProcess, memoryview]] = {}

    def take(self, process: SimProcess, nbytes: int) -> memoryview | None:
        """Lend the arena of this worker, as its last incarnation left it; None while that one is still alive."""
        key = process.name, nbytes
        last = self._segments.get(key)
        if last is not None and last[0].alive:
            return None
        memory = last[1] if last is not None else memoryview(bytearray(nbytes))
        self._segments[key] = process, memory
        return memory
