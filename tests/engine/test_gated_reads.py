"""Every layer of every kind of model reads its state through this step's gates, and after the loads into it.

Loads are late here: nothing of a prompt's state is on the device when the step that reads it begins, and each layer's
part comes only when its gate waits for it. And who reads what is looked at where torch is called: each buffer that a
door hands out is a tensor of its own, so what was taken from an earlier step, past the door or from another layer's
shows, also where the bytes would happen to be right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.engine.harness import Bench, Held
from tests.support.checkpoints import VOCAB
from tests.support.model_families import FAMILIES
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import DEVICE, NO_GATES, DeviceOp, DeviceStream, PageSpanUse
from twinpool.cache.pool.pool_set import GatePass
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import RowOutput, TokenDraw

SCORED = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=20)
PROMPT = [random.Random(8).randrange(VOCAB) for _ in range(150)]
"""Far longer than what a sparse layer selects (64), and than a window (48)."""
CUT = 140
STATE = ("deepseek_v32", "glm5", "gemma3", "falcon_h1", "qwen3_next")
"""Latents and index keys; index keys of fewer layers than there are latents; windows; two kinds of recurrent states,
beside two kinds of attention."""


@dataclass(frozen=True)
class Read:
    """A layer of a pool of which something is read or written: its index keys, or the rest."""

    pool: str
    layer: int
    indexer: bool = False


@dataclass
class Laziest:
    """An engine whose device runs nothing before it has to."""

    bench: Bench
    device: AdversarialDevice
    config: Mapping[str, Any]


@pytest.fixture(scope="module")
def laziest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Laziest]:
    """The engine of a family."""
    base = tmp_path_factory.mktemp("gated")

    @cache
    def make(name: str) -> Laziest:
        folder, device = FAMILIES[name](base / name), AdversarialDevice(0, stray=0.0)
        bench = Bench(folder, tokens=512, device=device, attention="torch")
        return Laziest(bench, device, json.loads((folder / "config.json").read_text()))

    return make


def reads_of_layer(config: Mapping[str, Any], number: int) -> set[Read]:
    """What a layer of a model has of the state, as its family is defined."""
    kind, types = config["model_type"], config.get("layer_types") or []
    if kind == "falcon_h1":
        return {Read("full", number), Read("state", number)}
    if kind in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"):
        chooses = [each == "full" for each in config.get("indexer_types") or ["full"] * config["num_hidden_layers"]]
        index = {Read("full", sum(chooses[:number]), True)} if kind != "deepseek_v3" and chooses[number] else set()
        return {Read("full", number)} | index
    pools = {"full_attention": "full", "sliding_attention": "window", "linear_attention": "state"}
    return {Read(pools[types[number]], types[:number].count(types[number]))}


class DoorsOfAStep:
    """Doors of one step, whose buffers are tensors of their own: `torch.from_numpy` makes another storage each time."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._memory = bench, bench.region.numpy()
        self.lent: dict[int, Read] = {}
        """By the storage of what was handed out."""
        self._alive: list[Tensor] = []
        self.asked: list[tuple[str, int]] = []

    def door(self, pool: str) -> _Door:
        return _Door(self, self._bench, pool)

    def lend(self, pool: str, layer: int) -> Mapping[str, Tensor]:
        self.asked.append((pool, layer))
        layout, buffers = self._bench.pools.layout, dict[str, Tensor]()
        for buffer in layout.buffers[pool]:
            if layer < buffer.spec.layers:
                region = torch.from_numpy(self._memory)
                self._alive.append(region)
                name = buffer.spec.name
                self.lent[region.untyped_storage()._cdata] = Read(pool, layer, name.startswith("index"))
                buffers[name] = layout.view(region, pool, buffer, layer)
        return buffers


class _Door(GatePass):
    """A pass without loads to wait for."""

    def __init__(self, doors: DoorsOfAStep, bench: Bench, pool: str) -> None:
        super().__init__(NO_GATES, views_of(bench, pool), {})
        self._doors, self._pool = doors, pool

    def layer(self, layer: int) -> Mapping[str, Tensor]:
        return self._doors.lend(self._pool, layer)


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what of a region each layer of a model touches: what it was lent in this step, or "past the door"."""

    def __init__(self, doors: DoorsOfAStep, region: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._doors, self._from, self._to = doors, region.data_ptr(), region.data_ptr() + region.numel()
        self.now = set[Read | str]()
        self.by_layer: list[set[Read | str]] = []

    def passed(self) -> None:
        self.by_layer.append(self.now)
        self.now = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each.layout is torch.strided and not func.is_view:
                storage = each.untyped_storage()
                if self._from <= storage.data_ptr() < self._to:
                    self.now.add(self._doors.lent.get(storage._cdata, "past the door"))
        return out


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("name", STATE)
def test_a1_each_layer_reads_its_own_state_from_the_doors_of_its_own_step(
    laziest: Callable[[str], Laziest], name: str
) -> None:
    bench, config = laziest(name).bench, laziest(name).config
    engine, held = bench.engine, bench.hold(len(PROMPT))
    for begin, end in ((0, CUT), (CUT, CUT + 1)):
        planned = engine.plan([bench.row(PROMPT[begin:end], begin, held)])
        doors = DoorsOfAStep(bench)
        reads = Reads(doors, bench.region)
        ctx = engine.context(planned, {pool: doors.door(pool) for pool in bench.pools.gates})
        ctx.passed = reads.passed
        tokens = PROMPT[begin:end] + [0] * (len(ctx.positions_m) - ctx.count)
        with torch.inference_mode(), reads:
            engine.decoder.forward(torch.tensor(tokens), ctx)
        assert reads.by_layer == [reads_of_layer(config, number) for number in range(config["num_hidden_layers"])]
        told = {(read.pool, read.layer) for layer in reads.by_layer for read in layer if isinstance(read, Read)}
        assert set(doors.asked) == told, "a door is asked for what is read, since it waits for that alone"
    bench.drop(held)


def late_loads(bench: Bench, device: AdversarialDevice, held: Held) -> None:
    """Take a sequence's state off the device, and submit its return, layer by layer."""
    for pool, gate in bench.pools.gates.items():
        at = held.indices[pool]
        views = views_of(bench, pool)
        kept = [{name: view[at].clone() for name, view in layer.items()} for layer in views]
        bench._spoil(pool, at)
        for number, (layer, saved) in enumerate(zip(views, kept, strict=True)):
            writes = (PageSpanUse(DEVICE, pool, at, [number]),)
            op = DeviceOp(f"load {pool} {number}", DeviceStream.LOAD, writes=writes)
            gate.expect(number, device.submit(op, partial(put_back, layer, saved, at)))


def put_back(layer: Mapping[str, Tensor], saved: Mapping[str, Tensor], at: Sequence[int]) -> None:
    for name, view in layer.items():
        view[at] = saved[name]


def views_of(bench: Bench, pool: str) -> list[Mapping[str, Tensor]]:
    """The buffers of a pool by layer, without asking its gate."""
    layout = bench.pools.layout
    layers = bench.pools.spec.by_name[pool].layers
    return [
        {b.spec.name: layout.view(bench.region, pool, b, n) for b in layout.buffers[pool] if n < b.spec.layers}
        for n in range(layers)
    ]


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("name", STATE)
def test_a1_no_layer_reads_state_of_a_prompt_before_its_late_loads(
    laziest: Callable[[str], Laziest], name: str
) -> None:
    """A chunk of the prompt and a single token, each with all earlier state still to be loaded as it is launched."""
    bench, device = laziest(name).bench, laziest(name).device

    def steps(*, late: bool) -> list[RowOutput]:
        held, outputs = bench.hold(len(PROMPT)), []
        for begin, end in ((0, 128), (128, CUT), (CUT, CUT + 1)):
            if late and begin:
                late_loads(bench, device, held)
                assert device.queued, "nothing has come when the step begins"
            draw = TokenDraw(SCORED, tuple(PROMPT[:end]), end)
            outputs += bench.engine.forward([bench.row(PROMPT[begin:end], begin, held, draw)])
        device.settle()
        bench.drop(held)
        return outputs

    assert steps(late=True) == steps(late=False)
