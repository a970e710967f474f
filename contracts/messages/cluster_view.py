"""The controller's table of workers as it sends it to routers: the whole table at once, then what has changed."""

from __future__ import annotations

from typing import Annotated

from twinpool.contracts.message_types import SKIP_UNKNOWN, SOME, Finite, Message, Uint32, Uint64
from twinpool.contracts.messages.worker_status import WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import AdapterRef, WeightsVersion


class WatchRequest(Message, frozen=True):
    """A router's wish to be sent the table from now on."""

    changes: bool = False
    """Whether changes will do after the first table; else the whole table is sent each time."""
    records: bool = False
    """Whether it answers `ClusterView.record_asks`."""


class ControlPlane(Message, frozen=True):
    """The controllers of a cluster: the one that leads, and those that wait to."""

    leader: str
    """Where the leader is reached, ``host:port``; empty: there is one that nobody replaces."""
    term: Uint32
    """How many controllers have led so far, it included."""
    standbys: Annotated[tuple[str, ...], SOME]
    """Where those that wait are reached."""
    away: bool = False
    """Whether no controller answers this router now; the rest is as it was told last."""


class ServedWeights(Message, frozen=True):
    """What a cluster serves, and whether it serves now: the controller's ledger has it as it is here."""

    weights: WeightsVersion = WeightsVersion(0)
    """Those that every worker is to have."""
    pending: WeightsVersion | None = None
    """Those that workers read and check, before the cluster changes to them; None: no change is being prepared."""
    rolling: bool = False
    """Whether workers change to `weights` one after the other, and serve what they have until then."""
    wait_s: Finite = 0.0
    """Seconds that a worker's requests have to end, once the cluster has changed, or goes to sleep."""
    paused: bool = False
    """Whether workers make no steps, until the cluster is resumed."""
    asleep: Uint32 = 0
    """1: no worker runs, and their processes keep the weights; 2: not even the processes are there. 0: it is awake."""
    failed: str = ""
    """Why the latest change of weights was given up, in words; empty where it wasn't."""
    behind: Uint32 = 0
    """How many workers have still to change to `weights`; 0 in the ledger."""
    since: Finite = 0.0
    """When the last worker had changed to `weights`, in seconds since 1970 by the controller's machine; while some have
    yet to, when the cluster changed."""
    tried: Uint32 = 0
    """The number of the latest change that was begun, given up or not."""
    pending_rolling: bool = False
    """As `rolling`, once the cluster has changed to the pending weights."""
    pending_wait_s: Finite = 0.0
    """As `wait_s`, once it has."""
    by_demand: bool = False
    """Whether it sleeps for want of requests, so that one that comes wakes it."""


class RecordAsk(Message, frozen=True):
    """A question for the records of a request; answered by a `RecordReport`."""

    number: Uint64
    """By which the answer names it."""
    request_id: str


class ClusterView(Message, frozen=True):
    """The table, or what has changed in it since the message before."""

    version: Uint64
    workers: Annotated[tuple[WorkerView, ...], SOME, SKIP_UNKNOWN] = ()
    """All of them, or with `changes` those that have changed since the message before."""
    shutting_down: bool = False
    changes: bool = False
    statuses: Annotated[tuple[WorkerStatus, ...], SOME, SKIP_UNKNOWN] = ()
    """Of workers of which nothing else has changed."""
    control_plane: ControlPlane | None = None
    """None: it is as it was told before."""
    record_asks: Annotated[tuple[RecordAsk, ...], SOME] = ()
    """Requests that are looked for."""
    adapters: Annotated[tuple[AdapterRef, ...], SOME] | None = None
    """The adapters that are served, by which requests may name one. None: they are as they were told before."""
    served: ServedWeights | None = None
    """The weights that the cluster serves; None: they are as they were told before, or the checkpoint's."""
