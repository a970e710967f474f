"""docs/adding-a-model.md against the code: what it quotes is there, and the model that it spells out computes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import harness
from tests.support.checkpoints import make_checkpoint
from tests.support.served_cluster import ROOT
from twinpool.cache.memory.kv_cache_spec import PoolSpec
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.checkpoint.rope_spec import read_rope
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.engine.layers.decoder import Layer, LayerPlace
from twinpool.engine.layers.mixers.head_attention import HeadAttention, kv_buffers
from twinpool.engine.layers.mlp import GatedMlp
from twinpool.engine.layers.rope import RopeTable
from twinpool.engine.models import registry
from twinpool.engine.models.model_base import FULL_POOL, Model, StateOptions
from twinpool.engine.models.qwen import Qwen2
from twinpool.engine.tensors.weight_loader import Weights

PAGE = (ROOT / "docs" / "adding-a-model.md").read_text()
NAMES = {
    name.__name__: name
    for name in (
        PoolSpec, ModelSpec, read_rope, Layer, HeadAttention, kv_buffers, GatedMlp, Model, StateOptions,
        RopeTable, LayerPlace, Weights,
    )
} | {"FULL_POOL": FULL_POOL}  # fmt: skip


def blocks(kind: str) -> list[tuple[str, str]]:
    """What stands behind ``python`` in the fence, and the code."""
    found = re.findall(r"^```python ([^\n]+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [(head, code) for head, code in found if head.startswith(kind)]


@pytest.mark.parametrize(("head", "code"), blocks("file="))
def test_what_the_page_quotes_stands_in_the_file(head: str, code: str) -> None:
    assert code in (ROOT / head.removeprefix("file=")).read_text()


def test_every_piece_of_code_is_checked() -> None:
    assert len(blocks("file=")) + len(blocks("run")) == PAGE.count("```python") == 4


def test_the_example_is_one_short_class_and_one_entry() -> None:
    assert len(inspect.getsource(Qwen2).splitlines()) < 20
    entries = [name for name, entry in registry.ARCHITECTURES.items() if entry == "qwen.Qwen2"]
    assert sum(name.endswith("ForCausalLM") for name in entries) == 1, "others are models that see, whose text it is"


def test_names_that_the_page_mentions_exist() -> None:
    sources = (
        "engine/tensors/weight_loader.py",
        "engine/layers/decoder.py",
        "contracts/checkpoint/json_fields.py",
    )
    code = "".join((ROOT / path).read_text() for path in sources)
    for path in re.findall(r"`((?:engine|tests)/[\w/]+(?:\.py)?)/?`", PAGE):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(?:weights|ctx|config)\.(\w+)", PAGE):
        assert re.search(rf"\b{name}\b", code), name


@pytest.mark.slow
def test_the_model_that_the_page_spells_out_gives_llamas_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    tokens = list(range(1, 60))
    want = harness.Bench(folder).forced(tokens, [20, 39])
    ((_, code),) = blocks("run")
    names: dict[str, Any] = dict(NAMES)
    exec(compile(code, "docs/adding-a-model.md", "exec", flags=annotations.compiler_flag), names)

    def read(folder: Path, context: int, draft_model: str, config: EngineConfig) -> Model:
        model: Model = names["Plain"](read_model_spec(folder, context))
        model.build(Weights.dry(model.spec))
        return model

    monkeypatch.setattr(harness, "read_model", read)
    assert torch.equal(harness.Bench(folder).forced(tokens, [20, 39]), want)
