"""transformers' continuous batching, asked as the workers are."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.common.engines_compared import ContinuousBatching
from tests.support.process_cluster import Served
from twinpool.contracts.config.worker_config import EngineConfig


class ContinuousRival:
    """Implements `bench.gpu.goodput.ServingSide`. Raises what transformers raises where it can't run here."""

    name = "transformers continuous"

    def __init__(self, folder: Path, tokens: int, device: torch.device, batch_tokens: int) -> None:
        config = EngineConfig()
        self._side = ContinuousBatching(folder, config, tokens, device=device, batch_tokens=batch_tokens)
        self._lock = threading.Condition()
        self._served: dict[str, Served] = {}
        self._early: dict[str, object] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._take, name="rival", daemon=True)
        self._thread.start()

    def ask(self, prompt: Sequence[int], count: int, due: float | None = None) -> Served:
        served = Served(time.perf_counter() if due is None else due, count)
        name = self._side.add(prompt, count)
        with self._lock:
            self._served[name] = served
            if name in self._early:
                self._fill(name, self._early.pop(name))
        return served

    def wait(self, served: Sequence[Served], timeout_s: float) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: all(one.over for one in served), timeout_s)

    def close(self) -> None:
        self._closing = True
        self._thread.join(10)
        self._side.close()

    def _take(self) -> None:
        while not self._closing:
            try:
                result = self._side.take(0.1)
            except RuntimeError as error:
                with self._lock:
                    for served in self._served.values():
                        served.failed = served.failed or ("" if served.over else str(error))
                    self._lock.notify_all()
                return
            if result is not None:
                with self._lock:
                    if result.request_id in self._served:
                        self._fill(result.request_id, result)
                    else:
                        self._early[result.request_id] = result

    def _fill(self, name: str, result: object) -> None:
        served = self._served[name]
        tokens, times = getattr(result, "generated_tokens"), getattr(result, "timestamps")  # noqa: B009
        served.at_s = {n: at - served.asked_at for n, at in enumerate(times or ())}
        served.tokens = dict(enumerate(tokens))
        served.failed = str(getattr(result, "error", None) or "")
        self._lock.notify_all()
