"""Softmax attention in float64 over a dense mask, and how far a computation in float32 may be from it.

The bound is worked out from the numbers, element by element, so that it holds for every order of additions: whichever
instructions a processor has, and whichever kernel a library picks. With u = 2^-24, a sum of n products is within
`gamma(n)` = LAMBDA sqrt(n) u of the sum of their magnitudes, however it is ordered, fused or not: a probabilistic bound
(N. J. Higham and T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019),
which their experiments never exceeded with a LAMBDA of 1; the bound that can't fail, n u, would be far wider.

    a score s         is off by e <= gamma(dim) scale sum |q||k| + FEW u (|s| + |s - maximum| + 1): the product, its
                      scaling, the capping (a contraction) and the exponential, whose error is its argument's
    a weight p        is off by p e, and so is what it adds to the values and to the sum of weights that they are
                      divided by
    sums of weights   are off by gamma(n) of themselves, those of values by gamma(n) sum p |v|
"""

from __future__ import annotations

import torch
from torch import Tensor

U = 2.0**-24
LAMBDA = 2.0
FEW = 3.0
"""Roundings of one score on its way to its weight: its scaling, a change of the exponential's base, its difference to
the maximum, and the exponential's own, at most two."""


def gamma(count: int) -> float:
    root: float = count**0.5
    return LAMBDA * max(1.0, root) * U


def plain_attention(
    q_qhd: Tensor,
    k_nhd: Tensor,
    v_nhd: Tensor,
    start: int,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_h: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the queries at positions `start` and on see of all keys, and its bound: [q, heads, dim] float64 each.

    `k_nhd` and `v_nhd` have one head for each group of queries' heads.
    """
    (count, heads, dim), length = q_qhd.shape, start + q_qhd.shape[0]
    q = q_qhd.double()
    k, v = (each[:length].double().repeat_interleave(heads // k_nhd.shape[1], 1) for each in (k_nhd, v_nhd))
    s_hqn = torch.einsum("qhd,nhd->hqn", q, k) * scale
    off_hqn = gamma(dim) * scale * torch.einsum("qhd,nhd->hqn", q.abs(), k.abs())
    off_hqn += FEW * U * s_hqn.abs()
    if softcap:
        s_hqn = torch.tanh(s_hqn / softcap) * softcap
        off_hqn += FEW * U * softcap
    at_q, at_k = torch.arange(start, length)[:, None], torch.arange(length)
    hidden = (at_k > at_q) | ((at_k <= at_q - window) if window else torch.tensor(False))
    s_hqn = s_hqn.masked_fill(hidden, -torch.inf)
    if sinks_h is not None:
        sinks = sinks_h.double()[:, None, None].expand(-1, count, 1)
        s_hqn, off_hqn = torch.cat((s_hqn, sinks), -1), torch.cat((off_hqn, torch.zeros_like(sinks)), -1)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    p_hqn = s_hqn.softmax(-1)
    off_hqn += FEW * U * (1.0 + (s_hqn.amax(-1, keepdim=True) - s_hqn).nan_to_num(posinf=0.0))
    out = torch.einsum("hqn,nhd->qhd", p_hqn, v)
    magnitude = torch.einsum("hqn,nhd->qhd", p_hqn, v.abs())
    moved = torch.einsum("hqn,nhd->qhd", p_hqn * off_hqn, v.abs())
    divided = (p_hqn * off_hqn).sum(-1).T[..., None] * out.abs()
    return out, moved + divided + gamma(len(v)) * (magnitude + out.abs())


def expect_within(got: Tensor, want: Tensor, bound: Tensor) -> None:
    """Each element no further from `want` than its own bound."""
    beyond = (got.double() - want).abs() / bound
    worst = float(beyond.max()) if beyond.numel() else 0.0
    assert worst <= 1.0, f"{worst:.2f} times as far as the roundings of float32 explain"  # NaN fails as well
