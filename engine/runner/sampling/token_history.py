"""Token histories: the tokens that penalties count, kept on the compute device from step to step.

Penalties read all tokens of a request, of which the last may be drawn by a step that is still under way. So a request
with penalties has its tokens in a row on the device (`engine.runner.device_rows`): the host enters what it knows, and
each step the token that it goes on from, and its drafts behind it. Nothing is ever counted up: a token stands at its
position, so a step that is computed again, whose result is dropped or whose drafts are rejected, leaves nothing behind
that the next one would have to take back.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twinpool.cache.allocation import DeviceRow
from twinpool.cache.memory.pinned_memory import HostIntegers, upload
from twinpool.engine.runner.device_rows import DeviceRows, RowUpdate


class TokenHistory:
    """The tokens of one request: the host's own list, which grows, and a row on the device.

    Its steps are launched one position after the other, from any token that the host knows.
    """

    __slots__ = ("__weakref__", "launched", "row", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.row: DeviceRow | None = None
        self.launched = 0
        """The position behind the last one that a launched step enters, drafts left out."""


class EnteredTokens(NamedTuple):
    """The tokens that a step enters into a history: the one that it goes on from, and drafts."""

    history: TokenHistory
    start: int
    """Absolute position of the first."""
    at: int
    """Where the first is among the step's tokens."""
    length: int


@dataclass(frozen=True, slots=True)
class PlannedHistories:
    """The histories that a planned step reads, and what the device lacks of them."""

    sequences: list[int]
    """The sequences of the step that they are of."""
    rows: list[int]
    lengths: list[int]
    """Tokens of each, the entered ones included."""
    entered: list[EnteredTokens]
    updates: Sequence[RowUpdate]


class DeviceTokenHistories:
    """The token histories of one worker's requests on its device; see the module's prose.

    `plan` is for the host, when a step is launched; the others are for the step's operation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = DeviceRows(device, 1)

    def plan(self, entered: Mapping[int, EnteredTokens]) -> PlannedHistories:
        """Find each history's row, and collect what the device lacks of it. `entered` is by the step's sequences."""
        rows, lengths = [], []
        updates: list[RowUpdate] = []
        for history, start, _, length in entered.values():
            row = history.row
            if row is None:
                row = history.row = self._rows.take(history)
            stop = min(len(history.tokens), start + 1)
            assert start <= max(stop, history.launched), "a token between is known to nobody"
            # Entered by steps that were launched before, or known by now: then the host's word is written over it.
            if row.copied < stop:
                updates.append(RowUpdate(row, row.copied, (array("i", history.tokens[row.copied : stop]),)))
                row.copied = stop
            history.launched = start + 1
            rows.append(row.number)
            lengths.append(start + length)
        return PlannedHistories(list(entered), rows, lengths, list(entered.values()), updates)

    def undo(self, planned: PlannedHistories) -> None:
        """Take back the plan of a step that was not launched."""
        self._rows.undo(planned.updates)

    def update(self, planned: PlannedHistories, tokens_m: Tensor) -> None:
        """Bring the rows up to date with a planned step, whose tokens are `tokens_m` ([M] int64)."""
        self._rows.enter(planned.updates)
        self._rows.reach(1 + max(planned.rows), max(planned.lengths))
        places = [
            (row, start + n, at + n)
            for row, (_, start, at, length) in zip(planned.rows, planned.entered, strict=True)
            for n in range(length)
        ]
        rows, positions, at = np.array(places, dtype=np.int64).T.copy()
        row_n, position_n, at_n = upload((rows, positions, at), self._device)
        (tokens_rp,) = self._rows.tensors
        tokens_rp.index_put_((row_n, position_n), tokens_m.index_select(0, at_n).int())

    def read(self, planned: PlannedHistories, sequences: Sequence[int]) -> Tensor:
        """The tokens of some of the step's sequences: [n, most] int64. What is behind a history's end is anything."""
        where = {sequence: place for place, sequence in enumerate(planned.sequences)}
        places = [where[sequence] for sequence in sequences]
        rows = [planned.rows[place] for place in places]
        (rows_n,) = upload((np.array(rows, dtype=np.int64),), self._device)
        return self._rows.chosen(0, rows, rows_n, max(planned.lengths[place] for place in places)).long()


def rectangle(histories: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Tokens that the host knows, padded with 0: [n, most] int64."""
    full: HostIntegers = np.zeros((len(histories), max(map(len, histories))), dtype=np.int64)
    for line, tokens in zip(full, histories, strict=True):
        line[: len(tokens)] = tokens
    (tokens_nl,) = upload((full,), device)
    return tokens_nl
