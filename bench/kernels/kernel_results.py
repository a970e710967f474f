"""What the checks and timings of kernels come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from bench.common.bench_report import write_figures

TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class KernelCheck:
    claim: str
    dtype: str
    ok: bool
    worst: float
    """Largest absolute difference."""

    @classmethod
    def of(cls, claim: str, dtype: torch.dtype, got: Tensor, want: Tensor, tolerance: float = 0.0) -> KernelCheck:
        worst = float((got.double() - want.double()).abs().max())
        return cls(claim, str(dtype).removeprefix("torch."), worst <= tolerance, worst)

    def __str__(self) -> str:
        return f"{'ok   ' if self.ok else 'WRONG'} {self.dtype:9} {self.claim} (worst {self.worst:.1e})"


@dataclass(frozen=True)
class KernelTiming:
    what: str
    triton_us: float
    torch_us: float
    rate: float
    unit: str

    @classmethod
    def of(cls, what: str, ours_us: float, torch_us: float, *, read: float = 0.0, work: float = 0.0) -> KernelTiming:
        """`read`: bytes that must be read, where memory is the limit; else `work`: operations."""
        rate, unit = (read / ours_us / 1e3, "GB/s") if read else (work / ours_us / 1e6, "TFLOP/s")
        return cls(what, ours_us, torch_us, rate, unit)

    def __str__(self) -> str:
        times = f"triton {self.triton_us:9.1f} us, torch {self.torch_us:9.1f} us"
        return f"{self.what}: {times}, ratio {self.torch_us / self.triton_us:.2f}, {self.rate:.0f} {self.unit}"


class KernelsRun:
    """The results so far, printed and written one by one."""

    def __init__(self, file: Path | None, interpreted: bool) -> None:
        where = "interpreter" if interpreted else torch.cuda.get_device_name()
        self._setting = {"torch": torch.__version__, "triton": triton.__version__, "device": where}
        self._file = file
        self.checks: list[KernelCheck] = []
        self.timings: list[KernelTiming] = []

    def add(self, found: Iterable[KernelCheck | KernelTiming]) -> None:
        for one in found:
            print(one, flush=True)
            if isinstance(one, KernelCheck):
                self.checks.append(one)
            else:
                self.timings.append(one)
            groups = {"checks": [asdict(c) for c in self.checks], "timings": [asdict(t) for t in self.timings]}
            write_figures(self._file, {"setting": self._setting, **groups})


def median_us(call: Callable[[], Tensor]) -> float:
    return float(triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median")) * 1e3
