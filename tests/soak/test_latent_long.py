"""Latent and sparse attention against the oracle at length: prompts of up to 1,500 tokens, all kinds of checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Bench
from tests.support.checkpoints import VOCAB, Oracle, compare, compare_forced
from tests.support.model_families import FAMILIES

LENGTHS = (1, 2, 63, 64, 65, 129, 300, 700, 1100, 1500)
CELLS: list[dict[str, Any]] = [
    {"name": "deepseek_v3"},
    {"name": "deepseek_v3", "published": True},
    {"name": "deepseek_v3", "q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    {"name": "deepseek_v32"},
    {"name": "deepseek_v32", "published": True, "attention_bias": True, "seed": 1},
    {"name": "glm5"},
    {"name": "glm5", "published": True, "index_topk": 40, "index_head_dim": 24, "seed": 2},
    {"name": "glm5", "index_topk": 600, "seed": 3},
]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("options", CELLS, ids=lambda options: "-".join(map(str, options.values())))
def test_long_prompts_get_the_oracles_greedy_tokens(tmp_path: Path, options: dict[str, Any], attention: str) -> None:
    rest = dict(options)
    folder = FAMILIES[rest.pop("name")](tmp_path / "model", **rest)
    oracle, bench = Oracle(folder), Bench(folder, tokens=8192, attention=attention)
    asked = prompts(1, *LENGTHS)
    for prompt, got in zip(asked, bench.generate_many(asked, 16, chunk=200), strict=True):
        verdict = compare(oracle, prompt, got)
        assert verdict.equal, (len(prompt), verdict)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm5"])
def test_bfloat16_chooses_within_the_oracles_own_difference(tmp_path: Path, name: str) -> None:
    folder = FAMILIES[name](tmp_path / "model", dtype="bfloat16")
    oracle, bench = Oracle(folder), Bench(folder)
    for prompt in prompts(2, 17, 300, 900):
        tokens = prompt + oracle.generate(prompt, 16)
        got = bench.forced(tokens, [len(prompt), *[1] * 16])
        verdict = compare_forced(oracle, tokens, got.argmax(-1).tolist())
        assert verdict.equal, verdict


@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_chunks_and_pages_do_not_change_a_bit(tmp_path: Path, dtype: str, attention: str) -> None:
    (tokens,), rng = prompts(3, 900), random.Random(3)
    folder = FAMILIES["glm5"](tmp_path / "model", dtype=dtype)
    for float8 in (False, True):
        common: dict[str, Any] = {"options": {"index_float8": float8}, "attention": attention}
        want = Bench(folder, threads=1, **common).forced(tokens, [900])
        for page_tokens, threads in ((1, 2), (16, 1), (64, 2), (256, 1)):
            chunks: list[int] = []
            while (left := 900 - sum(chunks)) > 0:
                chunks.append(min(left, rng.choice([1, 2, 5, 31, 64, 128, 129, 250])))
            bench = Bench(folder, page_tokens, seed=page_tokens, threads=threads, **common)
            assert torch.equal(bench.forced(tokens, chunks), want), (page_tokens, chunks)
