"""Contexts that rope scaling gives, against transformers: yarn, dynamic scaling for one length, ropes with sections for
images; and what `engine.context` may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Bench, MakeOracle
from tests.engine.judged import expect_the_oracles, prompts
from tests.support.checkpoints import Oracle, copy_checkpoint
from tests.support.model_families import FAMILIES, folder_maker
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.models.registry import read_model

TRAINED = 128
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
MODELS: dict[str, dict[str, Any]] = {
    "yarn": {"name": "qwen2", "max_position_embeddings": TRAINED, "rope_parameters": YARN},
    "yarn_extended": {"name": "deepseek_v3", "max_position_embeddings": 4 * TRAINED, "rope_parameters": YARN},
    "yarn_sections": {"name": "qwen3_5", "max_position_embeddings": TRAINED, "rope_parameters": YARN | SECTIONS},
    "dynamic": {"name": "qwen2", "max_position_embeddings": TRAINED, "rope_parameters": DYNAMIC},
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return folder_maker(tmp_path_factory.mktemp("contexts"), MODELS)


def written(folder: Path, **keys: Any) -> Path:
    """A checkpoint's folder with `config.json` alone changed, in place; a value of None removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yarn", "yarn_extended", "yarn_sections"])
def test_beyond_the_positions_of_training_yarn_gives_the_oracles_tokens_and_logits(
    folder_of: Callable[[str], Path], oracle_of: MakeOracle, name: str
) -> None:
    folder = folder_of(name)
    assert read_model_spec(folder).context == 4 * TRAINED
    expect_the_oracles(folder, oracle_of(folder), (TRAINED - 5, TRAINED, TRAINED + 1, 3 * TRAINED, 4 * TRAINED - 12))


OLD = {"rope_parameters": None, "rope_theta": 10000.0}


@pytest.mark.parametrize(("keys", "context"), [
    ({"max_position_embeddings": 40960}, 40960),
    (OLD | {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": TRAINED}}, 512),
    (OLD | {"rope_scaling": {"type": "yarn", "factor": 2.5}}, 320),
    ({"original_max_position_embeddings": 64}, 256),
    ({"original_max_position_embeddings": 16}, TRAINED),
    (OLD | {"rope_scaling": {"type": "linear", "factor": 4.0}}, TRAINED),
    (OLD | {"rope_scaling": {
        "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }}, TRAINED),
    (OLD | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, TRAINED),
    (OLD | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}, TRAINED),
    (OLD | {"rope_scaling": {"type": "yarn", "mrope_section": [4, 2, 2], "factor": 3.0}}, 384),
])  # fmt: skip
def test_the_context_is_the_larger_of_what_is_written_and_what_yarn_gives(
    folder_of: Callable[[str], Path], tmp_path: Path, keys: dict[str, Any], context: int
) -> None:
    folder = copy_checkpoint(folder_of("yarn"), tmp_path / "changed", **keys)
    assert read_model(folder).spec.context == context


@pytest.mark.parametrize("scaling", [
    {"type": "yarn", "factor": 1e300}, {"type": "yarn", "factor": float("nan")}, {"type": "yarn", "factor": True},
    {"type": "yarn", "factor": -1}, {"type": "yarn"}, {"type": "dynamic", "factor": "4"},
    {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": "many"}, {"type": "dynamic", "factor": 1e300},
    {"type": "longrope", "factor": 2.0}, {"type": "new"},
])  # fmt: skip
def test_a_scaling_with_numbers_that_are_none_is_refused_in_one_line(
    folder_of: Callable[[str], Path], tmp_path: Path, scaling: dict[str, Any]
) -> None:
    folder = copy_checkpoint(folder_of("yarn"), tmp_path / "bad", **OLD, rope_scaling=scaling)
    with pytest.raises(CheckpointError, match="rope scaling") as error:
        read_model(folder)
    assert "\n" not in str(error.value)


# ------------------------------------------------------------ sections for images


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
def test_sections_for_images_change_nothing_in_text(oracle_of: MakeOracle, tmp_path: Path, interleaved: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **SECTIONS, "mrope_interleaved": interleaved}
    folder = FAMILIES["qwen3_5"](tmp_path / "model", rope_parameters=rope, published=True)
    expect_the_oracles(folder, oracle_of(folder), (17, 200))


def test_mrope_is_another_name_of_plain_rope(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    (tokens,) = prompts(3, 60)
    plain = copy_checkpoint(folder_of("yarn"), tmp_path / "plain", **OLD)
    named = copy_checkpoint(plain, tmp_path / "named", rope_scaling={"type": "mrope", "mrope_section": [4, 2, 2]})
    want, got = (Bench(folder, tokens=128).forced(tokens, [60]) for folder in (plain, named))
    assert torch.equal(got, want)


# ------------------------------------------------------------ dynamic scaling

LONG = 300


def scaled(folder: Path, to: Path, length: int) -> Path:
    """The checkpoint with the base that dynamic NTK scaling gives sequences of `length`, as plain rope."""
    values = json.loads((folder / "config.json").read_text())
    dim, factor = values["hidden_size"] // values["num_attention_heads"], DYNAMIC["factor"]
    assert isinstance(factor, float)
    theta = 10000.0 * (factor * length / TRAINED - (factor - 1)) ** (dim / (dim - 2))
    rope = {"rope_type": "default", "rope_theta": theta}
    return copy_checkpoint(folder, to, rope_parameters=rope, max_position_embeddings=4 * TRAINED)


@pytest.mark.slow
def test_up_to_its_positions_of_training_dynamic_scaling_gives_the_oracles_tokens_and_logits(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("dynamic")
    spec = read_model_spec(folder)
    assert spec.context == TRAINED
    (warning,) = spec.warnings
    assert f"engine.context above that, up to {4 * TRAINED}," in warning
    asked, bench, oracle = prompts(1, 5, 64, TRAINED - 10), Bench(folder, tokens=1024), Oracle(folder)
    for prompt, got in zip(asked, bench.generate_many(asked, 10, chunk=48), strict=True):
        assert oracle.generate(prompt, 10) == got
    (tokens,) = prompts(2, TRAINED)
    noise = Oracle(scaled(folder, tmp_path / "plain", TRAINED)).difference
    assert (bench.forced(tokens, [50, 1, TRAINED - 51]) - oracle.logits(tokens)).abs().max() <= 4 * noise


@pytest.mark.slow
def test_with_a_longer_context_all_are_rotated_as_transformers_rotates_one_of_that_length(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = folder_of("dynamic")
    plain = Oracle(scaled(folder, tmp_path / "plain", LONG))
    expect_the_oracles(folder, plain, (5, TRAINED, 2 * TRAINED, LONG - 12), context=LONG)
    (tokens,) = prompts(4, LONG)
    bench = Bench(folder, tokens=2048, context=LONG)
    got, itself = bench.forced(tokens, [LONG]), Oracle(folder)
    assert (got - itself.logits(tokens)).abs().max() <= 4 * plain.difference, "transformers, in one pass"
    assert torch.equal(bench.forced(tokens, [100, 1, LONG - 101]), got), "whatever the chunks"
    # Why it isn't followed further: there a token's keys depend on how far the sequence was when it was computed.
    apart = Oracle(folder).chunked_logits(tokens, [200, *[1] * (LONG - 200)]) - itself.logits(tokens)
    assert apart.abs().max() > 100 * plain.difference


def test_state_for_another_length_is_of_another_model(folder_of: Callable[[str], Path]) -> None:
    def prints(name: str) -> list[str]:
        return [read_model_spec(folder_of(name), context).fingerprint for context in (0, 100, TRAINED, 300, 301)]

    assert len(set(prints("dynamic"))) == 3, "up to the positions of training there is one rotation"
    assert len(set(prints("yarn"))) == 1


# ------------------------------------------------------------ the setting


def spec_of(folder: Path, context: int) -> ModelSpec:
    return read_model(folder, context).spec


def test_a_context_may_be_any_that_the_model_has(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    written_before_scaling = copy_checkpoint(folder_of("yarn"), tmp_path / "linear", rope_parameters=linear)
    for folder in (*map(folder_of, ("yarn", "dynamic", "yarn_extended")), written_before_scaling):
        for context in (2, 100, TRAINED, 4 * TRAINED):
            assert spec_of(folder, context).context == context
        with pytest.raises(ConfigError):
            spec_of(folder, 4 * TRAINED + 1)


@pytest.mark.parametrize(("keys", "said"), [
    ({}, "more than the 512 tokens of .*config.json, which has rope scaling 'yarn'; .*\"factor\":4.1,"
         '"original_max_position_embeddings":128}'),
    (OLD, "more than the 128 tokens of .*config.json, which has no rope scaling; .*needs it to say, for instance, "
          '"rope_scaling":{"rope_type":"yarn","factor":4.1,"original_max_position_embeddings":128}'),
])  # fmt: skip
def test_a_longer_context_is_refused_and_what_would_give_it_is_said(
    folder_of: Callable[[str], Path], tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    folder = copy_checkpoint(folder_of("yarn"), tmp_path / "model", **keys)
    with pytest.raises(ConfigError, match=f"engine.context=513 is {said}") as error:
        read_model_spec(folder, 513)
    advised = json.loads("{" + str(error.value).partition("for instance, ")[2] + "}")
    assert read_model_spec(written(folder, **OLD, **advised), 513).context == 513, "the advice works"


def test_a_context_of_one_token_is_refused(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.context=1 leaves no room"):
        read_model_spec(folder_of("yarn"), 1)


def test_keys_of_a_scaling_that_nobody_goes_by_are_named_in_the_warning(
    folder_of: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rope = YARN | {"finetuned": True, "llama_4_scaling_beta": 0.1}
    read_model(copy_checkpoint(folder_of("yarn"), tmp_path / "model", rope_parameters=rope))
    (record,) = caplog.records
    assert "rope_parameters.finetuned=True, rope_parameters.llama_4_scaling_beta=0.1" in record.getMessage()
