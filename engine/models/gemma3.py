"""Gemma 3, and the parts of it that Gemma 4 shares.

Embeddings are scaled by the root of their width; norms lie on both sides of attention and of the feed-forward layer,
multiply in float32 and, in Gemma 3, by one plus their weight; queries and keys are normed by head. Every sixth layer
has full attention and a rope with a large base; the others have a sliding window and a rope with a small base.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import read_rope
from twinpool.engine.attention.attention_backend import ScoreOptions
from twinpool.engine.attention.attention_plan import BLOCK_TOKENS
from twinpool.engine.attention.kv_quantization import kv_scales, store
from twinpool.engine.layers.decoder import Decoder, ForwardContext, Layer, LayerPlace
from twinpool.engine.layers.mlp import GatedMlp
from twinpool.engine.layers.norm import gelu_tanh, rms_norm
from twinpool.engine.layers.rope import rotate
from twinpool.engine.models.sliding_window import SLIDING, LayerKind, SandwichLayer, WindowModel, rope_by_kind
from twinpool.engine.native.current_kernels import in_use
from twinpool.engine.tensors.weight_loader import Weights


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
    ) -> None:
        """`owner`: the layer keeps keys and values; else it reads those that an earlier layer keeps at `place`. Without
        `values`, the keys before norm and rope serve as values."""
        shard, dim = weights.shard, kind.head_dim
        self._place, self._dim, self._eps = place, dim, model.eps
        self._scores = ScoreOptions(scale, kind.window)
        self._rope = kind.rope_table(weights)
        q, kv = shard.axis(model.heads, dim), shard.axis(kind.kv_heads, dim, "key-value heads")
        self._heads, self._kv = q.count // dim, kv.count // dim if owner else 0
        rows = {"q_proj": q} | ({"k_proj": kv} if owner else {}) | ({"v_proj": kv} if owner and values else {})
        self._in = weights.linear(rows, model.hidden, bias=bias)
        self._out = weights.linear({"o_proj": model.hidden}, q, bias=bias)
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
        out = ctx.attention.attend(q[: ctx.count], buffers["k"], buffers["v"], plan, self._scores, scales)
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
        def norm(name: str) -> Tensor:
            return self.norm_weight(weights, f"{name}_layernorm.weight", self.hidden)

        kind = self.kinds[self.names[number]]
        return SandwichLayer(
            norm("input"),
            GemmaAttention(
                self, weights.scope("self_attn."), kind, self.place(number), scale=self.scale, bias=self.bias
            ),
            norm("post_attention"),
            norm("pre_feedforward"),
            GatedMlp(weights.scope("mlp."), self.hidden, self.inner, activation=gelu_tanh),
            norm("post_feedforward"),
            self.eps,
        )
