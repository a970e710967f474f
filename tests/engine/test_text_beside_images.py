"""The text of models that see, whose text is one of the families, against transformers' whole models given text alone.

Their ropes have sections for the axes of images, in blocks (Qwen2-VL, Qwen2.5-VL) and interleaved (Qwen3-VL).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.harness import Bench
from tests.engine.judged import expect_the_oracles, prompts
from tests.support.checkpoints import Oracle, write_tokenizer
from tests.support.family_checkpoint import COMMON
from twinpool.engine.models.registry import read_model

SIZES = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
SEEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig", {"rope_parameters": ROPE}, SEEN | {"embed_dim": 32, "hidden_size": 64}
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig", {"rope_parameters": ROPE}, SEEN | {"out_hidden_size": 64}
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        {"rope_parameters": ROPE | {"mrope_interleaved": True}, "head_dim": 16},
        SEEN | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        {
            "rope_parameters": ROPE | {"mrope_interleaved": True}, "head_dim": 16, "num_experts": 8,
            "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        },
        SEEN | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    ),
    "Kimi_K25ForConditionalGeneration": ("Kimi_K25Config", {
        "model_type": "deepseek_v3", "moe_intermediate_size": 32, "n_routed_experts": 12, "num_experts_per_tok": 3,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 48,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
        "rope_parameters": {
            "rope_theta": 50000.0, "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64,
            "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    }, {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "patch_size": 4}),
    "Mistral3ForConditionalGeneration": ("Mistral3Config", {
        "model_type": "mistral", "head_dim": 32, "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }, PIXTRAL),
}  # fmt: skip
"""By architecture: the configuration's class, the text's keys, and what is seen."""


_KIMI = "language_model.model.layers."


class WholeOracle(Oracle):
    """transformers' whole model, of which text is asked."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
        self.model.config.vocab_size = SIZES["vocab_size"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("seeing")

    @cache
    def make(architecture: str) -> Path:
        name, text, vision = MODELS[architecture]
        config = getattr(transformers, name)(
            text_config=SIZES | text, vision_config=vision, tie_word_embeddings=False, eos_token_id=0
        )
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = getattr(transformers, architecture)(config)
        for key, tensor in model.named_parameters():
            if "norm" in key:
                tensor.data.uniform_(0.5, 1.5)
        model.save_pretrained(base / architecture)
        if architecture.startswith("Kimi"):  # transformers takes the text's layers for those of what is seen.
            file = base / architecture / "model.safetensors"
            named = {key.replace("language_model.model.blocks.", _KIMI): t for key, t in load_file(file).items()}
            save_file(named, file, {"format": "pt"})
        write_tokenizer(base / architecture, int(SIZES["vocab_size"]), chat=True)
        return base / architecture

    return make


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    folder_of: Callable[[str], Path], architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(architecture)
    expect_the_oracles(folder, WholeOracle(folder, architecture), (1, 17, 200))
    assert not caplog.records, "no key is unknown"


@pytest.mark.slow
def test_as_published_the_texts_keys_are_not_inside(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Of Qwen2-VL and Qwen2.5-VL, with the old spelling of its rope."""
    saved = folder_of("Qwen2_5_VLForConditionalGeneration")
    values = json.loads((saved / "config.json").read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    del text["layer_types"]
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    text |= {"sliding_window": 32768, "max_window_layers": 1, "torch_dtype": values.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(text | values))
    save_file(load_file(saved / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    (tokens,) = prompts(2, 60)
    want, got = (Bench(folder).forced(tokens, [60]) for folder in (saved, tmp_path))
    assert torch.equal(got, want)


def test_either_flag_ties_a_model_without_a_head_of_its_own(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    saved = folder_of("Mistral3ForConditionalGeneration")
    tensors = load_file(saved / "model.safetensors")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for outer, inner in ((True, False), (False, True), (True, None), (None, True)):
        values = json.loads((saved / "config.json").read_text()) | {"tie_word_embeddings": outer}
        values["text_config"]["tie_word_embeddings"] = inner
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert read_model(tmp_path).tied


def test_a_null_inside_is_none_as_well(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """A window that isn't there at all is one of 4096 positions."""
    saved = folder_of("Mistral3ForConditionalGeneration")
    values = json.loads((saved / "config.json").read_text())
    values["text_config"]["max_position_embeddings"] = 8192
    save_file(load_file(saved / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    found = []
    for _ in range(2):
        (tmp_path / "config.json").write_text(json.dumps(values))
        found.append(read_model(tmp_path).windows)  # type: ignore[attr-defined]
        values["text_config"].pop("sliding_window", None)
    assert found == [[0, 0], [4096, 4096]]
