"""Tensor-parallel groups: sums over ranks within a step, in the order of the ranks, and broadcasts of the leader.

A product over a divided axis leaves each rank with a part of the sum. A library's all-reduce adds parts in an order
that depends on its ring and its chunks, and so on the number of rows; then a row's result would depend on its batch.
So every rank gathers all parts and adds them itself, in the order of the ranks, in float32, rounding once: the same
bits on every rank, for a row in any batch. A gather moves (n-1) parts a rank where a ring moves 2(n-1)/n of one; with
the few ranks of one host, and activations of some rows, latency matters more than these bytes. On GPUs it is NCCL that
gathers and one kernel that adds. Under `numerics: fast` NCCL's own reduction does both.

When a rank dies, its connections break and the others' collectives end with an error. When a rank is merely silent,
they end at the deadline. Either way the worker ends as a whole. On a GPU the host doesn't wait for a collective: there
NCCL's own watch ends the process at the deadline, and a rank that died is noticed by its process before that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, Store  # type: ignore[attr-defined]

from twinpool.contracts.errors import PeerDead


class TensorParallelGroup(Protocol):
    """The ranks of one worker. Each must call the same methods in the same order, with tensors of equal shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Sum every rank's `x`: added in the order of the ranks, in float32, rounded once to the dtype of `x`."""

    def gather(self, x: Tensor, *, loading: bool = False) -> list[Tensor]:
        """Return every rank's `x`, in the order of the ranks. `loading`: ranks come to it when they have loaded the
        model, each at the speed of its own disk and processor."""

    def first(self, x: Tensor) -> Tensor:
        """Return rank 0's `x` on every rank; the others pass a tensor of its shape and dtype."""

    def send(self, x: Tensor, to: int) -> None:
        """Send `x` to one rank, which is to `receive` it."""

    def receive(self, like: Tensor, sender: int) -> Tensor:
        """Return what rank `sender` sends next, of the shape and dtype of `like`, whose memory it may take."""


def ordered_sum(parts: Tensor | Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of all ranks' parts, in the order of the ranks: added in float32, and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


class ExpertRanks(Protocol):
    """The workers that share their experts, as one of them sees them. Each must call the same methods in the same
    order."""

    @property
    def size(self) -> int: ...

    def gather(self, x: Tensor, *, loading: bool = False) -> list[Tensor]:
        """As `TensorParallelGroup.gather`."""

    def exchange(self, x_rk: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its rows of `x_rk` [rows, width], `sent` of them, in the order of the ranks; returns what all
        of them have sent to this one, `received` rows of each."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class _SingleRank:
    """The group of a worker with one rank."""

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, *, loading: bool = False) -> list[Tensor]:
        return [x]

    def first(self, x: Tensor) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("one rank has nobody to send to")

    def receive(self, like: Tensor, sender: int) -> Tensor:
        raise AssertionError("one rank has nobody to hear from")


ALONE: TensorParallelGroup = _SingleRank()


class TorchDistributedGroup:
    """Ranks in processes of their own: over gloo for tensors on a CPU, over NCCL on NVIDIA GPUs. For one thread.

    `store`: where the ranks find each other; it serves this group alone. `host`: the address of this rank's network
    interface, for gloo. `exact`: sums are in the order of the ranks; else in any, where that is faster. The constructor
    waits up to `deadline_s` seconds for all ranks and raises `PeerDead` when they don't come. All methods raise
    `PeerDead` when a rank is gone, or silent for longer than the deadline; while ranks load, for longer than `start_s`.
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
        start_s: float | None = None,
        exact: bool = True,
    ) -> None:
        assert 0 <= rank < size
        self.rank, self.size = rank, size
        self._device, self._exact = device, exact
        self._deadline = timedelta(seconds=deadline_s)
        self._start = timedelta(seconds=max(deadline_s, start_s or 0.0))
        store.set_timeout(self._deadline)
        try:
            self._group: Any = _group(store, rank, size, device, host, self._deadline)
        except RuntimeError as error:
            raise PeerDead(f"rank {rank} of {size} did not meet the others: {_first_line(error)}") from None

    def sum(self, x: Tensor) -> Tensor:
        on_gpu = self._device.type == "cuda"
        if on_gpu and not self._exact:
            total = x.clone(memory_format=torch.contiguous_format)
            self._run(lambda group: group.allreduce([total]))
            return total
        parts = self._gathered(x)
        if on_gpu:
            from twinpool.engine.gpu.gpu_kernels import add_ranks

            return add_ranks(parts)
        return ordered_sum(parts, x.dtype)

    def gather(self, x: Tensor, *, loading: bool = False) -> list[Tensor]:
        return list(self._gathered(x, self._start if loading else None))

    def _gathered(self, x: Tensor, within: timedelta | None = None) -> Tensor:
        """Every rank's `x`, one after the other: [ranks, *shape]. `within`: another deadline than the group's."""
        raw = x.contiguous().reshape(-1).view(torch.uint8)
        parts = raw.new_empty(self.size * len(raw))
        options = []
        if within is not None:
            options.append(AllgatherOptions())
            options[0].timeout = within
        self._run(lambda group: group._allgather_base(parts, raw, *options), within)
        return parts.view(x.dtype).view(self.size, *x.shape)

    def first(self, x: Tensor) -> Tensor:
        raw = x.clone() if self.rank == 0 else torch.empty_like(x)
        self._run(lambda group: group.broadcast([raw]))
        return raw

    def send(self, x: Tensor, to: int) -> None:
        raw = x.contiguous().view(-1).view(torch.uint8)
        self._run(lambda group: group.send([raw], to, _ACTIVATIONS))

    def receive(self, like: Tensor, sender: int) -> Tensor:
        raw = like.contiguous().view(-1).view(torch.uint8)
        self._run(lambda group: group.recv([raw], sender, _ACTIVATIONS))
        return raw.view(like.dtype).view(like.shape)

    def exchange(self, x_rk: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        raw = x_rk.contiguous().view(torch.uint8)
        parts = raw.new_empty(sum(received), raw.shape[1])
        self._run(lambda group: group.alltoall_base(parts, raw, list(received), list(sent)))
        return parts.view(x_rk.dtype)

    def _run(self, collective: Any, within: timedelta | None = None) -> None:
        if self._group is None:
            raise PeerDead("this rank has left the group")
        try:
            work = collective(self._group)
            if self._device.type == "cuda":
                work.wait()  # What this stream does from here on comes after it. With a deadline the host would wait.
            else:
                work.wait(within or self._deadline)
        except RuntimeError as error:
            raise PeerDead(f"a rank of this worker is gone: {_first_line(error)}") from None

    def close(self) -> None:
        """Leave the group. The other ranks' collectives fail when this process ends, or at the deadline."""
        held = [self._group]
        self._group = None
        # Dropping the last reference joins the library's threads, which may take until the deadline.
        threading.Thread(target=held.clear, name="ranks-close", daemon=True).start()


_ACTIVATIONS = 1
"""The tag of what stages send each other."""
NCCL_ON_ONE_HOST = {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_IB_DISABLE": "1", "NCCL_RAS_ENABLE": "0"}
"""What NCCL reads of the environment: it meets on loopback alone, and opens neither InfiniBand nor its port for
diagnoses. Its sockets authenticate nobody, and left to itself it listens on the first network interface. An operator's
own values, for programs of several hosts, are of no use to ranks of one."""


def _group(store: Store, rank: int, size: int, device: torch.device, host: str, deadline: timedelta) -> Any:
    if device.type == "cuda":
        os.environ.update(NCCL_ON_ONE_HOST)
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
