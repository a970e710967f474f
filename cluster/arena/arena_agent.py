"""The arena agent: one small process a node, which keeps the memory of host tiers while workers die and are restarted.

The agent owns each segment (an anonymous memfd: no name, no file, gone with the last process that has it open) and
lends it to one process at a time. A process that asks for the segment of a worker's rank gets it with its content, if
size and fingerprint are still the same and the last borrower is *dead*, by its pidfd. No weaker proof is enough: an
incarnation that is fenced, stopped or cut off may still write to memory that it has mapped, and comparing incarnations
doesn't stop such a write. As long as the last borrower lives the answer is `busy`. A client that can't wait any longer
asks for a fresh segment, and the old one is never lent again. A pidfd says *dead* once all threads have ended and the
kernel has released the process's memory and devices, so no copy of that process is under way either.

It also keeps images of loaded models, which all workers of the node map: whoever asks first for an image that isn't
there is to make it, and the others are told to wait while that process lives. An image is taken only when it is sealed
against every change. It is dropped when all who were given it are dead or have left it, and another one is asked for,
a worker is forgotten, or the last of them leaves.

The agent makes no decisions and keeps nothing on disk. When it dies, workers keep the memory that they have mapped and
go on; the next agent gets the segments back from live workers. Only the state of workers that die in between is lost.

The agent imports the standard library only and is started as a script, or runs in a thread of an actor on nodes of a
Ray that `serve` has joined. Its socket is abstract, named after the token, and answers only to processes of the same
user that know the token. Messages are JSON, one a packet:

    take     name, rank, incarnation, nbytes, fingerprint, fresh  ->  lent, adopted (and the segment); busy; error
    return   name, rank, incarnation, nbytes, fingerprint (and the segment)  ->  kept: after an agent's death
    forget   name, before  ->  forgotten: the worker won't come back, or has no use for segments older than `before`
    image    key  ->  image (and its file); claimed: make it; busy: another process makes it; alone: there will be none
    keep     key (and the file)  ->  kept, unless there is one: from who has claimed it, or after an agent's death
    alone    key, reason  ->  alone: who has claimed it can't make it
    leave    key  ->  left: a process that lives uses that image no more

Of two incarnations of a worker the later one gets the segment, in whichever order they ask.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import select
import selectors
import socket
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # A script, which finds nothing but the standard library.
    sys.path.insert(0, str(Path(__file__).absolute().parents[3]))

from twinpool.contracts.outside_data import read_json

MESSAGE_BYTES = 8192
IMAGES = 16
"""Keys of images that an agent keeps, those whose making was given up among them."""
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
IMAGE_SEALS = _SEALS | fcntl.F_SEAL_WRITE
_CREDENTIALS = struct.Struct("iII")


class LoanRefused(Exception):
    """Raised for a malformed message, or one from another user or with a wrong token."""


@dataclass(slots=True)
class _ArenaSegment:
    fd: int
    shape: tuple[int, str]
    """The segment's size in bytes, and the fingerprint of the state that may lie in it."""
    incarnation: int
    """The worker's incarnation that borrowed the segment last."""
    owner: int
    """A pidfd of the process that borrowed the segment last."""

    @property
    def free(self) -> bool:
        return _readable(self.owner)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.owner)


@dataclass(slots=True)
class _ModelImage:
    """An image, or the claim to make it, or the reason why there is none."""

    fd: int | None = None
    reason: str = ""
    users: dict[int, int] = field(default_factory=dict)
    """Pidfds of the processes that were given it, by pid; while there is neither image nor reason, of who makes it."""

    def used(self) -> bool:
        """Whether any of its users lives. Those that don't are forgotten."""
        for pid in [pid for pid, pidfd in self.users.items() if _readable(pidfd)]:
            os.close(self.users.pop(pid))
        return bool(self.users)

    def use(self, pid: int) -> None:
        if pid not in self.users:
            self.users[pid] = os.pidfd_open(pid)

    def close(self) -> None:
        for fd in (*self.users.values(), *(() if self.fd is None else (self.fd,))):
            os.close(fd)


class _ModelImages:
    """The images of models that an agent keeps, by key."""

    def __init__(self) -> None:
        self._images: dict[str, _ModelImage] = {}

    def find(self, key: str, pid: int) -> tuple[dict[str, Any], list[int]]:
        self.drop_unused(key)
        image = self._images.get(key)
        if image is not None and image.reason:
            return {"alone": image.reason}, []
        if image is not None and image.fd is not None:
            image.use(pid)
            return {"image": True}, [image.fd]
        if image is not None and image.used() and pid not in image.users:
            return {"busy": True}, []
        if image is None and len(self._images) >= IMAGES:
            return {"alone": f"the agent keeps {IMAGES} images already"}, []
        image = self._images.setdefault(key, _ModelImage())
        image.use(pid)
        return {"claimed": True}, []

    def keep(self, key: str, pid: int, fds: list[int]) -> dict[str, Any]:
        """Take an image from who has made it: for this agent, or for the one before."""
        image = self._images.get(key)
        if image is not None and image.fd is not None:
            return {"kept": False}
        if not fds or fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & IMAGE_SEALS != IMAGE_SEALS:
            raise LoanRefused
        if image is None and len(self._images) >= IMAGES:
            return {"kept": False}
        image = self._images.setdefault(key, _ModelImage())
        image.use(pid)
        image.fd, image.reason = os.dup(fds[0]), ""
        return {"kept": True}

    def give_up(self, key: str, pid: int, reason: str) -> dict[str, Any]:
        image = self._images.get(key)
        if image is not None and image.fd is None and pid in image.users:
            image.reason = reason or "no reason was given"
        return {"alone": True}

    def leave(self, key: str, pid: int) -> dict[str, Any]:
        """Take a living process from an image's users; the image goes with the last of them."""
        image = self._images.get(key)
        if image is not None and pid in image.users:
            os.close(image.users.pop(pid))
        self.drop_unused()
        return {"left": True}

    def drop_unused(self, but: str = "") -> None:
        for key in [key for key, image in self._images.items() if key != but and not image.used()]:
            self._images.pop(key).close()

    def close(self) -> None:
        for image in self._images.values():
            image.close()
        self._images.clear()


def _readable(fd: int) -> bool:
    """Whether `fd` can be read now; of a pidfd: whether its process is dead. By poll, because select fails for
    descriptors from 1024 on."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _credentials(peer: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class ArenaAgent:
    """The agent: owns segments by worker name and rank, and lends them. Used from one thread."""

    def __init__(self, token: str) -> None:
        """Raises `OSError` where another agent of this token answers already."""
        self._token = token
        self._segments: dict[tuple[str, int], _ArenaSegment] = {}
        self._images = _ModelImages()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address(token))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def serve(self, stop: int) -> None:
        """Answer clients until the file descriptor `stop` can be read."""
        self._selector.register(stop, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == stop:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            if _credentials(peer)[1] != os.geteuid():
                peer.close()  # At once: connections of another user must not take this one's descriptors.
                return
            peer.setblocking(False)
            self._selector.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: socket.socket) -> None:
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(peer, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            if not data:
                raise ConnectionError
            answer, lent = self._answer(peer, data, fds)
            socket.send_fds(peer, [json.dumps(answer).encode()], lent, socket.MSG_NOSIGNAL)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError, LoanRefused):
            # The client is gone, or may not ask: one that gets no answer goes without an arena.
            self._selector.unregister(peer)
            peer.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, peer: socket.socket, data: bytes, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        pid, uid = _credentials(peer)
        if uid != os.geteuid():
            raise LoanRefused
        message = read_json(data)
        if not hmac.compare_digest(str(message["token"]), self._token):
            raise LoanRefused
        if message["verb"] in ("image", "keep", "alone", "leave"):
            return self._image(message, pid, fds)
        name = str(message["name"])
        if message["verb"] == "forget":
            return self._forget(name, message["before"]), []
        who, incarnation = (name, int(message["rank"])), int(message["incarnation"])
        shape = int(message["nbytes"]), str(message["fingerprint"])
        if message["verb"] == "return":
            return self._take_back(who, incarnation, shape, pid, fds), []
        if message["verb"] == "take":
            return self._lend(who, incarnation, shape, pid, bool(message["fresh"]))
        raise LoanRefused

    def _image(self, message: dict[str, Any], pid: int, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        key = str(message["key"])
        if message["verb"] == "image":
            return self._images.find(key, pid)
        if message["verb"] == "keep":
            return self._images.keep(key, pid, fds), []
        if message["verb"] == "leave":
            return self._images.leave(key, pid), []
        return self._images.give_up(key, pid, str(message["reason"])), []

    def _lend(
        self, who: tuple[str, int], incarnation: int, shape: tuple[int, str], pid: int, fresh: bool
    ) -> tuple[dict[str, Any], list[int]]:
        held = self._segments.get(who)
        if held is not None and held.incarnation > incarnation:
            return {"error": f"incarnation {held.incarnation} has it"}, []
        if held is not None and not fresh and not held.free:
            return {"busy": True}, []
        owner = os.pidfd_open(pid)
        if held is not None and held.free and held.shape == shape:
            os.close(held.owner)
            held.owner, held.incarnation = owner, incarnation
            return {"lent": True, "adopted": True}, [held.fd]
        try:
            fd = _make(f"twinpool-arena-{who[0]}.{who[1]}", shape[0])
        except OSError as error:
            os.close(owner)
            return {"error": f"{shape[0]} bytes: {error.strerror}"}, []
        self._keep(who, _ArenaSegment(fd, shape, incarnation, owner))
        return {"lent": True, "adopted": False}, [fd]

    def _take_back(
        self, who: tuple[str, int], incarnation: int, shape: tuple[int, str], pid: int, fds: list[int]
    ) -> dict[str, Any]:
        held = self._segments.get(who)
        if held is not None and held.incarnation >= incarnation:
            return {"kept": False}
        if not fds or os.fstat(fds[0]).st_size != shape[0]:
            raise LoanRefused
        self._keep(who, _ArenaSegment(os.dup(fds[0]), shape, incarnation, os.pidfd_open(pid)))
        return {"kept": True}

    def _keep(self, who: tuple[str, int], segment: _ArenaSegment) -> None:
        """Make `segment` the one of this worker's rank; the one before is never lent again."""
        held = self._segments.pop(who, None)
        if held is not None:
            held.close()
        self._segments[who] = segment

    def _forget(self, name: str, before: int | None) -> dict[str, Any]:
        mine = [
            who
            for who, held in self._segments.items()
            if who[0] == name and (before is None or held.incarnation < int(before))
        ]
        for who in mine:
            self._segments.pop(who).close()
        if before is None:
            self._images.drop_unused()
        return {"forgotten": len(mine)}

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._images.close()


def address(token: str) -> str:
    """The address of the socket of this token's agent: abstract, so it leaves no file."""
    name = hashlib.blake2b(bytes.fromhex(token), digest_size=12, person=b"twinpool-arena").hexdigest()
    return f"\0twinpool-arena-{name}"


def _make(name: str, nbytes: int) -> int:
    """A memfd of `nbytes` zeros, sealed so that no process can resize it while others have it mapped."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def main() -> None:
    """``arena_agent.py``: read the token from the first line of standard input, serve until standard input closes."""
    agent = ArenaAgent(sys.stdin.buffer.readline().decode().strip())
    agent.serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
