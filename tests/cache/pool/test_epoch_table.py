import pytest
import torch

from twinpool.cache.pool import page_allocator
from twinpool.cache.pool.page_allocator import EpochTable, PageAllocator


def test_releases_are_in_the_table_that_the_allocator_shares() -> None:
    pages = PageAllocator("pages", 6, first=1)
    table = pages.epochs.on(torch.device("cpu"))
    lease = pages.lease(3, "r1")
    lease.split(1, "tree").release()
    assert table.tolist() == [0, 1, 0, 0, 0, 0]
    lease.release()
    assert table.tolist() == [0, 1, 1, 1, 0, 0]
    assert pages.epochs.of([0, 3]) == (0, 1)


def test_a_copy_elsewhere_changes_with_the_steps_and_not_between_them() -> None:
    table, here = EpochTable(6), torch.device("cpu")
    table.bump([4])
    copy = table.copy_on(here)
    assert copy.data_ptr() != table.host.data_ptr()
    assert copy.tolist() == [0, 0, 0, 0, 1, 0]
    table.bump([1, 2])
    table.bump([2, 5])
    assert copy.tolist() == [0, 0, 0, 0, 1, 0], "a step that was launched before saw no later free"
    assert table.copy_on(here) is copy
    assert copy.tolist() == table.host.tolist() == [0, 1, 2, 0, 1, 1]


def test_however_many_pages_come_and_go_between_two_steps_the_next_step_sees_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_allocator, "_MAX_BUMPED", 3)
    table, here = EpochTable(6), torch.device("cpu")
    copy = table.copy_on(here)
    for page in (1, 2, 3, 4, 5, 5, 5, 2):
        table.bump([page])
    assert table.copy_on(here).tolist() == copy.tolist() == [0, 1, 2, 1, 1, 3]
