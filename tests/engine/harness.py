"""An engine with pages of its own, for tests: what a worker's pools and loops do, in a few lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cache.device import CpuDevice, Device
from cache.epochs import EpochTable
from cache.gate import Gate
from cache.registry import PoolSetLayout
from contracts.config import EngineConfig
from contracts.model import read_model_spec
from contracts.sampling import SamplingParams
from engine.attention import make_plan
from engine.batch import Draw, FromStep, Row, RowOutput
from engine.checkpoint import dtype_for
from engine.engine import Engine, load_engine
from engine.model import FULL_POOL, pool_set_spec
from tests.checkpoints import Oracle

MakeCheckpoint = Callable[..., Path]
"""The `checkpoint` fixture: options of `make_checkpoint` to a folder."""
MakeOracle = Callable[[Path], Oracle]
"""The `oracle_of` fixture."""
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


class Bench:
    """An engine on a checkpoint, and pages handed out in a shuffled order, their bytes filled with noise."""

    def __init__(
        self,
        folder: Path,
        page_tokens: int = 16,
        tokens: int = 4096,
        seed: int = 0,
        device: Device | None = None,
        **config: object,
    ) -> None:
        self.config = EngineConfig(**config)  # type: ignore[arg-type]
        self.spec = read_model_spec(folder)
        pool_set = pool_set_spec(self.spec, dtype_for(self.spec, self.config), page_tokens)
        pages = -(-tokens // page_tokens) + 1
        layout = PoolSetLayout(pool_set, pool_set.even(pages))
        self.region = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.buffers = layout.buffers[FULL_POOL]
        layers = [
            {b.spec.name: layout.view(self.region, FULL_POOL, b, layer) for b in self.buffers}
            for layer in range(self.spec.layers)
        ]
        generator = torch.Generator().manual_seed(seed)
        for buffers in layers:
            for view in buffers.values():
                # Stale state of earlier owners: nothing may be read from it. NaN would show in any product.
                view[1:] = torch.where(torch.rand(view[1:].shape, generator=generator) < 0.5, torch.nan, 1e4)
        self.gate = Gate(layers)
        self.layers = layers
        self.page_tokens = page_tokens
        self.free = list(range(1, pages))
        random.Random(seed).shuffle(self.free)
        self.engine: Engine = load_engine(
            self.spec, self.config, page_tokens, self.gate, EpochTable(pages), device or CpuDevice()
        )

    def lease(self, tokens: int) -> list[int]:
        """Pages for so many positions."""
        count = -(-tokens // self.page_tokens)
        pages, self.free = self.free[:count], self.free[count:]
        assert len(pages) == count, "the bench's pool is too small for this test"
        return pages

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
        pages = [self.lease(len(prompt) + count) for prompt in prompts]
        tokens = [list(prompt) for prompt in prompts]
        for i, prompt in enumerate(prompts):
            for begin in range(0, len(prompt), chunk):
                part = prompt[begin : begin + chunk]
                last = begin + len(part) == len(prompt)
                draw = Draw(params[i], tuple(tokens[i]), len(prompt)) if last else None
                (out,) = self.engine.forward([row(part, begin, pages[i], draw)])
            assert out.drawn is not None
            tokens[i].append(out.drawn.token)
        for _ in range(count - 1):
            rows = [
                row(t[-1:], len(t) - 1, pages[i], Draw(params[i], tuple(t), len(prompts[i])))
                for i, t in enumerate(tokens)
            ]
            for t, out in zip(tokens, self.engine.forward(rows), strict=True):
                assert out.drawn is not None
                t.append(out.drawn.token)
        self.free.extend(page for leased in pages for page in leased)
        return [t[len(prompt) :] for t, prompt in zip(tokens, prompts, strict=True)]

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> list[Tensor]:
        """Logits of every token of every row, [tokens, vocab] float32 each, beside the outputs' own path."""
        counts = [len(row.tokens) for row in rows]
        model = self.engine.model
        plan = make_plan(
            [r.start for r in rows], counts, [r.pages for r in rows], self.page_tokens, torch.device("cpu")
        )
        padding = [0] * (model.numerics.padded(sum(counts)) - sum(counts))
        tokens = [t for row in rows for t in row.tokens] + padding
        positions = [p for row in rows for p in range(row.start, row.start + len(row.tokens))] + padding
        x = model.forward(torch.tensor(tokens), torch.tensor(positions), max(positions) + 1, plan, self.gate)
        return list(torch.split(model.logits(x[: sum(counts)]), counts))

    def forced(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Logits of one sequence cut at the given chunk lengths, [len(tokens), vocab] float32."""
        pages = self.lease(len(tokens))
        parts, begin = [], 0
        for chunk in chunks:
            parts += self.logits([row(tokens[begin : begin + chunk], begin, pages)])
            begin += chunk
        assert begin == len(tokens)
        self.free.extend(pages)
        return torch.cat(parts)


def row(
    tokens: Sequence[int] | FromStep, start: int, pages: Sequence[int], draw: Draw | None = None, **options: Any
) -> Row:
    """A row whose pages nobody has ever freed."""
    return Row(tokens, start, pages, draw, epochs=[0] * len(pages), **options)


def outputs_tokens(outputs: Sequence[RowOutput]) -> list[int]:
    """The drawn tokens of a step in which every row drew."""
    return [out.drawn.token for out in outputs if out.drawn is not None]
