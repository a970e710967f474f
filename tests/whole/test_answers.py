"""Whole clusters on many kinds of checkpoint and layout: what clients get is what the oracle says.

Six starts; between them every checkpoint kind, rope, dtype, page size and plane meets many of the others. The full
product is `make soak`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contracts.sampling import SamplingParams
from tests.checkpoints import Oracle, compare, compare_forced, compare_sampled, make_checkpoint
from tests.serving import Answer, Serving, serving

COUNT, LONGEST, TOKENS, AT_ONCE = 64, 2000, 40, 16


@dataclass(frozen=True)
class Case:
    kind: str
    tied: bool
    rope: str
    dtype: str
    page_tokens: int
    chunk_tokens: int
    plane: str
    workers: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        return f"{self.kind}-{tied}-{self.rope}-{self.dtype}-{self.page_tokens}-{self.chunk_tokens}-{self.plane}"


CASES = [
    Case("llama", False, "llama3", "float32", 16, 256, "shm", (2, 2)),
    Case("qwen3", True, "default", "bfloat16", 64, 100, "shm"),
    Case("llama", True, "linear", "bfloat16", 1, 333, "zmq"),
    Case("qwen3", False, "yarn", "float32", 16, 100, "zmq"),
    Case("llama", True, "default", "float32", 64, 512, "local", (1, 2)),
    Case("qwen3", False, "llama3", "bfloat16", 1, 256, "local"),
]


@dataclass
class Scene:
    case: Case
    folder: Path
    oracle: Oracle
    serving: Serving


@pytest.fixture(scope="module", params=CASES, ids=str)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    case: Case = request.param
    base = tmp_path_factory.mktemp(f"{case.kind}-{case.plane}")
    folder = make_checkpoint(
        base / "model", case.kind, tied=case.tied, rope=case.rope, dtype=case.dtype, seed=CASES.index(case)
    )
    sections: dict[str, Any] = {
        "transfer": {"plane": case.plane},
        "cache": {"page_tokens": case.page_tokens, "device_tokens": 40000},
        "prefill": {"chunk_tokens": case.chunk_tokens},
    }
    prefill, decode = case.workers
    with serving(
        folder, base / "run", "--prefill", str(prefill), "--decode", str(decode), sections=sections
    ) as cluster:
        yield Scene(case, folder, Oracle(folder), cluster)


@pytest.fixture(autouse=True)
def settled(scene: Scene) -> Iterator[None]:
    yield
    scene.serving.settle()


def make_prompts(seed: int, count: int, longest: int, vocab: int = 300) -> list[list[int]]:
    """Lengths spread over orders of magnitude, both ends included; a third begin as others do, some are repeats."""
    rng = random.Random(seed)
    trunk = [rng.randrange(vocab) for _ in range(longest)]
    prompts: list[list[int]] = [[rng.randrange(vocab)], trunk]
    while len(prompts) < count:
        length = round(longest ** rng.random())
        kind = rng.random()
        if kind < 0.1:
            prompts.append(rng.choice(prompts))
        elif kind < 0.45:
            shared = rng.randrange(length + 1)
            prompts.append(trunk[:shared] + [rng.randrange(vocab) for _ in range(length - shared)])
        else:
            prompts.append([rng.randrange(vocab) for _ in range(length)])
    return prompts


def expect_equal(scene: Scene, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> None:
    """The rule of equality, over all prompts; prints every use of its margin."""
    margins = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.tokens) == TOKENS
        assert answer.finish == "length"
        if scene.case.dtype == "bfloat16":
            # Each choice against the oracle's, given the same tokens before it.
            tokens = [*prompt, *answer.tokens]
            verdict = compare_forced(scene.oracle, tokens[:-1], tokens[1:], first=len(prompt) - 1)
        else:
            verdict = compare(scene.oracle, prompt, answer.tokens)
            margins += not verdict.exact
        if not verdict.exact:
            print(f"{len(prompt)} tokens: differs at {verdict.position}, {verdict.margin} of {verdict.allowed} allowed")
        assert verdict.equal, (len(prompt), verdict)
    assert margins * 100 <= len(prompts)


@pytest.mark.slow
def test_greedy_answers_are_the_oracles_and_the_path_is_the_path(scene: Scene) -> None:
    cluster, case = scene.serving, scene.case
    prompts = make_prompts(CASES.index(case), COUNT, LONGEST)
    answers = cluster.complete_all(prompts, at_once=AT_ONCE, max_tokens=TOKENS)
    expect_equal(scene, prompts, answers)
    assert sum(a.cached for a in answers) > 0
    page_bytes = case.page_tokens * 2 * 2 * 2 * 16 * (2 if case.dtype == "bfloat16" else 4)
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = answer.twinpool
        assert seen["transfer_bytes"] == -(-len(prompt) // case.page_tokens) * page_bytes
        assert seen["computed"]["decode"] == 0
        assert seen["computed"]["prefill"] == len(prompt) - answer.cached
        assert seen["attempts"] == 1
        assert answer.usage["prompt_tokens"] == len(prompt)
        assert answer.usage["completion_tokens"] == TOKENS
    handed = sum(a.twinpool["transfer_bytes"] for a in answers)
    assert cluster.metric("twinpool_transfer_bytes_total", plane=case.plane) == handed
    assert cluster.metric("twinpool_prompt_tokens_computed_total", role="decode") == 0
    computed = sum(len(p) for p in prompts) - sum(a.cached for a in answers)
    assert cluster.metric("twinpool_prompt_tokens_computed_total", role="prefill") == computed
    assert cluster.metric("twinpool_fallbacks_total") == cluster.metric("twinpool_damaged_total") == 0


@pytest.mark.slow
def test_seeded_draws_are_the_oracles_and_the_same_alone_in_a_batch_and_streamed(scene: Scene) -> None:
    cluster = scene.serving
    prompts = make_prompts(100, 8, 300)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_k": 60, "seed": 7}
    alone = [a.tokens for a in cluster.complete_all(prompts, at_once=1, **options)]
    batch = [a.tokens for a in cluster.complete_all(prompts, **options)]
    streamed = [a.tokens for a in cluster.complete_all(prompts, stream=True, **options)]
    assert alone == batch == streamed
    params = SamplingParams(max_tokens=12, temperature=0.9, top_k=60, seed=7)
    for prompt, tokens in zip(prompts, alone, strict=True):
        verdict = compare_sampled(scene.oracle, prompt, tokens, params)
        assert verdict.equal, verdict
    other = [a.tokens for a in cluster.complete_all(prompts, **{**options, "seed": 8})]
    assert other != alone


def test_no_part_can_import_the_oracle(scene: Scene) -> None:
    workers = scene.serving.status().values()
    for worker in workers:
        values = Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")
        (path,) = [v for v in values if v.startswith(b"PYTHONPATH=")]
        assert b"tests/unimportable" in path
        mapped = Path(f"/proc/{worker['pid']}/maps").read_text()
        assert "transformers" not in mapped
