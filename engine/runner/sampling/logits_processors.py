"""Logits processors: penalties that lower logits of tokens a request has already had, and masks of what may be drawn.

*Penalties*: all rows of a step in a few operations. The repetition penalty counts prompt and output, presence and
frequency penalties the output alone, as in vLLM. A token that occurs twice is read and written twice, with the same
value both times, so nothing depends on an order; counts are sums of ones, which are exact in any order.

*Masks*: a bit a token, in the layout of structured-output engines. A mask is the last thing that happens to logits
before temperature, so neither bias nor penalty brings back what it forbids. It outranks `min_tokens` as well: where it
leaves stop tokens alone, these may be drawn however short the answer is. Masks of a step go to the device together and
are spread out there, 32 tokens a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.cache.device.device_copies import to_device, upload
from twinpool.contracts.sampling_params import SamplingParams

_WORD = 32
_ELEMENTS = 1 << 23
"""Elements of logits, or tokens of histories, that are looked at together: 32 MiB in float32 or int32."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that may be drawn. Bit i of word w stands for token 32 w + i; what is behind the last word may not."""

    words: NDArray[np.int32]
    """[words]"""

    @staticmethod
    def of(tokens: Sequence[int]) -> TokenMask:
        """The mask of exactly these tokens; at least one."""
        bits = np.zeros(-(-(max(tokens) + 1) // _WORD) * _WORD, np.uint8)
        bits[list(tokens)] = 1
        return TokenMask(np.packbits(bits, bitorder="little").view("<i4").astype(np.int32))

    @staticmethod
    def allowed(tokens: Sequence[int]) -> TokenMask | None:
        """The mask of `SamplingParams.allowed_token_ids`: None, which is all, where there are none."""
        return TokenMask.of(tokens) if tokens else None

    def __and__(self, other: TokenMask) -> TokenMask:
        size = min(len(self.words), len(other.words))
        return TokenMask(self.words[:size] & other.words[:size])


def apply_masks(logits_nv: Tensor, rows: Sequence[int], masks: Sequence[TokenMask]) -> None:
    """Set the logits of what the masks forbid to minus infinity, in some `rows` of [n, vocab] float32, a mask each."""
    vocab = logits_nv.shape[1]
    width = -(-vocab // _WORD)
    at_once = max(1, _ELEMENTS // (width * _WORD))
    for begin in range(0, len(rows), at_once):
        part = masks[begin : begin + at_once]
        words_kw = np.zeros((len(part), width), np.int32)
        for line, mask in zip(words_kw, part, strict=True):
            line[: len(mask.words)] = mask.words[:width]
        places = np.array(rows[begin : begin + at_once], dtype=np.int64)
        there_kw, rows_k = upload((words_kw, places), logits_nv.device)
        bit_i = torch.arange(_WORD, dtype=torch.int32, device=logits_nv.device)
        allowed_kv = there_kw.unsqueeze(2).bitwise_right_shift(bit_i).bitwise_and_(1).flatten(1)[:, :vocab].bool()
        x_kv = logits_nv.index_select(0, rows_k)
        logits_nv.index_copy_(0, rows_k, x_kv.masked_fill_(~allowed_kv, -torch.inf))


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
