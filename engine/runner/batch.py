"""The input and output types of a step: rows with what to draw, and the outputs of those rows.

The host plans one step ahead of the device: it launches a step, and plans the next while that one runs. The token that
a row of the next step continues with is then still on the device, so the row names the place of the token
(`TokenFromStep`) rather than the token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from twinpool.cache.allocation import TableSlice
from twinpool.cache.device.device_port import Completion
from twinpool.contracts.block_hash import PICTURE_KEYS
from twinpool.contracts.messages.router_commands import Picture
from twinpool.contracts.sampling_params import DENSE, JUDGED, AdapterRef, SamplingParams, TokenDifference, TokenLogprob
from twinpool.engine.layers.picture_encoder import PlacedRows
from twinpool.engine.runner.device_rows import TokenHistory
from twinpool.engine.runner.sampling.logits_processors import TokenMask

NO_MASKS: Mapping[int, TokenMask] = {}


class TokenDraw(NamedTuple):
    """Draw the token after a row's last one. Penalties count `tokens[:prompt_len]` as prompt, the rest as output."""

    params: SamplingParams
    tokens: Sequence[int] | TokenHistory
    """All tokens of the request so far. Only penalties read them, so a draw without penalties may leave them out. A
    history is read on the device: its last token need not be known here."""
    prompt_len: int
    at: int | None = None
    """The absolute position of the drawn token; None: `len(tokens)`."""
    mask: TokenMask | None = None
    """The tokens that may be drawn; None: all."""

    def masked(self, mask: TokenMask | None) -> TokenDraw:
        """Return this draw of the tokens that both masks allow."""
        if mask is None:
            return self
        return self._replace(mask=mask if self.mask is None else self.mask & mask)

    def before(self, count: int) -> TokenDraw:
        """Return the draw of `count` positions earlier, which reads so many tokens fewer."""
        at = self.position - count
        tokens = self.tokens if isinstance(self.tokens, TokenHistory) else self.tokens[:at]
        return self._replace(tokens=tokens, at=at)

    @property
    def position(self) -> int:
        if self.at is not None:
            return self.at
        assert not isinstance(self.tokens, TokenHistory), "a draw by a history says its position"
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Draw again the tokens of a known answer that follow a row's tokens, and compare (an audit)."""

    params: SamplingParams
    tokens: Sequence[int]
    """The prompt, then the whole answer: the tokens to compare with; penalties read those before the drawn position."""
    prompt_len: int
    masks: Mapping[int, TokenMask] = field(default_factory=dict)
    """By absolute position, what else a draw may have drawn only."""

    def positions(self, start: int, count: int) -> range:
        """The absolute positions, of the answer alone, that a row of `count` tokens from `start` on draws again."""
        return range(max(self.prompt_len, start + 1), min(len(self.tokens), start + count + 1))


@dataclass(frozen=True, slots=True)
class TokenFromStep:
    """The one token that row `row` of a launched step draws, and that the host may not know yet."""

    step: StepHandle
    row: int

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class TurnedPlaces:
    """The pictures of a sequence whose positions are turned (by rope) by their row and column, as in Qwen's models.

    All positions of a picture count as one moment, its rows and columns from that moment on; the text goes on behind
    the longer of its sides. So a position behind pictures is turned by fewer than it has before it. All of it follows
    from the tokens and from how many positions a picture's rows have: whoever has a request can tell.
    """

    pictures: tuple[tuple[int, int, int], ...]
    """Of each, in order: its first position, how many it has, and how many of these a row has."""

    @staticmethod
    def of(tokens: Sequence[int], pictures: Sequence[Picture]) -> TurnedPlaces | None:
        """Those of a prompt with these pictures; None where none is turned so."""
        if not any(picture.across for picture in pictures):
            return None
        places = np.flatnonzero(np.asarray(tokens, dtype=np.int64) >= PICTURE_KEYS)
        counts = [picture.count for picture in pictures]
        firsts = [int(places[at]) for at in accumulate([0, *counts[:-1]])]
        return TurnedPlaces(tuple(zip(firsts, counts, [picture.across for picture in pictures], strict=True)))

    def at(self, start: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """By which moment, row and column the positions `start .. start+count-1` are turned, [3, count]."""
        positions = np.arange(start, start + count)
        turned = np.repeat(positions[None], 3, axis=0)
        less = 0
        for first, many, across in self.pictures:
            if first >= start + count:
                break
            moment = first - less
            inside = (positions >= first) & (positions < first + many)
            row, column = np.divmod(positions[inside] - first, across)
            turned[:, inside] = moment + np.stack((np.zeros_like(row), row, column))
            less += many - max(many // across, across)
            behind = positions >= first + many
            turned[:, behind] = positions[behind] - less
        return turned


@dataclass(slots=True)
class PromptPooling:
    """How one prompt's vector is made, while its chunks are computed one after the other, each once and from the first.
    Whoever computes the prompt from its beginning again begins with another."""

    way: str
    """One of `POOLINGS`, `JUDGED` or `CLASSES`."""
    length: int
    """Tokens of the prompt."""
    dense: bool = False
    """Whether its vector goes through the checkpoint's `Dense` modules."""
    tokens: Sequence[int] = ()
    """The tokens whose logits are its vector, where it is judged."""
    taken: int = 0
    """Its first positions, that have been pooled."""
    kept_h: Tensor | None = None
    """Of these positions, on the device. Of a mean: the sum of their hidden states, [hidden] int64, in units of
    `launched_step.UNIT`. Of ``cls``: the first one's, [hidden] float32."""
    most: Tensor | None = None
    """Of a mean: the largest magnitude in the sum, [] float32 on the device; NaN where one is none."""

    @classmethod
    def of(cls, sampling: SamplingParams, length: int) -> PromptPooling | None:
        """The pooling that a prompt of so many tokens is asked for; None: it isn't asked for any."""
        way, dense, _ = sampling.pooling.partition(DENSE)
        return cls(way, length, bool(dense), sampling.allowed_token_ids if way == JUDGED else ()) if way else None


class BatchRow(NamedTuple):
    """One sequence's part of a step: compute `tokens` at positions `start .. start+len(tokens)`.

    A decode row has one token, and behind it the tokens that were drafted for it.
    """

    tokens: Sequence[int] | TokenFromStep
    start: int
    tables: Mapping[str, TableSlice]
    """The pages and slots of each pool, which must reach the last of these positions: their state is written there, and
    that of all earlier positions that the pool's layers see is read from there. The step compares the epochs that they
    were leased under with the pool's own; where one differs, the page was freed since: the row is flagged `stale` and
    writes nothing."""
    draw: TokenDraw | None = None
    """None: draw nothing, as in the middle of a prompt."""
    score: Sequence[int] | None = None
    """The token that really follows each of `tokens`, to be given its log-probability (prompt log-probs)."""
    score_top: int = 0
    """How many of the best tokens are listed at each scored position."""
    replay: KnownAnswer | None = None
    """The known answer that the row's tokens belong to, to be drawn again."""
    adapter: AdapterRef | None = None
    """The adapter that the sequence is computed with, which is in memory; None: the model alone."""
    drafted: int = 0
    """How many of the row's last tokens are drafts, guesses of what will be drawn there. Each is drawn as well, so a
    row with drafts draws `1 + drafted` tokens; those behind the first draft that wasn't drawn are worth nothing."""
    pictures: Sequence[PlacedRows] = ()
    """What stands at some of its places, where `tokens` has placeholders."""
    turned: TurnedPlaces | None = None
    """Where pictures before its end, or at any later place, turn its positions; None: there are none that do."""
    pooling: PromptPooling | None = None
    """How the vector of its prompt is made; None: none is asked for."""
    routed: bool = False
    """Whether its log-probabilities come with the experts that its tokens go to."""

    @property
    def draws(self) -> list[TokenDraw]:
        """The draws of the row, by position: one behind each of its last `1 + drafted` tokens; none in the middle of a
        prompt."""
        if self.draw is None:
            return []
        return [*(self.draw.before(count) for count in range(self.drafted, 0, -1)), self.draw]


def turned_positions(
    rows: Sequence[BatchRow], positions: np.ndarray[Any, np.dtype[np.int64]], count: int
) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """By which moment, row and column a step's tokens at `positions`, and padding behind them, are turned: [3, count];
    None where no row has pictures that turn it."""
    if all(row.turned is None for row in rows):
        return None
    turned = np.zeros((3, count), dtype=np.int64)
    turned[:, : len(positions)] = positions
    first = 0
    for row in rows:
        if row.turned is not None:
            turned[:, first : first + len(row.tokens)] = row.turned.at(row.start, len(row.tokens))
        first += len(row.tokens)
    return turned


class DraftRow(NamedTuple):
    """A sequence for which the draft layer is to propose tokens."""

    token: int
    """Its latest token, whose state no step has computed yet."""
    start: int
    """The position of that token."""
    tables: Mapping[str, TableSlice]
    """As in `BatchRow`; they reach `most` positions from `start` on, where the draft layer writes its keys and values,
    and the next step writes over them."""
    most: int
    """Tokens to propose, 1 or more."""
    draw: TokenDraw
    """The draw of the token behind the latest one, without what hangs on the tokens before: proposals are drawn as the
    tokens will be, so that what is drawn at random is often the same."""


class DrawnToken(NamedTuple):
    """A drawn token, with its log-probabilities when the client asked for them."""

    token: int
    logprob: TokenLogprob | None


NONFINITE = "the logits of a step are no finite numbers, so no token can be drawn from them"
"""The error message that a request ends with when its row was `nonfinite`."""


class RowOutput(NamedTuple):
    """The results of one row. Nothing of a stale row's output may be used."""

    drawn: DrawnToken | None = None
    """The token drawn behind the row's last token, or in place of the first draft that wasn't drawn."""
    scores: tuple[TokenLogprob, ...] = ()
    replayed: int = 0
    """How many tokens of a known answer were drawn again."""
    differences: tuple[TokenDifference, ...] = ()
    """The positions at which the token drawn again differs from the known answer."""
    stale: bool = False
    """Whether a page or slot of the row's tables was freed after it was leased."""
    nonfinite: bool = False
    """Whether logits that the row needed were not finite: nothing was drawn, and its state can't be trusted either."""
    accepted: tuple[DrawnToken, ...] = ()
    """The drafts that were drawn, too, in order: they come before `drawn`."""
    embedding: tuple[float, ...] = ()
    """Of a row that ends a prompt, the vector that `BatchRow.pooling` asks for, float32s; empty for others."""


class StepHandle(Protocol):
    """A launched step."""

    @property
    def completion(self) -> Completion:
        """The completion of the step: all its pages are written and its results computed."""

    @property
    def done(self) -> bool: ...

    def outputs(self) -> list[RowOutput]:
        """Return one output a row, in order; waits for the device. Raises what the step raised."""
