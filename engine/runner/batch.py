"""What goes into a step and what comes out: the engine's whole vocabulary.

The host plans one step ahead of the device: it launches a step, and plans the next while that one runs. What a row
of the next step continues with is then still on the device, so it says where (`TokenFromStep`) rather than what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cache.allocation.block_table import BlockTable
from cache.device.device_port import Completion
from contracts.sampling_params import SamplingParams, TokenDifference, TokenLogprob


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """Draw the token after a row's last one. Penalties see `tokens[:prompt_len]` as prompt, the rest as output."""

    params: SamplingParams
    tokens: Sequence[int]
    """All tokens of the request so far. Only penalties look at them, so for others they may be left out."""
    prompt_len: int
    at: int | None = None
    """The absolute position of the drawn token; None: `len(tokens)`."""

    @property
    def position(self) -> int:
        return len(self.tokens) if self.at is None else self.at


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Draw again what followed each of a row's tokens in an answer that is known, and compare."""

    params: SamplingParams
    tokens: Sequence[int]
    """The prompt, then the whole answer: what is compared with, and what penalties see the beginning of."""
    prompt_len: int

    def positions(self, start: int, count: int) -> range:
        """Absolute positions that a row of `count` tokens from `start` on draws: those of the answer alone."""
        return range(max(self.prompt_len, start + 1), min(len(self.tokens), start + count + 1))


@dataclass(frozen=True, slots=True)
class TokenFromStep:
    """The one token that row `row` of a launched step draws: the host may not know it yet."""

    step: StepHandle
    row: int

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence's part of a step: compute `tokens` at positions `start .. start+len(tokens)`.

    Their state is written to `pages` (a block table from position 0 on, long enough for the last of them), and all
    earlier positions are read from there. Decode is a row of one token.
    """

    tokens: Sequence[int] | TokenFromStep
    start: int
    pages: Sequence[int]
    draw: TokenDraw | None = None
    """None in the middle of a prompt."""
    score: Sequence[int] | None = None
    """The tokens that really follow each of `tokens`: their log-probabilities are wanted (prompt log-probs)."""
    score_top: int = 0
    epochs: Sequence[int] = field(kw_only=True)
    """The epoch of each of `pages` when it was leased. The step compares them with the pool's own; where they differ,
    the page has been given away: the row is flagged `stale` and writes nothing."""
    replay: KnownAnswer | None = field(default=None, kw_only=True)
    """An answer that the row's tokens are of, to be drawn again."""
    others: Mapping[str, BlockTable] = field(default_factory=dict, kw_only=True)
    """The tables of pools other than the full one: windows and recurrent states."""


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A drawn token, with its log-probabilities when the client asked for them."""

    token: int
    logprob: TokenLogprob | None


NONFINITE = "the logits of a step are no finite numbers, so no token can be drawn from them"
"""What a request whose step was `nonfinite` ends with."""


@dataclass(frozen=True, slots=True)
class RowOutput:
    """What came of a row. Of a stale one nothing may be used."""

    drawn: DrawnToken | None = None
    scores: tuple[TokenLogprob, ...] = ()
    replayed: int = 0
    """Tokens of a known answer that were drawn again."""
    differences: tuple[TokenDifference, ...] = ()
    """Those of them that came out otherwise."""
    stale: bool = False
    nonfinite: bool = False
    """Logits that it needed were no numbers: nothing of them was drawn, and its state can't be trusted either."""


class StepHandle(Protocol):
    """A launched step."""

    @property
    def completion(self) -> Completion:
        """When its pages are written."""

    @property
    def done(self) -> bool: ...

    def outputs(self) -> list[RowOutput]:
        """One a row, in order; waits for the device. Raises what the step raised."""
