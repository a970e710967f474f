"""The bench of kernels without a GPU: the table of compiled code, and which options tuning may choose among."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.kernels import __main__ as bench
from bench.kernels import tune_launches
from tests.support.launches import production_launches
from tests.support.launches.chip_limits import CHIPS, blocks_at_once
from tests.support.launches.compiled_kernel import addition_orders, product_loops
from tests.support.launches.recorded_launches import RecordedLaunch, intercepted, recording
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention
from twinpool.engine.tensors import launch_configs

TTGIR = """
#mma = #ttg.nvidia_mma<{versionMajor = 3, warpsPerCTA = [4, 1]}>
  %0 = scf.for %i = %a to %b step %c {
    %1 = ttg.async_copy_global_to_local %p : tensor<64x128x!tt.ptr<bf16>, #blocked>
    %2 = ttng.warp_group_dot %q, %k, %z {isAsync = true} : !a * !b -> tensor<64x64xf32, #mma> loc(#loc1)
    %3 = "tt.reduce"(%2) <{axis = 1 : i32}> ({
    ^bb0(%x: f32, %y: f32):
      %s = arith.addf %x, %y : f32
      tt.reduce.return %s : f32
    }) : (tensor<64x64xf32, #mma>) -> tensor<64xf32, #ttg.slice<{dim = 1, parent = #mma}>>
    scf.for %j = %a to %b step %c {
      %4 = tt.load %p : tensor<64x128x!tt.ptr<bf16>, #blocked>
      %5 = tt.dot %4, %4, %z : !a * !b -> tensor<64x64xf32, #mma>
    }
  }
"""


def launches(kernel: str, call: Callable[..., object], *args: object) -> list[RecordedLaunch]:
    with recording() as found:
        call(production_launches.Rig(TritonAttention(capability=90)), *args)
    return [launch for launch in found if launch.name == kernel]


def test_a_loop_that_loads_a_tile_of_a_product_itself_is_told_from_one_that_copies_asynchronously() -> None:
    assert product_loops(TTGIR) == [False, True], "the inner loop ends first"


def test_an_order_of_additions_names_the_layout_that_it_follows_from() -> None:
    found = addition_orders(TTGIR)
    assert found == tuple(sorted(found))
    assert any(order.startswith("sum over axis 1") and "warpsPerCTA = [4, 1]" in order for order in found)
    assert addition_orders(TTGIR.replace("[4, 1]", "[4, 2]")) != found


def test_blocks_at_once_follow_from_registers_shared_memory_warps_and_places() -> None:
    hopper = CHIPS[90]
    assert blocks_at_once(hopper, registers=255, shared_bytes=0, warps=8) == 1
    assert blocks_at_once(hopper, registers=128, shared_bytes=0, warps=4) == 4
    assert blocks_at_once(hopper, registers=32, shared_bytes=100 * 1024, warps=4) == 2
    assert blocks_at_once(hopper, registers=16, shared_bytes=0, warps=4) == 16
    assert blocks_at_once(hopper, registers=16, shared_bytes=0, warps=1) == 32
    assert blocks_at_once(hopper, registers=16, shared_bytes=228 * 1024, warps=1) == 0


@pytest.mark.slow
def test_the_table_is_printed_and_written_and_a_fault_fails_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "table.json"
    monkeypatch.setenv("TRITON_CACHE_DIR", "of the test")
    assert bench.main(["--compiled", "--only", "epoch_check", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["kernel"] == "epoch_check_kernel"
    assert row["code"]["registers"] > 0
    assert row["faults"] == []
    assert "| epoch_check | epochs |" in capsys.readouterr().out
    monkeypatch.setattr("tests.support.launches.compiled_table.SPILL_LIMIT", -1)
    assert bench.main(["--compiled", "--only", "epoch_check"]) == 1
    assert "FAULT: epoch_check_kernel spills 0 bytes" in capsys.readouterr().err


def test_what_needs_a_gpu_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--tune"]) == 2
    assert bench.main([]) == 2
    said = capsys.readouterr().err
    assert "--tune measures on a GPU" in said
    assert "--compiled needs none" in said


@pytest.mark.slow
def test_only_options_under_which_a_kernel_adds_up_in_the_same_order_are_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other stages do; other warps would share out the columns that a row's sum of weights is made of."""
    monkeypatch.setattr(tune_launches, "WARPS", (4, 8))
    monkeypatch.setattr(tune_launches, "STAGES", (2, 3))
    shape = production_launches.HEADS[1]
    (launch,) = launches("decode_split_kernel", production_launches._attend, shape, 4, 1, 512)
    found = list(tune_launches.candidates(launch, 90))
    assert found == [{"num_warps": 4, "num_stages": 3}, {"num_warps": 4, "num_stages": 2}]


def test_the_fastest_options_are_written_and_read_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = production_launches.HEADS[0]
    own, faster = {"num_warps": 4, "num_stages": 3}, {"num_warps": 4, "num_stages": 5}
    monkeypatch.setattr(tune_launches, "candidates", lambda launch, capability: iter([own, faster]))
    times = iter([1.0, 0.5])
    tuner = tune_launches.Tuner(90, lambda call: (call(), next(times))[1])
    runs: list[dict[str, Any]] = []
    table = tmp_path / "table.json"
    table.write_text('{"another": {}}')
    monkeypatch.setattr(launch_configs, "TABLE", table)
    launch_configs.tuned.cache_clear()
    rig = production_launches.Rig(TritonAttention(capability=90))
    with intercepted(lambda run, *launch: tuner.launch(lambda *_, **kwargs: runs.append(kwargs), *launch)):
        production_launches._attend(rig, shape, 4, 1, 512)
    assert [run["num_stages"] for run in runs if "num_stages" in run] == [3, 5, 3], "two are timed, one is carried out"
    tune_launches.write("a GPU", tuner.best)
    assert set(json.loads(table.read_text())) == {"a GPU", "another"}
    monkeypatch.setattr(launch_configs, "current_gpu", lambda: "a GPU")
    (launch,) = launches("decode_split_kernel", production_launches._attend, shape, 4, 1, 512)
    assert launch.options == faster
    table.write_text('{"a GPU": {"extend_kernel": [0, 3]}}')
    launch_configs.tuned.cache_clear()
    with pytest.raises(ValueError, match="two numbers of 1 or more"):
        launch_configs.tuned("a GPU")
    launch_configs.tuned.cache_clear()
