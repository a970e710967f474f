"""What launched operations may still touch: pins that end with an operation, not with its owner.

The host is ahead of the device. Whoever frees pages while an operation that names them is under way pins them first
and leaves the pins here; they go when the operation is complete, and not before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cache.device import Completion
from cache.leases import Pin


class Launched:
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
