"""`CudaDevice` and `CudaCopies` by a stand-in of streams that is late and poisons memory (`tests.support`)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from tests.support.cuda_streams import POISON, CudaStreams, Memory, Stream, stream_of
from twinpool.cache.device.cuda_device import CudaDevice
from twinpool.cache.device.device_copies import CudaCopies, device_copies, zeroed
from twinpool.cache.device.device_port import Completion, DeviceOp, DeviceStream, LayerMarks, failure
from twinpool.cache.pool.pool_set import LoadGate

COMPUTE, LOAD, SAVE, SEND = DeviceStream.COMPUTE, DeviceStream.LOAD, DeviceStream.SAVE, DeviceStream.SEND
GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaStreams:
    streams = CudaStreams()
    streams.install(monkeypatch)
    return streams


@pytest.fixture
def device(cuda: CudaStreams) -> Iterator[CudaDevice]:
    made = CudaDevice()
    yield made
    made.close()


class Kernels:
    """Launches kernels that note their names when they run."""

    def __init__(self, cuda: CudaStreams, device: CudaDevice) -> None:
        self._cuda, self._device = cuda, device
        self.ran: list[str] = []

    def here(self, name: str) -> None:
        self._cuda.launch(partial(self.ran.append, name))

    def submit(self, name: str, stream: DeviceStream, after: Sequence[Completion] = ()) -> Completion:
        return self._device.submit(DeviceOp(name, stream), partial(self.here, name), after)


@pytest.fixture
def kernels(cuda: CudaStreams, device: CudaDevice) -> Kernels:
    return Kernels(cuda, device)


@pytest.mark.parametrize(("first", "second"), [(LOAD, COMPUTE), (COMPUTE, SAVE), (COMPUTE, LOAD), (SAVE, LOAD)])
def test_an_operation_comes_after_those_of_other_streams_that_it_names_and_no_others(
    device: CudaDevice, kernels: Kernels, first: DeviceStream, second: DeviceStream
) -> None:
    one, other = kernels.submit("one", first), kernels.submit("other", first)
    free = kernels.submit("free", second)
    behind = kernels.submit("behind", second, [one, other])
    stream_of(device, second).run()
    assert kernels.ran == ["free"], "the host went on, and the stream waits"
    assert (one.done, free.done, behind.done) == (False, True, False)
    stream_of(device, first).finish(lambda: one.done)
    stream_of(device, second).run()
    assert kernels.ran == ["free", "one"], "it comes after both"
    stream_of(device, first).run()
    assert other.done
    assert not behind.done
    stream_of(device, second).run()
    assert behind.done
    assert kernels.ran == ["free", "one", "other", "behind"]


def test_who_waits_for_an_operation_waits_for_all_of_it_and_for_what_it_came_after(kernels: Kernels) -> None:
    loaded = kernels.submit("load", LOAD)
    forward = kernels.submit("forward", COMPUTE, [loaded])
    later = kernels.submit("later", COMPUTE)
    forward.wait()
    assert kernels.ran == ["load", "forward"]
    assert (forward.done, later.done, failure(loaded)) == (True, False, None)


def test_an_operation_comes_after_what_its_caller_made_on_its_own_stream_and_holds_the_caller_up_by_nothing(
    cuda: CudaStreams, device: CudaDevice, kernels: Kernels
) -> None:
    kernels.here("indices")
    done = kernels.submit("copy", SAVE)
    kernels.here("more of the caller's")
    stream_of(device, SAVE).run()
    assert kernels.ran == []
    cuda.default.run()
    assert kernels.ran == ["indices", "more of the caller's"], "the caller's stream waits for no operation"
    stream_of(device, SAVE).run()
    assert kernels.ran[2:] == ["copy"]
    assert done.done


def test_what_an_operation_reads_is_there_until_it_has_run_though_its_caller_dropped_it(
    cuda: CudaStreams, device: CudaDevice
) -> None:
    read = list[float]()

    def reading(memory: Memory) -> Callable[[], None]:
        """A kernel of it: an address, no reference."""
        cell = memory.cell
        return lambda: cuda.launch(lambda: read.append(cell[0]))

    def submit(number: float, stream: DeviceStream) -> Completion:
        kept, captured = Memory(number), Memory(number + 0.5)
        run = reading(kept)

        def launch() -> None:
            run()
            reading(captured)()

        return device.submit(DeviceOp("read", stream), launch, keep=[kept])

    first, second = submit(1.0, LOAD), submit(2.0, COMPUTE)
    gc.collect()
    stream_of(device, COMPUTE).run()
    submit(3.0, COMPUTE)
    gc.collect()
    assert (first.done, second.done) == (False, True)
    for stream in (LOAD, COMPUTE):
        stream_of(device, stream).run()
    assert read == [2.0, 2.5, 1.0, 1.5, 3.0, 3.5]


def test_what_operations_kept_goes_once_they_are_over(cuda: CudaStreams, device: CudaDevice) -> None:
    cells = list[list[float]]()

    def submit(number: float) -> Completion:
        memory = Memory(number)
        cells.append(memory.cell)
        return device.submit(DeviceOp("read", LOAD), lambda: cuda.launch(lambda: None), keep=[memory])

    for number in range(3):
        submit(float(number))
    stream_of(device, LOAD).run()
    submit(3.0)
    gc.collect()
    assert [cell[0] for cell in cells] == [POISON, POISON, POISON, 3.0]


def test_a6_a_launch_that_fails_half_way_has_ended_when_its_caller_hears_of_it(
    cuda: CudaStreams, device: CudaDevice, kernels: Kernels
) -> None:
    before = kernels.submit("load", LOAD)
    marks = device.marks([{"full": 1}, {"full": 2}])

    def fails() -> None:
        kernels.here("half")
        marks.passed({"full": 1})
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        device.submit(DeviceOp("forward", COMPUTE), fails, [before], marks=marks)
    assert kernels.ran == ["load", "half"], "its part is over, and so is what that came after"
    assert [mark.done for mark in marks] == [True, True], "nobody waits for what will never be"
    marks.wait(0)
    with pytest.raises(RuntimeError, match="out of memory"):
        marks.wait(1)
    next_one = kernels.submit("next", COMPUTE)
    assert cuda.current is cuda.default
    next_one.wait()
    assert kernels.ran == ["load", "half", "next"]


def test_a1_a_step_reads_a_layer_after_its_loads_whichever_stream_runs_first(
    cuda: CudaStreams, device: CudaDevice
) -> None:
    layers = [{"latent": torch.zeros(1), "index_k": torch.zeros(1)} for _ in range(3)]
    gate, seen = LoadGate([dict(views) for views in layers]), list[float]()

    def load(layer: int) -> None:
        for name in layers[layer]:
            cuda.launch(partial(layers[layer][name].fill_, layer + 1))

    for layer in range(3):
        gate.expect(layer, device.submit(DeviceOp(f"load {layer}", LOAD), partial(load, layer)))
    passage = gate.enter("full")

    def read(view: torch.Tensor) -> None:
        seen.append(float(view))

    def forward() -> None:
        for layer in range(3):
            for name in ("latent", "index_k"):
                view = passage.layer(layer)[name]
                cuda.launch(partial(read, view))

    done = device.submit(DeviceOp("forward", COMPUTE), forward, gates=passage.gates)
    stream_of(device, COMPUTE).run()
    assert seen == []
    done.wait()
    assert seen == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert gate.pending(0) == ()


def test_a7_a_send_is_told_to_the_network_once_what_it_sends_has_happened(device: CudaDevice, kernels: Kernels) -> None:
    forward = kernels.submit("forward", COMPUTE)
    sent = device.submit(DeviceOp("send", SEND, lane="d0"), lambda: kernels.ran.append("send"), [forward])
    sent.wait()
    assert kernels.ran == ["forward", "send"]
    device.end_lane("d0")


def test_marks_are_reached_as_the_stream_is_through_and_all_of_them_before_the_operations_end(
    cuda: CudaStreams, device: CudaDevice, kernels: Kernels
) -> None:
    marks: LayerMarks = device.marks([{"full": 1}, {"full": 2}])

    def forward() -> None:
        for layer in (1, 2):
            kernels.here(f"layer {layer}")
            if layer == 1:
                marks.passed({"full": layer})

    done = device.submit(DeviceOp("forward", COMPUTE), forward, marks=marks)
    assert [mark.done for mark in marks] == [False, False]
    stream = stream_of(device, COMPUTE)
    stream.finish(lambda: marks[0].done)
    assert kernels.ran == ["layer 1"]
    assert not done.done
    stream.finish(lambda: done.done)
    assert [mark.done for mark in marks] == [True, True]


def test_copies_beside_the_streams_run_in_order_and_are_over_when_they_have_run(
    cuda: CudaStreams, kernels: Kernels
) -> None:
    copies = device_copies(GPU)
    assert isinstance(copies, CudaCopies)
    begun = [copies.begin(partial(kernels.here, name)) for name in ("first", "second")]
    assert [copy.done for copy in begun] == [False, False]
    begun[0].wait()
    assert kernels.ran == ["first"]
    with cuda.on(other := Stream(cuda)):
        begun[1].order()
        kernels.here("behind")
    other.run()
    assert kernels.ran == ["first"]
    begun[1].wait()
    other.run()
    assert kernels.ran == ["first", "second", "behind"]


def test_zeroed_memory_is_zero_for_every_stream(cuda: CudaStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.ones(4, dtype=torch.uint8)

    def zeros(nbytes: int, **_: object) -> torch.Tensor:
        cuda.launch(memory.zero_)
        return memory

    monkeypatch.setattr(torch, "zeros", zeros)
    assert not zeroed(4, GPU).any()
