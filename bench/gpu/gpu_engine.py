"""The engine on a GPU beside transformers on the same GPU, checkpoints and dtype, in the same run.

    python -m bench.gpu.gpu_engine [--models qwen3-8b-cut] [--batches 1 16 64] [--json FILE]

Weights are random. Prefill: tokens a second of one prompt; decode: tokens a second of a batch once all of its sequences
have their first token. Sides (ours with `engine.numerics: invariant` and `fast`, and transformers) take turns, and
medians are shown, each over what the GPU's ceilings allow (`bench.gpu.gpu_limits`). Beside the speed it says for how
many sequences the tokens are transformers', and checks two things that must hold bit for bit: a sequence alone and the
same in a batch get the same tokens, and so do one whose steps are replayed from step graphs and one whose steps are
launched kernel by kernel. What a scenario came to is written before the next begins; a side that has no memory for one,
or that transformers doesn't know, is left out there and told.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from bench.common import random_model
from bench.common.bench_report import flag_parser, write_figures
from bench.common.engines_compared import Generate, Side
from bench.engine.engine_speed import Measured, SpeedScenario, measure
from bench.gpu.gpu_limits import Ceilings, ModelCost, measure_ceilings
from tests.support.bare_engine import Answer, Prompts, Twinpool
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.cuda_device import CudaDevice
from twinpool.cache.device.device_port import Device
from twinpool.contracts.checkpoint.model_spec import ModelSpec, read_model_spec
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import TwinpoolError
from twinpool.engine.runner.graphs.step_graphs import CudaCapture

_CHECKED_TOKENS = 16
_CAPTURE_S = 10.0
"""Seconds in which a side's step graphs may be begun."""
MODELS = ["qwen3-8b-cut", "deepseek-v3.2-cut", "qwen3-445m"]
"""The first ones matter most: what runs out of time costs the last."""


class EngineRun:
    """The figures so far, written as they come."""

    def __init__(self, args: argparse.Namespace, device: Device, ceilings: Ceilings) -> None:
        self.args, self.device, self.ceilings = args, device, ceilings
        self.models: dict[str, Any] = {}

    def write(self) -> None:
        write_figures(self.args.json, {"ceilings": asdict(self.ceilings), "models": self.models})


_CHECKS = ("failed", "differing_in_a_batch", "differing_when_replayed")
"""What of a model's figures says, if there is anything, that the section failed."""


def alone_and_in_a_batch(side: Twinpool, vocab: int, batch: int, context: int) -> int:
    """How many of `batch` sequences get other tokens alone than together."""
    prompts = np.random.default_rng(7).integers(vocab // 2, vocab, (batch, context)).tolist()
    together = side.run(prompts, _CHECKED_TOKENS).tokens
    alone = [side.run([prompt], _CHECKED_TOKENS).tokens[0] for prompt in prompts]
    return sum(mine != got for mine, got in zip(alone, together, strict=True))


class KernelByKernel:
    """A side's engine without its step graphs."""

    def __init__(self, side: Twinpool) -> None:
        self.name = f"{side.name}, kernel by kernel"
        self._side = side

    def run(self, prompts: Prompts, count: int) -> Answer:
        engine = self._side.engine
        graphs, engine.graphs = engine.graphs, None
        try:
            return self._side.run(prompts, count)
        finally:
            engine.graphs = graphs

    def close(self) -> None: ...


def capture_steps(run: EngineRun, side: Twinpool, positions: int) -> str:
    """Capture a side's steps as a worker does when it starts; returns what came of it, in words."""
    device = run.device.torch_device
    if device.type != "cuda":
        return "none: a CPU has nothing to capture"
    began = time.monotonic()
    try:
        side.engine.capture(CudaCapture(device), rows=max(run.args.batches), context=positions, within_s=_CAPTURE_S)
    except (TwinpoolError, RuntimeError) as error:
        return f"FAILED: {type(error).__name__}: {error}"[:300]
    graphs = side.engine.graphs
    assert graphs is not None
    return f"{len(graphs)} of {len(graphs.sizes)} in {time.monotonic() - began:.1f} s"


def cost_of(spec: ModelSpec, folder: Path, page_bytes: float) -> ModelCost:
    """By the checkpoint's tensors. `page_bytes`: of a position."""
    stored = sum(header.end - header.begin for header in spec.headers.values())
    routed = sum(h.end - h.begin for name, h in spec.headers.items() if ".experts." in name)
    values = spec.config.values
    total, taken = (values.get(key) for key in ("n_routed_experts", "num_experts_per_tok"))
    chosen = taken / total if isinstance(total, int) and isinstance(taken, int) and routed else 0.0
    return ModelCost(stored - routed, torch.bfloat16.itemsize, int(page_bytes), routed, chosen)


def measure_model(run: EngineRun, folder: Path, name: str, scenarios: Sequence[SpeedScenario]) -> None:
    """One model on all sides: its figures, which are printed as well."""
    args, device = run.args, run.device
    model = random_model.make(folder / name, name, device=device.torch_device.type)
    spec = read_model_spec(model)
    vocab = spec.vocab_size
    tokens = max(s.batch * (s.prompt_tokens + max(s.output_tokens, _CHECKED_TOKENS) + 32) for s in scenarios)
    attention = "auto" if args.rehearse else "triton"
    configs = [EngineConfig(attention=attention, numerics=kind) for kind in ("invariant", "fast")]  # type: ignore[arg-type]
    ours = [Twinpool(model, config, tokens, max(args.batches), device=device) for config in configs]
    for side in ours:
        side.chunk_tokens = args.chunk_tokens
    into: dict[str, Any] = {"tokens_per_s": {}, "left_out": {}}
    run.models[name] = into
    sides: list[Side] = [*ours]
    longest = max(s.prompt_tokens + max(s.output_tokens, _CHECKED_TOKENS) for s in scenarios)
    into["graphs"] = {side.name: capture_steps(run, side, longest) for side in ours}
    print(f"{name}: step graphs: {into['graphs']}", flush=True)
    if ours[0].engine.graphs is not None:
        plain = KernelByKernel(ours[0])
        sides.append(plain)
        prompts = np.random.default_rng(3).integers(vocab // 2, vocab, (min(5, max(args.batches)), 48)).tolist()
        pairs = zip(*(side.run(prompts, _CHECKED_TOKENS).tokens for side in (ours[0], plain)), strict=True)
        into["differing_when_replayed"] = sum(a != b for a, b in pairs)
        print(f"{name}: {into['differing_when_replayed']} sequences get other tokens from graphs", flush=True)
    try:
        sides.append(Generate(model, configs[0], device.torch_device))
    except Exception as error:  # A model that this version of transformers doesn't know, or no memory for it.
        into["left_out"]["transformers generate"] = f"{type(error).__name__}: {error}"[:200]
        print(f"{name}: without transformers: {error}"[:200], flush=True)
    into["differing_in_a_batch"] = alone_and_in_a_batch(ours[0], vocab, min(8, max(args.batches)), args.context)
    print(f"{name}: {into['differing_in_a_batch']} sequences get other tokens alone than in a batch", flush=True)
    run.write()
    cost = cost_of(spec, model, ours[0].pools.spec.page_bytes / ours[0].pools.spec.page_tokens)
    for scenario in scenarios:
        left_out: dict[str, str] = {}

        def no_memory(scenario: str, side: str, error: Exception, left_out: dict[str, str] = left_out) -> None:
            left_out[side] = f"no memory: {error}"[:200]
            gc.collect()
            torch.cuda.empty_cache()

        found = measure(sides, [scenario], vocab, args.repeats, no_memory)[scenario.name]
        limit = run.ceilings.predicted(scenario, cost)
        figures: dict[str, Any] = {side: asdict(m) | {"median": m.median} for side, m in found.items()}
        into["tokens_per_s"][scenario.name] = figures | {"predicted limit": limit}
        into["left_out"] |= {f"{scenario.name}, {side}": why for side, why in left_out.items()}
        run.write()
        _say(name, scenario, found, left_out, limit)


def _say(
    name: str, scenario: SpeedScenario, found: dict[str, Measured], left_out: dict[str, str], limit: float
) -> None:
    base = found.get("transformers generate")
    said = []
    for side, m in found.items():
        over = f"{m.median / base.median:.2f}, " if base is not None and m is not base else ""
        said.append(f"{side} {m.median:.1f} ({over}{m.median / limit:.0%} of the limit)")
    same = f"; its tokens in {statistics.fmean(base.equal):.0%} of sequences" if base is not None and base.equal else ""
    out = "".join(f"; {side}: {why[:60]}" for side, why in left_out.items())
    print(f"{name}, {scenario.name}: {'; '.join(said)} tokens/s{same}{out}", flush=True)


def measure_all(run: EngineRun, scenarios: Sequence[SpeedScenario]) -> None:
    """All models, each in a folder of its own; one that fails costs the others nothing."""
    for name in run.args.models:
        try:
            with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as folder:
                measure_model(run, Path(folder), name, scenarios)
        except Exception as error:
            run.models.setdefault(name, {})["failed"] = f"{type(error).__name__}: {error}"[:500]
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
        if run.device.torch_device.type == "cuda":
            print(f"peak device memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
        gc.collect()
        if run.device.torch_device.type == "cuda":
            torch.cuda.empty_cache()
        run.write()


def main(argv: Sequence[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    flags.add_argument("--models", nargs="+", choices=random_model.NAMES, default=MODELS, help="default: %(default)s")
    flags.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    flags.add_argument("--prefill-tokens", type=int, default=2048)
    flags.add_argument("--chunk-tokens", type=int, default=2048, help="of our prefill")
    flags.add_argument("--context", type=int, default=512, help="prompt tokens before decode")
    flags.add_argument("--output-tokens", type=int, default=33, help="of a decode run, the first uncounted")
    flags.add_argument("--repeats", type=int, default=2)
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    args = flags.parse_args(argv)
    if args.rehearse:
        args.models, args.batches, args.prefill_tokens, args.context, args.output_tokens = ["4m"], [1, 2], 24, 12, 3
        args.repeats = 1
    least = min(*args.batches, args.prefill_tokens, args.chunk_tokens, args.context, args.repeats)
    if least < 1 or args.output_tokens < 2:
        flags.error("batches, tokens and repeats must be 1 or more, --output-tokens 2 or more")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    device: Device = CpuDevice() if args.rehearse else CudaDevice()
    ceilings = measure_ceilings(device.torch_device, *((1, 64) if args.rehearse else (1024, 8192)))
    print(f"ceilings: {ceilings.bytes_per_s / 1e9:.0f} GB/s, {ceilings.flops_per_s / 1e12:.1f} TFLOP/s", flush=True)
    scenarios = [SpeedScenario(1, args.prefill_tokens, 1)]
    scenarios += [SpeedScenario(batch, args.context, args.output_tokens) for batch in args.batches]
    run = EngineRun(args, device, ceilings)
    measure_all(run, scenarios)
    bad = [name for name, model in run.models.items() if any(model.get(check) for check in _CHECKS)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
