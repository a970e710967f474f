"""The errors of Twinpool, one class per cause, which says whose fault it is.

Every error that Twinpool raises on purpose derives from `TwinpoolError`. Assertions are for bugs of Twinpool, these
errors for the rest of the world: a client's request, an operator's configuration, a peer, a damaged byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class ErrorKind(StrEnum):
    """What went wrong with a request, as it travels from a worker to the router.

    Requests with an error of a `retryable` kind are tried again on other workers; the other kinds end the
    request.
    """

    INVALID = "invalid"
    """The client's fault: the request can never be served as asked."""
    TOO_LONG = "too_long"
    """The client's fault: prompt and answer have more positions than the worker can hold."""
    GRAMMAR = "grammar"
    """The client's fault: the answer can't follow the grammar."""
    OVERLOADED = "overloaded"
    """There is no room for the request now; the client may try later."""
    CANCELLED = "cancelled"
    """The request was taken back, or the worker that says so, or its peer, lost its router's connection. A router that
    took it back expects no more of it, so one that hears this of a request tries it again."""
    DEADLINE = "deadline"
    """The request's deadline has passed."""
    LATE = "late"
    """The request's first token was due before its prompt could be begun, so it was not computed."""
    ROOM = "room"
    """The hand-over failed: the peer died, refused or never answered."""
    DAMAGED = "damaged"
    """State arrived with bytes that don't match its content tag."""
    DRAINING = "draining"
    """The worker no longer admits."""
    WORKER = "worker"
    """The worker died or failed inside."""
    RETRACTED = "retracted"
    """Decode had no memory for the request any more. Nobody's fault; the request goes on from its tokens so far."""
    SUPERSEDED = "superseded"
    """The request's client has come back on another connection, which has it now."""
    ADAPTER = "adapter"
    """The worker can't have the request's adapter: its files are missing or have changed, or there is no room."""
    NONFINITE = "nonfinite"
    """A step's logits weren't finite, so no token was drawn: the request goes on elsewhere, once, from its
    tokens."""

    @property
    def retryable(self) -> bool:
        return self in (
            ErrorKind.ROOM, ErrorKind.DAMAGED, ErrorKind.DRAINING, ErrorKind.WORKER, ErrorKind.RETRACTED,
            ErrorKind.NONFINITE, ErrorKind.CANCELLED,
        )  # fmt: skip

    @property
    def of_client(self) -> bool:
        """Whether it is the client's fault."""
        return self in (ErrorKind.INVALID, ErrorKind.TOO_LONG, ErrorKind.GRAMMAR)

    @classmethod
    def _missing_(cls, value: object) -> ErrorKind | None:
        """A name that only a newer build knows counts as `WORKER`, which is retryable."""
        return cls.WORKER if isinstance(value, str) else None


class TwinpoolError(Exception):
    """Base of all errors that Twinpool raises on purpose."""

    numbers: Mapping[str, float] = MappingProxyType({})
    """The numbers that decided, by name, where a request is refused by them."""


class ConfigError(TwinpoolError):
    """Raised when a configuration, a flag or the environment asks for something that isn't possible."""


class CheckpointError(TwinpoolError):
    """Raised when a checkpoint folder is missing, damaged or of a kind that isn't supported."""


class RequestError(TwinpoolError):
    """Raised when a client's request can't be served as asked."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(TwinpoolError):
    """Raised when a pool has too few free pages or slots; nothing was taken."""


class LayoutMismatch(TwinpoolError):
    """Raised when two workers can't hand over, as their layouts or endpoints don't fit; the message says why."""


class WireError(TwinpoolError):
    """Raised when a message from a peer can't be decoded or breaks the protocol."""


class IllegalTransition(TwinpoolError):
    """Raised when an event is not in the state table; nothing has changed."""


class StaleLease(TwinpoolError):
    """Raised when a page or slot is used after its lease has ended."""


class UnorderedAccess(TwinpoolError):
    """Raised by a checking device when two operations touch the same state in no declared order; the message names
    both."""


class PeerDead(TwinpoolError):
    """Raised when a rank of the same worker is gone, or silent for longer than the deadline; the group is closed."""
