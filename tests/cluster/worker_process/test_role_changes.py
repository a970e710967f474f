"""Processes that go on in another role: what they say is what freshly started workers say, and nothing of the role
before is left in them."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.cluster.fake_worker import FakeWorker
from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.served_cluster import until
from tests.support.worker_pair import Pair
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.cluster.worker_process import worker_process
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.cluster.worker_process.worker_process import NextPlan, SigtermDrain, WorkerProcess
from twinpool.cluster.worker_process.worker_thread import WorkerEnd
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig, Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import PeerDead
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.load_model import KeptModel, LoadedModel

TOKENS = 2048
WARM, CHANGES = 4, 20
NAME = WorkerName("decode-1")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
DRAWN = SamplingParams(
    max_tokens=8, temperature=0.9, seed=11, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("roles") / "model", "qwen3", seed=23)


def prompts(seed: int, count: int) -> list[list[int]]:
    """Prompts that begin alike, so that the second and later ones find a prefix."""
    rng = random.Random(seed)
    head = [rng.randrange(300) for _ in range(40)]
    return [head + [rng.randrange(300) for _ in range(rng.randint(3, 20))] for _ in range(count)]


def answers(both: Pair, asked: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """What the pair says to each prompt, greedily and drawn."""
    greedy = [both.run(both.submit(prompt, GREEDY))[0].list for prompt in asked]
    return greedy, [both.run(both.submit(prompt, DRAWN))[0].list for prompt in asked]


def found(both: Pair, prompt: list[int]) -> int:
    """Tokens of a prompt that prefill found in its cache."""
    (answer,) = both.run(both.submit(prompt, structs.replace(GREEDY, max_tokens=2)))
    return answer.progress[Role.PREFILL].cached_tokens


@contextmanager
def pair_of(folder: Path, config: Config, kept: Mapping[Role, KeptModel]) -> Iterator[Pair]:
    both = Pair(folder, config, TOKENS, SystemClock(), kept=kept)
    try:
        yield both
        both.settle()
    finally:
        both.prefill.close()
        both.decode.close()


def held() -> Counter[str]:
    """What this process has open, by kind, with its threads and its mapped segments."""
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]] += 1
        except OSError:
            continue  # The folder's own, which is closed by now.
    segments = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]
    return kinds + Counter({"threads": len(os.listdir("/proc/self/task")), "segments": len(segments)})


@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_twenty_changes_say_what_fresh_workers_say_and_leave_nothing_behind(
    folder: Path, tmp_path: Path, plane: str
) -> None:
    """With all that could be left over: prefixes on the device, in host memory and in storage, penalties, seeds."""
    cache = {"host_bytes": 1 << 22, "storage": {"backend": "file", "path": str(tmp_path)}} if plane == "shm" else {}
    config = config_from_dict({"transfer": {"plane": plane}, "engine": {"threads": 1}, "cache": cache})
    asked = prompts(1, 1)
    with pair_of(folder, config, {}) as fresh:
        expected = answers(fresh, asked)
    oracle = Oracle(folder)
    for prompt, answer in zip(asked, expected[0], strict=True):
        assert compare(oracle, prompt, answer).equal
    models = [KeptModel(), KeptModel()]
    before: Counter[str] = Counter()
    for number in range(WARM + CHANGES):
        kept = {Role.PREFILL: models[number % 2], Role.DECODE: models[1 - number % 2]}
        with pair_of(folder, config, kept) as both:
            if not cache:
                assert found(both, asked[0]) == 0, "the prefix cache begins empty"
            assert answers(both, asked) == expected
            assert both.prefill.status().steps, "it has computed them"
            assert both.prefill.setup.engine.graphs is None
        del both
        gc.collect()
        if number == WARM - 1:
            before = held()
    # ZeroMQ closes its sockets on a thread of its own.
    until(lambda: not held() - before, f"no more to be held than after {WARM} changes, {before}")
    assert [model.loads for model in models] == [1, 1]


def test_a_model_is_loaded_again_where_anything_that_shapes_it_is_another(folder: Path, tmp_path: Path) -> None:
    ran: list[LoadedModel] = []

    def run(load: Callable[[], LoadedModel]) -> LoadedModel:
        ran.append(load())
        return ran[-1]

    kept = KeptModel(run=run)
    sections: dict[str, Any] = {"transfer": {"plane": "local"}, "engine": {"threads": 1}}
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=24)
    loads = 0
    for checkpoint, engine, anew in (
        (folder, {}, True),
        (folder, {}, False),
        (folder, {"dtype": "bfloat16"}, True),
        (folder, {}, True),
        (other, {}, True),
    ):
        config = config_from_dict(sections | {"engine": {"threads": 1} | engine})
        with pair_of(checkpoint, config, {Role.DECODE: kept}) as both:
            (answer,) = both.run(both.submit(prompts(2, 1)[0], GREEDY))
            assert len(answer.list) == GREEDY.max_tokens
        loads += anew
        assert kept.loads == len(ran) == loads, "each of them by `run`, at the priority of what starts"


class Changing(FakeWorker):
    """Has its role changed as soon as it serves."""

    def __init__(self, server: ControllerServer, fails: bool) -> None:
        super().__init__(str(NAME), pid=os.getpid())
        self._fails = fails
        self.told: dict[str, float] = {}
        self.on_step = lambda: self._change(server)

    def _change(self, server: ControllerServer) -> None:
        self.told = server.call(lambda core: dict(core.table.rows[NAME].view(False).status.counters))
        if not self.told:
            return  # Its first heartbeat is on the way.
        self.on_step = lambda: None
        server.call(lambda core: core.pools.change_role(NAME, Role.PREFILL, empty=True))

    def close(self) -> None:
        if self._fails:
            raise RuntimeError("a thread doesn't end")
        super().close()


@pytest.mark.parametrize("left", ["nothing", "an open worker", "another rank", "a signal"])
def test_a_process_says_that_it_can_go_on_only_when_nothing_of_its_worker_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    config = replace(Config(), cluster=ClusterConfig(heartbeat_s=0.02))
    server = ControllerServer(Controller(SystemClock(), config.cluster, MemoryLedger()))
    terminated = SigtermDrain()
    monkeypatch.setattr(worker_process, "TERMINATED", terminated)
    try:
        server.call(lambda core: core.pools.add(NAME, Role.DECODE))
        server.call(Controller.tick)
        released = list[bool]()
        worker = Changing(server, fails=left == "an open worker")

        def release() -> None:
            released.append(worker.closed)
            if left == "another rank":
                raise PeerDead("rank 1 of this worker did not answer")

        def build(plan: WorkerPlan) -> Worker:
            if left == "a signal":
                terminated.announce()
            return worker

        plan = WorkerPlan(
            NAME, Role.DECODE, Incarnation(1), tmp_path, config, {}, "127.0.0.1", server.endpoint, tmp_path
        )
        outcome = WorkerProcess(plan, build, release=release).run()
        assert (outcome.end, outcome.goes_on) == (WorkerEnd.LEFT, left == "nothing")
        if left != "a signal":
            assert worker.told["cpu_seconds"] > 0, "its heartbeats tell the use of processors"
        assert released == ([True] if left in ("nothing", "another rank") else []), "when it is closed"
        server.call(Controller.tick)
        row = server.call(lambda core: core.table.rows[NAME])
        if left != "a signal":  # Which may come before the change: then the worker leaves for good.
            since = 1 if left == "nothing" else 2
            assert (row.role, row.incarnation, row.process_since) == (Role.PREFILL, 2, since)
    finally:
        server.close()


def test_a_plan_is_given_once_and_waited_for_so_long() -> None:
    following = NextPlan()
    assert following.take(0.0) is None
    plan = WorkerPlan(NAME, Role.PREFILL, Incarnation(2), Path("m"), Config(), {}, "", "", Path("logs"))
    following.give(plan)
    assert following.take(0.0) is plan
    assert following.take(0.0) is None


def test_the_second_plan_of_a_process_is_waited_for_as_the_first_was() -> None:
    """It may change its role again and again, and each plan takes its time to come."""
    following, taken = NextPlan(), list[WorkerPlan | None]()
    plans = [
        WorkerPlan(NAME, role, Incarnation(number), Path("m"), Config(), {}, "", "", Path("logs"))
        for number, role in ((2, Role.PREFILL), (3, Role.DECODE))
    ]
    following.give(plans[0])
    assert following.take(0.0) is plans[0]
    waits = threading.Thread(target=lambda: taken.append(following.take(20.0)))
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    following.give(plans[1])
    waits.join(60)
    assert taken == [plans[1]]
