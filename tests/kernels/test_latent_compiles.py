"""The latent kernels compile for NVIDIA GPUs at the shapes of the published models; no GPU is needed for that."""

from __future__ import annotations

import pytest

from tests.kernels.claims import Said

SHARED_LIMIT = 227 * 1024
"""Bytes of shared memory that a program may have on a GPU of compute capability 9.0."""

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.runs("compiled_latent.py")]


def test_every_kernel_compiles_and_fits_into_shared_memory(said: Said) -> None:
    assert len(said) == 8
    assert all(kernel["shared"] <= SHARED_LIMIT for kernel in said.values()), said


def test_float32_is_never_multiplied_as_tf32_and_nothing_is_added_in_racing_order(said: Said) -> None:
    for kernel in said.values():
        assert "tf32" not in kernel["words"]
        assert "atom." not in kernel["words"]


def test_extend_and_decode_multiply_tiles_with_one_kind_of_instruction(said: Said) -> None:
    assert "wgmma" in said["latent_extend bf16"]["words"]
    assert "wgmma" in said["latent_split bf16"]["words"]
