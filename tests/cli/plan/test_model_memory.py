"""`twinpool plan --memory`: the weights of published models from their `config.json` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.model_families import FAMILIES
from tests.support.plain_drafts import make_eagle3
from tests.support.quantised_checkpoints import quantise_folder
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.load.model_memory import count_weights
from twinpool.cluster.serve.preflight import weight_bytes
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec, spec_of_config
from twinpool.contracts.checkpoint.safetensors_headers import TensorHeader
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.models.planned_headers import Asked, asked_of, planned_spec
from twinpool.engine.tensors import weight_loader
from twinpool.engine.weight_formats.block_formats import quantised_layers

CONFIGS = Path(__file__).parents[2] / "support" / "published_configs"
ON_CPU = config_from_dict({"engine": {"device": "cpu"}})


def spec_with(folder: Path, name: str, **changes: object) -> ModelSpec:
    """The spec of a published `config.json` with some keys changed."""
    values = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return spec_of_config(folder / "config.json")


def stored(spec: ModelSpec) -> int:
    return sum(header.end for header in planned_spec(spec, asked_of(spec)).headers.values())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters", "nbytes"), [
    # The model card: 116.83 billion, and a checkpoint of 60.8 GiB.
    ("gpt-oss-120b", 116.83e9, 60.8 * 2**30),
    # DeepSeek-V3's 671.03 billion, and an indexer in each of 61 layers: 64 queries of 128 from 1,536, a key of 128
    # and 64 weights from 7,168 (and two vectors of 128). A byte each, two for embeddings, heads and routers; scales.
    ("deepseek-v3.2", 671.03e9 + 61 * (64 * 128 * 1536 + (128 + 64) * 7168 + 256), 674e9),
])  # fmt: skip
def test_published_models_have_their_published_sizes(name: str, parameters: float, nbytes: float) -> None:
    spec = spec_of_config(CONFIGS / f"{name}.json")
    asked = asked_of(spec)
    assert asked.parameters == pytest.approx(parameters, rel=1e-4)
    headers = planned_spec(spec, asked).headers
    assert sum(header.end for header in headers.values()) == pytest.approx(nbytes, rel=2e-3)


@pytest.mark.parametrize("name", ["deepseek-v3.2", "gpt-oss-120b"])
def test_a_cpu_holds_the_bytes_of_the_files_within_five_percent(tmp_path: Path, name: str) -> None:
    small = {"num_hidden_layers": 4, "n_routed_experts": 16, "num_local_experts": 8}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if name == "gpt-oss-120b" else {}
    spec = spec_with(tmp_path, name, **small, **kinds)
    planned = planned_spec(spec, asked_of(spec))
    assert weight_bytes(planned, ON_CPU) == pytest.approx(stored(spec), rel=0.05)
    on_gpu = {"engine": {"device": "cuda"}}
    assert weight_bytes(planned, config_from_dict(on_gpu)) == pytest.approx(stored(spec), rel=0.05)
    dense = config_from_dict({"engine": {"device": "cuda", "weights": "dense"}})
    expanded = weight_bytes(planned, dense)
    assert expanded == pytest.approx(2 * asked_of(spec).parameters, rel=0.01)
    of_a_card = count_weights(spec, dense, 8, gpu=True)
    assert of_a_card.stored == stored(spec)
    assert count_weights(spec, ON_CPU, 8, gpu=True).held == of_a_card.packed < of_a_card.held < 0.65 * expanded, (
        "embeddings, half of such a small model, are on each"
    )


def test_headers_that_are_planned_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = FAMILIES["deepseek_v32"](tmp_path / "made", published=True)
    written = quantise_folder(folder, "fp8-blocks", tmp_path / "written").stored
    there = read_model_spec(written)
    config = json.loads((written / "config.json").read_text())
    names = [name for name, header in there.headers.items() if header.dtype == "F32" and len(header.shape) == 2]
    config["quantization_config"]["modules_to_not_convert"] = [name.removesuffix(".weight") for name in names]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = spec_of_config(tmp_path / "config.json")
    planned = planned_spec(spec, asked_of(spec)).headers
    assert {name: (h.dtype, h.shape) for name, h in planned.items()} == {
        name: (h.dtype, h.shape)
        for name, h in there.headers.items()
        if not name.startswith(f"model.layers.{there.layers}.")  # It predicts a second token.
    }


@pytest.mark.parametrize(("name", "ignored"), [
    ("model.layers.1", {1}), ("model.layers.1.", {1}), ("model.language_model.layers.1", {1}),
    ("model.language_model", {1, 11}), ("self_attn", {1, 11}), ("model.layers.*.self_attn", {1, 11}),
    ("layers.11.self_attn.q_proj", {11}), ("attn", set()), ("lm_head", set()),
    (r"re:.*self_attn\.q_proj$", {1, 11}), (r"re:model\.language_model\.layers\.11\.", {11}),
])  # fmt: skip
def test_a_name_that_is_ignored_is_matched_at_dots(tmp_path: Path, name: str, ignored: set[int]) -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": [name]}
    spec = spec_with(tmp_path, "deepseek-v3.2", quantization_config=quantised)
    layers = {number: f"model.layers.{number}.self_attn.q_proj" for number in (1, 11)}
    headers = planned_spec(spec, Asked(products=dict.fromkeys(layers.values(), (256, 128)))).headers
    assert {number for number, layer in layers.items() if f"{layer}.weight_scale_inv" not in headers} == ignored


def test_a_pattern_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["re:*.proj"]}
    spec = spec_with(tmp_path, "deepseek-v3.2", quantization_config=quantised)
    with pytest.raises(CheckpointError, match=r"'re:\*\.proj', which is no pattern"):
        planned_spec(spec, Asked(products={"model.layers.1.self_attn.q_proj": (256, 128)}))


def test_a_method_that_only_tensors_tell_of_is_refused_by_name(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, "deepseek-v3.2", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(CheckpointError, match="quantised by 'awq' are stored is told by their tensors alone"):
        planned_spec(replace(spec, layers=1), asked_of(replace(spec, layers=1)))


def test_a_folder_of_many_experts_has_its_headers_gone_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert is a scope of its own, and a published folder has tens of thousands of headers."""
    spec = read_model_spec(FAMILIES["deepseek_v32"](tmp_path / "made", published=True))
    searches: list[int] = []

    def counted(headers: Mapping[str, TensorHeader]) -> frozenset[str]:
        searches.append(len(headers))
        return quantised_layers(headers)

    monkeypatch.setattr(weight_loader, "quantised_layers", counted)
    assert asked_of(spec).parameters > 0
    assert searches == [len(spec.headers)]


def run(*words: str) -> int:
    return cli.run(command_line.parser().parse_args(["plan", "--memory", *words]))


def test_the_command_says_what_is_stored_and_what_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_with(tmp_path, "deepseek-v3.2", num_hidden_layers=4, n_routed_experts=16)
    assert (asked_of(spec).parameters, stored(spec)) == (4595572752, 6451623712)
    model = str(tmp_path / "config.json")
    assert run("--model", model, "--cards", "8x5GiB") == 0
    said = capsys.readouterr().out
    assert "DeepseekV32ForCausalLM, fp8: 4.6 billion parameters, 6.0 GiB as stored" in said
    assert "held on a GPU" in said
    assert "GiB a card left" in said
    assert run("--model", model, "--cards", "8x5GiB", "--set", "engine.weights=dense") == 0
    said = capsys.readouterr().out
    assert "expanded (engine.weights=dense)" in said
    assert "as stored (fp8)" in said
    assert run("--model", model, "--cards", "2x2GiB") == 1, "more than a card has"
    assert "GiB a card too much" in capsys.readouterr().out
    assert run("--model", model, "--cards", "8x5GiB", "--set", "cache.kv_dtype=fp8") == 2, "serve refuses it, too"
    assert "cache.kv_dtype (latent) computes on CPUs" in capsys.readouterr().err
    assert run("--model", model) == 0
    assert "on a CPU a worker holds 6." in capsys.readouterr().out


def test_a_gguf_files_types_are_named_and_counted_as_stored_beside_a_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "made", hidden=256, head_dim=64)
    file = str(write_gguf(folder, tmp_path / "Q8_0.gguf", "llama", "Q8_0"))
    assert run("--model", file, "--cards", "1x1GiB", "--set", "engine.weights=dense") == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM, GGUF Q8_0: " in said
    assert "as stored (GGUF Q8_0)" in said
    torch_alone = config_from_dict({"engine": {"attention": "torch"}})
    expanded = count_weights(read_model_spec(Path(file)), torch_alone, 1, gpu=False)
    assert expanded.held > 1.8 * expanded.packed


def test_without_cards_the_device_is_the_configured_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec_with(tmp_path, "deepseek-v3.2", num_hidden_layers=4, n_routed_experts=16)
    assert run("--model", str(tmp_path / "config.json"), "--set", "engine.device=cuda") == 0
    assert "on a GPU a worker holds 6." in capsys.readouterr().out
    on_gpu = ("--set", "engine.device=cuda", "--set", "engine.weights=dense")
    assert run("--model", str(tmp_path / "config.json"), *on_gpu) == 0
    assert "on a GPU a worker holds 8." in capsys.readouterr().out, "two bytes for each of 4.6 billion"


@pytest.mark.parametrize(("setting", "text"), [
    ("engine.context=1000000", "engine.context=1000000"),
    ("engine.draft_model=nowhere", "engine.draft_model must be mtp, or a folder that is there"),
])  # fmt: skip
def test_settings_of_the_model_are_read_with_a_folder_and_refused_with_its_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, text: str
) -> None:
    folder = make_checkpoint(tmp_path / "made")
    assert run("--model", str(folder), "--set", setting) == 2
    assert text in capsys.readouterr().err
    assert run("--model", str(folder / "config.json"), "--set", setting) == 2
    assert f"{setting} needs the model's folder" in capsys.readouterr().err


def test_what_drafts_is_held_and_is_no_parameter_of_the_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "made", layers=8)
    head = make_eagle3(tmp_path / "head", hidden=64, vocab=VOCAB, known=range(3, VOCAB, 2))
    alone, drafted = (
        count_weights(read_model_spec(folder, 0, draft), ON_CPU, 1, gpu=False) for draft in ("", str(head))
    )
    assert drafted.held > alone.held
    assert drafted.parameters == alone.parameters


@pytest.mark.parametrize("section", ["prefill", "decode", "colocate"])
def test_experts_are_spread_over_cards_where_any_worker_spreads_them(tmp_path: Path, section: str) -> None:
    spec = read_model_spec(FAMILIES["qwen3_moe"](tmp_path / "made", moe_intermediate_size=42))
    with pytest.raises(ConfigError, match="42"):
        count_weights(spec, ON_CPU, 4, gpu=False)
    spread = config_from_dict({section: {"tp": 4, "ep": 4}})
    assert count_weights(spec, spread, 4, gpu=False).held < count_weights(spec, ON_CPU, 2, gpu=False).held


@pytest.mark.parametrize(("words", "text"), [
    (["--model", "x", "--cards", "8xB999"], "--cards takes a number of H100 or H200"),
    (["--model", "x", "--cards", "0xH100"], "--cards takes"),
    ([], "--memory needs --model"), (["--model", "x", "--measure"], "leave out --trace"),
    (["--model", "no/such/folder"], "does not exist"),
])  # fmt: skip
def test_bad_flags_are_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) in {1, 2}
    assert text in capsys.readouterr().err
