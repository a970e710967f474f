"""Gemma 4 (text): Gemma 3 with wider heads in full-attention layers, shared keys and values, and inputs by layer.

Full-attention layers have another head size, rotate only a part of a head, and may use their keys (before norm and
rope) as values. The last layers read the keys and values of the last layer of their kind that keeps any.
Values are normed; scores aren't scaled, since queries and keys are normed. Each layer is given, besides the stream, a
small input of its own for every token: from a table by token, and from the token's embedding. Checkpoints with experts
add them to the feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import read_rope
from twinpool.engine.layers.decoder import Decoder, ForwardContext, Layer
from twinpool.engine.layers.mlp import GatedMlp, MixtureOfExperts
from twinpool.engine.layers.moe.experts import ExpertSizes, ScaledSoftmaxRouter, gated_gelu
from twinpool.engine.layers.norm import gelu_tanh, rms_norm
from twinpool.engine.models.gemma3 import Gemma, GemmaAttention
from twinpool.engine.models.sliding_window import FULL, SLIDING, LayerKind, rope_by_kind
from twinpool.engine.tensors.weight_loader import Weights

_LAYER_INPUTS = "inputs by layer"
_ROPES: dict[str, dict[str, object]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
"""The ropes of configurations without `rope_parameters`."""


class Gemma4(Gemma):
    """``Gemma4ForCausalLM``, and the text of ``Gemma4ForConditionalGeneration``."""

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        self.same_values = config.flag("attention_k_eq_v")
        super().__init__(spec, shared=config.count("num_kv_shared_layers", 0))
        self.wide = config.flag("use_double_wide_mlp")
        self.input_size = config.count("hidden_size_per_layer_input", 256)
        self.input_vocab = config.size("vocab_size_per_layer_input", 262_144)
        self.experts = (
            ExpertSizes(config.size("num_experts"), self.hidden, config.size("moe_intermediate_size"))
            if config.flag("enable_moe_block")
            else None
        )
        self.top_k = config.size("top_k_experts", 1)
        if self.experts is not None:
            self.experts.top_k(config, "top_k_experts", 1)
        if self.input_size and self.input_vocab < spec.vocab_size:
            raise config.refuse(f"vocab_size_per_layer_input {self.input_vocab} is below vocab_size {spec.vocab_size}")

    def kind(self, name: str) -> LayerKind:
        config = self.config
        rope = read_rope(config, rope_by_kind(config, name) or _ROPES[name], partial=True, context=self.spec.context)
        kv_heads, head_dim = config.size("num_key_value_heads"), config.size("head_dim", 256)
        if name == FULL:
            head_dim = self._of_full_layers("head_dim", config.size("global_head_dim", 512))
            own = config.size("num_global_key_value_heads", kv_heads) if self.same_values else kv_heads
            kv_heads = self._of_full_layers("num_key_value_heads", own)
        return LayerKind(name, self.window_of(name), kv_heads, head_dim, rope)

    def _of_full_layers(self, key: str, default: int) -> int:
        """A number that all full layers share: from `per_layer_config` if a checkpoint has it, else `default`."""
        by_layer = self.config.table("per_layer_config")
        full = [by_layer.get(str(i)) for i, name in enumerate(self.names) if name == FULL]
        values = {layer.get(key, self.config.values.get(key)) for layer in full if isinstance(layer, Mapping)}
        if not values:
            return default
        (value, *others) = values
        if others or not isinstance(value, int) or value < 1:
            raise self.config.refuse(f"per_layer_config: {key} must be one positive number for all {FULL} layers")
        return value

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        return weights.tensor(name, size, dtype=torch.float32)

    def layer(self, number: int, weights: Weights) -> Layer:
        return Gemma4Layer(self, number, weights)

    def build(self, weights: Weights) -> Decoder:
        decoder = super().build(weights)
        if self.input_size:
            decoder.prepare = LayerInputs(self, weights.scope("model."))
        return decoder


class LayerInputs:
    """The inputs of each layer for each token besides the residual stream: puts [M, layers, size] into the scratch."""

    def __init__(self, model: Gemma4, weights: Weights) -> None:
        size, width = model.input_size, model.layers * model.input_size
        self._table_vn = weights.tensor("embed_tokens_per_layer.weight", model.input_vocab, width)
        self._from_stream = weights.linear({"per_layer_model_projection": width}, model.hidden)
        self._norm_d = model.norm_weight(weights, "per_layer_projection_norm.weight", size)
        self._table_scale = torch.tensor(size**0.5, dtype=weights.dtype, device=weights.device)
        self._stream_scale, self._size, self._eps = model.hidden**-0.5, size, model.eps

    def __call__(self, tokens_m: Tensor, x_mh: Tensor, ctx: ForwardContext) -> None:
        by_token = (self._table_vn[tokens_m] * self._table_scale).view(len(tokens_m), -1, self._size)
        by_stream = ctx.linear(x_mh, self._from_stream).mul_(self._stream_scale).view(by_token.shape)
        ctx.scratch[_LAYER_INPUTS] = rms_norm(by_stream, self._norm_d, self._eps).add_(by_token).mul_(2.0**-0.5)


class Gemma4Layer:
    """A layer of attention and feed-forward with norms on both sides, its own input, and a factor on the output."""

    def __init__(self, model: Gemma4, number: int, weights: Weights) -> None:
        def norm(name: str) -> Tensor:
            return model.norm_weight(weights, f"{name}.weight", model.hidden)

        owner, kind = number < model.owners, model.kinds[model.names[number]]
        self._number, self._eps = number, model.eps
        self._before_attention, self._after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self._before_mlp, self._after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self._attention = GemmaAttention(
            model,
            weights.scope("self_attn."),
            kind,
            model.place(number),
            scale=1.0,
            bias=model.bias,
            owner=owner,
            values=not (model.same_values and kind.name == FULL),
            value_norm=True,
        )
        inner = model.inner * (2 if model.wide and not owner else 1)
        self._mlp = GatedMlp(weights.scope("mlp."), model.hidden, inner, activation=gelu_tanh)
        self._experts = None
        if model.experts is not None:
            router = ScaledSoftmaxRouter(weights, model.experts, model.top_k, model.eps)
            self._experts = MixtureOfExperts(weights, router, model.experts, activation=gated_gelu)
            self._after_dense, self._after_experts = (norm(f"post_feedforward_layernorm_{n}") for n in (1, 2))
            self._before_experts = norm("pre_feedforward_layernorm_2")
        self._has_input = model.input_size > 0
        if self._has_input:
            self._gate = weights.linear({"per_layer_input_gate": model.input_size}, model.hidden)
            self._out = weights.linear({"per_layer_projection": model.hidden}, model.input_size)
            self._after_input = norm("post_per_layer_input_norm")
        self._factor = weights.tensor("layer_scalar", 1)

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        mixed_mh = self._attention(rms_norm(x_mh, self._before_attention, self._eps), ctx)
        x_mh = x_mh + rms_norm(mixed_mh, self._after_attention, self._eps)
        out_mh = self._mlp(rms_norm(x_mh, self._before_mlp, self._eps), ctx)
        if self._experts is not None:
            expert_mh = self._experts(rms_norm(x_mh, self._before_experts, self._eps), ctx, routed_by=x_mh)
            out_mh = rms_norm(out_mh, self._after_dense, self._eps)
            out_mh.add_(rms_norm(expert_mh, self._after_experts, self._eps))
        x_mh = x_mh.add_(rms_norm(out_mh, self._after_mlp, self._eps))
        if self._has_input:
            gate_mn = ctx.linear(x_mh, self._gate)
            gated_mn = gelu_tanh(gate_mn.float()).to(gate_mn.dtype).mul_(ctx.scratch[_LAYER_INPUTS][:, self._number])
            x_mh = x_mh.add_(rms_norm(ctx.linear(gated_mn, self._out), self._after_input, self._eps))
        return x_mh.mul_(self._factor)
