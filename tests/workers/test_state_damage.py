"""Damage at every place that checks: counted there and nowhere else, logged once, dropped, and the answer is exact.

The engine's tokens are a hash of every byte that was read, so anything wrong that gets through changes the answer.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.hash_workers import recite
from tests.support.pool_sets import NAMES, pool_sets
from tests.support.stepped_router import Cell
from tests.support.storage_damage import damage_folder
from tests.support.worker_pair import pair
from tests.support.worker_parts import manager_of
from tests.workers.test_any_state import PAGE, hash_pair
from twinpool.cache.prefix_cache.tree_node import Tier
from twinpool.contracts.damage import COUNTERS, PREFIX, DamageSite, where_of
from twinpool.contracts.ids import PAIR, Role
from twinpool.contracts.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(count)]


@contextmanager
def cell_of(name: str, **sections: Any) -> Iterator[Cell]:
    with hash_pair(name, dict.fromkeys(Role, 200), prefill={"chunk_tokens": 8}, **sections) as both:
        cell = Cell(both)
        yield cell
        assert all(not report.violations for report in cell.rest())


def expect(cell: Cell, name: str, prompt: list[int]) -> None:
    """Asked through the router core, the answer is exact."""
    assert cell.ask(prompt, GREEDY) == recite(pool_sets(PAGE)[name], prompt, 9)


def lines(caplog: pytest.LogCaptureFixture, where: DamageSite) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.getMessage() == "state damage" and vars(r)["where"] == where]


@pytest.mark.parametrize("name", NAMES)
def test_damage_in_a_hand_over(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with cell_of(name, faults={"corrupt_page": 1}) as cell:
        expect(cell, name, words(1, 21))
        cell.rest()
        assert cell.damage() == {("decode", "handover"): 1}
        assert len(cell.replays) == 1
        (line,) = lines(caplog, DamageSite.HANDOVER)
        assert vars(line)["room"] == "cell-0/cell-room-0"
        assert vars(line)["request_id"] == "cell-0"
        assert "don't match their tags" in vars(line)["what"]
        assert "damaged" in cell.replays[0].reason


def damage_host(cell: Cell, role: Role) -> int:
    """A byte of every page and slot on a worker's host; its device keeps nothing."""
    worker = cell.both.prefill if role is Role.PREFILL else cell.both.decode
    manager = manager_of(worker)
    host = manager.host
    assert host is not None
    parts = [part for node in manager.tree.accounts.nodes() for part in node.parts[Tier.HOST].values()]
    for part in parts:
        for index in part.lease.indices:
            host.layout.page(host.region, part.component, index)[0] ^= 0x10
    for pool in manager.spec.by_name:
        manager.supply.evict(pool, 1 << 30)
    return sum(len(part.lease) for part in parts)


def host(name: str) -> dict[str, object]:
    unit = sum(pool_sets(PAGE)[name].unit_bytes(pool) for pool in pool_sets(PAGE)[name].by_name)
    return {"host_bytes": 100 * unit, "load_back": "always"}


@pytest.mark.parametrize("name", NAMES)
def test_damage_in_host_memory(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with cell_of(name, cache=host(name), decode={"cache": {"host_bytes": 0, "prefix_reuse": False}}) as cell:
        prompt = words(2, 42)
        expect(cell, name, prompt)
        cell.rest()
        assert damage_host(cell, Role.PREFILL)
        expect(cell, name, prompt)
        assert set(cell.damage()) == {("prefill", "load")}
        assert not cell.replays, "prefill computes it again by itself"
        line = lines(caplog, DamageSite.LOAD)[0]
        assert vars(line)["relied"] == ["request cell-1"]
        first, end = vars(line)["pages"]
        assert 0 <= first < end
        assert vars(line)["pool"] in pool_sets(PAGE)[name].by_name


def test_damage_in_decodes_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    with cell_of("full", cache=host("full")) as cell:
        prompt = words(3, 42)
        expect(cell, "full", prompt)
        cell.rest()
        assert damage_host(cell, Role.DECODE)
        expect(cell, "full", prompt)
        assert set(cell.damage()) == {("decode", "load")}
        assert len(cell.replays) == 1
        assert lines(caplog, DamageSite.LOAD)


@pytest.mark.parametrize("name", ["full", NAMES[-1]])
def test_damage_in_storage(name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    storage = {"backend": "file", "path": str(tmp_path / "pages"), "max_bytes": 1 << 24}
    cache = {**host(name), "storage": storage, "prefetch": {"policy": "wait_complete"}}
    quiet = {"cache": {"host_bytes": 0, "prefix_reuse": False}}
    prompt = words(4, 60)
    with cell_of(name, cache=cache, decode=quiet) as cell:
        expect(cell, name, prompt)
        cell.rest()
        while manager_of(cell.both.prefill).busy:
            cell.round()
    assert damage_folder(tmp_path / "pages", 5, share=0.6)
    with cell_of(name, cache=cache, decode=quiet) as cell:
        expect(cell, name, prompt)
        assert set(cell.damage()) == {("prefill", "storage")}
        assert {vars(line)["request_id"] for line in lines(caplog, DamageSite.STORAGE)} == {"cell-0"}
        assert all(vars(line)["what"] for line in lines(caplog, DamageSite.STORAGE))
        assert sum(cell.damage().values()) == len(lines(caplog, DamageSite.STORAGE))


def given_away(cell: Cell, role: Role) -> bool:
    """A page of a request in mid-work gets another epoch, as if somebody else had it."""
    worker = cell.both.prefill if role is Role.PREFILL else cell.both.decode
    for request in worker.report.requests:
        if request.allocation is not None and request.committed > 10 and not request.submit.attempt:
            manager_of(worker).pools.allocators["full"].epochs.bump(request.allocation.tables["full"].pages[1:2])
            return True
    return False


@pytest.mark.parametrize("role", PAIR)
def test_a_page_given_away_under_a_step(role: Role, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    prompt, done = words(5, 90), False
    sampling = SamplingParams(max_tokens=12, temperature=0.9, seed=3)
    with pair(model) as both:
        right = Cell(both).ask(prompt, sampling)
    with pair(model, prefill={"chunk_tokens": 16}) as both:
        cell = Cell(both)
        rid = cell.submit(prompt, sampling)
        while rid not in cell.ends:
            cell.round()
            done = done or given_away(cell, role)
        assert done
        assert cell.run(rid) == [right]
        assert set(cell.damage()) == {(str(role), "step")}
        line = lines(caplog, DamageSite.STEP)[0]
        assert vars(line)["request_id"] == rid
        start, end = vars(line)["positions"]
        assert 0 <= start < end
        cell.rest()


def test_every_counter_of_damage_has_a_place_and_others_have_none() -> None:
    prefixed = {DamageSite.LOGITS}
    assert {where_of(name) for name in COUNTERS} == set(DamageSite) - {DamageSite.AUDIT} - prefixed, (
        "an audit's is the router's own"
    )
    assert {where_of(f"{PREFIX}{where}") for where in prefixed} == prefixed
    assert where_of(f"{PREFIX}{DamageSite.RESTORE}") == "restore"
    assert where_of("pages_loaded") is None
