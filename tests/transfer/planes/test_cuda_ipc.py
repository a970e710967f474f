"""Plane `cuda_ipc` but for the driver: what opens a reader's memory is injected, and copies run late as on a GPU."""

from __future__ import annotations

import ctypes.util
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, ends, placed
from tests.support.stand_in_ranks import headed_sets
from twinpool.cache.device.device_port import Completion
from twinpool.cache.memory.kv_cache_spec import due
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError, LayoutMismatch
from twinpool.transfer.planes import make_plane
from twinpool.transfer.planes.direct import cuda_ipc, direct_link, shm_plane
from twinpool.transfer.planes.direct.cuda_ipc import HANDLE_BYTES, CudaIpc, MappedRegion, handle_of
from twinpool.transfer.rooms.room_states import HandoverFailed, PromptArrived


class Shared:
    """Memory of this process that is opened by a handle, as a GPU's is; what is mapped is counted."""

    regions: ClassVar[dict[bytes, torch.Tensor]] = {}
    mapped: ClassVar[list[bytes]] = []
    refuses = ""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def describe(self, region: torch.Tensor) -> dict[str, Any]:
        handle = region.data_ptr().to_bytes(HANDLE_BYTES, "big")
        self.regions[handle] = region
        return {"handle": handle, "offset": 0, "nbytes": region.numel()}

    def open(self, described: Mapping[str, Any], nbytes: int, device: torch.device) -> MappedRegion:
        handle, _ = handle_of(described, nbytes)
        if self.refuses:
            raise LayoutMismatch(self.refuses)
        self.mapped.append(handle)
        return MappedRegion(self.regions[handle], lambda: self.mapped.remove(handle))


class LateCopies:
    """Copies that run when they are waited for."""

    def begin(self, copy: Callable[[], object]) -> Completion:
        return _Late(copy)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        raise AssertionError("nothing goes through host memory here")


class _Late:
    done = False

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy = copy

    def wait(self) -> None:
        if not self.done:
            self._copy()
            self.done = True

    def order(self) -> None:
        raise AssertionError("a write waits for its copies")


@pytest.fixture(autouse=True)
def injected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_plane, "CudaIpc", Shared)
    monkeypatch.setattr(direct_link, "device_copies", lambda device: LateCopies())


def hand_over(both: Ends, positions: int) -> None:
    prompt = both.prompt(positions)
    leases = both.open(prompt)
    both.sender.write(prompt.room, prompt.all(), ())
    both.seal(prompt)
    assert isinstance(both.outcome(prompt.room), PromptArrived)
    placed(both, prompt, leases, due(both.spec, positions))


@pytest.mark.parametrize("name", ["full", "all"])
def test_pages_of_every_pool_are_copied_to_the_memory_that_was_opened(name: str) -> None:
    with ends(pool_sets()[name], "cuda_ipc") as both:
        for positions in (3, 40):
            hand_over(both, positions)
        assert len(Shared.mapped) == 1
    assert Shared.mapped == [], "a link that is closed has let go of the reader's memory"


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1), (2, 2)])
def test_each_rank_opens_the_memory_of_those_it_writes_to(ranks: tuple[int, int]) -> None:
    with ends(headed_sets()["all"], "cuda_ipc", ranks=ranks) as both:
        hand_over(both, 24)
        assert len(Shared.mapped) == max(ranks)
    assert Shared.mapped == []


def test_memory_that_cannot_be_opened_ends_the_hand_over_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shared, "refuses", "no way from this GPU to that one")
    with ends(pool_sets()["full"], "cuda_ipc") as both:
        prompt = both.prompt(8)
        both.start(prompt)
        outcome = both.outcome(prompt.room)
        assert isinstance(outcome, HandoverFailed)
        assert "no way from this GPU to that one" in outcome.message


def test_a_reader_on_another_host_is_refused_with_the_plane_that_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(pool_sets()["full"], "cuda_ipc") as both:
        plane = both.sender_plane
        described = plane.describe()
        described["ranks"][0]["namespace"] = "elsewhere"
        with pytest.raises(LayoutMismatch, match=r"plane cuda_ipc: .*use transfer\.plane=staged"):
            plane.connect(described)


def test_what_a_failed_connection_had_mapped_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*arguments: object) -> Any:
        raise LayoutMismatch("no such endpoint")

    with ends(pool_sets()["full"], "cuda_ipc") as both:
        monkeypatch.setattr(shm_plane, "dial", nobody)
        with pytest.raises(LayoutMismatch, match="no such endpoint"):
            both.sender_plane.connect(both.receiver_plane.describe())
        assert Shared.mapped == []


@pytest.mark.parametrize(
    "changed",
    [{"handle": b"short"}, {"handle": "text"}, {"nbytes": 63}, {"offset": -1}, {"offset": 1 << 60}, {"offset": "0"}],
)
def test_what_is_no_description_is_refused(changed: dict[str, Any]) -> None:
    good = {"handle": bytes(HANDLE_BYTES), "offset": 512, "nbytes": 64}
    assert handle_of(good, 64) == (bytes(HANDLE_BYTES), 512)
    with pytest.raises(LayoutMismatch):
        handle_of(good | changed, 64)


class Driver:
    """The functions of `libcuda` that are called, over one allocation of 4,096 bytes at an address of its own."""

    BASE, SIZE, OPENED = 0x7F00_0000_0000, 4096, 0x7E00_0000_0000

    def __init__(self) -> None:
        self.open_count, self.code = 0, 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:
        begin = next(b for b in (self.BASE, self.OPENED) if b <= address.value < b + self.SIZE)
        base._obj.value, size._obj.value = begin, self.SIZE
        return 0

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        assert address.value == self.BASE, "a handle is of a whole allocation"
        handle._obj.reserved[0] = 7
        return self.code

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: ctypes.c_uint) -> int:
        assert (bytes(handle.reserved)[0], flags.value) == (7, 1)
        if not self.code:
            address._obj.value = self.OPENED
            self.open_count += 1
        return self.code

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        assert address.value == self.OPENED
        self.open_count -= 1
        return 0

    def cuGetErrorName(self, code: ctypes.c_int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_CONTEXT"
        return 0


class Region:
    """Of a GPU, as far as a description of it asks."""

    device = torch.device("cuda", 0)

    def data_ptr(self) -> int:
        return Driver.BASE + 1024

    def numel(self) -> int:
        return 2048


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    one = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: one)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return one


def test_a_region_in_the_middle_of_an_allocation_is_opened_where_it_begins(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def tensor(self: CudaIpc, address: int, nbytes: int) -> torch.Tensor:
        asked.append((address, nbytes))
        return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(CudaIpc, "_tensor", tensor)
    sharing, region = CudaIpc(), Region()
    described = sharing.describe(region)  # type: ignore[arg-type]
    assert (described["offset"], described["nbytes"]) == (1024, 2048)
    mapped = sharing.open(described, 2048, region.device)
    assert asked == [(Driver.OPENED + 1024, 2048)]
    mapped.close()
    assert driver.open_count == 0
    with pytest.raises(LayoutMismatch, match="2048 bytes from 2049 of an allocation of 4096"):
        sharing.open(described | {"offset": 2049}, 2048, region.device)
    assert driver.open_count == 0


def test_the_driver_is_asked_on_the_readers_gpu_and_a_mapping_ends_when_its_copies_are_over(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, region = list[str](), Region()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(f"{device} is through"))

    def noted(name: str, call: Callable[..., int]) -> Callable[..., int]:
        def noting(*arguments: Any) -> int:
            events.append(name)
            return call(*arguments)

        return noting

    for name in ("cuMemGetAddressRange_v2", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"):
        monkeypatch.setattr(driver, name, noted(name, getattr(driver, name)))
    monkeypatch.setattr(CudaIpc, "_tensor", lambda self, address, nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    sharing = CudaIpc()
    sharing.open(sharing.describe(region), 2048, region.device).close()  # type: ignore[arg-type]
    over = "cuda:0 is through"
    asked = ["cuMemGetAddressRange_v2", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2", "cuIpcCloseMemHandle"]
    assert events == [word for name in asked for word in (over, name)]


def test_what_the_driver_refuses_is_told_in_its_words(driver: Driver) -> None:
    sharing, region = CudaIpc(), Region()
    described = sharing.describe(region)  # type: ignore[arg-type]
    driver.code = 201
    with pytest.raises(LayoutMismatch, match=r"can't be mapped here: .*CUDA_ERROR_INVALID_CONTEXT \(201\)"):
        sharing.open(described, 2048, region.device)
    with pytest.raises(ConfigError, match="expandable segments"):
        sharing.describe(region)  # type: ignore[arg-type]


def test_a_mapping_that_cannot_be_ended_ends_nothing_else(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CudaIpc, "_tensor", lambda self, address, nbytes: torch.zeros(nbytes, dtype=torch.uint8))
    monkeypatch.setattr(driver, "cuIpcCloseMemHandle", lambda address: 201)
    sharing, region = CudaIpc(), Region()
    sharing.open(sharing.describe(region), 2048, region.device).close()  # type: ignore[arg-type]
    assert "CUDA_ERROR_INVALID_CONTEXT" in caplog.text


def test_memory_that_cannot_be_shared_is_refused_before_any_reader_is_met(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "zeroed", lambda nbytes, device: Region())
    assert CudaIpc().allocate(2048, Region.device).numel() == 2048
    driver.code = 1
    with pytest.raises(ConfigError, match="expandable segments"):
        CudaIpc().allocate(2048, Region.device)


def test_pools_on_a_cpu_are_none_of_its_business(driver: Driver) -> None:
    with pytest.raises(ConfigError, match=r"for pools on a GPU, and they lie on cpu: use shm"):
        CudaIpc().allocate(64, torch.device("cpu"))


def test_without_a_driver_the_plane_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(make_plane, "CudaIpc", cuda_ipc.CudaIpc)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    config = config_from_dict({"transfer": {"plane": "cuda_ipc"}, "engine": {"device": "cuda"}})
    with pytest.raises(ConfigError, match="needs an NVIDIA driver"):
        make_plane.make_plane(config, "127.0.0.1", None, lambda: None)
