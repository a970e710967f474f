"""Llama and Qwen3, for the tests that go over all families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.checkpoints import make_checkpoint


def make(
    folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, kind: str = "llama", **changes: Any
) -> Path:
    """A checkpoint folder with its tokenizer; `published`: spelt as published folders are."""
    return make_checkpoint(folder, kind, dtype=dtype, seed=seed, old_spelling=published, **changes)
