"""A GGUF file that can't be served is refused when it is read, in one line that says what is wrong with it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_gguf
from twinpool.contracts.checkpoint.gguf.gguf_header import BLOCKS, read_gguf
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.checkpoint.tokenizer_files import read_checkpoint_text
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.models.registry import model_for

Edit = Callable[[gguf.GGUFWriter], object]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gguf") / "llama")


@pytest.fixture
def file(folder: Path, tmp_path: Path) -> Path:
    return write_gguf(folder, tmp_path / "model.gguf", "llama")


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        model_for(read_model_spec(path))
    text = str(raised.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_the_types_are_those_of_the_package() -> None:
    for number, (name, values, size) in BLOCKS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (values, size))


def test_the_header_is_what_the_package_reads(file: Path) -> None:
    mine, theirs = read_gguf(file), gguf.GGUFReader(file)
    assert mine.metadata == {key: f.contents() for key, f in theirs.fields.items() if not key.startswith("GGUF.")}
    places = {t.name: (t.tensor_type.name, tuple(map(int, reversed(t.shape))), t.data_offset) for t in theirs.tensors}
    assert {name: (p.kind, p.shape, p.begin) for name, p in mine.tensors.items()} == places


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    content = file.read_bytes()
    header = min(place.begin for place in read_gguf(file).tensors.values())
    for length in (*range(4, 200), *range(200, header, 997), header, len(content) - 1):
        file.write_bytes(content[:length])
        assert "truncated" in refusal(file), length


@pytest.mark.parametrize("length", [0, 3])
def test_a_file_without_the_magic_is_none(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    assert "is no GGUF file" in refusal(file)


def test_a_header_of_noise_is_refused_and_never_crashes(file: Path) -> None:
    content, generator = file.read_bytes(), np.random.default_rng(0)
    end = min(place.begin for place in read_gguf(file).tensors.values())
    for _ in range(300):
        damaged = bytearray(content)
        at = int(generator.integers(4, end))
        damaged[at : at + 8] = generator.bytes(8)
        file.write_bytes(damaged)
        with suppress(CheckpointError):
            model_for(read_model_spec(file))
            read_checkpoint_text(file, "tokenizer.json")


@pytest.mark.parametrize(
    ("version", "words"), [(1, "of version 1"), (9, "of version 9"), (0x03000000, "of the other byte order")]
)
def test_versions_of_other_days_are_refused(file: Path, version: int, words: str) -> None:
    content = bytearray(file.read_bytes())
    content[4:8] = struct.pack("<I", version)
    file.write_bytes(content)
    assert words in refusal(file)


CASES: list[tuple[dict[str, Any], str]] = [
    ({"edit": lambda w: w.add_uint16("split.count", 3)}, "one of 3 parts of a model; join them first"),
    ({"llama.block_count": None}, "it has no llama.block_count"),
    ({"llama.context_length": None}, "it has no llama.context_length"),
    ({"llama.attention.head_count_kv": [2, 1]}, "llama.attention.head_count_kv must be one whole number for all"),
    ({"llama.embedding_length": "wide"}, "llama.embedding_length must be a positive whole number, got 'wide'"),
    ({"llama.rope.dimension_count": 8}, "rope over 8 of a head's 16 dimensions"),
    ({"llama.attention.value_length": 8}, "values of another width than keys"),
    ({"llama.expert_count": 8}, "experts are not supported in architecture llama"),
    ({"llama.attention.sliding_window": 64}, "sliding_window 64 is not supported"),
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope' needs a list"),
    (
        {"llama.attention.key_length": 24, "llama.attention.value_length": 24, "llama.rope.dimension_count": 24},
        "rows, which are no whole heads of 24",
    ),
    ({"llama.attention.head_count": 0}, "llama.attention.head_count must be a positive whole number, got 0"),
    ({"edit": lambda w: w.add_tensor("blk.0.attn_qkv.weight", np.zeros((4, 32), "f4"))}, "tensor blk.0.attn_qkv"),
    (
        {"edit": lambda w: w.add_tensor("rope_freqs.weight", np.zeros(8, "f4"))},
        "rope scaling 'factors' needs a list of positive numbers",
    ),
    (
        {"edit": lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, "f4"))},
        "tensor rope_freqs.weight must be a row of 8 F32, got [4] of F32",
    ),
    (
        {"edit": lambda w: w.add_tensor("x", np.zeros((2, 66), "u1"), raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)},
        "tensor x has type IQ2_XXS, which is not supported; supported are F32, F16, Q4_0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cant_be_served_is_refused(folder: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    numbers = {key.removeprefix("llama."): value for key, value in change.items() if key != "edit"}
    path = write_gguf(folder, tmp_path / "model.gguf", "llama", edit=change.get("edit"), **numbers)
    assert words in refusal(path)


def test_an_architecture_that_isnt_here_is_named(folder: Path, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "GGUF architecture 'mamba' is not supported; supported are llama, qwen2" in refusal(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (lambda w: w.add_tokenizer_model("rwkv"), "tokenizer 'rwkv' is not supported; supported are gpt2, llama"),
        (lambda w: None, "tokenizer None is not supported"),
        (lambda w: w.add_tokenizer_model("gpt2"), "it has no list tokenizer.ggml.tokens"),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"]), w.add_tokenizer_pre("default")),
            "pre-tokenizer 'default' is not supported; supported are command-r",
        ),
        (
            lambda w: (w.add_tokenizer_model("gpt2"), w.add_token_list(["a"])),
            "pre-tokenizer None is not supported",
        ),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a"]), w.add_token_types([1, 1])),
            "it has 1 tokens and kinds of 2",
        ),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_list(["a", "b"]), w.add_token_scores([0.0])),
            "it has 2 tokens and scores of 1",
        ),
        (
            lambda w: (
                w.add_tokenizer_model("llama"),
                w.add_token_list(["a"]),
                w.add_token_scores([0.0]),
                w.add_bos_token_id(9),
            ),
            "tokenizer.ggml.bos_token_id is 9, and it has 1 tokens",
        ),
        (
            lambda w: (
                w.add_tokenizer_model("gpt2"),
                w.add_tokenizer_pre("gpt-2"),
                w.add_token_list(["a"]),
                w.add_token_merges(["aa"]),
            ),
            "tokenizer.ggml.merges has 'aa', which is no two tokens",
        ),
    ],
)  # fmt: skip
def test_tokenizers_that_cant_be_built_are_refused(folder: Path, tmp_path: Path, tokenizer: Edit, words: str) -> None:
    path = write_gguf(folder, tmp_path / "model.gguf", "llama", tokenizer=tokenizer)
    with pytest.raises(CheckpointError) as raised:
        read_checkpoint_text(path, "tokenizer.json")
    assert words in str(raised.value)
    assert str(path) in str(raised.value)
    if "supported" in words:
        assert words in refusal(path), "before anything is started"


def test_a_tensor_that_is_missing_or_misshapen_is_named(folder: Path, tmp_path: Path) -> None:
    fewer = write_gguf(folder, tmp_path / "fewer.gguf", "llama", block_count=3)
    assert "tensor model.layers.2.self_attn.q_proj.weight is missing" in refusal(fewer)
    other = write_gguf(folder, tmp_path / "other.gguf", "llama", feed_forward_length=96)
    assert "has shape [128, 64], but other.gguf asks for [96, 64]" in refusal(other)


def test_folders_and_files_that_are_none_are_told_apart(folder: Path, tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.gguf")
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "is a file that is no .gguf file" in refusal(tmp_path / "model.bin")
    write_gguf(folder, tmp_path / "only.gguf", "llama")
    assert "has no config.json; give its file only.gguf" in refusal(tmp_path)
