"""Which pages a step's sends have, and into how many groups of layers they are divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from tests.support.pool_sets import WINDOW_TOKENS
from tests.support.prefill_parts import PAGE, PrefillParts
from twinpool.cache.device.cpu_device import AsyncCpuDevice
from twinpool.contracts.config.worker_config import TransferConfig
from twinpool.contracts.ids import RoomId
from twinpool.engine.runner.batch import BatchRow
from twinpool.prefill.request import PrefillRequest
from twinpool.prefill.scheduler import ScheduledChunk
from twinpool.prefill.step_commit import LayeredSends, group_count
from twinpool.transfer.planes.data_plane import SentCounts
from twinpool.transfer.rooms.sender.kv_sender import KVSender

CONFIG = TransferConfig(layer_group_bytes=1000, layer_group_s=0.001)


def test_a_group_takes_the_link_about_the_configured_time() -> None:
    for rate in (2e6, 10e6, 50e6):
        groups = group_count(CONFIG, 1_000_000, 500, rate)
        assert abs(1_000_000 / groups / rate - 0.001) < 1e-4


def test_groups_keep_their_least_size_on_a_slow_link_and_on_one_that_carried_nothing() -> None:
    assert group_count(CONFIG, 20_000, 36, 1e3) == group_count(CONFIG, 20_000, 36, 0.0) == 20


def test_there_are_no_more_groups_than_layers() -> None:
    assert group_count(CONFIG, 1_000_000, 36, 0.0) == 36


def test_a_link_faster_than_any_step_still_gets_two_groups_where_there_are_bytes_for_two() -> None:
    assert group_count(CONFIG, 2_000, 36, 1e12) == 2
    assert group_count(CONFIG, 1_999, 36, 1e12) == 1


def test_what_a_link_carries_is_told_by_its_busy_time() -> None:
    assert SentCounts(writes=3, nbytes=600, busy_s=2.0, waited_s=9.0).bytes_per_s == 300.0
    assert SentCounts(nbytes=600).bytes_per_s == 0.0


class PartsOfAllPools(PrefillParts):
    pools = "all"


class PartsOfAWindow(PrefillParts):
    pools = "full+window"


class AskedSender:
    """The part of `KVSender` that says what decode wants: in each room the same."""

    def __init__(self, unwritten: Mapping[str, range]) -> None:
        self._unwritten = unwritten

    def layered(self, room: RoomId) -> bool:
        return True

    def unwritten(self, room: RoomId) -> Mapping[str, range]:
        return self._unwritten

    def bytes_per_s(self, rooms: object) -> float:
        return 0.0


def sends(parts: PrefillParts, request: PrefillRequest, **wanted: range) -> dict[str, tuple[int, tuple[int, ...]]]:
    """By pool, the first number and the pages that the step up to the planned positions of a request sends."""
    device, spec = AsyncCpuDevice(), parts.manager.spec
    try:
        layered = LayeredSends(cast(KVSender, AskedSender(wanted)), spec, device, CONFIG_OF_ALL)
        row = BatchRow(request.tokens[: request.planned], 0, {})
        planned = layered.plan([ScheduledChunk(request, row)])
    finally:
        device.close()
    runs = planned.pages[request.submit.room].runs if planned is not None else {}
    return {pool: (run.first, tuple(run.indices)) for pool, run in runs.items()}


CONFIG_OF_ALL = TransferConfig(layers=True, layer_group_bytes=1, layer_group_s=1e-9)


def test_a_step_sends_what_it_finishes_of_what_is_wanted_and_the_end_of_the_prompt_with_its_last_chunk() -> None:
    parts = PartsOfAllPools()
    request = parts.ask("r", 3 * PAGE + 2)
    request.allocation = parts.manager.allocations.allocate(request.prefix, len(request.tokens), "r", reusable=0)
    parts.manager.running.extend(request.held, len(request.tokens))
    full, window = (list(request.held.tables[pool].pages) for pool in ("full", "window"))
    wanted = {"full": range(1, 4), "window": range(1, 4), "state": range(3, 4)}
    request.planned = 3 * PAGE - 1
    assert sends(parts, request, **wanted) == {"full": (1, (full[1],)), "window": (1, (window[1],))}
    request.planned = PAGE
    assert sends(parts, request, **wanted) == {}, "what it finishes is there already"
    request.planned = len(request.tokens)
    (state,) = request.held.slots["state"].indices
    whole = {"full": (1, tuple(full[1:4])), "window": (1, tuple(window[1:4])), "state": (3, (state,))}
    assert sends(parts, request, **wanted) == whole
    parts.leave(request)
    assert parts.manager.check() == []


def test_pages_that_its_window_has_left_behind_are_not_sent_whatever_a_peer_asks_for() -> None:
    parts = PartsOfAWindow()
    request = parts.ask("r", 8 * PAGE)
    request.allocation = parts.manager.allocations.allocate(request.prefix, len(request.tokens), "r", reusable=0)
    parts.manager.running.extend(request.held, 4 * PAGE)
    parts.manager.running.free_window_pages(request.held, 4 * PAGE)
    left = (4 * PAGE - WINDOW_TOKENS + 1) // PAGE
    held = list(request.held.tables["window"].pages)
    assert left > 0
    request.planned = 4 * PAGE
    assert sends(parts, request, window=range(left, 8)) == {"window": (left, tuple(held[left:4]))}
    assert sends(parts, request, window=range(left - 1, 8)) == {}
    parts.leave(request)
    assert parts.manager.check() == []
