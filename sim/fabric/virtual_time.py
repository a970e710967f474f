"""Virtual time, and the processes that live in it.

The clock stands still while code runs; a queue holds the events that are due. A stopped process (SIGSTOP, a swapped-out
machine, a long pause of its runtime) does nothing; messages that arrive meanwhile wait in its sockets. A dead process
does nothing ever again, and messages that arrive are lost.

What production runs on asyncio runs there on a loop whose clock this is (`VirtualLoop`).

What steps take, where that is modelled: seconds by what they compute, and many like steps in one closed form.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from math import sqrt
from typing import TypeVarTuple

from twinpool.contracts.errors import ConfigError

Ts = TypeVarTuple("Ts")


@dataclass(slots=True)
class TimerEntry:
    """An event that will run, unless it is cancelled."""

    run: Callable[[], None] | None

    def cancel(self) -> None:
        self.run = None


class VirtualTime:
    """Implements `contracts.clock.Clock`. Events that are due at the same time run in the order of their entry."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, TimerEntry]] = []
        self._entered = 0

    def now(self) -> float:
        return self._now

    def after(self, delay_s: float, run: Callable[[], None]) -> TimerEntry:
        """Call `run` in `delay_s` seconds; a negative delay counts as 0."""
        entry = TimerEntry(run)
        self._entered += 1
        heapq.heappush(self._heap, (self._now + max(0.0, delay_s), self._entered, entry))
        return entry

    def next(self) -> bool:
        """Advance to the next event and run it; False when there is none."""
        while self._heap:
            at, _, entry = heapq.heappop(self._heap)
            if entry.run is not None:
                self._now = at
                run, entry.run = entry.run, None
                run()
                return True
        return False


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: each of its turns is an event."""

    def __init__(self, agenda: VirtualTime, failed: Callable[[str], None]) -> None:
        """`failed`: is told of exceptions that nobody takes."""
        super().__init__()
        self._agenda = agenda
        self.set_exception_handler(lambda loop, context: failed(f"{context['message']}: {context.get('exception')!r}"))

    def time(self) -> float:
        return self._agenda.now()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._agenda.after(0.0, self._turn)
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._agenda.after(when - self._agenda.now(), self._turn)
        return super().call_at(when, callback, *args, context=context)

    def run(self, work: Callable[[], object]) -> None:
        """Do `work` as a callback of the loop, now."""
        if self.is_running():
            work()
        else:
            self.call_soon(work)
            self._turn()

    def end(self) -> None:
        """Cancel what is under way, and close."""
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self._turn()
        self.close()

    def _turn(self) -> None:
        if not self.is_closed():
            self.stop()
            self.run_forever()


class SimProcess:
    """One process on one node."""

    def __init__(self, agenda: VirtualTime, label: str, node: str, pid: int) -> None:
        self.label, self.node, self.pid = label, node, pid
        self.name = label.partition("#")[0]
        """Its label without the incarnation."""
        self.alive = True
        self.stopped = False
        self.computes_until = 0.0
        """When the step under way is over: what the process sends before leaves it then."""
        self._agenda = agenda
        self._deferred: list[Callable[[], None]] = []
        self._on_death: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return self.label

    def do(self, run: Callable[[], None]) -> None:
        """Run a function in the process: now, or when it goes on if it is stopped, or never if it is dead."""
        if not self.alive:
            return
        if self.stopped:
            self._deferred.append(run)
        else:
            run()

    def later(self, delay_s: float, run: Callable[[], None]) -> TimerEntry:
        """`do` after `delay_s` seconds."""
        return self._agenda.after(delay_s, lambda: self.do(run))

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        if not self.stopped:
            return
        self.stopped = False
        deferred, self._deferred = self._deferred, []
        for at, run in enumerate(deferred):
            if self.stopped:
                self._deferred += deferred[at:]
                return
            self.do(run)

    def become(self, label: str) -> None:
        """Go on as another incarnation of its worker."""
        self.label = label

    def on_death(self, run: Callable[[], None]) -> None:
        """Call `run` as soon as the process dies, as the system tells watchers."""
        self._on_death.append(run)

    def die(self) -> None:
        """End the process, and call the listeners of `on_death`. Idempotent."""
        if not self.alive:
            return
        self.alive = False
        self._deferred.clear()
        listeners, self._on_death = self._on_death, []
        for listener in listeners:
            listener()


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of steps and of what lies between two workers. The defaults are assumed: about a large model on four
    cards."""

    prefill_base_s: float = 0.02
    """Of a step with a chunk, beside its tokens."""
    prefill_token_s: float = 0.0002
    """Of each token of a chunk."""
    prefill_pair_s: float = 0.0
    """Of each pair of a chunk's token and a position that it attends to."""
    decode_base_s: float = 0.02
    """Of a decode step, beside its rows."""
    decode_row_s: float = 0.0002
    """Of each row."""
    decode_context_s: float = 5e-8
    """Of each position that a row attends to."""
    draft_rows: int = 0
    """Rows up to which decode makes drafts (`decode.draft_requests`); 0: it makes none."""
    draft_gain: float = 1.0
    """What a token of so few rows takes, as a part of what the step takes: steps with drafts bring several."""
    handover_base_s: float = 0.002
    """From the end of a prompt's last chunk until decode has its pages, beside its tokens."""
    handover_token_s: float = 1e-7
    """Of each token of the prompt."""
    load_token_s: float = 1e-6
    """Of each token that is copied between host memory and device."""
    message_s: float = 0.0005
    """Of a message from one process to another."""
    event_s: float = 0.02
    """From a change of a worker's cache until the index of KV events has it."""
    start_s: float = 30.0
    """From the start of a worker until it registers."""
    role_change_s: float = 2.0
    """From the end of a worker that changes its role until it registers in the other: its process goes on, and keeps
    the weights."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for seconds below 0, and for steps that take none."""
        for name in self.__slots__:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"the cost {name} must be 0 seconds or more, got {getattr(self, name)}")
        if not (self.prefill_base_s and self.decode_base_s):
            raise ConfigError("prefill_base_s and decode_base_s must be above 0: a step takes time")
        if not 0 < self.draft_gain <= 1:
            raise ConfigError(f"draft_gain is a part of a step, above 0 and at most 1; got {self.draft_gain}")

    def prefill_s(self, tokens: int, pairs: float) -> float:
        """Seconds of a step that computes `tokens` of prompts, which attend to `pairs` positions in all."""
        return self.prefill_base_s + self.prefill_token_s * tokens + self.prefill_pair_s * pairs

    def decode_s(self, rows: int, context: int) -> float:
        """Seconds of a step of `rows` rows, which attend to `context` positions in all."""
        return self._drafted(rows) * (self.decode_base_s + self.decode_row_s * rows + self.decode_context_s * context)

    def decode_growth_s(self, rows: int) -> float:
        """Seconds by which a step of `rows` rows takes longer than the one before it."""
        return self._drafted(rows) * self.decode_context_s * rows

    def _drafted(self, rows: int) -> float:
        return self.draft_gain if rows <= self.draft_rows else 1.0

    def handover_s(self, tokens: int) -> float:
        return self.handover_base_s + self.handover_token_s * tokens


def pairs_of(start: int, tokens: int) -> float:
    """Positions that `tokens` tokens from position `start` on attend to, one by one, themselves among them."""
    return tokens * (start + (tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class StepRun:
    """Steps one after the other of which each takes `more_s` longer than the one before."""

    first_s: float
    more_s: float = 0.0

    def seconds(self, steps: int) -> float:
        return steps * (self.first_s + self.more_s * (steps - 1) / 2)

    def steps(self, seconds: float) -> int:
        """How many steps are over after `seconds`; one whose end is a billionth of a step away counts as over."""
        if self.more_s <= 0:
            return int(seconds / self.first_s + 1e-9)
        half = self.first_s - self.more_s / 2
        return int((sqrt(half * half + 2 * self.more_s * max(0.0, seconds)) - half) / self.more_s + 1e-9)
