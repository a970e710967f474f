"""An engine on a checkpoint, judged by the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.checkpoints import VOCAB, Oracle, compare, compare_forced
from tests.engine.harness import Bench

_QUANTILES = torch.tensor([0.5, 0.75, 0.9])


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def expect_the_oracles(folder: Path, oracle: Oracle, lengths: Sequence[int], chunk: int = 64) -> None:
    """float32: greedy tokens after prompts of these lengths, computed in chunks and decoded as one batch; and logits of
    the last, within four times the oracle's own difference."""
    asked, bench = prompts(1, *lengths), Bench(folder, tokens=sum(lengths) + 1000)
    for prompt, got in zip(asked, bench.generate_many(asked, 10, chunk), strict=True):
        verdict = compare(oracle, prompt, got)
        assert verdict.equal, (len(prompt), verdict)
    length = len(asked[-1])
    got_nv = bench.forced(asked[-1], [length // 7, 1, length - length // 7 - 1])
    assert (got_nv - oracle.logits(asked[-1])).abs().max() <= 4 * oracle.difference


def expect_close_choices(folder: Path, oracle: Oracle, lengths: Sequence[int]) -> None:
    """bfloat16: teacher-forced choices within the oracle's own difference."""
    bench = Bench(folder)
    for prompt in prompts(2, *lengths):
        tokens = prompt + oracle.generate(prompt, 8)
        got = bench.forced(tokens, [len(prompt), *[1] * 8])
        verdict = compare_forced(oracle, tokens, got.argmax(-1).tolist())
        assert verdict.equal, verdict


def expect_as_close_to_float32(folder: Path, oracle: Oracle, length: int) -> None:
    """bfloat16 of a mixture of experts, where one last bit may send a token to another expert: over many positions, as
    close to the oracle's float32 as the oracle's bfloat16 is."""
    (tokens,) = prompts(3, length)
    exact = Oracle(folder, "float32").logits(tokens)
    ours, theirs = Bench(folder).forced(tokens, [length // 2, length - length // 2]), oracle.logits(tokens)
    mine, other = ((each - exact).abs().max(-1).values.quantile(_QUANTILES) for each in (ours, theirs))
    assert (mine <= 1.25 * other).all(), (mine, other)
