"""Headers of safetensors files: places that can't be are refused, and samples are of both ends of each tensor."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from twinpool.contracts.checkpoint.safetensors_headers import (
    INDEX,
    digest_samples,
    read_file_headers,
    read_headers,
    same_bytes,
    weights_folder,
)
from twinpool.contracts.errors import CheckpointError


def write(path: Path, header: dict[str, Any], content: bytes) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + content)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape or ((end - begin) // 4,)), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (entry(-8, 0, shape=(2,)), "malformed"),
        (entry(-(1 << 40), 8 - (1 << 40), shape=(2,)), "malformed"),
        (entry(-8, 8, "I8", (16,)), "malformed"),
        (entry(16, 8, "I8", (8,)), "malformed"),
        (entry(8, 20, shape=(3,)), "truncated"),
        (entry(0, 1 << 62, "I8", (1,)), "truncated"),
        (entry(0, 8, shape=(3,)), "has 8 bytes"),
        (entry(0, 8, "BF16", (2,)), "has 8 bytes"),
        ({"dtype": "F32", "shape": [2]}, "malformed"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "malformed"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "malformed"),
        ([], "malformed"),
    ],
)
def test_a_tensor_lies_whole_behind_the_header_in_the_file(bad: Any, words: str, tmp_path: Path) -> None:
    good = {"__metadata__": {"format": "pt"}, "a": entry(0, 8)}
    path = write(tmp_path / "model.safetensors", good, bytes(16))
    assert digest_samples(read_file_headers(path))
    write(path, {**good, "b": bad}, bytes(16))
    with pytest.raises(CheckpointError, match=words):
        read_file_headers(path)


def test_a_digest_sees_both_ends_of_a_tensor_its_name_dtype_and_shape(tmp_path: Path) -> None:
    size = 20_000
    digests = set()
    for name, dtype, shape, changed in (
        ("a", "F32", (5000,), None),
        ("b", "F32", (5000,), None),
        ("a", "BF16", (10_000,), None),
        ("a", "F32", (50, 100), None),
        ("a", "F32", (5000,), 0),
        ("a", "F32", (5000,), 4095),
        ("a", "F32", (5000,), size - 4096),
        ("a", "F32", (5000,), size - 1),
    ):
        content = bytearray(size)
        if changed is not None:
            content[changed] = 1
        path = write(tmp_path / "model.safetensors", {name: entry(0, size, dtype, shape)}, bytes(content))
        digests.add(digest_samples(read_file_headers(path)))
    assert len(digests) == 8


def test_how_tensors_are_divided_into_files_is_no_part_of_a_digest_and_an_index_must_name_the_right_file(
    tmp_path: Path,
) -> None:
    one, two = bytes(range(8)), bytes(range(8, 16))
    whole = write(tmp_path / "model.safetensors", {"a": entry(0, 8), "b": entry(8, 16)}, one + two)
    write(tmp_path / "x.safetensors", {"a": entry(0, 8)}, one)
    write(tmp_path / "y.safetensors", {"b": entry(0, 8)}, two)
    index = tmp_path / INDEX

    def indexed(**files: str) -> None:
        index.write_text(json.dumps({"weight_map": files}))

    indexed(a="x.safetensors", b="y.safetensors")
    divided = read_headers(tmp_path)
    assert digest_samples(divided) == digest_samples(read_file_headers(whole))
    for files in (
        {"a": "y.safetensors", "b": "x.safetensors"},
        {"a": "x.safetensors", "b": "x.safetensors"},
        {"a": "x.safetensors", "b": "y.safetensors", "c": "y.safetensors"},
    ):
        indexed(**files)
        with pytest.raises(CheckpointError, match="but it doesn't"):
            read_headers(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_read_for_ever(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is no file"):
        read_headers(tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "sub/../../x.safetensors", "/x.safetensors"])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    write(tmp_path / "x.safetensors", {"a": entry(0, 8)}, bytes(8))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="names a file that isn't in its folder"):
        read_headers(folder)


def test_two_tensors_are_compared_again_where_their_file_is_written_anew(tmp_path: Path) -> None:
    for second, written in ((1, 1), (2, 2), (1, 3)):
        path = write(tmp_path / "x", {"a": entry(0, 8), "b": entry(8, 16)}, bytes([1] * 8 + [second] * 8))
        os.utime(path, ns=(written, written))
        headers = read_file_headers(path)
        assert same_bytes(headers["a"], headers["b"]) is (second == 1)


def test_a_link_to_weights_is_followed_each_time_that_it_is_asked_for(tmp_path: Path) -> None:
    roots, link = tmp_path / "roots", tmp_path / "roots" / "latest"
    for folder in (roots / "one", roots / "two", tmp_path / "outside"):
        folder.mkdir(parents=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        if folder.is_relative_to(roots):
            assert weights_folder(str(link), str(roots)) == folder.resolve()
        else:
            with pytest.raises(CheckpointError, match="below none of"):
                weights_folder(str(link), str(roots))
