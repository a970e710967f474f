"""Qwen2 and Qwen3, dense and with experts: in the latter all or some feed-forward layers are mixtures.

The text of Qwen2-VL, Qwen2.5-VL and Qwen3-VL is one of them as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSpec
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import RopeSpec, picture_axes, read_rope
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
from twinpool.engine.layers.mlp import GatedMlp, GatedShared, MixtureOfExperts
from twinpool.engine.layers.moe.experts import ExpertReader, ExpertSizes, SoftmaxRouter, plain_expert, transposed_expert
from twinpool.engine.layers.rope import RopeTable
from twinpool.engine.models.llama import Llama
from twinpool.engine.models.model_base import FULL_POOL, STATE_POOL, Model, MtpNames, StateOptions
from twinpool.engine.models.sliding_window import qwen_windows, whole_window
from twinpool.engine.tensors.weight_loader import Weights


class Qwen2(Llama):
    """``Qwen2ForCausalLM``"""

    def biases(self) -> tuple[bool, bool]:
        return True, False

    def layer_windows(self) -> list[int]:
        return qwen_windows(self.config, self.layers)


def _turned(rope: RopeSpec, spec: ModelSpec, rope_dim: int, usual: Sequence[int], *, interleaved: bool) -> RopeSpec:
    """The rope of a text in which positions of pictures are turned by three axes. Of text alone all three are one, so
    a checkpoint whose pictures aren't taken needs none. `usual`: how many frequencies turn in time, by row and by
    column, where `config.json` doesn't say. Raises `CheckpointError`."""
    if spec.pictures is None:
        return rope
    config = spec.config
    raw = config.table("rope_scaling") or config.table("rope_parameters")
    given = raw.get("mrope_section", usual)
    if not isinstance(given, list | tuple) or [type(one) for one in given] != [int] * 3 or min(given) < 0:
        raise config.refuse(f"mrope_section must be three whole numbers, got {given!r}")
    if sum(given) != rope_dim // 2:
        raise config.refuse(f"mrope_section {list(given)} must add up to half of the {rope_dim} dimensions that turn")
    return replace(rope, axes=picture_axes(given, interleaved=interleaved))


class _Turned(Llama):
    """A text in which positions of pictures are turned by three axes."""

    sections: tuple[int, ...]
    interleaved: bool

    def read_rope(self) -> RopeSpec:
        return _turned(super().read_rope(), self.spec, self.head_dim, self.sections, interleaved=self.interleaved)


class Qwen2VL(_Turned, Qwen2):
    """The text of ``Qwen2VLForConditionalGeneration`` and ``Qwen2_5_VLForConditionalGeneration``."""

    sections, interleaved = (16, 24, 24), False


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
    """``Qwen3ForCausalLM``: Llama with norms of queries and keys by head."""

    qk_norm = True

    @property
    def default_head_dim(self) -> int:
        return 128

    def layer_windows(self) -> list[int]:
        return qwen_windows(self.config, self.layers)


class Qwen3VL(_Turned, Qwen3):
    """The text of ``Qwen3VLForConditionalGeneration``."""

    sections, interleaved = (24, 20, 20), True


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


class Qwen3VLMoe(_Turned, Qwen3Moe):
    """The text of ``Qwen3VLMoeForConditionalGeneration``: the weights of chosen experts always add up to 1, and
    published experts are transposed."""

    sections, interleaved = (24, 20, 20), True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.mixture = replace(self.mixture, normalise=True, read=transposed_expert)


_KINDS = ("linear_attention", "full_attention")


class Qwen3Next(Model):
    """``Qwen3NextForCausalLM``. The layer that predicts further tokens has full attention, and experts where the model
    has any."""

    mtp = MtpNames("mtp.", "layers.0.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    projection: Projection = staticmethod(grouped)

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self.heads = config.size("num_attention_heads")
        self.kv_heads = config.size("num_key_value_heads", self.heads)
        self.head_dim = config.size("head_dim", 256)
        self.bias = config.flag("attention_bias")
        self.rope = self.read_rope()
        self.rope_dim = int(self.head_dim * self.rope.partial)
        every = config.size("full_attention_interval", 4)
        usual = [_KINDS[(i + 1) % every == 0] for i in range(self.layers)]
        self.kinds = config.words("layer_types", self.layers, _KINDS, usual)
        if self.drafts:
            self.kinds = [*self.kinds, "full_attention"]
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
            if self.drafts:
                self.mixture = replace(self.mixture, layers=self.mixture.layers | {self.layers})
        self._refuse()

    def read_rope(self) -> RopeSpec:
        return read_rope(self.config, partial=True, default_partial=0.25, context=self.spec.context)

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

    def places(self, number: int) -> tuple[LayerPlace, ...]:
        kind = self.kinds[number]
        return (LayerPlace(STATE_POOL if kind == "linear_attention" else FULL_POOL, self._count(kind, number)),)

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

    def read_rope(self) -> RopeSpec:
        rope = super().read_rope()
        return _turned(rope, self.spec, int(self.head_dim * rope.partial), (11, 11, 10), interleaved=True)
