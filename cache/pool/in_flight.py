"""What launched operations may still touch: pins that end with an operation, not with its owner.

The host is ahead of the device. Whoever frees pages while an operation that names them is under way pins them first
and leaves the pins with `InFlightPins`; they go when the operation is complete, and not before.

A submitted move (`InFlightCopy`) keeps both ends pinned until the device has finished the last of its operations,
failed ones included: whoever releases a lease meanwhile puts its pages into limbo, not into the free list. An operation
that fails ends the move as failed; nothing of it counts as moved. Somebody must ask `done` now and then, or wait:
`InFlightPins.hold` does for moves that nobody is interested in any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from cache.device.device_port import DONE, Completion
from cache.pool.page_allocator import Pin


class InFlightPins:
    """Pins by the operation that they wait for. `sweep` now and then; `settle` before closing."""

    def __init__(self) -> None:
        self._held: deque[tuple[Completion, Sequence[Pin]]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, completion: Completion, *pins: Pin) -> None:
        """Keep `pins` until `completion` is done."""
        self._held.append((completion, pins))

    def sweep(self) -> None:
        """Release what complete operations held; never waits."""
        for _ in range(len(self._held)):
            completion, pins = self._held.popleft()
            if completion.done:
                for pin in pins:
                    pin.release()
            else:
                self._held.append((completion, pins))

    def settle(self) -> None:
        """Wait for everything under way, and release all; then raises the first error of those that failed."""
        failed: Exception | None = None
        while self._held:
            completion, pins = self._held.popleft()
            try:
                completion.wait()
            except Exception as error:
                failed = failed or error
            for pin in pins:
                pin.release()
        if failed is not None:
            raise failed


class InFlightCopy:
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
