"""The capture of CUDA graphs: everything that a run launches, to be launched again in one call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

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
