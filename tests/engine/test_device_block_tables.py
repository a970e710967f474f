"""Block tables that stay on the device: every step reads what its requests' tables were when it was launched."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from twinpool.cache.allocation import BlockTable, TableSlice
from twinpool.cache.device.device_copies import HostIntegers, upload_packed
from twinpool.cache.pool.page_allocator import EpochTable
from twinpool.engine.runner.device_rows import DeviceBlockTables, DeviceRows, PlannedTables

CPU = torch.device("cpu")
WAYS = ["written", "scattered"]


@pytest.fixture(params=WAYS)
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceBlockTables:
    """Brought up to date as a CPU does it, and as a GPU does."""
    if request.param == "scattered":
        monkeypatch.setattr(DeviceRows, "_write", DeviceRows._scatter)
    return DeviceBlockTables(CPU)


def listed(tables: DeviceBlockTables, planned: PlannedTables) -> list[tuple[list[int], list[int]]]:
    """What a step of this plan reads of each sequence: pages and epochs, from its first page on."""
    rows_b = torch.tensor(planned.rows)
    pages, epochs = tables.pages(planned, rows_b).tolist(), tables.epochs(planned, rows_b).tolist()
    return [(p[:stop], e[:stop]) for p, e, stop in zip(pages, epochs, planned.stops, strict=True)]


def plan(tables: DeviceBlockTables, chosen: Sequence[BlockTable]) -> PlannedTables:
    return tables.plan([TableSlice(table, 0, len(table)) for table in chosen], [len(table) for table in chosen])


def step(tables: DeviceBlockTables, *chosen: BlockTable) -> list[list[int]]:
    """The pages that a step of these reads."""
    planned = plan(tables, chosen)
    tables.update(planned)
    return [pages for pages, _ in listed(tables, planned)]


class Requests:
    """Requests that come, grow and go, and whose pages are numbered as they come."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self._pages, self.here = rng, count(1), list[BlockTable]()

    def taken(self, most: int) -> list[int]:
        return [next(self._pages) for _ in range(self.rng.randint(1, most))]

    def go_on(self) -> None:
        rng = self.rng
        self.here = [table for table in self.here if rng.random() < 0.9]
        for table in self.here:
            if rng.random() < 0.5:
                new = self.taken(3)
                table.put(len(table), new, [page % 7 for page in new])
        while len(self.here) < 3 or rng.random() < 0.4:
            pages = self.taken(200 if rng.random() < 0.1 else 20)
            self.here.append(BlockTable(pages, [page % 7 for page in pages]))

    def some(self) -> list[BlockTable]:
        """Of those that are here, in any order or as they came."""
        if self.rng.random() < 0.5:
            return list(self.here)
        return self.rng.sample(self.here, self.rng.randint(1, len(self.here)))


@pytest.mark.parametrize("seed", range(8))
def test_each_step_reads_its_tables_as_they_were_when_it_was_launched(tables: DeviceBlockTables, seed: int) -> None:
    """Steps run late, up to three behind the host, while requests grow, end, and others take their rows."""
    rng = random.Random(seed)
    requests, launched = Requests(rng), list[tuple[PlannedTables, list[tuple[list[int], list[int]]]]]()

    def run() -> None:
        planned, truth = launched.pop(0)
        tables.update(planned)
        assert listed(tables, planned) == truth

    for _ in range(120):
        requests.go_on()
        chosen = requests.some()
        launched.append((plan(tables, chosen), [(list(table.pages), list(table.epochs)) for table in chosen]))
        while len(launched) > rng.randint(0, 3):
            run()
    while launched:
        run()
    assert tables._rows.tensors[0].shape[0] < 120, "rows of those that ended were used again"


def test_a_row_is_used_again_once_its_table_is_gone_and_nothing_of_it_is_left(tables: DeviceBlockTables) -> None:
    first, second = BlockTable(range(1, 21), [5] * 20), BlockTable([30], [1])
    assert step(tables, first, second) == [list(range(1, 21)), [30]]
    del first
    third = BlockTable([40, 41], [2, 2])
    assert step(tables, third, second) == [[40, 41], [30]]
    assert third.row is not None
    assert third.row.number == 0
    assert tables._rows.tensors[0][0].tolist() == [40, 41] + [0] * (tables._rows.tensors[0].shape[1] - 2)
    assert tables._rows.tensors[1][0].tolist() == [2, 2] + [0] * (tables._rows.tensors[0].shape[1] - 2)


def test_what_was_entered_again_is_brought_again(tables: DeviceBlockTables) -> None:
    table = BlockTable([1, 2, 3], [0, 0, 0])
    step(tables, table)
    table.put(1, [8], [0])
    table.put(3, [9], [0])
    assert step(tables, table) == [[1, 8, 3, 9]]


def test_a_step_that_was_not_launched_leaves_its_entries_to_the_next(tables: DeviceBlockTables) -> None:
    table = BlockTable([1, 2], [0, 0])
    step(tables, table)
    table.put(2, [3], [0])
    tables.undo(plan(tables, [table]))
    assert step(tables, table) == [[1, 2, 3]]
    with pytest.raises(AssertionError, match="the order in which they are planned"):
        tables.undo(PlannedTables([0], [0], [1], (), 0))


def test_a_step_after_one_that_never_ran_is_refused_and_not_computed_from_half_a_table() -> None:
    tables, table = DeviceBlockTables(CPU), BlockTable([1], [0])
    plan(tables, [table])
    later = plan(tables, [table])
    with pytest.raises(RuntimeError, match="of step 0 never came to the device"):
        tables.update(later)


def test_a_table_that_is_too_short_for_its_positions_is_refused() -> None:
    tables, table = DeviceBlockTables(CPU), BlockTable([1, 2], [0, 0])
    for reach, stop in ((2, 3), (3, 3)):
        with pytest.raises(AssertionError, match="too short"):
            tables.plan([TableSlice(table, 0, reach)], [stop])


def windows(tables: DeviceBlockTables, slices: Sequence[TableSlice]) -> Iterator[tuple[list[int], list[int]]]:
    planned = tables.plan(slices, [part.stop for part in slices])
    tables.update(planned)
    firsts_b = torch.tensor(planned.firsts, dtype=torch.int32)
    for part, pages, epochs in zip(
        slices, *(t.tolist() for t in tables.windows(planned, torch.tensor(planned.rows), firsts_b)), strict=True
    ):
        yield pages[: part.stop - part.first], epochs[: part.stop - part.first]


def test_of_windows_only_the_pages_from_the_first_that_is_seen_are_read(tables: DeviceBlockTables) -> None:
    """The others are cleared behind them, and given to somebody else."""
    near, far = BlockTable(range(1, 4), [3] * 3), BlockTable(range(11, 71), [4] * 60)
    assert list(windows(tables, [TableSlice(near, 0, 3), TableSlice(far, 57, 60)])) == [
        ([1, 2, 3], [3, 3, 3]),
        ([68, 69, 70], [4, 4, 4]),
    ]
    far.clear(0, 58)
    far.put(60, [99], [9])
    assert list(windows(tables, [TableSlice(far, 58, 61), TableSlice(near, 1, 3)])) == [
        ([69, 70, 99], [4, 4, 9]),
        ([2, 3], [3, 3]),
    ]


# ------------------------------------------------------------ what is stale


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_stale_exactly_where_a_page_was_freed_since_it_was_leased(seed: int) -> None:
    """Beside a plain comparison of everything, in every step: while others' pages are freed, and while nothing is."""
    rng = random.Random(seed)
    tables, requests, epochs = DeviceBlockTables(CPU), Requests(rng), EpochTable(60_000)
    found = 0
    for _ in range(150):
        requests.go_on()
        for table in requests.here:  # Leased now, whatever happened to these pages before.
            new = range(0 if table.row is None else table.row.copied, len(table))
            for at in new:
                table.epochs[at] = epochs.of([table.pages[at]])[0]
        if rng.random() < 0.3:
            epochs.bump(rng.sample(range(50_000, 60_000), 3))
        if rng.random() < 0.1:
            victim = rng.choice(requests.here)
            epochs.bump([rng.choice(list(victim.pages))])
        chosen = requests.some()
        planned = plan(tables, chosen)
        tables.update(planned)
        now = [list(epochs.of(list(table.pages))) != list(table.epochs) for table in chosen]
        assert tables.stale(planned, epochs).tolist() == now
        found += sum(now)
        requests.here = [table for table in requests.here if list(epochs.of(list(table.pages))) == list(table.epochs)]
    assert found


def test_no_epoch_is_looked_at_again_while_nothing_is_freed_and_only_new_entries_while_tables_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables, epochs = DeviceBlockTables(CPU), EpochTable(100)
    first, second = BlockTable([1, 2, 3], [0, 0, 0]), BlockTable([4, 5], [0, 0])
    looked_at: list[int] = []
    look_up = EpochTable.look_up

    def counting(table: EpochTable, pages: Any) -> Any:
        looked_at.append(len(pages))
        return look_up(table, pages)

    monkeypatch.setattr(EpochTable, "look_up", counting)

    def rows() -> int:
        """How many rows a step of both looks at."""
        looked_at.clear()
        planned = plan(tables, [first, second])
        tables.update(planned)
        assert tables.stale(planned, epochs).tolist() == [False, False]
        return sum(looked_at)

    assert [rows(), rows(), rows()] == [2, 0, 0]
    second.put(2, [6], [0])
    assert [rows(), rows()] == [1, 0]
    epochs.bump([50])
    assert [rows(), rows()] == [2, 0]


def test_what_the_last_owner_of_a_row_was_found_to_be_says_nothing_of_the_next() -> None:
    """Nothing was freed between them: the page was, before the first one was looked at."""
    tables, epochs = DeviceBlockTables(CPU), EpochTable(100)
    first, second = BlockTable(range(1, 21), [0] * 20), BlockTable([30, 31], [0, 0])
    epochs.bump([31])
    planned = plan(tables, [first])
    tables.update(planned)
    assert tables.stale(planned, epochs).tolist() == [False]
    del first
    planned = plan(tables, [second])
    assert planned.rows == [0]
    tables.update(planned)
    assert tables.stale(planned, epochs).tolist() == [True]


def test_a_row_that_was_found_stale_is_stale_in_the_steps_that_were_planned_ahead_with_it() -> None:
    """Nothing is freed between them; its neighbour stays fresh throughout."""
    tables, epochs = DeviceBlockTables(CPU), EpochTable(100)
    fine, given_away = BlockTable([1, 2], [0, 0]), BlockTable([30, 31], [0, 0])
    ahead = [plan(tables, [fine, given_away]) for _ in range(2)] + [plan(tables, [given_away])]
    epochs.bump([31])
    found = []
    for planned in ahead:
        tables.update(planned)
        found.append(tables.stale(planned, epochs).tolist())
    assert found == [[False, True], [False, True], [True]]


# ------------------------------------------------------------ one copy


def test_arrays_that_are_uploaded_together_come_out_as_they_went_in() -> None:
    rng = np.random.default_rng(4)
    arrays: list[HostIntegers] = [
        rng.integers(-(2**31), 2**31, 7).astype(np.int32),
        rng.integers(-(2**62), 2**62, 5),
        np.zeros((0, 1), np.int32),
        rng.integers(0, 9, (3, 1)).astype(np.int32),
        rng.integers(0, 9, 1),
    ]
    copies = upload_packed(arrays, CPU)
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1, "one copy"
    for array, copy in zip(arrays, copies, strict=True):
        assert copy.dtype == torch.from_numpy(array).dtype
        assert np.array_equal(copy.numpy(), array)


def test_empty_arrays_go_up_with_others() -> None:
    """A step that draws nothing has no rows to draw for."""
    empty = np.zeros(0, dtype=np.int64)
    there = upload_packed([np.array([1, 2]), empty, np.array([3], dtype=np.int32)], CPU)
    assert [one.tolist() for one in there] == [[1, 2], [], [3]]
