"""The claims about products with weights in blocks on a GPU; run as a script by `test_block_kernels_of_gpus.py`.

The interpreter cuts float32 off where a GPU rounds it to bfloat16, so claims are of float32 and float16.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tests.engine.harness import Bench
from tests.engine.test_block_kernels import KINDS, gguf_weight, weight
from tests.kernels.claims import answer
from tests.support.checkpoints import Oracle, compare
from tests.support.model_families import FAMILIES
from tests.support.quantised_checkpoints import quantise_folder
from twinpool.engine.gpu import block_kernels
from twinpool.engine.gpu.gpu_blocks import GpuBlocks
from twinpool.engine.gpu.gpu_kernels import BLOCK_K, BlockProducts, GpuKernels
from twinpool.engine.layers.moe import expert_kernels
from twinpool.engine.layers.moe.experts import ExpertRoutes, gated_silu
from twinpool.engine.layers.moe.triton_experts import StackedProducts, TritonExperts
from twinpool.engine.native.current_kernels import using
from twinpool.engine.tensors.row_exact_linear import RowExactLinear
from twinpool.engine.weight_formats.block_weight import BlockStack, BlockWeight, Code, pack_codes, quantise
from twinpool.engine.weight_formats.gguf_formats import GGUF_TYPES

KERNELS = GpuKernels(part=2 * BLOCK_K)
SHAPES = ((70, 96, 32), (257, 300, 128), (32, 32, 16), (64, 34, 32), (33, 120, 40), (5, 24, 8), (130, 192, 64),
          (20, 130, 200))  # fmt: skip


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(of: BlockWeight | BlockStack | Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    with using(KERNELS):
        linear = RowExactLinear(of, bias)
        assert linear.row_exact
        assert isinstance(linear.product, BlockProducts) is not isinstance(of, Tensor)
        return linear(x)


def check_bits(blocks: BlockWeight, rows: tuple[int, ...] = (1, 70)) -> None:
    n, k = blocks.shape
    x, bias = draw(max(rows), k, seed=6), draw(n, seed=5)
    small = float(blocks.unpack().abs().max()) < 64  # Sums fit into float16.
    for dtype in (torch.float32, torch.float16) if small else (torch.float32,):
        expanded = product(blocks.unpack(dtype=dtype), x.to(dtype), bias)
        for count in rows:
            got = product(replace(blocks, dtype=dtype), x[:count].to(dtype), bias)
            assert torch.equal(got, expanded[:count]), (blocks.code, blocks.scales.dtype, n, k, dtype, count)


def claim_bits_are_those_of_the_unpacked_weight_for_every_code_and_scale() -> None:
    for code, scale, zeros in KINDS:
        blocks = weight(code, scale, 70, 160, 32, zeros=zeros)
        check_bits(blocks)
        if code is not Code.E4M3 and scale != torch.uint8:
            check_bits(replace(blocks, scales=(blocks.scales.float() / 128).to(scale)))
        if scale == torch.uint8:
            least, x = replace(blocks, scales=torch.zeros_like(blocks.scales)), draw(1, 160)
            assert torch.equal(product(least, x), product(least.unpack(), x)), "of the least power of two"
            assert bool(product(least, x).any())


def claim_bits_are_those_of_the_unpacked_weight_for_every_shape() -> None:
    for n, k, group in SHAPES:
        check_bits(weight(Code.UINT4, torch.float16, n, k, group, zeros=True))
        check_bits(weight(Code.E4M3, torch.uint8, n, k, group), (3,))
    many, small = draw(600, 8), weight(Code.E4M3, torch.float32, 70, 8, 8)
    assert torch.equal(product(small, many), product(small.unpack(), many)), "tiles of two groups"


def claim_rows_may_lie_apart_or_across_or_be_none() -> None:
    blocks, x = weight(Code.UINT4, torch.float16, 70, 96, 32, zeros=True), draw(9, 96)
    want, wide = product(blocks, x), draw(9, 200)
    wide[:, 50:146] = x
    assert torch.equal(product(blocks, wide[:, 50:146]), want)
    assert torch.equal(product(blocks, x.T.contiguous().T), want)
    assert product(blocks, x[:0]).shape == (0, 70)


def claim_bits_are_those_of_the_unpacked_weight_for_every_type_of_gguf() -> None:
    for kind in sorted(GGUF_TYPES):
        check_bits(gguf_weight(kind, 20, 512), (2,))


def claim_a_rank_s_part_has_the_bits_of_the_part_unpacked() -> None:
    for kind in ("Q4_K", "Q6_K", "Q3_K"):
        part = gguf_weight(kind, 20, 512).part(slice(4, 16), slice(256, 512))
        assert part is not None
        check_bits(part, (2,))
    part = weight(Code.UINT4, torch.float16, 40, 256, 128, zeros=True).part(slice(8, 32), slice(64, 192))
    assert part is not None
    check_bits(part, (2,))


def claim_a_row_has_the_same_bits_alone_and_in_any_batch() -> None:
    blocks, x = weight(Code.UINT4, torch.float16, 70, 300, 100, zeros=True), draw(150, 300)
    want = product(blocks, x)
    for rows in (slice(0, 1), slice(149, 150), slice(3, 20), slice(10, 75)):
        assert torch.equal(product(blocks, x[rows]), want[rows]), rows


def claim_numbers_of_float8_and_of_four_bit_floats_are_torchs() -> None:
    """Every code there is, through the product: rows of the identity, so that a sum has one term."""
    for code, values in ((Code.E4M3, 256), (Code.E2M1, 16)):
        numbers = torch.arange(values, dtype=torch.uint8)
        if code is Code.E4M3:
            numbers[(numbers & 0x7F) == 0x7F] = 0
        codes = pack_codes(numbers.view(1, -1), code)
        blocks = BlockWeight(code, codes, torch.ones(1, 1), values, torch.float32)
        got = product(blocks, torch.eye(values))[:, 0]
        table = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        four = torch.tensor([*table, *(-value for value in table)])
        want = numbers.view(torch.float8_e4m3fn).float() if code is Code.E4M3 else four
        assert torch.equal(got, want), code


def claim_reordered_columns_are_multiplied_with_their_own_inputs() -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(7))
    blocks = replace(weight(Code.UINT4, torch.float16, 70, 96, 32, zeros=True), order_k=order)
    x, bias = draw(5, 96, seed=1), draw(70, seed=2)
    want = x.double() @ blocks.unpack().double().T + bias
    torch.testing.assert_close(product(blocks, x, bias), want.float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(product(blocks, x[3:4], bias), product(blocks, x, bias)[3:4])


def claim_weights_of_unlike_types_that_are_stacked_have_the_bits_of_each() -> None:
    parts = (gguf_weight("Q4_K", 70, 512), gguf_weight("Q6_K", 5, 512))
    x, bias = draw(3, 512), draw(75, seed=1)
    want = torch.cat([product(parts[0], x, bias[:70]), product(parts[1], x, bias[70:])], dim=-1)
    assert torch.equal(product(BlockStack(parts), x, bias), want)


def claim_rows_are_looked_up() -> None:
    blocks = gguf_weight("Q4_K", 70, 512)
    rows = torch.tensor([0, 69, 31, 31])
    with using(KERNELS):
        assert torch.equal(RowExactLinear(blocks)[rows], blocks.unpack()[rows])


def claim_a_weight_takes_the_bytes_of_the_file() -> None:
    blocks = weight(Code.UINT4, torch.float16, 64, 256, 128, zeros=True)
    assert GpuBlocks.of([blocks]).nbytes == 64 * 128 + 64 * 2 * (2 + 1)
    assert GpuBlocks.of([blocks] * 3).nbytes == 3 * blocks.nbytes


# ------------------------------------------------------------ experts


def claim_experts_in_blocks_have_the_bits_of_the_experts_expanded() -> None:
    makes: tuple[Callable[[int, int, int], BlockWeight], ...] = (
        lambda seed, n, k: quantise(draw(n, k, seed=seed), 4, 16),
        lambda seed, n, k: replace(weight(Code.E2M1, torch.uint8, n, k, 32), codes=drawn_codes(seed, n, k)),
        lambda seed, n, k: replace(weight(Code.UINT4, torch.float16, n, k, 8, zeros=True), codes=drawn_codes(seed, n, k)),  # noqa: E501
    )  # fmt: skip
    for make, hidden, inner in zip(makes, (40, 40, 72), (32, 32, 40), strict=True):
        ups = [make(number, 2 * inner, hidden) for number in range(5)]
        downs = [make(100 + number, hidden, inner) for number in range(5)]
        biases = [draw(2 * inner, seed=200 + number) for number in range(5)]
        none = [None] * 5
        blocks = StackedProducts.of(ups, biases), StackedProducts.of(downs, none)
        assert all(isinstance(stacked.weight_enk, GpuBlocks) for stacked in blocks)
        plain = (
            StackedProducts.of([up.unpack() for up in ups], biases),
            StackedProducts.of([down.unpack() for down in downs], none),
        )
        chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:2] for t in range(37)])
        routes = ExpertRoutes(chosen, torch.rand(37, 2, generator=torch.Generator().manual_seed(3)))
        x = draw(37, hidden, seed=9) / 8
        got, want = (TritonExperts(*stacked, gated_silu, rows=16)(x, routes) for stacked in (blocks, plain))
        assert torch.equal(got, want)
        assert bool(torch.isfinite(got).all())
        assert float(got.abs().max()) > 0


def drawn_codes(seed: int, n: int, k: int) -> Tensor:
    return torch.randint(0, 256, (n, k // 2), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def claim_experts_that_kernels_can_not_read_are_expanded() -> None:
    """Those of unlike layouts, of columns in another order, and of rows that are to be quantised."""
    four, eight = (quantise(draw(64, 40, seed=bits), bits, 8) for bits in (4, 8))
    ordered = replace(four, order_k=torch.randperm(40, generator=torch.Generator().manual_seed(7)))
    for experts in ([four, eight], [ordered, ordered], [four, ordered], [replace(four, inputs="int8")] * 2):
        stacked = StackedProducts.of(experts, [None, None])
        assert isinstance(stacked.weight_enk, Tensor)
        for found, expert in zip(stacked.weight_enk, experts, strict=True):
            assert torch.equal(found, expert.unpack())
    assert KERNELS.packed_blocks(BlockStack((four, replace(four, inputs="int8"))), None) is None


# ------------------------------------------------------------ whole models


def claim_models_in_blocks_answer_as_transformers_does_with_the_weights_dequantised() -> None:
    for family, layout in (("llama", "awq"), ("qwen3_moe", "fp8-blocks"), ("llama", "gptq-ordered")):
        launched: set[str] = set()
        for module, name in ((block_kernels, "block_product_kernel"), (expert_kernels, "grouped_block_kernel")):
            note(module, name, launched)
        with tempfile.TemporaryDirectory() as folder:
            FAMILIES[family](Path(folder) / "plain")
            both = quantise_folder(Path(folder) / "plain", layout, Path(folder) / "both")
            bench, oracle = Bench(both.stored, dtype="float32", attention="triton"), Oracle(both.plain)
            prompt = [3, 250, 17, 17, 90, 4, 201, 33, 5]
            verdict = compare(oracle, prompt, bench.generate_many([prompt], 3)[0])
            assert verdict.equal, (family, layout, verdict)
        assert launched == {"block_product_kernel"} | ({"grouped_block_kernel"} if family == "qwen3_moe" else set())


def note(module: object, name: str, launched: set[str]) -> None:
    kernel = getattr(module, name)
    kernel = getattr(kernel, "kernel", kernel)

    class Noting:
        def __init__(self) -> None:
            self.kernel = kernel
            self.fn = getattr(kernel, "fn", kernel)

        def __getitem__(self, grid: object) -> object:
            launched.add(name)
            return kernel[grid]

    setattr(module, name, Noting())


if __name__ == "__main__":
    answer(globals())
