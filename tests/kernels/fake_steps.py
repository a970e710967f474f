"""Steps on a GPU's tensors without contents: whoever would make the host wait for the GPU is caught.

A tensor of torch's fake mode says that it is on a GPU, has a shape and no numbers. So reading one (a length that
depends on what was routed where, a test whether any row is stale) raises, and every operation that torch is asked for
is looked at (`HostWaits`): copies between host and device must not block, and their end on the host must be pinned.
Kernels are left out: what they answer has no contents either. So a step that passes here gives the device all its work
without waiting for it; it is waited for once, when its outputs are read.

Run as a script by `test_steps_wait_once.py`. Prints one JSON object: what was launched -> null, or what was wrong.
Under `counts`, by family: copies to the device and kernels of ours, of a greedy decode step that goes on from the step
before, and of the first chunk of a prompt.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from msgspec.structs import replace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import GridExecutor

from tests.support.model_families import FAMILIES
from twinpool.cache.allocation import TableSlice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetLayout
from twinpool.cache.pool import page_allocator
from twinpool.cache.pool.page_allocator import EpochTable
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner import load_model as engine_module
from twinpool.engine.runner.batch import NO_MASKS, BatchRow, KnownAnswer, StepHandle, TokenDraw, TokenFromStep
from twinpool.engine.runner.device_rows import TokenHistory
from twinpool.engine.runner.kernel_choice import dtype_for
from twinpool.engine.runner.load_model import load_engine
from twinpool.engine.runner.sampling.logits_processors import TokenMask, needs_history
from twinpool.engine.tensors.row_exact_linear import OneDnnWeight
from twinpool.engine.tensors.weight_loader import Weights

aten = torch.ops.aten
Kernels = Literal["torch", "native", "triton"]
PAGES = 40
GPU = torch.device("cuda", 0)
KERNELS = Counter[str]()
"""Launches of Triton kernels."""
Counts = dict[str, int]
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=9, temperature=1.0, top_k=5, top_p=0.9, logprobs=2)
DRAWS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "min_p": replace(SAMPLED, top_k=0, top_p=1.0, min_p=0.1, logprobs=None),
    "penalties": replace(SAMPLED, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5),
    "logit_bias": replace(GREEDY, logit_bias=((3, 1.0), (4, -1.0))),
    "min_tokens": replace(SAMPLED, min_tokens=5, stop_token_ids=(3, 4)),
    "allowed": replace(GREEDY, allowed_token_ids=(3, 4, 5)),
    "mask": replace(SAMPLED, min_tokens=5, stop_token_ids=(3, 4)),
}
"""By kind of draw."""
AUDITED = ("greedy", "sampled", "min_p")


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations for which the host would wait for the device, and counts copies to the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies_up = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:  # What is made of several operations is looked at by these.
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func is aten._pin_memory.default:
            return _pinned(torch.empty_like(args[0], device="cpu"))
        if func is aten._to_copy.default:
            target = kwargs.get("device") or args[0].device
            self._copied(args[0], target, kwargs.get("non_blocking", False), pinned_end=args[0])
        elif func is aten.copy_.default:
            target, source = args[:2]
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            # One number may be told with the launch.
            if source.dim() or target.is_cpu:
                self._copied(source, target.device, not blocking, pinned_end=source if source.is_cpu else target)
        else:
            tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
            kinds = {one.device.type for one in tensors if one.dim()}
            assert len(kinds) < 2, f"{func} copies an operand that is on the other side, and waits"
            if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
                flags = [one for one in args[1] if one is not None and one.dtype is torch.bool and one.is_cuda]
                assert not flags, f"{func} by flags counts them, and waits"
        found = func(*args, **kwargs)
        return _pinned(found) if kwargs.get("pin_memory") else found

    def _copied(self, source: torch.Tensor, target: torch.device, non_blocking: bool, pinned_end: torch.Tensor) -> None:
        if source.device.type == target.type:
            return
        assert non_blocking, "a copy between host and device waits"
        assert hasattr(pinned_end, "pinned"), "a copy from or to pageable memory waits"
        self.copies_up += target.type == "cuda"


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    tensor.pinned = True  # type: ignore[attr-defined]
    return tensor


class AsOnGpu(TorchFunctionMode):
    """What torch does with a GPU's tensors only where it is built for GPUs, such as indexing. `launching`: refuses
    tensors made of the host's numbers anywhere but in `device_copies`."""

    def __init__(self, launching: bool = True) -> None:
        super().__init__()
        self._launching = launching

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        caller = sys._getframe(1).f_code.co_filename
        if self._launching and name in ("tensor", "as_tensor") and not caller.endswith(_PINNED):
            raise AssertionError(f"{name} copies the host's numbers up and waits")
        if name in ("__getitem__", "__setitem__") and args[0].is_cuda:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, (list, np.ndarray)) for one in index):
                raise AssertionError(f"{name} copies the host's numbers up and waits")
            view, chosen = _indexed(args[0], index)
            return _read(view, chosen) if name == "__getitem__" else _write(view, chosen, args[2])
        if name == "nonzero":
            raise AssertionError(f"{name} counts on the device, and waits")
        if name in _GUARDED and args[0].is_cuda:
            func = _GUARDED[name]
        return func(*args, **(kwargs or {}))


_GUARDED: dict[str, Callable[..., Any]] = {
    "contiguous": aten.contiguous.default,
    "copy_": aten.copy_.default,
    "__invert__": aten.bitwise_not.default,
}
_PINNED = ("cache/device/device_copies.py", "cache/memory/page_moves.py")
Chosen = dict[int, torch.Tensor]
"""By dimension, the tensor that it is indexed by."""


def _indexed(view: torch.Tensor, index: tuple[Any, ...]) -> tuple[torch.Tensor, Chosen]:
    """The view that numbers, slices and None make of a tensor, and the tensors that index it."""
    named = sum(one.dim() if _flags(one) else 1 for one in index if one is not None and one is not Ellipsis)
    rest, at = view.dim() - named, 0
    chosen: Chosen = {}
    for one in index:
        if one is Ellipsis:
            at += rest
        elif one is None:
            view, at = view.unsqueeze(at), at + 1
        elif isinstance(one, slice):
            view, at = aten.slice.Tensor(view, at, one.start, one.stop, one.step or 1), at + 1
        elif isinstance(one, torch.Tensor):
            chosen[at] = one
            at += one.dim() if _flags(one) else 1
        else:
            view = view.select(at, int(one))
    return view, chosen


def _flags(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype is torch.bool


def _listed(chosen: Chosen) -> list[torch.Tensor | None]:
    return [chosen.get(at) for at in range(max(chosen) + 1)]


def _read(view: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    return aten.index.Tensor(view, _listed(chosen)) if chosen else view


def _write(view: torch.Tensor, chosen: Chosen, value: Any) -> None:
    if chosen:
        values = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=view.dtype, device=GPU)
        aten.index_put_.default(view, _listed(chosen), values)
    elif isinstance(value, torch.Tensor):
        aten.copy_.default(view, value)
    else:
        view.fill_(value)


class FakeGpu(CpuDevice):
    """A device whose operations are launched at once, on tensors that say that they are on a GPU."""

    torch_device = GPU


def without_contents() -> None:
    """Weights and kernels as they are on a GPU, as far as the host can see."""
    GridExecutor.__call__ = lambda self, *args, **kwargs: KERNELS.update(["launched"])
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "fake"
    OneDnnWeight.packed = classmethod(lambda cls, weight_nk: None)  # type: ignore[assignment, method-assign]
    engine_module.agreed = lambda numerics, ranks, device: numerics  # when an engine is loaded it may wait
    Weights._read = lambda self, path, name, axes: torch.empty([axis.count for axis in axes])  # type: ignore[method-assign]


class Steps:
    """The steps of one family on a fake GPU."""

    def __init__(self, folder: Path, attention: Kernels) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        model = read_model(folder)
        config = EngineConfig(numerics="fast", attention=attention)
        self.spec = spec = model.pool_set(StateOptions(dtype_for(model.spec, config), 16))
        with self.mode:
            region = torch.zeros(PoolSetLayout(spec, spec.even(PAGES)).nbytes, dtype=torch.uint8, device=GPU)
        self.epochs = {pool: EpochTable(PAGES) for pool in spec.by_name}
        with AsOnGpu(launching=False):
            self.pools = PoolSet(spec, spec.even(PAGES), region)
        with self.mode, AsOnGpu(launching=False):
            self.engine = load_engine(model, config, spec, self.pools.gates, self.epochs, FakeGpu())

    def launch(self, rows: Sequence[BatchRow], masks: Mapping[int, TokenMask] = NO_MASKS) -> tuple[StepHandle, Counts]:
        """Launch a step after pages of every pool were released, and count."""
        for table in self.epochs.values():
            table.bump([PAGES - 1])
        KERNELS.clear()
        waits = HostWaits()
        with self.mode, waits, AsOnGpu():
            step = self.engine.begin(rows)
            self.engine.draw(step, masks)
        return step, {
            "copies up": waits.copies_up,
            "our kernels": sum(KERNELS.values()),
            "pools": len(self.epochs),
        }

    def rows(self, draws: Sequence[SamplingParams], chunk: int = 1, audited: bool = False) -> list[BatchRow]:
        """A row for each draw, of different lengths; `chunk`: tokens of each. `audited`: they are known answers."""
        return [self._row(number, params, chunk, audited) for number, params in enumerate(draws)]

    def _row(self, number: int, params: SamplingParams, chunk: int, audited: bool) -> BatchRow:
        start = (20, 33, 5)[number % 3]
        pages = [3 * number + 1, 3 * number + 2, 3 * number + 3]
        tables = {
            pool.name: TableSlice.of([number + 1] if pool.kind is PoolKind.STATE else pages) for pool in self.spec.pools
        }
        end = start + chunk
        known = [1] * end
        tokens = TokenHistory(known) if needs_history(params) else known
        replay = KnownAnswer(params, [1] * (end + 1), start) if audited else None
        return BatchRow([7] * chunk, start, tables, TokenDraw(params, tokens, start, at=end), replay=replay)


def launch(name: str, attention: Kernels = "triton") -> dict[str, dict[str, int]]:
    """Launch steps with every kind of draw, decode and prefill; count what a greedy decode step after another one comes
    to, and a chunk of prompts."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(FAMILIES[name](Path(folder)), attention)
        masks = {1: TokenMask.of([3, 4, 40])}
        steps.launch(steps.rows(list(DRAWS.values())), masks)
        rows = steps.rows([GREEDY] * 3)
        before, _ = steps.launch(rows)
        after = [_following(row, before, n) for n, row in enumerate(rows)]
        _, decode = steps.launch(after)
        _, chunk = steps.launch(steps.rows([GREEDY] * 3, chunk=9))
        return {"decode": decode, "chunk": chunk}


def launch_kind(kind: str) -> None:
    """Launch decode steps and a chunk that draw in one way, the second step going on from the first."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(FAMILIES["llama"](Path(folder)), "triton")
        rows = steps.rows([DRAWS[kind]] * 3)
        masks = {n: TokenMask.of([3, 4, 40]) for n in range(3)} if kind == "mask" else NO_MASKS
        before, _ = steps.launch(rows, masks)
        steps.launch([_following(row, before, n) for n, row in enumerate(rows)], masks)
        steps.launch(steps.rows([DRAWS[kind]] * 3, chunk=9), masks)


def launch_audit(params: SamplingParams) -> None:
    """Launch a step that draws a known answer again."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(FAMILIES["llama"](Path(folder)), "triton")
        steps.launch([row._replace(draw=None) for row in steps.rows([params], chunk=6, audited=True)])


def launch_far() -> None:
    """Launch a step at positions that no table of the model has come to yet."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(FAMILIES["llama"](Path(folder)), "triton")
        (row,) = steps.rows([GREEDY])
        steps.launch([row])
        pages = [1 + n % (PAGES - 2) for n in range(700)]
        tables = {pool.name: TableSlice.of(pages) for pool in steps.spec.pools}
        steps.launch([row._replace(start=16 * 700 - 1, tables=tables, draw=TokenDraw(GREEDY, (), 9, at=16 * 700))])


def begin_digests(name: str) -> None:
    """Begin digests of pages of every pool, as the check of what arrived, loads and seals do."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(FAMILIES[name](Path(folder)), "triton")
    with steps.mode, AsOnGpu(launching=False):
        _ = steps.pools.digester
    stand_ins: dict[str, Any] = {
        "Event": FakeEvent,
        "current_stream": lambda device: None,
        "device": lambda device: nullcontext(),
    }
    with patch.multiple(torch.cuda, **stand_ins), steps.mode, HostWaits(), AsOnGpu():
        for pool in steps.spec.by_name:
            steps.pools.digesting(pool, [1, 2, 5], [0, 16, 32], [16, 32, 40])


class FakeEvent:
    """An event that isn't waited for."""

    def __init__(self, blocking: bool) -> None:
        assert blocking, "who waits doesn't spin"

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None:
        raise AssertionError("waits for an event")


def launch_pageable_epochs() -> None:
    """Launch a step whose epochs come up from pageable memory."""

    def pageable(arrays: Sequence[np.ndarray[Any, Any]], device: torch.device) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(device) for array in arrays]

    with patch.object(page_allocator, "upload_packed", pageable):
        launch_kind("greedy")


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "cpu": lambda x: x.cpu(),
    "to the host without blocking, into pageable memory": lambda x: x.to("cpu", non_blocking=True),
    "item": lambda x: x.sum().item(),
    "copy_ to the host": lambda x: torch.empty(4).copy_(x),
    "copy_ from the host": lambda x: x.copy_(torch.empty(4)),
    "from the host": lambda x: torch.zeros(4).to(x.device),
    "from pageable memory": lambda x: torch.zeros(4).to(x.device, non_blocking=True),
    "from pinned memory, blocking": lambda x: torch.zeros(4).pin_memory().to(x.device),
    "a host's tensor as index": lambda x: x[torch.zeros(2, dtype=torch.int64)],
    "a list as index": lambda x: x[[1, 2]],
    "flags as index": lambda x: x[x > 0],
    "flags as index of what is set": lambda x: x.__setitem__(x > 0, x[:1]),
    "nonzero": lambda x: x.nonzero(),
    "tensor": lambda x: torch.tensor([1, 2], device=x.device),
}
"""What makes the host wait for a device."""


def wait_with(kind: str) -> None:
    """Do one thing that waits."""
    with FakeTensorMode(allow_non_fake_inputs=True), HostWaits(), AsOnGpu(), torch.inference_mode():
        WAITS[kind](torch.zeros(4, device=GPU))


def _following(row: BatchRow, before: StepHandle, number: int) -> BatchRow:
    assert row.draw is not None
    at = row.start + 2
    return row._replace(tokens=TokenFromStep(before, number), start=row.start + 1, draw=row.draw._replace(at=at))


def main() -> None:
    without_contents()
    verdicts: dict[str, Any] = {}
    counts = verdicts["counts"] = dict[str, dict[str, dict[str, int]]]()

    def family(name: str, attention: Kernels) -> None:
        counts[name] = launch(name, attention)

    cases: dict[str, Callable[[], None]] = {f"{name} triton": partial(family, name, "triton") for name in FAMILIES}
    cases["qwen3_moe torch"] = partial(family, "qwen3_moe", "torch")
    cases |= {f"draw {kind}": partial(launch_kind, kind) for kind in DRAWS}
    cases |= {f"audit {kind}": partial(launch_audit, DRAWS[kind]) for kind in AUDITED}
    cases |= {f"digests {name}": partial(begin_digests, name) for name in ("llama", "qwen3_next", "deepseek_v32")}
    cases["far"] = launch_far
    cases["epochs from pageable memory"] = launch_pageable_epochs
    cases |= {f"wait: {kind}": partial(wait_with, kind) for kind in WAITS}
    for name, run in cases.items():
        try:
            run()
            verdicts[name] = None
        except Exception:
            verdicts[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(verdicts))


if __name__ == "__main__":
    main()
