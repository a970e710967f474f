"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), to all positions or to a selection of them; and the
indexer of DeepSeek sparse attention (arXiv 2512.02556), which selects the positions that a layer's attention reads.

    the layer's definition           q_h = [plain | turned],  k_h = [K_h latent | key],  v_h = V_h latent
    its computation, since all       q_h . k_h = (K_h^T plain) . latent + turned . key
    is linear in the latent          out_h = V_h (sum of weights * latent)

Here `turned` and `key` are rotated by rope, `plain` is not. So attention reads one vector [latent | key] a token for
all heads, and keys and values by head are never made. Ranks divide the heads; each rank has the latents whole.

The indexer keeps one shared key a token, LayerNorm(wk x) with its first dimensions rotated by position, beside the
latents, page by page; the queries of many small heads come from the layer's compressed queries. The score of a position
is the sum over heads of weight * relu(q . key), and the `top_k` best positions are read. Every rank computes the whole
indexer: a selection needs all index heads, and all heads of attention share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace
from twinpool.engine.attention.attention_backend import IndexKeys, SparseSelection
from twinpool.engine.attention.attention_plan import BLOCK_TOKENS
from twinpool.engine.attention.kv_quantization import scales_of, store, with_scales
from twinpool.engine.attention.torch_backend.torch_latent import INDEX_BLOCK
from twinpool.engine.layers.decoder import ForwardContext, LayerPlace
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.layers.rope import RopeTable, rotate
from twinpool.engine.tensors.row_exact_linear import HeadLinear, RowExactLinear
from twinpool.engine.tensors.weight_loader import Weights
from twinpool.engine.weight_formats.block_weight import Weight, select_rows

_NORM_EPS = 1e-6
"""Epsilon of the norms of compressed queries, latents and index keys, whatever epsilon the model's other norms have."""
_SELECTION = "selection of the last layer that chose"

SparseSelector = Callable[[Tensor, Tensor, ForwardContext], SparseSelection | None]
"""Selects the positions that a layer reads, from its input [M, hidden] and compressed queries [M, q_rank] (normed)."""


@dataclass(frozen=True)
class MLAShape:
    """The numbers of a latent attention layer, as DeepSeek's `config.json` has them."""

    hidden: int
    heads: int
    q_rank: int | None
    """Queries are compressed to this many numbers first; None: not at all."""
    rank: int
    """Numbers of a latent, to which keys and values are compressed."""
    plain_dim: int
    """Dimensions of a head's queries and keys without rope."""
    rope_dim: int
    """Dimensions of a head's queries and keys with rope; all heads share this part of the key."""
    value_dim: int
    scale: float
    interleaved: bool = True
    """Whether rotated dimensions come in neighbouring pairs, not as two halves."""
    bias: bool = False

    @property
    def entry_dim(self) -> int:
        """Numbers that are kept a token: latent and shared key."""
        return self.rank + self.rope_dim

    @property
    def q_dim(self) -> int:
        return self.plain_dim + self.rope_dim


def latent_buffers(
    layers: int, shape: MLAShape, dtype: torch.dtype, codes: torch.dtype | None
) -> tuple[BufferSpec, ...]:
    """Declare buffer ``latent`` of `layers` layers, whole on every rank; quantised to `codes` with its scales, or, for
    None, kept in `dtype`."""
    return with_scales((BufferSpec("latent", layers, (shape.entry_dim,), dtype),), codes)


def halves(size: int, first: int, count: int, heads: int = 1) -> Tensor:
    """The order of each head's `size` dimensions, [heads * size] int64, in which `count` of them from `first` on are
    two halves where they were neighbouring pairs.

    Applied to the rows of weights once; then the rotation by halves serves both kinds of rope.
    """
    order = torch.arange(size)
    turning = order[first : first + count]
    of_one = torch.cat((order[:first], turning[0::2], turning[1::2], order[first + count :]))
    return (torch.arange(heads).unsqueeze(1) * size + of_one).flatten()


class MLA:
    """The attention sub-layer with latents."""

    def __init__(
        self,
        weights: Weights,
        place: LayerPlace,
        rope: RopeTable,
        shape: MLAShape,
        selector: SparseSelector | None = None,
    ) -> None:
        """`selector` selects the positions that are read; without one, all are."""
        self._place, self._rope, self._shape, self._selector = place, rope, shape, selector
        self._heads = len(weights.shard.heads(shape.heads))
        self._down, self._q_norm_r, self._q_up = self._queries(weights)
        self._norm_l = weights.tensor("kv_a_layernorm.weight", shape.rank)
        self._absorb, self._expand = self._head_matrices(weights)
        values = weights.shard.axis(shape.heads, shape.value_dim, "heads")
        self._out = weights.linear({"o_proj": shape.hidden}, values, bias=shape.bias)
        for k, n in ((shape.entry_dim, BLOCK_TOKENS), (BLOCK_TOKENS, shape.rank)):
            weights.products.extend((batch, k, n) for batch in (1, 5))

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        shape, rows = self._shape, len(h_mh)
        plan, buffers = ctx.plans[self._place.pool], ctx.buffers(self._place)
        down = ctx.linear(h_mh, self._down)
        low, latent, key = torch.split(down, [self._low, shape.rank, shape.rope_dim], dim=-1)
        if self._q_norm_r is None or self._q_up is None:
            q = low.view(rows, self._heads, shape.q_dim)
        else:
            low = rms_norm(low, self._q_norm_r, _NORM_EPS)
            q = ctx.linear(low, self._q_up).view(rows, self._heads, shape.q_dim)
        plain, turning = torch.split(q, [shape.plain_dim, shape.rope_dim], dim=-1)
        turned = rotate(torch.cat((turning, key.unsqueeze(1)), dim=1), *ctx.rope(self._rope))
        entries = torch.cat((rms_norm(latent, self._norm_l, _NORM_EPS), turned[:, -1]), dim=-1)
        store(buffers, "latent", entries[: ctx.count], plan)
        absorbed = ctx.linear(plain.reshape(rows, -1), self._absorb).view(rows, self._heads, shape.rank)
        queries = torch.cat((absorbed, turned[:, :-1]), dim=-1)[: ctx.count]
        latents, scales, attention = buffers["latent"], scales_of(buffers, "latent"), ctx.attention.latent
        if self._selector is None:
            out = attention.attend(queries, latents, plan, shape.scale, shape.rank, scales)
        else:
            selection = self._selector(h_mh, low, ctx)
            out = attention.attend_selected(queries, latents, plan, selection, shape.scale, shape.rank, scales)
        return ctx.linear(ctx.linear(ctx.padded(out.reshape(ctx.count, -1)), self._expand), self._out)

    @property
    def _low(self) -> int:
        """Columns of the down product that belong to queries: compressed ones, or the queries themselves."""
        return self._shape.q_rank or self._heads * self._shape.q_dim

    def _queries(self, weights: Weights) -> tuple[RowExactLinear, Tensor | None, RowExactLinear | None]:
        """The product that reads the layer's input; the norm and up product of compressed queries, or None twice."""
        shape = self._shape
        key_value = self._sorted(weights.weight("kv_a_proj_with_mqa", shape.entry_dim, shape.hidden), shape.rank)
        if shape.q_rank is None:
            q = self._by_head(weights, "q_proj", shape.hidden)
            return weights.made(q, key_value, bias_n=self._down_bias(weights, "", q.shape[0])), None, None
        low = weights.weight("q_a_proj", shape.q_rank, shape.hidden)
        down = weights.made(low, key_value, bias_n=self._down_bias(weights, "q_a_proj.bias", shape.q_rank))
        norm = weights.tensor("q_a_layernorm.weight", shape.q_rank)
        return down, norm, weights.made(self._by_head(weights, "q_b_proj", shape.q_rank))

    def _down_bias(self, weights: Weights, name: str, rows: int) -> Tensor | None:
        """The bias of the product that reads the layer's input; without a `name` zeros for the queries' rows."""
        if not self._shape.bias:
            return None
        key_value = weights.tensor("kv_a_proj_with_mqa.bias", self._shape.entry_dim)
        if self._shape.interleaved:
            key_value = key_value[halves(self._shape.entry_dim, self._shape.rank, self._shape.rope_dim)]
        return torch.cat((weights.tensor(name, rows) if name else key_value.new_zeros(rows), key_value))

    def _by_head(self, weights: Weights, name: str, columns: int) -> Weight:
        """The weight of this rank's queries, [heads * q_dim, columns]."""
        shape = self._shape
        rows = weights.shard.axis(shape.heads, shape.q_dim, "heads")
        return self._sorted(weights.weight(name, rows, columns), shape.plain_dim, self._heads)

    def _sorted(self, weight: Weight, first: int, heads: int = 1) -> Weight:
        """A weight whose rows with rope, from `first` of each head on, are two halves."""
        if not self._shape.interleaved:
            return weight
        order = halves(weight.shape[0] // heads, first, self._shape.rope_dim, heads)
        return select_rows(weight, order)

    def _head_matrices(self, weights: Weights) -> tuple[HeadLinear, HeadLinear]:
        """The matrices from a head's plain query to a query of latents, and from a weighted latent to its value."""
        shape = self._shape
        rows = weights.shard.axis(shape.heads, shape.plain_dim + shape.value_dim, "heads")
        both = weights.tensor("kv_b_proj.weight", rows, shape.rank).view(self._heads, -1, shape.rank)
        keys_hpr, values_hvr = torch.split(both, [shape.plain_dim, shape.value_dim], dim=1)
        return weights.by_head(keys_hpr), weights.by_head(values_hvr.transpose(1, 2))


@dataclass(frozen=True)
class IndexShape:
    """The numbers of an indexer, as DeepSeek's `config.json` has them."""

    hidden: int
    q_rank: int
    heads: int
    dim: int
    rope_dim: int
    top_k: int
    interleaved: bool
    """Whether rotated dimensions come in neighbouring pairs, not as two halves."""


def index_buffers(
    layers: int, shape: IndexShape, dtype: torch.dtype, page_tokens: int, *, float8: bool
) -> tuple[BufferSpec, ...]:
    """Declare buffer ``index_k`` and, with float8 keys, ``index_scale`` (a float32 a token), whole on every rank."""
    keys = (page_tokens, shape.dim)
    if not float8:
        return (BufferSpec("index_k", layers, keys, dtype, IndexSpace.PAGE),)
    return (
        BufferSpec("index_k", layers, keys, torch.float8_e4m3fn, IndexSpace.PAGE),
        BufferSpec("index_scale", layers, (page_tokens,), torch.float32, IndexSpace.PAGE),
    )


class DSAIndexer:
    """Selects the positions that a layer reads; leaves the selection in the scratch for layers that share it."""

    def __init__(self, weights: Weights, place: LayerPlace, rope: RopeTable, shape: IndexShape) -> None:
        """`place.layer` counts only the layers that have index keys."""
        self._place, self._rope, self._shape = place, rope, shape
        keys = weights.weight("wk", shape.dim, shape.hidden)
        scores = weights.weight("weights_proj", shape.heads, shape.hidden)
        norm, bias = weights.tensor("k_norm.weight", shape.dim), weights.tensor("k_norm.bias", shape.dim)
        queries = weights.weight("wq_b", shape.heads * shape.dim, shape.q_rank)
        if shape.interleaved:
            order = halves(shape.dim, 0, shape.rope_dim)
            keys, norm, bias = select_rows(keys, order), norm[order], bias[order]
            queries = select_rows(queries, halves(shape.dim, 0, shape.rope_dim, shape.heads))
        self._norm_d, self._bias_d = norm, bias
        self._keys_weights = weights.made(keys, scores)
        self._queries = weights.made(queries)
        self._scale = shape.dim**-0.5 * shape.heads**-0.5
        weights.products.extend((batch, shape.dim, INDEX_BLOCK) for batch in (1, 5))

    def __call__(self, h_mh: Tensor, low_mr: Tensor, ctx: ForwardContext) -> SparseSelection | None:
        shape, plan, buffers = self._shape, ctx.plans[self._place.pool], ctx.buffers(self._place)
        keys, weights_mh = torch.split(ctx.linear(h_mh, self._keys_weights), [shape.dim, shape.heads], dim=-1)
        key_md = F.layer_norm(keys, (shape.dim,), self._norm_d, self._bias_d, _NORM_EPS)
        q_mhd = ctx.linear(low_mr, self._queries).view(-1, shape.heads, shape.dim)
        turning, plain = torch.cat((q_mhd, key_md.unsqueeze(1)), dim=1).tensor_split([shape.rope_dim], dim=-1)
        turned = torch.cat((rotate(turning, *ctx.rope(self._rope)), plain), dim=-1)[: ctx.count]
        index = IndexKeys(buffers["index_k"], buffers.get("index_scale"))
        latent = ctx.attention.latent
        latent.store_keys(turned[:, -1], index, plan)
        weights_th = weights_mh[: ctx.count].float() * self._scale
        selection = latent.select(turned[:, :-1], weights_th, index, plan, shape.top_k)
        ctx.scratch[_SELECTION] = selection
        return selection


def shared_selection(h_mh: Tensor, low_mr: Tensor, ctx: ForwardContext) -> SparseSelection | None:
    """Return the selection of the last layer before this one that has an indexer."""
    found: SparseSelection | None = ctx.scratch[_SELECTION]
    return found
