"""The engine on a GPU beside transformers on the same GPU, checkpoints and dtype, in the same run.

    python -m bench.gpu.gpu_engine [--models qwen3-8b-cut] [--batches 1 16 64] [--json FILE]

Weights are random. Prefill: tokens a second of one prompt; decode: tokens a second of a batch once all of its sequences
have their first token. Sides (ours with `engine.numerics: invariant` and `fast`, and transformers) take turns, and
medians are shown, each over what the GPU's ceilings allow (`bench.gpu.gpu_limits`). Beside the speed it says for how
many sequences the tokens are transformers', and checks one thing that must hold bit for bit: a sequence alone and the
same in a batch get the same tokens. What one model came to is written before the next begins.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bench.common import random_model
from bench.common.engines_compared import Generate, Twinpool
from bench.engine.engine_speed import SpeedScenario, measure
from bench.gpu.gpu_limits import Ceilings, measure_ceilings
from cache.device.device_backends import CpuDevice, CudaDevice
from cache.device.device_port import Device
from contracts.checkpoint.model_spec import read_model_spec
from contracts.config.worker_config import EngineConfig

_CHECKED_TOKENS = 16
MODELS = ["qwen3-445m", "qwen3-8b-cut", "deepseek-v3.2-cut"]
"""The small one first: what runs out of time or memory costs the others nothing."""


def alone_and_in_a_batch(side: Twinpool, vocab: int, batch: int, context: int) -> int:
    """How many of `batch` sequences get other tokens alone than together."""
    prompts = np.random.default_rng(7).integers(vocab // 2, vocab, (batch, context)).tolist()
    together = side.run(prompts, _CHECKED_TOKENS).tokens
    alone = [side.run([prompt], _CHECKED_TOKENS).tokens[0] for prompt in prompts]
    return sum(mine != got for mine, got in zip(alone, together, strict=True))


def measured(
    folder: Path,
    name: str,
    device: Device,
    scenarios: Sequence[SpeedScenario],
    args: argparse.Namespace,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """One model on all sides: its figures, which are printed as well."""
    model = random_model.make(folder / name, name, device=device.torch_device.type)
    vocab = read_model_spec(model).vocab_size
    tokens = max(s.batch * (s.prompt_tokens + max(s.output_tokens, _CHECKED_TOKENS) + 32) for s in scenarios)
    attention = "auto" if args.rehearse else "triton"
    configs = [EngineConfig(attention=attention, numerics=kind) for kind in ("invariant", "fast")]  # type: ignore[arg-type]
    ours = [Twinpool(model, config, tokens, max(args.batches), device=device) for config in configs]
    theirs = Generate(model, configs[0], device.torch_device)
    results = measure([*ours, theirs], scenarios, vocab, args.repeats)
    differing = alone_and_in_a_batch(ours[0], vocab, min(8, max(args.batches)), args.context)
    weights = sum(p.numel() * p.element_size() for p in theirs.model.parameters())
    token_bytes = ours[0].pools.spec.page_bytes // ours[0].pools.spec.page_tokens
    figures: dict[str, Any] = {}
    for scenario in scenarios:
        by_side = results[scenario.name]
        limit = ceilings.predicted(scenario, weights, weights // theirs.model.dtype.itemsize, token_bytes)
        base = by_side[theirs.name]
        figures[scenario.name] = {side: asdict(m) | {"median": m.median} for side, m in by_side.items()}
        figures[scenario.name]["predicted limit"] = limit
        said = [f"{side} {m.median:.1f} ({m.median / base.median:.2f}, {m.median / limit:.0%} of the limit)"
                for side, m in by_side.items() if side != theirs.name]  # fmt: skip
        print(f"{name}, {scenario.name}: {'; '.join(said)}; {theirs.name} {base.median:.1f} tokens/s, its tokens in "
              f"{statistics.fmean(base.equal):.0%} of sequences", flush=True)  # fmt: skip
    print(f"{name}: {differing} sequences get other tokens alone than in a batch", flush=True)
    return {"tokens_per_s": figures, "differing_in_a_batch": differing}


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--models", nargs="+", choices=random_model.NAMES, default=MODELS, help="default: %(default)s")
    flags.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    flags.add_argument("--prefill-tokens", type=int, default=2048)
    flags.add_argument("--context", type=int, default=512, help="prompt tokens before decode")
    flags.add_argument("--output-tokens", type=int, default=65, help="of a decode run, the first uncounted")
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--json", type=Path, help="write all figures to this file, after every model")
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    args = flags.parse_args(argv)
    if args.rehearse:
        args.models, args.batches, args.prefill_tokens, args.context, args.output_tokens = ["4m"], [1, 2], 24, 12, 3
        args.repeats = 1
    if min(*args.batches, args.prefill_tokens, args.context, args.repeats) < 1 or args.output_tokens < 2:
        flags.error("batches, tokens and repeats must be 1 or more, --output-tokens 2 or more")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    device: Device = CpuDevice() if args.rehearse else CudaDevice()
    ceilings = measure_ceilings(device.torch_device, *((1, 64) if args.rehearse else (1024, 8192)))
    print(f"ceilings: {ceilings.bytes_per_s / 1e9:.0f} GB/s, {ceilings.flops_per_s / 1e12:.1f} TFLOP/s", flush=True)
    scenarios = [SpeedScenario(1, args.prefill_tokens, 1)]
    scenarios += [SpeedScenario(batch, args.context, args.output_tokens) for batch in args.batches]
    found: dict[str, Any] = {}
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder:
            found[name] = measured(Path(folder), name, device, scenarios, args, ceilings)
        if device.torch_device.type == "cuda":
            print(f"peak device memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
            gc.collect()
            torch.cuda.empty_cache()
        if args.json is not None:
            out = {"ceilings": asdict(ceilings), "models": found}
            args.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return 1 if any(model["differing_in_a_batch"] for model in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
