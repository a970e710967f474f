"""A whole cluster on one kind of checkpoint and layout, and what its answers must be; for `make test` and the soak."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkpoints import Oracle, compare, compare_forced, compare_sampled, make_checkpoint
from tests.support.served_cluster import Answer, Serving, serving
from twinpool.contracts.sampling_params import SamplingParams

COUNT, LONGEST, TOKENS, AT_ONCE = 20, 2000, 40, 16


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


@dataclass
class Scene:
    case: Case
    folder: Path
    oracle: Oracle
    serving: Serving


@contextmanager
def open_scene(case: Case, base: Path, seed: int) -> Iterator[Scene]:
    """Start the case's cluster on a checkpoint of its own."""
    folder = make_checkpoint(base / "model", case.kind, tied=case.tied, rope=case.rope, dtype=case.dtype, seed=seed)
    sections: dict[str, Any] = {
        "transfer": {"plane": case.plane},
        "cache": {"page_tokens": case.page_tokens, "device_tokens": 40000},
        "prefill": {"chunk_tokens": case.chunk_tokens},
    }
    prefill, decode = map(str, case.workers)
    with serving(folder, base / "run", "--prefill", prefill, "--decode", decode, sections=sections) as cluster:
        yield Scene(case, folder, Oracle(folder), cluster)


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


def expect_greedy(scene: Scene, seed: int, count: int = COUNT) -> None:
    """The oracle's answers, and the path is the path: run once on a fresh cluster."""
    cluster, case = scene.serving, scene.case
    prompts = make_prompts(seed, count, LONGEST)
    answers = cluster.complete_all(prompts, at_once=AT_ONCE, max_tokens=TOKENS)
    expect_equal(scene, prompts, answers)
    assert sum(a.cached for a in answers) > 0
    page_bytes = case.page_tokens * 2 * 2 * 2 * 16 * (2 if case.dtype == "bfloat16" else 4)
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = answer.twinpool
        held, beside = divmod(seen["held_by_decode"], case.page_tokens)
        assert not beside, "whole pages are held, or none of a page"
        assert seen["transfer_bytes"] == (-(-len(prompt) // case.page_tokens) - held) * page_bytes
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
    assert cluster.metric("twinpool_fallbacks_total") == cluster.metric("twinpool_handovers_damaged_total") == 0


def expect_seeded(scene: Scene) -> None:
    """Draws are the oracle's, and the same alone, in a batch and streamed."""
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
