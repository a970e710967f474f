"""Errors say whose fault it is; one class per cause.

Everything Twinpool raises on purpose derives from `TwinpoolError`. Assertions are for our own bugs, these are for
the world: a client's request, an operator's configuration, a peer, a damaged byte.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorKind(StrEnum):
    """What went wrong with a request, as it travels from a worker to the router.

    `retryable` kinds are tried again on other workers; the rest end the request.
    """

    INVALID = "invalid"
    """The client's fault: it can never be served as asked."""
    OVERLOADED = "overloaded"
    """No room now; try later."""
    CANCELLED = "cancelled"
    """The client or the router took it back."""
    DEADLINE = "deadline"
    """Its time ran out."""
    ROOM = "room"
    """The hand-over failed: the peer died, refused or never answered."""
    DAMAGED = "damaged"
    """State arrived whose bytes do not match its content tag."""
    DRAINING = "draining"
    """The worker no longer admits."""
    WORKER = "worker"
    """The worker died or failed inside."""
    RETRACTED = "retracted"
    """Decode had no memory for it any more: nobody's fault, and it goes on from the tokens that it has."""
    NONFINITE = "nonfinite"
    """A step's logits were no finite numbers, so nothing was drawn: computed once more elsewhere, from the tokens."""

    @property
    def retryable(self) -> bool:
        return self in (
            ErrorKind.ROOM, ErrorKind.DAMAGED, ErrorKind.DRAINING, ErrorKind.WORKER, ErrorKind.RETRACTED,
            ErrorKind.NONFINITE,
        )  # fmt: skip

    @classmethod
    def of(cls, said: str) -> ErrorKind:
        """The kind of that name. One that only a newer build knows is the worker's: it is tried again elsewhere."""
        return cls(said) if said in tuple(cls) else cls.WORKER


class TwinpoolError(Exception):
    """Base of all errors that Twinpool raises on purpose."""


class ConfigError(TwinpoolError):
    """Raised when a configuration, flag or environment can't do what it says."""


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
    """Raised when two workers' state layouts can't meet; carries both values."""


class WireError(TwinpoolError):
    """Raised when a message from a peer can't be decoded or breaks the protocol."""


class UnknownKind(WireError):
    """Raised for a message of a kind that this build doesn't know: a newer one may send it, and it is skipped."""


class IllegalTransition(TwinpoolError):
    """Raised when an event is not in the state table; nothing has changed."""


class StaleLease(TwinpoolError):
    """Raised when a page or slot is used after its lease has ended."""


class UnorderedAccess(TwinpoolError):
    """Raised by a checking device when two operations touch the same state and nothing orders them; names both."""


class PeerDead(TwinpoolError):
    """Raised when a rank of the same worker is gone, or silent for longer than the deadline; the group is closed."""
