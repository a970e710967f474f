"""The control messages of workers in one process without pyzmq: what `transfer.net` uses of it, over queues.

A machine with a GPU that can be had for some minutes may have no pyzmq. Two workers in one process need none: their
state goes over plane `local`, and only rooms' control messages go through sockets. `install` puts a module named `zmq`
into `sys.modules` whose ROUTER and DEALER sockets are queues, with an eventfd for whoever polls. Messages of one
connection arrive in order and none is lost; a connection is never cut. Everything else of pyzmq is missing and raises
when it is used: planes between processes, sockets of other kinds, CURVE, KV events. So does `cryptography`, which
connections between hosts need, where that isn't installed either.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any, ClassVar


class ProcessSocketError(Exception):
    """Stands for `zmq.ZMQError`."""


class NothingThere(ProcessSocketError):
    """Stands for `zmq.Again`."""


class ProcessSocket:
    """A ROUTER or DEALER socket. Any thread may send to it; one receives."""

    _bound: ClassVar[dict[str, ProcessSocket]] = {}
    _numbers: ClassVar[Iterator[int]] = itertools.count(1)
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __class_getitem__(cls, item: object) -> type[ProcessSocket]:
        return cls

    def __init__(self, kind: str) -> None:
        if kind not in ("ROUTER", "DEALER"):
            raise ProcessSocketError(f"a socket {kind} needs pyzmq")
        self.kind, self.identity, self.endpoint = kind, b"", ""
        self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._frames: deque[list[bytes]] = deque()
        self._peer: ProcessSocket | None = None
        self._callers: dict[bytes, ProcessSocket] = {}
        self._monitor: ProcessSocket | None = None
        self.closed = False

    def set(self, option: str, value: object) -> None:
        if option == "ROUTING_ID":
            assert isinstance(value, bytes)
            self.identity = value

    def bind(self, endpoint: str) -> None:
        with self._lock:
            self.endpoint = f"{endpoint.rpartition(':')[0]}:{next(self._numbers)}"
            self._bound[self.endpoint] = self

    def bind_to_random_port(self, address: str, *_: object) -> int:
        self.bind(f"{address}:0")
        return int(self.endpoint.rpartition(":")[2])

    def getsockopt_string(self, option: str) -> str:
        assert option == "LAST_ENDPOINT", option
        return self.endpoint

    def connect(self, endpoint: str) -> None:
        with self._lock:
            self._peer = self._bound.get(endpoint)
            if self._peer is not None:
                self._peer._callers[self.identity] = self
        if self._peer is not None and self._monitor is not None:
            self._monitor._arrive([])

    def send(self, data: bytes, flags: int = 0) -> None:
        if self._peer is not None:
            self._peer._arrive([self.identity, bytes(data)])

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        caller = self._callers.get(frames[0])
        if caller is not None:
            caller._arrive([bytes(frame) for frame in frames[1:]])

    def _arrive(self, frames: list[bytes]) -> None:
        with self._lock:
            if not self.closed:
                self._frames.append(frames)
                os.eventfd_write(self.event, 1)

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        with self._lock:
            if not self._frames:
                raise NothingThere
            frames = self._frames.popleft()
            if not self._frames:
                os.eventfd_read(self.event)
            return frames

    def recv(self, flags: int = 0) -> bytes:
        return self.recv_multipart()[0]

    def get_monitor_socket(self, events: int) -> ProcessSocket:
        """Where one thing is told: that there is a connection. Those within a process aren't cut."""
        self._monitor = ProcessSocket("DEALER")
        return self._monitor

    def disable_monitor(self) -> None: ...

    def close(self, linger: int = 0) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                self._bound.pop(self.endpoint, None)
                os.close(self.event)


class ProcessContext:
    """Stands for `zmq.Context`."""

    def __class_getitem__(cls, item: object) -> type[ProcessContext]:
        return cls

    @classmethod
    def instance(cls) -> ProcessContext:
        return cls()

    def socket(self, kind: str) -> ProcessSocket:
        return ProcessSocket(kind)


class ProcessPoller:
    """Stands for `zmq.Poller`, to read."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._members: dict[Any, int] = {}

    def __contains__(self, waitable: object) -> bool:
        return waitable in self._members

    def register(self, waitable: ProcessSocket | int, events: int = 0) -> None:
        self._members[waitable] = waitable if isinstance(waitable, int) else waitable.event
        self._poll.register(self._members[waitable], select.POLLIN)

    def unregister(self, waitable: ProcessSocket | int) -> None:
        self._poll.unregister(self._members.pop(waitable))

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        return self._poll.poll(timeout_ms)


class _StandIn(ModuleType):
    """A module whose other names are constants: their own name."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def install() -> bool:
    """Stand in for pyzmq where it isn't installed; returns whether this does. To be called before anything of
    `transfer` is imported."""
    if _missing("cryptography"):
        parts = ("exceptions", "hazmat", "hazmat.primitives", "hazmat.primitives.ciphers",
                 "hazmat.primitives.ciphers.aead")  # fmt: skip
        made = _stand_in("cryptography", *(f"cryptography.{part}" for part in parts))
        vars(made["cryptography.exceptions"]).update(InvalidTag=ProcessSocketError)
    if not _missing("zmq"):
        return isinstance(sys.modules.get("zmq"), _StandIn)
    made = _stand_in("zmq", "zmq.utils", "zmq.utils.z85", "zmq.utils.monitor")
    names: dict[str, object] = {"Socket": ProcessSocket, "Context": ProcessContext, "Poller": ProcessPoller}
    names |= {"ZMQError": ProcessSocketError, "Again": NothingThere, "NOBLOCK": 0, "POLLIN": select.POLLIN}
    names |= {"EVENT_HANDSHAKE_SUCCEEDED": _CONNECTED, "EVENT_DISCONNECTED": _CONNECTED + 1}
    vars(made["zmq"]).update(names)
    vars(made["zmq.utils.monitor"]).update(recv_monitor_message=_told)
    return True


def _missing(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None


def _stand_in(*names: str) -> dict[str, _StandIn]:
    made = {name: _StandIn(name) for name in names}
    for name, module in made.items():
        module.__path__ = []  # A package: parts of it can be imported.
        parent, _, last = name.rpartition(".")
        if parent:
            vars(made[parent])[last] = module
    sys.modules.update(made)
    return made


_CONNECTED = 1


def _told(monitor: ProcessSocket, flags: int = 0) -> dict[str, int]:
    """What a monitor tells, once; raises `NothingThere` from then on."""
    monitor.recv_multipart(flags)
    return {"event": _CONNECTED}
