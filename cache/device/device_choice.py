"""The choice of the device that `engine.device` names: a CPU, or an NVIDIA GPU that torch sees and Triton runs on; and
how much of its processors a worker uses, among the counters of its heartbeats, for the dashboard and `/metrics`.

``cpu_seconds`` is what the worker's process has used of the CPU since its start; of a worker of several ranks it is the
first rank's. ``gpu_utilization`` is NVIDIA's: the share of the driver's last sampling period in which any kernel ran on
the GPU, whoever's it was. It is asked of the driver's own library (NVML), which comes with every driver; where that is
missing, or says nothing (parts of a GPU by MIG), there is no such counter.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

import torch
from msgspec.structs import replace

from twinpool.cache.device.cpu_device import AsyncCpuDevice, CpuDevice
from twinpool.cache.device.cuda_device import CudaDevice
from twinpool.cache.device.device_port import Device, DeviceStream
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.worker_status import CPU_SECONDS, GPU_UTILIZATION, WorkerStatus

log = logging.getLogger("twinpool.worker")

_LIBRARY = "libnvidia-ml.so.1"


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


# ---------------------------------------------------------------- what is used of it


class ProcessorUse:
    """The use of one worker's processors, as it is now. Any thread."""

    def __init__(
        self, cpu_s: Callable[[], float] = time.process_time, gpu: Callable[[], float | None] = lambda: None
    ) -> None:
        """`cpu_s` returns the seconds of processor time used so far, `gpu` the utilization from 0 to 1 or None."""
        self._cpu_s, self._gpu = cpu_s, gpu

    def on(self, status: WorkerStatus) -> WorkerStatus:
        """A status with the use of processors among its counters."""
        found = {CPU_SECONDS: round(self._cpu_s(), 3)}
        if (used := self._gpu()) is not None:
            found[GPU_UTILIZATION] = used
        return replace(status, counters={**status.counters, **found})


def processor_use(device_name: str) -> ProcessorUse:
    """The use of this process's CPU and, for a worker on an NVIDIA GPU, of that. `device_name`: as in `engine.device`.
    Raises `ConfigError` for a GPU that can't be used."""
    device = chosen_device(device_name, gpu_view())
    if device.type != "cuda" or torch.version.hip is not None:
        return ProcessorUse()
    meter = GpuMeter.open(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return ProcessorUse(gpu=meter.utilization) if meter is not None else ProcessorUse()


class _Utilization(ctypes.Structure):
    """``nvmlUtilization_t``, both in percent."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuMeter:
    """One GPU, asked by NVML."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, uuid: str, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL) -> GpuMeter | None:
        """The GPU of this UUID (``GPU-…``); None, with a line in the log, where NVML can't be asked for it."""
        try:
            library = load(_LIBRARY)
        except OSError as error:
            log.info("the use of the GPU is not known", extra={"reason": str(error)})
            return None
        handle = ctypes.c_void_p()
        found = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        if found != 0:
            log.info("the use of the GPU is not known", extra={"reason": f"NVML answers {found} for {uuid}"})
            return None
        return cls(library, handle)

    def utilization(self) -> float | None:
        """The share of the last sampling period, from 0 to 1; None where the driver doesn't say."""
        told = _Utilization()
        if self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(told)) != 0:
            return None
        return int(told.gpu) / 100
