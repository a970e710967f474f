"""The table of measured launches, sums over ranks, and state that a GPU can't keep: what each goes by."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import BufferSpec, PoolKind, PoolSetSpec, PoolSpec
from twinpool.engine.runner.kernel_choice import refused_state
from twinpool.engine.tensors import launch_configs
from twinpool.engine.tensors.launch_configs import launch_options, read_table, shape_class
from twinpool.engine.tensors.tensor_parallel import TorchDistributedGroup

Write = Callable[[Any], None]
KERNEL: Any = SimpleNamespace(fn=SimpleNamespace(__name__="extend_kernel"))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a table for a GPU that is called `card`."""
    path = tmp_path / "launch_configs.json"
    monkeypatch.setattr(launch_configs, "TABLE", path)
    monkeypatch.setattr(launch_configs, "current_gpu", lambda: "card")

    def write(content: Any) -> None:
        path.write_text(json.dumps(content))
        launch_configs.tuned.cache_clear()

    yield write
    launch_configs.tuned.cache_clear()


def test_a_launch_goes_by_its_kernel_its_dtype_and_its_tile_on_this_gpu(table: Write) -> None:
    tile = {"ROWS": 64, "BLOCK_D": 128, "PAGE_TOKENS": 16}
    key = shape_class("extend_kernel", torch.bfloat16, tuple(tile.get(name, 0) for name in launch_configs.SIZES))
    assert key == "extend_kernel bfloat16 ROWS=64 BLOCK_D=128"
    table({"card": {key: [8, 2]}, "another": {key.replace("bfloat16", "float32"): [1, 1]}})

    def options(dtype: torch.dtype = torch.bfloat16, kernel: Any = KERNEL, **changes: int) -> tuple[int, int]:
        found = launch_options(kernel, dtype, {**tile, **changes}, 4, 3)
        return found["num_warps"], found["num_stages"]

    assert options() == (8, 2)
    assert options(PAGE_TOKENS=32) == (8, 2), "the size of a page is no part of a tile"
    assert options(torch.float32) == options(ROWS=32) == options(BLOCK_N=64) == (4, 3)
    assert options(kernel=SimpleNamespace(fn=SimpleNamespace(__name__="decode_kernel"))) == (4, 3)


@pytest.mark.parametrize("options", [[4], [4, 2, 1], [0, 2], [4, 0], [4, 2.0], [True, 2], [4, "2"]])
def test_a_table_of_other_than_two_whole_numbers_is_refused_by_its_place(table: Write, options: list[Any]) -> None:
    table({"card": {"a": [4, 1]}, "other": {"b": [1, 1], "c": options}})
    with pytest.raises(ValueError, match=r"launch_configs\.json: other, c: two numbers"):
        read_table()


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_float8_in_any_buffer_of_any_pool_needs_its_compute_capability(place: tuple[int, int]) -> None:
    plain = BufferSpec("k", 1, (1, 2), torch.bfloat16)
    pools = [[plain, plain] for _ in range(2)]
    pools[place[0]][place[1]] = BufferSpec("index_k", 1, (1, 2), torch.float8_e4m3fn)
    names = iter("abcd")
    spec = PoolSetSpec(
        16,
        tuple(
            PoolSpec(str(kind), tuple(_named(one, next(names)) for one in pool), kind, window)
            for (kind, window), pool in zip(((PoolKind.FULL, 0), (PoolKind.WINDOW, 64)), pools, strict=True)
        ),
    )
    assert refused_state(spec, 89) == refused_state(spec, 90) == ""
    assert "compute capability 8.9, and it has 8.8" in refused_state(spec, 88)
    assert refused_state(PoolSetSpec(16, (PoolSpec("full", (plain,)),)), 70) == ""


def _named(buffer: BufferSpec, name: str) -> BufferSpec:
    return BufferSpec(name, buffer.layers, buffer.shape, buffer.dtype)


@pytest.fixture
def group() -> Iterator[TorchDistributedGroup]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    found = TorchDistributedGroup(store, 0, 1, deadline_s=7.0, start_s=3.0)
    yield found
    found.close()


def test_ranks_are_added_in_float32_and_rounded_once(
    group: TorchDistributedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    monkeypatch.setattr(group, "_gathered", lambda x: parts)
    exact = parts[0].float()
    for part in parts[1:]:
        exact = exact + part.float()
    got = group.sum(parts[0])
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, exact.bfloat16())
    assert not torch.equal(got, (parts[0] + parts[1] + parts[2] + parts[3])), "rounding at each step shows"


def test_a_rank_that_loads_has_no_less_time_than_in_a_step(
    group: TorchDistributedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[timedelta | None] = []
    run = group._run

    def noting(collective: Any, within: timedelta | None = None) -> None:
        waited.append(within)
        run(collective, within)

    monkeypatch.setattr(group, "_run", noting)
    (found,) = group.gather(torch.arange(3), loading=True)
    assert isinstance(found, Tensor)
    assert found.tolist() == [0, 1, 2]
    group.gather(torch.arange(3))
    assert waited == [timedelta(seconds=7), None], "start_s is below the deadline of steps here"
