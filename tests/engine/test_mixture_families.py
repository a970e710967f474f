"""Families with mixtures of experts against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import MakeOracle
from tests.engine.judged import expect_the_oracles
from tests.support.model_families import folder_maker

LENGTHS = (1, 2, 65, 300)
LAYOUTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "mixtral_published": {"published": True, "sliding_window": 70},
    "mixtral_fused": {"fused": True, "num_local_experts": 5, "num_experts_per_tok": 5},
    "qwen2_moe": {"norm_topk_prob": True},
    "qwen2_moe_published": {"published": True, "mlp_only_layers": [], "decoder_sparse_step": 2, "qkv_bias": False},
    "qwen2_moe_windows": {"fused": True, "use_sliding_window": True, "sliding_window": 70, "max_window_layers": 2},
    "deepseek_v2": {"q_lora_rank": None},
    "deepseek_v2_published": {"published": True, "topk_method": "greedy", "first_k_dense_replace": 2},
    "glm4_moe_lite": {},
    "glm4_moe_lite_published": {"published": True, "norm_topk_prob": False},
}
"""By family and what differs from it."""


def named(layout: str) -> dict[str, Any]:
    families = ("mixtral", "qwen2_moe", "deepseek_v2", "glm4_moe_lite")
    return {"name": next(family for family in families if layout.startswith(family))} | LAYOUTS[layout]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folder_maker(tmp_path_factory.mktemp("mixtures"), {layout: named(layout) for layout in LAYOUTS})


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    folder_of: Callable[[str], Path], oracle_of: MakeOracle, layout: str
) -> None:
    folder = folder_of(layout)
    expect_the_oracles(folder, oracle_of(folder), LENGTHS)
