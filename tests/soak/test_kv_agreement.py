"""What a quantised KV cache does to a published model on prose: `make soak ARGS="tests/soak/test_kv_agreement.py -s"`
prints the figures of docs/benchmarks/engine.md.

Teacher-forced, in chunks of 64: the model's likeliest token at each position, and the log-probability of the word that
the text has there, beside those of the same engine without quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.engine.harness import Bench
from tests.soak.published import OutOfReach, prose, published_model

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(3600)]

PASSAGES, LENGTH, CHUNK = 4, 320, 64
CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
FLOOR = {"fp8": 0.90, "int8": 0.94}
"""The share of positions whose likeliest token must be the same; measured: docs/benchmarks/engine.md."""


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return published_model()
    except OutOfReach as error:
        pytest.skip(f"SmolLM2-135M-Instruct can't be had here: {error}")


@pytest.fixture(scope="module")
def passages(model: Path) -> list[list[int]]:
    ids = list(Tokenizer.from_file(str(model / "tokenizer.json")).encode("\n".join(prose())).ids)
    stride = (len(ids) - LENGTH) // PASSAGES
    return [ids[number * stride :][:LENGTH] for number in range(PASSAGES)]


def forced(model: Path, passages: list[list[int]], dtype: str, codes: torch.dtype | None) -> Iterator[Tensor]:
    bench = Bench(model, tokens=LENGTH, options={"kv_codes": codes}, dtype=dtype)
    for tokens in passages:
        yield bench.forced(tokens, [CHUNK] * (LENGTH // CHUNK)).log_softmax(-1)


def agreement(wanted: list[Tensor], got: list[Tensor], passages: list[list[int]]) -> tuple[float, float, float]:
    """The share of equal likeliest tokens, and the mean difference and distance of the words' log-probabilities."""
    same, differences = [], []
    for a, b, tokens in zip(wanted, got, passages, strict=True):
        same.append(a.argmax(-1) == b.argmax(-1))
        following = torch.tensor(tokens[1:]).unsqueeze(1)
        differences.append((b[:-1].gather(1, following) - a[:-1].gather(1, following)).flatten())
    difference = torch.cat(differences)
    return float(torch.cat(same).float().mean()), float(difference.mean()), float(difference.abs().mean())


def test_likeliest_words_are_nearly_always_the_same(model: Path, passages: list[list[int]]) -> None:
    plain = list(forced(model, passages, "bfloat16", None))
    others = {name: list(forced(model, passages, "bfloat16", codes)) for name, codes in CODES.items()}
    others["none, in float32"] = list(forced(model, passages, "float32", None))
    for name, got in others.items():
        same, mean, distance = agreement(plain, got, passages)
        print(f"{name}: {same:.2%} the same, log-probability {mean:+.4f}, distance {distance:.4f}")
        assert same > FLOOR.get(name, 0.94)
        assert abs(mean) < 0.02
