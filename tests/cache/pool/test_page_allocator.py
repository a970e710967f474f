import pytest

from tests.support.pool_sets import free_list
from twinpool.cache.pool.page_allocator import PageAllocator
from twinpool.contracts.errors import CapacityError, StaleLease


def test_a_lease_takes_all_or_nothing() -> None:
    pages = PageAllocator("pages", 5, first=1)
    with pytest.raises(CapacityError, match="5 pages wanted by r1, 4 of 4 free"):
        pages.lease(5, "r1")
    assert pages.free == 4
    assert pages.check() == []


def test_b1_release_is_idempotent() -> None:
    pages = PageAllocator("pages", 5, first=1)
    lease = pages.lease(3, "r1")
    other = pages.lease(1, "r2")
    lease.release()
    lease.release()
    assert pages.free == 3
    assert other.live
    assert pages.check() == []


def test_a_released_lease_is_stale_even_when_its_page_is_leased_again() -> None:
    pages = PageAllocator("pages", 2, first=1)
    old = pages.lease(1, "r1")
    epoch = old.epochs[0]
    old.release()
    new = pages.lease(1, "r2")
    assert new.indices == old.indices
    assert new.epochs[0] > epoch
    with pytest.raises(StaleLease, match="r1 has ended"):
        old.require()


def test_a6_a_pinned_page_is_not_given_out_until_the_pin_is_gone() -> None:
    pages = PageAllocator("pages", 3, first=1)
    lease = pages.lease(2, "r1")
    pin = pages.pin(lease.indices[:1], "send")
    second = pages.pin(lease.indices[:1], "send")
    lease.release()
    assert (pages.free, pages.quarantined) == (1, 1)
    pin.release()
    pin.release()
    assert pages.free == 1, "another pin holds it"
    second.release()
    assert (pages.free, pages.quarantined) == (2, 0)
    assert pages.check() == []


def test_split_parts_are_released_on_their_own() -> None:
    pages = PageAllocator("pages", 8, first=1)
    lease = pages.lease(6, "r1")
    whole = lease.indices
    part = lease.split(2, "tree", start=1)
    assert part.indices == whole[1:3]
    assert lease.indices == whole[:1] + whole[3:]
    lease.release()
    assert pages.free == 7 - 2
    part.release()
    assert pages.free == 7
    assert pages.check() == []


def test_b8_check_names_each_planted_violation() -> None:
    pages = PageAllocator("pages", 6, first=1)
    lease = pages.lease(2, "r1")
    free_list(pages).append(lease.indices[0])
    assert pages.check() == [f"pages: {lease.indices[0]} belongs to r1 and the free list"]
    free_list(pages).pop()
    lost = free_list(pages).pop()
    assert pages.check() == [f"pages: {lost} belongs to nobody"]
    free_list(pages).append(lost)
    pages._epochs[lease.indices[1]] += 1
    assert pages.check() == ["pages: lease 1 of r1 has an old epoch"]
    pages._epochs[lease.indices[1]] -= 1
    pages._pinned[lost] += 1
    assert pages.check() == ["pages: pin counts differ from the pins"]


def test_nothing_is_cut_off_a_lease_that_has_ended() -> None:
    allocator = PageAllocator("pages", 9, first=1)
    lease = allocator.lease(4, "a request")
    lease.release()
    with pytest.raises(StaleLease, match="has ended"):
        lease.cut(2)
    assert allocator.check() == []
    assert allocator.free == 8, "its pages are free once"
