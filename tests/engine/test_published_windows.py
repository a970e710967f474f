"""Sliding windows of architectures whose published configurations seldom have one (Qwen, Mistral), against
transformers, with prompts far longer than the windows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, Qwen2Config, Qwen2MoeConfig, Qwen3Config

from tests.engine.harness import Bench, MakeOracle
from tests.engine.judged import expect_the_oracles, prompts
from tests.support.checkpoints import copy_checkpoint
from tests.support.family_checkpoint import COMMON, write_family
from tests.support.family_scenes import Family, expect_answers
from tests.support.family_window import WINDOW
from tests.support.model_families import FAMILIES, folder_maker
from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import spec_of_config
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model, unchecked_model
from twinpool.engine.models.sliding_window import qwen_windows

LENGTHS = (1, 2, 15, WINDOW - 1, WINDOW, WINDOW + 1, 129, 300)
SOME: dict[str, Any] = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 1,
}
"""The first layer attends to all positions, the others have a window."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"name": "qwen2", **SOME},
    "qwen3": {"name": "qwen3", **SOME},
    "qwen3_moe": {"name": "qwen3_moe", "use_sliding_window": True, "sliding_window": WINDOW},
    "mistral": {"name": "mistral"},
    "mistral_unlimited": {"name": "mistral", "sliding_window": None, "head_dim": None},
}


def make_qwen3(folder: Path, **changes: Any) -> Path:
    numbers = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return write_family(folder, Qwen3Config(**(COMMON | numbers | changes)), dtype="float32", seed=3)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folder_maker(tmp_path_factory.mktemp("windows"), MODELS, {**FAMILIES, "qwen3": make_qwen3})


def pools_of(folder: Path, context: int = 0) -> dict[str, tuple[PoolKind, int, int]]:
    """Kind, window and layers of each pool."""
    pools = read_model(folder, context).pools(StateOptions(torch.float32, 16))
    return {pool.name: (pool.kind, pool.window_tokens, pool.layers) for pool in pools}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    folder_of: Callable[[str], Path], oracle_of: MakeOracle, name: str
) -> None:
    folder = folder_of(name)
    expect_the_oracles(folder, oracle_of(folder), LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "mistral"])
def test_torchs_operations_give_the_oracles_as_well(
    folder_of: Callable[[str], Path], oracle_of: MakeOracle, name: str
) -> None:
    folder = folder_of(name)
    expect_the_oracles(folder, oracle_of(folder), (WINDOW + 1, 300), attention="torch")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_hang_on_neither_chunks_nor_pages_nor_company_where_windows_are_read_of_the_full_pool(
    folder_of: Callable[[str], Path], attention: str, dtype: str
) -> None:
    folder, rng = folder_of("mistral"), random.Random(3)
    tokens, other = prompts(3, 200, 70)
    want = Bench(folder, 16, 1024, attention=attention, dtype=dtype).forced(tokens, [200])
    for page_tokens, seed in ((1, 1), (64, 2)):
        bench = Bench(folder, page_tokens, 1024, seed, attention=attention, dtype=dtype)
        at, held, beside, parts = 0, bench.hold(200), bench.hold(70), []
        while at < 200:
            count = min(200 - at, rng.choice([1, 1, 2, 5, 31, 64]))
            rows = [bench.row(tokens[at : at + count], at, held), bench.row(other, 0, beside)]
            place = rng.randrange(2)
            parts.append(bench.logits(rows[::-1] if place else rows)[place])
            at += count
        assert torch.equal(torch.cat(parts), want), page_tokens


def test_windows_are_in_a_pool_of_their_own_but_where_all_layers_have_one(folder_of: Callable[[str], Path]) -> None:
    for name in ("qwen2", "qwen3"):
        assert pools_of(folder_of(name)) == {
            "full": (PoolKind.FULL, 0, 1),
            "window": (PoolKind.WINDOW, WINDOW, 2),
        }
    for name, layers in (("qwen3_moe", 3), ("mistral", 2), ("mistral_unlimited", 2)):
        assert pools_of(folder_of(name)) == {"full": (PoolKind.FULL, 0, layers)}


def test_what_is_before_a_window_counts_for_nothing_where_all_layers_have_one(
    folder_of: Callable[[str], Path],
) -> None:
    """Its keys are kept; two layers see twice the window."""
    (tokens,) = prompts(5, 200)
    others = [1 + token % 200 for token in tokens[: 199 - 2 * WINDOW]] + tokens[199 - 2 * WINDOW :]
    bench = Bench(folder_of("mistral"), tokens=1024)
    assert torch.equal(bench.forced(tokens, [200])[-1], bench.forced(others, [120, 80])[-1])
    unlimited = Bench(folder_of("mistral_unlimited"), tokens=1024)
    assert not torch.equal(unlimited.forced(tokens, [200])[-1], unlimited.forced(others, [120, 80])[-1])


@pytest.mark.slow
def test_a_window_is_handed_over_and_answers_are_the_oracles(folder_of: Callable[[str], Path]) -> None:
    expect_answers(Family("qwen2", folder_of("qwen2")), "local", (20, WINDOW + 2, 260), 8)


def test_layers_are_told_by_their_number_where_they_are_not_listed(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    (tokens,) = prompts(4, 2 * WINDOW)
    saved = folder_of("qwen2")
    assert "layer_types" in json.loads((saved / "config.json").read_text())
    published = copy_checkpoint(saved, tmp_path / "published", layer_types=None)
    want, got = (Bench(folder, tokens=512).forced(tokens, [len(tokens)]) for folder in (saved, published))
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config, Qwen2MoeConfig])
@pytest.mark.parametrize("first", range(5))
def test_layers_that_are_not_listed_are_those_that_transformers_lists_wherever_windows_begin(
    tmp_path: Path, kind: type[PreTrainedConfig], first: int
) -> None:
    for layers in range(1, 6):
        numbers = {"num_hidden_layers": layers, "sliding_window": 70, "use_sliding_window": True}
        theirs = kind(**numbers, max_window_layers=first)
        wanted = [70 if name == "sliding_attention" else 0 for name in theirs.layer_types]
        config = JsonFields(tmp_path, numbers | {"max_window_layers": first})
        assert qwen_windows(config, layers, alternating=kind is Qwen2MoeConfig) == wanted


@pytest.mark.parametrize("name", ["Cohere2", "Cwm", "Exaone4", "Gemma2", "GptOss", "Olmo3", "SmolLM3"])
def test_kinds_of_layers_that_are_not_listed_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    for layers in range(4, 10):
        theirs = getattr(transformers, f"{name}Config")(num_hidden_layers=layers)
        said = {key: value for key, value in theirs.to_dict().items() if key not in ("layer_types", "no_rope_layers")}
        folder = tmp_path / str(layers)
        folder.mkdir()
        file = folder / "config.json"
        file.write_text(json.dumps(said | {"architectures": [f"{name}ForCausalLM"]}))
        model: Any = unchecked_model(spec_of_config(file))
        kinds = model.names if hasattr(model, "names") else model.kinds
        assert kinds == theirs.layer_types
        assert getattr(model, "turned", None) == getattr(theirs, "no_rope_layers", None)


def test_a_number_without_its_flag_is_no_window(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    for name, layers in (("qwen2", 3), ("qwen3", 3), ("qwen3_moe", 3)):
        off = copy_checkpoint(folder_of(name), tmp_path / name, use_sliding_window=False, layer_types=None)
        assert pools_of(off) == {"full": (PoolKind.FULL, 0, layers)}
        (tokens,) = prompts(6, 2 * WINDOW)
        windowed, full = (Bench(folder, tokens=512).forced(tokens, [len(tokens)]) for folder in (folder_of(name), off))
        assert torch.equal(windowed[: WINDOW - 1], full[: WINDOW - 1])
        assert not torch.equal(windowed[-1], full[-1])


def test_no_number_at_all_is_the_window_that_transformers_has_then(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """And null is none: published folders of Mistral say so."""
    longer = {"max_position_embeddings": 8192}
    absent = copy_checkpoint(folder_of("mistral"), tmp_path / "absent", sliding_window=None, **longer)
    assert "sliding_window" not in json.loads((absent / "config.json").read_text())
    null = tmp_path / "null"
    copy_checkpoint(absent, null)
    values = json.loads((null / "config.json").read_text()) | {"sliding_window": None}
    (null / "config.json").write_text(json.dumps(values))
    found = [read_model(folder).windows for folder in (absent, null)]  # type: ignore[attr-defined]
    assert found == [[4096, 4096], [0, 0]]
    qwen = copy_checkpoint(folder_of("qwen2"), tmp_path / "qwen2", sliding_window=None, **longer)
    assert pools_of(qwen)["window"] == (PoolKind.WINDOW, 4096, 2)


def test_a_window_that_no_sequence_outgrows_is_none(folder_of: Callable[[str], Path]) -> None:
    assert pools_of(folder_of("qwen2"), context=WINDOW) == {"full": (PoolKind.FULL, 0, 3)}
    assert "window" in pools_of(folder_of("qwen2"), context=WINDOW + 1)


def test_kinds_that_contradict_the_flag_are_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_checkpoint(folder_of("qwen3"), tmp_path / "torn", use_sliding_window=False)
    with pytest.raises(CheckpointError, match="layer_types has sliding_attention layers, but use_sliding_window"):
        read_model(folder)
