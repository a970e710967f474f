"""Models that differ from Llama and its kin in their feed-forward layers, which are mixtures of experts;
gpt-oss also in its attention: windows in turn, and attention sinks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import RopeSpec, read_rope
from twinpool.engine.layers.decoder import Layer, Sublayer
from twinpool.engine.layers.mixers.head_attention import HeadAttention, QkNorm
from twinpool.engine.layers.mlp import GatedMlp, MixtureOfExperts
from twinpool.engine.layers.moe.experts import (
    ChosenSoftmaxRouter,
    ExpertSizes,
    RouterRules,
    ScoreRouter,
    SoftmaxRouter,
    clamped_swiglu,
    fused_expert,
    interleaved_expert,
    softmax,
)
from twinpool.engine.models.deepseek import deepseek_mixture
from twinpool.engine.models.llama import Llama, Mistral
from twinpool.engine.models.llama_kin import Ernie45, Granite, HunYuanDense
from twinpool.engine.models.model_base import MtpNames
from twinpool.engine.models.sliding_window import LayerKind, WindowModel, whole_window
from twinpool.engine.tensors.weight_loader import Weights

_PUBLISHED = ("gate.weight", "experts.0.w1.weight")
"""Tensors by which Mixtral's published names are told from those of transformers 5."""


def mixtral_weights(weights: Weights) -> Weights:
    """A layer's tensors below its mixture's prefix, as published by Mixtral's makers or as in transformers 5."""
    published = weights.scope("block_sparse_moe.")
    return published if any(published.has(name) for name in _PUBLISHED) else weights.scope("mlp.")


class Mixtral(Mistral):
    """``MixtralForCausalLM``"""

    theta = 1_000_000.0

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        key = "num_local_experts" if "num_local_experts" in spec.config else "num_experts"
        self.sizes = ExpertSizes(spec.config.size(key, 8), self.hidden, self.inner)
        self.top_k = self.sizes.top_k(spec.config, default=2)

    def layer_windows(self) -> list[int]:
        return whole_window(self.config, self.layers, used="sliding_window" in self.config)

    def mlp_weights(self, weights: Weights) -> Weights:
        return mixtral_weights(weights)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        router = SoftmaxRouter(weights, self.sizes, self.top_k, normalise=True, rounded=False)
        return MixtureOfExperts(weights, router, self.sizes)


class MiniMaxM2(Mixtral):
    """``MiniMaxM2ForCausalLM``: rope over a part of each head, norms of all queries together, and experts chosen by
    corrected sigmoids."""

    theta, usual_head_dim = 5_000_000.0, 128

    def read_rope(self) -> RopeSpec:
        config = self.config
        share = config.size("rotary_dim") / self.head_dim if "rotary_dim" in config else 1.0
        return read_rope(
            config, context=self.spec.context, default_theta=self.theta, partial=True, default_partial=share
        )

    def qk_norms(self) -> QkNorm | None:
        return QkNorm(self.eps, whole=True)

    def layer_windows(self) -> list[int]:
        return Llama.layer_windows(self)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        router = ScoreRouter(weights, self.sizes, self.top_k, RouterRules(), correction="e_score_correction_bias")
        return MixtureOfExperts(weights, router, self.sizes)


class Olmoe(Llama):
    """``OlmoeForCausalLM``: norms of all queries together, and experts in every layer."""

    usual_eps = 1e-5

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        key = "num_local_experts" if "num_local_experts" in config else "num_experts"
        self.sizes = ExpertSizes(config.size(key, 64), self.hidden, self.inner)
        self.top_k = self.sizes.top_k(config, default=8)
        self.normalise = config.flag("norm_topk_prob")

    def qk_norms(self) -> QkNorm | None:
        return QkNorm(self.eps, whole=True)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        router = SoftmaxRouter(weights, self.sizes, self.top_k, normalise=self.normalise)
        return MixtureOfExperts(weights, router, self.sizes)


class Glm4Moe(Llama):
    """``Glm4MoeForCausalLM`` (GLM-4.5 to 4.7): rope over a part of each head, and DeepSeek's mixtures behind some
    dense layers. The layer that predicts further tokens is used where `engine.draft_model` says so."""

    rope_share, usual_eps = 0.5, 1e-5
    mtp = MtpNames()

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.qk_norm = config.flag("use_qk_norm")
        self.dense_layers = config.count("first_k_dense_replace", 1)
        self.sizes = ExpertSizes(
            config.size("n_routed_experts", 128), self.hidden, config.size("moe_intermediate_size", 1408)
        )
        self.top_k = self.sizes.top_k(config, default=8)

    def biases(self) -> tuple[bool, bool]:
        return self.config.flag("attention_bias"), False

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        if number < self.dense_layers:
            return super().mlp(number, weights)
        shared = self.config.count("n_shared_experts", 1)
        return deepseek_mixture(weights, self.sizes, self.top_k, RouterRules.of(self.config), shared=shared)


class Ernie45Moe(Ernie45):
    """``Ernie4_5_MoeForCausalLM``: experts chosen by a corrected softmax, in the layers that `config.json` says."""

    usual_head_dim, usual_eps = 0, 1e-5

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.head_bias = self.mlp_bias
        if self.head_bias and self.tied:
            raise config.refuse("use_bias with a head that is the embedding is not supported")
        self.sizes = ExpertSizes(
            config.size("moe_num_experts", 64), self.hidden, config.size("moe_intermediate_size", 1536)
        )
        self.top_k = self.sizes.top_k(config, "moe_k", 6)
        first, every = config.count("moe_layer_start_index", 1), config.size("moe_layer_interval", 1)
        last = config.values.get("moe_layer_end_index", -1)
        stop = self.layers if last == -1 or not isinstance(last, int) else last + 1
        self.sparse = frozenset(n for n in range(first, min(stop, self.layers)) if (n + 1) % every == 0)
        if config.number("moe_norm_min", 1e-12) > self.top_k / self.sizes.experts:
            raise config.refuse("moe_norm_min is more than weights may add up to: that is not supported")

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        if number not in self.sparse:
            return super().mlp(number, weights)
        named = "moe_statics.e_score_correction_bias"
        full = f"gate.{named}" if weights.has(f"gate.{named}") else named
        correction_1e = weights.tensor(full, 1, self.sizes.experts, dtype=torch.float32)
        rules = RouterRules(softmax, least=0.0)
        router = ScoreRouter(weights, self.sizes, self.top_k, rules, correction=correction_1e[0])
        shared = None
        if count := self.config.count("moe_num_shared_experts", 2):
            below, inner = weights.scope("shared_experts."), count * self.sizes.inner
            shared = GatedMlp(below, self.hidden, inner, bias=self.mlp_bias)
        return MixtureOfExperts(weights, router, self.sizes, shared=shared)


class HunYuanMoe(HunYuanDense):
    """``HunYuanMoEV1ForCausalLM``: a shared feed-forward layer beside the experts of each layer."""

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        sizes = ExpertSizes(self._of_layer("num_experts", number), self.hidden, self.inner)
        top_k = self._of_layer("moe_topk", number)
        if top_k > sizes.experts:
            raise self.config.refuse(f"moe_topk {top_k} is more than the {sizes.experts} experts")
        router = ScoreRouter(weights, sizes, top_k, RouterRules(softmax, least=0.0), name="gate.wg", correction="")
        shared = GatedMlp(weights.scope("shared_mlp."), self.hidden, self.inner)
        return MixtureOfExperts(weights, router, sizes, shared=shared)

    def _of_layer(self, key: str, number: int) -> int:
        """A number of 1 or more: one for all layers, or one of a list."""
        given = self.config.values.get(key, 1)
        value = given[number] if isinstance(given, list) and number < len(given) else given
        if not isinstance(value, int) or value < 1:
            raise self.config.refuse(f"{key} must be a positive whole number, or one a layer, got {given!r:.60}")
        return value


def granite_mlp(weights: Weights, hidden: int, inner: int) -> GatedMlp:
    """Build a feed-forward layer by the names of Granite's shared experts."""
    return GatedMlp(weights, hidden, inner, fused="input_linear", names=("gate", "up", "output_linear"))


class GraniteMoe(Granite):
    """``GraniteMoeForCausalLM``, ``GraniteMoeSharedForCausalLM`` (Granite 3): Granite with experts, the latter with a
    shared one, too."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.sizes = None
        if experts := spec.config.count("num_local_experts", 8):
            self.sizes = ExpertSizes(experts, self.hidden, self.inner)
            self.top_k = self.sizes.top_k(spec.config, default=2)
        self.shared_inner = spec.config.count("shared_intermediate_size", 0)

    def mlp_weights(self, weights: Weights) -> Weights:
        return weights

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        if self.sizes is None:
            raise self.config.refuse("num_local_experts must be a positive whole number, got 0")
        shared = None
        if self.shared_inner:
            shared = granite_mlp(weights.scope("shared_mlp."), self.hidden, self.shared_inner)
        mine = weights.scope("block_sparse_moe.")
        published = any(mine.has(f"{name}.weight") for name in ("input_linear", "output_linear", "router.layer"))
        name = "router.layer" if published else "router"
        router = ChosenSoftmaxRouter(mine, self.sizes, self.top_k, bias=False, name=name)
        if not published:
            return MixtureOfExperts(mine, router, self.sizes, shared=shared)
        read = partial(fused_expert, names=("input_linear.weight", "output_linear.weight"))
        return MixtureOfExperts(mine, router, self.sizes, read=read, below="", shared=shared)


class GptOss(WindowModel):
    """``GptOssForCausalLM``: a sliding window in every other layer, attention sinks and biases, and experts with a
    clamped gate."""

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
