"""The folder of files and batches by itself: torn lines, full disks, locks, expiry, and inputs of all kinds."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twinpool.contracts.config.router_config import BatchConfig
from twinpool.contracts.errors import ConfigError, IllegalTransition
from twinpool.router.batch import batch_store
from twinpool.router.batch.batch_lines import AnswerLog, Upload, check_input
from twinpool.router.batch.batch_store import (
    BATCH,
    BatchEvent,
    BatchPlace,
    BatchState,
    BatchStore,
    FileInUse,
    Locked,
    StorageFull,
    TooMany,
)

URL = "/v1/completions"


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine crashes here, so nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


class Wall:
    """The time, in seconds since 1970, moved by hand."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        return self.at


def store_of(folder: Path, wall: Wall | None = None, **limits: Any) -> BatchStore:
    return BatchStore(BatchConfig(str(folder), **{"free_bytes": 0, **limits}), wall or Wall())


def put(store: BatchStore, tenant: str, content: bytes, now: int = 1_000_000, kept_s: int = 100) -> str:
    upload = Upload(store, tenant)
    upload.write(content)
    stored = upload.finish("in.jsonl", "batch", now, now + kept_s)
    upload.abandon()
    return stored.id


def line(number: int, *, pad: int = 0) -> bytes:
    return json.dumps({"id": f"x_{number}", "pad": "p" * pad}).encode() + b"\n"


def opened(folder: Path, total: int) -> AnswerLog:
    return AnswerLog([folder / "out", folder / "err"], "x_", total)


@pytest.mark.slow
def test_a_log_that_was_torn_anywhere_has_each_line_once_after_it_went_on(tmp_path: Path) -> None:
    draw, total = random.Random(7), 12
    for _ in range(60):
        for name in ("out", "err"):
            (tmp_path / name).unlink(missing_ok=True)
        while True:
            log = opened(tmp_path, total)
            left = [number for number in range(total) if not log.done[number]]
            some = draw.sample(left, min(len(left), draw.randint(1, 5)))
            log.append([(number, draw.randint(0, 1), line(number, pad=draw.randint(0, 40))) for number in some])
            done = all(log.done)
            log.close()
            if done:
                break
            for name in ("out", "err"):  # A crash: what wasn't synced is cut, torn, or zeros.
                raw = (tmp_path / name).read_bytes()
                keep = draw.randint(len(raw) // 2, len(raw))
                junk = draw.choice(
                    [b"", b"\0" * 9, b"\0" * 9 + b"\n", b'{"id": "x_1', b'{"id": "other_1"}\n', line(total)]
                )
                (tmp_path / name).write_bytes(raw[:keep] + junk)
        found = [
            json.loads(one)["id"] for name in ("out", "err") for one in (tmp_path / name).read_bytes().splitlines()
        ]
        assert sorted(found) == sorted(f"x_{number}" for number in range(total))


def test_a_line_that_is_there_is_not_appended_again(tmp_path: Path) -> None:
    log = opened(tmp_path, 2)
    log.append([(0, 0, line(0))])
    log.append([(0, 1, line(0)), (1, 1, line(1))])
    log.close()
    assert (log.counts, (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()) == ([1, 1], line(0), line(1))


def test_what_a_full_disk_took_in_part_is_cut_off_and_counts_as_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, real, calls = opened(tmp_path, 3), os.pwrite, [0]
    log.append([(0, 0, line(0))])

    def full(file: int, piece: bytes, at: int) -> int:
        calls[0] += 1
        if calls[0] == 1:
            return real(file, piece[:5], at)
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="no space"):
            log.append([(1, 0, line(1))])
    assert (tmp_path / "out").read_bytes() == line(0)
    log.append([(2, 0, line(2))])
    log.close()
    assert (tmp_path / "out").read_bytes() == line(0) + line(2)


@pytest.mark.parametrize(
    ("content", "code", "at"),
    [
        (b"", "empty_file", None),
        (b"\n \n", "empty_file", None),
        (b"nonsense\n", "invalid_json_line", 1),
        (b'{"custom_id": "a"}\n{"custom_id": 1}\n', "invalid_json_line", 2),
        (b'{"custom_id": ""}', "invalid_json_line", 1),
        (b"[" * 100_000, "invalid_json_line", 1),
        (b'{"custom_id": "a", "body": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", "invalid_json_line", 1),
        (b'{"custom_id": "\xff"}\n', "invalid_json_line", 1),
        (b'{"custom_id": "a"}\n\n{"custom_id": "a"}\n', "duplicate_custom_id", 3),
        (b'{"custom_id": "' + b"a" * 200_000 + b'"}\n', "invalid_json_line", 1),
        (b"".join(b'{"custom_id": "%d"}\n' % n for n in range(7)), "too_many_requests", None),
    ],
)
def test_an_input_that_is_no_batch_says_why_and_where(
    tmp_path: Path, content: bytes, code: str, at: int | None
) -> None:
    (tmp_path / "in").write_bytes(content)
    first = check_input(tmp_path / "in", 5, 150_000).problems[0]
    assert (first.code, first.line) == (code, at)


def test_lines_are_found_whatever_ends_them(tmp_path: Path) -> None:
    lines = [b'{"custom_id": "%d", "body": {"x": "\\n"}}' % number for number in range(3)]
    (tmp_path / "in").write_bytes(lines[0] + b"\r\n\n" + lines[1] + b"\n   \n" + lines[2])
    found = check_input(tmp_path / "in", 5, 1000)
    raw = (tmp_path / "in").read_bytes()
    assert not found.problems
    assert [raw[at:].split(b"\n")[0].strip() for at in found.starts[:-1]] == lines


def test_each_tenant_has_its_own_files_and_batches_alone(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    mine = put(store, "a", b"mine")
    batch = store.create("a", mine, URL, "24h", 100, None)
    for other in ("b", "", "a ", "../a", hash_of(tmp_path)):
        assert store.file(other, mine) is None
        assert not store.files(other)
        assert not store.batches(other)
        assert store.batch(other, batch.id) is None
        assert store.cancel(other, batch.id) is None
        assert not store.delete_file(other, mine)
    found = store.file("a", mine)
    assert found is not None
    assert found[1].read_bytes() == b"mine"


def hash_of(folder: Path) -> str:
    return next((folder / "tenants").iterdir()).name


@pytest.mark.parametrize(
    "name", ["../../x", "file-" + "0" * 31, "file-" + "0" * 32 + ".json", "", "file-" + "A" * 32, "/etc/passwd"]
)
def test_an_id_from_outside_is_no_path(tmp_path: Path, name: str) -> None:
    store = store_of(tmp_path)
    put(store, "a", b"x")
    assert store.file("a", name) is None
    assert store.batch("a", name) is None
    assert not store.delete_file("a", name)


def test_files_have_bounds_and_what_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    store = store_of(tmp_path, file_bytes=10, tenant_bytes=10_000, disk_bytes=12_000, max_files=2)
    upload = Upload(store, "a")
    upload.write(b"12345")
    with pytest.raises(TooMany, match="10 bytes"):
        upload.write(b"123456")
    upload.abandon()
    assert list((tmp_path / "tenants").glob("*/files/*")) == []
    put(store, "a", b"x")
    put(store, "a", b"x")
    with pytest.raises(TooMany, match="2 files"):
        Upload(store, "a")
    for tenant, limit, most in (("b", "tenant_bytes", 3), ("c", "disk_bytes", 3), ("d", "free_bytes", 1 << 60)):
        tight = store_of(tmp_path, None, **{limit: most})
        with pytest.raises(StorageFull):
            Upload(tight, tenant).write(b"1234")


def test_a_disk_that_is_full_refuses_an_upload_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Upload(store_of(tmp_path), "a")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StorageFull, match="No space left"):
            upload.write(b"x")
    upload.abandon()
    assert list((tmp_path / "tenants").glob("*/files/*")) == []


def test_a_batch_is_one_routers_until_it_lets_go_of_it(tmp_path: Path) -> None:
    here, there = store_of(tmp_path), store_of(tmp_path)
    batch = here.create("a", put(here, "a", b"x"), URL, "24h", 100, {"k": "v"})
    (place,) = there.waiting()
    claimed = there.claim(place)
    assert claimed is not None
    assert claimed[1] == batch
    assert here.claim(place) is None
    claimed[0].release()
    again = here.claim(place)
    assert again is not None
    here.keep(place, batch.after(BatchEvent.REFUSED, 5))
    again[0].release()
    assert list(there.waiting()) == []
    assert there.claim(place) is None
    assert here.batch("a", batch.id) == batch.after(BatchEvent.REFUSED, 5)


def test_a_lock_without_a_batch_goes(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    batch = store.create("a", put(store, "a", b"x"), URL, "24h", 100, None)
    (place,) = store.waiting()
    place.state.unlink()
    assert store.claim(place) is None
    assert list(store.waiting()) == []
    assert store.batch("a", batch.id) is None


def test_who_cancels_sees_it_at_once_and_an_ended_one_is_not_cancelled(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    batch = store.create("a", put(store, "a", b"x"), URL, "24h", 100, None)
    cancelled = store.cancel("a", batch.id)
    assert cancelled is not None
    assert cancelled.status is BatchState.CANCELLING
    assert store.cancel("a", batch.id) == cancelled, "twice is once"
    (place,) = store.waiting()
    ended = cancelled.after(BatchEvent.PUBLISHED, 9)
    store.keep(place, ended)
    assert store.batch("a", batch.id) == ended
    assert not place.cancel.exists()
    with pytest.raises(FileInUse, match="cancelled"):
        store.cancel("a", batch.id)
    with pytest.raises(IllegalTransition):
        ended.after(BatchEvent.CANCEL, 9)


def test_the_table_ends(tmp_path: Path) -> None:
    assert BATCH.dead_ends() == []


def test_the_input_of_a_batch_that_runs_is_kept(tmp_path: Path) -> None:
    wall = Wall()
    store = store_of(tmp_path, wall)
    name = put(store, "a", b"x", kept_s=10)
    batch = store.create("a", name, URL, "24h", 100, None)
    wall.at += 50
    store.sweep()
    with pytest.raises(FileInUse):
        store.delete_file("a", name)
    assert store.file("a", name) is not None
    store.keep(BatchPlace(next((tmp_path / "tenants").iterdir()), batch.id), batch.after(BatchEvent.REFUSED, 5))
    store.sweep()
    assert store.file("a", name) is None


def test_what_has_expired_and_what_nobody_names_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "ORPHAN_S", -2e9)  # What was just written is old.
    wall = Wall()
    store = store_of(tmp_path, wall, keep_s=1000)
    kept, gone = put(store, "a", b"x", kept_s=500), put(store, "a", b"x", kept_s=10)
    batch = store.create("a", kept, URL, "24h", 100, None)
    (place,) = store.waiting()
    place.file(batch.output_file_id).write_bytes(line(1))
    (place.folder / "files" / ("file-" + "0" * 32)).write_bytes(b"nobody's")
    running, ended = Upload(store, "a"), Upload(store, "a")
    ended._lock.release()  # Its router was killed.
    wall.at += 50
    store.sweep()
    names = {path.name for path in (place.folder / "files").iterdir()}
    assert names == {kept, f"{kept}.json", batch.output_file_id, running._part.name}
    assert not store.delete_file("a", gone)
    running.abandon()
    assert store.publish(place, batch) == store.publish(place, batch) == [batch.output_file_id]
    store.keep(place, batch.after(BatchEvent.REFUSED, 5))
    wall.at += 2000
    store.sweep()
    assert not store.files("a")
    assert not store.batches("a")


def test_a_folder_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"batch\.folder"):
        store_of(tmp_path / "file")


def test_a_lock_excludes_within_one_process_too(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    lock = Locked.of(tmp_path / "x")
    assert lock is not None
    assert Locked.of(tmp_path / "x") is None
    lock.release()
    lock.release()
    assert Locked.of(tmp_path / "x") is not None


def test_who_takes_a_new_lock_for_left_behind_takes_nothing_from_its_maker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other, real, looked = store_of(tmp_path), store_of(tmp_path), fcntl.flock, [0]
    name = put(store, "a", b"x")

    def slow(file: int, how: int) -> None:
        looked[0] += 1
        if looked[0] == 1:  # Before it is locked another router looks.
            assert [other.claim(place) for place in other.waiting()] == [None]
        real(file, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", slow)
        batch = store.create("a", name, URL, "24h", 100, None)
    assert [place.id for place in store.waiting()] == [batch.id]


def test_a_batch_that_can_not_be_read_now_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path)
    batch = store.create("a", put(store, "a", b"x"), URL, "24h", 100, None)
    (place,) = store.waiting()

    def full(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", full)
        assert store.claim(place) is None
    claimed = store.claim(place)
    assert claimed is not None
    assert claimed[1] == batch
    claimed[0].release()


def test_a_log_that_can_not_be_opened_keeps_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "err").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            opened(tmp_path, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_of_batches_that_have_ended_the_last_ones_are_kept_and_nothing_is_left_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "ORPHAN_S", -2e9)
    store = store_of(tmp_path, max_files=3, max_batches=2)
    name = put(store, "a", b"x")
    made = [store.create("a", name, URL, "24h", 100, None)]
    for number in range(6):
        made.append(store.create("a", name, URL, "24h", 100, None))
        place = BatchPlace(next((tmp_path / "tenants").iterdir()), made[-1].id)
        store.keep(place, made[-1].after(BatchEvent.REFUSED, 5))
        os.utime(place.state, (number, number))
        place.cancel.touch()  # Somebody cancelled it while it ended.
    made.append(store.create("a", name, URL, "24h", 100, None))
    assert {one.id for one in store.batches("a")} == {one.id for one in (made[0], *made[-4:])}
    torn = place.folder / "batches" / f"{made[0].id}.json.12345678.new"
    torn.touch()
    store.cancel("a", made[0].id)
    store.sweep()
    assert not torn.exists()
    assert [path.stem for path in place.folder.glob("batches/*.cancel")] == [made[0].id]


def test_lines_that_are_blank_have_a_bound(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'{"custom_id": "a"}\n' + b"\n" * 100)
    assert [one.code for one in check_input(tmp_path / "in", 5, 1000).problems] == ["too_many_requests"]


def named(*names: str) -> bytes:
    return b"".join(json.dumps({"custom_id": name}).encode() + b"\n" for name in names)


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        (named("a", "b", "c"), []),
        (named("a", "b", "c", "d"), [("too_many_requests", None)]),
        (named("A", "a", " a"), []),
        (named("a", "b", "a"), [("duplicate_custom_id", 3)]),
        (named("a" * 512), []),
        (named("a" * 513), [("invalid_json_line", 1)]),
        (b'{"custom_id": "a"' + b" " * 982 + b"}", []),
        (b'{"custom_id": "a"' + b" " * 983 + b"}", [("invalid_json_line", 1)]),
        (b"x" * 2500 + b"\n" + named("a"), [("invalid_json_line", 1)]),
        (
            b"x\n" + named("a") + b"y\n" + named("a"),
            [("invalid_json_line", 1), ("invalid_json_line", 3), ("duplicate_custom_id", 4)],
        ),
    ],
)
def test_an_input_at_its_bounds_is_taken_and_beyond_them_told_once(
    tmp_path: Path, content: bytes, problems: list[tuple[str, int | None]]
) -> None:
    (tmp_path / "in").write_bytes(content)
    found = check_input(tmp_path / "in", 3, 1000).problems
    assert [(one.code, one.line) for one in found] == problems


def test_a_file_of_the_largest_size_is_taken(tmp_path: Path) -> None:
    store = store_of(tmp_path, file_bytes=10)
    found = store.file("a", put(store, "a", b"0123456789"))
    assert found is not None
    assert (found[0].bytes, found[1].read_bytes()) == (10, b"0123456789")


def test_what_is_written_between_two_counts_of_the_folder_counts(tmp_path: Path) -> None:
    store = store_of(tmp_path, tenant_bytes=1000, disk_bytes=1500)
    for _ in range(3):
        store.check_room(tmp_path / "tenants" / "one", 300)
    with pytest.raises(StorageFull, match="your files"):
        store.check_room(tmp_path / "tenants" / "one", 101)
    store.check_room(tmp_path / "tenants" / "one", 100)
    store.check_room(tmp_path / "tenants" / "two", 500)
    with pytest.raises(StorageFull, match="all files"):
        store.check_room(tmp_path / "tenants" / "two", 1)


def test_what_is_written_leaves_the_disk_what_is_to_stay_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    store = store_of(tmp_path, free_bytes=900)
    store.check_room(tmp_path / "tenants" / "one", 100)
    with pytest.raises(StorageFull, match="the server's disk"):
        store.check_room(tmp_path / "tenants" / "one", 101)


def test_an_upload_that_can_not_be_shown_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(tmp_path)

    def full(store: BatchStore, path: Path, stored: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BatchStore, "show", full)
    with pytest.raises(StorageFull, match="No space left"):
        put(store, "a", b"x")
    assert not list((tmp_path / "tenants").glob("*/files/*"))


def test_outputs_are_kept_from_when_they_are_published_and_empty_ones_are_not(tmp_path: Path) -> None:
    wall = Wall()
    store = store_of(tmp_path, wall, keep_s=1000)
    batch = store.create("a", put(store, "a", b"x", kept_s=9000), URL, "24h", 100, None)
    (place,) = store.waiting()
    place.file(batch.output_file_id).write_bytes(line(1))
    place.file(batch.error_file_id).write_bytes(b"")
    wall.at += 800
    ended = batch.after(BatchEvent.REFUSED, wall.at, published=store.publish(place, batch))
    store.keep(place, ended)
    assert ended.published == [batch.output_file_id]
    assert not place.file(batch.error_file_id).exists()
    for later, there in ((190, (True, True)), (20, (False, True)), (780, (False, True)), (20, (False, False))):
        wall.at += later
        store.sweep()
        found = store.batch("a", batch.id) is not None, store.file("a", batch.output_file_id) is not None
        assert found == there, f"{wall.at - 1_000_000:g} s after it was made, {wall.at - 1_000_800:g} after its end"


def test_a_batch_that_runs_longer_than_files_are_kept_stays(tmp_path: Path) -> None:
    wall = Wall()
    store = store_of(tmp_path, wall, keep_s=50)
    batch = store.create("a", put(store, "a", b"x"), URL, "24h", 100, None)
    wall.at += 60
    store.sweep()
    assert store.batch("a", batch.id) == batch


def test_a_batch_that_has_ended_is_claimed_by_nobody_and_its_lock_goes(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    batch = store.create("a", put(store, "a", b"x"), URL, "24h", 100, None)
    (place,) = store.waiting()
    store.keep(place, batch.after(BatchEvent.REFUSED, 5))
    place.lock.touch()  # Its router was killed before it could remove it.
    assert store.claim(place) is None
    assert not place.lock.exists()


def test_a_cancelled_batch_says_when_somebody_wanted_that(tmp_path: Path) -> None:
    wall = Wall()
    store = store_of(tmp_path, wall)
    batch = store.create("a", put(store, "a", b"x"), URL, "24h", 100, None)
    store.cancel("a", batch.id)
    (place,) = store.waiting()
    os.utime(place.cancel, (1_000_007, 1_000_007))
    wall.at += 60
    shown = store.batch("a", batch.id)
    assert shown is not None
    assert shown.stamps == {"cancelling": 1_000_007}


def test_a_lock_of_a_file_that_was_made_anew_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "x", fcntl.flock
    path.touch()

    def slow(file: int, how: int) -> None:
        path.unlink()
        path.touch()
        real(file, how)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", slow)
        assert Locked.of(path) is None
    lock = Locked.of(path)
    assert lock is not None
    lock.release()
