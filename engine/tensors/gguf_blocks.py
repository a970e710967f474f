"""Reading rows of a GGUF file's tensors: as they are stored, or with their quantised blocks turned into numbers.

Rows are read in pieces of a few MiB: straight into the form in which products take them
(`engine.weight_formats.gguf_formats`), or dequantised into the dtype to compute in, so a tensor needs no memory beyond
its own. The `gguf` package does a dequantised block's arithmetic, in float32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twinpool.contracts.checkpoint.gguf.gguf_header import GgufTensor
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.tensors.shard import ShardAxis
from twinpool.engine.weight_formats.block_weight import BlockWeight, stack_rows
from twinpool.engine.weight_formats.gguf_formats import read_gguf_blocks

_PIECE_VALUES = 4 << 20
"""Values that are dequantised at a time, about."""


def read_gguf_tensor(file: int, header: GgufTensor, axes: Sequence[ShardAxis], dtype: torch.dtype) -> Tensor:
    """The ranges `axes` of a tensor, on the CPU, converted to `dtype`; `file` is the descriptor of its open file.

    Raises `CheckpointError` for a file that has become shorter than its header says.
    """
    rows, *columns = axes
    width = 1 if not columns else columns[0].whole
    read = torch.empty(rows.count, columns[0].count if columns else 1, dtype=dtype)
    for piece in _pieces(file, header, rows, width):
        values_nk = _dequantised(header, piece.bytes_nb, width)
        if header.added:
            values_nk = values_nk - header.added
        read[piece.first : piece.first + len(values_nk)] = values_nk[:, columns[0].here] if columns else values_nk
    return read.reshape([axis.count for axis in axes])


def read_gguf_weight(
    file: int, header: GgufTensor, rows: ShardAxis, columns: ShardAxis, dtype: torch.dtype, device: torch.device
) -> BlockWeight | None:
    """A rank's part of a matrix of one of `GGUF_TYPES`, in blocks as the file has them, for products in `dtype`; on
    torch's meta device nothing is read. None where the range of columns cuts through a block's group.

    Raises `CheckpointError` for a file that has become shorter, and for a scale that is no finite number.
    """
    size = _row_bytes(header)
    if device.type == "meta":
        whole = read_gguf_blocks(header.dtype, torch.empty(rows.count, size, dtype=torch.uint8, device=device), dtype)
        return whole.part(slice(None), columns.here)
    parts: list[BlockWeight] = []
    for piece in _pieces(file, header, rows, columns.whole):
        found = read_gguf_blocks(header.dtype, piece.bytes_nb, dtype, piece.file_rows_n)
        part = found.part(slice(None), columns.here)
        if part is None:
            return None
        parts.append(part.to(device))
    stacked = stack_rows(parts)
    assert isinstance(stacked, BlockWeight), "pieces of one tensor have one layout"
    return stacked


@dataclass(frozen=True)
class _RowPiece:
    """Some rows of a tensor, in the checkpoint's order."""

    first: int
    """Of the piece's rows, counted from the first row that is asked for."""
    file_rows_n: Tensor
    """[rows] int64: which rows of the file's tensor they are."""
    bytes_nb: Tensor
    """uint8 [rows, bytes of a row]."""


def _pieces(file: int, header: GgufTensor, rows: ShardAxis, width: int) -> Iterator[_RowPiece]:
    """The asked rows, piece by piece in the checkpoint's order."""
    # Whole heads, where their rows are interleaved.
    unit = header.interleaved or 1
    start, stop = rows.first // unit * unit, -(-(rows.first + rows.count) // unit) * unit
    step = max(_PIECE_VALUES // (unit * max(width, 1)), 1) * unit
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        bytes_nb, file_rows_n = _rows(file, header, begin, end), torch.arange(begin, end)
        if header.interleaved:
            order_n = torch.arange(end - begin).view(-1, unit // 2, 2).transpose(1, 2).flatten()
            bytes_nb, file_rows_n = bytes_nb[order_n], file_rows_n[order_n]
        first, last = max(begin, rows.first), min(end, rows.first + rows.count)
        here = slice(first - begin, last - begin)
        yield _RowPiece(first - rows.first, file_rows_n[here], bytes_nb[here])


def _row_bytes(header: GgufTensor) -> int:
    return (header.end - header.begin) // header.shape[0]


def _rows(file: int, header: GgufTensor, begin: int, end: int) -> Tensor:
    """The bytes of rows `begin` to `end` of the file, uint8 [rows, bytes of a row]."""
    size = _row_bytes(header)
    wanted, at = (end - begin) * size, header.begin + begin * size
    content = bytearray()
    while len(content) < wanted:
        part = os.pread(file, wanted - len(content), at + len(content))
        if not part:
            raise CheckpointError(f"{header.file} has become shorter: it ends before byte {at + wanted}")
        content += part
    return torch.frombuffer(content, dtype=torch.uint8).view(end - begin, size)


def _dequantised(header: GgufTensor, bytes_nb: Tensor, width: int) -> Tensor:
    """Rows as float32, [rows, width]."""
    import gguf

    values = gguf.dequantize(bytes_nb.contiguous().numpy(), gguf.GGMLQuantizationType[header.dtype])
    return torch.from_numpy(values.astype(np.float32, copy=False)).view(-1, width)
