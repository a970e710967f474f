"""Qwen3, and Qwen3-MoE, in which all or some feed-forward layers are mixtures of experts."""

from __future__ import annotations

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.engine.layers.decoder import Sublayer
from twinpool.engine.layers.mlp import GatedMlp, MixtureOfExperts
from twinpool.engine.layers.moe.experts import ExpertSizes, SoftmaxRouter
from twinpool.engine.models.llama import Llama
from twinpool.engine.models.sliding_window import qwen_windows, whole_window
from twinpool.engine.tensors.weight_loader import Weights


class Qwen3(Llama):
    """``Qwen3ForCausalLM``: Llama with norms of queries and keys by head. And the text of
    ``Qwen3VLForConditionalGeneration``."""

    qk_norm = True

    @property
    def default_head_dim(self) -> int:
        return 128

    def layer_windows(self) -> list[int]:
        return qwen_windows(self.config, self.layers)


def sparse_layers(config: JsonFields, layers: int) -> frozenset[int]:
    """The numbers of layers that are mixtures, by Qwen's keys `mlp_only_layers` and `decoder_sparse_step`."""
    step, plain = config.size("decoder_sparse_step", 1), config.values.get("mlp_only_layers", [])
    if not isinstance(plain, list):
        raise config.refuse(f"mlp_only_layers must be a list of layer numbers, got {plain!r}")
    return frozenset(layer for layer in range(layers) if layer not in plain and (layer + 1) % step == 0)


class Qwen3Moe(Qwen3):
    """``Qwen3MoeForCausalLM``"""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        experts = config.size("num_local_experts" if "num_local_experts" in config else "num_experts")
        self.sizes = ExpertSizes(experts, self.hidden, config.size("moe_intermediate_size"))
        self.top_k = config.size("num_experts_per_tok", 8)
        self.normalise = config.flag("norm_topk_prob")
        self.sparse = sparse_layers(config, self.layers)
        if self.sparse and self.top_k > self.sizes.experts:
            raise config.refuse(f"num_experts_per_tok {self.top_k} is more than the {self.sizes.experts} experts")

    @property
    def default_head_dim(self) -> int:
        return self.hidden // self.heads

    def layer_windows(self) -> list[int]:
        """One window for all layers: this architecture knows neither `max_window_layers` nor `layer_types`."""
        return whole_window(self.config, self.layers, used=self.config.flag("use_sliding_window"))

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        if number not in self.sparse:
            return GatedMlp(weights, self.hidden, self.inner)
        router = SoftmaxRouter(weights, self.hidden, self.sizes.experts, self.top_k, normalise=self.normalise)
        return MixtureOfExperts(weights, router, self.sizes)
