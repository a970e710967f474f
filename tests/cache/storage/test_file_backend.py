"""The folder of files: kills, full disks, strangers' files, several processes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cache.storage.rigs import FileRig, item, name, payload, read_one, reaped, stored_bytes
from twinpool.cache.storage.backends import file_backend as file
from twinpool.cache.storage.backends.file_backend import FileBackend
from twinpool.cache.storage.backends.file_folder import FolderScan, ObjectFolder, ShardCounts
from twinpool.cache.storage.storage_backend import ObjectVerdict, Payload
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.errors import ConfigError

ROOT = Path(__file__).parents[3]
BIG = 256 * 1024

WRITER = """
import sys
from pathlib import Path
from twinpool.cache.storage.backends.file_backend import FileBackend
from tests.cache.storage.rigs import item
root, cap, first, size = Path(sys.argv[1]), *map(int, sys.argv[2:])
backend = FileBackend(root, cap)
print("ready", flush=True)
n = first
while True:
    backend.write([item(k, size) for k in range(n, n + 4)])
    backend.delete([item(n, size).name])
    n += 3
"""

CHURNER = """
import sys
from pathlib import Path
from twinpool.cache.storage.backends.file_backend import FileBackend
from tests.cache.storage.rigs import item
root, cap, size = Path(sys.argv[1]), *map(int, sys.argv[2:])
backend = FileBackend(root, cap)
print("ready", flush=True)
n = 0
while True:
    outcomes = backend.write([item(k % 20, size) for k in range(n, n + 4)])
    assert all(o.ok for o in outcomes), outcomes
    backend.delete([item(n % 20, size).name])
    n += 3
"""

LIMITED = """
import resource, sys
from pathlib import Path
from twinpool.cache.storage.backends.file_backend import FileBackend
from tests.cache.storage.rigs import item
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
backend = FileBackend(Path(sys.argv[1]), 1 << 30)
outcomes = backend.write([item(1), item(2, 256 * 1024), item(3)])
print(*(o.verdict for o in outcomes), backend.counts().refused, backend.capacity().objects)
"""


def child(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )


def assert_whole(rig: FileRig, numbers: Sequence[int], size: int) -> int:
    """Opened anew, the folder holds no temp file and no damage, and the ledger is right; how many objects it has."""
    backend = rig.open()
    assert rig.temps() == []
    found = sum(read_one(backend, name(n), size)[0].ok for n in numbers)
    assert backend.counts().damaged == 0
    capacity = backend.capacity()
    assert capacity.objects == len(rig.objects())
    assert capacity.used_bytes == sum(path.stat().st_size for path in rig.objects())
    backend.close()
    assert list((rig.root / "owners").iterdir()) == []
    return found


def kill_in_the_middle(rig: FileRig, rng: random.Random, first: int) -> bool:
    """Kill a writer some way into its work; whether it left an unfinished file behind."""
    with reaped(child(WRITER, rig.root, 1 << 30, first, BIG)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        wanted = rng.randrange(3)
        while len(rig.temps()) == 0 or len(rig.objects()) < wanted:
            assert process.poll() is None
        process.kill()
    return bool(rig.temps())


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_leaves_only_whole_objects(file_rig: FileRig) -> None:
    rng = random.Random(1)
    unfinished = 0
    for round_ in range(4):
        unfinished += kill_in_the_middle(file_rig, rng, round_ * 1000)
        assert_whole(file_rig, range(round_ * 1000, round_ * 1000 + 30), BIG)


@pytest.mark.soak
def test_forty_writers_killed_in_the_middle_leave_only_whole_objects(file_rig: FileRig) -> None:
    rng = random.Random(2)
    unfinished = 0
    for round_ in range(40):
        unfinished += kill_in_the_middle(file_rig, rng, round_ * 1000)
        assert_whole(file_rig, range(round_ * 1000, round_ * 1000 + 30), BIG)
    assert unfinished > 0, "no kill came in the middle of a file: nothing was shown"


def test_an_unfinished_file_of_a_dead_writer_is_swept_and_that_of_a_live_one_is_not(file_rig: FileRig) -> None:
    seen: list[int] = []

    def stopped(file: int, parts: Sequence[Payload]) -> int:
        file_rig.open().close()  # Another process opens the folder in the middle of the write.
        seen.append(len(file_rig.temps()))
        return os.writev(file, parts)

    backend = FileBackend(file_rig.root, 1 << 30, writev=stopped)
    dead = file_rig.root / "00" / f".{'0' * 32}.{'f' * 32}.1.tmp"
    dead.parent.mkdir()
    dead.write_bytes(b"half")
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.STORED
    assert seen == [1]
    assert not dead.exists()
    assert read_one(backend, name(1))[0].ok
    backend.close()


def test_room_comes_back_whatever_a_write_raises(file_rig: FileRig) -> None:
    def broken(file: int, parts: Sequence[Payload]) -> int:
        raise RuntimeError("on purpose")

    backend = FileBackend(file_rig.root, 1 << 30, writev=broken)
    assert backend.wait_counted(20.0)
    with pytest.raises(RuntimeError, match="on purpose"):
        backend.write([item(1), item(2)])
    assert not backend._folder.coming
    assert (backend.capacity().objects, backend.capacity().used_bytes) == (0, 0)
    backend.close()


def test_room_that_a_busy_folder_did_not_take_back_comes_back_with_the_next_scan(file_rig: FileRig) -> None:
    """The disk fails, and by then another process has the folder's lock for longer than the call may wait."""
    clock, other = ManualClock(), list[int]()

    def failing(file: int, parts: Sequence[Payload]) -> int:
        other.append(os.open(file_rig.root / "ledger", os.O_RDWR))
        fcntl.flock(other[0], fcntl.LOCK_EX)
        clock.advance(10.0)
        raise OSError(errno.EIO, "on purpose")

    backend = FileBackend(file_rig.root, 1 << 30, clock=clock, writev=failing)
    assert backend.wait_counted(20.0)
    assert not any(outcome.ok for outcome in backend.write([item(1), item(2)]))
    assert backend.capacity().objects == 2, "the room is still taken"
    os.close(other[0])
    assert backend.scan()
    assert (backend.capacity().objects, backend.capacity().used_bytes) == (0, 0)
    backend.close()


def test_a_call_begins_no_file_after_its_deadline(file_rig: FileRig) -> None:
    """Each file takes three of the five seconds that a call has."""
    clock = ManualClock()

    def used() -> int:
        clock.advance(3.0)
        return int(clock.now() * 1e9)

    backend = FileBackend(file_rig.root, 1 << 30, timeout_s=5.0, clock=clock, wall_ns=used)
    assert backend.wait_counted(20.0)
    for n in range(4):
        assert backend.write([item(n)])[0].verdict is ObjectVerdict.STORED
    late = [ObjectVerdict.FAILED, ObjectVerdict.FAILED]
    outcomes = backend.read([name(n) for n in range(4)], [memoryview(bytearray(64)) for _ in range(4)])
    assert [o.verdict for o in outcomes] == [ObjectVerdict.FOUND, ObjectVerdict.FOUND, *late]
    outcomes = backend.write([item(n) for n in range(4, 8)])
    assert [o.verdict for o in outcomes] == [ObjectVerdict.STORED, ObjectVerdict.STORED, *late]
    assert len(file_rig.objects()) == backend.capacity().objects == 6
    assert backend.counts().failed == 4
    backend.close()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_being_written_is_counted_by_a_scan_in_the_middle(file_rig: FileRig, fails: bool) -> None:
    """Room was taken for all of a batch: a scan that meets some of it, half of one and none of the rest keeps it."""
    seen: list[tuple[int, int]] = []

    def scanned(file: int, parts: Sequence[Payload]) -> int:
        if len(seen) == 1:
            assert backend.scan()
        capacity = backend.capacity()
        seen.append((capacity.objects, capacity.used_bytes))
        if fails and len(seen) == 2:
            raise OSError(errno.EIO, "on purpose")
        return os.writev(file, parts)

    backend = FileBackend(file_rig.root, 1 << 30, writev=scanned)
    assert backend.wait_counted(20.0)
    outcomes = backend.write([item(1), item(2), item(3)])
    assert [outcome.ok for outcome in outcomes] == ([True, False, False] if fails else [True] * 3)
    assert seen[1] == seen[0] == (3, seen[0][1])
    files = [path.stat().st_size for path in file_rig.objects()]
    assert (backend.capacity().objects, backend.capacity().used_bytes) == (len(files), sum(files))
    assert not backend._folder.coming
    backend.close()


@pytest.mark.slow
def test_a_file_that_may_not_grow_is_refused_and_leaves_nothing_behind(file_rig: FileRig) -> None:
    """A real limit (RLIMIT_FSIZE): the kernel writes a part and then refuses the rest."""
    with reaped(child(LIMITED, file_rig.root)) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"stored refused failed 1 1\n"
    assert file_rig.temps() == []
    assert assert_whole(file_rig, [1, 3], 64) == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_or_failing_disk_is_an_outcome_and_leaves_nothing_behind(file_rig: FileRig, code: int) -> None:
    """The disk fills up in the middle of the second of three objects: the third, of use with it only, is not begun."""
    calls = iter([0, 10, -1])

    def filling(file: int, parts: Sequence[Payload]) -> int:
        some = next(calls)
        if some < 0:
            raise OSError(code, os.strerror(code))
        return os.writev(file, [memoryview(parts[0])[:some]] if some else parts)

    backend = FileBackend(file_rig.root, 1 << 30, writev=filling)
    outcomes = backend.write([item(1), item(2), item(3)])
    bad = ObjectVerdict.FAILED if code == errno.EIO else ObjectVerdict.REFUSED
    assert [o.verdict for o in outcomes] == [ObjectVerdict.STORED, bad, ObjectVerdict.FAILED]
    assert os.strerror(code) in outcomes[1].reason
    assert (backend.counts().failed, backend.counts().refused) == ((2, 0) if code == errno.EIO else (1, 1))
    backend.close()
    assert file_rig.temps() == []
    assert assert_whole(file_rig, [1, 2, 3], 64) == 1


def test_a_file_written_in_many_small_bits_is_whole(file_rig: FileRig) -> None:
    """As a kernel may: each call takes seven bytes of the first buffer that is left."""
    backend = FileBackend(file_rig.root, 1 << 30, writev=lambda file, parts: os.write(file, memoryview(parts[0])[:7]))
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.STORED
    outcome, found = read_one(backend, name(1))
    assert (outcome.verdict, found) == (ObjectVerdict.FOUND, item(1).payload)
    backend.close()


def test_objects_and_their_order_of_use_outlive_a_restart(file_rig: FileRig) -> None:
    cap = 8 * stored_bytes(64)
    first = file_rig.open(cap)
    first.write([item(n) for n in range(8)])
    read_one(first, name(0))
    first.close()
    second = file_rig.open(cap)
    assert second.capacity().objects == 8
    assert second.write([item(8)])[0].ok
    assert second.exists([name(0), name(1), name(7), name(8)]) == [True, False, True, True]
    second.close()


def test_a_smaller_cap_is_kept_from_the_start(file_rig: FileRig) -> None:
    backend = file_rig.open()
    backend.write([item(n) for n in range(8)])
    backend.close()
    smaller = file_rig.open(3 * stored_bytes(64))
    assert smaller.capacity().objects == len(file_rig.objects()) == 3
    assert smaller.counts().evicted == 5
    smaller.close()


def test_two_workers_keep_one_cap_and_see_each_others_objects(file_rig: FileRig) -> None:
    cap = 16 * stored_bytes(64)
    one, two = file_rig.open(cap), file_rig.open(cap)
    for n in range(40):
        assert (one, two)[n % 2].write([item(n)])[0].ok
        assert sum(p.stat().st_size for p in file_rig.objects()) <= cap
        assert read_one((two, one)[n % 2], name(n))[0].ok
    assert one.capacity() == two.capacity()
    assert one.capacity().objects == len(file_rig.objects())
    one.close()
    two.close()


def test_files_of_strangers_are_left_alone_and_not_counted(file_rig: FileRig) -> None:
    backend = file_rig.open()
    backend.write([item(1)])
    shard = file_rig.path(name(1)).parent
    strangers = [
        file_rig.root / "notes.txt",
        shard / "README",
        shard / ("0" * 32),
        shard / f"{'zz' * 16}.page",
        shard / f"{'0' * 31}.page",
    ]
    for path in strangers:
        path.write_bytes(b"mine")
    wrong_shard = shard / ("ff" if shard.name != "ff" else "00") / "x"
    wrong_shard.parent.mkdir()
    wrong_shard.write_bytes(b"mine")
    misplaced = shard / f"{'ff' if shard.name != 'ff' else '00'}{'0' * 30}.page"
    misplaced.write_bytes(b"mine")
    (file_rig.root / "owners" / "me").write_bytes(b"mine")
    backend.close()
    again = file_rig.open(stored_bytes(64))
    assert again.counts().foreign == 7
    assert again.capacity().objects == 1
    assert again.write([item(2)])[0].ok  # Evicts item 1, and nothing else.
    assert all(p.read_bytes() == b"mine" for p in (*strangers, wrong_shard, misplaced, file_rig.root / "owners" / "me"))
    again.close()


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_is_not_read_nor_followed_nor_waited_for(file_rig: FileRig, tmp_path: Path, kind: str) -> None:
    backend = file_rig.open()
    backend.write([item(1), item(2)])
    path = file_rig.path(name(1))
    target = file_rig.path(name(1)).rename(tmp_path / "elsewhere")
    makers: dict[str, Callable[[], None]] = {
        "folder": path.mkdir, "link": lambda: path.symlink_to(target), "pipe": lambda: os.mkfifo(path),
    }  # fmt: skip
    makers[kind]()
    assert backend.exists([name(1)]) == [False]
    assert read_one(backend, name(1))[0].verdict is ObjectVerdict.MISSING
    assert backend.counts().foreign == 1
    assert backend.counts().damaged == 0
    assert os.path.lexists(path)
    assert target.exists()
    backend.close()


def test_what_cannot_be_deleted_still_takes_its_room(file_rig: FileRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of another user's, say: the folder would grow beyond its bound, until the disk is full."""
    backend = file_rig.open(3 * stored_bytes(64))
    assert all(outcome.ok for outcome in backend.write([item(1), item(2), item(3)]))
    monkeypatch.setattr(file, "remove", lambda path: False)
    for number in (4, 5):
        assert backend.write([item(number)])[0].verdict is ObjectVerdict.REFUSED
    assert (backend.capacity().objects, backend.capacity().used_bytes) == (3, 3 * stored_bytes(64))
    assert (len(file_rig.objects()), backend.counts().evicted) == (3, 0)
    monkeypatch.undo()
    assert backend.write([item(4)])[0].verdict is ObjectVerdict.STORED
    assert backend.counts().evicted > 0
    backend.close()


def test_a_folder_that_is_deleted_under_a_worker_is_a_cold_cache(file_rig: FileRig) -> None:
    backend = file_rig.open()
    backend.write([item(1)])
    for path in sorted(file_rig.root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    file_rig.root.rmdir()
    assert read_one(backend, name(1))[0].verdict is ObjectVerdict.MISSING
    assert backend.write([item(1)])[0].verdict is ObjectVerdict.STORED
    assert read_one(backend, name(1))[0].ok
    backend.close()


def test_a_ledger_of_garbage_is_set_right_on_opening(file_rig: FileRig) -> None:
    backend = file_rig.open()
    backend.write([item(1)])
    backend.close()
    (file_rig.root / "counts").write_bytes(b"\xff" * 16)
    again = file_rig.open()
    assert (again.capacity().objects, again.capacity().used_bytes) == (1, stored_bytes(64))
    again.close()


def test_a_ledger_that_runs_ahead_costs_a_scan_and_no_object(file_rig: FileRig) -> None:
    """A killed writer leaves room taken that it never filled."""
    cap = 10 * stored_bytes(64)
    backend = file_rig.open(cap)
    backend.write([item(1)])
    counted = ShardCounts((file_rig.root / "counts").read_bytes())
    counted.add(7, 9 * stored_bytes(64), 9)
    (file_rig.root / "counts").write_bytes(counted.packed())
    assert backend.write([item(2)])[0].ok
    assert backend.counts().evicted == 0
    assert backend.capacity().objects == 2
    backend.close()


def test_a_folder_whose_lock_is_held_fails_writes_by_the_deadline_and_still_reads(
    file_rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = file_rig.open()
    first.write([item(1)])
    backend = FileBackend(file_rig.root, 1 << 30, timeout_s=60.0)
    holder = os.open(file_rig.root / "ledger", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_timeout_s", 0.02)
        outcomes = backend.write([item(1), item(2)])
    assert [o.verdict for o in outcomes] == [ObjectVerdict.KEPT, ObjectVerdict.FAILED]
    assert backend.counts().failed == 1
    assert read_one(backend, name(1))[0].ok
    os.close(holder)
    assert first.write([item(2)])[0].verdict is ObjectVerdict.STORED
    assert read_one(backend, name(2))[0].ok
    backend.close()
    first.close()


def test_a_path_that_can_not_be_a_folder_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"set cache.storage.path to a folder"):
        FileBackend(tmp_path / "file" / "l3", 1 << 20)


def test_nothing_stays_open_after_close(file_rig: FileRig) -> None:
    before = set(os.listdir("/proc/self/fd"))
    backend = file_rig.open()
    backend.write([item(1)])
    read_one(backend, name(1))
    read_one(backend, name(1), 65)
    backend.close()
    backend.close()
    assert set(os.listdir("/proc/self/fd")) <= before
    assert list((file_rig.root / "owners").iterdir()) == []


@pytest.mark.slow
def test_two_processes_on_one_folder_never_see_each_others_half_files(file_rig: FileRig) -> None:
    """A child writes, deletes and evicts (the cap holds twelve of twenty objects) what this process uses."""
    size, cap = 64 * 1024, 12 * stored_bytes(64 * 1024)
    backend = file_rig.open(cap)
    found, n = 0, 0
    with reaped(child(CHURNER, file_rig.root, cap, size)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while found < 100:
            assert process.poll() is None
            n = (n + 7) % 20
            outcome, content = read_one(backend, name(n), size)
            assert outcome.verdict in (ObjectVerdict.FOUND, ObjectVerdict.MISSING), outcome
            if outcome.ok:
                assert content == payload(n, size)
                found += 1
            elif n % 3 == 0:
                assert backend.write([item(n, size)])[0].verdict in (ObjectVerdict.STORED, ObjectVerdict.KEPT)
    assert backend.counts().damaged == 0
    backend.close()
    assert_whole(file_rig, range(20), size)


def test_a_folder_is_open_at_once_and_counted_shard_by_shard_beside_the_work(
    file_rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the way through a folder of millions of files, and the lock is held for one shard at a time."""
    first = file_rig.open()
    first.write([item(n) for n in range(40)])
    first.close()
    may_go, looked = threading.Semaphore(0), [0]
    scan = ObjectFolder.scan

    def scan_when_told(self: ObjectFolder, shard: int, *, sweep: bool) -> FolderScan:
        looked[0] += 1
        assert may_go.acquire(timeout=60)
        return scan(self, shard, sweep=sweep)

    monkeypatch.setattr(ObjectFolder, "scan", scan_when_told)
    backend = FileBackend(file_rig.root, 1 << 30)
    assert not backend.wait_counted(0)
    assert backend.capacity().objects == 40, "what was counted before is known still"
    assert all(outcome.ok for outcome in (read_one(backend, name(n))[0] for n in range(40)))
    for _ in range(256):
        may_go.release()
    assert backend.wait_counted(60)
    assert looked[0] == 256
    assert backend.write([item(50)])[0].ok
    assert looked[0] == 256, "a write with room looks at nothing"
    backend.close()


@pytest.mark.slow
def test_a_full_folder_of_many_files_makes_room_by_looking_at_a_few_shards_only(
    file_rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_SMALL", 100)
    cap = 800 * stored_bytes(64)
    backend = file_rig.open(cap)
    for first in range(0, 800, 80):
        assert all(outcome.ok for outcome in backend.write([item(n) for n in range(first, first + 80)]))
    looked: list[int] = []
    scan = ObjectFolder.scan

    def noted(self: ObjectFolder, shard: int, *, sweep: bool) -> object:
        looked.append(shard)
        return scan(self, shard, sweep=sweep)

    monkeypatch.setattr(ObjectFolder, "scan", noted)
    rounds = 0
    for n in range(800, 1600):
        before = len(looked)
        assert backend.write([item(n)])[0].ok
        rounds = max(rounds, len(looked) - before)
        assert sum(p.stat().st_size for p in file_rig.objects()) <= cap if n % 100 == 0 else True
    assert rounds < 16, "of 256"
    kept = backend.exists([name(n) for n in range(1600)])
    assert sum(kept[1200:]) > 300, "most of what is new is there"
    assert sum(kept[:400]) < 100, "and hardly anything of what is old"
    assert backend.capacity().objects == len(file_rig.objects())
    backend.close()


def test_a_folder_without_counts_takes_nothing_before_it_has_been_counted(
    file_rig: FileRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = file_rig.open()
    first.write([item(1)])
    first.close()
    (file_rig.root / "counts").unlink()
    may_go = threading.Event()
    monkeypatch.setattr(FileBackend, "_scan_when_wanted", lambda self: may_go.wait(60) and None)
    backend = FileBackend(file_rig.root, 1 << 30)
    assert [o.verdict for o in backend.write([item(1), item(2)])] == [ObjectVerdict.KEPT, ObjectVerdict.FAILED]
    assert read_one(backend, name(1))[0].ok
    assert backend.scan()
    assert backend.write([item(2)])[0].ok
    assert backend.capacity().objects == 2
    may_go.set()
    backend.close()


@pytest.mark.parametrize("group", [False, True])
def test_what_lies_in_the_folder_is_for_its_owner_or_where_the_operator_says_so_its_group(
    tmp_path: Path, group: bool
) -> None:
    old = tmp_path / "l3" / "00"
    before = os.umask(0 if not group else 0o077)
    try:
        backend = FileBackend(tmp_path / "made" / "l3", 1 << 30, group=group)
        backend.write([item(n) for n in range(5)])
        files = [path for path in (tmp_path / "made" / "l3").rglob("*") if path.is_file()]
        folders = [path for path in (tmp_path / "made" / "l3").rglob("*") if path.is_dir()]
        modes = {stat.S_IMODE(path.stat().st_mode) for path in files}, {stat.S_IMODE(p.stat().st_mode) for p in folders}
        assert len(files) == 5 + 3
        assert modes == (({0o660}, {0o2770}) if group else ({0o600}, {0o700}))
        backend.close()
        old.mkdir(parents=True)
        old.chmod(0o755)
        old.parent.chmod(0o755)
        again = FileBackend(tmp_path / "l3", 1 << 30, group=group)
        assert again.wait_counted(60)
        assert stat.S_IMODE(old.parent.stat().st_mode) == 0o755, "the operator's own folder is theirs"
        assert stat.S_IMODE(old.stat().st_mode) == (0o755 if group else 0o700), "what an earlier version left open"
        again.close()
    finally:
        os.umask(before)
