"""A GGUF file's greedy answers are those that transformers gives on its own reading of the same file.

Random files of each architecture, in each type that the `gguf` package can make; K types are in `test_gguf_blocks`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.engine.harness import Bench
from tests.support.checkpoints import Oracle, compare, make_checkpoint
from tests.support.family_checkpoint import rewrite_tensors, tensors_of
from tests.support.gguf_files import GgufOracle, quantised, write_gguf
from tests.support.model_families import FAMILIES
from tests.support.served_cluster import ROOT
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError
from twinpool.engine.layers.rope import inverse_frequencies
from twinpool.engine.models.registry import model_for, read_model
from twinpool.engine.runner.kernel_choice import dtype_for
from twinpool.engine.tensors.shard import Shard
from twinpool.engine.tensors.weight_loader import Weights

ANSWER = 8
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
KINDS = ("F32", "F16", "BF16", *QUANTISED)
GEMMA_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
# Numbers that transformers takes for granted in such a file: widths of heads, and Gemma's pattern of layers.
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 128, "heads": 2, "kv_heads": 1}, {}),
    "gemma3": (
        "gemma3",
        {
            "head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
            "num_hidden_layers": 7, "sliding_window_pattern": 6, "rope_parameters": GEMMA_ROPES,
        },
        {"attention__sliding_window": 48, "rope__freq_base": 1e6},
    ),
    "qwen3moe": (
        "qwen3_moe",
        {"mlp_only_layers": [], "moe_intermediate_size": 64},
        {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(base: Path) -> list[list[int]]:
    """Twenty paragraphs of novels, by the small tokenizer of these checkpoints; 100 tokens at most."""
    tokenizer = Tokenizer.from_file(str(folder_of(base, "llama") / "tokenizer.json"))
    paragraphs = (ROOT / "bench" / "demo_model" / "heldout.txt").read_text().splitlines()
    return [tokenizer.encode(text).ids[:100] for text in paragraphs if len(text) > 20][:20]


@cache
def folder_of(base: Path, architecture: str) -> Path:
    family, changes, _ = SHAPES[architecture]
    return FAMILIES[family](base / architecture, **changes)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def file_of(base: Path, architecture: str, kind: str) -> Path:
    numbers: dict[str, Any] = SHAPES[architecture][2]
    return write_gguf(
        folder_of(base, architecture), base / f"{architecture}-{kind}.gguf", architecture, kind, **numbers
    )


def answers_equal(file: Path, oracle: Oracle, prompts: list[list[int]]) -> None:
    got = Bench(file, dtype="float32").generate_many(prompts, ANSWER)
    for prompt, answer in zip(prompts, got, strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_type_answers_as_transformers_reads_it(base: Path, prompts: list[list[int]], kind: str) -> None:
    file = file_of(base, "llama", kind)
    answers_equal(file, GgufOracle(file), prompts)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_each_architecture_answers_as_transformers_reads_it(
    base: Path, prompts: list[list[int]], architecture: str
) -> None:
    file = file_of(base, architecture, "Q4_0")
    answers_equal(file, GgufOracle(file), prompts[:3])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_file_is_the_folder_that_it_was_made_of(base: Path, prompts: list[list[int]], architecture: str) -> None:
    answers_equal(file_of(base, architecture, "F32"), Oracle(folder_of(base, architecture)), prompts[:2])


@pytest.mark.slow
def test_quantised_experts_are_found_in_the_tensor_of_all(base: Path, prompts: list[list[int]]) -> None:
    folder = FAMILIES["qwen3_moe"](base / "experts", **SHAPES["qwen3moe"][1])
    file = write_gguf(folder, base / "experts.gguf", "qwen3moe", "Q8_0", **SHAPES["qwen3moe"][2])
    rewrite_tensors(folder, {name: quantised(tensor, "Q8_0") for name, tensor in tensors_of(folder).items()})
    answers_equal(file, Oracle(folder), prompts[:4])


@pytest.mark.slow
def test_rope_factors_are_llama_3s_scaling(tmp_path: Path, prompts: list[list[int]]) -> None:
    folder = make_checkpoint(tmp_path / "scaled", rope="llama3")
    scaled = Oracle(folder).model.model.rotary_emb.inv_freq
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / scaled).float().numpy()
    file = write_gguf(
        folder, tmp_path / "scaled.gguf", "llama", edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    answers_equal(file, Oracle(folder), [prompts[0] * 12])
    ropes = [read_model(path).rope for path in (folder, file)]  # type: ignore[attr-defined]
    assert ropes[0] == ropes[1]


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 7.0, 8.0], [0.5] * 8], ids=["rising", "halves"])
def test_other_rope_factors_divide_frequencies_as_they_are(tmp_path: Path, values: list[float]) -> None:
    """What isn't Llama 3's scaling isn't taken for it."""
    factors = torch.tensor(values)
    file = write_gguf(
        make_checkpoint(tmp_path / "folder"), tmp_path / "model.gguf", "llama",
        edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors.numpy()),
    )  # fmt: skip
    rope = read_model(file).rope  # type: ignore[attr-defined]
    assert (rope.kind, rope.parameters["factors"]) == ("factors", factors.tolist())
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    assert torch.equal(inverse_frequencies(rope, 16)[0], plain / factors)


@pytest.mark.parametrize(
    ("scaling", "numbers"),
    [
        ("linear", {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}),
        (
            "yarn",
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 1024,
            },
        ),
    ],
)
def test_rope_scalings_of_the_metadata_are_those_of_folders(
    tmp_path: Path, scaling: str, numbers: dict[str, Any]
) -> None:
    folder = make_checkpoint(tmp_path / "scaled", rope=scaling)
    file = write_gguf(folder, tmp_path / "scaled.gguf", "llama", **numbers)
    ropes = [read_model(path).rope for path in (folder, file)]  # type: ignore[attr-defined]
    assert ropes[0] == ropes[1]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_ranks_read_their_parts_of_a_file(base: Path, kind: str, size: int) -> None:
    """Four query heads, two of keys and values: with four ranks two share a head."""
    file = file_of(base, "llama", kind)
    spec = read_model_spec(file)

    def read(shard: Shard, name: str, *, rows: bool, unit: int) -> torch.Tensor:
        weights = Weights(spec, torch.float32, torch.device("cpu"), shard)
        whole = spec.headers[name].shape
        axis = shard.axis(whole[0 if rows else 1] // unit, unit)
        try:
            return weights.tensor(name, axis, whole[1]) if rows else weights.tensor(name, whole[0], axis)
        finally:
            weights.close()

    layer = "model.layers.1"
    for name, rows, unit in (
        (f"{layer}.self_attn.q_proj.weight", True, 16),
        (f"{layer}.self_attn.k_proj.weight", True, 16),
        (f"{layer}.self_attn.o_proj.weight", False, 16),
        (f"{layer}.mlp.down_proj.weight", False, 1),
        (f"{layer}.mlp.up_proj.weight", True, 1),
    ):
        whole = read(Shard(), name, rows=rows, unit=unit)
        for rank in range(size):
            shard = Shard(rank, size)
            axis = shard.axis(whole.shape[0 if rows else 1] // unit, unit)
            part = read(shard, name, rows=rows, unit=unit)
            assert torch.equal(part, whole[axis.here] if rows else whole[:, axis.here]), (name, rank)


def test_quantised_weights_compute_in_bfloat16_and_others_as_stored(base: Path) -> None:
    auto = EngineConfig()
    for kind, declared, computed in (
        ("F32", "float32", torch.float32),
        ("F16", "float16", torch.float32),
        ("BF16", "bfloat16", torch.bfloat16),
        ("Q4_1", "bfloat16", torch.bfloat16),
    ):
        spec = read_model_spec(file_of(base, "llama", kind))
        assert (spec.dtype, dtype_for(spec, auto)) == (declared, computed)
        assert dtype_for(spec, EngineConfig(dtype="float32")) == torch.float32


def test_a_files_context_is_what_yarn_gives_and_may_be_set(base: Path, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.5}
    plain, scaled = file_of(base, "qwen2", "F32"), tmp_path / "scaled.gguf"
    write_gguf(folder_of(base, "qwen2"), scaled, "qwen2", **numbers)
    trained = read_model_spec(plain).context
    assert read_model_spec(scaled).context == 2.5 * trained
    assert [read_model_spec(file, 300).context for file in (plain, scaled)] == [300, 300]
    said = (
        f"engine.context={trained + 1} is more than the {trained} tokens .* needs a file converted with yarn scaling$"
    )
    with pytest.raises(ConfigError, match=said):
        read_model_spec(plain, trained + 1)


def test_what_the_file_says_is_the_spec(base: Path, tmp_path: Path) -> None:
    folder = folder_of(base, "llama")
    mine, theirs = read_model_spec(file_of(base, "llama", "F32")), read_model_spec(folder)
    assert (mine.vocab_size, mine.layers, mine.context) == (theirs.vocab_size, theirs.layers, theirs.context)
    assert (mine.name, mine.eos_token_ids) == ("llama-F32", theirs.eos_token_ids)
    assert model_for(mine).spec is mine
    said = write_gguf(
        folder,
        tmp_path / "said.gguf",
        "llama",
        edit=lambda writer: (
            writer.add_eot_token_id(7),
            writer.add_float32("general.sampling.temp", 0.5),
            writer.add_uint32("general.sampling.top_k", 20),
        ),
    )
    spec = read_model_spec(said)
    assert spec.eos_token_ids == (0, 7)
    assert spec.generation_defaults == {"temperature": 0.5, "top_k": 20.0}
    beside = {"temperature": 0.2, "top_p": 0.9, "eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    spec = read_model_spec(said)
    assert spec.eos_token_ids == (0, 7)
    assert spec.generation_defaults == {"temperature": 0.5, "top_k": 20.0, "top_p": 0.9}


def test_other_weights_have_other_fingerprints_and_a_copy_has_the_same(base: Path, tmp_path: Path) -> None:
    file = file_of(base, "llama", "Q4_0")
    copy = tmp_path / "another-name.gguf"
    copy.write_bytes(file.read_bytes())
    assert read_model_spec(copy).fingerprint == read_model_spec(file).fingerprint
    others = {read_model_spec(file_of(base, "llama", kind)).fingerprint for kind in ("F32", "Q4_0", "Q4_1")}
    other = write_gguf(make_checkpoint(tmp_path / "other", seed=5), tmp_path / "other.gguf", "llama", "Q4_0")
    assert len(others | {read_model_spec(other).fingerprint}) == 4


def test_control_tokens_that_end_answers_end_them(base: Path, tmp_path: Path) -> None:
    folder = folder_of(base, "llama")

    def named(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "a"])
        writer.add_token_types([3, 3, 1, 1])
        writer.add_token_merges(["a a"])
        writer.add_eos_token_id(1)

    file = write_gguf(folder, tmp_path / "ends.gguf", "llama", tokenizer=named)
    assert read_model_spec(file).eos_token_ids == (1, 0)


@pytest.mark.slow
def test_biases_of_queries_and_keys_come_back_into_their_order(base: Path, prompts: list[list[int]]) -> None:
    """llama.cpp turns over the rows of a Llama's biases as it does those of its matrices."""
    folder = FAMILIES["llama"](base / "biased", bias=True)
    random = torch.Generator().manual_seed(5)
    drawn = {
        name: torch.randn(tensor.shape, generator=random) if name.endswith(".bias") else tensor
        for name, tensor in tensors_of(folder).items()
    }
    rewrite_tensors(folder, drawn)
    answers_equal(write_gguf(folder, base / "biased.gguf", "llama", "F32"), Oracle(folder), prompts[:2])
