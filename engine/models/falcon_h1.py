"""Falcon-H1: every layer has full attention and a Mamba-2 mixer side by side, scaled by factors of `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSpec
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.engine.layers.decoder import Decoder, ForwardContext, Layer, LayerPlace, Sublayer
from twinpool.engine.layers.mixers.head_attention import kv_buffers
from twinpool.engine.layers.mixers.recurrences import Mamba2, MambaShape, mamba_buffers, numbers, time_limit
from twinpool.engine.layers.mlp import GatedMlp
from twinpool.engine.layers.norm import rms_norm, silu
from twinpool.engine.models.llama import Llama
from twinpool.engine.models.model_base import FULL_POOL, STATE_POOL, StateOptions
from twinpool.engine.tensors.weight_loader import Weights


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
