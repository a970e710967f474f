"""Latent and sparse attention and the indexer at GLM-5's shapes, for `attention_bench`.

64 heads over latents of 512 + 64, 32 index heads of 128, 2,048 positions selected. torch's side is attention with the
latents as keys and values of one head (`scaled_dot_product_attention`), and for the indexer its own operations, all
over contexts that lie contiguously.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.kernel_results import TOLERANCE, KernelCheck, KernelTiming, median_us
from tests.support.listed_plans import listed_plan
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.latent_backend import IndexKeys, LatentBackend, SparseSelection
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.tensors.row_exact_linear import FAST

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Shape:
    heads: int
    latent: int
    turning: int
    index_heads: int
    index_dim: int
    top_k: int


GLM5 = Shape(64, 512, 64, 32, 128, 2048)
SMALL = Shape(4, 24, 8, 16, 16, 20)


class Context:
    """Sequences of one length with latents and index keys in shuffled pages, and queries for all their positions."""

    def __init__(self, shape: Shape, batch: int, length: int, queries: int, dtype: torch.dtype, device: torch.device):
        source = torch.Generator(device).manual_seed(length)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=source, device=device).to(dtype)

        self.shape, self.batch, self.length, self.queries, self.device = shape, batch, length, queries, device
        pages = -(-length // PAGE_TOKENS)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(3)) + 1
        self.tables = order.view(batch, pages).tolist()
        self.latents = draw(batch * pages + 1, PAGE_TOKENS, shape.latent + shape.turning)
        self.keys = IndexKeys(draw(batch * pages + 1, PAGE_TOKENS, shape.index_dim))
        self.latents[0], self.keys.pages[0] = 0, 0
        self.q = draw(batch, queries, shape.heads, shape.latent + shape.turning)
        self.index_q = draw(batch, queries, shape.index_heads, shape.index_dim)
        self.weights = torch.randn(batch, queries, shape.index_heads, generator=source, device=device)
        self.scale = (shape.latent + shape.turning) ** -0.5

    def plan(self, rows: Sequence[int], skip: int = 0) -> AttentionPlan:
        """Of some sequences' queries without the first `skip`."""
        count = self.queries - skip
        tables = [self.tables[row] for row in rows]
        return listed_plan([self.length - count] * len(rows), [count] * len(rows), tables, PAGE_TOKENS, self.device)

    def packed(self, values: Tensor, rows: Sequence[int], skip: int = 0) -> Tensor:
        return values[list(rows), skip:].flatten(0, 1).contiguous()

    def dense(self, backend: LatentBackend, rows: Sequence[int], skip: int = 0) -> Tensor:
        q_thd = self.packed(self.q, rows, skip)
        return backend.attend(q_thd, self.latents, self.plan(rows, skip), self.scale, self.shape.latent)

    def select(
        self, backend: LatentBackend, plan: AttentionPlan, rows: Sequence[int], skip: int
    ) -> SparseSelection | None:
        index_q, weights = self.packed(self.index_q, rows, skip), self.packed(self.weights, rows, skip)
        return backend.select(index_q, weights, self.keys, plan, self.shape.top_k)

    def sparse(self, backend: LatentBackend, rows: Sequence[int], skip: int = 0) -> Tensor:
        plan = self.plan(rows, skip)
        selection = self.select(backend, plan, rows, skip)
        q_thd = self.packed(self.q, rows, skip)
        return backend.attend_selected(q_thd, self.latents, plan, selection, self.scale, self.shape.latent)


def checks(backend: LatentBackend, dtype: torch.dtype, device: torch.device, small: bool) -> Iterator[KernelCheck]:
    """All claims for one dtype; `small` shapes for Triton's interpreter."""
    shape, length, queries = (SMALL, 40, 5) if small else (GLM5, 5003, 70)
    twin = TorchAttention(FAST).latent
    context = Context(shape, 2, length, queries, dtype, device)

    def check(claim: str, got: Tensor, want: Tensor, tolerance: float = 0.0) -> KernelCheck:
        return KernelCheck.of(claim, dtype, got, want, tolerance)

    for name in ("dense", "sparse"):
        attend: Any = getattr(context, name)
        whole = attend(backend, (0, 1))
        last = whole[[queries - 1, 2 * queries - 1]]
        # Of two scores that are a rounding apart at the edge of a selection, the twin may choose the other.
        allowed = TOLERANCE[dtype] + (1e-3 if name == "sparse" else 0.0)
        yield check(f"{name} attention to latents is the twin's", whole, attend(twin, (0, 1)), allowed)
        yield check(f"{name}: decoded rows are bitwise the extended", attend(backend, (0, 1), queries - 1), last)
        yield check(f"{name}: rows are bitwise alone as in a batch", attend(backend, (1,)), whole[queries:])
        yield check(f"{name}: a decoded row is bitwise alone", attend(backend, (1,), queries - 1), last[1:])
        yield check(f"{name}: chunk ends change nothing, bitwise", attend(backend, (0,), 3), whole[3:queries])
    plan = context.plan((0, 1))
    got, want = (context.select(each, plan, (0, 1), 0) for each in (backend, twin))
    assert got is not None
    assert want is not None
    here = got.positions_sk[want.rows_s]
    differing = sum(len(set(a) - set(b)) for a, b in zip(here.tolist(), want.positions_sk.tolist(), strict=True))
    part = differing / want.positions_sk.numel()
    yield KernelCheck("positions are selected as by the twin", str(dtype).removeprefix("torch."), part < 1e-3, part)


def timings(backend: LatentBackend, device: torch.device) -> Iterator[KernelTiming]:
    """In bfloat16: decode at 32k and 128k, dense and sparse, and extends of 512."""
    for batch, length, queries in ((1, 32768, 1), (32, 32768, 1), (8, 131072, 1), (1, 32768, 512), (1, 131072, 512)):
        context = Context(GLM5, batch, length, queries, torch.bfloat16, device)
        yield from _timed(backend, context)
        del context
        torch.cuda.empty_cache()


def _timed(backend: LatentBackend, context: Context) -> Iterator[KernelTiming]:
    shape, batch, length, queries = context.shape, context.batch, context.length, context.queries
    rows, plan, name = range(batch), context.plan(range(batch)), f"batch {batch}, context {length}, queries {queries}"
    dim, value_dim = shape.latent + shape.turning, shape.latent
    q_thd = context.packed(context.q, rows)
    keys = context.latents[torch.tensor(context.tables, device=context.device)].flatten(1, 2)[:, None, :length]
    value = keys[..., :value_dim]
    # One head of keys for all heads: they are rows of queries of one head, or torch would copy keys for each of them.
    # As many queries at once as a mask has room for; times are those of all of them.
    some = min(queries, 16)
    q_bhqd = context.q[:, -some:].transpose(1, 2)
    q_one = q_bhqd.reshape(batch, 1, shape.heads * some, dim)
    positions = torch.arange(length, device=context.device)
    mask = (positions <= positions[-some:, None]).repeat(shape.heads, 1) if some > 1 else None

    def torchs() -> Tensor:
        return scaled_dot_product_attention(q_one, keys, value, mask, scale=context.scale)

    ours = median_us(lambda: backend.attend(q_thd, context.latents, plan, context.scale, value_dim))
    read, work = batch * length * dim * 2, 2 * batch * queries * length * shape.heads * (dim + value_dim)
    torch_us = median_us(torchs) * -(-queries // some)
    yield _timing(f"latent attention, {name}", ours, torch_us, queries, read, work)

    index_q, weights = context.packed(context.index_q, rows), context.packed(context.weights, rows)
    selecting = median_us(lambda: _selected(backend, context, plan, index_q, weights).slots_sk)
    index_keys = context.keys.pages[torch.tensor(context.tables, device=context.device)].flatten(1, 2)[:, :length]

    def torchs_indexer() -> Tensor:
        by_head = torch.einsum("bqhd,bnd->bqhn", context.index_q[:, :64], index_keys).relu_()
        scores = torch.einsum("bqh,bqhn->bqn", context.weights[:, :64].to(by_head.dtype), by_head)
        return scores.topk(shape.top_k).indices

    torch_us = median_us(torchs_indexer) * -(-queries // 64)
    read = batch * length * shape.index_dim * 2
    work = 2 * batch * queries * length * shape.index_heads * shape.index_dim
    yield _timing(f"indexer and top-k, {name}", selecting, torch_us, queries, read, work)

    selection = _selected(backend, context, plan, index_q, weights)
    sparse = median_us(
        lambda: backend.attend_selected(q_thd, context.latents, plan, selection, context.scale, value_dim)
    )
    read = batch * queries * shape.top_k * dim * 2
    work = 2 * batch * queries * shape.top_k * shape.heads * (dim + value_dim)
    yield _timing(f"sparse attention (beside dense), {name}", sparse, ours, queries, read, work)


def _selected(
    backend: LatentBackend, context: Context, plan: AttentionPlan, index_q: Tensor, weights: Tensor
) -> SparseSelection:
    found = backend.select(index_q, weights, context.keys, plan, context.shape.top_k)
    assert found is not None
    return found


def _timing(what: str, ours: float, torchs: float, queries: int, read: int, work: int) -> KernelTiming:
    """Bytes that must be read for decode, operations for extends; a step of queries reads shared keys once."""
    return KernelTiming.of(what, ours, torchs, read=read if queries == 1 else 0, work=work)
