"""Products whose rows are quantised to int8: bit for bit their definition, with every build of the kernels and every
code; a row the same in any company; and whole models that are served so, beside transformers with the same inputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.engine.harness import Bench
from tests.engine.native import BUILDS, kernels_or_skip
from tests.engine.test_block_kernels import KINDS, SHAPES, gguf_weight, source, weight
from tests.support.checkpoints import Oracle, compare
from tests.support.quantised_checkpoints import QuantisedFolders, Written, quantised_names
from tests.support.tile_chain import int8_product, quantised_rows
from twinpool.cluster.serve.preflight import weight_bytes
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError
from twinpool.engine.native.current_kernels import using
from twinpool.engine.native.native_kernels import NativeKernels
from twinpool.engine.runner.kernel_choice import class_of, inputs_of
from twinpool.engine.tensors.row_exact_linear import RowExactLinear
from twinpool.engine.weight_formats.block_weight import BlockWeight, Code, Inputs, pack_codes, quantised_inputs
from twinpool.engine.weight_formats.gguf_formats import GGUF_TYPES

CPU = torch.device("cpu")
ROWS = (1, 2, 3, 5, 7, 12, 13, 17)
WHOLE = [kind for kind in KINDS if kind[0] is not Code.E4M3]
BOTH: tuple[Inputs, ...] = ("int8", "int8_by_row")
WANTED: dict[tuple[object, ...], Tensor] = {}
"""What the definition gives, which takes longer than all builds' products: once for all of them."""


@pytest.fixture(scope="module", params=BUILDS)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return kernels_or_skip(request.param)


def check_bits(kernels: NativeKernels, named: tuple[object, ...], blocks: BlockWeight) -> None:
    n, k = blocks.shape
    bias, x = torch.randn(n, generator=source(5)), torch.randn(max(ROWS), k, generator=source(6))
    x[3] *= 1e-3
    for inputs in BOTH:
        quantising = blocks.with_inputs(inputs)
        assert quantising.inputs == inputs
        for dtype in (torch.float32, torch.bfloat16):
            key = (*named, inputs, dtype)
            if key not in WANTED:
                WANTED[key] = int8_product(x.to(dtype), quantising, bias)
            with using(kernels):
                linear = RowExactLinear(replace(quantising, dtype=dtype), bias)
            for rows in ROWS:
                assert torch.equal(linear(x[:rows].to(dtype)), WANTED[key][:rows]), (inputs, dtype, rows)


def fits(k: int, group: int) -> bool:
    return not group % 32 or group in (8, 16) or group >= k


@pytest.mark.parametrize(("n", "k", "group"), [shape for shape in SHAPES if fits(*shape[1:])])
@pytest.mark.parametrize(("code", "scale", "zeros"), WHOLE, ids=str)
def test_bits_are_those_of_the_definition(
    kernels: NativeKernels, code: Code, scale: torch.dtype, zeros: bool, n: int, k: int, group: int
) -> None:
    blocks = weight(code, scale, n, k, group, zeros=zeros)
    check_bits(kernels, (code, scale, zeros, n, k, group), blocks)


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_bits_of_a_gguf_type_are_those_of_the_definition(kernels: NativeKernels, kind: str) -> None:
    check_bits(kernels, (kind,), gguf_weight(kind, 37, 256))


@pytest.mark.parametrize("code", [Code.UINT4, Code.UINT6, Code.UINT8, Code.IQ4])
def test_the_largest_codes_and_numbers_fit_into_what_adds_them_up(kernels: NativeKernels, code: Code) -> None:
    top = torch.full((40, 96), 2**code.bits - 1, dtype=torch.uint8)
    blocks = BlockWeight(code, pack_codes(top, code), torch.ones(40, 3), 32, torch.float32)
    x = torch.stack([torch.ones(96), -torch.ones(96)])
    for inputs in BOTH:
        with using(kernels):
            linear = RowExactLinear(blocks.with_inputs(inputs))
        assert torch.equal(linear(x), int8_product(x, blocks.with_inputs(inputs)))


def test_more_rows_than_are_added_up_at_once_and_rows_that_lie_apart(kernels: NativeKernels) -> None:
    blocks = weight(Code.UINT4, torch.float32, 40, 96, 32).with_inputs("int8")
    wide = torch.randn(300, 200, generator=source(8))
    with using(kernels):
        linear = RowExactLinear(blocks)
    together = linear(wide[:, 50:146])
    assert torch.equal(together, linear(wide[:, 50:146].contiguous()))
    for first in range(0, 300, 50):
        assert torch.equal(together[first : first + 50], linear(wide[first : first + 50, 50:146]))


def test_reordered_columns_are_quantised_in_the_order_of_the_weight(kernels: NativeKernels) -> None:
    order = torch.randperm(96, generator=source(7))
    blocks = replace(weight(Code.UINT4, torch.float16, 70, 96, 32, zeros=True), order_k=order).with_inputs("int8")
    x = torch.randn(5, 96, generator=source(9))
    want = int8_product(x, blocks)
    with using(kernels):
        linear = RowExactLinear(blocks)
    assert torch.equal(linear(x), want)
    assert torch.equal(linear[torch.tensor([5, 66])], blocks.unpack()[[5, 66]])
    with using(None):
        torch.testing.assert_close(RowExactLinear(blocks)(x), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_rows_that_are_looked_up_are_those_of_the_unpacked_weight(kernels: NativeKernels, kind: str) -> None:
    rows = torch.tensor([0, 69, 31, 32, 31])
    for dtype in (torch.float32, torch.bfloat16):
        blocks = gguf_weight(kind, 70, 256, dtype).with_inputs("int8")
        with using(kernels):
            table = RowExactLinear(blocks)
        assert torch.equal(table[rows], blocks.unpack()[rows].to(dtype))
        with pytest.raises(IndexError, match="of a weight of 70"):
            table[torch.tensor([3, 70])]


def test_what_is_not_finite_makes_its_own_row_so_and_small_values_are_zero(kernels: NativeKernels) -> None:
    blocks = weight(Code.UINT8, torch.float32, 40, 96, 32).with_inputs("int8")
    with using(kernels):
        linear = RowExactLinear(blocks)
    x = torch.randn(6, 96, generator=source(9))
    clean = linear(x)
    x[1, 40], x[3, 2], x[4], x[5] = float("nan"), float("inf"), 2.0**-120, 2.0**-99
    found = linear(x)
    assert not torch.isfinite(found[1]).any()
    assert not torch.isfinite(found[3]).any()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert not found[4].any()
    torch.testing.assert_close(found[5], (x[5:].double() @ blocks.unpack().double().T)[0].float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("inputs", "size"), [("int8", 32), ("int8_by_row", 100)])
def test_inputs_are_the_nearest_numbers_times_their_scale(inputs: Inputs, size: int) -> None:
    x = torch.randn(7, 100, generator=source(3)) * torch.logspace(-3, 3, 7).unsqueeze(1)
    numbers, scales = quantised_rows(x, size)
    assert torch.equal(quantised_inputs(x, inputs), (numbers * scales.double()).float())
    assert numbers.abs().max() == 127
    assert torch.equal(quantised_inputs(x, "float"), x)


@pytest.mark.parametrize(("code", "group"), [(Code.E4M3, 32), (Code.UINT4, 24), (Code.UINT4, 48)])
def test_rows_stay_as_they_are_where_codes_or_groups_do_not_fit(code: Code, group: int) -> None:
    blocks = weight(code, torch.float32, 16, 96, group)
    assert blocks.with_inputs("int8") == replace(blocks, inputs="float")


def test_a_row_with_one_scale_whose_sums_would_not_fit_stays_as_it_is() -> None:
    for columns, inputs in ((1 << 16, "int8_by_row"), ((1 << 16) + 32, "float")):
        codes = torch.full((1, columns), 255, dtype=torch.uint8)
        blocks = BlockWeight(Code.UINT8, codes, torch.ones(1, 1), columns, torch.float32).with_inputs("int8_by_row")
        assert blocks.inputs == inputs
        x = torch.ones(1, columns)
        with using(kernels_or_skip()):
            assert float(RowExactLinear(blocks)(x)) == pytest.approx(255 * columns, rel=1e-6)


# ------------------------------------------------------------ whole models


Make = Callable[..., Written]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Make:
    base = tmp_path_factory.mktemp("int8")
    folders = QuantisedFolders(base)

    def make(layout: str, family: str = "llama", **inputs: object) -> Written:
        """The checkpoint, which declares `inputs` where there are any."""
        written = folders(layout, family)
        if not inputs:
            return written
        declared = base / f"{family}-{layout}-declared-{len(list(base.iterdir()))}"
        shutil.copytree(written.stored, declared)
        config = json.loads((declared / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs
        (declared / "config.json").write_text(json.dumps(config))
        return Written(declared, written.plain)

    return make


W8A8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def quantising_oracle(both: Written, size: int) -> Oracle:
    """transformers with the dequantised weights in float64, whose products of layers that are stored in blocks have
    their inputs quantised; `size`: columns of a block, 0: a row."""
    oracle = Oracle(both.plain, "float64")
    stored = set(quantised_names(both.stored))
    assert stored

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = inputs[0].float().flatten(0, -2)
        numbers, scales = quantised_rows(rows, size or rows.shape[1])
        return ((numbers * scales.double()).view(inputs[0].shape),)

    hooked = [
        module.register_forward_pre_hook(before)
        for name, module in oracle.model.named_modules()
        if isinstance(module, nn.Linear) and name in stored
    ]
    assert len(hooked) == len(stored)
    return oracle


PROMPTS = [[(7 * i + seed) % 290 for i in range(length)] for seed, length in ((1, 5), (2, 33), (3, 40))]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "inputs", "activations", "size"), [
    ("int8", W8A8, "as_stored", 0), ("packed-int4", W8A8, "as_stored", 0), ("packed-int4-zeros", {}, "int8", 32),
    ("int8", W8A8, "int8", 32), ("awq", {}, "int8", 32),
])  # fmt: skip
def test_answers_are_the_oracle_s_with_the_same_inputs(
    written: Make, layout: str, inputs: dict[str, object], activations: str, size: int
) -> None:
    both = written(layout, **inputs)
    bench, oracle = Bench(both.stored, activations=activations), quantising_oracle(both, size)
    for prompt, answer in zip(PROMPTS, bench.generate_many(PROMPTS, 6), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict


@pytest.mark.slow
def test_answers_are_the_dequantised_model_s_where_float_is_asked_for(written: Make) -> None:
    both = written("int8", **W8A8)
    bench, oracle = Bench(both.stored, activations="float"), Oracle(both.plain)
    for prompt, answer in zip(PROMPTS, bench.generate_many(PROMPTS, 6), strict=True):
        verdict = compare(oracle, prompt, answer)
        assert verdict.equal, verdict


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [
    ("gpt_oss", "packed-int4"), ("deepseek_v3", "packed-int4-zeros"), ("qwen3_next", "int8"), ("qwen3_moe", "gptq"),
])  # fmt: skip
def test_answers_are_the_same_alone_in_a_batch_and_in_chunks(written: Make, family: str, layout: str) -> None:
    bench = Bench(written(layout, family).stored, activations="int8")
    together = bench.generate_many(PROMPTS, 6)
    assert [bench.generate_many([prompt], 6)[0] for prompt in PROMPTS] == together
    chunked = bench.forced(PROMPTS[2], [7] * 5 + [5])
    assert torch.equal(chunked, bench.forced(PROMPTS[2], [40]))


@pytest.mark.parametrize(("inputs", "declared"), [
    (W8A8, True), (W8A8 | {"dynamic": False, "strategy": "tensor"}, True), (W8A8 | {"num_bits": 4}, False),
    (W8A8 | {"type": "float"}, False),
])  # fmt: skip
def test_int8_inputs_are_what_a_checkpoint_of_whole_numbers_declares(
    written: Make, inputs: dict[str, object], declared: bool
) -> None:
    spec = read_model_spec(written("int8", **inputs).stored)
    assert spec.quantization.int8_inputs is declared
    assert ("quantised activations" in " ".join(spec.warnings)) is not declared
    assert inputs_of(EngineConfig(), spec.quantization, gpu=False) == ("int8_by_row" if declared else "float")
    assert inputs_of(EngineConfig(activations="float"), spec.quantization, gpu=False) == "float"
    assert inputs_of(EngineConfig(), spec.quantization, gpu=True) == "float"


def test_layers_that_declare_unlike_inputs_are_multiplied_with_them_as_they_are(written: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(written("int8", **W8A8).stored, tmp_path / "mixed")
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = groups["group_0"] | {"input_activations": None}
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(folder)
    assert not spec.quantization.int8_inputs
    assert "quantised activations" in " ".join(spec.warnings)


def test_state_of_quantised_inputs_is_that_of_other_ones() -> None:
    configs = EngineConfig(), EngineConfig(activations="float"), EngineConfig(activations="int8")
    assert len({class_of(config, torch.float32, CPU) for config in configs}) == 3


def test_int8_is_refused_where_nothing_is_multiplied_so(written: Make) -> None:
    both, asked = written("packed-int4"), config_from_dict({"engine": {"activations": "int8"}})
    plain, stored = read_model_spec(both.plain), read_model_spec(both.stored)
    with pytest.raises(ConfigError, match=r"activations=int8.*weights=int8 or int4"):
        weight_bytes(plain, asked)
    with pytest.raises(ConfigError, match=r"activations=int8.*weights=int8 or int4"):
        Bench(both.plain, activations="int8")
    assert weight_bytes(stored, asked) == weight_bytes(stored, config_from_dict({}))
    on_gpu = config_from_dict({"engine": {"activations": "int8", "device": "cuda"}})
    with pytest.raises(ConfigError, match=r"activations=int8 is for CPUs"):
        weight_bytes(stored, on_gpu)
