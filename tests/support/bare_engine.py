"""The engine without workers: a batch of prompts in, tokens with their times out. Greedy, of a set length."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from twinpool.cache.allocation import TableSlice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.cache.memory.memory_layout import LayoutOrder, PoolSetLayout
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner.batch import BatchRow, TokenDraw
from twinpool.engine.runner.kernel_choice import dtype_for
from twinpool.engine.runner.load_model import load_engine

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""Processor time tells how much work an engine makes of the same task, whoever else is using the machine; it is fair to
engines on one thread only, since waiting threads may spin."""
Prompts = Sequence[Sequence[int]]
_NO_END = 1 << 20


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
    ) -> None:
        """Room for so many sequences, which need pages for `tokens` positions together; on the CPU without `device`.
        `clock`: of `CLOCKS`."""
        self._now = CLOCKS[clock]
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
        self._free = {name: shuffled.sample(range(1, count), count - 1) for name, count in counts.items()}

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

    def _row(self, tokens: list[int], start: int, held: dict[str, TableSlice], draw: TokenDraw | None) -> BatchRow:
        """Tables of windows begin where the window does. No epoch ever changes: nobody frees anything."""
        tables = {}
        for pool in self.pools.spec.pools:
            seen = start - pool.window_tokens + 1 if pool.kind is PoolKind.WINDOW else 0
            first = max(0, seen) // self.pools.spec.page_tokens
            tables[pool.name] = held[pool.name]._replace(first=first)
        return BatchRow(tokens, start, tables, draw)

    def run(self, prompts: Prompts, count: int, after_step: Callable[[], None] | None = None) -> Answer:
        """As `Side.run`; `after_step` is called after each step, before the next one begins."""
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
                if out.drawn is not None:
                    tokens[i].append(out.drawn.token)
                    times[i].append(now)
            if after_step is not None:
                after_step()

        for i, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), self.chunk_tokens):
                part = list(prompt[begin : begin + self.chunk_tokens])
                last = begin + len(part) == len(prompt)
                step([i], [self._row(part, begin, held[i], draws(i) if last else None)])
        everyone = range(len(prompts))
        for _ in range(count - 1):
            step(everyone, [self._row(tokens[i][-1:], len(tokens[i]) - 1, held[i], draws(i)) for i in everyone])
        return Answer([t[len(p) :] for t, p in zip(tokens, prompts, strict=True)], times)

    def close(self) -> None: ...
