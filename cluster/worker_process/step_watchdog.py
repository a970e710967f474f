"""The step watchdog: finds a worker whose loop hangs. The worker measures progress; the controller judges.

Heartbeats run beside the engine thread, so a hung step delays none of them and would keep its lease for ever.
Therefore heartbeats carry how long the loop has made no progress. A loop with nothing to compute makes progress with
every round; a loop that could compute makes progress only when a step ends. Waiting for others (a hand-over, a grant,
a slow peer) is no lack of progress: such waits have deadlines of their own.

A long step is not a hang. The allowed time grows with the longest of a worker's latest steps, and a worker that has
ended no step yet gets `cluster.start_timeout_s`, since it may be compiling its kernels.
"""

from __future__ import annotations

import dataclasses

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import ClusterConfig
from twinpool.contracts.messages.worker_status import WorkerStatus

LONG_STEPS = 4.0
"""A worker may go without progress for this many times its longest step."""
FORGETS = 0.99
"""The factor by which each step shrinks the remembered longest step, so that old ones are forgotten."""
USUAL_S = 1.0
"""Shorter times are reported as 0, so that the status stays equal and the controller's table isn't sent again."""


class StepWatchdog:
    """The progress of one worker's loop. Written by the engine thread, read by any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.now()
        self._steps = 0
        self._longest_s = 0.0

    def turned(self, steps: int, runnable: bool, took_s: float) -> None:
        """Record a round of the loop. `steps`: steps ended since the start; `runnable`: whether the worker could
        compute now; `took_s`: duration of the round."""
        if steps != self._steps:
            self._longest_s = max(took_s, FORGETS * self._longest_s)
        if steps != self._steps or not runnable:
            self._at = self._clock.now()
        self._steps = steps

    @property
    def stalled_s(self) -> float:
        """Seconds without progress; 0 below `USUAL_S`."""
        seconds = self._clock.now() - self._at
        return seconds if seconds >= USUAL_S else 0.0

    def on(self, status: WorkerStatus) -> WorkerStatus:
        """The status with `stalled_s` and `longest_step_s` filled in."""
        longest = self._longest_s if self._longest_s >= USUAL_S else 0.0
        return dataclasses.replace(status, stalled_s=self.stalled_s, longest_step_s=longest)


def allowed_s(status: WorkerStatus, config: ClusterConfig) -> float:
    """Seconds that this worker may go without progress."""
    first = 0.0 if status.steps else config.start_timeout_s
    return max(config.stall_s, LONG_STEPS * status.longest_step_s, first)


def why_stalled(status: WorkerStatus, config: ClusterConfig) -> str:
    """The reason why this worker counts as hung, in words; empty while it doesn't."""
    allowed = allowed_s(status, config)
    if status.stalled_s < allowed:
        return ""
    return f"hung: no progress for {status.stalled_s:.1f} s, {allowed:g} s are allowed (cluster.stall_s)"
