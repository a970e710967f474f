"""The index that routers read, fed by real workers over ZMQ, against what the workers' trees hold."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.family_scenes import greedy
from tests.support.worker_pair import Pair, pair
from tests.workers.test_arena import KeptMemory
from tests.workers.test_kv_events_of_workers import SMALL, conversation, events, held, managers
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.messages.kv_events import EventMedium
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.kv_indexer.event_feed import EventFeed
from twinpool.router.kv_indexer.holder_sets import DEVICE, HOST
from twinpool.router.kv_indexer.holder_table import KVIndexReader, ToldPrefix
from twinpool.router.kv_indexer.table_memory import TableMemory, TableSize
from twinpool.router.state.prefix_hashes import keys_of, marked, prefix_hashes

PAGE = 16
NODE = "here"
TIERS = {EventMedium.DEVICE: DEVICE, EventMedium.HOST: HOST}
Holders = dict[int, dict[str, int]]
"""Tiers by worker by key."""


def view(status: WorkerStatus) -> WorkerView:
    fits = WorkerLimits(1000, 1000)
    return WorkerView(WorkerRecord(status.name, status.role, status.incarnation, 1, NODE, "", "", fits), status)


@contextmanager
def index(both: Pair, path: Path) -> Iterator[EventFeed]:
    feed = EventFeed(TableMemory.create(path, TableSize(4096, 64, 256), PAGE), SystemClock(), NODE)
    feed.follow([view(worker.status()) for worker in (both.prefill, both.decode)])
    yield feed
    feed.close()


def in_trees(both: Pair) -> Holders:
    """Marks that the trees hold, walked from their roots."""
    found: Holders = {}
    names = [str(status.name) for status in (both.prefill.status(), both.decode.status())]
    for name, manager in zip(names, managers(both), strict=True):
        for medium, pages in held(manager).items():
            if pages:
                keys = keys_of(list(pages))
                for key in keys[marked(keys, PAGE)].tolist():
                    holders = found.setdefault(key, {})
                    holders[name] = holders.get(name, 0) | TIERS[medium]
    return found


def in_table(feed: EventFeed) -> Holders:
    memory = feed.table.memory
    names = {slot: bytes(memory.slots["name"][slot]).decode() for slot in range(64) if memory.slots["used"][slot]}
    found: Holders = {}
    for key, value in zip(memory.keys.reshape(-1).tolist(), memory.holders.reshape(-1).tolist(), strict=True):
        if value:
            found[key] = {names[s]: t for s, t in feed.table._sets.holders(value).items() if s in names}
    return {key: holders for key, holders in found.items() if holders}


def catch_up(both: Pair, feed: EventFeed) -> None:
    deadline = time.monotonic() + 60
    while in_table(feed) != in_trees(both) or not all(w.reader.complete for w in feed._workers.values()):
        both.step()
        feed.round(0.001)
        if time.monotonic() > deadline:
            assert in_table(feed) == in_trees(both)
    assert feed.table.check() == []


@pytest.mark.slow
def test_the_table_says_exactly_what_the_trees_hold(model: Path, tmp_path: Path) -> None:
    cache: dict[str, Any] = SMALL | {"load_back": "always", "events": events()}
    with pair(model, tokens=640, cache=cache) as both, index(both, tmp_path / "index") as feed:
        rng = random.Random(5)
        for _ in range(4):
            conversation(both, rng, 6, [])
            both.settle()
            catch_up(both, feed)
        assert both.prefill.status().counters["pages_evicted"]
        tiers = {tiers for holders in in_table(feed).values() for tiers in holders.values()}
        assert {HOST, DEVICE | HOST} <= tiers, "some were on the host alone"


@pytest.mark.slow
def test_who_joins_late_finds_all_of_it(model: Path, tmp_path: Path) -> None:
    with pair(model, tokens=640, cache=SMALL | {"events": events(buffer_batches=3)}) as both:
        conversation(both, random.Random(6), 8, [])
        both.settle()
        with index(both, tmp_path / "index") as feed:
            catch_up(both, feed)
            conversation(both, random.Random(7), 3, [])
            both.settle()
            catch_up(both, feed)


@pytest.mark.slow
def test_what_the_next_incarnation_adopts_is_found_before_it_has_computed_anything(model: Path, tmp_path: Path) -> None:
    arenas = {role: KeptMemory() for role in PAIR}
    prompt = [(5 * i * i + i) % 250 + 1 for i in range(300)]
    cache = {"host_bytes": 32 << 20, "load_back": "always", "events": events()}
    with pair(model, tokens=4096, arenas=arenas, cache=cache, settle=False) as both:
        both.run(both.submit(prompt, greedy(4)))
        both.settle()
    told = KVIndexReader(tmp_path / "index")
    with pair(model, tokens=4096, arenas=arenas, cache=cache) as both, index(both, tmp_path / "index") as feed:
        assert both.prefill.status().counters["arena_pages_adopted"]
        catch_up(both, feed)
        feed.round(0)
        found = told.find(prefix_hashes(prompt), time.monotonic())
        assert isinstance(found, ToldPrefix)
        status = both.prefill.status()
        slot = found.slots.workers[status.name, status.incarnation]
        assert found.live[slot]
        last = max(found_end for found_end in prefix_hashes(prompt).asked_marks[1].tolist())
        assert (found.depths.device[slot], found.depths.held[slot]) == (0, last)
        (answer,) = both.run(both.submit(prompt, SamplingParams(max_tokens=2, temperature=0.0)))
        assert answer.progress[Role.PREFILL].cached_by_tier["host"] >= last, "and it is there"
