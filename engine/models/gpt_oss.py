"""gpt-oss: a sliding window in every other layer, attention sinks and biases, and experts with a clamped gate."""

from __future__ import annotations

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import read_rope
from twinpool.engine.layers.decoder import Layer
from twinpool.engine.layers.mixers.head_attention import HeadAttention
from twinpool.engine.layers.mlp import MixtureOfExperts
from twinpool.engine.layers.moe.experts import ChosenSoftmaxRouter, ExpertSizes, clamped_swiglu, interleaved_expert
from twinpool.engine.models.sliding_window import LayerKind, WindowModel
from twinpool.engine.tensors.weight_loader import Weights


class GptOss(WindowModel):
    """``GptOssForCausalLM``"""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, pattern=2)
        config = spec.config
        self.bias = config.flag("attention_bias", default=True)
        self.sizes = ExpertSizes(config.size("num_local_experts"), self.hidden, config.size("intermediate_size"))
        self.top_k = self.sizes.top_k(config, default=4)
        self.activation = clamped_swiglu(config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702))

    def kind(self, name: str) -> LayerKind:
        config = self.config
        rope = read_rope(config, default_theta=150_000.0, context=self.spec.context)
        kv_heads, head_dim = config.size("num_key_value_heads", 8), config.size("head_dim", 64)
        return LayerKind(name, self.window_of(name), kv_heads, head_dim, rope)

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        return weights.tensor(name, size, dtype=torch.float32)

    def layer(self, number: int, weights: Weights) -> Layer:
        attention = self.attention(number, weights.scope("self_attn."))
        return self.pre_norm(weights, attention, self.experts(weights.scope("mlp.")))

    def attention(self, number: int, weights: Weights) -> HeadAttention:
        kind = self.kinds[self.names[number]]
        return HeadAttention(
            weights,
            self.place(number),
            kind.rope_table(weights),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=kind.kv_heads,
            head_dim=kind.head_dim,
            bias=self.bias,
            out_bias=self.bias,
            window=kind.window,
            sinks=True,
        )

    def experts(self, weights: Weights) -> MixtureOfExperts:
        router = ChosenSoftmaxRouter(weights, self.sizes, self.top_k)
        return MixtureOfExperts(weights, router, self.sizes, read=interleaved_expert, activation=self.activation)
