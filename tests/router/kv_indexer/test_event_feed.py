"""The index from end to end: publishers of KV events over ZMQ, the feed, the table, and a router's questions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from twinpool.cache.tiers.kv_event_publisher import KVEventLog, KVEventPublisher
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cache_config import EventsConfig
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.contracts.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventMedium, KvEvent
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.router.kv_indexer.event_feed import EVERY_S, EventFeed, reachable
from twinpool.router.kv_indexer.holder_table import PULSE_S, KVIndexReader, ToldPrefix
from twinpool.router.kv_indexer.kv_event_subscriber import KVEventSubscriber
from twinpool.router.kv_indexer.prefix_indexes import PrefixIndexes
from twinpool.router.kv_indexer.table_memory import TableMemory, TableSize
from twinpool.router.state.prefix_hashes import PrefixHashes, prefix_hashes
from twinpool.router.state.worker_table import WorkerEntry, WorkerKey, WorkerTable

DEVICE, HOST, STORAGE = EventMedium.DEVICE, EventMedium.HOST, EventMedium.STORAGE
PAGE = 16
LOOPBACK = "tcp://127.0.0.1:0"
NODE = "here"


def tokens(number: int, pages: int = 64) -> tuple[int, ...]:
    return tuple(range(1000 * number, 1000 * number + pages * PAGE))


def stored(prompt: tuple[int, ...], tier: EventMedium = DEVICE, pages: slice = slice(None), salt: str = "") -> KvEvent:
    hashes = block_hashes(prompt, PAGE, salt)
    first = pages.start or 0
    some = hashes[pages]
    parent = hashes[first - 1] if first else None
    return BlockStored(tier, parent, tuple(some), prompt[first * PAGE : (first + len(some)) * PAGE], PAGE, salt)


def marks_of(hashes: PrefixHashes, upto: int | None = None) -> int:
    """Where the last mark of a prompt's first positions ends."""
    return max((end for end in hashes.asked_marks[1].tolist() if upto is None or end <= upto), default=0)


@dataclass
class Publisher:
    """What a worker publishes, without the worker."""

    name: str
    incarnation: int = 1
    buffer_batches: int = 10_000
    truth: list[KvEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = KVEventLog()
        config = EventsConfig(endpoint=LOOPBACK, replay_endpoint=LOOPBACK, buffer_batches=self.buffer_batches)
        self.sockets = KVEventPublisher(config, self.log, time.time, 0, lambda: list(self.truth))

    def say(self, *events: KvEvent) -> None:
        for event in events:
            self.log.emit(event)
        self.sockets.round()

    @property
    def key(self) -> WorkerKey:
        return WorkerName(self.name), Incarnation(self.incarnation)

    @property
    def view(self) -> WorkerView:
        name, incarnation = self.key
        record = WorkerRecord(name, Role.PREFILL, incarnation, 1, NODE, "", "", WorkerLimits(1000, 1000))
        status = WorkerStatus(name, Role.PREFILL, "ready", 1, NODE, incarnation, 0, 0, 0, 0)
        told = replace(status, kv_events=self.sockets.endpoint, kv_replay=self.sockets.replay_endpoint)
        return WorkerView(record, told)


class Index:
    """A feed and a router's view of its table, under one clock."""

    def __init__(self, path: Path, slots: int = 64) -> None:
        self.clock = ManualClock(100.0)
        memory = TableMemory.create(path, TableSize(2048, slots, 64), PAGE)
        self.paused: list[float] = []
        self.feed = EventFeed(memory, self.clock, NODE, pause=self.paused.append)
        self.told = KVIndexReader(path)
        self.publishers: list[Publisher] = []

    def publish(self, name: str, incarnation: int = 1, buffer_batches: int = 10_000) -> Publisher:
        publisher = Publisher(name, incarnation, buffer_batches)
        self.publishers.append(publisher)
        return publisher

    def follow(self, *publishers: Publisher) -> None:
        self.feed.follow([p.view for p in publishers])

    def until(self, done: Callable[[], bool]) -> None:
        """Let publishers and the feed go on until something is so."""
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, "it never is"
            for publisher in self.publishers:
                publisher.sockets.round()
            self.feed.round(0.005)
            self.clock.advance(0.05)
        assert self.feed.table.check() == []

    def find(self, prompt: Iterable[int], salt: str = "") -> ToldPrefix:
        told = self.told.find(prefix_hashes(tuple(prompt), salt), self.clock.now())
        assert told is not None
        return told

    def held(self, publisher: Publisher, prompt: Iterable[int], salt: str = "") -> tuple[int, int] | None:
        """Positions on the device, and on either tier; None while the worker isn't live."""
        self.feed.round(0)
        told = self.find(prompt, salt)
        slot = told.slots.workers.get(publisher.key)
        if slot is None or not told.live[slot]:
            return None
        return int(told.depths.device[slot]), int(told.depths.held[slot])


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / "index")
    yield made
    for publisher in made.publishers:
        publisher.sockets.close()
    made.feed.close()


def test_while_nobody_is_followed_a_round_waits_all_the_same(index: Index) -> None:
    """A cluster that starts has none for a while, and a core that spins is one that its workers don't start with."""
    index.feed.round(0.2)
    assert index.paused == [0.2]
    worker = index.publish("prefill-0")
    index.follow(worker)
    index.feed.round(0.005)
    assert index.paused == [0.2], "its sockets are waited for"
    index.follow()
    index.feed.round(0.1)
    assert index.paused == [0.2, 0.1]


def test_what_workers_say_is_found_by_tier(index: Index) -> None:
    one, two, prompt = index.publish("prefill-0"), index.publish("prefill-1"), tokens(1)
    index.follow(one, two)
    index.until(lambda: index.held(one, prompt) == index.held(two, prompt) == (0, 0))
    one.say(stored(prompt))
    two.say(stored(prompt, pages=slice(0, 40)))
    two.say(stored(prompt, HOST))
    hashes = prefix_hashes(prompt)
    whole, part = marks_of(hashes), marks_of(hashes, 40 * PAGE)
    index.until(lambda: index.held(one, prompt) == (whole, whole) and index.held(two, prompt) == (part, whole))
    assert index.held(one, prompt, "a salt") == (0, 0), "a tenant finds nothing of another's"
    one.say(BlockRemoved(DEVICE, tuple(block_hashes(prompt, PAGE)[20:])))
    kept = marks_of(hashes, 20 * PAGE)
    index.until(lambda: index.held(one, prompt) == (kept, kept))
    two.say(AllBlocksCleared(HOST))
    index.until(lambda: index.held(two, prompt) == (part, part))
    two.say(AllBlocksCleared())
    index.until(lambda: index.held(two, prompt) == (0, 0))


def test_who_joins_late_gets_all_of_it_though_the_first_batches_are_gone(index: Index) -> None:
    one, first, last = index.publish("prefill-0", buffer_batches=2), tokens(1), tokens(2)
    one.say(stored(first))
    for number in range(3, 9):
        one.say(stored(tokens(number, 4)))
    one.say(stored(last))
    one.truth += [stored(first), stored(last)]
    index.follow(one)
    whole = marks_of(prefix_hashes(first))
    index.until(lambda: index.held(one, first) == (whole, whole))
    assert index.held(one, last) == (marks_of(prefix_hashes(last)),) * 2
    assert index.held(one, tokens(3, 4)) == (0, 0), "what the worker no longer holds is not believed"


def test_d8_an_incarnation_takes_its_blocks_with_it_and_the_next_one_tells_what_it_adopted(index: Index) -> None:
    first, prompt = index.publish("prefill-0"), tokens(1)
    index.follow(first)
    first.say(stored(prompt))
    whole = marks_of(prefix_hashes(prompt))
    index.until(lambda: index.held(first, prompt) == (whole, whole))
    second = index.publish("prefill-0", incarnation=2)
    index.follow(second)
    index.until(lambda: index.held(second, prompt) == (0, 0))
    assert index.held(first, prompt) is None
    second.say(stored(prompt, HOST, slice(0, 30)))
    adopted = marks_of(prefix_hashes(prompt), 30 * PAGE)
    index.until(lambda: index.held(second, prompt) == (0, adopted))
    assert list(index.feed._workers) == [second.key]


def test_storage_is_told_of_once_whoever_wrote_there(index: Index) -> None:
    one, two, prompt = index.publish("prefill-0"), index.publish("prefill-1"), tokens(1)
    index.follow(one, two)
    one.say(stored(prompt, STORAGE, slice(0, 30)))
    two.say(stored(prompt, STORAGE, slice(30, 50)))
    kept = marks_of(prefix_hashes(prompt), 50 * PAGE)
    index.until(lambda: index.held(one, prompt) is not None and index.find(prompt).storage == kept)
    assert index.held(one, prompt) == (0, 0)
    index.follow()
    index.until(lambda: not index.feed.slots.left)
    assert index.find(prompt).storage == kept, "storage outlives the workers"


def test_pages_of_another_size_are_left_out_and_told_of_once(index: Index, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "twinpool.router")
    one = index.publish("prefill-0")
    index.follow(one)
    prompt = tuple(range(320))
    one.say(BlockStored(DEVICE, None, tuple(block_hashes(prompt, 32)), prompt, 32))
    one.say(stored(tokens(2)))
    index.until(lambda: index.held(one, tokens(2)) not in (None, (0, 0)))
    assert index.feed.table.entries == len(prefix_hashes(tokens(2)).asked_marks[0])
    one.say(stored(tokens(3)))
    index.until(lambda: index.held(one, tokens(3)) not in (None, (0, 0)))
    assert [record.getMessage() for record in caplog.records].count("KV events lost") == 1


def test_slots_are_used_again_once_their_blocks_are_out_of_the_table(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", slots=8)
    for incarnation in range(1, 12):
        one = index.publish("prefill-0", incarnation=incarnation)
        index.follow(one)
        index.until(lambda one=one: index.held(one, tokens(1)) == (0, 0))  # type: ignore[misc]
        one.say(stored(tokens(1)))
        index.until(lambda one=one: index.held(one, tokens(1)) not in (None, (0, 0)))  # type: ignore[misc]
    assert index.feed.table.entries == len(prefix_hashes(tokens(1)).asked_marks[0])
    for publisher in index.publishers:
        publisher.sockets.close()
    index.feed.close()


def test_a_worker_of_which_more_has_come_than_was_read_is_not_believed_until_it_was(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, prompt = index.publish("prefill-0"), tokens(1)
    index.follow(one)
    one.say(stored(prompt))
    index.until(lambda: index.held(one, prompt) not in (None, (0, 0)))
    with monkeypatch.context() as patched:
        patched.setattr(KVEventSubscriber, "behind", True)
        index.clock.advance(EVERY_S)
        assert index.held(one, prompt) is None
    index.clock.advance(EVERY_S)
    assert index.held(one, prompt) not in (None, (0, 0))


def test_an_index_without_a_pulse_is_not_believed_and_its_successor_is(index: Index, tmp_path: Path) -> None:
    one, prompt = index.publish("prefill-0"), tokens(1)
    index.follow(one)
    one.say(stored(prompt))
    index.until(lambda: index.held(one, prompt) not in (None, (0, 0)))
    index.clock.advance(PULSE_S + 0.01)
    assert index.told.find(prefix_hashes(prompt), index.clock.now()) is None
    successor = Index(tmp_path / "index")
    successor.clock, successor.feed._clock = index.clock, index.clock
    successor.publishers = [one]
    successor.follow(one)
    successor.until(lambda: successor.held(one, prompt) not in (None, (0, 0)))
    index.clock.advance(1.1)
    successor.feed.round(0)
    # Not by `held`, in which the index that is gone would have a round more.
    found = index.told.find(prefix_hashes(prompt), index.clock.now())
    assert found is not None, "the old reader has found the new table"
    assert int(found.depths.device[found.slots.workers[one.key]]) > 0
    successor.feed.close()


def test_a_router_believes_events_and_what_it_sent_a_moment_ago(index: Index) -> None:
    one, two, prompt = index.publish("prefill-0"), index.publish("prefill-1"), tokens(1)
    index.follow(one)
    one.say(stored(prompt, HOST))
    whole = marks_of(prefix_hashes(prompt))
    index.until(lambda: index.held(one, prompt) == (0, whole))
    indexes = PrefixIndexes(index.told)
    indexes.follow(entries(one, two))
    hits = indexes.hits(prefix_hashes(prompt), index.clock.now())
    assert (hits.device, hits.held) == ({}, {one.key: whole})
    sent = len(prompt) // 64 * 64
    for publisher in (one, two):
        indexes.sent(publisher.key, prefix_hashes(prompt), index.clock.now())
    hits = indexes.hits(prefix_hashes(prompt), index.clock.now())
    assert hits.device == {one.key: sent, two.key: sent}, "it will be there soon"
    for _ in range(3):
        index.clock.advance(10.0)
        index.feed.round(0)
        hits = indexes.hits(prefix_hashes(prompt), index.clock.now())
    assert (hits.device, hits.held) == ({two.key: sent}, {one.key: whole, two.key: sent}), "who tells is believed"
    index.clock.advance(PULSE_S + 0.01)
    hits = indexes.hits(prefix_hashes(prompt), index.clock.now())
    assert hits.held == {one.key: sent, two.key: sent}, "without the index, what was sent is all that is known"


def test_a_router_looks_for_a_worker_where_it_is_after_it_has_cleared_everything(index: Index) -> None:
    """Then the feed gives it another slot, of which the controller's table says nothing."""
    one, before, after = index.publish("prefill-0"), tokens(1), tokens(2)
    indexes = PrefixIndexes(index.told)
    index.follow(one)
    indexes.follow(entries(one))
    for prompt in (before, after):
        one.say(AllBlocksCleared(), stored(prompt))
        whole = marks_of(prefix_hashes(prompt))
        index.until(lambda prompt=prompt, whole=whole: index.held(one, prompt) == (whole, whole))  # type: ignore[misc]
        assert indexes.hits(prefix_hashes(prompt), index.clock.now()).held == {one.key: whole}
    assert indexes.hits(prefix_hashes(before), index.clock.now()).held == {}


def entries(*publishers: Publisher) -> list[WorkerEntry]:
    workers = WorkerTable(RouterConfig())
    workers.update([p.view for p in publishers])
    return list(workers)


@pytest.mark.parametrize(
    ("endpoint", "node", "stream", "wanted"),
    [
        ("tcp://127.0.0.1:5557", NODE, "127.0.0.1:1", "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", "elsewhere", "10.0.0.2:1", ""),
        ("tcp://0.0.0.0:5557", "elsewhere", "10.0.0.2:1", "tcp://10.0.0.2:5557"),
        ("tcp://0.0.0.0:5557", "elsewhere", "", ""),
        ("tcp://10.0.0.7:5557", "elsewhere", "10.0.0.2:1", "tcp://10.0.0.7:5557"),
        ("tcp://[::1]:5557", NODE, "", "tcp://[::1]:5557"),
        ("tcp://kv.example:5557", "elsewhere", "", "tcp://kv.example:5557"),
    ],
)
def test_a_worker_is_reached_where_its_host_says(endpoint: str, node: str, stream: str, wanted: str) -> None:
    name, incarnation = WorkerName("w"), Incarnation(1)
    record = WorkerRecord(name, Role.PREFILL, incarnation, 1, node, "", "", WorkerLimits(1, 1), stream=stream)
    view = WorkerView(record, WorkerStatus(name, Role.PREFILL, "ready", 1, node, incarnation, 0, 0, 0, 0))
    assert reachable(endpoint, view, NODE) == wanted


@pytest.mark.parametrize(
    ("replay", "wanted"),
    [
        ("tcp://0.0.0.0:5558", "tcp://10.0.0.2:5558"),
        ("tcp://127.0.0.1:5558", ""),
        ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:5558"),
        ("", ""),
    ],
)
def test_a_worker_elsewhere_is_asked_for_lost_events_where_it_can_be_reached_or_not_at_all(
    index: Index, monkeypatch: pytest.MonkeyPatch, replay: str, wanted: str
) -> None:
    followed: list[tuple[str, str]] = []

    def subscriber(endpoint: str, clock: ManualClock, replay_endpoint: str, **options: object) -> SimpleNamespace:
        followed.append((endpoint, replay_endpoint))
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr("twinpool.router.kv_indexer.event_feed.KVEventSubscriber", subscriber)
    name, incarnation = WorkerName("w"), Incarnation(1)
    record = WorkerRecord(
        name, Role.PREFILL, incarnation, 1, "elsewhere", "", "", WorkerLimits(1, 1), stream="10.0.0.2:1"
    )
    status = WorkerStatus(name, Role.PREFILL, "ready", 1, "elsewhere", incarnation, 0, 0, 0, 0)
    status = replace(status, kv_events="tcp://0.0.0.0:5557", kv_replay=replay)
    index.feed.follow([WorkerView(record, status)])
    assert followed == [("tcp://10.0.0.2:5557", wanted)]
