"""The ranks of one worker: how they meet, and the channel between leader and followers.

At the rendezvous they join the channel and form the tensor-parallel group, before any part is built that needs both.
Orders go one way on the channel (`LeaderChannel`), answers and notices the other (`FollowerChannel`).

All ranks of a worker are processes of one host. They meet at a socket whose name and keys follow from a secret, which
the launcher makes for each start and gives to every rank: no other process can join. Leader and followers watch each
other by pidfds. Any failure between ranks (a dead rank, a silent rank, an order that can't be carried out) ends the
whole worker: without the lost heads no state of it can be used.
"""

from __future__ import annotations

import hashlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import zmq
from torch.distributed import FileStore  # type: ignore[attr-defined]

from twinpool.cache.device.device_choice import chosen_device, gpu_view
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import PeerDead, WireError
from twinpool.contracts.messages.rank_order_codec import decode, encode
from twinpool.contracts.messages.rank_orders import (
    BeginStep,
    EndRank,
    FollowerNotice,
    FormGroup,
    LinkLost,
    Order,
    StepBegun,
    WriteArrived,
)
from twinpool.engine.layers.moe.expert_group import ExpertGroup
from twinpool.engine.tensors.tensor_parallel import TorchDistributedGroup
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.net.process_watch import PidfdWatch
from twinpool.transfer.net.zmq_sockets import CurveKeys


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


@dataclass(frozen=True)
class DataParallelRank:
    """A worker's place among those that it shares its experts with."""

    experts: ExpertGroup
    channel: LeaderChannel | FollowerChannel
    watches: Sequence[tuple[str, PidfdWatch]]
    """On processes of the others: the first rank's on those of all, theirs on the first one's."""

    def wait_for_all(self) -> None:
        """Wait until all ranks have loaded the model. Raises `PeerDead` for one that has not in the time that a start
        has."""
        self.experts.ranks.gather(torch.zeros(1), loading=True)

    def close(self) -> None:
        """Leave the group: what the others compute from now on fails. Idempotent."""
        self.channel.close()
        self.experts.close()
        for _, watch in self.watches:
            watch.close()


def meet_data_parallel(
    meeting: str, rank: int, size: int, clock: Clock, engine: EngineConfig, *, deadline_s: float, start_s: float
) -> DataParallelRank:
    """Be data-parallel rank `rank` of `size`: meet the other workers. Parameters and errors are those of `lead` and
    `follow`."""
    if rank == 0:
        group = lead(meeting, size, clock, engine, deadline_s=deadline_s, start_s=start_s)
        others = [(f"data-parallel rank {number}", watch) for number, watch in group.line.watches.items()]
        return DataParallelRank(ExpertGroup(group.ranks, LeaderSteps(group.line)), group.line, others)
    follower = follow(meeting, rank, size, engine, deadline_s=deadline_s, start_s=start_s)
    steps = RankSteps(follower.line)
    return DataParallelRank(
        ExpertGroup(follower.ranks, steps), follower.line, [("data-parallel rank 0", follower.leader)]
    )


class LeaderSteps:
    """The first data-parallel rank's end of the line on which steps are told; it passes on what one of the others
    tells. Implements `engine.layers.moe.expert_group.StepLine`."""

    def __init__(self, line: LeaderChannel) -> None:
        self._line, self._begun = line, 0

    def begin(self, number: int) -> None:
        self._begun = number
        self._line.send(BeginStep(number))

    def begun(self) -> int:
        told = max((notice.number for _, notice in self._line.heard() if isinstance(notice, StepBegun)), default=0)
        if told > self._begun:
            self.begin(told)
        return self._begun


class RankSteps:
    """Another data-parallel rank's end of that line. Implements `engine.layers.moe.expert_group.StepLine`."""

    def __init__(self, line: FollowerChannel) -> None:
        self._line, self._begun = line, 0

    def begin(self, number: int) -> None:
        self._begun = number
        self._line.send(StepBegun(number))

    def begun(self) -> int:
        while (item := self._line.next(0.0)) is not None:
            order = item[1]
            if not isinstance(order, BeginStep):
                raise WireError(f"a data-parallel rank is told of steps alone, not {type(order).__name__}")
            self._begun = max(self._begun, order.number)
        return self._begun


JOIN, ANSWER = b"J", b"A"
_FOLLOWER_NOTICES: dict[bytes, type[WriteArrived] | type[LinkLost] | type[StepBegun]] = {
    b"T": WriteArrived,
    b"S": LinkLost,
    b"B": StepBegun,
}
NOTICE_KINDS = {kind: tag for tag, kind in _FOLLOWER_NOTICES.items()}
_LOOK_S = 0.2
"""Seconds between two looks for dead followers, while waiting for an answer."""


def meeting_point(secret: str) -> tuple[str, CurveKeys]:
    """Endpoint and keys of the ranks that share `secret` (hex, 16 bytes or more). The socket is abstract: no file."""
    raw = bytes.fromhex(secret)
    name = hashlib.blake2b(raw, digest_size=12, person=b"twinpool-ranks").hexdigest()
    return f"ipc://@twinpool-{name}", CurveKeys.from_secret(raw)


class LeaderChannel:
    """The leader's end of the channel; implements `contracts.messages.rank_order_codec.OrderChannel`. Used from one
    thread.

    `size`: number of ranks, the leader included. `deadline_s`: how long a follower may take to answer an order.
    """

    def __init__(self, secret: str, size: int, clock: Clock, deadline_s: float) -> None:
        endpoint, curve = meeting_point(secret)
        self._size, self._clock, self._deadline_s = size, clock, deadline_s
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        curve.serve(self.socket)
        self.socket.bind(endpoint)
        self.watches: dict[int, PidfdWatch] = {}
        self.processes: list[tuple[int, int, str]] = []
        """Each follower's pid, start ticks and namespace, by rank from 1 on."""
        self._sequence = 0
        self._open: dict[int, _AskedRanks] = {}
        self._follower_notices: list[tuple[int, FollowerNotice]] = []
        self._joined: dict[int, tuple[int, int, str]] = {}

    @property
    def size(self) -> int:
        return self._size

    def meet(self, timeout_s: float) -> None:
        """Wait until all followers have joined, then watch their processes. Raises `PeerDead` when one has not joined
        after `timeout_s`, has died, or is on another host."""
        end = self._clock.now() + timeout_s
        while len(self._joined) < self._size - 1:
            if self._clock.now() >= end:
                missing = sorted(set(range(1, self._size)) - set(self._joined))
                raise PeerDead(f"rank {missing[0]} of {self._size} did not come within {timeout_s:g} s")
            self.socket.poll(int(_LOOK_S * 1000))
            self._take()
        self.processes = [self._joined[rank] for rank in range(1, self._size)]
        for rank, (pid, started, boot) in self._joined.items():
            try:
                watch = PidfdWatch.open(pid, started, boot)
            except ProcessLookupError:
                raise PeerDead(f"rank {rank} (pid {pid}) died") from None
            if watch is None:
                raise PeerDead(f"rank {rank} is on another host: all ranks of a worker must be on one")
            self.watches[rank] = watch

    def send(self, order: Order) -> None:
        self._send(order, 0)

    def ask(self, order: Order, deadline_s: float | None = None) -> _AskedRanks:
        self._sequence += 1
        asked = self._open[self._sequence] = _AskedRanks(self, self._sequence, deadline_s or self._deadline_s)
        self._send(order, self._sequence)
        return asked

    def heard(self) -> list[tuple[int, FollowerNotice]]:
        self._take()
        follower_notices, self._follower_notices = self._follower_notices, []
        return follower_notices

    def _send(self, order: Order, sequence: int) -> None:
        data = encode(order)
        for rank in range(1, self._size):
            try:
                self.socket.send_multipart([b"%d" % rank, sequence.to_bytes(8, "little"), data])
            except zmq.ZMQError as error:
                raise PeerDead(f"rank {rank} of this worker can't be reached: {error}") from None

    def _take(self) -> None:
        """Receive all messages that have come: joins, notices and answers. Never waits."""
        while True:
            try:
                identity, kind, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = int(identity)
            value = msgpack.unpackb(frames[-1], use_list=False)
            if kind == JOIN:
                self._joined[rank] = value
            elif kind in _FOLLOWER_NOTICES:
                self._follower_notices.append((rank, _FOLLOWER_NOTICES[kind](*value)))
            else:
                sequence = int.from_bytes(frames[0], "little")
                asked = self._open.get(sequence)
                if asked is not None and asked.take(rank, value, self._size - 1):
                    del self._open[sequence]

    def wait_for(self, asked: _AskedRanks, deadline_s: float) -> None:
        end = self._clock.now() + deadline_s
        self._take()
        while not asked.complete:
            self.require_all()
            if self._clock.now() >= end:
                raise PeerDead(f"{asked.missing(self._size)} of this worker did not answer within {deadline_s:g} s")
            self.socket.poll(int(_LOOK_S * 1000))
            self._take()

    def poll(self) -> None:
        self._take()

    def require_all(self) -> None:
        """Raise `PeerDead` when a follower's process is dead."""
        for rank, watch in self.watches.items():
            if watch.dead:
                raise PeerDead(f"rank {rank} of this worker (pid {watch.pid}) died")

    def close(self) -> None:
        self.socket.close(linger=0)
        for watch in self.watches.values():
            watch.close()


class _AskedRanks:
    """Implements `contracts.messages.rank_order_codec.OrderAnswers`."""

    def __init__(self, line: LeaderChannel, sequence: int, deadline_s: float) -> None:
        self._line, self.sequence, self._deadline_s = line, sequence, deadline_s
        self._answers: dict[int, Any] = {}
        self.complete = False

    def take(self, rank: int, value: Any, wanted: int) -> bool:
        self._answers[rank] = value
        self.complete = len(self._answers) == wanted
        return self.complete

    def missing(self, size: int) -> str:
        return ", ".join(f"rank {rank}" for rank in range(1, size) if rank not in self._answers)

    @property
    def done(self) -> bool:
        if not self.complete:
            self._line.poll()
        return self.complete

    def wait(self) -> list[Any]:
        if not self.complete:
            self._line.wait_for(self, self._deadline_s)
        return [self._answers[rank] for rank in sorted(self._answers)]


class FollowerChannel:
    """The follower's end of the channel: takes orders, sends answers and notices. Used from one thread."""

    def __init__(self, secret: str, rank: int) -> None:
        endpoint, curve = meeting_point(secret)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        # At the end, the leader may still be waiting for the last answers.
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.ROUTING_ID, b"%d" % rank)
        curve.call(self.socket)
        self.socket.connect(endpoint)
        self.socket.send_multipart([JOIN, msgpack.packb(process.mine())])

    def next(self, timeout_s: float) -> tuple[int, Order] | None:
        """The number of the next order and the order (number 0: no answer is wanted); None when none has come after
        `timeout_s`.

        Raises `WireError` for a message that is no order.
        """
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        try:
            sequence, data = self.socket.recv_multipart()
        except ValueError as error:
            raise WireError(f"not an order: {error}") from None
        return int.from_bytes(sequence, "little"), decode(data)

    def answer(self, sequence: int, value: Any) -> None:
        self.socket.send_multipart([ANSWER, sequence.to_bytes(8, "little"), msgpack.packb(value)])

    def send(self, notice: FollowerNotice) -> None:
        self.socket.send_multipart([NOTICE_KINDS[type(notice)], msgpack.packb(notice)])

    def close(self) -> None:
        self.socket.close()


class DeathWatch:
    """A thread that calls back, once, when the first of several processes has died."""

    def __init__(self, watches: Sequence[tuple[str, PidfdWatch]], on_death: Callable[[str], None]) -> None:
        """`watches`: for each process its description for the text, and its watch. `on_death` is called on the thread
        with a sentence that names the process."""
        self._watches = {watch.fd: (who, watch.pid) for who, watch in watches}
        self._on_death = on_death
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        for fd in (self._stop, *self._watches):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll():
            if fd in self._watches:
                who, pid = self._watches[fd]
                self._on_death(f"{who} (pid {pid}) died")
                return

    def stop(self) -> None:
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        stop, self._stop = self._stop, -1
        os.close(stop)
