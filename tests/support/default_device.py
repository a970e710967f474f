"""The device of workers that a test builds without naming one: the CPU, and a GPU where `bench.gpu` runs the scenes."""

from __future__ import annotations

from collections.abc import Callable

from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device

MAKERS: list[Callable[[], Device]] = [CpuDevice]
"""The last one counts."""


def default_device() -> Device:
    return MAKERS[-1]()
