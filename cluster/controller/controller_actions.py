"""The messages between the controller and its supervisor, which are their own wire format (`contracts.message_types`).

The supervisor starts and ends workers' processes; the controller obeys the latest one. It opens one stream: its
`SupervisorReport`s go one way, the controller's `SupervisorOrders` the other."""

from __future__ import annotations

from typing import Annotated

from twinpool.cluster.controller.node_room import ClusterRoom, NodePlace
from twinpool.contracts.ids import NO_INCARNATION, Incarnation, Role, WorkerName
from twinpool.contracts.message_types import SKIP_UNKNOWN, SOME, UNSIGNED, Message, Uint32
from twinpool.contracts.messages.calls import Exchange
from twinpool.contracts.messages.pool_changes import SettingsAnswer, SettingsChange
from twinpool.contracts.sampling_params import WeightsVersion

WorkerKey = tuple[WorkerName, Annotated[Incarnation, UNSIGNED]]
"""One incarnation of one worker."""


class EndedProcess(Message, frozen=True):
    """An incarnation whose process has ended, as the supervisor tells it."""

    name: WorkerName
    incarnation: Annotated[Incarnation, UNSIGNED]
    reason: str
    """Why it ended, in words for the operator."""


class PlacedProcess(Message, frozen=True):
    """An incarnation whose process runs on a node, before its worker has registered."""

    name: WorkerName
    incarnation: Annotated[Incarnation, UNSIGNED]
    node: NodePlace
    others: Annotated[tuple[NodePlace, ...], SOME] = ()
    """The nodes of its ranks from 1 on, as far as they are known."""


class StartWorker(Message, frozen=True, tag="start"):
    """Start the process of an incarnation."""

    name: WorkerName
    role: Role
    incarnation: Annotated[Incarnation, UNSIGNED]
    avoid: Annotated[tuple[str, ...], SOME] = ()
    """Cordoned nodes, by host name or Ray node id, on which the worker must not start."""
    only: str = ""
    """The one node, by host name or Ray node id, on which it is to start; empty: any."""
    successor_of: Annotated[Incarnation, UNSIGNED] = NO_INCARNATION
    """The incarnation whose process has closed it and waits to go on as this one; 0: none does."""
    weights: WeightsVersion | None = None
    """The weights that it is to serve; None: the checkpoint's."""


class KillWorker(Message, frozen=True, tag="kill"):
    """Make sure that the process of an incarnation is gone."""

    name: WorkerName
    incarnation: Annotated[Incarnation, UNSIGNED]
    pid: Uint32
    """0 where the worker hasn't registered."""
    node: str
    """Host name of its node; empty where the worker hasn't registered."""


class ForgetArenas(Message, frozen=True, tag="forget_arenas"):
    """Free a worker's arenas: it won't be started again, or its successor has taken over all that it can use.

    With `before`, only arenas of incarnations before that one.
    """

    name: WorkerName
    before: Annotated[Incarnation, UNSIGNED] | None = None


class OperatorNote(Message, frozen=True, tag="note"):
    """A line for the operator to read."""

    text: str


class StartFailed(Message, frozen=True, tag="start_failed"):
    """A worker has died that was never ready: what it needs may be missing."""

    name: WorkerName
    reason: str


ControllerAction = StartWorker | KillWorker | ForgetArenas | OperatorNote | StartFailed | SettingsChange


class SupervisorReport(Message, frozen=True):
    """What a supervisor tells of processes, nodes and settings."""

    running: Annotated[tuple[WorkerKey, ...], SOME] = ()
    """All processes that it has; in its first report alone, which is what makes it the supervisor."""
    ended: Annotated[tuple[EndedProcess, ...], SOME] = ()
    placed: Annotated[tuple[PlacedProcess, ...], SOME] = ()
    nodes: Annotated[tuple[NodePlace, ...], SOME] = ()
    """All nodes that take workers, where they have changed; else none."""
    settings: Annotated[tuple[SettingsAnswer, ...], SOME] = ()
    """Changes of settings that it has made or refused."""
    room: ClusterRoom | None = None
    """What nodes have for workers, where that has changed."""


class SupervisorOrders(Message, frozen=True):
    """The controller's orders, to be carried out one after the other."""

    orders: Annotated[tuple[ControllerAction, ...], SOME, SKIP_UNKNOWN]


SUPERVISE = Exchange[SupervisorReport, SupervisorOrders]("Controller", "Supervise", SupervisorReport, SupervisorOrders)
"""A supervisor's stream; the latest supervisor is obeyed."""
