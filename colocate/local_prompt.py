"""A prompt that a colocated worker computes, and its pages, which are its request's pages from the start."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.cache.allocation.allocation import Allocation
from twinpool.decode.request.request import DecodeRequest
from twinpool.prefill.request import PrefillEvent, PrefillRequest
from twinpool.prefill.request_pages import PrefillPages


@dataclass(eq=False, kw_only=True)
class LocalPrompt(PrefillRequest):
    """The prefill half of one request of a colocated worker; `leg` is the decode half."""

    leg: DecodeRequest


class LocalPromptPages(PrefillPages):
    """The pages of prompts whose requests go on here.

    An allocation is made for the whole request, and both halves hold the same one: the prompt while it is computed, its
    request before and after. The hand-over is `give`.
    """

    def take(self, request: PrefillRequest) -> bool:
        """Allocate pages for the prompt and the first step after it, and of windows and states what the request will
        ever hold at once; on False nothing was taken."""
        leg = leg_of(request)
        end = leg.positions_for(len(request.tokens) + 1)
        if not self._take(request, end, leg.positions):
            return False
        leg.allocation = request.allocation
        return True

    def cache(self, request: PrefillRequest) -> None:
        """Give the request's finished pages to the tree at once, locked until it is freed; others may wait for them.

        Pages of windows go there only as far as there are others in their place: the request was admitted with what it
        needs to its end, and must still have that.
        """
        allocation = request.allocation
        if not self.reuse or allocation is None or allocation.invalid:
            return
        growth = self.manager.growth
        windows = growth.replace_windows(allocation, min(len(request.prefix), request.committed // self.page_tokens))
        self.manager.sharing.cache_pages(allocation, request.prefix, request.submit.priority, windows=windows)
        growth.trim(allocation)
        request.shared = request.committed

    def free(self, request: PrefillRequest) -> None:
        """Give the request's finished pages to the tree and free the rest. Idempotent: nothing is held afterwards."""
        super().free(request)
        leg_of(request).allocation = None

    def give(self, request: PrefillRequest) -> Allocation:
        """Hand the allocation over to the request's decode half, which has held it all along; no byte is copied."""
        given = request.held
        request.allocation = None
        request.step(PrefillEvent.END)
        return given


def leg_of(request: PrefillRequest) -> DecodeRequest:
    """Return the decode half of a prompt; all prompts of a colocated worker have one."""
    assert isinstance(request, LocalPrompt), "a colocated worker's prompts go on here"
    return request.leg
