"""The ranks of one worker: how they meet, and the channel between leader and followers.

At the rendezvous they join the channel and form the tensor-parallel group, before any part is built that needs both.
Orders go one way on the channel (`LeaderChannel`), answers and notices the other (`FollowerChannel`).

Ranks are processes of one host, or of several (`cluster.ranks_over_hosts`). On one they meet at a socket whose name and
keys follow from a secret, which the launcher makes for each start and gives to every rank: no other process can join.
Leader and followers watch each other by pidfds. On several hosts the socket is the leader's, under the same keys, and
they watch the links between them (`cluster.rank_links`). Any failure between ranks (a dead rank, a silent rank, a lost
message, an order that can't be carried out) ends the whole worker: without the lost heads no state of it can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import zmq
from torch.distributed import FileStore  # type: ignore[attr-defined]

from twinpool.cache.device.device_choice import chosen_device, gpu_view
from twinpool.cluster.rank_links import (
    ANSWER,
    FOLLOWER_NOTICES,
    JOIN,
    JOIN_AGAIN_S,
    NOTICE_KINDS,
    JoinedRank,
    LeaderPlace,
    NetworkGroup,
    NodeOfRank,
    RankSocket,
    RankWatch,
    meeting_point,
    store_path,
    unlike,
)
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError, PeerDead, WireError
from twinpool.contracts.messages.rank_order_codec import decode, encode
from twinpool.contracts.messages.rank_orders import BeginStep, EndRank, FollowerNotice, FormGroup, Order, StepBegun
from twinpool.engine.layers.moe.expert_group import ExpertGroup
from twinpool.engine.tensors.tensor_parallel import TorchDistributedGroup
from twinpool.transfer.net import process_watch as process
from twinpool.transfer.net.process_watch import PidfdWatch
from twinpool.transfer.net.zmq_sockets import keep_alive


@dataclass(frozen=True)
class RankGroup:
    """The leader's side of the rendezvous: the channel to its followers, and the group in which all ranks compute."""

    line: LeaderChannel
    ranks: TorchDistributedGroup | NetworkGroup

    def watch(self) -> list[tuple[str, RankWatch]]:
        return [(f"rank {rank} of this worker", watch) for rank, watch in self.line.watches.items()]

    @property
    def others(self) -> tuple[NodeOfRank, ...]:
        """The nodes of the ranks from 1 on; none where all are on one host."""
        return tuple(one.at for one in self.line.joined if one.at.host)

    def close(self) -> None:
        """Order the followers to end, and close the channel and the group. Idempotent."""
        if not self.line.socket.closed:
            with suppress(PeerDead):  # Those that can be reached hear it; the others end by themselves.
                self.line.send(EndRank("the worker has ended"))
            self.ranks.close()  # Before the channel, which closes the watches that the group's links tell.
            self.line.close()


def lead(
    meeting: str,
    size: int,
    clock: Clock,
    engine: EngineConfig,
    *,
    deadline_s: float,
    start_s: float,
    over: tuple[RankSocket, NodeOfRank] | None = None,
) -> RankGroup:
    """Be rank 0 of `size`: wait up to `start_s` for the followers, and form the group, whose ranks may take as long
    again to load the model.

    `meeting`: the ranks' secret, in hex. `engine`: says on which device this rank computes, and how exactly.
    `deadline_s`: for answers to orders, and for each collective of the group. `over`: of ranks on several hosts, where
    they meet, which the group closes, and this one's node; None: all are on this host. Raises `PeerDead` when a
    follower doesn't come, and `ConfigError` for a GPU that can't be used, and for nodes that aren't alike.
    """
    line = LeaderChannel(meeting, size, clock, deadline_s, over[0] if over else None)
    try:
        line.meet(start_s)
        if over is not None:
            return _over_network(line, meeting, over, deadline_s, start_s)
        store = store_path()
        line.send(FormGroup(store, *process.mine()))
        return RankGroup(line, _group(store, 0, size, engine, deadline_s, start_s))
    except BaseException:
        line.close()
        raise


def _over_network(
    line: LeaderChannel, secret: str, over: tuple[RankSocket, NodeOfRank], deadline_s: float, start_s: float
) -> RankGroup:
    """Form the group of ranks on several hosts. Raises `ConfigError` where their nodes aren't alike."""
    place, node = over
    if refused := unlike(node, [(rank, one.at) for rank, one in enumerate(line.joined, 1)]):
        raise ConfigError(refused)
    line.inbox = RankSocket(secret, node.host, place.link_timeout_s)
    endpoints = (line.inbox.endpoint, *(one.endpoint for one in line.joined))
    line.send(FormGroup("", *process.mine(), endpoints))
    ranks = NetworkGroup.met(line.inbox, 0, endpoints, deadline_s, start_s)
    line.watches = dict(ranks.links)
    return RankGroup(line, ranks)


@dataclass(frozen=True)
class FollowerRank:
    """A follower's side of the rendezvous: the channel, the group, and a watch on the leader."""

    line: FollowerChannel
    ranks: TorchDistributedGroup | NetworkGroup
    leader: RankWatch

    def close(self) -> None:
        self.line.close()
        self.ranks.close()
        self.leader.close()


def follow(
    meeting: str,
    rank: int,
    size: int,
    engine: EngineConfig,
    *,
    deadline_s: float,
    start_s: float,
    over: LeaderPlace | None = None,
) -> FollowerRank:
    """Be rank `rank` of `size`, from 1 on, and form the group. `meeting`, `engine`, `deadline_s`: as for `lead`.
    `over`: of ranks on several hosts, where the leader is.

    Raises `PeerDead` when the leader doesn't come within `start_s`, has died, or is on another host than it should be,
    and `WireError` when its first order is not to form a group.
    """
    line = FollowerChannel(meeting, rank, over)
    try:
        first, left_s = line.next(min(start_s, JOIN_AGAIN_S)), start_s - JOIN_AGAIN_S
        while first is None and left_s > 0:
            line.announce()
            first, left_s = line.next(min(left_s, JOIN_AGAIN_S)), left_s - JOIN_AGAIN_S
        if first is None:
            raise PeerDead(f"the leader of this worker did not come within {start_s:g} s")
        form = first[1]
        if not isinstance(form, FormGroup):
            raise WireError(f"the first order must be to form a group, it is {type(form).__name__}")
        if line.inbox is not None:
            group = NetworkGroup.met(line.inbox, rank, form.endpoints, deadline_s, start_s)
            return FollowerRank(line, group, group.links[0])
        try:
            leader = PidfdWatch.open(form.pid, form.started, form.namespace)
        except ProcessLookupError:
            raise PeerDead(f"the leader of this worker (pid {form.pid}) died") from None
        if leader is None:
            raise PeerDead("the leader of this worker is on another host: that takes cluster.ranks_over_hosts=true")
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
    watches: Sequence[tuple[str, RankWatch]]
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
        assert isinstance(group.ranks, TorchDistributedGroup), "these are on one host"
        others = [(f"data-parallel rank {number}", watch) for number, watch in group.line.watches.items()]
        return DataParallelRank(ExpertGroup(group.ranks, LeaderSteps(group.line)), group.line, others)
    follower = follow(meeting, rank, size, engine, deadline_s=deadline_s, start_s=start_s)
    assert isinstance(follower.ranks, TorchDistributedGroup), "these are on one host"
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


_LOOK_S = 0.2
"""Seconds between two looks for dead followers, while waiting for an answer."""


class LeaderChannel:
    """The leader's end of the channel; implements `contracts.messages.rank_order_codec.OrderChannel`. Used from one
    thread.

    `size`: number of ranks, the leader included. `deadline_s`: how long a follower may take to answer an order.
    """

    def __init__(
        self, secret: str, size: int, clock: Clock, deadline_s: float, place: RankSocket | None = None
    ) -> None:
        """`place`: where followers of other hosts come; None: all are on this one."""
        self._size, self._clock, self._deadline_s = size, clock, deadline_s
        self._one_host = place is None
        self.inbox: RankSocket | None = None  # Where it hears the others within a step; None: all are on this host.
        self.socket = (place or RankSocket(secret)).socket
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.watches: dict[int, RankWatch] = {}
        self.joined: list[JoinedRank] = []
        """Who each follower is, by rank from 1 on."""
        self._sequence = 0
        self._sent = 0
        self._heard: dict[int, int] = {}  # How many messages each follower has sent.
        self._open: dict[int, _AskedRanks] = {}
        self._follower_notices: list[tuple[int, FollowerNotice]] = []
        self._joins: dict[int, JoinedRank] = {}

    @property
    def size(self) -> int:
        return self._size

    def meet(self, timeout_s: float) -> None:
        """Wait until all followers have joined; where all are on this host, watch their processes then. Raises
        `PeerDead` when one has not joined after `timeout_s`, has died, or is on another host than it should be."""
        end = self._clock.now() + timeout_s
        while len(self._joins) < self._size - 1:
            if self._clock.now() >= end:
                missing = sorted(set(range(1, self._size)) - set(self._joins))
                raise PeerDead(f"rank {missing[0]} of {self._size} did not come within {timeout_s:g} s")
            self.socket.poll(int(_LOOK_S * 1000))
            self._take()
        self.joined = [self._joins[rank] for rank in range(1, self._size)]
        for rank, one in enumerate(self.joined, 1) if self._one_host else ():
            try:
                watch = PidfdWatch.open(*one.process)
            except ProcessLookupError:
                raise PeerDead(f"rank {rank} (pid {one.process[0]}) died") from None
            if watch is None:
                raise PeerDead(f"rank {rank} is on another host: that takes cluster.ranks_over_hosts=true")
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
        self._sent += 1
        numbers = [self._sent.to_bytes(8, "little"), sequence.to_bytes(8, "little")]
        for rank in range(1, self._size):
            try:
                self.socket.send_multipart([b"%d" % rank, *numbers, data])
            except zmq.ZMQError as error:
                raise PeerDead(f"rank {rank} of this worker can't be reached: {error}") from None

    def _take(self) -> None:
        """Receive all messages that have come: joins, notices and answers. Never waits. Raises `PeerDead` where one of
        them was lost."""
        while True:
            try:
                identity, kind, number, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            rank = int(identity)
            if kind == JOIN:
                mine, endpoint, at = msgpack.unpackb(frames[-1], use_list=False)
                self._joins[rank], self._heard[rank] = JoinedRank(mine, endpoint, NodeOfRank(*at)), 1
                continue
            self._heard[rank] = self._heard.get(rank, 0) + 1
            if int.from_bytes(number, "little") != self._heard[rank]:
                raise PeerDead(f"a message of rank {rank} of this worker was lost: the link to it was cut")
            value = msgpack.unpackb(frames[-1], use_list=False)
            if kind in FOLLOWER_NOTICES:
                self._follower_notices.append((rank, FOLLOWER_NOTICES[kind](*value)))
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
                raise PeerDead(f"rank {rank} of this worker {watch.death}")

    def close(self) -> None:
        self.socket.close(linger=0)
        if self.inbox is not None:
            self.inbox.close()
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

    def __init__(self, secret: str, rank: int, over: LeaderPlace | None = None) -> None:
        """`over`: of ranks on several hosts, where the leader is; None: on this one."""
        endpoint, curve = meeting_point(secret)
        self.inbox: RankSocket | None = None
        """Where the other ranks are to send what they compute; None where all are on one host."""
        self._sent = self._taken = 0
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        # At the end, the leader may still be waiting for the last answers.
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.ROUTING_ID, b"%d" % rank)
        curve.call(self.socket)
        joins = JoinedRank(process.mine())
        if over is not None:
            keep_alive(self.socket, over.link_timeout_s)
            self.inbox = RankSocket(secret, over.mine.host, over.link_timeout_s)
            endpoint, joins = over.endpoint, JoinedRank(process.mine(), self.inbox.endpoint, over.mine)
        self.socket.connect(endpoint)
        self._joins = msgpack.packb(joins)
        self.announce()

    def announce(self) -> None:
        """Say that this rank is there, until the leader answers: a cut connection loses it. It is always message 1."""
        self._sent = 0
        self._send(JOIN, self._joins)

    def next(self, timeout_s: float) -> tuple[int, Order] | None:
        """The number of the next order and the order (number 0: no answer is wanted); None when none has come after
        `timeout_s`.

        Raises `WireError` for a message that is no order, and `PeerDead` where one was lost.
        """
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        try:
            number, sequence, data = self.socket.recv_multipart()
        except ValueError as error:
            raise WireError(f"not an order: {error}") from None
        self._taken += 1
        if int.from_bytes(number, "little") != self._taken:
            raise PeerDead("an order of this worker's leader was lost: the link to it was cut")
        return int.from_bytes(sequence, "little"), decode(data)

    def answer(self, sequence: int, value: Any) -> None:
        self._send(ANSWER, sequence.to_bytes(8, "little"), msgpack.packb(value))

    def send(self, notice: FollowerNotice) -> None:
        self._send(NOTICE_KINDS[type(notice)], msgpack.packb(notice))

    def _send(self, kind: bytes, *frames: bytes) -> None:
        self._sent += 1
        self.socket.send_multipart([kind, self._sent.to_bytes(8, "little"), *frames])

    def close(self) -> None:
        self.socket.close()
        if self.inbox is not None:
            self.inbox.close()
