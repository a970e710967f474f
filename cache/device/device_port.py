"""The device port: every launch, copy and network write says what it reads and writes, and on which stream.

The host names operations and goes on; the device runs them later. Order comes from five places and no others:

    stream      operations of one stream run in the order in which they were submitted
    after       an operation starts after the ones in its `after` have completed
    gates       an operation touches a layer of a pool after the loads into that layer that its gate was told of
    marks       an operation touches a layer of a pool after another one, still under way, was through with that layer
    the host    waited for an operation, or saw it done, before it submitted the next

Two operations that touch the same page, one of them writing, must be ordered by these. Callers hold the `Completion`
and read nothing, free nothing and send nothing before it is done. On a CPU, torch is synchronous and a forgotten order
does no harm; so tests run the same code on the lazy device (`cache.device.adversarial_device`), which runs operations
late and refuses two accesses that nothing orders.

Layer marks say how far an operation of many layers has come, such as a step of the engine. It is given the marks of
some groups of layers when it is submitted, and says after each layer how many layers of every pool it has written. What
it wrote of a group's layers may be read by operations that come after the group's mark: pages leave for a peer while
later layers are computed. A mark says nothing about whether the operation will succeed; that is what its completion
says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch

DEVICE = "device"
"""The place of the pools that kernels read."""
HOST = "host"
"""The place of their mirror in host memory."""


class DeviceStream(StrEnum):
    """The streams of a worker. A slot's writes all go to one of them."""

    COMPUTE = "compute"
    LOAD = "load"
    """Host to device."""
    SAVE = "save"
    """Device to host."""
    SEND = "send"
    """Device to peers. An operation of the network runs on the host, once what it comes after has happened. Each lane
    (`DeviceOp.lane`) is a stream of its own."""


@dataclass(frozen=True, slots=True)
class PageSpanUse:
    """The use of pages (or slots) of one pool in one place, in all its buffers."""

    place: str
    pool: str
    pages: Sequence[int]
    layers: Sequence[int] | None = None
    """None: all layers."""


def spans(
    place: str, pages: Mapping[str, Sequence[int]], layers: Sequence[int] | None = None
) -> tuple[PageSpanUse, ...]:
    """The spans of `pages`, by pool, in one place; pools without pages are left out."""
    return tuple(PageSpanUse(place, pool, indices, layers) for pool, indices in pages.items() if len(indices))


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """One operation as declared to the device: its stream, and the pages that it reads and writes."""

    name: str
    stream: DeviceStream
    reads: tuple[PageSpanUse, ...] = ()
    writes: tuple[PageSpanUse, ...] = ()
    lane: str = ""
    """Of a send: the link that it takes. Sends of different lanes are of different streams: none waits for another."""

    @property
    def line(self) -> str:
        """The stream, told apart by lane: operations of one line run in the order in which they were submitted."""
        return f"{self.stream} {self.lane}" if self.lane else self.stream


class Completion(Protocol):
    """The handle of a submitted operation, to ask or wait for its end. A failed operation is done as well."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Return once the operation is complete: the host waits. Raises the operation's error."""

    def order(self) -> None:
        """Make what the running operation does from here on come after this one: the device waits, the host doesn't.

        To be called from within an operation's `run`.
        """


GatedLoads = Mapping[tuple[str, int], Sequence[Completion]]
"""By pool and layer: the loads that an operation promises to `order` before it touches that layer."""
NO_GATES: GatedLoads = {}


class RemoteWrite(Protocol):
    """Writes of a peer into pages of this device, from the time at which it may begin until it writes no more."""

    def arrived(self, writes: Sequence[PageSpanUse]) -> None:
        """Declare that the peer has written these pages, and writes them no more."""

    def close(self) -> None:
        """Declare that the peer writes none of the other pages any more. Idempotent."""


class UncheckedRemoteWrite:
    """The `RemoteWrite` of devices that check nothing."""

    def arrived(self, writes: Sequence[PageSpanUse]) -> None:
        return

    def close(self) -> None:
        return


LayerCounts = Mapping[str, int]
"""By pool, how many of its layers are written: layers 0 to count-1."""


def layer_groups(layers: LayerCounts, count: int) -> list[LayerCounts]:
    """Divide the layers of all pools into `count` groups of about equal sizes: for each group the layers that are
    written once it is. The last has all layers."""
    return [{pool: -(-most * number // count) for pool, most in layers.items()} for number in range(1, count + 1)]


class LayerMarks:
    """The marks of one operation, for devices whose operations run in threads of the host.

    The operation calls `passed`; its device calls `end` once it is over. Every mark is reached or failed then.
    """

    def __init__(self, groups: Sequence[LayerCounts]) -> None:
        """`groups`: the layers that are written with each group, which grow from group to group."""
        assert groups, "an operation without groups has no marks"
        self.groups = tuple(groups)
        self.step = 0
        """The number of the operation among those with marks, at the leader of several ranks; 0: there are none."""
        self._changed = threading.Condition()
        self._reached = 0
        self._error: BaseException | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, group: int) -> Completion:
        """The mark of a group, as a completion: others come after it."""
        return LayerMark(self, group)

    def __iter__(self) -> Iterator[Completion]:
        return (self[group] for group in range(len(self)))

    def passed(self, written: LayerCounts) -> None:
        """Reach the marks of all groups of whose layers `written` has all. To be called from within the operation."""
        reached = self._through(self._reached, written)
        if reached > self._reached:
            with self._changed:
                self._reached = reached
                self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """The operation is over: all marks are reached or, where it failed, those that weren't reached fail."""
        with self._changed:
            if error is None:
                self._reached = len(self.groups)
            self._error = error
            self._changed.notify_all()

    def reached(self, group: int) -> bool:
        return group < self._reached

    def settled(self, group: int) -> bool:
        """Whether a mark is reached, or never will be."""
        return self.reached(group) or self._error is not None

    def wait(self, group: int) -> None:
        """Return once a mark is reached. Raises the operation's error where it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self.settled(group))
        self._raise_unless_reached(group)

    def _through(self, count: int, written: LayerCounts) -> int:
        """How many groups, of which `count` are written already, have all their layers in `written`."""
        while count < len(self.groups) and all(written[pool] >= most for pool, most in self.groups[count].items()):
            count += 1
        return count

    def _raise_unless_reached(self, group: int) -> None:
        if not self.reached(group) and self._error is not None:
            raise self._error


class LayerMark:
    """One mark of an operation under way, as a `Completion`."""

    def __init__(self, marks: LayerMarks, group: int) -> None:
        self.marks, self.group = marks, group

    @property
    def done(self) -> bool:
        return self.marks.settled(self.group)

    def wait(self) -> None:
        self.marks.wait(self.group)

    def order(self) -> None:
        self.wait()


class Device(Protocol):
    """Where tensors live and operations run."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def checks(self) -> bool:
        """Whether the device verifies what operations read and write. Otherwise the spans of a `DeviceOp` aren't
        read, and a caller leaves out spans that are costly to name."""

    def submit(
        self,
        op: DeviceOp,
        run: Callable[[], object],
        after: Sequence[Completion] = (),
        *,
        gates: GatedLoads = NO_GATES,
        keep: Sequence[Any] = (),
        marks: LayerMarks | None = None,
    ) -> Completion:
        """Run `run` on `op.stream`, after the operations in `after`. An error of `run` is raised here or by `wait`.

        `gates`: loads that `run` orders itself, layer by layer. `keep` is held until the operation is complete: tensors
        that it reads and that its caller may drop earlier. `marks`: of this device, which `run` reaches layer by layer.
        """

    def marks(self, groups: Sequence[LayerCounts]) -> LayerMarks | None:
        """Return marks for one operation that is to be submitted, one for each of `groups`; None where nothing could
        run beside it, as operations are complete when `submit` returns."""

    def touch(self, name: str, *, reads: Sequence[PageSpanUse] = (), writes: Sequence[PageSpanUse] = ()) -> None:
        """Declare that the host itself reads, writes or frees pages now; freeing counts as a write.

        A checking device raises `UnorderedAccess` where nothing orders this after a conflicting operation.
        """

    def remote_write(self, name: str, writes: Sequence[PageSpanUse]) -> RemoteWrite:
        """Declare that a peer may write these pages from now on, until the returned declaration says otherwise.

        A checking device raises `UnorderedAccess` where nothing orders this after a conflicting operation, and for each
        access to these pages in the meantime.
        """

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Zeroed host memory that the device copies from and to at full speed: uint8 [nbytes]."""

    def register_host(self, memory: torch.Tensor) -> None:
        """Make host memory that came from elsewhere as fast to copy as `allocate_host`'s.

        Raises `RuntimeError` where the device can't. Nothing unregisters the memory.
        """

    def end_lane(self, lane: str) -> None:
        """Forget a lane, after what was submitted to it. Nothing is submitted to it any more."""

    def close(self) -> None:
        """Wait for what was submitted to threads of the device, and end them. Idempotent."""


class _Done:
    done = True

    def wait(self) -> None:
        return

    def order(self) -> None:
        return


DONE: Completion = _Done()


class _Failed:
    """The completion of an operation that the device refused."""

    done = True

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def order(self) -> None:
        return


def attempt(device: Device, op: DeviceOp, run: Callable[[], object], after: Sequence[Completion] = ()) -> Completion:
    """Submit for a caller that can do without the operation.

    A `RuntimeError` of `submit` becomes a completion that is done, and whose `wait` raises the error.
    """
    try:
        return device.submit(op, run, after)
    except RuntimeError as error:
        return _Failed(error)


def failure(completion: Completion) -> RuntimeError | None:
    """Return the device's error (`RuntimeError`) that made an operation fail, or None; the operation must be done.

    Nothing that a failed operation was to write may be used. Errors of other types, such as those that a checking
    device finds, are bugs and are raised.
    """
    assert completion.done, "an operation that is under way has neither failed nor succeeded"
    try:
        completion.wait()
    except RuntimeError as error:
        return error
    return None
