"""The ceilings of a GPU, measured: what it copies and multiplies in a second, and what a model's steps could reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.engine.engine_speed import SpeedScenario


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches where nothing is in the way."""

    bytes_per_s: float
    """Read or written by a plain copy of a large block."""
    flops_per_s: float
    """Of a large square product in bfloat16, by the vendor's library."""

    def predicted(self, scenario: SpeedScenario, weights: int, parameters: int, token_bytes: int) -> float:
        """The tokens a second that no engine passes: bytes that must be read over the copy's rate, or operations over
        the product's, whichever takes longer.

        `weights`: bytes of them; `parameters`: that each token is multiplied with; `token_bytes`: the state of a
        position, of which decode reads that of its whole context.
        """
        if scenario.output_tokens == 1:
            tokens = scenario.batch * scenario.prompt_tokens
            return tokens / max(weights / self.bytes_per_s, 2 * parameters * tokens / self.flops_per_s)
        state = scenario.batch * scenario.prompt_tokens * token_bytes
        step_s = max((weights + state) / self.bytes_per_s, 2 * parameters * scenario.batch / self.flops_per_s)
        return scenario.batch / step_s


def measure_ceilings(device: torch.device, mib: int, size: int, rounds: int = 5) -> Ceilings:
    """Copy blocks of `mib` MiB and multiply squares of `size` on `device`; medians of `rounds`."""
    source = torch.ones(mib << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    copy_s = _median_s(lambda: target.copy_(source), device, rounds)
    return Ceilings(2 * source.numel() / copy_s, 2 * size**3 / _median_s(lambda: a @ a, device, rounds))


def _median_s(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of a run, the first uncounted."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
