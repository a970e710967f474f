"""Layers of several ranks: each part leaves after its own rank's mark, and nothing is told before all are over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from tests.support.room_ends import Ends, Prompt, ends, placed
from tests.support.stand_in_ranks import RankedSeat, headed_sets
from twinpool.cache.device.cpu_device import AsyncCpuDevice, CpuDevice
from twinpool.cache.device.device_port import Completion, DeviceStream, LayerMarks, layer_groups
from twinpool.cache.pool.page_allocator import Lease
from twinpool.cache.pool.tp_ranks import TPDevice
from twinpool.contracts.messages.rank_orders import LayerCount, MarkStep
from twinpool.transfer.rooms.room_states import HandoverFailed, LayeredPages, PromptArrived

SPEC = headed_sets()["full+state"]
LAYERS = {pool.name: pool.layers for pool in SPEC.pools}
FIRST, SECOND, ALL = {0, 1}, {2, 3}, {0, 1, 2, 3}
"""The heads of either rank of two, and of both."""


class Step:
    """The completion of the leader's step."""

    done = True

    def wait(self) -> None: ...

    def order(self) -> None: ...


@dataclass
class Layered:
    """Both ends, and a step of all ranks of the writer that a test moves on."""

    both: Ends
    prompt: Prompt
    leases: Mapping[str, Lease]
    marks: list[LayerMarks]
    """Of each rank, the leader's first."""
    step: Completion

    def send(self, generation: int = 0) -> None:
        pages = LayeredPages(dict(self.prompt.runs), generation)
        self.both.sender.write_layers({self.prompt.room: pages}, self.step, self.marks[0])

    def heads(self, layer: int) -> set[int]:
        """The heads of `k` of the first full page that lie at the reader as at the writer, in a layer."""
        run = self.prompt.runs["full"]
        ours = heads_of(self.both.managers[0], layer, run.indices[0])
        theirs = heads_of(self.both.managers[1], layer, self.leases["full"].indices[0])
        return {head for head, data in ours.items() if theirs[head] == data}

    def until(self, *heads: set[int]) -> None:
        """Wait until these heads, of each layer, have arrived."""
        self.both.until(lambda: [self.heads(layer) for layer in range(len(heads))] == list(heads), f"{heads}")

    @property
    def under_way(self) -> int:
        return len(self.both.sender_peers[b"decode-0:1"].writes)


def heads_of(manager: RankedSeat, layer: int, index: int) -> dict[int, bytes]:
    """Of `k` of a full page, each head's bytes, from the first rank that holds it."""
    found: dict[int, bytes] = {}
    for pools in manager.pools:
        its = next(b for b in pools.layout.buffers["full"] if b.spec.name == "k")
        view = pools.layout.view(pools.region, "full", its, layer)[index]
        for n in range(its.spec.shape[0]):
            found.setdefault(its.spec.first_head + n, view[:, n].contiguous().view(torch.uint8).numpy().tobytes())
    return found


@contextmanager
def layered(plane: str, ranks: tuple[int, int], follower: type[AsyncCpuDevice] | type[CpuDevice]) -> Iterator[Layered]:
    """A granted room, and a step with two groups of layers that has begun on all ranks of the writer."""
    device = AsyncCpuDevice(beside=(DeviceStream.SEND,))
    with ends(SPEC, plane, device=device, ranks=ranks) as both:
        followers = both.managers[0].followers
        for steps in followers.steps:
            steps.device = follower()
        leader = TPDevice(device, followers)
        prompt = both.prompt(40)
        leases = both.open(prompt)
        marks = leader.marks(layer_groups(LAYERS, 2))
        assert marks is not None
        scene = Layered(both, prompt, leases, [marks], Step())
        try:
            begin(scene)
            yield scene
        finally:
            for each in scene.marks:
                each.end(None)
            both.sender_peers[b"decode-0:1"].writes.settle()
            device.close()
            for steps in followers.steps:
                steps.close()


def begin(scene: Layered) -> None:
    """Have the followers begin the step: they know its marks."""
    followers = scene.both.managers[0].followers
    marks = scene.marks[0]
    groups = tuple(tuple(LayerCount(*count) for count in group.items()) for group in marks.groups)
    followers.send(MarkStep(marks.step, groups))
    scene.marks += [steps._marks[marks.step] for steps in followers.steps]


@pytest.mark.parametrize("follower", [AsyncCpuDevice, CpuDevice])
@pytest.mark.parametrize("ranks", [(2, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize("plane", ["local", "shm", "zmq", pytest.param("nixl", marks=pytest.mark.slow), "staged"])
def test_a7_each_ranks_layers_leave_after_its_own_marks(
    plane: str, ranks: tuple[int, int], follower: type[AsyncCpuDevice] | type[CpuDevice]
) -> None:
    with layered(plane, ranks, follower) as scene:
        scene.send()
        leaders, followers = scene.marks
        leaders.passed(leaders.groups[0])
        scene.until(FIRST, FIRST, set())
        followers.passed(followers.groups[0])
        scene.until(ALL, ALL, set())
        followers.end(None)
        scene.until(ALL, ALL, SECOND)
        leaders.end(None)
        scene.until(ALL, ALL, ALL)
        scene.both.until(lambda: not scene.under_way, "the end of the writes")
        scene.both.sender.write(scene.prompt.room, scene.prompt.all(), (scene.step,))
        assert scene.both.sender_rooms[scene.prompt.room].writes == len(leaders), "nothing is written twice"
        scene.both.seal(scene.prompt)
        assert isinstance(scene.both.outcome(scene.prompt.room), PromptArrived)
        placed(scene.both, scene.prompt, scene.leases, {p: run.numbers for p, run in scene.prompt.runs.items()})


def test_nothing_is_told_before_the_last_part_of_any_rank_is_over() -> None:
    with layered("shm", (2, 1), AsyncCpuDevice) as scene:
        scene.send()
        scene.marks[0].end(None)
        scene.until(FIRST, FIRST, FIRST)
        scene.both.sender.write(scene.prompt.room, scene.prompt.all(), (scene.step,))
        scene.both.seal(scene.prompt)
        for _ in range(50):
            scene.both.poll()
        assert scene.under_way
        assert not scene.both.outcomes, "the follower is still computing"
        left = scene.both.receiver_rooms[scene.prompt.room].shares.left("full")
        assert left == scene.prompt.runs["full"].numbers
        scene.marks[1].end(None)
        assert isinstance(scene.both.outcome(scene.prompt.room), PromptArrived)


def test_a9_what_two_ranks_wrote_of_a_step_that_came_to_nothing_is_written_again() -> None:
    """Behind what is still to come of it on the slower rank: places are never written in the wrong order."""
    with layered("shm", (2, 1), AsyncCpuDevice) as scene:
        both, prompt = scene.both, scene.prompt
        genuine = [pools.region.clone() for pools in both.managers[0].pools]
        for pools in both.managers[0].pools:
            pools.region ^= 0x55
        scene.send()
        scene.marks[0].end(None)
        scene.until(FIRST, FIRST, FIRST)
        both.source.region.copy_(genuine[0])
        both.sender.write(prompt.room, prompt.all(), (Step(),), generation=1)
        for _ in range(50):
            both.poll()
        assert scene.heads(0) == set(), "the leader waits for its follower"
        scene.marks[1].end(None)
        scene.until(SECOND, SECOND, SECOND)
        both.managers[0].pools[1].region.copy_(genuine[1])
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived)
        placed(both, prompt, scene.leases, {pool: run.numbers for pool, run in prompt.runs.items()})


@pytest.mark.parametrize("plane", ["local", "shm"])
def test_a5_the_last_word_waits_for_layers_that_a_follower_is_still_to_write(plane: str) -> None:
    with layered(plane, (2, 1), AsyncCpuDevice) as scene:
        both, room = scene.both, scene.prompt.room
        scene.send()
        scene.marks[0].end(None)
        both.receiver.abort(room, "nobody wants it any more")
        both.until(lambda: not both.sender.rooms, "the abort at the writer")
        for _ in range(50):
            both.poll()
        assert any(lease.live for lease in scene.leases.values()), "the follower may still write there"
        assert scene.under_way
        scene.marks[1].end(RuntimeError("the step failed"))
        both.quiet()
        assert not any(lease.live for lease in scene.leases.values())


def test_a_followers_step_that_fails_fails_the_room() -> None:
    with layered("shm", (2, 1), AsyncCpuDevice) as scene:
        scene.send()
        scene.marks[0].end(None)
        scene.marks[1].end(RuntimeError("out of resources"))
        outcome = scene.both.outcome(scene.prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert "a follower rank's part of the write failed" in outcome.message
        scene.both.quiet()


def test_a_severed_link_ends_the_writes_of_followers_too() -> None:
    """What a follower has still to post comes to nothing at once; nobody waits for its step, or for the reader."""
    with layered("shm", (2, 1), CpuDevice) as scene:
        scene.send()
        scene.marks[0].end(None)
        peer = scene.both.sender_peers[b"decode-0:1"]
        peer.link.sever()
        peer.writes.settle()
        assert "a follower rank's part of the write failed" in peer.writes.failed(scene.prompt.room)
        assert not len(peer.writes)
        assert not scene.heads(0) & SECOND
