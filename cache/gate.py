"""The gate: the one door to buffers.

The forward pass gets a layer's buffers here and nowhere else, so no reader can forget to wait: what is done with
`layer(i)`'s result comes after every load into that layer. The wait is the device's, layer by layer, so that the
loads of later layers go on beside the computation of earlier ones; decode admits a request to a batch only once all
loads of its pages are complete (per request, before the batch). Addresses are bound once, so captured graphs and
registered memory stay valid for the life of the pool set.

A load stays pending until it is known to be complete, not until its first reader has come: a second reader, on
another stream, has its own wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from cache.device import Completion, Gated

LayerBuffers = Mapping[str, torch.Tensor]
"""Buffers of one layer by name, each [pages, page_tokens, *shape] (by token) or [pages or slots, *shape]."""


class Gate:
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
        """The loads that readers of `layer` wait for."""
        return tuple(self._pending[layer])

    def gates(self, pool: str) -> Gated:
        """All pending loads, as an operation that will read this gate's layers tells them to the device."""
        return {(pool, layer): tuple(loads) for layer, loads in enumerate(self._pending) if loads}

    def layer(self, layer: int) -> LayerBuffers:
        """The buffers of `layer`; what the running operation does with them comes after every load into it."""
        pending = self._pending[layer]
        if pending:
            for load in pending:
                load.order()
            self._pending[layer] = [load for load in pending if not load.done]
        return self._layers[layer]
