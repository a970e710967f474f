"""The devices that workers run on: CPU torch that does one thing after the other, and CUDA."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from twinpool.cache.device.async_cpu_device import AsyncCpuDevice
from twinpool.cache.device.cpu_memory import CpuMemory
from twinpool.cache.device.cuda_marks import CudaLayerMarks, MarkWord
from twinpool.cache.device.device_choice import GpuView, chosen_device, gpu_view
from twinpool.cache.device.device_copies import CudaEvent
from twinpool.cache.device.device_port import (
    DONE,
    NO_GATES,
    Completion,
    Device,
    DeviceOp,
    DeviceStream,
    GatedLoads,
    PageSpanUse,
    RemoteWrite,
    UncheckedRemoteWrite,
)
from twinpool.cache.device.host_stream import HostLanes
from twinpool.cache.device.layer_marks import LayerCounts, LayerMarks


class CpuDevice(CpuMemory):
    """CPU torch: an operation is complete when `submit` returns."""

    checks = False

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
        for completion in after:
            completion.wait()
        run()
        return DONE

    def marks(self, groups: Sequence[LayerCounts]) -> None:
        return None

    def close(self) -> None:
        return


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


def make_device(
    name: str,
    wake: Callable[[], None] = lambda: None,
    *,
    streams: Collection[DeviceStream] = (),
    view: GpuView | None = None,
) -> Device:
    """Return the device of this name, as in `engine.device`. Raises `ConfigError` for a GPU that can't be used.

    `wake` is called when something that runs on a thread of the host is over. `streams`: what a CPU runs beside what it
    computes (`async_cpu_device`); none: it does one thing after the other. `view`: of the GPUs; None: this process's.
    """
    device = chosen_device(name, view or gpu_view())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return CudaDevice(device.index, wake)
    return AsyncCpuDevice(wake, streams) if streams else CpuDevice()
