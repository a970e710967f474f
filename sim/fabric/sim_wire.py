"""The encoding of messages on the simulated connections, as the bytes of production.

Every message is encoded by its sender and decoded by its receiver, by `contracts.wire.stream_codec` and the codecs
beside the services: a field that they lose or round is lost or rounded here.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import Incarnation
from twinpool.contracts.messages.cluster_view import ClusterView
from twinpool.contracts.messages.router_commands import Command
from twinpool.contracts.messages.worker_events import Event
from twinpool.contracts.messages.worker_status import WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.wire.message_codec import decode, encode
from twinpool.contracts.wire.stream_codec import FrameWriter, decode_commands, decode_events, encode_events


def pack_commands(commands: Sequence[Command]) -> list[bytes]:
    """Encode commands as frames of a router's stream."""
    return list(FrameWriter().frames(commands))


def unpack_commands(frame: bytes) -> Sequence[Command]:
    commands, left_out = decode_commands(frame)
    assert not left_out, "both ends are of one build"
    return commands


def pack_events(incarnation: Incarnation, events: Sequence[Event]) -> bytes:
    """Encode events as a frame of a worker's stream."""
    return encode_events(incarnation, events)


def unpack_events(incarnation: Incarnation, frame: bytes) -> Sequence[Event]:
    """Decode a frame of a worker's stream. Raises `WireError` for a frame of another incarnation."""
    message, left_out = decode_events(frame)
    assert not left_out, "both ends are of one build"
    if message.incarnation != incarnation:
        raise WireError(f"a frame of incarnation {message.incarnation} came on {incarnation}'s stream")
    return message.events


def status_there(status: WorkerStatus) -> WorkerStatus:
    """Return a status as its receiver decodes it."""
    return decode(WorkerStatus, encode(status))[0]


def record_there(record: WorkerRecord) -> WorkerRecord:
    """Return a worker's registration as the controller decodes it."""
    return decode(WorkerRecord, encode(record))[0]


def pack_views(views: Sequence[WorkerView]) -> bytes:
    """Encode the controller's whole table of workers."""
    return encode(ClusterView(0, tuple(views)))


def unpack_views(data: bytes) -> tuple[WorkerView, ...]:
    return decode(ClusterView, data)[0].workers
