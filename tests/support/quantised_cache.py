"""A quantised KV cache by its definition, as transformers' cache: the oracle of `cache.kv_dtype`.

It shares no code with `engine.attention.kv_quantization`. Scale and code are a division in float32 each, as the
definition says; which code is nearest is worked out in float64, float8 by its exponent and mantissa.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from tests.support.checkpoints import Oracle, compare
from tests.support.family_scenes import Family

LARGEST = {"fp8": 448.0, "int8": 127.0}


def nearest_float8(x: Tensor) -> Tensor:
    """e4m3: three bits behind the leading one, the smallest exponent -6; ties to even."""
    exponent = (x.frexp().exponent - 1).clamp_min(-6)
    step = torch.ldexp(torch.ones_like(x), exponent - 3)
    return (x / step).round() * step


def rounded(entries: Tensor, kv_dtype: str) -> Tensor:
    """What is read of entries [..., dim] that were stored with a scale each, in float32."""
    x, largest = entries.double(), LARGEST[kv_dtype]
    scale = (x.abs().amax(-1, keepdim=True).float() / largest).bfloat16().double()
    within = (x / torch.where(scale == 0, 1.0, scale)).float().double().clamp(-largest, largest)
    return ((nearest_float8(within) if kv_dtype == "fp8" else within.round()) * scale).float()


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """A cache whose keys and values are rounded before anything reads them, those of their own step too; of a latent
    model, whose cache has latents and the part with rope in these places, both with one scale."""

    def __init__(self, config: Any, kv_dtype: str) -> None:
        super().__init__(config=config)
        self._kv_dtype, self._latent = kv_dtype, getattr(config, "kv_lora_rank", None) is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._latent:
            both = rounded(torch.cat((key_states, value_states), -1), self._kv_dtype)
            key_states, value_states = both.tensor_split([key_states.shape[-1]], -1)
        else:
            key_states, value_states = (rounded(each, self._kv_dtype) for each in (key_states, value_states))
        stored: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return stored


class RoundedOracle(Oracle):
    """transformers in float32 with a rounded cache."""

    def __init__(self, folder: Path, kv_dtype: str) -> None:
        super().__init__(folder, "float32")
        forward = self.model.forward

        def with_cache(tokens: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
            cache = past_key_values if past_key_values is not None else RoundedCache(self.model.config, kv_dtype)
            return forward(tokens, past_key_values=cache, use_cache=True)

        self.model.forward = with_cache


@dataclass
class QuantisedFamily(Family):
    """A family whose cache is quantised (`cache` has the key), and what the definition says of it."""

    judged: list[bool] = field(default_factory=list)
    """Of each answer so far, whether its tokens were all the oracle's."""

    @cached_property
    def oracle(self) -> Oracle:
        return RoundedOracle(self.folder, self.cache["kv_dtype"])

    def expect(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """As a family's; and of four answers or more at most a quarter may differ: where an entry lies between two
        codes a float32's last bit moves it by a whole code, so the noise that is allowed for one answer is large."""
        verdict = compare(self.oracle, prompt, answer)
        assert verdict.equal, (self.name, len(prompt), verdict)
        self.judged.append(verdict.exact)
        assert len(self.judged) < 4 or 4 * sum(self.judged) >= 3 * len(self.judged), (self.name, self.judged)
