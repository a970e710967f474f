"""The write checker: a copy of watched pools, to find operations that write pages that they didn't declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from twinpool.cache.device.device_port import DeviceOp
from twinpool.contracts.errors import UnorderedAccess


@dataclass(frozen=True)
class _Watched:
    place: str
    pool: str
    layers: Sequence[Mapping[str, torch.Tensor]]
    copies: list[dict[str, torch.Tensor]]


class WriteChecker:
    """Remembers the bytes of watched pools; `compare` blames an operation for what changed since."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []

    def watch(self, place: str, pool: str, layers: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Watch each layer's buffers, [pages, ...], from now on."""
        copies = [{name: view.clone() for name, view in buffers.items()} for buffers in layers]
        self._watched.append(_Watched(place, pool, layers, copies))

    def accept_all(self) -> None:
        """Take the present bytes of all watched pools as right."""
        for watched in self._watched:
            for buffers, copies in zip(watched.layers, watched.copies, strict=True):
                for name, view in buffers.items():
                    copies[name].copy_(view)

    def compare(self, op: DeviceOp) -> None:
        """Raises `UnorderedAccess` when a page changed in a layer that `op` doesn't declare as written."""
        for watched in self._watched:
            spans = [s for s in op.writes if (s.place, s.pool) == (watched.place, watched.pool)]
            for number, (buffers, copies) in enumerate(zip(watched.layers, watched.copies, strict=True)):
                allowed = {page for s in spans if s.layers is None or number in s.layers for page in s.pages}
                for name, view in buffers.items():
                    wrong = [page for page in _changed(view, copies[name]) if page not in allowed]
                    if wrong:
                        raise UnorderedAccess(
                            f"{op.name} changed {name} in {watched.place} {watched.pool} page {wrong[0]}, layer "
                            f"{number}, which it doesn't declare as written"
                        )


def _changed(now: torch.Tensor, before: torch.Tensor) -> list[int]:
    """Pages whose bytes differ."""
    a, b = (t.contiguous().view(torch.uint8).flatten(1) for t in (now, before))
    return [int(page) for page in (a != b).any(1).nonzero().flatten()]
