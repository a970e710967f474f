"""What every backend promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.cache.storage.rigs import Rig, item, name, payload, read_one, stored_bytes
from twinpool.cache.storage import storage_backend
from twinpool.cache.storage.storage_backend import (
    FORMAT_VERSION,
    ObjectBuffer,
    ObjectName,
    ObjectVerdict,
    StorageBackend,
    check_seal,
    seal,
)


@pytest.fixture
def backend(rig: Rig) -> Iterator[StorageBackend]:
    backend = rig.open()
    yield backend
    backend.close()


def test_what_is_written_is_read_back_into_the_callers_buffers_and_nowhere_else(backend: StorageBackend) -> None:
    items = [item(n, size) for n, size in enumerate((1, 64, 4096, 65536, 100_001))]
    assert [o.verdict for o in backend.write(items)] == [ObjectVerdict.STORED] * 5
    margins = 32
    buffers = [bytearray(b"\xee" * (len(i.payload) + 2 * margins)) for i in items]
    views = [memoryview(b)[margins:-margins] for b in buffers]
    outcomes = backend.read([i.name for i in items], views)
    for wanted, outcome, buffer in zip(items, outcomes, buffers, strict=True):
        assert (outcome.verdict, outcome.digest) == (ObjectVerdict.FOUND, wanted.digest)
        assert bytes(buffer) == b"\xee" * margins + wanted.payload + b"\xee" * margins


def test_one_batch_may_hold_what_is_there_and_what_is_not(backend: StorageBackend) -> None:
    backend.write([item(1), item(3)])
    names = [name(n) for n in range(4)]
    assert backend.exists(names) == [False, True, False, True]
    outcomes = backend.read(names, [memoryview(bytearray(64)) for _ in names])
    assert [o.ok for o in outcomes] == [False, True, False, True]
    assert outcomes[0].verdict is ObjectVerdict.MISSING


def test_nothing_to_do_is_done(backend: StorageBackend) -> None:
    backend.delete([])
    assert (backend.exists([]), backend.read([], []), backend.write([])) == ([], [], [])


def test_every_part_of_a_name_tells_objects_apart(backend: StorageBackend) -> None:
    names = [
        name(1),
        name(2),
        name(1, pool="window"),
        name(1, fingerprint="other"),
        name(1, part="0of2"),
        name(1, part="1of2"),
    ]
    for n, which in enumerate(names):
        assert backend.exists(names) == [k < n for k in range(len(names))]
        backend.write([ObjectBuffer(which, n, payload(n, 64))])
    for n, which in enumerate(names):
        outcome, found = read_one(backend, which)
        assert (outcome.digest, found) == (n, payload(n, 64))


def test_a_name_that_is_there_is_kept_as_it_is(backend: StorageBackend, rig: Rig) -> None:
    backend.write([item(1)])
    before = rig.get_raw(name(1))
    (outcome,) = backend.write([replace(item(1), payload=b"x" * 64)])
    assert outcome.verdict is ObjectVerdict.KEPT
    assert rig.get_raw(name(1)) == before


def test_what_is_deleted_is_gone_and_may_come_back(backend: StorageBackend) -> None:
    backend.write([item(1), item(2)])
    backend.delete([name(1), name(7)])
    assert backend.exists([name(1), name(2)]) == [False, True]
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.STORED
    assert read_one(backend, name(1)) == (read_one(backend, name(1))[0], item(1).payload)


def assert_damaged(backend: StorageBackend, rig: Rig, stored: bytes, size: int = 64) -> str:
    """`stored` under the name of item 1 is damage: counted, and gone afterwards; the reason."""
    rig.put_raw(name(1), stored)
    before = backend.counts().damaged
    outcome, _ = read_one(backend, name(1), size)
    assert outcome.verdict is ObjectVerdict.DAMAGED
    assert backend.counts().damaged == before + 1
    assert backend.exists([name(1)]) == [False]
    assert read_one(backend, name(1))[0].verdict is ObjectVerdict.MISSING
    return outcome.reason


def test_a9_a_flipped_bit_is_damage_wherever_it_is(backend: StorageBackend, rig: Rig) -> None:
    backend.write([item(1)])
    sound = rig.get_raw(name(1))
    for at in range(len(sound)):
        bad = bytearray(sound)
        bad[at] ^= 1 << at % 8
        assert_damaged(backend, rig, bytes(bad))


def test_a9_a_cut_object_is_damage_whatever_is_left_of_it(backend: StorageBackend, rig: Rig) -> None:
    backend.write([item(1)])
    sound = rig.get_raw(name(1))
    for length in range(len(sound)):
        assert f"it has {length} bytes" in assert_damaged(backend, rig, sound[:length])


def test_an_object_with_more_behind_it_is_damage(backend: StorageBackend, rig: Rig) -> None:
    backend.write([item(1)])
    assert "bytes instead of" in assert_damaged(backend, rig, rig.get_raw(name(1)) + b"\0")


def test_an_object_of_another_size_than_asked_for_is_damage(backend: StorageBackend, rig: Rig) -> None:
    backend.write([item(1, size=128)])
    assert "bytes instead of" in assert_damaged(backend, rig, rig.get_raw(name(1)), size=64)


def test_a9_swapped_objects_are_damage_both(backend: StorageBackend, rig: Rig) -> None:
    backend.write([item(1), item(2)])
    one, two = rig.get_raw(name(1)), rig.get_raw(name(2))
    rig.put_raw(name(2), one)
    assert assert_damaged(backend, rig, two) == "it is the object of another name, size or version"
    assert read_one(backend, name(2))[0].verdict is ObjectVerdict.DAMAGED


def test_a_strangers_bytes_are_damage(backend: StorageBackend, rig: Rig) -> None:
    backend.write([item(1)])
    size = len(rig.get_raw(name(1)))
    assert assert_damaged(backend, rig, b"\0" * size) == "it carries no seal"
    assert_damaged(backend, rig, payload(99, size))


def test_what_was_damaged_can_be_written_again(backend: StorageBackend, rig: Rig) -> None:
    backend.write([item(1)])
    assert_damaged(backend, rig, b"")
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.STORED
    assert read_one(backend, name(1))[0].ok


def test_the_cap_holds_and_what_was_used_longest_ago_goes_first(capped: Rig) -> None:
    backend = capped.open(max_bytes=10 * stored_bytes(64))
    for n in range(10):
        backend.write([item(n)])
    assert backend.capacity().objects == 10
    assert read_one(backend, name(0))[0].ok  # A use by reading,
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.KEPT  # and one by writing it again.
    for n in (10, 11):
        assert backend.write([item(n)])[0].ok
        capacity = backend.capacity()
        assert capacity.used_bytes <= capacity.max_bytes == 10 * stored_bytes(64)
    there = backend.exists([name(n) for n in range(12)])
    assert there[:4] == [True, True, False, False]
    assert there[5:] == [True] * 7
    assert backend.counts().evicted == there.count(False)
    backend.close()


def test_an_object_larger_than_the_store_is_refused_and_evicts_nothing(capped: Rig) -> None:
    backend = capped.open(max_bytes=4 * stored_bytes(64))
    backend.write([item(1)])
    (outcome,) = backend.write([item(2, size=4096)])
    assert outcome.verdict is ObjectVerdict.REFUSED
    assert backend.counts().refused == 1
    assert backend.exists([name(1), name(2)]) == [True, False]
    backend.close()


def test_accounts_are_exact_after_writes_deletes_and_damage(capped: Rig) -> None:
    backend = capped.open()
    backend.write([item(n) for n in range(6)])
    backend.write([item(0), item(6)])
    backend.delete([name(0), name(0), name(42)])
    capped.put_raw(name(1), bytes(stored_bytes(64)))
    assert read_one(backend, name(1))[0].verdict is ObjectVerdict.DAMAGED
    capacity = backend.capacity()
    assert (capacity.objects, capacity.used_bytes) == (5, 5 * stored_bytes(64))
    backend.close()


def test_what_is_found_is_right_while_others_write_and_delete_it(rig: Rig) -> None:
    """Four threads over two handles on twenty names, each pass of all kinds of operations."""
    handles = [rig.open(), rig.open()]
    wrong: list[object] = []

    def work(seed: int) -> None:
        backend = handles[seed % 2]
        for turn in range(30):
            numbers = [(seed + turn * k) % 20 for k in (1, 3, 7)]
            outcomes = backend.write([item(n) for n in numbers])
            wrong.extend(o for o in outcomes if not o.ok)
            buffers = [bytearray(64) for _ in numbers]
            for n, outcome, buffer in zip(
                numbers,
                backend.read([name(n) for n in numbers], [memoryview(b) for b in buffers]),
                buffers,
                strict=True,
            ):
                if outcome.verdict is not ObjectVerdict.MISSING and (
                    not outcome.ok or bytes(buffer) != item(n).payload
                ):
                    wrong.append((n, outcome))
            backend.delete([name(numbers[0])])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    for handle in handles:
        assert handle.counts().damaged == 0
        handle.close()


def test_an_object_of_another_format_has_another_key_and_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes may mean something else, however whole they are."""
    mine = item(1)
    with monkeypatch.context() as other:
        other.setattr(storage_backend, "FORMAT_VERSION", FORMAT_VERSION + 1)
        storage_backend._mark.cache_clear()
        key = ObjectName(mine.name.fingerprint, mine.name.pool, mine.name.chain, mine.name.part).key
        found = seal(mine.name, mine.digest, mine.payload)
        assert check_seal(mine.name, mine.payload, found).ok
    storage_backend._mark.cache_clear()
    assert key != mine.name.key
    outcome = check_seal(mine.name, mine.payload, found)
    assert (outcome.verdict, outcome.reason) == (
        ObjectVerdict.DAMAGED,
        "it is the object of another name, size or version",
    )
