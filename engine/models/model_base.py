"""What a model file declares: its numbers, its state, and how it is built from a checkpoint's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.memory.kv_cache_spec import PoolSetSpec, PoolSpec
from contracts.checkpoint.model_spec import ModelSpec
from engine.layers.decoder import Decoder, Layer, PreNormLayer, Sublayer
from engine.layers.norm import rms_norm
from engine.tensors.shard import WHOLE, Shard
from engine.tensors.weight_loader import Weights

FULL_POOL = "full"
WINDOW_POOL = "window"
STATE_POOL = "state"


@dataclass(frozen=True, slots=True)
class StateOptions:
    """What is chosen about a model's state."""

    dtype: torch.dtype
    """What keys, values and latents are kept in."""
    page_tokens: int
    shard: Shard = WHOLE
    index_float8: bool = False
    """Index keys as float8 with a scale a token, not as the model computes them."""


class Model(ABC):
    """One architecture with the numbers of one checkpoint. Raises `CheckpointError` for numbers that can't be."""

    embed_name, norm_name = "embed_tokens", "norm"

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        self.spec, self.config = spec, config
        self.hidden = config.size("hidden_size")
        self.layers = spec.layers
        self.eps = config.number("rms_norm_eps", 1e-6)
        self.tied = config.flag("tie_word_embeddings")

    @abstractmethod
    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        """The state that the model keeps, pool by pool; exactly one is full."""

    @abstractmethod
    def layer(self, number: int, weights: Weights) -> Layer:
        """Layer `number`, whose tensors are all below `weights`."""

    def pool_set(self, options: StateOptions) -> PoolSetSpec:
        """The registry entry of one rank."""
        return PoolSetSpec(options.page_tokens, self.pools(options))

    def pre_norm(self, weights: Weights, mixer: Sublayer, mlp: Sublayer) -> Layer:
        """A layer of the usual frame, its norms called as in most models."""
        return PreNormLayer(
            self.norm_weight(weights, "input_layernorm.weight", self.hidden),
            mixer,
            self.norm_weight(weights, "post_attention_layernorm.weight", self.hidden),
            mlp,
            self.eps,
        )

    def build(self, weights: Weights) -> Decoder:
        """All of the model. Raises `CheckpointError` for a tensor that is missing or misshapen."""
        embed = weights.tensor(f"model.{self.embed_name}.weight", self.spec.vocab_size, self.hidden)
        layers = [self.layer(i, weights.scope(f"model.layers.{i}.")) for i in range(self.layers)]
        norm_h = self.norm_weight(weights, f"model.{self.norm_name}.weight", self.hidden)
        if self.tied:
            head = weights.made(embed)
        else:
            head = weights.linear({"lm_head": self.spec.vocab_size}, self.hidden)
        return Decoder(embed, layers, lambda x: self.norm(x, norm_h), head)

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        """A norm's weight as `rms_norm` takes it."""
        return weights.tensor(name, size)

    def norm(self, x: Tensor, weight_h: Tensor) -> Tensor:
        return rms_norm(x, weight_h, self.eps)
