"""Engines under one roof: a batch of prompts in, tokens with their times out. All greedy, all of a set length."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, LogitsProcessor

from tests.support.bare_engine import CLOCKS, Answer, Prompts
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.worker_config import EngineConfig

_RESULT_TIMEOUT_S = 120.0


class Side(Protocol):
    name: str

    def run(self, prompts: Prompts, count: int) -> Answer:
        """Exactly `count` greedy tokens after each prompt; prompts of one batch have one length."""

    def close(self) -> None: ...


class _Stamp(LogitsProcessor):  # type: ignore[misc]
    """Notes when each step's logits are there."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize(scores.device)
        self.at.append(self._now())
        return scores


def _load(folder: Path, config: EngineConfig) -> Any:
    """The model of a folder, or of a GGUF file, dequantised to bfloat16."""
    factory: Any = AutoModelForCausalLM
    if folder.is_file():
        plain: Any = GgufConfig(dequantize=True)
        read = {"gguf_file": folder.name, "quantization_config": plain, "dtype": torch.bfloat16}
        # Of some architectures it doesn't read this, and takes its default.
        if (head_dim := read_model_spec(folder).config.values.get("head_dim")) is not None:
            read["head_dim"] = head_dim
        return factory.from_pretrained(folder.parent, **read).eval()
    return factory.from_pretrained(folder, dtype=config.dtype).eval()


class Generate:
    """transformers' `generate`: one batch from start to end."""

    def __init__(
        self, folder: Path, config: EngineConfig, device: torch.device | None = None, clock: str = "wall"
    ) -> None:
        self.name, self._now = "transformers generate", CLOCKS[clock]
        self.model = _load(folder, config).to(device or torch.device("cpu"))

    def run(self, prompts: Prompts, count: int) -> Answer:
        stamp = _Stamp(self._now)
        generation: Any = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.model.device)
        start = self._now()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=generation,
            logits_processor=[stamp],
        )
        times = [at - start for at in stamp.at]
        return Answer(out[:, ids.shape[1] :].tolist(), [times for _ in prompts])

    def close(self) -> None: ...


def _batching(page_tokens: int, **options: Any) -> Any:
    """The configuration of continuous batching. What a page is called changed between versions of transformers."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    named = {field.name for field in fields(ContinuousBatchingConfig)}
    size = "page_size" if "page_size" in named else "block_size"
    factory: Any = ContinuousBatchingConfig
    return factory(**{size: page_tokens}, **options)


class ContinuousBatching:
    """transformers' continuous batching: a manager's thread that takes requests into a paged cache."""

    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        tokens: int,
        page_tokens: int = 32,
        device: torch.device | None = None,
        batch_tokens: int = 512,
    ) -> None:
        self.name = "transformers continuous"
        generation: Any = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = _batching(
            page_tokens,
            num_blocks=2 * -(-tokens // page_tokens),
            max_batch_tokens=batch_tokens,
            allow_block_sharing=False,
        )
        self._stack = ExitStack()
        self._manager = self._stack.enter_context(
            _load(folder, config)
            .to(device or torch.device("cpu"))
            .continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=batching, timeout=5
            )
        )

    def add(self, prompt: Sequence[int], count: int) -> str:
        """Ask for `count` tokens; returns the request's name. Any thread."""
        (name,) = self._manager.add_requests([list(prompt)], max_new_tokens=count, record_timestamps=True)
        return str(name)

    def take(self, timeout_s: float) -> Any:
        """Return a request that has ended, or None: its `request_id`, `generated_tokens`, `error`, and `timestamps` of
        `time.perf_counter`. Raises `RuntimeError` where the manager has ended."""
        result = self._manager.get_result(timeout=timeout_s)
        if result is not None and result.is_finished():
            return result
        if not self._manager.is_running():
            raise RuntimeError("transformers' continuous batching has ended")
        return None

    def run(self, prompts: Prompts, count: int) -> Answer:
        start = time.perf_counter()
        names = [self.add(prompt, count) for prompt in prompts]
        results: dict[str, Any] = {}
        while len(results) < len(names):
            result = self.take(1.0)
            if result is not None:
                results[result.request_id] = result
            elif time.perf_counter() - start > _RESULT_TIMEOUT_S:
                raise RuntimeError("transformers' continuous batching gave no answer")
        answers = [results[name] for name in names]
        for answer in answers:
            if answer.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {answer.error}")
        return Answer(
            [answer.generated_tokens for answer in answers],
            [[at - start for at in answer.timestamps] for answer in answers],
        )

    def close(self) -> None:
        self._stack.close()
