"""Nemotron-H: layers of one mixer each (Mamba-2, attention, feed-forward or experts), in any order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSpec
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.engine.layers.decoder import ForwardContext, Layer, LayerPlace, Sublayer
from twinpool.engine.layers.mixers.head_attention import HeadAttention, kv_buffers
from twinpool.engine.layers.mixers.recurrences import Mamba2, MambaShape, mamba_buffers
from twinpool.engine.layers.mlp import MixtureOfExperts, PlainMlp
from twinpool.engine.layers.moe.experts import ExpertSizes, RouterRules, ScoreRouter, relu_squared, ungated_expert
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.models.model_base import FULL_POOL, STATE_POOL, Model, StateOptions
from twinpool.engine.tensors.weight_loader import Weights

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_SPELLINGS = {kind: kind for kind in _LETTERS.values()} | {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronH(Model):
    """``NemotronHForCausalLM``. A checkpoint's multi-token-prediction layers (``mtp.*``) are left unused."""

    embed_name, norm_name = "embeddings", "norm_f"

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.eps = config.number("layer_norm_epsilon", config.number("rms_norm_eps", 1e-5))
        self.kinds = _kinds(config, self.layers)
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


def _kinds(config: JsonFields, layers: int) -> list[str]:
    """Read the kind of each layer: from a list of words, or a letter each as published."""
    words = config.values.get("layers_block_type", config.values.get("layer_types"))
    if words is None:
        words = [_LETTERS.get(letter, letter) for letter in config.text("hybrid_override_pattern")]
    if not isinstance(words, list) or len(words) != layers or not set(words) <= set(_SPELLINGS):
        raise config.refuse(f"the kinds of {layers} layers must be among {', '.join(_SPELLINGS)}, got {words!r}")
    return [_SPELLINGS[word] for word in words]
