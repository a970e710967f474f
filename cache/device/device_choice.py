"""The choice of the device that `engine.device` names: a CPU, or an NVIDIA GPU that torch sees and Triton runs on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import torch

from twinpool.cache.device.cpu_device import AsyncCpuDevice, CpuDevice
from twinpool.cache.device.cuda_device import CudaDevice
from twinpool.cache.device.device_port import Device, DeviceStream
from twinpool.contracts.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuView:
    """What this process sees of NVIDIA GPUs."""

    count: int
    """GPUs that torch sees."""
    why_none: str
    """Why torch sees none, in words; empty where it sees some."""
    triton: bool
    """Whether Triton can be imported."""


def gpu_view() -> GpuView:
    """Look for GPUs. Takes no memory of any."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    why = ""
    if not count:
        built = torch.version.cuda is not None
        why = "no driver, or none of its GPUs is visible here" if built else f"torch {torch.__version__} has no CUDA"
    return GpuView(count, why, importlib.util.find_spec("triton") is not None)


def chosen_device(name: str, view: GpuView) -> torch.device:
    """The device of this name, as in `engine.device`: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    ``auto`` is the first GPU where there is one and Triton too. Raises `ConfigError` for a GPU that can't be used.
    """
    if name == "cpu" or (name == "auto" and not (view.count and view.triton)):
        return torch.device("cpu")
    if not view.count:
        raise ConfigError(f"engine.device={name}: torch sees no GPU: {view.why_none}; use engine.device=cpu")
    if not view.triton:
        raise ConfigError(f"engine.device={name}: triton isn't installed: pip install 'twinpool[cuda]'")
    index = int(name.partition(":")[2] or 0) if name != "auto" else 0
    if index >= view.count:
        there = "cuda:0 alone" if view.count == 1 else f"cuda:0 to cuda:{view.count - 1}"
        raise ConfigError(f"engine.device={name}: torch sees {there}")
    return torch.device("cuda", index)


def make_device(
    name: str,
    wake: Callable[[], None] = lambda: None,
    *,
    streams: Collection[DeviceStream] = (),
    view: GpuView | None = None,
) -> Device:
    """Return the device of this name, as in `engine.device`. Raises `ConfigError` for a GPU that can't be used.

    `wake` is called when something that runs on a thread of the host is over. `streams`: what a CPU runs beside what it
    computes (`AsyncCpuDevice`); none: it does one thing after the other. `view`: of the GPUs; None: this process's.
    """
    device = chosen_device(name, view or gpu_view())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return CudaDevice(device.index, wake)
    return AsyncCpuDevice(wake, streams) if streams else CpuDevice()


@cache
def device_capability() -> int:
    """The compute capability of the current GPU, times 10; 90 where there is none, as in Triton's interpreter."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
