"""The Triton kernels against torch and against themselves: are they right, and are they invariant?

In float32, float16 and bfloat16: attention against softmax attention in float64, a decoded row against the same row of
an extend, a row alone against a row in a crowd, and the store kernel; the last two must be bitwise. Products, norms and
activations are held to float64, and the other kernels by row (norm, rope and store; the draw of tokens), of experts,
and of latent and sparse attention to their torch twins. Runs on a GPU, or with ``TRITON_INTERPRET=1`` on a CPU in small
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.listed_plans import listed_plan
from twinpool.contracts.checkpoint.rope_spec import RopeSpec
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.attention.attention_backend import IndexKeys, LatentBackend, ScoreOptions, SparseSelection
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.torch_backend.torch_attention import TorchAttention
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention
from twinpool.engine.gpu.gpu_kernels import BlockProducts, GpuKernels
from twinpool.engine.layers.mixers import triton_store_heads
from twinpool.engine.layers.moe.experts import ExpertRoutes, TorchExperts, gated_silu
from twinpool.engine.layers.moe.triton_experts import StackedProducts, TritonExperts
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.layers.rope import RopeTable, rotate
from twinpool.engine.runner.sampling import sampler as sampling
from twinpool.engine.runner.sampling import triton_draw
from twinpool.engine.tensors.row_exact_linear import FAST, RowExactLinear
from twinpool.engine.weight_formats.block_weight import BlockWeight, Code, quantise

PAGE_TOKENS = 16
LATENT_PAGE_TOKENS = 64
ATTENTION_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
PARAMS = SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.95)


@dataclass(frozen=True)
class KernelCheck:
    claim: str
    dtype: str
    ok: bool
    worst: float
    """Largest absolute difference."""

    @classmethod
    def of(cls, claim: str, dtype: torch.dtype, got: Tensor, want: Tensor, tolerance: float = 0.0) -> KernelCheck:
        worst = float((got.double() - want.double()).abs().max())
        return cls(claim, str(dtype).removeprefix("torch."), worst <= tolerance, worst)

    def __str__(self) -> str:
        return f"{'ok   ' if self.ok else 'WRONG'} {self.dtype:9} {self.claim} (worst {self.worst:.1e})"


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int


class Paged:
    """Sequences of one length in shuffled pages, contiguously, and as queries, all on one device."""

    def __init__(self, batch: int, length: int, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
        source = torch.Generator(device).manual_seed(length * 31 + batch)

        def draw(count: int) -> Tensor:
            shape = (batch, length, count, heads.dim)
            return torch.randn(shape, generator=source, device=device).to(dtype)

        self.q, self.k, self.v = draw(heads.heads), draw(heads.kv_heads), draw(heads.kv_heads)
        self.length, self.heads, self.device = length, heads, device
        pages = -(-length // PAGE_TOKENS)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(3)) + 1
        self.tables = order.view(batch, pages).tolist()
        shape = (batch * pages + 1, PAGE_TOKENS, heads.kv_heads, heads.dim)
        self.k_pages, self.v_pages = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        self.scale = heads.dim**-0.5
        plan = self.plan(range(batch), 0, length)
        TritonAttention().store(self.k.flatten(0, 1), self.v.flatten(0, 1), self.k_pages, self.v_pages, plan.slots_t)

    def plan(self, rows: Sequence[int], start: int, count: int) -> AttentionPlan:
        tables = [self.tables[row] for row in rows]
        return listed_plan([start] * len(tables), [count] * len(tables), tables, PAGE_TOKENS, self.device)

    def packed(self, rows: Sequence[int], start: int, count: int) -> Tensor:
        return torch.cat([self.q[row, start : start + count] for row in rows])

    def attend(self, attention: TritonAttention, rows: Sequence[int], start: int, count: int) -> Tensor:
        """[len(rows), count, heads, dim]."""
        plan, q_thd = self.plan(rows, start, count), self.packed(rows, start, count)
        out = attention.attend(q_thd, self.k_pages, self.v_pages, plan, ScoreOptions(self.scale))
        return out.view(len(rows), count, *out.shape[1:])

    def want(self, start: int, count: int) -> Tensor:
        """Softmax attention in float64: [batch, count, heads, dim]."""
        group = self.heads.heads // self.heads.kv_heads
        q = self.q[:, start : start + count].double()
        k, v = (t[:, : start + count].double().repeat_interleave(group, 2) for t in (self.k, self.v))
        scores = torch.einsum("bqhd,bnhd->bhqn", q, k) * self.scale
        at = torch.arange(start + count, device=self.device)
        scores.masked_fill_(at[None, :] > at[start:, None], float("-inf"))
        return torch.einsum("bhqn,bnhd->bqhd", scores.softmax(-1), v)


def attention_checks(
    attention: TritonAttention, heads: Heads, dtype: torch.dtype, length: int, device: torch.device
) -> list[KernelCheck]:
    """All claims for one shape and dtype."""
    paged = Paged(3, length, heads, dtype, device)
    tail = min(length, 70)
    start = length - tail
    everyone = range(3)
    extended = paged.attend(attention, everyone, start, tail)
    decoded = paged.attend(attention, everyone, length - 1, 1)
    alone = paged.attend(attention, [1], start, tail)
    decoded_alone = paged.attend(attention, [1], length - 1, 1)
    cut = start + tail // 3
    chunks = [paged.attend(attention, everyone, a, b - a) for a, b in ((start, cut), (cut, length))]
    stored = paged.k_pages[torch.tensor(paged.tables[0], device=device)].flatten(0, 1)[:length]

    def verdict(claim: str, got: Tensor, want: Tensor, tolerance: float = 0.0) -> KernelCheck:
        return KernelCheck.of(f"{heads.heads}/{heads.kv_heads}x{heads.dim} {claim}", dtype, got, want, tolerance)

    return [
        verdict("extend is softmax attention", extended, paged.want(start, tail), ATTENTION_TOLERANCE[dtype]),
        verdict("decode is softmax attention", decoded, paged.want(length - 1, 1), ATTENTION_TOLERANCE[dtype]),
        verdict("a decoded row is bitwise the extended row", decoded, extended[:, -1:]),
        verdict("an extended row is bitwise alone as in a batch", alone, extended[1:2]),
        verdict("a decoded row is bitwise alone as in a batch", decoded_alone, decoded[1:2]),
        verdict("chunk ends change nothing, bitwise", torch.cat(chunks, 1), extended),
        verdict("stored keys are the keys, bitwise", stored, paged.k[0]),
    ]


@dataclass(frozen=True)
class LatentShape:
    heads: int
    latent: int
    turning: int
    index_heads: int
    index_dim: int
    top_k: int


GLM5 = LatentShape(64, 512, 64, 32, 128, 2048)
SMALL = LatentShape(4, 24, 8, 16, 16, 20)


class LatentContext:
    """Sequences of one length with latents and index keys in shuffled pages, and queries for all their positions."""

    def __init__(
        self, shape: LatentShape, batch: int, length: int, queries: int, dtype: torch.dtype, device: torch.device
    ):
        source = torch.Generator(device).manual_seed(length)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=source, device=device).to(dtype)

        self.shape, self.batch, self.length, self.queries, self.device = shape, batch, length, queries, device
        pages = -(-length // LATENT_PAGE_TOKENS)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(3)) + 1
        self.tables = order.view(batch, pages).tolist()
        self.latents = draw(batch * pages + 1, LATENT_PAGE_TOKENS, shape.latent + shape.turning)
        self.keys = IndexKeys(draw(batch * pages + 1, LATENT_PAGE_TOKENS, shape.index_dim))
        self.latents[0], self.keys.pages[0] = 0, 0
        self.q = draw(batch, queries, shape.heads, shape.latent + shape.turning)
        self.index_q = draw(batch, queries, shape.index_heads, shape.index_dim)
        self.weights = torch.randn(batch, queries, shape.index_heads, generator=source, device=device)
        self.scale = (shape.latent + shape.turning) ** -0.5

    def plan(self, rows: Sequence[int], skip: int = 0) -> AttentionPlan:
        """Of some sequences' queries without the first `skip`."""
        count = self.queries - skip
        tables = [self.tables[row] for row in rows]
        return listed_plan(
            [self.length - count] * len(rows), [count] * len(rows), tables, LATENT_PAGE_TOKENS, self.device
        )

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


def latent_checks(
    backend: LatentBackend, dtype: torch.dtype, device: torch.device, small: bool
) -> Iterator[KernelCheck]:
    """All claims for one dtype; `small` shapes for Triton's interpreter."""
    shape, length, queries = (SMALL, 40, 5) if small else (GLM5, 5003, 70)
    twin = TorchAttention(FAST).latent
    context = LatentContext(shape, 2, length, queries, dtype, device)

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


class Mixture:
    """The same random experts as kernels and as torch operations."""

    def __init__(self, experts: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
        source = torch.Generator(device).manual_seed(experts)

        def draw(rows: int, columns: int) -> Tensor:
            weights = torch.randn(experts, rows, columns, generator=source, device=device)
            return weights.mul_(columns**-0.5).to(dtype)

        ups, downs = draw(2 * inner, hidden), draw(hidden, inner)
        self.experts, self.hidden, self.dtype, self.device = experts, hidden, dtype, device
        self.weights = ups, downs
        self.kernels = TritonExperts(StackedProducts(ups, None), StackedProducts(downs, None), gated_silu)
        self.torchs = TorchExperts([RowExactLinear(w) for w in ups], [RowExactLinear(w) for w in downs], gated_silu)
        self.expert_elements = 3 * hidden * inner

    def quantised(self) -> tuple[TritonExperts, TritonExperts]:
        """The experts in blocks of four bits, and these expanded."""
        none = [None] * self.experts
        ups, downs = ([quantise(weight, 4, 32) for weight in weights] for weights in self.weights)
        blocks = StackedProducts.of(ups, none), StackedProducts.of(downs, none)
        up, down = (StackedProducts(torch.stack([w.dense() for w in weights]), None) for weights in (ups, downs))
        return TritonExperts(*blocks, gated_silu), TritonExperts(up, down, gated_silu)

    def step(self, tokens: int, top_k: int) -> tuple[Tensor, ExpertRoutes]:
        source = torch.Generator(self.device).manual_seed(tokens)
        x = torch.randn(tokens, self.hidden, generator=source, device=self.device).to(self.dtype)
        order = torch.rand(tokens, self.experts, generator=source, device=self.device).argsort(-1)
        weights = torch.rand(tokens, top_k, generator=source, device=self.device)
        return x, ExpertRoutes(order[:, :top_k].contiguous(), weights)


class StoredHeads:
    """A product of queries, keys and values on its way into pages."""

    def __init__(self, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device):
        source = torch.Generator(device).manual_seed(tokens)
        self.qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=source, device=device).to(dtype)
        self.norm = torch.rand(heads + kv_heads, dim, generator=source, device=device).to(dtype)
        table = RopeTable(RopeSpec("default", 10000.0), dim, dtype, device)
        self.turns = table.at(torch.arange(tokens, device=device), tokens)
        self.slots = torch.randperm(tokens, generator=source, device=device) + 16
        shape = (tokens // 16 + 2, 16, kv_heads, dim)
        self.pages = [torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"]
        self.split = [heads, kv_heads, kv_heads]
        self.dim = dim

    def by_kernel(self) -> Tensor:
        k_pages, v_pages = self.pages
        return triton_store_heads.store_heads(self.qkv, self.norm, 1e-6, self.turns, k_pages, v_pages, self.slots, None)

    def by_torch(self) -> Tensor:
        q, k, v = torch.split(self.qkv.view(len(self.qkv), -1, self.dim), self.split, dim=1)
        qk = rotate(rms_norm(torch.cat((q, k), 1), self.norm, 1e-6), *self.turns)
        q, k = torch.split(qk, self.split[:2], dim=1)
        for pages, entries in zip(self.pages, (k, v), strict=True):
            pages.view(-1, *entries.shape[1:]).index_copy_(0, self.slots, entries)
        return q


def row_checks(dtype: torch.dtype, device: torch.device, small: bool) -> Iterator[KernelCheck]:
    """All claims for one dtype; `small` shapes for Triton's interpreter."""

    def check(claim: str, got: Tensor, want: Tensor, tolerance: float = 0.0) -> KernelCheck:
        return KernelCheck.of(claim, dtype, got, want, tolerance)

    mixture = Mixture(4, 40, 24, dtype, device) if small else Mixture(16, 1000, 376, dtype, device)
    for tokens in (1, 7) if small else (1, 7, 300):
        x, routes = mixture.step(tokens, 2)
        got, want = mixture.kernels(x, routes), mixture.torchs(x, routes, FAST)
        yield check(f"experts of {tokens} tokens are torch's", got, want, TOLERANCE[dtype])
        alone = mixture.kernels(x[:1], ExpertRoutes(routes.experts_mk[:1], routes.weights_mk[:1]))
        yield check(f"experts of a row are bitwise the same alone as among {tokens}", alone, got[:1])
    yield from _layer_checks(dtype, device, small, check)
    yield from _block_checks(dtype, device, small, check)
    heads = StoredHeads(20, 4, 2, 48, dtype, device)
    want_q = heads.by_torch()
    want_pages = [pages.clone() for pages in heads.pages]
    got_q = heads.by_kernel()
    for name, got, want in zip("qkv", (got_q, *heads.pages), (want_q, *want_pages), strict=True):
        yield check(f"norm, rope and store of {name} are torch's", got, want, TOLERANCE[dtype])
    rows, vocab = (2, 70) if small else (32, 32003)
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)).to(device)
    uniforms = [(i + 0.5) / rows for i in range(rows)]
    drawn = triton_draw.sample(logits, [PARAMS] * rows, uniforms)
    yield check("drawn tokens are torch's", drawn, sampling._sample(logits, [PARAMS] * rows, uniforms))


def _layer_checks(
    dtype: torch.dtype, device: torch.device, small: bool, check: Callable[..., KernelCheck]
) -> Iterator[KernelCheck]:
    """Products, norms and activations against float64, and rows alone against rows among others."""
    kernels, source = GpuKernels(), torch.Generator(device).manual_seed(9)
    rows, inner, width = (5, 80, 40) if small else (200, 3000, 1000)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, device=device).to(dtype)

    weight, x, added = draw(width, inner) * inner**-0.5, draw(rows, inner), draw(rows, inner)
    product, norm = kernels.packed(weight, None), torch.rand(inner, generator=source, device=device).to(dtype)
    out = product(x)
    yield check("products are float64's", out, x.double() @ weight.double().T, TOLERANCE[dtype])
    for count in (1, 3) if small else (1, 3, 64, 65, 129):
        yield check(f"products of {count} rows are bitwise those of {rows}", product(x[:count]), out[:count])
    total, normed = kernels.add_rms_norm(x, added, norm, 1e-6)
    mean = total.double().square().mean(-1, keepdim=True) + 1e-6
    yield check("norms are float64's", normed, total.double() * mean.rsqrt() * norm.double(), 2 * TOLERANCE[dtype])
    alone = kernels.add_rms_norm(x[:1], added[:1], norm, 1e-6)[1]
    yield check("a norm is bitwise the same alone", alone, normed[:1])
    squares, want = kernels.square_sum(x), x.double().square().sum(-1)
    # A sum of thousands of squares is exact to a share of itself, not to a fixed distance.
    yield check("sums of squares are float64's", squares / want, torch.ones_like(want), 2 * TOLERANCE[torch.float32])
    yield check("a sum of squares is bitwise the same alone", kernels.square_sum(x[:1]), squares[:1])
    gate, up = x.double().chunk(2, dim=-1)
    want = torch.nn.functional.silu(gate) * up
    yield check("gated activations are float64's", kernels.silu_product(x), want, 4 * TOLERANCE[dtype])


def _block_checks(
    dtype: torch.dtype, device: torch.device, small: bool, check: Callable[..., KernelCheck]
) -> Iterator[KernelCheck]:
    """Products and experts with weights in blocks, against float64 and the same weights expanded."""
    source, kernels = torch.Generator(device).manual_seed(11), GpuKernels()
    rows, inner, width = (5, 96, 40) if small else (200, 2944, 1000)
    weight, x = torch.randn(2, width, inner, generator=source, device=device), torch.randn(
        rows, inner, generator=source, device=device
    ).to(dtype)  # fmt: skip
    codes = torch.randint(0, 120, (width, inner), generator=source, device=device, dtype=torch.uint8)
    scales = torch.full((width, inner // 32), 118, dtype=torch.uint8, device=device)
    kinds = {
        "4 bits": quantise(weight[0] * inner**-0.5, 4, 32),
        "8 bits": quantise(weight[1] * inner**-0.5, 8, 128),
        "float8": BlockWeight(Code.E4M3, codes, scales, 32, dtype),
        "four-bit floats": BlockWeight(Code.E2M1, codes[:, ::2].contiguous(), scales + 4, 32, dtype),
    }
    for name, found in kinds.items():
        blocks = replace(found, dtype=dtype)
        product = BlockProducts(kernels, [blocks], None)
        out, expanded = product(x), blocks.dense()
        tolerance = TOLERANCE[dtype] * max(1.0, float(out.abs().max()))
        yield check(f"products in {name} are float64's", out, x.double() @ expanded.double().T, tolerance)
        for count in (1, 3) if small else (1, 3, 64, 65, 129):
            yield check(
                f"products in {name}: {count} rows are bitwise those of {rows}", product(x[:count]), out[:count]
            )
    mixture = Mixture(4, 64, 32, dtype, device) if small else Mixture(16, 1024, 384, dtype, device)
    of_blocks, plain = mixture.quantised()
    for tokens in (1, 7) if small else (1, 7, 300):
        h, routes = mixture.step(tokens, 2)
        got, want = of_blocks(h, routes), plain(h, routes)
        yield check(f"experts of {tokens} tokens in 4 bits are those expanded", got, want, TOLERANCE[dtype])
        alone = of_blocks(h[:1], ExpertRoutes(routes.experts_mk[:1], routes.weights_mk[:1]))
        yield check(f"experts of a row in 4 bits are bitwise the same alone as among {tokens}", alone, got[:1])
