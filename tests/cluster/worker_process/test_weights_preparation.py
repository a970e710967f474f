"""Weights that a process reads beside the worker that serves: one set at a time, told once they are there, and taken by
the worker to come if it is theirs."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec import structs

from twinpool.cluster.worker_process.worker_plan import WeightsPreparation
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.worker_status import WorkerStatus
from twinpool.contracts.sampling_params import WeightsVersion
from twinpool.engine.runner import load_model
from twinpool.engine.runner.load_model import KeptModel, LoadedModel
from twinpool.engine.tensors.tensor_parallel import ALONE

WAIT_S = 60
STATUS = WorkerStatus(WorkerName("decode-0"), Role.DECODE, "ready", 1, "n", Incarnation(1), 0, 0, 1, 1)
NOTHING = (0, "", "")


def weights(number: int) -> WeightsVersion:
    return WeightsVersion(number, f"v{number}", f"/weights/{number}")


class Reader:
    """What reads weights: each only once it is let go on, and those of `unfit` not at all."""

    def __init__(self, preparation: WeightsPreparation | None = None) -> None:
        self.began = {number: threading.Event() for number in range(9)}
        self.goes_on = {number: threading.Event() for number in range(9)}
        self.unfit: dict[int, Exception] = {}
        self.read: list[int] = []
        self.at_once = self.most_at_once = 0
        self.forgotten = threading.Event()
        self.preparation = preparation or WeightsPreparation(self.prepare, self.forgotten.set)

    def prepare(self, version: WeightsVersion) -> str:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.read.append(version.number)
        self.began[version.number].set()
        assert self.goes_on[version.number].wait(WAIT_S)
        self.at_once -= 1
        if version.number in self.unfit:
            raise self.unfit[version.number]
        return f"digest {version.number}"

    @property
    def told(self) -> tuple[int, str, str]:
        status = self.preparation.on(STATUS)
        assert replace_told(status) == STATUS
        return status.prepared, status.prepared_digest, status.unprepared

    def reads(self, number: int) -> None:
        """Order weights, and wait until they are being read."""
        self.preparation.order(weights(number))
        assert self.began[number].wait(WAIT_S)

    def ends(self, number: int, told: tuple[int, str, str]) -> None:
        self.goes_on[number].set()
        deadline = threading.Event()
        for _ in range(WAIT_S * 1000):
            if self.told == told:
                return
            deadline.wait(0.001)
        raise AssertionError(f"{self.told} for {told}")


def replace_told(status: WorkerStatus) -> WorkerStatus:
    return structs.replace(status, prepared=0, prepared_digest="", unprepared="")


def test_weights_are_told_once_they_were_read_and_read_once() -> None:
    reader = Reader()
    assert reader.told == NOTHING
    reader.reads(1)
    assert reader.told == NOTHING
    reader.ends(1, (1, "digest 1", ""))
    for _ in range(3):
        reader.preparation.order(weights(1))
    reader.reads(2)
    assert reader.told == NOTHING, "those of before are others"
    reader.ends(2, (2, "digest 2", ""))
    assert reader.read == [1, 2]


@pytest.mark.parametrize(
    ("error", "says"), [(ValueError("tensor x is missing"), "tensor x is missing"), (MemoryError(), "MemoryError")]
)
def test_why_weights_can_not_be_had_is_told_and_the_next_ones_are_read(error: Exception, says: str) -> None:
    reader = Reader()
    reader.unfit[1] = error
    reader.reads(1)
    reader.ends(1, (1, "", says))
    reader.reads(2)
    reader.ends(2, (2, "digest 2", ""))


def test_a_process_that_takes_no_other_weights_says_so() -> None:
    reader = Reader(WeightsPreparation())
    reader.preparation.order(weights(1))
    reader.ends(1, (1, "", "its process takes no other weights than it was started with"))


def test_one_set_is_read_at_a_time_and_one_that_is_wanted_no_more_is_never_told() -> None:
    reader = Reader()
    reader.reads(1)
    for number in (2, 3):
        reader.preparation.order(weights(number))
    reader.goes_on[1].set()
    assert reader.began[3].wait(WAIT_S)
    assert reader.told == NOTHING
    reader.ends(3, (3, "digest 3", ""))
    assert (reader.read, reader.most_at_once) == ([1, 3], 1)


def test_weights_that_nobody_wants_any_more_are_forgotten_though_they_were_being_read() -> None:
    reader = Reader()
    reader.reads(1)
    reader.preparation.order(None)
    assert reader.told == NOTHING
    reader.goes_on[1].set()
    assert reader.forgotten.wait(WAIT_S)
    assert reader.told == NOTHING
    reader.reads(1)
    reader.ends(1, (1, "digest 1", ""))
    reader.forgotten.clear()
    reader.preparation.order(None)
    assert reader.told == NOTHING
    assert reader.forgotten.wait(WAIT_S)


# ---------------------------------------------------------------- the model that is kept


class Loads:
    """A kept model whose loads make stand-ins; a model's name is its key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(load_model, "model_key", lambda model, *_: (model,))
        monkeypatch.setattr(load_model, "load_model", lambda model, *_: self.load(str(model)))
        self.made: list[tuple[str, weakref.ref[Any]]] = []
        self.alive_before: list[list[str]] = []
        """By load, the models that were in memory before it."""
        self.fails = ""
        self.images: list[str] = []
        self.kept = KeptModel(cast(Any, SimpleNamespace(use_only=self.images.append)))

    def load(self, name: str) -> LoadedModel:
        self.alive_before.append(self.alive)
        if name == self.fails:
            raise ValueError(name)
        decoder = type("Decoder", (), {})()
        self.made.append((name, weakref.ref(decoder)))
        return LoadedModel(decoder, cast(Any, None), (name,), f"image of {name}")

    @property
    def alive(self) -> list[str]:
        gc.collect()
        return [name for name, decoder in self.made if decoder() is not None]

    def get(self, name: str) -> LoadedModel:
        return self.kept.get(cast(Any, name), EngineConfig(), torch.device("cpu"), ALONE)

    def prepare(self, name: str) -> None:
        self.kept.prepare(cast(Any, name))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


def test_prepared_weights_are_taken_by_who_asks_for_them_and_the_others_go(loads: Loads) -> None:
    loads.prepare("x")
    assert loads.alive == [], "it isn't known yet for what"
    loads.get("old")
    for _ in range(2):
        loads.prepare("old")
        loads.prepare("new")
    assert loads.alive == ["old", "new"]
    assert loads.get("new").key == ("new",)
    assert (loads.kept.loads, loads.alive, loads.images[-1]) == (2, ["new"], "image of new")


@pytest.mark.parametrize(
    ("then", "alive", "count"),
    [
        (lambda loads: loads.get("other"), ["other"], 3),
        (lambda loads: loads.get("old"), ["old"], 2),
        (lambda loads: loads.kept.forget_prepared(), ["old"], 2),
        (lambda loads: loads.prepare("newer"), ["old", "newer"], 3),
    ],
)
def test_prepared_weights_that_are_not_asked_for_are_freed_before_others_are_loaded(
    loads: Loads, then: Callable[[Loads], object], alive: list[str], count: int
) -> None:
    loads.get("old")
    loads.prepare("new")
    then(loads)
    assert (loads.alive, loads.kept.loads) == (alive, count)
    assert loads.images[-1] == f"image of {alive[0]}"
    assert max(map(len, loads.alive_before)) <= 1, "there is room for two, and never for three"
    assert loads.get(alive[-1]).key == (alive[-1],)
    assert loads.kept.loads == count


def test_weights_that_can_not_be_loaded_leave_those_in_use(loads: Loads) -> None:
    used, loads.fails = loads.get("old"), "new"
    with pytest.raises(ValueError, match="new"):
        loads.prepare("new")
    assert loads.get("old") is used
    assert loads.alive == ["old"]


def test_ranks_prepare_nothing_as_they_load_together(loads: Loads) -> None:
    ranks = cast(Any, SimpleNamespace(rank=0, size=2))
    loads.kept.get(cast(Any, "old"), EngineConfig(), torch.device("cpu"), ranks)
    loads.prepare("new")
    assert loads.alive == ["old"]
