"""Llama: full grouped-query attention and gated feed-forward layers."""

from __future__ import annotations

from cache.memory.kv_cache_spec import PoolSpec
from contracts.checkpoint.model_spec import ModelSpec
from contracts.checkpoint.rope_spec import read_rope
from engine.layers.decoder import Layer, Sublayer
from engine.layers.forward_context import LayerPlace
from engine.layers.mixers.head_attention import HeadAttention, kv_buffers
from engine.layers.mlp import GatedMlp
from engine.layers.rope import RopeTable
from engine.models.model_base import FULL_POOL, Model, StateOptions
from engine.tensors.weight_loader import Weights


class Llama(Model):
    """``LlamaForCausalLM``; other architectures override the methods and numbers below."""

    qk_norm = False

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.inner = config.size("intermediate_size")
        self.heads = config.size("num_attention_heads")
        self.kv_heads = config.size("num_key_value_heads", self.heads)
        self.head_dim = config.size("head_dim", self.default_head_dim)
        self.attention_bias, self.out_bias = self.biases()
        self.mlp_bias = config.flag("mlp_bias")
        self.rope = read_rope(config)
        if config.text("hidden_act", "silu") != "silu":
            raise config.refuse(f"hidden_act {config.text('hidden_act')!r} is not supported; only silu is")
        if self.heads % self.kv_heads:
            raise config.refuse(f"{self.heads} attention heads do not divide among {self.kv_heads} key-value heads")
        if self.head_dim % 2:
            raise config.refuse(f"head_dim {self.head_dim} must be even for rotary embeddings")
        self.refuse_windows()

    @property
    def default_head_dim(self) -> int:
        return self.hidden // self.heads

    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output projection has one."""
        bias = self.config.flag("attention_bias")
        return bias, bias

    def refuse_windows(self) -> None:
        """Raise `CheckpointError` where `config.json` asks for other than full attention in some layers."""
        kinds = self.config.values.get("layer_types")
        others = {str(kind) for kind in kinds if kind != "full_attention"} if isinstance(kinds, list) else set()
        if others:
            raise self.config.refuse(f"{', '.join(sorted(others))} layers are not supported; only full attention is")

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        buffers = kv_buffers(self.layers, self.kv_heads, self.head_dim, options.dtype, options.shard)
        return (PoolSpec(FULL_POOL, buffers),)

    def layer(self, number: int, weights: Weights) -> Layer:
        attention = self.attention(number, weights.scope("self_attn."))
        return self.pre_norm(weights, attention, self.mlp(number, weights.scope("mlp.")))

    def attention(self, number: int, weights: Weights) -> HeadAttention:
        return HeadAttention(
            weights,
            LayerPlace(FULL_POOL, number),
            self.rope_table(weights),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bias=self.attention_bias,
            out_bias=self.out_bias,
            qk_norm_eps=self.eps if self.qk_norm else None,
            scale=self.scale(),
        )

    def scale(self) -> float:
        """The factor on attention scores."""
        return float(self.head_dim**-0.5)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        return GatedMlp(weights, self.hidden, self.inner, bias=self.mlp_bias)

    def rope_table(self, weights: Weights) -> RopeTable:
        """The table of angles that all layers share."""
        return weights.once("rope", lambda: RopeTable(self.rope, self.head_dim, weights.dtype, weights.device))
