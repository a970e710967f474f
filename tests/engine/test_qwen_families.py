"""Qwen2 and Qwen3-MoE against transformers, and the promise of exactness where rows go to experts."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Bench, MakeOracle
from tests.engine.judged import expect_as_close_to_float32, expect_close_choices, expect_the_oracles, prompts
from tests.support.checkpoints import copy_checkpoint
from tests.support.model_families import FAMILIES
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.layers.moe.experts import ExpertRoutes, TorchExperts
from twinpool.engine.models.registry import read_model
from twinpool.engine.tensors.row_exact_linear import Numerics

Family = Callable[..., Path]
LENGTHS = (1, 2, 15, 64, 65, 129, 300, 700)
LAYOUTS: list[dict[str, Any]] = [
    {"name": "qwen2"},
    {"name": "qwen2", "published": True, "tie_word_embeddings": True},
    {"name": "qwen3_moe"},
    {"name": "qwen3_moe", "published": True, "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2},
    {"name": "qwen3_moe", "fused": True, "num_experts": 5, "num_experts_per_tok": 5, "mlp_only_layers": []},
]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A checkpoint of one of this file's families; the same options give the same folder."""
    base = tmp_path_factory.mktemp("qwen")

    @cache
    def make(options: tuple[tuple[str, Any], ...]) -> Path:
        rest: dict[str, Any] = {key: list(value) if isinstance(value, tuple) else value for key, value in options}
        number = len(list(base.iterdir()))
        return FAMILIES[str(rest.pop("name"))](base / str(number), **rest)

    return lambda **options: make(
        tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(options.items()))
    )


def described(options: dict[str, Any]) -> str:
    return "-".join(str(value if key == "name" else key) for key, value in options.items())


@pytest.mark.slow
@pytest.mark.parametrize("options", LAYOUTS, ids=described)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    family: Family, oracle_of: MakeOracle, options: dict[str, Any]
) -> None:
    folder = family(**options)
    expect_the_oracles(folder, oracle_of(folder), LENGTHS)


@pytest.mark.slow
def test_bfloat16_chooses_within_the_oracles_own_difference(family: Family, oracle_of: MakeOracle) -> None:
    folder = family(name="qwen2", dtype="bfloat16")
    expect_close_choices(folder, oracle_of(folder), (17, 300))


@pytest.mark.slow
def test_bfloat16_with_experts_is_as_close_to_float32_as_the_oracles(family: Family, oracle_of: MakeOracle) -> None:
    folder = family(name="qwen3_moe", dtype="bfloat16")
    expect_as_close_to_float32(folder, oracle_of(folder), 600)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "attention"), [("qwen2", "auto"), ("qwen3_moe", "auto"), ("qwen3_moe", "torch")])
def test_a_rows_bits_hang_on_its_own_sequence_alone(family: Family, name: str, attention: str, dtype: str) -> None:
    folder, rng = family(name=name, dtype=dtype), random.Random(3)
    (tokens,) = prompts(3, 300)
    want = Bench(folder, 16, 1024, attention=attention).forced(tokens, [300])
    for page_tokens, seed in ((1, 1), (16, 2), (64, 3)):
        bench = Bench(folder, page_tokens, 2048, seed, attention=attention)
        at, held, parts = 0, bench.hold(300), []
        while at < 300:
            count = min(300 - at, rng.choice([1, 1, 2, 3, 5, 16, 31, 64, 127]))
            others = [prompt for prompt in prompts(rng.randrange(99), *rng.choices([1, 2, 7, 40], k=rng.randrange(5)))]
            rows = [bench.row(prompt, 0, bench.hold(len(prompt))) for prompt in others]
            place = rng.randrange(len(rows) + 1)
            rows.insert(place, bench.row(tokens[at : at + count], at, held))
            parts.append(bench.logits(rows)[place])
            at += count
        assert torch.equal(torch.cat(parts), want), page_tokens


@pytest.mark.slow
def test_rows_of_a_step_go_to_different_experts_and_padding_to_none(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests of this file mean something only if this holds."""
    seen: list[ExpertRoutes] = []
    compute = TorchExperts.__call__

    def noted(self: TorchExperts, h_th: torch.Tensor, routes: ExpertRoutes, numerics: Numerics) -> torch.Tensor:
        seen.append(routes)
        return compute(self, h_th, routes, numerics)

    monkeypatch.setattr(TorchExperts, "__call__", noted)
    Bench(family(name="qwen3_moe")).generate(prompts(4, 61)[0], 2)
    prefill, decode = seen[:2], seen[2:]
    assert [len(routes.experts_mk) for routes in (*prefill, *decode)] == [61, 61, 1, 1]
    for routes in prefill:
        assert len(set(map(tuple, routes.experts_mk.sort(-1).values.tolist()))) > 5
        assert set(routes.experts_mk.flatten().tolist()) == set(range(8)), "every expert has something to do"


def test_numbers_that_cannot_be_are_refused_in_one_line(family: Family, tmp_path: Path) -> None:
    moe = family(name="qwen3_moe")
    cases: list[tuple[Path, dict[str, object], str]] = [
        (moe, {"num_experts_per_tok": 9}, "9 is more than the 8 experts"),
        (moe, {"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        (moe, {"moe_intermediate_size": 41}, r"experts.0.gate_proj.weight has shape \[40, 64\]"),
        (moe, {"num_local_experts": 9}, r"gate.weight has shape \[8, 64\]"),
    ]
    for number, (folder, changes, message) in enumerate(cases):
        with pytest.raises(CheckpointError, match=message) as error:
            read_model(copy_checkpoint(folder, tmp_path / str(number), **changes))
        assert "\n" not in str(error.value)
