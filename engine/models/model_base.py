"""The base class of models: a model's numbers, the state that it keeps, and its construction from a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolSetSpec, PoolSpec
from twinpool.contracts.checkpoint.model_spec import MTP, ModelSpec
from twinpool.contracts.checkpoint.picture_spec import PictureSpec
from twinpool.contracts.errors import ConfigError
from twinpool.engine.layers.decoder import (
    FEATURES,
    SANDWICH,
    Decoder,
    DenseLayer,
    DraftLayer,
    Layer,
    LayerPlace,
    Norm,
    NormedLayer,
    PreNormLayer,
    Stage,
    Sublayer,
    unchanged,
)
from twinpool.engine.layers.draft_layers import MtpLayer
from twinpool.engine.layers.gemma_towers import Gemma4Tower, SiglipTower
from twinpool.engine.layers.norm import rms_norm
from twinpool.engine.layers.picture_tower import PictureTower
from twinpool.engine.layers.pixtral_qwen_towers import QWEN_TOWERS, PixtralTower, QwenTower
from twinpool.engine.models.eagle3 import Eagle3
from twinpool.engine.tensors.shard import WHOLE, Shard
from twinpool.engine.tensors.weight_loader import Weights

FULL_POOL = "full"
WINDOW_POOL = "window"
STATE_POOL = "state"
_TOWERS: dict[str, Callable[[Weights, PictureSpec, int, float], PictureTower | None]] = {
    "pixtral": PixtralTower.read,
    "siglip": SiglipTower.read,
    "gemma4": Gemma4Tower.read,
    **dict.fromkeys(QWEN_TOWERS, QwenTower.read),
}
"""What reads a checkpoint's tower, by the family of its `PictureSpec`."""


@dataclass(frozen=True, slots=True)
class StateOptions:
    """The choices about a model's state: dtype, page size, and this rank's shard."""

    dtype: torch.dtype
    """The dtype of keys, values and latents in pages."""
    page_tokens: int
    shard: Shard = WHOLE
    index_float8: bool = False
    """Whether index keys are kept as float8 with a scale a token, not in `dtype`."""
    kv_codes: torch.dtype | None = None
    """The dtype that keys, values and latents are quantised to (`engine.attention.kv_quantization`); None: `dtype`."""


@dataclass(frozen=True)
class MtpNames:
    """The names of the layer that predicts further tokens, by default DeepSeek's."""

    below: str = "model.layers.{}."
    """What all of them begin with, with the number of the model's layers in place of {}."""
    layer: str = ""
    """What those of the layer itself begin with, below that."""
    joined: str = "eh_proj"
    token_norm: str = "enorm"
    feature_norm: str = "hnorm"
    norm: str = "shared_head.norm"


class ShapesAlone(TorchFunctionMode):
    """What building a model computes of tensors on the meta device, by the shapes of the results. Torch's own ways of
    that are in Python, and load its compiler first: 1.4 s of a processor in every `serve` and every worker."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat and args[0][0].is_meta and not kwargs:
            parts, dim = args[0], (args[1] if len(args) > 1 else 0)
            shape = list(parts[0].shape)
            shape[dim] = sum(part.shape[dim] for part in parts)
            return parts[0].new_empty(shape)
        alone = not any(isinstance(other, torch.Tensor) for other in args[1:])
        if func in _BY_ELEMENT and args[0].is_meta and args[0].is_floating_point() and alone:
            return args[0].new_empty(args[0].shape)
        return func(*args, **kwargs)


_BY_ELEMENT = {getattr(torch.Tensor, name) for name in ("exp", "neg", "__neg__", "add", "__add__", "mul", "__mul__")}


class Model(ABC):
    """One architecture with the numbers of one checkpoint. `__init__` raises `CheckpointError` for invalid ones."""

    embed_name, norm_name = "embed_tokens", "norm"
    eps_key, usual_eps = "rms_norm_eps", 1e-6
    ties = False
    """Whether the head is the embedding where `config.json` doesn't say."""
    head_bias = False
    mtp: MtpNames | None = None
    """Where a checkpoint has the layer that predicts further tokens; None: the architecture has none that is known
    here."""

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        self.spec, self.config = spec, config
        self.hidden = config.size("hidden_size")
        self.layers = spec.layers
        self.eps = config.number(self.eps_key, self.usual_eps)
        self.tied = config.flag("tie_word_embeddings", self.ties)
        self.drafts = spec.draft_model == MTP
        """Whether the layer that predicts further tokens is used."""
        if self.drafts and self.mtp is None:
            raise config.refuse(
                f"engine.draft_model={spec.draft_model}: no layer that predicts further tokens is known of "
                f"{spec.architecture}; leave it empty"
            )
        self.eagle = Eagle3(spec, spec.draft_head, self.hidden) if spec.draft_head is not None else None

    @abstractmethod
    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        """The pools of the model's state, as one rank holds them; exactly one is full."""

    @abstractmethod
    def layer(self, number: int, weights: Weights) -> Layer:
        """Build layer `number`, whose tensors are all below `weights`."""

    @property
    def kept_layers(self) -> int:
        """How many layers keep state as those of the model do: all of these, and the draft layer if there is one."""
        return self.layers + self.drafts

    def places(self, number: int) -> tuple[LayerPlace, ...]:
        """Where layer `number` keeps its state. A model that doesn't say can't be divided into stages."""
        return ()

    def depths(self, pool: str, buffer: str) -> tuple[int, ...]:
        """The layers, ascending, that keep their state in a buffer."""
        return tuple(n for n in range(self.layers) if any(place.pool == pool for place in self.places(n)))

    def undivided(self, stage: range) -> str:
        """Why the layers of `stage` can't be computed apart from those before it, in words; empty where they can."""
        return ""

    def _divided(self, spec: PoolSetSpec, shard: Shard) -> PoolSetSpec:
        """The pool set of the shard's stage. Raises `ConfigError` where there is no such stage."""
        if any(self.places(number) for number in range(self.layers)):
            pools = [
                replace(p, buffers=tuple(replace(b, depths=self.depths(p.name, b.name)) for b in p.buffers))
                for p in spec.pools
            ]
            spec = replace(spec, pools=tuple(pools), depth=self.layers)
        reason = self.undivided(shard.layers(self.layers)) if shard.stages > 1 else ""
        if reason:
            raise ConfigError(reason)
        return spec.staged(shard.stage, shard.stages)

    def pool_set(self, options: StateOptions) -> PoolSetSpec:
        """The pool set of one rank. Raises `ConfigError` where the model can't be divided so."""
        spec = PoolSetSpec(options.page_tokens, self.pools(options))
        if self.eagle is None and not self.drafts:
            return self._divided(spec, options.shard)
        if options.shard.stages > 1:
            raise ConfigError("what drafts can't be divided into stages")
        if self.eagle is not None:
            more = self.eagle.buffers(options.dtype, options.shard, options.kv_codes)
        else:
            more = (BufferSpec(FEATURES, 1, (self.hidden,), options.dtype),)
        full = replace(spec.full, buffers=(*spec.full.buffers, *more))
        return replace(spec, pools=tuple(full if pool is spec.full else pool for pool in spec.pools))

    def pre_norm(self, weights: Weights, mixer: Sublayer, mlp: Sublayer) -> Layer:
        """Build a pre-norm layer, whose norms have the names that most models use."""
        return PreNormLayer(
            self.norm_weight(weights, "input_layernorm.weight", self.hidden),
            mixer,
            self.norm_weight(weights, "post_attention_layernorm.weight", self.hidden),
            mlp,
            self.eps,
        )

    def normed(self, weights: Weights, mixer: Sublayer, mlp: Sublayer, names: Sequence[str] = SANDWICH) -> NormedLayer:
        """Build a layer with norms before and behind each of its parts, of these names: Gemma's without any; an empty
        one: there is none."""
        first, second, third, fourth = (self.norm(weights, name) if name else unchanged for name in names)
        return NormedLayer(first, mixer, second, third, mlp, fourth)

    def build(self, weights: Weights) -> Decoder:
        """Build the model, or the stage that `weights` are of. Raises `CheckpointError` for a tensor that is missing or
        misshapen."""
        shard = weights.shard
        stage = Stage(shard.stage, shard.stages)
        turned = self.spec.pictures is not None and self.spec.pictures.turned
        layers = [self.layer(i, weights.scope(f"model.layers.{i}.")) for i in shard.layers(self.layers)]
        if stage.number:
            embed_0h = torch.empty(0, self.hidden, dtype=weights.dtype, device=weights.device)
            adapted = dict(weights.adapted)
            return Decoder(embed_0h, layers, unchanged, None, turned=turned, adapted=adapted, stage=stage)
        embed_name, head_name = f"model.{self.embed_name}.weight", "lm_head.weight"
        only_head = self.tied and weights.has(head_name) and not weights.has(embed_name)
        read = head_name if only_head else embed_name
        table = weights.weight(read.removesuffix(".weight"), self.spec.vocab_size, self.hidden)
        norm = self.norm(weights, f"model.{self.norm_name}")
        # A head of its own counts, whatever the configuration says, unless it is a copy.
        own = weights.has(head_name) and not only_head
        tied = self.tied and not (own and not weights.same(head_name, embed_name))
        if classes := len(self.spec.pooling.labels):
            head, tied = weights.linear({"score": classes}, self.hidden), False
            if self.spec.draft_model:
                raise self.config.refuse("it tells classes and generates nothing: leave engine.draft_model empty")
        elif tied:
            head = weights.tied_head(table)
        else:
            head = weights.linear({"lm_head": self.spec.vocab_size}, self.hidden, bias=self.head_bias)
        embed = table if isinstance(table, Tensor) else head if tied else weights.made(table)
        adapted = dict(weights.adapted)  # Before what drafts: adapters add nothing to that.
        draft: DraftLayer | None = None
        if self.eagle is not None:
            draft = self.eagle.build(weights.of(self.eagle.spec), FULL_POOL)
        elif self.drafts:
            draft = self.draft_layer(weights)
        tower: PictureTower | None = None
        if self.spec.pictures is not None and draft is None:  # A draft layer would take keys of pictures for tokens.
            pictures = self.spec.pictures
            tower = _TOWERS[pictures.family](weights, pictures, self.hidden, self.eps)
        return Decoder(
            embed, layers, norm, head, draft=draft, tower=tower, turned=turned, adapted=adapted, stage=stage,
            dense=self.dense_modules(weights),
        )  # fmt: skip

    def build_dry(self, weights: Weights) -> Decoder:
        """Build the model of weights that are shapes alone (`Weights.dry`), which says what it needs of its checkpoint.
        Raises `CheckpointError`."""
        with ShapesAlone():
            return self.build(weights)

    def dense_modules(self, weights: Weights) -> list[DenseLayer]:
        """Build the modules that embeddings go through, in float32 whatever the model is computed in."""
        layers = []
        for module in self.spec.pooling.dense:
            own = weights.of(replace(self.spec, headers=module.headers))
            weight_nk = own.tensor("linear.weight", module.outputs, module.inputs, dtype=torch.float32)
            bias_n = own.tensor("linear.bias", module.outputs, dtype=torch.float32) if module.bias else None
            layers.append(DenseLayer(own.made(weight_nk, bias_n=bias_n), module.tanh))
        return layers

    def draft_layer(self, whole: Weights) -> DraftLayer:
        """Build the layer that predicts further tokens, from the `whole` checkpoint. It drafts in steps of its own,
        which workers that share their experts don't take together: each has its experts."""
        assert self.mtp is not None, "a model without one was refused"
        names, hidden, vocab = self.mtp, self.hidden, self.spec.vocab_size
        below = names.below.format(self.layers)
        weights = whole.unshared().scope(below)
        if not weights.has(f"{names.joined}.weight"):
            raise self.config.refuse(
                f"engine.draft_model={self.spec.draft_model}: the checkpoint has no layer that predicts further tokens "
                f"({below}{names.joined}.weight); leave it empty"
            )
        own_head, own_embed = "shared_head.head.weight", "embed_tokens.weight"
        head = embed = None
        # Checkpoints have copies of the model's own; where they differ, the layer was trained with its own.
        if weights.has(own_head) and not whole.same(f"{below}{own_head}", "lm_head.weight"):
            head = weights.linear({"shared_head.head": vocab}, hidden)
        if weights.has(own_embed) and not whole.same(f"{below}{own_embed}", f"model.{self.embed_name}.weight"):
            embed = weights.tensor(own_embed, vocab, hidden)
        return MtpLayer(
            FULL_POOL,
            head,
            embed,
            vocab_v=None,
            taps=(),
            token_norm=self.norm(weights, names.token_norm),
            feature_norm=self.norm(weights, names.feature_norm),
            joined=weights.linear({names.joined: hidden}, 2 * hidden),
            layer=self.layer(self.layers, weights.scope(names.layer)),
            norm=self.norm(weights, names.norm),
        )

    def norm_weight(self, weights: Weights, name: str, size: int) -> Tensor:
        """Read a norm's weight, in the dtype and offset that `rms_norm` takes."""
        return weights.tensor(name, size)

    def norm(self, weights: Weights, name: str) -> Norm:
        """Read the norm `name` of the residual stream."""
        return partial(rms_norm, weight=self.norm_weight(weights, f"{name}.weight", self.hidden), eps=self.eps)
