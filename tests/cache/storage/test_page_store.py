"""Pages on storage by any number of ranks: what one has put by, every other fetches whole, or not at all."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.support.pool_sets import NAMES
from tests.support.stand_in_ranks import RankedSeat, content, fill, headed_sets, tp_manager
from twinpool.cache.device.device_port import HOST
from twinpool.cache.memory.kv_cache_spec import LayoutOrder, PoolSetSpec
from twinpool.cache.pool.tp_ranks import merged
from twinpool.cache.storage import page_store
from twinpool.cache.storage.backends.memory_backend import MemoryBackend
from twinpool.cache.storage.io_queue import InlineIoQueue
from twinpool.cache.storage.page_store import RankPageStore, merged_outcomes
from twinpool.cache.storage.storage_backend import ObjectBuffer, ObjectName, ObjectOutcome, ObjectVerdict
from twinpool.contracts.messages.rank_orders import StoredPage

SIZES = (1, 2, 4)
KEYS = [bytes([n]) * 16 for n in range(3)]


class Refusing(MemoryBackend):
    """Writes all objects but one."""

    refused: ObjectName | None = None

    def write(self, items: Sequence[ObjectBuffer]) -> list[ObjectOutcome]:
        written = super().write(items)
        failed = ObjectOutcome(ObjectVerdict.FAILED, reason="the disk failed")
        return [failed if item.name == self.refused else one for item, one in zip(items, written, strict=True)]


@dataclass
class Ranks:
    """The host tiers of all ranks of a worker, each with its shelf on the one store."""

    manager: RankedSeat
    shelves: list[RankPageStore]
    queues: list[InlineIoQueue]

    def pages(self, pool: str) -> list[StoredPage]:
        return [StoredPage(pool, key, 1 + n, 4 * n, 4 * n + 4) for n, key in enumerate(KEYS)]

    def digests(self, pool: str) -> list[int]:
        pages = self.pages(pool)
        return self.manager.leader.digest(pool, [p.at for p in pages], [p.first for p in pages], [p.end for p in pages])

    def run(self) -> None:
        while any(queue.run_all() for queue in self.queues):
            pass


def ranks(whole: PoolSetSpec, size: int, backend: MemoryBackend) -> Ranks:
    manager = tp_manager(whole, size, 5, HOST, order=LayoutOrder.PAGE_FIRST)
    queues = [InlineIoQueue(backend) for _ in range(size)]
    shelves = [RankPageStore(queue, pools, "model", rank, size) for rank, (queue, pools) in enumerate(
        zip(queues, manager.pools, strict=True))]  # fmt: skip
    return Ranks(manager, shelves, queues)


def put(writer: Ranks, pool: str) -> None:
    pending = [page_store.put_mine(writer.pages(pool)) for page_store in writer.shelves]
    writer.run()
    assert all(outcome.ok for one in pending for outcome in one.result())


def found(reader: Ranks, pool: str) -> list[bool]:
    pending = [page_store.exists([(pool, key) for key in KEYS]) for page_store in reader.shelves]
    while not all([one.done for one in pending]):
        reader.run()
    return [all(ranks) for ranks in zip(*(one.result() for one in pending), strict=True)]


def fetch(reader: Ranks, pool: str) -> list[ObjectOutcome]:
    pending = [page_store.fetch_parts(reader.pages(pool)) for page_store in reader.shelves]
    reader.run()
    assert all(one.done for one in pending)
    return merged_outcomes(reader.manager.whole, reader.pages(pool), [one.result() for one in pending])


@pytest.mark.parametrize(("writers", "readers"), list(itertools.product(SIZES, repeat=2)))
@pytest.mark.parametrize("name", NAMES)
def test_what_any_number_of_ranks_has_put_by_any_other_fetches_head_by_head(
    name: str, writers: int, readers: int
) -> None:
    whole, backend = headed_sets()[name], MemoryBackend(secrets.token_hex(8), 1 << 20)
    writer, reader = ranks(whole, writers, backend), ranks(whole, readers, backend)
    fill(writer.manager, 5)
    for pool in whole.by_name:
        assert not any(found(reader, pool))
        put(writer, pool)
        assert all(found(reader, pool))
        outcomes = fetch(reader, pool)
        assert [outcome.verdict for outcome in outcomes] == [ObjectVerdict.FOUND] * 3
        assert [outcome.digest for outcome in outcomes] == writer.digests(pool) == reader.digests(pool)
        for page in reader.pages(pool):
            assert content(reader.manager, pool, page.at) == content(writer.manager, pool, page.at)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 2), (2, 1), (1, 4)])
def test_a9_a_page_of_which_one_object_is_gone_is_missing_for_every_reader(writers: int, readers: int) -> None:
    whole, backend = headed_sets()["full"], MemoryBackend(secrets.token_hex(8), 1 << 20)
    writer, reader = ranks(whole, writers, backend), ranks(whole, readers, backend)
    fill(writer.manager, 5)
    put(writer, "full")
    assert all(found(reader, "full"))
    last = writer.shelves[-1]
    backend.delete([last.name("full", KEYS[1], part) for part in last.slicer.own("full")])
    verdicts = [outcome.verdict for outcome in fetch(reader, "full")]
    assert verdicts == [ObjectVerdict.FOUND, ObjectVerdict.MISSING, ObjectVerdict.FOUND]


@pytest.mark.parametrize("name", ["full", "full+state"])
def test_a9_a_page_of_which_any_one_object_is_gone_is_not_found(name: str) -> None:
    """Whichever of its objects it is: those that are there make up no page."""
    whole = headed_sets()[name]
    for pool in whole.by_name:
        for size in (1, 2):
            backend = MemoryBackend(secrets.token_hex(8), 1 << 20)
            writer = ranks(whole, size, backend)
            fill(writer.manager, 5)
            put(writer, pool)
            (rank, *_) = writer.shelves
            objects = [rank.name(pool, KEYS[1], part) for part in rank.slicer.own(pool)]
            assert name == "full" or pool == "full" or len(objects) == 2
            for gone in objects:
                put(writer, pool)
                assert found(writer, pool) == [True, True, True]
                backend.delete([gone])
                assert found(writer, pool) == [True, False, True]


@pytest.mark.parametrize("name", ["full", "full+state"])
def test_a9_a_page_of_which_any_one_object_was_refused_is_not_told_as_stored(name: str) -> None:
    """Whichever of its objects it is: the others may have been there before."""
    whole = headed_sets()[name]
    for pool in whole.by_name:
        backend = Refusing(secrets.token_hex(8), 1 << 20)
        writer = ranks(whole, 2, backend)
        fill(writer.manager, 5)
        put(writer, pool)
        shelf = writer.shelves[0]
        objects = [shelf.name(pool, KEYS[1], part) for part in shelf.slicer.own(pool)]
        assert name == "full" or pool == "full" or len(objects) == 2
        for backend.refused in objects:
            pending = shelf.put_mine(writer.pages(pool))
            writer.run()
            assert [outcome.ok for outcome in pending.result()] == [True, False, True]


def test_a_page_is_fetched_as_the_latest_lookup_has_found_it() -> None:
    """A worker of four ranks had stored it and this one found it there; by now it has stored the page itself, and the
    others' objects are gone."""
    whole, backend = headed_sets()["full"], MemoryBackend(secrets.token_hex(8), 1 << 20)
    others, reader = ranks(whole, 4, backend), ranks(whole, 1, backend)
    for worker in (others, reader):
        fill(worker.manager, 5)
    put(others, "full")
    assert all(found(reader, "full")), "and the request that asked has left"
    put(reader, "full")
    for one in others.shelves:
        backend.delete([one.name("full", key, part) for key in KEYS for part in one.slicer.own("full")])
    assert all(found(reader, "full"))
    assert [outcome.verdict for outcome in fetch(reader, "full")] == [ObjectVerdict.FOUND] * 3


def test_what_a_lookup_has_found_is_for_one_fetch_and_not_remembered_behind_it() -> None:
    """By the next fetch without a lookup this worker may have stored the page itself, and the others' be gone."""
    whole, backend = headed_sets()["full"], MemoryBackend(secrets.token_hex(8), 1 << 20)
    others, reader = ranks(whole, 4, backend), ranks(whole, 1, backend)
    for worker in (others, reader):
        fill(worker.manager, 5)
    put(others, "full")
    assert all(found(reader, "full"))
    assert [outcome.verdict for outcome in fetch(reader, "full")] == [ObjectVerdict.FOUND] * 3
    put(reader, "full")
    for one in others.shelves:
        backend.delete([one.name("full", key, part) for key in KEYS for part in one.slicer.own("full")])
    assert [outcome.verdict for outcome in fetch(reader, "full")] == [ObjectVerdict.FOUND] * 3
    assert not reader.shelves[0].plans


def test_the_latest_lookups_alone_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that have left before their fetch nothing else would take them away."""
    monkeypatch.setattr(page_store, "_REMEMBERED", 2)
    whole, backend = headed_sets()["full"], MemoryBackend(secrets.token_hex(8), 1 << 20)
    others, reader = ranks(whole, 4, backend), ranks(whole, 1, backend)
    put(others, "full")
    assert all(found(reader, "full"))
    assert list(reader.shelves[0].plans) == [("full", key) for key in KEYS[-2:]]


def test_the_digest_of_a_page_with_parts_of_both_kinds_is_that_of_all_its_ranks() -> None:
    whole, backend = headed_sets()["full+state"], MemoryBackend(secrets.token_hex(8), 1 << 20)
    writer = ranks(whole, 2, backend)
    fill(writer.manager, 6)
    put(writer, "state")
    parts = [page_store.fetch_parts(writer.pages("state")) for page_store in writer.shelves]
    writer.run()
    by_rank = [[list(page.digests) for page in one.result()] for one in parts]
    pages = [merged(whole.by_name["state"], [[[d] for d in rank[n]] for rank in by_rank])[0] for n in range(3)]
    assert pages == writer.digests("state")


def test_one_rank_asks_for_others_sizes_with_one_name_each_and_only_where_heads_can_be_sliced() -> None:
    whole, backend = headed_sets()["all"], MemoryBackend(secrets.token_hex(8), 1 << 20)
    reader = ranks(whole, 1, backend)
    for pool, questions in (("full", 1), ("window", 2)):
        pending = reader.shelves[0].exists([(pool, key) for key in KEYS])
        asked = 0
        while not pending.done:
            asked += reader.queues[0].run_all()
        assert asked == questions
        assert pending.result() == [False] * 3
