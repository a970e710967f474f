"""What a worker tells of the use of its processors, against the operating system's own count and a stand-in of NVML."""

from __future__ import annotations

import ctypes
import os
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cluster.dashboard.made_workers import worker
from twinpool.cache.device import device_choice
from twinpool.cache.device.device_choice import GpuView
from twinpool.cluster.worker_process.lease_keeper import GpuMeter, ProcessorUse, processor_use

UUID = "GPU-1234"
UNKNOWN, UNSUPPORTED = 6, 3
"""NVML's answers where it finds no such device, and where a device can't say."""


class Nvml:
    """NVML with one GPU."""

    def __init__(self, percent: int = 75, *, starts: int = 0, tells: int = 0) -> None:
        self.percent, self.starts, self.tells = percent, starts, tells

    def nvmlInit_v2(self) -> int:
        return self.starts

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid.decode() != UUID:
            return UNKNOWN
        handle._obj.value = 0xBEEF
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, told: Any) -> int:
        assert handle.value == 0xBEEF
        told._obj.gpu, told._obj.memory = self.percent, 99
        return self.tells


def opened(library: Any, uuid: str = UUID) -> GpuMeter | None:
    return GpuMeter.open(uuid, lambda name: library)


def test_the_use_of_processors_is_among_the_counters_and_takes_none_away() -> None:
    status = worker("decode-0", counters={"tokens_generated": 3.0}).status
    told = ProcessorUse(lambda: 12.3456, lambda: 0.5).on(status)
    assert told.counters == {"tokens_generated": 3.0, "cpu_seconds": 12.346, "gpu_utilization": 0.5}
    assert ProcessorUse(lambda: 1.0).on(status).counters == {"tokens_generated": 3.0, "cpu_seconds": 1.0}


def test_processor_time_is_that_which_the_kernel_counts() -> None:
    def used() -> float:
        mine = resource.getrusage(resource.RUSAGE_SELF)
        return mine.ru_utime + mine.ru_stime

    before = used()
    told = processor_use("cpu").on(worker("decode-0").status).counters
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert before - tick <= told["cpu_seconds"] <= used() + tick
    assert set(told) == {"cpu_seconds"}


def test_a_gpus_utilization_is_nvmls() -> None:
    meter = opened(Nvml(percent=75))
    assert meter is not None
    assert meter.utilization() == 0.75


def test_a_worker_tells_of_the_use_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(device: torch.device | int) -> SimpleNamespace:
        return SimpleNamespace(uuid=device if isinstance(device, int) else device.index)

    meters = {"GPU-0": opened(Nvml(percent=25)), "GPU-1": opened(Nvml(percent=75))}
    monkeypatch.setattr(GpuMeter, "open", meters.get)
    monkeypatch.setattr(device_choice, "gpu_view", lambda: GpuView(2, "", True))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for name, used in (("cuda", 0.25), ("cuda:0", 0.25), ("cuda:1", 0.75)):
        assert processor_use(name).on(worker("decode-0").status).counters["gpu_utilization"] == used, name


def test_where_nvml_is_missing_or_knows_nothing_nothing_is_told() -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: cannot open shared object file")

    assert GpuMeter.open(UUID, missing) is None
    assert opened(Nvml(), "GPU-other") is None
    assert opened(Nvml(starts=9)) is None
    meter = opened(Nvml(tells=UNSUPPORTED))
    assert meter is not None
    assert meter.utilization() is None, "a part of a GPU"
