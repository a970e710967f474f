"""The controller's table of workers as it sends it to routers: the whole table at once, then what has changed."""

from __future__ import annotations

from typing import Annotated

from twinpool.contracts.message_types import SKIP_UNKNOWN, SOME, Message, Uint32, Uint64
from twinpool.contracts.messages.worker_status import WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import AdapterRef


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
