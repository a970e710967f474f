"""Models with Mamba-2 mixers: Falcon-H1, in which every layer has one beside full attention; Nemotron-H, whose layers
have one mixer each (Mamba-2, attention, feed-forward or experts), in any order; and Granite 4, Granite's layers with
Mamba-2 in the place of attention in most. And LFM2, whose layers have short convolutions, with attention in some
between; dense, or with experts behind some dense layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSpec
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import RopeSpec
from twinpool.engine.layers.decoder import Decoder, ForwardContext, Layer, LayerPlace, PreNormLayer, Sublayer
from twinpool.engine.layers.mixers.head_attention import HeadAttention, QkNorm, QkvLayout, kv_buffers
from twinpool.engine.layers.mixers.recurrences import (
    Mamba2,
    MambaShape,
    ShortConv,
    mamba_buffers,
    numbers,
    short_conv_buffers,
    time_limit,
)
from twinpool.engine.layers.mlp import GatedMlp, MixtureOfExperts, PlainMlp
from twinpool.engine.layers.moe.experts import ExpertSizes, RouterRules, ScoreRouter, relu_squared, ungated_expert
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.models.llama import Llama
from twinpool.engine.models.mixtures import GraniteMoe, granite_mlp
from twinpool.engine.models.model_base import FULL_POOL, STATE_POOL, Model, StateOptions
from twinpool.engine.tensors.row_exact_linear import silu
from twinpool.engine.tensors.weight_loader import Weights

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_SPELLINGS = {kind: kind for kind in _LETTERS.values()} | {"mamba": "linear_attention", "attention": "full_attention"}
_GATED = ("w1", "w3", "w2")
_KINDS = ("conv", "full_attention")


class FalconH1(Llama):
    """``FalconH1ForCausalLM``"""

    norm_name = "final_layernorm"

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.mamba = _mamba_shape(config, self.hidden, self.eps)
        self.factors = _Factors.of(config)

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        state = mamba_buffers(self.layers, self.mamba, options.dtype, options.shard)
        full = kv_buffers(self.layers, self.kv_heads, self.head_dim, options.dtype, options.shard, options.kv_codes)
        return PoolSpec(FULL_POOL, full), PoolSpec(STATE_POOL, state, PoolKind.STATE)

    def places(self, number: int) -> tuple[LayerPlace, ...]:
        return LayerPlace(FULL_POOL, number), LayerPlace(STATE_POOL, number)

    def layer(self, number: int, weights: Weights) -> Layer:
        return _HybridLayer(
            weights.tensor("input_layernorm.weight", self.hidden),
            Mamba2(weights.scope("mamba."), LayerPlace(STATE_POOL, number), self.mamba),
            self.attention(number, weights.scope("self_attn.")),
            weights.tensor("pre_ff_layernorm.weight", self.hidden),
            self.mlp(number, weights.scope("feed_forward.")),
            self.eps,
            self.factors,
        )

    def scale(self) -> float:
        """The factor on scores, which includes the factor on keys."""
        return super().scale() * self.factors.key

    def mlp(self, number: int, weights: Weights) -> GatedMlp:
        activation = partial(_scaled_silu, factor=self.factors.gate)
        return GatedMlp(weights, self.hidden, self.inner, bias=self.mlp_bias, activation=activation)

    def build(self, weights: Weights) -> Decoder:
        decoder = super().build(weights)
        decoder.embed_scale = self.factors.embedding  # Of looked-up rows: a tied head has the unscaled table.
        decoder.logits_scale = self.factors.logits
        return decoder


def _scaled_silu(x: Tensor, factor: float) -> Tensor:
    return silu(x.mul_(factor))


@dataclass(frozen=True)
class _Factors:
    """The factors of `config.json` on parts of the model."""

    embedding: float
    logits: float
    attention_in: float
    attention_out: float
    key: float
    mamba_in: float
    mamba_out: float
    gate: float
    down: float

    @classmethod
    def of(cls, config: JsonFields) -> _Factors:
        gate, down = numbers(config, "mlp_multipliers", 2)
        return cls(
            embedding=config.number("embedding_multiplier", 1.0),
            logits=config.number("lm_head_multiplier", 1.0),
            attention_in=config.number("attention_in_multiplier", 1.0),
            attention_out=config.number("attention_out_multiplier", 1.0),
            key=config.number("key_multiplier", 1.0),
            mamba_in=config.number("ssm_in_multiplier", 1.0),
            mamba_out=config.number("ssm_out_multiplier", 1.0),
            gate=gate,
            down=down,
        )


@dataclass(frozen=True)
class _HybridLayer:
    """A layer that computes x + mamba(norm(x)) + attention(norm(x)), then x + mlp(norm(x)), with factors."""

    input_norm_h: Tensor
    mamba: Sublayer
    attention: Sublayer
    mlp_norm_h: Tensor
    mlp: Sublayer
    eps: float
    factors: _Factors

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        factors = self.factors
        h_mh = rms_norm(x_mh, self.input_norm_h, self.eps)
        mixed = self.mamba(h_mh * factors.mamba_in, ctx).mul_(factors.mamba_out)
        mixed.add_(self.attention(h_mh * factors.attention_in, ctx).mul_(factors.attention_out))
        x_mh = x_mh + mixed
        return x_mh.add_(self.mlp(rms_norm(x_mh, self.mlp_norm_h, self.eps), ctx).mul_(factors.down))


def _mamba_shape(config: JsonFields, hidden: int, eps: float) -> MambaShape:
    heads = config.size("mamba_n_heads", 128)
    inner = config.size("mamba_d_ssm") if "mamba_d_ssm" in config else int(config.number("mamba_expand", 2) * hidden)
    if inner % heads or config.values.get("mamba_d_head", "auto") not in ("auto", inner // heads):
        raise config.refuse(f"mamba_d_head must be the {inner} inner units divided by the {heads} heads")
    shape = MambaShape(
        hidden=hidden,
        heads=heads,
        head_dim=inner // heads,
        groups=config.size("mamba_n_groups", 1),
        state_dim=config.size("mamba_d_state", 256),
        kernel=config.size("mamba_d_conv", 4),
        eps=eps,
        in_bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias", True),
        out_bias=config.flag("projectors_bias"),
        normed=config.flag("mamba_rms_norm"),
        norm_first=config.flag("mamba_norm_before_gate", True),
        time_limit=time_limit(config),
        multipliers=numbers(config, "ssm_multipliers", 5),
    )
    shape.check(config)
    return shape


class NemotronH(Model):
    """``NemotronHForCausalLM``. A checkpoint's multi-token-prediction layers (``mtp.*``) are left unused."""

    embed_name, norm_name = "embeddings", "norm_f"

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.eps = config.number("layer_norm_epsilon", config.number("rms_norm_eps", 1e-5))
        self.kinds = _letters_kinds(config, self.layers)
        self.heads = config.size("num_attention_heads")
        self.kv_heads = config.size("num_key_value_heads", self.heads)
        self.head_dim = config.size("head_dim", config.size("attention_head_dim", 128))
        self.mlp_bias = config.flag("mlp_bias")
        self.mamba = self._mamba_shape()
        activation = config.text("mlp_hidden_act", "relu2")
        if activation != "relu2":
            raise config.refuse(f"mlp_hidden_act {activation!r} is not supported; only relu2 is")
        if self.heads % self.kv_heads:
            raise config.refuse(f"{self.heads} attention heads do not divide among {self.kv_heads} key-value heads")
        for kind in ("linear_attention", "full_attention"):
            if kind not in self.kinds:
                raise config.refuse(f"no layer is of type {kind}; that is not supported")
        if "moe_latent_size" in config:
            raise config.refuse("experts behind a latent projection (moe_latent_size) are not supported")

    def _mamba_shape(self) -> MambaShape:
        config = self.config
        shape = MambaShape(
            hidden=self.hidden,
            heads=config.size("mamba_num_heads"),
            head_dim=config.size("mamba_head_dim"),
            groups=config.size("n_groups", 8),
            state_dim=config.size("ssm_state_size", 128),
            kernel=config.size("conv_kernel", 4),
            eps=self.eps,
            in_bias=config.flag("use_bias"),
            conv_bias=config.flag("use_conv_bias", True),
            out_bias=config.flag("use_bias"),
            # As in transformers' pass over a prompt; its step of one token leaves it out, which can't be had here: a
            # position comes to the same whether it is computed in a chunk or alone.
            time_limit=(config.number("mamba_dt_min", config.number("time_step_min", 0.001)), float("inf")),
        )
        shape.check(config)
        return shape

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        layers = self.kinds.count("full_attention")
        full = kv_buffers(layers, self.kv_heads, self.head_dim, options.dtype, options.shard, options.kv_codes)
        state = mamba_buffers(self.kinds.count("linear_attention"), self.mamba, options.dtype, options.shard)
        return PoolSpec(FULL_POOL, full), PoolSpec(STATE_POOL, state, PoolKind.STATE)

    def places(self, number: int) -> tuple[LayerPlace, ...]:
        kind = self.kinds[number]
        pool = {"linear_attention": STATE_POOL, "full_attention": FULL_POOL}.get(kind)
        return (LayerPlace(pool, self.kinds[:number].count(kind)),) if pool is not None else ()

    def layer(self, number: int, weights: Weights) -> Layer:
        norm_h = self.norm_weight(weights, "norm.weight", self.hidden)
        return _OneMixer(norm_h, self.mixer(number, weights.scope("mixer.")), self.eps)

    def mixer(self, number: int, weights: Weights) -> Sublayer:
        kind = self.kinds[number]
        before = self.kinds[:number].count(kind)
        if kind == "linear_attention":
            return Mamba2(weights, LayerPlace(STATE_POOL, before), self.mamba)
        if kind == "full_attention":
            return HeadAttention(
                weights,
                LayerPlace(FULL_POOL, before),
                None,
                hidden=self.hidden,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
            )
        if kind == "mlp":
            return self._mlp(weights, self.config.size("intermediate_size"))
        return self._experts(weights)

    def _mlp(self, weights: Weights, inner: int) -> PlainMlp:
        return PlainMlp(weights, self.hidden, inner, relu_squared, bias=self.mlp_bias)

    def _experts(self, weights: Weights) -> MixtureOfExperts:
        config = self.config
        sizes = ExpertSizes(config.size("n_routed_experts"), self.hidden, config.size("moe_intermediate_size"))
        router = ScoreRouter(weights, sizes, sizes.top_k(config), RouterRules.of(config))
        shared = self._mlp(weights.scope("shared_experts."), config.size("moe_shared_expert_intermediate_size"))
        return MixtureOfExperts(weights, router, sizes, read=ungated_expert, activation=relu_squared, shared=shared)

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        return weights.tensor(name, size).float()


@dataclass(frozen=True)
class _OneMixer:
    """A layer that computes x + mixer(norm(x))."""

    norm_h: Tensor
    mixer: Sublayer
    eps: float

    def __call__(self, x_mh: Tensor, ctx: ForwardContext) -> Tensor:
        return x_mh + self.mixer(rms_norm(x_mh, self.norm_h, self.eps), ctx)


def _letters_kinds(config: JsonFields, layers: int) -> list[str]:
    """Read the kind of each layer: from a list of words, or a letter each as published."""
    words = config.values.get("layers_block_type", config.values.get("layer_types"))
    if words is None:
        words = [_LETTERS.get(letter, letter) for letter in config.text("hybrid_override_pattern")]
    if not isinstance(words, list) or len(words) != layers or not set(words) <= set(_SPELLINGS):
        raise config.refuse(f"the kinds of {layers} layers must be among {', '.join(_SPELLINGS)}, got {words!r}")
    return [_SPELLINGS[word] for word in words]


class GraniteMoeHybrid(GraniteMoe):
    """``GraniteMoeHybridForCausalLM`` (Granite 4): Granite's layers, in some of which the mixer is Mamba-2, with
    experts, a shared one, or the latter alone."""

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        usual = ["linear_attention"] * spec.layers
        key = "layer_types" if "layer_types" in config else "layers_block_type"
        self.mixers = [_SPELLINGS[word] for word in config.words(key, spec.layers, tuple(_SPELLINGS), usual)]
        super().__init__(spec)
        if "full_attention" not in self.mixers:
            raise config.refuse("no layer is of type full_attention; that is not supported")
        self.rotated = config.text("position_embedding_type", "nope", choices=("rope", "nope")) == "rope"
        self.mamba = None
        if "linear_attention" in self.mixers:
            shape = _mamba_shape(config, self.hidden, self.eps)
            self.mamba = replace(shape, out_bias=shape.in_bias, normed=True, norm_first=False)

    def layer_windows(self) -> list[int]:
        return [0] * self.layers

    def rope_of(self, number: int) -> RopeSpec | None:
        return self.rope if self.rotated else None

    def place(self, number: int) -> LayerPlace:
        kind = self.mixers[number]
        pool = FULL_POOL if kind == "full_attention" else STATE_POOL
        return LayerPlace(pool, self.mixers[:number].count(kind))

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        counts = {kind: self.mixers.count(kind) for kind in set(self.mixers)}
        full = kv_buffers(
            counts["full_attention"], self.kv_heads, self.head_dim, options.dtype, options.shard, options.kv_codes
        )
        if self.mamba is None:
            return (PoolSpec(FULL_POOL, full),)
        state = mamba_buffers(counts["linear_attention"], self.mamba, options.dtype, options.shard)
        return PoolSpec(FULL_POOL, full), PoolSpec(STATE_POOL, state, PoolKind.STATE)

    def mixer(self, number: int, weights: Weights) -> Sublayer:
        if self.mamba is None or self.mixers[number] == "full_attention":
            return super().mixer(number, weights)
        return Mamba2(weights.scope("mamba."), self.place(number), self.mamba)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        if self.sizes is not None:
            return super().mlp(number, weights)
        return granite_mlp(weights.scope("shared_mlp."), self.hidden, self.shared_inner)


class Lfm2(Llama):
    """``Lfm2ForCausalLM``"""

    norm_name, eps_key, usual_eps, theta = "embedding_norm", "norm_eps", 1e-5, 1_000_000.0
    layout = QkvLayout(out="out_proj")

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
        self.kernel, self.conv_bias = config.size("conv_L_cache", 3), config.flag("conv_bias")
        if self.kernel < 2:
            raise config.refuse("conv_L_cache must be 2 or more")
        if self.hidden % self.heads:
            raise config.refuse(f"hidden_size {self.hidden} does not divide among {self.heads} heads")
        whole = config.values.get("full_attn_idxs", list(range(self.layers)))
        usual = [_KINDS[isinstance(whole, list) and number in whole] for number in range(self.layers)]
        self.kinds = config.words("layer_types", self.layers, _KINDS, usual)
        for kind in _KINDS:
            if kind not in self.kinds:
                raise config.refuse(f"no layer is of type {kind}; that is not supported")

    @property
    def inner_key(self) -> str:
        return "block_ff_dim" if "block_ff_dim" in self.config else "intermediate_size"

    @property
    def dense_inner(self) -> int:
        """The inner units of feed-forward layers, which the first makers of such models rounded up."""
        config, inner = self.config, self.inner
        if not config.flag("block_auto_adjust_ff_dim", True):
            return inner
        multiple = config.size("block_multiple_of", 256)
        inner = int(config.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        return -(-inner // multiple) * multiple

    def layer_windows(self) -> list[int]:
        return [0] * self.layers

    def qk_norms(self) -> QkNorm | None:
        return QkNorm(self.eps, ("q_layernorm", "k_layernorm"))

    def place(self, number: int) -> LayerPlace:
        kind = self.kinds[number]
        return LayerPlace(FULL_POOL if kind == "full_attention" else STATE_POOL, self.kinds[:number].count(kind))

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        count = self.kinds.count("full_attention")
        full = kv_buffers(count, self.kv_heads, self.head_dim, options.dtype, options.shard, options.kv_codes)
        convs = self.layers - count, self.heads, self.hidden
        state = short_conv_buffers(*convs, self.kernel, options.dtype, options.shard)
        return PoolSpec(FULL_POOL, full), PoolSpec(STATE_POOL, state, PoolKind.STATE)

    def layer(self, number: int, weights: Weights) -> Layer:
        mixer: Sublayer
        if self.kinds[number] == "full_attention":
            mixer = self.attention(number, weights.scope("self_attn."))
        else:
            place = self.place(number)
            mixer = ShortConv(weights.scope("conv."), place, self.hidden, self.heads, self.kernel, bias=self.conv_bias)
        return PreNormLayer(
            weights.tensor("operator_norm.weight", self.hidden),
            mixer,
            weights.tensor("ffn_norm.weight", self.hidden),
            self.mlp(number, weights.scope("feed_forward.")),
            self.eps,
        )

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        return GatedMlp(weights, self.hidden, self.dense_inner, names=_GATED)


class Lfm2Moe(Lfm2):
    """``Lfm2MoeForCausalLM``"""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.dense_layers = config.count("num_dense_layers", 2)
        self.sizes = ExpertSizes(
            config.size("num_experts", 32), self.hidden, config.size("moe_intermediate_size", 1792)
        )
        self.top_k = self.sizes.top_k(config, default=4)
        self.corrected = config.flag("use_expert_bias", True)
        self.rules = RouterRules(
            normalise=config.flag("norm_topk_prob", True),
            least=1e-6,
            scale=config.number("routed_scaling_factor", 1.0),
        )

    @property
    def dense_inner(self) -> int:
        return self.inner

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        if number < self.dense_layers:
            return super().mlp(number, weights)
        correction = "expert_bias" if self.corrected else ""
        router = ScoreRouter(weights, self.sizes, self.top_k, self.rules, correction=correction)
        return MixtureOfExperts(weights, router, self.sizes)
