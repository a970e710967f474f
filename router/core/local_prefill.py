"""When a decode worker computes a prompt itself: where its answer is expected to begin earlier than by a hand-over.

By hand-over a prompt waits in the queue of its prefill worker, is computed, and what decode lacks of it is sent, before
which the answer can't go on. Locally it waits behind the prompts that the decode worker computes already, and is
computed in the smaller steps of a worker with running requests; what that worker holds of it needs neither. All of
these are measured: a first token by when it came after the prompt was sent (`router.state.prefill_queue`), a transfer
by what decode says came after the computation.

A decode worker that was not given a prompt lately, or only far shorter ones, is expected to compute like the prefill
worker, but with the fixed part of a prompt's cost in each of its steps. Until the prefill worker was measured, prompts
are handed over.
"""

from __future__ import annotations

from enum import StrEnum

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.worker_config import DisaggregationConfig
from twinpool.contracts.ids import Role
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.worker_table import WorkerEntry


class LocalReason(StrEnum):
    """Why a decode worker computes a prompt itself."""

    EARLIER = "earlier"
    """Its first token is expected earlier so."""
    NO_PREFILL = "no_prefill"
    """No prefill worker can take it."""
    HANDOVER_FAILED = "handover_failed"
    """Between the workers that would be chosen a hand-over of it has failed."""


class LocalPrefill:
    """Compares a hand-over with a local prompt; see the module's prose. Times are seconds of the router core's
    clock."""

    def __init__(self, config: DisaggregationConfig, page_tokens: int) -> None:
        """`page_tokens`: `cache.page_tokens` of decode, the least that prompts get of a step."""
        self._config, self._page_tokens = config, page_tokens

    def has_room(self, decode: WorkerEntry, tokens: int) -> bool:
        """Whether a decode worker may be given `tokens` more of prompts, while a prefill worker could take them."""
        return decode.local_tokens + decode.other_local + tokens <= self._config.local_tokens

    def local_s(
        self, r: RoutedRequest, decode: WorkerEntry, uncached: int, prefill: WorkerEntry, now: float
    ) -> float | None:
        """The seconds after which a local prompt is computed of which the worker lacks `uncached` tokens; None where
        nothing is known of its speed or the prefill worker's."""
        if decode.prompts.measured(uncached, now):
            return decode.prompts.expect(uncached, r.priority, now, r.share)
        cost = prefill.prompts.cost
        if cost is None:
            return None
        tokens = decode.local_tokens + decode.other_local + uncached
        a_step = max(self._page_tokens, self._config.step_tokens - decode.whole_load)
        return cost[0] * -(-tokens // a_step) + cost[1] * tokens

    def handover_s(
        self,
        r: RoutedRequest,
        prefill: WorkerEntry,
        uncached: int,
        decode: WorkerEntry | None,
        lacking: int,
        now: float,
    ) -> float | None:
        """The seconds after which a prompt is computed and at its decode worker, if it needs one. `uncached` and
        `lacking`: tokens that prefill computes and that are sent. None where too little was seen of the prefill
        worker."""
        computed = prefill.prompts.expect(uncached, r.priority, now, r.share)
        if computed is None or decode is None:
            return computed
        return computed + (decode.transfers.seconds(lacking) or 0.0)


def local_prefill(config: Config) -> LocalPrefill | None:
    """Return what compares the two, by the configuration; None where each prompt is handed over."""
    if not config.conditional:
        return None
    return LocalPrefill(config.disaggregation, config.cache_for(Role.DECODE).page_tokens)
