"""A decode worker as a model: a continuous batch whose steps up to the next event are one jump.

A step brings a token for each row and takes `decode_base_s + decode_row_s * rows + decode_context_s * context`; the
context grows by a position a row, so steps without an event between them are an arithmetic series, of which both the
sum and how many fit into a time are closed forms (`sim.fabric.virtual_time.StepRun`). Events are: a request that joins
(at the end of the step under way), one whose last token is drawn, and pages that run out.

Pages are granted as production grants them (`decode/retraction/memory_pressure.py`): first come, first served, where
there is room for what all are expected to grow by, by production's own estimate of lengths; who leaves when there is
none is production's policy. Who was retracted comes back first, after a copy to the host and back.
"""

from __future__ import annotations

import heapq
from collections import deque
from math import inf

from twinpool.decode.retraction.memory_pressure import OutputLengths
from twinpool.decode.retraction.retraction_policy import RetractionCandidate, victims
from twinpool.sim.fabric.virtual_time import StepCosts, StepRun
from twinpool.sim.scale.cluster_plan import DecodePool
from twinpool.sim.scale.scale_figures import GapHistogram


class DecodeRow:
    """One request on its decode worker."""

    __slots__ = (
        "answer",
        "arrived",
        "begun",
        "came",
        "drawn",
        "finish",
        "first_at",
        "granted",
        "granted_at",
        "here_at",
        "most",
        "number",
        "prompt",
        "ready_at",
    )

    def __init__(self, number: int, prompt: int, answer: int, most: int, arrived: float) -> None:
        """`answer`: tokens that it will have, which nobody knows; `most`: those that it may have. It has one already
        when its prompt is here."""
        self.number, self.prompt, self.answer, self.most, self.arrived = number, prompt, answer, most, arrived
        self.granted = False
        self.ready_at = inf
        """When its prompt's state is here, or is back here."""
        self.first_at = 0.0
        """When its first token was drawn."""
        self.came = self.granted_at = self.here_at = 0.0
        """When it came to its worker, got pages, and had its prompt's state there."""
        self.drawn = 1
        """Tokens of the answer when it joined the batch last."""
        self.begun = self.finish = 0
        """The step before its first in the batch, and its last."""


class DecodeModel:
    """One decode worker. `due`: when something happens next, unless a request comes before."""

    def __init__(self, costs: StepCosts, pool: DecodePool, page_tokens: int, gaps: GapHistogram) -> None:
        """`gaps`: gets the seconds from each token to the next."""
        self._costs, self._pool, self._page, self._gaps = costs, pool, page_tokens, gaps
        self._lengths = OutputLengths(pool.output_length_quantile, pool.first_length)
        self._waiting: deque[DecodeRow] = deque()
        """Requests without pages."""
        self._retracted: list[DecodeRow] = []
        self._arriving: dict[int, DecodeRow] = {}
        """Requests with pages whose prompt isn't here."""
        self._joining: list[DecodeRow] = []
        """Requests that are in the next step."""
        self._fresh: list[DecodeRow] = []
        """Those of the batch that have drawn nothing in it yet."""
        self.came: list[DecodeRow] = []
        """Requests whose prompt has come since the caller took them from here."""
        self._batch: list[tuple[int, int, DecodeRow]] = []
        """A heap of rows, by their last step."""
        self._context = 0
        self._held = 0
        """Tokens of the pages that are granted; of the batch's growth, those that were drawn."""
        self.peak = 0
        """The most that it was."""
        self._at_most = 0
        """Tokens of all requests with pages, once they are as long as they may be."""
        self._since, self._run, self._steps = 0.0, StepRun(1.0), 0
        self._step = 0
        self.due = inf
        self.generated = self.retractions = self.steps = 0

    @property
    def running(self) -> int:
        return len(self._batch) + len(self._joining)

    def generated_by(self, now: float) -> int:
        """Tokens that were drawn by now, also of the steps under way."""
        if not self._batch or self.due == inf:
            return self.generated
        return self.generated + len(self._batch) * min(self._steps, self._run.steps(now - self._since))

    @property
    def ungranted(self) -> int:
        return len(self._waiting)

    @property
    def retracted(self) -> int:
        return len(self._retracted)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._retracted) + len(self._arriving)

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting)

    @property
    def free_tokens(self) -> int:
        return max(0, self._pool.device_tokens - self._held)

    # ------------------------------------------------------------ what comes

    def ask(self, row: DecodeRow, now: float) -> None:
        """Take a request, whose prompt comes once it has pages for it."""
        row.came = now
        self._waiting.append(row)
        self._grant(now)

    def ready(self, row: DecodeRow, now: float) -> None:
        """Take in that a request's prompt is computed, and comes over as soon as it has pages."""
        row.ready_at = now
        if row.granted:
            del self._arriving[row.number]
            self._join(row, now)

    def drop(self, row: DecodeRow) -> None:
        """Forget a request whose prompt won't come."""
        if row.granted:
            del self._arriving[row.number]
            self._free(row, 1)
        else:
            self._waiting.remove(row)

    def _join(self, row: DecodeRow, now: float) -> None:
        row.here_at = now
        self.came.append(row)
        self._joining.append(row)
        if self.due == inf:
            self._plan(now)
            return
        if self._batch and len(self._batch) < self._pool.max_rows:
            # The step under way is the last of this jump: it joins the next one.
            self._steps = max(1, min(self._steps, self._run.steps(now - self._since) + 1))
            self.due = self._since + self._run.seconds(self._steps)

    # ------------------------------------------------------------ steps

    def turn(self, now: float) -> list[DecodeRow]:
        """End the steps that are over at `due`, and begin the next; returns the rows that have drawn their last
        token."""
        self._advance()
        done: list[DecodeRow] = []
        batch = self._batch
        while batch and batch[0][0] <= self._step:
            row = heapq.heappop(batch)[2]
            self._context -= row.prompt + row.answer
            self._free(row, row.answer)
            self._lengths.ended(row.answer)
            done.append(row)
        if done or self._retracted:
            self._grant(now)
        self._plan(now)
        return done

    def _advance(self) -> None:
        """Count the steps that were made."""
        steps, rows = self._steps, len(self._batch)
        if not rows or not steps:
            return
        took = self._run.seconds(steps)
        tokens = rows * steps
        if self._fresh:
            first = self._since + self._run.first_s
            for row in self._fresh:
                self._gaps.add(first - row.first_at)
        if tokens > len(self._fresh):
            self._gaps.add(took / steps, tokens - len(self._fresh))
        self._fresh.clear()
        self._step += steps
        self.steps += steps
        self._context += tokens
        self._held += tokens
        self.peak = max(self.peak, self._held)
        self.generated += tokens

    def _plan(self, now: float) -> None:
        """Take in who joins, and begin the steps up to the next event."""
        batch, pool = self._batch, self._pool
        joining, self._joining = self._joining, []
        for row in joining:
            if row.ready_at > now or len(batch) >= pool.max_rows:
                self._joining.append(row)
                continue
            row.begun = self._step
            row.finish = self._step + row.answer - row.drawn
            heapq.heappush(batch, (row.finish, row.number, row))
            self._context += row.prompt + row.drawn
            self._fresh.append(row)
        rows = len(batch)
        back = min((row.ready_at for row in self._joining), default=inf)
        if not rows:
            self._steps, self.due = 0, back
            return
        while rows > 1 and self._held + rows > pool.device_tokens:
            self._retract(now)
            batch = self._batch
            rows = len(batch)
        most = max(1, (pool.device_tokens - self._held) // rows) if rows > 1 else batch[0][0] - self._step
        self._since, self._steps = now, min(batch[0][0] - self._step, most)
        self._run = StepRun(self._costs.decode_s(rows, self._context), self._costs.decode_growth_s(rows))
        if now < back < inf:
            self._steps = min(self._steps, self._run.steps(back - now) + 1)
        self.due = now + self._run.seconds(self._steps)

    def _generated(self, row: DecodeRow) -> int:
        """Tokens of the answer of a row of the batch."""
        return row.drawn + self._step - row.begun

    # ------------------------------------------------------------ pages

    def _pages(self, tokens: int) -> int:
        """Tokens of the pages that so many tokens take."""
        return -(-tokens // self._page) * self._page

    def _free(self, row: DecodeRow, generated: int) -> None:
        """Give back the pages of a row that has so many tokens."""
        self._held -= self._pages(row.prompt + 1) + generated - 1
        self._at_most -= self._pages(row.prompt + row.most)
        row.granted = False

    def _take(self, row: DecodeRow, generated: int) -> None:
        self._held += self._pages(row.prompt + 1) + generated - 1
        self.peak = max(self.peak, self._held)
        self._at_most += self._pages(row.prompt + row.most)
        row.granted = True

    def _grant(self, now: float) -> None:
        """Give pages to those that were retracted, then to those that wait, in order, as far as there is room."""
        while self._retracted and self._has_room(self._retracted[0]):
            row = self._retracted.pop(0)
            self._take(row, row.drawn)
            row.ready_at = now + self._costs.load_token_s * (row.prompt + row.drawn)
            self._joining.append(row)
        while self._waiting and not self._retracted and self._has_room(self._waiting[0]):
            row = self._waiting.popleft()
            row.granted_at = now
            self._take(row, 1)
            if row.ready_at > now:
                self._arriving[row.number] = row
            else:
                self._join(row, now)

    def _has_room(self, row: DecodeRow) -> bool:
        room, own = self._pool.device_tokens, self._pages(row.prompt + row.most)
        if self._at_most + own <= room or not self._at_most:
            return True
        expected, size = self._lengths.expected, self._pages
        wanted = size(row.prompt + max(row.drawn + 1, expected(row.drawn, row.most)))
        if self._held + wanted > room:
            return False
        to_come = sum(
            max(0, expected(got := self._generated(other), other.most) - got) for _, _, other in self._batch
        ) + sum(expected(other.drawn, other.most) - other.drawn for other in (*self._arriving.values(), *self._joining))
        return self._held + to_come + wanted <= room

    def _retract(self, now: float) -> None:
        """Take the request off the device that production's policy chooses."""
        candidates = [
            RetractionCandidate(row, 0, self._generated(row), row.prompt, row.arrived, self._pages(row.prompt))
            for _, _, row in self._batch
        ]
        (row,) = victims(candidates, 1)
        row.drawn = self._generated(row)
        self._batch = [one for one in self._batch if one[2] is not row]
        heapq.heapify(self._batch)
        if row in self._fresh:
            self._fresh.remove(row)
        self._context -= row.prompt + row.drawn
        self._free(row, row.drawn)
        self._lengths.retracted()
        self.retractions += 1
        row.first_at = now
        self._retracted.append(row)
        self._retracted.sort(key=lambda one: one.arrived)
