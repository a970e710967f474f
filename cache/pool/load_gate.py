"""The load gate: the only access to a pool's buffers, which puts readers of a layer behind pending loads into it.

A step enters the gate when it is launched and gets a `GatePass`, with the loads that are pending at that moment, by
layer. The step takes a layer's buffers from the pass and nowhere else, so no reader can forget to wait: what the step
does with `layer(i)`'s result comes after every load into that layer. The device waits, layer by layer, so that the
loads of later layers go on beside the computation of earlier ones; decode admits a request to a batch only once all
loads of its pages are complete (per request, before the batch). The step doesn't wait for loads that begin after its
launch: they may well wait for the step. Addresses are bound once, so captured graphs and registered memory stay valid
for the life of the pool set.

A load stays pending until the host knows that it is complete, not until its first reader has come: a second reader,
on another stream, has its own wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch

from twinpool.cache.device.device_port import Completion, GatedLoads

LayerBuffers = Mapping[str, torch.Tensor]
"""Buffers of one layer by name, each [pages, page_tokens, *shape] (by token) or [pages or slots, *shape]."""


class GateDoor(Protocol):
    """Access to buffers by layer: a step's `GatePass`, or the `LoadGate` for the host's own use."""

    def layer(self, layer: int) -> LayerBuffers: ...


class GatePass:
    """One step's access to a pool's buffers, with the loads that the step has to wait for."""

    def __init__(
        self,
        gates: GatedLoads,
        layers: Sequence[LayerBuffers],
        waits: Mapping[int, Sequence[Completion]],
        opens: Callable[[int], None] | None = None,
    ) -> None:
        """`opens` is called with each layer before the step is given its buffers."""
        self.gates = gates
        """The loads that the step promises to wait for: the `gates` of `Device.submit`."""
        self.opened = 0
        """How many layers were touched so far, from the first on."""
        self._layers = layers
        self._waits = waits
        self._opens = opens

    def layer(self, layer: int) -> LayerBuffers:
        """The buffers of `layer`; what the running operation does from here on comes after the loads into that layer.

        To be called from within the step's operation.
        """
        if self._opens is not None:
            self._opens(layer)
        self.opened = max(self.opened, layer + 1)
        for load in self._waits.get(layer, ()):
            # Requests that rely on a failed load are told before they commit (`LoadBack.poll`); the others go on.
            with suppress(RuntimeError):
                load.order()
        return self._layers[layer]


class LoadGate:
    """Hands out one pool's buffers, layer by layer, after that layer's pending loads."""

    def __init__(self, layers: list[dict[str, torch.Tensor]]) -> None:
        self._layers: list[LayerBuffers] = [MappingProxyType(names) for names in layers]
        self._pending: list[list[Completion]] = [[] for _ in layers]
        self.opened: Callable[[str, int], None] | None = None
        """Called with pool and layer whenever a step that enters from now on takes a layer's buffers; None: nobody
        is."""

    def __len__(self) -> int:
        return len(self._layers)

    def expect(self, layer: int, load: Completion) -> None:
        """Make steps that enter from now on wait for `load` before they read `layer`."""
        self._pending[layer].append(load)

    def pending(self, layer: int) -> tuple[Completion, ...]:
        """The loads into `layer` that aren't known to be complete; complete ones are forgotten."""
        self._pending[layer] = [load for load in self._pending[layer] if not load.done]
        return tuple(self._pending[layer])

    def enter(self, pool: str) -> GatePass:
        """Return the pass of a step that is being launched; `pool` is the name of this gate's pool."""
        waits = {layer: rest for layer, loads in enumerate(self._pending) if loads and (rest := self.pending(layer))}
        opens = None if self.opened is None else partial(self.opened, pool)
        return GatePass({(pool, layer): loads for layer, loads in waits.items()}, self._layers, waits, opens)

    def layer(self, layer: int) -> LayerBuffers:
        """The buffers of `layer` for the host's own use: the host waits for the loads, and gets their errors."""
        for load in self._pending[layer]:
            load.wait()
        return self._layers[layer]
