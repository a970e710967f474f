"""torch's FlexAttention, for `attention_bench` and `latent_bench`: where it can be imported and takes the shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def flex_call(
    q_bhqd: Tensor, k_bhnd: Tensor, v_bhnd: Tensor, start: int, scale: float, *, compiled: bool = True
) -> Callable[[], Tensor] | str:
    """Attention of queries from position `start` on to all positions up to their own, compiled for these shapes; a text
    where torch has none or refuses them. Heads of queries in groups, values may be narrower than keys."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask
    except ImportError as error:
        return f"not there: {error}"
    queries, length = q_bhqd.shape[2], k_bhnd.shape[2]

    def seen(b: Tensor, h: Tensor, q: Tensor, n: Tensor) -> Tensor:
        return n <= q + start

    try:
        mask: Any = None
        if queries > 1:
            mask = create_block_mask(seen, None, None, queries, length, device=str(q_bhqd.device))
        attend = _compiled() if compiled else _plain()

        def call() -> Tensor:
            out: Tensor = attend(q_bhqd, k_bhnd, v_bhnd, block_mask=mask, scale=scale, enable_gqa=True)
            return out

        call()
    except Exception as error:  # Whatever its compiler raises for a shape that it doesn't take.
        return f"refused: {type(error).__name__}: {error}"[:200]
    return call


def _plain() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled() -> Any:
    return torch.compile(_plain(), dynamic=False)
