"""The pages of prefill's requests: allocated on admission, given to the tree as they are finished, freed once.

Three parts of the worker use this: the scheduler, which admits and preempts; the step commit, which shares finished
pages; and the worker, which ends requests.
"""

from __future__ import annotations

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.prefill.request import PrefillEvent, PrefillRequest


class PrefillPages:
    """The KV cache manager as prefill's requests use it. `reuse`: whether pages come from the tree and go to it."""

    def __init__(self, manager: KVCacheManager, *, reuse: bool) -> None:
        self.manager = manager
        self.page_tokens = manager.spec.page_tokens
        self.reuse = reuse
        self.counters = {"prompt_tokens_cached": 0.0}

    def reusable(self, request: PrefillRequest) -> int:
        """Return how many leading pages may come from the tree: the last token is computed, and every scored one."""
        return (len(request.tokens) - 1) // self.page_tokens if self.reuse and not request.wants_scores else 0

    def prefetch(self, request: PrefillRequest) -> None:
        """Begin to read what storage has of the prompt into host memory."""
        reusable = self.reusable(request)
        if reusable:
            request.prefetch = self.manager.tiers.prefetcher.start(
                request.prefix.head(reusable), request.submit.request_id
            )

    def release_prefetch(self, request: PrefillRequest) -> None:
        """Let go of what the host keeps for it, and of reads under way. Idempotent."""
        if request.prefetch is not None:
            self.manager.tiers.prefetcher.release(request.prefetch)
            request.prefetch = None

    def take(self, request: PrefillRequest) -> bool:
        """Allocate pages, cached ones of the tiers and new ones for the rest; on False nothing was taken."""
        return self._take(request, len(request.tokens), len(request.tokens))

    def _take(self, request: PrefillRequest, positions: int, most: int) -> bool:
        """Allocate for `positions` positions, of a request that may reach `most`; on False nothing was taken."""
        allocation = self.manager.prefixes.allocate(
            request.prefix,
            positions,
            f"request {request.submit.request_id}",
            reusable=self.reusable(request),
            prefetch=request.prefetch,
            most=most,
        )
        if allocation is None:
            return False
        request.allocation = allocation
        request.begin(allocation.depth * self.page_tokens)
        request.cached = allocation.cached
        self.counters["prompt_tokens_cached"] += allocation.cached.total
        return True

    def cache(self, request: PrefillRequest) -> None:
        """Give the request's finished pages to the tree at once, locked until it is freed; others may wait for them."""
        if self.reuse and request.allocation is not None and not request.allocation.invalid:
            self.manager.sharing.cache_pages(request.allocation, request.prefix, request.submit.priority)
            request.shared = request.committed

    def free(self, request: PrefillRequest) -> None:
        """Give the request's finished pages to the tree and free the rest. Idempotent: nothing is held afterwards."""
        if request.allocation is None:
            return
        self.cache(request)
        # Shared pages are not the request's own to free, but a step under way may read them too.
        self.manager.table.free(request.allocation, [request.latest.completion] if request.latest is not None else [])
        request.allocation = None

    def preempt(self, request: PrefillRequest) -> None:
        """Send the request back to waiting; its finished pages go to the tree, for when it is admitted again."""
        self.free(request)
        request.start_over()
        request.step(PrefillEvent.PREEMPT)

    def close(self) -> None:
        """Give nothing to the tree from here on: the worker closes."""
        self.reuse = False

    def distrust(self, request: PrefillRequest) -> None:
        """Invalidate the request's prompt in the tree and its allocation: none of that state is used again."""
        self.manager.sharing.invalidate(request.prefix)
        request.held.invalid = True

    def restart(self, request: PrefillRequest) -> None:
        """Send the request back to waiting with nothing computed, as the state that it holds can't be trusted."""
        request.start_over()
        self.free(request)
        request.step(PrefillEvent.PREEMPT)
