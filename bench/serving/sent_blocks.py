"""The baseline of `bench.serving.routing_policies`: one dictionary of blocks a worker, as the router had until the
holder table. Kept as it was, but for what a bench doesn't ask."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence


class SentBlocks:
    """The blocks that one worker was sent, the least recently sent first."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[bytes, None] = OrderedDict()

    def overlap(self, block_hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt the worker has: a chain's tail is never there without its head, so the
        first gap is found by halving."""
        return bisect_left(block_hashes, True, key=lambda block: block not in self.blocks)

    def sent(self, block_hashes: Sequence[bytes]) -> None:
        """Enter the blocks of a prompt that goes to the worker."""
        for block in reversed(block_hashes):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
