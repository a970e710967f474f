"""An engine with pages of its own, for tests: what a worker's pools and loops do, in a few lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoints import Oracle
from twinpool.cache.allocation import TableSlice
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.device.device_port import Device
from twinpool.cache.memory.kv_cache_spec import PoolKind
from twinpool.cache.pool.page_allocator import EpochTable
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.engine.models.model_base import StateOptions
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner.batch import BatchRow, RowOutput, TokenDraw, TokenFromStep
from twinpool.engine.runner.kernel_choice import dtype_for
from twinpool.engine.runner.load_model import KeptModel, load_engine
from twinpool.engine.runner.model_image import ModelImages
from twinpool.engine.runner.model_runner import ModelRunner

MakeCheckpoint = Callable[..., Path]
"""The `checkpoint` fixture: options of `make_checkpoint` to a folder."""
MakeOracle = Callable[[Path], Oracle]
"""The `oracle_of` fixture."""
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


@dataclass
class Held:
    """What one sequence has of every pool: pages from position 0 on, and slots."""

    indices: dict[str, list[int]]

    @property
    def pages(self) -> list[int]:
        return self.indices["full"]


class Bench:
    """An engine on a checkpoint, and pages handed out in a shuffled order, their bytes filled with noise."""

    def __init__(
        self,
        folder: Path,
        page_tokens: int = 16,
        tokens: int = 4096,
        seed: int = 0,
        device: Device | None = None,
        options: Mapping[str, Any] | None = None,
        images: ModelImages | None = None,
        loading: Mapping[str, Any] | None = None,
        **config: object,
    ) -> None:
        """`options` are those of the state (`StateOptions`), `config` those of the engine. `images`: where the model is
        mapped from, or shared. `loading`: further arguments of `load_engine`."""
        self.config = EngineConfig(**config)  # type: ignore[arg-type]
        self.model = read_model(folder, self.config.context, self.config.draft_model, self.config)
        self.spec = self.model.spec
        chosen = StateOptions(dtype_for(self.spec, self.config), page_tokens, **options or {})
        pool_set = self.model.pool_set(chosen)
        count = -(-tokens // page_tokens) + 1
        self.pools = PoolSet(pool_set, pool_set.even(count))
        self.region = self.pools.region
        self.buffers = self.pools.layout.buffers["full"]
        self.layers = self.views("full")
        self._generator = torch.Generator().manual_seed(seed)
        for pool in pool_set.by_name:
            # Stale state of earlier owners: nothing may be read from it. NaN would show in any product.
            self._spoil(pool, list(range(1, count)))
        self.page_tokens = page_tokens
        self._free = {pool: random.Random(seed).sample(range(1, count), count - 1) for pool in pool_set.by_name}
        epochs = {pool: EpochTable(count) for pool in pool_set.by_name}
        self.engine: ModelRunner = load_engine(
            self.model, self.config, pool_set, self.pools.gates, epochs, device or CpuDevice(), kept=KeptModel(images),
            **loading or {},
        )  # fmt: skip

    @property
    def free(self) -> list[int]:
        """Pages of the full pool that nobody has."""
        return self._free["full"]

    def views(self, pool: str) -> list[Mapping[str, Tensor]]:
        """The buffers of a pool by layer and name."""
        gate = self.pools.gates[pool]
        return [gate.layer(layer) for layer in range(len(gate))]

    def _spoil(self, pool: str, indices: list[int]) -> None:
        for buffers in self.views(pool):
            for view in buffers.values():
                noise = torch.rand((len(indices), *view.shape[1:]), generator=self._generator)
                spoilt = torch.where(noise < 0.5, torch.nan, 1e4 if view.dtype.itemsize > 1 else 100.0)
                view[indices] = spoilt.to(view.dtype)

    def lease(self, tokens: int) -> list[int]:
        """Pages of the full pool for so many positions."""
        return self._take("full", -(-tokens // self.page_tokens))

    def _take(self, pool: str, count: int) -> list[int]:
        taken, self._free[pool] = self._free[pool][:count], self._free[pool][count:]
        assert len(taken) == count, "the bench's pool is too small for this test"
        return taken

    def hold(self, tokens: int) -> Held:
        """What a new sequence of so many positions needs of every pool; its states are zero."""
        held = {}
        for pool in self.pools.spec.pools:
            if pool.kind is PoolKind.STATE:
                held[pool.name] = self._take(pool.name, 1)
                self.pools.zero({pool.name: held[pool.name]})
            else:
                held[pool.name] = self._take(pool.name, -(-tokens // self.page_tokens))
        return Held(held)

    def drop(self, held: Held) -> None:
        """Give everything back, spoilt."""
        for pool, indices in held.indices.items():
            self._spoil(pool, indices)
            self._free[pool] += indices

    def row(
        self,
        tokens: Sequence[int] | TokenFromStep,
        start: int,
        held: Held,
        draw: TokenDraw | None = None,
        **options: Any,
    ) -> BatchRow:
        """A row of a sequence. What its windows can't see any more is spoilt, as if somebody else had it."""
        others = {}
        for pool in self.pools.spec.pools:
            if pool.kind is PoolKind.STATE:
                others[pool.name] = TableSlice.of(held.indices[pool.name])
            elif pool.kind is PoolKind.WINDOW:
                first = max(0, start - pool.window_tokens + 1) // self.page_tokens
                pages = held.indices[pool.name]
                self._spoil(pool.name, pages[:first])
                others[pool.name] = TableSlice.of(pages[first:], first=first)
        return row(tokens, start, held.pages, draw, others, **options)

    def generate(self, prompt: Sequence[int], count: int, chunk: int = 1 << 20) -> list[int]:
        """Greedy tokens of one sequence alone, its prompt in chunks."""
        return self.generate_many([prompt], count, chunk)[0]

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        chunk: int = 1 << 20,
        params: Sequence[SamplingParams] | None = None,
    ) -> list[list[int]]:
        """Tokens of several sequences: prompts one after the other in chunks, then decoded as one batch."""
        params = params or [GREEDY] * len(prompts)
        held = [self.hold(len(prompt) + count) for prompt in prompts]
        tokens = [list(prompt) for prompt in prompts]
        for i, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), chunk):
                part = prompt[begin : begin + chunk]
                last = begin + len(part) == len(prompt)
                draw = TokenDraw(params[i], tuple(tokens[i]), len(prompt)) if last else None
                (out,) = self.engine.forward([self.row(part, begin, held[i], draw)])
            assert out.drawn is not None
            tokens[i].append(out.drawn.token)
        for _ in range(count - 1):
            rows = [
                self.row(t[-1:], len(t) - 1, held[i], TokenDraw(params[i], tuple(t), len(prompts[i])))
                for i, t in enumerate(tokens)
            ]
            for t, out in zip(tokens, self.engine.forward(rows), strict=True):
                assert out.drawn is not None
                t.append(out.drawn.token)
        for each in held:
            self.drop(each)
        return [t[len(prompt) :] for t, prompt in zip(tokens, prompts, strict=True)]

    @torch.inference_mode()
    def logits(self, rows: Sequence[BatchRow]) -> list[Tensor]:
        """Logits of every token of every row, [tokens, vocab] float32 each, beside the outputs' own path."""
        engine = self.engine
        ctx = engine.context(engine.plan(rows), self.pools.gates)
        tokens = [t for row in rows for t in _known(row)] + [0] * (len(ctx.positions_m) - ctx.count)
        x = engine.decoder.forward(torch.tensor(tokens), ctx)
        logits = engine.decoder.logits(x[: ctx.count], engine.numerics)
        return list(torch.split(logits, [len(_known(row)) for row in rows]))

    def forced(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Logits of one sequence cut at the given chunk lengths, [len(tokens), vocab] float32."""
        held = self.hold(len(tokens))
        parts, begin = [], 0
        for chunk in chunks:
            parts += self.logits([self.row(tokens[begin : begin + chunk], begin, held)])
            begin += chunk
        assert begin == len(tokens)
        self.drop(held)
        return torch.cat(parts)


def _known(row: BatchRow) -> Sequence[int]:
    """The tokens of a row that waits for no step."""
    assert not isinstance(row.tokens, TokenFromStep)
    return row.tokens


def row(
    tokens: Sequence[int] | TokenFromStep,
    start: int,
    pages: Sequence[int],
    draw: TokenDraw | None = None,
    others: Mapping[str, TableSlice] | None = None,
    **options: Any,
) -> BatchRow:
    """A row whose pages nobody has ever freed."""
    return BatchRow(tokens, start, {"full": TableSlice.of(pages), **(others or {})}, draw, **options)


def outputs_tokens(outputs: Sequence[RowOutput]) -> list[int]:
    """The drawn tokens of a step in which every row drew."""
    return [out.drawn.token for out in outputs if out.drawn is not None]
