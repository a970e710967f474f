"""Hazards of reading before ready and writing after free, on the lazy device: one test each, under many seeds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import DEVICE, HOST, Completion, DeviceOp, DeviceStream, PageSpanUse
from twinpool.cache.pool.page_allocator import InFlightPins, PageAllocator
from twinpool.cache.pool.pool_set import LoadGate
from twinpool.contracts.errors import CapacityError, UnorderedAccess

SEEDS = range(60)
LAYERS = 3
PAGES = 6


def buffers() -> list[dict[str, torch.Tensor]]:
    """Keys, and index keys that are one entry a page."""
    return [{"k": torch.zeros(PAGES, 2), "index_k": torch.zeros(PAGES)} for _ in range(LAYERS)]


def copied(source: dict[str, torch.Tensor], a: int, target: dict[str, torch.Tensor], b: int) -> Callable[[], None]:
    def run() -> None:
        for name, view in source.items():
            target[name][b] = view[a]

    return run


def writing(layers: list[dict[str, torch.Tensor]], page: int, value: float) -> Callable[[], None]:
    def run() -> None:
        for views in layers:
            for view in views.values():
                view[page] = value

    return run


def test_a1_no_reader_of_any_buffer_of_a_layer_gets_it_before_that_layers_load() -> None:
    in_time = 0
    for seed in SEEDS:
        device, here, there = AdversarialDevice(seed), buffers(), buffers()
        gate = LoadGate(here)
        writing(there, 2, 7.0)()
        for layer in range(LAYERS):
            op = DeviceOp(f"load {layer}", DeviceStream.LOAD, writes=(PageSpanUse(DEVICE, "full", [1], [layer]),))
            gate.expect(layer, device.submit(op, copied(there[layer], 2, here[layer], 1)))
        seen: list[float] = []
        passage = gate.enter("full")

        def forward() -> None:
            for layer in range(LAYERS):
                for view in passage.layer(layer).values():  # noqa: B023
                    seen.append(float(view[1].min()))  # noqa: B023

        reads = (PageSpanUse(DEVICE, "full", [1]),)
        device.submit(DeviceOp("forward", DeviceStream.COMPUTE, reads), forward, gates=passage.gates)
        device.settle()
        assert seen == [7.0] * 2 * LAYERS, f"seed {seed}"
        in_time += device.trace.index("forward") < device.trace.index("load 2")
    assert in_time > 0, "a pass begins before its last load has run"


def test_a6_pages_on_both_sides_of_a_move_are_given_out_only_when_it_is_complete() -> None:
    waited = 0
    for seed in SEEDS:
        device, launched = AdversarialDevice(seed), InFlightPins()
        here, there = buffers(), buffers()
        pages, mirror = PageAllocator("pages", 2, first=1), PageAllocator("host pages", 2, first=1)
        source, target = pages.lease(1, "r1"), mirror.lease(1, "r1")
        writing(here, 1, 5.0)()
        op = DeviceOp("save", DeviceStream.SAVE, (PageSpanUse(DEVICE, "full", [1]),), (PageSpanUse(HOST, "full", [1]),))
        moved = device.submit(op, lambda: [copied(a, 1, b, 1)() for a, b in zip(here, there, strict=True)])  # noqa: B023
        launched.hold(moved, pages.pin(source.indices, "save"), mirror.pin(target.indices, "save"))
        source.release()
        target.release()
        while not (pages.free and mirror.free):
            waited += 1
            for side in (pages, mirror):
                if not moved.done:
                    with pytest.raises(CapacityError):
                        side.lease(1, "r2")
            launched.sweep()
        assert pages.free == mirror.free == 1, "both come back together"
        device.submit(
            DeviceOp("forward", DeviceStream.COMPUTE, writes=(PageSpanUse(DEVICE, "full", [1]),)), writing(here, 1, 9.0)
        )
        device.settle()
        assert float(there[0]["k"][1, 0]) == 5.0, f"seed {seed}"
    assert waited > 0


def test_a7_a_send_comes_after_the_pass_that_writes_what_it_sends() -> None:
    for seed in SEEDS:
        device, here, sent = AdversarialDevice(seed), buffers(), list[float]()
        send = DeviceOp("send", DeviceStream.SEND, (PageSpanUse(DEVICE, "full", [1]),))

        def post() -> None:
            sent.append(float(here[LAYERS - 1]["index_k"][1]))  # noqa: B023

        done = device.submit(
            DeviceOp("forward", DeviceStream.COMPUTE, writes=(PageSpanUse(DEVICE, "full", [1]),)), writing(here, 1, 3.0)
        )
        with pytest.raises(UnorderedAccess, match=r"send .* after forward"):
            device.submit(send, post)
        device.submit(send, post, [done])
        device.settle()
        assert sent == [3.0], f"seed {seed}"


def test_a8_writes_of_one_slot_from_two_streams_are_refused_unless_ordered() -> None:
    for seed in SEEDS:
        device, state = AdversarialDevice(seed), torch.zeros(4, 2)
        slot = (PageSpanUse(DEVICE, "state", [2]),)

        def clear(name: str, stream: DeviceStream, value: float, *after: Completion) -> Completion:
            return device.submit(DeviceOp(name, stream, writes=slot), lambda: state[2].fill_(value), after)  # noqa: B023

        cleared = clear("clear", DeviceStream.COMPUTE, 0.0)
        with pytest.raises(UnorderedAccess, match=r"copy on write .* device state page 2.* after clear"):
            clear("copy on write", DeviceStream.LOAD, 4.0)
        clear("copy on write", DeviceStream.COMPUTE, 4.0)
        device.settle()
        assert state[2].tolist() == [4.0, 4.0], f"seed {seed}"
        assert cleared.done


def test_a11_a_page_is_given_out_again_only_after_the_last_launched_operation_that_names_it() -> None:
    late = 0
    for seed in SEEDS:
        device, launched, here = AdversarialDevice(seed), InFlightPins(), buffers()
        pages = PageAllocator("pages", 3, first=1)
        stopped = pages.lease(2, "stopped")
        steps = []
        for value in (1.0, 2.0):
            op = DeviceOp("step", DeviceStream.COMPUTE, writes=(PageSpanUse(DEVICE, "full", stopped.indices),))

            def both_pages(value: float = value, here: list[dict[str, torch.Tensor]] = here) -> None:
                for page in (1, 2):
                    writing(here, page, value)()

            steps.append(device.submit(op, both_pages))
        steps[0].wait()
        # It ended with the first step; the second, launched ahead, still writes its pages.
        launched.hold(steps[1], pages.pin(stopped.indices, "a launched step"))
        stopped.release()
        while not pages.free:
            late += 1
            assert pages.quarantined == 2
            launched.sweep()
        new = pages.lease(2, "new")
        op = DeviceOp("load", DeviceStream.LOAD, writes=(PageSpanUse(DEVICE, "full", new.indices),))
        device.submit(op, lambda: [writing(here, p, 8.0)() for p in (1, 2)])  # noqa: B023
        device.settle()
        assert float(here[0]["k"][1, 0]) == float(here[2]["index_k"][2]) == 8.0, f"seed {seed}"
        assert pages.check() == []
    assert late > 0


def test_b1_two_owners_of_a_release_give_a_page_back_once() -> None:
    pages = PageAllocator("pages", 5, first=1)
    lease = pages.lease(3, "r1")
    pin = pages.pin(lease.indices[:2], "send")
    part = lease.split(1, "tree")
    for _ in range(2):
        lease.release()
        part.release()
    assert (pages.free, pages.quarantined) == (2, 2)
    for _ in range(2):
        pin.release()
    assert (pages.free, pages.quarantined) == (4, 0)
    taken = pages.lease(4, "r2")
    for old in (lease, part):
        old.release()
    assert taken.live
    assert len(set(taken.indices)) == 4
    assert pages.check() == []
