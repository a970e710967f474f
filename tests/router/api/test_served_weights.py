"""Operators' endpoints of weights, pauses and sleep beside a controller and workers that do as they are told: which
change is made of a body, when it counts as through, and how an answer says that it isn't."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from twinpool.contracts.checkpoint.pushed_weights import STRANGER_S, PushedFolders
from twinpool.contracts.checkpoint.safetensors_headers import (
    TensorHeader,
    digest_files,
    file_header,
    read_file_headers,
    read_headers,
)
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import CheckpointError, RequestError
from twinpool.contracts.messages.cluster_view import ServedWeights
from twinpool.contracts.messages.pool_changes import (
    ChangedWorkers,
    FlushCaches,
    LoadAdapter,
    OperatorChange,
    PauseCluster,
    SleepCluster,
    UnloadAdapter,
    UpdateWeights,
)
from twinpool.contracts.sampling_params import AdapterRef, WeightsVersion
from twinpool.router.api import admin_models, serving_changes
from twinpool.router.api.http_exchange import HttpExchange
from twinpool.router.service.admission import BodyBuffer


class Worker:
    """A row of a router's table."""

    def __init__(self, number: int = 0, state: str = "ready", *, paused: bool = False, prepared: int = 0) -> None:
        self.record = SimpleNamespace(name="w", weights_number=number, weights_version=f"v{number}")
        self.status = SimpleNamespace(state=state, paused=paused, prepared=prepared)


class Cluster:
    """What a router knows of its cluster, and the controller that it asks."""

    def __init__(self, root: Path) -> None:
        self.served, self.rows, self.needed = ServedWeights(), [Worker(), Worker()], ["prefill", "decode"]
        self.serves, self.clock = True, ManualClock()
        self.asked: list[OperatorChange] = []
        self.answer: ChangedWorkers | Exception = ChangedWorkers(number=1)
        self.service: Any = SimpleNamespace(
            worker_links=SimpleNamespace(known=True, directory=self),
            core=SimpleNamespace(workers=self, serving=lambda role: [role] * self.serves),
            buffer=BodyBuffer(1 << 20),
            weight_roots=str(root),
            controller=SimpleNamespace(pushed=PushedFolders(str(root), self.clock)),
            spec=SimpleNamespace(headers={}, path=root),
        )

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.rows)

    async def change_pools(self, change: OperatorChange) -> ChangedWorkers:
        self.asked.append(change)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Call:
    """A request of an operator, which may leave."""

    def __init__(self, cluster: Cluster, handler: Callable[..., Awaitable[None]], body: object = None) -> None:
        raw = b"" if body is None else json.dumps(body).encode()
        self.gone, self.sent = asyncio.Event(), list[dict[str, Any]]()
        scope = {"method": "POST", "path": "/v1/x", "headers": [], "query_string": b""}
        first = [{"type": "http.request", "body": raw}]

        async def receive() -> dict[str, Any]:
            if first:
                return first.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.sent.append(message)

        self.exchange, self._asked = HttpExchange(scope, receive, send), cluster.asked
        self._task = asyncio.ensure_future(handler(cluster.service, self.exchange))

    async def waits(self) -> bool:
        """Whether it has no answer yet, many looks after the controller was asked."""
        deadline = time.monotonic() + 60
        while not (self._asked or self._task.done()):
            assert time.monotonic() < deadline, "nobody is asked"
            await asyncio.sleep(0)
        for _ in range(40):
            await asyncio.sleep(0)
        return not self._task.done()

    async def answer(self) -> tuple[int, dict[str, Any]]:
        await asyncio.wait([self._task], timeout=60)
        assert self._task.done(), "it gets no answer"
        await self._task
        self.exchange.release()
        return self.sent[0]["status"], json.loads(self.sent[1]["body"])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(serving_changes, "LOOK_S", 0.0)
    (tmp_path / "new").mkdir()
    return Cluster(tmp_path)


@pytest.mark.asyncio
async def test_each_body_makes_its_change(cluster: Cluster, tmp_path: Path) -> None:
    path, cluster.serves = str(tmp_path / "new"), False
    for handler, body, change in (
        (admin_models.update_weights, {"path": path}, UpdateWeights(path, "", False, 30.0)),
        (admin_models.update_weights, {"path": path, "rolling": True}, UpdateWeights(path, "", True, 600.0)),
        (
            admin_models.update_weights,
            {"path": path, "version": "a/b:1", "rolling": True, "wait_s": 0},
            UpdateWeights(path, "a/b:1", True, 0),
        ),
        (admin_models.flush, None, FlushCaches(30.0)),
        (admin_models.flush, {"wait_s": 2.5}, FlushCaches(2.5)),
        (admin_models.pause, None, PauseCluster(True)),
        (admin_models.resume, {}, PauseCluster(False)),
        (admin_models.sleep, None, SleepCluster(1, 30.0)),
        (admin_models.sleep, {"level": 2, "wait_s": 86_400}, SleepCluster(2, 86_400)),
        (admin_models.wake, None, SleepCluster(0)),
    ):
        status, _ = await Call(cluster, handler, {**(body or {}), "wait": False}).answer()
        assert status == 202, "it is asked for, and nobody waits"
        assert cluster.asked.pop() == change
        if body is None:
            call = Call(cluster, handler)
            await call.waits()
            assert cluster.asked.pop() == change, "without a body"
            call.gone.set()
            await call.answer()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("handler", "body", "status", "param"),
    [
        (admin_models.update_weights, None, 400, None),
        (admin_models.update_weights, {}, 400, None),
        (admin_models.update_weights, {"path": 1}, 400, None),
        (admin_models.update_weights, {"path": "new", "level": 1}, 400, None),
        (admin_models.update_weights, {"path": "new", "rolling": 1}, 400, None),
        (admin_models.update_weights, {"path": "/elsewhere"}, 409, None),
        (admin_models.update_weights, {"path": "new", "version": "-x"}, 400, "version"),
        (admin_models.update_weights, {"path": "new", "version": "x" * 128}, 400, "version"),
        (admin_models.update_weights, {"path": "new", "wait_s": -1}, 400, "wait_s"),
        (admin_models.flush, {"wait_s": True}, 400, None),
        (admin_models.flush, {"wait_s": 86_401}, 400, "wait_s"),
        (admin_models.flush, [], 400, None),
        (admin_models.sleep, {"level": 0}, 400, "level"),
        (admin_models.sleep, {"level": 3}, 400, "level"),
        (admin_models.sleep, {"level": True}, 400, None),
        (admin_models.wake, {"level": 1}, 400, None),
        (admin_models.pause, {"wait_s": 1}, 400, None),
    ],
)
async def test_a_body_that_is_wrong_changes_nothing(
    cluster: Cluster, tmp_path: Path, handler: Any, body: Any, status: int, param: str | None
) -> None:
    if isinstance(body, dict) and body.get("path") == "new":
        body = {**body, "path": str(tmp_path / "new")}
    found, told = await Call(cluster, handler, body).answer()
    assert (found, told["error"]["param"]) == (status, param), told
    assert not cluster.asked


NEW, PENDING = WeightsVersion(1, "v1", "/w"), WeightsVersion(1, "", "/w")
Change = Callable[[Cluster], None]


def of(served: ServedWeights, *rows: Worker, serves: bool = True) -> Change:
    """How a cluster changes."""

    def change(cluster: Cluster) -> None:
        cluster.served, cluster.rows, cluster.serves = served, list(rows), serves

    return change


AT_LAST = of(ServedWeights(NEW, tried=1), Worker(1), Worker(1))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("handler", "not_yet", "at_last"),
    [
        (
            admin_models.update_weights,
            [
                of(ServedWeights(), Worker(), Worker()),
                of(ServedWeights(pending=PENDING, tried=1), Worker(prepared=1), Worker()),
                of(ServedWeights(NEW, tried=1, behind=1), Worker(1), Worker(1)),
                of(ServedWeights(NEW, tried=1), Worker(1), Worker(0)),
                of(ServedWeights(NEW, tried=1), Worker(1), serves=False),
            ],
            AT_LAST,
        ),
        (admin_models.flush, [of(ServedWeights(NEW, tried=1), Worker(0, "draining"), Worker(1))], AT_LAST),
        (
            admin_models.flush,
            [of(ServedWeights(failed="an earlier one"), Worker(), Worker())],
            of(ServedWeights(replace(NEW, number=3), tried=3), Worker(3), Worker(2, "left"), Worker(0, "dead")),
        ),
        (
            admin_models.pause,
            [of(ServedWeights(), Worker()), of(ServedWeights(paused=True), Worker(paused=True), Worker())],
            of(ServedWeights(paused=True), Worker(paused=True), Worker(0, "left")),
        ),
        (
            admin_models.resume,
            [
                of(ServedWeights(paused=True), Worker()),
                of(ServedWeights(), Worker(paused=True), Worker()),
            ],
            of(ServedWeights(), Worker(), Worker()),
        ),
        (
            admin_models.sleep,
            [
                of(ServedWeights(), Worker(0, "left")),
                of(ServedWeights(asleep=1), Worker(0, "draining"), Worker(0, "left")),
                of(ServedWeights(asleep=2), Worker(0, "left")),
            ],
            of(ServedWeights(asleep=1), Worker(0, "left"), Worker(0, "dead")),
        ),
        (
            admin_models.wake,
            [of(ServedWeights(asleep=1), Worker()), of(ServedWeights(), Worker(0, "starting"), serves=False)],
            of(ServedWeights(), Worker(), Worker()),
        ),
    ],
)
async def test_an_answer_comes_when_all_workers_have_followed(
    cluster: Cluster, tmp_path: Path, handler: Any, not_yet: list[Change], at_last: Change
) -> None:
    body = {"path": str(tmp_path / "new")} if handler is admin_models.update_weights else None
    not_yet[0](cluster)
    call = Call(cluster, handler, body)
    for number, change in enumerate(not_yet):
        change(cluster)
        assert await call.waits(), f"not at {number}"
    at_last(cluster)
    status, told = await call.answer()
    assert status == 200
    assert len(told["workers"]) == len(cluster.rows)
    assert len(cluster.asked) == 1


@pytest.mark.asyncio
async def test_a_change_that_was_given_up_is_a_conflict_and_one_before_it_is_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    body = {"path": str(tmp_path / "new")}
    cluster.answer, cluster.served = ChangedWorkers(number=2), ServedWeights(failed="an earlier one", tried=1)
    call = Call(cluster, admin_models.update_weights, body)
    assert await call.waits()
    of(ServedWeights(failed="w can't take them", tried=2), Worker(), serves=False)(cluster)  # A worker has died.
    status, told = await call.answer()
    assert (status, told["error"]["message"]) == (409, "the weights stay as they are: w can't take them")
    # Another one was begun meanwhile, and went through.
    of(ServedWeights(replace(NEW, number=3), tried=3), Worker(3))(cluster)
    assert (await Call(cluster, admin_models.update_weights, body).answer())[0] == 200
    # It went through, and one behind it was given up.
    of(ServedWeights(replace(NEW, number=2), tried=3, failed="of the third", behind=1), Worker(2))(cluster)
    cluster.asked.clear()
    call = Call(cluster, admin_models.update_weights, body)
    assert await call.waits(), "a worker has still to follow"
    cluster.served = replace(cluster.served, behind=0)
    assert (await call.answer())[0] == 200


@pytest.mark.asyncio
async def test_who_leaves_or_has_waited_for_too_long_is_told_how_far_it_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(cluster, admin_models.flush)
    assert await call.waits()
    call.gone.set()
    assert (await call.answer())[0] == 202
    monkeypatch.setattr(serving_changes, "THROUGH_S", 0.0)
    assert (await Call(cluster, admin_models.flush).answer())[0] == 202


@pytest.mark.asyncio
async def test_a_controller_that_refuses_or_is_away_is_told(cluster: Cluster) -> None:
    for error, status in ((RequestError("not now"), 409), (OSError("refused"), 503), (TimeoutError(), 503)):
        cluster.answer = error
        found, told = await Call(cluster, admin_models.sleep).answer()
        assert (found, str(error) in told["error"]["message"]) == (status, True)
    cluster.service.worker_links.known = False
    assert (await Call(cluster, admin_models.sleep).answer())[0] == 503
    assert len(cluster.asked) == 3


@pytest.mark.asyncio
async def test_what_is_told_of_workers_is_their_own(cluster: Cluster) -> None:
    of(ServedWeights(NEW, pending=replace(NEW, number=2), tried=2), Worker(1, prepared=2), Worker(0, paused=True))(
        cluster
    )
    _, told = await Call(cluster, admin_models.weights).answer()
    assert (told["weights_version"], told["pending"]["number"]) == ("v1", 2)
    shown = [(row["weights_version"], row["prepared"], row["paused"]) for row in told["workers"]]
    assert shown == [("v1", True, False), ("v0", False, True)]
    of(ServedWeights(), Worker(0, prepared=2))(cluster)
    _, told = await Call(cluster, admin_models.weights).answer()
    assert (told["weights_version"], told["workers"][0]["prepared"]) == ("v0", False)


@pytest.mark.asyncio
async def test_adapters_are_asked_of_the_controller_by_their_digest(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[tuple[object, ...]] = []

    def ref(name: str, path: str, roots: str, most: int) -> AdapterRef:
        looked.append((name, path, roots, most))
        if path == "/broken":
            raise CheckpointError("no adapter_config.json")
        return AdapterRef(name, "d" * 64, path)

    monkeypatch.setattr(admin_models, "adapter_ref", ref)
    cluster.service.spec = SimpleNamespace(names=("demo", "other name"))
    cluster.service.adapter_settings = SimpleNamespace(allowed="/roots", max_rank=8)
    load, unload = admin_models.load_adapter, admin_models.unload_adapter
    mine = {"lora_name": "mine", "lora_path": "/a"}
    for handler, body, status, change in (
        (load, mine, 200, LoadAdapter(AdapterRef("mine", "d" * 64, "/a"))),
        (load, {**mine, "load_inplace": False}, 200, LoadAdapter(AdapterRef("mine", "d" * 64, "/a"))),
        (load, {**mine, "load_inplace": True}, 200, LoadAdapter(AdapterRef("mine", "d" * 64, "/a"), replace=True)),
        (load, {**mine, "lora_path": "/broken"}, 409, None),
        (load, {**mine, "lora_name": "other name"}, 409, None),
        (load, {"lora_name": "mine"}, 400, None),
        (load, {**mine, "load_inplace": 1}, 400, None),
        (load, None, 400, None),
        (unload, {"lora_name": "mine"}, 200, UnloadAdapter("mine")),
        (unload, mine, 400, None),
    ):
        found, told = await Call(cluster, handler, body).answer()
        assert (found, cluster.asked) == (status, [change] if change else [])
        cluster.asked.clear()
        if handler is load and change:
            assert told == {"lora_name": "mine", "digest": "d" * 64}
    assert set(looked) == {("mine", "/a", "/roots", 8), ("mine", "/broken", "/roots", 8)}
    cluster.answer = RequestError("another adapter is served as mine")
    assert (await Call(cluster, load, mine).answer())[0] == 409


def pushed_part(folder: Path, names: str) -> Mapping[str, TensorHeader]:
    """A folder with tensors of these names; returns what is in it."""
    folder.mkdir()
    head = file_header([(name, "F32", (2,), 8) for name in names])
    (folder / "model.safetensors").write_bytes(head + bytes(8 * len(names)))
    return read_headers(folder)


@pytest.mark.asyncio
async def test_pushed_weights_go_where_their_change_is_refused_and_stay_where_it_may_have_been_made(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(file_header([("a", "F32", (2,), 8)]) + bytes(8))
    cluster.service.spec.headers = read_file_headers(file)
    for answer, status, stays in (
        (RequestError("not now"), 409, False),
        (OSError("refused"), 503, True),
        (ChangedWorkers(number=1), 202, True),
    ):
        cluster.answer, folder = answer, tmp_path / f"pushed-{status:016x}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(file.read_bytes())
        asked = {"path": str(folder), "wait": False}
        assert (await Call(cluster, admin_models.update_weights, asked).answer())[0] == status
        assert folder.exists() == stays
    cluster.asked.clear()
    gone = {"path": str(tmp_path / f"pushed-{409:016x}")}
    assert (await Call(cluster, admin_models.update_weights, gone).answer())[0] == 409
    partial = {"path": str(tmp_path / "new"), "partial": True}
    assert (await Call(cluster, admin_models.update_weights, partial).answer())[0] == 409
    assert cluster.asked == [], "nothing is ordered"


@pytest.mark.asyncio
async def test_pushed_weights_stay_until_their_change_is_heard_of_however_late_that_is(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.service.spec.headers = pushed_part(tmp_path / "checkpoint", "ab")
    folder, pushed = tmp_path / f"pushed-{1:016x}", cluster.service.controller.pushed
    pushed_part(folder, "ab")
    cluster.answer = ChangedWorkers(number=4)
    asked = {"path": str(folder), "wait": False}
    assert (await Call(cluster, admin_models.update_weights, asked).answer())[0] == 202
    for tried in (3, 3, 4):
        assert folder.exists()
        cluster.clock.advance(STRANGER_S)
        pushed.tend((), tried, settled=True)
        pushed.wait()
    assert not folder.exists(), "it was given up"


@pytest.mark.asyncio
@pytest.mark.parametrize("partial", [False, True])
async def test_a_part_of_the_weights_that_is_not_to_be_completed_or_can_not_be_changes_nothing(
    cluster: Cluster, tmp_path: Path, partial: bool
) -> None:
    """The files that are served have others behind their names where somebody has written there meanwhile."""
    before, folder = tmp_path / "before", tmp_path / f"pushed-{1:016x}"
    cluster.service.spec.headers = pushed_part(before, "ab")
    pushed_part(folder, "a")
    cluster.served = ServedWeights(WeightsVersion(4, "four", str(before), "d" * 64))
    asked = {"path": str(folder), "partial": partial, "wait": False}
    status, told = await Call(cluster, admin_models.update_weights, asked).answer()
    assert (status, cluster.asked, folder.exists()) == (409, [], False)
    assert ["lacks the tensor", "push all tensors"][partial] in told["error"]["message"]


@pytest.mark.asyncio
@pytest.mark.parametrize("meanwhile", ["digest_files", "complete"])
async def test_a_part_of_the_weights_is_put_onto_those_whose_tensors_it_was_completed_with(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """However they change while the files are read and written."""
    before, folder = tmp_path / "before", tmp_path / f"pushed-{1:016x}"
    present = cluster.service.spec.headers = pushed_part(before, "ab")
    pushed_part(folder, "a")
    cluster.served = ServedWeights(WeightsVersion(4, "four", str(before), digest_files(present)))
    work = getattr(serving_changes, meanwhile)

    def changes(*given: Any) -> Any:
        cluster.served = ServedWeights(WeightsVersion(5, "five", str(tmp_path / "new")))
        return work(*given)

    monkeypatch.setattr(serving_changes, meanwhile, changes)
    asked = {"path": str(folder), "partial": True, "wait": False}
    assert (await Call(cluster, admin_models.update_weights, asked).answer())[0] == 202
    (change,) = cluster.asked
    assert isinstance(change, UpdateWeights)
    assert change.onto == 4
    assert read_headers(folder).keys() == {"a", "b"}
