"""An engine on a checkpoint, judged by the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engine.harness import Bench
from tests.support.checkpoints import VOCAB, Oracle, compare, compare_forced

_DRAWS = 32
_QUANTILES = torch.tensor([0.5, 0.75, 0.9])


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def expect_the_oracles(folder: Path, oracle: Oracle, lengths: Sequence[int], chunk: int = 64, **config: Any) -> None:
    """float32: greedy tokens after prompts of these lengths, computed in chunks and decoded as one batch; and logits of
    the last, within four times the oracle's own difference. `config`: keys of the engine's section."""
    asked, bench = prompts(1, *lengths), Bench(folder, tokens=sum(lengths) + 1000, **config)
    for prompt, got in zip(asked, bench.generate_many(asked, 10, chunk), strict=True):
        verdict = compare(oracle, prompt, got)
        assert verdict.equal, (len(prompt), verdict)
    length = len(asked[-1])
    got_nv = bench.forced(asked[-1], [length // 7, 1, length - length // 7 - 1])
    assert (got_nv - oracle.logits(asked[-1])).abs().max() <= 4 * oracle.difference


def expect_close_choices(folder: Path, oracle: Oracle, lengths: Sequence[int], **config: Any) -> None:
    """bfloat16: teacher-forced choices within the oracle's own difference."""
    bench = Bench(folder, **config)
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


def expect_as_close_but_where_torn(folder: Path, oracle: Oracle, tokens: list[int], chunks: list[int]) -> None:
    """bfloat16 of a mixture of experts, position by position: no further from the oracle's float32 than four times what
    the oracle's bfloat16 is at nine of ten positions. Only where rounding decides the experts may a position be
    further off: there one last bit, of whichever processor, makes another answer, in the oracle as well."""
    exact_oracle = Oracle(folder, "float32")
    exact, torn = exact_oracle.logits(tokens), torn_rows(exact_oracle, oracle, tokens)
    assert torn.float().mean() <= 0.1, "nearly all positions are judged"
    ours, theirs = (
        (each - exact).abs().amax(-1) for each in (Bench(folder).forced(tokens, chunks), oracle.logits(tokens))
    )
    allowed = 4 * theirs[~torn].quantile(0.9)
    assert theirs[~torn].max() <= allowed, "the oracle itself is this close"
    assert ours[~torn].max() <= allowed, (ours[~torn].max(), allowed)


def torn_rows(exact: Oracle, rounded: Oracle, tokens: Sequence[int]) -> Tensor:
    """Positions, [len(tokens)] bool, at which a mixture of experts is decided by rounding: in some layer the oracle's
    float32 router, given its input with the noise of bfloat16 on it (twice what `rounded` has there), sends the token
    to other experts in one of several draws."""
    inputs = [_router_inputs(oracle, tokens) for oracle in (exact, rounded)]
    torn = torch.zeros(len(tokens), dtype=torch.bool)
    generator = torch.Generator().manual_seed(4)
    for (router, x), (_, x_rounded) in zip(*inputs, strict=True):
        # The median: rows that were torn before this layer are off by far more than noise.
        noise = 2 * 1.5 * float((x_rounded - x).abs().median())
        want = _chosen(router, x)
        for _ in range(_DRAWS):
            draw = x + noise * torch.randn(x.shape, generator=generator)
            torn |= (_chosen(router, draw) != want).any(-1)
    return torn


@torch.inference_mode()
def _router_inputs(oracle: Oracle, tokens: Sequence[int]) -> list[tuple[torch.nn.Module, Tensor]]:
    """The oracle's routers and what each is given, [len(tokens), hidden] float32."""
    routers = [module for module in oracle.model.modules() if type(module).__name__.endswith("TopkRouter")]
    seen: list[tuple[torch.nn.Module, Tensor]] = []
    hooks = [
        router.register_forward_pre_hook(
            lambda module, args: seen.append((module, args[0].reshape(-1, args[0].shape[-1]).float()))
        )
        for router in routers
    ]
    oracle.logits(tokens)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(routers) > 0, "the oracle routes"
    return seen


@torch.inference_mode()
def _chosen(router: torch.nn.Module, x: Tensor) -> Tensor:
    """The experts of each row, ascending."""
    (indices,) = (part for part in router(x) if part.dtype == torch.int64)
    ascending: Tensor = indices.sort(-1).values
    return ascending
