"""`engine.context` through a whole server: the limit that clients are told and held to, on a model whose context is
longer than its training by yarn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import VOCAB, Oracle
from tests.support.model_families import FAMILIES
from tests.support.served_cluster import Serving, serving

pytestmark = pytest.mark.slow
TRAINED, CONTEXT = 64, 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "rope_theta": 10000.0}
    path = tmp_path_factory.mktemp("yarn") / "model"
    return FAMILIES["qwen2"](path, max_position_embeddings=TRAINED, rope_parameters=yarn)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    sections = {
        "transfer": {"plane": "local"},
        "engine": {"context": CONTEXT},
        "prefill": {"chunk_tokens": 48},
        "cache": {"device_tokens": 4096},
    }
    with serving(folder, tmp_path_factory.mktemp("context"), sections=sections) as found:
        yield found


def tokens_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def refusal(server: Serving, **body: Any) -> tuple[str, str]:
    """The message and the field of a 400."""
    response = httpx.post(f"{server.url}/v1/completions", json={"model": server.model, **body}, timeout=60)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["message"], error["param"]


def test_clients_and_the_operator_are_told_the_context(server: Serving) -> None:
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert model["max_model_len"] == CONTEXT
    assert any(f"context {CONTEXT}" in line for line in server.lines)
    assert any(f"{CONTEXT} tokens of context" in line for line in server.lines)


def test_a_prompt_longer_than_the_training_is_answered_as_transformers_does(server: Serving, folder: Path) -> None:
    oracle = Oracle(folder)
    for length in (TRAINED + 1, 150, CONTEXT - 12):
        prompt = tokens_of(length)
        assert server.complete(prompt, max_tokens=12).tokens == oracle.generate(prompt, 12)


def test_what_is_longer_than_the_context_is_refused_and_named(server: Serving) -> None:
    assert refusal(server, prompt=tokens_of(CONTEXT)) == (
        f"the prompt has {CONTEXT} tokens; the context of {CONTEXT} has no room for it", "prompt"
    )  # fmt: skip
    assert refusal(server, prompt=tokens_of(190), max_tokens=11) == (
        f"prompt (190 tokens) and max_tokens (11) make 201; the context is {CONTEXT}", "max_tokens"
    )  # fmt: skip


def test_an_answer_without_a_limit_ends_with_the_context(server: Serving) -> None:
    answer = server.complete(tokens_of(170))
    assert (len(answer.tokens), answer.finish) == (CONTEXT - 170, "length")
    server.settle()
