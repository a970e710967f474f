"""The claims about the kernels by row; run as a script by `test_rows_kernels.py`."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from tests.kernels.claims import answer
from twinpool.contracts.checkpoint.rope_spec import RopeSpec
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.layers.mixers import triton_store_heads
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.layers.rope import RopeTable, rotate
from twinpool.engine.runner.sampling import sampler as sampling
from twinpool.engine.runner.sampling import triton_draw

CPU = torch.device("cpu")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(
    tokens: int,
    *,
    heads: int = 3,
    kv_heads: int = 1,
    dim: int = 10,
    turning: int = 0,
    norm: bool = True,
    rope: bool = True,
    muted: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], list[Tensor]]:
    """Queries, key pages and value pages by the kernel and by its twin. `turning`: dimensions with rope; 0: all."""
    qkv = draw(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norm_nd = draw(heads + kv_heads, dim, seed=1, dtype=dtype) if norm else None
    table = RopeTable(RopeSpec("default", 10000.0, {}), turning or dim, dtype, CPU)
    turns = table.at(torch.arange(tokens) * 7, 4096) if rope else None
    slots = torch.randperm(5 * 4, generator=torch.Generator().manual_seed(2))[:tokens] + 4
    muted_t = torch.arange(tokens) % 3 == 1 if muted else None
    if muted_t is not None:
        slots = slots.masked_fill(muted_t, 0)
    ours, theirs = ([torch.zeros(6, 4, kv_heads, dim, dtype=dtype) for _ in "kv"] for _ in range(2))
    q = triton_store_heads.store_heads(qkv, norm_nd, 1e-6, turns, ours[0], ours[1], slots, muted_t)

    qk, v = torch.split(qkv.view(tokens, heads + 2 * kv_heads, dim), [heads + kv_heads, kv_heads], dim=1)
    if norm_nd is not None:
        qk = rms_norm(qk, norm_nd, 1e-6)
    if turns is not None:
        first = turning or dim
        qk = torch.cat((rotate(qk[..., :first], *turns), qk[..., first:]), dim=-1)
    q_twin, k = torch.split(qk, [heads, kv_heads], dim=1)
    for pages, entries in zip(theirs, (k, v), strict=True):
        kept = entries if muted_t is None else entries.masked_fill(muted_t[:, None, None], 0.0)
        pages.view(-1, kv_heads, dim)[slots] = kept
    return [q, *ours], [q_twin, *theirs]


def check(tolerance: float, tokens: int, **options: object) -> None:
    for got, want in zip(*stored(tokens, **options), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def claim_norm_rope_and_store_in_one_equal_the_operations_one_by_one() -> None:
    check(2e-6, 7)
    check(2e-6, 1, heads=4, kv_heads=2, dim=16)
    check(2e-6, 5, norm=False, dim=48)
    check(2e-6, 5, dim=48, turning=10)
    check(2e-6, 3, rope=False)
    check(2e-6, 0)


def claim_they_round_where_the_operations_do() -> None:
    check(1e-3, 6, dtype=torch.float16)
    check(1e-3, 6, dtype=torch.float16, norm=False)


def claim_muted_tokens_store_zeros_into_the_null_page() -> None:
    check(2e-6, 7, muted=True)


def claim_a_tokens_heads_are_bitwise_the_same_alone() -> None:
    (many, *_), (one, *_) = stored(5)[0], stored(1)[0]
    assert torch.equal(one[0], many[0])


PARAMS = [
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=0.7, top_k=5),
    SamplingParams(max_tokens=1, temperature=1.3, top_p=0.6),
    SamplingParams(max_tokens=1, temperature=0.9, top_k=20, top_p=0.8, min_p=0.05),
    SamplingParams(max_tokens=1, temperature=2.0, min_p=0.3),
    SamplingParams(max_tokens=1, temperature=1.0, top_k=1),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=1e-9),
]


def drawn(logits: Tensor, uniforms: list[float]) -> list[int]:
    ours = triton_draw.sample(logits, PARAMS, uniforms, block=32).tolist()
    assert ours == sampling._sample(logits, PARAMS, uniforms).tolist()
    return ours


def claim_tokens_are_those_that_the_sorting_twin_draws() -> None:
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        drawn(3 * draw(len(PARAMS), 45, seed=seed), torch.rand(len(PARAMS), generator=generator).double().tolist())


def claim_the_ends_of_the_distribution_are_drawn_alike() -> None:
    first, last = 0.0, 1.0 - 2.0**-53
    drawn(3 * draw(len(PARAMS), 45), [first, last, first, last, last, first, last])


def claim_ties_at_a_cut_are_kept() -> None:
    """Few values, many times each; minus zero is zero."""
    drawn(draw(len(PARAMS), 60, seed=1).round(), [0.1, 0.95, 0.9, 0.99, 0.5, 0.6, 0.999])


def claim_rows_of_many_parts_are_drawn_from_alike() -> None:
    """Parts of 32 logits, the last of them short; a part that keeps nothing lies before those that do."""
    logits = draw(1, 90)
    logits[:, :40] -= 50
    uniforms, plain = [0.05, 0.3, 0.5, 0.7, 0.9, 0.99], PARAMS[:1]
    for rows, params, chosen in ((6, plain * 6, uniforms), (2, PARAMS[2:4], [0.3, 0.9])):
        many = logits.expand(rows, -1).contiguous()
        ours = triton_draw.sample(many, params, chosen, block=16).tolist()
        assert ours == sampling._sample(many, params, chosen).tolist()
        assert min(ours) < 64 <= max(ours), "the second part and the third"


def claim_suppressed_tokens_are_never_drawn() -> None:
    logits = 3 * draw(len(PARAMS), 60)
    logits[:, ::2] = float("-inf")
    assert all(token % 2 for token in drawn(logits, [0.0, 0.3, 0.999999, 0.0, 0.3, 0.999999, 0.5]))


def claim_rows_that_are_no_numbers_are_not_drawn_from() -> None:
    """NaN, plus infinity and nothing finite, in the first, a middle and the last block; the others draw as ever."""
    logits, uniforms = 3 * draw(len(PARAMS), 90), [0.3] * len(PARAMS)
    sound = drawn(logits, uniforms)
    logits[0, 1] = logits[4, 40] = float("nan")
    logits[1, 89], logits[3] = float("inf"), float("-inf")
    assert drawn(logits, uniforms) == [-1, -1, sound[2], -1, -1, *sound[5:]]


def claim_the_smallest_temperatures_draw_the_likeliest_token() -> None:
    logits = 30 * draw(4, 60)
    params = [SamplingParams(max_tokens=1, temperature=t, top_p=0.9) for t in (1e-5, 1e-307, 1e-308, 5e-324)]
    assert triton_draw.sample(logits, params, [0.7] * 4, block=32).tolist() == logits.argmax(-1).tolist()


def claim_the_nucleus_is_of_what_min_p_left() -> None:
    logits = torch.tensor([[0.30, 0.20, 0.05] + [0.45 / 90] * 90]).log()
    params = [SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, min_p=0.1)]
    seen = {triton_draw.sample(logits, params, [u], block=32).item() for u in (0.0, 0.5, 0.7, 0.9, 0.999)}
    assert seen == {0, 1}


def claim_a_row_draws_the_same_alone() -> None:
    logits, params, uniforms = 3 * draw(3, 60), PARAMS[1:4], [0.1, 0.5, 0.9]
    together = triton_draw.sample(logits, params, uniforms, block=32)
    alone = triton_draw.sample(logits[2:], params[2:], uniforms[2:], block=32)
    assert alone[0] == together[2]


if __name__ == "__main__":
    answer(globals())
