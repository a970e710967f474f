"""Saving state to host memory and bringing it back, over pool sets of every kind, on a prompt and on a late device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.support.pool_sets import NAMES, entry, filled, host_pools, pool_sets
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device, DeviceOp, GatedLoads
from twinpool.cache.memory.kv_cache_spec import IndexSpace, LayoutOrder, PoolKind
from twinpool.cache.pool.page_allocator import InFlightPins, Lease
from twinpool.cache.pool.pool_set import PageExtent, PoolSet
from twinpool.cache.swap.offload import OffloadedPages, RestoredPages, offload, restore
from twinpool.contracts.errors import CapacityError, LayoutMismatch, StaleLease

PAGE = 4
COMMITTED = 10
"""Two full pages and half of a third."""


class House:
    """A device, its pools and their mirror; `close` asserts that nothing is held."""

    def __init__(self, name: str, device: Device | None = None, host_count: int = 12) -> None:
        spec = pool_sets(PAGE)[name]
        self.device = device or CpuDevice()
        self.pools = filled(PoolSet(spec, spec.even(12)), 1)
        self.host = filled(host_pools(spec, host_count), 2)

    def leases(self, owner: str) -> dict[str, Lease]:
        """Three pages of every pool that has pages, one slot of every other."""
        return {
            p.name: self.pools.allocators[p.name].lease(1 if p.kind is PoolKind.STATE else 3, owner)
            for p in self.pools.spec.pools
        }

    def extents(self, leases: dict[str, Lease], committed: int = COMMITTED) -> dict[str, PageExtent]:
        return {
            name: PageExtent.slot(lease, committed) if len(lease) == 1 else PageExtent.of(lease, 0, committed, PAGE)
            for name, lease in leases.items()
        }

    def save(self, extents: dict[str, PageExtent], chunk_bytes: int = 1 << 20, **options: Any) -> OffloadedPages:
        return offload(
            self.device, self.pools, self.host, extents, chunk_bytes=chunk_bytes, owner="a request", **options
        )

    def bring(
        self, saved: OffloadedPages, into: dict[str, PageExtent], chunk_bytes: int = 1 << 20, **options: Any
    ) -> RestoredPages:
        return restore(self.device, saved, self.pools, into, chunk_bytes=chunk_bytes, **options)

    def bytes_of(self, leases: dict[str, Lease]) -> dict[str, list[list[bytes]]]:
        return {name: [entry(self.pools, name, i) for i in lease.indices] for name, lease in leases.items()}

    def close(self) -> None:
        for pools in (self.pools, self.host):
            for allocator in pools.allocators.values():
                assert allocator.check() == []
                assert (allocator.free, allocator.leases, allocator.quarantined) == (allocator.total, 0, 0)


@pytest.fixture
def house() -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(*args: Any, **options: Any) -> House:
        made.append(House(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def release(*held: dict[str, Lease] | OffloadedPages) -> None:
    for one in held:
        if isinstance(one, OffloadedPages):
            one.release()
        else:
            for lease in one.values():
                lease.release()


@pytest.mark.parametrize("chunk_bytes", [1, 700, 1 << 20])
@pytest.mark.parametrize("name", NAMES)
def test_a3_all_state_of_a_request_comes_back_to_other_pages_as_it_was(
    name: str, chunk_bytes: int, house: Callable[..., House]
) -> None:
    for device in (CpuDevice(), AdversarialDevice(1), AdversarialDevice(2)):
        one = house(name, device)
        before = one.leases("a request")
        want = one.bytes_of(before)
        saved = one.save(one.extents(before), chunk_bytes)
        saved.wait()
        assert saved.complete
        assert saved.nbytes == sum(len(x) * one.pools.spec.unit_bytes(p) for p, x in before.items())
        release(before)
        other = one.leases("somebody else")
        filled(one.pools, 3)
        after = one.leases("a request again")
        back = one.bring(saved, one.extents(after), chunk_bytes)
        back.wait()
        assert back.complete
        assert one.bytes_of(after) == want
        assert before["full"].indices != after["full"].indices
        release(saved, other, after)


@pytest.mark.parametrize("name", NAMES)
def test_a9_a_byte_that_changed_in_host_memory_is_damage_and_the_restore_is_not_complete(
    name: str, house: Callable[..., House]
) -> None:
    one = house(name)
    before, after = one.leases("a request"), one.leases("again")
    saved = one.save(one.extents(before))
    for pool in one.pools.spec.by_name:
        for buffer in one.host.layout.buffers[pool]:
            for layer in range(buffer.spec.layers):
                hurt = saved.leases[pool].indices[-1]
                at = buffer.offset(layer, hurt)
                one.host.region[at] ^= 64
                back = one.bring(saved, one.extents(after))
                assert back.done
                assert not back.complete
                assert [(d.pool, d.host_index) for d in back.damage] == [(pool, hurt)]
                one.host.region[at] ^= 64
    assert one.bring(saved, one.extents(after)).complete
    release(saved, before, after)


def test_a4_a_partly_filled_page_counts_up_to_its_last_committed_position(house: Callable[..., House]) -> None:
    one = house("full")
    before, after = one.leases("a request"), one.leases("again")
    saved = one.save(one.extents(before))
    last, (k, _) = saved.leases["full"].indices[2], one.host.layout.buffers["full"]
    token = k.spec.shape_bytes
    one.host.region[k.offset(0, last) + 2 * token] ^= 1
    assert one.bring(saved, one.extents(after)).complete, "position 10 isn't committed"
    one.host.region[k.offset(0, last) + 2 * token - 1] ^= 1
    assert one.bring(saved, one.extents(after)).damage, "position 9 is"
    release(saved, before, after)


def test_tags_of_the_producer_are_what_is_checked(house: Callable[..., House]) -> None:
    one = house("all")
    before, after = one.leases("a request"), one.leases("again")
    extents = one.extents(before)
    sealed = {
        pool: one.pools.digester.digest(one.pools.region, pool, e.indices, e.firsts, e.ends)
        for pool, e in extents.items()
    }
    saved = one.save(extents, digests=sealed)
    assert [t.digest for t in saved.tags("full")] == sealed["full"]
    assert one.bring(saved, one.extents(after)).complete
    saved.release()
    one.pools.region[one.pools.layout.buffers["full"][0].offset(0, before["full"].indices[0])] ^= 1
    saved = one.save(extents, digests=sealed)
    damaged = one.bring(saved, one.extents(after))
    assert [(d.pool, d.at) for d in damaged.damage] == [("full", 0)], "damaged before it was saved"
    release(saved, before, after)


@pytest.mark.parametrize("seed", range(20))
def test_a6_pages_given_up_while_a_move_is_under_way_stay_out_of_the_free_list(
    seed: int, house: Callable[..., House]
) -> None:
    device = AdversarialDevice(seed, stray=0.0)
    one = house("all", device)
    before = one.leases("a request")
    extents = one.extents(before)
    saved = one.save(extents, 1)
    assert device.queued == sum(len(e) for e in extents.values())
    release(before, saved)
    for pools in (one.pools, one.host):
        for name, allocator in pools.allocators.items():
            assert allocator.quarantined == len(extents[name])
            assert allocator.free == allocator.total - len(extents[name])
    while not saved.done:
        pass
    assert not saved.complete, "what was given up isn't saved"
    with pytest.raises(StaleLease, match="has been released"):
        one.bring(saved, {})


@pytest.mark.parametrize("seed", range(20))
def test_a6_pages_given_up_during_a_restore_stay_out_of_the_free_list(seed: int, house: Callable[..., House]) -> None:
    one = house("all", AdversarialDevice(seed, stray=0.0))
    before, after = one.leases("a request"), one.leases("again")
    saved = one.save(one.extents(before))
    saved.wait()
    release(before)
    back = one.bring(saved, one.extents(after), 1)
    release(saved, after)
    for pools in (one.pools, one.host):
        for name, allocator in pools.allocators.items():
            assert allocator.quarantined == len(saved.extents[name])
    launched = InFlightPins()
    launched.hold(back)
    while len(launched):
        launched.sweep()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("failing", range(5))
def test_a9_a_failed_operation_leaves_nothing_saved_restored_or_held(
    failing: int, late: bool, house: Callable[..., House]
) -> None:
    one = house("all", _Failing(AdversarialDevice(3) if late else CpuDevice()))
    assert isinstance(one.device, _Failing)
    before = one.leases("a request")
    chunk = one.pools.spec.unit_bytes("full")  # a page at a time: three, and fewer of the smaller pools
    good = one.save(one.extents(before), chunk)
    good.wait()
    one.device.fail_at(failing)
    with pytest.raises(RuntimeError, match="as told"):
        one.save(one.extents(before), chunk).wait()
    assert one.host.allocators["full"].leases == 1
    into = one.leases("again")
    one.device.fail_at(failing)
    back = one.bring(good, one.extents(into), chunk)
    with pytest.raises(RuntimeError, match="as told"):
        back.wait()
    assert back.done
    assert not back.complete
    release(good, before, into)


class _Failing:
    """A device whose n-th operation from `fail_at(n)` on fails when it runs."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._left = -1

    @property
    def torch_device(self) -> Any:
        return self._device.torch_device

    def fail_at(self, number: int) -> None:
        self._left = number

    def submit(
        self,
        op: DeviceOp,
        run: Callable[[], object],
        after: Sequence[Any] = (),
        *,
        gates: GatedLoads | None = None,
        keep: Any = (),
    ) -> Any:
        self._left -= 1
        return self._device.submit(op, _fail if self._left == -1 else run, after, gates=gates or {}, keep=keep)

    def touch(self, name: str, **spans: Any) -> None:
        self._device.touch(name, **spans)

    def allocate_host(self, nbytes: int) -> Any:
        return self._device.allocate_host(nbytes)


def _fail() -> None:
    raise RuntimeError("as told")


@pytest.mark.parametrize("short", ["full", "window", "state"])
def test_when_any_host_pool_is_short_nothing_is_taken(short: str, house: Callable[..., House]) -> None:
    one = house("all", host_count=5)
    taken = one.host.allocators[short].lease(4, "somebody")
    leases = {name: allocator.leases for name, allocator in one.host.allocators.items()}
    before = one.leases("a request")
    with pytest.raises(CapacityError, match=f"host {short} pages"):
        one.save(one.extents(before))
    assert {name: allocator.leases for name, allocator in one.host.allocators.items()} == leases
    taken.release()
    one.save(one.extents(before)).release()
    release(before)


def test_a_pool_with_nothing_to_do_is_ordinary_and_so_is_nothing_at_all(house: Callable[..., House]) -> None:
    one = house("all")
    before, after = one.leases("a request"), one.leases("again")
    only_state = {"state": one.extents(before)["state"], "window": PageExtent((), (), (), ())}
    saved = one.save(only_state)
    assert one.bring(saved, {"state": one.extents(after)["state"]}).complete
    empty = one.save({})
    assert (len(empty), empty.complete, one.bring(empty, {}).complete) == (0, True, True)
    release(saved, empty, before, after)


def test_some_of_what_was_saved_can_be_restored(house: Callable[..., House]) -> None:
    one = house("full+state")
    before, after = one.leases("a request"), one.leases("again")
    want = one.bytes_of(before)
    saved = one.save(one.extents(before))
    whole = one.extents(after)["full"]
    into = PageExtent(whole.indices[1:], whole.epochs[1:], whole.firsts[1:], whole.ends[1:])
    assert one.bring(saved, {"full": into}, only={"full": [1, 2], "state": []}).complete
    assert one.bytes_of(after)["full"][1:] == want["full"][1:]
    with pytest.raises(ValueError, match="as many as"):
        one.bring(saved, {"full": into}, only={"full": [1]})
    release(saved, before, after)


def test_a_page_whose_lease_has_ended_is_neither_saved_nor_restored_into(house: Callable[..., House]) -> None:
    one = house("full")
    before, after = one.leases("a request"), one.leases("again")
    extents, into = one.extents(before), one.extents(after)
    saved = one.save(extents)
    release(before, after)
    with pytest.raises(StaleLease, match="belongs to somebody else"):
        one.save(extents)
    with pytest.raises(StaleLease, match="belongs to somebody else"):
        one.bring(saved, into)
    release(saved, saved)


def test_a9_other_tokens_or_positions_than_asked_for_are_damage(house: Callable[..., House]) -> None:
    one = house("full")
    before, after = one.leases("a request"), one.leases("again")
    keys = [b"one", b"two", b"three"]
    saved = one.save({"full": PageExtent.of(before["full"], 0, COMMITTED, PAGE, keys)})
    assert [t.key for t in saved.tags("full")] == keys

    def found(first: int, end: int, asked: list[bytes]) -> list[str]:
        into = {"full": PageExtent.of(after["full"], first, end, PAGE, asked)}
        return [d.reason for d in one.bring(saved, into).damage]

    assert found(0, COMMITTED, keys) == []
    assert found(0, COMMITTED, [b"one", b"2", b"three"]) == ["it holds other tokens"]
    assert "it holds positions 8..10" in found(0, 11, keys)
    release(saved, before, after)


def test_state_of_another_shape_is_refused(house: Callable[..., House]) -> None:
    one, other = house("full+state"), house("full+window")
    before = one.leases("a request")
    saved = one.save({"full": one.extents(before)["full"]})
    with pytest.raises(LayoutMismatch, match="can't be moved"):
        restore(one.device, saved, other.pools, {}, chunk_bytes=1)
    with pytest.raises(LayoutMismatch, match="can't be moved"):
        offload(one.device, one.pools, other.host, {}, chunk_bytes=1, owner="a request")
    release(saved, before)


def test_unverified_state_is_copied_and_has_no_tags(house: Callable[..., House]) -> None:
    one = house("sparse")
    before, after = one.leases("a request"), one.leases("again")
    want = one.bytes_of(before)
    saved = one.save(one.extents(before), verify=False)
    assert saved.digests is None
    assert one.bring(saved, one.extents(after)).complete
    assert one.bytes_of(after) == want
    release(saved, before, after)


def test_pool_sets_of_these_tests_have_every_index_and_the_host_is_page_first() -> None:
    spec = pool_sets(PAGE)["all"]
    assert {b.index for p in spec.pools for b in p.buffers} == set(IndexSpace)
    assert host_pools(spec, 3).layout.order is LayoutOrder.PAGE_FIRST
