"""The Triton kernels on a GPU: are they right, are they invariant, and how fast beside torch's own attention?

Checks first, in float32, float16 and bfloat16: against softmax attention in float64, a decoded row against the same row
of an extend, a row alone against a row in a crowd, and the store kernel. The last two must be bitwise. Then it times
decode and extend beside `scaled_dot_product_attention` over keys that lie contiguously, which is what paging gives up.
Products are beside the vendor's library; the other kernels by row (norms, activations; norm, rope and store; the draw
of tokens), of experts, and of latent and sparse attention are checked and timed beside their torch twins. Needs torch
2.11, triton 3.6 and an NVIDIA GPU. With ``TRITON_INTERPRET=1`` the checks run on a CPU in small shapes and nothing is
timed: that shows that this script works, and says nothing about a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels import latent_bench, rows_bench
from bench.kernels.kernel_results import KernelCheck, KernelsRun, KernelTiming, median_us
from tests.support.listed_plans import listed_plan
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import AttentionPlan
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention

PAGE_TOKENS = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


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


def check(
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
        verdict("extend is softmax attention", extended, paged.want(start, tail), TOLERANCE[dtype]),
        verdict("decode is softmax attention", decoded, paged.want(length - 1, 1), TOLERANCE[dtype]),
        verdict("a decoded row is bitwise the extended row", decoded, extended[:, -1:]),
        verdict("an extended row is bitwise alone as in a batch", alone, extended[1:2]),
        verdict("a decoded row is bitwise alone as in a batch", decoded_alone, decoded[1:2]),
        verdict("chunk ends change nothing, bitwise", torch.cat(chunks, 1), extended),
        verdict("stored keys are the keys, bitwise", stored, paged.k[0]),
    ]


def measure(
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


def _timings(attention: TritonAttention) -> Iterator[KernelTiming]:
    """The dtypes of models first."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for batch, context, queries in _TIMED:
            yield measure(attention, Heads(32, 8, 128), dtype, batch, context, queries)
            torch.cuda.empty_cache()


def main(json_file: Path | None, interpreted: bool) -> int:
    """All checks, and on a GPU all timings. Returns 1 where a check failed."""
    device = torch.device("cpu" if interpreted else "cuda")
    attention = TritonAttention()
    run = KernelsRun(json_file, interpreted)
    _check_all(run, attention, device, interpreted)
    if not interpreted:
        run.add(rows_bench.timings(device))
        run.add(latent_bench.timings(attention.latent, device))
        run.add(_timings(attention))
    wrong = sum(not one.ok for one in run.checks)
    print(f"{len(run.checks) - wrong} checks passed, {wrong} failed")
    return 1 if wrong else 0


def _check_all(run: KernelsRun, attention: TritonAttention, device: torch.device, interpreted: bool) -> None:
    shapes = [Heads(4, 2, 48)] if interpreted else [Heads(4, 2, 48), Heads(16, 8, 128), Heads(32, 8, 128)]
    dtypes = (torch.float32, torch.float16) if interpreted else (torch.float32, torch.float16, torch.bfloat16)
    for dtype in dtypes:
        for heads in shapes:
            for length in [40] if interpreted else [100, 3001, 9001]:
                run.add(check(attention, heads, dtype, length, device))
        run.add(rows_bench.checks(dtype, device, interpreted))
        run.add(latent_bench.checks(attention.latent, dtype, device, interpreted))
