"""A worker's side of its node's arena agent: loans of host memory that outlive the worker.

The client borrows a rank's segment, maps it, and hands it to the next agent when the agent dies. A failure here costs
only the state that would have outlived the worker: without an agent, or without an answer, the worker takes memory of
its own and logs that. Images of models go the same way (`cluster.arena.shared_weights`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinpool.cluster.arena.arena_agent import MESSAGE_BYTES, address
from twinpool.contracts.clock import Clock
from twinpool.contracts.outside_data import read_json

log = logging.getLogger("twinpool.arena")

REACH_S = 5.0
"""How long a worker tries to reach its node's agent, which may still be starting."""
OWNER_S = 5.0
"""How long a worker waits for the death of the process that has the segment, which the controller has had killed."""
PAUSE_S = 0.05
RETURN_S = 0.2
"""Seconds between two tries to give the segment to a new agent."""
_CREDENTIALS = struct.Struct("iII")


class ArenaProvider(Protocol):
    """A source of memory that outlives the ranks of a worker."""

    def take(self, rank: int, nbytes: int, fingerprint: str) -> memoryview | None:
        """Writable memory of `nbytes` that no other process writes to: with an earlier incarnation's state, or zeros.

        None where there is no such memory; the rank then allocates its own. An earlier state is only given if `nbytes`
        and `fingerprint` are unchanged.
        """


@dataclass
class ArenaLoan:
    """What this process has of the agent's: a segment, or an image. Its thread waits for the agent's death, and offers
    it to the next agent."""

    fd: int
    message: dict[str, Any]
    """What the next agent is sent with `fd`."""
    connection: socket.socket | None
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def begin(self) -> None:
        self.thread = threading.Thread(target=_watch, args=(self,), name="arena", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """End the thread, and close the file."""
        self.stop.set()
        with contextlib.suppress(OSError, AttributeError):
            self.connection.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        assert self.thread is not None
        self.thread.join(REACH_S)
        os.close(self.fd)


class ArenaClient:
    """`ArenaProvider` of one incarnation of a worker, from the agent of this node."""

    def __init__(
        self,
        token: str,
        name: str,
        incarnation: int,
        clock: Clock,
        pause: Callable[[float], None],
        owner_s: float = OWNER_S,
    ) -> None:
        """`token`: the agent's, in hex; empty: there is no agent. `owner_s`: how long to wait for the last borrower's
        death before taking a fresh segment."""
        self._token, self._name, self._incarnation = token, name, incarnation
        self._clock, self._pause, self._owner_s = clock, pause, owner_s
        self._loans: list[ArenaLoan] = []

    def take(self, rank: int, nbytes: int, fingerprint: str) -> memoryview | None:
        if not self._token:
            return None
        wanted = {"rank": rank, "incarnation": self._incarnation, "nbytes": nbytes, "fingerprint": fingerprint}
        message = {"token": self._token, "name": self._name, **wanted}
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(reach(self._token, self._clock, self._pause))
                fd, adopted = self._borrow(connection, message)
                stack.callback(os.close, fd)
                memory = mmap.mmap(fd, nbytes)
                # A forked child that hasn't executed another program yet must not be able to write here.
                memory.madvise(mmap.MADV_DONTFORK)
            except (OSError, ValueError) as error:
                log.warning(
                    "no arena: host memory ends with this worker", extra={"worker": self._name, "reason": str(error)}
                )
                return None
            stack.pop_all()
        loan = ArenaLoan(fd, {"verb": "return", **message}, connection)
        loan.begin()
        self._loans.append(loan)
        log.info("arena", extra={"worker": self._name, "rank": rank, "bytes": nbytes, "adopted": adopted})
        return memoryview(memory)

    def give_up(self) -> None:
        """End the loans for good: the segments are never lent again, and their memory is free once this process has
        unmapped it. Idempotent."""
        if not self._loans:
            return
        self.close()
        try:
            forget(self._token, self._name, self._incarnation + 1)
        except OSError as error:  # A new agent doesn't know them, and this one lends fresh ones in the end.
            log.warning("the agent keeps a segment", extra={"worker": self._name, "reason": str(error)})

    def close(self) -> None:
        """End the threads. The memory stays mapped, and the agent lends it again only when this process is dead.
        Idempotent."""
        for loan in self._loans:
            loan.end()
        self._loans.clear()

    def _borrow(self, connection: socket.socket, message: dict[str, Any]) -> tuple[int, bool]:
        """The segment's descriptor, and whether it has an earlier incarnation's state. Raises `OSError` where the agent
        has none."""
        deadline = self._clock.now() + self._owner_s
        while True:
            fresh = self._clock.now() >= deadline
            answer, fds = ask(connection, {"verb": "take", "fresh": fresh, **message})
            if "error" in answer:
                raise OSError(f"the agent has no segment: {answer['error']}")
            if fds:
                if fresh:
                    log.warning(
                        "the last incarnation still lives: its memory is left to it", extra={"worker": self._name}
                    )
                return fds[0], bool(answer["adopted"])
            self._pause(PAUSE_S)


def forget(token: str, name: str, before: int | None = None) -> None:
    """Have this node's agent drop the segments of a worker, all or only those of incarnations below `before`.

    Raises `OSError` where no agent answers.
    """
    connection = _connect(token)
    try:
        ask(connection, {"verb": "forget", "token": token, "name": name, "before": before})
    finally:
        connection.close()


def reach(token: str, clock: Clock, pause: Callable[[float], None]) -> socket.socket:
    """A connection to this node's agent, which may still be starting. Raises `OSError` where none answers in time."""
    deadline = clock.now() + REACH_S
    while True:
        try:
            return _connect(token)
        except OSError as error:
            if clock.now() >= deadline:
                raise OSError(f"no agent answers on this node ({error})") from None
        pause(PAUSE_S)


def _connect(token: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(REACH_S)
        connection.connect(address(token))
        # Abstract names can be taken by anybody.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
            raise PermissionError("the agent's socket is another user's")
    except BaseException:
        connection.close()
        raise
    return connection


def ask(
    connection: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()
) -> tuple[dict[str, Any], list[int]]:
    """Send a message, wait for the answer; returns it with its descriptors. Raises `OSError` where none comes in
    time."""
    socket.send_fds(connection, [json.dumps(message).encode()], list(fds), socket.MSG_NOSIGNAL)
    data, got, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionError("the agent has hung up")
    answer: dict[str, Any] = read_json(data)
    return answer, got


def _watch(loan: ArenaLoan) -> None:
    """Wait for the agent's death, then give what is lent to the next agent; again and again, until `loan.stop`."""
    while not loan.stop.wait(0.0 if loan.connection is not None else RETURN_S):
        try:
            if loan.connection is None:
                loan.connection = _connect(loan.message["token"])
                answer, _ = ask(loan.connection, loan.message, (loan.fd,))
                log.warning("the agent was started again", extra={"kept": bool(answer.get("kept"))})
            loan.connection.settimeout(None)
            if loan.connection.recv(1):
                continue
            raise ConnectionError
        except (OSError, ValueError):
            if loan.connection is not None:
                loan.connection.close()
                loan.connection = None
