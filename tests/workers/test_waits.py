"""What workers wake for, and what keeps them from being drained: nothing that any of their parts has still to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stepped_cluster import company
from tests.support.worker_pair import SESSION
from tests.support.worker_parts import receiver_of
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.ids import Incarnation, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef, PushPrefix
from twinpool.contracts.messages.worker_events import PrefixOffered
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.migration.drain_offers import PATIENCE_S, PrefixOffers
from twinpool.transfer.rooms.sender.kv_sender import KVSender
from twinpool.worker.request_table import RequestGate
from twinpool.worker.step_commit import StepOverlap

WORKERS = ("prefill-0", "decode-0", "colocated-0")


@pytest.fixture(scope="module")
def idle(model: Path) -> Iterator[dict[str, Any]]:
    """One worker of each role, with nothing to do, by name."""
    with (
        company(model, decodes=1, clock=ManualClock(100.0)) as pools,
        company(model, colocated=1, clock=ManualClock(100.0)) as alone,
    ):
        yield {str(name): worker for c in (pools, alone) for name, worker in c.workers.items()}


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_sleeps_no_longer_than_any_of_its_parts_can_wait(
    idle: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, slept = idle[name], list[float]()
    monkeypatch.setattr(worker.setup.waiter, "wait", slept.append)
    parts = [key for key, part in vars(worker).items() if hasattr(type(part), "next_deadline")]
    assert {"_request_table", "_sender", "_gate"} <= set(parts)
    for part in parts:
        with monkeypatch.context() as patch:
            patch.setattr(type(getattr(worker, part)), "next_deadline", property(lambda self: 100.125))
            worker.wait(60.0)
        assert slept.pop() == 0.125, part
    worker.wait(60.0)
    assert slept == [60.0]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_is_drained_when_nothing_is_under_way_in_any_of_its_parts(
    idle: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = idle[name]
    at_work: list[tuple[type, str, Any]] = [
        (RequestGate, "__len__", lambda self: 1),
        (StepOverlap, "__len__", lambda self: 1),
        (KVCacheManager, "busy", property(lambda self: True)),
        (KVSender, "quiet", property(lambda self: False)),
    ]
    if name != "prefill-0":
        at_work.append((type(receiver_of(worker)), "rooms", property(lambda self: 1)))
        at_work.append((PrefixOffers, "over", property(lambda self: False)))
    assert not worker.drained, "nobody has told it to leave"
    worker.drain()
    worker.step()
    assert worker.drained
    for part, key, value in at_work:
        with monkeypatch.context() as patch:
            patch.setattr(part, key, value)
            assert not worker.drained, part
    worker.undrain()
    assert not worker.drained


def test_a_worker_that_stayed_offers_its_prefixes_anew_when_it_leaves_after_all(model: Path) -> None:
    """And waits for those offers alone: the ones of the drain before are void."""
    with company(model, decodes=1, clock=ManualClock(100.0), cache={"page_tokens": 16}) as c:
        worker = c.decode("decode-0")
        c.run(c.submit(list(range(64)), SamplingParams(8, temperature=0.0)))

        def leaves() -> PrefixOffered:
            c.settle()
            worker.drain()
            offers = [event for _, event in worker.step() if isinstance(event, PrefixOffered)]
            assert len(offers) == 1
            assert not worker.drained
            assert worker.report.next_due(c.clock) == PATIENCE_S
            return offers[0]

        first = leaves()
        worker.undrain()
        again = leaves()
        assert again.tokens == first.tokens
        assert again.request_id != first.request_id
        peer = PeerRef(WorkerName("decode-1"), Incarnation(1), worker.control)
        worker.handle(SESSION, PushPrefix(again.request_id, 0, RoomId("a push"), peer, (7,) * 64, ""))
        worker.step()
        assert worker.drained, "the one offer was asked for"
