"""The image of a loaded model: its weights as they lie in memory, packed, and the objects around them, in one file.

The first worker of a node that loads a model writes its image; others map that, and compute at once: nothing is read,
converted, packed or probed, and the node has the weights once. All that shapes a model is in the key of its image, so
what is mapped has the bits of what would have been loaded.

A header, the pickled objects, then the tensors' bytes. The file is its writer's own work, handed on by the node's
agent, which gives it to processes of the same user and build only; it is sealed, so nobody can change it.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import struct
import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from twinpool.contracts.errors import TwinpoolError
from twinpool.engine.layers.decoder import Decoder
from twinpool.engine.tensors.row_exact_linear import LayoutUnavailable, Numerics, OneDnnWeight

_HEADER = struct.Struct("<8sQQ")
"""A mark, the bytes of the pickled objects, and those of the whole image."""
_MARK = b"twinimg1"
_ALIGN = 64
"""Bytes at a multiple of which each tensor's memory begins: as torch allocates, and as vector instructions load."""
_WRITE_BYTES = 1 << 26


class ImageUnfit(TwinpoolError):
    """Raised where there is no image to be had, or a model can't be one; the text says why."""


class WritableImage(Protocol):
    """An image that is still to be written."""

    nbytes: int

    def write(self, fd: int) -> None:
        """Write it into an empty file; the model that it is of is of no use afterwards. Raises `OSError`."""


class ModelImages(Protocol):
    """Images by key. Where one can't be had, methods raise `ImageUnfit`."""

    def find(self, key: str) -> memoryview | None:
        """The image, mapped read-only for as long as this process lives. None: this process is to load the model, and
        then to `keep` its image or to `give_up`. Waits while another process loads it, within a deadline."""

    def keep(self, key: str, image: WritableImage) -> memoryview:
        """Write the image and share it; returns it mapped. The model's own tensors are emptied, even where it can't be
        kept."""

    def give_up(self, key: str, reason: str) -> None:
        """Say that there will be no image under `key`, so that nobody waits for one. Never raises."""

    def use_only(self, key: str) -> None:
        """Say that of all images this process uses that of `key` alone from now on; empty: none. What is mapped of the
        others is freed with the last model that lies in it. Never raises."""


@dataclass
class _StoredPart:
    """The used part of one storage, or a weight that oneDNN has packed."""

    storage: torch.UntypedStorage | OneDnnWeight
    begin: int
    end: int
    offset: int = 0
    """Where it begins in the image, counted from the first tensor's byte."""


@dataclass(frozen=True)
class _PartOf:
    """What stands for a storage among the pickled objects."""

    offset: int
    nbytes: int


@dataclass
class UnwrittenImage:
    """`WritableImage` of a loaded model."""

    objects: bytes
    parts: list[_StoredPart] = field(repr=False)
    nbytes: int
    """Of the whole image."""

    def write(self, fd: int) -> None:
        """Write it into a file, each tensor's memory being freed after its bytes were written, so that there are never
        two copies of all: the model is of no use afterwards. Raises `OSError`."""
        os.ftruncate(fd, self.nbytes)
        _write(fd, memoryview(_HEADER.pack(_MARK, len(self.objects), self.nbytes) + self.objects), 0)
        first = _first(len(self.objects))
        for part in self.parts:
            _write(fd, _bytes_of(part), first + part.offset)
            if isinstance(part.storage, OneDnnWeight):
                part.storage.release()
            elif part.storage.resizable():
                part.storage.resize_(0)


def image_of(decoder: Decoder, numerics: Numerics) -> UnwrittenImage:
    """Make the image of a loaded model; nothing of it is changed until the image is written. Raises `ImageUnfit`."""
    seen = _ImagePickler(decoder.kernels, {})
    try:
        seen.dump((decoder, numerics))  # Which parts of which storages are used.
    except (pickle.PicklingError, AttributeError, TypeError, LayoutUnavailable) as error:
        raise ImageUnfit(f"this model can't be shared: {error}") from error
    offset = 0
    for part in seen.parts.values():
        part.offset = offset
        offset = _aligned(offset + part.end - part.begin)
    pickler = _ImagePickler(decoder.kernels, seen.parts)
    pickler.dump((decoder, numerics))
    objects = pickler.file.getvalue()
    return UnwrittenImage(objects, list(seen.parts.values()), _first(len(objects)) + offset)


def model_of(image: memoryview, kernels: object) -> tuple[Decoder, Numerics]:
    """The model whose image this is; its weights are the image's own memory, and can't be written. `kernels`: what its
    layers compute with in this process. Raises `ImageUnfit`."""
    if len(image) < _HEADER.size:
        raise ImageUnfit("no image of a model: it is too short")
    mark, nbytes, whole = _HEADER.unpack_from(image)
    if mark != _MARK or whole != len(image) or _first(nbytes) > whole:
        raise ImageUnfit("no image of a model, or a part of one")
    objects = io.BytesIO(image[_HEADER.size : _HEADER.size + nbytes])
    try:
        decoder, numerics = _ImageUnpickler(objects, image[_first(nbytes) :], kernels).load()
    except LayoutUnavailable as error:
        raise ImageUnfit(f"this process can't use its node's image: {error}") from error
    return decoder, numerics


class _ImagePickler(pickle.Pickler):
    """Pickles all but two things: the memory of tensors, and the kernels, which every process has its own of."""

    def __init__(self, kernels: object, parts: dict[int, _StoredPart]) -> None:
        """`parts`: the used parts of storages by address; those that are met are added, or widened."""
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5)
        self._kernels = kernels
        self.parts = parts

    def persistent_id(self, obj: object) -> tuple[Any, ...] | None:
        if isinstance(obj, _PartOf):
            return obj.offset, obj.nbytes
        if obj is self._kernels and obj is not None:
            return ("kernels",)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, OneDnnWeight):
            part = self.parts.setdefault(obj.data_ptr(), _StoredPart(obj, 0, obj.nbytes()))
            return OneDnnWeight.placed, (_PartOf(part.offset, part.end), obj.shape, obj.dtype, obj.layout)
        if not isinstance(obj, Tensor):
            return NotImplemented
        if obj.layout != torch.strided or obj.device.type != "cpu":
            raise pickle.PicklingError(f"a tensor lies in a layout of its own ({obj.layout}, {obj.device})")
        if obj.numel() == 0:
            return _empty, (tuple(obj.shape), obj.dtype)
        storage, size = obj.untyped_storage(), obj.element_size()
        begin = int(obj.storage_offset()) * size
        end = begin + size * (1 + sum((n - 1) * stride for n, stride in zip(obj.shape, obj.stride(), strict=True)))
        part = self.parts.setdefault(storage.data_ptr(), _StoredPart(storage, begin, end))
        part.begin, part.end = min(part.begin, begin - begin % _ALIGN), max(part.end, end)
        where = _PartOf(part.offset, part.end - part.begin)
        return _tensor, (where, obj.dtype, (begin - part.begin) // size, tuple(obj.shape), obj.stride())


class _ImageUnpickler(pickle.Unpickler):
    def __init__(self, objects: io.BytesIO, tensors: memoryview, kernels: object) -> None:
        super().__init__(objects)
        self._tensors, self._kernels = tensors, kernels

    def persistent_load(self, pid: Any) -> object:
        if pid == ("kernels",):
            return self._kernels
        offset, nbytes = pid
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That it can't be written is meant.
            return torch.frombuffer(self._tensors[offset : offset + nbytes], dtype=torch.uint8)


def _tensor(part: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor in the memory of `part`, uint8; `offset` and `stride` in elements of `dtype`."""
    at = part.storage_offset() // dtype.itemsize + offset
    return torch.empty(0, dtype=dtype).set_(part.untyped_storage(), at, shape, stride)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _bytes_of(part: _StoredPart) -> memoryview:
    """Its bytes where they lie. Not by way of numpy, with which a storage can't be resized any more."""
    there = ctypes.c_char * (part.end - part.begin)
    return memoryview(there.from_address(part.storage.data_ptr() + part.begin)).cast("B")


def _write(fd: int, data: memoryview, offset: int) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(fd, data[at : at + _WRITE_BYTES], offset + at)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _first(objects: int) -> int:
    """Where the tensors begin, after so many bytes of objects."""
    return _aligned(_HEADER.size + objects)
