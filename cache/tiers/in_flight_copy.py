"""A copy between two pool sets while it is in flight, with the pins that it needs.

Both ends stay pinned until the device has finished the last of the copy's operations, failed ones included: pages whose
lease is released meanwhile go into quarantine, not into the free list. An operation that fails ends the copy as failed;
none of its pages counts as copied. The pins go only when the owner of the copy asks `done`, or waits:
`InFlightPins.hold` does so for copies whose result isn't needed any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from twinpool.cache.device.device_port import DONE, Completion
from twinpool.cache.pool.page_allocator import Pin

DigestReader = Callable[[], list[int]]
"""Returns the digests that an operation began to take; waits until they are there."""


class InFlightCopy:
    """The operations and pins of one copy, and its `Completion`."""

    def __init__(
        self,
        pins: Sequence[Pin],
        operations: Sequence[Callable[[], Completion]],
        digests: Mapping[str, Sequence[DigestReader]] | None = None,
    ) -> None:
        """Submit the operations, in order. Where submitting one raises, wait for those before it, release the pins and
        raise the error.

        `digests`, by pool, is filled by the operations as they run, in their order.
        """
        self._pins, self._digests = pins, digests
        self.completions: list[Completion] = []
        self.ended = False
        """Whether the copy is known to have ended; `done` looks anew."""
        self._error: Exception | None = None
        try:
            for submit in operations:
                self.completions.append(submit())
        except BaseException:
            self._end()
            raise
        if all(c is DONE for c in self.completions):
            self._end()

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or not. Asking releases the pins of a copy that has."""
        if not self.ended and all(c.done for c in self.completions):
            self._end()
        return self.ended

    def wait(self) -> None:
        """Block until the copy has ended; raises the first error of its operations."""
        self._end()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        """Order the rest of the device operation that is running now after this copy."""
        for completion in self.completions:
            completion.order()

    @property
    def failed(self) -> bool:
        """Whether a device error ended this copy, which must be done.

        Any other error than `RuntimeError` is raised: a checking device raises these for bugs.
        """
        assert self.done, "a copy that is under way has neither failed nor succeeded"
        if self._error is not None and not isinstance(self._error, RuntimeError):
            raise self._error
        return self._error is not None

    def digests(self) -> dict[str, list[int]] | None:
        """Returns, by pool, the digests of the copied pages on the device, in order; None if the copy takes none.

        The copy must be done and not failed.
        """
        assert not self.failed
        if self._digests is None:
            return None
        return {pool: [digest for read in readers for digest in read()] for pool, readers in self._digests.items()}

    def _end(self) -> None:
        if self.ended:
            return
        for completion in self.completions:
            try:
                completion.wait()
            except Exception as error:
                self._error = self._error or error
        self.ended = True
        for pin in self._pins:
            pin.release()
