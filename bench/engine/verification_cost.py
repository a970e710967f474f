"""What verification costs: whole requests through both real workers, with and without tags and epochs, in the same run.

    python -m bench.engine.verification_cost                       # the demo, and a made model of 60 M parameters
    python -m bench.engine.verification_cost --models demo 445m --threads 2

Four sides take turns on the same two workers, each with new prompts:

    all         as served: pages and states are sealed, checked when they arrive and when they are loaded, and each
                step compares its block tables with the epoch tables
    no tags     nothing is sealed or checked: digests are zeros, made without reading
    no epochs   steps compare nothing
    none        neither

`prefill` is prompt tokens a second of the prefill worker's time, `decode` generated tokens a second of the decode
worker's, `load` prompt tokens a second of the prefill worker's time when all but their ends come from its host tier.
The workers take turns in one process, and the time of each is its own steps'. Two figures tell the same:

- what `all` lacks of the rate of each other side, compared within a round; medians, with the middle half of all rounds
  in brackets. It has everything in it, and the noise of two runs.
- the share of its time that `all` spends inside the checks themselves (digests and comparisons of epochs). It lacks
  what goes on around them (some comparisons of lists), and a busy machine hardly changes it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.common import bench_clock as clock
from bench.common import machine, random_model
from twinpool.cache.tiers.load_back import LoadBack
from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.cluster.assembly.memory_plan import plan_memory, state_options
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.contracts.ids import PAIR, Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import PeerRef, Submit
from twinpool.contracts.messages.worker_events import Done, Tokens
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.worker import DecodeWorker
from twinpool.engine.layers.forward_context import ForwardContext
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner.planned_step import PlannedStep
from twinpool.prefill.worker import PrefillWorker

P = ParamSpec("P")
T = TypeVar("T")

SESSION = SessionId(1)
SIDES: dict[str, tuple[bool, bool]] = {
    "all": (True, True),
    "no tags": (False, True),
    "no epochs": (True, False),
    "none": (False, False),
}
"""Whether tags and epochs are on."""
SCENARIOS = ("prefill", "decode", "load")
_LOWEST_TOKEN = 300
_ROUNDS_MOST = 1_000_000


@dataclass(frozen=True)
class Shape:
    """One round of requests."""

    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass
class Figures:
    """Tokens a second of every round, by scenario and side."""

    rates: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {s: {side: [] for side in SIDES} for s in SCENARIOS}
    )

    shares: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {s: {kind: [] for kind in ("tags", "epochs")} for s in SCENARIOS}
    )
    """Of the time of `all`, what is spent inside each kind of check."""

    def costs(self, scenario: str, side: str) -> list[float]:
        """What `all` lacks of the rate of `side`, round by round."""
        by_side = self.rates[scenario]
        return [1 - ours / other for ours, other in zip(by_side["all"], by_side[side], strict=True)]


class Workers:
    """A prefill and a decode worker of one model, stepped by hand."""

    def __init__(self, folder: Path, shape: Shape, threads: int, *, host: bool, device: str = "cpu") -> None:
        """`host`: with a host tier that holds all of a round. `device`: as `engine.device`."""
        tokens = 2 * shape.requests * (shape.prompt_tokens + shape.output_tokens + 64)
        sections: dict[str, Any] = {
            "engine": {"threads": threads, "device": device},
            "transfer": {"plane": "local"},
            "decode": {"max_batch_tokens": max(64, shape.requests)},
            "cache": {"device_tokens": tokens, "load_back": "always"},
        }
        if host:
            plain = config_from_dict(sections)
            units = read_model(folder).pool_set(state_options(read_model_spec(folder), plain, Role.PREFILL))
            unit = sum(units.unit_bytes(pool.name) for pool in units.pools)
            sections["prefill"] = {"cache": {"host_bytes": 2 * unit * tokens // plain.cache.page_tokens}}
        config = config_from_dict(sections)
        prefill = self._build(Role.PREFILL, folder, config)
        decode = self._build(Role.DECODE, folder, config)
        assert isinstance(prefill, PrefillWorker)
        assert isinstance(decode, DecodeWorker)
        self.prefill, self.decode = prefill, decode
        self.time_s = dict.fromkeys(Role, 0.0)
        self.checks_s = {role: {"tags": 0.0, "epochs": 0.0} for role in PAIR}
        """Of `time_s`, what was spent inside checks."""
        self._numbers = itertools.count()
        self._said: dict[RequestId, dict[int, int]] = {}

    @staticmethod
    def _build(role: Role, folder: Path, config: Config) -> object:
        model = read_model(folder)
        spec = read_model_spec(folder)
        plan = plan_memory(model.pool_set(state_options(spec, config, role)), config, role, spec.context, 1 << 40)
        assert plan is not None, "memory is no question here"
        name = WorkerName(f"{role}-0")
        return build_worker(role, name, Incarnation(1), spec, config, host="127.0.0.1", counts=plan.counts)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def ask(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Answer all prompts greedily, as `answer`."""
        self.answer(prompts, [SamplingParams(max_tokens=count, temperature=0.0)] * len(prompts))

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        between: Callable[[], bool | None] = lambda: None,
    ) -> list[list[int]]:
        """Answer all prompts, and go on until both workers are at rest; their time is in `time_s`.

        `between` is called after each round, until it returns True.
        """
        self.time_s, self._said = dict.fromkeys(Role, 0.0), {}
        self.checks_s = {role: {"tags": 0.0, "epochs": 0.0} for role in PAIR}
        asked = [self._submit(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
        open_ones, over = set(asked), False
        for _ in range(_ROUNDS_MOST):
            open_ones -= self._step(Role.PREFILL) | self._step(Role.DECODE)
            over = over or bool(between())
            idle = not any(s.running + s.waiting + s.outgoing for s in (self.prefill.status(), self.decode.status()))
            if not open_ones and idle and not self.prefill._manager.busy:
                return [[token for _, token in sorted(self._said[request].items())] for request in asked]
        raise TimeoutError(f"{len(open_ones)} requests did not end")

    def _step(self, role: Role) -> set[RequestId]:
        worker = self.prefill if role is Role.PREFILL else self.decode
        began = clock.now()
        events = worker.step()
        self.time_s[role] += clock.now() - began
        for _, event in events:
            if isinstance(event, Tokens):
                self._said[event.request_id] |= dict(enumerate(event.tokens, event.position))
        ends = [event for _, event in events if isinstance(event, Done)]
        if failed := [end for end in ends if end.error is not None]:
            raise RuntimeError(f"a request failed: {failed[0].message}")
        return {end.request_id for end in ends}

    def _submit(self, prompt: Sequence[int], sampling: SamplingParams) -> RequestId:
        number = next(self._numbers)
        request, room = RequestId(f"r{number}"), RoomId(f"room-{number}")
        self._said[request] = {}
        to_decode = PeerRef(WorkerName("decode-0"), Incarnation(1), "")
        to_prefill = PeerRef(WorkerName("prefill-0"), Incarnation(1), self.prefill.control)
        for worker, peer in ((self.prefill, to_decode), (self.decode, to_prefill)):
            worker.handle(SESSION, Submit(request, 0, room, tuple(prompt), len(prompt), sampling, peer))
        return request

    def empty_device(self) -> None:
        """What prefill's tree has stays on the host alone; decode forgets all."""
        for pool in self.prefill._manager.spec.by_name:
            self.prefill._manager.supply.evict(pool, 1 << 30)
        self.decode._manager.tree.eviction.clear()

    def forget(self) -> None:
        """Both trees are empty afterwards."""
        self.prefill._manager.tree.eviction.clear()
        self.decode._manager.tree.eviction.clear()


@contextmanager
def side(workers: Workers, *, tags: bool, epochs: bool) -> Iterator[None]:
    """Both workers with or without each kind of check, for as long as the block runs."""
    with ExitStack() as back:
        for worker in (workers.prefill, workers.decode):
            pools, engine, loader = worker._manager.pools, worker._engine, worker._manager.tiers.load_back
            digest = timed(workers, worker.role, "tags", pools.digest) if tags else _no_digest
            stale = timed(workers, worker.role, "epochs", engine._stale) if epochs else _nothing_stale
            _swap(back, pools, "digest", digest)
            _swap(back, engine, "_stale", stale)
            if isinstance(loader, LoadBack) and not tags:
                _swap(back, loader, "_verify", False)
        if not tags:
            _swap(back, workers.decode._receiver._notices._arrivals, "_verify", False)
        yield


def timed(workers: Workers, role: Role, kind: str, check: Callable[P, T]) -> Callable[P, T]:
    """`check`, with its time counted."""

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        began = clock.now()
        found = check(*args, **kwargs)
        workers.checks_s[role][kind] += clock.now() - began
        return found

    return run


def _swap(back: ExitStack, owner: object, name: str, value: object) -> None:
    getattr(owner, name)  # Raises where it is called otherwise by now: nothing would be switched off.
    before = vars(owner).get(name)
    setattr(owner, name, value)
    back.callback(lambda: setattr(owner, name, before) if before is not None else delattr(owner, name))


def _no_digest(pool: str, indices: Sequence[int], firsts: Sequence[int], ends: Sequence[int]) -> list[int]:
    return [0] * len(indices)


def _nothing_stale(ctx: ForwardContext, planned: PlannedStep) -> torch.Tensor:
    return torch.zeros(len(planned.shape.starts), dtype=torch.bool, device=ctx.positions_m.device)


def measure(folder: Path, shape: Shape, vocab: int, rounds: int, threads: int) -> Figures:
    """Round 0 warms up and counts for nothing."""
    figures = Figures()
    for host in (False, True):
        workers = Workers(folder, shape, threads, host=host)
        random, names = np.random.default_rng(1), list(SIDES)
        try:
            for number in range(rounds + 1):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    tags, epochs = SIDES[name]
                    ids = random.integers(min(_LOWEST_TOKEN, vocab // 2), vocab, (shape.requests, shape.prompt_tokens))
                    with side(workers, tags=tags, epochs=epochs):
                        rates = (loads if host else answers)(workers, ids.tolist(), shape)
                    # Pages of a side without tags must not be met by one with them.
                    workers.forget()
                    for scenario, rate in rates.items() if number else ():
                        figures.rates[scenario][name].append(rate)
                        role = Role.DECODE if scenario == "decode" else Role.PREFILL
                        for kind, spent in workers.checks_s[role].items() if name == "all" else ():
                            figures.shares[scenario][kind].append(spent / workers.time_s[role])
        finally:
            workers.close()
    return figures


def answers(workers: Workers, prompts: list[list[int]], shape: Shape) -> dict[str, float]:
    """Prompts that nobody has seen, and their answers."""
    workers.ask(prompts, shape.output_tokens)
    return {
        "prefill": shape.requests * shape.prompt_tokens / workers.time_s[Role.PREFILL],
        "decode": shape.requests * (shape.output_tokens - 1) / workers.time_s[Role.DECODE],
    }


def loads(workers: Workers, prompts: list[list[int]], shape: Shape) -> dict[str, float]:
    """Prompts that the host tier has."""
    workers.ask(prompts, 2)
    workers.empty_device()
    before = workers.prefill.status().counters["hit_tokens_host"]
    workers.ask(prompts, 2)
    found = workers.prefill.status().counters["hit_tokens_host"] - before
    total = shape.requests * shape.prompt_tokens
    if found < 0.8 * total:
        raise RuntimeError(f"the host tier had {found:.0f} of {total} tokens: nothing was measured of loads")
    return {"load": total / workers.time_s[Role.PREFILL]}


def table(title: str, figures: Figures) -> Table:
    """The rate as served, and what of it each kind of check costs."""
    out = Table(title=title, title_justify="left")
    for name in ("", "tokens/s, all", "tags", "epochs", "together", "inside tags", "inside epochs"):
        out.add_column(name, justify="right" if name else "left")
    for scenario in SCENARIOS:
        rate = statistics.median(figures.rates[scenario]["all"])
        cells = [_percent(figures.costs(scenario, other)) for other in ("no tags", "no epochs", "none")]
        inside = [f"{statistics.median(shares):.2%}" for shares in figures.shares[scenario].values()]
        out.add_row(scenario, f"{rate:,.0f}", *cells, *inside)
    return out


def _percent(costs: Sequence[float]) -> str:
    if len(costs) < 4:
        return f"{statistics.median(costs):.2%}"
    low, middle, high = statistics.quantiles(costs, n=4)
    return f"{middle:.2%} ({low:.2%} .. {high:.2%})"


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--models", nargs="+", default=["demo", "60m"], help="demo, a size that can be made, or a folder")
    out.add_argument("--requests", type=int, default=8, help="of a round, all at once")
    out.add_argument("--prompt-tokens", type=int, default=512)
    out.add_argument("--output-tokens", type=int, default=64)
    out.add_argument("--rounds", type=int, default=8)
    out.add_argument("--threads", type=int, default=1, help="torch's threads")
    out.add_argument("--clock", choices=clock.CLOCKS, default="wall", help="cpu: of the processor, for busy machines")
    out.add_argument("--json", type=Path, help="write all figures to this file")
    return out


def folder_of(name: str, made: Path) -> Path:
    if name == "demo":
        return random_model.DEMO
    return random_model.make(made / name, name) if name in random_model.SIZES else Path(name)


def run(name: str, folder: Path, args: argparse.Namespace, console: Console) -> Mapping[str, object]:
    """Measure one model, print, and return the figures."""
    spec = read_model_spec(folder)
    shape = Shape(args.requests, args.prompt_tokens, args.output_tokens)
    if shape.prompt_tokens + shape.output_tokens > spec.context:
        raise ConfigError(f"{name}: prompt and output don't fit the checkpoint's context of {spec.context}")
    figures = measure(folder, shape, spec.vocab_size, args.rounds, args.threads)
    console.print(table(f"{name}: {args.requests} requests of {args.prompt_tokens} + {args.output_tokens}", figures))
    return {"tokens_per_s": figures.rates, "shares": figures.shares}


def main(argv: list[str] | None = None) -> int:
    """0: measured; 2: wrong flags or a checkpoint that can't be used."""
    flags = parser()
    args = flags.parse_args(argv)
    if min(args.requests, args.prompt_tokens, args.rounds, args.threads) < 1 or args.output_tokens < 2:
        flags.error("all numbers must be 1 or more, --output-tokens 2 or more")
    if args.clock == "cpu" and args.threads != 1:
        flags.error("--clock cpu is fair with --threads 1 only: waiting threads may spin")
    clock.use(args.clock)
    torch.set_num_threads(args.threads)
    console = Console(width=max(150, Console().width))
    console.print(f"{machine.headline()}; time of the {'processor' if args.clock == 'cpu' else 'wall'}")
    figures = {}
    try:
        with tempfile.TemporaryDirectory(prefix="twinpool-bench-") as made:
            for name in args.models:
                figures[name] = run(name, folder_of(name, Path(made)), args, console)
    except (CheckpointError, ConfigError) as error:
        print(f"bench.verify: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        out = {"settings": settings, "machine": machine.describe(), "models": figures}
        args.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
