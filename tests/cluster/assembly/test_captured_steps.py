"""Step graphs are captured where a decode worker can have them; elsewhere it says why not."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.worker_pair import counts_for
from twinpool.cluster.assembly.build_worker import build_worker, capture_steps
from twinpool.cluster.serve.preflight import on_device
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName
from twinpool.engine.runner.graphs.step_graphs import Capture, DraftedSteps
from twinpool.engine.runner.model_runner import ModelRunner


def config(graphs: str, decode: dict[str, Any] | None = None, **engine: Any) -> Config:
    sections = {"engine": {"graphs": graphs, **engine}, "decode": {"max_batch_tokens": 24, **(decode or {})}}
    return config_from_dict(sections)


class Engine:
    """An engine on a GPU, or not, that captures, or not."""

    def __init__(self, device: str = "cuda:1", error: Exception | None = None) -> None:
        self.device = SimpleNamespace(torch_device=torch.device(device))
        self.captured: list[tuple[Any, ...]] = []
        self._error = error

    def capture(self, capture: Any, *, rows: int, context: int, within_s: float, drafted: DraftedSteps | None) -> None:
        if self._error is not None:
            raise self._error
        assert within_s < config("auto").cluster.start_timeout_s / 2, "the rest is for loading"
        self.captured.append((capture, rows, context, drafted))


def captured(engine: Engine, graphs: str, **decode: Any) -> list[tuple[Any, ...]]:
    def make(device: torch.device) -> Capture:
        return cast(Capture, f"of {device}")

    capture_steps(cast(ModelRunner, engine), config(graphs, decode), 4096, make)
    return engine.captured


@pytest.mark.parametrize("graphs", ["auto", "on"])
def test_a_worker_on_a_gpu_captures_steps_as_large_as_it_may_launch(graphs: str) -> None:
    assert captured(Engine(), graphs, draft_tokens=5, draft_requests=3) == [("of cuda:1", 24, 4096, DraftedSteps(3, 5))]
    assert captured(Engine(), graphs, speculation="off") == [("of cuda:1", 24, 4096, None)]


def test_nothing_is_captured_where_nobody_wants_it_or_on_a_cpu() -> None:
    assert captured(Engine(), "off") == []
    assert captured(Engine("cpu"), "auto") == []


@pytest.mark.parametrize("error", [ConfigError("of two ranks"), RuntimeError("of two ranks")])
def test_what_cannot_be_captured_is_logged_or_refused(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert captured(Engine(error=error), "auto") == []
    assert "of two ranks" in caplog.text
    with pytest.raises(ConfigError, match=r"of two ranks.*engine\.graphs=auto"):
        captured(Engine(error=error), "on")


def test_asking_for_graphs_on_a_cpu_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"needs a GPU.*engine\.graphs=auto"):
        on_device(config("on"), cards=False)
    with pytest.raises(ConfigError, match="needs a GPU"):
        on_device(config("on", device="cpu"), cards=True)
    assert on_device(config("on"), cards=True).engine.device == "cuda"
    assert on_device(config("auto"), cards=False).engine.device == "cpu"


@pytest.mark.parametrize(("role", "asked"), [(Role.DECODE, True), (Role.COLOCATED, True), (Role.PREFILL, False)])
def test_workers_that_decode_ask_for_them(role: Role, asked: bool, tmp_path: Path) -> None:
    """On this CPU such a worker doesn't start, so it has asked."""
    folder = make_checkpoint(tmp_path / "m", "qwen3", layers=1)
    wanted = config_from_dict({"engine": {"threads": 1, "graphs": "on"}, "transfer": {"plane": "local"}})

    def built() -> None:
        build_worker(
            role, WorkerName(f"{role}-0"), Incarnation(1), read_model_spec(folder), wanted, host="127.0.0.1",
            clock=SystemClock(), counts=counts_for(folder, wanted, role, 256),
        ).close()  # fmt: skip

    if asked:
        with pytest.raises(ConfigError, match="needs a GPU"):
            built()
    else:
        built()
