"""LFM2: short convolutions, with attention in some layers between; dense, or with experts behind some dense layers."""

from __future__ import annotations

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.engine.layers.decoder import Layer, LayerPlace, PreNormLayer, Sublayer
from twinpool.engine.layers.mixers.head_attention import QkNorm, QkvLayout, kv_buffers
from twinpool.engine.layers.mixers.recurrences import ShortConv, short_conv_buffers
from twinpool.engine.layers.mlp import GatedMlp, MixtureOfExperts
from twinpool.engine.layers.moe.experts import ExpertSizes, RouterRules, ScoreRouter
from twinpool.engine.models.llama import Llama
from twinpool.engine.models.model_base import FULL_POOL, STATE_POOL, StateOptions
from twinpool.engine.tensors.weight_loader import Weights

_NAMES = ("w1", "w3", "w2")
_KINDS = ("conv", "full_attention")


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
        return GatedMlp(weights, self.hidden, self.dense_inner, names=_NAMES)


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
