"""One maker of small checkpoints a family: what the tests of the whole product go over.

Each family's own file knows how to make one; a new family is one import and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from tests.support import (
    family_dense,
    family_hybrid,
    family_latent,
    family_llama,
    family_mixture,
    family_qwen,
    family_window,
)


class Make(Protocol):
    """Writes a checkpoint of random weights with a tokenizer and returns its folder."""

    def __call__(
        self, folder: Path, *, dtype: str = "float32", seed: int = 0, published: bool = False, **changes: Any
    ) -> Path: ...


FAMILIES: dict[str, Make] = {
    "llama": family_llama.make,
    "qwen3": partial(family_llama.make, kind="qwen3"),
    "qwen2": family_qwen.make_qwen2,
    "qwen3_moe": family_qwen.make_qwen3_moe,
    "mixtral": family_mixture.make_mixtral,
    "olmoe": family_mixture.make_olmoe,
    "glm4_moe": family_mixture.make_glm4_moe,
    "minimax_m2": family_mixture.make_minimax_m2,
    "ernie4_5_moe": family_mixture.make_ernie4_5_moe,
    "hunyuan_moe": family_mixture.make_hunyuan_moe,
    "granite_moe": family_mixture.make_granite_moe,
    "granite_hybrid": family_mixture.make_granite_hybrid,
    "lfm2": family_mixture.make_lfm2,
    "lfm2_moe": family_mixture.make_lfm2_moe,
    "granite_moe_shared": family_mixture.make_granite_moe_shared,
    "qwen2_moe": family_mixture.make_qwen2_moe,
    "deepseek_v2": family_latent.make_deepseek_v2,
    "deepseek_v3": family_latent.make_deepseek_v3,
    "deepseek_v32": family_latent.make_deepseek_v32,
    "glm4_moe_lite": family_latent.make_glm4_moe_lite,
    "glm5": family_latent.make_glm5,
    # With tied embeddings a random model of these repeats its last token, whatever it has read.
    "gemma3": partial(family_window.make_gemma3, tie_word_embeddings=False),
    "gemma4": partial(family_window.make_gemma4, tie_word_embeddings=False),
    "gpt_oss": family_window.make_gpt_oss,
    "mistral": family_window.make_mistral,
    "qwen3_next": family_hybrid.make_qwen3_next,
    "qwen3_5": family_hybrid.make_qwen3_5,
    "falcon_h1": family_hybrid.make_falcon_h1,
    "nemotron_h": family_hybrid.make_nemotron_h,
    **{name: family_dense.MAKERS[name] for name in ("phi3", "olmo3", "gemma2", "cohere2")},
}
"""By name; the names are those of the test ids."""
EVERY: dict[str, Make] = FAMILIES | family_dense.MAKERS
"""Also those whose state and parts of layers another has."""


def folder_maker(
    base: Path, models: Mapping[str, Mapping[str, Any]], makers: Mapping[str, Callable[..., Path]] = FAMILIES
) -> Callable[[str], Path]:
    """A function that gives the folder of one of `models`, which it makes below `base` when it is first asked for;
    each names its family (`name`) and what to change."""

    @cache
    def make(name: str) -> Path:
        options = dict(models[name])
        return makers[options.pop("name")](base / name, **options)

    return make
