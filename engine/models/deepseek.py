"""DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash: latent attention; DeepSeek-V3.2 and GLM-5: to positions that an indexer
selects.

A layer that predicts further tokens (``num_nextn_predict_layers``: tensors of layers past the last) is used where
`engine.draft_model` says so: it is like the last of the model's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from twinpool.cache.memory.kv_cache_spec import PoolSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import read_rope
from twinpool.engine.layers.decoder import Layer, LayerPlace, Sublayer
from twinpool.engine.layers.mixers.mla import (
    MLA,
    DSAIndexer,
    IndexShape,
    MLAShape,
    SparseSelector,
    index_buffers,
    latent_buffers,
    shared_selection,
)
from twinpool.engine.layers.mlp import GatedMlp, MixtureOfExperts
from twinpool.engine.layers.moe.experts import CORRECTION, ExpertSizes, RouterRules, ScoreRouter, softmax
from twinpool.engine.layers.rope import RopeTable
from twinpool.engine.models.model_base import FULL_POOL, Model, MtpNames, StateOptions
from twinpool.engine.tensors.weight_loader import Weights


def deepseek_mixture(
    weights: Weights, sizes: ExpertSizes, top_k: int, rules: RouterRules, *, shared: int, correction: str = CORRECTION
) -> MixtureOfExperts:
    """Build a mixture with `shared` experts for every row, by DeepSeek's names."""
    router = ScoreRouter(weights, sizes, top_k, rules, correction=correction)
    always = GatedMlp(weights.scope("shared_experts."), sizes.hidden, shared * sizes.inner) if shared else None
    return MixtureOfExperts(weights, router, sizes, shared=always)


class DeepseekV3(Model):
    """``DeepseekV3ForCausalLM``, and the text of ``KimiK25ForConditionalGeneration``."""

    dense_layers = 3
    """How many layers come before the first mixture, where `config.json` doesn't say."""
    scoring = "sigmoid"
    methods: tuple[str, ...] = ("noaux_tc",)
    mtp = MtpNames()

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.inner = config.size("intermediate_size")
        self.rope = read_rope(config, context=spec.context)
        self.latent = MLAShape(
            hidden=self.hidden,
            heads=config.size("num_attention_heads"),
            q_rank=config.size("q_lora_rank") if "q_lora_rank" in config else None,
            rank=config.size("kv_lora_rank"),
            plain_dim=config.size("qk_nope_head_dim"),
            rope_dim=config.size("qk_rope_head_dim"),
            value_dim=config.size("v_head_dim"),
            scale=self.scale(),
            interleaved=config.flag("rope_interleave", True),
            bias=config.flag("attention_bias"),
        )
        if self.latent.rope_dim % 2:
            raise config.refuse(f"qk_rope_head_dim {self.latent.rope_dim} must be even for rotary embeddings")
        config.text("hidden_act", "silu", choices=("silu",))
        config.text("scoring_func", self.scoring, choices=(self.scoring,))
        self.method = config.text("topk_method", self.methods[0], choices=self.methods)
        if config.size("moe_layer_freq", 1) != 1:
            raise config.refuse("moe_layer_freq other than 1 is not supported")
        dense = min(config.count("first_k_dense_replace", self.dense_layers), self.layers)
        by_number = ["dense"] * dense + ["sparse"] * (self.layers - dense)
        self.mlp_kinds = config.words("mlp_layer_types", self.layers, ("dense", "sparse"), by_number)
        if "sparse" in self.mlp_kinds:
            self.experts = ExpertSizes(
                config.size("n_routed_experts"), self.hidden, config.size("moe_intermediate_size")
            )
            self.top_k = self.experts.top_k(config)
            self.shared = config.count("n_shared_experts", 0)

    def scale(self) -> float:
        """The factor on scores. With yarn, `mscale_all_dim` adds a factor here, besides yarn's own on cos and sin."""
        config = self.config
        scale = float((config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim")) ** -0.5)
        whole = float(cast(float, self.rope.parameters.get("mscale_all_dim", 0)))
        factor = float(cast(float, self.rope.parameters.get("factor", 1)))
        if self.rope.kind != "default" and whole and factor > 1:
            scale *= (0.1 * whole * math.log(factor) + 1.0) ** 2
        return scale

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        return (PoolSpec(FULL_POOL, latent_buffers(self.kept_layers, self.latent, options.dtype, options.kv_codes)),)

    def places(self, number: int) -> tuple[LayerPlace, ...]:
        return (LayerPlace(FULL_POOL, number),)

    def layer(self, number: int, weights: Weights) -> Layer:
        attention = self.attention(number, weights.scope("self_attn."))
        return self.pre_norm(weights, attention, self.mlp(number, weights.scope("mlp.")))

    def attention(self, number: int, weights: Weights) -> MLA:
        selector = self.selector(number, weights.scope("indexer."))
        return MLA(weights, LayerPlace(FULL_POOL, number), self.rope_table(weights), self.latent, selector)

    def selector(self, number: int, weights: Weights) -> SparseSelector | None:
        """The selector of the positions that a layer reads; None: it reads all."""
        return None

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        if self.mlp_kinds[min(number, self.layers - 1)] == "dense":
            return GatedMlp(weights, self.hidden, self.inner)
        return self.mixture(weights)

    def mixture(self, weights: Weights) -> MixtureOfExperts:
        return deepseek_mixture(weights, self.experts, self.top_k, RouterRules.of(self.config), shared=self.shared)

    def rope_table(self, weights: Weights) -> RopeTable:
        """The table of angles that all layers share."""
        make = lambda: RopeTable(self.rope, self.latent.rope_dim, weights.dtype, weights.device)  # noqa: E731
        return weights.once("rope", make)


class Glm4MoeLite(DeepseekV3):
    """``Glm4MoeLiteForCausalLM`` (GLM-4.7-Flash)"""

    dense_layers = 1


class DeepseekV2(DeepseekV3):
    """``DeepseekV2ForCausalLM``: experts are chosen by a softmax, without a correction, whose weights stay as they are
    but for a factor. A group is rated by its best expert."""

    dense_layers = 0
    scoring = "softmax"
    methods = ("greedy", "group_limited_greedy")

    def mixture(self, weights: Weights) -> MixtureOfExperts:
        rules = replace(RouterRules.of(self.config), score=softmax, rated_by=1, normalise=False)
        if self.method == "greedy":
            rules = replace(rules, groups=1, top_groups=1)
        return deepseek_mixture(weights, self.experts, self.top_k, rules, shared=self.shared, correction="")


class DeepseekV32(DeepseekV3):
    """``DeepseekV32ForCausalLM``: each layer reads the positions that its indexer selects."""

    index_interleaved = False

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        if self.latent.q_rank is None:
            raise config.refuse("q_lora_rank is missing: the indexer reads compressed queries")
        self.index = IndexShape(
            hidden=self.hidden,
            q_rank=self.latent.q_rank,
            heads=config.size("index_n_heads"),
            dim=config.size("index_head_dim"),
            rope_dim=self.latent.rope_dim,
            top_k=config.size("index_topk"),
            interleaved=self.index_interleaved,
        )
        if self.index.dim < self.index.rope_dim:
            raise config.refuse(f"index_head_dim {self.index.dim} is less than qk_rope_head_dim {self.index.rope_dim}")
        self.chooses = [*self.indexers(), *([True] * self.drafts)]
        if not self.chooses[0]:
            raise config.refuse("the first layer shares a selection, but there is none before it")

    def indexers(self) -> list[bool]:
        """Whether each layer has an indexer; the others read what the last one before them selected."""
        return [True] * self.layers

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        index = index_buffers(
            sum(self.chooses), self.index, options.dtype, options.page_tokens, float8=options.index_float8
        )
        latents = latent_buffers(self.kept_layers, self.latent, options.dtype, options.kv_codes)
        return (PoolSpec(FULL_POOL, (*latents, *index)),)

    def depths(self, pool: str, buffer: str) -> tuple[int, ...]:
        layers = super().depths(pool, buffer)
        return tuple(n for n in layers if self.chooses[n]) if buffer.startswith("index_") else layers

    def undivided(self, stage: range) -> str:
        if self.chooses[stage.start]:
            return ""
        return f"layer {stage.start} reads the selection of a layer before it, which would be in another stage"

    def selector(self, number: int, weights: Weights) -> SparseSelector:
        if not self.chooses[number]:
            return shared_selection
        place = LayerPlace(FULL_POOL, sum(self.chooses[:number]))
        return DSAIndexer(weights, place, self.rope_table(weights), self.index)


class GlmMoeDsa(DeepseekV32):
    """``GlmMoeDsaForCausalLM`` (GLM-5): some layers share the selection of the last one that has an indexer."""

    index_interleaved = True

    def indexers(self) -> list[bool]:
        config = self.config
        spelled = config.values.get("index_topk_pattern")
        if "indexer_types" in config:
            kinds = config.words("indexer_types", self.layers, ("full", "shared"))
        elif isinstance(spelled, str):
            kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in spelled]
        elif spelled is not None:
            kinds = config.words("index_topk_pattern", self.layers, ("full", "shared"))
        else:
            every, offset = max(config.count("index_topk_freq", 1), 1), config.count("index_skip_topk_offset", 2)
            kinds = ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(self.layers)]
        if len(kinds) != self.layers or not {"full", "shared"}.issuperset(kinds):
            raise config.refuse(f"index_topk_pattern must be {self.layers} letters F or S, got {spelled!r}")
        return [kind == "full" for kind in kinds]
