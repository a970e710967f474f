"""The costs of migrating a request and of letting it finish here, as measured on this worker.

A migration costs its bytes at the rate of the migrations so far, and a fixed overhead. To finish costs the tokens that
are still to come (`decode.request.output_length`), at the request's own pace.
"""

from __future__ import annotations

from twinpool.decode.request.output_length import OutputLengths

FIRST_BYTES_PER_S = 500e6
"""Assumed before anything was migrated: slow for memory, quick for a network."""
OVERHEAD_S = 0.02
"""Seconds that a migration takes besides its bytes: five messages, a step to end, one to begin."""
_NEW = 0.2
"""Weight of the newest measurement."""


class MigrationCosts:
    """One worker's measurements. `lengths` estimates those of its answers."""

    def __init__(self, lengths: OutputLengths) -> None:
        self._lengths = lengths
        self.bytes_per_s = FIRST_BYTES_PER_S

    def migrated(self, nbytes: int, seconds: float) -> None:
        """Record a migration of `nbytes` bytes that took `seconds`."""
        rate = nbytes / max(seconds - OVERHEAD_S, 1e-3)
        self.bytes_per_s += _NEW * (rate - self.bytes_per_s)

    def worth_migrating(self, nbytes: int, most: int, step_s: float) -> bool:
        """Whether migrating `nbytes` takes less time than the tokens still to come, at most `most` of `step_s` seconds
        each."""
        return OVERHEAD_S + nbytes / self.bytes_per_s < self._lengths.to_come(most) * step_s
