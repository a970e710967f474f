"""Ranks of one worker on several hosts: addresses of this machine stand for hosts."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import msgpack
import pytest
import torch
import zmq

from tests.engine.test_ranks import listening
from tests.support.checkpoints import Oracle, make_checkpoint
from tests.support.rank_followers import RankProcesses, rank_processes
from tests.support.worker_pair import pair
from tests.workers.test_pair import expect_equal, greedy, prompts
from twinpool.cluster.assembly.build_parts import check_weights
from twinpool.cluster.rank_links import (
    ANSWER,
    JOIN,
    DeathWatch,
    LeaderPlace,
    NetworkGroup,
    NodeOfRank,
    RankSocket,
    unlike,
)
from twinpool.cluster.ranks import FollowerChannel, LeaderChannel, RankGroup, follow, lead
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError, PeerDead
from twinpool.contracts.messages.rank_order_codec import encode
from twinpool.contracts.messages.rank_orders import AwaitReady
from twinpool.transfer.net.zmq_sockets import CurveKeys

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
LINK_S, WAIT_S = 5.0, 30.0
SECRET = "7d" * 32


@pytest.fixture(scope="module")
def warm() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def node(rank: int, computes: str = "avx2", sizes: str = "kv 4") -> NodeOfRank:
    return NodeOfRank(HOSTS[rank], f"host{rank}", f"{rank:08x}", computes, sizes)


# ---------------------------------------------------------------- sums


@pytest.fixture
def groups() -> Iterator[list[NetworkGroup]]:
    """Three ranks, each of which listens at an address of its own."""
    sockets = [RankSocket(SECRET, host, LINK_S) for host in HOSTS]
    endpoints = [one.endpoint for one in sockets]
    made = [NetworkGroup(one, rank, endpoints, deadline_s=WAIT_S, start_s=WAIT_S) for rank, one in enumerate(sockets)]
    yield made
    for group in made:
        group.close()
        group.close()


def everywhere(groups: list[NetworkGroup], call: Callable[[NetworkGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(call, groups))


def test_sums_over_a_network_are_in_the_order_of_the_ranks_and_rounded_once(groups: list[NetworkGroup]) -> None:
    parts = torch.tensor([[256.0], [0.75], [0.75]]).bfloat16()  # Neighbours of 256 are two apart in bfloat16.
    assert [one.tolist() for one in everywhere(groups, lambda g: g.sum(parts[g.rank]))] == [[258.0]] * 3
    rows = torch.randn(3, 7, 33, generator=torch.Generator().manual_seed(5))
    total = (rows[0] + rows[1]) + rows[2]
    assert all(torch.equal(one, total) for one in everywhere(groups, lambda g: g.sum(rows[g.rank])))


def test_ranks_over_a_network_gather_broadcast_and_send_tensors_as_they_are(groups: list[NetworkGroup]) -> None:
    counts = everywhere(groups, lambda g: [one.item() for one in g.gather(torch.tensor(g.rank + 5))])
    assert counts == [[5, 6, 7]] * 3
    assert everywhere(groups, lambda g: g.first(torch.tensor([g.rank + 1.5])).tolist()) == [[1.5]] * 3
    empty = everywhere(groups, lambda g: [tuple(one.shape) for one in g.gather(torch.zeros(0, 4))])
    assert empty == [[(0, 4)] * 3] * 3

    def relay(group: NetworkGroup) -> list[float]:
        mine = torch.tensor([[1.0, 2.0]]) if not group.rank else group.receive(torch.empty(1, 2), group.rank - 1) + 1
        if group.rank < 2:
            group.send(mine, group.rank + 1)
        return mine.flatten().tolist()

    assert everywhere(groups, relay) == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]


def sender(endpoint: str, rank: int, secret: str = SECRET) -> zmq.Socket[bytes]:
    """A connection to a rank's socket, as another rank makes it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, b"%d" % rank)
    CurveKeys.from_secret(bytes.fromhex(secret)).call(socket)
    socket.connect(endpoint)
    return socket


def test_c3_a_lost_part_of_a_sum_ends_the_worker_and_is_not_replaced_by_the_next_one() -> None:
    """A cut connection loses messages, ZMQ makes another one, and the next part has the same shape."""
    mine, other = RankSocket(SECRET, HOSTS[0], LINK_S), RankSocket(SECRET, HOSTS[1], LINK_S)
    group = NetworkGroup(mine, 0, [mine.endpoint, other.endpoint], deadline_s=WAIT_S, start_s=WAIT_S)
    peer = sender(mine.endpoint, 1)
    part = torch.tensor([2.0]).numpy().tobytes()
    try:
        peer.send_multipart([(1).to_bytes(8, "little"), part])
        assert group.sum(torch.tensor([1.0])).tolist() == [3.0]
        peer.send_multipart([(3).to_bytes(8, "little"), part])
        with pytest.raises(PeerDead, match="a message of rank 1 of this worker was lost"):
            group.sum(torch.tensor([1.0]))
    finally:
        peer.close(linger=0)
        group.close()
        other.close()


def test_a_rank_that_is_silent_over_the_network_ends_the_worker_at_the_deadline() -> None:
    mine, other = RankSocket(SECRET, HOSTS[0], LINK_S), RankSocket(SECRET, HOSTS[1], LINK_S)
    group = NetworkGroup(mine, 0, [mine.endpoint, other.endpoint], deadline_s=0.2, start_s=0.3)
    try:
        with pytest.raises(PeerDead, match=r"rank 1 of this worker was silent for 0.2 s"):
            group.sum(torch.tensor([1.0]))
        with pytest.raises(PeerDead, match=r"silent for 0.3 s"):
            group.gather(torch.tensor([1.0]), loading=True)
    finally:
        group.close()
        other.close()


# ---------------------------------------------------------------- the line of orders


def met(secret: str, followers: int = 1) -> tuple[LeaderChannel, list[FollowerChannel]]:
    place = RankSocket(secret, HOSTS[0], LINK_S)
    line = LeaderChannel(secret, followers + 1, SystemClock(), WAIT_S, place)
    there = [
        FollowerChannel(secret, rank, LeaderPlace(place.endpoint, node(rank), LINK_S))
        for rank in range(1, followers + 1)
    ]
    line.meet(WAIT_S)
    return line, there


def test_a_lost_order_ends_the_follower_before_it_carries_out_the_next_one() -> None:
    secret = secrets.token_hex(32)
    leader = RankSocket(secret, HOSTS[0], LINK_S)
    follower = FollowerChannel(secret, 1, LeaderPlace(leader.endpoint, node(1), LINK_S))
    try:
        assert leader.socket.recv_multipart()[:2] == [b"1", JOIN]
        for number in (1, 3):
            leader.socket.send_multipart([b"1", number.to_bytes(8, "little"), bytes(8), encode(AwaitReady())])
        assert follower.next(WAIT_S) == (0, AwaitReady())
        with pytest.raises(PeerDead, match="an order of this worker's leader was lost"):
            follower.next(WAIT_S)
    finally:
        follower.close()
        assert follower.inbox is not None
        follower.inbox.close()
        leader.close()


def test_a_rank_whose_word_was_lost_says_again_that_it_is_there() -> None:
    """A connection that was cut while the leader's process still loaded its libraries has lost it."""
    secret = secrets.token_hex(32)
    place = RankSocket(secret, HOSTS[0], LINK_S)
    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(
            follow, secret, 1, 2, EngineConfig(), deadline_s=WAIT_S, start_s=WAIT_S,
            over=LeaderPlace(place.endpoint, node(1), LINK_S),
        )  # fmt: skip
        place.socket.recv_multipart()
        group = lead(secret, 2, SystemClock(), EngineConfig(), deadline_s=WAIT_S, start_s=WAIT_S, over=(place, node(0)))
        follower = following.result()
    try:
        asked = group.line.ask(AwaitReady())
        while (item := follower.line.next(WAIT_S)) is not None and item[1] != AwaitReady():
            pass
        assert item is not None
        follower.line.answer(item[0], "weights")
        assert asked.wait() == ["weights"]
    finally:
        follower.close()
        group.close()


def test_a_lost_answer_ends_the_leader() -> None:
    line, (follower,) = met(secrets.token_hex(32))
    try:
        asked = line.ask(AwaitReady())
        follower.socket.send_multipart([ANSWER, (3).to_bytes(8, "little"), (1).to_bytes(8, "little"), b"\xc0"])
        with pytest.raises(PeerDead, match="a message of rank 1 of this worker was lost"):
            asked.wait()
    finally:
        follower.close()
        line.close()


def test_no_stranger_joins_ranks_over_a_network_and_one_with_a_run_s_other_secret_is_a_stranger() -> None:
    secret = secrets.token_hex(32)
    place = RankSocket(secret, HOSTS[0], LINK_S)
    line = LeaderChannel(secret, 2, SystemClock(), WAIT_S, place)
    stranger = sender(place.endpoint, 1, secrets.token_hex(32))
    joins = msgpack.packb([[1, 1, "x"], "tcp://127.0.0.1:1", list(node(1))])
    stranger.send_multipart([JOIN, (1).to_bytes(8, "little"), joins])
    try:
        with pytest.raises(PeerDead, match="rank 1 of 2 did not come"):
            line.meet(0.3)
    finally:
        stranger.close(linger=0)
        line.close()


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (node(1, computes="avx512"), "rank 1 on host1 computes with avx512, rank 0 on host0 with avx2: set engine.num"),
        (node(1, sizes="kv 5"), "rank 1 on host1 was planned for other pools than rank 0 on host0"),
    ],
)
def test_ranks_of_unlike_nodes_are_no_worker(there: NodeOfRank, said: str) -> None:
    secret = secrets.token_hex(32)
    place = RankSocket(secret, HOSTS[0], LINK_S)
    times = {"deadline_s": WAIT_S, "start_s": WAIT_S}
    with ThreadPoolExecutor(1) as threads:
        at = LeaderPlace(place.endpoint, there, LINK_S)
        following = threads.submit(follow, secret, 1, 2, EngineConfig(), deadline_s=WAIT_S, start_s=0.5, over=at)
        with pytest.raises(ConfigError, match=said):
            lead(secret, 2, SystemClock(), EngineConfig(), over=(place, node(0)), **times)
        with pytest.raises(PeerDead, match="did not come"):
            following.result()


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(
    ("changed", "said"), [({"computes": "avx512"}, "computes with avx512"), ({"sizes": "kv 5"}, "kv 5 there")]
)
def test_every_rank_is_compared_with_the_first(rank: int, changed: dict[str, str], said: str) -> None:
    alike = [node(0), node(1), node(2)]
    assert unlike(alike[0], list(enumerate(alike[1:], 1))) == ""
    alike[rank] = node(rank, **changed)
    found = unlike(alike[0], list(enumerate(alike[1:], 1)))
    assert found.startswith(f"rank {rank} on host{rank} ")
    assert said in found


def test_ranks_that_have_read_other_files_are_no_worker() -> None:
    check_weights("same", ["same", "same"])
    with pytest.raises(ConfigError, match="rank 2 of this worker has other weights"):
        check_weights("same", ["same", "other"])


# ---------------------------------------------------------------- whole workers


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize(("prefill", "decode"), [({"tp": 2}, {"pp": 2}), ({"pp": 2}, {"tp": 2})])
def test_answers_of_workers_whose_ranks_are_on_two_hosts_are_the_oracles(
    tmp_path: Path, warm: RankProcesses, prefill: dict[str, int], decode: dict[str, int]
) -> None:
    model = make_checkpoint(tmp_path / "model", "llama")
    oracle = Oracle(model)
    with pair(
        model, tokens=2048, ranks=warm, rank_hosts=HOSTS[:2], transfer={"plane": "zmq"}, cache={"page_tokens": 16},
        prefill={"chunk_tokens": 96, **prefill}, decode=decode,
    ) as both:  # fmt: skip
        asked = prompts(1, 17, 200)
        for prompt, answer in zip(asked, both.run(*[both.submit(p, greedy(8)) for p in asked]), strict=True):
            expect_equal(oracle, prompt, answer)


def _follow(at: LeaderPlace) -> None:
    """Be a follower until its leader is gone: it exits with 3 when it sees that."""
    follower = follow(SECRET, 1, 2, EngineConfig(), deadline_s=WAIT_S, start_s=WAIT_S, over=at)
    ended = DeathWatch([("the leader", follower.leader)], lambda reason: os._exit(3))
    ended.start()
    while follower.line.next(WAIT_S) is not None:
        pass
    os._exit(0)


@pytest.fixture
def apart() -> Iterator[tuple[RankGroup, Any]]:
    """A leader here, and its follower in a process of its own, whose link is tried for half a second."""
    from tests.support.fork_server import forked_processes

    place = RankSocket(SECRET, HOSTS[0], 0.5)
    process = forked_processes().Process(target=_follow, args=(LeaderPlace(place.endpoint, node(1), 0.5),), daemon=True)
    process.start()
    with ExitStack() as stack:
        stack.callback(process.kill)
        group = lead(SECRET, 2, SystemClock(), EngineConfig(), deadline_s=WAIT_S, start_s=WAIT_S, over=(place, node(0)))
        stack.callback(group.close)
        yield group, process


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_dies_or_falls_silent_ends_the_leader_while_nothing_is_computed(
    apart: tuple[RankGroup, Any], strike: signal.Signals
) -> None:
    """A process that is stopped says as little as one behind a cut cable: its end of the connection stays open."""
    group, follower = apart
    assert group.others == (node(1),)
    reasons: Queue[str] = Queue()
    watch = DeathWatch(group.watch(), reasons.put)
    watch.start()
    os.kill(follower.pid, strike)
    assert reasons.get(timeout=WAIT_S).startswith("rank 1 of this worker can't be reached at tcp://127.0.0.2:")
    with pytest.raises(PeerDead, match="rank 1 of this worker can't be reached"):
        group.ranks.gather(torch.zeros(1))
    with pytest.raises(PeerDead, match="rank 1 of this worker can't be reached"):
        group.line.require_all()
    watch.stop()


@pytest.mark.slow
def test_a_follower_ends_when_its_leader_can_not_be_reached(apart: tuple[RankGroup, Any]) -> None:
    group, follower = apart
    assert set(listening(follower.pid)) == {HOSTS[1]}, "a rank listens at its node's address alone"
    group.ranks.close()
    group.line.close()
    follower.join(WAIT_S)
    assert follower.exitcode == 3


def test_ranks_that_do_not_meet_leave_no_socket() -> None:
    inbox = RankSocket("ab" * 16, "127.0.0.1", 5.0)
    silent = RankSocket("ab" * 16, "127.0.0.1", 5.0)
    with pytest.raises(PeerDead, match="rank 1 of this worker was silent"):
        NetworkGroup.met(inbox, 0, (inbox.endpoint, silent.endpoint), 0.05, 0.05)
    assert inbox.socket.closed
    silent.close()
