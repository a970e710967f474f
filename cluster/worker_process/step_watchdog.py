"""Whether a worker gets on: measured where its loop turns, judged where its lease is granted.

Heartbeats run beside the engine thread, so a hung step delays none of them and would keep its lease for ever. They
carry therefore how long the loop has made no progress. A loop makes progress when it turns, and, while something could
be computed, when a step ends. Waiting for others (a hand-over, a grant, a slow peer) is no lack of progress: that has
deadlines of its own.

A long step is not a hang. What is allowed grows with the longest of a worker's latest steps, and a worker that has
ended none yet may be compiling its kernels.
"""

from __future__ import annotations

import dataclasses

from contracts.clock import Clock
from contracts.config.cluster_config import ClusterConfig
from contracts.messages.worker_status import WorkerStatus

LONG_STEPS = 4.0
"""A worker may take so many times its longest step."""
FORGETS = 0.99
"""What a step takes from the memory of longer ones before it."""
USUAL_S = 1.0
"""Less than this is not reported: a table that says the same goes to nobody again."""


class StepWatchdog:
    """One loop's progress. Written by the engine thread, read by any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock.now()
        self._steps = 0
        self._longest_s = 0.0

    def turned(self, steps: int, runnable: bool, took_s: float) -> None:
        """The loop has turned once. `steps`: ended since the start; `runnable`: something could be computed now;
        `took_s`: what the turn's step took."""
        if steps != self._steps:
            self._longest_s = max(took_s, FORGETS * self._longest_s)
        if steps != self._steps or not runnable:
            self._at = self._clock.now()
        self._steps = steps

    @property
    def stalled_s(self) -> float:
        """Seconds without progress; 0 as long as they are few."""
        seconds = self._clock.now() - self._at
        return seconds if seconds >= USUAL_S else 0.0

    def on(self, status: WorkerStatus) -> WorkerStatus:
        """The status with what is known of the loop's progress."""
        longest = self._longest_s if self._longest_s >= USUAL_S else 0.0
        return dataclasses.replace(status, stalled_s=self.stalled_s, longest_step_s=longest)


def allowed_s(status: WorkerStatus, config: ClusterConfig) -> float:
    """How long this worker may go on without progress."""
    first = 0.0 if status.steps else config.start_timeout_s
    return max(config.stall_s, LONG_STEPS * status.longest_step_s, first)


def why_stalled(status: WorkerStatus, config: ClusterConfig) -> str:
    """Why this worker counts as hung, in words; empty while it doesn't."""
    allowed = allowed_s(status, config)
    if status.stalled_s < allowed:
        return ""
    return f"hung: no progress for {status.stalled_s:.1f} s, {allowed:g} s are allowed (cluster.stall_s)"
