"""The indexer of DeepSeek sparse attention (arXiv 2512.02556): selects the positions that a layer's attention reads.

One shared key a token, LayerNorm(wk x) with its first dimensions rotated by position, is kept beside the latents, page
by page; the queries of many small heads come from the layer's compressed queries. The score of a position is the sum
over heads of weight * relu(q . key), and the `top_k` best positions are read. Every rank computes the whole indexer: a
selection needs all index heads, and all heads of attention share it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace
from twinpool.engine.attention.latent_backend import IndexKeys, SparseSelection
from twinpool.engine.attention.torch_backend.torch_latent import INDEX_BLOCK
from twinpool.engine.layers.forward_context import ForwardContext, LayerPlace
from twinpool.engine.layers.mixers.mla import halves
from twinpool.engine.layers.rope import RopeTable, rotate
from twinpool.engine.tensors.weight_loader import Weights

_NORM_EPS = 1e-6
_SELECTION = "selection of the last layer that chose"


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
        keys = weights.tensor("wk.weight", shape.dim, shape.hidden)
        scores = weights.tensor("weights_proj.weight", shape.heads, shape.hidden)
        norm, bias = weights.tensor("k_norm.weight", shape.dim), weights.tensor("k_norm.bias", shape.dim)
        queries = weights.tensor("wq_b.weight", shape.heads * shape.dim, shape.q_rank)
        if shape.interleaved:
            keys, norm, bias = (halves(each, 0, shape.rope_dim) for each in (keys, norm, bias))
            by_head = queries.view(shape.heads, shape.dim, shape.q_rank).transpose(0, 1)
            queries = halves(by_head, 0, shape.rope_dim).transpose(0, 1).reshape(-1, shape.q_rank)
        self._norm_d, self._bias_d = norm, bias
        self._keys_weights = weights.made(torch.cat((keys, scores)))
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
