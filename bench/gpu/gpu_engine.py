"""The engine on a GPU beside transformers on the same GPU, checkpoint and dtype, in the same run.

    python -m bench.gpu.gpu_engine [--model qwen3-445m] [--batches 1 16 64] [--json FILE]

Weights are random. Prefill: tokens a second of one prompt; decode: tokens a second of a batch once all of its sequences
have their first token. Sides take turns, and medians are shown. Beside the speed it says for how many sequences the
tokens are transformers', and checks one thing that must hold bit for bit: a sequence alone and the same in a batch get
the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import transformers

from bench.common import random_model
from bench.common.engines_compared import Generate, Side, Twinpool
from bench.engine.engine_speed import SpeedScenario, measure
from cache.device.device_backends import CpuDevice, CudaDevice
from cache.device.device_port import Device
from contracts.checkpoint.model_spec import read_model_spec
from contracts.config.worker_config import EngineConfig

_CHECKED_TOKENS = 16


def alone_and_in_a_batch(side: Twinpool, vocab: int, batch: int, context: int) -> int:
    """How many of `batch` sequences get other tokens alone than together."""
    prompts = np.random.default_rng(7).integers(vocab // 2, vocab, (batch, context)).tolist()
    together = side.run(prompts, _CHECKED_TOKENS).tokens
    alone = [side.run([prompt], _CHECKED_TOKENS).tokens[0] for prompt in prompts]
    return sum(mine != got for mine, got in zip(alone, together, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", choices=random_model.NAMES, default="qwen3-445m", help="default: %(default)s")
    flags.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    flags.add_argument("--prefill-tokens", type=int, default=2048)
    flags.add_argument("--context", type=int, default=512, help="prompt tokens before decode")
    flags.add_argument("--output-tokens", type=int, default=65, help="of a decode run, the first uncounted")
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--json", type=Path, help="write all figures to this file")
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    args = flags.parse_args(argv)
    if args.rehearse:
        args.model, args.batches, args.prefill_tokens, args.context, args.output_tokens = "4m", [1, 2], 24, 12, 3
        args.repeats = 1
    if min(*args.batches, args.prefill_tokens, args.context, args.repeats) < 1 or args.output_tokens < 2:
        flags.error("batches, tokens and repeats must be 1 or more, --output-tokens 2 or more")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    device: Device = CpuDevice() if args.rehearse else CudaDevice()
    config = EngineConfig(attention="auto" if args.rehearse else "triton")
    scenarios = [SpeedScenario(1, args.prefill_tokens, 1)]
    scenarios += [SpeedScenario(batch, args.context, args.output_tokens) for batch in args.batches]
    tokens = max(s.batch * (s.prompt_tokens + max(s.output_tokens, _CHECKED_TOKENS) + 32) for s in scenarios)
    with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder:
        model = random_model.make(Path(folder) / args.model, args.model)
        vocab = read_model_spec(model).vocab_size
        ours = Twinpool(model, config, tokens, max(args.batches), device=device)
        sides: list[Side] = [ours, Generate(model, config, device.torch_device)]
        results = measure(sides, scenarios, vocab, args.repeats)
        differing = alone_and_in_a_batch(ours, vocab, min(8, max(args.batches)), args.context)
    if device.torch_device.type == "cuda":
        print(f"peak device memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    figures = {s: {n: asdict(m) | {"median": m.median} for n, m in by.items()} for s, by in results.items()}
    for scenario, by_side in results.items():
        mine, theirs = (by_side[side.name] for side in sides)
        same = statistics.fmean(theirs.equal)
        print(f"{scenario:24} {mine.median:9.1f} tokens/s, transformers {theirs.median:9.1f}, ratio "
              f"{mine.median / theirs.median:.2f}; its tokens in {same:.0%} of sequences")  # fmt: skip
    print(f"{differing} sequences get other tokens alone than in a batch")
    if args.json is not None:
        out = {"model": args.model, "tokens_per_s": figures, "differing_in_a_batch": differing}
        args.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
