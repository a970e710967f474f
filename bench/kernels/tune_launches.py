"""Which warps and stages make a kernel fastest on the GPU at hand, of those that change no bit of its results.

    python -m bench.kernels --tune

Every launch of `production_launches` is tried as it is and with other options. Which options come into question is
read off the compiled code, before anything runs: a kernel must add up in the same order as with its launcher's own
(`CompiledKernel.orders`), and be nothing that no kernel may be (`TableRow.faults`). Tiles are not tried: rows, blocks
and splits are the shape of the work, and that is part of the numerics. What is faster by more than `_WORTH` goes into
`engine/tensors/launch_configs.json`, which launchers read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from tests.support.launches.compiled_kernel import compiled
from tests.support.launches.compiled_table import TableRow
from tests.support.launches.production_launches import Rig, scenes
from tests.support.launches.recorded_launches import RecordedLaunch, Run, intercepted, recorded
from twinpool.cache.device.device_choice import device_capability
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention
from twinpool.engine.tensors import launch_configs

TUNED = ("extend_kernel", "decode_split_kernel", "latent_split_kernel", "index_score_kernel", "grouped_product_kernel")
"""The kernels whose launchers read the table."""
WARPS, STAGES = (2, 4, 8, 16), (1, 2, 3, 4, 5)
_WORTH = 0.98
"""Of the launcher's own time: what is not under it is noise."""
_PAGES = 4096
Options = dict[str, int]
Timer = Callable[[Callable[[], object]], float]
"""How long a launch takes, in ms."""


def candidates(launch: RecordedLaunch, capability: int) -> Iterator[Options]:
    """Options under which the kernel has the same bits and no faults; those of the launch itself come first."""
    own = compiled(launch, capability)
    yield {"num_warps": own.warps, "num_stages": own.stages}
    for warps in WARPS:
        for stages in STAGES:
            if (warps, stages) == (own.warps, own.stages):
                continue
            options = {"num_warps": warps, "num_stages": stages}
            code = compiled(replace(launch, options=options), capability)
            over_pages = "tables_ptr" in launch.signature
            row = TableRow(launch.name, "", {}, launch.scratch_bytes, code, over_pages)
            if code.orders == own.orders and not row.faults():
                yield options


class Tuner:
    """Takes the place of Triton's launch: times the first launch of each shape class, and carries out all."""

    def __init__(self, capability: int, time_ms: Timer) -> None:
        self.best: dict[str, Options] = {}
        """Shape class -> the fastest options."""
        self._capability, self._time_ms = capability, time_ms

    def launch(self, run: Run, kernel: JITFunction[Any], args: Any, grid: Any, kwargs: Any) -> Any:
        """Carry out one launch by `run`; if its class is new, find its options first."""
        name = str(kernel.fn.__name__)
        if name in TUNED:
            sizes = tuple([kwargs.get(size, 0) for size in launch_configs.SIZES])
            key = launch_configs.shape_class(name, args[0].dtype, sizes)
            if key not in self.best:
                self.best[key] = self._fastest(
                    key, recorded(kernel, args, grid, dict(kwargs)), run, kernel, args, kwargs
                )
        return run(kernel, *args, grid=grid, warmup=False, **kwargs)

    def _fastest(
        self, key: str, launch: RecordedLaunch, run: Run, kernel: JITFunction[Any], args: Any, kwargs: Any
    ) -> Options:
        times: list[tuple[float, Options]] = []
        for options in candidates(launch, self._capability):
            given = {**kwargs, **options}
            call = lambda given=given: run(kernel, *args, grid=launch.grid, warmup=False, **given)  # noqa: E731
            times.append((self._time_ms(call), options))
        (own_ms, own), (best_ms, best) = times[0], min(times, key=lambda found: found[0])
        chosen = best if best_ms < _WORTH * own_ms else own
        print(f"{key}: {own} {own_ms:.4f} ms; of {len(times)} the best {best} {best_ms:.4f} ms", flush=True)
        return chosen


def main() -> int:
    """Tune on the current GPU, and write the table. Returns 2 where there is none."""
    if not torch.cuda.is_available():
        print("bench.kernels: --tune measures on a GPU, and torch sees none; the table stays as it is", file=sys.stderr)
        return 2
    capability = device_capability()
    tuner = Tuner(
        capability, lambda call: float(triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median"))
    )
    rig = Rig(TritonAttention(), torch.device("cuda"), _PAGES)
    with intercepted(tuner.launch):
        for scene in scenes(capability, rig):
            if "longest" not in scene.name:
                scene.launch()
    write(launch_configs.current_gpu(), tuner.best)
    print(f"{len(tuner.best)} shape classes of {launch_configs.current_gpu()} are in {launch_configs.TABLE}")
    return 0


def write(gpu: str, best: dict[str, Options]) -> None:
    """Put a GPU's options into the table, in place of those that it has."""
    table = launch_configs.read_table()
    table[gpu] = {key: [best[key]["num_warps"], best[key]["num_stages"]] for key in sorted(best)}
    text = json.dumps(dict(sorted(table.items())), indent=1)
    launch_configs.TABLE.write_text(text + "\n", encoding="utf-8")
