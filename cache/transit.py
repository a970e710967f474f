"""A submitted move until its end.

A move keeps both ends pinned until the device has finished the last of its operations, failed ones included: whoever
releases a lease meanwhile puts its pages into limbo, not into the free list. An operation that fails ends the move
as failed; nothing of it counts as moved. Somebody must ask `done` now and then, or wait: `Launched.hold` does for
moves that nobody is interested in any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cache.device import DONE, Completion
from cache.leases import Pin


class Transit:
    """The operations of one move, and the pins that they need.

    `finish` is called once, when the last operation has ended and the pins are gone, with the error of the first that
    failed, or None.
    """

    def __init__(self, pins: Iterable[Pin], finish: Callable[[BaseException | None], None]) -> None:
        self._pins = list(pins)
        self._finish = finish
        self._running: list[Completion] = []
        self._started = False
        self._over = False
        self._error: BaseException | None = None

    def start(self, submits: Iterable[Callable[[], Completion]]) -> None:
        """Submit the operations. Where one can't be, the ones before it are waited for, and its error is raised."""
        try:
            for submit in submits:
                self._running.append(submit())
        except BaseException as error:
            self._error = error
            self._drain()
            raise
        self._started = True
        if all(c is DONE for c in self._running):
            self._drain()

    def order(self) -> None:
        """Make what the running operation of the device does from here on come after this move."""
        for completion in self._running:
            completion.order()

    @property
    def done(self) -> bool:
        """Whether the move has ended, well or not; ends it when its last operation has."""
        if not self._over and self._started and all(c.done for c in self._running):
            self._drain()
        return self._over

    def wait(self) -> None:
        """Return once the move has ended; raises what an operation of it raised."""
        self._drain()
        if self._error is not None:
            raise self._error

    def _drain(self) -> None:
        if self._over:
            return
        for completion in self._running:
            try:
                completion.wait()
            except Exception as error:
                self._error = self._error or error
        self._over = True
        for pin in self._pins:
            pin.release()
        self._finish(self._error)
