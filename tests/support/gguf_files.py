"""GGUF files of small checkpoints, converted as llama.cpp converts, with the `gguf` package's names and writer.

And what transformers reads in such a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig

from tests.support.checkpoints import Oracle
from tests.support.family_checkpoint import tensors_of
from twinpool.contracts.checkpoint.gguf.gguf_header import BLOCKS

RANDOM_KINDS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Types that the `gguf` package reads and can't quantise to."""
NORMAL, CONTROL, UNUSED = 1, 3, 5
"""Kinds of tokens."""


def write_gguf(
    folder: Path,
    file: Path,
    architecture: str,
    kind: str | Callable[[str], str] = "F32",
    *,
    edit: Callable[[gguf.GGUFWriter], object] | None = None,
    tokenizer: Callable[[gguf.GGUFWriter], object] | None = None,
    **numbers: object,
) -> Path:
    """Write the checkpoint of `folder` to `file` with its matrices as `kind`; returns `file`.

    `kind` may say it of each by its name in the file. A matrix of a type that the `gguf` package can't quantise to has
    random blocks, whatever the folder has.
    `numbers` are further keys of the architecture, or other values of those that are written in any case; None leaves
    one out. `tokenizer` writes another tokenizer than the folder's, and `edit` adds what a test wants.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    known = {
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": hidden,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim", hidden // heads),
        "attention.value_length": config.get("head_dim", hidden // heads),
        "rope.dimension_count": config.get("head_dim", hidden // heads),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config.get("rope_parameters", {}).get("rope_theta", 10_000.0),
        "vocab_size": config["vocab_size"],
    }
    for key, value in (known | {name.replace("__", "."): one for name, one in numbers.items()}).items():
        _write(writer, f"{architecture}.{key}", value)
    (tokenizer or (lambda target: byte_level_tokenizer(target, folder)))(writer)
    for name, values in _converted(folder, architecture, config).items():
        wanted = kind if isinstance(kind, str) else kind(name)
        stored = gguf.GGMLQuantizationType[wanted if values.ndim > 1 else "F32"]
        if stored.name in RANDOM_KINDS:
            blocks = random_blocks(stored.name, *values.shape, seed=len(name), scale=2e-4)
        else:
            blocks = gguf.quants.quantize(values, stored)
        writer.add_tensor(name, blocks, raw_dtype=stored)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def random_blocks(kind: str, rows: int, width: int, *, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    """Rows of a matrix in random blocks whose float16 numbers are below `scale`: uint8 [rows, bytes of a row]."""
    _, values, size = next(block for block in BLOCKS.values() if block[0] == kind)
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * width // values, size), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
    for at in halves.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,)):
        numbers = generator.uniform(-scale, scale, len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def quantised(tensor: Tensor, kind: str) -> Tensor:
    """A matrix as it is after a file has had it as `kind`; a vector as it was."""
    stored = gguf.GGMLQuantizationType[kind]
    if tensor.ndim == 1:
        return tensor
    return torch.from_numpy(gguf.dequantize(gguf.quants.quantize(tensor.float().numpy(), stored), stored))


def _write(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _converted(folder: Path, architecture: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The folder's tensors under llama.cpp's names and in its order."""
    (arch,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors_of(folder).items():
        values = tensor.float().numpy()
        if architecture == "llama":
            for part, count in heads.items():
                if f".{part}." in name:
                    values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and "norm" in name:
            values = values + np.float32(1)
        before, _, after = name.partition(".experts.")
        if after:
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = values
            continue
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        found[renamed] = values
    for name, each in experts.items():
        renamed = names.get_name(name, try_suffixes=(".weight",))
        assert renamed is not None, name
        found[renamed] = np.stack([each[number] for number in range(len(each))])
    return found


def byte_level_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """Write a folder's byte-level tokenizer, its chat template, and a token for each further row of the embedding."""
    tree = json.loads((folder / "tokenizer.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    vocab, special = tree["model"]["vocab"], {token["id"] for token in tree["added_tokens"] if token["special"]}
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    kinds = [CONTROL if number in special else NORMAL for number in range(len(tokens))]
    writer.add_token_list([*tokens, *(f"[PAD{number}]" for number in range(len(tokens), rows))])
    writer.add_token_types([*kinds, *(UNUSED for _ in range(len(tokens), rows))])
    writer.add_token_merges([" ".join(pair) for pair in tree["model"]["merges"]])
    if "eos_token" in config:
        writer.add_eos_token_id(vocab[config["eos_token"]])
    if "chat_template" in config:
        writer.add_chat_template(config["chat_template"])


class GgufOracle(Oracle):
    """transformers on a GGUF file, which it reads itself; in float32."""

    def __init__(self, file: Path) -> None:
        plain = GgufConfig(dequantize=True)
        read = {"gguf_file": file.name, "quantization_config": plain, "dtype": torch.float32}
        self.model = AutoModelForCausalLM.from_pretrained(file.parent, **read).eval()
