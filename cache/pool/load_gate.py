"""The gate: the one door to buffers.

A step `enter`s the gate when it is launched and gets a *passage*: the loads that are on their way at that moment, by
layer. It takes a layer's buffers from the passage and nowhere else, so no reader can forget to wait: what is done
with `layer(i)`'s result comes after every load into that layer. The wait is the device's, layer by layer, so that
the loads of later layers go on beside the computation of earlier ones; decode admits a request to a batch only once
all loads of its pages are complete (per request, before the batch). Loads that begin after the launch are none of
its business: they may well wait for it. Addresses are bound once, so captured graphs and registered memory stay
valid for the life of the pool set.

A load stays pending until the host knows that it is complete, not until its first reader has come: a second reader,
on another stream, has its own wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

import torch

from cache.device.device_port import Completion, GatedLoads

LayerBuffers = Mapping[str, torch.Tensor]
"""Buffers of one layer by name, each [pages, page_tokens, *shape] (by token) or [pages or slots, *shape]."""


class GateDoor(Protocol):
    """Where a layer's buffers can be had."""

    def layer(self, layer: int) -> LayerBuffers: ...


class GatePass:
    """One step's way through the gate."""

    def __init__(
        self, gates: GatedLoads, layers: Sequence[LayerBuffers], waits: Mapping[int, Sequence[Completion]]
    ) -> None:
        self.gates = gates
        """What the step promises the device to wait for; goes to `Device.submit`."""
        self._layers = layers
        self._waits = waits

    def layer(self, layer: int) -> LayerBuffers:
        """The buffers of `layer`; what the running operation does with them comes after the loads into it."""
        for load in self._waits.get(layer, ()):
            # One that fails is told of to those who relied on it, before they commit; the others just come after it.
            with suppress(RuntimeError):
                load.order()
        return self._layers[layer]


class LoadGate:
    """Hands out one pool's buffers, layer by layer, after that layer's pending loads."""

    def __init__(self, layers: list[dict[str, torch.Tensor]]) -> None:
        self._layers: list[LayerBuffers] = [MappingProxyType(names) for names in layers]
        self._pending: list[list[Completion]] = [[] for _ in layers]

    def __len__(self) -> int:
        return len(self._layers)

    def expect(self, layer: int, load: Completion) -> None:
        """From now on readers of `layer` come after `load`."""
        self._pending[layer].append(load)

    def pending(self, layer: int) -> tuple[Completion, ...]:
        """The loads that readers of `layer` wait for; those that are complete drop out."""
        self._pending[layer] = [load for load in self._pending[layer] if not load.done]
        return tuple(self._pending[layer])

    def enter(self, pool: str) -> GatePass:
        """The way through, for a step that is being launched; `pool` is the name of this gate's pool."""
        waits = {layer: pending for layer in range(len(self)) if (pending := self.pending(layer))}
        return GatePass({(pool, layer): loads for layer, loads in waits.items()}, self._layers, waits)

    def layer(self, layer: int) -> LayerBuffers:
        """The buffers of `layer` for the host's own use: it waits for the loads."""
        for load in self._pending[layer]:
            load.wait()
        return self._layers[layer]
