"""The pages of decode's requests: sealed and shared with other requests as they are finished, and freed once.

The parts that need pages for a request take them from the KV cache manager themselves: the transfer queue for its
prompt, memory pressure for its next step, retraction for its way back.

Reasoning spans are the tokens that a model thinks in, which the next turn of a conversation leaves out. State of
positions behind a left-out span is of no use to the next turn, whose tokens differ from there on. So with
`cache.strip_reasoning` decode gives the tree only the state up to the first span of the answer, and frees the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinpool.cache.device.device_port import Completion
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.required_pages import due, extents
from twinpool.cache.prefix_cache.token_prefix import TokenPrefix
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.config.cache_config import CacheConfig
from twinpool.contracts.errors import ConfigError
from twinpool.decode.request import DecodeRequest
from twinpool.worker.request_table import RequestPages, sendable_pages


@dataclass(frozen=True, slots=True)
class ReasoningSpans:
    """The ids of the tokens that open and close a span."""

    opens: int
    closes: int

    @classmethod
    def of(cls, config: CacheConfig) -> ReasoningSpans | None:
        """Return None unless spans are stripped. Raises `ConfigError` where the tokens aren't given."""
        if not config.strip_reasoning:
            return None
        try:
            opens, closes = (int(part) for part in config.reasoning_tokens.split(","))
        except ValueError:
            raise ConfigError(
                "cache.strip_reasoning needs cache.reasoning_tokens, the ids of the tokens that open and close a span, "
                f'as "151667,151668"; got {config.reasoning_tokens!r}'
            ) from None
        return cls(opens, closes)

    def keeps(self, tokens: Sequence[int], prompt: int) -> int:
        """Return how many of `tokens` come before the first span of the answer, which begins after `prompt` tokens.

        A prompt that ends within a span leaves nothing of the answer.
        """
        for token in reversed(tokens[:prompt]):
            if token == self.opens:
                return prompt
            if token == self.closes:
                break
        answer = list(tokens[prompt:])
        return prompt + answer.index(self.opens) if self.opens in answer else len(tokens)


class DecodePages(RequestPages):
    """The pages of decode's requests."""

    def __init__(self, manager: KVCacheManager, config: CacheConfig) -> None:
        super().__init__(manager, reuse=config.prefix_reuse)
        self._reasoning = ReasoningSpans.of(config)

    def reusable(self, request: DecodeRequest) -> TokenPrefix:
        """Return the leading pages of its prompt that may come from the tree."""
        return request.prefix if self.reuse else request.prefix.head(0)

    def settled(self, request: DecodeRequest) -> bool:
        """Whether all state that was loaded for the request has arrived and is verified; only then it joins a batch.

        It stays so (`DecodeRequest.settled`) until the request has another allocation, or shares pages with the tree
        anew: the tree may have the same ones on their way. State that turns out damaged ends the request.
        """
        if request.allocation is None or not self.manager.allocations.ready(request.allocation):
            return False
        request.settled, request.reach = True, request.planned
        return True

    def grow(self, request: DecodeRequest) -> bool:
        """Get pages for one more position, in every pool; False where one has none, or none yet. A page has room for
        the positions behind that one, so most steps need none."""
        end = request.planned + 1
        if self.manager.running.extend(request.held, end) < end:
            return False
        request.reach = -(-end // self.page_tokens) * self.page_tokens
        return True

    def cache_prompt(self, request: DecodeRequest) -> None:
        """Give the tree the prompt's pages of the full pool, for requests with the same prompt, from now on."""
        if self.reuse and request.allocation is not None and not request.allocation.invalid:
            request.settled = False
            self.manager.finished.cache_pages(
                request.allocation, request.prefix, request.submit.priority, full_only=True
            )

    def cache(self, request: DecodeRequest) -> None:
        """Give the tree the committed state, for the next turn of the conversation; where reasoning spans are stripped,
        only the state before the answer's first one."""
        allocation = request.allocation
        if not self.reuse or allocation is None or allocation.invalid:
            return
        request.settled, tokens = False, request.tokens[: request.committed]
        if self._reasoning is not None:
            tokens = tokens[: self._reasoning.keeps(tokens, request.submit.prompt_len)]
        self.manager.finished.seal([(allocation, request.committed)])
        known = request.prefix.head(len(tokens) // self.page_tokens)
        prefix = known.longer(tokens[len(known) * self.page_tokens :])
        self.manager.finished.cache_pages(allocation, prefix, request.submit.priority)

    def seal(self, request: DecodeRequest) -> tuple[list[bytes], dict[str, int]]:
        """Digest all committed state; returns the block hashes of its pages, and by pool the digests of what is at its
        end: of the last page where that is partly filled, and of the recurrent state."""
        allocation, committed = request.held, request.committed
        self.manager.finished.seal([(allocation, committed)])
        ends = self.manager.finished.end_digests(allocation, committed)
        return block_hashes(request.tokens[:committed], self.page_tokens, request.submit.salt), ends

    def intact(self, request: DecodeRequest, chain: Sequence[bytes], ends: Mapping[str, int]) -> bool:
        """Whether all state that the request would go on from still matches its tags, which `seal` returned."""
        allocation, spec, committed = request.held, self.manager.spec, request.committed
        wanted = due(spec, committed)
        for pool, pages in sendable_pages(wanted, allocation, chain, ends).items():
            firsts, stops = extents(spec, pool, wanted[pool], committed)
            now = self.manager.pools.digest(pool, pages.indices, firsts, stops)
            if now != [tag.digest for tag in pages.tags]:
                return False
        return True

    def free(self, request: DecodeRequest) -> None:
        """Give committed state to the tree and free the rest. Idempotent: nothing is held afterwards."""
        if request.allocation is None:
            return
        if request.in_place:
            self.cache(request)
        under_way: list[Completion] = [request.latest.step.completion] if request.latest is not None else []
        if request.returning is not None:
            under_way.append(request.returning.restored)
        self.manager.allocations.free(request.allocation, under_way)
        request.allocation, request.settled = None, False
