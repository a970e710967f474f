"""Ranks that are threads of this process: collectives without sockets, and the line on which steps are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import zmq
from torch import Tensor

from twinpool.cluster.ranks import DataParallelRank
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import PeerDead
from twinpool.contracts.ids import Role, WorkerName, dp_rank
from twinpool.engine.layers.moe.expert_group import ExpertGroup
from twinpool.engine.models.registry import read_model
from twinpool.engine.native.current_kernels import using
from twinpool.engine.runner.load_model import load_model
from twinpool.engine.tensors.shard import Shard

PATIENCE_S = 60.0


@dataclass
class Meeting:
    """What the ranks of one group have in common."""

    size: int
    slots: list[Any] = field(default_factory=list)
    begun: int = 0
    calls: list[list[str]] = field(default_factory=list)
    """The collectives that each rank has called, by name."""

    def __post_init__(self) -> None:
        self.slots, self.calls = [None] * self.size, [[] for _ in range(self.size)]
        self.barrier, self.told = threading.Barrier(self.size), threading.Condition()

    def ranks(self) -> list[ThreadRank]:
        return [ThreadRank(self, rank) for rank in range(self.size)]

    def wait_for(self, number: int) -> None:
        """Wait until step `number` has begun. Raises `PeerDead` when none will."""
        with self.told:
            self.told.wait_for(lambda: self.begun >= number or self.barrier.broken)
        if self.barrier.broken:
            raise PeerDead("a rank is gone")

    def end(self) -> None:
        """End the steps of all ranks."""
        self.barrier.abort()
        with self.told:
            self.told.notify_all()


class ThreadRank:
    """One of these ranks: implements `ExpertRanks`, `StepLine`, and what a step needs of `TensorParallelGroup`."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def _all(self, kind: str, value: Any) -> list[Any]:
        meeting = self._meeting
        meeting.calls[self.rank].append(kind)
        try:
            meeting.slots[self.rank] = (kind, value)
            meeting.barrier.wait(PATIENCE_S)
            found = list(meeting.slots)
            meeting.barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            raise PeerDead("a rank is gone") from None
        assert {one for one, _ in found} == {kind}, f"ranks are in different collectives: {found}"
        return [value for _, value in found]

    def gather(self, x: Tensor, *, loading: bool = False) -> list[Tensor]:
        return self._all("gather", x.clone())

    def sum(self, x: Tensor) -> Tensor:
        first, *others = self._all("sum", x.clone())
        total = first.float()
        for other in others:
            total = total + other
        return cast(Tensor, total.to(x.dtype))

    def first(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._all("first", x.clone())[0].clone())

    def exchange(self, x_rk: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        assert sum(sent) == len(x_rk)
        parts = [torch.split(x, counts)[self.rank] for x, counts in self._all("exchange", (x_rk.clone(), list(sent)))]
        assert [len(part) for part in parts] == list(received), "who receives knows how much is sent"
        return torch.cat(parts)

    def begin(self, number: int) -> None:
        with self._meeting.told:
            self._meeting.begun = max(self._meeting.begun, number)
            self._meeting.told.notify_all()

    def begun(self) -> int:
        return self._meeting.begun

    def close(self) -> None:
        self._meeting.end()


@contextmanager
def idle_sharers(folder: Path, role: Role, name: WorkerName, config: Config) -> Iterator[DataParallelRank | None]:
    """The place of a worker that is built here among those that it shares its experts with, which are threads without
    requests; None where it shares none."""
    size = config.dp_for(role)
    if size == 1:
        yield None
        return
    meeting, mine = Meeting(size), dp_rank(name, size)[1]
    model = read_model(folder, config.engine.context, config.engine.draft_model, config.engine)
    failed: list[BaseException] = []

    def live(rank: ThreadRank) -> None:
        try:
            loaded = load_model(model, config.engine, torch.device("cpu"), shard=Shard(dp_rank=rank.rank, dp=size))
            group, like = ExpertGroup(rank, rank), torch.empty(0, dtype=loaded.decoder.dtype)
            group.drained = True
            rank.gather(torch.zeros(1), loading=True)
            while not group.over:
                meeting.wait_for(group.number + 1)
                with torch.inference_mode(), using(loaded.decoder.kernels):
                    group.take_part(loaded.decoder.mixtures, like, loaded.numerics)
        except PeerDead:
            return
        except BaseException as error:
            failed.append(error)
            meeting.end()

    ranks = meeting.ranks()
    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in ranks if rank.rank != mine]
    for thread in threads:
        thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.PAIR)
    channel = SimpleNamespace(socket=socket, close=lambda: socket.close(0))
    dp = DataParallelRank(ExpertGroup(ranks[mine], ranks[mine]), cast(Any, channel), ())
    try:
        yield dp
    finally:
        dp.close()
        meeting.end()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failed, failed
