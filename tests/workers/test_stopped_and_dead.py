"""A writer that stops in the middle of a page, by a real SIGSTOP, and what becomes of the pages promised to it; and
ends that die."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.checkpoints import Oracle, compare
from tests.support.rank_followers import Warm, rank_processes
from tests.support.worker_child import SESSION, Child, stopped, worker_child
from tests.support.worker_pair import counts_for, pair, turns
from tests.support.worker_parts import manager_of
from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import PeerDead
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.router_commands import Cancel, PeerRef, Submit
from twinpool.contracts.messages.worker_events import Done, Event, Tokens
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.worker import PrefillWorker
from twinpool.transfer.net.zmq_channel import Waiter

POOL = 24 * 16
"""Positions of decode's pool: three requests of eight pages."""
SAMPLING = SamplingParams(max_tokens=28, temperature=0.0)
PLANES = ["shm", "nixl"]


class Scene:
    """A decode worker here, two prefill workers in processes of their own; the first stops in its first write.

    `stops`: of the first, where it has two ranks, the one whose process stops.
    """

    def __init__(self, folder: Path, stack: ExitStack, plane: str, stops: int | None = None) -> None:
        sections: dict[str, Any] = {
            "transfer": {"plane": plane}, "engine": {"threads": 1}, "prefill": {"chunk_tokens": 40}
        }  # fmt: skip
        spec = read_model_spec(folder)
        faulty = {**sections, "faults": {"stop_in_write": 1}}
        self.followers: list[Warm] = []
        if stops is None:
            child = worker_child(folder, Role.PREFILL, "prefill-0", faulty, 1024)
        else:
            processes = stack.enter_context(rank_processes())
            self.followers = processes.take(1)
            stack.callback(self.end_followers)
            two = {"prefill": {**sections["prefill"], "tp": 2}, "cluster": {"rank_timeout_s": 5}}
            leads, follows = ({**(faulty if rank == stops else sections), **two} for rank in (0, 1))
            child = worker_child(folder, Role.PREFILL, "prefill-0", leads, 1024, self.followers, follows)
        self.stopping = stack.enter_context(child)
        self.healthy = stack.enter_context(worker_child(folder, Role.PREFILL, "prefill-1", sections, 1024))
        self.decode: Worker = build_worker(
            Role.DECODE, WorkerName("decode-0"), Incarnation(1), spec, config_from_dict(sections),
            host="127.0.0.1", counts=counts_for(folder, config_from_dict(sections), Role.DECODE, POOL),
        )  # fmt: skip
        stack.callback(self.decode.close)
        self.tokens: dict[str, dict[int, int]] = {}
        self.done: dict[str, Done] = {}
        self.rng = random.Random(5)

    def ask(self, name: str, child: Child) -> list[int]:
        prompt = [self.rng.randrange(300) for _ in range(100)]
        to_decode = PeerRef(WorkerName("decode-0"), Incarnation(1), "")
        for peer, worker in ((to_decode, child), (child.ref, None)):
            submit = Submit(RequestId(name), 0, RoomId(f"room-{name}"), tuple(prompt), 100, SAMPLING, peer)
            if worker is None:
                self.decode.handle(SESSION, submit)
            else:
                worker.handle(submit)
        self.tokens[name] = {}
        return prompt

    def end_followers(self) -> None:
        """What a follower's process does when its worker has ended."""
        while self.followers:
            follower = self.followers.pop()
            if follower.process.is_alive():
                os.kill(follower.process.pid, signal.SIGCONT)
            follower.end()

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, "nothing came of it within 60 s"
            for _, event in self.decode.step():
                self.take(event)
            for event in [*self.healthy.events(), *self.stopping.events()]:
                self.take(event)
            self.decode.wait(0.005)

    def take(self, event: Event) -> None:
        if isinstance(event, Tokens):
            for i, token in enumerate(event.tokens):
                self.tokens[event.request_id][event.position + i] = token
        elif isinstance(event, Done):
            self.done[event.request_id] = event

    def begun(self, name: str) -> bool:
        return len(self.tokens[name]) > 1

    def answer(self, name: str) -> list[int]:
        found = self.tokens[name]
        assert sorted(found) == list(range(100, 100 + SAMPLING.max_tokens)), f"{name}: {self.done[name]}"
        return [found[p] for p in sorted(found)]

    @property
    def free(self) -> int:
        return self.decode.status().pages_free


@contextmanager
def stopped_scene(folder: Path, plane: str) -> Iterator[Scene]:
    """The writer has stopped in mid-write, its request is cancelled, and the rest of the pool is at work."""
    with ExitStack() as stack:
        scene = Scene(folder, stack, plane)
        scene.ask("stuck", scene.stopping)
        scene.until(lambda: scene.stopping.stopped)
        assert scene.free == 17
        scene.decode.handle(SESSION, Cancel(RequestId("stuck"), 0))
        scene.until(lambda: not scene.decode.status().waiting)
        assert scene.free == 17, "what a stopped writer may still write to is not given away"
        yield scene


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_a5_promised_pages_come_back_on_the_writers_word_and_no_answer_is_touched(
    model: Path, oracle: Oracle, plane: str
) -> None:
    with stopped_scene(model, plane) as scene:
        prompts = {name: scene.ask(name, scene.healthy) for name in ("a", "b", "c")}
        scene.until(lambda: scene.begun("a") and scene.begun("b"))
        # Seven for each prompt, and each expected to come to eight.
        assert (scene.free <= 3, scene.decode.status().waiting) == (True, 1)
        assert not scene.begun("c")
        scene.stopping.signal(signal.SIGCONT)
        scene.until(lambda: set(scene.done) >= {"a", "b", "c"} and scene.free == 24)
        for name, prompt in prompts.items():
            assert compare(oracle, prompt, scene.answer(name)).equal
        assert scene.decode.check().violations == ()
        assert scene.decode.check().rooms == 0


@pytest.mark.slow
@pytest.mark.parametrize("plane", PLANES)
def test_a5_a_writers_proven_death_gives_its_pages_back(model: Path, oracle: Oracle, plane: str) -> None:
    with stopped_scene(model, plane) as scene:
        scene.stopping.signal(signal.SIGKILL)
        scene.until(lambda: scene.free == 24)
        prompts = {name: scene.ask(name, scene.healthy) for name in ("a", "b", "c")}
        scene.until(lambda: set(scene.done) >= {"a", "b", "c"})
        for name, prompt in prompts.items():
            assert compare(oracle, prompt, scene.answer(name)).equal
        assert scene.decode.check().violations == ()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
@pytest.mark.parametrize("plane", ["zmq", "staged"])
def test_a5_over_tcp_promised_pages_come_back_at_once_and_nothing_of_a_torn_write_lands_in_them(
    model: Path, oracle: Oracle, plane: str, end: signal.Signals
) -> None:
    """The reader stores, so a room that is given up is revoked: others compute in its pages, and then the writer is
    killed in mid-write, or goes on with it."""
    with ExitStack() as stack:
        scene = Scene(model, stack, plane)
        scene.ask("stuck", scene.stopping)
        scene.until(lambda: scene.stopping.stopped)
        scene.decode.handle(SESSION, Cancel(RequestId("stuck"), 0))
        scene.until(lambda: scene.free == 24)
        prompts = {name: scene.ask(name, scene.healthy) for name in ("a", "b", "c")}
        scene.until(lambda: scene.begun("a") and scene.begun("b"))
        scene.stopping.signal(end)
        scene.until(lambda: set(scene.done) >= {"a", "b", "c"} and scene.free == 24)
        for name, prompt in prompts.items():
            assert compare(oracle, prompt, scene.answer(name)).equal
        assert scene.decode.check().violations == ()
        assert scene.decode.check().rooms == 0


@pytest.mark.slow
@pytest.mark.parametrize("stops", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("plane", [*PLANES, "zmq", "staged"])
def test_a5_of_a_writer_with_two_ranks_one_is_killed_in_mid_write_and_nothing_of_the_other_lands_either(
    model: Path, oracle: Oracle, plane: str, stops: int
) -> None:
    """Its two ranks write to one rank here. A page that one of them may still write to is not given away, though the
    other is dead."""
    with ExitStack() as stack:
        scene = Scene(model, stack, plane, stops)
        (follower,) = scene.followers
        victim: int = (scene.stopping.process, follower.process)[stops].pid
        scene.ask("stuck", scene.stopping)
        scene.until(lambda: stopped(victim))
        scene.decode.handle(SESSION, Cancel(RequestId("stuck"), 0))
        scene.until(lambda: not scene.decode.status().waiting)
        if plane in PLANES:
            assert scene.free == 17, "what a stopped writer may still write to is not given away"
            if stops == 0:
                os.kill(victim, signal.SIGKILL)
                scene.stopping.process.join(60)
                assert follower.pipe.poll(30), "a follower didn't end with its leader"
                rounds = iter(range(200))
                scene.until(lambda: next(rounds, None) is None)
                assert scene.free == 17, "its other rank's process lives"
                scene.end_followers()
        else:
            scene.until(lambda: scene.free == 24)
        prompts = {name: scene.ask(name, scene.healthy) for name in ("a", "b", "c")}
        if plane not in PLANES or stops == 1:
            scene.until(lambda: scene.begun("a") and scene.begun("b"))
            os.kill(victim, signal.SIGKILL)
        scene.until(lambda: set(scene.done) >= {"a", "b", "c"} and scene.free == 24)
        for name, prompt in prompts.items():
            assert compare(oracle, prompt, scene.answer(name)).equal
        assert scene.decode.check().violations == ()
        assert scene.decode.check().rooms == 0
        scene.stopping.process.join(60)
        assert not scene.stopping.process.is_alive(), "a worker goes with any of its ranks"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("plane", [*PLANES, "zmq", "staged"])
def test_a5_a_readers_proven_death_ends_its_rooms_at_the_writer(model: Path, plane: str, ranks: int) -> None:
    """By its pidfds: the clock stands still, so no deadline can be the reason."""
    sections = {
        "transfer": {"plane": plane}, "engine": {"threads": 1}, "prefill": {"chunk_tokens": 16}, "decode": {"tp": ranks}
    }  # fmt: skip
    prefill = build_worker(
        Role.PREFILL, WorkerName("prefill-0"), Incarnation(1), read_model_spec(model), config_from_dict(sections),
        host="127.0.0.1", counts=counts_for(model, config_from_dict(sections), Role.PREFILL, POOL), clock=ManualClock(),
    )  # fmt: skip
    to_prefill = PeerRef(WorkerName("prefill-0"), Incarnation(1), prefill.control)
    deadline = time.monotonic() + 60
    with ExitStack() as stack:
        stack.callback(prefill.close)
        processes = stack.enter_context(rank_processes())
        followers = processes.take(ranks - 1)
        for follower in followers:
            stack.callback(follower.end)
        decode = stack.enter_context(worker_child(model, Role.DECODE, "decode-0", sections, POOL, followers))
        submit = Submit(RequestId("a"), 0, RoomId("room-a"), (5,) * 300, 300, SAMPLING, decode.ref)
        decode.handle(replace(submit, peer=to_prefill))
        prefill.handle(SESSION, submit)
        while not prefill.status().counters["sent_bytes"]:
            assert time.monotonic() < deadline
            prefill.step()
        assert prefill.check().rooms == 1
        decode.signal(signal.SIGKILL)
        for follower in followers:
            follower.process.kill()
        events: list[Event] = []
        while prefill.check().rooms:
            assert time.monotonic() < deadline
            events += [event for _, event in prefill.step()]
        # On a slow machine everything may have been sent by then: the request has left, and only its room was open.
        # Its connection ends with it, and may be heard of first.
        why = [e.message for e in events if isinstance(e, Done)]
        assert all("decode-0 died" in said or ("decode-0" in said and "cut" in said) for said in why), why
        # Pages of a write that was under way come back when it has ended.
        while prefill.status().pages_free < prefill.status().pages_total:
            assert time.monotonic() < deadline
            prefill.step()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("still_broken", [False, True])
def test_a_worker_whose_round_broke_off_closes_all_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, role: Role, still_broken: bool
) -> None:
    """A rank died while a request was on its way out: seed 649 of the simulator."""
    with pair(model, settle=False, prefill={"chunk_tokens": 16}) as both:
        both.submit(list(range(60)), SamplingParams(40, temperature=0.0))
        worker: PrefillWorker | DecodeWorker = both.prefill if role is Role.PREFILL else both.decode
        for _ in turns(1000):
            both.step()
            if worker.runnable:
                break
        (request,) = worker.report.requests

        def broken(*_: object) -> None:
            raise PeerDead("rank 1 of this worker can't be reached")

        with monkeypatch.context() as patch:
            patch.setattr(manager_of(worker).allocations, "free", broken)
            with pytest.raises(PeerDead):
                worker.drop_session(request.session)
            assert list(worker.report.requests) == [request], "it isn't out of the books"
            if still_broken:
                with pytest.raises(PeerDead):
                    worker.close()
        if not still_broken:
            worker.close()
            assert list(worker.report.requests) == []
            assert len(manager_of(worker).allocations) == 0
        assert isinstance(worker.setup.waiter, Waiter)
        assert worker.setup.waiter._event < 0, "what it listens on is closed, whatever went wrong"
