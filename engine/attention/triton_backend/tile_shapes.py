"""The tiles of attention's kernels: how much of the work one program does, with how many warps, how far ahead it loads.

Rows, blocks and warps are part of the numerics. A block is what one update of the running softmax takes in. Warps share
out a tile's rows and columns, and where several have columns of one row, their number is the order in which its sum of
weights is added up. So extend and decode take the same tile. Stages change no bit.

They were chosen by the compiled code (`python -m bench.kernels --compiled`): what doesn't fit into registers makes a
program slower than any smaller tile. GPUs of compute capability 9 read both sides of a product from shared memory and
so have room for larger ones. The capability is in the numerics class, so tiles may differ by it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

SPLIT_TOKENS, SEGMENT_TOKENS = 256, 4096
"""What a split and a segment of keys and values are (`merge_kernels`)."""
LATENT_SPLIT_TOKENS = 1024
"""What a split of latents is, which is a segment by itself."""
_MIN = 16
"""Rows, and columns, of the smallest product."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """One kernel's tile."""

    rows: int
    """Rows of queries: queries times heads."""
    block: int
    """Keys that are taken in at once."""
    warps: int
    stages: int
    """Blocks that are on their way or in use at once."""

    def within(self, rows: int, block: int) -> TileShape:
        """The tile, but not larger than this."""
        return TileShape(max(_MIN, min(self.rows, rows)), max(_MIN, min(self.block, block)), self.warps, self.stages)


_BY_HEAD_DIM = {
    9: {128: TileShape(64, 64, 4, 3), 256: TileShape(64, 32, 8, 3), 512: TileShape(32, 16, 8, 3)},
    12: {
        64: TileShape(64, 32, 4, 3), 128: TileShape(64, 32, 8, 3), 256: TileShape(32, 32, 8, 3),
        512: TileShape(16, 32, 8, 2),
    },
    0: {
        64: TileShape(64, 64, 4, 3), 128: TileShape(64, 64, 8, 3), 256: TileShape(32, 32, 8, 3),
        512: TileShape(16, 32, 8, 2),
    },
}  # fmt: skip
"""Major compute capability (0: any other) -> largest width of a head -> tile, in half precision."""


def head_tile(head_dim: int, dtype: torch.dtype, capability: int) -> TileShape:
    """The tile for keys and values by head, of heads up to 512 wide."""
    if dtype.itemsize > 2:
        return TileShape(16, 16, 16 if head_dim > 256 else 8, 2)
    tiles = _BY_HEAD_DIM.get(capability // 10, _BY_HEAD_DIM[0])
    return next(tile for width, tile in tiles.items() if head_dim <= width)


def latent_tile(dtype: torch.dtype, capability: int) -> TileShape:
    """The tile for latents of up to 512 with keys of up to 128 beside them."""
    if dtype.itemsize > 2:
        return TileShape(16, 16, 8, 2)
    return TileShape(64, 32, 8, 3) if capability // 10 == 9 else TileShape(32, 32, 8, 2)


def index_tile(dtype: torch.dtype) -> TileShape:
    """The tile for an indexer's scores: queries one after the other, all heads of one at once."""
    return TileShape(8, 64, 4, 3) if dtype.itemsize == 2 else TileShape(8, 32, 8, 2)


def order_key(capability: int) -> str:
    """Six hexadecimal digits that follow from all tiles, splits and segments: with others, sums are made in another
    order."""
    dtypes = (torch.bfloat16, torch.float32)
    tiles = [head_tile(width, dtype, capability) for width in (64, 128, 256, 512) for dtype in dtypes]
    tiles += [latent_tile(dtype, capability) for dtype in dtypes] + [index_tile(dtype) for dtype in dtypes]
    sizes = [(tile.rows, tile.block, tile.warps) for tile in tiles]
    said = repr((sizes, SPLIT_TOKENS, SEGMENT_TOKENS, LATENT_SPLIT_TOKENS))
    return hashlib.blake2b(said.encode(), digest_size=3).hexdigest()
