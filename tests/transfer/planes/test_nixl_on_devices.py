"""Plane `nixl` and pools on GPUs: what is registered and named as which memory, by an agent that only looks at that."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.pool_sets import entry, filled, pool_sets
from tests.support.stand_in_ranks import headed_sets
from tests.transfer.planes.test_bounce_buffers import LateCopies
from twinpool.cache.device import device_copies
from twinpool.cache.device.device_port import Completion
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.cluster_config import FaultsConfig
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.contracts.ids import RoomId
from twinpool.transfer.planes.data_plane import SLOT_BYTES, PageNumbers, PageWrite, RoomTarget, SlotWrite
from twinpool.transfer.planes.nixl import nixl_agent, nixl_link, nixl_plane
from twinpool.transfer.planes.nixl.nixl_agent import HOST_MEMORY, MemoryKind, NixlAgent
from twinpool.transfer.planes.nixl.nixl_plane import NixlPlane

SPEC = pool_sets()["all"]
TARGET = RoomTarget(RoomId("room-1"), {"full": PageNumbers(2, (5, 7, 6)), "state": PageNumbers(4, (3,))}, 1, 77)
WRITE = PageWrite(TARGET, {"full": PageNumbers(2, (1, 2, 4)), "state": PageNumbers(4, (8,))})
GPUS = {"writer": MemoryKind("VRAM", 1), "reader": MemoryKind("VRAM", 3)}


@dataclass
class FakeNixl:
    """A stand-in of the package: agents that copy between what was registered as the memory that a run is said to lie
    in, and refuse everything else."""

    kinds: tuple[str, ...] = ("DRAM_SEG", "VRAM_SEG")
    refuses: str = ""
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    broken: int = 0
    """So many transfers fail next."""
    moved: list[tuple[str, str]] = field(default_factory=list)
    """Kinds of memory of each transfer, from and to."""

    def nixl_agent(self, name: str, config: object) -> FakeAgent:
        self.agents[name] = FakeAgent(self, name)
        return self.agents[name]

    @staticmethod
    def nixl_agent_config(**_: object) -> None: ...


class FakeAgent:
    def __init__(self, package: FakeNixl, name: str) -> None:
        self.package, self.name = package, name
        self.backends = ("UCX",)
        self.memory: list[tuple[str, int, int, int]] = []
        self.failed = False
        """Whether a transfer of it has failed: that one may still be under way in it, so it is to be used no more."""

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return list(self.package.kinds)

    def register_memory(self, runs: list[tuple[int, int, int, str]], kind: str) -> object:
        if kind == self.package.refuses:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self.memory += [(kind, device, address, size) for address, size, device, _ in runs]
        return runs

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return self.package.agents[metadata.decode()].name

    def get_xfer_descs(self, runs: Any, kind: str) -> tuple[str, list[list[int]]]:
        return kind, runs.tolist()

    def initialize_xfer(self, verb: str, mine: Any, theirs: Any, peer: str) -> SimpleNamespace:
        assert not self.failed, "what an agent has failed at may still be under way in it"
        for agent, (kind, runs) in ((self, mine), (self.package.agents[peer], theirs)):
            for address, size, device in runs:
                assert any(
                    (kind, device) == (its, at) and start <= address and address + size <= start + length
                    for its, at, start, length in agent.memory
                ), f"{size} bytes at {address:x} are not registered as {kind} {device}"
        self.package.moved.append((mine[0], theirs[0]))
        return SimpleNamespace(pairs=list(zip(mine[1], theirs[1], strict=True)), release=lambda: None)

    def transfer(self, handle: SimpleNamespace) -> str:
        if self.package.broken:
            self.package.broken -= 1
            self.failed = True
            return "ERR"
        for (here, size, _), (there, same, _) in handle.pairs:
            assert size == same
            ctypes.memmove(there, here, size)
        return "DONE"

    @staticmethod
    def check_xfer_state(handle: object) -> str:
        return "DONE"

    @staticmethod
    def get_new_notifs() -> None: ...


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    fake = FakeNixl()
    for module in (nixl_agent, nixl_plane):
        monkeypatch.setattr(module, "load_nixl", lambda: fake)
    return fake


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, MemoryKind]:
    """By address, the memory that counts as a GPU's here."""
    there: dict[int, MemoryKind] = {}
    for module in (nixl_agent, nixl_link, nixl_plane):
        monkeypatch.setattr(module, "kind_of", lambda memory: there.get(memory.data_ptr(), HOST_MEMORY))
    return there


@pytest.fixture
def planes(package: FakeNixl, gpus: dict[int, MemoryKind]) -> Iterator[tuple[NixlPlane, NixlPlane, PoolSet]]:
    """A writer's plane whose pages are full of sevens, and a reader's; the pools of both lie on GPUs."""
    writer, reader = (NixlPlane(FaultsConfig(), "127.0.0.1", None, link_timeout_s=5.0) for _ in range(2))
    source, target = PoolSet(SPEC, SPEC.even(9)), PoolSet(SPEC, SPEC.even(9))
    gpus |= {source.region.data_ptr(): GPUS["writer"], target.region.data_ptr(): GPUS["reader"]}
    source.region.fill_(7)
    writer.register(source, None)
    reader.register(target, torch.zeros(2, SLOT_BYTES, dtype=torch.uint8))
    try:
        yield writer, reader, target
    finally:
        writer.close()
        reader.close()


def metadata_of(reader: NixlPlane) -> bytes:
    """What was written into the first slot that is one."""
    assert reader._slots is not None
    return bytes(reader._slots[1, :8].numpy())


def test_pages_go_from_gpu_to_gpu_and_metadata_from_host_to_host(
    planes: tuple[NixlPlane, NixlPlane, PoolSet], package: FakeNixl
) -> None:
    writer, reader, target = planes
    link = writer.connect(reader.describe("a:1"))
    link.post(WRITE).wait()
    link.post(SlotWrite(TARGET, b"metadata")).wait()
    link.close()
    assert set(package.moved[:-1]) == {("VRAM", "VRAM")}
    assert package.moved[-1] == ("DRAM", "DRAM")
    assert set(b"".join(entry(target, "full", 7) + entry(target, "state", 3))) == {7}
    assert metadata_of(reader) == b"metadata"


def test_a_reader_in_host_memory_takes_pages_of_a_gpu(
    planes: tuple[NixlPlane, NixlPlane, PoolSet], package: FakeNixl, gpus: dict[int, MemoryKind]
) -> None:
    writer, reader, target = planes
    del gpus[target.region.data_ptr()]
    described = reader.describe("a:1")
    for part in described["ranks"]:  # As a build describes itself that knows of no other memory.
        del part["memory"], part["device"]
    link = writer.connect(described)
    link.post(WRITE).wait()
    link.close()
    assert set(package.moved) == {("VRAM", "DRAM")}
    assert set(b"".join(entry(target, "full", 7))) == {7}


@pytest.mark.parametrize("wrong", [{"memory": "FILE"}, {"memory": 3}, {"device": -1}, {"device": "0"}])
def test_a_reader_that_names_no_memory_is_refused(
    planes: tuple[NixlPlane, NixlPlane, PoolSet], wrong: dict[str, object]
) -> None:
    writer, reader, _ = planes
    described = reader.describe("a:1")
    described["ranks"][0] |= wrong
    with pytest.raises(LayoutMismatch):
        writer.connect(described)


def test_a_writer_that_comes_again_after_a_refused_registration_gets_an_agent_with_all_memory(
    planes: tuple[NixlPlane, NixlPlane, PoolSet], package: FakeNixl
) -> None:
    writer, reader, target = planes
    package.refuses = "DRAM"  # The pages are registered by then, and the metadata slots aren't.
    with pytest.raises(ConfigError, match="DRAM can't be registered"):
        reader.describe("a:1")
    package.refuses = ""
    link = writer.connect(reader.describe("a:1"))
    link.post(WRITE).wait()
    link.post(SlotWrite(TARGET, b"metadata")).wait()
    link.close()
    assert set(b"".join(entry(target, "full", 7))) == {7}
    assert metadata_of(reader) == b"metadata"


@pytest.mark.parametrize("reason", ["kinds", "registration"])
def test_a_worker_whose_ucx_has_no_cuda_is_refused_as_it_starts(
    package: FakeNixl, gpus: dict[int, MemoryKind], reason: str
) -> None:
    if reason == "kinds":
        package.kinds = ("DRAM_SEG",)
    else:
        package.refuses = "VRAM"
    plane, pools = NixlPlane(FaultsConfig(), "127.0.0.1", None), PoolSet(SPEC, SPEC.even(9))
    gpus[pools.region.data_ptr()] = GPUS["writer"]
    with pytest.raises(ConfigError, match=r"VRAM .*: use transfer\.plane=staged, or engine\.device=cpu$"):
        plane.register(pools, None)
    plane.close()


def test_nixl_itself_refuses_what_is_no_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, whose UCX takes memory of the host for what it is."""
    monkeypatch.setattr(nixl_agent, "kind_of", lambda memory: MemoryKind("VRAM", 0))
    agent = NixlAgent()
    with pytest.raises(ConfigError, match=r"VRAM can't be registered: .*UCX may have no CUDA here: use .*staged"):
        agent.register(torch.zeros(1 << 16, dtype=torch.uint8))
    agent.close()


def error_of(posted: Completion) -> RuntimeError | None:
    """What a write failed with, once it is over."""
    try:
        posted.wait()
    except RuntimeError as error:
        return error
    return None


@pytest.mark.parametrize("kind", ["of the host", "of GPUs"])
def test_heads_are_packed_again_by_the_agent_that_comes_after_a_failed_one(
    package: FakeNixl, gpus: dict[int, MemoryKind], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A transfer fails, and its agent ends with it: the next one has to know all memory that writes come from."""
    whole = headed_sets()["full"]
    writer = NixlPlane(FaultsConfig(), "127.0.0.1", None, link_timeout_s=5.0)
    readers = [NixlPlane(FaultsConfig(), "127.0.0.1", None, rank, 2, link_timeout_s=5.0) for rank in range(2)]
    source = filled(PoolSet(whole, whole.even(9)), 3)
    targets = [PoolSet(whole.shard(rank, 2), whole.even(9)) for rank in range(2)]
    if kind == "of GPUs":
        gpus[source.region.data_ptr()] = GPUS["writer"]
        own = device_copies.zeroed
        packing: list[torch.Tensor] = []

        def zeroed(nbytes: int, device: torch.device) -> torch.Tensor:
            packing.append(own(nbytes, device))
            gpus[packing[-1].data_ptr()] = GPUS["writer"]
            return packing[-1]

        monkeypatch.setattr(nixl_link, "zeroed", zeroed)
        monkeypatch.setattr(nixl_link, "device_copies", lambda device: LateCopies())
    writer.register(source, None)
    for number, (reader, target) in enumerate(zip(readers, targets, strict=True)):
        slots = torch.zeros(2, SLOT_BYTES, dtype=torch.uint8) if not number else None
        reader.register(target, slots)
    try:
        link = writer.connect({"ranks": [part for reader in readers for part in reader.describe("a:1")["ranks"]]})
        run = {"full": PageNumbers(0, (5, 7))}
        write = PageWrite(RoomTarget(RoomId("room-1"), run, 1, 77), {"full": PageNumbers(0, (1, 2))})
        link.post(write).wait()
        right = [target.region.clone() for target in targets]
        assert any(bool(each.any()) for each in right)
        for _ in range(2):
            package.broken = 1
            failed = link.post(write)
            with pytest.raises(RuntimeError, match="transfer failed"):
                failed.wait()
            assert link.cut()
            assert not link.cut(), "it is told once"
            for target in targets:
                target.region.zero_()
            assert error_of(link.post(write)) is None
            assert [target.region.equal(its) for target, its in zip(targets, right, strict=True)] == [True, True]
        link.close()
    finally:
        for plane in (writer, *readers):
            plane.close()
