"""Llama and Mistral: grouped-query attention, in kin of Llama with a sliding window in some layers, and gated
feed-forward layers."""

from __future__ import annotations

from collections import Counter

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import read_rope
from twinpool.engine.layers.decoder import Layer, LayerPlace, Sublayer
from twinpool.engine.layers.mixers.head_attention import HeadAttention, kv_buffers
from twinpool.engine.layers.mlp import GatedMlp
from twinpool.engine.layers.rope import RopeTable
from twinpool.engine.models.model_base import FULL_POOL, WINDOW_POOL, Model, StateOptions
from twinpool.engine.models.sliding_window import whole_window
from twinpool.engine.tensors.weight_loader import Weights


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
        self.rope = read_rope(config, context=spec.context)
        if config.text("hidden_act", "silu") != "silu":
            raise config.refuse(f"hidden_act {config.text('hidden_act')!r} is not supported; only silu is")
        if self.heads % self.kv_heads:
            raise config.refuse(f"{self.heads} attention heads do not divide among {self.kv_heads} key-value heads")
        if self.head_dim % 2:
            raise config.refuse(f"head_dim {self.head_dim} must be even for rotary embeddings")
        # A window as long as the longest sequence hides nothing.
        self.windows = [window if window < spec.context else 0 for window in self.layer_windows()]

    @property
    def default_head_dim(self) -> int:
        return self.hidden // self.heads

    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output projection has one."""
        bias = self.config.flag("attention_bias")
        return bias, bias

    def layer_windows(self) -> list[int]:
        """How many positions each layer's queries see, their own included; 0: all. Raises `CheckpointError` where
        `config.json` asks for what this architecture doesn't have."""
        kinds = self.config.values.get("layer_types")
        others = {str(kind) for kind in kinds if kind != "full_attention"} if isinstance(kinds, list) else set()
        if others:
            raise self.config.refuse(f"{', '.join(sorted(others))} layers are not supported; only full attention is")
        return [0] * self.layers

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        counts = Counter(self.place(number).pool for number in range(self.layers))
        pools = []
        for name, layers in sorted(counts.items()):
            buffers = kv_buffers(layers, self.kv_heads, self.head_dim, options.dtype, options.shard, options.kv_codes)
            kind = PoolKind.WINDOW if name == WINDOW_POOL else PoolKind.FULL
            pools.append(PoolSpec(name, buffers, kind, max(self.windows) if name == WINDOW_POOL else 0))
        return tuple(pools)

    def place(self, number: int) -> LayerPlace:
        """The place of the keys and values of layer `number`. Those of windows are in a pool of their own, but where
        all layers have one: a model has a full pool, which says which prefixes there are."""
        if all(self.windows) or not any(self.windows):
            return LayerPlace(FULL_POOL, number)
        before = sum(bool(window) == bool(self.windows[number]) for window in self.windows[:number])
        return LayerPlace(WINDOW_POOL if self.windows[number] else FULL_POOL, before)

    def layer(self, number: int, weights: Weights) -> Layer:
        attention = self.attention(number, weights.scope("self_attn."))
        return self.pre_norm(weights, attention, self.mlp(number, self.mlp_weights(weights)))

    def attention(self, number: int, weights: Weights) -> HeadAttention:
        return HeadAttention(
            weights,
            self.place(number),
            self.rope_table(weights),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bias=self.attention_bias,
            out_bias=self.out_bias,
            qk_norm_eps=self.eps if self.qk_norm else None,
            scale=self.scale(),
            window=self.windows[number],
        )

    def scale(self) -> float:
        """The factor on attention scores."""
        return float(self.head_dim**-0.5)

    def mlp_weights(self, weights: Weights) -> Weights:
        """A layer's tensors below its feed-forward layer's prefix."""
        return weights.scope("mlp.")

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        return GatedMlp(weights, self.hidden, self.inner, bias=self.mlp_bias)

    def rope_table(self, weights: Weights) -> RopeTable:
        """The table of angles that all layers share."""
        return weights.once("rope", lambda: RopeTable(self.rope, self.head_dim, weights.dtype, weights.device))


class Mistral(Llama):
    """``MistralForCausalLM``, and the text of ``Mistral3ForConditionalGeneration``: Llama without biases, and in its
    first versions with a sliding window in all layers."""

    def biases(self) -> tuple[bool, bool]:
        return False, False

    def layer_windows(self) -> list[int]:
        return whole_window(self.config, self.layers)
