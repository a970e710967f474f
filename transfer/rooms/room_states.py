"""Rooms: the hand-over of one request, as two state tables and nothing else.

    decode (receiver)                                     prefill (sender)

    open: wants pages for the whole answer                open: may compute, has nowhere to write
      | Grant(pages, epochs, slot)  --------------------->  |
    granted                                               granted
      | <------------- pages written, then Wrote(tags) -----|   once a chunk, while prefill goes on
      | <------------- slot written, then WroteSlot --------|
    complete: every page verified, slot copied out        sent
      | Received -------------------------------------------> ended

Rules, each kept by the tables below:

- A writer writes only into pages it was granted, and only in `granted`.
- Where the plane is not revocable, the receiver's pages stay in quarantine (`aborting`) until the writer has said that
  it will write no more (`WriterQuiesced`, `RoomFailed`, `NothingToDecode`) or its death is proven (`lost`). Never on a
  timeout alone.
- Every terminal event of one side reaches the other: `RoomFailed` and `NothingToDecode` go to decode, `AbortRoom` to
  prefill.
- Terminal states are final; each end drops and counts a late message for an ended room.
"""

from __future__ import annotations

from enum import StrEnum

from twinpool.contracts.state_table import StateTable


class SenderState(StrEnum):
    """The room as prefill sees it."""

    OPEN = "open"
    GRANTED = "granted"
    SENT = "sent"
    ENDED = "ended"


class SenderEvent(StrEnum):
    GRANT = "grant"
    """Decode's pages and slot are known."""
    WROTE = "wrote"
    """Pages were posted and the notice after them."""
    SENT = "sent"
    """The slot was posted and the notice after it: nothing is written after this."""
    RECEIVED = "received"
    """Decode has verified and copied everything."""
    FINISHED = "finished"
    """The request ended with its first token; decode was told."""
    FAILED = "failed"
    """Prefill gives the request up (error, cancel, deadline); decode was told."""
    ABORT = "abort"
    """Decode gives the request up; it was answered with `WriterQuiesced`."""
    LOST = "lost"
    """Decode is gone: another incarnation, a refusal or a dead process."""


SENDER = StateTable[SenderState, SenderEvent](
    "sender room",
    {
        SenderState.OPEN: {
            SenderEvent.GRANT: SenderState.GRANTED,
            SenderEvent.FINISHED: SenderState.ENDED,
            SenderEvent.FAILED: SenderState.ENDED,
            SenderEvent.ABORT: SenderState.ENDED,
            SenderEvent.LOST: SenderState.ENDED,
        },
        SenderState.GRANTED: {
            SenderEvent.WROTE: SenderState.GRANTED,
            SenderEvent.SENT: SenderState.SENT,
            SenderEvent.FINISHED: SenderState.ENDED,
            SenderEvent.FAILED: SenderState.ENDED,
            SenderEvent.ABORT: SenderState.ENDED,
            SenderEvent.LOST: SenderState.ENDED,
        },
        SenderState.SENT: {
            SenderEvent.RECEIVED: SenderState.ENDED,
            SenderEvent.FAILED: SenderState.ENDED,
            SenderEvent.ABORT: SenderState.ENDED,
            SenderEvent.LOST: SenderState.ENDED,
        },
    },
)


class ReceiverState(StrEnum):
    """The room as decode sees it."""

    OPEN = "open"
    GRANTED = "granted"
    ABORTING = "aborting"
    """Given up here, but the writer may still write: pages and slot are in quarantine."""
    COMPLETE = "complete"
    """Everything arrived and is verified; the request runs on its own lease."""
    ENDED = "ended"


class ReceiverEvent(StrEnum):
    GRANT = "grant"
    """Pages and a slot were leased and sent to prefill."""
    WROTE = "wrote"
    """Pages arrived and match their tags."""
    COMPLETE = "complete"
    """All pages arrived, and the slot."""
    DAMAGED = "damaged"
    """Bytes arrived that don't match their tag."""
    ABORT = "abort"
    """Given up here (cancel, deadline, silence); `AbortRoom` was sent."""
    REVOKED = "revoked"
    """Given up here, on a plane that lets nobody write into an ended room."""
    QUIESCED = "quiesced"
    """The writer says that it writes no more."""
    FAILED = "failed"
    """Prefill gave the request up, and writes no more."""
    FINISHED = "finished"
    """The request ended with its first token; prefill writes no more."""
    LOST = "lost"
    """The writer's death is proven."""


RECEIVER = StateTable[ReceiverState, ReceiverEvent](
    "receiver room",
    {
        ReceiverState.OPEN: {
            ReceiverEvent.GRANT: ReceiverState.GRANTED,
            ReceiverEvent.ABORT: ReceiverState.ENDED,
            ReceiverEvent.REVOKED: ReceiverState.ENDED,
            ReceiverEvent.FAILED: ReceiverState.ENDED,
            ReceiverEvent.FINISHED: ReceiverState.ENDED,
            ReceiverEvent.LOST: ReceiverState.ENDED,
        },
        ReceiverState.GRANTED: {
            ReceiverEvent.WROTE: ReceiverState.GRANTED,
            ReceiverEvent.COMPLETE: ReceiverState.COMPLETE,
            ReceiverEvent.DAMAGED: ReceiverState.ABORTING,
            ReceiverEvent.ABORT: ReceiverState.ABORTING,
            ReceiverEvent.REVOKED: ReceiverState.ENDED,
            ReceiverEvent.FAILED: ReceiverState.ENDED,
            ReceiverEvent.FINISHED: ReceiverState.ENDED,
            ReceiverEvent.LOST: ReceiverState.ENDED,
        },
        ReceiverState.ABORTING: {
            ReceiverEvent.QUIESCED: ReceiverState.ENDED,
            ReceiverEvent.FAILED: ReceiverState.ENDED,
            ReceiverEvent.FINISHED: ReceiverState.ENDED,
            ReceiverEvent.LOST: ReceiverState.ENDED,
        },
    },
)
