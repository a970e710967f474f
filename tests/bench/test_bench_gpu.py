"""The bench of GPUs, rehearsed on a CPU: its sections run, check what they move, and cost each other nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import gpu_copies
from cache.device.device_backends import CpuDevice


@pytest.fixture
def env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(gpu.ROOT)}


def test_copies_come_back_as_they_went_and_a_changed_byte_is_told() -> None:
    pair = gpu_copies.TierPair(CpuDevice(), gpu_copies.kv_spec(2, 2, 16, 4), 1 << 14)
    assert gpu_copies.check(pair) == []
    save = pair.save

    def damaged(digested: bool) -> list[int]:
        digests = save(digested)
        pair.host.region[pair.host.layout.buffers["full"][0].offset(0, pair.there[0])] ^= 1
        return digests

    pair.save = damaged  # type: ignore[method-assign]
    assert len(gpu_copies.check(pair)) == 3


@pytest.mark.slow
def test_a_rehearsal_writes_every_section_and_says_that_it_was_one(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--rehearse", "--only", "copies", "handover", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert written["rehearsal"]
    assert {name: section["ok"] for name, section in written["sections"].items()} == {
        "copies": True, "handover": True
    }  # fmt: skip
    assert set(written["sections"]["handover"]["figures"]) == {"one block", "staged", "cuda_ipc, rehearsed"}
    for rates in written["sections"]["copies"]["figures"]["gb_per_s"].values():
        assert {"one block up", "pieces down, digested", "layers up"} <= set(rates)


@pytest.mark.soak
def test_the_engine_is_rehearsed_beside_transformers(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--rehearse", "--only", "engine", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())["sections"]["engine"]["figures"]
    assert set(figures["tokens_per_s"]) >= {"prefill of 24", "decode, batch 2"}
    assert figures["differing_in_a_batch"] == 0


def test_a_section_that_fails_or_hangs_is_told_and_the_next_one_runs(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text("import sys\nprint('the reason')\nsys.exit(3)\n")
    (tmp_path / "hangs.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(gpu, "MODULES", {"breaks": "breaks", "hangs": "hangs"})
    env["PYTHONPATH"] = str(tmp_path)
    broken = gpu.run_section("breaks", [], 60, env)
    assert (broken.ok, broken.ended, broken.output, broken.figures) == (False, "exit code 3", "the reason\n", None)
    hanging = gpu.run_section("hangs", [], 3, env)
    assert (hanging.ok, hanging.ended) == (False, "not done after 3 s")


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu", lambda: None)
    assert gpu.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err
