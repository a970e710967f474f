"""The answers that a decode worker keeps after their end, for clients that may come back for them.

Bounded three ways: by number, together with the requests that run for nobody; by the memory that their tokens and
log-probabilities are estimated to take; and by time. What is beyond a bound is forgotten, the oldest first.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import DecodeConfig
from twinpool.contracts.messages.kept_answers import AnswerName, KeptAnswer

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
    return ANSWER_BYTES + TOKEN_BYTES * len(answer.tokens) + LOGPROB_BYTES * len(answer.logprobs) + TOP_BYTES * best
