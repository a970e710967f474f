"""Penalties: logits of tokens that a request has already had are lowered, all rows of a step in a few operations.

The repetition penalty counts prompt and output, presence and frequency penalties the output alone, as in vLLM. A token
that occurs twice is read and written twice, with the same value both times, so nothing depends on an order; counts are
sums of ones, which are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from twinpool.cache.memory.pinned_memory import to_device, upload
from twinpool.contracts.sampling_params import SamplingParams

_ELEMENTS = 1 << 23
"""Elements of logits, or tokens of histories, that are looked at together: 32 MiB in float32."""


def needs_history(params: SamplingParams) -> bool:
    """Whether a draw reads the tokens before it."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def penalise(
    logits_nv: Tensor,
    rows: Sequence[int],
    params: Sequence[SamplingParams],
    prompts: Sequence[int],
    lengths: Sequence[int],
    tokens: Callable[[Sequence[int]], Tensor],
) -> None:
    """Apply penalties to some `rows` of logits ([n, vocab] float32, changed), one entry of each sequence a row.

    `prompts`: tokens of the prompt. `lengths`: tokens in all, at least one. `tokens` reads histories by their place in
    these sequences: [k, most] int64, with anything behind each one's length.
    """
    for group in _groups(lengths, logits_nv.shape[1]):
        rows_k = to_device([rows[i] for i in group], logits_nv.device)
        x_kv = logits_nv.index_select(0, rows_k)
        _penalise(
            x_kv, [params[i] for i in group], [prompts[i] for i in group], [lengths[i] for i in group], tokens(group)
        )
        logits_nv.index_copy_(0, rows_k, x_kv)


def _groups(lengths: Sequence[int], vocab: int) -> Iterator[list[int]]:
    """Rows of similar lengths together, as many as are looked at together."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and (len(group) + 1) * max(vocab, lengths[group[0]]) > _ELEMENTS:
            yield group
            group = []
        group.append(i)
    yield group


def _penalise(
    x_kv: Tensor, params: Sequence[SamplingParams], prompts: Sequence[int], lengths: Sequence[int], tokens_kl: Tensor
) -> None:
    device = x_kv.device
    prompt_k1, length_k1 = (
        t.unsqueeze(1) for t in upload((np.array(prompts, dtype=np.int64), np.array(lengths, dtype=np.int64)), device)
    )
    numbers = [[p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params]
    repetition_k1, presence_k1, frequency_k1 = to_device(numbers, device, torch.float32).T.unsqueeze(2)
    column_l = torch.arange(tokens_kl.shape[1], device=device)
    # What is behind a history's end is its first token once more.
    ids_kl = torch.where(column_l < length_k1, tokens_kl, tokens_kl[:, :1])
    if any(p.repetition_penalty != 1.0 for p in params):
        value_kl = x_kv.gather(1, ids_kl)
        value_kl = torch.where(value_kl > 0, value_kl / repetition_k1, value_kl * repetition_k1)
        # A penalty near 0 may give more than float32 holds: the client's parameters ask for that, it is no damage.
        x_kv.scatter_(1, ids_kl, value_kl.clamp_(max=torch.finfo(torch.float32).max))
    if any(p.presence_penalty or p.frequency_penalty for p in params) and any(
        length > prompt for length, prompt in zip(lengths, prompts, strict=True)
    ):
        is_output_kl = ((column_l >= prompt_k1) & (column_l < length_k1)).to(x_kv.dtype)
        count_kl = torch.zeros_like(x_kv).scatter_add_(1, ids_kl, is_output_kl).gather(1, ids_kl)
        lower_kl = (presence_k1 + frequency_k1 * count_kl).masked_fill_(count_kl == 0, 0.0)
        x_kv.scatter_(1, ids_kl, x_kv.gather(1, ids_kl) - lower_kl)
