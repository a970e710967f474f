"""A request on a worker of either role, its pages, and what of them can be handed over now.

What prefill's and decode's requests have in common is here: who sent them and when they end, their tokens' hashes,
their allocation, and the three lengths (`worker.step_commit`). Their phases and all else is their role's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twinpool.cache.allocation import Allocation
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.page_digest import ContentTag
from twinpool.cache.prefix_cache.token_prefix import TokenPrefix
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.worker_events import LegNote
from twinpool.engine.structured_output.grammar_engine import AnswerGrammar
from twinpool.transfer.rooms.room_outcomes import SendablePages


@dataclass(eq=False)
class WorkerRequest:
    """One attempt at one request, as far as both roles have the same of it."""

    session: SessionId
    submit: Submit
    arrived: float
    """When the request came, in seconds of the worker's clock."""
    deadline: float
    """When it is failed, on the same clock."""
    prefix: TokenPrefix
    """The prompt's whole pages."""
    grammar: AnswerGrammar | None = None
    """What the answer follows."""
    allocation: Allocation | None = None
    """Its pages and slots, while it has some."""
    committed: int = 0
    """Positions whose state is known to be complete: what may be sealed, shared and sent."""
    launched: int = 0
    """Positions whose state was given to the device to compute."""
    planned: int = 0
    """Positions that the scheduler has decided to compute."""
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds from its arrival to events, by the names of `LegReport`."""
    notes: list[LegNote] = field(default_factory=list)
    """What happened to it besides, for its router; a decode worker's are of the time since its last report."""

    @property
    def held(self) -> Allocation:
        """The allocation, for callers that know by the phase that there is one."""
        assert self.allocation is not None, f"{self} has no allocation"
        return self.allocation


class RequestPages:
    """The KV cache manager as the requests of one worker use it. `reuse`: whether pages come from the tree and go to
    it."""

    def __init__(self, manager: KVCacheManager, *, reuse: bool) -> None:
        self.manager = manager
        self.page_tokens = manager.spec.page_tokens
        self.reuse = reuse

    def prefix(self, submit: Submit) -> tuple[TokenPrefix, list[bytes]]:
        """Return the prefix of the whole pages of a request's tokens, and the block hashes of all its pages, the last
        partly filled one included."""
        chain = block_hashes(submit.tokens, self.page_tokens, submit.salt)
        return TokenPrefix.of(submit.tokens, self.page_tokens, submit.salt, chain), chain

    def distrust(self, request: WorkerRequest) -> None:
        """Invalidate the request's prompt in the tree and its allocation: none of that state is used again."""
        self.manager.finished.invalidate(request.prefix)
        request.held.invalid = True

    def close(self) -> None:
        """Give nothing to the tree from here on: the worker closes."""
        self.reuse = False


def pages_within(spec: PoolSetSpec, nbytes: int) -> dict[str, int]:
    """Return how many pages or slots of each pool, with the heads of all ranks, fit into `nbytes`; at least one."""
    return {pool: max(1, nbytes // spec.whole.unit_bytes(pool)) for pool in spec.by_name}


def sendable_pages(
    wanted: Mapping[str, range],
    allocation: Allocation,
    chain: Sequence[bytes],
    ends: Mapping[str, int],
    most: Mapping[str, int] | None = None,
) -> dict[str, SendablePages]:
    """Return, by pool, the next pages and slots of `wanted`, up to the first that isn't sealed; no entry for none.

    `chain` has the block hashes of all pages of the sequence, the last partly filled one included. `ends` has the
    digests at its end, by pool: of that last page, and of the recurrent state. `most` limits the pages or slots of each
    pool.
    """
    out = {}
    for pool, left in wanted.items():
        tags = []
        for number in left if most is None else left[: most[pool]]:
            digest = _sealed(allocation, pool, number, ends if number == len(chain) - 1 else {})
            if digest is None:
                break
            tags.append(ContentTag(chain[number], digest))
        if tags:
            table = allocation.tables.get(pool)
            places = table.pages[left.start :] if table is not None else allocation.slots[pool].indices
            out[pool] = SendablePages(left.start, tuple(places[: len(tags)]), tuple(tags))
    return out


def _sealed(allocation: Allocation, pool: str, number: int, ends: Mapping[str, int]) -> int | None:
    """Return the digest of a page or state by its number; None while it isn't finished."""
    whole = allocation.digests.get(pool, ())
    return whole[number] if number < len(whole) else ends.get(pool)
