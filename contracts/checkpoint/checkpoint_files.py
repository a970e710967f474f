"""The text files of a checkpoint: those of its folder, or what a GGUF file has in their place."""

from __future__ import annotations

from pathlib import Path

from twinpool.contracts.checkpoint.gguf.gguf_header import is_gguf, read_gguf
from twinpool.contracts.checkpoint.gguf.gguf_tokenizer import GgufTokenizer
from twinpool.contracts.errors import CheckpointError

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def read_checkpoint_text(model: Path, name: str) -> str | None:
    """The content of a checkpoint's text file, None where there is none; `model` is its folder or GGUF file.

    A GGUF file has `tokenizer.json` and `tokenizer_config.json`. Raises `CheckpointError` for one that can't be read.
    """
    if is_gguf(model):
        if name not in (TOKENIZER, TOKENIZER_CONFIG):
            return None
        tokenizer = GgufTokenizer(read_gguf(model))
        return tokenizer.tokenizer_json() if name == TOKENIZER else tokenizer.config_json()
    path = model / name
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"can't read {path}: {error}") from None
