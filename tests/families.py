"""One maker of small checkpoints a family: what the tests of the whole product go over.

Each family's own file knows how to make one; a new family is one import and one entry here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

from tests import family_latent, family_llama, family_qwen, family_window


class Make(Protocol):
    """Writes a checkpoint of random weights with a tokenizer and returns its folder."""

    def __call__(
        self, folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: object
    ) -> Path: ...


FAMILIES: dict[str, Make] = {
    "llama": family_llama.make,
    "qwen3": partial(family_llama.make, kind="qwen3"),
    "qwen2": family_qwen.make_qwen2,
    "qwen3_moe": family_qwen.make_qwen3_moe,
    "deepseek_v3": family_latent.make_deepseek_v3,
    "deepseek_v32": family_latent.make_deepseek_v32,
    "glm5": family_latent.make_glm5,
    "gemma3": family_window.make_gemma3,
    "gemma4": family_window.make_gemma4,
    "gpt_oss": family_window.make_gpt_oss,
}
"""By name; the names are those of the test ids."""
