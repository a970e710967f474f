"""Tensor-parallel groups: sums over ranks within a step, in the order of the ranks, and broadcasts of the leader.

A product over a divided axis leaves each rank with a part of the sum. A library's all-reduce adds parts in an order
that depends on its ring and its chunks, and so on the number of rows; then a row's result would depend on its batch.
So every rank gathers all parts and adds them itself, in the order of the ranks, in float32, rounding once: the same
bits on every rank, for a row in any batch. A gather moves (n-1) parts a rank where a ring moves 2(n-1)/n of one; with
the few ranks of one host, and activations of some rows, latency matters more than these bytes.

When a rank dies, its connections break and the others' collectives end with an error. When a rank is merely silent,
they end at the deadline. Either way the worker ends as a whole.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from contracts.errors import PeerDead


class TensorParallelGroup(Protocol):
    """The ranks of one worker. Each must call the same methods in the same order, with tensors of equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum every rank's `x`: added in the order of the ranks, in float32, rounded once to the dtype of `x`."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, in the order of the ranks."""

    def first(self, x: Tensor) -> Tensor:
        """Return rank 0's `x` on every rank; the others pass a tensor of its shape and dtype."""


class _SingleRank:
    """The group of a worker with one rank."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def first(self, x: Tensor) -> Tensor:
        return x


ALONE: TensorParallelGroup = _SingleRank()


class TorchDistributedGroup:
    """Ranks in processes of their own: over gloo for tensors on a CPU, over NCCL on NVIDIA GPUs. For one thread.

    `store`: where the ranks find each other; it serves this group alone. `host`: the address of this rank's network
    interface, for gloo. The constructor waits up to `deadline_s` seconds for all ranks and raises `PeerDead` when they
    don't come. All methods raise `PeerDead` when a rank is gone, or silent for longer than the deadline.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (a constant)
        host: str = "127.0.0.1",
        deadline_s: float = 30.0,
    ) -> None:
        assert 0 <= rank < size
        self.rank, self.size = rank, size
        self._deadline = timedelta(seconds=deadline_s)
        store.set_timeout(self._deadline)
        try:
            self._group: Any = _group(store, rank, size, device, host, self._deadline)
        except RuntimeError as error:
            raise PeerDead(f"rank {rank} of {size} did not meet the others: {_first_line(error)}") from None

    def sum(self, x: Tensor) -> Tensor:
        first, *others = self.gather(x)
        total = first.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> list[Tensor]:
        raw = x.contiguous().view(torch.uint8)
        parts = [torch.empty_like(raw) for _ in range(self.size)]
        self._run(lambda group: group.allgather([parts], [raw]))
        return [part.view(x.dtype) for part in parts]

    def first(self, x: Tensor) -> Tensor:
        raw = x.clone() if self.rank == 0 else torch.empty_like(x)
        self._run(lambda group: group.broadcast([raw]))
        return raw

    def _run(self, collective: Any) -> None:
        if self._group is None:
            raise PeerDead("this rank has left the group")
        try:
            collective(self._group).wait(self._deadline)
        except RuntimeError as error:
            raise PeerDead(f"a rank of this worker is gone: {_first_line(error)}") from None

    def close(self) -> None:
        """Leave the group. The other ranks' collectives fail when this process ends, or at the deadline."""
        held = [self._group]
        self._group = None
        # Dropping the last reference joins the library's threads, which may take until the deadline.
        threading.Thread(target=held.clear, name="ranks-close", daemon=True).start()


def _group(store: Store, rank: int, size: int, device: torch.device, host: str, deadline: timedelta) -> Any:
    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = deadline
        return nccl(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = deadline
    options._threads = 1
    return gloo(store, rank, size, options)


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().split("\n")[0][:200]
