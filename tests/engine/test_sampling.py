"""Sampling: what is drawn follows the distribution that was asked for, and nothing but the request's own numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.engine.runner.batch import DrawnToken, TokenDraw
from twinpool.engine.runner.device_rows import TokenHistory
from twinpool.engine.runner.sampling import logits_processors
from twinpool.engine.runner.sampling import sampler as sampling
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.runner.sampling.sampler import uniform

VOCAB = 50
PLAIN = SamplingParams(max_tokens=100)


def draw_tokens(logits: Tensor, draws: Sequence[TokenDraw]) -> list[DrawnToken]:
    drawn = [one for one in sampling.draw_tokens(logits, draws).listed() if one is not None]
    assert len(drawn) == len(draws), "finite logits are drawn from"
    return drawn


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    return sampling.token_logprobs(logits, torch.tensor(tokens), tops).listed()


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def listed(draw: TokenDraw) -> Sequence[int]:
    assert not isinstance(draw.tokens, TokenHistory)
    return draw.tokens


def may_be_drawn(mask: TokenMask) -> set[int]:
    """Read a mask bit by bit."""
    words = [int(word) & 0xFFFFFFFF for word in mask.words]
    return {32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1}


def reference(logits: list[float], draw: TokenDraw) -> int:
    """The same draw in plain Python, token by token."""
    p, x = draw.params, list(logits)
    tokens = list(listed(draw))
    output = tokens[draw.prompt_len :]
    for token, bias in p.logit_bias:
        x[token] += bias
    for token in set(tokens):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= p.presence_penalty + p.frequency_penalty * count
    allowed = set(range(VOCAB)) if draw.mask is None else may_be_drawn(draw.mask)
    if len(output) < p.min_tokens and (draw.mask is None or allowed - set(p.stop_token_ids)):
        allowed -= set(p.stop_token_ids)
    x = [value if token in allowed else -math.inf for token, value in enumerate(x)]
    if p.greedy:
        return x.index(max(x))
    x = [value / p.temperature for value in x]
    best = max(x)
    x = [value if math.exp(value - best) >= p.min_p else -math.inf for value in x]
    if p.top_k > 0:
        floor = sorted(x, reverse=True)[min(p.top_k, len(x)) - 1]
        x = [value if value >= floor else -math.inf for value in x]
    weights = [math.exp(value - best) for value in x]
    total, mass, floor = sum(weights), 0.0, 0.0
    for weight in sorted(weights, reverse=True):
        if mass < p.top_p * total:
            floor = weight
        mass += weight
    weights = [w if w >= floor or p.top_p >= 1 else 0.0 for w in weights]
    target = uniform(p.seed, p.choice, len(tokens)) * sum(weights)
    mass = 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > target:
            return token
    raise AssertionError("the target lies past the end")


def random_draw(rng: random.Random) -> TokenDraw:
    tokens = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))]
    params = SamplingParams(
        max_tokens=100,
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7]),
        top_p=rng.choice([1.0, 0.95, 0.5, 0.05]),
        top_k=rng.choice([0, -1, 1, 5, 49, 50, 1000]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.7, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        logit_bias=((3, 2.5), (7, -100.0)) if rng.random() < 0.3 else (),
        seed=rng.randrange(1 << 64),
        choice=rng.randrange(4),
        min_tokens=rng.choice([0, 10]),
        stop_token_ids=(1, 2, 40) if rng.random() < 0.5 else (),
        logprobs=rng.choice([None, 0, 3]),
    )
    mask = rng.choice([None, None, range(VOCAB), [1, 2, 40], [2], rng.sample(range(VOCAB), 9), [0, 31, 32, 49]])
    prompt = rng.randrange(1, len(tokens) + 1)
    return TokenDraw(params, tuple(tokens), prompt, mask=None if mask is None else TokenMask.of(mask))


@pytest.mark.parametrize("elements", [None, 4 * VOCAB])
def test_every_combination_draws_what_a_plain_reference_draws(
    elements: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties and masks of all rows at once, and of a few at a time."""
    if elements is not None:
        monkeypatch.setattr(logits_processors, "_ELEMENTS", elements)
    rng = random.Random(0)
    draws = [random_draw(rng) for _ in range(400)]
    logits = random_logits(400)
    before = logits.clone()
    got = [drawn.token for drawn in draw_tokens(logits, draws)]
    assert got == [reference(row, draw) for row, draw in zip(logits.double().tolist(), draws, strict=True)]
    assert torch.equal(logits, before), "logits belong to the caller"


def test_a_mask_is_the_words_that_structured_output_engines_make() -> None:
    assert TokenMask.of([0, 5, 31, 33]).words.tolist() == [1 + 32 - 2**31, 2]
    both = TokenMask.of(range(0, 100, 2)) & TokenMask.of(range(0, 70, 3))
    assert may_be_drawn(both) == set(range(0, 70, 6))
    assert TokenMask.allowed(()) is None
    plain = TokenDraw(PLAIN, (1,), 1)
    assert plain.masked(None) is plain
    assert plain.masked(both).mask is both
    narrowed = plain.masked(both).masked(TokenMask.of([12, 13])).mask
    assert narrowed is not None
    assert may_be_drawn(narrowed) == {12}


def test_a_mask_wider_than_the_vocabulary_is_cut_and_hides_no_damage() -> None:
    logits = random_logits(3)
    mask = TokenMask.of([7, 300])
    draws = [TokenDraw(replace(PLAIN, temperature=0.0, seed=i), (1,), 1, mask=mask) for i in range(3)]
    assert [d.token for d in draw_tokens(logits, draws)] == [7, 7, 7]
    logits[0, 9], logits[1, 7], logits[2] = math.nan, math.inf, -math.inf
    assert sampling.draw_tokens(logits, draws).listed() == [None, None, None]
    beyond = TokenDraw(PLAIN, (1,), 1, mask=TokenMask.of([VOCAB, 300]))
    assert sampling.draw_tokens(random_logits(1), [beyond]).listed() == [None], "nothing may be drawn"


def test_a_rows_draw_and_log_probabilities_do_not_depend_on_the_batch() -> None:
    rng = random.Random(1)
    draws = [random_draw(rng) for _ in range(60)]
    logits = random_logits(60, 1).bfloat16().float()  # with ties
    whole = draw_tokens(logits, draws)
    assert whole == [draw_tokens(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    for _ in range(5):
        part = rng.sample(range(60), 17)
        assert draw_tokens(logits[part], [draws[i] for i in part]) == [whole[i] for i in part]


def test_frequencies_follow_the_distribution() -> None:
    count = 20000
    logits = random_logits(1, 2, 8) / 2
    draws = [TokenDraw(replace(PLAIN, seed=seed), (1, 2, 3), 3) for seed in range(count)]
    seen = Counter(drawn.token for drawn in draw_tokens(logits.expand(count, -1), draws))
    expected = (logits[0].double().softmax(-1) * count).tolist()
    chi2 = sum((seen[token] - want) ** 2 / want for token, want in enumerate(expected))
    assert chi2 < 24.3, "p < 0.001 for 7 degrees of freedom"


def test_the_draws_of_positions_choices_and_seeds_are_uniform_and_unrelated() -> None:
    streams = {
        "positions": [uniform(1, 0, p) for p in range(4000)],
        "seeds": [uniform(s, 0, 9) for s in range(4000)],
        "choices": [uniform(7, c, 9) for c in range(4000)],
    }
    for name, values in streams.items():
        assert sum(values) / 4000 == pytest.approx(0.5, abs=0.02), name
        assert all(0 <= v < 1 for v in values)
        pairs = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(values)) / 3999 * 12
        assert abs(pairs) < 0.06, name
    assert len({uniform(s, c, p) for s in range(9) for c in range(9) for p in range(9)}) == 729


def test_the_draw_is_pinned_so_that_every_version_of_a_worker_agrees() -> None:
    assert uniform(0, 0, 0) == pytest.approx(PINNED[0], abs=0)
    assert uniform(1 << 63, 1, 2000) == pytest.approx(PINNED[1], abs=0)


PINNED = (0.13870941014555427, 0.05072319871794839)


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [9, 30]] = 5.0
    logits[2, 49] = 1.0
    draws = [TokenDraw(replace(PLAIN, temperature=0.0), (0,), 1)] * 3
    assert [d.token for d in draw_tokens(logits, draws)] == [0, 9, 49]


def test_min_tokens_holds_back_stop_tokens_and_only_until_then() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 10.0
    params = replace(PLAIN, temperature=0.0, min_tokens=3, stop_token_ids=(4,))
    for emitted in range(5):
        (drawn,) = draw_tokens(logits, [TokenDraw(params, (9,) * (6 + emitted), 6)])
        assert (drawn.token == 4) is (emitted >= 3)


def test_log_probabilities_are_of_the_unmodified_distribution() -> None:
    logits = random_logits(1, 3)
    params = replace(PLAIN, temperature=0.2, logit_bias=((11, 100.0),), logprobs=5)
    (drawn,) = draw_tokens(logits, [TokenDraw(params, (1,), 1)])
    want = logits[0].log_softmax(-1)
    assert drawn.token == 11
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(float(want[11]), abs=1e-6)
    assert [token for token, _ in drawn.logprob.top] == want.topk(5).indices.tolist()
    (silent,) = draw_tokens(logits, [TokenDraw(replace(params, logprobs=None), (1,), 1)])
    assert silent.logprob is None


def test_top_log_probabilities_of_equal_tokens_are_the_lowest_ids_whatever_others_ask() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 20] = 1.0
    first, second = token_logprobs(logits, [0, 1], [3, 30])
    assert [token for token, _ in first.top] == [20, 0, 1]
    assert [token for token, _ in second.top] == [20, *[i for i in range(30) if i != 20][:29]]
    assert token_logprobs(logits[:1], [0], [3]) == [first]
    assert token_logprobs(logits[:1], [0], [1000])[0].top[-1][0] == VOCAB - 1


def test_a_nucleus_wider_than_the_candidates_is_found_too() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, :10] = 20.0
    draws = [TokenDraw(replace(PLAIN, top_p=0.9, seed=s), (1,), 1) for s in range(200)]
    flat = [d.token for d in draw_tokens(logits[:1].expand(200, -1), draws)]
    sharp = [d.token for d in draw_tokens(logits[1:].expand(200, -1), draws)]
    assert max(flat) > 1024
    assert max(sharp) < 10


def test_of_a_nucleus_wider_than_the_candidates_nothing_less_likely_is_drawn() -> None:
    """Every token is a little less likely than the one before it, so the nucleus ends at one of them."""
    logits = torch.linspace(0.0, -0.5, 5000)
    shares = torch.softmax(logits.double(), 0)
    last = int((shares.cumsum(0) < 0.5).sum())
    draws = [TokenDraw(replace(PLAIN, top_p=0.5, seed=s), (1,), 1) for s in range(400)]
    drawn = [d.token for d in draw_tokens(logits.expand(400, -1), draws)]
    assert 1024 < last - 200 < max(drawn) <= last


def test_temperatures_keep_all_digits_that_a_client_sends() -> None:
    logits, temperature = torch.tensor([[0.0, -7.25, -300.0]]), 0.1 + 1e-9
    (weight,) = sampling.weights(logits, [replace(PLAIN, temperature=temperature)]).tolist()
    assert weight == pytest.approx([math.exp(x / temperature) for x in (0.0, -7.25, -300.0)], rel=1e-12)


def kept(probabilities: Sequence[float], *, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What is left after min-p, then top-k, then top-p, each over what the one before left: in plain Python, from the
    words of vLLM's documentation."""
    left = dict(enumerate(probabilities))
    left = {t: p for t, p in left.items() if p >= min_p * max(left.values())}
    left = dict(sorted(left.items(), key=lambda item: -item[1])[: top_k or None])
    nucleus, mass, total = set[int](), 0.0, sum(left.values())
    for token, p in left.items():
        if mass / total >= top_p:
            break
        nucleus.add(token)
        mass += p
    return nucleus


def test_min_p_comes_before_top_p_so_the_nucleus_is_of_what_min_p_left() -> None:
    """Many unlikely tokens: they widen a nucleus that is cut first, and not one of what min-p has left."""
    probabilities = [0.30, 0.20, 0.05] + [0.45 / 90] * 90
    params = replace(PLAIN, top_p=0.9, min_p=0.1)
    weights = sampling.weights(torch.tensor([probabilities]).log(), [params])
    assert set(weights[0].nonzero().flatten().tolist()) == {0, 1} == kept(probabilities, top_k=0, top_p=0.9, min_p=0.1)


def test_the_cuts_together_keep_what_plain_python_keeps() -> None:
    rng = random.Random(4)
    for _ in range(60):
        logits = [rng.gauss(0, 2.5) for _ in range(40)]
        total = sum(map(math.exp, logits))
        limits: dict[str, Any] = {
            "top_k": rng.choice([0, 1, 3, 12]),
            "top_p": rng.choice([0.3, 0.8, 0.99]),
            "min_p": rng.choice([0.0, 0.02, 0.3]),
        }
        weights = sampling.weights(torch.tensor([logits], dtype=torch.float64), [replace(PLAIN, **limits)])
        assert set(weights[0].nonzero().flatten().tolist()) == kept([math.exp(x) / total for x in logits], **limits)


@pytest.mark.parametrize("temperature", [1e-5, 1e-300, 1e-307, 1e-308, 5e-324])
def test_the_smallest_temperatures_draw_the_likeliest_token(temperature: float) -> None:
    logits = random_logits(8, 5) * 1e3
    for limits in ({}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.1}):
        params = replace(PLAIN, temperature=temperature, seed=3, **limits)
        drawn = draw_tokens(logits, [TokenDraw(params, (1,) * (i + 1), 1) for i in range(8)])
        assert [one.token for one in drawn] == logits.argmax(-1).tolist()


NAN, INF = float("nan"), float("inf")
DAMAGE = {"one NaN": {5: NAN}, "plus infinity": {5: INF}, "nothing finite": dict.fromkeys(range(VOCAB), -INF)}
WAYS = {
    "greedy": replace(PLAIN, temperature=0.0),
    "sampled": PLAIN,
    "cut": replace(PLAIN, top_k=3, top_p=0.9, min_p=0.05),
    "penalised": replace(PLAIN, temperature=0.0, repetition_penalty=1.2),
    "scored": replace(PLAIN, logprobs=2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_logits_that_are_no_numbers_are_never_drawn_from(damage: str, way: str) -> None:
    """And the rows beside them draw what they draw anyway."""
    logits = random_logits(3, 6)
    sound = draw_tokens(logits, [TokenDraw(WAYS[way], (1, 2), 1)] * 3)
    for token, value in DAMAGE[damage].items():
        logits[1, token] = value
    draws = sampling.draw_tokens(logits, [TokenDraw(WAYS[way], (1, 2), 1)] * 3)
    assert draws.listed() == [sound[0], None, sound[2]]
    assert draws.nonfinite_n.tolist() == [False, True, False]
    assert 0 <= int(draws.tokens_n[1]) < VOCAB, (
        "a step that is launched already goes on from it: an id of the vocabulary"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_which_masks_leave_nothing_is_not_drawn_from(temperature: float) -> None:
    """Suppressed stop tokens: all that is finite here."""
    logits = torch.full((2, VOCAB), -INF)
    logits[:, [4, 9]] = 1.0
    params = replace(PLAIN, temperature=temperature, min_tokens=3, stop_token_ids=(4, 9))
    early, late = sampling.draw_tokens(logits, [TokenDraw(params, (1, 2), 1), TokenDraw(params, (1,) * 9, 1)]).listed()
    assert early is None
    assert late is not None
    assert late.token in (4, 9)


def test_one_finite_logit_is_a_distribution() -> None:
    logits = torch.full((2, VOCAB), -INF)
    logits[:, 7] = -3.0
    drawn = draw_tokens(
        logits, [TokenDraw(replace(PLAIN, temperature=t, top_k=5, top_p=0.5), (1,), 1) for t in (0.0, 1.0)]
    )
    assert [one.token for one in drawn] == [7, 7]


def test_a_penalty_that_asks_for_more_than_a_float_holds_is_the_clients_wish_and_no_damage() -> None:
    logits = random_logits(1, 8)
    seen = int(logits[0].argmax())
    for temperature in (0.0, 1.0):
        params = replace(PLAIN, temperature=temperature, repetition_penalty=1e-300)
        assert [one.token for one in draw_tokens(logits, [TokenDraw(params, (seen,), 1)])] == [seen]


def test_log_probabilities_of_logits_that_are_no_numbers_are_flagged() -> None:
    logits = random_logits(3, 9)
    logits[2, 11] = NAN
    for tops in ([0, 0, 0], [2, 2, 2]):
        assert sampling.token_logprobs(logits, torch.tensor([1, 2, 3]), tops).nonfinite_n.tolist() == [
            False,
            False,
            True,
        ]


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.9}, {"presence_penalty": 2.5}, {"frequency_penalty": 1.5}]
)
def test_each_penalty_counts_alone_where_no_row_has_another(penalty: dict[str, Any]) -> None:
    """Beside rows whose histories are longer, shorter, or all prompt."""
    rng = random.Random(3)
    params = replace(PLAIN, temperature=0.0, **penalty)
    draws = []
    for _ in range(60):
        tokens = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 200)))
        draws.append(TokenDraw(params, tokens, rng.randrange(1, len(tokens) + 1)))
    logits = random_logits(60, 4)
    want = [reference(row, draw) for row, draw in zip(logits.double().tolist(), draws, strict=True)]
    assert [drawn.token for drawn in draw_tokens(logits, draws)] == want
    assert [draw_tokens(logits[i : i + 1], [draw])[0].token for i, draw in enumerate(draws)] == want
    assert want != logits.argmax(-1).tolist(), "it changes some of them"


@pytest.mark.parametrize("penalty", [{"presence_penalty": 2.5}, {"frequency_penalty": 2.5}])
@pytest.mark.parametrize("begun", [0, 1])
def test_an_answer_that_goes_on_is_penalised_beside_one_that_begins_whichever_is_longer(
    begun: int, penalty: dict[str, Any]
) -> None:
    params = replace(PLAIN, temperature=0.0, **penalty)
    draws = [TokenDraw(params, (5,) * 12, 12), TokenDraw(params, (5,) * 12, 12)]
    draws[begun] = TokenDraw(params, (5, 6, 7, 7), 2)
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 9] = 2.0, 1.0
    found = [drawn.token for drawn in draw_tokens(logits, draws)]
    assert found[begun] == 9, "it has had 7, and the other one hasn't"
    assert found[1 - begun] == 7


@pytest.mark.parametrize(("vocab", "longest"), [(50, 400), (300, 40)])
def test_rows_with_penalties_are_looked_at_together_as_far_as_memory_allows(
    vocab: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of some rows, or their histories where these are longer; a single row always is."""
    most = 6 * max(vocab, longest)
    monkeypatch.setattr(logits_processors, "_ELEMENTS", most)
    rng = random.Random(5)
    lengths = [rng.randrange(1, longest) for _ in range(30)] + [longest, 9 * most]
    groups: list[list[int]] = []

    def read(some: Sequence[int]) -> Tensor:
        groups.append(list(some))
        return torch.zeros(len(some), max(lengths[i] for i in some), dtype=torch.int64)

    params = [replace(PLAIN, presence_penalty=1.0)] * len(lengths)
    logits_processors.penalise(torch.zeros(32, vocab), range(32), params, [0] * 32, lengths, read)
    assert sorted(itertools.chain(*groups)) == list(range(32))
    for group in groups:
        assert len(group) == 1 or len(group) * max(vocab, *(lengths[i] for i in group)) <= most
    assert len(groups) < 10
