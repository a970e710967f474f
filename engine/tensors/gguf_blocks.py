"""Reading rows of a GGUF file's tensors, with their quantised blocks turned into numbers.

Rows are read and dequantised in pieces of a few MiB, straight into the dtype to compute in, so a tensor needs no memory
beyond its own. The `gguf` package does a block's arithmetic, in float32.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twinpool.contracts.checkpoint.gguf.gguf_tensors import GgufTensor
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.tensors.shard import ShardAxis

_PIECE_VALUES = 4 << 20
"""Values that are dequantised at a time, about."""


def read_gguf_tensor(file: int, header: GgufTensor, axes: Sequence[ShardAxis], dtype: torch.dtype) -> Tensor:
    """The ranges `axes` of a tensor, on the CPU, converted to `dtype`; `file` is the descriptor of its open file.

    Raises `CheckpointError` for a file that has become shorter than its header says.
    """
    rows, *columns = axes
    width = 1 if not columns else columns[0].whole
    read = torch.empty(rows.count, columns[0].count if columns else 1, dtype=dtype)
    # Whole heads, where their rows are interleaved.
    unit = header.interleaved or 1
    first, last = rows.first // unit * unit, -(-(rows.first + rows.count) // unit) * unit
    step = max(_PIECE_VALUES // (unit * max(width, 1)), 1) * unit
    for begin in range(first, last, step):
        end = min(begin + step, last)
        values_nk = _rows(file, header, begin, end, width)
        if header.interleaved:
            heads = values_nk.view(-1, unit // 2, 2, width)
            values_nk = heads.transpose(1, 2).reshape(-1, width)
        if header.added:
            values_nk = values_nk - header.added
        here = slice(max(begin, rows.first), min(end, rows.first + rows.count))
        taken = values_nk[here.start - begin : here.stop - begin]
        read[here.start - rows.first : here.stop - rows.first] = taken[:, columns[0].here] if columns else taken
    return read.reshape([axis.count for axis in axes])


def _rows(file: int, header: GgufTensor, begin: int, end: int, width: int) -> Tensor:
    """Rows `begin` to `end` of the file as float32, [rows, width]."""
    import gguf

    size = (header.end - header.begin) // header.shape[0]
    wanted, at = (end - begin) * size, header.begin + begin * size
    content = bytearray()
    while len(content) < wanted:
        part = os.pread(file, wanted - len(content), at + len(content))
        if not part:
            raise CheckpointError(f"{header.file} has become shorter: it ends before byte {at + wanted}")
        content += part
    blocks = np.frombuffer(content, dtype=np.uint8).reshape(end - begin, size)
    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[header.dtype])
    return torch.from_numpy(values.astype(np.float32, copy=False)).view(end - begin, width)
