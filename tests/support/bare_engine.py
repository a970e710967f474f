"""The engine without workers: a batch of prompts in, tokens with their times out. Greedy, of a set length."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.adapters import make_adapter
from twinpool.cache.allocation import TableSlice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.cache.memory.kv_cache_spec import LayoutOrder, PoolKind, PoolSetLayout
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.checkpoint.adapter_files import adapter_ref
from twinpool.contracts.config.worker_config import AdaptersConfig, EngineConfig
from twinpool.contracts.sampling_params import AdapterRef, SamplingParams
from twinpool.engine.attention.attention_backend import undoable_positions
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner.batch import BatchRow, TokenDraw
from twinpool.engine.runner.kernel_choice import dtype_for
from twinpool.engine.runner.load_model import load_engine
from twinpool.engine.tensors.adapters import AdapterFolders, AdapterStore

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Processor time tells how much work an engine makes of the same task, whoever else is using the machine; it is fair to
engines on one thread only, since waiting threads may spin."""
Prompts = Sequence[Sequence[int]]
_NO_END = 1 << 20
RANKS = (4, 8, 8, 12, 16, 20, 32, 64)
"""Of adapters that rows have in turns."""


@dataclass(frozen=True)
class Answer:
    """What a side made of one batch. Times are seconds since the batch was given, one a token."""

    tokens: list[list[int]]
    times_s: list[list[float]]

    @property
    def prefilled_s(self) -> float:
        """When the last of the sequences had its first token."""
        return max(times[0] for times in self.times_s)

    @property
    def decode_tokens_per_s(self) -> float:
        """The rate from then on, counting what came after."""
        later = [at for times in self.times_s for at in times if at > self.prefilled_s]
        return len(later) / (max(later) - self.prefilled_s)


class Twinpool:
    """The engine without workers: prompts in chunks of 512 tokens, then steps of one token a sequence."""

    chunk_tokens = 512

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        tokens: int,
        sequences: int,
        page_tokens: int = 16,
        device: Device | None = None,
        clock: str = "wall",
        drafts: int = 0,
    ) -> None:
        """Room for so many sequences, which need pages for `tokens` positions together; on the CPU without `device`.
        `clock`: of `CLOCKS`. `drafts`: each row of a decode step has up to so many, which are all right: they are
        of an answer that is made before the clock starts."""
        self._now, self._drafts = CLOCKS[clock], drafts
        device = device or CpuDevice()
        self.name = f"twinpool, {config.numerics}"
        model = read_model(folder)
        pool_set = model.pool_set(StateOptions(dtype_for(model.spec, config), page_tokens))
        pages = -(-tokens // page_tokens)
        counts = {pool.name: 1 + (sequences if pool.kind is PoolKind.STATE else pages) for pool in pool_set.pools}
        size = PoolSetLayout(pool_set, counts, LayoutOrder.LAYER_FIRST).nbytes
        self.pools = PoolSet(pool_set, counts, torch.zeros(size, dtype=torch.uint8, device=device.torch_device))
        epochs = {pool: allocator.epochs for pool, allocator in self.pools.allocators.items()}
        self.engine = load_engine(model, config, pool_set, self.pools.gates, epochs, device)
        shuffled = random.Random(0)  # as in a pool that has been used for a while
        self._adapters: list[AdapterRef] = []
        self._free = {name: shuffled.sample(range(1, count), count - 1) for name, count in counts.items()}

    def adapt(self, checkpoint: Path, ranks: Sequence[int] = RANKS) -> None:
        """Have the sequences of each batch computed with adapters of these ranks in turns, with random factors."""
        decoder = self.engine.decoder
        with tempfile.TemporaryDirectory() as folder:
            paths = [make_adapter(Path(folder) / f"{i}", checkpoint, rank, seed=i) for i, rank in enumerate(ranks)]
            self._adapters = [adapter_ref(path.name, str(path), [folder], max(ranks)) for path in paths]
            config = AdaptersConfig(roots=folder, max_rank=max(ranks), max_loaded=len(ranks))
            device = self.engine.device.torch_device
            files = AdapterFolders(config, decoder.adapted, decoder.dtype, device, decoder.kernels)
            self.engine.adapters = AdapterStore(len(ranks), files)
            while not all([self.engine.adapters.wants(ref) for ref in self._adapters]):
                time.sleep(0.01)

    def _adapted(self, number: int, row: BatchRow) -> BatchRow:
        """The row of sequence `number` with its adapter, where sequences have some."""
        return row._replace(adapter=self._adapters[number % len(self._adapters)]) if self._adapters else row

    def _held(self, number: int, tokens: int) -> dict[str, TableSlice]:
        """What sequence `number` of a batch has of each pool, for so many positions; its states are zero."""
        each = self.pools.pages_for(tokens)
        held = {}
        for pool in self.pools.spec.pools:
            count = 1 if pool.kind is PoolKind.STATE else each
            mine = self._free[pool.name][number * count : (number + 1) * count]
            held[pool.name] = TableSlice.of(mine)
            if pool.kind is PoolKind.STATE:
                self.pools.zero({pool.name: mine})
        return held

    def _row(
        self, tokens: list[int], start: int, held: dict[str, TableSlice], draw: TokenDraw | None, drafted: int = 0
    ) -> BatchRow:
        """Tables of windows begin where the window does. No epoch ever changes: nobody frees anything."""
        tables = {}
        for pool in self.pools.spec.pools:
            seen = start - pool.window_tokens + 1 if pool.kind is PoolKind.WINDOW else 0
            first = max(0, seen) // self.pools.spec.page_tokens
            tables[pool.name] = held[pool.name]._replace(first=first)
        return BatchRow(tokens, start, tables, draw, drafted=drafted)

    def run(self, prompts: Prompts, count: int, after_step: Callable[[], None] | None = None) -> Answer:
        """As `Side.run`; `after_step` is called after each step, before the next one begins."""
        known = self._run(prompts, count, None, None).tokens if self._drafts else None
        return self._run(prompts, count, after_step, known)

    def _run(
        self, prompts: Prompts, count: int, after_step: Callable[[], None] | None, known: list[list[int]] | None
    ) -> Answer:
        """`known`: the answers, of which drafts are taken."""
        held = [self._held(i, len(prompt) + count) for i, prompt in enumerate(prompts)]
        start = self._now()
        params = SamplingParams(max_tokens=_NO_END, temperature=0.0)
        tokens = [list(prompt) for prompt in prompts]
        times: list[list[float]] = [[] for _ in prompts]

        def draws(i: int) -> TokenDraw:
            return TokenDraw(params, tokens[i], len(prompts[i]))

        def step(members: Sequence[int], rows: list[BatchRow]) -> None:
            outputs = self.engine.forward(rows)
            now = self._now() - start
            for i, out in zip(members, outputs, strict=True):
                for drawn in (*out.accepted, *([out.drawn] if out.drawn is not None else [])):
                    tokens[i].append(drawn.token)
                    times[i].append(now)
            if after_step is not None:
                after_step()

        for i, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), self.chunk_tokens):
                part = list(prompt[begin : begin + self.chunk_tokens])
                last = begin + len(part) == len(prompt)
                step([i], [self._adapted(i, self._row(part, begin, held[i], draws(i) if last else None))])
        while members := [i for i, prompt in enumerate(prompts) if len(tokens[i]) < len(prompt) + count]:
            rest = [known[i][len(tokens[i]) - len(prompts[i]) : -1] if known is not None else [] for i in members]
            step(
                members,
                [
                    self._adapted(i, self._decoded(tokens[i], left, held[i], draws(i)))
                    for i, left in zip(members, rest, strict=True)
                ],
            )
        return Answer([t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], times)

    def _decoded(self, tokens: list[int], rest: list[int], held: dict[str, TableSlice], draw: TokenDraw) -> BatchRow:
        """A row of a decode step, with drafts of the `rest` of its answer as far as they can be undone."""
        start = len(tokens) - 1
        recurrent = any(pool.kind is PoolKind.STATE for pool in self.pools.spec.pools)
        drafts = rest[: min(self._drafts, undoable_positions(start)) if recurrent else self._drafts]
        draw = draw._replace(tokens=[*tokens, *drafts]) if drafts else draw
        return self._row([tokens[-1], *drafts], start, held, draw, len(drafts))

    def close(self) -> None: ...
