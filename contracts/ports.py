"""Where processes meet: the worker as its host drives it, and the worker as a router reaches it.

A *worker* is a plain object, single-threaded, without an event loop; its host gives it a thread. A *port* is how a
router reaches a worker: over gRPC between processes, directly in one process. Both sides of both edges are here so
that the router, the hosts and the workers don't know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from contracts.fingerprint import Fingerprint
from contracts.ids import Incarnation, Role, WorkerName
from contracts.messages import CheckReport, Command, Event, Fits, WorkerStatus

SessionId = NewType("SessionId", int)
"""One router's connection to one worker, numbered by the host; a request belongs to the session that submitted it."""


class Worker(Protocol):
    """A prefill or decode worker. All methods but `wake` are called from the one thread that its host gives it."""

    def handle(self, session: SessionId, command: Command) -> None:
        """Take a command in; never raises for a bad request (that ends in a `Done` with an error)."""

    def step(self) -> list[tuple[SessionId, Event]]:
        """One round: hear the peers, expire what is late, schedule, compute one batch, publish. Takes one batch's
        time at most and returns the events to deliver, in order."""

    def wait(self, timeout_s: float) -> None:
        """Return when `step` has something to do, when `wake` was called, or after `timeout_s`."""

    def wake(self) -> None:
        """Make `wait` return; may be called from any thread."""

    def drop_session(self, session: SessionId) -> None:
        """The router behind `session` is gone: cancel its requests."""

    def drain(self) -> None:
        """Stop admission; what runs is finished. Idempotent."""

    def undrain(self) -> None:
        """Admit again."""

    @property
    def drained(self) -> bool:
        """Draining, and nothing runs, waits or is outgoing: the worker can leave."""

    @property
    def runnable(self) -> bool:
        """Something could be computed now: a worker that says so and ends no step is hung."""

    @property
    def unfit(self) -> str:
        """Why nothing more that it computes can be trusted, in words; empty while it can. Its host ends it then."""

    def fence(self) -> None:
        """The worker's lease has ended: send nothing any more, to routers or peers."""

    @property
    def fits(self) -> Fits: ...

    @property
    def control(self) -> str:
        """Endpoint of the control socket for rooms; empty where peers don't connect to this worker."""

    @property
    def fingerprint(self) -> Fingerprint:
        """What its peers must have in common with it."""

    def status(self) -> WorkerStatus: ...

    def check(self) -> CheckReport: ...

    def close(self) -> None:
        """Release everything. Idempotent."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """What a worker registered with the controller."""

    name: WorkerName
    role: Role
    incarnation: Incarnation
    pid: int
    node: str
    endpoint: str
    """Its gRPC service, ``host:port``; empty in one process."""
    control: str
    fits: Fits
    node_id: str = ""
    """The Ray node that it runs on; empty without Ray."""
    fingerprint: Fingerprint | None = None
    """What its peers must have in common with it; None while no process of it has registered."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the controller last saw it."""

    record: WorkerRecord
    status: WorkerStatus
    cordoned: bool = False
    """Its node gets no worker until it is undrained."""


class Session(Protocol):
    """A router's open stream to one worker."""

    def send(self, commands: Sequence[Command]) -> None:
        """Queue commands, in order; never blocks. Nothing happens once the session is closed."""

    def close(self) -> None: ...


class Port(Protocol):
    """How a router reaches one incarnation of one worker. Used from one event loop; callbacks run on it."""

    async def connect(self, on_events: Callable[[Sequence[Event]], None], on_closed: Callable[[str], None]) -> Session:
        """Open the stream. `on_closed` is called once, with the reason, when it ends other than by `close`.

        Raises `ConnectionError` when the worker can't be reached or is another incarnation.
        """

    async def status(self) -> WorkerStatus: ...

    async def check(self) -> CheckReport: ...

    async def drain(self) -> WorkerStatus: ...

    async def undrain(self) -> WorkerStatus: ...

    async def aclose(self) -> None: ...


class Directory(Protocol):
    """The controller's table as a router watches it."""

    def watch(self, on_change: Callable[[tuple[WorkerView, ...]], None]) -> Callable[[], None]:
        """Call `on_change` with the whole table now and at each change, on the event loop; returns the unsubscriber."""

    def port(self, record: WorkerRecord) -> Port: ...

    async def change_role(self, name: WorkerName, role: Role) -> None:
        """Have the controller drain a worker and start it in another role.

        Raises `RequestError` where that can't be, saying why, and `ConnectionError` without an answer.
        """

    async def drain(self, target: str) -> tuple[WorkerName, ...]:
        """Have the controller tell a worker to leave, or cordon a node and tell all that are on it; returns who is
        told. Raises as `change_role` does."""

    async def undrain(self, target: str) -> tuple[WorkerName, ...]:
        """Have the controller take that back, for a worker or a node; returns who had left and is started again.
        Raises as `change_role` does."""
