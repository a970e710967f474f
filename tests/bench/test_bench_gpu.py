"""The bench of GPUs, rehearsed on a CPU: its sections run, check what they move, and cost each other nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.common.bench_report import write_figures
from bench.engine.engine_speed import SpeedScenario
from bench.gpu import __main__ as gpu
from bench.gpu import gpu_copies, gpu_engine, gpu_handover
from bench.gpu.goodput import Goodput, Load, Slo
from bench.gpu.gpu_limits import Ceilings, ModelCost
from bench.serving.transfer_ways import Shape
from tests.support import gpu_families
from tests.support.family_scenes import Family
from tests.support.process_cluster import Served
from tests.support.process_sockets import NothingThere, ProcessPoller, ProcessSocket, ProcessSocketError
from tests.support.served_cluster import until
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.contracts.errors import ConfigError


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


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All sections but the kernels, which tests/kernels interprets one by one."""
    return rehearse(
        tmp_path_factory.mktemp("rehearsal") / "gpu.json", [name for name in gpu.MODULES if name != "kernels"]
    )


def rehearse(out: Path, sections: Sequence[str]) -> dict[str, Any]:
    """Returns what a rehearsal of the sections wrote; each may take as long as the machine makes it."""
    assert gpu.main(["--rehearse", "--minutes", "60", "--out", str(out), "--only", *sections]) == 0, out.read_text()
    written: dict[str, Any] = json.loads(out.read_text())
    return written


@pytest.mark.slow
def test_a_rehearsal_writes_every_section_and_says_that_it_was_one(rehearsed: dict[str, Any]) -> None:
    assert rehearsed["rehearsal"]
    sections = set(gpu.MODULES) - {"kernels"}
    assert {name: section["ok"] for name, section in rehearsed["sections"].items()} == dict.fromkeys(sections, True)
    figures = {name: section["figures"] for name, section in rehearsed["sections"].items()}
    planes, missing = gpu_handover.add_nixl(["staged", "cuda_ipc, rehearsed"])
    assert set(figures["handover"]) == {"one block", *planes}
    assert ("nixl" in planes) != bool(missing)
    for rates in figures["copies"]["gb_per_s"].values():
        assert {"one block up", "pieces down, digested", "layers up"} <= set(rates)
    assert all(set(kept) == {"copy", "products"} for ways in figures["copies"]["beside_products"].values()
               for kept in ways.values())  # fmt: skip


@pytest.mark.slow
def test_kernels_are_rehearsed_by_the_interpreter(tmp_path: Path) -> None:
    figures = rehearse(tmp_path / "gpu.json", ["kernels"])["sections"]["kernels"]["figures"]
    assert figures["checks"]
    assert all(check["ok"] for check in figures["checks"])


class GraphedSide:
    """A side of a GPU: an engine with graphs, that says whether it had them as it ran."""

    name = "ours"

    def __init__(self, error: Exception | None = None) -> None:
        self.engine = SimpleNamespace(graphs=range(9), capture=self._capture)
        self._error = error

    def _capture(self, capture: object, **most: float) -> None:
        assert most["rows"] == 4
        assert self._error is not None
        raise self._error

    def run(self, prompts: object, count: int) -> str:
        return "replayed" if self.engine.graphs is not None else "kernel by kernel"


def test_a_side_without_its_graphs_has_them_back_afterwards() -> None:
    side: Any = GraphedSide()
    plain = gpu_engine.KernelByKernel(side)
    without: Any = plain.run([], 1)
    assert (without, side.run([], 1)) == ("kernel by kernel", "replayed")
    assert plain.name == "ours, kernel by kernel"


def test_steps_that_cannot_be_captured_cost_nothing_but_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(
        device=SimpleNamespace(torch_device=torch.device("cuda")), args=SimpleNamespace(batches=[1, 4])
    )
    monkeypatch.setattr(gpu_engine, "CudaCapture", lambda device: None)
    for error in (ConfigError("other bits"), RuntimeError("other bits")):
        side: Any = GraphedSide(error)
        assert gpu_engine.capture_steps(run, side, 64) == f"FAILED: {type(error).__name__}: other bits"


@pytest.mark.slow
def test_families_are_rehearsed_scene_by_scene(rehearsed: dict[str, Any]) -> None:
    scenes = rehearsed["sections"]["families"]["figures"]["scenes"]
    assert {scene["ended"] for scene in scenes} == {"passed"}
    assert len(scenes) == 6


@pytest.mark.slow
def test_the_engine_is_rehearsed_beside_transformers(rehearsed: dict[str, Any]) -> None:
    model = rehearsed["sections"]["engine"]["figures"]["models"]["4m"]
    assert set(model["graphs"].values()) == {"none: a CPU has nothing to capture"}
    assert set(model["tokens_per_s"]) >= {"prefill of 24", "decode, batch 2"}
    for by_side in model["tokens_per_s"].values():
        assert {"twinpool, invariant", "twinpool, fast", "transformers generate"} <= set(by_side)
        assert by_side["predicted limit"] > 0
    assert model["differing_in_a_batch"] == 0
    assert model["left_out"] == {}


@pytest.mark.slow
def test_serving_is_rehearsed_and_a_colocated_worker_hands_nothing_over(rehearsed: dict[str, Any]) -> None:
    figures = rehearsed["sections"]["serving"]["figures"]
    assert figures["wrong"] == []
    for length in figures["handover"]["two pools"].values():
        assert length["transfer_bytes"] > 0
        assert length["exposed_ms"] > 0
    assert all(each["transfer_bytes"] == 0 for each in figures["handover"]["colocated"].values())
    for side in ("two pools", "colocated"):
        (rate,) = figures["goodput"][side]
        assert rate["requests"] > 0
        assert rate["failed"] == []
        assert (rate["transfer_bytes"] > 0) == (side == "two pools")
    assert "transformers continuous" in figures["goodput"]


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
    once = ["--rehearse", "--at-once", "1", "--out", str(out)]
    assert gpu.main([*once, "--only", "kernels", "copies"]) == 1
    assert gpu.main([*once, "--only", "kernels", "copies", "--resume"]) == 0
    assert ran == ["kernels", "copies", "copies"]
    sections = json.loads(out.read_text())["sections"]
    assert {name: section["figures"] for name, section in sections.items()} == {
        "kernels": {"of": 1},
        "copies": {"of": 3},
    }
    out.write_text(out.read_text().replace('"rehearsal": true', '"rehearsal": false'))
    with pytest.raises(SystemExit, match="not of a rehearsal"):
        gpu.main(["--rehearse", "--out", str(out), "--resume"])


def test_a_half_written_file_is_never_seen(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    write_figures(file, {"a": 1})
    with pytest.raises(TypeError):
        write_figures(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}
    write_figures(None, {"a": 1})


def test_a_hand_over_goes_on_without_nixl_where_it_is_not_there_or_takes_no_memory_of_the_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ConfigError("plane nixl needs NIXL")

    def way(name: str, *rest: object) -> SimpleNamespace:
        if name == broken:
            raise RuntimeError("UCX has no CUDA")
        return SimpleNamespace(name=name, close=lambda: None, round=lambda chunks, into: None)

    broken = "nixl"
    monkeypatch.setattr(gpu_handover, "load_nixl", missing)
    assert gpu_handover.add_nixl(["staged"]) == (["staged"], "plane nixl needs NIXL")
    monkeypatch.setattr(gpu_handover, "Way", way)
    shape = Shape(1, 1, 16, 16, 32)
    assert set(gpu_handover.measure(shape, ["staged", "nixl"], "cpu", 1, 1)) == {"one block", "staged"}
    assert "nixl: not run: RuntimeError: UCX has no CUDA" in capsys.readouterr().out
    broken = "staged"
    with pytest.raises(RuntimeError, match="UCX has no CUDA"):
        gpu_handover.measure(shape, ["staged", "nixl"], "cpu", 1, 1)


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_a_section_began_is_gone_with_it(
    tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its pipe would stay open, and the section's end be waited for for ever."""
    began = (
        "import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    said = "print(child.pid, flush=True)\nopen('begun', 'w').close()"
    (tmp_path / "begins.py").write_text(f"{began}\n{said}\ntime.sleep(600)\n")
    monkeypatch.setattr(gpu, "MODULES", {"begins": "begins"})
    monkeypatch.setattr(gpu, "ROOT", tmp_path)

    class Begun(subprocess.Popen[str]):
        """A process of which the time counts from when it has begun, however long a busy machine takes to start it."""

        def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[str, str]:
            until((tmp_path / "begun").exists, "it to begin")
            return super().communicate(input, timeout)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    env["PYTHONPATH"] = str(tmp_path)
    hanging = gpu.run_section("begins", [], 1, env)
    assert hanging.ended == "not done after 1 s"
    assert not Path(f"/proc/{int(hanging.output)}/fd/1").exists()


@pytest.mark.slow
def test_families_are_divided_among_processes_and_told_together(tmp_path: Path) -> None:
    out = tmp_path / "scenes.json"
    chosen = ["--families", "llama", "qwen2", "--scenes", "answers", "--processes", "2"]
    assert gpu_families.main(["--rehearse", *chosen, "--json", str(out)]) == 0
    scenes = json.loads(out.read_text())["scenes"]
    assert {(scene["family"], scene["ended"]) for scene in scenes} == {("llama", "passed"), ("qwen2", "passed")}


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu", lambda: None)
    assert gpu.main([]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_what_a_gpu_could_reach_follows_from_bytes_or_from_operations() -> None:
    ceilings = Ceilings(bytes_per_s=1000.0, flops_per_s=4000.0)
    cost = ModelCost(weights=200, itemsize=2, token_bytes=10)
    alone = ceilings.predicted(SpeedScenario(1, 30, 5), cost)
    assert alone == pytest.approx(1 / ((200 + 30 * 10) / 1000)), "one sequence waits for the weights and its state"
    many = ceilings.predicted(SpeedScenario(100, 30, 5), replace(cost, token_bytes=0))
    assert many == pytest.approx(4000 / 200), "many wait for the products"
    assert ceilings.predicted(SpeedScenario(1, 30, 1), cost) == pytest.approx(20.0)


def test_a_token_reads_the_experts_that_it_chose_and_a_large_batch_all_of_them() -> None:
    cost = ModelCost(weights=100, itemsize=2, token_bytes=0, experts=800, chosen=0.25)
    assert cost.bytes_read(1) == pytest.approx(100 + 200)
    assert cost.bytes_read(2) == pytest.approx(100 + 800 * (1 - 0.75**2))
    assert cost.bytes_read(1000) == pytest.approx(900)
    assert cost.flops == pytest.approx(2 * (100 + 200) / 2)


def test_sections_have_their_parts_of_the_time_and_what_one_leaves_is_the_others() -> None:
    asked = list[tuple[str, float]]()
    gpu.run_in_turn(lambda section, seconds: asked.append((section, seconds)), list(gpu.WEIGHTS), 540, 1)
    total = sum(gpu.WEIGHTS.values())
    assert [section for section, _ in asked] == list(gpu.WEIGHTS)
    assert asked[0][1] == pytest.approx(540 * gpu.WEIGHTS["kernels"] / total, rel=0.01)
    assert asked[-1][1] == pytest.approx(540, rel=0.01), "the others took none of theirs"
    assert total == 540


def test_what_is_kept_is_an_answer_within_both_limits_from_when_it_was_due() -> None:
    def served(*times: float, wanted: int = 3, failed: str = "") -> Served:
        return Served(0.0, wanted, dict.fromkeys(range(len(times)), 7), dict(enumerate(times)), 5, {}, failed)

    slo = Slo(1.0, 0.04)
    late, slow, cut = served(1.1, 1.12, 1.14), served(0.1, 0.3, 0.5), served(0.1, 0.11)
    good, wrong = served(0.9, 0.97, 0.971), served(0.1, 0.11, 0.12, failed="no memory")
    assert [slo.holds(one) for one in (good, late, slow, cut, wrong)] == [True, False, False, False, False]
    came = Goodput.of(3.0, [good, late, slow, cut, wrong], slo, 0.0)
    assert (came.requests, came.good, came.failed, came.transfer_bytes) == (5, 1, ("no memory",), 25)
    assert came.goodput_per_s == pytest.approx(1 / 1.14)
    assert served(0.5, 0.4, 0.6).times_s == [0.5, 0.5, 0.6], "a token is told after those before it"


def test_arrivals_are_the_same_for_the_same_seed_and_as_many_as_the_rate_says() -> None:
    load = Load(50.0, 20.0, (3, 9), 4)
    asks = load.asks(100)
    assert asks == load.asks(100) != replace(load, seed=2).asks(100)
    assert len(asks) == pytest.approx(1000, rel=0.2)
    assert all(3 <= len(prompt) <= 9 for _, prompt in asks)
    assert [at for at, _ in asks] == sorted(at for at, _ in asks)


_WITHOUT = """
import importlib.util, sys
MISSING = {missing}
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in MISSING else find(name, package)

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in MISSING:
            raise ModuleNotFoundError(f"{{name}} isn't on this machine")

sys.meta_path.insert(0, Missing())
import bench.gpu
assert bench.gpu.STANDS_IN
from bench.gpu import __main__, gpu_handover
from tests.support import gpu_families
for module in __main__.MODULES.values():
    importlib.import_module(module if module != "bench.kernels" else "bench.kernels.kernel_timings")
assert not MISSING & {{name.split(".")[0] for name, found in sys.modules.items() if getattr(found, "__spec__", None)}}
assert gpu_handover.main(["--rehearse"]) == __main__.NOT_RUN
scenes = ["answers through bounce buffers", "migration"]
sys.exit(gpu_families.main(["--rehearse", "--scenes", *scenes]))
"""


@pytest.mark.slow
def test_no_section_needs_what_a_machine_with_a_gpu_for_some_minutes_lacks(env: dict[str, str]) -> None:
    """Whole workers answer and migrate there as well: in this process, without sockets."""
    missing = {"ray", "zmq", "cryptography", "uvicorn", "httptools", "redis", "nixl", "openai"}
    ran = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(missing=missing)],
        cwd=gpu.ROOT, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 scenes passed, 0 failed, 1 not run" in ran.stdout


def test_queues_carry_messages_in_order_to_whom_they_are_for_and_wake_who_polls() -> None:
    router, poller = ProcessSocket("ROUTER"), ProcessPoller()
    port = router.bind_to_random_port("tcp://127.0.0.1")
    callers = [ProcessSocket("DEALER") for _ in range(2)]
    poller.register(router)
    assert poller.poll(0) == []
    for number, caller in enumerate(callers):
        caller.set("ROUTING_ID", b"%d" % number)
        caller.connect(f"tcp://127.0.0.1:{port}")
        caller.send(b"first")
        caller.send(b"second")
    assert poller.poll(0)
    assert [router.recv_multipart() for _ in range(4)] == [
        [name, said] for name in (b"0", b"1") for said in (b"first", b"second")
    ]
    assert poller.poll(0) == []
    router.send_multipart([b"1", b"answer"])
    assert callers[1].recv() == b"answer"
    with pytest.raises(NothingThere):
        callers[0].recv()
    router.close()
    callers[0].send(b"to nobody")
    with pytest.raises(ProcessSocketError, match="needs pyzmq"):
        ProcessSocket("PUSH")
    for caller in callers:
        caller.close()


def test_what_can_not_be_run_here_is_told_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(section: str, extra: object, deadline_s: float, env: object) -> gpu.SectionResult:
        return gpu.SectionResult(section, False, 1.0, "not run", "pyzmq isn't installed\n", None)

    monkeypatch.setattr(gpu, "run_section", run)
    out = tmp_path / "gpu.json"
    assert gpu.main(["--rehearse", "--only", "handover", "--out", str(out)]) == 0
    assert "handover was not run: pyzmq isn't installed" in capsys.readouterr().out
    assert not json.loads(out.read_text())["sections"]["handover"]["ok"]
