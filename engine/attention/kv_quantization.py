"""Quantised keys, values and latents: the definition in plain torch, which every kernel keeps.

With `cache.kv_dtype` an entry (the key or the value of a token and a key-value head, or the latent of a token) is
stored as codes of eight bits, and a scale in a buffer of its own beside them:

    scale    the entry's largest magnitude / the largest code (448 for e4m3, 127 for int8), rounded to bfloat16
    code     entry / scale, cut off at the largest code and rounded to the nearest, ties to even, all in float32
    read     code * scale, in float32: exact, as a code has at most seven significant bits and a scale eight

The scale of an entry of zeros is 0, and its codes are 0 then: the null page is zeros like any other buffer's. Scales in
bfloat16 take two bytes an entry, so that 128 bfloat16 numbers become 130 bytes instead of 256. An entry is quantised
once, when it is written; its own step reads it back from the page as every later one does. So the stored bytes follow
from the entry alone, and what is read from the stored bytes alone: whatever the batch, the chunk or the worker.

A latent has one scale a token, its rope part included (the kernels read a token as one row). Codes of e4m3 keep the
relative precision of numbers down to a 28,000th of the largest, so neither part costs the other any; int8 resolves the
smaller part of the two more coarsely.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetSpec
from twinpool.engine.attention.attention_plan import AttentionPlan

KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""The dtype of codes for each value of `cache.kv_dtype`; None: entries are kept as the model computes them."""
SCALE_DTYPE = torch.bfloat16
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SCALE = "_scale"
"""Behind the name of a buffer in the name of its scales' buffer."""


class KVScales(NamedTuple):
    """The scales of one layer's keys and values, each [pages, page_tokens, kv_heads] bfloat16."""

    keys: Tensor
    values: Tensor


def with_scales(buffers: tuple[BufferSpec, ...], codes: torch.dtype | None) -> tuple[BufferSpec, ...]:
    """The same buffers as codes, and the buffers of their scales behind them: one for each token, and for each head of
    buffers by head. None: the buffers as they are."""
    if codes is None:
        return buffers
    coded = (BufferSpec(b.name, b.layers, b.shape, codes, b.index, b.heads, b.first_head) for b in buffers)
    scales = (
        BufferSpec(b.name + _SCALE, b.layers, b.shape[:-1] or (1,), SCALE_DTYPE, b.index, b.heads, b.first_head)
        for b in buffers
    )
    return (*coded, *scales)


def quantised_buffers(spec: PoolSetSpec) -> list[str]:
    """The names of the buffers of keys, values and latents that are quantised."""
    names = [b.name for pool in spec.pools for b in pool.buffers]
    return sorted({name for name in names if name + _SCALE in names})


def scales_of(buffers: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The scales of buffer `name`, or None where it isn't quantised."""
    return buffers.get(name + _SCALE)


def kv_scales(buffers: Mapping[str, Tensor]) -> KVScales | None:
    """The scales of buffers ``k`` and ``v``, or None where they aren't quantised."""
    keys = buffers.get("k" + _SCALE)
    return None if keys is None else KVScales(keys, buffers["v" + _SCALE])


def quantise(entries: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes [..., dim] and scales [...] of entries [..., dim] in any floating dtype."""
    largest, entries = _LARGEST[codes], entries.float()
    scales = (entries.abs().amax(-1) / largest).to(SCALE_DTYPE)
    divisor = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
    within = (entries / divisor).clamp_(-largest, largest)
    return (within.round_() if codes is torch.int8 else within).to(codes), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """The entries that codes [..., dim] and scales [...] stand for, in float32."""
    return codes.float().mul_(scales.float().unsqueeze(-1))


def store(buffers: Mapping[str, Tensor], name: str, entries_t: Tensor, plan: AttentionPlan) -> None:
    """Write the step's entries [T, *shape] into buffer `name`, [pages, page_tokens, *shape]; zeros where the plan is
    muted. They are quantised where the buffer has scales."""
    if plan.muted_t is not None:
        entries_t = entries_t.masked_fill(plan.muted_t.view(-1, *[1] * (entries_t.dim() - 1)), 0.0)
    pages, scales = buffers[name], scales_of(buffers, name)
    rows = pages.view(-1, *entries_t.shape[1:])
    if scales is None:
        rows.index_copy_(0, plan.slots_t, entries_t)
        return
    codes_t, scales_t = quantise(entries_t, pages.dtype)
    # torch has few operations on float8: its codes are moved as bytes.
    rows.view(torch.uint8).index_copy_(0, plan.slots_t, codes_t.view(torch.uint8))
    scales.view(len(rows), -1).index_copy_(0, plan.slots_t, scales_t.view(len(scales_t), -1))


class KVRows(NamedTuple):
    """Keys, values or latents of all pages as rows, one for each token and head."""

    rows: Tensor
    """[n, dim]."""
    scales: Tensor | None
    """[n], where the rows are codes."""

    @classmethod
    def of(cls, pages: Tensor, scales: Tensor | None) -> KVRows:
        """Pages [..., dim] and their scales [...]."""
        return cls(pages.view(-1, pages.shape[-1]), None if scales is None else scales.view(-1))

    def read(self, at: Tensor) -> Tensor:
        """The rows at `at` ([m] int64) in float32, [m, dim]; dequantised where they are codes."""
        if self.scales is None:
            return self.rows.index_select(0, at).float()
        codes = self.rows.view(torch.uint8).index_select(0, at).view(self.rows.dtype)
        return dequantise(codes, self.scales.index_select(0, at))
