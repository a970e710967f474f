"""Models in memory: what makes two of them the same, one at a time in a process, and no file left open behind them."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.harness import Bench, MakeCheckpoint
from tests.engine.test_model_image import Images
from tests.support.gguf_files import write_gguf
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.models.model_base import Model
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner import load_model
from twinpool.engine.runner.load_model import KeptModel, LoadedModel, agreed, model_key
from twinpool.engine.tensors.row_exact_linear import TILE_ROWS, Numerics
from twinpool.engine.tensors.shard import WHOLE, Shard
from twinpool.engine.tensors.tensor_parallel import ALONE

CPU = torch.device("cpu")


@dataclass
class Ranks:
    """A group that says what the other ranks found."""

    rank: int = 0
    size: int = 1
    others: tuple[tuple[int, int], ...] = ()

    def sum(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is computed")

    def first(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing is computed")

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("nothing is computed")

    def receive(self, like: Tensor, sender: int) -> Tensor:
        raise AssertionError("nothing is computed")

    def gather(self, x: Tensor, *, loading: bool = False) -> list[Tensor]:
        assert loading, "ranks read at the speed of their own disks: the deadline of a step is too short"
        return [x, *(torch.tensor(found) for found in self.others)]


def test_each_thing_that_shapes_a_model_makes_another_key(checkpoint: MakeCheckpoint) -> None:
    model, config = read_model(checkpoint("llama")), EngineConfig()
    other = read_model(checkpoint("llama", seed=1))
    here = model_key(model, config, CPU, WHOLE)
    keys = [
        here,
        model_key(other, config, CPU, WHOLE),
        model_key(model, config, torch.device("meta"), WHOLE),
        *(model_key(model, config, CPU, shard) for shard in (Shard(0, 2), Shard(1, 2), Shard(1, 4), Shard(1, 4, 4))),
        *(
            model_key(model, replace(config, **changes), CPU, WHOLE)
            for changes in ({"dtype": "bfloat16"}, {"numerics": "fast"}, {"attention": "torch"}, {"threads": 3})
        ),
    ]
    assert len({repr(key) for key in keys}) == len(set(keys)) == len(keys)
    assert model_key(model, replace(config, share_weights="on"), CPU, WHOLE) == here, "where they lie shapes nothing"


def test_a_checkpoint_that_was_written_anew_at_its_place_is_another_model(checkpoint: MakeCheckpoint) -> None:
    one, two = read_model(checkpoint("llama")), read_model(checkpoint("llama", seed=1))
    two.spec = replace(two.spec, path=one.spec.path)
    assert model_key(one, EngineConfig(), CPU, WHOLE) != model_key(two, EngineConfig(), CPU, WHOLE)


@pytest.mark.parametrize(("name", "other"), [("build_id", lambda: "1+other"), ("class_of", lambda *_: "another")])
def test_an_image_is_of_its_build_and_of_its_numerics_class(
    name: str, other: Callable[..., str], checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Images()
    Bench(checkpoint("llama"), images=images)
    Bench(checkpoint("llama"), images=images)
    assert (len(images.kept), images.found) == (1, 1)
    monkeypatch.setattr(load_model, name, other)
    Bench(checkpoint("llama"), images=images)
    assert (len(images.kept), images.found) == (2, 1)


def test_a_model_is_kept_while_it_is_asked_for_and_freed_before_another_is_loaded(checkpoint: MakeCheckpoint) -> None:
    """There may be no room for two."""
    gone: list[weakref.ref[object]] = []

    def run(load: Callable[[], LoadedModel]) -> LoadedModel:
        gc.collect()
        assert not [one for one in gone if one() is not None], "the model before is still in memory"
        return load()

    kept = KeptModel(run=run)
    for seed, loads in ((0, 1), (0, 1), (1, 2), (0, 3)):
        loaded = kept.get(read_model(checkpoint("llama", seed=seed)), EngineConfig(share_weights="off"), CPU, ALONE)
        assert kept.loads == loads
        gone.append(weakref.ref(loaded.decoder))
        del loaded


@pytest.mark.parametrize(
    ("others", "agreed_on"),
    [
        ([(0, 4)], (8, False)),
        ([(0, 16), (0, 4)], (16, False)),
        ([(0, 8), (1, TILE_ROWS)], (TILE_ROWS, True)),
    ],
)
def test_ranks_pad_alike_as_the_one_that_has_to_pad_most(
    others: list[tuple[int, int]], agreed_on: tuple[int, bool]
) -> None:
    """Each rank's processor and weights may need another quantum. A rank that tiles needs all to."""
    numerics = agreed(Numerics(8), Ranks(0, 1 + len(others), tuple(others)), CPU)
    assert (numerics.quantum, numerics.tiled, numerics.invariant) == (*agreed_on, True)


def open_files(folder: Path) -> list[str]:
    """Files below `folder` that this process has open or mapped."""
    opened = [os.readlink(f"/proc/self/fd/{number}") for number in _descriptors()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [path for path in (*opened, *(line.split()[-1] for line in mapped)) if path.startswith(str(folder))]


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{number}"):
            yield number


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
@pytest.mark.parametrize("fails", [False, True])
def test_no_file_of_a_checkpoint_stays_open_behind_a_load_or_one_that_failed(
    suffix: str, fails: bool, checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = checkpoint("llama")
    path = folder if suffix == "safetensors" else write_gguf(folder, tmp_path / "model.gguf", "llama", "F32")
    model = read_model(path)
    if fails:
        _break_last_layer(model)
        with pytest.raises(CheckpointError, match="planted"):
            KeptModel().get(model, EngineConfig(share_weights="off"), CPU, ALONE)
    else:
        assert KeptModel().get(model, EngineConfig(share_weights="off"), CPU, ALONE).decoder.layers
    gc.collect()
    assert open_files(path if suffix == "gguf" else folder) == []


def _break_last_layer(model: Model) -> None:
    def layer(number: int, weights: Any) -> Any:
        if number == model.layers - 1:
            raise CheckpointError("planted")
        return type(model).layer(model, number, weights)

    model.layer = layer  # type: ignore[method-assign]


def test_where_the_native_kernels_cannot_be_had_only_auto_does_without(
    checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twinpool.engine.native import compile_kernels
    from twinpool.engine.runner.kernel_choice import kernels_for_config, kernels_name

    def unavailable(level: str) -> None:
        raise compile_kernels.NativeUnavailable("no compiler was found")

    monkeypatch.setattr("twinpool.engine.native.current_kernels.available", unavailable)
    assert kernels_for_config(EngineConfig(), CPU) is None
    assert kernels_name(EngineConfig(), CPU) == "torch"
    with pytest.raises(ConfigError, match=r"engine\.attention=native: no compiler .*set engine\.attention=torch"):
        kernels_for_config(EngineConfig(attention="native"), CPU)
