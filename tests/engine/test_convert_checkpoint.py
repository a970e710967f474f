"""`twinpool convert`: what is written is what the definition says, and what others and this engine read in it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.engine.harness import Bench
from tests.engine.test_gguf_models import SHAPES
from tests.support.checkpoints import Oracle, compare
from tests.support.family_checkpoint import rewrite_tensors, tensors_of
from tests.support.gguf_files import write_gguf
from tests.support.model_families import FAMILIES
from tests.support.quantised_checkpoints import quantise_folder
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.contracts.checkpoint.json_fields import JsonFields
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.checkpoint.quantization import read_quantization
from twinpool.contracts.checkpoint.safetensors_headers import read_headers
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.tensors import convert_checkpoint
from twinpool.engine.tensors.convert_checkpoint import Conversion
from twinpool.engine.weight_formats.block_formats import StoredWeight, read_blocks
from twinpool.engine.weight_formats.block_writers import LAYOUTS, float8_blocks, packed_integers

FORMATS = ("bfloat16", "float8", "int8", "int4", "nvfp4", "mxfp4", "mxfp8", "awq", "gptq4", "gptq8")
OF_COMPRESSED_TENSORS = ("int8", "int4", "nvfp4", "mxfp4", "mxfp8")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LAYER = "model.layers.1.mlp.down_proj"
PROMPTS = [[(7 * i + seed) % 290 for i in range(length)] for seed, length in ((1, 5), (2, 40))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("plain") / "llama", hidden=128)


def converted(source: Path, target: Path, form: str, group: int = 32, **options: Any) -> Path:
    Conversion(read_model_spec(source), form, group).write(target, lambda text: None, **options)
    return target


def dequantised(source: Path, form: str, to: Path) -> Path:
    """The folder `source` with what its products' weights are in a format, in float32: by plain arithmetic."""
    tensors = tensors_of(source)
    for name, tensor in tensors.items():
        weight = tensor.float()
        if tensor.dim() == 2:
            tensors[name] = weight.to(torch.bfloat16).float()
        if ".layers." not in name or not name.endswith("_proj.weight") or form == "bfloat16":
            continue
        rows, columns = {"float8": (128, 128), "nvfp4": (1, 16)}.get(form, (1, 32))
        for i in range(0, weight.shape[0], rows):
            for j in range(0, weight.shape[1], columns):
                part = weight[i : i + rows, j : j + columns]
                tensors[name][i : i + rows, j : j + columns] = nearest(part, form, weight)
    copy_of(source, to)
    rewrite_tensors(to, {name: tensor.float() for name, tensor in tensors.items()})
    return to


def nearest(part: Tensor, form: str, weight: Tensor) -> Tensor:
    """The numbers of a format that are nearest to those of one group of a weight."""
    largest = float(part.abs().max())
    if form in {"float8", "mxfp8"}:
        scale = largest / 448 if form == "float8" else power_of_two(largest, 8)
        return (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    if form in {"nvfp4", "mxfp4"}:
        whole = float(weight.abs().max()) / (6 * 448)
        of_group = float(torch.tensor(largest / 6 / whole).to(torch.float8_e4m3fn)) * whole
        scale = of_group if form == "nvfp4" else power_of_two(largest, 2)
        codes = ((part / scale).abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
        return E2M1[codes] * part.sign() * scale
    if form == "awq":
        low, high = min(float(part.min()), 0), max(float(part.max()), 0)
        step = torch.tensor((high - low) / 15).to(torch.float16).float()
        zero = (-low / step).round()
        return ((part / step).round() + zero).clamp(0, 15).sub(zero) * step
    top, dtype = {
        "int8": (127, torch.bfloat16), "int4": (7, torch.bfloat16), "gptq8": (127, torch.float16),
        "gptq4": (7, torch.float16),
    }[form]  # fmt: skip
    step = torch.tensor(largest / top).to(dtype).float()
    return (part / step).round().clamp(-top, top) * step


def power_of_two(largest: float, power: int) -> float:
    """The scale of a group: its largest number comes into [2 ** power, 1.75 * 2 ** power), or from half of the rest."""
    exponent = 0
    while largest / 2.0**exponent >= 1.75 * 2.0**power:
        exponent += 1
    while largest / 2.0**exponent < 0.875 * 2.0**power:
        exponent -= 1
    return 2.0**exponent


def copy_of(source: Path, to: Path) -> None:
    to.mkdir()
    for file in source.iterdir():
        (to / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("form", FORMATS)
def test_converted_folders_are_answered_from_as_the_definition_says(plain: Path, tmp_path: Path, form: str) -> None:
    target = converted(plain, tmp_path / form, form)
    assert (target / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    words, halves, whole = ("weight_packed", "I32"), ("weight_packed", "U8"), ("weight", "F8_E4M3")
    kinds = {"bfloat16": ("weight", "BF16"), "nvfp4": halves, "mxfp4": halves, "float8": whole, "mxfp8": whole}
    kinds |= {"int4": words, "int8": words}
    part, dtype = kinds.get(form, ("qweight", "I32"))
    headers = read_headers(target)
    assert headers[f"{LAYER}.{part}"].dtype == dtype
    assert headers["model.embed_tokens.weight"].dtype == headers["lm_head.weight"].dtype == "BF16"
    assert headers["model.norm.weight"].dtype == "F32"
    bench, oracle = Bench(target, dtype="float32"), Oracle(dequantised(plain, form, tmp_path / "plain"))
    for prompt, answer in zip(PROMPTS, bench.generate_many(PROMPTS, 8), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in FORMATS if not form.startswith(("awq", "gptq"))])
def test_transformers_loads_the_same_weights(plain: Path, tmp_path: Path, form: str) -> None:
    target = converted(plain, tmp_path / form, form)
    want = tensors_of(dequantised(plain, form, tmp_path / "plain"))
    options = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if form == "float8" else {}
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, **options)
    if form in OF_COMPRESSED_TENSORS:
        config = json.loads((target / "config.json").read_text())["quantization_config"]
        scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
        stored = tensors_of(target)
        parts = {n.removeprefix(f"{LAYER}."): t for n, t in stored.items() if n.startswith(f"{LAYER}.")}
        theirs = BaseCompressor.get_value_from_registry(config["format"]).decompress(parts, scheme)["weight"]
        torch.testing.assert_close(theirs.float(), want[f"{LAYER}.weight"], rtol=5e-3, atol=0)
        ids = torch.tensor([PROMPTS[1]])
        plain_model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        with torch.no_grad():
            if not form.startswith("int"):
                model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
                model(ids)  # Unpacks floats of four and eight bits, to bfloat16.
                for name, tensor in model.named_parameters():
                    if name.endswith("_proj.weight"):
                        torch.testing.assert_close(tensor.float(), want[name], rtol=5e-3, atol=0, msg=name)
                return
            torch.testing.assert_close(model(ids).logits, plain_model(ids).logits, rtol=2e-2, atol=2e-2)
        return
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor.float(), want[name], rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("layout", ["awq", "gptq-ordered", "nvfp4", "packed-int4-zeros", "packed-int8-channel",
                                    "fp8-ue8m0", "int8", "nvfp4-modelopt", "mxfp4", "mxfp8"])  # fmt: skip
def test_quantised_sources_are_unpacked_to_the_numbers_that_they_stand_for(
    plain: Path, tmp_path: Path, layout: str
) -> None:
    both = quantise_folder(plain, layout, tmp_path / "written")
    target = converted(both.stored, tmp_path / "target", "bfloat16")
    found, want = tensors_of(target), tensors_of(both.plain)
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, want[name].to(tensor.dtype)), name
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    again = converted(both.stored, tmp_path / "again", "int8")
    assert f"{LAYER}.weight_packed" in read_headers(again)


@pytest.mark.slow
def test_what_the_configuration_of_the_text_within_says_of_its_weights_is_of_the_target_too(
    plain: Path, tmp_path: Path
) -> None:
    stored = quantise_folder(plain, "awq", tmp_path / "written").stored
    file = stored / "config.json"
    text = json.loads(file.read_text()) | {"dtype": "float16", "torch_dtype": "float16", "sliding_window": None}
    assert text["quantization_config"]["quant_method"] == "awq"
    file.write_text(json.dumps({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}))
    target = converted(stored, tmp_path / "target", "float8")
    values = json.loads((target / "config.json").read_text())
    within = values["text_config"]
    assert "quantization_config" not in within
    assert [values["dtype"], within["dtype"], within["torch_dtype"]] == ["bfloat16"] * 3
    assert read_model_spec(target).quantization.method == "fp8"


def test_experts_in_mxfp4_are_written_as_transformers_has_them(tmp_path: Path) -> None:
    folder = FAMILIES["gpt_oss"](tmp_path / "gpt_oss", published=True, packed=True)
    stored = tensors_of(folder)
    target = converted(folder, tmp_path / "target", "bfloat16")
    found = tensors_of(target)
    packed = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert packed
    for name in packed:
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(found[name], theirs), name
    oracle = Oracle(target)
    for prompt, answer in zip(PROMPTS, Bench(target, dtype="float32").generate_many(PROMPTS, 6), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict
    with pytest.raises(CheckpointError, match="can be written in bfloat16 alone"):
        Conversion(read_model_spec(folder), "int4")


def test_a_gguf_file_becomes_a_folder(plain: Path, tmp_path: Path) -> None:
    file = write_gguf(plain, tmp_path / "model.gguf", "llama", "Q8_0")
    target = converted(file, tmp_path / "target", "bfloat16")
    found = tensors_of(target)
    for name, tensor in tensors_of(plain).items():
        near = 0.02 * float(tensor.float().abs().max())
        torch.testing.assert_close(found[name].float(), tensor.float(), rtol=0, atol=near, msg=name)
    want = Bench(file, weights="dense", dtype="bfloat16").generate_many(PROMPTS, 8)
    assert Bench(target, dtype="bfloat16").generate_many(PROMPTS, 8) == want
    spec, source = read_model_spec(target), read_model_spec(file)
    assert (spec.eos_token_ids, spec.vocab_size) == (source.eos_token_ids, source.vocab_size)
    assert json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]
    int4 = converted(file, tmp_path / "int4", "int4")
    assert read_headers(int4)[f"{LAYER}.weight_packed"].dtype == "I32"


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("architecture", [*SHAPES, "llama3"])
def test_a_gguf_file_of_each_architecture_becomes_a_folder_of_transformers(tmp_path: Path, architecture: str) -> None:
    """`llama3`: a Llama with the factors of rope that llama.cpp writes for 3.1 and later."""
    scaled = architecture == "llama3"
    family, changes, numbers = ("llama", {"rope": "llama3"}, {}) if scaled else SHAPES[architecture]
    folder = FAMILIES[family](tmp_path / "folder", dtype="bfloat16", **changes)
    want = Oracle(folder)

    def add_factors(writer: gguf.GGUFWriter) -> None:
        frequencies = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (frequencies / want.model.model.rotary_emb.inv_freq).numpy())

    name, edit = ("llama", add_factors) if scaled else (architecture, None)
    file = write_gguf(folder, tmp_path / "model.gguf", name, edit=edit, **numbers)
    target = converted(file, tmp_path / "target", "bfloat16")
    assert torch.equal(Oracle(target).logits(PROMPTS[1]), want.logits(PROMPTS[1]))
    mine, theirs = (
        AutoTokenizer.from_pretrained(path)("the quick brown fox")["input_ids"] for path in (target, folder)
    )
    assert mine == theirs


def test_files_are_divided_and_named_in_an_index(plain: Path, tmp_path: Path) -> None:
    target = converted(plain, tmp_path / "target", "int4", shard_bytes=100_000)
    files = sorted(file.name for file in target.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    whole = converted(plain, tmp_path / "whole", "int4")
    assert {name: (h.dtype, h.shape) for name, h in read_headers(target).items()} == {
        name: (h.dtype, h.shape) for name, h in read_headers(whole).items()
    }
    assert Bench(target).generate_many(PROMPTS, 4) == Bench(whole).generate_many(PROMPTS, 4)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(h.end - h.begin for h in read_headers(target).values())
    mask = os.umask(0o027)
    try:
        again = converted(target, tmp_path / "again", "bfloat16")
    finally:
        os.umask(mask)
    assert not (again / "model.safetensors.index.json").exists(), "one file has no index, the source's above all"
    assert stat.S_IMODE(again.stat().st_mode) == 0o750, "as any other folder of this user"


def test_zeros_have_a_scale_and_edges_are_blocks_of_their_own() -> None:
    weight = torch.randn(130, 160, generator=torch.Generator().manual_seed(1))
    weight[128:, 128:] = 0
    codes, scales = float8_blocks(weight)
    assert (codes.shape, scales.shape) == (weight.shape, (2, 2))
    assert scales[1, 1] == 1
    assert scales[1, 0] == weight[128:, :128].abs().max() / 448
    words, of_groups, shape = packed_integers(torch.zeros(3, 64), 4, 32)
    assert (words.shape, shape.tolist()) == ((3, 8), [3, 64])
    assert bool((of_groups == 1).all())
    assert set(words.flatten().tolist()) == {torch.tensor(0x88888888).to(torch.int32).item()}


@pytest.mark.parametrize("form", sorted(LAYOUTS))
def test_groups_of_zeros_of_one_sign_and_of_tiny_numbers_are_read_as_they_were(form: str) -> None:
    """A group whose scale would be zero, or no float16, must not make the whole weight one that is refused."""
    layout = LAYOUTS[form]
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(5))
    weight[:, :32] = 0
    weight[:, 32:64] = weight[:, 32:64].abs() + 3
    weight[3] = 0
    weight[5] *= 1e-9
    group = layout.columns(32)
    shapes, parts = layout.shapes(16, 128, group), layout.write(weight, group)
    stored = dict(zip(shapes, parts, strict=True))
    dtypes = {part: dtype for part, (dtype, _) in shapes.items()}
    assert {part: tuple(tensor.shape) for part, tensor in stored.items()} == {
        part: shape for part, (_, shape) in shapes.items()
    }
    config = layout.config(group, [])
    assert config.get("desc_act", False) is False
    said = read_quantization(JsonFields(Path("config.json"), {"quantization_config": config}))
    found = read_blocks(StoredWeight("layer", (16, 128), dtypes, stored.__getitem__, said, torch.float32))
    assert found is not None
    values = found.unpack()
    assert bool((values[:, :32] == 0).all())
    assert bool((values[3] == 0).all())
    steps = {"float8": 1 / 16, "mxfp8": 1 / 16, "nvfp4": 1 / 4, "mxfp4": 1 / 4, "int4": 1 / 14, "gptq4": 1 / 14}
    bound = {"awq": 1 / 14, "int8": 1 / 254, "gptq8": 1 / 254}.get(form) or steps[form]
    for number in range(1, 4):
        at = (slice(6, 16), slice(32 * number, 32 * number + 32))
        near = bound * 1.05 * float(weight[at].abs().max())
        torch.testing.assert_close(values[at], weight[at], rtol=0, atol=near)
    assert float((values[5] - weight[5]).abs().max()) < (1e-7 if form in {"awq", "gptq4", "gptq8"} else 1e-8)


def test_rows_that_fill_no_words_stay_dense() -> None:
    assert [LAYOUTS[form].fits(12, 64, 32) for form in ("awq", "gptq4", "gptq8", "int4")] == [False, False, True, True]
    assert [LAYOUTS[form].fits(16, 48, 32) for form in ("awq", "nvfp4", "mxfp4", "float8")] == [
        False, True, False, True,
    ]  # fmt: skip


# ------------------------------------------------------------ what is refused


def test_a_target_that_is_there_is_left_alone(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        converted(plain, tmp_path / "there", "int4")
    with pytest.raises(ConfigError, match="is no folder"):
        converted(plain, tmp_path / "no" / "such", "int4")
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_a_conversion_that_fails_leaves_nothing(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, shard: object) -> None:
        path.write_bytes(b"a part")
        raise CheckpointError("shorter")

    monkeypatch.setattr(convert_checkpoint, "_write_shard", fails)
    with pytest.raises(CheckpointError, match="shorter"):
        converted(plain, tmp_path / "target", "float8")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="has 1,000 bytes free, and the weights take"):
        converted(plain, tmp_path / "target", "float8")


def test_the_command_converts(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> int:
        return cli.run(command_line.parser().parse_args(["convert", *words]))

    target = tmp_path / "int4"
    assert run(str(plain), str(target), "--weights", "int4", "--group-size", "64") == 0
    assert json.loads((target / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    assert f"twinpool serve --model {target}" in capsys.readouterr().out
    assert run(str(plain), str(target), "--weights", "int4") == 2
    assert "is there already" in capsys.readouterr().err
