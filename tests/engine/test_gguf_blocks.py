"""Quantised blocks are the numbers that their format says: by the formulas of its source, value by value, and as
transformers' own tensors-of-torch reading has them."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.gguf.dequant import GGML_NAME, dequantize

from tests.support.gguf_files import random_blocks
from twinpool.contracts.checkpoint.gguf.gguf_header import BLOCKS, GgufTensor
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.tensors import gguf_blocks
from twinpool.engine.tensors.gguf_blocks import read_gguf_tensor, read_gguf_weight
from twinpool.engine.tensors.shard import ShardAxis
from twinpool.engine.weight_formats.block_weight import BlockWeight
from twinpool.engine.weight_formats.gguf_formats import GGUF_TYPES

ROWS, WIDTH = 6, 512
TYPES = {name: (number, values, size) for number, (name, values, size) in BLOCKS.items()}
THEIRS = {name: number for number, name in GGML_NAME.items() if name in TYPES}


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def content_of(kind: str, seed: int = 0) -> bytes:
    """ROWS rows of WIDTH values in random blocks, whose float16 numbers are finite."""
    return random_blocks(kind, ROWS, WIDTH, seed=seed).tobytes()


def read(path: Path, header: GgufTensor, rows: ShardAxis, columns: ShardAxis) -> torch.Tensor:
    file = os.open(path, os.O_RDONLY)
    try:
        return read_gguf_tensor(file, header, [rows, columns], torch.float32)
    finally:
        os.close(file)


def whole(size: int) -> ShardAxis:
    return ShardAxis(size, 0, size)


def written(folder: Path, kind: str, content: bytes, interleaved: int = 0, added: float = 0.0) -> GgufTensor:
    (folder / "blocks").write_bytes(b"before" + content)
    return GgufTensor(folder / "blocks", kind, (ROWS, WIDTH), 6, 6 + len(content), interleaved, added)


@pytest.mark.parametrize("kind", sorted(THEIRS))
def test_random_blocks_are_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    content = content_of(kind)
    mine = read(tmp_path / "blocks", written(tmp_path, kind, content), whole(ROWS), whole(WIDTH))
    theirs = dequantize(torch.frombuffer(bytearray(content), dtype=torch.uint8), THEIRS[kind])
    torch.testing.assert_close(mine.flatten(), theirs, rtol=1e-6, atol=1e-6)


def q4_k(block: bytes) -> list[float]:
    """ggml's `block_q4_K`: d, dmin, twelve bytes of six-bit scales and minima of eight groups of 32, 128 of nibbles."""
    d, smallest = struct.unpack("<2e", block[:4])
    packed, nibbles = block[4:16], block[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, low = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            low = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for at in range(32):
            byte = nibbles[group // 2 * 32 + at]
            values.append(d * scale * (byte >> 4 if group % 2 else byte & 15) - smallest * low)
    return values


def q6_k(block: bytes) -> list[float]:
    """ggml's `block_q6_K`: 128 bytes of low nibbles, 64 of high pairs, 16 signed scales, d."""
    lows, highs, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (d,) = struct.unpack("<e", block[208:])
    values = [0.0] * 256
    for part in range(2):
        for at in range(32):
            low, high = lows[part * 64 + at], lows[part * 64 + 32 + at]
            pairs = highs[part * 32 + at]
            nibbles = (low & 15, high & 15, low >> 4, high >> 4)
            for quarter, nibble in enumerate(nibbles):
                number = (nibble | (pairs >> 2 * quarter & 3) << 4) - 32
                values[part * 128 + quarter * 32 + at] = d * scales[part * 8 + quarter * 2 + at // 16] * number
    return values


@pytest.mark.parametrize(("kind", "formula"), [("Q4_K", q4_k), ("Q6_K", q6_k)], ids=["Q4_K", "Q6_K"])
def test_blocks_packed_by_hand_are_the_formulas(tmp_path: Path, kind: str, formula) -> None:  # type: ignore[no-untyped-def]
    size, content = TYPES[kind][2], content_of(kind, seed=3)
    wanted = [value for at in range(0, len(content), size) for value in formula(content[at : at + size])]
    mine = read(tmp_path / "blocks", written(tmp_path, kind, content), whole(ROWS), whole(WIDTH))
    torch.testing.assert_close(mine.flatten(), torch.tensor(wanted, dtype=torch.float32), rtol=1e-6, atol=1e-6)


def test_a_block_of_eight_bits_is_a_scale_and_numbers(tmp_path: Path) -> None:
    numbers = list(range(-16, 16))
    content = (half(0.5) + struct.pack("<32b", *numbers)) * (ROWS * WIDTH // 32)
    mine = read(tmp_path / "blocks", written(tmp_path, "Q8_0", content), whole(ROWS), whole(WIDTH))
    assert mine[2, 32:64].tolist() == [0.5 * number for number in numbers]


@pytest.mark.parametrize("values", [WIDTH, 3 * WIDTH, 1 << 22])
def test_pieces_and_parts_are_those_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: int) -> None:
    monkeypatch.setattr(gguf_blocks, "_PIECE_VALUES", values)
    content = content_of("Q4_K")
    header = written(tmp_path, "Q4_K", content)
    found = read(tmp_path / "blocks", header, whole(ROWS), whole(WIDTH))
    assert torch.equal(found.flatten(), dequantize(torch.frombuffer(bytearray(content), dtype=torch.uint8), 12))
    part = read(tmp_path / "blocks", header, ShardAxis(ROWS, 1, 4), ShardAxis(WIDTH, 100, 300))
    assert torch.equal(part, found[1:5, 100:400])


@pytest.mark.parametrize("values", [WIDTH, 1 << 22])
def test_interleaved_rows_of_a_head_are_put_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: int
) -> None:
    """Heads of six rows: the file has rows 0 3 1 4 2 5 of the checkpoint's."""
    monkeypatch.setattr(gguf_blocks, "_PIECE_VALUES", values)
    content = content_of("Q8_0")
    stored = read(tmp_path / "blocks", written(tmp_path, "Q8_0", content), whole(ROWS), whole(WIDTH))
    header = written(tmp_path, "Q8_0", content, interleaved=6)
    found = read(tmp_path / "blocks", header, whole(ROWS), whole(WIDTH))
    assert torch.equal(found, stored[[0, 2, 4, 1, 3, 5]])
    part = read(tmp_path / "blocks", header, ShardAxis(ROWS, 2, 3), ShardAxis(WIDTH, 7, 9))
    assert torch.equal(part, found[2:5, 7:16])


def test_what_was_added_is_taken_away(tmp_path: Path) -> None:
    content = np.full((ROWS, WIDTH), 1.25, dtype="<f4").tobytes()
    header = written(tmp_path, "F32", content, added=1.0)
    found = read(tmp_path / "blocks", header, whole(ROWS), whole(WIDTH))
    assert torch.equal(found, torch.full((ROWS, WIDTH), 0.25))


def kept(header: GgufTensor, rows: ShardAxis, columns: ShardAxis) -> BlockWeight | None:
    file = os.open(header.file, os.O_RDONLY)
    try:
        return read_gguf_weight(file, header, rows, columns, torch.float32, torch.device("cpu"))
    finally:
        os.close(file)


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_a_weight_that_is_kept_as_it_is_stored_has_its_numbers_and_its_size(tmp_path: Path, kind: str) -> None:
    content = content_of(kind, seed=4)
    header = written(tmp_path, kind, content)
    found = kept(header, whole(ROWS), whole(WIDTH))
    assert found is not None
    blocks = np.frombuffer(content, dtype=np.uint8).reshape(ROWS, -1)
    theirs = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    assert torch.equal(found.unpack(), theirs.view(ROWS, WIDTH))
    assert len(content) <= found.nbytes <= 1.05 * len(content)
    dry = read_gguf_weight(-1, header, whole(ROWS), whole(WIDTH), torch.float32, torch.device("meta"))
    assert dry is not None
    assert (dry.nbytes, dry.layout) == (found.nbytes, found.layout)


@pytest.mark.parametrize("values", [WIDTH, 1 << 22])
@pytest.mark.parametrize("kind", ["Q4_1", "Q2_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_a_rank_keeps_its_part_of_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, values: int
) -> None:
    """Also where it cuts through what 256 columns share; through a group, where there are no such."""
    monkeypatch.setattr(gguf_blocks, "_PIECE_VALUES", values)
    header = written(tmp_path, kind, content_of(kind), interleaved=6)
    numbers = read(tmp_path / "blocks", header, whole(ROWS), whole(WIDTH))
    for first, count in ((0, 256), (256, 256), (128, 384), (32, 64), (0, WIDTH)):
        part = kept(header, ShardAxis(ROWS, 1, 4), ShardAxis(WIDTH, first, count))
        assert part is not None
        assert torch.equal(part.unpack(), numbers[1:5, first : first + count])
    part = kept(header, whole(ROWS), ShardAxis(WIDTH, 8, 256))
    assert (part is None) == (kind != "Q4_1")
    assert part is None or torch.equal(part.unpack(), numbers[:, 8:264])


@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 0), ("Q4_1", 2), ("Q6_K", 208), ("Q4_K", 2)])
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path, kind: str, at: int) -> None:
    content = bytearray(content_of(kind))
    size = TYPES[kind][2]
    last = len(content) - size
    content[last + at : last + at + 2] = half(float("inf"))
    with pytest.raises(CheckpointError, match=f"row 5 of {kind} has a scale that is no finite number"):
        kept(written(tmp_path, kind, bytes(content)), whole(ROWS), whole(WIDTH))


@pytest.mark.parametrize("interleaved", [0, 6])
@pytest.mark.parametrize("values", [WIDTH, 1 << 22])
def test_the_row_of_a_bad_scale_is_the_files_for_any_piece_and_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: int, interleaved: int
) -> None:
    """Also where a head's rows lie in another order: row 3 of the file is the checkpoint's row 4, of heads of six."""
    monkeypatch.setattr(gguf_blocks, "_PIECE_VALUES", values)
    content, row_size = bytearray(content_of("Q8_0")), WIDTH // 32 * TYPES["Q8_0"][2]
    content[3 * row_size : 3 * row_size + 2] = half(float("nan"))
    with pytest.raises(CheckpointError, match="block 0 of row 3 of Q8_0"):
        kept(written(tmp_path, "Q8_0", bytes(content), interleaved), ShardAxis(ROWS, 2, 4), whole(WIDTH))


def test_a_file_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    header = written(tmp_path, "Q8_0", content_of("Q8_0"))
    os.truncate(header.file, header.end - 1)
    with pytest.raises(CheckpointError, match="has become shorter"):
        read(header.file, header, whole(ROWS), whole(WIDTH))
