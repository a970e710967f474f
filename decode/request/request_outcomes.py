"""The outcomes that the parts of a decode worker report to it.

The worker alone sends events to routers, and takes requests out of the table. Parts yield outcomes one by one, and the
worker acts on each before it takes the next, so a part goes on with the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.contracts.errors import ErrorKind
from twinpool.contracts.ids import WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.worker_events import Event
from twinpool.decode.request.request import DecodeRequest


@dataclass(frozen=True, slots=True)
class RouterEvent:
    """An event for the router behind this session."""

    session: SessionId
    event: Event


@dataclass(frozen=True, slots=True)
class PromptReceived:
    """The request has all state of its prompt, and its first token; `bytes` of it came through the room."""

    request: DecodeRequest
    bytes: int


@dataclass(frozen=True, slots=True)
class PromptPreempted:
    """The prompt of this request, which this worker computes, has no pages any more: the request waits for them."""

    request: DecodeRequest


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The answer of this request is complete; `reason` is ``stop`` or ``length``."""

    request: DecodeRequest
    reason: str
    stop_token: int | None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """This attempt can't go on; its router is told why. `blame` is the worker at fault where it isn't this one."""

    request: DecodeRequest
    kind: ErrorKind
    message: str
    blame: WorkerName | None = None


@dataclass(frozen=True, slots=True)
class RequestLeft:
    """This request has left this worker, and its router knows already: no event is sent."""

    request: DecodeRequest
    reason: str
