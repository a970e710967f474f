"""What tests break or look at within a worker: nothing else reaches into one for these parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.contracts.ids import RoomId
from twinpool.decode.migration.drain_offers import DrainAdvisor
from twinpool.decode.migration.outgoing_migrations import OutgoingMigration, OutgoingMigrations
from twinpool.decode.request import DecodeRequest
from twinpool.decode.retraction.memory_pressure import OutputLengths
from twinpool.decode.scheduler import DecodeScheduler
from twinpool.decode.step_commit import DecodeStepCommit
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.audit_runner import AuditRunner
from twinpool.prefill.request import PrefillPages
from twinpool.prefill.scheduler import PrefillScheduler
from twinpool.prefill.step_commit import PrefillHandover, PrefillStepCommit
from twinpool.prefill.worker import PrefillWorker
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.transfer.rooms.receiver.receiver_peers import ReceiverPeers
from twinpool.transfer.rooms.receiver.receiver_room import ArrivalCheck
from twinpool.transfer.rooms.receiver.receiver_rooms import ReceiverRooms
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.transfer.rooms.sender.sender_peers import SenderPeers
from twinpool.transfer.rooms.sender.sender_rooms import SenderRooms
from twinpool.worker.request_table import R, RequestGate, RequestTable
from twinpool.worker.worker_loop import WorkerLoop


def manager_of(worker: WorkerLoop[Any]) -> KVCacheManager:
    return worker.setup.manager


def receiver_of(worker: DecodeWorker) -> KVReceiver:
    assert worker.setup.receiver is not None
    return worker.setup.receiver


def table_of(worker: WorkerLoop[R]) -> RequestTable[R]:
    table: RequestTable[R] = worker.report.requests
    return table


def leaving(worker: DecodeWorker) -> int:
    """Requests that are on their way to another worker, or told to go."""
    return int(worker.status().counters["leaving"])


@overload
def scheduler_of(worker: DecodeWorker) -> DecodeScheduler: ...


@overload
def scheduler_of(worker: PrefillWorker) -> PrefillScheduler: ...


def scheduler_of(worker: DecodeWorker | PrefillWorker) -> DecodeScheduler | PrefillScheduler:
    return worker._scheduler


def poll(worker: PrefillWorker) -> None:
    """Have the worker hear what came, as a round begins, and no more of a round."""
    worker._poll()


def gate_of(worker: WorkerLoop[Any]) -> RequestGate:
    return worker._gate


@overload
def steps_of(worker: DecodeWorker) -> DecodeStepCommit: ...


@overload
def steps_of(worker: PrefillWorker) -> PrefillStepCommit: ...


def steps_of(worker: DecodeWorker | PrefillWorker) -> DecodeStepCommit | PrefillStepCommit:
    return worker._steps


def lengths_of(worker: DecodeWorker) -> OutputLengths:
    return worker._lengths


def advisor_of(worker: DecodeWorker) -> DrainAdvisor:
    return worker._advisor


def migrations_of(worker: DecodeWorker) -> OutgoingMigrations:
    return worker._migrations


def migrating(worker: DecodeWorker) -> dict[RoomId, OutgoingMigration]:
    """The migrations that are under way or told to begin, by their rooms; the worker's own table."""
    return migrations_of(worker)._by_room


def retracted(worker: DecodeWorker) -> list[DecodeRequest]:
    """The queue of those that are off the device; the worker's own list."""
    return scheduler_of(worker).retraction._away


def retract_on(worker: DecodeWorker) -> None:
    """Let those that are leaving the device go on, as a round does, and no more of a round."""
    act_on(worker, scheduler_of(worker).retraction.advance())


def act_on(worker: DecodeWorker, outcomes: Iterable[Any]) -> None:
    """Have the worker act on outcomes, as if a part of it had reported them."""
    worker._act(outcomes)


def auditor_of(worker: PrefillWorker) -> AuditRunner:
    return worker._auditor


def handover_of(worker: PrefillWorker) -> PrefillHandover:
    return worker._handover


def pages_of(worker: PrefillWorker) -> PrefillPages:
    return worker._request_pages


# ------------------------------------------------------------ the ends of rooms


@overload
def rooms_of(end: KVSender) -> SenderRooms: ...


@overload
def rooms_of(end: KVReceiver) -> ReceiverRooms: ...


def rooms_of(end: KVSender | KVReceiver) -> SenderRooms | ReceiverRooms:
    return end._rooms


@overload
def peers_of(end: KVSender) -> SenderPeers: ...


@overload
def peers_of(end: KVReceiver) -> ReceiverPeers: ...


def peers_of(end: KVSender | KVReceiver) -> SenderPeers | ReceiverPeers:
    return end._peers


def inbox_of(end: KVSender) -> Any:
    """What the sender hears its peers by, and answers them."""
    return peers_of(end)._inbox


def arrivals_of(end: KVReceiver) -> ArrivalCheck:
    """What looks at all that comes, before it is anybody's."""
    return end._arrivals


def slots_of(end: KVReceiver) -> Any:
    """The memory of the metadata slots: uint8 [slots, SLOT_BYTES]."""
    return arrivals_of(end)._slots
