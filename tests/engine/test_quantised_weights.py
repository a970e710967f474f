"""Weights in blocks: every published layout is read to the numbers that it was written from, and answered with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor

from tests.engine.harness import Bench, MakeCheckpoint
from tests.support.checkpoints import Oracle, compare
from tests.support.family_checkpoint import rewrite_tensors, tensors_of
from tests.support.model_families import FAMILIES
from tests.support.quantised_checkpoints import LAYOUTS, QuantisedFolders, Written, quantised_names
from twinpool.cluster.assembly.build_parts import weights_digest
from twinpool.cluster.serve.preflight import weight_bytes
from twinpool.cluster.serve.terminal import weights_line
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.engine.models.registry import model_for
from twinpool.engine.runner.kernel_choice import class_of, weights_kept
from twinpool.engine.tensors.row_exact_linear import RowExactLinear
from twinpool.engine.tensors.shard import Shard, ShardAxis
from twinpool.engine.tensors.weight_loader import Weights
from twinpool.engine.weight_formats.block_weight import BlockStack, BlockWeight, Weight, dense, quantise, stack_rows

CPU = torch.device("cpu")
LAYER = "model.layers.1.mlp.down_proj"
Make = Callable[..., Written]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return QuantisedFolders(tmp_path_factory.mktemp("quantised"))


def loader(folder: Path, shard: Shard | None = None, *, keep: str = "as_stored") -> Weights:
    return Weights(read_model_spec(folder), torch.float32, CPU, shard or Shard(), keep=keep)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layer_is_read_to_the_numbers_that_it_was_written_from(written: Make, layout: str) -> None:
    both = written(layout)
    plain, layers = tensors_of(both.plain), list(quantised_names(both.stored))
    assert len(layers) > 10
    for layer in layers:
        want = plain[f"{layer}.weight"]
        found = loader(both.stored).weight(layer, *want.shape)
        assert isinstance(found, BlockWeight)
        torch.testing.assert_close(found.unpack(), want, rtol=2e-7, atol=0)
        assert torch.equal(loader(both.stored).tensor(f"{layer}.weight", *want.shape), found.unpack())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_answers_are_the_oracle_s_for_the_dequantised_weights(written: Make, layout: str) -> None:
    both = written(layout)
    bench, oracle = Bench(both.stored), Oracle(both.plain)
    prompts = [[(7 * i + seed) % 290 for i in range(length)] for seed, length in ((1, 5), (2, 33), (3, 90))]
    for prompt, answer in zip(prompts, bench.generate_many(prompts, 8), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_hold_their_parts(written: Make, layout: str) -> None:
    both = written(layout)
    n, k = tensors_of(both.plain)[f"{LAYER}.weight"].shape
    whole = dense(loader(both.stored).weight(LAYER, n, k))
    parts = [loader(both.stored, Shard(rank, 4)) for rank in range(4)]
    columns = [part.weight(LAYER, n, part.shard.axis(k)) for part in parts]
    assert torch.equal(torch.cat([dense(part) for part in columns], 1), whole)
    rows = [part.weight(LAYER, part.shard.axis(n), k) for part in parts]
    assert torch.equal(torch.cat([dense(part) for part in rows]), whole)
    assert all(isinstance(part, BlockWeight) for part in rows)


@pytest.mark.parametrize("layout", ["awq", "fp8-channel"])
def test_ranges_of_the_rows_of_a_weight_are_each_its_own(written: Make, layout: str) -> None:
    both = written(layout)
    n, k = tensors_of(both.plain)[f"{LAYER}.weight"].shape
    for folder in (both.stored, both.plain):
        whole = dense(loader(folder).weight(LAYER, n, k))
        ranges = [ShardAxis(n, 0, 8), ShardAxis(n, 16, n - 16), ShardAxis(n, 8, 8)]
        found = [dense(part) for part in loader(folder).ranges(LAYER, ranges, k)]
        wanted = [whole[one.here] for one in ranges]
        assert [part.shape for part in found] == [part.shape for part in wanted]
        assert all(torch.equal(part, want) for part, want in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("layout", "group"), [("awq", 32), ("packed-int4", 32), ("gptq-8", 32), ("nvfp4", 16)])
def test_a_part_that_begins_within_a_group_has_smaller_groups_of_the_same_numbers(
    written: Make, layout: str, group: int
) -> None:
    both = written(layout)
    n, k = tensors_of(both.plain)[f"{LAYER}.weight"].shape
    whole = dense(loader(both.stored).weight(LAYER, n, k))
    for first, count, wanted in ((0, 48, group), (16, 32, 16), (8, 48, 8), (group, 64, group), (24, k - 24, 8)):
        part = loader(both.stored).weight(LAYER, n, ShardAxis(k, first, count))
        assert isinstance(part, BlockWeight)
        assert part.group == min(wanted, group)
        assert torch.equal(part.unpack(), whole[:, first : first + count])
        x = torch.randn(5, count, generator=torch.Generator().manual_seed(first))
        assert torch.equal(RowExactLinear(part)(x), RowExactLinear(whole[:, first : first + count].contiguous())(x))


def test_a_part_that_can_not_stay_in_blocks_is_expanded(written: Make) -> None:
    for layout, first, count in (("awq", 20, 44), ("awq", 0, 33), ("gptq-ordered", 32, 64)):
        both = written(layout)
        n, k = tensors_of(both.plain)[f"{LAYER}.weight"].shape
        weights = loader(both.stored)
        part = weights.weight(LAYER, n, ShardAxis(k, first, count))
        assert isinstance(part, Tensor)
        assert weights.nbytes == part.nbytes
        assert torch.equal(part, dense(loader(both.stored).weight(LAYER, n, k))[:, first : first + count])


def test_weights_of_unlike_layouts_are_products_of_their_own_side_by_side(written: Make) -> None:
    spec = read_model_spec(written("awq").plain)
    weights = Weights(spec, torch.float32, CPU)
    generator = torch.Generator().manual_seed(5)
    plain = [torch.randn(n, 96, generator=generator) for n in (5, 7, 3, 9)]
    parts: list[Weight] = [quantise(plain[0], 4, 32), quantise(plain[1], 4, 32), plain[2], quantise(plain[3], 8, 32)]
    bias, x = torch.randn(24, generator=generator), torch.randn(6, 96, generator=generator)
    linear = weights.made(*parts, bias_n=bias)
    assert (linear.shape, linear.blocks, len(weights.linears)) == ((24, 96), True, 3)
    assert linear.nbytes == sum(part.nbytes for part in parts)
    whole = torch.cat([dense(part) for part in parts])
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, whole, bias))


MIXERS = (
    *(("deepseek_v3", "fp8-blocks"), ("deepseek_v32", "fp8-ue8m0"), ("glm5", "packed-int4"), ("nemotron_h", "int8")),
    *(("qwen3_next", "packed-int4-zeros"), ("qwen3_5", "fp8-blocks"), ("falcon_h1", "packed-int4")),
)


@pytest.mark.parametrize(("family", "layout"), MIXERS)
def test_products_of_every_mixer_stay_in_blocks(
    written: Make, family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = written(layout, family)
    weights, layers = loader(both.stored), list(quantised_names(both.stored))
    model, expanded, expand = model_for(weights.spec), list[int](), BlockWeight.expand

    def counted(*of: Any) -> Tensor:
        made = expand(*of)
        expanded.append(made.nbytes)
        return made

    monkeypatch.setattr(BlockWeight, "expand", counted)
    model.build(weights)
    monkeypatch.undo()
    plain = tensors_of(both.plain)
    absorbed = sum(plain[f"{layer}.weight"].nbytes for layer in layers if layer.endswith("kv_b_proj"))
    assert sum(expanded) == absorbed, "only a product that is absorbed into others is expanded"
    kinds = {layer.rpartition(".")[2] for layer in layers}
    assert kinds & {"kv_a_proj_with_mqa", "in_proj_qkvz", "in_proj_qkv", "in_proj"}
    header = weights.spec.headers
    dense_bytes = sum(h.end - h.begin for h in header.values() if h.dtype in {"F32", "BF16"} and len(h.shape) < 3)
    assert weights.nbytes < dense_bytes + absorbed + 0.4 * sum(plain[f"{layer}.weight"].nbytes for layer in layers)
    bench, oracle = Bench(both.stored), Oracle(both.plain)
    prompts = [[(7 * i + seed) % 290 for i in range(length)] for seed, length in ((1, 5), (2, 40))]
    for prompt, answer in zip(prompts, bench.generate_many(prompts, 6), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict


@pytest.mark.parametrize(
    "layout",
    ["packed-int4", "packed-int4-zeros", "packed-int8-channel", "int8", "fp8-channel", "nvfp4", "mxfp4", "mxfp8"],
)
def test_compressed_tensors_own_library_reads_the_same_numbers(written: Make, layout: str) -> None:
    both, said = written(layout), LAYOUTS[layout][0]
    groups = said["config_groups"]
    assert isinstance(groups, dict)
    compressor = BaseCompressor.get_value_from_registry(str(said["format"]))
    stored = {
        name.removeprefix(f"{LAYER}."): tensor
        for name, tensor in load_file(both.stored / "model.safetensors").items()
        if name.startswith(f"{LAYER}.")
    }
    theirs = compressor.decompress(stored, QuantizationScheme.model_validate(groups["group_0"]))["weight"]
    ours = dense(loader(both.stored).weight(LAYER, *theirs.shape))
    torch.testing.assert_close(ours, theirs.float(), rtol=5e-3, atol=0)


def test_weights_with_the_same_order_of_columns_are_stacked_in_blocks(written: Make) -> None:
    both = written("gptq-ordered")
    names = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up")]
    weights = loader(both.stored)
    n, k = tensors_of(both.plain)[f"{names[0]}.weight"].shape
    stacked = weights.stacked([weights.weight(name, n, k) for name in names])
    assert isinstance(stacked, BlockWeight)
    assert torch.equal(stacked.unpack(), torch.cat([dense(loader(both.stored).weight(name, n, k)) for name in names]))
    assert weights.nbytes == stacked.nbytes
    other = replace(stacked, order_k=torch.arange(k))
    mixed = weights.stacked([stacked, other])
    assert isinstance(mixed, BlockStack)
    assert torch.equal(mixed.dense(), torch.cat([stacked.unpack(), other.unpack()]))


def test_zero_points_of_older_files_lie_unpacked(written: Make, tmp_path: Path) -> None:
    both = written("packed-int4-zeros")

    def change(tensors: dict[str, Tensor]) -> None:
        packed = tensors[f"{LAYER}.weight_zero_point"].T.contiguous()
        points = torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1).T
        tensors[f"{LAYER}.weight_zero_point"] = (points - 8).to(torch.int8).contiguous()

    folder = changed(both, tmp_path / "older", change)
    n, k = tensors_of(both.plain)[f"{LAYER}.weight"].shape
    want = dense(loader(both.stored).weight(LAYER, n, k))
    assert torch.equal(dense(loader(folder).weight(LAYER, n, k)), want)


def test_the_text_model_of_others_has_their_quantisation(written: Make, tmp_path: Path) -> None:
    folder = changed(written("awq"), tmp_path / "wrapped", lambda tensors: None)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    said = config.pop("quantization_config")
    path.write_text(json.dumps({"architectures": config["architectures"], "text_config": config}))
    assert read_model_spec(folder).quantization.method == ""
    path.write_text(
        json.dumps({"architectures": config["architectures"], "text_config": config} | {"quantization_config": said})
    )
    assert read_model_spec(folder).quantization == read_model_spec(written("awq").stored).quantization
    path.write_text(json.dumps({"text_config": config, "quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(CheckpointError, match="'bitsandbytes' are not supported"):
        read_model_spec(folder)


def test_ranks_that_cut_through_groups_have_no_weights_quantised_when_loaded(written: Make) -> None:
    spec = read_model_spec(written("awq").plain)
    weights = Weights(spec, torch.float32, CPU, Shard(0, 4), keep="int4")
    n, k = tensors_of(written("awq").plain)[f"{LAYER}.weight"].shape
    with pytest.raises(ConfigError, match="gives 32 columns a scale, and tp=4 divides"):
        weights.weight(LAYER, n, ShardAxis(k, 0, 48))
    assert isinstance(weights.weight(LAYER, n, ShardAxis(k, 32, 32)), BlockWeight)


def test_names_are_looked_up_once_however_many_tensors_there_are(written: Make) -> None:
    """A scan of all names for each weight would take hours with the experts of a large mixture."""
    spec = read_model_spec(written("awq").plain)
    looks = 0

    class Counted(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            nonlocal looks
            looks += 1
            return super().__iter__()

        def items(self) -> Any:
            nonlocal looks
            looks += 1
            return super().items()

    model_for(spec).build(Weights.dry(replace(spec, headers=Counted(spec.headers))))
    assert looks <= 3


def test_awq_is_what_another_converter_reads(written: Make) -> None:
    both = written("awq")
    stored = {name: t for name, t in tensors_of(both.stored).items() if name.startswith(f"{LAYER}.")}
    theirs = AutoAWQConverter(4, 32).process(stored)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    scheme = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    }
    parts = {name.removeprefix(f"{LAYER}."): tensor for name, tensor in theirs.items()}
    want = compressor.decompress(parts, QuantizationScheme.model_validate(scheme))["weight"]
    ours = dense(loader(both.stored).weight(LAYER, *want.shape))
    torch.testing.assert_close(ours, want.float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_that_of_the_file(written: Make, layout: str) -> None:
    both = written(layout)
    header = read_model_spec(both.stored).headers
    stored = sum(h.end - h.begin for name, h in header.items() if name.startswith(f"{LAYER}.") and "shape" not in name)
    weights = loader(both.stored)
    n, k = tensors_of(both.plain)[f"{LAYER}.weight"].shape
    weights.weight(LAYER, n, k)
    dry = Weights.dry(weights.spec)
    dry.weight(LAYER, n, k)
    assert dry.nbytes == weights.nbytes or layout == "gptq-ordered"
    assert weights.nbytes < 0.6 * 4 * n * k
    assert weights.nbytes <= 1.3 * stored, "scales of blocks and rows are repeated, in tensors as small as these"


def test_expanded_weights_have_the_values_of_those_in_blocks(written: Make) -> None:
    both = written("gptq-ordered")
    n, k = tensors_of(both.plain)[f"{LAYER}.weight"].shape
    found = loader(both.stored, keep="dense").weight(LAYER, n, k)
    assert isinstance(found, Tensor)
    assert torch.equal(found, dense(loader(both.stored).weight(LAYER, n, k)))


# ------------------------------------------------------------ what is refused


def changed(both: Written, to: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The stored folder with other tensors."""
    to.mkdir()
    for file in both.stored.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = tensors_of(to)
    change(tensors)
    rewrite_tensors(to, tensors)
    return to


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Bench(folder)
    return str(caught.value)


@pytest.mark.parametrize(("layout", "part", "value"), [
    ("fp8-blocks", "weight_scale_inv", float("nan")), ("fp8-blocks", "weight_scale_inv", 0.0),
    ("awq", "scales", float("inf")), ("packed-int4", "weight_scale", 0.0), ("nvfp4", "weight_global_scale", 0.0),
    ("nvfp4", "weight_scale", float("nan")),
    ("fp8-ue8m0", "weight_scale_inv", float("nan")),
])  # fmt: skip
def test_a_scale_that_is_no_number_names_its_tensor(
    written: Make, tmp_path: Path, layout: str, part: str, value: float
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        flat = tensors[f"{LAYER}.{part}"].float().clone()
        flat.view(-1)[-1] = value
        tensors[f"{LAYER}.{part}"] = flat.to(tensors[f"{LAYER}.{part}"].dtype)

    text = refusal(changed(written(layout), tmp_path / "bad", change))
    assert LAYER in text
    assert "must be finite and not zero" in text


@pytest.mark.parametrize(("layout", "part"), [
    ("fp8-blocks", "weight_scale_inv"), ("packed-int4", "weight_scale"), ("awq", "qzeros"), ("awq", "scales"),
    ("gptq", "scales"), ("nvfp4", "weight_global_scale"), ("int8", "weight_scale"),
])  # fmt: skip
def test_a_part_that_is_missing_is_named_before_anything_is_read(
    written: Make, tmp_path: Path, layout: str, part: str
) -> None:
    folder = changed(written(layout), tmp_path / "bad", lambda tensors: tensors.pop(f"{LAYER}.{part}"))
    spec = read_model_spec(folder)
    with pytest.raises(CheckpointError, match=LAYER) as caught:
        model_for(spec).build(Weights.dry(spec))
    assert "is missing" in str(caught.value)


@pytest.mark.parametrize(("layout", "part"), [
    ("fp8-blocks", "weight_scale_inv"), ("packed-int4", "weight_scale"), ("packed-int4", "weight_packed"),
    ("awq", "qweight"), ("gptq", "scales"), ("gptq", "qzeros"), ("nvfp4", "weight_scale"), ("mxfp4", "weight_scale"),
    ("mxfp8", "weight_scale"),
])  # fmt: skip
def test_a_part_of_another_shape_is_named(written: Make, tmp_path: Path, layout: str, part: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{part}"] = tensors[f"{LAYER}.{part}"][:-1].contiguous()

    folder = changed(written(layout), tmp_path / "bad", change)
    spec = read_model_spec(folder)
    with pytest.raises(CheckpointError, match=LAYER):
        model_for(spec).build(Weights.dry(spec))


def test_float8_values_that_are_no_numbers_are_refused(written: Make, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.weight"].view(torch.uint8)[3, 5] = 0x7F

    assert "not a number" in refusal(changed(written("fp8-blocks"), tmp_path / "bad", change))


@pytest.mark.parametrize(("said", "text"), [
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not supported; supported are"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version must be one of gemm"),
    ({"quant_method": "awq", "bits": 3}, "bits is 3"),
    ({"quant_method": "gptq", "bits": 2}, "bits is 2; supported are 4 and 8"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format must be one of"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "two whole numbers"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized",
      "config_groups": {"group_0": {"weights": {"num_bits": 3, "type": "int"}}}}, "weights of 3 bits"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized",
      "transform_config": {"config_groups": {"R1": {}}}}, "with transforms"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo must be one of"),
    ({"bits": 4}, "without a quant_method"),
])  # fmt: skip
def test_a_method_that_is_not_known_is_refused_by_its_name(
    written: Make, tmp_path: Path, said: dict[str, object], text: str
) -> None:
    folder = changed(written("awq"), tmp_path / "other", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        read_model_spec(folder)
    assert text in str(caught.value)


@pytest.mark.parametrize(("said", "keys"), [
    ({"quant_method": "awq", "bits": 4}, []),
    ({"quant_method": "fp8"}, ["activations"]),
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": None}, []),
    ({"quant_method": "compressed-tensors", "format": "float-quantized",
      "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, ["kv_cache_scheme"]),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, ["activations", "kv_cache_quant_algo"]),
])  # fmt: skip
def test_what_a_checkpoint_declares_and_is_not_done_is_told_by_name(
    written: Make, tmp_path: Path, said: dict[str, object], keys: list[str]
) -> None:
    folder = changed(written("awq"), tmp_path / "other", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    told = " ".join(read_model_spec(folder).warnings)
    assert [key for key in ("activations", "kv_cache_scheme", "kv_cache_quant_algo") if key in told] == keys


# ------------------------------------------------------------ the value itself


@pytest.mark.parametrize("keep", ["int8", "int4"])
def test_a_weight_that_is_quantised_when_it_is_loaded_counts_as_it_is_kept(
    checkpoint: MakeCheckpoint, keep: str
) -> None:
    spec, layer = read_model_spec(checkpoint("llama")), "model.layers.0.mlp.up_proj"
    weights = Weights.dry(spec, keep=keep)
    (n, k) = spec.headers[f"{layer}.weight"].shape
    kept = weights.weight(layer, n, k)
    assert isinstance(kept, BlockWeight)
    assert weights.nbytes == kept.nbytes < n * k * (1.2 if keep == "int8" else 0.7)


def test_rows_of_weights_of_one_layout_are_one_weight_and_others_are_stacked() -> None:
    generator = torch.Generator().manual_seed(3)
    one, two = (torch.randn(n, 96, generator=generator) for n in (5, 7))
    both = stack_rows([quantise(one, 4, 32), quantise(two, 4, 32)])
    assert isinstance(both, BlockWeight)
    assert torch.equal(both.unpack(), torch.cat([quantise(w, 4, 32).unpack() for w in (one, two)]))
    mixed = stack_rows([quantise(one, 4, 32), quantise(two, 8, 32)])
    assert isinstance(mixed, BlockStack)
    assert torch.equal(mixed.dense(), torch.cat([quantise(one, 4, 32).unpack(), quantise(two, 8, 32).unpack()]))
    assert mixed.nbytes == quantise(one, 4, 32).nbytes + quantise(two, 8, 32).nbytes
    zeros = replace(quantise(two, 4, 32), zero=7)
    assert isinstance(stack_rows([quantise(one, 4, 32), zeros]), BlockStack)
    plain = stack_rows([mixed, two])
    assert isinstance(plain, Tensor), "one of them is dense"
    assert torch.equal(plain, torch.cat([mixed.dense(), two]))


@pytest.mark.parametrize(("bits", "step"), [(4, 1 / 14), (8, 1 / 254)])
def test_a_dense_weight_is_quantised_to_the_nearest_numbers(bits: int, step: float) -> None:
    weight = torch.randn(9, 80, generator=torch.Generator().manual_seed(4))
    weight[3, :32] = 0
    found = quantise(weight, bits, 32).unpack()
    largest = torch.nn.functional.pad(weight.abs(), (0, 16)).view(9, 3, 32).amax(-1).repeat_interleave(32, 1)[:, :80]
    assert bool(((found - weight).abs() <= largest * step * 1.0001).all())
    assert not found[3, :32].any()


# ------------------------------------------------------------ engine.weights


@pytest.mark.parametrize(("family", "kept", "bits"), [
    ("qwen3_moe", "int8", 8), ("qwen3_moe", "int4", 4), ("deepseek_v32", "int4", 4), ("qwen3_next", "int8", 8),
])  # fmt: skip
def test_dense_products_are_quantised_when_they_are_loaded(
    tmp_path: Path, family: str, kept: Literal["int8", "int4"], bits: int
) -> None:
    folder, plain = FAMILIES[family](tmp_path / "made"), tmp_path / "plain"
    shutil.copytree(folder, plain)
    tensors = tensors_of(folder)
    for name, tensor in tensors.items():
        left = ("kv_b_proj.weight", "weights_proj.weight", "in_proj_ba.weight")
        if name.endswith(("_proj.weight", "_with_mqa.weight", "_qkvz.weight")) and not name.endswith(left):
            tensors[name] = quantise(tensor.float(), bits, 32).unpack()
    rewrite_tensors(plain, tensors)
    bench, oracle = Bench(folder, weights=kept, dtype="float32"), Oracle(plain)
    prompts = [[(7 * i + seed) % 290 for i in range(length)] for seed, length in ((1, 5), (2, 40))]
    for prompt, answer in zip(prompts, bench.generate_many(prompts, 8), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict


def test_a_gpu_keeps_weights_as_a_cpu_does_but_where_torch_alone_computes() -> None:
    for kept in ("as_stored", "dense", "int8", "int4"):
        assert weights_kept(EngineConfig(weights=kept), gpu=True) == kept
        assert weights_kept(EngineConfig(weights=kept), gpu=False) == kept
    assert weights_kept(EngineConfig(attention="torch"), gpu=True) == "dense"
    assert weights_kept(EngineConfig(attention="torch", weights="dense"), gpu=True) == "dense"
    with pytest.raises(ConfigError, match=r"engine\.weights=int4 and engine\.attention=torch are for CPUs together"):
        weights_kept(EngineConfig(weights="int4", attention="torch"), gpu=True)


def test_state_of_weights_quantised_when_loaded_is_that_of_other_weights(written: Make) -> None:
    spec = read_model_spec(written("awq").stored)
    digests = {
        kept: weights_digest(spec, config_from_dict({"engine": {"weights": kept}}))
        for kept in ("as_stored", "dense", "int8", "int4")
    }
    assert digests["as_stored"] == digests["dense"] == spec.fingerprint
    assert len({*digests.values()}) == 3
    classes = {class_of(EngineConfig(weights=kept), torch.float32, CPU) for kept in ("as_stored", "dense", "int8")}
    assert len(classes) == 3, "they are rounded otherwise"


@pytest.mark.parametrize("layout", ["awq", "fp8-blocks", "nvfp4"])
def test_memory_is_planned_for_weights_as_they_are_kept(written: Make, layout: str) -> None:
    both = written(layout)
    spec = read_model_spec(both.stored)
    planned = {
        kept: weight_bytes(spec, config_from_dict({"engine": {"weights": kept}})) for kept in ("as_stored", "dense")
    }
    for kept, nbytes in planned.items():
        weights = loader(both.stored, keep=kept)
        model_for(spec).build(weights)
        assert nbytes == weights.nbytes
    assert planned["as_stored"] < 0.6 * planned["dense"]
    on_gpu = config_from_dict({"engine": {"device": "cuda"}})
    assert weight_bytes(spec, on_gpu) == planned["as_stored"]
    alone = config_from_dict({"engine": {"device": "cuda", "attention": "torch"}})
    assert weight_bytes(spec, alone) == planned["dense"]


@pytest.mark.parametrize(("folder", "engine", "words"), [
    ("stored", {}, "awq, as stored: 1.0 MiB a worker"),
    ("stored", {"weights": "dense"}, "awq, expanded: 1.0 MiB a worker"),
    ("stored", {"device": "cuda"}, "awq, as stored: 1.0 MiB a worker"),
    ("stored", {"device": "cuda", "attention": "torch"}, "awq, expanded: 1.0 MiB a worker"),
    ("stored", {"weights": "int4"}, "awq, as stored, dense ones int4: 1.0 MiB a worker"),
    ("plain", {"weights": "int4"}, "dense, int4, quantised when loaded: 1.0 MiB a worker"),
    ("plain", {}, ""), ("plain", {"weights": "dense"}, ""),
])  # fmt: skip
def test_serve_tells_how_weights_are_kept(written: Make, folder: str, engine: dict[str, str], words: str) -> None:
    spec = read_model_spec(getattr(written("awq"), folder))
    prepared: Any = SimpleNamespace(spec=spec, config=config_from_dict({"engine": engine}), weights=1 << 20)
    assert weights_line(prepared) == words
