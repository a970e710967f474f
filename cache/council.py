"""Joins a rank's prefetches to the ballot of its seat: every length that they go by is agreed by all ranks.

A prefetch asks for agreement on a sequence of keys: what storage has (`hit`), repeated until the least of all lengths
is one that every rank can compute from, then what has come (`done`), likewise. Which key comes next follows from what
was agreed before, so all ranks open and close the same keys as they take the same decisions: at the same step, by the
leader's plan. Nothing here waits; a rank that doesn't know yet leaves its prefetch where it is.
"""

from __future__ import annotations

from cache.consensus import NO_LIMIT, Ballot


class Council:
    """One rank's side. `begin` and `settle` are called as the leader's plan says, on every rank in the same order."""

    def __init__(self, ballot: Ballot) -> None:
        self._ballot = ballot
        self._decided: dict[str, int] = {}
        self._limits: dict[int, int] = {}

    def begin(self, number: int, limit: int) -> None:
        """Prefetch `number` begins, for at most `limit` pages. Raises `CapacityError` when too many are under way."""
        self._ballot.open(_key("hit", number, 0))
        self._limits[number] = limit

    def agree(self, key: str, value: int) -> int | None:
        """This rank's finding; what all agreed on, once that is known."""
        if key in self._decided:
            return self._decided.pop(key)
        self._ballot.propose(key, value)
        return None

    def settle(self, through: int) -> bool:
        """Take the decisions that the plan calls settled; False: ask again, a result is still on its way here."""
        decisions = self._ballot.take(through)
        if decisions is None:
            return False
        for decision in decisions:
            assert decision.value != NO_LIMIT, "every rank of a prefetch has a length to say"
            self._decided[decision.key] = decision.value
            self._go_on(decision.key, decision.value)
        return True

    def _go_on(self, key: str, agreed: int) -> None:
        """Close what is decided and open what comes after it."""
        what, number, vote = key.split()
        self._ballot.close(key)
        again = agreed != self._limits[int(number)]
        self._limits[int(number)] = agreed
        if again:
            self._ballot.open(_key(what, int(number), int(vote) + 1))
        elif what == "hit":
            self._ballot.open(_key("done", int(number), int(vote) + 1))
        else:
            del self._limits[int(number)]


def _key(what: str, number: int, vote: int) -> str:
    return f"{what} {number} {vote}"
