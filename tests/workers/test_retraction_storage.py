"""Retracted requests that host memory has no room for: on storage, where there is one."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.worker_pair import Pair
from tests.support.worker_parts import manager_of, scheduler_of
from tests.workers.test_retraction import greedy, hold_back, prompt_of, run_until, undisturbed, working
from twinpool.cache.storage.io_queue import InlineIoQueue, StorageTicket, WriteChain
from twinpool.cache.storage.storage_backend import ObjectBuffer, ObjectName, ObjectOutcome, StorageBackend
from twinpool.cache.swap.swap_storage import PLACES, SwapPlace
from twinpool.contracts.errors import CapacityError, ErrorKind
from twinpool.decode.request import DecodeRequest
from twinpool.decode.worker import DecodeWorker

PAGE_BYTES = 8192
ASKED = [(prompt_of(seed, 50), 24) for seed in range(3)]


@contextmanager
def small_host(model: Path, pages: int, **faults: Any) -> Iterator[tuple[Pair, DecodeWorker]]:
    """A host tier of so many pages, which nothing but retracted requests take, and storage."""
    storage = {"backend": "memory", "path": uuid.uuid4().hex, "max_bytes": 1 << 26}
    tier = {"prefix_reuse": False, "host_bytes": (pages + 1) * PAGE_BYTES}
    with working(model, decode={"retract": "copy", "cache": tier}, storage=storage, faults=faults) as (both, decode):
        host = manager_of(decode).host
        assert host is not None
        assert host.allocators["full"].total == pages
        yield both, decode


def all_away(both: Pair, decode: DecodeWorker, patch: pytest.MonkeyPatch) -> list[DecodeRequest]:
    """Everybody leaves the device and nobody comes back before `patch` is undone."""
    hold_back(decode, patch)
    requests = list(scheduler_of(decode).running)
    for request in requests:
        scheduler_of(decode).retract(request)
    for _ in range(100_000):
        both.step()
        if all(r.phase == "retracted" for r in requests if r.phase != "gone"):
            return requests
    raise AssertionError("they never left")


def places(requests: list[DecodeRequest]) -> list[SwapPlace]:
    return [r.swapped.place for r in requests if r.swapped is not None]


Queue = TypeVar("Queue", bound=InlineIoQueue)


def queues_by_hand(monkeypatch: pytest.MonkeyPatch, kind: type[Queue]) -> list[Queue]:
    """The storage queues of all workers that are built from now on."""
    queues: list[Queue] = []

    def queue(backend: StorageBackend, **_: object) -> Queue:
        queues.append(kind(backend))
        return queues[-1]

    monkeypatch.setattr("twinpool.cluster.assembly.build_parts.ThreadedIoQueue", queue)
    return queues


def each_round(monkeypatch: pytest.MonkeyPatch, queues: Sequence[InlineIoQueue]) -> None:
    """Every round of a pair ends with what lies in these queues."""
    step = Pair.step

    def stepped(self: Pair, *roles: Any) -> None:
        step(self, *roles)
        for one in queues:
            one.run_all()

    monkeypatch.setattr(Pair, "step", stepped)


def test_every_place_of_swapped_state_reaches_the_end() -> None:
    assert PLACES.dead_ends() == []
    assert all(place is SwapPlace.GONE or PLACES.rows[place] for place in SwapPlace)


def test_what_host_memory_has_no_room_for_goes_to_storage_and_comes_back(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed(model, ASKED)
    with small_host(model, 9) as (both, decode):
        asked = [both.submit(prompt, greedy(count)) for prompt, count in ASKED]
        run_until(both, decode, count=3)
        with monkeypatch.context() as patch:
            away = all_away(both, decode, patch)
            assert sorted(places(away)) == [SwapPlace.HOST, SwapPlace.HOST, SwapPlace.STORED]
            assert decode.check().violations == ()
        assert [answer.list for answer in both.run(*asked)] == expected
        counters = decode.status().counters
        assert (counters["swapped_stored"], counters["swapped_fetched"]) == (1, 1)
        assert (counters["recomputed"], counters["swapped_lost"]) == (0, 0)
        assert counters["retractions"] == counters["resumptions"] == 3


def test_a_host_for_one_serves_all_of_them_through_storage(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = undisturbed(model, ASKED)
    each_round(monkeypatch, queues_by_hand(monkeypatch, InlineIoQueue))
    with small_host(model, 6, retract_every=5) as (both, decode):
        asked = [both.submit(prompt, greedy(count)) for prompt, count in ASKED]
        answers = both.run(*asked, rounds=1_000_000)
        counters = decode.status().counters
        assert counters["swapped_stored"] > 3
        for answer, whole in zip(answers, expected, strict=True):
            assert answer.done is not None
            assert answer.done.error in (None, ErrorKind.RETRACTED)
            assert answer.list == whole[: len(answer.list)]


def forget(store: Any) -> None:
    with store.lock:
        for key in list(store.objects):
            store.pop(key)


def spoil(store: Any) -> None:
    with store.lock:
        for key, stored in store.objects.items():
            store.objects[key] = bytes([stored[0] ^ 1]) + stored[1:]


@pytest.mark.parametrize(("harm", "error"), [(forget, ErrorKind.RETRACTED), (spoil, ErrorKind.DAMAGED)])
def test_what_storage_has_lost_or_spoilt_is_computed_again(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Any], None],
    error: ErrorKind,
) -> None:
    queues = queues_by_hand(monkeypatch, InlineIoQueue)
    each_round(monkeypatch, queues)
    with small_host(model, 9) as (both, decode):
        asked = [both.submit(prompt, greedy(count)) for prompt, count in ASKED]
        run_until(both, decode, count=3)
        with monkeypatch.context() as patch:
            away = all_away(both, decode, patch)
            (stored,) = [r.swapped for r in away if r.swapped and r.swapped.place is SwapPlace.STORED]
            for one in queues:
                harm(one.backend.store)  # type: ignore[attr-defined]
        answers = both.run(*asked)
        errors = [answer.done.error for answer in answers if answer.done is not None]
        assert sorted(map(str, errors)) == sorted(["None", "None", str(error)])
        counters = decode.status().counters
        assert (counters["swapped_lost"], counters["states_damaged_swapped"]) == (1, error is ErrorKind.DAMAGED)
        logged = [vars(record)["pages"] for record in caplog.records if record.message == "state damage"]
        assert logged == ([{"full": list(stored.numbers["full"])}] if error is ErrorKind.DAMAGED else [])


def test_who_has_no_way_back_through_the_host_is_computed_again_and_the_answer_says_why(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_host(model, 9) as (both, decode):
        asked = [both.submit(prompt, greedy(count)) for prompt, count in ASKED]
        run_until(both, decode, count=3)
        with monkeypatch.context() as patch:
            (stored,) = [r for r in all_away(both, decode, patch) if r.swapped and r.swapped.place is SwapPlace.STORED]
            assert stored.swapped is not None

            def refuse(*_: object) -> None:
                raise CapacityError("no room for it on the host")

            patch.setattr(manager_of(decode).swapped, "from_storage", refuse)
            patch.setattr(scheduler_of(decode).retraction, "_make_room", lambda: False)
            (lost,) = scheduler_of(decode).retraction._bring_to_host(stored, stored.swapped)
            assert (lost.request, lost.kind) == (stored, ErrorKind.RETRACTED)
            assert lost.message == "decode was short of pages: no room for it on the host"
            assert decode.status().counters["recomputed"] == 1
        both.run(*asked)


class Remembering(InlineIoQueue):
    """Knows what it was to store."""

    def __init__(self, backend: StorageBackend) -> None:
        super().__init__(backend)
        self.items: dict[ObjectName, ObjectBuffer] = {}

    def submit_write(
        self, items: Sequence[ObjectBuffer], chain: WriteChain | None = None
    ) -> StorageTicket[list[ObjectOutcome]]:
        self.items |= {item.name: item for item in items}
        return super().submit_write(items)


def test_what_another_computed_of_the_same_tokens_is_no_damage(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of another number of ranks rounds otherwise, and was the first to store under the name."""
    queues = queues_by_hand(monkeypatch, Remembering)
    each_round(monkeypatch, queues)
    with small_host(model, 9) as (both, decode):
        asked = [both.submit(prompt, greedy(count)) for prompt, count in ASKED]
        run_until(both, decode, count=3)
        with monkeypatch.context() as patch:
            assert SwapPlace.STORED in places(all_away(both, decode, patch))
            for one in queues:
                others = [
                    ObjectBuffer(i.name, i.digest ^ 1, bytes(memoryview(i.payload).nbytes)) for i in one.items.values()
                ]
                one.backend.delete([item.name for item in others])
                assert all(outcome.ok for outcome in one.backend.write(others))
        answers = both.run(*asked)
        errors = [answer.done.error for answer in answers if answer.done is not None]
        assert sorted(map(str, errors)) == sorted(["None", "None", str(ErrorKind.RETRACTED)])
        counters = decode.status().counters
        assert (counters["swapped_lost"], counters["states_damaged_swapped"]) == (1, 0)


@pytest.mark.parametrize("place", [SwapPlace.STORING, SwapPlace.STORED, SwapPlace.FETCHING])
def test_b2_whoever_ends_while_its_state_is_on_storage_or_on_the_way_leaves_nothing_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch, place: SwapPlace
) -> None:
    queues = queues_by_hand(monkeypatch, InlineIoQueue)
    with small_host(model, 9) as (both, decode):
        asked = [both.submit(prompt, greedy(count)) for prompt, count in ASKED]
        run_until(both, decode, count=3)
        requests = list(scheduler_of(decode).running)
        with monkeypatch.context() as patch:
            hold_back(decode, patch)
            for request in requests:
                scheduler_of(decode).retract(request)
            for _ in range(20):
                both.step()
            if place is not SwapPlace.STORING:
                for one in queues:
                    one.run_all()
                for _ in range(20):
                    both.step()
        (victim,) = [
            r for r in requests if r.swapped is not None and r.swapped.place not in (SwapPlace.HOST, SwapPlace.SAVING)
        ]
        if place is SwapPlace.FETCHING:
            # Whoever is before it leaves the host.
            for other in [r for r in requests if r is not victim]:
                both.cancel(other.submit.request_id)
            both.step()
        assert victim.swapped is not None
        assert victim.swapped.place is place
        for rid in asked:
            both.cancel(rid)
        assert decode.check().violations == ()
        for one in queues:
            one.run_all()
        both.settle()
        host = manager_of(decode).host
        assert host is not None
        assert host.allocators["full"].free == host.allocators["full"].total
