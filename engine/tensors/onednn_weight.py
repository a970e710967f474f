"""A weight in oneDNN's own layout, as bytes that other processes of the node can map.

oneDNN packs a weight for the products of one processor. torch holds the result as a tensor without strides, which
can't be pickled or sliced. Its bytes and the description of its layout can be had (`torch.ops.mkldnn`), and the C
interface that torch compiles models ahead of time against makes such a tensor over memory that lies there already. So
an image of a model (`engine.runner.model_image`) has these weights as it has all others.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class LayoutUnavailable(Exception):
    """Raised when a packed weight can't be made over memory here: another build of torch."""


class OneDnnWeight:
    """A weight [n, k] of float32 or bfloat16, packed by oneDNN for this processor.

    It holds the packed tensor, and where that lies in memory of others the tensor (uint8) that keeps the memory mapped.
    """

    def __init__(self, packed: Tensor, memory: Tensor | None = None) -> None:
        self._packed: Tensor | None = packed
        self._memory = memory
        self.shape = (packed.shape[0], packed.shape[1])
        self.dtype = packed.dtype

    @classmethod
    def packed(cls, weight_nk: Tensor) -> OneDnnWeight | None:
        """Pack a weight; None where oneDNN can't pack or multiply it."""
        if weight_nk.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return None
        try:
            packed = cls(torch.ops.mkldnn._reorder_linear_weight(weight_nk))
            packed(weight_nk[:1], None)
        except (AttributeError, NotImplementedError, RuntimeError):  # another build of torch, or another processor
            return None
        return packed

    @classmethod
    def placed(cls, memory: Tensor, shape: tuple[int, int], dtype: torch.dtype, layout: bytes) -> OneDnnWeight:
        """The weight whose packed bytes are `memory` (uint8), which is kept and not copied.

        `layout` is that of the weight that was packed, on this processor by this build of torch. Raises
        `LayoutUnavailable`.
        """
        return cls(_tensor_over(memory, shape, dtype, layout), memory)

    def __call__(self, x_mk: Tensor, bias_n: Tensor | None) -> Tensor:
        """Compute ``x @ weight.T + bias``: [m, k] gives [m, n]."""
        assert self._packed is not None, "released"
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x_mk, self._packed, bias_n, "none", [], "")
        return out

    @property
    def layout(self) -> bytes:
        """oneDNN's description of how the packed bytes lie. Raises `LayoutUnavailable`."""
        try:
            return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(self._packed).numpy())
        except (AttributeError, RuntimeError) as error:
            raise LayoutUnavailable(f"this torch doesn't describe oneDNN's layouts: {error}") from None

    def data_ptr(self) -> int:
        """The address of the packed bytes."""
        return int(torch.ops.mkldnn.data_ptr(self._packed))

    def nbytes(self) -> int:
        """How many packed bytes there are."""
        return int(torch.ops.mkldnn._nbytes(self._packed))

    def release(self) -> None:
        """Give up the packed bytes: the weight can't be multiplied with any more."""
        self._packed = self._memory = None


def _tensor_over(memory: Tensor, shape: tuple[int, int], dtype: torch.dtype, layout: bytes) -> Tensor:
    """A tensor in oneDNN's layout over memory that others own, by torch's C interface for compiled models."""
    try:
        library = _libtorch()
        handle = ctypes.c_void_p()
        dtype_code = getattr(library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")()
        sizes, strides = (ctypes.c_int64 * 2)(*shape), (ctypes.c_int64 * 2)(shape[1], 1)
        failed = library.aoti_torch_create_tensor_from_blob_v2(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(2), sizes, strides, ctypes.c_int64(0),
            dtype_code, library.aoti_torch_device_type_cpu(), ctypes.c_int32(0), ctypes.byref(handle),
            library.aoti_torch_layout__mkldnn(), ctypes.c_char_p(layout), ctypes.c_int64(len(layout)),
        )  # fmt: skip
        if failed or not handle.value:
            raise LayoutUnavailable("torch refused to make a tensor in oneDNN's layout over mapped memory")
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        # The capsule has no destructor: the handle's tensor is Python's from here on.
        made: Tensor = _aoti().alloc_tensor_by_stealing_from_void_ptr(capsule(handle.value, None, None))
    except (AttributeError, OSError) as error:
        raise LayoutUnavailable(f"this torch makes no tensors in oneDNN's layout: {error}") from None
    return made


def _aoti() -> Any:
    return torch._C._aoti


@cache
def _libtorch() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
