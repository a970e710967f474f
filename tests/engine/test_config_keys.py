"""Every key of `config.json` by which transformers computes is read here, is without effect, or is refused.

What transformers reads is taken from its own source: a key that a new version reads and that nobody here knows fails.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.checkpoints import Oracle, copy_checkpoint
from tests.support.model_families import EVERY, FAMILIES
from tests.support.worker_pair import pair
from twinpool.contracts.errors import CheckpointError
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.models.config_keys import CACHE, GENERAL, KEYS
from twinpool.engine.models.registry import ARCHITECTURES, read_model

_CONFIGS = ("config", "text_config")
"""What model files call the configuration that they read."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name) / "model") for name, make in EVERY.items()}


def attributes(source: str) -> set[str]:
    """Names that `source` asks a configuration for: ``config.x``, ``self.config.x``, ``getattr(config, "x")``."""

    def of_config(node: ast.AST) -> bool:
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return name in _CONFIGS

    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and of_config(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            target, name = node.args[:2]
            if of_config(target) and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return found


def text_config(cls: Any) -> Any:
    """The configuration of the text, of an architecture that may have more than that."""
    config = cls.config_class()
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def transformers_reads(architecture: str) -> set[str]:
    """The keys of its configuration that transformers' model file of an architecture reads."""
    cls = getattr(transformers, architecture)
    config = text_config(cls)
    keys = set(config.to_dict()) | set(type(config).attribute_map) | set(inspect.signature(type(config)).parameters)
    return attributes(inspect.getsource(importlib.import_module(cls.__module__))) & keys


def known(folder: Path) -> set[str]:
    """What is known of a folder's architecture here: all that reading it asks for, and the tables."""
    model = read_model(folder)
    keys = KEYS[type(model).__name__]
    return set(model.config.read) | GENERAL | keys.without_effect.keys() | keys.only.keys()


@pytest.mark.parametrize("family", EVERY)
def test_every_key_that_transformers_computes_by_is_known_here(folders: dict[str, Path], family: str) -> None:
    folder = folders[family]
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    unknown = transformers_reads(architecture) - known(folder)
    assert not unknown, (
        f"transformers' {architecture} reads {sorted(unknown)}: read them, or say in models/keys.py why not"
    )


def test_the_other_names_of_an_architecture_read_the_same_text(folders: dict[str, Path]) -> None:
    """Those that no family is made of: models of more than text, and mixtures with another configuration."""
    made = {"Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"}
    made |= {"Mistral3ForConditionalGeneration", "Qwen2VLForConditionalGeneration"}  # By test_text_beside_images.py.
    made |= {
        "KimiK25ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
    made |= {"Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"}
    others = made | {"Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"}
    others |= {"AquilaForCausalLM", "InternLM3ForCausalLM"}  # Which transformers doesn't have: by test_dense_families.
    of_families = {json.loads((folder / "config.json").read_text())["architectures"][0] for folder in folders.values()}
    assert set(ARCHITECTURES) == of_families | others, "a new architecture needs a family here"
    assert set(KEYS) == {entry.partition(".")[2] for entry in ARCHITECTURES.values()}


def test_a_key_that_transformers_begins_to_read_would_be_noticed(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    added = "\ndef f(self):\n    return self.config.head_dim * getattr(config, 'query_gain', 1.0) + config.brand_new\n"
    monkeypatch.setattr(inspect, "getsource", lambda thing: source(thing) + (added if thing is module else ""))
    monkeypatch.setattr(transformers.LlamaConfig, "attribute_map", {"query_gain": "x", "brand_new": "y"})
    assert transformers_reads("LlamaForCausalLM") - known(folders["llama"]) == {"query_gain", "brand_new"}


@pytest.mark.parametrize("family", EVERY)
def test_a_folder_as_transformers_saves_it_is_warned_of_nothing(
    folders: dict[str, Path], family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_model(copy_checkpoint(folders[family], tmp_path / "again"))
    assert not caplog.records


def changed(value: object) -> Iterator[object]:
    """Other values of the same type."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield value / 3 + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_said_to_be_without_effect_changes_nothing_in_transformers(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """All such numbers of the architecture's own at once, as transformers itself computes with them."""
    values = json.loads((folders[family] / "config.json").read_text())
    model = read_model(folders[family])
    structural = {"num_experts", "num_local_experts", "moe_intermediate_size", "head_dim", "qk_head_dim"}
    own = KEYS[type(model).__name__].without_effect.keys() - structural
    common = {
        "initializer_range",
        "attention_dropout",
        "router_aux_loss_coef",
        "pretraining_tp",
        "rescale_prenorm_residual",
    }
    changes = {key: new for key in own | common if key in values for new in changed(values[key])}
    tokens = torch.randint(1, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    want = Oracle(folders[family]).logits(tokens)
    assert Oracle(copy_checkpoint(folders[family], tmp_path / "changed", **changes)).logits(tokens).equal(want), changes


GRANITE = {
    "attention_multiplier": 0.01,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.2,
    "embedding_multiplier": 12.0,
}


def test_keys_that_only_other_programs_know_are_named_in_one_warning(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_checkpoint(folders["llama"], tmp_path / "granite", **GRANITE, use_cache=True)
    with caplog.at_level(logging.WARNING):
        read_model(folder)
        read_model(folder)
    (record,) = caplog.records
    said = record.getMessage()
    assert str(folder / "config.json") in said
    for key, value in GRANITE.items():
        assert f"{key}={value}" in said
    assert "use_cache" not in said


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "gain": 2.0, "off": None}},
         ["rope_parameters.gain=2.0"]),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}},
         ["rope_scaling.beta_fast=32"]),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "gain": 3},
                                        "sliding_attention": {"rope_type": "default", "gain": 4}}},
         ["rope_parameters.full_attention.gain=3", "rope_parameters.sliding_attention.gain=4"]),
    ],
)  # fmt: skip
def test_keys_of_a_rope_that_its_kind_does_not_go_by_are_named_with_their_table(
    folders: dict[str, Path],
    family: str,
    changes: dict[str, Any],
    named: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read_model(copy_checkpoint(folders[family], tmp_path / "turned", **changes))
    assert [record.getMessage().rpartition("wrong): ")[2].split(", ") for record in caplog.records] == [named]


def test_each_checkpoint_is_warned_of_once_and_again_when_it_has_other_keys(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of the same unknown key, and one that is replaced by another of the same name."""
    said = list[tuple[str, str]]()

    def read(name: str, **keys: float) -> None:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        folder = copy_checkpoint(folders["llama"], tmp_path / name, **keys)
        for _ in range(2):
            read_model(folder)
        for record in caplog.records:
            text = record.getMessage()
            said.append((Path(text.partition(": ")[0]).parent.name, text.rpartition("wrong): ")[2]))
        caplog.clear()

    read("one", gain=2.0)
    read("other", gain=2.0)
    read("one", loss=3.0)
    assert said == [("one", "gain=2.0"), ("other", "gain=2.0"), ("one", "loss=3.0")]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ("qwen3_moe", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "full_attention for"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention for all"),
        ("mistral", {"sliding_window": 0}, "sliding_window must be a positive whole number"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by kind of layer"),
        ("llama", {"sliding_window": 128}, "sliding_window 128"),
        ("llama", {"is_causal": False}, "is_causal false: a model that sees what follows"),
        ("llama", {"attention_chunk_size": 64}, "attention_chunk_size 64"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention layers"),
        ("llama", {"kv_sharing_modes": [None, "reuse"]}, "kv_sharing_modes"),
        ("falcon_h1", {"sliding_window": 128}, "sliding_window 128"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("glm5", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
    ],
)
def test_what_would_change_the_arithmetic_and_is_not_supported_is_refused(
    folders: dict[str, Path], family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_model(copy_checkpoint(folders[family], tmp_path / "other", **changes))


def test_all_that_transformers_cache_goes_by_is_looked_at(folders: dict[str, Path]) -> None:
    source = inspect.getsource(transformers.cache_utils.get_layer_types_and_kwargs)
    reads = attributes(re.sub(r"\blayer_config\b", "config", source)) - {"per_layer_config"}
    assert "sliding_window" in reads
    assert reads == set(CACHE)


def test_a_key_of_the_cache_that_says_that_all_is_kept_changes_nothing(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = ["full_attention"] * json.loads((folders["llama"] / "config.json").read_text())["num_hidden_layers"]
    read_model(copy_checkpoint(folders["llama"], tmp_path / "same", sliding_window=None, layer_types=kinds))
    assert not caplog.records


def test_transformers_answers_change_with_a_window_that_its_llama_does_not_read(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Why such a folder is refused: what transformers computes in one pass isn't what it then generates."""
    windowed = copy_checkpoint(folders["llama"], tmp_path / "windowed", sliding_window=16)
    prompt = torch.randint(1, 300, (1, 60), generator=torch.Generator().manual_seed(1))

    def generated(folder: Path) -> list[int]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        out = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return out[0, 60:].tolist()  # type: ignore[no-any-return]

    assert generated(windowed) != generated(folders["llama"])


@pytest.mark.slow
def test_nemotrons_least_time_step_is_the_one_that_transformers_takes(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_checkpoint(folders["nemotron_h"], tmp_path / "steps", time_step_min=1.5)
    prompt = torch.randint(1, 300, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    oracle = Oracle(folder)
    assert not oracle.logits(prompt).equal(Oracle(folders["nemotron_h"]).logits(prompt)), "it has an effect"
    with pair(folder, tokens=1024) as both:
        (answer,) = both.run(both.submit(prompt, SamplingParams(max_tokens=6, temperature=0.0)))
    # In one pass: its own step of one token leaves the limit out, so what it generates depends on where a chunk ends.
    logits = oracle.logits([*prompt, *answer.list[:-1]])[len(prompt) - 1 :]
    assert answer.list == logits.argmax(-1).tolist()


def test_the_table_names_no_key_that_is_read(folders: dict[str, Path]) -> None:
    """What is read has an effect: it is in no list of keys without one, nor refused beside that."""
    for family, folder in folders.items():
        model = read_model(folder)
        keys = KEYS[type(model).__name__]
        conditional = {
            k for k, why in keys.without_effect.items() if why.startswith(("only with", "read as", "as num"))
        }
        again = set(model.config.read) & (set(keys.without_effect) - conditional)
        assert not again, f"{family}: {sorted(again)}"
