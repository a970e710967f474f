"""Every Triton kernel, launched by its launcher at the shapes of published models; nothing is computed.

Tensors are on torch's device ``meta``: they have shapes and strides and no contents. Run inside of
`recorded_launches.recording`, which keeps what a GPU would have been given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from twinpool.cache.memory.triton_pages import add_sums, copy_rows
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.attention.attention_backend import BLOCK, IndexKeys, ScanState, ScoreOptions, conv_positions
from twinpool.engine.attention.attention_plan import AttentionPlan, SlotPlan
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention
from twinpool.engine.gpu.gpu_kernels import GpuKernels, add_ranks
from twinpool.engine.layers.mixers.triton_store_heads import store_heads
from twinpool.engine.layers.moe.experts import ExpertRoutes, gated_silu
from twinpool.engine.layers.moe.triton_experts import StackedProducts, TritonExperts
from twinpool.engine.runner.sampling import triton_draw
from twinpool.engine.weight_formats.block_weight import BlockWeight, Code

META = torch.device("meta")
LATENT_PAGE = 64
FLOAT8_SINCE = 89
"""The compute capability that has float8 of the kind that index keys have."""


@dataclass(frozen=True)
class Scene:
    """What some layer of a model launches."""

    name: str
    launch: Callable[[], object]


@dataclass(frozen=True)
class Rig:
    """The launchers, and where their tensors are."""

    attention: TritonAttention
    device: torch.device = META
    pages: int = 1024
    """Of each pool, and slots; the first is the null page."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Numbers of any content; on a GPU some that a kernel takes its usual time for."""
        if self.device == META:
            return torch.empty(shape, dtype=dtype, device=META)
        return torch.randn(shape, dtype=torch.float32, device=self.device).to(dtype)

    def integers(self, values: Tensor, dtype: torch.dtype = torch.int32) -> Tensor:
        return values.to(dtype).to(self.device)


@dataclass(frozen=True)
class HeadShape:
    """The attention of a model's layers."""

    model: str
    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16


HEADS = (
    HeadShape("Qwen3, Llama 3: 32/8 of 128", 32, 8, 128),
    HeadShape("SmolLM2: 9/3 of 64", 9, 3, 64),
    HeadShape("Qwen3-Next: 16/2 of 256", 16, 2, 256),
    HeadShape("Gemma 3, full: 8/4 of 256", 8, 4, 256),
    HeadShape("Gemma 3, window: 8/4 of 256", 8, 4, 256, window=1024),
    HeadShape("Gemma 4, full: 8/2 of 512", 8, 2, 512),
    HeadShape("gpt-oss, full: 64/8 of 64", 64, 8, 64, sinks=True),
    HeadShape("gpt-oss, window: 64/8 of 64", 64, 8, 64, window=128, sinks=True),
    HeadShape("Gemma 2, capped: 8/4 of 256", 8, 4, 256, softcap=50.0),
    HeadShape("Qwen3 in float32: 32/8 of 128", 32, 8, 128, dtype=torch.float32),
    HeadShape("Gemma 3 in float32: 8/4 of 256", 8, 4, 256, dtype=torch.float32),
    HeadShape("Gemma 4 in float32: 8/2 of 512", 8, 2, 512, dtype=torch.float32),
)


@dataclass(frozen=True)
class LatentShape:
    """The latent attention of a model, and its indexer."""

    model: str
    heads: int
    index_heads: int
    dtype: torch.dtype = torch.bfloat16
    latent: int = 512
    turning: int = 64
    index_dim: int = 128
    top_k: int = 2048


LATENTS = (
    LatentShape("DeepSeek-V3.2", 128, 64),
    LatentShape("GLM-5", 64, 32),
    LatentShape("DeepSeek-V3.2 in float32", 128, 64, torch.float32),
)
DELTA, MAMBA, MAMBA_WIDE = (32, 16, 128, 128, True), (128, 8, 128, 64, False), (32, 1, 256, 64, False)
"""Heads, groups, width of keys and of values, delta rule: Qwen3-Next, Nemotron-H, Falcon-H1."""


HEAD_STEPS = (
    ("extend", 1, 512, 32768), ("extend, short", 1, 512, 2048), ("decode", 4, 1, 32768), ("decode, short", 4, 1, 512),
    ("decode, many", 256, 1, 32768), ("extend, longest", 16, 512, 1 << 20), ("decode, longest", 512, 1, 1 << 20),
)  # fmt: skip
"""Steps by the number of sequences, the queries of each, and the context: with many segments and with one, of few
programs and of many."""
LATENT_STEPS = (
    ("extend", 1, 512, 32768), ("extend, short", 1, 512, 1024), ("decode", 4, 1, 32768), ("decode, short", 4, 1, 512),
    ("extend, longest", 2, 512, 1 << 18), ("decode, longest", 64, 1, 1 << 18),
)  # fmt: skip


def scenes(capability: int, rig: Rig | None = None) -> Iterator[Scene]:
    """Everything that is launched on GPUs of one compute capability, by the shapes above; `rig` None: on tensors
    without contents."""
    rig = rig or Rig(TritonAttention(capability=capability))
    for shape in HEADS:
        for what, batch, queries, context in HEAD_STEPS:
            yield Scene(f"{shape.model}: {what}", partial(_attend, rig, shape, batch, queries, context))
        yield Scene(f"{shape.model}: store", partial(_store, rig, shape))
        yield Scene(f"{shape.model}: norm, rope, store", partial(_store_heads, rig, shape))
    yield Scene("epochs", partial(_stale, rig))
    for latent in LATENTS:
        for what, batch, queries, context in LATENT_STEPS:
            yield Scene(f"{latent.model}: {what}", partial(_attend_latent, rig, latent, batch, queries, context))
            yield Scene(f"{latent.model}: sparse {what}", partial(_sparse, rig, latent, batch, queries, context))
    if capability >= FLOAT8_SINCE:
        yield Scene("DeepSeek-V3.2: index keys in float8", partial(_float8, rig, LATENTS[0]))
    for name, sizes in (("Qwen3-Next", DELTA), ("Nemotron-H", MAMBA), ("Falcon-H1", MAMBA_WIDE)):
        yield Scene(f"{name}: recurrence", partial(_scan, rig, *sizes))
        yield Scene(f"{name}: recurrence, some stale", partial(_scan, rig, *sizes, muted=True))
    for dtype in (torch.bfloat16, torch.float32):
        yield Scene(f"convolution in {dtype}", partial(_conv, rig, dtype))
        yield Scene(f"Qwen3-30B: experts in {dtype}", partial(_experts, rig, 128, 2048, 768, dtype, bias=False))
    yield Scene("gpt-oss: experts", partial(_experts, rig, 32, 2880, 2880, torch.bfloat16, bias=True))
    for what, kind in BLOCKS.items():
        yield Scene(f"experts in {what}", partial(_block_experts, rig, 8, 2048, 768, kind))
    for limits in (False, True):
        yield Scene(f"draw{', top-k and top-p' if limits else ''}", partial(_draw, rig, limits))
    for words in (torch.int64, torch.int32, torch.uint8):
        yield Scene(f"copy of pages in {words}", partial(_copy, rig, words))
        yield Scene(f"digests of pages in {words}", partial(_digest, rig, words))
    for dtype in (torch.bfloat16, torch.float32):
        for what, rows, width, inner in PRODUCTS:
            yield Scene(f"product in {dtype}, {what}", partial(_product, rig, rows, width, inner, dtype))
    for kind_name, kind in BLOCKS.items():
        for what, rows, width, inner in PRODUCTS[::2]:
            yield Scene(f"product in {kind_name}, {what}", partial(_block_product, rig, rows, width, inner, kind))
        yield Scene(f"norms and activation in {dtype}", partial(_rows, rig, dtype))
        yield Scene(f"sum over four ranks in {dtype}", partial(_rank_sum, rig, dtype))
    yield Scene("DeepSeek-V3.2: products by head", partial(_by_head, rig, LATENTS[0]))


def plan_of(
    rig: Rig, batch: int, queries: int, context: int, page_tokens: int, firsts: bool = False
) -> AttentionPlan:  # fmt: skip
    """A step of `batch` sequences of `queries` queries each, the last ones of `context` positions."""
    pages = -(-context // page_tokens)
    return AttentionPlan(
        starts_b=rig.integers(torch.full((batch,), context - queries)),
        offsets_b=rig.integers(torch.arange(batch + 1) * queries),
        tables_bp=rig.integers(1 + torch.arange(batch * pages).view(batch, pages) % (rig.pages - 1)),
        slots_t=rig.integers(
            page_tokens + torch.arange(batch * queries) % (page_tokens * (rig.pages - 1)), torch.int64
        ),
        page_tokens=page_tokens,
        max_queries=queries,
        firsts_b=rig.integers(torch.zeros(batch)) if firsts else None,
        epochs_bp=rig.integers(torch.zeros(batch, pages)),
    )


def _pages(rig: Rig, shape: HeadShape, page_tokens: int = 16) -> Tensor:
    return rig.empty(rig.pages, page_tokens, shape.kv_heads, shape.dim, dtype=shape.dtype)


def _attend(rig: Rig, shape: HeadShape, batch: int, queries: int, context: int) -> object:
    q_thd = rig.empty(batch * queries, shape.heads, shape.dim, dtype=shape.dtype)
    sinks_h = rig.empty(shape.heads, dtype=torch.float32) if shape.sinks else None
    scores = ScoreOptions(shape.dim**-0.5, shape.window, shape.softcap, sinks_h)
    width = min(context, shape.window + queries) if shape.window else context
    plan = plan_of(rig, batch, queries, width, 16, firsts=shape.window > 0)
    return rig.attention.attend(q_thd, _pages(rig, shape), _pages(rig, shape), plan, scores)


def _store(rig: Rig, shape: HeadShape) -> object:
    k_thd = rig.empty(512, shape.kv_heads, shape.dim, dtype=shape.dtype)
    rig.attention.store(
        k_thd, k_thd, _pages(rig, shape), _pages(rig, shape), rig.integers(16 + torch.arange(512), torch.int64)
    )
    return None


def _store_heads(rig: Rig, shape: HeadShape) -> object:
    qkv_tn = rig.empty(512, (shape.heads + 2 * shape.kv_heads) * shape.dim, dtype=shape.dtype)
    norm_nd = rig.empty(shape.heads + shape.kv_heads, shape.dim, dtype=shape.dtype)
    turns = (rig.empty(512, 1, shape.dim, dtype=shape.dtype), rig.empty(512, 1, shape.dim, dtype=shape.dtype))
    slots_t = rig.integers(16 + torch.arange(512), torch.int64)
    muted_t = rig.integers(torch.zeros(512), torch.bool)
    return store_heads(qkv_tn, norm_nd, 1e-6, turns, _pages(rig, shape), _pages(rig, shape), slots_t, muted_t)


def _stale(rig: Rig) -> object:
    return rig.attention.stale(plan_of(rig, 256, 1, 32768, 16), rig.integers(torch.zeros(1 << 20)))


def _latents(rig: Rig, shape: LatentShape) -> Tensor:
    return rig.empty(rig.pages, LATENT_PAGE, shape.latent + shape.turning, dtype=shape.dtype)


def _attend_latent(rig: Rig, shape: LatentShape, batch: int, queries: int, context: int) -> object:
    q_thd = rig.empty(batch * queries, shape.heads, shape.latent + shape.turning, dtype=shape.dtype)
    plan = plan_of(rig, batch, queries, context, LATENT_PAGE)
    return rig.attention.latent.attend(q_thd, _latents(rig, shape), plan, 0.1, shape.latent)


def _sparse(rig: Rig, shape: LatentShape, batch: int, queries: int, context: int) -> object:
    count = batch * queries
    q_thd = rig.empty(count, shape.heads, shape.latent + shape.turning, dtype=shape.dtype)
    plan = plan_of(rig, batch, queries, context, LATENT_PAGE)
    keys = IndexKeys(rig.empty(rig.pages, LATENT_PAGE, shape.index_dim, dtype=shape.dtype))
    index_q = rig.empty(count, shape.index_heads, shape.index_dim, dtype=shape.dtype)
    weights_th = rig.empty(count, shape.index_heads, dtype=torch.float32)
    selection = rig.attention.latent.select(index_q, weights_th, keys, plan, shape.top_k)
    return rig.attention.latent.attend_selected(q_thd, _latents(rig, shape), plan, selection, 0.1, shape.latent)


def _float8(rig: Rig, shape: LatentShape) -> object:
    pages = rig.empty(rig.pages, LATENT_PAGE, shape.index_dim, dtype=torch.float8_e4m3fn)
    keys = IndexKeys(pages, rig.empty(rig.pages, LATENT_PAGE, dtype=torch.float32))
    plan = plan_of(rig, 1, 512, 32768, LATENT_PAGE)
    rig.attention.latent.store_keys(rig.empty(512, shape.index_dim), keys, plan)
    index_q, weights_th = rig.empty(512, shape.index_heads, shape.index_dim), rig.empty(512, shape.index_heads).float()
    return rig.attention.latent.select(index_q, weights_th, keys, plan, shape.top_k)


def _slots(rig: Rig, muted: bool) -> SlotPlan:
    muted_b = rig.integers(torch.tensor([0, 1]), torch.bool) if muted else None
    starts_b, offsets_b = rig.integers(torch.tensor([5, 40])), rig.integers(torch.tensor([0, 500, 512]))
    slots_b1 = rig.integers(torch.tensor([[1], [2]]))
    return SlotPlan(slots_b1, (5, 40), (500, 12), starts_b, offsets_b, muted_b=muted_b)


def _scan(rig: Rig, heads: int, groups: int, keys: int, values: int, delta: bool, muted: bool = False) -> object:
    def floats(*shape: int) -> Tensor:
        return rig.empty(*shape, dtype=torch.float32)

    state = ScanState(
        floats(rig.pages, heads, keys, values),
        floats(rig.pages, groups, BLOCK, keys),
        floats(rig.pages, heads, BLOCK, values),
        floats(rig.pages, heads, BLOCK),
        floats(rig.pages, heads, BLOCK, BLOCK) if delta else None,
    )
    q_tgk, v_thv, decay_th = floats(512, groups, keys), floats(512, heads, values), floats(512, heads)
    beta_th = floats(512, heads) if delta else None
    return rig.attention.recurrence.scan(q_tgk, q_tgk, v_thv, decay_th, beta_th, state, _slots(rig, muted))


def _conv(rig: Rig, dtype: torch.dtype) -> object:
    held = conv_positions(3)
    states = [rig.empty(rig.pages, units, held, 128, dtype=dtype) for units in (16, 32)]
    weight_kc, bias_c = rig.empty(4, 6144, dtype=torch.float32), rig.empty(6144, dtype=torch.float32)
    return rig.attention.recurrence.conv(
        rig.empty(512, 6144, dtype=dtype), states, weight_kc, bias_c, _slots(rig, True)
    )


def _experts(rig: Rig, experts: int, hidden: int, inner: int, dtype: torch.dtype, *, bias: bool) -> object:
    ups = StackedProducts(
        rig.empty(experts, 2 * inner, hidden, dtype=dtype), rig.empty(experts, 2 * inner, dtype=dtype) if bias else None
    )
    downs = StackedProducts(
        rig.empty(experts, hidden, inner, dtype=dtype), rig.empty(experts, hidden, dtype=dtype) if bias else None
    )
    routes = ExpertRoutes(
        rig.integers(torch.arange(4096).view(512, 8) % experts, torch.int64), rig.empty(512, 8, dtype=torch.float32)
    )
    return TritonExperts(ups, downs, gated_silu)(rig.empty(512, hidden, dtype=dtype), routes)


def _draw(rig: Rig, limits: bool) -> object:
    params = SamplingParams(max_tokens=1, temperature=0.8, top_k=50 if limits else 0, top_p=0.95 if limits else 1.0)
    return triton_draw.sample(rig.empty(4, 151936, dtype=torch.float32), [params] * 4, [0.5] * 4)


@dataclass(frozen=True)
class BlockKind:
    """A layout of quantised weights."""

    code: Code
    scales: torch.dtype
    group: int
    zeros: bool = False
    paired: bool = False


BLOCKS = {
    "AWQ": BlockKind(Code.UINT4, torch.float16, 128, zeros=True),
    "float8 by 128": BlockKind(Code.E4M3, torch.float32, 128),
    "MXFP4": BlockKind(Code.E2M1, torch.uint8, 32),
    "Q4_K": BlockKind(Code.UINT4, torch.uint8, 32, paired=True),
}
PRODUCTS = (
    ("few rows", 8, 4096, 4096), ("few rows, wide", 8, 151936, 4096), ("many rows", 512, 12288, 4096),
    ("many rows, narrow", 512, 1024, 12288),
)  # fmt: skip
"""Products of a Qwen3-8B by rows, width and inner axis: in parts and whole, in either tile."""


def _product(rig: Rig, rows: int, width: int, inner: int, dtype: torch.dtype) -> object:
    weight_nk, bias_n = rig.empty(width, inner, dtype=dtype), rig.empty(width, dtype=dtype)
    return GpuKernels().packed(weight_nk, bias_n)(rig.empty(rows, inner, dtype=dtype))


def _blocks(rig: Rig, kind: BlockKind, width: int, inner: int) -> BlockWeight:
    groups = inner // kind.group
    codes = rig.integers(torch.randint(0, 120, (width, inner * kind.code.bits // 8)), torch.uint8)
    scales = rig.empty(width, groups, dtype=torch.float32).abs()
    scales = (scales * 20 + 110 if kind.scales == torch.uint8 else scales).to(kind.scales)
    zeros = rig.integers(torch.randint(0, 16, (width, groups)), torch.uint8) if kind.zeros else None
    halves = [rig.empty(width, inner // 256, dtype=torch.float16) if kind.paired else None for _ in range(2)]
    return BlockWeight(
        kind.code, codes, scales, kind.group, torch.bfloat16, zeros, 0, halves[0], 256 if kind.paired else 0,
        offset_factors=halves[1], paired=kind.paired,
    )  # fmt: skip


def _block_product(rig: Rig, rows: int, width: int, inner: int, kind: BlockKind) -> object:
    product = GpuKernels().packed_blocks(_blocks(rig, kind, width, inner), rig.empty(width))
    assert product is not None
    return product(rig.empty(rows, inner))


def _block_experts(rig: Rig, experts: int, hidden: int, inner: int, kind: BlockKind) -> object:
    ups = StackedProducts.of([_blocks(rig, kind, 2 * inner, hidden)] * experts, [None] * experts)
    downs = StackedProducts.of([_blocks(rig, kind, hidden, inner)] * experts, [None] * experts)
    routes = ExpertRoutes(
        rig.integers(torch.arange(4096).view(512, 8) % experts, torch.int64), rig.empty(512, 8, dtype=torch.float32)
    )
    return TritonExperts(ups, downs, gated_silu)(rig.empty(512, hidden), routes)


def _by_head(rig: Rig, shape: LatentShape) -> object:
    weight_hkn = rig.empty(shape.heads, 128, shape.latent)
    return GpuKernels().packed_heads(weight_hkn)(rig.empty(512, shape.heads * 128))


def _rows(rig: Rig, dtype: torch.dtype) -> object:
    kernels, x_mn = GpuKernels(), rig.empty(512, 4096, dtype=dtype)
    kernels.add_rms_norm(x_mn, x_mn, rig.empty(4096, dtype=dtype), 1e-6)
    kernels.rms_norm(rig.empty(512, 16384, dtype=dtype), rig.empty(16384, dtype=torch.float32), 1e-6)
    kernels.square_sum(rig.empty(512, 16, 128, dtype=torch.float32))
    return kernels.silu_product(rig.empty(512, 2 * 12288, dtype=dtype))


def _rank_sum(rig: Rig, dtype: torch.dtype) -> object:
    return add_ranks(rig.empty(4, 64, 4096, dtype=dtype))


def _digest(rig: Rig, words: torch.dtype) -> None:
    stack_lpw = rig.empty(72, rig.pages, 32768 // words.itemsize, dtype=words)
    coefficients_lw = rig.empty(72, 2048 // words.itemsize, dtype=torch.int64)
    add_sums(stack_lpw, [1, 2, 3], coefficients_lw, rig.empty(3, 16, dtype=torch.int64))


def _copy(rig: Rig, words: torch.dtype) -> object:
    stack = rig.empty(48, rig.pages, 4096 // words.itemsize, dtype=words)
    copy_rows(stack, [1, 2, 3], stack, [4, 5, 6])
    return None
