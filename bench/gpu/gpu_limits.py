"""The ceilings of a GPU, measured: what it copies and multiplies in a second, and what a model's steps could reach."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.engine.engine_speed import SpeedScenario


@dataclass(frozen=True)
class ModelCost:
    """What computing a token of a model takes, and what its state holds."""

    weights: int
    """Bytes that every token is multiplied with."""
    itemsize: int
    """Bytes of each of them."""
    token_bytes: int
    """The state of a position."""
    experts: int = 0
    """Bytes of the weights of all routed experts, on top."""
    chosen: float = 0.0
    """The part of the experts that a token takes."""

    def bytes_read(self, tokens: int) -> float:
        """Of weights, in a step of so many tokens that choose experts independently."""
        return self.weights + self.experts * (1 - (1 - self.chosen) ** tokens)

    @property
    def flops(self) -> float:
        """Of one token, attention's left out."""
        return 2 * (self.weights + self.chosen * self.experts) / self.itemsize


@dataclass(frozen=True)
class Ceilings:
    """What a device reaches where nothing is in the way."""

    bytes_per_s: float
    """Read or written by a plain copy of a large block."""
    flops_per_s: float
    """Of a large square product in bfloat16, by the vendor's library."""

    def predicted(self, scenario: SpeedScenario, cost: ModelCost) -> float:
        """The tokens a second that no engine passes: bytes that must be read over the copy's rate, or operations over
        the product's, whichever takes longer. Decode reads the state of its whole context as well."""
        prefill = scenario.output_tokens == 1
        tokens = scenario.batch * (scenario.prompt_tokens if prefill else 1)
        state = 0 if prefill else scenario.batch * scenario.prompt_tokens * cost.token_bytes
        read_s = (cost.bytes_read(tokens) + state) / self.bytes_per_s
        return tokens / max(read_s, cost.flops * tokens / self.flops_per_s)


def measure_ceilings(device: torch.device, mib: int, size: int, rounds: int = 5) -> Ceilings:
    """Copy blocks of `mib` MiB and multiply squares of `size` on `device`; medians of `rounds`."""
    source = torch.ones(mib << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Random: of equal numbers products are quicker than of any that a model has.
    a = torch.randn(size, size, dtype=torch.float32, device=device).to(torch.bfloat16)
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
