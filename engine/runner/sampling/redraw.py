"""Drawing a known answer again: at which positions the token differs, and how far off its logits are.

The draw of a position depends on its logits and on (seed, choice, position) alone. So an answer can be checked without
its history: compute the state of its tokens in chunks, as a prompt's, draw at every position, compare. Where numbers
are exact a difference proves that the answer was drawn from another state than its own.

Where numbers aren't exact (`numerics: fast`), a difference may be rounding. The *gap* tells rounding from damage: the
least amount by which every logit would have to be off for the answer's token to be drawn.

- Greedy: two logits meet when each moves by half of their difference.
- Sampled: a draw u falls on a token where its share of the cumulative distribution, lo .. hi, holds u. Moving every
  logit by at most e, temperature 1, moves the log-odds of any cumulative share by at most 2 e. So the gap is half of
  the distance from u to lo .. hi in log-odds, times the temperature.
- With top-k, top-p or min-p, the gap of a token that was cut is half of the distance to the last token kept. A token
  that was kept has a gap of 0: its share depends on which tokens were cut as well, and that changes in jumps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from twinpool.cache.device.device_copies import to_device, to_host
from twinpool.contracts.sampling_params import SamplingParams, TokenDifference
from twinpool.engine.runner.batch import BatchRow, TokenDraw
from twinpool.engine.runner.sampling.logits_processors import TokenMask, needs_history
from twinpool.engine.runner.sampling.sampler import draw_tokens, shape_all, uniform, weights


@dataclass(frozen=True)
class RedrawnTokens:
    """The tokens drawn again at n neighbouring positions of an answer, beside the answer's own."""

    first: int
    """Absolute position of the first token."""
    tokens_n: Tensor
    """[n] int64: tokens drawn again."""
    known_n: Tensor
    """[n] int64: tokens of the answer."""
    gaps_n: Tensor
    """[n] float64: the gaps; 0 where both tokens are the same."""
    nonfinite_n: Tensor
    """[n] bool: positions whose logits are not finite, so that nothing could be drawn."""

    def to_host(self) -> RedrawnTokens:
        """Start a copy to the host; it may be read once everything launched so far is complete."""
        gaps_n, nonfinite_n = to_host(self.gaps_n), to_host(self.nonfinite_n)
        return RedrawnTokens(self.first, to_host(self.tokens_n), to_host(self.known_n), gaps_n, nonfinite_n)

    def listed(self) -> list[TokenDifference]:
        """List the positions at which both differ; waits for tensors that are on a device."""
        lists = zip(self.tokens_n.tolist(), self.known_n.tolist(), self.gaps_n.tolist(), strict=True)
        return [
            TokenDifference(self.first + i, drawn, gap) for i, (drawn, known, gap) in enumerate(lists) if drawn != known
        ]


def redraw(
    row: BatchRow, x_th: Tensor, logits: Callable[[Tensor], Tensor], max_rows: int, *, triton: bool
) -> Iterator[RedrawnTokens]:
    """Draw the known answer `row.replay` again; yields nothing where there is none.

    `x_th` is the last layer's output for the row's tokens, [t, hidden]. `logits` makes [n, vocab] float32 of some of
    its rows, at most `max_rows` at a time. `triton`: as for `draw_tokens`.
    """
    known = row.replay
    if known is None:
        return
    params, mask = replace(known.params, logprobs=None), TokenMask.allowed(known.params.allowed_token_ids)
    wanted = known.positions(row.start, len(row.tokens))
    for at in range(wanted.start, wanted.stop, max(1, max_rows)):
        positions = range(at, min(at + max(1, max_rows), wanted.stop))
        history = needs_history(params)
        draws = [
            TokenDraw(params, known.tokens[:p] if history else (), known.prompt_len, p, mask).masked(known.masks.get(p))
            for p in positions
        ]
        known_n = to_device(known.tokens[positions.start : positions.stop], x_th.device)
        logits_nv = logits(x_th[positions.start - 1 - row.start : positions.stop - 1 - row.start])
        again = draw_tokens(logits_nv, draws, triton=triton)
        gaps_n = _gaps_where_differing(logits_nv, draws, again.tokens_n, known_n)
        yield RedrawnTokens(at, again.tokens_n, known_n, gaps_n, again.nonfinite_n)


def _gaps_where_differing(logits_nv: Tensor, draws: Sequence[TokenDraw], tokens_n: Tensor, known_n: Tensor) -> Tensor:
    """The gaps, 0 where tokens agree. On a device all rows are computed, so that the host needn't wait for it."""
    out_n = torch.zeros(len(draws), dtype=torch.float64, device=logits_nv.device)
    rows = (tokens_n != known_n).nonzero().flatten().tolist() if tokens_n.is_cpu else list(range(len(draws)))
    if rows:
        rows_k = to_device(rows, logits_nv.device)
        chosen = [draws[i] for i in rows]
        gaps_k = gaps(logits_nv.index_select(0, rows_k), chosen, known_n.index_select(0, rows_k))
        out_n.index_copy_(0, rows_k, gaps_k)
    return out_n.masked_fill_(tokens_n == known_n, 0.0)


def gaps(logits_nv: Tensor, draws: Sequence[TokenDraw], known_n: Tensor) -> Tensor:
    """Compute by how much every logit of a row would have to be off for `known_n` ([n] int64) to be drawn: [n] float64.

    The module's docstring has the rules. All draws must have the same parameters, as draws of one request have.
    `logits_nv` ([n, vocab] float32) is changed.
    """
    shape_all(logits_nv, draws)
    params = draws[0].params
    known_n1 = known_n.unsqueeze(1)
    mine_n = logits_nv.gather(1, known_n1).squeeze(1).double()
    if params.greedy:
        return (logits_nv.amax(-1).double() - mine_n) / 2
    p_nv = weights(logits_nv, [params] * len(draws))
    share_n1 = p_nv.gather(1, known_n1)
    if _cuts(params, logits_nv.shape[1]):
        floor_n = logits_nv.double().masked_fill(p_nv == 0, torch.inf).amin(-1)
        return torch.where(share_n1.squeeze(1) > 0, 0.0, (floor_n - mine_n).clamp(min=0) / 2)
    cdf_nv = p_nv.cumsum(-1)
    high_n1 = cdf_nv.gather(1, known_n1)
    total_n1 = cdf_nv[:, -1:]
    drawn_n1 = [[uniform(params.seed, params.choice, draw.position)] for draw in draws]
    draws_n1 = to_device(drawn_n1, logits_nv.device, torch.float64)
    low_n1 = (high_n1 - share_n1).clamp(min=0) / total_n1
    low, high, drawn = (torch.logit(x, eps=1e-300) for x in (low_n1, high_n1 / total_n1, draws_n1))
    return (torch.maximum(low - drawn, drawn - high).clamp(min=0) * params.temperature / 2).squeeze(1)


def _cuts(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1.0 or params.min_p > 0.0
