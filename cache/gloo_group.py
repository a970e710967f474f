"""Consensus over processes: a gloo group of its own, beside whatever groups the computation uses.

Each round is one asynchronous all-reduce (MIN), run by gloo's own threads and polled. A rank that dies breaks its TCP
connections, and its neighbours in gloo's ring get an error at once. The worker of a rank that got `PeerDead` fails as a
whole; as its process ends, the next ranks learn of it the same way. A rank that is merely silent, or a process that
stays after the error, is the watchdog's business (see the `Ballot`); gloo's own timeout is set to the same length, so
that its threads end too.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from contracts.errors import PeerDead


class GlooGroup:
    """A rank's end of a group of processes. One thread.

    `store`: where the ranks find each other, for this group alone (a prefix of its own, or a file). `host`: the address
    of this rank's interface, which the others must reach. The constructor waits for all ranks, up to `deadline_s`.
    Raises `PeerDead` when they don't come.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, host: str = "127.0.0.1", deadline_s: float = 30.0
    ) -> None:
        assert 0 <= rank < size
        self._rank, self._size = rank, size
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=deadline_s)
        options._threads = 2
        reduce: Any = dist.AllreduceOptions()
        reduce.reduceOp = dist.ReduceOp.MIN
        self._reduce = reduce
        # The tensors stay here until their round is polled: gloo's threads write into them.
        self._works: deque[tuple[torch.Tensor, Any]] = deque()
        store.set_timeout(timedelta(seconds=deadline_s))
        try:
            self._group: Any = gloo(store, rank, size, options)
        except RuntimeError as error:
            raise PeerDead(f"rank {rank} of {size} did not meet the others: {_first_line(error)}") from None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def post(self, vector: list[int]) -> None:
        if self._group is None:
            raise PeerDead("this rank has left the group")
        tensor = torch.tensor(vector, dtype=torch.int64)
        try:
            self._works.append((tensor, self._group.allreduce([tensor], self._reduce)))
        except RuntimeError as error:
            raise PeerDead(f"a rank of this seat is gone: {_first_line(error)}") from None

    def poll(self) -> list[int] | None:
        if self._group is None:
            raise PeerDead("this rank has left the group")
        if not self._works or not self._works[0][1].is_completed():
            return None
        tensor, work = self._works.popleft()
        try:
            # Complete, so this does not wait; it raises what ended the round.
            work.wait()
        except RuntimeError as error:
            raise PeerDead(f"a rank of this seat is gone: {_first_line(error)}") from None
        result: list[int] = tensor.tolist()
        return result

    def close(self) -> None:
        """Other ranks' open rounds end as this process does, or at the deadline: gloo keeps connections until then."""
        group, works = self._group, list(self._works)
        self._group = None
        self._works.clear()
        if group is None:
            return
        # Dropping the last reference joins gloo's threads, which may take until the deadline: not on our thread.
        held = [group, works]
        del group, works
        threading.Thread(target=held.clear, name="gloo-close", daemon=True).start()


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().split("\n")[0][:200]
