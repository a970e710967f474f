"""The bench of GPUs, rehearsed on a CPU: its sections run, check what they move, and cost each other nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.engine.engine_speed import SpeedScenario
from bench.gpu import __main__ as gpu
from bench.gpu import gpu_copies, gpu_families
from bench.gpu.gpu_limits import Ceilings
from cache.device.device_backends import CpuDevice
from tests.family_scenes import Family


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


@pytest.mark.slow
def test_families_are_rehearsed_scene_by_scene(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--rehearse", "--only", "families", "--out", str(out)]) == 0
    scenes = json.loads(out.read_text())["sections"]["families"]["figures"]["scenes"]
    assert {scene["ended"] for scene in scenes} == {"passed"}
    assert len(scenes) == 6


def test_a_scene_that_fails_is_told_with_its_reason_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(family: Family) -> None:
        raise AssertionError("another token")

    monkeypatch.setitem(gpu_families.SCENES, "answers", wrong)
    result = gpu_families.run_scene(Family("llama", Path("nowhere")), "answers")
    assert result.ended == "failed"
    assert "another token" in result.why


def test_what_passed_is_not_run_again_and_what_failed_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, ran = tmp_path / "gpu.json", list[str]()

    def run(section: str, extra: object, deadline_s: float, env: object) -> gpu.SectionResult:
        ran.append(section)
        return gpu.SectionResult(section, section != "copies" or len(ran) > 2, 1.0, "exit code", "", {"of": len(ran)})

    monkeypatch.setattr(gpu, "run_section", run)
    assert gpu.main(["--rehearse", "--only", "kernels", "copies", "--out", str(out)]) == 1
    assert gpu.main(["--rehearse", "--only", "kernels", "copies", "--out", str(out), "--resume"]) == 0
    assert ran == ["kernels", "copies", "copies"]
    sections = json.loads(out.read_text())["sections"]
    assert {name: section["figures"] for name, section in sections.items()} == {
        "kernels": {"of": 1},
        "copies": {"of": 3},
    }
    out.write_text(out.read_text().replace('"rehearsal": true', '"rehearsal": false'))
    with pytest.raises(SystemExit, match="not of a rehearsal"):
        gpu.main(["--rehearse", "--out", str(out), "--resume"])


@pytest.mark.soak
def test_the_engine_is_rehearsed_beside_transformers(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.main(["--rehearse", "--only", "engine", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())["sections"]["engine"]["figures"]
    model = figures["models"]["4m"]
    assert set(model["tokens_per_s"]) >= {"prefill of 24", "decode, batch 2"}
    for by_side in model["tokens_per_s"].values():
        assert {"twinpool, invariant", "twinpool, fast", "transformers generate"} <= set(by_side)
        assert by_side["predicted limit"] > 0
    assert model["differing_in_a_batch"] == 0


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


def test_what_a_gpu_could_reach_follows_from_bytes_or_from_operations() -> None:
    ceilings = Ceilings(bytes_per_s=1000.0, flops_per_s=4000.0)
    weights, parameters, token_bytes = 200, 100, 10
    alone = ceilings.predicted(SpeedScenario(1, 30, 5), weights, parameters, token_bytes)
    assert alone == pytest.approx(1 / ((200 + 30 * 10) / 1000)), "one sequence waits for the weights and its state"
    many = ceilings.predicted(SpeedScenario(100, 30, 5), weights, parameters, 0)
    assert many == pytest.approx(4000 / 200), "many wait for the products"
    assert ceilings.predicted(SpeedScenario(1, 30, 1), weights, parameters, token_bytes) == pytest.approx(20.0)
