"""In-flight pins: pins of pages that launched operations may still touch, released when these are complete.

The host is ahead of the device. A caller that frees pages while an operation that names them is under way pins the
pages first and leaves the pins with `InFlightPins`, which releases them when the operation is complete, not before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from twinpool.cache.device.device_port import Completion
from twinpool.cache.pool.page_allocator import Pin


class InFlightPins:
    """Pins by the operation that they wait for. Call `sweep` now and then, and `settle` before closing."""

    def __init__(self) -> None:
        self._held: deque[tuple[Completion, Sequence[Pin]]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, completion: Completion, *pins: Pin) -> None:
        """Keep `pins` until `completion` is done; without pins, only ask `done` of it until it is."""
        self._held.append((completion, pins))

    def sweep(self) -> None:
        """Release the pins of complete operations; never waits."""
        for _ in range(len(self._held)):
            completion, pins = self._held.popleft()
            if completion.done:
                for pin in pins:
                    pin.release()
            else:
                self._held.append((completion, pins))

    def settle(self) -> None:
        """Wait for all operations and release all pins; then raises the first operation's error, if any failed."""
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
