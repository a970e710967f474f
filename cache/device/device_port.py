"""The device port: every launch, copy and network write says what it reads and writes, and on which stream.

The host names operations and goes on; the device runs them later. Order comes from four places and no others:

    stream      operations of one stream run in the order in which they were submitted
    after       an operation starts after the ones in its `after` have completed
    gates       an operation touches a layer of a pool after the loads into that layer that its gate was told of
    the host    waited for an operation, or saw it done, before it submitted the next

Whatever two operations touch in common, and one of them writes, must be ordered by these. Callers hold the `Completion`
and read nothing, free nothing and send nothing before it is done. On a CPU, torch is synchronous and nothing goes wrong
if somebody forgets; so tests run the same code on the lazy device (`cache.device.adversarial_device`), which runs
operations late and refuses two accesses that nothing orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class PageSpanUse:
    """Pages (or slots) of one pool in one place, in all its buffers."""

    place: str
    pool: str
    pages: Sequence[int]
    layers: Sequence[int] | None = None
    """None: all layers."""


def spans(
    place: str, pages: Mapping[str, Sequence[int]], layers: Sequence[int] | None = None
) -> tuple[PageSpanUse, ...]:
    """Pages of several pools in one place; pools without any are left out."""
    return tuple(PageSpanUse(place, pool, indices, layers) for pool, indices in pages.items() if len(indices))


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """One operation as the device sees it."""

    name: str
    stream: DeviceStream
    reads: tuple[PageSpanUse, ...] = ()
    writes: tuple[PageSpanUse, ...] = ()


class Completion(Protocol):
    """When an operation is complete."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Return once the operation is complete: the host waits."""

    def order(self) -> None:
        """Make what the running operation does from here on come after this one: the device waits, the host doesn't.

        To be called from within an operation's `run`.
        """


GatedLoads = Mapping[tuple[str, int], Sequence[Completion]]
"""By pool and layer: what an operation promises to `order` before it touches that layer."""
NO_GATES: GatedLoads = {}


class Device(Protocol):
    """Where tensors live and operations run."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def checks(self) -> bool:
        """Whether it verifies what operations read and write. Where it doesn't, nobody looks at the spans of a
        `DeviceOp`, and a caller for whom they are costly to name leaves them out."""

    def submit(
        self,
        op: DeviceOp,
        run: Callable[[], object],
        after: Sequence[Completion] = (),
        *,
        gates: GatedLoads = NO_GATES,
        keep: Sequence[Any] = (),
    ) -> Completion:
        """Run `run` on `op.stream`, after the operations in `after`. What `run` raises, `submit` or `wait` raises.

        `keep` is held until the operation is complete: tensors that it reads and nobody else may hold on to.
        """

    def touch(self, name: str, *, reads: Sequence[PageSpanUse] = (), writes: Sequence[PageSpanUse] = ()) -> None:
        """The host itself reads, writes or frees (a write) now; a checking device verifies that it may."""

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Zeroed host memory that the device copies from and to at full speed: uint8 [nbytes]."""

    def register_host(self, memory: torch.Tensor) -> None:
        """Make host memory that came from elsewhere as good as `allocate_host`'s. Raises `RuntimeError` where that
        can't be."""


class _Done:
    done = True

    def wait(self) -> None:
        return

    def order(self) -> None:
        return


DONE: Completion = _Done()


class _Failed:
    """An operation that could not even begin."""

    done = True

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error

    def order(self) -> None:
        return


def attempt(device: Device, op: DeviceOp, run: Callable[[], object], after: Sequence[Completion] = ()) -> Completion:
    """`submit`, for a caller that can do without: the device's error becomes a completion whose `wait` raises it."""
    try:
        return device.submit(op, run, after)
    except RuntimeError as error:
        return _Failed(error)


def failure(completion: Completion) -> RuntimeError | None:
    """The device's error that ended a complete operation before its end: nothing that it was to write is to be used.

    What a checking device finds is a bug and is raised.
    """
    assert completion.done, "an operation that is under way has neither failed nor succeeded"
    try:
        completion.wait()
    except RuntimeError as error:
        return error
    return None
