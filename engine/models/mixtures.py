"""Models with attention as in Llama and mixtures of experts as feed-forward layers: Mixtral."""

from __future__ import annotations

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.engine.layers.decoder import Sublayer
from twinpool.engine.layers.mlp import MixtureOfExperts
from twinpool.engine.layers.moe.experts import ExpertSizes, SoftmaxRouter
from twinpool.engine.models.llama import Mistral
from twinpool.engine.models.sliding_window import whole_window
from twinpool.engine.tensors.weight_loader import Weights

_PUBLISHED = ("gate.weight", "experts.0.w1.weight")
"""Tensors by which the names of published checkpoints are told from those of transformers 5."""


class Mixtral(Mistral):
    """``MixtralForCausalLM``"""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = self.config
        self.sizes = ExpertSizes(
            config.size("num_local_experts" if "num_local_experts" in config else "num_experts", 8),
            self.hidden,
            self.inner,
        )
        self.top_k = self.sizes.top_k(config, default=2)

    def layer_windows(self) -> list[int]:
        return whole_window(self.config, self.layers, used="sliding_window" in self.config)

    def mlp_weights(self, weights: Weights) -> Weights:
        published = weights.scope("block_sparse_moe.")
        return published if any(published.has(name) for name in _PUBLISHED) else weights.scope("mlp.")

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        router = SoftmaxRouter(weights, self.sizes, self.top_k, normalise=True, rounded=False)
        return MixtureOfExperts(weights, router, self.sizes)
