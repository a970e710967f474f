"""Writes of the simulated planes that are under way: completions that are over when their stores have landed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class FlyingStore:
    """A write in parts that land one after the other: a completion that fails where access has ended, or its connection
    is cut. What was given up may land all the same, where access has not ended."""

    def __init__(
        self, stores: list[Callable[[], None]], let_in: Callable[[], bool], reaching_in: Callable[[], bool]
    ) -> None:
        """`let_in`: whether the reader takes parts in. `reaching_in`: whether the writer stores them without it, as
        long as it has not given the write up."""
        self._stores, self._let_in, self._reaching_in = deque(stores), let_in, reaching_in
        self._landed = False
        self._error: RuntimeError | None = None

    def add(self, store: Callable[[], None]) -> None:
        """Add a last part."""
        self._stores.append(store)

    @property
    def parts(self) -> int:
        """The number of parts that have still to land."""
        return len(self._stores)

    @property
    def done(self) -> bool:
        return self._error is not None or self._landed

    def land(self) -> None:
        """Take the next part in. Does nothing once all have come."""
        if not self._stores:
            return
        store = self._stores.popleft()
        if self._let_in() or (self._error is None and self._reaching_in()):
            store()
        else:
            self.fail("the reader has ended this writer's access")
        self._landed = not self._stores and self._error is None

    def fail(self, reason: str) -> None:
        if not self.done:
            self._error = RuntimeError(reason)

    def wait(self) -> None:
        while not self.done:
            self.land()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        self.wait()


class DelayedStore:
    """The second half of a write: a completion that runs at its time, or earlier if it is waited for."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run

    @property
    def done(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()

    def order(self) -> None:
        self.wait()
