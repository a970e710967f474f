"""CUDA IPC: a GPU's memory opened in another process of the host, through the driver; `DeviceSharing` is the protocol.

The driver's interface is called by ctypes: five functions whose names and arguments haven't changed since CUDA 4.1.
torch's own way (`UntypedStorage._share_cuda_`) is private, hands over eight values of which four keep count of users in
files, and warns when a process ends before its users have let go; memory of pools lives as long as its worker does. A
handle is 64 bytes and names a whole allocation of the driver, in which torch's memory begins at some offset.

Nothing of this file was run on a GPU yet: see docs/gpu.md.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from twinpool.cache.device.device_copies import zeroed
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.transfer.planes.data_plane import said


@dataclass(frozen=True, slots=True)
class MappedRegion:
    """A reader's memory, mapped into this process."""

    region: torch.Tensor
    """uint8 [bytes], on a device."""
    close: Callable[[], None]
    """Ends the mapping; `region` may not be used after it."""


class DeviceSharing(Protocol):
    """How memory of a device is opened in another process."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Zeroed memory of `device` that can be shared: uint8 [nbytes]. Raises `ConfigError` for a device that can't
        share."""

    def describe(self, region: torch.Tensor) -> dict[str, Any]:
        """Plain values by which another process opens `region`, which `allocate` returned."""

    def open(self, described: Mapping[str, Any], nbytes: int, device: torch.device) -> MappedRegion:
        """Map memory that another process described, of `nbytes`, so that copies which run on `device` reach it. Raises
        `LayoutMismatch`, with the reason, where that can't be done, and for what is no description."""


log = logging.getLogger("twinpool.transfer")
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_DEVICE_ORDINAL = 9
"""`CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`: the GPU that memory lies on, as this process counts."""
_MAX_BYTES = 1 << 48


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which goes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


def handle_of(described: Mapping[str, Any], nbytes: int) -> tuple[bytes, int]:
    """The handle of a description of `nbytes`, and at which byte of its allocation they begin. Raises `LayoutMismatch`
    for what is none."""
    named, offset = said(described, "handle", bytes), said(described, "offset", int)
    size = said(described, "nbytes", int)
    if len(named) != HANDLE_BYTES or size != nbytes or not 0 <= offset <= _MAX_BYTES:
        raise LayoutMismatch(f"plane cuda_ipc: {size} bytes from {offset} of a handle of {len(named)}, not {nbytes}")
    return named, offset


class _DeviceArray:
    """Memory at an address of a GPU, as torch takes it over: uint8 [nbytes]."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3
        }  # fmt: skip


class CudaIpc:
    """Implements `transfer.planes.direct.cuda_ipc.DeviceSharing`."""

    def __init__(self) -> None:
        """Raises `ConfigError` where there is no NVIDIA driver."""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"transfer.plane=cuda_ipc needs an NVIDIA driver: {error}") from None

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if device.type != "cuda":
            raise ConfigError(f"transfer.plane=cuda_ipc is for pools on a GPU, and they lie on {device}: use shm")
        region = zeroed(nbytes, device)
        self.describe(region)  # Memory that can't be shared is refused now, not when the first reader is met.
        return region

    def describe(self, region: torch.Tensor) -> dict[str, Any]:
        base, _ = self._allocation(region.data_ptr(), region.device)
        handle = _Handle()
        try:
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        except OSError as error:
            raise ConfigError(
                f"transfer.plane=cuda_ipc: {error}; torch's expandable segments can't be shared so "
                "(PYTORCH_CUDA_ALLOC_CONF)"
            ) from None
        return {"handle": bytes(handle.reserved), "offset": region.data_ptr() - base, "nbytes": region.numel()}

    def open(self, described: Mapping[str, Any], nbytes: int, device: torch.device) -> MappedRegion:
        named, offset = handle_of(described, nbytes)
        handle, address = _Handle.from_buffer_copy(named), ctypes.c_uint64()
        torch.cuda.synchronize(device)  # This thread has the device's context from here on.
        try:
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        except OSError as error:
            raise LayoutMismatch(f"plane cuda_ipc: the reader's memory can't be mapped here: {error}") from None
        base = address.value
        try:
            whole = self._allocation(base, device)
            if whole[0] != base or offset + nbytes > whole[1]:
                raise LayoutMismatch(f"plane cuda_ipc: {nbytes} bytes from {offset} of an allocation of {whole[1]}")
            return MappedRegion(self._tensor(base + offset, nbytes), lambda: self._close(base, device))
        except BaseException:
            self._close(base, device)
            raise

    def _tensor(self, address: int, nbytes: int) -> torch.Tensor:
        ordinal = ctypes.c_int()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(ordinal), ctypes.c_int(_DEVICE_ORDINAL), ctypes.c_uint64(address)
        )
        with torch.cuda.device(ordinal.value):
            region = torch.as_tensor(_DeviceArray(address, nbytes), device="cuda")
        if region.data_ptr() != address:
            raise LayoutMismatch("plane cuda_ipc: torch copied the reader's memory instead of taking it as it lies")
        return region

    def _allocation(self, address: int, device: torch.device) -> tuple[int, int]:
        """Address and bytes of the driver's allocation that an address is in."""
        torch.cuda.synchronize(device)
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def _close(self, base: int, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        try:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(base))
        except OSError as error:  # Nothing is done with it any more, and its reader is dead, perhaps.
            log.warning("a reader's memory stays mapped: %s", error)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call the driver. Raises `OSError` with its own word for what went wrong."""
        code = int(getattr(self._driver, name)(*arguments))
        if code:
            said = ctypes.c_char_p()
            self._driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(said))
            raise OSError(f"{name} says {(said.value or b'error').decode()} ({code})")
