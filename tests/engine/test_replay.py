"""A known answer drawn again: what differs is found, and how far off it is, is what the logits say."""

from __future__ import annotations

import math
import random

import pytest
import torch

from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.runner.batch import BatchRow, KnownAnswer, TokenDraw
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.runner.sampling.redraw import RedrawnTokens, gaps, redraw
from twinpool.engine.runner.sampling.sampler import draw_tokens

VOCAB = 60


def logits(rows: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def draws(params: SamplingParams, rows: int) -> list[TokenDraw]:
    return [TokenDraw(params, (), 1, 10 + n) for n in range(rows)]


def gap_of(params: SamplingParams, logits_nv: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return gaps(logits_nv.clone(), draws(params, len(logits_nv)), tokens)


def test_the_gap_of_a_greedy_token_is_half_of_what_it_lacks() -> None:
    logits_nv = logits(3, 1)
    best = logits_nv.argmax(-1)
    assert gap_of(SamplingParams(1, temperature=0.0), logits_nv, best).tolist() == [0.0] * 3
    second = logits_nv.topk(2, dim=-1).indices[:, 1]
    lacking = logits_nv.amax(-1) - logits_nv.gather(1, second.unsqueeze(1)).squeeze(1)
    found = gap_of(SamplingParams(1, temperature=0.0), logits_nv, second)
    assert torch.allclose(found, lacking.double() / 2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_noise_never_moves_a_sampled_token_further_than_its_gap(temperature: float) -> None:
    """The bound that the margin relies on: logits that are off by at most e draw tokens with gaps of at most e."""
    params = SamplingParams(1, temperature=temperature, seed=5)
    logits_nv, generator = logits(400, 2), torch.Generator().manual_seed(3)
    moved = 0
    for e in (0.01, 0.1, 0.5):
        noise = e * (2 * torch.rand(logits_nv.shape, generator=generator) - 1)
        tokens = draw_tokens(logits_nv + noise, draws(params, 400)).tokens_n
        right = draw_tokens(logits_nv, draws(params, 400)).tokens_n
        found = gap_of(params, logits_nv, tokens)
        assert found.max() <= e + 1e-9
        assert (found[tokens == right] < 1e-9).all()
        moved += int((tokens != right).sum())
    assert moved > 20


def test_a_token_from_elsewhere_has_a_gap_above_any_noise() -> None:
    params, rng = SamplingParams(1, temperature=1.0, seed=7), random.Random(8)
    tokens = torch.tensor([rng.randrange(VOCAB) for _ in range(400)])
    found = gap_of(params, logits(400, 4), tokens)
    assert (found > 0.25).float().mean() > 0.8


def test_a_token_that_a_cut_left_out_lacks_what_the_last_one_kept_has() -> None:
    params = SamplingParams(1, temperature=0.7, top_k=5, seed=1)
    logits_nv = logits(4, 5)
    order = logits_nv.argsort(-1, descending=True)
    sixth = order[:, 5]
    lacking = logits_nv.gather(1, order[:, 4:5]) - logits_nv.gather(1, order[:, 5:6])
    assert torch.allclose(gap_of(params, logits_nv, sixth), lacking.squeeze(1).double() / 2)
    assert gap_of(params, logits_nv, order[:, 2]).tolist() == [0.0] * 4, "of one that was kept nothing can be told"


def test_extreme_odds_are_numbers_and_not_errors() -> None:
    logits_nv = torch.full((2, VOCAB), -80.0)
    logits_nv[:, 3] = 80.0
    found = gap_of(SamplingParams(1, temperature=1.0, seed=2), logits_nv, torch.tensor([3, 9])).tolist()
    assert found[0] == 0.0
    assert found[1] > 10
    assert not any(math.isnan(x) for x in found)


@pytest.mark.parametrize("chunk", [1, 4, 7, 40])
def test_every_position_of_the_answer_is_drawn_once_in_chunks_of_any_size(chunk: int) -> None:
    """Penalties see the answer up to their own position, as they did when it was drawn."""
    params = SamplingParams(1, temperature=0.9, seed=3, repetition_penalty=1.4, presence_penalty=0.6)
    rng = random.Random(4)
    tokens = [rng.randrange(VOCAB) for _ in range(9)]
    table, length = logits(40, 6), 24
    while len(tokens) < length:
        draw = TokenDraw(params, tuple(tokens), 9)
        tokens.append(int(draw_tokens(table[len(tokens) - 1 : len(tokens)], [draw]).tokens_n[0]))
    tokens[15] = (tokens[15] + 1) % VOCAB
    parts: list[RedrawnTokens] = []
    for start in range(0, length - 1, chunk):
        end = min(start + chunk, length - 1)
        row = BatchRow(tokens[start:end], start, {}, replay=KnownAnswer(params, tokens, 9))
        parts += redraw(row, table[start:end], lambda x: x, 3, triton=False)
    assert [part.first + i for part in parts for i in range(len(part.tokens_n))] == list(range(9, length))
    assert max(len(part.tokens_n) for part in parts) <= 3
    # Later draws follow the answer's token, whatever should have been there: they may differ by their penalties.
    assert next(d.position for part in parts for d in part.listed()) == 15


@pytest.mark.parametrize("chunk", [1, 4, 40])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_position_is_drawn_again_with_its_own_mask(temperature: float, chunk: int) -> None:
    """The masks of neighbours have no token in common, and some positions have none: whoever draws by another's differs
    everywhere."""
    params, prompt, length = SamplingParams(1, temperature=temperature, seed=11), 5, 25
    masks = {p: TokenMask.of(range(p % 3, VOCAB, 3)) for p in range(prompt, length) if p % 4}
    table, tokens = logits(40, 9), list(range(prompt))
    while len(tokens) < length:
        at = len(tokens)
        draw = TokenDraw(params, (), prompt, at).masked(masks.get(at))
        tokens.append(int(draw_tokens(table[at - 1 : at], [draw]).tokens_n[0]))
    known = KnownAnswer(params, tokens, prompt, masks)
    parts: list[RedrawnTokens] = []
    for start in range(0, length - 1, chunk):
        end = min(start + chunk, length - 1)
        parts += redraw(
            BatchRow(tokens[start:end], start, {}, replay=known), table[start:end], lambda x: x, 7, triton=False
        )
    assert sum(len(part.tokens_n) for part in parts) == length - prompt
    assert [found for part in parts for found in part.listed()] == []
