"""Qwen3-Next and Qwen3.5: gated delta layers, with a layer of full gated attention at regular intervals."""

from __future__ import annotations

from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import read_rope
from twinpool.engine.layers.decoder import Layer, LayerPlace, Sublayer
from twinpool.engine.layers.mixers.head_attention import GatedAttention, kv_buffers
from twinpool.engine.layers.mixers.recurrences import (
    DeltaShape,
    GatedDelta,
    Projection,
    delta_buffers,
    grouped,
    separate,
)
from twinpool.engine.layers.mlp import GatedMlp, GatedShared
from twinpool.engine.layers.rope import RopeTable
from twinpool.engine.models.model_base import FULL_POOL, STATE_POOL, Model, StateOptions
from twinpool.engine.models.qwen import QwenMixture
from twinpool.engine.tensors.weight_loader import Weights

_KINDS = ("linear_attention", "full_attention")


class Qwen3Next(Model):
    """``Qwen3NextForCausalLM``. A checkpoint's multi-token-prediction layer (``mtp.*``) is left unused."""

    projection: Projection = staticmethod(grouped)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.heads = config.size("num_attention_heads")
        self.kv_heads = config.size("num_key_value_heads", self.heads)
        self.head_dim = config.size("head_dim", 256)
        self.bias = config.flag("attention_bias")
        self.rope = read_rope(config, partial=True, default_partial=0.25, context=spec.context)
        self.rope_dim = int(self.head_dim * self.rope.partial)
        every = config.size("full_attention_interval", 4)
        usual = [_KINDS[(i + 1) % every == 0] for i in range(self.layers)]
        self.kinds = config.words("layer_types", self.layers, _KINDS, usual)
        self.delta = DeltaShape(
            hidden=self.hidden,
            key_heads=config.size("linear_num_key_heads", 16),
            value_heads=config.size("linear_num_value_heads", 32),
            key_dim=config.size("linear_key_head_dim", 128),
            value_dim=config.size("linear_value_head_dim", 128),
            kernel=config.size("linear_conv_kernel_dim", 4),
        )
        self.mixture = None
        if "num_experts" in config:
            self.mixture = QwenMixture.of(config, self.hidden, self.layers, top_k=None, normalise=True)
        self._refuse()

    def _refuse(self) -> None:
        config, delta = self.config, self.delta
        if config.text("hidden_act", "silu") != "silu":
            raise config.refuse(f"hidden_act {config.text('hidden_act')!r} is not supported; only silu is")
        if self.heads % self.kv_heads:
            raise config.refuse(f"{self.heads} attention heads do not divide among {self.kv_heads} key-value heads")
        if delta.value_heads % delta.key_heads:
            raise config.refuse(f"{delta.value_heads} value heads do not divide among {delta.key_heads} key heads")
        if delta.kernel < 2:
            raise config.refuse("linear_conv_kernel_dim must be 2 or more")
        if self.rope_dim % 2 or not self.rope_dim:
            raise config.refuse(f"rope turns {self.rope_dim} of {self.head_dim} dimensions; it must be an even number")
        missing = [kind for kind in _KINDS if kind not in self.kinds]
        if missing:
            raise config.refuse(f"no layer is of type {missing[0]}; that is not supported")

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        full = kv_buffers(
            self._count("full_attention"), self.kv_heads, self.head_dim, options.dtype, options.shard, options.kv_codes
        )
        state = delta_buffers(self._count("linear_attention"), self.delta, options.dtype, options.shard)
        return PoolSpec(FULL_POOL, full), PoolSpec(STATE_POOL, state, PoolKind.STATE)

    def _count(self, kind: str, before: int | None = None) -> int:
        return self.kinds[:before].count(kind)

    def layer(self, number: int, weights: Weights) -> Layer:
        return self.pre_norm(weights, self.mixer(number, weights), self.mlp(number, weights.scope("mlp.")))

    def mixer(self, number: int, weights: Weights) -> Sublayer:
        kind = self.kinds[number]
        if kind == "linear_attention":
            place = LayerPlace(STATE_POOL, self._count(kind, number))
            return GatedDelta(weights.scope("linear_attn."), place, self.delta, self.eps, self.projection)
        return GatedAttention(
            weights.scope("self_attn."),
            LayerPlace(FULL_POOL, self._count(kind, number)),
            weights.once("rope", lambda: RopeTable(self.rope, self.rope_dim, weights.dtype, weights.device)),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
            bias=self.bias,
        )

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        config, hidden = self.config, self.hidden
        if self.mixture is None or number not in self.mixture.layers:
            return GatedMlp(weights, hidden, config.size("intermediate_size"))
        shared = GatedMlp(weights.scope("shared_expert."), hidden, config.size("shared_expert_intermediate_size"))
        return self.mixture.layer(weights, GatedShared(weights, hidden, shared))

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        """Read a norm's weight as float32; checkpoints have it around zero, so one is added."""
        return weights.tensor(name, size).float() + 1.0


class Qwen35(Qwen3Next):
    """``Qwen3_5ForCausalLM`` and ``Qwen3_5MoeForCausalLM``, and the text of their ``ForConditionalGeneration`` models.

    Its rope has sections for the three axes of images; in text all three are the position, which gives plain rope.
    """

    projection: Projection = staticmethod(separate)
