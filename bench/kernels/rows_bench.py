"""Kernels by row, of products and of experts, for `attention_bench`: right, invariant, and how fast beside torch?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bench.kernels.kernel_results import TOLERANCE, KernelCheck, KernelTiming, median_us
from twinpool.contracts.checkpoint.rope_spec import RopeSpec
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.gpu.gpu_kernels import GpuKernels
from twinpool.engine.layers.mixers import triton_store_heads
from twinpool.engine.layers.moe.expert_router import ExpertRoutes
from twinpool.engine.layers.moe.experts import TorchExperts, gated_silu
from twinpool.engine.layers.moe.triton_experts import StackedProducts, TritonExperts
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.layers.rope import RopeTable, rotate
from twinpool.engine.runner.sampling import sampler as sampling
from twinpool.engine.runner.sampling import triton_draw
from twinpool.engine.tensors.row_exact_linear import FAST, RowExactLinear

PARAMS = SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.95)


class Mixture:
    """The same random experts as kernels and as torch operations."""

    def __init__(self, experts: int, hidden: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
        source = torch.Generator(device).manual_seed(experts)

        def draw(rows: int, columns: int) -> Tensor:
            weights = torch.randn(experts, rows, columns, generator=source, device=device)
            return weights.mul_(columns**-0.5).to(dtype)

        ups, downs = draw(2 * inner, hidden), draw(hidden, inner)
        self.experts, self.hidden, self.dtype, self.device = experts, hidden, dtype, device
        self.kernels = TritonExperts(StackedProducts(ups, None), StackedProducts(downs, None), gated_silu)
        self.torchs = TorchExperts([RowExactLinear(w) for w in ups], [RowExactLinear(w) for w in downs], gated_silu)
        self.expert_elements = 3 * hidden * inner

    def step(self, tokens: int, top_k: int) -> tuple[Tensor, ExpertRoutes]:
        source = torch.Generator(self.device).manual_seed(tokens)
        x = torch.randn(tokens, self.hidden, generator=source, device=self.device).to(self.dtype)
        order = torch.rand(tokens, self.experts, generator=source, device=self.device).argsort(-1)
        weights = torch.rand(tokens, top_k, generator=source, device=self.device)
        return x, ExpertRoutes(order[:, :top_k].contiguous(), weights)


class Heads:
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


def checks(dtype: torch.dtype, device: torch.device, small: bool) -> Iterator[KernelCheck]:
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
    heads = Heads(20, 4, 2, 48, dtype, device)
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


def _layer_timings(device: torch.device) -> Iterator[KernelTiming]:
    """Products beside the vendor's, at the shapes of Qwen3-8B, and a norm beside torch's."""
    kernels, dtype = GpuKernels(), torch.bfloat16
    for width, inner in ((24576, 4096), (4096, 12288)):
        weight = torch.randn(width, inner, device=device).mul_(inner**-0.5).to(dtype)
        ours = kernels.packed(weight, None)
        for rows in (1, 16, 64, 256, 2048):
            x = torch.randn(rows, inner, device=device).to(dtype)
            triton_us = median_us(lambda: ours(x))  # noqa: B023
            torch_us = median_us(lambda: torch.nn.functional.linear(x, weight))  # noqa: B023
            read, work = weight.nbytes if rows <= 64 else 0, 2 * rows * width * inner
            what = f"product {inner} x {width}, {rows} rows"
            yield KernelTiming.of(what, triton_us, torch_us, read=read, work=work)
    x, norm = torch.randn(2048, 4096, device=device).to(dtype), torch.rand(4096, device=device).to(dtype)
    ours_us = median_us(lambda: kernels.rms_norm(x, norm, 1e-6))
    torch_us = median_us(lambda: torch.nn.functional.rms_norm(x, (4096,), norm, 1e-6))
    yield KernelTiming.of("norm, 2048 rows of 4096", ours_us, torch_us, read=2 * x.nbytes)


def timings(device: torch.device) -> Iterator[KernelTiming]:
    """At the shapes of Qwen3-8B, and of a model of 30 B parameters with 128 experts, 8 of them a token, in bfloat16."""
    yield from _layer_timings(device)
    mixture = Mixture(128, 2048, 768, torch.bfloat16, device)
    for tokens in (1, 8, 64, 4096):
        x, routes = mixture.step(tokens, 8)
        ours = median_us(lambda x=x, routes=routes: mixture.kernels(x, routes))  # type: ignore[misc]
        torchs = median_us(lambda x=x, routes=routes: mixture.torchs(x, routes, FAST))  # type: ignore[misc]
        chosen = int(routes.experts_mk.flatten().bincount().count_nonzero())
        read, work = (n * mixture.expert_elements * 2 for n in (chosen if tokens <= 64 else 0, tokens * 8))
        yield KernelTiming.of(f"experts, {tokens} tokens", ours, torchs, read=read, work=work)
    for tokens in (32, 8192):
        heads = Heads(tokens, 32, 8, 128, torch.bfloat16, device)
        ours, torchs = median_us(heads.by_kernel), median_us(heads.by_torch)
        yield KernelTiming.of(f"norm, rope, store, {tokens} tokens", ours, torchs, read=heads.qkv.nbytes * 2)
    for rows in (1, 32):
        logits = 3 * torch.randn(rows, 151936, device=device)
        many: Sequence[SamplingParams] = [PARAMS] * rows
        uniforms = [0.5] * rows
        ours = median_us(lambda: triton_draw.sample(logits, many, uniforms))  # noqa: B023
        torchs = median_us(lambda: sampling._sample(logits, many, uniforms))  # noqa: B023
        yield KernelTiming.of(f"top-k/top-p draw, {rows} rows of 151,936", ours, torchs, read=logits.nbytes)
