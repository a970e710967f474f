"""The gate: the one door to buffers.

The forward pass gets a layer's buffers here and nowhere else, so no reader can forget to wait: `layer(i)` returns
only after every load into that layer has completed (extend); decode admits a request to a batch only once all loads
of its pages have (per request, before the batch). Addresses are bound once, so captured graphs and registered memory
stay valid for the life of the pool set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

LayerBuffers = Mapping[str, torch.Tensor]
"""Buffers of one layer by name, each [pages, page_tokens, *shape]."""


class Gate:
    """Hands out one pool's buffers, layer by layer, after that layer's pending loads."""

    def __init__(self, layers: list[dict[str, torch.Tensor]]) -> None:
        self._layers: list[LayerBuffers] = [MappingProxyType(names) for names in layers]
        self._pending: list[list[Callable[[], None]]] = [[] for _ in layers]

    def __len__(self) -> int:
        return len(self._layers)

    def expect(self, layer: int, wait: Callable[[], None]) -> None:
        """Make the next reader of `layer` call `wait` first (it returns once that load has completed)."""
        self._pending[layer].append(wait)

    def layer(self, layer: int) -> LayerBuffers:
        """The buffers of `layer`, with every load into it complete."""
        pending = self._pending[layer]
        while pending:
            pending.pop(0)()
        return self._layers[layer]
