"""Qwen2 and Qwen3-MoE against transformers: more of what their configurations allow, and longer prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.judged import expect_as_close_to_float32, expect_close_choices, expect_the_oracles
from tests.support.checkpoints import Oracle
from tests.support.model_families import FAMILIES

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen2", {"num_key_value_heads": 1, "hidden_size": 56, "published": True}),
    ("qwen3_moe", {"num_experts": 37, "num_experts_per_tok": 8, "moe_intermediate_size": 28, "mlp_only_layers": []}),
    ("qwen3_moe", {"num_experts": 37, "num_experts_per_tok": 1, "norm_topk_prob": False, "fused": True}),
    ("qwen3_moe", {"num_hidden_layers": 5, "decoder_sparse_step": 2, "tie_word_embeddings": True, "published": True}),
]
pytestmark = pytest.mark.soak


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_float32_gives_the_oracles_tokens_and_logits(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    folder = FAMILIES[name](tmp_path / name, seed=7, **changes)
    expect_the_oracles(folder, Oracle(folder), (1, 47, 300, 700, 1500), chunk=200)


def test_bfloat16_chooses_within_the_oracles_own_difference(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2"](tmp_path / "qwen2", seed=8, dtype="bfloat16")
    expect_close_choices(folder, Oracle(folder), (17, 48, 300, 700))


@pytest.mark.parametrize("changes", [{}, {"num_experts": 37, "num_experts_per_tok": 8}])
def test_bfloat16_with_experts_is_as_close_to_float32_as_the_oracles(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = FAMILIES["qwen3_moe"](tmp_path / "moe", seed=8, dtype="bfloat16", **changes)
    expect_as_close_to_float32(folder, Oracle(folder), 1000)
