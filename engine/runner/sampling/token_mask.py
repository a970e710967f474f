"""Token masks: which tokens may be drawn, a bit a token, in the layout of structured-output engines.

A mask is the last thing that happens to logits before temperature, so neither bias nor penalty brings back what it
forbids. It outranks `min_tokens` as well: where it leaves stop tokens alone, these may be drawn however short the
answer is. Masks of a step go to the device together and are spread out there, 32 tokens a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twinpool.cache.memory.pinned_memory import upload

_WORD = 32
_ELEMENTS = 1 << 23
"""Elements of logits that are masked together: as many are spread out in int32 meanwhile, 32 MiB."""


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
