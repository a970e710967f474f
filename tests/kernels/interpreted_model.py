"""A whole model on the kernels; run as a script by `test_model_on_kernels.py`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.engine.harness import Bench
from tests.kernels.claims import answer
from tests.support.model_families import FAMILIES
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.attention.triton_backend.triton_attention import TritonAttention
from twinpool.engine.gpu.gpu_kernels import GpuKernels
from twinpool.engine.layers.mixers import triton_store_heads
from twinpool.engine.layers.moe import triton_experts
from twinpool.engine.runner.sampling import triton_draw

TOKENS = [3, 250, 17, 17, 90, 4, 201, 33, 5]


def claim_a_mixture_of_experts_computes_with_the_kernels_what_it_computes_with_torch() -> None:
    used: set[str] = set()

    def noted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*given: Any) -> Any:
            used.add(name)
            return run(*given)

        return noting

    for name in ("product", "rms_norm", "add_rms_norm"):
        setattr(GpuKernels, name, noted(name, getattr(GpuKernels, name)))
    experts = triton_experts.TritonExperts
    experts._product = noted("experts", experts._product)  # type: ignore[method-assign]
    triton_store_heads.store_heads = noted("heads", triton_store_heads.store_heads)
    triton_draw.sample = noted("draw", triton_draw.sample)
    with tempfile.TemporaryDirectory() as folder:
        FAMILIES["qwen3_moe"](Path(folder), num_hidden_layers=2)
        torchs, tritons = Bench(Path(folder)), Bench(Path(folder), attention="triton")
        assert isinstance(tritons.engine.attention, TritonAttention)
        got, want = (bench.forced(TOKENS, [5, 3, 1]) for bench in (tritons, torchs))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        params = SamplingParams(max_tokens=3, temperature=1.0, top_k=20, top_p=0.9, seed=5)
        answers = [bench.generate_many([TOKENS[:4]], 3, params=[params]) for bench in (tritons, torchs)]
        assert answers[0] == answers[1]
    assert used == {"experts", "heads", "draw", "product", "rms_norm", "add_rms_norm"}


if __name__ == "__main__":
    answer(globals())
