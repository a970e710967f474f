"""Dense models that differ from Llama in few places: factors, norms, windows, layers without rope, the layout of
their projections, norms that subtract a mean.

Each class says what is different; what it doesn't say is Llama's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import RopeSpec, read_rope
from twinpool.engine.layers.decoder import (
    Decoder,
    ForwardContext,
    Layer,
    Norm,
    ParallelLayer,
    Sublayer,
)
from twinpool.engine.layers.mixers.head_attention import QkNorm, QkvLayout
from twinpool.engine.layers.mlp import PlainMlp
from twinpool.engine.layers.moe.experts import relu_squared
from twinpool.engine.layers.norm import LayerNorm, gelu_tanh, softplus
from twinpool.engine.models.llama import Llama, Mistral
from twinpool.engine.models.sliding_window import (
    FULL,
    SLIDING,
    given_window,
    layer_names,
    rope_by_kind,
    whole_window,
)
from twinpool.engine.tensors.weight_loader import Weights


class Windowed(Llama):
    """Llama with windows in the layers that `layer_types` says."""

    pattern = 0
    """Without it, layers have windows but for each of this number, or of the key `sliding_window_pattern`."""

    def usual_kinds(self) -> list[str]:
        """The kind of each layer where `config.json` doesn't list them."""
        return layer_names(self.config, self.layers, self.pattern)

    def layer_windows(self) -> list[int]:
        listed = "layer_types" in self.config
        self.kinds = self.config.words(
            "layer_types", self.layers, (FULL, SLIDING), None if listed else self.usual_kinds()
        )
        window = given_window(self.config)
        if SLIDING in self.kinds and not window:
            raise self.config.refuse(f"layer_types has {SLIDING} layers, but sliding_window says none")
        return [window if kind == SLIDING else 0 for kind in self.kinds]


class Phi3(Llama):
    """``Phi3ForCausalLM`` (Phi-3, Phi-4): projections fused, rope over a part of each head, and in some a window."""

    layout, fused_mlp = QkvLayout(fused="qkv_proj"), "gate_up_proj"
    rope_share = 1.0

    def biases(self) -> tuple[bool, bool]:
        return False, False

    def layer_windows(self) -> list[int]:
        return whole_window(self.config, self.layers, usual=0)

    def read_rope(self) -> RopeSpec:
        rope = super().read_rope()
        if rope.kind not in ("default", "longrope"):
            raise self.config.refuse(f"rope scaling {rope.kind!r} is not supported here; only longrope is")
        return rope


class Granite(Llama):
    """``GraniteForCausalLM`` (Granite 3): Llama with four factors."""

    logits_divide = True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.embed_factor, self.logits_factor, self.residual_factor = (
            spec.config.number(key, 1.0) for key in ("embedding_multiplier", "logits_scaling", "residual_multiplier")
        )
        if not self.logits_factor:
            raise spec.config.refuse("logits_scaling must not be 0")

    def scale(self) -> float:
        return self.config.number("attention_multiplier", 1.0)

    def layer(self, number: int, weights: Weights) -> Layer:
        mixer, mlp = self.mixer(number, weights), self.mlp(number, self.mlp_weights(weights))
        return replace(self.normed(weights, mixer, mlp, self.norm_names()), factor=self.residual_factor)

    def mixer(self, number: int, weights: Weights) -> Sublayer:
        return self.attention(number, weights.scope("self_attn."))

    def norm_names(self) -> tuple[str, str, str, str]:
        """The norms before and behind the mixer, then of the feed-forward layer; empty: none."""
        return "input_layernorm", "", "post_attention_layernorm", ""

    def build(self, weights: Weights) -> Decoder:
        decoder = super().build(weights)
        decoder.embed_scale = self.embed_factor
        decoder.logits_scale = 1 / self.logits_factor if self.logits_divide else self.logits_factor
        return decoder


class HyperCLOVAX(Granite):
    """``HyperCLOVAXForCausalLM``: Granite with norms behind attention and feed-forward, too."""

    logits_divide = False

    def scale(self) -> float:
        return self.config.number("attention_multiplier", self.head_dim**-0.5)

    def norm_names(self) -> tuple[str, str, str, str]:
        if not self.config.flag("use_post_norm", True):
            return super().norm_names()
        return "input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"


class Olmo2(Llama):
    """``Olmo2ForCausalLM``: norms behind attention and feed-forward instead of before, and of all queries together."""

    def qk_norms(self) -> QkNorm | None:
        return QkNorm(self.eps, whole=True, dtype=torch.float32)

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        return weights.tensor(name, size, dtype=torch.float32)

    def layer(self, number: int, weights: Weights) -> Layer:
        names = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
        attention = self.attention(number, weights.scope("self_attn."))
        return self.normed(weights, attention, self.mlp(number, weights.scope("mlp.")), names)


class Olmo3(Windowed, Olmo2):
    """``Olmo3ForCausalLM``: OLMo 2 with a window in three of four layers, in which rope isn't scaled."""

    theta, pattern = 500_000.0, 4

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        raw = rope_by_kind(spec.config, SLIDING) or {"rope_type": "default"}
        self.window_rope = read_rope(spec.config, raw, context=spec.context, default_theta=self.theta)

    def read_rope(self) -> RopeSpec:
        raw = rope_by_kind(self.config, FULL)
        return read_rope(self.config, raw, context=self.spec.context, default_theta=self.theta)

    def rope_of(self, number: int) -> RopeSpec | None:
        return self.window_rope if self.kinds[number] == SLIDING else self.rope


class Exaone4(Windowed, Olmo2):
    """``Exaone4ForCausalLM``: OLMo 2's norms, but of queries and keys by head; with windows, full layers have no
    rope."""

    pattern = 4

    def qk_norms(self) -> QkNorm | None:
        return QkNorm(self.eps)

    def biases(self) -> tuple[bool, bool]:
        return False, False

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        return weights.tensor(name, size)

    def usual_kinds(self) -> list[str]:
        return super().usual_kinds() if given_window(self.config) else [FULL] * self.layers

    def rope_of(self, number: int) -> RopeSpec | None:
        return None if given_window(self.config) and self.kinds[number] == FULL else self.rope


class SmolLM3(Windowed):
    """``SmolLM3ForCausalLM``: every fourth layer has no rope."""

    theta, ties = 2_000_000.0, True

    def usual_kinds(self) -> list[str]:
        """Windows, where they are used, are those of layers without rope."""
        window = given_window(self.config, 0) if self.config.flag("use_sliding_window") else 0
        return [SLIDING if window and not turned else FULL for turned in self.turned]

    def layer_windows(self) -> list[int]:
        windows = super().layer_windows()
        return windows if self.config.flag("use_sliding_window") else [0] * self.layers

    @cached_property
    def turned(self) -> list[int]:
        """Whether each layer has rope. Raises `CheckpointError`."""
        every = self.config.size("no_rope_layer_interval", 4)
        usual = [int((number + 1) % every != 0) for number in range(self.layers)]
        given = self.config.values.get("no_rope_layers", usual)
        if not isinstance(given, list) or len(given) < self.layers or not set(given) <= {0, 1}:
            raise self.config.refuse(f"no_rope_layers must be {self.layers} times 0 or 1, got {given!r:.60}")
        return given

    def rope_of(self, number: int) -> RopeSpec | None:
        return self.rope if self.turned[number] else None


class Ministral(Windowed):
    """``MinistralForCausalLM``: Mistral with windows in the layers that `layer_types` says."""

    def biases(self) -> tuple[bool, bool]:
        return False, False

    def usual_kinds(self) -> list[str]:
        return [SLIDING if given_window(self.config) else FULL] * self.layers


class Cwm(Ministral):
    """``CwmForCausalLM``: three of four layers have a window, the first not among them."""

    theta = 1_000_000.0

    def usual_kinds(self) -> list[str]:
        return [SLIDING if number % 4 else FULL for number in range(self.layers)]


class Glm(Llama):
    """``GlmForCausalLM`` (GLM-4 of 2024): rope turns neighbours in half of each head; gate and `up_proj` are fused."""

    layout, fused_mlp = QkvLayout(interleaved=True), "gate_up_proj"
    rope_share, usual_head_dim = 0.5, 128

    def biases(self) -> tuple[bool, bool]:
        return self.config.flag("attention_bias", True), False


class Glm4(Glm):
    """``Glm4ForCausalLM`` (GLM-4 and GLM-Z1 of 2025): GLM with norms behind attention and feed-forward, too."""

    def layer(self, number: int, weights: Weights) -> Layer:
        names = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
        attention = self.attention(number, weights.scope("self_attn."))
        return self.normed(weights, attention, self.mlp(number, weights.scope("mlp.")), names)


class SeedOss(Llama):
    """``SeedOssForCausalLM``: a key of its own for the bias of the output projection."""

    usual_head_dim = 128

    def biases(self) -> tuple[bool, bool]:
        return self.config.flag("attention_bias", True), self.config.flag("attention_out_bias")


class InternLM3(Llama):
    """``InternLM3ForCausalLM``: keys of their own for the biases of queries, keys and values, and of all others."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.mlp_bias = spec.config.flag("bias")

    def biases(self) -> tuple[bool, bool]:
        return self.config.flag("qkv_bias"), self.config.flag("bias")


class Ernie45(Llama):
    """``Ernie4_5ForCausalLM``: rope turns neighbours, and one key says whether all projections have biases."""

    layout, theta, ties, usual_head_dim = QkvLayout(interleaved=True), 500_000.0, True, 128

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.mlp_bias = spec.config.flag("use_bias")

    def biases(self) -> tuple[bool, bool]:
        bias = self.config.flag("use_bias")
        return bias, bias


class HunYuanDense(Llama):
    """``HunYuanDenseV1ForCausalLM``: queries and keys are normed by head after rope, whose base `alpha` stretches."""

    def qk_norms(self) -> QkNorm | None:
        return QkNorm(self.eps, ("query_layernorm", "key_layernorm"), after_rope=True)

    def read_rope(self) -> RopeSpec:
        return read_rope(self.config, context=self.spec.context, alpha=True)


class Ministral3(Mistral):
    """``Ministral3ForCausalLM``, also the text of ``Mistral3ForConditionalGeneration``: Mistral whose queries grow with
    the logarithm of their position."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        if (beta := self.rope.parameters.get("llama_4_scaling_beta")) is not None:
            trained = self.rope.parameters.get("original_max_position_embeddings")
            if not isinstance(beta, int | float) or not isinstance(trained, int) or trained < 1:
                raise spec.config.refuse("llama_4_scaling_beta needs numbers, also original_max_position_embeddings")
            self.query_factors = partial(_growing, beta=beta, trained=trained)

    def layer_windows(self) -> list[int]:
        return whole_window(self.config, self.layers, usual=0)


def _growing(ctx: ForwardContext, beta: float, trained: int) -> Tensor:
    """1 + beta * log(1 + how often a position exceeds `trained`), [M] float32."""
    return (ctx.positions_m // trained).float().log1p_().mul_(beta).add_(1.0)


class Arcee(Llama):
    """``ArceeForCausalLM``: feed-forward layers without a gate, of relu(x)²."""

    activations = ("relu2",)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        return PlainMlp(weights, self.hidden, self.inner, relu_squared, bias=self.mlp_bias)


class Apertus(Llama):
    """``ApertusForCausalLM``: norms of queries and keys by head, and feed-forward layers of xIELU (arXiv 2411.13010),
    whose two slopes are learned."""

    qk_norm, activations, theta = True, ("xielu",), 12_000_000.0

    def layer(self, number: int, weights: Weights) -> Layer:
        names = ("attention_layernorm", "", "feedforward_layernorm", "")
        attention = self.attention(number, weights.scope("self_attn."))
        return self.normed(weights, attention, self.mlp(number, weights.scope("mlp.")), names)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        beta, least = (weights.tensor(f"act_fn.{name}", dtype=torch.float32) for name in ("beta", "eps"))
        rising, falling = (
            softplus(weights.tensor(f"act_fn.alpha_{sign}", 1, dtype=torch.float32)) for sign in ("p", "n")
        )
        activation = partial(_xielu, rising=rising, falling=falling + beta, beta=beta, least=least)
        return PlainMlp(weights, self.hidden, self.inner, activation)


def _xielu(up: Tensor, rising: Tensor, falling: Tensor, beta: Tensor, least: Tensor) -> Tensor:
    x = up.float()
    below = torch.minimum(x, least).exp_().sub_(1.0).sub_(x).mul_(falling)
    return torch.where(x > 0, x.square().mul_(rising), below).add_(x * beta).to(up.dtype)


class LayerNormed(Llama):
    """Llama with layer norms."""

    eps_key, usual_eps = "layer_norm_eps", 1e-5
    norm_bias = True

    def norm(self, weights: Weights, name: str) -> Norm:
        parts = ("weight", "bias") if self.norm_bias else ("weight",)
        weight_h, *bias = (weights.tensor(f"{name}.{part}", self.hidden, dtype=torch.float32) for part in parts)
        return LayerNorm(weight_h, bias[0] if bias else None, self.eps)


class SideBySide(LayerNormed):
    """Attention and feed-forward side by side, behind one norm."""

    def layer(self, number: int, weights: Weights) -> Layer:
        attention = self.attention(number, weights.scope("self_attn."))
        return ParallelLayer(self.norm(weights, "input_layernorm"), attention, self.mlp(number, weights.scope("mlp.")))


class Phi(SideBySide):
    """``PhiForCausalLM`` (Phi-1, Phi-2): rope over a part of each head, and biases everywhere."""

    norm_name, head_bias = "final_layernorm", True
    layout, rope_share = QkvLayout(out="dense"), 0.5
    activations = ("gelu_new",)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        if spec.config.flag("qk_layernorm"):
            raise spec.config.refuse("qk_layernorm is not supported")

    def biases(self) -> tuple[bool, bool]:
        return True, True

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        return PlainMlp(weights, self.hidden, self.inner, _gelu, bias=True, names=("fc1", "fc2"))


class Starcoder2(LayerNormed):
    """``Starcoder2ForCausalLM``: feed-forward layers without a gate, in some models with a window in all layers."""

    eps_key, ties = "norm_epsilon", True
    activations = ("gelu_pytorch_tanh",)

    def biases(self) -> tuple[bool, bool]:
        bias = self.config.flag("use_bias", True)
        return bias, bias

    def layer_windows(self) -> list[int]:
        return whole_window(self.config, self.layers, usual=0)

    def layer(self, number: int, weights: Weights) -> Layer:
        names = ("input_layernorm", "", "post_attention_layernorm", "")
        attention = self.attention(number, weights.scope("self_attn."))
        return self.normed(weights, attention, self.mlp(number, weights.scope("mlp.")), names)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        bias = self.config.flag("use_bias", True)
        return PlainMlp(weights, self.hidden, self.inner, _gelu, bias=bias, names=("c_fc", "c_proj"))


class Cohere(SideBySide):
    """``CohereForCausalLM`` (Command R): rope that turns neighbours, and a factor on logits."""

    norm_bias, ties = False, True
    layout, theta = QkvLayout(interleaved=True), 500_000.0

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        if spec.config.flag("use_qk_norm"):
            raise spec.config.refuse("use_qk_norm is not supported for this architecture")

    def build(self, weights: Weights) -> Decoder:
        decoder = super().build(weights)
        decoder.logits_scale = self.config.number("logit_scale", 0.0625)
        return decoder


class Cohere2(Windowed, Cohere):
    """``Cohere2ForCausalLM`` (Command R7B, Command A): windows in three of four layers; the others have no rope."""

    theta, pattern = 10_000.0, 4

    def rope_of(self, number: int) -> RopeSpec | None:
        return self.rope if self.kinds[number] == SLIDING else None


def _gelu(up: Tensor) -> Tensor:
    return gelu_tanh(up.float()).to(up.dtype)
