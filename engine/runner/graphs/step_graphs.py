"""Step graphs: the forward passes of decode steps, captured as CUDA graphs by size when a worker starts.

A decode step launches hundreds of kernels, each of which costs the host more than it costs the GPU when the batch is
small. A captured forward pass is one launch. What a graph was captured with stays as it is: numbers of the host, grids,
addresses. So a graph is of one size, and a step is replayed by the smallest one that it fits, with padding behind its
rows: sizes go by powers of two in rows and of four in pages, and have one position a row, or as many as a row with
drafts has. Kernels were made for that: their grids come from the width of block tables, programs past a sequence's end
end at once, and no row's bits depend on the others.

What isn't replayed is launched kernel by kernel, as everything is without graphs: steps with chunks of prompts, steps
that wait for loads layer by layer, and workers of several ranks, whose sums go over the host.

A graph is tried out before it is used: under `numerics: invariant` its result must have the bits of the same step
launched kernel by kernel.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.pool.pool_set import GateDoor
from twinpool.contracts.errors import ConfigError
from twinpool.engine.attention.attention_backend import AttentionBackend
from twinpool.engine.attention.attention_plan import BackendPlan
from twinpool.engine.layers.decoder import Decoder, ForwardContext
from twinpool.engine.runner.graphs.graph_inputs import GraphInputs, GraphSize
from twinpool.engine.tensors.row_exact_linear import Numerics

Run = Callable[[], Tensor]
"""What is captured: launches kernels over tensors that stay where they are, and returns its result."""


class CapturedRun(Protocol):
    """A captured run."""

    @property
    def output(self) -> Tensor:
        """The result; each replay writes it anew, and a replay of another run of the same capture may write over it."""

    def replay(self) -> None:
        """Launch the run again on the current stream: the same kernels, over the same memory."""


Capture = Callable[[Run], CapturedRun]


class _CudaRun:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph, self.output = graph, output

    def replay(self) -> None:
        self._graph.replay()


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """A time without garbage collection. A graph that nobody has any more may wait for one in a cycle of references,
    and CUDA lets no graph be destroyed while another is captured: the capture fails."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


class CudaCapture:
    """Captures runs on one GPU. All of them share one pool of memory for what they compute on the way: only one of them
    may run at a time, and its output must be used before the next one runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> CapturedRun:
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on with calls of CUDA meanwhile.
        captured = torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local")
        with _nothing_collected(), torch.cuda.device(self._device), captured:
            output = run()
        return _CudaRun(graph, output)


log = logging.getLogger("twinpool.engine")
_FEWEST_PAGES = 16
_LOGGED = 8
"""Captures from one line of the log to the next."""


class DraftedSteps(NamedTuple):
    """How large the steps are whose rows have drafts."""

    rows: int
    """Rows of such a step, at most."""
    drafts: int
    """Drafts of one row, at most."""


def graph_sizes(rows: int, pages: int, drafted: DraftedSteps | None = None) -> list[GraphSize]:
    """The sizes of graphs for steps of up to so many rows and pages a block table, and for `drafted` ones; smallest
    first."""
    widths = [pages]
    while widths[-1] > _FEWEST_PAGES:
        widths.append(max(_FEWEST_PAGES, -(-widths[-1] // 4)))
    shapes = [(batch, 1) for batch in _doubled_to(rows)]
    if drafted is not None:
        shapes += [(batch, 1 + drafted.drafts) for batch in _doubled_to(min(rows, drafted.rows))]
    return [GraphSize(batch, width, positions) for width in reversed(widths) for batch, positions in shapes]


def _doubled_to(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n < most] + [most]


class StepGraphs:
    """The captured forward passes of one model."""

    def __init__(
        self,
        decoder: Decoder,
        numerics: Numerics,
        attention: AttentionBackend,
        spec: PoolSetSpec,
        doors: Mapping[str, GateDoor],
        device: torch.device,
        *,
        rows: int,
        context: int,
        drafted: DraftedSteps | None = None,
    ) -> None:
        """`doors`: of the pools' load gates. For steps of up to `rows` sequences in contexts of up to `context`
        positions, and for `drafted` ones."""
        self._decoder, self._numerics, self._attention, self._doors = decoder, numerics, attention, doors
        self._longest = context
        self.sizes = graph_sizes(rows, -(-context // spec.page_tokens), drafted)
        self._inputs = GraphInputs(spec, numerics, self.sizes, device)
        self._captured: dict[GraphSize, CapturedRun] = {}
        self.replayed = 0
        """Steps that were replayed."""

    def __len__(self) -> int:
        """The graphs that were captured."""
        return len(self._captured)

    def capture(self, capture: Capture, within_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """Capture all sizes, the largest first, whose memory the others reuse, and log how far it is. No new one is
        begun after `within_s` seconds: the steps of those that are left are replayed by larger ones.

        Raises `ConfigError` for a graph whose result isn't that of the step which it was captured from.
        """
        began = now()
        for size in reversed(self.sizes):
            if self._captured and now() - began >= within_s:
                log.warning("no time is left to capture more step graphs done=%d of=%d", len(self), len(self.sizes))
                return
            self._captured[size] = self._capture(size, capture)
            if len(self) % _LOGGED == 0 or len(self) == len(self.sizes):
                log.info("capturing step graphs done=%d of=%d seconds=%.1f", len(self), len(self.sizes), now() - began)

    def _capture(self, size: GraphSize, capture: Capture) -> CapturedRun:
        tokens_m, ctx = self._inputs.context(size, self._attention, self._doors, self._longest)

        def run() -> Tensor:
            ctx.scratch.clear()
            plans: list[BackendPlan] = [*ctx.plans.values(), *ctx.slots.values()]
            for plan in plans:
                plan.scratch.clear()
            return self._decoder.forward(tokens_m, ctx)

        self._inputs.try_out(size, self._decoder.embed_vh.shape[0])
        want_mh = run().clone()  # Compiles the kernels, and makes tables that grow with the longest context.
        captured = capture(run)
        captured.replay()
        if self._numerics.invariant and not torch.equal(captured.output, want_mh):
            raise ConfigError(f"a captured step of {size.tokens} tokens and {size.pages} pages computes other bits")
        return captured

    def replay(self, tokens_m: Tensor, ctx: ForwardContext) -> Tensor | None:
        """Replay a step: the last layer's output, of its tokens and then of padding, [tokens, hidden], to be used
        before the next replay. None where no graph is as large."""
        size = next((size for size in self.sizes if size in self._captured and self._inputs.fit(ctx, size)), None)
        if size is None:
            return None
        self._inputs.fill(size, tokens_m, ctx)
        self._captured[size].replay()
        self.replayed += 1
        return self._captured[size].output
