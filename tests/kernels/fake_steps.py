"""Decode steps on tensors without contents: whoever would make the host wait for a device is caught.

A tensor of torch's fake mode has a shape and no numbers, so reading one (a length that depends on what was routed
where, a test whether any row is stale) raises. Kernels are left out: what they answer has no contents either. And
nothing may go up to the device but through `engine.tensors.pinned_memory`, whose copies don't wait. So a step that
passes here gives the device all its work without waiting for it; it is waited for once, when its outputs are read.

Run as a script by `test_steps_wait_once.py`. Prints one JSON object: family -> null, or what was wrong. Under `counts`,
by family: of a greedy decode step that goes on from the step before, copies to the device and kernels of ours.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Literal

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

from cache.allocation.block_table import TableSlice
from cache.device.device_backends import CpuDevice
from cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from cache.memory.memory_layout import PoolSetLayout
from cache.pool.epoch_table import EpochTable
from cache.pool.pool_set import PoolSet
from contracts.config.worker_config import EngineConfig
from contracts.sampling_params import SamplingParams
from engine.models.model_base import StateOptions
from engine.models.registry import read_model
from engine.runner import load_model as engine_module
from engine.runner.batch import BatchRow, TokenDraw, TokenFromStep
from engine.runner.load_model import load_engine
from engine.runner.model_runner import ModelRunner
from engine.tensors import pinned_memory
from engine.tensors import row_exact_linear as numerics
from engine.tensors.weight_loader import Weights, dtype_for
from tests.families import FAMILIES

Kernels = Literal["torch", "native", "triton"]
PAGES = 40
KERNELS = Counter[str]()
"""Launches of Triton kernels."""
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=9, temperature=1.0, top_k=5, top_p=0.9, logprobs=2)


class CountingTorch:
    """torch as `pinned_memory` sees it: counts calls that take up numbers, several arrays of one call as one."""

    def __init__(self) -> None:
        self.count, self._call = 0, object()

    def __getattr__(self, name: str) -> Any:
        call = sys._getframe(1)
        call = call.f_back if call.f_code.co_name == "<listcomp>" and call.f_back is not None else call
        if name in ("from_numpy", "tensor") and call is not self._call:
            self.count, self._call = self.count + 1, call
        return getattr(torch, name)


class Uploads(TorchFunctionMode):
    """Refuses tensors made of the host's numbers, and lists as indices, anywhere but in `pinned_memory`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        indices = args[1] if name in ("__getitem__", "__setitem__") else ()
        listed = any(isinstance(one, list) for one in (indices if isinstance(indices, tuple) else (indices,)))
        caller = sys._getframe(1).f_code.co_filename
        if (name in ("tensor", "as_tensor", "from_numpy") or listed) and not caller.endswith(
            "engine/tensors/pinned_memory.py"
        ):
            raise AssertionError(f"{name} copies the host's numbers up and waits")
        return func(*args, **(kwargs or {}))


def without_contents() -> None:
    """Weights, kernels and devices as they are on a GPU, as far as the host can see."""
    GridExecutor.__call__ = lambda self, *args, **kwargs: KERNELS.update(["launched"])
    FakeTensor.is_cpu = property(lambda self: False)  # type: ignore[assignment]
    numerics._packed = lambda weight_nk: None
    engine_module.agreed = lambda numerics, ranks, device: numerics  # when an engine is loaded it may wait
    Weights._read = lambda self, path, name, axes: torch.empty([axis.count for axis in axes])  # type: ignore[method-assign]


def engine_of(folder: Path, mode: FakeTensorMode, attention: Kernels) -> tuple[ModelRunner, PoolSetSpec]:
    model = read_model(folder)
    config = EngineConfig(numerics="fast", attention=attention)
    spec = model.pool_set(StateOptions(dtype_for(model.spec, config), 16))
    with mode:
        region = torch.zeros(PoolSetLayout(spec, spec.even(PAGES)).nbytes, dtype=torch.uint8)
    gates = PoolSet(spec, spec.even(PAGES), region).gates
    epochs = {pool: EpochTable(PAGES) for pool in spec.by_name}
    with mode:
        return load_engine(model, config, spec, gates, epochs, CpuDevice()), spec


def decode_rows(spec: PoolSetSpec) -> list[BatchRow]:
    """Three sequences of different lengths: greedy, sampled, sampled."""
    rows = []
    for number, (length, params) in enumerate(((20, GREEDY), (33, SAMPLED), (5, SAMPLED))):
        pages = [3 * number + 1, 3 * number + 2, 3 * number + 3]
        tables = {
            pool.name: TableSlice.of([number + 1] if pool.kind is PoolKind.STATE else pages) for pool in spec.pools
        }
        draw = TokenDraw(params, [1] * length, length)
        rows.append(BatchRow([7], length, tables, draw))
    return rows


def launch(name: str, attention: Kernels = "triton") -> dict[str, int]:
    """Launches a step of every kind of draw, and counts what a greedy step after another one comes to."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with tempfile.TemporaryDirectory() as folder:
        engine, spec = engine_of(FAMILIES[name](Path(folder)), mode, attention)
        with mode, Uploads():
            engine.launch(decode_rows(spec))
        greedy = TokenDraw(GREEDY, (), 9)
        rows = [row._replace(draw=greedy._replace(at=row.start + 1)) for row in decode_rows(spec)]
        with mode, Uploads():
            before = engine.launch(rows)
        after = [
            row._replace(tokens=TokenFromStep(before, n), start=row.start + 1, draw=greedy._replace(at=row.start + 2))
            for n, row in enumerate(rows)
        ]
        KERNELS.clear()
        counting: Any = CountingTorch()
        setattr(pinned_memory, "torch", counting)  # noqa: B010
        try:
            with mode, Uploads():
                engine.launch(after)
        finally:
            setattr(pinned_memory, "torch", torch)  # noqa: B010
        return {"copies up": counting.count, "our kernels": sum(KERNELS.values())}


def main() -> None:
    without_contents()
    verdicts: dict[str, Any] = {}
    counts = verdicts["counts"] = dict[str, dict[str, int]]()
    cases: list[tuple[str, Kernels]] = [*((name, "triton") for name in FAMILIES), ("qwen3_moe", "torch")]
    for name, attention in cases:
        try:
            counts[name] = launch(name, attention)
            verdicts[f"{name} {attention}"] = None
        except Exception:
            verdicts[f"{name} {attention}"] = traceback.format_exc()
    sys.stdout.write(json.dumps(verdicts))


if __name__ == "__main__":
    main()
