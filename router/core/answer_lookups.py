"""Questions to the decode workers about answers that a client has come back for. No I/O.

A question goes to every decode or colocated worker of the controller's table, to those that aren't linked yet as soon
as they are. It ends when all have answered, when all choices were found, or at its deadline; a worker that hasn't
answered by then counts as having nothing. What is handed over later is given up again (`Detach`). Attempts that a
router has lost sight of can leave several finds of one choice: all but the best are cancelled.

What another router has is contested: its worker is asked again, if the client still waits here (`wants`). The claim of
a router that has died meanwhile is never repeated, and so takes nothing from the one to which its client came.

A worker goes on at once with what it hands over. Its events are held until the request goes on here (`release`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from twinpool.contracts.clock import Clock
from twinpool.contracts.ids import RequestId, Role
from twinpool.contracts.messages.kept_answers import Attach, Attached, Detach, KeptAnswer
from twinpool.contracts.messages.router_commands import Cancel
from twinpool.contracts.messages.worker_events import Event
from twinpool.router.state.worker_table import GONE, WorkerKey, WorkerTable


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """What a worker has kept of one choice."""

    worker: WorkerKey
    answer: KeptAnswer
    last_attempt: int
    """The highest attempt that any worker has told of."""
    numerics: str
    """The worker's numerics class and weights: the answer goes on in it, whatever has become of the worker since."""
    weights: str = ""
    """The version of its weights."""
    weights_number: int = 0

    @property
    def worth(self) -> tuple[bool, bool, int]:
        """How much is won by going on with it."""
        return bool(self.answer.reason), self.answer.running and self.answer.started, len(self.answer.tokens)


@dataclass(frozen=True, slots=True)
class LookupEnded:
    """A question has its answer: what was found, by the number of the choice."""

    ask: RequestId
    found: Mapping[int, FoundAnswer]
    other_body: bool = False
    """Whether a worker has kept the answer to another body under this key."""


@dataclass(slots=True)
class _Ask:
    command: Attach
    choices: int
    deadline: float
    sent: set[WorkerKey] = field(default_factory=set)
    answered: set[WorkerKey] = field(default_factory=set)
    found: list[FoundAnswer] = field(default_factory=list)
    contested: dict[WorkerKey, int] = field(default_factory=dict)
    """By worker the newest claim of another router; the worker is to be asked again."""
    wanted: bool = True


class AnswerLookups:
    """The questions of one router; see the module's prose. Times are seconds of the router core's clock."""

    def __init__(self, clock: Clock, workers: WorkerTable, mint: Callable[[], str], wait_s: float) -> None:
        self._clock, self._workers, self._mint, self._wait_s = clock, workers, mint, wait_s
        self._asks: dict[RequestId, _Ask] = {}
        self.commands: list[tuple[WorkerKey, Attach | Cancel | Detach]] = []
        """Until they are taken, as the next ones."""
        self.ended: list[LookupEnded] = []
        self._held: dict[tuple[WorkerKey, RequestId], list[Event]] = {}
        """The events since then of what was handed over and goes on nowhere yet."""
        self._known = False
        """Whether the controller's table has come."""

    def __len__(self) -> int:
        return len(self._asks)

    def begin(self, key: str, body: str, choices: int) -> RequestId:
        """Ask for what is kept under `key` of `choices` choices; returns the question's name."""
        ask = RequestId(f"ask-{self._mint()}")
        self._asks[ask] = _Ask(Attach(ask, 0, key, body, seen=0), choices, self._clock.now() + self._wait_s)
        self._go_on()
        return ask

    def on_event(self, worker: WorkerKey, event: Attached) -> bool:
        """Take in an answer; returns False where it comes too late."""
        ask = self._asks.get(event.request_id)
        if ask is None or worker in ask.answered:
            self.give_up(worker, event.answers)
            return False
        if event.contested:
            ask.contested[worker] = event.contested
            self._go_on()
            return True
        ask.answered.add(worker)
        if event.other_body:
            self._end(event.request_id, ask, other_body=True)
        else:
            entry = self._workers.get(worker)
            of = entry.weights if entry is not None else ("", "", 0)
            ask.found += [FoundAnswer(worker, answer, answer.attempt, *of) for answer in event.answers]
            self._held.update({(worker, a.request_id): [] for a in event.answers if a.running})
            self._go_on()
        return True

    def wants(self, name: RequestId, wanted: bool) -> None:
        """Say whether a client waits for what a question finds. It goes on without one, for whoever comes next, but
        takes nothing from another router meanwhile."""
        ask = self._asks.get(name)
        if ask is not None:
            ask.wanted = wanted
            self._go_on()

    def give_up(self, worker: WorkerKey, answers: tuple[KeptAnswer, ...]) -> None:
        """Leave what a worker has handed over to itself: nobody waits for it."""
        for answer in answers:
            self.release(worker, answer.request_id)
            if answer.running:
                self.commands.append((worker, Detach(answer.request_id, answer.attempt)))

    def hold(self, worker: WorkerKey, event: Event) -> bool:
        """Hold an event of a request that was handed over and doesn't go on yet; returns whether it is of one."""
        held = self._held.get((worker, event.request_id))
        if held is not None:
            held.append(event)
        return held is not None

    def release(self, worker: WorkerKey, request_id: RequestId) -> list[Event]:
        """Hold no more events of a request; returns those that were held, in order. Idempotent."""
        return self._held.pop((worker, request_id), [])

    @property
    def held(self) -> int:
        """Requests whose events are held."""
        return len(self._held)

    def on_view(self) -> None:
        """The table of workers has changed."""
        self._known = True
        self._go_on()

    def on_linked(self) -> None:
        self._go_on()

    def lost(self, worker: WorkerKey) -> None:
        """A worker's link has ended, with all that it has handed over."""
        for key in [key for key in self._held if key[0] == worker]:
            del self._held[key]
        for ask in self._asks.values():
            ask.sent.discard(worker)
            ask.contested.pop(worker, None)
            ask.found = [found for found in ask.found if found.worker != worker]
            if worker in ask.answered:  # It would have to be asked again: it runs for nobody now.
                ask.answered.discard(worker)
        self._go_on()

    def tick(self) -> None:
        now = self._clock.now()
        for name, ask in list(self._asks.items()):
            if now >= ask.deadline:
                self._end(name, ask)

    def take_commands(self) -> list[tuple[WorkerKey, Attach | Cancel | Detach]]:
        commands, self.commands = self.commands, []
        return commands

    def take_ended(self) -> list[LookupEnded]:
        ended, self.ended = self.ended, []
        return ended

    def _go_on(self) -> None:
        if not self._asks:
            return
        asked = [
            e for e in self._workers if e.record.role in (Role.DECODE, Role.COLOCATED) and e.status.state not in GONE
        ]
        for name, ask in list(self._asks.items()):
            for entry in asked:
                if entry.linked and entry.key not in ask.sent:
                    ask.sent.add(entry.key)
                    self.commands.append((entry.key, ask.command))
            while ask.wanted and ask.contested:
                worker, claim = ask.contested.popitem()
                self.commands.append((worker, structs.replace(ask.command, seen=claim)))
            all_here = len({f.answer.index for f in ask.found if f.answer.reason or f.worth[1]}) >= ask.choices
            if all_here or (self._known and all(entry.key in ask.answered for entry in asked)):
                self._end(name, ask)

    def _end(self, name: RequestId, ask: _Ask, *, other_body: bool = False) -> None:
        del self._asks[name]
        best: dict[int, FoundAnswer] = {}
        for found in sorted(ask.found, key=lambda found: found.worth):
            best[found.answer.index] = found
        if other_body:
            best.clear()
        kept = set(map(id, best.values()))
        for found in ask.found:
            if found.answer.running and other_body:
                self.give_up(found.worker, (found.answer,))
            elif found.answer.running and id(found) not in kept:
                self.release(found.worker, found.answer.request_id)
                self.commands.append((found.worker, Cancel(found.answer.request_id, found.answer.attempt)))
        most = {index: max(f.answer.attempt for f in ask.found if f.answer.index == index) for index in best}
        chosen = {index: replace(found, last_attempt=most[index]) for index, found in best.items()}
        self.ended.append(LookupEnded(name, chosen, other_body))
