"""The device of an NVIDIA GPU: a CUDA stream for each kind of operation, and the marks of a step's layers.

Layer marks are a word of pinned host memory that the compute stream counts up. The kernels of a group's layers come
before the addition to the count, and that before its copy to the word, all on the same stream. So whoever reads the
word on the host knows that these layers are written. There is one word a device: its count goes on from step to step,
and the marks of a step are those behind the count that it was launched at. A step with marks is launched kernel by
kernel: only decode steps are captured as graphs, and none of them has marks.

A stream that fails says nothing more: so who waits looks at the event behind the step as well, which then raises the
error. Of all who wait, one at a time looks; the others are told.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from twinpool.cache.device.cpu_device import HostLanes
from twinpool.cache.device.device_copies import CudaEvent
from twinpool.cache.device.device_port import (
    NO_GATES,
    Completion,
    DeviceOp,
    DeviceStream,
    GatedLoads,
    LayerCounts,
    LayerMarks,
    PageSpanUse,
    RemoteWrite,
    UncheckedRemoteWrite,
)

_LOOK_S = 20e-6
"""Seconds between two looks at the word: short beside the transfer of a group of layers."""


class MarkWord:
    """The word of one device: int64, in pinned host memory."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._word = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._seen = self._word.numpy()
        self._changed = threading.Condition()
        self._looking = False
        self.launched = 0
        """What the word will be once everything launched so far is over."""

    @property
    def seen(self) -> int:
        return int(self._seen[0])

    def add(self, marks: int) -> None:
        """Have the current stream count so many marks more, once what was launched on it is over."""
        self.launched += marks
        self._count.add_(marks)
        self._word.copy_(self._count, non_blocking=True)

    def wait(self, settled: Callable[[], bool]) -> None:
        """Return once `settled` says so."""
        with self._changed:
            try:
                while not settled():
                    if self._looking:
                        self._changed.wait()
                        continue
                    self._looking = True
                    seen = self.seen
                    self._changed.wait(_LOOK_S)
                    self._looking = False
                    if self.seen != seen:
                        self._changed.notify_all()
            finally:
                self._changed.notify_all()  # Another one looks from now on.

    def tell(self) -> None:
        """Have those who wait ask again."""
        with self._changed:
            self._changed.notify_all()


class CudaLayerMarks(LayerMarks):
    """The marks of one operation on a CUDA stream; `passed` and `end` are called as it is launched."""

    def __init__(self, groups: Sequence[LayerCounts], word: MarkWord) -> None:
        super().__init__(groups)
        self._word = word
        self._first = 0
        """What the word was before any of these marks, once one was launched."""
        self._launched = 0
        self._over: Completion | None = None

    def passed(self, written: LayerCounts) -> None:
        self._launched_to(self._through(self._launched, written))

    def end(self, error: BaseException | None) -> None:
        if error is None:
            self._launched_to(len(self.groups))
        self._error = error
        self._word.tell()

    def follow(self, over: Completion) -> None:
        """Take note of what tells that the whole operation is over, or that the device failed in it."""
        self._over = over

    def reached(self, group: int) -> bool:
        # Marks that an operation didn't come to are counted by later ones.
        return group < self._launched and self._word.seen > self._first + group

    def settled(self, group: int) -> bool:
        if self.reached(group) or self._error is not None:
            return True
        if self._over is None:
            return False
        try:
            over = self._over.done
        except RuntimeError as error:
            self._error = error
            return True
        assert not over or self.reached(group), "the device passed every mark before the end of the operation"
        return over

    def wait(self, group: int) -> None:
        self._word.wait(lambda: self.settled(group))
        self._raise_unless_reached(group)

    def _launched_to(self, count: int) -> None:
        """Have the stream say that `count` groups are through, once what was launched so far is over."""
        if count > self._launched:
            if not self._launched:
                self._first = self._word.launched
            self._word.add(count - self._launched)
            self._launched = count


class CudaDevice:
    """NVIDIA: one CUDA stream a `DeviceStream`, but threads of the host for sends; completions are CUDA events."""

    checks = False

    def __init__(self, index: int = 0, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called whenever a send is over."""
        self.torch_device = torch.device("cuda", index)
        self._sends = HostLanes("device-send", wake)
        self._streams = {stream: torch.cuda.Stream(self.torch_device) for stream in DeviceStream}  # type: ignore[no-untyped-call]
        self._kept: deque[tuple[CudaEvent, tuple[Any, ...]]] = deque()
        self._mark_word = MarkWord(self.torch_device)

    def submit(
        self,
        op: DeviceOp,
        run: Callable[[], object],
        after: Sequence[Completion] = (),
        *,
        gates: GatedLoads = NO_GATES,
        keep: Sequence[Any] = (),
        marks: LayerMarks | None = None,
    ) -> Completion:
        if op.stream is DeviceStream.SEND:
            return self._sends.submit(op.lane, run, after)
        self._let_go()
        stream = self._streams[op.stream]
        # What the caller made on its own stream (index tensors, say) must be there before the operation reads it.
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            for completion in after:
                completion.order()
            try:
                run()
            except Exception as error:
                if marks is not None:
                    marks.end(error)
                stream.synchronize()  # Whoever hears of it gives pages back that a part of it may still touch.
                raise
            if marks is not None:
                marks.end(None)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        # The caching allocator would hand the memory of a dropped tensor to its own stream while this one still
        # reads it: so everything that the launch could reach stays until the event.
        over = CudaEvent(event, self.torch_device)
        if isinstance(marks, CudaLayerMarks):
            marks.follow(over)
        self._kept.append((over, (run, *keep)))
        return over

    def touch(self, name: str, *, reads: Sequence[PageSpanUse] = (), writes: Sequence[PageSpanUse] = ()) -> None:
        return

    def remote_write(self, name: str, writes: Sequence[PageSpanUse]) -> RemoteWrite:
        return UncheckedRemoteWrite()

    def marks(self, groups: Sequence[LayerCounts]) -> LayerMarks:
        return CudaLayerMarks(groups, self._mark_word)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def register_host(self, memory: torch.Tensor) -> None:
        # Nothing unregisters this memory: a worker's host tier is in use until the process ends.
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)  # type: ignore[no-untyped-call]
        if int(code):
            raise RuntimeError(f"{memory.numel()} bytes of host memory can't be registered with the GPU: error {code}")

    def end_lane(self, lane: str) -> None:
        self._sends.end(lane)

    def close(self) -> None:
        self._sends.close()

    def _let_go(self) -> None:
        while self._kept and self._kept[0][0].done:
            self._kept.popleft()
