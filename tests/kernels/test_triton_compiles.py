"""The Triton kernels compile for NVIDIA GPUs; no GPU is needed for that."""

from __future__ import annotations

import pytest

from tests.kernels.claims import Said

pytestmark = [pytest.mark.slow, pytest.mark.runs("compiled_claims.py")]


def test_every_kernel_compiles_for_both_dtypes(said: Said) -> None:
    assert len(said) == 10 + 6


def test_float32_is_never_multiplied_as_tf32(said: Said) -> None:
    for kind in ("", "windowed "):
        assert said[f"{kind}extend fp32"] == said[f"{kind}decode_split fp32"] == ["fma.rn.f32"]


def test_extend_and_decode_multiply_tiles_with_one_kind_of_instruction(said: Said) -> None:
    for kind in ("", "windowed "):
        assert "wgmma" in said[f"{kind}extend bf16"]
        assert "wgmma" in said[f"{kind}decode_split bf16"]


@pytest.mark.soak
@pytest.mark.runs("compiled_rows.py")
def test_kernels_by_row_and_of_experts_compile_with_the_instructions_they_should_have(said: Said) -> None:
    assert len(said) == 5
    assert "wgmma" in said["product bf16"]
    assert said["product fp32"] == ["fma.rn.f32"], "float32 is never multiplied as TF32"
    assert "fma.rn.f64" in said["draw"]


@pytest.mark.runs("compiled_products.py")
def test_a_product_has_one_matrix_instruction_whatever_its_rows(said: Said) -> None:
    instructions = [found["instructions"] for kind, found in said.items() if kind.endswith("bf16")]
    assert len(instructions) == 3
    assert [len(each) for each in instructions] == [1, 1, 1]
    assert len({each[0] for each in instructions}) == 1, "else a row's bits would follow from the size of its batch"
    assert all(found["asynchronous"] and not found["tf32"] for found in said.values())
