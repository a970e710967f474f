"""The rendezvous of the ranks of one worker: they join the channel and form the tensor-parallel group, before any part
is built that needs both."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from twinpool.cache.device.device_choice import chosen_device, gpu_view
from twinpool.cluster.ranks.follower_channel import FollowerChannel
from twinpool.cluster.ranks.leader_channel import LeaderChannel
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import PeerDead, WireError
from twinpool.contracts.messages.rank_orders import EndRank, FormGroup
from twinpool.engine.tensors.tensor_parallel import TorchDistributedGroup
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.net.process_watch import PidfdWatch


@dataclass(frozen=True)
class RankGroup:
    """The leader's side of the rendezvous: the channel to its followers, and the group in which all ranks compute."""

    line: LeaderChannel
    ranks: TorchDistributedGroup

    def watch(self) -> list[tuple[str, PidfdWatch]]:
        return [(f"rank {rank} of this worker", watch) for rank, watch in self.line.watches.items()]

    def close(self) -> None:
        """Order the followers to end, and close the channel and the group. Idempotent."""
        if not self.line.socket.closed:
            self.line.send(EndRank("the worker has ended"))
            self.line.close()
            self.ranks.close()


def lead(
    meeting: str, size: int, clock: Clock, engine: EngineConfig, *, deadline_s: float, start_s: float
) -> RankGroup:
    """Be rank 0 of `size`: wait up to `start_s` for the followers, and form the group, whose ranks may take as long
    again to load the model.

    `meeting`: the ranks' secret, in hex. `engine`: says on which device this rank computes, and how exactly.
    `deadline_s`: for answers to orders, and for each collective of the group. Raises `PeerDead` when a follower doesn't
    come, and `ConfigError` for a GPU that can't be used.
    """
    line = LeaderChannel(meeting, size, clock, deadline_s)
    try:
        line.meet(start_s)
        store = _meeting_place()
        line.send(FormGroup(store, *process.mine()))
        return RankGroup(line, _group(store, 0, size, engine, deadline_s, start_s))
    except BaseException:
        line.close()
        raise


def _meeting_place() -> str:
    """The path of the file by which the group's ranks meet: a memfd, so that a worker that is killed leaves no file.

    The memfd stays open as long as this process lives: torch opens the path again when the group ends, on every rank,
    and would write into another file that had the descriptor's number by then.
    """
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('twinpool-ranks', os.MFD_CLOEXEC)}"


@dataclass(frozen=True)
class FollowerRank:
    """A follower's side of the rendezvous: the channel, the group, and a watch on the leader's process."""

    line: FollowerChannel
    ranks: TorchDistributedGroup
    leader: PidfdWatch

    def close(self) -> None:
        self.line.close()
        self.ranks.close()
        self.leader.close()


def follow(
    meeting: str, rank: int, size: int, engine: EngineConfig, *, deadline_s: float, start_s: float
) -> FollowerRank:
    """Be rank `rank` of `size`, from 1 on, and form the group. `meeting`, `engine`, `deadline_s`: as for `lead`.

    Raises `PeerDead` when the leader doesn't come within `start_s`, has died, or is on another host, and `WireError`
    when its first order is not to form a group.
    """
    line = FollowerChannel(meeting, rank)
    try:
        first = line.next(start_s)
        if first is None:
            raise PeerDead(f"the leader of this worker did not come within {start_s:g} s")
        form = first[1]
        if not isinstance(form, FormGroup):
            raise WireError(f"the first order must be to form a group, it is {type(form).__name__}")
        try:
            leader = PidfdWatch.open(form.pid, form.started, form.namespace)
        except ProcessLookupError:
            raise PeerDead(f"the leader of this worker (pid {form.pid}) died") from None
        if leader is None:
            raise PeerDead("the leader of this worker is on another host: all ranks of a worker must be on one")
        return FollowerRank(line, _group(form.store, rank, size, engine, deadline_s, start_s), leader)
    except BaseException:
        line.close()
        raise


def _group(
    store: str, rank: int, size: int, engine: EngineConfig, deadline_s: float, start_s: float
) -> TorchDistributedGroup:
    device = chosen_device(engine.device, gpu_view())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # On loopback only, because gloo doesn't authenticate; all ranks of a worker are on one host.
    ranks = TorchDistributedGroup(
        FileStore(store, size), rank, size, device=device, deadline_s=deadline_s, start_s=start_s,
        exact=engine.numerics == "invariant",
    )  # fmt: skip
    # After this collective all ranks are connected, and none reads the leader's file again.
    ranks.gather(torch.zeros(1, device=device))
    return ranks
