"""The copier between tiers: pins, order, digests and failures of a copy, by pieces and by layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.support.pool_sets import NAMES, entry, filled, host_pools, pool_sets
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Completion, Device, DeviceOp, DeviceStream
from twinpool.cache.memory.page_moves import PageMove
from twinpool.cache.pool.page_allocator import InFlightPins, PageAllocator
from twinpool.cache.pool.pool_set import PageExtent, PoolSet
from twinpool.cache.tiers.tier_copy import InFlightCopy, TierCopy
from twinpool.contracts.errors import LayoutMismatch

PAGE = 4
Begin = Callable[[TierCopy, PageMove], InFlightCopy]
WAYS: dict[str, tuple[DeviceStream, Begin]] = {
    "pieces down": (DeviceStream.SAVE, lambda copier, move: copier.by_pieces("save", move, 1)),
    "pieces up": (DeviceStream.LOAD, lambda copier, move: copier.by_pieces("load", move, 1)),
    "layers up": (DeviceStream.LOAD, lambda copier, move: copier.by_layers("load", move)),
}


def pair(name: str, stream: DeviceStream) -> tuple[PoolSet, PoolSet]:
    """Source and target, filled differently."""
    spec = pool_sets(PAGE)[name]
    device, host = filled(PoolSet(spec, spec.even(12)), 1), filled(host_pools(spec, 12), 2)
    return (device, host) if stream is DeviceStream.SAVE else (host, device)


def two_of_each(source: PoolSet, target: PoolSet) -> PageMove:
    """Leases two pages (or slots) of every pool at both ends; the target's come in another order."""
    sources = {name: a.lease(2, "source").indices for name, a in source.allocators.items()}
    targets = {name: a.lease(2, "target").indices[::-1] for name, a in target.allocators.items()}
    return PageMove.of(sources, targets)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_pool_arrives_where_it_was_sent(name: str, way: str) -> None:
    stream, begin = WAYS[way]
    for device in (CpuDevice(), AdversarialDevice(1)):
        source, target = pair(name, stream)
        move = two_of_each(source, target)
        want = {
            (p.pool, t): entry(source, p.pool, s) for p in move.parts for s, t in zip(p.sources, p.targets, strict=True)
        }
        begin(TierCopy(device, source, target, stream), move).wait()
        assert {(pool, index): entry(target, pool, index) for pool, index in want} == want


@pytest.mark.parametrize("way", WAYS)
def test_a6_both_ends_of_a_copy_are_pinned_until_its_last_operation_has_ended(way: str) -> None:
    stream, begin = WAYS[way]
    device = AdversarialDevice(3, stray=0.0)
    source, target = pair("all", stream)
    leases = [a.lease(2, "copied") for pools in (source, target) for a in pools.allocators.values()]
    half = len(leases) // 2
    names = list(source.allocators)
    move = PageMove.of(
        {n: lease.indices for n, lease in zip(names, leases[:half], strict=True)},
        {n: lease.indices for n, lease in zip(names, leases[half:], strict=True)},
    )
    copy = begin(TierCopy(device, source, target, stream), move)
    assert device.queued == len(copy.completions) > 1
    for lease in leases:
        lease.release()
    ends = [a for pools in (source, target) for a in pools.allocators.values()]
    assert [a.quarantined for a in ends] == [2] * len(ends)
    copy.completions[0].wait()
    assert not copy.ended
    assert all(a.quarantined == 2 for a in ends), "the last operation has not ended"
    copy.wait()
    assert [(a.quarantined, a.free) for a in ends] == [(0, a.total) for a in ends]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("late", [False, True])
def test_a_failed_operation_fails_the_copy_and_frees_its_pins(
    way: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, begin = WAYS[way]
    source, target = pair("all", stream)
    device: Device = AdversarialDevice(4) if late else CpuDevice()
    move = two_of_each(source, target)
    real, calls = source.copy, [0]

    def broken(move: PageMove, to: PoolSet, layers: range | None = None) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("the device is lost")
        real(move, to, layers)

    monkeypatch.setattr(source, "copy", broken)
    copy = begin(TierCopy(device, source, target, stream), move)
    with pytest.raises(RuntimeError, match="the device is lost"):
        copy.wait()
    assert copy.failed
    assert calls[0] == len(copy.completions), "what failed in the middle ends as a whole, when all of it has ended"
    assert all(not a._pinned.any() for pools in (source, target) for a in pools.allocators.values())


@pytest.mark.parametrize("stream", [DeviceStream.SAVE, DeviceStream.LOAD])
def test_digests_are_those_of_the_pages_on_the_device_in_their_order(stream: DeviceStream) -> None:
    source, target = pair("all", stream)
    leases = {name: a.lease(3 if name != "state" else 1, "device") for name, a in source.allocators.items()}
    others = {name: a.lease(3 if name != "state" else 1, "host") for name, a in target.allocators.items()}
    move = PageMove.of({n: x.indices for n, x in leases.items()}, {n: x.indices for n, x in others.items()})
    device_end = leases if stream is DeviceStream.SAVE else others
    extents = {
        name: PageExtent.slot(lease, 10) if name == "state" else PageExtent.of(lease, 0, 10, PAGE)
        for name, lease in device_end.items()
    }
    copy = TierCopy(AdversarialDevice(5), source, target, stream).by_pieces("copy", move, 1, digested=extents)
    copy.wait()
    pools = source if stream is DeviceStream.SAVE else target
    want = {name: pools.digest(name, e.indices, e.firsts, e.ends) for name, e in extents.items()}
    assert copy.digests() == want
    assert len(set(want["full"])) == 3


def test_pools_of_another_layout_are_refused_before_anything_is_copied() -> None:
    one, other = pool_sets(PAGE)["full"], pool_sets(PAGE)["all"]
    with pytest.raises(LayoutMismatch, match="can't be moved"):
        TierCopy(CpuDevice(), PoolSet(one, one.even(4)), host_pools(other, 4), DeviceStream.SAVE)


@pytest.mark.parametrize("stop", [False, True])
def test_what_is_ordered_after_a_copy_comes_after_all_of_its_operations_and_hears_of_a_failed_one(stop: bool) -> None:
    """Operations of several pieces: the last isn't the only one, and none of them is waited for by the host."""
    device, ran = AdversarialDevice(1, stray=0.0), list[int]()

    def piece(number: int) -> None:
        if stop and number == 1:
            raise RuntimeError("an illegal address was touched")
        ran.append(number)

    def submit(number: int) -> Completion:
        stream = (DeviceStream.LOAD, DeviceStream.SAVE, DeviceStream.SEND)[number]
        return device.submit(DeviceOp(f"piece {number}", stream), partial(piece, number))

    copy = InFlightCopy((), [partial(submit, number) for number in range(3)])
    assert (copy.done, ran) == (False, [])
    seen: list[list[int]] = []

    def reader() -> None:
        copy.order()
        seen.append(sorted(ran))

    read = device.submit(DeviceOp("reader", DeviceStream.COMPUTE), reader)
    if stop:
        with pytest.raises(RuntimeError, match="illegal address"):
            read.wait()
        assert seen == []
    else:
        read.wait()
        assert seen == [[0, 1, 2]]
    device.settle()
    assert copy.done
    assert copy.failed is stop


def test_pins_that_wait_for_operations_are_given_back_when_all_of_these_are_over_and_their_errors_are_told() -> None:
    device, pages, ran = AdversarialDevice(1, stray=0.0), PageAllocator("pages", 9), list[str]()
    lease, held = pages.lease(4, "a request"), InFlightPins()

    def fails() -> None:
        ran.append("fails")
        raise RuntimeError("an illegal address was touched")

    for number, run in enumerate((lambda: ran.append("one"), fails, lambda: ran.append("three"))):
        stream = (DeviceStream.LOAD, DeviceStream.SAVE, DeviceStream.SEND)[number]
        operation = device.submit(DeviceOp(f"operation {number}", stream), run)
        held.hold(operation, pages.pin(lease.indices[number : number + 1], "an operation"))
    lease.release()
    assert (pages.free, pages.quarantined) == (6, 3)
    with pytest.raises(RuntimeError, match="illegal address"):
        held.settle()
    assert sorted(ran) == ["fails", "one", "three"], "it waited for each of them"
    assert (pages.free, pages.quarantined, len(held)) == (9, 0, 0)
