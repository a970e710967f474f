"""Weights that are pushed: a trainer's tensors, kept as files in memory for as long as a cluster may read them.

They come as one safetensors file, over HTTP or written by a client of this machine, and lie below the first folder of
`engine.weight_roots`, which is to be in `/dev/shm` so that no disk is written. All else is as with a folder that an
operator names: workers read and check it, and the ledger changes.

What keeps a dead process from leaving anything: a file that is being written has no name (open(2), `O_TMPFILE`), so the
kernel frees it with its last descriptor, whoever held that. It gets its name when it is whole and its digest is right.
Then its folder is locked (flock(2)), in turn by who has written it, by the router that orders the change, and by each
router that knows it as served or as being prepared. A router removes a folder that is neither any more: at once where
it has held it, and one that it finds after `STRANGER_S`, if nobody holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import threading
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from twinpool.contracts.checkpoint.safetensors_headers import (
    INDEX,
    LENGTH_BYTES,
    SINGLE,
    TensorHeader,
    check_alike,
    file_header,
    parse_header,
    read_file_headers,
    stored_bytes,
)
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.errors import CheckpointError
from twinpool.contracts.json_logs import log

PREFIX, _NAME_BYTES = "pushed-", 8
"""Names of folders of pushed weights are this and so many random bytes in hexadecimal. All others are somebody else's,
and never removed."""
_NAMES = PREFIX + "[0-9a-f]" * (2 * _NAME_BYTES)
STRANGER_S = 60.0
"""Seconds after which a folder goes that nobody needs or holds, by what a router knows that is in touch with its
controller: what it knows is older by less than that."""
LOOK_S = 5.0
"""Seconds between two looks for folders that nobody needs."""
SENT, KEPT = "sent.safetensors", "kept.safetensors"
"""Files of weights of which a part was pushed: the part, and the tensors that stay as they are."""
_HEADER_ROOM = 64 << 10


class PushedFile:
    """A file without a name, which is gone with this process unless `keep` names it. Methods raise `CheckpointError`
    where its folder takes no more."""

    def __init__(self, root: Path) -> None:
        """`root`: the folder on whose file system it lies."""
        self._root = root
        try:
            self._fd = os.open(root, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise CheckpointError(f"{root} takes no pushed weights: {error.strerror}; use one in /dev/shm") from None

    def reserve(self, nbytes: int) -> None:
        """Take the memory for the whole file now: a part that can't be had later would be a crash of who maps it."""
        try:
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            raise CheckpointError(f"{self._root} has no room for {nbytes} bytes of weights: {error.strerror}") from None

    def write(self, piece: bytes | memoryview) -> None:
        """Write what comes next."""
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise CheckpointError(f"{self._root} takes no more of the weights: {error.strerror}") from None

    def link(self, path: Path) -> None:
        """Give it a name."""
        try:
            # With a folder's descriptor the system follows the link, which is what makes this a new name of the file.
            os.link(f"/proc/self/fd/{self._fd}", path, src_dir_fd=self._fd, follow_symlinks=True)
        except OSError as error:
            raise CheckpointError(f"pushed weights can't be named {path}: {error.strerror}") from None

    def keep(self) -> tuple[Path, int]:
        """Put it into a folder of its own; returns this, and the descriptor that locks it until it is closed."""
        folder = self._root / f"{PREFIX}{secrets.token_hex(_NAME_BYTES)}"
        try:
            folder.mkdir(mode=0o755)
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self._root} takes no folder of weights: {error.strerror}") from None
        try:
            fcntl.flock(held, fcntl.LOCK_SH)
            self.link(folder / SINGLE)
        except BaseException:
            os.close(held)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder, held

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> PushedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class IncomingWeights:
    """A safetensors file that comes in pieces. It is refused as soon as its header shows that it can't be taken.
    Methods raise `CheckpointError`, with the tensor's name where it is about one."""

    def __init__(self, root: Path, wanted: Mapping[str, TensorHeader], *, partial: bool = False) -> None:
        """`wanted`: of the checkpoint. `partial`: whether tensors may be missing."""
        self._wanted, self._partial = wanted, partial
        self._file = PushedFile(root)
        self._lock, self._closed = threading.Lock(), False
        self._head, self._length = bytearray(), 0
        self._whole, self._came = 0, 0
        """Bytes of the whole file, 0 until its header is there; and how many have come."""
        self._digest = hashlib.sha256()

    @staticmethod
    def most(wanted: Mapping[str, TensorHeader]) -> int:
        """The most bytes that such a file may have."""
        return sum(one.end - one.begin for one in wanted.values()) + _most_header(wanted)

    def feed(self, piece: bytes) -> None:
        """Take what comes next; nothing once it is closed."""
        with self._lock:
            if not self._closed:
                self._take(piece)

    def _take(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._came += len(piece)
        if self._whole:
            return self._write(piece)
        self._head += piece
        if not self._length and len(self._head) >= LENGTH_BYTES:
            self._length = LENGTH_BYTES + int.from_bytes(self._head[:LENGTH_BYTES], "little")
            if not LENGTH_BYTES + 2 <= self._length <= _most_header(self._wanted):
                raise CheckpointError("what was pushed is no safetensors file of the checkpoint's tensors")
        if self._length and len(self._head) >= self._length:
            self._whole = self._check(bytes(self._head[LENGTH_BYTES : self._length]))
            self._file.reserve(self._whole)
            self._write(bytes(self._head))
            self._head.clear()
        return None

    def _check(self, raw: bytes) -> int:
        """Look at the header; returns the bytes that the file is to have."""
        found = parse_header(Path("what was pushed"), raw)
        check_pushed(found, self._wanted, partial=self._partial)
        return max(self._length, *(one.end for one in found.values()))

    def _write(self, piece: bytes) -> None:
        if self._came > self._whole:
            raise CheckpointError(f"what was pushed is longer than the {self._whole} bytes that its header describes")
        self._file.write(piece)

    def finish(self, digest: bytes | None) -> tuple[Path, int]:
        """The end of it; `digest`: the SHA-256 that it must have, None: not said. Returns as `PushedFile.keep`."""
        if not self._whole or self._came < self._whole:
            came = f"{self._came} of {self._whole or 'unknown'} bytes"
            raise CheckpointError(f"what was pushed is cut off: it has {came}")
        if digest is not None and digest != self._digest.digest():
            raise CheckpointError("what was pushed has another SHA-256 than its Content-Digest says: push it again")
        return self._file.keep()

    def close(self) -> None:
        """Free what has come, unless it has a name. Idempotent; while a piece is being taken, after that."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._file.close()


def _most_header(wanted: Mapping[str, TensorHeader]) -> int:
    """The most bytes that a header of these tensors may have; writers differ in spaces, and may tell of themselves."""
    return 2 * len(file_header((name, one.dtype, one.shape, 0) for name, one in wanted.items())) + _HEADER_ROOM


def check_pushed(found: Mapping[str, TensorHeader], wanted: Mapping[str, TensorHeader], *, partial: bool) -> None:
    """Refuse tensors that aren't those of the checkpoint, by name; with `partial` some may be missing."""
    if not found:
        raise CheckpointError("what was pushed has no tensor")
    check_alike("what was pushed", found, {k: v for k, v in wanted.items() if k in found} if partial else wanted)


def complete(folder: Path, present: Mapping[str, TensorHeader]) -> None:
    """Put the tensors of `present` that were not pushed beside those that were. Raises `CheckpointError`."""
    sent = read_file_headers(folder / SINGLE)
    kept = [(name, one) for name, one in present.items() if name not in sent]
    if not kept:
        return
    head = file_header((name, one.dtype, one.shape, one.end - one.begin) for name, one in kept)
    with PushedFile(folder) as file:
        file.reserve(len(head) + sum(one.end - one.begin for _, one in kept))
        file.write(head)
        for _, one in kept:
            for piece in stored_bytes(one):
                file.write(piece)
        try:
            (folder / SINGLE).rename(folder / SENT)
            file.link(folder / KEPT)
            places = {**dict.fromkeys(sent, SENT), **{name: KEPT for name, _ in kept}}
            (folder / INDEX).write_text(json.dumps({"weight_map": places}))
        except OSError as error:
            raise CheckpointError(f"{folder} takes no more: {error.strerror}") from None


class PushedFolders:
    """The folders of pushed weights below a root, as one router holds and removes them. Methods may be called from any
    thread; what is removed goes in a thread of its own."""

    def __init__(self, roots: str, clock: Clock) -> None:
        """`roots`: `engine.weight_roots`, of which the first is where they lie."""
        first = roots.partition(",")[0].strip()
        self.root = Path(first).resolve() if first else None
        self.receiving = False
        """Whether weights are being pushed; one router takes one set at a time."""
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        """The descriptors that lock folders, by path."""
        self._orders: dict[str, float] = {}
        """Folders to which a change was ordered, with its number; infinity while it isn't known."""
        self._strange: dict[str, float] = {}
        """Since when folders have been of no use that may be somebody's, in seconds of the clock."""
        self._work: threading.Thread | None = None
        self._seen: tuple[object, ...] = ()
        self._look_at = clock.now()

    def __contains__(self, folder: Path) -> bool:
        return self.root is not None and folder.parent == self.root and fnmatchcase(folder.name, _NAMES)

    def take(self, folder: Path, held: int | None = None) -> None:
        """Hold a folder to which a change is about to be ordered. `held`: the descriptor by which it is locked; None:
        another process has written it. Raises `CheckpointError` where it is gone."""
        with self._lock:
            path = str(folder)
            if held is not None:
                self._held[path] = held
            elif not self._hold(path):
                raise CheckpointError(f"{path} isn't there any more: push the weights again")
            self._orders[path] = float("inf")

    def ordered(self, folder: Path, number: int) -> None:
        """The change to a folder was ordered, under this number."""
        with self._lock:
            self._orders[str(folder)] = number

    def refused(self, folder: Path) -> None:
        """The change to a folder was refused, so that it is of no use to anybody: remove it."""
        with self._lock:
            self._orders.pop(str(folder), None)
            claimed = self._claim(str(folder))
        _delete(claimed)

    def unsure(self, folder: Path) -> None:
        """Nobody waits for the answer to an order any more: where none has come, it may have been made, or not."""
        with self._lock:
            if self._orders.get(str(folder)) == float("inf"):
                del self._orders[str(folder)]
                self._strange[str(folder)] = self._clock.now()

    def tend(self, used: Collection[str], tried: int, *, settled: bool) -> None:
        """Hold the folders of `used`, by path, and remove those that are of no use any more. `tried`: the number of the
        latest change that was begun. `settled`: whether this is what the controller says now, and no worker has yet to
        follow it. It looks at each change, and every `LOOK_S`, one look at a time: a file system may be slow."""
        now, seen = self._clock.now(), (tuple(used), tried, settled)
        if self.root is None or (seen == self._seen and now < self._look_at):
            return
        if self._work is not None and self._work.is_alive():
            return
        self._seen, self._look_at = seen, now + LOOK_S
        self._work = threading.Thread(target=self._look, args=(used, tried, settled), name="pushed", daemon=True)
        self._work.start()

    def wait(self) -> None:
        """Wait for the end of the look that is under way."""
        if self._work is not None:
            self._work.join()

    def _look(self, used: Collection[str], tried: int, settled: bool) -> None:
        assert self.root is not None
        try:
            found = sorted(str(one) for one in self.root.glob(_NAMES))
        except OSError:
            return
        claimed: dict[str, int] = {}
        with self._lock:
            now = self._clock.now()
            for path in found:
                if path in used:
                    self._strange.pop(path, None)
                    self._hold(path)
                elif self._orders.get(path, -1) > tried:
                    continue
                elif not settled:
                    if path in self._strange:
                        self._strange[path] = now
                elif self._is_over(path, now):
                    claimed |= self._claim(path)
            self._strange = {path: at for path, at in self._strange.items() if path in found}
            self._orders = {path: number for path, number in self._orders.items() if path in found}
            for path in self._held.keys() - set(found):
                os.close(self._held.pop(path))
        _delete(claimed)

    def _is_over(self, path: str, now: float) -> bool:
        """Whether a folder that nobody needs is to go now."""
        if path in self._held and path not in self._strange:
            return True
        return now - self._strange.setdefault(path, now) >= STRANGER_S

    def _hold(self, path: str) -> bool:
        """Lock a folder, together with others who need it; returns whether it is locked, and still there."""
        if path in self._held:
            return True
        try:
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(held), os.stat(path)):
                raise FileNotFoundError(path)
        except OSError:
            os.close(held)
            return False
        self._held[path] = held
        return True

    def _claim(self, path: str) -> dict[str, int]:
        """The folder with the descriptor by which nobody else can hold it any more; nothing where somebody else does:
        then it is let go of, and the last one has it."""
        if not self._hold(path):
            return {}
        held = self._held.pop(path)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            return {}
        self._strange.pop(path, None)
        return {path: held}

    def close(self) -> None:
        """Let go of all folders, as this router ends. Idempotent."""
        self.wait()
        with self._lock:
            while self._held:
                os.close(self._held.popitem()[1])


def remove_all(roots: str) -> None:
    """Remove all folders of pushed weights that nobody holds, as their cluster ends. `roots`: `engine.weight_roots`."""
    folders = PushedFolders(roots, SystemClock())
    if folders.root is not None:
        for one in sorted(folders.root.glob(_NAMES)):
            folders.refused(one)


def _delete(claimed: Mapping[str, int]) -> None:
    """Remove folders that were claimed."""
    for path, held in claimed.items():
        try:
            shutil.rmtree(path)
            log("pushed weights removed", folder=path)
        except OSError as error:
            log("pushed weights can't be removed", folder=path, reason=str(error))
        finally:
            os.close(held)
