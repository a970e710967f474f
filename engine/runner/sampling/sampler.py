"""Counter-based sampling: a token is a function of its logits and of (seed, choice, absolute position).

There is no generator whose state could be lost: the three numbers are hashed into one uniform number, and the token is
the one at which the cumulative distribution, in order of token ids, passes that number. So a request can be taken over
by any worker at any position, and repeats of a request draw the same tokens in any batch.

The distribution is shaped in this order: logit bias; repetition penalty (prompt and output); presence and frequency
penalties (output); the mask of allowed tokens; suppression of stop tokens before `min_tokens`; temperature; then min-p,
top-k and top-p, each over the tokens that the cut before it kept, as in vLLM (docs/decisions/0025). Top-k and top-p cut
by value: tokens equal to the last one kept are kept too, so no result depends on how a sort breaks ties. Probabilities
are in float64, where rounding practically never moves a draw across a boundary.

Logits with a NaN or plus infinity, or with nothing finite left, are damage and no distribution. Such a row is flagged
(`DrawnRows.nonfinite_n`), and its token is 0 and means nothing: the worker must not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinpool.cache.device.device_copies import to_device, to_host
from twinpool.contracts.sampling_params import SamplingParams, TokenLogprob
from twinpool.engine.runner.batch import DrawnToken, TokenDraw
from twinpool.engine.runner.device_rows import TokenHistory, rectangle
from twinpool.engine.runner.sampling.logits_processors import apply_masks, needs_history, penalise

ReadHistories = Callable[[Sequence[int]], Tensor]
_MASK = (1 << 64) - 1
_TOP_P_CANDIDATES = 1024
"""Best tokens among which the nucleus is looked for before a whole row is sorted."""


def uniform(seed: int, choice: int, position: int) -> float:
    """The uniform number in [0, 1) of a position: three rounds of splitmix64 (Steele, Lea, Flood 2014), 53 bits."""
    state = 0
    for number in (seed, choice, position):
        state = _mix((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of n rows: of one given token each, and of the `tops[i]` best tokens of row i."""

    tokens_n: Tensor
    """[n] int64: the given tokens."""
    own_n: Tensor
    """[n] float32: their log-probabilities."""
    ids_nk: Tensor | None
    """[n, k] int64: the best tokens, best first, the lowest id on ties; k is the largest of `tops`, None if k is 0."""
    values_nk: Tensor | None
    """[n, k] float32: the log-probabilities of `ids_nk`."""
    tops: Sequence[int]
    nonfinite_n: Tensor
    """[n] bool: rows whose logits are not finite, so that their log-probabilities mean nothing."""

    def to_host(self) -> Logprobs:
        """Start a copy to the host; it may be read once everything launched so far is complete."""
        ids_nk = to_host(self.ids_nk) if self.ids_nk is not None else None
        values_nk = to_host(self.values_nk) if self.values_nk is not None else None
        own_n, nonfinite_n = to_host(self.own_n), to_host(self.nonfinite_n)
        return Logprobs(to_host(self.tokens_n), own_n, ids_nk, values_nk, self.tops, nonfinite_n)

    def listed(self) -> list[TokenLogprob]:
        """List the log-probabilities row by row; waits for tensors that are on a device."""
        tokens, own = self.tokens_n.tolist(), self.own_n.tolist()
        if self.ids_nk is None or self.values_nk is None:
            return [TokenLogprob(token, value) for token, value in zip(tokens, own, strict=True)]
        ids, values = self.ids_nk.tolist(), self.values_nk.tolist()
        return [
            TokenLogprob(token, value, tuple(zip(row_ids[:top], row_values[:top], strict=True)))
            for token, value, top, row_values, row_ids in zip(tokens, own, self.tops, values, ids, strict=True)
        ]


@dataclass(frozen=True)
class DrawnRows:
    """The tokens drawn for n rows, and the log-probabilities of the rows that asked for them."""

    tokens_n: Tensor
    """[n] int64; 0 where a row is `nonfinite`, since a step in flight needs a valid id to go on from."""
    scored: Sequence[int]
    """The rows that asked for log-probabilities, in the order of `logprobs`."""
    logprobs: Logprobs | None
    nonfinite_n: Tensor
    """[n] bool: rows for which nothing could be drawn."""

    def to_host(self) -> DrawnRows:
        """Start a copy to the host; it may be read once everything launched so far is complete."""
        logprobs = self.logprobs.to_host() if self.logprobs is not None else None
        return DrawnRows(to_host(self.tokens_n), self.scored, logprobs, to_host(self.nonfinite_n))

    def listed(self) -> list[DrawnToken | None]:
        """List the tokens row by row, None where nothing could be drawn; waits for tensors that are on a device."""
        known = dict(zip(self.scored, self.logprobs.listed(), strict=True)) if self.logprobs is not None else {}
        rows = zip(self.tokens_n.tolist(), self.nonfinite_n.tolist(), strict=True)
        return [None if nonfinite else DrawnToken(token, known.get(i)) for i, (token, nonfinite) in enumerate(rows)]


def draw_tokens(
    logits_nv: Tensor, draws: Sequence[TokenDraw], *, triton: bool = False, histories: ReadHistories | None = None
) -> DrawnRows:
    """Draw one token for each row of `logits_nv` ([n, vocab] float32, not changed); `triton`: by Triton's kernel.
    `histories`: as for `shape_all`."""
    others = [i for i, draw in enumerate(draws) if not draw.params.greedy or _shapes(draw)]
    if len(others) == len(draws):
        tokens_n = _draw_shaped(logits_nv.clone(), draws, triton, histories)
        nonfinite_n = nonfinite_rows(logits_nv)
    else:
        tokens_n = logits_nv.argmax(-1)
        nonfinite_n = _nonfinite_at(logits_nv, tokens_n)
        if others:
            others_k = to_device(others, logits_nv.device)
            chosen = [draws[i] for i in others]
            read = (lambda some: histories([others[i] for i in some])) if histories is not None else None
            drawn_k = _draw_shaped(logits_nv.index_select(0, others_k), chosen, triton, read)
            tokens_n.index_copy_(0, others_k, drawn_k)
    # The draw returns -1 for a row whose every token was masked, or whose weights are NaN.
    nonfinite_n = nonfinite_n | (tokens_n < 0)
    tokens_n = tokens_n.masked_fill(nonfinite_n, 0)
    scored = [i for i, draw in enumerate(draws) if draw.params.logprobs is not None]
    if not scored:
        return DrawnRows(tokens_n, (), None, nonfinite_n)
    tops = [draws[i].params.logprobs or 0 for i in scored]
    scored_k = to_device(scored, logits_nv.device)
    logprobs = token_logprobs(logits_nv.index_select(0, scored_k), tokens_n.index_select(0, scored_k), tops)
    return DrawnRows(tokens_n, scored, logprobs, nonfinite_n)


def nonfinite_rows(logits_nv: Tensor) -> Tensor:
    """Flag rows with a NaN or plus infinity, or with nothing finite: [n] bool. (A maximum is NaN if any element is.)"""
    return logits_nv.amax(-1).isfinite().logical_not_()


def _nonfinite_at(logits_nv: Tensor, best_n: Tensor) -> Tensor:
    """`nonfinite_rows` by each row's `argmax`, which is at a NaN where there is one: reads one logit a row."""
    return logits_nv.gather(1, best_n.unsqueeze(1)).squeeze(1).isfinite().logical_not_()


def token_logprobs(logits_nv: Tensor, tokens_n: Tensor, tops: Sequence[int]) -> Logprobs:
    """Compute the log-probabilities of one given token a row ([n] int64), and of the `tops[i]` best tokens of row i."""
    logp_nv = torch.log_softmax(logits_nv, dim=-1)
    own_n = logp_nv.gather(1, tokens_n.unsqueeze(1)).squeeze(1)
    nonfinite_n = nonfinite_rows(logits_nv)
    most = min(max(tops), logp_nv.shape[1])
    if not most:
        return Logprobs(tokens_n, own_n, None, None, tops, nonfinite_n)
    # One key of value and id, smallest for the best: log-probabilities are never positive, so the bits of their
    # magnitude order them. The choice of topk alone among equal values is undefined, and differs with its count.
    magnitude_nv = logp_nv.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
    keys_nv = magnitude_nv.bitwise_left_shift_(32).add_(torch.arange(logp_nv.shape[1], device=logp_nv.device))
    ids_nk = keys_nv.topk(most, dim=-1, largest=False).values.bitwise_and_(0xFFFFFFFF)
    return Logprobs(tokens_n, own_n, ids_nk, logp_nv.gather(1, ids_nk), tops, nonfinite_n)


def _shapes(draw: TokenDraw) -> bool:
    """Whether the logits of this draw are changed before temperature."""
    p = draw.params
    return bool(p.logit_bias or draw.mask is not None or (p.min_tokens and _too_early(draw)) or needs_history(p))


def _too_early(draw: TokenDraw) -> bool:
    """Whether stop tokens are still suppressed."""
    return bool(draw.params.stop_token_ids) and draw.position - draw.prompt_len < draw.params.min_tokens


def _draw_shaped(
    logits_nv: Tensor, draws: Sequence[TokenDraw], triton: bool, histories: ReadHistories | None
) -> Tensor:
    """Draw for rows that need more than an argmax: [n] int64, -1 where nothing can be drawn. `logits_nv` is changed."""
    shape_all(logits_nv, draws, histories)
    tokens_n = logits_nv.argmax(-1)
    tokens_n = tokens_n.masked_fill_(_nonfinite_at(logits_nv, tokens_n), -1)
    sampled = [i for i, draw in enumerate(draws) if not draw.params.greedy]
    if sampled:
        params = [draws[i].params for i in sampled]
        uniforms = [uniform(p.seed, p.choice, draws[i].position) for i, p in zip(sampled, params, strict=True)]
        sampled_k = to_device(sampled, logits_nv.device)
        rows_nv = logits_nv.index_select(0, sampled_k)
        if triton:
            from twinpool.engine.runner.sampling import triton_draw as triton_rows

            drawn_k = triton_rows.sample(rows_nv, params, uniforms)
        else:
            drawn_k = _sample(rows_nv, params, uniforms)
        tokens_n.index_copy_(0, sampled_k, drawn_k)
    return tokens_n


def shape_all(logits_nv: Tensor, draws: Sequence[TokenDraw], histories: ReadHistories | None = None) -> None:
    """Apply bias, penalties, mask and suppression of each row's draw to its logits, in place.

    `histories` reads the tokens of draws by a `TokenHistory`: given their numbers among `draws`, [k, most] int64.
    """
    for row, draw in zip(logits_nv, draws, strict=True):
        _bias(row, draw.params)
    rows = [i for i, draw in enumerate(draws) if needs_history(draw.params)]
    here = [i for i in rows if isinstance(draws[i].tokens, TokenHistory)]
    if here:
        assert histories is not None, "who draws by histories can read them"
        _penalise(logits_nv, draws, here, histories)
    if known := [i for i in rows if draws[i].tokens and not isinstance(draws[i].tokens, TokenHistory)]:
        _penalise(logits_nv, draws, known, lambda some: rectangle([_listed(draws[i]) for i in some], logits_nv.device))
    masks = {i: mask for i, draw in enumerate(draws) if (mask := draw.mask) is not None}
    if masks:
        apply_masks(logits_nv, list(masks), list(masks.values()))
    for row, draw in zip(logits_nv, draws, strict=True):
        if _too_early(draw):
            _hold_open(row, draw)


def _penalise(logits_nv: Tensor, draws: Sequence[TokenDraw], rows: Sequence[int], histories: ReadHistories) -> None:
    chosen = [draws[i] for i in rows]
    penalise(
        logits_nv,
        rows,
        [draw.params for draw in chosen],
        [draw.prompt_len for draw in chosen],
        [draw.position if isinstance(draw.tokens, TokenHistory) else len(draw.tokens) for draw in chosen],
        lambda group: histories([rows[i] for i in group]),
    )


def _listed(draw: TokenDraw) -> Sequence[int]:
    assert not isinstance(draw.tokens, TokenHistory)
    return draw.tokens


def _bias(row_v: Tensor, params: SamplingParams) -> None:
    """Add the bias to one row of logits, in place."""
    if params.logit_bias:
        ids, values = zip(*params.logit_bias, strict=True)
        row_v[to_device(ids, row_v.device)] += to_device(values, row_v.device, torch.float32)


def _hold_open(row_v: Tensor, draw: TokenDraw) -> None:
    """Suppress the stop tokens in one row of logits, in place, unless its mask allows nothing else."""
    stops = to_device(draw.params.stop_token_ids, row_v.device)
    if draw.mask is None:
        row_v.index_fill_(0, stops, -torch.inf)
    else:
        others_v = row_v.index_fill(0, stops, -torch.inf)
        row_v.copy_(torch.where(others_v.amax() == -torch.inf, row_v, others_v))


def _sample(logits_nv: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> Tensor:
    """Draw one token a row by temperature, the cuts and the inverse of the cumulative distribution: [n] int64, -1 for a
    row that is no distribution. A row's token doesn't depend on the other rows."""
    p_nv = weights(logits_nv, params)
    cdf_nv = p_nv.cumsum(-1)
    targets = to_device(uniforms, p_nv.device, torch.float64).unsqueeze(1) * cdf_nv[:, -1:]
    # The first id whose cumulative sum exceeds the target; such an id has a weight above 0, so it was kept.
    drawn = torch.searchsorted(cdf_nv, targets, right=True).squeeze(1)
    last = (p_nv.shape[1] - 1) - (p_nv > 0).flip(-1).to(torch.uint8).argmax(-1)
    # The largest weight of a distribution is 1; a NaN or a 0 there fails this comparison.
    return torch.minimum(drawn, last).masked_fill_((p_nv.amax(-1) >= 1.0).logical_not_(), -1)


def weights(logits_nv: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Compute the weight of each id in a draw, 1 for the likeliest and 0 for ids that are cut: [n, vocab] float64."""
    device, vocab = logits_nv.device, logits_nv.shape[1]
    temperature_n = to_device([p.temperature for p in params], device, torch.float64)
    x_nv = logits_nv.double()
    # Differences are divided, none of them positive: the smallest temperature makes them minus infinity at most, where
    # the logits themselves would all become infinite.
    x_nv.sub_(x_nv.amax(-1, keepdim=True)).div_(temperature_n.unsqueeze(1))
    p_nv = x_nv.exp()
    if any(p.min_p > 0.0 for p in params):
        # The largest is exp(0) = 1, so min-p, a share of the largest, is a bound as it stands.
        shares = to_device([p.min_p for p in params], device, torch.float64)
        p_nv.masked_fill_(p_nv < shares.unsqueeze(1), 0.0)
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
    if limited:
        ks = [params[i].top_k for i in limited]
        limited_k = to_device(limited, device)
        rows = x_nv.index_select(0, limited_k)
        floors = rows.topk(max(ks), dim=-1).values.gather(1, to_device(ks, device).unsqueeze(1) - 1)
        p_nv.index_copy_(0, limited_k, p_nv.index_select(0, limited_k).masked_fill_(rows < floors, 0.0))
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if nucleus:
        limits = to_device([params[i].top_p for i in nucleus], device, torch.float64)
        nucleus_k = to_device(nucleus, device)
        rows = p_nv.index_select(0, nucleus_k)
        p_nv.index_copy_(0, nucleus_k, rows.masked_fill_(rows < _nucleus_floors(rows, limits), 0.0))
    return p_nv


def _nucleus_floors(p_nv: Tensor, limits_n: Tensor) -> Tensor:
    """The smallest weight in each row's nucleus, [n, 1]: the fewest best tokens whose share reaches the limit.

    Most distributions reach it within a few candidates, so a CPU makes a whole sort only for the rows that don't. The
    host of a GPU would have to wait to know which these are.
    """
    needed_n1 = (limits_n * p_nv.sum(-1)).unsqueeze(1)
    if not p_nv.is_cpu:
        return _floors(p_nv.sort(dim=-1, descending=True).values, needed_n1)
    count = min(_TOP_P_CANDIDATES, p_nv.shape[1])
    best = p_nv.topk(count, dim=-1).values
    floors = _floors(best, needed_n1)
    short = (best.sum(-1) < needed_n1.squeeze(1)).nonzero().flatten()
    if len(short) and count < p_nv.shape[1]:
        floors[short] = _floors(p_nv[short].sort(dim=-1, descending=True).values, needed_n1[short])
    return floors


def _floors(best_nk: Tensor, needed_n1: Tensor) -> Tensor:
    before_nk = best_nk.cumsum(-1) - best_nk
    inside = (before_nk < needed_n1).sum(-1, keepdim=True).clamp_(min=1)
    return best_nk.gather(1, inside - 1)
