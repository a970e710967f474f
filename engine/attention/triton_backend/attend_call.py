"""One call of attention on a GPU: its arguments as the Triton kernels take them, its tiles, and its scratch.

A tile is how much of the work one program does, with how many warps, and how far ahead it loads. Rows, blocks and warps
are part of the numerics. A block is what one update of the running softmax takes in. Warps share out a tile's rows and
columns, and where several have columns of one row, their number is the order in which its sum of weights is added up.
So extend and decode take the same tile. Stages change no bit.

Tiles were chosen by the compiled code (`python -m bench.kernels --compiled`): what doesn't fit into registers makes a
program slower than any smaller tile. GPUs of compute capability 9 read both sides of a product from shared memory and
so have room for larger ones. The capability is in the numerics class, so tiles may differ by it.

Scratch is what programs leave of parts of a softmax (`merge_kernels`), and it is bounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.engine.attention.attention_backend import ScoreOptions
    from twinpool.engine.attention.attention_plan import AttentionPlan


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


SCRATCH_BYTES = 128 << 20
"""What one call keeps of parts of results at most, whatever its batch and contexts: where all of them would be more,
some queries are computed and merged after the others."""
_ALIGNED = 16
"""Elements of float32: where each of the tensors begins, so that a kernel is compiled once, for aligned ones."""
_PADDING_BYTES = 2 * _ALIGNED * 4


@dataclass(frozen=True, slots=True)
class Parts:
    """Room for `count` parts with values `width` wide."""

    count: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.count * (self.width + 2) * torch.float32.itemsize

    def fit(self, scratch_bytes: int) -> bool:
        return self.nbytes + _PADDING_BYTES <= scratch_bytes

    def times(self, many: int) -> Parts:
        return Parts(self.count * many, self.width)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Maxima and sums [count] and weighted values [count * width], float32, of any content."""
        each = -(-self.count // _ALIGNED) * _ALIGNED
        numbers = torch.empty(2 * each + self.count * self.width, dtype=torch.float32, device=device)
        return numbers[: self.count], numbers[each : each + self.count], numbers[2 * each :]


def waves(tokens: int, bytes_a_token: int, scratch_bytes: int, quantum: int) -> Iterator[tuple[int, int]]:
    """Cut [0, tokens) into runs whose parts fit into the scratch: where each begins, and how many tokens it has.

    Whole multiples of `quantum` where so many fit; a single token always does.
    """
    fits = max(1, (scratch_bytes - _PADDING_BYTES) // bytes_a_token if bytes_a_token else tokens)
    at_once = fits // quantum * quantum if quantum <= fits < tokens else fits
    for first in range(0, tokens, at_once):
        yield first, min(at_once, tokens - first)


MAX_HEAD_DIM = 512
MAX_HEADS_PER_KV = 64
_LOG2_E = 1.4426950408889634
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttendCall:
    """The arguments of one call of `attend`."""

    q_thd: Tensor
    k_pages: Tensor
    v_pages: Tensor
    out_thd: Tensor
    plan: AttentionPlan
    scores: ScoreOptions

    @property
    def scale_log2(self) -> float:
        return self.scores.scale * _LOG2_E

    @property
    def cap_log2(self) -> float:
        return self.scores.softcap * _LOG2_E

    @property
    def firsts(self) -> Tensor:
        """The first pages, or any tensor where there are none: the kernel doesn't read it then."""
        return self.plan.starts_b if self.plan.firsts_b is None else self.plan.firsts_b

    @property
    def sinks(self) -> Tensor:
        """The sinks, or any tensor where there are none."""
        return self.plan.starts_b if self.scores.sinks_h is None else self.scores.sinks_h

    @property
    def kind(self) -> dict[str, int]:
        """The compile-time numbers of the kernels that depend on the call."""
        return {"WINDOW": self.scores.window, "FIRSTS": self.plan.firsts_b is not None, "CAPPED": self.cap_log2 > 0}

    def check(self) -> None:
        """Raises `ConfigError` for dtypes and shapes that no kernel serves."""
        q_thd, k_pages, v_pages, plan, sinks_h = self.q_thd, self.k_pages, self.v_pages, self.plan, self.scores.sinks_h
        assert sinks_h is None or sinks_h.dtype == torch.float32, "sinks are float32"
        _, heads, head_dim = q_thd.shape
        kv_heads = k_pages.shape[2]
        if q_thd.dtype not in _DTYPES or k_pages.dtype != q_thd.dtype or v_pages.dtype != q_thd.dtype:
            raise ConfigError(
                f"triton attention takes float32, float16 or bfloat16, the same for queries, keys and values; got "
                f"{q_thd.dtype}, {k_pages.dtype} and {v_pages.dtype}; use engine.attention=torch"
            )
        if heads % kv_heads or heads // kv_heads > MAX_HEADS_PER_KV or head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"triton attention takes up to {MAX_HEADS_PER_KV} heads a key head and heads of up to {MAX_HEAD_DIM}; "
                f"got {heads} heads of {head_dim} over {kv_heads} key heads; use engine.attention=torch"
            )
        assert k_pages.shape == v_pages.shape, "keys and values lie alike"
        assert k_pages.shape[3] == head_dim, "keys fit the queries"
        assert k_pages.shape[1] == plan.page_tokens, "the plan was made for other pages"
        assert q_thd.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1, "a head's elements lie side by side"
        assert plan.offsets_b.shape[0] == plan.starts_b.shape[0] + 1 == plan.tables_bp.shape[0] + 1
        assert plan.tables_bp.stride(1) == 1, "a block table is a row"
