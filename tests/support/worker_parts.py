"""What tests break or look at within a worker: nothing else reaches into one for these parts."""

from __future__ import annotations

from typing import Any, overload

from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.decode.scheduler import DecodeScheduler
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.scheduler import PrefillScheduler
from twinpool.prefill.worker import PrefillWorker
from twinpool.transfer.rooms.receiver.kv_receiver import KVReceiver
from twinpool.worker.request_table import R, RequestTable
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
