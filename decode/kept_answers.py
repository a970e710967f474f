"""The answers with a name of a decode worker: they are kept after their end, for clients that may come back for them.

Such a client may come to another router, which asks by the name's key. It gets what is kept, and what still runs
becomes its own (`NamedAnswers`); what runs for nobody meanwhile goes on for a while.

Bounded three ways: by number, together with the requests that run for nobody; by the memory that their tokens and
log-probabilities are estimated to take; and by time. What is beyond a bound is forgotten, the oldest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import DecodeConfig
from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.interfaces.worker_interface import UNOWNED, SessionId
from twinpool.contracts.messages.kept_answers import AnswerName, Attach, Attached, KeptAnswer
from twinpool.contracts.messages.router_commands import Submit
from twinpool.contracts.messages.worker_events import Done
from twinpool.decode.migration.drain_offers import DrainAdvisor
from twinpool.decode.migration.outgoing_migrations import OutgoingMigrations
from twinpool.decode.request import DecodeRequest, RequestFailed, RouterEvent
from twinpool.worker.request_table import RequestTable

ANSWER_BYTES, TOKEN_BYTES = 1024, 40
"""The estimated memory of an answer without tokens, and of a token: an integer and its place in a tuple."""
LOGPROB_BYTES, TOP_BYTES = 200, 150
"""The estimated memory of a token's log-probability, and of each of the best at its position."""

AnswerKey = tuple[str, int]
"""Key and index of a name."""


@dataclass(frozen=True, slots=True)
class _KeptEntry:
    name: AnswerName
    answer: KeptAnswer
    until: float
    """When it is forgotten, in seconds of the clock."""
    deadline: float
    nbytes: int


class KeptAnswers:
    """The kept answers of one worker, oldest first; see the module's prose."""

    def __init__(self, config: DecodeConfig, clock: Clock) -> None:
        self._most, self._seconds, self._max_bytes = (
            config.kept_answers,
            config.kept_answer_s,
            config.kept_answer_bytes,
        )
        self._clock = clock
        self._kept: dict[AnswerKey, _KeptEntry] = {}
        self.nbytes = 0
        """The estimated memory of all."""
        self.forgotten = 0
        """Answers that were forgotten before their time, for lack of room."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def next_deadline(self) -> float | None:
        """When the oldest is forgotten, in seconds of the clock; None without any."""
        return next((kept.until for kept in self._kept.values()), None)

    def keep(self, name: AnswerName, answer: KeptAnswer, unowned: int) -> None:
        """Keep an answer that has ended, in place of an earlier one of its name. `unowned`: how many requests run for
        nobody, which count as kept."""
        self.forget(name)
        now, nbytes = self._clock.now(), estimated_bytes(answer)
        if not self.room(unowned) or nbytes > self._max_bytes:
            self.forgotten += 1
            return
        self._kept[name.key, name.index] = _KeptEntry(name, answer, now + self._seconds, now + answer.left_s, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self._max_bytes:
            self._forget_oldest()

    def room(self, unowned: int) -> bool:
        """Make room for one more besides `unowned` requests that run for nobody; returns whether there is any."""
        while self._kept and len(self._kept) + unowned >= self._most:
            self._forget_oldest()
        return len(self._kept) + unowned < self._most

    def of(self, key: str) -> list[tuple[AnswerName, KeptAnswer]]:
        """Return the answers of a key, by index. They stay kept."""
        now = self._clock.now()
        found = [kept for (mine, _), kept in self._kept.items() if mine == key and now < kept.until]
        return [
            (kept.name, replace(kept.answer, left_s=max(kept.deadline - now, 0.0)))
            for kept in sorted(found, key=lambda kept: kept.name.index)
        ]

    def forget(self, name: AnswerName) -> None:
        """Forget the answer of this name. Idempotent."""
        kept = self._kept.pop((name.key, name.index), None)
        if kept is not None:
            self.nbytes -= kept.nbytes

    def expire(self) -> None:
        """Forget the answers whose time is over."""
        now = self._clock.now()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self.forget(next(iter(self._kept.values())).name)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self.nbytes = 0

    def _forget_oldest(self) -> None:
        self.forget(next(iter(self._kept.values())).name)
        self.forgotten += 1

    def check(self, unowned: int) -> list[str]:
        """Recount, with `unowned` requests that run for nobody; returns what doesn't agree."""
        found = []
        if (recount := sum(estimated_bytes(kept.answer) for kept in self._kept.values())) != self.nbytes:
            found.append(f"kept answers take {recount} bytes, {self.nbytes} are booked")
        if self.nbytes > self._max_bytes:
            found.append(f"kept answers take {self.nbytes} bytes of {self._max_bytes}")
        if len(self._kept) + unowned > self._most:
            found.append(f"{len(self._kept)} answers are kept and {unowned} run for nobody, of {self._most}")
        return found


def estimated_bytes(answer: KeptAnswer) -> int:
    """Return the estimated memory of an answer."""
    best = sum(len(one.top) for one in answer.logprobs)
    experts = sum(len(one.experts.ids) for one in answer.logprobs if one.experts is not None)
    logprobs = LOGPROB_BYTES * len(answer.logprobs) + TOP_BYTES * best + experts
    return ANSWER_BYTES + TOKEN_BYTES * len(answer.tokens) + logprobs


class NamedAnswers:
    """The answers with a name of one worker, running or kept, and which router has them; see the module's prose."""

    def __init__(
        self,
        requests: RequestTable[DecodeRequest],
        migrations: OutgoingMigrations,
        advisor: DrainAdvisor,
        config: DecodeConfig,
        hand_to: Callable[[SessionId, DecodeRequest, float], None],
    ) -> None:
        """`hand_to` makes a request another session's, with a deadline."""
        self._requests, self._migrations, self._advisor = requests, migrations, advisor
        self._hand_to, self._clock = hand_to, requests.clock
        self._kept = KeptAnswers(config, requests.clock)
        self._claims = itertools.count(1)

    @property
    def _unowned(self) -> int:
        """Requests that run for nobody."""
        return sum(request.session == UNOWNED for request in self._requests)

    @property
    def bounded(self) -> int:
        """Answers that are kept, and requests that run for nobody: `decode.kept_answers` at most."""
        return len(self._kept) + self._unowned

    @property
    def counters(self) -> dict[str, float]:
        kept = self._kept
        return {
            "kept_answers": len(kept), "kept_answers_forgotten": kept.forgotten, "unowned": self._unowned
        }  # fmt: skip

    @property
    def next_deadline(self) -> float | None:
        """When the oldest kept answer is forgotten, in seconds of the clock; None without any."""
        return self._kept.next_deadline

    def check(self) -> list[str]:
        """Recount; returns what doesn't agree."""
        return self._kept.check(self._unowned)

    def expire(self) -> None:
        """Forget the kept answers whose time is over."""
        self._kept.expire()

    def clear(self) -> None:
        """Forget all kept answers."""
        self._kept.clear()

    def may_go_on(self, request: DecodeRequest) -> bool:
        """Whether a request may run for nobody: it has a name, and there is room. Kept answers make way for it."""
        return request.submit.name is not None and self._kept.room(self._unowned - (request.session == UNOWNED))

    def keep(self, request: DecodeRequest, reason: str = "", stop_token: int | None = None) -> None:
        """Keep the tokens of a request that ends here, if it has a name and tokens."""
        name, told = request.submit.name, request.told(self._clock.now())
        if name is not None and told is not None and told.tokens:
            others = self._unowned - (request.session == UNOWNED)
            self._kept.keep(name, replace(told, running=False, reason=reason, stop_token=stop_token), others)

    def superseded(self, submit: Submit) -> list[DecodeRequest]:
        """Forget what is kept under the name of a request that begins anew; returns what runs under it for nobody, for
        the caller to end."""
        if submit.name is None:
            return []
        self._kept.forget(submit.name)
        found = []
        for request in self._requests:
            name = request.submit.name
            same = name is not None and (name.key, name.index) == (submit.name.key, submit.name.index)
            if same and request.session == UNOWNED and request.submit.request_id != submit.request_id:
                found.append(request)
        return found

    def claim(self, request: DecodeRequest) -> None:
        """Number the claim of the router that has the request from now on."""
        request.claim = next(self._claims)

    def attach(self, session: SessionId, command: Attach) -> Iterator[RouterEvent | RequestFailed]:
        """Hand all that has this key to the router that asks, but not what another router claimed later than it knows;
        routers that had it are told."""
        named = [r for r in self._requests if r.submit.name is not None and r.submit.name.key == command.key]
        ended = self._kept.of(command.key)
        bodies = {r.submit.name.body for r in named if r.submit.name is not None} | {name.body for name, _ in ended}
        ask = command.request_id, command.attempt
        if bodies - {command.body}:
            yield RouterEvent(session, Attached(*ask, other_body=True))
            return
        newest = max((r.claim for r in named if r.session not in (UNOWNED, session)), default=0)
        if command.seen is not None and newest > command.seen:
            yield RouterEvent(session, Attached(*ask, contested=newest))
            return
        answers = [answer for _, answer in ended]
        for request in named:
            yield from self._migrations.recall(request)
            told = request.told(self._clock.now())
            if told is None or not self._requests.holds(request):
                continue
            answers.append(told)
            submit = request.submit
            if request.session not in (UNOWNED, session):
                message = "the client came back on another connection, which goes on with this answer"
                done = Done(submit.request_id, submit.attempt, "error", error=ErrorKind.SUPERSEDED, message=message)
                yield RouterEvent(request.session, done)
            self._hand_to(session, request, request.arrived + submit.deadline_s)
            self.claim(request)
            request.tells_first = request.tells_first or not told.started
            self._advisor.forget(request)
        yield RouterEvent(session, Attached(*ask, answers=tuple(answers)))
