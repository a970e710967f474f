"""Dense models beside Llama and Qwen against transformers: what each has of its own, and the layout of its weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import Bench, MakeOracle
from tests.engine.judged import expect_close_choices, expect_the_oracles, prompts
from tests.support.checkpoints import Oracle, compare, copy_checkpoint
from tests.support.family_checkpoint import WINDOW
from tests.support.family_dense import MAKERS
from tests.support.model_families import EVERY
from tests.support.quantised_checkpoints import quantise_folder, quantised_names
from twinpool.contracts.checkpoint.model_spec import read_model_spec, spec_of_config
from twinpool.contracts.errors import CheckpointError
from twinpool.engine.models.planned_headers import asked_of, planned_spec
from twinpool.engine.models.registry import read_model
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.weight_loader import Weights, is_product

LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 150)
TRAINED = 64


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint of a family; the same options give the same folder."""
    base = tmp_path_factory.mktemp("dense")

    @cache
    def make(name: str, options: tuple[tuple[str, Any], ...]) -> Path:
        return EVERY[name](base / f"{name}-{len(list(base.iterdir()))}", **dict(options))

    return lambda name, **options: make(name, tuple(sorted(options.items())))


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("name", MAKERS)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(
    made: Callable[..., Path], oracle_of: MakeOracle, name: str
) -> None:
    folder = made(name)
    expect_the_oracles(folder, oracle_of(folder), LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_bfloat16_chooses_within_the_oracles_own_difference(
    made: Callable[..., Path], oracle_of: MakeOracle, name: str
) -> None:
    folder = made(name, dtype="bfloat16")
    expect_close_choices(folder, oracle_of(folder), (100,))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_folder_in_the_old_spelling_gives_the_bits_of_a_saved_one(made: Callable[..., Path], name: str) -> None:
    (tokens,) = prompts(4, 2 * WINDOW)
    want, got = (
        Bench(folder, tokens=512).forced(tokens, [len(tokens)]) for folder in (made(name), made(name, published=True))
    )
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize(("context", "lengths"), [(0, (TRAINED + 1, 150)), (TRAINED, (1, 17, TRAINED - 10))])
def test_longrope_takes_the_factors_of_the_longest_sequence_that_is_served(
    made: Callable[..., Path], oracle_of: MakeOracle, context: int, lengths: tuple[int, ...]
) -> None:
    """On either side of the positions of training, transformers' answers to sequences that lie there."""
    folder = made("phi3", original_max_position_embeddings=TRAINED, max_position_embeddings=1024)
    expect_the_oracles(folder, oracle_of(folder), lengths, context=context)
    # Of the oracle's steps across the border, which its own noise is taken from, nothing is asked here.
    (tokens,) = prompts(7, lengths[-1])
    got_nv = Bench(folder, tokens=512, context=context).forced(tokens, [len(tokens)])
    assert (got_nv - oracle_of(folder).logits(tokens)).abs().max() < 1e-3


def test_state_of_one_list_of_longropes_factors_is_none_of_the_other(made: Callable[..., Path]) -> None:
    folder = made("phi3", original_max_position_embeddings=TRAINED, max_position_embeddings=1024)
    whole, more, border, less = (read_model_spec(folder, context) for context in (0, TRAINED + 1, TRAINED, 20))
    assert whole.fingerprint == more.fingerprint != border.fingerprint == less.fingerprint
    assert "long factors" in whole.warnings[0]
    assert not border.warnings


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["AquilaForCausalLM", "InternLM3ForCausalLM"])
def test_llama_under_another_name_gives_llamas_bits(
    made: Callable[..., Path], architecture: str, tmp_path: Path
) -> None:
    biased = architecture == "InternLM3ForCausalLM"
    folder, (tokens,) = made("llama", bias=biased), prompts(5, 40)
    other = copy_checkpoint(
        folder, tmp_path / "other", architectures=[architecture], qkv_bias=biased, bias=biased, attention_bias=None
    )
    want, got = (Bench(each, tokens=256).forced(tokens, [len(tokens)]) for each in (folder, other))
    assert torch.equal(got, want)


def test_the_text_of_ministral_3_beside_images_is_ministral_3(made: Callable[..., Path], tmp_path: Path) -> None:
    """Under the name that Mistral's has, too: queries grow with the position in one of them alone."""
    folder = copy_checkpoint(
        made("ministral3"), tmp_path / "images", architectures=["Mistral3ForConditionalGeneration"]
    )
    assert type(read_model(folder)).__name__ == "Ministral3"
    folder = copy_checkpoint(made("mistral"), tmp_path / "older", architectures=["Mistral3ForConditionalGeneration"])
    assert type(read_model(folder)).__name__ == "Mistral"


@pytest.mark.parametrize(("name", "changes", "message"), [
    ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1e4}}, "'yarn' is not supported"),
    ("phi3", {"partial_rotary_factor": 0.75, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0], "long_factor": [2.0]}},
     "1 numbers of short_factor; this model needs 6"),
    ("granite", {"logits_scaling": 0.0}, "logits_scaling must not be 0"),
    ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers must be 4 times 0 or 1"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be 4 times 0 or 1"),
    ("olmo3", {"layer_types": ["sliding_attention"]}, "layer_types must be a list of 4"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"hidden_activation": "gelu_new"}, "hidden_activation 'gelu_new' is not supported"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm is not supported"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm is not supported"),
    ("ministral3", {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta needs"),
    ("glm", {"head_dim": 18}, "its rotated part too"),
])  # fmt: skip
def test_what_would_be_computed_otherwise_is_refused_by_name(
    made: Callable[..., Path], name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        read_model(copy_checkpoint(made(name), tmp_path / "other", **changes))
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["phi3", "olmo3", "gemma2", "cohere2"])
def test_a_rows_bits_hang_on_its_own_sequence_alone(made: Callable[..., Path], name: str, dtype: str) -> None:
    folder, rng, (tokens,) = made(name, dtype=dtype), random.Random(3), prompts(3, 150)
    want = Bench(folder, 16, 512).forced(tokens, [150])
    bench = Bench(folder, 1, 1024, seed=1)
    at, held, parts = 0, bench.hold(150), []
    while at < 150:
        count = min(150 - at, rng.choice([1, 1, 2, 3, 5, 16, 31, 64]))
        rows = [bench.row(prompt, 0, bench.hold(len(prompt))) for prompt in prompts(at, *rng.choices([1, 2, 7], k=2))]
        place = rng.randrange(len(rows) + 1)
        rows.insert(place, bench.row(tokens[at : at + count], at, held))
        parts.append(bench.logits(rows)[place])
        at += count
    assert torch.equal(torch.cat(parts), want)


@pytest.mark.parametrize("name", MAKERS)
def test_ranks_hold_halves_that_are_the_whole(made: Callable[..., Path], name: str) -> None:
    """Of all that divides, parts of fused weights among it: bytes of two ranks are those of one, and what both have."""
    model = read_model(made(name))
    whole, parts = Weights.dry(model.spec), [Weights.dry(model.spec, shard=Shard(rank, 2)) for rank in (0, 1)]
    for weights in (whole, *parts):
        model.build(weights)
    products = sum(header.end - header.begin for name, header in model.spec.headers.items() if is_product(name[:-7]))
    assert parts[0].nbytes == parts[1].nbytes
    assert whole.nbytes - parts[0].nbytes >= products // 2


@pytest.mark.parametrize("name", MAKERS)
def test_config_json_alone_tells_the_tensors(made: Callable[..., Path], name: str) -> None:
    folder = made(name)
    spec = spec_of_config(folder / "config.json")
    planned = planned_spec(spec, asked_of(spec)).headers
    stored = read_model_spec(folder).headers
    assert {each: header.shape for each, header in planned.items()} == {
        each: header.shape for each, header in stored.items() if each in planned or "lm_head" not in each
    }


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("name", "layout"), [("phi3", "fp8-blocks"), ("phi3", "awq"), ("glm4", "packed-int4"), ("phi", "gptq-ordered")]
)
def test_fused_and_reordered_rows_in_blocks_answer_as_the_same_weights_dequantised(
    made: Callable[..., Path], name: str, layout: str, tmp_path: Path
) -> None:
    both = quantise_folder(made(name), layout, tmp_path)
    bench, oracle = Bench(both.stored, dtype="float32"), Oracle(both.plain)
    layers = {layer.rpartition(".")[2] for layer in quantised_names(both.stored)}
    assert {"phi3": {"qkv_proj", "gate_up_proj"}, "glm4": {"q_proj"}, "phi": {"dense", "fc1"}}[name] <= layers
    for prompt in prompts(6, 5, 90):
        verdict = compare(oracle, prompt, bench.generate(prompt, 8))
        assert verdict.equal, verdict
