"""One prefill request's pages: taken when it is admitted, given to the tree as they are finished, returned once.

Three parts of the worker use them: the scheduler, which admits and preempts, the commit of steps, which shares what is
finished, and the worker, which ends requests.
"""

from __future__ import annotations

from cache.manager.kv_cache_manager import KVCacheManager
from prefill.request import PrefillEvent, PrefillRequest


class RequestPages:
    """The KV cache manager as prefill's requests use it. `reuse`: whether the tree gives and takes anything."""

    def __init__(self, manager: KVCacheManager, *, reuse: bool) -> None:
        self.manager = manager
        self.page_tokens = manager.spec.page_tokens
        self.reuse = reuse
        self.counters = {"prompt_tokens_cached": 0.0}

    def reusable(self, request: PrefillRequest) -> int:
        """Leading pages that may come from the tree: the last token is computed, and every scored one."""
        return (len(request.tokens) - 1) // self.page_tokens if self.reuse and not request.wants_scores else 0

    def prefetch(self, request: PrefillRequest) -> None:
        """Begin to bring what storage has of it to the host."""
        reusable = self.reusable(request)
        if reusable:
            request.prefetch = self.manager.prefetch(request.prefix.head(reusable), request.submit.request_id)

    def take(self, request: PrefillRequest) -> bool:
        """Allocate what the tiers have and pages for the rest; on False nothing was taken."""
        allocation = self.manager.allocate(
            request.prefix,
            len(request.tokens),
            f"request {request.submit.request_id}",
            reusable=self.reusable(request),
            prefetch=request.prefetch,
        )
        if allocation is None:
            return False
        request.allocation = allocation
        request.begin(allocation.depth * self.page_tokens)
        request.cached = allocation.cached
        self.counters["prompt_tokens_cached"] += allocation.cached.total
        return True

    def cache(self, request: PrefillRequest) -> None:
        """Give its finished pages to the tree at once, locked for as long as it is here: others may wait for them."""
        if self.reuse and request.allocation is not None and not request.allocation.invalid:
            self.manager.cache_pages(request.allocation, request.prefix, request.submit.priority)
            request.shared = request.committed

    def free(self, request: PrefillRequest) -> None:
        """Give finished pages to the tree and the rest back. Idempotent: nothing is held afterwards."""
        if request.allocation is None:
            return
        self.cache(request)
        # What it shares with others is not its own to free, but a step under way may read that too.
        self.manager.free(request.allocation, [request.latest.completion] if request.latest is not None else [])
        request.allocation = None

    def preempt(self, request: PrefillRequest) -> None:
        """Send it back to waiting; what it has finished is in the tree when it is admitted again."""
        self.free(request)
        request.start_over()
        request.step(PrefillEvent.PREEMPT)

    def distrust(self, request: PrefillRequest) -> None:
        """Nothing that it or the tree holds of its prompt can be trusted: none of it is used again."""
        assert request.allocation is not None
        self.manager.invalidate(request.prefix)
        request.allocation.invalid = True

    def restart(self, request: PrefillRequest) -> None:
        """Send it back to waiting with nothing computed: what it holds isn't what it takes it for."""
        request.start_over()
        self.free(request)
        request.step(PrefillEvent.PREEMPT)
