"""Bounce buffers: the host memory that pages of a device go through on their way to a socket, and from one.

A write's bytes are cut into loads that fit a buffer, each of a few pieces: pages of some layers of one buffer of the
registry. The pieces of a load are gathered next to each other on the device, and one copy brings them to host memory;
at the reader the other way round. A connection has two buffers at either end, so that one is filled while the other is
emptied, and no more: a peer that is slow keeps no further memory.

Both ends cut as they like: on the wire a write is the same as on plane `zmq` (`transfer.planes.tcp.page_stream`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from twinpool.cache.device.device_copies import DeviceCopies, device_copies
from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.transfer.planes.tcp.page_stream import PoolStream, bytes_of

_ALIGNED = 16
"""Pieces begin at multiples of so many bytes of a load, as kernels copy words."""

StreamPart = tuple[PoolStream, tuple[int, ...]]
"""One pool's part of a write: its byte stream, and the pages."""


@dataclass(frozen=True, slots=True)
class LoadPiece:
    """Pages of some layers of one buffer, as a run of bytes of a load."""

    part: StreamPart
    start: int
    nbytes: int
    first: bool
    """Whether a pool's part of the write begins with it."""


@dataclass(frozen=True, slots=True)
class Load:
    """What goes through a bounce buffer at a time: a run of a write's bytes."""

    pieces: tuple[LoadPiece, ...]

    @property
    def nbytes(self) -> int:
        return self.pieces[-1].start + self.pieces[-1].nbytes


def loads(parts: Sequence[StreamPart], most: int) -> list[Load]:
    """Cut a write's bytes into loads of at most `most` bytes, which one page of one layer of any buffer must fit in."""
    out, open_load, end = list[Load](), list[LoadPiece](), 0
    for part in parts:
        for number, (stream, pages) in enumerate(_cut(*part, most)):
            nbytes = len(pages) * stream.page_bytes
            if open_load and (end + nbytes > most or end % _ALIGNED):
                out.append(Load(tuple(open_load)))
                open_load, end = [], 0
            open_load.append(LoadPiece((stream, pages), end, nbytes, not number))
            end += nbytes
    return [*out, Load(tuple(open_load))] if open_load else out


def _cut(stream: PoolStream, pages: tuple[int, ...], most: int) -> Iterator[StreamPart]:
    """Cut one pool's part into pieces of at most `most` bytes, in the order in which they travel."""
    for mine, spec in zip(stream.mine, stream.sent, strict=True):
        entry = spec.entry_bytes(stream.page_tokens)
        one = replace(stream, mine=(mine,), sent=(spec,))
        row = len(pages) * entry
        layers, count = max(1, most // row), len(pages) if row <= most else most // entry
        for layer in spec.here[::layers]:
            some = one.of_layers(range(layer, min(layer + layers, spec.here.stop)))
            for at in range(0, len(pages), count):
                yield some, pages[at : at + count]


def buffer_bytes(spec: PoolSetSpec, wished: int) -> int:
    """Bytes of a bounce buffer: as many as `wished`, or one page of one layer where that is more."""
    entries = [buffer.entry_bytes(spec.page_tokens) for pool in spec.pools for buffer in pool.buffers]
    return max(wished, *entries)


def settle(buffers: Sequence[BounceBuffer]) -> None:
    """Wait until no copy from or into these buffers is under way, well or not."""
    for buffer in buffers:
        with contextlib.suppress(RuntimeError):  # Whoever began it finds out.
            buffer.over.wait()


@dataclass(eq=False)
class BounceBuffer:
    """Host memory, and as much of the device's, beside pools in `region` (uint8, flat)."""

    region: torch.Tensor
    copies: DeviceCopies
    nbytes: int
    over: Completion = DONE
    """Of the last copy from or into it."""
    _host: torch.Tensor = field(init=False)
    _gathered: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._host = self.copies.host_memory(self.nbytes)
        self._gathered = torch.empty(self.nbytes, dtype=torch.uint8, device=self.region.device)
        self.bytes = bytes_of(self._host)

    def gather(self, load: Load) -> None:
        """Begin to copy a load's pages here; `bytes` are theirs once that is `over`."""

        def copy() -> None:
            for piece in load.pieces:
                stream, pages = piece.part
                stream.pack(self.region, pages, self._gathered[piece.start : piece.start + piece.nbytes])
            self._host[: load.nbytes].copy_(self._gathered[: load.nbytes], non_blocking=True)

        self.over = self.copies.begin(copy)

    def scatter(self, load: Load) -> None:
        """Begin to copy `bytes` to a load's pages; they are stored once that is `over`."""

        def copy() -> None:
            self._gathered[: load.nbytes].copy_(self._host[: load.nbytes], non_blocking=True)
            for piece in load.pieces:
                stream, pages = piece.part
                stream.unpack(self._gathered[piece.start : piece.start + piece.nbytes], self.region, pages)

        self.over = self.copies.begin(copy)

    def of(self, piece: LoadPiece) -> torch.Tensor:
        """A piece's bytes in host memory, uint8 [bytes]."""
        return self._host[piece.start : piece.start + piece.nbytes]


class Staging:
    """The bounce buffers of a plane: two for each thread that uses them, which are made as it first does. A connection
    has one thread at either end."""

    def __init__(self, region: torch.Tensor, nbytes: int) -> None:
        """`region`: uint8 [bytes], with all pools. `nbytes`: of each buffer (`buffer_bytes`)."""
        self.nbytes = nbytes
        self._region = region
        self._local = threading.local()

    def buffers(self) -> tuple[BounceBuffer, BounceBuffer]:
        """The calling thread's."""
        if not hasattr(self._local, "pair"):
            copies = device_copies(self._region.device)
            self._local.pair = tuple(BounceBuffer(self._region, copies, self.nbytes) for _ in range(2))
        pair: tuple[BounceBuffer, BounceBuffer] = self._local.pair
        return pair

    def gathered(self, parts: Sequence[StreamPart]) -> Generator[tuple[BounceBuffer, Load]]:
        """Bring a write's pages to host memory, load by load: each lies in the buffer until the next is asked for. Once
        it is closed no page is read any more."""
        buffers, cut = self.buffers(), loads(parts, self.nbytes)
        try:
            for number in range(len(cut) + 1):
                if number < len(cut):
                    buffers[number % 2].gather(cut[number])
                if number:
                    ready = buffers[(number - 1) % 2]
                    ready.over.wait()
                    yield ready, cut[number - 1]
        finally:
            settle(buffers)
