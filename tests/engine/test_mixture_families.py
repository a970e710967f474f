"""Families with mixtures of experts against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Bench, MakeOracle
from tests.engine.judged import expect_the_oracles, prompts
from tests.support.checkpoints import Oracle, compare
from tests.support.model_families import FAMILIES, folder_maker
from tests.support.quantised_checkpoints import quantise_folder, quantised_names
from twinpool.cluster.serve.preflight import weight_bytes
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict

LENGTHS = (1, 2, 65, 300)
LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("mixtral", "saved"): {},
    ("mixtral", "published"): {"published": True, "sliding_window": 70},
    ("mixtral", "fused"): {"fused": True, "num_local_experts": 5, "num_experts_per_tok": 5},
    ("olmoe", "saved"): {"num_key_value_heads": 4},
    ("olmoe", "published"): {"published": True, "norm_topk_prob": True, "attention_bias": True},
    ("glm4_moe", "saved"): {},
    ("glm4_moe", "published"): {"published": True, "norm_topk_prob": False, "use_qk_norm": False, "n_group": 1},
    ("glm4_moe", "fused"): {"fused": True, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2},
    ("minimax_m2", "saved"): {},
    ("minimax_m2", "published"): {"published": True, "num_experts_per_tok": 5},
    ("minimax_m2", "fused"): {"fused": True},
    ("ernie4_5_moe", "saved"): {"tie_word_embeddings": True},
    ("ernie4_5_moe", "published"): {
        "published": True, "use_bias": True, "moe_num_shared_experts": 0, "moe_layer_start_index": 0,
        "moe_layer_end_index": 1, "moe_layer_interval": 2,
    },
    ("hunyuan_moe", "saved"): {},
    ("hunyuan_moe", "published"): {"published": True, "moe_topk": 2},
    ("granite_moe", "saved"): {},
    ("granite_moe", "published"): {"published": True},
    ("granite_moe_shared", "saved"): {},
    ("granite_moe_shared", "published"): {"published": True, "shared_intermediate_size": 0},
    ("granite_hybrid", "saved"): {},
    ("granite_hybrid", "published"): {
        "published": True, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_proj_bias": True,
    },
    ("granite_hybrid", "attention"): {"num_local_experts": 0, "layer_types": ["full_attention"] * 3},
    ("lfm2", "saved"): {"conv_bias": True, "conv_L_cache": 4},
    ("lfm2", "published"): {"published": True, "tie_word_embeddings": True},
    ("lfm2_moe", "saved"): {},
    ("lfm2_moe", "published"): {"published": True, "norm_topk_prob": False, "use_expert_bias": False},
    ("lfm2_moe", "fused"): {"fused": True},
    ("qwen2_moe", "saved"): {"norm_topk_prob": True},
    ("qwen2_moe", "published"): {
        "published": True, "mlp_only_layers": [], "decoder_sparse_step": 2, "qkv_bias": False,
    },
    ("qwen2_moe", "windows"): {
        "fused": True, "use_sliding_window": True, "sliding_window": 70, "max_window_layers": 2,
    },
    ("deepseek_v2", "saved"): {"q_lora_rank": None},
    ("deepseek_v2", "published"): {"published": True, "topk_method": "greedy", "first_k_dense_replace": 2},
    ("glm4_moe_lite", "saved"): {},
    ("glm4_moe_lite", "published"): {"published": True, "norm_topk_prob": False},
}  # fmt: skip
"""What differs from a family as its maker writes it, by the family and a word for it."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    models = {"-".join(key): {"name": key[0]} | changes for key, changes in LAYOUTS.items()}
    return folder_maker(tmp_path_factory.mktemp("mixtures"), models)


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("layout", ["-".join(key) for key in LAYOUTS])
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    folder_of: Callable[[str], Path], oracle_of: MakeOracle, layout: str
) -> None:
    folder = folder_of(layout)
    expect_the_oracles(folder, oracle_of(folder), LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["lfm2_moe", "minimax_m2", "glm4_moe", "deepseek_v2", "granite_hybrid"])
def test_a_rows_bits_hang_on_its_own_sequence_alone(tmp_path: Path, family: str, dtype: str) -> None:
    folder, rng = FAMILIES[family](tmp_path / "model", dtype=dtype), random.Random(3)
    (tokens,) = prompts(3, 120)
    want = Bench(folder, 16, 1024).forced(tokens, [120])
    bench = Bench(folder, 32, 2048, seed=2)
    at, held, parts = 0, bench.hold(120), []
    while at < 120:
        count = min(120 - at, rng.choice([1, 1, 2, 3, 16, 31, 64]))
        others = prompts(rng.randrange(99), *rng.choices([1, 2, 7, 40], k=rng.randrange(4)))
        rows = [bench.row(prompt, 0, bench.hold(len(prompt))) for prompt in others]
        place = rng.randrange(len(rows) + 1)
        rows.insert(place, bench.row(tokens[at : at + count], at, held))
        parts.append(bench.logits(rows)[place])
        at += count
    assert torch.equal(torch.cat(parts), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout"),
    [("mixtral", "awq"), ("qwen2_moe", "gptq"), ("glm4_moe", "fp8-blocks"), ("minimax_m2", "fp8-blocks")],
)
def test_experts_stay_as_they_are_published_and_answer_as_the_numbers_that_they_stand_for(
    tmp_path: Path, family: str, layout: str
) -> None:
    inner: dict[str, Any] = {"intermediate_size": 64} | (
        {} if family in ("mixtral", "minimax_m2") else {"moe_intermediate_size": 64}
    )
    both = quantise_folder(FAMILIES[family](tmp_path / "made", published=True, **inner), layout, tmp_path / "written")
    layers = 2 + (family == "glm4_moe")  # One more, which predicts further tokens.
    assert sum(".experts.7." in name for name in quantised_names(both.stored)) == 3 * layers, "two layers have experts"
    bytes_of = {
        folder: weight_bytes(read_model_spec(folder), config_from_dict({})) for folder in (both.stored, both.plain)
    }
    assert bytes_of[both.stored] < 0.5 * bytes_of[both.plain]
    bench, oracle = Bench(both.stored), Oracle(both.plain)
    asked = prompts(5, 5, 90)
    for prompt, answer in zip(asked, bench.generate_many(asked, 6), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict
