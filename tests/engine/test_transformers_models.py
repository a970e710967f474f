"""Models that transformers' modules compute, with attention over our pages: against transformers itself."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from tests.engine.harness import Bench, MakeOracle
from tests.engine.judged import expect_close_choices, expect_the_oracles, prompts
from tests.engine.test_model_image import Images
from tests.support.checkpoints import copy_checkpoint, make_checkpoint
from tests.support.family_checkpoint import WINDOW
from tests.support.family_transformers import MAKERS
from tests.support.model_families import FAMILIES, folder_maker
from twinpool.cluster.assembly.build_parts import weights_digest
from twinpool.cluster.serve.preflight import check_ranks, weight_bytes
from twinpool.contracts.checkpoint.model_spec import read_model_spec, spec_of_config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.models import transformers_trace
from twinpool.engine.models.registry import ARCHITECTURES, model_for, read_model, unchecked_model
from twinpool.engine.runner.kernel_choice import class_of

LENGTHS = (1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 130, 200)
THROUGH = EngineConfig(models="transformers")
CPU = torch.device("cpu")
LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 48, "num_key_value_heads": 1, "head_dim": 16}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
NUMBERS = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    options = {name: {"name": name} for name in MAKERS} | {"tied": {"name": "nemotron", "tie_word_embeddings": True}}
    options["bfloat16"] = {"name": "dots1", "dtype": "bfloat16"}
    return folder_maker(tmp_path_factory.mktemp("made"), options, MAKERS)


def test_none_of_them_has_a_model_file(made: Any) -> None:
    for name in MAKERS:
        assert read_model_spec(made(name)).architecture not in ARCHITECTURES
        with pytest.raises(CheckpointError, match=r"is not supported.*engine\.models=transformers"):
            read_model(made(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_float32_gives_the_oracles_greedy_tokens_and_logits(made: Any, oracle_of: MakeOracle, name: str) -> None:
    expect_the_oracles(made(name), oracle_of(made(name)), LENGTHS, models="transformers", threads=1)


@pytest.mark.slow
def test_a_head_that_is_the_embedding_gives_the_oracles_tokens(made: Any, oracle_of: MakeOracle) -> None:
    expect_the_oracles(made("tied"), oracle_of(made("tied")), LENGTHS, models="transformers", threads=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stablelm"])
def test_bfloat16_chooses_what_the_oracle_might(made: Any, oracle_of: MakeOracle, tmp_path: Path, name: str) -> None:
    folder = MAKERS[name](tmp_path / name, dtype="bfloat16")
    expect_close_choices(folder, oracle_of(folder), (40, 130), models="transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function",
    [
        torch.rsqrt,
        Tensor.rsqrt,
        torch.sigmoid,
        F.silu,
        F.gelu,
        F.softplus,
        partial(F.softplus, beta=2.0, threshold=1.0),
    ],
)
def test_what_lies_beside_an_element_changes_no_bit_of_it(function: Any, dtype: torch.dtype) -> None:
    """Torch's vector lanes and scalar tails of some functions round differently."""
    x = torch.rand(7, 13, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype)
    with transformers_trace.RowExact():
        whole, alone = function(x), torch.stack([function(each.clone()) for each in x.flatten()])
    assert torch.equal(whole.flatten(), alone)
    assert torch.allclose(whole, function(x), rtol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", ["stablelm", "afmoe", "granite_swa", "vaultgemma", "bfloat16"])
def test_a_rows_bits_hang_on_its_own_sequence_alone(made: Any, name: str, backend: str) -> None:
    bench, rng = Bench(made(name), tokens=9000, models="transformers", attention=backend, threads=1), random.Random(0)
    asked = prompts(2, *[rng.randint(20, 120) for _ in range(5)])
    alone = [bench.forced(each, [len(each)]) for each in asked]
    held, at = [bench.hold(len(each)) for each in asked], [0] * len(asked)
    got: list[list[Tensor]] = [[] for _ in asked]
    while any(begin < len(each) for begin, each in zip(at, asked, strict=True)):
        chosen = [i for i, each in enumerate(asked) if at[i] < len(each) and rng.random() < 0.7]
        rows = []
        for i in chosen:
            count = min(len(asked[i]) - at[i], rng.choice([1, 1, 2, 7, 30]))
            rows.append(bench.row(asked[i][at[i] : at[i] + count], at[i], held[i]))
            at[i] += count
        for i, logits in zip(chosen, bench.logits(rows) if rows else [], strict=True):
            got[i].append(logits)
    assert all(torch.equal(torch.cat(parts), want) for parts, want in zip(got, alone, strict=True))


@pytest.mark.slow
def test_what_a_model_file_computes_and_what_its_module_does_are_the_same_to_rounding(tmp_path: Path) -> None:
    folder = FAMILIES["gemma3"](tmp_path / "model")
    (tokens,) = prompts(3, 150)
    ours, theirs = (Bench(folder, models=models).forced(tokens, [60, 90]) for models in ("native", "transformers"))
    assert (ours - theirs).abs().max() < 1e-3 * ours.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "dots1"])
def test_a_mapped_image_has_the_bits_of_what_was_loaded(made: Any, name: str) -> None:
    images, (tokens,) = Images(), prompts(4, 90)
    results = [Bench(made(name), models="transformers", images=images).forced(tokens, [50, 40]) for _ in range(2)]
    assert images.found == 1
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["opt", "dots1", "tied"])
def test_bytes_of_weights_are_counted_before_any_is_read(made: Any, name: str) -> None:
    config = config_from_dict({"engine": {"models": "transformers", "device": "cpu"}})
    spec = read_model_spec(made(name))
    (module,) = [transformers.AutoModelForCausalLM.from_pretrained(made(name))]
    held = sum(each.nbytes for each in module.parameters())
    copied = module.get_input_embeddings().weight.nbytes if name == "tied" else 0
    assert weight_bytes(spec, config) == held + copied


# ------------------------------------------------------------ refusals


def refusal(folder: Path, config: transformers.PretrainedConfig, **engine: Any) -> str:
    """What is said of a model of which there is only its configuration."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises((CheckpointError, ConfigError)) as raised:
        unchecked_model(spec_of_config(folder / "config.json"), EngineConfig(models="transformers", **engine))
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        ("Qwen3NextConfig", {}, "keep other state than keys and values"),
        ("MambaConfig", {}, "keep other state than keys and values"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "layers of kind conv: it needs a model file"),
        ("Llama4TextConfig", LLAMA4, "layers of kind chunked_attention: it needs a model file"),
        ("BertConfig", {"is_encoder_decoder": True}, "an encoder with a decoder"),
        ("RemBertConfig", {"is_decoder": True}, "doesn't go through transformers' attention interface"),
        ("FalconConfig", {}, "doesn't go through transformers' attention interface"),
        ("RoFormerConfig", {"is_decoder": True}, "its positions can't be given"),
        ("BertConfig", {}, "neither causal nor a window"),
        ("DogeConfig", {}, "a mask of its own making"),
        ("DiffLlamaConfig", {}, "attends more than once"),
        ("DeepseekV32Config", {}, "layers of kind indexed_attention"),
        ("DeepseekV32Config", {"layer_types": ["full_attention"] * 2}, "passes indices to attention"),
        ("LlamaConfig", {"rope_parameters": _DYNAMIC}, "rope of kind dynamic"),
        ("Qwen2VLConfig", {}, "no decoder of it"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_so_is_refused_by_name(
    tmp_path: Path, config: str, changes: dict[str, Any], reason: str
) -> None:
    made = getattr(transformers, config)(**(NUMBERS | changes))
    assert reason in refusal(tmp_path / "model", made)


@pytest.mark.parametrize("config", ["BloomConfig", "MptConfig", "GPT2Config", "GPTJConfig", "GPTBigCodeConfig"])
def test_numbers_by_names_of_their_own_are_refused_by_the_usual_one(tmp_path: Path, config: str) -> None:
    text = refusal(tmp_path / "model", getattr(transformers, config)())
    assert re.search("has no (num_hidden_layers|max_position_embeddings)$", text)


def test_a_model_type_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    told = transformers.LlamaConfig(**NUMBERS).to_dict() | {"model_type": "one_of_tomorrow"}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="doesn't know this model"):
        unchecked_model(spec_of_config(tmp_path / "config.json"), THROUGH)


def test_operations_that_are_not_by_row_need_fast_numerics(tmp_path: Path) -> None:
    made = transformers.PhimoeConfig(**NUMBERS, num_local_experts=4, num_key_value_heads=1)
    assert "set engine.numerics=fast" in refusal(tmp_path / "model", made)
    spec = spec_of_config(tmp_path / "model" / "config.json")
    unchecked_model(spec, EngineConfig(models="transformers", numerics="fast"))


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"device": "cuda"}, "computes on CPUs"),
        ({"weights": "int8"}, "keeps weights as stored"),
    ],
)
def test_settings_that_it_cannot_keep_are_refused(made: Any, engine: dict[str, Any], reason: str) -> None:
    config = config_from_dict({"engine": {"models": "transformers", **engine}})
    with pytest.raises(ConfigError, match=reason):
        weight_bytes(read_model_spec(made("opt")), config)


def test_several_ranks_are_refused(made: Any) -> None:
    config = config_from_dict({"engine": {"models": "transformers"}, "decode": {"tp": 2}})
    with pytest.raises(ConfigError, match=r"decode\.tp=2.*one rank"):
        check_ranks(config, read_model_spec(made("opt")))


@pytest.mark.slow
def test_a_model_that_takes_pictures_is_refused(tmp_path: Path) -> None:
    """Its pictures would be taken in, and nothing here would compute them."""
    folder = FAMILIES["mistral"](tmp_path / "model")
    spec = replace(read_model_spec(folder), pictures=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="computes no pictures"):
        model_for(spec, THROUGH)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    told = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(CheckpointError, match=r"takes dense weights.*fp8"):
        read_model(copy_checkpoint(folder, tmp_path / "other", quantization_config=told), config=THROUGH)


@pytest.mark.slow
def test_a_module_that_looks_at_the_row_before_is_refused_when_it_is_loaded(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trace is that of a model that can be computed: only results tell."""
    from transformers.models.stablelm.modeling_stablelm import StableLmMLP

    plain = StableLmMLP.forward
    monkeypatch.setattr(
        StableLmMLP, "forward", lambda self, x: plain(self, torch.cat((x[:, :1], x[:, :-1]), 1)) + plain(self, x)
    )
    with pytest.raises(CheckpointError, match="it keeps more than keys and values"):
        Bench(made("stablelm"), models="transformers")


def test_without_the_package_the_extra_is_named(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    transformers_trace.registered.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'twinpool\[transformers\]'"):
        read_model(made("opt"), config=THROUGH)
    transformers_trace.registered.cache_clear()


@pytest.mark.slow
def test_who_does_not_ask_for_it_never_imports_it(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "llama")
    code = (
        "import sys; from pathlib import Path; from twinpool.engine.models.registry import read_model; "
        f"read_model(Path({str(folder)!r})); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_numerics_class_and_the_digest_of_weights_tell_it_from_model_files(made: Any) -> None:
    plain, through = config_from_dict({}), config_from_dict({"engine": {"models": "transformers"}})
    named = class_of(through.engine, torch.float32, CPU)
    assert f"/transformers-{transformers.__version__}" in named
    assert class_of(plain.engine, torch.float32, CPU) != named
    spec = read_model_spec(made("opt"))
    assert weights_digest(spec, plain) != weights_digest(spec, through)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stablelm", "dots1"])
def test_a_missing_tensor_is_named_when_weights_are_read(made: Any, tmp_path: Path, name: str) -> None:
    kinds = ["full_attention"] * 3
    folder = copy_checkpoint(made(name), tmp_path / "other", num_hidden_layers=3, layer_types=kinds)
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.2\..* is missing"):
        Bench(folder, models="transformers")


def test_a_tensor_of_another_shape_is_named_before_any_is_read(made: Any, tmp_path: Path) -> None:
    folder = copy_checkpoint(made("stablelm"), tmp_path / "other", intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"mlp.*has shape \[128, 64\]"):
        model_for(read_model_spec(folder), THROUGH)
