"""Peers of both ends of a hand-over: whether two workers can hand over to each other, and which of them have ended.

Two workers fit if they have the same model, state, numerics and plane.

The controller's word that a worker has ended is no proof that its processes write no more: a lease that ended is kept
by the thread that steps the worker, and not by what is already on its way, or by a process that stood still and goes
on. So it ends quarantine only where access is ended besides: a plane that is revocable, or one on which the peer's own
access is taken away. A peer on this host is proven dead by its pidfd (hazard A5), or it has *closed*: its process goes
on in another role, and has said, once it had ended its threads and unmapped the memory of others, that it holds nothing
of the one before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from twinpool.cache.device.device_port import Device
from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.page_moves import describe_spec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import Incarnation, WorkerName
from twinpool.contracts.messages.fingerprint import PROTOCOL, Fingerprint, mismatch
from twinpool.contracts.messages.worker_status import EndedWorker
from twinpool.transfer.net.control_channel import ControlTransport
from twinpool.transfer.planes.data_plane import DataPlane
from twinpool.transfer.rooms import room_messages as m

KeyT = TypeVar("KeyT")
PeerT = TypeVar("PeerT")


@dataclass(frozen=True)
class RoomEnd:
    """What either end of a worker's rooms is built of."""

    name: WorkerName
    incarnation: Incarnation
    fingerprint: Fingerprint
    """What peers must have in common with this worker."""
    plane: DataPlane
    pools: PoolSet
    device: Device
    config: TransferConfig
    transport: ControlTransport
    clock: Clock


class EndedWorkers:
    """The latest incarnation of each worker that has ended, as far as this worker has heard."""

    def __init__(self) -> None:
        self._latest: dict[WorkerName, Incarnation] = {}
        self._closed: dict[WorkerName, tuple[Incarnation, Incarnation]] = {}
        """The first and last incarnation that the latest process that closed any has closed."""

    def update(self, ended: Sequence[EndedWorker]) -> None:
        """Take in what the controller says. A later word with a smaller number changes nothing."""
        for one in ended:
            if one.closed_from and one.incarnation >= self._latest.get(one.name, 0):
                self._closed[one.name] = one.closed_from, one.incarnation
            self._latest[one.name] = max(one.incarnation, self._latest.get(one.name, one.incarnation))

    def covers(self, name: WorkerName, incarnation: Incarnation) -> bool:
        """Whether this incarnation has ended."""
        return incarnation <= self._latest.get(name, 0)

    def closed(self, name: WorkerName, incarnation: Incarnation) -> bool:
        """Whether this incarnation has ended in a process that lives on and holds nothing of it any more."""
        first, last = self._closed.get(name, (1, 0))
        return first <= incarnation <= last

    def ends(self, name: WorkerName, incarnation: Incarnation, watched: bool) -> bool:
        """Whether the controller's word alone ends this incarnation as a peer: it has closed, or its processes can't be
        watched from here (not `watched`), as on another host, and it has ended."""
        return self.closed(name, incarnation) or (not watched and self.covers(name, incarnation))

    @staticmethod
    def reason(name: WorkerName, incarnation: Incarnation) -> str:
        """Why its rooms end, in words."""
        return f"{name}, incarnation {incarnation}, has ended, as the controller says"


class PeerTable(Mapping[KeyT, PeerT]):
    """The peers of one end, and which incarnations of workers have ended for the controller."""

    def __init__(self) -> None:
        self._peers: dict[KeyT, PeerT] = {}
        self._ended = EndedWorkers()

    def __getitem__(self, key: KeyT) -> PeerT:
        return self._peers[key]

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._peers)

    def __len__(self) -> int:
        return len(self._peers)

    def workers_ended(self, ended: Sequence[EndedWorker]) -> None:
        """Take in which incarnations of workers have ended, as the controller says; those on other hosts are ended when
        peers are heard next."""
        self._ended.update(ended)


def fingerprint(weights: str, spec: PoolSetSpec, numerics: str) -> Fingerprint:
    """Return the fingerprint of a worker of this build. `spec`: its pool set, of which the layout over all its ranks
    counts."""
    described = json.dumps(describe_spec(spec.whole), sort_keys=True)
    return Fingerprint(PROTOCOL, hashlib.blake2b(described.encode(), digest_size=16).hexdigest(), numerics, weights)


def refuse_mismatch(name: WorkerName, mine: Fingerprint, layout: dict[str, object], plane: str, hello: m.Hello) -> None:
    """Check the hello of a peer. Raises `LayoutMismatch` that names the first difference, with both values."""
    if plane != hello.plane:
        raise LayoutMismatch(f"transfer.plane: {name} has {plane}, {hello.worker} has {hello.plane}")
    if mine.protocol == hello.fingerprint.protocol:
        for path, ours, theirs in _differences(layout, hello.layout, ""):
            raise LayoutMismatch(f"{path}: {name} has {ours}, {hello.worker} has {theirs}")
    reason = mismatch(mine, hello.fingerprint, name, hello.worker)
    if reason is not None:
        raise LayoutMismatch(reason)


def _differences(ours: object, theirs: object, path: str) -> list[tuple[str, object, object]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        out = []
        for key in sorted({*ours, *theirs}):
            name = f"{path}.{key}" if path else str(key)
            out += _differences(ours.get(key), theirs.get(key), name)
        return out
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return [] if list(ours) == list(theirs) else [(path, list(ours), list(theirs))]
    return [] if ours == theirs else [(path, ours, theirs)]
