"""The Triton kernels on a GPU: are they right, are they invariant, and how fast beside torch's own?

Checks first (`tests/support/kernel_checks.py`). Then decode and extend are timed beside `scaled_dot_product_attention`
over keys that lie contiguously, which is what paging gives up; products beside the vendor's library; the other kernels
by row, of experts, and of latent and sparse attention and the indexer at GLM-5's shapes (64 heads over latents of 512 +
64, 32 index heads of 128, 2,048 positions selected) beside their torch twins. Needs torch 2.11, triton 3.6 and an
NVIDIA GPU. With ``TRITON_INTERPRET=1`` the checks run on a CPU in small shapes, and nothing is timed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.common.bench_report import write_figures
from tests.support.kernel_checks import (
    GLM5,
    PARAMS,
    Heads,
    KernelCheck,
    LatentContext,
    Mixture,
    Paged,
    StoredHeads,
    attention_checks,
    latent_checks,
    row_checks,
)
from twinpool.engine.attention.attention_backend import LatentBackend, ScoreOptions, SparseSelection
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention
from twinpool.engine.gpu.gpu_kernels import BlockProducts, GpuKernels
from twinpool.engine.runner.sampling import sampler as sampling
from twinpool.engine.runner.sampling import triton_draw
from twinpool.engine.tensors.row_exact_linear import FAST
from twinpool.engine.weight_formats.block_weight import quantise


@dataclass(frozen=True)
class KernelTiming:
    what: str
    triton_us: float
    torch_us: float
    rate: float
    unit: str

    @classmethod
    def of(cls, what: str, ours_us: float, torch_us: float, *, read: float = 0.0, work: float = 0.0) -> KernelTiming:
        """`read`: bytes that must be read, where memory is the limit; else `work`: operations."""
        rate, unit = (read / ours_us / 1e3, "GB/s") if read else (work / ours_us / 1e6, "TFLOP/s")
        return cls(what, ours_us, torch_us, rate, unit)

    def __str__(self) -> str:
        times = f"triton {self.triton_us:9.1f} us, torch {self.torch_us:9.1f} us"
        return f"{self.what}: {times}, ratio {self.torch_us / self.triton_us:.2f}, {self.rate:.0f} {self.unit}"


class KernelsRun:
    """The results so far, printed and written one by one."""

    def __init__(self, file: Path | None, interpreted: bool) -> None:
        where = "interpreter" if interpreted else torch.cuda.get_device_name()
        self._setting = {"torch": torch.__version__, "triton": triton.__version__, "device": where}
        self._file = file
        self.checks: list[KernelCheck] = []
        self.timings: list[KernelTiming] = []

    def add(self, found: Iterable[KernelCheck | KernelTiming]) -> None:
        for one in found:
            print(one, flush=True)
            if isinstance(one, KernelCheck):
                self.checks.append(one)
            else:
                self.timings.append(one)
            groups = {"checks": [asdict(c) for c in self.checks], "timings": [asdict(t) for t in self.timings]}
            write_figures(self._file, {"setting": self._setting, **groups})


def median_us(call: Callable[[], Tensor]) -> float:
    return float(triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median")) * 1e3


def time_attention(
    attention: TritonAttention, heads: Heads, dtype: torch.dtype, batch: int, context: int, queries: int
) -> KernelTiming:
    """Median times of one call over `context` positions of which the last `queries` are new."""
    paged = Paged(batch, context, heads, dtype, torch.device("cuda"))
    start = context - queries
    plan, q_thd = paged.plan(range(batch), start, queries), paged.packed(range(batch), start, queries)
    q_bhqd, k_bhnd, v_bhnd = (t.transpose(1, 2).contiguous() for t in (paged.q[:, start:], paged.k, paged.v))
    at = torch.arange(context, device="cuda")
    mask = None if queries in (1, context) else at[None, :] <= at[start:, None]

    def ours() -> Tensor:
        return attention.attend(q_thd, paged.k_pages, paged.v_pages, plan, ScoreOptions(paged.scale))

    def torchs() -> Tensor:
        causal = queries == context and queries > 1
        return scaled_dot_product_attention(q_bhqd, k_bhnd, v_bhnd, mask, is_causal=causal, enable_gqa=True)

    what, name = "decode" if queries == 1 else "extend", str(dtype).removeprefix("torch.")
    what = f"{what} {name:9} batch {batch:4} context {context:6} queries {queries:5}"
    if queries == 1:
        read = batch * context * heads.kv_heads * heads.dim * 2 * dtype.itemsize
        return KernelTiming.of(what, median_us(ours), median_us(torchs), read=read)
    pairs = queries * (start + (queries + 1) / 2)
    return KernelTiming.of(what, median_us(ours), median_us(torchs), work=batch * heads.heads * pairs * heads.dim * 4)


_TIMED = (
    (1, 1024, 1), (1, 16384, 1), (8, 4096, 1), (32, 4096, 1), (128, 2048, 1),
    (1, 512, 512), (1, 4096, 4096), (1, 8192, 512), (4, 2048, 512),
)  # fmt: skip
"""Batch, context, and queries of it."""


def attention_timings(attention: TritonAttention) -> Iterator[KernelTiming]:
    """The dtypes of models first."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for batch, context, queries in _TIMED:
            yield time_attention(attention, Heads(32, 8, 128), dtype, batch, context, queries)
            torch.cuda.empty_cache()


def _layer_timings(device: torch.device) -> Iterator[KernelTiming]:
    """Products beside the vendor's, at the shapes of Qwen3-8B, and a norm beside torch's."""
    kernels, dtype = GpuKernels(), torch.bfloat16
    for width, inner in ((24576, 4096), (4096, 12288)):
        weight = torch.randn(width, inner, device=device).mul_(inner**-0.5).to(dtype)
        sides: dict[str, Callable[[Tensor], Tensor]] = {"": kernels.packed(weight, None)}
        sides["4-bit "] = BlockProducts(kernels, [quantise(weight, 4, 128)], None)
        for (kind, ours), rows in itertools.product(sides.items(), (1, 16, 64, 256, 2048)):
            x = torch.randn(rows, inner, device=device).to(dtype)
            triton_us = median_us(lambda: ours(x))  # noqa: B023
            torch_us = median_us(lambda: torch.nn.functional.linear(x, weight))  # noqa: B023
            read = weight.nbytes // (4 if kind else 1) if rows <= 64 else 0
            what, work = f"{kind}product {inner} x {width}, {rows} rows", 2 * rows * width * inner
            yield KernelTiming.of(what, triton_us, torch_us, read=read, work=work)
    x, norm = torch.randn(2048, 4096, device=device).to(dtype), torch.rand(4096, device=device).to(dtype)
    ours_us = median_us(lambda: kernels.rms_norm(x, norm, 1e-6))
    torch_us = median_us(lambda: torch.nn.functional.rms_norm(x, (4096,), norm, 1e-6))
    yield KernelTiming.of("norm, 2048 rows of 4096", ours_us, torch_us, read=2 * x.nbytes)


def row_timings(device: torch.device) -> Iterator[KernelTiming]:
    """At the shapes of Qwen3-8B, and of 30 B parameters with 128 experts, 8 of them a token, in bfloat16."""
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
        heads = StoredHeads(tokens, 32, 8, 128, torch.bfloat16, device)
        ours, torchs = median_us(heads.by_kernel), median_us(heads.by_torch)
        yield KernelTiming.of(f"norm, rope, store, {tokens} tokens", ours, torchs, read=heads.qkv.nbytes * 2)
    for rows in (1, 32):
        logits = 3 * torch.randn(rows, 151936, device=device)
        many, uniforms = [PARAMS] * rows, [0.5] * rows
        ours = median_us(lambda: triton_draw.sample(logits, many, uniforms))  # noqa: B023
        torchs = median_us(lambda: sampling._sample(logits, many, uniforms))  # noqa: B023
        yield KernelTiming.of(f"top-k/top-p draw, {rows} rows of 151,936", ours, torchs, read=logits.nbytes)


def latent_timings(backend: LatentBackend, device: torch.device) -> Iterator[KernelTiming]:
    """In bfloat16: decode at 32k and 128k, dense and sparse, and extends of 512."""
    for batch, length, queries in ((1, 32768, 1), (32, 32768, 1), (8, 131072, 1), (1, 32768, 512), (1, 131072, 512)):
        context = LatentContext(GLM5, batch, length, queries, torch.bfloat16, device)
        yield from _time_latent(backend, context)
        del context
        torch.cuda.empty_cache()


def _time_latent(backend: LatentBackend, context: LatentContext) -> Iterator[KernelTiming]:
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
    backend: LatentBackend, context: LatentContext, plan: AttentionPlan, index_q: Tensor, weights: Tensor
) -> SparseSelection:
    found = backend.select(index_q, weights, context.keys, plan, context.shape.top_k)
    assert found is not None
    return found


def _timing(what: str, ours: float, torchs: float, queries: int, read: int, work: int) -> KernelTiming:
    """Bytes that must be read for decode, operations for extends; a step of queries reads shared keys once."""
    return KernelTiming.of(what, ours, torchs, read=read if queries == 1 else 0, work=work)


def main(json_file: Path | None, interpreted: bool) -> int:
    """All checks, and on a GPU all timings. Returns 1 where a check failed."""
    device = torch.device("cpu" if interpreted else "cuda")
    attention = TritonAttention()
    run = KernelsRun(json_file, interpreted)
    _check_all(run, attention, device, interpreted)
    if not interpreted:
        run.add(row_timings(device))
        run.add(latent_timings(attention.latent, device))
        run.add(attention_timings(attention))
    wrong = sum(not one.ok for one in run.checks)
    print(f"{len(run.checks) - wrong} checks passed, {wrong} failed")
    return 1 if wrong else 0


def _check_all(run: KernelsRun, attention: TritonAttention, device: torch.device, interpreted: bool) -> None:
    shapes = [Heads(4, 2, 48)] if interpreted else [Heads(4, 2, 48), Heads(16, 8, 128), Heads(32, 8, 128)]
    dtypes = (torch.float32, torch.float16) if interpreted else (torch.float32, torch.float16, torch.bfloat16)
    for dtype in dtypes:
        for heads in shapes:
            for length in [40] if interpreted else [100, 3001, 9001]:
                run.add(attention_checks(attention, heads, dtype, length, device))
        run.add(row_checks(dtype, device, interpreted))
        run.add(latent_checks(attention.latent, dtype, device, interpreted))
