"""Gemma, of four generations.

Gemma 1 and 2 are kin of Llama. Of Gemma 3, and in part of Gemma 4:

Embeddings are scaled by the root of their width; norms lie on both sides of attention and of the feed-forward layer,
multiply in float32 and, in Gemma 3, by one plus their weight; queries and keys are normed by head. Every sixth layer
has full attention and a rope with a large base; the others have a sliding window and a rope with a small base.

Gemma 4: Gemma 3 with wider heads in full-attention layers, shared keys and values, and inputs by layer.

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
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import BLOCK_TOKENS
from twinpool.engine.attention.kv_quantization import kv_scales, store
from twinpool.engine.attention.torch_backend.torch_attention import attend_spans
from twinpool.engine.layers.decoder import Decoder, ForwardContext, Layer, LayerPlace, Sublayer
from twinpool.engine.layers.mlp import GatedMlp, MixtureOfExperts
from twinpool.engine.layers.moe.experts import ExpertSizes, ScaledSoftmaxRouter, gated_gelu
from twinpool.engine.layers.norm import gelu_tanh, rms_norm
from twinpool.engine.layers.rope import rotate
from twinpool.engine.models.llama import Llama
from twinpool.engine.models.llama_kin import Windowed
from twinpool.engine.models.sliding_window import FULL, SLIDING, LayerKind, WindowModel, rope_by_kind
from twinpool.engine.native.current_kernels import in_use
from twinpool.engine.tensors.weight_loader import Weights

_LAYER_INPUTS = "inputs by layer"
_ROPES: dict[str, dict[str, object]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
"""The ropes of configurations without `rope_parameters`."""


class Gemma1(Llama):
    """``GemmaForCausalLM``: embeddings scaled by the root of their width, and norms of weights that count from one."""

    activations, ties, usual_head_dim = ("gelu_pytorch_tanh", "gelu"), True, 256
    """``gelu`` is how the first files spelled it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        if spec.config.flag("use_bidirectional_attention"):
            raise spec.config.refuse("use_bidirectional_attention: a model that sees what follows can't generate")

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        return weights.tensor(name, size, dtype=torch.float32).add_(1.0)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        return GatedMlp(weights, self.hidden, self.inner, activation=gelu_tanh)

    def build(self, weights: Weights) -> Decoder:
        decoder = super().build(weights)
        decoder.embed_scale = float(torch.tensor(self.hidden**0.5, dtype=decoder.dtype))  # Rounded, as in transformers.
        return decoder


class Gemma2(Windowed, Gemma1):
    """``Gemma2ForCausalLM``: Gemma with softcaps of scores and logits, four norms a layer, and a window in every other
    layer."""

    activation_key, pattern = "hidden_activation", 2

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.softcap, self.logits_softcap = _cap(self, "attn_logit", 50.0), _cap(self, "final_logit", 30.0)

    def scale(self) -> float:
        return float(self.config.number("query_pre_attn_scalar", 256.0) ** -0.5)

    def layer(self, number: int, weights: Weights) -> Layer:
        attention = self.attention(number, weights.scope("self_attn."))
        return self.normed(weights, attention, self.mlp(number, weights.scope("mlp.")))

    def build(self, weights: Weights) -> Decoder:
        decoder = super().build(weights)
        decoder.logits_softcap = self.logits_softcap
        return decoder


def _cap(model: Llama, what: str, usual: float) -> float:
    """Read a softcap; 0 where it is null."""
    key = f"{what}_softcapping"
    return 0.0 if key in model.config.nulls else model.config.number(key, usual)


class GemmaAttention:
    """Attention with keys and values by head, with norms of queries and keys, and in Gemma 4 of values."""

    def __init__(
        self,
        model: WindowModel,
        weights: Weights,
        kind: LayerKind,
        place: LayerPlace,
        *,
        scale: float,
        bias: bool = False,
        owner: bool = True,
        values: bool = True,
        value_norm: bool = False,
        ahead: bool = True,
    ) -> None:
        """`owner`: the layer keeps keys and values; else it reads those that an earlier layer keeps at `place`. Without
        `values`, the keys before norm and rope serve as values. `ahead`: positions of a picture see those behind them,
        where the model's pictures are such."""
        shard, dim = weights.shard, kind.head_dim
        self._place, self._dim, self._eps = place, dim, model.eps
        self._scores, self._ahead = ScoreOptions(scale, kind.window), ahead
        self._rope = kind.rope_table(weights)
        q, kv = shard.axis(model.heads, dim), shard.axis(kind.kv_heads, dim, "key-value heads")
        self._heads, self._kv = q.count // dim, kv.count // dim if owner else 0
        rows = {"q_proj": q} | ({"k_proj": kv} if owner else {}) | ({"v_proj": kv} if owner and values else {})
        self._in = weights.linear(rows, model.hidden, bias=bias, adapts=True)
        self._out = weights.linear({"o_proj": model.hidden}, q, bias=bias, adapts=True)
        self._values = values
        norms = [model.norm_weight(weights, "q_norm.weight", dim).expand(self._heads, -1)]
        if owner:
            norms.append(model.norm_weight(weights, "k_norm.weight", dim).expand(self._kv, -1))
        self._norm_nd = torch.cat(norms)
        self._value_norm_d = torch.ones(dim, device=weights.device) if value_norm else None
        if in_use():
            return  # The C++ kernels' attention has no batched products to probe.
        for k, n in ((dim, BLOCK_TOKENS), (BLOCK_TOKENS, dim)):
            weights.products.extend((batch, k, n) for batch in (kv.count // dim, 5 * kv.count // dim))

    def __call__(self, h_mh: Tensor, ctx: ForwardContext) -> Tensor:
        plan, buffers = ctx.plans[self._place.pool], ctx.buffers(self._place)
        mixed = ctx.linear(h_mh, self._in).view(len(h_mh), -1, self._dim)
        qk = rms_norm(mixed[:, : self._heads + self._kv], self._norm_nd, self._eps)
        q, k = torch.split(rotate(qk, *ctx.rope(self._rope)), [self._heads, self._kv], dim=1)
        if self._kv:
            v = mixed[:, -self._kv :] if self._values else mixed[:, self._heads :]
            if self._value_norm_d is not None:
                v = rms_norm(v, self._value_norm_d, self._eps)
            store(buffers, "k", k[: ctx.count], plan)
            store(buffers, "v", v[: ctx.count], plan)
        scales = kv_scales(buffers)
        q, pages = q[: ctx.count], (buffers["k"], buffers["v"])
        out = ctx.attention.attend(q, *pages, plan, self._scores, scales)
        if self._ahead and ctx.pictured is not None and ctx.pictured.spans:
            attend_spans(ctx.pictured.spans, out, q, pages, plan, self._scores, scales)
        return ctx.linear(ctx.padded(out.reshape(ctx.count, -1)), self._out)


class Gemma(WindowModel):
    """The parts that Gemma 3 and Gemma 4 have in common."""

    def __init__(self, spec: ModelSpec, shared: int = 0) -> None:
        super().__init__(spec, pattern=6, shared=shared)
        config = spec.config
        self.inner = config.size("intermediate_size")
        self.tied = config.flag("tie_word_embeddings", default=True)
        self.bias = config.flag("attention_bias")
        self.logits_softcap = config.number("final_logit_softcapping", 0.0)
        activation = config.text("hidden_activation", "gelu_pytorch_tanh")
        if activation != "gelu_pytorch_tanh":
            raise config.refuse(f"hidden_activation {activation!r} is not supported; only gelu_pytorch_tanh is")
        if config.values.get("use_bidirectional_attention") not in (None, False, "vision"):
            raise config.refuse("use_bidirectional_attention: a model that sees what follows can't generate")
        if "attn_logit_softcapping" in config:
            raise config.refuse("attn_logit_softcapping is not supported for this architecture")

    def build(self, weights: Weights) -> Decoder:
        decoder = super().build(weights)
        decoder.embed_scale = float(torch.tensor(self.hidden**0.5, dtype=decoder.dtype))  # Rounded, as in transformers.
        decoder.logits_softcap = self.logits_softcap
        return decoder


class Gemma3(Gemma):
    """``Gemma3ForCausalLM``, and the text of ``Gemma3ForConditionalGeneration``."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.scale = spec.config.number("query_pre_attn_scalar", 256.0) ** -0.5

    def kind(self, name: str) -> LayerKind:
        config, raw = self.config, rope_by_kind(self.config, name)
        if name == SLIDING:
            raw = raw or {"rope_type": "default"}
            rope = read_rope(
                config, raw, context=self.spec.context, theta_key="rope_local_base_freq", default_theta=10_000.0
            )
        else:
            rope = read_rope(config, raw, default_theta=1_000_000.0, context=self.spec.context)
        kv_heads, head_dim = config.size("num_key_value_heads"), config.size("head_dim", 256)
        return LayerKind(name, self.window_of(name), kv_heads, head_dim, rope)

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        return weights.tensor(name, size, dtype=torch.float32).add_(1.0)

    def layer(self, number: int, weights: Weights) -> Layer:
        kind = self.kinds[self.names[number]]
        attention = GemmaAttention(
            self, weights.scope("self_attn."), kind, self.place(number), scale=self.scale, bias=self.bias
        )
        mlp = GatedMlp(weights.scope("mlp."), self.hidden, self.inner, activation=gelu_tanh)
        return self.normed(weights, attention, mlp)


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

    def undivided(self, stage: range) -> str:
        if self.input_size:
            return "each layer reads inputs of its own for each token (hidden_size_per_layer_input), on the first stage"
        return super().undivided(stage)

    def build(self, weights: Weights) -> Decoder:
        decoder = super().build(weights)
        pictures, inputs = self.spec.pictures, None
        if self.input_size:
            decoder.prepare = inputs = LayerInputs(self, weights.scope("model."))
        if pictures is not None:
            decoder.prepare = Placeholders(decoder, pictures.token, self.config.count("pad_token_id", 0), inputs)
        return decoder


class Placeholders:
    """Placeholders of pictures are padding, as in transformers: by their inputs of each layer, and by their embedding
    where no picture stands there, as they may be drawn, too."""

    def __init__(self, decoder: Decoder, token: int, pad: int, inputs: LayerInputs | None) -> None:
        self._embed, self._scale = decoder.embed_vh, decoder.embed_scale or 1.0
        self._token, self._inputs = token, inputs
        self._pad_1 = torch.tensor([pad], device=decoder.embed_vh.device)

    def __call__(self, tokens_m: Tensor, x_mh: Tensor, ctx: ForwardContext) -> None:
        padded_m = tokens_m == self._token
        tokens_m = torch.where(padded_m, self._pad_1, tokens_m)
        if ctx.pictured is not None:
            padded_m = padded_m.index_fill(0, ctx.pictured.places_n, value=False)
        x_mh.copy_(torch.where(padded_m[:, None], self._embed[self._pad_1] * self._scale, x_mh))
        if self._inputs is not None:
            self._inputs(tokens_m, x_mh, ctx)


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
            ahead=kind.name == SLIDING,
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
