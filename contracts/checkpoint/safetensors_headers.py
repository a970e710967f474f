"""Headers of safetensors files, read without loading a tensor.

The format (github.com/huggingface/safetensors): eight bytes with the header's length, little-endian; a JSON header
that gives each tensor's dtype, shape and byte range; then the bytes. So a missing, truncated or malformed checkpoint
is found by reading a few kilobytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from twinpool.contracts import outside_data
from twinpool.contracts.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}
LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000
_SAMPLE_BYTES = 4096

_PIECE = 16 << 20
"""Bytes of tensors that are read at once."""

ROOTS = {
    "model.": ("model.language_model.", "language_model.model.", "model.text_model.", "backbone.", "model."),
    "lm_head.": ("language_model.lm_head.", "lm_head."),
}
"""How published checkpoints spell the two roots of a text model's tensor names; the plain spelling last."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """The place of one tensor; `begin` and `end` are byte offsets from the start of its file."""

    file: Path
    dtype: str
    """The dtype by the format's name: ``F32``, ``BF16``, ..."""
    shape: tuple[int, ...]
    begin: int
    end: int


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of a checkpoint, by name: of the index's files if there is an index, else of
    the single file.

    Raises `CheckpointError` for a missing, truncated or malformed file, or an index that names a tensor that the file
    lacks, or a file elsewhere.
    """
    index_path = folder / INDEX
    if not index_path.exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} has no {SINGLE} and no {INDEX}; is it a Hugging Face checkpoint folder?")
        return read_file_headers(folder / SINGLE)
    index = read_json(index_path).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{index_path} has no weight_map of tensor names to file names")
    headers: dict[str, TensorHeader] = {}
    for name in sorted(set(index.values())):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{index_path} names a file that isn't in its folder: {name!r}")
        headers |= read_file_headers(folder / name)
    for tensor, name in index.items():
        if tensor not in headers or headers[tensor].file != folder / name:
            raise CheckpointError(f"{index_path} says that {name} holds {tensor}, but it doesn't")
    return headers


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object from a file; raises `CheckpointError` when the file can't be read or holds another JSON
    value."""
    loaded = read_tree(path)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(loaded).__name__}")
    return loaded


def check_regular(path: Path) -> None:
    """Raise `CheckpointError` for what is there and no file, such as a pipe, from which one would read for ever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no file")


def read_tree(path: Path) -> object:
    """Read any JSON value from a file; raises `CheckpointError` when the file can't be read or isn't JSON."""
    check_regular(path)
    try:
        return outside_data.read_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {' '.join(str(error).split())}") from None


def digest_samples(headers: Mapping[str, TensorHeader]) -> str:
    """A digest, in hex, of names, dtypes, shapes, and the first and last 4 KiB of each tensor; how tensors are divided
    into files doesn't matter.

    Full digests of large checkpoints take minutes; other weights of the same shapes differ in their first bytes.
    """
    digest = hashlib.sha256()
    files = {path: path.open("rb") for path in sorted({h.file for h in headers.values()})}
    try:
        for name in sorted(headers):
            header = headers[name]
            digest.update(f"{name} {header.dtype} {header.shape}\n".encode())
            file, size = files[header.file], header.end - header.begin
            for offset in (header.begin, max(header.begin, header.end - _SAMPLE_BYTES)):
                file.seek(offset)
                digest.update(file.read(min(size, _SAMPLE_BYTES)))
    finally:
        for file in files.values():
            file.close()
    return digest.hexdigest()


def digest_files(headers: Mapping[str, TensorHeader]) -> str:
    """SHA-256, in hex, of all bytes of the files that hold these tensors. Raises `CheckpointError` where one can't be
    read."""
    digest = hashlib.sha256(b"twinpool weights 1\n")
    for path in _files_of(headers):
        try:
            with path.open("rb") as file:
                digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    return digest.hexdigest()


def files_mark(headers: Mapping[str, TensorHeader]) -> tuple[tuple[int, int, int], ...]:
    """What changes when one of the files that hold these tensors is written or replaced. Raises `CheckpointError`."""
    try:
        found = [path.stat() for path in _files_of(headers)]
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from None
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in found)


def _files_of(headers: Mapping[str, TensorHeader]) -> list[Path]:
    return sorted({header.file for header in headers.values()})


def read_file_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the headers of one file's tensors, by name. Raises `CheckpointError` for a missing, truncated or malformed
    file."""
    check_regular(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(LENGTH_BYTES)
            length = struct.unpack("<Q", head)[0] if len(head) == LENGTH_BYTES else 0
            if not 2 <= length <= min(_HEADER_LIMIT, max(size - LENGTH_BYTES, 0)):
                raise CheckpointError(f"{path} is truncated or no safetensors file: {size} bytes hold no whole header")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    return parse_header(path, raw, size)


def parse_header(path: Path, raw: bytes, size: int | None = None) -> dict[str, TensorHeader]:
    """Return the headers of a file's tensors, by name, of its JSON header. `size`: bytes that the file has; None: it
    has yet to come. Raises `CheckpointError` for a malformed header, or a truncated file."""
    try:
        header = outside_data.read_json(raw)
        start = LENGTH_BYTES + len(raw)
        out = {
            name: TensorHeader(
                path,
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                start + int(entry["data_offsets"][0]),
                start + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise CheckpointError(f"{path} has a malformed safetensors header") from None
    _check_ranges(path, start, size, out)
    return out


def file_header(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Return the first bytes of a file that has these tensors one after the other, each given by name, dtype by the
    format's name, shape and bytes. They are a multiple of eight, so that tensors lie where they can be mapped."""
    entries, at = dict[str, object](), 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at := at + nbytes]}
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % LENGTH_BYTES)
    return struct.pack("<Q", len(raw)) + raw


def _check_ranges(path: Path, start: int, size: int | None, headers: Mapping[str, TensorHeader]) -> None:
    """`start`: where the tensors' bytes begin in the file, of `size` bytes."""
    needed = max((h.end for h in headers.values()), default=0)
    if size is not None and needed > size:
        raise CheckpointError(f"{path} is truncated: it has {size} bytes and its header describes {needed}")
    for name, header in headers.items():
        if not start <= header.begin <= header.end:
            raise CheckpointError(f"{path} has a malformed safetensors header: {name} lies where no tensor can")
        width = _BYTES.get(header.dtype)
        if width is not None and header.end - header.begin != width * prod(header.shape):
            raise CheckpointError(
                f"{path}: {name} is {header.dtype} of shape {list(header.shape)} but has "
                f"{header.end - header.begin} bytes"
            )


def weights_folder(path: str, roots: str) -> Path:
    """The folder of weights that `path` names, with all links followed. Raises `CheckpointError` where it lies below
    none of `roots` (`engine.weight_roots`); in the same words whether or not there is anything."""
    if not path.startswith("/") or not path.isprintable():
        raise CheckpointError(f"a folder of weights is named by an absolute path; got {path[:200]!r}")
    try:
        above = [Path(root.strip()).resolve() for root in roots.split(",") if root.strip()]
        folder = Path(path).resolve()
    except (OSError, RuntimeError, ValueError):
        above, folder = [], Path(path)
    if not any(folder.is_relative_to(root) for root in above):
        raise CheckpointError(f"{path[:200]} lies below none of engine.weight_roots, from which weights may be taken")
    return folder


def check_alike(folder: Path | str, found: Mapping[str, TensorHeader], wanted: Mapping[str, TensorHeader]) -> None:
    """Refuse tensors that aren't those of the checkpoint in name, shape and dtype, naming the first. `folder`: where
    they are, in words."""
    for name, header in wanted.items():
        other = found.get(name)
        if other is None:
            raise CheckpointError(f"{folder} lacks the tensor {name}, which the checkpoint has")
        if (other.dtype, other.shape) != (header.dtype, header.shape):
            raise CheckpointError(
                f"{folder}: the tensor {name} is {other.dtype} {list(other.shape)}; the checkpoint's is "
                f"{header.dtype} {list(header.shape)}"
            )
    if more := sorted(found.keys() - wanted.keys()):
        raise CheckpointError(f"{folder} has the tensor {more[0]}, which the checkpoint lacks")


def same_bytes(one: TensorHeader, two: TensorHeader) -> bool:
    """Whether two tensors are stored with the same bytes. Takes a second for each GB that is the same, once as long as
    their files aren't written anew; raises `CheckpointError` for a file that can't be read."""
    try:
        return _same_bytes(one, two, one.file.stat().st_mtime_ns, two.file.stat().st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"cannot read {one.file} or {two.file}: {error.strerror}") from None


@lru_cache(maxsize=64)
def _same_bytes(one: TensorHeader, two: TensorHeader, _written: int, _other_written: int) -> bool:
    with one.file.open("rb") as first, two.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(two.begin)
        left = one.end - one.begin
        if left != two.end - two.begin:
            return False
        while left > 0:
            size = min(left, _PIECE)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def stored_bytes(header: TensorHeader) -> Iterator[bytes]:
    """Yield the bytes of a tensor as they are stored, some MiB at a time. Raises `CheckpointError`."""
    try:
        with header.file.open("rb") as file:
            file.seek(header.begin)
            left = header.end - header.begin
            while left:
                piece = file.read(min(left, _PIECE))
                if not piece:
                    raise CheckpointError(f"{header.file} has become shorter")
                left -= len(piece)
                yield piece
    except OSError as error:
        raise CheckpointError(f"cannot read {header.file}: {error.strerror}") from None


def canonical_name(name: str) -> str:
    """The name of a tensor or layer as models ask for it, of its name in a checkpoint."""
    for root, spellings in ROOTS.items():
        spelling = next((one for one in spellings if name.startswith(one)), None)
        if spelling is not None:
            return root + name.removeprefix(spelling)
    return name


def spelled_names(name: str) -> list[str]:
    """The names that a tensor or layer may have in checkpoints, of the name that models ask for."""
    for root, spellings in ROOTS.items():
        if name.startswith(root):
            # Checkpoints that were saved without a head, as those for embeddings, have no root.
            rest, bare = name.removeprefix(root), root == "model."
            return [*(one + rest for one in (*spellings[:-1], *("",) * bare)), name]
    return [name]
