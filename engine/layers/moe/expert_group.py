"""Workers that share the experts of their model: attention is data-parallel, experts are spread.

Each *data-parallel rank* is a worker of its own, with requests, a scheduler, pages and everything else that a worker
has; but of each mixture it holds a share of the experts only. So a mixture is computed by all ranks of a *group*
together, in two exchanges a layer:

    rows        every rank gets all ranks' rows, with the experts that each row goes to
    outputs     every rank computes its own experts for all of these rows, and sends each output back to the row's rank

A row's rank weights the outputs and adds them up in the order of the experts' numbers, as one rank does that has all
experts. Products are exact by row, so a row has the bits of one rank whoever else is in the step. Nothing has a
capacity and no token is dropped: counts are exact, and a rank without rows sends none.

Exchanges need all ranks. So the group's steps are numbered and go in lockstep: a rank that is to compute a step tells
the others its number, and whoever has nothing to compute takes part without rows. When nobody computes, nobody is told
anything, and all ranks sleep. Each step begins with every rank's number of rows, and with whether it has drained: a
rank that has goes on to take part until all have, which all learn in the same step, the group's last.

Workers may have tensor-parallel ranks, which divide each expert. Then the first ranks of all workers are a group, the
second ones another, and so on, each with the same rows; a row's sum is that of one rank's parts, and the ranks of its
worker add them up as they do behind any other product. Followers take part in the steps that their leader does.

A rank that dies, or is silent for longer than a deadline, ends the others' exchanges with `PeerDead`: the group ends as
a whole, and starts as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from twinpool.contracts.errors import PeerDead
from twinpool.engine.layers.moe.experts import ExpertRoutes, RoutedExperts
from twinpool.engine.tensors.row_exact_linear import Numerics
from twinpool.engine.tensors.tensor_parallel import ExpertRanks


class StepLine(Protocol):
    """How ranks tell each other that a step has begun. Used from one thread; neither method waits."""

    def begin(self, number: int) -> None:
        """Tell the other ranks that step `number` has begun."""

    def begun(self) -> int:
        """The highest number that any rank has told, this one among them; 0: none has told any."""


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """The experts of one mixture that a rank holds: their numbers, and what computes them."""

    numbers: range
    compute: RoutedExperts


@dataclass(frozen=True, slots=True)
class SpreadStep:
    """One step of a group."""

    ranks: ExpertRanks
    rows: tuple[int, ...]
    """How many rows each rank has in it."""

    def sum(self, h_th: Tensor, routes: ExpertRoutes, held: HeldExperts, numerics: Numerics) -> Tensor:
        """Compute each row's weighted sum over its experts on all ranks, [T, hidden] float32, from this rank's rows
        [T, hidden] and their routes. All ranks call it, mixture by mixture."""
        experts_tk, turn = routes.experts_mk.sort(-1)
        rows_rh, experts_rk = self._rows_of_all(h_th, experts_tk)
        mine_rk = (experts_rk >= held.numbers.start) & (experts_rk < held.numbers.stop)
        pair_p = mine_rk.flatten().nonzero().squeeze(1)
        local_p1 = experts_rk.flatten().index_select(0, pair_p).unsqueeze(1) - held.numbers.start
        one_p1 = torch.ones_like(local_p1, dtype=torch.float32)
        row_ph = rows_rh.index_select(0, pair_p // experts_rk.shape[1])
        # With a weight of one, the sum over a pair's one expert is the output itself.
        out_ph = held.compute(row_ph, ExpertRoutes(local_p1, one_p1), numerics).to(h_th.dtype)

        # They come back by rank, of each in the order of this rank's rows and of the experts' numbers.
        rank_s = experts_tk.flatten() // len(held.numbers)
        order_s = rank_s.argsort(stable=True)
        back = [int(part.sum()) for part in torch.split(mine_rk, list(self.rows))]
        counts = torch.bincount(rank_s, minlength=self.ranks.size).tolist()
        down_sh = self.ranks.exchange(out_ph, back, counts)
        place_s = torch.empty_like(order_s).index_copy_(0, order_s, torch.arange(len(order_s), device=h_th.device))
        return held.compute.combined(down_sh, place_s.view_as(experts_tk), routes.weights_mk.gather(1, turn))

    def _rows_of_all(self, h_th: Tensor, experts_tk: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' rows [R, hidden], and the experts that each goes to, [R, k] int64, by rank."""
        raw = torch.cat((h_th.contiguous().view(torch.uint8), experts_tk.int().view(torch.uint8)), 1)
        size, width = self.ranks.size, h_th.shape[1] * h_th.element_size()
        raw = self.ranks.exchange(raw.repeat(size, 1), [len(h_th)] * size, self.rows)
        return raw[:, :width].contiguous().view(h_th.dtype), raw[:, width:].contiguous().view(torch.int32).long()


class Spread(Protocol):
    """A mixture whose experts are spread."""

    def serve(self, step: SpreadStep, like: Tensor, numerics: Numerics) -> None:
        """Compute the experts here for the rows of the other ranks. `like`: a tensor of the activations' dtype and
        device."""


class ExpertGroup:
    """One rank's place in its group. For one thread."""

    def __init__(self, ranks: ExpertRanks, line: StepLine) -> None:
        self.ranks, self._line = ranks, line
        self.number = 0
        """The group's step that this rank has begun last."""
        self.drained = False
        """Whether this rank needs no further step itself."""
        self._told_drained = False
        self.over = False
        """Whether all ranks have drained: there is no further step."""
        self.counters = {"dp_steps": 0.0, "dp_idle_steps": 0.0, "dp_idle_rows": 0.0}

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self.over = True
        self.ranks.close()

    @property
    def due(self) -> bool:
        """Whether there is a step to take part in: another rank has begun one, or this one has to tell that it has
        drained, or no longer has."""
        return not self.over and (self._line.begun() > self.number or self.drained is not self._told_drained)

    def begin(self, rows: int) -> SpreadStep:
        """Begin the group's next step with so many rows of this rank. Waits for all ranks to begin it. Raises
        `PeerDead` for one that doesn't, and when the group is over."""
        if self.over:
            raise PeerDead("the workers that it shares its experts with have left")
        self.number += 1
        if self._line.begun() < self.number:
            self._line.begin(self.number)
        told = self.ranks.gather(torch.tensor([rows, self.drained]))
        self._told_drained = self.drained
        counts = tuple(int(one[0]) for one in told)
        self.over = all(bool(one[1]) for one in told)
        self.counters["dp_steps"] += 1
        self.counters["dp_idle_steps"] += not rows
        self.counters["dp_idle_rows"] += max(counts) - rows
        return SpreadStep(self.ranks, counts)

    def take_part(self, mixtures: Sequence[Spread], like: Tensor, numerics: Numerics) -> None:
        """Take part in a step without rows of this rank's own. `mixtures`: those of a step, in its order; `like`: a
        tensor of the activations' dtype and device."""
        step = self.begin(0)
        for mixture in mixtures if any(step.rows) else ():
            mixture.serve(step, like, numerics)
