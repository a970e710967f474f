"""What goes into a step and what comes out: the engine's whole vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.sampling import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class Draw:
    """Draw the token after a row's last one. Penalties see `tokens[:prompt_len]` as prompt, the rest as output."""

    params: SamplingParams
    tokens: Sequence[int]
    """All tokens of the request so far; the draw is for absolute position `len(tokens)`."""
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: compute `tokens` at positions `start .. start+len(tokens)`.

    Their state is written to `pages` (a block table from position 0 on, long enough for the last of them), and all
    earlier positions are read from there. Decode is a row of one token.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    draw: Draw | None = None
    """None in the middle of a prompt."""
    score: Sequence[int] | None = None
    """The tokens that really follow each of `tokens`: their log-probabilities are wanted (prompt log-probs)."""
    score_top: int = 0
    epochs: Sequence[int] = field(kw_only=True)
    """The epoch of each of `pages` when it was leased. The step compares them with the pool's own; where they differ,
    the page has been given away: the row is flagged `stale` and writes nothing."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token, with its log-probabilities when the client asked for them."""

    token: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What came of a row. Of a stale one nothing may be used."""

    drawn: Drawn | None = None
    scores: tuple[TokenLogprob, ...] = ()
    stale: bool = False
