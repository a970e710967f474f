"""What a decode worker that leaves has in its tree goes to the others, the hottest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.stepped_cluster import Company, company, hears
from tests.support.worker_pair import SESSION, turns
from tests.support.worker_parts import receiver_of
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef, PullPrefix, PushPrefix
from twinpool.contracts.messages.worker_events import Event, PrefixOffered, PullDone
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.migration.drain_offers import PATIENCE_S
from twinpool.router.state.worker_table import WorkerKey

PAGE = 16
HOT, COLD = list(range(100, 164)), list(range(64))


def depth(c: Company, name: str, tokens: list[int]) -> int:
    """Pages of these tokens that the worker's tree has on the device."""
    manager = c.decode(name).setup.manager
    return sum(pages for _, pages in manager.tree.walked(TokenPrefix.of(tokens, PAGE)))


def served(c: Company) -> None:
    """decode-0 alone serves one prefix four times, another once."""
    c.drain("decode-1")
    for number, prompt in enumerate([COLD, HOT, HOT, HOT, HOT]):
        c.run(c.submit([*prompt, number, number], SamplingParams(8, temperature=0.0)))
    c.drain("decode-1", draining=False)
    assert depth(c, "decode-1", HOT) == 0


def leaves(c: Company) -> None:
    c.drain("decode-0")
    c.until(lambda: c.decode("decode-0").drained, "decode-0 to have nothing to do", 4000)
    assert c.decode("decode-0").check().violations == c.decode("decode-1").check().violations == ()


def sections(**decode: Any) -> dict[str, Any]:
    return {"cache": {"page_tokens": PAGE}, "decode": decode}


def test_the_tree_of_a_drained_worker_is_taken_over_and_used(model: Path) -> None:
    with company(model, **sections()) as c:
        served(c)
        leaves(c)
        assert depth(c, "decode-1", HOT) == depth(c, "decode-1", COLD) == 4
        assert c.core.migrations.offers.bytes == c.decode("decode-1").status().counters["fetched_bytes"] > 0
        assert not len(c.core.migrations.offers)
        rid: RequestId = c.submit([*HOT, 9, 9, 9], SamplingParams(8, temperature=0.0))
        c.run(rid)
        held = [p.cached_tokens for p in c.told[rid].request.progress if p.worker == "decode-1"]
        assert max(held) == 4 * PAGE


def test_within_its_budget_a_worker_offers_what_was_used_most(model: Path) -> None:
    with company(model, **sections()) as plain:
        unit = plain.decode("decode-0").setup.manager.spec.unit_bytes("full")
    with company(model, **sections(prefix_offer_bytes=4 * unit)) as c:
        served(c)
        manager = c.decode("decode-0").setup.manager
        (hot,) = manager.tree.hottest(manager.full, 4)
        assert hot.tokens == tuple(HOT)
        leaves(c)
        assert depth(c, "decode-1", HOT) == 4
        assert depth(c, "decode-1", COLD) == 0


def test_pages_that_somebody_else_uses_are_not_pushed_out(model: Path) -> None:
    with company(model, tokens=160, **sections()) as c:
        served(c)
        target = c.decode("decode-1").setup.manager
        taken = target.pools.allocators[target.full].lease(target.pools.allocators[target.full].free, "planted")
        told = hears(c, PullDone)
        c.drain("decode-0")
        c.until(lambda: c.decode("decode-0").drained, "decode-0 to have nothing to do", 4000)
        assert depth(c, "decode-1", HOT) == 0
        assert [event.bytes for event in told if isinstance(event, PullDone)] == [0, 0], "nobody waits for its patience"
        taken.release()


def test_a_worker_waits_until_each_of_its_offers_was_asked_for_and_counts_nothing_else(model: Path) -> None:
    clock = ManualClock()
    with company(model, clock=clock, **sections()) as c:
        served(c)
        worker, offered = c.decode("decode-0"), list[PrefixOffered]()

        def unheard(worker: WorkerKey, event: Event) -> bool:
            offered.extend([event] if isinstance(event, PrefixOffered) else [])
            return isinstance(event, PrefixOffered)

        c.between.append(unheard)
        c.drain("decode-0")
        c.until(lambda: len(offered) == 2, "both prefixes to be offered", 1000)
        unknown = PeerRef(WorkerName("decode-1"), Incarnation(1), c.workers[WorkerName("decode-1")].control)
        for number, (tokens, waits) in enumerate([((), True), ((7,) * 64, True), ((8,) * 64, False)]):
            # The first is a request's pages ahead of its move; of the others it has nothing, but it was asked.
            worker.handle(SESSION, PushPrefix(RequestId(f"g{number}"), 0, RoomId(f"g{number}"), unknown, tokens, ""))
            assert (worker.report.next_due(clock) <= PATIENCE_S) is waits
        c.step("decode-0")
        assert worker.drained


def test_what_can_not_be_granted_any_more_is_told_and_keeps_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room has failed between the order and the pages that were found for it."""
    with company(model, **sections()) as c:
        served(c)
        monkeypatch.setattr(receiver_of(c.decode("decode-1")), "grant", lambda *_: False)
        told = hears(c, PullDone)
        c.drain("decode-0")
        c.until(lambda: len(told) == 2, "both to be told", 1000)
        assert [event.bytes for event in told if isinstance(event, PullDone)] == [0, 0]
        assert len(c.decode("decode-1").setup.manager.allocations) == 0


def test_a_room_that_there_is_already_is_pulled_once_and_the_second_time_told_at_once(model: Path) -> None:
    with company(model, settle=False, **sections()) as c:
        served(c)
        puller, source = c.decode("decode-1"), c.workers[WorkerName("decode-0")]
        peer = PeerRef(WorkerName("decode-0"), Incarnation(1), source.control)
        for number in range(2):
            puller.handle(SESSION, PullPrefix(RequestId(f"g{number}"), number, RoomId("g"), peer, tuple(HOT)))
        assert puller.report.allocations == 1
        told = [event for session, event in puller.step() if session == SESSION]
        assert told == [PullDone(RequestId("g1"), 1, 0)]


def test_nobody_waits_for_a_router_that_asks_for_nothing(model: Path) -> None:
    with company(model, decodes=1, **sections()) as c:
        c.run(c.submit(HOT, SamplingParams(8, temperature=0.0)))
        c.drain("decode-0")
        # Nobody is there to take anything: after a moment it goes.
        c.until(lambda: c.decode("decode-0").drained, "decode-0 to leave", 100_000)


def test_while_it_gives_to_somebody_who_stands_still_a_worker_sleeps(model: Path) -> None:
    clock = ManualClock()
    with company(model, clock=clock, settle=False, **sections()) as c:
        served(c)
        worker = c.decode("decode-0")
        c.drain("decode-0")
        for number in turns(10):
            c.step("decode-0", "prefill-0")  # decode-1 is told to fetch, and makes no round.
            if number >= 9 and worker.status().outgoing:
                break
        assert worker.status().outgoing
        clock.advance(PATIENCE_S + 0.1)
        c.step("decode-0")
        assert not worker.drained
        due_s = worker.report.next_due(clock)
        assert due_s > 0, "nothing is due: whoever is woken for it turns and turns"
        clock.advance(due_s + 0.001)
        c.step("decode-0")
        assert worker.drained, "what nobody takes is not given for ever"
