"""Bytes of torch tensors that live at once while something runs, counted operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that follows all memory which operations within it allocate. What an operation takes and gives back by
    itself isn't seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes that live now."""
        for key in [key for key, (storage, _) in self._live.items() if storage.expired()]:  # type: ignore[no-untyped-call]
            del self._live[key]
        return sum(nbytes for _, nbytes in self._live.values())

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given and storage._cdata not in self._live:
                kept = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live[storage._cdata] = (kept, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out


def _storages(values: object) -> list[torch.UntypedStorage]:
    """The memory of all tensors among `values`; weights that oneDNN has packed have none that could be asked for."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_mkldnn]
