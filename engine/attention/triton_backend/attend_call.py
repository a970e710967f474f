"""One call of attention over paged keys and values: its arguments as the Triton kernels take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinpool.contracts.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.engine.attention.attention_backend import ScoreOptions
    from twinpool.engine.attention.attention_plan import AttentionPlan

MAX_HEAD_DIM = 512
MAX_HEADS_PER_KV = 64
_LOG2_E = 1.4426950408889634
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttendCall:
    """The arguments of one call of `attend`."""

    q_thd: Tensor
    k_pages: Tensor
    v_pages: Tensor
    out_thd: Tensor
    plan: AttentionPlan
    scores: ScoreOptions

    @property
    def scale_log2(self) -> float:
        return self.scores.scale * _LOG2_E

    @property
    def cap_log2(self) -> float:
        return self.scores.softcap * _LOG2_E

    @property
    def firsts(self) -> Tensor:
        """The first pages, or any tensor where there are none: the kernel doesn't read it then."""
        return self.plan.starts_b if self.plan.firsts_b is None else self.plan.firsts_b

    @property
    def sinks(self) -> Tensor:
        """The sinks, or any tensor where there are none."""
        return self.plan.starts_b if self.scores.sinks_h is None else self.scores.sinks_h

    @property
    def kind(self) -> dict[str, int]:
        """The compile-time numbers of the kernels that depend on the call."""
        return {"WINDOW": self.scores.window, "FIRSTS": self.plan.firsts_b is not None, "CAPPED": self.cap_log2 > 0}

    def check(self) -> None:
        """Raises `ConfigError` for dtypes and shapes that no kernel serves."""
        q_thd, k_pages, v_pages, plan, sinks_h = self.q_thd, self.k_pages, self.v_pages, self.plan, self.scores.sinks_h
        assert sinks_h is None or sinks_h.dtype == torch.float32, "sinks are float32"
        _, heads, head_dim = q_thd.shape
        kv_heads = k_pages.shape[2]
        if q_thd.dtype not in _DTYPES or k_pages.dtype != q_thd.dtype or v_pages.dtype != q_thd.dtype:
            raise ConfigError(
                f"triton attention takes float32, float16 or bfloat16, the same for queries, keys and values; got "
                f"{q_thd.dtype}, {k_pages.dtype} and {v_pages.dtype}; use engine.attention=torch"
            )
        if heads % kv_heads or heads // kv_heads > MAX_HEADS_PER_KV or head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"triton attention takes up to {MAX_HEADS_PER_KV} heads a key head and heads of up to {MAX_HEAD_DIM}; "
                f"got {heads} heads of {head_dim} over {kv_heads} key heads; use engine.attention=torch"
            )
        assert k_pages.shape == v_pages.shape, "keys and values lie alike"
        assert k_pages.shape[3] == head_dim, "keys fit the queries"
        assert k_pages.shape[1] == plan.page_tokens, "the plan was made for other pages"
        assert q_thd.stride(2) == k_pages.stride(3) == v_pages.stride(3) == 1, "a head's elements lie side by side"
        assert plan.offsets_b.shape[0] == plan.starts_b.shape[0] + 1 == plan.tables_bp.shape[0] + 1
        assert plan.tables_bp.stride(1) == 1, "a block table is a row"
