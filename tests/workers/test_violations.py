"""For every invariant, a planted violation that `check` must name. Reaching into private parts is the point here."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.pool_sets import free_list
from tests.support.served_cluster import ROOT, until
from tests.support.worker_pair import SESSION, Pair, pair
from tests.support.worker_parts import (
    auditor_of,
    handover_of,
    manager_of,
    migrating,
    peers_of,
    receiver_of,
    retracted,
    rooms_of,
    scheduler_of,
)
from twinpool.cache.pool.page_allocator import Lease, PageAllocator
from twinpool.cache.swap.swap_storage import SwapPlace
from twinpool.cluster.serve.serve_one_process import LocalDirectory
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import Audit, PeerRef
from twinpool.contracts.messages.stream_frames import STREAM_PROTOCOL
from twinpool.contracts.messages.worker_status import CheckReport, WorkerRecord
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.migration.outgoing_migrations import MigrationStage, OutgoingMigration
from twinpool.decode.request import DecodeRequest
from twinpool.decode.worker import DecodeWorker
from twinpool.prefill.audit_runner import AuditRun, AuditRunState
from twinpool.prefill.worker import PrefillWorker
from twinpool.router.api.app import create_app
from twinpool.router.api.router_server import RouterServer
from twinpool.router.main import listen
from twinpool.router.service.router_service import RouterService
from twinpool.transfer.rooms.room_states import ReceiverState, SenderState

Plant = Callable[[PrefillWorker, DecodeWorker], object]


def at_work(both: Pair) -> tuple[PrefillWorker, DecodeWorker]:
    """One request decodes, another is halfway through prefill; both workers still check out."""
    prefill, decode = both.prefill, both.decode
    assert isinstance(prefill, PrefillWorker)
    assert isinstance(decode, DecodeWorker)
    both.submit(list(range(40)), SamplingParams(max_tokens=200, temperature=0.0))
    for _ in range(2000):
        if decode.status().running:
            break
        both.step()
    both.submit([i % 300 for i in range(900)], SamplingParams(max_tokens=200, temperature=0.0))
    for _ in range(2000):
        if any(r.state is SenderState.GRANTED for r in rooms_of(prefill.setup.sender).values()):
            break
        both.step()
    assert prefill.check().violations == decode.check().violations == ()
    return prefill, decode


def a_running(worker: PrefillWorker | DecodeWorker) -> object:
    return next(r for r in worker.report.requests if r.allocation is not None and r.allocation.runs)


def its_lease(worker: PrefillWorker | DecodeWorker) -> Lease:
    return a_running(worker).allocation.runs["full"][0].lease  # type: ignore[attr-defined, no-any-return]


def pages(worker: PrefillWorker | DecodeWorker) -> PageAllocator:
    return manager_of(worker).pools.allocators["full"]


def first(worker: DecodeWorker) -> DecodeRequest:
    """Of those that run."""
    return scheduler_of(worker).running[0]


def grow(lease: object, index: int) -> None:
    lease.indices, lease.epochs = (*lease.indices, index), (*lease.epochs, 0)  # type: ignore[attr-defined]


def more(request: object, *names: str, by: int = 1) -> None:
    for name in names:
        setattr(request, name, getattr(request, name) + by)


def opened(rooms: Iterable[Any], state: SenderState | ReceiverState) -> None:
    """As if nothing had been granted."""
    for room in rooms:
        room.state = state


def an_audition(**words: Any) -> AuditRun:
    return AuditRun(SESSION, Audit(RequestId("x"), 0, (1, 2), 1, SamplingParams(max_tokens=1)), **words)


def departs(worker: DecodeWorker, stage: MigrationStage) -> None:
    room, peer = RoomId("x"), PeerRef(WorkerName("decode-1"), Incarnation(1), "")
    migrating(worker)[room] = OutgoingMigration(first(worker), room, peer, stage)


def swaps_out(worker: DecodeWorker) -> None:
    first(worker).swapped = SimpleNamespace(positions=10**6, place=SwapPlace.GONE)  # type: ignore[assignment]
    retracted(worker).append(first(worker))


PREFILL: dict[str, tuple[Plant, str]] = {
    "a page that nobody owns": (lambda p, d: free_list(pages(p)).pop(), "belongs to nobody"),
    "a page that two own": (
        lambda p, d: free_list(pages(p)).append(its_lease(p).indices[0]),
        "and the free list",
    ),
    "a page out of range": (lambda p, d: free_list(pages(p)).append(10**6), "is out of range"),
    "a lease that no request holds": (lambda p, d: pages(p).lease(1, "a thief"), "accounted for"),
    "a pin that was lost": (lambda p, d: pages(p).pin([3], "a thief")._allocator._pins.clear(), "pin counts differ"),
    "quarantine without a pin": (
        lambda p, d: pages(p)._quarantined.add(free_list(pages(p)).pop()),
        "in quarantine without a pin",
    ),
    "a written null page": (
        lambda p, d: manager_of(p).pools.gates["full"].layer(0)["k"][0].fill_(1.0),
        "the null page of k",
    ),
    "a lock that no request holds": (
        lambda p, d: manager_of(p).tree.locks.keep([], "a thief"),
        "locks, allocations and moves hold",
    ),
    "a waiting request with pages": (
        lambda p, d: setattr(a_running(p), "allocation", None),
        "its allocation says otherwise",
    ),
    "a room without its grant": (
        lambda p, d: opened(rooms_of(p.setup.sender).values(), SenderState.OPEN),
        "its grant says otherwise",
    ),
    "a hand-over that nobody waits for": (
        lambda p, d: handover_of(p)._unconfirmed.update({RoomId("x"): a_running(p)}),  # type: ignore[dict-item]
        "wait for decode's word",
    ),
    "a room of a peer that is gone": (lambda p, d: peers_of(p.setup.sender)._peers.clear(), "a peer that is gone"),
    "a request with more planned than launched": (lambda p, d: more(a_running(p), "planned"), "has lengths"),
    "a request with more launched than its prompt has": (
        lambda p, d: more(a_running(p), "planned", "launched", by=10**6),
        "has lengths",
    ),
    "a request with more committed than launched": (
        lambda p, d: more(a_running(p), "committed", by=10**6),
        "has lengths",
    ),
    "an audit that runs and was not admitted": (
        lambda p, d: setattr(auditor_of(p), "_running", an_audition()),
        "audit x runs, is waiting, and its allocation is None",
    ),
    "an audit that waits with pages": (
        lambda p, d: auditor_of(p)._waiting.append(an_audition(allocation=a_running(p).allocation)),  # type: ignore[attr-defined]
        "audit x waits with an allocation",
    ),
    "an audit that waits and is running": (
        lambda p, d: auditor_of(p)._waiting.append(an_audition(state=AuditRunState.RUNNING)),
        "audit x waits and is running",
    ),
}
DECODE: dict[str, tuple[Plant, str]] = {
    "a page that nobody owns": (lambda p, d: free_list(pages(d)).pop(), "belongs to nobody"),
    "a lease that neither room nor request holds": (lambda p, d: pages(d).lease(1, "a thief"), "accounted for"),
    "a written null page": (
        lambda p, d: manager_of(d).pools.gates["full"].layer(1)["v"][0].fill_(1.0),
        "the null page of v",
    ),
    "an epoch that moved under a lease": (
        lambda p, d: pages(d)._epochs.__setitem__(its_lease(d).indices[0], 7),
        "has an old epoch",
    ),
    "a slot that nobody owns": (lambda p, d: free_list(receiver_of(d).slots).pop(), "metadata slots: "),
    "a slot that no room holds": (lambda p, d: receiver_of(d).slots.lease(1, "a thief"), "rooms hold"),
    "a granted room without its lease": (
        lambda p, d: opened(rooms_of(receiver_of(d)).values(), ReceiverState.OPEN),
        "its leases say otherwise",
    ),
    "a request outside its queue": (lambda p, d: scheduler_of(d).running.append(first(d)), "are in that queue"),
    "a running request without pages": (lambda p, d: its_lease(d).release(), "its lease has ended"),
    "an allocation that no request holds": (
        lambda p, d: setattr(first(d), "allocation", None),
        "allocations, requests hold",
    ),
    "a running request without an allocation": (
        lambda p, d: setattr(first(d), "allocation", None),
        "is running and its allocation says otherwise",
    ),
    "a request with more committed than drawn": (lambda p, d: more(first(d), "committed"), "positions and says"),
    "a request with more planned than launched": (lambda p, d: more(first(d), "planned"), "positions and says"),
    "a request with more launched than is under way": (
        lambda p, d: more(first(d), "launched", "planned", by=10),
        "positions and says",
    ),
    "a request that waits for a migration nobody knows of": (
        lambda p, d: setattr(first(d), "stopping", True),
        "1 requests are leaving, 0 migrations are booked",
    ),
    "a migration that its request doesn't know of": (
        lambda p, d: departs(d, MigrationStage.STOPPING),
        "or doesn't know",
    ),
    "a migration under way of a request that goes on": (
        lambda p, d: departs(d, MigrationStage.SENDING),
        "is sending and running",
    ),
    "a running request among those that are away": (
        lambda p, d: retracted(d).append(first(d)),
        "is running and in the queue of those retracted",
    ),
    "a request that is away and has its pages": (
        lambda p, d: retracted(d).append(first(d)),
        "is retracted, and its allocation or its swapped out copy says otherwise",
    ),
    "a swapped out copy that nobody keeps": (lambda p, d: swaps_out(d), "0 swapped out copies, requests hold 1"),
    "a swapped out copy of other positions": (lambda p, d: swaps_out(d), "1000000 positions are swapped out of"),
}


def expect_named(report: CheckReport, says: str) -> None:
    assert any(says in line for line in report.violations), report.violations


@pytest.mark.parametrize("planted", PREFILL)
def test_check_names_what_is_wrong_at_prefill(model: Path, planted: str) -> None:
    plant, says = PREFILL[planted]
    with pair(model, tokens=4096, settle=False, prefill={"chunk_tokens": 16}) as both:
        prefill, decode = at_work(both)
        plant(prefill, decode)
        expect_named(prefill.check(), says)
        assert decode.check().violations == ()


@pytest.mark.parametrize("planted", DECODE)
def test_check_names_what_is_wrong_at_decode(model: Path, planted: str) -> None:
    plant, says = DECODE[planted]
    with pair(model, tokens=4096, settle=False, prefill={"chunk_tokens": 16}) as both:
        prefill, decode = at_work(both)
        plant(prefill, decode)
        expect_named(decode.check(), says)
        assert prefill.check().violations == ()


@contextmanager
def behind_a_router(both: Pair, folder: Path, config: Config | None = None) -> Iterator[str]:
    """The pair's workers as a cluster in one process, with the real router, of `config`; yields its URL."""
    members = []
    for worker in (both.prefill, both.decode):
        host = WorkerThread(worker)
        status = host.snapshot
        record = WorkerRecord(
            status.name, status.role, status.incarnation, status.pid, status.node, "", worker.control, worker.fits,
            stream_protocol=STREAM_PROTOCOL,
        )  # fmt: skip
        members.append((record, host))
        host.start()
    sock = listen("127.0.0.1", 0)
    service = RouterService(read_model_spec(folder), config or config_from_dict({}), LocalDirectory(members))
    server = RouterServer(create_app(service), service)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        for _, host in members:
            host.stop(10)


@pytest.mark.slow
def test_the_command_names_a_planted_violation_and_exits_1(model: Path) -> None:
    with pair(model, tokens=1024, settle=False) as both, behind_a_router(both, model) as url:

        def check() -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "twinpool.cli.commands", "check", "--json", "--url", url]
            return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

        until(lambda: len(json.loads(check().stdout or '{"workers": []}')["workers"]) == 2, "both workers to be seen")
        assert check().returncode == 0
        free_list(pages(both.decode)).pop()
        done = check()
        assert done.returncode == 1
        violations = {w["name"]: w["violations"] for w in json.loads(done.stdout)["workers"]}
        lost = ["full pages: 1 belongs to nobody", "full pages: 1 in use, 0 accounted for"]
        assert violations == {"prefill-0": [], "decode-0": lost}
