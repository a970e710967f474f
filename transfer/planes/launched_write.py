"""Completions of writes: one that a device posts once what it comes after has happened, over all ranks of the writer
(`LaunchedWrite`), and one that another thread carries out (`PostedWrite`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from twinpool.cache.device.device_port import DONE, Completion, Device, DeviceOp, DeviceStream, PageSpanUse, attempt
from twinpool.transfer.planes.data_plane import PageWrite, SlotWrite

Post = Callable[[PageWrite | SlotWrite], Completion]


class LaunchedWrite:
    """A completion that is done when the launch is, the write that it posted, and the parts of other ranks."""

    def __init__(self, launched: Completion, posted: Sequence[Completion], others: Completion = DONE) -> None:
        """`posted` gets the write's completion when it is posted."""
        self._launched, self._posted, self._others = launched, posted, others

    @property
    def done(self) -> bool:
        others = self._others.done
        try:
            return self._launched.done and others and all(p.done for p in self._posted)
        except RuntimeError:  # Some devices tell of a failure where they are asked how far they are.
            return others

    def wait(self) -> None:
        """Return once no part is under way any more. Raises the first error of any."""
        failed: RuntimeError | None = None
        for completion in (self._launched, self._others):
            try:
                completion.wait()
            except RuntimeError as error:
                failed = failed or error
        for posted in self._posted:
            try:
                posted.wait()
            except RuntimeError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def order(self) -> None:
        self.wait()


def launch_write(
    device: Device,
    post: Post,
    write: PageWrite | SlotWrite,
    after: Sequence[Completion],
    *,
    lane: str,
    reads: tuple[PageSpanUse, ...] = (),
    others: Completion = DONE,
    began: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
) -> LaunchedWrite:
    """Have `device` post a write after the operations `after`, on the lane of its link. Writes of layers that are still
    to be written have a lane of their own: nothing that is ready waits for them.

    `began` is called just before it is posted, and `ended` where it was over at once.
    """
    posted: list[Completion] = []

    def run() -> None:
        began()
        completion = post(write)
        posted.append(completion)
        if completion is DONE:
            ended()

    ahead = isinstance(write, PageWrite) and write.layers is not None
    op = DeviceOp("send", DeviceStream.SEND, reads=reads, lane=f"{lane} ahead" if ahead else lane)
    return LaunchedWrite(attempt(device, op, run, after), posted, others)


def lanes_of(lane: str) -> tuple[str, str]:
    """The lanes that writes to one reader take."""
    return lane, f"{lane} ahead"


class PostedWrite:
    """Implements `cache.device.device_port.Completion`. Any thread may ask; one of them ends it, once."""

    def __init__(self, ended: Callable[[], None] = lambda: None) -> None:
        """`ended` is called after the end, on the thread that ended it."""
        self._over = threading.Event()
        self._error: RuntimeError | None = None
        self._ended = ended

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait(self) -> None:
        """Wait for the end. Raises `RuntimeError` where the write failed."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def order(self) -> None:
        self.wait()

    def end(self, error: RuntimeError | None = None) -> None:
        """End the write: it has landed or, with an `error`, perhaps not. Later calls change nothing."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
            self._ended()
