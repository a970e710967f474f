"""A launched step, and what it leaves on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cache.device.device_port import DONE, Completion
from engine.runner.batch import BatchRow, RowOutput
from engine.runner.redraw import RedrawnTokens
from engine.runner.sampler import DrawnRows, Logprobs
from engine.tensors.pinned_memory import to_device


@dataclass(frozen=True)
class StepResults:
    """A step's results: on their way to the host, and readable once the step is complete."""

    drawing: Sequence[int]
    """Rows that drew."""
    tokens_n: Tensor | None
    """What they drew, [n] int64 on the device: the next step begins with it."""
    draws: DrawnRows | None
    scores: Sequence[Sequence[Logprobs]]
    """Of each row, in runs of its tokens."""
    replays: Sequence[Sequence[RedrawnTokens]]
    """Of each row, the parts of a known answer that were drawn again."""
    stale_b: Tensor
    """[B] bool: rows whose pages had been given away."""

    def damaged(self, row: int) -> bool:
        """Whether logits by which tokens of this row were scored or drawn again are no numbers; once complete."""
        flags = [part.nonfinite_n for part in self.scores[row]] + [part.nonfinite_n for part in self.replays[row]]
        return any(bool(flag_n.any()) for flag_n in flags)


class LaunchedStep:
    """Implements `engine.runner.batch.Step`; the engine fills it in when the device comes to it."""

    def __init__(self, rows: Sequence[BatchRow]) -> None:
        self.completion: Completion = DONE
        self._rows = len(rows)
        self._computed: StepResults | None = None

    @property
    def done(self) -> bool:
        return self.completion.done

    def fill(self, computed: StepResults) -> None:
        self._computed = computed

    def tokens(self, rows: Sequence[int]) -> Tensor:
        """The tokens that `rows` drew, [n] int64 on the device; for a later operation of the same stream."""
        assert self._computed is not None, "a later step of the same stream runs later"
        tokens_n, drawing = self._computed.tokens_n, self._computed.drawing
        assert tokens_n is not None, "the rows draw"
        if list(rows) == list(drawing):
            return tokens_n
        at = {row: i for i, row in enumerate(drawing)}
        return tokens_n.index_select(0, to_device([at[row] for row in rows], tokens_n.device))

    def outputs(self) -> list[RowOutput]:
        """One a row, in order; waits for the device. Raises what the step raised."""
        self.completion.wait()
        computed = self._computed
        assert computed is not None, "a complete step has been computed"
        draws = computed.draws.listed() if computed.draws is not None else []
        drawn = dict(zip(computed.drawing, draws, strict=True))
        nonfinite = [(row in drawn and drawn[row] is None) or computed.damaged(row) for row in range(self._rows)]
        return [
            RowOutput(
                drawn.get(row),
                tuple(score for part in computed.scores[row] for score in part.listed()),
                sum(len(part.tokens_n) for part in computed.replays[row]),
                tuple(found for part in computed.replays[row] for found in part.listed()),
                stale,
                nonfinite[row],
            )
            for row, stale in enumerate(computed.stale_b.tolist())
        ]


def input_tokens(rows: Sequence[BatchRow], padding: int, device: torch.device) -> Tensor:
    """The tokens of a step, packed and padded with zeros: [M] int64, those of earlier steps taken where they lie."""
    known: list[int] = []
    pending: dict[LaunchedStep, tuple[list[int], list[int]]] = {}
    for row in rows:
        source = row.tokens
        if isinstance(source, Sequence):
            known += source
        else:
            assert isinstance(source.step, LaunchedStep)
            places, drawn = pending.setdefault(source.step, ([], []))
            places.append(len(known))
            drawn.append(source.row)
            known.append(0)
    tokens_m = to_device(known + [0] * padding, device)
    for step, (places, drawn) in pending.items():
        tokens_m.index_copy_(0, to_device(places, device), step.tokens(drawn))
    return tokens_m
