"""Gemma 3, Gemma 4 and gpt-oss against transformers: more of what their configurations allow, and longer prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.judged import expect_as_close_to_float32, expect_close_choices, expect_the_oracles
from tests.support.checkpoints import Oracle
from tests.support.model_families import FAMILIES

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gemma3", {}),
    ("gemma3", {"sliding_window": 2}),
    ("gemma4", {}),
    ("gemma4", {"enable_moe_block": True, "use_double_wide_mlp": False, "attention_k_eq_v": False}),
    ("gemma4", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    ("gpt_oss", {"attention_bias": False, "num_experts_per_tok": 8}),
    ("gpt_oss", {"sliding_window": 300, "packed": True}),
]
pytestmark = pytest.mark.soak


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_float32_gives_the_oracles_tokens_and_logits(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    folder = FAMILIES[name](tmp_path / name, seed=7, **changes)
    expect_the_oracles(folder, Oracle(folder), (1, 47, 48, 49, 300, 700, 1500), chunk=200)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gpt_oss"])
def test_bfloat16_chooses_within_the_oracles_own_difference(tmp_path: Path, name: str) -> None:
    folder = FAMILIES[name](tmp_path / name, seed=8, dtype="bfloat16")
    expect_close_choices(folder, Oracle(folder), (17, 48, 300, 700))


@pytest.mark.parametrize(("name", "changes"), [("gpt_oss", {}), ("gemma4", {"enable_moe_block": True})])
def test_bfloat16_with_experts_is_as_close_to_float32_as_the_oracles(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    folder = FAMILIES[name](tmp_path / name, seed=8, dtype="bfloat16", **changes)
    expect_as_close_to_float32(folder, Oracle(folder), 1000)
