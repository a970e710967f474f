"""Captured steps of a decode worker: step graphs, where `engine.graphs` asks for them and the worker can have them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.errors import ConfigError
from twinpool.engine.runner.graphs.graph_capture import Capture, CudaCapture
from twinpool.engine.runner.graphs.step_graphs import DraftedSteps
from twinpool.engine.runner.model_runner import ModelRunner

log = logging.getLogger("twinpool.engine")
_PART_OF_START = 0.4
"""The part of `cluster.start_timeout_s` in which graphs may be begun: weights were loaded before."""


def capture_steps(
    engine: ModelRunner, config: Config, context: int, make: Callable[[torch.device], Capture] = CudaCapture
) -> None:
    """Capture the steps of a worker with contexts of up to `context` positions, before it serves.

    With ``auto`` a worker whose steps can't be captured launches them kernel by kernel, and logs why; with ``on`` that
    is a `ConfigError`.
    """
    wanted, device = config.engine.graphs, engine.device.torch_device
    if wanted == "off":
        return
    if device.type != "cuda":
        if wanted == "on":
            raise ConfigError("engine.graphs=on needs a GPU: a CPU has nothing to capture; set engine.graphs=auto")
        return
    try:
        within_s = config.cluster.start_timeout_s * _PART_OF_START
        decode = config.decode
        drafted = DraftedSteps(decode.draft_requests, decode.drafts) if decode.drafts else None
        engine.capture(make(device), rows=decode.max_batch_tokens, context=context, within_s=within_s, drafted=drafted)
    except (ConfigError, RuntimeError) as error:
        if wanted == "on":
            raise ConfigError(f"engine.graphs=on: {error!s:.300}; set engine.graphs=auto to go on without") from error
        log.warning("steps are launched kernel by kernel, slower for small batches reason=%s", f"{error!s:.300}")
