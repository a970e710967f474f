"""The draw of tokens on a GPU: is it torch's, is a row's the same alone, and how long does it take?

    python -m bench.kernels.draw_bench    # some twenty seconds on a GPU

Times are medians of whole calls, as a step makes them, and what a call runs on the device by the profiler, which leaves
out what the host needs to launch it. Exit code 1 where a check fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.sampling import sampler as sampling
from twinpool.engine.runner.sampling import triton_draw

VOCAB = 151_936
CUTS = {
    "no cut": SamplingParams(max_tokens=1, temperature=0.8),
    "top-k": SamplingParams(max_tokens=1, temperature=0.8, top_k=50),
    "top-p": SamplingParams(max_tokens=1, temperature=0.8, top_p=0.95),
    "top-k and top-p": SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.95),
    "min-p": SamplingParams(max_tokens=1, temperature=0.8, min_p=0.1),
}


@dataclass(frozen=True, slots=True)
class DrawCheck:
    """How many of a batch's tokens are as they should be."""

    name: str
    equal: int
    rows: int


def checks(device: torch.device) -> list[DrawCheck]:
    """Tokens beside torch's, cut by cut and all cuts in one batch, and rows alone beside rows among others."""
    results = []
    logits = 3 * torch.randn(40, VOCAB, generator=torch.Generator(device).manual_seed(1), device=device)
    uniforms = [(i + 0.5) / 40 for i in range(40)]
    batches = {name: [cut] * 40 for name, cut in CUTS.items()}
    batches["all cuts"] = [*CUTS.values()] * (40 // len(CUTS))
    for name, params in batches.items():
        drawn = triton_draw.sample(logits, params, uniforms)
        torchs = sampling._sample(logits, params, uniforms)
        results.append(DrawCheck(f"{name}: torch's tokens", int((drawn == torchs).sum()), 40))
        alone = [triton_draw.sample(logits[i : i + 1], params[i : i + 1], uniforms[i : i + 1]) for i in range(40)]
        results.append(DrawCheck(f"{name}: the same alone", int((drawn == torch.cat(alone)).sum()), 40))
    return results


def main() -> int:
    """Print checks and times."""
    if not torch.cuda.is_available():
        sys.stderr.write("bench.kernels.draw_bench: torch sees no GPU, and this measures one\n")
        return 2
    device, failed = torch.device("cuda"), 0
    for check in checks(device):
        failed += check.equal != check.rows
        sys.stdout.write(f"{check.name}: {check.equal} of {check.rows}\n")
    for rows in (1, 8, 32):
        logits = 3 * torch.randn(rows, VOCAB, device=device)
        for name, cut in CUTS.items():
            params, uniforms = [cut] * rows, [0.5] * rows
            ours = lambda: triton_draw.sample(logits, params, uniforms)  # noqa: B023, E731
            torchs = lambda: sampling._sample(logits, params, uniforms)  # noqa: B023, E731
            sys.stdout.write(
                f"{rows} rows, {name}: {_median_us(ours):.0f} us, of which the device {_device_us(ours):.0f} us;"
                f" torch {_median_us(torchs):.0f} us\n"
            )
    return int(failed > 0)


def _median_us(call: Callable[[], Tensor]) -> float:
    return float(triton.testing.do_bench(call, warmup=20, rep=80, return_mode="median")) * 1e3


def _device_us(call: Callable[[], Tensor]) -> float:
    """The time that a call's kernels and copies take on the device, by the profiler, without gaps between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            call()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profile.key_averages())) / 10


if __name__ == "__main__":
    sys.exit(main())
