"""Qwen2 and Qwen3, dense and with experts: in the latter all or some feed-forward layers are mixtures.

The text of Qwen2-VL, Qwen2.5-VL and Qwen3-VL is one of them as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.engine.layers.decoder import Sublayer
from twinpool.engine.layers.mlp import GatedMlp, GatedShared, MixtureOfExperts
from twinpool.engine.layers.moe.experts import ExpertReader, ExpertSizes, SoftmaxRouter, plain_expert, transposed_expert
from twinpool.engine.models.llama import Llama
from twinpool.engine.models.sliding_window import qwen_windows, whole_window
from twinpool.engine.tensors.weight_loader import Weights


class Qwen2(Llama):
    """``Qwen2ForCausalLM``"""

    def biases(self) -> tuple[bool, bool]:
        return True, False

    def layer_windows(self) -> list[int]:
        return qwen_windows(self.config, self.layers)


class Qwen2Moe(Qwen2):
    """``Qwen2MoeForCausalLM``: each mixture has a shared expert behind a gate."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.mixture = QwenMixture.of(self.config, self.hidden, self.layers, top_k=4, normalise=False)

    def biases(self) -> tuple[bool, bool]:
        return self.config.flag("qkv_bias", True), False

    def layer_windows(self) -> list[int]:
        return qwen_windows(self.config, self.layers, alternating=True)

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        if number not in self.mixture.layers:
            return super().mlp(number, weights)
        inner = self.config.size("shared_expert_intermediate_size")
        shared = GatedMlp(weights.scope("shared_expert."), self.hidden, inner)
        return self.mixture.layer(weights, GatedShared(weights, self.hidden, shared))


class Qwen3(Llama):
    """``Qwen3ForCausalLM``: Llama with norms of queries and keys by head. And the text of
    ``Qwen3VLForConditionalGeneration``."""

    qk_norm = True

    @property
    def default_head_dim(self) -> int:
        return 128

    def layer_windows(self) -> list[int]:
        return qwen_windows(self.config, self.layers)


@dataclass(frozen=True)
class QwenMixture:
    """The mixtures of a model with experts, by Qwen's keys."""

    layers: frozenset[int]
    """The numbers of the layers that are mixtures."""
    sizes: ExpertSizes
    top_k: int
    normalise: bool
    read: ExpertReader = plain_expert

    @classmethod
    def of(cls, config: JsonFields, hidden: int, layers: int, *, top_k: int | None, normalise: bool) -> QwenMixture:
        """Read a configuration; `top_k` and `normalise` count where it says nothing. Raises `CheckpointError`."""
        step, plain = config.size("decoder_sparse_step", 1), config.values.get("mlp_only_layers", [])
        if not isinstance(plain, list):
            raise config.refuse(f"mlp_only_layers must be a list of layer numbers, got {plain!r}")
        sparse = frozenset(layer for layer in range(layers) if layer not in plain and (layer + 1) % step == 0)
        experts = config.size("num_local_experts" if "num_local_experts" in config else "num_experts")
        sizes = ExpertSizes(experts, hidden, config.size("moe_intermediate_size"))
        chosen = sizes.top_k(config, default=top_k) if sparse else 0
        return cls(sparse, sizes, chosen, config.flag("norm_topk_prob", normalise))

    def layer(self, weights: Weights, shared: Sublayer | None = None) -> MixtureOfExperts:
        router = SoftmaxRouter(weights, self.sizes, self.top_k, normalise=self.normalise)
        return MixtureOfExperts(weights, router, self.sizes, read=self.read, shared=shared)


class Qwen3Moe(Qwen3):
    """``Qwen3MoeForCausalLM``"""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.mixture = QwenMixture.of(self.config, self.hidden, self.layers, top_k=8, normalise=False)

    @property
    def default_head_dim(self) -> int:
        return self.hidden // self.heads

    def layer_windows(self) -> list[int]:
        """One window for all layers: this architecture knows neither `max_window_layers` nor `layer_types`."""
        return whole_window(self.config, self.layers, used=self.config.flag("use_sliding_window"))

    def mlp(self, number: int, weights: Weights) -> Sublayer:
        return self.mixture.layer(weights) if number in self.mixture.layers else super().mlp(number, weights)


class Qwen3VLMoe(Qwen3Moe):
    """The text of ``Qwen3VLMoeForConditionalGeneration``: the weights of chosen experts always add up to 1, and
    published experts are transposed."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.mixture = replace(self.mixture, normalise=True, read=transposed_expert)
