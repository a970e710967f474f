"""Whole workers on one card, in this process: the hand-over's exposed time, and goodput.

    python -m bench.gpu.gpu_serving [--model qwen3-8b-cut] [--rates 4 8 16 32] [--json FILE]

Sides: a pool of prefill and one of decode beside each other on the card, one colocated worker, and transformers'
continuous batching where it can run, one after the other. There is no router and no Ray
(`tests.support.process_cluster`).

1. Hand-over: prompts one at a time; what of their transfer ran beside the computation and what could be seen, beside
   the time that the card takes to copy as many bytes in one block. And both ways give the same tokens.
2. Goodput within TTFT 1 s and ITL 40 ms at each rate, beside the rate at which products alone would fill the card.
   What two pools hand over, a colocated worker saves.

What there is so far is written after each figure.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import bench.gpu
from bench.common import random_model
from bench.common.bench_report import flag_parser, write_figures
from bench.gpu.goodput import Goodput, Load, ServingSide, Slo, run_load
from bench.gpu.gpu_limits import Ceilings, measure_ceilings
from bench.gpu.serving_rival import ContinuousRival
from tests.support.process_cluster import ProcessCluster
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.ids import PAIR, Role

_POOLS: dict[str, Sequence[Role]] = {"two pools": PAIR, "colocated": (Role.COLOCATED,)}
_WARM_S = 120.0
_ANSWER_S = 60.0


@dataclass(frozen=True)
class Setting:
    """How large everything is."""

    model: str
    device: str
    lengths: tuple[int, ...]
    """Prompts of the hand-over's part."""
    rounds: int
    prompt_tokens: tuple[int, int]
    output_tokens: int
    rates: tuple[float, ...]
    load_s: float
    pool_tokens: int
    chunk_tokens: int
    rows: int
    """Of a decode step."""

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        return {
            "engine": {"device": self.device, "threads": 1},
            "prefill": {"chunk_tokens": self.chunk_tokens},
            "decode": {"max_batch_tokens": self.rows, "metadata_slots": max(16, self.rows)},
        }


CARD = Setting(
    "qwen3-8b-cut", "cuda:0", (512, 2048, 3584), 3, (256, 1536), 64, (4, 8, 16, 32, 64), 4.0, 131_072, 2048, 256
)
REHEARSAL = Setting("4m", "cpu", (24, 40), 1, (8, 24), 4, (20.0,), 0.3, 2048, 32, 8)


class SectionRun:
    """The figures so far, written after each of them."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.figures: dict[str, Any] = {}
        self.wrong: list[str] = []

    def add(self, part: str, name: str, figures: object) -> None:
        self.figures.setdefault(part, {})[name] = figures
        write_figures(self._file, {**self.figures, "wrong": self.wrong})


def warmed(cluster: ServingSide, setting: Setting, vocab: int) -> None:
    """Compile what loads need: prompts alone and together. Raises `RuntimeError` where no answer comes."""
    low, high = setting.prompt_tokens
    for count in (1, 2, 4, setting.rows // 2):
        random = np.random.default_rng(count)
        lengths = np.linspace(low, high, count).astype(int)
        asked = [cluster.ask(random.integers(vocab // 2, vocab, n).tolist(), setting.output_tokens) for n in lengths]
        if not cluster.wait(asked, _WARM_S) or any(one.failed for one in asked):
            raise RuntimeError(f"{cluster.name}: no answer to warm up: {[one.failed for one in asked if one.failed]}")


def measure_handover(run: SectionRun, folder: Path, setting: Setting, ceilings: Ceilings, vocab: int) -> None:
    """Prompts one at a time on both kinds of cluster."""
    answers: dict[str, list[list[int]]] = {}
    for name, roles in _POOLS.items():
        cluster = ProcessCluster(folder, roles, setting.pool_tokens, setting.sections)
        try:
            random = np.random.default_rng(5)
            found: dict[str, Any] = {}
            answers[name] = []
            for tokens in setting.lengths:
                rounds = []
                for number in range(setting.rounds + 1):
                    one = cluster.ask(random.integers(vocab // 2, vocab, tokens).tolist(), 8)
                    if not cluster.wait([one], _ANSWER_S) or one.failed:
                        raise RuntimeError(f"{name}: no answer to a prompt of {tokens}: {one.failed}")
                    answers[name].append(one.answer)
                    rounds += [one] if number else []
                found[str(tokens)] = {
                    "transfer_bytes": rounds[0].transfer_bytes,
                    "block_ms": 2e3 * rounds[0].transfer_bytes / ceilings.bytes_per_s,
                    **{
                        f"{mark}_ms": 1e3 * statistics.median(one.marks.get(mark, 0.0) for one in rounds)
                        for mark in ("hidden", "exposed")
                    },
                    "first_token_ms": 1e3 * statistics.median(one.times_s[0] for one in rounds),
                    "second_token_ms": 1e3 * statistics.median(one.times_s[1] for one in rounds),
                }
            run.wrong += [f"{name}: {line}" for line in cluster.check()]
        finally:
            cluster.close()
        run.add("handover", name, found)
        for length, each in found.items():
            print(
                f"hand-over, {name}, {length} tokens: {each['transfer_bytes'] / 2**20:.1f} MiB, "
                f"exposed {each['exposed_ms']:.2f} ms, hidden {each['hidden_ms']:.2f} ms "
                f"(one block {each['block_ms']:.2f} ms), "
                f"tokens at {each['first_token_ms']:.1f} and {each['second_token_ms']:.1f} ms",
                flush=True,
            )
    if answers["two pools"] != answers["colocated"]:
        run.wrong.append("a prompt got other tokens from two pools than from a colocated worker")


def measure_goodput(
    run: SectionRun, made: dict[str, Callable[[], Any]], setting: Setting, slo: Slo, limit: float, vocab: int
) -> None:
    """All rates on one side after the other; a side that doesn't get through a rate isn't asked at a higher one."""
    for name, make in made.items():
        try:
            cluster = make()
        except Exception as error:  # What a rival raises where it can't run here is its own.
            _not_run(run, name, error)
            continue
        try:
            _rates(run, name, cluster, setting, slo, limit, vocab)
        except Exception as error:
            _not_run(run, name, error)
        finally:
            cluster.close()
            del cluster
            gc.collect()


def _not_run(run: SectionRun, name: str, error: Exception) -> None:
    """Say so, and raise it where it is one of ours."""
    if name in _POOLS:
        raise error
    begun = name in run.figures.get("goodput", {})
    run.add("goodput", f"{name}, further" if begun else name, {"not_run": f"{type(error).__name__}: {error}"[:300]})
    print(f"goodput, {name}: not run: {error}", flush=True)


def _rates(run: SectionRun, name: str, cluster: Any, setting: Setting, slo: Slo, limit: float, vocab: int) -> None:
    """All rates on one side."""
    began = time.monotonic()
    warmed(cluster, setting, vocab)
    print(f"goodput, {name}: warm after {time.monotonic() - began:.1f} s", flush=True)
    found: list[dict[str, Any]] = []
    for rate in setting.rates:
        load = Load(rate, setting.load_s, setting.prompt_tokens, setting.output_tokens)
        came, over = run_load(cluster, load, vocab, slo)
        found.append(asdict(came) | {"limit_per_s": limit})
        run.add("goodput", name, found)
        _say(name, came, limit)
        if not over or came.good < came.requests / 4:
            break
    if name in _POOLS and found and not any(one["failed"] for one in found):
        run.wrong += [f"{name}: {line}" for line in cluster.check()] if over else []


def _say(name: str, came: Goodput, limit: float) -> None:
    said = (
        f"{came.good} of {came.requests} good, {came.goodput_per_s:.2f} good/s (products allow {limit:.1f})",
        f"TTFT {came.ttft_ms[0]:.0f} / {came.ttft_ms[1]:.0f} ms",
        f"ITL {came.itl_ms[0]:.1f} / {came.itl_ms[1]:.1f} ms",
        f"{came.output_tokens_per_s:.0f} tokens/s",
        f"{came.transfer_bytes / 2**20:.0f} MiB handed over",
        *(f"failed: {why}" for why in came.failed[:1]),
    )
    print(f"goodput, {name}, {came.rate:g} requests/s: {', '.join(said)}", flush=True)


def run_parts(run: SectionRun, folder: Path, setting: Setting, parts: Sequence[str], slo: Slo) -> None:
    """The parts asked for, as far as the time goes."""
    device = torch.device(setting.device)
    small = device.type == "cpu"
    vocab = read_model_spec(folder).vocab_size
    ceilings = measure_ceilings(device, *((1, 64) if small else (1024, 8192)))
    run.add("about", "ceilings", asdict(ceilings))
    run.add("about", "process_sockets", bench.gpu.STANDS_IN)
    # Of each request: operations of all its tokens, the output's head among them.
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    tokens = sum(setting.prompt_tokens) / 2 + setting.output_tokens
    limit = ceilings.flops_per_s / (2 * stored / torch.bfloat16.itemsize * tokens)
    sides: dict[str, Callable[[], Any]] = {
        name: lambda roles=roles: ProcessCluster(folder, roles, setting.pool_tokens, setting.sections)  # type: ignore[misc]
        for name, roles in _POOLS.items()
    }
    sides[ContinuousRival.name] = lambda: ContinuousRival(folder, setting.pool_tokens, device, setting.chunk_tokens)
    todo: dict[str, Callable[[], None]] = {
        "handover": lambda: measure_handover(run, folder, setting, ceilings, vocab),
        "goodput": lambda: measure_goodput(run, sides, setting, slo, limit, vocab),
    }
    for part in parts:
        todo[part]()
        gc.collect()
        if not small:
            torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    parts = ["handover", "goodput"]
    flags.add_argument("--parts", nargs="+", choices=parts, default=parts, help="default: all, in this order")
    flags.add_argument("--model", choices=random_model.NAMES, help=f"default: {CARD.model}")
    flags.add_argument("--rates", type=float, nargs="+", help="of arrivals, requests a second")
    flags.add_argument("--ttft-s", type=float, default=Slo().ttft_s)
    flags.add_argument("--itl-s", type=float, default=Slo().itl_s)
    flags.add_argument("--rehearse", action="store_true", help="on the CPU, in small")
    args = flags.parse_args(argv)
    if min(args.ttft_s, args.itl_s, *(args.rates or [1.0])) <= 0:
        flags.error("rates and limits must be more than 0")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    setting = REHEARSAL if args.rehearse else CARD
    changes = {"model": args.model, "rates": args.rates and tuple(args.rates)}
    setting = replace(setting, **{name: value for name, value in changes.items() if value})
    run, began = SectionRun(args.json), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twinpool-gpu-") as made:
        kind = torch.device(setting.device).type
        folder = random_model.make(Path(made) / setting.model, setting.model, device=kind)
        print(f"{setting.model} was made in {time.monotonic() - began:.1f} s", flush=True)
        run_parts(run, folder, setting, args.parts, Slo(args.ttft_s, args.itl_s))
    for one in run.wrong:
        print(f"WRONG {one}")
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
