"""Llama and Mistral: grouped-query attention, in kin of Llama with a sliding window in some layers, and gated
feed-forward layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import RopeSpec, read_rope
from twinpool.engine.layers.decoder import ForwardContext, Layer, LayerPlace, Sublayer
from twinpool.engine.layers.mixers.head_attention import PLAIN, HeadAttention, QkNorm, kv_buffers
from twinpool.engine.layers.mlp import GatedMlp
from twinpool.engine.layers.rope import RopeTable
from twinpool.engine.models.model_base import FULL_POOL, WINDOW_POOL, Model, StateOptions
from twinpool.engine.models.sliding_window import whole_window
from twinpool.engine.tensors.weight_loader import Weights


class Llama(Model):
    """``LlamaForCausalLM``; other architectures override the methods and numbers below."""

    qk_norm = False
    layout = PLAIN
    fused_mlp = ""
    """The name of one weight of both gate and `up_proj`."""
    activations: tuple[str, ...] = ("silu",)
    """What feed-forward layers compute by the names that `activation_key` may have; the first where it isn't there."""
    activation_key = "hidden_act"
    usual_head_dim = 0
    """The width of a head where `config.json` doesn't say; 0: that of the model over the heads."""
    theta = 10_000.0
    """The base of rope where `config.json` has none."""
    rope_share: float | None = None
    """The share of a head's dimensions that is rotated where `config.json` doesn't say; None: all, whatever it says."""
    softcap = 0.0
    query_factors: Callable[[ForwardContext], Tensor] | None = None

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.inner = config.size(self.inner_key)
        self.heads = config.size("num_attention_heads")
        self.kv_heads = config.size("num_key_value_heads", self.heads)
        self.head_dim = config.size("head_dim", self.default_head_dim)
        self.attention_bias, self.out_bias = self.biases()
        self.mlp_bias = config.flag("mlp_bias")
        self.rope = self.read_rope()
        activation = config.text(self.activation_key, self.activations[0])
        if activation not in self.activations:
            wanted = self.activations[0]
            raise config.refuse(f"{self.activation_key} {activation!r} is not supported; only {wanted} is")
        if self.heads % self.kv_heads:
            raise config.refuse(f"{self.heads} attention heads do not divide among {self.kv_heads} key-value heads")
        if self.head_dim % 2 or int(self.head_dim * self.rope.partial) % 2:
            raise config.refuse(f"head_dim {self.head_dim} must be even for rotary embeddings, its rotated part too")
        self._check_factors(int(self.head_dim * self.rope.partial) // 2)
        # A window as long as the longest sequence hides nothing.
        self.windows = [window if window < spec.context else 0 for window in self.layer_windows()]
        self.windows += [0] * self.drafts

    def _check_factors(self, count: int) -> None:
        for key in ("factors", "short_factor", "long_factor"):
            given = self.rope.parameters.get(key)
            if isinstance(given, list) and len(given) != count:
                raise self.config.refuse(f"rope scaling has {len(given)} numbers of {key}; this model needs {count}")

    @property
    def inner_key(self) -> str:
        """The key of the feed-forward layers' inner units."""
        return "intermediate_size"

    @property
    def default_head_dim(self) -> int:
        return self.usual_head_dim or self.hidden // self.heads

    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output projection has one."""
        bias = self.config.flag("attention_bias")
        return bias, bias

    def read_rope(self) -> RopeSpec:
        return read_rope(
            self.config,
            context=self.spec.context,
            default_theta=self.theta,
            partial=self.rope_share is not None,
            default_partial=self.rope_share or 1.0,
        )

    def layer_windows(self) -> list[int]:
        """How many positions each layer's queries see, their own included; 0: all. Raises `CheckpointError` where
        `config.json` asks for what this architecture doesn't have."""
        kinds = self.config.values.get("layer_types")
        others = {str(kind) for kind in kinds if kind != "full_attention"} if isinstance(kinds, list) else set()
        if others:
            raise self.config.refuse(f"{', '.join(sorted(others))} layers are not supported; only full attention is")
        return [0] * self.layers

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        counts = Counter(self.place(number).pool for number in range(self.kept_layers))
        pools = []
        for name, layers in sorted(counts.items()):
            buffers = kv_buffers(layers, self.kv_heads, self.head_dim, options.dtype, options.shard, options.kv_codes)
            kind = PoolKind.WINDOW if name == WINDOW_POOL else PoolKind.FULL
            pools.append(PoolSpec(name, buffers, kind, max(self.windows) if name == WINDOW_POOL else 0))
        return tuple(pools)

    def places(self, number: int) -> tuple[LayerPlace, ...]:
        return (self.place(number),)

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
            self.rope_table(number, weights),
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bias=self.attention_bias,
            out_bias=self.out_bias,
            layout=self.layout,
            qk_norm=self.qk_norms(),
            scale=self.scale(),
            window=self.windows[number],
            softcap=self.softcap,
            query_factors=self.query_factors,
        )

    def rope_of(self, number: int) -> RopeSpec | None:
        """The rope of layer `number`; None: it has none."""
        return self.rope

    def qk_norms(self) -> QkNorm | None:
        return QkNorm(self.eps) if self.qk_norm else None

    def scale(self) -> float:
        """The factor on attention scores."""
        return float(self.head_dim**-0.5)

    def mlp_weights(self, weights: Weights) -> Weights:
        """A layer's tensors below its feed-forward layer's prefix."""
        return weights.scope("mlp.")

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        return GatedMlp(weights, self.hidden, self.inner, bias=self.mlp_bias, fused=self.fused_mlp)

    def rope_table(self, number: int, weights: Weights) -> RopeTable | None:
        """The table of angles of layer `number`, which all layers with the same rope share."""
        rope = self.rope_of(number)
        if rope is None:
            return None
        dim = int(self.head_dim * rope.partial)
        return weights.once(f"rope {rope}", lambda: RopeTable(rope, dim, weights.dtype, weights.device))


class Mistral(Llama):
    """``MistralForCausalLM``, and the text of ``Mistral3ForConditionalGeneration``: Llama without biases, and in its
    first versions with a sliding window in all layers."""

    def biases(self) -> tuple[bool, bool]:
        return False, False

    def layer_windows(self) -> list[int]:
        return whole_window(self.config, self.layers)
