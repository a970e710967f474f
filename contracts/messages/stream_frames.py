"""The frames of a router's stream to a worker, in the order in which they come.

The router opens with a `StreamOpening`. The worker answers with a `WorkerFrame` without events, or with one that has an
`end`, which says why not. Then `RouterFrame`s go one way, and a `WorkerFrame` for each step with events the other.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from twinpool.contracts.ids import Incarnation
from twinpool.contracts.message_types import SOME, UNSIGNED, Message, Uint32

MessageT = TypeVar("MessageT")
"""A `Command` or an `Event`; `msgspec.Raw` where each is encoded or decoded by itself."""


class StreamOpening(Message, frozen=True):
    """The first frame of a router, or of a worker that renews its lease; no later version moves `protocol`."""

    protocol: Uint32
    """The version of its messages: `stream_protocol` of a router's, `CALLS_VERSION` of a lease's."""
    incarnation: Annotated[Incarnation, UNSIGNED]
    """The incarnation of the worker that is meant."""
    access: str = ""
    """The cluster's token, where there is a secret."""


class RouterFrame(Message, Generic[MessageT], frozen=True):
    """Commands, in order."""

    commands: Annotated[tuple[MessageT, ...], SOME]


class StreamEnd(Message, frozen=True):
    """Why a stream has ended."""

    reason: str
    left: bool = False
    """Whether the worker has left in order: all that it had begun is done and handed over."""


class WorkerFrame(Message, Generic[MessageT], frozen=True):
    """The events of one step, in order."""

    incarnation: Annotated[Incarnation, UNSIGNED]
    """The worker's own."""
    events: Annotated[tuple[MessageT, ...], SOME] = ()
    end: StreamEnd | None = None
    """Why the worker ends the stream; in its last frame alone."""
