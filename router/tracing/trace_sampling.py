"""Which requests are traced: as their clients say, else a share of them."""

from __future__ import annotations

import random
from dataclasses import replace

from twinpool.router.state.trace_context import TraceContext

_WHOLE = 1 << 64


class TraceSampling:
    """Decides once, when a request comes. `ratio`: the share of those whose clients say nothing that is traced."""

    def __init__(self, ratio: float, rng: random.Random) -> None:
        self._ratio, self._rng = ratio, rng

    def decided(self, context: TraceContext) -> TraceContext:
        """The context by which a request is traced: the client's, or one of a new trace."""
        if context.trace_id:
            return context
        low = self._rng.getrandbits(64)
        number = self._rng.getrandbits(64) << 64 | low
        # As OpenTelemetry's TraceIdRatioBased has it, so that others who sample by the same ratio decide alike.
        return replace(context, trace_id=f"{number or 1:032x}", sampled=low < self._ratio * _WHOLE)
