"""What one-sided writes by NIXL need beyond what all planes do: access by writer that ends, and writes that fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.pool_sets import entry, pool_sets
from tests.support.room_ends import ends, image, placed
from tests.support.stand_in_ranks import headed_sets
from tests.transfer.planes.test_nixl_on_devices import metadata_of
from twinpool.cache.device.device_port import failure
from twinpool.cache.memory.kv_cache_spec import PoolSetLayout
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.transfer.net.zmq_sockets import dial
from twinpool.transfer.planes.data_plane import SLOT_BYTES, PageNumbers, PageWrite, RoomTarget, SlotWrite, WriteLink
from twinpool.transfer.planes.nixl import nixl_agent, nixl_link, nixl_plane
from twinpool.transfer.planes.nixl.nixl_plane import NixlPlane
from twinpool.transfer.planes.one_sided import page_runs
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived

SPEC = pool_sets()["all"]
TARGET = RoomTarget(RoomId("room-1"), {"full": PageNumbers(2, (5, 7, 6)), "state": PageNumbers(4, (3,))}, 1, 77)
WRITE = PageWrite(TARGET, {"full": PageNumbers(2, (1, 2, 4)), "state": PageNumbers(4, (8,))})


@contextmanager
def planes() -> Iterator[tuple[NixlPlane, NixlPlane, PoolSet]]:
    """A writer's plane whose pages are full of sevens, and a reader's."""
    writer, reader = (NixlPlane(FaultsConfig(), "127.0.0.1", None, link_timeout_s=5.0) for _ in range(2))
    source, target = PoolSet(SPEC, SPEC.even(9)), PoolSet(SPEC, SPEC.even(9))
    source.region.fill_(7)
    writer.register(source, None)
    reader.register(target, torch.zeros(2, SLOT_BYTES, dtype=torch.uint8))
    try:
        yield writer, reader, target
    finally:
        writer.close()
        reader.close()


@contextmanager
def linked(writer: NixlPlane, descriptor: dict[str, Any]) -> Iterator[WriteLink]:
    link = writer.connect(descriptor)
    try:
        yield link
    finally:
        link.close()


def test_a5_a_writer_elsewhere_whose_access_was_ended_writes_nothing_and_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TCP, as from another host: on this one a living writer may use a system call that asks nobody, and so its
    death has to be proven first."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with planes() as (writer, reader, target), linked(writer, reader.describe("a:1")) as link:
        link.post(WRITE).wait()
        assert set(b"".join(entry(target, "full", 7))) == {7}
        target.region.zero_()
        before = image(target)
        reader.sever("a:1")
        failed = link.post(WRITE)
        with pytest.raises(RuntimeError, match="NIXL failed"):
            failed.wait()
        assert image(target) == before
        assert link.cut()


def test_a5_ending_one_writers_access_leaves_the_others_theirs() -> None:
    with (
        planes() as (writer, reader, target),
        linked(writer, reader.describe("a:1")) as gone,
        linked(writer, reader.describe("b:1")) as stays,
    ):
        gone.post(WRITE).wait()
        stays.post(WRITE).wait()
        reader.sever("a:1")
        target.region.zero_()
        stays.post(WRITE).wait()
        stays.post(SlotWrite(TARGET, b"metadata")).wait()
        assert set(b"".join(entry(target, "state", 3))) == {7}
        assert metadata_of(reader) == b"metadata"


def test_a_severed_link_fails_what_waits_and_takes_what_comes_later() -> None:
    with planes() as (writer, reader, target), linked(writer, reader.describe("a:1")) as link:
        posted = [link.post(WRITE) for _ in range(200)]
        link.sever()
        for one in posted:
            one._over.wait(60)  # type: ignore[attr-defined]
        reasons = [str(error) for one in posted if (error := failure(one)) is not None]
        assert reasons
        assert all("severed" in reason or "given up" in reason for reason in reasons)
        last = link.post(WRITE)
        assert last._over.wait(60)  # type: ignore[attr-defined]
        assert failure(last) is None
        assert set(b"".join(entry(target, "full", 5))) == {7}


@pytest.mark.parametrize(
    "wrong",
    [
        {"agent": b""},
        {"agent": b"no metadata"},
        {"pages": -1},
        {"slot_count": -1},
        {"counts": {"full": 9}},
        {"slots": "a"},
    ],
    ids=str,
)
def test_a_descriptor_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with planes() as (writer, reader, _):
        (part,) = reader.describe("a:1")["ranks"]
        with pytest.raises(LayoutMismatch):
            writer.connect({"ranks": [{**part, **wrong}]})


def test_a_reader_whose_agent_cannot_be_reached_leaves_no_socket_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again and again, and a context has so many sockets."""
    dialled: list[Any] = []

    def dialling(*to: Any) -> Any:
        dialled.append(dial(*to))
        return dialled[-1]

    monkeypatch.setattr(nixl_plane, "dial", dialling)
    with planes() as (writer, reader, _):
        (part,) = reader.describe("a:1")["ranks"]
        with pytest.raises(LayoutMismatch):
            writer.connect({"ranks": [{**part, "agent": b"no metadata"}]})
    ((socket, watch),) = dialled
    assert watch._monitor.closed
    assert socket.closed


def test_a_failed_write_ends_the_writers_access_before_its_pages_are_used_again() -> None:
    """What failed may still be on its way; the room ends, and the next one goes over a new agent."""
    with ends(SPEC, "nixl") as both:
        prompt = both.prompt(27)
        both.open(prompt)
        reader, key = both.receiver_plane, "prefill-0:1"
        assert isinstance(reader, NixlPlane)
        agent = reader._agents[key]
        reader.sever(key)
        both.sender.write(prompt.room, prompt.all(), ())
        broken = both.outcome(prompt.room)
        assert isinstance(broken, HandoverFailed)
        assert both.receiver.rooms == 0
        both.released(prompt.room)
        second = both.prompt(27)
        both.open(second)
        assert reader._agents[key] is not agent
        both.sender.write(second.room, second.all(), ())
        both.seal(second)
        arrived = both.outcome(second.room)
        assert isinstance(arrived, PromptArrived)
        arrived.release()
        both.quiet()


def test_without_nixl_the_plane_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_module",))
    nixl_agent.load_nixl.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"pip install 'twinpool\[nixl\]'"):
            NixlPlane(FaultsConfig(), "127.0.0.1", None)
    finally:
        nixl_agent.load_nixl.cache_clear()


@pytest.mark.parametrize(("sources", "targets"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_runs_copy_each_common_byte_once_and_nothing_else(sources: int, targets: int) -> None:
    """By a map of single bytes, against what the strided copy does."""
    from twinpool.cache.memory.head_slices import copy_common

    whole = headed_sets()["all"]
    one = PoolSetLayout(whole.shard(0, sources), whole.even(8))
    other = PoolSetLayout(whole.shard(0, targets), whole.even(6))
    noise = torch.randint(0, 256, (one.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for pool in whole.by_name:
        mine, its = one.buffers[pool], other.buffers[pool]
        by_runs, by_copy = torch.zeros(other.nbytes, dtype=torch.uint8), torch.zeros(other.nbytes, dtype=torch.uint8)
        here, there, sizes = page_runs(mine, (1, 2, 5), its, (3, 4, 1), whole.page_tokens)
        for a, b, n in zip(here.tolist(), there.tolist(), sizes.tolist(), strict=True):
            by_runs[b : b + n] = noise[a : a + n]
        pages = (one.counts[pool], (1, 2, 5)), (other.counts[pool], (3, 4, 1))
        copy_common(mine, noise, pages[0], its, by_copy, pages[1], whole.page_tokens)
        assert torch.equal(by_runs, by_copy)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 1 << 20])
@pytest.mark.parametrize("ranks", [(1, 2), (2, 4), (2, 1)])
def test_heads_of_more_ranks_are_packed_into_long_runs_some_pages_at_a_time(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int], most: int
) -> None:
    """One page at a time, where memory is short; from two ranks to one nothing is packed: its pages are not whole."""
    monkeypatch.setattr(nixl_link, "_PACKING_BYTES", most)
    spec = headed_sets()["full"]
    sent: list[int] = []
    post = nixl_agent.NixlAgent.post

    def counting(self: nixl_agent.NixlAgent, sources: Any, *others: Any) -> Any:
        sent.append(len(sources))
        return post(self, sources, *others)

    monkeypatch.setattr(nixl_agent.NixlAgent, "post", counting)
    with ends(spec, "nixl", ranks=ranks) as both:
        prompt = both.prompt(24)
        leases = both.open(prompt)
        both.sender.write(prompt.room, prompt.all(), ())
        both.seal(prompt)
        assert isinstance(both.outcome(prompt.room), PromptArrived)
        placed(both, prompt, leases, {pool: run.numbers for pool, run in prompt.runs.items()})
    pairs, rows = max(ranks), 6 * 2 * 3  # Pages, buffers, layers; and the metadata is one run.
    assert (sum(sent) - 1 <= pairs * rows) is (ranks != (2, 1))
