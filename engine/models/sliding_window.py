"""The base of models with sliding windows: two kinds of layers, and a pool for each.

Layers of kind ``full_attention`` see all positions and keep their state in the full pool. Layers of kind
``sliding_attention`` see the last `sliding_window` positions, their own included, and keep their state in the window
pool. The kinds may differ in heads and in rope. Layers at the end that share keys and values keep none: they read the
ones of the last layer of their kind that keeps any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolKind, PoolSpec
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.checkpoint.rope_spec import RopeSpec
from twinpool.engine.layers.decoder import LayerPlace
from twinpool.engine.layers.mixers.head_attention import kv_buffers
from twinpool.engine.layers.rope import RopeTable
from twinpool.engine.models.model_base import FULL_POOL, WINDOW_POOL, Model, StateOptions
from twinpool.engine.tensors.weight_loader import Weights

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerKind:
    """The numbers that all layers of one kind have in common."""

    name: str
    window: int
    """How many positions a query sees, its own included; 0: all."""
    kv_heads: int
    head_dim: int
    rope: RopeSpec

    @property
    def pool(self) -> str:
        return WINDOW_POOL if self.window else FULL_POOL

    def rope_table(self, weights: Weights) -> RopeTable:
        """The table of angles that all layers of this kind share."""
        make = lambda: RopeTable(self.rope, self.head_dim, weights.dtype, weights.device)  # noqa: E731
        return weights.once(f"rope of {self.name}", make)


class WindowModel(Model):
    """A model whose layers are of two kinds; the last `shared` ones share keys and values."""

    def __init__(self, spec: ModelSpec, pattern: int, shared: int = 0) -> None:
        """`pattern`: every `pattern`-th layer has full attention, where the configuration doesn't say otherwise."""
        super().__init__(spec)
        config = spec.config
        self.heads = config.size("num_attention_heads")
        self.names = layer_names(config, self.layers, pattern)
        self.owners = self.layers - shared
        if FULL not in self.names[: self.owners]:
            raise config.refuse("no layer keeps full attention; models of sliding windows alone are not supported")
        if not set(self.names) <= set(self.names[: self.owners]):
            raise config.refuse(f"num_kv_shared_layers {shared} leaves no layer to share the keys of")
        self.kinds = {name: self.kind(name) for name in sorted(set(self.names))}
        for kind in self.kinds.values():
            if self.heads % kind.kv_heads:
                raise config.refuse(f"{self.heads} attention heads do not divide among {kind.kv_heads} key-value heads")
            if kind.head_dim % 2:
                raise config.refuse(f"head_dim {kind.head_dim} must be even for rotary embeddings")

    def kind(self, name: str) -> LayerKind:
        """The numbers of the kind of layers called `name`."""
        raise NotImplementedError

    def window_of(self, name: str) -> int:
        return self.config.size("sliding_window") if name == SLIDING else 0

    def place(self, number: int) -> LayerPlace:
        """The place of the keys and values that layer `number` reads; a layer that shares them has their owner's."""
        name = self.names[number]
        owner = number if number < self.owners else max(i for i in range(self.owners) if self.names[i] == name)
        return LayerPlace(self.kinds[name].pool, self.names[:owner].count(name))

    def places(self, number: int) -> tuple[LayerPlace, ...]:
        return (self.place(number),) if number < self.owners else ()

    def undivided(self, stage: range) -> str:
        for number in range(max(stage.start, self.owners), stage.stop):
            owner = max(i for i in range(self.owners) if self.names[i] == self.names[number])
            if owner < stage.start:
                return f"layer {number} reads the keys of layer {owner}, which would be in another stage"
        return ""

    def pools(self, options: StateOptions) -> tuple[PoolSpec, ...]:
        pools = []
        for name in (name for name in (FULL, SLIDING) if name in self.kinds):
            kind, owners = self.kinds[name], self.names[: self.owners].count(name)
            buffers: tuple[BufferSpec, ...] = kv_buffers(
                owners, kind.kv_heads, kind.head_dim, options.dtype, options.shard, options.kv_codes
            )
            pools.append(PoolSpec(kind.pool, buffers, PoolKind.WINDOW if kind.window else PoolKind.FULL, kind.window))
        return tuple(pools)


def layer_names(config: JsonFields, layers: int, pattern: int) -> list[str]:
    """Read the kind of each layer: as listed, or every `sliding_window_pattern`-th (else `pattern`-th) is full."""
    pattern = config.size("sliding_window_pattern", pattern)
    default = [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    return config.words("layer_types", layers, (FULL, SLIDING), default)


def given_window(config: JsonFields, usual: int = 4096) -> int:
    """The positions that `sliding_window` says; 0 where it is null, and `usual` where it isn't there."""
    if "sliding_window" in config.nulls or not (usual or "sliding_window" in config):
        return 0
    return config.size("sliding_window", usual)


def qwen_windows(config: JsonFields, layers: int, *, alternating: bool = False) -> list[int]:
    """The window of each layer by the keys of Qwen2 and Qwen3, 0 for none: with `use_sliding_window` those that
    `layer_types` says, or those from `max_window_layers` on; `alternating`: every second one before it, from the first
    on (Qwen2-MoE's). Raises `CheckpointError`."""
    window = given_window(config) if config.flag("use_sliding_window") else 0
    first = config.count("max_window_layers", 28)
    sees = [number % 2 == 0 and number < first if alternating else number >= first for number in range(layers)]
    usual = [SLIDING if window and has else FULL for has in sees]
    names = config.words("layer_types", layers, (FULL, SLIDING), usual)
    if SLIDING in names and not window:
        raise config.refuse(f"layer_types has {SLIDING} layers, but use_sliding_window or sliding_window says none")
    return [window if name == SLIDING else 0 for name in names]


def whole_window(config: JsonFields, layers: int, *, used: bool = True, usual: int = 4096) -> list[int]:
    """The window of each layer of an architecture whose layers all have the same, 0 for none. Raises `CheckpointError`
    where `layer_types`, by which transformers' cache goes, says something else."""
    window = given_window(config, usual) if used else 0
    kinds = [SLIDING if window else FULL] * layers
    if config.words("layer_types", layers, (FULL, SLIDING), kinds) != kinds:
        raise config.refuse(f"layer_types must be {kinds[0]} for all layers in this architecture")
    return [window] * layers


def rope_by_kind(config: JsonFields, name: str) -> Mapping[str, object] | None:
    """The part of `rope_parameters` for one kind of layers; None where `rope_parameters` isn't divided by kind."""
    found = config.table("rope_parameters").get(name)
    return found if isinstance(found, Mapping) else None
